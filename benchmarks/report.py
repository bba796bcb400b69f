"""The report, `RESULTS.md`: its sections, written from result files alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import evaluation, hidden, hidden_step, losses, metrics, metrics_tasks
from .harness import Result


@dataclass(frozen=True)
class Section:
    """A heading, the name its result files begin with, and what writes the Markdown below it from those results.

    `python -m benchmarks` measures it once under each of `allocators`; one without any is measured by a command of its
    own.
    """

    title: str
    benchmark: str
    render: Callable[[Sequence[Result]], str]
    allocators: Sequence[str] = ("default",)


# Speed depends on the allocator; what an evaluation keeps does not.
SECTIONS = (
    Section("Losses: forward and backward beside the stock loss", "losses", losses.report, ("default", "kept")),
    Section(
        "Logits that never exist: forward and backward from hidden states",
        "hidden",
        hidden.report,
        ("default", "kept"),
    ),
    Section("Logits that never exist: a real model in the Trainer", "hidden_step", hidden_step.report),
    Section("Evaluation: what the stock Trainer keeps", "evaluation", evaluation.report),
    Section("Metrics: seven scores of the same arrays", "metrics", metrics.report),
    Section("Metrics: tokens, entities and intervals", "metrics_tasks", metrics_tasks.report),
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
    for section in sections:
        own = [result for result in results if result.benchmark == section.benchmark]
        if own:
            parts += [f"## {section.title}", section.render(own)]
    return "\n\n".join(parts) + "\n"
