"""What every option is asked before work begins: a value of another type is an error that names the option."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Real
from operator import index
from typing import Any

from torch import Tensor


def number(value: Any, name: str) -> Any:
    """Return the value, or raise TypeError unless it is a number (or a tensor, which may be learnt)."""
    if isinstance(value, bool) or not isinstance(value, (Real, Tensor)):
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
    several = values if isinstance(values, Iterable) and not isinstance(values, str) else (values,)
    return [whole(value, name) for value in several]


def strings(values: Any, what: str) -> tuple[str, ...]:
    """Return the names, or raise TypeError unless they are several strings."""
    found = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else None
    if found is None or not all(isinstance(name, str) for name in found):
        raise TypeError(f"{what} must be a sequence of names, got {values!r}")
    return found


def function(value: Any, name: str) -> Callable[..., Any]:
    """Return the value, or raise TypeError unless it can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}")
    return value  # type: ignore[no-any-return]
