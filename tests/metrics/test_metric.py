import copy
import inspect
import math
import pickle
import re
from dataclasses import FrozenInstanceError, dataclass
from functools import partial

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import accuracy_score, log_loss

from metrics import Metric, bootstrap, build, by_group, classification, labels_from, language_modeling, regression
from metrics._core.metric import ratio

from .evaluations import columns, evaluation, samples

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


ACCURACY = Metric(statistics=hits, score=hit_rate, directions={"hit_rate": True})
ERROR = Metric(statistics=hits, score=error_rate, directions={"error_rate": False})
SPEARMAN = Metric(
    statistics=pairs, score=spearman, directions={"spearman": True}, whole="Spearman ranks every sample among all"
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
    metric = Metric(
        statistics=lambda predictions, labels: {"total": predictions},
        score=lambda sums: {"total": sums["total"]},
        directions={"total": None},
    )
    assert metric(evaluation(np.full(70_000, 100, dtype), np.zeros(70_000))) == {"total": 7e6}


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        ({}, ValueError, "no column"),
        ({"x": np.float64(3.0)}, ValueError, r"'x' has shape \(\), not \(7, ...\)"),
        ({"x": np.zeros(6)}, ValueError, r"'x' has shape \(6,\), not \(7, ...\)"),
        ({"x": np.array(["a"] * 7)}, TypeError, "'x' is of dtype <U1"),
        ({"x": np.zeros(7, complex)}, TypeError, "complex"),
    ],
)
def test_statistics_have_one_row_a_sample(returned, error, message):
    metric = Metric(statistics=lambda predictions, labels: returned, score=hit_rate, directions={"hit_rate": True})
    with pytest.raises(error, match=message):
        metric(evaluation(GUESSES, TARGETS))


def test_statistics_may_not_differ_between_batches():
    metric = Metric(
        statistics=lambda predictions, labels: {f"column_{len(labels)}": labels},
        score=lambda sums: {},
        directions={},
        num_samples=7,
    )
    with pytest.raises(ValueError, match="column_3 in one, column_4 in another"):
        metric(evaluation([GUESSES[:3], GUESSES[3:]], [TARGETS[:3], TARGETS[3:]]))
    metric(evaluation(GUESSES[:3], TARGETS[:3]), compute_result=False)
    with pytest.raises(ValueError, match="column_3 in one, column_4 in another"):
        metric(evaluation(GUESSES[3:], TARGETS[3:]))


def test_statistics_of_more_dimensions_are_summed_over_the_samples_only():
    metric = Metric(
        statistics=lambda predictions, labels: {
            "confusion": np.eye(3)[predictions][:, :, None] * np.eye(3)[labels][:, None]
        },
        score=lambda sums: {"trace": np.trace(sums["confusion"], axis1=-2, axis2=-1)},
        directions={"trace": True},
    )
    assert metric.sums(metric.columns(evaluation(GUESSES, TARGETS)))["confusion"].shape == (3, 3)
    assert metric(evaluation(GUESSES, TARGETS)) == {"trace": accuracy_score(TARGETS, GUESSES, normalize=False)}


def test_a_score_is_one_number_with_a_direction():
    with pytest.raises(ValueError, match=r"returned 'hit_rate'; directions has only accuracy"):
        Metric(statistics=hits, score=hit_rate, directions={"accuracy": True})(evaluation(GUESSES, TARGETS))
    metric = Metric(statistics=hits, score=lambda sums: {"both": [1.0, 2.0]}, directions={"both": True})
    with pytest.raises(ValueError, match=r"'both' has shape \(2,\)"):
        metric(evaluation(GUESSES, TARGETS))


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), np.int64(1), np.True_, 1, True])
def test_results_are_python_floats(value):
    metric = Metric(statistics=hits, score=lambda sums: {"value": value}, directions={"value": None})
    result = metric(evaluation(GUESSES, TARGETS))
    assert result == {"value": float(value)}
    assert type(result["value"]) is float


# --- joined ----------------------------------------------------------------------------------------------------------


def test_joined_metrics_give_the_scores_of_each():
    scores = build(ACCURACY, ERROR, lm=ACCURACY)(evaluation(GUESSES, TARGETS))
    right = accuracy_score(TARGETS, GUESSES)
    assert scores == {"hit_rate": right, "error_rate": 1 - right, "lm_hit_rate": right}


