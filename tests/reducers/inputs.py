"""Logits and labels that the tests of several reducers share."""

import torch

N = -100
B, S, V = 4, 6, 13
LABELS = torch.tensor([[4, 0, 12, 3, 9, 1], [N, N, 5, N, 2, N], [N, 7, 8, 11, N, N], [N] * 6])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (2 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).to(dtype)


def tied(*shape: int) -> torch.Tensor:
    """Return logits with many ties, also for the largest one."""
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(0)).float()
