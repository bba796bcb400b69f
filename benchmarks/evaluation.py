"""What an evaluation in the stock Trainer keeps, peaks at and takes: a tiny body, V 49,152.

512 x 128 tokens, with every tensor counted, for what must be reached; and 128 to 4,096 samples of 16 tokens in every
way. With nothing configured the Trainer keeps every logit. Where that needs more than `MEASURED_UP_TO` bytes its row is
computed from two evaluations of fewer samples, and marked so.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from lossfns import causal_lm_loss, hidden_states
from metrics import build, language_modeling
from reducers import sample_sums

from . import assets, harness
from .harness import Goal, Result, Row, Spread, Timed, human_bytes
from .memory import peak_bytes, resident_peak

MEASURED_UP_TO = 8e9


@dataclass(frozen=True)
class Sizes:
    """How much is evaluated: numbers of samples, tokens a sample, samples a batch."""

    samples: Sequence[int]
    length: int
    batch: int
    rounds: int = 1  # of the smallest number
    vocabulary: int = 49_152


COUNTED, GROWTH = Sizes((512,), length=128, batch=8), Sizes((128, 512, 1024, 4096), length=16, batch=64, rounds=3)
QUICK_COUNTED, QUICK_GROWTH = Sizes((4,), length=16, batch=2), Sizes((4, 6), length=16, batch=2)


@dataclass(frozen=True)
class Setup:
    """One way to evaluate: what is given to the Trainer and to its arguments; `scores` makes the compute_metrics."""

    name: str
    scores: Callable[[int], Callable[..., dict[str, float]]]
    trainer: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    keeps_logits: bool = False
    makes_logits: bool = True

    @contextmanager
    def functions(self, model: LlamaForCausalLM) -> Iterator[dict[str, Any]]:
        """What the Trainer is given, for this model."""
        if self.makes_logits:
            yield self.trainer
        else:
            with hidden_states(model) as source:
                yield {name: partial(function, source=source) for name, function in self.trainer.items()}


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
WITHOUT_LOGITS = "sample_sums, without logits"

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
    Setup(WITHOUT_LOGITS, lambda samples: language_modeling(), FUNCTIONS, makes_logits=False),
    Setup(
        STREAMING,
        lambda samples: build(language_modeling(), num_samples=samples),
        FUNCTIONS,
        {"batch_eval_metrics": True},
    ),
)

WITHOUT_US = [setup.name for setup in SETUPS if setup.trainer is not FUNCTIONS]

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


def measure(setup: Setup, model: LlamaForCausalLM, sizes: Sizes, samples: int, device: str, *, counted: bool) -> Row:
    """Evaluates once: what the Trainer hands to compute_metrics, the process, and tensors or else seconds."""
    handed_over = 0
    scores = setup.scores(samples)
    streams = setup.arguments.get("batch_eval_metrics", False)

    def compute_metrics(evaluated: Any, compute_result: bool = True) -> dict[str, float]:
        nonlocal handed_over
        handed_over = max(handed_over, size_of(evaluated.predictions))
        return scores(evaluated, compute_result=compute_result) if streams else scores(evaluated)

    with tempfile.TemporaryDirectory() as folder, setup.functions(model) as functions:
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
            **functions,
        )
        trainer.remove_callback(PrinterCallback)
        found: dict[str, float] = {}
        cost = (count if counted else clock)(lambda: found.update(trainer.evaluate()), device)
    return {"setup": setup.name, "samples": samples, "kept": handed_over, **cost, "computed": False} | {
        name: found[f"eval_{name}"] for name in ("token_accuracy", "perplexity") if f"eval_{name}" in found
    }


def measure_forward(model: LlamaForCausalLM, sizes: Sizes, samples: int, device: str) -> Row:
    """The model on the same batches, its output released each time."""
    ids = [row["input_ids"] for row in make_rows(sizes, samples)]

    @torch.no_grad()
    def forward() -> None:
        for start in range(0, len(ids), sizes.batch):
            model(input_ids=torch.tensor(ids[start : start + sizes.batch], device=device))

    model.eval()
    return {"setup": FORWARD, "samples": samples, "kept": 0, **count(forward, device), "computed": False}


def count(fn: Callable[[], object], device: str) -> Row:
    """Both ways to count, in one run."""
    tensors = 0

    def counted() -> None:
        nonlocal tensors
        tensors = peak_bytes(fn).peak

    resident = resident_peak(counted, device=device)
    return {"peak": tensors, "resident": resident}


def clock(fn: Callable[[], object], device: str) -> Row:
    """Seconds of a run, and what the process grew by meanwhile."""
    seconds: list[float] = []
    timed = Timed("", lambda: None, lambda _: fn())

    def run() -> None:
        seconds.extend(harness.interleave([timed], rounds=1, device=device, warm=True)[""])

    return {"resident": resident_peak(run, device=device), "seconds": seconds}


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
        name: round(larger[name] + steps * (larger[name] - smaller[name]))
        for name in ("kept", "peak", "resident")
        if name in larger
    }
    if "seconds" in larger:
        least, most = min(smaller["seconds"]), min(larger["seconds"])
        figures["seconds"] = [most + steps * (most - least)]
    return {"setup": larger["setup"], "samples": samples, **figures, "computed": True}


def fits(setup: Setup, sizes: Sizes, samples: int) -> bool:
    """While they are joined, the logits exist twice."""
    return not setup.keeps_logits or 2 * logits_bytes(sizes, samples) <= MEASURED_UP_TO


def logits_bytes(sizes: Sizes, samples: int) -> int:
    return 4 * samples * sizes.length * sizes.vocabulary


def measure_counted(sizes: Sizes, device: str) -> Iterator[Row]:
    """Tensors and the process, for the forward passes alone and for ours."""
    model, (samples,) = make_model(sizes, device), sizes.samples
    yield measure_forward(model, sizes, samples, device)
    for setup in SETUPS:
        if setup.name in (SUMS, STREAMING):
            harness.progress(f"evaluation: {samples} x {sizes.length} tokens, {setup.name}")
            yield measure(setup, model, sizes, samples, device, counted=True)


def measure_growth(sizes: Sizes, device: str) -> Iterator[Row]:
    """Each setup over the numbers of samples, in turns; the smallest number several times."""
    model = make_model(sizes, device)
    measured: dict[str, list[Row]] = {setup.name: [] for setup in SETUPS}
    for samples in sizes.samples:
        harness.progress(f"evaluation: {samples:,} x {sizes.length} tokens")
        rows: dict[str, Row] = {}
        for _ in range(sizes.rounds if samples == sizes.samples[0] else 1):
            for setup in SETUPS:
                if not fits(setup, sizes, samples):
                    rows[setup.name] = extrapolated(*measured[setup.name][-2:], samples)
                    continue
                row = measure(setup, model, sizes, samples, device, counted=False)
                before = rows.get(setup.name, {"seconds": [], "resident": 0})
                row["seconds"] = [*before["seconds"], *row["seconds"]]
                row["resident"] = max(before["resident"], row["resident"])
                rows[setup.name] = row
        for name, row in rows.items():
            if not row["computed"]:
                measured[name].append(row)
            yield row


def run(*, quick: bool, device: str) -> Iterator[Row]:
    counted, growth = (QUICK_COUNTED, QUICK_GROWTH) if quick else (COUNTED, GROWTH)
    for sizes, rows in ((counted, measure_counted(counted, device)), (growth, measure_growth(growth, device))):
        for row in rows:
            case = {"tokens": sizes.length, "vocabulary": sizes.vocabulary}
            yield row | case | {"logits_bytes": logits_bytes(sizes, row["samples"])}


# --- the report -------------------------------------------------------------------------------------------------------


def report(results: Sequence[Result]) -> str:
    parts = [
        "*Kept*: the largest predictions handed to `compute_metrics`. *Peak*: of live tensor bytes above the start. "
        "*Process*: of the resident set (GPU: of allocated memory); it alone sees the NumPy arrays that "
        f"`eval_accumulation_steps` fills. What would need more than {human_bytes(MEASURED_UP_TO)} is *computed*: the "
        "line through the two largest numbers of samples that were measured.",
    ]
    for result in results:
        parts += [f"### {harness.title(result)}", harness.provenance(result)]
        counted = [row for row in result.rows if "peak" in row]
        if not result.quick:
            parts.append(harness.goals_table(goals(counted)))
        parts.append(counted_table(counted))
        growth = [row for row in result.rows if "seconds" in row]
        if growth:
            parts.append(growth_table(growth))
    return "\n\n".join(parts)


def goals(rows: Sequence[Row]) -> list[Goal]:
    found = {row["setup"]: row for row in rows if not row["computed"]}
    sums, forward = found[SUMS], found[FORWARD]
    return [
        Goal(f"kept with `{SUMS}`, over the logits", 1 / 10_000, sums["kept"] / sums["logits_bytes"]),
        Goal(f"peak with `{SUMS}` over the forward passes alone", 1.05, sums["peak"] / forward["peak"]),
        Goal("the same, streaming", 1.05, found[STREAMING]["peak"] / forward["peak"]),
    ]


def counted_table(rows: Sequence[Row]) -> str:
    header = ("setup", "samples", "tokens each", "kept", "peak", "process", "", "token accuracy", "perplexity")
    return harness.table(header, [_counted_cells(row) for row in rows])


def _counted_cells(row: Row) -> list[str]:
    sizes = [human_bytes(row[name]) for name in ("kept", "peak", "resident")]
    scores = [f"{row[name]:.6g}" if name in row else "" for name in ("token_accuracy", "perplexity")]
    return [row["setup"], str(row["samples"]), str(row["tokens"]), *sizes, _origin(row), *scores]


def growth_table(rows: Sequence[Row]) -> str:
    own = {row["samples"]: row for row in rows if row["setup"] == SUMS}
    header = ("samples", "tokens each", "setup", "kept", "process", "time, s", f"over {SUMS}", "", "token accuracy")
    return harness.table(header, [_growth_cells(row, own[row["samples"]]) for row in rows])


def _growth_cells(row: Row, own: Row) -> list[str]:
    case = [f"{row['samples']:,}", str(row["tokens"]), row["setup"]]
    ratio = harness.ratio(row["seconds"], own["seconds"])
    times = [
        f"{Spread.of(row['seconds']).median:.2f}",
        f"{ratio:.2f}" if len(own["seconds"]) > 1 else f"{ratio.median:.2f}",
    ]
    accuracy = f"{row['token_accuracy']:.6g}" if "token_accuracy" in row else ""
    return [*case, human_bytes(row["kept"]), human_bytes(row["resident"]), *times, _origin(row), accuracy]


def _origin(row: Row) -> str:
    return "computed" if row["computed"] else "measured"


PACKAGES = ("torch", "transformers", "accelerate", "numpy")

if __name__ == "__main__":
    harness.main("evaluation", run, PACKAGES)
