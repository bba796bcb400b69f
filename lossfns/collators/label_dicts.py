"""Collator wrappers that make a dict of labels, and the `shift_labels` that the Trainer then counts.

The Trainer cannot count in a dict. If a batch has `shift_labels`, it counts the entries that are not -100 (since
transformers 5.10): the labels of a loss, or one 0 for each unit that the loss divides by.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._core.alignment import scored_places, split_labels
from .._core.checks import IGNORED, MARKERS, as_numbers, check_shift, describe, strings
from .wrapper import Batch, Changed, Collator, Wrapper, batch_labels, collated

# The first release whose Trainer counts `shift_labels`.
COUNTED_SINCE = (5, 10)
# The first release since then whose Trainer counts all labels of encoder-decoders, not only `labels[..., 1:]`.
DECODERS_COUNTED_SINCE = (5, 15)


@dataclass(frozen=True)
class WithExtras(Wrapper):
    """See `with_extras`."""

    names: tuple[str, ...]
    shift: int | None

    def __call__(self, features: list[Any]) -> Batch:
        in_dataset = [name for name in self.names if all(name in row for row in features)]
        columns = {name: [row[name] for row in features] for name in in_dataset}
        others = [{name: value for name, value in row.items() if name not in columns} for row in features]
        batch = collated(self.collator, others)
        from_collator = {name: _gatherable(batch[name]) for name in self.names if name in batch}
        missing = sorted({*self.names} - {*columns, *from_collator})
        if missing:
            close = difflib.get_close_matches(missing[0], features[0], n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"extras must be columns of the dataset, got {missing}, which are not among {sorted(features[0])}: "
                f"{hint}The Trainer keeps them only with TrainingArguments(remove_unused_columns=False)"
            )
        placed = {name: _like_labels(column, name, others, batch) for name, column in columns.items()}
        ids, earlier = split_labels(batch.get("labels"))
        batch = {name: value for name, value in batch.items() if name not in from_collator}
        counted = batch["shift_labels"] if "shift_labels" in batch else _shifted(ids, self.shift)
        return label_dict(batch, {"labels": ids, **earlier, **from_collator, **placed}, counted)


def with_extras(collator: Collator, names: Iterable[str], *, shift: int | None = None) -> WithExtras:
    """Pass columns of the dataset to the loss: `labels` becomes the dict `{"labels": ids, name: tensor, ...}`.

    A term finds them by name: `token_weights` for `token_weighted`, `negative` for `unlikelihood`, `old_log_prob` and
    `advantages` for `policy_gradient`. The batch also gets `shift_labels`, so that the Trainer's count is right; the
    model's forward must accept them (`**kwargs`).

    Args:
        collator: any data collator that returns `labels` and pads the sequences of a batch on one side. It does not
            receive the extra columns. An extra that the collator itself returns is moved into the dict.
        names: the extra columns. Each holds one number per sample, or one or several (`teacher_ids`) per label.
        shift: 1 for causal models, 0 for all others; required for labels `(B, S)`.

    Returns:
        A picklable collator. Extras are `(B,)` or `(B, S, ...)`, 0 where labels are padding; float32, or int64 for
        integers and bool.

    Raises:
        TypeError: `names` are not strings; in the call: an extra does not hold numbers.
        ValueError: `shift` is not an integer >= 0; in the call: an extra is missing or does not fit the labels, `shift`
            is missing, or the collator does not pad.
        ImportError: in the call: transformers is older than 5.10, whose Trainer does not count a dict of labels.

    Example:
        >>> collate = with_extras(lambda rows: {"labels": torch.tensor([row["labels"] for row in rows])},
        ...                       ["token_weights"], shift=1)
        >>> batch = collate([{"labels": [4, 5], "token_weights": [0.0, 0.5]}])
        >>> batch["labels"]["token_weights"], batch["shift_labels"]
        (tensor([[0.0000, 0.5000]]), tensor([[   5, -100]]))
    """
    if shift is not None:
        check_shift(shift)
    return WithExtras(collator, strings(names, "names"), shift)


def count_sequences(collator: Collator, *, shift: int) -> Changed:
    """Make the Trainer count sequences, for losses with `normalize="sequences"`, the mean of the means of sequences.

    `labels` becomes a dict with a marker, and `shift_labels` holds one 0 for each sequence that has a label that is
    predicted. A row of a batch is one sequence, or several if its `position_ids` restart.

    Args:
        collator: any data collator that returns integer labels `(B, S)`, in a dict or not.
        shift: 1 for causal models, 0 for all others.

    Returns:
        A picklable collator.

    Raises:
        ValueError: `shift` is not an integer >= 0; in the call: the labels are not integers `(B, S)`, or `position_ids`
            have another shape.
        ImportError: as for `with_extras`.

    Example:
        >>> collate = count_sequences(lambda rows: {"labels": torch.tensor(rows)}, shift=1)
        >>> collate([[5, 6, 7], [8, -100, -100]])["shift_labels"]
        tensor([[-100,    0, -100],
                [-100, -100, -100]])
    """
    check_shift(shift)
    return Changed(collator, _with_sequence_ids, {"shift": shift})


def _with_sequence_ids(batch: Batch, shift: int) -> Batch:
    ids, extras = split_labels(batch.get("labels"))
    batch_labels({"labels": ids})
    sequences = sequence_starts(batch, ids).cumsum(1) - 1 if "position_ids" in batch else torch.zeros_like(ids)
    first = _first_of(sequences, scored_places(ids, shift))
    return label_dict(batch, {"labels": ids, **extras, MARKERS["sequences"]: sequences}, zero_where(first))


def mask_sequence_starts(collator: Collator) -> Changed:
    """Set the first label of each packed sequence to -100, so that no sequence predicts the start of the next one.

    Args:
        collator: any data collator that returns labels and `position_ids` `(B, S)`, which restart at each sequence.

    Returns:
        A picklable collator.

    Raises:
        ValueError: in the call: the labels are not integers `(B, S)`, or the batch lacks `position_ids` of their shape.

    Example:
        >>> collate = mask_sequence_starts(lambda rows: {name: torch.tensor([rows[0][name]]) for name in rows[0]})
        >>> collate([{"labels": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1]}])["labels"]
        tensor([[-100,    6, -100,    8]])
    """
    return Changed(collator, _starts_masked)


def _starts_masked(batch: Batch) -> Batch:
    labels = batch_labels(batch)
    return {**batch, "labels": labels.masked_fill(sequence_starts(batch, labels), IGNORED)}


def sequence_starts(batch: Batch, labels: Tensor) -> Tensor:
    """Return where a sequence begins, `(B, S)` bool: in the first column, and where the position is not the next one.

    Raises:
        ValueError: the batch lacks position ids of the labels' shape.
    """
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != labels.shape:
        raise ValueError(
            f"the collator must return position_ids of the labels' shape {tuple(labels.shape)}, as "
            f"DataCollatorWithFlattening does, got {describe(positions)}. For one sequence per row use mask_first_label"
        )
    starts = torch.ones_like(labels, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=1) != 1
    return starts


def _first_of(sequences: Tensor, targets: Tensor) -> Tensor:
    """Return the first target of each sequence, `(B, S)` bool; `sequences` are numbered in ascending order per row."""
    seen = sequences.masked_fill(~targets, -1).cummax(1).values
    return targets & (F.pad(seen[:, :-1], (1, 0), value=-1) < sequences)


def label_dict(batch: Batch, labels: dict[str, Tensor], counted: Tensor) -> Batch:
    """Return the batch with a dict of labels, on the device of the ids, and the `shift_labels` that are counted.

    Raises:
        ImportError: the Trainer of the installed transformers does not count `shift_labels`. The loss would get no
            count, and its gradients would be wrong under accumulation or in several processes.
    """
    release = installed_release()
    if release is not None and _major_minor(release) < COUNTED_SINCE:
        needed = ".".join(map(str, COUNTED_SINCE))
        raise ImportError(
            f"labels in a dict (extra columns, sequences, pairs) need transformers {needed} or newer, got {release}, "
            "whose Trainer does not count them. Upgrade transformers, or use plain labels"
        )
    labels = {name: value.to(labels["labels"].device) for name, value in labels.items()}
    return {**batch, "labels": labels, "shift_labels": counted}


def misses_first_labels() -> bool:
    """Return whether the Trainer leaves the first label of each sequence of an encoder-decoder out of its count."""
    release = installed_release()
    return release is not None and COUNTED_SINCE <= _major_minor(release) < DECODERS_COUNTED_SINCE


@functools.cache
def installed_release() -> str | None:
    """Return the installed release of transformers, or None without it: then no Trainer reads these batches."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


