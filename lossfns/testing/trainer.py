"""A look at a Trainer before it runs: one batch, no training, and all that would go wrong without a word.

A finding is a function of what the batch showed: it yields facts, and problems with what to do about them. The list
`CHECKS` at the end is the order of the table.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import regression
from .._core.checks import IGNORED
from .._core.combined import plain_name
from .._core.signature import STATISTICS
from ..training import WatchedLoss
from .dry_run import Look, by_position, leaves, look

# As in pyproject.toml: those in between divide every gradient by the accumulation steps once more.
SUPPORTED = ">=4.57.1,!=5.2.*,!=5.3.*,!=5.4.*,!=5.5.0,!=5.5.1,!=5.5.2,!=5.5.3"
LARGE = 1 << 30  # bytes that an evaluation may keep unasked
CACHES = ("past_key_values", "cache")  # up to transformers 5.23, and since
OPTIONAL_OUTPUTS = ("hidden_states", "attentions", "cross_attentions", *CACHES)
SIGNATURES = {"lossfns": "token_statistics", "reducers": "sample_sums", "metrics": "best_model_kwargs"}


@dataclass(frozen=True)
class Finding:
    """A fact about a Trainer, or a problem: then `fix` says what to do."""

    found: str
    fix: str | None = None


Findings = Iterator[Finding]


@dataclass(frozen=True)
class TrainerReport:
    """All findings, each under the name of its check."""

    findings: tuple[tuple[str, Finding], ...]

    @property
    def problems(self) -> tuple[tuple[str, Finding], ...]:
        """The findings that ask for a change."""
        return tuple(pair for pair in self.findings if pair[1].fix is not None)

    def __str__(self) -> str:
        number = len(self.problems)
        width = max(map(len, (name for name, _ in self.findings)), default=0)
        lines = [f"check_trainer: {number or 'no'} problem{'' if number == 1 else 's'}"]
        for name, finding in self.findings:
            lines.append(f"{' ' if finding.fix is None else '!'} {name:{width}}  {finding.found}")
            if finding.fix is not None:
                lines.append(f"  {'':{width}}  -> {finding.fix}")
        return "\n".join(lines)


def check_trainer(trainer: Any, strict: bool = False) -> TrainerReport:
    """Take one batch through a Trainer's loss, reducer and metric, and print a table of what they meet.

    Nothing is trained: the model, the Trainer and all random numbers are left as they were. In several processes all of
    them have to call, and the first one prints.

    Args:
        trainer: a `transformers.Trainer`, before or after training.
        strict: raise if there is a problem.

    Returns:
        What was printed.

    Raises:
        AssertionError: there is a problem, and `strict` is True.

    Example:
        >>> from lossfns.testing import check_trainer
        >>> def ready(trainer):
        ...     return not check_trainer(trainer).problems
    """
    seen = look(trainer)
    report = TrainerReport(
        tuple((check.__name__.replace("_", " "), finding) for check in CHECKS for finding in check(seen))
    )
    if trainer.is_world_process_zero():
        print(report)
    if strict and report.problems:
        raise AssertionError(str(report))
    return report


# --- what is installed -----------------------------------------------------------------------------------------------


def packages(seen: Look) -> Findings:
    """Where the packages come from: a `metrics.py` beside the script shadows ours."""
    for name, known in SIGNATURES.items():
        try:
            module = importlib.import_module(__package__.rpartition(".")[0] if name == "lossfns" else name)
        except ImportError:
            yield Finding(f"{name} is not installed")
            continue
        place = getattr(module, "__file__", None)
        fix = None if hasattr(module, known) else f"another module of that name is in the way: rename {place}"
        yield Finding(f"{name} from {place}", fix)


def releases(seen: Look) -> Findings:
    """Releases of transformers in which no loss function can be right."""
    import transformers
    from packaging.specifiers import SpecifierSet

    release = transformers.__version__
    supported = SpecifierSet(SUPPORTED).contains(release, prereleases=True)
    fix = f"install a release out of {SUPPORTED}: others count otherwise or divide gradients twice"
    yield Finding(f"transformers {release}, torch {torch.__version__}", None if supported else fix)


# --- batch, count and loss -------------------------------------------------------------------------------------------


def decoder_inputs(seen: Look) -> Findings:
    """An encoder-decoder gets decoder inputs: it cannot make them of labels it does not see."""
    given = {"decoder_input_ids", "decoder_inputs_embeds"} & {*seen.batch}
    if seen.trainer.compute_loss_func is not None and seen.batch and _is_encoder_decoder(seen) and not given:
        yield Finding(
            "no decoder_input_ids: the model fails, or is trained to repeat its source",
            "wrap the collator in lossfns.collators.with_decoder_inputs(collator, model)",
        )


def raised(seen: Look) -> Findings:
    """What was raised on the way."""
    advice = {
        "batch": "the collator and the dataset have to give a batch: see the message",
        "count": "the Trainer has to be able to count the labels, or shift_labels beside them: see the message",
        "forward": "the model has to take this batch without its labels, which the Trainer gives to the loss alone",
        "loss": _loss_cure(seen) or "the loss has to fit this model and these labels: see the message",
        "evaluation": "the model has to take this batch in evaluation: see the message",
        "reducer": "preprocess_logits_for_metrics has to fit what reaches it: see the message",
        "metric": _metric_cure(seen) or "compute_metrics has to fit what the reducer returns: see the message",
    }
    if next(decoder_inputs(seen), None) is not None:
        advice |= dict.fromkeys(("forward", "evaluation"), "add the decoder inputs first")
    # From Python 3.12 on a dict of labels raises where it is counted, and again in evaluation; `count` says what to do.
    told = seen.errors.get("count") if isinstance(seen.labels, Mapping) and "given" in seen.losses else None
    for stage, message in seen.errors.items():
        if message != told:
            yield Finding(f"{stage} raised {message}", advice[stage])


def _loss_cure(seen: Look) -> str | None:
    """Of a function that is no loss: a term, or one that does not take the count."""
    try:
        taken = inspect.signature(seen.trainer.compute_loss_func).parameters
    except (TypeError, ValueError):
        return None
    if "num_items_in_batch" in taken or any(option.kind is option.VAR_KEYWORD for option in taken.values()):
        return None
    ids = seen.label_ids
    tokens = "causal_lm_loss" if ids is not None and ids.ndim == 2 else "classification_loss"
    own = {"outcome": "multi_label_loss", **dict.fromkeys(regression.STATISTICS, "regression_loss")}
    for statistic, loss in (own | dict.fromkeys(STATISTICS, tokens)).items():
        if statistic in taken:
            name = plain_name(seen.trainer.compute_loss_func)
            return f"{name} is a term, which a loss takes: compute_loss_func=partial({loss}, term={name})"
    return "a loss takes (outputs, labels, num_items_in_batch=None)"


def _metric_cure(seen: Look) -> str | None:
    """Of a function that makes a metric and was not called."""
    metric = seen.trainer.compute_metrics
    if not inspect.isfunction(metric):
        return None
    made = inspect.signature(metric).return_annotation
    is_maker = getattr(made, "__name__", made) == "Metric"
    return f"{metric.__name__} makes a metric: call it, compute_metrics={metric.__name__}(...)" if is_maker else None


def labels(seen: Look) -> Findings:
    """Labels reach the loss."""
    if not seen.batch:
        return
    if seen.trainer.compute_loss_func is not None and seen.batch.get("labels") is None:
        yield Finding(
            f"the batch has no 'labels' for the loss: {', '.join(seen.batch)}",
            "call the column 'labels', keep it (remove_unused_columns=False), or let the collator add it (question "
            "answering: lossfns.collators.pack_spans)",
        )
    ids = seen.label_ids
    if ids is None:
        return
    yield Finding(f"labels {_described(ids)}, {int((ids != IGNORED).sum())} of {ids.numel()} count")
    if not bool((ids != IGNORED).any()):
        yield Finding("every label of the batch is -100", "nothing is learnt from it: look at prompts and truncation")


def padding(seen: Look) -> Findings:
    """Padding has no labels."""
    ids, mask = seen.label_ids, seen.batch.get("attention_mask")
    if ids is None or not isinstance(mask, Tensor) or mask.shape != ids.shape or _is_encoder_decoder(seen):
        return
    wrong = int(((mask == 0) & (ids != IGNORED)).sum())
    if wrong:
        yield Finding(
            f"{wrong} labels stand on padding and are learnt and counted",
            "pad labels with -100: DataCollatorForSeq2Seq and DataCollatorForLanguageModeling do",
        )


def count(seen: Look) -> Findings:
    """The Trainer counts what the loss sums, and the loss divides by the count."""
    if seen.trainer.compute_loss_func is None or "given" not in seen.losses:
        return
    steps, scaled = seen.trainer.args.gradient_accumulation_steps, getattr(seen.trainer, "loss_is_scaled_for_ga", None)
    if seen.count is None:
        if isinstance(seen.labels, Mapping):
            yield Finding(
                "the Trainer does not count a dict of labels",
                "let the collator add shift_labels beside it, as lossfns.collators.with_extras does",
            )
        elif seen.labels is None and steps > 1 and scaled is not False:
            yield Finding(
                f"without labels nothing is counted: {steps} micro-batches add up to a step {steps} times too large",
                "let the collator add 'labels', an id a sample, with TrainingArguments(label_names=['labels'])",
            )
        return
    number = float(torch.as_tensor(seen.count).double().mean())
    yield Finding(f"the Trainer counts {number:g} items")
    windows = steps * seen.trainer.args.world_size
    if windows > 1 and scaled is not False and _same(seen, "twice"):
        yield Finding(
            f"the loss does not divide by num_items_in_batch: gradients are up to {windows} times too large",
            "return sum / num_items_in_batch, or use a loss of lossfns; check_loss shows more",
        )
    ids = seen.label_ids
    if ids is not None and ids.ndim == 2 and seen.trainer.args.world_size == 1 and _same(seen, "first"):
        every, scored = int((ids != IGNORED).sum()), int((ids[:, 1:] != IGNORED).sum())
        if number == every != scored and seen.right_shift != 0:  # otherwise the shift is wrong, not the count
            yield Finding(
                f"the loss reads {scored} labels and is divided by {every}: this class is counted unshifted",
                "wrap the collator in lossfns.collators.mask_first_label",
            )


def loss(seen: Look) -> Findings:
    """The loss is one finite number."""
    value = seen.losses.get("given")
    if value is None:
        return
    if not isinstance(value, Tensor) or value.ndim:
        kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        yield Finding(f"the loss is of {kind}", "return a 0-d tensor: sum over the items, then divide")
    elif not bool(value.isfinite()):
        yield Finding(f"the loss is {value.item()}", "look at the logits and the labels of this batch")
    else:
        yield Finding(f"the loss of this batch is {value.item():.4g}")


def shift(seen: Look) -> Findings:
    """Loss and reducer read the logit that predicts a label: the one that has seen it always knows."""
    right = seen.right_shift
    for who, read in seen.shifts.items():
        if right is None or not read or right in read:
            continue
        where = "the inputs, predicted by the logits 1 before" if right else "hidden there, predicted by their own"
        yield Finding(
            f"{who} reads the logit {_places(read)} each label (shift={max(read)}), but the labels are {where}",
            _shift_cure(seen, who, right),
        )
    both = [read for read in seen.shifts.values() if read]
    if right is None and len(both) == 2 and not both[0] & both[1]:
        yield Finding(
            " and ".join(f"{who} reads the logit {_places(read)} each label" for who, read in seen.shifts.items()),
            "give both the same shift: 1 for a causal model, 0 for any other",
        )


def _places(read: set[int]) -> str:
    return f"{max(read)} before" if max(read) else "at"


def _shift_cure(seen: Look, who: str, right: int) -> str:
    if who == "the reducer":
        return f"preprocess_logits_for_metrics=partial(reducers.sample_sums, shift={right}), or of the reducer you use"
    if right == 1:
        return "a causal model: causal_lm_loss, or shift=1"
    if _is_encoder_decoder(seen):
        return "encoder-decoder: seq2seq_lm_loss, and shift=0 in the reducer"
    return "masked_lm_loss, or shift=0; where the collator shifts labels of a causal model, leave that to the loss"


def label_smoothing(seen: Look) -> Findings:
    """The Trainer's own smoothing is not silently ignored."""
    factor = seen.trainer.args.label_smoothing_factor
    if factor and seen.trainer.compute_loss_func is not None:
        yield Finding(
            f"label_smoothing_factor={factor} is ignored beside compute_loss_func",
            f"use term=partial(smoothed_cross_entropy, label_smoothing={factor}), or label_smoothing= of the "
            "classification losses, and drop the argument",
        )


