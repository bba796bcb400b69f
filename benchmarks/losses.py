"""Time, memory and exactness of the causal LM loss compared with `transformers.loss.loss_utils.ForCausalLMLoss`.

Forward and backward on the logits of 1,024 tokens, with labels from real text.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace as Sizes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput

from lossfns import causal_lm_loss, focal, smoothed_cross_entropy, token_weighted, weighted_sum, z_loss

from . import assets, harness
from .harness import Goal, Result, Row, Section, Spread, Timed
from .memory import peak_bytes, resident_peak

IGNORED = -100
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TOKENIZER_OF = {151_936: 151_643, 250_880: 248_044}  # columns of the logits -> tokens of the tokenizer


# `rows` x `length` tokens for each vocabulary.
FULL = Sizes(rows=2, length=512, vocabularies=(151_936, 250_880), rounds=9)
QUICK = Sizes(rows=1, length=8, vocabularies=(151_936,), rounds=2)


@dataclass(frozen=True)
class Batch:
    """What a loss may use in addition to the logits."""

    labels: Tensor
    token_weights: Tensor
    num_items: Tensor


@dataclass(frozen=True)
class Loss:
    """A measured loss: its name in the tables and the function of fresh input and a batch.

    `exact` means that it computes the plain cross-entropy, so that its gradient can be compared with the true one.
    """

    name: str
    call: Callable[..., Tensor]
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


@functools.cache
def token_ids(vocabulary: int) -> list[int]:
    """Return English text as token ids; a vocabulary without its own tokenizer gets those Qwen2.5 ids that fit."""
    ids = assets.qwen_token_ids(assets.english_text(), vocabulary_size=TOKENIZER_OF.get(vocabulary, 151_643))
    return [token for token in ids if token < vocabulary]


def make_labels(sizes: Sizes, vocabulary: int, device: str) -> Tensor:
    ids = token_ids(vocabulary)[: sizes.rows * sizes.length]
    return torch.tensor(ids, device=device).view(sizes.rows, sizes.length)


def make_batch(labels: Tensor, *, ignored: float) -> Batch:
    """Return a batch in which the first part of each row is ignored, as a prompt is."""
    labels = labels.clone()
    labels[:, : int(ignored * labels.shape[1])] = IGNORED
    weights = torch.linspace(0.5, 1.5, labels.numel(), device=labels.device).view(labels.shape)
    return Batch(labels, weights, (labels[:, 1:] != IGNORED).sum())


def make_logits(labels: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Return logits like those of a trained model: noise, with a high value for the next token."""
    generator = torch.Generator(device=labels.device).manual_seed(0)
    logits = torch.empty(*labels.shape, vocabulary, device=labels.device).normal_(0.0, 2.0, generator=generator)
    logits[:, :-1].scatter_add_(2, labels[:, 1:, None], torch.full_like(labels[:, 1:, None], 10.0, dtype=logits.dtype))
    return logits.to(dtype)


