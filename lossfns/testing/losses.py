"""Rules for `compute_loss_func`: what the Trainer relies on, and what makes a loss equal in every training setup.

The rules are listed in `RULES` in the order in which they are applied, from specific defects to general ones, so that
the first broken rule is the best explanation.
"""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .._core.checks import IGNORED
from .._core.normalization import NumItems
from .rules import Check, Finding, Report, Rule, judge, select
from .tasks import Batch, Extra, Task, find_task, widen

Loss = Callable[..., Tensor]
Measured = tuple[Tensor, Tensor]  # the loss and the gradient of the logits

_SEEDS = range(3)
_MAX_LABELS = 64  # values of a label that `every_label` tries
_LARGE = 70_001  # a count that bfloat16 rounds and that overflows float16


@dataclass(frozen=True)
class LossSubject:
    """A loss under test, and the ways to call it.

    Attributes:
        loss: the function under test.
        task: the task of its batches.
        classes: number of classes of the logits.
        extras: functions of the labels for the further entries of a dict of labels.
        count: the number of items that the Trainer counts for labels.
        reference: the expected cost of each item, if known.
        reweight: builds the loss from class weights, if it has any.
    """

    loss: Loss
    task: Task
    classes: int
    extras: Mapping[str, Extra] | None
    count: Callable[[Tensor], int]
    reference: Callable[[Tensor, Tensor], Tensor] | None
    reweight: Callable[[Tensor], Loss] | None

    @cached_property
    def batch(self) -> Batch:
        """The batch that most rules use."""
        return self.draw(0)

    @cached_property
    def items(self) -> int:
        """The number of items of that batch."""
        return self.count(self.batch.labels)

    @cached_property
    def tolerance(self) -> float:
        """1e-9 for a loss that computes in float64, 1e-5 for one that rounds float64 logits to float32."""
        found, rounded = (
            self.value(replace(self.batch, logits=logits), self.items)
            for logits in (self.batch.logits, self.batch.logits.float().double())
        )
        return 1e-9 if found.dtype == torch.float64 and not torch.equal(found, rounded) else 1e-5

    @cached_property
    def measured(self) -> Measured:
        """The loss of that batch divided by its number of items, and its gradient."""
        return self.measure(self.batch, self.items)

    def draw(self, seed: int) -> Batch:
        """Return a batch of the task."""
        return self.task.batch(self.classes, self.extras, seed)

    def value(self, batch: Batch, count: NumItems) -> Tensor:
        """Call the loss as the Trainer does; the logits are not a leaf of the graph, as those of a model."""
        return self.loss(self.task.output(batch.logits.clone()), batch.targets, num_items_in_batch=count)

    def live(self, batch: Batch, count: NumItems) -> Measured:
        """Return the loss with its graph, and the leaf of that graph that represents the logits."""
        leaf = batch.logits.detach().clone().requires_grad_()
        return self.value(replace(batch, logits=leaf), count), leaf

    def measure(self, batch: Batch, count: NumItems) -> Measured:
        """Return the loss and its gradient, which is 0 if there is no graph."""
        value, leaf = self.live(batch, count)
        if not value.requires_grad:
            return value, torch.zeros_like(leaf)
        (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True)
        return value.detach(), gradient

    def together(self, parts: Iterable[tuple[Sequence[int], Batch]], count: NumItems) -> Measured:
        """Return the sum over parts of the batch, given with their rows; weighted by items if there is no count."""
        value, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(self.batch.logits)
        for rows, part in parts:
            weight = self.task.items(part.labels) / self.task.items(self.batch.labels) if count is None else 1.0
            part_value, part_gradient = self.measure(part, count)
            value += weight * part_value
            gradient[:, : part_gradient.shape[1]][list(rows)] += weight * part_gradient
        return value, gradient


def _both(what: str, given: Measured, expected: Measured) -> Iterator[Finding]:
    yield what, given[0], expected[0]
    yield f"{what}, gradient", given[1], expected[1]


# --- the call --------------------------------------------------------------------------------------------------------


def signature(loss: LossSubject) -> Iterator[Finding]:
    """Check that the loss can be called as the Trainer calls it: (outputs, labels, num_items_in_batch=count).

    Fix: write `def my_loss(outputs, labels, num_items_in_batch=None)`; give further options a default, or bind them
    with functools.partial.
    """
    try:
        inspect.signature(loss.loss).bind(loss.batch.logits, loss.batch.labels, num_items_in_batch=None)
        problem = None
    except TypeError as error:
        problem = str(error)
    yield "the error of this call", problem, None


