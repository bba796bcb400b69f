"""Units other than labels that the Trainer can be made to count: sequences and pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from .alignment import on_host, scored_places
from .checks import MARKERS
from .normalization import accumulator_dtype


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
