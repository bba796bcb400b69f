"""From a term to a loss: align, bind, measure each chunk, write its gradient while it is in cache, and divide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import Any, Protocol

import torch
from torch import Tensor

from .alignment import Alignment, align
from .autograd import autocast_off, refuse_second_order, scale_saved_gradient, without_saved_tensor_hooks
from .block import Block, blocks, check_overwritable, empty, gradient_buffer, join, row_statistics
from .checks import MARKERS, check_normalize
from .combined import apply_weights, factors, function_name, sequence_averaged, summands
from .normalization import NumItems, divide, item_count, share_of, weighted_count
from .recorder import ACTIVE, Recorder
from .rows import Rows, compute_dtype, write
from .signature import STATISTICS, Derivative, Term, derivative_of, name_of, parameters
from .units import check_sequences, sequence_shares


@dataclass(frozen=True)
class BoundTerm:
    """A term with the labels and extra tensors of a batch.

    Attributes:
        term: the term to minimize.
        fields: statistics that the term asks for.
        given: labels and extras that the term asks for, `(n,)` each.
        measured: statistics to measure: `fields`, and those that the recorder asks for.
        derivative: the closed derivative of the term, or None if autograd has to find it.
        recorder: where to leave statistics for `watch()`, or None.
    """

    term: Term
    fields: tuple[str, ...]
    given: Mapping[str, Tensor]
    measured: tuple[str, ...]
    derivative: Derivative | None = None
    recorder: Recorder | None = None

    def arguments(self, measured: Mapping[str, Tensor], here: slice | None = None) -> dict[str, Tensor]:
        """Return the tensors that the term takes for the labels `here`; None means all of them."""
        found = {}
        for name in self.fields:
            found[name] = measured[name]
        for name, tensor in self.given.items():
            found[name] = tensor if here is None else tensor[here]
        return found

    def __call__(self, measured: Mapping[str, Tensor], here: slice | None = None) -> Tensor:
        """Return the term's values `(n,)` for the labels `here`, in the dtype of the statistics."""
        like = measured[self.fields[0]]
        values = self.term(**self.arguments(measured, here))
        if not isinstance(values, Tensor) or values.shape != like.shape:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(
                f"the term {name_of(self.term)} must be elementwise and return one value per label, without a sum or "
                f"mean; it returned {shape} for {like.numel()} labels"
            )
        return values.to(like.dtype)

    def total(
        self, measured: Mapping[str, Tensor], count: Tensor, probs: Tensor | None = None, values: Tensor | None = None
    ) -> Tensor:
        """Return the sum over all labels, each times its probability if given, divided by `count`.

        Args:
            measured: statistics of all labels, `(n,)` each.
            count: the divisor.
            probs: probability of each label, `(n,)`, or None.
            values: the term's values `(n,)` if they are known already.
        """
        if self.recorder is not None:
            self._record(measured, count, probs, self.recorder)
        values = self(measured) if values is None else values
        return divide(values if probs is None else apply_weights(probs, values), count)

    def weights(self) -> Tensor:
        """Return the weight of each label, `(n,)`: the product of the factors of the term.

        Raises:
            ValueError: the term as a whole is not weighted.
        """
        found = [factor(**{name: self.given[name] for name in parameters(factor)}) for factor in factors(self.term)]
        if not found:
            raise ValueError(
                f"normalize='weights' divides by the weights of the labels, but the term {name_of(self.term)} has "
                "none: make class_weighted(...) or token_weighted(...) the outermost one, or drop normalize"
            )
        return reduce(mul, found)

    def grads(
        self, measured: Mapping[str, Tensor], here: slice, count: Tensor
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the derivative of the loss by each statistic of the labels `here`.

        Returns:
            The values that were computed on the way, or None, and the derivatives, `(r,)` each.
        """
        like = measured[self.fields[0]]
        share = share_of(like, count)
        if self.derivative is not None:
            grads: dict[str, Tensor] = {}
            for name, grad in self.derivative(**self.arguments(measured, here)).items():
                grads[name] = share * grad
            return None, grads
        with torch.enable_grad(), without_saved_tensor_hooks():
            leaves = {name: measured[name].detach().requires_grad_() for name in self.fields}
            values = self(leaves, here)
            if not values.requires_grad:
                return values, {}
            by_leaf = torch.autograd.grad(values, list(leaves.values()), share, allow_unused=True)
        return values.detach(), {name: grad for name, grad in zip(leaves, by_leaf, strict=True) if grad is not None}

    @torch.no_grad()
    def _record(self, measured: Mapping[str, Tensor], count: Tensor, probs: Tensor | None, recorder: Recorder) -> None:
        """Record the statistics of all labels and the parts of the term."""
        if not recorder.measured:  # of several heads the first one predicts the next token
            recorder.measured = {name: measured[name].detach() for name in recorder.fields if name in measured}
        for summand in summands(self.term):
            values = summand(**self.arguments(measured))
            values = values if probs is None else apply_weights(probs, values)
            recorder.parts.append((function_name(summand), divide(values, count)))


class Source(Protocol):
    """Where logits come from: a tensor of them, or hidden states and a head (see `sources`)."""

    @property
    def like(self) -> Tensor:
        """A tensor of the logits' shape, dtype and device; it may occupy no memory."""

    @property
    def padded(self) -> bool:
        """Whether labels may have more columns than the logits if all labels there are ignored."""

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
    normalize: str = "items",
    units: Sequence[str] = ("items",),
    overwrite_logits: bool = False,
) -> Tensor:
    """Return the loss of one class id per label: align, bind, measure, divide by labels, weights or sequences."""
    check_normalize(normalize, units, extras)
    sequences = normalize == "sequences"
    if sequences:
        ids, sequence_ids = check_sequences(ids, extras[MARKERS["sequences"]], shift)
    like = source.like
    aligned = align(like, ids, shift=shift, padded=source.padded)
    local_count = aligned.positions.numel()
    units_of_call: int | Tensor = local_count
    gathered = {}
    if sequences:
        of_label = aligned.gather(sequence_ids, MARKERS["sequences"])
        gathered["sequence_weights"], units_of_call = sequence_shares(of_label, aligned.positions, aligned.shape)
        term = sequence_averaged(term)
    count = item_count(num_items_in_batch, units_of_call, like.device)
    bound = bind(term, aligned, extras, classes=like.shape[-1], gathered=gathered)
    if normalize == "weights":
        count = weighted_count(count, bound.weights(), local_count)
    return source.loss(aligned.rows, bound, count, overwrite_logits=overwrite_logits)


