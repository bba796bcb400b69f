"""The losses in the stock Trainer: the parameters after three steps are those of plain torch over one big batch.

Each step takes all eight rows, so that the Trainer's shuffling only changes which of them share a micro-batch.
"""

import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from lossfns import causal_lm_loss, focal, masked_lm_loss, seq2seq_lm_loss, smoothed_cross_entropy, weighted_sum, z_loss
from lossfns.collators.labels import mask_first_label
from tests import oracle, tiny
from tests.contract.probes import COMPILES, skip_unless_counted

ROWS = tiny.lm_rows(8)


def steps(accumulation: int, **changes):
    """Three optimizer steps of eight rows, each in `accumulation` micro-batches."""
    return {
        "num_train_epochs": oracle.STEPS,
        "per_device_train_batch_size": 8 // accumulation,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": oracle.LEARNING_RATE,
    } | changes


def by_hand(model, rows=ROWS, **options):
    return oracle.parameters_by_hand(model, rows, **options)


def assert_equal_parameters(found, expected, atol=1e-12):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=name)


def trained(model, rows=ROWS, loss=causal_lm_loss, *, accumulation=1, **changes):
    return tiny.parameters_after(tiny.trainer(model, rows, loss, **steps(accumulation), **changes))


# --- accumulation ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected():
    return by_hand(tiny.model("llama"))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_accumulation_is_one_big_batch(expected, accumulation, overwrite):
    loss = partial(causal_lm_loss, overwrite_logits=overwrite)
    assert_equal_parameters(trained(tiny.model("llama"), loss=loss, accumulation=accumulation), expected)


def test_unequal_counts_reveal_a_mean_of_means(expected):
    counts = {tiny.count(ROWS[first : first + 2], shift=1) for first in range(0, 8, 2)}
    assert len(counts) > 2
    with pytest.raises(AssertionError):
        assert_equal_parameters(by_hand(tiny.model("llama"), windows=4), expected)

    def mean_of_the_batch(outputs, labels, num_items_in_batch=None):
        return causal_lm_loss(outputs, labels)

    with pytest.raises(AssertionError):
        assert_equal_parameters(trained(tiny.model("llama"), loss=mean_of_the_batch, accumulation=4), expected)


def test_other_terms_accumulate_too():
    term = weighted_sum((1.0, partial(focal, gamma=1.5)), (0.5, smoothed_cross_entropy), (1e-2, z_loss))
    loss = partial(causal_lm_loss, term=term)
    whole = trained(tiny.model("llama"), loss=loss)
    assert_equal_parameters(trained(tiny.model("llama"), loss=loss, accumulation=4), whole)
    assert pickle.loads(pickle.dumps(loss)).keywords["term"].terms


def test_extras_and_shift_labels_travel_with_the_labels():
    """A dict of labels keeps its count by the `shift_labels` beside it (contract 6)."""
    skip_unless_counted()

    def weighted(log_prob, token_weights):
        return -log_prob * token_weights

    def collate(rows):
        batch = tiny.pad(rows)
        ids = batch["labels"]
        return batch | {
            "labels": {"labels": ids, "token_weights": torch.full(ids.shape, 1.0)},
            "shift_labels": ids[:, 1:],
        }

    loss = partial(causal_lm_loss, term=weighted)
    found = trained(tiny.model("llama"), loss=loss, accumulation=4, collator=collate, label_names=["labels"])
    assert_equal_parameters(found, by_hand(tiny.model("llama")))


@pytest.mark.parametrize("change", ["left", "wide", "order", "reversed"])
def test_padding_and_order_change_nothing(expected, change):
    collator = {"left": left, "wide": wide}.get(change, tiny.pad)
    rows = ROWS[::-1] if change == "reversed" else ROWS
    seed = 7 if change == "order" else 42
    found = trained(tiny.model("llama"), rows, accumulation=2, collator=collator, seed=seed)
    assert_equal_parameters(found, expected, 1e-10)


