"""Loss of speech recognition without an alignment for the Trainer's `compute_loss_func`."""

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
    """Connectionist temporal classification, a label on average, exact under gradient accumulation and processes.

    Args:
        outputs: what the model returned: a ModelOutput or dict with `logits`, a tuple, or logits `(B, T, V)` of frames.
        labels: ids `(B, S)`, -100 where there is none; or `{"labels": ids, "input_lengths": frames of each row (B,)}`,
            without which all `T` frames count. A row without labels is left out.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms; None counts
            those of this call.
        blank: id of the blank, the pad token of Wav2Vec2 and its relatives (`config.pad_token_id`).
        zero_infinity: let rows with more labels than frames can hold cost nothing, instead of raising.
        select: a function of `outputs` that picks the logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats a label: the sum over rows, by the number of labels. torch's own
        "mean" divides each row by its length first.

    Raises:
        ValueError: labels are missing, out of range, blank or of another shape; a row has too few frames.
        TypeError: labels or lengths are not integers.

    Source:
        Graves, Fernandez, Gomez, Schmidhuber: Connectionist Temporal Classification (2006).

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
        # The gradient of what is ruled out is 0, and not the -inf less -inf that torch makes of it.
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
    """Labels and the frames of each row, `(B,)`, int64 on the host."""
    check_ids(labels)
    unknown = sorted(extras.keys() - {"input_lengths"})
    if unknown:
        raise ValueError(f"ctc_loss reads only 'input_lengths' beside the labels, the dict of labels has {unknown}")
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
            f"input_lengths must be frames of the logits, 0 to {most}, one a row ({labels.shape[0]},), got "
            f"{frames.tolist()}; model._get_feat_extract_output_lengths(samples) tells them from audio samples"
        )
    return host, frames


def whole_lengths(lengths: Any) -> Tensor:
    """Return the lengths as a tensor, or raise TypeError where they are no integers and would be rounded."""
    found = lengths if isinstance(lengths, Tensor) else as_numbers(lengths)
    if found is None or found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
        given = lengths if found is None else found
        raise TypeError(f"input_lengths must be integers, not {describe(given)}: the frames of each row")
    return found


def _check_labels(targets: Tensor, classes: int, blank: int) -> None:
    if not 0 <= integer(blank, "blank") < classes:
        raise ValueError(f"blank={blank} is none of the {classes} ids of the logits")
    check_range(targets, classes)
    if bool((targets == blank).any()):
        raise ValueError(
            f"labels contain the blank {blank}, which nobody can say. Padding is {IGNORED} in labels; say blank= where "
            "the blank is another id"
        )


def _check_frames(labels: Tensor, scored: Tensor, frames: Tensor) -> None:
    """Raise where a row has fewer frames than labels, and blanks between equal ones: no path leads through it."""
    for row, (ids, here, given) in enumerate(zip(labels, scored, frames.tolist(), strict=True)):
        said = ids[here]
        needed = len(said) + int((said[1:] == said[:-1]).sum())
        if given < needed:
            raise ValueError(
                f"row {row} has {given} frames for {len(said)} labels, which need {needed}: its loss is infinite. "
                "Leave it out of the data, or let it cost nothing with zero_infinity=True"
            )
