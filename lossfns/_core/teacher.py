"""What a student's logits are compared with: a teacher's logits, its hidden states and head, or its best tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .alignment import select_logits
from .checks import check_logits
from .head import head_logits
from .head_products import Head
from .hidden import HiddenStates
from .normalization import accumulator_dtype
from .rows import Rows, compute_dtype, read, rows_per_chunk
from .soft_labels import SUM_TOLERANCE

Divergence = Callable[[Tensor, Tensor], Tensor]
PREFIX = "teacher_"  # of the teacher's inputs in a dict of labels
LOGITS, IDS, LOG_PROBS = "teacher_logits", "teacher_ids", "teacher_log_probs"
# Rows of a teacher's head computed together, in chunks of the kernel: few products with the vocabulary, little memory.
_CHUNKS_AT_ONCE = 10


@dataclass(frozen=True)
class Comparison:
    """How far logits are from the teacher's: see `Rows.comparison`.

    Attributes:
        divergence: a function of log-probabilities of student and teacher, `(r, C)` each.
        temperature: what logits are divided by.
        teacher: what pairs rows of the student with the teacher's.
    """

    divergence: Divergence
    temperature: float
    teacher: LogitsTeacher | HiddenTeacher | TopTeacher

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        return self._values(*self.teacher.pair(x / self.temperature, rows, self.temperature)) * self.temperature**2

    @torch.no_grad()
    def check(self, like: Tensor) -> None:
        """Try the divergence on a made-up token, so that it raises before a logit is read or overwritten."""
        classes = self.teacher.compared(like.shape[-1])
        even = torch.full((1, classes), -math.log(classes), dtype=compute_dtype(like.dtype), device=like.device)
        self._values(even, even)

    def _values(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        values = self.divergence(log_p, log_q)
        if not isinstance(values, Tensor) or values.shape != log_p.shape[:1]:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(
                f"the divergence returned {shape} for {len(log_p)} tokens; it sums over the classes, the last "
                "dimension, and returns one value a token"
            )
        return values


@dataclass(frozen=True)
class LogitsTeacher:
    """Logits `(B, L, V)`; the last ones of `length` student positions are beside each other."""

    logits: Tensor
    length: int

    def compared(self, classes: int) -> int:
        """Over how many classes a student of `classes` is compared."""
        return min(classes, self.logits.shape[-1])

    def pair(self, x: Tensor, rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities of student and teacher over the classes that both have."""
        theirs = beside(rows, self.length, self.logits.shape[1])
        room = x.new_empty(len(rows), self.logits.shape[-1])
        return _over_common(x, read(self.logits, theirs, room), temperature)


