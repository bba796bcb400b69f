"""Metrics compared with scikit-learn, torchmetrics, evaluate and seqeval: times in turns in one process.

The memory of each is measured in a process of its own. The perplexity of evaluate takes texts and a model of its own,
so it is left out.
"""

import statistics
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import datasets
import evaluate
import numpy as np
import torch
from scipy.stats import bootstrap
from seqeval.metrics import f1_score as seqeval_f1
from seqeval.scheme import IOB2
from sklearn import metrics as sk
from torchmetrics import MetricCollection, text, wrappers
from torchmetrics import classification as multiclass

import metrics
from reducers import sample_sums

from . import harness
from .harness import Goal, Result, Row, Section, Spread, Timed, human_bytes
from .memory import resident_peak

OURS, SKLEARN, TORCHMETRICS, EVALUATE = "this project", "scikit-learn", "torchmetrics", "evaluate"
SCORES, TOKENS = "seven scores", "token accuracy and perplexity"
ENTITIES, REPLICATES = "strict entity F1", "95 % interval of macro-F1"
VOCABULARY, CLASSES = 256, 10
TAGS = ("O", *(f"{prefix}-{kind}" for kind in ("LOC", "MISC", "ORG", "PER") for prefix in "BI"))
ROUNDS = 3
PRELOADED = ["evaluate", "torchmetrics.text", "torchmetrics.classification", "seqeval.metrics", "metrics", "reducers"]


# Slow contenders make `few` replicates and score one `part`-th of the batches of tokens.
Sizes = namedtuple("Sizes", "labels batches batch length sentences samples replicates few part")
FULL = Sizes(1_000_000, 320, 64, 512, sentences=33_334, samples=100_000, replicates=1000, few=10, part=20)
QUICK = Sizes(1_000, 2, 2, 8, sentences=20, samples=200, replicates=20, few=2, part=2)

Scores = dict[str, float]


@dataclass(frozen=True)
class Contender:
    """One way to compute scores; the whole task takes `scale` times what `run` does."""

    name: str
    run: Callable[[], Scores]
    scale: int = 1


class EvaluateScore(evaluate.Metric):
    """A function of scikit-learn or seqeval as a metric of evaluate, which would download its own from a hub."""

    def __init__(self, name: str, score: Callable[..., float], value: Any) -> None:
        self.score_name, self.score, self.value = name, score, value
        super().__init__(keep_in_memory=True, experiment_id=name)

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": self.value, "references": self.value})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions: Any, references: Any) -> Scores:
        return {self.score_name: float(self.score(references, predictions))}


macro_f1 = partial(sk.f1_score, average="macro")
SKLEARN_SCORES: dict[str, Callable[..., float]] = {
    "accuracy": sk.accuracy_score,
    "balanced_accuracy": sk.balanced_accuracy_score,
    "matthews_correlation": sk.matthews_corrcoef,
    "cohen_kappa": sk.cohen_kappa_score,
    "precision_macro": partial(sk.precision_score, average="macro"),
    "recall_macro": partial(sk.recall_score, average="macro"),
    "f1_macro": macro_f1,
}


MACRO = {"num_classes": CLASSES, "average": "macro"}
TORCHMETRICS_SCORES = {
    "accuracy": multiclass.MulticlassAccuracy(CLASSES, average="micro"),
    "balanced_accuracy": multiclass.MulticlassAccuracy(**MACRO),
    "matthews_correlation": multiclass.MulticlassMatthewsCorrCoef(CLASSES),
    "cohen_kappa": multiclass.MulticlassCohenKappa(CLASSES),
    "precision_macro": multiclass.MulticlassPrecision(**MACRO),
    "recall_macro": multiclass.MulticlassRecall(**MACRO),
    "f1_macro": multiclass.MulticlassF1Score(**MACRO),
}


def class_ways(quick: bool) -> list[Contender]:
    """Score predictions with an accuracy of about 3/4, for labels of unequal frequency."""
    generator, count = np.random.default_rng(0), (QUICK if quick else FULL).labels
    labels = generator.choice(CLASSES, count, p=generator.dirichlet(np.full(CLASSES, 5.0)))
    ids = np.where(generator.random(count) < 0.75, labels, generator.integers(0, CLASSES, count))
    metric = metrics.classification(CLASSES)
    collection = MetricCollection(TORCHMETRICS_SCORES)  # whose members share one confusion matrix where they can
    value = datasets.Value("int32")
    together = evaluate.combine([EvaluateScore(name, score, value) for name, score in SKLEARN_SCORES.items()])

    def ours() -> Scores:
        found = metric(SimpleNamespace(predictions=ids, label_ids=labels))
        return {name: found[name] for name in SKLEARN_SCORES}

    def with_torchmetrics() -> Scores:
        collection.reset()
        collection.update(torch.from_numpy(ids), torch.from_numpy(labels))
        return {name: float(value) for name, value in collection.compute().items()}

    return [
        Contender(OURS, ours),
        Contender(SKLEARN, lambda: {name: score(labels, ids) for name, score in SKLEARN_SCORES.items()}),
        Contender(TORCHMETRICS, with_torchmetrics),
        Contender(EVALUATE, lambda: together.compute(predictions=ids, references=labels)),
    ]


