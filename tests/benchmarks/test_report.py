"""The committed report and the README's table of numbers are those of the committed result files."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks import harness, report
from benchmarks.losses import OVER, OWN, STOCK
from tests.benchmarks.results import result

ROOT = Path(harness.REPOSITORY)


@pytest.fixture(scope="module")
def committed():
    return harness.read_results(ROOT / "benchmarks" / "results")


def test_committed_report_is_that_of_the_committed_results(committed):
    """To write it: `python -m benchmarks report`."""
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8") == report.report(committed)


def test_every_benchmark_has_full_results_and_every_result_a_section(committed):
    assert {section.benchmark for section in report.SECTIONS} == {found.benchmark for found in committed}
    assert not [found.benchmark for found in committed if found.quick]


def test_report_says_whether_a_gpu_was_measured_and_leaves_out_sections_without_results():
    assert "No GPU" in report.report([result([])])
    assert "No GPU" not in report.report([result([], device="cuda", allocator="caching")])
    assert "## Losses" not in report.report([])


def test_limits_of_quick_and_gpu_runs_are_not_judged(committed):
    losses = next(found for found in committed if found.benchmark == "losses")
    assert "reached" in report.report([losses])
    assert "reached" not in report.report([dataclasses.replace(losses, quick=True)])
    assert "reached" not in report.report([dataclasses.replace(losses, device="cuda", allocator="caching")])


def changed(results, benchmark, loss, **figures):
    """Return the results with other figures of one loss."""
    return [
        dataclasses.replace(found, rows=[row | figures if row["loss"] == loss else row for row in found.rows])
        if found.benchmark == benchmark
        else found
        for found in results
    ]


def test_readme_table_is_relative_to_the_stock_loss(committed):
    """Twice the peak of the stock loss, and a quarter of its time."""
    found = changed(committed, "losses", STOCK, released=100, seconds=[4.0])
    found = changed(found, "losses", OWN, released=200, seconds=[1.0])
    found = changed(found, "losses", OVER, released=50, seconds=[2.0])
    lines = report.readme_table(found).splitlines()
    assert lines[3:5] == [
        "| `causal_lm_loss` | 2.00 | 0.25 | 0.25 |",
        "| `overwrite_logits=True` | 0.50 | 0.50 | 0.50 |",
    ]
    assert len(lines) == 6


def test_readme_table_is_replaced_between_its_markers(committed):
    text = f"before\n{report.README_BEGIN}\nold\n{report.README_END}\nafter"
    updated = report.with_readme_table(text, committed)
    assert updated == text.replace("old", f"\n{report.readme_table(committed)}\n")
    with pytest.raises(ValueError, match="unpack"):
        report.with_readme_table("no markers", committed)


def test_readme_has_the_table_of_the_committed_results(committed):
    """To write it: put `benchmarks.report.readme_table` between the markers."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert report.with_readme_table(text, committed) == text
