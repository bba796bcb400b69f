"""Metrics of scikit-learn, evaluate and torchmetrics as ours, and ours as evaluate's."""

import pickle
import tempfile
from functools import partial

import datasets
import evaluate
import numpy as np
import pytest
import torchmetrics
from scipy import stats
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, log_loss, mean_absolute_error

import metrics

from .evaluations import cut, evaluation

GENERATOR = np.random.default_rng(0)
N = -100
LABELS = GENERATOR.integers(0, 3, (10, 6))
LABELS[GENERATOR.random(LABELS.shape) < 0.3] = N
IDS = np.where(GENERATOR.random(LABELS.shape) < 0.6, np.maximum(LABELS, 0), GENERATOR.integers(0, 3, LABELS.shape))
PROBABILITIES = GENERATOR.dirichlet(np.ones(3), LABELS.shape)
THERE = LABELS != N


class Share(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, scale=1.0):
        return {"share": scale * sum(p == r for p, r in zip(predictions, references, strict=True)) / len(references)}


SHARE = Share(keep_in_memory=True, cache_dir=tempfile.gettempdir())


def ragged(array):
    """Batches whose rows differ in length, as `eval_do_concat_batches=False` keeps them."""
    widths = zip(cut(array, (0, 3, 10)), (4, 6), strict=True)
    return [part[:, :width] for part, width in widths]


def flat(array):
    return np.concatenate([part.reshape(-1, *array.shape[2:]) for part in ragged(array)])


METRICS = [
    (partial(f1_score, average="macro"), "ids", IDS, lambda y, p: f1_score(y, p, average="macro")),
    (accuracy_score, "ids", IDS, accuracy_score),
    (log_loss, "probabilities", PROBABILITIES, log_loss),
    (mean_absolute_error, "scores", PROBABILITIES[..., 0], mean_absolute_error),
]


@pytest.mark.parametrize(("function", "kind", "predictions", "expected"), METRICS)
def test_functions_of_scikit_learn(function, kind, predictions, expected):
    metric = metrics.from_sklearn(function, kind=kind, greater_is_better=None, name="score")
    assert metric(evaluation(predictions, LABELS))["score"] == expected(LABELS[THERE], predictions[THERE])
    lists = evaluation([{kind: part} for part in ragged(predictions)], ragged(LABELS))
    there = flat(LABELS) != N
    assert metric(lists)["score"] == expected(flat(LABELS)[there], flat(predictions)[there])
    assert pickle.loads(pickle.dumps(metric))(lists) == metric(lists)


def test_from_sklearn_sets_key_and_direction():
    metric = metrics.from_sklearn(partial(f1_score, average="macro"), kind="ids", greater_is_better=True)
    assert metric.higher_is_better == {"f1_score": True}
    with pytest.raises(ValueError, match="got '<lambda>': set name="):
        metrics.from_sklearn(lambda y, p: 0, kind="ids", greater_is_better=True)


def test_from_sklearn_supports_groups_and_intervals_and_refuses_to_stream():
    metric = metrics.from_sklearn(accuracy_score, kind="ids", greater_is_better=True)
    scores = metrics.build(metrics.bootstrap(metric, n=50), metrics.by_group(metric, np.arange(10) % 2))(
        evaluation(IDS, LABELS)
    )
    half = THERE[1::2]
    assert scores["accuracy_score/1"] == accuracy_score(LABELS[1::2][half], IDS[1::2][half])
    assert scores["accuracy_score_low"] < accuracy_score(LABELS[THERE], IDS[THERE]) < scores["accuracy_score_high"]
    with pytest.raises(ValueError, match="not known whether it can be summed"):
        metric(evaluation(IDS, LABELS), compute_result=False)


@pytest.mark.parametrize(
    ("kind", "predictions", "message"),
    [
        ("scores", IDS, "scores must be floats"),
        ("probabilities", PROBABILITIES[..., 0], "do not fit"),
        ("ids", IDS[:, :3], "do not fit"),
    ],
)
def test_predictions_of_another_kind_are_refused(kind, predictions, message):
    with pytest.raises((TypeError, ValueError), match=message):
        metrics.from_sklearn(accuracy_score, kind=kind, greater_is_better=True)(evaluation(predictions, LABELS))


def test_from_evaluate_gives_the_scores_of_the_module():
    share = accuracy_score(LABELS[THERE], IDS[THERE])
    metric = metrics.from_evaluate(SHARE, kind="ids", higher_is_better={"share": True}, options={"scale": 2.0})
    assert metric(evaluation(IDS, LABELS)) == {"share": 2 * share} == metric(evaluation(IDS, LABELS))


