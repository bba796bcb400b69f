"""Read from a term's signature which tensors it asks for, and find its closed derivative if it declares one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

Term = Callable[..., Tensor]
Grads = dict[str, Tensor | float]
Derivative = Callable[..., Grads]
_Derivative = TypeVar("_Derivative", bound=Derivative)

STATISTICS = ("log_prob", "log_normalizer", "mean_logit", "entropy")


def parameters(
    term: Term, extras: Iterable[str] | None = None, known: Sequence[str] = (*STATISTICS, "labels")
) -> tuple[str, ...]:
    """Return the names of the tensors that a term asks for: its parameters without a default.

    Args:
        term: any callable with an inspectable signature; a module names its tensors in `forward`.
        extras: names in the dict of labels; None accepts unknown names, which are checked later.
        known: names that the loss passes to a term.

    Raises:
        TypeError: the term has `*args`, `**kwargs` or positional-only parameters, binds a known name or an unknown
            option, has an option with the name of an extra, or asks for a name that is neither known nor an extra.
    """
    extras = None if extras is None else set(extras)
    names = []
    check_options(term, "term")
    called = term.forward if isinstance(term, nn.Module) else term
    for parameter in inspect.signature(called).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"{name_of(term)}: parameter {parameter} is {parameter.kind.description}; a term must name each tensor "
                f"it takes: {', '.join(known)}, or an extra of the dict of labels"
            )
        if parameter.default is not parameter.empty:
            if parameter.name in known:
                raise TypeError(f"{name_of(term)} binds '{parameter.name}', which the loss measures; drop its value")
            if extras is not None and parameter.name in extras:
                raise TypeError(
                    f"'{parameter.name}' is in the dict of labels, but {name_of(term)} has an option of that name with "
                    "its own value. Write a term that takes the tensor by name and passes it on"
                )
        elif extras is not None and parameter.name not in {*known, *extras}:
            raise TypeError(
                f"{name_of(term)} asks for '{parameter.name}'; known names are "
                f"{', '.join(sorted({*known, *extras}))}. An option needs a default or a functools.partial, an extra "
                "tensor a dict of labels (collators.with_extras)"
            )
        else:
            names.append(parameter.name)
    return tuple(names)


def check_options(called: Callable[..., Any], what: str) -> None:
    """Raise TypeError unless `called` is callable, and for a partial that binds an option its function lacks."""
    if not callable(called):
        raise TypeError(f"{what} must be a function, got {called!r}")
    if not isinstance(called, partial):
        return
    taken = inspect.signature(called.func).parameters.values()
    unknown = called.keywords.keys() - {parameter.name for parameter in taken}
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        options = [
            parameter.name
            for parameter in taken
            if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
        ]
        raise TypeError(
            f"{name_of(called.func)} has no option {min(unknown)!r}; options: {', '.join(options) or 'none'}"
        )


def derivative(term: Term) -> Callable[[_Derivative], _Derivative]:
    """Declare the closed derivative of a term, which is several times faster per chunk than autograd.

    Args:
        term: the term.

    Returns:
        A decorator of a function with the parameters of `term`. It returns the derivative of the term's values by each
        statistic, `(n,)` or one number for all labels, finite where the statistics are finite and for a label of
        probability 0. Statistics that it leaves out have the derivative 0.
    """

    def declare(function: _Derivative) -> _Derivative:
        term.derivative = function  # type: ignore[attr-defined]
        function.term = term  # type: ignore[attr-defined]
        return function

    return declare


def derivative_of(term: Term) -> Derivative | None:
    """Return the closed derivative of a term with its options bound, or None if autograd has to compute it."""
    function: Any = term.func if isinstance(term, partial) and not term.args else term
    closed: Any = getattr(function, "derivative", None)
    if getattr(closed, "term", None) is not function:  # functools.wraps copies attributes to another function
        return None
    options = {}
    for option in inspect.signature(term).parameters.values():
        if isinstance(option.default, Tensor):  # it may be a parameter to learn
            return None
        if option.default is not option.empty:
            options[option.name] = option.default
    return partial(closed, **options)


def name_of(term: Term) -> str:
    """Return a term as a user would write it, with its options."""
    if isinstance(term, partial):
        shown = {key: value for key, value in term.keywords.items() if not isinstance(value, Tensor)}
        options = ", ".join(f"{key}={name_of(value) if callable(value) else value}" for key, value in shown.items())
        return f"{name_of(term.func)}({options})" if options else name_of(term.func)
    return getattr(term, "__name__", None) or repr(term)
