"""Several reducers in one call."""

from __future__ import annotations

from dataclasses import dataclass

from lossfns._core.signature import check_options

from ._core import Labels, Logits, Reduced, Reducer, batch_rows, check_rows


@dataclass(frozen=True, repr=False)
class Combination:
    """Named reducers that are called together, as `combine` returns them."""

    reducers: tuple[tuple[str, Reducer], ...]

    def __call__(self, logits: Logits, labels: Labels) -> dict[str, Reduced]:
        rows = batch_rows(logits, labels)
        reduced = {name: reducer(logits, labels) for name, reducer in self.reducers}
        for name, value in reduced.items():
            check_rows(name, value, rows)
        return reduced

    def __repr__(self) -> str:
        return f"combine({', '.join(f'{name}={reducer!r}' for name, reducer in self.reducers)})"


def combine(**reducers: Reducer) -> Combination:
    """Combine several reducers into one `preprocess_logits_for_metrics` that returns `{name: result}`.

    Each result is checked when the reducer runs: it must consist of tensors with the batch as first dimension, because
    the Trainer silently loses rows of any other shape.

    Args:
        **reducers: functions of `(logits, labels)` by name, from this package or your own.

    Returns:
        A picklable reducer.

    Raises:
        TypeError: no reducer is given, one is not callable, or one is bound to an option that it does not have.

    Example:
        >>> import torch
        >>> from reducers import argmax
        >>> combine(ids=argmax)(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
        {'ids': tensor([1], dtype=torch.int32)}
    """
    if not reducers:
        raise TypeError("combine needs at least one reducer, as in combine(sums=partial(sample_sums, shift=1))")
    for name, reducer in reducers.items():
        check_options(reducer, f"combine({name}=...)")
    return Combination(tuple(reducers.items()))
