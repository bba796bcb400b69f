"""The losses beside those of other libraries: 256 to 8,192 tokens, vocabularies of 32,000 to 250,880, in bfloat16.

`make peers` installs the others. What would take more memory or time than `MEASURED_UP_TO` and `LONGEST` is not run;
the report continues the line through what was.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lossfns import cross_entropy, dft, entropy_bonus, weighted_sum

from . import harness, hidden, losses
from .harness import Result, Row, Timed, human_bytes
from .losses import IGNORED, OVER, OWN, STOCK, Batch, Loss
from .memory import allocated_peak

BLOCK = 256  # tokens; larger inputs of logits repeat them
HIDDEN = 256
MEASURED_UP_TO = 10e9  # bytes
LONGEST = 4.0  # seconds a run


@dataclass(frozen=True)
class Sizes:
    """What is measured, in as many rounds as fit `seconds` a case, 2 to 5."""

    tokens: Sequence[int]
    vocabularies: Sequence[int]
    seconds: float


FULL = Sizes((256, 1024, 4096, 8192), (32_000, 151_936, 250_880), seconds=8.0)
QUICK = Sizes((256, 512), (32_000,), seconds=0.0)

# --- losses of logits -------------------------------------------------------------------------------------------------


def targets_of(batch: Batch) -> Tensor:
    """The label that each position predicts, `(1, tokens)`."""
    return F.pad(batch.labels, (0, 1), value=IGNORED)[:, 1:]


def torch_cross_entropy(logits: Tensor, batch: Batch, *, upcast: bool) -> Tensor:
    rows = logits.flatten(0, 1)
    return F.cross_entropy(rows.float() if upcast else rows, targets_of(batch).flatten(), ignore_index=IGNORED)


def torchtune_chunked(logits: Tensor, batch: Batch) -> Tensor:
    return hidden.torchtune_loss()(num_output_chunks=8)([*logits.chunk(8, dim=1)], targets_of(batch))


def trl_log_probs(logits: Tensor, batch: Batch, *, dynamic: bool = False) -> Tensor:
    """As its trainers do: the last position is dropped, samples of `BLOCK` tokens are walked one by one."""
    from trl.trainer.utils import selective_log_softmax

    targets = targets_of(batch).view(-1, BLOCK)
    log_probs = selective_log_softmax(logits.view(len(targets), BLOCK, -1), targets.clamp(min=0))
    losses_of_tokens = -log_probs * log_probs.exp().detach() if dynamic else -log_probs
    return losses_of_tokens[targets != IGNORED].sum() / batch.num_items


def trl_with_entropy(logits: Tensor, batch: Batch) -> Tensor:
    from trl.trainer.utils import selective_log_softmax_and_entropy

    targets = targets_of(batch).view(-1, BLOCK)
    log_probs, entropy = selective_log_softmax_and_entropy(logits.view(len(targets), BLOCK, -1), targets.clamp(min=0))
    return (-log_probs - ENTROPY_WEIGHT * entropy)[targets != IGNORED].sum() / batch.num_items


def liger_cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(logits.flatten(0, 1), targets_of(batch).flatten(), ignore_index=IGNORED)


ENTROPY_WEIGHT = 0.01
WITH_ENTROPY = weighted_sum((1.0, cross_entropy), (ENTROPY_WEIGHT, entropy_bonus))

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
OTHER_TERMS = (
    Loss(STOCK, losses.stock),
    Loss("dft", partial(losses.ours, term=dft), exact=False),
    Loss("TRL, dft", partial(trl_log_probs, dynamic=True), exact=False),
    Loss("entropy bonus", partial(losses.ours, term=WITH_ENTROPY), exact=False),
    Loss("TRL selective_log_softmax_and_entropy", trl_with_entropy, exact=False),
)
NOT_HERE = ("F.linear_cross_entropy, chunked", "torchtune LinearCrossEntropyLoss")  # one takes minutes, one is nowhere
OF_HIDDEN_STATES = tuple(Loss(loss.name, loss.call) for loss in hidden.LOSSES if loss.name not in NOT_HERE)

# --- input ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """One input: `fresh` makes it anew, `step` is forward and backward, `errors` compares gradients with the truth."""

    fresh: Callable[[], Any]
    step: Callable[[Loss, Any], None]
    errors: Callable[[Sequence[Loss]], dict[str, Row]]
    held: int = 0  # bytes of a weight's gradient that every loss returns


def some_logits(vocabulary: int, tokens: int, device: str) -> Input:
    ids = losses.token_ids(vocabulary)[:BLOCK]
    labels = torch.tensor([ids], device=device)
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
        value, of_hidden, apply_weights = hidden.true_gradients(batch)
        found = {}
        for loss in of:
            computed = loss.call(batch.forget())
            computed.backward()
            found[loss.name] = {
                "value_error": abs(float(computed.detach()) - value) / value,
                "gradient_error": hidden.relative(batch.hidden.grad, of_hidden),
                "weight_error": hidden.relative(batch.head.weight.grad, apply_weights),
            }
        return found

    return Input(batch.forget, hidden.step, errors, held=batch.head.weight.nbytes)


@dataclass(frozen=True)
class Field:
    """Losses of one kind of input; the first is what the others are compared with."""

    name: str
    losses: Sequence[Loss]
    make: Callable[[int, int, str], Input]


FIELDS = (
    Field("logits", OF_LOGITS, some_logits),
    Field("logits, other objectives", OTHER_TERMS, some_logits),
    Field("hidden states", OF_HIDDEN_STATES, some_hidden_states),
)

# --- measuring --------------------------------------------------------------------------------------------------------


def measure(field: Field, vocabulary: int, sizes: Sizes, device: str, known: Sequence[Row]) -> list[Row]:
    """A row for each loss and number of tokens; `known` are the rows of this field for other vocabularies."""
    found: list[Row] = []
    failed = {row["loss"] for row in known if "reason" in row}
    for tokens in sizes.tokens:
        harness.progress(f"peers: {field.name}, {tokens:,} tokens x {vocabulary:,}")
        case = {
            "field": field.name,
            "vocabulary": vocabulary,
            "tokens": tokens,
            "logits_bytes": 2 * tokens * vocabulary,
        }
        given = field.make(vocabulary, tokens, device)
        rows: dict[str, Row] = {}
        for loss in field.losses:
            if loss.name in failed or too_much(loss.name, case, [*known, *found]):
                continue
            try:
                rows[loss.name] = case | {"loss": loss.name} | first_runs(loss, given, device)
            except Exception as error:  # whatever it is, it is what the report says of this peer
                failed.add(loss.name)
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
                found.append(case | {"loss": loss.name, "reason": reason})
        here = [loss for loss in field.losses if loss.name in rows]
        if not here:
            continue
        seconds = harness.interleave(
            [Timed(loss.name, given.fresh, partial(given.step, loss)) for loss in here],
            rounds=min(max(int(sizes.seconds / sum(row["first_seconds"] for row in rows.values())), 2), 5),
            device=device,
            warm=True,
        )
        errors = given.errors([loss for loss in here if loss.exact]) if tokens == BLOCK else {}
        found += [row | {"seconds": seconds[name]} | errors.get(name, {}) for name, row in rows.items()]
    return found


def first_runs(loss: Loss, given: Input, device: str) -> Row:
    """The seconds of a second run, for the first may compile, and the bytes of a third."""
    given.step(loss, given.fresh())
    seconds = harness.interleave(
        [Timed(loss.name, given.fresh, partial(given.step, loss))], rounds=1, device=device, warm=True
    )
    peak = allocated_peak(partial(given.step, loss, given.fresh()), device=device)
    return {"first_seconds": seconds[loss.name][0], "peak": peak - given.held}


def too_much(name: str, case: Row, known: Sequence[Row]) -> bool:
    """Would a run need more memory or time than it may, going by the largest of its runs so far?"""
    rows = [row for row in known if row["loss"] == name and "peak" in row]
    if not rows:
        return False
    largest = max(rows, key=lambda row: row["logits_bytes"])
    times = case["logits_bytes"] / largest["logits_bytes"]
    needed = case["logits_bytes"] + times * largest["peak"]
    return needed > MEASURED_UP_TO or times * median(largest["seconds"]) > LONGEST


def run(*, quick: bool, device: str) -> Iterator[Row]:
    """Each field and vocabulary in a process of its own: an allocator that keeps memory also keeps what others left."""
    sizes = QUICK if quick else FULL
    for field in FIELDS:
        known: list[Row] = []
        for vocabulary in sizes.vocabularies:
            rows = harness.in_a_process(partial(measure, field, vocabulary, sizes, device, known))
            known += rows
            yield from rows


# --- the report -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A figure over the tokens of a batch: the straight line through its two largest measurements."""

    slope: float
    start: float

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> "Line":
        (x, y), (further, then) = sorted(points)[-2:]
        slope = (then - y) / (further - x)
        return cls(slope, y - slope * x)

    def at(self, tokens: int) -> float:
        return self.start + self.slope * tokens


