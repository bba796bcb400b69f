"""One batch through a Trainer's own steps, without training: what its loss, reducer and metric are given and return."""

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

from .._core.alignment import Labels, split_labels
from .._core.checks import IGNORED
from ..training import WatchedLoss

FEW = 4  # labels; of so few masked tokens all may have been left as they were


@dataclass
class Look:
    """What one batch showed; None where it did not come so far.

    Attributes:
        trainer: the Trainer.
        batch: a training batch as the collator makes it.
        errors: by stage ("batch", "count", "forward", "loss", "evaluation", "reducer", "metric") what was raised there.
        count: what the Trainer counts over this batch.
        outputs: what the model returned.
        labels: what the loss is given as labels.
        losses: the loss as it is called ("given"), with twice the count ("twice"), with the first label of each row
            ignored ("first"), with another auxiliary loss of the model ("auxiliary").
        logits: what reaches the reducer.
        eval_labels: the labels that reach the reducer and the metric.
        reduced: what the reducer returned, the logits where there is none.
        scores: what the metric returned.
        shifts: how far before its label the logits stand that "the loss" and "the reducer" read; empty if unknown.
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
    def right_shift(self) -> int | None:
        """How far before its label the logit stands that predicts it; None where the batch does not tell."""
        return right_shift(self.batch, self.label_ids, self.trainer.model)

    @property
    def label_ids(self) -> Tensor | None:
        """The label ids of the training batch, in a dict or not."""
        labels = self.batch.get("labels")
        labels = labels.get("labels") if isinstance(labels, Mapping) else labels
        return labels if isinstance(labels, Tensor) else None

    @property
    def eval_dataset(self) -> Any:
        """The evaluation set; of several the first."""
        dataset = self.trainer.eval_dataset
        return next(iter(dataset.values())) if isinstance(dataset, dict) else dataset

    @property
    def samples(self) -> int | None:
        """The length of the evaluation set."""
        return len(self.eval_dataset) if hasattr(self.eval_dataset, "__len__") else None

    @property
    def metric(self) -> Any:
        """The metric of the evaluation set: of those of `metrics.dispatch` the one for its number of samples."""
        metric = self.trainer.compute_metrics
        parts = getattr(metric, "metrics", ())
        if not parts or not all(hasattr(part, "num_samples") for part in parts):
            return metric
        return next((part for part in parts if part.num_samples == self.samples), parts[0])

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Keep what is raised inside as the error of a stage."""
        try:
            yield
        except Exception as error:  # whatever it is, it is what the user has to be told
            self.errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"


def look(trainer: Any) -> Look:
    """Take a batch through a Trainer's own steps, and leave everything as it was."""
    seen = Look(trainer)
    with _unchanged(trainer), torch.no_grad():
        trainer.model.eval()
        with seen.stage("batch"):
            dataset = trainer.train_dataset if trainer.train_dataset is not None else seen.eval_dataset
            seen.batch = _first_batch(trainer, dataset, trainer.args.per_device_train_batch_size)
        if seen.batch:
            _train(seen)
        if seen.batch and seen.eval_dataset is not None:
            _evaluate(seen)
    return seen


def _train(seen: Look) -> None:
    trainer, function = seen.trainer, seen.trainer.compute_loss_func
    with seen.stage("count"):
        _, seen.count = trainer.get_batch_samples(iter([seen.batch]), 1, trainer.args.device)
    with seen.stage("forward"):
        trainer.compute_loss_func = None if function is None else _Spy(seen)
        inputs = trainer._prepare_inputs(dict(seen.batch))
        with trainer.compute_loss_context_manager():
            _, seen.outputs = trainer.compute_loss(
                trainer.model, inputs, return_outputs=True, num_items_in_batch=seen.count
            )
    trainer.compute_loss_func = function
    if function is not None and "forward" not in seen.errors:
        with seen.stage("loss"):
            seen.losses["given"] = function(seen.outputs, seen.labels, num_items_in_batch=seen.count)
        for name, (outputs, labels, count) in _variations(seen).items():
            with suppress(Exception):  # what only a variation raises says nothing about the loss
                seen.losses[name] = function(outputs, labels, num_items_in_batch=count)
        with suppress(Exception):
            seen.shifts["the loss"] = shifts_read(
                lambda labels: function(seen.outputs, labels, num_items_in_batch=seen.count),
                seen.labels,
                _read(function, seen.outputs, seen.labels),
            )


