"""Combine terms into one term, and losses into one loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ._core.alignment import Labels, Outputs, scored_places, split_labels
from ._core.checks import MARKERS, ClassValues, check_shift, class_table, number
from ._core.combined import Combined, _classes, class_weights, plain_name, scaled, token_weights
from ._core.normalization import NumItems, accumulator_dtype, item_count
from ._core.recorder import current_notes
from ._core.signature import Term, check_options, name_of, parameters
from ._linear import is_linear

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Call:
    """One loss to call: the names of the parts that it computes, and its weight in the sum."""

    names: tuple[str, ...]
    weight: float
    loss: Loss


@dataclass(frozen=True, eq=False, repr=False)
class AddedLosses:
    """A weighted sum of losses, itself a loss. Built by `add_losses`.

    Attributes:
        parts: name, weight and loss of each.
        calls: what is called: parts that differ in their terms alone are one.
    """

    parts: tuple[tuple[str, float, Loss], ...]
    calls: tuple[Call, ...]

    def __call__(self, outputs: Outputs, labels: Labels, num_items_in_batch: NumItems = None) -> Tensor:
        return added(self.calls, [call.loss(outputs, labels, num_items_in_batch) for call in self.calls])

    def __repr__(self) -> str:
        return f"add_losses({', '.join(f'{name}={weight:g} * {name_of(loss)}' for name, weight, loss in self.parts)})"


def add_losses(parts: Mapping[str, tuple[float, Loss]]) -> AddedLosses:
    """The weighted sum of several losses of one batch.

    Parts that are the same loss of this package with the same options but for `term` are one pass over the logits,
    whatever their number: `partial(distillation_loss, term=cross_entropy)` beside `distillation_loss`. Others, and
    those whose sum is not the loss of the summed terms (`normalize="weights"`, `label_smoothing` of classes,
    several heads, pixels), are computed one after the other, each with a gradient of the logits of its own.

    Args:
        parts: `{name: (weight, loss)}`, each loss a function `(outputs, labels, num_items_in_batch)`.

    Returns:
        A loss; picklable if its parts are.

    Raises:
        TypeError: a part is not such a pair, or a loss has no such option.
        ValueError: a weight is not finite; a part other than the last that reads the logits has
            `overwrite_logits=True`.

    Example:
        >>> from lossfns import causal_lm_loss, focal
        >>> add_losses({"ce": (0.5, causal_lm_loss), "focal": (0.5, partial(causal_lm_loss, term=focal))})
        add_losses(ce=0.5 * causal_lm_loss, focal=0.5 * causal_lm_loss(term=focal))
    """
    if not isinstance(parts, Mapping) or not parts:
        raise TypeError('add_losses needs at least one part, as in add_losses({"ce": (1.0, causal_lm_loss)})')
    for name, part in parts.items():
        if not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], (int, float)) and callable(part[1])):
            raise TypeError(f"part '{name}' must be (weight, loss), as in (0.5, causal_lm_loss), got {part!r}")
        if not math.isfinite(part[0]):
            raise ValueError(f"the weight of part '{name}' must be finite, got {part[0]}")
        check_options(part[1], f"the loss of part '{name}'")
    calls = _merged([Call((name,), float(weight), loss) for name, (weight, loss) in parts.items()])
    for call in calls[:-1]:
        if _options(call.loss).get("overwrite_logits"):
            raise ValueError(
                f"{name_of(call.loss)} has overwrite_logits=True, but another part reads the logits after it: they "
                "would be gone. Only the last part may overwrite them"
            )
    return AddedLosses(tuple((name, float(weight), loss) for name, (weight, loss) in parts.items()), tuple(calls))


def added(calls: Sequence[Call], values: Sequence[Tensor]) -> Tensor:
    """The weighted sum of what the calls gave, a tensor of its own."""
    total = scaled(calls[0].weight, values[0])
    for call, value in zip(calls[1:], values[1:], strict=True):
        total = total + scaled(call.weight, value)
    return total


def _merged(parts: list[Call]) -> list[Call]:
    """Join the parts that differ in their terms alone, at the place of the last of them."""
    groups: list[list[Call]] = []
    for part in parts:
        same = next((group for group in groups if _alike(group[0].loss, part.loss)), None)
        if same is not None:
            groups.remove(same)
        groups.append([*(same or []), part])
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]


def _joined(group: list[Call]) -> Call:
    loss = group[0].loss
    term = weighted_sum(*((part.weight, _options(part.loss)["term"]) for part in group))
    names = tuple(name for part in group for name in part.names)
    return Call(names, 1.0, partial(_function(loss), **{**_options(loss), "term": term}))


def _alike(left: Loss, right: Loss) -> bool:
    """Are these one loss with the same options but for the term?"""
    own, other = _options(left), _options(right)
    if _function(left) is not _function(right) or own.keys() != other.keys():
        return False
    same = all(name == "term" or _same(own[name], other[name]) for name in own)
    return same and is_linear(_function(left), own)


def _same(left: Any, right: Any) -> bool:
    return left is right or (isinstance(left, (int, float, str)) and type(left) is type(right) and left == right)


def _function(loss: Loss) -> Loss:
    return loss.func if isinstance(loss, partial) and not loss.args else loss


def _options(loss: Loss) -> dict[str, Any]:
    """The options of a loss and what they are bound to, or their defaults."""
    found = inspect.signature(loss).parameters.values()
    return {option.name: option.default for option in found if option.kind is option.KEYWORD_ONLY}


@dataclass(frozen=True, eq=False, repr=False)
class WithAuxiliary:
    """A loss and a term of the model's own, itself a loss. Built by `with_auxiliary`."""

    loss: Loss
    field: str
    weight: float
    shift: int

    def __call__(self, outputs: Outputs, labels: Labels, num_items_in_batch: NumItems = None) -> Tensor:
        own = self._own(outputs)
        items = _items(labels, self.shift)
        loss = self.loss(outputs, labels, num_items_in_batch)
        own = items / item_count(num_items_in_batch, items, own.device) * own
        notes = current_notes()
        if notes is not None:
            parts = notes.parts or [(plain_name(self.loss), loss.detach())]
            notes.parts = [*parts, (self.field, own.detach())]
        return loss + scaled(self.weight, own).to(loss.dtype)

    def _own(self, outputs: Outputs) -> Tensor:
        own = outputs.get(self.field) if isinstance(outputs, Mapping) else None
        if not isinstance(own, Tensor):
            among = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
            raise ValueError(
                f"the model returned no '{self.field}' (outputs: {among}). A mixture of experts computes its aux_loss "
                "only with model.config.output_router_logits = True"
            )
        return own.mean()  # one a device under DataParallel

    def __repr__(self) -> str:
        return f"with_auxiliary({name_of(self.loss)}, {self.field!r}, {self.weight:g})"


