"""What every metric can do once it has statistics per sample: groups, intervals, comparisons, several datasets.

Replicates and groups are rows of weights; a matrix product with the statistics gives their sums, and `score` maps the
stack of them to scores. Samples with equal statistics are one row that counts several times: the weights of a replicate
are then a draw from a multinomial (bootstrap) or binomial (permutation) distribution, the same in law and much cheaper.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse

from ._core.arguments import integer, named_places, sequence, string
from ._core.evaluation import Array, Columns, EvalPrediction, batches, describe, named_columns
from ._core.metric import Metric, Statistics, check_metric
from ._core.order import check_order, digests

CONFIDENCE = 0.95
# Numbers in the matrix of weights that is held at once.
CHUNK = 2**23
ORDER = "order"


def by_group(metric: Metric, groups: Sequence[Any], *, labels: Sequence[Any] | None = None) -> Metric:
    """Score every group of samples by itself, as `{key}/{group}`; join it with the metric itself by `build`.

    Args:
        metric: any metric.
        groups: the group of each sample of the evaluation set, in its order, as `dataset["language"]`.
        labels: what the collator makes of the labels of each sample, in the same order (padding does not matter): with
            it, an evaluation in another order raises.

    Returns:
        A metric that needs all rows at once.

    Raises:
        TypeError: no metric, or groups or labels that are no sequence.
        ValueError: no group, two that are written the same (1 and "1"), labels of another number of samples, or a
            metric that can't be computed on some rows.

    Example:
        >>> from types import SimpleNamespace
        >>> from metrics import classification
        >>> evaluated = SimpleNamespace(predictions=np.array([0, 1, 1]), label_ids=np.array([0, 0, 1]))
        >>> scores = by_group(classification(2), ["de", "de", "en"])(evaluated)
        >>> scores["accuracy/de"], scores["accuracy/en"]
        (0.5, 1.0)
    """
    _check_divisible(metric)
    names, places = named_places("groups", groups, "the group of each sample, as dataset['language']")
    made = None if labels is None else sequence("labels", labels, "what the collator makes of each sample's labels")
    if not names or (made is not None and len(made) != len(places)):
        came = "none" if made is None else len(made)
        raise ValueError(f"groups and labels are one a sample; {len(places)} groups came, labels: {came}")
    return Metric(
        statistics=metric.statistics if made is None else partial(ordered, metric.statistics),
        score=_GroupScores(metric, names, places, None if made is None else digests(made)),
        directions={f"{key}/{name}": better for key, better in metric.directions.items() for name in names},
        whole="groups belong to the rows of the whole evaluation",
        by_position=True,
        num_samples=len(places),
        counted_by="groups",
    )


def bootstrap(metric: Metric, *, n: int = 1000, unit: Sequence[Any] | None = None, seed: int = 0) -> Metric:
    """Compute 95 % percentile intervals, as `{key}_low` and `{key}_high`; join it with the metric itself by `build`.

    Args:
        metric: any metric. One that needs all rows at once is computed `n` times; all others take a matrix product.
        n: number of replicates; those in which a score is undefined are left out of its interval.
        unit: what is drawn, one value a sample in the order of the evaluation set, as the document of each sentence;
            None: samples.
        seed: of the generator; equal seeds give equal intervals.

    Returns:
        A metric that needs all rows at once.

    Raises:
        TypeError: no metric, `n` or `seed` that are no integers, or units that are no sequence.
        ValueError: fewer than two replicates, a negative seed, two units that are written the same (1 and "1"), or a
            metric that can't be computed on some rows or on repeated ones.

    Source: B. Efron, "Bootstrap methods: another look at the jackknife", 1979.

    Example:
        >>> from types import SimpleNamespace
        >>> from metrics import classification
        >>> evaluated = SimpleNamespace(predictions=np.array([0, 1, 1]), label_ids=np.array([0, 0, 1]))
        >>> scores = bootstrap(classification(2), n=100)(evaluated)
        >>> 0 <= scores["accuracy_low"] <= 2 / 3 <= scores["accuracy_high"] <= 1
        True
    """
    n, seed, units = _drawing(metric, n, seed, unit)
    return Metric(
        statistics=metric.statistics,
        score=_Intervals(metric, n, None if units is None else tuple(units.tolist()), seed),
        directions={f"{key}_{end}": better for key, better in metric.directions.items() for end in ("low", "high")},
        whole="the bootstrap draws from the rows of the whole evaluation",
        by_position=units is not None,
        num_samples=metric.num_samples if units is None else len(units),
        counted_by=metric.counted_by if units is None else "unit",
    )


def compare(
    metric: Metric,
    first: EvalPrediction,
    second: EvalPrediction,
    *,
    n: int = 1000,
    unit: Sequence[Any] | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Compare two runs on the same samples: differences, their bootstrap intervals and a paired permutation test.

    Args:
        metric: any metric.
        first: what `trainer.predict(dataset)` returned for one model.
        second: the same for the other.
        n: number of replicates of either kind.
        unit: what is drawn and exchanged, one value a sample; None: samples.
        seed: of the generator.

    Returns:
        For each key of the metric `{key}_difference` (first minus second), `{key}_difference_low`,
        `{key}_difference_high` (95 %) and `{key}_p_value` (two-sided, approximate randomisation, at least 1 / (n + 1)).

    Raises:
        TypeError: no metric, no predictions, `n` or `seed` that are no integers, or units that are no sequence.
        ValueError: the labels or the columns of the two differ, fewer than two replicates, a negative seed, not one
            unit a sample, two units that are written the same (1 and "1"), or a metric that can't be computed on some
            rows or on repeated ones.

    Source: E. W. Noreen, "Computer-Intensive Methods for Testing Hypotheses", 1989; P. Koehn, "Statistical Significance
    Tests for Machine Translation Evaluation", 2004.

    Example:
        >>> from types import SimpleNamespace
        >>> from metrics import classification
        >>> labels = np.zeros(9, np.int64)
        >>> right, wrong = (SimpleNamespace(predictions=ids, label_ids=labels) for ids in (labels, labels + 1))
        >>> compare(classification(2), right, wrong)["accuracy_p_value"] < 0.05
        True
    """
    n, seed, units = _drawing(metric, n, seed, unit)
    if not np.array_equal(_label_digests(first), _label_digests(second)):
        raise ValueError("the two runs have different labels: predict on the same dataset, in the same order")
    runs = [metric.columns(first), metric.columns(second)]
    if runs[0].keys() != runs[1].keys():
        columns = " and ".join(", ".join(run) for run in runs)
        raise ValueError(f"the predictions of the two runs give different columns, {columns}: use one reducer for both")
    # Each side is counted from the origin of its own run, because predictions may lie far apart.
    origins = [metric.about(run, {})[1] for run in runs] if metric.summands else [{}]
    about = [[metric.about(run, origin)[0] for run in runs] for origin in origins]
    drawn_from = {(o, s, name): run[name] for o, pair in enumerate(about) for s, run in enumerate(pair) for name in run}
    sample = _sample(metric, drawn_from, units)
    rows = [
        {name: _stack([sample.columns[origin, side, name] for side in (0, 1)]) for name in pair[0]}
        for origin, pair in enumerate(about)
    ]
    scores = partial(_pair_scores, metric, rows, sample)
    generator, counts = np.random.default_rng(seed), sample.counts
    observed = scores([(counts[None], np.zeros_like(counts)[None])])
    drawn = scores((weights, np.zeros_like(weights)) for weights in _resampled(generator, counts, n))
    null = scores((counts - swaps, swaps) for swaps in _exchanged(generator, counts, n))
    result: dict[str, float] = {}
    for key, (difference,) in observed.items():
        low, high = _interval(drawn[key])
        # Undefined differences count as extreme; equal ones may differ by rounding.
        extreme = ~(abs(null[key]) < abs(difference) * (1 - 1e-9))
        p_value = np.nan if np.isnan(difference) else (1 + extreme.sum()) / (n + 1)
        named = {"": difference, "_low": low, "_high": high}
        result |= {f"{key}_difference{end}": float(value) for end, value in named.items()}
        result[f"{key}_p_value"] = float(p_value)
    return result


