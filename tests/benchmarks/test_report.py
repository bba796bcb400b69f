"""The report is what the result files say: the committed one, its leads, its lines, its figures on paper."""

import gc
import json
import re
import sys
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from benchmarks import charts, demo_report, harness, hidden, leads, losses, peers, scale
from benchmarks.demo_language import Way
from benchmarks.leads import Comparison, Lead
from benchmarks.losses import OVER, OWN, STOCK, Loss
from benchmarks.peers import Field, Line
from benchmarks.report import report
from tests import results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
result = partial(results.result, benchmark="peers")


# --- what is committed ------------------------------------------------------------------------------------------------


def test_the_committed_report_is_that_of_the_committed_results():
    """Otherwise: `python -m benchmarks report`."""
    written = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert written == report(harness.read_results(RESULTS))


def test_its_pictures_are_there():
    written = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    for picture in re.findall(r"\]\(([^)]*\.svg)\)", written):
        assert (ROOT / "benchmarks" / picture).is_file()


def test_no_quick_result_is_committed():
    assert not [found.file_name for found in harness.read_results(RESULTS) if found.quick]


def cases(allocator: str) -> dict[tuple, dict]:
    rows = json.loads((RESULTS / f"losses-cpu-{allocator}.json").read_text(encoding="utf-8"))["rows"]
    return {(row["dtype"], row["vocabulary"], row["supervised"], row["loss"]): row for row in rows}


def over(found: dict, own: tuple, base: tuple) -> float:
    return median(x / y for x, y in zip(found[own]["seconds"], found[base]["seconds"], strict=True))


def test_the_readme_quotes_the_results():
    """A line of its table is made of the files alone; the message holds the line to be put there."""
    found = {allocator: cases(allocator) for allocator in ("default", "kept")}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for loss in (OWN, OVER):
        keys = [((dtype, 151_936, "all", loss), (dtype, 151_936, "all", STOCK)) for dtype in ("bfloat16", "float32")]
        memory = [found["default"][own]["held"] / found["default"][own]["logits_bytes"] for own, _ in keys]
        times = [[over(found[allocator], own, base) for own, base in keys] for allocator in ("default", "kept")]
        cells = " | ".join(" / ".join(f"{value:.2f}" for value in pair) for pair in (memory, *times))
        assert f"| {loss} | {cells} |" in text
    stock = [found["default"][dtype, 151_936, "all", STOCK] for dtype in ("bfloat16", "float32")]
    held = " / ".join(f"{row['held'] / row['logits_bytes']:.2f}" for row in stock)
    assert f"| stock, bfloat16 / float32 | {held} | 1 | 1 |" in text
    ways = ((OWN, losses.COMPOSED_OWN), (OVER, losses.COMPOSED_OVER))
    kinds = [(rows, (dtype, vocabulary)) for rows in found.values() for dtype, vocabulary, *_ in rows]
    composed = [over(rows, (*kind, "all", other), (*kind, "all", own)) for rows, kind in kinds for own, other in ways]
    half = [over(rows, (*kind, "half", own), (*kind, "all", own)) for rows, kind in kinds for own, _ in ways]
    assert f"take {min(composed):.2f} to {max(composed):.2f} times the time" in " ".join(text.split())
    assert f"takes {min(half):.2f} to {max(half):.2f} of the time" in " ".join(text.split())


# --- where a peer is better -------------------------------------------------------------------------------------------

COMPARISON = Comparison(
    name="loss",
    case={"tokens": "{:,} tokens"},
    figures={"time": "seconds", "memory": "peak", "error": "error"},
    ours=lambda row: None if row["loss"] == "ours" else "ours",
)
OURS = {"loss": "ours", "tokens": 1000, "seconds": [1.0, 2.0, 3.0], "peak": 100, "error": 0.0}


def found_leads(**changes) -> list[Lead]:
    rows = [OURS, {"loss": "theirs", "tokens": 1000, "seconds": [2.0, 4.0, 6.0], "peak": 200, "error": 1.0} | changes]
    return [*leads.leads(result(rows), COMPARISON)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"peak": 50}, [Lead("theirs", "ours", "memory", "1,000 tokens", 0.5)]),
        ({"peak": 0}, [Lead("theirs", "ours", "memory", "1,000 tokens", 0.0)]),
        ({"peak": 99.5}, []),
        ({"error": 0.0}, []),
        ({"seconds": [0.5, 1.0, 1.5]}, [Lead("theirs", "ours", "time", "1,000 tokens", 0.5)]),
        ({"seconds": [0.5, 1.0, 6.0]}, []),  # not in the whole middle half
        ({"seconds": [1.0]}, [Lead("theirs", "ours", "time", "1,000 tokens", 0.5)]),
        ({"peak": 50, "computed": True}, []),
        ({"peak": 50, "tokens": 10}, []),
    ],
)
def test_a_lead_is_found_and_nothing_else(changes, expected):
    assert found_leads(**changes) == expected


