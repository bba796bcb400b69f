import copy
import inspect
import math
import pickle
import re
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import accuracy_score

from metrics import Metric, bootstrap, build, by_group, classification, language_modeling, regression, with_labels_from
from metrics._core.evaluation import leaves
from metrics._core.metric import ratio

from .evaluations import columns, cut, evaluation, samples, stream, tensors, truth

GUESSES = np.array([0, 1, 1, 2, 2, 0, 1])
TARGETS = np.array([0, 1, 2, 2, 1, 0, 1])


def hits(predictions, labels, *, tolerance=0):
    return {"hits": abs(predictions - labels) <= tolerance, "samples": np.ones(len(labels))}


def hit_rate(sums):
    return {"hit_rate": ratio(sums["hits"], sums["samples"])}


def error_rate(sums):
    return {"error_rate": 1 - ratio(sums["hits"], sums["samples"])}


def pairs(predictions, labels):
    return {"guess": predictions, "target": labels}


def spearman(rows):
    return {"spearman": spearmanr(rows["guess"], rows["target"]).statistic}


ACCURACY = Metric(statistics=hits, score=hit_rate, higher_is_better={"hit_rate": True})
ERROR = Metric(statistics=hits, score=error_rate, higher_is_better={"error_rate": False})
SPEARMAN = Metric(
    statistics=pairs,
    score=spearman,
    higher_is_better={"spearman": True},
    needs_all_samples="Spearman ranks every sample among all",
)


def test_a_users_metric_is_two_functions_and_directions():
    assert ACCURACY(evaluation(GUESSES, TARGETS)) == {"hit_rate": accuracy_score(TARGETS, GUESSES)}


def test_the_signature_is_what_the_trainer_looks_for():
    assert str(inspect.signature(language_modeling()).replace(return_annotation=str)).startswith("(eval_pred")
    parameters = inspect.signature(build(language_modeling(), num_samples=3)).parameters
    assert list(parameters) == ["eval_pred", "compute_result"]
    assert parameters["compute_result"].default is True


def test_columns_are_int64_or_float64_and_in_order():
    rows = ACCURACY.columns(evaluation([GUESSES[:3], GUESSES[3:]], [TARGETS[:3], TARGETS[3:]]))
    assert {name: column.dtype for name, column in rows.items()} == {"hits": np.int64, "samples": np.float64}
    assert rows["hits"].tolist() == (GUESSES == TARGETS).tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16])
def test_narrow_statistics_do_not_overflow(dtype):
    def total(predictions, labels):
        return {"total": predictions}

    metric = Metric(statistics=total, score=dict, higher_is_better={"total": None})
    assert metric(evaluation(np.full(70_000, 100, dtype), np.zeros(70_000))) == {"total": 7e6}


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        ({}, ValueError, "no column"),
        ({"x": np.float64(3.0)}, ValueError, r"'x' must have 7 rows, one per sample, got shape \(\)"),
        ({"x": np.zeros(6)}, ValueError, r"'x' must have 7 rows, one per sample, got shape \(6,\)"),
        ({"x": np.array(["a"] * 7)}, TypeError, "'x' must be integer, float or bool, got dtype <U1"),
        ({"x": np.zeros(7, complex)}, TypeError, "complex"),
    ],
)
def test_statistics_must_have_one_row_per_sample(returned, error, message):
    metric = Metric(
        statistics=lambda predictions, labels: returned, score=hit_rate, higher_is_better={"hit_rate": True}
    )
    with pytest.raises(error, match=message):
        metric(evaluation(GUESSES, TARGETS))


def test_statistics_may_not_differ_between_batches():
    def by_length(predictions, labels):
        return {f"column_{len(labels)}": labels}

    metric = Metric(statistics=by_length, score=dict, higher_is_better={}, num_samples=7)
    with pytest.raises(ValueError, match="column_3 and then column_4"):
        metric(evaluation([GUESSES[:3], GUESSES[3:]], [TARGETS[:3], TARGETS[3:]]))
    metric(evaluation(GUESSES[:3], TARGETS[:3]), compute_result=False)
    with pytest.raises(ValueError, match="column_3 and then column_4"):
        metric(evaluation(GUESSES[3:], TARGETS[3:]))


def test_statistics_of_more_dimensions_are_summed_over_the_samples_only():
    def confusion(predictions, labels):
        return {"confusion": np.eye(3)[predictions][:, :, None] * np.eye(3)[labels][:, None]}

    def trace(sums):
        return {"trace": np.trace(sums["confusion"], axis1=-2, axis2=-1)}

    metric = Metric(statistics=confusion, score=trace, higher_is_better={"trace": True})
    assert metric.sums(metric.columns(evaluation(GUESSES, TARGETS)))["confusion"].shape == (3, 3)
    assert metric(evaluation(GUESSES, TARGETS)) == {"trace": accuracy_score(TARGETS, GUESSES, normalize=False)}


