"""Timing, result files, tables and processes of the harness, on cases whose result is known."""

import dataclasses
import gc
import json
import os
import time
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks import __main__, harness
from benchmarks.harness import Goal, Spread, Timed
from tests.benchmarks.results import result


def test_variants_take_turns_after_a_warm_up_round():
    calls = []

    def variant(name: str) -> Timed:
        return Timed(name, name.lower, calls.append)

    seconds = harness.interleave([variant("A"), variant("B")], rounds=2)
    assert calls == ["a", "b"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"A": 2, "B": 2}


def test_preparation_is_not_timed(monkeypatch):
    now = [0.0]

    def wait(seconds: float) -> None:
        now.append(now[-1] + seconds)

    monkeypatch.setattr(time, "perf_counter", lambda: now[-1])
    assert harness.interleave([Timed("A", lambda: wait(5), lambda _: wait(3))], rounds=2) == {"A": [3, 3]}


def test_garbage_collection_is_disabled_while_timing():
    seen = []
    harness.interleave([Timed("A", lambda: None, lambda _: seen.append(gc.isenabled()))], rounds=1)
    assert seen == [False, False]
    assert gc.isenabled()


def test_spread_is_the_median_and_the_quartiles():
    values = [5.0, 1.0, 4.0, 2.0, 3.0, 9.0]
    assert dataclasses.astuple(Spread.of(values)) == tuple(np.quantile(values, [0.5, 0.25, 0.75]))
    assert f"{Spread.of([2.0]):.1f}" == "2.0 (2.0 to 2.0)"


def test_ratios_are_taken_round_by_round():
    """A machine that was ten times slower in one round does not show; in a ratio of medians it would."""
    baseline, ours = [1.0, 10.0, 2.0], [0.5, 5.0, 1.0]
    assert harness.ratio(ours, baseline) == Spread(0.5, 0.5, 0.5)


def test_results_are_read_back_from_their_files(tmp_path):
    written = [result([{"x": 1}]), result([], allocator="kept")]
    for each in written:
        each.write(tmp_path)
    assert harness.read_results(tmp_path) == written
    with pytest.raises(ValueError, match="not JSON compliant"):
        result([{"x": float("nan")}]).write(tmp_path)


def test_markdown_table():
    assert harness.table(("name", "bytes"), [("a", "1.5"), ("b", "")]) == (
        "| name | bytes |\n| --- | --: |\n| a | 1.5 |\n| b |  |"
    )


@pytest.mark.parametrize(("measured", "reached"), [(0.9, True), (1.0, True), (1.1, False), (float("nan"), False)])
def test_goal_is_reached_up_to_its_limit(measured, reached):
    goal = Goal("time", 1.0, measured)
    assert goal.reached is reached
    assert ("**not reached**" in harness.goals_table([goal])) is not reached


@pytest.mark.parametrize("name", harness.ALLOCATORS)
def test_allocator_name_is_read_from_the_environment(monkeypatch, name):
    for key, value in harness.ALLOCATORS[name].items():
        monkeypatch.setenv(key, value)
    assert harness.allocator() == name
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "7")
    with pytest.raises(SystemExit, match="MALLOC_MMAP_MAX_"):
        harness.allocator()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_refused_before_anything_runs():
    with pytest.raises(SystemExit, match="no CUDA device"):
        __main__.main(["--device", "cuda"])


@pytest.mark.slow
def test_quick_run_leaves_the_real_results_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # a caller's own setting does not reach the measured process
    before = {path: path.read_bytes() for path in __main__.HERE.glob("**/*.json")}
    path = __main__.main(["evaluation", "--quick"])
    assert {path: path.read_bytes() for path in __main__.HERE.glob("**/*.json")} == before
    (file,) = (path.parent / "results").iterdir()
    assert json.loads(file.read_text())["quick"] is True
    assert "A quick run" in path.read_text()


def test_a_function_runs_in_another_process_and_its_error_comes_back():
    assert harness.in_a_process(os.getpid) != os.getpid()
    with pytest.raises(FileNotFoundError):
        harness.in_a_process(partial(os.listdir, "/nonexistent"))
