"""The best spans of extractive question answering."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from lossfns._core.checks import IGNORED, check_logits, whole
from lossfns._core.rows import compute_dtype

from ._core import Labels, Logits


@torch.no_grad()
def spans(logits: Logits, labels: Labels, *, top_n: int = 20, max_length: int = 30) -> dict[str, Tensor]:
    """The best spans of each window: start at or before end, no longer than a limit, by the sum of both logits.

    Nothing else of the logits is kept. Rows are searched one at a time, so that what is needed is S x `max_length`
    scores. Among equal scores the earlier start, then the earlier end. A span whose score is NaN or -inf is none.

    Args:
        logits: what the Trainer hands over: start and end logits `(B, S)`, a tuple or a dict that begins with both.
        labels: not read.
        top_n: how many spans a window keeps; some will lie in the question.
        max_length: of a span, in tokens.

    Returns:
        `(B, top_n)`: `starts` and `ends` (the last token), int32, -100 where there are fewer spans; `scores`, and
        `(B,)` `null_scores`, that of the first token alone, which says "no answer", NaN where any logit is NaN, which
        metrics refuse: float32 (float64 for float64 logits).

    Raises:
        ValueError: the logits are missing or of another shape, or an option is below 1.
        TypeError: an option is no int.

    Source:
        Devlin, Chang, Lee, Toutanova: BERT (2019), section 4.2 and 4.3.

    Example:
        >>> start, end = torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([[0.0, 1.0, 2.0]])
        >>> found = spans((start, end), None, top_n=1)
        >>> found["starts"], found["ends"]
        (tensor([[1]], dtype=torch.int32), tensor([[2]], dtype=torch.int32))
    """
    if whole(top_n, "top_n") < 1 or whole(max_length, "max_length") < 1:
        raise ValueError(f"top_n and max_length must be at least 1, got {top_n} and {max_length}")
    parts = list(logits.values()) if isinstance(logits, Mapping) else logits
    if not isinstance(parts, (tuple, list)) or len(parts) < 2:
        raise ValueError("spans takes start and end logits; the model returned one output")
    start, end = map(check_logits, parts[:2])
    if start.ndim != 2 or start.shape != end.shape or not start.numel():
        shapes = f"{tuple(start.shape)} and {tuple(end.shape)}"
        raise ValueError(f"start and end logits are (batch, sequence), at least one of each; got {shapes}")
    start, end = (x.to(compute_dtype(x.dtype)) for x in (start, end))
    found = [_best(*row, top_n, min(max_length, start.shape[1])) for row in zip(start, end, strict=True)]
    starts, ends, scores = (torch.stack(part) for part in zip(*found, strict=True))
    unknown = (start.isnan() | end.isnan()).any(1)
    null = (start[:, 0] + end[:, 0]).masked_fill(unknown, torch.nan)
    return {"starts": starts, "ends": ends, "scores": scores, "null_scores": null}


def _best(start: Tensor, end: Tensor, top_n: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Starts, ends and scores of the best spans of one row, `(top_n,)` each."""
    last = F.pad(end, (0, width - 1), value=-torch.inf).unfold(0, width, 1)
    scores = (start[:, None] + last).flatten()
    scores = scores.masked_fill(scores.isnan(), -torch.inf)  # sorting would put NaN first
    best, order = (part[:top_n] for part in scores.sort(descending=True, stable=True))
    missing, there = (0, top_n - len(order)), best > -torch.inf
    starts = order.div(width, rounding_mode="floor")
    ends = starts + order % width
    return (
        F.pad(starts.where(there, IGNORED), missing, value=IGNORED).int(),
        F.pad(ends.where(there, IGNORED), missing, value=IGNORED).int(),
        F.pad(best.where(there, 0), missing),
    )
