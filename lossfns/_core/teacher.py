"""The three forms of a teacher: logits, hidden states with a head, or the ids and log-probabilities of its top k.

Each form returns log-probabilities of student and teacher for a few rows at a time, and `Comparison` applies a
divergence to them.
"""

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
PREFIX = "teacher_"  # prefix of the names of the teacher's inputs in a dict of labels
LOGITS, IDS, LOG_PROBS = "teacher_logits", "teacher_ids", "teacher_log_probs"
# Number of chunks of the kernel whose teacher logits are computed in one product with the vocabulary: a few large
# products are faster than many small ones, and ten chunks still need little memory.
_CHUNKS_PER_PRODUCT = 10


@dataclass(frozen=True)
class Comparison:
    """The divergence of logits from those of a teacher, row by row; see `Rows.comparison`.

    Attributes:
        divergence: a function of the log-probabilities of student and teacher, `(r, C)` each.
        temperature: number by which the logits of both are divided.
        teacher: the teacher in one of its three forms.
    """

    divergence: Divergence
    temperature: float
    teacher: LogitsTeacher | HiddenTeacher | TopTeacher

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        log_p, log_q = self.teacher.log_probs_of_both(x / self.temperature, rows, self.temperature)
        return self._values(log_p, log_q) * self.temperature**2

    @torch.no_grad()
    def check(self, like: Tensor) -> None:
        """Call the divergence once with uniform log-probabilities, so that it raises before logits are overwritten."""
        classes = self.teacher.compared_classes(like.shape[-1])
        uniform = torch.full((1, classes), -math.log(classes), dtype=compute_dtype(like.dtype), device=like.device)
        self._values(uniform, uniform)

    def _values(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        values = self.divergence(log_p, log_q)
        if not isinstance(values, Tensor) or values.shape != log_p.shape[:1]:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(f"the divergence must return one value per token, got {shape} for {len(log_p)} tokens")
        return values


@dataclass(frozen=True)
class LogitsTeacher:
    """A teacher given by its logits.

    Attributes:
        logits: `(B, L', V')`.
        length: number of positions `L` of the student. The last positions of both are aligned.
    """

    logits: Tensor
    length: int

    def compared_classes(self, classes: int) -> int:
        """Return the number of classes over which a student with `classes` classes is compared."""
        return min(classes, self.logits.shape[-1])

    def log_probs_of_both(self, x: Tensor, rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of student and teacher over the classes that both have."""
        teacher_rows = aligned_right(rows, self.length, self.logits.shape[1])
        buffer = x.new_empty(len(rows), self.logits.shape[-1])
        return _over_common_classes(x, read(self.logits, teacher_rows, buffer), temperature)


class HiddenTeacher:
    """A teacher given by its hidden states and head; its logits are computed for some chunks of rows at a time.

    Args:
        hidden: `(B, L', H)`.
        head: the teacher's head.
        length: number of positions `L` of the student. The last positions of both are aligned.
        rows: all rows of the student that will be asked for, in order.
    """

    def __init__(self, hidden: Tensor, head: Head, length: int, rows: Rows) -> None:
        self._hidden, self._head = hidden, head
        self._rows = aligned_right(rows, length, hidden.shape[1])
        self._index = rows.index
        dtype = compute_dtype(hidden.dtype)
        self._step = _CHUNKS_PER_PRODUCT * rows_per_chunk(head.classes, dtype, hidden.device)
        self._start, self._logits = 0, hidden.new_empty(0, head.classes)

    def compared_classes(self, classes: int) -> int:
        """Return the number of classes over which a student with `classes` classes is compared."""
        return min(classes, self._head.classes)

    def log_probs_of_both(self, x: Tensor, rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of student and teacher over the classes that both have."""
        place = int(torch.searchsorted(self._index, rows.index[0]))
        if place < self._start or place + len(rows) > self._start + len(self._logits):
            end = place + max(self._step, len(rows))
            wanted = Rows(self._rows.index[place:end], self._rows.on_device[place:end], None)
            self._start, self._logits = place, head_logits(self._hidden, self._head, wanted)
        first = place - self._start
        return _over_common_classes(x, self._logits[first : first + len(rows)].to(x.dtype), temperature)


@dataclass(frozen=True)
class TopTeacher:
    """A teacher given by its `k` most probable classes.

    Attributes:
        ids: the classes, `(B, L', k)`.
        log_probs: their log-probabilities at the temperature, `(B, L', k)`.
        length: number of positions `L` of the student. The last positions of both are aligned.
    """

    ids: Tensor
    log_probs: Tensor
    length: int

    def compared_classes(self, classes: int) -> int:
        """Return the number of classes over which a student with `classes` classes is compared."""
        return min(classes, self.ids.shape[-1] + 1)

    def log_probs_of_both(self, x: Tensor, rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of student and teacher over the ids and, as one more class, all others."""
        index = aligned_right(rows, self.length, self.ids.shape[1]).on_device
        ids = self.ids.flatten(0, 1)[index].long()
        log_q = self.log_probs.flatten(0, 1)[index].to(x.dtype)
        log_probs = x.log_softmax(-1)
        log_p = log_probs.gather(1, ids)
        if ids.shape[-1] == x.shape[-1]:
            return log_p, log_q
        others = log_probs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        # The remaining probability is known up to the rounding error of 1. It must not be 0, because the student always
        # has some probability there and its divergence would be infinite.
        remaining = (1 - log_q.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(x.dtype).eps)
        return torch.cat([log_p, others], 1), torch.cat([log_q, remaining.log()], 1)


def aligned_right(rows: Rows, length: int, other: int) -> Rows:
    """Return the same rows in a tensor with `other` instead of `length` positions per sample, aligned at the right."""
    if other == length:
        return rows
    index, on_device = (
        tensor.div(length, rounding_mode="floor") * other + tensor % length + other - length
        for tensor in (rows.index, rows.on_device)
    )
    return Rows(index, on_device, None)


def _over_common_classes(x: Tensor, other: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    width = min(x.shape[-1], other.shape[-1])
    return x[:, :width].log_softmax(-1), (other[:, :width] / temperature).log_softmax(-1)


def open_teacher(
    extras: Mapping[str, Tensor], teacher: nn.Module | HiddenStates | None, like: Tensor, rows: Rows
) -> LogitsTeacher | HiddenTeacher | TopTeacher:
    """Return the teacher of a batch: from the dict of labels, or a model that is run on inputs in that dict.

    Args:
        extras: the dict of labels without the labels.
        teacher: the model, or the source of its hidden states.
        like: a tensor of the shape of the student's logits, `(B, L, V)`.
        rows: the scored rows of the student.

    Raises:
        ValueError: there is not exactly one teacher, or it does not fit the student.
    """
    found = ["teacher="] * (teacher is not None) + [name for name in (LOGITS, IDS) if name in extras]
    if len(found) != 1:
        raise ValueError(
            f"distillation needs one teacher, got {' and '.join(found) or 'none'}. Put '{LOGITS}' (B, L, V) or "
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
            f"'{IDS}' must be integers and need '{LOG_PROBS}' of the same shape, got {ids.dtype} {tuple(ids.shape)} "
            f"and {given}"
        )
    ids, log_probs = (_fitting(tensor, name, like, rows) for tensor, name in ((ids, IDS), (log_probs, LOG_PROBS)))
    index = aligned_right(rows, like.shape[1], ids.shape[1]).on_device
    if len(index):
        _check_top(ids.flatten(0, 1)[index], log_probs.flatten(0, 1)[index], like.shape[-1])
    return TopTeacher(ids, log_probs, like.shape[1])


def _check_top(ids: Tensor, log_probs: Tensor, classes: int) -> None:
    """Raise ValueError unless the rows `(n, k)` are parts of distributions; this waits for the device once."""
    ordered = ids.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any()
    mass = log_probs.to(accumulator_dtype(ids.device)).exp().sum(-1).amax()  # NaN if any of them is NaN
    lowest, highest, repeated, most = torch.stack(
        [value.to(mass.dtype) for value in (*ids.aminmax(), twice, mass)]
    ).tolist()
    if lowest < 0 or highest >= classes:
        raise ValueError(
            f"'{IDS}' must be in [0, {classes}), the classes of the student, got {lowest:.0f} to {highest:.0f}; for a "
            f"teacher with another vocabulary pass '{LOGITS}', of which the classes that both have are compared"
        )
    if repeated:
        raise ValueError(f"'{IDS}' must be distinct for each token, got a class twice, which would be counted twice")
    if not most <= 1 + SUM_TOLERANCE:
        raise ValueError(
            f"'{LOG_PROBS}' must be log-probabilities over all classes, as (logits / temperature).log_softmax(-1)"
            f".topk(k) returns them, got probabilities that sum to {most:.6g} for a token"
        )


def _run(
    teacher: nn.Module | HiddenStates, extras: Mapping[str, Tensor], like: Tensor, rows: Rows
) -> LogitsTeacher | HiddenTeacher:
    model = teacher.model if isinstance(teacher, HiddenStates) else teacher
    if not isinstance(model, nn.Module):
        raise TypeError(f"teacher must be a model or its hidden_states(teacher), got {type(model).__name__}")
    inputs = {name.removeprefix(PREFIX): tensor for name, tensor in extras.items() if name.startswith(PREFIX)}
    if not inputs:
        raise ValueError(
            f"the dict of labels has no inputs for the teacher {type(model).__name__}, such as '{PREFIX}input_ids'. "
            "Wrap the collator in lossfns.collators.teacher_inputs(collator)"
        )
    if model.training:
        raise ValueError(f"the teacher {type(model).__name__} must be in eval mode; call teacher.eval()")
    with torch.no_grad():
        outputs: Any = model(**inputs)
    logits = select_logits(outputs, None)
    if isinstance(teacher, HiddenStates):
        hidden, head = teacher.read(logits, like.shape[0])
        return HiddenTeacher(_fitting(hidden, "the teacher's hidden states", like, rows), head, like.shape[1], rows)
    return LogitsTeacher(_fitting(logits, "the teacher's logits", like, rows), like.shape[1])


def _fitting(tensor: Tensor, name: str, like: Tensor, rows: Rows) -> Tensor:
    """Return `(B, L', ...)` on the student's device, or raise ValueError unless it has a row for each scored one."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} must not require a gradient, because none flows into a teacher here: detach them")
    fits = tensor.ndim == like.ndim == 3 and tensor.shape[0] == like.shape[0]
    first = int((rows.index % like.shape[1]).min()) if fits and len(rows) else 0
    if not fits or like.shape[1] - first > tensor.shape[1] or not tensor.shape[2]:
        raise ValueError(
            f"{name} must have shape (batch, positions, classes or k), with position i for logit i (not label i) of "
            f"the student's logits {tuple(like.shape)}, got {tuple(tensor.shape)}"
        )
    return tensor.to(like.device)
