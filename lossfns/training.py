"""Training metrics that are measured in the same pass over the logits as the loss, and logged with it."""

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
from ._core.recorder import Recorder, recording
from ._core.signature import check_options, name_of
from .combine import AddedLosses, Loss

# Keys that the Trainer writes into the same line, and the prefixes by which reporters recognize evaluations.
RESERVED = ("loss", "grad_norm", "learning_rate", "epoch", "step", "num_input_tokens_seen")
RESERVED_PREFIXES = ("train_", "eval_", "test_")


class TrainingMetrics:
    """Running sums over labels, whose means are added to each line that the Trainer logs.

    Pass `watch(loss, metrics, ...)` to the Trainer as `compute_loss_func`, then call `attach`. The means appear in the
    printed line, in what the reporters get and in `trainer.state.log_history`; they are over all labels of all
    micro-batches and processes. Nothing waits for the device until a line is due. Training begins with empty sums, and
    evaluations do not change them.

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
        """Add the means to the lines that `trainer` logs while it trains.

        Args:
            trainer: a `transformers.Trainer`.

        Raises:
            ValueError: the Trainer's loss does not fill these metrics.
        """
        loss = trainer.compute_loss_func
        if not isinstance(loss, WatchedLoss) or loss.metrics is not self:
            raise ValueError(f"compute_loss_func must be watch(loss, metrics, ...) with these metrics, got {loss!r}")
        trainer.add_callback(_log_callback(self, trainer.accelerator))
        # Move it to the front, so that the callbacks that print and report find the means in the line.
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop())

    def add(self, name: str, total: Tensor, weight: Tensor) -> None:
        """Add a sum and the weight that divides it, both 0-d and on one device, to those under `name`."""
        dtype = accumulator_dtype(weight.device)
        pair = torch.stack([total.to(weight.device, dtype), weight.to(dtype)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def means(self, accelerator: Any = None) -> dict[str, float]:
        """Return the mean under each name since the last call, NaN if nothing was scored, and empty the sums.

        Args:
            accelerator: adds the sums of all processes, each of which must call this; None means this process alone.
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
    """A loss that fills metrics during training. Built by `watch`.

    Attributes:
        loss: the loss.
        metrics: the metrics to fill.
        columns: pairs of a name in the log and a column.
    """

    loss: Loss
    metrics: TrainingMetrics
    columns: tuple[tuple[str, str], ...]

    def __call__(self, outputs: Outputs, labels: Labels, num_items_in_batch: NumItems = None) -> Tensor:
        if not torch.is_grad_enabled():  # an evaluation
            return self.loss(outputs, labels, num_items_in_batch)
        losses = [part for _, _, part in self.loss.parts] if isinstance(self.loss, AddedLosses) else [self.loss]
        fields = fields_of(column for _, column in self.columns) if self.columns else ()
        values: list[Tensor] = []
        recorders: list[Recorder] = []
        for loss in losses:
            recorder = Recorder(() if any(other.measured for other in recorders) else fields)
            with recording(recorder):
                values.append(loss(outputs, labels, num_items_in_batch))
            recorders.append(recorder)
        self._add_parts(values, recorders)
        if self.columns:
            self._add_columns(recorders)
        return self.loss.total(values) if isinstance(self.loss, AddedLosses) else values[0]

    def _add_parts(self, values: Sequence[Tensor], recorders: Sequence[Recorder]) -> None:
        if isinstance(self.loss, AddedLosses):
            names = [name for name, _, _ in self.loss.parts]
            parts = [(name, value.detach()) for name, value in zip(names, values, strict=True)]
            shares = [recorder.share for recorder in recorders]
        else:
            (recorder,) = recorders
            if not recorder.parts and summands(_term_of(self.loss)):
                raise ValueError(
                    f"{name_of(self.loss)} does not measure the parts of its term separately. Name them with "
                    'add_losses({"a": (1.0, partial(loss, term=...)), ...})'
                )
            parts, shares = recorder.parts, [recorder.share] * len(recorder.parts)
        _check_names([*(name for name, _ in self.columns), *(name for name, _ in parts)])
        any_share = next((share for share in shares if share is not None), None)
        for (name, part), local_share in zip(parts, shares, strict=True):
            share = any_share if local_share is None else local_share  # a user's own loss counts like the others
            if share is None:
                raise ValueError(
                    f"{name_of(self.loss)} does not divide by the Trainer's count, so its parts cannot be averaged "
                    "over batches: at least one part must be a loss of this package"
                )
            self.metrics.add(name, part, share)

    def _add_columns(self, recorders: Sequence[Recorder]) -> None:
        measured = next((recorder.measured for recorder in recorders if recorder.measured), None)
        if measured is None:
            raise ValueError(
                f"{name_of(self.loss)} does not measure class probabilities of single labels, so that "
                f"{', '.join(column for _, column in self.columns)} cannot be watched: use watch(loss, metrics)"
            )
        values = next(iter(measured.values()))
        weight = torch.full((), float(values.numel()), device=values.device)  # unlike tensor(), it does not wait
        made = item_columns(measured, (column for _, column in self.columns))
        for name, column in self.columns:
            self.metrics.add(name, made[column].sum(dtype=accumulator_dtype(values.device)), weight)

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
    """Return the same loss, which also fills `metrics` during training, without another pass over the logits.

    The parts of `weighted_sum` (under the names of their functions), of `add_losses` (under their own names) and of
    `with_aux_loss` (under the names of loss and field) are always logged: without their weights and divided as the loss
    is, so that the weighted sum of the parts is the loss.

    Args:
        loss: a loss of this package, bound with its options.
        metrics: the metrics to fill.
        **columns: for each name in the log, the mean over the scored labels to log: "nll" and "entropy" (nats),
            "correct", "correct_top_{k}" (fractions), as `reducers.sample_sums` counts them.

    Returns:
        A loss; picklable if `loss` is.

    Raises:
        TypeError: the loss lacks an option that it binds.
        ValueError: a column is unknown, or a name is used by the Trainer; in the call: the loss does not measure the
            column, or two parts have the same name.

    Example:
        >>> from functools import partial
        >>> from lossfns import causal_lm_loss
        >>> watch(causal_lm_loss, TrainingMetrics(), token_accuracy="correct", top_5_accuracy="correct_top_5")
        watch(causal_lm_loss, token_accuracy='correct', top_5_accuracy='correct_top_5')
    """
    fields_of(columns.values())
    check_options(loss, "loss")
    if not isinstance(metrics, TrainingMetrics):
        raise TypeError(f"metrics must be a TrainingMetrics(), to be attached to the Trainer, got {metrics!r}")
    _check_names(list(columns))
    return WatchedLoss(loss, metrics, tuple(columns.items()))


def _term_of(loss: Loss) -> Any:
    """Return the term that a loss of this package is bound to; None for any other loss."""
    return loss.keywords.get("term") if isinstance(loss, partial) else None


def _check_names(names: Sequence[str]) -> None:
    for place, name in enumerate(names):
        if name in RESERVED or name.startswith(RESERVED_PREFIXES):
            raise ValueError(f"'{name}' is a key of the Trainer's own log, or a prefix of evaluations: rename it")
        if name in names[:place]:
            raise ValueError(
                f"two values would be logged as '{name}'. Rename a column, or name the parts with "
                'add_losses({"a": (1.0, partial(loss, term=...)), ...})'
            )
