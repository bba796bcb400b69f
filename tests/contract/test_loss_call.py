"""How `compute_loss_func` is called and what happens to the tensor it returns (items 0 to 2 and 7 to 13)."""

import os

import pytest
import torch

from tests import tiny
from tests.contract.probes import (
    LossSpy,
    MetricSpy,
    ReducerSpy,
    anything,
    even_rows,
    items,
    mean,
    mean_gradient,
    nll_sum,
    shapes,
    since,
    summed,
)

ROWS = tiny.lm_rows(8)


def accumulated(steps: int) -> dict[str, int]:
    """Arguments that split the eight rows of one optimizer step into `steps` micro-batches."""
    return {"per_device_train_batch_size": 8 // steps, "gradient_accumulation_steps": steps}


@pytest.mark.skipif(since("5.0"), reason="CPU autocast no longer reaches the loss")
def test_00_bf16_stays_in_the_environment(monkeypatch):
    """Up to 4.57 one bf16 run changes every later Trainer, so the tests clear the variable before each."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    tiny.arguments(bf16=True)
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.parametrize("entry", ["train", "evaluate"])
def test_01_the_loss_gets_outputs_labels_and_count_alone(entry):
    """Every loss has this signature; whatever else of the batch it needs must travel inside `labels`."""
    seen = []

    def loss(*args, **kwargs):
        seen.append((len(args), list(kwargs)))
        return anything(*args)

    getattr(tiny.trainer(tiny.model("gpt2"), ROWS, loss, eval_rows=ROWS), entry)()
    assert seen == [(2, ["num_items_in_batch"])]


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(("loss", "rows"), [(summed, ROWS), (mean, even_rows(8))], ids=["sum over count", "mean"])
def test_01_only_a_sum_over_the_count_is_invariant(loss, rows, steps):
    """Nothing divides a custom loss by the accumulation steps, so the one place that divides takes the count."""
    model = tiny.model("gpt2")
    expected = (steps if loss is mean else 1) * mean_gradient(model, rows)
    found = tiny.gradient_of(tiny.trainer(model, rows, loss, **accumulated(steps)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.skipif(not since("5.19"), reason="the attribute came with 5.19")
def test_01_a_trainer_can_be_told_to_divide():
    """The switch for losses that are means; with it ours would be too small, so the checks must look at it."""
    model, rows = tiny.model("gpt2"), even_rows(8)
    expected = mean_gradient(model, rows)
    trainer = tiny.trainer(model, rows, mean, **accumulated(4))
    trainer.loss_is_scaled_for_ga = False
    torch.testing.assert_close(tiny.gradient_of(trainer), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("operation", [torch.sqrt, torch.exp, torch.sigmoid, torch.tanh], ids=lambda op: op.__name__)
def test_02_the_loss_is_scaled_in_place(operation):
    """An op that saved its own output cannot be the last one; every loss of ours ends in a fresh division."""

    def bare(outputs, labels, num_items_in_batch=None):
        return operation(mean(outputs, labels))

    def fresh(outputs, labels, num_items_in_batch=None):
        return bare(outputs, labels) * 1

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tiny.trainer(tiny.model("gpt2"), ROWS, bare).train()
    tiny.trainer(tiny.model("gpt2"), ROWS, fresh).train()


def test_02_a_loss_of_one_dimension():
    """Accepted before 5.3 and refused since, so a loss has no dimension at all."""
    trainer = tiny.trainer(tiny.model("gpt2"), ROWS, lambda *args, **kwargs: mean(*args)[None])
    if since("5.3"):
        with pytest.raises(RuntimeError, match="broadcast shape"):
            trainer.train()
    else:
        trainer.train()


def test_28_a_kept_loss_is_scaled_afterwards():
    """`watch` keeps clones: the tensor that was returned has changed when the log is written."""
    kept = []

    def loss(outputs, labels, num_items_in_batch=None):
        value = mean(outputs, labels)
        kept.extend([value, value.item()])
        return value

    tiny.trainer(tiny.model("gpt2"), ROWS, loss, replicas=2, per_device_train_batch_size=4).train()
    tensor, value = kept
    assert tensor.item() == pytest.approx(2 * value)


def test_07_the_model_computes_no_loss_of_its_own():
    """The labels are popped: no float32 copy of the logits is paid for a loss that nobody reads."""
    spy = LossSpy()
    tiny.trainer(tiny.model("llama"), ROWS, spy).train()
    assert "loss" not in spy.calls[0].outputs


def test_07_the_router_loss_is_dropped():
    """A mixture of experts loses its balance loss in silence, so a term of ours has to add `aux_loss`."""
    model = tiny.model("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    batch = tiny.pad(ROWS)
    own = model(**batch)
    bare = mean(own, batch["labels"]).item()
    assert own.loss.item() == pytest.approx(bare + 0.5 * own.aux_loss.item(), rel=1e-6)
    spy = LossSpy(mean)
    trainer = tiny.trainer(model, ROWS, spy)
    trainer.train()
    assert spy.calls[0].outputs["aux_loss"].item() == pytest.approx(own.aux_loss.item(), rel=1e-5)
    assert tiny.logged(trainer) == [pytest.approx(bare, abs=1e-4)]


def test_07_t5_needs_decoder_inputs():
    """T5 makes them from the labels, which are gone: the collator must bring them."""
    trainer = tiny.trainer(tiny.model("t5"), ROWS, LossSpy())
    with pytest.raises(ValueError, match=r"You (have to|must) specify"):
        trainer.train()


def test_07_bart_trains_on_the_shifted_source():
    """BART falls back to its source in silence, so a seq2seq loss without decoder inputs cannot be trusted."""
    model = tiny.model("bart")
    rows = [row | {"labels": row["input_ids"].flip(0)} for row in ROWS]
    batch = tiny.pad(rows)
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    spy = LossSpy()
    tiny.trainer(model, None, spy, eval_rows=rows).evaluate()
    found = spy.calls[0].outputs["logits"]
    torch.testing.assert_close(found, model(**source, labels=batch["input_ids"]).logits)
    assert not torch.allclose(found, model(**batch).logits)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_07_decoder_inputs_of_the_collator_are_enough(name):
    """With them in the batch the logits are those of the model's own training."""
    model, spy = tiny.model(name), LossSpy()
    tiny.trainer(model, None, spy, eval_rows=ROWS, collator=tiny.pad_seq2seq).evaluate()
    own = model(**tiny.pad(ROWS)).logits
    torch.testing.assert_close(spy.calls[0].outputs["logits"], own)


def test_08_label_smoothing_factor_is_ignored():
    """The argument does nothing beside a custom loss and nothing says so; `check_trainer` has to."""
    found = [
        tiny.gradient_of(tiny.trainer(tiny.model("gpt2"), ROWS, summed, label_smoothing_factor=factor))
        for factor in (0.0, 0.5)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize(("count", "destroys"), [(lambda n: n, True), (lambda n: n.sum().clamp(min=1), False)])
def test_09_a_window_without_labels(count, destroys):
    """The count is 0 then; 0 / 0 makes every parameter NaN while the log shows 0.0, so our count is never below 1."""
    rows = [row | {"labels": torch.full_like(row["labels"], tiny.IGNORED)} for row in ROWS]

    def masked(outputs, labels, num_items_in_batch=None):
        return (outputs["logits"][..., 0] * (labels != tiny.IGNORED)).sum() / count(num_items_in_batch)

    spy = LossSpy(masked)
    trainer = tiny.trainer(tiny.model("gpt2"), rows, spy)
    found = tiny.gradient_of(trainer)
    assert spy.counts == [0]
    assert tiny.logged(trainer) == [0.0]
    assert bool(found.isnan().any()) is destroys
    assert destroys or not found.any()


def test_28_a_nan_loss_is_logged_as_zero():
    """`logging_nan_inf_filter` hides it, so the checks look at the parameters and not at the log."""

    def undefined(outputs, labels, num_items_in_batch=None):
        return mean(outputs, labels) * torch.nan

    trainer = tiny.trainer(tiny.model("gpt2"), ROWS, undefined)
    trainer.train()
    assert tiny.logged(trainer) == [0.0]


@pytest.mark.parametrize("weighted", [True, False])
def test_10_an_auxiliary_term_is_weighted_by_its_share(weighted):
    """By the share of the items its coefficient is the same for any window; alone it is taken once a micro-batch."""
    values = []

    def balance(outputs, labels, num_items_in_batch=None):
        values.append(outputs["aux_loss"].item())
        share = items(labels) / num_items_in_batch if weighted else 1
        return outputs["aux_loss"] * share

    trainer = tiny.trainer(tiny.model("mixtral", output_router_logits=True), ROWS, balance, **accumulated(4))
    trainer.train()
    (found,) = tiny.logged(trainer)
    assert (min(values) < found < max(values)) is weighted
    assert (found == pytest.approx(sum(values), abs=1e-3)) is not weighted


@pytest.mark.parametrize(
    ("dtype", "bf16", "logits", "head"),
    [
        (torch.float32, False, torch.float32, torch.float32),
        (torch.float32, True, torch.float32, torch.float32),
        (torch.bfloat16, False, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, True, torch.float32, torch.bfloat16),
    ],
)
def test_11_dtypes_and_autocast_in_the_loss(dtype, bf16, logits, head):
    """`bf16=True` hands over float32 copies outside autocast, even of a bf16 model, whose head is still bf16."""
    seen = {}

    def loss(outputs, labels, num_items_in_batch=None):
        seen["logits"] = outputs["logits"].dtype
        seen["hidden"] = outputs["hidden_states"][-1].dtype
        seen["autocast"] = torch.is_autocast_enabled("cpu")
        return anything(outputs)

    model = tiny.model("llama", dtype=dtype, output_hidden_states=True)
    tiny.trainer(model, ROWS, loss, bf16=bf16).train()
    assert seen == {"logits": logits, "hidden": logits, "autocast": bf16 and not since("5.0")}
    assert model.lm_head.weight.dtype == head


class Plain(torch.nn.Module):
    """A model outside transformers that returns its (B, T, V) logits as `form` packs them."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.table = torch.nn.Embedding(tiny.VOCAB, tiny.VOCAB)

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.form(self.table(input_ids))


@pytest.mark.parametrize(
    ("form", "first", "reduced"),
    [
        pytest.param(lambda logits: (logits,), lambda out: out[0], [], id="(logits,)"),
        pytest.param(lambda logits: (logits, logits[:, 0]), lambda out: out[0], (8, 64), id="(logits, x)"),
        pytest.param(lambda logits: logits, lambda out: out, (7, 12, 64), id="logits"),
        pytest.param(lambda logits: {"logits": logits}, lambda out: out["logits"], (8, 12, 64), id="dict"),
    ],
)
def test_12_the_first_element_of_a_tuple_is_taken_for_a_loss(form, first, reduced):
    """Evaluation cuts it off although nobody put a loss there: only dicts and ModelOutputs are safe for reducers."""

    def loss(outputs, labels, num_items_in_batch=None):
        return nll_sum({"logits": first(outputs)}, labels)

    reducer = ReducerSpy(lambda logits, labels: torch.zeros(len(labels)))
    tiny.trainer(Plain(form), None, loss, reducer=reducer, metric=MetricSpy(), eval_rows=ROWS).evaluate()
    assert shapes(reducer.calls[0][0]) == reduced


@pytest.mark.parametrize(("name", "factor"), [("bert_cls", 4 if since("5.0") else 1), ("llama_cls", 4)])
def test_13_stock_losses_of_classification_heads(name, factor):
    """They are means that the Trainer takes for sums, so the stock loss is no reference under accumulation."""
    rows = tiny.class_rows(8)
    at_once, in_four = [
        tiny.gradient_of(tiny.trainer(tiny.model(name), rows, **accumulated(steps))) for steps in (1, 4)
    ]
    torch.testing.assert_close(in_four, factor * at_once, rtol=0, atol=1e-5)
