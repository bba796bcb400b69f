"""Tasks: which batches a loss or reducer is tested on, and which changes to them must not change its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.checks import IGNORED

Extra = Callable[[Tensor], Tensor]

# Rows of different lengths, prompts and gaps. The first labels are there because no logit of a causal model predicts
# them.
_ROWS = ("11111111", "00111000", "11010000", "01100000")
_SCORED = torch.tensor([[place == "1" for place in row] for row in _ROWS])
_SAMPLES, _COLUMNS = 4, 4  # the rules index rows and columns up to these


# --- nested tensors --------------------------------------------------------------------------------------------------


def leaves(tree: Any, path: str = "result") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each leaf of nested dicts, tuples and lists."""
    if isinstance(tree, (Mapping, tuple, list)):
        for key, branch in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(branch, f"{path}[{key!r}]")
    else:
        yield path, tree


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of nested dicts, tuples and lists."""
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to each leaf of nested dicts, tuples and lists; None stays None."""
    if isinstance(tree, Mapping):
        return {key: mapped(function, branch) for key, branch in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(mapped(function, branch) for branch in tree)
    return None if tree is None else function(tree)


# --- batches and tasks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """The arguments of one call of a loss or reducer.

    Attributes:
        logits: `(B, S, C)`, `(B, C)`, or the shape that the task makes.
        labels: `(B, S)`, `(B,)`, `(B, C)`, or the shape that the task makes.
        extras: further tensors of a dict of labels by name, `(B, S, ...)` or `(B,)`.
    """

    logits: Tensor
    labels: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def targets(self) -> Tensor | dict[str, Tensor]:
        """A copy of the labels as the Trainer passes them: a dict if there are extras, otherwise a tensor."""
        labels = self.labels.clone()
        extras = {name: extra.clone() for name, extra in self.extras.items()}
        return {"labels": labels, **extras} if extras else labels

    def rows(self, index: Sequence[int]) -> Batch:
        """Return these rows in this order."""
        rows = torch.tensor(index)
        extras = {name: extra[rows] for name, extra in self.extras.items()}
        return Batch(self.logits[rows], self.labels[rows], extras)

    def only(self, *positions: tuple[int, ...]) -> Batch:
        """Return the batch with all labels ignored except those at the given positions."""
        labels = torch.full_like(self.labels, IGNORED)
        for position in positions:
            labels[position] = self.labels[position]
        return replace(self, labels=labels)


def outputs(logits: Any) -> Any:
    """Return the logits as a ModelOutput, which allows access by key, by attribute and by index."""
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(logits=logits)


@dataclass(frozen=True)
class Task:
    """A kind of model output and labels that a loss or reducer is tested on.

    Attributes:
        name: the name of the task.
        make: `(generator, classes) -> (logits, labels)`, a batch of four samples: logits `(4, ..., classes)` in
            float64, labels `(4, ...)`, -100 where a label is missing.
        values: `classes -> values` that a label can take.
        sequence: whether labels are tokens `(B, S, ...)` with `S >= 4`, each with logits at its own position
            `(B, S, ..., classes)`; the rules then also add padding.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        by_sequence: whether a sequence is one item, which counts if each of its rows in `(B, S, rows)` has a label;
            otherwise each token is an item.
        output: a differentiable function from the logits to the model's output that a loss is called with; reducers
            are called with the logits.

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
    by_sequence: bool = False
    output: Callable[[Tensor], Any] = outputs

    def batch(self, classes: int, extras: Mapping[str, Extra] | None = None, seed: int = 0) -> Batch:
        """Return a batch of four rows; rows of sequence tasks have different lengths, prompts and gaps."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            logits, labels = self.make(torch.Generator().manual_seed(seed), classes)
            return Batch(logits, labels, {name: extra(labels) for name, extra in (extras or {}).items()})

    def check(self, classes: int) -> None:
        """Raise ValueError unless the rules can be applied to the batches that `make` returns."""
        least = 2 if self.sequence else 1
        if classes < least:
            raise ValueError(f"classes must be >= {least} for the task {self.name!r}, got {classes}")
        batch = self.batch(classes)
        logits, labels = batch.logits, batch.labels
        fits = len(logits) == len(labels) == _SAMPLES and logits.dtype == torch.float64
        if self.sequence and fits:
            fits = labels.ndim > 1 and logits.shape == (*labels.shape, classes) and labels.shape[1] >= _COLUMNS
            fits = fits and len(self.positions(labels)) >= _COLUMNS
        if not fits:
            needs = f", at least {_COLUMNS} labels, and logits of shape (*labels.shape, {classes})"
            raise ValueError(
                f"the task {self.name!r} must make {_SAMPLES} samples with torch.float64 logits"
                f"{needs if self.sequence else ''}, got {logits.dtype} logits {tuple(logits.shape)} and labels "
                f"{tuple(labels.shape)}"
            )

    @property
    def by_token(self) -> bool:
        """Whether each token is an item."""
        return self.sequence and not self.by_sequence

    def scored(self, labels: Tensor) -> Tensor:
        """Return a mask of the labels that count: those that are not -100 and that a logit predicts."""
        scored = labels != IGNORED
        if self.shift:
            scored[:, : self.shift] = False
        return scored

    def items(self, labels: Tensor) -> int:
        """Return the number of items that the Trainer counts for these labels."""
        scored = self.scored(labels)
        return int((scored.any(1).reshape(len(labels), -1).all(1) if self.by_sequence else scored).sum())

    def positions(self, labels: Tensor) -> list[tuple[int, ...]]:
        """Return the index of each label that counts."""
        return [tuple(position) for position in self.scored(labels).nonzero().tolist()]

    def pairs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the labels that count `(n,)` after the logits `(n, ...)` that predict them."""
        logits = batch.logits[:, : batch.logits.shape[1] - self.shift] if self.shift else batch.logits
        labels = batch.labels[:, self.shift :] if self.shift else batch.labels
        return logits[labels != IGNORED], labels[labels != IGNORED]

    def unread(self, batch: Batch) -> Tensor:
        """Return an index of logits that are paired with a label neither by the right shift nor by a wrong one."""
        ignored = batch.labels == IGNORED
        if not self.sequence:  # by sample, unless each label has separate logits
            separate = batch.logits.shape[: ignored.ndim] == ignored.shape
            return ignored if separate else ignored.reshape(len(ignored), -1).all(1)
        columns = (~ignored).double().reshape(*ignored.shape[:2], -1).transpose(1, 2)
        near = F.max_pool1d(columns, 2 * self.shift + 3, 1, self.shift + 1).transpose(1, 2).reshape(ignored.shape) > 0
        near[:, -1] = True  # a shift after flattening pairs the last logit with the next row
        return ~near

    def trimmed(self, batch: Batch) -> Batch:
        """Return the batch without the columns on the right that have no label, as a collator would have made it."""
        if not self.sequence:
            return batch
        used = (batch.labels != IGNORED).transpose(0, 1).flatten(1).any(1).nonzero()
        width = int(used.max()) + 1 if len(used) else 1
        extras = {name: extra[:, :width] if extra.ndim > 1 else extra for name, extra in batch.extras.items()}
        return Batch(batch.logits[:, :width], batch.labels[:, :width], extras)

    def padded(self, batch: Batch, left: int, right: int) -> Batch:
        """Return the batch with more columns of padding, as if it contained a longer row."""
        noise, (rows, _, *rest) = torch.Generator().manual_seed(1), batch.logits.shape
        before, after = (
            torch.randn(rows, width, *rest, generator=noise, dtype=torch.float64) * 9 for width in (left, right)
        )
        extras = {name: widen(extra, left, right) if extra.ndim > 1 else extra for name, extra in batch.extras.items()}
        return Batch(torch.cat([before, batch.logits, after], 1), widen(batch.labels, left, right), extras)


def widen(tensor: Tensor, left: int, right: int, value: float = IGNORED) -> Tensor:
    """Return a tensor `(B, S, ...)` with columns of one value added on the left and on the right."""
    return F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (left, right), value=value)


