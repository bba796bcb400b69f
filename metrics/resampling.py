"""Groups, intervals and comparisons of any metric, from its statistics per sample.

Replicates and groups are rows of weights: a matrix product with the statistics gives their sums, and `score` maps the
stack of sums to scores. Samples with equal statistics are one row that is counted several times: the weights of a
replicate are then a draw from a multinomial (bootstrap) or binomial (permutation) distribution, which is the same
distribution at a much lower cost.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse

from ._core.arguments import check, integer, sequence
from ._core.evaluation import Array, Columns, EvalPrediction, batches, leaves, mapped
from ._core.metric import Metric, Statistics, check_metric, num_rows, stacked
from ._core.order import check_order, digests

CONFIDENCE = 0.95
# Number of weights held in memory at once.
CHUNK = 2**23


def by_group(metric: Metric, groups: Sequence[Any], *, labels: Sequence[Any] | None = None) -> Metric:
    """Score every group of samples separately, as `{key}/{group}`; `build` joins it with the metric itself.

    Args:
        metric: any metric.
        groups: the group of each sample of the evaluation set, in its order, such as `dataset["language"]`.
        labels: the labels of each sample as the collator makes them, in the same order (padding does not matter). If
            given, an evaluation in another order raises.

    Returns:
        A metric that needs all rows at once.

    Raises:
        TypeError: if `metric` is not a metric, or groups or labels are not a sequence.
        ValueError: if there are no groups, two have the same string form (1 and "1"), the numbers of groups and labels
            differ, or the metric cannot be computed on a subset of the rows.

    Example:
        >>> from types import SimpleNamespace
        >>> from metrics import classification
        >>> evaluated = SimpleNamespace(predictions=np.array([0, 1, 1]), label_ids=np.array([0, 0, 1]))
        >>> scores = by_group(classification(2), ["de", "de", "en"])(evaluated)
        >>> scores["accuracy/de"], scores["accuracy/en"]
        (0.5, 1.0)
    """
    _check_divisible(metric)
    names, places = _names_and_places("groups", groups, "the group of each sample, such as dataset['language']")
    expected = "the labels of each sample, as the collator makes them"
    given = None if labels is None else sequence("labels", labels, expected)
    if not names or (given is not None and len(given) != len(places)):
        count = None if given is None else len(given)
        raise ValueError(f"groups and labels must have one entry per sample, got {len(places)} groups, labels: {count}")
    return Metric(
        statistics=metric.statistics if given is None else partial(ordered, metric.statistics),
        score=_GroupScores(metric, names, places, None if given is None else digests(given)),
        higher_is_better={f"{key}/{name}": up for key, up in metric.higher_is_better.items() for name in names},
        needs_all_samples="groups belong to the rows of the whole evaluation",
        depends_on_order=True,
        num_samples=len(places),
    )


def bootstrap(metric: Metric, *, n: int = 1000, unit: Sequence[Any] | None = None, seed: int = 0) -> Metric:
    """Compute 95 % bootstrap intervals, as `{key}_low` and `{key}_high`; `build` joins it with the metric itself.

    The ends are the 2.5 % and 97.5 % percentiles of the score over `n` draws of as many samples, with replacement.

    Args:
        metric: any metric. One that needs all rows at once is computed `n` times; all others take a matrix product.
        n: number of replicates; replicates in which a score is undefined are left out of its interval.
        unit: what is drawn, one value per sample in the order of the evaluation set, such as the document of each
            sentence; None: samples.
        seed: seed of the random generator; equal seeds give equal intervals.

    Returns:
        A metric that needs all rows at once.

    Raises:
        TypeError: if `metric` is not a metric, `n` or `seed` is not an integer, or units are not a sequence.
        ValueError: if there are fewer than two replicates, the seed is negative, two units have the same string form (1
            and "1"), or the metric cannot be computed on a subset of the rows or on repeated rows.

    References:
        B. Efron, "Bootstrap methods: another look at the jackknife", 1979, https://doi.org/10.1214/aos/1176344552

    Example:
        >>> from types import SimpleNamespace
        >>> from metrics import classification
        >>> evaluated = SimpleNamespace(predictions=np.array([0, 1, 1]), label_ids=np.array([0, 0, 1]))
        >>> scores = bootstrap(classification(2), n=100)(evaluated)
        >>> 0 <= scores["accuracy_low"] <= 2 / 3 <= scores["accuracy_high"] <= 1
        True
    """
    n, seed, units = _checked(metric, n, seed, unit)
    return Metric(
        statistics=metric.statistics,
        score=_Intervals(metric, n, None if units is None else tuple(units.tolist()), seed),
        higher_is_better={f"{key}_{end}": up for key, up in metric.higher_is_better.items() for end in ("low", "high")},
        needs_all_samples="the bootstrap draws from the rows of the whole evaluation",
        depends_on_order=units is not None,
        num_samples=metric.num_samples if units is None else len(units),
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
        first: the output of `trainer.predict(dataset)` for one model.
        second: the same for the other model.
        n: number of replicates, of the bootstrap and of the permutation test each.
        unit: what is drawn and exchanged, one value per sample; None: samples.
        seed: seed of the random generator.

    Returns:
        For each key of the metric `{key}_difference` (first minus second), `{key}_difference_low`,
        `{key}_difference_high` (95 %) and `{key}_p_value` (two-sided, approximate randomization, at least 1 / (n + 1)).

    Raises:
        TypeError: if `metric` is not a metric, `first` or `second` has no predictions, `n` or `seed` is not an
            integer, or units are not a sequence.
        ValueError: if the labels or the columns of the two runs differ, there are fewer than two replicates, the seed
            is negative, there is not one unit per sample, two units have the same string form (1 and "1"), or the
            metric cannot be computed on a subset of the rows or on repeated rows.

    References:
        E. W. Noreen, "Computer-Intensive Methods for Testing Hypotheses: An Introduction", 1989, Wiley,
        ISBN 0-471-61136-0
        P. Koehn, "Statistical Significance Tests for Machine Translation Evaluation", 2004,
        https://aclanthology.org/W04-3250

    Example:
        >>> from types import SimpleNamespace
        >>> from metrics import classification
        >>> labels = np.zeros(9, np.int64)
        >>> right, wrong = (SimpleNamespace(predictions=ids, label_ids=labels) for ids in (labels, labels + 1))
        >>> compare(classification(2), right, wrong)["accuracy_p_value"] < 0.05
        True
    """
    n, seed, units = _checked(metric, n, seed, unit)
    left, right = (np.concatenate([digests(batch.labels) for batch in batches(run)]) for run in (first, second))
    if not np.array_equal(left, right):
        raise ValueError("the two runs must have the same labels: predict on the same dataset, in the same order")
    runs = [metric.columns(first), metric.columns(second)]
    names = [[path for path, _ in leaves(run)] for run in runs]
    if {*names[0]} != {*names[1]}:
        columns = " and ".join(map(", ".join, names))
        raise ValueError(f"the two runs must have the same columns, got {columns}: use one reducer for both")
    # Each run is scored relative to its own origin, because the predictions of the two may differ by a large constant.
    origins = [metric.centered(run, {})[1] for run in runs] if metric.center else [{}]
    centered: Any = [[metric.centered(run, origin)[0] for run in runs] for origin in origins]
    sample = _sample(metric, centered, units)
    rows = [mapped(lambda *sides: stacked(sides), *pair) for pair in sample.columns]
    scores = partial(_pair_scores, metric, rows, sample)
    generator, counts = np.random.default_rng(seed), sample.counts
    observed = scores([(counts[None], np.zeros_like(counts)[None])])
    drawn = scores((weights, np.zeros_like(weights)) for weights in _resampled(generator, counts, n))
    null = scores((counts - swaps, swaps) for swaps in _exchanged(generator, counts, n))
    result: dict[str, float] = {}
    for key, (difference,) in observed.items():
        low, high = _interval(drawn[key])
        # Undefined differences count as extreme, and equal differences may vary by rounding.
        extreme = ~(abs(null[key]) < abs(difference) * (1 - 1e-9))
        p_value = np.nan if np.isnan(difference) else (1 + extreme.sum()) / (n + 1)
        named = {"": difference, "_low": low, "_high": high}
        result |= {f"{key}_difference{end}": float(value) for end, value in named.items()}
        result[f"{key}_p_value"] = float(p_value)
    return result


