"""Training from hidden states in the stock Trainer ends where training from the logits does."""

from functools import partial

import pytest
import torch
import transformers

from lossfns import (
    causal_lm_loss,
    focal,
    hidden_states,
    smoothed_cross_entropy,
    token_weighted,
    weighted_sum,
    z_loss,
)
from tests import tiny
from tests.contract.probes import COMPILES, LossSpy, summed
from tests.lossfns.core.trained import ROWS, compare, gradients, lora

FAMILIES = ["llama", "qwen2", "gemma2", "cohere", "granite", "gpt2"]
EXACT = 1e-12


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, tied):
    assert compare(partial(tiny.model, name, tie_word_embeddings=tied)) < EXACT


@pytest.mark.parametrize(("name", "option"), [("gemma2", "final_logit_softcapping"), ("cohere", "logit_scale")])
def test_scale_and_cap_after_the_head_are_applied(name, option):
    """Broken: without the soft-cap or scale of the config the comparison would have found another model."""
    expected = tiny.parameters_after(tiny.trainer(tiny.model(name), ROWS, summed))
    changed = tiny.parameters_after(
        tiny.trainer(tiny.model(name, **{option: 1e6 if "cap" in option else 1.0}), ROWS, summed)
    )
    assert max((expected[key] - changed[key]).abs().max() for key in expected) > 1e-3


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda model: lora(model, "q_proj"), id="attention"),
        pytest.param(lambda model: lora(model, "q_proj", "lm_head"), id="head"),
        pytest.param(lambda model: lora(model, "q_proj", modules_to_save=["lm_head"]), id="modules_to_save"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_adapters(name, make):
    assert compare(lambda: make(tiny.model(name))) < EXACT


def test_an_adapter_on_the_head_is_seen():
    """Broken: its base weight alone gives another gradient, so the case above can fail."""
    model = lora(tiny.model("llama"), "lm_head")
    batch = tiny.pad(ROWS[:8])
    labels = batch.pop("labels")
    with torch.no_grad():
        found = [summed(model(**batch), labels, torch.tensor(1.0)) for _ in range(2)]
        with model.disable_adapter():
            base = summed(model(**batch), labels, torch.tensor(1.0))
    assert found[0] == found[1]
    assert abs(base - found[0]) > 0.1


def test_virtual_tokens_of_prompt_tuning():
    """They stand before the labelled ones, in the hidden states too."""
    peft = pytest.importorskip("peft")

    def make():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
            return peft.get_peft_model(tiny.model("llama"), config).double()

    def last(outputs, labels, num_items_in_batch):
        return summed({"logits": outputs["logits"][:, 3:]}, labels, num_items_in_batch)

    expected = tiny.parameters_after(tiny.trainer(make(), ROWS, last))
    model = make()
    loss = partial(causal_lm_loss, source=hidden_states(model))
    found = tiny.parameters_after(tiny.trainer(model, ROWS, loss))
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, id="accumulation"),
        pytest.param(
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, id="reentrant"
        ),
        pytest.param(
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
            id="not reentrant",
        ),
        pytest.param({"collator": tiny.pad_left}, id="padded at the left"),
        pytest.param({"torch_compile": True, "torch_compile_backend": "eager"}, id="compiled", marks=COMPILES),
    ],
)
def test_ways_to_train(arguments):
    assert compare(partial(tiny.model, "llama"), **arguments) < EXACT


class Stream(torch.utils.data.IterableDataset):
    """Rows in their order."""

    def __init__(self, rows=ROWS):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize("dispatch", [None, True, False])
def test_streamed_rows(dispatch):
    config = {"dispatch_batches": dispatch}
    assert compare(partial(tiny.model, "llama"), Stream(), max_steps=3, accelerator_config=config) < EXACT


# --- what is supervised ----------------------------------------------------------------------------------------------


def unsupervised(rows):
    return [row | {"labels": torch.full_like(row["labels"], tiny.IGNORED)} for row in rows]


def test_rows_without_a_label():
    rows = [row for pair in zip(ROWS[:12], unsupervised(ROWS[12:]), strict=True) for row in pair]
    assert compare(partial(tiny.model, "llama"), rows) < EXACT


@pytest.mark.parametrize("make", [lambda model: model, lambda model: lora(model, "lm_head")], ids=["linear", "adapter"])
def test_a_batch_without_a_label_changes_nothing(make):
    """In the middle of an accumulation, and as a step of its own: a loss of 0, gradients of 0."""
    rows = [*ROWS[:4], *unsupervised(ROWS[4:8]), *unsupervised(ROWS[8:16])]
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    expected = tiny.parameters_after(tiny.trainer(make(tiny.model("llama")), ROWS[:4], summed))
    model = make(tiny.model("llama"))
    loss = partial(causal_lm_loss, source=hidden_states(model))
    trainer = tiny.trainer(model, Stream(rows), loss, max_steps=2, **settings)
    torch.testing.assert_close(tiny.parameters_after(trainer), expected, rtol=0, atol=EXACT)
    assert tiny.logged(trainer)[1] == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_every_term_is_the_same_from_hidden_states():
    """A composed term with weights a token, against the same term over logits, which has tests of its own."""
    term = token_weighted(weighted_sum((0.5, focal), (0.5, smoothed_cross_entropy), (1e-2, z_loss)))

    def weighted(rows):
        batch = tiny.pad(rows)
        weights = torch.linspace(0.5, 1.5, batch["labels"].numel(), dtype=torch.float64).view(batch["labels"].shape)
        return batch | {
            "labels": {"labels": batch["labels"], "token_weights": weights},
            "shift_labels": batch["labels"],
        }

    def train(model, **source):
        loss = partial(causal_lm_loss, term=term, **source)
        return tiny.parameters_after(tiny.trainer(model, ROWS, loss, collator=weighted))

    model = tiny.model("gemma2")
    found = train(model, source=hidden_states(model))
    torch.testing.assert_close(found, train(tiny.model("gemma2")), rtol=0, atol=EXACT)