def training_metrics(seen: Look) -> Findings:
    """What a watched loss measures is logged."""
    loss, callbacks = seen.trainer.compute_loss_func, seen.trainer.callback_handler.callbacks
    attached = [getattr(callback, "metrics", None) for callback in callbacks]
    if isinstance(loss, WatchedLoss) and all(metrics is not loss.metrics for metrics in attached):
        yield Finding("what watch(loss, metrics) measures is never logged", "metrics.attach(trainer)")


def auxiliary_loss(seen: Look) -> Findings:
    """The balancing term of a mixture of experts is not dropped."""
    if "auxiliary" in seen.losses and _same(seen, "auxiliary"):
        yield Finding(
            "the model computes an aux_loss, and the loss leaves it out",
            'with_auxiliary(loss, "aux_loss", model.config.router_aux_loss_coef), or output_router_logits=False',
        )


def logits(seen: Look) -> Findings:
    """The model returns logits, by name."""
    if seen.outputs is None:
        return
    if not isinstance(seen.outputs, Mapping):
        yield Finding(
            f"the model returns a {type(seen.outputs).__name__}, whose first entry the evaluation drops",
            "return a dict or a ModelOutput",
        )
    elif seen.trainer.compute_loss_func is not None and all(seen.outputs.get(name) is None for name in _HEADS):
        yield Finding(
            f"the model returns no logits: {', '.join(seen.outputs)}",
            "set use_liger_kernel=False (or whatever fuses head and loss), or source=hidden_states(model)",
        )
    if seen.trainer.args.use_liger_kernel and seen.trainer.compute_loss_func is not None:
        yield Finding(
            "use_liger_kernel takes the logits away in an evaluation of the loss alone",
            "set use_liger_kernel=False, or liger_kernel_config with the fused linear cross-entropy off",
        )


