"""The one place that divides."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from ._notes import current_notes
from .alignment import on_host, scored_places

NumItems = Tensor | int | float | None

# What the Trainer may be made to count, and the extra tensor by which a loss sees that it was.
MARKERS = {"sequences": "sequence_ids", "pairs": "pair_ids"}


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


def check_unit(unit: str | None, extras: Container[str]) -> None:
    """Hold the unit a loss divides by against what its collator lets the Trainer count.

    Args:
        unit: "sequences", "pairs", or None for labels one by one.
        extras: names in the dict of labels, the collator's marker among them.

    Raises:
        ValueError: they differ; the message names the wrapper.
    """
    for counted, marker in MARKERS.items():
        if (marker in extras) == (counted == unit):
            continue
        if counted == unit:
            wrapper = "stack_pairs" if counted == "pairs" else f"count_{counted}"
            raise ValueError(
                f"the loss divides by {counted}, but the labels carry no '{marker}': the Trainer counts others. "
                f"Wrap the collator in lossfns.collators.{wrapper}(collator, shift=...)"
            )
        raise ValueError(
            f"the collator is wrapped in count_{counted}, so the Trainer counts {counted}, but the loss divides by "
            f"{unit or 'labels'}: drop the wrapper, or use a loss that divides by {counted} (normalize={counted!r})"
        )


def check_sequences(ids: Tensor, sequence_ids: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Bring labels and the marker of `count_sequences` to the host, together, and see that it tells sequences apart.

    Raises:
        ValueError: the marker is not one integer a label, or counts the sequences of a row beyond its labels.
    """
    marker, made = MARKERS["sequences"], "counted in each row from 0, as collators.count_sequences(collator) does"
    if sequence_ids.shape != ids.shape or sequence_ids.is_floating_point():
        raise ValueError(
            f"'{marker}' are {sequence_ids.dtype} {tuple(sequence_ids.shape)} for labels {tuple(ids.shape)}: they must "
            f"be integers of the labels' shape, {made}"
        )
    ids, sequence_ids = on_host(ids, sequence_ids)
    counted = sequence_ids[scored_places(ids, shift)]
    if len(counted) and not 0 <= counted.min() <= counted.max() < ids.shape[-1]:
        raise ValueError(
            f"'{marker}' go from {counted.min()} to {counted.max()} in rows of {ids.shape[-1]} labels: they must be "
            f"{made}"
        )
    return ids, sequence_ids


def check_pairs(ids: Tensor, pair_ids: Tensor) -> Tensor:
    """Bring labels `(2 n, S)` and the marker of `count_pairs` to the host, together, and see that the halves match.

    Raises:
        ValueError: a row of the first half and that of the second are not of one pair.
    """
    if pair_ids.shape == ids.shape[:1] and not pair_ids.is_floating_point():
        ids, pair_ids = on_host(ids, pair_ids)
        chosen, rejected = pair_ids.chunk(2)
        if torch.equal(chosen, rejected) and len(set(chosen.tolist())) == len(chosen):
            return ids
    raise ValueError(
        f"'{MARKERS['pairs']}' {pair_ids.tolist()} do not pair the first half of {ids.shape[0]} rows with the second, "
        "in order: the chosen rows come first, then the rejected ones, as collators.count_pairs(collator) marks them"
    )


def sequence_shares(sequence_ids: Tensor, positions: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """What each item weighs so that every sequence weighs 1.

    Args:
        sequence_ids: the sequence that an item belongs to, `(n,)`, counted in each row from 0.
        positions: its place among the flattened labels, `(n,)`.
        shape: the labels' shape, `(B, S)`.

    Returns:
        `(n,)` float64, and the number of sequences, 0-d int64. Nothing waits for the device.
    """
    places = positions.div(shape[1], rounding_mode="floor") * shape[1] + sequence_ids
    lengths = torch.zeros(shape.numel(), dtype=accumulator_dtype(places.device), device=places.device)
    lengths.index_add_(0, places, torch.ones_like(places, dtype=lengths.dtype))
    return lengths[places].reciprocal(), (lengths > 0).sum()


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
