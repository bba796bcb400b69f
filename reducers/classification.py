"""What a metric of classes needs: probabilities, ids, or the counts of a confusion matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from lossfns._core.alignment import Selector, select_logits
from lossfns._core.checks import IGNORED
from lossfns._core.hidden import HiddenStates
from lossfns._core.normalization import accumulator_dtype
from lossfns._core.rows import compute_dtype

from ._core import Labels, Logits, label_ids, pair


@torch.no_grad()
def probabilities(
    logits: Logits, labels: Labels, *, multi_label: bool = False, select: Selector | None = None
) -> dict[str, Tensor]:
    """Probability of every class, for scores that need more than the best one.

    Args:
        logits: `(B, C)`, or the tuple the Trainer hands over.
        labels: `(B,)`, `(B, C)`, a dict with `labels`, or None; not read.
        multi_label: the sigmoid of each logit (labels that hold side by side) instead of the softmax over the classes.
        select: a function that picks the logits.

    Returns:
        `probabilities`: `(B, C)` float32 (float64 for float64 logits).

    Raises:
        ValueError: logits of another shape, or the softmax of a single logit, which is always 1.
        TypeError: ids where logits are expected.

    Example:
        >>> probabilities(torch.tensor([[0.0, 0.0]]), None)["probabilities"]
        tensor([[0.5000, 0.5000]])
    """
    found = _one_row_a_sample(logits, labels, select, "probabilities")
    if found.shape[-1] == 1 and not multi_label:
        raise ValueError("the softmax of a single logit is always 1; say multi_label=True for its sigmoid")
    found = found.to(compute_dtype(found.dtype))
    return {"probabilities": found.sigmoid() if multi_label else found.softmax(-1)}


@torch.no_grad()
def ordinal_ids(logits: Logits, labels: Labels, *, conditional: bool = False, select: Selector | None = None) -> Tensor:
    """Predicted id of ordered classes: the number of thresholds that the sample more likely than not lies above.

    Args:
        logits: one logit a threshold, `(B, K - 1)`, or the tuple the Trainer hands over.
        labels: `(B,)`, a dict with `labels`, or None; not read.
        conditional: each threshold was asked given the one before (`corn_levels`), so that chances multiply; False for
            `coral_levels`.
        select: a function that picks the logits.

    Returns:
        `(B,)` int32; -100 where a logit is NaN.

    Raises:
        ValueError: logits of another shape.
        TypeError: ids where logits are expected.

    Source:
        Cao, Mirjalili, Raschka: Rank Consistent Ordinal Regression (2020), equation 1; Shi, Cao, Raschka: Deep Neural
        Networks for Rank-Consistent Ordinal Regression Based On Conditional Probabilities (2021), section 3.4.

    Example:
        >>> ordinal_ids(torch.tensor([[2.0, 0.1], [-1.0, -2.0]]), None)
        tensor([2, 0], dtype=torch.int32)
    """
    found = _one_row_a_sample(logits, labels, select, "ordinal_ids")
    above = found.to(accumulator_dtype(found.device)).sigmoid()
    ids = ((above.cumprod(-1) if conditional else above) > 0.5).sum(-1).int()
    return ids.masked_fill(above.isnan().any(-1), IGNORED)


@torch.no_grad()
def confusion_counts(
    logits: Logits,
    labels: Labels,
    *,
    shift: int | None = None,
    select: Selector | None = None,
    source: HiddenStates | None = None,
) -> dict[str, Tensor]:
    """Confusion matrix of each sample: how often each class was taken for each other one.

    Sums of it give accuracy, precision, recall, F1 and more, whatever the batches and processes. It holds C x C numbers
    a sample: for more than some dozens of classes keep ids (`argmax`) instead.

    Args:
        logits: `(B, C)`, or `(B, L, C)` (tokens), or the tuple the Trainer hands over.
        labels: class ids `(B,)` or `(B, S)`, -100 where nothing is counted, or a dict with `labels`.
        shift: 0 for token classification; no default for `(B, L, C)` logits.
        select: a function that picks the logits.
        source: `hidden_states(model)`: read hidden states and head, the logits never exist.

    Returns:
        `confusion`: `(B, C * C)` int64, entry `true * C + predicted`; among equal logits the smaller id is predicted.
        -1 throughout, which metrics refuse, where a scored logit of the sample is NaN.

    Raises:
        ValueError: no labels, no shift, logits that do not fit the labels, a label out of range.
        TypeError: ids where logits are expected.

    Example:
        >>> confusion_counts(torch.tensor([[0.0, 1.0], [0.0, 2.0]]), torch.tensor([0, -100]))["confusion"]
        tensor([[0, 1, 0, 0],
                [0, 0, 0, 0]])
    """
    opened, pairs = pair(logits, labels, shift, select, source, scorer="confusion_counts")
    samples, classes = pairs.shape[0], opened.like.shape[-1]
    predicted = opened.statistics(pairs.rows, ("top_id",))["top_id"]
    cells = (pairs.samples * classes + pairs.rows.classes) * classes + predicted.clamp(min=0)
    counts = torch.zeros(samples * classes**2, dtype=torch.int64, device=cells.device)
    counts = counts.index_add_(0, cells, torch.ones_like(cells)).view(samples, classes**2)
    unknown = torch.zeros(samples, dtype=torch.int64, device=cells.device)
    unknown.index_add_(0, pairs.samples, (predicted == IGNORED).long())
    return {"confusion": counts.masked_fill_((unknown > 0)[:, None], -1)}


def _one_row_a_sample(logits: Logits, labels: Labels, select: Selector | None, reducer: str) -> Tensor:
    """The logits `(B, C)`, found by the rows of the labels alone: soft and multi-label ones have the logits' rank."""
    ids = label_ids(labels)
    found = select_logits(logits, None if ids is None or not ids.ndim else ids.new_zeros(len(ids)), select)
    if found.ndim != 2:
        raise ValueError(
            f"{reducer} takes logits of shape (batch, classes), got {tuple(found.shape)}; for tokens use argmax, "
            "sample_sums or confusion_counts with shift=0"
        )
    return found