# --- scores of many weightings of the same rows ----------------------------------------------------------------------


class _Sample(NamedTuple):
    """Rows to draw from, how often each occurs, and the unit of each row if rows are drawn in units."""

    columns: Any
    counts: Array
    unit: Array | None


def _sample(metric: Metric, columns: Any, places: Array | None) -> _Sample:
    """Merge the rows of a unit into one row, and equal rows into one that is counted several times.

    All rows of a metric that needs all samples are kept.
    """
    length = num_rows(columns)
    if places is not None and len(places) != length:
        raise ValueError(f"unit must have one value per sample, in their order, got {len(places)} for {length} samples")
    if metric.needs_all_samples:
        units = length if places is None else places.max(initial=-1) + 1
        return _Sample(columns, np.ones(units, np.int64), places)
    if places is not None:
        columns = _sums(_indicator(places), columns)
    _, first, counts = np.unique(_row_hash(columns), return_index=True, return_counts=True)
    return _Sample(_rows(columns, first), counts, None)


def _scores(metric: Metric, rows: Columns, weights: Any) -> Columns:
    """Return the scores (n,) of the rows, each counted as often as `weights` (n, rows), dense or sparse, says."""
    if not metric.needs_all_samples:
        widest = max(math.prod(column.shape[1:]) for _, column in leaves(rows))
        ends = np.cumsum([0, *_chunks(weights.shape[0], widest)])
        return _concatenated([_stack_scores(metric, rows, weights[start:end]) for start, end in pairwise(ends)])
    each = [metric.scores(_rows(rows, _repeated(weights[[at]]))) for at in range(weights.shape[0])]
    return {key: np.array([scores[key] for scores in each], np.float64) for key in each[0]}


