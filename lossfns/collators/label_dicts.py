"""Collator wrappers that make a dict of labels, and the `shift_labels` that the Trainer then counts.

The Trainer cannot count in a dict. It counts what is not -100 in the batch's `shift_labels` if they are there (since
transformers 5.10), whatever they are: the labels of a loss, or one 0 for each unit that it divides by.
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
from .._core.checks import IGNORED, MARKERS, as_numbers, check_shift, strings
from .wrapper import Batch, Collator, Wrapper, batch_labels, collated

COUNTED_SINCE = (5, 10)
# From then on the Trainer counts `labels[..., 1:]` of encoder-decoders too, of which the first label is predicted.
DECODERS_COUNTED_SINCE = (5, 15)


@dataclass(frozen=True)
class WithExtras(Wrapper):
    """See `with_extras`."""

    names: tuple[str, ...]
    shift: int | None

    def __call__(self, features: list[Any]) -> Batch:
        everywhere = [name for name in self.names if all(name in row for row in features)]
        columns = {name: [row[name] for row in features] for name in everywhere}
        rest = [{name: value for name, value in row.items() if name not in columns} for row in features]
        batch = collated(self.collator, rest)
        made = {name: _safe(batch[name]) for name in self.names if name in batch}
        missing = sorted({*self.names} - {*columns, *made})
        if missing:
            close = difflib.get_close_matches(missing[0], features[0], n=1)
            hint = f"did you mean {close[0]!r}? Extras" if close else "extras"
            raise ValueError(
                f"no {missing} among the columns {sorted(features[0])}: {hint} are columns of the dataset, and stay so "
                "only with TrainingArguments(remove_unused_columns=False)"
            )
        extras = made | {name: _like_labels(column, name, rest, batch) for name, column in columns.items()}
        ids, before = split_labels(batch.get("labels"))
        batch = {name: value for name, value in batch.items() if name not in made}
        counted = batch["shift_labels"] if "shift_labels" in batch else _shifted(ids, self.shift)
        return label_dict(batch, {"labels": ids, **before, **extras}, counted)


def with_extras(collator: Collator, names: Iterable[str], *, shift: int | None = None) -> WithExtras:
    """Hand columns of the dataset to the loss: `labels` becomes the dict `{"labels": ids, name: tensor, ...}`.

    A term finds them by name: `token_weights` for `token_weighted`, `negative` for `unlikelihood`, `old_log_prob` and
    `advantages` for `policy_gradient`. `shift_labels` stands beside the dict, so that the Trainer's count is right; the
    model's forward has to take it (`**kwargs`).

    Args:
        collator: any data collator that returns `labels` and pads the rows of a batch on one side; it does not see the
            extra columns. An extra that the collator itself returns is moved into the dict.
        names: the extra columns: a number a row, or one or several (`teacher_ids`) for each of the row's labels.
        shift: 1 for causal models, 0 for all others; no default for labels `(B, S)`.

    Returns:
        A picklable collator. Extras are `(B,)` or `(B, S, ...)`, 0 where labels are padding; float32, or int64 for
        integers and bool.

    Raises:
        TypeError: names are not strings; in the call: an extra is no number.
        ValueError: `shift` is no number of places; in the call: an extra is missing or does not fit the labels, no
            shift, or the collator does not pad.
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


@dataclass(frozen=True)
class CountSequences(Wrapper):
    """See `count_sequences`."""

    shift: int

    def __call__(self, features: list[Any]) -> Batch:
        batch = collated(self.collator, features)
        ids, extras = split_labels(batch.get("labels"))
        batch_labels({"labels": ids})
        sequences = sequence_starts(batch, ids).cumsum(1) - 1 if "position_ids" in batch else torch.zeros_like(ids)
        first = _first_of(sequences, scored_places(ids, self.shift))
        return label_dict(batch, {"labels": ids, **extras, MARKERS["sequences"]: sequences}, zero_where(first))


