"""The tasks a loss or reducer can be made for: how their batches look, and what may be done to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..alignment import IGNORED

Extra = Callable[[Tensor], Tensor]

# Ragged rows, prompts, holes; first labels that no logit of a causal model predicts; both ends of the class ids.
_ROWS = ("11111111", "00111000", "11010000", "01100000")
_SCORED = torch.tensor([[place == "1" for place in row] for row in _ROWS])


@dataclass(frozen=True)
class Batch:
    """What reaches a loss or reducer in one call.

    Attributes:
        logits: `(B, S, C)`, or `(B, C)`.
        labels: `(B, S)`, `(B,)` or `(B, C)`.
        extras: tensors by name that travel in a dict of labels, `(B, S)` or `(B,)`.
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


@dataclass(frozen=True)
class Task:
    """What a loss or reducer is for.

    Attributes:
        name: as the user writes it.
        make: `(labels' generator, classes) -> (logits, labels)`, float64 logits.
        values: the labels there can be, of a number of classes.
        sequence: whether labels are `(B, S)` tokens.
        shift: the label at `i` is predicted by the logit at `i - shift`.
    """

    name: str
    make: Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
    values: Callable[[int], Sequence[float]]
    sequence: bool = False
    shift: int = 0

    def batch(self, classes: int, extras: Mapping[str, Extra] | None = None, seed: int = 0) -> Batch:
        """A batch of four rows of this task: ragged, with prompts and holes, where it has sequences."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            logits, labels = self.make(torch.Generator().manual_seed(seed), classes)
            return Batch(logits, labels, {name: extra(labels) for name, extra in (extras or {}).items()})

    def items(self, labels: Tensor) -> int:
        """What the Trainer counts of these labels: those that are not -100, and that a logit predicts."""
        return int((labels[..., self.shift :] != IGNORED).sum())

    def positions(self, labels: Tensor) -> list[tuple[int, ...]]:
        """Where the labels are that count."""
        scored = labels != IGNORED
        if self.shift:
            scored[:, : self.shift] = False
        return [tuple(position) for position in scored.nonzero().tolist()]

    def pairs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The logits `(n, ...)` that predict a label, and those labels `(n,)`."""
        logits = batch.logits[:, : batch.logits.shape[1] - self.shift] if self.shift else batch.logits
        labels = batch.labels[..., self.shift :]
        return logits[labels != IGNORED], labels[labels != IGNORED]

    def trimmed(self, batch: Batch) -> Batch:
        """The batch without the columns on the right in which no row has a label: as a collator would have made it."""
        if not self.sequence:
            return batch
        used = (batch.labels != IGNORED).any(0).nonzero()
        width = int(used.max()) + 1 if len(used) else 1
        extras = {name: extra[:, :width] if extra.ndim > 1 else extra for name, extra in batch.extras.items()}
        return Batch(batch.logits[:, :width], batch.labels[:, :width], extras)

    def padded(self, batch: Batch, left: int, right: int) -> Batch:
        """The batch with more columns, as a longer row beside it would have made."""
        noise = torch.Generator().manual_seed(1)
        rows, _, classes = batch.logits.shape
        columns = [
            torch.randn(rows, width, classes, generator=noise, dtype=torch.float64) * 9 for width in (left, right)
        ]
        extras = {name: _pad(extra, left, right) if extra.ndim > 1 else extra for name, extra in batch.extras.items()}
        return Batch(torch.cat([columns[0], batch.logits, columns[1]], 1), _pad(batch.labels, left, right), extras)


def _pad(tensor: Tensor, left: int, right: int) -> Tensor:
    return F.pad(tensor, (left, right), value=IGNORED)


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
    return logits, torch.randint(2, (4, classes), generator=generator).double()


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


def outputs(logits: Any) -> Any:
    """What a model returns in the Trainer: logits by name, by attribute and by place."""
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(logits=logits)
