"""Metrics of tokens, entities and replicates, beside the libraries that are used for them.

`evaluate` fetches its metrics from a hub; here each is the same few lines around the same function, so that nothing is
downloaded. Its perplexity takes texts and a model of its own, and is left out.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import datasets
import evaluate
import numpy as np
import torch
from scipy import stats
from seqeval.metrics import f1_score as seqeval_f1
from seqeval.scheme import IOB2
from sklearn.metrics import accuracy_score, f1_score, log_loss
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.text import Perplexity
from torchmetrics.wrappers import BootStrapper

from metrics import bootstrap, build, classification, entity_f1, language_modeling
from reducers import sample_sums

from . import contenders, harness
from .contenders import OURS, Contender
from .harness import Goal, Result, Row

TOKENS, ENTITIES, REPLICATES = "token accuracy and perplexity", "strict entity F1", "95 % interval of macro-F1"
VOCABULARY, CLASSES = 256, 10
TAGS = ("O", *(f"{prefix}-{kind}" for kind in ("LOC", "MISC", "ORG", "PER") for prefix in "BI"))
ROUNDS = 3


@dataclass(frozen=True)
class Sizes:
    """How much is scored, how many replicates the slow ones make, and the part of the tokens that they score."""

    batches: int
    batch: int
    length: int
    sentences: int
    samples: int
    replicates: int
    few: int
    part: int


FULL = Sizes(320, 64, 512, sentences=33_334, samples=100_000, replicates=1000, few=10, part=20)
QUICK = Sizes(2, 2, 8, sentences=20, samples=200, replicates=20, few=2, part=2)


def sizes_of(quick: bool) -> Sizes:
    return QUICK if quick else FULL


class Score(evaluate.Metric):
    """One function as a metric of evaluate."""

    def __init__(self, score: Callable[..., float], value: Any) -> None:
        self.score, self.value = score, value
        super().__init__(keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": self.value, "references": self.value})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"score": float(self.score(references, predictions))}


# --- what is compared -------------------------------------------------------------------------------------------------


def token_ways(quick: bool) -> list[Contender]:
    """The same batch of logits over and over, as an evaluation loop hands over its batches."""
    sizes = sizes_of(quick)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(sizes.batch, sizes.length, VOCABULARY, generator=generator)
    labels = torch.randint(VOCABULARY, (sizes.batch, sizes.length), generator=generator)
    labels[:, :2] = -100
    there = labels != -100

    def ours() -> dict[str, float]:
        metric = build(language_modeling(), num_samples=sizes.batches * sizes.batch)
        scores: dict[str, float] = {}
        for step in range(sizes.batches):
            reduced = SimpleNamespace(predictions=sample_sums(logits, labels, shift=0), label_ids=labels)
            scores = metric(reduced, compute_result=step == sizes.batches - 1)
        return {name: scores[name] for name in ("token_accuracy", "perplexity")}

    def with_torchmetrics() -> dict[str, float]:
        accuracy = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100, validate_args=False)
        perplexity = Perplexity(ignore_index=-100)
        for _ in range(sizes.batches):
            accuracy.update(logits.flatten(0, 1), labels.flatten())
            perplexity.update(logits, labels)
        return {"token_accuracy": accuracy.compute().item(), "perplexity": perplexity.compute().item()}

    def with_sklearn() -> dict[str, float]:
        nll, right, tokens = 0.0, 0.0, 0
        for _ in range(sizes.batches // sizes.part):
            truth, scored = labels[there].numpy(), logits[there]
            nll += log_loss(truth, scored.softmax(-1).numpy(), labels=range(VOCABULARY), normalize=False)
            right += accuracy_score(truth, scored.argmax(-1).numpy(), normalize=False)
            tokens += len(truth)
        return {"token_accuracy": right / tokens, "perplexity": float(np.exp(nll / tokens))}

    def with_evaluate() -> dict[str, float]:
        module = Score(accuracy_score, datasets.Value("int32"))
        for _ in range(sizes.batches // sizes.part):
            module.add_batch(predictions=logits[there].argmax(-1).numpy(), references=labels[there].numpy())
        return {"token_accuracy": module.compute()["score"]}

    return [
        Contender(OURS, ours),
        Contender("torchmetrics", with_torchmetrics),
        Contender("scikit-learn", with_sklearn, sizes.part),
        Contender("evaluate, accuracy alone", with_evaluate, sizes.part),
    ]


def entity_ways(quick: bool) -> list[Contender]:
    """A seventh of the tokens lies in entities, and a tenth of the tags is exchanged."""
    sizes = sizes_of(quick)
    generator = np.random.default_rng(0)
    shape = sizes.sentences, 30
    labels = np.where(generator.random(shape) < 1 / 7, generator.integers(1, len(TAGS), shape), 0)
    ids = np.where(generator.random(shape) < 0.9, labels, generator.integers(0, len(TAGS), shape))
    metric = entity_f1(dict(enumerate(TAGS)), scheme="IOB2")
    true, found = ([[TAGS[place] for place in row] for row in table.tolist()] for table in (labels, ids))
    strict = partial(seqeval_f1, mode="strict", scheme=IOB2)

    def ours() -> dict[str, float]:
        return {"entity_f1": metric(SimpleNamespace(predictions=ids, label_ids=labels))["entity_f1"]}

    def with_evaluate() -> dict[str, float]:
        module = Score(strict, datasets.Sequence(datasets.Value("string")))
        module.add_batch(predictions=found, references=true)
        return {"entity_f1": module.compute()["score"]}

    return [
        Contender(OURS, ours),
        Contender("seqeval", lambda: {"entity_f1": float(strict(true, found))}),
        Contender("evaluate", with_evaluate),
    ]


def replicate_ways(quick: bool) -> list[Contender]:
    """Samples are drawn with replacement, and the score is computed again for each draw."""
    sizes = sizes_of(quick)
    generator = np.random.default_rng(0)
    labels = generator.integers(0, CLASSES, sizes.samples)
    ids = np.where(generator.random(sizes.samples) < 0.75, labels, generator.integers(0, CLASSES, sizes.samples))
    metric = bootstrap(classification(CLASSES), n=sizes.replicates)
    macro = partial(f1_score, average="macro")

    def ours() -> dict[str, float]:
        return metric(SimpleNamespace(predictions=ids, label_ids=labels))

    def by_a_loop() -> dict[str, float]:
        draws = [generator.integers(sizes.samples, size=sizes.samples) for _ in range(sizes.few)]
        return interval(np.quantile([macro(labels[draw], ids[draw]) for draw in draws], (0.025, 0.975)))

    def with_torchmetrics() -> dict[str, float]:
        ends = torch.tensor([0.025, 0.975])
        replicates = BootStrapper(MulticlassF1Score(CLASSES), num_bootstraps=sizes.few, quantile=ends)
        replicates.update(torch.from_numpy(ids), torch.from_numpy(labels))
        return interval(replicates.compute()["quantile"].numpy())

    def with_evaluate() -> dict[str, float]:
        """What its Evaluator does for a confidence interval."""
        options = {"paired": True, "vectorized": False, "method": "percentile", "n_resamples": sizes.few}
        found = stats.bootstrap((labels, ids), macro, **options)
        return interval(found.confidence_interval)

    def interval(ends: Any) -> dict[str, float]:
        return dict(zip(("f1_macro_low", "f1_macro_high"), map(float, ends), strict=True))

    scale = sizes.replicates // sizes.few
    return [
        Contender(OURS, ours),
        Contender("scikit-learn in a loop", by_a_loop, scale),
        Contender("torchmetrics", with_torchmetrics, scale),
        Contender("evaluate, through SciPy", with_evaluate, scale),
    ]


TASKS = {TOKENS: token_ways, ENTITIES: entity_ways, REPLICATES: replicate_ways}

# --- measuring and reporting ------------------------------------------------------------------------------------------


def run(*, quick: bool, device: str) -> list[Row]:
    """Everything lies in the host's memory, where the Trainer puts it, whatever the device."""
    return [row for task, ways in TASKS.items() for row in contenders.measure(task, ways, quick=quick, rounds=ROUNDS)]


def report(results: Sequence[Result]) -> str:
    about = (
        f"Tokens: {FULL.batches * FULL.batch * FULL.length:,} rows of {VOCABULARY} logits, a batch of {FULL.batch} x "
        f"{FULL.length} at a time. Entities: {FULL.sentences * 30:,} tokens. Intervals: {FULL.replicates:,} replicates "
        f"of {FULL.samples:,} samples."
    )
    return contenders.report(about, results, limits={(ENTITIES, "seqeval"): 1 / 50}, more=in_a_second)


def in_a_second(rows: Mapping[tuple[str, str], Row]) -> list[Goal]:
    return [Goal(f"{REPLICATES}: seconds", 1.0, statistics.median(rows[REPLICATES, OURS]["seconds"]))]


PACKAGES = ("numpy", "scipy", "scikit-learn", "torch", "torchmetrics", "evaluate", "seqeval")

if __name__ == "__main__":
    harness.main("metrics_tasks", run, PACKAGES)
