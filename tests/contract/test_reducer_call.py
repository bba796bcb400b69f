"""How `preprocess_logits_for_metrics` is called and what it may return (items 18 to 22)."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers

from tests import tiny
from tests.contract.probes import LossSpy, MetricSpy, ReducerSpy, anything, shapes

ROWS = sorted(tiny.lm_rows(10), key=lambda row: len(row["input_ids"]))  # batches of 4, 4 and 2, each wider
UNLABELLED = [{name: value for name, value in row.items() if name != "labels"} for row in ROWS]
WIDTH = len(ROWS[-1]["input_ids"])


def evaluate(reducer, name="gpt2", rows=ROWS, *, metric=None, collator=tiny.pad, model=None, **arguments):
    """What a metric gets when `reducer` stands in an evaluation of `rows` in batches of four."""
    metric = metric or MetricSpy()
    settings = {"reducer": reducer, "metric": metric, "eval_rows": rows, "collator": collator} | arguments
    tiny.trainer(model or tiny.model(name), None, anything, per_device_eval_batch_size=4, **settings).evaluate()
    return metric.calls[-1] if metric.calls else None


@pytest.mark.parametrize("bf16", [False, True])
def test_18_gradients_are_enabled_on_detached_tensors_outside_autocast(bf16):
    """A reducer that does arithmetic must switch gradients off itself, or it builds a graph."""
    seen = []

    def reducer(logits, labels):
        seen.append((torch.is_grad_enabled(), logits.requires_grad, torch.is_autocast_enabled("cpu")))
        return labels

    evaluate(reducer, model=tiny.model("gpt2", dtype=torch.float32), bf16=bf16)
    assert seen == [(True, False, False)] * 3


@pytest.mark.parametrize(
    ("entry", "metric", "calls"),
    [("evaluate", None, 0), ("evaluate", MetricSpy(), 3), ("predict", None, 3), ("predict", MetricSpy(), 3)],
)
def test_18_when_it_is_called(entry, metric, calls):
    """Once a batch; `evaluate` without a metric never does, so sums of ours cannot be read there."""
    reducer = ReducerSpy()
    trainer = tiny.trainer(
        tiny.model("gpt2"), None, reducer=reducer, metric=metric, eval_rows=ROWS, per_device_eval_batch_size=4
    )
    getattr(trainer, entry)(ROWS)
    assert len(reducer.calls) == calls


def in_a_dict(rows):
    batch = tiny.pad(rows)
    return batch | {"labels": {"labels": batch["labels"], "margin": batch["labels"][:, 0]}}


@pytest.mark.parametrize(
    ("name", "rows", "collator", "kind"),
    [
        pytest.param("gpt2", UNLABELLED, tiny.pad, type(None), id="no labels"),
        pytest.param("gpt2", ROWS, tiny.pad, torch.Tensor, id="labels"),
        pytest.param("gpt2", ROWS, in_a_dict, dict, id="dict"),
        pytest.param("bert_qa", tiny.qa_rows(10), tiny.pad, tuple, id="start and end"),
    ],
)
def test_18_forms_of_the_labels(name, rows, collator, kind):
    """Reducers that need no label must work on an unlabelled set, the others say what they miss."""
    reducer = ReducerSpy()
    tiny.trainer(tiny.model(name), None, anything, reducer=reducer, collator=collator).predict(rows)
    assert {type(labels) for _, labels in reducer.calls} == {kind}


LOGITS, STATES = (8, WIDTH, tiny.VOCAB), (8, WIDTH, tiny.HIDDEN)
ROUTED = [(), LOGITS, [(8 * WIDTH, 4)] * 2]


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        pytest.param("llama", {}, LOGITS, id="causal"),
        pytest.param("llama", {"output_hidden_states": True}, [LOGITS, [STATES] * 3], id="with hidden states"),
        pytest.param("mixtral", {"output_router_logits": True}, ROUTED, id="with router logits"),
        pytest.param("t5", {}, [LOGITS, STATES], id="T5"),
        pytest.param("bart", {}, [LOGITS, STATES], id="BART"),
        pytest.param("bert_qa", {}, [(8, WIDTH), (8, WIDTH)], id="start and end"),
    ],
)
def test_19_logits_need_not_come_first(name, config, expected):
    """The reducers take the first floating tensor that fits the labels and step over scalars and nested tuples."""
    rows = tiny.qa_rows(10) if name == "bert_qa" else tiny.lm_rows(10)
    rows = sorted(rows, key=lambda row: len(row["input_ids"]))[2:]
    collator = tiny.pad_seq2seq if name in ("t5", "bart") else tiny.pad
    reducer = ReducerSpy()
    model = tiny.model(name, **config)
    tiny.trainer(model, None, anything, reducer=reducer, collator=collator).predict(rows)
    assert shapes(reducer.calls[0][0]) == expected


@pytest.fixture(scope="module")
def generated():
    """A generating evaluation of T5: its loss, reducer and metric after one `evaluate`."""
    loss, reducer, metric = LossSpy(), ReducerSpy(lambda ids, labels: ids), MetricSpy()
    hooks = {"reducer": reducer, "metric": metric, "eval_rows": ROWS, "collator": tiny.pad_seq2seq}
    classes = {"trainer_class": transformers.Seq2SeqTrainer, "arguments_class": transformers.Seq2SeqTrainingArguments}
    settings = {"predict_with_generate": True, "generation_max_length": 20, "per_device_eval_batch_size": 4}
    tiny.trainer(tiny.model("t5"), None, loss, **hooks, **classes, **settings).evaluate()
    return loss, reducer, metric


def test_19_generation_hands_over_token_ids(generated):
    """There are no logits then: a reducer that finds integers says so."""
    _, reducer, _ = generated
    assert {logits.dtype for logits, _ in reducer.calls} == {torch.int64}


def test_27_generation_pads_labels_with_both_values(generated):
    """-100 from the collator and the pad token from the Trainer: a text metric has to drop both."""
    _, _, metric = generated
    assert {tiny.IGNORED, tiny.PAD} < set(metric.calls[0].label_ids.ravel().tolist())


def test_28_generation_never_calls_the_loss(generated):
    """Its eval_loss is the model's own; the sums of a reducer are the only true loss there."""
    loss, _, _ = generated
    assert loss.calls == []


