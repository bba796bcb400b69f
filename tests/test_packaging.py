"""What is installed: the three packages, their types and their requirements, and nothing beside them."""

import ast
import tomllib
from importlib import import_module, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import find_packages

import lossfns
from tests.metrics.test_package import imported

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lossfns", "reducers", "metrics")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("package", "needed", "forbidden"),
    [
        ("lossfns", {"torch"}, {"transformers", "accelerate", "sklearn", "reducers", "metrics"}),
        ("reducers", {"torch", "lossfns"}, {"transformers", "accelerate", "sklearn", "metrics"}),
    ],
)
def test_a_fresh_import_loads_what_it_needs_and_no_more(package, needed, forbidden):
    loaded = imported(f"import {package}")
    assert loaded >= needed
    assert not loaded & forbidden


def test_an_import_of_transformers_would_be_seen():
    assert "transformers" in imported("import lossfns, transformers")


@pytest.mark.parametrize("package", PACKAGES)
def test_public_index(package):
    module = import_module(package)
    assert sorted(module.__all__) == module.__all__
    assert all(hasattr(module, name) for name in module.__all__)
    undocumented = [name for name in module.__all__ if not getattr(module, name).__doc__]
    assert not undocumented


@pytest.mark.parametrize("package", PACKAGES)
def test_an_init_holds_the_index_and_nothing_else(package):
    body = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")).body
    allowed = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign)
    assert all(isinstance(statement, allowed) for statement in body)
    names = [target.id for statement in body if isinstance(statement, ast.Assign) for target in statement.targets]
    assert names in (["__all__"], ["__version__", "__all__"])


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_inside_a_package_are_relative(package):
    """So that a package can be copied into a project under any name."""
    for path in (ROOT / package).rglob("*.py"):
        if {"recipes", "testing.py"} & set(path.relative_to(ROOT / package).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.split(".")[0] != package, f"{path}:{node.lineno}"
            if isinstance(node, ast.Import):
                assert package not in [alias.name.split(".")[0] for alias in node.names], f"{path}:{node.lineno}"


def test_only_the_three_packages_are_installed():
    options = PYPROJECT["tool"]["setuptools"]["packages"]["find"]
    found = find_packages(str(ROOT), include=options["include"])
    assert {name.split(".")[0] for name in found} == set(PACKAGES)
    assert find_packages(str(ROOT)) != found, "tests and benchmarks are packages too, so only the filter keeps them out"


@pytest.mark.parametrize("package", PACKAGES)
def test_types_are_shipped(package):
    assert (ROOT / package / "py.typed").is_file()
    assert PYPROJECT["tool"]["setuptools"]["package-data"][package] == ["py.typed"]


def test_the_installed_distribution_is_this_one():
    installed = metadata.metadata("lossfns")
    assert installed["Version"] == lossfns.__version__
    assert installed["License-Expression"] == "Apache-2.0"
    assert installed["Requires-Python"] == ">=3.11"
    assert set(installed.get_all("Provides-Extra")) == {"text", "plots", "dev"}


def test_versions_that_spoil_gradient_accumulation_are_excluded():
    """In transformers 5.2.0 to 5.5.3 accelerate divides every gradient by the accumulation steps once more."""
    requirements = [Requirement(line) for line in PYPROJECT["project"]["dependencies"]]
    allowed = next(one.specifier for one in requirements if one.name == "transformers")
    assert not [v for v in ("4.56.2", "5.2.0", "5.3.0", "5.4.1", "5.5.0", "5.5.3") if Version(v) in allowed]
    assert all(Version(v) in allowed for v in ("4.57.1", "5.1.0", "5.5.4", "5.24.0"))


def test_every_requirement_has_a_pinned_version_that_satisfies_it():
    pins = [
        Requirement(line)
        for line in (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    pinned = {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in pins}
    extras = PYPROJECT["project"]["optional-dependencies"].values()
    for line in [*PYPROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]:
        required = Requirement(line)
        if required.name != "torch":  # chosen by the Makefile
            assert Version(pinned[canonicalize_name(required.name)]) in required.specifier, line


@pytest.mark.parametrize("name", ["data.txt", "archives.txt", "sources.txt"])
def test_data_are_pinned_by_hash(name):
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins
    assert all("==" in line and "--hash=sha256:" in line for line in pins)
