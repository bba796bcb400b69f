"""Collator wrappers that pair rows for the losses of preferences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.alignment import scored_places, split_labels
from .._core.checks import MARKERS, check_shift
from .label_dicts import extra_numbers, label_dict, one_each
from .wrapper import Batch, Collator, Wrapper, batch_labels, collated

CHOSEN, REJECTED = "chosen", "rejected"


@dataclass(frozen=True)
class StackPairs(Wrapper):
    """See `stack_pairs`."""

    shift: int | None

    def __call__(self, features: list[Any]) -> Batch:
        _check_pairs(features)
        rows = [row[CHOSEN] for row in features] + [row[REJECTED] for row in features]
        batch = collated(self.collator, rows)
        extras = {
            name: torch.stack([extra_numbers(row[name], name) for row in features])
            for name in features[0]
            if name not in (CHOSEN, REJECTED)
        }
        if "labels" not in batch:
            labels = counted = torch.zeros(len(features), dtype=torch.int64, device="cpu")
        else:
            labels = torch.stack(batch_labels(batch).chunk(2), -1)
            counted = one_each(self._counts(batch_labels(batch)))
            extras[MARKERS["pairs"]] = torch.arange(len(features), device="cpu")
        # The Trainer takes the first tensor's length for the number of samples, which are pairs.
        batch = {"labels": labels, **batch}
        return label_dict(batch, {"labels": labels, **extras}, counted) if extras else batch

    def _counts(self, ids: Tensor) -> Tensor:
        """Which pairs have a target in both rows, `(n,)` bool."""
        if self.shift is None:
            raise ValueError(
                f"labels of shape {tuple(ids.shape)} need a shift: say stack_pairs(collator, shift=1) (causal language "
                "models) or shift=0 (seq2seq)"
            )
        return torch.stack(scored_places(ids, self.shift).any(1).chunk(2)).all(0)


def stack_pairs(collator: Collator, *, shift: int | None = None) -> StackPairs:
    """Make one batch of pairs: the chosen rows first, then the rejected ones in the same order.

    The dataset has one item a pair, `{"chosen": row, "rejected": row}`, and any numbers beside them (`margin`, what
    `precompute_reference_log_probs` adds) go into the dict of labels. Labels have one row a pair too, so that the
    Trainer counts pairs and, in evaluation, cuts superfluous pairs and not rows. `preference_loss` reads labels of
    tokens; rows without labels are for `reward_loss` and get one label a pair, 0.

    Args:
        collator: any data collator of single rows; `labels` have -100 over prompts and padding.
        shift: 1 for causal models, 0 for encoder-decoders; not needed for rows without labels.

    Returns:
        A picklable collator. `labels`: `(n, S, 2)`, the chosen row's and the rejected one's, or `(n,)`, in a dict
        where something is beside them; inputs: `(2 n, ...)`. A pair is counted if both of its rows have a target.

    Raises:
        TypeError: in the call: what is beside a pair is no number.
        ValueError: in the call: an item is no pair, the labels are not `(2 n, S)`, no shift.
        ImportError: as for `with_extras`, where labels or extras come in a dict.

    Example:
        >>> collate = stack_pairs(lambda rows: {"labels": torch.tensor(rows)}, shift=1)
        >>> batch = collate([{"chosen": [5, 6], "rejected": [5, 7]}])
        >>> batch["labels"]["labels"].tolist(), batch["shift_labels"]
        ([[[5, 5], [6, 7]]], tensor([0]))
    """
    if shift is not None:
        check_shift(shift)
    return StackPairs(collator, shift)


def _check_pairs(features: list[Any]) -> None:
    for row in features:
        if CHOSEN not in row or REJECTED not in row:
            raise ValueError(
                f"an item of the dataset has {sorted(row)}; expected a pair, {{'{CHOSEN}': row, '{REJECTED}': row}}, "
                "with TrainingArguments(remove_unused_columns=False)"
            )


@dataclass(frozen=True)
class CountPairs(Wrapper):
    """See `count_pairs`."""

    shift: int

    def __call__(self, features: list[Any]) -> Batch:
        batch = collated(self.collator, features)
        ids, extras = split_labels(batch.get("labels"))
        batch_labels({"labels": ids})
        pairs, odd = divmod(ids.shape[0], 2)
        if odd:
            raise ValueError(
                f"{ids.shape[0]} rows are no pairs: the first half of a batch is chosen, the other rejected"
            )
        targets = scored_places(ids, self.shift)
        both = targets[:pairs].any(1) & targets[pairs:].any(1)
        marker = torch.arange(pairs, device="cpu").repeat(2)
        counted = one_each(torch.cat([both, torch.zeros_like(both)]))
        return label_dict(batch, {"labels": ids, **extras, MARKERS["pairs"]: marker}, counted)


def count_pairs(collator: Collator, *, shift: int) -> CountPairs:
    """Let the Trainer count pairs of rows: chosen in the first half of a batch, rejected in that order in the second.

    `labels` becomes a dict with a marker, and `shift_labels` holds one 0 for each pair whose rows both have a target.

    Args:
        collator: any data collator that returns integer labels `(B, S)` of an even number of rows, in a dict or not.
        shift: 1 for causal models, 0 for all others.

    Returns:
        A picklable collator.

    Raises:
        ValueError: `shift` is no number of places; in the call: the labels are not integers `(B, S)`, or the rows are
            odd in number.
        ImportError: as for `with_extras`.

    Example:
        >>> collate = count_pairs(lambda rows: {"labels": torch.tensor(rows)}, shift=1)
        >>> batch = collate([[5, 6], [5, 7], [5, 8], [5, -100]])
        >>> batch["labels"]["pair_ids"], batch["shift_labels"]
        (tensor([0, 1, 0, 1]), tensor([   0, -100, -100, -100]))
    """
    check_shift(shift)
    return CountPairs(collator, shift)
