"""Rules for any `compute_loss_func`: what the Trainer relies on, and what makes a loss the same in every setting.

The rules stand in the order in which they are asked, from the most particular defect to the most general.
"""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .._core.checks import IGNORED
from .._core.normalization import NumItems
from .rules import Check, Finding, Report, Rule, judge, select
from .tasks import Batch, Extra, Task, find_task, outputs, widen

Loss = Callable[..., Tensor]
Measured = tuple[Tensor, Tensor]  # the loss, the gradient of the logits

_DRAWS = range(3)
_LABELS = 64  # that are asked about one by one
_LARGE = 70_001  # as a count neither whole in bfloat16 nor finite in float16


@dataclass(frozen=True)
class LossSubject:
    """A loss under test, and how to call it."""

    loss: Loss
    task: Task
    classes: int
    extras: Mapping[str, Extra] | None
    count: Callable[[Tensor], int]
    reference: Callable[[Tensor, Tensor], Tensor] | None
    reweight: Callable[[Tensor], Loss] | None

    @cached_property
    def batch(self) -> Batch:
        """The batch that most rules start from."""
        return self.draw(0)

    @cached_property
    def items(self) -> int:
        """The number of items of that batch."""
        return self.count(self.batch.labels)

    @cached_property
    def tolerance(self) -> float:
        """For float64 logits: what is left to a loss that computes in float64, or in float32 whatever it returns."""
        found, rounded = (
            self.value(replace(self.batch, logits=logits), self.items)
            for logits in (self.batch.logits, self.batch.logits.float().double())
        )
        return 1e-9 if found.dtype == torch.float64 and not torch.equal(found, rounded) else 1e-5

    def draw(self, seed: int) -> Batch:
        """A batch of the task."""
        return self.task.batch(self.classes, self.extras, seed)

    def value(self, batch: Batch, count: NumItems) -> Tensor:
        """The loss, called as the Trainer calls it; like a model's own, the logits are no leaf."""
        return self.loss(self.task.output(batch.logits.clone()), batch.targets, num_items_in_batch=count)

    def live(self, batch: Batch, count: NumItems) -> Measured:
        """The loss with its graph, and the leaf that its gradient reaches."""
        leaf = batch.logits.detach().clone().requires_grad_()
        return self.value(replace(batch, logits=leaf), count), leaf

    def measure(self, batch: Batch, count: NumItems) -> Measured:
        """The loss and its gradient, 0 where there is no graph."""
        value, leaf = self.live(batch, count)
        if not value.requires_grad:
            return value, torch.zeros_like(leaf)
        (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True)
        return value.detach(), gradient

    def together(self, parts: Iterable[tuple[Sequence[int], Batch]], count: NumItems) -> Measured:
        """What the parts of the batch, each with the rows it comes from, add up to; without a count, by their items."""
        value, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(self.batch.logits)
        for rows, part in parts:
            share = self.task.items(part.labels) / self.task.items(self.batch.labels) if count is None else 1.0
            loss, slope = self.measure(part, count)
            value += share * loss
            places = gradient[:, : slope.shape[1]]
            places[list(rows)] += share * slope
        return value, gradient


def _both(what: str, given: Measured, expected: Measured) -> Iterator[Finding]:
    yield what, given[0], expected[0]
    yield f"{what}, gradient", given[1], expected[1]


# --- the call --------------------------------------------------------------------------------------------------------


def signature(loss: LossSubject) -> Iterator[Finding]:
    """It takes (outputs, labels, num_items_in_batch=count), as the Trainer calls it.

    Fix: write `def my_loss(outputs, labels, num_items_in_batch=None)`; further options need a default, or a partial.
    """
    try:
        inspect.signature(loss.loss).bind(outputs, loss.batch.labels, num_items_in_batch=None)
        problem = None
    except TypeError as error:
        problem = str(error)
    yield "what Python says to this call", problem, None


