"""The kernel on hidden states: the head is applied to some hundred rows at a time, all logits never exist together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._autograd import autocast_off, hand_over, refuse_second_order, refuse_transforms
from ._rows import Rows, compute_dtype, read, rows_per_chunk, write
from ._term_loss import BoundTerm, learns
from .normalization import divide
from .statistics import DISCRETE, Block, join

# Bytes of the logits of one chunk: few beside a gradient of the head, and yet enough rows for its products.
CPU_HEAD_BYTES = 75 << 20
DEVICE_HEAD_BYTES = 512 << 20

Slopes = Mapping[str, Tensor]
Handle = Callable[[Block, slice], tuple[dict[str, Tensor], Slopes]]


@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits.

    Attributes:
        module: the output embedding, called as a module, so that adapters and biases stay right.
        classes: number of logits.
        scale: factor of the module's output.
        softcap: bound `c` of `c * tanh(z / c)` applied last, or None.
        autocast: dtype of the autocast region the module runs in, or None.
    """

    module: nn.Module
    classes: int
    scale: float = 1.0
    softcap: float | None = None
    autocast: torch.dtype | None = None

    def region(self, device: torch.device) -> AbstractContextManager[Any]:
        """The autocast state the head ran in during the model's forward."""
        return autocast_off(device) if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)

    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Those that want a gradient."""
        return tuple(parameter for parameter in self.module.parameters() if parameter.requires_grad)

    def finish(self, z: Tensor) -> Tensor:
        """Scale and cap the module's output, in place."""
        if self.scale != 1.0:
            z.mul_(self.scale)
        return z if self.softcap is None else z.div_(self.softcap).tanh_().mul_(self.softcap)

    def chain(self, x: Tensor, gradient: Tensor) -> Tensor:
        """From the gradient of the finished logits `x` to that of the module's output, in place; uses `x` as room."""
        if self.softcap is not None:
            gradient.mul_(x.div_(self.softcap).square_().neg_().add_(1))
        return gradient if self.scale == 1.0 else gradient.mul_(self.scale)


def head_statistics(hidden: Tensor, head: Head, rows: Rows, fields: Sequence[str]) -> dict[str, Tensor]:
    """The statistics `fields` of the given rows of `head(hidden)`, `(n,)` each, differentiable in two passes."""
    refuse_transforms(hidden)
    values = _HeadStatistics.apply(hidden, head, rows, tuple(fields), *head.parameters())  # type: ignore[no-untyped-call]
    return dict(zip(fields, values, strict=True))


def head_term_loss(hidden: Tensor, head: Head, rows: Rows, bound: BoundTerm, count: Tensor) -> Tensor:
    """Sum of a term over the given rows of `head(hidden)`, divided by `count`, in one pass where that is right."""
    refuse_transforms(hidden)
    parameters = head.parameters()
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or bool(parameters))
    if not wants_gradient or torch.float16 in (hidden.dtype, head.autocast) or learns(bound, hidden):
        measured = head_statistics(hidden, head, rows, bound.fields)
        with autocast_off(hidden.device):
            return divide(bound(measured), count)
    loss: Tensor = _HeadTermLoss.apply(hidden, head, rows, bound, count, *parameters)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def head_top_ids(hidden: Tensor, head: Head, rows: Rows, k: int) -> Tensor:
    """Ids of the `k` largest logits of every row, `(n, k)` int32."""
    found = [block.top_ids(k) for _, _, part in _chunks(hidden, head, rows) for block, _ in part]
    return torch.cat(found) if found else torch.empty(0, k, dtype=torch.int32, device=hidden.device)


class _HeadTermLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, rows: Rows, bound: BoundTerm, count: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        values: list[Tensor] = []

        def handle(block: Block, here: slice) -> tuple[dict[str, Tensor], Slopes]:
            value, slopes = bound.slopes(block.measure(bound.fields), here, count)
            values.append(value)
            return {}, slopes

        gradients = _gradients(hidden, head, rows, parameters, handle)
        ctx.save_for_backward(*gradients)
        return divide(join(values, "values", hidden), count)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        hidden, *parameters = (hand_over(gradient, upstream) for gradient in ctx.saved_tensors)
        return hidden, None, None, None, None, *parameters


