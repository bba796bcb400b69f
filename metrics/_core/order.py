"""Check by the labels that the samples of an evaluation are in the order of the dataset."""

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from .arguments import numbers
from .evaluation import IGNORED, Array


def digests(labels: Any) -> Array:
    """Return a checksum of the labels of each sample, which padding with -100 does not change.

    Args:
        labels: an array, a tuple of arrays, or the rows of a dataset; dim 0 is the sample.

    Returns:
        int64 (samples,).

    Raises:
        TypeError: if labels are not numbers.
    """
    rows: Iterable[Any] = zip(*labels, strict=True) if isinstance(labels, tuple) else labels
    return np.array([_digest(numbers("the labels of a sample", row, "an array of numbers")) for row in rows], np.int64)


def check_order(differ: Array) -> None:
    """Raise ValueError if the evaluation is in another order than the dataset.

    Args:
        differ: bool (samples,), True where the labels of the evaluation differ from those of the dataset.

    Raises:
        ValueError: if any labels differ.
    """
    wrong = np.flatnonzero(differ)
    if wrong.size:
        raise ValueError(
            f"the labels of {wrong.size} of {len(differ)} samples, the first in row {wrong[0]}, differ from those of "
            "the dataset: a sampler reorders them (group_by_length=True), or these are not the collator's labels"
        )


def _digest(row: Array) -> int:
    return zlib.crc32(row[row != IGNORED].astype(np.float32).tobytes())
