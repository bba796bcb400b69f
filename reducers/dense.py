"""Pixels, frames and vectors: what dense models return, in a few numbers a sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lossfns._core.alignment import Selector, select_logits
from lossfns._core.checks import IGNORED, check_ids, check_logits, check_range, integer
from lossfns._core.hidden import HiddenStates
from lossfns._core.normalization import accumulator_dtype
from lossfns._core.rows import compute_dtype
from lossfns.segmentation import interpolated

from ._reduce import Labels, Logits, label_ids, pair


@torch.no_grad()
def segmentation_counts(logits: Logits, labels: Labels, *, select: Selector | None = None) -> dict[str, Tensor]:
    """Confusion matrix of each image, from logits interpolated to the labels' size, one image at a time.

    Args:
        logits: `(B, C, h, w)`, or the tuple the Trainer hands over.
        labels: class ids `(B, H, W)`, -100 where there is none (`replace_labels(collator, {255: -100})`).
        select: a function that picks the logits.

    Returns:
        `confusion`: `(B, C * C)` int64, entry `true * C + predicted`; among equal logits the smaller id is predicted.
        -1 throughout, which metrics refuse, where a logit at a label of the image is NaN.

    Raises:
        ValueError: no labels, shapes that do not fit, a label out of range.
        TypeError: ids where logits are expected; labels are not integers.

    Example:
        >>> logits = torch.tensor([[[[0.0]], [[1.0]]]])
        >>> segmentation_counts(logits, torch.tensor([[[0, 1], [1, -100]]]))["confusion"]
        tensor([[0, 1, 0, 2]])
    """
    ids = label_ids(labels)
    if ids is None or ids.ndim != 3 or not ids.shape[1:].numel():
        given = None if ids is None else tuple(ids.shape)
        raise ValueError(f"labels of pixels are (batch, height, width), at least one in each image; got {given}")
    found = select_logits(logits, ids, select)
    if found.ndim != 4 or len(found) != len(ids):
        raise ValueError(f"expected logits ({len(ids)}, classes, height, width), got {tuple(found.shape)}")
    check_ids(ids)
    host, classes = ids.cpu(), found.shape[1]
    check_range(host[host != IGNORED], classes)
    counts = torch.zeros(len(ids), classes**2 + 1, dtype=torch.int64, device=ids.device)
    for image, target, row in zip(found, ids, counts, strict=True):
        scores = interpolated(image, target.shape)
        predicted = scores.argmax(0, keepdim=True)
        # What is ignored has a cell of its own: to select the rest would wait for the device once an image.
        cells = (target * classes + predicted[0]).where(target != IGNORED, classes**2).flatten()
        row.index_add_(0, cells, torch.ones_like(cells, dtype=torch.int64))
        row.masked_fill_((scores.gather(0, predicted)[0].isnan() & (target != IGNORED)).any(), -1)
    return {"confusion": counts[:, :-1]}


@torch.no_grad()
def embeddings(logits: Logits, labels: Labels, *, select: Callable[[Any], Any], unit_length: bool = True) -> Any:
    """Vectors that a model returns, one or several a sample, for retrieval over the whole evaluation set.

    Args:
        logits: what the Trainer hands over.
        labels: not read.
        select: picks `(B, D)` tensors, one or a dict of them, as `lambda outputs: {"queries": outputs[0], ...}`.
        unit_length: scale each vector to length 1, so that products are cosines.

    Returns:
        What `select` picked, float32 (float64 for float64 vectors).

    Raises:
        ValueError: not one vector a sample.
        TypeError: not floating tensors.

    Example:
        >>> embeddings((torch.tensor([[3.0, 4.0]]),), None, select=lambda outputs: outputs[0])
        tensor([[0.6000, 0.8000]])
    """
    found = select(logits)
    if isinstance(found, dict):
        return {name: _vectors(value, unit_length) for name, value in found.items()}
    return _vectors(found, unit_length)


def _vectors(vectors: Tensor, unit_length: bool) -> Tensor:
    if check_logits(vectors).ndim != 2:
        raise ValueError(f"one vector a sample is (batch, size); got {tuple(vectors.shape)}. Pool tokens in select=")
    vectors = vectors.to(compute_dtype(vectors.dtype))
    return F.normalize(vectors, dim=-1) if unit_length else vectors


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
    if integer(bins, "bins") < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    opened, pairs = pair(logits, labels, shift, select, source, scorer="calibration_bins")
    predicted = opened.statistics(pairs.rows, ("top_id",))["top_id"].long()
    best = opened.statistics(replace(pairs.rows, targets=predicted.clamp(min=0)), ("log_prob",))["log_prob"]
    dtype = accumulator_dtype(best.device)
    confidence = best.to(dtype).exp()
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    right = (predicted == pairs.rows.labels).to(dtype)
    values = {"bin_labels": torch.ones_like(confidence), "bin_confidence": confidence, "bin_correct": right}
    empty = confidence.new_zeros(pairs.shape[0] * bins)
    return {
        name: empty.index_add(0, pairs.samples * bins + place, value).view(-1, bins) for name, value in values.items()
    }
