"""Statistics per token of logits, or of hidden states and a head, without a copy of the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ._core.alignment import Alignment, align
from ._core.autograd import disable_compile
from ._core.block import check_fields, row_statistics
from ._core.checks import IGNORED, check_logits, integer
from ._core.head import head_statistics
from ._core.head_products import Head
from ._core.hidden import classes_of, logits_like


@disable_compile
def token_statistics(
    logits: Tensor,
    labels: Tensor,
    *,
    fields: Sequence[str] = ("log_prob",),
    shift: int = 0,
    ignore_index: int = IGNORED,
) -> dict[str, Tensor]:
    """Compute statistics of the logits at every label, without a copy of the logits.

    Differentiable: forward keeps only the logits, backward recomputes the softmax chunk by chunk.

    Args:
        logits: `(B, L, V)` with `L >= S`, or `(N, V)`; any floating dtype.
        labels: integer `(B, S)` or `(N,)`.
        fields: names of statistics: `log_prob` of the label (nats), `log_normalizer` (log of the sum of exponentials),
            `mean_logit`, `entropy` (nats), `rank` of the label (0 is best), `top_id` (-100 if a logit is NaN).
        shift: the label at `i` is predicted by the logit at `i - shift`.
        ignore_index: the label that is not scored.

    Returns:
        One tensor of the labels' shape per field, float32 (float64 for float64 logits, int32 for `rank` and `top_id`),
        0 where nothing is scored; and `valid`, bool.

    Raises:
        ValueError: shapes do not fit, a label is out of range, or a field is unknown.
        TypeError: labels or `ignore_index` are not integers, or logits are not floating.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
        >>> token_statistics(logits, torch.tensor([0, 1]), fields=("log_prob", "entropy"))["entropy"]
        tensor([0.3653, 0.6931])
    """
    check_fields(fields)
    aligned = align(check_logits(logits), labels, shift=shift, ignore_index=integer(ignore_index, "ignore_index"))
    return _of_labels(row_statistics(logits, aligned.rows, fields), aligned)


@disable_compile
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
    """Compute `token_statistics` of logits that never exist together, from hidden states and a head.

    The logits are `softcap * tanh(scale * head(hidden) / softcap)`. Differentiable in the hidden states and in the
    head's parameters.

    Args:
        hidden: `(B, L, H)` with `L >= S`, or `(N, H)`; floating.
        head: a module `(n, H) -> (n, V)`, called as a module on a few hundred rows at a time.
        labels: integer `(B, S)` or `(N,)`.
        fields: as for `token_statistics`.
        shift: as for `token_statistics`.
        ignore_index: as for `token_statistics`.
        scale: factor of the head's output.
        softcap: bound of the logits, > 0, or None.

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
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for unbounded logits, got {softcap}")
    capped_head = Head(head, classes_of(head, hidden), scale, softcap)
    like = logits_like(hidden, capped_head)
    aligned = align(like, labels, shift=shift, ignore_index=integer(ignore_index, "ignore_index"))
    return _of_labels(head_statistics(hidden, capped_head, aligned.rows, fields), aligned)


def _of_labels(measured: Mapping[str, Tensor], aligned: Alignment) -> dict[str, Tensor]:
    """Return the statistics `(n,)` at the places of their labels, and `valid`."""
    scored = torch.ones_like(aligned.positions, dtype=torch.bool)
    found = {name: aligned.scatter(values) for name, values in measured.items()}
    return {**found, "valid": aligned.scatter(scored, fill=False)}
