"""Metrics of tokens, entities and replicates, beside the libraries that are used for them.

What would take minutes is run on a part and scaled to the whole; its row says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from seqeval.metrics import f1_score as seqeval_f1
from seqeval.scheme import IOB2
from sklearn.metrics import f1_score
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.text import Perplexity
from torchmetrics.wrappers import BootStrapper

from metrics import bootstrap, build, classification, entity_f1, language_modeling
from reducers import sample_sums

from . import harness
from .harness import Goal, Result, Row, Spread, Timed, human_bytes
from .memory import resident_peak

TOKENS, ENTITIES, REPLICATES = "token accuracy and perplexity", "strict entity F1", "95 % interval of macro-F1"
OURS = "this project"
VOCABULARY, CLASSES = 256, 10
TAGS = ("O", *(f"{prefix}-{kind}" for kind in ("LOC", "MISC", "ORG", "PER") for prefix in "BI"))


@dataclass(frozen=True)
class Sizes:
    """How much is scored, and how many replicates the slow ones make."""

    batches: int
    batch: int
    length: int
    sentences: int
    samples: int
    replicates: int
    few: int
    rounds: int


FULL = Sizes(305, 64, 512, sentences=33_334, samples=100_000, replicates=1000, few=10, rounds=3)
QUICK = Sizes(2, 2, 8, sentences=20, samples=200, replicates=20, few=2, rounds=1)


@dataclass(frozen=True)
class Contender:
    """One way to a score: `scale` is how much more there would be to do."""

    task: str
    name: str
    run: Callable[[], dict[str, float]]
    scale: int = 1


# --- what is compared -------------------------------------------------------------------------------------------------


def token_contenders(sizes: Sizes) -> list[Contender]:
    """The same batch of logits over and over, as an evaluation loop hands over its batches."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(sizes.batch, sizes.length, VOCABULARY, generator=generator)
    labels = torch.randint(VOCABULARY, (sizes.batch, sizes.length), generator=generator)
    labels[:, :2] = -100

    def ours() -> dict[str, float]:
        metric = build(language_modeling(), num_samples=sizes.batches * sizes.batch)
        scores: dict[str, float] = {}
        for step in range(sizes.batches):
            reduced = SimpleNamespace(predictions=sample_sums(logits, labels, shift=0), label_ids=labels)
            scores = metric(reduced, compute_result=step == sizes.batches - 1)
        return scores

    def theirs() -> dict[str, float]:
        accuracy = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100, validate_args=False)
        perplexity = Perplexity(ignore_index=-100)
        for _ in range(sizes.batches):
            accuracy.update(logits.flatten(0, 1), labels.flatten())
            perplexity.update(logits, labels)
        return {"token_accuracy": accuracy.compute().item(), "perplexity": perplexity.compute().item()}

    return [Contender(TOKENS, OURS, ours), Contender(TOKENS, "torchmetrics", theirs)]


def entity_contenders(sizes: Sizes) -> list[Contender]:
    """A seventh of the tokens lies in entities, and a tenth of the tags is exchanged."""
    generator = np.random.default_rng(0)
    shape = sizes.sentences, 30
    labels = np.where(generator.random(shape) < 1 / 7, generator.integers(1, len(TAGS), shape), 0)
    ids = np.where(generator.random(shape) < 0.9, labels, generator.integers(0, len(TAGS), shape))
    metric = entity_f1(dict(enumerate(TAGS)), scheme="IOB2")
    words = [[[TAGS[place] for place in row] for row in table.tolist()] for table in (labels, ids)]

    def theirs() -> dict[str, float]:
        return {"entity_f1": float(seqeval_f1(*words, mode="strict", scheme=IOB2))}

    evaluated = SimpleNamespace(predictions=ids, label_ids=labels)
    return [Contender(ENTITIES, OURS, partial(metric, evaluated)), Contender(ENTITIES, "seqeval", theirs)]