def _read(function: Any, outputs: Any, labels: Any) -> list[Any]:
    """What a loss or reducer may read: the outputs, and the hidden states of its source."""
    function = function.loss if isinstance(function, WatchedLoss) else function
    source = getattr(function, "keywords", {}).get("source")
    rows = len(next(leaves(labels)))
    return [outputs] if source is None else [outputs, source.read(outputs, rows)[0]]


def _variations(seen: Look) -> dict[str, tuple[Any, Labels, Any]]:
    """Other calls of the loss, from whose values it follows what it divides by and reads."""
    calls: dict[str, tuple[Any, Labels, Any]] = {}
    ids = seen.label_ids
    if seen.count is not None:
        calls["twice"] = seen.outputs, seen.labels, 2 * seen.count
    if ids is not None and ids.ndim == 2 and not ids.is_floating_point():
        first = (seen.labels["labels"] if isinstance(seen.labels, Mapping) else seen.labels).clone()
        first[:, 0] = IGNORED
        labels = {**seen.labels, "labels": first} if isinstance(seen.labels, Mapping) else first
        calls["first"] = seen.outputs, labels, seen.count
    if isinstance(seen.outputs, Mapping) and isinstance(seen.outputs.get("aux_loss"), Tensor):
        outputs: Any = copy.copy(seen.outputs)
        outputs["aux_loss"] = outputs["aux_loss"] + 1
        calls["auxiliary"] = outputs, seen.labels, seen.count
    return calls


def _evaluate(seen: Look) -> None:
    trainer = seen.trainer
    batch: Mapping[str, Any] = {}
    with seen.stage("evaluation"):
        batch = _first_batch(trainer, seen.eval_dataset, trainer.args.per_device_eval_batch_size)
        trainer.compute_loss_func = None if trainer.compute_loss_func is None else _Spy(Look(trainer))  # costs nothing
        only = trainer.args.prediction_loss_only or trainer.compute_metrics is None
        _, seen.logits, seen.eval_labels = trainer.prediction_step(trainer.model, batch, prediction_loss_only=only)
    if seen.logits is None:
        return
    with seen.stage("reducer"):
        reducer = trainer.preprocess_logits_for_metrics
        seen.reduced = seen.logits if reducer is None else reducer(seen.logits, seen.eval_labels)
    with suppress(Exception):
        seen.shifts["the reducer"] = shifts_read(
            lambda labels: seen.logits if reducer is None else reducer(seen.logits, labels),
            seen.eval_labels,
            _read(reducer, seen.logits, seen.eval_labels),
            by_place=hasattr(seen.metric, "directions"),  # metrics of this project never shift
        )
    if seen.reduced is not None and seen.eval_labels is not None and not by_position(seen.metric):
        with seen.stage("metric"):
            seen.scores = _scores(seen, batch)


def _scores(seen: Look, batch: Mapping[str, Any]) -> Any:
    """The scores of one batch, as of an evaluation of a single step."""
    from accelerate.utils import find_batch_size
    from transformers import EvalPrediction

    trainer, metric = seen.trainer, seen.metric
    if dataclasses.is_dataclass(metric) and getattr(metric, "num_samples", None) is not None:
        metric = dataclasses.replace(metric, num_samples=None)  # type: ignore[type-var]
    given: dict[str, Any] = {"predictions": seen.reduced, "label_ids": seen.eval_labels}
    if "inputs" in trainer.args.include_for_metrics:
        name = getattr(trainer.model, "main_input_name", "input_ids")
        given["inputs"] = batch if trainer.args.batch_eval_metrics else batch[name]
    if "loss" in trainer.args.include_for_metrics:
        given["losses"] = torch.zeros(find_batch_size(batch))
    if trainer.args.batch_eval_metrics:
        return metric(EvalPrediction(**given), compute_result=True)
    return metric(EvalPrediction(**{name: _numpy(tree) for name, tree in given.items()}))


def by_position(metric: Any) -> bool:
    """Does this metric belong to the rows of the whole evaluation, one after the other?"""
    return bool(getattr(metric, "by_position", False))


@dataclass
class _Spy:
    """In the place of the loss: keeps what it is given."""

    seen: Look

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        self.seen.outputs, self.seen.labels = outputs, labels
        return torch.zeros(())


