"""The tasks a loss or reducer can be made for: how their batches look, and what may be done to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.checks import IGNORED

Extra = Callable[[Tensor], Tensor]

# Ragged rows, prompts, holes; first labels that no logit of a causal model predicts; both ends of the class ids.
_ROWS = ("11111111", "00111000", "11010000", "01100000")
_SCORED = torch.tensor([[place == "1" for place in row] for row in _ROWS])
_SAMPLES, _COLUMNS = 4, 4  # what the rules take rows and columns from


@dataclass(frozen=True)
class Batch:
    """What reaches a loss or reducer in one call.

    Attributes:
        logits: `(B, S, C)`, `(B, C)`, or what another task makes.
        labels: `(B, S)`, `(B,)`, `(B, C)`, or what another task makes.
        extras: tensors by name that travel in a dict of labels, `(B, S, ...)` or `(B,)`.
    """

    logits: Tensor
    labels: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def targets(self) -> Tensor | dict[str, Tensor]:
        """The labels as the Trainer hands them over: in a dict where extras come along."""
        labels = self.labels.clone()
        return (
            {"labels": labels, **{name: extra.clone() for name, extra in self.extras.items()}}
            if self.extras
            else labels
        )

    def rows(self, index: Sequence[int]) -> Batch:
        """Those rows, in that order."""
        rows = torch.tensor(index)
        extras = {name: extra[rows] for name, extra in self.extras.items()}
        return Batch(self.logits[rows], self.labels[rows], extras)

    def only(self, *positions: tuple[int, ...]) -> Batch:
        """The batch with these labels, all others ignored."""
        labels = torch.full_like(self.labels, IGNORED)
        for position in positions:
            labels[position] = self.labels[position]
        return replace(self, labels=labels)


def outputs(logits: Any) -> Any:
    """What a model returns in the Trainer: logits by name, by attribute and by place."""
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(logits=logits)


@dataclass(frozen=True)
class Task:
    """What a loss or reducer is for: how its batches look, and what the rules may do to one.

    Attributes:
        name: what it is called.
        make: `(generator, classes) -> (logits, labels)`, of four samples, which stand first: logits `(4, ..., classes)`
            in float64, labels `(4, ...)`, -100 where there is none.
        values: the labels there can be, of a number of classes.
        sequence: whether labels are tokens, `(B, S, ...)`, four or more, each with logits at its own place,
            `(B, S, ..., classes)`: more of them may be padding.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        whole: whether a sequence is one item, if it has a label in each of its rows `(B, S, rows)`; else each token is.
        output: what the model returns to a loss, made of the logits by differentiable functions; a reducer is given the
            logits.

    Example:
        >>> from lossfns.testing import loss_rules
        >>> def starts_and_ends(generator, places):
        ...     labels = torch.tensor([[1, 2], [0, 0], [-100, 3], [2, 5]])
        ...     return torch.randn(4, 2, places, generator=generator, dtype=torch.float64), labels
        >>> task = Task("spans", starts_and_ends, output=lambda logits: logits.unbind(1))
        >>> rules = loss_rules(task)
    """

    name: str
    make: Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
    values: Callable[[int], Sequence[float]] = range
    sequence: bool = False
    shift: int = 0
    whole: bool = False
    output: Callable[[Tensor], Any] = outputs

    def batch(self, classes: int, extras: Mapping[str, Extra] | None = None, seed: int = 0) -> Batch:
        """A batch of four rows of this task: ragged, with prompts and holes, where it has sequences."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            logits, labels = self.make(torch.Generator().manual_seed(seed), classes)
            return Batch(logits, labels, {name: extra(labels) for name, extra in (extras or {}).items()})

    def check(self, classes: int) -> None:
        """Raise ValueError where the rules can do nothing with what `make` makes."""
        least = 2 if self.sequence else 1
        if classes < least:
            raise ValueError(f"the task {self.name!r} has {least} classes at least; {classes} came")
        batch = self.batch(classes)
        logits, labels = batch.logits, batch.labels
        wrong = len(logits) != _SAMPLES or len(labels) != _SAMPLES or logits.dtype != torch.float64
        if self.sequence and not wrong:
            beside = labels.ndim > 1 and logits.shape == (*labels.shape, classes)
            wrong = not beside or labels.shape[1] < _COLUMNS or len(self.positions(labels)) < _COLUMNS
        if wrong:
            needs = f", {_COLUMNS} labels at least, and logits (*labels.shape, {classes})" if self.sequence else ""
            raise ValueError(
                f"the task {self.name!r} makes {logits.dtype} logits {tuple(logits.shape)} and labels "
                f"{tuple(labels.shape)}; the rules need {_SAMPLES} samples, torch.float64{needs}"
            )

    @property
    def by_token(self) -> bool:
        """Is each token an item?"""
        return self.sequence and not self.whole

    def scored(self, labels: Tensor) -> Tensor:
        """Which labels count: those that are not -100, and that a logit predicts."""
        scored = labels != IGNORED
        if self.shift:
            scored[:, : self.shift] = False
        return scored

    def items(self, labels: Tensor) -> int:
        """What the Trainer counts of these labels."""
        scored = self.scored(labels)
        return int((scored.any(1).reshape(len(labels), -1).all(1) if self.whole else scored).sum())

    def positions(self, labels: Tensor) -> list[tuple[int, ...]]:
        """Where the labels are that count."""
        return [tuple(position) for position in self.scored(labels).nonzero().tolist()]

    def pairs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The logits `(n, ...)` that predict a label, and those labels `(n,)`."""
        logits = batch.logits[:, : batch.logits.shape[1] - self.shift] if self.shift else batch.logits
        labels = batch.labels[:, self.shift :] if self.shift else batch.labels
        return logits[labels != IGNORED], labels[labels != IGNORED]

    def unread(self, batch: Batch) -> Tensor:
        """Index of logits that have nothing to do with any label, whatever a wrong shift would pair."""
        ignored = batch.labels == IGNORED
        if not self.sequence:  # by sample, where labels have no logits of their own
            own = batch.logits.shape[: ignored.ndim] == ignored.shape
            return ignored if own else ignored.reshape(len(ignored), -1).all(1)
        columns = (~ignored).double().reshape(*ignored.shape[:2], -1).transpose(1, 2)
        near = F.max_pool1d(columns, 2 * self.shift + 3, 1, self.shift + 1).transpose(1, 2).reshape(ignored.shape) > 0
        near[:, -1] = True  # a shift after flattening pairs it with the next row
        return ~near

    def trimmed(self, batch: Batch) -> Batch:
        """The batch without the columns on the right in which no row has a label: as a collator would have made it."""
        if not self.sequence:
            return batch
        used = (batch.labels != IGNORED).transpose(0, 1).flatten(1).any(1).nonzero()
        width = int(used.max()) + 1 if len(used) else 1
        extras = {name: extra[:, :width] if extra.ndim > 1 else extra for name, extra in batch.extras.items()}
        return Batch(batch.logits[:, :width], batch.labels[:, :width], extras)

    def padded(self, batch: Batch, left: int, right: int) -> Batch:
        """The batch with more columns, as a longer row beside it would have made."""
        noise = torch.Generator().manual_seed(1)
        rows, _, *behind = batch.logits.shape
        columns = [
            torch.randn(rows, width, *behind, generator=noise, dtype=torch.float64) * 9 for width in (left, right)
        ]
        extras = {name: widen(extra, left, right) if extra.ndim > 1 else extra for name, extra in batch.extras.items()}
        return Batch(torch.cat([columns[0], batch.logits, columns[1]], 1), widen(batch.labels, left, right), extras)


def widen(tensor: Tensor, left: int, right: int, value: float = IGNORED) -> Tensor:
    """A tensor `(B, S, ...)` with more columns of one value."""
    return F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (left, right), value=value)


def _tokens(generator: torch.Generator, classes: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(classes, _SCORED.shape, generator=generator)
    labels[0, 1:3] = torch.tensor([0, classes - 1])
    logits = torch.randn(*_SCORED.shape, classes, generator=generator, dtype=torch.float64)
    return logits, labels.masked_fill(~_SCORED, IGNORED)


def _classes(generator: torch.Generator, classes: int) -> tuple[Tensor, Tensor]:
    labels = torch.tensor([0, classes - 1, classes // 2, 0])
    return torch.randn(4, classes, generator=generator, dtype=torch.float64), labels


def _several(generator: torch.Generator, classes: int) -> tuple[Tensor, Tensor]:
    logits = torch.randn(4, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(2, (4, classes), generator=generator).double()
    labels[1, 1:2] = IGNORED  # one of several may be missing
    return logits, labels


def _number(generator: torch.Generator, classes: int) -> tuple[Tensor, Tensor]:
    predictions, labels = torch.randn(2, 4, 1, generator=generator, dtype=torch.float64)
    return predictions, labels[:, 0]


def _either(classes: int) -> Sequence[float]:
    return (0.0, 1.0)


def _any_number(classes: int) -> Sequence[float]:
    return (-1.5, 0.0, 2.0)


TASKS = {
    task.name: task
    for task in (
        Task("causal_lm", _tokens, range, sequence=True, shift=1),
        Task("masked_lm", _tokens, range, sequence=True),
        Task("seq2seq_lm", _tokens, range, sequence=True),
        Task("token_classification", _tokens, range, sequence=True),
        Task("classification", _classes, range),
        Task("multi_label", _several, _either),
        Task("regression", _number, _any_number),
    )
}


def find_task(task: str | Task) -> Task:
    """The task of that name.

    Raises:
        ValueError: there is none.
    """
    if isinstance(task, Task):
        return task
    if task not in TASKS:
        raise ValueError(f"there is no task {task!r}; the tasks are {', '.join(TASKS)}")
    return TASKS[task]
