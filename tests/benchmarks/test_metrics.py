"""All contenders compute the same scores, and each is measured separately."""

import pytest

from benchmarks import metrics
from benchmarks.metrics import OURS, Contender
from tests.benchmarks.results import result

KEPT = []


def ways(quick):
    """Return contenders of which ours keeps nothing and the peer eight megabytes."""
    size = 1 if quick else 8_000_000
    return [
        Contender(OURS, lambda: {"score": 0.5}),
        Contender("peer", lambda: KEPT.append(b"x" * size) or {"score": 0.25}),
        Contender("half", lambda: {"score": 0.0}, scale=2),
    ]


@pytest.fixture
def rows(monkeypatch):
    """Measured in this process, because others would import everything first."""
    monkeypatch.setattr(metrics, "_memory", metrics._peak)
    monkeypatch.setattr(metrics, "ROUNDS", 2)
    return metrics.measure("a task", ways, quick=False)


def test_each_line_is_measured_by_itself(rows):
    ours, peer, half = rows
    assert [row["with"] for row in rows] == [OURS, "peer", "half"]
    assert len(peer["seconds"]) == 2
    assert 8_000_000 <= peer["memory"] < 12_000_000
    assert ours["memory"] < 1_000_000
    assert (ours["difference"], peer["difference"], half["difference"]) == (0.0, 0.25, None)


def test_goals_compare_with_every_peer():
    """Ours is half as fast as scikit-learn where a twentieth of its time is the limit, and needs twice its memory."""
    row = {"scale": 1, "seconds": [1.0, 4.0], "memory": 100, "difference": 0.0}
    ours = {"with": OURS, "seconds": [2.0, 8.0], "memory": 200}
    rows = [row | {"task": task, **each} for task in metrics.TASKS for each in (ours, {"with": metrics.SKLEARN})]
    goals = {goal.what: goal for goal in metrics.goals(result(rows, "metrics"))}
    time, memory = (goals[f"seven scores: {what} over scikit-learn"] for what in ("time", "memory"))
    assert (time.limit, time.measured, time.reached) == (0.05, 2.0, False)
    assert (memory.limit, memory.measured, memory.reached) == (1.0, 2.0, False)
    assert goals["95 % interval of macro-F1: seconds"].measured == 5.0
    assert len(goals) == 2 * len(metrics.TASKS) + 2
    assert "| seven scores | scikit-learn | 2500.0 (1750.0 to 3250.0) | 100 B | 0 |" in metrics.tables(result(rows))


@pytest.mark.parametrize("make", metrics.TASKS.values(), ids=lambda make: make.__name__)
def test_contenders_compute_the_same_scores(make):
    own, *others = make(True)
    expected = own.run()
    for other in others:
        found = other.run()
        assert found.keys() <= expected.keys()
        if other.scale == 1:
            assert found == pytest.approx({key: expected[key] for key in found}, rel=1e-5)


def test_tokens_score_the_same_in_parts():
    own, *others = metrics.token_ways(True)
    expected = own.run()
    for other in others:
        assert other.run() == pytest.approx({key: expected[key] for key in other.run()}, rel=1e-5)
