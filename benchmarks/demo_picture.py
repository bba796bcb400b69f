"""The demo's picture."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from .demo import EVAL_ROWS, EVAL_TOKENS, Way
from .harness import human_bytes

COLOURS = ["#3d3d3d", "#8a8a8a", "#c98a2b", "#1f6fb4", "#63a9dd"]  # nothing, accumulated, argmax, lossfns, streaming


def picture(ways: list[Way], path: Path) -> Path:
    """Save the memory over time, its peaks and the bytes kept, one colour per way, with the finding as the title."""
    figure = Figure(figsize=(14, 4.8), layout="constrained")
    figure.suptitle(title(ways) + "\n", fontsize=14, fontweight="bold", x=0.01, ha="left")
    over_time, peaks, kept = figure.subplots(1, 3, width_ratios=[1.5, 1, 1])
    _draw_memory(over_time, ways)
    _draw_bars(peaks, [way.peak for way in ways], "Peak memory")
    _draw_bars(kept, [way.kept for way in ways], "Predictions kept")
    kept.set_xscale("log", subs=[])
    kept.xaxis.set_major_locator(LogLocator(numticks=99))  # otherwise it leaves out every other power of ten
    kept.set_xlim(100, 200 * max(way.kept for way in ways))
    kept.tick_params(axis="x", labelbottom=False)
    kept.set_xlabel("each line is ten times more")
    peaks.set_xlim(0, 1.3 * max(way.peak for way in ways))
    peaks.set_xticks([])
    peaks.set_yticks(range(len(ways)), [way.name for way in ways], fontsize=11)
    for label, colour in zip(peaks.get_yticklabels(), COLOURS, strict=True):
        label.set_color(colour)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def title(ways: list[Way]) -> str:
    """Return the finding: the peak with nothing configured and that with lossfns."""
    nothing, *_, ours, _streaming = ways
    return (
        f"lossfns evaluates SmolLM2-135M in {human_bytes(ours.peak)} instead of {human_bytes(nothing.peak)} of memory "
        f"(stock Trainer, {EVAL_ROWS} × {EVAL_TOKENS} tokens)"
    )


def _draw_memory(axes: Axes, ways: list[Way]) -> None:
    for way, colour in zip(ways, COLOURS, strict=True):
        seconds, sampled = way.samples
        axes.plot(seconds, [count / 1e9 for count in sampled], color=colour, linewidth=1.6)
        axes.plot(seconds[sampled.index(way.peak)], way.peak / 1e9, "o", color=colour, markersize=6)
    axes.set_title("Memory above the start of evaluate()", loc="left", fontsize=12)
    axes.set_xlabel("seconds")
    axes.yaxis.set_major_formatter(lambda count, _: f"{count:g} GB" if count else "0")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _plain(axes, grid="y")


def _draw_bars(axes: Axes, values: list[int], title: str) -> None:
    places = range(len(values))
    axes.barh(places, values, color=COLOURS, height=0.6)
    axes.invert_yaxis()
    axes.set_yticks([])
    for place, value in zip(places, values, strict=True):
        axes.annotate(human_bytes(value), (value, place), (5, 0), textcoords="offset points", va="center", fontsize=11)
    axes.set_title(title, loc="left", fontsize=12)
    _plain(axes, grid="x")


def _plain(axes: Axes, *, grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#e2e2e2")
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
