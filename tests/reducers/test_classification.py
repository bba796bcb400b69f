"""Reducers of classes against scikit-learn, loops and the stock Trainer."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix

from metrics import classification
from reducers import argmax, confusion_counts, ordinal_ids, probabilities

from .inputs import N, normal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("multi_label", [False, True])
def test_probabilities(dtype, multi_label):
    logits = 5 * normal(4, 3, dtype=dtype)
    found = probabilities(logits, torch.zeros(4, dtype=torch.long), multi_label=multi_label)["probabilities"]
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row, x in zip(found.tolist(), logits.tolist(), strict=True):
        total = sum(math.exp(value) for value in x)
        right = [1 / (1 + math.exp(-value)) if multi_label else math.exp(value) / total for value in x]
        assert row == pytest.approx(right, rel=1e-6 if dtype != torch.float64 else 1e-12)


@pytest.mark.parametrize(
    "labels",
    [None, torch.zeros(4, dtype=torch.long), torch.zeros(4, 3), {"labels": torch.zeros(4)}, torch.zeros(4, 1)],
    ids=["none", "ids", "soft", "dict", "one column"],
)
def test_probabilities_with_any_labels(labels):
    logits = normal(4, 3)
    expected = probabilities(logits, None)["probabilities"]
    for outputs in (logits, (torch.tensor(0.5), logits, (normal(4, 7, 5),)), {"logits": logits}):
        assert torch.equal(probabilities(outputs, labels)["probabilities"], expected)


def test_a_single_logit_has_no_softmax():
    with pytest.raises(ValueError, match="always 1; pass multi_label=True"):
        probabilities(normal(4, 1), None)
    assert probabilities(torch.zeros(4, 1), None, multi_label=True)["probabilities"].eq(0.5).all()


@pytest.mark.parametrize("conditional", [False, True])
def test_ordinal_ids_count_the_thresholds_below(conditional):
    logits = normal(50, 4)
    expected = []
    for row in logits.tolist():
        chance, above = 1.0, 0
        for x in row:
            p = 1 / (1 + math.exp(-x))
            chance = chance * p if conditional else p
            above += chance > 0.5
        expected.append(above)
    found = ordinal_ids(logits, torch.zeros(50, dtype=torch.long), conditional=conditional)
    assert found.tolist() == expected
    assert found.dtype == torch.int32
    assert (ordinal_ids(logits, None) != ordinal_ids(logits, None, conditional=True)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_confusion_of_tokens_is_scikit_learns(dtype):
    logits, labels = normal(5, 7, 3, dtype=dtype), torch.randint(-1, 3, (5, 7), generator=torch.manual_seed(1))
    labels[labels == -1] = N
    labels[2] = N
    found = confusion_counts(logits, labels, shift=0)["confusion"]
    assert (found.dtype, found.shape) == (torch.int64, (5, 9))
    for sample, x, y in zip(found, logits, labels, strict=True):
        known = y != N
        expected = np.zeros((3, 3), int)
        if known.any():
            expected = confusion_matrix(y[known], x.float()[known].argmax(-1), labels=range(3))
        assert sample.view(3, 3).tolist() == expected.tolist()


def test_confusion_of_samples():
    logits, labels = normal(40, 4), torch.arange(40) % 4
    labels[::7] = N
    found = confusion_counts((torch.tensor(0.0), logits), {"labels": labels})["confusion"]
    known = labels != N
    assert found.sum(0).view(4, 4).tolist() == confusion_matrix(labels[known], logits.argmax(-1)[known]).tolist()
    assert found.sum(1).tolist() == known.long().tolist()


def test_confusion_of_shifted_and_tied_logits():
    logits = torch.zeros(1, 3, 2)
    found = confusion_counts(logits, torch.tensor([[1, 1, 0]]), shift=1)["confusion"]
    assert found.tolist() == [[1, 0, 1, 0]]  # the first label has no logit; ties predict the smaller id


def test_samples_with_nan_at_a_label_are_not_counted():
    """NaN at positions without a label has no effect."""
    logits, labels = normal(3, 4, 3), torch.tensor([[0, 0, N, 1], [0, N, 0, 0], [2, 1, 0, 0]])
    expected = confusion_counts(logits, labels, shift=0)["confusion"]
    logits[0, 2], logits[1, 3, 1] = torch.nan, torch.nan
    expected[1] = -1
    assert torch.equal(confusion_counts(logits, labels, shift=0)["confusion"], expected)
    assert ordinal_ids(torch.tensor([[torch.nan, 1.0], [2.0, 1.0]]), None).tolist() == [N, 2]


@pytest.mark.parametrize("reducer", [argmax, confusion_counts])
def test_metrics_reject_predictions_from_nan_logits(reducer):
    """If NaN counted as class 0, the background of many tasks, a diverged checkpoint could be the best one."""
    labels = torch.zeros(2, 3, dtype=torch.long)
    reduced = reducer(torch.full((2, 3, 4), torch.nan), labels, shift=0)
    arrays = {name: value.numpy() for name, value in reduced.items()} if isinstance(reduced, dict) else reduced.numpy()
    with pytest.raises(ValueError, match="NaN"):
        classification(4)(SimpleNamespace(predictions=arrays, label_ids=labels.numpy()))


def test_labels_decide_what_is_counted():
    """Padding arrives as rows of -100 logits, for which class 0 is predicted."""
    logits, labels = torch.full((1, 2, 2), -100.0), torch.tensor([[N, N]])
    assert not confusion_counts(logits, labels, shift=0)["confusion"].any()
    assert (argmax(logits, labels, shift=0) != N).all()
