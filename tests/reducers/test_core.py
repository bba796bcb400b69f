"""What all reducers share: forms of logits and labels, hidden states, padding, pickling and errors."""

from functools import partial

import pytest
import torch

import reducers
from lossfns import hidden_states
from tests import tiny

from .inputs import LABELS, B, N, S, V, normal, tied

REDUCERS = {
    "argmax": reducers.argmax,
    "top_k": partial(reducers.top_k, k=2),
    "token_log_probs": reducers.token_log_probs,
    "sample_sums": partial(reducers.sample_sums, top_k=(1, 2), entropy=True),
    "label_rank": reducers.label_rank,
    "calibration_bins": reducers.calibration_bins,
    "confusion_counts": reducers.confusion_counts,
    "answer_logits": partial(reducers.answer_logits, token_ids=[9, 4]),
}
every = pytest.mark.parametrize("reducer", REDUCERS.values(), ids=REDUCERS)
LOGITS = normal(B, S, V, dtype=torch.float32)


def named(reduced):
    return reduced if isinstance(reduced, dict) else {"": reduced}


def assert_equal(found, expected):
    torch.testing.assert_close(named(found), named(expected), rtol=0, atol=0)


FORMS = {
    "bare": LOGITS,
    "tuple": (LOGITS, torch.randn(B, S, 4)),
    "list": [LOGITS],
    "Mixtral: a 0-d loss, then gates": (torch.tensor(0.1), LOGITS, (torch.randn(B * S, 4), torch.randn(B * S, 4))),
    "T5: logits, then the encoder": (LOGITS, torch.randn(B, S + 3, 8)),
    "a cache first": ((torch.randn(B, 2, S, 4), torch.randn(B, 2, S, 4)), LOGITS),
    "dict": {"aux_loss": torch.tensor(0.1), "logits": LOGITS},
}


@every
@pytest.mark.parametrize("logits", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("labels", [LABELS, {"labels": LABELS, "token_weights": torch.ones(B, S)}], ids=["ids", "dict"])
def test_every_form_of_logits_and_labels(reducer, logits, labels):
    assert_equal(reducer(logits, labels, shift=1), reducer(LOGITS, LABELS, shift=1))


@every
def test_select_overrides_the_choice_of_logits(reducer):
    found = reducer((LOGITS, tied(B, S, V)), LABELS, shift=1, select=lambda outputs: outputs[1])
    assert_equal(found, reducer(tied(B, S, V), LABELS, shift=1))


@every
def test_hidden_states_give_the_same_as_logits(reducer):
    model = tiny.model("llama").eval()
    ids = torch.arange(4, 16).view(2, 6)
    labels = ids.clone()
    labels[0, :3] = N
    with torch.no_grad():
        expected = reducer(model(input_ids=ids).logits, labels, shift=1)
        with hidden_states(model) as source:
            found = reducer(model(input_ids=ids).logits, labels, shift=1, source=source)
    torch.testing.assert_close(named(found), named(expected), rtol=1e-5, atol=0)


@every
def test_no_graph_is_kept(reducer):
    logits = LOGITS.bfloat16().requires_grad_()
    assert not any(value.requires_grad for value in named(reducer(logits, LABELS, shift=1)).values())


@pytest.mark.parametrize("name", sorted(REDUCERS.keys() - {"answer_logits"}))
def test_missing_shift(name):
    with pytest.raises(ValueError, match=r"shape \(4, 6, 13\) need a shift: pass shift=1 \(causal.*shift=0 \(masked"):
        REDUCERS[name](LOGITS, LABELS)


@pytest.mark.parametrize("name", sorted(REDUCERS.keys() - {"argmax", "top_k"}))
def test_missing_labels_and_labels_out_of_range(name, monkeypatch):
    monkeypatch.setattr("lossfns._core.block.read", None)
    with pytest.raises(ValueError, match=f"{name} scores labels, but the batch has none.*use argmax or top_k"):
        REDUCERS[name](LOGITS, None, shift=1)
    with pytest.raises(ValueError, match=r"label 13 is out of range: .*13 classes"):
        REDUCERS[name](LOGITS, torch.full((B, S), V), shift=1)


@every
@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (LABELS, LABELS, r"torch.int64.*ids \(predict_with_generate"),
        ((LABELS, LABELS), LABELS, r"no logits among the outputs \[\(4, 6\), \(4, 6\)\]"),
        ((), LABELS, "a model that returns a plain tuple loses its first entry|plain tuple"),
        (LOGITS[:, 1:], LABELS, "logits cover 5 positions, labels 6.*keep_supervised_logits"),
        (LOGITS, (LABELS, LABELS), r"got tuple: .*label_names=\['labels'\]"),
    ],
    ids=["ids", "only ids", "nothing", "too short", "tuple"],
)
def test_error_for_bad_input_names_the_remedy(reducer, logits, labels, message, monkeypatch):
    monkeypatch.setattr("lossfns._core.block.read", None)  # nothing waits for the device
    with pytest.raises((TypeError, ValueError), match=message):
        reducer(logits, labels, shift=1)