def labels_from(metric: Metric, column: str) -> Metric:
    """Score against a column of the predictions instead of the labels, as the `answers` of `reducers.answer_logits`.

    Args:
        metric: any metric.
        column: its name.

    Returns:
        The metric with other labels.

    Raises:
        TypeError: no metric, or a name that is no text.

    Example:
        >>> from types import SimpleNamespace
        >>> from metrics import classification
        >>> found = {"ids": np.array([0, 1]), "answers": np.array([0, 0])}
        >>> metric = labels_from(classification(2), "answers")
        >>> metric(SimpleNamespace(predictions=found, label_ids=np.zeros((2, 9))))["accuracy"]
        0.5
    """
    check_metric(metric)
    column = string("column", column, "the name of a column of the predictions")
    return replace(metric, statistics=partial(with_labels, metric.statistics, column))


@dataclass(frozen=True)
class Dispatch:
    """Metrics of several datasets, told apart by their number of rows. Built by `dispatch`."""

    metrics: tuple[Metric, ...]

    def __call__(self, eval_pred: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        if not compute_result:
            raise ValueError(
                "a step of an evaluation came (batch_eval_metrics=True): which dataset it belongs to is known by the "
                "number of its rows, which comes at its end. Leave batch_eval_metrics=False"
            )
        rows = sum(batch.rows for batch in batches(eval_pred))
        for metric in self.metrics:
            if metric.num_samples == rows:
                return metric(eval_pred)
        known = ", ".join(str(metric.num_samples) for metric in self.metrics)
        raise ValueError(f"{rows} rows came; the datasets of dispatch() have {known}")


def dispatch(*metrics: Metric) -> Dispatch:
    """Score several evaluation datasets, `Trainer(eval_dataset={"a": a, "b": b})`, each by its own metric.

    The Trainer calls one `compute_metrics` for all and doesn't say for which; the number of rows does.

    Args:
        metrics: each with the `num_samples` of its dataset, as `build(regression(), num_samples=len(b))`.

    Returns:
        A picklable `compute_metrics`.

    Raises:
        TypeError: something is not a metric.
        ValueError: a number of samples is missing, or two are equal.

    Example:
        >>> from metrics import build, classification, regression
        >>> scores = dispatch(build(classification(3), num_samples=90), build(regression(), num_samples=80))
    """
    for metric in metrics:
        check_metric(metric)
    counts = [metric.num_samples for metric in metrics]
    if not counts or None in counts or len(set(counts)) < len(counts):
        raise ValueError(f"dispatch() takes metrics with different num_samples, one a dataset; these have {counts}")
    return Dispatch(metrics)


# --- scores of many weightings of the same rows ----------------------------------------------------------------------


class _Sample(NamedTuple):
    """Rows that are drawn from, how often each is there, and, where rows are drawn in units, the unit of each."""

    columns: dict[Any, Array]
    counts: Array
    unit: Array | None


def _sample(metric: Metric, columns: dict[Any, Array], places: Array | None) -> _Sample:
    """Prepare drawing: rows of a unit become one, and equal rows one that counts several times.

    A metric that needs the rows keeps them all.
    """
    length = next(iter(columns.values())).shape[0]
    if places is not None and len(places) != length:
        raise ValueError(f"unit has {len(places)} values, and {length} samples came: one a sample, in their order")
    if metric.whole:
        units = length if places is None else places.max(initial=-1) + 1
        return _Sample(columns, np.ones(units, np.int64), places)
    if places is not None:
        columns = {name: _weighted(_indicator(places), column) for name, column in columns.items()}
    _, first, counts = np.unique(_row_hash(columns), return_index=True, return_counts=True)
    return _Sample({name: column[first] for name, column in columns.items()}, counts, None)


def _scores(metric: Metric, rows: Columns, weights: Any) -> Columns:
    """Return the scores (n,) of the rows, each as often as `weights` (n, rows), dense or sparse, says."""
    if not metric.whole:
        widest = max(math.prod(column.shape[1:]) for column in rows.values())
        ends = np.cumsum([0, *_chunks(weights.shape[0], widest)])
        return _concatenated([_stack_scores(metric, rows, weights[start:end]) for start, end in pairwise(ends)])
    chosen = (_repeated(weights[[at]]) for at in range(weights.shape[0]))
    each = [metric.scores({name: column[places] for name, column in rows.items()}) for places in chosen]
    return {key: np.array([scores[key] for scores in each], np.float64) for key in each[0]}


def _stack_scores(metric: Metric, rows: Columns, weights: Any) -> Columns:
    """Return the scores (n,) of the weighted sums of the rows, all in one call."""
    weights = weights.astype(np.float64)
    sums = {name: _weighted(weights, column) for name, column in rows.items()}
    scores = {key: np.asarray(value) for key, value in metric.scores(sums).items()}
    if any(value.shape != weights.shape[:1] for value in scores.values()):
        raise ValueError(
            "score doesn't map stacks of sums to stacks of scores: write it with `...` for leading dimensions, as "
            f"x.sum(-1) and x[..., 0]; for {weights.shape[0]} sums it gave "
            + ", ".join(f"{key} {value.shape}" for key, value in scores.items())
        )
    return scores


def _repeated(weights: Any) -> Array:
    """Return the place of each row, as often as one line of weights (1, rows) says."""
    row = (weights.toarray() if sparse.issparse(weights) else weights)[0]
    return np.repeat(np.arange(len(row)), row)


def _pair_scores(
    metric: Metric, rows: Sequence[Columns], sample: _Sample, weights: Iterable[tuple[Array, Array]]
) -> Columns:
    """Return the differences of the scores of two sides: rows of the first run, then of the second, and swapped.

    The rows come about the origin of each side, or once where there is none.
    """
    found = []
    for pair in weights:
        own, other = pair if sample.unit is None else (side[:, sample.unit] for side in pair)
        left = _scores(metric, rows[0], np.hstack((own, other)))
        right = _scores(metric, rows[-1], np.hstack((other, own)))
        with np.errstate(invalid="ignore"):  # of infinite scores
            found.append({key: left[key] - right[key] for key in left})
    return _concatenated(found)


def _resampled(generator: np.random.Generator, counts: Array, n: int) -> Iterator[Array]:
    """Yield weights (chunk, rows): how often each row is there when as many are drawn, with replacement."""
    total = int(counts.sum())
    if 20 * len(counts) < total:
        for size in _chunks(n, len(counts)):
            yield generator.multinomial(total, counts / total, size)
    else:
        of_draw = np.repeat(np.arange(len(counts)), counts)
        for size in _chunks(n, total):
            draws = generator.integers(max(total, 1), size=(size, total))
            yield np.array([np.bincount(of_draw[draw], minlength=len(counts)) for draw in draws])


def _exchanged(generator: np.random.Generator, counts: Array, n: int) -> Iterator[Array]:
    """Yield weights (chunk, rows): how many of each row change sides when a coin decides for every sample."""
    for size in _chunks(n, len(counts)):
        yield generator.binomial(counts, 0.5, (size, len(counts)))


def _chunks(n: int, width: int) -> Iterator[int]:
    size = max(1, CHUNK // max(1, width))
    for start in range(0, n, size):
        yield min(size, n - start)


def _weighted(weights: Any, column: Any) -> Array:
    """Return `weights @ column` for columns of any number of dimensions, dense or sparse, as a dense array."""
    flat = column if sparse.issparse(column) else column.reshape(len(column), math.prod(column.shape[1:]))
    if not np.isfinite(flat.data if sparse.issparse(flat) else flat).all():
        weights = sparse.csr_array(weights)  # has no zeros: a row that isn't there adds nothing, and 0 * inf is NaN
    with np.errstate(over="ignore"):
        product = weights @ flat
    dense = product.toarray() if sparse.issparse(product) else product
    return np.asarray(dense).reshape(-1, *column.shape[1:])


def _row_hash(columns: Mapping[Any, Any]) -> Array:
    """Return a uint64 a row, equal for rows of equal bits; others collide with a probability of about 2**-64 a pair.

    The mixed bits of the floats, times random odd numbers, modulo 2**64: rows that differ in one number never collide.
    """
    generator = np.random.default_rng(0)
    total = np.zeros((), np.uint64)
    for column in columns.values():
        if sparse.issparse(column):
            bits = sparse.csr_array((_mixed(column.data), column.indices, column.indptr), shape=column.shape)
        else:
            bits = _mixed(column.reshape(len(column), math.prod(column.shape[1:])))
        total = total + bits @ (generator.integers(2**64 - 1, size=bits.shape[1], dtype=np.uint64) | np.uint64(1))
    return total


def _mixed(numbers: Array) -> Array:
    """Return the bits of 64-bit numbers, uint64, mixed so that each tells on all; 0 stays 0, and no two become one.

    Numbers that are alike, as 1.0 and -1.0, differ in their highest bits alone, which a product modulo 2**64 drops.
    Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (2014), mix64 variant 13.
    """
    bits = np.ascontiguousarray(numbers).view(np.uint64)
    for right, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(right))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(31))