class Model(torch.autograd.Function):
    """Stand-in for a model: forward returns fresh logits, backward receives their gradient and keeps nothing of it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, logits: Tensor, times: int, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return logits.repeat(1, times, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.gradients[:] = gradients[: len(ctx.gradients)]
        return torch.zeros((), device=gradients[0].device), None, None, None


def fresh_logits(source: Tensor, gradients: list[Tensor] | None = None, *, times: int = 1) -> Tensor:
    """Return a non-leaf copy of `source`, its rows repeated; a list of one tensor in `gradients` gets the gradient."""
    weight = torch.zeros((), device=source.device, requires_grad=True)
    return Model.apply(weight, source, times, [] if gradients is None else gradients)


def measure(losses: Sequence[Loss], *, vocabulary: int, dtype: str, sizes: Sizes, device: str) -> list[Row]:
    """Return one row per loss with every label supervised and one with half of them ignored."""
    labels = make_labels(sizes, vocabulary, device)
    source = make_logits(labels, vocabulary, DTYPES[dtype])
    batches = {"all": make_batch(labels, ignored=0.0), "half": make_batch(labels, ignored=0.5)}
    runs = {f"{loss.name}, {share}": (loss, share, batches[share]) for share in batches for loss in losses}
    fresh = partial(fresh_logits, source)
    timed = [Timed(name, fresh, partial(step, loss, batch)) for name, (loss, _, batch) in runs.items()]
    seconds = harness.interleave(timed, rounds=sizes.rounds, device=device)
    exact = gradient_errors([loss for loss in losses if loss.exact], source, batches["all"])
    case = {"vocabulary": vocabulary, "dtype": dtype, "tokens": labels.numel(), "logits_bytes": source.nbytes}
    rows = []
    for name, (loss, share, batch) in runs.items():
        row = case | {"loss": loss.name, "supervised": share, "seconds": seconds[name]}
        errors = exact.get(loss.name, {}) if share == "all" else {}
        rows.append(row | memory(loss, source, batch, device) | errors)
    return rows


def step(loss: Loss, batch: Batch, logits: Tensor) -> None:
    """Run forward and backward while the caller holds the logits."""
    loss.call(logits, batch).backward()


def trainer_step(loss: Loss, batch: Batch, source: Tensor) -> None:
    """Run the same as in the Trainer: the logits are made here and released when the loss returns."""
    logits = fresh_logits(source)
    value = loss.call(logits, batch)
    del logits
    value.backward()


def memory(loss: Loss, source: Tensor, batch: Batch, device: str) -> dict[str, int]:
    """Return peak bytes with the logits held by the caller, and of a step that makes and releases them."""
    held = peak_bytes(partial(step, loss, batch, fresh_logits(source))).peak
    whole = partial(trainer_step, loss, batch, source)
    return {"held": held, "released": peak_bytes(whole).peak, "released_resident": resident_peak(whole, device=device)}


def gradient_errors(losses: Sequence[Loss], source: Tensor, batch: Batch) -> dict[str, dict[str, float]]:
    """Return the errors of each loss's value and gradient against float64.

    `largest_error` is the largest error of an element, in units in the last place (of the gradient's dtype) of the
    largest true element; `gradient_error` is the Euclidean norm of the error relative to that of the true gradient.
    """
    true_value, truth = true_gradient(source, batch)
    _, exponent = math.frexp(float(truth.abs().max()))
    unit = torch.finfo(source.dtype).eps * 2.0 ** (exponent - 1)
    found = {}
    for loss in losses:
        gradients = [torch.empty(0)]
        value = loss.call(fresh_logits(source, gradients), batch)
        value.backward()
        error = gradients.pop().flatten(0, 1).double() - truth
        found[loss.name] = {
            "largest_error": float(error.abs().max()) / unit,
            "gradient_error": float(error.norm() / truth.norm()),
            "value_error": abs(value.item() - true_value) / true_value,
        }
    return found


def true_gradient(source: Tensor, batch: Batch, *, chunk: int = 32) -> tuple[float, Tensor]:
    """Return the loss and its gradient, `(tokens, V)`, by torch's cross-entropy in float64, `chunk` rows at a time."""
    targets = F.pad(batch.labels, (0, 1), value=IGNORED)[:, 1:].flatten()
    value, gradients = 0.0, []
    for rows, labels in zip(source.flatten(0, 1).split(chunk), targets.split(chunk), strict=True):
        leaf = rows.double().requires_grad_()
        part = F.cross_entropy(leaf, labels, ignore_index=IGNORED, reduction="sum") / batch.num_items
        gradients += torch.autograd.grad(part, leaf)
        value += part.item()
    return value, torch.cat(gradients)


def run(*, quick: bool, device: str) -> Iterator[Row]:
    """Measure each vocabulary and dtype in its own process: memory left by others doubled the time of some losses."""
    sizes = QUICK if quick else FULL
    for vocabulary in sizes.vocabularies:
        for dtype in DTYPES:
            harness.progress(f"losses: {sizes.rows * sizes.length} tokens x {vocabulary:,} in {dtype}")
            yield from harness.in_a_process(
                partial(measure, LOSSES, vocabulary=vocabulary, dtype=dtype, sizes=sizes, device=device)
            )


# Time relative to the stock loss, by allocator, dtype and loss.
TIME_LIMITS = {
    "default": {("bfloat16", OVER): 0.20, ("bfloat16", OWN): 0.30, ("float32", OVER): 0.35, ("float32", OWN): 0.60},
    "kept": {("bfloat16", OVER): 0.75, ("bfloat16", OWN): 0.90, ("float32", OVER): 1.0, ("float32", OWN): 1.0},
}
MEMORY_LIMITS = {OWN: 1.05, OVER: 0.05}
HALF_LIMIT = 0.60
COMPOSED_TIME_LIMIT, COMPOSED_MEMORY_LIMIT = 1.3, 1.02

Kind = dict[tuple[str, str], Row]  # rows of one dtype and vocabulary, by loss and supervised share


def by_kind(rows: Sequence[Row]) -> dict[tuple[str, int], Kind]:
    """Group rows by dtype and vocabulary."""
    found: dict[tuple[str, int], Kind] = {}
    for row in rows:
        found.setdefault((row["dtype"], row["vocabulary"]), {})[row["loss"], row["supervised"]] = row
    return found


def goals(result: Result) -> list[Goal]:
    found = []
    for (dtype, vocabulary), kind in by_kind(result.rows).items():
        for loss, with_composed in ((OWN, COMPOSED_OWN), (OVER, COMPOSED_OVER)):
            time_limit = TIME_LIMITS[result.allocator][dtype, loss]
            found += goals_of(f"{dtype}, V {vocabulary:,}, {loss}", kind, loss, with_composed, time_limit)
    return found


def goals_of(where: str, kind: Kind, loss: str, with_composed: str, time_limit: float) -> list[Goal]:
    row, half, other = kind[loss, "all"], kind[loss, "half"], kind[with_composed, "all"]
    base, base_of_half = kind[STOCK, "all"], kind[STOCK, "half"]
    logits, ulp = row["logits_bytes"], torch.finfo(DTYPES[row["dtype"]]).eps
    memory_of_composed = (logits + other["held"]) / (logits + row["held"])
    largest, relative = base["largest_error"] + 1, base["gradient_error"] + ulp

    def time(own: Row, base: Row) -> float:
        return harness.ratio(own["seconds"], base["seconds"]).median

    return harness.goals_at(
        where,
        ("extra memory, in logits", MEMORY_LIMITS[loss], row["held"] / logits),
        ("time over stock", time_limit, time(row, base)),
        ("time over stock, half of the labels ignored", HALF_LIMIT * time_limit, time(half, base_of_half)),
        ("time with half of the labels ignored, over all supervised", HALF_LIMIT, time(half, row)),
        ("time of the composed term over cross-entropy", COMPOSED_TIME_LIMIT, time(other, row)),
        ("memory with the logits, composed term over cross-entropy", COMPOSED_MEMORY_LIMIT, memory_of_composed),
        ("largest gradient error, in ulp (limit: stock plus one)", largest, row["largest_error"]),
        ("relative gradient error (limit: stock plus one ulp)", relative, row["gradient_error"]),
    )


def tables(result: Result) -> str:
    header = (
        *("dtype", "V", "labels", "loss", "time, ms", "over stock"),
        *("extra, held", "step, released", "process", "largest error, ulp", "relative error"),
    )
    return harness.table(header, [_cells(row, kind) for kind in by_kind(result.rows).values() for row in kind.values()])


def _cells(row: Row, kind: Kind) -> list[str]:
    times = Spread.of([1000 * value for value in row["seconds"]])
    over_stock = harness.ratio(row["seconds"], kind[STOCK, row["supervised"]]["seconds"])
    in_logits = [f"{row[name] / row['logits_bytes']:.2f}" for name in ("held", "released", "released_resident")]
    errors = [f"{row['largest_error']:.2f}", f"{row['gradient_error']:.2g}"] if "gradient_error" in row else ["", ""]
    case = [row["dtype"], f"{row['vocabulary']:,}", row["supervised"], row["loss"]]
    return [*case, f"{times:.0f}", f"{over_stock:.2f}", *in_logits, *errors]


SECTION = Section(
    title="Losses: forward and backward compared with the stock loss",
    benchmark="losses",
    about="*Extra, held* is the peak of live tensor bytes above logits that the caller holds. *Step, released* is the "
    "peak of a whole step as in the Trainer, which makes the logits and releases them when the loss returns. Both are "
    "in units of the logits. *Process* is the second as growth of the resident set (GPU: of allocated memory). With "
    "*half* of the labels, the first half of each row is ignored, as a prompt is. The composed term is "
    f"`{COMPOSED!r}`. Errors are those of the gradient against float64: the largest in ulp of the largest element, and "
    "the relative one in the Euclidean norm.",
    tables=tables,
    goals=goals,
    allocators=("default", "kept"),
    packages=("torch", "transformers", "numpy"),
)

if __name__ == "__main__":
    harness.main(SECTION, run)
