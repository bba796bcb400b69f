"""The kernel: logits and labels in, a few numbers a token out, streamed in chunks.

Everything the losses and reducers know about a row of logits `x` with label `y` is measured here:

    log_prob = x[y] - log_normalizer        d/dx = onehot(y) - p
    log_normalizer = log sum exp x          d/dx = p
    mean_logit = mean of x                  d/dx = 1 / V
    entropy = -sum p log p                  d/dx = -p (log p + entropy)
    rank = larger logits, plus equal ones with a smaller id
    top_id = the largest logit, the smaller id among equals; -100 where one is NaN
    divergence = distance from a teacher, where the rows have one       d/dx by autograd on a few rows

with p = softmax(x). `entropy` and `mean_logit` leave out logits of -inf; a NaN ranks above every number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .autograd import autocast_off, refuse_second_order, unhooked
from .checks import IGNORED
from .rows import (
    UNTOUCHED_BYTES,
    Rows,
    are_wide,
    clear_others,
    compute_dtype,
    read,
    rows_per_chunk,
    untouched_zeros,
    write,
)
from .signature import STATISTICS

DISCRETE = ("rank", "top_id")
# Part of a chunk that is walked, or compared, at a time where memory counts more than calls.
FEW = 4
# Above this share of scored rows, getting the others as memory that is zero already saves less than it may cost.
MOSTLY_SCORED = 0.75
_FROM_SOFTMAX = frozenset({"log_prob", "log_normalizer", "entropy"})


def check_fields(fields: Sequence[str]) -> None:
    """Raise ValueError unless `fields` are names of statistics."""
    several = isinstance(fields, Sequence) and not isinstance(fields, str)
    if not several or not {*STATISTICS, *DISCRETE}.issuperset(fields) or len({*fields}) < len(fields):
        known = ", ".join((*STATISTICS, *DISCRETE))
        raise ValueError(f"fields must be a sequence of different names out of {known}; got {fields!r}")


def row_statistics(
    logits: Tensor, rows: Rows, fields: Sequence[str], *, overwrite_logits: bool = False
) -> dict[str, Tensor]:
    """The statistics `fields` of the given rows, `(n,)` each, differentiable in two passes.

    With `overwrite_logits` the backward pass writes the gradient over the logits' storage and empties them.
    """
    values = _RowStatistics.apply(logits, rows, tuple(fields), overwrite_logits)  # type: ignore[no-untyped-call]
    return dict(zip(fields, values, strict=True))


class _RowStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Rows, fields: tuple[str, ...], overwrite_logits: bool
    ) -> tuple[Tensor, ...]:
        with autocast_off(logits.device):
            parts = [block.measure(fields) for block in blocks(logits, rows)]
        values = {name: join([part[name] for part in parts], name, logits) for name in fields}
        ctx.save_for_backward(logits)
        ctx.rows, ctx.fields, ctx.overwrite_logits = rows, fields, overwrite_logits
        ctx.mark_non_differentiable(*(values[name] for name in fields if name in DISCRETE))
        ctx.set_materialize_grads(False)
        return tuple(values.values())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor, None, None, None]:
        refuse_second_order()
        (logits,) = ctx.saved_tensors
        slopes = {name: slope for name, slope in zip(ctx.fields, upstream, strict=True) if slope is not None}
        room = gradient_room(logits, ctx.rows, logits.data if ctx.overwrite_logits else None)
        start = 0
        with autocast_off(logits.device):
            for block in blocks(logits, ctx.rows, room):
                here = slice(start, start := start + len(block.rows))
                block.measure(tuple(slopes))
                write(room, block.rows, block.gradient({name: slope[here] for name, slope in slopes.items()}))
        gradient = room.view(logits.shape)
        if ctx.overwrite_logits:
            empty(logits)
        return gradient, None, None, None


@torch.no_grad()
def top_ids(logits: Tensor, rows: Rows, k: int) -> Tensor:
    """Ids of the `k` largest logits of every row, `(n, k)` int32, best first, the smaller id first; -100 for NaN."""
    found = [block.top_ids(k) for block in blocks(logits, rows)]
    return torch.cat(found) if found else torch.empty(0, k, dtype=torch.int32, device=logits.device)


def join(parts: Sequence[Tensor], name: str, logits: Tensor) -> Tensor:
    """Concatenate what the blocks measured; no block gives an empty tensor of the right dtype."""
    if parts:
        return torch.cat(list(parts))
    return torch.empty(0, dtype=torch.int32 if name in DISCRETE else compute_dtype(logits.dtype), device=logits.device)


def gradient_room(logits: Tensor, rows: Rows, storage: Tensor | None = None) -> Tensor:
    """Room for the gradient, `(total, V)`: rows that are not scored are 0, the others still to be written."""
    shape = (logits.shape[:-1].numel(), logits.shape[-1])
    if storage is None and logits.is_cpu and logits.nbytes >= UNTOUCHED_BYTES and len(rows) <= MOSTLY_SCORED * shape[0]:
        return untouched_zeros(shape, logits.dtype)
    room = torch.empty(shape, dtype=logits.dtype, device=logits.device) if storage is None else storage.view(shape)
    return clear_others(room, rows)


def check_overwritable(logits: Tensor) -> None:
    """Raise ValueError, with the reason, where a gradient must not be written over the logits' storage."""
    if logits.is_leaf or (logits._base is not None and logits._base.is_leaf):
        reason = "they are a leaf, or a view of one: its values are yours, not a model's intermediate result"
    elif not logits.is_contiguous() or logits.untyped_storage().nbytes() != logits.numel() * logits.dtype.itemsize:
        reason = "they do not fill a storage of their own: others read the same memory"
    else:
        return
    raise ValueError(f"overwrite_logits=True cannot write over these logits, {reason}. Use overwrite_logits=False")


