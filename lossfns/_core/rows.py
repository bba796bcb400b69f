"""Walks the scored rows of a logits tensor in chunks that stay in cache: gather, upcast, write back."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from itertools import pairwise

import torch
from torch import Tensor

# Bytes of the working buffer. On a CPU it has to stay in the cache (16 rows of 151,936 float32 ran several times faster
# than 64); elsewhere it has to be large enough to fill the device.
CPU_CHUNK_BYTES = 14 << 20
DEVICE_CHUNK_BYTES = 128 << 20
# A chunk is split at most so often, for runs of rows that then need no gather.
RUNS_A_CHUNK = 4
# A comparison has about a dozen tensors of a chunk's size in hand at a time.
COMPARED = 12
# From here on glibc maps a block anew whatever was freed before; a smaller one it may have to clear.
UNTOUCHED_BYTES = 32 << 20


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype statistics of `dtype` logits are computed in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_per_chunk(width: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many rows of `width` values fit a working buffer of `dtype` on `device`, at least one."""
    budget = CPU_CHUNK_BYTES if device.type == "cpu" else DEVICE_CHUNK_BYTES
    return max(1, budget // max(1, width * dtype.itemsize))


@dataclass(frozen=True)
class Rows:
    """The scored rows of logits `(..., V)`, in order.

    `index` (host) and `on_device` hold the same row numbers of the flattened logits, `(n,)` int64; `targets` the
    class each row is scored against (on the device), or None where only the logits are described; `comparison` says how
    far logits `(r, V)` of some of the rows are from those of a teacher, `(r,)`, or None where there is no teacher.
    """

    index: Tensor
    on_device: Tensor
    targets: Tensor | None
    comparison: Callable[[Tensor, Rows], Tensor] | None = None

    def __len__(self) -> int:
        return self.index.numel()

    @property
    def classes(self) -> Tensor:
        """The targets, where the caller knows that there are any."""
        assert self.targets is not None, "these rows have no targets"
        return self.targets

    def chunks(self, step: int, *, in_runs: bool = False) -> Iterator[Rows]:
        """Consecutive pieces of at most `step` rows, `in_runs` split at gaps where they are not too short for it."""
        bounds = [*_starts(self.index), len(self)] if in_runs and len(self) else [len(self)]
        start = 0
        while start < len(self):
            next_run = bisect_left(bounds, min(start + max(step // RUNS_A_CHUNK, 1), len(self)))
            end = min(start + step, bounds[next_run])
            piece = slice(start, end)
            targets = None if self.targets is None else self.targets[piece]
            yield replace(self, index=self.index[piece], on_device=self.on_device[piece], targets=targets)
            start = end

    def per_chunk(self, width: int, dtype: torch.dtype, device: torch.device) -> int:
        """How many of these rows are walked at a time, in chunks of `dtype` on `device`, at least one."""
        step = rows_per_chunk(width if self.comparison is None else COMPARED * width, dtype, device)
        return min(step, max(1, len(self)))

    @cached_property
    def run(self) -> slice | None:
        """The rows as one slice when they follow each other without a gap: then nothing needs to be gathered."""
        first, last = int(self.index[0]), int(self.index[-1])
        return slice(first, last + 1) if last - first + 1 == len(self) else None


def read(logits: Tensor, rows: Rows, out: Tensor) -> Tensor:
    """Bring `rows` of logits `(..., V)` into the front of the buffer `out`, in its dtype; no stride makes it copy more.

    Returns:
        `(len(rows), V)`: a view of `out`, or of the logits where they need neither a cast nor a gather. Read only.
    """
    block, run = out[: len(rows)], rows.run
    if not flattens(logits):
        return block.copy_(logits[torch.unravel_index(rows.on_device, logits.shape[:-1])])
    flat = logits.view(-1, logits.shape[-1])
    if run is not None:
        return flat[run] if flat.dtype == out.dtype else block.copy_(flat[run])
    if are_wide(flat):
        for there, here in runs(rows.index):
            block[here].copy_(flat[there])
        return block
    if flat.dtype == out.dtype:
        return torch.index_select(flat, 0, rows.on_device, out=block)
    return block.copy_(flat.index_select(0, rows.on_device))


def write(flat: Tensor, rows: Rows, block: Tensor) -> None:
    """Round `block` `(len(rows), V)` once and store it at `rows` of `flat` `(total, V)`, unless it stands there."""
    if rows.run is not None:
        if block.data_ptr() != flat[rows.run].data_ptr():
            flat[rows.run].copy_(block)
    elif are_wide(flat):
        for there, here in runs(rows.index):
            flat[there].copy_(block[here])
    else:
        flat.index_copy_(0, rows.on_device, block.to(flat.dtype))


def clear_others(flat: Tensor, rows: Rows) -> Tensor:
    """Set all rows of `flat` `(total, V)` but `rows` to 0, in place."""
    others = torch.ones(len(flat), dtype=torch.bool, device="cpu").index_fill_(0, rows.index, False).nonzero().flatten()
    if not are_wide(flat):
        return flat.index_fill_(0, others.to(flat.device, non_blocking=True), 0)
    for there, _ in runs(others):
        flat[there].zero_()
    return flat


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Contiguous zeros on the CPU that nobody wrote, not empty; their storage cannot be resized.

    Python's bytes come from calloc, so that blocks of `UNTOUCHED_BYTES` are pages the system fills at their first use;
    torch's zeros are memory from malloc and a pass that touches every page of it. The stream hands out the bytes
    themselves, not a copy, because nobody else holds them.
    """
    raw = torch.frombuffer(BytesIO(bytes(math.prod(shape) * dtype.itemsize)).getbuffer(), dtype=dtype)
    zeros = torch.empty(0, dtype=dtype, device="cpu")
    # Not a view of `raw`: who counts what operations allocate would never see this storage come into being.
    zeros.set_(raw.untyped_storage(), 0, shape)  # type: ignore[call-overload]
    return zeros


def runs(index: Tensor) -> list[tuple[slice, slice]]:
    """Increasing row numbers `(n,)` on the host as slices without a gap, each with the places it takes in the index."""
    if not index.numel():
        return []
    starts = _starts(index)
    ends = [*starts[1:], index.numel()]
    first = index[starts].tolist()
    return [
        (slice(row, row + end - start), slice(start, end)) for row, start, end in zip(first, starts, ends, strict=True)
    ]


def _starts(index: Tensor) -> list[int]:
    """The places in increasing row numbers `(n,)`, at least one, where a run begins."""
    return [0, *((index.diff() != 1).nonzero().flatten() + 1).tolist()]


def are_wide(logits: Tensor) -> bool:
    """Is it faster to take slices one by one than to gather rows? On a CPU, where a row is more than a call."""
    return logits.is_cpu and logits.shape[-1] * logits.dtype.itemsize > 16384


def flattens(logits: Tensor) -> bool:
    """Can all dimensions but the last be viewed as one?"""
    leading = [pair for pair in zip(logits.shape[:-1], logits.stride()[:-1], strict=True) if pair[0] != 1]
    return all(outer == size * stride for (_, outer), (size, stride) in pairwise(leading))