def _indicator(places: Array) -> Any:
    """Return a sparse matrix (groups, samples) with a 1 where the sample is in the group."""
    return sparse.csr_array((np.ones(len(places), np.int64), (places, np.arange(len(places)))))


def _stack(parts: list[Any]) -> Any:
    return sparse.vstack(parts, format="csr") if sparse.issparse(parts[0]) else np.concatenate(parts)


def _concatenated(parts: Sequence[Columns]) -> Columns:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _interval(values: Array) -> tuple[float, float]:
    """Return the percentiles of the defined values; without interpolation, which would make NaN of inf."""
    defined = values[~np.isnan(values)]
    if not defined.size:
        return np.nan, np.nan
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(defined, (tail, 1 - tail), method="inverted_cdf")
    return float(low), float(high)


def _label_digests(eval_pred: EvalPrediction) -> Array:
    return np.concatenate([digests(batch.labels) for batch in batches(eval_pred)])


def _check_divisible(metric: Metric) -> None:
    check_metric(metric)
    if metric.by_position:
        raise ValueError(
            "this metric belongs to the rows of the whole evaluation, one after the other, and can't be computed on "
            "some of them. For groups with intervals: by_group(bootstrap(metric), groups)"
        )


def _drawing(metric: Metric, n: int, seed: int, unit: Sequence[Any] | None) -> tuple[int, int, Array | None]:
    """Return the checked number of replicates, seed and unit of each sample."""
    _check_divisible(metric)
    if not metric.by_draw:
        raise ValueError(
            "this metric compares each sample with all others, and one that is drawn twice would compete with itself: "
            "leave it out of bootstrap() and compare()"
        )
    n, seed = integer("n", n, "the number of replicates", least=2), integer("seed", seed, "a generator's seed", least=0)
    if unit is None:
        return n, seed, None
    return n, seed, named_places("unit", unit, "what each sample belongs to, as dataset['document']")[1]