# --- the tasks that have a name --------------------------------------------------------------------------------------


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _tokens(generator: torch.Generator, classes: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(classes, _SCORED.shape, generator=generator)
    labels[0, 1:3] = torch.tensor([0, classes - 1])
    return _normal(generator, *_SCORED.shape, classes), labels.masked_fill(~_SCORED, IGNORED)


def _class_ids(generator: torch.Generator, classes: int) -> tuple[Tensor, Tensor]:
    return _normal(generator, 4, classes), torch.tensor([0, classes - 1, classes // 2, 0])


def _binary_labels(generator: torch.Generator, classes: int) -> tuple[Tensor, Tensor]:
    logits = _normal(generator, 4, classes)
    labels = torch.randint(2, (4, classes), generator=generator).double()
    labels[1, 1:2] = IGNORED  # a sample may lack some of its labels
    return logits, labels


def _numbers(generator: torch.Generator, classes: int) -> tuple[Tensor, Tensor]:
    predictions, labels = _normal(generator, 2, 4, 1)
    return predictions, labels[:, 0]


TASKS = {
    task.name: task
    for task in (
        Task("causal_lm", _tokens, sequence=True, shift=1),
        Task("masked_lm", _tokens, sequence=True),
        Task("seq2seq_lm", _tokens, sequence=True),
        Task("token_classification", _tokens, sequence=True),
        Task("classification", _class_ids),
        Task("multi_label", _binary_labels, lambda classes: (0.0, 1.0)),
        Task("regression", _numbers, lambda classes: (-1.5, 0.0, 2.0)),
    )
}


def find_task(task: str | Task) -> Task:
    """Return the task of that name, or the task itself.

    Raises:
        ValueError: the name is not known.
    """
    if isinstance(task, Task):
        return task
    if task not in TASKS:
        raise ValueError(f"task must be a Task or one of {', '.join(TASKS)}, got {task!r}")
    return TASKS[task]
