"""Read the last hidden states of a model and its head, so that all its logits never exist together."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .alignment import select_logits
from .autograd import autocast_off
from .checks import check_logits
from .head_products import Head


def classes_of(head: nn.Module, hidden: Tensor) -> int:
    """Return the number of logits of a head, found by calling it with no rows."""
    try:
        with torch.no_grad():
            return int(head(check_logits(hidden).detach().reshape(-1, hidden.shape[-1])[:0]).shape[-1])
    except RuntimeError as error:
        given = f"{hidden.dtype} {tuple(hidden.shape)}"
        raise ValueError(f"the head {head} does not take hidden states {given}: {error}") from error


def logits_like(hidden: Tensor, head: Head) -> Tensor:
    """Return a tensor of the logits' shape, dtype and device that occupies no memory."""
    return hidden.detach()[..., :1].expand(*hidden.shape[:-1], head.classes)


# Nodes of a graph that return their input's values: `clone`, `to`, and DDP when it searches for unused parameters.
_COPIES = {"CloneBackward0", "ToCopyBackward0", "_DDPSinkBackward"}


@dataclass(frozen=True)
class _Forward:
    """The record of one forward of the model.

    Attributes:
        hidden: the last hidden states.
        autocast: dtype of the autocast region that they were computed in, or None.
        logits: the model's own logits of the last position, `(B, V)`.
        node: the node of the graph that produced those logits, or None without a graph.
    """

    hidden: Tensor
    autocast: torch.dtype | None
    logits: Tensor
    node: Any

    def produced(self, logits: Tensor) -> bool:
        """Return whether these are the logits of this forward, or a copy of them by DDP or in another dtype."""
        last = _last(logits)
        if last.shape != self.logits.shape:
            return False
        if last.data_ptr() == self.logits.data_ptr():
            return True
        last_node: Any = logits.grad_fn
        copied = self.node is not None and type(last_node).__name__ in _COPIES
        if copied and any(node is self.node for node, _ in last_node.next_functions):
            return True
        # Otherwise, for example without a graph, compare the values; this waits for the device.
        return torch.allclose(last.to(self.logits.dtype), self.logits, 0.0, 0.0, equal_nan=True)