def _first_batch(trainer: Any, dataset: Any, size: int) -> Mapping[str, Any]:
    """The first rows of a dataset, by the Trainer's own rules for columns and its collator."""
    collate: Callable[[list[Any]], Mapping[str, Any]] = trainer.data_collator
    if hasattr(dataset, "column_names"):
        dataset = trainer._remove_unused_columns(dataset, description="check")
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description="check")
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        rows = [dataset[place] for place in range(min(size, len(dataset)))]
    elif iter(dataset) is dataset:
        raise ValueError("the dataset is an iterator, which a look would use up; give one that can be iterated again")
    else:
        rows = list(islice(dataset, size))
    return collate(rows)


@contextmanager
def _unchanged(trainer: Any) -> Iterator[None]:
    """Put back what a look touches: the Trainer's attributes, the modes of its modules, the random numbers."""
    attributes = dict(vars(trainer))
    modes = [(module, module.training) for module in trainer.model.modules()]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (what collators draw from)
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


def _numpy(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _numpy(value) for name, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(map(_numpy, tree))
    return (tree.float() if tree.dtype == torch.bfloat16 else tree).cpu().numpy()


def leaves(tree: Any) -> Iterator[Tensor]:
    """The tensors of nested dicts, tuples and lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (Mapping, tuple, list)):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves(part)


def shifts_read(call: Callable[[Labels], Any], labels: Labels, read: Any, *, by_place: bool = True) -> set[int]:
    """Which logits a function reads for a label: those 0, 1 or 2 places before it; empty where that cannot be told.

    All labels but one are ignored, and what was read from the model is negated at one place after the other: where
    another value comes back, that place was read.

    Args:
        call: the function, of labels.
        labels: ids `(B, S)`, in a dict or not.
        read: nested tensors, of which those with values at each place are disturbed, and put back.
        by_place: does position `i` of a result `(B, S, ...)` belong to label `i`? Otherwise such results tell nothing.
    """
    ids = split_labels(labels)[0]
    places = (ids != IGNORED).nonzero() if ids.ndim == 2 else ids.new_empty(0, 2)
    if not len(places):
        return set()
    row, place = max(places.tolist(), key=lambda found: found[1])
    alone = torch.full_like(ids, IGNORED)
    alone[row, place] = ids[row, place]
    lonely: Labels = {**labels, "labels": alone} if isinstance(labels, Mapping) else alone
    tensors = [*{part.data_ptr(): part for part in leaves(read) if _has_places(part, ids)}.values()]

    def values() -> list[Tensor]:
        found = [(part, part.ndim > 1 and part.shape[1] == ids.shape[1]) for part in leaves(call(lonely))]
        return [part[:, place].clone() if placed else part.clone() for part, placed in found if by_place or not placed]

    before, reads = values(), set()
    for shift in range(min(place, 2) + 1):
        with _negated(tensors, row, place - shift - ids.shape[1]):  # from the end: virtual tokens stand in front
            if any(not torch.allclose(one, other, equal_nan=True) for one, other in zip(before, values(), strict=True)):
                reads.add(shift)
    return reads


def _has_places(part: Tensor, ids: Tensor) -> bool:
    return part.is_floating_point() and part.ndim > 2 and len(part) == len(ids) and part.shape[1] >= ids.shape[1]


@contextmanager
def _negated(tensors: list[Tensor], row: int, place: int) -> Iterator[None]:
    """Values with another sign at one place, in place: a copy of the logits might not fit."""
    for tensor in tensors:
        tensor[row, place].neg_()
    try:
        yield
    finally:
        for tensor in tensors:
            tensor[row, place].neg_()


def right_shift(batch: Mapping[str, Any], labels: Tensor | None, model: Any) -> int | None:
    """How far before its label the logit stands that predicts it without having seen it; None where nothing tells.

    1 where the labels are the model's own input; 0 where they are one place ahead of it, as of a decoder with an input
    of its own, or where they were masked.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "MaskedLM" in type(base).__name__:
        return 0
    decoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    inputs = batch.get("decoder_input_ids" if decoder else "input_ids")
    if not isinstance(inputs, Tensor) or labels is None or labels.ndim != 2 or inputs.shape != labels.shape:
        return None
    pairs = {1: (labels, inputs), 0: (labels[:, :-1], inputs[:, 1:])}
    fitting = [shift for shift, (wanted, given) in pairs.items() if _are_given(wanted, given)]
    return fitting[0] if len(fitting) == 1 else None


def _are_given(labels: Tensor, inputs: Tensor) -> bool:
    counts = labels != IGNORED
    return int(counts.sum()) >= FEW and bool((labels == inputs)[counts].all())
