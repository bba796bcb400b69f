"""What an evaluation in the stock Trainer keeps, peaks at and takes, for a tiny model with V 49,152.

512 x 128 tokens with every tensor counted, which the limits are about; and 128 to 4,096 samples of 16 tokens in every
setup. By default the Trainer keeps every logit; where that needs more than `MEMORY_LIMIT` bytes it is not run.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from types import SimpleNamespace as Sizes
from typing import Any

import torch
from torch import Tensor
from transformers import EvalPrediction, LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from lossfns import causal_lm_loss, hidden_states
from metrics import build, language_modeling
from reducers import sample_sums

from . import assets, harness
from .harness import Goal, Result, Row, Section, Spread, Timed, human_bytes
from .memory import peak_bytes, resident_peak

MEMORY_LIMIT = 8e9
VOCABULARY = 49_152
ARGUMENTS = {field.name for field in fields(TrainingArguments)}


# Numbers of samples, tokens per sample, samples per batch, and rounds of the first number.
COUNTED = Sizes(samples=(512,), length=128, batch=8)
GROWTH = Sizes(samples=(128, 512, 1024, 4096), length=16, batch=64, rounds=3)
QUICK_COUNTED = Sizes(samples=(4,), length=16, batch=2)
QUICK_GROWTH = Sizes(samples=(4, 6), length=16, batch=2, rounds=1)


def logits_bytes(sizes: Sizes, samples: int) -> int:
    return 4 * samples * sizes.length * VOCABULARY


def make_trainer(model: Any, rows: list[Row], *, batch: int, device: str = "cpu", **options: Any) -> Trainer:
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


def argmax_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the ids: the usual advice against running out of memory, which loses perplexity and top-5 accuracy."""
    return logits.argmax(-1)


def accuracy_of_ids(evaluated: EvalPrediction) -> dict[str, float]:
    """Compute the usual hand-written accuracy: shift, then compare."""
    labels, ids = evaluated.label_ids[:, 1:], evaluated.predictions[:, :-1]
    return {"token_accuracy": float((ids == labels)[labels != -100].mean())}


def accuracy_of_logits(evaluated: EvalPrediction) -> dict[str, float]:
    return accuracy_of_ids(EvalPrediction(evaluated.predictions.argmax(-1), evaluated.label_ids))


def ours(metric: Callable[..., dict[str, float]], **source: Any) -> dict[str, Any]:
    return {
        "compute_loss_func": partial(causal_lm_loss, **source),
        "preprocess_logits_for_metrics": partial(sample_sums, shift=1, **source),
        "compute_metrics": metric,
    }


FORWARD = "the forward passes alone"
NOTHING = "nothing configured"
ACCUMULATED = "eval_accumulation_steps=1"
ARGMAX = "argmax by hand"
SUMS = "sample_sums"
WITHOUT_LOGITS = "sample_sums, without logits"
STREAMING = "sample_sums, streaming"
KEEPS_LOGITS = (NOTHING, ACCUMULATED)

# Options of `make_trainer` for a model and a number of samples; the stack closes what they open.
SETUPS: dict[str, Callable[[LlamaForCausalLM, int, ExitStack], dict[str, Any]]] = {
    NOTHING: lambda *_: {"compute_metrics": accuracy_of_logits},
    ACCUMULATED: lambda *_: {"compute_metrics": accuracy_of_logits, "eval_accumulation_steps": 1},
    ARGMAX: lambda *_: {"compute_metrics": accuracy_of_ids, "preprocess_logits_for_metrics": argmax_by_hand},
    SUMS: lambda *_: ours(language_modeling()),
    WITHOUT_LOGITS: lambda model, _, stack: ours(language_modeling(), source=stack.enter_context(hidden_states(model))),
    STREAMING: lambda model, samples, _: (
        ours(build(language_modeling(), num_samples=samples)) | {"batch_eval_metrics": True}
    ),
}


def make_model(sizes: Sizes, device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=sizes.length,
        tie_word_embeddings=True,  # it repeats the token that it reads, which is sometimes right
    )
    return LlamaForCausalLM(config).to(device)


