"""What an argument has to be, asked when it is given: a mistake ends before any work, and not in the first evaluation.

Every error names the argument, what it is, and what came.
"""

from collections.abc import Iterable, Mapping, Set
from operator import index
from reprlib import repr as short
from typing import Any

import numpy as np

from .evaluation import Array


def check(fits: bool, name: str, wanted: str, value: Any) -> None:
    """Raise TypeError, which says what `name` is and what came, unless it fits."""
    if not fits:
        kind = "" if value is None else f" ({type(value).__name__})"
        raise TypeError(f"{name} is {wanted}; {short(value)}{kind} came")


def integer(name: str, value: Any, wanted: str, *, least: int) -> int:
    """Return an integer, of Python or NumPy.

    Raises:
        TypeError: not an integer.
        ValueError: less than `least`.
    """
    whole = not isinstance(value, bool)
    try:
        found = index(value)
    except TypeError:
        whole, found = False, 0
    check(whole, name, f"{wanted}, an integer of at least {least}", value)
    if found < least:
        raise ValueError(f"{name} is {wanted}, at least {least}; {value} came")
    return found


def integers(name: str, values: Any, wanted: str, *, least: int) -> tuple[int, ...]:
    """Return integers, each as `integer` does."""
    given = sequence(name, values, f"a sequence, each {wanted}")
    return tuple(integer(f"each of {name}", value, wanted, least=least) for value in given)


def sequence(name: str, values: Any, wanted: str) -> list[Any]:
    """Return a sequence of any kind as a list.

    Raises:
        TypeError: not a sequence, or one that has no order or is a dict.
    """
    fits = isinstance(values, Iterable) and not isinstance(values, (Mapping, Set)) and getattr(values, "ndim", 1) > 0
    check(fits, name, wanted, values)
    return list(values)


def numbers(name: str, values: Any, wanted: str) -> Array:
    """Return an array of numbers, of any shape.

    Raises:
        TypeError: not numbers, or not all of one length.
    """
    try:
        found = np.asarray(values)
    except ValueError:  # rows of different lengths
        found = np.empty(0, object)
    check(found.dtype.kind in "biuf", name, wanted, values)
    return found


def number(name: str, value: Any, wanted: str) -> float:
    """Return a number; infinite ones are numbers, NaN is none.

    Raises:
        TypeError: not one number.
    """
    found = numbers(name, value, wanted)
    check(found.ndim == 0 and not np.isnan(found), name, wanted, value)
    return float(found)


def table(name: str, value: Any, wanted: str) -> Mapping[Any, Any]:
    """Return a dict.

    Raises:
        TypeError: not a dict.
    """
    check(isinstance(value, Mapping), name, wanted, value)
    found: Mapping[Any, Any] = value
    return found


def string(name: str, value: Any, wanted: str) -> str:
    """Return a text.

    Raises:
        TypeError: not a text.
    """
    check(isinstance(value, str), name, f"{wanted}, a str", value)
    return str(value)


def named_places(name: str, values: Any, wanted: str) -> tuple[tuple[str, ...], Array]:
    """Return the names among values, one a sample, in their order, and the place of each value's own.

    Raises:
        TypeError: not a sequence.
        ValueError: a text and something else are written the same, as "1" and 1.
    """
    check(getattr(values, "ndim", 1) == 1, name, wanted, values)
    first: dict[str, Any] = {}
    given = sequence(name, values, wanted)
    for value in given:
        known = first.setdefault(str(value), value)
        if isinstance(known, str) != isinstance(value, str):
            raise ValueError(
                f"{name} are told apart by how they are written, and {known!r} and {value!r} would be one: "
                "write one of them otherwise, or both as text if they are one"
            )
    place = {known: at for at, known in enumerate(sorted(first))}
    return tuple(place), np.array([place[str(value)] for value in given], np.int64)
