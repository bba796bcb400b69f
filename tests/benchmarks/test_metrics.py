"""What is said of ways to the same scores: who is ahead in time and memory, and what is not reached first."""

import gc

import pytest

from benchmarks import contenders, metrics, metrics_tasks
from benchmarks.contenders import OURS, Contender
from benchmarks.harness import Result

KEPT = []


def ways(quick):
    """Ours keeps nothing, and the peer eight megabytes."""
    size = 1 if quick else 8_000_000
    return [
        Contender(OURS, lambda: {"score": 0.5}),
        Contender("peer", lambda: KEPT.append(b"x" * size) or {"score": 0.25}),
        Contender("half", lambda: {"score": 0.0}, scale=2),
    ]


@pytest.fixture(autouse=True, scope="module")
def quick_collection():
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def rows(monkeypatch):
    """Measured here: a process for each line has first to import what all of them need."""
    monkeypatch.setattr(contenders, "_memory", contenders._peak)
    return contenders.measure("a task", ways, quick=False, rounds=2)


def result(rows):
    machine, versions = {"processor": "abacus"}, {"python": "3"}
    return Result("metrics", "python -m benchmarks metrics", "cpu", "default", False, machine, versions, 1.0, rows)


def test_each_line_is_measured_by_itself(rows):
    ours, peer, half = rows
    assert [row["with"] for row in rows] == [OURS, "peer", "half"]
    assert len(peer["seconds"]) == 2
    assert 8_000_000 <= peer["memory"] < 12_000_000
    assert ours["memory"] < 1_000_000
    assert (ours["difference"], peer["difference"], half["difference"]) == (0.0, 0.25, None)


def test_the_report_begins_with_what_is_not_reached(rows):
    slow = [row | {"seconds": [2.0, 2.0]} if row["with"] == OURS else row | {"seconds": [1.0, 4.0]} for row in rows]
    text = contenders.report("A task.", [result(slow)], limits={("a task", "peer"): 0.05}, more=lambda found: [])
    assert "**Not reached**: a task: time over peer 1.25 (at most 0.05); a task: time over half 1.25" in text
    assert text.index("**Not reached**") < text.index("What must be reached")
    fast = [row | {"seconds": [0.1 if row["with"] == OURS else 9.0] * 2, "memory": 1} for row in rows]
    assert "Every goal is reached." in contenders.report("A task.", [result(fast)], limits={}, more=lambda found: [])


@pytest.mark.parametrize("make", [metrics.ways, *metrics_tasks.TASKS.values()], ids=lambda make: make.__name__)
def test_everybody_scores_the_same(make):
    own, *others = make(True)
    expected = own.run()
    for other in others:
        found = other.run()
        assert found.keys() <= expected.keys()
        if other.scale == 1:
            assert found == pytest.approx({key: expected[key] for key in found}, rel=1e-5)


def test_tokens_score_the_same_in_parts():
    own, *others = metrics_tasks.token_ways(True)
    expected = own.run()
    for other in others:
        assert other.run() == pytest.approx({key: expected[key] for key in other.run()}, rel=1e-5)
