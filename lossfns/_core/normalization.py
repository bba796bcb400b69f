"""The one place that divides a sum by a count."""

from __future__ import annotations

import torch
from torch import Tensor

from .recorder import current_notes

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
    dtype = accumulator_dtype(device)
    if isinstance(count, Tensor):
        total = count.to(device, dtype, non_blocking=device.type != "cpu").sum().clamp(min=1)
    else:  # as_tensor would wait for the device
        total = torch.full((), max(count, 1), dtype=dtype, device=device)
    notes = current_notes()
    if notes is not None and notes.share is None:  # a loss made of losses counts before its parts do
        notes.share = own / total
    return total


def by_weights(normalize: str, *units: str) -> bool:
    """Whether a loss divides by the weights of its items instead of their number.

    Raises:
        ValueError: `normalize` is neither one of the loss's units nor "weights".
    """
    if normalize not in (*units, "weights"):
        known = ", ".join(map(repr, units))
        raise ValueError(f"normalize must be {known} or 'weights', not {normalize!r}")
    return normalize == "weights"


def weigh(count: Tensor, weights: Tensor, own: int) -> Tensor:
    """The count in units of weight: times the mean weight of the `own` items of this call.

    That is the sum of the weights, torch's weighted mean, where the call is the whole window. In a part of it (gradient
    accumulation, several processes) the mean weight of the window is not known, and that of the part stands for it.

    Args:
        count: what `item_count` returns.
        weights: weights of the items, or shares of them, of any length.
        own: items of this call.

    Returns:
        0-d float64; the plain count where no item has weight.
    """
    mean = weights.sum(dtype=count.dtype) / max(own, 1)
    return torch.where(mean > 0, count * mean, count)


def divide(values: Tensor, count: Tensor) -> Tensor:
    """Sum per-item values `(n,)` in float64 and divide them by `count`: a fresh 0-d tensor of the values' dtype."""
    return (values.sum(dtype=count.dtype) / count).to(values.dtype)


def share(values: Tensor, count: Tensor) -> Tensor:
    """The derivative of `divide(values, count)` by each of the values, `(n,)`."""
    return count.reciprocal().to(values.dtype).expand_as(values)
