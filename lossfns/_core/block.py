"""The kernel: compute statistics per row of logits, and the gradient of the logits from their derivatives.

Losses and reducers read these statistics of a row of logits `x` with label `y`, and nothing else:

    log_prob = x[y] - log_normalizer        d/dx = onehot(y) - p
    log_normalizer = log sum exp x          d/dx = p
    mean_logit = mean of x                  d/dx = 1 / V
    entropy = -sum p log p                  d/dx = -p (log p + entropy)
    rank = number of larger logits, plus equal ones with a smaller id
    top_id = id of the largest logit, the smaller id among equal ones; -100 if a logit is NaN
    divergence = distance from a teacher, for rows that have one       d/dx by autograd on a few rows

with p = softmax(x). `entropy` and `mean_logit` leave out logits of -inf; a NaN ranks above every number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .autograd import autocast_off, refuse_second_order, without_saved_tensor_hooks
from .checks import IGNORED
from .rows import (
    LAZY_ZERO_BYTES,
    Rows,
    clear_others,
    compute_dtype,
    lazy_zeros,
    read,
    rows_per_chunk,
    slices_are_faster,
    write,
)
from .signature import STATISTICS

DISCRETE = ("rank", "top_id")
# Evaluation uses chunks of a quarter of the size, because memory matters more there than the number of calls.
FRACTION = 4
# Above this share of scored rows, zero pages for the other rows save less time than they may cost.
MOSTLY_SCORED = 0.75
_FROM_SOFTMAX = frozenset({"log_prob", "log_normalizer", "entropy"})


def check_fields(fields: Sequence[str]) -> None:
    """Raise ValueError unless `fields` are different names of statistics."""
    several = isinstance(fields, Sequence) and not isinstance(fields, str)
    if not several or not {*STATISTICS, *DISCRETE}.issuperset(fields) or len({*fields}) < len(fields):
        known = ", ".join((*STATISTICS, *DISCRETE))
        raise ValueError(f"fields must be a sequence of different names out of {known}; got {fields!r}")


def row_statistics(
    logits: Tensor, rows: Rows, fields: Sequence[str], *, overwrite_logits: bool = False
) -> dict[str, Tensor]:
    """Return the statistics `fields` of the given rows, `(n,)` each, differentiable in two passes.

    With `overwrite_logits` the backward pass writes the gradient over the logits' storage and empties the logits.
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
        values = join(parts, fields, logits)
        ctx.save_for_backward(logits)
        ctx.rows, ctx.fields, ctx.overwrite_logits = rows, fields, overwrite_logits
        ctx.mark_non_differentiable(*(values[name] for name in fields if name in DISCRETE))
        ctx.set_materialize_grads(False)
        return tuple(values.values())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor, None, None, None]:
        refuse_second_order()
        (logits,) = ctx.saved_tensors
        grads = {name: grad for name, grad in zip(ctx.fields, upstream, strict=True) if grad is not None}
        buffer = gradient_buffer(logits, ctx.rows, logits.data if ctx.overwrite_logits else None)
        start = 0
        with autocast_off(logits.device):
            for block in blocks(logits, ctx.rows, buffer):
                here = slice(start, start := start + len(block.rows))
                block.measure(tuple(grads))
                write(buffer, block.rows, block.gradient({name: grad[here] for name, grad in grads.items()}))
        gradient = buffer.view(logits.shape)
        if ctx.overwrite_logits:
            empty(logits)
        return gradient, None, None, None


@torch.no_grad()
def top_ids(logits: Tensor, rows: Rows, k: int) -> Tensor:
    """Return the ids of the `k` largest logits of every row, `(n, k)` int32, as `Block.top_ids` does."""
    found = [block.top_ids(k) for block in blocks(logits, rows)]
    return torch.cat(found) if found else torch.empty(0, k, dtype=torch.int32, device=logits.device)


def join(parts: Sequence[Mapping[str, Tensor]], fields: Sequence[str], like: Tensor) -> dict[str, Tensor]:
    """Concatenate the statistics of all blocks; without a block they are empty tensors of the right dtype."""
    found = {}
    for name in fields:
        if parts:
            found[name] = torch.cat([part[name] for part in parts])
        else:
            dtype = torch.int32 if name in DISCRETE else compute_dtype(like.dtype)
            found[name] = torch.empty(0, dtype=dtype, device=like.device)
    return found


