"""The package as a whole: no need for torch, the other packages, a network or a home directory."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def imported(code: str) -> set[str]:
    """The top-level modules of a fresh process after `code`."""
    script = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_metrics_import_and_compute_without_torch_and_transformers():
    code = (
        "import numpy as np, types, metrics\n"
        "sums = dict.fromkeys(('nll', 'tokens', 'correct', 'all_correct'), np.ones(3))\n"
        "call = types.SimpleNamespace(predictions=sums, label_ids=np.zeros(3))\n"
        "assert metrics.language_modeling()(call)['tokens'] == 3\n"
        "assert metrics.best_model_kwargs('perplexity')"
    )
    assert not imported(code) & {"torch", "transformers", "lossfns", "reducers", "matplotlib"}


UNPLUGGED = """
import pathlib, socket, sys, urllib.request

def refuse(*arguments, **options):
    raise AssertionError("the network was asked")

socket.socket.connect = socket.getaddrinfo = refuse
"""
EVERYTHING = """
from types import SimpleNamespace
import numpy as np
import metrics
from metrics import plots
from tests.registry import METRICS
from tests.metrics.test_in_trainer import language

folder = pathlib.Path(sys.argv[1])
for entry in METRICS:
    entry.function(SimpleNamespace(predictions=entry.options["predictions"], label_ids=entry.options["labels"]))
plots.group_bars({"f1/a": 0.5}, "f1").savefig(folder / "picture.png")
metrics.to_evaluate(metrics.classification(2), kind="ids").compute(predictions=[1, 1], references=[1, 0])
assert language().evaluate()["eval_perplexity"] > 1
"""
DOWNLOADS = "urllib.request.urlopen('http://localhost')"
WRITES = "pathlib.Path.home().joinpath('.cache').mkdir()"


def run(code, folder):
    """A process whose home is a file: not even the superuser can make a folder in it."""
    home = folder / "home"
    home.touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment = kept | {"HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", UNPLUGGED + code, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)


def test_every_metric_works_without_network_and_home(tmp_path):
    done = run(EVERYTHING, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_use_of_network_or_home_directory_would_be_detected(tmp_path):
    assert "the network was asked" in run(DOWNLOADS, tmp_path).stderr
    assert "NotADirectoryError" in run(WRITES, tmp_path).stderr
