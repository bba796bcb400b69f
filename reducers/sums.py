"""Sums over the labels of each sample, which are exact in every mode of the Trainer's evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lossfns._core.checks import integers
from lossfns._core.columns import fields_of, item_columns
from lossfns._core.normalization import accumulator_dtype

from ._core import Hidden, Labels, Logits, Select, open_and_align


@torch.no_grad()
def sample_sums(
    logits: Logits,
    labels: Labels,
    *,
    shift: int | None = None,
    top_k: int | Sequence[int] = (),
    entropy: bool = False,
    select: Select = None,
    source: Hidden = None,
) -> dict[str, Tensor]:
    """Return sums over the scored labels of each sample, from which perplexity and accuracies follow exactly.

        nll = -sum_i log p(label_i)      entropy = -sum_i sum_v p_i(v) log p_i(v)

    The Trainer keeps a few numbers per sample, for any size of the vocabulary. None of them is padded, cut or rounded,
    so that results do not depend on batch size, number of processes or streaming.

    Args:
        logits: `(B, L, V)` or `(B, V)` float, or the tuple or dict that the Trainer passes.
        labels: `(B, S)` or `(B,)` integer ids, or a dict with `labels`; -100 is not scored.
        shift: 1 for causal models, 0 for all others; required for `(B, L, V)` logits.
        top_k: one or several `k`, each >= 1, for which labels among the `k` largest logits are counted too.
        entropy: also sum the entropy of the predicted distribution.
        select: a function of the model's outputs that returns the logits.
        source: `hidden_states(model)`, to read hidden states and the head instead of logits.

    Returns:
        `(B,)` float64 tensors (float32 on devices without float64) by name:
        `nll` (nats), `tokens` (number of scored labels), `correct` (labels whose logit is the largest; among equal
        logits the smaller id is predicted, and a row with NaN is never correct), `all_correct` (1 if the sample has
        labels and all are correct, else 0), `correct_top_{k}` for every `k`, and `entropy` (nats).

    Raises:
        ValueError: labels or `shift` are missing, `k` is below 1, the logits do not fit the labels, or a label is out
            of range.
        TypeError: token ids are passed as logits, or `k` is not an int.

    References:
        Shannon, "A Mathematical Theory of Communication", 1948 (entropy),
        https://doi.org/10.1002/j.1538-7305.1948.tb01338.x

    Example:
        >>> sample_sums(torch.zeros(1, 3, 4), torch.tensor([[0, 0, 2]]), shift=1)["correct"]
        tensor([1.], dtype=torch.float64)
    """
    ks = integers(top_k, "top_k")
    if any(k < 1 for k in ks):
        raise ValueError(f"top_k must be >= 1, got {top_k}")
    opened, aligned = open_and_align(logits, labels, shift, select, source, scorer="sample_sums")
    columns = ("nll", "tokens", "correct", *(f"correct_top_{k}" for k in ks), *["entropy"] * bool(entropy))
    items = item_columns(opened.statistics(aligned.rows, fields_of(columns)), columns)
    dtype = accumulator_dtype(opened.like.device)
    table = aligned.shape[0], aligned.shape[1:].numel()
    sums = {name: aligned.scatter(values.to(dtype)).reshape(table).sum(-1) for name, values in items.items()}
    return sums | {"all_correct": ((sums["tokens"] > 0) & (sums["correct"] == sums["tokens"])).to(dtype)}
