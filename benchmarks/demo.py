"""`make demo`: lossfns on real models in the stock Trainer, in under four minutes on two idle cores, offline.

SmolLM2-135M is fine-tuned on the State of the Union addresses up to 2008 and evaluated on later ones in five ways, each
with its memory sampled. Then MiniLM takes one training step with and without gradient accumulation.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import AutoModelForSequenceClassification, AutoTokenizer, EvalPrediction, logging, set_seed

import lossfns
import metrics
import reducers

from . import assets
from .evaluation import ACCUMULATED, ARGMAX, NOTHING, Counted, accuracy_of_ids, argmax_by_hand, make_trainer
from .harness import human_bytes, progress
from .memory import MemoryWatch

OUTPUT = Path(__file__).resolve().parents[1] / "output"
STEPS, ACCUMULATION, TRAIN_BATCH, TRAIN_TOKENS = 30, 2, 2, 64
EVAL_ROWS, EVAL_TOKENS, EVAL_BATCH = 64, 128, 8
TRAINED_LAYERS = 4
LAST_TRAINING_YEAR = 2008
REVIEWS = 32
COLOURS = ["#3d3d3d", "#8a8a8a", "#c98a2b", "#1f6fb4", "#63a9dd"]  # nothing, accumulated, argmax, lossfns, streaming

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Way:
    """One way to run the evaluation, and what was measured while it ran."""

    name: str
    metrics: dict[str, float]
    kept: int
    peak: int
    seconds: float
    samples: tuple[list[float], list[int]]


def main() -> None:
    began = time.perf_counter()
    for module in (lossfns, reducers, metrics):  # a metrics.py next to a script would shadow the package
        print(f"{module.__name__:9} from {module.__file__}")
    ways = evaluate_in_every_way()
    print(table(ways), end="\n\n")
    print(f"Picture: {picture(ways, OUTPUT / 'demo.png')}", end="\n\n")
    print_gradient_norms()
    print(f"\nDone in {time.perf_counter() - began:.0f} s.")


def evaluate_in_every_way() -> list[Way]:
    """Fine-tune SmolLM2-135M, evaluate it before and after, and then in every way."""
    set_seed(0)
    progress("Loading SmolLM2-135M and the State of the Union addresses ...")
    model, tokenizer = assets.smollm2()
    speeches = assets.sotu_speeches()
    earlier = [speech.text for speech in reversed(speeches) if speech.year <= LAST_TRAINING_YEAR]
    later = [speech.text for speech in speeches if speech.year > LAST_TRAINING_YEAR]
    rows = blocks(tokenizer, later, EVAL_ROWS, EVAL_TOKENS)
    model.requires_grad_(False)
    model.model.layers[-TRAINED_LAYERS:].requires_grad_(True)
    functions = {
        "compute_loss_func": lossfns.causal_lm_loss,
        "preprocess_logits_for_metrics": partial(reducers.sample_sums, shift=1, top_k=5),
        "compute_metrics": metrics.language_modeling(),
    }
    streaming = {"compute_metrics": metrics.build(metrics.language_modeling(), num_samples=EVAL_ROWS)}
    before = evaluate("before training", model, rows, **functions)
    progress(f"Fine-tuning, {STEPS} steps ...")
    options = {"batch": TRAIN_BATCH, "max_steps": STEPS, "gradient_accumulation_steps": ACCUMULATION}
    train = blocks(tokenizer, earlier, STEPS * ACCUMULATION * TRAIN_BATCH, TRAIN_TOKENS)
    options |= {"learning_rate": 3e-4, "warmup_steps": 3, "compute_loss_func": lossfns.causal_lm_loss}
    make_trainer(model, train, **options).train()
    # From the smallest to the largest, so that no way reuses memory that an earlier one left to the allocator.
    ways = [
        evaluate("lossfns, streaming", model, rows, **functions | streaming, batch_eval_metrics=True),
        evaluate("lossfns", model, rows, **functions),
        evaluate(ARGMAX, model, rows, preprocess_logits_for_metrics=argmax_by_hand, compute_metrics=accuracy_of_ids),
        evaluate(ACCUMULATED, model, rows, compute_metrics=metrics_of_logits, eval_accumulation_steps=1),
        evaluate(NOTHING, model, rows, compute_metrics=metrics_of_logits),
    ]
    print(f"\n{EVAL_ROWS} x {EVAL_TOKENS} tokens of later addresses     before      after")
    for key in ("nll_loss", "perplexity", "token_accuracy", "top_5_accuracy"):
        print(f"  {key:36}{before.metrics[key]:10.3f} {ways[1].metrics[key]:10.3f}")
    return ways[::-1]


def blocks(tokenizer: Any, texts: list[str], rows: int, length: int) -> Rows:
    """Return the texts' ids in rows of equal length."""
    ids = chain.from_iterable(tokenizer(text)["input_ids"] for text in texts)
    pieces = [list(islice(ids, length)) for _ in range(rows)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def evaluate(name: str, model: Any, rows: Rows, *, compute_metrics: Callable[..., Any], **options: Any) -> Way:
    """Run `Trainer.evaluate` once, counting the predictions it keeps and sampling the memory of the process."""
    progress(f"Evaluating: {name} ...")
    counted = Counted(compute_metrics)
    trainer = make_trainer(model, rows, batch=EVAL_BATCH, compute_metrics=counted, **options)
    began = time.perf_counter()
    with MemoryWatch() as memory:
        found = trainer.evaluate()
    return Way(
        name=name,
        metrics={key.removeprefix("eval_"): value for key, value in found.items()},
        kept=counted.bytes,
        peak=memory.peak,
        seconds=time.perf_counter() - began,
        samples=(memory.seconds, memory.bytes),
    )


def metrics_of_logits(evaluated: EvalPrediction) -> dict[str, float]:
    """Compute the same numbers from the logits, one row at a time to save memory."""
    nll = correct = in_top_5 = tokens = 0.0
    for logits, labels in zip(evaluated.predictions, evaluated.label_ids, strict=True):
        scores, targets = torch.from_numpy(logits[:-1]), torch.from_numpy(labels[1:])
        best = scores.topk(5).indices == targets[:, None]
        nll += torch.nn.functional.cross_entropy(scores, targets, reduction="sum").item()
        correct += best[:, 0].sum().item()
        in_top_5 += best.any(dim=1).sum().item()
        tokens += len(targets)
    return {"nll_loss": nll / tokens, "token_accuracy": correct / tokens, "top_5_accuracy": in_top_5 / tokens}


def table(ways: list[Way]) -> str:
    """Return one line per way; a dash marks a score that cannot be computed from what was kept."""
    lines = [f"\n{'':26}{'peak memory':>14}{'kept':>12}{'time':>9}{'nats':>9}{'accuracy':>10}{'top 5':>8}"]
    for way in ways:
        nats, right, top_5 = (
            f"{way.metrics[key]:.3f}" if key in way.metrics else "-"
            for key in ("nll_loss", "token_accuracy", "top_5_accuracy")
        )
        peak = "+" + human_bytes(way.peak)
        lines.append(
            f"{way.name:26}{peak:>14}{human_bytes(way.kept):>12}{way.seconds:>7.0f} s{nats:>9}{right:>10}{top_5:>8}"
        )
    lines += [
        "",
        "peak memory: largest resident memory of the process during evaluate(), above its start (sampled)",
        "kept: most bytes of predictions passed to compute_metrics in one call",
        "nats: loss per token; accuracy, top 5: of the next token; -: cannot be computed from what was kept",
    ]
    return "\n".join(lines)


def picture(ways: list[Way], path: Path) -> Path:
    """Save the memory over time and its peaks, one colour per way, with the finding as the title."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    figure.suptitle(finding(ways) + "\n", fontsize=14, fontweight="bold", x=0.01, ha="left")
    over_time, peaks = figure.subplots(1, 2, width_ratios=[1.3, 1])
    for place, (way, colour) in enumerate(zip(ways, COLOURS, strict=True)):
        seconds, sampled = way.samples
        over_time.plot(seconds, [count / 1e9 for count in sampled], color=colour, linewidth=1.6)
        over_time.plot(seconds[sampled.index(way.peak)], way.peak / 1e9, "o", color=colour, markersize=6)
        peaks.barh(place, way.peak, color=colour, height=0.6)
        label = f"{human_bytes(way.peak)}, keeps {human_bytes(way.kept)}"
        peaks.annotate(label, (way.peak, place), (5, 0), textcoords="offset points", va="center", fontsize=11)
    over_time.set_title("Memory above the start of evaluate()", loc="left", fontsize=12)
    over_time.set_xlabel("seconds")
    over_time.yaxis.set_major_formatter(lambda count, _: f"{count:g} GB" if count else "0")
    over_time.set(xlim=(0, None), ylim=(0, None))
    peaks.set_title("Peak memory, and predictions kept", loc="left", fontsize=12)
    peaks.invert_yaxis()
    peaks.set_xlim(0, 1.7 * max(way.peak for way in ways))
    peaks.set_xticks([])
    peaks.set_yticks(range(len(ways)), [way.name for way in ways], fontsize=11)
    for axes in (over_time, peaks):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def finding(ways: list[Way]) -> str:
    """Return the finding: the peak with nothing configured and that with lossfns."""
    nothing, *_, ours, _streaming = (human_bytes(way.peak) for way in ways)
    size = f"{EVAL_ROWS} × {EVAL_TOKENS} tokens"
    return f"lossfns evaluates SmolLM2-135M in {ours} instead of {nothing} of memory (stock Trainer, {size})"


def print_gradient_norms() -> None:
    """Print the norm of MiniLM's gradient on film reviews, in one batch and in four accumulated ones."""
    logging.set_verbosity_error()  # the head is new on purpose
    tokenizer = AutoTokenizer.from_pretrained(assets.minilm_path())
    rows = [dict(tokenizer(review.text)) | {"labels": review.mean} for review in assets.rated_texts()[:REVIEWS]]
    config = {"num_labels": 1, "problem_type": "regression", "hidden_dropout_prob": 0.0}
    config |= {"attention_probs_dropout_prob": 0.0}
    print(f"MiniLM, norm of the gradient on {REVIEWS} film reviews    1 batch   4 accumulated")
    for name, loss in {"stock squared error": None, "regression_loss": lossfns.regression_loss}.items():
        norms = []
        for accumulation in (1, 4):
            set_seed(0)
            model = AutoModelForSequenceClassification.from_pretrained(assets.minilm_path(), **config)
            options = {"gradient_accumulation_steps": accumulation, "max_steps": 1, "logging_steps": 1}
            options |= {"processing_class": tokenizer, "compute_loss_func": loss}
            trainer = make_trainer(model, rows, batch=REVIEWS // accumulation, **options)
            trainer.train()
            norms += [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
        print(f"  {name:48}{norms[0]:7.2f} {norms[1]:15.2f}")


if __name__ == "__main__":
    try:
        main()
    except FileNotFoundError as error:
        sys.exit(f"A file is missing: {error}")
