"""A result of a benchmark as its file holds it, for the tests of reports."""

from typing import Any

from benchmarks.harness import Result, Row


def result(rows: list[Row], benchmark: str = "losses", **changes: Any) -> Result:
    given = {
        "benchmark": benchmark,
        "command": f"python -m benchmarks {benchmark}",
        "device": "cpu",
        "allocator": "default",
        "quick": False,
        "machine": {"processor": "abacus"},
        "versions": {"python": "3"},
        "seconds": 1.0,
        "rows": rows,
    }
    return Result(**(given | changes))
