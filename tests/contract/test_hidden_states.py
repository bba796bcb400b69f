"""What the hidden-state source builds on: the hidden states, the head and `logits_to_keep` (items 14 to 17)."""

import inspect
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers

from tests import tiny
from tests.contract.probes import (
    LossSpy,
    MetricSpy,
    ReducerSpy,
    anything,
    by_head,
    mean,
    shapes,
    since,
    summed,
    without_logits,
)

ROWS = tiny.lm_rows(8)
SOFTCAP, SCALE, SCALING = 2.0, 0.25, 4.0  # as in tests.tiny
FAMILIES = {
    "llama": lambda z: z,
    "qwen2": lambda z: z,
    "gpt2": lambda z: z,
    "mixtral": lambda z: z,
    "gemma2": lambda z: SOFTCAP * torch.tanh(z / SOFTCAP),
    "cohere": lambda z: z * SCALE,
    "granite": lambda z: z / SCALING,
}
PLAIN = ["llama", "qwen2", "gpt2", "mixtral"]


@pytest.fixture(params=FAMILIES, scope="module")
def family(request):
    """A name, its model and one forward pass with all hidden states."""
    model = tiny.model(request.param)
    batch = tiny.pad(ROWS)
    del batch["labels"]
    with torch.no_grad():
        return request.param, model, batch, model(**batch, output_hidden_states=True)


def test_15_head_of_the_last_hidden_state_is_the_logits(family):
    """Up to a soft-cap or a scale that stands in the config; without it the result is another distribution."""
    name, model, _, outputs = family
    z = model.get_output_embeddings()(outputs.hidden_states[-1])
    torch.testing.assert_close(FAMILIES[name](z), outputs.logits)
    assert torch.allclose(z, outputs.logits) is (name in PLAIN)


