"""The benchmarks of the loss from hidden states at their smallest size."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks import hidden, hidden_step
from benchmarks.hidden import Products
from benchmarks.losses import Loss
from benchmarks.memory import process_peak
from tests.benchmarks.results import result

TINY = hidden.Sizes(tokens=8, hidden=8, seconds=0.0)


@pytest.fixture(scope="module")
def rows():
    return hidden.measure("float32", "all", TINY, "cpu")


def test_products_are_counted_in_both_directions():
    weight = torch.randn(3, 5, requires_grad=True)
    with Products() as counted:
        F.linear(torch.randn(4, 5), weight).sum().backward()
    assert counted.multiplied == 2 * 4 * 5 * 3


def test_stock_multiplies_every_row_and_ours_the_supervised_ones(rows):
    by_loss = {row["loss"]: row for row in rows}
    assert [len(row["seconds"]) for row in rows] == [3, 3]
    assert by_loss[hidden.OURS]["products"] == pytest.approx(3)
    assert by_loss[hidden.STOCK]["products"] == pytest.approx(3 * 8 / 7)


def test_our_errors_are_those_of_stock(rows):
    by_loss = {row["loss"]: row for row in rows}
    for name in ("value_error", "hidden_error", "weight_error"):
        assert by_loss[hidden.OURS][name] <= 1.1 * by_loss[hidden.STOCK][name] + torch.finfo(torch.float32).eps


def test_wrong_gradient_is_detected():
    wrong = Loss("scaled", lambda batch: 1.1 * hidden.stock(batch))
    (row,) = hidden.measure("float32", "half", TINY, "cpu", [wrong])
    assert [row[f"{name}_error"] for name in ("value", "hidden", "weight")] == pytest.approx([0.1] * 3, rel=1e-3)


def test_each_number_is_compared_with_its_limit(rows):
    """A number changed in the rows changes its line of the table, and no other."""
    changed = [rows[0], rows[1] | {"products": 3.5}, *rows[2:]]
    usual, other = (hidden.goals(result(given, "hidden", allocator="kept")) for given in (rows, changed))
    (line,) = (goal for goal, before in zip(other, usual, strict=True) if goal != before)
    assert line.what == "float32, all supervised: products with the vocabulary per supervised token"
    assert (line.limit, line.measured, line.reached) == (3, 3.5, False)


def goals(rows):
    return hidden_step.goals(result(rows, "hidden_step"))


def test_step_must_save_two_and_a_half_copies():
    """By the median of its processes."""
    found = [
        {"case": hidden_step.STOCK_STEP, "process": [1100, 1000, 900], "peak": 900, "logits_bytes": 100},
        {"case": hidden_step.STEP, "process": [900, 740, 700], "peak": 640, "logits_bytes": 100},
        {"case": hidden_step.EVALUATION, "process": [90], "peak": 84, "logits_bytes": 100},
        {"case": hidden_step.FORWARD, "process": [90], "peak": 80, "logits_bytes": 100},
    ]
    rows = [row | {"dtype": dtype} for dtype in ("bfloat16", "float32") for row in found]
    assert [goal.reached for goal in goals(rows)] == [True] * 6
    assert goals(rows)[2].measured == 0.04
    rows[1] |= {"process": [760, 760, 700], "peak": 660}
    assert [goal.reached for goal in goals(rows)] == [False, False, True, True, True, True]


def test_the_peak_of_a_process_only_grows():
    before = process_peak()
    block = bytearray(200 << 20)
    block[::4096] = b"x" * len(block[::4096])
    during = process_peak()
    del block
    assert during >= before
    assert process_peak() == pytest.approx(during, rel=0.01)
