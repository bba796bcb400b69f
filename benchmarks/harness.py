"""What every benchmark here shares: interleaved timing, result files, and the report written from them alone."""

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]

REPOSITORY = Path(__file__).resolve().parents[1]

# glibc gives large blocks back to the system and pays page faults for the next ones; told to keep them it behaves as a
# GPU's caching allocator does; told to return all of them at once it holds what is alive and no more, where it else
# holds half a gigabyte more in one process than in the next. All are read when the process starts.
ALLOCATORS = {
    "default": {},
    "kept": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"},
    "returned": {"MALLOC_MMAP_THRESHOLD_": "65536"},
}

# --- timing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """Something to time: `prepare` makes the input of one run, unseen by the clock; `run` is what counts."""

    name: str
    prepare: Callable[[], Any]
    run: Callable[[Any], object]


def interleave(
    variants: Sequence[Timed], *, rounds: int, device: str = "cpu", warm: bool = False
) -> dict[str, list[float]]:
    """Seconds of each variant in each round, run as A B C A B C ... after one round that warms up, unless all are warm.

    What disturbs the machine for a while meets all variants alike: compare them round by round.
    """
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in range(warm, rounds + 1):
        for variant in variants:
            elapsed = _time_once(variant, device)
            if number:
                seconds[variant.name].append(elapsed)
    return seconds


def _time_once(variant: Timed, device: str) -> float:
    prepared = variant.prepare()
    gc.collect()
    with _no_collection():
        clock = _cpu_seconds if device == "cpu" else _cuda_seconds
        return clock(lambda: variant.run(prepared))


def _cpu_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cuda_seconds(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def ratio(seconds: Sequence[float], baseline: Sequence[float]) -> Spread:
    """Seconds over the baseline's of the same round."""
    return Spread.of([ours / theirs for ours, theirs in zip(seconds, baseline, strict=True)])


# --- result files ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One run of one benchmark in one process: what its file holds."""

    benchmark: str
    command: str
    device: str
    allocator: str
    quick: bool
    machine: dict[str, Any]
    versions: dict[str, str]
    seconds: float
    rows: list[Row]

    @property
    def file_name(self) -> str:
        return f"{self.benchmark}-{self.device}-{self.allocator}.json"

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1, allow_nan=False)
        (folder / self.file_name).write_text(text + "\n", encoding="utf-8")