def _stack_scores(metric: Metric, rows: Columns, weights: Any) -> Columns:
    """Return the scores (n,) of the weighted sums of the rows, computed in one call of `score`."""
    weights = weights.astype(np.float64)
    scores = {key: np.asarray(value) for key, value in metric.scores(_sums(weights, rows)).items()}
    if any(value.shape != weights.shape[:1] for value in scores.values()):
        raise ValueError(
            "score must map stacks of sums to stacks of scores: write it with `...` for leading dimensions, such as "
            f"x.sum(-1) and x[..., 0]; for {weights.shape[0]} sums it returned "
            + ", ".join(f"{key} {value.shape}" for key, value in scores.items())
        )
    return scores


def _repeated(weights: Any) -> Array:
    """Return the index of each row, repeated as often as one line of weights (1, rows) says."""
    row = (weights.toarray() if sparse.issparse(weights) else weights)[0]
    return np.repeat(np.arange(len(row)), row)


def _pair_scores(
    metric: Metric, rows: Sequence[Columns], sample: _Sample, weights: Iterable[tuple[Array, Array]]
) -> Columns:
    """Return the differences between the scores of two sides.

    Args:
        metric: the metric.
        rows: the rows of the first run followed by those of the second, relative to the origin of each side in turn, or
            once if there is no origin.
        sample: what was drawn from.
        weights: per chunk of replicates, how often each row of the first side is taken from its own run, and how often
            from the other run; the second side takes the opposite.

    Returns:
        For each key an array (replicates,).
    """
    found = []
    for pair in weights:
        kept, swapped = pair if sample.unit is None else (side[:, sample.unit] for side in pair)
        left = _scores(metric, rows[0], np.hstack((kept, swapped)))
        right = _scores(metric, rows[-1], np.hstack((swapped, kept)))
        with np.errstate(invalid="ignore"):  # the difference of infinite scores is NaN
            found.append({key: left[key] - right[key] for key in left})
    return _concatenated(found)


def _resampled(generator: np.random.Generator, counts: Array, n: int) -> Iterator[Array]:
    """Yield weights (chunk, rows): how often each row occurs when as many samples are drawn, with replacement."""
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
    """Yield weights (chunk, rows): how many samples of each row change sides, each with probability 1/2."""
    for size in _chunks(n, len(counts)):
        yield generator.binomial(counts, 0.5, (size, len(counts)))


def _chunks(n: int, width: int) -> Iterator[int]:
    size = max(1, CHUNK // max(1, width))
    for start in range(0, n, size):
        yield min(size, n - start)


def _rows(columns: Any, rows: Array) -> Any:
    return mapped(lambda column: column[rows], columns)


def _sums(weights: Any, columns: Any) -> Any:
    return mapped(lambda column: _weighted(weights, column), columns)


def _weighted(weights: Any, column: Any) -> Array:
    """Return `weights @ column` for columns of any number of dimensions, dense or sparse, as a dense array."""
    flat = column if sparse.issparse(column) else column.reshape(len(column), math.prod(column.shape[1:]))
    if not np.isfinite(flat.data if sparse.issparse(flat) else flat).all():
        weights = sparse.csr_array(weights)  # stores no zeros, so that an absent row adds nothing: 0 * inf would be NaN
    with np.errstate(over="ignore"):
        product = weights @ flat
    dense = product.toarray() if sparse.issparse(product) else product
    return np.asarray(dense).reshape(-1, *column.shape[1:])


def _row_hash(columns: Any) -> Array:
    """Return a uint64 per row, equal for rows of equal bits; any other pair collides with probability of about 2**-64.

    It is the sum of the mixed bits of the numbers times random odd numbers, modulo 2**64, so that rows that differ in
    one number never collide.
    """
    generator = np.random.default_rng(0)
    total = np.zeros((), np.uint64)
    for _, column in leaves(columns):
        if sparse.issparse(column):
            bits = sparse.csr_array((_mixed(column.data), column.indices, column.indptr), shape=column.shape)
        else:
            bits = _mixed(column.reshape(len(column), math.prod(column.shape[1:])))
        total = total + bits @ (generator.integers(2**64 - 1, size=bits.shape[1], dtype=np.uint64) | np.uint64(1))
    return total


def _mixed(numbers: Array) -> Array:
    """Return the bits of 64-bit numbers as uint64, mixed by a bijection that maps 0 to 0.

    Similar numbers such as 1.0 and -1.0 differ only in their highest bits, which a product modulo 2**64 drops.

    References:
        G. L. Steele, D. Lea, C. H. Flood, "Fast Splittable Pseudorandom Number Generators", 2014,
        https://doi.org/10.1145/2660193.2660195 (mix64, variant 13)
    """
    bits = np.ascontiguousarray(numbers).view(np.uint64)
    for right, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(right))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(31))


