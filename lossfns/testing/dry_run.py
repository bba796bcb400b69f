"""One batch through a Trainer's own steps, without training: the arguments and results of its loss, reducer and metric.

The Trainer, its model and all random number generators are left unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._core.alignment import Labels, select_logits, split_labels
from .._core.checks import IGNORED
from ..training import WatchedLoss
from .tasks import mapped, tensors

_MIN_LABELS = 4  # with fewer masked tokens, all of them may have been left unchanged by chance


@dataclass
class DryRun:
    """The results of one batch; an attribute keeps its default if its stage was not reached.

    Attributes:
        trainer: the Trainer.
        batch: a training batch as the collator returns it.
        errors: the message of the exception raised in each stage ("batch", "count", "forward", "loss", "evaluation",
            "reducer", "metric").
        count: the number of items that the Trainer counts in this batch.
        outputs: the output of the model.
        labels: the labels that the loss is called with.
        losses: the loss of this batch ("given"), and that with twice the count ("twice"), with the first label of each
            row ignored ("first"), and with another `aux_loss` in the output of the model ("aux_loss").
        logits: the logits that the reducer is called with.
        eval_labels: the labels that the reducer and the metric are called with.
        reduced: the result of the reducer, or the logits if there is none.
        scores: the result of the metric.
        shifts: by "the loss" and "the reducer", how many positions before its label the logits are that it reads; empty
            if unknown.
    """

    trainer: Any
    batch: Mapping[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    count: Any = None
    outputs: Any = None
    labels: Any = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    logits: Any = None
    eval_labels: Any = None
    reduced: Any = None
    scores: dict[str, Any] | None = None
    shifts: dict[str, set[int]] = field(default_factory=dict)

    @property
    def label_ids(self) -> Tensor | None:
        """The label ids of the training batch."""
        labels = self.batch.get("labels")
        labels = labels.get("labels") if isinstance(labels, Mapping) else labels
        return labels if isinstance(labels, Tensor) else None

    @property
    def eval_dataset(self) -> Any:
        """The evaluation set, or the first of several."""
        dataset = self.trainer.eval_dataset
        return next(iter(dataset.values())) if isinstance(dataset, dict) else dataset

    @property
    def samples(self) -> int | None:
        """The length of the evaluation set, if it has one."""
        return len(self.eval_dataset) if hasattr(self.eval_dataset, "__len__") else None

    @property
    def metric(self) -> Any:
        """The metric of the evaluation set; of the parts of `metrics.by_dataset` the one with its number of samples."""
        metric = self.trainer.compute_metrics
        parts = getattr(metric, "metrics", ())
        if not parts or not all(hasattr(part, "num_samples") for part in parts):
            return metric
        return next((part for part in parts if part.num_samples == self.samples), parts[0])

    @property
    def depends_on_order(self) -> bool:
        """Whether the metric needs the rows in the order of the dataset."""
        return bool(getattr(self.metric, "depends_on_order", False))

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        return bool(getattr(getattr(self.trainer.model, "config", None), "is_encoder_decoder", False))

    @property
    def right_shift(self) -> int | None:
        """The correct shift between labels and logits, or None if the batch does not determine it.

        It is 1 if the labels are the input of the model, and 0 if the labels are one position ahead of the input, as
        for a decoder with a separate input, or if the labels were masked in the input.
        """
        model, labels = self.trainer.model, self.label_ids
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if "MaskedLM" in type(base).__name__:
            return 0
        decoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
        inputs = self.batch.get("decoder_input_ids" if decoder else "input_ids")
        if not isinstance(inputs, Tensor) or labels is None or labels.ndim != 2 or inputs.shape != labels.shape:
            return None
        pairs = {1: (labels, inputs), 0: (labels[:, :-1], inputs[:, 1:])}
        fitting = [shift for shift, (wanted, given) in pairs.items() if _all_equal(wanted, given)]
        return fitting[0] if len(fitting) == 1 else None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record an exception as the error of a stage."""
        try:
            yield
        except Exception as error:  # the report shows errors of any kind
            self.errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"


def _all_equal(labels: Tensor, inputs: Tensor) -> bool:
    scored = labels != IGNORED
    return int(scored.sum()) >= _MIN_LABELS and bool((labels == inputs)[scored].all())


def dry_run(trainer: Any) -> DryRun:
    """Take one batch through the steps of a Trainer and leave the Trainer unchanged."""
    run = DryRun(trainer)
    with _unchanged(trainer), torch.no_grad():
        trainer.model.eval()
        with run.stage("batch"):
            dataset = trainer.train_dataset if trainer.train_dataset is not None else run.eval_dataset
            run.batch = _first_batch(trainer, dataset, trainer.args.per_device_train_batch_size)
        if run.batch:
            _train(run)
        if run.batch and run.eval_dataset is not None:
            _evaluate(run)
    return run


