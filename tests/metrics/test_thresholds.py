import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from metrics import multi_label, tuned_thresholds

from .evaluations import evaluation

MISSING = -100


def drawn(seed, samples, num_classes=3, dtype=np.float32):
    generator = np.random.default_rng(seed)
    probabilities = generator.random((samples, num_classes)).round(1).astype(dtype)
    labels = (generator.random(probabilities.shape) < probabilities).astype(np.int64)
    labels[generator.random(labels.shape) < 0.2] = MISSING
    return probabilities, labels


def best_by_trying(probabilities, labels):
    """The largest of the probabilities with the best F1, by trying each."""
    scores = {
        float(at): f1_score(labels, probabilities >= at, zero_division=0) for at in sorted({*probabilities.tolist()})
    }
    best = max(scores.values(), default=0.0)
    return max(at for at, value in scores.items() if value >= best - 1e-12) if labels.any() else 0.5


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 15))
def test_no_probability_gives_a_better_f1(seed, samples):
    probabilities, labels = drawn(seed, samples)
    known = labels != MISSING
    expected = tuple(best_by_trying(probabilities[known[:, k], k], labels[known[:, k], k]) for k in range(3))
    assert tuned_thresholds(probabilities, labels) == expected
    shared = tuned_thresholds(probabilities, labels, shared=True)
    assert shared == (best_by_trying(probabilities[known], labels[known]),) * 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_metric_reaches_what_was_tuned(dtype):
    probabilities, labels = drawn(0, 200, dtype=dtype)
    evaluated = evaluation({"probabilities": probabilities}, labels)
    tuned = multi_label(3, threshold=tuned_thresholds(probabilities, labels), average="per_class")(evaluated)
    plain = multi_label(3, average="per_class")(evaluated)
    for k in range(3):
        known = labels[:, k] != MISSING
        at = best_by_trying(probabilities[known, k], labels[known, k])
        assert tuned[f"f1/{k}"] == pytest.approx(f1_score(labels[known, k], probabilities[known, k] >= np.float64(at)))
        assert tuned[f"f1/{k}"] > plain[f"f1/{k}"] or at == 0.5


def test_without_a_positive_label_the_threshold_is_a_half():
    labels = np.array([[0, 1, MISSING], [0, 1, MISSING]])
    assert tuned_thresholds(np.array([[0.9, 0.3, 0.2], [0.8, 0.6, 0.1]]), labels) == (0.5, 0.3, 0.5)
    assert tuned_thresholds(np.zeros((0, 2)), np.zeros((0, 2), np.int64)) == (0.5, 0.5)


def test_thresholds_are_plain_floats():
    assert all(type(at) is float for at in tuned_thresholds(*drawn(1, 20)))


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        (np.array([[3.0]]), np.array([[1]]), r"reducers\.probabilities with multi_label=True"),
        (np.array([[0.5]]), np.array([[2]]), "0, 1, or -100"),
        (np.array([0.5]), np.array([1]), r"\(samples, classes\)"),
        (np.array([[0.5, 0.2]]), np.array([[1]]), "the labels ask for"),
    ],
)
def test_what_are_no_probabilities_is_refused(probabilities, labels, message):
    with pytest.raises(ValueError, match=message):
        tuned_thresholds(probabilities, labels)
