"""What an evaluation in the stock Trainer keeps and what it peaks at: 512 x 128 tokens, a tiny body, V 49,152.

With nothing configured the Trainer keeps every logit. Where that needs more than `MEASURED_UP_TO` bytes its row is
computed from two evaluations of fewer samples, and marked so.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from lossfns import causal_lm_loss
from metrics import build, language_modeling
from reducers import sample_sums

from . import assets, harness
from .harness import Goal, Result, Row, human_bytes
from .memory import peak_bytes, resident_peak

MEASURED_UP_TO = 8e9


@dataclass(frozen=True)
class Sizes:
    """How much is evaluated; `few` samples where more would not fit."""

    samples: int
    few: int
    length: int = 128
    vocabulary: int = 49_152
    batch: int = 8


FULL = Sizes(samples=512, few=64)
QUICK = Sizes(samples=4, few=2, length=16, batch=2)


@dataclass(frozen=True)
class Setup:
    """One way to evaluate: what is given to the Trainer and to its arguments; `scores` makes the compute_metrics."""

    name: str
    scores: Callable[[int], Callable[..., dict[str, float]]]
    trainer: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    keeps_logits: bool = False


def accuracy_of_logits(evaluated: Any) -> dict[str, float]:
    """What is written by hand when nothing else is configured."""
    return accuracy_of_ids(_Evaluated(evaluated.predictions.argmax(-1), evaluated.label_ids))


def accuracy_of_ids(evaluated: Any) -> dict[str, float]:
    labels, ids = evaluated.label_ids[:, 1:], evaluated.predictions[:, :-1]
    return {"token_accuracy": float((ids == labels)[labels != -100].mean())}


@dataclass(frozen=True)
class _Evaluated:
    predictions: np.ndarray
    label_ids: np.ndarray


def argmax_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(-1)


FUNCTIONS = {
    "compute_loss_func": causal_lm_loss,
    "preprocess_logits_for_metrics": partial(sample_sums, shift=1),
}

FORWARD = "the forward passes alone"
NOTHING = "nothing configured"
SUMS = "sample_sums"
STREAMING = "sample_sums, streaming"

SETUPS = (
    Setup(NOTHING, lambda samples: accuracy_of_logits, keeps_logits=True),
    Setup(
        "eval_accumulation_steps=1",
        lambda samples: accuracy_of_logits,
        arguments={"eval_accumulation_steps": 1},
        keeps_logits=True,
    ),
    Setup("argmax by hand", lambda samples: accuracy_of_ids, {"preprocess_logits_for_metrics": argmax_by_hand}),
    Setup(SUMS, lambda samples: language_modeling(), FUNCTIONS),
    Setup(
        STREAMING,
        lambda samples: build(language_modeling(), num_samples=samples),
        FUNCTIONS,
        {"batch_eval_metrics": True},
    ),
)

# --- measuring --------------------------------------------------------------------------------------------------------


def make_model(sizes: Sizes, device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=sizes.length,
        tie_word_embeddings=True,  # it repeats the token it reads, which is right now and then
    )
    return LlamaForCausalLM(config).to(device)


def make_rows(sizes: Sizes, samples: int) -> list[dict[str, list[int]]]:
    """English, a byte a token."""
    text = list(assets.english_text().encode())
    pieces = [text[start * sizes.length :][: sizes.length] for start in range(samples)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def measure(setup: Setup, model: LlamaForCausalLM, sizes: Sizes, samples: int, device: str) -> Row:
    """Evaluates once, counting tensors, the process, and what the Trainer hands to compute_metrics."""
    handed_over = 0
    scores = setup.scores(samples)
    streams = setup.arguments.get("batch_eval_metrics", False)

    def compute_metrics(evaluated: Any, compute_result: bool = True) -> dict[str, float]:
        nonlocal handed_over
        handed_over = max(handed_over, size_of(evaluated.predictions))
        return scores(evaluated, compute_result=compute_result) if streams else scores(evaluated)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_eval_batch_size=sizes.batch,
                use_cpu=device == "cpu",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
                **setup.arguments,
            ),
            eval_dataset=make_rows(sizes, samples),
            compute_metrics=compute_metrics,
            **setup.trainer,
        )
        trainer.remove_callback(PrinterCallback)
        found: dict[str, float] = {}
        counted = count(lambda: found.update(trainer.evaluate()), device)
    return {"setup": setup.name, "samples": samples, "kept": handed_over, **counted, "computed": False} | {
        name: found[f"eval_{name}"] for name in ("token_accuracy", "perplexity") if f"eval_{name}" in found
    }


def measure_forward(model: LlamaForCausalLM, sizes: Sizes, device: str) -> Row:
    """The model on the same batches, its output released each time."""
    ids = [row["input_ids"] for row in make_rows(sizes, sizes.samples)]

    @torch.no_grad()
    def forward() -> None:
        for start in range(0, len(ids), sizes.batch):
            model(input_ids=torch.tensor(ids[start : start + sizes.batch], device=device))

    model.eval()
    return {"setup": FORWARD, "samples": sizes.samples, "kept": 0, **count(forward, device), "computed": False}


def count(fn: Callable[[], object], device: str) -> dict[str, int]:
    """Both ways to count, in one run."""
    tensors = 0

    def counted() -> None:
        nonlocal tensors
        tensors = peak_bytes(fn).peak

    resident = resident_peak(counted, device=device)
    return {"peak": tensors, "resident": resident}


def size_of(predictions: Any) -> int:
    """Bytes of the arrays in nested dicts and tuples."""
    if isinstance(predictions, dict):
        predictions = tuple(predictions.values())
    if isinstance(predictions, (list, tuple)):
        return sum(map(size_of, predictions))
    return int(predictions.nbytes)


def extrapolated(smaller: Row, larger: Row, samples: int) -> Row:
    """The row for more samples, on the line through two measured ones: what does not grow with samples stays."""
    steps = (samples - larger["samples"]) / (larger["samples"] - smaller["samples"])
    figures = {
        name: round(larger[name] + steps * (larger[name] - smaller[name])) for name in ("kept", "peak", "resident")
    }
    return {"setup": larger["setup"], "samples": samples, **figures, "computed": True}


def run(*, quick: bool, device: str) -> list[Row]:
    sizes = QUICK if quick else FULL
    model = make_model(sizes, device)
    logits_bytes = sizes.samples * sizes.length * sizes.vocabulary * 4
    rows = [measure_forward(model, sizes, device)]
    for setup in SETUPS:
        harness.progress(f"evaluation: {setup.name}")
        # While they are joined, the logits exist twice.
        if setup.keeps_logits and 2 * logits_bytes > MEASURED_UP_TO:
            few = [measure(setup, model, sizes, samples, device) for samples in (sizes.few // 2, sizes.few)]
            rows += [*few, extrapolated(*few, sizes.samples)]
        else:
            rows.append(measure(setup, model, sizes, sizes.samples, device))
    case = {"tokens": sizes.length, "vocabulary": sizes.vocabulary, "logits_bytes": logits_bytes}
    return [{**row, **case} for row in rows]


# --- the report -------------------------------------------------------------------------------------------------------


def report(results: Sequence[Result]) -> str:
    parts = [
        "*Kept*: the largest predictions handed to `compute_metrics`. *Peak*: of live tensor bytes above the start. "
        "*Process*: of the resident set (GPU: of allocated memory); it alone sees the NumPy arrays that "
        "`eval_accumulation_steps` fills. *Computed* rows continue the line through the two measured rows above them.",
    ]
    for result in results:
        parts += [f"### {harness.title(result)}", harness.provenance(result)]
        if not result.quick:
            parts.append(harness.goals_table(goals(result.rows)))
        parts.append(evaluation_table(result.rows))
    return "\n\n".join(parts)


def goals(rows: Sequence[Row]) -> list[Goal]:
    found = {row["setup"]: row for row in rows if not row["computed"]}
    sums, forward = found[SUMS], found[FORWARD]
    return [
        Goal(f"kept with `{SUMS}`, over the logits", 1 / 10_000, sums["kept"] / sums["logits_bytes"]),
        Goal(f"peak with `{SUMS}` over the forward passes alone", 1.05, sums["peak"] / forward["peak"]),
        Goal("the same, streaming", 1.05, found[STREAMING]["peak"] / forward["peak"]),
    ]


def evaluation_table(rows: Sequence[Row]) -> str:
    header = ("setup", "samples", "kept", "peak", "process", "", "token accuracy", "perplexity")
    return harness.table(header, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    sizes = [human_bytes(row[name]) for name in ("kept", "peak", "resident")]
    scores = [f"{row[name]:.6g}" if name in row else "" for name in ("token_accuracy", "perplexity")]
    return [row["setup"], str(row["samples"]), *sizes, "computed" if row["computed"] else "measured", *scores]


PACKAGES = ("torch", "transformers", "accelerate", "numpy")

if __name__ == "__main__":
    harness.main("evaluation", run, PACKAGES)
