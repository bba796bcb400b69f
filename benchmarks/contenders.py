"""Ways to the same scores: time in turns in one process, memory each in a process of its own."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from . import harness
from .harness import Goal, Result, Row, Spread, Timed, human_bytes
from .memory import resident_peak

OURS = "this project"
PRELOADED = ["evaluate", "torchmetrics.text", "torchmetrics.classification", "seqeval.metrics", "metrics", "reducers"]
ABOUT = (
    "*Memory* is the growth of the resident set above the arrays that are scored, in a process that does nothing else "
    "and has scored a little before. A line marked `x n` did the n-th part: its time is multiplied, its memory is not."
)


@dataclass(frozen=True)
class Contender:
    """One way to scores: `scale` is how many times what it does would have to be done."""

    name: str
    run: Callable[[], dict[str, float]]
    scale: int = 1


Make = Callable[[bool], list[Contender]]  # quick -> contenders, ours first


def measure(task: str, make: Make, *, quick: bool, rounds: int) -> list[Row]:
    """A row for each contender; scores are compared with ours where all of the task was done."""
    harness.progress(f"  {task}")
    contenders = make(quick)
    found: dict[str, dict[str, float]] = {}

    def timed(one: Contender) -> Timed:
        return Timed(one.name, lambda: None, lambda _: found.__setitem__(one.name, one.run()))

    seconds = harness.interleave([timed(one) for one in contenders], rounds=1 if quick else rounds)
    own = found[OURS]
    return [
        {
            "task": task,
            "with": one.name,
            "scale": one.scale,
            "seconds": [one.scale * value for value in seconds[one.name]],
            "memory": _memory(make, place, quick),
            "difference": max(abs(value - own[key]) for key, value in found[one.name].items())
            if one.scale == 1
            else None,
        }
        for place, one in enumerate(contenders)
    ]


def _memory(make: Make, place: int, quick: bool) -> int:
    """In a fork of a process that has only imported what is needed: importing it anew takes longer than most runs."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(_peak, make, place, quick).result()


def _peak(make: Make, place: int, quick: bool) -> int:
    make(True)[place].run()  # what is imported and kept the first time is nobody's
    return resident_peak(make(quick)[place].run)


# --- the report -------------------------------------------------------------------------------------------------------


Limits = Mapping[tuple[str, str], float]  # of our time over a peer's, by task and peer; 1 where nothing is said
More = Callable[[Mapping[tuple[str, str], Row]], list[Goal]]


def report(about: str, results: Sequence[Result], *, limits: Limits, more: More) -> str:
    """What was compared, then each result: first what is not reached, then every goal and every line."""
    parts = [f"{about} {ABOUT}"]
    for result in results:
        parts += [f"### {harness.title(result)}", harness.provenance(result)]
        if not result.quick:
            found = goals(result.rows, limits=limits, more=more)
            parts += [_behind(found), harness.goals_table(found)]
        parts.append(harness.table(("score", "with", "time, ms", "memory", "difference"), [*map(_cells, result.rows)]))
    return "\n\n".join(parts)


def goals(rows: Sequence[Row], *, limits: Limits, more: More) -> list[Goal]:
    """Our time and memory over those of every peer, and what an issue asks for besides."""
    found = {(row["task"], row["with"]): row for row in rows}
    ratios = []
    for (task, name), row in found.items():
        if name != OURS:
            own, pair = found[task, OURS], f"over {name}"
            time = harness.ratio(own["seconds"], row["seconds"]).median
            ratios.append(Goal(f"{task}: time {pair}", limits.get((task, name), 1.0), time))
            ratios.append(Goal(f"{task}: memory {pair}", 1.0, own["memory"] / max(row["memory"], 1)))
    return [*ratios, *more(found)]


def _behind(goals: Sequence[Goal]) -> str:
    behind = [f"{goal.what} {goal.measured:.3g} (at most {goal.limit:.3g})" for goal in goals if not goal.reached]
    return f"**Not reached**: {'; '.join(behind)}." if behind else "Every goal is reached."


def _cells(row: Row) -> list[str]:
    times = Spread.of([1000 * value for value in row["seconds"]])
    scaled = f" (x {row['scale']})" if row["scale"] > 1 else ""
    difference = "" if row["difference"] is None else f"{row['difference']:.1g}"
    return [row["task"], row["with"] + scaled, f"{times:.1f}", human_bytes(row["memory"]), difference]
