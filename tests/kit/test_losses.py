"""The rules for losses: each defect is named, nothing right is blamed, and the messages help."""

from unittest import mock

import pytest

from lossfns.testing import check_loss, loss_rules

from .broken_losses import BROKEN, IGNORED, mean, right, without_shift
from .other_losses import OTHERS
from .verdicts import broken_rules


def named(value):
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("loss", "rule", "options"), BROKEN, ids=named)
def test_each_defect_is_named_by_its_rule(loss, rule, options):
    assert broken_rules(loss, loss_rules(**options))[0] == rule


def test_every_rule_has_something_to_catch():
    everything = loss_rules(reference=right, reweight=right)
    assert {rule.name for rule in everything} - {rule for _, rule, _ in BROKEN} == set()
    assert len(BROKEN) >= 25


@pytest.mark.parametrize(("loss", "task"), OTHERS, ids=lambda value: value if isinstance(value, str) else named(value))
def test_nothing_right_is_blamed(loss, task):
    assert broken_rules(loss, loss_rules(task)) == []


@pytest.mark.parametrize("rule", loss_rules("causal_lm"), ids=named)
def test_the_pytest_form(rule):
    assert rule(right).comparisons > 0


def test_a_message_names_the_rule_the_two_numbers_and_the_remedy():
    with pytest.raises(AssertionError) as caught:
        check_loss(mean)
    lines = str(caught.value).splitlines()
    assert lines[0] == "mean breaks the rule `count_given`."
    assert lines[1] == "  It is a sum over items divided by the count it is given."
    given, expected = (float(part.split()[-1]) for part in lines[2].split(", expected"))
    assert lines[2].startswith("  twice the count: ")
    assert given == pytest.approx(2 * expected, rel=1e-5)
    assert lines[3].startswith("  Fix: `return total / num_items_in_batch`.")
    assert lines[4] == "  Also broken: accumulation, all_ignored"


def test_a_message_says_which_logits_were_read():
    with pytest.raises(
        AssertionError, match=r"label \(0, 3\) alone reads the logits at: \[\(0, 3\)\], expected \[\(0, 2\)\]"
    ):
        check_loss(without_shift)


def test_a_message_says_where_a_gradient_differs():
    (rule,) = (rule for rule in loss_rules() if rule.name == "accumulation")
    with pytest.raises(AssertionError, match=r"1 \+ 3 rows: [\d.]+, expected [\d.]+"):
        rule(mean)


def test_an_error_of_the_loss_is_told_and_kept():
    def fails(outputs, labels, num_items_in_batch=None):
        raise KeyError("token_weights")

    with pytest.raises(AssertionError, match="raised KeyError: 'token_weights'") as caught:
        check_loss(fails)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_report_lists_every_rule_and_why_one_was_skipped():
    report = check_loss(right, skip={"picklable": "made in a closure"})
    shown = str(report)
    assert shown.startswith("right keeps 22 rules\n")
    assert [verdict.rule for verdict in report.verdicts] == [
        rule.name for rule in loss_rules(skip={"picklable": "made in a closure"})
    ]
    assert shown.splitlines()[-1].split(maxsplit=1) == ["picklable", "skipped: made in a closure"]
    assert all(verdict.comparisons for verdict in report.verdicts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "casual_lm"}, "there is no task 'casual_lm'; the tasks are causal_lm, masked_lm"),
        ({"skip": {"aditive": "a ranking loss"}}, "skip names 'aditive'; the rules that apply here are signature, "),
        ({"skip": {"additive": " "}}, "needs a reason"),
    ],
)
def test_senseless_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        loss_rules(**options)


def test_it_takes_a_few_hundred_calls():
    loss = mock.Mock(side_effect=right, __name__="right")
    check_loss(loss, skip={"picklable": "a mock", "signature": "a mock"})
    assert loss.call_count < 400


@pytest.mark.parametrize("ignored", [0, 999], ids=["first", "last"])
def test_of_many_labels_some_are_asked_about_and_both_ends(ignored):
    calls = []

    def without_one(outputs, labels, num_items_in_batch=None):
        calls.append(labels)
        return right(outputs, labels.masked_fill(labels == ignored, IGNORED), num_items_in_batch)

    (rule,) = (rule for rule in loss_rules("causal_lm", classes=1000) if rule.name == "every_label")
    with pytest.raises(AssertionError, match=f"label {ignored} alone moves the logits: False"):
        rule(without_one)
    assert len(calls) < 100
