"""Units other than labels that collators can make the Trainer count: sequences and preference pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from .alignment import on_host, scored_places
from .checks import MARKERS, describe
from .normalization import accumulator_dtype


def check_sequences(ids: Tensor, sequence_ids: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Check the marker of `collators.count_sequences`, which numbers the packed sequences of each row from 0.

    Args:
        ids: labels `(B, S)`.
        sequence_ids: the marker, `(B, S)`.
        shift: the label at `i` is predicted by the logit at `i - shift`.

    Returns:
        Both on the host, moved there in one transfer.

    Raises:
        ValueError: the marker does not hold one integer per label, or a number beyond the labels of its row, which
            would be the place of a sequence in the next row.
    """
    marker = f"'{MARKERS['sequences']}', as lossfns.collators.count_sequences(collator) returns it,"
    if sequence_ids.shape != ids.shape or sequence_ids.is_floating_point():
        raise ValueError(
            f"{marker} must hold integers of the labels' shape {tuple(ids.shape)}, got {describe(sequence_ids)}"
        )
    ids, sequence_ids = on_host(ids, sequence_ids)
    counted = sequence_ids[scored_places(ids, shift)]
    if len(counted) and not 0 <= counted.min() <= counted.max() < ids.shape[-1]:
        raise ValueError(f"{marker} must be in [0, {ids.shape[-1]}), got {counted.min()} to {counted.max()}")
    return ids, sequence_ids


def check_pairs(ids: Tensor, pair_ids: Tensor) -> Tensor:
    """Check the marker of `collators.count_pairs`, which numbers the preference pairs in both halves of a batch.

    Args:
        ids: labels `(2 n, S)`, those of the chosen sequences first.
        pair_ids: the marker, `(2 n,)`.

    Returns:
        The labels on the host, moved there in one transfer with the marker.

    Raises:
        ValueError: the halves of the marker differ, or a number occurs twice in one half.
    """
    if pair_ids.shape == ids.shape[:1] and not pair_ids.is_floating_point():
        ids, pair_ids = on_host(ids, pair_ids)
        chosen, rejected = pair_ids.chunk(2)
        if torch.equal(chosen, rejected) and len(set(chosen.tolist())) == len(chosen):
            return ids
    raise ValueError(
        f"'{MARKERS['pairs']}' must pair the first half of {ids.shape[0]} sequences with the second half in the same "
        f"order, chosen ones first, as lossfns.collators.count_pairs(collator) returns it, got {pair_ids.tolist()}"
    )


def sequence_shares(sequence_ids: Tensor, positions: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return per-token weights `1 / len(sequence)`, so that each sequence has total weight 1.

        weight[i] = 1 / number of tokens with the sequence of token i

    Args:
        sequence_ids: the sequence that each token belongs to, `(n,)`, numbered in each row from 0.
        positions: the place of each token among the flattened labels, `(n,)`.
        shape: the labels' shape, `(B, S)`.

    Returns:
        `(n,)` float64, and the number of sequences, 0-d int64. Neither waits for the device.
    """
    places = positions.div(shape[1], rounding_mode="floor") * shape[1] + sequence_ids
    lengths = torch.zeros(shape.numel(), dtype=accumulator_dtype(places.device), device=places.device)
    lengths.index_add_(0, places, torch.ones_like(places, dtype=lengths.dtype))
    return lengths[places].reciprocal(), (lengths > 0).sum()
