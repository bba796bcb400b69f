"""Pictures of scores (the extra `plots`); each function returns a `matplotlib.figure.Figure` and shows nothing."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import precision_recall_curve

from ._core.arguments import number, numbers, sequence, string, table
from ._core.classes import IGNORED
from ._core.evaluation import named_columns
from ._core.metric import ratio
from .language import bin_sums, gaps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.5
COLOR = "#2b6cb0"
ACCENT = "#c05621"


def confusion_matrix(matrix: ArrayLike, names: Sequence[str]) -> "Figure":
    """Draw how often each class was taken for each other one: shades by row, counts in the cells.

    Args:
        matrix: counts (C, C), `[true, predicted]`.
        names: of the classes.

    Returns:
        A figure.

    Raises:
        TypeError: counts that are no numbers, or names that are no sequence.
        ValueError: not as many rows and columns as names, or no class at all.

    Example:
        >>> confusion_matrix([[3, 1], [0, 4]], ["cat", "dog"]).axes[0].get_xlabel()
        'predicted'
    """
    counts = numbers("matrix", matrix, "counts (C, C)")
    names = sequence("names", names, "the names of the C classes")
    if not names or counts.shape != (len(names), len(names)):
        raise ValueError(f"{len(names)} names came, and a matrix of shape {counts.shape}: C names go with (C, C)")
    figure, axes = _axes(size=max(WIDTH, 0.6 * len(names)))
    shares = np.nan_to_num(ratio(counts, counts.sum(1, keepdims=True)))
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for (row, column), count in np.ndenumerate(counts):
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, f"{count:g}", ha="center", va="center", color=color)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted", ylabel="true")
    return figure


def reliability_diagram(columns: Mapping[str, ArrayLike]) -> "Figure":
    """Draw accuracy against confidence, and how the labels are spread over the bins.

    Args:
        columns: `bin_labels`, `bin_confidence` and `bin_correct` (samples, bins), as `reducers.calibration_bins`
            returns and `trainer.predict(...).predictions` holds.

    Returns:
        A figure; its title has the expected calibration error.

    Raises:
        TypeError: not a dict, or columns that are no numbers.
        ValueError: a column is missing, or not (samples, bins).

    Source: C. Guo et al., "On Calibration of Modern Neural Networks", 2017, figure 1.

    Example:
        >>> sums = {"bin_labels": [[0, 4]], "bin_confidence": [[0, 3.6]], "bin_correct": [[0, 3]]}
        >>> reliability_diagram(sums).axes[0].get_title()
        'expected calibration error 0.150'
    """
    table("columns", columns, "the dict that reducers.calibration_bins returns")
    given = {name: numbers(name, column, "a column of numbers") for name, column in named_columns(columns).items()}
    sums = {name: column.sum(0) for name, column in bin_sums(given, None).items()}
    error = float(gaps(sums)["expected_calibration_error"])
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


def precision_recall(probabilities: ArrayLike, labels: ArrayLike, *, threshold: float | None = None) -> "Figure":
    """Draw precision against recall of one class, and where a threshold lies.

    Args:
        probabilities: floats (samples,).
        labels: 0, 1, or -100 where not known, (samples,).
        threshold: as one of `tuned_thresholds`; the class is predicted from it on.

    Returns:
        A figure.

    Raises:
        TypeError: probabilities, labels or the threshold are no numbers.
        ValueError: not one probability and one label, 0, 1 or -100, a sample, or no sample whose label is known.

    Source: C. J. van Rijsbergen, "Information Retrieval", 1979.

    Example:
        >>> len(precision_recall([0.2, 0.7, 0.9], [0, 1, 1], threshold=0.7).axes[0].lines)
        2
    """
    values = numbers("probabilities", probabilities, "floats (samples,)")
    truth = numbers("labels", labels, "0, 1, or -100 where not known, (samples,)")
    known = truth != IGNORED
    fits = values.shape == truth.shape and values.ndim == 1 and np.isin(truth, (0, 1, IGNORED)).all()
    if not fits or not known.any() or not np.isfinite(values[known]).all():
        raise ValueError(
            f"probabilities {values.shape} and labels {truth.shape} must both be (samples,): finite numbers, and 0, 1, "
            f"or -100 where not known, with at least one known; {known.sum()} of the labels are"
        )
    cut = None if threshold is None else number("threshold", threshold, "a probability")
    precision, recall, cuts = precision_recall_curve(truth[known], values[known])
    figure, axes = _axes()
    axes.plot(recall, precision, color=COLOR, drawstyle="steps-post")
    if cut is not None:
        at = int(np.searchsorted(cuts, cut))
        axes.plot(recall[at], precision[at], "o", color=ACCENT, label=f"threshold {cut:.3g}")
        axes.legend(loc="lower left")
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.02), ylim=(0, 1.02))
    return figure


def group_bars(scores: Mapping[str, float], key: str) -> "Figure":
    """Draw one score of every group, with its interval where there is one.

    Args:
        scores: results of `by_group(metric, groups)`, and of `by_group(bootstrap(metric), groups)` for the intervals,
            joined by `build` or as two dicts in one; a prefix as `eval_` is part of the key.
        key: of the metric, as "f1_macro".

    Returns:
        A figure.

    Raises:
        TypeError: scores are no dict of numbers, or the key no text.
        ValueError: no group has this score.

    Example:
        >>> scores = {"accuracy/de": 0.5, "accuracy/en": 0.7, "accuracy_low/de": 0.4, "accuracy_high/de": 0.6}
        >>> len(group_bars(scores, "accuracy").axes[0].patches)
        2
    """
    table("scores", scores, "the dict that a metric returns")
    start = f"{string('key', key, 'the name of a score')}/"
    groups = [name.removeprefix(start) for name in scores if name.startswith(start)]
    if not groups:
        raise ValueError(f"no group has the score {key!r}; the scores are {', '.join(scores)}")
    values = numbers("scores", [scores[start + group] for group in groups], "a number for each group")
    ends = [[scores.get(f"{key}_{end}/{group}", np.nan) for group in groups] for end in ("low", "high")]
    figure, axes = _axes()
    axes.bar(groups, values, color=COLOR)
    axes.errorbar(groups, values, abs(np.array(ends) - values), fmt="none", ecolor="black", capsize=4)
    axes.set(ylabel=key)
    axes.tick_params(axis="x", rotation=45)
    return figure


def _axes(size: float = WIDTH) -> "tuple[Figure, Axes]":
    """Return an empty figure that belongs to no window and no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("matplotlib is not installed: pip install 'lossfns[plots]'") from None
    figure = Figure(figsize=(size, size), layout="constrained")
    axes: Any = figure.subplots()
    return figure, axes