def returns(loss: LossSubject) -> Iterator[Finding]:
    """It returns one finite number with a graph, as a 0-d tensor.

    Fix: sum over the items before dividing, and neither detach nor call item() on the way.
    """
    value, leaf = loss.live(loss.batch, loss.items)
    yield "type", "Tensor" if isinstance(value, Tensor) else type(value).__name__, "Tensor"
    yield "shape", tuple(value.shape), ()
    yield "floating", value.is_floating_point(), True
    yield "requires_grad", value.requires_grad, True
    yield "finite", bool(value.isfinite()), True
    yield _reached("graph", torch.autograd.grad(value, leaf, allow_unused=True)[0])


def _reached(what: str, gradient: Tensor | None) -> Finding:
    """The graph leads to the logits, whose gradient this is."""
    return what, "cut off" if gradient is None else "reaches the logits", "reaches the logits"


def stateless(loss: LossSubject) -> Iterator[Finding]:
    """Every call starts afresh: neither numbers nor memory are kept from one to the next.

    Fix: keep no running values in the loss, and return a new tensor each time.
    """
    first, second = loss.value(loss.batch, loss.items), loss.value(loss.batch, loss.items)
    kept = second.detach().clone()
    yield "the second call", second, first
    first.detach().mul_(3)
    yield "the second result after the first was scaled in place", second, kept


def inputs(loss: LossSubject) -> Iterator[Finding]:
    """logits, labels and the count are left as they were.

    Fix: work on copies: `labels = labels.masked_fill(...)`, `count = count.clamp(min=1)`, without the underscores.
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
    """The Trainer may scale the result in place, as it does after every call.

    Fix: end with an operation that does not save its own result (sqrt, exp, sigmoid and tanh do): `return loss * 1`; a
    hand-written backward multiplies by the gradient that it is given.
    """
    _, expected = loss.measure(loss.batch, loss.items)
    value, leaf = loss.live(loss.batch, loss.items)
    value *= 0.5
    yield "gradient after loss *= 0.5", torch.autograd.grad(value, leaf)[0], expected / 2


# --- what counts -----------------------------------------------------------------------------------------------------


def every_label(loss: LossSubject) -> Iterator[Finding]:
    """Every label but -100 counts.

    Fix: ignore -100 and nothing else, because -100 is what the Trainer leaves out of its count; let the collator map
    other ids (padding, 255) to it.
    """

    def moves(value: float, draw: Batch) -> bool:
        place = loss.task.positions(draw.labels)[3] if loss.task.by_token else (0,)
        draw.labels[place] = value
        single = draw.only(place) if loss.task.by_token else draw.rows(place)
        return bool(loss.measure(single, 1)[1].any())

    values = loss.task.values(loss.classes)
    some = values[:: -(-len(values) // _LABELS)]  # of a large vocabulary not all, but both ends
    for value in dict.fromkeys((*some, *values[-1:])):
        moved = any(moves(value, loss.draw(seed)) for seed in range(8))  # a hinge or a limit may be flat at some
        yield f"label {value} alone moves the logits", moved, True


def ignored(loss: LossSubject) -> Iterator[Finding]:
    """Logits whose label is -100 change nothing.

    Fix: select the labels that count before anything else: `logits[labels != -100]`; smoothing, means over the
    vocabulary and regularisers too.
    """
    batch, far = _with_far(loss)
    other = batch.logits.clone()
    other[far] = torch.randn(other[far].shape, generator=torch.Generator().manual_seed(1), dtype=other.dtype) * 9
    count = loss.count(batch.labels)
    value, gradient = loss.measure(replace(batch, logits=other), count)
    yield "the loss with other logits there", value, loss.measure(batch, count)[0]
    yield "their gradient", gradient[far], torch.zeros_like(gradient[far])


def selects(loss: LossSubject) -> Iterator[Finding]:
    """Logits whose label is -100 may be infinite: they are left out, not multiplied by zero.

    Fix: 0 * inf is NaN, in backward too: index with the mask, or `torch.where` on the logits before the logarithm.
    """
    batch, far = _with_far(loss)
    other = batch.logits.clone()
    (other if other.ndim == batch.labels.ndim else other[..., 0])[far] = -torch.inf
    count = loss.count(batch.labels)
    yield from _both("with -inf there", loss.measure(replace(batch, logits=other), count), loss.measure(batch, count))


def _with_far(loss: LossSubject) -> tuple[Batch, Tensor]:
    """A batch and where its logits have nothing to do with any label: far away in a sequence, or in the last sample."""
    labels = loss.batch.labels.clone()
    if not loss.task.sequence:
        labels[-1] = IGNORED
    batch = replace(loss.batch, labels=labels)
    return batch, loss.task.unread(batch)


def reads(loss: LossSubject) -> Iterator[Finding]:
    """Each label is predicted by the logit at its own place, or by the one before in a causal model.

    Fix: shift exactly once, along the sequence, before flattening: logits[:, :-1] belong to labels[:, 1:]; do not shift
    for masked, sequence-to-sequence and token classification models, nor where the collator has done it.
    """
    rows, width, *behind = loss.batch.labels.shape
    beside = [*product(*map(range, behind))][: None if loss.task.whole else 1]
    for row, place in [(0, 3), (0, 1), (0, 0), (1, 0), (0, width - 1), (rows - 1, 2)]:
        found: set[tuple[int, ...]] = set()
        for draw in map(loss.draw, _DRAWS):
            labels = [(row, place, *rest) for rest in beside]
            for label in labels:
                draw.labels[label] = 1
            _, gradient = loss.measure(draw.only(*labels), 1)
            found |= {tuple(position) for position in gradient.abs().sum(-1).nonzero().tolist()}
        before = place - loss.task.shift
        expected = [(row, before, *rest) for rest in beside] if before >= 0 else []
        yield f"label {(row, place)} alone reads the logits at", sorted(found), expected


def padding(loss: LossSubject) -> Iterator[Finding]:
    """More padding changes nothing.

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
    """Without a count it divides by the number of its own items.

    Fix: `count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch`, of the shifted labels
    for a causal model; where the Trainer counts all, wrap the collator in lossfns.collators.mask_first_label.
    """
    batch, _ = _with_far(loss)
    items = loss.count(batch.labels)
    yield from _both(f"None beside {items} items", loss.measure(batch, None), loss.measure(batch, items))