def _major_minor(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)[:2]))


def zero_where(marks: Tensor) -> Tensor:
    """Return 0 where `marks` is True and -100 elsewhere, int64: the labels by which the Trainer counts units."""
    return torch.full_like(marks, IGNORED, dtype=torch.int64).masked_fill(marks, 0)


def _shifted(labels: Tensor, shift: int | None) -> Tensor:
    """Return the labels that a logit predicts at the position of that logit, for the Trainer to count."""
    if shift is None and labels.ndim > 1:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} need a shift: pass shift=1 (causal language models) or shift=0 "
            "(masked, token classification, seq2seq), as in with_extras(collator, names, shift=1)"
        )
    return F.pad(labels[..., shift:], (0, shift), value=IGNORED) if shift else labels


def _like_labels(column: Sequence[Any], name: str, rows: Sequence[Any], batch: Batch) -> Tensor:
    """Return an extra column as one tensor: `(B,)`, or `(B, S, ...)` with each value at the position of its label."""
    values = [extra_numbers(value, name) for value in column]
    shapes = {value.shape[1:] if value.ndim else None for value in values}
    if shapes == {None}:
        return _gatherable(torch.stack(values))
    ids, _ = split_labels(batch.get("labels"))
    if len(shapes) != 1 or ids.ndim != 2:
        raise ValueError(f"the extra '{name}' must have one number per sample or one per label, got {values[0]}")
    packed = ids.shape[0] == 1 < len(values)
    ends = _ends(values, rows, batch, ids, packed)
    if ends is None:
        raise ValueError(
            f"the extra '{name}' cannot be aligned with the labels: it needs one value per label, and the collator "
            "must pad whole sequences on one side or pack them one after the other. Or let the collator return it"
        )
    placed = torch.zeros(*ids.shape, *values[0].shape[1:], dtype=values[0].dtype, device="cpu")
    for row, value, end in zip(placed, [torch.cat(values)] if packed else values, ends, strict=True):
        row[end - len(value) : end] = value
    return _gatherable(placed)


