"""What is added up over items, out of the statistics of each: one table for reducers and for what training logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

COLUMNS = ("nll", "tokens", "correct", "correct_top_{k}", "entropy")


def fields_of(columns: Iterable[str]) -> tuple[str, ...]:
    """The statistics that `columns` are made of.

    Raises:
        ValueError: no such column.
    """
    columns = tuple(columns)
    for column in columns:
        if _best(column) is None and column not in COLUMNS:
            raise ValueError(f"there is no column {column!r}; choose among {', '.join(COLUMNS)} (k at least 1)")
    wanted = {"rank": any(_best(column) for column in columns), "entropy": "entropy" in columns}
    return ("log_prob", *(name for name, needed in wanted.items() if needed))


def item_columns(measured: Mapping[str, Tensor], columns: Iterable[str]) -> dict[str, Tensor]:
    """The values of each item, `(n,)`: `nll` and `entropy` in nats, `tokens` 1, `correct` and `correct_top_{k}` bool.

    An item is correct in the first k if fewer than k logits come before the label's, and none of them is NaN.
    """
    log_prob = measured["log_prob"]
    items = {**measured, "nll": -log_prob, "tokens": torch.ones_like(log_prob)}
    return {
        column: items[column] if best is None else (measured["rank"] < best) & ~log_prob.isnan()
        for column, best in ((column, _best(column)) for column in columns)
    }


def _best(column: str) -> int | None:
    """The k of a column that counts correct items, None for any other."""
    k = "1" if column == "correct" else column.removeprefix("correct_top_")
    return int(k) if k != column and k.isdecimal() and int(k) > 0 else None
