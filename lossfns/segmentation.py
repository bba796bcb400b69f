"""Loss of dense prediction for the Trainer's `compute_loss_func`: a class for every pixel."""

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
    """Mean of a term over pixels, plus a soft dice loss, exact under gradient accumulation and processes.

    Logits of lower resolution are interpolated to that of the labels, one image at a time and again in backward: the
    large logits of a batch never exist together.

    The dice loss of an image is 1 minus the mean, over the classes it has, of twice the overlap by the sum of both
    areas. An image counts by its labelled pixels, like the rest of the loss: over images of one size without holes that
    is the plain mean.

    Args:
        outputs: what the model returned: a ModelOutput or dict with `logits`, a tuple, or logits `(B, C, h, w)`.
        labels: class ids `(B, H, W)`, -100 where there is none (`replace_labels(collator, {255: -100})`); or
            `{"labels": ids, name: extra}`.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms; None counts
            those of this call.
        term: what is minimised a pixel; None leaves dice alone.
        dice: weight of the dice loss.
        select: a function of `outputs` that picks the logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats a pixel for cross-entropy; 0 with a live graph when no label
        counts.

    Raises:
        ValueError: labels are missing, out of range or of another shape; logits are finer than labels; nothing is asked
            for.
        TypeError: labels are not integers; the term asks for something unknown.

    Source:
        Milletari, Navab, Ahmadi: V-Net (2016), for dice; the areas are not squared, as in Sudre, Li, Vercauteren,
        Ourselin, Cardoso: Generalised Dice Overlap (2017).

    Example:
        >>> labels = torch.tensor([[[0, 0], [1, -100]]])
        >>> segmentation_loss({"logits": torch.zeros(1, 2, 1, 1)}, labels, dice=1.0)
        tensor(1.2074)
    """
    if not dice >= 0 or (term is None and dice == 0):
        raise ValueError(f"dice is a weight of 0 or more, and more where term is None: nothing to minimise; got {dice}")
    ids, extras = split_labels(labels)
    logits = select_logits(outputs, ids, select)
    _check_shapes(logits, ids)
    size, classes = ids.shape[-2:], logits.shape[1]
    stand_in = logits.detach()[:, :1, :1, :1].expand(-1, *size, classes)
    pairs = align(stand_in, ids, shift=0)
    count = item_count(num_items_in_batch, len(pairs.rows), logits.device)
    bound = None if term is None else bind(term, pairs, extras, classes=classes)
    if not len(ids):
        return divide(logits.flatten(), count).to(compute_dtype(logits.dtype))
    values = [
        checkpoint(_image, image, size, rows, bound, here, dice, use_reentrant=False, preserve_rng_state=False)
        for image, (rows, here) in zip(logits, _by_image(pairs.rows, ids.shape), strict=True)
    ]
    return divide(torch.stack(values), count).to(compute_dtype(logits.dtype))


def _check_shapes(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != 4 or labels.ndim != 3 or logits.shape[0] != labels.shape[0] or not logits.shape[1:].numel():
        raise ValueError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not fit: expected logits "
            "(batch, classes, height, width) and labels (batch, height, width)"
        )
    if logits.shape[2] > labels.shape[1] or logits.shape[3] > labels.shape[2]:
        raise ValueError(
            f"logits {tuple(logits.shape[2:])} are finer than labels {tuple(labels.shape[1:])}, so that interpolation "
            "would skip some of them. Keep the labels at full resolution"
        )


def _by_image(rows: Rows, shape: torch.Size) -> Iterator[tuple[Rows, slice]]:
    """The scored pixels of each image, and their places among all."""
    pixels, start = shape[1:].numel(), 0
    scored = rows.index.div(pixels, rounding_mode="floor").bincount(minlength=shape[0])
    for image, count in enumerate(scored.tolist()):
        here = slice(start, start := start + count)
        first = image * pixels
        yield Rows(rows.index[here] - first, rows.on_device[here] - first, rows.labels[here]), here


def interpolated(logits: Tensor, size: torch.Size) -> Tensor:
    """Logits of one image `(C, h, w)` at the resolution of its labels, `(C, H, W)` in the compute dtype."""
    x = logits.to(compute_dtype(logits.dtype))
    return x if x.shape[1:] == size else F.interpolate(x[None], size=size, mode="bilinear", align_corners=False)[0]


def _image(logits: Tensor, size: torch.Size, rows: Rows, bound: BoundTerm | None, here: slice, dice: float) -> Tensor:
    """What the pixels of one image `(C, h, w)` cost in all, 0-d float64."""
    with autocast_off(logits.device):
        pixels = interpolated(logits, size).flatten(1).T
        total = pixels.new_zeros((), dtype=accumulator_dtype(pixels.device))
        if bound is not None:
            total = total + bound(row_statistics(pixels, rows, bound.fields), here).sum(dtype=total.dtype)
        return total + dice * len(rows) * _dice_loss(pixels, rows, total.dtype) if dice else total


def _dice_loss(pixels: Tensor, rows: Rows, dtype: torch.dtype) -> Tensor:
    """1 minus the mean dice of the classes that an image has, 0-d; 0 where it has none."""
    p = pixels.index_select(0, rows.on_device).softmax(-1)
    at_label = p.gather(1, rows.labels[:, None])[:, 0].to(dtype)
    area, overlap = at_label.new_zeros(2, p.shape[1])
    area = area.index_add(0, rows.labels, torch.ones_like(at_label))
    overlap = overlap.index_add(0, rows.labels, at_label)
    present = area > 0
    missed = 1 - 2 * overlap / (area + p.sum(0, dtype=dtype)).where(present, 1)
    mean: Tensor = missed.where(present, 0).sum() / present.sum().clamp(min=1)
    return mean
