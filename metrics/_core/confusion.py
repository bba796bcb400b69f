"""Scores of classes that follow from three counts per class: hits, labels and predictions.

No score here needs more of the confusion matrix than its diagonal and its margins, so that the memory grows linearly
with the number of classes. All scores equal those of scikit-learn, vectorized over stacks of evaluations (replicates,
groups): 0 / 0 is 0.0 in precision, recall and F1, which is scikit-learn's default; without labels a score is NaN.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .evaluation import Array, Columns
from .metric import ratio

SCORES = ("precision", "recall", "f1")
AVERAGES = ("binary", "macro", "micro", "weighted", "per_class")


class Counts(NamedTuple):
    """Counts per class, (..., C) each, for one evaluation or a stack of them.

    Attributes:
        hits: correct predictions, the diagonal of a confusion matrix `[true, predicted]`.
        actual: labels, the sums over the predictions.
        predicted: predictions, the sums over the labels.
    """

    hits: Array
    actual: Array
    predicted: Array


def counts_of(matrix: Array) -> Counts:
    """Return the counts of a confusion matrix `[..., true, predicted]`, or of a stack of them."""
    return Counts(np.diagonal(matrix, axis1=-2, axis2=-1), matrix.sum(-1), matrix.sum(-2))


def agreement(counts: Counts) -> Columns:
    """Compute accuracy, balanced accuracy, Matthews' correlation and Cohen's kappa.

    With n labels, and per class k hits h, labels a and predictions p::

        accuracy = sum h / n                     balanced_accuracy = mean of h / a over the classes with a > 0
        matthews = (n sum h - sum a p) / sqrt((n^2 - sum a^2) (n^2 - sum p^2))
        kappa    = (n sum h - sum a p) / (n^2 - sum a p)

    The correlation is 0.0 where labels or predictions are constant, as in scikit-learn; kappa is NaN where both are the
    same constant.

    Args:
        counts: counts per class.

    Returns:
        Arrays (...) named accuracy, balanced_accuracy, matthews_correlation, cohen_kappa.

    References:
        K. H. Brodersen et al., "The balanced accuracy and its posterior distribution", 2010,
        https://doi.org/10.1109/ICPR.2010.764
        J. Gorodkin, "Comparing two K-category assignments by a K-category correlation coefficient", 2004,
        https://doi.org/10.1016/j.compbiolchem.2004.09.006
        J. Cohen, "A coefficient of agreement for nominal scales", 1960, https://doi.org/10.1177/001316446002000104

    Example:
        >>> float(agreement(counts_of(np.array([[3, 1], [0, 4]])))["accuracy"])
        0.875
    """
    hits, actual, predicted = (np.asarray(values, np.float64) for values in counts)
    total = actual.sum(-1)
    n = total[..., None]
    missed, wrong = actual - hits, predicted - hits
    # Summed per class against all others: a difference of squares of n would lose the digits of rare classes.
    covariance = (hits * (n - actual - wrong) - missed * wrong).sum(-1)
    variances = (actual * (n - actual)).sum(-1) * (predicted * (n - predicted)).sum(-1)
    correlation = np.where(variances == 0, 0.0, ratio(covariance, np.sqrt(variances)))
    return {
        "accuracy": ratio(hits.sum(-1), total),
        "balanced_accuracy": mean_where(ratio(hits, actual), actual > 0),
        "matthews_correlation": np.where(total == 0, np.nan, correlation),
        "cohen_kappa": ratio(covariance, (actual * (n - predicted)).sum(-1)),
    }


def precision_recall_f1(counts: Counts, *, average: str, positive: int = 1) -> Columns:
    """Compute precision, recall and F1 under an average.

    Per class, or over the summed counts of all classes for "micro"::

        precision = hits / predicted     recall = hits / actual     f1 = 2 hits / (predicted + actual)

    Args:
        counts: counts per class.
        average: "binary" for class `positive` alone; "micro" over the summed counts; "macro" and "weighted" (by the
            number of labels) over the classes that occur in labels or predictions; "per_class" for each, NaN for a
            class that occurs in neither.
        positive: the class that "binary" scores.

    Returns:
        Arrays (...), or (..., C) with "per_class", named precision, recall, f1.

    References:
        C. J. van Rijsbergen, "Information Retrieval", 2nd edition, 1979, chapter 7,
        http://www.dcs.gla.ac.uk/Keith/Preface.html

    Example:
        >>> float(precision_recall_f1(counts_of(np.array([[3, 1], [0, 4]])), average="binary")["precision"])
        0.8
    """
    occurs: Array = counts.actual + counts.predicted > 0
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
        hits: number of correct predictions.
        predicted: number of predictions.
        actual: number of labels.

    Returns:
        Arrays named precision, recall, f1.
    """
    hits, predicted, actual = np.asarray(hits), np.asarray(predicted), np.asarray(actual)
    fractions = ((hits, predicted), (hits, actual), (2 * hits, predicted + actual))
    return {
        name: np.where(total == 0, 0.0, ratio(count, total))
        for name, (count, total) in zip(SCORES, fractions, strict=True)
    }


def mean_where(values: Array, where: Array) -> Array:
    """Return the mean over the last dimension of the chosen values, NaN where none are chosen."""
    return ratio(np.where(where, values, 0.0).sum(-1), where.sum(-1))
