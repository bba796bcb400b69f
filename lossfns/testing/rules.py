"""Rules, verdicts and reports: what the kits for losses, terms and reducers share.

A rule is a generator function `rule(subject)`. Its name is the name of the rule. Its docstring is "Check that ...",
followed by "Fix: ..." with what to change. It yields `(what was measured, given, expected)`, with a tolerance as the
fourth entry where the tolerance of the subject does not fit. Comparing, reporting and raising happen in this module
only.
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
Finding = tuple[str, Any, Any] | tuple[str, Any, Any, float]


class Subject(Protocol):
    """The function under test, with all that is needed to call it."""

    @property
    def tolerance(self) -> float:
        """Largest difference between two equal results, relative to the larger of 1 and the expected number."""


Check = Callable[[Any], Iterator[Finding]]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a rule that was not broken.

    Attributes:
        rule: the name of the rule.
        comparisons: number of tensors, numbers and other facts that were compared.
        difference: the largest difference among the comparisons, each of which was within its tolerance.
    """

    rule: str
    comparisons: int
    difference: float

    def __str__(self) -> str:
        compared = f"{self.comparisons:3} compared, apart by {self.difference:.1e}"
        return compared if self.comparisons else "nothing to compare"


@dataclass(frozen=True)
class Report:
    """The outcome of all rules for a function that broke none of them.

    Attributes:
        subject: the name of the function.
        verdicts: one verdict per rule; a rule counts as kept if at least one comparison was made.
        skipped: the reason for each rule that was skipped, by name.
    """

    subject: str
    verdicts: tuple[Verdict, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        lines = {verdict.rule: str(verdict) for verdict in self.verdicts}
        lines |= {rule: f"skipped: {reason}" for rule, reason in self.skipped.items()}
        width = max(map(len, lines), default=0)
        kept = sum(verdict.comparisons > 0 for verdict in self.verdicts)
        return "\n".join(
            [f"{self.subject} keeps {kept} rules", *(f"  {rule:{width}}  {lines[rule]}" for rule in lines)]
        )


@dataclass(frozen=True, repr=False)
class Rule:
    """One rule: `rule(my_function)` returns a `Verdict` or raises AssertionError.

    Attributes:
        check: the generator function that makes the comparisons.
        subject: builds the `Subject` from the function under test.
    """

    check: Check
    subject: Callable[[Any], Subject]

    def __call__(self, function: Any) -> Verdict:
        compared, largest = 0, 0.0
        try:
            subject = self.subject(function)
            for what, given, expected, *tolerance in self.check(subject):
                compared += 1
                difference = distance(given, expected)
                if difference and not difference <= (tolerance[0] if tolerance else subject.tolerance):
                    raise AssertionError(self._broken(function, f"{what}: {_contrast(given, expected)}"))
                largest = max(largest, difference)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(self._broken(function, f"raised {type(error).__name__}: {error}")) from error
        return Verdict(self.name, compared, largest)

    @property
    def name(self) -> str:
        """The name of the rule."""
        return self.check.__name__

    __name__ = name  # pytest shows it as the id of a parameter

    def __repr__(self) -> str:
        return f"Rule({self.name})"

    def _broken(self, function: Any, found: str) -> str:
        promise, _, fix = inspect.cleandoc(self.check.__doc__ or "").partition("\n\nFix: ")
        promise = promise.removeprefix("Check that ")
        lines = (
            f"{name_of(function)} breaks the rule `{self.name}`.",
            promise[:1].upper() + promise[1:],
            found,
            f"Fix: {' '.join(fix.split())}",
        )
        return "\n  ".join(lines)


def select(checks: Iterable[Check], subject: Callable[[Any], Subject], skip: Mapping[str, str] | None) -> list[Rule]:
    """Return the rules for these checks, without those that are skipped.

    Args:
        checks: the generator functions.
        subject: builds the `Subject` from the function under test.
        skip: the reason for each rule to skip, by name.

    Raises:
        ValueError: `skip` names an unknown rule, or gives no reason.
    """
    skip, rules = skip or {}, [Rule(check, subject) for check in checks]
    names = [rule.name for rule in rules]
    for name, reason in skip.items():
        if name not in names:
            raise ValueError(f"skip must name rules that apply here ({', '.join(names)}), got {name!r}")
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"skip[{name!r}] must be a reason, such as 'the loss ranks the batch', got {reason!r}")
    return [rule for rule in rules if rule.name not in skip]


def judge(function: Any, rules: Iterable[Rule], skip: Mapping[str, str] | None) -> Report:
    """Apply every rule to a function.

    Returns:
        The report, if no rule is broken.

    Raises:
        AssertionError: the message of the first broken rule, followed by the names of the others.
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
    """Return the largest difference between two numbers, tensors or arrays, relative to max(1, |expected|).

    The difference is 0 where both are equal, or infinite or NaN at the same places. It is inf if the shapes differ, or
    if the values are not numbers and differ.
    """
    a, b = _array(given), _array(expected)
    if a is None or b is None or a.shape != b.shape:
        return 0.0 if a is None and b is None and given == expected else math.inf
    return float(_differences(a, b).max(initial=0.0)) / max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0)))


def _array(value: Any) -> Array | None:
    """Return the value as float64, or None unless it is numeric."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().double().numpy()
    if isinstance(value, (int, float, np.ndarray, np.number)) and not isinstance(value, bool):
        return np.asarray(value, np.float64)
    return None


def _differences(a: Array, b: Array) -> Array:
    with np.errstate(invalid="ignore"):
        differences = np.abs(a - b)
    differences = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, differences)
    return np.where(np.isnan(differences), np.inf, differences)


def _contrast(given: Any, expected: Any) -> str:
    """Describe two values that differ; of two arrays, the entries with the largest difference and their index."""
    a, b = _array(given), _array(expected)
    if a is None or b is None:
        return f"{given!r}, expected {expected!r}"
    if a.shape != b.shape:
        return f"shape {a.shape}, expected {b.shape}"
    if not a.ndim:
        return f"{a:.6g}, expected {b:.6g}"
    place = np.unravel_index(int(_differences(a, b).argmax()), a.shape)
    return f"{a[place]:.6g} at {tuple(map(int, place))}, expected {b[place]:.6g}"
