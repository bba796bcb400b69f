"""Scores of real-valued predictions, with one or several targets per sample."""

import warnings
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from ._core.build import build
from ._core.confusion import mean_where
from ._core.evaluation import Array, Columns, describe, missing, named_columns
from ._core.metric import Metric, ratio

MISSING = -100.0
# A sum of squared deviations below this fraction of the sum of squares is rounding error.
RESOLUTION = 1e-10
# The columns that are centered on a value among them, so that no digits are lost to a distance that all share.
ORIGIN = ("predictions", "labels")

MOMENTS: dict[str, bool | None] = {"mse": False, "rmse": False, "mae": False, "r2": True, "pearson": True}
RANKS: dict[str, bool | None] = {"spearman": True, "kendall": True}
HIGHER_IS_BETTER = MOMENTS | RANKS


def regression(*, rank_correlation: bool = False) -> Metric:
    """Score real-valued predictions: errors, explained variance and correlation.

    For each target, with predictions x and labels y::

        mse = mean((x - y)^2)     rmse = sqrt(mse)     mae = mean(|x - y|)
        r2 = 1 - sum((x - y)^2) / sum((y - mean(y))^2)     pearson = cov(x, y) / (std(x) std(y))

    Predictions are floats of the labels' shape, (B,) or (B, K), alone or as the column `predictions`; (B, 1) and (B,)
    may be combined. A label of -100.0 is missing and left out. Scores are computed per target and averaged over the
    targets, as in scikit-learn; targets without labels are left out. Keys:

    - `mse`, `rmse`, `mae`;
    - `r2`, `pearson`, and with `rank_correlation` `spearman` and `kendall` (tau-b): over the targets whose labels
      differ, NaN if there are none. For constant predictions correlations are NaN.

    `r2` and `pearson` follow from sums relative to the median of the first batch, so that they stream and keep
    their digits even if all values are far from 0.

    Args:
        rank_correlation: also score the correlation of the ranks, which needs all samples at once.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    References:
        K. Pearson, "Note on regression and inheritance in the case of two parents", 1895,
        https://doi.org/10.1098/rspl.1895.0041
        C. Spearman, "The proof and measurement of association between two things", 1904,
        https://doi.org/10.2307/1412159
        M. G. Kendall, "The treatment of ties in ranking problems", 1945, https://doi.org/10.1093/biomet/33.3.239
        T. F. Chan, G. H. Golub, R. J. LeVeque, "Algorithms for Computing the Sample Variance", 1983,
        https://doi.org/10.1080/00031305.1983.10483115 (the shifted sums)

    Example:
        >>> from types import SimpleNamespace
        >>> evaluated = SimpleNamespace(predictions=np.array([[1.0], [2.0], [4.0]]), label_ids=np.array([1, 2, 3]))
        >>> regression()(evaluated)["r2"]
        0.5
    """
    metric = Metric(statistics=float_columns, score=moment_scores, higher_is_better=MOMENTS, center=moments)
    if not rank_correlation:
        return metric
    reason = "Spearman and Kendall rank each sample among all; rank_correlation=False leaves them out"
    return build(
        metric, Metric(statistics=float_columns, score=rank_scores, higher_is_better=RANKS, needs_all_samples=reason)
    )


def float_columns(predictions: Any, labels: Any) -> Columns:
    """Return predictions and labels as float64 columns (B, K).

    Args:
        predictions: floats (B,) or (B, K), alone or as the column `predictions`.
        labels: numbers of the same shape, -100.0 where missing.

    Returns:
        `predictions` and `labels`.

    Raises:
        TypeError: if predictions are not floats, or labels are not one array of numbers.
        ValueError: if shapes differ, or a label is NaN.
    """
    values = predictions if isinstance(predictions, np.ndarray) else named_columns(predictions).get("predictions")
    if values is None:
        raise missing("floats of the labels' shape, alone or as the column 'predictions'", predictions)
    if values.dtype.kind != "f" or not isinstance(labels, np.ndarray) or labels.dtype.kind not in "biuf":
        raise TypeError(
            f"predictions must be floats and labels one array of numbers, got {describe(values)} and labels in a "
            f"{type(labels).__name__}: {describe(labels)}"
        )
    values, targets = (array[:, None] if array.ndim == 1 else array for array in (values, labels))
    if values.shape != targets.shape or values.ndim != 2:
        raise ValueError(
            "predictions and labels must both be (B, K), or (B,) for a single target, got predictions "
            f"{values.shape} and labels {targets.shape}. The number of targets is the model's num_labels"
        )
    if np.isnan(targets).any():
        raise ValueError("labels must not be NaN: mark missing ones by -100.0, as lossfns.collators.mask_missing does")
    return {"predictions": values.astype(np.float64), "labels": targets.astype(np.float64)}


