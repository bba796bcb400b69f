"""Calibration: how far confidence is from accuracy, from sums over bins of confidence."""

from typing import Any

import numpy as np

from ._core.evaluation import Columns, missing, named_columns
from ._core.metric import Metric, ratio

BINS = ("bin_labels", "bin_confidence", "bin_correct")
HIGHER_IS_BETTER: dict[str, bool | None] = {"expected_calibration_error": False, "maximum_calibration_error": False}


def calibration() -> Metric:
    """Score how far confidence is from accuracy, over bins of confidence, for any number of classes.

    With n labels, n_b of them in bin b, and acc_b and conf_b their mean accuracy and confidence::

        expected_calibration_error = sum_b n_b / n |acc_b - conf_b|
        maximum_calibration_error  = max_b |acc_b - conf_b|

    The reducer is `calibration_bins`, whose columns are read. The keys are the two names above; without labels both
    are NaN.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    References:
        C. Guo et al., "On Calibration of Modern Neural Networks", 2017, https://arxiv.org/abs/1706.04599

    Example:
        >>> from types import SimpleNamespace
        >>> bins = {"bin_labels": [[1, 3]], "bin_confidence": [[0.25, 2.75]], "bin_correct": [[0, 2]]}
        >>> bins = {name: np.array(sums) for name, sums in bins.items()}
        >>> calibration()(SimpleNamespace(predictions=bins, label_ids=np.zeros((1, 4))))
        {'expected_calibration_error': 0.25, 'maximum_calibration_error': 0.25}
    """
    return Metric(statistics=bin_sums, score=calibration_errors, higher_is_better=HIGHER_IS_BETTER)


def bin_sums(predictions: Any, labels: Any) -> Columns:
    """Return the columns of `reducers.calibration_bins`, (samples, bins).

    Raises:
        ValueError: if a column is missing, or has another shape.
    """
    found = named_columns(predictions)
    shapes = {found[name].shape if name in found else () for name in BINS}
    if len(shapes) > 1 or any(len(shape) != 2 or shape[1] == 0 for shape in shapes):
        raise missing(f"the columns {', '.join(BINS)} (samples, bins) of calibration_bins", predictions)
    return {name: found[name] for name in BINS}


@np.errstate(invalid="ignore")  # the difference of infinite sums is NaN
def calibration_errors(sums: Columns) -> Columns:
    """Return the scores of `calibration`, for the sums of `bin_sums` or stacks of them."""
    labels = sums["bin_labels"]
    gap = abs(sums["bin_confidence"] - sums["bin_correct"])
    largest = np.max(np.where(labels > 0, ratio(gap, labels), 0.0), axis=-1)
    total = labels.sum(-1)
    return {
        "expected_calibration_error": ratio(gap.sum(-1), total),
        "maximum_calibration_error": np.where(total > 0, largest, np.nan),
    }
