"""What all reducers share: find the logits, align them with the labels, check what a reducer returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lossfns._core.alignment import Alignment, Selector, align, split_labels
from lossfns._core.checks import IGNORED, check_shift
from lossfns._core.hidden import HiddenStates
from lossfns._core.sources import open_source
from lossfns._core.term_loss import Source

Logits = Tensor | Sequence[Any] | Mapping[str, Any]
Labels = Tensor | Mapping[str, Tensor] | Sequence[Tensor] | None
Select = Selector | None
Hidden = HiddenStates | None
Reduced = Tensor | Mapping[str, Any]
Reducer = Callable[[Logits, Labels], Any]

SAFE_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)


def label_ids(labels: Labels) -> Tensor | None:
    """Return the label ids of what the Trainer passes (a tensor, or a dict with `labels`), or None without labels."""
    if labels is None:
        return None
    if isinstance(labels, (Tensor, Mapping)):
        return split_labels(labels)[0]
    raise TypeError(
        f"labels must be one tensor or a dict with 'labels', got {type(labels).__name__}: pack them into 'labels' in "
        "the collator and set TrainingArguments(label_names=['labels'])"
    )


def open_and_align(
    logits: Logits, labels: Labels, shift: int | None, select: Select, source: Hidden, *, scorer: str | None = None
) -> tuple[Source, Alignment]:
    """Open the source of the logits and align its rows with the labels.

    Args:
        logits: what the Trainer passes as logits.
        labels: what the Trainer passes as labels.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        select: a function of the model's outputs that returns the logits.
        source: hidden states to read instead of logits.
        scorer: name of the reducer if it scores labels; None aligns every position, labeled or not.

    Returns:
        The source, and the alignment of its rows with the scored positions.

    Raises:
        ValueError: `(B, L, V)` logits without a shift, a shift that is not an int >= 0, or no labels for a `scorer`.
    """
    ids = label_ids(labels)
    if scorer is not None and ids is None:
        raise ValueError(
            f"{scorer} scores labels, but the batch has none: add 'labels' in the collator, or use argmax or top_k"
        )
    if shift is not None:
        check_shift(shift)
    opened = open_source(logits, ids, select, source)
    if shift is None and opened.like.ndim > 2:
        raise ValueError(
            f"logits of shape {tuple(opened.like.shape)} need a shift: pass shift=1 (causal language models) or "
            "shift=0 (masked, token classification, seq2seq), as in partial(argmax, shift=1)"
        )
    if scorer is None or ids is None:
        ids = _all_positions(opened.like, ids)
    return opened, align(opened.like, ids, shift=shift or 0, padded=opened.padded)


def _all_positions(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Return labels that score every position that has a logit, of the shape of `labels`, or of the logits if None."""
    shape = logits.shape[:-1] if labels is None else labels.shape
    ids = torch.zeros(shape, dtype=torch.int32, device="cpu")
    if 0 < len(shape) < logits.ndim:
        ids[..., logits.shape[len(shape) - 1] :] = IGNORED
    return ids


def batch_rows(logits: Logits, labels: Labels) -> int:
    """Return the number of samples: rows of the first tensor with dimensions in the labels, or else in the logits."""
    for part in (labels, logits):
        for item in part.values() if isinstance(part, Mapping) else [part] if isinstance(part, Tensor) else part or ():
            if isinstance(item, Tensor) and item.ndim:
                return item.shape[0]
    raise ValueError("the model's output has no tensor: the Trainer drops the first entry of a tuple, so return a dict")


def check_rows(name: str, reduced: Any, rows: int) -> None:
    """Raise ValueError or TypeError unless every tensor has `rows` rows and a dtype that survives the Trainer.

    The Trainer cuts the first dimension to the number of samples, so that any other shape silently loses values.
    """
    if isinstance(reduced, (Mapping, tuple, list)):
        for key, value in reduced.items() if isinstance(reduced, Mapping) else enumerate(reduced):
            check_rows(f"{name}[{key!r}]", value, rows)
    elif not isinstance(reduced, Tensor):
        raise TypeError(
            f"{name} returned {type(reduced).__name__}; a reducer must return tensors, or dicts or tuples of them"
        )
    elif reduced.ndim == 0 or reduced.shape[0] != rows:
        raise ValueError(
            f"{name} returned shape {tuple(reduced.shape)} for a batch of {rows}: the first dimension must be the "
            "batch. Keep (batch, ...) and mask by labels in the metric, or sum over each row; do not flatten or average"
        )
    elif reduced.dtype not in SAFE_DTYPES:
        raise TypeError(
            f"{name} returned {reduced.dtype}: padding with -100 and the conversion to NumPy corrupt it. Return int32, "
            "int64, float32 or float64"
        )
