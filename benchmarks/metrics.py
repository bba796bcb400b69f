"""Seven scores of a million labels: this project's `classification` beside scikit-learn, torchmetrics and evaluate.

`evaluate` fetches its metrics from a hub; here each is the same few lines around the same function of scikit-learn, so
that nothing is downloaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import datasets
import evaluate
import numpy as np
import sklearn.metrics
import torch
from torchmetrics import MetricCollection
from torchmetrics import classification as torchmetrics_classification

from metrics import classification

from . import harness
from .harness import Goal, Result, Row, Spread, Timed

CLASSES = 10
OURS, SKLEARN, TORCHMETRICS, EVALUATE = "classification", "scikit-learn", "torchmetrics", "evaluate"

# Of each score the function of scikit-learn and its options.
SCORES: dict[str, Callable[..., float]] = {
    "accuracy": sklearn.metrics.accuracy_score,
    "balanced_accuracy": sklearn.metrics.balanced_accuracy_score,
    "matthews_correlation": sklearn.metrics.matthews_corrcoef,
    "cohen_kappa": sklearn.metrics.cohen_kappa_score,
    "precision_macro": partial(sklearn.metrics.precision_score, average="macro"),
    "recall_macro": partial(sklearn.metrics.recall_score, average="macro"),
    "f1_macro": partial(sklearn.metrics.f1_score, average="macro"),
}


@dataclass(frozen=True)
class Sizes:
    labels: int
    rounds: int


FULL = Sizes(labels=1_000_000, rounds=3)
QUICK = Sizes(labels=1_000, rounds=1)

# --- what is compared -------------------------------------------------------------------------------------------------


def with_classification() -> Callable[[np.ndarray, np.ndarray], dict[str, float]]:
    metric = classification(CLASSES)
    return lambda ids, labels: metric(SimpleNamespace(predictions=ids, label_ids=labels))


def with_sklearn() -> Callable[[np.ndarray, np.ndarray], dict[str, float]]:
    return lambda ids, labels: {name: score(labels, ids) for name, score in SCORES.items()}


def with_torchmetrics() -> Callable[[np.ndarray, np.ndarray], dict[str, float]]:
    """A collection, which shares one confusion matrix where its members can."""
    macro = {"num_classes": CLASSES, "average": "macro"}
    collection = MetricCollection(
        {
            "accuracy": torchmetrics_classification.MulticlassAccuracy(CLASSES, average="micro"),
            "balanced_accuracy": torchmetrics_classification.MulticlassAccuracy(**macro),
            "matthews_correlation": torchmetrics_classification.MulticlassMatthewsCorrCoef(CLASSES),
            "cohen_kappa": torchmetrics_classification.MulticlassCohenKappa(CLASSES),
            "precision_macro": torchmetrics_classification.MulticlassPrecision(**macro),
            "recall_macro": torchmetrics_classification.MulticlassRecall(**macro),
            "f1_macro": torchmetrics_classification.MulticlassF1Score(**macro),
        }
    )

    def scores(ids: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        collection.reset()
        collection.update(torch.from_numpy(ids), torch.from_numpy(labels))
        return {name: float(value) for name, value in collection.compute().items()}

    return scores


class Score(evaluate.Metric):
    """One function of scikit-learn as a metric of evaluate."""

    def __init__(self, name: str, score: Callable[..., float]) -> None:
        self.score_name, self.score = name, score
        super().__init__(keep_in_memory=True, experiment_id=name)

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {self.score_name: float(self.score(references, predictions))}


def with_evaluate() -> Callable[[np.ndarray, np.ndarray], dict[str, float]]:
    together = evaluate.combine([Score(name, score) for name, score in SCORES.items()])
    return lambda ids, labels: together.compute(predictions=ids, references=labels)


MAKERS = {OURS: with_classification, SKLEARN: with_sklearn, TORCHMETRICS: with_torchmetrics, EVALUATE: with_evaluate}

# --- measuring --------------------------------------------------------------------------------------------------------


def make_ids(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Predictions that are right three times out of four, and labels of unequal frequency."""
    generator = np.random.default_rng(0)
    labels = generator.choice(CLASSES, sizes.labels, p=generator.dirichlet(np.full(CLASSES, 5.0)))
    ids = np.where(generator.random(sizes.labels) < 0.75, labels, generator.integers(0, CLASSES, sizes.labels))
    return ids.astype(np.int64), labels.astype(np.int64)


def run(*, quick: bool, device: str) -> list[Row]:
    """The arrays lie in the host's memory, where the Trainer puts them, whatever the device."""
    sizes = QUICK if quick else FULL
    ids, labels = make_ids(sizes)
    scores = {name: make() for name, make in MAKERS.items()}
    harness.progress(f"metrics: {len(SCORES)} scores of {sizes.labels:,} labels")
    seconds = harness.interleave(
        [
            Timed(name, partial(tuple, (ids, labels)), lambda arrays, score=score: score(*arrays))
            for name, score in scores.items()
        ],
        rounds=sizes.rounds,
    )
    exact = scores[SKLEARN](ids, labels)
    return [
        {"with": name, "labels": sizes.labels, "seconds": seconds[name], "error": error(score(ids, labels), exact)}
        for name, score in scores.items()
    ]


def error(scores: dict[str, float], exact: dict[str, float]) -> float:
    """The largest difference from scikit-learn's scores, all of which must be there."""
    return max(abs(scores[name] - value) for name, value in exact.items())


# --- the report -------------------------------------------------------------------------------------------------------


def report(results: Sequence[Result]) -> str:
    parts = [
        f"{', '.join(SCORES)}; {CLASSES} classes. scikit-learn is called once for each score.",
    ]
    for result in results:
        parts += [f"### {harness.title(result)}", harness.provenance(result)]
        if not result.quick:
            parts.append(harness.goals_table(goals(result.rows)))
        parts.append(metrics_table(result.rows))
    return "\n\n".join(parts)


def goals(rows: Sequence[Row]) -> list[Goal]:
    seconds = {row["with"]: row["seconds"] for row in rows}
    limits = {SKLEARN: 1 / 20, TORCHMETRICS: 1.0, EVALUATE: 1.0}
    times = [
        Goal(f"time over {name}", limit, harness.ratio(seconds[OURS], seconds[name]).median)
        for name, limit in limits.items()
    ]
    return [*times, Goal("largest difference from scikit-learn", 1e-12, rows[0]["error"])]


def metrics_table(rows: Sequence[Row]) -> str:
    baseline = next(row["seconds"] for row in rows if row["with"] == OURS)
    header = ("with", "labels", "time, ms", f"over {OURS}", "largest difference from scikit-learn")
    return harness.table(header, [_cells(row, baseline) for row in rows])


def _cells(row: Row, baseline: Sequence[float]) -> list[str]:
    times = Spread.of([1000 * value for value in row["seconds"]])
    return [
        row["with"],
        f"{row['labels']:,}",
        f"{times:.1f}",
        f"{harness.ratio(row['seconds'], baseline):.1f}",
        f"{row['error']:.1g}",
    ]


PACKAGES = ("numpy", "scikit-learn", "torch", "torchmetrics", "evaluate")

if __name__ == "__main__":
    harness.main("metrics", run, PACKAGES)