_HEADS = ("logits", "start_logits", "logits_per_image", "prediction_logits")


# --- evaluation ------------------------------------------------------------------------------------------------------


def metric_runs(seen: Look) -> Findings:
    """`compute_metrics` is called at all."""
    trainer = seen.trainer
    if trainer.compute_metrics is None or not seen.batch:
        return
    if trainer.args.prediction_loss_only:
        yield Finding("prediction_loss_only=True: compute_metrics is never called", "drop one of the two")
    missing = [name for name in trainer.label_names if seen.batch.get(name) is None]
    if missing or not trainer.label_names:
        yield Finding(
            f"compute_metrics is never called: the Trainer looks for {', '.join(trainer.label_names) or 'no labels'}, "
            f"the batch has {', '.join(seen.batch)}",
            'TrainingArguments(label_names=["labels"]), or the names of your labels',
        )


def kept_outputs(seen: Look) -> Findings:
    """No hidden states, attentions or caches among what an evaluation keeps."""
    if seen.logits is None or not isinstance(seen.outputs, Mapping):
        return
    ignored = _ignored(seen)
    there = [name for name in seen.outputs if name in OPTIONAL_OUTPUTS and name not in ignored]
    if there:
        size = _size(sum(_bytes(seen.outputs[name]) for name in there))
        yield Finding(
            f"{', '.join(there)}, {size} a batch, reach the evaluation beside the logits",
            f"switch them off in model.config, or model.config.keys_to_ignore_at_inference = {[*ignored, *there]}",
        )


