"""The products of a head with the vocabulary: rows to raw logits, and their gradient back to rows and parameters.

Three a row where everything is trained, as in a plain backward pass; what is frozen costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .autograd import unhooked
from .rows import compute_dtype, rows_per_chunk

# On a CPU a float32 product of some rows and the head is up to a third faster transposed, the head first, where the
# rows fill the processor's vectors; else it is many times slower. Logits of so many classes stay in cache until they
# are transposed back.
ROWS_OF_A_VECTOR = 16
CLASSES_TRANSPOSED = 1024


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
        """The autocast state the head ran in during the model's forward, to be entered where autocast is off."""
        if self.autocast is None:
            return nullcontext()
        # A cast remembered without a graph would later cut the weight off from its gradient.
        return torch.autocast(device.type, dtype=self.autocast, cache_enabled=torch.is_grad_enabled())

    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Those that want a gradient."""
        return tuple(parameter for parameter in self.module.parameters() if parameter.requires_grad)

    def draws(self) -> bool:
        """Is there dropout in the head, so that no two calls agree?"""
        dropouts = (part for part in self.module.modules() if isinstance(part, nn.modules.dropout._DropoutNd))
        return any(part.training and part.p > 0 for part in dropouts)

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


class ModuleProducts:
    """Those of any module, by autograd.

    Args:
        head: the head.
        hidden: hidden states, of which rows will come.
        parameters: parameters of the head that want a gradient.
        of_hidden: do the rows want one?

    Attributes:
        sums: gradients of the parameters so far, float32 or better.
    """

    def __init__(self, head: Head, hidden: Tensor, parameters: Sequence[Tensor], *, of_hidden: bool) -> None:
        self.head, self.parameters, self.of_hidden = head, parameters, of_hidden
        self.sums = _zeros(parameters)
        self._graph: tuple[Tensor, Tensor] | None = None

    def logits(self, rows: Tensor) -> Tensor:
        """Raw logits `(n, V)` of rows `(n, H)`; the caller may write their gradient over them."""
        self._graph = None  # before the next logits are made
        with torch.set_grad_enabled(self.of_hidden or bool(self.parameters)), unhooked():
            leaf = rows.detach().requires_grad_(self.of_hidden)
            with self.head.region(rows.device):
                z: Tensor = self.head.module(leaf)
        self._graph = leaf, z
        return z.detach()

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Gradient of the latest rows, if wanted; those of the parameters are added to `sums`."""
        assert self._graph is not None, "backward comes after logits"
        leaf, z = self._graph
        found = [*torch.autograd.grad(z, [leaf] * self.of_hidden + [*self.parameters], gradient, allow_unused=True)]
        of_rows = found.pop(0) if self.of_hidden else None
        for total, new in zip(self.sums, found, strict=True):
            if new is not None:
                total.add_(new)
        return of_rows


class LinearProducts:
    """Those of a plain `nn.Linear`, without a graph: one room for all logits, weight gradients added up in the cache.

    bfloat16 products are added up in float32, a block of the vocabulary at a time.
    """

    def __init__(self, head: Head, hidden: Tensor, parameters: Sequence[Tensor], *, of_hidden: bool, step: int) -> None:
        module = cast(nn.Linear, head.module)
        dtype = head.autocast or hidden.dtype
        self.of_hidden, self.sums = of_hidden, _zeros(parameters)
        sum_of = {id(parameter): total for parameter, total in zip(parameters, self.sums, strict=True)}
        self._of_weight, self._of_bias = sum_of.get(id(module.weight)), sum_of.get(id(module.bias))
        self._weight = module.weight.detach().to(dtype)
        self._bias = None if module.bias is None else module.bias.detach().to(dtype)
        self._room = torch.empty((step, head.classes), dtype=dtype, device=hidden.device)
        self._rows = hidden.new_empty(0)

    def logits(self, rows: Tensor) -> Tensor:
        self._rows, room = rows.to(self._weight.dtype), self._room[: len(rows)]
        if _is_faster_transposed(room):
            return self._transposed_logits(room)
        if self._bias is None:
            return torch.mm(self._rows, self._weight.t(), out=room)
        return torch.addmm(self._bias, self._rows, self._weight.t(), out=room)

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

    def _transposed_logits(self, room: Tensor) -> Tensor:
        for start in range(0, room.shape[1], CLASSES_TRANSPOSED):
            some = slice(start, start + CLASSES_TRANSPOSED)
            room[:, some] = (self._weight[some] @ self._rows.t()).t()
        return room if self._bias is None else room.add_(self._bias)

    def _add_weight_gradient(self, total: Tensor, gradient: Tensor) -> None:
        step = rows_per_chunk(total.shape[1], total.dtype, total.device)
        for some, own in zip(torch.split(total, step), torch.split(gradient, step, dim=1), strict=True):
            if own.dtype == some.dtype:
                some.addmm_(own.t(), self._rows)
            else:
                some.add_(own.t() @ self._rows)


def _is_faster_transposed(logits: Tensor) -> bool:
    return logits.is_cpu and logits.dtype == torch.float32 and len(logits) % ROWS_OF_A_VECTOR == 0


def _zeros(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(parameter, dtype=compute_dtype(parameter.dtype)) for parameter in parameters]


def products(
    head: Head, hidden: Tensor, parameters: Sequence[Tensor], *, of_hidden: bool, step: int
) -> ModuleProducts | LinearProducts:
    """The products of `head`, which will be asked for at most `step` rows at a time."""
    if _is_plain(head.module) and not (head.autocast and hidden.dtype == torch.float64):
        return LinearProducts(head, hidden, parameters, of_hidden=of_hidden, step=step)
    return ModuleProducts(head, hidden, parameters, of_hidden=of_hidden)


def _is_plain(module: nn.Module) -> bool:
    """Does calling this module do nothing but `x @ weight.T + bias`? Adapters, quantised weights and hooks do more."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and "forward" not in vars(module)
        and not any(hooks)
    )
