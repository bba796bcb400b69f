"""Pair each label with the logit that predicts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .autograd import refuse_transforms
from .checks import IGNORED, check_ids, check_logits, check_range, check_shift
from .rows import Rows

Outputs = Tensor | Mapping[str, Any] | Sequence[Any]
Labels = Tensor | Mapping[str, Tensor]
Selector = Callable[[Any], Tensor]

_NARROW = (torch.uint8, torch.int8, torch.int16)
_NO_LOGITS = (
    "the model returned no logits. Options that remove them: use_liger_kernel=True (with prediction_loss_only), a "
    "fused linear cross-entropy patch, a loss inside forward; switch them off, or pass source=hidden_states(model)"
)


def split_labels(labels: Labels | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Separate label ids from the extra tensors that travel in a dict of labels.

    Args:
        labels: ids, or `{"labels": ids, name: tensor, ...}`.

    Returns:
        The ids, and the extras by name. Ids narrower than 32 bits are returned as int64: uint8 would turn -100 into
        156, and products with int8 and int16 overflow.

    Raises:
        ValueError: there are no labels.
        TypeError: labels are neither a tensor nor a mapping of tensors.
    """
    if labels is None:
        raise ValueError(
            "labels are None, but a loss needs them: the batch has no key 'labels'. Add it in the data collator "
            "(question answering: lossfns.collators.pack_spans(collator), with label_names=['labels'])"
        )
    extras: dict[str, Tensor] = {}
    if isinstance(labels, Mapping):
        for name, value in labels.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"'{name}' in the dict of labels must be a tensor, got {type(value).__name__}")
        extras = dict(labels)
        if "labels" not in extras:
            raise ValueError(f"a dict of labels must contain the tensor 'labels', got the keys {sorted(extras)}")
        labels = extras.pop("labels")
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor or a dict of tensors, got {type(labels).__name__}")
    return labels.long() if labels.dtype in _NARROW else labels, extras


def scored_places(labels: Tensor, shift: int) -> Tensor:
    """Return a bool mask of the labels' shape `(..., S)`: True where a label counts and a logit predicts it."""
    check_shift(shift, labels)
    scored = labels != IGNORED
    scored[..., :shift] = False
    return scored


def select_logits(outputs: Outputs, labels: Tensor | None, select: Selector | None = None) -> Tensor:
    """Return the logits among the outputs of a model, or among what the Trainer's evaluation loop passes on.

    Args:
        outputs: a ModelOutput or dict (the entry `logits` is taken), a tensor, or a tuple: then the first floating
            tensor whose rank and leading dimension fit the labels; nested tuples and 0-d losses are skipped.
        labels: `(B,)` or `(B, S)`, or None: then the first floating tensor with at least two dimensions is taken.
        select: a function of `outputs` that overrides the choice.

    Returns:
        Logits `(..., V)`, floating.

    Raises:
        ValueError: no entry fits, or the model returned no logits.
        TypeError: the entry is not a floating tensor, for example token ids.
    """
    found: Any
    if select is not None:
        found = select(outputs)
    elif isinstance(outputs, Tensor):
        found = outputs
    elif isinstance(outputs, Mapping):
        found = outputs.get("logits")
        if found is None:
            raise ValueError(f"{_NO_LOGITS}. Keys of the output: {sorted(outputs)}; select= picks another entry")
    else:
        found = _first_fitting(outputs, labels)
    return check_logits(found)


def output_entry(outputs: Any, name: str, fix: str) -> Tensor:
    """Return a tensor among the outputs of a model by its name, or raise ValueError with `fix`."""
    found = outputs.get(name) if isinstance(outputs, Mapping) else None
    if not isinstance(found, Tensor):
        given = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise ValueError(f"expected '{name}' among the outputs of the model, got {given}. {fix}")
    return found


def _first_fitting(outputs: Any, labels: Tensor | None) -> Tensor:
    if not isinstance(outputs, (tuple, list)):
        raise TypeError(
            f"outputs must be a ModelOutput, dict, tuple or tensor, got {type(outputs).__name__}; use select="
        )
    for item in outputs:
        if isinstance(item, Tensor) and item.is_floating_point() and _fits(item, labels):
            return item
    shapes = [tuple(item.shape) if isinstance(item, Tensor) else type(item).__name__ for item in outputs]
    wanted = "two or more dimensions" if labels is None else f"labels of shape {tuple(labels.shape)}"
    raise ValueError(
        f"found no logits among the outputs {shapes}: none is a floating tensor that fits {wanted}. The Trainer's "
        "evaluation drops the first entry of a plain tuple: return a dict, or pick an entry with select="
    )


def _fits(item: Tensor, labels: Tensor | None) -> bool:
    if labels is None:
        return item.ndim >= 2
    return item.ndim == labels.ndim + 1 and item.shape[0] == labels.shape[0]


