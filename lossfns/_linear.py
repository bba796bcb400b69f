"""Which losses are linear in their term, so that a sum of them is one loss of the summed terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def linear_in_term(**only: tuple[object, ...]) -> Callable[[_Function], _Function]:
    """Declare that a loss with the sum of two terms is the sum of the losses with each: `add_losses` may join them.

    Args:
        **only: by option, the values with which it is so. Any value of the other options will do.

    Returns:
        A decorator of the loss, to be applied last.
    """

    def declare(loss: _Function) -> _Function:
        loss.linear_in_term = only  # type: ignore[attr-defined]
        return loss

    return declare


def is_linear(loss: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Whether a loss, as a function without its options, declares to be linear in its term with these options."""
    only = getattr(loss, "linear_in_term", None)
    return only is not None and all(options[name] in values for name, values in only.items())
