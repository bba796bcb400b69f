"""Scores of preferences, from the rewards of both rows of each pair."""

from typing import Any

import numpy as np

from ._core.evaluation import Columns, describe, named_columns
from ._core.metric import Metric, ratio

# The columns read here and what returns them: a contract between the two packages.
COLUMNS = dict.fromkeys(("reward_chosen", "reward_rejected", "pairs"), "preference_rewards, reward_scores")

DIRECTIONS: dict[str, bool | None] = {
    "reward_chosen": None,
    "reward_rejected": None,
    "reward_margin": True,
    "reward_accuracy": True,
    "pairs": None,
}


def preferences() -> Metric:
    """Score a preference or reward model by pair: how often and by how much the chosen one is ahead.

    The reducer is `preference_rewards` or `reward_scores`; its columns may stand in a dict of predictions, or in a dict
    inside it. Means are over the pairs that count. Keys:

    - `reward_chosen`, `reward_rejected`: mean rewards; `reward_margin`: mean of their difference;
    - `reward_accuracy`: fraction of the pairs whose chosen reward is larger; a tie counts half;
    - `pairs`: how many were scored.

    Rewards may be infinite, as of a reference that has no chance: a mean of them is infinite too, and NaN where inf and
    -inf meet in it, in a margin as in a sum; equal ones are a tie. A reward that is NaN makes every mean of it NaN.

    Without any pair, means are NaN.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Source: R. Rafailov et al., "Direct Preference Optimization", 2023, for implicit rewards; J. A. Hanley, B. J.
    McNeil, "The meaning and use of the area under a receiver operating characteristic (ROC) curve", 1982, for ties.

    Example:
        >>> from types import SimpleNamespace
        >>> rewards = {"reward_chosen": np.array([2.0, 1.0]), "reward_rejected": np.array([1.0, 1.0])}
        >>> scores = preferences()(SimpleNamespace(predictions=rewards | {"pairs": np.ones(2)}, label_ids=np.zeros(2)))
        >>> scores["reward_accuracy"], scores["reward_margin"]
        (0.75, 0.5)
    """
    return Metric(statistics=pair_sums, score=pair_scores, directions=DIRECTIONS)


def pair_sums(predictions: Any, labels: Any) -> Columns:
    """Return the columns that `pair_scores` reads, and who wins.

    Args:
        predictions: dict of arrays (pairs,), or a dict of such dicts; other arrays may stand beside them.
        labels: not read.

    Returns:
        Arrays (pairs,): the rewards and `wins` in float64, `pairs` (0 or 1).

    Raises:
        ValueError: a column is missing or stands there twice.
    """
    found = named_columns(predictions)
    missing = [name for name in COLUMNS if name not in found]
    if missing:
        raise ValueError(
            f"preferences() needs the columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}. Predictions hold "
            f"{describe(predictions)}. Set preprocess_logits_for_metrics=partial(preference_rewards, shift=1), or "
            "reward_scores for a reward model"
        )
    there = found["pairs"] > 0
    chosen, rejected = (
        np.where(there, found[name].astype(np.float64), 0.0) for name in ("reward_chosen", "reward_rejected")
    )
    # By comparison: the difference of equal infinities, which are a tie, is NaN.
    wins = np.where(np.isnan(chosen) | np.isnan(rejected), np.nan, (chosen > rejected) + 0.5 * (chosen == rejected))
    return {"reward_chosen": chosen, "reward_rejected": rejected, "wins": np.where(there, wins, 0.0), "pairs": there}


@np.errstate(invalid="ignore")  # infinite rewards may have no difference: NaN
def pair_scores(sums: Columns) -> Columns:
    """Return the scores that `preferences` lists.

    Args:
        sums: the sums of `pair_sums`, each of shape (...): a stack of evaluations, or one.

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
