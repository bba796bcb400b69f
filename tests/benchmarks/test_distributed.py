"""What the heavier targets keep of a run of pytest, and that the releases claimed are those that were tried."""

import json
import subprocess
import sys

import pytest

from benchmarks import harness, proof, report, versions

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
        return proof.run_tests(sys.executable, "-q", "-c", "/dev/null", "--rootdir", str(folder), str(folder))

    return run(SUITE), run(SUITE + WRONG), run(SUITE, NEWER)


def test_every_test_is_kept_with_its_outcome(outcomes):
    right, wrong, newer = map(proof.summary, outcomes)
    assert right | {"seconds": 0} == {
        "passed": 1,
        "skipped": {"needs a newer release": 2},
        "failed": [],
        "seconds": 0,
    }
    assert wrong["failed"] == ["test_suite::test_wrong"]
    assert newer["skipped"] == {"needs a newer release": 2, "needs another release (a whole module)": 1}


def test_a_run_that_shows_nothing_is_no_proof(tmp_path):
    with pytest.raises(SystemExit, match="status 4 and 0 tests"):
        proof.run_tests(sys.executable, "-q", "-c", "/dev/null", str(tmp_path / "missing.py"))


def test_a_status_that_contradicts_the_outcomes_is_no_proof(outcomes, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: subprocess.CompletedProcess(given, 0))
    monkeypatch.setattr(proof, "read_junit", lambda path: outcomes[1])
    monkeypatch.setattr(proof.Path, "exists", lambda path: True)
    with pytest.raises(SystemExit, match="status 0 and 4 tests"):
        proof.run_tests(sys.executable)


def test_results_do_not_change_what_was_tested(tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "REPOSITORY", tmp_path)
    own, result = tmp_path / "own.py", tmp_path / "benchmarks" / "results" / "versions.json"
    result.parent.mkdir(parents=True)
    own.write_text("1")
    result.write_text("{}")
    identity = ("-c", "user.name=x", "-c", "user.email=x@x")
    for command in (("init",), ("add", "."), (*identity, "commit", "-m", "all")):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
    clean = proof.commit()
    result.write_text("{1}")
    (tmp_path / "scratch").write_text("untracked")
    assert proof.commit() == clean
    own.write_text("2")
    assert proof.commit() == f"{clean}-dirty"


def test_the_report_shows_what_the_files_hold(outcomes, monkeypatch, tmp_path):
    monkeypatch.setattr(proof, "RESULTS", tmp_path)
    names = dict.fromkeys(("transformers", "torch", "python", "accelerate", "numpy", "peft"), "1.2")
    rows = [{"name": "a", "versions": names, **proof.summary(each), "commit": "abc"} for each in outcomes[:2]]
    proof.write("versions", "make test-versions", {}, rows)
    shown = [{**vars(each)} for each in outcomes[1]]
    proof.write("distributed", "make test-distributed", {"torch": "2.13"}, shown)
    text = report.report(harness.read_results(tmp_path))
    for line in (
        "| 1.2 | 1.2 | 1.2 | 1.2 | 1.2 | 1.2 | 1 | 2 | 0 | 0 | abc |",
        "- needs a newer release (1.2: 2)",
        "- 1.2: `test_suite::test_wrong`",
        "| something | 3 | off by 0.0 | passed |",
        "| `test_suite` | 1 | 2 | 1 | 0 |",
        "`make test-distributed`",
    ):
        assert line in text
    assert proof.read("versions") == json.loads(json.dumps(rows))
    assert proof.read("nothing") == []


# --- releases --------------------------------------------------------------------------------------------------------


def test_the_lowest_environment_is_what_pyproject_claims():
    lowest = versions.pins(versions.Environment(versions.LOWEST, versions.LOWEST))
    bounds = versions.lower_bounds()
    assert {"transformers==4.57.1", "accelerate==1.3", "numpy==1.26", "scikit-learn==1.4"} <= {*lowest}
    assert bounds["torch"] == "2.6"
    assert not any(pin.startswith("torch==") for pin in lowest), "torch is installed first"


def test_the_newest_is_what_the_tests_run_with():
    pins = versions.pins(versions.Environment(versions.NEWEST, versions.NEWEST))
    assert [pin for pin in pins if pin.startswith("transformers==")] == ["transformers==5.24.0"]


def test_every_release_meets_both_torches():
    tried = {(each.transformers, each.torch) for each in versions.environments()}
    releases = {"lowest", "5.1.0", "5.9.0", "5.14.1", "newest"}
    assert tried == {(release, torch) for release in releases for torch in ("lowest", "newest")}
    assert {each.python for each in versions.environments()} == {"3.11", "3.12", "3.13"}


def test_an_unknown_environment_is_named(capsys):
    with pytest.raises(SystemExit):
        versions.main(["--torch", "torch", "yesterday"])
    assert "unknown environments ['yesterday']" in capsys.readouterr().err


def test_what_was_tried_passed():
    """The result file that is kept, if there is one."""
    for row in proof.read("versions"):
        assert row["passed"] > 300
        assert row["failed"] == []
