"""Where the logits of a loss or reducer come from: a tensor of logits, or hidden states and a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .alignment import Selector, select_logits
from .block import row_statistics, top_ids
from .head import head_logits, head_statistics, head_term_loss, head_top_ids
from .head_products import Head
from .hidden import HiddenStates, stand_in
from .rows import Rows
from .term_loss import BoundTerm, Source, term_loss


@dataclass(frozen=True)
class FromLogits:
    """Logits `(..., V)` that exist.

    Attributes:
        like: a tensor of the logits' shape, dtype and device.
        padded: may labels be longer on the right by ignored ones?
    """

    like: Tensor
    padded: bool = False

    def statistics(self, rows: Rows, fields: Sequence[str]) -> dict[str, Tensor]:
        """The statistics `fields` of the given rows, `(n,)` each."""
        return row_statistics(self.like, rows, fields)

    def top_ids(self, rows: Rows, k: int) -> Tensor:
        """Ids of the `k` largest logits, `(n, k)` int32."""
        return top_ids(self.like, rows, k)

    def logits(self, rows: Rows) -> Tensor:
        """The given rows of logits, `(n, V)`: some hundred rows, not all."""
        return self.like.flatten(0, -2)[rows.on_device]

    def loss(self, rows: Rows, bound: BoundTerm, count: Tensor, *, overwrite_logits: bool = False) -> Tensor:
        """Sum of a term over the given rows, divided by `count`."""
        return term_loss(self.like, rows, bound, count, overwrite_logits=overwrite_logits)


@dataclass(frozen=True)
class FromHidden:
    """Logits `head(hidden)` that never exist together; the same interface."""

    hidden: Tensor
    head: Head
    padded: bool = True  # across ranks labels are padded, hidden states are not

    @property
    def like(self) -> Tensor:
        return stand_in(self.hidden, self.head)

    def statistics(self, rows: Rows, fields: Sequence[str]) -> dict[str, Tensor]:
        return head_statistics(self.hidden, self.head, rows, fields)

    def top_ids(self, rows: Rows, k: int) -> Tensor:
        return head_top_ids(self.hidden, self.head, rows, k)

    def logits(self, rows: Rows) -> Tensor:
        return head_logits(self.hidden, self.head, rows)

    def loss(self, rows: Rows, bound: BoundTerm, count: Tensor, *, overwrite_logits: bool = False) -> Tensor:
        if overwrite_logits:
            raise ValueError("overwrite_logits=True has nothing to write over: with source= there are no logits")
        return head_term_loss(self.hidden, self.head, rows, bound, count)


def open_source(outputs: Any, labels: Tensor | None, select: Selector | None, source: HiddenStates | None) -> Source:
    """The logits among the outputs, or what `source` kept of the same forward."""
    if source is None:
        return FromLogits(select_logits(outputs, labels, select))
    if not hasattr(source, "read"):
        raise TypeError(f"source must be hidden_states(model), not {type(source).__name__}")
    if select is not None:
        raise ValueError("select= picks logits, source= does without them: give one of the two")
    rows = labels.shape[0] if labels is not None else select_logits(outputs, None).shape[0]
    return FromHidden(*source.read(outputs, rows))
