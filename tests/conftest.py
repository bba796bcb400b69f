"""Settings for every test: no network, one thread, the same cases every time, and each its own environment."""

import os

# Before torch and transformers are imported. One thread: the models are tiny, and tests share two cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _environment_restored():
    """`TrainingArguments(bf16=True)` sets variables that every later Trainer of the process would read."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