def replicate_contenders(sizes: Sizes) -> list[Contender]:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, CLASSES, sizes.samples)
    ids = np.where(generator.random(sizes.samples) < 0.75, labels, generator.integers(0, CLASSES, sizes.samples))
    metric = bootstrap(classification(CLASSES), n=sizes.replicates)

    def by_a_loop() -> dict[str, float]:
        draws = [generator.integers(sizes.samples, size=sizes.samples) for _ in range(sizes.few)]
        scores = [f1_score(labels[draw], ids[draw], average="macro") for draw in draws]
        return dict(zip(("f1_macro_low", "f1_macro_high"), np.quantile(scores, (0.025, 0.975)).tolist(), strict=True))

    def by_torchmetrics() -> dict[str, float]:
        replicates = BootStrapper(
            MulticlassF1Score(CLASSES), num_bootstraps=sizes.few, quantile=torch.tensor([0.025, 0.975])
        )
        replicates.update(torch.from_numpy(ids), torch.from_numpy(labels))
        low, high = replicates.compute()["quantile"].tolist()
        return {"f1_macro_low": low, "f1_macro_high": high}

    scale = sizes.replicates // sizes.few
    evaluated = SimpleNamespace(predictions=ids, label_ids=labels)
    return [
        Contender(REPLICATES, OURS, partial(metric, evaluated)),
        Contender(REPLICATES, "scikit-learn in a loop", by_a_loop, scale),
        Contender(REPLICATES, "torchmetrics", by_torchmetrics, scale),
    ]


# --- measuring --------------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[Sizes], list[Contender]]] = {
    TOKENS: token_contenders,
    ENTITIES: entity_contenders,
    REPLICATES: replicate_contenders,
}


def run(*, quick: bool, device: str) -> list[Row]:
    """Everything lies in the host's memory, where the Trainer puts it, whatever the device."""
    sizes = QUICK if quick else FULL
    rows: list[Row] = []
    for task, make in MAKERS.items():
        harness.progress(f"metrics_tasks: {task}")
        contenders = make(sizes)
        timed = [Timed(one.name, tuple, lambda _, one=one: one.run()) for one in contenders]
        seconds = harness.interleave(timed, rounds=sizes.rounds)
        exact = contenders[0].run()
        for one in contenders:
            scores = one.run()
            rows.append(
                {
                    "task": task,
                    "with": one.name,
                    "scale": one.scale,
                    "seconds": [one.scale * value for value in seconds[one.name]],
                    "memory": resident_peak(one.run),
                    "difference": max(abs(value - exact[key]) for key, value in scores.items()),
                }
            )
    return rows


# --- the report -------------------------------------------------------------------------------------------------------


def report(results: Sequence[Result]) -> str:
    parts = [
        f"Tokens: {FULL.batches * FULL.batch * FULL.length:,} logits rows of {VOCABULARY}, a batch of {FULL.batch} x "
        f"{FULL.length} at a time. Entities: {FULL.sentences * 30:,} tokens. Intervals: {FULL.replicates:,} replicates "
        f"of {FULL.samples:,} samples. Memory is what a run adds at its peak.",
    ]
    for result in results:
        parts += [f"### {harness.title(result)}", harness.provenance(result)]
        if not result.quick:
            parts.append(harness.goals_table(goals(result.rows)))
        parts.append(tasks_table(result.rows))
    return "\n\n".join(parts)


def goals(rows: Sequence[Row]) -> list[Goal]:
    ours = {row["task"]: row for row in rows if row["with"] == OURS}
    limits = {ENTITIES: 1 / 50}
    return [
        Goal(
            f"{row['task']}: time over {row['with']}",
            limits.get(row["task"], 1.0),
            harness.ratio(ours[row["task"]]["seconds"], row["seconds"]).median,
        )
        for row in rows
        if row["with"] != OURS
    ]


def tasks_table(rows: Sequence[Row]) -> str:
    header = ("score", "with", "time, ms", "memory", "difference")
    return harness.table(header, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    times = Spread.of([1000 * value for value in row["seconds"]])
    scaled = f" (x {row['scale']})" if row["scale"] > 1 else ""
    return [row["task"], row["with"] + scaled, f"{times:.1f}", human_bytes(row["memory"]), f"{row['difference']:.1g}"]


PACKAGES = ("numpy", "scikit-learn", "torch", "torchmetrics", "seqeval")

if __name__ == "__main__":
    harness.main("metrics_tasks", run, PACKAGES)
