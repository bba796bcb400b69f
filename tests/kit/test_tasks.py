"""Tasks decide which rules apply, and are rejected if the rules cannot be applied to their batches."""

from dataclasses import replace

import pytest
import torch

from lossfns.testing import Task, check_loss, loss_rules
from tests import registry

from . import tasks


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
        (makes((5, 7), (5,)), r"'mine' must make 4 samples .*, got torch.float64 logits \(5, 7\) and labels \(5,\)"),
        (replace(makes((4, 7), (4,)), make=lambda *_: (torch.zeros(4, 7), torch.zeros(4))), "got torch.float32 logits"),
        (makes((4, 3, 7), (4, 3), sequence=True), "at least 4 labels"),
        (makes((4, 7), (4,), sequence=True), r"logits of shape \(\*labels.shape, 7\)"),
        (makes((4, 7, 8), (4, 8), sequence=True), r"got .* \(4, 7, 8\) and labels \(4, 8\)"),
    ],
    ids=["five samples", "float32", "three columns", "no columns", "channels first"],
)
def test_a_task_that_does_not_fit_is_rejected(task, message):
    with pytest.raises(ValueError, match=message):
        check_loss(registry.LOSSES[0].function, task)


@pytest.mark.parametrize(("task", "classes", "least"), [("classification", 0, 1), ("causal_lm", 1, 2)])
def test_too_few_classes_are_rejected(task, classes, least):
    with pytest.raises(ValueError, match=f"classes must be >= {least} for the task '{task}', got {classes}"):
        loss_rules(task, classes=classes)