def count_given(loss: LossSubject) -> Iterator[Finding]:
    """It is a sum over items divided by the count it is given.

    Fix: `return total / num_items_in_batch`. The Trainer takes a custom loss for divided already: a mean over the items
    of a call makes the gradients as many times too large as there are accumulation steps.
    """
    value, gradient = loss.measure(loss.batch, loss.items)
    yield from _both("twice the count", loss.measure(loss.batch, 2 * loss.items), (value / 2, gradient / 2))
    large = loss.value(loss.batch, torch.tensor(_LARGE)) * _LARGE
    yield f"the sum, by a count of {_LARGE}, too large for float16 and uint8", large, value * loss.items


def additive(loss: LossSubject) -> Iterator[Finding]:
    """The loss of a batch is the mean of what its items cost one by one: each counts once, the same, and on its own.

    Fix: compute the whole loss for each item, factors and powers too, then sum over all items of the batch at once; no
    means over rows, nothing applied to a mean. `(B, 1) - (B,)` broadcasts to `(B, B)`: reshape one of them.
    """
    everyone = [*range(len(loss.batch.labels))]
    if loss.task.by_token:
        parts = [(everyone, loss.batch.only(position)) for position in loss.task.positions(loss.batch.labels)]
    else:
        parts = [([row], loss.batch.rows([row])) for row in everyone]
    yield from _both("all at once", loss.measure(loss.batch, None), loss.together(parts, None))


