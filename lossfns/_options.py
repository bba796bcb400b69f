"""What every option is asked before work begins: a value of another type is an error that names the option."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from typing import Any, TypeVar

from torch import Tensor

_Number = TypeVar("_Number", bound=float | Tensor)


def number(value: _Number, name: str) -> _Number:
    """Return the value, or raise TypeError unless it is a number: Python's, NumPy's or torch's, which may be learnt."""
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return value


def whole(value: Any, name: str) -> int:
    """Return the value as an int, or raise TypeError unless it is one, of Python's or of NumPy's."""
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an int, got {value!r}")


def wholes(values: Any, name: str) -> list[int]:
    """Return one or several values as ints; raises as `whole`."""
    several = isinstance(values, Iterable) and not isinstance(values, str) and getattr(values, "ndim", 1) > 0
    return [whole(value, name) for value in (values if several else (values,))]


def items(values: Any, name: str) -> list[Any]:
    """Return the values as a list, or raise TypeError unless they are several; the letters of a text are not meant."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence, got {values!r}")
    return list(values)


def strings(values: Any, name: str) -> tuple[str, ...]:
    """Return the names, or raise TypeError unless they are several strings."""
    found = items(values, name)
    if not all(isinstance(each, str) for each in found):
        raise TypeError(f"{name} must be a sequence of names, got {values!r}")
    return tuple(found)


def function(value: Any, name: str) -> Callable[..., Any]:
    """Return the value, or raise TypeError unless it can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}")
    return value  # type: ignore[no-any-return]
