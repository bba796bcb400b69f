"""From a term to a loss: one pass that writes the gradient while a chunk is in cache, or two where that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import mul
from typing import Any, Protocol

import torch
from torch import Tensor

from .._slopes import Items, Slopes, closed_form
from .alignment import Alignment, align
from .autograd import autocast_off, hand_over, refuse_second_order, refuse_transforms, unhooked
from .block import Block, blocks, check_overwritable, empty, gradient_room, join, row_statistics
from .checks import MARKERS, check_unit
from .combined import factors, of_weight, plain_name, sequence_averaged, summands
from .normalization import NumItems, divide, item_count, share, weigh
from .recorder import Notes, current_notes
from .rows import Rows, compute_dtype, write
from .signature import STATISTICS, Term, name_of, parameters
from .units import check_sequences, sequence_shares


@dataclass(frozen=True)
class BoundTerm:
    """A term with the labels and extra tensors of a batch.

    Attributes:
        term: what is minimised.
        fields: statistics it asks for.
        given: labels and extras it asks for, `(n,)` each.
        notes: what somebody who watches wants to know, or None.
    """

    term: Term
    fields: tuple[str, ...]
    given: Mapping[str, Tensor]
    notes: Notes | None = None

    @property
    def measured(self) -> tuple[str, ...]:
        """The statistics to measure: what the term asks for, and what is watched beside it."""
        return self.fields if self.notes is None else tuple(dict.fromkeys((*self.fields, *self.notes.fields)))

    def __call__(self, measured: Mapping[str, Tensor], here: slice = slice(None)) -> Tensor:
        """Values of the items `here`, of the statistics' length and dtype."""
        like = measured[self.fields[0]]
        values = self.term(
            **{name: measured[name] for name in self.fields},
            **{name: tensor[here] for name, tensor in self.given.items()},
        )
        if not isinstance(values, Tensor) or values.shape != like.shape:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(
                f"the term {name_of(self.term)} returned {shape} for {like.numel()} items; a term is elementwise and "
                "returns one value an item, without a sum or mean"
            )
        return values.to(like.dtype)

    def total(self, measured: Mapping[str, Tensor], count: Tensor, chances: Tensor | None = None) -> Tensor:
        """Sum over all items, each times its chance if it has one, divided by `count`; for losses beside the kernel."""
        self._note_parts(measured, count, chances)
        values = self(measured)
        return divide(values if chances is None else of_weight(chances, values), count)

    def weights(self) -> Tensor:
        """What each item weighs, `(n,)`: the product of the factors of the term.

        Raises:
            ValueError: the term as a whole is not weighted.
        """
        found = [factor(**{name: self.given[name] for name in parameters(factor)}) for factor in factors(self.term)]
        if not found:
            raise ValueError(
                f"normalize='weights' divides by the weights of the items, but the term {name_of(self.term)} has none: "
                "make class_weighted(...) or token_weighted(...) the outermost one, or drop normalize"
            )
        return reduce(mul, found)

    def slopes(
        self, measured: Mapping[str, Tensor], here: slice, count: Tensor
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Derivative of the share that the items `here` have in the loss, by each statistic.

        Returns:
            The values that were computed for it, or None, and the slopes.
        """
        like = measured[self.fields[0]]
        if self._closed_form is not None:
            extras = {name: tensor[here] for name, tensor in self.given.items()}
            part, found = share(like, count), self._closed_form({**measured, **extras})
            return None, {name: part * slope for name, slope in found.items()}
        with torch.enable_grad(), unhooked():
            leaves = {name: measured[name].detach().requires_grad_() for name in self.fields}
            values = self(leaves, here)
            if not values.requires_grad:
                return values, {}
            by_leaf = torch.autograd.grad(values, list(leaves.values()), share(values, count), allow_unused=True)
        return values.detach(), {name: slope for name, slope in zip(leaves, by_leaf, strict=True) if slope is not None}

    @cached_property
    def _closed_form(self) -> Callable[[Items], Slopes] | None:
        return closed_form(self.term)

    @torch.no_grad()
    def note(self, measured: Mapping[str, Tensor], count: Tensor) -> None:
        """Leave what was measured of all items to whoever watches."""
        if self.notes is None:
            return
        if not self.notes.measured:  # of several heads the first one predicts the next token
            self.notes.measured = {name: measured[name].detach() for name in self.notes.fields}
        self._note_parts(measured, count)

    @torch.no_grad()
    def _note_parts(self, measured: Mapping[str, Tensor], count: Tensor, chances: Tensor | None = None) -> None:
        if self.notes is None:
            return
        for summand in summands(self.term):
            values = summand(**{name: measured[name] for name in self.fields}, **self.given)
            values = values if chances is None else of_weight(chances, values)
            self.notes.parts.append((plain_name(summand), divide(values, count)))


@dataclass(frozen=True)
class OnePass:
    """A term's loss and gradient while the chunks go by.

    Attributes:
        bound: the term.
        count: what the loss is divided by.
        parts: what was measured so far, chunk by chunk.
        values: the term's values, chunk by chunk; none where its slopes do not need them.
    """

    bound: BoundTerm
    count: Tensor
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def gradient(self, block: Block, here: slice) -> Tensor:
        """The loss's gradient by the logits of the next chunk, the items `here`: `(r, V)`."""
        measured = block.measure(self.bound.measured)
        values, slopes = self.bound.slopes(measured, here, self.count)
        self.parts.append(measured)
        if values is not None:
            self.values.append(values)
        return block.gradient(slopes)

    @torch.no_grad()
    def loss(self, like: Tensor) -> Tensor:
        """The loss of all chunks, 0-d in the compute dtype of the logits or hidden states `like`."""
        with autocast_off(like.device):
            measured = {name: join([part[name] for part in self.parts], name, like) for name in self.bound.measured}
            self.bound.note(measured, self.count)
            has_values = len(self.values) == len(self.parts)
            values = join(self.values, "values", like) if has_values else self.bound(measured)
            return divide(values, self.count)


def bind(
    term: Term,
    pairs: Alignment,
    extras: Mapping[str, Tensor],
    *,
    statistics: Sequence[str] = STATISTICS,
    classes: int | None = None,
) -> BoundTerm:
    """Find what a term asks for and gather it at the scored labels.

    Args:
        term: what is minimised.
        pairs: the scored labels.
        extras: the other tensors of a dict of labels.
        statistics: what the loss can measure.
        classes: number of classes, where labels are class ids.

    Raises:
        TypeError: the term asks for something unknown, or for no statistic.
        ValueError: it holds weights for another number of classes.
    """
    known = statistics if pairs.rows.targets is None else (*statistics, "labels")
    names = parameters(term, extras, known)
    wanted = getattr(term, "classes", None)
    if wanted not in (None, classes):
        raise ValueError(f"the term {term!r} holds weights for {wanted} classes, the logits have {classes}")
    fields = tuple(name for name in statistics if name in names)
    if not fields:
        raise TypeError(
            f"the term {name_of(term)} asks for no statistic; it needs at least one of {', '.join(statistics)}"
        )
    given = {name: pairs.gather(extras[name], name) for name in names if name in extras}
    if "labels" in names:
        given["labels"] = pairs.rows.classes
    return BoundTerm(term, fields, given, current_notes())


def learns(bound: BoundTerm, like: Tensor) -> bool:
    """Does the term carry parameters of its own that need a gradient? Tried on two made-up items."""
    trial = slice(0, 2)
    items = min([2, *(len(tensor) for tensor in bound.given.values())])
    made_up = torch.full((items,), -1.0, dtype=compute_dtype(like.dtype), device=like.device)
    with torch.enable_grad():
        return bound(dict.fromkeys(bound.fields, made_up), trial).requires_grad


def term_loss(logits: Tensor, rows: Rows, bound: BoundTerm, count: Tensor, *, overwrite_logits: bool = False) -> Tensor:
    """Sum of a term over the given rows of logits, divided by `count`: 0-d, float32 (float64 for float64 logits).

    One pass where the gradient can be taken on each chunk's own few numbers. Two where that would be wrong: float16
    logits, whose gradient divided by the count underflows before a GradScaler multiplies it, and terms with weights of
    their own to learn.
    """
    refuse_transforms(logits)
    wants_gradient = torch.is_grad_enabled() and logits.requires_grad
    overwrite_logits = overwrite_logits and wants_gradient
    if overwrite_logits:
        check_overwritable(logits)
    if not wants_gradient or logits.dtype == torch.float16 or learns(bound, logits):
        measured = row_statistics(logits, rows, bound.measured, overwrite_logits=overwrite_logits)
        with autocast_off(logits.device):
            bound.note(measured, count)
            return divide(bound(measured), count)
    loss: Tensor = _TermLoss.apply(  # type: ignore[no-untyped-call]
        logits, rows, bound, count, logits.data if overwrite_logits else None
    )
    if overwrite_logits:
        empty(logits)
    return loss


class _TermLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Rows, bound: BoundTerm, count: Tensor, storage: Tensor | None
    ) -> Tensor:
        one_pass, start = OnePass(bound, count), 0
        flat = gradient_room(logits, rows, storage)
        with autocast_off(logits.device):
            for block in blocks(logits if storage is None else storage, rows, flat):
                here = slice(start, start := start + len(block.rows))
                write(flat, block.rows, one_pass.gradient(block, here))
        ctx.save_for_backward(flat.view(logits.shape))
        ctx.overwritten, ctx.spent = storage is not None, False
        return one_pass.loss(logits)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_second_order()
        if ctx.spent:
            raise RuntimeError(
                "overwrite_logits=True: the gradient was handed over by the first backward and is gone; use "
                "overwrite_logits=False where backward runs more than once"
            )
        (gradient,) = ctx.saved_tensors
        ctx.spent = ctx.overwritten
        return hand_over(gradient, upstream, again=not ctx.overwritten), None, None, None, None


class Source(Protocol):
    """Where logits come from: a tensor of them, or hidden states and a head (see `sources`)."""

    @property
    def like(self) -> Tensor:
        """A tensor of the logits' shape, dtype and device; it may occupy no memory."""

    @property
    def padded(self) -> bool:
        """Whether labels may be longer on the right by ignored ones."""

    def statistics(self, rows: Rows, fields: Sequence[str]) -> dict[str, Tensor]:
        """Return the statistics `fields` of the given rows, `(n,)` each."""

    def top_ids(self, rows: Rows, k: int) -> Tensor:
        """Return the ids of the `k` largest logits, `(n, k)` int32."""

    def logits(self, rows: Rows) -> Tensor:
        """Return the given rows of logits, `(n, V)`: a few hundred rows, not all."""

    def loss(self, rows: Rows, bound: BoundTerm, count: Tensor, *, overwrite_logits: bool = False) -> Tensor:
        """Return the sum of a term over the given rows, divided by `count`."""


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