def count_sequences(collator: Collator, *, shift: int) -> CountSequences:
    """Let the Trainer count sequences, for losses with `normalize="sequences"`: the mean over sequences of their means.

    `labels` becomes a dict with a marker, and `shift_labels` holds one 0 for each sequence that has a target. A row is
    one sequence, or several where `position_ids` restart.

    Args:
        collator: any data collator that returns integer labels `(B, S)`, in a dict or not.
        shift: 1 for causal models, 0 for all others.

    Returns:
        A picklable collator.

    Raises:
        ValueError: `shift` is no number of places; in the call: the labels are not integers `(B, S)`, or `position_ids`
            are of another shape.
        ImportError: as for `with_extras`.

    Example:
        >>> collate = count_sequences(lambda rows: {"labels": torch.tensor(rows)}, shift=1)
        >>> collate([[5, 6, 7], [8, -100, -100]])["shift_labels"]
        tensor([[-100,    0, -100],
                [-100, -100, -100]])
    """
    check_shift(shift)
    return CountSequences(collator, shift)


@dataclass(frozen=True)
class MaskSequenceStarts(Wrapper):
    """See `mask_sequence_starts`."""

    def __call__(self, features: list[Any]) -> Batch:
        batch = collated(self.collator, features)
        labels = batch_labels(batch)
        return {**batch, "labels": labels.masked_fill(sequence_starts(batch, labels), IGNORED)}


def mask_sequence_starts(collator: Collator) -> MaskSequenceStarts:
    """Set the first label of every packed sequence to -100, so that no sequence predicts the next one.

    Args:
        collator: any data collator that returns labels and `position_ids` `(B, S)`, which restart with each sequence.

    Returns:
        A picklable collator.

    Raises:
        ValueError: in the call: the labels are not integers `(B, S)`, or have no `position_ids` of their shape.

    Example:
        >>> collate = mask_sequence_starts(lambda rows: {name: torch.tensor([rows[0][name]]) for name in rows[0]})
        >>> collate([{"labels": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1]}])["labels"]
        tensor([[-100,    6, -100,    8]])
    """
    return MaskSequenceStarts(collator)


def sequence_starts(batch: Batch, labels: Tensor) -> Tensor:
    """Where a sequence begins, `(B, S)` bool: in the first column, and where the position does not follow the last one.

    Raises:
        ValueError: the batch has no position ids of the labels' shape.
    """
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != labels.shape:
        given = f"shape {tuple(positions.shape)}" if isinstance(positions, Tensor) else type(positions).__name__
        raise ValueError(
            f"packed sequences are told apart by position_ids of the labels' shape {tuple(labels.shape)}, but the "
            f"collator returns {given}; DataCollatorWithFlattening makes them. Rows of one sequence: mask_first_label"
        )
    starts = torch.ones_like(labels, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=1) != 1
    return starts


def _first_of(sequences: Tensor, targets: Tensor) -> Tensor:
    """The first target of every sequence of a row, `(B, S)` bool; `sequences` count up within a row."""
    seen = sequences.masked_fill(~targets, -1).cummax(1).values
    return targets & (F.pad(seen[:, :-1], (1, 0), value=-1) < sequences)


def label_dict(batch: Batch, labels: dict[str, Tensor], counted: Tensor) -> Batch:
    """The batch with a dict of labels, all where the ids are, and what the Trainer is to count beside it.

    Raises:
        ImportError: the Trainer that is installed would not count it.
    """
    _refuse_older_trainers()
    labels = {name: value.to(labels["labels"].device) for name, value in labels.items()}
    return {**batch, "labels": labels, "shift_labels": counted}


def _refuse_older_trainers() -> None:
    """Up to 5.9 the loss of a dict gets no count: under accumulation or in several processes gradients are wrong."""
    release = installed_release()
    if release is not None and _numbers(release) < COUNTED_SINCE:
        needed = ".".join(map(str, COUNTED_SINCE))
        raise ImportError(
            f"labels in a dict (extra columns, sequences, pairs) need transformers {needed} or newer, and {release} is "
            "installed: its Trainer does not count them, and the loss cannot. Upgrade it, or use plain labels"
        )


def misses_first_labels() -> bool:
    """Does the Trainer leave the first label of every row of an encoder-decoder out of its count?"""
    release = installed_release()
    return release is not None and COUNTED_SINCE <= _numbers(release) < DECODERS_COUNTED_SINCE


