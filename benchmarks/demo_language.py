"""Act one: a causal language model in the stock Trainer, and what its evaluation keeps in memory.

SmolLM2-135M learns from the State of the Union addresses up to 2008 and is judged on 64 x 128 tokens of later ones.
Then the same evaluation runs in five ways, each measured while it runs.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import EvalPrediction, PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from benchmarks import assets
from benchmarks.memory import MemoryWatch
from lossfns import causal_lm_loss
from metrics import build, language_modeling
from reducers import sample_sums

STEPS, ACCUMULATION, TRAIN_BATCH, TRAIN_TOKENS = 30, 2, 2, 64
EVAL_ROWS, EVAL_TOKENS, EVAL_BATCH = 64, 128, 8
TRAINED_LAYERS = 4
LAST_TRAINING_YEAR = 2008

SUMS = partial(sample_sums, shift=1, top_k=5)
PROJECT: dict[str, Any] = {
    "compute_loss_func": causal_lm_loss,
    "preprocess_logits_for_metrics": SUMS,
    "compute_metrics": language_modeling(),
}


@dataclass(frozen=True)
class Way:
    """One way to run the evaluation, and what was measured while it ran."""

    name: str
    metrics: dict[str, float]
    kept: int
    peak: int
    seconds: float
    samples: tuple[list[float], list[int]]


def run() -> list[Way]:
    """Train, evaluate before and after, and evaluate in every way."""
    set_seed(0)
    print("\nLoading SmolLM2-135M and the State of the Union addresses ...")
    model, tokenizer = assets.smollm2()
    train, held_out = _blocks(tokenizer)
    model.requires_grad_(False)
    model.model.layers[-TRAINED_LAYERS:].requires_grad_(True)

    before = evaluate("before", model, held_out, PROJECT)
    fine_tune(model, train)
    project = evaluate("the project", model, held_out, PROJECT)
    print_progress(before.metrics, project.metrics)

    print("\nThe same evaluation in five ways (the fourth is the one above):")
    # From the smallest to the largest, so that no way runs in memory that an earlier one left behind.
    streaming = evaluate(
        "the project, streaming",
        model,
        held_out,
        PROJECT | {"compute_metrics": build(language_modeling(), num_samples=EVAL_ROWS)},
        batch_eval_metrics=True,
    )
    argmax = evaluate(
        "argmax by hand",
        model,
        held_out,
        {"preprocess_logits_for_metrics": argmax_by_hand, "compute_metrics": metrics_of_ids},
    )
    accumulated = evaluate(
        "eval_accumulation_steps=1", model, held_out, {"compute_metrics": metrics_of_logits}, eval_accumulation_steps=1
    )
    nothing = evaluate("nothing configured", model, held_out, {"compute_metrics": metrics_of_logits})
    return [nothing, accumulated, argmax, project, streaming]


def fine_tune(model: torch.nn.Module, rows: list[dict[str, list[int]]]) -> None:
    """Thirty optimizer steps of two micro-batches each, with the loss from here."""
    options = arguments(
        max_steps=STEPS,
        per_device_train_batch_size=TRAIN_BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        learning_rate=3e-4,
        warmup_steps=3,
        logging_steps=5,
    )
    trainer = Trainer(model=model, args=options, train_dataset=rows, compute_loss_func=causal_lm_loss)
    with progress(trainer, f"fine-tuning, {STEPS} steps", STEPS):
        trainer.train()


def evaluate(
    name: str,
    model: torch.nn.Module,
    rows: list[dict[str, list[int]]],
    functions: Mapping[str, Callable[..., Any]],
    **options: Any,
) -> Way:
    """One `Trainer.evaluate`, with the predictions it hands over counted and its memory watched."""
    counted = Counted(functions["compute_metrics"])
    trainer = Trainer(
        model=model,
        args=arguments(per_device_eval_batch_size=EVAL_BATCH, **options),
        eval_dataset=rows,
        **{**functions, "compute_metrics": counted},
    )
    began = time.perf_counter()
    with progress(trainer, name, len(rows) // EVAL_BATCH), MemoryWatch() as memory:
        result = trainer.evaluate()
    return Way(
        name=name,
        metrics={key.removeprefix("eval_"): value for key, value in result.items()},
        kept=counted.bytes,
        peak=memory.peak,
        seconds=time.perf_counter() - began,
        samples=(memory.seconds, memory.bytes),
    )


class Counted:
    """A `compute_metrics` that remembers the most bytes of predictions it was ever handed in one call."""

    def __init__(self, compute_metrics: Callable[..., dict[str, float]]) -> None:
        self.compute_metrics = compute_metrics
        self.bytes = 0

    def __call__(self, prediction: EvalPrediction, compute_result: bool | None = None) -> dict[str, float]:
        self.bytes = max(self.bytes, _bytes(prediction.predictions))
        # Only streaming evaluation says whether it is the last batch.
        return self.compute_metrics(
            prediction, **({} if compute_result is None else {"compute_result": compute_result})
        )


def argmax_by_hand(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The usual advice against running out of memory; perplexity and top-5 accuracy are gone with it."""
    return logits.argmax(dim=-1)