def test_from_evaluate_refuses_floats_that_would_be_truncated_and_unknown_keys():
    cast = metrics.from_evaluate(SHARE, kind="scores", higher_is_better={"share": True})
    with pytest.raises(TypeError, match="would truncate to int32"):
        cast(evaluation(PROBABILITIES[..., 0], LABELS))
    with pytest.raises(ValueError, match="higher_is_better has only other"):
        metrics.from_evaluate(SHARE, kind="ids", higher_is_better={"other": True})(evaluation(IDS, LABELS))


def test_objects_of_torchmetrics():
    own = torchmetrics.classification.MulticlassF1Score(3, average="macro")
    metric = metrics.from_torchmetrics(own, kind="ids", name="f1")
    expected = f1_score(LABELS[THERE], IDS[THERE], average="macro")
    for _ in range(2):
        assert metric(evaluation(IDS, LABELS))["f1"] == pytest.approx(expected, rel=1e-6)
    assert metrics.best_model_kwargs("f1", metric) == {"metric_for_best_model": "f1", "greater_is_better": True}
    assert not own.update_called
    error = metrics.from_torchmetrics(torchmetrics.MeanAbsoluteError(), kind="scores")
    assert metrics.best_model_kwargs("MeanAbsoluteError", error)["greater_is_better"] is False


def test_several_numbers_of_an_object_of_torchmetrics_have_names():
    by_class = torchmetrics.classification.MulticlassAveragePrecision(3, average=None)
    scores = metrics.from_torchmetrics(by_class, kind="probabilities", name="ap")(evaluation(PROBABILITIES, LABELS))
    expected = [average_precision_score(LABELS[THERE] == k, PROBABILITIES[THERE][:, k]) for k in range(3)]
    assert scores == pytest.approx({f"ap_{place}": value for place, value in enumerate(expected)}, rel=1e-6)
    named = torchmetrics.wrappers.ClasswiseWrapper(by_class, labels=["x", "y", "z"], prefix="of_")
    metric = metrics.from_torchmetrics(named, kind="probabilities", name="ap", greater_is_better=True)
    assert metric(evaluation(PROBABILITIES, LABELS)) == pytest.approx(
        dict(zip(("ap_of_x", "ap_of_y", "ap_of_z"), expected, strict=True)), rel=1e-6
    )
    assert metrics.best_model_kwargs("eval_ap_of_x", metric)["greater_is_better"]


@pytest.mark.parametrize(
    ("module", "kind", "predictions"),
    [
        (torchmetrics.classification.MulticlassConfusionMatrix(3), "ids", IDS),
        (torchmetrics.classification.MulticlassROC(3), "probabilities", PROBABILITIES),
    ],
)
def test_torchmetrics_objects_without_single_numbers_are_refused(module, kind, predictions):
    with pytest.raises(TypeError, match="single numbers"):
        metrics.from_torchmetrics(module, kind=kind)(evaluation(predictions, LABELS))


def test_to_evaluate_returns_the_scores_of_the_metric():
    generator = np.random.default_rng(0)
    labels, ids, probabilities = LABELS[THERE], IDS[THERE], PROBABILITIES[THERE]
    wrapped = metrics.to_evaluate(metrics.classification(3), kind="ids")
    wrapped.add_batch(predictions=ids[:5], references=labels[:5])
    wrapped.add_batch(predictions=ids[5:], references=labels[5:])
    assert wrapped.compute()["accuracy"] == accuracy_score(labels, ids)
    brier = metrics.to_evaluate(metrics.classification(3), kind="probabilities").compute(
        predictions=probabilities, references=labels
    )
    assert brier["log_loss"] == pytest.approx(log_loss(labels, probabilities))
    x, y = generator.random((2, 30))
    scores = metrics.to_evaluate(metrics.regression(), kind="scores").compute(predictions=x, references=y)
    assert scores["pearson"] == pytest.approx(stats.pearsonr(x, y).statistic)


def test_probabilities_of_a_single_class_keep_their_dimension():
    metric = metrics.from_sklearn(
        lambda labels, p: p.ndim, kind="probabilities", greater_is_better=None, name="dimensions"
    )
    for probabilities in (PROBABILITIES[..., :1], PROBABILITIES):
        assert metric(evaluation({"probabilities": probabilities}, LABELS)) == {"dimensions": 2.0}
