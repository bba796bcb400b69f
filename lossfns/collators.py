"""Wrappers around any data collator that put into the batch what a loss, a reducer or the Trainer's count needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .alignment import IGNORED

Batch = dict[str, Any]
Collator = Callable[[list[Any]], Batch]


@dataclass(frozen=True)
class MaskFirstLabel:
    """See `mask_first_label`."""

    collator: Collator

    def __call__(self, features: list[Any]) -> Batch:
        batch = self.collator(features)
        labels = batch_labels(batch).clone()
        labels[:, 0] = IGNORED
        return {**batch, "labels": labels}


def mask_first_label(collator: Collator) -> MaskFirstLabel:
    """Set the first label of every row to -100, which nothing predicts, so that every count agrees.

    A causal loss scores the labels from the second on, but the Trainer counts the first one too for class names that do
    not contain `ForCausalLM` (GPT2LMHeadModel, OpenAIGPT, CTRL, any wrapper) and, before transformers 5.10, for all.

    Args:
        collator: any data collator that returns integer `labels` `(B, S)`.

    Returns:
        A picklable collator.

    Example:
        >>> import torch
        >>> collate = mask_first_label(lambda features: {"labels": torch.tensor(features)})
        >>> collate([[5, 6], [7, 8]])["labels"]
        tensor([[-100,    6],
                [-100,    8]])
    """
    return MaskFirstLabel(collator)


def batch_labels(batch: Batch) -> Tensor:
    """The integer labels `(B, S)` of a batch, or an error that says what is there instead."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
        given = (
            f"{labels.dtype} of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        )
        raise ValueError(f"the collator must return integer labels of shape (batch, sequence), got {given}")
    return labels
