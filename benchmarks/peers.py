"""Losses compared with those of other libraries: 256 to 8,192 tokens, vocabularies of 32,000 to 250,880, in bfloat16.

`make peers` installs the other libraries. A case that would need more memory than `MEMORY_LIMIT` or more time than
`TIME_LIMIT` is not run.
"""

import functools
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import SimpleNamespace as Sizes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import assets, harness, hidden, losses
from .harness import Result, Row, Section, Timed, human_bytes
from .losses import IGNORED, OVER, OWN, STOCK, Batch, Loss
from .memory import allocated_peak

PEERS = assets.DATA / "peers"
BLOCK = 256  # tokens; larger inputs of logits repeat them
HIDDEN = 256
MEMORY_LIMIT = 10e9  # bytes
TIME_LIMIT = 4.0  # seconds per run


# In as many rounds as fit `seconds` per case, 2 to 5.
FULL = Sizes(tokens=(256, 1024, 4096, 8192), vocabularies=(32_000, 151_936, 250_880), seconds=8.0)
QUICK = Sizes(tokens=(256, 512), vocabularies=(32_000,), seconds=0.0)


def targets_of(batch: Batch) -> Tensor:
    """Return the label that each position predicts, `(1, tokens)`."""
    return F.pad(batch.labels, (0, 1), value=IGNORED)[:, 1:]


def torch_cross_entropy(logits: Tensor, batch: Batch, *, upcast: bool) -> Tensor:
    rows = logits.flatten(0, 1)
    return F.cross_entropy(rows.float() if upcast else rows, targets_of(batch).flatten(), ignore_index=IGNORED)


@functools.cache
def torchtune_loss() -> Any:
    """Read the loss from its file, because the package requires an old torchao."""
    file = PEERS / "torchtune/modules/loss/ce_chunked_output_loss.py"
    return runpy.run_path(str(file))["CEWithChunkedOutputLoss"]


def torchtune_chunked(logits: Tensor, batch: Batch) -> Tensor:
    return torchtune_loss()(num_output_chunks=8)([*logits.chunk(8, dim=1)], targets_of(batch))


def trl_log_probs(logits: Tensor, batch: Batch) -> Tensor:
    """Compute the loss as TRL's trainers do, sample by sample (of `BLOCK` tokens)."""
    from trl.trainer.utils import selective_log_softmax

    targets = targets_of(batch).view(-1, BLOCK)
    log_probs = selective_log_softmax(logits.view(len(targets), BLOCK, -1), targets.clamp(min=0))
    return -log_probs[targets != IGNORED].sum() / batch.num_items


def liger_cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(logits.flatten(0, 1), targets_of(batch).flatten(), ignore_index=IGNORED)


OF_LOGITS = (
    Loss(STOCK, losses.stock),
    Loss(OWN, losses.ours),
    Loss(OVER, partial(losses.ours, overwrite_logits=True)),
    Loss("F.cross_entropy, upcast", partial(torch_cross_entropy, upcast=True)),
    Loss("F.cross_entropy, bfloat16", partial(torch_cross_entropy, upcast=False)),
    Loss("torchtune CEWithChunkedOutputLoss", torchtune_chunked),
    Loss("TRL selective_log_softmax", trl_log_probs),
    Loss("Liger cross-entropy", liger_cross_entropy),
)


def torch_linear(batch: hidden.Batch) -> Tensor:
    return F.linear_cross_entropy(batch.hidden.flatten(0, 1), batch.head.weight, batch.targets)


def torchtune_head(batch: hidden.Batch) -> Tensor:
    """Compute the logits chunk by chunk; all chunks exist at once."""
    logits = [batch.head(chunk) for chunk in batch.hidden.chunk(8, dim=1)]
    return torchtune_loss()(num_output_chunks=8)(logits, batch.targets.view(1, -1))


def cut_cross_entropy(batch: hidden.Batch) -> Tensor:
    """Use the implementation that runs on a CPU; the other one is a Triton kernel."""
    from cut_cross_entropy import linear_cross_entropy

    impl = "cce" if batch.hidden.is_cuda else "torch_compile"
    return linear_cross_entropy(batch.hidden, batch.head.weight, batch.labels, shift=True, impl=impl)


