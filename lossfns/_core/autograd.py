"""Wrappers around private torch APIs used by the kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def disable_compile(function: _Function) -> _Function:
    """Make torch.compile break its graph once around `function` instead of tracing into the kernel.

    This is torch.compiler.disable without the import of the compiler; torch's optimizers use the same decorator.
    """
    return cast(_Function, torch._disable_dynamo(function))  # type: ignore[attr-defined]


def autocast_off(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off: the kernel chooses its own dtypes."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def without_saved_tensor_hooks() -> AbstractContextManager[Any]:
    """Return a context in which a graph of the kernel's own ignores the user's hooks on saved tensors.

    Activation checkpointing is such a hook: it would run its block again for every chunk that needs a gradient.
    """
    graph = torch.autograd.graph
    try:
        # Raises if there are hooks; without any, hooks that do nothing would only cost a call per saved tensor.
        with graph.disable_saved_tensors_hooks("probe"):
            return nullcontext()
    except RuntimeError:
        return graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def refuse_transforms(logits: Tensor) -> None:
    """Raise RuntimeError under torch.func, vmap and forward mode, which ignore the kernel's own gradient."""
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(logits):
        raise RuntimeError(
            "lossfns computes its own gradient and does not run under torch.func transforms (grad, vmap, jvp); call "
            "loss.backward() or torch.autograd.grad, or write the formula with plain torch operations"
        )
    if torch.autograd.forward_ad.unpack_dual(logits).tangent is not None:  # type: ignore[no-untyped-call]
        raise RuntimeError("lossfns has no forward-mode derivative; use reverse mode (backward)")


def refuse_second_order() -> None:
    """Raise RuntimeError in a backward with create_graph=True, whose second-order term would be missing."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: lossfns has no second derivative. Detach the first gradient, or write the formula with "
            "plain torch operations"
        )


def graph_is_kept() -> bool:
    """Return whether the running backward keeps its graph (retain_graph=True); True if torch does not report it."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def scale_saved_gradient(gradient: Tensor, upstream: Tensor, *, reusable: bool = True) -> Tensor:
    """Return a saved gradient times the upstream gradient, for use inside a backward.

    The product is written in place, unless the graph is kept and the saved gradient is `reusable` by another backward.
    """
    # torch rounds a factor without dimensions to the gradient's dtype; on a CPU a factor with dimensions costs a copy.
    factor = upstream if upstream.is_cpu or not gradient.ndim else upstream.reshape(1)
    if reusable and graph_is_kept():
        return torch.mul(gradient, factor, out=torch.empty_like(gradient))
    # Reading the factor anywhere but on a CPU would wait for the device.
    return gradient if upstream.is_cpu and upstream.item() == 1.0 else gradient.mul_(factor)
