"""Evaluation from hidden states: the same predictions and scores as from the logits, in every mode of the Trainer."""

from functools import partial

import numpy as np
import pytest
import torch

from lossfns import causal_lm_loss, hidden_states
from metrics import build, language_modeling
from reducers import argmax, combine, sample_sums, token_log_probs, top_k
from tests import tiny
from tests.lossfns.core.trained import lora

ROWS = sorted(tiny.lm_rows(9), key=lambda row: len(row["labels"]))  # batches of other lengths
REDUCERS = {
    "sample_sums": partial(sample_sums, shift=1, top_k=(2, 5), entropy=True),
    "argmax": partial(argmax, shift=1),
    "top_k": partial(top_k, shift=1, k=3),
    "token_log_probs": partial(token_log_probs, shift=1),
}


@pytest.fixture(scope="module", params=["cohere", "adapter"])
def make(request):
    if request.param == "adapter":
        return lambda: lora(tiny.model("llama"), "lm_head")
    return partial(tiny.model, request.param)


def trainer(model, reducer, metric=None, *, collator=tiny.pad, source=None, **arguments):
    options = {} if source is None else {"source": source}
    loss = partial(causal_lm_loss, **options)
    if isinstance(reducer, dict):
        reducer = combine(**{name: partial(each, **options) for name, each in reducer.items()})
    settings = {"per_device_eval_batch_size": 4} | arguments
    return tiny.trainer(
        model, None, loss, reducer=reducer, metric=metric, eval_rows=ROWS, collator=collator, **settings
    )


def assert_same(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    elif np.issubdtype(expected.dtype, np.integer):
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("collator", [tiny.pad, tiny.pad_left], ids=["right", "left"])
def test_every_reducer(make, collator):
    expected = trainer(make(), REDUCERS, collator=collator).predict(ROWS)
    model = make()
    found = trainer(model, REDUCERS, source=hidden_states(model), collator=collator).predict(ROWS)
    assert_same(found.predictions, expected.predictions)
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], abs=1e-6)


def unlabelled(rows):
    batch = tiny.pad(rows)
    del batch["labels"]
    return batch


def test_predictions_for_rows_without_labels(make):
    reducers = {name: REDUCERS[name] for name in ("argmax", "top_k")}
    expected = trainer(make(), reducers, collator=unlabelled).predict(ROWS)
    model = make()
    found = trainer(model, reducers, source=hidden_states(model), collator=unlabelled).predict(ROWS)
    assert_same(found.predictions, expected.predictions)


@pytest.mark.parametrize("streaming", [False, True], ids=["at once", "streaming"])
def test_scores(make, streaming):
    sums = {"sums": REDUCERS["sample_sums"]}

    def evaluate(model, **source):
        metric = build(language_modeling(), num_samples=len(ROWS))
        scores = trainer(model, sums, metric, batch_eval_metrics=streaming, **source).evaluate()
        return {name: value for name, value in scores.items() if not name.endswith(("time", "per_second"))}

    model = make()
    assert evaluate(model, source=hidden_states(model)) == pytest.approx(evaluate(make()), rel=1e-12)


def test_bfloat16_evaluation():
    """Log-probabilities as exact as those of bfloat16 logits, against float64."""
    weights = tiny.model("llama", dtype=torch.bfloat16)
    reducers = {"p": REDUCERS["token_log_probs"]}

    def log_probs(model, **source):
        return torch.tensor(trainer(model, reducers, **source).predict(ROWS).predictions["p"]).double()

    true = log_probs(tiny.model("llama", dtype=torch.bfloat16).double())
    usual = log_probs(weights)
    found = log_probs(weights, source=hidden_states(weights))
    assert (found - true).norm() <= (usual - true).norm() + 1e-6


def test_a_loss_from_logits_and_a_reducer_from_hidden_states_cannot_be_mixed_up():
    model = tiny.model("llama")
    source = hidden_states(model)
    mixed = tiny.trainer(model, None, causal_lm_loss, eval_rows=ROWS, reducer=partial(argmax, shift=1, source=source))
    with pytest.raises(ValueError, match="as source="):
        mixed.predict(ROWS)
