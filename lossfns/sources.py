"""Where the logits of a loss or reducer come from: a tensor of logits, or hidden states and a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ._head import head_logits, head_statistics, head_term_loss, head_top_ids
from ._products import Head
from ._rows import Rows
from ._term_loss import BoundTerm, bind, term_loss
from .alignment import Selector, align, select_logits
from .hidden import HiddenStates, stand_in
from .normalization import MARKERS, NumItems, check_sequences, check_unit, item_count, sequence_shares, weigh
from .statistics import row_statistics, top_ids
from .terms import Term, sequence_averaged


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


Source = FromLogits | FromHidden


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


def label_loss(
    source: Source,
    ids: Tensor,
    extras: Mapping[str, Tensor],
    num_items_in_batch: NumItems,
    term: Term,
    *,
    shift: int = 0,
    weighted: bool = False,
    sequences: bool = False,
    overwrite_logits: bool = False,
) -> Tensor:
    """What every loss of one class id an item shares: align, bind, measure, divide by items, weights or sequences."""
    check_unit("sequences" if sequences else None, extras)
    marker = MARKERS["sequences"]
    if sequences:
        ids, by_sequence = check_sequences(ids, extras[marker], shift)
    pairs = align(source.like, ids, shift=shift, padded=source.padded)
    own: int | Tensor = len(pairs.rows)
    if sequences:
        shares, own = sequence_shares(pairs.gather(by_sequence, marker), pairs.positions, pairs.shape)
        term, extras = sequence_averaged(term), {**extras, "sequence_share": pairs.scatter(shares)}
    count = item_count(num_items_in_batch, own, source.like.device)
    bound = bind(term, pairs, extras, classes=source.like.shape[-1])
    if weighted:
        count = weigh(count, bound.weights(), len(pairs.rows))
    return source.loss(pairs.rows, bound, count, overwrite_logits=overwrite_logits)