@contextmanager
def _unchanged(trainer: Any) -> Iterator[None]:
    """Restore the attributes of the Trainer, the modes of its modules and the random number generators."""
    attributes = dict(vars(trainer))
    modes = [(module, module.training) for module in trainer.model.modules()]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (the generator that collators use)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        for module, mode in modes:
            module.training = mode
        vars(trainer).clear()
        vars(trainer).update(attributes)


def _first_batch(trainer: Any, dataset: Any, size: int) -> Mapping[str, Any]:
    """Collate the first rows of a dataset, with the columns that the Trainer keeps."""
    collate: Callable[[list[Any]], Mapping[str, Any]] = trainer.data_collator
    if hasattr(dataset, "column_names"):
        dataset = trainer._remove_unused_columns(dataset, description="check")
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description="check")
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return collate([dataset[place] for place in range(min(size, len(dataset)))])
    if iter(dataset) is dataset:
        raise ValueError("the dataset is an iterator, which this check would consume; pass an iterable instead")
    return collate(list(islice(dataset, size)))


# --- the training step -----------------------------------------------------------------------------------------------


@dataclass
class _Spy:
    """A loss that stores its arguments in a run and costs nothing."""

    run: DryRun

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        self.run.outputs, self.run.labels = outputs, labels
        return torch.zeros(())


def _train(run: DryRun) -> None:
    trainer, function = run.trainer, run.trainer.compute_loss_func
    with run.stage("count"):
        _, run.count = trainer.get_batch_samples(iter([run.batch]), 1, trainer.args.device)
    with run.stage("forward"):
        trainer.compute_loss_func = None if function is None else _Spy(run)
        inputs = trainer._prepare_inputs(dict(run.batch))
        with trainer.compute_loss_context_manager():
            _, run.outputs = trainer.compute_loss(
                trainer.model, inputs, return_outputs=True, num_items_in_batch=run.count
            )
    trainer.compute_loss_func = function
    if function is None or "forward" in run.errors:
        return
    with run.stage("loss"):
        run.losses["given"] = function(run.outputs, run.labels, num_items_in_batch=run.count)
    for name, (outputs, labels, count) in _variations(run).items():
        with suppress(Exception):  # an error in a variation alone says nothing about the loss
            run.losses[name] = function(outputs, labels, num_items_in_batch=count)
    with suppress(Exception):
        run.shifts["the loss"] = _shifts_read(
            lambda labels: function(run.outputs, labels, num_items_in_batch=run.count),
            run.labels,
            _readable(function, run.outputs, run.labels),
        )


def _variations(run: DryRun) -> dict[str, tuple[Any, Labels, Any]]:
    """Return other calls of the loss, whose values show its divisor and which of its inputs it reads."""
    calls: dict[str, tuple[Any, Labels, Any]] = {}
    ids = run.label_ids
    if run.count is not None:
        calls["twice"] = run.outputs, run.labels, 2 * run.count
    if ids is not None and ids.ndim == 2 and not ids.is_floating_point():
        first = (run.labels["labels"] if isinstance(run.labels, Mapping) else run.labels).clone()
        first[:, 0] = IGNORED
        calls["first"] = run.outputs, _with_ids(run.labels, first), run.count
    if isinstance(run.outputs, Mapping) and isinstance(run.outputs.get("aux_loss"), Tensor):
        outputs: Any = copy.copy(run.outputs)
        outputs["aux_loss"] = outputs["aux_loss"] + 1
        calls["aux_loss"] = outputs, run.labels, run.count
    return calls


def _with_ids(labels: Labels, ids: Tensor) -> Labels:
    return {**labels, "labels": ids} if isinstance(labels, Mapping) else ids


# --- the evaluation step ---------------------------------------------------------------------------------------------


