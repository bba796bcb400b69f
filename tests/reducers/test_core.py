"""What all reducers share: forms of logits and labels, padding, pickling, errors."""

import pickle
from functools import partial

import pytest
import torch

from reducers import (
    answer_logits,
    argmax,
    calibration_bins,
    label_rank,
    sample_sums,
    text_lengths,
    token_log_probs,
    top_k,
)

from .inputs import LABELS as FEW
from .inputs import N
from .inputs import normal as normal64
from .test_tokens import LABELS, B, S, V, normal, tied

REDUCERS = {
    "argmax": argmax,
    "top_k": partial(top_k, k=2),
    "token_log_probs": token_log_probs,
    "sample_sums": partial(sample_sums, top_k=(1, 2), entropy=True),
}
every = pytest.mark.parametrize("reducer", REDUCERS.values(), ids=REDUCERS)


def as_list(reduced):
    return {name: value.tolist() for name, value in reduced.items()} if isinstance(reduced, dict) else reduced.tolist()


def inputs(logits):
    """What the Trainer hands over for models of several kinds."""
    return {
        "bare": logits,
        "tuple": (logits, torch.randn(B, S, 4)),
        "list": [logits],
        "Mixtral: a 0-d loss, then gates": (torch.tensor(0.1), logits, (torch.randn(B * S, 4), torch.randn(B * S, 4))),
        "T5: logits, then the encoder": (logits, torch.randn(B, S + 3, 8)),
        "a cache first": ((torch.randn(B, 2, S, 4), torch.randn(B, 2, S, 4)), logits),
        "dict": {"aux_loss": torch.tensor(0.1), "logits": logits},
    }


@every
@pytest.mark.parametrize("form", inputs(normal(B, S, V)))
@pytest.mark.parametrize("labels", [LABELS, {"labels": LABELS, "token_weights": torch.ones(B, S)}], ids=["ids", "dict"])
def test_every_form_of_logits_and_labels(reducer, form, labels):
    logits = normal(B, S, V)
    assert as_list(reducer(inputs(logits)[form], labels, shift=1)) == as_list(reducer(logits, LABELS, shift=1))


@every
def test_the_choice_can_be_made_by_hand(reducer):
    first, second = normal(B, S, V), tied(B, S, V)
    found = reducer((first, second), LABELS, shift=1, select=lambda logits: logits[1])
    assert as_list(found) == as_list(reducer(second, LABELS, shift=1))


@every
def test_a_shift_must_be_said(reducer):
    with pytest.raises(ValueError, match=r"shape \(3, 6, 13\) need a shift: say shift=1 \(causal.*shift=0 \(masked"):
        reducer(normal(B, S, V), LABELS)


@every
@pytest.mark.parametrize("train", [False, True])
def test_inputs_are_left_alone_and_nothing_keeps_a_graph(reducer, train):
    logits, labels = normal(B, S, V, dtype=torch.bfloat16).requires_grad_(train), LABELS.clone()
    before = logits.detach().clone()
    reduced = reducer(logits, labels, shift=1)
    assert logits.equal(before)
    assert labels.equal(LABELS)
    for value in reduced.values() if isinstance(reduced, dict) else [reduced]:
        assert not value.requires_grad
        assert value.device == logits.device
        assert value.shape[0] == B
        assert value.dtype in (torch.int32, torch.int64, torch.float32, torch.float64)


@every
def test_padding_across_ranks_changes_nothing(reducer):
    """Rows and columns of -100, in logits and labels, as the Trainer's gather adds them."""
    logits, labels = normal(B, S, V), LABELS
    wide = torch.nn.functional.pad(logits, (0, 0, 0, 2, 0, 1), value=-100.0)
    wide_labels = torch.nn.functional.pad(labels, (0, 2, 0, 1), value=N)
    found, expected = (as_list(reducer(*given, shift=0)) for given in ((wide, wide_labels), (logits, labels)))
    if isinstance(expected, dict):
        assert {name: values[:B] for name, values in found.items()} == expected
        assert all(values[B] == 0 for name, values in found.items())
    else:
        valid = (labels != N).tolist()
        for i in range(B):
            for j in range(S):
                assert not valid[i][j] or found[i][j] == expected[i][j]


@every
def test_empty_batches(reducer):
    reduced = reducer(torch.zeros(0, S, V), torch.zeros(0, S, dtype=torch.long), shift=1)
    for value in reduced.values() if isinstance(reduced, dict) else [reduced]:
        assert value.shape[0] == 0


@every
def test_reducers_are_picklable(reducer):
    bound = partial(reducer, shift=1)
    copy = pickle.loads(pickle.dumps(bound))
    assert as_list(copy(normal(B, S, V), LABELS)) == as_list(bound(normal(B, S, V), LABELS))


@pytest.mark.parametrize("name", ["token_log_probs", "sample_sums"])
def test_scoring_needs_labels(name):
    with pytest.raises(ValueError, match=f"{name} scores labels, but the batch has none.*argmax and top_k need none"):
        REDUCERS[name](normal(B, S, V), None, shift=1)


@every
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": LABELS}, TypeError, "expected logits, got torch.int64.*these are ids"),
        ({"logits": (LABELS, LABELS)}, ValueError, r"no logits among the outputs \[\(3, 6\), \(3, 6\)\]"),
        ({"logits": ()}, ValueError, "a model that returns a plain tuple loses its first entry|plain tuple"),
        ({"logits": None}, TypeError, "not NoneType"),
        ({"logits": {"loss": torch.zeros(())}}, ValueError, "returned no logits"),
        ({"logits": normal(B, S - 1, V)}, ValueError, "logits cover 5 positions, labels 6.*keep_supervised_logits"),
        ({"logits": normal(B + 1, S, V)}, ValueError, "do not fit"),
        ({"labels": (LABELS, LABELS)}, TypeError, r"labels are a tuple;.*label_names=\['labels'\]"),
        ({"labels": LABELS.flatten(), "shift": 1}, ValueError, "shift=1 needs labels of shape|do not fit"),
        ({"shift": -1}, ValueError, "shift must be an int >= 0"),
    ],
    ids=["ids", "only ids", "nothing", "None", "no logits", "too short", "rows", "tuple", "flat", "shift"],
)
def test_bad_input(reducer, change, error, message, monkeypatch):
    monkeypatch.setattr("lossfns._core.block.read", None)
    given = {"logits": normal(B, S, V), "labels": LABELS, "shift": 1} | change
    with pytest.raises(error, match=message):
        reducer(given.pop("logits"), given.pop("labels"), **given)


@pytest.mark.parametrize("name", ["token_log_probs", "sample_sums"])
def test_labels_out_of_range(name, monkeypatch):
    monkeypatch.setattr("lossfns._core.block.read", None)
    with pytest.raises(ValueError, match=r"label 13 is out of range: .*13 classes"):
        REDUCERS[name](normal(B, S, V), torch.full((B, S), V), shift=1)


@pytest.mark.parametrize(
    "reducer",
    [
        partial(label_rank, shift=1),
        partial(answer_logits, token_ids=[1, 2], shift=1),
        partial(calibration_bins, shift=1),
        partial(text_lengths, lengths={"bytes": torch.ones(11)}, shift=1),
    ],
)
def test_inputs_stay_as_they_are_and_empty_batches_pass(reducer):
    logits, labels = normal64(3, 5, 11), FEW.clone()
    before = logits.clone()
    reducer(logits, labels)
    assert torch.equal(logits, before)
    assert torch.equal(labels, FEW)
    assert all(value.shape[0] == 0 for value in reducer(logits[:0], labels[:0]).values())
