"""The rules for terms name every planted defect and accept a right term."""

import pytest
import torch

from lossfns.testing import check_term, term_rules

from .verdicts import broken_rules


def subtracts_from_one(log_prob):
    return -((1 - log_prob.exp()) ** 0.5) * log_prob


def stops_the_gradient(log_prob):
    return -log_prob * log_prob.detach().exp()


def right(log_prob, entropy, *, strength=0.1):
    return -log_prob - strength * entropy


BROKEN = {
    "takes any option": (lambda log_prob, **options: -log_prob, "signature"),
    "takes an unknown tensor": (lambda logprob: -logprob, "signature"),
    "summed": (lambda log_prob: -log_prob.sum(), "returns"),
    "a column": (lambda log_prob: -log_prob[:, None], "returns"),
    "modifies its argument": (lambda log_prob: log_prob.detach().mul_(-1) + 0 * log_prob, "inputs"),
    "softmax over items": (lambda log_prob: -log_prob * log_prob.softmax(0), "elementwise"),
    "weighted in double": (lambda log_prob, labels: -log_prob * torch.ones(7).double()[labels], "dtypes"),
    "subtracts from one": (subtracts_from_one, "extremes"),
    "stops the gradient": (stops_the_gradient, "gradient"),
    "unpicklable": (lambda log_prob: -log_prob, "picklable"),
}


@pytest.mark.parametrize(("term", "rule"), BROKEN.values(), ids=BROKEN)
def test_a_defect_breaks_its_rule_first(term, rule):
    assert broken_rules(term, term_rules())[0] == rule


def test_every_rule_has_a_planted_defect():
    assert {rule.name for rule in term_rules()} == {rule for _, rule in BROKEN.values()}


def test_a_right_term_keeps_every_rule():
    assert all(verdict.comparisons for verdict in check_term(right).verdicts)


def test_a_message_lists_the_known_tensors():
    with pytest.raises(AssertionError, match=r"rule `signature`(?s:.)*asks for 'logprob'; known names(?s:.)*log_prob"):
        check_term(lambda logprob: -logprob)
