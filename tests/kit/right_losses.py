"""Right losses that are implemented in other ways than in this project; they must keep every rule."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .broken_losses import IGNORED, divided, scored, up


def rows_one_by_one(outputs, labels, num_items_in_batch=None):
    total, items = outputs.logits[:0].sum(), 0
    for row, targets in zip(up(outputs["logits"]), labels, strict=True):
        total = total + F.cross_entropy(row[:-1], targets[1:], ignore_index=IGNORED, reduction="sum")
        items += int((targets[1:] != IGNORED).sum())
    count = items if num_items_in_batch is None else num_items_in_batch
    return total / max(1.0, float(torch.as_tensor(count).sum()))


def gathered(outputs, labels, num_items_in_batch=None):
    labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    mask = labels != IGNORED
    log_probs = up(outputs[0]).log_softmax(-1)
    found = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return divided(
        torch.where(mask, -found, 0.0), int(mask.sum()) if num_items_in_batch is None else num_items_in_batch
    )


def fused(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(up(logits).flatten(0, 1), labels.flatten(), reduction="sum")
    count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return total / torch.as_tensor(count).sum().clamp(min=1)


def always_float32(outputs, labels, num_items_in_batch=None):
    mask = labels[:, 1:] != IGNORED
    logits, targets = outputs.logits[:, :-1][mask].float(), labels[:, 1:][mask]
    return divided(logits.logsumexp(-1) - logits.gather(1, targets[:, None])[:, 0], num_items_in_batch)


@dataclass(frozen=True)
class Focal:
    """A loss with options, as an object."""

    gamma: float = 2.0

    def __call__(self, outputs, labels, num_items_in_batch=None):
        mask = labels[:, 1:] != IGNORED
        values = F.cross_entropy(up(outputs.logits[:, :-1][mask]), labels[:, 1:][mask], reduction="none")
        return divided(-(torch.expm1(-values) ** self.gamma) * values, num_items_in_batch)


class Module(nn.Module):
    """A loss as a module."""

    def forward(self, outputs, labels, num_items_in_batch=None):
        return fused(outputs, labels, num_items_in_batch)


def masked(outputs, labels, num_items_in_batch=None, *, label_smoothing=0.1):
    logits, targets = scored(up(outputs.logits), labels)
    values = F.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)
    return divided(values, num_items_in_batch)


def hinge(outputs, labels, num_items_in_batch=None):
    logits, labels = scored(up(outputs.logits), labels)
    values = F.multi_margin_loss(logits, labels, reduction="none") if len(labels) else logits.sum(-1)
    return divided(values, num_items_in_batch)


def binary(outputs, labels, num_items_in_batch=None):
    mask = labels != IGNORED
    return divided(F.softplus(up(outputs.logits)[mask] * (1 - 2 * labels[mask])), num_items_in_batch)


def squared(outputs, labels, num_items_in_batch=None):
    mask = labels != IGNORED
    return divided(F.mse_loss(up(outputs.logits)[:, 0][mask], labels[mask], reduction="none"), num_items_in_batch)


def squared_in_float32(outputs, labels, num_items_in_batch=None):
    """The logits in float32 and the labels in float64."""
    known = labels != IGNORED
    return divided((outputs.logits.float().squeeze(-1) - labels)[known].square(), num_items_in_batch)


def hinge_in_float32(outputs, labels, num_items_in_batch=None):
    known = labels != IGNORED
    return divided(F.relu(1 - (2 * labels - 1) * outputs.logits.float())[known], num_items_in_batch)


OTHERS = [
    (loss, {"task": task})
    for task, losses in {
        "causal_lm": [rows_one_by_one, gathered, fused, always_float32, Focal(), Module()],
        "masked_lm": [masked],
        "seq2seq_lm": [masked],
        "token_classification": [masked],
        "classification": [hinge],
        "multi_label": [binary, hinge_in_float32],
        "regression": [squared, squared_in_float32],
    }.items()
    for loss in losses
]