def returns(loss: LossSubject) -> Iterator[Finding]:
    """Check that the loss returns one finite number with an autograd graph, as a 0-d tensor.

    Fix: sum over the items before dividing, and call neither detach() nor item() on the way.
    """
    value, leaf = loss.live(loss.batch, loss.items)
    yield "type", "Tensor" if isinstance(value, Tensor) else type(value).__name__, "Tensor"
    yield "shape", tuple(value.shape), ()
    yield "floating", value.is_floating_point(), True
    yield "requires_grad", value.requires_grad, True
    yield "finite", bool(value.isfinite()), True
    yield _reached("graph", torch.autograd.grad(value, leaf, allow_unused=True)[0])


def _reached(what: str, gradient: Tensor | None) -> Finding:
    """Compare whether autograd found a path from the loss to the logits; without one the gradient is None."""
    return what, "cut off" if gradient is None else "reaches the logits", "reaches the logits"


def stateless(loss: LossSubject) -> Iterator[Finding]:
    """Check that calls are independent: the loss keeps neither values nor memory from one call to the next.

    Fix: do not store running values in the loss, and return a new tensor from each call.
    """
    first, second = loss.value(loss.batch, loss.items), loss.value(loss.batch, loss.items)
    kept = second.detach().clone()
    yield "the second call", second, first
    first.detach().mul_(3)
    yield "the second result after scaling the first in place", second, kept


def inputs(loss: LossSubject) -> Iterator[Finding]:
    """Check that the loss modifies neither the logits nor the labels nor the count.

    Fix: use operations that return a copy, without a trailing underscore: `labels = labels.masked_fill(...)`,
    `count = count.clamp(min=1)`.
    """
    for count in (torch.tensor(loss.items), torch.tensor(0)):
        logits = loss.batch.logits.clone().requires_grad_().clone()
        targets, before = loss.batch.targets, count.clone()
        value = loss.loss(loss.task.output(logits), targets, num_items_in_batch=count)
        value.sum().backward()  # type: ignore[no-untyped-call]
        yield "logits", logits, loss.batch.logits
        for name, tensor in targets.items() if isinstance(targets, dict) else [("labels", targets)]:
            yield name, tensor, loss.batch.labels if name == "labels" else loss.batch.extras[name]
        yield "num_items_in_batch", count, before


def in_place(loss: LossSubject) -> Iterator[Finding]:
    """Check that the result can be scaled in place, as the Trainer does after every call.

    Fix: end with an operation that does not save its own result for backward (sqrt, exp, sigmoid and tanh do), as in
    `return loss * 1`; a hand-written backward must multiply by the gradient that it receives.
    """
    value, leaf = loss.live(loss.batch, loss.items)
    value *= 0.5
    yield "gradient after loss *= 0.5", torch.autograd.grad(value, leaf)[0], loss.measured[1] / 2


# --- which labels and logits count -----------------------------------------------------------------------------------


