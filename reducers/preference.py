"""Rewards of the chosen and the rejected completion of each pair."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lossfns._core.checks import check_positive
from lossfns._core.sources import open_source
from lossfns.preference import pair_rows, pair_statistics, score_pairs

from ._core import Hidden, Labels, Logits, Reducer, Select, label_ids

SIDES = ("chosen", "rejected")


@torch.no_grad()
def preference_rewards(
    logits: Logits,
    labels: Labels,
    *,
    shift: int,
    beta: float = 0.1,
    per_token: bool = False,
    select: Select = None,
    source: Hidden = None,
) -> dict[str, Tensor]:
    """Return the implicit rewards of both completions of each pair.

        reward = beta * (log p(completion) - log p_reference(completion))

    Without a reference in the labels, the second term is 0.

    Args:
        logits: `(2 * n, L, V)` float, or the tuple or dict that the Trainer passes.
        labels: a dict as `lossfns.collators.stack_pairs` makes it: `labels` `(n, S, 2)` and, optionally,
            `reference_chosen` and `reference_rejected`, `(n,)` float, in nats.
        shift: 1 for causal models, 0 for encoder-decoder models.
        beta: the `beta` of the objective, > 0.
        per_token: use the mean over the tokens of a completion (`simpo`, `ipo`) instead of the sum (`dpo`, `cpo`).
        select: a function of the model's outputs that returns the logits.
        source: `hidden_states(model)`, to read hidden states and the head instead of logits.

    Returns:
        `(n,)` float64 tensors: `reward_chosen` and `reward_rejected`, in nats times beta, and `pairs`, 1 where both
        completions have a label. All are 0 elsewhere.

    Raises:
        ValueError: labels have another shape, logits or a reference do not fit them, a label is out of range, or `beta`
            is not positive.
        TypeError: token ids are passed as logits.

    References:
        Rafailov, Sharma, Mitchell, Ermon, Manning, Finn, "Direct Preference Optimization: Your Language Model is
        Secretly a Reward Model", 2023, section 5.1, https://arxiv.org/abs/2305.18290

        Meng, Xia, Chen, "SimPO: Simple Preference Optimization with a Reference-Free Reward", 2024, equation 4
        (`per_token` without a reference), https://arxiv.org/abs/2405.14734

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
            f"{None if ids is None else tuple(ids.shape)}: with two rows per pair the Trainer would cut some off"
        )
    check_positive(beta, "beta")
    rows = pair_rows(ids)
    measured, counted = pair_statistics(open_source(logits, rows, select, source), rows, shift)
    reference = _reference(labels, counted)
    ratios = torch.stack([measured[side] - reference[side] if reference else measured[side] for side in SIDES])
    if per_token:
        ratios = ratios / torch.stack([measured[f"{side}_tokens"] for side in SIDES]).clamp(min=1)
    return _by_side(beta * ratios, counted)


@torch.no_grad()
def reward_scores(logits: Logits, labels: Labels, *, select: Select = None) -> dict[str, Tensor]:
    """Return the scores that a reward model gives to both completions of each pair.

    Args:
        logits: one score per row, `(2 * n, 1)` float, the chosen rows first, or the tuple or dict that the Trainer
            passes.
        labels: `(n,)` integers, -100 where a pair does not count, or a dict with `labels`.
        select: a function of the model's outputs that returns the scores.

    Returns:
        `(n,)` float64 tensors: `reward_chosen`, `reward_rejected` and `pairs`, 1 where a pair counts. All are 0
        elsewhere.

    Raises:
        ValueError: labels are missing, or the scores do not fit the labels.
        TypeError: token ids are passed as logits.

    Example:
        >>> reward_scores(torch.tensor([[2.0], [1.0]]), torch.tensor([0]))["reward_chosen"]
        tensor([2.], dtype=torch.float64)
    """
    marks = label_ids(labels)
    if marks is None:
        raise ValueError("reward_scores needs one label per pair, as lossfns.collators.stack_pairs makes them")
    scores, counted, _ = score_pairs(logits, marks, select)
    return _by_side(scores, counted)


def pair_margins(logits: Logits, labels: Labels, *, rewards: Reducer = reward_scores) -> Tensor:
    """Return the margin of each pair, for quantiles or a histogram.

        margin = reward_chosen - reward_rejected

    Args:
        logits: the logits that `rewards` takes.
        labels: the labels that `rewards` takes.
        rewards: `reward_scores`, or `preference_rewards` with its options bound.

    Returns:
        `(n,)` float64, in the unit of the rewards; NaN where a pair does not count.

    Raises:
        ValueError: as `rewards` raises it.
        TypeError: as `rewards` raises it, or `rewards` does not return the rewards of pairs.

    References:
        Bradley, Terry, "Rank Analysis of Incomplete Block Designs: I. The Method of Paired Comparisons", 1952 (the
        margin is the log-odds that the chosen row wins), https://doi.org/10.2307/2334029

    Example:
        >>> pair_margins(torch.tensor([[2.0], [0.0], [1.5], [4.0]]), torch.tensor([0, -100]))
        tensor([0.5000,    nan], dtype=torch.float64)
    """
    found = rewards(logits, labels) if callable(rewards) else None
    if not isinstance(found, Mapping) or not {"reward_chosen", "reward_rejected", "pairs"} <= {*found}:
        raise TypeError(
            "rewards must be reducers.reward_scores or partial(reducers.preference_rewards, shift=...), got "
            f"{rewards!r}, which does not return the rewards of pairs"
        )
    margins: Tensor = found["reward_chosen"] - found["reward_rejected"]
    return margins.where(found["pairs"] > 0, torch.nan)


def _reference(labels: Labels, counted: Tensor) -> dict[str, Tensor]:
    """Return the log-probabilities under the reference model by side, `(n,)` each; empty without a reference."""
    given = labels if isinstance(labels, Mapping) else {}
    found = {side: given[f"reference_{side}"] for side in SIDES if f"reference_{side}" in given}
    shapes = {f"reference_{side}": tuple(value.shape) for side, value in found.items()}
    if found and [*shapes.values()] != [tuple(counted.shape)] * 2:
        raise ValueError(
            f"reference_chosen and reference_rejected must both be ({len(counted)},), as pairs, got {shapes}"
        )
    return found


def _by_side(rewards: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Return rewards `(2, n)` by name, 0 where a pair does not count."""
    counted = counted.to(rewards.device, non_blocking=True)
    chosen, rejected = rewards.where(counted, 0)
    return {"reward_chosen": chosen, "reward_rejected": rejected, "pairs": counted.to(chosen.dtype)}
