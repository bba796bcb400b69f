"""Collator wrappers that change labels, or the inputs from which the model computes their logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._core.alignment import split_labels
from .._core.checks import IGNORED, describe
from .label_dicts import misses_first_labels
from .wrapper import Batch, Changed, Collator, batch_labels


def mask_first_label(collator: Collator) -> Changed:
    """Set the first label of each sequence, which no logit predicts, to -100, so that the Trainer does not count it.

    A causal loss scores the labels from the second on, but the Trainer counts the first one too for class names that do
    not contain `ForCausalLM` (GPT2LMHeadModel, OpenAIGPT, CTRL, any wrapper) and, before transformers 5.10, for all.

    Args:
        collator: any data collator that returns integer `labels` `(B, S)`.

    Returns:
        A picklable collator.

    Raises:
        ValueError: in the call: the labels are not integers `(B, S)`.

    Example:
        >>> import torch
        >>> collate = mask_first_label(lambda features: {"labels": torch.tensor(features)})
        >>> collate([[5, 6], [7, 8]])["labels"]
        tensor([[-100,    6],
                [-100,    8]])
    """
    return Changed(collator, _first_masked)


def _first_masked(batch: Batch) -> Batch:
    labels = batch_labels(batch).clone()
    labels[:, :1] = IGNORED
    return {**batch, "labels": labels}


def replace_labels(collator: Collator, replacements: Mapping[int, int]) -> Changed:
    """Replace label ids simultaneously, above all another ignored id by -100, which the Trainer does not count.

    Args:
        collator: any data collator that returns integer `labels` of any shape and dtype.
        replacements: `{old: new}`, as in `{255: -100}` for segmentation maps.

    Returns:
        A picklable collator; its labels are int64.

    Raises:
        TypeError: a replacement is not a pair of integers.
        ValueError: in the call: the labels are not integers.

    Example:
        >>> import torch
        >>> collate = replace_labels(lambda features: {"labels": torch.tensor(features)}, {255: -100, 1: 0})
        >>> collate([[0, 1], [2, 255]])["labels"]
        tensor([[   0,    0],
                [   2, -100]])
    """
    mapping = isinstance(replacements, Mapping)
    if not mapping or not all(type(old) is int and type(new) is int for old, new in replacements.items()):
        raise TypeError(f"replacements must map integers to integers, as in {{255: {IGNORED}}}, got {replacements!r}")
    return Changed(collator, _replaced, {"replacements": dict(replacements)})


def _replaced(batch: Batch, replacements: Mapping[int, int]) -> Batch:
    before = batch_labels(batch, dimensions=None).long()
    labels = before.clone()
    for old, new in replacements.items():
        labels[before == old] = new
    return {**batch, "labels": labels}


def mask_missing(collator: Collator) -> Changed:
    """Replace NaN labels by -100.0, which the Trainer does not count and losses such as `regression_loss` ignore.

    Args:
        collator: any data collator that returns floating `labels` of any shape.

    Returns:
        A picklable collator.

    Raises:
        ValueError: in the call: the labels are not floating.

    Example:
        >>> import torch
        >>> collate = mask_missing(lambda features: {"labels": torch.tensor(features)})
        >>> collate([0.5, float("nan")])["labels"]
        tensor([   0.5000, -100.0000])
    """
    return Changed(collator, _missing_masked)


def _missing_masked(batch: Batch) -> Batch:
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or not labels.is_floating_point():
        raise ValueError(f"the collator must return floating labels, got {describe(labels)}")
    return {**batch, "labels": labels.masked_fill(labels.isnan(), IGNORED)}


def keep_supervised_logits(collator: Collator) -> Changed:
    """Make a causal model compute only logits that predict a supervised label, and cut the labels to match.

    `logits_to_keep` becomes the positions whose next label is supervised in at least one sequence, and the last
    position, so that it is never empty. `labels` become a first column of -100 and the labels that follow those
    positions. The logit at `i` still predicts the label at `i + 1`: losses and reducers keep `shift=1`, and the model's
    own loss and the Trainer's count do not change. Prompts that fill whole columns of the batch never reach the head.

    There is one index for the whole batch, but two ways of splitting batches cut it like a tensor of samples.
    `dispatch_batches` (accelerate's default for an IterableDataset) raises here; under DataParallel the loss or reducer
    raises, because it then gets fewer logits than labels.

    Args:
        collator: any data collator that returns integer `labels` `(B, S)`.

    Returns:
        A picklable collator; for models whose forward takes `logits_to_keep`.

    Raises:
        ValueError: in the call: the labels are not integers `(B, S)`, the batch already has `logits_to_keep`, or
            accelerate dispatches batches.

    Example:
        >>> import torch
        >>> collate = keep_supervised_logits(lambda features: {"labels": torch.tensor(features)})
        >>> collate([[-100, -100, 5, 6], [-100, -100, -100, 8]])
        {'labels': tensor([[-100,    5,    6],
                [-100, -100,    8]]), 'logits_to_keep': tensor([1, 2, 3])}
    """
    return Changed(collator, _only_supervised)


def _only_supervised(batch: Batch) -> Batch:
    _refuse_dispatched_batches()
    labels = batch_labels(batch)
    if "logits_to_keep" in batch:
        raise ValueError("the batch must not contain logits_to_keep, which keep_supervised_logits would overwrite")
    predicting = (labels[:, 1:] != IGNORED).any(0).nonzero().flatten()  # positions whose next label is supervised
    last = predicting.new_tensor([labels.shape[1] - 1])
    unpredicted = labels.new_full((labels.shape[0], 1), IGNORED)
    return {
        **batch,
        "labels": torch.cat([unpredicted, labels[:, predicting + 1]], dim=1),
        "logits_to_keep": torch.cat([predicting, last]),
    }


def _refuse_dispatched_batches() -> None:
    """Raise ValueError if accelerate is about to split this batch; this also works in a forked worker."""
    from accelerate.data_loader import DataLoaderDispatcher
    from accelerate.state import GradientState

    if isinstance(GradientState().active_dataloader, DataLoaderDispatcher):
        raise ValueError(
            "keep_supervised_logits does not work with dispatch_batches, which splits every tensor of a batch along "
            "its first dimension, the index of positions too. Set "
            "TrainingArguments(accelerator_config={'dispatch_batches': False})"
        )


def pack_spans(collator: Collator) -> Changed:
    """Join `start_positions` and `end_positions` into one tensor `labels` `(B, 2)`, for `question_answering_loss`.

    Positions outside the window become -100. Set `TrainingArguments(label_names=["labels"])`: without it the Trainer
    uses the label names of question answering models, does not count these labels and does not evaluate the loss.

    Args:
        collator: any data collator that returns `input_ids` `(B, S)` and both positions `(B,)`.

    Returns:
        A picklable collator.

    Raises:
        ValueError: in the call: the batch lacks one of the positions.

    Example:
        >>> rows = [{"input_ids": [7, 8, 9], "start_positions": 1, "end_positions": 3}]
        >>> collate = pack_spans(lambda rows: {name: torch.tensor([row[name] for row in rows]) for name in rows[0]})
        >>> collate(rows)["labels"]
        tensor([[   1, -100]])
    """
    return Changed(collator, _packed)


def _packed(batch: Batch) -> Batch:
    ends = [batch.pop(name, None) for name in ("start_positions", "end_positions")]
    if not all(isinstance(end, Tensor) and end.ndim == 1 for end in ends):
        given = ", ".join(map(describe, ends))
        raise ValueError(f"the collator must return start_positions and end_positions (batch,), got {given}")
    spans = torch.stack(ends, dim=1)
    outside = (spans < 0) | (spans >= batch["input_ids"].shape[1])
    return {**batch, "labels": spans.masked_fill(outside, IGNORED)}


def with_decoder_inputs(collator: Collator, model: Any) -> Changed:
    """Add the `decoder_input_ids` of an encoder-decoder, which the model would otherwise derive from its labels.

        decoder_input_ids[:, 0] = decoder_start_token_id,  decoder_input_ids[:, i] = labels[:, i - 1]

    They are needed because the Trainer takes the labels out of the batch before `forward`: T5 then raises, and BART
    silently trains on its source. The Trainer of transformers 5.10 to 5.14 also leaves the first label of each sequence
    out of its count; for these releases `shift_labels` are added, which it counts instead. Apply wrappers that change
    labels to the inner collator.

    Args:
        collator: any data collator that returns integer labels `(B, S)`, in a dict or not.
        model: an encoder-decoder. Only two ids of its config are kept, `decoder_start_token_id` and `pad_token_id`.

    Returns:
        A picklable collator.

    Raises:
        ValueError: the config lacks one of the ids, or the model derives its decoder inputs differently; in the call:
            the labels are not integers `(B, S)`.

    Example:
        >>> from types import SimpleNamespace
        >>> model = SimpleNamespace(config=SimpleNamespace(decoder_start_token_id=0, pad_token_id=1))
        >>> collate = with_decoder_inputs(lambda rows: {"labels": torch.tensor(rows)}, model)
        >>> collate([[5, 6, 2], [7, 2, -100]])["decoder_input_ids"].tolist()
        [[0, 5, 6], [0, 7, 2]]
    """
    config = getattr(model, "config", None)
    start, pad = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
    if start is None or pad is None:
        raise ValueError(f"model.config must have decoder_start_token_id and pad_token_id, got {start} and {pad}")
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    probe = torch.tensor([[pad + 1, pad + 2, IGNORED]], device="cpu")
    if prepare is not None and not torch.equal(prepare(probe), shifted_right(probe, start, pad)):
        raise ValueError(
            f"{type(model).__name__} does not derive its decoder inputs by shifting the labels to the right after "
            "decoder_start_token_id; use DataCollatorForSeq2Seq(tokenizer, model=model)"
        )
    return Changed(collator, _with_decoder_ids, {"start": start, "pad": pad})


def _with_decoder_ids(batch: Batch, start: int, pad: int) -> Batch:
    ids, _ = split_labels(batch.get("labels"))
    counted = {"shift_labels": ids} if misses_first_labels() else {}
    decoder = {"decoder_input_ids": shifted_right(batch_labels({"labels": ids}), start, pad)}
    return {**counted, **batch, **decoder}


def shifted_right(labels: Tensor, start: int, pad: int) -> Tensor:
    """Return decoder inputs for labels `(B, S)`: `start`, then all labels but the last, with `pad` for -100."""
    shifted = labels.roll(1, dims=1)
    shifted[:, 0] = start
    return shifted.masked_fill(shifted == IGNORED, pad)
