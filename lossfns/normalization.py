"""The one place that divides."""

from __future__ import annotations

import torch
from torch import Tensor

NumItems = Tensor | int | float | None


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it: sums over a batch and counts are kept in it."""
    return torch.float32 if device.type == "mps" else torch.float64


def item_count(num_items_in_batch: NumItems, own: int | Tensor, device: torch.device) -> Tensor:
    """The number a sum over items is divided by.

    Args:
        num_items_in_batch: what the Trainer hands to a loss: None (then `own` counts), an int, or a tensor of any
            shape and device; under DataParallel `(n_gpu, 1)`, whose sum undoes the Trainer's later average.
        own: items of this call.
        device: where the loss lives.

    Returns:
        0-d float64, never below 1: a window without items gives 0, not NaN.

    Raises:
        TypeError: not a number.
    """
    count = own if num_items_in_batch is None else num_items_in_batch
    if isinstance(count, bool) or not isinstance(count, (int, float, Tensor)):
        raise TypeError(f"num_items_in_batch must be None, a number or a tensor, not {type(count).__name__}")
    return torch.as_tensor(count, dtype=accumulator_dtype(device), device=device).sum().clamp(min=1)


def divide(values: Tensor, count: Tensor) -> Tensor:
    """Sum per-item values `(n,)` in float64 and divide them by `count`: a fresh 0-d tensor of the values' dtype."""
    return (values.sum(dtype=count.dtype) / count).to(values.dtype)