def extra_numbers(value: Any, name: str) -> Tensor:
    """Return the value of an extra column for one sample as a tensor.

    Raises:
        TypeError: the value is not a number or an array of numbers.
    """
    found = as_numbers(value)
    if found is None:
        raise TypeError(f"the extra '{name}' must be numbers, got a {type(value).__name__}, {value!r:.80}")
    return found


def _ends(values: Sequence[Tensor], rows: Sequence[Any], batch: Batch, ids: Tensor, packed: bool) -> list[int] | None:
    """Return the position in the batch at which each sequence ends, or None if it is not found.

    It is found by the labels, or by the inputs if the labels are made by the collator.
    """
    for key, padded in (("labels", ids), ("input_ids", batch.get("input_ids"))):
        if not isinstance(padded, Tensor) or padded.shape != ids.shape or not all(key in row for row in rows):
            continue
        found = [extra_numbers(row[key], key) for row in rows]
        if [value.shape[:1] for value in values] != [sequence.shape for sequence in found]:
            continue
        sequences = [torch.cat(found)] if packed else found
        for ends in ([len(sequence) for sequence in sequences], [padded.shape[1]] * len(sequences)):
            if all(_ends_at(*each, key) for each in zip(sequences, padded.cpu(), ends, strict=True)):
                return ends
    return None


def _ends_at(sequence: Tensor, padded: Tensor, end: int, key: str) -> bool:
    """Return whether a sequence is in its padded form just before `end`; a wrapper may have ignored some labels."""
    here = padded[max(0, end - len(sequence)) : end]
    if here.shape != sequence.shape:
        return False
    if key == "input_ids":
        return bool((here == sequence).all())
    outside = int((padded != IGNORED).sum()) - int((here != IGNORED).sum())
    return outside == 0 and bool(((here == sequence) | (here == IGNORED)).all())


def _gatherable(values: Tensor) -> Tensor:
    """Return the values as float32 or int64, which keep their dtype when the Trainer pads them with -100.

    bool and uint8 would change their dtype on the ranks that are padded, and a gather of two dtypes fails.
    """
    return values.float() if values.is_floating_point() else values.long()
