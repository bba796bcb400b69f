"""Rules for any `compute_metrics`: what the Trainer requires of it, and what makes its scores the same in every mode.

A rule is a generator function. Its docstring is "Check that ...", followed by "Fix: ..." with what to change. It yields
`(what was measured, given, expected)`, or a `Refusal` where an error is as good as the correct number. The rules are
checked in the order of `RULES`, from specific defects to general ones, so that the first broken rule is the best
explanation. This module imports neither torch nor the other packages, so that `metrics` can be copied alone.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ._core import keys
from ._core.evaluation import Array, leaves, mapped
from .best_model import HIGHER_IS_BETTER

TOLERANCE = 1e-9  # relative to the larger of 1 and the expected number
NUMERIC = (int, float, np.ndarray, np.number)  # types that are compared within the tolerance
SPLITS = ((1,), (1, 2), (2,))  # where an evaluation is cut into batches


class Evaluation(NamedTuple):
    """A stand-in for EvalPrediction, with the same names in the same order."""

    predictions: Any
    label_ids: Any


class Refusal(NamedTuple):
    """An error that a metric raised where it may: what it was asked for, and its reason."""

    what: str
    reason: str


Finding = tuple[str, Any, Any] | Refusal
Check = Callable[["MetricSubject"], Iterator[Finding]]


@dataclass(frozen=True)
class MetricSubject:
    """A metric under test, and the evaluation it is given."""

    metric: Callable[..., Any]
    predictions: Any
    labels: Any
    higher_is_better: Mapping[str, bool | None]

    @property
    def fresh(self) -> Callable[..., Any]:
        """A copy of the metric without state from earlier calls."""
        return copy.deepcopy(self.metric)

    @property
    def rows(self) -> int:
        """The number of samples."""
        return len(_arrays(self.labels)[0])

    def piece(self, rows: Any = slice(None)) -> Evaluation:
        """Return the evaluation of some of the samples, by default of all, as copies."""
        return Evaluation(*(mapped(lambda leaf: leaf[rows].copy(), tree) for tree in (self.predictions, self.labels)))

    def scores(self) -> dict[str, Any]:
        """Return the scores of all samples, given as arrays."""
        return dict(self.fresh(self.piece()))

    def pieces(self, cuts: Sequence[int]) -> list[Evaluation]:
        """Return the evaluation in batches, cut before these samples."""
        return [self.piece(slice(start, stop)) for start, stop in pairwise([0, *cuts, self.rows])]


@dataclass(frozen=True)
class Verdict:
    """The result of a rule that is not broken.

    Attributes:
        rule: name of the rule.
        comparisons: number of values compared.
        difference: largest difference between two numbers that count as equal.
        refusals: what the metric refused.
    """

    rule: str
    comparisons: int
    difference: float
    refusals: tuple[Refusal, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.comparisons:3} compared, apart by {self.difference:.1e}"] if self.comparisons else []
        reasons = {refusal.reason: refusal.what for refusal in self.refusals}
        parts += [f"refused {what}: {reason}" for reason, what in reasons.items()]
        return "; ".join(parts) or "nothing to compare"


@dataclass(frozen=True)
class Report:
    """The results of all rules for a metric that breaks none.

    Attributes:
        subject: name of the metric.
        verdicts: one result per rule; a rule is kept if something was compared.
        skipped: names of the rules that were not checked, with the reasons.
    """

    subject: str
    verdicts: tuple[Verdict, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        results = {verdict.rule: str(verdict) for verdict in self.verdicts}
        results |= {rule: f"skipped: {reason}" for rule, reason in self.skipped.items()}
        width = max(map(len, results), default=0)
        lines = [f"{self.subject} keeps {sum(verdict.comparisons > 0 for verdict in self.verdicts)} rules"]
        return "\n".join([*lines, *(f"  {rule:{width}}  {result}" for rule, result in results.items())])


@dataclass(frozen=True)
class Rule:
    """A rule with an evaluation: `rule(my_metric)` raises AssertionError or returns a `Verdict`.

    Attributes:
        check: the generator function of the rule.
        given: `predictions`, `labels` and `higher_is_better` of a `MetricSubject`.
    """

    check: Check
    given: Mapping[str, Any]

    def __call__(self, metric: Callable[..., Any]) -> Verdict:
        compared, largest, refusals = 0, 0.0, []
        try:
            for finding in self.check(MetricSubject(metric, **self.given)):
                if isinstance(finding, Refusal):
                    refusals.append(finding)
                    continue
                compared += 1
                difference, shown = _compared(*finding[1:])
                if difference > TOLERANCE:
                    raise AssertionError(self._broken(metric, f"{finding[0]}: {shown}"))
                largest = max(largest, difference)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(self._broken(metric, f"raised {type(error).__name__}: {error}")) from error
        return Verdict(self.name, compared, largest, tuple(refusals))

    @property
    def name(self) -> str:
        """The name of the rule."""
        return self.check.__name__

    __name__ = name  # shown by pytest

    def _broken(self, metric: Callable[..., Any], found: str) -> str:
        promise, _, fix = inspect.cleandoc(self.check.__doc__ or "").partition("\n\nFix: ")
        promise = promise.removeprefix("Check that ")
        lines = f"{_name(metric)} breaks the rule `{self.name}`.", promise[:1].upper() + promise[1:], found
        return "\n  ".join([*lines, f"Fix: {' '.join(fix.split())}"])


# --- what the metric returns ------------------------------------------------------------------------------------------


def signature(metric: MetricSubject) -> Iterator[Finding]:
    """Check that the metric takes one EvalPrediction and returns a dict.

    Fix: `def my_metric(eval_pred)`: bind options with functools.partial, and give the function to the Trainer without
    calling it.
    """
    result = metric.fresh(metric.piece())
    yield "type of the result", "dict" if isinstance(result, Mapping) else type(result).__name__, "dict"


def floats(metric: MetricSubject) -> Iterator[Finding]:
    """Check that each score is a single Python number with a name.

    Fix: `float(value)`: an array or tensor among the scores breaks the first checkpoint; give each element of a list or
    dict a separate name.
    """
    for key, value in metric.scores().items():
        yield "name", type(key).__name__, "str"
        single = isinstance(value, float | int) and not isinstance(value, bool)
        yield f"type of {key}", "number" if single else type(value).__name__, "number"


def names(metric: MetricSubject) -> Iterator[Finding]:
    """Check that no score has a name that the Trainer writes itself.

    Fix: choose another name, such as `nll_loss` for `loss`, without the prefix `eval_`, which the Trainer adds.
    """
    yield "names taken", [key for key in metric.scores() if keys.is_reserved(key)], []


def higher_is_better(metric: MetricSubject) -> Iterator[Finding]:
    """Check that for every score it is known whether greater is better, or neither.

    Fix: higher_is_better={"my_error": False} here, and greater_is_better=False in TrainingArguments: the Trainer
    assumes that greater is better for every name that does not end in "loss", and then keeps the worst checkpoint.
    """
    known = {**HIGHER_IS_BETTER, **getattr(metric.metric, "higher_is_better", {}), **metric.higher_is_better}
    yield "without a direction", [key for key in metric.scores() if keys.find(key, known) is None], []


# --- what the metric must not do --------------------------------------------------------------------------------------


def inputs(metric: MetricSubject) -> Iterator[Finding]:
    """Check that the metric modifies neither predictions nor labels.

    Fix: `labels = np.where(labels == -100, pad, labels)` instead of `labels[labels == -100] = pad`.
    """
    given = metric.piece()
    metric.fresh(given)
    for what, tree, before in zip(Evaluation._fields, given, (metric.predictions, metric.labels), strict=True):
        for (path, leaf), original in zip(leaves(tree), _arrays(before), strict=True):
            yield f"{what} {path}".strip(), leaf, original


def stateless(metric: MetricSubject) -> Iterator[Finding]:
    """Check that a second evaluation does not depend on the first.

    Fix: keep no sums after a result; start each evaluation from zero, and any random generator from a seed.
    """
    same = metric.fresh
    expected = dict(same(metric.piece()))
    yield from _same("the second time", same(metric.piece()), expected)


# --- which numbers it returns -----------------------------------------------------------------------------------------


def permutation(metric: MetricSubject) -> Iterator[Finding]:
    """Check that the order of the samples does not change the scores.

    Fix: compare each prediction with its own label, and let nothing depend on the position of a sample.
    """
    places = np.arange(metric.rows)
    shuffled = np.concatenate([places[::2], places[1::2]])  # changes neighbors, too
    for what, order in {"in reverse": places[::-1], "every second one first": shuffled}.items():
        yield from _same(what, metric.fresh(metric.piece(order)), metric.scores())


def padding(metric: MetricSubject) -> Iterator[Finding]:
    """Check that more padding with -100 does not change the scores.

    Fix: mask by `labels != -100`, not by the predictions; and count what is left, not the positions.
    """
    widths = {leaf.shape[1] for leaf in _arrays(metric.labels) if leaf.ndim > 1}

    def wider(leaf: Array) -> Array:
        if leaf.ndim < 2 or leaf.shape[1] not in widths:
            return leaf
        return np.pad(leaf, [(0, 0), (0, 3), *[(0, 0)] * (leaf.ndim - 2)], constant_values=-100)

    longer = Evaluation(mapped(wider, metric.predictions), mapped(wider, metric.labels))
    yield from _same("three more columns", metric.fresh(longer), metric.scores())


def lists(metric: MetricSubject) -> Iterator[Finding]:
    """Check that lists of batches (`eval_do_concat_batches=False`) give the same scores, or an error.

    Fix: `np.concatenate` them, as `np.asarray` stacks batches of equal size; or add up sums and counts over all batches
    and divide once: a mean of means weights batches, not items.
    """
    for cuts in SPLITS:
        batches = Evaluation(*map(list, zip(*metric.pieces(cuts), strict=True)))
        yield from _same(f"cut at {cuts}", _attempt(metric.fresh, batches), metric.scores())


def steps(metric: MetricSubject) -> Iterator[Finding]:
    """Check that calls step by step (`batch_eval_metrics=True`) give the same scores, or an error.

    Fix: add up sums and counts over all steps, and divide in the last one, which has `compute_result=True`.
    """
    for cuts in SPLITS:
        scores = _attempt(_steps, metric.fresh, metric.pieces(cuts))
        yield from _same(f"cut at {cuts}", scores, metric.scores())


def interrupted(metric: MetricSubject) -> Iterator[Finding]:
    """Check that after an interrupted evaluation the next is correct or an error, and the one after it correct.

    Fix: the Trainer does not signal where an evaluation starts: set the number of samples of an evaluation, and clear
    the sums with every result and every error.
    """
    if isinstance(error := _attempt(_steps, metric.fresh, metric.pieces((2,))), Exception):
        yield Refusal("steps", f"{type(error).__name__}: {error}")
        return

    ways: dict[str, Callable[..., Any]] = {
        "by steps": lambda subject: _steps(subject, metric.pieces((2,))),
        "in arrays": lambda subject: subject(metric.piece()),
    }
    for what, again in ways.items():
        broken = metric.fresh
        broken(_tensors(metric.piece(slice(0, 1))), compute_result=False)
        yield from _same(f"the next one, {what}", _attempt(again, broken), metric.scores())
        yield from _same(f"the one after it, {what}", again(broken), metric.scores())


def empty(metric: MetricSubject) -> Iterator[Finding]:
    """Check that without samples or labels the names stay the same and scores are numbers, or a ValueError is raised.

    Fix: check the count before dividing, and return a score for every class, whether it occurs or not.
    """
    ignored = mapped(lambda leaf: np.full_like(leaf, -100), metric.labels)
    for what, evaluation in (
        ("no sample", metric.piece(slice(0, 0))),
        ("every label ignored", Evaluation(metric.piece().predictions, ignored)),
    ):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns about the mean of an empty array
                scores = dict(metric.fresh(evaluation))
        except ValueError as error:
            yield Refusal(what, f"ValueError: {error}")
            continue
        yield f"{what}, names", sorted(scores), sorted(metric.scores())
        for key, value in scores.items():
            yield f"{what}, type of {key}", isinstance(value, float | int), True


RULES: tuple[Check, ...] = (signature, floats, names, higher_is_better, inputs, stateless)
RULES += (permutation, padding, lists, steps, interrupted, empty)


def metric_rules(
    *,
    predictions: Any,
    labels: Any,
    higher_is_better: Mapping[str, bool | None] | None = None,
    skip: Mapping[str, str] | None = None,
) -> list[Rule]:
    """Return the rules that a metric must keep, one callable per rule, for `pytest.mark.parametrize`.

    Args:
        predictions: the output of the reducer for at least four samples: an array, or tuples and dicts of arrays.
        labels: their labels, -100 where ignored.
        higher_is_better: for scores whose direction the metric does not give: whether greater is better, None for
            neither.
        skip: rules that this metric need not keep, each with the reason, as `{"padding": "the columns are classes"}`.

    Returns:
        Callables with a name: `rule(my_metric)` raises AssertionError, or returns what was compared.

    Raises:
        ValueError: if `skip` names an unknown rule or gives no reason, there are fewer than four samples, or the
            numbers of predictions and labels differ.
        TypeError: if predictions and labels are not arrays.

    Example:
        >>> rules = metric_rules(predictions=np.array([1, 2, 2, 0]), labels=np.array([1, 2, 0, 0]))
        >>> [rule.name for rule in rules][:2]
        ['signature', 'floats']
    """
    _check_samples(predictions, labels)
    given = {"predictions": predictions, "labels": labels, "higher_is_better": dict(higher_is_better or {})}
    rules = {check.__name__: Rule(check, given) for check in RULES}
    for name, reason in (skip or {}).items():
        if name not in rules:
            raise ValueError(f"skip must name one of the rules {', '.join(rules)}, got {name!r}")
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"skip[{name!r}] must give a reason, as skip={{{name!r}: 'the columns are classes'}}")
    return [rule for name, rule in rules.items() if name not in (skip or {})]


def check_metric(metric: Callable[..., Any], *, predictions: Any, labels: Any, **options: Any) -> Report:
    """Check a `compute_metrics` against all rules.

    Args:
        metric: `(eval_pred) -> dict`, or `(eval_pred, compute_result) -> dict`.
        predictions: the output of the reducer for at least four samples: an array, or tuples and dicts of arrays.
        labels: their labels, -100 where ignored.
        **options: the options of `metric_rules`.

    Returns:
        What was compared, if every rule is kept; `print` it.

    Raises:
        AssertionError: if a rule is broken; the message names it, what was given and expected, and how to fix it.
        TypeError, ValueError: as for `metric_rules`.

    Example:
        >>> def hits(eval_pred):
        ...     return {"hits": np.mean(eval_pred.predictions == eval_pred.label_ids, keepdims=True)}
        >>> check_metric(hits, predictions=np.array([1, 2, 2, 0]), labels=np.array([1, 2, 0, 0]))
        Traceback (most recent call last):
        AssertionError: hits breaks the rule `floats`.
          Each score is a single Python number with a name.
          type of hits: 'ndarray', expected 'number'
          ...
    """
    verdicts, broken = [], {}
    for rule in metric_rules(predictions=predictions, labels=labels, **options):
        try:
            verdicts.append(rule(metric))
        except AssertionError as error:
            broken[rule.name] = error
    if broken:
        first, *others = broken
        also = f"\n  Also broken: {', '.join(others)}" if others else ""
        raise AssertionError(f"{broken[first]}{also}") from broken[first].__cause__
    return Report(_name(metric), tuple(verdicts), dict(options.get("skip") or {}))


def _check_samples(predictions: Any, labels: Any) -> None:
    found = [*_arrays(labels), *_arrays(predictions)]
    kinds = sorted({type(leaf).__name__ for leaf in found} - {"ndarray"})
    if kinds:
        raise TypeError(f"predictions and labels must be arrays, or tuples and dicts of them, got {', '.join(kinds)}")
    rows = sorted({leaf.shape[0] if leaf.ndim else 0 for leaf in found})
    if len(rows) != 1 or rows[0] < 4:
        raise ValueError(f"predictions and labels must have one row per sample, of at least four; got {rows} rows")


def _tensors(evaluation: Evaluation) -> Evaluation:
    import torch

    return Evaluation(*(mapped(torch.from_numpy, tree) for tree in evaluation))


def _steps(metric: Callable[..., Any], pieces: Sequence[Evaluation]) -> Any:
    """Return the scores of one call per step, as with `batch_eval_metrics=True`."""
    *steps, last = map(_tensors, pieces)
    for step in steps:
        metric(step, compute_result=False)
    return metric(last, compute_result=True)


def _attempt(call: Callable[..., Any], *given: Any) -> dict[str, Any] | Exception:
    """Return the scores, or the error if the metric refuses."""
    try:
        return dict(call(*given))
    except Exception as error:
        return error


def _same(what: str, given: Mapping[str, Any] | Exception, expected: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare names and values of scores; an error in place of the scores is a refusal."""
    if isinstance(given, Exception):
        yield Refusal(what, f"{type(given).__name__}: {given}")
        return
    yield f"{what}, names", sorted(given), sorted(expected)
    for key, value in expected.items():
        yield f"{what}, {key}", given[key], value


def _arrays(tree: Any) -> list[Array]:
    return [leaf for _, leaf in leaves(tree)]


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def _compared(given: Any, expected: Any) -> tuple[float, str]:
    """Return the largest difference relative to the larger of 1 and the expected numbers, and what to show of it.

    It is 0 for equal values, NaN and infinities included, and inf where shapes, or values that are not numbers, differ.
    """
    numeric = [isinstance(x, NUMERIC) and not isinstance(x, bool) for x in (given, expected)]
    if not all(numeric) or np.shape(given) != np.shape(expected):
        equal = not any(numeric) and given == expected
        return 0.0 if equal else math.inf, f"{given!r}, expected {expected!r}"
    a, b = np.asarray(given, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    apart = np.where(np.isnan(apart), np.inf, apart)
    difference = float(apart.max(initial=0.0)) / max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0)))
    if not difference:
        return 0.0, ""
    place = np.unravel_index(int(apart.argmax()), a.shape)
    where = f" at {tuple(map(int, place))}" if a.ndim else ""
    return difference, f"{a[place]:.6g}{where}, expected {b[place]:.6g}"