def moments(columns: Columns, origin: Columns) -> tuple[Columns, Columns]:
    """Return the columns whose sums `moment_scores` reads, and the origin that they are relative to.

    Args:
        columns: the columns of `float_columns`.
        origin: the origin of predictions and labels, (K,) each, NaN for a target without labels so far; empty at the
            start.

    Returns:
        (B, K), 0 where the label is missing: `count` int64; in float64 errors `squared` and `absolute`, and with x the
        prediction and y the label, each relative to its origin, `x`, `y`, `xx`, `yy`, `xy`. And the origin: for a
        target that had none, the medians of the samples whose label is known.
    """
    known = columns["labels"] != MISSING
    origin = {name: _origin(columns[name], known, origin.get(name)) for name in ORIGIN}
    with np.errstate(over="ignore", invalid="ignore"):  # predictions of a model that has diverged
        errors = np.where(known, columns["predictions"] - columns["labels"], 0.0)
        x, y = (np.where(known, columns[name] - origin[name], 0.0) for name in ORIGIN)
        products = {"squared": errors**2, "xx": x * x, "yy": y * y, "xy": x * y}
    return {"count": known.astype(np.int64), "absolute": abs(errors), "x": x, "y": y, **products}, origin


@np.errstate(over="ignore", invalid="ignore")
def moment_scores(sums: Columns) -> Columns:
    """Return the scores of `regression`, without the rank correlations.

    Args:
        sums: the sums of `moments`, each (..., K), for one evaluation or a stack of them; each relative to any origin.

    Returns:
        Scores (...).
    """
    count, any_label = sums["count"], sums["count"] > 0
    mse, mae = ratio(sums["squared"], count), ratio(sums["absolute"], count)
    deviations_x, deviations_y = (_deviations(sums[name], sums[name + name], count) for name in "xy")
    products = sums["xy"] - ratio(sums["x"] * sums["y"], count)
    differ = deviations_y > 0
    return {
        "mse": mean_where(mse, any_label),
        "rmse": mean_where(np.sqrt(mse), any_label),
        "mae": mean_where(mae, any_label),
        "r2": mean_where(1 - ratio(sums["squared"], deviations_y), differ),
        "pearson": mean_where(np.clip(ratio(products, np.sqrt(deviations_x * deviations_y)), -1, 1), differ),
    }


def rank_scores(rows: Columns) -> dict[str, ArrayLike]:
    """Return the rank correlations, each averaged over the targets whose labels differ.

    Args:
        rows: the columns of `float_columns`.

    Returns:
        `spearman` and `kendall`.
    """
    functions = {"spearman": stats.spearmanr, "kendall": stats.kendalltau}
    found: dict[str, list[float]] = {name: [] for name in functions}
    for x, y in zip(rows["predictions"].T, rows["labels"].T, strict=True):
        known = y != MISSING
        if len(np.unique(y[known])) > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # constant predictions give NaN, which is documented
                for name, function in functions.items():
                    found[name].append(function(x[known], y[known]).statistic)
    return {name: np.mean(values) if values else np.nan for name, values in found.items()}


def _origin(values: Array, known: Array, before: Array | None) -> Array:
    """Return the median of the known values of each target, NaN where there are none, unless `before` has an origin.

    A single value would not do: if it is an outlier, replicates that are drawn without it lose their digits.
    """
    origin = np.full(values.shape[1], np.nan) if before is None else before.copy()
    known = known & np.isfinite(values)  # a NaN must affect only the replicates that draw it
    for target in np.flatnonzero(np.isnan(origin) & known.any(0)):
        origin[target] = np.median(values[known[:, target], target])
    return origin


def _deviations(total: Array, squares: Array, count: Array) -> Array:
    """Return the sum of squared deviations from the mean, 0.0 where it is only rounding error."""
    deviations = squares - ratio(total * total, count)
    return np.where(deviations <= RESOLUTION * squares, 0.0, deviations)
