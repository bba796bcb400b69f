"""The best answer spans of extractive question answering."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from lossfns._core.checks import IGNORED, check_logits, integer
from lossfns._core.rows import compute_dtype

from ._core import Labels, Logits


@torch.no_grad()
def spans(logits: Logits, labels: Labels, *, top_n: int = 20, max_length: int = 30) -> dict[str, Tensor]:
    """Return the spans of each window with the highest sums of start and end logit.

        score(i, j) = start_logits[i] + end_logits[j],  i <= j < i + max_length

    Rows are searched one at a time, which needs memory for `S * max_length` scores. Among equal scores, the earlier
    start comes first, then the earlier end. Spans whose score is NaN or -inf are left out.

    Args:
        logits: start and end logits, `(B, S)` float each: a tuple or a dict that begins with both, as the Trainer
            passes.
        labels: not used.
        top_n: number of spans kept per window, >= 1; some of them may lie in the question.
        max_length: largest number of tokens of a span, >= 1.

    Returns:
        `starts` and `ends` (first and last token), `(B, top_n)` int32, -100 where there are fewer spans; `scores`,
        `(B, top_n)`, and `null_scores`, `(B,)`, the score of the first token alone, which means "no answer", NaN
        if any logit of the row is NaN, which metrics reject: both float32 (float64 for float64 logits).

    Raises:
        ValueError: logits are missing or have another shape, or an option is below 1.
        TypeError: an option is not an int.

    References:
        Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for Language
        Understanding", 2019, sections 4.2 and 4.3, https://arxiv.org/abs/1810.04805

    Example:
        >>> start, end = torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([[0.0, 1.0, 2.0]])
        >>> found = spans((start, end), None, top_n=1)
        >>> found["starts"], found["ends"]
        (tensor([[1]], dtype=torch.int32), tensor([[2]], dtype=torch.int32))
    """
    if integer(top_n, "top_n") < 1 or integer(max_length, "max_length") < 1:
        raise ValueError(f"top_n and max_length must be >= 1, got {top_n} and {max_length}")
    parts = list(logits.values()) if isinstance(logits, Mapping) else logits
    if not isinstance(parts, (tuple, list)) or len(parts) < 2:
        raise ValueError("spans takes start and end logits, but the model returned one output")
    start, end = (check_logits(part).to(compute_dtype(part.dtype)) for part in parts[:2])
    if start.ndim != 2 or start.shape != end.shape or not start.numel():
        raise ValueError(
            "start and end logits must both be (batch, sequence) and not empty, got "
            f"{tuple(start.shape)} and {tuple(end.shape)}"
        )
    found = [_best_spans(*row, top_n, min(max_length, start.shape[1])) for row in zip(start, end, strict=True)]
    starts, ends, scores = (torch.stack(part) for part in zip(*found, strict=True))
    unknown = (start.isnan() | end.isnan()).any(1)
    null = (start[:, 0] + end[:, 0]).masked_fill(unknown, torch.nan)
    return {"starts": starts, "ends": ends, "scores": scores, "null_scores": null}


def _best_spans(start: Tensor, end: Tensor, top_n: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return starts, ends and scores of the best spans of one row, `(top_n,)` each, from logits `(S,)`."""
    ends_from = F.pad(end, (0, width - 1), value=-torch.inf).unfold(0, width, 1)  # (S, width)
    scores = (start[:, None] + ends_from).flatten()
    scores = scores.masked_fill(scores.isnan(), -torch.inf)  # sort would place NaN first
    best, order = (part[:top_n] for part in scores.sort(descending=True, stable=True))
    exists, starts = best > -torch.inf, order.div(width, rounding_mode="floor")

    def padded(values: Tensor, fill: int) -> Tensor:
        return F.pad(values.where(exists, fill), (0, top_n - len(order)), value=fill)

    return padded(starts, IGNORED).int(), padded(starts + order % width, IGNORED).int(), padded(best, 0)
