"""Recorder through which a loss exposes intermediate statistics to `watch()`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Notes:
    """What one call of a loss leaves behind, without a graph.

    Attributes:
        fields: statistics to measure beside those that the term asks for.
        measured: these, `(n,)` each, of the scored items of the first tensor of logits; empty where no kernel ran.
        parts: the summands of the term by name, each divided as the loss is.
        share: the items of this call by the count of its window, 0-d float64, None until a loss counted.
    """

    fields: tuple[str, ...] = ()
    measured: dict[str, Tensor] = field(default_factory=dict)
    parts: list[tuple[str, Tensor]] = field(default_factory=list)
    share: Tensor | None = None


# Like torch's own grad mode, it holds for the calls inside a `with` block and no longer.
_watching: ContextVar[Notes | None] = ContextVar("lossfns_notes", default=None)


def current_notes() -> Notes | None:
    """Where a loss that runs now leaves its notes; None where nobody watches."""
    return _watching.get()


@contextmanager
def taking(notes: Notes) -> Iterator[None]:
    """Let the loss called in this block fill `notes`."""
    token = _watching.set(notes)
    try:
        yield
    finally:
        _watching.reset(token)
