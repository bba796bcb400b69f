"""The kernel: logits and labels in, a few numbers a token out, streamed in chunks.

Everything the losses and reducers know about a row of logits `x` with label `y` is measured here:

    log_prob = x[y] - log_normalizer        d/dx = onehot(y) - p
    log_normalizer = log sum exp x          d/dx = p
    mean_logit = mean of x                  d/dx = 1 / V
    entropy = -sum p log p                  d/dx = -p (log p + entropy)
    rank = larger logits, plus equal ones with a smaller id
    top_id = the largest logit, the smaller id among equals

with p = softmax(x). `entropy` and `mean_logit` leave out logits of -inf; a NaN ranks above every number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ._autograd import autocast_off, refuse_second_order, uncompiled
from ._rows import Rows, compute_dtype, read, rows_per_chunk, write
from .alignment import IGNORED, align, check_logits

DIFFERENTIABLE = ("log_prob", "log_normalizer", "mean_logit", "entropy")
DISCRETE = ("rank", "top_id")
_FROM_SOFTMAX = frozenset({"log_prob", "log_normalizer", "entropy"})


@uncompiled
def token_statistics(
    logits: Tensor,
    labels: Tensor,
    *,
    fields: Sequence[str] = ("log_prob",),
    shift: int = 0,
    ignore_index: int = IGNORED,
) -> dict[str, Tensor]:
    """Measure what is asked for at every label, without a copy of the logits.

    Differentiable: forward keeps nothing but the logits, backward rebuilds the softmax chunk by chunk.

    Args:
        logits: `(B, L, V)` with `L >= S`, or `(N, V)`; any floating dtype.
        labels: integer `(B, S)` or `(N,)`.
        fields: names out of `log_prob` of the label (nats), `log_normalizer`, `mean_logit`, `entropy` (nats), `rank` of
            the label (0 is best), `top_id`.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        ignore_index: label that is not scored.

    Returns:
        One tensor of the labels' shape a field, float32 (float64 for float64 logits; int32 for `rank` and `top_id`), 0
        where nothing is scored, and `valid`, bool.

    Raises:
        ValueError: shapes do not fit, a label is out of range, an unknown field.
        TypeError: labels are not integers, logits are not floating.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
        >>> token_statistics(logits, torch.tensor([0, 1]), fields=("log_prob", "entropy"))["entropy"]
        tensor([0.3653, 0.6931])
    """
    check_fields(fields)
    pairs = align(check_logits(logits), labels, shift=shift, ignore_index=ignore_index)
    measured = row_statistics(logits, pairs.rows, fields)
    scored = torch.ones_like(pairs.positions, dtype=torch.bool)
    return {name: pairs.scatter(values) for name, values in measured.items()} | {"valid": pairs.scatter(scored, False)}


def check_fields(fields: Sequence[str]) -> None:
    """Raise ValueError unless `fields` are names of statistics."""
    if isinstance(fields, str) or not {*DIFFERENTIABLE, *DISCRETE}.issuperset(fields):
        raise ValueError(
            f"fields must be a sequence of names out of {', '.join((*DIFFERENTIABLE, *DISCRETE))}; got {fields!r}"
        )


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
            for block in blocks(logits, ctx.rows):
                here = slice(start, start := start + len(block.rows))
                block.measure(tuple(slopes))
                write(room, block.rows, block.gradient({name: slope[here] for name, slope in slopes.items()}))
        gradient = room.view(logits.shape)
        if ctx.overwrite_logits:
            empty(logits)
        return gradient, None, None, None


@torch.no_grad()
def top_ids(logits: Tensor, rows: Rows, k: int) -> Tensor:
    """Ids of the `k` largest logits of every row, `(n, k)` int32, best first; among equals the smaller id first."""
    found = [block.top_ids(k) for block in blocks(logits, rows)]
    return torch.cat(found) if found else torch.empty(0, k, dtype=torch.int32, device=logits.device)


def join(parts: Sequence[Tensor], name: str, logits: Tensor) -> Tensor:
    """Concatenate what the blocks measured; no block gives an empty tensor of the right dtype."""
    if parts:
        return torch.cat(list(parts))
    return torch.empty(0, dtype=torch.int32 if name in DISCRETE else compute_dtype(logits.dtype), device=logits.device)


def gradient_room(logits: Tensor, rows: Rows, storage: Tensor | None = None) -> Tensor:
    """Room for the gradient, `(total, V)`: rows that are not scored are 0, the others still to be written."""
    room = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device) if storage is None else storage
    flat = room.view(-1, logits.shape[-1])
    return flat.index_fill_(0, rows.others(flat.shape[0]), 0)


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


def blocks(logits: Tensor, rows: Rows) -> Iterator[Block]:
    """The scored rows of logits `(..., V)` in chunks, upcast into one buffer that is used again and again."""
    width, dtype = logits.shape[-1], compute_dtype(logits.dtype)
    step = min(rows_per_chunk(width, dtype, logits.device), max(1, len(rows)))
    x, p = torch.empty((2, step, width), dtype=dtype, device=logits.device)
    for chunk in rows.chunks(step):
        yield Block(read(logits, chunk, x), p[: len(chunk)], chunk)


class Block:
    """A few rows of logits in the compute dtype, what they measure, and their gradient.

    Args:
        x: logits `(r, V)`.
        p: room of the same shape, for the softmax and then the gradient.
        rows: the rows, with their targets.
    """

    def __init__(self, x: Tensor, p: Tensor, rows: Rows) -> None:
        self.x, self.p, self.rows = x, p, rows
        self._surprise: Tensor | None = None  # -p log p

    def measure(self, fields: Sequence[str]) -> dict[str, Tensor]:
        """The statistics `fields`, `(r,)` each."""
        found: dict[str, Tensor] = {}
        if "rank" in fields:
            found["rank"] = self._rank()
        if "top_id" in fields:
            found["top_id"] = self.x.argmax(-1).int()
        if "mean_logit" in fields:
            found["mean_logit"] = self._finite_sum / self._finite_count
        if _FROM_SOFTMAX & set(fields):
            highest = self.x.amax(-1)
            # The largest p is at least 1 / V, so its logarithm is exact to the last bits where others underflow.
            log_highest = torch.softmax(self.x, -1, out=self.p).amax(-1).log()
            if "log_normalizer" in fields:
                found["log_normalizer"] = highest - log_highest
            if "log_prob" in fields:
                found["log_prob"] = (self.x.gather(1, self.rows.classes[:, None])[:, 0] - highest) + log_highest
        if "entropy" in fields:
            self._surprise = torch.special.entr(self.p)
            found["entropy"] = self._surprise.sum(-1)
        return found

    def gradient(self, slopes: Mapping[str, Tensor]) -> Tensor:
        """Gradient of the logits, `(r, V)`, written over the softmax; the fields of `slopes` were measured before.

        Args:
            slopes: derivative of the loss by each statistic, `(r,)`.
        """
        p, terms = self.p, {name: slope[:, None] for name, slope in slopes.items()}
        factor = torch.zeros_like(p[:, :1])
        if "log_normalizer" in terms:
            factor = factor + terms["log_normalizer"]
        if "log_prob" in terms:
            factor = factor - terms["log_prob"]
        if self._surprise is not None and "entropy" in terms:
            factor = factor - terms["entropy"] * self._surprise.sum(-1, keepdim=True)
        p.mul_(factor) if _FROM_SOFTMAX & set(terms) else p.zero_()
        if self._surprise is not None and "entropy" in terms:
            p.addcmul_(self._surprise, terms["entropy"])
        if "mean_logit" in terms:
            even = terms["mean_logit"] / self._finite_count[:, None]
            p.add_(even if self._dropped is None else even.masked_fill(self._dropped, 0))
        if "log_prob" in terms:
            p.scatter_add_(1, self.rows.classes[:, None], terms["log_prob"])
        return p

    def _rank(self) -> Tensor:
        at_label = self.x.gather(1, self.rows.classes[:, None])
        ids = torch.arange(self.x.shape[-1], device=self.x.device)
        below = (self.x < at_label).sum(-1) + ((self.x == at_label) & (ids >= self.rows.classes[:, None])).sum(-1)
        return (self.x.shape[-1] - below).int()

    def top_ids(self, k: int) -> Tensor:
        """Ids of the `k` largest logits, `(r, k)` int32, best first; torch.topk leaves the order of equal ones open."""
        width = self.x.shape[-1]
        ids = torch.arange(width, device=self.x.device)
        x = self.x.masked_fill(self.x.isnan(), torch.inf)  # first, as for argmax; NaN equals nothing
        found: list[Tensor] = []
        last, last_value = ids.new_full((self.x.shape[0], 1), -1), None
        for value in x.topk(k).values.T[..., None]:
            after = last if last_value is None else torch.where(value == last_value, last, -1)
            last = torch.where((x == value) & (ids > after), ids, width).amin(-1, keepdim=True)
            last_value = value
            found.append(last)
        return torch.cat(found, -1).int()

    @cached_property
    def _dropped(self) -> Tensor | None:
        """Where logits are -inf; None where the sum shows, at no cost on a CPU, that none is."""
        if self.x.is_cpu and bool(self._sum.isfinite().all()):
            return None
        return self.x == -torch.inf

    @cached_property
    def _sum(self) -> Tensor:
        return self.x.sum(-1)

    @cached_property
    def _finite_sum(self) -> Tensor:
        return self._sum if self._dropped is None else self.x.masked_fill(self._dropped, 0).sum(-1)

    @cached_property
    def _finite_count(self) -> Tensor:
        width = self.x.shape[-1]
        return torch.full_like(self._sum, width) if self._dropped is None else width - self._dropped.sum(-1)
