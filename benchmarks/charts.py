"""The pictures of the report, drawn from result files alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import evaluation, harness, peers
from .harness import Result, human_bytes
from .losses import OVER, OWN, STOCK

FOLDER = "charts"
STYLE = {"svg.hashsalt": "charts", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
OURS, THEIRS = ("#1f6fb4", "#63a9dd", "#12406b"), ("#3d3d3d", "#c98a2b", "#8a8a8a", "#7a9a3a", "#a05a8a")


def peers_memory(results: Sequence[Result]) -> Figure | None:
    """Memory over the tokens of a batch, for the middle vocabulary; dotted where computed."""
    lines = peers.lines_of(results[0].rows)
    vocabularies = sorted({vocabulary for field, vocabulary, _ in lines if field == "logits"})
    if not vocabularies:
        return None
    shown = vocabularies[len(vocabularies) // 2]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots()
    counts = sorted({row["tokens"] for row in results[0].rows})
    ours, theirs = iter(OURS), iter(THEIRS * 2)
    for (field, vocabulary, loss), own in lines.items():
        if (field, vocabulary) != ("logits", shown):
            continue
        colour = next(ours if loss in (OWN, OVER) else theirs)
        peaks = [own.at("peak", count) for count in counts]
        if None not in peaks:
            axes.plot(counts, peaks, ":", color=colour, linewidth=1.2)
        measured = sorted(own.rows)
        axes.plot(measured, [own.rows[count]["peak"] for count in measured], "o-", color=colour, label=loss, ms=3)
    _title(figure, f"Memory above the logits, V {shown:,} (dotted: computed)")
    axes.set_xlabel("tokens a batch")
    return _finished(figure, axes, counts)


def peers_time(results: Sequence[Result]) -> Figure | None:
    """Time over the stock loss's at the largest case that all of them have, under each allocator."""
    figure = Figure(figsize=(9, 0.8 + 2.4 * len(results)), layout="constrained")
    for axes, result in zip(figure.subplots(len(results), squeeze=False)[:, 0], results, strict=True):
        case = _largest_common(result)
        if case is None:
            return None
        rows = {row["loss"]: row for row in result.rows if "peak" in row and _case(row) == case}
        ratios = {name: harness.ratio(row["seconds"], rows[STOCK]["seconds"]) for name, row in rows.items()}
        colours = [OURS[0] if name in (OWN, OVER) else THEIRS[2] for name in ratios]
        axes.barh([*ratios], [ratio.median for ratio in ratios.values()], color=colours, height=0.6)
        for place, ratio in enumerate(ratios.values()):
            axes.plot([ratio.low, ratio.high], [place, place], color=THEIRS[0], linewidth=1)
            axes.annotate(f"{ratio.median:.2f}", (ratio.high, place), (4, 0), textcoords="offset points", va="center")
        axes.invert_yaxis()
        axes.set_title(
            f"{harness.title(result).partition(' (')[0]}; {case[2]:,} tokens, V {case[1]:,}", loc="left", size=9
        )
        axes.spines[["top", "right"]].set_visible(False)
    _title(figure, f"Time over that of {STOCK}")
    return figure


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", size=11, weight="bold")


def _case(row: harness.Row) -> tuple[str, int, int]:
    return row["field"], row["vocabulary"], row["tokens"]


def _largest_common(result: Result) -> tuple[str, int, int] | None:
    rows = [row for row in result.rows if "peak" in row and row["field"] == "logits"]
    names = {row["loss"] for row in rows}
    cases = [case for case in {_case(row) for row in rows} if {r["loss"] for r in rows if _case(r) == case} == names]
    return max(cases, key=lambda case: (case[1] * case[2], case[1]), default=None)


def evaluation_kept(results: Sequence[Result]) -> Figure | None:
    """What the Trainer keeps over the number of samples; dotted where computed."""
    rows = [row for row in results[0].rows if "seconds" in row]
    if not rows:
        return None
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots()
    ours, theirs = iter(OURS), iter(THEIRS)
    for setup in dict.fromkeys(row["setup"] for row in rows):
        own = [row for row in rows if row["setup"] == setup]
        colour = next(theirs if setup in evaluation.WITHOUT_US else ours)
        axes.plot([row["samples"] for row in own], [row["kept"] for row in own], ":", color=colour)
        measured = [row for row in own if not row["computed"]]
        points = [row["samples"] for row in measured], [row["kept"] for row in measured]
        axes.plot(*points, "o-", color=colour, label=setup, ms=3)
    _title(figure, f"Kept for compute_metrics, {rows[0]['tokens']} tokens a sample (dotted: computed)")
    axes.set_xlabel("samples")
    return _finished(figure, axes, sorted({row["samples"] for row in rows}))


def _finished(figure: Figure, axes: Axes, ticks: Sequence[int]) -> Figure:
    """Bytes over counts, both logarithmic, the legend beside them."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda count, _: human_bytes(count))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e2e2")
    axes.set_axisbelow(True)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


Draw = Callable[[Sequence[Result]], Figure | None]
CHARTS: dict[str, dict[str, Draw]] = {
    "peers": {"peers-memory": peers_memory, "peers-time": peers_time},
    "evaluation": {"evaluation-kept": evaluation_kept},
}


def drawn(benchmark: str, results: Sequence[Result]) -> dict[str, Figure]:
    """Those pictures of a benchmark that its results are enough for."""
    with mpl.rc_context(STYLE):
        figures = {name: draw(results) for name, draw in CHARTS.get(benchmark, {}).items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def shown(benchmark: str, results: Sequence[Result]) -> list[str]:
    """The lines of the report that show them."""
    return [f"![{name.replace('-', ', ')}]({FOLDER}/{name}.svg)" for name in drawn(benchmark, results)]


def write(results: Sequence[Result], folder: Path) -> None:
    """Save all of them, the same bytes for the same results."""
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    for benchmark in CHARTS:
        own = [result for result in results if result.benchmark == benchmark]
        for name, figure in (drawn(benchmark, own) if own else {}).items():
            with mpl.rc_context(STYLE):
                figure.savefig(folder / FOLDER / f"{name}.svg", metadata={"Date": None})
