"""A metric: statistics per sample -> sums -> scores; all that is the same for every metric stands here, once.

Source: Matt Post, "A Call for Clarity in Reporting BLEU Scores", 2018 (sacrebleu: sentence statistics, summed, scored).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse

from . import keys as _keys
from .arguments import check, integer, string, table
from .evaluation import Array, Columns, EvalPrediction, batches, holds_tensors

Statistics = Callable[[Any, Any], Mapping[str, ArrayLike]]
Score = Callable[[Columns], Mapping[str, ArrayLike]]
Summands = Callable[[Columns, Columns], tuple[Columns, Columns]]


class _Totals(NamedTuple):
    rows: int
    sums: Columns
    origin: Columns


@dataclass(frozen=True, kw_only=True, repr=False)
class Metric:
    """Two pure functions that serve as `compute_metrics`, for a whole evaluation or step by step.

    A call with NumPy arrays (or lists of batches) is a whole evaluation. With `batch_eval_metrics=True` the Trainer
    calls once a step, with tensors, and asks for the result on the last; it says neither when an evaluation starts nor
    that one broke off. The sums of the running evaluation are therefore the only state. They are kept apart for tensors
    and NumPy arrays, so that a whole evaluation never meets them; every result, every error, `reset()` and every copy
    (pickle, deepcopy) leaves them empty; and steps are accepted only with `num_samples`, so that rows left by a broken
    evaluation raise and are never counted. An evaluation of a single step is a whole one.

    Args:
        statistics: `(predictions, labels)` -> dict of arrays with one row a sample, integers or floats (summed as int64
            and float64); a `scipy.sparse.csr_array` where a row has few entries other than 0, as counts of cells have.
            Predictions and labels are NumPy arrays, or tuples and dicts of them, dim 0 the sample.
        score: dict of sums over the samples -> dict of scores. Written with `...` for leading dimensions, it maps
            stacks of sums to stacks of scores. Undefined scores are NaN.
        directions: for every key of the scores whether greater is better, None where neither is. A key may have a
            placeholder: `top_{k}_accuracy`.
        whole: why `score` needs the rows of all samples, if it does: it then gets the columns in place of their sums,
            and the metric refuses to stream, with this reason.
        summands: what is summed in place of the columns, where their sums would lose too many digits:
            `(columns, origin)` -> columns about an origin, and the origin. The origin that comes is empty at the start
            of an evaluation, and then what the last call returned; where something was summed it has to stay.
        by_position: whether the metric belongs to the rows of the whole evaluation, one after the other, so that it
            can't be computed on some of them.
        by_draw: whether a sample may count several times, or stand beside its own of another run.
        num_samples: how many samples an evaluation has; a result over another number raises.
        counted_by: what says so, the option that the message names.

    Raises:
        TypeError: `statistics`, `score` or `summands` can't be called, `directions` is not a dict of booleans and None,
            `whole` no text, or `num_samples` not an integer.
        ValueError: a key is reserved by the Trainer, or `num_samples` is not positive.

    Example:
        >>> from types import SimpleNamespace
        >>> def hits(predictions, labels):
        ...     return {"hits": predictions == labels, "samples": np.ones(len(labels))}
        >>> score = lambda sums: {"hit_rate": ratio(sums["hits"], sums["samples"])}
        >>> metric = Metric(statistics=hits, score=score, directions={"hit_rate": True})
        >>> metric(SimpleNamespace(predictions=np.array([1, 2]), label_ids=np.array([1, 3])))
        {'hit_rate': 0.5}
    """

    statistics: Statistics
    score: Score
    directions: Mapping[str, bool | None] = field(hash=False)
    whole: str | None = None
    summands: Summands | None = None
    by_position: bool = False
    by_draw: bool = True
    num_samples: int | None = None
    counted_by: str = "num_samples"
    _running: dict[bool, _Totals] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse what can't be called, directions that are none, reserved keys and a senseless count."""
        check(callable(self.statistics), "statistics", "a function of predictions and labels", self.statistics)
        check(callable(self.score), "score", "a function of a dict of sums", self.score)
        check(self.summands is None or callable(self.summands), "summands", "a function, or None", self.summands)
        wanted = 'a dict of keys and whether greater is better: True, False or None, as {"error": False}'
        for key, better in table("directions", self.directions, wanted).items():
            known = isinstance(key, str) and (better is None or isinstance(better, (bool, np.bool_)))
            check(known, "directions", wanted, {key: better})
        _keys.check_free(self.directions)
        if self.whole is not None:
            string("whole", self.whole, "the reason why score needs all rows")
        if self.num_samples is not None:
            integer("num_samples", self.num_samples, "the length of the evaluation set, len(eval_dataset)", least=1)

    def __call__(self, eval_pred: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        """Score an evaluation, or take in one step of it.

        Args:
            eval_pred: predictions and labels, arrays or tensors.
            compute_result: False on every step of a streaming evaluation but the last.

        Returns:
            The scores, as a flat dict of Python floats; empty if `compute_result` is False.

        Raises:
            TypeError: `eval_pred` is no EvalPrediction, or holds other things than arrays and tensors.
            ValueError: rows or columns are not those expected, or the metric can't stream.
        """
        kind = holds_tensors(eval_pred)
        before = self._running.pop(kind, None)  # taken out: neither an error nor a result leaves anything behind
        if not compute_result:
            self._check_streaming()
        columns = self.columns(eval_pred)
        rows = next(iter(columns.values())).shape[0]
        summed, origin = self.about(columns, before.origin if before else {})
        totals = _Totals(rows, self._summed(summed), origin)
        if before is not None:
            totals = _added(before, totals)
        self._check_rows(totals.rows, last=compute_result)
        if compute_result:
            return self.result(totals.sums)
        self._running[kind] = totals
        return {}

    def columns(self, eval_pred: EvalPrediction) -> Columns:
        """Return the statistics of every sample.

        Args:
            eval_pred: predictions and labels, arrays or tensors.

        Returns:
            At least one array, dense or sparse, each int64 or float64, dim 0 the sample, in the order in which the
            samples came.

        Raises:
            TypeError: a leaf is neither array nor tensor, or a statistic is not numeric.
            ValueError: rows or columns are not those expected.
        """
        parts = [_checked(self.statistics(batch.predictions, batch.labels), batch.rows) for batch in batches(eval_pred)]
        for part in parts:
            _check_names(parts[0], part)
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}

    def about(self, columns: Columns, origin: Columns) -> tuple[Columns, Columns]:
        """Return the columns that are summed, or those that `score` takes as they are, and the origin they are about.

        Args:
            columns: what `columns` returned, of all samples or some.
            origin: what an earlier call for the same sums returned, or empty.

        Returns:
            Columns of the same rows, and the origin.
        """
        return (columns, origin) if self.whole or self.summands is None else self.summands(columns, origin)

    def sums(self, columns: Columns) -> Columns:
        """Return what `score` takes: the sums of the columns over dim 0, or the columns themselves if it needs them."""
        return self._summed(self.about(columns, {})[0])

    def _summed(self, columns: Columns) -> Columns:
        with np.errstate(over="ignore", invalid="ignore"):  # inf and -inf have no sum: NaN
            return columns if self.whole else {name: column.sum(axis=0) for name, column in columns.items()}

    def result(self, sums: Columns) -> dict[str, float]:
        """Return the scores of one evaluation as a flat dict of Python floats.

        Args:
            sums: what `sums` returned.

        Returns:
            The scores.

        Raises:
            ValueError: a score is not a single number, or its key has no entry in `directions`.
        """
        scores = {key: np.asarray(value) for key, value in self.scores(sums).items()}
        for key, value in scores.items():
            if value.ndim:
                raise ValueError(f"the score {key!r} has shape {value.shape}: the Trainer can only log single numbers")
        return {key: float(value) for key, value in scores.items()}

    def scores(self, sums: Columns) -> Mapping[str, ArrayLike]:
        """Return `score(sums)`, of one evaluation or of a stack of them, and see to it that every key has a direction.

        Args:
            sums: what `sums` returned, or a stack of such arrays along new leading dimensions.

        Returns:
            The scores; of a stack, arrays of the stack's shape.

        Raises:
            ValueError: a key has no entry in `directions`.
        """
        scores = self.score(sums)
        for key in scores:
            if _keys.find(key, self.directions) is None:
                raise ValueError(f"score returned {key!r}; directions has only {', '.join(self.directions)}: add it")
        return scores

    def reset(self) -> None:
        """Forget the steps of an evaluation that broke off."""
        self._running.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Leave a running evaluation out of every copy."""
        return {**self.__dict__, "_running": {}}

    def __repr__(self) -> str:
        """Name the functions, the keys and the count."""
        shown = {
            "statistics": _name(self.statistics),
            "score": _name(self.score),
            "keys": f"({', '.join(self.directions)})",
            "whole": self.whole,
            "num_samples": self.num_samples,
        }
        return f"Metric({', '.join(f'{name}={value}' for name, value in shown.items() if value is not None)})"

    def _check_streaming(self) -> None:
        if self.whole:
            raise ValueError(
                f"this metric can't be computed step by step: {self.whole}. Leave batch_eval_metrics=False, and let "
                "the reducer keep a few numbers for each sample"
            )
        if self.num_samples is None:
            raise ValueError(
                "a step of an evaluation came (batch_eval_metrics=True), and num_samples is not known. The Trainer "
                "doesn't say where an evaluation starts, so the rows of one that broke off would be counted in the "
                "next: say build(metric, num_samples=len(eval_dataset)), or leave batch_eval_metrics=False"
            )

    def _check_rows(self, rows: int, *, last: bool) -> None:
        if self.num_samples is None or rows == self.num_samples or (rows < self.num_samples and not last):
            return
        if self.counted_by != "num_samples":
            raise ValueError(
                f"{self.counted_by} has {self.num_samples} values, and {rows} samples came: one for each sample of the "
                "dataset evaluated, in its order"
            )
        raise ValueError(
            f"{rows} rows came, and an evaluation has num_samples={self.num_samples}. If one broke off before: its "
            "rows are forgotten now, evaluate again. If not: num_samples is the length of the dataset evaluated "
            "(dataloader_drop_last drops rows, Seq2SeqTrainer repeats some on several processes)"
        )


def build(*metrics: Metric, num_samples: int | None = None, **named: Metric) -> Metric:
    """Join metrics into one, which computes statistics that several of them share once.

    Args:
        metrics: metrics whose keys stay as they are.
        num_samples: how many samples an evaluation has; needed for `batch_eval_metrics=True`.
        named: metrics whose keys become `{name}_{key}`.

    Returns:
        One metric with the scores of all.

    Raises:
        TypeError: something is not a metric.
        ValueError: nothing to join, two scores with one key, a key reserved by the Trainer, two values of num_samples.

    Example:
        >>> from metrics import build, language_modeling
        >>> metric = build(lm=language_modeling(), num_samples=64)
        >>> metric.directions["lm_perplexity"]
        False
    """
    parts = [("", metric) for metric in metrics] + [(f"{name}_", metric) for name, metric in named.items()]
    if not parts:
        raise ValueError("build() needs at least one metric, as build(language_modeling(), num_samples=64)")
    directions: dict[str, bool | None] = {}
    for prefix, metric in parts:
        check_metric(metric)
        own = {prefix + key: direction for key, direction in metric.directions.items()}
        if (key := _keys.collision(directions, own)) is not None:
            raise ValueError(f"two metrics return {key!r}: name one of them, as build(first, other=second)")
        directions |= own
    given = [("num_samples", num_samples), *((metric.counted_by, metric.num_samples) for _, metric in parts)]
    counts = [(name, count) for name, count in given if count is not None]
    if any(count != counts[0][1] for _, count in counts):
        shown = ", ".join(f"{count} by {name}" for name, count in counts)
        raise ValueError(f"one evaluation has one number of samples; it was given as {shown}")
    shared = {_identity(metric): metric for _, metric in parts}
    places = list(shared)
    reasons = dict.fromkeys(metric.whole for _, metric in parts if metric.whole)
    summands = tuple(metric.summands for metric in shared.values())
    return Metric(
        statistics=_JoinedStatistics(tuple(metric.statistics for metric in shared.values())),
        score=_JoinedScore(tuple((name, places.index(_identity(metric)), metric) for name, metric in parts)),
        directions=directions,
        whole="; ".join(reasons) or None,
        summands=_JoinedSummands(summands) if any(summands) else None,
        by_position=any(metric.by_position for _, metric in parts),
        by_draw=all(metric.by_draw for _, metric in parts),
        num_samples=counts[0][1] if counts else None,
        counted_by=counts[0][0] if counts else "num_samples",
    )


def check_metric(metric: Any) -> None:
    """Raise TypeError unless a metric came."""
    check(isinstance(metric, Metric), "metric", "a metric, as language_modeling() or Metric(...)", metric)


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> Array:
    """Return `numerator / denominator` in float64, NaN where the denominator is 0."""
    numerator, denominator = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator == 0, np.nan, numerator / denominator)


@dataclass(frozen=True)
class _JoinedStatistics:
    """Different statistics of the same samples, each column under the place of the one that it belongs to."""

    parts: tuple[Statistics, ...]

    def __call__(self, predictions: Any, labels: Any) -> dict[str, ArrayLike]:
        return _numbered(statistics(predictions, labels) for statistics in self.parts)

    def __repr__(self) -> str:
        return f"({', '.join(map(_name, self.parts))})"


@dataclass(frozen=True)
class _JoinedSummands:
    """What is summed of each of the joined statistics, by their place."""

    parts: tuple[Summands | None, ...]

    def __call__(self, columns: Columns, origin: Columns) -> tuple[Columns, Columns]:
        found = [
            (_of_place(columns, place), _of_place(origin, place))
            if summands is None
            else summands(_of_place(columns, place), _of_place(origin, place))
            for place, summands in enumerate(self.parts)
        ]
        return _numbered(summed for summed, _ in found), _numbered(about for _, about in found)


@dataclass(frozen=True)
class _JoinedScore:
    """The scores of all parts: prefix of the keys, place of the statistics, metric."""

    parts: tuple[tuple[str, int, Metric], ...]

    def __call__(self, sums: Columns) -> dict[str, ArrayLike]:
        whole = any(metric.whole for _, _, metric in self.parts)
        scores: dict[str, ArrayLike] = {}
        for prefix, place, metric in self.parts:
            own = _of_place(sums, place)
            # Beside a metric that needs all rows, everybody gets rows: sum them for those who take sums.
            scores |= {prefix + key: value for key, value in metric.scores(metric.sums(own) if whole else own).items()}
        return scores

    def __repr__(self) -> str:
        shown = [
            f"{prefix}*: {_name(metric.score)}" if prefix else _name(metric.score) for prefix, _, metric in self.parts
        ]
        return f"({', '.join(shown)})"


def _numbered(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{place}.{name}": column for place, part in enumerate(parts) for name, column in part.items()}


def _of_place(columns: Columns, place: int) -> Columns:
    start = f"{place}."
    return {name.removeprefix(start): column for name, column in columns.items() if name.startswith(start)}


def _identity(metric: Metric) -> Any:
    """Return what metrics with the same columns have in common; `partial` objects of equal content are equal here."""
    parts: Any = metric.statistics
    if isinstance(parts, partial):
        parts = (parts.func, parts.args, tuple(sorted(parts.keywords.items())))
    try:
        hash(parts)
    except TypeError:
        parts = id(metric.statistics)
    return parts, metric.summands


def _checked(statistics: Mapping[str, Any], rows: int) -> Columns:
    if not statistics:
        raise ValueError("statistics returned no column: it returns a dict of arrays with one row for each sample")
    columns = {
        name: sparse.csr_array(value) if sparse.issparse(value) else np.asarray(value)
        for name, value in statistics.items()
    }
    for name, column in columns.items():
        if column.dtype.kind not in "biuf":
            raise TypeError(f"the statistic {name!r} is of dtype {column.dtype}: it must be integer, float or bool")
        if column.shape[:1] != (rows,):
            raise ValueError(f"the statistic {name!r} has shape {column.shape}, not ({rows}, ...): one row a sample")
    dtypes = {name: np.float64 if column.dtype.kind == "f" else np.int64 for name, column in columns.items()}
    return {name: column.astype(dtypes[name], copy=False) for name, column in columns.items()}


def _joined(parts: list[Array]) -> Array:
    if len(parts) == 1:
        return parts[0]
    joined: Array = sparse.vstack(parts, format="csr") if sparse.issparse(parts[0]) else np.concatenate(parts)
    return joined


def _check_names(first: Columns, other: Columns) -> None:
    if first.keys() != other.keys():
        raise ValueError(f"statistics differ between batches: {', '.join(first)} in one, {', '.join(other)} in another")


def _added(left: _Totals, right: _Totals) -> _Totals:
    _check_names(left.sums, right.sums)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = {name: value + right.sums[name] for name, value in left.sums.items()}
    return _Totals(left.rows + right.rows, sums, right.origin)


def _name(function: Any) -> str:
    """Return a name without the address in memory that `repr` gives a function."""
    if isinstance(function, partial):
        given = [_name(value) if callable(value) else repr(value) for value in function.args]
        options = [*given, *(f"{name}={value!r}" for name, value in function.keywords.items())]
        return f"partial({', '.join([_name(function.func), *options])})"
    return getattr(function, "__qualname__", None) or repr(function)
