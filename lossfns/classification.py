"""Losses of classifiers for the Trainer's `compute_loss_func`: single-label, multi-label and ordinal classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ._core.alignment import Labels, Outputs, Selector, align, select_logits, split_labels
from ._core.autograd import disable_compile
from ._core.checks import (
    IGNORED,
    ClassValues,
    check_ids,
    check_normalize,
    check_range,
    check_smoothing,
    class_table,
)
from ._core.normalization import NumItems, item_count
from ._core.rows import compute_dtype
from ._core.signature import Term, check_options, name_of
from ._core.soft_labels import binary_loss, certain_rows, soft_loss, soft_rows
from ._core.sources import FromLogits
from ._core.term_loss import label_loss
from .combine import class_weighted
from .terms import cross_entropy, smoothed_cross_entropy

Normalize = Literal["items", "weights"]
NormalizeTokens = Literal["tokens", "weights"]


def classification_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    term: Term = cross_entropy,
    class_weights: ClassValues | None = None,
    label_smoothing: float = 0.0,
    logit_adjustment: ClassValues | None = None,
    margins: ClassValues | None = None,
    normalize: Normalize = "items",
    select: Selector | None = None,
) -> Tensor:
    """Mean of a term over samples of one class each, exact under gradient accumulation and processes.

    Texts, images, sounds and multiple choice alike. Soft labels (mixup, several raters) are distributions over the
    classes; the term is then expected over them, which for cross-entropy is the usual soft cross-entropy.

    Args:
        outputs: what the model returned: a ModelOutput or dict with `logits`, a tuple, or logits `(B, C)`.
        labels: class ids `(B,)`, -100 where a label is missing; or soft labels, floats `(B, C)` with rows that add up
            to 1 or are -100 throughout; or `{"labels": either, name: extra}`.
        num_items_in_batch: the Trainer's count over the accumulation window, in any of its forms: samples, and samples
            times classes for soft labels. None counts this call.
        term: what is minimised a sample.
        class_weights: one weight a class, `(C,)`: short for `class_weighted(term, class_weights)`.
        label_smoothing: mass spread evenly over the classes, for cross-entropy. Together with class weights it is
            torch's: each class that receives mass costs its own weight. `class_weighted(partial(smoothed_cross_entropy,
            label_smoothing=...), weights)` is the other meaning, the weight of the label times the smoothed loss. A
            class of logit -inf gets none of the mass, but costs infinitely much under class weights.
        logit_adjustment: added to the logits, `(C,)`: log-priors of the classes, times a temperature, train logits
            that are right for balanced classes.
        margins: taken off the logit of a sample's own class, `(C,)`; see `ldam_margins`.
        normalize: divide by the number of "items", also where they are weighted, or by their "weights" before
            smoothing: torch's weighted mean, exact without gradient accumulation in one process only.
        select: a function of `outputs` that picks the logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats a sample for cross-entropy; 0 with a live graph when every label
        is missing.

    Raises:
        ValueError: labels are missing, out of range, no distribution or of another shape; options that do not fit
            the number of classes or each other.
        TypeError: hard labels are not integers; the term asks for something unknown.

    Source:
        Szegedy et al.: Rethinking the Inception Architecture (2016), for label smoothing; Zhang, Cisse, Dauphin,
        Lopez-Paz: mixup (2018); Menon, Jayasumana, Rawat, Jain, Veit, Kumar: Long-Tail Learning via Logit Adjustment
        (2021), equation 10; Cao, Wei, Gaidon, Arechiga, Ma: LDAM (2019), equation 12, for margins.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
        >>> classification_loss({"logits": logits}, torch.tensor([0, 1]), class_weights=[1.0, 3.0])
        tensor(1.1032)
        >>> classification_loss(logits, torch.tensor([[0.5, 0.5], [-100.0, -100.0]]))
        tensor(1.1269)
    """
    options = term, class_weights, label_smoothing, logit_adjustment, margins, normalize, select
    return _class_loss(outputs, labels, num_items_in_batch, 1, *options)


def token_classification_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    term: Term = cross_entropy,
    class_weights: ClassValues | None = None,
    label_smoothing: float = 0.0,
    logit_adjustment: ClassValues | None = None,
    margins: ClassValues | None = None,
    normalize: NormalizeTokens = "tokens",
    select: Selector | None = None,
) -> Tensor:
    """Mean of a term over the labelled tokens: `classification_loss` with logits `(B, S, C)` and labels `(B, S)`.

    Its items are tokens, and `normalize` says "tokens" or "weights", as for language models.

    Example:
        >>> import torch
        >>> token_classification_loss(torch.zeros(1, 3, 4), torch.tensor([[-100, 2, -100]]))
        tensor(1.3863)
    """
    options = term, class_weights, label_smoothing, logit_adjustment, margins, normalize, select
    return _class_loss(outputs, labels, num_items_in_batch, 2, *options)


@disable_compile
def _class_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems,
    dimensions: int,
    term: Term,
    class_weights: ClassValues | None,
    label_smoothing: float,
    logit_adjustment: ClassValues | None,
    margins: ClassValues | None,
    normalize: Normalize | NormalizeTokens,
    select: Selector | None,
) -> Tensor:
    """What both share: soft labels, and smoothing under class weights, are expectations; the rest is the kernel's."""
    ids, extras = split_labels(labels)
    soft = ids.is_floating_point() and ids.ndim == dimensions + 1
    logits = select_logits(outputs, ids[..., 0] if soft else ids, select)
    _check_shapes(logits, ids, dimensions, soft)
    ids = ids.detach().cpu()  # once for all that reads them
    logits = _adjusted(logits, logit_adjustment)
    if margins is not None:
        logits = _lowered(logits, None if soft else ids, margins)
    units = ["items" if dimensions == 1 else "tokens"]
    together = label_smoothing != 0.0 and class_weights is not None
    term = _with_options(term, class_weights, label_smoothing)
    if not soft and not together:
        return label_loss(FromLogits(logits), ids, extras, num_items_in_batch, term, normalize=normalize, units=units)
    check_normalize(normalize, units, extras)
    rows = soft_rows(ids) if soft else certain_rows(align(logits, ids, shift=0), ids, logits.shape[-1])
    size = logits.shape[-1] if soft else 1  # of what the Trainer counts for one item
    count = item_count(num_items_in_batch, len(rows.rows) * size, logits.device) / size
    smoothing = label_smoothing if together else 0.0
    return soft_loss(logits, rows, extras, count, term, label_smoothing=smoothing, weighted=normalize == "weights")


def _with_options(term: Term, class_weights: ClassValues | None, label_smoothing: float) -> Term:
    check_smoothing(label_smoothing)
    if label_smoothing and term is not cross_entropy:
        raise ValueError(
            f"label_smoothing is defined for cross_entropy, not for {name_of(term)}; combine them by name: "
            "weighted_sum((0.5, term), (0.5, partial(smoothed_cross_entropy, label_smoothing=...)))"
        )
    if label_smoothing and class_weights is None:
        return partial(smoothed_cross_entropy, label_smoothing=label_smoothing)
    return term if class_weights is None else class_weighted(term, class_weights)


def _check_shapes(logits: Tensor, labels: Tensor, dimensions: int, soft: bool) -> None:
    items = "(batch,)" if dimensions == 1 else "(batch, tokens)"
    wanted = labels.shape if soft else (*labels.shape, *logits.shape[-1:])
    if logits.ndim != dimensions + 1 or logits.shape != wanted:
        raise ValueError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not fit: expected class ids {items}, or "
            f"float soft labels of the logits' shape, and logits ({items[1:-1].rstrip(',')}, classes). Labels that "
            "hold side by side go to multi_label_loss, labels of tokens to token_classification_loss"
        )


def _by_class(values: ClassValues, name: str, logits: Tensor, *, smallest: float = -math.inf) -> Tensor:
    """One number of at least `smallest` a class of the logits, `(C,)` float64 on the host."""
    table = class_table(values, name, smallest=smallest)
    if table.numel() != logits.shape[-1]:
        raise ValueError(f"{name} is for {table.numel()} classes, the logits have {logits.shape[-1]}")
    return table


def _adjusted(logits: Tensor, logit_adjustment: ClassValues | None) -> Tensor:
    if logit_adjustment is None:
        return logits
    x = logits.to(compute_dtype(logits.dtype))
    return x + _by_class(logit_adjustment, "logit_adjustment", logits).to(x.device, x.dtype, non_blocking=True)


def _lowered(logits: Tensor, ids: Tensor | None, margins: ClassValues) -> Tensor:
    if ids is None:
        raise ValueError("margins are taken off the logit of the one right class; soft labels have none")
    table = _by_class(margins, "margins", logits)
    rows = align(logits, ids, shift=0).rows
    x = logits.to(compute_dtype(logits.dtype)).flatten(0, -2)
    taken_off = table.to(x.device, x.dtype, non_blocking=True)[rows.labels]
    return x.index_put((rows.on_device, rows.labels), -taken_off, accumulate=True).view(logits.shape)


@disable_compile
def multi_label_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    term: Term = cross_entropy,
    pos_weight: ClassValues | None = None,
    label_smoothing: float = 0.0,
    select: Selector | None = None,
) -> Tensor:
    """Mean of a term over labels that hold side by side, one logit each: binary cross-entropy and its relatives.

    Args:
        outputs: what the model returned: a ModelOutput or dict with `logits`, a tuple, or logits `(B, C)`.
        labels: `(B, C)`, integer or float: 1 present, 0 absent, between them a chance, -100 missing; or
            `{"labels": labels, name: extra}`.
        num_items_in_batch: the Trainer's count of labels that are not -100 over the accumulation window, in any of its
            forms; None counts those of this call.
        term: a function of the `log_prob` of what the label says, and of `outcome` (bool, whether it says present):
            `cross_entropy`, `focal`, `asymmetric`, ...
        pos_weight: weight of present labels, `(C,)`; see `balanced_pos_weight`.
        label_smoothing: mass spread evenly over present and absent.
        select: a function of `outputs` that picks the logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats a label for cross-entropy; 0 with a live graph when every label
        is missing.

    Raises:
        ValueError: labels are missing, of another shape or outside 0 to 1; `pos_weight` is negative or does not fit the
            classes.
        TypeError: the term asks for something unknown.

    Source:
        Szegedy et al.: Rethinking the Inception Architecture (2016), for label smoothing, here over two outcomes.

    Example:
        >>> import torch
        >>> multi_label_loss(torch.tensor([[2.0, 0.0, 5.0]]), torch.tensor([[1, 0, -100]]))
        tensor(0.4100)
    """
    targets, extras = split_labels(labels)
    logits = select_logits(outputs, targets[..., 0] if targets.ndim > 1 else targets, select)
    if targets.shape != logits.shape or not targets.ndim:
        raise ValueError(
            f"logits {tuple(logits.shape)} and labels {tuple(targets.shape)} do not fit: expected labels 0 or 1 of the "
            "logits' shape (batch, labels); class ids go to classification_loss"
        )
    check_smoothing(label_smoothing)
    weight = None if pos_weight is None else _by_class(pos_weight, "pos_weight", logits, smallest=0.0)
    host = targets.detach().cpu()
    wrong = (host != IGNORED) & ~((host >= 0) & (host <= 1))
    if bool(wrong.any()):
        raise ValueError(
            f"label {host[wrong][0].item()} is neither present (1) nor absent (0) nor missing ({IGNORED}); another "
            "mark of a missing label is mapped by lossfns.collators.replace_labels or mask_missing"
        )
    count = item_count(num_items_in_batch, int((host != IGNORED).sum()), logits.device)
    return binary_loss(logits, host, extras, count, term, pos_weight=weight, label_smoothing=label_smoothing)


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


@disable_compile
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
