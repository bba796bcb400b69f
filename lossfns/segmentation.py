"""Loss for semantic segmentation, one class per pixel, for the Trainer's `compute_loss_func`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ._core.alignment import Labels, Outputs, Selector, align, select_logits, split_labels
from ._core.autograd import autocast_off, disable_compile
from ._core.block import row_statistics
from ._core.normalization import NumItems, accumulator_dtype, divide, item_count
from ._core.rows import Rows, compute_dtype
from ._core.signature import Term
from ._core.term_loss import BoundTerm, bind
from .terms import cross_entropy


@disable_compile
def segmentation_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    term: Term | None = cross_entropy,
    dice: float = 0.0,
    select: Selector | None = None,
) -> Tensor:
    """Compute the mean of a term over pixels plus a soft Dice loss, exact under gradient accumulation and DDP.

        mean over labeled pixels of (term + dice * dice_loss(image of the pixel))
        dice_loss(image) = 1 - mean over its classes c of 2 * sum(p_c * y_c) / (sum(y_c) + sum(p_c))

    Here `p_c` is the probability of class `c` and `y_c` is 1 where it is the label, summed over the labeled pixels of
    an image. An image counts by its number of labeled pixels, like the rest of the loss; for images of one size that
    are labeled everywhere this is the plain mean over images.

    Logits of lower resolution are interpolated to that of the labels, one image at a time and once more in backward, so
    that the interpolated logits of a batch are never in memory together.

    Args:
        outputs: what the model returned: a ModelOutput or dict with `logits`, a tuple, or logits `(B, C, h, w)`.
        labels: class ids `(B, H, W)`, -100 for pixels without a label (`replace_labels(collator, {255: -100})`); or
            `{"labels": ids, name: extra}`.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms; None counts
            the labels of this call.
        term: the term that is minimized per pixel; None for the Dice loss alone.
        dice: weight of the Dice loss, >= 0.
        select: a function of `outputs` that picks the logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats per pixel for cross-entropy; 0 with a live graph when no
        label counts.

    Raises:
        ValueError: labels are missing, out of range or of another shape; logits have a higher resolution than labels;
            `dice` is negative, or 0 without a term.
        TypeError: labels are not integers; the term asks for an unknown tensor.

    References:
        Milletari, Navab, Ahmadi, "V-Net: Fully Convolutional Neural Networks for Volumetric Medical Image
        Segmentation", 2016, for the Dice loss, https://arxiv.org/abs/1606.04797

        Sudre, Li, Vercauteren, Ourselin, Cardoso, "Generalised Dice overlap as a deep learning loss function for highly
        unbalanced segmentations", 2017, for areas that are not squared, https://arxiv.org/abs/1707.03237

    Example:
        >>> labels = torch.tensor([[[0, 0], [1, -100]]])
        >>> segmentation_loss({"logits": torch.zeros(1, 2, 1, 1)}, labels, dice=1.0)
        tensor(1.2074)
    """
    if not dice >= 0 or (term is None and dice == 0):
        raise ValueError(f"dice must be >= 0, and > 0 if term is None (nothing to minimize otherwise), got {dice}")
    ids, extras = split_labels(labels)
    logits = select_logits(outputs, ids, select)
    _check_shapes(logits, ids)
    size, classes = ids.shape[-2:], logits.shape[1]
    # A view with the shape of the interpolated logits: `align` reads shape and device only.
    like = logits.detach()[:, :1, :1, :1].expand(-1, *size, classes)
    aligned = align(like, ids, shift=0)
    count = item_count(num_items_in_batch, len(aligned.rows), logits.device)
    bound = None if term is None else bind(term, aligned, extras, classes=classes)
    if not len(ids):
        return divide(logits.flatten(), count).to(compute_dtype(logits.dtype))
    values = [
        checkpoint(_image_loss, image, size, rows, bound, here, dice, use_reentrant=False, preserve_rng_state=False)
        for image, (rows, here) in zip(logits, _by_image(aligned.rows, ids.shape), strict=True)
    ]
    return divide(torch.stack(values), count).to(compute_dtype(logits.dtype))


def _check_shapes(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != 4 or labels.ndim != 3 or logits.shape[0] != labels.shape[0] or not logits.shape[1:].numel():
        raise ValueError(
            "expected logits (batch, classes, height, width) and labels (batch, height, width), got "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    if logits.shape[2] > labels.shape[1] or logits.shape[3] > labels.shape[2]:
        raise ValueError(
            f"logits must not have a higher resolution than labels {tuple(labels.shape[1:])}, got "
            f"{tuple(logits.shape[2:])}: interpolation would skip some of them. Keep the labels at full resolution"
        )


def _by_image(rows: Rows, shape: torch.Size) -> Iterator[tuple[Rows, slice]]:
    """Yield the scored pixels of each image, and their places among those of all images."""
    pixels, start = shape[1:].numel(), 0
    scored = rows.index.div(pixels, rounding_mode="floor").bincount(minlength=shape[0])
    for image, count in enumerate(scored.tolist()):
        here = slice(start, start := start + count)
        first = image * pixels
        yield Rows(rows.index[here] - first, rows.on_device[here] - first, rows.labels[here]), here


def interpolated(logits: Tensor, size: torch.Size) -> Tensor:
    """Return logits of one image `(C, h, w)` at the resolution of its labels, `(C, H, W)` in the compute dtype."""
    x = logits.to(compute_dtype(logits.dtype))
    return x if x.shape[1:] == size else F.interpolate(x[None], size=size, mode="bilinear", align_corners=False)[0]


def _image_loss(
    logits: Tensor, size: torch.Size, rows: Rows, bound: BoundTerm | None, here: slice, dice: float
) -> Tensor:
    """Return the loss of one image `(C, h, w)` summed over its pixels, 0-d float64."""
    with autocast_off(logits.device):
        pixels = interpolated(logits, size).flatten(1).T
        total = pixels.new_zeros((), dtype=accumulator_dtype(pixels.device))
        if bound is not None:
            total = total + bound(row_statistics(pixels, rows, bound.fields), here).sum(dtype=total.dtype)
        return total + dice * len(rows) * _dice_loss(pixels, rows, total.dtype) if dice else total


def _dice_loss(pixels: Tensor, rows: Rows, dtype: torch.dtype) -> Tensor:
    """Return 1 minus the mean Dice score of the classes that an image has, 0-d; 0 if it has none."""
    p = pixels.index_select(0, rows.on_device).softmax(-1)
    at_label = p.gather(1, rows.labels[:, None])[:, 0].to(dtype)
    area, overlap = at_label.new_zeros(2, p.shape[1])
    area = area.index_add(0, rows.labels, torch.ones_like(at_label))
    overlap = overlap.index_add(0, rows.labels, at_label)
    present = area > 0
    missed = 1 - 2 * overlap / (area + p.sum(0, dtype=dtype)).where(present, 1)
    mean: Tensor = missed.where(present, 0).sum() / present.sum().clamp(min=1)
    return mean
