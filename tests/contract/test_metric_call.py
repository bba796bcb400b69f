"""How `compute_metrics` is called and what becomes of the numbers it returns (items 23 to 26)."""

import numpy as np
import pytest
import torch
from accelerate.state import GradientState

from tests import tiny
from tests.contract.probes import MetricSpy, ReducerSpy, anything, mean, since, summed

ROWS = sorted(tiny.lm_rows(10), key=lambda row: len(row["input_ids"]))  # batches of 4, 4 and 2, each wider
UNLABELLED = [{name: value for name, value in row.items() if name != "labels"} for row in ROWS]


def count(logits, labels):
    return (labels != tiny.IGNORED).sum(1)


def trainer(metric, *, model=None, loss=anything, reducer=count, **arguments):
    """A Trainer that evaluates ROWS in batches of four."""
    settings = {"eval_rows": ROWS, "per_device_eval_batch_size": 4} | arguments
    return tiny.trainer(model or tiny.model("gpt2"), None, loss, reducer=reducer, metric=metric, **settings)


def test_23_one_call_with_numpy_arrays():
    """The whole set at once, bf16 already as float32, and no `compute_result`: one callable has to serve both ways."""
    metric = MetricSpy()
    model = tiny.model("gpt2", dtype=torch.bfloat16)
    trainer(metric, model=model, reducer=lambda logits, labels: logits[..., 0]).evaluate()
    (call,) = metric.calls
    assert metric.flags == [None]
    assert (type(call.predictions), call.predictions.dtype) == (np.ndarray, np.float32)
    assert (type(call.label_ids), len(call.label_ids)) == (np.ndarray, 10)


class Anonymous(torch.nn.Module):
    """A model whose forward names none of its inputs."""

    def __init__(self):
        super().__init__()
        self.inner = tiny.model("gpt2")

    def forward(self, **batch):
        return self.inner(**batch, use_cache=False)


@pytest.mark.parametrize(
    ("build", "rows", "reducer"),
    [
        pytest.param(lambda: tiny.model("gpt2"), UNLABELLED, ReducerSpy(), id="no labels"),
        pytest.param(lambda: tiny.model("gpt2"), ROWS, lambda logits, labels: None, id="no predictions"),
        pytest.param(Anonymous, ROWS, ReducerSpy(), id="forward(**batch)"),
    ],
)
def test_23_when_it_is_not_called(build, rows, reducer):
    """Silently so without labels, without predictions and for a model without label names: `check_trainer` says it."""
    metric = MetricSpy()
    trainer(metric, model=build(), reducer=reducer, eval_rows=rows).evaluate()
    assert metric.calls == []


def test_23_label_names_cure_a_forward_without_names():
    """What to tell the user of such a model."""
    metric = MetricSpy()
    scores = trainer(metric, model=Anonymous(), label_names=["labels"]).evaluate()
    assert len(metric.calls) == 1
    assert "eval_loss" in scores


def test_23_lists_without_concatenation():
    """With `eval_do_concat_batches=False` predictions and labels are lists of batches."""
    metric = MetricSpy()
    trainer(metric, eval_do_concat_batches=False).evaluate()
    (call,) = metric.calls
    assert [len(batch) for batch in call.predictions] == [4, 4, 2]
    assert [len(batch) for batch in call.label_ids] == [4, 4, 2]


def test_23_streaming_hands_over_torch_tensors():
    """A batch a call, torch tensors of their own dtype, `compute_result` by keyword and True on the last alone."""
    metric = MetricSpy()
    model = tiny.model("gpt2", dtype=torch.bfloat16)
    trainer(metric, model=model, reducer=lambda logits, labels: logits[..., 0], batch_eval_metrics=True).evaluate()
    assert metric.flags == [False, False, True]
    assert [len(call.predictions) for call in metric.calls] == [4, 4, 2]
    assert {call.predictions.dtype for call in metric.calls} == {torch.bfloat16}
    assert {type(call.label_ids) for call in metric.calls} == {torch.Tensor}


def test_23_an_interrupted_stream_is_not_announced():
    """The next evaluation begins without a sign, so running sums are checked against the number of rows."""
    seen = []

    def interrupted(logits, labels):
        if len(seen) == 2:
            seen.append("interrupted")
            raise KeyboardInterrupt
        return count(logits, labels)

    def metric(prediction, compute_result):
        seen.append((len(prediction.predictions), compute_result))
        return {}

    evaluating = trainer(metric, reducer=interrupted, batch_eval_metrics=True)
    with pytest.raises(KeyboardInterrupt):
        evaluating.evaluate()
    evaluating.evaluate()
    assert seen == [(4, False), (4, False), "interrupted", (4, False), (4, False), (2, True)]


