"""The classes of all collator wrappers, and the checks of the batch that the inner collator returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._core.alignment import split_labels
from .._core.checks import describe

Batch = dict[str, Any]
Collator = Callable[[list[Any]], Batch]


@dataclass(frozen=True)
class Wrapper:
    """Base class of all wrappers: it stores the inner collator."""

    collator: Collator

    def __post_init__(self) -> None:
        if not callable(self.collator):
            raise TypeError(
                f"a wrapper takes a data collator, got {type(self.collator).__name__}: pass for example "
                "data_collator=mask_first_label(collator), not data_collator=mask_first_label"
            )


@dataclass(frozen=True)
class Changed(Wrapper):
    """A collator that changes the batch of the inner collator.

    Attributes:
        change: a function of the batch and of the options that returns the new batch.
        options: its options.
    """

    change: Callable[..., Batch]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, features: list[Any]) -> Batch:
        return self.change(collated(self.collator, features), **self.options)


def collated(collator: Collator, features: list[Any]) -> Batch:
    """Return the batch of the inner collator as a new dict.

    Raises:
        TypeError: the collator does not return a dict.
    """
    batch: Any = collator(features)
    if not isinstance(batch, Mapping):
        raise TypeError(f"the collator must return a dict of tensors, got {type(batch).__name__} from {collator!r}")
    return dict(batch)


def batch_labels(batch: Batch, *, dimensions: int | None = 2) -> Tensor:
    """Return the integer labels of a batch, as int64 if their dtype cannot hold -100.

    Args:
        batch: what the inner collator returned.
        dimensions: number of dimensions that the labels must have, 2 for `(B, S)`; None for any number.

    Raises:
        ValueError: the labels are missing, not integers, or have another number of dimensions.
    """
    labels = batch.get("labels")
    fits = isinstance(labels, Tensor) and dimensions in (None, labels.ndim)
    if not isinstance(labels, Tensor) or not fits or labels.is_floating_point() or labels.dtype == torch.bool:
        shape = "" if dimensions is None else " of shape (batch, sequence)"
        raise ValueError(f"the collator must return integer labels{shape}, got {describe(labels)}")
    return split_labels(labels)[0]
