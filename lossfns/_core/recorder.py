"""Recorder through which a loss exposes intermediate statistics to `watch()`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Recorder:
    """Statistics that are recorded during one call of a loss, without a graph.

    Attributes:
        fields: statistics to measure in addition to those that the term asks for.
        measured: these statistics, `(n,)` each, of the scored labels of the first tensor of logits; empty if the loss
            does not run the kernel.
        parts: name and value of each summand of the term, divided as the loss is.
        share: number of labels of this call divided by the count of its window, 0-d float64; None until a loss counts.
    """

    fields: tuple[str, ...] = ()
    measured: dict[str, Tensor] = field(default_factory=dict)
    parts: list[tuple[str, Tensor]] = field(default_factory=list)
    share: Tensor | None = None


# The recorder that a running loss fills, or None. Like torch's grad mode, it is set inside a `with` block.
ACTIVE: ContextVar[Recorder | None] = ContextVar("lossfns_recorder", default=None)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let the loss that is called in this block fill `recorder`."""
    token = ACTIVE.set(recorder)
    try:
        yield
    finally:
        ACTIVE.reset(token)