def test_leads_stand_first_in_the_report():
    rows = [
        {"field": "logits", "vocabulary": 7, "tokens": tokens, "loss": loss, "seconds": [seconds], "peak": 10}
        for tokens in (1, 2)
        for loss, seconds in ((STOCK, 1.0), (OWN, 2.0))
    ]
    text = report([result([row | {"logits_bytes": 14} for row in rows])])
    assert text.index("## Where a peer is better") < text.index("## Losses")
    line = next(line for line in text.splitlines() if line.startswith("| Losses: beside"))
    assert f"| {STOCK} | {OWN} | time | 0.5 to 0.5 | 2 |" in line


# --- peers ------------------------------------------------------------------------------------------------------------

SIZES = peers.Sizes((256, 512), (32_000,), seconds=0.0)


def absent(logits, batch):
    raise ImportError("\n no such peer\n")


@pytest.fixture(autouse=True, scope="module")
def quick_collection():
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def peer_rows():
    field = Field("logits", (*peers.OF_LOGITS[:3], Loss("absent", absent)), peers.some_logits)
    return peers.measure(field, 32_000, SIZES, "cpu", [])


def test_growth_with_tokens_is_that_of_whole_copies(peer_rows):
    """Bytes a logit in bfloat16: three float32 copies, one copy, none."""
    lines = peers.lines_of(peer_rows)
    slopes = [lines["logits", 32_000, loss].line("peak").slope / 32_000 for loss in (STOCK, OWN, OVER)]
    assert slopes == pytest.approx([12.0, 2.0, 0.0], abs=0.05)


def test_errors_are_those_of_the_smallest_batch(peer_rows):
    measured = [row for row in peer_rows if "reason" not in row]
    assert {row["tokens"] for row in measured if "gradient_error" in row} == {256}
    assert all(len(row["seconds"]) == 2 for row in measured)


def test_a_peer_that_fails_is_named_once_with_the_reason(peer_rows):
    (row,) = [row for row in peer_rows if row["loss"] == "absent"]
    assert row["reason"] == "ImportError: no such peer"
    assert "Not measured: absent: ImportError: no such peer." in peers.report([result(peer_rows)])