def _evaluate(run: DryRun) -> None:
    trainer = run.trainer
    batch: Mapping[str, Any] = {}
    with run.stage("evaluation"):
        batch = _first_batch(trainer, run.eval_dataset, trainer.args.per_device_eval_batch_size)
        trainer.compute_loss_func = None if trainer.compute_loss_func is None else _Spy(DryRun(trainer))
        only = trainer.args.prediction_loss_only or trainer.compute_metrics is None
        _, run.logits, run.eval_labels = trainer.prediction_step(trainer.model, batch, prediction_loss_only=only)
    if run.logits is None:
        return
    reducer = trainer.preprocess_logits_for_metrics

    def reduced(labels: Any) -> Any:
        return run.logits if reducer is None else reducer(run.logits, labels)

    with run.stage("reducer"):
        run.reduced = reduced(run.eval_labels)
    with suppress(Exception):
        readable = _readable(reducer, run.logits, run.eval_labels)
        no_shift_later = hasattr(run.metric, "higher_is_better")  # the metrics of this project never shift
        run.shifts["the reducer"] = _shifts_read(reduced, run.eval_labels, readable, by_place=no_shift_later)
    if run.reduced is not None and run.eval_labels is not None and not run.depends_on_order:
        with run.stage("metric"):
            run.scores = _scores(run, batch)


def _scores(run: DryRun, batch: Mapping[str, Any]) -> Any:
    """Return the scores of one batch, as for an evaluation of a single step."""
    from accelerate.utils import find_batch_size
    from transformers import EvalPrediction

    trainer, metric = run.trainer, run.metric
    if dataclasses.is_dataclass(metric) and getattr(metric, "num_samples", None) is not None:
        metric = dataclasses.replace(metric, num_samples=None)  # type: ignore[type-var]
    given: dict[str, Any] = {"predictions": run.reduced, "label_ids": run.eval_labels}
    if "inputs" in trainer.args.include_for_metrics:
        name = getattr(trainer.model, "main_input_name", "input_ids")
        given["inputs"] = batch if trainer.args.batch_eval_metrics else batch[name]
    if "loss" in trainer.args.include_for_metrics:
        given["losses"] = torch.zeros(find_batch_size(batch))
    if trainer.args.batch_eval_metrics:
        return metric(EvalPrediction(**given), compute_result=True)
    return metric(EvalPrediction(**mapped(_array, given)))


def _array(tensor: Tensor) -> Any:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


# --- which logits are read -------------------------------------------------------------------------------------------


def _readable(function: Any, outputs: Any, labels: Any) -> list[Any]:
    """Return the outputs, and the hidden states if the loss or reducer has a source of them."""
    function = function.loss if isinstance(function, WatchedLoss) else function
    source = getattr(function, "keywords", {}).get("source")
    if source is None:
        return [outputs]
    hidden, _ = source.read(select_logits(outputs, None), len(tensors(labels)[0]))
    return [outputs, hidden]


def _shifts_read(call: Callable[[Labels], Any], labels: Labels, read: Any, *, by_place: bool = True) -> set[int]:
    """Return how many positions before its label, of 0, 1 and 2, the logits are that a function reads.

    All labels except one are ignored, and the tensors in `read` are negated at one position after the other. A position
    is read if the result changes.

    Args:
        call: the function, of labels only.
        labels: ids `(B, S)`, or a dict that contains them.
        read: nested tensors; those with a value per position are negated in place and restored.
        by_place: whether position `i` of a result `(B, S, ...)` belongs to label `i`; otherwise such results are not
            compared.

    Returns:
        The shifts; empty if they cannot be determined.
    """
    ids = split_labels(labels)[0]
    places = (ids != IGNORED).nonzero() if ids.ndim == 2 else ids.new_empty(0, 2)
    if not len(places):
        return set()
    row, place = max(places.tolist(), key=lambda found: found[1])
    alone = torch.full_like(ids, IGNORED)
    alone[row, place] = ids[row, place]
    single = _with_ids(labels, alone)
    negated = [*{part.data_ptr(): part for part in tensors(read) if _has_places(part, ids)}.values()]

    def values() -> list[Tensor]:
        found = [(part, part.ndim > 1 and part.shape[1] == ids.shape[1]) for part in tensors(call(single))]
        return [part[:, place].clone() if placed else part.clone() for part, placed in found if by_place or not placed]

    before, shifts = values(), set()
    for shift in range(min(place, 2) + 1):
        with _negated(negated, row, place - shift - ids.shape[1]):  # from the end, because virtual tokens come first
            if any(not torch.allclose(a, b, equal_nan=True) for a, b in zip(before, values(), strict=True)):
                shifts.add(shift)
    return shifts


def _has_places(part: Tensor, ids: Tensor) -> bool:
    return part.is_floating_point() and part.ndim > 2 and len(part) == len(ids) and part.shape[1] >= ids.shape[1]


@contextmanager
def _negated(found: list[Tensor], row: int, place: int) -> Iterator[None]:
    """Negate the values at one position in place, because a copy of the logits might not fit into memory."""
    for tensor in found:
        tensor[row, place].neg_()
    try:
        yield
    finally:
        for tensor in found:
            tensor[row, place].neg_()
