"""Statistics per token of logits, or of hidden states and a head, without a copy of the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ._core.alignment import align
from ._core.autograd import uncompiled
from ._core.block import check_fields, row_statistics
from ._core.checks import IGNORED, check_logits, number
from ._core.head import head_statistics
from ._core.head_products import Head
from ._core.hidden import classes_of, stand_in


@uncompiled
def token_statistics(
    logits: Tensor,
    labels: Tensor,
    *,
    fields: Sequence[str] = ("log_prob",),
    shift: int = 0,
    ignore_index: int = IGNORED,
) -> dict[str, Tensor]:
    """Measure what is asked for at every label, without a copy of the logits.

    Differentiable: forward keeps nothing but the logits, backward rebuilds the softmax chunk by chunk.

    Args:
        logits: `(B, L, V)` with `L >= S`, or `(N, V)`; any floating dtype.
        labels: integer `(B, S)` or `(N,)`.
        fields: names out of `log_prob` of the label (nats), `log_normalizer`, `mean_logit`, `entropy` (nats), `rank` of
            the label (0 is best), `top_id` (-100 where a logit is NaN).
        shift: the label at `i` is predicted by the logit at `i - shift`.
        ignore_index: label that is not scored.

    Returns:
        One tensor of the labels' shape a field, float32 (float64 for float64 logits; int32 for `rank` and `top_id`), 0
        where nothing is scored, and `valid`, bool.

    Raises:
        ValueError: shapes do not fit, a label is out of range, an unknown field.
        TypeError: labels are not integers, logits are not floating.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
        >>> token_statistics(logits, torch.tensor([0, 1]), fields=("log_prob", "entropy"))["entropy"]
        tensor([0.3653, 0.6931])
    """
    check_fields(fields)
    pairs = align(check_logits(logits), labels, shift=shift, ignore_index=ignore_index)
    measured = row_statistics(logits, pairs.rows, fields)
    scored = torch.ones_like(pairs.positions, dtype=torch.bool)
    return {name: pairs.scatter(values) for name, values in measured.items()} | {"valid": pairs.scatter(scored, False)}


@uncompiled
def head_token_statistics(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    fields: Sequence[str] = ("log_prob",),
    shift: int = 0,
    ignore_index: int = IGNORED,
    scale: float = 1.0,
    softcap: float | None = None,
) -> dict[str, Tensor]:
    """`token_statistics` of the logits `softcap * tanh(scale * head(hidden) / softcap)`, which never exist together.

    Differentiable in the hidden states and in the head's parameters.

    Args:
        hidden: `(B, L, H)` with `L >= S`, or `(N, H)`; floating.
        head: a module `(n, H) -> (n, V)`, called as a module on some hundred rows at a time.
        labels: integer `(B, S)` or `(N,)`.
        fields: as for `token_statistics`.
        shift: as for `token_statistics`.
        ignore_index: as for `token_statistics`.
        scale: factor of the head's output.
        softcap: bound of the logits, or None.

    Returns:
        As `token_statistics`.

    Raises:
        ValueError, TypeError: as `token_statistics`.

    Example:
        >>> head = nn.Linear(2, 3, bias=False)
        >>> found = head_token_statistics(torch.zeros(1, 2, 2), head, torch.tensor([[-100, 1]]), shift=1)
        >>> found["log_prob"]
        tensor([[ 0.0000, -1.0986]], grad_fn=<ViewBackward0>)
    """
    check_fields(fields)
    if softcap is not None and not number(softcap, "softcap") > 0:
        raise ValueError(f"softcap must be positive, or None where the logits are not bounded, got {softcap}")
    opened = Head(head, classes_of(head, hidden), number(scale, "scale"), softcap)
    pairs = align(stand_in(hidden, opened), labels, shift=shift, ignore_index=ignore_index)
    measured = head_statistics(hidden, opened, pairs.rows, fields)
    scored = torch.ones_like(pairs.positions, dtype=torch.bool)
    return {name: pairs.scatter(values) for name, values in measured.items()} | {"valid": pairs.scatter(scored, False)}
