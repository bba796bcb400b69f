"""Counts, weights and margins per class, computed once from the labels of a training set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._core.checks import (
    IGNORED,
    ClassValues,
    as_list,
    as_numbers,
    check_ids,
    check_positive,
    check_range,
    class_table,
    integer,
)


def class_counts(labels: Any, *, num_classes: int) -> Tensor:
    """Count the labels of each class.

        counts[c] = number of labels equal to c

    Args:
        labels: class ids of any shape, -100 where a label is missing: a tensor, an array, or a sequence of ids or of
            sequences of ids (a column of a dataset, whose rows may differ in length).
        num_classes: number of classes `C`, including those without a label.

    Returns:
        `(C,)` float64, labels.

    Raises:
        TypeError: labels are not integers.
        ValueError: a label is out of range.

    Example:
        >>> class_counts([[0, 2, -100], [2]], num_classes=3)
        tensor([1., 0., 2.], dtype=torch.float64)
    """
    classes, ids = integer(num_classes, "num_classes"), _flat(labels)
    check_ids(ids)
    ids = ids.long()
    ids = ids[ids != IGNORED]
    check_range(ids, classes)
    return torch.bincount(ids, minlength=classes).double()


def balanced_class_weights(labels: Any, *, num_classes: int) -> Tensor:
    """Return weights with which all classes have the same total weight.

        weights[c] = number of labels / (C * counts[c])

    Their mean over the labels is 1, so that they do not change the scale of the loss.

    Args:
        labels: class ids, as for `class_counts`.
        num_classes: number of classes `C`.

    Returns:
        `(C,)` float64, the weights of scikit-learn's `class_weight="balanced"`.

    Raises:
        TypeError: labels are not integers.
        ValueError: a label is out of range, or a class has no label.

    References:
        King, Zeng, "Logistic Regression in Rare Events Data", 2001,
        https://doi.org/10.1093/oxfordjournals.pan.a004868

    Example:
        >>> balanced_class_weights([0, 0, 0, 1], num_classes=2)
        tensor([0.6667, 2.0000], dtype=torch.float64)
    """
    counts = _positive_counts(labels, num_classes)
    return _mean_one(1 / counts, counts)


def effective_number_weights(labels: Any, *, num_classes: int, beta: float = 0.999) -> Tensor:
    """Return weights in inverse proportion to the effective number of labels of each class.

        weights[c] = scale * (1 - beta) / (1 - beta ** counts[c])

    The paper scales the weights to a sum of C. Here their mean over the labels is 1, so that they do not change the
    scale of the loss, and the learning rate need not change.

    Args:
        labels: class ids, as for `class_counts`.
        num_classes: number of classes `C`.
        beta: in `[0, 1)`; 0 gives equal weights, and values near 1 approach `balanced_class_weights`.

    Returns:
        `(C,)` float64.

    Raises:
        TypeError: labels are not integers.
        ValueError: a label or `beta` is out of range, or a class has no label.

    References:
        Cui, Jia, Lin, Song, Belongie, "Class-Balanced Loss Based on Effective Number of Samples", 2019, equation 2,
        https://arxiv.org/abs/1901.05555

    Example:
        >>> effective_number_weights([0, 0, 0, 1], num_classes=2, beta=0.5)
        tensor([0.8421, 1.4737], dtype=torch.float64)
    """
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta must be in [0, 1), got {beta}")
    counts = _positive_counts(labels, num_classes)
    return _mean_one((1 - beta) / (1 - beta**counts), counts)


def balanced_pos_weight(labels: Any, *, num_classes: int) -> Tensor:
    """Return the weights of present labels with which, per class, present and absent labels have equal total weight.

        pos_weight[c] = number of absent labels of c / number of present labels of c

    The weight of an absent label stays 1, so that the mean weight over the labels is not 1.

    Args:
        labels: `(N, C)`, 1 present, 0 absent, -100 missing: a tensor, an array or a sequence of rows.
        num_classes: number of classes `C`.

    Returns:
        `(C,)` float64, for `multi_label_loss(pos_weight=...)` or torch's BCEWithLogitsLoss.

    Raises:
        TypeError: labels are not numbers.
        ValueError: labels have another shape or value, or a class is present in no sample or in all.

    References:
        King, Zeng, "Logistic Regression in Rare Events Data", 2001,
        https://doi.org/10.1093/oxfordjournals.pan.a004868

    Example:
        >>> balanced_pos_weight([[1, 0], [0, 1], [0, -100]], num_classes=2)
        tensor([2., 1.], dtype=torch.float64)
    """
    integer(num_classes, "num_classes")
    rows = [_numbers(row, dtype=torch.float64) for row in as_list(labels, "labels")]
    allowed = torch.tensor([0.0, 1.0, IGNORED], dtype=torch.float64, device="cpu")
    if not all(row.shape == (num_classes,) and bool(torch.isin(row, allowed).all()) for row in rows):
        raise ValueError(
            f"labels must be 1, 0 or {IGNORED}, of shape (N, num_classes) = (N, {num_classes}), got another value or "
            "another number of labels in a sample"
        )
    table = torch.stack(rows or [torch.empty(num_classes, device="cpu")])[: len(rows)]
    present, absent = (table == 1).sum(0).double(), (table == 0).sum(0).double()
    _check_counts(torch.minimum(present, absent), "one present and one absent label")
    return absent / present


def ldam_margins(counts: ClassValues, *, max_margin: float = 0.5) -> Tensor:
    """Return label-distribution-aware margins for `classification_loss(margins=...)`, larger ones for rare classes.

        margins[c] = max_margin * (min(counts) / counts[c]) ** 0.25

    Args:
        counts: labels per class, `(C,)`, as `class_counts` returns them.
        max_margin: margin of the rarest class, > 0, in units of the logits. The paper uses 0.5 for the cosines of a
            normalized head and multiplies the logits by 30 afterwards; for such a model, use 15.

    Returns:
        `(C,)` float64, in units of the logits.

    Raises:
        ValueError: a class has no label, a count is negative or not finite, or `max_margin` is not positive.

    References:
        Cao, Wei, Gaidon, Arechiga, Ma, "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss", 2019,
        equations 10 to 13, https://arxiv.org/abs/1906.07413

    Example:
        >>> ldam_margins([16, 1])
        tensor([0.2500, 0.5000], dtype=torch.float64)
    """
    check_positive(max_margin, "max_margin")
    table = class_table(counts, "counts", smallest=0.0)
    _check_counts(table, "one label")
    return max_margin * (table.min() / table) ** 0.25


def _flat(labels: Any) -> Tensor:
    """Return labels in any container as one 1-D tensor on the host; rows of a sequence may differ in length."""
    if hasattr(labels, "__array__"):
        return _numbers(labels).flatten()
    rows = as_list(labels, "labels")
    if rows and not _numbers(rows[0]).ndim:
        return _numbers(rows)
    parts = [_numbers(row).flatten() for row in rows if len(row)]
    return torch.cat(parts or [torch.empty(0, dtype=torch.int64, device="cpu")])


def _numbers(values: Any, **kind: Any) -> Tensor:
    """Return labels as a tensor on the host, or raise TypeError unless they are numbers."""
    found = as_numbers(values, **kind)
    if found is None:
        raise TypeError(
            f"labels must be numbers in a tensor, an array or a list, got {type(values).__name__}. Of a dataset, pass "
            'the column: dataset["label"]'
        )
    return found.detach()


def _positive_counts(labels: Any, num_classes: int) -> Tensor:
    """Return the counts of all classes, or raise ValueError if a class has no label."""
    counts = class_counts(labels, num_classes=num_classes)
    _check_counts(counts, "one label")
    return counts


def _check_counts(counts: Tensor, needed: str) -> None:
    """Raise ValueError if a count is 0: the weight of the class would be infinite."""
    absent = (counts == 0).nonzero().flatten().tolist()
    if absent:
        raise ValueError(
            f"each class needs at least {needed}, got none for classes {absent}: leave them out or set weights"
        )


def _mean_one(weights: Tensor, counts: Tensor) -> Tensor:
    """Return the weights scaled to a mean of 1 over the labels."""
    return weights * counts.sum() / (weights * counts).sum()
