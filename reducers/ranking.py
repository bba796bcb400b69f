"""Ranks of labels, logits of a few allowed answers, and embeddings for retrieval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lossfns._core.checks import IGNORED, as_list, check_logits, integer
from lossfns._core.rows import compute_dtype

from ._core import Hidden, Labels, Logits, Select, open_and_align


@torch.no_grad()
def label_rank(
    logits: Logits, labels: Labels, *, shift: int | None = None, select: Select = None, source: Hidden = None
) -> dict[str, Tensor]:
    """Return how many classes rank before each label, 0 for a label that is predicted.

        rank = #{v: logits[v] > logits[label]} + #{v < label: logits[v] == logits[label]}

    Args:
        logits: `(B, L, V)` or `(B, V)` float, or the tuple or dict that the Trainer passes.
        labels: `(B, S)` or `(B,)` integer ids, or a dict with `labels`; -100 is not scored.
        shift: 1 for causal models, 0 for all others; required for `(B, L, V)` logits.
        select: a function of the model's outputs that returns the logits.
        source: `hidden_states(model)`, to read hidden states and the head instead of logits.

    Returns:
        `ranks`: int32 of the labels' shape, -100 where no label is scored.

    Raises:
        ValueError: labels or `shift` are missing, the logits do not fit the labels, or a label is out of range.
        TypeError: token ids are passed as logits.

    Example:
        >>> label_rank(torch.tensor([[0.0, 3.0, 2.0]]), torch.tensor([2]))["ranks"]
        tensor([1], dtype=torch.int32)
    """
    opened, aligned = open_and_align(logits, labels, shift, select, source, scorer="label_rank")
    return {"ranks": aligned.scatter(opened.statistics(aligned.rows, ("rank",))["rank"], IGNORED)}


@torch.no_grad()
def answer_logits(
    logits: Logits,
    labels: Labels,
    *,
    token_ids: Sequence[int],
    shift: int,
    select: Select = None,
    source: Hidden = None,
) -> dict[str, Tensor]:
    """Return the probabilities of a few answers where the first label of each sample is predicted.

        probabilities = softmax(logits[token_ids])

    Prompts may be padded on either side. The classes are the answers in the order of `token_ids`;
    `with_labels_from(classification(num_classes), "answers")` scores them.

    Args:
        logits: `(B, L, V)` float, or the tuple or dict that the Trainer passes.
        labels: `(B, S)` integer ids, or a dict with `labels`; -100 over prompts and padding.
        token_ids: first token of each answer, A different ids.
        shift: 1 for causal models, 0 for encoder-decoder models.
        select: a function of the model's outputs that returns the logits.
        source: `hidden_states(model)`, to read hidden states and the head instead of logits; only the logits of one
            position per sample are computed.

    Returns:
        `probabilities`: `(B, A)` float32 (float64 for float64 logits), over the answers, 0.0 without a label;
        `ids`: `(B,)` int32, the most probable answer, -100 without a label or where a logit is NaN;
        `answers`: `(B,)` int32, the answer of the first label, -100 if it is not one of `token_ids`.

    Raises:
        ValueError: labels are missing or do not fit the logits; `token_ids` are empty, repeated or out of range.
        TypeError: token ids are passed as logits, or `token_ids` are not integers.

    References:
        Schick, Schuetze, "Exploiting Cloze Questions for Few Shot Text Classification and Natural Language Inference",
        2021, section 3.1, https://arxiv.org/abs/2001.07676

    Example:
        >>> found = answer_logits(torch.eye(4)[None], torch.tensor([[-100, -100, 3, 1]]), token_ids=[1, 3], shift=1)
        >>> found["ids"], found["answers"]
        (tensor([0], dtype=torch.int32), tensor([1], dtype=torch.int32))
    """
    opened, aligned = open_and_align(logits, labels, shift, select, source, scorer="answer_logits")
    classes, length = opened.like.shape[-1], opened.like[..., 0].shape[1:].numel()
    tokens = [integer(token, "token_ids") for token in as_list(token_ids, "token_ids")]
    if not tokens or len({*tokens}) < len(tokens) or not all(0 <= token < classes for token in tokens):
        raise ValueError(f"token_ids must be different ids from 0 to {classes - 1}, at least one, got {tokens}")
    answers = torch.tensor(tokens, device="cpu").to(opened.like.device, non_blocking=True)
    rows = aligned.rows
    # The first scored row of each sample, on the host and on the device.
    sample = rows.index.div(length, rounding_mode="floor")
    first = sample.diff(prepend=sample.new_tensor([-1])).nonzero().flatten()
    on_device = first.to(opened.like.device, non_blocking=True)
    labeled = aligned.samples[on_device]
    rows = replace(rows, index=rows.index[first], on_device=rows.on_device[on_device], targets=rows.labels[on_device])
    found = opened.logits(rows)[:, answers].to(compute_dtype(opened.like.dtype))
    probabilities = found.new_zeros(aligned.shape[0], len(answers)).index_copy_(0, labeled, found.softmax(-1))
    match = rows.labels[:, None] == answers
    best, truth = torch.full((2, aligned.shape[0]), IGNORED, dtype=torch.int32, device=found.device)
    best[labeled] = found.argmax(-1).int().masked_fill(found.isnan().any(-1), IGNORED)
    truth[labeled] = match.int().argmax(1).int().where(match.any(1), IGNORED)
    return {"probabilities": probabilities, "ids": best, "answers": truth}


@torch.no_grad()
def embeddings(logits: Logits, labels: Labels, *, select: Callable[[Any], Any], unit_length: bool = True) -> Any:
    """Return embeddings from the model's outputs, for retrieval over the whole evaluation set.

        embedding = vector / ||vector||      (with unit_length)

    Args:
        logits: what the Trainer passes.
        labels: not used.
        select: a function of `logits` that returns `(B, D)` float vectors, or a dict of them, as
            `lambda outputs: {"queries": outputs[0], "documents": outputs[1]}`.
        unit_length: scale each vector to length 1, so that dot products are cosine similarities.

    Returns:
        The selected vectors, `(B, D)` float32 (float64 for float64 vectors): one tensor, or a dict of them.

    Raises:
        ValueError: the vectors are not `(B, D)`.
        TypeError: the vectors are not floating-point tensors.

    References:
        Reimers, Gurevych, "Sentence-BERT: Sentence Embeddings using Siamese BERT-Networks", 2019 (cosine similarity),
        https://arxiv.org/abs/1908.10084

    Example:
        >>> embeddings((torch.tensor([[3.0, 4.0]]),), None, select=lambda outputs: outputs[0])
        tensor([[0.6000, 0.8000]])
    """
    found = select(logits)
    if isinstance(found, dict):
        return {name: _vectors(value, unit_length) for name, value in found.items()}
    return _vectors(found, unit_length)


def _vectors(vectors: Tensor, unit_length: bool) -> Tensor:
    """Return vectors `(B, D)` in the compute dtype, scaled to length 1 if `unit_length`."""
    if check_logits(vectors).ndim != 2:
        raise ValueError(f"embeddings must be (batch, size), got {tuple(vectors.shape)}: pool over tokens in select=")
    vectors = vectors.to(compute_dtype(vectors.dtype))
    return F.normalize(vectors, dim=-1) if unit_length else vectors
