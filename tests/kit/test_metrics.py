"""The rules for metrics name every planted defect and accept right metrics, with helpful messages."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from lossfns.testing.rules import judge, select
from metrics.testing import check_metric, metric_rules

from .verdicts import broken_rules

LABELS = np.array([[1, 2, 3, -100], [2, 2, -100, -100], [-100, 1, 3, 3], [0, -100, 1, -100]])
PREDICTIONS = np.array([[1, 2, 2, -100], [2, 2, 2, -100], [1, 1, 3, 0], [1, 1, 1, 1]])
EVALUATION = {"predictions": PREDICTIONS, "labels": LABELS}


def hits(eval_pred):
    """Return the number of hits and of labels, of arrays or lists of arrays (right)."""
    predictions, labels = eval_pred
    if isinstance(predictions, list):
        return sum(map(hits, zip(predictions, labels, strict=True)), np.zeros(2))
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    return np.array([((predictions == labels) & (labels != -100)).sum(), (labels != -100).sum()])


def share(counts):
    return {"token_accuracy": float(counts[0] / counts[1]) if counts[1] else float("nan")}


def right(eval_pred):
    return share(hits(eval_pred))


class Streaming:
    """A right streaming metric that knows the number of rows."""

    def __init__(self, rows=4):
        self.rows, self.seen, self.counts = rows, 0, np.zeros(2)

    def __call__(self, eval_pred, compute_result=True):
        counts, seen = self.counts + hits(eval_pred), self.seen + len(eval_pred.label_ids)
        self.seen, self.counts = 0, np.zeros(2)
        if not compute_result:
            self.seen, self.counts = seen, counts
            return {}
        if seen != self.rows:
            raise ValueError(f"{seen} rows came for {self.rows}")
        return share(counts)


class Remembers(Streaming):
    def __call__(self, eval_pred, compute_result=True):
        self.counts = self.counts * [0.5, 0] + hits(eval_pred)
        return share(self.counts)


class MeanOfSteps(Streaming):
    def __call__(self, eval_pred, compute_result=True):
        steps = [*getattr(self, "steps", []), share(hits(eval_pred))["token_accuracy"]]
        self.steps = [] if compute_result else steps
        return {"token_accuracy": float(np.mean(steps))} if compute_result else {}


class KeepsAnInterruptedEvaluation(Streaming):
    def __call__(self, eval_pred, compute_result=True):
        self.counts = self.counts + hits(eval_pred)
        if not compute_result:
            return {}
        counts, self.counts = self.counts, np.zeros(2)
        return share(counts)


def score(eval_pred):
    return right(eval_pred)["token_accuracy"]


def rows_of(eval_pred):
    return [(p[None], y[None]) for p, y in zip(*eval_pred, strict=True)]


def of_unknown_direction(eval_pred):
    return {"token_error": 1 - score(eval_pred)}


def writes_to_labels(eval_pred):
    value = right(eval_pred)
    eval_pred.label_ids[eval_pred.label_ids == -100] = 0
    return value


def first_rows_count_more(eval_pred):
    return share(sum((hits(row) / (place + 1) for place, row in enumerate(rows_of(eval_pred))), np.zeros(2)))


def neighbours_as_pairs(eval_pred):
    """A score that is the same for the rows in reverse order."""
    rows = np.array([score(row) for row in rows_of(eval_pred)])
    return {"token_accuracy": float((rows[::2] * rows[1::2]).mean()) if len(rows) else float("nan")}


def counts_padding(eval_pred):
    predictions, labels = map(np.asarray, eval_pred)
    return {"token_accuracy": float((predictions == labels).mean()) if labels.size else float("nan")}


def masks_by_predictions(eval_pred):
    predictions, labels = map(np.asarray, eval_pred)
    kept = (predictions != -100) | (np.arange(labels.shape[1]) >= 4)
    return share(np.array([((predictions == labels) & kept).sum(), kept.sum()]))


def mean_of_batches(eval_pred):
    if not isinstance(eval_pred.label_ids, list):
        return right(eval_pred)
    return {"token_accuracy": float(np.mean([score(pair) for pair in zip(*eval_pred, strict=True)]))}


def first_batch_only(eval_pred):
    predictions, labels = eval_pred
    return right((predictions[0], labels[0]) if isinstance(labels, list) else eval_pred)


def only_classes_that_occur(eval_pred):
    predictions, labels = map(np.asarray, eval_pred)
    occur = np.unique(labels[labels != -100])
    return {f"recall/{place}": float((predictions == place)[labels == place].mean()) for place in occur}


BROKEN = {
    "not a dict": (score, "signature"),
    "an array": (lambda pair: {"token_accuracy": np.array([score(pair)])}, "floats"),
    "a tensor": (lambda pair: {"token_accuracy": torch.tensor(score(pair))}, "floats"),
    "nested": (lambda pair: {"token_accuracy": right(pair)}, "floats"),
    "called loss": (lambda pair: {"loss": 1 - score(pair)}, "names"),
    "prefixed": (lambda pair: {"eval_token_accuracy": score(pair)}, "names"),
    "of unknown direction": (of_unknown_direction, "higher_is_better"),
    "writes to labels": (writes_to_labels, "inputs"),
    "remembers": (Remembers(), "stateless"),
    "first rows count more": (first_rows_count_more, "permutation"),
    "neighbours as pairs": (neighbours_as_pairs, "permutation"),
    "counts padding": (counts_padding, "padding"),
    "masks by predictions": (masks_by_predictions, "padding"),
    "mean of batches": (mean_of_batches, "lists"),
    "first batch only": (first_batch_only, "lists"),
    "mean of steps": (MeanOfSteps(), "steps"),
    "keeps an interrupted evaluation": (KeepsAnInterruptedEvaluation(), "interrupted"),
    "raises for no samples": (lambda pair: {"token_accuracy": int(hits(pair)[0]) / int(hits(pair)[1])}, "empty"),
    "None for no samples": (lambda pair: right(pair) if hits(pair)[1] else {"token_accuracy": None}, "empty"),
    "only classes that occur": (only_classes_that_occur, "empty"),
}


@pytest.mark.parametrize(("metric", "rule"), BROKEN.values(), ids=BROKEN)
def test_a_defect_breaks_its_rule_first(metric, rule):
    assert broken_rules(metric, metric_rules(**EVALUATION))[0] == rule


def test_every_rule_has_a_planted_defect():
    assert {rule.name for rule in metric_rules(**EVALUATION)} == {rule for _, rule in BROKEN.values()}


def by_sample(eval_pred):
    """Return the score for arrays only (right): an error in another mode is not a wrong number."""
    same = (eval_pred.predictions == eval_pred.label_ids) | (eval_pred.label_ids == -100)
    return {"sequence_accuracy": float(same.all(1).mean()) if len(same) else float("nan")}


@pytest.mark.parametrize(
    ("metric", "streams"),
    [(right, False), (Streaming(), True), (by_sample, False)],
    ids=["function", "object", "arrays only"],
)
def test_right_metrics_keep_every_rule(metric, streams):
    verdicts = {verdict.rule: verdict for verdict in check_metric(metric, **EVALUATION).verdicts}
    assert not streams or (verdicts["steps"].comparisons and verdicts["interrupted"].comparisons)


def test_a_refused_rule_does_not_count_as_kept():
    report = check_metric(by_sample, **EVALUATION)
    verdicts = {verdict.rule: verdict for verdict in report.verdicts}
    assert [rule for rule, verdict in verdicts.items() if not verdict.comparisons] == ["lists", "steps", "interrupted"]
    assert str(report).startswith("by_sample keeps 9 rules\n")
    assert "refused cut at (2,): TypeError: by_sample() got an unexpected keyword argument" in str(verdicts["steps"])


def test_a_rule_may_be_refused_in_part():
    verdict = metric_rules(**EVALUATION)[-1](Streaming())
    assert (verdict.rule, verdict.comparisons, len(verdict.refusals)) == ("empty", 2, 1)
    assert str(verdict) == "  2 compared, apart by 0.0e+00; refused no sample: ValueError: 0 rows came for 4"


def test_a_rule_without_comparisons_does_not_count_as_kept():
    def vacuous(subject):
        """Nothing."""
        yield from ()

    report = judge(by_sample, select([vacuous], lambda function: function, None), None)
    assert str(report) == "by_sample keeps 0 rules\n  vacuous  nothing to compare"


def test_a_direction_can_be_given():
    check_metric(of_unknown_direction, **EVALUATION, higher_is_better={"token_error": False})


def test_a_message_shows_the_two_numbers():
    with pytest.raises(AssertionError) as caught:
        check_metric(mean_of_batches, **EVALUATION)
    assert "breaks the rule `lists`" in str(caught.value)
    assert "cut at (1,), token_accuracy: " in str(caught.value)
    assert "Fix: `np.concatenate` them, as `np.asarray` stacks batches of equal size" in str(caught.value)


def test_importing_the_rules_does_not_import_torch():
    code = "import sys, metrics.testing; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("evaluation", "error", "message"),
    [
        ({"predictions": np.zeros(3), "labels": np.zeros(3)}, ValueError, r"at least four; got \[3\] rows"),
        ({"predictions": np.zeros(4), "labels": np.float64(1)}, TypeError, "got float64"),
        ({"predictions": torch.zeros(4), "labels": None}, TypeError, "got NoneType, Tensor"),
    ],
    ids=["three", "a number", "no arrays"],
)
def test_wrong_evaluations_are_rejected(evaluation, error, message):
    with pytest.raises(error, match=message):
        metric_rules(**evaluation)