def trl_chunked(batch: hidden.Batch) -> Tensor:
    """Use the primitive of TRL's trainers, in tiles of the vocabulary."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    scored = (batch.targets != IGNORED).nonzero().flatten()
    rows, targets = batch.hidden[0, scored], batch.targets[scored]
    log_probs, *_ = ChunkedLogProbFunction.apply(rows, batch.head.weight, None, targets, 1.0, 8192, None, 1.0, ())
    return -log_probs.mean()


OF_HIDDEN_STATES = (
    *hidden.LOSSES,
    Loss("F.linear_cross_entropy", torch_linear),
    Loss("torchtune CEWithChunkedOutputLoss", torchtune_head),
    Loss("cut-cross-entropy, torch_compile", cut_cross_entropy),
    Loss("TRL ChunkedLogProbFunction", trl_chunked),
)


@dataclass(frozen=True)
class Input:
    """One input: `fresh` makes it, `step` runs forward and backward, `errors` compares gradients with the true ones."""

    fresh: Callable[[], Any]
    step: Callable[[Loss, Any], object]
    errors: Callable[[Sequence[Loss]], dict[str, Row]]
    held: int = 0  # bytes of the weight gradient, which every loss returns


def some_logits(vocabulary: int, tokens: int, device: str) -> Input:
    labels = torch.tensor([losses.token_ids(vocabulary)[:BLOCK]], device=device)
    block = losses.make_logits(labels, vocabulary, torch.bfloat16)
    batch = losses.make_batch(labels.repeat(1, tokens // BLOCK), ignored=0.0)
    return Input(
        fresh=partial(losses.fresh_logits, block, times=tokens // BLOCK),
        step=lambda loss, logits: losses.step(loss, batch, logits),
        errors=lambda of: losses.gradient_errors(of, block, batch),
    )


def some_hidden_states(vocabulary: int, tokens: int, device: str) -> Input:
    batch = hidden.make_batch(tokens, HIDDEN, torch.bfloat16, ignored=0.0, device=device, vocabulary=vocabulary)

    def errors(of: Sequence[Loss]) -> dict[str, Row]:
        truth, found = hidden.true_gradients(batch), {}
        for loss in of:
            row = hidden.errors(batch, truth, hidden.step(loss, batch.zero_grad()))
            found[loss.name] = row | {"gradient_error": row.pop("hidden_error")}
        return found

    return Input(batch.zero_grad, hidden.step, errors, held=batch.head.weight.nbytes)


# Losses of one kind of input, and what makes the input; the others are compared with the first.
FIELDS: dict[str, tuple[Sequence[Loss], Callable[[int, int, str], Input]]] = {
    "logits": (OF_LOGITS, some_logits),
    "hidden states": (OF_HIDDEN_STATES, some_hidden_states),
}


def measure(field: str, vocabulary: int, sizes: Sizes, device: str, known: Sequence[Row]) -> list[Row]:
    """Return a row per loss and number of tokens; `known` are the rows of this field for other vocabularies."""
    of_field, make = FIELDS[field]
    found: list[Row] = []
    failed = {row["loss"] for row in known if "reason" in row}
    for tokens in sizes.tokens:
        harness.progress(f"peers: {field}, {tokens:,} tokens x {vocabulary:,}")
        case = {"field": field, "vocabulary": vocabulary, "tokens": tokens}
        case["logits_bytes"] = 2 * tokens * vocabulary
        given = make(vocabulary, tokens, device)
        rows: dict[str, Row] = {}
        for loss in of_field:
            if loss.name in failed or too_large(loss.name, case, [*known, *found]):
                continue
            try:
                rows[loss.name] = case | {"loss": loss.name} | first_runs(loss, given, device)
            except Exception as error:  # of any kind: the report shows it as the reason
                failed.add(loss.name)
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
                found.append(case | {"loss": loss.name, "reason": reason})
        if here := [loss for loss in of_field if loss.name in rows]:
            seconds = harness.interleave(
                [Timed(loss.name, given.fresh, partial(given.step, loss)) for loss in here],
                rounds=min(max(int(sizes.seconds / sum(row["first_seconds"] for row in rows.values())), 2), 5),
                device=device,
                warm=True,
            )
            errors = given.errors(here) if tokens == BLOCK else {}
            found += [row | {"seconds": seconds[name]} | errors.get(name, {}) for name, row in rows.items()]
    return found


def first_runs(loss: Loss, given: Input, device: str) -> Row:
    """Return the seconds of a second run, because the first may compile, and the peak of a third."""
    given.step(loss, given.fresh())
    seconds = harness.time_once(Timed(loss.name, given.fresh, partial(given.step, loss)), device)
    peak = allocated_peak(partial(given.step, loss, given.fresh()), device=device)
    return {"first_seconds": seconds, "peak": peak - given.held}


def too_large(name: str, case: Row, known: Sequence[Row]) -> bool:
    """Return True if a run would exceed a limit, estimated from the largest run of that loss so far."""
    rows = [row for row in known if row["loss"] == name and "peak" in row]
    if not rows:
        return False
    largest = max(rows, key=lambda row: row["logits_bytes"])
    times = case["logits_bytes"] / largest["logits_bytes"]
    needed = case["logits_bytes"] + times * largest["peak"]
    return needed > MEMORY_LIMIT or times * median(largest["seconds"]) > TIME_LIMIT


def run(*, quick: bool, device: str) -> Iterator[Row]:
    """Measure each field and vocabulary in its own process, free of memory that others left with the allocator."""
    sizes = QUICK if quick else FULL
    for field in FIELDS:
        known: list[Row] = []
        for vocabulary in sizes.vocabularies:
            rows = harness.in_a_process(partial(measure, field, vocabulary, sizes, device, known))
            known += rows
            yield from rows


def tables(result: Result) -> str:
    measured = [row for row in result.rows if "peak" in row]
    fields = {name: [row for row in measured if row["field"] == name] for name in FIELDS}
    parts = [f"**{name}**\n\n{_table(rows)}" for name, rows in fields.items() if rows]
    reasons = {f"Not measured: {row['loss']}: {row['reason']}." for row in result.rows if "reason" in row}
    return "\n\n".join([*parts, *sorted(reasons)])


def _table(rows: Sequence[Row]) -> str:
    lines: dict[tuple[int, str], dict[int, Row]] = {}
    for row in rows:
        lines.setdefault((row["vocabulary"], row["loss"]), {})[row["tokens"]] = row
    counts = sorted({row["tokens"] for row in rows})
    cells = []
    for (vocabulary, loss), own in lines.items():
        base = lines[vocabulary, rows[0]["loss"]]
        errors = [own[counts[0]].get(name) for name in ("value_error", "gradient_error", "weight_error")]
        of_tokens = [_cell(own.get(count), base.get(count)) for count in counts]
        cells.append([f"{vocabulary:,}", loss, *of_tokens, *("" if each is None else f"{each:.2g}" for each in errors)])
    header = ("V", "loss", *(f"{count:,} tokens" for count in counts))
    return harness.table((*header, "error of value", "of gradient", "of weight gradient"), cells)


def _cell(own: Row | None, base: Row | None) -> str:
    """Return milliseconds, the ratio to the first loss if it was run, and the peak in logits."""
    if own is None:
        return "-"
    ratio = "" if base is None else f" ({harness.ratio(own['seconds'], base['seconds']).median:.2f})"
    return f"{1000 * median(own['seconds']):.0f} ms{ratio}, {own['peak'] / own['logits_bytes']:.2f}"


SECTION = Section(
    title="Losses: compared with other libraries",
    benchmark="peers",
    about=f"bfloat16; forward and backward of given logits, and of hidden states of width {HIDDEN} with the head's "
    "product. Each cell is the time, in parentheses its ratio to the first line of the same V, and the peak of what "
    "torch's allocator handed out above the input, the result and (hidden states) one weight gradient of the head, in "
    "units of the logits. A ratio or a peak below that of our lines means that the other library is better there. "
    "Errors are relative to float64, at the smallest size. A dash marks what would need more than "
    f"{human_bytes(MEMORY_LIMIT)} or {TIME_LIMIT:.0f} s per run and was not run.",
    tables=tables,
    allocators=("default", "kept"),
    packages=("torch", "transformers", "torchtune", "trl", "cut-cross-entropy", "liger-kernel", "triton", "numpy"),
)

if __name__ == "__main__":
    sys.path.append(str(PEERS))
    harness.main(SECTION, run)
