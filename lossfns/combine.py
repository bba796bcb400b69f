"""Combine terms into one term, and losses into one loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ._core.alignment import Labels, Outputs, output_entry, scored_places, split_labels
from ._core.checks import MARKERS, ClassValues, check_shift, class_table
from ._core.combined import Combined, class_weights, common_classes, function_name, scaled, token_weights
from ._core.normalization import NumItems, accumulator_dtype, item_count
from ._core.recorder import ACTIVE
from ._core.signature import Term, check_options, name_of, parameters

Loss = Callable[..., Tensor]


def weighted_sum(*parts: tuple[float, Term]) -> Combined:
    """Return the sum of `weight * term` as one term: one pass over the logits for any number of terms.

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
        raise TypeError("weighted_sum needs at least one pair (weight, term)")
    for part in parts:
        _check_part(part, "each part of weighted_sum", "(weight, term), as in (1e-4, z_loss)")
        parameters(part[1])
    weights, terms = zip(*parts, strict=True)
    return Combined(terms, tuple(map(float, weights)), classes=common_classes(terms))


def token_weighted(term: Term) -> Combined:
    """Return the term times a weight per token: the extra `token_weights` of a dict of labels, `(B, S)` or `(B,)`.

    The loss is still divided by the number of tokens, so that it does not depend on gradient accumulation; weights with
    a mean of 1 keep its size.

    Args:
        term: the term.

    Returns:
        A term that also asks for `token_weights`; picklable if `term` is.

    Example:
        >>> import torch
        >>> from lossfns import cross_entropy
        >>> token_weighted(cross_entropy)(log_prob=torch.tensor([-1.0, -2.0]), token_weights=torch.tensor([1.0, 0.5]))
        tensor([1., 1.])
    """
    parameters(term)
    return Combined((term,), (1.0,), token_weights, common_classes([term]))


def class_weighted(term: Term, weights: ClassValues) -> Combined:
    """Return the term times the weight of the label's class.

    Args:
        term: the term, computed from unweighted probabilities.
        weights: one weight per class, `(C,)`: a list, an array or a tensor of any dtype and device.

    Returns:
        A term that also asks for `labels`; picklable if `term` is.

    Raises:
        ValueError: the weights are not one finite, non-negative number per class.

    Example:
        >>> import torch
        >>> from lossfns import cross_entropy
        >>> weighted = class_weighted(cross_entropy, [1.0, 3.0])
        >>> weighted(log_prob=torch.tensor([-1.0, -1.0]), labels=torch.tensor([0, 1]))
        tensor([1., 3.])
    """
    parameters(term)
    table = class_table(weights, "class weights", smallest=0.0)
    return Combined((term,), (1.0,), partial(class_weights, table=table), common_classes([term], table.numel()))


@dataclass(frozen=True, eq=False, repr=False)
class AddedLosses:
    """A weighted sum of losses, which is a loss itself. Built by `add_losses`.

    Attributes:
        parts: name, weight and loss of each part.
    """

    parts: tuple[tuple[str, float, Loss], ...]

    def __call__(self, outputs: Outputs, labels: Labels, num_items_in_batch: NumItems = None) -> Tensor:
        return self.total([loss(outputs, labels, num_items_in_batch) for _, _, loss in self.parts])

    def total(self, values: list[Tensor]) -> Tensor:
        """Return the weighted sum of the values of the parts, a new 0-d tensor."""
        total, *others = [scaled(weight, value) for (_, weight, _), value in zip(self.parts, values, strict=True)]
        for other in others:
            total = total + other
        return total

    def __repr__(self) -> str:
        return f"add_losses({', '.join(f'{name}={weight:g} * {name_of(loss)}' for name, weight, loss in self.parts)})"


def add_losses(parts: Mapping[str, tuple[float, Loss]]) -> AddedLosses:
    """Return the weighted sum of several losses of one batch as one loss.

    Each part is computed separately, with a separate gradient of the logits. For several terms of the same loss use
    `weighted_sum`, which is one pass over the logits.

    Args:
        parts: `{name: (weight, loss)}`, each loss a function `(outputs, labels, num_items_in_batch)`.

    Returns:
        A loss; picklable if its parts are.

    Raises:
        TypeError: a part is not such a pair, or a loss lacks an option that it binds.
        ValueError: a weight is not finite; a part other than the last one has `overwrite_logits=True`.

    Example:
        >>> from lossfns import causal_lm_loss, distillation_loss
        >>> add_losses({"ce": (0.5, causal_lm_loss), "teacher": (0.5, partial(distillation_loss, temperature=2.0))})
        add_losses(ce=0.5 * causal_lm_loss, teacher=0.5 * distillation_loss(temperature=2.0))
    """
    if not isinstance(parts, Mapping) or not parts:
        raise TypeError('add_losses needs at least one part, as in add_losses({"ce": (1.0, causal_lm_loss)})')
    for name, part in parts.items():
        _check_part(part, f"part '{name}'", "(weight, loss), as in (0.5, causal_lm_loss)")
        check_options(part[1], f"the loss of part '{name}'")
    for _, loss in list(parts.values())[:-1]:
        if getattr(inspect.signature(loss).parameters.get("overwrite_logits"), "default", False) is True:
            raise ValueError(
                f"{name_of(loss)} has overwrite_logits=True, but only the last part may overwrite the logits"
            )
    return AddedLosses(tuple((name, float(weight), loss) for name, (weight, loss) in parts.items()))