def reducer(seen: Look) -> Findings:
    """What reaches the reducer, and whether the Trainer can keep what it returns."""
    if seen.logits is None:
        return
    yield Finding(f"given {_described(_named_logits(seen))}, {_size(_bytes(seen.logits))} a batch")
    if "reducer" in seen.errors or seen.trainer.preprocess_logits_for_metrics is None:
        return
    yield Finding(f"returns {_described(seen.reduced)}, {_size(_bytes(seen.reduced))} a batch")
    try:
        from reducers._reduce import batch_rows, check_rows
    except ImportError:
        return
    try:
        check_rows("it", seen.reduced, batch_rows(seen.logits, seen.eval_labels))
    except (TypeError, ValueError) as error:
        message, _, fix = str(error).partition(": ")
        yield Finding(message, fix or "return tensors, batch first")


def probabilities(seen: Look) -> Findings:
    """No softmax over labels that hold side by side."""
    labels = seen.eval_labels
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.shape[1] < 2:
        return
    several = bool(((labels == 0) | (labels == 1)).all()) and bool((labels.sum(1) != 1).any())
    for part in leaves(seen.reduced) if several else ():
        shares = part.shape == labels.shape and part.is_floating_point() and bool((part >= 0).all())
        if shares and torch.allclose(part.double().sum(1), torch.ones(len(part), dtype=torch.float64), atol=1e-3):
            yield Finding(
                "the probabilities of a row sum to 1, but several of its labels may hold, or none",
                "preprocess_logits_for_metrics=partial(reducers.probabilities, multi_label=True)",
            )