class _HeadStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, rows: Rows, fields: tuple[str, ...], *parameters: nn.Parameter
    ) -> tuple[Tensor, ...]:
        parts = [block.measure(fields) for _, _, part in _chunks(hidden, head, rows) for block, _ in part]
        values = {name: join([found[name] for found in parts], name, hidden) for name in fields}
        ctx.save_for_backward(hidden, *parameters)
        ctx.head, ctx.rows, ctx.fields = head, rows, fields
        ctx.mark_non_differentiable(*(values[name] for name in fields if name in DISCRETE))
        ctx.set_materialize_grads(False)
        return tuple(values.values())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        hidden, *parameters = ctx.saved_tensors
        slopes = {name: slope for name, slope in zip(ctx.fields, upstream, strict=True) if slope is not None}

        def handle(block: Block, here: slice) -> tuple[dict[str, Tensor], Slopes]:
            return block.measure(tuple(slopes)), {name: slope[here] for name, slope in slopes.items()}

        first, *others = _gradients(hidden, ctx.head, ctx.rows, parameters, handle)
        return first, None, None, None, *others


def _gradients(
    hidden: Tensor, head: Head, rows: Rows, parameters: Sequence[Tensor], handle: Handle
) -> tuple[Tensor, ...]:
    """Gradients of the hidden states and of the head's parameters, whose sums are kept in float32 or better."""
    of_hidden = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    sums: list[Tensor | None] = [None] * len(parameters)
    for chunk, (leaf, z), part in _chunks(hidden, head, rows, recorded=True):
        room = z.detach()
        for block, here in part:
            _, slopes = handle(block, here)
            start = here.start - chunk.start
            room[start : start + len(block.rows)].copy_(head.chain(block.x, block.gradient(slopes)))
        found = torch.autograd.grad(z, [leaf, *parameters], room, allow_unused=True)
        if found[0] is not None:
            write(of_hidden.view(-1, hidden.shape[-1]), chunk.rows, found[0])
        sums = [_add(total, new) for total, new in zip(sums, found[1:], strict=True)]
    return of_hidden, *(
        torch.zeros_like(parameter) if total is None else total.to(parameter.dtype)
        for total, parameter in zip(sums, parameters, strict=True)
    )


def _add(total: Tensor | None, new: Tensor | None) -> Tensor | None:
    if new is None:
        return total
    if total is None:
        return new.to(compute_dtype(new.dtype))
    return total.add_(new)


@dataclass(frozen=True)
class _Chunk:
    rows: Rows
    start: int


def _chunks(
    hidden: Tensor, head: Head, rows: Rows, *, recorded: bool = False
) -> Iterator[tuple[_Chunk, tuple[Tensor, Tensor], Iterator[tuple[Block, slice]]]]:
    """For some hundred rows at a time: their hidden states and raw logits, and blocks of finished logits over them."""
    budget = CPU_HEAD_BYTES if hidden.device.type == "cpu" else DEVICE_HEAD_BYTES
    step = max(1, budget // (head.classes * (head.autocast or hidden.dtype).itemsize))
    dtype = compute_dtype(hidden.dtype)
    height = min(rows_per_chunk(head.classes, dtype, hidden.device), step, max(1, len(rows)))
    buffers = torch.empty((2, height, head.classes), dtype=dtype, device=hidden.device)
    start = 0
    for some in rows.chunks(step):
        room = torch.empty((len(some), hidden.shape[-1]), dtype=hidden.dtype, device=hidden.device)
        leaf = read(hidden.detach(), some, room).requires_grad_(recorded)
        with torch.set_grad_enabled(recorded), head.region(hidden.device):
            z = head.module(leaf)
        yield _Chunk(some, start), (leaf, z), _blocks(z.detach(), head, some, buffers, start)
        start += len(some)


def _blocks(z: Tensor, head: Head, rows: Rows, buffers: Tensor, start: int) -> Iterator[tuple[Block, slice]]:
    """Cache-sized blocks of finished logits, and the place of each among all items."""
    x, p = buffers
    done = 0
    for piece in rows.chunks(len(x)):
        end = done + len(piece)
        finished = head.finish(x[: len(piece)].copy_(z[done:end]))
        yield Block(finished, p[: len(piece)], piece), slice(start + done, start + end)
        done = end