def permutation(loss: LossSubject) -> Iterator[Finding]:
    """The order of the rows changes nothing.

    Fix: treat every row alike; nothing may depend on its place in the batch.
    """
    order = [2, 0, 3, 1]
    value, gradient = loss.measure(loss.batch, loss.items)
    yield from _both(
        "rows in another order", loss.measure(loss.batch.rows(order), loss.items), (value, gradient[order])
    )


# --- in every setting ------------------------------------------------------------------------------------------------


def count_forms(loss: LossSubject) -> Iterator[Finding]:
    """The count may be a number or a tensor, whole or not, with one dimension or none.

    Fix: `count = torch.as_tensor(num_items_in_batch, device=total.device).sum()`.
    """
    expected, _ = loss.measure(loss.batch, loss.items)
    whole = torch.tensor(loss.items)
    for count in (loss.items, float(loss.items), whole, whole.float(), whole[None], whole[None].float()):
        yield f"count {count!r}", loss.measure(loss.batch, count)[0], expected


def data_parallel(loss: LossSubject) -> Iterator[Finding]:
    """Under DataParallel the count comes once for each device, and their sum is what divides.

    Fix: `count = torch.as_tensor(num_items_in_batch, device=total.device).sum()`; the Trainer evens out the rest.
    """
    for devices in (2, 4):
        count = torch.full((devices, 1), loss.items)
        given = loss.measure(loss.batch, count)
        yield from _both(f"a ({devices}, 1) count", given, loss.measure(loss.batch, devices * loss.items))
        yield f"the ({devices}, 1) count afterwards", count, torch.full_like(count, loss.items)


