"""Numbers a class from the labels of a training set: counts, weights, margins. Made once, before training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._core.checks import IGNORED, ClassValues, as_list, as_numbers, check_ids, check_range, class_table, integer


def class_counts(labels: Any, *, num_classes: int) -> Tensor:
    """Count the labels of each class.

    Args:
        labels: class ids of any shape, -100 where there is none: a tensor, an array, or a sequence of ids or of
            sequences of them (a column of a dataset, ragged or not).
        num_classes: number of classes `C`, also of those that do not occur.

    Returns:
        `(C,)` float64, items.

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
    """Weights inverse to the size of each class, with mean 1 over the labels: every class weighs the same in all.

    Args:
        labels: as for `class_counts`.
        num_classes: number of classes `C`.

    Returns:
        `(C,)` float64: labels / (C x labels of the class).

    Raises:
        TypeError: labels are not integers.
        ValueError: a label is out of range, or a class has no label.

    Source:
        King, Zeng: Logistic Regression in Rare Events Data (2001); scikit-learn's `class_weight="balanced"`.

    Example:
        >>> balanced_class_weights([0, 0, 0, 1], num_classes=2)
        tensor([0.6667, 2.0000], dtype=torch.float64)
    """
    counts = _present(labels, num_classes)
    return _mean_one(1 / counts, counts)


def effective_number_weights(labels: Any, *, num_classes: int, beta: float = 0.999) -> Tensor:
    """Weights inverse to the effective number of labels of each class, with mean 1 over the labels.

    The paper scales the weights to a sum of C; here their mean over the labels is 1, so that the size of the loss and
    the learning rate stay what they are without weights.

    Args:
        labels: as for `class_counts`.
        num_classes: number of classes `C`.
        beta: in `[0, 1)`: 0 gives equal weights, towards 1 they become `balanced_class_weights`.

    Returns:
        `(C,)` float64.

    Raises:
        TypeError: labels are not integers.
        ValueError: a label is out of range, a class has no label, `beta` is out of range.

    Source:
        Cui, Jia, Lin, Song, Belongie: Class-Balanced Loss Based on Effective Number of Samples (2019), equation 2.

    Example:
        >>> effective_number_weights([0, 0, 0, 1], num_classes=2, beta=0.5)
        tensor([0.8421, 1.4737], dtype=torch.float64)
    """
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta must be in [0, 1), got {beta}")
    counts = _present(labels, num_classes)
    return _mean_one((1 - beta) / (1 - beta**counts), counts)


def balanced_pos_weight(labels: Any, *, num_classes: int) -> Tensor:
    """Weight of present labels with which, for each class, present and absent ones weigh the same in all.

    Args:
        labels: `(N, C)`, 1 present, 0 absent, -100 missing: a tensor, an array or a sequence of rows.
        num_classes: number of classes `C`.

    Returns:
        `(C,)` float64: absent / present. A ratio to the weight of absent labels, which stays 1, so that its mean over
        the labels is not 1.

    Raises:
        TypeError: labels are not numbers.
        ValueError: another shape or value, or a class that is nowhere present or nowhere absent.

    Source:
        King, Zeng: Logistic Regression in Rare Events Data (2001), weighting, with the weight of absent labels 1;
        `pos_weight` of torch's BCEWithLogitsLoss.

    Example:
        >>> balanced_pos_weight([[1, 0], [0, 1], [0, -100]], num_classes=2)
        tensor([2., 1.], dtype=torch.float64)
    """
    integer(num_classes, "num_classes")
    rows = [_numbers(row, dtype=torch.float64) for row in as_list(labels, "labels")]
    known = torch.tensor([0.0, 1.0, IGNORED], dtype=torch.float64, device="cpu")
    if not all(row.shape == (num_classes,) and bool(torch.isin(row, known).all()) for row in rows):
        raise ValueError(f"labels must be 1, 0 or {IGNORED}, {num_classes} a sample, shape (N, {num_classes})")
    table = torch.stack(rows or [torch.empty(num_classes, device="cpu")])[: len(rows)]
    present, absent = (table == 1).sum(0).double(), (table == 0).sum(0).double()
    _refuse_absent(torch.minimum(present, absent), "are nowhere present, or everywhere")
    return absent / present


def ldam_margins(counts: ClassValues, *, max_margin: float = 0.5) -> Tensor:
    """Margins for `classification_loss(margins=...)` that fall with the fourth root of the size of a class.

    Args:
        counts: items a class, `(C,)`, as `class_counts` returns them.
        max_margin: margin of the rarest class, in units of the logits. The paper takes 0.5 for the cosines of a
            normalised head and then multiplies logits by 30: with such a model, 30 times as much.

    Returns:
        `(C,)` float64.

    Raises:
        ValueError: a class has no item, or the margin is not positive.
        TypeError: an option is no number.

    Source:
        Cao, Wei, Gaidon, Arechiga, Ma: Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss (2019),
        equations 10 to 13.

    Example:
        >>> ldam_margins([16, 1])
        tensor([0.2500, 0.5000], dtype=torch.float64)
    """
    if not max_margin > 0:
        raise ValueError(f"max_margin must be positive, got {max_margin}")
    table = class_table(counts, "counts", smallest=0.0)
    _refuse_absent(table, "have no label")
    return max_margin * (table.min() / table) ** 0.25


def _flat(labels: Any) -> Tensor:
    """Labels in any container as one 1-D tensor on the host; rows of a sequence may differ in length."""
    if hasattr(labels, "__array__"):
        return _numbers(labels).flatten()
    rows = as_list(labels, "labels")
    if rows and not _numbers(rows[0]).ndim:
        return _numbers(rows)
    parts = [_numbers(row).flatten() for row in rows if len(row)]
    return torch.cat(parts or [torch.empty(0, dtype=torch.int64, device="cpu")])


def _numbers(values: Any, **kind: Any) -> Tensor:
    """Labels as a tensor on the host."""
    found = as_numbers(values, **kind)
    if found is None:
        raise TypeError(
            f"labels must be numbers in a tensor, an array or a list, and a {type(values).__name__} of something else "
            'came. Of a dataset pass the column, dataset["label"]'
        )
    return found.detach()


def _present(labels: Any, num_classes: int) -> Tensor:
    counts = class_counts(labels, num_classes=num_classes)
    _refuse_absent(counts, "have no label")
    return counts


def _refuse_absent(counts: Tensor, what: str) -> None:
    absent = (counts == 0).nonzero().flatten().tolist()
    if absent:
        raise ValueError(f"classes {absent} {what}: no weight balances them; leave them out, or give weights by hand")


def _mean_one(weights: Tensor, counts: Tensor) -> Tensor:
    return weights * counts.sum() / (weights * counts).sum()