def test_15_no_head_applies_to_a_bert_decoder():
    """Its head is a transform before the output embedding, so the source refuses it."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=tiny.VOCAB, is_decoder=True, initializer_range=0.2, **sizes)
    outputs = (model := transformers.BertLMHeadModel(config).eval())(
        input_ids=tiny.pad(ROWS)["input_ids"], output_hidden_states=True
    )
    assert not torch.allclose(model.get_output_embeddings()(outputs.hidden_states[-1]), outputs.logits, atol=0.1)


@pytest.mark.parametrize(
    "find", [lambda model: model.get_decoder(), lambda model: model.base_model], ids=["decoder", "base"]
)
def test_14_a_hook_on_the_decoder_sees_the_input_of_the_head(family, find):
    """The source hooks it: the state is there without every layer being kept."""
    name, model, batch, outputs = family
    decoder, seen = find(model), []
    if name == "gpt2" and decoder is model:
        assert not since("5.0")
        pytest.skip("get_decoder() of GPT-2 was the whole model up to 4.57")
    handle = decoder.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    with torch.no_grad():
        model(**batch)
    handle.remove()
    torch.testing.assert_close(seen, [outputs.hidden_states[-1]])


@pytest.mark.parametrize(
    ("keep", "positions"),
    [(1, slice(-1, None)), (torch.tensor([0, 3, 4]), [0, 3, 4]), (torch.tensor([], dtype=torch.long), [])],
    ids=["1", "indices", "no index"],
)
def test_14_logits_to_keep(family, keep, positions):
    """The model itself returns its true last logits, which no table of heads can replace as a check."""
    _, model, batch, outputs = family
    assert "logits_to_keep" in inspect.signature(model.forward).parameters
    with torch.no_grad():
        kept = model(**batch, logits_to_keep=keep, output_hidden_states=True)
    torch.testing.assert_close(kept.logits, outputs.logits[:, positions])
    torch.testing.assert_close(kept.hidden_states[-1], outputs.hidden_states[-1])


def test_14_logits_to_keep_is_no_argument_of_every_model():
    """The signature has to be asked: encoder-decoders do not take it."""
    assert "logits_to_keep" not in inspect.signature(tiny.model("bart").forward).parameters


SETUPS = {
    "untied": ({}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "checkpointing": ({}, {"gradient_checkpointing": True}),
    "not reentrant": (
        {}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    ),
    "accumulation": ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
}  # fmt: skip


@pytest.mark.parametrize(("config", "arguments"), SETUPS.values(), ids=SETUPS)
def test_14_a_loss_over_the_head_is_the_loss_over_the_logits(config, arguments):
    """The gradient of every parameter is the same, so the logits need never exist."""
    expected = tiny.gradient_of(tiny.trainer(tiny.model("llama", **config), ROWS, summed, **arguments))
    model = without_logits(tiny.model("llama", **config))
    loss = partial(by_head, head=model.get_output_embeddings())
    found = tiny.gradient_of(tiny.trainer(model, ROWS, loss, **arguments))
    assert expected.norm() > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def lora(model, *modules):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=list(modules), init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


@pytest.mark.parametrize("module", ["q_proj", "lm_head"])
def test_14_the_head_is_called_as_a_module(module):
    """With LoRA on it `head.weight` is the frozen base: another loss and no error."""
    batch = tiny.pad(ROWS)
    labels = batch.pop("labels")
    model = lora(tiny.model("llama"), module)
    with torch.no_grad():
        outputs = model(**batch, output_hidden_states=True)
    head, hidden = model.get_output_embeddings(), outputs.hidden_states[-1]
    torch.testing.assert_close(head(hidden), outputs.logits)
    by_weight = mean({"logits": F.linear(hidden, head.weight)}, labels)
    assert (abs(by_weight - mean(outputs, labels)) > 0.01).item() is (module == "lm_head")


@pytest.mark.skipif(not since("0.21", of="peft"), reason="hooks of the base model run from peft 0.21 on")
def test_14_the_config_does_not_reach_a_peft_model():
    """Its wrapper passes `output_hidden_states=None`: a flag in the call or a hook on the base model works."""
    model = lora(tiny.model("llama", output_hidden_states=True), "q_proj")
    ids = tiny.pad(ROWS)["input_ids"]
    assert "hidden_states" not in model(input_ids=ids)
    assert "hidden_states" in model(input_ids=ids, output_hidden_states=True)
    without_logits(model.get_base_model())
    assert shapes(model(input_ids=ids).logits) == (8, 1, tiny.VOCAB)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


def test_14_hooks_work_with_an_iterable_dataset():
    """Flags in the batch break the dispatching of an IterableDataset, a hook does not."""
    model, spy = without_logits(tiny.model("llama")), LossSpy()
    tiny.trainer(model, Stream(), spy, max_steps=1).train()
    assert spy.calls[0].outputs["logits"].shape[1] == 1


def four_of_twelve(rows):
    """Four supervised positions, the same in every row, and `logits_to_keep` for them alone."""
    ids = torch.stack([row["input_ids"].repeat(3)[:12] for row in rows])
    labels = ids.clone()
    labels[:, [*range(7), 11]] = tiny.IGNORED
    return {"input_ids": ids, "labels": labels, "logits_to_keep": torch.arange(6, 10)}


def over_kept(outputs, labels, num_items_in_batch):
    assert outputs["logits"].shape[1] == 4
    kept = labels[:, 7:11]
    return F.cross_entropy(outputs["logits"].flatten(0, 1), kept.flatten(), reduction="sum") / num_items_in_batch


def test_16_supervised_positions_alone():
    """An index tensor keeps prompts out of the head of any model: the same gradient from a third of the logits."""

    def whole(rows):
        return {name: value for name, value in four_of_twelve(rows).items() if name != "logits_to_keep"}

    expected = tiny.gradient_of(tiny.trainer(tiny.model("gpt2"), ROWS, summed, collator=whole))
    found = tiny.gradient_of(tiny.trainer(tiny.model("gpt2"), ROWS, over_kept, collator=four_of_twelve))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_16_an_index_does_not_survive_data_parallel():
    """It is scattered over the devices like the batch, so each keeps other positions: refused by the loss."""
    spy = LossSpy()
    tiny.trainer(
        tiny.model("gpt2"), ROWS, spy, collator=four_of_twelve, replicas=2, per_device_train_batch_size=4
    ).train()
    assert shapes(spy.calls[0].outputs["logits"]) == (8, 2, tiny.VOCAB)


KEYS = ["past_key_values", "cache", "hidden_states"]


@pytest.mark.parametrize("by", ["default", "config", "ignore_keys"])
def test_17_hidden_states_reach_the_reducer(by):
    """All layers are gathered beside the logits unless the full list of keys is given: the source keeps none."""
    model, reducer = tiny.model("llama", output_hidden_states=True), ReducerSpy()
    if by == "config":
        model.config.keys_to_ignore_at_inference = KEYS
    trainer = tiny.trainer(model, None, anything, reducer=reducer, metric=MetricSpy(), eval_rows=ROWS)
    trainer.evaluate(ignore_keys=KEYS if by == "ignore_keys" else None)
    logits, hidden = (8, 12, tiny.VOCAB), [(8, 12, tiny.HIDDEN)] * 3
    assert shapes(reducer.calls[0][0]) == ([logits, hidden] if by == "default" else logits)
