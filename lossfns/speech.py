"""Loss of speech recognition without alignments, for the Trainer's `compute_loss_func`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._core.alignment import Labels, Outputs, Selector, on_host, select_logits, split_labels
from ._core.autograd import autocast_off, disable_compile
from ._core.checks import IGNORED, as_numbers, check_ids, check_range, describe, integer
from ._core.normalization import NumItems, divide, item_count
from ._core.rows import compute_dtype


@disable_compile
def ctc_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    blank: int = 0,
    zero_infinity: bool = False,
    select: Selector | None = None,
) -> Tensor:
    """Compute connectionist temporal classification as a mean over labels, exact under gradient accumulation.

        sum over rows of -log(sum over paths that spell the labels of the product of p(symbol) over frames)
        / number of labels

    torch's own "mean" divides each row by its number of labels first, and then takes the mean over rows.

    Args:
        outputs: the model's outputs: a ModelOutput or dict with `logits`, a tuple, or logits `(B, T, V)` of T frames.
        labels: ids `(B, S)`, -100 for padding; or `{"labels": ids, "input_lengths": lengths}` with the number of frames
            of each row, integers `(B,)`. Without lengths, all `T` frames are used. A row without labels is left out.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms. None counts
            the labels of this call.
        blank: id of the CTC blank: the pad token of Wav2Vec2 and related models (`config.pad_token_id`).
        zero_infinity: whether rows with too few frames for their labels have loss 0 instead of raising ValueError.
        select: a function of `outputs` that returns the logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats per label; 0 with a live graph if there is no label.

    Raises:
        ValueError: labels are missing, out of range, blank or of another shape; a row has too few frames.
        TypeError: labels or lengths are not integers.

    References:
        Graves, Fernández, Gomez, Schmidhuber, "Connectionist Temporal Classification: Labelling Unsegmented Sequence
        Data with Recurrent Neural Networks", 2006, https://doi.org/10.1145/1143844.1143891

    Example:
        >>> ctc_loss(torch.zeros(1, 2, 3), torch.tensor([[2, -100]]))
        tensor(1.0986)
    """
    ids, extras = split_labels(labels)
    logits = select_logits(outputs, ids, select)
    host, frames = _labels_and_frames(logits, ids, extras)
    scored = host != IGNORED
    lengths = scored.sum(1)
    _check_labels(host[scored], logits.shape[-1], blank)
    rows = lengths.nonzero().flatten()
    if not zero_infinity:
        _check_frames(host, scored, frames)
    count = item_count(num_items_in_batch, int(lengths.sum()), logits.device)
    x = logits[rows.to(logits.device, non_blocking=True)].to(compute_dtype(logits.dtype))
    if not len(rows):
        return divide(x.flatten(), count)
    with autocast_off(logits.device):
        log_probs = x.log_softmax(-1)
        # The masked values get a gradient of 0; torch computes NaN, as -inf - (-inf), for symbols with a logit of -inf.
        log_probs = log_probs.masked_fill(log_probs == -torch.inf, -torch.inf)
        values = F.ctc_loss(
            log_probs.transpose(0, 1),
            host[scored].to(logits.device, non_blocking=True),
            frames[rows],
            lengths[rows],
            blank=blank,
            reduction="none",
            zero_infinity=zero_infinity,
        )
        return divide(values, count)


def _labels_and_frames(logits: Tensor, labels: Tensor, extras: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the labels and the number of frames of each row, `(B,)` int64, on the host."""
    check_ids(labels)
    unknown = sorted(extras.keys() - {"input_lengths"})
    if unknown:
        raise ValueError(f"ctc_loss reads no extra tensor but 'input_lengths', got {unknown} in the dict of labels")
    if labels.ndim != 2 or logits.ndim != 3 or logits.shape[0] != labels.shape[0]:
        raise ValueError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not fit: expected logits "
            "(batch, frames, vocabulary) and labels (batch, length)"
        )
    most = logits.shape[1]
    lengths = torch.full(labels.shape[:1], most, device=labels.device)
    if extras:
        lengths = whole_lengths(extras["input_lengths"]).to(labels.device, torch.int64, non_blocking=True)
    host, frames = on_host(labels, lengths)
    if frames.shape != labels.shape[:1] or bool(((frames < 0) | (frames > most)).any()):
        raise ValueError(
            f"input_lengths must be 0 to {most} frames of the logits, one number per row, of shape "
            f"({labels.shape[0]},), got {frames.tolist()}. Compute them from the numbers of audio samples with "
            "model._get_feat_extract_output_lengths(samples)"
        )
    return host, frames


def whole_lengths(lengths: Any) -> Tensor:
    """Return the lengths as a tensor, or raise TypeError unless they are integers: others would be truncated."""
    found = lengths if isinstance(lengths, Tensor) else as_numbers(lengths)
    if found is None or found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
        given = describe(lengths if found is None else found)
        raise TypeError(f"input_lengths must be integers, the number of frames of each row, got {given}")
    return found


def _check_labels(targets: Tensor, classes: int, blank: int) -> None:
    """Raise ValueError unless `blank` is an id of the logits and the labels are other ids."""
    if not 0 <= integer(blank, "blank") < classes:
        raise ValueError(f"blank must be an id of the logits, 0 to {classes - 1}, got {blank}")
    check_range(targets, classes)
    if bool((targets == blank).any()):
        raise ValueError(
            f"labels must not contain the CTC blank id {blank}. Pad labels with {IGNORED}, or set blank= if the "
            "model's blank is another id"
        )


def _check_frames(labels: Tensor, scored: Tensor, frames: Tensor) -> None:
    """Raise ValueError if a row has no path: fewer frames than labels, plus a blank between equal neighbors."""
    for row, (ids, known, given) in enumerate(zip(labels, scored, frames.tolist(), strict=True)):
        spelled = ids[known]
        needed = len(spelled) + int((spelled[1:] == spelled[:-1]).sum())
        if given < needed:
            raise ValueError(
                f"row {row} needs at least {needed} frames for its {len(spelled)} labels, got {given}: its loss is "
                "infinite. Remove it from the data, or set zero_infinity=True to give it loss 0"
            )
