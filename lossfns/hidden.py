"""Logits that never exist: read a model's last hidden states and its head instead."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ._autograd import uncompiled
from ._head import Head, head_statistics
from .alignment import IGNORED, align, select_logits
from .statistics import check_fields


@uncompiled
def head_token_statistics(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    fields: Sequence[str] = ("log_prob",),
    shift: int = 0,
    ignore_index: int = IGNORED,
    scale: float = 1.0,
    softcap: float | None = None,
) -> dict[str, Tensor]:
    """`token_statistics` of the logits `softcap * tanh(scale * head(hidden) / softcap)`, which never exist together.

    Differentiable in the hidden states and in the head's parameters.

    Args:
        hidden: `(B, L, H)` with `L >= S`, or `(N, H)`; floating.
        head: a module `(n, H) -> (n, V)`, called as a module on some hundred rows at a time.
        labels: integer `(B, S)` or `(N,)`.
        fields: as for `token_statistics`.
        shift: as for `token_statistics`.
        ignore_index: as for `token_statistics`.
        scale: factor of the head's output.
        softcap: bound of the logits, or None.

    Returns:
        As `token_statistics`.

    Raises:
        ValueError, TypeError: as `token_statistics`.

    Example:
        >>> head = nn.Linear(2, 3, bias=False)
        >>> found = head_token_statistics(torch.zeros(1, 2, 2), head, torch.tensor([[-100, 1]]), shift=1)
        >>> found["log_prob"]
        tensor([[ 0.0000, -1.0986]], grad_fn=<ViewBackward0>)
    """
    check_fields(fields)
    opened = Head(head, classes_of(head, hidden), scale, softcap)
    pairs = align(stand_in(hidden, opened), labels, shift=shift, ignore_index=ignore_index)
    measured = head_statistics(hidden, opened, pairs.rows, fields)
    scored = torch.ones_like(pairs.positions, dtype=torch.bool)
    return {name: pairs.scatter(values) for name, values in measured.items()} | {"valid": pairs.scatter(scored, False)}


def classes_of(head: nn.Module, hidden: Tensor) -> int:
    """How many logits a head gives, asked of the head itself with no row at all."""
    with torch.no_grad():
        return int(head(hidden.detach().reshape(-1, hidden.shape[-1])[:0]).shape[-1])


def stand_in(hidden: Tensor, head: Head) -> Tensor:
    """A tensor of the logits' shape, dtype and device that occupies no memory."""
    return hidden.detach()[..., :1].expand(*hidden.shape[:-1], head.classes)