def memory(seen: Look) -> Findings:
    """What is kept of the whole evaluation set."""
    args = seen.trainer.args
    if seen.reduced is None or not seen.samples:
        return
    rows = min(seen.samples, args.per_device_eval_batch_size)
    kept = 0 if args.batch_eval_metrics else _bytes(seen.reduced) * seen.samples // rows
    peak = 2 * kept + _bytes(seen.logits)
    fix = (
        "give a reducer that keeps a few numbers a sample: preprocess_logits_for_metrics=partial(reducers.sample_sums, "
        "shift=...); eval_accumulation_steps only moves the problem to host memory"
    )
    yield Finding(
        f"keeps {_size(kept)} of {seen.samples} samples, at its peak {_size(peak)} with one batch of logits",
        fix if kept > LARGE else None,
    )


def scores(seen: Look) -> Findings:
    """What the metric returns can be logged and saved."""
    if seen.scores is None:
        return
    if not isinstance(seen.scores, Mapping):
        fix = _metric_cure(seen) or "return a dict of floats"
        yield Finding(f"compute_metrics returns a {type(seen.scores).__name__}", fix)
        return
    yield Finding(f"scores {', '.join(seen.scores) or 'nothing'}")
    for name, value in seen.scores.items():
        if not isinstance(value, (int, float)) and getattr(value, "size", 0) != 1:
            yield Finding(
                f"the score '{name}' is a {type(value).__name__}: the first checkpoint fails on it",
                f"return one float a key: split '{name}' into several",
            )
        if _is_taken(str(name)):
            yield Finding(f"the score '{name}' and the Trainer's own overwrite each other", "rename it")


def best_model(seen: Look) -> Findings:
    """The metric that chooses the best model exists, and points the right way."""
    args, metric, name = seen.trainer.args, seen.metric, seen.trainer.args.metric_for_best_model
    if name is None:
        return
    key = name.removeprefix("eval_")
    for dataset in seen.trainer.eval_dataset if isinstance(seen.trainer.eval_dataset, dict) else ():
        key = key.removeprefix(f"{dataset}_")
    if key == "loss":
        return
    if metric is None or (seen.scores is not None and key not in seen.scores):
        there = ", ".join(seen.scores or ()) or "the loss alone"
        yield Finding(
            f"metric_for_best_model='{name}' is no score of this evaluation: {there}",
            "name one of them, or give a compute_metrics that returns it",
        )
        return
    greater = _direction(key, metric)
    if greater is not None and greater is not args.greater_is_better:
        yield Finding(
            f"the checkpoint with the worst {key} is kept: greater_is_better={args.greater_is_better}",
            f'TrainingArguments(**best_model_kwargs("{key}")) of the package metrics',
        )


def streaming(seen: Look) -> Findings:
    """A metric that is called step by step can be, and knows how many samples make an evaluation."""
    metric = seen.metric
    if metric is None:
        return
    number = getattr(metric, "num_samples", None)
    if number is not None and seen.samples is not None and number != seen.samples:
        yield Finding(
            f"the metric expects {number} samples, the evaluation set has {seen.samples}",
            "build(..., num_samples=len(eval_dataset))",
        )
    if not seen.trainer.args.batch_eval_metrics:
        return
    if getattr(metric, "whole", None):
        yield Finding(f"the metric cannot stream: {metric.whole}", "drop batch_eval_metrics")
    elif hasattr(metric, "num_samples") and number is None:
        yield Finding(
            "a streaming metric does not know when an evaluation is complete",
            "build(metric, num_samples=len(eval_dataset))",
        )


