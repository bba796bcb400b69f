"""The rules for losses over outputs and labels of other shapes: each defect is named, nothing right is blamed."""

import pytest

from lossfns.terms import name_of
from lossfns.testing import Task, check_loss, loss_rules

from . import registry
from .other_outputs import BROKEN, RIGHT
from .verdicts import broken_rules


def named(value):
    return name_of(value) if callable(value) else ""


@pytest.mark.parametrize(("loss", "rule", "options"), BROKEN, ids=named)
def test_each_defect_is_named_by_its_rule(loss, rule, options):
    assert broken_rules(loss, loss_rules(**options))[0] == rule


@pytest.mark.parametrize(("loss", "options"), RIGHT, ids=named)
def test_nothing_right_is_blamed(loss, options):
    assert all(verdict.comparisons for verdict in check_loss(loss, **options).verdicts)


def test_every_task_of_the_registry_has_something_right_and_something_to_catch():
    own = {id(entry.options["task"]) for entry in registry.LOSSES if isinstance(entry.options["task"], Task)}
    assert own
    for cases in (BROKEN, RIGHT):
        assert own - {id(case[-1]["task"]) for case in cases} == set()


def names(task):
    return [rule.name for rule in loss_rules(task)]


def test_rules_follow_the_shape_of_a_task():
    assert names(Task("tokens", None, sequence=True)) == names("causal_lm")
    assert names(Task("pairs", None, sequence=True, whole=True)) == names("causal_lm")
    assert names(Task("samples", None)) == names("classification")
