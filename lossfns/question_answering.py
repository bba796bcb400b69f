"""Loss for extractive question answering, for the Trainer's `compute_loss_func`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ._core.alignment import Labels, Outputs, split_labels
from ._core.autograd import disable_compile
from ._core.checks import check_logits
from ._core.normalization import NumItems
from ._core.signature import Term
from ._core.sources import FromLogits
from ._core.term_loss import label_loss
from .terms import cross_entropy


@disable_compile
def question_answering_loss(
    outputs: Outputs, labels: Labels, num_items_in_batch: NumItems = None, *, term: Term = cross_entropy
) -> Tensor:
    """Compute the mean of a term over the start and end positions of answers, exact under gradient accumulation.

        sum over labeled starts and ends of term(log_softmax(logits over positions)[label]) / number of them

    The Trainer counts and evaluates if the collator is `pack_spans(collator)` and the arguments are
    `TrainingArguments(label_names=["labels"])`. The classes are all positions of a window, padding included, as in the
    loss of the models: pad all batches to one length, or the loss depends on the width of a batch.

    Args:
        outputs: what the model returned: a ModelOutput or dict with `start_logits` and `end_logits`, or a tuple that
            begins with both, `(B, S)` each.
        labels: start and end `(B, 2)`, -100 for one outside the window; or `{"labels": both, name: extra}`.
        num_items_in_batch: the Trainer's count of positions over the accumulation window, in any of its forms; None
            counts those of this call.
        term: the term that is minimized per start and per end; its classes are the positions of the window.

    Returns:
        0-d float32 (float64 for float64 logits), nats per position for cross-entropy; 0 with a live graph when none
        counts. If no position is outside its window, this is the mean of start and end loss, as in the models.

    Raises:
        ValueError: labels are missing, out of range or of another shape; the logits are missing.
        TypeError: labels are not integers; the term asks for an unknown tensor.

    References:
        Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for Language
        Understanding", 2019, section 4.2, https://arxiv.org/abs/1810.04805

    Example:
        >>> outputs = {"start_logits": torch.zeros(1, 4), "end_logits": torch.zeros(1, 4)}
        >>> question_answering_loss(outputs, torch.tensor([[1, 3]]))
        tensor(1.3863)
    """
    ids, extras = split_labels(labels)
    start, end = map(check_logits, _ends(outputs))
    if start.ndim != 2 or end.shape != start.shape or ids.shape != (start.shape[0], 2):
        raise ValueError(
            "expected start and end logits (batch, sequence) and labels (batch, 2), as "
            f"lossfns.collators.pack_spans(collator) returns them, got logits {tuple(start.shape)} and "
            f"{tuple(end.shape)} and labels {tuple(ids.shape)}"
        )
    return label_loss(FromLogits(torch.stack([start, end], dim=1)), ids, extras, num_items_in_batch, term)


def _ends(outputs: Outputs) -> tuple[Tensor, Tensor]:
    if isinstance(outputs, Mapping):
        start, end = outputs.get("start_logits"), outputs.get("end_logits")
        if start is not None and end is not None:
            return start, end
    if isinstance(outputs, (tuple, list)) and len(outputs) > 1:
        return outputs[0], outputs[1]
    given = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
    raise ValueError(f"expected an output with start_logits and end_logits, or a tuple of both, got {given}")