class HiddenTeacher:
    """Logits `head(hidden)` that never exist together: made for some chunks of rows, and again when others are asked.

    Args:
        hidden: `(B, L, H)`.
        head: the teacher's head.
        length: positions of the student.
        rows: all rows of the student that will be asked for, in order.
    """

    def __init__(self, hidden: Tensor, head: Head, length: int, rows: Rows) -> None:
        self._hidden, self._head = hidden, head
        self._rows = beside(rows, length, hidden.shape[1])
        self._index = rows.index
        dtype = compute_dtype(hidden.dtype)
        self._step = _CHUNKS_AT_ONCE * rows_per_chunk(head.classes, dtype, hidden.device)
        self._start, self._logits = 0, hidden.new_empty(0, head.classes)

    def compared(self, classes: int) -> int:
        """Over how many classes a student of `classes` is compared."""
        return min(classes, self._head.classes)

    def pair(self, x: Tensor, rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities of student and teacher over the classes that both have."""
        place = int(torch.searchsorted(self._index, rows.index[0]))
        if place < self._start or place + len(rows) > self._start + len(self._logits):
            end = place + max(self._step, len(rows))
            some = Rows(self._rows.index[place:end], self._rows.on_device[place:end], None)
            self._start, self._logits = place, head_logits(self._hidden, self._head, some)
        first = place - self._start
        return _over_common(x, self._logits[first : first + len(rows)].to(x.dtype), temperature)


@dataclass(frozen=True)
class TopTeacher:
    """The `k` best ids of every position and their log-probabilities at the temperature, `(B, L, k)` each."""

    ids: Tensor
    log_probs: Tensor
    length: int

    def compared(self, classes: int) -> int:
        """Over how many classes a student of `classes` is compared."""
        return min(classes, self.ids.shape[-1] + 1)

    def pair(self, x: Tensor, rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities of student and teacher over the ids and, as one more class, over all others together."""
        theirs = beside(rows, self.length, self.ids.shape[1]).on_device
        ids = self.ids.flatten(0, 1)[theirs].long()
        log_q = self.log_probs.flatten(0, 1)[theirs].to(x.dtype)
        log_p = x.log_softmax(-1)
        own = log_p.gather(1, ids)
        if ids.shape[-1] == x.shape[-1]:
            return own, log_q
        others = log_p.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        # What is left is known as well as 1 is; without that much a student could not have any.
        left = (1 - log_q.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(x.dtype).eps)
        return torch.cat([own, others], 1), torch.cat([log_q, left.log()], 1)


def beside(rows: Rows, length: int, other: int) -> Rows:
    """The same rows where `other` instead of `length` positions a sample are there, right-aligned."""
    if other == length:
        return rows
    index, on_device = (
        tensor.div(length, rounding_mode="floor") * other + tensor % length + other - length
        for tensor in (rows.index, rows.on_device)
    )
    return Rows(index, on_device, None)


def _over_common(x: Tensor, other: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    width = min(x.shape[-1], other.shape[-1])
    return x[:, :width].log_softmax(-1), (other[:, :width] / temperature).log_softmax(-1)


def open_teacher(
    extras: Mapping[str, Tensor], teacher: nn.Module | HiddenStates | None, like: Tensor, rows: Rows
) -> LogitsTeacher | HiddenTeacher | TopTeacher:
    """The teacher a batch has: in the dict of labels, or a model to be run on inputs that are in it.

    Args:
        extras: what the dict of labels holds beside the labels.
        teacher: the model, or what keeps its hidden states.
        like: a tensor of the shape of the student's logits, `(B, L, V)`.
        rows: the scored rows of the student.

    Raises:
        ValueError: there is none, or more than one, or it does not fit the student.
    """
    found = [
        name for name, there in (("teacher=", teacher is not None), *((n, n in extras) for n in (LOGITS, IDS))) if there
    ]
    if len(found) != 1:
        raise ValueError(
            f"distillation needs one teacher, but {' and '.join(found) or 'none'} came. Put '{LOGITS}' (B, L, V) or "
            f"'{IDS}' and '{LOG_PROBS}' (B, L, k) into the dict of labels (collators.with_extras), or give "
            "teacher=model and wrap the collator in collators.teacher_inputs(collator)"
        )
    if teacher is not None:
        return _run(teacher, extras, like, rows)
    if LOGITS in extras:
        return LogitsTeacher(_fitting(check_logits(extras[LOGITS]), LOGITS, like, rows), like.shape[1])
    return _top(extras, like, rows)


def _top(extras: Mapping[str, Tensor], like: Tensor, rows: Rows) -> TopTeacher:
    ids, log_probs = extras[IDS], extras.get(LOG_PROBS)
    if log_probs is None or log_probs.shape != ids.shape or ids.is_floating_point() or ids.dtype == torch.bool:
        given = "none" if log_probs is None else f"{log_probs.dtype} {tuple(log_probs.shape)}"
        raise ValueError(
            f"'{IDS}' are integers and need '{LOG_PROBS}' of their shape beside them: got {ids.dtype} "
            f"{tuple(ids.shape)} and {given}"
        )
    ids, log_probs = (_fitting(tensor, name, like, rows) for tensor, name in ((ids, IDS), (log_probs, LOG_PROBS)))
    theirs = beside(rows, like.shape[1], ids.shape[1]).on_device
    if len(theirs):
        _check_top(ids.flatten(0, 1)[theirs], log_probs.flatten(0, 1)[theirs], like.shape[-1])
    return TopTeacher(ids, log_probs, like.shape[1])


def _check_top(ids: Tensor, log_probs: Tensor, classes: int) -> None:
    """Raise ValueError unless the rows `(n, k)` are parts of distributions; all is asked of the device at once."""
    ordered = ids.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any()
    mass = log_probs.to(accumulator_dtype(ids.device)).exp().sum(-1).amax()  # NaN if one is
    lowest, highest, repeated, most = torch.stack(
        [value.to(mass.dtype) for value in (*ids.aminmax(), twice, mass)]
    ).tolist()
    if lowest < 0 or highest >= classes:
        raise ValueError(
            f"'{IDS}' go from {lowest:.0f} to {highest:.0f}, and the student has {classes} classes: a teacher of "
            "another vocabulary gives logits, of which those that both have are compared"
        )
    if repeated:
        raise ValueError(f"'{IDS}' name a class twice for one token, whose probability would count twice: drop copies")
    if not most <= 1 + SUM_TOLERANCE:
        raise ValueError(
            f"the probabilities of '{LOG_PROBS}' add up to {most:.6g} for a token: they must be logarithms, at most 0, "
            "of probabilities over all classes, as (logits / temperature).log_softmax(-1).topk(k) gives them"
        )


def _run(
    teacher: nn.Module | HiddenStates, extras: Mapping[str, Tensor], like: Tensor, rows: Rows
) -> LogitsTeacher | HiddenTeacher:
    model = teacher.model if isinstance(teacher, HiddenStates) else teacher
    if not isinstance(model, nn.Module):
        raise TypeError(f"teacher must be a model or its hidden_states(teacher), not {type(model).__name__}")
    inputs = {name.removeprefix(PREFIX): tensor for name, tensor in extras.items() if name.startswith(PREFIX)}
    if not inputs:
        raise ValueError(
            f"the teacher {type(model).__name__} has nothing to read: no '{PREFIX}input_ids' in the dict of labels. "
            "Wrap the collator in lossfns.collators.teacher_inputs(collator)"
        )
    if model.training:
        raise ValueError(f"the teacher {type(model).__name__} is in training mode; call teacher.eval()")
    with torch.no_grad():
        outputs: Any = model(**inputs)
    if isinstance(teacher, HiddenStates):
        hidden, head = teacher.read(outputs, like.shape[0])
        return HiddenTeacher(_fitting(hidden, "the teacher's hidden states", like, rows), head, like.shape[1], rows)
    logits = select_logits(outputs, None)
    return LogitsTeacher(_fitting(logits, "the teacher's logits", like, rows), like.shape[1])


def _fitting(tensor: Tensor, name: str, like: Tensor, rows: Rows) -> Tensor:
    """The tensor `(B, L, ...)` on the student's device, if it has a row for all of the student's that are scored."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} want a gradient, and a teacher gets none here: detach them")
    fits = tensor.ndim == like.ndim == 3 and tensor.shape[0] == like.shape[0]
    first = int((rows.index % like.shape[1]).min()) if fits and len(rows) else 0
    if not fits or like.shape[1] - first > tensor.shape[1] or not tensor.shape[2]:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} do not fit the student's logits {tuple(like.shape)}: expected "
            "(batch, positions, classes or k best), position i beside logit i, not beside label i"
        )
    return tensor.to(like.device)
