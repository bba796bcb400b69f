"""Pair each label with the logit that predicts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .autograd import refuse_transforms
from .checks import IGNORED, check_ids, check_logits, check_range, check_shift, function
from .rows import Rows

Outputs = Tensor | Mapping[str, Any] | Sequence[Any]
Labels = Tensor | Mapping[str, Tensor]
Selector = Callable[[Any], Tensor]
_NO_LOGITS = (
    "the model returned no logits. Options that remove them: use_liger_kernel=True (with prediction_loss_only), a "
    "fused linear cross-entropy patch, a loss inside forward; switch it off, or pass source=hidden_states(model)"
)


def split_labels(labels: Tensor | Mapping[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Separate label ids from the extra tensors that travel in a dict of labels.

    Args:
        labels: ids, or `{"labels": ids, name: tensor, ...}`.

    Returns:
        The ids and the extras by name. Ids narrower than 32 bits come as int64: uint8 would take 156 for -100, and
        products with int8 and int16 overflow.

    Raises:
        ValueError: there are no labels.
        TypeError: labels are neither a tensor nor a mapping of tensors.
    """
    if labels is None:
        raise ValueError(
            "labels are None, but a loss needs them: the batch has no key 'labels'. Add it in the data collator "
            "(question answering: lossfns.collators.pack_spans(collator), with label_names=['labels'])"
        )
    if isinstance(labels, Tensor):
        return widened(labels), {}
    if not isinstance(labels, Mapping):
        raise TypeError(f"labels must be a tensor or a dict of tensors, not {type(labels).__name__}")
    if not isinstance(labels.get("labels"), Tensor):
        raise ValueError(f"a dict of labels needs the tensor 'labels' among its keys; it has {sorted(labels)}")
    for name, value in labels.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"'{name}' in the dict of labels must be a tensor, not {type(value).__name__}")
    return widened(labels["labels"]), {name: value for name, value in labels.items() if name != "labels"}


def widened(ids: Tensor) -> Tensor:
    """Integers narrower than 32 bits as int64, everything else as it is."""
    return ids.long() if ids.dtype in (torch.uint8, torch.int8, torch.int16) else ids


def scored_places(labels: Tensor, shift: int) -> Tensor:
    """Where a logit predicts a label that counts, bool of the labels' shape `(..., S)`; ValueError as for `align`."""
    _check_shiftable(labels, shift)
    scored = labels != IGNORED
    scored[..., :shift] = False
    return scored


def select_logits(
    outputs: Tensor | Mapping[str, Any] | Sequence[Any], labels: Tensor | None, select: Selector | None = None
) -> Tensor:
    """Find the logits in whatever a model, or the Trainer's evaluation loop, hands over.

    Args:
        outputs: a ModelOutput or dict (the entry `logits`), a bare tensor, or a tuple: then the first floating tensor
            whose rank and leading dimension fit the labels; nested tuples and 0-d losses are skipped.
        labels: `(B,)` or `(B, S)`, or None: then the first floating tensor with at least two dimensions.
        select: a function of `outputs` that overrides the choice.

    Returns:
        Logits `(..., V)`, floating.

    Raises:
        ValueError: nothing fits, or the model returned no logits.
        TypeError: what was found is not a floating tensor, for instance token ids; `select` is no function.
    """
    found: Any
    if select is not None:
        found = function(select, "select")(outputs)
    elif isinstance(outputs, Tensor):
        found = outputs
    elif isinstance(outputs, Mapping):
        found = outputs.get("logits")
        if found is None:
            raise ValueError(f"{_NO_LOGITS}. Keys of the output: {sorted(outputs)}; select= names another entry")
    else:
        found = _first_fitting(outputs, labels)
    return check_logits(found)


def _first_fitting(outputs: Any, labels: Tensor | None) -> Tensor:
    if not isinstance(outputs, (tuple, list)):
        raise TypeError(
            f"outputs must be a ModelOutput, a dict, a tuple or a tensor, not {type(outputs).__name__}; "
            "select= takes a function that picks the logits"
        )
    for item in outputs:
        if isinstance(item, Tensor) and item.is_floating_point() and _fits(item, labels):
            return item
    shapes = [tuple(item.shape) if isinstance(item, Tensor) else type(item).__name__ for item in outputs]
    wanted = "two or more dimensions" if labels is None else f"labels of shape {tuple(labels.shape)}"
    raise ValueError(
        f"no logits among the outputs {shapes}: none is a floating tensor that fits {wanted}. A model that returns a "
        "plain tuple loses its first entry in the Trainer's evaluation: return a dict; select= picks an entry by hand"
    )


def _fits(item: Tensor, labels: Tensor | None) -> bool:
    if labels is None:
        return item.ndim >= 2
    return item.ndim == labels.ndim + 1 and item.shape[0] == labels.shape[0]


