"""Bad values per kind of argument: what a function must refuse in the place of logits, labels, numbers and options.

The kind of an argument follows from its name, as `refused` decides. `tests/registry.py` adds the values that only one
function must refuse. Values to which Python's own TypeError answers, such as a text as a number, are not listed.
"""

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

NAN, INF = float("nan"), float("inf")
NOT_TENSORS = ["text", 3, [1, 2], np.zeros(2)]
POSITIVE = [0.0, -1.0, NAN]
NOT_NEGATIVE = [-1.0, NAN]
PROBABILITY = [-0.1, 1.1, NAN]
BETWEEN_0_AND_1 = [0.0, 1.0, -1.0, NAN]
COUNT = [0, -1, 1.5, "2", None]
CLASS_VECTOR = ["abc", 3.0, [1.0] * 4, [[1.0] * 5], [NAN] * 5, [INF] * 5]  # where there are five classes
KS = [(0,), (-1,), (1.5,), ("1",)]
TOKENIZERS = [None, "text", 3, SimpleNamespace(batch_decode=3), SimpleNamespace(decode=print), SimpleNamespace]
UNITS = [3, {"a": 1}, {"a"}, [1, "1", 2], np.array(1), np.zeros((3, 2))]

BY_NAME: dict[str, list[Any]] = {
    "num_items_in_batch": ["3", [3], 1j, True],
    "shift": [-1, 1.0, "1", True, None],
    "source": ["text", nn.Linear(2, 2)],
    "teacher": ["text", nn.Linear(2, 2)],
    "normalize": ["sequences", "weights", "mean", None, 1],
    "select": [lambda outputs: None, lambda outputs: torch.zeros(2, 3, dtype=torch.int64)],
    "term": [
        "text",
        3,
        None,
        lambda: 0,
        lambda *tensors: 0,
        lambda log_prob, unknown: log_prob,
        lambda log_prob: log_prob.sum(),
        lambda log_prob: log_prob[:1],
        lambda log_prob: 0.0,
        lambda log_prob=None: log_prob,
    ],
    **dict.fromkeys(("beta", "delta", "margin", "max_margin", "temperature", "scale"), POSITIVE),
    **dict.fromkeys(("alpha", "gamma", "gamma_pos", "gamma_neg", "dice"), NOT_NEGATIVE),
    **dict.fromkeys(("label_smoothing", "threshold"), PROBABILITY),
    **dict.fromkeys(("q", "clip_range"), BETWEEN_0_AND_1),
    **dict.fromkeys(("bins", "top_n", "max_length", "batch_size", "k"), COUNT),
    **dict.fromkeys(("class_weights", "logit_adjustment", "margins"), CLASS_VECTOR),
    "class_weights": [*CLASS_VECTOR, [-1.0] * 5],
    "pos_weight": ["abc", 3.0, [1.0] * 4, [-1.0] * 5, [NAN] * 5],
    "blank": [-1, 5, "0", None],
    "num_classes": [0, -1, 2.5, "2", True, [2], None],
    "num_samples": [0, -1, 2.5, "3", True],
    "tokenizer": TOKENIZERS,
    "metric": [None, "text", 3, lambda evaluated: {}],
    "kind": ["other", None],
    "greater_is_better": ["yes", 1, NAN],
    "n": [1, *COUNT, NAN, True, [2]],
    "seed": [-1, 1.5, NAN, "abc", None, True, [1]],
    "unit": UNITS,
    **dict.fromkeys(("hits", "ks"), KS),
}


def bad_logits(good: torch.Tensor) -> list[Any]:
    """Return what must be refused in the place of `good`: other types, and other shapes than the labels have."""
    shapes = [good.long(), good[:-1], good[0], good[0, 0]]
    further = [good[:, :-1], good[0, 0, 0]] if good.ndim == 3 else []
    return [*NOT_TENSORS, None, (), {}, {"logits": None}, *shapes, *further]


def bad_ids(good: torch.Tensor) -> list[Any]:
    """Return what must be refused in the place of `good`, ids of five classes that hold both 0 and 4."""
    types = [*NOT_TENSORS, None, {}, {"x": good}, {"labels": good.tolist()}, {"labels": None}]
    shapes = [good[:-1], good[..., None], torch.tensor(1), torch.cat([good, good], -1)]
    return [*types, *shapes, good.double(), good.bool(), good + 1, good - 1, good.to("meta")]


def bad_predictions(good: Any) -> list[Any]:
    """Return what must be refused as the predictions of an evaluation: missing columns, types and dimensions."""
    if isinstance(good, Mapping):
        without = [{name: good[name] for name in good if name != left_out} for left_out in good]
        return [{}, *without]
    return [{}, *([good * 1.0] if good.dtype.kind == "i" else [])]


def refused(function: Callable[..., Any], works: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the bad values per argument of a function of which `works` is a call."""
    values = {}
    for name in inspect.signature(function).parameters:
        good = works.get(name)
        if name in ("outputs", "logits") and isinstance(good, torch.Tensor) and good.is_floating_point():
            values[name] = bad_logits(good)
        elif name == "labels" and isinstance(good, torch.Tensor) and not good.is_floating_point():
            values[name] = bad_ids(good)
        elif name in BY_NAME:
            values[name] = BY_NAME[name]
    return values
