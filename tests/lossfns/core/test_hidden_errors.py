"""What hidden states cannot do raises, with the reason, before a wrong number."""

from functools import partial

import pytest
import torch
import transformers

from lossfns import causal_lm_loss, hidden_states, token_statistics
from lossfns.collators.labels import keep_supervised_logits
from tests import tiny
from tests.contract.probes import since, summed
from tests.lossfns.core.trained import ROWS, compare, lora

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def train(model, source, **options):
    tiny.trainer(model, ROWS[:8], partial(causal_lm_loss, source=source), **options).train()


KEEPS_LOGITS = pytest.mark.skipif(not since("5.0"), reason="BERT and BioGPT take logits_to_keep from 5.0 on")


@KEEPS_LOGITS
@pytest.mark.parametrize(("family", "name"), [("Bert", "BertLMHeadModel"), ("Roberta", "RobertaForCausalLM")])
def test_a_transform_before_the_head(family, name):
    """Bert-like decoders: the first batch is compared."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=tiny.VOCAB, is_decoder=True, initializer_range=0.2, hidden_dropout_prob=0.0, **SIZES
    )
    model = getattr(transformers, name)(config).double()
    with pytest.raises(ValueError, match=r"differs from the model's own logits by up to .* Use the logits"):
        train(model, hidden_states(model))


@KEEPS_LOGITS
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_biogpt_is_not_refused_because_its_decoder_returns_what_its_head_reads(tied):
    """The last of its `hidden_states` lacks a norm in some versions, which a loss that read those would miss."""

    def make():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0}
            sizes = SIZES | {"vocab_size": tiny.VOCAB, "initializer_range": 0.2}
            return transformers.BioGptForCausalLM(
                transformers.BioGptConfig(tie_word_embeddings=tied, **sizes, **none)
            ).double()

    assert compare(make) < 1e-12


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", {"final_logit_softcapping": None}),
        ("cohere", {"logit_scale": 0.5}),
        ("granite", {"logits_scaling": 3.9}),
        ("llama", {"logit_scale": 1.01}),
    ],
)
def test_another_scale_or_cap_than_the_config_says(name, change):
    """No table of heads can be complete: the model's own last logits decide."""
    model = tiny.model(name)
    changed = {"final_logit_softcapping": 2.1} if name == "gemma2" else change
    source = hidden_states(model)
    batch = tiny.pad(ROWS[:8])
    labels = batch.pop("labels")
    outputs = model(**batch)
    for option, value in changed.items():
        object.__setattr__(model.config, option, value)
    with pytest.raises(ValueError, match="differs from the model's own logits"):
        causal_lm_loss(outputs, labels, source=source)


def test_a_vocabulary_that_the_model_cuts():
    class Cut(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits[..., :-1]
            return outputs

        forward.__signature__ = __import__("inspect").signature(transformers.LlamaForCausalLM.forward)

    model = tiny.model("llama")
    model.__class__ = Cut
    with pytest.raises(ValueError, match="in shape"):
        train(model, hidden_states(model))


# --- the wrong forward -----------------------------------------------------------------------------------------------


def test_model_init():
    source = hidden_states(tiny.model("llama"))
    trainer = transformers.Trainer(
        model_init=lambda: tiny.model("llama"),
        args=tiny.arguments(),
        train_dataset=ROWS[:8],
        data_collator=tiny.pad,
        compute_loss_func=partial(causal_lm_loss, source=source),
    )
    with pytest.raises(RuntimeError, match=r"saw no forward.*With model_init the Trainer makes new models"):
        trainer.train()


def test_another_model_of_the_same_sizes():
    """Even after the source has seen a batch of this very shape from its own model."""
    model = tiny.model("llama")
    source = hidden_states(model)
    loss = partial(causal_lm_loss, source=source)
    tiny.trainer(model, None, loss, eval_rows=ROWS[:8]).evaluate()
    with pytest.raises(RuntimeError, match="saw another forward"):
        tiny.trainer(tiny.model("llama", seed=1), None, loss, eval_rows=ROWS[:8]).evaluate()


def test_an_earlier_batch():
    model = tiny.model("llama")
    source = hidden_states(model)
    first, second = (tiny.pad(rows) for rows in (ROWS[:8], ROWS[8:16]))
    labels = [batch.pop("labels") for batch in (first, second)]
    early = model(**first)
    model(**second)
    with pytest.raises(RuntimeError, match="saw another forward"):
        causal_lm_loss(early, labels[0], source=source)


def copying(model):
    """`model`, its logits copied after the hooks, as DDP does where it searches for unused parameters."""
    model.register_forward_hook(lambda model, args, output: output | {"logits": output.logits.clone()})
    return model


def test_copy_is_recognized_by_its_graph(monkeypatch):
    """Comparing values would wait for the device in every step; without a graph they are what there is."""
    model = tiny.model("llama")
    source = hidden_states(model)
    batch = tiny.pad(ROWS[:8])
    labels = batch.pop("labels")
    copying(model)
    compared = []
    allclose = torch.allclose
    monkeypatch.setattr(torch, "allclose", lambda *args, **kwargs: compared.append(1) or allclose(*args, **kwargs))
    found = causal_lm_loss(model(**batch), labels, source=source)
    assert compared == []
    with torch.no_grad():
        assert torch.equal(causal_lm_loss(model(**batch), labels, source=source), found)
    assert compared == [1]


@pytest.mark.parametrize("graph", [True, False], ids=["training", "evaluation"])
def test_a_copy_of_an_earlier_batch(graph):
    model = tiny.model("llama")
    source = hidden_states(model)
    copying(model)
    first, second = (tiny.pad(rows) for rows in (ROWS[:8], ROWS[8:16]))
    labels = [batch.pop("labels") for batch in (first, second)]
    with torch.set_grad_enabled(graph):
        early = model(**first)
        model(**second)
        with pytest.raises(RuntimeError, match="saw another forward"):
            causal_lm_loss(early, labels[0], source=source)


@pytest.mark.parametrize("graph", [True, False], ids=["training", "evaluation"])
def test_logits_that_are_changed_after_the_first_batch(graph):
    """Their graph leads to those of this forward, and the hidden states lead to others."""
    model = tiny.model("llama")
    source = hidden_states(model)
    batch = tiny.pad(ROWS[:8])
    labels = batch.pop("labels")
    with torch.set_grad_enabled(graph):
        causal_lm_loss(model(**batch), labels, source=source)
        model.register_forward_hook(lambda model, args, output: output | {"logits": 2 * output.logits})
        with pytest.raises(RuntimeError, match="saw another forward"):
            causal_lm_loss(model(**batch), labels, source=source)


def test_after_removal():
    model = tiny.model("llama")
    with hidden_states(model) as source:
        pass
    with pytest.raises(RuntimeError, match=r"was removed.*remove it after the last evaluation"):
        train(model, source)


# --- several devices -------------------------------------------------------------------------------------------------


def test_data_parallel():
    model = tiny.model("llama")
    with pytest.raises(RuntimeError, match="DataParallel splits the batch"):
        train(model, hidden_states(model), replicas=2, per_device_train_batch_size=4)


def test_a_replica_of_data_parallel():
    """What torch makes of the module for each GPU carries its hooks."""
    model = tiny.model("llama")
    hidden_states(model)
    replica = model._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match="does not work under DataParallel"):
        replica(input_ids=ROWS[0]["input_ids"][None])


