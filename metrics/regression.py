"""Scores of real-valued predictions, one target a sample or several."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from ._core.classes import missing
from ._core.confusion import mean_where, quiet
from ._core.evaluation import Array, Columns, describe, named_columns
from ._core.metric import Metric, build, ratio

MISSING = -100.0
# Sums of squares tell a spread from rounding down to this fraction of themselves.
RESOLUTION = 1e-10
# What is counted from: amid the other values, so that no digits go into a distance that all share.
ORIGIN = ("predictions", "labels")

MOMENTS: dict[str, bool | None] = {"mse": False, "rmse": False, "mae": False, "r2": True, "pearson": True}
RANKS: dict[str, bool | None] = {"spearman": True, "kendall": True}
DIRECTIONS = MOMENTS | RANKS


def regression(*, ranking: bool = False) -> Metric:
    """Score real-valued predictions: errors, explained variance and correlation.

    Predictions are floats of the labels' shape, (B,) or (B, K), alone or as the column `predictions`; (B, 1) and (B,)
    go together. A label of -100.0 is missing and left out. Scores are computed for each target and averaged over the
    targets, as scikit-learn does; targets without any label are left out. Keys:

    - `mse`, `rmse`, `mae`;
    - `r2`, `pearson`, and with `ranking` `spearman` and `kendall` (tau-b): over the targets whose labels differ, NaN
      where none has such labels. For constant predictions correlations are NaN.

    `r2` and `pearson` follow from sums about the median of the first batch, so that they stream and keep their digits
    however far from 0 the values lie.

    Args:
        ranking: also correlate the ranks, which needs all samples at once.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Source: K. Pearson, "Note on regression and inheritance in the case of two parents", 1895; C. Spearman, "The proof
    and measurement of association between two things", 1904; M. G. Kendall, "The treatment of ties in ranking
    problems", 1945; T. F. Chan, G. H. Golub, R. J. LeVeque, "Algorithms for Computing the Sample Variance", 1983, for
    the shifted sums.

    Example:
        >>> from types import SimpleNamespace
        >>> evaluated = SimpleNamespace(predictions=np.array([[1.0], [2.0], [4.0]]), label_ids=np.array([1, 2, 3]))
        >>> regression()(evaluated)["r2"]
        0.5
    """
    metric = Metric(statistics=pairs, score=moment_scores, directions=MOMENTS, summands=moments)
    if not ranking:
        return metric
    reason = "Spearman and Kendall rank each sample among all; ranking=False leaves them out"
    return build(metric, Metric(statistics=pairs, score=rank_scores, directions=RANKS, whole=reason))


def pairs(predictions: Any, labels: Any) -> Columns:
    """Return predictions and labels as float64 columns (B, K).

    Args:
        predictions: floats (B,) or (B, K), alone or as the column `predictions`.
        labels: numbers of the same shape, -100.0 where missing.

    Returns:
        `predictions` and `labels`.

    Raises:
        TypeError: predictions are not floats, or labels not one array of numbers.
        ValueError: shapes that differ, or a label that is NaN.
    """
    values = predictions if isinstance(predictions, np.ndarray) else named_columns(predictions).get("predictions")
    if values is None:
        raise missing("floats of the labels' shape, alone or as the column 'predictions'", predictions)
    if values.dtype.kind != "f" or not isinstance(labels, np.ndarray) or labels.dtype.kind not in "biuf":
        raise TypeError(
            f"floats are scored against one array of numbers; {describe(values)} came, and labels in a "
            f"{type(labels).__name__}: {describe(labels)}"
        )
    values, targets = (array[:, None] if array.ndim == 1 else array for array in (values, labels))
    if values.shape != targets.shape or values.ndim != 2:
        raise ValueError(
            f"predictions have shape {values.shape}, labels {targets.shape}: both must be (B, K), or (B,) for a single "
            "target. The number of targets is the model's num_labels"
        )
    if np.isnan(targets).any():
        raise ValueError(
            "a label is NaN: mark missing labels by -100.0, as lossfns.collators.mask_missing(collator) does"
        )
    return {"predictions": values.astype(np.float64), "labels": targets.astype(np.float64)}


def moments(columns: Columns, origin: Columns) -> tuple[Columns, Columns]:
    """Return the columns whose sums `moment_scores` reads.

    Args:
        columns: those of `pairs`.
        origin: what predictions and labels are counted from, (K,) each, NaN for a target without any label so far;
            empty at the start.

    Returns:
        (B, K), 0 where the label is missing: `count` int64; in float64 errors `squared` and `absolute`, and with x the
        prediction and y the label, each from its origin, `x`, `y`, `xx`, `yy`, `xy`. And the origin: for a target that
        had none, the medians of the pairs whose label is known.
    """
    known = columns["labels"] != MISSING
    origin = {name: _middle(columns[name], known, origin.get(name)) for name in ORIGIN}
    with np.errstate(over="ignore", invalid="ignore"):  # predictions of a model that diverged
        errors = np.where(known, columns["predictions"] - columns["labels"], 0.0)
        x, y = (np.where(known, columns[name] - origin[name], 0.0) for name in ORIGIN)
        products = {"squared": errors**2, "xx": x * x, "yy": y * y, "xy": x * y}
    return {"count": known.astype(np.int64), "absolute": abs(errors), "x": x, "y": y, **products}, origin


@np.errstate(over="ignore", invalid="ignore")
def moment_scores(sums: Columns) -> Columns:
    """Return the scores that `regression` lists, without the ranks.

    Args:
        sums: the sums of `moments`, each (..., K): a stack of evaluations, or one; each about any origin.

    Returns:
        Scores (...).
    """
    count, any_label = sums["count"], sums["count"] > 0
    mse, mae = ratio(sums["squared"], count), ratio(sums["absolute"], count)
    spread_x, spread_y = (_spread(sums[name], sums[name + name], count) for name in "xy")
    together = sums["xy"] - ratio(sums["x"] * sums["y"], count)
    differ = spread_y > 0
    return {
        "mse": mean_where(mse, any_label),
        "rmse": mean_where(np.sqrt(mse), any_label),
        "mae": mean_where(mae, any_label),
        "r2": mean_where(1 - ratio(sums["squared"], spread_y), differ),
        "pearson": mean_where(np.clip(ratio(together, np.sqrt(spread_x * spread_y)), -1, 1), differ),
    }


def rank_scores(rows: Columns) -> dict[str, ArrayLike]:
    """Return the rank correlations, each the mean over the targets whose labels differ.

    Args:
        rows: the columns of `pairs`.

    Returns:
        `spearman` and `kendall`.
    """
    functions = {"spearman": stats.spearmanr, "kendall": stats.kendalltau}
    found: dict[str, list[float]] = {name: [] for name in functions}
    for x, y in zip(rows["predictions"].T, rows["labels"].T, strict=True):
        known = y != MISSING
        if len(np.unique(y[known])) > 1:
            with quiet():  # constant predictions give NaN
                for name, function in functions.items():
                    found[name].append(function(x[known], y[known]).statistic)
    return {name: np.mean(values) if values else np.nan for name, values in found.items()}


def _middle(values: Array, known: Array, before: Array | None) -> Array:
    """Return the median of the known values of each target, NaN where there is none, unless one came `before`.

    A single value would not do: where it lies far off, the samples that a replicate draws without it lose their digits.
    """
    middle = np.full(values.shape[1], np.nan) if before is None else before.copy()
    known = known & np.isfinite(values)  # NaN is for the replicates that draw it, not for all
    for target in np.flatnonzero(np.isnan(middle) & known.any(0)):
        middle[target] = np.median(values[known[:, target], target])
    return middle


def _spread(total: Array, squares: Array, count: Array) -> Array:
    """Return the sum of squared differences from the mean, 0.0 where that is nothing but rounding."""
    spread = squares - ratio(total * total, count)
    return np.where(spread <= RESOLUTION * squares, 0.0, spread)
