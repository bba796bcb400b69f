"""Several tokens at once against a loop, and in the stock Trainer."""

import math
from functools import partial

import pytest
import torch

from lossfns import focal, multi_token_loss
from lossfns.testing import loss_rules
from tests import oracle, tiny

N = oracle.IGNORED
V = 7
LABELS = torch.tensor([[N, 3, N, 6, 2], [0, 2, 2, 1, N]])
NAMES = ("logits", "second", "third")
WEIGHTS = (1.0, 0.3, 0.1)
TERMS = {
    "cross-entropy": ({}, lambda p: -math.log(p)),
    "focal": ({"term": focal}, lambda p: -((1 - p) ** 2) * math.log(p)),
}


def normal(seed):
    return torch.randn(2, 5, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LOGITS = [normal(seed) for seed in range(3)]


def by_loop(heads, labels, formula, count):
    total = 0.0
    for shift, (weight, logits) in enumerate(zip(WEIGHTS, heads, strict=True), 1):
        for place, row in oracle.pairs(logits, labels, shift=shift):
            x = logits[row].tolist()
            total += weight * formula(math.exp(x[int(labels[place])]) / math.fsum(map(math.exp, x)))
    return total / count


@pytest.mark.parametrize(("options", "formula"), TERMS.values(), ids=TERMS)
@pytest.mark.parametrize(("given", "count"), [(None, 6), (11, 11), (torch.tensor([[4], [7]]), 11)])
def test_every_head_looks_one_token_further(options, formula, given, count):
    outputs = dict(zip(NAMES, LOGITS, strict=True))
    found = multi_token_loss(outputs, LABELS, given, heads=NAMES, weights=WEIGHTS, **options)
    assert found.item() == pytest.approx(by_loop(LOGITS, LABELS, formula, count), rel=1e-12)


def gradients(loss):
    leaves = [logits.clone().requires_grad_() for logits in LOGITS]
    outputs = dict(zip(NAMES, [leaf * 1 for leaf in leaves], strict=True))
    return torch.autograd.grad(loss(outputs, LABELS, heads=NAMES, weights=WEIGHTS), leaves)


def test_gradients():
    def loss(*heads):
        return multi_token_loss(dict(zip(NAMES, heads, strict=True)), LABELS, heads=NAMES, weights=WEIGHTS)

    assert torch.autograd.gradcheck(loss, [logits.clone().requires_grad_() for logits in LOGITS])


def test_the_logits_may_be_overwritten():
    overwriting = partial(multi_token_loss, overwrite_logits=True)
    assert all(map(torch.equal, gradients(overwriting), gradients(multi_token_loss)))


@pytest.mark.parametrize("rule", loss_rules("causal_lm"), ids=lambda rule: rule.name)
def test_the_rules_of_every_loss(rule):
    rule(partial(multi_token_loss, heads=("logits",), weights=(1.0,)))


def test_rows_too_short_to_look_ahead():
    outputs = {name: logits[:, :2] for name, logits in zip(NAMES, LOGITS, strict=True)}
    found = multi_token_loss(outputs, LABELS[:, :2], heads=NAMES, weights=WEIGHTS)
    first = multi_token_loss(outputs, LABELS[:, :2], heads=NAMES[:1], weights=WEIGHTS[:1])
    assert found.item() == first.item()


def test_one_weight_a_head():
    with pytest.raises(ValueError, match="one weight per head"):
        multi_token_loss({"logits": LOGITS[0]}, LABELS, heads=NAMES, weights=(1.0,))
    with pytest.raises(TypeError, match="heads must be a sequence, got 'logits'"):
        multi_token_loss({"logits": LOGITS[0]}, LABELS, heads="logits", weights=(1.0,) * 6)


def test_a_head_that_is_not_there():
    with pytest.raises(ValueError, match="expected 'second' among the outputs"):
        multi_token_loss({"logits": LOGITS[0]}, LABELS, heads=NAMES[:2], weights=(1.0, 0.5))


class TwoHeads(torch.nn.Module):
    """A causal language model with one more head."""

    def __init__(self):
        super().__init__()
        self.model = tiny.model("llama")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.second = torch.nn.Linear(tiny.HIDDEN, tiny.VOCAB, dtype=torch.float64)

    def forward(self, input_ids, attention_mask, labels=None, **kwargs):
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        return {"logits": found.logits, "second": self.second(found.hidden_states[-1])}


def test_accumulation_is_one_big_batch():
    rows = [{**row, "labels": row["labels"].index_fill(0, torch.tensor([0]), N)} for row in tiny.lm_rows(8)]
    loss = partial(multi_token_loss, heads=NAMES[:2], weights=(1.0, 0.5))
    found = [
        tiny.gradient_of(
            tiny.trainer(
                TwoHeads(), rows, loss, per_device_train_batch_size=8 // steps, gradient_accumulation_steps=steps
            )
        )
        for steps in (1, 4)
    ]
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    assert found[0].abs().max() > 1e-3
