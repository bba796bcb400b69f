"""The structure that ARCHITECTURE.md describes: entries, import layers, and the path of one loss, each counted here."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch

from lossfns import causal_lm_loss

ROOT = Path(__file__).parent.parent
ENTRIES = {"lossfns": 24, "metrics": 18, "reducers": 18}


def entries(package: str) -> set[str]:
    """Names of the modules and subpackages directly inside a package."""
    folder = ROOT / package
    return {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}


def imports(package: str) -> dict[str, set[str]]:
    """For each entry of a package, the other entries that it imports, anywhere in its files."""
    names = entries(package)
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in (ROOT / package).rglob("*.py"):
        own = path.relative_to(ROOT).with_suffix("").parts
        entry = own[1]
        for node in ast.walk(ast.parse(path.read_text())):
            for module, symbols in imported_modules(node, own):
                if module[0] == package:
                    targets = (
                        {module[1]} if len(module) > 1 else {name if name in names else "__init__" for name in symbols}
                    )
                    found[entry] |= targets & names - {entry}
    return found


def imported_modules(node: ast.AST, own: tuple[str, ...]) -> list[tuple[tuple[str, ...], list[str]]]:
    """The modules that an import statement names, as tuples of their parts, with the names taken from them."""
    if isinstance(node, ast.Import):
        return [(tuple(alias.name.split(".")), []) for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = own[: len(own) - node.level] if node.level else ()
    module = (*base, *(node.module.split(".") if node.module else ()))
    return [(module, [alias.name for alias in node.names])] if module else []


def layers(graph: dict[str, set[str]]) -> list[set[str]]:
    """The entries in layers: each imports only from the layers below it. Raises CycleError if there is a cycle."""
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    found = []
    while sorter.is_active():
        ready = sorter.get_ready()
        found.append(set(ready))
        sorter.done(*ready)
    return found


@pytest.mark.parametrize(("package", "most"), ENTRIES.items())
def test_packages_have_few_entries_and_no_import_cycle(package, most):
    visible = [path for path in (ROOT / package).iterdir() if path.name != "__pycache__"]
    assert len(visible) <= most, sorted(path.name for path in visible)
    assert layers(imports(package))


def test_lossfns_has_few_layers_and_few_imports_between_entries():
    graph = imports("lossfns")
    found = layers(graph)
    assert len(found) <= 6, found
    assert sum(map(len, graph.values())) <= 55, graph
    assert found[0] == {"_core"}, "_core imports no family and no catalogue of terms"


def test_nothing_imports_the_kit_or_the_recipes():
    for package in ENTRIES:
        for entry, targets in imports(package).items():
            if entry not in ("testing", "recipes"):
                assert not targets & {"testing", "recipes"}, (package, entry)


def test_a_cycle_is_found():
    with pytest.raises(ValueError, match="cycle"):
        layers({"a": {"b"}, "b": {"a"}})


@pytest.mark.parametrize(
    ("package", "others"), [("metrics", {"lossfns", "reducers"}), ("lossfns", {"reducers", "metrics"})]
)
def test_packages_stand_alone(package, others):
    """`metrics` can be copied alone, and `lossfns` imports no other package outside its kit and its recipes."""
    for path in (ROOT / package).rglob("*.py"):
        own = path.relative_to(ROOT).with_suffix("").parts
        if own[:2] in (("lossfns", "testing"), ("lossfns", "recipes")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            assert not {module[0] for module, _ in imported_modules(node, own)} & others, path


def calls_of_our_own(function) -> list[tuple[str, str]]:
    """File and name of every call of a function of lossfns while `function` runs."""
    calls = []
    folder = f"{ROOT / 'lossfns'}/"

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            calls.append((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_one_loss_makes_few_calls_in_few_files():
    """Forward and backward of `causal_lm_loss` on one chunk, some labels ignored."""
    logits, labels = torch.randn(2, 5, 17, requires_grad=True), torch.randint(0, 17, (2, 5))
    labels[0, 2] = -100
    calls = calls_of_our_own(lambda: causal_lm_loss({"logits": logits * 1}, labels, torch.tensor(7)).backward())
    assert {"causal_lm_loss", "align", "backward"} <= {name for _, name in calls}
    assert len(calls) <= 60, calls
    assert len({file for file, _ in calls}) <= 11, calls