def bind(
    term: Term,
    aligned: Alignment,
    extras: Mapping[str, Tensor],
    *,
    statistics: Sequence[str] = STATISTICS,
    classes: int | None = None,
    gathered: Mapping[str, Tensor] | None = None,
) -> BoundTerm:
    """Find what a term asks for and gather it at the scored labels.

    Args:
        term: the term to minimize.
        aligned: the scored labels.
        extras: the other tensors of a dict of labels.
        statistics: names of what the loss can measure.
        classes: number of classes, if labels are class ids.
        gathered: tensors by name that hold one value per scored label already, `(n,)` each.

    Raises:
        TypeError: the term asks for an unknown name, or for no statistic.
        ValueError: the term holds weights for another number of classes.
    """
    gathered = gathered or {}
    known = statistics if aligned.rows.targets is None else (*statistics, "labels")
    names = parameters(term, {**extras, **gathered}, known)
    wanted = getattr(term, "classes", None)
    if wanted not in (None, classes):
        raise ValueError(f"the term {term!r} holds weights for {wanted} classes, but the logits have {classes}")
    fields, given = [], {}
    for name in names:
        if name in statistics:
            fields.append(name)
        elif name in gathered:
            given[name] = gathered[name]
        elif name in extras:
            given[name] = aligned.gather(extras[name], name)
        else:
            given[name] = aligned.rows.labels
    if not fields:
        raise TypeError(f"the term {name_of(term)} must ask for at least one statistic of {', '.join(statistics)}")
    recorder = ACTIVE.get()
    measured = fields if recorder is None else [*dict.fromkeys((*fields, *recorder.fields))]
    return BoundTerm(term, tuple(fields), given, tuple(measured), derivative_of(term), recorder)


