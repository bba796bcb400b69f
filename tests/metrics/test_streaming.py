import copy
import pickle

import numpy as np
import pytest
import torch

from metrics import Metric, build, language_modeling

from .evaluations import columns, cut, evaluation, samples, stream, tensors, truth

ROWS = samples(12, seed=3)
BOUNDS = [0, 5, 10, 12]
PARTS = cut(columns(ROWS), BOUNDS)
LABELS = cut(np.zeros((12, 4), dtype=np.int64), BOUNDS)
STEPS = [evaluation(tensors(part), torch.from_numpy(labels)) for part, labels in zip(PARTS, LABELS, strict=True)]
ARRAYS = [evaluation(part, labels) for part, labels in zip(PARTS, LABELS, strict=True)]
EXPECTED = pytest.approx(truth(ROWS), rel=1e-12, abs=0)
OTHER = samples(8, seed=4)
WHOLE = evaluation(columns(OTHER), np.zeros((8, 2)))


def streaming(**options):
    return build(language_modeling(), **({"num_samples": 12} | options))


def run(metric, steps=STEPS):
    return stream(metric, [step.predictions for step in steps], [step.label_ids for step in steps])


def test_one_metric_serves_many_evaluations():
    metric = streaming()
    for _ in range(3):
        assert run(metric) == EXPECTED


def test_one_step_is_a_whole_evaluation():
    assert language_modeling()(evaluation(tensors(columns(ROWS)), torch.zeros(12, 4))) == EXPECTED
    assert streaming()(evaluation(tensors(columns(ROWS)), torch.zeros(12, 4))) == EXPECTED


# --- an evaluation that broke off ------------------------------------------------------------------------------------


class Naive:
    """Sums that are cleared by results only, and no count of rows: what users write."""

    def __init__(self):
        self.nll = self.tokens = 0.0

    def __call__(self, eval_pred, compute_result=True):
        self.nll += float(eval_pred.predictions["nll"].sum())
        self.tokens += float(eval_pred.predictions["tokens"].sum())
        if not compute_result:
            return {}
        result = {"nll_loss": self.nll / self.tokens, "tokens": self.tokens}
        self.__init__()
        return result


def assert_right_or_raises(metric, steps, broken_after):
    """After an evaluation of a few steps only: the next raises or is right, and the one after is right."""
    for step in steps[:broken_after]:
        metric(step, compute_result=False)
    try:
        scores = run(metric, steps)
    except ValueError:
        scores = run(metric, steps)
    assert scores["tokens"] == truth(ROWS)["tokens"]
    assert scores["nll_loss"] == pytest.approx(truth(ROWS)["nll_loss"], rel=1e-12)


def test_the_error_after_a_broken_evaluation_says_so():
    metric = streaming()
    metric(STEPS[0], compute_result=False)
    with pytest.raises(ValueError, match="If one broke off before: its rows are forgotten now, evaluate again"):
        run(metric)


@pytest.mark.parametrize("broken_after", [0, 1, 2])
@pytest.mark.parametrize("steps", [STEPS, ARRAYS], ids=["tensors", "arrays"])
def test_after_a_broken_evaluation_the_next_is_right_or_raises(steps, broken_after):
    assert_right_or_raises(streaming(), steps, broken_after)


def test_a_metric_that_is_not_told_the_count_is_caught():
    assert_right_or_raises(Naive(), STEPS, 0)
    with pytest.raises(AssertionError):
        assert_right_or_raises(Naive(), STEPS, 1)


def test_steps_are_refused_while_the_count_is_unknown():
    metric = language_modeling()
    with pytest.raises(ValueError, match=r"num_samples=len\(eval_dataset\)"):
        metric(STEPS[0], compute_result=False)
    assert metric(WHOLE) == pytest.approx(truth(OTHER), rel=1e-12)


def test_too_few_rows_raise_and_clear():
    metric = streaming(num_samples=13)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"12 rows came.*num_samples=13"):
            run(metric)


def test_too_many_rows_raise_at_once_and_clear():
    metric = streaming(num_samples=9)
    metric(STEPS[0], compute_result=False)
    with pytest.raises(ValueError, match=r"10 rows came.*num_samples=9"):
        metric(STEPS[1], compute_result=False)
    assert metric(STEPS[0], compute_result=False) == {}


def test_the_count_holds_for_whole_evaluations_too():
    with pytest.raises(ValueError, match=r"8 rows came.*num_samples=12"):
        streaming()(WHOLE)


def test_reset_forgets():
    metric = streaming()
    metric(STEPS[0], compute_result=False)
    assert metric.reset() is None
    assert run(metric) == EXPECTED


@pytest.mark.parametrize("compute_result", [False, True])
@pytest.mark.parametrize(
    "bad",
    [
        evaluation({"nll": torch.zeros(5)}, torch.zeros(5)),
        evaluation(tensors(PARTS[0]), torch.zeros(4)),
        evaluation({**tensors(PARTS[0]), "text": "no tensor"}, torch.zeros(5)),
        evaluation(
            tensors({name: PARTS[1][name] for name in ("nll", "tokens", "correct", "all_correct")}), torch.zeros(5)
        ),
    ],
    ids=["columns", "rows", "leaf", "other columns"],
)
def test_every_error_clears(bad, compute_result):
    metric = streaming()
    metric(STEPS[0], compute_result=False)
    with pytest.raises((ValueError, TypeError)):
        metric(bad, compute_result=compute_result)
    assert run(metric) == EXPECTED


def test_an_error_in_the_score_clears():
    class Score:
        fails = True

        def __call__(self, sums):
            if self.fails:
                raise ZeroDivisionError
            return {"n": sums["n"]}

    metric = build(
        Metric(
            statistics=lambda predictions, labels: {"n": np.ones(len(labels))}, score=Score(), directions={"n": None}
        ),
        num_samples=12,
    )
    with pytest.raises(ZeroDivisionError):
        run(metric)
    Score.fails = False
    assert run(metric) == {"n": 12.0}


# --- whole evaluations in between ------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match=r"8 rows came"):
        metric(WHOLE)
    assert metric(STEPS[2]) == EXPECTED


# --- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [lambda metric: pickle.loads(pickle.dumps(metric)), copy.deepcopy, copy.copy])
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
    assert all(value.shape == () for value in totals.sums.values())
