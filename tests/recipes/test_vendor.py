"""A vendored file holds what its functions need and nothing else, and works where this project is not installed."""

import ast
import doctest
import importlib
import json
import subprocess
import sys
import sysconfig

import pytest

import lossfns
import metrics
import reducers
from lossfns.recipes import _sources
from lossfns.recipes.__main__ import main
from lossfns.recipes._vendor import vendor

EXPORTS = [f"{package.__name__}.{name}" for package in (lossfns, reducers, metrics) for name in package.__all__]

# Imports each file by its path and runs one docstring's example in it; imports of ours in the example give that file.
WORKER = """
import doctest, importlib.util, json, sys, types
sys.path[:0] = json.loads(sys.argv[1])
missing = [name for name in ("lossfns", "reducers", "metrics") if importlib.util.find_spec(name) is None]
verdicts = {"missing": missing}
import numpy, torch
from torch import nn
for name, path in json.loads(sys.stdin.read()).items():
    try:
        spec = importlib.util.spec_from_file_location(name.replace(".", "_"), path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for package in ("lossfns", "lossfns.collators", "reducers", "metrics"):
            sys.modules[package] = module
        last = name.rpartition(".")[2]
        scope = {"np": numpy, "torch": torch, "nn": nn, "SimpleNamespace": types.SimpleNamespace}
        scope |= vars(module)
        example = doctest.DocTestParser().get_doctest(getattr(module, last).__doc__ or "", scope, name, path, 0)
        said = []
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS, verbose=False)
        runner.run(example, out=said.append)
        verdicts[name] = "".join(said) if runner.failures else len(example.examples)
    except Exception as error:
        verdicts[name] = f"{type(error).__name__}: {error}"
print(json.dumps(verdicts))
"""


