"""Random logits, and comparisons of losses by value and gradient."""

import torch


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (2 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).to(dtype)


def gradient(loss, logits: torch.Tensor) -> torch.Tensor:
    logits = logits.detach().clone().requires_grad_()
    loss(logits).backward()
    return logits.grad


def assert_same(found, expected, logits: torch.Tensor, tolerance: float = 1e-13) -> None:
    """Assert that two functions of the logits agree in value and gradient."""
    torch.testing.assert_close(found(logits), expected(logits), rtol=0, atol=tolerance)
    torch.testing.assert_close(gradient(found, logits), gradient(expected, logits), rtol=0, atol=tolerance)
