"""Rewards of the chosen and the rejected row of each pair."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lossfns._core.alignment import Selector
from lossfns._core.checks import check_positive
from lossfns._core.hidden import HiddenStates
from lossfns._core.sources import open_source
from lossfns.preference import pair_rows, pair_statistics, score_pairs

from ._core import Labels, Logits, Reducer, label_ids

SIDES = ("chosen", "rejected")


@torch.no_grad()
def preference_rewards(
    logits: Logits,
    labels: Labels,
    *,
    shift: int,
    beta: float = 0.1,
    per_token: bool = False,
    select: Selector | None = None,
    source: HiddenStates | None = None,
) -> dict[str, Tensor]:
    """Implicit rewards of both completions of each pair: `beta` times the log-ratio to the reference, if there is one.

    Args:
        logits: `(2 n, L, V)`, or the tuple the Trainer hands over.
        labels: what `lossfns.collators.stack_pairs` makes: ids `(n, S, 2)` in a dict, with `reference_chosen` and
            `reference_rejected` `(n,)` or without.
        shift: 1 for causal models, 0 for encoder-decoders.
        beta: that of the objective.
        per_token: mean over the tokens of a completion (`simpo`, `ipo`) instead of their sum (`dpo`, `cpo`).
        select: a function that picks the logits.
        source: `hidden_states(model)`: read hidden states and head, the logits never exist.

    Returns:
        `(n,)` float64 tensors: `reward_chosen`, `reward_rejected` (nats times beta) and `pairs` (1 where both
        completions have a label; elsewhere all are 0).

    Raises:
        ValueError: labels of another shape, logits or a reference that do not fit them, a label out of range; `beta` is
            not positive.
        TypeError: ids where logits are expected.

    Example:
        >>> logits = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]]).expand(2, 2, 2)
        >>> found = preference_rewards(logits, {"labels": torch.tensor([[[0, 0], [0, 1]]])}, shift=1, beta=1.0)
        >>> found["reward_chosen"] - found["reward_rejected"]
        tensor([2.0000], dtype=torch.float64)
    """
    ids = label_ids(labels)
    if ids is None or ids.ndim != 3:
        raise ValueError(
            "preference_rewards needs labels (pairs, tokens, 2), as lossfns.collators.stack_pairs makes them, got "
            f"{'none' if ids is None else tuple(ids.shape)}: of two rows a pair the Trainer would cut some"
        )
    check_positive(beta, "beta")
    rows = pair_rows(ids)
    measured, counted = pair_statistics(open_source(logits, rows, select, source), rows, shift)
    references = _references(labels, counted)
    rewards = []
    for side in SIDES:
        ratio = measured[side] - references[side] if references else measured[side]
        rewards.append(beta * (ratio / measured[f"{side}_tokens"].clamp(min=1) if per_token else ratio))
    return _columns(torch.stack(rewards), counted)


@torch.no_grad()
def reward_scores(logits: Logits, labels: Labels, *, select: Selector | None = None) -> dict[str, Tensor]:
    """Scores that a reward model gives to both rows of each pair.

    Args:
        logits: one score a row, `(2 n, 1)`, the chosen ones first, or the tuple the Trainer hands over.
        labels: `(n,)`, -100 where a pair does not count, or a dict with `labels`.
        select: a function that picks the scores.

    Returns:
        `(n,)` float64 tensors: `reward_chosen`, `reward_rejected` and `pairs` (1 where a pair counts; elsewhere all are
        0).

    Raises:
        ValueError: no labels, or scores and labels do not fit.
        TypeError: ids where logits are expected.

    Example:
        >>> reward_scores(torch.tensor([[2.0], [1.0]]), torch.tensor([0]))["reward_chosen"]
        tensor([2.], dtype=torch.float64)
    """
    marks = label_ids(labels)
    if marks is None:
        raise ValueError("reward_scores needs one label a pair, as lossfns.collators.stack_pairs makes them")
    scores, counted, _ = score_pairs(logits, marks, select)
    return _columns(scores, counted)


def pair_margins(logits: Logits, labels: Labels, *, rewards: Reducer = reward_scores) -> Tensor:
    """By how much the chosen row of each pair is ahead: one number a pair, for quantiles or a histogram.

    Args:
        logits: what `rewards` takes.
        labels: what `rewards` takes.
        rewards: `reward_scores`, or `preference_rewards` with its options bound.

    Returns:
        `(n,)` float64, in the unit of the rewards; NaN where a pair does not count.

    Raises:
        ValueError: as for `rewards`.
        TypeError: as for `rewards`; it returns no rewards of pairs.

    Example:
        >>> pair_margins(torch.tensor([[2.0], [0.0], [1.5], [4.0]]), torch.tensor([0, -100]))
        tensor([0.5000,    nan], dtype=torch.float64)
    """
    found = rewards(logits, labels) if callable(rewards) else None
    if not isinstance(found, Mapping) or not {"reward_chosen", "reward_rejected", "pairs"} <= {*found}:
        raise TypeError(
            "rewards must be reducers.reward_scores or partial(reducers.preference_rewards, shift=...), got "
            f"{rewards!r}, which returns no rewards of pairs"
        )
    margins: Tensor = found["reward_chosen"] - found["reward_rejected"]
    return margins.where(found["pairs"] > 0, torch.nan)


def _references(labels: Labels, counted: Tensor) -> dict[str, Tensor]:
    """Log-probabilities under the reference by side, `(n,)`; none without a reference."""
    given = labels if isinstance(labels, Mapping) else {}
    found = {side: given[f"reference_{side}"] for side in SIDES if f"reference_{side}" in given}
    if found and {side: value.shape for side, value in found.items()} != dict.fromkeys(SIDES, counted.shape):
        shapes = {f"reference_{side}": tuple(value.shape) for side, value in found.items()}
        raise ValueError(f"a reference has one number a pair, ({len(counted)},), for both completions; got {shapes}")
    return found


def _columns(rewards: Tensor, counted: Tensor) -> dict[str, Tensor]:
    counted = counted.to(rewards.device, non_blocking=True)
    chosen, rejected = rewards.where(counted, 0)
    return {"reward_chosen": chosen, "reward_rejected": rejected, "pairs": counted.to(chosen.dtype)}