def accumulation(loss: LossSubject) -> Iterator[Finding]:
    """micro-batches add up to the whole batch.

    Fix: `return total / num_items_in_batch`, where total sums over all items of the call and depends on no other call.
    """
    expected = loss.measure(loss.batch, loss.items)
    for split in ([[0], [1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]):
        parts = [(rows, loss.task.trimmed(loss.batch.rows(rows))) for rows in split]
        sizes = " + ".join(str(len(rows)) for rows in split)
        yield from _both(f"{sizes} rows", loss.together(parts, loss.items), expected)


def processes(loss: LossSubject) -> Iterator[Finding]:
    """The number of processes changes nothing.

    Fix: do not multiply by the world size: the count is that of all processes already, and the Trainer evens out that
    DDP averages.
    """
    expected = loss.measure(loss.batch, loss.items)
    group = mock.patch.multiple(
        torch.distributed,
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_world_size=lambda group=None: 2,
        get_rank=lambda group=None: 0,
    )
    with group, mock.patch.dict(os.environ, WORLD_SIZE="2", RANK="0"):
        given = loss.measure(loss.batch, loss.items)
    yield from _both("as one of two processes", given, expected)


def all_ignored(loss: LossSubject) -> Iterator[Finding]:
    """With every label ignored it is exactly 0, with a live graph and zero gradients.

    Fix: sum what is selected, even if that is nothing, and divide by `count.clamp(min=1)`; no mean, no early return.
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
    yield "one row of four", loss.measure(given, None)[0], loss.measure(expected, None)[0]


# --- the numbers -----------------------------------------------------------------------------------------------------


def dtypes(loss: LossSubject) -> Iterator[Finding]:
    """Logits of any dtype give a float32 loss, computed in float32.

    Fix: `logits = logits.float()` first, or `lossfns.token_statistics`, which does so in chunks; no sums in bfloat16,
    and no count: `count.to(total.dtype)` of a float32 total.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for seed in _DRAWS:
            batch = _single(loss.draw(seed), dtype)
            twin = replace(loss.draw(seed), logits=batch.logits.double())
            value, gradient = loss.measure(batch, loss.items)
            exact, slope = loss.measure(twin, loss.items)
            yield f"{dtype} logits, dtype", str(value.dtype), "torch.float32"
            yield f"{dtype} logits", value, exact, 5e-5
            large, expected = (loss.value(given, torch.tensor(_LARGE)).double() * _LARGE for given in (batch, twin))
            yield f"{dtype} logits, the sum, by a count of {_LARGE}", large, expected, 5e-5
            rounding = 2 * torch.finfo(dtype).eps + 1e-5
            yield f"{dtype} logits, gradient of the sum", gradient * loss.items, slope * loss.items, rounding


def extremes(loss: LossSubject) -> Iterator[Finding]:
    """It is finite, gradient too, for logits that are very large, very small and very far apart.

    Fix: `log_softmax` or `logsumexp` instead of `softmax().log()`, and the largest logit of each item, not of all;
    `expm1`, `log1p` and `clamp(min=tiny)` near p = 1.
    """
    batch = _single(loss.batch, torch.float32)
    signs = [_single(loss.draw(seed), torch.float32).logits.sign() for seed in _DRAWS]
    ones, by_item = torch.ones_like(batch.logits), signs[0][..., :1].expand_as(batch.logits)
    for pattern in (*signs, by_item, ones, -ones):
        for size in (1e2, 1e4):
            value, gradient = loss.measure(replace(batch, logits=pattern * size), loss.items)
            yield f"logits of ±{size:g}, the loss is finite", bool(value.isfinite()), True
            yield f"logits of ±{size:g}, the gradient is finite", bool(gradient.isfinite().all()), True


def _single(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with logits of a dtype, and float32 for whatever else was float64."""
    extras = {name: extra.float() if extra.dtype == torch.float64 else extra for name, extra in batch.extras.items()}
    labels = batch.labels.float() if batch.labels.is_floating_point() else batch.labels
    return Batch(batch.logits.to(dtype), labels, extras)


def gradient(loss: LossSubject) -> Iterator[Finding]:
    """The gradient is the derivative of the loss.

    Fix: do not detach or use .data where a gradient should flow; a hand-written backward needs gradcheck.
    """
    # In float32 a short step drowns in rounding, and a long one meets the kinks of a hinge: one of the two has to fit.
    steps, tolerance = ((1e-5,), 1e-6) if loss.tolerance < 1e-6 else ((1e-3, 3e-2), 5e-3)
    _, slope = loss.measure(loss.batch, 1)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        direction = torch.randn(slope.shape, generator=generator, dtype=slope.dtype)
        direction /= direction.norm()
        found = (slope * direction).sum()
        measured = [_slope(loss, direction, step) for step in steps]
        nearest = min(measured, key=lambda value: float((value - found).abs()))
        yield f"slope along direction {seed}", found, nearest, tolerance


def _slope(loss: LossSubject, direction: Tensor, step: float) -> Tensor:
    up, down = (
        loss.value(replace(loss.batch, logits=loss.batch.logits + move * direction), 1).double()
        for move in (step, -step)
    )
    return (up - down) / (2 * step)


def picklable(loss: LossSubject) -> Iterator[Finding]:
    """It survives pickling, so that it can be sent to other processes and kept in a file.

    Fix: a module-level function, functools.partial over one, or a frozen dataclass; no lambda, no inner function.
    """
    again = replace(loss, loss=pickle.loads(pickle.dumps(loss.loss)))
    yield "the loss of its copy", again.value(again.batch, loss.items), loss.value(loss.batch, loss.items)


def scales_with_weights(loss: LossSubject) -> Iterator[Finding]:
    """The weight of a class multiplies what its items cost, and nothing else.

    Fix: compute the loss from unweighted probabilities, multiply by the weight last, and divide by the count of items.
    """
    reweight = loss.reweight
    assert reweight is not None

    def weighted(factor: float) -> Tensor:
        table = torch.ones(loss.classes, dtype=torch.float64)
        table[0] = factor
        return replace(loss, loss=reweight(table)).value(loss.batch, loss.items)

    once = weighted(1.0)
    yield "weight 5 beside weight 2", weighted(5.0) - once, 4 * (weighted(2.0) - once)


def matches_reference(loss: LossSubject) -> Iterator[Finding]:
    """It is what the reference says.

    Fix: compare the two formulas on a single item; one of them has another factor, base, sign or normalisation.
    """
    assert loss.reference is not None
    for draw in map(loss.draw, _DRAWS):
        count = loss.count(draw.labels)
        expected = loss.reference(*loss.task.pairs(draw)).double().sum() / count
        yield "the mean over the batch", loss.value(draw, count), expected


RULES: tuple[Check, ...] = (
    signature,
    returns,
    stateless,
    inputs,
    in_place,
    every_label,
    ignored,
    selects,
    reads,
    padding,
    count_none,
    count_given,
    additive,
    permutation,
    count_forms,
    data_parallel,
    accumulation,
    processes,
    all_ignored,
    dtypes,
    extremes,
    gradient,
    picklable,
    scales_with_weights,
    matches_reference,
)


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
    """The rules that a loss for a task has to keep, one callable each, for `pytest.mark.parametrize`.

    Args:
        task: `causal_lm`, `masked_lm`, `seq2seq_lm`, `token_classification` (logits `(B, S, classes)`, labels
            `(B, S)`), `classification` (`(B, classes)`, `(B,)`), `multi_label` (`(B, classes)`, labels 0.0 and 1.0 of
            the same shape) or `regression` (`(B, 1)`, `(B,)`); -100 is a missing label in all of them. Or a `Task`, for
            outputs and labels of any other shape.
        classes: number of classes of the logits.
        extras: what else the labels carry, in a dict under these names: functions of the labels that return one tensor
            of their shape, `(B, S, ...)` or `(B,)`.
        count: what `num_items_in_batch` counts; None: the labels that are not -100, shifted for a causal model.
        reference: `(logits (n, classes), labels (n,)) -> (n,)`, the cost of each item; adds the rule
            `matches_reference`.
        reweight: class weights `(classes,)` -> the loss with those weights; adds the rule `scales_with_weights`.
        skip: rules that this loss need not keep, each with its reason, as `{"additive": "a ranking loss"}`.

    Returns:
        Callables with a name: `rule(my_loss)` raises AssertionError, or returns what was compared.

    Raises:
        ValueError: no such task, or one whose batches do not fit; no such rule, no reason.

    Example:
        >>> from lossfns import causal_lm_loss
        >>> [rule(causal_lm_loss).difference for rule in loss_rules("causal_lm") if rule.name == "reads"]
        [0.0]
    """
    found = find_task(task)
    found.check(classes)
    absent: dict[Check, bool] = {
        reads: not found.sequence,
        padding: not found.sequence,
        scales_with_weights: reweight is None,
        matches_reference: reference is None,
    }
    subject = partial(
        LossSubject,
        task=found,
        classes=classes,
        extras=extras,
        count=count or found.items,
        reference=reference,
        reweight=reweight,
    )
    return select([rule for rule in RULES if not absent.get(rule)], subject, skip)


def check_loss(loss: Loss, task: str | Task = "causal_lm", **options: Any) -> Report:
    """Hold a `compute_loss_func` to all the rules of its task.

    Args:
        loss: `(outputs, labels, num_items_in_batch) -> 0-d tensor`.
        task: what it is for, as in `loss_rules`.
        **options: those of `loss_rules`.

    Returns:
        What was compared, if every rule is kept; `print` it.

    Raises:
        AssertionError: a rule is broken: its name, what was given and expected, and how to mend it.
        ValueError: as for `loss_rules`.

    Example:
        >>> def mean_loss(outputs, labels, num_items_in_batch=None):
        ...     return torch.nn.functional.cross_entropy(outputs.logits, labels)
        >>> check_loss(mean_loss, "classification")
        Traceback (most recent call last):
        AssertionError: mean_loss breaks the rule `count_given`.
          It is a sum over items divided by the count it is given.
          twice the count: ...
    """
    return judge(loss, loss_rules(task, **options), options.get("skip"))
