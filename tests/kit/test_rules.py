"""The functions that judge rules and print reports: messages, skipped rules, errors and calls."""

from unittest import mock

import pytest

from lossfns.testing import check_loss, loss_rules

from .broken_losses import mean, right, without_shift


def broken_message(loss):
    with pytest.raises(AssertionError) as caught:
        check_loss(loss)
    return str(caught.value)


def test_a_message_has_the_rule_both_values_and_the_fix():
    rule, promise, values, fix, others = broken_message(mean).splitlines()
    assert rule == "mean breaks the rule `count_given`."
    assert promise == "  The loss is a sum over items divided by num_items_in_batch."
    assert values.startswith("  twice the count: ")
    given, expected = (float(part.split()[-1]) for part in values.split(", expected"))
    assert given == pytest.approx(2 * expected, rel=1e-5)
    assert fix.startswith("  Fix: `return total / num_items_in_batch`.")
    assert others == "  Also broken: accumulation, all_ignored"


def test_a_message_has_the_positions_of_the_logits_that_were_read():
    assert "label (0, 3) alone reads the logits at: [(0, 3)], expected [(0, 2)]" in broken_message(without_shift)


def test_a_message_has_the_parts_whose_sum_differs():
    (rule,) = (rule for rule in loss_rules() if rule.name == "accumulation")
    with pytest.raises(AssertionError, match=r"1 \+ 3 rows: [\d.]+, expected [\d.]+"):
        rule(mean)


def test_an_error_of_the_loss_is_reported_and_chained():
    def fails(outputs, labels, num_items_in_batch=None):
        raise KeyError("token_weights")

    with pytest.raises(AssertionError, match="raised KeyError: 'token_weights'") as caught:
        check_loss(fails)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_report_lists_every_rule_and_the_reason_for_a_skipped_one():
    skip = {"picklable": "made in a closure"}
    report = check_loss(right, skip=skip)
    shown = str(report)
    assert shown.startswith("right keeps 22 rules\n")
    assert [verdict.rule for verdict in report.verdicts] == [rule.name for rule in loss_rules(skip=skip)]
    assert shown.splitlines()[-1].split(maxsplit=1) == ["picklable", "skipped: made in a closure"]
    assert all(verdict.comparisons for verdict in report.verdicts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "casual_lm"}, "must be a Task or one of causal_lm, masked_lm, .*, got 'casual_lm'"),
        (
            {"skip": {"aditive": "a ranking loss"}},
            r"skip must name rules that apply here \(signature, .*\), got 'aditive'",
        ),
        ({"skip": {"additive": " "}}, r"skip\['additive'\] must be a reason, .* got ' '"),
    ],
)
def test_wrong_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        loss_rules(**options)


@pytest.mark.parametrize("rule", loss_rules("causal_lm"), ids=lambda rule: rule.__name__)
def test_rules_are_parameters_for_pytest(rule):
    assert rule(right).comparisons > 0


def test_all_rules_together_call_a_loss_less_than_400_times():
    loss = mock.Mock(side_effect=right, __name__="right")
    check_loss(loss, skip={"picklable": "a mock", "signature": "a mock"})
    assert loss.call_count < 400
