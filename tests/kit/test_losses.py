"""The rules for losses name every planted defect, accept every right loss, and find known defects in transformers.

transformers' own losses are called as the forward of their models calls them. As a `compute_loss_func` all of them
divide 0 by 0 if every label is ignored, and those that take a count do not accept one with dimensions. For GPT-2 the
Trainer counts labels that are not scored. The losses of classifiers ignore the count.
"""

from functools import cache, partial

import pytest
import torch
from transformers.loss import loss_utils

from lossfns._core.signature import name_of
from lossfns.testing import Task, check_loss, loss_rules
from tests import registry, tiny

from . import shaped_losses
from .broken_losses import BROKEN, IGNORED, right
from .right_losses import OTHERS
from .verdicts import broken_rules


def named(value):
    return value if isinstance(value, str) else name_of(value) if callable(value) else ""


@pytest.mark.parametrize(("loss", "rule", "options"), BROKEN + shaped_losses.BROKEN, ids=named)
def test_a_defect_breaks_its_rule_first(loss, rule, options):
    assert broken_rules(loss, loss_rules(**options))[0] == rule


def test_every_rule_has_a_planted_defect():
    rules = {rule.name for rule in loss_rules(reference=right, reweight=right)}
    assert rules - {rule for _, rule, _ in BROKEN} == set()


@pytest.mark.parametrize(("loss", "options"), OTHERS + shaped_losses.RIGHT, ids=named)
def test_right_losses_keep_every_rule(loss, options):
    assert all(verdict.comparisons for verdict in check_loss(loss, **options).verdicts)


def test_every_task_of_the_registry_has_right_and_broken_losses():
    of_registry = {id(entry.options["task"]) for entry in registry.LOSSES if isinstance(entry.options["task"], Task)}
    assert of_registry
    for cases in (shaped_losses.BROKEN, shaped_losses.RIGHT):
        assert of_registry - {id(case[-1]["task"]) for case in cases} == set()


@pytest.mark.parametrize("ignored", [0, 999], ids=["first", "last"])
def test_every_label_tries_a_selection_of_many_labels_and_both_ends(ignored):
    calls = []

    def without_one(outputs, labels, num_items_in_batch=None):
        calls.append(labels)
        return right(outputs, labels.masked_fill(labels == ignored, IGNORED), num_items_in_batch)

    (rule,) = (rule for rule in loss_rules("causal_lm", classes=1000) if rule.name == "every_label")
    with pytest.raises(AssertionError, match=f"label {ignored} alone has a gradient: False"):
        rule(without_one)
    assert len(calls) < 100


WITH_COUNT = ["count_forms", "data_parallel", "all_ignored"]
WITHOUT_COUNT = ["count_given", "accumulation", "all_ignored"]
CLASSES = 7

model_of = cache(partial(tiny.model, vocab_size=CLASSES, num_labels=CLASSES))


def causal(outputs, labels, num_items_in_batch=None, *, name):
    function = model_of(name).loss_function
    return function(outputs.logits, labels, vocab_size=CLASSES, num_items_in_batch=num_items_in_batch)


def masked(outputs, labels, num_items_in_batch=None):
    return loss_utils.ForMaskedLMLoss(outputs.logits, labels, CLASSES, num_items_in_batch)


def sequence(outputs, labels, num_items_in_batch=None):
    model = model_of("llama_cls")
    return model.loss_function(logits=outputs.logits, labels=labels, pooled_logits=outputs.logits, config=model.config)


def token(outputs, labels, num_items_in_batch=None):
    return loss_utils.ForTokenClassification(outputs.logits, labels, model_of("llama_cls").config)


def trainer_count(name):
    """Return the function with which the Trainer counts the items of a model."""
    trainer = tiny.trainer(tiny.model(name), tiny.lm_rows(2))
    return lambda labels: int(trainer._get_num_items_in_batch([{"labels": labels}], torch.device("cpu")))


@pytest.mark.parametrize(
    ("name", "expected"), [("llama", WITH_COUNT), ("qwen2", WITH_COUNT), ("gpt2", ["count_none", *WITH_COUNT])]
)
def test_causal_losses_of_transformers_with_the_count_of_the_trainer(name, expected):
    assert broken_rules(partial(causal, name=name), loss_rules(count=trainer_count(name))) == expected


@pytest.mark.parametrize(
    ("loss", "task", "expected"),
    [
        (masked, "masked_lm", WITH_COUNT),
        (sequence, "classification", [*WITHOUT_COUNT, "dtypes"]),  # bfloat16 logits are not converted to float32 here
        (token, "token_classification", WITHOUT_COUNT),
    ],
)
def test_other_losses_of_transformers(loss, task, expected):
    assert broken_rules(loss, loss_rules(task)) == expected
