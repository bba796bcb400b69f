"""Shared parts of the benchmarks: interleaved timing, result files, separate processes and Markdown tables."""

import argparse
import gc
import json
import math
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]

REPOSITORY = Path(__file__).resolve().parents[1]

# By default glibc returns large blocks to the system and pays page faults for the next ones. "kept" makes it keep them,
# as a GPU's caching allocator does. "returned" makes it return them at once, so that the process holds only what is
# alive; otherwise its size varies by half a gigabyte. The settings are read when a process starts.
ALLOCATORS = {
    "default": {},
    "kept": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"},
    "returned": {"MALLOC_MMAP_THRESHOLD_": "65536"},
}


@dataclass(frozen=True)
class Timed:
    """A function to time: `prepare` makes the input of one run and is not timed; `run` is."""

    name: str
    prepare: Callable[[], Any]
    run: Callable[[Any], object]


def interleave(
    variants: Sequence[Timed], *, rounds: int, device: str = "cpu", warm: bool = False
) -> dict[str, list[float]]:
    """Return the seconds of each variant in each round, run as A B C A B C ...

    One warm-up round comes first unless `warm` says that all variants have run before. A disturbance of the machine
    affects all variants of a round alike, so compare them round by round.
    """
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in range(warm, rounds + 1):
        for variant in variants:
            elapsed = time_once(variant, device)
            if number:
                seconds[variant.name].append(elapsed)
    return seconds


def time_once(variant: Timed, device: str) -> float:
    """Return the seconds of one run, with garbage collection disabled."""
    prepared = variant.prepare()
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    gc.collect()
    gc.disable()
    try:
        synchronize()
        start = time.perf_counter()
        variant.run(prepared)
        synchronize()
        return time.perf_counter() - start
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
    """Return the spread of the ratios to the baseline's seconds of the same round."""
    return Spread.of([ours / theirs for ours, theirs in zip(seconds, baseline, strict=True)])


@dataclass(frozen=True)
class Result:
    """One run of one benchmark in one process, as stored in its result file."""

    benchmark: str
    command: str
    device: str
    allocator: str
    quick: bool
    machine: dict[str, Any]
    versions: dict[str, str]
    seconds: float
    rows: list[Row]

    def write(self, folder: Path, name: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name or f'{self.benchmark}-{self.device}-{self.allocator}'}.json"
        path.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_results(folder: Path) -> list[Result]:
    """Return the results stored in a folder, in the order of their file names."""
    return [Result(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]


def machine(device: str) -> dict[str, Any]:
    """Describe the hardware that the times depend on."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
    return found if device == "cpu" else found | {"gpu": torch.cuda.get_device_name()}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.*)", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def versions(*distributions: str) -> dict[str, str]:
    """Return the versions of Python and of distributions, some of which may be missing."""
    found = {"python": platform.python_version()}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def allocator() -> str:
    """Return the name of the allocator setting of this process."""
    given = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    for name, settings in ALLOCATORS.items():
        if given == settings:
            return name
    raise SystemExit(f"allocator settings must be one of {list(ALLOCATORS.values())}, got {given}")


def check_device(device: str) -> None:
    """Exit with a message if the device does not exist on this machine."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no CUDA device on this machine; leave the option out")


def main(section: "Section", run: Callable[..., Iterable[Row]]) -> None:
    """Run a benchmark's module as a script: measure in this process and write the result file after each row."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{section.benchmark}")
    parser.add_argument("folder", type=Path, help="folder of the result file")
    add_options(parser)
    given = parser.parse_args()
    check_device(given.device)
    gc.freeze()  # objects made by the imports need not be searched again before every run
    start = time.perf_counter()
    result = Result(
        benchmark=section.benchmark,
        command=" ".join(["python -m benchmarks", section.benchmark, *_options(given.quick, given.device)]),
        device=given.device,
        allocator=allocator() if given.device == "cpu" else "caching",
        quick=given.quick,
        machine=machine(given.device),
        versions=versions(*section.packages),
        seconds=0.0,
        rows=[],
    )
    for row in run(quick=given.quick, device=given.device):
        result.rows.append(row)
        replace(result, seconds=time.perf_counter() - start).write(given.folder)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="tiny sizes, which only show that the benchmark runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def run_in_fresh_process(benchmark: str, folder: Path, *, allocator: str, quick: bool, device: str) -> None:
    """Run `python -m benchmarks.{benchmark}` with the given allocator setting."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    subprocess.run(
        [sys.executable, "-m", f"benchmarks.{benchmark}", str(folder.resolve()), *_options(quick, device)],
        cwd=REPOSITORY,
        env=inherited | ALLOCATORS[allocator] | {"KINETO_LOG_LEVEL": "99"},  # silences the profiler
        check=True,
    )


