"""Whether the samples of an evaluation came in the order of the dataset, told by their labels."""

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from .arguments import numbers
from .classes import IGNORED
from .evaluation import Array


def digests(labels: Any) -> Array:
    """Return a checksum of each sample's labels that padding with -100 does not change.

    Args:
        labels: an array, a tuple of arrays, or the rows of a dataset; dim 0 the sample.

    Returns:
        int64 (samples,).

    Raises:
        TypeError: labels are no numbers.
    """
    rows: Iterable[Any] = zip(*labels, strict=True) if isinstance(labels, tuple) else labels
    return np.array([_digest(numbers("the labels of a sample", row, "an array of numbers")) for row in rows], np.int64)


def check_order(differ: Array) -> None:
    """Refuse an evaluation whose samples are not those of the dataset, one after the other.

    Args:
        differ: bool (samples,), whether the labels that came are other ones than those of the dataset.

    Raises:
        ValueError: some do.
    """
    wrong = np.flatnonzero(differ)
    if wrong.size:
        raise ValueError(
            f"the labels of {wrong.size} of {len(differ)} samples, the first in row {wrong[0]}, are not those of the "
            "dataset in that row: a sampler reorders the evaluation (group_by_length=True does), or the labels given "
            "here are not those that the collator makes"
        )


def _digest(row: Array) -> int:
    return zlib.crc32(row[row != IGNORED].astype(np.float32).tobytes())