class HiddenStates:
    """The last hidden states of a model's latest forward, and its head. Made by `hidden_states`.

    Attributes:
        model: the model the hooks are on.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._hidden: Tensor | None = None
        self._autocast: torch.dtype | None = None
        self._checked = False
        self._handles = [
            model.register_forward_pre_hook(self._keep_one_logit, with_kwargs=True),
            model.get_decoder().register_forward_hook(self._keep_hidden),  # type: ignore[operator]
        ]

    def remove(self) -> None:
        """Take the hooks off: the model returns all its logits again."""
        for handle in self._handles:
            handle.remove()
        self._hidden = None

    def __enter__(self) -> HiddenStates:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"hidden_states({type(self.model).__name__})"

    def _keep_one_logit(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if getattr(model, "_is_replica", False):
            raise RuntimeError(
                "hidden_states does not work under DataParallel: each replica would keep its own. Start one process "
                "a GPU with torchrun, or use the logits"
            )
        return args, {"logits_to_keep": 1, **kwargs}

    def _keep_hidden(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        device = hidden.device.type
        self._hidden = hidden
        self._autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def read(self, outputs: Any, rows: int) -> tuple[Tensor, Head]:
        """The hidden states of the latest forward and the head.

        Args:
            outputs: what that forward returned: its one logit a row is compared on the first batch.
            rows: samples in the batch.

        Raises:
            RuntimeError: no forward of this model came before, or it was another batch.
            ValueError: the head and its config do not give the model's own logits, or the head is sharded.
        """
        hidden = self._hidden
        if hidden is None or hidden.shape[0] != rows:
            seen = "no forward" if hidden is None else f"a forward of {hidden.shape[0]} rows"
            raise RuntimeError(
                f"hidden_states saw {seen} of its model, but the labels have {rows} rows. Is it the model that the "
                "Trainer runs? With model_init the Trainer makes new ones: use the logits there"
            )
        module = self.model.get_output_embeddings()  # type: ignore[operator]
        _refuse_sharded(module)
        head = replace(head_of(self.model, module, hidden), autocast=self._autocast)
        if not self._checked:
            self._checked = _compare(head, hidden, select_logits(outputs, None))
        return hidden, head

    def release(self) -> None:
        """Let go of the hidden states: in training the loss is their only reader."""
        self._hidden = None


def hidden_states(model: nn.Module) -> HiddenStates:
    """Let a causal language model return one logit a row, and read its last hidden states instead.

    Two hooks on this instance: one asks for `logits_to_keep=1`, one keeps what the decoder returns. Losses and reducers
    take it as `source=`; the head is then called on the supervised rows alone, some hundred at a time, and the largest
    tensor of the step never exists.

    Args:
        model: the model given to the Trainer, PEFT models included.

    Returns:
        The source; `remove()`, or leaving its `with` block, takes the hooks off.

    Raises:
        TypeError: the model's forward has no `logits_to_keep`, or it has no decoder or head to ask for.

    Example:
        >>> from functools import partial
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=1)
        >>> source = hidden_states(LlamaForCausalLM(config))
        >>> source
        hidden_states(LlamaForCausalLM)
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if "logits_to_keep" not in inspect.signature(base.forward).parameters:
        raise TypeError(
            f"the forward of {type(base).__name__} does not take logits_to_keep, so it always makes all its logits; a "
            "newer transformers may have it. Use the logits, with overwrite_logits=True where memory is short"
        )
    for method in ("get_decoder", "get_output_embeddings"):
        if not hasattr(model, method) or getattr(model, method)() is None:
            raise TypeError(f"{type(base).__name__}.{method}() gives nothing to read; use the logits")
    return HiddenStates(model)


def head_of(model: nn.Module, module: nn.Module, hidden: Tensor) -> Head:
    """The head with the scale and soft-cap that the model's config states."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    first = {name: getattr(text, name, None) for name in ("final_logit_softcapping", "logits_soft_cap")}
    scale = getattr(text, "logit_scale", None) or 1.0
    if getattr(text, "logits_scaling", None):
        scale = scale / text.logits_scaling
    softcap = next((float(value) for value in first.values() if value), None)
    classes = getattr(module, "out_features", None) or classes_of(module, hidden)
    return Head(module, classes, float(scale), softcap)


def _refuse_sharded(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id") or not parameter.numel():
            raise ValueError(
                f"the head's parameter '{name}' is sharded (FSDP, ZeRO-3), and reading it outside forward is not shown "
                "to be right. Leave the head out of the sharding, or use the logits"
            )


def _compare(head: Head, hidden: Tensor, logits: Tensor) -> bool:
    """Hold `head(hidden[:, -1])` against the model's own last logits: no table of heads can be complete.

    Returns:
        Whether they could be compared: not while dropout is active in the head.
    """
    if any(isinstance(part, nn.Dropout) and part.training and part.p for part in head.module.modules()):
        return False
    with torch.no_grad(), head.region(hidden.device):
        expected = head.finish(head.module(hidden[:, -1].detach()).to(torch.promote_types(hidden.dtype, torch.float32)))
    given = logits[:, -1].detach().to(expected)
    precision = torch.finfo(head.autocast or hidden.dtype).eps
    if given.shape != expected.shape or not torch.allclose(given, expected, rtol=16 * precision, atol=64 * precision):
        gap = f"by up to {float((given - expected).abs().max()):.3g}" if given.shape == expected.shape else "in shape"
        raise ValueError(
            f"head(hidden_states) differs from the model's own logits {gap}: {type(head.module).__name__} is not all "
            "that stands between the decoder's output and the logits of this model. Use the logits"
        )
    return True
