"""Evaluations as the Trainer hands them over, and their truth by loops over tokens."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from metrics import Metric, build

Token = tuple[float, bool, bool, float]  # nll, correct, correct in the top 5, entropy
COUNTS = ("tokens", "samples")


def evaluation(predictions: Any, labels: Any) -> SimpleNamespace:
    return SimpleNamespace(predictions=predictions, label_ids=labels)


def samples(count: int, seed: int = 0, *, longest: int = 9) -> list[list[Token]]:
    """Samples of 0 to `longest` tokens, each the numbers that a model might give it."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, longest + 1, count)
    return [
        [(float(generator.exponential(3)), rank == 0, rank < 5, float(generator.exponential())) for rank in ranks]
        for ranks in (generator.integers(0, 8, length).tolist() for length in lengths)
    ]


def columns(rows: Sequence[Sequence[Token]]) -> dict[str, np.ndarray]:
    """What `sample_sums(top_k=5, entropy=True)` returns for these tokens."""
    return {
        "nll": np.array([sum(token[0] for token in row) for row in rows], dtype=np.float64),
        "tokens": np.array([len(row) for row in rows], dtype=np.float64),
        "correct": np.array([sum(token[1] for token in row) for row in rows], dtype=np.float64),
        "all_correct": np.array([all(token[1] for token in row) for row in rows], dtype=np.float64),
        "correct_top_5": np.array([sum(token[2] for token in row) for row in rows], dtype=np.float64),
        "entropy": np.array([sum(token[3] for token in row) for row in rows], dtype=np.float64),
    }


def truth(rows: Sequence[Sequence[Token]]) -> dict[str, float]:
    """The scores of at least one token, over the flat list of all tokens."""
    tokens = [token for row in rows for token in row]
    nll, correct, correct_5, entropy = (math.fsum(values) / len(tokens) for values in zip(*tokens, strict=True))
    full = [row for row in rows if row]
    return {
        "nll_loss": nll,
        "perplexity": math.exp(nll),
        "token_accuracy": correct,
        "top_5_accuracy": correct_5,
        "entropy": entropy,
        "sequence_accuracy": sum(all(token[1] for token in row) for row in full) / len(full),
        "tokens": float(len(tokens)),
        "samples": float(len(rows)),
    }


def cut(array: Any, bounds: Sequence[int]) -> list[Any]:
    """The pieces of an array, or of the arrays of a dict, between `bounds`."""
    if isinstance(array, dict):
        pieces = {name: cut(value, bounds) for name, value in array.items()}
        return [dict(zip(pieces, piece, strict=True)) for piece in zip(*pieces.values(), strict=True)]
    return [array[start:stop] for start, stop in itertools.pairwise(bounds)]


def tensors(tree: Any) -> Any:
    return {key: tensors(value) for key, value in tree.items()} if isinstance(tree, dict) else torch.from_numpy(tree)


def stream(
    metric: Callable[..., dict[str, float]], predictions: Iterable[Any], labels: Iterable[Any]
) -> dict[str, float]:
    """Call a metric as `batch_eval_metrics=True` does: every step but the last without asking for a result."""
    *steps, last = zip(predictions, labels, strict=True)
    for step in steps:
        assert metric(evaluation(*step), compute_result=False) == {}
    return metric(evaluation(*last), compute_result=True)


def modes(
    metric: Callable[[], Callable[..., dict[str, float]]],
    predictions: dict[str, np.ndarray],
    labels: np.ndarray,
    bounds,
) -> dict[str, dict[str, float]]:
    """The result of each way in which the Trainer hands over an evaluation, of a fresh metric each."""
    parts, targets = cut(predictions, bounds), cut(labels, bounds)
    return {
        "arrays": metric()(evaluation(predictions, labels)),
        "lists": metric()(evaluation(parts, targets)),
        "steps of arrays": stream(metric(), parts, targets),
        "steps of tensors": stream(metric(), map(tensors, parts), map(tensors, targets)),
    }


def assert_modes_agree(metric, predictions, labels, bounds, expected, *, rel=1e-12) -> None:
    """Every mode gives `expected`: counts exactly, all else up to `rel`."""
    for mode, scores in modes(metric, predictions, labels, bounds).items():
        assert scores == pytest.approx(expected, rel=rel, abs=0, nan_ok=True), mode
        assert all(scores[name] == expected[name] for name in COUNTS if name in expected), mode
        assert all(type(value) is float for value in scores.values()), mode


def sized(metric: Metric, count: int) -> Callable[[], Metric]:
    return lambda: build(metric, num_samples=count)


def assert_every_mode(metric, predictions, labels, expected, **tolerance):
    bounds = (0, 1, 4, len(labels))
    for mode, scores in modes(sized(metric, len(labels)), predictions, labels, bounds).items():
        found = {key: scores[key] for key in expected}
        assert found == pytest.approx(expected, nan_ok=True, **(tolerance or {"rel": 1e-12})), mode