def _options(quick: bool, device: str) -> list[str]:
    return ["--quick"] * quick + ["--device", device] * (device != "cpu")


def in_a_process(fn: Callable[[], Any]) -> Any:
    """Return the result of `fn`, called in a new process that shares no memory with this one."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=gc.freeze) as process:
        return process.submit(fn).result()


def progress(message: str) -> None:
    """Print a line on stderr."""
    print(message, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Goal:
    """A limit that an issue set; it is reached if the measured number is at most the limit."""

    what: str
    limit: float
    measured: float

    @property
    def reached(self) -> bool:
        return self.measured <= self.limit


@dataclass(frozen=True)
class Section:
    """A section of the report.

    Attributes:
        title: its heading.
        benchmark: the `benchmark` of the results that it shows.
        about: what the columns mean.
        tables: the Markdown of the tables of one result.
        goals: the limits and what was measured, for results of a full run on the CPU.
        allocators: the settings that `python -m benchmarks` measures with; none for a benchmark with its own command.
        packages: the distributions whose versions the result file names.
    """

    title: str
    benchmark: str
    about: str
    tables: Callable[[Result], str]
    goals: Callable[[Result], list[Goal]] = lambda result: []
    allocators: Sequence[str] = ("default",)
    packages: Sequence[str] = ()

    def render(self, results: Sequence[Result]) -> list[str]:
        """Return the Markdown parts that show results of this section's benchmark, if there are any."""
        parts = [f"## {self.title}", self.about] if results else []
        for result in results:
            if self.allocators:
                parts.append(f"### {TITLES[result.allocator]}")
            parts.append(provenance(result))
            if goals := [] if result.quick or result.device != "cpu" else self.goals(result):
                parts.append(goals_table(goals))
            parts.append(self.tables(result))
        return parts


def goals_at(where: str, *measured: tuple[str, float, float]) -> list[Goal]:
    """Return goals whose descriptions all begin with `where`."""
    return [Goal(f"{where}: {what}", limit, number) for what, limit, number in measured]


def goals_table(goals: Sequence[Goal]) -> str:
    verdicts = {True: "reached", False: "**not reached**"}
    cells = [(each.what, f"{each.limit:.4g}", f"{each.measured:.4g}", verdicts[each.reached]) for each in goals]
    return table(("Limit", "At most", "Measured", ""), cells)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; columns of numbers are aligned to the right."""
    numeric = re.compile(r"[-+\d]|$")
    right = [bool(rows) and all(numeric.match(row[column]) for row in rows) for column in range(len(header))]
    rule = ["--:" if is_right else "---" for is_right in right]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def human_bytes(count: float) -> str:
    """Return bytes with three significant digits and a decimal unit.

    >>> human_bytes(512), human_bytes(2048), human_bytes(1.61e9)
    ('512 B', '2.05 kB', '1.61 GB')
    """
    power = min(int(math.log10(count)) // 3, 4) if count >= 1 else 0
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def provenance(result: Result) -> str:
    """Return the command, machine and versions of a result."""
    machine = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result.machine.items())
    versions = ", ".join(f"{name} {value}" for name, value in result.versions.items())
    quick = " **A quick run: its tiny sizes only show that the benchmark runs.**" if result.quick else ""
    settings = [f"{name}={value}" for name, value in ALLOCATORS.get(result.allocator, {}).items()]
    command = " ".join([*settings, result.command])
    return (
        f"<sub>`{command}`, {result.seconds:.0f} s. {machine[0].upper()}{machine[1:]}. "
        f"{versions[0].upper()}{versions[1:]}.</sub>{quick}"
    )


TITLES = {
    "default": "CPU, default allocator of the C library",
    "kept": "CPU, memory kept by the allocator",
    "returned": "CPU, memory returned by the allocator at once",
    "caching": "GPU",
}
