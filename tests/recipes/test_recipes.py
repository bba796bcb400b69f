"""Every recipe is a complete short script, runs offline on its built-in data and reaches what it says."""

import ast
import importlib
import math

import pytest

from lossfns.recipes.__main__ import main, recipes

NAMES = sorted(recipes())
# Small sizes for each; all other options are the recipe's own.
COMMON = ["--save_strategy=no", "--dataloader_pin_memory=false", "--use_cpu=true", "--seed=1"]
SMALL = {
    "bloom_lora": "--max_steps 2 --samples 64 --per_device_train_batch_size 1 --per_device_eval_batch_size 1",
    "completion_only": "--max_steps 10 --samples 160",
    "distillation": "--max_steps 10 --samples 60",
    "dpo": "--max_steps 8 --samples 64",
    "early_stopping": "--num_train_epochs 9 --samples 40 --learning_rate 0.02 --save_strategy epoch",
    "question_answering": "--max_steps 4 --samples 48",
    "sliced_evaluation": "--max_steps 6 --samples 120",
    "text_classification": "--max_steps 4 --samples 100 --per_device_train_batch_size 1 --per_device_eval_batch_size 2",
    "token_classification": "--max_steps 20 --samples 300",
    "tuned_thresholds": "--max_steps 30",
}


def run(name, folder, *more):
    module = importlib.import_module(f"lossfns.recipes.{name}")
    return module.main([*COMMON, *SMALL[name].split(), "--output_dir", str(folder), *more])


@pytest.fixture(scope="module")
def reached(tmp_path_factory):
    """What a recipe returns, each run once."""
    kept = {}

    def ask(name):
        if name not in kept:
            kept[name] = run(name, tmp_path_factory.mktemp(name))
        return kept[name]

    return ask


@pytest.mark.parametrize("name", NAMES)
def test_runs_offline_and_reaches_something(reached, name, capsys):
    reached(name)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert any(character.isdigit() for character in last), "it ends with what it reached"
