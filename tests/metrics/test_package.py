import subprocess
import sys


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
    assert not imported(code) & {"torch", "transformers", "lossfns", "reducers"}


def test_an_import_of_torch_would_be_seen():
    assert "torch" in imported("import metrics, torch")
