"""The one callback: it needs transformers and is imported where somebody has a Trainer already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from .training import TrainingMetrics


class TrainingLog(TrainerCallback):
    """Puts the means of `metrics` into the lines that are logged while training.

    `Trainer.log` has already appended its line to the history when it calls, so both are completed here; whoever comes
    later in the list of callbacks finds the completed line.
    """

    def __init__(self, metrics: TrainingMetrics, accelerator: Any) -> None:
        self.metrics, self.accelerator = metrics, accelerator

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.metrics.reset()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        # Evaluations and the last line of a training have no learning rate; every process logs the others.
        if logs is not None and {"loss", "learning_rate"} <= logs.keys():
            means = self.metrics.means(self.accelerator)
            logs.update(means)
            state.log_history[-1].update(means)
