"""Two independent ways to count memory: live tensor bytes, and the memory of the process as its system sees it.

The first is exact and the same on every machine, but sees only tensors. The second sees everything, including NumPy
arrays and temporaries inside kernels, but depends on the allocator and on what the process has already freed.
"""

import ctypes
import gc
import itertools
import platform
import re
import resource
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Peak:
    """Live tensor bytes above those at the start: the highest, and what was left while the result is still held."""

    peak: int
    kept: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the live storages after each operation, in the forward and in the backward pass.

    A storage is counted once, however many tensors share it, until it is released in any way: the set holds weak
    references. A storage that is first seen as an argument existed at the start; its release lowers the count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._at_start = 0

    @property
    def live(self) -> int:
        """Bytes alive now, above those at the start."""
        return sum(storage.nbytes() for storage in self._storages) - self._at_start

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # torch.tensor fills its memory unseen and passes it to lift_fresh: an argument, but a new one.
        if func is not torch.ops.aten.lift_fresh.default:
            self._at_start += self._add((args, kwargs))
        result = func(*args, **kwargs)
        self._add((args, kwargs, result))
        self.peak = max(self.peak, self.live)
        return result

    def _add(self, tree: Any) -> int:
        """Add the storages that are not known yet and return their bytes."""
        storages = {leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
        new = {storage for storage in storages if storage not in self._storages}
        self._storages.update(new)
        return sum(storage.nbytes() for storage in new)


def peak_bytes(fn: Callable[[], object]) -> Peak:
    """Run `fn` and count its tensors' bytes.

    What the caller holds is not counted; if `fn` releases some of it, the count gets lower.

    Example:
        >>> import torch
        >>> peak_bytes(lambda: torch.zeros(1000).add(1).sum())
        Peak(peak=8000, kept=4)
    """
    with LiveBytes() as counter:
        result = fn()
    gc.collect()
    kept = counter.live
    del result
    return Peak(counter.peak, kept)


def allocated_peak(fn: Callable[[], object], *, device: str = "cpu") -> int:
    """Run `fn` and return the peak of what torch's allocator handed out above the start, in bytes.

    Unlike `peak_bytes` it sees temporaries inside kernels and in compiled code, which does not run in a dispatch mode.
    """
    if device != "cpu":
        return resident_peak(fn, device=device)
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fn()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events), default=0)


def resident_peak(fn: Callable[[], object], *, device: str = "cpu") -> int:
    """Run `fn` and return the peak of the memory in use above the start, in bytes.

    On a CPU this is the resident set of the process, sampled every millisecond; on a GPU what torch handed out.
    """
    if device == "cpu":
        with MemoryWatch(every=0.001) as memory:
            result = fn()
        del result
        return memory.peak
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    fn()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - start


def process_peak(*, device: str = "cpu") -> int:
    """Return the most bytes that this process ever held: resident pages, or on a GPU what torch handed out."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # unlike getrusage, whose peak a child inherits from its parent
        return 1024 * int(re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE).group(1))
    unit = 1 if platform.system() == "Darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class MemoryWatch:
    """Samples the resident memory of this process during a `with` block, relative to its start.

    Afterwards `seconds` and `bytes` are the samples, and `peak` is the largest of them.
    """

    def __init__(self, *, every: float = 0.005) -> None:
        self.every = every
        self.seconds: list[float] = []
        self.bytes: list[int] = []

    @property
    def peak(self) -> int:
        return max(self.bytes)

    def __enter__(self) -> "MemoryWatch":
        gc.collect()
        # Freed memory must go back to the system first: reused pages would not show as growth.
        getattr(ctypes.CDLL(None), "malloc_trim", lambda padding: None)(0)
        # The start is read here because the thread may run only after the block has allocated.
        self._resident = psutil.Process().memory_info
        self._start, self._began = self._resident().rss, time.perf_counter()
        self._sample()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self.every):
            self._sample()

    def _sample(self) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        self.bytes.append(self._resident().rss - self._start)