def with_auxiliary(loss: Loss, field: str, weight: float, *, shift: int | None = None) -> WithAuxiliary:
    """Add a term that the model computes itself: the balance of a mixture of experts, a router's z-loss, a depth head.

    The Trainer takes the labels away, so that the model adds no such term to its loss. It is a mean over a micro-batch;
    weighted by the share of the window's items that stand in it, it keeps its coefficient whatever the accumulation
    steps and processes.

    Args:
        loss: any loss that divides by the Trainer's count of labels.
        field: name of the term among the model's outputs, `aux_loss` for the routers of transformers.
        weight: its coefficient, `model.config.router_aux_loss_coef` for those.
        shift: 1 where the loss is causal, 0 elsewhere: which labels of a row count. None takes the loss's own `shift`.

    Returns:
        A loss; picklable if `loss` is.

    Raises:
        TypeError: the loss has no such option, or an argument is of another type.
        ValueError: the weight is not finite, or neither a shift is given nor has the loss one; in the call: the outputs
            have no such term, or the labels have no positions to shift.

    Example:
        >>> import torch
        >>> from lossfns import causal_lm_loss
        >>> loss = with_auxiliary(causal_lm_loss, "aux_loss", 0.5)
        >>> loss({"logits": torch.zeros(1, 2, 4), "aux_loss": torch.tensor(2.0)}, torch.tensor([[1, 2]]))
        tensor(2.3863)
    """
    check_options(loss, "loss")
    if not isinstance(field, str):
        raise TypeError(f"field must be the name of an output, got {field!r}")
    if not math.isfinite(number(weight, "weight")):
        raise ValueError(f"weight must be finite, got {weight}")
    if shift is None:
        shift = _shift_of(loss)
    if shift is None:
        raise ValueError(
            f"{name_of(loss)} has no shift that tells which labels the Trainer counts: say with_auxiliary(..., "
            "shift=0), or shift=1 where the loss is causal"
        )
    check_shift(shift)
    return WithAuxiliary(loss, field, weight, shift)


