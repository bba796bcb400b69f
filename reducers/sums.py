"""Sums over the labels of each sample: the one output that is right in every mode of the Trainer's evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lossfns._core.alignment import Selector
from lossfns._core.checks import wholes
from lossfns._core.columns import fields_of, item_columns
from lossfns._core.hidden import HiddenStates
from lossfns._core.normalization import accumulator_dtype

from ._core import Labels, Logits, pair


@torch.no_grad()
def sample_sums(
    logits: Logits,
    labels: Labels,
    *,
    shift: int | None = None,
    top_k: int | Sequence[int] = (),
    entropy: bool = False,
    select: Selector | None = None,
    source: HiddenStates | None = None,
) -> dict[str, Tensor]:
    """Sums over the scored labels of each sample, from which perplexity and accuracies follow exactly.

    A few numbers a sample are all the Trainer keeps, whatever the vocabulary; nothing is padded, cut or rounded, so
    that batch size, processes and streaming change no digit.

    Args:
        logits: `(B, L, V)`, or `(B, V)`, or the tuple the Trainer hands over.
        labels: `(B, S)` or `(B,)` ids, -100 where nothing is scored, or a dict with `labels`.
        shift: 1 for causal models, 0 for all others; no default for `(B, L, V)` logits.
        top_k: also count labels among the `k` best logits, for one or several `k`.
        entropy: also sum the entropy of the prediction.
        select: a function that picks the logits.
        source: `hidden_states(model)`: read hidden states and head, the logits never exist.

    Returns:
        `(B,)` float64 tensors (float32 where the device has no float64) by name:
        `nll` (nats), `tokens` (scored labels), `correct` (the largest logit is the label's; among equals the
        smaller id; never where a logit is NaN), `all_correct` (1 where a sample has labels and all are correct),
        `correct_top_{k}`, `entropy` (nats).

    Raises:
        ValueError: no labels, no shift, `k` below 1, logits that do not fit the labels, a label out of range.
        TypeError: ids where logits are expected, `k` that is no int.

    Example:
        >>> sample_sums(torch.zeros(1, 3, 4), torch.tensor([[0, 0, 2]]), shift=1)["correct"]
        tensor([1.], dtype=torch.float64)
    """
    best = wholes(top_k, "top_k")
    if any(k < 1 for k in best):
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    opened, pairs = pair(logits, labels, shift, select, source, scorer="sample_sums")
    columns = ("nll", "tokens", "correct", *(f"correct_top_{k}" for k in best), *(("entropy",) if entropy else ()))
    items = item_columns(opened.statistics(pairs.rows, fields_of(columns)), columns)
    dtype = accumulator_dtype(opened.like.device)
    table = pairs.shape[0], pairs.shape[1:].numel()
    sums = {name: pairs.scatter(values.to(dtype)).reshape(table).sum(-1) for name, values in items.items()}
    return sums | {"all_correct": ((sums["tokens"] > 0) & (sums["correct"] == sums["tokens"])).to(dtype)}
