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
from ._core.checks import IGNORED, ClassValues, check_ids, check_normalize, check_range, check_smoothing, class_table
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
Levels = Callable[[Tensor, int], Tensor]  # see `coral_levels`


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
    """Compute the mean of a term over samples with one class each, exact under gradient accumulation and DDP.

        sum over samples of term(logits + logit_adjustment, class id) / number of samples

    For texts, images, sounds and multiple choice. Soft labels (mixup, several raters) are probabilities of the classes;
    the loss of a sample is then the expectation of the term over them, which for cross-entropy is the usual soft
    cross-entropy.

    Args:
        outputs: the model's outputs: a ModelOutput or dict with `logits`, a tuple, or logits `(B, C)`.
        labels: class ids `(B,)`, -100 where a label is missing; or soft labels, floats `(B, C)` whose rows sum to 1 or
            are -100 throughout; or `{"labels": either, name: extra}`.
        num_items_in_batch: the Trainer's count over the accumulation window, in any of its forms: samples, or samples
            times classes for soft labels. None counts the samples of this call.
        term: what is minimized per sample.
        class_weights: one weight per class, `(C,)`: short for `class_weighted(term, class_weights)`.
        label_smoothing: probability that is spread evenly over the classes, in `[0, 1]`, for cross-entropy. Together
            with class weights it means what it means in torch: every class is weighted by its own weight. For the
            weight of the label times the smoothed loss, use `class_weighted(partial(smoothed_cross_entropy,
            label_smoothing=...), weights)`. A class with a logit of -inf is left out of the smoothing, but its loss is
            infinite if there are class weights.
        logit_adjustment: one number per class that is added to the logits, `(C,)`. With the log-priors of the classes,
            times a temperature, the model learns logits for balanced classes.
        margins: one number per class that is subtracted from the logit of the label's class, `(C,)`; see
            `ldam_margins`.
        normalize: "items" divides by the number of samples, weighted or not. "weights" divides by their weights before
            smoothing, as torch's weighted mean does; it is exact only without gradient accumulation and in one process.
        select: a function of `outputs` that returns the logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats per sample for cross-entropy; 0 with a live graph if every label
        is missing.

    Raises:
        ValueError: labels are missing, out of range, not a distribution or of another shape; an option does not fit the
            number of classes or another option.
        TypeError: class ids are not integers; the term asks for an unknown tensor.

    References:
        Szegedy, Vanhoucke, Ioffe, Shlens, Wojna, "Rethinking the Inception Architecture for Computer Vision", 2016
        (`label_smoothing`), https://arxiv.org/abs/1512.00567

        Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: Beyond Empirical Risk Minimization", 2018 (soft labels),
        https://arxiv.org/abs/1710.09412

        Menon, Jayasumana, Rawat, Jain, Veit, Kumar, "Long-tail learning via logit adjustment", 2021, equation 10
        (`logit_adjustment`), https://arxiv.org/abs/2007.07314

        Cao, Wei, Gaidon, Arechiga, Ma, "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss", 2019,
        equation 12 (`margins`), https://arxiv.org/abs/1906.07413

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
    """Compute the mean of a term over labeled tokens, exact under gradient accumulation and DDP.

        sum over tokens of term(logits + logit_adjustment, class id) / number of tokens

    The options are those of `classification_loss`, whose samples are tokens here.

    Args:
        outputs: the model's outputs: a ModelOutput or dict with `logits`, a tuple, or logits `(B, S, C)`.
        labels: class ids `(B, S)`, -100 where a token has no label; or soft labels, floats `(B, S, C)` whose rows sum
            to 1 or are -100 throughout; or `{"labels": either, name: extra}`.
        num_items_in_batch: the Trainer's count over the accumulation window, in any of its forms: labeled tokens, or
            tokens times classes for soft labels. None counts the tokens of this call.
        term: what is minimized per token.
        class_weights: one weight per class, `(C,)`: short for `class_weighted(term, class_weights)`.
        label_smoothing: probability that is spread evenly over the classes, in `[0, 1]`, for cross-entropy; see
            `classification_loss` for its meaning together with class weights.
        logit_adjustment: one number per class that is added to the logits, `(C,)`.
        margins: one number per class that is subtracted from the logit of the label's class, `(C,)`; see
            `ldam_margins`.
        normalize: "tokens" divides by the number of labeled tokens, weighted or not. "weights" divides by their
            weights before smoothing, as torch's weighted mean does; it is exact only without gradient accumulation and
            in one process.
        select: a function of `outputs` that returns the logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats per token for cross-entropy; 0 with a live graph if no token has
        a label.

    Raises:
        ValueError: labels are missing, out of range, not a distribution or of another shape; an option does not fit the
            number of classes or another option.
        TypeError: class ids are not integers; the term asks for an unknown tensor.

    References:
        As in `classification_loss`: Szegedy et al., 2016, https://arxiv.org/abs/1512.00567; Zhang et al., 2018,
        https://arxiv.org/abs/1710.09412; Menon et al., 2021, https://arxiv.org/abs/2007.07314; Cao et al., 2019,
        https://arxiv.org/abs/1906.07413

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
    """Compute the loss of samples (`dimensions` 1) or tokens (2).

    Soft labels, and smoothing together with class weights, need an expectation over classes; the kernel computes the
    rest from one class id per row.
    """
    ids, extras = split_labels(labels)
    soft = ids.is_floating_point() and ids.ndim == dimensions + 1
    logits = select_logits(outputs, ids[..., 0] if soft else ids, select)
    _check_shapes(logits, ids, dimensions, soft)
    ids = ids.detach().cpu()  # One copy to the host for all that read them.
    logits = _adjust(logits, None if soft else ids, logit_adjustment, margins)
    units = ["items" if dimensions == 1 else "tokens"]
    weighted_smoothing = label_smoothing != 0.0 and class_weights is not None
    term = _with_options(term, class_weights, label_smoothing)
    if not soft and not weighted_smoothing:
        return label_loss(FromLogits(logits), ids, extras, num_items_in_batch, term, normalize=normalize, units=units)
    check_normalize(normalize, units, extras)
    rows = soft_rows(ids) if soft else certain_rows(align(logits, ids, shift=0), ids, logits.shape[-1])
    counted = logits.shape[-1] if soft else 1  # The Trainer counts each class of a soft label.
    count = item_count(num_items_in_batch, len(rows.rows) * counted, logits.device) / counted
    smoothing = label_smoothing if weighted_smoothing else 0.0
    return soft_loss(logits, rows, extras, count, term, label_smoothing=smoothing, weighted=normalize == "weights")


