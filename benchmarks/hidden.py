"""Time, memory and exactness of the loss from hidden states, beside the head, its logits and the stock loss.

Forward and backward from the hidden states of 2,048 tokens, H 896, V 151,936; then a step and an evaluation of SmolLM2
in the stock Trainer.
"""

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from lossfns import causal_lm_loss, hidden_states
from lossfns._products import Head
from reducers import sample_sums

from . import assets, harness
from .harness import Goal, Result, Row, Spread, Timed
from .losses import DTYPES, IGNORED, TOKENIZER_OF
from .memory import peak_bytes, resident_peak

MIB = 1 << 20
VOCABULARY = 151_936


@dataclass(frozen=True)
class Sizes:
    """How much is measured: `tokens` in one row, and `rows` x `length` of SmolLM2 in the Trainer."""

    tokens: int
    hidden: int
    rounds: int
    rows: int
    length: int


FULL = Sizes(tokens=2048, hidden=896, rounds=7, rows=4, length=512)
QUICK = Sizes(tokens=32, hidden=64, rounds=2, rows=2, length=32)


@dataclass(frozen=True)
class Batch:
    """Hidden states that want a gradient, the head, and labels."""

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

    def forget(self) -> "Batch":
        self.hidden.grad = self.head.weight.grad = None
        return self


@dataclass(frozen=True)
class Loss:
    """A competitor: how its table calls it, its mean loss over a batch, and whether it is somebody else's."""

    name: str
    call: Callable[[Batch], Tensor]
    peer: bool = False


# --- the competitors --------------------------------------------------------------------------------------------------


def stock(batch: Batch) -> Tensor:
    """As in the Trainer: the logits go when the loss returns."""
    count = torch.tensor(batch.supervised)
    return ForCausalLMLoss(batch.head(batch.hidden), batch.labels, batch.head.out_features, count)


@dataclass(frozen=True)
class Given:
    """Stands for `hidden_states(model)` where the hidden states are at hand."""

    batch: Batch

    def read(self, outputs: Any, rows: int) -> tuple[Tensor, Head]:
        return self.batch.hidden, Head(self.batch.head, self.batch.head.out_features)


def ours(batch: Batch) -> Tensor:
    return causal_lm_loss({}, batch.labels, source=Given(batch))  # type: ignore[arg-type]


def torch_linear(batch: Batch, *, chunked: bool) -> Tensor:
    options = nn.LinearCrossEntropyOptions() if chunked else None
    return F.linear_cross_entropy(batch.hidden.flatten(0, 1), batch.head.weight, batch.targets, options=options)


def torchtune_linear(batch: Batch) -> Tensor:
    from torchtune.modules.loss import LinearCrossEntropyLoss

    loss = LinearCrossEntropyLoss(num_output_chunks=8)
    model = nn.Module()
    model.output = batch.head
    loss.set_model_output(model)
    return loss(batch.hidden, batch.targets.view(1, -1))


def cut_cross_entropy(batch: Batch) -> Tensor:
    """In the implementation of theirs that runs on a CPU; the others are kernels for a GPU."""
    from cut_cross_entropy import linear_cross_entropy

    impl = "cce" if batch.hidden.is_cuda else "torch_compile"
    return linear_cross_entropy(batch.hidden, batch.head.weight, batch.labels, shift=1, impl=impl)


