"""The vendored packages work where this project is not installed, and next to it."""

import importlib
import json
import pickle
import re
import subprocess
import sys
import sysconfig

import pytest
import torch

import lossfns
import metrics
import reducers
from lossfns.recipes import _vendor
from lossfns.recipes.__main__ import main
from lossfns.recipes._vendor import PACKAGES, vendor

PROJECT = (lossfns, reducers, metrics)

TRAIN = """
import torch
from functools import partial
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator
from mylib._vendor.lossfns import causal_lm_loss
from mylib._vendor.metrics import language_modeling
from mylib._vendor.reducers import sample_sums

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
)
before = model.lm_head.weight.detach().clone()
rows = [{"input_ids": row, "labels": row} for row in torch.arange(40).view(4, 10).tolist()]
settings = {"use_cpu": True, "max_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
trainer = Trainer(
    model,
    TrainingArguments(sys.argv[2], **settings),
    data_collator=default_data_collator,
    train_dataset=rows,
    eval_dataset=rows,
    compute_loss_func=causal_lm_loss,
    preprocess_logits_for_metrics=partial(sample_sums, shift=1),
    compute_metrics=language_modeling(),
)
trainer.train()
moved = float((model.lm_head.weight - before).abs().max())
scores = trainer.evaluate()
with torch.no_grad():
    logits = model(torch.arange(40).view(4, 10)).logits.double()
nll = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.arange(40).view(4, 10)[:, 1:].flatten())
found = {name: scores[f"eval_{name}"] for name in ("nll_loss", "tokens")}
found |= {"moved": moved, "expected": float(nll)}
"""

EXAMPLES = """
import contextlib, doctest, importlib, io, pkgutil
import mylib._vendor as vendored

said, attempted = io.StringIO(), 0
for module in pkgutil.walk_packages(vendored.__path__, "mylib._vendor."):
    if not module.name.endswith("__main__"):
        with contextlib.redirect_stdout(said):
            flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
            attempted += doctest.testmod(importlib.import_module(module.name), optionflags=flags).attempted
print(json.dumps(found | {"attempted": attempted, "failures": said.getvalue()}))
"""


def run(script, folder):
    """Return the JSON that a script prints last, in a process that imports from the libraries and `folder` only.

    `-S` leaves out the `.pth` files of site-packages, and with them an editable install of this project.
    """
    paths = json.dumps([str(folder), *(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib"))])
    preamble = "import importlib.util, json, sys\nsys.path[:0] = json.loads(sys.argv[1])\n"
    preamble += f"assert not any(map(importlib.util.find_spec, {PACKAGES}))\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", preamble + script, paths, str(folder / "output")],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vendored")
    vendor(folder / "mylib" / "_vendor")
    return folder


def test_no_absolute_import_between_the_packages_remains(folder):
    names = "|".join(PACKAGES)
    pattern = re.compile(
        rf"^\s*(?:(?:>>>|\.\.\.) )?(?:from (?:{names})[. ].*import|import [\w ,.]*\b(?:{names})\b).*", re.MULTILINE
    )
    remaining = [line for path in folder.rglob("*.py") for line in pattern.findall(path.read_text(encoding="utf-8"))]
    assert not remaining, "write `from package import name` or `import package`, each on a line of its own"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from lossfns import focal", "from ..lossfns import focal"),
        ("    from lossfns._core.rows import (", "    from ..lossfns._core.rows import ("),
        ("    >>> from metrics import build", "    >>> from ..metrics import build"),
        ("    import reducers", "    from .. import reducers"),
        ("import metrics as scores", "from .. import metrics as scores"),
        ("from .sums import sample_sums", "from .sums import sample_sums"),
        ("from lossfnsx import a", "from lossfnsx import a"),
        ('raise ValueError("wrap it in lossfns.collators")', 'raise ValueError("wrap it in lossfns.collators")'),
    ],
)
def test_imports_are_rewritten_and_other_text_is_kept(tmp_path, monkeypatch, line, expected):
    monkeypatch.setattr(_vendor, "ROOT", tmp_path / "source")
    for package in PACKAGES:
        (tmp_path / "source" / package).mkdir(parents=True)
    (tmp_path / "source" / "reducers" / "sums.py").write_text(f"{line}\n", encoding="utf-8")
    vendor(tmp_path / "mine")
    assert (tmp_path / "mine" / "reducers" / "sums.py").read_text(encoding="utf-8") == f"{expected}\n"


@pytest.mark.slow
def test_trains_a_step_and_runs_every_example_where_the_project_is_not_installed(folder):
    found = run(TRAIN + EXAMPLES, folder)
    assert found["moved"] > 0
    assert found["tokens"] == 36
    assert found["nll_loss"] == pytest.approx(found["expected"], rel=1e-5)
    assert found["failures"] == ""
    assert found["attempted"] > 200


def test_works_next_to_the_installed_project(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    copies = {package: importlib.import_module(f"mylib._vendor.{package.__name__}") for package in PROJECT}
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    expected = lossfns.causal_lm_loss({"logits": logits}, labels)
    assert torch.equal(copies[lossfns].causal_lm_loss({"logits": logits}, labels), expected)
    for package, name in ((lossfns, "focal"), (lossfns, "Combined"), (reducers, "argmax"), (metrics, "build")):
        original, copy = getattr(package, name), getattr(copies[package], name)
        assert copy is not original
        assert copy.__module__ == f"mylib._vendor.{original.__module__}"
        assert pickle.loads(pickle.dumps([copy, original])) == [copy, original]


def test_types_and_license_go_along_and_recipes_do_not(folder):
    copy = folder / "mylib" / "_vendor"
    for package in PACKAGES:
        assert (copy / package / "py.typed").is_file()
        assert "Apache License" in (copy / package / "LICENSE").read_text(encoding="utf-8")
        header = (copy / package / "__init__.py").read_text(encoding="utf-8").splitlines()[:2]
        assert header[0] == "# SPDX-License-Identifier: Apache-2.0"
        assert re.match(r"# Copied from lossfns \d", header[1])
    assert not (copy / "lossfns" / "recipes").exists()


def test_a_second_copy_of_the_same_version_changes_nothing(tmp_path):
    (tmp_path / "__init__.py").write_text("NAME = 1\n", encoding="utf-8")
    vendor(tmp_path)
    vendor(tmp_path)
    assert (tmp_path / "__init__.py").read_text(encoding="utf-8") == "NAME = 1\n"


@pytest.mark.parametrize("change", ["edited", "added", "removed"])
def test_a_different_copy_is_refused_and_kept(tmp_path, change):
    vendor(tmp_path)
    file = tmp_path / "reducers" / ("mine.py" if change == "added" else "sums.py")
    file.unlink() if change == "removed" else file.write_text("NAME = 1\n", encoding="utf-8")
    with pytest.raises(FileExistsError, match=rf"reducers exists and reducers.{file.name} in it differs"):
        vendor(tmp_path)
    assert file.exists() == (change != "removed")
    assert change == "removed" or file.read_text(encoding="utf-8") == "NAME = 1\n"


def test_command(tmp_path, capsys):
    main(["vendor", str(tmp_path / "mine")])
    assert capsys.readouterr().out == f"wrote lossfns, reducers, metrics to {tmp_path / 'mine'}\n"
    assert (tmp_path / "mine" / "lossfns" / "__init__.py").is_file()
    for name in ("my-lib", "class", "3d"):
        with pytest.raises(SystemExit):
            main(["vendor", str(tmp_path / name)])
        assert f"must be a Python identifier so that it can be imported, got '{name}'" in capsys.readouterr().err
        assert not (tmp_path / name).exists()
