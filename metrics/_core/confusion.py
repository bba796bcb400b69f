"""Scores of classes, from three counts a class: how often it was right, true and predicted.

No score here needs more of the confusion matrix than its diagonal and its margins: thousands of classes cost thousands
of numbers. All are the scores of scikit-learn, vectorised over stacks of evaluations (replicates, groups): 0 / 0 is 0.0
in precision, recall and F1, as its default is; without any label a score is NaN.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .evaluation import Array, Columns
from .metric import ratio

SCORES = ("precision", "recall", "f1")
AVERAGES = ("binary", "macro", "micro", "weighted", "per_class")


class Counts(NamedTuple):
    """Counts of classes, (..., C) each: a stack of evaluations, or one.

    Attributes:
        hits: right predictions, the diagonal of a confusion matrix `[true, predicted]`.
        actual: labels, its sums over the predictions.
        predicted: predictions, its sums over the labels.
    """

    hits: Array
    actual: Array
    predicted: Array

    @property
    def occurs(self) -> Array:
        """Whether a class is in the labels or in the predictions."""
        occurs: Array = self.actual + self.predicted > 0
        return occurs


def counts_of(matrix: Array) -> Counts:
    """Return the counts of a confusion matrix `[..., true, predicted]`, or of a stack of them."""
    return Counts(np.diagonal(matrix, axis1=-2, axis2=-1), matrix.sum(-1), matrix.sum(-2))


def agreement(counts: Counts) -> Columns:
    """Return accuracy, balanced accuracy, Matthews' correlation and Cohen's kappa.

    Balanced accuracy is the mean recall of the classes that occur in the labels. The correlation is 0.0 where labels or
    predictions are constant, as in scikit-learn; kappa is NaN where both are the same constant.

    Args:
        counts: of the classes.

    Returns:
        Arrays (...) called accuracy, balanced_accuracy, matthews_correlation, cohen_kappa.

    Source: K. H. Brodersen et al., "The balanced accuracy and its posterior distribution", 2010; J. Gorodkin,
    "Comparing two K-category assignments by a K-category correlation coefficient", 2004; J. Cohen, "A coefficient of
    agreement for nominal scales", 1960.

    Example:
        >>> float(agreement(counts_of(np.array([[3, 1], [0, 4]])))["accuracy"])
        0.875
    """
    hits, actual, predicted = (np.asarray(values, np.float64) for values in counts)
    total = actual.sum(-1)
    everyone = total[..., None]
    missed, wrong = actual - hits, predicted - hits
    # Each class against all others: differences of squares of the total would lose the digits of rare classes.
    beyond_chance = (hits * (everyone - actual - wrong) - missed * wrong).sum(-1)
    spread = (actual * (everyone - actual)).sum(-1) * (predicted * (everyone - predicted)).sum(-1)
    correlation = np.where(spread == 0, 0.0, ratio(beyond_chance, np.sqrt(spread)))
    return {
        "accuracy": ratio(hits.sum(-1), total),
        "balanced_accuracy": mean_where(ratio(hits, actual), actual > 0),
        "matthews_correlation": np.where(total == 0, np.nan, correlation),
        "cohen_kappa": ratio(beyond_chance, (actual * (everyone - predicted)).sum(-1)),
    }


def precision_recall_f1(counts: Counts, *, average: str, positive: int = 1) -> Columns:
    """Return precision, recall and F1 under an average.

    Args:
        counts: of the classes.
        average: "binary" for class `positive` alone, "micro" over the counts of all classes, "macro" and "weighted" (by
            the number of labels) over those that occur in labels or predictions, "per_class" for each, NaN for a class
            that occurs in neither.
        positive: the class that "binary" scores.

    Returns:
        Arrays (...), with "per_class" (..., C), called precision, recall, f1.

    Source: C. J. van Rijsbergen, "Information Retrieval", 1979.

    Example:
        >>> float(precision_recall_f1(counts_of(np.array([[3, 1], [0, 4]])), average="binary")["precision"])
        0.8
    """
    occurs = counts.occurs
    if average == "micro":
        counts = Counts(*(values.sum(-1) for values in counts))
    averages: dict[str, Callable[[Array], Array]] = {
        "binary": lambda values: np.where(occurs.any(-1), values[..., positive], np.nan),
        "macro": lambda values: mean_where(values, occurs),
        "micro": lambda values: np.where(occurs.any(-1), values, np.nan),
        "weighted": lambda values: ratio((values * counts.actual).sum(-1), counts.actual.sum(-1)),
        "per_class": lambda values: np.where(occurs, values, np.nan),
    }
    values = scores_of_counts(counts.hits, counts.predicted, counts.actual)
    return {name: averages[average](value) for name, value in values.items()}


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