def test_a_score_is_one_number_with_a_direction():
    with pytest.raises(ValueError, match=r"returned 'hit_rate', but higher_is_better has only accuracy"):
        Metric(statistics=hits, score=hit_rate, higher_is_better={"accuracy": True})(evaluation(GUESSES, TARGETS))
    metric = Metric(statistics=hits, score=lambda sums: {"both": [1.0, 2.0]}, higher_is_better={"both": True})
    with pytest.raises(ValueError, match=r"'both' has shape \(2,\)"):
        metric(evaluation(GUESSES, TARGETS))


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), np.int64(1), np.True_, 1, True])
def test_results_are_python_floats(value):
    metric = Metric(statistics=hits, score=lambda sums: {"value": value}, higher_is_better={"value": None})
    result = metric(evaluation(GUESSES, TARGETS))
    assert result == {"value": float(value)}
    assert type(result["value"]) is float


SPEEDS = ["runtime", "samples_per_second", "steps_per_second", "jit_compilation_time", "model_preparation_time"]


@pytest.mark.parametrize("key", [*SPEEDS, "loss", "epoch", "eval_accuracy", "test_loss"])
def test_the_trainers_keys_are_refused_when_building(key):
    with pytest.raises(ValueError, match=f"{key!r} has a name that the Trainer writes"):
        Metric(statistics=hits, score=hit_rate, higher_is_better={key: None})


copied = pytest.mark.parametrize("copied", [lambda own: pickle.loads(pickle.dumps(own)), copy.deepcopy, copy.copy])


@copied
@pytest.mark.parametrize("metric", [language_modeling(), build(language_modeling(), ner=ACCURACY), SPEARMAN], ids=repr)
def test_copies_are_equal(metric, copied):
    twin = copied(metric)
    assert twin == metric
    assert hash(twin) == hash(metric)
    assert repr(twin) == repr(metric)
    assert twin is not metric


def test_repr_names_functions_keys_and_num_samples():
    assert repr(language_modeling()) == (
        "Metric(statistics=token_sums, score=token_scores, keys=(nll_loss, perplexity, bits_per_byte, "
        "bits_per_character, token_accuracy, top_{k}_accuracy, sequence_accuracy, entropy, tokens, samples))"
    )
    near = Metric(statistics=partial(hits, tolerance=1), score=hit_rate, higher_is_better={"near_rate": True})
    shown = repr(build(ACCURACY, ERROR, near=near, num_samples=7))
    assert shown == (
        "Metric(statistics=(hits, partial(hits, tolerance=1)), score=(hit_rate, error_rate, near_*: hit_rate), "
        "keys=(hit_rate, error_rate, near_near_rate), num_samples=7)"
    )
    assert "needs_all_samples=Spearman ranks" in repr(SPEARMAN)


def test_the_repr_has_no_private_name_and_no_address():
    grouped, labelled = by_group(classification(2), "ab", labels=[0, 1]), with_labels_from(classification(2), "answers")
    for metric in (grouped, labelled, bootstrap(regression(rank_correlation=True), unit="ab")):
        assert not re.findall(r"(?<!\w)_[a-zA-Z]\w*| at 0x", repr(metric))


def test_ratio_is_nan_at_zero_and_keeps_shapes():
    values = ratio(np.array([1, 0, 3]), np.array([[2, 0, 0], [1, 1, 1]]))
    assert values.shape == (2, 3)
    assert values[0, 0] == 0.5
    assert np.isnan(values[0, 1:]).all()
    assert values[1].tolist() == [1.0, 0.0, 3.0]
    assert math.isnan(ratio(0, 0))


ROWS = samples(12, seed=3)
BOUNDS = [0, 5, 10, 12]
PARTS = cut(columns(ROWS), BOUNDS)
LABELS = cut(np.zeros((12, 4), dtype=np.int64), BOUNDS)
STEPS = [evaluation(tensors(part), torch.from_numpy(labels)) for part, labels in zip(PARTS, LABELS, strict=True)]
EXPECTED = pytest.approx(truth(ROWS), rel=1e-12, abs=0)
OTHER = samples(8, seed=4)
WHOLE = evaluation(columns(OTHER), np.zeros((8, 2)))


def streaming(**options):
    return build(language_modeling(), **({"num_samples": 12} | options))


