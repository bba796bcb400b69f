"""The demo's table and picture."""

from itertools import product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.demo_classification import Run
from benchmarks.demo_language import EVAL_ROWS, EVAL_TOKENS, Way
from benchmarks.harness import human_bytes

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
    """Save the memory over time, its peaks and the bytes kept, one colour a way."""
    figure = Figure(figsize=(14, 4.8), layout="constrained")
    figure.suptitle(
        f"The same evaluation of SmolLM2-135M in the stock Trainer, {EVAL_ROWS} × {EVAL_TOKENS} tokens, five ways\n",
        fontsize=14,
        fontweight="bold",
        x=0.01,
        ha="left",
    )
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


def confusions(runs: list[Run], names: dict[int, str], path: Path) -> Path:
    """Save the confusion matrix of each run as shares of the true class."""
    figure = Figure(figsize=(4.4 * len(runs), 4.6), layout="constrained")
    figure.suptitle("Film reviews in three unbalanced classes\n", fontsize=14, fontweight="bold", x=0.01, ha="left")
    for axes, run in zip(figure.subplots(1, len(runs), sharey=True), runs, strict=True):
        shares = run.confusion / run.confusion.sum(axis=1, keepdims=True)
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for true, predicted in product(names, names):
            dark = shares[true, predicted] > 0.5
            text = f"{run.confusion[true, predicted]}\n{shares[true, predicted]:.0%}"
            axes.text(predicted, true, text, ha="center", va="center", color="white" if dark else "#3d3d3d")
        axes.set_title(f"{run.name}\nmacro F1 {run.scores['f1_macro']:.3f}", loc="left", fontsize=11)
        axes.set_xticks(list(names), list(names.values()))
        axes.set_yticks(list(names), list(names.values()))
        axes.set_xlabel("predicted")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.axes[0].set_ylabel("true")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _number(way: Way, key: str) -> str:
    return f"{way.metrics[key]:.3f}" if key in way.metrics else "-"


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