def ids(logits, labels):
    return logits.argmax(-1).masked_fill(labels == tiny.IGNORED, tiny.IGNORED)


def count(logits, labels):
    return (labels != tiny.IGNORED).sum(1)


def best(logits, labels):
    return logits.topk(3).indices


def expected_rows(function):
    """The result of `function` row by row, without any padding."""
    model = tiny.model("gpt2").eval()
    with torch.no_grad():
        return [function(model(row["input_ids"][None]).logits, row["labels"][None])[0].tolist() for row in ROWS]


@pytest.mark.parametrize(("function", "shape"), [(count, (10,)), (ids, (10, WIDTH)), (best, (10, WIDTH, 3))])
@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda x: (-x, x), lambda found: found[1]),
        (lambda x: {"a": {"b": x}, "c": x}, lambda found: found["a"]["b"]),
    ],
    ids=["tuple", "dict"],
)
def test_20_batch_first_tensors_arrive_whole(function, shape, pack, unpack):
    """Shapes (B,), (B, T), (B, T, k), alone, in tuples and in dicts: all that the reducers return."""
    found = unpack(evaluate(lambda logits, labels: pack(function(logits, labels))).predictions)
    assert found.shape == shape
    for row, values in zip(found, expected_rows(function), strict=True):
        assert row[tuple(slice(size) for size in np.shape(values))].tolist() == values


PADDING = {torch.bool: True, torch.uint8: 156}
PADDING |= dict.fromkeys((torch.float32, torch.float64, torch.int32, torch.int64), -100)


@pytest.mark.parametrize(("dtype", "padding"), PADDING.items(), ids=str)
def test_21_padding_by_dtype(dtype, padding):
    """-100 becomes a true value in bool and 156 in uint8: reducers return int32, int64, float32 and float64 alone."""
    found = evaluate(lambda logits, labels: torch.zeros(labels.shape, dtype=dtype)).predictions
    first = len(ROWS[3]["labels"])
    assert (found[:4, :first] == 0).all()
    assert set(found[:4, first:].ravel().tolist()) == {padding}


def test_20_flattened_outputs_lose_rows():
    """A value a token is cut to as many as the last batch has rows, in silence: outputs are batch first."""
    found = evaluate(lambda logits, labels: labels[labels != tiny.IGNORED]).predictions
    last = tiny.count(ROWS[8:])
    assert last > 2
    assert len(found) == tiny.count(ROWS) - last + 2


def test_20_only_the_second_dimension_may_vary():
    """Nothing pads the others from batch to batch: they are constant in what the reducers return."""
    with pytest.raises(RuntimeError, match="except in dimension 0"):
        evaluate(lambda logits, labels: labels[:, None])


def test_20_named_tuples_fail():
    """A NamedTuple is rebuilt as if it were a tuple, so several results are returned in a dict."""

    class Sums(NamedTuple):
        nll: torch.Tensor
        tokens: torch.Tensor

    with pytest.raises(TypeError, match="tokens"):
        evaluate(lambda logits, labels: Sums(count(logits, labels), count(logits, labels)))


def test_20_none_makes_metrics_vanish():
    """Nothing says that the metric was not called, so a reducer never returns None."""
    assert evaluate(lambda logits, labels: None) is None


def test_20_writing_to_the_labels_changes_label_ids():
    """They are the tensors that the metric gets: inputs of a reducer are never written to."""
    found = evaluate(lambda logits, labels: labels.fill_(7)[:, 0])
    assert (found.label_ids[-1] == 7).all()


def test_22_bf16_logits_stay_bf16():
    """The arithmetic of a reducer starts from what the model made: it has to upcast itself."""
    reducer = ReducerSpy()
    evaluate(reducer, model=tiny.model("gpt2", dtype=torch.bfloat16))
    assert {logits.dtype for logits, _ in reducer.calls} == {torch.bfloat16}
