"""Scores of preferences against a loop over pairs, infinite rewards among them."""

import itertools
import math

import numpy as np
import pytest
import torch

from metrics import bootstrap, build, by_group, compare, preferences

from .evaluations import evaluation

pytestmark = pytest.mark.filterwarnings("error")
INF, NAN = math.inf, math.nan
FOUR = [(1.0, 0.0), (0.5, 1.0), (2.0, 1.0), (3.0, -INF)]
PAIRS = [*itertools.product([-INF, 1.5, INF, NAN], repeat=2)]


def rewards(pairs, counted=None):
    chosen, rejected = np.array(pairs, np.float64).reshape(-1, 2).T
    pairs = np.ones(len(chosen)) if counted is None else np.array(counted)
    columns = {"reward_chosen": chosen, "reward_rejected": rejected, "pairs": pairs}
    return evaluation(columns, np.zeros(len(chosen)))


def total(values):
    """As `math.fsum`, which refuses a sum of inf and -inf."""
    return NAN if {INF, -INF} <= {*values} else math.fsum(values)


def by_hand(pairs):
    count = len(pairs)
    wins = [NAN if any(map(math.isnan, pair)) else (pair[0] > pair[1]) + 0.5 * (pair[0] == pair[1]) for pair in pairs]
    return {
        "reward_chosen": total([chosen for chosen, _ in pairs]) / count,
        "reward_rejected": total([rejected for _, rejected in pairs]) / count,
        "reward_margin": total([chosen - rejected for chosen, rejected in pairs]) / count,
        "reward_accuracy": total(wins) / count,
        "pairs": float(count),
    }


@pytest.mark.parametrize("first", PAIRS)
def test_infinite_rewards_score_as_pair_by_pair(first):
    for second in PAIRS:
        pairs = [first, second, (2.0, 1.0)]
        assert preferences()(rewards(pairs)) == pytest.approx(by_hand(pairs), nan_ok=True), second


def test_equal_infinities_are_a_tie_and_ignored_pairs_are_not_looked_at():
    scores = preferences()(rewards([(-INF, -INF), (0, -INF), (INF, NAN), (-INF, INF)], counted=[1, 1, 0, 0]))
    assert scores["reward_accuracy"] == 0.75
    assert scores["pairs"] == 2


def test_infinite_reward_affects_only_its_group():
    scores = by_group(preferences(), ["finite", "finite", "finite", "infinite"])(rewards(FOUR))
    for name, own in (("finite", FOUR[:3]), ("infinite", FOUR[3:])):
        for key, value in by_hand(own).items():
            assert scores[f"{key}/{name}"] == pytest.approx(value), key


def test_infinite_reward_affects_only_replicates_that_draw_it():
    scores = bootstrap(preferences(), n=400)(rewards(FOUR))
    assert -0.5 <= scores["reward_margin_low"] <= 1  # about a third of the replicates lack the last pair
    assert scores["reward_margin_high"] == INF
    assert 0.5 <= scores["reward_chosen_low"] <= scores["reward_chosen_high"] <= 3


def test_runs_with_infinite_rewards_are_compared():
    finite, infinite = rewards([(1.0, 0.0), (2.0, 1.0)]), rewards([(1.0, 0.0), (2.0, -INF)])
    scores = compare(preferences(), finite, infinite, n=50)
    assert scores["reward_margin_difference"] == -INF
    assert scores["reward_chosen_difference"] == scores["reward_accuracy_difference"] == 0


def test_infinities_of_several_steps_meet():
    metric = build(preferences(), num_samples=2)
    for pairs, last in ([(INF, 0.0)], False), ([(-INF, 0.0)], True):
        step = rewards(pairs)
        columns = {name: torch.from_numpy(column) for name, column in step.predictions.items()}
        scores = metric(evaluation(columns, torch.zeros(1)), compute_result=last)
    assert math.isnan(scores["reward_chosen"])
    assert scores["reward_accuracy"] == 0.5
