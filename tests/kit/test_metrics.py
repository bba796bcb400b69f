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


def not_a_dict(eval_pred):
    return right(eval_pred)["token_accuracy"]


def an_array(eval_pred):
    return {"token_accuracy": np.array([right(eval_pred)["token_accuracy"]])}


def a_tensor(eval_pred):
    return {"token_accuracy": torch.tensor(right(eval_pred)["token_accuracy"])}


def nested(eval_pred):
    return {"token_accuracy": right(eval_pred)}


def called_loss(eval_pred):
    return {"loss": 1 - right(eval_pred)["token_accuracy"]}


def prefixed(eval_pred):
    return {f"eval_{key}": value for key, value in right(eval_pred).items()}


def of_unknown_direction(eval_pred):
    return {"token_error": 1 - right(eval_pred)["token_accuracy"]}


def writes_to_labels(eval_pred):
    value = right(eval_pred)
    eval_pred.label_ids[eval_pred.label_ids == -100] = 0
    return value


def first_rows_count_more(eval_pred):
    counts = [hits((p[None], y[None])) for p, y in zip(*eval_pred, strict=True)]
    return share(sum((count / (place + 1) for place, count in enumerate(counts)), np.zeros(2)))


def neighbours_as_pairs(eval_pred):
    """A score that is the same for the rows in reverse order."""
    rows = np.array([right((p[None], y[None]))["token_accuracy"] for p, y in zip(*eval_pred, strict=True)])
    return {"token_accuracy": float((rows[::2] * rows[1::2]).mean()) if len(rows) else float("nan")}


def counts_padding(eval_pred):
    predictions, labels = map(np.asarray, eval_pred)
    return {"token_accuracy": float((predictions == labels).mean()) if labels.size else float("nan")}


def masks_by_predictions(eval_pred):
    predictions, labels = map(np.asarray, eval_pred)
    kept = predictions != -100
    if labels.shape[1] > 4:
        kept[:, 4:] = True
    return share(np.array([((predictions == labels) & kept).sum(), kept.sum()]))


def mean_of_batches(eval_pred):
    predictions, labels = eval_pred
    if not isinstance(labels, list):
        return right(eval_pred)
    scores = [right(pair)["token_accuracy"] for pair in zip(predictions, labels, strict=True)]
    return {"token_accuracy": float(np.mean(scores))}


def first_batch_only(eval_pred):
    predictions, labels = eval_pred
    return right((predictions[0], labels[0]) if isinstance(labels, list) else eval_pred)


def raises_for_no_samples(eval_pred):
    correct, total = map(int, hits(eval_pred))
    return {"token_accuracy": correct / total}


def none_for_no_samples(eval_pred):
    counts = hits(eval_pred)
    return share(counts) if counts[1] else {"token_accuracy": None}


def only_classes_that_occur(eval_pred):
    predictions, labels = map(np.asarray, eval_pred)
    occur = np.unique(labels[labels != -100])
    return {f"recall/{place}": float((predictions == place)[labels == place].mean()) for place in occur}


BROKEN = [
    (not_a_dict, "signature"),
    (an_array, "floats"),
    (a_tensor, "floats"),
    (nested, "floats"),
    (called_loss, "names"),
    (prefixed, "names"),
    (of_unknown_direction, "higher_is_better"),
    (writes_to_labels, "inputs"),
    (Remembers(), "stateless"),
    (first_rows_count_more, "permutation"),
    (neighbours_as_pairs, "permutation"),
    (counts_padding, "padding"),
    (masks_by_predictions, "padding"),
    (mean_of_batches, "lists"),
    (first_batch_only, "lists"),
    (MeanOfSteps(), "steps"),
    (KeepsAnInterruptedEvaluation(), "interrupted"),
    (raises_for_no_samples, "empty"),
    (none_for_no_samples, "empty"),
    (only_classes_that_occur, "empty"),
]


@pytest.mark.parametrize(
    ("metric", "rule"), BROKEN, ids=lambda value: getattr(value, "__name__", None) or type(value).__name__
)
def test_a_defect_breaks_its_rule_first(metric, rule):
    assert broken_rules(metric, metric_rules(**EVALUATION))[0] == rule


def test_every_rule_has_a_planted_defect():
    assert {rule.name for rule in metric_rules(**EVALUATION)} == {rule for _, rule in BROKEN}


def by_sample(eval_pred):
    """Return the score for arrays only (right): an error in another mode is not a wrong number."""
    same = (eval_pred.predictions == eval_pred.label_ids) | (eval_pred.label_ids == -100)
    return {"sequence_accuracy": float(same.all(1).mean()) if len(same) else float("nan")}


@pytest.mark.parametrize("metric", [right, Streaming(), by_sample], ids=["function", "object", "arrays only"])
def test_right_metrics_keep_every_rule(metric):
    assert broken_rules(metric, metric_rules(**EVALUATION)) == []


def test_steps_are_compared_if_the_metric_streams():
    compared = {verdict.rule: verdict.comparisons for verdict in check_metric(Streaming(), **EVALUATION).verdicts}
    assert compared["steps"]
    assert compared["interrupted"]


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
        ({"predictions": np.zeros(5), "labels": np.zeros(4)}, ValueError, r"got \[4, 5\] rows"),
        ({"predictions": np.zeros(4), "labels": np.float64(1)}, TypeError, "got float64"),
        ({"predictions": np.zeros(4), "labels": np.zeros(())}, ValueError, r"got \[0, 4\] rows"),
        ({"predictions": torch.zeros(4), "labels": None}, TypeError, "got NoneType, Tensor"),
    ],
    ids=["three", "other numbers", "a number", "no dimension", "no arrays"],
)
def test_wrong_evaluations_are_rejected(evaluation, error, message):
    with pytest.raises(error, match=message):
        metric_rules(**evaluation)