def term_loss(logits: Tensor, rows: Rows, bound: BoundTerm, count: Tensor, *, overwrite_logits: bool = False) -> Tensor:
    """Return the sum of a term over the given rows of logits, divided by `count`: 0-d float32 (float64 for float64).

    One pass over the logits is enough if the derivative of the term can be computed chunk by chunk. Two passes are
    needed for float16 logits, whose gradient divided by the count underflows before a GradScaler multiplies it, and
    for terms with parameters to learn.
    """
    wants_gradient = torch.is_grad_enabled() and logits.requires_grad
    overwrite_logits = overwrite_logits and wants_gradient
    if overwrite_logits:
        check_overwritable(logits)
    if (
        not wants_gradient
        or logits.dtype == torch.float16
        or (bound.derivative is None and is_learnable(bound, logits))
    ):
        measured = row_statistics(logits, rows, bound.measured, overwrite_logits=overwrite_logits)
        with autocast_off(logits.device):
            return bound.total(measured, count)
    loss: Tensor = _TermLoss.apply(  # type: ignore[no-untyped-call]
        logits, rows, bound, count, logits.data if overwrite_logits else None
    )
    if overwrite_logits:
        empty(logits)
    return loss


def is_learnable(bound: BoundTerm, like: Tensor) -> bool:
    """Return whether the term has parameters that need a gradient, found by calling it on two artificial labels."""
    labels = min([2, *map(len, bound.given.values())])
    artificial = torch.full((labels,), -1.0, dtype=compute_dtype(like.dtype), device=like.device)
    with torch.enable_grad():
        return bound(dict.fromkeys(bound.fields, artificial), slice(0, 2)).requires_grad


class _TermLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Rows, bound: BoundTerm, count: Tensor, storage: Tensor | None
    ) -> Tensor:
        one_pass, start = OnePass(bound, count), 0
        buffer = gradient_buffer(logits, rows, storage)  # (B * L, V)
        with autocast_off(logits.device):
            for block in blocks(logits if storage is None else storage, rows, buffer):
                here = slice(start, start := start + block.rows.index.numel())
                write(buffer, block.rows, one_pass.gradient(block, here))
        ctx.save_for_backward(buffer.view(logits.shape))
        ctx.overwritten, ctx.spent = storage is not None, False
        return one_pass.loss(logits)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_second_order()
        if ctx.spent:
            raise RuntimeError(
                "overwrite_logits=True: the first backward has used up the gradient; use overwrite_logits=False where "
                "backward runs more than once"
            )
        (gradient,) = ctx.saved_tensors
        ctx.spent = ctx.overwritten
        return scale_saved_gradient(gradient, upstream, reusable=not ctx.overwritten), None, None, None, None


@dataclass(frozen=True)
class OnePass:
    """Loss and gradient of a term, accumulated chunk by chunk.

    Attributes:
        bound: the term.
        count: what the loss is divided by.
        parts: statistics of each chunk.
        values: the term's values of each chunk; empty if a closed derivative does not need them.
    """

    bound: BoundTerm
    count: Tensor
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def gradient(self, block: Block, here: slice) -> Tensor:
        """Return the gradient of the loss by the logits of the next chunk, the labels `here`: `(r, V)`."""
        measured = block.measure(self.bound.measured)
        values, grads = self.bound.grads(measured, here, self.count)
        self.parts.append(measured)
        if values is not None:
            self.values.append(values)
        return block.gradient(grads)

    @torch.no_grad()
    def loss(self, like: Tensor) -> Tensor:
        """Return the loss of all chunks, 0-d in the compute dtype of the logits or hidden states `like`."""
        with autocast_off(like.device):
            measured = join(self.parts, self.bound.measured, like)
            # Without a closed derivative each chunk has computed its values: a term that draws must draw once.
            return self.bound.total(measured, self.count, values=torch.cat(self.values) if self.values else None)
