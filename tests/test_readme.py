"""Every code block of the README runs, and what its commands promise is in the Makefile."""

import re
from pathlib import Path

import pytest

from tests import tiny

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def namespace():
    """What a reader has before the first line: a model, data, a collator and arguments."""
    rows = tiny.lm_rows(6)
    return {
        "model": tiny.model("llama"),
        "args": tiny.arguments(max_steps=1, learning_rate=0.01),
        "train_dataset": rows,
        "eval_dataset": rows,
        "data_collator": tiny.pad,
    }


def test_python_blocks_run_in_order(namespace, capsys):
    blocks = [body for language, body in BLOCKS if language == "python"]
    assert len(blocks) >= 6
    for body in blocks:
        exec(compile(body, str(README), "exec"), namespace)
    assert float(capsys.readouterr().out.split()[0]) > 1, "the first block prints a perplexity"


def test_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):", (README.parent / "Makefile").read_text(), re.MULTILINE))
    named = {target for language, body in BLOCKS if language == "bash" for target in re.findall(r"make ([a-z-]+)", body)}
    assert named, "the README shows its commands"
    assert named <= targets
