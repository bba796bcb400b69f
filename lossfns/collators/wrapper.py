"""What every wrapper around a collator asks of the batch it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.alignment import split_labels
from .._core.checks import describe

Batch = dict[str, Any]
Collator = Callable[[list[Any]], Batch]


@dataclass(frozen=True)
class Wrapper:
    """What every wrapper has: the collator inside."""

    collator: Collator

    def __post_init__(self) -> None:
        if not callable(self.collator):
            raise TypeError(
                f"a wrapper takes a data collator, not a {type(self.collator).__name__}: data_collator="
                "mask_first_label(collator), as an example, and not data_collator=mask_first_label"
            )


def collated(collator: Collator, features: list[Any]) -> Batch:
    """The batch that the collator inside a wrapper makes, as a dict of its own.

    Raises:
        TypeError: it returns no dict.
    """
    batch: Any = collator(features)
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"the collator must return a dict of tensors, with the inputs of the model and 'labels'; {collator!r} "
            f"returned a {type(batch).__name__}"
        )
    return dict(batch)


def batch_labels(batch: Batch, *, dimensions: int | None = 2) -> Tensor:
    """The integer labels of a batch, `(B, S)` unless told otherwise, or an error that says what is there instead.

    Narrow ones come as int64, which can hold -100.
    """
    labels = batch.get("labels")
    fits = isinstance(labels, Tensor) and dimensions in (None, labels.ndim)
    if not isinstance(labels, Tensor) or not fits or labels.is_floating_point() or labels.dtype == torch.bool:
        shape = "" if dimensions is None else " of shape (batch, sequence)"
        raise ValueError(f"the collator must return integer labels{shape}, got {describe(labels)}")
    return split_labels(labels)[0]
