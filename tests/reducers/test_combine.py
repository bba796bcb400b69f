"""combine: several reducers in one, and a check of what each returns."""

import pickle
from functools import partial

import pytest
import torch

from reducers import argmax, combine, sample_sums, token_log_probs, top_k

B, S, V = 3, 4, 5
LABELS = torch.tensor([[1, 2, 3, 4], [-100, 2, 0, -100], [-100] * 4])
LOGITS = torch.randn(B, S, V, generator=torch.Generator().manual_seed(0))


def test_every_result_stands_under_its_name():
    both = combine(ids=partial(argmax, shift=1), sums=partial(sample_sums, shift=1), best=partial(top_k, k=2, shift=1))
    found = both(LOGITS, LABELS)
    assert list(found) == ["ids", "sums", "best"]
    assert found["ids"].equal(argmax(LOGITS, LABELS, shift=1))
    assert found["best"].equal(top_k(LOGITS, LABELS, k=2, shift=1))
    assert all(found["sums"][name].equal(value) for name, value in sample_sums(LOGITS, LABELS, shift=1).items())


def test_it_is_read_and_copied():
    both = combine(ids=partial(argmax, shift=1), log_probs=partial(token_log_probs, shift=1))
    assert repr(both).startswith("combine(ids=functools.partial(<function argmax")
    copy = pickle.loads(pickle.dumps(both))
    found, expected = copy(LOGITS, LABELS), both(LOGITS, LABELS)
    assert all(found[name].equal(expected[name]) for name in expected)
    with pytest.raises(AttributeError):
        both.reducers = ()


def test_combinations_nest():
    found = combine(all=combine(ids=partial(argmax, shift=1)))(LOGITS, LABELS)
    assert found["all"]["ids"].shape == (B, S)


@pytest.mark.parametrize(
    "logits", [LOGITS, (torch.tensor(0.5), LOGITS), {"logits": LOGITS}, ((LOGITS, LOGITS), LOGITS)], ids=type
)
@pytest.mark.parametrize("labels", [LABELS, {"labels": LABELS}, None], ids=["ids", "dict", "none"])
def test_every_form_of_logits_and_labels(logits, labels):
    assert combine(ids=partial(argmax, shift=1))(logits, labels)["ids"].shape == (B, S)


def test_labels_of_two_positions():
    """Question answering without packed labels: a reducer of one's own."""
    logits = (torch.randn(B, S), torch.randn(B, S))
    labels = (torch.tensor([1, 2, 0]), torch.tensor([2, 3, 1]))
    found = combine(starts=lambda logits, labels: logits[0].argmax(-1))(logits, labels)
    assert found["starts"].shape == (B,)


@pytest.mark.parametrize(
    ("reduced", "error", "message"),
    [
        (
            torch.tensor(1.0),
            ValueError,
            r"mine returned shape \(\) for a batch of 3: the first dimension must be the batch",
        ),
        (torch.zeros(B * S), ValueError, r"returned shape \(12,\).*do not flatten or average"),
        (torch.zeros(1), ValueError, r"returned shape \(1,\)"),
        (torch.zeros(B, dtype=torch.bool), TypeError, "returned torch.bool: padding with -100.*corrupt it.*int32"),
        (torch.zeros(B, dtype=torch.uint8), TypeError, "returned torch.uint8"),
        (torch.zeros(B, dtype=torch.bfloat16), TypeError, "returned torch.bfloat16"),
        (torch.zeros(B, dtype=torch.int16), TypeError, "returned torch.int16"),
        ({"fine": torch.zeros(B), "flat": torch.zeros(B * S)}, ValueError, r"mine\['flat'\] returned shape \(12,\)"),
        ((torch.zeros(B), torch.tensor(0.0)), ValueError, r"mine\[1\] returned shape \(\)"),
        (None, TypeError, "mine returned NoneType; a reducer returns tensors"),
        (3.0, TypeError, "mine returned float"),
    ],
    ids=["0-d", "flat", "one", "bool", "uint8", "bf16", "int16", "in a dict", "in a tuple", "None", "float"],
)
def test_results_that_lose_rows_are_refused(reduced, error, message):
    with pytest.raises(error, match=message):
        combine(ids=partial(argmax, shift=1), mine=lambda logits, labels: reduced)(LOGITS, LABELS)


def test_a_model_that_lost_its_logits():
    with pytest.raises(ValueError, match="plain tuple loses its logits; return a dict"):
        combine(ids=partial(argmax, shift=1))((), None)


@pytest.mark.parametrize("reducers", [{}, {"ids": "argmax"}, {"ids": None}], ids=str)
def test_what_is_no_reducer(reducers):
    with pytest.raises(TypeError, match=r"combine needs at least one reducer|takes a function of"):
        combine(**reducers)
