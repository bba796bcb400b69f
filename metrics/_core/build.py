"""Metrics made of other metrics: several joined, labels taken from a column, one metric per dataset."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from numpy.typing import ArrayLike

from . import keys
from .evaluation import Columns, EvalPrediction, batches, missing, named_columns
from .metric import Center, Metric, Statistics, check_metric, name_of


def build(*metrics: Metric, num_samples: int | None = None, **named: Metric) -> Metric:
    """Join metrics into one; statistics that several of them share are computed once.

    Args:
        metrics: metrics whose keys stay as they are.
        num_samples: the number of samples of an evaluation; required for `batch_eval_metrics=True`.
        named: metrics whose keys become `{name}_{key}`.

    Returns:
        One metric with the scores of all.

    Raises:
        TypeError: if an argument is not a metric.
        ValueError: if no metric is given, two scores have the same key, the Trainer reserves a key, or values of
            `num_samples` differ.

    Example:
        >>> from metrics import build, language_modeling
        >>> metric = build(lm=language_modeling(), num_samples=64)
        >>> metric.higher_is_better["lm_perplexity"]
        False
    """
    parts = [("", metric) for metric in metrics] + [(f"{name}_", metric) for name, metric in named.items()]
    if not parts:
        raise ValueError("build() needs at least one metric, for example build(language_modeling(), num_samples=64)")
    higher_is_better: dict[str, bool | None] = {}
    for prefix, metric in parts:
        check_metric(metric)
        prefixed = {prefix + key: better for key, better in metric.higher_is_better.items()}
        if (key := keys.collision(higher_is_better, prefixed)) is not None:
            raise ValueError(f"two metrics return {key!r}: name one of them, for example build(first, other=second)")
        higher_is_better |= prefixed
    given = [num_samples, *(metric.num_samples for _, metric in parts)]
    counts = [count for count in given if count is not None]
    if any(count != counts[0] for count in counts):
        raise ValueError(
            f"all metrics of one evaluation must have the same num_samples, got {', '.join(map(str, counts))}; the "
            "number of groups, units or features given to a metric counts as well"
        )
    shared = {_identity(metric): metric for _, metric in parts}
    names = {identity: str(place) for place, identity in enumerate(shared)}
    centers = tuple(metric.center for metric in shared.values())
    return Metric(
        statistics=_JoinedStatistics(tuple(metric.statistics for metric in shared.values())),
        score=_JoinedScore(tuple((prefix, names[_identity(metric)], metric) for prefix, metric in parts)),
        higher_is_better=higher_is_better,
        needs_all_samples="; ".join(dict.fromkeys(filter(None, (part.needs_all_samples for _, part in parts)))) or None,
        center=_JoinedCenter(centers) if any(centers) else None,
        depends_on_order=any(metric.depends_on_order for _, metric in parts),
        supports_resampling=all(metric.supports_resampling for _, metric in parts),
        num_samples=counts[0] if counts else None,
    )


def with_labels_from(metric: Metric, column: str) -> Metric:
    """Return the metric with a column of the predictions as labels, such as `answers` of `reducers.answer_logits`.

    Args:
        metric: any metric.
        column: name of the column.

    Returns:
        The metric with other labels.

    Raises:
        TypeError: if `metric` is not a metric.

    Example:
        >>> import numpy as np
        >>> from types import SimpleNamespace
        >>> from metrics import classification
        >>> found = {"ids": np.array([0, 1]), "answers": np.array([0, 0])}
        >>> metric = with_labels_from(classification(2), "answers")
        >>> metric(SimpleNamespace(predictions=found, label_ids=np.zeros((2, 9))))["accuracy"]
        0.5
    """
    check_metric(metric)
    return replace(metric, statistics=partial(column_statistics, metric.statistics, column))


@dataclass(frozen=True)
class ByDataset:
    """Metrics of several datasets, selected by the number of rows. Made by `by_dataset`."""

    metrics: tuple[Metric, ...]

    def __call__(self, eval_pred: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        if not compute_result:
            raise ValueError(
                "by_dataset() tells the datasets apart by their number of rows, which is known only at the end, but "
                "got one step of an evaluation: set batch_eval_metrics=False"
            )
        rows = sum(batch.rows for batch in batches(eval_pred))
        for metric in self.metrics:
            if metric.num_samples == rows:
                return metric(eval_pred)
        known = ", ".join(str(metric.num_samples) for metric in self.metrics)
        raise ValueError(f"by_dataset() has metrics for datasets of {known} rows, got {rows} rows")


def by_dataset(*metrics: Metric) -> ByDataset:
    """Score each of several evaluation datasets, `Trainer(eval_dataset={"a": a, "b": b})`, by its own metric.

    The Trainer calls one `compute_metrics` for all datasets and does not say which one it evaluates, so they are told
    apart by their number of rows.

    Args:
        metrics: each with the `num_samples` of its dataset, such as `build(regression(), num_samples=len(b))`.

    Returns:
        A picklable `compute_metrics`.

    Raises:
        TypeError: if an argument is not a metric.
        ValueError: if a metric has no `num_samples`, or two have the same.

    Example:
        >>> from metrics import build, classification, regression
        >>> scores = by_dataset(build(classification(3), num_samples=90), build(regression(), num_samples=80))
    """
    for metric in metrics:
        check_metric(metric)
    counts = [metric.num_samples for metric in metrics]
    if not counts or None in counts or len(set(counts)) < len(counts):
        raise ValueError(f"by_dataset() needs metrics with different num_samples, one per dataset, got {counts}")
    return ByDataset(metrics)


def column_statistics(statistics: Statistics, column: str, predictions: Any, labels: Any) -> Mapping[str, ArrayLike]:
    """Return the statistics of predictions with one of their columns as labels."""
    found = named_columns(predictions)
    if column not in found:
        raise missing(f"the column {column!r}, which is to be used as labels", predictions)
    return statistics(predictions, found[column])


@dataclass(frozen=True)
class _JoinedStatistics:
    """The columns of all parts, one nested dict per part."""

    parts: tuple[Statistics, ...]

    def __call__(self, predictions: Any, labels: Any) -> dict[str, Any]:
        return {str(place): statistics(predictions, labels) for place, statistics in enumerate(self.parts)}

    def __repr__(self) -> str:
        return f"({', '.join(map(name_of, self.parts))})"


@dataclass(frozen=True)
class _JoinedCenter:
    """The centered columns and the origins of all parts, one nested dict per part."""

    parts: tuple[Center | None, ...]

    def __call__(self, columns: Any, origin: Any) -> tuple[Columns, Columns]:
        found: dict[str, Any] = {
            name: (part, {}) if center is None else center(part, origin.get(name, {}))
            for (name, part), center in zip(columns.items(), self.parts, strict=True)
        }
        return {name: part for name, (part, _) in found.items()}, {name: about for name, (_, about) in found.items()}


@dataclass(frozen=True)
class _JoinedScore:
    """The scores of all parts, each given as the prefix of its keys, the name of its nested dict, and the metric."""

    parts: tuple[tuple[str, str, Metric], ...]

    def __call__(self, sums: Any) -> dict[str, ArrayLike]:
        # If one part needs all samples, every part is given rows, and those that take sums need them summed.
        rows = any(metric.needs_all_samples for _, _, metric in self.parts)
        return {
            prefix + key: value
            for prefix, name, metric in self.parts
            for key, value in metric.scores(metric.sums(sums[name]) if rows else sums[name]).items()
        }

    def __repr__(self) -> str:
        shown = [f"{prefix and prefix + '*: '}{name_of(metric.score)}" for prefix, _, metric in self.parts]
        return f"({', '.join(shown)})"


def _identity(metric: Metric) -> Any:
    """Return what metrics with the same columns have in common; partials of equal content are equal here."""
    parts: Any = metric.statistics
    if isinstance(parts, partial):
        parts = (parts.func, parts.args, tuple(sorted(parts.keywords.items())))
    try:
        hash(parts)
    except TypeError:
        parts = id(metric.statistics)
    return parts, metric.center
