"""Checks of arguments that run when a metric is built, so that a mistake does not surface in the first evaluation."""

from collections.abc import Iterable, Mapping, Set
from operator import index
from reprlib import repr as short
from typing import Any

import numpy as np

from .evaluation import Array


def check(fits: bool, name: str, expected: str, value: Any) -> None:
    """Raise TypeError unless `fits`; the message names the argument, what is expected and what was given."""
    if not fits:
        kind = "" if value is None else f" ({type(value).__name__})"
        raise TypeError(f"{name} must be {expected}, got {short(value)}{kind}")


def integer(name: str, value: Any, *, minimum: int) -> int:
    """Return a Python or NumPy integer as an int.

    Raises:
        TypeError: if the value is not an integer.
        ValueError: if it is less than `minimum`.
    """
    fits = hasattr(value, "__index__") and not isinstance(value, bool)
    check(fits, name, f"an integer >= {minimum}", value)
    if index(value) < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value}")
    return index(value)


def sequence(name: str, values: Any, expected: str) -> list[Any]:
    """Return a sequence of any type as a list.

    Raises:
        TypeError: if the values are not iterable, are a dict, or have no order as those of a set.
    """
    fits = isinstance(values, Iterable) and not isinstance(values, (Mapping, Set)) and getattr(values, "ndim", 1) > 0
    check(fits, name, expected, values)
    return list(values)


def numbers(name: str, values: Any, expected: str) -> Array:
    """Return an array of numbers, of any shape.

    Raises:
        TypeError: if the values are not numbers, or rows differ in length.
    """
    try:
        found = np.asarray(values)
    except ValueError:  # rows of different lengths
        found = np.empty(0, object)
    check(found.dtype.kind in "biuf", name, expected, values)
    return found
