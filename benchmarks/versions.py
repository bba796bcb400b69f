"""`make test-versions`: the tests of the Trainer and of the functions in it, with the lowest to the newest releases.

Each pair of transformers and torch has its own environment in `.venvs`, made once and reused; those with the same torch
share its files. Other Pythons are used if they are found as `python3.12` and `python3.13`.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from packaging.requirements import Requirement

from . import distributed, harness

HOME = harness.REPOSITORY / ".venvs"
CONSTRAINTS = harness.REPOSITORY / "requirements" / "constraints.txt"
TESTS = (
    "tests/contract",
    "tests/lossfns/core/test_hidden_evaluation.py",
    "tests/lossfns/core/test_hidden_ranks.py",
    "tests/lossfns/core/test_hidden_errors.py",
    "tests/lossfns/test_collators_supervised_logits.py",
    "tests/lossfns/core/test_hidden_training.py",
    "tests/lossfns/test_trainer_language.py",
    "tests/lossfns/test_training.py",
    "tests/lossfns/test_collators_label_dicts.py",
    "tests/metrics/test_in_trainer.py",
    "tests/kit/test_trainer.py",
    "tests/test_end_to_end.py",
)
TOOLS = ("hypothesis", "packaging", "peft", "pytest", "pytest-timeout")
# As old as the lowest releases: newer releases of pyarrow need numpy 2 without declaring it.
WITH_THE_LOWEST = ("datasets==3.0.0", "pandas==2.2.0", "peft==0.17.0", "pyarrow==15.0.0")
BETWEEN = ("5.1.0", "5.9.0", "5.14.1")
LOWEST, NEWEST = "lowest", "newest"
OWN_PYTHON = ".".join(platform.python_version_tuple()[:2])


@dataclass(frozen=True)
class Environment:
    """A release of transformers ("lowest", "newest" or its number), of torch ("lowest", "newest") and of Python."""

    transformers: str
    torch: str
    python: str = OWN_PYTHON

    @property
    def name(self) -> str:
        return f"python-{self.python}-transformers-{self.transformers}-torch-{self.torch}"


def environments() -> list[Environment]:
    """Return every release with the lowest and the newest torch, and the newest of both with every other Python."""
    pairs = product((LOWEST, *BETWEEN, NEWEST), (LOWEST, NEWEST))
    others = [python for python in ("3.11", "3.12", "3.13") if python != OWN_PYTHON]
    return [Environment(*pair) for pair in pairs] + [Environment(NEWEST, NEWEST, python) for python in others]


def lower_bounds() -> dict[str, str]:
    """Return the lower bounds in `pyproject.toml`, by distribution."""
    project = tomllib.loads((harness.REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = map(Requirement, project["dependencies"])
    return {each.name: part.version for each in requirements for part in each.specifier if part.operator == ">="}


def pins(environment: Environment) -> list[str]:
    """Return the constraints for pip, except torch."""
    bounds = lower_bounds()
    if environment.transformers == NEWEST and environment.torch == NEWEST:
        return CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    if environment.transformers == LOWEST and environment.torch == LOWEST:
        lowest = [f"{name}=={bound}" for name, bound in bounds.items() if name != "torch"]
        return [*lowest, *WITH_THE_LOWEST]
    newest = next(line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if "transformers==" in line)
    release = {LOWEST: f"transformers=={bounds['transformers']}", NEWEST: newest}
    return [release.get(environment.transformers, f"transformers=={environment.transformers}")]


def made(environment: Environment, torch: str) -> Path:
    """Return the interpreter of an environment, which is made or updated first if its pins require it."""
    base = HOME / f"python-{environment.python}-torch-{environment.torch}"
    _install(base, environment.python, [torch], [])
    folder = HOME / environment.name
    python = folder / "bin" / "python"
    if not python.exists():
        _run(_interpreter(environment.python), "-m", "venv", "--clear", str(folder))
        site = next((folder / "lib").glob("python*/site-packages"))
        (site / "torch.pth").write_text(f"{next((base / 'lib').glob('python*/site-packages'))}\n")
    constraints = [*pins(environment), f"torch=={_versions(base / 'bin' / 'python', ['torch'])['torch']}"]
    _install(folder, environment.python, [*TOOLS, "--editable", str(harness.REPOSITORY)], constraints)
    return python


def _install(folder: Path, version: str, requirements: Sequence[str], constraints: Sequence[str]) -> None:
    """Install requirements into an environment, unless the stamp says that they are installed."""
    stamp, held = folder / "installed.txt", folder / "constraints.txt"
    project = (harness.REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    wanted = "\n".join([*requirements, *constraints, project if constraints else ""])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if not (folder / "bin" / "python").exists():
        _run(_interpreter(version), "-m", "venv", "--clear", str(folder))
    held.write_text("\n".join(constraints) + "\n")
    harness.progress(f"installing {folder.name}")
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--constraint", str(held))
    _run(*pip, *requirements)
    stamp.write_text(wanted)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _interpreter(version: str) -> str:
    return sys.executable if version == OWN_PYTHON else f"python{version}"


def _versions(python: Path, names: Sequence[str]) -> dict[str, str]:
    script = (
        "import json, platform, sys; from importlib.metadata import version; "
        "print(json.dumps({'python': platform.python_version()} | {name: version(name) for name in sys.argv[1:]}))"
    )
    return json.loads(_run(str(python), "-c", script, *names))


def _is_found(version: str) -> bool:
    try:  # a shim may be on the PATH without an interpreter behind it
        return not subprocess.run([_interpreter(version), "-c", ""], check=False, capture_output=True).returncode
    except FileNotFoundError:
        return False


def main(arguments: list[str] | None = None) -> int:
    """Test the named environments, write the result file after each, and return the exit status."""
    known = {environment.name: environment for environment in environments()}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help=f"all if none is named: {', '.join(known)}")
    parser.add_argument("--torch", required=True, help="the newest torch, as a requirement")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - known.keys():
        parser.error(f"expected some of {', '.join(known)}, got the unknown {sorted(unknown)}")
    os.environ.pop("PYTHONPATH", None)  # it would make another environment's packages importable
    torches = {LOWEST: f"torch=={lower_bounds()['torch']}", NEWEST: given.torch}
    rows = {row["name"]: row for row in distributed.read("versions")}
    commit = distributed.commit()  # before the result file changes
    for name in given.names or known:
        environment = known[name]
        if not _is_found(environment.python):
            harness.progress(f"skipped, python{environment.python} is not installed: {name}")
            continue
        python = made(environment, torches[environment.torch])
        harness.progress(f"testing {name}")
        rows[name] = {
            "name": name,
            "versions": _versions(python, ["transformers", "torch", "accelerate", "numpy", "peft"]),
            **distributed.summary(distributed.run_tests(python, *TESTS)),
            "commit": commit,
        }
        distributed.write("versions", (), [rows[each] for each in known if each in rows])
    print(distributed.versions_table(distributed.read("versions")))
    return int(any(row["failed"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