def make_rows(sizes: Sizes, samples: int) -> list[dict[str, list[int]]]:
    """Return English text, one byte per token."""
    text = list(assets.english_text().encode())
    pieces = [text[start * sizes.length :][: sizes.length] for start in range(samples)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def measure(setup: str, model: LlamaForCausalLM, sizes: Sizes, samples: int, device: str, *, counted: bool) -> Row:
    """Evaluate once and return what the Trainer keeps, the scores, and the cost."""
    with ExitStack() as stack:
        options = SETUPS[setup](model, samples, stack)
        options["compute_metrics"] = Counted(options["compute_metrics"])
        trainer = make_trainer(model, make_rows(sizes, samples), batch=sizes.batch, device=device, **options)
        scores: dict[str, float] = {}
        spent = cost(lambda: scores.update(trainer.evaluate()), device, counted=counted)
    return {"setup": setup, "samples": samples, "kept": options["compute_metrics"].bytes, **spent} | {
        name: scores[f"eval_{name}"] for name in ("token_accuracy", "perplexity") if f"eval_{name}" in scores
    }


def measure_forward(model: LlamaForCausalLM, sizes: Sizes, samples: int, device: str) -> Row:
    """Run the model alone on the same batches, releasing its output each time."""
    ids = [row["input_ids"] for row in make_rows(sizes, samples)]

    @torch.no_grad()
    def forward() -> None:
        for start in range(0, len(ids), sizes.batch):
            model(input_ids=torch.tensor(ids[start : start + sizes.batch], device=device))

    model.eval()
    return {"setup": FORWARD, "samples": samples, "kept": 0, **cost(forward, device, counted=True)}


def cost(fn: Callable[[], object], device: str, *, counted: bool) -> Row:
    """Return the growth of the process in one run of `fn`, and either its live tensor bytes or its seconds."""
    found: Row = {}

    def run() -> None:
        if counted:
            found["peak"] = peak_bytes(fn).peak
        else:
            found["seconds"] = [harness.time_once(Timed("", lambda: None, lambda _: fn()), device)]

    return {"resident": resident_peak(run, device=device)} | found


def measure_counted(sizes: Sizes, device: str) -> Iterator[Row]:
    """Count tensors and the process for the forward passes alone and for both setups with limits."""
    model, (samples,) = make_model(sizes, device), sizes.samples
    yield measure_forward(model, sizes, samples, device)
    for setup in (SUMS, STREAMING):
        harness.progress(f"evaluation: {samples} x {sizes.length} tokens, {setup}")
        yield measure(setup, model, sizes, samples, device, counted=True)


def measure_growth(sizes: Sizes, device: str) -> Iterator[Row]:
    """Time the setups in turns for each number of samples, the smallest number several times."""
    model = make_model(sizes, device)
    for samples in sizes.samples:
        harness.progress(f"evaluation: {samples:,} x {sizes.length} tokens")
        # While the Trainer joins the logits, they exist twice.
        too_large = 2 * logits_bytes(sizes, samples) > MEMORY_LIMIT
        setups = [name for name in SETUPS if not (too_large and name in KEEPS_LOGITS)]
        rounds = [
            [measure(setup, model, sizes, samples, device, counted=False) for setup in setups]
            for _ in range(sizes.rounds if samples == sizes.samples[0] else 1)
        ]
        for rows in zip(*rounds, strict=True):
            seconds = [second for row in rows for second in row["seconds"]]
            yield rows[-1] | {"seconds": seconds, "resident": max(row["resident"] for row in rows)}


def run(*, quick: bool, device: str) -> Iterator[Row]:
    counted, growth = (QUICK_COUNTED, QUICK_GROWTH) if quick else (COUNTED, GROWTH)
    for sizes, rows in ((counted, measure_counted(counted, device)), (growth, measure_growth(growth, device))):
        for row in rows:
            case = {"tokens": sizes.length, "vocabulary": VOCABULARY}
            yield row | case | {"logits_bytes": logits_bytes(sizes, row["samples"])}


def goals(result: Result) -> list[Goal]:
    found = {row["setup"]: row for row in result.rows if "peak" in row}
    sums, forward = found[SUMS], found[FORWARD]
    return [
        Goal(f"kept with `{SUMS}`, over the logits", 1 / 10_000, sums["kept"] / sums["logits_bytes"]),
        Goal(f"peak with `{SUMS}` over the forward passes alone", 1.05, sums["peak"] / forward["peak"]),
        Goal(f"peak with `{STREAMING}` over the same", 1.05, found[STREAMING]["peak"] / forward["peak"]),
    ]


def tables(result: Result) -> str:
    counted = [row for row in result.rows if "peak" in row]
    growth = [row for row in result.rows if "seconds" in row and not row.get("computed")]
    base = {row["samples"]: row["seconds"] for row in growth if row["setup"] == SUMS}
    cells = [[*_cells(row), human_bytes(row["peak"]), _score(row, "perplexity")] for row in counted]
    cells_of_growth = [
        [
            *_cells(row),
            f"{Spread.of(row['seconds']).median:.2f}",
            f"{harness.ratio(row['seconds'], base[row['samples']]).median:.2f}",
        ]
        for row in growth
    ]
    header = ("samples", "tokens each", "setup", "kept", "process", "token accuracy")
    return "\n\n".join(
        [
            harness.table((*header, "peak", "perplexity"), cells),
            harness.table((*header, "time, s", f"over {SUMS}"), cells_of_growth),
        ]
    )


def _cells(row: Row) -> list[str]:
    sizes = [human_bytes(row[name]) for name in ("kept", "resident")]
    return [f"{row['samples']:,}", str(row["tokens"]), row["setup"], *sizes, _score(row, "token_accuracy")]


def _score(row: Row, name: str) -> str:
    return f"{row[name]:.6g}" if name in row else ""


SECTION = Section(
    title="Evaluation: what the stock Trainer keeps",
    benchmark="evaluation",
    about="*Kept*: the largest predictions passed to `compute_metrics`. *Peak*: of live tensor bytes above the start. "
    "*Process*: growth of the resident set (GPU: of allocated memory), which includes the NumPy arrays that "
    f"`{ACCUMULATED}` fills. What would need more than {human_bytes(MEMORY_LIMIT)} was not run.",
    tables=tables,
    goals=goals,
    packages=("torch", "transformers", "accelerate", "numpy"),
)

if __name__ == "__main__":
    harness.main(SECTION, run)
