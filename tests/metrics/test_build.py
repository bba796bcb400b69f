"""Metrics made of other metrics: joined, with labels from a column, one per dataset."""

import pickle
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import accuracy_score

from metrics import Metric, build, by_dataset, classification, language_modeling, regression, with_labels_from
from metrics._core.evaluation import mapped

from .evaluations import columns, evaluation, samples, tensors
from .test_metric import ACCURACY, ERROR, GUESSES, SPEARMAN, TARGETS, hit_rate, hits


def test_joined_metrics_give_the_scores_of_each():
    scores = build(ACCURACY, ERROR, lm=ACCURACY)(evaluation(GUESSES, TARGETS))
    right = accuracy_score(TARGETS, GUESSES)
    assert scores == {"hit_rate": right, "error_rate": 1 - right, "lm_hit_rate": right}


def test_equal_statistics_are_computed_once():
    calls = []

    @dataclass(frozen=True)
    class Hits:
        tolerance: int

        def __call__(self, predictions, labels, more=0):
            calls.append(self.tolerance)
            return hits(predictions, labels, tolerance=self.tolerance + more)

    def joined(*statistics):
        calls.clear()
        parts = [Metric(statistics=each, score=hit_rate, higher_is_better={"hit_rate": True}) for each in statistics]
        return build(**{f"m{place}": part for place, part in enumerate(parts)})(evaluation(GUESSES, TARGETS))

    near = (abs(GUESSES - TARGETS) <= 1).mean()
    scores = joined(Hits(0), Hits(0), Hits(1), partial(Hits(0), more=1), partial(Hits(0), more=1))
    assert calls == [0, 1, 0]
    assert [*scores.values()] == [5 / 7, 5 / 7, near, near, near]
    joined(*(partial(Hits(0), more=np.array([0])) for _ in range(2)))
    assert len(calls) == 2  # not hashable, so not known to be equal


TOP = Metric(statistics=hits, score=hit_rate, higher_is_better={"top_7_accuracy": True})
PREFIXED = Metric(statistics=hits, score=hit_rate, higher_is_better={"lm_hit_rate": True})


@pytest.mark.parametrize(
    "metrics",
    [(ACCURACY, ACCURACY), (ACCURACY, build(ERROR, ACCURACY)), (language_modeling(), TOP), (TOP, language_modeling())],
)
def test_a_collision_of_keys_is_refused_when_building(metrics):
    for positional, named in ((metrics, {}), ((PREFIXED,), {"lm": ACCURACY})):
        with pytest.raises(ValueError, match="two metrics return"):
            build(*positional, **named)


def test_builds_nest():
    inner = build(ACCURACY, other=ERROR, num_samples=7)
    scores = build(inner, deep=inner)(evaluation(GUESSES, TARGETS))
    assert set(scores) == {"hit_rate", "other_error_rate", "deep_hit_rate", "deep_other_error_rate"}
    assert build(inner).num_samples == 7
    with pytest.raises(ValueError, match="num_samples, got 8, 7"):
        build(inner, num_samples=8)


def test_build_refuses_arguments_that_are_not_metrics():
    with pytest.raises(ValueError, match="at least one metric"):
        build(num_samples=3)
    with pytest.raises(TypeError, match="int"):
        build(language_modeling(), num_sample=3)  # a misspelt option is no metric


def test_a_name_that_makes_a_reserved_key_is_refused():
    total = Metric(statistics=hits, score=hit_rate, higher_is_better={"per_second": None})
    assert build(total).higher_is_better == {"per_second": None}
    with pytest.raises(ValueError, match="'samples_per_second'"):
        build(samples=total)
    with pytest.raises(ValueError, match="'eval_hit_rate'"):
        build(eval=ACCURACY)


def test_metric_that_needs_all_samples_receives_rows():
    expected = spearmanr(GUESSES, TARGETS).statistic
    assert SPEARMAN(evaluation(GUESSES, TARGETS)) == {"spearman": expected}
    in_lists = evaluation([GUESSES[:3], GUESSES[3:]], [TARGETS[:3], TARGETS[3:]])
    assert SPEARMAN(in_lists) == {"spearman": expected}
    assert build(ACCURACY, SPEARMAN)(in_lists) == {"hit_rate": 5 / 7, "spearman": expected}
    nested = build(ERROR, deep=build(ACCURACY, SPEARMAN))
    assert nested(in_lists) == {"error_rate": 1 - 5 / 7, "deep_hit_rate": 5 / 7, "deep_spearman": expected}


@pytest.mark.parametrize("metric", [build(SPEARMAN, num_samples=7), build(ACCURACY, SPEARMAN, num_samples=7)])
def test_metric_that_needs_all_samples_refuses_steps_with_the_reason(metric):
    with pytest.raises(ValueError, match=r"Spearman ranks every sample among all.*batch_eval_metrics=False"):
        metric(evaluation(GUESSES[:3], TARGETS[:3]), compute_result=False)


def test_a_joined_metric_scores_stacks_of_sums():
    metric = build(language_modeling(), n=language_modeling())
    rows = metric.columns(evaluation(columns(samples(6)), np.zeros((6, 2))))
    stack = metric.scores(mapped(lambda column: np.stack([column[:3].sum(0), column.sum(0)]), rows))
    assert stack["perplexity"].tolist() == stack["n_perplexity"].tolist()
    assert stack["perplexity"][1] == metric.result(metric.sums(rows))["perplexity"]


def test_with_labels_from_uses_a_column_as_labels():
    found = {"ids": np.array([0, 1, 1]), "answers": np.array([0, 0, -100])}
    metric = with_labels_from(classification(2), "answers")
    assert metric(evaluation(found, np.zeros((3, 7))))["accuracy"] == 0.5
    with pytest.raises(ValueError, match="'other', which is to be used as labels; got predictions ids"):
        with_labels_from(classification(2), "other")(evaluation(found, np.zeros((3, 7))))


def test_each_dataset_is_scored_by_its_own_metric():
    metric = by_dataset(build(classification(3), num_samples=7), build(regression(), num_samples=50))
    x = np.linspace(0, 1, 50)
    assert metric(evaluation(GUESSES, TARGETS))["accuracy"] == accuracy_score(TARGETS, GUESSES)
    assert metric(evaluation(x, 2 * x))["pearson"] == pytest.approx(1)
    assert pickle.loads(pickle.dumps(by_dataset(build(regression(), num_samples=2)))).metrics[0].num_samples == 2
    with pytest.raises(ValueError, match=r"datasets of 7, 50 rows, got 8 rows"):
        metric(evaluation(x[:8], x[:8]))
    with pytest.raises(ValueError, match="batch_eval_metrics=False"):
        metric(evaluation(*map(tensors, (x, x))), compute_result=False)


def test_datasets_are_told_apart_by_their_rows():
    with pytest.raises(ValueError, match=r"\[3, 3\]"):
        by_dataset(build(classification(2), num_samples=3), build(regression(), num_samples=3))
    with pytest.raises(ValueError, match=r"\[None\]"):
        by_dataset(classification(2))
