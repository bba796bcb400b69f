"""The benchmark of the losses at its smallest size, and its errors against gradients written out."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks import losses
from tests.benchmarks.results import result

TINY = losses.Sizes(rows=1, length=4, vocabularies=(151_936,), rounds=1)


@pytest.fixture(scope="module")
def loss_rows():
    return losses.measure(losses.LOSSES, vocabulary=151_936, dtype="float32", sizes=TINY, device="cpu")


def test_every_loss_is_measured_with_all_and_half_of_the_labels(loss_rows):
    assert [(row["loss"], row["supervised"]) for row in loss_rows] == [
        (loss.name, share) for share in ("all", "half") for loss in losses.LOSSES
    ]
    assert all(len(row["seconds"]) == TINY.rounds for row in loss_rows)


def test_the_stock_loss_takes_three_times_its_float32_logits(loss_rows):
    row = losses.by_kind(loss_rows)["float32", 151_936][losses.STOCK, "all"]
    assert row["held"] / row["logits_bytes"] == pytest.approx(3.0, abs=0.01)
    assert row["released"] / row["logits_bytes"] == pytest.approx(3.0, abs=0.01)


def test_first_half_of_each_row_is_ignored():
    labels = torch.arange(32).view(2, 16)
    assert losses.make_batch(labels, ignored=0.0).num_items == 2 * 15
    half = losses.make_batch(labels, ignored=0.5)
    assert half.num_items == 2 * 8
    assert torch.equal(half.labels == losses.IGNORED, torch.arange(16).expand(2, 16) < 8)


def test_labels_are_real_tokens():
    labels = losses.make_labels(losses.FULL, 151_936, "cpu")
    assert labels.shape == (2, 512)
    assert len(labels.unique()) > 100


def stock_like(scale: float) -> losses.Loss:
    return losses.Loss("scaled", lambda logits, batch: scale * losses.stock(logits, batch))


def test_gradient_errors_detect_a_wrong_gradient():
    """The largest error is in units of the largest element: NumPy's spacing, for a gradient wrong by 10 %."""
    batch = losses.make_batch(torch.arange(1, 9).view(1, 8), ignored=0.0)
    for dtype in (torch.float32, torch.bfloat16):
        source = losses.make_logits(torch.arange(1, 9).view(1, 8), 100, dtype)
        (right,) = losses.gradient_errors([stock_like(1.0)], source, batch).values()
        (wrong,) = losses.gradient_errors([stock_like(1.1)], source, batch).values()
        for name, bound in (("largest_error", 8), ("gradient_error", 4 * torch.finfo(dtype).eps)):
            assert right[name] < bound
        assert wrong["gradient_error"] == pytest.approx(0.1, rel=0.05)
        assert wrong["largest_error"] > right["largest_error"] + 1
        if dtype == torch.float32:
            largest = losses.true_gradient(source, batch)[1].abs().max().numpy().astype(np.float32)
            assert wrong["largest_error"] == pytest.approx(0.1 * largest / np.spacing(largest), rel=1e-3)


def test_true_gradient_is_that_of_a_float64_cross_entropy():
    """Against the softmax written out, in chunks that do not divide the rows."""
    labels = torch.tensor([[4, 2, -100, 1], [0, 3, 3, 2]])
    batch = losses.make_batch(labels, ignored=0.0)
    source = losses.make_logits(labels.clamp(min=0), 5, torch.float32)
    value, gradient = losses.true_gradient(source, batch, chunk=3)
    expected, nll = torch.zeros(2, 4, 5, dtype=torch.float64), 0.0
    for row in range(2):
        for at in range(3):
            target = labels[row, at + 1]
            if target != -100:
                probs = source[row, at].double().softmax(-1)
                expected[row, at] = (probs - F.one_hot(target, 5)) / 5
                nll -= float(probs[target].log()) / 5
    torch.testing.assert_close(gradient.view(2, 4, 5), expected, rtol=1e-12, atol=1e-15)
    assert value == pytest.approx(nll, rel=1e-12)


def test_numbers_of_the_report_are_those_of_the_file(loss_rows):
    """Another number in the file is another cell and another verdict."""
    index = next(at for at, row in enumerate(loss_rows) if row["loss"] == losses.OWN and row["supervised"] == "all")
    changed = [*loss_rows]
    changed[index] = loss_rows[index] | {"held": 77 * loss_rows[index]["logits_bytes"]}
    before, after = ("\n".join(losses.SECTION.render([result(rows)])) for rows in (loss_rows, changed))
    assert "| 77.00 |" not in before
    assert "| 77.00 |" in after
    assert "own buffer: extra memory, in logits | 1.05 | 77 | **not reached** |" in after
    for expected in ("`python -m benchmarks losses`", "Processor abacus", "Python 3"):
        assert expected in before
