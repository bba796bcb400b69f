"""The stock Trainer as the benchmarks and the demo use it."""

import tempfile
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from transformers import EvalPrediction, PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

ARGUMENTS = {field.name for field in fields(TrainingArguments)}


def make_trainer(
    model: PreTrainedModel, rows: list[dict[str, Any]], *, batch: int, device: str = "cpu", **options: Any
) -> Trainer:
    """Return a quiet Trainer on `rows`; `options` are arguments of TrainingArguments or of Trainer."""
    arguments = {name: value for name, value in options.items() if name in ARGUMENTS}
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=batch,
            save_strategy="no",
            use_cpu=device == "cpu",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **arguments,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        **{name: value for name, value in options.items() if name not in ARGUMENTS},
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Counted:
    """A `compute_metrics` that remembers the most bytes of predictions that it received in one call."""

    def __init__(self, compute_metrics: Callable[..., dict[str, float]]) -> None:
        self.compute_metrics = compute_metrics
        self.bytes = 0

    def __call__(self, evaluated: EvalPrediction, compute_result: bool | None = None) -> dict[str, float]:
        self.bytes = max(self.bytes, nested_bytes(evaluated.predictions))
        # Only a streaming evaluation passes compute_result.
        return self.compute_metrics(evaluated, **({} if compute_result is None else {"compute_result": compute_result}))


def nested_bytes(predictions: Any) -> int:
    """Return the bytes of arrays nested in dicts and tuples."""
    if isinstance(predictions, dict):
        predictions = tuple(predictions.values())
    if isinstance(predictions, (list, tuple)):
        return sum(map(nested_bytes, predictions))
    return int(predictions.nbytes)
