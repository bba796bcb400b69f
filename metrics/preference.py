"""Scores of preference models, from the rewards of both completions of each pair."""

from typing import Any

import numpy as np

from ._core.evaluation import Columns, missing, named_columns
from ._core.metric import Metric, ratio

# The columns that are read and the reducers that return them: a contract between the two packages.
COLUMNS = dict.fromkeys(("reward_chosen", "reward_rejected", "pairs"), "preference_rewards, reward_scores")

HIGHER_IS_BETTER: dict[str, bool | None] = {
    **dict.fromkeys(("reward_chosen", "reward_rejected", "pairs")),
    **dict.fromkeys(("reward_margin", "reward_accuracy"), True),
}


def preferences() -> Metric:
    """Score a preference or reward model per pair: how often and by how much the chosen reward is larger.

    With the rewards c of the chosen and r of the rejected completions::

        reward_margin = mean(c - r)     reward_accuracy = mean([c > r] + [c = r] / 2)

    The reducer is `preference_rewards` or `reward_scores`; its columns may be in a dict of predictions, or in a dict
    inside it. Keys: `reward_chosen` and `reward_rejected`, the mean rewards; `reward_margin` and `reward_accuracy`, all
    averaged over the pairs that are scored; `pairs`, their number.

    Rewards may be infinite, for example if the reference gives a completion probability 0: a mean over them is infinite
    too, and NaN where inf and -inf are added or subtracted; equal infinities are a tie. A NaN reward makes every mean
    that includes it NaN.

    Without pairs, means are NaN.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    References:
        R. Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", 2023,
        https://arxiv.org/abs/2305.18290 (implicit rewards)
        J. A. Hanley, B. J. McNeil, "The meaning and use of the area under a receiver operating characteristic (ROC)
        curve", 1982, https://doi.org/10.1148/radiology.143.1.7063747 (ties)

    Example:
        >>> from types import SimpleNamespace
        >>> rewards = {"reward_chosen": np.array([2.0, 1.0]), "reward_rejected": np.array([1.0, 1.0])}
        >>> scores = preferences()(SimpleNamespace(predictions=rewards | {"pairs": np.ones(2)}, label_ids=np.zeros(2)))
        >>> scores["reward_accuracy"], scores["reward_margin"]
        (0.75, 0.5)
    """
    return Metric(statistics=pair_sums, score=pair_scores, higher_is_better=HIGHER_IS_BETTER)


def pair_sums(predictions: Any, labels: Any) -> Columns:
    """Return the columns that `pair_scores` reads.

    Args:
        predictions: dict of arrays (pairs,), or a dict of such dicts; other arrays in it are not read.
        labels: not read.

    Returns:
        Arrays (pairs,): the rewards and `wins` in float64, `pairs` (0 or 1).

    Raises:
        ValueError: if a column is missing or present twice.
    """
    found = named_columns(predictions)
    if any(name not in found for name in COLUMNS):
        raise missing(
            f"the columns {', '.join(COLUMNS)} (preprocess_logits_for_metrics=partial(preference_rewards, shift=1), or "
            "reward_scores for a reward model)",
            predictions,
        )
    scored = found["pairs"] > 0
    chosen, rejected = (
        np.where(scored, found[name].astype(np.float64), 0.0) for name in ("reward_chosen", "reward_rejected")
    )
    # Compared, not subtracted: equal infinities are a tie, but their difference is NaN.
    wins = np.where(np.isnan(chosen) | np.isnan(rejected), np.nan, (chosen > rejected) + 0.5 * (chosen == rejected))
    return {"reward_chosen": chosen, "reward_rejected": rejected, "wins": np.where(scored, wins, 0.0), "pairs": scored}


@np.errstate(invalid="ignore")  # the difference of equal infinite sums is NaN
def pair_scores(sums: Columns) -> Columns:
    """Return the scores of `preferences`.

    Args:
        sums: the sums of `pair_sums`, each of shape (...), for one evaluation or a stack of them.

    Returns:
        Scores of the same shape.
    """
    pairs = sums["pairs"]
    return {
        "reward_chosen": ratio(sums["reward_chosen"], pairs),
        "reward_rejected": ratio(sums["reward_rejected"], pairs),
        "reward_margin": ratio(sums["reward_chosen"] - sums["reward_rejected"], pairs),
        "reward_accuracy": ratio(sums["wins"], pairs),
        "pairs": pairs,
    }
