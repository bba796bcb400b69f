"""check_trainer: rules for a Trainer, applied to one batch before it trains.

Most mistakes in the setup of a Trainer raise no error but give wrong numbers or exhaust the memory. Each rule is a
function `rule(run)` of the results of one batch, which yields findings: facts, and problems with what to change. The
rules are listed in `RULES`, which is also the order of the printed table.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.checks import IGNORED
from .._core.combined import function_name
from .._core.signature import STATISTICS
from ..regression import REGRESSION_INPUTS
from ..training import WatchedLoss
from .dry_run import DryRun, dry_run
from .tasks import tensors

# The same as in pyproject.toml. The excluded releases divide every gradient by the accumulation steps twice.
SUPPORTED = ">=4.57.1,!=5.2.*,!=5.3.*,!=5.4.*,!=5.5.0,!=5.5.1,!=5.5.2,!=5.5.3"
LARGE = 1 << 30  # bytes that an evaluation may keep without a warning
CACHES = ("past_key_values", "cache")  # up to transformers 5.23, and since
OPTIONAL_OUTPUTS = ("hidden_states", "attentions", "cross_attentions", *CACHES)
LOGITS = ("logits", "start_logits", "logits_per_image", "prediction_logits")
SIGNATURES = {"lossfns": "token_statistics", "reducers": "sample_sums", "metrics": "best_model_kwargs"}


@dataclass(frozen=True)
class Finding:
    """A fact about a Trainer, or a problem if there is a `fix`."""

    found: str
    fix: str | None = None


Findings = Iterator[Finding]


@dataclass(frozen=True)
class TrainerReport:
    """All findings, each with the name of its rule."""

    findings: tuple[tuple[str, Finding], ...]

    @property
    def problems(self) -> tuple[tuple[str, Finding], ...]:
        """The findings that need a change."""
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
    """Take one batch through the loss, reducer and metric of a Trainer and print what it finds.

    Nothing is trained: the model, the Trainer and all random number generators are left unchanged. With several
    processes all of them must call this function, and the first one prints.

    Args:
        trainer: a `transformers.Trainer`, before or after training.
        strict: whether to raise an error if there is a problem.

    Returns:
        The report that was printed.

    Raises:
        AssertionError: there is a problem, and `strict` is True.

    Example:
        >>> from lossfns.testing import check_trainer
        >>> def ready(trainer):
        ...     return not check_trainer(trainer).problems
    """
    run = dry_run(trainer)
    report = TrainerReport(tuple((rule.__name__.replace("_", " "), finding) for rule in RULES for finding in rule(run)))
    if trainer.is_world_process_zero():
        print(report)
    if strict and report.problems:
        raise AssertionError(str(report))
    return report


# --- what is installed -----------------------------------------------------------------------------------------------


def packages(run: DryRun) -> Findings:
    """Check that no other module, such as a `metrics.py` next to the script, hides one of the packages."""
    prefix = __package__.removesuffix("lossfns.testing")  # a vendored copy checks the copies next to it
    for name, known in SIGNATURES.items():
        try:
            module = importlib.import_module(prefix + name)
        except ImportError:
            yield Finding(f"{name} is not installed")
            continue
        file = getattr(module, "__file__", None)
        yield Finding(
            f"{name} from {file}", None if hasattr(module, known) else f"another module {name}: rename {file}"
        )


def releases(run: DryRun) -> Findings:
    """Check that the release of transformers is supported."""
    import transformers
    from packaging.specifiers import SpecifierSet

    release = transformers.__version__
    supported = SpecifierSet(SUPPORTED).contains(release, prereleases=True)
    fix = f"install a release in {SUPPORTED}: others count items differently or divide gradients twice"
    yield Finding(f"transformers {release}, torch {torch.__version__}", None if supported else fix)


# --- batch, count and loss -------------------------------------------------------------------------------------------


def decoder_inputs(run: DryRun) -> Findings:
    """Check that an encoder-decoder gets decoder inputs, which it cannot derive from labels that it does not get."""
    given = {"decoder_input_ids", "decoder_inputs_embeds"} & {*run.batch}
    if run.trainer.compute_loss_func is not None and run.batch and run.is_encoder_decoder and not given:
        problem = "the batch has no decoder_input_ids: the model fails, or is trained to copy its input"
        yield Finding(problem, "wrap the collator in lossfns.collators.with_decoder_inputs(collator, model)")


def raised(run: DryRun) -> Findings:
    """Check that no step raises an error."""
    fixes = {
        "batch": "the collator and the dataset must give a batch: see the message",
        "count": "the Trainer must be able to count labels, or shift_labels if labels are a dict: see the message",
        "forward": "the model must accept this batch without labels, which the Trainer passes to the loss only",
        "loss": _loss_fix(run) or "the loss must fit this model and these labels: see the message",
        "evaluation": "the model must accept this batch in evaluation: see the message",
        "reducer": "preprocess_logits_for_metrics must fit these logits and labels: see the message",
        "metric": _metric_fix(run) or "compute_metrics must fit the result of the reducer: see the message",
    }
    if next(decoder_inputs(run), None) is not None:
        fixes |= dict.fromkeys(("forward", "evaluation"), "add the decoder inputs first")
    # From Python 3.12 on, counting a dict of labels raises an error, in evaluation too; the rule `count` has the fix.
    known = run.errors.get("count") if isinstance(run.labels, Mapping) and "given" in run.losses else None
    for stage, message in run.errors.items():
        if message != known:
            yield Finding(f"{stage} raised {message}", fixes[stage])


def _loss_fix(run: DryRun) -> str | None:
    """Return the fix for a function that is not a loss: a term, or a function without num_items_in_batch."""
    try:
        taken = inspect.signature(run.trainer.compute_loss_func).parameters
    except (TypeError, ValueError):
        return None
    if "num_items_in_batch" in taken or any(option.kind is option.VAR_KEYWORD for option in taken.values()):
        return None
    of_tokens = run.label_ids is not None and run.label_ids.ndim == 2
    losses = {"outcome": "multi_label_loss"} | dict.fromkeys(REGRESSION_INPUTS, "regression_loss")
    losses |= dict.fromkeys(STATISTICS, "causal_lm_loss" if of_tokens else "classification_loss")
    for statistic, loss in losses.items():
        if statistic in taken:
            name = function_name(run.trainer.compute_loss_func)
            return f"{name} is a term, an option of a loss: compute_loss_func=partial({loss}, term={name})"
    return "the signature of a loss is (outputs, labels, num_items_in_batch=None)"


def _metric_fix(run: DryRun) -> str | None:
    """Return the fix for a function that builds a metric and was not called."""
    metric = run.trainer.compute_metrics
    if not inspect.isfunction(metric):
        return None
    built = inspect.signature(metric).return_annotation
    if getattr(built, "__name__", built) != "Metric":
        return None
    return f"{metric.__name__} builds a metric: call it, compute_metrics={metric.__name__}(...)"


def labels(run: DryRun) -> Findings:
    """Check that the loss gets labels, and that some of them count."""
    if run.batch and run.trainer.compute_loss_func is not None and run.batch.get("labels") is None:
        yield Finding(
            f"the batch has no 'labels' for the loss: {', '.join(run.batch)}",
            "name the column 'labels', keep it (remove_unused_columns=False), or let the collator add it (question "
            "answering: lossfns.collators.pack_spans)",
        )
    ids = run.label_ids
    if ids is None:
        return
    scored = int((ids != IGNORED).sum())
    yield Finding(f"labels {_described(ids)}, {scored} of {ids.numel()} count")
    if not scored:
        yield Finding("every label of the batch is -100", "nothing is learned from it: check prompts and truncation")


def padding(run: DryRun) -> Findings:
    """Check that padding has no labels."""
    ids, mask = run.label_ids, run.batch.get("attention_mask")
    if ids is None or not isinstance(mask, Tensor) or mask.shape != ids.shape or run.is_encoder_decoder:
        return
    wrong = int(((mask == 0) & (ids != IGNORED)).sum())
    if wrong:
        problem = f"{wrong} labels are on padding, and are learned and counted"
        yield Finding(problem, "pad labels with -100, as DataCollatorForSeq2Seq and DataCollatorForLanguageModeling do")


def count(run: DryRun) -> Findings:
    """Check that the Trainer counts the items that the loss sums, and that the loss divides by this count."""
    if run.trainer.compute_loss_func is None or "given" not in run.losses:
        return
    steps, world_size = run.trainer.args.gradient_accumulation_steps, run.trainer.args.world_size
    not_scaled = getattr(run.trainer, "loss_is_scaled_for_ga", None) is not False
    if run.count is None:
        yield from _no_count(run, steps if not_scaled else 1)
        return
    number = float(torch.as_tensor(run.count).double().mean())
    yield Finding(f"the Trainer counts {number:g} items")
    if steps * world_size > 1 and not_scaled and _same(run, "twice"):
        yield Finding(
            f"the loss does not divide by num_items_in_batch: gradients are up to {steps * world_size} times too large",
            "return sum / num_items_in_batch, or use a loss of lossfns; check_loss tests this in detail",
        )
    ids = run.label_ids
    if ids is not None and ids.ndim == 2 and world_size == 1 and _same(run, "first"):
        every, scored = int((ids != IGNORED).sum()), int((ids[:, 1:] != IGNORED).sum())
        if number == every != scored and run.right_shift != 0:  # otherwise the shift is wrong, not the count
            yield Finding(
                f"the loss reads {scored} labels and is divided by {every}, because the Trainer counts without a shift",
                "wrap the collator in lossfns.collators.mask_first_label",
            )


def _no_count(run: DryRun, steps: int) -> Findings:
    if isinstance(run.labels, Mapping):
        problem = "the Trainer does not count the items of a dict of labels"
        yield Finding(problem, "let the collator add shift_labels to the batch, as lossfns.collators.with_extras does")
    elif run.labels is None and steps > 1:
        yield Finding(
            f"without labels nothing is counted: {steps} micro-batches add up to a step {steps} times too large",
            "let the collator add 'labels', one id per sample, with TrainingArguments(label_names=['labels'])",
        )


def loss(run: DryRun) -> Findings:
    """Check that the loss is one finite number."""
    value = run.losses.get("given")
    if value is None:
        return
    if not isinstance(value, Tensor) or value.ndim:
        kind = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
        yield Finding(f"the loss {kind}", "return a 0-d tensor: sum over the items, then divide")
    elif not bool(value.isfinite()):
        yield Finding(f"the loss is {value.item()}", "check the logits and the labels of this batch")
    else:
        yield Finding(f"the loss of this batch is {value.item():.4g}")


def shift(run: DryRun) -> Findings:
    """Check that loss and reducer use the correct label shift."""
    right = run.right_shift
    for who, read in run.shifts.items():
        if right is None or not read or right in read:
            continue
        labels = "are the inputs, predicted by the logits 1 before" if right else "are predicted by the logits at"
        yield Finding(
            f"{who} reads the logit {_places(read)} each label (shift={max(read)}), but the labels {labels} them",
            _shift_fix(run, who, right),
        )
    both = [read for read in run.shifts.values() if read]
    if right is None and len(both) == 2 and not both[0] & both[1]:
        yield Finding(
            " and ".join(f"{who} reads the logit {_places(read)} each label" for who, read in run.shifts.items()),
            "use the same shift for both: 1 for a causal model, 0 for any other",
        )


def _places(read: set[int]) -> str:
    return f"{max(read)} before" if max(read) else "at"


def _shift_fix(run: DryRun, who: str, right: int) -> str:
    if who == "the reducer":
        return f"preprocess_logits_for_metrics=partial(reducers.sample_sums, shift={right}), or bind it in your reducer"
    if right == 1:
        return "for a causal model use causal_lm_loss, or shift=1"
    if run.is_encoder_decoder:
        return "for an encoder-decoder use seq2seq_lm_loss, and shift=0 in the reducer"
    return "use masked_lm_loss, or shift=0; if the collator shifts labels of a causal model, leave that to the loss"


def label_smoothing(run: DryRun) -> Findings:
    """Check that label smoothing of the Trainer is not combined with a loss, which ignores it."""
    factor = run.trainer.args.label_smoothing_factor
    if factor and run.trainer.compute_loss_func is not None:
        yield Finding(
            f"label_smoothing_factor={factor} is ignored together with compute_loss_func",
            f"use term=partial(smoothed_cross_entropy, label_smoothing={factor}), or label_smoothing= of the "
            "classification losses, and remove the argument",
        )


def training_metrics(run: DryRun) -> Findings:
    """Check that the training metrics of a watched loss are logged."""
    loss, callbacks = run.trainer.compute_loss_func, run.trainer.callback_handler.callbacks
    attached = [getattr(callback, "metrics", None) for callback in callbacks]
    if isinstance(loss, WatchedLoss) and all(metrics is not loss.metrics for metrics in attached):
        yield Finding("the metrics of watch(loss, metrics) are never logged", "metrics.attach(trainer)")


def aux_loss(run: DryRun) -> Findings:
    """Check that the load-balancing loss of a mixture of experts is part of the loss."""
    if "aux_loss" in run.losses and _same(run, "aux_loss"):
        fix = 'with_aux_loss(loss, "aux_loss", model.config.router_aux_loss_coef), or output_router_logits=False'
        yield Finding("the model computes an aux_loss, which the loss does not include", fix)


def logits(run: DryRun) -> Findings:
    """Check that the model returns logits in a dict or ModelOutput."""
    if run.outputs is None:
        return
    has_loss = run.trainer.compute_loss_func is not None
    if not isinstance(run.outputs, Mapping):
        problem = f"the model returns a {type(run.outputs).__name__}, and the evaluation drops its first entry"
        yield Finding(problem, "return a dict or a ModelOutput")
    elif has_loss and all(run.outputs.get(name) is None for name in LOGITS):
        fix = "set use_liger_kernel=False (or switch off what fuses head and loss), or source=hidden_states(model)"
        yield Finding(f"the model returns no logits: {', '.join(run.outputs)}", fix)
    if has_loss and run.trainer.args.use_liger_kernel:
        fix = "set use_liger_kernel=False, or switch the fused linear cross-entropy off in liger_kernel_config"
        yield Finding("use_liger_kernel removes the logits in an evaluation without metrics", fix)


# --- evaluation ------------------------------------------------------------------------------------------------------


def metric_runs(run: DryRun) -> Findings:
    """Check that the Trainer calls `compute_metrics`."""
    trainer = run.trainer
    if trainer.compute_metrics is None or not run.batch:
        return
    if trainer.args.prediction_loss_only:
        yield Finding("prediction_loss_only=True: compute_metrics is never called", "remove one of the two")
    if not trainer.label_names or any(run.batch.get(name) is None for name in trainer.label_names):
        yield Finding(
            f"compute_metrics is never called: the Trainer expects {', '.join(trainer.label_names) or 'no labels'}, "
            f"the batch has {', '.join(run.batch)}",
            'TrainingArguments(label_names=["labels"]), or the names of your labels',
        )


def kept_outputs(run: DryRun) -> Findings:
    """Check that an evaluation does not keep hidden states, attentions or caches."""
    if run.logits is None or not isinstance(run.outputs, Mapping):
        return
    ignored = _ignored(run)
    kept = [name for name in run.outputs if name in OPTIONAL_OUTPUTS and name not in ignored]
    if kept:
        size = _size(sum(_bytes(run.outputs[name]) for name in kept))
        yield Finding(
            f"{', '.join(kept)}, {size} per batch, are passed to the evaluation together with the logits",
            f"switch them off in model.config, or model.config.keys_to_ignore_at_inference = {[*ignored, *kept]}",
        )


def reducer(run: DryRun) -> Findings:
    """Check that the Trainer can gather and concatenate the result of the reducer."""
    if run.logits is None:
        return
    yield Finding(f"given {_described(_named_logits(run))}, {_size(_bytes(run.logits))} per batch")
    if "reducer" in run.errors or run.trainer.preprocess_logits_for_metrics is None:
        return
    yield Finding(f"returns {_described(run.reduced)}, {_size(_bytes(run.reduced))} per batch")
    try:
        from reducers._core import batch_rows, check_rows
    except ImportError:
        return
    try:
        check_rows("it", run.reduced, batch_rows(run.logits, run.eval_labels))
    except (TypeError, ValueError) as error:
        message, _, fix = str(error).partition(": ")
        yield Finding(message, fix or "return tensors with the batch as first dimension")


def probabilities(run: DryRun) -> Findings:
    """Check that the probabilities of labels that do not exclude each other are not a softmax."""
    labels = run.eval_labels
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.shape[1] < 2:
        return
    several = bool(((labels == 0) | (labels == 1)).all()) and bool((labels.sum(1) != 1).any())
    for part in tensors(run.reduced) if several else ():
        shares = part.shape == labels.shape and part.is_floating_point() and bool((part >= 0).all())
        if shares and torch.allclose(part.double().sum(1), torch.ones(len(part), dtype=torch.float64), atol=1e-3):
            problem = "the probabilities of each row sum to 1, but a row may have several labels or none"
            yield Finding(problem, "preprocess_logits_for_metrics=partial(reducers.probabilities, multi_label=True)")


def memory(run: DryRun) -> Findings:
    """Check that the results for the whole evaluation set fit into memory."""
    args = run.trainer.args
    if run.reduced is None or not run.samples:
        return
    rows = min(run.samples, args.per_device_eval_batch_size)
    kept = 0 if args.batch_eval_metrics else _bytes(run.reduced) * run.samples // rows
    peak = 2 * kept + _bytes(run.logits)
    fix = (
        "use a reducer that keeps a few numbers per sample: preprocess_logits_for_metrics=partial("
        "reducers.sample_sums, shift=...); eval_accumulation_steps only moves the problem to host memory"
    )
    yield Finding(
        f"keeps {_size(kept)} for {run.samples} samples, with a peak of {_size(peak)} including one batch of logits",
        fix if kept > LARGE else None,
    )


def scores(run: DryRun) -> Findings:
    """Check that the scores can be logged and saved."""
    if run.scores is None:
        return
    if not isinstance(run.scores, Mapping):
        fix = _metric_fix(run) or "return a dict of floats"
        yield Finding(f"compute_metrics returns a {type(run.scores).__name__}", fix)
        return
    yield Finding(f"scores {', '.join(run.scores) or 'nothing'}")
    for name, value in run.scores.items():
        if not isinstance(value, (int, float)) and getattr(value, "size", 0) != 1:
            problem = f"the score '{name}' is a {type(value).__name__}, on which saving the first checkpoint fails"
            yield Finding(problem, f"return one float per name: split '{name}' into several")
        if _is_taken(str(name)):
            yield Finding(f"the score '{name}' has the name of a score of the Trainer itself", "rename it")


def best_model(run: DryRun) -> Findings:
    """Check that the score that selects the best model exists, and that greater_is_better is correct."""
    args, metric, name = run.trainer.args, run.metric, run.trainer.args.metric_for_best_model
    if name is None:
        return
    key = name.removeprefix("eval_")
    for dataset in run.trainer.eval_dataset if isinstance(run.trainer.eval_dataset, dict) else ():
        key = key.removeprefix(f"{dataset}_")
    if key == "loss":
        return
    if metric is None or (run.scores is not None and key not in run.scores):
        yield Finding(
            f"metric_for_best_model='{name}' is not among the scores: {', '.join(run.scores or ()) or 'only the loss'}",
            "use the name of a score, or a compute_metrics that returns this one",
        )
        return
    greater = _higher_is_better(key, metric)
    if greater is not None and greater is not args.greater_is_better:
        problem = f"the checkpoint with the worst {key} is kept: greater_is_better={args.greater_is_better}"
        yield Finding(problem, f'TrainingArguments(**best_model_kwargs("{key}")), from the package metrics')


def streaming(run: DryRun) -> Findings:
    """Check that a metric called per step supports it, and knows the number of samples of an evaluation."""
    metric = run.metric
    if metric is None:
        return
    number = getattr(metric, "num_samples", None)
    if number is not None and run.samples is not None and number != run.samples:
        problem = f"the metric expects {number} samples, the evaluation set has {run.samples}"
        yield Finding(problem, "build(..., num_samples=len(eval_dataset))")
    if not run.trainer.args.batch_eval_metrics:
        return
    if getattr(metric, "needs_all_samples", None):
        yield Finding(f"the metric cannot stream: {metric.needs_all_samples}", "remove batch_eval_metrics")
    elif hasattr(metric, "num_samples") and number is None:
        problem = "a streaming metric needs num_samples to know when an evaluation is complete"
        yield Finding(problem, "build(metric, num_samples=len(eval_dataset))")


def order(run: DryRun) -> Findings:
    """Check that samples arrive in the order of the dataset if the metric depends on it."""
    args = run.trainer.args
    strategy = getattr(args, "train_sampling_strategy", None)
    if run.metric is not None and (strategy == "group_by_length" or getattr(args, "group_by_length", False)):
        fix = "put what belongs to a row into its labels, or do not group by length" if run.depends_on_order else None
        yield Finding("grouping by length reorders the evaluation: row i is not row i of the dataset", fix)


def processes(run: DryRun) -> Findings:
    """Check settings for several processes that cost memory or give another loss."""
    args = run.trainer.args
    if args.world_size < 2:
        return
    unused = args.ddp_find_unused_parameters
    if unused or (unused is None and not args.gradient_checkpointing):
        fix = "TrainingArguments(ddp_find_unused_parameters=False), unless parts of the model get no gradient"
        yield Finding("ddp_find_unused_parameters copies every output of the model, including the logits", fix)
    if not args.average_tokens_across_devices:
        problem = "average_tokens_across_devices=False: each process divides by its own count"
        yield Finding(problem, "leave it at True, so that the loss is that of the whole batch")


RULES: tuple[Callable[[DryRun], Findings], ...] = (
    packages, releases,
    decoder_inputs, raised, labels, padding, count, loss, shift, label_smoothing, training_metrics, aux_loss, logits,
    metric_runs, kept_outputs, reducer, probabilities, memory, scores, best_model, streaming, order, processes,
)  # fmt: skip


# --- helpers ---------------------------------------------------------------------------------------------------------


def _same(run: DryRun, name: str) -> bool:
    """Return whether the loss is not 0 and did not change in another call."""
    given, other = run.losses.get("given"), run.losses.get(name)
    if not isinstance(given, Tensor) or not isinstance(other, Tensor) or given.shape != other.shape:
        return False
    return bool(given.abs().sum() > 0) and torch.allclose(given, other, rtol=1e-6, atol=0.0)


def _ignored(run: DryRun) -> list[str]:
    """Return the names of the outputs that an evaluation leaves out."""
    config = getattr(run.trainer.model, "config", None)
    return list(getattr(config, "keys_to_ignore_at_inference", CACHES))


def _named_logits(run: DryRun) -> Any:
    """Return what the reducer gets, in a dict with the names that the model uses."""
    names = [name for name in run.outputs or () if isinstance(name, str) and name not in (*_ignored(run), "loss")]
    values = run.logits if isinstance(run.logits, tuple) else (run.logits,)
    return dict(zip(names, values, strict=True)) if len(names) == len(values) else run.logits


def _higher_is_better(key: str, metric: Any) -> bool | None:
    """Return whether a higher score is better, or None if the package metrics does not know the score."""
    try:
        from metrics import best_model_kwargs

        return best_model_kwargs(key, metric if hasattr(metric, "higher_is_better") else None)["greater_is_better"]
    except (ImportError, ValueError):
        return None


def _is_taken(name: str) -> bool:
    """Return whether the Trainer writes a score of this name itself; False if the package metrics is not installed."""
    try:
        from metrics._core.keys import is_reserved
    except ImportError:
        return False
    return is_reserved(name)


def _described(tree: Any) -> str:
    """Return the names, shapes and dtypes of nested tensors."""
    if isinstance(tree, Tensor):
        return f"{tuple(tree.shape)} {str(tree.dtype).removeprefix('torch.')}"
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{name}: {_described(value)}" for name, value in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        return "(" + ", ".join(map(_described, tree)) + ")"
    return type(tree).__name__


def _bytes(tree: Any) -> int:
    return sum(part.numel() * part.element_size() for part in tensors(tree))


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"