def test_23_a_foreign_dataloader_never_ends():
    """A DataLoader that accelerate did not prepare gives no result at all, which only the row count can tell."""
    metric = MetricSpy()
    GradientState._reset_state()  # older ones still hold the loader of the interrupted loop above
    loader = torch.utils.data.DataLoader(ROWS, batch_size=4, collate_fn=tiny.pad)
    trainer(metric, batch_eval_metrics=True).evaluation_loop(loader, "Evaluation")
    assert metric.flags == [False, False, False]


@pytest.mark.parametrize("streaming", [False, True])
def test_23_inputs_on_request(streaming):
    """The main input of all rows in one call, but the whole batch as a dict while streaming."""
    metric = MetricSpy()
    trainer(metric, include_for_metrics=["inputs"], batch_eval_metrics=streaming).evaluate()
    inputs = metric.calls[0].inputs
    assert isinstance(inputs, dict) is streaming
    assert len(inputs["input_ids"] if streaming else inputs) == (4 if streaming else 10)


def batch_means(model, size):
    """The mean next-token loss of each batch of `size` rows, and the number of rows in it."""
    batches = [ROWS[start : start + size] for start in range(0, len(ROWS), size)]
    with torch.no_grad():
        padded = [tiny.pad(rows) for rows in batches]
        return [(mean(model(**batch), batch["labels"]).item(), len(batch["labels"])) for batch in padded]


@pytest.mark.parametrize("size", [1, 4, 10])
def test_24_eval_loss_is_a_mean_over_rows_of_batch_means(size):
    """It depends on the batch size, so perplexity is never the exponential of it but comes from sums."""
    model = tiny.model("gpt2")
    expected = sum(value * rows for value, rows in batch_means(model, size)) / len(ROWS)
    ((exact, _),) = batch_means(model, len(ROWS))
    found = trainer(None, model=model, loss=summed, per_device_eval_batch_size=size).evaluate()["eval_loss"]
    assert found == pytest.approx(expected, rel=1e-6)
    assert (found == pytest.approx(exact, rel=1e-6)) is (size == 10)


def test_24_batches_that_are_not_finite():
    """From 5.23 on they are dropped from the mean without a word; before, the mean was NaN."""
    model = tiny.model("gpt2")
    values = iter([torch.nan, 2.0, 5.0])
    found = trainer(None, model=model, loss=lambda *args, **kwargs: torch.tensor(next(values))).evaluate()["eval_loss"]
    assert found == pytest.approx((4 * 2 + 2 * 5) / 6 if since("5.23") else np.nan, nan_ok=True)


@pytest.mark.parametrize(
    ("value", "survives"),
    [
        pytest.param(0.5, True, id="float"),
        pytest.param(np.float64(0.5), True, id="numpy scalar"),
        pytest.param(torch.tensor(0.5), True, id="0-d tensor"),
        pytest.param(np.array([0.5, 0.25]), False, id="array"),
        pytest.param(torch.tensor([0.5, 0.25]), False, id="tensor"),
    ],
)
def test_25_only_flat_numbers_can_be_saved(value, survives, tmp_path):
    """An array in the result crashes the first checkpoint, long after the evaluation: results are Python floats."""
    evaluating = trainer(MetricSpy({"score": value}))
    evaluating.evaluate()
    if survives:
        evaluating.state.save_to_json(str(tmp_path / "trainer_state.json"))
        assert tiny.logged(evaluating, "eval_score") == [0.5]
    else:
        with pytest.raises(TypeError, match="not JSON serializable"):
            evaluating.state.save_to_json(str(tmp_path / "trainer_state.json"))


@pytest.mark.parametrize(("key", "kept"), [("loss", True), ("runtime", False), ("nll_loss", True)])
def test_25_keys_that_collide(key, kept):
    """`loss` replaces eval_loss and `runtime` is replaced by the clock: neither is a key of ours."""
    scores = trainer(MetricSpy({key: -1.0})).evaluate()
    assert (scores[f"eval_{key}"] == -1.0) is kept
    assert (scores["eval_loss"] == -1.0) is (key == "loss")


@pytest.mark.parametrize(
    ("key", "greater"),
    [("nll_loss", False), ("eval_loss", False), ("perplexity", True), ("nll", True), ("wer", True), ("mse", True)],
)
def test_26_direction_by_the_end_of_the_name(key, greater):
    """Whatever does not end in `loss` keeps the worst checkpoint, so every key of ours carries its direction."""
    assert tiny.arguments(metric_for_best_model=key).greater_is_better is greater
