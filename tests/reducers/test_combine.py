"""combine: several reducers in one, and the check of what each returns."""

import pickle
from functools import partial

import pytest
import torch

from reducers import argmax, combine, sample_sums, token_log_probs, top_k

from .inputs import LABELS, B, S, V, normal

LOGITS = normal(B, S, V)
IDS = partial(argmax, shift=1)


def test_every_result_stands_under_its_name():
    sums = partial(sample_sums, shift=1)
    both = combine(ids=IDS, sums=sums, best=partial(top_k, k=2, shift=1), all=combine(ids=IDS))
    found = both(LOGITS, LABELS)
    assert list(found) == ["ids", "sums", "best", "all"]
    assert found["ids"].equal(argmax(LOGITS, LABELS, shift=1))
    assert found["all"]["ids"].equal(found["ids"])
    assert found["best"].equal(top_k(LOGITS, LABELS, k=2, shift=1))
    assert all(found["sums"][name].equal(value) for name, value in sums(LOGITS, LABELS).items())


def test_combinations_have_a_repr_are_picklable_and_frozen():
    both = combine(ids=IDS, log_probs=partial(token_log_probs, shift=1))
    assert repr(both).startswith("combine(ids=functools.partial(<function argmax")
    copy = pickle.loads(pickle.dumps(both))
    found, expected = copy(LOGITS, LABELS), both(LOGITS, LABELS)
    assert all(found[name].equal(expected[name]) for name in expected)
    with pytest.raises(AttributeError):
        both.reducers = ()


@pytest.mark.parametrize("labels", [LABELS, {"labels": LABELS}, None], ids=["ids", "dict", "none"])
def test_every_form_of_logits_and_labels(labels):
    for logits in (LOGITS, (torch.tensor(0.5), LOGITS), {"logits": LOGITS}, ((LOGITS, LOGITS), LOGITS)):
        assert combine(ids=IDS)(logits, labels)["ids"].shape == (B, S)


def test_a_tuple_of_labels():
    """Start and end positions of question answering that are not packed, with a reducer of the user."""
    labels = (torch.tensor([1, 2, 0, 4]), torch.tensor([2, 3, 1, 5]))
    found = combine(starts=lambda logits, labels: logits[0].argmax(-1))((torch.randn(B, S), torch.randn(B, S)), labels)
    assert found["starts"].shape == (B,)


@pytest.mark.parametrize(
    ("reduced", "message"),
    [
        (torch.tensor(1.0), r"mine returned shape \(\) for a batch of 4: the first dimension must be the"),
        (torch.zeros(B * S), r"returned shape \(24,\).*do not flatten or average"),
        (torch.zeros(B, dtype=torch.bool), "returned torch.bool: padding with -100.*corrupt it.*int32"),
        (torch.zeros(B, dtype=torch.uint8), "returned torch.uint8"),
        (torch.zeros(B, dtype=torch.bfloat16), "returned torch.bfloat16"),
        (torch.zeros(B, dtype=torch.int16), "returned torch.int16"),
        ({"fine": torch.zeros(B), "flat": torch.zeros(B * S)}, r"mine\['flat'\] returned shape \(24,\)"),
        ((torch.zeros(B), torch.tensor(0.0)), r"mine\[1\] returned shape \(\)"),
    ],
    ids=["0-d", "flat", "bool", "uint8", "bf16", "int16", "in a dict", "in a tuple"],
)
def test_results_that_lose_rows_are_rejected(reduced, message):
    with pytest.raises((TypeError, ValueError), match=message):
        combine(ids=IDS, mine=lambda logits, labels: reduced)(LOGITS, LABELS)


def test_outputs_without_a_tensor():
    with pytest.raises(ValueError, match="so return a dict"):
        combine(ids=IDS)((), None)


def test_at_least_one_reducer_is_needed():
    with pytest.raises(TypeError, match="needs at least one reducer"):
        combine()