@dataclass(frozen=True, eq=False, repr=False)
class WithAuxLoss:
    """A loss plus a loss that the model computes itself. Built by `with_aux_loss`."""

    loss: Loss
    field: str
    weight: float
    shift: int

    def __call__(self, outputs: Outputs, labels: Labels, num_items_in_batch: NumItems = None) -> Tensor:
        fix = "A mixture of experts computes its aux_loss only with model.config.output_router_logits = True"
        aux_loss = output_entry(outputs, self.field, fix).mean()  # one value per device under DataParallel
        local_count = _local_count(labels, self.shift)
        loss = self.loss(outputs, labels, num_items_in_batch)
        aux_loss = local_count / item_count(num_items_in_batch, local_count, aux_loss.device) * aux_loss
        recorder = ACTIVE.get()
        if recorder is not None:
            parts = recorder.parts or [(function_name(self.loss), loss.detach())]
            recorder.parts = [*parts, (self.field, aux_loss.detach())]
        return loss + scaled(self.weight, aux_loss).to(loss.dtype)

    def __repr__(self) -> str:
        return f"with_aux_loss({name_of(self.loss)}, {self.field!r}, {self.weight:g})"


def with_aux_loss(loss: Loss, field: str, weight: float, *, shift: int | None = None) -> WithAuxLoss:
    """Add a loss that the model computes itself: the balance of a mixture of experts, a router's z-loss, a depth head.

    The Trainer does not pass the labels to the model, so that the model cannot add this loss itself. It is a mean over
    a micro-batch; weighted by the micro-batch's share of the labels of the window, it keeps its coefficient for any
    number of accumulation steps and processes.

    Args:
        loss: any loss that divides by the Trainer's count of labels.
        field: name of the model's loss among its outputs, `aux_loss` for the routers of transformers.
        weight: its coefficient, `model.config.router_aux_loss_coef` for these.
        shift: 1 if the loss is causal, else 0: which labels of a row count. None takes the `shift` of the loss.

    Returns:
        A loss; picklable if `loss` is.

    Raises:
        TypeError: the loss lacks an option that it binds.
        ValueError: the weight is not finite, or `shift` is None and the loss has no shift; in the call: the outputs
            have no such entry, or the labels have no positions to shift.

    Example:
        >>> import torch
        >>> from lossfns import causal_lm_loss
        >>> loss = with_aux_loss(causal_lm_loss, "aux_loss", 0.5)
        >>> loss({"logits": torch.zeros(1, 2, 4), "aux_loss": torch.tensor(2.0)}, torch.tensor([[1, 2]]))
        tensor(2.3863)
    """
    check_options(loss, "loss")
    if not math.isfinite(weight):
        raise ValueError(f"weight must be finite, got {weight}")
    if shift is None:
        shift = _shift_of(loss)
    if shift is None:
        raise ValueError(
            f"{name_of(loss)} has no shift that says which labels the Trainer counts: pass shift=1 if the loss is "
            "causal, else shift=0, as in with_aux_loss(..., shift=0)"
        )
    check_shift(shift)
    return WithAuxLoss(loss, field, weight, shift)


def _check_part(part: Any, name: str, expected: str) -> None:
    """Raise an error unless a part is a pair of a finite weight and a function."""
    if not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], (int, float)) and callable(part[1])):
        raise TypeError(f"{name} must be {expected}, got {part!r}")
    if not math.isfinite(part[0]):
        raise ValueError(f"{name} must have a finite weight, got {part[0]}")


def _shift_of(loss: Loss) -> int | None:
    """Return the shift of a loss, or of all parts of a sum if they agree."""
    if isinstance(loss, AddedLosses):
        found = {_shift_of(part) for _, _, part in loss.parts}
        return found.pop() if len(found) == 1 else None
    if isinstance(loss, WithAuxLoss):
        return loss.shift
    option = inspect.signature(loss).parameters.get("shift")
    return None if option is None or option.default is option.empty else option.default


def _local_count(labels: Labels, shift: int) -> Tensor:
    """Return how many labels of this call the Trainer counted, 0-d, float64 where the device has it."""
    ids, extras = split_labels(labels)
    units = [counted for counted, marker in MARKERS.items() if marker in extras]
    if units:
        raise ValueError(
            f"with_aux_loss needs a count of labels, but the collator counts {units[0]}: drop count_{units[0]}"
        )
    return scored_places(ids, shift).sum().to(accumulator_dtype(ids.device))
