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


def assert_precise(loss, reference, logits: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Assert that the float64 error of the loss and its gradient is at most that of the reference in float32."""
    true, usual, found = reference(logits.double()), reference(logits.float()), loss(logits)
    assert found.dtype == torch.float32
    assert abs(found - true) <= abs(usual - true) + tolerance
    true = gradient(reference, logits.double())
    usual, found = gradient(lambda x: reference(x.float()), logits), gradient(loss, logits)
    assert found.dtype == logits.dtype
    assert (found - true).abs().max() <= (usual - true).abs().max() + 1e-6
