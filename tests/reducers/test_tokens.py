"""argmax, top_k and token_log_probs against loops over the labels."""

import pytest
import torch

from lossfns._core import rows
from reducers import argmax, sample_sums, token_log_probs, top_k
from tests import oracle

from .inputs import LABELS, B, N, S, V, normal, tied

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def best(logits: torch.Tensor, shape: tuple[int, ...], shift: int, k: int) -> list:
    """Return the k best ids at every position that has a logit, by sorting in Python."""
    out = torch.full((*shape, k), N)
    for place, row in oracle.pairs(logits, torch.zeros(shape, dtype=torch.long), shift=shift):
        out[place] = torch.tensor(oracle.ranking(logits[row])[:k])
    return out.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("make", [normal, tied])
def test_best_ids_stand_at_the_labels_they_predict(make, shift, dtype, monkeypatch):
    monkeypatch.setattr(rows, "CPU_CHUNK_BYTES", 4 * 4 * V)
    logits = make(B, S, V).to(dtype)
    for labels in (LABELS, None):
        one, three = argmax(logits, labels, shift=shift), top_k(logits, labels, k=3, shift=shift)
        assert (one.dtype, three.dtype) == (torch.int32, torch.int32)
        assert one[..., None].tolist() == best(logits, (B, S), shift, 1)
        assert three.tolist() == best(logits, (B, S), shift, 3)


def larger_ids_first(logits, k):
    return logits.shape[-1] - 1 - logits.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :k]


def unstable(logits, k):
    return logits.topk(k).indices


@pytest.mark.parametrize("broken", [larger_ids_first, unstable])
def test_other_orders_of_ties_are_found(broken):
    logits = tied(B, S, V)
    assert broken(logits, 4).tolist() != best(logits, (B, S), 0, 4)
    assert top_k(logits, None, k=4, shift=0).tolist() == best(logits, (B, S), 0, 4)


def test_top_k_of_all_classes_and_of_logits_of_minus_infinity():
    logits = normal(B, S, V)
    logits[..., 3:9] = -torch.inf
    assert top_k(logits, LABELS, k=V, shift=0).tolist() == best(logits, (B, S), 0, V)


def test_no_class_is_predicted_where_a_logit_is_nan():
    """Torch treats NaN as the largest value, so that class 0 would be correct for a model that has diverged."""
    logits = normal(B, S, V)
    expected = top_k(logits, LABELS, k=3, shift=0)
    logits[0, 0, 5] = torch.nan
    logits[0, 1] = torch.nan
    expected[0, :2] = -100
    assert torch.equal(top_k(logits, LABELS, k=3, shift=0), expected)
    assert torch.equal(argmax(logits, LABELS, shift=0), expected[..., 0])


def test_reducers_agree_on_ties():
    """argmax, top_k, the rank behind correct_top_{k} and both ways to count correct predictions."""
    logits, labels = tied(40, 5, 4), torch.arange(200).view(40, 5) % 4
    ids, three = argmax(logits, labels, shift=0), top_k(logits, labels, k=3, shift=0)
    sums = sample_sums(logits, labels, shift=0, top_k=(1, 3))
    assert three[..., 0].equal(ids)
    assert (ids == labels).sum(1).tolist() == sums["correct"].tolist() == sums["correct_top_1"].tolist()
    assert sample_sums(logits, labels, shift=0)["correct"].equal(sums["correct"])
    assert (three == labels[..., None]).any(-1).sum(1).tolist() == sums["correct_top_3"].tolist()
    assert (logits.flip(-1).argmax(-1) != 3 - ids).any()


def test_sequence_classification_needs_no_shift():
    logits, labels = normal(3, V), torch.tensor([1, N, 3])
    assert argmax(logits, labels).tolist() == [oracle.ranking(row)[0] for row in logits]
    assert top_k(logits, labels, k=2).tolist() == [oracle.ranking(row)[:2] for row in logits]


@pytest.mark.parametrize("shift", [0, 1])
def test_logits_that_are_longer_on_the_left(shift):
    logits = normal(B, S + 2, V)
    assert argmax(logits, LABELS, shift=shift)[..., None].tolist() == best(logits, (B, S), shift, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_log_probabilities_of_the_labels(shift, dtype):
    logits = normal(B, S, V, dtype=dtype)
    found = token_log_probs(logits, LABELS, shift=shift)
    true = oracle.statistics(logits.double(), LABELS, ("log_prob",), shift=shift)["log_prob"]
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.shape == LABELS.shape
    usual = oracle.plain(logits, LABELS, ("log_prob",), shift=shift)["log_prob"]
    oracle.assert_no_worse(found, usual, true)
    with pytest.raises(AssertionError):
        oracle.assert_no_worse(token_log_probs(logits, LABELS, shift=1 - shift), usual, true)
    assert not found[(LABELS == N) | (torch.arange(S) < shift)].any()
