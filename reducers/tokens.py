"""One value a token: ids of the best logits, log-probabilities of the labels."""

from __future__ import annotations

import torch
from torch import Tensor

from lossfns._core.alignment import Selector
from lossfns._core.checks import IGNORED, whole
from lossfns._core.hidden import HiddenStates

from ._core import Labels, Logits, pair


@torch.no_grad()
def argmax(
    logits: Logits,
    labels: Labels,
    *,
    shift: int | None = None,
    select: Selector | None = None,
    source: HiddenStates | None = None,
) -> Tensor:
    """Id of the largest logit for every label; among equal logits the smaller id.

    Args:
        logits: `(B, L, V)`, or `(B, V)`, or the tuple the Trainer hands over.
        labels: `(B, S)`, `(B,)`, a dict with `labels`, or None.
        shift: 1 for causal models, 0 for all others; no default for `(B, L, V)` logits.
        select: a function that picks the logits.
        source: `hidden_states(model)`: read hidden states and head, the logits never exist.

    Returns:
        int32 of the labels' shape: position `i` is the prediction for label `i`, -100 where no logit predicts it or one
        is NaN: where a label counts metrics of classes refuse that, those of texts leave it out.

    Raises:
        ValueError: no shift, logits that do not fit the labels.
        TypeError: ids where logits are expected.

    Example:
        >>> argmax(torch.tensor([[[0.0, 1.0], [2.0, 0.0]]]), torch.tensor([[1, 1]]), shift=1)
        tensor([[-100,    1]], dtype=torch.int32)
    """
    opened, pairs = pair(logits, labels, shift, select, source)
    return pairs.scatter(opened.statistics(pairs.rows, ("top_id",))["top_id"], IGNORED)


@torch.no_grad()
def top_k(
    logits: Logits,
    labels: Labels,
    *,
    k: int,
    shift: int | None = None,
    select: Selector | None = None,
    source: HiddenStates | None = None,
) -> Tensor:
    """Ids of the `k` largest logits for every label, best first; among equal logits the smaller id first.

    Args:
        logits: as for `argmax`.
        labels: as for `argmax`.
        k: how many, 1 to the number of classes.
        shift: as for `argmax`.
        select: as for `argmax`.
        source: as for `argmax`.

    Returns:
        int32 `(*labels.shape, k)`, -100 where no logit predicts the label or one is NaN.

    Raises:
        ValueError: `k` out of range, no shift, logits that do not fit the labels.
        TypeError: ids where logits are expected.

    Example:
        >>> top_k(torch.tensor([[0.0, 3.0, 3.0]]), None, k=2)
        tensor([[1, 2]], dtype=torch.int32)
    """
    opened, pairs = pair(logits, labels, shift, select, source)
    if not 1 <= whole(k, "k") <= opened.like.shape[-1]:
        raise ValueError(f"k must be between 1 and the {opened.like.shape[-1]} classes of the logits, got {k}")
    out = torch.full((pairs.shape.numel(), k), IGNORED, dtype=torch.int32, device=opened.like.device)
    out[pairs.positions] = opened.top_ids(pairs.rows, k)
    return out.view(*pairs.shape, k)


@torch.no_grad()
def token_log_probs(
    logits: Logits,
    labels: Labels,
    *,
    shift: int | None = None,
    select: Selector | None = None,
    source: HiddenStates | None = None,
) -> Tensor:
    """Log-probability of every label.

    Args:
        logits: as for `argmax`.
        labels: `(B, S)` or `(B,)` ids, -100 where nothing is scored, or a dict with `labels`.
        shift: as for `argmax`.
        select: as for `argmax`.
        source: as for `argmax`.

    Returns:
        float32 (float64 for float64 logits) of the labels' shape, nats; 0.0 where nothing is scored.

    Raises:
        ValueError: no labels, no shift, logits that do not fit the labels, a label out of range.
        TypeError: ids where logits are expected.

    Example:
        >>> token_log_probs(torch.zeros(1, 2, 4), torch.tensor([[2, 3]]), shift=1)
        tensor([[ 0.0000, -1.3863]])
    """
    opened, pairs = pair(logits, labels, shift, select, source, scorer="token_log_probs")
    return pairs.scatter(opened.statistics(pairs.rows, ("log_prob",))["log_prob"])