def run(metric, steps=STEPS):
    return stream(metric, [step.predictions for step in steps], [step.label_ids for step in steps])


def test_one_step_is_a_whole_evaluation():
    assert language_modeling()(evaluation(tensors(columns(ROWS)), torch.zeros(12, 4))) == EXPECTED
    assert streaming()(evaluation(tensors(columns(ROWS)), torch.zeros(12, 4))) == EXPECTED


def test_error_after_an_interrupted_evaluation_names_the_cause():
    metric = streaming()
    metric(STEPS[0], compute_result=False)
    with pytest.raises(ValueError, match=r"The state was reset: if an earlier .* was interrupted, run this one again"):
        run(metric)


def test_steps_are_refused_while_the_count_is_unknown():
    metric = language_modeling()
    with pytest.raises(ValueError, match=r"num_samples=len\(eval_dataset\)"):
        metric(STEPS[0], compute_result=False)
    assert metric(WHOLE) == pytest.approx(truth(OTHER), rel=1e-12)


def test_too_few_rows_and_too_many_raise_and_clear():
    metric = streaming(num_samples=13)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"num_samples=13 rows, got 12"):
            run(metric)
    metric = streaming(num_samples=9)
    metric(STEPS[0], compute_result=False)
    with pytest.raises(ValueError, match=r"num_samples=9 rows, got 10"):
        metric(STEPS[1], compute_result=False)
    assert metric(STEPS[0], compute_result=False) == {}


def test_reset_forgets():
    metric = streaming()
    metric(STEPS[0], compute_result=False)
    assert metric.reset() is None
    assert run(metric) == EXPECTED


@pytest.mark.parametrize("compute_result", [False, True])
@pytest.mark.parametrize(
    ("predictions", "rows"),
    [
        ({"nll": torch.zeros(5)}, 5),
        (tensors(PARTS[0]), 4),
        (tensors(PARTS[0]) | {"text": "no tensor"}, 5),
        ({name: column for name, column in tensors(PARTS[1]).items() if "correct_top" not in name}, 5),
    ],
    ids=["columns", "rows", "leaf", "other columns"],
)
def test_every_error_clears(predictions, rows, compute_result):
    metric = streaming()
    metric(STEPS[0], compute_result=False)
    with pytest.raises((ValueError, TypeError)):
        metric(evaluation(predictions, torch.zeros(rows)), compute_result=compute_result)
    assert run(metric) == EXPECTED


def test_an_error_in_the_score_clears():
    errors = [ZeroDivisionError()]

    def once_wrong(sums):
        if errors:
            raise errors.pop()
        return {"n": sums["n"]}

    def rows(predictions, labels):
        return {"n": np.ones(len(labels))}

    metric = Metric(statistics=rows, score=once_wrong, higher_is_better={"n": None}, num_samples=12)
    with pytest.raises(ZeroDivisionError):
        run(metric)
    assert run(metric) == {"n": 12.0}


@pytest.mark.parametrize("whole", [WHOLE, evaluation([WHOLE.predictions], [WHOLE.label_ids])], ids=["arrays", "lists"])
def test_a_whole_evaluation_neither_reads_nor_writes_the_running_one(whole):
    metric = build(language_modeling(), num_samples=8)
    steps = [evaluation(tensors(part), torch.zeros(4, 2)) for part in cut(columns(OTHER), [0, 4, 8])]
    metric(steps[0], compute_result=False)
    assert metric(whole) == pytest.approx(truth(OTHER), rel=1e-12)
    assert metric(steps[1]) == pytest.approx(truth(OTHER), rel=1e-12)


def test_an_error_of_a_whole_evaluation_leaves_the_running_one():
    metric = streaming()
    metric(STEPS[0], compute_result=False)
    metric(STEPS[1], compute_result=False)
    with pytest.raises(ValueError, match=r"num_samples=12 rows, got 8"):
        metric(WHOLE)
    assert metric(STEPS[2]) == EXPECTED


@copied
def test_a_copy_starts_without_the_running_evaluation(copied):
    metric = streaming()
    metric(STEPS[0], compute_result=False)
    twin = copied(metric)
    assert run(twin) == EXPECTED
    metric(STEPS[1], compute_result=False)
    assert metric(STEPS[2]) == EXPECTED


def test_the_running_evaluation_keeps_sums_and_no_rows():
    metric = streaming()
    metric(STEPS[0], compute_result=False)
    (totals,) = metric._running.values()
    assert totals.rows == 5
    assert all(value.shape == () for _, value in leaves(totals.sums))
