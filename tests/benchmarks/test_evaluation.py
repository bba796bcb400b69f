"""The benchmark of evaluations at its smallest size: what the Trainer keeps is known exactly."""

import pytest

from benchmarks import evaluation
from tests.benchmarks.results import result


@pytest.fixture(scope="module")
def evaluation_rows():
    return [*evaluation.run(quick=True, device="cpu")]


QUICK = evaluation.QUICK_GROWTH


def grown(rows, samples) -> dict[str, dict]:
    return {row["setup"]: row for row in rows if row["samples"] == samples and "seconds" in row}


@pytest.mark.parametrize("samples", QUICK.samples)
def test_what_the_trainer_keeps(evaluation_rows, samples):
    """Every logit in float32; an int64 a token; four float64 a sample, or those of one batch."""
    found = grown(evaluation_rows, samples)
    logits = 4 * samples * QUICK.length * evaluation.VOCABULARY
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


def test_forward_passes_hold_one_batch_of_logits(evaluation_rows):
    row = next(row for row in evaluation_rows if row["setup"] == evaluation.FORWARD)
    logits = 4 * evaluation.QUICK_COUNTED.batch * evaluation.QUICK_COUNTED.length * evaluation.VOCABULARY
    assert logits <= row["peak"] <= 1.1 * logits


def test_setup_that_needs_too_much_memory_is_not_run(monkeypatch):
    sizes = evaluation.Sizes(samples=(4, 6), length=16, batch=2, rounds=2)
    monkeypatch.setattr(evaluation, "MEMORY_LIMIT", 2 * evaluation.logits_bytes(sizes, 4))
    rows = [*evaluation.measure_growth(sizes, "cpu")]
    assert grown(rows, 4).keys() == evaluation.SETUPS.keys()
    assert grown(rows, 6).keys() == evaluation.SETUPS.keys() - {*evaluation.KEEPS_LOGITS}
    assert [len(row["seconds"]) for row in rows if row["samples"] == 4] == [2] * len(evaluation.SETUPS)


def test_report_shows_each_row(evaluation_rows):
    section = "\n".join(evaluation.SECTION.render([result(evaluation_rows, benchmark="evaluation")]))
    for name in evaluation.SETUPS:
        assert section.count(f" | {name} | ") == len(QUICK.samples) + (name in (evaluation.SUMS, evaluation.STREAMING))
    assert "kept with `sample_sums`, over the logits | 0.0001 |" in section
