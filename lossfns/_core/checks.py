"""Raise errors that name the option, tensor or label at fault, before any work begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from operator import index
from typing import Any, TypeVar

import torch
from torch import Tensor

_Number = TypeVar("_Number", bound=float | Tensor)


def number(value: _Number, name: str) -> _Number:
    """Return the value, or raise TypeError unless it is a number: Python's, NumPy's or torch's, which may be learnt."""
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return value


def whole(value: Any, name: str) -> int:
    """Return the value as an int, or raise TypeError unless it is one, of Python's or of NumPy's."""
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an int, got {value!r}")


def wholes(values: Any, name: str) -> list[int]:
    """Return one or several values as ints; raises as `whole`."""
    several = isinstance(values, Iterable) and not isinstance(values, str) and getattr(values, "ndim", 1) > 0
    return [whole(value, name) for value in (values if several else (values,))]


def items(values: Any, name: str) -> list[Any]:
    """Return the values as a list, or raise TypeError unless they are several; the letters of a text are not meant."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence, got {values!r}")
    return list(values)


def strings(values: Any, name: str) -> tuple[str, ...]:
    """Return the names, or raise TypeError unless they are several strings."""
    found = items(values, name)
    if not all(isinstance(each, str) for each in found):
        raise TypeError(f"{name} must be a sequence of names, got {values!r}")
    return tuple(found)


def function(value: Any, name: str) -> Callable[..., Any]:
    """Return the value, or raise TypeError unless it can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}")
    return value  # type: ignore[no-any-return]


IGNORED = -100  # what the Trainer does not count, whatever a loss would like to ignore


def check_ids(labels: Any) -> None:
    """Raise TypeError unless `labels` are a tensor of integers."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, not {type(labels).__name__}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integer class ids, not {labels.dtype}")


def check_shift(shift: int) -> None:
    """Raise ValueError unless `shift` is a number of places."""
    if isinstance(shift, bool) or not isinstance(shift, int) or shift < 0:
        raise ValueError(f"shift must be an int >= 0 (1 causal, 0 masked or classification), not {shift!r}")


def check_logits(logits: Any) -> Tensor:
    """Return the logits, or raise TypeError where they are not a plain floating tensor."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a tensor, not {type(logits).__name__}")
    if not logits.is_floating_point():
        raise TypeError(
            f"expected logits, got {logits.dtype} values of shape {tuple(logits.shape)}: these are ids "
            "(predict_with_generate, or an argmax taken earlier); pass logits, or use the metric on the ids directly"
        )
    if hasattr(logits, "full_tensor"):
        raise TypeError(
            "logits are a DTensor; call full_tensor() on them in the model, or gather them, before the loss"
        )
    return logits


def check_range(targets: Tensor, classes: int, ignore_index: int = IGNORED) -> None:
    """Raise ValueError where a label is none of the classes."""
    if not targets.numel():
        return
    smallest, largest = torch.stack(targets.aminmax()).tolist()
    if smallest < 0 or largest >= classes:
        wrong = smallest if smallest < 0 else largest
        more = f"A class more? Say num_labels={wrong + 1} of the model, num_classes={wrong + 1} of counts. "
        raise ValueError(
            f"label {wrong} is out of range: there are {classes} classes, so labels must be 0 to {classes - 1}, "
            f"or {ignore_index} where nothing is predicted. {more if wrong > 0 else ''}Another ignored id (255, pad) "
            f"is mapped by lossfns.collators.replace_labels(collator, {{{wrong}: {ignore_index}}})"
        )


def as_numbers(values: Any, **kind: Any) -> Tensor | None:
    """`torch.as_tensor(values, **kind)` on the host; None where these are no numbers, or rows of several lengths."""
    try:
        return torch.as_tensor(values, device="cpu", **kind)
    except (TypeError, ValueError, RuntimeError):
        return None


ClassValues = Sequence[float] | Tensor | Any  # one number a class: a list, an array, a tensor


def check_smoothing(label_smoothing: float) -> None:
    """Raise ValueError unless `label_smoothing` is a mass."""
    if not 0.0 <= number(label_smoothing, "label_smoothing") <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")


def class_table(values: ClassValues, name: str, *, smallest: float = -math.inf) -> Tensor:
    """Numbers by class as a `(C,)` float64 tensor on the host.

    Raises:
        ValueError: not one finite number of at least `smallest` a class.
    """
    table = as_numbers(values, dtype=torch.float64)
    if table is None or table.ndim != 1 or not bool(torch.isfinite(table).all()) or bool((table < smallest).any()):
        at_least = "" if smallest == -math.inf else f" >= {smallest:g}"
        raise ValueError(f"{name} must be one finite number{at_least} a class, shape (C,), got {values!r}")
    return table.detach()


def check_positive(value: float, name: str) -> None:
    """Raise ValueError unless the option `name` is positive."""
    if not number(value, name) > 0:
        raise ValueError(f"{name} must be positive, got {value}")


# What the Trainer may be made to count, and the extra tensor by which a loss sees that it was.
MARKERS = {"sequences": "sequence_ids", "pairs": "pair_ids"}


def check_unit(unit: str | None, extras: Container[str]) -> None:
    """Hold the unit a loss divides by against what its collator lets the Trainer count.

    Args:
        unit: "sequences", "pairs", or None for labels one by one.
        extras: names in the dict of labels, the collator's marker among them.

    Raises:
        ValueError: they differ; the message names the wrapper.
    """
    for counted, marker in MARKERS.items():
        if (marker in extras) == (counted == unit):
            continue
        if counted == unit:
            wrapper = "stack_pairs" if counted == "pairs" else f"count_{counted}"
            raise ValueError(
                f"the loss divides by {counted}, but the labels carry no '{marker}': the Trainer counts others. "
                f"Wrap the collator in lossfns.collators.{wrapper}(collator, shift=...)"
            )
        raise ValueError(
            f"the collator is wrapped in count_{counted}, so the Trainer counts {counted}, but the loss divides by "
            f"{unit or 'labels'}: drop the wrapper, or use a loss that divides by {counted} (normalize={counted!r})"
        )


def described(labels: Any) -> str:
    """Dtype and shape of a tensor, the type of anything else."""
    return f"{labels.dtype} of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
