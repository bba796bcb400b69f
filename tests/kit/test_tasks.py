"""The rules for losses over outputs and labels of other shapes: each defect is named, nothing right is blamed."""

from dataclasses import replace

import pytest
import torch

from lossfns._core.signature import name_of
from lossfns.testing import Task, check_loss, loss_rules

from . import registry, tasks
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


@pytest.mark.parametrize(
    ("task", "like"),
    [(tasks.IMAGES, "causal_lm"), (tasks.COMPLETIONS, "causal_lm"), (tasks.SPANS, "classification")],
    ids=["tokens", "whole", "samples"],
)
def test_the_rules_follow_the_shape_of_a_task(task, like):
    assert names(task) == names(like)


def makes(logits, labels, **options):
    return Task(
        "mine", lambda generator, classes: (torch.zeros(logits).double(), torch.zeros(labels).long()), **options
    )


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (makes((5, 7), (5,)), r"the task 'mine' makes torch.float64 logits \(5, 7\) and labels \(5,\); .* 4 samples"),
        (replace(makes((4, 7), (4,)), make=lambda *_: (torch.zeros(4, 7), torch.zeros(4))), "torch.float32 logits"),
        (makes((4, 3, 7), (4, 3), sequence=True), "4 labels at least"),
        (makes((4, 7), (4,), sequence=True), r"logits \(\*labels.shape, 7\)"),
        (makes((4, 7, 8), (4, 8), sequence=True), r"makes .* \(4, 7, 8\) and labels \(4, 8\)"),
    ],
    ids=["five samples", "float32", "three columns", "no columns", "channels first"],
)
def test_a_task_that_does_not_fit_is_refused(task, message):
    with pytest.raises(ValueError, match=message):
        check_loss(registry.LOSSES[0].function, task)


@pytest.mark.parametrize(("task", "classes"), [("classification", 0), ("causal_lm", 1)])
def test_too_few_classes_are_refused(task, classes):
    with pytest.raises(ValueError, match=f"classes at least; {classes} came"):
        loss_rules(task, classes=classes)
