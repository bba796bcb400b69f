"""Where the logits of a loss or reducer come from: a tensor of logits, or hidden states and a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .alignment import Outputs, Selector, select_logits
from .block import row_statistics, top_ids
from .head import head_logits, head_statistics, head_term_loss, head_top_ids
from .head_products import Head
from .hidden import HiddenStates, logits_like
from .rows import Rows
from .term_loss import BoundTerm, Source, term_loss


@dataclass(frozen=True)
class FromLogits:
    """Logits `(..., V)` that exist; see `Source`."""

    like: Tensor
    padded: bool = False

    def statistics(self, rows: Rows, fields: Sequence[str]) -> dict[str, Tensor]:
        return row_statistics(self.like, rows, fields)

    def top_ids(self, rows: Rows, k: int) -> Tensor:
        return top_ids(self.like, rows, k)

    def logits(self, rows: Rows) -> Tensor:
        return self.like.flatten(0, -2)[rows.on_device]

    def loss(self, rows: Rows, bound: BoundTerm, count: Tensor, *, overwrite_logits: bool = False) -> Tensor:
        return term_loss(self.like, rows, bound, count, overwrite_logits=overwrite_logits)


@dataclass(frozen=True)
class FromHidden:
    """Logits `head(hidden)` that never exist together; see `Source`."""

    hidden: Tensor
    head: Head
    padded: bool = True  # across ranks labels are padded, hidden states are not

    @property
    def like(self) -> Tensor:
        return logits_like(self.hidden, self.head)

    def statistics(self, rows: Rows, fields: Sequence[str]) -> dict[str, Tensor]:
        return head_statistics(self.hidden, self.head, rows, fields)

    def top_ids(self, rows: Rows, k: int) -> Tensor:
        return head_top_ids(self.hidden, self.head, rows, k)

    def logits(self, rows: Rows) -> Tensor:
        return head_logits(self.hidden, self.head, rows)

    def loss(self, rows: Rows, bound: BoundTerm, count: Tensor, *, overwrite_logits: bool = False) -> Tensor:
        if overwrite_logits:
            raise ValueError("overwrite_logits=True needs logits to write over, but with source= they never exist")
        return head_term_loss(self.hidden, self.head, rows, bound, count)


def open_source(
    outputs: Outputs, labels: Tensor | None, select: Selector | None, source: HiddenStates | None
) -> Source:
    """Return the logits among the outputs, or the hidden states that `source` kept of the same forward."""
    if source is None:
        return FromLogits(select_logits(outputs, labels, select))
    if not hasattr(source, "read"):
        raise TypeError(f"source must be hidden_states(model), got {type(source).__name__}")
    if select is not None:
        raise ValueError("select= picks logits and source= replaces them: give one of the two")
    logits = select_logits(outputs, None)
    return FromHidden(*source.read(logits, logits.shape[0] if labels is None else labels.shape[0]))