def gradient_buffer(logits: Tensor, rows: Rows, storage: Tensor | None = None) -> Tensor:
    """Return a buffer for the gradient, `(total, V)`: rows that are not scored are 0, the others not yet written."""
    total, scored = logits.shape[:-1].numel(), rows.index.numel()
    shape = (total, logits.shape[-1])
    if storage is None and logits.is_cpu and logits.nbytes >= LAZY_ZERO_BYTES and scored <= MOSTLY_SCORED * total:
        return lazy_zeros(shape, logits.dtype)
    buffer = torch.empty(shape, dtype=logits.dtype, device=logits.device) if storage is None else storage.view(shape)
    return clear_others(buffer, rows)


def check_overwritable(logits: Tensor) -> None:
    """Raise ValueError, with the reason, if a gradient must not be written over the logits' storage."""
    if logits.is_leaf or (logits._base is not None and logits._base.is_leaf):
        reason = "they are a leaf, or a view of one: its values belong to the caller and are not intermediate results"
    elif not logits.is_contiguous() or logits.untyped_storage().nbytes() != logits.numel() * logits.dtype.itemsize:
        reason = "they do not fill their storage alone: other tensors may read the same memory"
    else:
        return
    raise ValueError(f"overwrite_logits=True cannot write over these logits, {reason}. Use overwrite_logits=False")


def empty(logits: Tensor) -> None:
    """Free the storage of logits that were overwritten with their gradient, so that reading them raises an error."""
    nothing = torch.empty(0, dtype=logits.dtype, device=logits.device)
    with torch.no_grad():
        for tensor in (logits, logits._base):
            if tensor is not None:
                tensor.set_(nothing)  # type: ignore[call-overload]


