"""One value per token: ids of the largest logits, and log-probabilities of the labels."""

from __future__ import annotations

import torch
from torch import Tensor

from lossfns._core.checks import IGNORED, integer

from ._core import Hidden, Labels, Logits, Select, open_and_align


@torch.no_grad()
def argmax(
    logits: Logits, labels: Labels, *, shift: int | None = None, select: Select = None, source: Hidden = None
) -> Tensor:
    """Return the id of the largest logit for every label; among equal logits, the smaller id.

    Args:
        logits: `(B, L, V)` or `(B, V)` float, or the tuple or dict that the Trainer passes.
        labels: `(B, S)` or `(B,)` integer ids, a dict with `labels`, or None; only their shape is used.
        shift: 1 for causal models, 0 for all others; required for `(B, L, V)` logits.
        select: a function of the model's outputs that returns the logits.
        source: `hidden_states(model)`, to read hidden states and the head instead of logits.

    Returns:
        int32 of the labels' shape. Position `i` holds the prediction of label `i`, or -100 where no logit predicts it
        or a logit is NaN. If such a label counts, metrics of classes raise an error, and metrics of text omit the id.

    Raises:
        ValueError: `shift` is missing, or the logits do not fit the labels.
        TypeError: token ids are passed as logits.

    Example:
        >>> argmax(torch.tensor([[[0.0, 1.0], [2.0, 0.0]]]), torch.tensor([[1, 1]]), shift=1)
        tensor([[-100,    1]], dtype=torch.int32)
    """
    opened, aligned = open_and_align(logits, labels, shift, select, source)
    return aligned.scatter(opened.statistics(aligned.rows, ("top_id",))["top_id"], IGNORED)


@torch.no_grad()
def top_k(
    logits: Logits, labels: Labels, *, k: int, shift: int | None = None, select: Select = None, source: Hidden = None
) -> Tensor:
    """Return the ids of the `k` largest logits for every label, largest first; among equal logits, smaller ids first.

    Args:
        logits: `(B, L, V)` or `(B, V)` float, or the tuple or dict that the Trainer passes.
        labels: `(B, S)` or `(B,)` integer ids, a dict with `labels`, or None; only their shape is used.
        k: number of ids per label, from 1 to the number of classes.
        shift: 1 for causal models, 0 for all others; required for `(B, L, V)` logits.
        select: a function of the model's outputs that returns the logits.
        source: `hidden_states(model)`, to read hidden states and the head instead of logits.

    Returns:
        int32 `(*labels.shape, k)`; -100 where no logit predicts the label or a logit is NaN.

    Raises:
        ValueError: `k` is out of range, `shift` is missing, or the logits do not fit the labels.
        TypeError: token ids are passed as logits.

    Example:
        >>> top_k(torch.tensor([[0.0, 3.0, 3.0]]), None, k=2)
        tensor([[1, 2]], dtype=torch.int32)
    """
    opened, aligned = open_and_align(logits, labels, shift, select, source)
    if not 1 <= integer(k, "k") <= opened.like.shape[-1]:
        raise ValueError(f"k must be between 1 and the {opened.like.shape[-1]} classes of the logits, got {k}")
    out = torch.full((aligned.shape.numel(), k), IGNORED, dtype=torch.int32, device=opened.like.device)
    out[aligned.positions] = opened.top_ids(aligned.rows, k)
    return out.view(*aligned.shape, k)


@torch.no_grad()
def token_log_probs(
    logits: Logits, labels: Labels, *, shift: int | None = None, select: Select = None, source: Hidden = None
) -> Tensor:
    """Return the log-probability of every label.

        log_prob = logits[label] - logsumexp(logits)

    Args:
        logits: `(B, L, V)` or `(B, V)` float, or the tuple or dict that the Trainer passes.
        labels: `(B, S)` or `(B,)` integer ids, or a dict with `labels`; -100 is not scored.
        shift: 1 for causal models, 0 for all others; required for `(B, L, V)` logits.
        select: a function of the model's outputs that returns the logits.
        source: `hidden_states(model)`, to read hidden states and the head instead of logits.

    Returns:
        float32 (float64 for float64 logits) of the labels' shape, in nats; 0.0 where no label is scored.

    Raises:
        ValueError: labels or `shift` are missing, the logits do not fit the labels, or a label is out of range.
        TypeError: token ids are passed as logits.

    References:
        Bridle, "Probabilistic Interpretation of Feedforward Classification Network Outputs, with Relationships to
        Statistical Pattern Recognition", 1990 (softmax), https://doi.org/10.1007/978-3-642-76153-9_28

    Example:
        >>> token_log_probs(torch.zeros(1, 2, 4), torch.tensor([[2, 3]]), shift=1)
        tensor([[ 0.0000, -1.3863]])
    """
    opened, aligned = open_and_align(logits, labels, shift, select, source, scorer="token_log_probs")
    return aligned.scatter(opened.statistics(aligned.rows, ("log_prob",))["log_prob"])
