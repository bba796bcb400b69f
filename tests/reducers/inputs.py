"""Logits and labels that the tests of several reducers share."""

import torch

N = -100
LABELS = torch.tensor([[1, 2, 3, 4, 5], [N, 2, 9, N, N], [N] * 5])


def normal(*shape, seed=0, dtype=torch.float64):
    return (2 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).to(dtype)
