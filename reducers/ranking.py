"""How a label stands among the classes, or among the few answers that were allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lossfns._core.alignment import Selector
from lossfns._core.checks import IGNORED, check_logits, function, items, whole
from lossfns._core.hidden import HiddenStates
from lossfns._core.rows import compute_dtype

from ._core import Labels, Logits, pair


@torch.no_grad()
def label_rank(
    logits: Logits,
    labels: Labels,
    *,
    shift: int | None = None,
    select: Selector | None = None,
    source: HiddenStates | None = None,
) -> dict[str, Tensor]:
    """How many classes are ranked before each label: 0 where it is predicted.

    Args:
        logits: `(B, L, V)`, or `(B, V)`, or the tuple the Trainer hands over.
        labels: `(B, S)` or `(B,)` ids, -100 where nothing is scored, or a dict with `labels`.
        shift: 1 for causal models, 0 for all others; no default for `(B, L, V)` logits.
        select: a function that picks the logits.
        source: `hidden_states(model)`: read hidden states and head, the logits never exist.

    Returns:
        `ranks`: int32 of the labels' shape: larger logits, and equal ones of smaller ids; -100 where nothing is scored.

    Raises:
        ValueError: no labels, no shift, logits that do not fit the labels, a label out of range.
        TypeError: ids where logits are expected.

    Example:
        >>> label_rank(torch.tensor([[0.0, 3.0, 2.0]]), torch.tensor([2]))["ranks"]
        tensor([1], dtype=torch.int32)
    """
    opened, pairs = pair(logits, labels, shift, select, source, scorer="label_rank")
    return {"ranks": pairs.scatter(opened.statistics(pairs.rows, ("rank",))["rank"], IGNORED)}


@torch.no_grad()
def answer_logits(
    logits: Logits,
    labels: Labels,
    *,
    token_ids: Sequence[int],
    shift: int,
    select: Selector | None = None,
    source: HiddenStates | None = None,
) -> dict[str, Tensor]:
    """Logits of a few answers where the first label of each sample is predicted, whichever side is padded.

    The classes are the answers in their order; `labels_from(classification(num_classes), "answers")` scores them.

    Args:
        logits: `(B, L, V)`, or the tuple the Trainer hands over.
        labels: `(B, S)` ids, -100 over prompts and padding, or a dict with `labels`.
        token_ids: the first token of each answer, A of them.
        shift: 1 for causal models, 0 for seq2seq.
        select: a function that picks the logits.
        source: `hidden_states(model)`: read hidden states and head; only the logits of one place a sample exist.

    Returns:
        `probabilities`: `(B, A)` float32 (float64 for float64 logits), among the answers; `ids`: `(B,)` int32, the best
        answer, -100 where a logit is NaN; `answers`: `(B,)` int32, that of the first label, -100 where it is none.
        Without a label 0.0 and -100.

    Raises:
        ValueError: no labels, no answers, one that is no token, two that are one; logits that do not fit the labels.
        TypeError: ids where logits are expected; tokens that are not integers.

    Example:
        >>> found = answer_logits(torch.eye(4)[None], torch.tensor([[-100, -100, 3, 1]]), token_ids=[1, 3], shift=1)
        >>> found["ids"], found["answers"]
        (tensor([0], dtype=torch.int32), tensor([1], dtype=torch.int32))
    """
    opened, pairs = pair(logits, labels, shift, select, source, scorer="answer_logits")
    classes, length = opened.like.shape[-1], opened.like[..., 0].shape[1:].numel()
    tokens = [whole(token, "token_ids") for token in items(token_ids, "token_ids")]
    if not tokens or len({*tokens}) < len(tokens) or not all(0 <= token < classes for token in tokens):
        raise ValueError(
            f"token_ids are the first tokens of the answers, 0 to {classes - 1}, each another one; {tokens} came"
        )
    answers = torch.tensor(tokens, device="cpu").to(opened.like.device, non_blocking=True)
    rows = pairs.rows
    sample = rows.index.div(length, rounding_mode="floor")
    first = sample.diff(prepend=sample.new_tensor([-1])).nonzero().flatten()
    here = first.to(opened.like.device, non_blocking=True)
    there = pairs.samples[here]
    rows = replace(rows, index=rows.index[first], on_device=rows.on_device[here], targets=rows.classes[here])
    found = opened.logits(rows)[:, answers].to(compute_dtype(opened.like.dtype))
    probabilities = found.new_zeros(pairs.shape[0], len(answers)).index_copy_(0, there, found.softmax(-1))
    match = rows.classes[:, None] == answers
    best, truth = torch.full((2, pairs.shape[0]), IGNORED, dtype=torch.int32, device=found.device)
    best[there] = found.argmax(-1).int().masked_fill(found.isnan().any(-1), IGNORED)
    truth[there] = match.int().argmax(1).int().where(match.any(1), IGNORED)
    return {"probabilities": probabilities, "ids": best, "answers": truth}


@torch.no_grad()
def embeddings(logits: Logits, labels: Labels, *, select: Callable[[Any], Any], unit_length: bool = True) -> Any:
    """Vectors that a model returns, one or several a sample, for retrieval over the whole evaluation set.

    Args:
        logits: what the Trainer hands over.
        labels: not read.
        select: picks `(B, D)` tensors, one or a dict of them, as `lambda outputs: {"queries": outputs[0], ...}`.
        unit_length: scale each vector to length 1, so that products are cosines.

    Returns:
        What `select` picked, float32 (float64 for float64 vectors).

    Raises:
        ValueError: not one vector a sample.
        TypeError: not floating tensors.

    Example:
        >>> embeddings((torch.tensor([[3.0, 4.0]]),), None, select=lambda outputs: outputs[0])
        tensor([[0.6000, 0.8000]])
    """
    found = function(select, "select")(logits)
    if isinstance(found, dict):
        return {name: _vectors(value, unit_length) for name, value in found.items()}
    return _vectors(found, unit_length)


def _vectors(vectors: Tensor, unit_length: bool) -> Tensor:
    if check_logits(vectors).ndim != 2:
        raise ValueError(f"one vector a sample is (batch, size); got {tuple(vectors.shape)}. Pool tokens in select=")
    vectors = vectors.to(compute_dtype(vectors.dtype))
    return F.normalize(vectors, dim=-1) if unit_length else vectors
