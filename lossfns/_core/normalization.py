"""Turn the Trainer's count into the divisor of a loss, and divide by it."""

from __future__ import annotations

import torch
from torch import Tensor

from .recorder import ACTIVE

NumItems = Tensor | int | float | None


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Return float64 where the device has it: the dtype of sums over a batch and of counts."""
    return torch.float32 if device.type == "mps" else torch.float64


def item_count(num_items_in_batch: NumItems, local_count: int | Tensor, device: torch.device) -> Tensor:
    """Return the number that a sum over labels is divided by.

    Args:
        num_items_in_batch: what the Trainer passes to a loss: None (then `local_count` is used), a number, or a tensor
            of any shape and device. Under DataParallel it is `(n_gpu, 1)`; its sum undoes the Trainer's later average.
        local_count: number of labels (or sequences, or pairs) of this call.
        device: device of the loss.

    Returns:
        0-d float64, at least 1: a window without labels gives a loss of 0, not NaN.

    Raises:
        TypeError: the count is not a number.
    """
    count = local_count if num_items_in_batch is None else num_items_in_batch
    if isinstance(count, bool) or not isinstance(count, (int, float, Tensor)):
        raise TypeError(f"num_items_in_batch must be None, a number or a tensor, got {type(count).__name__}")
    dtype = accumulator_dtype(device)
    if isinstance(count, Tensor):
        total = count.to(device, dtype, non_blocking=device.type != "cpu").sum().clamp(min=1)
    else:  # as_tensor would wait for the device
        total = torch.full((), max(count, 1), dtype=dtype, device=device)
    recorder = ACTIVE.get()
    if recorder is not None and recorder.share is None:  # a loss made of losses counts before its parts do
        recorder.share = local_count / total
    return total


def weighted_count(count: Tensor, weights: Tensor, local_count: int) -> Tensor:
    """Return the count times the mean weight of this call.

    This is the sum of the weights, as in torch's weighted mean, if the call is the whole window. In a part of a window
    (gradient accumulation, several processes) the mean weight of the window is unknown, and that of the part is used.

    Args:
        count: the result of `item_count`.
        weights: weights of the labels, or parts of them, of any length.
        local_count: number of labels of this call.

    Returns:
        0-d float64; the plain count if all weights are 0.
    """
    mean = weights.sum(dtype=count.dtype) / max(local_count, 1)
    return torch.where(mean > 0, count * mean, count)


def divide(values: Tensor, count: Tensor) -> Tensor:
    """Return the sum of values `(n,)`, taken in float64, divided by `count`: a new 0-d tensor of the values' dtype."""
    return (values.sum(dtype=count.dtype) / count).to(values.dtype)


def share_of(values: Tensor, count: Tensor) -> Tensor:
    """Return the derivative of `divide(values, count)` by each of the values, `(n,)`."""
    return count.reciprocal().to(values.dtype).expand_as(values)