def blocks(logits: Tensor, rows: Rows, gradient: Tensor | None = None) -> Iterator[Block]:
    """Yield the scored rows of logits `(..., V)` in chunks, in the compute dtype, in one buffer that is reused.

    Args:
        logits: read only, unless `gradient` is their storage.
        rows: the scored rows.
        gradient: the buffer that the gradient will be written to, `(total, V)`. If it has the compute dtype, the
            softmax is computed there at once, over the logits themselves if it is their storage.
    """
    width, dtype = logits.shape[-1], compute_dtype(logits.dtype)
    step = rows_per_chunk(width, dtype, logits.device, rows)
    if gradient is None:
        step = max(1, step // FRACTION)
    buffer = torch.empty((step, width), dtype=dtype, device=logits.device)
    for chunk in rows.chunks(step, split_at_gaps=logits.dtype == dtype and slices_are_faster(logits)):
        x = read(logits, chunk, buffer)
        if x.data_ptr() == buffer.data_ptr():
            yield Block(x, x, chunk)
        elif gradient is not None and gradient.dtype == dtype and chunk.run is not None:
            yield Block(x, gradient[chunk.run], chunk)
        else:
            yield Block(x, buffer[: len(chunk)], chunk)


@dataclass(eq=False)
class Block:
    """A few rows of logits in the compute dtype, their statistics, and their gradient.

    Attributes:
        x: logits `(r, V)`.
        p: a buffer of the same shape for the softmax and then the gradient; may be `x` itself.
        rows: the rows, with their targets.
    """

    x: Tensor
    p: Tensor
    rows: Rows

    def measure(self, fields: Sequence[str]) -> dict[str, Tensor]:
        """Return the statistics `fields`, `(r,)` each. Those that read `x` come first: the softmax may overwrite it."""
        found: dict[str, Tensor] = {}
        if "divergence" in fields:
            found["divergence"] = self._compare().detach()
        if "rank" in fields:
            found["rank"] = self._ranks()
        if "top_id" in fields:
            best = self.x.argmax(-1, keepdim=True)
            found["top_id"] = best.masked_fill(self.x.gather(1, best).isnan(), IGNORED)[:, 0].int()
        if "mean_logit" in fields:
            found["mean_logit"] = self._finite_sum / self._finite_count
        if not _FROM_SOFTMAX.isdisjoint(fields):
            highest = self.x.amax(-1)
            at_label = highest
            if "log_prob" in fields:
                assert self.rows.targets is not None, "these rows have no targets"
                self._labels = self.rows.targets[:, None]
                at_label = self.x.gather(1, self._labels)[:, 0]
            # The largest p is at least 1 / V, so that its logarithm is exact to the last bits where others underflow.
            log_highest = torch.softmax(self.x, -1, out=self.p).amax(-1).log()
            if "log_normalizer" in fields:
                found["log_normalizer"] = highest - log_highest
            if "log_prob" in fields:
                found["log_prob"] = (at_label - highest) + log_highest
        if "entropy" in fields:
            # Where p is 0 its logarithm must not be -inf; this is several times faster than torch.special.entr.
            tiny = torch.finfo(self.p.dtype).tiny
            self._surprise = self.p.clamp(min=tiny).log_().mul_(self.p).neg_()  # -p log p
            self._entropy = found["entropy"] = self._surprise.sum(-1)
        return found

    def gradient(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Return the gradient of the logits, `(r, V)`, written over the softmax; `grads` were measured before.

        Args:
            grads: derivative of the loss by each statistic, `(r,)`.
        """
        p, of_p = self.p, None
        if "log_normalizer" in grads:
            of_p = grads["log_normalizer"]
        if "log_prob" in grads:
            of_p = -grads["log_prob"] if of_p is None else of_p - grads["log_prob"]
        if "entropy" in grads:
            of_entropy = grads["entropy"] * self._entropy
            of_p = -of_entropy if of_p is None else of_p - of_entropy
        if of_p is None:
            p.zero_()
        else:
            p.mul_(of_p[:, None])
        if "entropy" in grads:
            p.addcmul_(self._surprise, grads["entropy"][:, None])
        if "mean_logit" in grads:
            even = (grads["mean_logit"] / self._finite_count)[:, None]
            p.add_(even if self._ruled_out is None else even.masked_fill(self._ruled_out, 0))
        if "log_prob" in grads:
            p.scatter_add_(1, self._labels, grads["log_prob"][:, None])
        if "divergence" in grads:
            p.add_(torch.autograd.grad(self._divergence, self._leaf, grads["divergence"])[0])
        return p

    def _compare(self) -> Tensor:
        """Return the distance from the teacher; its graph lives as long as the block and does not save the logits."""
        assert self.rows.comparison is not None, "these rows have no teacher"
        with torch.enable_grad(), without_saved_tensor_hooks():
            self._leaf = self.x.detach().requires_grad_()
            self._divergence = self.rows.comparison(self._leaf, self.rows)
        return self._divergence

    def _ranks(self) -> Tensor:
        few = max(1, rows_per_chunk(self.x.shape[-1], self.x.dtype, self.x.device) // FRACTION)
        starts = range(0, len(self.x), few)
        return torch.cat([_rank(self.x[i : i + few], self.rows.labels[i : i + few, None]) for i in starts])

    def top_ids(self, k: int) -> Tensor:
        """Return the ids of the `k` largest logits, `(r, k)` int32, best first; the smaller id wins a tie.

        All ids of a row with a NaN are -100.
        """
        nan = self.x.isnan()
        x = self.x.masked_fill(nan, torch.inf)  # NaN does not equal anything
        values, ids = x.topk(k)
        if x.is_cpu:
            tied = (values[:, 1:] == values[:, :-1]).any(-1) | ((x == values[:, -1:]).sum(-1) > 1)
            ids[tied] = _smallest_ids(x[tied], values[tied]).long()
        else:
            ids = _smallest_ids(x, values)
        return ids.int().masked_fill(nan.any(-1, keepdim=True), IGNORED)

    @cached_property
    def _ruled_out(self) -> Tensor | None:
        """Where logits are -inf; None where the sum shows, at no cost on a CPU, that none is."""
        if self.x.is_cpu and math.isfinite(self._sum.sum()):
            return None
        return self.x == -torch.inf

    @cached_property
    def _sum(self) -> Tensor:
        return self.x.sum(-1)

    @cached_property
    def _finite_sum(self) -> Tensor:
        return self._sum if self._ruled_out is None else self.x.masked_fill(self._ruled_out, 0).sum(-1)

    @cached_property
    def _finite_count(self) -> Tensor | int:
        width = self.x.shape[-1]
        return width if self._ruled_out is None else width - self._ruled_out.sum(-1)


def _rank(x: Tensor, labels: Tensor) -> Tensor:
    """Return the rank of `labels` `(r, 1)` among the logits `x` `(r, V)`, `(r,)` int32."""
    at_label = x.gather(1, labels)
    buffer = torch.empty_like(x)  # comparisons into the same dtype are several times faster, and exact up to 2 ** 24
    lower = torch.lt(x, at_label, out=buffer).sum(-1)
    equal = torch.eq(x, at_label, out=buffer)
    not_before = equal.sum(-1)
    if not (x.is_cpu and bool((not_before <= 1).all())):
        not_before = equal.masked_fill_(torch.arange(x.shape[-1], device=x.device) < labels, 0).sum(-1)
    return (x.shape[-1] - lower - not_before).int()


def _smallest_ids(x: Tensor, values: Tensor) -> Tensor:
    """Return the ids of the `k` largest values of each row, the smaller id first among equal values.

    torch.topk does not define the order of equal values, so the ids are found again, one after the other.
    """
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
