"""Thresholds of multi-label predictions, tuned on labelled data."""

import numpy as np
from numpy.typing import ArrayLike

from ._core import confusion
from ._core.arguments import numbers
from ._core.evaluation import Array
from .classification import label_pairs

UNTUNED = 0.5


def tuned_thresholds(probabilities: ArrayLike, labels: ArrayLike, *, shared: bool = False) -> tuple[float, ...]:
    """Find for each class the threshold with the best F1.

    Candidates are the probabilities that occur; a class is predicted where its probability is at least the threshold.
    Among equally good ones the largest is taken. Tune on validation data and score on other data:
    `multi_label(num_classes, threshold=tuned_thresholds(probabilities, labels))`.

    Args:
        probabilities: floats (samples, classes) in [0, 1], as `trainer.predict(...).predictions["probabilities"]`.
        labels: 0, 1, or -100 where not known, (samples, classes).
        shared: one threshold for all classes, with the best F1 over all labels (micro).

    Returns:
        One threshold a class, in [0, 1]; 0.5 for a class without any positive label.

    Raises:
        TypeError: labels or probabilities are no numbers.
        ValueError: labels or probabilities are none, or their shapes differ.

    Source: Z. C. Lipton, C. Elkan, B. Narayanaswamy, "Optimal Thresholding of Classifiers to Maximize F1 Measure",
    2014.

    Example:
        >>> tuned_thresholds([[0.1, 0.9], [0.3, 0.4], [0.2, 0.7]], [[0, 1], [1, 0], [0, 0]])
        (0.3, 0.9)
    """
    values = numbers("probabilities", probabilities, "floats (samples, classes) in [0, 1]")
    targets = numbers("labels", labels, "0, 1, or -100 where not known, (samples, classes)")
    if targets.ndim != 2:
        raise ValueError(f"labels are (samples, classes); these have shape {targets.shape}")
    num_classes = len(targets.T)
    known, actual = label_pairs(values, targets, num_classes)
    if shared:
        return (_best(values[known], actual[known]),) * num_classes
    columns = zip(values.T, known.T, actual.T, strict=True)
    return tuple(_best(column[counts], positive[counts]) for column, counts, positive in columns)


def _best(probabilities: Array, actual: Array) -> float:
    if not actual.any():
        return UNTUNED
    order = np.argsort(-probabilities, kind="stable")
    candidates, hits = probabilities[order], actual[order].cumsum()
    f1 = confusion.scores_of_counts(hits, np.arange(1, len(hits) + 1), hits[-1])["f1"]
    last_of_equals = np.append(candidates[1:] != candidates[:-1], True)
    return float(candidates[np.where(last_of_equals, f1, -1.0).argmax()])
