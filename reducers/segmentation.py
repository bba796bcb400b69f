"""Confusion matrices of segmented images."""

from __future__ import annotations

import torch
from torch import Tensor

from lossfns._core.alignment import Selector, select_logits
from lossfns._core.checks import IGNORED, check_ids, check_range
from lossfns.segmentation import interpolated

from ._core import Labels, Logits, label_ids


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