def _with_options(term: Term, class_weights: ClassValues | None, label_smoothing: float) -> Term:
    """Return the term with class weights, or with smoothing; both together are left to `soft_loss`."""
    check_smoothing(label_smoothing)
    if label_smoothing and term is not cross_entropy:
        raise ValueError(
            f"label_smoothing is defined for cross_entropy, got term={name_of(term)}. To combine them, use "
            "weighted_sum((0.5, term), (0.5, partial(smoothed_cross_entropy, label_smoothing=...)))"
        )
    if label_smoothing and class_weights is None:
        return partial(smoothed_cross_entropy, label_smoothing=label_smoothing)
    return term if class_weights is None else class_weighted(term, class_weights)


def _check_shapes(logits: Tensor, labels: Tensor, dimensions: int, soft: bool) -> None:
    ids, rows = ("(batch,)", "batch") if dimensions == 1 else ("(batch, tokens)", "batch, tokens")
    wanted = labels.shape if soft else (*labels.shape, *logits.shape[-1:])
    if logits.ndim != dimensions + 1 or logits.shape != wanted:
        raise ValueError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not fit: expected class ids {ids}, or "
            f"float soft labels of the logits' shape, and logits ({rows}, classes). Use multi_label_loss for several "
            "labels per sample, token_classification_loss for labels of tokens"
        )


