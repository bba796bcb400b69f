"""Pictures of scores (the extra `plots`) that scikit-learn's displays do not draw.

Each function returns a `matplotlib.figure.Figure` and shows nothing. For a confusion matrix or a precision-recall curve
use `sklearn.metrics.ConfusionMatrixDisplay` and `PrecisionRecallDisplay`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ._core.arguments import numbers
from ._core.evaluation import named_columns
from ._core.metric import ratio
from .calibration import bin_sums, calibration_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (4.5, 4.5)
COLOR = "#2b6cb0"


def reliability_diagram(columns: Mapping[str, ArrayLike]) -> "Figure":
    """Draw accuracy as a function of confidence, and the share of the labels in each bin.

    Args:
        columns: `bin_labels`, `bin_confidence` and `bin_correct` (samples, bins), as `reducers.calibration_bins`
            returns and `trainer.predict(...).predictions` holds.

    Returns:
        A figure; its title is the expected calibration error.

    Raises:
        TypeError: if a column does not hold numbers.
        ValueError: if a column is missing, or not (samples, bins).

    References:
        C. Guo et al., "On Calibration of Modern Neural Networks", 2017, figure 1, https://arxiv.org/abs/1706.04599

    Example:
        >>> sums = {"bin_labels": [[0, 4]], "bin_confidence": [[0, 3.6]], "bin_correct": [[0, 3]]}
        >>> reliability_diagram(sums).axes[0].get_title()
        'expected calibration error 0.150'
    """
    given = {name: numbers(name, column, "a column of numbers") for name, column in named_columns(columns).items()}
    sums = {name: column.sum(0) for name, column in bin_sums(given, None).items()}
    error = float(calibration_errors(sums)["expected_calibration_error"])
    labels, confidence, correct = sums.values()
    bins = len(labels)
    figure, axes = _axes()
    edges = np.arange(bins) / bins
    axes.bar(edges, ratio(labels, labels.sum()), 1 / bins, align="edge", color="0.85", label="share of the labels")
    axes.plot([0, 1], [0, 1], color="0.5", linestyle=":")
    axes.plot(ratio(confidence, labels), ratio(correct, labels), "o-", color=COLOR, label="accuracy")
    axes.set(xlabel="confidence", xlim=(0, 1), ylim=(0, 1), title=f"expected calibration error {error:.3f}")
    axes.legend(loc="upper left")
    return figure


def group_bars(scores: Mapping[str, float], key: str) -> "Figure":
    """Draw one score of every group, with its interval if there is one.

    Args:
        scores: the results of `by_group(metric, groups)`, and of `by_group(bootstrap(metric), groups)` for the
            intervals, joined by `build` or by merging the two dicts; a prefix such as `eval_` is part of the key.
        key: key of the metric, such as "f1_macro".

    Returns:
        A figure.

    Raises:
        TypeError: if a score is not a number.
        ValueError: if no group has this score.

    Example:
        >>> scores = {"accuracy/de": 0.5, "accuracy/en": 0.7, "accuracy_low/de": 0.4, "accuracy_high/de": 0.6}
        >>> len(group_bars(scores, "accuracy").axes[0].patches)
        2
    """
    start = f"{key}/"
    groups = [name.removeprefix(start) for name in scores if name.startswith(start)]
    if not groups:
        raise ValueError(f"scores must have the key {key!r} for at least one group, got {', '.join(scores)}")
    values = numbers("scores", [scores[start + group] for group in groups], "a number per group")
    ends = [[scores.get(f"{key}_{end}/{group}", np.nan) for group in groups] for end in ("low", "high")]
    figure, axes = _axes()
    axes.bar(groups, values, color=COLOR)
    axes.errorbar(groups, values, abs(np.array(ends) - values), fmt="none", ecolor="black", capsize=4)
    axes.set(ylabel=key)
    axes.tick_params(axis="x", rotation=45)
    return figure


def _axes() -> "tuple[Figure, Axes]":
    """Return an empty figure that belongs to no window and no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("matplotlib is not installed: pip install 'lossfns[plots]'") from None
    figure = Figure(figsize=SIZE, layout="constrained")
    axes: Any = figure.subplots()
    return figure, axes