def every_label(loss: LossSubject) -> Iterator[Finding]:
    """Check that every label except -100 counts.

    Fix: ignore only -100, the value that the Trainer leaves out of its count; let the collator replace other ids
    (padding, 255) with it.
    """

    def moves(value: float, draw: Batch) -> bool:
        place = loss.task.positions(draw.labels)[3] if loss.task.by_token else (0,)
        draw.labels[place] = value
        single = draw.only(place) if loss.task.by_token else draw.rows(place)
        return bool(loss.measure(single, 1)[1].any())

    values = loss.task.values(loss.classes)
    some = values[:: -(-len(values) // _MAX_LABELS)]  # both ends and an even selection of a large vocabulary
    for value in dict.fromkeys((*some, *values[-1:])):
        moved = any(moves(value, loss.draw(seed)) for seed in range(8))  # a hinge is flat for some logits
        yield f"label {value} alone has a gradient", moved, True


def ignored(loss: LossSubject) -> Iterator[Finding]:
    """Check that logits whose label is -100 do not affect the loss.

    Fix: select the labels that count before any other step, `logits[labels != -100]`, also for smoothing, means over
    the vocabulary and regularizers.
    """
    batch, far = _with_far(loss)
    other = batch.logits.clone()
    other[far] = torch.randn(other[far].shape, generator=torch.Generator().manual_seed(1), dtype=other.dtype) * 9
    count = loss.count(batch.labels)
    value, gradient = loss.measure(replace(batch, logits=other), count)
    yield "the loss with other logits at ignored labels", value, loss.measure(batch, count)[0]
    yield "the gradient of those logits", gradient[far], torch.zeros_like(gradient[far])


def selects(loss: LossSubject) -> Iterator[Finding]:
    """Check that logits whose label is -100 may be infinite, because they are left out and not multiplied by zero.

    Fix: 0 * inf is NaN, in backward too: index with the mask, or apply `torch.where` to the logits before the
    logarithm.
    """
    batch, far = _with_far(loss)
    other = batch.logits.clone()
    (other if other.ndim == batch.labels.ndim else other[..., 0])[far] = -torch.inf
    count = loss.count(batch.labels)
    yield from _both(
        "with -inf at ignored labels", loss.measure(replace(batch, logits=other), count), loss.measure(batch, count)
    )


def _with_far(loss: LossSubject) -> tuple[Batch, Tensor]:
    """Return a batch, and an index of logits far from any label in a sequence, or else those of the last sample."""
    labels = loss.batch.labels.clone()
    if not loss.task.sequence:
        labels[-1] = IGNORED
    batch = replace(loss.batch, labels=labels)
    return batch, loss.task.unread(batch)


def reads(loss: LossSubject) -> Iterator[Finding]:
    """Check that each label is predicted by the logit at its own position, or the one before it in a causal model.

    Fix: shift exactly once, along the sequence, before flattening: logits[:, :-1] predict labels[:, 1:]; do not shift
    for masked, sequence-to-sequence and token classification models, or if the collator has already shifted.
    """
    rows, width, *rest = loss.batch.labels.shape
    columns = [*product(*map(range, rest))][: None if loss.task.by_sequence else 1]
    for row, place in [(0, 3), (0, 1), (0, 0), (1, 0), (0, width - 1), (rows - 1, 2)]:
        found: set[tuple[int, ...]] = set()
        for draw in map(loss.draw, _SEEDS):
            labels = [(row, place, *column) for column in columns]
            for label in labels:
                draw.labels[label] = 1
            _, gradient = loss.measure(draw.only(*labels), 1)
            found |= {tuple(position) for position in gradient.abs().sum(-1).nonzero().tolist()}
        before = place - loss.task.shift
        expected = [(row, before, *column) for column in columns] if before >= 0 else []
        yield f"label {(row, place)} alone reads the logits at", sorted(found), expected


def padding(loss: LossSubject) -> Iterator[Finding]:
    """Check that more padding does not change the loss.

    Fix: count the labels that are not -100, not all positions (`numel()`, `mean()`), and shift before flattening.
    """
    for side, left, right in (("right", 0, 3), ("left", 2, 0)):
        labels = loss.batch.labels.clone()
        labels[:, : loss.task.shift * left] = IGNORED
        batch = replace(loss.batch, labels=labels)
        value, gradient = loss.measure(batch, None)
        expected = value, widen(gradient, left, right, 0)
        yield from _both(f"padded on the {side}", loss.measure(loss.task.padded(batch, left, right), None), expected)


def count_none(loss: LossSubject) -> Iterator[Finding]:
    """Check that without num_items_in_batch the loss divides by the number of its items.

    Fix: `count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch`, with the shifted labels
    of a causal model; if the Trainer counts unshifted labels, wrap the collator in lossfns.collators.mask_first_label.
    """
    batch, _ = _with_far(loss)
    items = loss.count(batch.labels)
    yield from _both(f"num_items_in_batch=None, {items} items", loss.measure(batch, None), loss.measure(batch, items))


def count_given(loss: LossSubject) -> Iterator[Finding]:
    """Check that the loss is a sum over items divided by num_items_in_batch.

    Fix: `return total / num_items_in_batch`. The Trainer expects a custom loss to be divided already: with a mean over
    the items of a call, n accumulation steps make the gradients n times too large.
    """
    value, gradient = loss.measured
    yield from _both("twice the count", loss.measure(loss.batch, 2 * loss.items), (value / 2, gradient / 2))
    large = loss.value(loss.batch, torch.tensor(_LARGE)) * _LARGE
    yield f"the sum, with a count of {_LARGE}", large, value * loss.items


def additive(loss: LossSubject) -> Iterator[Finding]:
    """Check that the loss of a batch is the mean of the losses of its items, each computed independently.

    Fix: compute the complete loss of each item, with all factors and powers, then sum over all items of the batch; do
    not average over rows, and apply nothing to a mean. `(B, 1) - (B,)` broadcasts to `(B, B)`: reshape one of them.
    """
    every = [*range(len(loss.batch.labels))]
    if loss.task.by_token:
        parts = [(every, loss.batch.only(position)) for position in loss.task.positions(loss.batch.labels)]
    else:
        parts = [([row], loss.batch.rows([row])) for row in every]
    yield from _both("all items at once", loss.measure(loss.batch, None), loss.together(parts, None))


def permutation(loss: LossSubject) -> Iterator[Finding]:
    """Check that the order of the rows does not change the loss.

    Fix: treat all rows the same; nothing may depend on the index of a row in the batch.
    """
    order, (value, gradient) = [2, 0, 3, 1], loss.measured
    reordered = loss.measure(loss.batch.rows(order), loss.items)
    yield from _both("rows in another order", reordered, (value, gradient[order]))


# --- training setups -------------------------------------------------------------------------------------------------


def count_forms(loss: LossSubject) -> Iterator[Finding]:
    """Check that the count may be a number or a tensor, integer or floating, with one dimension or none.

    Fix: `count = torch.as_tensor(num_items_in_batch, device=total.device).sum()`.
    """
    tensor = torch.tensor(loss.items)
    for count in (loss.items, float(loss.items), tensor, tensor.float(), tensor[None], tensor[None].float()):
        yield f"count {count!r}", loss.measure(loss.batch, count)[0], loss.measured[0]


def data_parallel(loss: LossSubject) -> Iterator[Finding]:
    """Check that the loss divides by the sum of a count with one entry per device, as DataParallel passes it.

    Fix: `count = torch.as_tensor(num_items_in_batch, device=total.device).sum()`; the Trainer corrects the rest.
    """
    for devices in (2, 4):
        count = torch.full((devices, 1), loss.items)
        given = loss.measure(loss.batch, count)
        yield from _both(f"a ({devices}, 1) count", given, loss.measure(loss.batch, devices * loss.items))
        yield f"the ({devices}, 1) count after the call", count, torch.full_like(count, loss.items)


def accumulation(loss: LossSubject) -> Iterator[Finding]:
    """Check that the losses of micro-batches add up to the loss of the whole batch.

    Fix: `return total / num_items_in_batch`, where total is the sum over all items of this call only.
    """
    for split in ([[0], [1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]):
        parts = [(rows, loss.task.trimmed(loss.batch.rows(rows))) for rows in split]
        sizes = " + ".join(str(len(rows)) for rows in split)
        yield from _both(f"{sizes} rows", loss.together(parts, loss.items), loss.measured)


def processes(loss: LossSubject) -> Iterator[Finding]:
    """Check that the loss does not depend on the number of processes.

    Fix: do not multiply by the world size: the count already includes all processes, and the Trainer corrects for the
    average that DDP takes.
    """
    expected = loss.measured
    group = mock.patch.multiple(
        torch.distributed,
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_world_size=lambda group=None: 2,
        get_rank=lambda group=None: 0,
    )
    with group, mock.patch.dict(os.environ, WORLD_SIZE="2", RANK="0"):
        given = loss.measure(loss.batch, loss.items)
    yield from _both("in one of two processes", given, expected)


def all_ignored(loss: LossSubject) -> Iterator[Finding]:
    """Check that the loss is exactly 0 if every label is ignored, with a graph to the logits and zero gradients.

    Fix: sum over the selected items even if there are none, and divide by `count.clamp(min=1)`; do not use a mean or
    return early.
    """
    nothing = loss.batch.only()
    for count in (None, 0, torch.tensor(0), torch.tensor(3)):
        value, leaf = loss.live(nothing, count)
        yield f"count {count!r}", value, 0.0, 0.0
        yield f"count {count!r}, requires_grad", value.requires_grad, True
        (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True)
        yield _reached(f"count {count!r}, graph", gradient)
        yield f"count {count!r}, gradient", gradient, torch.zeros_like(leaf), 0.0
    labels = loss.batch.labels.clone()
    labels[1] = IGNORED
    given, expected = replace(loss.batch, labels=labels), loss.batch.rows([0, 2, 3])
    yield "one of four rows ignored", loss.measure(given, None)[0], loss.measure(expected, None)[0]


# --- numerics --------------------------------------------------------------------------------------------------------


def dtypes(loss: LossSubject) -> Iterator[Finding]:
    """Check that logits of any dtype give a float32 loss that is computed in float32.

    Fix: start with `logits = logits.float()`, or use `lossfns.token_statistics`, which converts in chunks; keep sums
    and the count out of bfloat16 and float16: `count.to(total.dtype)` with a float32 total.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for seed in _SEEDS:
            batch = _single(loss.draw(seed), dtype)
            twin = replace(loss.draw(seed), logits=batch.logits.double())
            value, gradient = loss.measure(batch, loss.items)
            exact, expected_gradient = loss.measure(twin, loss.items)
            yield f"{dtype} logits, dtype", str(value.dtype), "torch.float32"
            yield f"{dtype} logits", value, exact, 5e-5
            large, expected = (loss.value(given, torch.tensor(_LARGE)).double() * _LARGE for given in (batch, twin))
            yield f"{dtype} logits, the sum, with a count of {_LARGE}", large, expected, 5e-5
            rounding, of_sum = 2 * torch.finfo(dtype).eps + 1e-5, expected_gradient * loss.items
            yield f"{dtype} logits, gradient of the sum", gradient * loss.items, of_sum, rounding


def extremes(loss: LossSubject) -> Iterator[Finding]:
    """Check that the loss and its gradient are finite for very large and very small logits and large differences.

    Fix: use `log_softmax` or `logsumexp` instead of `softmax().log()`, and subtract the maximum of each item, not that
    of the batch; use `expm1`, `log1p` and `clamp(min=tiny)` near p = 1.
    """
    batch = _single(loss.batch, torch.float32)
    signs = [_single(loss.draw(seed), torch.float32).logits.sign() for seed in _SEEDS]
    ones, by_item = torch.ones_like(batch.logits), signs[0][..., :1].expand_as(batch.logits)
    for pattern in (*signs, by_item, ones, -ones):
        for size in (1e2, 1e4):
            value, gradient = loss.measure(replace(batch, logits=pattern * size), loss.items)
            yield f"logits of ±{size:g}, the loss is finite", bool(value.isfinite()), True
            yield f"logits of ±{size:g}, the gradient is finite", bool(gradient.isfinite().all()), True


def _single(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch with logits of this dtype, and with float32 instead of float64 everywhere else."""
    extras = {name: extra.float() if extra.dtype == torch.float64 else extra for name, extra in batch.extras.items()}
    labels = batch.labels.float() if batch.labels.is_floating_point() else batch.labels
    return Batch(batch.logits.to(dtype), labels, extras)


def gradient(loss: LossSubject) -> Iterator[Finding]:
    """Check that the gradient is the derivative of the loss.

    Fix: do not use detach() or .data where a gradient should flow; test a hand-written backward with gradcheck.
    """
    # In float32 rounding dominates a short step, and a long step crosses the kinks of a hinge: one of the two must fit.
    steps, tolerance = ((1e-5,), 1e-6) if loss.tolerance < 1e-6 else ((1e-3, 3e-2), 5e-3)
    _, gradient = loss.measure(loss.batch, 1)

    def difference(direction: Tensor, step: float) -> Tensor:
        batches = [replace(loss.batch, logits=loss.batch.logits + move * direction) for move in (step, -step)]
        up, down = (loss.value(batch, 1).double() for batch in batches)
        return (up - down) / (2 * step)

    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        direction = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
        direction /= direction.norm()
        found = (gradient * direction).sum()
        nearest = min((difference(direction, step) for step in steps), key=lambda value: float((value - found).abs()))
        yield f"derivative along direction {seed}", found, nearest, tolerance


def picklable(loss: LossSubject) -> Iterator[Finding]:
    """Check that the loss can be pickled, so that it can be sent to other processes and saved to a file.

    Fix: use a module-level function, functools.partial of one, or a frozen dataclass, not a lambda or inner function.
    """
    again = replace(loss, loss=pickle.loads(pickle.dumps(loss.loss)))
    yield "the loss of the unpickled copy", again.value(again.batch, loss.items), loss.value(loss.batch, loss.items)


def scales_with_weights(loss: LossSubject) -> Iterator[Finding]:
    """Check that the weight of a class multiplies the losses of its items and has no other effect.

    Fix: compute the loss from unweighted probabilities, multiply by the weight last, and divide by the number of items.
    """
    reweight = loss.reweight
    assert reweight is not None

    def weighted(factor: float) -> Tensor:
        table = torch.ones(loss.classes, dtype=torch.float64)
        table[0] = factor
        return replace(loss, loss=reweight(table)).value(loss.batch, loss.items)

    once = weighted(1.0)
    yield "the change for weight 5, from that for weight 2", weighted(5.0) - once, 4 * (weighted(2.0) - once)


def matches_reference(loss: LossSubject) -> Iterator[Finding]:
    """Check that the loss equals the reference.

    Fix: compare the two formulas on a single item; they differ in a factor, base, sign or normalization.
    """
    assert loss.reference is not None
    for draw in map(loss.draw, _SEEDS):
        count = loss.count(draw.labels)
        expected = loss.reference(*loss.task.pairs(draw)).double().sum() / count
        yield "the mean over the batch", loss.value(draw, count), expected


RULES: tuple[Check, ...] = (
    signature, returns, stateless, inputs, in_place,
    every_label, ignored, selects, reads, padding, count_none, count_given, additive, permutation,
    count_forms, data_parallel, accumulation, processes, all_ignored,
    dtypes, extremes, gradient, picklable, scales_with_weights, matches_reference,
)  # fmt: skip


def loss_rules(
    task: str | Task = "causal_lm",
    *,
    classes: int = 7,
    extras: Mapping[str, Extra] | None = None,
    count: Callable[[Tensor], int] | None = None,
    reference: Callable[[Tensor, Tensor], Tensor] | None = None,
    reweight: Callable[[Tensor], Loss] | None = None,
    skip: Mapping[str, str] | None = None,
) -> list[Rule]:
    """Return the rules for the losses of a task, to use with `pytest.mark.parametrize`.

    Args:
        task: `causal_lm`, `masked_lm`, `seq2seq_lm`, `token_classification` (logits `(B, S, classes)`, labels
            `(B, S)`), `classification` (`(B, classes)`, `(B,)`), `multi_label` (`(B, classes)`, labels 0.0 and 1.0 of
            the same shape) or `regression` (`(B, 1)`, `(B,)`), each with -100 for a missing label; or a `Task` for
            outputs and labels of other shapes.
        classes: number of classes of the logits.
        extras: further entries of a dict of labels by name: functions of the labels that return one tensor `(B, S,
            ...)` or `(B,)`.
        count: the number of items that the Trainer counts for labels; by default the number of labels that are not
            -100, shifted for a causal model.
        reference: `(logits (n, classes), labels (n,)) -> (n,)`, the expected loss of each item; adds the rule
            `matches_reference`.
        reweight: builds the loss from class weights `(classes,)`; adds the rule `scales_with_weights`.
        skip: rules that this loss need not keep, with the reason, as in `{"additive": "a ranking loss"}`.

    Returns:
        The rules: `rule(my_loss)` returns a verdict or raises AssertionError, and `rule.name` is its name.

    Raises:
        ValueError: the task is unknown or its batches do not fit, or `skip` names an unknown rule or gives no reason.

    Example:
        >>> from lossfns import causal_lm_loss
        >>> [rule(causal_lm_loss).difference for rule in loss_rules("causal_lm") if rule.name == "reads"]
        [0.0]
    """
    found = find_task(task)
    found.check(classes)
    left_out: dict[Check, bool] = {
        reads: not found.sequence,
        padding: not found.sequence,
        scales_with_weights: reweight is None,
        matches_reference: reference is None,
    }
    given = classes, extras, count or found.items, reference, reweight
    checks = [rule for rule in RULES if not left_out.get(rule)]
    return select(checks, lambda loss: LossSubject(loss, found, *given), skip)


def check_loss(loss: Loss, task: str | Task = "causal_lm", **options: Any) -> Report:
    """Check a `compute_loss_func` against all rules of its task.

    Args:
        loss: `(outputs, labels, num_items_in_batch) -> 0-d tensor`.
        task: the task of the loss, as for `loss_rules`.
        **options: the options of `loss_rules`.

    Returns:
        The report of all comparisons, to print.

    Raises:
        AssertionError: a rule is broken; the message has its name, the given and expected values, and the fix.
        ValueError: as for `loss_rules`.

    Example:
        >>> def mean_loss(outputs, labels, num_items_in_batch=None):
        ...     return torch.nn.functional.cross_entropy(outputs.logits, labels)
        >>> check_loss(mean_loss, "classification")
        Traceback (most recent call last):
        AssertionError: mean_loss breaks the rule `count_given`.
          The loss is a sum over items divided by num_items_in_batch.
          twice the count: ...
    """
    return judge(loss, loss_rules(task, **options), options.get("skip"))
