"""Recorders and reference losses of the contract tests; nothing here comes from the packages that rely on them.

The docstring of each contract test says why this project relies on the fact.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version

from tests import tiny


def since(release: str, of: str = "transformers") -> bool:
    """Whether the installed transformers, or another distribution, is `release` or newer."""
    return Version(metadata.version(of)) >= Version(release)


COMPILES = pytest.mark.skipif(
    since("5.0") and not since("2.7", of="torch"), reason="models of transformers 5 are compiled from torch 2.7 on"
)


def skip_unless_counted() -> None:
    """Leaves a test, or a module, out where labels in a dict are not counted, and our collators refuse to make them."""
    if not since("5.10"):
        pytest.skip("labels in a dict are counted from transformers 5.10 on", allow_module_level=True)


def nll_sum(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the next-token losses, by torch alone."""
    return F.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def items(labels: torch.Tensor) -> torch.Tensor:
    """The number of labels that a shifted loss sees."""
    return (labels[:, 1:] != tiny.IGNORED).sum()


def mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """What a user writes who thinks of one batch: the mean over the items of this call."""
    return nll_sum(outputs, labels) / items(labels)


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """What the contract asks for: the sum over the items of this call by the count of the whole window."""
    return nll_sum(outputs, labels) / num_items_in_batch.sum()


def anything(outputs: Any, labels: Any = None, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss that fits every model and every form of labels."""
    return next(value for value in outputs.values() if torch.is_tensor(value) and value.dim()).mean()


def without_logits(model: torch.nn.Module) -> torch.nn.Module:
    """`model` with a pre-hook that keeps the vocabulary to one position a row, as the hidden-state source does."""
    flags = {"logits_to_keep": 1, "output_hidden_states": True}
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs | flags), with_kwargs=True)
    return model


def by_head(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any, *, head: torch.nn.Module) -> torch.Tensor:
    """`summed`, with the logits made by the head from the last hidden state."""
    assert outputs["logits"].shape[1] == 1
    return summed({"logits": head(outputs["hidden_states"][-1])}, labels, num_items_in_batch)


class Call(NamedTuple):
    outputs: Any
    labels: Any
    count: Any


@dataclass
class LossSpy:
    """A `compute_loss_func` that keeps every call and returns what `loss` returns."""

    loss: Callable[..., torch.Tensor] = anything
    calls: list[Call] = field(default_factory=list)

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.calls.append(Call(outputs, labels, num_items_in_batch))
        return self.loss(outputs, labels, num_items_in_batch)

    @property
    def counts(self) -> list[float | None]:
        return [None if call.count is None else float(call.count) for call in self.calls]


@dataclass
class ReducerSpy:
    """A `preprocess_logits_for_metrics` that keeps every (logits, labels) and returns what `reducer` returns."""

    reducer: Callable[[Any, Any], Any] = lambda logits, labels: torch.zeros(first_tensor(logits).shape[:1])
    calls: list[tuple[Any, Any]] = field(default_factory=list)

    def __call__(self, logits: Any, labels: Any) -> Any:
        self.calls.append((logits, labels))
        return self.reducer(logits, labels)


@dataclass
class MetricSpy:
    """A `compute_metrics` that keeps every EvalPrediction and its `compute_result`, and returns `result`."""

    result: Mapping[str, Any] = field(default_factory=dict)
    calls: list[transformers.EvalPrediction] = field(default_factory=list)
    flags: list[bool | None] = field(default_factory=list)

    def __call__(self, prediction: transformers.EvalPrediction, compute_result: bool | None = None) -> dict[str, Any]:
        self.calls.append(prediction)
        self.flags.append(compute_result)
        return dict(self.result)


def first_tensor(value: Any) -> torch.Tensor:
    """The first tensor with a batch dimension in nested tuples."""
    if torch.is_tensor(value):
        return value
    return next(first_tensor(item) for item in value if not torch.is_tensor(item) or item.dim())


def shapes(value: Any) -> Any:
    """The shapes of nested tensors or arrays, in the same nesting."""
    if isinstance(value, Mapping):
        return {name: shapes(item) for name, item in value.items()}
    return [shapes(item) for item in value] if isinstance(value, list | tuple) else tuple(value.shape)


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """The gradient of `loss` in one float64 vector, by autograd; 0 for parameters that `loss` does not reach."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten().double() for part in found])


def mean_gradient(model: torch.nn.Module, rows: list[tiny.Row]) -> torch.Tensor:
    """The gradient of the mean next-token loss over `rows` as one batch."""
    batch = tiny.pad(rows)
    labels = batch.pop("labels")
    return gradient(model, mean(model(**batch), labels))


def even_rows(n: int) -> list[tiny.Row]:
    """Rows with the same three labels each, so that every mean over micro-batches is the mean over all."""
    return [{name: values[:4] for name, values in row.items()} for row in first_ignored(tiny.lm_rows(n, prompt=False))]


def first_ignored(rows: list[tiny.Row]) -> list[tiny.Row]:
    """The rows with -100 as their first label, which no logit predicts."""
    ignored = torch.tensor([tiny.IGNORED])
    return [row | {"labels": torch.cat([ignored, row["labels"][1:]])} for row in rows]
