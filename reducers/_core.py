"""What every reducer shares: find the logits, pair them with labels, put one value at each label's place."""

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
Reduced = Tensor | Mapping[str, Any]
Reducer = Callable[[Logits, Labels], Any]

SAFE_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)


def label_ids(labels: Labels) -> Tensor | None:
    """The label ids out of what the Trainer hands over: a tensor, a dict with `labels`, or None."""
    if labels is None:
        return None
    if isinstance(labels, (Tensor, Mapping)):
        return split_labels(labels)[0]
    raise TypeError(
        f"labels are a {type(labels).__name__}; a token-level reducer needs one tensor: pack them "
        "into 'labels' in the collator and set TrainingArguments(label_names=['labels'])"
    )


def pair(
    logits: Logits,
    labels: Labels,
    shift: int | None,
    select: Selector | None,
    source: HiddenStates | None,
    *,
    scorer: str | None = None,
) -> tuple[Source, Alignment]:
    """Open the source of the logits and pair its rows with labels.

    Args:
        logits: what the Trainer hands over.
        labels: what the Trainer hands over.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        select: a function that picks the logits.
        source: hidden states instead of logits.
        scorer: name of a reducer that scores labels; None pairs every position, labelled or not.

    Raises:
        ValueError: `(B, L, V)` logits without a shift, one that is no number of places, or no labels where they are
            scored.
    """
    ids = label_ids(labels)
    if scorer is not None and ids is None:
        raise ValueError(
            f"{scorer} scores labels, but the batch has none (an unlabelled set?); argmax and top_k need none"
        )
    if shift is not None:
        check_shift(shift)
    opened = open_source(logits, ids, select, source)
    if shift is None and opened.like.ndim > 2:
        raise ValueError(
            f"logits of shape {tuple(opened.like.shape)} need a shift: say shift=1 (causal language models) or shift=0 "
            "(masked, token classification, seq2seq), as in partial(argmax, shift=1)"
        )
    if scorer is None or ids is None:
        ids = _everywhere(opened.like, ids)
    return opened, align(opened.like, ids, shift=shift or 0, padded=opened.padded)


def _everywhere(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Labels that score every position a logit may predict; without labels, as many as there are logits."""
    shape = logits.shape[:-1] if labels is None else labels.shape
    ids = torch.zeros(shape, dtype=torch.int32, device="cpu")
    if 0 < len(shape) < logits.ndim:
        ids[..., logits.shape[len(shape) - 1] :] = IGNORED
    return ids


def batch_rows(logits: Logits, labels: Labels) -> int:
    """Samples in this batch, by the labels, or by the first tensor of the logits that has dimensions."""
    for part in (labels, logits):
        for item in part.values() if isinstance(part, Mapping) else [part] if isinstance(part, Tensor) else part or ():
            if isinstance(item, Tensor) and item.ndim:
                return item.shape[0]
    raise ValueError("no tensor in the model's output: a model returning a plain tuple loses its logits; return a dict")


def check_rows(name: str, reduced: Any, rows: int) -> None:
    """Raise ValueError unless every tensor has the batch as its first dimension.

    The Trainer cuts the first dimension to the rows of the dataset: anything else loses items without a word.
    """
    if isinstance(reduced, Mapping):
        for key, value in reduced.items():
            check_rows(f"{name}[{key!r}]", value, rows)
    elif isinstance(reduced, (tuple, list)):
        for place, value in enumerate(reduced):
            check_rows(f"{name}[{place}]", value, rows)
    elif not isinstance(reduced, Tensor):
        raise TypeError(
            f"{name} returned {type(reduced).__name__}; a reducer returns tensors, or dicts or tuples of them"
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
