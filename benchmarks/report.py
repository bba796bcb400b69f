"""The report, `RESULTS.md`: its sections, written from result files alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import charts, contenders, evaluation, hidden, hidden_step, leads, losses, metrics, metrics_tasks, peers, proof
from . import scale as on_paper
from .harness import Result, title
from .leads import Comparison


@dataclass(frozen=True)
class Section:
    """A heading, the name its result files begin with, and what writes the Markdown below it from those results.

    `python -m benchmarks` measures it once under each of `allocators`; one without any is measured by a command of its
    own. `comparison` finds where somebody else's figures are better than ours.
    """

    title: str
    benchmark: str
    render: Callable[[Sequence[Result]], str]
    allocators: Sequence[str] = ("default",)
    comparison: Comparison | None = None


LOSSES = Comparison(
    name="loss",
    case={"dtype": "{}", "vocabulary": "V {:,}", "supervised": "labels: {}"},
    figures={"time": "seconds", "extra memory": "held", "memory of a step": "released", "error": "gradient_error"},
    ours=lambda row: losses.OWN if row["loss"] == losses.STOCK else None,
)
PEERS = Comparison(
    name="loss",
    case={"field": "{}", "vocabulary": "V {:,}", "tokens": "{:,} tokens"},
    figures={
        "time": "seconds",
        "memory": "peak",
        "value's error": "value_error",
        "gradient's error": "gradient_error",
        "weight gradient's error": "weight_error",
    },
    ours=peers.ours_beside,
)
HIDDEN = Comparison(
    name="loss",
    case={"dtype": "{}", "supervised": "labels: {}"},
    figures={
        "time": "seconds",
        "memory": "peak",
        "value's error": "value_error",
        "gradient's error": "hidden_error",
        "weight gradient's error": "weight_error",
    },
    ours=lambda row: None if row["loss"] == hidden.OURS else hidden.OURS,
)
EVALUATION = Comparison(
    name="setup",
    case={"samples": "{:,} samples", "tokens": "{:,} tokens each"},
    figures={"time": "seconds", "process": "resident", "kept": "kept"},
    ours=lambda row: evaluation.SUMS if row["setup"] in evaluation.WITHOUT_US else None,
)
SCORES = Comparison(
    name="with",
    case={"task": "{}"},
    figures={"time": "seconds", "memory": "memory"},
    ours=lambda row: None if row["with"] == contenders.OURS else contenders.OURS,
)

# Speed depends on the allocator; what an evaluation keeps does not.
SECTIONS = (
    Section("Losses: forward and backward beside the stock loss", "losses", losses.report, ("default", "kept"), LOSSES),
    Section("Losses: beside other libraries", "peers", peers.report, ("default", "kept"), PEERS),
    Section(
        "Logits that never exist: forward and backward from hidden states",
        "hidden",
        hidden.report,
        ("default", "kept"),
        HIDDEN,
    ),
    Section(
        "Logits that never exist: a real model in the Trainer",
        "hidden_step",
        hidden_step.report,
        ("default", "returned"),
    ),
    Section("Evaluation: what the stock Trainer keeps", "evaluation", evaluation.report, comparison=EVALUATION),
    Section("Metrics: seven scores of the same arrays", "metrics", metrics.report, comparison=SCORES),
    Section("Metrics: tokens, entities and intervals", "metrics_tasks", metrics_tasks.report, comparison=SCORES),
    Section("Releases of transformers and torch", "versions", proof.versions_report, ()),
    Section("Several processes and replicas", "distributed", proof.distributed_report, ()),
)


def report(results: Sequence[Result], sections: Sequence[Section] = SECTIONS) -> str:
    """The whole report; each section sees the results of its benchmark."""
    parts = [
        "# Results",
        "Written by `make bench` from the files in `results/`; no number here is typed by hand. "
        "Times are medians with quartiles of interleaved rounds in one process, ratios are taken round by round.",
    ]
    if not any(result.device == "cuda" for result in results):
        parts.append("No GPU was measured: `python -m benchmarks --device cuda` adds it where there is one.")
    parts += ["## Where a peer is better", _where_a_peer_is_better(results, sections)]
    for section in sections:
        own = [result for result in results if result.benchmark == section.benchmark]
        if own:
            parts += [f"## {section.title}", section.render(own), *charts.shown(section.benchmark, own)]
    computed = on_paper.section(results)
    if computed:
        parts += ["## Scale on paper", computed]
    return "\n\n".join(parts) + "\n"


def _where_a_peer_is_better(results: Sequence[Result], sections: Sequence[Section]) -> str:
    """First of all: every line of it is found by comparing the rows of the files."""
    found = {
        f"{section.title}; {title(result)}": [*leads.leads(result, section.comparison)]
        for section in sections
        for result in results
        if section.comparison is not None and result.benchmark == section.benchmark
    }
    return (
        "Times whose whole middle half of rounds lies below ours, bytes and errors more than a hundredth below. "
        f"Computed figures do not count.\n\n{leads.table(found)}"
    )
