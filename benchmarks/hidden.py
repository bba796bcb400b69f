"""Time, memory and exactness of the loss from hidden states compared with the head, its logits and the stock loss.

Forward and backward from the hidden states of 2,048 tokens, H 896, V 151,936. `peers.py` compares other libraries.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace as Sizes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss

from lossfns import causal_lm_loss
from lossfns._core.head_products import Head

from . import harness
from .harness import Goal, Result, Row, Section, Spread, Timed
from .losses import DTYPES, IGNORED, Loss, token_ids
from .memory import peak_bytes, resident_peak

MIB = 1 << 20
VOCABULARY = 151_936


# `tokens` in one row, in as many rounds as fit `seconds`, 3 to 7.
FULL = Sizes(tokens=2048, hidden=896, seconds=40.0)
QUICK = Sizes(tokens=32, hidden=64, seconds=0.0)


@dataclass(frozen=True)
class Batch:
    """Hidden states that require a gradient, the head, and labels."""

    hidden: Tensor
    head: nn.Linear
    labels: Tensor

    @property
    def targets(self) -> Tensor:
        """The label that each position predicts, `(tokens,)`."""
        return F.pad(self.labels, (0, 1), value=IGNORED)[:, 1:].flatten()

    @property
    def supervised(self) -> int:
        return int((self.targets != IGNORED).sum())

    def zero_grad(self) -> "Batch":
        self.hidden.grad = self.head.weight.grad = None
        return self


def stock(batch: Batch) -> Tensor:
    """Compute the stock loss as the Trainer does: the logits are released when the loss returns."""
    count = torch.tensor(batch.supervised)
    return ForCausalLMLoss(batch.head(batch.hidden), batch.labels, batch.head.out_features, count)


@dataclass(frozen=True)
class Given:
    """Stand-in for `hidden_states(model)` where the hidden states are given."""

    batch: Batch

    def read(self, logits: Tensor, rows: int) -> tuple[Tensor, Head]:
        return self.batch.hidden, Head(self.batch.head, self.batch.head.out_features)


def ours(batch: Batch) -> Tensor:
    return causal_lm_loss(batch.hidden[:, -1:, :1], batch.labels, source=Given(batch))  # type: ignore[arg-type]


STOCK, OURS = "linear + ForCausalLMLoss", "from hidden states"
LOSSES = (Loss(STOCK, stock), Loss(OURS, ours))


def make_batch(
    tokens: int, hidden: int, dtype: torch.dtype, *, ignored: float, device: str, vocabulary: int = VOCABULARY
) -> Batch:
    """Return hidden states that point at the next token's row of the head, like those of a trained model."""
    generator = torch.Generator(device=device).manual_seed(0)
    labels = torch.tensor([token_ids(vocabulary)[:tokens]], device=device)
    head = nn.Linear(hidden, vocabulary, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        head.weight.normal_(0.0, 2.0 * hidden**-0.5, generator=generator)
        states = torch.empty(1, tokens, hidden, device=device).normal_(generator=generator)
        states[:, :-1] += 2.0 * head.weight[labels[0, 1:]].float()
    labels[:, : int(ignored * tokens)] = IGNORED
    return Batch(states.to(dtype).requires_grad_(), head, labels)


class Products(TorchDispatchMode):
    """Counts the multiplications of matrix products, in the forward and in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__.rstrip("_")
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            left, right = args[1:3] if "add" in name else args[:2]
            self.multiplied += left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


def step(loss: Loss, batch: Batch) -> float:
    """Run forward and backward and return the loss."""
    value = loss.call(batch)
    value.backward()
    return float(value.detach())


def measure(dtype: str, share: str, sizes: Sizes, device: str, losses: Sequence[Loss] = LOSSES) -> list[Row]:
    """Return one row per loss, all measured in this process."""
    ignored = {"all": 0.0, "half": 0.5}[share]
    batch = make_batch(sizes.tokens, sizes.hidden, DTYPES[dtype], ignored=ignored, device=device)
    truth = true_gradients(batch)
    case = {"dtype": dtype, "supervised": share, "tokens": sizes.tokens, "hidden_bytes": batch.hidden.nbytes}
    rows = []
    for loss in losses:
        row = first_call(loss, batch, device)
        rows.append(case | row | errors(batch, truth, row["value"]) | peak_of_half(loss, batch))
    rounds = min(max(int(sizes.seconds / sum(row["first_seconds"] for row in rows)), 3), 7)
    timed = [Timed(loss.name, batch.zero_grad, partial(step, loss)) for loss in losses]
    seconds = harness.interleave(timed, rounds=rounds, device=device, warm=True)
    return [row | {"seconds": seconds[row["loss"]]} for row in rows]


def first_call(loss: Loss, batch: Batch, device: str) -> Row:
    """Return peak bytes above the weights and their gradient, products and value; the gradients stay in the batch."""
    products = Products()
    weight = batch.head.weight
    found: Row = {"loss": loss.name, "float32_sum": 0}
    if loss.name == OURS and weight.dtype != torch.float32:
        found["float32_sum"] = 4 * weight.numel()

    def call() -> None:
        found["value"] = step(loss, batch.zero_grad())

    def counted() -> None:
        with products:
            found["peak"] = peak_bytes(call).peak - weight.nbytes

    start = time.perf_counter()
    found["resident"] = resident_peak(counted, device=device) - weight.nbytes
    found["first_seconds"] = time.perf_counter() - start
    found["products"] = products.multiplied / (batch.supervised * weight.numel())
    return found


def peak_of_half(loss: Loss, batch: Batch) -> Row:
    """Return the peak with every other token only, for the loss whose peak hardly depends on the tokens."""
    if loss.name != OURS:
        return {}
    half = Batch(batch.hidden[:, ::2].detach().requires_grad_(), batch.head, batch.labels[:, ::2])
    batch.zero_grad()
    peak = peak_bytes(partial(step, loss, half)).peak - batch.head.weight.nbytes
    batch.zero_grad()
    return {"peak_of_half_the_tokens": peak}


Truth = tuple[float, Tensor, Tensor]


def errors(batch: Batch, truth: Truth, value: float) -> Row:
    """Return the relative errors of the value and, in the Euclidean norm, of the gradients that the batch holds."""
    pairs = {"hidden_error": (batch.hidden.grad, truth[1]), "weight_error": (batch.head.weight.grad, truth[2])}
    return {"value_error": abs(value - truth[0]) / truth[0]} | {
        name: float((found.view_as(true).double() - true).norm() / true.norm()) for name, (found, true) in pairs.items()
    }


def true_gradients(batch: Batch, *, chunk: int = 64) -> Truth:
    """Return the loss and both gradients by torch's cross-entropy in float64."""
    weight = batch.head.weight.detach().double().requires_grad_()
    states, targets = batch.hidden.detach().double()[0], batch.targets
    value, of_hidden = 0.0, torch.zeros_like(states)
    for rows in (targets != IGNORED).nonzero().flatten().split(chunk):
        leaf = states[rows].requires_grad_()
        loss = F.cross_entropy(leaf @ weight.T, targets[rows], reduction="sum") / batch.supervised
        loss.backward()
        value, of_hidden[rows] = value + float(loss.detach()), leaf.grad
    return value, of_hidden, weight.grad


def run(*, quick: bool, device: str) -> Iterator[Row]:
    sizes = QUICK if quick else FULL
    for dtype in DTYPES:
        for share in ("all", "half"):
            harness.progress(f"hidden: {sizes.tokens} tokens, H {sizes.hidden}, {dtype}, {share} supervised")
            yield from measure(dtype, share, sizes, device)


BFLOAT16, FLOAT32, ALL, HALF = "bfloat16", "float32", "all", "half"
TIME_LIMITS = {
    "default": {(BFLOAT16, ALL): 0.90, (BFLOAT16, HALF): 0.52, (FLOAT32, ALL): 1.0, (FLOAT32, HALF): 0.57},
    "kept": {(BFLOAT16, ALL): 1.05, (BFLOAT16, HALF): 0.60, (FLOAT32, ALL): 1.10, (FLOAT32, HALF): 0.65},
}
WEIGHT_ERROR_LIMITS = {"bfloat16": 1.5, "float32": 1.1}


def by_kind(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """Group the rows of both losses by dtype and supervised share; rows of other libraries are in `peers`."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["loss"] in (STOCK, OURS):
            found.setdefault((row["dtype"], row["supervised"]), {})[row["loss"]] = row
    return found


def goals(result: Result) -> list[Goal]:
    found, kinds = [], by_kind(result.rows)
    for (dtype, share), kind in kinds.items():
        row, base = kind[OURS], kind[STOCK]
        extra, extra_of_half = (row[name] - row["float32_sum"] for name in ("peak", "peak_of_half_the_tokens"))
        # What the stock loss needs does not depend on the labels.
        over_stock = extra / kinds[dtype, "all"][STOCK]["peak"]
        growth = 2 * (extra - extra_of_half) / row["hidden_bytes"]
        time = harness.ratio(row["seconds"], base["seconds"]).median
        of_hidden, apply_weights = (row[name] / base[name] for name in ("hidden_error", "weight_error"))
        found += harness.goals_at(
            f"{dtype}, {share} supervised",
            ("peak without the float32 sum, over stock", 0.03, over_stock),
            ("its growth with the tokens, over that of the hidden states", 2, growth),
            ("products with the vocabulary per supervised token", 3, row["products"]),
            ("time over stock", TIME_LIMITS[result.allocator][dtype, share], time),
            ("error of the hidden gradient over stock", 1.05, of_hidden),
            ("error of the weight gradient over stock", WEIGHT_ERROR_LIMITS[dtype], apply_weights),
        )
    return found


def tables(result: Result) -> str:
    header = (
        *("dtype", "labels", "loss", "rounds", "time, s", "over stock"),
        *("peak, MiB", "float32 sum, MiB", "process, MiB", "products"),
        *("error of value", "of hidden gradient", "of weight gradient"),
    )
    return harness.table(
        header, [_cells(row, kind[STOCK]) for kind in by_kind(result.rows).values() for row in kind.values()]
    )


def _cells(row: Row, base: Row) -> list[str]:
    case = [row["dtype"], row["supervised"], row["loss"], str(len(row["seconds"]))]
    times = [f"{Spread.of(row['seconds']):.2f}", f"{harness.ratio(row['seconds'], base['seconds']):.2f}"]
    memory = [f"{row[name] / MIB:.0f}" for name in ("peak", "float32_sum", "resident")]
    exactness = [f"{row[name]:.2g}" for name in ("value_error", "hidden_error", "weight_error")]
    return [*case, *times, *memory, f"{row['products']:.2f}", *exactness]


SECTION = Section(
    title="Losses from hidden states: forward and backward",
    benchmark="hidden",
    about="2,048 tokens, H 896, V 151,936. *Peak* is that of live tensor bytes above the weights and one weight "
    "gradient, *process* the same of the resident set (GPU: of allocated memory); the logits of the stock loss are "
    "released before backward as in the Trainer. *Products* are multiplications with the vocabulary per supervised "
    "token. The peak includes the float32 sum of a bfloat16 weight's gradient. Errors are relative to float64, in the "
    "Euclidean norm.",
    tables=tables,
    goals=goals,
    allocators=("default", "kept"),
    packages=("torch", "transformers", "numpy"),
)

if __name__ == "__main__":
    harness.main(SECTION, run)