def alone(script, *arguments, stdin=None):
    """Run a script in a Python that knows the libraries and not this project: without .pth files, and elsewhere."""
    libraries = json.dumps([sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, libraries, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def needed_by_the_example(name):
    """The function, and what its example takes from this project: by an import, or because its module has it."""
    package, _, last = name.partition(".")
    function = getattr(importlib.import_module(package), last)
    examples = doctest.DocTestParser().get_examples(function.__doc__ or "")
    places = set()
    for node in ast.walk(ast.parse("".join(example.source for example in examples))):
        if isinstance(node, ast.ImportFrom):
            places |= {place for _, place in _sources.imported(node, "")}
        elif isinstance(node, ast.Name):
            places.add(_sources.find(function.__module__, node.id))
    others = {f"{place.module}.{place.name}" for place in places if place and place.inside and place.name != last}
    return [name, *sorted(others)]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vendored")
    files = {}
    for name in EXPORTS:
        files[name] = str(folder / f"{name}.py")
        (folder / f"{name}.py").write_text(vendor(needed_by_the_example(name)), encoding="utf-8")
    (folder / "broken.py").write_text("def broken():\n    '''\n    >>> broken()\n    1\n    '''\n    return IGNORED\n")
    files["broken"] = str(folder / "broken.py")
    return json.loads(alone(WORKER, stdin=json.dumps(files)))


def test_the_project_is_not_there(verdicts):
    assert verdicts["missing"] == list(_sources.PACKAGES)


def test_a_file_that_lacks_a_name_would_be_seen(verdicts):
    assert "NameError" in verdicts["broken"]


@pytest.mark.parametrize("name", EXPORTS)
def test_every_export_works_alone(verdicts, name):
    """Its own example gives what its docstring says."""
    assert isinstance(verdicts[name], int), verdicts[name]


def test_examples_were_run(verdicts):
    assert sum(verdicts[name] > 0 for name in EXPORTS) > 0.9 * len(EXPORTS)


def test_a_vendored_loss_passes_the_vendored_rules(tmp_path):
    """The commands of the documentation; the loss and what checks it know nothing of each other."""
    for names, file in (
        (["causal_lm_loss", "reducers.sample_sums"], "mine"),
        (["lossfns.testing.check_loss"], "rules"),
    ):
        (tmp_path / f"{file}.py").write_text(vendor(names), encoding="utf-8")
    script = """
import json, sys
sys.path[:0] = [*json.loads(sys.argv[1]), sys.argv[2]]
import torch
from mine import causal_lm_loss, sample_sums
from rules import check_loss
print(check_loss(causal_lm_loss, "causal_lm"))
def mean_loss(outputs, labels, num_items_in_batch=None):
    return causal_lm_loss(outputs, labels)
try:
    check_loss(mean_loss, "causal_lm")
except AssertionError as error:
    print(error)
print(sample_sums(torch.zeros(1, 3, 4), torch.tensor([[0, 0, 2]]), shift=1)["tokens"].tolist())
assert not {"lossfns", "reducers", "metrics"} & sys.modules.keys()
"""
    printed = alone(script, str(tmp_path))
    assert "mean_loss breaks the rule `count_given`" in printed
    assert printed.rstrip().endswith("[2.0]")


def test_all_of_a_package_fits_one_file():
    """Names that mean different things in different modules are told apart."""
    text = vendor([f"metrics.{name}" for name in metrics.__all__])
    tree = ast.parse(text)
    defined = [name for node in tree.body if not isinstance(node, ast.Expr) for name in _sources.bound(node)]
    assert len(set(defined)) == len(defined)
    assert "DIRECTIONS_of_language" in defined
    assert "find_of_keys" in defined


def test_the_header_says_where_it_comes_from():
    first, second, future, *_ = vendor(["cross_entropy"]).splitlines()
    assert first == f"# SPDX-License-Identifier: Apache-2.0, from lossfns {importlib.metadata.version('lossfns')}:"
    assert second == "# python -m lossfns.recipes vendor cross_entropy"
    assert future == "from __future__ import annotations"


def test_only_what_is_needed():
    text = vendor(["cross_entropy"])
    assert [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)] == ["cross_entropy"]
    assert "import inspect" not in text


@pytest.mark.parametrize("names", [["causal_lm_loss", "reducers.sample_sums"], ["metrics.by_group"], ["hidden_states"]])
def test_imports_are_sorted_and_every_name_is_known(tmp_path, names):
    (tmp_path / "mine.py").write_text(vendor(names), encoding="utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", "--select=F,I", str(tmp_path)]
    done = subprocess.run(ruff, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["causal_lm_los", "reducers.sample_sum", "numpy.array", "lossfns.testing"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ValueError, match="did you mean"):
        vendor([name])


def made(monkeypatch, **modules):
    """Modules of this project that consist of these lines only."""
    parsed = {}
    for name, text in modules.items():
        parsed[f"lossfns.{name}"] = _sources.parse(f"lossfns.{name}", text.encode(), "lossfns")
    monkeypatch.setattr(_sources, "read", parsed.__getitem__)
    monkeypatch.setattr("lossfns.recipes._vendor.read", parsed.__getitem__)


def run(text):
    scope = {"__name__": "vendored"}
    exec(text, scope)
    return scope


def test_locals_keep_their_names(monkeypatch):
    """A parameter, a comprehension and a class body may be called like something at the top of a module."""
    made(
        monkeypatch,
        one="""
from ._two import size as other
size = 3
class Box:
    size = 5
    def get(self, other=size): return [size for size in (1, 2)], other, size
def wanted(size): return size, other(), (lambda other: other)(7), Box().get(), Box.size, inner()
def inner(): return size
""",
        _two="def size(): return 2\n",
    )
    text = vendor(["lossfns.one.wanted"])
    assert run(text)["wanted"](9) == (9, 2, 7, ([1, 2], 5, 3), 5, 3)
    assert "size_of_two" in text
    assert "size_of_one" in text


def test_an_import_inside_a_function_becomes_the_files_own(monkeypatch):
    """Also where two modules know each other, one of them for types only."""
    made(
        monkeypatch,
        one="def wanted():\n    import math\n    from .two import f as g\n    return g(), math.floor(1.5)\n",
        two="if TYPE_CHECKING:\n    from .one import wanted\ndef f(x: wanted = 3): return x\n",
    )
    text = vendor(["lossfns.one.wanted"])
    assert run(text)["wanted"]() == (3, 1)
    assert "from .two" not in text


def test_a_name_of_the_language_is_not_taken(monkeypatch):
    made(
        monkeypatch,
        one="from .two import shorter\ndef wanted(): return shorter([1, 2]), len([3])\n",
        two="def len(x): return 0\ndef shorter(x): return len(x)\n",
    )
    assert run(vendor(["lossfns.one.wanted"]))["wanted"]() == (0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def wanted(): return nowhere\n", "nowhere is bound in a way"),
        ("import json as np\nfrom .two import f\ndef wanted(): return np, f()\n", "vendor them apart"),
    ],
)
def test_what_cannot_be_followed_is_refused(monkeypatch, text, message):
    made(monkeypatch, one=text, two="import numpy as np\ndef f(): return np\n")
    with pytest.raises(ValueError, match=message):
        vendor(["lossfns.one.wanted"])


def test_two_wanted_names_that_are_equal_are_refused(monkeypatch):
    made(monkeypatch, one="def f(): return 1\n", two="def f(): return 2\n")
    with pytest.raises(ValueError, match="share a name"):
        vendor(["lossfns.one.f", "lossfns.two.f"])


def test_command(capsys):
    main(["vendor", "lossfns.collators.mask_first_label"])
    assert capsys.readouterr().out == vendor(["lossfns.collators.mask_first_label"])
    with pytest.raises(SystemExit):
        main(["vendor", "nothing"])
    assert "there is no 'nothing'" in capsys.readouterr().err
