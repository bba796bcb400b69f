"""`Metric`: columns per sample -> sums -> scores, and everything that is the same for all metrics.

References:
    Matt Post, "A Call for Clarity in Reporting BLEU Scores", 2018, https://arxiv.org/abs/1804.08771 (sacrebleu:
    statistics per sentence, summed, then scored).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse

from . import keys
from .arguments import check, integer
from .evaluation import Array, Columns, EvalPrediction, batches, holds_tensors, leaves, mapped

Statistics = Callable[[Any, Any], Mapping[str, ArrayLike]]
Score = Callable[[Columns], Mapping[str, ArrayLike]]
Center = Callable[[Columns, Columns], tuple[Columns, Columns]]


class _Totals(NamedTuple):
    rows: int
    sums: Columns
    origin: Columns


@dataclass(frozen=True, kw_only=True, repr=False)
class Metric:
    """Two pure functions that serve as `compute_metrics`, for a whole evaluation or step by step.

    A call with NumPy arrays (or lists of batches) is a whole evaluation. With `batch_eval_metrics=True` the Trainer
    calls once per step, with tensors, and asks for the result in the last call; it signals neither the start of an
    evaluation nor that one was interrupted. The sums of the running evaluation are therefore the only state. They are
    kept apart for tensors and NumPy arrays, so that a whole evaluation never reads them; every result, every error,
    `reset()` and every copy (pickle, deepcopy) clears them; and steps are accepted only with `num_samples`, so that
    rows left over from an interrupted evaluation raise and are never counted. An evaluation of a single step is a
    whole evaluation.

    Args:
        statistics: `(predictions, labels)` -> dict of arrays with one row per sample, integers or floats (summed as
            int64 and float64); a `scipy.sparse.csr_array` where most entries of a row are 0, such as counts of cells.
            Predictions and labels are NumPy arrays, or tuples and dicts of them, dim 0 the sample.
        score: dict of sums over the samples -> dict of scores. Written with `...` for leading dimensions, it maps
            stacks of sums to stacks of scores. Undefined scores are NaN.
        higher_is_better: for every key of the scores whether greater is better, None where neither is. A key may have a
            placeholder: `top_{k}_accuracy`.
        needs_all_samples: the reason why `score` needs the rows of all samples, if it does: it then receives the
            columns instead of their sums, and the metric refuses to stream, with this reason.
        center: what is summed instead of the columns, where their sums would lose too many digits:
            `(columns, origin)` -> columns relative to an origin, and the origin. The origin passed in is empty at the
            start of an evaluation, and then what the last call returned; where something was summed it must not change.
        depends_on_order: whether the metric belongs to the rows of the whole evaluation, in their order, so that it
            cannot be computed on a subset.
        supports_resampling: whether a sample may be counted several times, or next to its counterpart of another run.
        num_samples: the number of samples of an evaluation; a result over another number raises.

    Raises:
        TypeError: if `higher_is_better` has other values than booleans and None, or `num_samples` is not an integer.
        ValueError: if a key is reserved by the Trainer, or `num_samples` is not positive.

    Example:
        >>> from types import SimpleNamespace
        >>> def hits(predictions, labels):
        ...     return {"hits": predictions == labels, "samples": np.ones(len(labels))}
        >>> score = lambda sums: {"hit_rate": ratio(sums["hits"], sums["samples"])}
        >>> metric = Metric(statistics=hits, score=score, higher_is_better={"hit_rate": True})
        >>> metric(SimpleNamespace(predictions=np.array([1, 2]), label_ids=np.array([1, 3])))
        {'hit_rate': 0.5}
    """

    statistics: Statistics
    score: Score
    higher_is_better: Mapping[str, bool | None] = field(hash=False)
    needs_all_samples: str | None = None
    center: Center | None = None
    depends_on_order: bool = False
    supports_resampling: bool = True
    num_samples: int | None = None
    _running: dict[bool, _Totals] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        """Raise unless every direction is True, False or None, the keys are free and the count is positive."""
        for key, better in self.higher_is_better.items():
            known = better is None or isinstance(better, (bool, np.bool_))
            check(known, f"higher_is_better[{key!r}]", "True, False or None", better)
        keys.check_free(self.higher_is_better)
        if self.num_samples is not None:
            integer("num_samples (len(eval_dataset))", self.num_samples, minimum=1)

    def __call__(self, eval_pred: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        """Score an evaluation, or add one step of it to the running sums.

        Args:
            eval_pred: predictions and labels, arrays or tensors.
            compute_result: False for every step of a streaming evaluation except the last.

        Returns:
            The scores, as a flat dict of Python floats; empty if `compute_result` is False.

        Raises:
            TypeError: if `eval_pred` is not an EvalPrediction, or holds anything but arrays and tensors.
            ValueError: if rows or columns are not those expected, or the metric cannot stream.
        """
        kind = holds_tensors(eval_pred)
        before = self._running.pop(kind, None)  # removed first, so that neither an error nor a result leaves it behind
        if not compute_result:
            self._check_streaming()
        columns = self.columns(eval_pred)
        rows = num_rows(columns)
        centered, origin = self.centered(columns, before.origin if before else {})
        totals = _Totals(rows, self._summed(centered), origin)
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
            At least one array, dense or sparse, each int64 or float64, dim 0 the sample, in the order of the
            evaluation. A metric made by `build` nests the columns of its parts in dicts.

        Raises:
            TypeError: if a leaf is neither an array nor a tensor, or a statistic is not numeric.
            ValueError: if rows or columns are not those expected.
        """
        parts = [_checked(self.statistics(batch.predictions, batch.labels), batch.rows) for batch in batches(eval_pred)]
        if not any(leaves(parts[0])):
            raise ValueError("statistics returned no column: expected a dict of arrays with one row per sample")
        for part in parts:
            _check_names(parts[0], part)
        columns: Columns = parts[0] if len(parts) == 1 else mapped(lambda *columns: stacked(columns), *parts)
        return columns

    def centered(self, columns: Columns, origin: Columns) -> tuple[Columns, Columns]:
        """Return the columns that are summed (or that `score` takes as they are), and the origin they are relative to.

        Args:
            columns: the output of `columns`, for all samples or some.
            origin: the origin that an earlier call for the same sums returned, or an empty dict.

        Returns:
            Columns of the same rows, and the origin.
        """
        return (columns, origin) if self.needs_all_samples or self.center is None else self.center(columns, origin)

    def sums(self, columns: Columns) -> Columns:
        """Return the input of `score`: the sums of the columns over dim 0, or the columns if it needs all samples."""
        return self._summed(self.centered(columns, {})[0])

    def _summed(self, columns: Columns) -> Columns:
        with np.errstate(over="ignore", invalid="ignore"):  # inf and -inf sum to NaN
            sums: Columns = columns if self.needs_all_samples else mapped(lambda column: column.sum(axis=0), columns)
        return sums

    def result(self, sums: Columns) -> dict[str, float]:
        """Return the scores of one evaluation as a flat dict of Python floats.

        Args:
            sums: the output of `sums`.

        Returns:
            The scores.

        Raises:
            ValueError: if a score is not a single number, or its key has no entry in `higher_is_better`.
        """
        scores = {key: np.asarray(value) for key, value in self.scores(sums).items()}
        for key, value in scores.items():
            if value.ndim:
                raise ValueError(f"the score {key!r} has shape {value.shape}: the Trainer can only log single numbers")
        return {key: float(value) for key, value in scores.items()}

    def scores(self, sums: Columns) -> Mapping[str, ArrayLike]:
        """Return `score(sums)` for one evaluation or a stack of them, after checking that every key has a direction.

        Args:
            sums: the output of `sums`, or a stack of such arrays along new leading dimensions.

        Returns:
            The scores; for a stack, arrays of the stack's shape.

        Raises:
            ValueError: if a key has no entry in `higher_is_better`.
        """
        scores = self.score(sums)
        for key in scores:
            if keys.find(key, self.higher_is_better) is None:
                known = ", ".join(self.higher_is_better)
                raise ValueError(f"score returned {key!r}, but higher_is_better has only {known}: add the key")
        return scores

    def reset(self) -> None:
        """Discard the steps of an interrupted evaluation."""
        self._running.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Leave a running evaluation out of every copy."""
        return {**self.__dict__, "_running": {}}

    def __repr__(self) -> str:
        """Name the functions, the keys and the number of samples."""
        shown = {
            "statistics": name_of(self.statistics),
            "score": name_of(self.score),
            "keys": f"({', '.join(self.higher_is_better)})",
            "needs_all_samples": self.needs_all_samples,
            "num_samples": self.num_samples,
        }
        return f"Metric({', '.join(f'{name}={value}' for name, value in shown.items() if value is not None)})"

    def _check_streaming(self) -> None:
        if self.needs_all_samples:
            raise ValueError(
                f"this metric cannot be computed step by step: {self.needs_all_samples}. Set batch_eval_metrics=False, "
                "and let the reducer keep a few numbers per sample"
            )
        if self.num_samples is None:
            raise ValueError(
                "got one step of an evaluation (batch_eval_metrics=True), but num_samples is not set. The Trainer does "
                "not signal the start of an evaluation, so the rows of an interrupted one would be counted in the "
                "next: use build(metric, num_samples=len(eval_dataset)), or set batch_eval_metrics=False"
            )

    def _check_rows(self, rows: int, *, last: bool) -> None:
        if self.num_samples is None or rows == self.num_samples or (rows < self.num_samples and not last):
            return
        raise ValueError(
            f"expected num_samples={self.num_samples} rows, got {rows}. The state was reset: if an earlier evaluation "
            "was interrupted, run this one again. Otherwise num_samples, or the number of groups, units or features, "
            "must be that of the dataset (dataloader_drop_last drops rows, Seq2SeqTrainer may repeat some)"
        )


def check_metric(metric: Any) -> None:
    """Raise TypeError unless the argument is a Metric."""
    check(isinstance(metric, Metric), "metric", "a metric, such as language_modeling() or Metric(...)", metric)


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> Array:
    """Return `numerator / denominator` in float64, NaN where the denominator is 0."""
    numerator, denominator = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator == 0, np.nan, numerator / denominator)


def means(sums: Columns, *, over: str) -> Columns:
    """Return all sums divided by the number in column `over`, for sums or stacks of them."""
    return {name: ratio(total, sums[over]) for name, total in sums.items() if name != over}


def num_rows(columns: Columns) -> int:
    """Return the number of samples of columns, nested or not."""
    return int(next(leaves(columns))[1].shape[0])


def stacked(parts: Any) -> Any:
    """Return dense or sparse arrays, one after the other along dim 0."""
    return sparse.vstack(parts, format="csr") if sparse.issparse(parts[0]) else np.concatenate(parts)


def name_of(function: Any) -> str:
    """Return a name without the memory address that `repr` shows for a function."""
    if isinstance(function, partial):
        given = [name_of(value) if callable(value) else repr(value) for value in function.args]
        options = [*given, *(f"{name}={value!r}" for name, value in function.keywords.items())]
        return f"partial({', '.join([name_of(function.func), *options])})"
    return getattr(function, "__qualname__", None) or repr(function)


def _checked(statistics: Mapping[str, Any], rows: int, path: str = "") -> Any:
    """Return the statistics as int64 and float64 arrays, dense or sparse, nested as they are."""
    columns: dict[str, Any] = {}
    for name, value in statistics.items():
        if isinstance(value, Mapping):
            columns[name] = _checked(value, rows, f"{path}{name}.")
            continue
        column = sparse.csr_array(value) if sparse.issparse(value) else np.asarray(value)
        if column.dtype.kind not in "biuf":
            raise TypeError(f"the statistic '{path}{name}' must be integer, float or bool, got dtype {column.dtype}")
        if column.shape[:1] != (rows,):
            raise ValueError(
                f"the statistic '{path}{name}' must have {rows} rows, one per sample, got shape {column.shape}"
            )
        columns[name] = column.astype(np.float64 if column.dtype.kind == "f" else np.int64, copy=False)
    return columns


def _check_names(first: Columns, other: Columns) -> None:
    names, others = ([path for path, _ in leaves(columns)] for columns in (first, other))
    if set(names) != set(others):
        raise ValueError(f"statistics differ between batches: {', '.join(names)} and then {', '.join(others)}")


def _added(left: _Totals, right: _Totals) -> _Totals:
    _check_names(left.sums, right.sums)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = mapped(lambda value, other: value + other, left.sums, right.sums)
    return _Totals(left.rows + right.rows, sums, right.origin)
