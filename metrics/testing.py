"""Rules for any `compute_metrics`: what the Trainer does with one, and what makes its scores the same in every mode.

Neither torch nor another package is imported before something is checked. The rules stand in the order in which they
are asked, from the most particular defect to the most general.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._core import keys as _keys
from ._core.arguments import table
from ._core.evaluation import Array, leaves, mapped
from .best_model import DIRECTIONS

if TYPE_CHECKING:
    from lossfns.testing.rules import Finding, Refusal, Report, Rule

_SPLITS = ((1,), (1, 2), (2,))  # where an evaluation is cut into batches


class Evaluation(NamedTuple):
    """What stands for an EvalPrediction: the same names, the same order."""

    predictions: Any
    label_ids: Any


@dataclass(frozen=True)
class MetricSubject:
    """A metric under test, and the evaluation it is given."""

    metric: Callable[..., Any]
    predictions: Any
    labels: Any
    directions: Mapping[str, bool | None]
    tolerance: float = 1e-9

    @property
    def fresh(self) -> Callable[..., Any]:
        """A copy without a past."""
        return copy.deepcopy(self.metric)

    @property
    def rows(self) -> int:
        """The number of samples."""
        return len(_arrays(self.labels)[0])

    def piece(self, rows: Any) -> Evaluation:
        """The evaluation of some of the samples."""
        return Evaluation(*(mapped(lambda leaf: leaf[rows].copy(), tree) for tree in (self.predictions, self.labels)))

    def whole(self) -> dict[str, Any]:
        """The scores, of arrays of all samples."""
        return dict(self.fresh(self.piece(slice(None))))

    def pieces(self, cuts: Sequence[int]) -> list[Evaluation]:
        """The evaluation in batches, cut before these samples."""
        edges = [0, *cuts, self.rows]
        return [self.piece(slice(start, stop)) for start, stop in pairwise(edges)]


def _tensors(evaluation: Evaluation) -> Evaluation:
    import torch

    return Evaluation(*(mapped(torch.from_numpy, tree) for tree in evaluation))


def _steps(metric: Callable[..., Any], pieces: Sequence[Evaluation]) -> Any:
    """The scores, of one call a step as with `batch_eval_metrics=True`."""
    *steps, last = map(_tensors, pieces)
    for step in steps:
        metric(step, compute_result=False)
    return metric(last, compute_result=True)


def _attempt(call: Callable[..., Any], *given: Any) -> dict[str, Any] | Exception:
    """Scores, or the error where the metric refuses: it is as right as the right number."""
    try:
        return dict(call(*given))
    except Exception as error:
        return error


def _same(what: str, given: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[Finding]:
    yield f"{what}, names", sorted(given), sorted(expected)
    for key, value in expected.items():
        yield f"{what}, {key}", given[key], value


def _same_or_refused(what: str, given: Mapping[str, Any] | Exception, expected: Mapping[str, Any]) -> Iterator[Finding]:
    if isinstance(given, Exception):
        yield _refusal(what, given)
    else:
        yield from _same(what, given, expected)


def _refusal(what: str, error: Exception) -> Refusal:
    from lossfns.testing.rules import Refusal

    return Refusal(what, f"{type(error).__name__}: {error}")


# --- what comes out --------------------------------------------------------------------------------------------------


def signature(metric: MetricSubject) -> Iterator[Finding]:
    """It takes one EvalPrediction and returns a dict.

    Fix: `def my_metric(eval_pred)`: bind options with functools.partial, and give the Trainer the function, uncalled.
    """
    result = metric.fresh(metric.piece(slice(None)))
    yield "type of the result", "dict" if isinstance(result, Mapping) else type(result).__name__, "dict"


def floats(metric: MetricSubject) -> Iterator[Finding]:
    """Scores are single Python numbers under flat names.

    Fix: `float(value)`: an array or tensor among them breaks the first checkpoint; spread lists and dicts over names.
    """
    for key, value in metric.whole().items():
        yield "name", type(key).__name__, "str"
        single = isinstance(value, float | int) and not isinstance(value, bool)
        yield f"type of {key}", "number" if single else type(value).__name__, "number"


def names(metric: MetricSubject) -> Iterator[Finding]:
    """No score has a name that the Trainer writes itself.

    Fix: another name, as `nll_loss` for `loss`, and no prefix `eval_`: the Trainer puts it there.
    """
    taken = []
    for key in metric.whole():
        try:
            _keys.check_free([key])
        except ValueError:
            taken.append(key)
    yield "names taken", taken, []


def directions(metric: MetricSubject) -> Iterator[Finding]:
    """For every score it is known whether greater is better, or neither.

    Fix: directions={"my_error": False} here, and greater_is_better=False in TrainingArguments: the Trainer takes for
    better when greater whatever does not end in "loss", and keeps the worst checkpoint.
    """
    known = {**DIRECTIONS, **getattr(metric.metric, "directions", {}), **metric.directions}
    yield "without a direction", [key for key in metric.whole() if _keys.find(key, known) is None], []


# --- what it may not do ----------------------------------------------------------------------------------------------


def inputs(metric: MetricSubject) -> Iterator[Finding]:
    """Predictions and labels are left as they were.

    Fix: `labels = np.where(labels == -100, pad, labels)` instead of `labels[labels == -100] = pad`.
    """
    given = metric.piece(slice(None))
    metric.fresh(given)
    for what, tree, before in zip(Evaluation._fields, given, (metric.predictions, metric.labels), strict=True):
        for (path, leaf), original in zip(leaves(tree), _arrays(before), strict=True):
            yield f"{what} {path}".strip(), leaf, original


def stateless(metric: MetricSubject) -> Iterator[Finding]:
    """A second evaluation does not know of the first.

    Fix: keep no sums after a result; start each evaluation from nothing, and any generator from a seed.
    """
    same = metric.fresh
    expected = dict(same(metric.piece(slice(None))))
    yield from _same("the second time", same(metric.piece(slice(None))), expected)


# --- which numbers ---------------------------------------------------------------------------------------------------


def permutation(metric: MetricSubject) -> Iterator[Finding]:
    """The order of the samples changes nothing.

    Fix: pair each prediction with its own label, and let nothing depend on the place of a sample.
    """
    places = np.arange(metric.rows)
    shuffled = np.concatenate([places[::2], places[1::2]])  # other neighbours, too
    for what, order in {"in reverse": places[::-1], "every second one first": shuffled}.items():
        yield from _same(what, metric.fresh(metric.piece(order)), metric.whole())


def padding(metric: MetricSubject) -> Iterator[Finding]:
    """More padding with -100 changes nothing.

    Fix: mask by `labels != -100`, not by the predictions; and count what is left, not the positions.
    """
    widths = {leaf.shape[1] for leaf in _arrays(metric.labels) if leaf.ndim > 1}

    def wider(leaf: Array) -> Array:
        if leaf.ndim < 2 or leaf.shape[1] not in widths:
            return leaf
        return np.pad(leaf, [(0, 0), (0, 3), *[(0, 0)] * (leaf.ndim - 2)], constant_values=-100)

    longer = Evaluation(mapped(wider, metric.predictions), mapped(wider, metric.labels))
    yield from _same("three columns more", metric.fresh(longer), metric.whole())


def lists(metric: MetricSubject) -> Iterator[Finding]:
    """Lists of batches (`eval_do_concat_batches=False`) give the same scores, or an error.

    Fix: `np.concatenate` them, as `np.asarray` stacks batches of equal size; or add up sums and counts over all batches
    and divide once: a mean of means weighs batches, not items.
    """
    for cuts in _SPLITS:
        batches = Evaluation(*map(list, zip(*metric.pieces(cuts), strict=True)))
        yield from _same_or_refused(f"cut at {cuts}", _attempt(metric.fresh, batches), metric.whole())


def steps(metric: MetricSubject) -> Iterator[Finding]:
    """Step by step (`batch_eval_metrics=True`) gives the same scores, or an error.

    Fix: add up sums and counts over all steps, and divide in the last one, which `compute_result=True` announces.
    """
    for cuts in _SPLITS:
        scores = _attempt(_steps, metric.fresh, metric.pieces(cuts))
        yield from _same_or_refused(f"cut at {cuts}", scores, metric.whole())


def interrupted(metric: MetricSubject) -> Iterator[Finding]:
    """An evaluation that broke off leaves nothing behind: the next is right or an error, and the one after it is right.

    Fix: the Trainer does not say where an evaluation starts: know how many samples one has, and clear the sums with
    every result and every error.
    """
    if isinstance(error := _attempt(_steps, metric.fresh, metric.pieces((2,))), Exception):
        yield _refusal("steps", error)
        return

    def by_steps(subject: Callable[..., Any]) -> Any:
        return _steps(subject, metric.pieces((2,)))

    def in_arrays(subject: Callable[..., Any]) -> Any:
        return subject(metric.piece(slice(None)))

    for again in (by_steps, in_arrays):
        broken = metric.fresh
        broken(_tensors(metric.piece(slice(0, 1))), compute_result=False)
        scores = _attempt(again, broken)
        yield from _same_or_refused(f"the next one, {again.__name__}", scores, metric.whole())
        yield from _same(f"the one after it, {again.__name__}", again(broken), metric.whole())


def empty(metric: MetricSubject) -> Iterator[Finding]:
    """Nothing to score gives the same names, NaN where there is no number, or a ValueError.

    Fix: look at the count before dividing, and return a score for every class, whether it occurs or not.
    """
    ignored = mapped(lambda leaf: np.full_like(leaf, -100), metric.labels)
    for what, evaluation in (
        ("no sample", metric.piece(slice(0, 0))),
        ("every label ignored", Evaluation(metric.piece(slice(None)).predictions, ignored)),
    ):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's word for a mean of nothing
                scores = dict(metric.fresh(evaluation))
        except ValueError as error:
            yield _refusal(what, error)
            continue
        yield f"{what}, names", sorted(scores), sorted(metric.whole())
        for key, value in scores.items():
            yield f"{what}, type of {key}", isinstance(value, float | int), True


def _arrays(tree: Any) -> list[Array]:
    return [leaf for _, leaf in leaves(tree)]


RULES = (
    signature,
    floats,
    names,
    directions,
    inputs,
    stateless,
    permutation,
    padding,
    lists,
    steps,
    interrupted,
    empty,
)


def metric_rules(
    *,
    predictions: Any,
    labels: Any,
    directions: Mapping[str, bool | None] | None = None,
    skip: Mapping[str, str] | None = None,
) -> list[Rule]:
    """The rules that a metric has to keep, one callable each, for `pytest.mark.parametrize`.

    Args:
        predictions: what the reducer makes of at least four samples: an array, or tuples and dicts of arrays.
        labels: their labels, -100 where there is none.
        directions: for scores that the metric does not describe itself: whether greater is better, None for neither.
        skip: rules that this metric need not keep, each with its reason, as `{"padding": "the columns are classes"}`.

    Returns:
        Callables with a name: `rule(my_metric)` raises AssertionError, or returns what was compared.

    Raises:
        ValueError: no such rule, no reason; fewer samples, or not as many of predictions as of labels.
        TypeError: predictions and labels are no arrays, or directions no dict.

    Example:
        >>> rules = metric_rules(predictions=np.array([1, 2, 2, 0]), labels=np.array([1, 2, 0, 0]))
        >>> [rule.name for rule in rules][:2]
        ['signature', 'floats']
    """
    from lossfns.testing.rules import select

    _check_samples(predictions, labels)
    known = table(
        "directions", {} if directions is None else directions, "a dict of scores and whether greater is better"
    )
    subject = partial(MetricSubject, predictions=predictions, labels=labels, directions=known)
    return select(RULES, subject, skip)


def _check_samples(predictions: Any, labels: Any) -> None:
    found = [*_arrays(labels), *_arrays(predictions)]
    kinds = sorted({type(leaf).__name__ for leaf in found} - {"ndarray"})
    if kinds:
        raise TypeError(f"predictions and labels are arrays, or tuples and dicts of them; got {', '.join(kinds)}")
    rows = sorted({leaf.shape[0] if leaf.ndim else 0 for leaf in found})
    if len(rows) != 1 or rows[0] < 4:
        raise ValueError(f"predictions and labels have one row a sample, of at least four; got {rows} rows")


def check_metric(metric: Callable[..., Any], *, predictions: Any, labels: Any, **options: Any) -> Report:
    """Hold a `compute_metrics` to all the rules of metrics.

    Args:
        metric: `(eval_pred) -> dict`, or `(eval_pred, compute_result) -> dict`.
        predictions: what the reducer makes of at least four samples: an array, or tuples and dicts of arrays.
        labels: their labels, -100 where there is none.
        **options: those of `metric_rules`.

    Returns:
        What was compared, if every rule is kept; `print` it.

    Raises:
        AssertionError: a rule is broken: its name, what was given and expected, and how to mend it.
        TypeError, ValueError: as for `metric_rules`.

    Example:
        >>> def hits(eval_pred):
        ...     return {"hits": np.mean(eval_pred.predictions == eval_pred.label_ids, keepdims=True)}
        >>> check_metric(hits, predictions=np.array([1, 2, 2, 0]), labels=np.array([1, 2, 0, 0]))
        Traceback (most recent call last):
        AssertionError: hits breaks the rule `floats`.
          Scores are single Python numbers under flat names.
          type of hits: 'ndarray', expected 'number'
          ...
    """
    from lossfns.testing.rules import judge

    rules = metric_rules(predictions=predictions, labels=labels, **options)
    return judge(metric, rules, options.get("skip"))
