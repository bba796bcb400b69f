"""Walk the scored rows of a logits tensor in chunks that stay in cache: gather, upcast, write back."""

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
# than 64); on a device it has to be large enough to fill the chip.
CPU_CHUNK_BYTES = 14 << 20
DEVICE_CHUNK_BYTES = 128 << 20
# A chunk is split at most this often, to make runs of rows that need no gather.
RUNS_PER_CHUNK = 4
# A comparison with a teacher needs about this many tensors of a chunk's size at a time.
COMPARISON_TENSORS = 12
# From this size on glibc maps fresh zero pages for calloc; for a smaller block it may have to clear memory.
LAZY_ZERO_BYTES = 32 << 20


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics of `dtype` logits: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_per_chunk(width: int, dtype: torch.dtype, device: torch.device, rows: Rows | None = None) -> int:
    """Return how many rows of `width` values fit into a working buffer of `dtype` on `device`, at least one.

    With `rows` the result is the size of their chunks, which is at most their number.
    """
    budget = CPU_CHUNK_BYTES if device.type == "cpu" else DEVICE_CHUNK_BYTES
    if rows is None:
        return max(1, budget // max(1, width * dtype.itemsize))
    tensors = 1 if rows.comparison is None else COMPARISON_TENSORS
    return max(1, min(budget // max(1, tensors * width * dtype.itemsize), rows.index.numel()))


@dataclass(frozen=True)
class Rows:
    """The scored rows of logits `(..., V)`, in order.

    Attributes:
        index: row numbers of the flattened logits, `(n,)` int64 on the host.
        on_device: the same numbers on the logits' device.
        targets: the class that each row is scored against, `(n,)` on the device, or None if there are no labels.
        comparison: a function of logits `(r, V)` and their rows that returns the distance of each row from a teacher,
            `(r,)`, or None without a teacher.
    """

    index: Tensor
    on_device: Tensor
    targets: Tensor | None
    comparison: Callable[[Tensor, Rows], Tensor] | None = None

    def __len__(self) -> int:
        return self.index.numel()

    @property
    def labels(self) -> Tensor:
        """The targets, for callers that know that there are any."""
        assert self.targets is not None, "these rows have no targets"
        return self.targets

    def chunks(self, step: int, *, split_at_gaps: bool = False) -> Iterator[Rows]:
        """Yield consecutive chunks of at most `step` rows.

        With `split_at_gaps` a chunk also ends where the row numbers have a gap, unless it would be too short.
        """
        total, start = self.index.numel(), 0
        bounds = [*_run_starts(self.index), total] if split_at_gaps and total else [total]
        while start < total:
            next_run = bisect_left(bounds, min(start + max(step // RUNS_PER_CHUNK, 1), total))
            end = min(start + step, bounds[next_run])
            piece = slice(start, end)
            targets = None if self.targets is None else self.targets[piece]
            yield replace(self, index=self.index[piece], on_device=self.on_device[piece], targets=targets)
            start = end

    @cached_property
    def run(self) -> slice | None:
        """The rows as one slice if they are consecutive, so that nothing has to be gathered; otherwise None."""
        first, last = int(self.index[0]), int(self.index[-1])
        return slice(first, last + 1) if last - first + 1 == self.index.numel() else None


def read(logits: Tensor, rows: Rows, out: Tensor) -> Tensor:
    """Copy `rows` of logits `(..., V)` into the front of the buffer `out`, in its dtype, without a copy of the rest.

    Returns:
        `(n, V)`, read only: a view of `out`, or of the logits if they need neither a cast nor a gather.
    """
    block, run = out[: rows.index.numel()], rows.run
    if not logits.is_contiguous() and not flattens(logits):
        return block.copy_(logits[torch.unravel_index(rows.on_device, logits.shape[:-1])])
    flat = logits.view(-1, logits.shape[-1])
    if run is not None:
        return flat[run] if flat.dtype == out.dtype else block.copy_(flat[run])
    if slices_are_faster(flat):
        for source, place in runs(rows.index):
            block[place].copy_(flat[source])
        return block
    if flat.dtype == out.dtype:
        return torch.index_select(flat, 0, rows.on_device, out=block)
    return block.copy_(flat.index_select(0, rows.on_device))


def write(flat: Tensor, rows: Rows, block: Tensor) -> None:
    """Round `block` `(n, V)` once and store it at `rows` of `flat` `(total, V)`, unless it is stored there already."""
    if rows.run is not None:
        if block.data_ptr() != flat[rows.run].data_ptr():
            flat[rows.run].copy_(block)
    elif slices_are_faster(flat):
        for target, place in runs(rows.index):
            flat[target].copy_(block[place])
    else:
        flat.index_copy_(0, rows.on_device, block.to(flat.dtype))


def clear_others(flat: Tensor, rows: Rows) -> Tensor:
    """Set all rows of `flat` `(total, V)` except `rows` to 0, in place."""
    others = torch.ones(len(flat), dtype=torch.bool, device="cpu").index_fill_(0, rows.index, False).nonzero().flatten()
    if not slices_are_faster(flat):
        return flat.index_fill_(0, others.to(flat.device, non_blocking=True), 0)
    for target, _ in runs(others):
        flat[target].zero_()
    return flat


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return lazily zeroed CPU memory (calloc), contiguous and not empty; its storage cannot be resized.

    Python's bytes come from calloc, so that blocks of `LAZY_ZERO_BYTES` are pages that the system fills at their first
    use; torch.zeros takes memory from malloc and touches every page. `BytesIO` hands out the bytes themselves, not a
    copy, because nothing else refers to them.
    """
    raw = torch.frombuffer(BytesIO(bytes(math.prod(shape) * dtype.itemsize)).getbuffer(), dtype=dtype)
    zeros = torch.empty(0, dtype=dtype, device="cpu")
    # Not a view of `raw`: tools that count what operations allocate would not see this storage.
    zeros.set_(raw.untyped_storage(), 0, shape)  # type: ignore[call-overload]
    return zeros


def runs(index: Tensor) -> list[tuple[slice, slice]]:
    """Return increasing row numbers `(n,)` on the host as slices without a gap, each with its slice of the index."""
    if not index.numel():
        return []
    starts = _run_starts(index)
    ends = [*starts[1:], index.numel()]
    first = index[starts].tolist()
    return [
        (slice(row, row + end - start), slice(start, end)) for row, start, end in zip(first, starts, ends, strict=True)
    ]


def _run_starts(index: Tensor) -> list[int]:
    """Return the positions in increasing row numbers `(n,)`, n >= 1, at which a run begins."""
    return [0, *((index.diff() != 1).nonzero().flatten() + 1).tolist()]


def slices_are_faster(logits: Tensor) -> bool:
    """Return whether copying slices is faster than gathering rows: on a CPU, if a row costs more than a call."""
    return logits.is_cpu and logits.shape[-1] * logits.dtype.itemsize > 16384


def flattens(logits: Tensor) -> bool:
    """Return whether all dimensions but the last can be viewed as one."""
    leading = [pair for pair in zip(logits.shape[:-1], logits.stride()[:-1], strict=True) if pair[0] != 1]
    return all(outer == size * stride for (_, outer), (size, stride) in pairwise(leading))
