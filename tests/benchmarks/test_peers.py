"""The comparison with other libraries at its smallest size."""

import sys

import pytest
import torch

from benchmarks import losses, peers
from benchmarks.losses import OVER, OWN, STOCK, Loss
from tests.benchmarks.results import result

SIZES = peers.Sizes(tokens=(256, 512), vocabularies=(32_000,), seconds=0.0)


def absent(logits, batch):
    raise ImportError("\n no such peer\n")


@pytest.fixture(scope="module")
def peer_rows():
    with pytest.MonkeyPatch.context() as patch:
        of_logits = (*peers.OF_LOGITS[:3], Loss("absent", absent))
        patch.setitem(peers.FIELDS, "logits", (of_logits, peers.some_logits))
        return peers.measure("logits", 32_000, SIZES, "cpu", [])


def test_peaks_grow_by_whole_copies_of_the_logits(peer_rows):
    """Per logit in bfloat16: three float32 copies, one copy, none."""
    peaks = {(row["loss"], row["tokens"]): row["peak"] for row in peer_rows if "peak" in row}
    growth = [(peaks[loss, 512] - peaks[loss, 256]) / (256 * 32_000) for loss in (STOCK, OWN, OVER)]
    assert growth == pytest.approx([12.0, 2.0, 0.0], abs=0.05)


def test_errors_are_those_of_the_smallest_batch(peer_rows):
    measured = [row for row in peer_rows if "reason" not in row]
    assert {row["tokens"] for row in measured if "gradient_error" in row} == {256}
    assert all(len(row["seconds"]) == 2 for row in measured)


def test_peer_that_fails_is_reported_once_with_the_reason(peer_rows):
    (row,) = [row for row in peer_rows if row["loss"] == "absent"]
    assert row["reason"] == "ImportError: no such peer"
    assert "Not measured: absent: ImportError: no such peer." in peers.tables(result(peer_rows, "peers"))


@pytest.mark.parametrize("loss", peers.OF_LOGITS, ids=lambda loss: loss.name)
def test_every_peer_computes_the_same_loss(loss, monkeypatch):
    """Up to bfloat16 arithmetic."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(peers.PEERS)])
    if loss.name.startswith("Liger") or (loss.name.startswith(("torchtune", "TRL")) and not peers.PEERS.is_dir()):
        pytest.skip("`make peers` installs it; Liger's also needs a GPU")
    batch = losses.make_batch(losses.make_labels(losses.Sizes(rows=1, length=512), 32_000, "cpu"), ignored=0.0)
    logits = losses.make_logits(batch.labels, 32_000, torch.bfloat16)
    expected = float(losses.stock(logits, batch))
    assert float(loss.call(logits.requires_grad_().clone(), batch).detach()) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("loss", peers.OF_HIDDEN_STATES, ids=lambda loss: loss.name)
def test_every_peer_computes_the_same_loss_of_hidden_states(loss, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(peers.PEERS)])
    if loss.name.startswith(("torchtune", "TRL", "cut")) and not peers.PEERS.is_dir():
        pytest.skip("`make peers` installs it")
    batch = peers.hidden.make_batch(64, 16, torch.float32, ignored=0.0, device="cpu", vocabulary=32_000)
    expected = float(peers.hidden.stock(batch).detach())
    assert float(loss.call(batch).detach()) == pytest.approx(expected, rel=1e-5)


def test_case_that_would_exceed_a_limit_is_not_run():
    case = {"vocabulary": 10, "tokens": 1000, "logits_bytes": 20_000}
    row = {"loss": "x", "tokens": 100, "logits_bytes": 2_000, "peak": 1, "seconds": [0.1, 0.1, 9.0]}
    assert not peers.too_large("x", case, [])
    assert not peers.too_large("x", case, [row])
    assert peers.too_large("x", case, [row | {"peak": peers.MEMORY_LIMIT / 10}])
    assert peers.too_large("x", case, [row | {"seconds": [peers.TIME_LIMIT / 9]}])
    assert not peers.too_large("other", case, [row | {"seconds": [peers.TIME_LIMIT / 9]}])


def test_nothing_is_run_where_every_loss_would_exceed_a_limit():
    slow = [{"loss": loss.name, "logits_bytes": 1, "peak": 1, "seconds": [1.0]} for loss in peers.OF_LOGITS]
    sizes = peers.Sizes(tokens=(256,), vocabularies=(32_000,), seconds=0.0)
    assert peers.measure("logits", 32_000, sizes, "cpu", slow) == []


def test_cells_hold_time_ratio_and_peak():
    rows = [
        {"field": "logits", "vocabulary": 10, "tokens": tokens, "loss": loss, "logits_bytes": 20 * tokens}
        | {"seconds": [seconds * tokens / 1000] * 2, "peak": peak * 20 * tokens, "value_error": 0.125}
        for loss, counts, seconds, peak in ((STOCK, (10, 20), 2, 6), (OWN, (10, 20, 40), 1, 1))
        for tokens in counts
    ]
    text = peers.tables(result(rows, "peers"))
    assert "| 10 | ForCausalLMLoss | 20 ms (1.00), 6.00 | 40 ms (1.00), 6.00 | - | 0.12 |" in text
    assert "| 10 | own buffer | 10 ms (0.50), 1.00 | 20 ms (0.50), 1.00 | 40 ms, 1.00 | 0.12 |" in text
