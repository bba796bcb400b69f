"""What `num_items_in_batch` counts and the forms it comes in (items 3 to 6)."""

import sys
from functools import partial

import pytest
import torch
import transformers

from tests import tiny
from tests.contract.probes import (
    LossSpy,
    MetricSpy,
    anything,
    first_ignored,
    mean,
    mean_gradient,
    nll_sum,
    since,
    summed,
)

ROWS = tiny.lm_rows(8, prompt=False)
LABELS = tiny.count(ROWS)
SHIFTED = tiny.count(ROWS, shift=1)


class Wrapped(torch.nn.Module):
    """A causal model inside somebody's own module."""

    def __init__(self):
        super().__init__()
        self.inner = tiny.model("llama")

    def forward(self, input_ids, attention_mask=None, labels=None, **options):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **options)


def adapted():
    """A causal model under PEFT."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(tiny.model("llama"), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))


def other_decoder(name, **config):
    """A causal model whose class is not called ForCausalLM."""
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(vocab_size=tiny.VOCAB, **config))


GPT = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
BERT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def relabelled(labels):
    """The rows with `labels(index)` for their labels."""
    return [row | {"labels": labels(index)} for index, row in enumerate(ROWS)]


def counts(model, rows, collator=tiny.pad):
    """The counts of one window in training and in evaluation."""
    spy = LossSpy()
    trainer = tiny.trainer(model, rows, spy, eval_rows=rows, collator=collator)
    trainer.train()
    trainer.evaluate()
    return spy.counts


CAUSAL = SHIFTED if since("5.10") else LABELS


BUILDS = {
    "LlamaForCausalLM": (partial(tiny.model, "llama"), CAUSAL),
    "Qwen2ForCausalLM": (partial(tiny.model, "qwen2"), CAUSAL),
    "PEFT over LlamaForCausalLM": (adapted, CAUSAL),
    "module over LlamaForCausalLM": (Wrapped, LABELS),
    "GPT2LMHeadModel": (partial(tiny.model, "gpt2"), LABELS),
    **{
        name: (partial(other_decoder, name, **config), LABELS)
        for name, config in {
            "OpenAIGPTLMHeadModel": GPT,
            "CTRLLMHeadModel": GPT | {"dff": 32},
            "BertLMHeadModel": BERT | {"is_decoder": True},
            "BertGenerationDecoder": BERT,
        }.items()
    },
}


@pytest.mark.parametrize(("build", "expected"), BUILDS.values(), ids=BUILDS)
def test_03_causal_models_are_counted_by_class_name(build, expected):
    """All of them shift, most are counted unshifted, so `mask_first_label` is offered instead of a correction."""
    assert counts(build(), ROWS) == [expected, expected]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_03_an_ignored_first_label_makes_both_counts_agree(name):
    """The repair that `mask_first_label` does: right in every version and for every class."""
    assert counts(tiny.model(name), first_ignored(ROWS)) == [SHIFTED, SHIFTED]


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_03_seq2seq_labels_are_counted_whole(name):
    """Their loss does not shift; from 5.10 to 5.14 one item a row was missing all the same."""
    wrong = since("5.10") and not since("5.15")
    expected = SHIFTED if wrong else LABELS
    assert counts(tiny.model(name), ROWS, tiny.pad_seq2seq) == [expected, expected]


MISSING = torch.tensor([[1, 0, -100], [-100, 1, 1]])


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        pytest.param("bert_mlm", tiny.masked_rows(8), tiny.count(tiny.masked_rows(8)), id="masked tokens"),
        pytest.param("bert_token", tiny.token_rows(8), tiny.count(tiny.token_rows(8)), id="token classes"),
        pytest.param("bert_cls", tiny.class_rows(8), 8, id="classes"),
        pytest.param("vit", tiny.image_rows(8), 8, id="image classes"),
        pytest.param("bert_mlm", relabelled(lambda _: torch.full((5,), 255)), 40, id="another ignore_index"),
        pytest.param("bert_cls", relabelled(lambda _: torch.full((5,), 0.2)), 40, id="soft labels"),
        pytest.param("bert_cls", relabelled(lambda i: MISSING[i % 2]), 16, id="multi-label, -100 is missing"),
        pytest.param("bert_cls", relabelled(lambda _: torch.tensor(-100.0)), 0, id="a true target of -100.0"),
    ],
)
def test_03_every_label_but_minus_100_is_an_item(name, rows, expected):
    """-100 is what the Trainer counts by, whatever the loss ignores, so it is the one ignored value of every loss."""
    dtype = rows[0].get("pixel_values", torch.tensor(0.0)).dtype
    assert counts(tiny.model(name, dtype=dtype), rows) == [expected, expected]


HALF = sum((len(row["labels"]) + 1) // 2 for row in ROWS)


@pytest.mark.parametrize(
    ("shift_labels", "expected"),
    [(lambda labels: labels[:, ::2], HALF), (lambda labels: torch.ones(len(labels)), 8)],
    ids=["every second label", "one a row"],
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_03_shift_labels_are_counted_instead(name, shift_labels, expected):
    """From 5.10 a collator can state any count, for every class: the rows of a window for losses by the row."""

    def collator(rows):
        batch = tiny.pad(rows)
        return batch | {"shift_labels": shift_labels(batch["labels"])}

    if not since("5.10"):
        expected = LABELS
    assert counts(tiny.model(name), ROWS, collator) == [expected, expected]


def test_04_a_number_without_dimensions():
    """int64 before 5.23 and float32 since: the division must not depend on it."""
    spy = LossSpy()
    tiny.trainer(tiny.model("gpt2"), ROWS, spy).train()
    count = spy.calls[0].count
    assert (count.dim(), count.dtype) == (0, torch.float32 if since("5.23") else torch.int64)


def test_04_all_micro_batches_share_one_count_tensor():
    """Whoever clamps it in place changes the next micro-batch, so it is never written to."""
    spy = LossSpy()
    tiny.trainer(tiny.model("gpt2"), ROWS, spy, per_device_train_batch_size=2, gradient_accumulation_steps=4).train()
    first, *others = [call.count for call in spy.calls]
    assert len(others) == 3
    assert all(count is first for count in others)


ODD = first_ignored(tiny.lm_rows(8, seed=3, prompt=False))
ITEMS = tiny.count(ODD)  # an odd number: the half that the Trainer floors to has lost one


def by_plain_count(outputs, labels, num_items_in_batch):
    return nll_sum(outputs, labels) / num_items_in_batch


@pytest.mark.parametrize(
    ("average", "count", "loss", "factor"),
    [
        pytest.param(True, ITEMS, by_plain_count, 2, id="count"),
        pytest.param(True, ITEMS, summed, 1, id="count.sum()"),
        pytest.param(True, ITEMS, mean, 2, id="mean"),
        pytest.param(False, ITEMS // 2, by_plain_count, ITEMS / (ITEMS // 2), id="floored count"),
        pytest.param(False, ITEMS // 2, summed, ITEMS / (ITEMS - 1), id="floored count.sum()"),
        pytest.param(False, ITEMS // 2, mean, 1, id="mean, not averaged"),
    ],
)
def test_04_data_parallel(average, count, loss, factor):
    """The outputs come gathered with one row of counts a device: `s / n.sum()` alone is right."""
    spy = LossSpy(loss)
    model = tiny.model("gpt2")
    batch = tiny.pad(ODD)
    value = mean(model(**batch), batch["labels"]).item()
    expected = factor * mean_gradient(model, ODD)
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    trainer = tiny.trainer(model, ODD, spy, eval_rows=ODD, replicas=2, average_tokens_across_devices=average, **sizes)
    evaluated = trainer.evaluate()["eval_loss"]
    found = tiny.gradient_of(trainer)
    outputs, labels, counted = spy.calls[-1]
    assert counted.tolist() == [[count], [count]]
    assert (len(outputs["logits"]), len(labels)) == (8, 8)
    assert evaluated == pytest.approx(factor * value, rel=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


def test_04_averaging_is_the_default():
    """With it the sum over the row of counts is exact, so nothing else is asked of the user."""
    assert tiny.arguments().average_tokens_across_devices is True


def in_a_list(rows):
    batch = tiny.pad(rows)
    return batch | {"labels": [batch["labels"]]}


def in_a_dict(rows):
    batch = tiny.pad(rows)
    return batch | {"labels": {"labels": batch["labels"], "token_weights": torch.rand(batch["labels"].shape)}}


@pytest.mark.parametrize(
    ("name", "rows", "collator", "labels"),
    [
        pytest.param("bert_qa", tiny.qa_rows(8), tiny.pad, type(None), id="no labels key"),
        pytest.param("gpt2", ROWS, in_a_list, list, id="labels in a list"),
        pytest.param("gpt2", ROWS, in_a_dict, dict, id="labels in a dict"),
    ],
)
def test_05_there_may_be_no_count(name, rows, collator, labels):
    """The loss is called all the same, then with the local count."""
    spy = LossSpy()
    tiny.trainer(tiny.model(name), rows, spy, collator=collator).train()
    assert spy.counts == [None]
    assert type(spy.calls[0].labels) is labels


def test_05_the_last_window_has_its_own_count():
    """A short window needs no correction: its count is smaller."""
    spy = LossSpy()
    tiny.trainer(tiny.model("gpt2"), ROWS, spy, per_device_train_batch_size=2, gradient_accumulation_steps=3).train()
    local = [int((call.labels != tiny.IGNORED).sum()) for call in spy.calls]
    assert spy.counts == [sum(local[:3])] * 3 + [local[3]]


def with_weights(rows):
    """Labels and weights in a dict, and `shift_labels` beside it for the count."""
    batch = tiny.pad(rows)
    weights = batch["input_ids"].double()
    return batch | {
        "labels": {"labels": batch["labels"], "token_weights": weights, "margin": weights[:, 0]},
        "shift_labels": batch["labels"][:, 1:],
    }


@pytest.mark.skipif(not since("5.10"), reason="`shift_labels` are counted from 5.10 on")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_06_shift_labels_beside_a_dict_carry_the_count(name):
    """The one way to weights, margins or teacher data with an exact count."""
    assert counts(tiny.model(name), ROWS, with_weights) == [SHIFTED, SHIFTED]


@pytest.mark.skipif(not since("5.10"), reason="labels are sliced from 5.10 on")
def test_06_a_dict_alone_loses_the_count():
    """None on Python 3.11, KeyError on 3.12 and later, where a slice is hashable: our collators add `shift_labels`."""
    spy = LossSpy()
    trainer = tiny.trainer(tiny.model("llama"), ROWS, spy, collator=in_a_dict)
    if sys.version_info >= (3, 12):
        with pytest.raises(KeyError):
            trainer.train()
    else:
        trainer.train()
        assert spy.counts == [None]


def test_06_a_dict_reaches_loss_and_metric():
    """Tensors of any name arrive whole and in order; across batches all are padded with -100, weights too."""
    rows = sorted(ROWS, key=lambda row: len(row["labels"]))
    spy, metric = LossSpy(), MetricSpy()
    tiny.trainer(
        tiny.model("llama"),
        None,
        spy,
        reducer=lambda logits, labels: labels["margin"],
        metric=metric,
        collator=with_weights,
        eval_rows=rows,
        per_device_eval_batch_size=4,
    ).evaluate()
    assert [sorted(call.labels) for call in spy.calls] == [["labels", "margin", "token_weights"]] * 2
    found = metric.calls[0].label_ids
    first, whole = with_weights(rows[:4])["labels"], with_weights(rows)["labels"]
    width = first["labels"].shape[1]
    assert width < whole["labels"].shape[1]
    assert found["labels"].tolist() == whole["labels"].tolist()
    assert found["margin"].tolist() == whole["margin"].tolist() == metric.calls[0].predictions.tolist()
    assert (found["token_weights"][:4, width:] == tiny.IGNORED).all()
    assert found["token_weights"][:4, :width].tolist() == first["token_weights"].tolist()


def test_06_extra_keys_go_to_the_model():
    """`shift_labels` reach its forward, so a model without `**kwargs` cannot be used with a dict of labels."""

    class Strict(Wrapped):
        def forward(self, input_ids, attention_mask=None, labels=None):
            return self.inner(input_ids=input_ids, attention_mask=attention_mask)

    tiny.trainer(Strict(), ROWS, anything).train()
    with pytest.raises(TypeError, match="shift_labels"):
        tiny.trainer(Strict(), ROWS, anything, collator=with_weights).train()


@pytest.mark.parametrize("remove", [True, False])
def test_06_extra_columns_are_removed_by_default(remove):
    """A collator sees columns the model does not know with `remove_unused_columns=False` only."""
    seen = []

    def collator(rows):
        seen.extend(rows)
        return tiny.pad([{name: row[name] for name in ROWS[0]} for row in rows])

    rows = [row | {"token_weights": torch.ones(len(row["labels"]))} for row in ROWS]
    tiny.trainer(tiny.model("llama"), rows, anything, collator=collator, remove_unused_columns=remove).train()
    assert all(("token_weights" in row) is not remove for row in seen)
    assert len(seen) == len(rows)
