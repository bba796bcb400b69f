"""Find the rules that a function breaks."""

from collections.abc import Callable, Iterable
from typing import Any


def broken_rules(function: Callable[..., Any], rules: Iterable[Callable[..., Any]]) -> list[str]:
    """Return the names of the broken rules in the order in which they are applied."""
    broken = []
    for rule in rules:
        try:
            rule(function)
        except AssertionError:
            broken.append(rule.__name__)
    return broken