@pytest.mark.parametrize("loss", peers.OF_LOGITS, ids=lambda loss: loss.name)
def test_every_peer_computes_the_same_loss(loss, monkeypatch):
    """Or it would be compared with another one; bfloat16 arithmetic is allowed for."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(hidden.PEERS)])
    if loss.name.startswith("Liger") or (loss.name.startswith(("torchtune", "TRL")) and not hidden.PEERS.is_dir()):
        pytest.skip("`make peers` installs it; Liger's needs a GPU besides")
    batch = losses.make_batch(losses.make_labels(losses.Sizes(1, 512, (), 1), 32_000, "cpu"), ignored=0.0)
    logits = losses.make_logits(batch.labels, 32_000, torch.bfloat16)
    expected = float(losses.stock(logits, batch))
    assert float(loss.call(logits.requires_grad_().clone(), batch).detach()) == pytest.approx(expected, rel=0.02)


def test_what_would_take_too_much_is_not_run():
    case = {"vocabulary": 10, "tokens": 1000, "logits_bytes": 20_000}
    row = {"loss": "x", "tokens": 100, "logits_bytes": 2_000, "peak": 1, "seconds": [0.1, 0.1, 9.0]}
    assert not peers.too_much("x", case, [])
    assert not peers.too_much("x", case, [row])
    assert peers.too_much("x", case, [row | {"peak": peers.MEASURED_UP_TO / 10}])
    assert peers.too_much("x", case, [row | {"seconds": [peers.LONGEST / 9]}])
    assert not peers.too_much("other", case, [row | {"seconds": [peers.LONGEST / 9]}])


def test_nothing_is_run_where_all_would_take_too_much():
    slow = {"loss": STOCK, "logits_bytes": 1, "peak": 1, "seconds": [1.0]}
    field = Field("logits", peers.OF_LOGITS[:1], peers.some_logits)
    assert not peers.measure(field, 32_000, peers.Sizes((256,), (32_000,), 0.0), "cpu", [slow])


def test_a_line_goes_through_the_two_largest():
    assert Line.through([(4, 10.0), (1, 77.0), (8, 18.0)]) == Line(slope=2.0, start=2.0)


def test_computed_figures_are_marked():
    rows = [
        {"field": "logits", "vocabulary": 10, "tokens": tokens, "loss": loss}
        | {"seconds": [tokens / 1000] * 2, "peak": 20 * tokens}
        for loss, counts in ((STOCK, (10, 20)), (OWN, (10, 20, 40)))
        for tokens in counts
    ]
    text = peers.report([result(rows)])
    assert "| 10 | ForCausalLMLoss | 10, 1.00 (1.00 to 1.00) | 20, 1.00 (1.00 to 1.00) | *40, 1.00* | 100000.00" in text
    assert "| 10 | ForCausalLMLoss | 1.00 | 1.00 | *1.00* | 2.00 |" in text
    assert "| 10 | own buffer | 1.00 | 1.00 | 1.00 | 2.00 |" in text


# --- on paper ---------------------------------------------------------------------------------------------------------


def needs(tokens, vocabulary, width) -> float:
    return 3 * tokens * width + 6 * vocabulary * width + 500 * vocabulary


@pytest.fixture
def peaks_of_hidden_states():
    of_peers = [
        {"field": "hidden states", "loss": hidden.OURS, "vocabulary": vocabulary, "tokens": tokens}
        | {"peak": needs(tokens, vocabulary, peers.HIDDEN)}
        for vocabulary in (1000, 3000)
        for tokens in (1024, 4096)
    ]
    row = {"loss": hidden.OURS, "dtype": "bfloat16", "supervised": "all", "tokens": 2048}
    row["hidden_bytes"] = 2 * 2048 * 896
    peaks = (needs(tokens, hidden.VOCABULARY, 896) for tokens in (2048, 1024))
    return of_peers, [row | dict(zip(("peak", "peak_of_half_the_tokens"), peaks, strict=True))]


def test_coefficients_of_hidden_states_come_back(peaks_of_hidden_states):
    np.testing.assert_allclose(scale.hidden_coefficients(*peaks_of_hidden_states), [3, 6, 500], rtol=1e-6)


def test_one_width_tells_no_coefficients(peaks_of_hidden_states):
    assert scale.hidden_coefficients(peaks_of_hidden_states[0], []) is None


def test_what_a_model_needs_is_computed_from_the_slopes(peaks_of_hidden_states):
    """Stock 12 bytes a logit beside two of the logits themselves, over 32,768 tokens x 128,256."""
    of_logits = [
        {"field": "logits", "loss": loss, "vocabulary": 1000, "tokens": tokens, "peak": slope * tokens * 1000}
        for loss, slope in ((STOCK, 12), (OWN, 2), (OVER, 0))
        for tokens in (1024, 4096)
    ]
    of_peers, of_hidden = peaks_of_hidden_states
    text = scale.section([result([*of_logits, *of_peers]), result(of_hidden, benchmark="hidden")])
    logits = 32_768 * 128_256
    figures = [2 * logits, 14 * logits, 4 * logits, 2 * logits, needs(32_768, 128_256, 4096)]
    cells = " | ".join(map(harness.human_bytes, figures))
    assert f"| Llama 3 8B | 128,256 | 4,096 | 32,768 | {cells} |" in text
    assert text.startswith("**Computed, not measured**")


def test_a_quick_run_has_no_scale():
    assert scale.section([result([], quick=True)]) == ""


def test_an_evaluation_on_paper():
    rows = [
        {"setup": setup, "samples": samples, "tokens": 10, "vocabulary": 100, "kept": kept * samples, "resident": 0}
        | {"seconds": [1.0], "computed": False}
        for setup, kept in ((scale.evaluation.NOTHING, 4 * 10 * 100), (scale.evaluation.SUMS, 32))
        for samples in (128, 512)
    ]
    text = scale.section([result(rows, benchmark="evaluation")])
    kept = harness.human_bytes(4 * scale.SAMPLES * scale.LENGTH * 128_256)
    assert f"| Llama 3 8B | {kept} | 0 B | {harness.human_bytes(32 * scale.SAMPLES)} |" in text


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_pictures_are_the_same_bytes_for_the_same_results(peer_rows, tmp_path):
    for folder in ("once", "again"):
        charts.write([result(peer_rows)], tmp_path / folder)
    names = sorted(path.name for path in (tmp_path / "once" / charts.FOLDER).iterdir())
    assert names == ["peers-memory.svg", "peers-time.svg"]
    for name in names:
        once, again = ((tmp_path / folder / charts.FOLDER / name).read_bytes() for folder in ("once", "again"))
        assert once == again
    assert charts.shown("peers", [result(peer_rows)])[0] == "![peers, memory](charts/peers-memory.svg)"


def test_the_demo_draws_a_line_at_every_power_of_ten(tmp_path):
    kept = (10**9, 10**5, 1000, 1000, 200)
    ways = [Way(str(place), {}, size, 10**9, 1.0, ([0.0], [10**9])) for place, size in enumerate(kept)]
    with mock.patch.object(Figure, "savefig", autospec=True) as save:
        demo_report.picture(ways, tmp_path / "demo.png")
    (figure, *_), _ = save.call_args
    (axes,) = (axes for axes in figure.axes if axes.get_xscale() == "log")
    lines = [line for line in axes.get_xticks() if line <= 200 * kept[0]]
    assert lines[1:] == pytest.approx([10 * line for line in lines[:-1]])
    assert len(lines) > 8