def test_shared_statistics_are_computed_once():
    calls = []

    def counted(predictions, labels, *, tolerance=0):
        calls.append(tolerance)
        return hits(predictions, labels, tolerance=tolerance)

    def metric(statistics):
        return Metric(statistics=statistics, score=hit_rate, directions={"hit_rate": True})

    def joined(*statistics):
        calls.clear()
        return build(**{f"m{place}": metric(each) for place, each in enumerate(statistics)})

    def close():
        return partial(counted, tolerance=1)

    near = sum(abs(guess - target) <= 1 for guess, target in zip(GUESSES, TARGETS, strict=True)) / 7
    scores = joined(counted, counted, close(), close(), counted)(evaluation(GUESSES, TARGETS))
    assert calls == [0, 1]
    assert [scores[f"m{place}_hit_rate"] for place in range(5)] == [5 / 7, 5 / 7, near, near, 5 / 7]
    joined(partial(counted, tolerance=np.array([0])), partial(counted, tolerance=np.array([0])))(
        evaluation(GUESSES, TARGETS)
    )
    assert len(calls) == 2  # not hashable, so not known to be equal


def test_equal_dataclasses_share_statistics_and_different_ones_do_not():
    calls = []

    @dataclass(frozen=True)
    class Hits:
        tolerance: int

        def __call__(self, predictions, labels):
            calls.append(self.tolerance)
            return hits(predictions, labels, tolerance=self.tolerance)

    parts = [Metric(statistics=Hits(n), score=hit_rate, directions={"hit_rate": True}) for n in (0, 0, 1)]
    build(*parts[:1], b=parts[1], c=parts[2])(evaluation(GUESSES, TARGETS))
    assert calls == [0, 1]


@pytest.mark.parametrize(
    "join",
    [
        lambda: build(ACCURACY, ACCURACY),
        lambda: build(language_modeling(), language_modeling()),
        lambda: build(ACCURACY, build(ERROR, ACCURACY)),
        lambda: build(
            language_modeling(), Metric(statistics=hits, score=hit_rate, directions={"top_7_accuracy": True})
        ),
        lambda: build(
            Metric(statistics=hits, score=hit_rate, directions={"top_7_accuracy": True}), language_modeling()
        ),
        lambda: build(Metric(statistics=hits, score=hit_rate, directions={"lm_hit_rate": True}), lm=ACCURACY),
    ],
)
def test_a_collision_of_keys_is_refused_when_building(join):
    with pytest.raises(ValueError, match="two metrics return"):
        join()


def test_builds_nest():
    inner = build(ACCURACY, other=ERROR, num_samples=7)
    scores = build(inner, deep=inner)(evaluation(GUESSES, TARGETS))
    assert set(scores) == {"hit_rate", "other_error_rate", "deep_hit_rate", "deep_other_error_rate"}
    assert build(inner).num_samples == 7
    with pytest.raises(ValueError, match="8 by num_samples, 7 by num_samples"):
        build(inner, num_samples=8)


def test_build_refuses_what_is_no_metric():
    with pytest.raises(ValueError, match="at least one metric"):
        build(num_samples=3)
    with pytest.raises(TypeError, match="function"):
        build(hits)
    with pytest.raises(TypeError, match="int"):
        build(language_modeling(), num_sample=3)  # a misspelt option is no metric


def test_counts_may_be_those_of_numpy():
    assert build(classification(np.int64(2)), num_samples=np.int64(7)).num_samples == 7
    with pytest.raises(TypeError, match=r"number of classes, an integer of at least 1; 2\.0 \(float\) came"):
        classification(2.0)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-3, ValueError), (2.5, TypeError), ([1, 2], TypeError)])
def test_num_samples_is_a_positive_integer(value, error):
    with pytest.raises(error, match="num_samples"):
        build(ACCURACY, num_samples=value)


@pytest.mark.parametrize(
    "key",
    [
        "loss",
        "runtime",
        "samples_per_second",
        "steps_per_second",
        "epoch",
        "jit_compilation_time",
        "model_preparation_time",
        "eval_accuracy",
        "test_loss",
    ],
)
def test_the_trainers_keys_are_refused_when_building(key):
    with pytest.raises(ValueError, match=f"{key!r} has a name that the Trainer writes"):
        Metric(statistics=hits, score=hit_rate, directions={key: None})


def test_a_name_that_makes_a_reserved_key_is_refused():
    total = Metric(statistics=hits, score=hit_rate, directions={"per_second": None})
    assert build(total).directions == {"per_second": None}
    with pytest.raises(ValueError, match="'samples_per_second'"):
        build(samples=total)
    with pytest.raises(ValueError, match="'eval_hit_rate'"):
        build(eval=ACCURACY)


# --- metrics that need every sample ----------------------------------------------------------------------------------


