"""Confusion matrices of segmented images."""

from __future__ import annotations

import torch
from torch import Tensor

from lossfns._core.alignment import select_logits
from lossfns._core.checks import IGNORED, check_ids, check_range
from lossfns.segmentation import interpolated

from ._core import Labels, Logits, Select, label_ids


@torch.no_grad()
def segmentation_counts(logits: Logits, labels: Labels, *, select: Select = None) -> dict[str, Tensor]:
    """Return the confusion matrix of each image, from logits interpolated to the size of the labels.

    Images are interpolated one at a time, so that the logits of only one exist at full size.

    Args:
        logits: `(B, C, h, w)` float, or the tuple or dict that the Trainer passes.
        labels: class ids `(B, H, W)`, or a dict with `labels`; -100 is not counted. Use
            `replace_labels(collator, {255: -100})` if another id marks ignored pixels.
        select: a function of the model's outputs that returns the logits.

    Returns:
        `confusion`: `(B, C * C)` int64, number of pixels at entry `true * C + predicted`; among equal logits, the
        smaller id is predicted. All entries of an image are -1, which metrics reject, if a scored logit is NaN.

    Raises:
        ValueError: labels are missing, shapes do not fit, or a label is out of range.
        TypeError: token ids are passed as logits, or the labels are not integers.

    References:
        Long, Shelhamer, Darrell, "Fully Convolutional Networks for Semantic Segmentation", 2015, section 5
        (the counts `n_ij`), https://arxiv.org/abs/1411.4038

    Example:
        >>> logits = torch.tensor([[[[0.0]], [[1.0]]]])
        >>> segmentation_counts(logits, torch.tensor([[[0, 1], [1, -100]]]))["confusion"]
        tensor([[0, 1, 0, 2]])
    """
    ids = label_ids(labels)
    if ids is None or ids.ndim != 3 or not ids.shape[1:].numel():
        given = None if ids is None else tuple(ids.shape)
        raise ValueError(f"labels must be (batch, height, width) and not empty, got {given}")
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
        # Ignored pixels are counted in a separate cell: selecting the others would wait for the device per image.
        cells = (target * classes + predicted[0]).where(target != IGNORED, classes**2).flatten()
        row.index_add_(0, cells, torch.ones_like(cells, dtype=torch.int64))
        row.masked_fill_((scores.gather(0, predicted)[0].isnan() & (target != IGNORED)).any(), -1)
    return {"confusion": counts[:, :-1]}
