"""Per-item quantities that reducers sum and that training logs, computed from the statistics of each item."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

COLUMNS = ("nll", "tokens", "correct", "correct_top_{k}", "entropy")


def fields_of(columns: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the statistics that `columns` are computed from.

    Raises:
        ValueError: a column is unknown.
    """
    columns = tuple(columns)
    for column in columns:
        if _k_of(column) is None and column not in COLUMNS:
            raise ValueError(f"unknown column {column!r}; expected one of {', '.join(COLUMNS)} with k >= 1")
    needed = {"rank": any(_k_of(column) for column in columns), "entropy": "entropy" in columns}
    return ("log_prob", *(name for name, is_needed in needed.items() if is_needed))


def item_columns(measured: Mapping[str, Tensor], columns: Iterable[str]) -> dict[str, Tensor]:
    """Return the values of each item, `(n,)` per column.

    An item is correct in the top k if fewer than k logits rank before the label's and no logit is NaN.

    Args:
        measured: statistics by name, `(n,)` each, as `fields_of(columns)` lists them.
        columns: names of columns.

    Returns:
        `nll` and `entropy` in nats, `tokens` 1, `correct` and `correct_top_{k}` bool.
    """
    log_prob = measured["log_prob"]
    items = {**measured, "nll": -log_prob, "tokens": torch.ones_like(log_prob)}
    return {
        column: items[column] if k is None else (measured["rank"] < k) & ~log_prob.isnan()
        for column, k in ((column, _k_of(column)) for column in columns)
    }


def _k_of(column: str) -> int | None:
    """Return the k of a column that counts correct items, or None for any other column."""
    k = "1" if column == "correct" else column.removeprefix("correct_top_")
    return int(k) if k != column and k.isdecimal() and int(k) > 0 else None
