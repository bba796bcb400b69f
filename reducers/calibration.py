"""Confidence and accuracy of predictions, in bins of confidence."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lossfns._core.checks import integer
from lossfns._core.normalization import accumulator_dtype

from ._core import Hidden, Labels, Logits, Select, open_and_align


@torch.no_grad()
def calibration_bins(
    logits: Logits,
    labels: Labels,
    *,
    shift: int | None = None,
    bins: int = 15,
    select: Select = None,
    source: Hidden = None,
) -> dict[str, Tensor]:
    """Return, per bin of confidence, the number of labels and the sums of confidence and of correct predictions.

        confidence = max_v p(v)      bin = ceil(confidence * bins)

    The calibration error and a reliability diagram follow from these sums, for evaluation sets of any size.

    Args:
        logits: `(B, L, V)` or `(B, V)` float, or the tuple or dict that the Trainer passes.
        labels: `(B, S)` or `(B,)` integer ids, or a dict with `labels`; -100 is not scored.
        shift: 1 for causal models, 0 for all others; required for `(B, L, V)` logits.
        bins: number of bins of equal width over (0, 1], each including its upper edge.
        select: a function of the model's outputs that returns the logits.
        source: `hidden_states(model)`, to read hidden states and the head instead of logits.

    Returns:
        `(B, bins)` float64 tensors (float32 on devices without float64), sums over the scored labels of each sample:
        `bin_labels`, `bin_confidence` (probability of the predicted class) and `bin_correct`.

    Raises:
        ValueError: labels or `shift` are missing, `bins` is below 1, the logits do not fit the labels, or a label is
            out of range.
        TypeError: token ids are passed as logits.

    References:
        Guo, Pleiss, Sun, Weinberger, "On Calibration of Modern Neural Networks", 2017, section 2,
        https://arxiv.org/abs/1706.04599

    Example:
        >>> calibration_bins(torch.tensor([[0.0, 0.0]]), torch.tensor([1]), bins=2)["bin_confidence"]
        tensor([[0.5000, 0.0000]], dtype=torch.float64)
    """
    if integer(bins, "bins") < 1:
        raise ValueError(f"bins must be >= 1, got {bins}")
    opened, aligned = open_and_align(logits, labels, shift, select, source, scorer="calibration_bins")
    predicted = opened.statistics(aligned.rows, ("top_id",))["top_id"].long()
    best = opened.statistics(replace(aligned.rows, targets=predicted.clamp(min=0)), ("log_prob",))["log_prob"]
    dtype = accumulator_dtype(best.device)
    confidence = best.to(dtype).exp()
    cells = aligned.samples * bins + (confidence * bins).ceil().long().clamp(1, bins) - 1
    correct = (predicted == aligned.rows.labels).to(dtype)
    values = {"bin_labels": torch.ones_like(confidence), "bin_confidence": confidence, "bin_correct": correct}
    empty = confidence.new_zeros(aligned.shape[0] * bins)
    return {name: empty.index_add(0, cells, value).view(-1, bins) for name, value in values.items()}
