"""The demo's table and picture for measurements that are given."""

import pytest

from benchmarks import demo
from benchmarks.demo import Way

SCORES = {"nll_loss": 3.25, "token_accuracy": 0.5}


@pytest.fixture
def ways():
    names = ("nothing configured", "eval_accumulation_steps=1", "argmax by hand", "lossfns", "lossfns, streaming")
    peaks = (3_000_000_000, 2_000_000_000, 400_000_000, 200_000_000, 100_000_000)
    scores = {"argmax by hand": {"token_accuracy": 0.5}}
    return [
        Way(name, scores.get(name, SCORES), peak // 2, peak, 7.0, ([0.0, 1.0], [0, peak]))
        for name, peak in zip(names, peaks, strict=True)
    ]


def test_table_has_one_line_per_way(ways):
    lines = [line.split() for line in demo.table(ways).splitlines()]
    assert ["lossfns", "+200", "MB", "100", "MB", "7", "s", "3.250", "0.500", "-"] in lines
    assert ["argmax", "by", "hand", "+400", "MB", "200", "MB", "7", "s", "-", "0.500", "-"] in lines


def test_picture_has_the_finding_as_its_title(ways, tmp_path):
    assert demo.finding(ways).startswith("lossfns evaluates SmolLM2-135M in 200 MB instead of 3 GB of memory")
    path = demo.picture(ways, tmp_path / "output" / "demo.png")
    assert path.read_bytes().startswith(b"\x89PNG")
