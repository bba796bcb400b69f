"""Collators of preference pairs: the order of a batch, its count, and numbers that go with a pair."""

import pickle

import pytest
import torch

from lossfns import preference_loss, simpo
from lossfns.collators import count_pairs, stack_pairs
from tests import tiny
from tests.contract.probes import skip_unless_counted
from tests.lossfns.cases import N

skip_unless_counted()

CHOSEN, REJECTED = tiny.lm_rows(3), tiny.lm_rows(3, seed=1)
REJECTED[1] = {**REJECTED[1], "labels": torch.full_like(REJECTED[1]["labels"], N)}
DATA = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in zip(CHOSEN, REJECTED, strict=True)]
COLLATE = stack_pairs(tiny.pad, shift=1)


def test_stack_pairs():
    batch = pickle.loads(pickle.dumps(COLLATE))([{**pair, "margin": 0.5} for pair in DATA])
    padded = tiny.pad([*CHOSEN, *REJECTED])
    assert torch.equal(batch["input_ids"], padded["input_ids"])
    assert torch.equal(batch["labels"]["labels"][..., 0], padded["labels"][:3])
    assert torch.equal(batch["labels"]["labels"][..., 1], padded["labels"][3:])
    assert batch["shift_labels"].tolist() == [0, N, 0]
    assert batch["labels"]["margin"].tolist() == [0.5] * 3
    assert next(iter(batch)) == "labels"  # by which the Trainer counts samples


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (-123.456789012345, torch.float64),  # as a datasets.Dataset returns what was float64 in it
        (torch.tensor(0.1), torch.float32),
        (torch.tensor(0.1, dtype=torch.float64), torch.float64),
        (3, torch.int64),
    ],
)
def test_numbers_of_a_pair_are_not_rounded(value, dtype):
    found = COLLATE([{**pair, "number": value} for pair in DATA])["labels"]["number"]
    assert found.dtype == dtype
    assert found.tolist() == [value if isinstance(value, (int, float)) else value.item()] * 3


def test_items_that_are_not_pairs_are_refused():
    with pytest.raises(
        ValueError, match=r"expected a preference pair.*got \['attention_mask', 'input_ids', 'labels'\]"
    ):
        COLLATE(CHOSEN)
    with pytest.raises(ValueError, match="need a shift"):
        stack_pairs(tiny.pad)(DATA)
    with pytest.raises(TypeError, match="the extra 'kind' must be numbers, got a str"):
        COLLATE([{**pair, "kind": "news"} for pair in DATA])


def test_pairs_with_two_predicted_labels_are_counted():
    rows = [[5, 6], [5, 7], [5, N], [4, 6], [4, N], [4, 8]]
    collate = count_pairs(lambda rows: {"labels": torch.tensor(rows)}, shift=1)
    batch = collate(rows)
    assert batch["shift_labels"].tolist() == [0, N, N, N, N, N]
    assert batch["labels"]["pair_ids"].tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match=r"an even number of sequences.*got 3"):
        collate(rows[:3])


@pytest.mark.parametrize("pair_ids", [[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0], [0, 1], [0.0, 1.0, 0.0, 1.0]])
def test_a_marker_that_does_not_pair_the_halves_is_refused(pair_ids):
    logits, ids = torch.zeros(4, 3, 5), torch.ones(4, 3, dtype=torch.int64)
    assert preference_loss(logits, {"labels": ids, "pair_ids": torch.tensor([7, 3, 7, 3])}, 2, objective=simpo) > 0
    with pytest.raises(ValueError, match=r"pair_ids.*first half of 4 sequences.*count_pairs"):
        preference_loss(logits, {"labels": ids, "pair_ids": torch.tensor(pair_ids)}, 2, objective=simpo)
