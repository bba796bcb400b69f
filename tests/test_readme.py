"""Every code block of the README runs, and what its commands promise is in the Makefile."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import lossfns
import metrics
import reducers
from benchmarks import harness, readme
from lossfns import collators
from tests import tiny

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def namespace():
    """What a reader has before the first line: a model, data, a collator and arguments."""
    rows = tiny.lm_rows(6)
    return {
        "model": tiny.model("llama"),
        "teacher": tiny.model("llama", seed=1).eval(),
        "seq2seq_model": tiny.model("t5"),
        "tokenizer": SimpleNamespace(
            get_vocab=lambda: {"\u0120a": 4, "b": 5},
            all_special_ids=[],
            batch_decode=lambda rows, **_: ["ab" for _ in rows],
        ),
        "args": tiny.arguments(max_steps=1, learning_rate=0.01),
        "train_dataset": rows,
        "eval_dataset": rows,
        "data_collator": tiny.pad,
        "classifier": tiny.trainer(tiny.model("bert_cls").eval()),
        "reviews": tiny.class_rows(12, seed=1),
        "groups": ["films", "products"] * 6,
    }


def test_python_blocks_run_in_order(namespace, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the first block names a folder for its checkpoints
    blocks = [body for language, body in BLOCKS if language == "python"]
    assert len(blocks) >= 6
    for body in blocks:
        exec(compile(body, str(README), "exec"), namespace)
        if body is blocks[0]:
            printed = capsys.readouterr().out
            assert printed.startswith("check_trainer: no problems")
            assert float(printed.split()[-1]) > 1, "the first block prints a perplexity"


def test_every_export_is_in_the_index():
    text = README.read_text(encoding="utf-8")
    exports = {name for package in (lossfns, reducers, metrics, collators) for name in package.__all__}
    assert {name for name in exports if not re.search(rf"\b{name}\b", text)} == set()


def test_the_table_of_choices_has_the_numbers_of_the_results():
    """Otherwise: `python -m benchmarks.readme`. Another number in a file would be another table."""
    text, results = README.read_text(encoding="utf-8"), harness.read_results(README.parent / "benchmarks" / "results")
    assert readme.updated(text, results) == text
    changed = [
        dataclasses.replace(
            result,
            rows=[row | {"released": 2 * row["released"]} if "Causal" in row["loss"] else row for row in result.rows],
        )
        if result.benchmark == "losses"
        else result
        for result in results
    ]
    assert readme.updated(text, changed) != text


def test_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):", (README.parent / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        target for language, body in BLOCKS if language == "bash" for target in re.findall(r"make ([a-z-]+)", body)
    }
    assert named, "the README shows its commands"
    assert named <= targets


def test_python_commands_run(tmp_path):
    shell = "\n".join(body for language, body in BLOCKS if language == "bash")
    commands = re.findall(r"^python (-m .*)$", shell, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        subprocess.run(
            f"{sys.executable} {command}",
            shell=True,
            check=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(README.parent)},
            stdout=subprocess.DEVNULL,
        )
    assert {path.name for path in tmp_path.iterdir()} == {"my_training.py", "mine.py"}
