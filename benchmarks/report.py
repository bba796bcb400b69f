"""The demo's table and picture."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.demo_language import Way

GREY, ORANGE, BLUE = ["#3d3d3d", "#8a8a8a"], ["#c98a2b"], ["#1f6fb4", "#63a9dd"]
COLOURS = GREY + ORANGE + BLUE


def table(ways: list[Way]) -> str:
    """One line a way; a dash where that way cannot tell the number."""
    head = f"\n{'':26}{'peak memory':>14}{'kept':>12}{'time':>9}{'nats':>9}{'right':>8}{'top 5':>8}"
    lines = [
        f"{way.name:26}{'+' + human_bytes(way.peak):>14}{human_bytes(way.kept):>12}{way.seconds:>7.0f} s"
        f"{_number(way, 'nll_loss'):>9}{_number(way, 'token_accuracy'):>8}{_number(way, 'top_5_accuracy'):>8}"
        for way in ways
    ]
    legend = [
        "peak memory: largest resident memory of the process during evaluate(), above where it started (sampled)",
        "kept: most bytes of predictions handed to compute_metrics in one call",
        "nats: loss a token; right, top 5: share of next tokens; -: cannot be told from what was kept",
    ]
    return "\n".join([head, *lines, "", *legend])


def picture(ways: list[Way], path: Path) -> Path:
    """Save the memory over time and the bytes kept, one colour a way."""
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    figure.suptitle(
        "One evaluation of SmolLM2-135M in the stock Trainer, 64 × 128 tokens, five ways",
        fontsize=14,
        fontweight="bold",
        x=0.01,
        ha="left",
    )
    over_time, kept = figure.subplots(1, 2, width_ratios=[1.25, 1])
    _draw_memory(over_time, ways)
    _draw_kept(kept, ways)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def human_bytes(count: float) -> str:
    """Bytes with three significant digits and a decimal unit.

    >>> human_bytes(512), human_bytes(2048), human_bytes(1.61e9)
    ('512 B', '2.05 kB', '1.61 GB')
    """
    power = min(int(math.log10(count)) // 3, 4) if count >= 1 else 0
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _number(way: Way, key: str) -> str:
    return f"{way.metrics[key]:.3f}" if key in way.metrics else "-"


def _draw_memory(axes: Axes, ways: list[Way]) -> None:
    for way, colour in zip(ways, COLOURS, strict=True):
        seconds, sampled = way.samples
        axes.plot(seconds, [count / 1e9 for count in sampled], color=colour, linewidth=1.8)
        at = sampled.index(way.peak)
        axes.plot(seconds[at], way.peak / 1e9, "o", color=colour, markersize=6)
    axes.set_title("Memory above the start of evaluate()", loc="left", fontsize=11)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GB")
    axes.set_ylim(bottom=0)
    _plain(axes)


def _draw_kept(axes: Axes, ways: list[Way]) -> None:
    places = range(len(ways))
    axes.barh(places, [way.kept for way in ways], color=COLOURS, height=0.62)
    axes.set_yticks(places, [way.name for way in ways])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(100, max(way.kept for way in ways) * 60)
    for place, way in zip(places, ways, strict=True):
        axes.text(way.kept * 1.3, place, human_bytes(way.kept), va="center", fontsize=10)
    axes.set_title("Predictions kept (bytes, each line is ten times more)", loc="left", fontsize=11)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e4e4e4")
    axes.set_axisbelow(True)
