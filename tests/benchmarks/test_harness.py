"""The harness on cases whose result is known, and each benchmark once at its smallest."""

import dataclasses
import gc
import json
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks import __main__, evaluation, harness, losses
from benchmarks.harness import Goal, Spread, Timed
from benchmarks.report import report
from tests.results import result

TINY = losses.Sizes(rows=1, length=4, vocabularies=(151_936,), rounds=1)


@pytest.fixture(autouse=True, scope="module")
def quick_collection():
    gc.freeze()  # for good: unfrozen, every Trainer of the tests after these would search it all


@pytest.fixture(scope="module")
def loss_rows():
    return losses.measure(losses.LOSSES, vocabulary=151_936, dtype="float32", sizes=TINY, device="cpu")


@pytest.fixture(scope="module")
def evaluation_rows():
    return [*evaluation.run(quick=True, device="cpu")]


# --- timing -----------------------------------------------------------------------------------------------------------


def test_variants_take_turns_and_the_first_round_warms_up():
    calls = []

    def variant(name: str) -> Timed:
        return Timed(name, name.lower, calls.append)

    seconds = harness.interleave([variant("A"), variant("B")], rounds=2)
    assert calls == ["a", "b"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"A": 2, "B": 2}


def test_the_clock_sees_the_run_and_not_its_preparation(monkeypatch):
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    variant = Timed("A", lambda: wait(5), lambda _: wait(3))
    assert harness.interleave([variant], rounds=2) == {"A": [3, 3]}


def test_collection_waits_until_the_run_is_over():
    seen = []
    harness.interleave([Timed("A", lambda: None, lambda _: seen.append(gc.isenabled()))], rounds=1)
    assert seen == [False, False]
    assert gc.isenabled()


def test_spread_is_the_median_and_the_quartiles():
    values = [5.0, 1.0, 4.0, 2.0, 3.0, 9.0]
    assert dataclasses.astuple(Spread.of(values)) == tuple(np.quantile(values, [0.5, 0.25, 0.75]))
    assert f"{Spread.of([2.0]):.1f}" == "2.0 (2.0 to 2.0)"


def test_ratios_are_taken_round_by_round():
    """A machine that was ten times slower in one round does not show; in a ratio of medians it would."""
    baseline, ours = [1.0, 10.0, 2.0], [0.5, 5.0, 1.0]
    assert harness.ratio(ours, baseline) == Spread(0.5, 0.5, 0.5)


# --- result files and report ------------------------------------------------------------------------------------------


def test_results_come_back_from_their_files(tmp_path):
    written = [result([{"x": 1}]), result([], allocator="kept")]
    for each in written:
        each.write(tmp_path)
    assert harness.read_results(tmp_path) == written


def test_a_result_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        result([{"x": float("nan")}]).write(tmp_path)


def test_a_markdown_table():
    assert harness.table(("name", "bytes"), [("a", "1.5"), ("b", "")]) == (
        "| name | bytes |\n| --- | --: |\n| a | 1.5 |\n| b |  |"
    )


@pytest.mark.parametrize(("measured", "reached"), [(0.9, True), (1.0, True), (1.1, False), (float("nan"), False)])
def test_goals_are_judged_by_what_was_measured(measured, reached):
    goal = Goal("time", 1.0, measured)
    assert goal.reached is reached
    assert ("**not reached**" in harness.goals_table([goal])) is not reached


def test_the_report_says_that_no_gpu_was_measured(loss_rows):
    assert "No GPU" in report([result(loss_rows)])
    measured = result(loss_rows, device="cuda", allocator="caching")
    assert "No GPU" not in report([measured])


def test_no_results_no_section():
    assert "## Losses" not in report([])


def test_the_numbers_of_the_report_are_those_of_the_file(loss_rows):
    """Changing a number in the file changes its cell and its goal."""
    before = losses.report([result(loss_rows)])
    index = next(at for at, row in enumerate(loss_rows) if row["loss"] == losses.OWN and row["supervised"] == "all")
    changed = [*loss_rows]
    changed[index] = loss_rows[index] | {"held": 77 * loss_rows[index]["logits_bytes"]}
    other = losses.report([result(changed)])
    assert "| 77.00 |" not in before
    assert "| 77.00 |" in other
    assert "own buffer: extra memory, in logits | 1.05 | 77 | **not reached** |" in other