@dataclass(frozen=True)
class Alignment:
    """The scored labels and the logit row that predicts each.

    Attributes:
        rows: rows of the flattened logits, with their targets.
        positions: the same items as positions of the flattened labels, `(n,)` int64 on the logits' device.
        shape: the labels' shape.
    """

    rows: Rows
    positions: Tensor
    shape: torch.Size

    @property
    def samples(self) -> Tensor:
        """The sample that each item belongs to, `(n,)` int64."""
        return self.positions.div(max(1, self.shape[1:].numel()), rounding_mode="floor")

    def gather(self, extra: Tensor, name: str) -> Tensor:
        """Values of an extra tensor `(B, S)` or `(B,)` at the scored labels, `(n,)`."""
        if extra.shape == self.shape:
            return extra.to(self.positions.device, non_blocking=True).flatten()[self.positions]
        if extra.shape == self.shape[:1]:
            return extra.to(self.positions.device, non_blocking=True)[self.samples]
        raise ValueError(
            f"'{name}' in the dict of labels has shape {tuple(extra.shape)}; expected the labels' shape "
            f"{tuple(self.shape)} or one value a sample, ({self.shape[0]},)"
        )

    def scatter(self, values: Tensor, fill: float | bool = 0) -> Tensor:
        """Per-item values `(n,)` at their labels' places, `fill` elsewhere: the labels' shape. Differentiable."""
        out = torch.full((self.shape.numel(),), fill, dtype=values.dtype, device=values.device)
        return out.index_put((self.positions,), values).view(self.shape)


def align(
    logits: Tensor, labels: Tensor, *, shift: int, ignore_index: int = IGNORED, padded: bool = False
) -> Alignment:
    """Pair every label that counts with the logit row that predicts it.

    The label at position `i` is predicted by the logit at `i - shift`. Logits may be longer than the labels by a
    constant on the left (virtual tokens of prompt tuning): the last `S` of them are used. The one synchronisation of a
    call is here: labels go to the host, where the active rows and the range of the labels are found together.

    Args:
        logits: `(B, L, V)` with `L >= S`, or `(B, V)`.
        labels: integer `(B, S)`, or `(B,)`.
        shift: 1 for causal models, 0 where the logit stands at its own label.
        ignore_index: the label that does not count.
        padded: labels may be longer on the right by ignored ones (padding across ranks).

    Raises:
        ValueError: shapes do not fit, logits are shorter than labels, or a label is out of range.
        TypeError: labels or `ignore_index` are not integers.
        RuntimeError: under torch.func, vmap or forward mode.
    """
    refuse_transforms(logits)
    check_ids(labels)
    check_shift(shift)
    if not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, not {ignore_index!r}")
    host = labels.detach().cpu().long()
    length = logits.shape[labels.ndim - 1] if 0 < labels.ndim <= logits.ndim else 0
    unpadded = padded and labels.ndim and bool((host[..., length:] == ignore_index).all())
    _check_shapes(logits, labels[..., :length] if unpadded else labels, shift)
    extra = max(0, length - labels.shape[-1])
    scored = host[..., shift:] != ignore_index
    lead, place = _lead_and_place(scored)
    positions = lead * labels.shape[-1] + place + shift
    rows = lead * length + place + extra
    targets = host.flatten()[positions]
    check_range(targets, logits.shape[-1], ignore_index)
    moved = torch.stack([rows, positions, targets]).to(logits.device, non_blocking=True)
    return Alignment(Rows(rows, moved[0], moved[2]), moved[1], labels.shape)


def _lead_and_place(scored: Tensor) -> tuple[Tensor, Tensor]:
    """Index over all dimensions but the last, and over the last, of the scored labels."""
    flat = scored.reshape(-1, scored.shape[-1]) if scored.numel() else scored.new_zeros(0, 1)
    lead, place = flat.nonzero(as_tuple=True)
    return lead, place


def _check_shiftable(labels: Tensor, shift: int) -> None:
    if shift and labels.ndim < 2:
        raise ValueError(
            f"shift={shift} needs labels of shape (batch, sequence), got {tuple(labels.shape)}: a shift after "
            "flattening leaks from one row into the next; pass the labels as the collator made them. Labels that are "
            "one a sample have no shift: shift=0"
        )


def _check_shapes(logits: Tensor, labels: Tensor, shift: int) -> None:
    _check_shiftable(labels, shift)
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
            "By the collator? keep_supervised_logits(collator) cuts the labels to match; its index of positions does "
            "not survive DataParallel (start one process a GPU with torchrun) nor dispatch_batches (set "
            "accelerator_config={'dispatch_batches': False}). By hidden_states(model)? Pass it as source="
        )
    if length > wanted and labels.ndim != 2:
        raise ValueError(f"logits {tuple(logits.shape)} have more rows than labels {tuple(labels.shape)}")


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Integer tensors of any shapes on the host, all in one transfer."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