def read_results(folder: Path) -> list[Result]:
    """The results of a folder, in the order of their file names."""
    return [Result(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]


def machine(device: str) -> dict[str, Any]:
    """What the times depend on."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device != "cpu":
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions(*distributions: str) -> dict[str, str]:
    """Python's version and those of distributions, which need not all be there."""
    return {"python": platform.python_version()} | {name: _version(name) for name in distributions}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def allocator() -> str:
    """The name of this process's allocator setting."""
    given = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    for name, settings in ALLOCATORS.items():
        if given == settings:
            return name
    raise SystemExit(f"unknown allocator settings {given}: expected one of {list(ALLOCATORS.values())}")


# --- running ---------------------------------------------------------------------------------------------------------


def check_device(device: str) -> None:
    """Stops with a message where the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no CUDA device here, so there is nothing to measure; leave it out")


def main(benchmark: str, run: Callable[..., Iterable[Row]], packages: Sequence[str]) -> None:
    """The command line of a benchmark's own module: runs it in this process and writes its result file.

    A benchmark that yields its rows has them written as they come.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}")
    parser.add_argument("folder", type=Path, help="where the result file goes")
    parser.add_argument("--quick", action="store_true", help="sizes too small to show anything but that it runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    check_device(given.device)
    kind = allocator() if given.device == "cpu" else "caching"
    gc.freeze()  # what the imports made need not be searched again before every run
    start = time.perf_counter()
    result = Result(
        benchmark=benchmark,
        command=" ".join(["python -m benchmarks", benchmark, *_options(given.quick, given.device)]),
        device=given.device,
        allocator=kind,
        quick=given.quick,
        machine=machine(given.device),
        versions=versions(*packages),
        seconds=0.0,
        rows=[],
    )
    for row in run(quick=given.quick, device=given.device):
        result.rows.append(row)
        replace(result, seconds=time.perf_counter() - start).write(given.folder)


def run_in_fresh_process(benchmark: str, folder: Path, *, allocator: str, quick: bool, device: str) -> None:
    """Runs `python -m benchmarks.{benchmark}` under an allocator setting of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    subprocess.run(
        [sys.executable, "-m", f"benchmarks.{benchmark}", str(folder.resolve()), *_options(quick, device)],
        cwd=REPOSITORY,
        env=inherited | ALLOCATORS[allocator] | {"KINETO_LOG_LEVEL": "99"},  # the profiler's own remarks
        check=True,
    )


def _options(quick: bool, device: str) -> list[str]:
    return ["--quick"] * quick + ["--device", device] * (device != "cpu")


def in_a_process(fn: Callable[[], Any], *, limit: float | None = None) -> Any:
    """What `fn` returns in a process of its own, with nothing of this one's memory.

    Raises:
        TimeoutError: it took longer than `limit` seconds and was stopped.
        RuntimeError: it raised, or its process died; with the reason.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(fn, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit):
            process.kill()
            raise TimeoutError(f"stopped after {limit:.0f} s")
        found, reason = ours.recv()
    except EOFError:
        raise RuntimeError("its process died: out of memory?") from None
    finally:
        process.join()
    if reason:
        raise RuntimeError(reason)
    return found


def _send_result(fn: Callable[[], Any], connection: Any) -> None:
    gc.freeze()  # as in `main`
    try:
        message = fn(), ""
    except Exception as error:  # whatever it is, it is the result
        message = None, " ".join(f"{type(error).__name__}: {error}".split())[:200]
    connection.send(message)


def progress(message: str) -> None:
    """A line for whoever waits."""
    print(message, file=sys.stderr, flush=True)


# --- the report ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A figure that an issue names: reached when what was measured is at most the limit."""

    what: str
    limit: float
    measured: float

    @property
    def reached(self) -> bool:
        return not math.isnan(self.measured) and self.measured <= self.limit


def goals_table(goals: Sequence[Goal]) -> str:
    return table(
        ("What must be reached", "At most", "Measured", ""),
        [
            (goal.what, f"{goal.limit:.4g}", f"{goal.measured:.4g}", "reached" if goal.reached else "**not reached**")
            for goal in goals
        ],
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; cells that look like numbers stand to the right."""
    right = [bool(rows) and all(_numeric(row[column]) for row in rows) for column in range(len(header))]
    rule = ["--:" if is_right else "---" for is_right in right]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def human_bytes(count: float) -> str:
    """Bytes with three significant digits and a decimal unit.

    >>> human_bytes(512), human_bytes(2048), human_bytes(1.61e9)
    ('512 B', '2.05 kB', '1.61 GB')
    """
    power = min(int(math.log10(count)) // 3, 4) if count >= 1 else 0
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _numeric(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "-+"


def provenance(result: Result) -> str:
    """Machine, versions and command, to stand beside each table."""
    machine = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result.machine.items())
    versions = ", ".join(f"{name} {value}" for name, value in result.versions.items())
    quick = " **A quick run: sizes too small to show anything but that it runs.**" if result.quick else ""
    return (
        f"<sub>`{result.command}`, {result.seconds:.0f} s. {machine[0].upper()}{machine[1:]}. "
        f"{versions[0].upper()}{versions[1:]}.</sub>{quick}"
    )


def title(result: Result) -> str:
    """What a result was measured on."""
    settings = {name: " ".join(f"{key}={value}" for key, value in each.items()) for name, each in ALLOCATORS.items()}
    titles = {
        "default": "CPU, the C library's default allocator",
        "kept": f"CPU, memory kept by the allocator (`{settings['kept']}`)",
        "returned": f"CPU, memory returned by the allocator at once (`{settings['returned']}`)",
        "caching": "GPU",
    }
    return titles[result.allocator]
