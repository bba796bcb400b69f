"""The benchmark of hidden states at its smallest."""

import gc

import pytest
import torch
import torch.nn.functional as F

from benchmarks import hidden
from benchmarks.hidden import Loss, Products

TINY = hidden.Sizes(tokens=8, hidden=8, rounds=1, rows=1, length=8)


def fails(batch):
    raise ImportError("\n  no such peer\n")


@pytest.fixture(scope="module")
def rows():
    gc.freeze()
    losses = [*hidden.LOSSES[:3], Loss("absent", fails, peer=True)]
    yield hidden.measure("float32", "all", TINY, "cpu", losses)
    gc.unfreeze()


def test_products_are_counted_in_both_directions():
    weight = torch.randn(3, 5, requires_grad=True)
    with Products() as counted:
        F.linear(torch.randn(4, 5), weight).sum().backward()
    assert counted.multiplied == 2 * 4 * 5 * 3


def test_stock_multiplies_every_row_and_ours_the_supervised_ones(rows):
    by_loss = {row["loss"]: row for row in rows}
    assert by_loss[hidden.OURS]["products"] == pytest.approx(3)
    assert by_loss[hidden.STOCK]["products"] == pytest.approx(3 * 8 / 7)


def test_our_errors_are_those_of_stock(rows):
    by_loss = {row["loss"]: row for row in rows}
    for name in ("value_error", "hidden_error", "weight_error"):
        assert by_loss[hidden.OURS][name] <= 1.1 * by_loss[hidden.STOCK][name] + torch.finfo(torch.float32).eps


def test_a_wrong_gradient_is_found():
    wrong = Loss("scaled", lambda batch: 1.1 * hidden.stock(batch))
    (row,) = hidden.measure("float32", "half", TINY, "cpu", [wrong])
    assert [row[f"{name}_error"] for name in ("value", "hidden", "weight")] == pytest.approx([0.1] * 3, rel=1e-3)


def test_a_peer_that_fails_is_shown_with_the_reason(rows):
    assert rows[-1]["reason"] == "ImportError: no such peer"
    assert "| absent | ImportError: no such peer |" in hidden.loss_table(rows)
