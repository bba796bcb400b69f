"""How many places before its label stands the logit that a loss or reducer reads, and where it has to stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._core.alignment import Labels, split_labels
from .._core.checks import IGNORED

FEW = 4  # labels; of so few masked tokens all may have been left as they were


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
