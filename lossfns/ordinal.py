"""Losses of ordered classes: one logit a threshold, which says whether the class lies above it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._autograd import uncompiled
from ._linear import linear_in_term
from ._soft_labels import binary_loss
from .alignment import IGNORED, Labels, Outputs, Selector, check_ids, check_range, select_logits, split_labels
from .normalization import NumItems, item_count
from .terms import Term, check_options, cross_entropy

Levels = Callable[[Tensor, int], Tensor]


def coral_levels(labels: Tensor, thresholds: int) -> Tensor:
    """Whether each class lies above each threshold.

    Args:
        labels: class ids, `(n,)`, 0 to `thresholds`.
        thresholds: their number, one less than classes.

    Returns:
        `(n, thresholds)` int64, 0 or 1.

    Source:
        Cao, Mirjalili, Raschka: Rank Consistent Ordinal Regression for Neural Networks with Application to Age
        Estimation (2020), equation 4.

    Example:
        >>> coral_levels(torch.tensor([0, 1, 3]), 3).tolist()
        [[0, 0, 0], [1, 0, 0], [1, 1, 1]]
    """
    return (labels[:, None] > torch.arange(thresholds, device=labels.device)).long()


def corn_levels(labels: Tensor, thresholds: int) -> Tensor:
    """Whether each class lies above each threshold, given that it lies above the one before; -100 where it does not.

    Args:
        labels: class ids, `(n,)`, 0 to `thresholds`.
        thresholds: their number, one less than classes.

    Returns:
        `(n, thresholds)` int64: 0, 1 or -100.

    Source:
        Shi, Cao, Raschka: Deep Neural Networks for Rank-Consistent Ordinal Regression Based On Conditional
        Probabilities (2021), section 3.3.

    Example:
        >>> corn_levels(torch.tensor([0, 1, 3]), 3).tolist()
        [[0, -100, -100], [1, 0, -100], [1, 1, 1]]
    """
    levels = torch.arange(thresholds, device=labels.device)
    return coral_levels(labels, thresholds).masked_fill(labels[:, None] < levels, IGNORED)


@linear_in_term()
@uncompiled
def ordinal_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    levels: Levels = coral_levels,
    term: Term = cross_entropy,
    select: Selector | None = None,
) -> Tensor:
    """Sum of a term over the thresholds between ordered classes, mean over samples.

    A model for K classes returns K - 1 logits. CORAL asks that they share their weights and differ in their biases;
    CORN asks for nothing. CORN's paper divides by the number of thresholds asked in a batch, which differs between
    batches; here samples are counted, for both, so that gradient accumulation changes nothing.

    Args:
        outputs: what the model returned: a ModelOutput or dict with `logits`, a tuple, or logits `(B, K - 1)`.
        labels: class ids `(B,)`, 0 to K - 1, -100 where a label is missing; or `{"labels": ids, name: extra}`.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms; None counts
            those of this call.
        levels: what is asked of each threshold: `coral_levels` or `corn_levels`.
        term: what is minimised a threshold, as in `multi_label_loss`.
        select: a function of `outputs` that picks the logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats a sample for cross-entropy; 0 with a live graph when every label
        is missing.

    Raises:
        ValueError: labels are missing, out of range or of another shape.
        TypeError: labels are not integers; the term asks for something unknown; levels have no such option.

    Source:
        See `coral_levels` and `corn_levels`.

    Example:
        >>> ordinal_loss(torch.zeros(1, 3), torch.tensor([1]), levels=corn_levels)
        tensor(1.3863)
    """
    check_options(levels, "levels")
    ids, extras = split_labels(labels)
    logits = select_logits(outputs, ids, select)
    check_ids(ids)
    if ids.ndim != 1 or logits.ndim != 2 or logits.shape[0] != ids.shape[0]:
        raise ValueError(
            f"logits {tuple(logits.shape)} and labels {tuple(ids.shape)} do not fit: expected class ids (batch,) and "
            "one logit a threshold, (batch, classes - 1)"
        )
    host, thresholds = ids.detach().cpu().long(), logits.shape[-1]
    scored = host != IGNORED
    check_range(host[scored], thresholds + 1)
    asked = torch.full(logits.shape, IGNORED, device="cpu")
    found = levels(host[scored], thresholds)
    if found.shape != (int(scored.sum()), thresholds):
        raise ValueError(f"levels returned {tuple(found.shape)}, not one of {thresholds} thresholds for each label")
    asked[scored] = found
    return binary_loss(logits, asked, extras, item_count(num_items_in_batch, int(scored.sum()), logits.device), term)
