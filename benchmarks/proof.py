"""What the tests themselves prove: run some of them in an environment, keep what came out, write it in the report."""

import json
import platform
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .harness import REPOSITORY, Result, Row, machine, provenance, table

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Outcome:
    """What became of one test: passed, skipped or failed, why it was skipped, and what it recorded of itself."""

    test: str
    outcome: str
    reason: str
    seconds: float
    recorded: dict[str, str]


def run_tests(python: Path | str, *arguments: str) -> list[Outcome]:
    """Runs pytest under an interpreter and returns what became of every test.

    Raises:
        SystemExit: pytest came to no result, or nothing was run: no proof of anything.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        status = subprocess.run(command, cwd=REPOSITORY, check=False).returncode
        outcomes = read_junit(report) if report.exists() else []
    failed = any(outcome.outcome == "failed" for outcome in outcomes)
    if not outcomes or failed != bool(status):
        raise SystemExit(f"pytest ended with status {status} and {len(outcomes)} tests: {' '.join(command)}")
    return outcomes


def read_junit(path: Path) -> list[Outcome]:
    """The outcomes in a file that pytest wrote; a module that cannot be imported is a failed test."""
    return [_outcome(case) for case in ElementTree.parse(path).iter("testcase")]


def _outcome(case: ElementTree.Element) -> Outcome:
    skipped = case.find("skipped")
    outcome = "passed" if skipped is None else "skipped"
    if case.find("failure") is not None or case.find("error") is not None:
        outcome = "failed"
    return Outcome(
        test="::".join(filter(None, (case.get("classname"), case.get("name")))),
        outcome=outcome,
        reason="" if skipped is None else _reason(skipped),
        seconds=float(case.get("time", 0)),
        recorded={each.get("name", ""): each.get("value", "") for each in case.iter("property")},
    )


def _reason(skipped: ElementTree.Element) -> str:
    """Why: of a whole module it stands in the text, `('path', 18, 'Skipped: why')`."""
    whole = re.search(r"'Skipped: (.*)'\)$", skipped.text or "")
    return f"{whole[1]} (a whole module)" if whole else skipped.get("message", "")


def summary(outcomes: Sequence[Outcome]) -> Row:
    """Numbers of tests, the reasons of those that were skipped, the names of those that failed."""
    return {
        "passed": sum(each.outcome == "passed" for each in outcomes),
        "skipped": dict(Counter(each.reason for each in outcomes if each.outcome == "skipped")),
        "failed": [each.test for each in outcomes if each.outcome == "failed"],
        "seconds": round(sum(each.seconds for each in outcomes), 1),
    }


def write(benchmark: str, command: str, versions: dict[str, str], rows: Sequence[Row]) -> None:
    """The result file that the report reads."""
    result = Result(
        benchmark=benchmark,
        command=command,
        device="cpu",
        allocator="default",
        quick=False,
        machine=machine("cpu"),
        versions={"python": platform.python_version()} | versions,
        seconds=sum(row["seconds"] for row in rows),
        rows=[*rows],
    )
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{benchmark}.json"
    path.write_text(json.dumps(asdict(result), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read(benchmark: str) -> list[Row]:
    """The rows of the last result file, or none."""
    path = RESULTS / f"{benchmark}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


WRITTEN = ("results", "charts", "RESULTS.md")


def commit() -> str:
    """The state of the project that was tested, with a mark if a file that is kept, but no result, differs from it."""
    changes = _git("diff", "HEAD", "--name-only", "--", ".", *(f":!benchmarks/{name}" for name in WRITTEN))
    return _git("rev-parse", "--short", "HEAD") + "-dirty" * bool(changes)


def _git(*command: str) -> str:
    command = ("git", "-C", str(REPOSITORY), *command)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# --- sections of the report ------------------------------------------------------------------------------------------


def versions_table(rows: Sequence[Row]) -> str:
    """One line an environment."""
    names = ("transformers", "torch", "python", "accelerate", "numpy", "peft")
    return table(
        (*names, "passed", "skipped", "failed", "seconds", "commit"),
        [
            (
                *(row["versions"][name] for name in names),
                str(row["passed"]),
                str(sum(row["skipped"].values())),
                f"**{len(row['failed'])}**" if row["failed"] else "0",
                f"{row['seconds']:.0f}",
                row["commit"],
            )
            for row in rows
        ],
    )


def versions_report(results: Sequence[Result]) -> str:
    """The releases that were tried, what failed there, and why a test was left out."""
    parts = []
    for result in results:
        parts.append(
            "The tests of what the stock Trainer does and of what the functions do in it, in one environment each. "
            "The first has every requirement at the lower bound that `pyproject.toml` claims."
        )
        parts.append(versions_table(result.rows))
        reasons: dict[str, list[str]] = defaultdict(list)
        for row in result.rows:
            for reason, number in row["skipped"].items():
                reasons[reason].append(f"{row['versions']['transformers']}: {number}")
        if reasons:
            parts.append("Left out, and in how many tests:")
            parts.append("\n".join(f"- {reason} ({', '.join(dict.fromkeys(at))})" for reason, at in reasons.items()))
        failed = [f"- {row['versions']['transformers']}: `{test}`" for row in result.rows for test in row["failed"]]
        parts += ["Failed:", "\n".join(failed)] if failed else []
        parts.append(provenance(result))
    return "\n\n".join(parts)


def distributed_report(results: Sequence[Result]) -> str:
    """What several processes and replicas were shown to do, and how far they were from one process."""
    parts = []
    for result in results:
        shown = [row for row in result.rows if row["recorded"]]
        names = ("what", "processes", "result")
        parts.append(
            table(
                ("What", "Processes", "Result", ""),
                [(*(row["recorded"].get(name, "") for name in names), row["outcome"]) for row in shown],
            )
        )
        parts.append("All tests of several processes:")
        parts.append(_by_module(result.rows))
        parts.append(provenance(result))
    return "\n\n".join(parts)


def _by_module(rows: Sequence[Row]) -> str:
    modules: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        modules[row["test"].partition("::")[0]].append(row)
    counted = [(module, Counter(row["outcome"] for row in own), own) for module, own in modules.items()]
    return table(
        ("module", "passed", "skipped", "failed", "seconds"),
        [
            (
                f"`{module}`",
                *(str(number[outcome]) for outcome in ("passed", "skipped", "failed")),
                f"{sum(row['seconds'] for row in own):.0f}",
            )
            for module, number, own in counted
        ],
    )