def empty(logits: Tensor) -> None:
    """Take the storage away from logits that hold a gradient now: who reads them later gets an error, not gradients."""
    nothing = torch.empty(0, dtype=logits.dtype, device=logits.device)
    with torch.no_grad():
        for tensor in (logits, logits._base):
            if tensor is not None:
                tensor.set_(nothing)  # type: ignore[call-overload]


def blocks(logits: Tensor, rows: Rows, room: Tensor | None = None) -> Iterator[Block]:
    """The scored rows of logits `(..., V)` in chunks, in the compute dtype, in one buffer that is used again and again.

    Args:
        logits: read only, but for what `room` says.
        rows: the scored rows.
        room: where their gradient will be written, `(total, V)`. Where it has the compute dtype the softmax is taken
            there at once, over the logits themselves if it is their storage.
    """
    width, dtype = logits.shape[-1], compute_dtype(logits.dtype)
    step = rows.per_chunk(width, dtype, logits.device)
    if room is None:  # little is done for each chunk, and memory counts in evaluation
        step = max(1, step // FEW)
    buffer = torch.empty((step, width), dtype=dtype, device=logits.device)
    for chunk in rows.chunks(step, in_runs=logits.dtype == dtype and are_wide(logits)):
        x = read(logits, chunk, buffer)
        if x.data_ptr() == buffer.data_ptr():
            yield Block(x, x, chunk)
        elif room is not None and room.dtype == dtype and chunk.run is not None:
            yield Block(x, room[chunk.run], chunk)
        else:
            yield Block(x, buffer[: len(chunk)], chunk)


class Block:
    """A few rows of logits in the compute dtype, what they measure, and their gradient.

    Args:
        x: logits `(r, V)`.
        p: room of the same shape, for the softmax and then the gradient; may be `x` itself.
        rows: the rows, with their targets.
    """

    def __init__(self, x: Tensor, p: Tensor, rows: Rows) -> None:
        self.x, self.p, self.rows = x, p, rows

    def measure(self, fields: Sequence[str]) -> dict[str, Tensor]:
        """The statistics `fields`, `(r,)` each. What reads the logits comes first: the softmax may overwrite them."""
        found: dict[str, Tensor] = {}
        if "divergence" in fields:
            found["divergence"] = self._compared().detach()
        if "rank" in fields:
            found["rank"] = self._rank()
        if "top_id" in fields:
            best = self.x.argmax(-1, keepdim=True)
            found["top_id"] = best.masked_fill(self.x.gather(1, best).isnan(), IGNORED)[:, 0].int()
        if "mean_logit" in fields:
            found["mean_logit"] = self._finite_sum / self._finite_count
        if _FROM_SOFTMAX & set(fields):
            highest = self.x.amax(-1)
            at_label = self.x.gather(1, self.rows.classes[:, None])[:, 0] if "log_prob" in fields else highest
            # The largest p is at least 1 / V, so its logarithm is exact to the last bits where others underflow.
            log_highest = torch.softmax(self.x, -1, out=self.p).amax(-1).log()
            if "log_normalizer" in fields:
                found["log_normalizer"] = highest - log_highest
            if "log_prob" in fields:
                found["log_prob"] = (at_label - highest) + log_highest
        if "entropy" in fields:
            # Where p is 0 its logarithm must not be -inf; several times faster than torch.special.entr.
            tiny = torch.finfo(self.p.dtype).tiny
            self._surprise = self.p.clamp(min=tiny).log_().mul_(self.p).neg_()
            self._entropy = found["entropy"] = self._surprise.sum(-1)
        return found

    def gradient(self, slopes: Mapping[str, Tensor]) -> Tensor:
        """Gradient of the logits, `(r, V)`, written over the softmax; the fields of `slopes` were measured before.

        Args:
            slopes: derivative of the loss by each statistic, `(r,)`.
        """
        p = self.p
        factors = [slopes[name] for name in ("log_normalizer",) if name in slopes]
        factors += [-slopes[name] for name in ("log_prob",) if name in slopes]
        factors += [-slopes[name] * self._entropy for name in ("entropy",) if name in slopes]
        if factors:
            p.mul_(sum(factors[1:], factors[0])[:, None])
        else:
            p.zero_()
        if "entropy" in slopes:
            p.addcmul_(self._surprise, slopes["entropy"][:, None])
        if "mean_logit" in slopes:
            even = (slopes["mean_logit"] / self._finite_count)[:, None]
            p.add_(even if self._dropped is None else even.masked_fill(self._dropped, 0))
        if "log_prob" in slopes:
            p.scatter_add_(1, self.rows.classes[:, None], slopes["log_prob"][:, None])
        if "divergence" in slopes:
            p.add_(torch.autograd.grad(self._divergence, self._leaf, slopes["divergence"])[0])
        return p

    def _compared(self) -> Tensor:
        """Distance from the teacher, with a graph that lives as long as the block and does not save the logits."""
        assert self.rows.comparison is not None, "these rows have no teacher"
        with torch.enable_grad(), unhooked():
            self._leaf = self.x.detach().requires_grad_()
            self._divergence = self.rows.comparison(self._leaf, self.rows)
        return self._divergence

    def _rank(self) -> Tensor:
        few = max(1, rows_per_chunk(self.x.shape[-1], self.x.dtype, self.x.device) // FEW)
        starts = range(0, len(self.x), few)
        return torch.cat([_rank(self.x[i : i + few], self.rows.classes[i : i + few, None]) for i in starts])

    def top_ids(self, k: int) -> Tensor:
        """Ids of the `k` largest logits, `(r, k)` int32, best first, the smaller id first; -100 where one is NaN."""
        nan = self.x.isnan()
        x = self.x.masked_fill(nan, torch.inf)  # NaN equals nothing
        values, ids = x.topk(k)
        if x.is_cpu:
            tied = (values[:, 1:] == values[:, :-1]).any(-1) | ((x == values[:, -1:]).sum(-1) > 1)
            ids[tied] = _first_ids(x[tied], values[tied]).long()
        else:
            ids = _first_ids(x, values)
        return ids.int().masked_fill(nan.any(-1, keepdim=True), IGNORED)

    @cached_property
    def _dropped(self) -> Tensor | None:
        """Where logits are -inf; None where the sum shows, at no cost on a CPU, that none is."""
        if self.x.is_cpu and math.isfinite(self._sum.sum()):
            return None
        return self.x == -torch.inf

    @cached_property
    def _sum(self) -> Tensor:
        return self.x.sum(-1)

    @cached_property
    def _finite_sum(self) -> Tensor:
        return self._sum if self._dropped is None else self.x.masked_fill(self._dropped, 0).sum(-1)

    @cached_property
    def _finite_count(self) -> Tensor | int:
        width = self.x.shape[-1]
        return width if self._dropped is None else width - self._dropped.sum(-1)


def _rank(x: Tensor, labels: Tensor) -> Tensor:
    """Place of `labels` `(r, 1)` among the logits `x` `(r, V)`, `(r,)` int32."""
    at_label = x.gather(1, labels)
    room = torch.empty_like(x)  # comparisons into the same dtype are several times faster, and exact up to 2 ** 24
    lower = torch.lt(x, at_label, out=room).sum(-1)
    equal = torch.eq(x, at_label, out=room)
    not_before = equal.sum(-1)
    if not (x.is_cpu and bool((not_before <= 1).all())):
        not_before = equal.masked_fill_(torch.arange(x.shape[-1], device=x.device) < labels, 0).sum(-1)
    return (x.shape[-1] - lower - not_before).int()


def _first_ids(x: Tensor, values: Tensor) -> Tensor:
    """Ids of the `k` largest values of each row in order, found again one by one: topk leaves that of equals open."""
    width = x.shape[-1]
    ids = torch.arange(width, dtype=torch.int32, device=x.device)
    found: list[Tensor] = []
    last, last_value = ids.new_full((x.shape[0], 1), -1), None
    for value in values.T[..., None]:
        after = last if last_value is None else torch.where(value == last_value, last, -1)
        last = torch.where((x == value) & (ids > after), ids, width).amin(-1, keepdim=True)
        last_value = value
        found.append(last)
    return torch.cat(found, -1)