# --- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("weights", "bf16"),
    [(torch.bfloat16, False), (torch.float32, True), (torch.bfloat16, True), (torch.float32, False)],
    ids=["bf16 weights", "bf16=True", "both", "float32"],
)
def test_bfloat16(weights, bf16, tied):
    """No further from the float64 gradient of the same weights than the logits path is.

    `bf16=True` hands the loss float32 logits of a bfloat16 product, hidden states are read as the head reads them.
    """
    make = partial(tiny.model, "llama", tie_word_embeddings=tied)
    truth = gradients(make(dtype=weights).double(), ROWS[:8], summed)
    usual = gradients(make(dtype=weights), ROWS[:8], summed, bf16=bf16)
    model = make(dtype=weights)
    with hidden_states(model) as source:
        found = gradients(model, ROWS[:8], partial(causal_lm_loss, source=source), bf16=bf16)
    epsilon = torch.finfo(weights if not bf16 else torch.bfloat16).eps
    assert (found - truth).norm() <= (usual - truth).norm() + epsilon / 4 * truth.norm()
    assert 0 < (usual - truth).norm() < 0.1 * truth.norm()


# --- frozen ----------------------------------------------------------------------------------------------------------


def test_a_frozen_head():
    def make():
        model = tiny.model("llama")
        model.lm_head.requires_grad_(False)
        return model

    assert compare(make) < EXACT


def test_a_frozen_decoder():
    def make():
        model = tiny.model("llama")
        model.model.requires_grad_(False)
        return model

    assert compare(make) < EXACT


# --- what the Trainer sees -------------------------------------------------------------------------------------------


def test_model_returns_one_logit_per_row_until_the_source_is_removed():
    model, spy = tiny.model("llama"), LossSpy()
    source = hidden_states(model)
    tiny.trainer(model, ROWS[:8], spy).train()
    source.remove()
    tiny.trainer(model, ROWS[:8], spy).train()
    assert [call.outputs["logits"].shape[1] for call in spy.calls] == [1, tiny.pad(ROWS[:8])["labels"].shape[1]]


def test_generation_goes_on():
    """A model with hooks generates what it did without them."""
    model = tiny.model("llama").eval()
    ids = ROWS[0]["input_ids"][None]
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    hidden_states(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)


def test_two_losses_may_read_the_same_forward():
    model = tiny.model("llama")
    source = hidden_states(model)

    def both(outputs, labels, num_items_in_batch):
        losses = [causal_lm_loss(outputs, labels, num_items_in_batch, source=source) for _ in range(2)]
        return sum(losses) / 2

    found = tiny.gradient_of(tiny.trainer(model, ROWS[:8], both))
    expected = tiny.gradient_of(tiny.trainer(tiny.model("llama"), ROWS[:8], summed))
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)


def test_evaluation_between_steps():
    """The hooks hold what the latest forward left, whichever mode it ran in."""
    settings = {"eval_strategy": "steps", "eval_steps": 1, "eval_rows": ROWS[:5]}
    model = tiny.model("llama")
    loss = partial(causal_lm_loss, source=hidden_states(model))
    trainer, usual = (
        tiny.trainer(model, ROWS, loss, **settings),
        tiny.trainer(tiny.model("llama"), ROWS, summed, **settings),
    )
    torch.testing.assert_close(tiny.parameters_after(trainer), tiny.parameters_after(usual), rtol=0, atol=EXACT)
    assert tiny.logged(trainer, "eval_loss") == pytest.approx(tiny.logged(usual, "eval_loss"), abs=1e-6)


def test_a_trained_model_with_a_source_can_be_copied_and_saved(tmp_path):
    import copy
    import pickle

    model = tiny.model("llama")
    source = hidden_states(model)
    tiny.trainer(model, ROWS[:8], partial(causal_lm_loss, source=source)).train()
    copied = copy.deepcopy(model)
    ids = ROWS[0]["input_ids"][None]
    assert copied(input_ids=ids).logits.shape[1] == ids.shape[1]  # a plain model, as a teacher or an average is
    torch.testing.assert_close(copied(input_ids=ids).logits[:, -1:], model(input_ids=ids).logits, rtol=0, atol=1e-12)
    both, read = pickle.loads(pickle.dumps((model, source)))
    with pytest.raises(RuntimeError, match="or copied with its model"):
        causal_lm_loss(both(input_ids=ids), ids, source=read)
    assert repr(pickle.loads(pickle.dumps(source))) == repr(source) == "hidden_states(LlamaForCausalLM)"
    model.save_pretrained(tmp_path)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids).logits.shape[1] == ids.shape[1]


def test_a_model_that_rounds_its_logits():
    """As Mamba does, to float32 whatever it computes in: that is no other head."""
    model = tiny.model("llama")
    model.register_forward_hook(lambda model, args, output: type(output)(logits=output.logits.float()))
    ids = torch.arange(12).view(2, 6)
    expected = causal_lm_loss(model(input_ids=ids), ids)
    with hidden_states(model) as source:
        found = causal_lm_loss(model(input_ids=ids), ids, source=source)
    assert expected.dtype == torch.float32
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
