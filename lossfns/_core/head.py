"""The kernel on hidden states: the head is applied to a few hundred rows at a time, never to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .autograd import autocast_off, refuse_second_order, refuse_transforms, scale_saved_gradient
from .block import DISCRETE, Block, join
from .head_products import ROWS_PER_VECTOR, Head, products
from .rows import Rows, compute_dtype, read, rows_per_chunk, write
from .term_loss import BoundTerm, OnePass, is_learnable

# Bytes of the logits of one chunk: small compared with the gradient of the head, but enough rows for its products.
# On a CPU `CPU_HEAD_ROWS` are enough; more rows only if they stay in cache.
CPU_HEAD_BYTES = 80 << 20
CPU_HEAD_ROWS = 256
DEVICE_HEAD_BYTES = 512 << 20


def head_statistics(hidden: Tensor, head: Head, rows: Rows, fields: Sequence[str]) -> dict[str, Tensor]:
    """Return the statistics `fields` of the given rows of `head(hidden)`, `(n,)` each, differentiable in two passes."""
    refuse_transforms(hidden)
    if torch.is_grad_enabled() and head.draws():
        raise ValueError(
            "the head has dropout (LoRA on the output embedding?), and the gradient of this term needs a second pass, "
            "which would draw another mask. Set its dropout to 0, or use a term without learnable parameters and a "
            "dtype other than float16"
        )
    values = _HeadStatistics.apply(hidden, head, rows, tuple(fields), *head.parameters())  # type: ignore[no-untyped-call]
    return dict(zip(fields, values, strict=True))


def head_term_loss(hidden: Tensor, head: Head, rows: Rows, bound: BoundTerm, count: Tensor) -> Tensor:
    """Return the sum of a term over the given rows of `head(hidden)`, divided by `count`; see `term_loss`."""
    refuse_transforms(hidden)
    parameters = head.parameters()
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or bool(parameters))
    if (
        not wants_gradient
        or torch.float16 in (hidden.dtype, head.autocast)
        or (bound.derivative is None and is_learnable(bound, hidden))
    ):
        measured = head_statistics(hidden, head, rows, bound.measured)
        with autocast_off(hidden.device):
            return bound.total(measured, count)
    loss: Tensor = _HeadTermLoss.apply(hidden, head, rows, bound, count, *parameters)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def head_top_ids(hidden: Tensor, head: Head, rows: Rows, k: int) -> Tensor:
    """Return the ids of the `k` largest logits of every row, `(n, k)` int32."""
    found: list[Tensor] = []
    _sweep(hidden, head, rows, lambda block, _: found.append(block.top_ids(k)))
    return torch.cat(found) if found else torch.empty(0, k, dtype=torch.int32, device=hidden.device)


@torch.no_grad()
def head_logits(hidden: Tensor, head: Head, rows: Rows) -> Tensor:
    """Return the finished logits of the given rows, `(n, V)` in the compute dtype: a few hundred rows, not all."""
    with autocast_off(hidden.device):
        work = products(head, hidden, (), of_hidden=False, step=len(rows))
        z = work.logits(read(hidden, rows, hidden.new_empty(len(rows), hidden.shape[-1])))
        return head.finish(z.to(compute_dtype(z.dtype)))


class _HeadTermLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, rows: Rows, bound: BoundTerm, count: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        one_pass = OnePass(bound, count)
        found = _sweep(hidden, head, rows, one_pass.gradient, parameters, of_hidden=ctx.needs_input_grad[0])
        ctx.save_for_backward(*found)
        return one_pass.loss(hidden)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        hidden, *parameters = (
            None if gradient is None else scale_saved_gradient(gradient, upstream) for gradient in ctx.saved_tensors
        )
        return hidden, None, None, None, None, *parameters


class _HeadStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, rows: Rows, fields: tuple[str, ...], *parameters: nn.Parameter
    ) -> tuple[Tensor, ...]:
        parts: list[dict[str, Tensor]] = []
        _sweep(hidden, head, rows, lambda block, _: parts.append(block.measure(fields)))
        values = join(parts, fields, hidden)
        ctx.save_for_backward(hidden, *parameters)
        ctx.head, ctx.rows, ctx.fields, ctx.parameters = head, rows, fields, parameters
        ctx.mark_non_differentiable(*(values[name] for name in fields if name in DISCRETE))
        ctx.set_materialize_grads(False)
        return tuple(values.values())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        hidden, *_ = ctx.saved_tensors  # the parameters too, so that torch raises if they were written to since
        grads = {name: grad for name, grad in zip(ctx.fields, upstream, strict=True) if grad is not None}

        def gradient(block: Block, here: slice) -> Tensor:
            block.measure(tuple(grads))
            return block.gradient({name: grad[here] for name, grad in grads.items()})

        first, *others = _sweep(hidden, ctx.head, ctx.rows, gradient, ctx.parameters, of_hidden=ctx.needs_input_grad[0])
        return first, None, None, None, *others


def _sweep(
    hidden: Tensor,
    head: Head,
    rows: Rows,
    visit: Callable[[Block, slice], Tensor | None],
    parameters: Sequence[Tensor] = (),
    *,
    of_hidden: bool = False,
) -> list[Tensor | None]:
    """Apply the head to a few hundred rows at a time, and visit the finished logits in blocks that stay in cache.

    Args:
        hidden: `(..., H)`.
        head: the head.
        rows: rows of the flattened hidden states.
        visit: called with each block and its slice of the rows; returns the gradient of the block's logits if one is
            needed.
        parameters: parameters of the head that need a gradient.
        of_hidden: whether the hidden states need one.

    Returns:
        The gradient of the hidden states or None, then those of the parameters, accumulated in float32 or better.
    """
    of_all = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if of_hidden else None
    step = _rows_per_product(hidden, head, rows)
    work = products(head, hidden, parameters, of_hidden=of_hidden, step=step)
    start = 0
    with autocast_off(hidden.device):
        for some in rows.chunks(step):
            z = work.logits(read(hidden.detach(), some, hidden.new_empty(len(some), hidden.shape[-1])))
            _visit_blocks(z, head, some, visit, start)
            if of_hidden or parameters:
                of_rows = work.backward(z)
                if of_all is not None and of_rows is not None:
                    write(of_all.view(-1, hidden.shape[-1]), some, of_rows)
            start += len(some)
            del z  # before the next logits are computed
    sums = work.sums
    del work  # frees its logits before the sums are copied
    return [of_all, *(total.to(own.dtype) for total, own in zip(sums, parameters, strict=True))]


def _visit_blocks(
    z: Tensor, head: Head, rows: Rows, visit: Callable[[Block, slice], Tensor | None], start: int
) -> None:
    """Finish the raw logits `z` `(n, V)` block by block, visit each block, and write its gradient over `z`."""
    dtype = compute_dtype(z.dtype)
    height = rows_per_chunk(head.classes, dtype, z.device, rows)
    upcast = None if z.dtype == dtype else z.new_empty(height, head.classes, dtype=dtype)
    softmax = (
        None if head.softcap is None else z.new_empty(height, head.classes, dtype=dtype)
    )  # the derivative of the cap needs both
    done = 0
    for piece in rows.chunks(height):
        end = done + len(piece)
        own = z[done:end]
        x = head.finish(own if upcast is None else upcast[: len(piece)].copy_(own))
        block = Block(x, x if softmax is None else softmax[: len(piece)], piece)
        gradient = visit(block, slice(start + done, start + end))
        if gradient is not None and head.chain(x, gradient).data_ptr() != own.data_ptr():
            own.copy_(gradient)
        done = end


def _rows_per_product(hidden: Tensor, head: Head, rows: Rows) -> int:
    dtype = head.autocast or hidden.dtype
    if hidden.device.type == "cpu":
        enough = max(CPU_HEAD_ROWS, rows_per_chunk(head.classes, dtype, hidden.device))
        most = min(CPU_HEAD_BYTES // (head.classes * dtype.itemsize), enough)
        if most > ROWS_PER_VECTOR:
            most -= most % ROWS_PER_VECTOR
    else:
        most = DEVICE_HEAD_BYTES // (head.classes * dtype.itemsize)
    return max(1, min(most, len(rows)))
