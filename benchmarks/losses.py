"""Time, memory and exactness of the causal LM loss beside `transformers.loss.loss_utils.ForCausalLMLoss`.

Forward and backward on the logits of 1,024 tokens, with labels from real text. Another file adds competitors by calling
`measure` with its own `Loss` objects beside these.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput

from lossfns import causal_lm_loss, focal, smoothed_cross_entropy, token_weighted, weighted_sum, z_loss

from . import assets, harness
from .harness import Goal, Result, Row, Spread, Timed
from .memory import peak_bytes, resident_peak

IGNORED = -100
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TOKENIZER_OF = {151_936: 151_643, 250_880: 248_044}  # columns of the logits -> tokens of the tokenizer


@dataclass(frozen=True)
class Sizes:
    """How much is measured: `rows` x `length` tokens."""

    rows: int
    length: int
    vocabularies: Sequence[int]
    rounds: int


FULL = Sizes(rows=2, length=512, vocabularies=(151_936, 250_880), rounds=9)
QUICK = Sizes(rows=1, length=8, vocabularies=(151_936,), rounds=2)


@dataclass(frozen=True)
class Batch:
    """What a loss may use beside the logits."""

    labels: Tensor
    token_weights: Tensor
    num_items: Tensor


@dataclass(frozen=True)
class Loss:
    """A competitor: how its table calls it, and the loss of fresh logits and a batch.

    `exact` says that it computes the plain cross-entropy, so that its gradient can be compared with the truth.
    """

    name: str
    call: Callable[[Tensor, Batch], Tensor]
    exact: bool = True


def stock(logits: Tensor, batch: Batch) -> Tensor:
    return ForCausalLMLoss(logits, batch.labels, logits.shape[-1], batch.num_items)


def ours(logits: Tensor, batch: Batch, **options: Any) -> Tensor:
    return causal_lm_loss(CausalLMOutput(logits=logits), batch.labels, batch.num_items, **options)


def composed(logits: Tensor, batch: Batch, **options: Any) -> Tensor:
    labels = {"labels": batch.labels, "token_weights": batch.token_weights}
    return causal_lm_loss(CausalLMOutput(logits=logits), labels, batch.num_items, term=COMPOSED, **options)


COMPOSED = token_weighted(weighted_sum((0.5, focal), (0.5, smoothed_cross_entropy), (1e-4, z_loss)))

STOCK = "ForCausalLMLoss"
OWN, OVER = "own buffer", "over the logits"
COMPOSED_OWN, COMPOSED_OVER = "composed term, own buffer", "composed term, over the logits"

LOSSES = (
    Loss(STOCK, stock),
    Loss(OWN, ours),
    Loss(OVER, partial(ours, overwrite_logits=True)),
    Loss(COMPOSED_OWN, composed, exact=False),
    Loss(COMPOSED_OVER, partial(composed, overwrite_logits=True), exact=False),
)


# --- input -----------------------------------------------------------------------------------------------------------


@functools.cache
def token_ids(vocabulary: int) -> list[int]:
    """English; of a vocabulary without a tokenizer of its own here, those tokens of Qwen2.5's that it would hold."""
    tokenizer = TOKENIZER_OF.get(vocabulary, 151_643)
    ids = assets.qwen_token_ids(assets.english_text(), vocabulary_size=tokenizer)
    return [token for token in ids if token < vocabulary]


def make_labels(sizes: Sizes, vocabulary: int, device: str) -> Tensor:
    ids = token_ids(vocabulary)[: sizes.rows * sizes.length]
    return torch.tensor(ids, device=device).view(sizes.rows, sizes.length)


def make_batch(labels: Tensor, *, ignored: float) -> Batch:
    """Ignores the front of each row, as a prompt is."""
    labels = labels.clone()
    labels[:, : int(ignored * labels.shape[1])] = IGNORED
    weights = torch.linspace(0.5, 1.5, labels.numel(), device=labels.device).view(labels.shape)
    return Batch(labels, weights, (labels[:, 1:] != IGNORED).sum())