def metrics_of_ids(prediction: EvalPrediction) -> dict[str, float]:
    """The usual `compute_metrics`: shift by hand, then compare."""
    predicted, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"token_accuracy": float((predicted == labels).mean())}


def metrics_of_logits(prediction: EvalPrediction) -> dict[str, float]:
    """The same numbers as the project's, from the logits, one row at a time to save what can be saved."""
    nll = correct = in_top_5 = tokens = 0.0
    for logits, labels in zip(prediction.predictions, prediction.label_ids, strict=True):
        scores, targets = torch.from_numpy(logits[:-1]), torch.from_numpy(labels[1:])
        best = scores.topk(5).indices == targets[:, None]
        nll += torch.nn.functional.cross_entropy(scores, targets, reduction="sum").item()
        correct += best[:, 0].sum().item()
        in_top_5 += best.any(dim=1).sum().item()
        tokens += len(targets)
    return {
        "nll_loss": nll / tokens,
        "perplexity": float(np.exp(nll / tokens)),
        "token_accuracy": correct / tokens,
        "top_5_accuracy": in_top_5 / tokens,
    }


def print_progress(before: Mapping[str, float], after: Mapping[str, float]) -> None:
    print(f"\n{EVAL_ROWS} x {EVAL_TOKENS} tokens of later addresses     before      after")
    for key, name in (
        ("nll_loss", "nats a token"),
        ("perplexity", "perplexity"),
        ("token_accuracy", "next token right"),
        ("top_5_accuracy", "next token in the top 5"),
    ):
        print(f"  {name:36}{before[key]:10.3f} {after[key]:10.3f}")


def _blocks(tokenizer: Any) -> tuple[list[dict[str, list[int]]], list[dict[str, list[int]]]]:
    """Blocks of ids to train on, from the earlier addresses, and to judge by, from the later ones."""
    speeches = assets.sotu_speeches()
    earlier = [speech.text for speech in reversed(speeches) if speech.year <= LAST_TRAINING_YEAR]
    later = [speech.text for speech in speeches if speech.year > LAST_TRAINING_YEAR]
    return (
        _block(tokenizer, earlier, STEPS * ACCUMULATION * TRAIN_BATCH, TRAIN_TOKENS),
        _block(tokenizer, later, EVAL_ROWS, EVAL_TOKENS),
    )


def _block(tokenizer: Any, texts: list[str], rows: int, length: int) -> list[dict[str, list[int]]]:
    ids = chain.from_iterable(tokenizer(text)["input_ids"] for text in texts)
    blocks = [list(islice(ids, length)) for _ in range(rows)]
    return [{"input_ids": block, "labels": block} for block in blocks]


def arguments(**options: Any) -> TrainingArguments:
    """What all trainings and evaluations of the demo share."""
    return TrainingArguments(
        output_dir=tempfile.gettempdir(),
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        **options,
    )


class _Bar(TrainerCallback):
    def __init__(self, bar: "tqdm[Any]") -> None:
        self.bar = bar

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.bar.update()

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self.bar.update()

    def on_log(self, *_: Any, logs: Mapping[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.bar.set_postfix_str(f"loss {float(logs['loss']):.3f}")


def progress(trainer: Trainer, title: str, steps: int) -> "tqdm[Any]":
    """One bar in place of the Trainer's own, which prints a dict for every number it logs."""
    bar = tqdm(total=steps, desc=f"  {title:28}", ncols=96, mininterval=0.5)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_Bar(bar))
    return bar


def _bytes(predictions: Any) -> int:
    """Bytes of arrays or tensors, nested in tuples and dicts as the Trainer nests them."""
    if isinstance(predictions, Mapping):
        return sum(map(_bytes, predictions.values()))
    if isinstance(predictions, tuple | list):
        return sum(map(_bytes, predictions))
    return int(predictions.nbytes)