@pytest.mark.parametrize(
    "shard",
    [
        pytest.param(lambda weight: setattr(weight, "ds_id", 0), id="ZeRO-3"),
        pytest.param(lambda weight: setattr(weight, "full_tensor", None), id="FSDP2"),
        pytest.param(lambda weight: setattr(weight, "data", weight.data.new_empty(0)), id="FSDP"),
    ],
)
def test_a_sharded_head(shard):
    """As the wrappers mark it; a model sharded for real is in `test_ranks`."""
    model = tiny.model("llama")
    source = hidden_states(model)
    outputs = model(input_ids=ROWS[0]["input_ids"][None])
    shard(model.lm_head.weight)
    with pytest.raises(ValueError, match="Linear is sharded"):
        causal_lm_loss(outputs, ROWS[0]["labels"][None], source=source)


# --- the wrong model -------------------------------------------------------------------------------------------------


def test_a_forward_without_logits_to_keep():
    with pytest.raises(TypeError, match="BartForConditionalGeneration does not take logits_to_keep"):
        hidden_states(tiny.model("bart"))


def test_no_head_to_read():
    model = tiny.model("llama")
    model.lm_head = None
    with pytest.raises(TypeError, match="names no decoder and output embedding"):
        hidden_states(model)


def test_a_collator_that_chooses_logits():
    """Both do without logits; together the labels would be cut and the hidden states not."""
    model = tiny.model("llama")
    with pytest.raises(ValueError, match="remove one"):
        train(model, hidden_states(model), collator=keep_supervised_logits(tiny.pad))


def test_labels_that_were_cut_by_hand():
    model = tiny.model("llama")
    source = hidden_states(model)
    outputs = model(input_ids=ROWS[0]["input_ids"][None])
    labels = torch.cat([ROWS[0]["labels"], torch.tensor([5])])[None]
    with pytest.raises(ValueError, match="logits cover"):
        causal_lm_loss(outputs, labels, source=source)


def test_dropout_in_the_head():
    """A first batch in training cannot be compared; after an evaluation it need not be."""
    model = lora(tiny.model("llama"), "lm_head", lora_dropout=0.5)
    source = hidden_states(model)
    with pytest.raises(ValueError, match=r"has dropout.*evaluate\(\) once before train"):
        train(model, source)
    loss = partial(causal_lm_loss, source=source)
    trainer = tiny.trainer(model, ROWS[:8], loss, eval_rows=ROWS[:8])
    trainer.evaluate()
    before = tiny.parameters(model)
    after = tiny.parameters_after(trainer)
    assert all((before[name] != after[name]).any() for name in before)


def test_the_loss_of_the_model_itself_raises_too():
    """Without a loss function the hooks leave the Trainer one logit a row for all labels: torch refuses."""
    model = tiny.model("llama")
    hidden_states(model)
    with pytest.raises(ValueError, match="batch_size"):
        tiny.trainer(model, ROWS[:8]).train()


def test_without_hooks_nothing_is_refused():
    """The helpers of this file train where nothing is wrong."""
    model = tiny.model("llama")
    train(model, hidden_states(model))
    outputs = tiny.model("llama")(input_ids=ROWS[0]["input_ids"][None])
    assert summed(outputs, ROWS[0]["labels"][None], torch.tensor(1.0)) > 0
    assert token_statistics(outputs.logits, ROWS[0]["labels"][None], shift=1)["valid"].any()
