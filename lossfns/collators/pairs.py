"""Collator wrappers that arrange preference pairs for `preference_loss` and `reward_loss`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.alignment import scored_places, split_labels
from .._core.checks import MARKERS, check_shift
from .._core.normalization import accumulator_dtype
from .label_dicts import extra_numbers, label_dict, zero_where
from .wrapper import Batch, Changed, Collator, Wrapper, batch_labels, collated

CHOSEN, REJECTED = "chosen", "rejected"


@dataclass(frozen=True)
class StackPairs(Wrapper):
    """See `stack_pairs`."""

    shift: int | None

    def __call__(self, features: list[Any]) -> Batch:
        _check_pairs(features)
        batch = collated(self.collator, [item[side] for side in (CHOSEN, REJECTED) for item in features])
        extras = {
            name: torch.stack([_exact(item[name], name) for item in features])
            for name in features[0]
            if name not in (CHOSEN, REJECTED)
        }
        if "labels" not in batch:
            labels = counted = torch.zeros(len(features), dtype=torch.int64, device="cpu")
        else:
            labels = torch.stack(batch_labels(batch).chunk(2), -1)
            counted = zero_where(self._counted(batch_labels(batch)))
            extras[MARKERS["pairs"]] = torch.arange(len(features), device="cpu")
        # The Trainer takes the length of the first tensor as the number of samples, which are preference pairs.
        batch = {"labels": labels, **batch}
        return label_dict(batch, {"labels": labels, **extras}, counted) if extras else batch

    def _counted(self, ids: Tensor) -> Tensor:
        """Return which pairs have a label that is predicted in both sequences, `(n,)` bool."""
        if self.shift is None:
            raise ValueError(
                f"labels of shape {tuple(ids.shape)} need a shift: pass stack_pairs(collator, shift=1) for causal "
                "language models or shift=0 for encoder-decoders"
            )
        return torch.stack(scored_places(ids, self.shift).any(1).chunk(2)).all(0)


def stack_pairs(collator: Collator, *, shift: int | None = None) -> StackPairs:
    """Make one batch of preference pairs: the chosen sequences first, then the rejected ones in the same order.

    The dataset has one item per pair, `{"chosen": features, "rejected": features}`. Further numbers of an item
    (`margin`, the columns that `precompute_reference_log_probs` adds) go into the dict of labels. Labels have one entry
    per pair too, so that the Trainer counts pairs and, in evaluation, drops surplus pairs and not single sequences.
    Sequences without labels are for `reward_loss` and get one label per pair, 0.

    Args:
        collator: any data collator of single sequences; its `labels` are -100 over prompts and padding.
        shift: 1 for causal models, 0 for encoder-decoders; not needed for sequences without labels.

    Returns:
        A picklable collator. Its batches have `labels` `(n, S, 2)`, those of the chosen and of the rejected sequence,
        or `(n,)`, in a dict where there are further numbers (a Python float becomes float64); inputs are `(2 n, ...)`.
        A pair is counted if both of its sequences have a label that is predicted.

    Raises:
        TypeError: in the call: a further column does not hold numbers.
        ValueError: in the call: an item is not a pair, the labels are not `(2 n, S)`, or `shift` is missing.
        ImportError: as for `with_extras`, where the labels are put into a dict.

    Example:
        >>> collate = stack_pairs(lambda rows: {"labels": torch.tensor(rows)}, shift=1)
        >>> batch = collate([{"chosen": [5, 6], "rejected": [5, 7]}])
        >>> batch["labels"]["labels"].tolist(), batch["shift_labels"]
        ([[[5, 5], [6, 7]]], tensor([0]))
    """
    if shift is not None:
        check_shift(shift)
    return StackPairs(collator, shift)


def _exact(value: Any, name: str) -> Tensor:
    """Return an extra number as a tensor; Python floats, as a datasets.Dataset returns them, are not rounded."""
    if not isinstance(value, float):
        return extra_numbers(value, name)
    device = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return torch.tensor(value, dtype=accumulator_dtype(device or torch.device("cpu")), device="cpu")


def _check_pairs(features: list[Any]) -> None:
    for item in features:
        if CHOSEN not in item or REJECTED not in item:
            raise ValueError(
                f"expected a preference pair per item, {{'{CHOSEN}': features, '{REJECTED}': features}}, got "
                f"{sorted(item)}; set TrainingArguments(remove_unused_columns=False)"
            )


def count_pairs(collator: Collator, *, shift: int) -> Changed:
    """Make the Trainer count preference pairs, in batches whose first half is chosen and whose second half is rejected.

    `labels` becomes a dict with a marker, and `shift_labels` holds one 0 for each pair of sequences that both have a
    label that is predicted.

    Args:
        collator: any data collator that returns integer labels `(2 n, S)`, in a dict or not.
        shift: 1 for causal models, 0 for all others.

    Returns:
        A picklable collator.

    Raises:
        ValueError: `shift` is not an integer >= 0; in the call: the labels are not integers `(B, S)`, or their number
            of sequences is odd.
        ImportError: as for `with_extras`.

    Example:
        >>> collate = count_pairs(lambda rows: {"labels": torch.tensor(rows)}, shift=1)
        >>> batch = collate([[5, 6], [5, 7], [5, 8], [5, -100]])
        >>> batch["labels"]["pair_ids"], batch["shift_labels"]
        (tensor([0, 1, 0, 1]), tensor([   0, -100, -100, -100]))
    """
    check_shift(shift)
    return Changed(collator, _with_pair_ids, {"shift": shift})


def _with_pair_ids(batch: Batch, shift: int) -> Batch:
    ids, extras = split_labels(batch.get("labels"))
    batch_labels({"labels": ids})
    n, odd = divmod(ids.shape[0], 2)
    if odd:
        raise ValueError(f"expected an even number of sequences, the chosen ones first, got {ids.shape[0]}")
    scored = scored_places(ids, shift).any(1)
    both = scored[:n] & scored[n:]
    marker = torch.arange(n, device="cpu").repeat(2)
    counted = zero_where(torch.cat([both, torch.zeros_like(both)]))
    return label_dict(batch, {"labels": ids, **extras, MARKERS["pairs"]: marker}, counted)