def left(rows):
    """Padding before the text, with the positions that the text had without it."""
    batch = tiny.pad_left(rows)
    return batch | {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def wide(rows):
    """Three more columns of padding."""
    batch = tiny.pad(rows)
    fill = {"labels": tiny.IGNORED}
    return {name: F.pad(value, (0, 3), value=fill.get(name, 0)) for name, value in batch.items()}


# --- nothing to learn from -------------------------------------------------------------------------------------------


class InOrder(torch.utils.data.IterableDataset):
    """Rows that the Trainer does not shuffle."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_window_without_labels_is_followed_by_a_sound_step(dtype):
    """The first window has no label: no change, a loss of 0, and the second is what it would have been alone."""
    nothing = [row | {"labels": torch.full_like(row["labels"], tiny.IGNORED)} for row in ROWS]
    settings = steps(2) | {"max_steps": 2}
    trainer = tiny.trainer(tiny.model("gpt2", dtype=dtype), InOrder(nothing + ROWS), causal_lm_loss, **settings)
    found = tiny.parameters_after(trainer)
    settings["max_steps"] = 1
    alone = tiny.trainer(tiny.model("gpt2", dtype=dtype), InOrder(ROWS), causal_lm_loss, **settings)
    assert_equal_parameters(found, tiny.parameters_after(alone), atol=0)
    first, second = tiny.logged(trainer)
    assert first == 0.0
    assert second > 1.0


# --- families --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config"), [("llama", {}), ("qwen2", {}), ("mixtral", {"output_router_logits": True})]
)
def test_causal_families(name, config):
    found = trained(tiny.model(name, **config), accumulation=4)
    assert_equal_parameters(found, by_hand(tiny.model(name)))


def test_gpt2_needs_its_first_label_masked():
    """It is counted unshifted (contract 3): without the collator every step is too short."""
    rows = tiny.lm_rows(8, prompt=False)
    expected = by_hand(tiny.model("gpt2"), rows)
    collator = mask_first_label(tiny.pad)
    assert_equal_parameters(trained(tiny.model("gpt2"), rows, accumulation=4, collator=collator), expected)
    with pytest.raises(AssertionError):
        assert_equal_parameters(trained(tiny.model("gpt2"), rows, accumulation=4), expected)
    assert pickle.loads(pickle.dumps(collator))(rows[:2])["labels"][:, 0].tolist() == [tiny.IGNORED] * 2


def test_mask_first_label_leaves_the_batch_alone():
    made = tiny.pad(tiny.lm_rows(2, prompt=False))
    before = made["labels"].clone()
    mask_first_label(lambda rows: made)([])
    assert made["labels"].equal(before)
    with pytest.raises(ValueError, match=r"integer labels of shape \(batch, sequence\), got NoneType"):
        mask_first_label(lambda rows: {})([])
    with pytest.raises(ValueError, match=r"got torch.int64 of shape \(4,\)"):
        mask_first_label(lambda rows: {"labels": torch.zeros(4, dtype=torch.long)})([])


def test_bert_as_a_masked_language_model():
    rows = tiny.masked_rows(8)
    found = trained(tiny.model("bert_mlm"), rows, masked_lm_loss, accumulation=4)
    assert_equal_parameters(found, by_hand(tiny.model("bert_mlm"), rows, shift=0))


def test_t5_with_decoder_inputs():
    found = trained(tiny.model("t5"), ROWS, seq2seq_lm_loss, accumulation=4, collator=tiny.pad_seq2seq)
    assert_equal_parameters(found, by_hand(tiny.model("t5"), shift=0, collator=tiny.pad_seq2seq))


# --- ways to train ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
def test_data_parallel(expected, accumulation):
    """Two replicas: the count is (2, 1), outputs and labels are gathered, the loss is averaged (contract 4)."""
    trainer = tiny.trainer(tiny.model("llama"), ROWS, causal_lm_loss, replicas=2, **steps(2 * accumulation))
    assert_equal_parameters(tiny.parameters_after(trainer), expected)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_bf16_model(overwrite):
    """Accumulation rounds every micro-batch; it stays within that of the exact step."""
    start = tiny.parameters(tiny.model("llama", dtype=torch.bfloat16))
    exact = by_hand(tiny.model("llama", dtype=torch.bfloat16).double())
    loss = partial(causal_lm_loss, overwrite_logits=overwrite)
    found = trained(tiny.model("llama", dtype=torch.bfloat16), loss=loss, accumulation=2)
    moved = torch.cat([(exact[name] - start[name]).flatten() for name in exact])
    missed = torch.cat([(found[name] - exact[name]).flatten() for name in exact])
    assert missed.norm() < 0.25 * moved.norm()


def test_mixed_precision():
    found = trained(tiny.model("llama", dtype=torch.float32), accumulation=2, bf16=True)
    start, exact = tiny.parameters(tiny.model("llama")), by_hand(tiny.model("llama"))
    moved = torch.cat([(exact[name] - start[name]).flatten() for name in exact])
    missed = torch.cat([(found[name] - exact[name]).flatten() for name in exact])
    assert missed.norm() < 0.1 * moved.norm()


def test_gradient_checkpointing(expected):
    model = tiny.model("llama")
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    trainer = tiny.trainer(model, ROWS, causal_lm_loss, **steps(2, **options))
    assert_equal_parameters(tiny.parameters_after(trainer), expected)


@COMPILES
def test_torch_compile_of_the_trainer(expected):
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    trainer = tiny.trainer(tiny.model("llama"), ROWS, causal_lm_loss, **steps(2, **options))
    trainer.train()
    model = getattr(trainer.model, "_orig_mod", trainer.model)
    assert_equal_parameters(tiny.parameters(model), expected)
    torch._dynamo.reset()


def test_evaluation_takes_the_loss_too():
    """With the count of the batch: the mean over the tokens of each batch."""
    trainer = tiny.trainer(tiny.model("llama"), None, partial(causal_lm_loss, overwrite_logits=True), eval_rows=ROWS)
    model, batch = tiny.model("llama"), tiny.pad(ROWS)
    labels = batch.pop("labels")
    logits = model.eval()(**batch).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-6)
