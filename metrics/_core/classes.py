"""What the metrics of classes share: names of classes, what may come as labels and predictions, and counts of cells."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import sparse

from .arguments import integer, table
from .evaluation import Array, Columns, describe, named_columns

IGNORED = -100
# How far a softmax may be from a sum of 1: each probability rounded to bfloat16 is off by up to this part of itself.
SLACK = 2**-8


def class_names(num_classes: int | None, id2label: Mapping[int, str] | None) -> tuple[str, ...]:
    """Return a name for each class, from their number or from a model's `config.id2label`.

    Raises:
        TypeError: neither or both are given, `num_classes` is not an integer, or `id2label` no dict.
        ValueError: no class, ids that are not 0, 1, 2, ..., or two classes with one id or one name.
    """
    if (num_classes is None) == (id2label is None):
        raise TypeError("say how many classes there are: num_classes=3, or id2label=model.config.id2label, one of both")
    if id2label is None:
        return tuple(map(str, range(integer("num_classes", num_classes, "the number of classes", least=1))))
    return names_of(id2label)


def names_of(id2label: Any) -> tuple[str, ...]:
    """Return the name of each class, in the order of their ids.

    Raises:
        TypeError: not a dict.
        ValueError: no class, ids that are not 0, 1, 2, ..., or two classes with one id or one name.
    """
    given = table("id2label", id2label, "a dict of names by id, model.config.id2label")
    named = {str(place): str(name) for place, name in given.items()}  # JSON makes strings of the ids
    places = [str(place) for place in range(len(given))]
    if not named or named.keys() != {*places} or len(set(named.values())) < len(given):
        raise ValueError(f"classes are 0, 1, 2, ..., at least one, each with a name of its own; {given} came")
    return tuple(named[place] for place in places)


def named_predictions(predictions: Any) -> Columns:
    """Return predictions by name; integers alone are `ids`, floats alone have no name, because they may be logits."""
    alone = isinstance(predictions, np.ndarray) and predictions.dtype.kind in "iu"
    return {"ids": predictions} if alone else named_columns(predictions)


def missing(wanted: str, predictions: Any) -> ValueError:
    """Return the error that says what came and what is needed, `wanted`."""
    return ValueError(f"the metric needs {wanted}; predictions hold {describe(predictions)}")


def label_ids(labels: Any, num_classes: int) -> Array:
    """Return `labels` if they are class ids.

    Raises:
        TypeError: not one array of integers.
        ValueError: an id that is neither a class nor -100.
    """
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu":
        raise TypeError(f"labels must be one array of class ids (integers); {describe(labels)} came")
    _check_range("labels", chosen(labels, labels != IGNORED), num_classes, "-100 is the only other value")
    return labels


def predicted_ids(ids: Array, labels: Array, num_classes: int) -> Array:
    """Return the ids predicted for the labels that count, in their order.

    Raises:
        TypeError: not integers.
        ValueError: another shape than the labels', or an id that is no class where a label counts.
    """
    if ids.dtype.kind not in "iu":
        raise TypeError(f"predicted ids must be integers; {describe(ids)} came")
    if ids.shape != labels.shape:
        raise ValueError(f"predicted ids have shape {ids.shape}, labels {labels.shape}: one id for each label")
    active = chosen(ids, labels != IGNORED)
    hint = (
        "-100 among them is a label that no logit predicts, which must be -100 too, as by mask_first_label of "
        "lossfns.collators, or one whose logits are NaN, of a model that has diverged"
    )
    _check_range("predicted ids", active, num_classes, hint)
    return active


def check_probabilities(probabilities: Array, shape: tuple[int, ...], *, softmax: bool, where: Array) -> None:
    """Refuse what are no probabilities; nothing is guessed and nothing converted.

    Args:
        probabilities: what came.
        shape: the shape they must have.
        softmax: whether the last dimension is a distribution, so that it sums to 1.
        where: bool, the entries whose label counts; only those are looked at.

    Raises:
        TypeError: not floats.
        ValueError: another shape, a value outside [0, 1] or NaN, or a sum other than 1.
    """
    if probabilities.dtype.kind != "f":
        raise TypeError(f"probabilities must be floats; {describe(probabilities)} came")
    if probabilities.shape != shape:
        raise ValueError(
            f"probabilities have shape {probabilities.shape}; the labels ask for {shape}, where the last number is "
            "num_classes, and has to be the model's num_labels"
        )
    scored = probabilities[where]
    problem = ""
    if np.isnan(scored).any():
        problem = "are NaN, as the logits of a model that has diverged"
    elif not ((scored >= 0) & (scored <= 1 + SLACK)).all():
        problem = f"lie between {scored.min()} and {scored.max()}, not in [0, 1]"
    elif softmax and not (abs(scored.sum(-1, dtype=np.float64) - 1) <= SLACK).all():
        problem = "don't sum to 1 over the classes"
    if problem:
        raise ValueError(
            f"the column 'probabilities' has values that {problem}. Logits are never converted here; what returns "
            f"probabilities is reducers.probabilities{'' if softmax else ' with multi_label=True'}"
        )


def row_starts(active: Array) -> Array:
    """Return where the entries of each sample begin among those that count, `active`, and where the last ones end."""
    index = np.int32 if active.size <= np.iinfo(np.int32).max else np.int64  # as in sparse matrices
    starts = np.zeros(len(active) + 1, index)
    np.cumsum(per_sample(active), out=starts[1:])
    return starts


def tally(starts: Array, cells: Array, width: int, values: Array | None = None) -> Any:
    """Return per sample how often each cell occurs, or the sum of `values` there.

    Args:
        starts: what `row_starts` returns, (samples + 1,).
        cells: the cell of each entry that counts, in order, 0 to `width` - 1.
        width: number of cells.
        values: one for each cell; None: 1.

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


def _check_range(what: str, ids: Array, num_classes: int, hint: str) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < num_classes:
        raise ValueError(
            f"{what} go from {ids.min()} to {ids.max()}, and there are {num_classes} classes (num_classes), 0 to "
            f"{num_classes - 1}; {hint}"
        )