def make_logits(labels: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Logits of a model that has learnt something: noise, and the next token stands out of it."""
    generator = torch.Generator(device=labels.device).manual_seed(0)
    logits = torch.empty(*labels.shape, vocabulary, device=labels.device).normal_(0.0, 2.0, generator=generator)
    logits[:, :-1].scatter_add_(2, labels[:, 1:, None], torch.full_like(labels[:, 1:, None], 10.0, dtype=logits.dtype))
    return logits.to(dtype)


class Model(torch.autograd.Function):
    """Stands for a model: fresh logits in forward; in backward takes their gradient and keeps nothing of it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, logits: Tensor, times: int, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return logits.repeat(1, times, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.gradients[:] = gradients[: len(ctx.gradients)]
        return torch.zeros((), device=gradients[0].device), None, None, None


def fresh_logits(source: Tensor, gradients: list[Tensor] | None = None, *, times: int = 1) -> Tensor:
    """A non-leaf copy of `source`, its rows repeated; the gradient is put into `gradients`, if that list has room."""
    weight = torch.zeros((), device=source.device, requires_grad=True)
    return Model.apply(weight, source, times, [] if gradients is None else gradients)


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(losses: Sequence[Loss], *, vocabulary: int, dtype: str, sizes: Sizes, device: str) -> list[Row]:
    """One row for each loss with every label supervised and with half of them ignored."""
    labels = make_labels(sizes, vocabulary, device)
    source = make_logits(labels, vocabulary, DTYPES[dtype])
    batches = {"all": make_batch(labels, ignored=0.0), "half": make_batch(labels, ignored=0.5)}
    runs = {f"{loss.name}, {share}": (loss, share, batches[share]) for share in batches for loss in losses}
    seconds = harness.interleave(
        [
            Timed(name, partial(fresh_logits, source), partial(step, loss, batch))
            for name, (loss, _, batch) in runs.items()
        ],
        rounds=sizes.rounds,
        device=device,
    )
    exact = gradient_errors([loss for loss in losses if loss.exact], source, batches["all"])
    return [
        {
            "loss": loss.name,
            "vocabulary": vocabulary,
            "dtype": dtype,
            "tokens": labels.numel(),
            "supervised": share,
            "logits_bytes": source.nbytes,
            "seconds": seconds[name],
            **memory(loss, source, batch, device),
            **(exact.get(loss.name, {}) if share == "all" else {}),
        }
        for name, (loss, share, batch) in runs.items()
    ]


def step(loss: Loss, batch: Batch, logits: Tensor) -> None:
    """Forward and backward, the logits held by the caller."""
    loss.call(logits, batch).backward()


def trainer_step(loss: Loss, batch: Batch, source: Tensor) -> None:
    """The same as in the Trainer: the logits come into being, and are released when the loss returns."""
    logits = fresh_logits(source)
    value = loss.call(logits, batch)
    del logits
    value.backward()


def memory(loss: Loss, source: Tensor, batch: Batch, device: str) -> dict[str, int]:
    """Bytes above the start with the logits held (they exist then already) and of a whole step that releases them."""
    held = fresh_logits(source)
    bytes_held = peak_bytes(partial(step, loss, batch, held)).peak
    del held
    held = fresh_logits(source)
    resident = resident_peak(partial(step, loss, batch, held), device=device)
    del held
    return {
        "held": bytes_held,
        "released": peak_bytes(partial(trainer_step, loss, batch, source)).peak,
        "held_resident": resident,
        "released_resident": resident_peak(partial(trainer_step, loss, batch, source), device=device),
    }


# --- exactness -------------------------------------------------------------------------------------------------------


def gradient_errors(losses: Sequence[Loss], source: Tensor, batch: Batch) -> dict[str, dict[str, float]]:
    """How far each gradient is from the one computed in float64, and the value from its own.

    `largest_error` is the largest difference of an element, in units in the last place of the largest true element;
    `worst_element` the same with each difference in units of its own element; `gradient_error` the Euclidean norm of
    the difference over that of the truth. Units are those of the gradient's dtype.
    """
    values, gradients = {}, {}
    for loss in losses:
        room = [torch.empty(0)]
        value = loss.call(fresh_logits(source, room), batch)
        value.backward()
        values[loss.name], gradients[loss.name] = value.item(), room[0].flatten(0, 1)
    sums = {name: {"largest": 0.0, "worst": 0.0, "squares": 0.0} for name in gradients}
    truth_value, truth_largest, truth_squares = 0.0, 0.0, 0.0
    for rows, value, truth in true_gradient(source, batch):
        truth_value += value
        truth_largest = max(truth_largest, float(truth.abs().max()))
        truth_squares += float(truth.square().sum())
        units = last_place(truth, source.dtype)
        for name, gradient in gradients.items():
            error = (gradient[rows].double() - truth).abs_()
            own = sums[name]
            own["largest"] = max(own["largest"], float(error.max()))
            own["squares"] += float(error.square().sum())
            own["worst"] = max(own["worst"], float(error.div_(units).max()))
    largest_unit = float(last_place(torch.tensor(truth_largest, dtype=torch.float64), source.dtype))
    return {
        name: {
            "largest_error": own["largest"] / largest_unit,
            "worst_element": own["worst"],
            "gradient_error": (own["squares"] / truth_squares) ** 0.5,
            "value_error": abs(values[name] - truth_value) / truth_value,
        }
        for name, own in sums.items()
    }


def true_gradient(source: Tensor, batch: Batch, *, chunk: int = 32) -> Any:
    """Yields a slice of rows, its part of the loss and its gradient: torch's cross-entropy in float64."""
    targets = F.pad(batch.labels, (0, 1), value=IGNORED)[:, 1:].flatten()
    logits = source.flatten(0, 1)
    for start in range(0, len(logits), chunk):
        rows = slice(start, start + chunk)
        leaf = logits[rows].double().requires_grad_()
        value = F.cross_entropy(leaf, targets[rows], ignore_index=IGNORED, reduction="sum") / batch.num_items
        (gradient,) = torch.autograd.grad(value, leaf)
        yield rows, value.item(), gradient


def last_place(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from each value to the next one that `dtype` can hold."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values)
    return torch.ldexp(torch.full_like(values, info.eps), exponent - 1).clamp_(min=info.tiny * info.eps)


# --- the benchmark ---------------------------------------------------------------------------------------------------


def run(*, quick: bool, device: str) -> list[Row]:
    """Each vocabulary and dtype in a process of its own: memory that others left there doubled the time of some."""
    sizes = QUICK if quick else FULL
    rows = []
    for vocabulary in sizes.vocabularies:
        for dtype in DTYPES:
            harness.progress(f"losses: {sizes.rows * sizes.length} tokens x {vocabulary:,} in {dtype}")
            rows += harness.in_a_process(
                partial(measure, LOSSES, vocabulary=vocabulary, dtype=dtype, sizes=sizes, device=device)
            )
    return rows


def report(results: Sequence[Result]) -> str:
    """The section of the report: what the issue asks for, then a table for each run."""
    parts = [
        "*Extra, held* is the peak of live tensor bytes above logits that the caller holds; *step, released* that of a "
        "whole step as in the Trainer: the logits come into being, which counts, and go when the loss returns. Both in "
        "units of the logits; *process* is the second as growth of the resident set (GPU: of allocated memory). "
        "With *half* of the labels the front of each row is ignored, as a prompt is; rows scattered instead would have "
        "to be gathered. "
        f"The composed term is `{COMPOSED!r}`. Errors are those of the gradient against float64: the largest in ulp of "
        "the largest element, the worst in ulp of its own element, and the relative one in the Euclidean norm.",
    ]
    for result in results:
        cases = Cases(result.rows)
        parts += [f"### {harness.title(result)}", harness.provenance(result)]
        if not result.quick and result.device == "cpu":
            parts.append(harness.goals_table(goals(cases, result.allocator)))
        parts.append(loss_table(cases))
    return "\n\n".join(parts)


class Cases:
    """The rows of a result, found by what was measured."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self._found = {self._key(row): row for row in rows}
        self.kinds = list(dict.fromkeys((row["dtype"], row["vocabulary"]) for row in rows))

    @staticmethod
    def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["dtype"], row["vocabulary"], row["loss"], row["supervised"]

    def __call__(self, kind: tuple[str, int], loss: str, supervised: str = "all") -> Row:
        return self._found[(*kind, loss, supervised)]

    def ratio(self, kind: tuple[str, int], loss: tuple[str, str], baseline: tuple[str, str]) -> Spread:
        """Time of a loss over that of another, each given as its name and what was supervised."""
        return harness.ratio(self(kind, *loss)["seconds"], self(kind, *baseline)["seconds"])


# The limits of the issue: time over the stock loss's, by allocator, dtype and variant.
TIME_LIMITS = {
    "default": {("bfloat16", OVER): 0.20, ("bfloat16", OWN): 0.30, ("float32", OVER): 0.35, ("float32", OWN): 0.60},
    "kept": {("bfloat16", OVER): 0.75, ("bfloat16", OWN): 0.90, ("float32", OVER): 1.0, ("float32", OWN): 1.0},
}
MEMORY_LIMITS = {OWN: 1.05, OVER: 0.05}
HALF_LIMIT = 0.60
COMPOSED_TIME_LIMIT, COMPOSED_MEMORY_LIMIT = 1.3, 1.02


def goals(cases: Cases, allocator: str) -> list[Goal]:
    found = []
    for kind in cases.kinds:
        dtype, vocabulary = kind
        case = f"{dtype}, V {vocabulary:,}"
        for loss, composed_loss in ((OWN, COMPOSED_OWN), (OVER, COMPOSED_OVER)):
            row, other = cases(kind, loss), cases(kind, composed_loss)
            logits = row["logits_bytes"]
            full_time = cases.ratio(kind, (loss, "all"), (STOCK, "all")).median
            half_over_stock = cases.ratio(kind, (loss, "half"), (STOCK, "half")).median
            half_time = cases.ratio(kind, (loss, "half"), (loss, "all")).median
            composed_time = cases.ratio(kind, (composed_loss, "all"), (loss, "all")).median
            composed_memory = (logits + other["held"]) / (logits + row["held"])
            where = f"{case}, {loss}"
            found += [
                Goal(f"{where}: extra memory, in logits", MEMORY_LIMITS[loss], row["held"] / logits),
                Goal(f"{where}: time over stock", TIME_LIMITS[allocator][dtype, loss], full_time),
                Goal(
                    f"{where}: time over stock with half the labels ignored",
                    HALF_LIMIT * TIME_LIMITS[allocator][dtype, loss],
                    half_over_stock,
                ),
                Goal(f"{where}: the same over its own with all supervised", HALF_LIMIT, half_time),
                Goal(f"{where}: time of the composed term over cross-entropy", COMPOSED_TIME_LIMIT, composed_time),
                Goal(f"{where}: memory with the logits, the same", COMPOSED_MEMORY_LIMIT, composed_memory),
                Goal(
                    f"{where}: largest gradient error, in ulp (stock plus one)",
                    cases(kind, STOCK)["largest_error"] + 1,
                    row["largest_error"],
                ),
                Goal(
                    f"{where}: gradient error, relative (stock plus one ulp)",
                    cases(kind, STOCK)["gradient_error"] + torch.finfo(DTYPES[dtype]).eps,
                    row["gradient_error"],
                ),
            ]
    return found


def loss_table(cases: Cases) -> str:
    header = (
        *("dtype", "V", "labels", "loss", "time, ms", "over stock"),
        *("extra, held", "step, released", "process", "largest error, ulp", "worst element, ulp", "relative error"),
    )
    return harness.table(header, [_cells(cases, row) for row in cases.rows])


def _cells(cases: Cases, row: Row) -> list[str]:
    kind, share = (row["dtype"], row["vocabulary"]), row["supervised"]
    over_stock = cases.ratio(kind, (row["loss"], share), (STOCK, share))
    times = Spread.of([1000 * value for value in row["seconds"]])
    in_logits = [f"{row[name] / row['logits_bytes']:.2f}" for name in ("held", "released", "released_resident")]
    errors = [""] * 3
    if "gradient_error" in row:
        errors = [f"{row['largest_error']:.2f}", f"{row['worst_element']:.1f}", f"{row['gradient_error']:.2g}"]
    case = [row["dtype"], f"{row['vocabulary']:,}", share, row["loss"]]
    return [*case, f"{times:.0f}", f"{over_stock:.2f}", *in_logits, *errors]


PACKAGES = ("torch", "transformers", "numpy")

if __name__ == "__main__":
    harness.main("losses", run, PACKAGES)