class Lines:
    """The rows of one loss for one vocabulary: each figure where it was measured, its line elsewhere."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = {row["tokens"]: row for row in rows}

    def line(self, figure: str) -> Line | None:
        points = [(tokens, _number(row[figure])) for tokens, row in self.rows.items()]
        return Line.through(points) if len(points) > 1 else None

    def at(self, figure: str, tokens: int) -> float | None:
        if tokens in self.rows:
            return _number(self.rows[tokens][figure])
        line = self.line(figure)
        return None if line is None else line.at(tokens)


def _number(figure: float | Sequence[float]) -> float:
    return median(figure) if isinstance(figure, Sequence) else figure


def lines_of(rows: Sequence[Row]) -> dict[tuple[str, int, str], Lines]:
    """By field, vocabulary and loss."""
    found: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        if "peak" in row:
            found.setdefault((row["field"], row["vocabulary"], row["loss"]), []).append(row)
    return {key: Lines(of_key) for key, of_key in found.items()}


OURS_BESIDE = {"TRL, dft": "dft", "TRL selective_log_softmax_and_entropy": "entropy bonus"}


def ours_beside(row: Row) -> str | None:
    """The loss of ours that computes what another one does, with a buffer of its own; None where there is none."""
    if row["field"] == "logits":
        return None if row["loss"] in (OWN, OVER) else OWN
    if row["field"] == "hidden states":
        return None if row["loss"] == hidden.OURS else hidden.OURS
    return OURS_BESIDE.get(row["loss"])


def report(results: Sequence[Result]) -> str:
    """Times under each allocator, then memory and exactness, which do not depend on it."""
    parts = [
        f"bfloat16; forward and backward of given logits, and of hidden states of width {HIDDEN} with the head's "
        "product. *Times*: milliseconds, and the ratio to the first line of the same input. *Memory*: the peak of what "
        "torch's allocator handed out above the input, the result and (hidden states) one weight gradient of the head, "
        f"in units of the logits. Figures in *italics* are computed: more than {human_bytes(MEASURED_UP_TO)} or "
        f"{LONGEST:.0f} s a run is not run, but the line through the two largest measured batches continued. The last "
        "column is the slope of that line.",
    ]
    for result in results:
        parts += [f"### {harness.title(result)}", harness.provenance(result)]
        parts += [f"**{name}**\n\n{_times(rows)}" for name, rows in _fields(result.rows)]
        if result is results[0]:
            parts += [f"**{name}: memory and errors**\n\n{_memory(rows)}" for name, rows in _fields(result.rows)]
        reasons = {f"{row['loss']}: {row['reason']}" for row in result.rows if "reason" in row}
        parts += [f"Not measured: {reason}." for reason in sorted(reasons)]
    return "\n\n".join(parts)


def _fields(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for name in dict.fromkeys(row["field"] for row in rows):
        yield name, [row for row in rows if row["field"] == name and "peak" in row]


def _times(rows: Sequence[Row]) -> str:
    counts = sorted({row["tokens"] for row in rows})
    lines, cells = lines_of(rows), []
    first = rows[0]["loss"]
    for (field, vocabulary, loss), own in lines.items():
        base = lines[field, vocabulary, first]
        line = own.line("seconds")
        slope = "" if line is None else f"{1e9 * line.slope / vocabulary:.2f}"
        cells.append([f"{vocabulary:,}", loss, *(_time(own, base, tokens) for tokens in counts), slope])
    return harness.table(("V", "loss", *(f"{count:,} tokens" for count in counts), "ns a logit"), cells)


def _time(own: Lines, base: Lines, tokens: int) -> str:
    seconds, usual = own.at("seconds", tokens), base.at("seconds", tokens)
    if seconds is None or usual is None:
        return "-"
    if tokens in own.rows and tokens in base.rows:
        ratio = harness.ratio(own.rows[tokens]["seconds"], base.rows[tokens]["seconds"])
        return f"{1000 * seconds:.0f}, {ratio:.2f}"
    return f"*{1000 * seconds:.0f}, {seconds / usual:.2f}*"


def _memory(rows: Sequence[Row]) -> str:
    counts = sorted({row["tokens"] for row in rows})
    cells = []
    for (_, vocabulary, loss), own in lines_of(rows).items():
        errors = [f"{own.rows[counts[0]].get(name, math.nan):.2g}" for name in ("value_error", "gradient_error")]
        line = own.line("peak")
        slope = "" if line is None else f"{line.slope / vocabulary:.2f}"
        peaks = (_peak(own, tokens, 2 * tokens * vocabulary) for tokens in counts)
        cells.append([f"{vocabulary:,}", loss, *peaks, slope, *("" if error == "nan" else error for error in errors)])
    header = ("V", "loss", *(f"{count:,} tokens" for count in counts), "bytes a logit", "value's error", "gradient's")
    return harness.table(header, cells)


def _peak(own: Lines, tokens: int, logits_bytes: int) -> str:
    peak = own.at("peak", tokens)
    if peak is None:
        return "-"
    text = f"{peak / logits_bytes:.2f}"
    return text if tokens in own.rows else f"*{text}*"


PACKAGES = ("torch", "transformers", "torchtune", "trl", "cut-cross-entropy", "liger-kernel", "triton", "numpy")

if __name__ == "__main__":
    sys.path.append(str(hidden.PEERS))
    harness.main("peers", run, PACKAGES)
