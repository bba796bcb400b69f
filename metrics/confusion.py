"""Scores of confusion matrices: of one by scikit-learn, of stacks by the same definitions, vectorised.

A matrix counts `[..., true, predicted]`. One is scored by scikit-learn, one row a cell that is not empty, weighted by
its count, so that its cost does not depend on the number of labels. Whoever has many (replicates, groups) passes a
stack. Where both are undefined or zero they agree: 0 / 0 is 0.0 in precision, recall and F1, as scikit-learn's default
is; a matrix without counts scores NaN.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import ArrayLike
from sklearn import metrics as sklearn_metrics

from ._evaluation import Array, Columns
from ._metric import ratio

SCORES = ("precision", "recall", "f1")
AVERAGES = ("binary", "macro", "micro", "weighted", "per_class")


def agreement(matrix: Array) -> Columns:
    """Return accuracy, balanced accuracy, Matthews' correlation and Cohen's kappa.

    Balanced accuracy is the mean recall of the classes that occur in the labels. The correlation is 0.0 where labels or
    predictions are constant, as in scikit-learn; kappa is NaN where both are the same constant.

    Args:
        matrix: counts (..., C, C), `[..., true, predicted]`.

    Returns:
        Arrays (...) called accuracy, balanced_accuracy, matthews_correlation, cohen_kappa.

    Source: K. H. Brodersen et al., "The balanced accuracy and its posterior distribution", 2010; J. Gorodkin,
    "Comparing two K-category assignments by a K-category correlation coefficient", 2004; J. Cohen, "A coefficient of
    agreement for nominal scales", 1960.

    Example:
        >>> {key: float(value) for key, value in agreement(np.array([[3, 1], [0, 4]])).items()}["accuracy"]
        0.875
    """
    if matrix.ndim > 2:
        return _agreement_of_stack(matrix)
    functions = {
        "accuracy": sklearn_metrics.accuracy_score,
        "balanced_accuracy": sklearn_metrics.balanced_accuracy_score,
        "matthews_correlation": sklearn_metrics.matthews_corrcoef,
        "cohen_kappa": sklearn_metrics.cohen_kappa_score,
    }
    if not matrix.any():
        return dict.fromkeys(functions, np.array(np.nan))
    true, predicted, counts = _cells(matrix)
    with quiet():
        return {name: np.asarray(score(true, predicted, sample_weight=counts)) for name, score in functions.items()}


def precision_recall_f1(matrix: Array, *, average: str, positive: int = 1) -> Columns:
    """Return precision, recall and F1 under an average.

    Args:
        matrix: counts (..., C, C), `[..., true, predicted]`.
        average: "binary" for class `positive` alone, "micro" over the counts of all classes, "macro" and "weighted" (by
            the number of labels) over those that occur in labels or predictions, "per_class" for each, NaN for a class
            that occurs in neither.
        positive: the class that "binary" scores.

    Returns:
        Arrays (...), with "per_class" (..., C), called precision, recall, f1.

    Source: C. J. van Rijsbergen, "Information Retrieval", 1979.

    Example:
        >>> float(precision_recall_f1(np.array([[3, 1], [0, 4]]), average="binary")["precision"])
        0.8
    """
    if matrix.ndim > 2:
        return _averaged_stack(matrix, average, positive)
    if not matrix.any():
        return dict.fromkeys(SCORES, np.full(len(matrix) if average == "per_class" else (), np.nan))
    true, predicted, counts = _cells(matrix)
    *values, _ = sklearn_metrics.precision_recall_fscore_support(
        true,
        predicted,
        labels={"binary": [positive], "per_class": range(len(matrix))}.get(average),
        average=None if average in {"binary", "per_class"} else average,
        sample_weight=counts,
        zero_division=0,
    )
    if average == "binary":
        values = [value[0] for value in values]
    if average == "per_class":
        values = [np.where(_occurs(matrix), value, np.nan) for value in values]
    return {name: np.asarray(value) for name, value in zip(SCORES, values, strict=True)}


def scores_of_counts(hits: ArrayLike, predicted: ArrayLike, actual: ArrayLike) -> Columns:
    """Return precision, recall and F1 of counts of any shape, 0.0 for 0 / 0.

    Args:
        hits: right among the predicted.
        predicted: number predicted.
        actual: number in the labels.

    Returns:
        Arrays called precision, recall, f1.
    """
    hits, predicted, actual = np.asarray(hits), np.asarray(predicted), np.asarray(actual)
    pairs = ((hits, predicted), (hits, actual), (2 * hits, predicted + actual))
    return {
        name: np.where(whole == 0, 0.0, ratio(part, whole)) for name, (part, whole) in zip(SCORES, pairs, strict=True)
    }


def mean_where(values: Array, where: Array) -> Array:
    """Return the mean over the last dimension of the values chosen, NaN where none is."""
    return ratio(np.where(where, values, 0.0).sum(-1), where.sum(-1))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings about undefined scores in: what is returned for them is stated here and in each metric."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _cells(matrix: Array) -> tuple[Array, Array, Array]:
    true, predicted = matrix.nonzero()
    return true, predicted, matrix[true, predicted]


def _occurs(matrix: Array) -> Array:
    occurs: Array = matrix.sum(-1) + matrix.sum(-2) > 0
    return occurs


def _agreement_of_stack(matrix: Array) -> Columns:
    counts = matrix.astype(np.float64)  # squares of counts stay exact up to 9e7 labels
    hits, actual, predicted = np.diagonal(counts, axis1=-2, axis2=-1), counts.sum(-1), counts.sum(-2)
    total, right = actual.sum(-1), hits.sum(-1)
    chance = (actual * predicted).sum(-1)
    spread = (total**2 - (actual**2).sum(-1)) * (total**2 - (predicted**2).sum(-1))
    correlation = np.where(spread == 0, 0.0, ratio(right * total - chance, np.sqrt(spread)))
    return {
        "accuracy": ratio(right, total),
        "balanced_accuracy": mean_where(ratio(hits, actual), actual > 0),
        "matthews_correlation": np.where(total == 0, np.nan, correlation),
        "cohen_kappa": 1 - ratio((total - right) * total, total**2 - chance),
    }


def _averaged_stack(matrix: Array, average: str, positive: int) -> Columns:
    hits, actual, predicted = np.diagonal(matrix, axis1=-2, axis2=-1), matrix.sum(-1), matrix.sum(-2)
    occurs = _occurs(matrix)
    if average == "micro":
        hits, actual, predicted = (counts.sum(-1) for counts in (hits, actual, predicted))
    averages: dict[str, Callable[[Array], Array]] = {
        "binary": lambda values: np.where(occurs.any(-1), values[..., positive], np.nan),
        "macro": lambda values: mean_where(values, occurs),
        "micro": lambda values: np.where(occurs.any(-1), values, np.nan),
        "weighted": lambda values: ratio((values * actual).sum(-1), actual.sum(-1)),
        "per_class": lambda values: np.where(occurs, values, np.nan),
    }
    return {name: averages[average](values) for name, values in scores_of_counts(hits, predicted, actual).items()}