# --- what the metrics above are made of -------------------------------------------------------------------------------


def with_labels(statistics: Statistics, column: str, predictions: Any, labels: Any) -> Mapping[str, ArrayLike]:
    """Return the statistics of predictions against one of their own columns."""
    found = named_columns(predictions)
    if column not in found:
        raise ValueError(f"the column {column!r} is to be the labels; predictions hold {describe(predictions)}")
    return statistics(predictions, found[column])


def ordered(statistics: Statistics, predictions: Any, labels: Any) -> dict[str, ArrayLike]:
    """Return the statistics, and what tells the order of the samples."""
    return {**statistics(predictions, labels), ORDER: digests(labels)}


@dataclass(frozen=True, eq=False)
class _GroupScores:
    metric: Metric
    names: tuple[str, ...]
    places: Array
    order: Array | None

    def __call__(self, rows: Columns) -> dict[str, ArrayLike]:
        if self.order is not None:
            check_order(rows[ORDER] != self.order)
            rows = {name: column for name, column in rows.items() if name != ORDER}
        order = np.argsort(self.places, kind="stable")
        members = np.split(order, np.flatnonzero(np.diff(self.places[order])) + 1)
        parts = [self.metric.about({name: column[at] for name, column in rows.items()}, {})[0] for at in members]
        rows = {name: _stack([part[name] for part in parts]) for name in parts[0]}
        scores = _scores(self.metric, rows, _indicator(self.places[order]))
        return {f"{key}/{name}": value[at] for key, value in scores.items() for at, name in enumerate(self.names)}

    def __repr__(self) -> str:
        return f"by_group({self.metric!r}, {', '.join(self.names)})"


@dataclass(frozen=True)
class _Intervals:
    metric: Metric
    n: int
    units: tuple[int, ...] | None
    seed: int

    def __call__(self, rows: Columns) -> dict[str, ArrayLike]:
        units = None if self.units is None else np.array(self.units)
        sample = _sample(self.metric, dict(self.metric.about(rows, {})[0]), units)
        found = []
        for weights in _resampled(np.random.default_rng(self.seed), sample.counts, self.n):
            spread = weights if sample.unit is None else weights[:, sample.unit]
            found.append(_scores(self.metric, sample.columns, spread))
        result: dict[str, ArrayLike] = {}
        for key, values in _concatenated(found).items():
            result[f"{key}_low"], result[f"{key}_high"] = _interval(values)
        return result

    def __repr__(self) -> str:
        return f"bootstrap({self.metric!r}, n={self.n})"
