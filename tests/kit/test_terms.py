"""The rules for terms name every planted defect and accept a right term."""

import pytest
import torch

from lossfns.testing import check_term, term_rules

from .verdicts import broken_rules


def takes_any_option(log_prob, **options):
    return -log_prob


def takes_an_unknown_tensor(logprob):
    return -logprob


def summed(log_prob):
    return -log_prob.sum()


def a_column(log_prob):
    return -log_prob[:, None]


def modifies_its_argument(log_prob):
    return log_prob.detach().mul_(-1) + 0 * log_prob


def softmax_over_items(log_prob):
    return -log_prob * log_prob.softmax(0)


def weighted_in_double(log_prob, labels):
    return -log_prob * torch.ones(7, dtype=torch.float64)[labels]


def subtracts_from_one(log_prob):
    return -((1 - log_prob.exp()) ** 0.5) * log_prob


def stops_the_gradient(log_prob):
    return -log_prob * log_prob.detach().exp()


def right(log_prob, entropy, *, strength=0.1):
    return -log_prob - strength * entropy


unpicklable = lambda log_prob: -log_prob  # noqa: E731

BROKEN = [
    (takes_any_option, "signature"),
    (takes_an_unknown_tensor, "signature"),
    (summed, "returns"),
    (a_column, "returns"),
    (modifies_its_argument, "inputs"),
    (softmax_over_items, "elementwise"),
    (weighted_in_double, "dtypes"),
    (subtracts_from_one, "extremes"),
    (stops_the_gradient, "gradient"),
    (unpicklable, "picklable"),
]


@pytest.mark.parametrize(("term", "rule"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_defect_breaks_its_rule_first(term, rule):
    assert broken_rules(term, term_rules())[0] == rule


def test_every_rule_has_a_planted_defect():
    assert {rule.name for rule in term_rules()} == {rule for _, rule in BROKEN}


def test_a_right_term_keeps_every_rule():
    assert all(verdict.comparisons for verdict in check_term(right).verdicts)


def test_a_rule_is_skipped_with_its_reason():
    report = check_term(stops_the_gradient, skip={"gradient": "the weight is a constant of the step"})
    assert "gradient     skipped: the weight is a constant of the step" in str(report)


def test_a_message_lists_the_known_tensors():
    with pytest.raises(AssertionError, match=r"rule `signature`(?s:.)*asks for 'logprob'; known names(?s:.)*log_prob"):
        check_term(takes_an_unknown_tensor)
