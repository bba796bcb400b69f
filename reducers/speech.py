"""Transcriptions of speech models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lossfns._core.alignment import Selector, select_logits
from lossfns._core.checks import IGNORED, whole
from lossfns.speech import whole_lengths

from ._core import Labels, Logits


@torch.no_grad()
def ctc_greedy(logits: Logits, labels: Labels, *, blank: int = 0, select: Selector | None = None) -> dict[str, Tensor]:
    """Best path of a speech model: the largest logit of each frame, repetitions merged, blanks removed.

    Args:
        logits: `(B, T, V)` of frames, or the tuple the Trainer hands over.
        labels: not read; a dict may have `input_lengths`, frames of each row, beyond which nothing is read.
        blank: id of the blank, the pad token of Wav2Vec2 and its relatives.
        select: a function that picks the logits.

    Returns:
        `generated`: `(B, T)` int64, the ids at the left, -100 behind them.

    Raises:
        ValueError: logits of another shape, a blank outside the vocabulary, lengths that are not one a row.
        TypeError: no logits, or lengths that are not integers.

    Source:
        Graves, Fernandez, Gomez, Schmidhuber: Connectionist Temporal Classification (2006), section 3.2.

    Example:
        >>> ctc_greedy(torch.eye(3)[[0, 2, 2, 0, 2]][None], None)["generated"]
        tensor([[   2,    2, -100, -100, -100]])
    """
    found = select_logits(logits, None, select)
    if found.ndim != 3 or not 0 <= whole(blank, "blank") < found.shape[-1]:
        raise ValueError(
            f"logits are (batch, frames, vocabulary) and blank={blank} one of it; got {tuple(found.shape)}"
        )
    best = found.argmax(-1)
    kept = best != blank
    kept[:, 1:] &= best[:, 1:] != best[:, :-1]
    # Frames that were added across ranks hold nothing but -100.
    kept &= ~(found == IGNORED).all(-1)
    if isinstance(labels, Mapping) and "input_lengths" in labels:
        lengths = whole_lengths(labels["input_lengths"]).to(best.device)
        if lengths.shape != best.shape[:1]:
            raise ValueError(f"input_lengths must be one a row, ({len(best)},), got {tuple(lengths.shape)}")
        kept &= torch.arange(best.shape[1], device=best.device) < lengths[:, None]
    order = (~kept).int().argsort(dim=1, stable=True)
    return {"generated": best.gather(1, order).where(kept.gather(1, order), IGNORED)}
