"""The benchmark of hidden states at its smallest."""

import gc
import os
import sys
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from benchmarks import harness, hidden, hidden_step
from benchmarks.hidden import Loss, Products
from benchmarks.memory import process_peak

gc.freeze()  # what the imports made need not be searched before every measurement
TINY = hidden.Sizes(tokens=8, hidden=8, seconds=0.0)


def fails():
    raise ImportError("\n  no such function\n")


@pytest.fixture(scope="module")
def rows():
    losses = [*hidden.LOSSES[:2], Loss("absent", hidden.trl_chunked, peer=True, package="none")]
    return [*hidden.measure("float32", "all", TINY, "cpu", losses)]


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


def test_a_peer_that_is_not_there_is_shown_with_the_reason(rows):
    assert rows[-1]["reason"] == "not installed: `make peers`"
    assert "| absent |  | not installed: `make peers` |" in hidden.loss_table(rows)


def test_a_peer_that_fails_says_why():
    sent = []
    harness._send_result(fails, mock.Mock(send=sent.append))
    assert sent == [(None, "ImportError: no such function")]


def test_a_process_of_its_own_is_stopped_when_it_is_slow():
    assert harness.in_a_process(os.getpid) != os.getpid()
    with pytest.raises(TimeoutError, match="stopped after 0 s"):
        harness.in_a_process(partial(time.sleep, 60), limit=0.1)


def test_a_peer_is_measured_again_unless_it_was_slow(monkeypatch):
    monkeypatch.setattr(harness, "in_a_process", lambda fn, limit: fn())
    monkeypatch.setattr(sys, "path", [*sys.path])
    peer, make = hidden.LOSSES[2], partial(hidden.make_batch, 8, 8, torch.float32, ignored=0.0, device="cpu")
    truth = hidden.true_gradients(make())
    fast, slow = (hidden.measure_peer(peer, make, make(), truth, usual, "cpu") for usual in (60.0, 0.0))
    assert fast["products"] == pytest.approx(3 * 8 / 7)
    assert fast["weight_error"] < 1e-5
    assert len(fast["seconds"]) == 1
    assert fast["seconds"] != [fast["first_seconds"]]
    assert slow["seconds"] == [slow["first_seconds"]]


def test_rounds_that_fit_but_three_at_least(rows):
    assert [len(row["seconds"]) for row in rows[:2]] == [3, 3]


def test_each_number_is_held_against_its_limit(rows):
    """A number changed in the rows changes its line of the table, and no other."""
    changed = [rows[0], rows[1] | {"products": 3.5}, *rows[2:]]
    usual, other = (hidden.goals(given, "kept") for given in (rows, changed))
    (line,) = (goal for goal, before in zip(other, usual, strict=True) if goal != before)
    assert line.what == "float32, all supervised: products with the vocabulary a supervised token"
    assert (line.limit, line.measured, line.reached) == (3, 3.5, False)


def test_the_step_that_must_save_two_and_a_half_copies():
    """The median of its processes counts."""
    found = [
        {"case": hidden_step.STOCK_STEP, "process": [1100, 1000, 900], "peak": 900, "logits_bytes": 100},
        {"case": hidden_step.STEP, "process": [900, 740, 700], "peak": 640, "logits_bytes": 100},
        {"case": hidden_step.EVALUATION, "process": [90], "peak": 84, "logits_bytes": 100},
        {"case": hidden_step.FORWARD, "process": [90], "peak": 80, "logits_bytes": 100},
    ]
    rows = [row | {"dtype": "bfloat16"} for row in found]
    assert [goal.reached for goal in hidden_step.goals(rows, "bfloat16")] == [True] * 3
    assert hidden_step.goals(rows, "bfloat16")[2].measured == 0.04
    rows[1] |= {"process": [760, 760, 700], "peak": 660}
    assert [goal.reached for goal in hidden_step.goals(rows, "bfloat16")] == [False, False, True]


def test_the_peak_of_a_process_only_grows():
    before = process_peak()
    block = bytearray(200 << 20)
    block[::4096] = b"x" * len(block[::4096])
    during = process_peak()
    del block
    assert during >= before
    assert process_peak() == pytest.approx(during, rel=0.01)