def _indicator(places: Array) -> Any:
    """Return a sparse matrix (groups, samples), 1 where the sample is in the group."""
    return sparse.csr_array((np.ones(len(places), np.int64), (places, np.arange(len(places)))))


def _concatenated(parts: Sequence[Columns]) -> Columns:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _interval(values: Array) -> tuple[float, float]:
    """Return the percentiles of the defined values, without interpolation, which would turn inf to NaN."""
    defined = values[~np.isnan(values)]
    if not defined.size:
        return np.nan, np.nan
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(defined, (tail, 1 - tail), method="inverted_cdf")
    return float(low), float(high)


def _check_divisible(metric: Metric) -> None:
    check_metric(metric)
    if metric.depends_on_order:
        raise ValueError(
            "this metric belongs to the rows of the whole evaluation, in their order, and cannot be computed on a "
            "subset of them. For groups with intervals use by_group(bootstrap(metric), groups)"
        )


def _checked(metric: Metric, n: int, seed: int, unit: Sequence[Any] | None) -> tuple[int, int, Array | None]:
    """Return the checked number of replicates, the seed, and the unit of each sample."""
    _check_divisible(metric)
    if not metric.supports_resampling:
        raise ValueError(
            "this metric compares each sample with all others, and a sample drawn twice would compete with itself: "
            "leave it out of bootstrap() and compare()"
        )
    n, seed = integer("n (the number of replicates)", n, minimum=2), integer("seed", seed, minimum=0)
    expected = "one value per sample, such as dataset['document']"
    return n, seed, None if unit is None else _names_and_places("unit", unit, expected)[1]


def _names_and_places(name: str, values: Any, expected: str) -> tuple[tuple[str, ...], Array]:
    """Return the different values as sorted strings, and for each sample the index of its value.

    Raises:
        TypeError: if the values are not a sequence.
        ValueError: if a string and another value have the same string form, such as "1" and 1.
    """
    check(getattr(values, "ndim", 1) == 1, name, expected, values)
    first: dict[str, Any] = {}
    given = sequence(name, values, expected)
    for value in given:
        known = first.setdefault(str(value), value)
        if isinstance(known, str) != isinstance(value, str):
            raise ValueError(
                f"{name} are told apart by their string form, which {known!r} and {value!r} have in common: rename one "
                "of them, or make both strings if they are the same"
            )
    place = {known: at for at, known in enumerate(sorted(first))}
    return tuple(place), np.array([place[str(value)] for value in given], np.int64)


def ordered(statistics: Statistics, predictions: Any, labels: Any) -> dict[str, Any]:
    """Return the statistics as `columns`, and checksums of the labels as `order`."""
    return {"columns": statistics(predictions, labels), "order": digests(labels)}


@dataclass(frozen=True, eq=False)
class _GroupScores:
    metric: Metric
    names: tuple[str, ...]
    places: Array
    order: Array | None

    def __call__(self, rows: Any) -> dict[str, ArrayLike]:
        if self.order is not None:
            check_order(rows["order"] != self.order)
            rows = rows["columns"]
        order = np.argsort(self.places, kind="stable")
        members = np.split(order, np.flatnonzero(np.diff(self.places[order])) + 1)
        parts = [self.metric.centered(_rows(rows, member), {})[0] for member in members]
        rows = mapped(lambda *parts: stacked(parts), *parts)
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
        sample = _sample(self.metric, self.metric.centered(rows, {})[0], units)
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