class HiddenStates:
    """The last hidden states of a model's latest forward, and its head. Built by `hidden_states`.

    Attributes:
        model: the model the hooks are on.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module) -> None:
        self.model = model
        self._length: int | None = None
        self._decoded: tuple[Tensor, torch.dtype | None] | None = None
        self._forward: _Forward | None = None
        self._checked = False
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            decoder.register_forward_hook(self._decoder_done),
            model.register_forward_hook(self._model_done),
        ]

    def remove(self) -> None:
        """Remove the hooks, so that the model returns all its logits again."""
        while self._handles:
            self._handles.pop().remove()
        self._decoded = self._forward = None

    def __enter__(self) -> HiddenStates:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"hidden_states({type(self.model).__name__})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a removed source: a copy or pickle of the model could not remove its hooks."""
        return self.__dict__ | {"_decoded": None, "_forward": None, "_handles": []}

    def _before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._handles:
            return None
        if getattr(model, "_is_replica", False):
            raise RuntimeError(
                "hidden_states does not work under DataParallel, where each replica keeps hidden states. Start one "
                "process per GPU with torchrun, or use the logits"
            )
        if isinstance(kwargs.get("logits_to_keep"), Tensor):
            raise ValueError(
                "the batch selects logits (keep_supervised_logits) and hidden_states replaces them: remove one"
            )
        self._decoded = self._forward = None
        given = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        self._length = None if given is None else given.shape[1]
        return args, {"logits_to_keep": 1, **kwargs}

    def _decoder_done(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._handles:
            return
        hidden = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        device = hidden.device.type
        self._decoded = hidden, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def _model_done(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._decoded is not None:
            hidden, autocast = self._decoded
            # Virtual tokens of prompt tuning come before those that the model was given.
            hidden = hidden if self._length is None else hidden[:, -self._length :]
            logits = select_logits(output, None)
            self._forward = _Forward(hidden, autocast, _last(logits), logits.grad_fn)

    def read(self, logits: Tensor, rows: int) -> tuple[Tensor, Head]:
        """Return the hidden states of the latest forward and the head.

        Args:
            logits: the logits that that forward returned, one position per row.
            rows: number of samples in the batch.

        Raises:
            RuntimeError: the model has not run yet, the logits are those of another forward, or the source was removed.
            ValueError: the head and its config do not give the model's own logits, or the head is sharded.
        """
        if not self._handles:
            raise RuntimeError(
                f"{self!r} was removed, or copied with its model, and no longer keeps hidden states: remove it after "
                "the last evaluation, or give the Trainer a new one"
            )
        latest = self._forward
        if latest is None or latest.hidden.shape[0] != rows or not latest.produced(logits):
            seen = "no forward" if latest is None else "another forward"
            raise RuntimeError(
                f"{self!r} saw {seen}, not the one that produced these outputs of {rows} rows. It must be the "
                "source of the whole model that the Trainer runs. With model_init the Trainer makes new models, and "
                "DataParallel splits the batch among replicas: use the logits there"
            )
        module = self.model.get_output_embeddings()  # type: ignore[operator]
        _refuse_sharded(self.model, module)
        head = replace(head_of(self.model, module, latest.hidden), autocast=latest.autocast)
        if not self._checked:
            _compare(head, latest.hidden, _last(logits))
            self._checked = True
        return latest.hidden, head


def hidden_states(model: nn.Module) -> HiddenStates:
    """Make a causal language model return one position of logits per row, and read its last hidden states instead.

    Hooks on this instance request `logits_to_keep=1` and keep what the decoder returns. Losses and reducers take the
    source as `source=`; the head is then called on the supervised rows only, a few hundred at a time, and the largest
    tensor of the step never exists. The logits that the model still returns are used as a check: in the first batch
    they are compared with those of the head, so that a model with another head is refused, and in every batch with
    the outputs, so that these are never read with the hidden states of another forward.

    The source reads what the decoder returns, not the last of `output_hidden_states`, which lacks a norm for BioGPT in
    some versions. A decoder with a transform before its head (Bert, Roberta) raises on the first batch.

    It raises under DataParallel, with `model_init`, with a sharded head (FSDP, ZeRO-3), and together with
    `keep_supervised_logits`. FSDP2 may keep the head whole: `fully_shard(model, reshard_after_forward=False)`.

    Args:
        model: the model given to the Trainer; PEFT models work too.

    Returns:
        The source; `remove()`, or leaving its `with` block, removes the hooks. A copy of the model is a plain model.

    Raises:
        TypeError: the model's forward has no `logits_to_keep`, or the model names no decoder or head.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=1)
        >>> with hidden_states(LlamaForCausalLM(config)) as source:
        ...     source  # partial(causal_lm_loss, source=source)
        hidden_states(LlamaForCausalLM)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"hidden_states takes a model, got {type(model).__name__}")
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if "logits_to_keep" not in inspect.signature(base.forward).parameters:
        raise TypeError(
            f"the forward of {type(base).__name__} does not take logits_to_keep, so it always computes all its logits; "
            "a newer transformers may have it. Use the logits, with overwrite_logits=True where memory is short"
        )
    decoder: Any = base.get_decoder() if hasattr(base, "get_decoder") else None
    if decoder is base:  # up to transformers 4.57 some models returned themselves
        decoder = base.base_model
    if decoder is None or decoder is base or model.get_output_embeddings() is None:  # type: ignore[operator]
        raise TypeError(f"{type(base).__name__} names no decoder and output embedding to read; use the logits")
    return HiddenStates(model, decoder)


def head_of(model: nn.Module, module: nn.Module, hidden: Tensor) -> Head:
    """Return the head with the scale and soft-cap of the model's config."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    caps = [getattr(text, name, None) for name in ("final_logit_softcapping", "logits_soft_cap")]
    scale = getattr(text, "logit_scale", None) or 1.0
    if getattr(text, "logits_scaling", None):
        scale = scale / text.logits_scaling
    softcap = next((float(cap) for cap in caps if cap), None)
    classes = getattr(module, "out_features", None) or classes_of(module, hidden)
    return Head(module, classes, float(scale), softcap)


def _refuse_sharded(model: nn.Module, module: nn.Module) -> None:
    """Raise ValueError if the head is sharded (FSDP, ZeRO-3, TP), unless FSDP2 keeps it whole until backward.

    A head that is whole now may be resharded by then, if FSDP2 put it into a separate group, whose backward never runs.
    """
    shards = [
        name
        for name, parameter in module.named_parameters()
        if hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id") or not parameter.numel()
    ]
    managed = any(getattr(part, "_is_fsdp_managed_module", False) for part in module.modules())
    if shards or (managed and not _in_the_models_group(model, module)):
        raise ValueError(
            f"the head {type(module).__name__} is sharded (FSDP, ZeRO-3), and reading it outside forward is not "
            "supported. Let FSDP2 keep it whole, with fully_shard(model, reshard_after_forward=False) and no "
            "fully_shard of the head itself, or use the logits"
        )


def _in_the_models_group(model: nn.Module, module: nn.Module) -> bool:
    """Return whether FSDP2 put the module into the group of the whole model, and not into a smaller one."""
    from torch.distributed.fsdp import FSDPModule

    holders = [part for part in model.modules() if isinstance(part, FSDPModule) and module in set(part.modules())]
    return len(holders) == 1 and holders[0] is model


def _last(logits: Tensor) -> Tensor:
    """Return the logits of the last position, `(B, V)`."""
    return logits.detach()[:, -1]


def _compare(head: Head, hidden: Tensor, given: Tensor) -> None:
    """Raise ValueError unless `head(hidden)` equals the model's last logits, as no list of known heads is complete."""
    with torch.no_grad(), autocast_off(hidden.device):
        with head.region(hidden.device):
            z = head.module(hidden[:, -1:].detach())[:, -1]
        expected = head.finish(z.to(torch.promote_types(hidden.dtype, torch.float32), copy=True))
    if given.shape != expected.shape:
        gap = f"in shape, {tuple(expected.shape)} for {tuple(given.shape)}"
    else:
        same_nan = given.isnan() & expected.isnan()  # of rows that are only padding
        difference = float((given.to(expected) - expected).masked_fill(same_nan, 0).abs().max())
        # Rounding differs if the model is compiled; a missing cap or scale makes a far larger difference.
        coarsest = max(torch.finfo(dtype).eps for dtype in (head.autocast or hidden.dtype, given.dtype))
        if difference <= coarsest**0.5 * float(expected.nan_to_num().abs().max()):
            return
        gap = f"by up to {difference:.3g}"
    reason = "is not the only step between the decoder's output and the logits of this model. Use the logits"
    if head.draws():
        reason = "has dropout, so that two calls differ: call trainer.evaluate() once before train(), or set it to 0"
    raise ValueError(
        f"head(hidden_states) differs from the model's own logits {gap}: {type(head.module).__name__} {reason}"
    )
