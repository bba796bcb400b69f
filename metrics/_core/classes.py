"""What the metrics of classes share: class names, checks of class ids and probabilities, and counts of cells."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import sparse

from .arguments import check, integer
from .evaluation import IGNORED, Array, Columns, describe, named_columns

# How far the sum of a softmax may be from 1: rounding to bfloat16 changes each probability by up to this fraction.
SLACK = 2**-8


def class_names(num_classes: int | None, id2label: Mapping[int, str] | None) -> tuple[str, ...]:
    """Return the name of each class, from their number or from a model's `config.id2label`.

    Raises:
        TypeError: if not exactly one of the two is given, `num_classes` is not an integer, or `id2label` is not a dict.
        ValueError: if there are no classes, ids are not 0, 1, 2, ..., or two classes have the same id or name.
    """
    if (num_classes is None) == (id2label is None):
        raise TypeError("expected exactly one of num_classes=3 and id2label=model.config.id2label")
    if id2label is None:
        return tuple(map(str, range(integer("num_classes", num_classes, minimum=1))))
    return names_of(id2label)


def names_of(id2label: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the name of each class, in the order of their ids.

    Raises:
        TypeError: if `id2label` is not a dict.
        ValueError: if there are no classes, ids are not 0, 1, 2, ..., or two classes have the same id or name.
    """
    check(isinstance(id2label, Mapping), "id2label", "a dict of names by id, such as model.config.id2label", id2label)
    named = {str(place): str(name) for place, name in id2label.items()}  # ids read from JSON are strings
    places = [str(place) for place in range(len(id2label))]
    if not named or named.keys() != {*places} or len(set(named.values())) < len(id2label):
        raise ValueError(f"id2label must have the ids 0, 1, 2, ..., each with a different name, got {id2label}")
    return tuple(named[place] for place in places)


def named_predictions(predictions: Any) -> Columns:
    """Return predictions by name: an array of integers is `ids`; floats alone have no name, as they may be logits."""
    alone = isinstance(predictions, np.ndarray) and predictions.dtype.kind in "iu"
    return {"ids": predictions} if alone else named_columns(predictions)


def label_ids(labels: Any, num_classes: int) -> Array:
    """Return `labels` after checking that they are class ids.

    Raises:
        TypeError: if they are not one array of integers.
        ValueError: if an id is neither a class nor -100.
    """
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu":
        raise TypeError(f"labels must be one array of class ids (integers), got {describe(labels)}")
    _check_range("labels", chosen(labels, labels != IGNORED), num_classes, "-100 is the only other value")
    return labels


def predicted_ids(ids: Array, labels: Array, num_classes: int) -> Array:
    """Return the ids predicted where the label is not ignored, in their order.

    Raises:
        TypeError: if they are not integers.
        ValueError: if their shape differs from the labels', or an id is not a class where the label is not ignored.
    """
    if ids.dtype.kind not in "iu":
        raise TypeError(f"predicted ids must be integers, got {describe(ids)}")
    if ids.shape != labels.shape:
        raise ValueError(f"predicted ids must have the shape of the labels, {labels.shape}, got {ids.shape}")
    active = chosen(ids, labels != IGNORED)
    hint = (
        "-100 means that no logit predicts the label, which must then be -100 too (see mask_first_label in "
        "lossfns.collators), or where logits are NaN because the model has diverged"
    )
    _check_range("predicted ids", active, num_classes, hint)
    return active


def check_probabilities(probabilities: Array, shape: tuple[int, ...], *, softmax: bool, where: Array) -> None:
    """Raise unless an array holds probabilities of the right shape; logits are never converted.

    Args:
        probabilities: the array.
        shape: the shape it must have.
        softmax: whether the last dimension is a distribution, which sums to 1.
        where: bool, the entries whose label is not ignored; only those are checked.

    Raises:
        TypeError: if the array does not hold floats.
        ValueError: if the shape differs, a value is outside [0, 1] or NaN, or a sum is not 1.
    """
    if probabilities.dtype.kind != "f":
        raise TypeError(f"probabilities must be floats, got {describe(probabilities)}")
    if probabilities.shape != shape:
        raise ValueError(
            f"probabilities must have shape {shape} to fit the labels, got {probabilities.shape}; the last number is "
            "num_classes, which must be the model's num_labels"
        )
    scored = probabilities[where]
    problem = ""
    if np.isnan(scored).any():
        problem = "are NaN because the logits are: the model has diverged"
    elif not ((scored >= 0) & (scored <= 1 + SLACK)).all():
        problem = f"lie between {scored.min()} and {scored.max()}, not in [0, 1]"
    elif softmax and not (abs(scored.sum(-1, dtype=np.float64) - 1) <= SLACK).all():
        problem = "do not sum to 1 over the classes"
    if problem:
        raise ValueError(
            f"the column 'probabilities' has values that {problem}. Logits are not converted here: use the reducer "
            f"reducers.probabilities{'' if softmax else ' with multi_label=True'}"
        )


def row_starts(active: Array) -> Array:
    """Return the index of each sample's first entry among the `active` entries, followed by their number."""
    index = np.int32 if active.size <= np.iinfo(np.int32).max else np.int64  # as in sparse matrices
    starts = np.zeros(len(active) + 1, index)
    np.cumsum(per_sample(active), out=starts[1:])
    return starts


def tally(starts: Array, cells: Array, width: int, values: Array | None = None) -> Any:
    """Return how often each cell occurs per sample, or the sum of `values` there.

    Args:
        starts: the output of `row_starts`, (samples + 1,).
        cells: the cell of each active entry, in order, 0 to `width` - 1.
        width: number of cells.
        values: one value per entry; None: 1.

    Returns:
        `csr_array` (samples, width), int64 or the dtype of `values`.
    """
    data = np.ones(len(cells), np.int64) if values is None else values
    return sparse.csr_array((data, cells, starts), shape=(len(starts) - 1, width))


def per_sample(entries: Array) -> Array:
    """Return the sums over all dimensions but the first."""
    sums: Array = entries.reshape(len(entries), math.prod(entries.shape[1:])).sum(1)
    return sums


def chosen(entries: Array, where: Array) -> Array:
    """Return `entries[where]`, without a copy where all are chosen."""
    return entries.reshape(-1, *entries.shape[where.ndim :]) if where.all() else entries[where]


def _check_range(name: str, ids: Array, num_classes: int, hint: str) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < num_classes:
        raise ValueError(f"{name} must be 0 to {num_classes - 1}, got {ids.min()} to {ids.max()}; {hint}")
