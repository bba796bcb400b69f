"""The matrix products of a head: rows to raw logits, and the gradient of these back to rows and parameters.

Three products per row if everything is trained, as in a plain backward pass; frozen parts cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .autograd import without_saved_tensor_hooks
from .rows import compute_dtype, rows_per_chunk

# On a CPU a float32 product of a few rows and the head is up to a third faster transposed, with the head first, if the
# rows fill the processor's vectors; otherwise it is many times slower. The logits of this many classes stay in cache
# until they are transposed back.
ROWS_PER_VECTOR = 16
CLASSES_TRANSPOSED = 1024


@dataclass(frozen=True)
class Head:
    """The map from hidden states to logits.

    Attributes:
        module: the output embedding, called as a module, so that adapters and biases are respected.
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
        """Return the autocast context of the head in the model's forward; enter it where autocast is off."""
        if self.autocast is None:
            return nullcontext()
        # A cast cached without a graph would later cut the weight off from its gradient.
        return torch.autocast(device.type, dtype=self.autocast, cache_enabled=torch.is_grad_enabled())

    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters that need a gradient."""
        return tuple(parameter for parameter in self.module.parameters() if parameter.requires_grad)

    def draws(self) -> bool:
        """Return whether the head has active dropout, so that two calls differ."""
        dropouts = (part for part in self.module.modules() if isinstance(part, nn.modules.dropout._DropoutNd))
        return any(part.training and part.p > 0 for part in dropouts)

    def finish(self, z: Tensor) -> Tensor:
        """Scale and cap the module's output, in place."""
        if self.scale != 1.0:
            z.mul_(self.scale)
        return z if self.softcap is None else z.div_(self.softcap).tanh_().mul_(self.softcap)

    def chain(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Turn the gradient of the finished logits `x` into that of the module's output, in place; overwrites `x`."""
        if self.softcap is not None:
            gradient.mul_(x.div_(self.softcap).square_().neg_().add_(1))
        return gradient if self.scale == 1.0 else gradient.mul_(self.scale)


class ModuleProducts:
    """The products of any module, by autograd.

    Args:
        head: the head.
        hidden: hidden states, whose rows will be passed to `logits`.
        parameters: parameters of the head that need a gradient.
        of_hidden: whether the rows need one.

    Attributes:
        sums: gradients of the parameters so far, float32 or better.
    """

    def __init__(self, head: Head, hidden: Tensor, parameters: Sequence[Tensor], *, of_hidden: bool) -> None:
        self.head, self.parameters, self.of_hidden = head, parameters, of_hidden
        self.sums = _zeros(parameters)
        self._graph: tuple[Tensor, Tensor] | None = None

    def logits(self, rows: Tensor) -> Tensor:
        """Return the raw logits `(n, V)` of rows `(n, H)`; the caller may write their gradient over them."""
        self._graph = None  # frees the last logits before the next ones are computed
        with torch.set_grad_enabled(self.of_hidden or bool(self.parameters)), without_saved_tensor_hooks():
            leaf = rows.detach().requires_grad_(self.of_hidden)
            with self.head.region(rows.device):
                z: Tensor = self.head.module(leaf)
        self._graph = leaf, z
        return z.detach()

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Return the gradient of the latest rows, if needed; those of the parameters are added to `sums`."""
        assert self._graph is not None, "logits must be called before backward"
        leaf, z = self._graph
        found = [*torch.autograd.grad(z, [leaf] * self.of_hidden + [*self.parameters], gradient, allow_unused=True)]
        of_rows = found.pop(0) if self.of_hidden else None
        for total, new in zip(self.sums, found, strict=True):
            if new is not None:
                total.add_(new)
        return of_rows


class LinearProducts:
    """The products of a plain `nn.Linear`, without a graph: one buffer for all logits, weight gradients added in cache.

    bfloat16 products are accumulated in float32, a block of the vocabulary at a time.
    """

    def __init__(self, head: Head, hidden: Tensor, parameters: Sequence[Tensor], *, of_hidden: bool, step: int) -> None:
        module = cast(nn.Linear, head.module)
        dtype = head.autocast or hidden.dtype
        self.of_hidden, self.sums = of_hidden, _zeros(parameters)
        sum_of = {id(parameter): total for parameter, total in zip(parameters, self.sums, strict=True)}
        self._of_weight, self._of_bias = sum_of.get(id(module.weight)), sum_of.get(id(module.bias))
        self._weight = module.weight.detach().to(dtype)
        self._bias = None if module.bias is None else module.bias.detach().to(dtype)
        self._buffer = torch.empty((step, head.classes), dtype=dtype, device=hidden.device)
        self._rows = hidden.new_empty(0)

    def logits(self, rows: Tensor) -> Tensor:
        self._rows, out = rows.to(self._weight.dtype), self._buffer[: len(rows)]
        if _is_faster_transposed(out):
            return self._transposed_logits(out)
        if self._bias is None:
            return torch.mm(self._rows, self._weight.t(), out=out)
        return torch.addmm(self._bias, self._rows, self._weight.t(), out=out)

    def backward(self, gradient: Tensor) -> Tensor | None:
        if self._of_weight is not None:
            self._add_weight_gradient(self._of_weight, gradient)
        if self._of_bias is not None:
            self._of_bias.add_(gradient.sum(0, dtype=self._of_bias.dtype))
        if not self.of_hidden:
            return None
        if _is_faster_transposed(gradient):
            return (self._weight.t() @ gradient.t()).t()
        return gradient @ self._weight

    def _transposed_logits(self, out: Tensor) -> Tensor:
        for start in range(0, out.shape[1], CLASSES_TRANSPOSED):
            some = slice(start, start + CLASSES_TRANSPOSED)
            out[:, some] = (self._weight[some] @ self._rows.t()).t()
        return out if self._bias is None else out.add_(self._bias)

    def _add_weight_gradient(self, total: Tensor, gradient: Tensor) -> None:
        step = rows_per_chunk(total.shape[1], total.dtype, total.device)
        for some, own in zip(torch.split(total, step), torch.split(gradient, step, dim=1), strict=True):
            if own.dtype == some.dtype:
                some.addmm_(own.t(), self._rows)
            else:
                some.add_(own.t() @ self._rows)


def _is_faster_transposed(logits: Tensor) -> bool:
    return logits.is_cpu and logits.dtype == torch.float32 and len(logits) % ROWS_PER_VECTOR == 0


def _zeros(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(parameter, dtype=compute_dtype(parameter.dtype)) for parameter in parameters]


def products(
    head: Head, hidden: Tensor, parameters: Sequence[Tensor], *, of_hidden: bool, step: int
) -> ModuleProducts | LinearProducts:
    """Return the products of `head` for at most `step` rows at a time."""
    if _is_plain(head.module) and not (head.autocast and hidden.dtype == torch.float64):
        return LinearProducts(head, hidden, parameters, of_hidden=of_hidden, step=step)
    return ModuleProducts(head, hidden, parameters, of_hidden=of_hidden)


def _is_plain(module: nn.Module) -> bool:
    """Return whether the module only computes `x @ weight.T + bias`; adapters, quantized weights and hooks do more."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and "forward" not in vars(module)
        and not any(hooks)
    )
