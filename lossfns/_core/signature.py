"""Read which tensors a term asks for, from the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from .checks import function

Term = Callable[..., Tensor]
STATISTICS = ("log_prob", "log_normalizer", "mean_logit", "entropy")
KNOWN = (*STATISTICS, "labels")


def parameters(term: Term, extras: Iterable[str] | None = None, known: Sequence[str] = KNOWN) -> tuple[str, ...]:
    """Names of the tensors a term asks for: its parameters without a default.

    Args:
        term: any callable with an inspectable signature; a module names its tensors in `forward`.
        extras: names in the dict of labels; None leaves unknown names for later.
        known: what the loss gives to a term.

    Raises:
        TypeError: the term has `*args`, `**kwargs` or positional-only parameters, binds what is given or is no option,
            has an option of the name of an extra, or asks for a name that is neither known nor among the extras.
    """
    extras = None if extras is None else set(extras)
    names = []
    check_options(term, "term")
    called = term.forward if isinstance(term, nn.Module) else term
    for parameter in inspect.signature(called).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"{name_of(term)}: parameter {parameter} is {parameter.kind.description}; a term names each tensor it "
                f"takes: {', '.join(known)}, or an extra of the dict of labels"
            )
        if parameter.default is not parameter.empty:
            if parameter.name in known:
                raise TypeError(
                    f"{name_of(term)} binds '{parameter.name}', which is measured for each item; drop its value"
                )
            if extras is not None and parameter.name in extras:
                raise TypeError(
                    f"'{parameter.name}' is in the dict of labels, but {name_of(term)} has an option of that name with "
                    "a value of its own. Write a term that takes the tensor by name and hands it on"
                )
        elif extras is not None and parameter.name not in {*known, *extras}:
            raise TypeError(
                f"{name_of(term)} asks for '{parameter.name}'; known are {', '.join(sorted({*known, *extras}))}. "
                "An option needs a default or a functools.partial, an extra tensor a dict of labels "
                "(collators.with_extras)"
            )
        else:
            names.append(parameter.name)
    return tuple(names)


def check_options(called: Callable[..., Any], what: str) -> None:
    """Raise TypeError where `called` is no function, or a partial that binds an option its function does not have."""
    function(called, what)
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


def name_of(term: Term) -> str:
    """A term as a reader would write it."""
    if isinstance(term, partial):
        shown = {key: value for key, value in term.keywords.items() if not isinstance(value, Tensor)}
        options = ", ".join(f"{key}={name_of(value) if callable(value) else value}" for key, value in shown.items())
        return f"{name_of(term.func)}({options})" if options else name_of(term.func)
    return getattr(term, "__name__", None) or repr(term)