def trl_chunked(batch: Batch) -> Tensor:
    """The primitive of its trainers, in tiles of the vocabulary."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    scored = (batch.targets != IGNORED).nonzero().flatten()
    rows, targets = batch.hidden[0, scored], batch.targets[scored]
    log_probs, *_ = ChunkedLogProbFunction.apply(rows, batch.head.weight, None, targets, 1.0, 8192, None, 1.0, ())
    return -log_probs.mean()


STOCK, OURS = "linear + ForCausalLMLoss", "from hidden states"
LOSSES = (
    Loss(STOCK, stock),
    Loss(OURS, ours),
    Loss("F.linear_cross_entropy", partial(torch_linear, chunked=False), peer=True),
    Loss("F.linear_cross_entropy, chunked", partial(torch_linear, chunked=True), peer=True),
    Loss("torchtune LinearCrossEntropyLoss", torchtune_linear, peer=True),
    Loss("cut-cross-entropy", cut_cross_entropy, peer=True),
    Loss("TRL ChunkedLogProbFunction", trl_chunked, peer=True),
)


# --- input ------------------------------------------------------------------------------------------------------------


def make_batch(tokens: int, hidden: int, dtype: torch.dtype, *, ignored: float, device: str) -> Batch:
    """Hidden states that point at the next token's row of the head, as those of a model that has learnt something."""
    generator = torch.Generator(device=device).manual_seed(0)
    ids = assets.qwen_token_ids(assets.english_text(), vocabulary_size=TOKENIZER_OF[VOCABULARY])[:tokens]
    labels = torch.tensor([ids], device=device)
    head = nn.Linear(hidden, VOCABULARY, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        head.weight.normal_(0.0, 2.0 * hidden**-0.5, generator=generator)
        states = torch.empty(1, tokens, hidden, device=device).normal_(generator=generator)
        states[:, :-1] += 2.0 * head.weight[labels[0, 1:]].float()
    labels[:, : int(ignored * tokens)] = IGNORED
    return Batch(states.to(dtype).requires_grad_(), head, labels)


# --- measuring --------------------------------------------------------------------------------------------------------


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


def step(loss: Loss, batch: Batch) -> None:
    loss.call(batch).backward()


def measure(dtype: str, share: str, sizes: Sizes, device: str, losses: Sequence[Loss] = LOSSES) -> list[Row]:
    """One row for each loss; peers run twice, with every label supervised only."""
    ignored = {"all": 0.0, "half": 0.5}[share]
    batch = make_batch(sizes.tokens, sizes.hidden, DTYPES[dtype], ignored=ignored, device=device)
    own = [loss for loss in losses if not loss.peer]
    seconds = harness.interleave(
        [Timed(loss.name, batch.forget, partial(step, loss)) for loss in own], rounds=sizes.rounds, device=device
    )
    truth = true_gradients(batch)
    rows = [described(loss, batch, truth, device) | {"seconds": seconds[loss.name]} for loss in own]
    for loss in losses if share == "all" else ():
        if loss.peer:
            try:
                rows.append(described(loss, batch, truth, device) | {"seconds": timed_once(loss, batch, device)})
            except Exception as error:  # whatever it is, it is what the table says of this peer
                rows.append({"loss": loss.name, "reason": " ".join(f"{type(error).__name__}: {error}".split())[:160]})
    case = {"dtype": dtype, "supervised": share, "tokens": sizes.tokens, "hidden_bytes": batch.hidden.nbytes}
    return [case | row for row in rows]


def timed_once(loss: Loss, batch: Batch, device: str) -> list[float]:
    """Without warming up: the first run has counted already."""
    return harness.interleave([Timed(loss.name, batch.forget, partial(step, loss))], rounds=1, device=device)[loss.name]


def described(loss: Loss, batch: Batch, truth: tuple[float, Tensor, Tensor], device: str) -> Row:
    """Bytes above the weights, products, and errors of one loss."""
    value, of_hidden, of_weight = truth
    loss.call(batch.forget()).detach()  # a peer that fails does so here
    with Products() as products:
        found = loss.call(batch.forget())
        found.backward()
    weight = batch.head.weight
    errors = {
        "value_error": abs(float(found.detach()) - value) / value,
        "hidden_error": relative(batch.hidden.grad, of_hidden),
        "weight_error": relative(weight.grad, of_weight),
    }
    del found
    batch.forget()
    gc.collect()
    peak = peak_bytes(partial(step, loss, batch)).peak - weight.nbytes
    batch.forget()
    half = Batch(batch.hidden[:, ::2].detach().requires_grad_(), batch.head, batch.labels[:, ::2])
    peak_of_half = peak_bytes(partial(step, loss, half)).peak - weight.nbytes
    batch.forget()
    resident = resident_peak(partial(step, loss, batch), device=device) - weight.nbytes
    return {
        "loss": loss.name,
        "peak": peak,
        "peak_of_half_the_tokens": peak_of_half,
        "resident": resident,
        "float32_sum": 4 * weight.numel() if weight.dtype != torch.float32 else 0,
        "products": products.multiplied / (batch.supervised * weight.numel()),
        **errors,
    }


def relative(found: Tensor | None, truth: Tensor) -> float:
    """Euclidean norm of the difference over that of the truth; in slices, a float64 copy of all would be large."""
    assert found is not None
    squares = sum(
        float((part.double() - true).square().sum())
        for part, true in zip(found.view(-1, found.shape[-1]).split(4096), truth.split(4096), strict=True)
    )
    return squares**0.5 / float(truth.norm())


def true_gradients(batch: Batch, *, chunk: int = 64) -> tuple[float, Tensor, Tensor]:
    """The loss and both gradients by torch's cross-entropy in float64."""
    weight = batch.head.weight.detach().double().requires_grad_()
    states, targets = batch.hidden.detach().double()[0], batch.targets
    value, of_hidden = 0.0, torch.zeros_like(states)
    for start in range(0, len(states), chunk):
        rows = slice(start, start + chunk)
        leaf = states[rows].clone().requires_grad_()
        loss = F.cross_entropy(leaf @ weight.T, targets[rows], ignore_index=IGNORED, reduction="sum") / batch.supervised
        loss.backward()
        value, of_hidden[rows] = value + float(loss.detach()), leaf.grad
    return value, of_hidden, weight.grad


# --- a real model in the Trainer --------------------------------------------------------------------------------------


def make_trainer(model: PreTrainedModel, rows: list[Row], folder: str, device: str, **functions: Any) -> Trainer:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=len(rows),
            per_device_eval_batch_size=len(rows),
            max_steps=1,
            optim="sgd",
            learning_rate=0.0,  # the model is used again
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


def measure_trainer(sizes: Sizes, device: str) -> list[Row]:
    """Peaks of a step with each loss, of an evaluation from hidden states, and of the forward passes alone."""
    model, tokenizer = assets.smollm2()
    model.to(device)
    ids = tokenizer(assets.english_text())["input_ids"]
    pieces = [ids[start * sizes.length :][: sizes.length] for start in range(sizes.rows)]
    rows = [{"input_ids": piece, "labels": piece} for piece in pieces]
    inputs = torch.tensor(pieces, device=device)

    @torch.no_grad()
    def forward() -> None:
        model(input_ids=inputs, logits_to_keep=1)

    with tempfile.TemporaryDirectory() as folder:
        make = partial(make_trainer, model, rows, folder, device)
        found = {"step, stock loss": count(make().train, device)}
        with hidden_states(model) as source:
            functions = {
                "compute_loss_func": partial(causal_lm_loss, source=source),
                "preprocess_logits_for_metrics": partial(sample_sums, shift=1, source=source),
                "compute_metrics": lambda evaluated: {"tokens": float(evaluated.predictions["tokens"].sum())},
            }
            found["step, from hidden states"] = count(make(**functions).train, device)
            model.zero_grad()
            found["evaluation, from hidden states"] = count(make(**functions).evaluate, device)
        model.eval()
        found["forward alone, one logit a row"] = count(forward, device)
    logits = 4 * inputs.numel() * model.config.vocab_size
    return [{"trainer": name, "logits_bytes": logits, **peaks} for name, peaks in found.items()]


def count(fn: Callable[[], object], device: str) -> Row:
    """The process first, then the tensors: counting them slows down what the process is watched at."""
    return {"resident": resident_peak(fn, device=device), "peak": peak_bytes(fn).peak}


# --- the benchmark ----------------------------------------------------------------------------------------------------


def run(*, quick: bool, device: str) -> list[Row]:
    sizes = QUICK if quick else FULL
    rows: list[Row] = []
    for dtype in DTYPES:
        for share in ("all", "half"):
            harness.progress(f"hidden: {sizes.tokens} tokens, H {sizes.hidden}, {dtype}, {share} supervised")
            rows += measure(dtype, share, sizes, device)
    harness.progress("hidden: SmolLM2 in the Trainer")
    return rows + measure_trainer(sizes, device)


def report(results: Sequence[Result]) -> str:
    """The section of the report: what the issue asks for, then a table for each run."""
    parts = [
        "*Peak* is that of live tensor bytes above weights and one weight gradient, *process* the same of the resident "
        "set (GPU: of allocated memory), the logits of the stock loss released before backward as in the Trainer; "
        "*products* are multiplications with the vocabulary a supervised token. A float32 sum of a bfloat16 weight's "
        "gradient is in the peak. Errors are relative, in the Euclidean norm, against float64. Peers run once.",
    ]
    for result in results:
        parts += [f"### {harness.title(result)}", harness.provenance(result)]
        if not result.quick and result.device == "cpu":
            parts.append(harness.goals_table(goals(result.rows, result.allocator)))
        parts += [loss_table(result.rows), trainer_table(result.rows)]
    return "\n\n".join(parts)


TIME_LIMITS = {
    "default": {
        ("bfloat16", "all"): 0.90,
        ("bfloat16", "half"): 0.52,
        ("float32", "all"): 1.0,
        ("float32", "half"): 0.57,
    },
    "kept": {
        ("bfloat16", "all"): 1.05,
        ("bfloat16", "half"): 0.60,
        ("float32", "all"): 1.10,
        ("float32", "half"): 0.65,
    },
}
WEIGHT_ERROR_LIMITS = {"bfloat16": 1.5, "float32": 1.1}


def cases(rows: Sequence[Row]) -> Iterator[tuple[str, str, dict[str, Row]]]:
    """Each dtype and share with its rows by loss."""
    losses = [row for row in rows if "loss" in row]
    for dtype, share in dict.fromkeys((row["dtype"], row["supervised"]) for row in losses):
        yield dtype, share, {row["loss"]: row for row in losses if (row["dtype"], row["supervised"]) == (dtype, share)}


def goals(rows: Sequence[Row], allocator: str) -> list[Goal]:
    found = []
    for dtype, share, case in cases(rows):
        row, base = case[OURS], case[STOCK]
        where = f"{dtype}, {share} supervised"
        extra, extra_of_half = (row[name] - row["float32_sum"] for name in ("peak", "peak_of_half_the_tokens"))
        limit = TIME_LIMITS[allocator][dtype, share]
        found += [
            Goal(f"{where}: peak beside the float32 sum, over stock", 0.03, extra / case_of_all(rows, dtype)["peak"]),
            Goal(
                f"{where}: its growth, over that of the hidden states",
                2,
                2 * (extra - extra_of_half) / row["hidden_bytes"],
            ),
            Goal(f"{where}: products with the vocabulary a supervised token", 3, row["products"]),
            Goal(f"{where}: time over stock", limit, harness.ratio(row["seconds"], base["seconds"]).median),
            Goal(f"{where}: hidden gradient's error over stock's", 1.05, row["hidden_error"] / base["hidden_error"]),
            Goal(
                f"{where}: weight gradient's error over stock's",
                WEIGHT_ERROR_LIMITS[dtype],
                row["weight_error"] / base["weight_error"],
            ),
        ]
    trainer = {row["trainer"]: row for row in rows if "trainer" in row}
    logits = trainer["step, stock loss"]["logits_bytes"]
    saved = trainer["step, stock loss"]["resident"] - trainer["step, from hidden states"]["resident"]
    evaluation = trainer["evaluation, from hidden states"]["peak"] - trainer["forward alone, one logit a row"]["peak"]
    return [
        *found,
        Goal("SmolLM2, a step: logits not saved, of 2.5 float32 copies", 0.0, 2.5 - saved / logits),
        Goal("SmolLM2, evaluation: peak above the forward alone, in logits", 0.05, evaluation / logits),
    ]


def case_of_all(rows: Sequence[Row], dtype: str) -> Row:
    """The stock loss with every label supervised: what it needs does not depend on the labels."""
    return next(case[STOCK] for kind, share, case in cases(rows) if (kind, share) == (dtype, "all"))


def loss_table(rows: Sequence[Row]) -> str:
    header = (
        *("dtype", "labels", "loss", "time, s", "over stock", "peak, MiB", "of it the sum", "process, MiB", "products"),
        *("value's error", "hidden's", "weight's"),
    )
    lines = [_cells(row, case[STOCK]) for _, _, case in cases(rows) for row in case.values()]
    return harness.table(header, lines)


def _cells(row: Row, base: Row) -> list[str]:
    case = [row["dtype"], row["supervised"], row["loss"]]
    if "reason" in row:
        return [*case, row["reason"], *[""] * 8]
    few = base["seconds"][: len(row["seconds"])]
    memory = [f"{row[name] / MIB:.0f}" for name in ("peak", "float32_sum", "resident")]
    errors = [f"{row[name]:.2g}" for name in ("value_error", "hidden_error", "weight_error")]
    times = [f"{Spread.of(row['seconds']):.2f}", f"{harness.ratio(row['seconds'], few):.2f}"]
    return [*case, *times, *memory, f"{row['products']:.2f}", *errors]


def trainer_table(rows: Sequence[Row]) -> str:
    return harness.table(
        ("SmolLM2 in the Trainer", "process, MiB", "peak, MiB", "float32 logits, MiB"),
        [
            [row["trainer"], *(f"{row[name] / MIB:.0f}" for name in ("resident", "peak", "logits_bytes"))]
            for row in rows
            if "trainer" in row
        ],
    )


PACKAGES = ("torch", "transformers", "accelerate", "numpy")

if __name__ == "__main__":
    harness.main("hidden", run, PACKAGES)
