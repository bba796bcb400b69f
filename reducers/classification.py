"""Probabilities, ids of ordered classes, and confusion matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from lossfns._core.alignment import select_logits
from lossfns._core.checks import IGNORED
from lossfns._core.normalization import accumulator_dtype
from lossfns._core.rows import compute_dtype

from ._core import Hidden, Labels, Logits, Select, label_ids, open_and_align


@torch.no_grad()
def probabilities(
    logits: Logits, labels: Labels, *, multi_label: bool = False, select: Select = None
) -> dict[str, Tensor]:
    """Return the probability of every class, for metrics that need more than the predicted class.

        probabilities = softmax(logits)      or, with multi_label,      1 / (1 + exp(-logits))

    Args:
        logits: `(B, C)` float, or the tuple or dict that the Trainer passes.
        labels: `(B,)` or `(B, C)`, a dict with `labels`, or None; only the number of rows is used.
        multi_label: apply the sigmoid to each logit (several classes may be right) instead of the softmax.
        select: a function of the model's outputs that returns the logits.

    Returns:
        `probabilities`: `(B, C)` float32 (float64 for float64 logits).

    Raises:
        ValueError: the logits have another shape, or the softmax of a single logit, always 1, is requested.
        TypeError: token ids are passed as logits.

    References:
        Bridle, "Probabilistic Interpretation of Feedforward Classification Network Outputs, with Relationships to
        Statistical Pattern Recognition", 1990, https://doi.org/10.1007/978-3-642-76153-9_28

    Example:
        >>> probabilities(torch.tensor([[0.0, 0.0]]), None)["probabilities"]
        tensor([[0.5000, 0.5000]])
    """
    found = _sample_logits(logits, labels, select, "probabilities")
    if found.shape[-1] == 1 and not multi_label:
        raise ValueError("the softmax of a single logit is always 1; pass multi_label=True for its sigmoid")
    found = found.to(compute_dtype(found.dtype))
    return {"probabilities": found.sigmoid() if multi_label else found.softmax(-1)}


@torch.no_grad()
def ordinal_ids(logits: Logits, labels: Labels, *, conditional: bool = False, select: Select = None) -> Tensor:
    """Return the predicted class of ordered classes: the number of thresholds exceeded with probability above 0.5.

        id = sum_k [P(y > k) > 0.5],  P(y > k) = sigmoid(logits[k])  or, conditional,  prod_{j <= k} sigmoid(logits[j])

    Args:
        logits: one logit per threshold, `(B, K - 1)` float, or the tuple or dict that the Trainer passes.
        labels: `(B,)`, a dict with `labels`, or None; only the number of rows is used.
        conditional: True if the model was trained with `corn_levels`, where each probability is conditional on the
            threshold before; False for `coral_levels`.
        select: a function of the model's outputs that returns the logits.

    Returns:
        `(B,)` int32; -100 where a logit is NaN.

    Raises:
        ValueError: the logits have another shape.
        TypeError: token ids are passed as logits.

    References:
        Cao, Mirjalili, Raschka, "Rank consistent ordinal regression for neural networks with application to age
        estimation", 2020, equation 1 (CORAL), https://arxiv.org/abs/1901.07884

        Shi, Cao, Raschka, "Deep Neural Networks for Rank-Consistent Ordinal Regression Based On Conditional
        Probabilities", 2021, section 3.4 (CORN), https://arxiv.org/abs/2111.08851

    Example:
        >>> ordinal_ids(torch.tensor([[2.0, 0.1], [-1.0, -2.0]]), None)
        tensor([2, 0], dtype=torch.int32)
    """
    found = _sample_logits(logits, labels, select, "ordinal_ids")
    above = found.to(accumulator_dtype(found.device)).sigmoid()
    ids = ((above.cumprod(-1) if conditional else above) > 0.5).sum(-1).int()
    return ids.masked_fill(above.isnan().any(-1), IGNORED)


@torch.no_grad()
def confusion_counts(
    logits: Logits, labels: Labels, *, shift: int | None = None, select: Select = None, source: Hidden = None
) -> dict[str, Tensor]:
    """Return the confusion matrix of each sample: how often each class was predicted for each true class.

    Its sums give accuracy, precision, recall, F1 and more, for any batch size and number of processes. It holds `C * C`
    numbers per sample; for more than some dozens of classes, keep the ids instead (`argmax`).

    Args:
        logits: `(B, C)` or, for tokens, `(B, L, C)` float, or the tuple or dict that the Trainer passes.
        labels: class ids `(B,)` or `(B, S)`, or a dict with `labels`; -100 is not counted.
        shift: 0 for token classification; required for `(B, L, C)` logits.
        select: a function of the model's outputs that returns the logits.
        source: `hidden_states(model)`, to read hidden states and the head instead of logits.

    Returns:
        `confusion`: `(B, C * C)` int64, number of labels at entry `true * C + predicted`; among equal logits, the
        smaller id is predicted. All entries of a sample are -1, which metrics reject, if a scored logit is NaN.

    Raises:
        ValueError: labels or `shift` are missing, the logits do not fit the labels, or a label is out of range.
        TypeError: token ids are passed as logits.

    Example:
        >>> confusion_counts(torch.tensor([[0.0, 1.0], [0.0, 2.0]]), torch.tensor([0, -100]))["confusion"]
        tensor([[0, 1, 0, 0],
                [0, 0, 0, 0]])
    """
    opened, aligned = open_and_align(logits, labels, shift, select, source, scorer="confusion_counts")
    samples, classes = aligned.shape[0], opened.like.shape[-1]
    predicted = opened.statistics(aligned.rows, ("top_id",))["top_id"]
    cells = (aligned.samples * classes + aligned.rows.labels) * classes + predicted.clamp(min=0)
    counts = torch.zeros(samples * classes**2, dtype=torch.int64, device=cells.device)
    counts = counts.index_add_(0, cells, torch.ones_like(cells)).view(samples, classes**2)
    unknown = torch.zeros(samples, dtype=torch.int64, device=cells.device)
    unknown.index_add_(0, aligned.samples, (predicted == IGNORED).long())
    return {"confusion": counts.masked_fill_((unknown > 0)[:, None], -1)}


def _sample_logits(logits: Logits, labels: Labels, select: Select, reducer: str) -> Tensor:
    """Return the logits `(B, C)`; only the rows of the labels identify them, as soft labels have the logits' rank."""
    ids = label_ids(labels)
    found = select_logits(logits, None if ids is None or not ids.ndim else ids.new_zeros(len(ids)), select)
    if found.ndim != 2:
        raise ValueError(
            f"{reducer} takes logits of shape (batch, classes), got {tuple(found.shape)}; for tokens use argmax, "
            "sample_sums or confusion_counts with shift=0"
        )
    return found
