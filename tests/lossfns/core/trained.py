"""Two ways through the stock Trainer: logits and torch's own cross-entropy, or hidden states and no logits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers

from lossfns import causal_lm_loss, hidden_states
from tests import tiny
from tests.contract.probes import summed

ROWS = tiny.lm_rows(24)  # three steps of eight


def lora(model: torch.nn.Module, *modules: str, **config: Any) -> torch.nn.Module:
    """`model` with adapters whose weights are not zero, in float64."""
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        settings = {"task_type": "CAUSAL_LM", "target_modules": list(modules), "init_lora_weights": False} | config
        return peft.get_peft_model(model, peft.LoraConfig(**settings)).double()


def compare(
    make: Callable[[], torch.nn.Module], rows: Any = ROWS, loss: Callable[..., Any] = causal_lm_loss, **arguments: Any
) -> float:
    """The largest difference between the parameters that training by hidden states and by logits ends with.

    `loss` takes a source; what it is compared with is its mean over next tokens, by torch alone.
    """
    expected = tiny.parameters_after(tiny.trainer(make(), rows, summed, **arguments))
    model = make()
    before = tiny.parameters(model)
    with hidden_states(model) as source:
        found = tiny.parameters_after(tiny.trainer(model, rows, partial(loss, source=source), **arguments))
    assert max((before[name] - expected[name]).abs().max() for name in before) > 0.01
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


class Gradients(transformers.TrainerCallback):
    """Keeps the gradients of the last step, float64 and in one vector."""

    def on_pre_optimizer_step(self, args, state, control, *, model, **kwargs):
        self.found = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.requires_grad])


def gradients(model: torch.nn.Module, rows: Any, loss: Callable[..., Any], **arguments: Any) -> torch.Tensor:
    """Those of one step over `rows`."""
    seen = Gradients()
    tiny.trainer(model, rows, loss, callbacks=[seen], **arguments).train()
    return seen.found
