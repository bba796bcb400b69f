"""Runs of pytest as results, and the environments of `make test-versions`."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks import distributed, harness, report, versions

SUITE = """
import pytest

def test_right(record_property):
    record_property("what", "something")
    record_property("processes", 3)
    record_property("result", "off by 0.0")

@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.skip(reason="needs a newer release")
def test_left_out(x): ...
"""
NEWER = """
import pytest

pytest.skip("needs another release", allow_module_level=True)
"""
WRONG = """
def test_wrong():
    assert 1 == 2
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of a right suite and of one with a mistake, each in a pytest of its own."""

    def run(*texts):
        folder = tmp_path_factory.mktemp("suite")
        for name, text in zip(("test_suite.py", "test_other.py"), texts, strict=False):
            (folder / name).write_text(text)
        return distributed.run_tests(sys.executable, "-q", "-c", "/dev/null", "--rootdir", str(folder), str(folder))

    return run(SUITE), run(SUITE + WRONG), run(SUITE, NEWER)


def test_every_test_is_kept_with_its_outcome(outcomes):
    right, wrong, newer = map(distributed.summary, outcomes)
    assert right | {"seconds": 0} == {"passed": 1, "skipped": {"needs a newer release": 2}, "failed": [], "seconds": 0}
    assert wrong["failed"] == ["test_suite::test_wrong"]
    assert newer["skipped"] == {"needs a newer release": 2, "needs another release (a whole module)": 1}


def test_run_without_tests_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="status 4 and 0 tests"):
        distributed.run_tests(sys.executable, "-q", "-c", "/dev/null", str(tmp_path / "missing.py"))


def test_status_that_contradicts_the_outcomes_is_refused(outcomes, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: subprocess.CompletedProcess(given, 0))
    monkeypatch.setattr(distributed, "read_junit", lambda path: outcomes[1])
    monkeypatch.setattr(distributed.Path, "exists", lambda path: True)
    with pytest.raises(SystemExit, match="status 0 and 4 tests"):
        distributed.run_tests(sys.executable)


def test_commit_is_marked_if_a_tracked_file_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "REPOSITORY", tmp_path)
    own = tmp_path / "own.py"
    own.write_text("1")
    identity = ("-c", "user.name=x", "-c", "user.email=x@x")
    for command in (("init",), ("add", "."), (*identity, "commit", "-m", "all"), ("tag", "v1")):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
    clean = distributed.commit()
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    (tmp_path / "scratch").write_text("untracked")
    assert distributed.commit() == clean
    own.write_text("2")
    assert distributed.commit() == f"{clean}-dirty"


def test_the_report_shows_what_the_files_hold(outcomes, monkeypatch, tmp_path):
    monkeypatch.setattr(distributed, "RESULTS", tmp_path)
    names = dict.fromkeys(("transformers", "torch", "python", "accelerate", "numpy", "peft"), "1.2")
    rows = [{"name": "a", "versions": names, **distributed.summary(each), "commit": "abc"} for each in outcomes[:2]]
    distributed.write("versions", (), rows)
    distributed.write("distributed", ("torch",), outcomes[1])
    text = report.report(harness.read_results(tmp_path))
    for line in (
        "| 1.2 | 1.2 | 1.2 | 1.2 | 1.2 | 1.2 | 1 | 2 | 0 | 0 | abc |",
        "- needs a newer release (1.2: 2)",
        "- **failed**: `test_suite::test_wrong` (1.2)",
        "| something | 3 | off by 0.0 | passed |",
        "All tests: 1 passed, 2 skipped, 1 failed.",
        "- **failed**: `test_suite::test_wrong`",
        "`make test-distributed`",
    ):
        assert line in text
    assert distributed.read("versions") == json.loads(json.dumps(rows))
    assert distributed.read("nothing") == []


def test_the_lowest_environment_is_what_pyproject_claims_and_the_newest_that_of_the_constraints():
    lowest = versions.pins(versions.Environment(versions.LOWEST, versions.LOWEST))
    newest = versions.pins(versions.Environment(versions.NEWEST, versions.NEWEST))
    assert {"transformers==4.57.1", "accelerate==1.3", "numpy==1.26", "scikit-learn==1.4"} <= {*lowest}
    assert versions.lower_bounds()["torch"] == "2.6"
    assert [pin for pin in newest if pin.startswith("transformers==")] == ["transformers==5.24.0"]
    assert not any(pin.startswith("torch==") for pin in lowest), "torch is installed first"


def test_every_release_is_tried_with_both_torches():
    tried = {(each.transformers, each.torch) for each in versions.environments()}
    releases = {"lowest", "5.1.0", "5.9.0", "5.14.1", "newest"}
    assert tried == {(release, torch) for release in releases for torch in ("lowest", "newest")}
    assert {each.python for each in versions.environments()} == {"3.11", "3.12", "3.13"}


def test_unknown_environment_is_refused(capsys):
    with pytest.raises(SystemExit):
        versions.main(["--torch", "torch", "yesterday"])
    assert "got the unknown ['yesterday']" in capsys.readouterr().err


def test_what_was_tried_passed():
    """The result file that is kept, if there is one."""
    for row in distributed.read("versions"):
        assert row["passed"] > 300
        assert row["failed"] == []


def test_the_tested_files_exist():
    assert [path for path in versions.TESTS if not (harness.REPOSITORY / path).exists()] == []
