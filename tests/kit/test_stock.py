"""What the rules say about the losses inside transformers: what is wrong there, and nothing else.

Each is called as the forward of its models calls it, with what they pass on of the count. As a `compute_loss_func` all
of them divide 0 by 0 where every label is ignored, and those that take a count cannot take one with dimensions. GPT-2's
own is right, but the Trainer counts labels that it does not score. Classifiers pass no count on at all.
"""

from functools import cache, partial

import pytest
import torch
from transformers.loss import loss_utils

from lossfns.testing import loss_rules
from tests import tiny

from .verdicts import broken_rules

WITH_COUNT = ["count_forms", "data_parallel", "all_ignored"]
WITHOUT_COUNT = ["count_given", "accumulation", "all_ignored"]
CLASSES = 7

own = cache(partial(tiny.model, vocab_size=CLASSES, num_labels=CLASSES))


def language(outputs, labels, num_items_in_batch=None, *, name):
    return own(name).loss_function(outputs.logits, labels, vocab_size=CLASSES, num_items_in_batch=num_items_in_batch)


def masked(outputs, labels, num_items_in_batch=None):
    return loss_utils.ForMaskedLMLoss(outputs.logits, labels, CLASSES, num_items_in_batch)


def sequence(outputs, labels, num_items_in_batch=None):
    model = own("llama_cls")
    return model.loss_function(logits=outputs.logits, labels=labels, pooled_logits=outputs.logits, config=model.config)


def token(outputs, labels, num_items_in_batch=None):
    return loss_utils.ForTokenClassification(outputs.logits, labels, own("llama_cls").config)


def trainer_count(name):
    """What the Trainer counts for the class of a model."""
    trainer = tiny.trainer(tiny.model(name), tiny.lm_rows(2))
    return lambda labels: int(trainer._get_num_items_in_batch([{"labels": labels}], torch.device("cpu")))


@pytest.mark.parametrize(
    ("name", "expected"), [("llama", WITH_COUNT), ("qwen2", WITH_COUNT), ("gpt2", ["count_none", *WITH_COUNT])]
)
def test_causal_models_with_the_count_that_the_trainer_makes_for_them(name, expected):
    assert broken_rules(partial(language, name=name), loss_rules(count=trainer_count(name))) == expected


@pytest.mark.parametrize(
    ("loss", "task", "expected"),
    [
        (masked, "masked_lm", WITH_COUNT),
        (sequence, "classification", [*WITHOUT_COUNT, "dtypes"]),  # bfloat16 logits are not upcast here
        (token, "token_classification", WITHOUT_COUNT),
    ],
)
def test_other_losses(loss, task, expected):
    assert broken_rules(loss, loss_rules(task)) == expected