def _shift_of(loss: Loss) -> int | None:
    """The shift that a loss says it has, or all the parts of a sum have."""
    if isinstance(loss, AddedLosses):
        found = {_shift_of(part) for _, _, part in loss.parts}
        return found.pop() if len(found) == 1 else None
    if isinstance(loss, WithAuxiliary):
        return loss.shift
    own = inspect.signature(loss).parameters.get("shift")
    return None if own is None or own.default is own.empty else own.default


def _items(labels: Labels, shift: int) -> Tensor:
    """How many labels of this call the Trainer counted, 0-d, float64 where the device has it."""
    ids, extras = split_labels(labels)
    units = [counted for counted, marker in MARKERS.items() if marker in extras]
    if units:
        raise ValueError(
            f"with_auxiliary weights its term by labels, but the collator lets the Trainer count {units[0]}: drop "
            f"count_{units[0]}"
        )
    return scored_places(ids, shift).sum().to(accumulator_dtype(ids.device))


def weighted_sum(*parts: tuple[float, Term]) -> Combined:
    """Several terms in one pass over the logits: the sum of `weight * term`.

    Args:
        *parts: pairs of a weight and a term.

    Returns:
        A term that asks for what its parts ask for; picklable if they are.

    Raises:
        TypeError: a part is not such a pair.
        ValueError: a weight is not finite, or parts hold weights for different numbers of classes.

    Example:
        >>> from lossfns import cross_entropy, z_loss
        >>> weighted_sum((1.0, cross_entropy), (1e-4, z_loss))
        (1 * cross_entropy + 0.0001 * z_loss)
    """
    if not parts:
        raise TypeError("weighted_sum needs at least one (weight, term) pair")
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], (int, float)) and callable(part[1])):
            raise TypeError(f"weighted_sum takes pairs (weight, term) such as (1e-4, z_loss), got {part!r}")
        if not math.isfinite(part[0]):
            raise ValueError(f"a weight must be finite, got {part!r}")
        parameters(part[1])
    weights, terms = zip(*parts, strict=True)
    return Combined(terms, tuple(map(float, weights)), classes=_classes(terms))


def token_weighted(term: Term) -> Combined:
    """The term times a weight for each token: the extra `token_weights` of a dict of labels, `(B, S)` or `(B,)`.

    The sum is still divided by the number of items, so that gradient accumulation changes nothing; weights with mean 1
    keep the size of the loss.

    Args:
        term: the term.

    Returns:
        A term that asks for `token_weights` too; picklable if `term` is.

    Example:
        >>> import torch
        >>> from lossfns import cross_entropy
        >>> token_weighted(cross_entropy)(log_prob=torch.tensor([-1.0, -2.0]), token_weights=torch.tensor([1.0, 0.5]))
        tensor([1., 1.])
    """
    parameters(term)
    return Combined((term,), (1.0,), token_weights, _classes([term]))


def class_weighted(term: Term, weights: ClassValues) -> Combined:
    """The term times the weight of the item's class.

    Args:
        term: the term, computed from unweighted probabilities.
        weights: one weight a class, `(C,)`: a list, an array or a tensor of any dtype on any device.

    Returns:
        A term that asks for `labels` too; picklable if `term` is.

    Raises:
        ValueError: weights are not one finite, non-negative number a class.

    Example:
        >>> import torch
        >>> from lossfns import cross_entropy
        >>> weighted = class_weighted(cross_entropy, [1.0, 3.0])
        >>> weighted(log_prob=torch.tensor([-1.0, -1.0]), labels=torch.tensor([0, 1]))
        tensor([1., 3.])
    """
    parameters(term)
    table = class_table(weights, "class weights", smallest=0.0)
    return Combined((term,), (1.0,), partial(class_weights, table=table), _classes([term], table.numel()))
