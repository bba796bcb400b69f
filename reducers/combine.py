"""Several reducers in one call."""

from __future__ import annotations

from dataclasses import dataclass

from lossfns._core.signature import check_options

from ._core import Labels, Logits, Reduced, Reducer, batch_rows, check_rows


@dataclass(frozen=True, repr=False)
class Combination:
    """Reducers by name, called together. Built by `combine`."""

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
    """One `preprocess_logits_for_metrics` out of several: `{name: what that reducer returns}`.

    Each result is checked: tensors (or dicts or tuples of them) with the batch first, because the Trainer silently
    loses rows of anything else.

    Args:
        **reducers: functions `(logits, labels)`, ours or yours.

    Returns:
        A picklable reducer.

    Raises:
        TypeError: nothing given, not callable, or bound to an option that the reducer does not have.

    Example:
        >>> import torch
        >>> from reducers import argmax
        >>> combine(ids=argmax)(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
        {'ids': tensor([1], dtype=torch.int32)}
    """
    if not reducers:
        raise TypeError("combine needs at least one reducer, as in combine(sums=partial(sample_sums, shift=1))")
    for name, reducer in reducers.items():
        if not callable(reducer):
            raise TypeError(f"combine({name}=...) takes a function of (logits, labels), not {type(reducer).__name__}")
        check_options(reducer, "a reducer")
    return Combination(tuple(reducers.items()))