def order(seen: Look) -> Findings:
    """Samples come in the order of the dataset where somebody relies on it."""
    args = seen.trainer.args
    grouped = getattr(args, "train_sampling_strategy", None) == "group_by_length" or getattr(
        args, "group_by_length", False
    )
    if grouped and seen.metric is not None:
        fix = "carry what belongs to a row in its labels, or drop the grouping" if by_position(seen.metric) else None
        yield Finding("grouping by length reorders the evaluation: row i is not row i of the dataset", fix)


def processes(seen: Look) -> Findings:
    """Settings of several processes that cost memory or exactness."""
    args = seen.trainer.args
    if args.world_size < 2:
        return
    unused = args.ddp_find_unused_parameters
    if unused or (unused is None and not args.gradient_checkpointing):
        yield Finding(
            "ddp_find_unused_parameters clones every output of the model, the logits too",
            "TrainingArguments(ddp_find_unused_parameters=False), unless parts of the model get no gradient",
        )
    if not args.average_tokens_across_devices:
        yield Finding(
            "average_tokens_across_devices=False: each process divides by its own count",
            "leave it at True: the loss is then that of the whole batch",
        )


CHECKS: tuple[Callable[[Look], Findings], ...] = (
    packages,
    releases,
    decoder_inputs,
    raised,
    labels,
    padding,
    count,
    loss,
    shift,
    label_smoothing,
    training_metrics,
    auxiliary_loss,
    logits,
    metric_runs,
    kept_outputs,
    reducer,
    probabilities,
    memory,
    scores,
    best_model,
    streaming,
    order,
    processes,
)


# --- shared ----------------------------------------------------------------------------------------------------------


def _same(seen: Look, name: str) -> bool:
    """Was the loss the same, and not 0, in another call?"""
    given, other = seen.losses.get("given"), seen.losses.get(name)
    if not isinstance(given, Tensor) or not isinstance(other, Tensor) or given.shape != other.shape:
        return False
    return bool(given.abs().sum() > 0) and torch.allclose(given, other, rtol=1e-6, atol=0.0)


def _is_encoder_decoder(seen: Look) -> bool:
    return bool(getattr(getattr(seen.trainer.model, "config", None), "is_encoder_decoder", False))


def _ignored(seen: Look) -> list[str]:
    """Outputs that an evaluation leaves out."""
    config = getattr(seen.trainer.model, "config", None)
    return list(getattr(config, "keys_to_ignore_at_inference", CACHES))


def _named_logits(seen: Look) -> Any:
    """What reaches the reducer, by the names that the model gave."""
    names = [name for name in seen.outputs or () if isinstance(name, str) and name not in (*_ignored(seen), "loss")]
    values = seen.logits if isinstance(seen.logits, tuple) else (seen.logits,)
    return dict(zip(names, values, strict=True)) if len(names) == len(values) else seen.logits


def _direction(key: str, metric: Any) -> bool | None:
    """Is greater better, as far as the metrics of this project know?"""
    try:
        from metrics import best_model_kwargs

        return best_model_kwargs(key, metric if hasattr(metric, "directions") else None)["greater_is_better"]
    except (ImportError, ValueError):
        return None


def _is_taken(name: str) -> bool:
    """Does the Trainer write a score of this name itself, as far as the metrics of this project know?"""
    try:
        from metrics._keys import check_free

        check_free([name])
    except ImportError:
        return False
    except ValueError:
        return True
    return False


def _described(tree: Any) -> str:
    """Names, shapes and dtypes of nested tensors."""
    if isinstance(tree, Tensor):
        return f"{tuple(tree.shape)} {str(tree.dtype).removeprefix('torch.')}"
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{name}: {_described(value)}" for name, value in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        return "(" + ", ".join(map(_described, tree)) + ")"
    return type(tree).__name__


def _bytes(tree: Any) -> int:
    return sum(part.numel() * part.element_size() for part in leaves(tree))


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"