@functools.cache
def installed_release() -> str | None:
    """The release of transformers; None without it, when a Trainer is not what reads these batches."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)[:2]))


def zero_where(marks: Tensor) -> Tensor:
    """One 0 for each unit, -100 elsewhere, int64."""
    return torch.full_like(marks, IGNORED, dtype=torch.int64).masked_fill(marks, 0)


def _shifted(labels: Tensor, shift: int | None) -> Tensor:
    """What the Trainer counts: the labels that a logit predicts, at the place of that logit."""
    if shift is None and labels.ndim > 1:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} need a shift: say shift=1 (causal language models) or shift=0 "
            "(masked, token classification, seq2seq), as in with_extras(collator, names, shift=1)"
        )
    return F.pad(labels[..., shift:], (0, shift), value=IGNORED) if shift else labels


def _like_labels(column: Sequence[Any], name: str, rows: Sequence[Any], batch: Batch) -> Tensor:
    """An extra column as one tensor: `(B,)`, or `(B, S, ...)` with each value at the place of its label."""
    values = [extra_numbers(value, name) for value in column]
    shapes = {value.shape[1:] if value.ndim else None for value in values}
    if shapes == {None}:
        return _safe(torch.stack(values))
    ids, _ = split_labels(batch.get("labels"))
    if len(shapes) != 1 or ids.ndim != 2:
        raise ValueError(f"the extra '{name}' must be one number a row or one for each label of a row, got {values[0]}")
    packed = ids.shape[0] == 1 < len(values)
    ends = _ends(values, rows, batch, ids, packed)
    if ends is None:
        raise ValueError(
            f"the extra '{name}' cannot follow its labels: the collator must keep rows whole and pad them on one side, "
            "or pack them one after the other, and a row needs as many values as labels. Or let the collator return it"
        )
    placed = torch.zeros(*ids.shape, *values[0].shape[1:], dtype=values[0].dtype, device="cpu")
    for row, value, end in zip(placed, [torch.cat(values)] if packed else values, ends, strict=True):
        row[end - len(value) : end] = value
    return _safe(placed)


def extra_numbers(value: Any, name: str) -> Tensor:
    """One row's value of an extra column as a tensor.

    Raises:
        TypeError: it is no number, nor an array of them.
    """
    found = as_numbers(value)
    if found is None:
        raise TypeError(f"the extra '{name}' must be numbers, got a {type(value).__name__}, {value!r:.80}")
    return found


def _ends(values: Sequence[Tensor], rows: Sequence[Any], batch: Batch, ids: Tensor, packed: bool) -> list[int] | None:
    """Where each row ends in the batch, found by its labels, or by its inputs where the collator makes the labels."""
    for key, padded in (("labels", ids), ("input_ids", batch.get("input_ids"))):
        if not isinstance(padded, Tensor) or padded.shape != ids.shape or not all(key in row for row in rows):
            continue
        own = [extra_numbers(row[key], key) for row in rows]
        if [value.shape[:1] for value in values] != [row.shape for row in own]:
            continue
        own = [torch.cat(own)] if packed else own
        for ends in ([len(row) for row in own], [padded.shape[1]] * len(own)):
            if all(_stands(row, place, end, key) for row, place, end in zip(own, padded.cpu(), ends, strict=True)):
                return ends
    return None


def _stands(own: Tensor, padded: Tensor, end: int, key: str) -> bool:
    """Does a row stand in its padded form, up to `end`? Another wrapper may have ignored some of its labels."""
    here = padded[max(0, end - len(own)) : end]
    if here.shape != own.shape:
        return False
    if key == "input_ids":
        return bool((here == own).all())
    outside = int((padded != IGNORED).sum()) - int((here != IGNORED).sum())
    return outside == 0 and bool(((here == own) | (here == IGNORED)).all())


def _safe(values: Tensor) -> Tensor:
    """float32 or int64: bool and uint8 become another dtype on the one rank whose rows the Trainer pads with -100."""
    return values.float() if values.is_floating_point() else values.long()
