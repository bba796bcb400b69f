"""Confidence and accuracy of predictions, by bins."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lossfns._core.alignment import Selector
from lossfns._core.checks import whole
from lossfns._core.hidden import HiddenStates
from lossfns._core.normalization import accumulator_dtype

from ._core import Labels, Logits, pair


@torch.no_grad()
def calibration_bins(
    logits: Logits,
    labels: Labels,
    *,
    shift: int | None = None,
    bins: int = 15,
    select: Selector | None = None,
    source: HiddenStates | None = None,
) -> dict[str, Tensor]:
    """How sure the predictions are and how often right, by bins of confidence, for a reliability diagram of any size.

    Args:
        logits: `(B, L, V)`, or `(B, V)`, or the tuple the Trainer hands over.
        labels: `(B, S)` or `(B,)` ids, -100 where nothing is scored, or a dict with `labels`.
        shift: 1 for causal models, 0 for all others; no default for `(B, L, V)` logits.
        bins: of equal width over (0, 1]; a bin has its upper edge.
        select: a function that picks the logits.
        source: `hidden_states(model)`: read hidden states and head, the logits never exist.

    Returns:
        `(B, bins)` float64 (float32 where the device has none) sums over the labels of each sample:
        `bin_labels`, `bin_confidence` (probability of the predicted class) and `bin_correct`.

    Raises:
        ValueError: no labels, no shift, no bins, logits that do not fit the labels, a label out of range.
        TypeError: ids where logits are expected.

    Source:
        Guo, Pleiss, Sun, Weinberger: On Calibration of Modern Neural Networks (2017), section 2.

    Example:
        >>> calibration_bins(torch.tensor([[0.0, 0.0]]), torch.tensor([1]), bins=2)["bin_confidence"]
        tensor([[0.5000, 0.0000]], dtype=torch.float64)
    """
    if whole(bins, "bins") < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    opened, pairs = pair(logits, labels, shift, select, source, scorer="calibration_bins")
    predicted = opened.statistics(pairs.rows, ("top_id",))["top_id"].long()
    best = opened.statistics(replace(pairs.rows, targets=predicted.clamp(min=0)), ("log_prob",))["log_prob"]
    dtype = accumulator_dtype(best.device)
    confidence = best.to(dtype).exp()
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    right = (predicted == pairs.rows.classes).to(dtype)
    values = {"bin_labels": torch.ones_like(confidence), "bin_confidence": confidence, "bin_correct": right}
    empty = confidence.new_zeros(pairs.shape[0] * bins)
    return {
        name: empty.index_add(0, pairs.samples * bins + place, value).view(-1, bins) for name, value in values.items()
    }
