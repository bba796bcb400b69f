"""`make test-distributed`: every test of several processes or replicas, including those that `make test` leaves out.

Also what `make test-versions` shares with it: runs of pytest whose outcomes are kept as results.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from .harness import REPOSITORY, Result, Row, Section, machine, read_results, table, versions

RESULTS = Path(__file__).resolve().parent / "results"


def run_tests(python: Path | str, *arguments: str) -> list[Row]:
    """Run pytest with an interpreter and return a row per test.

    Raises:
        SystemExit: no test ran, or pytest's exit status contradicts the outcomes.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        status = subprocess.run(command, cwd=REPOSITORY, check=False).returncode
        outcomes = read_junit(report) if report.exists() else []
    failed = any(row["outcome"] == "failed" for row in outcomes)
    if not outcomes or failed != bool(status):
        raise SystemExit(f"pytest ended with status {status} and {len(outcomes)} tests: {' '.join(command)}")
    return outcomes


def read_junit(path: Path) -> list[Row]:
    """Read the outcome of every test from pytest's XML file; a module that cannot be imported is a failed test."""
    found = []
    for case in ElementTree.parse(path).iter("testcase"):
        row = {"test": "::".join(filter(None, (case.get("classname"), case.get("name")))), "outcome": "passed"}
        row |= {"reason": "", "seconds": float(case.get("time", 0))}
        row["recorded"] = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            row["outcome"] = "failed"
        elif skipped is not None:  # for a whole module the text is `('path', 18, 'Skipped: why')`
            whole = re.search(r"'Skipped: (.*)'\)$", skipped.text or "")
            reason = f"{whole[1]} (a whole module)" if whole else skipped.get("message", "")
            row |= {"outcome": "skipped", "reason": reason}
        found.append(row)
    return found


def summary(outcomes: Sequence[Row]) -> Row:
    """Return the numbers of tests, the reasons of those that were skipped and the names of those that failed."""
    return {
        "passed": sum(each["outcome"] == "passed" for each in outcomes),
        "skipped": dict(Counter(each["reason"] for each in outcomes if each["outcome"] == "skipped")),
        "failed": [each["test"] for each in outcomes if each["outcome"] == "failed"],
        "seconds": round(sum(each["seconds"] for each in outcomes), 1),
    }


def write(benchmark: str, packages: Sequence[str], rows: Sequence[Row]) -> None:
    """Write the result file of `make test-{benchmark}`."""
    seconds = sum(row["seconds"] for row in rows)
    command = f"make test-{benchmark}"
    result = Result(benchmark, command, "cpu", "default", False, machine("cpu"), versions(*packages), seconds, [*rows])
    result.write(RESULTS, benchmark)


def read(benchmark: str) -> list[Row]:
    """Return the rows of the result file, or an empty list."""
    return next((result.rows for result in read_results(RESULTS) if result.benchmark == benchmark), [])


def commit() -> str:
    """Return the commit under test, marked as dirty if a tracked file differs from it."""
    command = ("git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--exclude=*")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def versions_table(rows: Sequence[Row]) -> str:
    """Return one line per environment."""
    names = ("transformers", "torch", "python", "accelerate", "numpy", "peft")
    cells = []
    for row in rows:
        numbers = [row["passed"], sum(row["skipped"].values()), len(row["failed"]), round(row["seconds"])]
        cells.append([*(row["versions"][name] for name in names), *map(str, numbers), row["commit"]])
    return table((*names, "passed", "skipped", "failed", "seconds", "commit"), cells)


def versions_tables(result: Result) -> str:
    reasons: dict[str, list[str]] = {}
    for row in result.rows:
        release = row["versions"]["transformers"]
        for reason, number in row["skipped"].items():
            reasons.setdefault(reason, []).append(f"{release}: {number}")
        for test in row["failed"]:
            reasons.setdefault(f"**failed**: `{test}`", []).append(release)
    lines = [f"- {reason} ({', '.join(dict.fromkeys(where))})" for reason, where in reasons.items()]
    return "\n".join([versions_table(result.rows), "\nSkipped, by release and number of tests:\n", *lines])


def distributed_tables(result: Result) -> str:
    names = ("what", "processes", "result")
    shown = [[*map(row["recorded"].get, names), row["outcome"]] for row in result.rows if row["recorded"]]
    counts = Counter(row["outcome"] for row in result.rows)
    lines = [f"- **failed**: `{row['test']}`" for row in result.rows if row["outcome"] == "failed"]
    counted = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "skipped", "failed"))
    return "\n".join([table(("What", "Processes", "Result", ""), shown), f"\nAll tests: {counted}.", *lines])


VERSIONS = Section(
    title="Releases of transformers and torch",
    benchmark="versions",
    about="The tests of the stock Trainer and of the functions in it, once per environment. The first has every "
    "requirement at the lower bound in `pyproject.toml`.",
    tables=versions_tables,
    allocators=(),
)
DISTRIBUTED = Section(
    title="Several processes and replicas",
    benchmark="distributed",
    about="Compared with one process on all rows. A variant that is marked as broken passes if it differs.",
    tables=distributed_tables,
    allocators=(),
)


def main() -> int:
    """Run every test of several processes, write the result file, and return the exit status."""
    outcomes = run_tests(sys.executable, "-m", "distributed", "tests")
    write("distributed", ("torch", "transformers", "accelerate", "peft"), outcomes)
    return int(any(row["outcome"] == "failed" for row in outcomes))


if __name__ == "__main__":
    sys.exit(main())