def _by_class(values: ClassValues, name: str, logits: Tensor, *, smallest: float = -math.inf) -> Tensor:
    """Return one number per class of the logits, each at least `smallest`, as `(C,)` float64 on the host."""
    table = class_table(values, name, smallest=smallest)
    if table.numel() != logits.shape[-1]:
        raise ValueError(f"{name} must have one number per class, {logits.shape[-1]} as the logits, got {len(table)}")
    return table


def _adjust(
    logits: Tensor, ids: Tensor | None, logit_adjustment: ClassValues | None, margins: ClassValues | None
) -> Tensor:
    """Return the logits plus `logit_adjustment`, minus the margin of each label's class, in the compute dtype."""
    if logit_adjustment is None and margins is None:
        return logits
    x = logits.to(compute_dtype(logits.dtype))
    if logit_adjustment is not None:
        x = x + _by_class(logit_adjustment, "logit_adjustment", x).to(x.device, x.dtype, non_blocking=True)
    if margins is None:
        return x
    if ids is None:
        raise ValueError("margins need class ids as labels, got soft labels: a margin belongs to the label's class")
    table = _by_class(margins, "margins", x).to(x.device, x.dtype, non_blocking=True)
    rows = align(x, ids, shift=0).rows
    lowered = x.flatten(0, -2).index_put((rows.on_device, rows.labels), -table[rows.labels], accumulate=True)
    return lowered.view(logits.shape)


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
    """Compute the mean of a term over independent yes-or-no labels with one logit each, such as binary cross-entropy.

        sum over labels of pos_weight * y * term(present) + (1 - y) * term(absent) / number of labels

    Here y is the smoothed label. Cross-entropy is -log q for a present and -log(1 - q) for an absent label, with q the
    sigmoid of the logit.

    Args:
        outputs: the model's outputs: a ModelOutput or dict with `logits`, a tuple, or logits `(B, C)`.
        labels: `(B, C)`, integer or float: 1 present, 0 absent, a probability between them, -100 missing; or
            `{"labels": labels, name: extra}`.
        num_items_in_batch: the Trainer's count of labels that are not -100 over the accumulation window, in any of its
            forms. None counts the labels of this call.
        term: a function of `log_prob`, the log-probability of the outcome, and `outcome` (bool, whether the label is
            present): `cross_entropy`, `focal`, `asymmetric`, ...
        pos_weight: one weight per class, `(C,)`, for present labels; see `balanced_pos_weight`.
        label_smoothing: probability that is spread evenly over present and absent, in `[0, 1]`.
        select: a function of `outputs` that returns the logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats per label for cross-entropy; 0 with a live graph if every label
        is missing.

    Raises:
        ValueError: labels are missing, of another shape or outside 0 to 1; `pos_weight` is negative or does not fit the
            number of classes.
        TypeError: the term asks for an unknown tensor.

    References:
        Good, "Rational Decisions", 1952 (binary cross-entropy), https://doi.org/10.1111/j.2517-6161.1952.tb00104.x

        King, Zeng, "Logistic Regression in Rare Events Data", 2001 (`pos_weight`),
        https://doi.org/10.1093/oxfordjournals.pan.a004868

        Szegedy, Vanhoucke, Ioffe, Shlens, Wojna, "Rethinking the Inception Architecture for Computer Vision", 2016
        (`label_smoothing`), https://arxiv.org/abs/1512.00567

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
            "logits' shape (batch, labels). Use classification_loss for class ids"
        )
    check_smoothing(label_smoothing)
    weight = None if pos_weight is None else _by_class(pos_weight, "pos_weight", logits, smallest=0.0)
    host = targets.detach().cpu()
    wrong = (host != IGNORED) & ~((host >= 0) & (host <= 1))
    if bool(wrong.any()):
        raise ValueError(
            f"labels must be 1 (present), 0 (absent), a probability between them, or {IGNORED} (missing), got "
            f"{host[wrong][0].item()}. Map other marks with lossfns.collators.replace_labels or mask_missing"
        )
    count = item_count(num_items_in_batch, int((host != IGNORED).sum()), logits.device)
    return binary_loss(logits, host, extras, count, term, pos_weight=weight, label_smoothing=label_smoothing)


def coral_levels(labels: Tensor, thresholds: int) -> Tensor:
    """Return whether the class of each label is above each threshold.

        levels[i, k] = 1 if labels[i] > k else 0

    Args:
        labels: class ids, `(n,)` int64, 0 to `thresholds`.
        thresholds: number of thresholds, one less than the number of classes.

    Returns:
        `(n, thresholds)` int64, 0 or 1.

    References:
        Cao, Mirjalili, Raschka, "Rank consistent ordinal regression for neural networks with application to age
        estimation", 2020, equation 4, https://arxiv.org/abs/1901.07884

    Example:
        >>> coral_levels(torch.tensor([0, 1, 3]), 3).tolist()
        [[0, 0, 0], [1, 0, 0], [1, 1, 1]]
    """
    return (labels[:, None] > torch.arange(thresholds, device=labels.device)).long()


def corn_levels(labels: Tensor, thresholds: int) -> Tensor:
    """Return whether the class of each label is above each threshold, given that it is above the one before.

        levels[i, k] = 1 if labels[i] > k, 0 if labels[i] = k, -100 if labels[i] < k

    Args:
        labels: class ids, `(n,)` int64, 0 to `thresholds`.
        thresholds: number of thresholds, one less than the number of classes.

    Returns:
        `(n, thresholds)` int64: 0, 1, or -100 where the condition does not hold.

    References:
        Shi, Cao, Raschka, "Deep Neural Networks for Rank-Consistent Ordinal Regression Based On Conditional
        Probabilities", 2021, section 3.3, https://arxiv.org/abs/2111.08851

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
    """Compute the sum of a term over the thresholds between ordered classes, as a mean over samples.

        sum over samples i and thresholds k with levels[i, k] != -100 of term(levels[i, k]) / number of samples

    A model for K classes returns K - 1 logits; the sigmoid of a logit is the probability that the class is above the
    threshold. CORAL requires logits that share their weights and differ in their biases; CORN has no such requirement.
    CORN's paper divides by the number of levels in a batch, which differs between batches. This function divides by the
    number of samples for both, so that gradient accumulation does not change the loss.

    Args:
        outputs: the model's outputs: a ModelOutput or dict with `logits`, a tuple, or logits `(B, K - 1)`.
        labels: class ids `(B,)`, 0 to K - 1, -100 where a label is missing; or `{"labels": ids, name: extra}`.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms. None counts
            the labels of this call.
        levels: the outcomes that the thresholds are trained on: `coral_levels`, `corn_levels`, or a function of the
            same arguments.
        term: what is minimized per threshold, as in `multi_label_loss`.
        select: a function of `outputs` that returns the logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats per sample for cross-entropy; 0 with a live graph if every label
        is missing.

    Raises:
        ValueError: labels are missing, out of range or of another shape; `levels` returns another shape.
        TypeError: labels are not integers; the term asks for an unknown tensor; `levels` binds an unknown option.

    References:
        Cao, Mirjalili, Raschka, "Rank consistent ordinal regression for neural networks with application to age
        estimation", 2020, equation 4 (CORAL), https://arxiv.org/abs/1901.07884

        Shi, Cao, Raschka, "Deep Neural Networks for Rank-Consistent Ordinal Regression Based On Conditional
        Probabilities", 2021, section 3.3 (CORN), https://arxiv.org/abs/2111.08851

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
            "one logit per threshold, (batch, classes - 1)"
        )
    host, thresholds = ids.detach().cpu().long(), logits.shape[-1]
    scored = host != IGNORED
    known = host[scored]
    check_range(known, thresholds + 1)
    found = levels(known, thresholds)
    if found.shape != (len(known), thresholds):
        raise ValueError(f"levels must return the shape {(len(known), thresholds)}, got {tuple(found.shape)}")
    outcomes = torch.full(logits.shape, IGNORED, device="cpu")
    outcomes[scored] = found
    count = item_count(num_items_in_batch, len(known), logits.device)
    return binary_loss(logits, outcomes, extras, count, term)