@dataclass(frozen=True)
class Alignment:
    """The scored labels, and the row of logits that predicts each of them.

    Attributes:
        rows: rows of the flattened logits, with their targets.
        positions: the same labels as positions of the flattened labels, `(n,)` int64 on the logits' device.
        shape: shape of the labels.
    """

    rows: Rows
    positions: Tensor
    shape: torch.Size

    @property
    def samples(self) -> Tensor:
        """The sample that each scored label belongs to, `(n,)` int64."""
        return self.positions.div(max(1, self.shape[1:].numel()), rounding_mode="floor")

    def gather(self, extra: Tensor, name: str) -> Tensor:
        """Return the values of an extra tensor `(B, S)` or `(B,)` at the scored labels, `(n,)`."""
        if extra.shape == self.shape:
            return extra.to(self.positions.device, non_blocking=True).flatten()[self.positions]
        if extra.shape == self.shape[:1]:
            return extra.to(self.positions.device, non_blocking=True)[self.samples]
        raise ValueError(
            f"'{name}' in the dict of labels must have the labels' shape {tuple(self.shape)} or one value per sample, "
            f"({self.shape[0]},), got {tuple(extra.shape)}"
        )

    def scatter(self, values: Tensor, fill: float | bool = 0) -> Tensor:
        """Return values `(n,)` at the places of their labels and `fill` elsewhere, of the labels' shape."""
        out = torch.full((self.shape.numel(),), fill, dtype=values.dtype, device=values.device)
        return out.index_put((self.positions,), values).view(self.shape)


def align(
    logits: Tensor, labels: Tensor, *, shift: int, ignore_index: int = IGNORED, padded: bool = False
) -> Alignment:
    """Pair every label that counts with the row of logits that predicts it.

    The label at position `i` is predicted by the logit at `i - shift`. Logits may be longer than the labels by a
    constant on the left (virtual tokens of prompt tuning): the last `S` of them are used. This is the only place of a
    loss that waits for the device: labels are copied to the host, where the scored rows and the range of the labels
    are found together.

    Args:
        logits: `(B, L, V)` with `L >= S`, or `(B, V)`.
        labels: integer `(B, S)`, or `(B,)`.
        shift: 1 for causal models, 0 where a logit predicts the label at its own position.
        ignore_index: the label that does not count.
        padded: whether labels may have more columns than the logits if all labels there are ignored (padding across
            ranks).

    Raises:
        ValueError: shapes do not fit, logits are shorter than labels, or a label is out of range.
        TypeError: labels are not integers.
        RuntimeError: under torch.func, vmap or forward mode.
    """
    refuse_transforms(logits)
    check_ids(labels)
    check_shift(shift, labels)
    host = labels.detach().cpu().long()
    length = logits.shape[labels.ndim - 1] if 0 < labels.ndim <= logits.ndim else 0
    unpadded = padded and labels.ndim and bool((host[..., length:] == ignore_index).all())
    _check_shapes(logits, labels[..., :length] if unpadded else labels)
    scored = host[..., shift:] != ignore_index  # (..., S - shift)
    flat = scored.reshape(-1, scored.shape[-1]) if scored.numel() else scored.new_zeros(0, 1)
    leading, place = flat.nonzero(as_tuple=True)
    positions = leading * labels.shape[-1] + place + shift
    rows = leading * length + place + max(0, length - labels.shape[-1])
    targets = host.flatten()[positions]
    check_range(targets, logits.shape[-1], ignore_index)
    moved = torch.stack([rows, positions, targets]).to(logits.device, non_blocking=True)
    return Alignment(Rows(rows, moved[0], moved[2]), moved[1], labels.shape)


def _check_shapes(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != labels.ndim + 1 or logits.shape[: labels.ndim - 1] != labels.shape[:-1] or labels.ndim == 0:
        raise ValueError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not fit: expected logits of shape "
            f"(*labels.shape, classes)"
            + ("; were they overwritten by an earlier loss with overwrite_logits=True?" if not logits.numel() else "")
        )
    length, wanted = logits.shape[labels.ndim - 1], labels.shape[-1]
    if length < wanted:
        raise ValueError(
            f"logits cover {length} positions, labels {wanted}: the model was asked for fewer logits (logits_to_keep). "
            "Wrap the collator in keep_supervised_logits(collator), or pass hidden_states(model) as source=. An index "
            "does not survive DataParallel (use torchrun) or dispatch_batches (set it to False in accelerator_config)"
        )
    if length > wanted and labels.ndim != 2:
        raise ValueError(f"logits {tuple(logits.shape)} have more rows than labels {tuple(labels.shape)}")


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Return integer tensors of any shapes on the host, copied in one transfer."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
