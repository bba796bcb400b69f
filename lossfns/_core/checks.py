"""Checks of options, labels and logits that raise before any work begins, and name what is at fault."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # the label that the Trainer does not count, independent of any option of a loss

# Units other than labels that the Trainer can be made to count, and the extra tensor that marks each of them.
MARKERS = {"sequences": "sequence_ids", "pairs": "pair_ids"}

ClassValues = Sequence[float] | Tensor | Any  # one number per class: a list, an array or a tensor


def integer(value: Any, name: str) -> int:
    """Return the value as an int, or raise TypeError unless it is an integer of Python or NumPy."""
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an int, got {value!r}")


def integers(values: Any, name: str) -> list[int]:
    """Return one or several values as ints; raise as `integer` does."""
    several = isinstance(values, Iterable) and not isinstance(values, str) and getattr(values, "ndim", 1) > 0
    return [integer(value, name) for value in (values if several else (values,))]


def as_list(values: Any, name: str) -> list[Any]:
    """Return the values as a list, or raise TypeError unless they are a sequence other than a string."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence, got {values!r}")
    return list(values)


def strings(values: Any, name: str) -> tuple[str, ...]:
    """Return the values as a tuple, or raise TypeError unless they are a sequence of strings."""
    found = as_list(values, name)
    if not all(isinstance(each, str) for each in found):
        raise TypeError(f"{name} must be a sequence of names, got {values!r}")
    return tuple(found)


def as_numbers(values: Any, **kind: Any) -> Tensor | None:
    """Return `torch.as_tensor(values, **kind)` on the host, or None if this is not a regular array of numbers."""
    try:
        return torch.as_tensor(values, device="cpu", **kind)
    except (TypeError, ValueError, RuntimeError):
        return None


def check_positive(value: float, name: str) -> None:
    """Raise ValueError unless the option `name` is positive."""
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")


def check_smoothing(label_smoothing: float) -> None:
    """Raise ValueError unless `label_smoothing` is a probability."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")


def class_table(values: ClassValues, name: str, *, smallest: float = -math.inf) -> Tensor:
    """Return one number per class as a `(C,)` float64 tensor on the host.

    Raises:
        ValueError: the values are not one finite number of at least `smallest` per class.
    """
    table = as_numbers(values, dtype=torch.float64)
    if table is None or table.ndim != 1 or not bool(torch.isfinite(table).all()) or bool((table < smallest).any()):
        at_least = "" if smallest == -math.inf else f" >= {smallest:g}"
        raise ValueError(f"{name} must be one finite number{at_least} per class, of shape (C,), got {values!r}")
    return table.detach()


def check_logits(logits: Any) -> Tensor:
    """Return the logits, or raise TypeError unless they are a plain floating-point tensor."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a tensor, got {type(logits).__name__}")
    if not logits.is_floating_point():
        raise TypeError(
            f"expected logits, got {logits.dtype} values of shape {tuple(logits.shape)}. These look like ids "
            "(predict_with_generate, or an argmax taken earlier): pass logits, or use the metric on the ids directly"
        )
    if hasattr(logits, "full_tensor"):
        raise TypeError("logits must be a plain tensor, got a DTensor: call full_tensor() on them before the loss")
    return logits


def check_ids(labels: Any) -> None:
    """Raise TypeError unless `labels` are an integer tensor."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integer class ids, got {labels.dtype}")


def check_shift(shift: int, labels: Tensor | None = None) -> None:
    """Raise ValueError unless `shift` is an int >= 0 and the labels, if given, have a dimension to shift along."""
    if isinstance(shift, bool) or not isinstance(shift, int) or shift < 0:
        raise ValueError(f"shift must be an int >= 0 (1 causal, 0 masked or classification), got {shift!r}")
    if shift and labels is not None and labels.ndim < 2:
        raise ValueError(
            f"shift={shift} needs labels of shape (batch, sequence), got {tuple(labels.shape)}: a shift after "
            "flattening would leak from one row into the next. For one label per sample use shift=0"
        )


def check_range(targets: Tensor, classes: int, ignore_index: int = IGNORED) -> None:
    """Raise ValueError unless all labels are in `[0, classes)`."""
    if not targets.numel():
        return
    smallest, largest = torch.stack(targets.aminmax()).tolist()
    if smallest < 0 or largest >= classes:
        wrong = smallest if smallest < 0 else largest
        more = f"Is a class missing? Set num_labels={wrong + 1} of the model, num_classes={wrong + 1} of counts. "
        raise ValueError(
            f"label {wrong} is out of range: there are {classes} classes, so labels must be 0 to {classes - 1}, "
            f"or {ignore_index} where nothing is predicted. {more if wrong > 0 else ''}Map another ignored id (255, "
            f"pad) with lossfns.collators.replace_labels(collator, {{{wrong}: {ignore_index}}})"
        )


def check_normalize(normalize: str, units: Sequence[str], extras: Container[str]) -> None:
    """Check the option `normalize` of a loss: what it divides by, and what its collator makes the Trainer count.

    Args:
        normalize: the option.
        units: units that the loss can divide by, such as "tokens" and "sequences"; "weights" is always accepted.
        extras: names in the dict of labels.

    Raises:
        ValueError: `normalize` is unknown, or the collator makes the Trainer count another unit.
    """
    if normalize not in (*units, "weights"):
        known = ", ".join(map(repr, units))
        raise ValueError(f"normalize must be {known} or 'weights', got {normalize!r}")
    check_unit(normalize, extras)


def check_unit(unit: str, extras: Container[str]) -> None:
    """Check that a loss divides by the unit that its collator makes the Trainer count.

    Args:
        unit: "sequences", "pairs", or any other name for single labels.
        extras: names in the dict of labels, which include the collator's marker.

    Raises:
        ValueError: they differ; the message names the collator wrapper.
    """
    for counted, marker in MARKERS.items():
        if (marker in extras) == (counted == unit):
            continue
        if counted == unit:
            wrapper = "stack_pairs" if counted == "pairs" else f"count_{counted}"
            raise ValueError(
                f"the loss divides by {counted}, but the labels have no '{marker}', so the Trainer counts another "
                f"unit. Wrap the collator in lossfns.collators.{wrapper}(collator, shift=...)"
            )
        raise ValueError(
            f"the collator is wrapped in count_{counted}, so the Trainer counts {counted}, but the loss divides by "
            f"{unit}: drop the wrapper, or use a loss that divides by {counted} (normalize={counted!r})"
        )


def describe(labels: Any) -> str:
    """Return the dtype and shape of a tensor, or the type of anything else, for error messages."""
    return f"{labels.dtype} of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
