"""Seven scores of a million labels: this project's `classification` beside scikit-learn, torchmetrics and evaluate.

`evaluate` fetches its metrics from a hub; here each is the same few lines around the same function of scikit-learn, so
that nothing is downloaded.
"""

from collections.abc import Callable, Mapping, Sequence
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

from . import contenders, harness
from .contenders import OURS, Contender
from .harness import Goal, Result, Row

CLASSES = 10
SKLEARN, TORCHMETRICS, EVALUATE = "scikit-learn", "torchmetrics", "evaluate"
TASK = "seven scores"

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

LABELS = {True: 1_000, False: 1_000_000}  # by quick
ROUNDS = 3

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


def make_ids(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Predictions that are right three times out of four, and labels of unequal frequency."""
    generator = np.random.default_rng(0)
    labels = generator.choice(CLASSES, count, p=generator.dirichlet(np.full(CLASSES, 5.0)))
    ids = np.where(generator.random(count) < 0.75, labels, generator.integers(0, CLASSES, count))
    return ids.astype(np.int64), labels.astype(np.int64)


def ways(quick: bool) -> list[Contender]:
    """All score the same arrays; each returns just the scores that are compared."""
    arrays = make_ids(LABELS[quick])

    def seven(scores: Callable[..., dict[str, float]]) -> dict[str, float]:
        found = scores(*arrays)
        return {name: found[name] for name in SCORES}

    return [Contender(name, partial(seven, make())) for name, make in MAKERS.items()]


# --- measuring --------------------------------------------------------------------------------------------------------


def run(*, quick: bool, device: str) -> list[Row]:
    """The arrays lie in the host's memory, where the Trainer puts them, whatever the device."""
    return contenders.measure(TASK, ways, quick=quick, rounds=ROUNDS)


def report(results: Sequence[Result]) -> str:
    about = (
        f"{', '.join(SCORES)}; {CLASSES} classes, {LABELS[False]:,} labels. scikit-learn is called once for each score."
    )
    return contenders.report(about, results, limits={(TASK, SKLEARN): 1 / 20}, more=same)


def same(rows: Mapping[tuple[str, str], Row]) -> list[Goal]:
    return [Goal(f"{TASK}: largest difference from scikit-learn", 1e-12, rows[TASK, SKLEARN]["difference"])]


PACKAGES = ("numpy", "scikit-learn", "torch", "torchmetrics", "evaluate")

if __name__ == "__main__":
    harness.main("metrics", run, PACKAGES)
