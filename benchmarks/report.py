"""The report `RESULTS.md` and the README's table of numbers, both written from result files alone."""

from collections.abc import Sequence

from . import distributed, evaluation, harness, hidden, hidden_step, losses, metrics, peers
from .harness import Result

# A new benchmark is a module with `run` and `SECTION`, listed here.
SECTIONS = (
    losses.SECTION,
    peers.SECTION,
    hidden.SECTION,
    hidden_step.SECTION,
    evaluation.SECTION,
    metrics.SECTION,
    distributed.VERSIONS,
    distributed.DISTRIBUTED,
)


def report(results: Sequence[Result]) -> str:
    """Return the whole report; each section shows the results of its benchmark."""
    parts = [
        "# Results",
        "Written by `make bench` from the files in `results/`; no number is typed by hand. Times are medians with "
        "quartiles of interleaved rounds in one process, ratios are taken round by round. MiB are 2^20 bytes.",
    ]
    if not any(result.device == "cuda" for result in results):
        parts.append("No GPU was measured: run `python -m benchmarks --device cuda` on a machine that has one.")
    for section in SECTIONS:
        parts += section.render([result for result in results if result.benchmark == section.benchmark])
    return "\n\n".join(parts) + "\n"


README_BEGIN, README_END = "<!-- numbers: benchmarks.report.readme_table -->", "<!-- end of numbers -->"
README_CASE = ("bfloat16", 151_936)


def readme_table(results: Sequence[Result]) -> str:
    """Return peak memory and time of a training step relative to the stock loss, bfloat16, V 151,936."""
    found = {(result.benchmark, result.allocator): result for result in results if result.device == "cpu"}
    of_logits = [losses.by_kind(found["losses", name].rows)[README_CASE] for name in ("default", "kept")]
    of_hidden = [hidden.by_kind(found["hidden", name].rows)[README_CASE[0], "all"] for name in ("default", "kept")]
    lines = [("stock loss", "1", "1", "1")]
    for name, key, stock, figure, kinds in (
        ("`causal_lm_loss`", (losses.OWN, "all"), (losses.STOCK, "all"), "released", of_logits),
        ("`overwrite_logits=True`", (losses.OVER, "all"), (losses.STOCK, "all"), "released", of_logits),
        ("`source=hidden_states(model)`", hidden.OURS, hidden.STOCK, "peak", of_hidden),
    ):
        times = [harness.ratio(kind[key]["seconds"], kind[stock]["seconds"]).median for kind in kinds]
        peak = kinds[0][key][figure] / kinds[0][stock][figure]
        lines.append((name, *(f"{number:.2f}" for number in (peak, *times))))
    return harness.table(("loss", "peak memory", "time", "time, memory kept by the allocator"), lines)


def with_readme_table(text: str, results: Sequence[Result]) -> str:
    """Return the README's text with the table between its markers replaced."""
    before, rest = text.split(README_BEGIN)
    _, after = rest.split(README_END)
    return f"{before}{README_BEGIN}\n\n{readme_table(results)}\n\n{README_END}{after}"
