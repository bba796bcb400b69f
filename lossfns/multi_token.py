"""Several tokens predicted at once, by as many heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ._options import items, strings
from .alignment import Labels, Outputs, check_logits, scored_places, split_labels
from .language import causal_lm_loss
from .normalization import NumItems, item_count
from .terms import Term, cross_entropy


def multi_token_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    heads: Sequence[str],
    weights: Sequence[float],
    term: Term = cross_entropy,
    overwrite_logits: bool = False,
) -> Tensor:
    """Weighted sum of `causal_lm_loss` over heads of which each predicts one token further ahead.

    Every part is divided by the count of next tokens, the only one the Trainer knows; the last tokens of a row have no
    label that far ahead. In packed rows the head that looks `k` ahead would predict across a boundary unless the first
    `k` labels of every sequence are -100.

    Args:
        outputs: what the model returned: a ModelOutput or dict with the logits `(B, L, V)` of every head.
        labels: as for `causal_lm_loss`, unshifted.
        num_items_in_batch: as for `causal_lm_loss`; None counts the next tokens of this call.
        heads: names of the heads' logits among the outputs: the first predicts the next token, the second the one after
            it, and so on.
        weights: one weight a head.
        term: what is minimised a token, for every head.
        overwrite_logits: as for `causal_lm_loss`, for every head.

    Returns:
        0-d float32 (float64 for float64 logits).

    Raises:
        ValueError: not one weight a head, or the outputs lack a head; otherwise as for `causal_lm_loss`.
        TypeError: heads or weights are no sequence; otherwise as for `causal_lm_loss`.

    Source:
        Gloeckle, Idrissi, Roziere, Lopez-Paz, Synnaeve: Better & Faster Large Language Models via Multi-token
        Prediction (2024), equation 2; DeepSeek-AI: DeepSeek-V3 (2024), equations 24 and 25.

    Example:
        >>> import torch
        >>> outputs = {"logits": torch.zeros(1, 3, 4), "further": torch.zeros(1, 3, 4)}
        >>> labels = torch.tensor([[0, 1, 2]])
        >>> multi_token_loss(outputs, labels, heads=("logits", "further"), weights=(1.0, 0.3))
        tensor(1.5942)
    """
    if not strings(heads, "heads") or len(heads) != len(items(weights, "weights")):
        raise ValueError(
            f"give one weight a head, as heads=('logits', 'further'), weights=(1.0, 0.3); got {heads!r}, {weights!r}"
        )
    ids, extras = split_labels(labels)
    host = ids.detach().cpu()  # once for all heads
    logits = [_logits(outputs, name) for name in heads]
    count = item_count(num_items_in_batch, int(scored_places(host, 1).sum()), logits[0].device)
    losses = [
        causal_lm_loss(
            own, {"labels": host, **extras}, count, term=term, shift=shift, overwrite_logits=overwrite_logits
        )
        for shift, own in enumerate(logits, start=1)
    ]
    parts = [weight * loss for weight, loss in zip(weights, losses, strict=True)]
    return sum(parts[1:], parts[0])


def _logits(outputs: Outputs, name: str) -> Tensor:
    found = outputs.get(name) if isinstance(outputs, Mapping) else None
    if found is None:
        among = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise ValueError(f"the model returned no '{name}' (outputs: {among}); heads= names the logits of each head")
    return check_logits(found)
