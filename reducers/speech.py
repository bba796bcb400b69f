"""Transcriptions of speech models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lossfns._core.alignment import select_logits
from lossfns._core.checks import IGNORED, integer
from lossfns.speech import whole_lengths

from ._core import Labels, Logits, Select


@torch.no_grad()
def ctc_greedy(logits: Logits, labels: Labels, *, blank: int = 0, select: Select = None) -> dict[str, Tensor]:
    """Return the best path of a CTC model: the largest logit of each frame, repetitions merged, blanks removed.

        ids = remove_blanks(merge_repetitions(argmax(logits)))

    Args:
        logits: `(B, T, V)` float, T frames, or the tuple or dict that the Trainer passes.
        labels: only `input_lengths` of a dict is used: `(B,)` integers, the number of frames of each row that are read.
        blank: id of the blank, which is the pad token of Wav2Vec2 and similar models.
        select: a function of the model's outputs that returns the logits.

    Returns:
        `generated`: `(B, T)` int64, the ids first, then -100.

    Raises:
        ValueError: the logits have another shape, `blank` is outside the vocabulary, or `input_lengths` does not have
            one number per row.
        TypeError: token ids are passed as logits, or `input_lengths` are not integers.

    References:
        Graves, Fernandez, Gomez, Schmidhuber, "Connectionist Temporal Classification: Labelling Unsegmented Sequence
        Data with Recurrent Neural Networks", 2006, section 3.2, https://doi.org/10.1145/1143844.1143891

    Example:
        >>> ctc_greedy(torch.eye(3)[[0, 2, 2, 0, 2]][None], None)["generated"]
        tensor([[   2,    2, -100, -100, -100]])
    """
    found = select_logits(logits, None, select)
    if found.ndim != 3 or not 0 <= integer(blank, "blank") < found.shape[-1]:
        raise ValueError(
            "expected logits (batch, frames, vocabulary) and a blank id in the vocabulary, got logits "
            f"{tuple(found.shape)} and blank={blank}"
        )
    best = found.argmax(-1)
    kept = best != blank
    kept[:, 1:] &= best[:, 1:] != best[:, :-1]
    # Frames that the Trainer adds to pad across ranks hold only -100.
    kept &= ~(found == IGNORED).all(-1)
    if isinstance(labels, Mapping) and "input_lengths" in labels:
        lengths = whole_lengths(labels["input_lengths"]).to(best.device)
        if lengths.shape != best.shape[:1]:
            raise ValueError(f"input_lengths must have one number per row, ({len(best)},), got {tuple(lengths.shape)}")
        kept &= torch.arange(best.shape[1], device=best.device) < lengths[:, None]
    order = (~kept).int().argsort(dim=1, stable=True)
    return {"generated": best.gather(1, order).where(kept.gather(1, order), IGNORED)}
