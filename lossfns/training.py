"""What training logs beside the loss, measured in the same pass over the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._core.alignment import Labels, Outputs
from ._core.columns import fields_of, item_columns
from ._core.combined import summands
from ._core.normalization import NumItems, accumulator_dtype
from ._core.recorder import Notes, taking
from ._core.signature import check_options, name_of
from .combine import AddedLosses, Call, Loss, added

# What the Trainer writes into the same line, and the beginnings by which reporters tell evaluations apart.
RESERVED = ("loss", "grad_norm", "learning_rate", "epoch", "step", "num_input_tokens_seen")
RESERVED_PREFIXES = ("train_", "eval_", "test_")


class TrainingMetrics:
    """Sums over what was trained on since the last line of the log, which carries their means.

    Give `watch(loss, metrics, ...)` to the Trainer as `compute_loss_func`, then attach. The means stand in the printed
    line, in what the reporters get and in `trainer.state.log_history`; they are over all items of all micro-batches and
    processes. Nothing waits for the device until a line is due. A training begins with empty sums, and evaluations
    leave them alone.

    Example:
        >>> from lossfns import causal_lm_loss
        >>> metrics = TrainingMetrics()
        >>> loss = watch(causal_lm_loss, metrics, token_accuracy="correct")
        >>> _ = loss(torch.zeros(1, 2, 4), torch.tensor([[0, 0]]))
        >>> metrics.means()
        {'token_accuracy': 1.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def attach(self, trainer: Any) -> None:
        """Let the lines that `trainer` logs while it trains carry the means.

        Args:
            trainer: a `transformers.Trainer`.

        Raises:
            ValueError: its loss does not fill these metrics.
        """
        loss = trainer.compute_loss_func
        if not isinstance(loss, WatchedLoss) or loss.metrics is not self:
            raise ValueError(
                f"nothing fills these metrics: the Trainer's compute_loss_func is {loss!r}. Give it "
                "watch(loss, metrics, ...), with the same metrics"
            )
        trainer.add_callback(_log_callback(self, trainer.accelerator))
        # First, so that the callbacks that print and report find the means in the line.
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop())

    def add(self, name: str, total: Tensor, weight: Tensor) -> None:
        """Add a sum and the weight to divide it by, both 0-d and on one device, to those under `name`."""
        dtype = accumulator_dtype(weight.device)
        pair = torch.stack([total.to(weight.device, dtype), weight.to(dtype)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def means(self, accelerator: Any = None) -> dict[str, float]:
        """The mean under each name since the last call, NaN where nothing was scored; the sums are empty afterwards.

        Args:
            accelerator: adds up the sums of all processes, each of which has to call; None: those of this one.
        """
        names, sums = list(self._sums), self._sums
        self.reset()
        if not names:
            return {}
        table = torch.stack([sums[name] for name in names])
        if accelerator is not None:
            table = accelerator.reduce(table, reduction="sum")
        return dict(zip(names, (table[:, 0] / table[:, 1]).tolist(), strict=True))

    def reset(self) -> None:
        """Empty the sums."""
        self._sums = {}


@dataclass(frozen=True, eq=False, repr=False)
class WatchedLoss:
    """A loss that fills metrics whenever it is trained with. Built by `watch`.

    Attributes:
        loss: what is minimised.
        metrics: what is filled.
        columns: pairs of a name in the log and a column.
    """

    loss: Loss
    metrics: TrainingMetrics
    columns: tuple[tuple[str, str], ...]

    def __call__(self, outputs: Outputs, labels: Labels, num_items_in_batch: NumItems = None) -> Tensor:
        if not torch.is_grad_enabled():  # an evaluation
            return self.loss(outputs, labels, num_items_in_batch)
        calls = self.loss.calls if isinstance(self.loss, AddedLosses) else (Call((), 1.0, self.loss),)
        fields = fields_of(column for _, column in self.columns) if self.columns else ()
        values: list[Tensor] = []
        taken: list[Notes] = []
        for call in calls:
            notes = Notes(() if any(other.measured for other in taken) else fields)
            with taking(notes):
                values.append(call.loss(outputs, labels, num_items_in_batch))
            taken.append(notes)
        self._add_parts(calls, values, taken)
        if self.columns:
            self._add_columns(taken)
        return added(calls, values)

    def _add_parts(self, calls: Sequence[Call], values: Sequence[Tensor], taken: Sequence[Notes]) -> None:
        any_share = next((notes.share for notes in taken if notes.share is not None), None)
        found = [part for each in zip(calls, values, taken, strict=True) for part in _parts(*each)]
        _check_names([*(name for name, _ in self.columns), *(name for name, _, _ in found)])
        for name, part, own_share in found:
            share = any_share if own_share is None else own_share  # a loss of one's own counts like the others
            if share is None:
                raise ValueError(
                    f"{name_of(self.loss)} divides by a count of its own, so that its parts cannot be averaged over "
                    "batches: let at least one part be a loss of this package"
                )
            self.metrics.add(name, part, share)

    def _add_columns(self, taken: Sequence[Notes]) -> None:
        measured = next((notes.measured for notes in taken if notes.measured), None)
        if measured is None:
            raise ValueError(
                f"{name_of(self.loss)} does not measure class probabilities of single labels, so that "
                f"{', '.join(column for _, column in self.columns)} cannot be watched: watch its parts alone, "
                "watch(loss, metrics)"
            )
        items = next(iter(measured.values()))
        number = torch.full((), float(items.numel()), device=items.device)  # unlike a tensor() waits for no device
        made = item_columns(measured, (column for _, column in self.columns))
        for name, column in self.columns:
            self.metrics.add(name, made[column].sum(dtype=accumulator_dtype(items.device)), number)

    def __repr__(self) -> str:
        shown = "".join(f", {name}={column!r}" for name, column in self.columns)
        return f"watch({name_of(self.loss)}{shown})"


def _log_callback(metrics: TrainingMetrics, accelerator: Any) -> Any:
    """Return the callback that completes the logged lines; transformers is imported only where a Trainer exists."""
    from transformers import TrainerCallback

    class TrainingLog(TrainerCallback):
        """Put the means of `metrics` into the lines that are logged while training.

        `Trainer.log` has already appended its line to the history when it calls, so both are completed here; callbacks
        that come later in the list find the completed line.
        """

        def __init__(self) -> None:
            self.metrics = metrics

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            metrics.reset()

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
        ) -> None:
            # Evaluations and the last line of a training have no learning rate; every process logs the others.
            if logs is not None and {"loss", "learning_rate"} <= logs.keys():
                means = metrics.means(accelerator)
                logs.update(means)
                state.log_history[-1].update(means)

    return TrainingLog()


def watch(loss: Loss, metrics: TrainingMetrics, /, **columns: str) -> WatchedLoss:
    """The same loss, which also fills `metrics` while it trains: no further pass over the logits.

    The parts of `weighted_sum` (under the names of their functions), of `add_losses` (under their own) and of
    `with_auxiliary` (under the names of loss and field) are logged without being asked for: without their weights,
    divided as the loss is, so that weights times parts add up to it.

    Args:
        loss: a loss of this package, bound with its options.
        metrics: what is filled.
        **columns: by name in the log, which mean over the scored items: "nll" and "entropy" (nats), "correct",
            "correct_top_{k}" (fractions), as `reducers.sample_sums` counts them.

    Returns:
        A loss; picklable if `loss` is.

    Raises:
        TypeError: the loss has no such option.
        ValueError: no such column, or a name that the Trainer uses; in the call: the loss measures no such thing, or
            two parts have one name.

    Example:
        >>> from functools import partial
        >>> from lossfns import causal_lm_loss
        >>> watch(causal_lm_loss, TrainingMetrics(), token_accuracy="correct", top_5_accuracy="correct_top_5")
        watch(causal_lm_loss, token_accuracy='correct', top_5_accuracy='correct_top_5')
    """
    fields_of(columns.values())
    check_options(loss, "loss")
    if not isinstance(metrics, TrainingMetrics):
        raise TypeError(f"metrics must be a TrainingMetrics(), which is then attached to the Trainer, got {metrics!r}")
    _check_names(list(columns))
    return WatchedLoss(loss, metrics, tuple(columns.items()))


def _parts(call: Call, value: Tensor, notes: Notes) -> list[tuple[str, Tensor, Tensor | None]]:
    """The parts that a call computed: name, value and share of the window."""
    if len(call.names) == 1:
        return [(call.names[0], value.detach(), notes.share)]
    if not call.names and not notes.parts and summands(_term_of(call.loss)):
        raise ValueError(
            f"{name_of(call.loss)} does not tell the parts of its term apart. Name them by "
            'add_losses({"a": (1.0, partial(loss, term=...)), ...})'
        )
    names = call.names or [name for name, _ in notes.parts]
    return [(name, part, notes.share) for name, (_, part) in zip(names, notes.parts, strict=True)]


def _term_of(loss: Loss) -> Any:
    """The term that a loss of this package is bound to; None for any other."""
    return loss.keywords.get("term") if isinstance(loss, partial) else None


def _check_names(names: Sequence[str]) -> None:
    for place, name in enumerate(names):
        if name in RESERVED or name.startswith(RESERVED_PREFIXES):
            raise ValueError(f"the Trainer writes '{name}' into its log itself, or reporters file it elsewhere: rename")
        if name in names[:place]:
            raise ValueError(
                f"two values would be logged as '{name}'. Rename a column, or name the parts by "
                'add_losses({"a": (1.0, partial(loss, term=...)), ...}), which is one pass too'
            )