def test_each_result_names_its_command_machine_and_versions(loss_rows):
    section = losses.report([result(loss_rows)])
    for expected in ("`python -m benchmarks losses`", "Processor abacus", "Python 3"):
        assert expected in section


# --- where it runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", harness.ALLOCATORS)
def test_the_allocator_is_told_by_the_environment(monkeypatch, name):
    for key, value in harness.ALLOCATORS[name].items():
        monkeypatch.setenv(key, value)
    assert harness.allocator() == name


def test_an_unknown_allocator_setting_stops(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "7")
    with pytest.raises(SystemExit, match="MALLOC_MMAP_MAX_"):
        harness.allocator()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_stops_before_anything_runs():
    with pytest.raises(SystemExit, match="no CUDA device"):
        __main__.main(["--device", "cuda"])


@pytest.mark.slow
def test_a_quick_run_writes_results_and_report_beside_the_real_ones(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # a caller's own setting does not reach the measured process
    before = {path: path.read_bytes() for path in __main__.HERE.glob("**/*.json")}
    path = __main__.main(["evaluation", "--quick"])
    assert {path: path.read_bytes() for path in __main__.HERE.glob("**/*.json")} == before
    (file,) = (path.parent / "results").iterdir()
    assert json.loads(file.read_text())["quick"] is True
    assert "A quick run" in path.read_text()


# --- the losses -------------------------------------------------------------------------------------------------------


def test_every_loss_is_measured_with_all_and_half_of_the_labels(loss_rows):
    assert [(row["loss"], row["supervised"]) for row in loss_rows] == [
        (loss.name, share) for share in ("all", "half") for loss in losses.LOSSES
    ]
    assert all(len(row["seconds"]) == TINY.rounds for row in loss_rows)


def test_the_stock_loss_takes_three_times_its_float32_logits(loss_rows):
    row = losses.Cases(loss_rows)(("float32", 151_936), losses.STOCK)
    assert row["held"] / row["logits_bytes"] == pytest.approx(3.0, abs=0.01)
    assert row["released"] / row["logits_bytes"] == pytest.approx(3.0, abs=0.01)


def test_half_of_each_row_is_ignored():
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


def test_gradient_errors_find_a_wrong_gradient():
    labels = torch.arange(1, 9).view(1, 8)
    batch = losses.make_batch(labels, ignored=0.0)
    for dtype in (torch.float32, torch.bfloat16):
        source = losses.make_logits(labels, 100, dtype)
        (right,) = losses.gradient_errors([stock_like(1.0)], source, batch).values()
        (wrong,) = losses.gradient_errors([stock_like(1.1)], source, batch).values()
        for name, bound in (("largest_error", 8), ("gradient_error", 4 * torch.finfo(dtype).eps)):
            assert right[name] < bound
        assert wrong["gradient_error"] == pytest.approx(0.1, rel=0.05)
        assert wrong["largest_error"] > right["largest_error"] + 1


def test_the_truth_is_the_gradient_of_a_float64_cross_entropy():
    """Against the softmax written out, over chunks that do not divide the rows."""
    labels = torch.tensor([[4, 2, -100, 1], [0, 3, 3, 2]])
    batch = losses.make_batch(labels, ignored=0.0)
    source = losses.make_logits(labels.clamp(min=0), 5, torch.float32)
    pieces = list(losses.true_gradient(source, batch, chunk=3))
    found = torch.cat([gradient for _, _, gradient in pieces]).view(2, 4, 5)
    expected = torch.zeros(2, 4, 5, dtype=torch.float64)
    for row in range(2):
        for at in range(3):
            target = labels[row, at + 1]
            if target != -100:
                expected[row, at] = (source[row, at].double().softmax(-1) - F.one_hot(target, 5)) / 5
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_the_last_place_is_numpy_s_spacing():
    numbers = torch.randn(20, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = (numbers * 10.0 ** torch.arange(-30, 30, 3)[:, None]).flatten().float()
    found = losses.last_place(values.double(), torch.float32)
    np.testing.assert_array_equal(found.numpy(), np.abs(np.spacing(values.numpy())).astype(np.float64))


# --- the evaluation ---------------------------------------------------------------------------------------------------


QUICK = evaluation.QUICK_GROWTH


def grown(rows, samples) -> dict[str, dict]:
    return {row["setup"]: row for row in rows if row["samples"] == samples and "seconds" in row}


@pytest.mark.parametrize("samples", QUICK.samples)
def test_what_the_trainer_keeps(evaluation_rows, samples):
    """Every logit in float32; an int64 a token; four float64 a sample, or those of one batch."""
    found = grown(evaluation_rows, samples)
    logits = 4 * samples * QUICK.length * QUICK.vocabulary
    assert found[evaluation.NOTHING]["kept"] == logits
    assert found["eval_accumulation_steps=1"]["kept"] == logits
    assert found["argmax by hand"]["kept"] == 8 * samples * QUICK.length
    assert found[evaluation.SUMS]["kept"] == 4 * 8 * samples
    assert found[evaluation.WITHOUT_LOGITS]["kept"] == 4 * 8 * samples
    assert found[evaluation.STREAMING]["kept"] == 4 * 8 * QUICK.batch


def test_all_setups_evaluate_the_same_model(evaluation_rows):
    accuracies = [row["token_accuracy"] for row in grown(evaluation_rows, QUICK.samples[0]).values()]
    assert accuracies == pytest.approx([accuracies[0]] * len(evaluation.SETUPS), abs=1e-12)
    assert 0 < accuracies[0] < 1


def test_the_forward_passes_hold_one_batch_of_logits(evaluation_rows):
    row = next(row for row in evaluation_rows if row["setup"] == evaluation.FORWARD)
    logits = 4 * evaluation.QUICK_COUNTED.batch * evaluation.QUICK_COUNTED.length * evaluation.QUICK_COUNTED.vocabulary
    assert logits <= row["peak"] <= 1.1 * logits


def test_computed_rows_are_marked_and_grow_only_where_the_measured_ones_did():
    smaller = {"setup": "x", "samples": 4, "kept": 40, "resident": 100, "seconds": [3.0, 1.0], "computed": False}
    larger = {"setup": "x", "samples": 8, "kept": 80, "resident": 100, "seconds": [2.0], "computed": False}
    expected = {"setup": "x", "samples": 16, "kept": 160, "resident": 100, "seconds": [4.0], "computed": True}
    assert evaluation.extrapolated(smaller, larger, 16) == expected


def test_what_would_not_fit_is_computed_as_it_would_be_measured():
    """The computed bytes equal those that a full measurement found."""
    model = evaluation.make_model(QUICK, "cpu")
    for setup in evaluation.SETUPS[:2]:
        smaller, larger, all_of_them = (
            evaluation.measure(setup, model, QUICK, count, "cpu", counted=True) for count in (4, 6, 8)
        )
        computed = evaluation.extrapolated(smaller, larger, 8)
        assert computed["kept"] == all_of_them["kept"]
        assert computed["peak"] == pytest.approx(all_of_them["peak"], rel=0.02)


def test_nothing_is_computed_that_could_be_measured(monkeypatch):
    """What keeps the logits is computed from the two largest measured numbers once two copies of them are too many."""
    sizes = dataclasses.replace(QUICK, samples=(4, 6, 8))
    monkeypatch.setattr(evaluation, "MEASURED_UP_TO", 2 * evaluation.logits_bytes(sizes, 6))
    rows = [*evaluation.measure_growth(sizes, "cpu")]
    computed = {(row["setup"], row["samples"]) for row in rows if row["computed"]}
    assert computed == {(setup.name, 8) for setup in evaluation.SETUPS if setup.keeps_logits}
    assert grown(rows, 8)[evaluation.NOTHING]["kept"] == evaluation.logits_bytes(sizes, 8)


def test_the_evaluation_report(evaluation_rows):
    section = evaluation.report([result(evaluation_rows, benchmark="evaluation")])
    assert section.count("| measured |") == 3 + len(QUICK.samples) * len(evaluation.SETUPS)
    assert "kept with `sample_sums`, over the logits | 0.0001 |" in section
