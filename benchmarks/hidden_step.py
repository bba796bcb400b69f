"""Peak memory of a training step and an evaluation of SmolLM2-135M in the stock Trainer, with logits and without.

4 x 512 tokens. Each case runs in its own process, whose peak is the system's count (`VmHWM`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace as Sizes

import torch
from transformers import PreTrainedModel, Trainer

from lossfns import causal_lm_loss, hidden_states
from reducers import sample_sums

from . import assets, harness
from .evaluation import make_trainer
from .harness import Goal, Result, Row, Section, Spread
from .losses import DTYPES
from .memory import peak_bytes, process_peak

MIB = 1 << 20


# `rows` x `length` tokens, and the number of processes that take a training step.
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
    """Return the forward pass alone on the Trainer's own batch."""
    batch = next(iter(make().get_eval_dataloader()))
    del batch["labels"]

    @torch.no_grad()
    def run() -> None:
        model.eval()(**batch, logits_to_keep=1)

    return run


CASES = {STOCK_STEP: stock_step, STEP: step, EVALUATION: evaluation, FORWARD: forward}


def measure(case: str, dtype: str, sizes: Sizes, device: str, *, counted: bool) -> Row:
    """Return the peak of this process and, if `counted`, that of live tensor bytes in a second run of the same."""
    model, tokenizer = assets.smollm2(dtype=DTYPES[dtype])
    model.to(device)
    ids = tokenizer(assets.english_text())["input_ids"]
    pieces = [ids[start * sizes.length :][: sizes.length] for start in range(sizes.rows)]
    rows = [{"input_ids": piece, "labels": piece} for piece in pieces]
    make = partial(make_trainer, model, rows, batch=len(rows), device=device, max_steps=1, optim="sgd")
    run = CASES[case](model, make)
    run()
    found: Row = {"process": process_peak(device=device)}
    if counted:
        model.zero_grad()
        found["peak"] = peak_bytes(run).peak
    return found | {"logits_bytes": 4 * sizes.rows * sizes.length * model.config.vocab_size}


def run(*, quick: bool, device: str) -> Iterator[Row]:
    """Take the steps in several processes: heap fragmentation changes what a process holds by a tenth."""
    sizes = QUICK if quick else FULL
    for dtype, case in product(DTYPES, CASES):
        harness.progress(f"hidden_step: {case}, {dtype}")
        processes = sizes.processes if case in (STOCK_STEP, STEP) else 1
        found = [
            harness.in_a_process(partial(measure, case, dtype, sizes, device, counted=not number))
            for number in range(processes)
        ]
        yield {"case": case, "dtype": dtype, **found[0], "process": [row["process"] for row in found]}


BASE = "that of the stock loss less 2.5 float32 copies of the logits"


def goals(result: Result) -> list[Goal]:
    found = []
    for dtype in DTYPES:
        rows = {row["case"]: row for row in result.rows if row["dtype"] == dtype}
        stock_row, row = rows[STOCK_STEP], rows[STEP]
        logits = row["logits_bytes"]
        stock_process, process = (Spread.of(each["process"]).median for each in (stock_row, row))
        above_forward = (rows[EVALUATION]["peak"] - rows[FORWARD]["peak"]) / logits
        found += harness.goals_at(
            dtype,
            (f"step, process peak over {BASE}", 1.0, process / (stock_process - 2.5 * logits)),
            (f"step, live tensor bytes over {BASE}", 1.0, row["peak"] / (stock_row["peak"] - 2.5 * logits)),
            ("evaluation, peak above the forward alone, in float32 logits", 0.05, above_forward),
        )
    return found


def tables(result: Result) -> str:
    header = ("case", "dtype", "processes", "process, MiB", "peak, MiB", "float32 logits, MiB")
    cells = []
    for row in result.rows:
        process = Spread.of([peak / MIB for peak in row["process"]])
        counts = [f"{row[name] / MIB:.0f}" for name in ("peak", "logits_bytes")]
        cells.append([row["case"], row["dtype"], str(len(row["process"])), f"{process:.0f}", *counts])
    return harness.table(header, cells)


SECTION = Section(
    title="Losses from hidden states: SmolLM2-135M in the stock Trainer",
    benchmark="hidden_step",
    about="Published weights, in bfloat16 and in float32, 4 x 512 tokens. *Process* is the most memory that a fresh "
    "process ever held (GPU: that torch handed out), as median and quartiles of several processes; *peak* is that of "
    "live tensor bytes above the start of a second run.",
    tables=tables,
    goals=goals,
    allocators=("default", "returned"),
    packages=("torch", "transformers", "accelerate", "numpy"),
)

if __name__ == "__main__":
    harness.main(SECTION, run)