def token_ways(quick: bool) -> list[Contender]:
    """Score the same batch of logits repeatedly, as an evaluation loop passes its batches."""
    sizes = QUICK if quick else FULL
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(sizes.batch, sizes.length, VOCABULARY, generator=generator)
    labels = torch.randint(VOCABULARY, (sizes.batch, sizes.length), generator=generator)
    labels[:, :2] = -100
    there = labels != -100

    def ours() -> Scores:
        metric = metrics.build(metrics.language_modeling(), num_samples=sizes.batches * sizes.batch)
        scores: Scores = {}
        for step in range(sizes.batches):
            reduced = SimpleNamespace(predictions=sample_sums(logits, labels, shift=0), label_ids=labels)
            scores = metric(reduced, compute_result=step == sizes.batches - 1)
        return {name: scores[name] for name in ("token_accuracy", "perplexity")}

    def with_torchmetrics() -> Scores:
        accuracy = multiclass.MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100, validate_args=False)
        perplexity = text.Perplexity(ignore_index=-100)
        for _ in range(sizes.batches):
            accuracy.update(logits.flatten(0, 1), labels.flatten())
            perplexity.update(logits, labels)
        return {"token_accuracy": accuracy.compute().item(), "perplexity": perplexity.compute().item()}

    def with_sklearn() -> Scores:
        nll, right, tokens = 0.0, 0.0, 0
        for _ in range(sizes.batches // sizes.part):
            truth, scored = labels[there].numpy(), logits[there]
            nll += sk.log_loss(truth, scored.softmax(-1).numpy(), labels=range(VOCABULARY), normalize=False)
            right += sk.accuracy_score(truth, scored.argmax(-1).numpy(), normalize=False)
            tokens += len(truth)
        return {"token_accuracy": right / tokens, "perplexity": float(np.exp(nll / tokens))}

    def with_evaluate() -> Scores:
        module = EvaluateScore("score", sk.accuracy_score, datasets.Value("int32"))
        for _ in range(sizes.batches // sizes.part):
            module.add_batch(predictions=logits[there].argmax(-1).numpy(), references=labels[there].numpy())
        return {"token_accuracy": module.compute()["score"]}

    return [
        Contender(OURS, ours),
        Contender(TORCHMETRICS, with_torchmetrics),
        Contender(SKLEARN, with_sklearn, sizes.part),
        Contender("evaluate, accuracy alone", with_evaluate, sizes.part),
    ]


def entity_ways(quick: bool) -> list[Contender]:
    """Score tags of which a seventh is in entities and a tenth is wrong."""
    sizes = QUICK if quick else FULL
    generator = np.random.default_rng(0)
    shape = sizes.sentences, 30
    labels = np.where(generator.random(shape) < 1 / 7, generator.integers(1, len(TAGS), shape), 0)
    ids = np.where(generator.random(shape) < 0.9, labels, generator.integers(0, len(TAGS), shape))
    metric = metrics.entity_f1(dict(enumerate(TAGS)), scheme="IOB2")
    true, found = ([[TAGS[place] for place in row] for row in table.tolist()] for table in (labels, ids))
    strict = partial(seqeval_f1, mode="strict", scheme=IOB2)

    def ours() -> Scores:
        return {"entity_f1": metric(SimpleNamespace(predictions=ids, label_ids=labels))["entity_f1"]}

    def with_evaluate() -> Scores:
        module = EvaluateScore("score", strict, datasets.Sequence(datasets.Value("string")))
        module.add_batch(predictions=found, references=true)
        return {"entity_f1": module.compute()["score"]}

    return [
        Contender(OURS, ours),
        Contender("seqeval", lambda: {"entity_f1": float(strict(true, found))}),
        Contender(EVALUATE, with_evaluate),
    ]


def replicate_ways(quick: bool) -> list[Contender]:
    """Draw samples with replacement and score each draw."""
    sizes = QUICK if quick else FULL
    generator = np.random.default_rng(0)
    labels = generator.integers(0, CLASSES, sizes.samples)
    ids = np.where(generator.random(sizes.samples) < 0.75, labels, generator.integers(0, CLASSES, sizes.samples))
    metric = metrics.bootstrap(metrics.classification(CLASSES), n=sizes.replicates)

    def ours() -> Scores:
        return metric(SimpleNamespace(predictions=ids, label_ids=labels))

    def by_a_loop() -> Scores:
        draws = [generator.integers(sizes.samples, size=sizes.samples) for _ in range(sizes.few)]
        return interval(np.quantile([macro_f1(labels[draw], ids[draw]) for draw in draws], (0.025, 0.975)))

    def with_torchmetrics() -> Scores:
        ends = torch.tensor([0.025, 0.975])
        score = multiclass.MulticlassF1Score(CLASSES)
        replicates = wrappers.BootStrapper(score, num_bootstraps=sizes.few, quantile=ends)
        replicates.update(torch.from_numpy(ids), torch.from_numpy(labels))
        return interval(replicates.compute()["quantile"].numpy())

    def with_evaluate() -> Scores:
        """Compute the interval as evaluate's Evaluator does."""
        options = {"paired": True, "vectorized": False, "method": "percentile", "n_resamples": sizes.few}
        return interval(bootstrap((labels, ids), macro_f1, **options).confidence_interval)

    def interval(ends: Any) -> Scores:
        return dict(zip(("f1_macro_low", "f1_macro_high"), map(float, ends), strict=True))

    scale = sizes.replicates // sizes.few
    return [
        Contender(OURS, ours),
        Contender("scikit-learn in a loop", by_a_loop, scale),
        Contender(TORCHMETRICS, with_torchmetrics, scale),
        Contender("evaluate, through SciPy", with_evaluate, scale),
    ]


TASKS = {SCORES: class_ways, TOKENS: token_ways, ENTITIES: entity_ways, REPLICATES: replicate_ways}

Make = Callable[[bool], list[Contender]]  # quick -> contenders, ours first


def measure(task: str, make: Make, *, quick: bool) -> list[Row]:
    """Return a row per contender; scores are compared with ours where the whole task was done."""
    harness.progress(f"  {task}")
    contenders = make(quick)
    found: dict[str, Scores] = {}

    def timed(one: Contender) -> Timed:
        return Timed(one.name, lambda: None, lambda _: found.__setitem__(one.name, one.run()))

    seconds = harness.interleave([timed(one) for one in contenders], rounds=1 if quick else ROUNDS)
    rows = []
    for place, one in enumerate(contenders):
        difference = max(abs(value - found[OURS][key]) for key, value in found[one.name].items())
        row = {"task": task, "with": one.name, "scale": one.scale, "memory": _memory(make, place, quick)}
        row["seconds"] = [one.scale * value for value in seconds[one.name]]
        rows.append(row | {"difference": difference if one.scale == 1 else None})
    return rows


def _memory(make: Make, place: int, quick: bool) -> int:
    """Measure in a fork of a process that has only imported the libraries, which takes longer than most runs."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(_peak, make, place, quick).result()


def _peak(make: Make, place: int, quick: bool) -> int:
    make(True)[place].run()  # so that what is imported and cached the first time is not counted
    return resident_peak(make(quick)[place].run)


def run(*, quick: bool, device: str) -> list[Row]:
    """Measure on the host, where the Trainer puts the arrays on any device."""
    return [row for task, ways in TASKS.items() for row in measure(task, ways, quick=quick)]


TIME_LIMITS = {(SCORES, SKLEARN): 1 / 20, (ENTITIES, "seqeval"): 1 / 50}  # of our time over a peer's, else 1


def goals(result: Result) -> list[Goal]:
    found, goals = {(row["task"], row["with"]): row for row in result.rows}, []
    for (task, name), row in found.items():
        if name != OURS:
            own = found[task, OURS]
            time = harness.ratio(own["seconds"], row["seconds"]).median
            goals.append(Goal(f"{task}: time over {name}", TIME_LIMITS.get((task, name), 1.0), time))
            goals.append(Goal(f"{task}: memory over {name}", 1.0, own["memory"] / max(row["memory"], 1)))
    return [
        *goals,
        Goal(f"{SCORES}: largest difference from {SKLEARN}", 1e-12, found[SCORES, SKLEARN]["difference"]),
        Goal(f"{REPLICATES}: seconds", 1.0, statistics.median(found[REPLICATES, OURS]["seconds"])),
    ]


def tables(result: Result) -> str:
    return harness.table(("score", "with", "time, ms", "memory", "difference"), [*map(_cells, result.rows)])


def _cells(row: Row) -> list[str]:
    times = Spread.of([1000 * value for value in row["seconds"]])
    scaled = f" (x {row['scale']})" if row["scale"] > 1 else ""
    difference = "" if row["difference"] is None else f"{row['difference']:.1g}"
    return [row["task"], row["with"] + scaled, f"{times:.1f}", human_bytes(row["memory"]), difference]


SECTION = Section(
    title="Metrics: compared with other libraries",
    benchmark="metrics",
    about=f"Seven scores: {', '.join(SKLEARN_SCORES)}; {CLASSES} classes, {FULL.labels:,} labels; scikit-learn is "
    f"called once per score. Tokens: {FULL.batches * FULL.batch * FULL.length:,} rows of {VOCABULARY} logits, a batch "
    f"of {FULL.batch} x {FULL.length} at a time. Entities: {FULL.sentences * 30:,} tokens. Intervals: "
    f"{FULL.replicates:,} replicates of {FULL.samples:,} samples. *Memory* is the growth of the resident set above the "
    "arrays that are scored, in a process that has only scored a little before. A line marked `x n` did the n-th part "
    "of the task: its time is multiplied, its memory is not.",
    tables=tables,
    goals=goals,
    packages=("numpy", "scipy", "scikit-learn", "torch", "torchmetrics", "evaluate", "seqeval"),
)

if __name__ == "__main__":
    harness.main(SECTION, run)