def test_a_metric_that_is_no_sum_gets_every_row():
    expected = spearmanr(GUESSES, TARGETS).statistic
    assert SPEARMAN(evaluation(GUESSES, TARGETS)) == {"spearman": expected}
    in_lists = evaluation([GUESSES[:3], GUESSES[3:]], [TARGETS[:3], TARGETS[3:]])
    assert SPEARMAN(in_lists) == {"spearman": expected}
    assert build(ACCURACY, SPEARMAN)(in_lists) == {"hit_rate": 5 / 7, "spearman": expected}
    nested = build(ERROR, deep=build(ACCURACY, SPEARMAN))
    assert nested(in_lists) == {"error_rate": 1 - 5 / 7, "deep_hit_rate": 5 / 7, "deep_spearman": expected}


@pytest.mark.parametrize("metric", [build(SPEARMAN, num_samples=7), build(ACCURACY, SPEARMAN, num_samples=7)])
def test_it_refuses_steps_with_the_reason(metric):
    with pytest.raises(ValueError, match=r"Spearman ranks every sample among all.*batch_eval_metrics=False"):
        metric(evaluation(GUESSES[:3], TARGETS[:3]), compute_result=False)


# --- the object ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [lambda metric: pickle.loads(pickle.dumps(metric)), copy.deepcopy, copy.copy])
@pytest.mark.parametrize("metric", [language_modeling(), build(language_modeling(), ner=ACCURACY), SPEARMAN], ids=repr)
def test_copies_are_equal(metric, copied):
    twin = copied(metric)
    assert twin == metric
    assert hash(twin) == hash(metric)
    assert repr(twin) == repr(metric)
    assert twin is not metric


def test_metrics_are_frozen():
    with pytest.raises(FrozenInstanceError):
        language_modeling().num_samples = 3


def test_the_repr_says_what_is_computed():
    assert repr(language_modeling()) == (
        "Metric(statistics=token_sums, score=token_scores, keys=(nll_loss, perplexity, token_accuracy, "
        "top_{k}_accuracy, entropy, sequence_accuracy, tokens, samples, bits_per_byte, bits_per_character))"
    )
    near = Metric(statistics=partial(hits, tolerance=1), score=hit_rate, directions={"near_rate": True})
    shown = repr(build(ACCURACY, ERROR, near=near, num_samples=7))
    assert shown == (
        "Metric(statistics=(hits, partial(hits, tolerance=1)), score=(hit_rate, error_rate, near_*: hit_rate), "
        "keys=(hit_rate, error_rate, near_near_rate), num_samples=7)"
    )
    assert "whole=Spearman ranks" in repr(SPEARMAN)


@pytest.mark.parametrize(
    "metric",
    [
        by_group(classification(2), "ab", labels=[0, 1]),
        labels_from(classification(2, ranking=True), "answers"),
        bootstrap(regression(ranking=True), unit="ab"),
    ],
)
def test_the_repr_has_no_private_name_and_no_address(metric):
    assert not re.findall(r"(?<!\w)_[a-zA-Z]\w*| at 0x", repr(metric))


def test_the_mean_of_a_column_agrees_with_scikit_learn():
    probabilities = np.random.default_rng(0).dirichlet(np.ones(3), 7)
    metric = Metric(
        statistics=lambda predictions, labels: {"nll": -np.log(predictions[range(7), labels]), "n": np.ones(7)},
        score=lambda sums: {"log_loss": ratio(sums["nll"], sums["n"])},
        directions={"log_loss": False},
    )
    assert metric(evaluation(probabilities, TARGETS))["log_loss"] == pytest.approx(log_loss(TARGETS, probabilities))


def test_ratio_is_nan_at_zero_and_keeps_shapes():
    values = ratio(np.array([1, 0, 3]), np.array([[2, 0, 0], [1, 1, 1]]))
    assert values.shape == (2, 3)
    assert values[0, 0] == 0.5
    assert np.isnan(values[0, 1:]).all()
    assert values[1].tolist() == [1.0, 0.0, 3.0]
    assert math.isnan(ratio(0, 0))


def test_a_joined_metric_scores_stacks_of_sums():
    metric = build(language_modeling(), n=language_modeling())
    rows = metric.columns(evaluation(columns(samples(6)), np.zeros((6, 2))))
    stack = metric.scores({name: np.stack([column[:3].sum(0), column.sum(0)]) for name, column in rows.items()})
    assert stack["perplexity"].tolist() == stack["n_perplexity"].tolist()
    assert stack["perplexity"][1] == metric.result(metric.sums(rows))["perplexity"]
