"""What the kits for losses, terms, reducers and metrics share: how a rule is judged, and the report.

A rule is a generator function. Its name is the rule's name; its docstring says what must hold and, after "Fix:", how to
mend what does not; it yields `(what was measured, given, expected)`, with a tolerance behind where the subject's own
does not fit, or a `Refusal` where an error is as right as the right number. Comparing, reporting and raising stand
here, once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .._core.signature import name_of

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Refusal:
    """A function does not do what it was asked for, and says so.

    Attributes:
        what: it was asked for.
        reason: it gave.
    """

    what: str
    reason: str


Finding = tuple[str, Any, Any] | tuple[str, Any, Any, float] | Refusal


class Subject(Protocol):
    """What a rule looks at: somebody's function and all that is needed to call it."""

    @property
    def tolerance(self) -> float:
        """Largest difference between two equal results, relative to the larger of 1 and the expected number."""


Check = Callable[[Any], Iterator[Finding]]


@dataclass(frozen=True)
class Verdict:
    """A rule that was not broken: kept in all that was compared, the rest refused.

    Attributes:
        rule: its name.
        comparisons: how many numbers, tensors or facts were compared.
        difference: the largest difference between two numbers that were equal enough.
        refusals: what the function refused.
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
    """All the rules that a function keeps.

    Attributes:
        subject: the function's name.
        verdicts: what was found, a rule each; a rule is kept if something was compared.
        skipped: names of rules that were not asked, and why.
    """

    subject: str
    verdicts: tuple[Verdict, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        width = max(map(len, [*(verdict.rule for verdict in self.verdicts), *self.skipped]), default=0)
        lines = [f"{self.subject} keeps {sum(verdict.comparisons > 0 for verdict in self.verdicts)} rules"]
        lines += [f"  {verdict.rule:{width}}  {verdict}" for verdict in self.verdicts]
        lines += [f"  {rule:{width}}  skipped: {reason}" for rule, reason in self.skipped.items()]
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Rule:
    """One rule, ready to judge a function: `rule(my_function)` raises AssertionError or returns a `Verdict`.

    Attributes:
        check: the generator function behind it.
        subject: what makes a `Subject` out of the function.
    """

    check: Check
    subject: Callable[[Any], Subject]

    def __call__(self, function: Any) -> Verdict:
        compared, largest, refusals = 0, 0.0, []
        try:
            subject = self.subject(function)
            for finding in self.check(subject):
                if isinstance(finding, Refusal):
                    refusals.append(finding)
                    continue
                what, given, expected, *tolerance = finding
                compared += 1
                difference = distance(given, expected)
                if difference and not difference <= (tolerance[0] if tolerance else subject.tolerance):
                    raise AssertionError(self._broken(function, f"{what}: {_contrast(given, expected)}"))
                largest = max(largest, difference)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(self._broken(function, f"raised {type(error).__name__}: {error}")) from error
        return Verdict(self.name, compared, largest, tuple(refusals))

    @property
    def name(self) -> str:
        """The name of the rule."""
        return self.check.__name__

    __name__ = name  # what pytest shows

    def __repr__(self) -> str:
        return f"Rule({self.name})"

    def _broken(self, function: Any, found: str) -> str:
        promise, _, fix = inspect.cleandoc(self.check.__doc__ or "").partition("\n\nFix: ")
        lines = f"{name_of(function)} breaks the rule `{self.name}`.", promise, found, f"Fix: {' '.join(fix.split())}"
        return "\n  ".join(lines)


def select(checks: Iterable[Check], subject: Callable[[Any], Subject], skip: Mapping[str, str] | None) -> list[Rule]:
    """Make rules of checks, without those to be skipped.

    Args:
        checks: the generator functions.
        subject: what makes a `Subject` out of the function to be judged.
        skip: reasons by name of the rule.

    Raises:
        ValueError: there is no rule of that name, or no reason.
    """
    skip, rules = skip or {}, [Rule(check, subject) for check in checks]
    names = [rule.name for rule in rules]
    for name, reason in skip.items():
        if name not in names:
            raise ValueError(f"skip names {name!r}; the rules that apply here are {', '.join(names)}")
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"skip[{name!r}] needs a reason, as skip={{{name!r}: 'a ranking loss, not additive'}}")
    return [rule for rule in rules if rule.name not in skip]


def judge(function: Any, rules: Iterable[Rule], skip: Mapping[str, str] | None) -> Report:
    """Ask every rule.

    Returns:
        The report, if all are kept.

    Raises:
        AssertionError: the message of the first broken rule, and the names of the others.
    """
    verdicts, messages = [], {}
    for rule in rules:
        try:
            verdicts.append(rule(function))
        except AssertionError as broken:
            messages[rule.name] = broken
    if messages:
        first, *others = messages
        also = f"\n  Also broken: {', '.join(others)}" if others else ""
        raise AssertionError(f"{messages[first]}{also}") from messages[first].__cause__
    return Report(name_of(function), tuple(verdicts), dict(skip or {}))


def distance(given: Any, expected: Any) -> float:
    """The largest difference between two numbers, tensors or arrays, relative to the larger of 1 and what is expected.

    0 where both are equal, infinite or NaN at the same places; inf where shapes, or things that are no numbers, differ.
    """
    a, b = _array(given), _array(expected)
    if a is None or b is None or a.shape != b.shape:
        return 0.0 if a is None and b is None and given == expected else math.inf
    apart = _apart(a, b)
    return float(apart.max(initial=0.0)) / max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0)))


def _array(value: Any) -> Array | None:
    """Numbers in float64; None for what is no number."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().double().numpy()
    if isinstance(value, (int, float, np.ndarray, np.number)) and not isinstance(value, bool):
        return np.asarray(value, np.float64)
    return None


def _apart(a: Array, b: Array) -> Array:
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, apart)
    return np.where(np.isnan(apart), np.inf, apart)


def _contrast(given: Any, expected: Any) -> str:
    """The two numbers; of tensors those that are furthest apart, and where."""
    a, b = _array(given), _array(expected)
    if a is None or b is None:
        return f"{given!r}, expected {expected!r}"
    if a.shape != b.shape:
        return f"shape {a.shape}, expected {b.shape}"
    if not a.ndim:
        return f"{a:.6g}, expected {b:.6g}"
    place = np.unravel_index(int(_apart(a, b).argmax()), a.shape)
    return f"{a[place]:.6g} at {tuple(map(int, place))}, expected {b[place]:.6g}"
