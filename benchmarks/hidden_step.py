"""What a training step and an evaluation of SmolLM2-135M in the stock Trainer peak at, with logits and without.

4 x 512 tokens. Each in a process of its own, whose peak is the system's own count (`VmHWM`).
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

from lossfns import causal_lm_loss, hidden_states
from reducers import sample_sums

from . import assets, harness
from .harness import Goal, Result, Row, Spread
from .losses import DTYPES
from .memory import peak_bytes, process_peak

MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """How much is trained on and evaluated, `rows` x `length` tokens, and in how many processes a step is taken."""

    rows: int
    length: int
    processes: int


FULL = Sizes(rows=4, length=512, processes=3)
QUICK = Sizes(rows=2, length=32, processes=1)

STOCK_STEP, STEP = "a step, stock loss", "a step, from hidden states"
EVALUATION, FORWARD = "an evaluation, from hidden states", "the forward alone, one logit a row"


def stock_step(model: PreTrainedModel, make: Callable[..., Trainer]) -> Callable[[], object]:
    return make().train


def step(model: PreTrainedModel, make: Callable[..., Trainer]) -> Callable[[], object]:
    return make(compute_loss_func=partial(causal_lm_loss, source=hidden_states(model))).train


def evaluation(model: PreTrainedModel, make: Callable[..., Trainer]) -> Callable[[], object]:
    source = hidden_states(model)
    return make(
        compute_loss_func=partial(causal_lm_loss, source=source),
        preprocess_logits_for_metrics=partial(sample_sums, shift=1, source=source),
        compute_metrics=lambda evaluated: {"tokens": float(evaluated.predictions["tokens"].sum())},
    ).evaluate


def forward(model: PreTrainedModel, make: Callable[..., Trainer]) -> Callable[[], object]:
    """The same pass of the Trainer with nothing made of its outputs."""
    batch = next(iter(make().get_eval_dataloader()))
    del batch["labels"]

    @torch.no_grad()
    def run() -> None:
        model.eval()(**batch, logits_to_keep=1)

    return run


CASES = {STOCK_STEP: stock_step, STEP: step, EVALUATION: evaluation, FORWARD: forward}


def make_trainer(model: PreTrainedModel, rows: list[Row], folder: str, device: str, **functions: Any) -> Trainer:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=len(rows),
            per_device_eval_batch_size=len(rows),
            max_steps=1,
            optim="sgd",
            save_strategy="no",
            use_cpu=device == "cpu",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        **functions,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def measure(case: str, dtype: str, sizes: Sizes, device: str, *, counted: bool) -> Row:
    """The peak of this process and, if `counted`, that of live tensor bytes in a second run of the same."""
    model, tokenizer = assets.smollm2(dtype=DTYPES[dtype])
    model.to(device)
    ids = tokenizer(assets.english_text())["input_ids"]
    pieces = [ids[start * sizes.length :][: sizes.length] for start in range(sizes.rows)]
    rows = [{"input_ids": piece, "labels": piece} for piece in pieces]
    with tempfile.TemporaryDirectory() as folder:
        run = CASES[case](model, partial(make_trainer, model, rows, folder, device))
        run()
        found: Row = {"process": process_peak(device=device)}
        if counted:
            model.zero_grad()
            found["peak"] = peak_bytes(run).peak
    return found | {"logits_bytes": 4 * sizes.rows * sizes.length * model.config.vocab_size}


# --- the benchmark ----------------------------------------------------------------------------------------------------


def run(*, quick: bool, device: str) -> Iterator[Row]:
    """What a process holds depends on how its heap falls apart, by a tenth: the steps have several."""
    sizes = QUICK if quick else FULL
    for dtype, case in product(DTYPES, CASES):
        harness.progress(f"hidden_step: {case}, {dtype}")
        processes = sizes.processes if case in (STOCK_STEP, STEP) else 1
        found = [
            harness.in_a_process(partial(measure, case, dtype, sizes, device, counted=not number))
            for number in range(processes)
        ]
        yield {"case": case, "dtype": dtype, **found[0], "process": [row["process"] for row in found]}


def report(results: Sequence[Result]) -> str:
    parts = [
        "Real weights, in bfloat16 as they are published and in float32, 4 x 512 tokens. *Process* is the most a fresh "
        "process ever held (GPU: what torch handed out), of several the median with quartiles; *peak* is that of live "
        "tensor bytes above the start of a second run.",
    ]
    for result in results:
        parts += [f"### {harness.title(result)}", harness.provenance(result)]
        if not result.quick and result.device == "cpu":
            parts.append(harness.goals_table([goal for dtype in DTYPES for goal in goals(result.rows, dtype)]))
        parts.append(table(result.rows))
    return "\n\n".join(parts)


def goals(rows: Sequence[Row], dtype: str) -> list[Goal]:
    found = {row["case"]: row for row in rows if row["dtype"] == dtype}
    if not CASES.keys() <= found.keys():  # a run that was interrupted
        return []
    logits = found[STEP]["logits_bytes"]
    stock_process, process = (Spread.of(found[case]["process"]).median for case in (STOCK_STEP, STEP))
    return [
        Goal(
            f"{dtype}, a step: process peak over that with the stock loss less 2.5 float32 copies of the logits",
            1.0,
            process / (stock_process - 2.5 * logits),
        ),
        Goal(
            f"{dtype}, a step: the same of live tensor bytes",
            1.0,
            found[STEP]["peak"] / (found[STOCK_STEP]["peak"] - 2.5 * logits),
        ),
        Goal(
            f"{dtype}, an evaluation: peak above the forward alone, in float32 logits",
            0.05,
            (found[EVALUATION]["peak"] - found[FORWARD]["peak"]) / logits,
        ),
    ]


def table(rows: Sequence[Row]) -> str:
    return harness.table(
        (
            "SmolLM2-135M in the stock Trainer",
            "dtype",
            "processes",
            "process, MiB",
            "peak, MiB",
            "one float32 copy, MiB",
        ),
        [
            [
                row["case"],
                row["dtype"],
                str(len(row["process"])),
                f"{Spread.of([peak / MIB for peak in row['process']]):.0f}",
                *(f"{row[name] / MIB:.0f}" for name in ("peak", "logits_bytes")),
            ]
            for row in rows
        ],
    )


PACKAGES = ("torch", "transformers", "accelerate", "numpy")

if __name__ == "__main__":
    harness.main("hidden_step", run, PACKAGES)
