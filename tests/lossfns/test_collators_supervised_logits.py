"""`keep_supervised_logits`: fewer logits, the same numbers."""

import pickle
from functools import partial

import pytest
import torch

from lossfns import causal_lm_loss
from lossfns.collators.labels import keep_supervised_logits
from reducers import sample_sums
from tests import tiny
from tests.contract.probes import LossSpy, summed
from tests.lossfns.core.test_hidden_training import Stream, unsupervised

EXACT = 1e-12


def prompted(row):
    """With the first five tokens as a prompt: whole columns of a batch predict nothing."""
    return row | {"labels": row["labels"].masked_fill(torch.arange(len(row["labels"])) < 5, tiny.IGNORED)}


ROWS = [prompted(row) for row in tiny.lm_rows(24)]


@pytest.mark.parametrize("pad", [tiny.pad, tiny.pad_left], ids=["right", "left"])
def test_only_supervised_logits_are_kept(pad):
    """Each position before a label of any row, and the last one, by a loop."""
    whole, batch = pad(ROWS[:8]), keep_supervised_logits(pad)(ROWS[:8])
    labels, length = whole["labels"].tolist(), whole["labels"].shape[1]
    kept = [at for at in range(length - 1) if any(row[at + 1] != -100 for row in labels)]
    assert batch["logits_to_keep"].tolist() == [*kept, length - 1]
    assert batch["labels"].tolist() == [[-100, *(row[at + 1] for at in kept)] for row in labels]
    assert batch["labels"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], whole["input_ids"])
    assert len(kept) + 1 < length


def test_nothing_supervised():
    batch = keep_supervised_logits(tiny.pad)(unsupervised(ROWS[:4]))
    assert batch["labels"].tolist() == [[-100]] * 4
    assert batch["logits_to_keep"].tolist() == [batch["input_ids"].shape[1] - 1]


def test_first_label_is_not_predicted():
    collate = keep_supervised_logits(lambda features: {"labels": torch.tensor(features)})
    assert collate([[5, -100, 7]])["labels"].tolist() == [[-100, 7]]
    assert collate([[5, -100, 7]])["logits_to_keep"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "pad"),
    [("llama", tiny.pad), ("gemma2", tiny.pad), ("gpt2", tiny.pad), ("llama", tiny.pad_left), ("gpt2", tiny.pad_left)],
)
@pytest.mark.parametrize("own", [False, True], ids=["our loss", "the model's own"])
def test_training(name, pad, own):
    """Steps of two micro-batches each, one of them without a label, end where all logits do.

    The model's own loss is computed in float32.
    """
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    rows = [*ROWS[:20], *unsupervised(ROWS[20:])]
    usual = tiny.trainer(tiny.model(name), rows, None if own else summed, collator=pad, **settings)
    trainer = tiny.trainer(
        tiny.model(name), rows, None if own else causal_lm_loss, collator=keep_supervised_logits(pad), **settings
    )
    found, expected = tiny.parameters_after(trainer), tiny.parameters_after(usual)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if own else EXACT)


def test_the_logits_are_fewer_and_the_count_is_right():
    """GPT-2's class name makes the Trainer count first labels, and those are gone."""
    spy = LossSpy()
    tiny.trainer(tiny.model("gpt2"), ROWS[:8], spy, collator=keep_supervised_logits(tiny.pad)).train()
    (call,) = spy.calls
    assert call.outputs["logits"].shape[:2] == call.labels.shape
    assert call.labels.shape[1] < tiny.pad(ROWS[:8])["labels"].shape[1] - 2
    rows = tiny.lm_rows(8, prompt=False)
    tiny.trainer(tiny.model("gpt2"), rows, spy, collator=keep_supervised_logits(tiny.pad)).train()
    assert spy.counts == [tiny.count(ROWS[:8]), tiny.count(rows, shift=1)]


def test_evaluation():
    reducer = partial(sample_sums, shift=1, top_k=2)

    def predict(collator):
        trainer = tiny.trainer(tiny.model("llama"), None, causal_lm_loss, reducer=reducer, collator=collator)
        return trainer.predict(ROWS[:10]).predictions

    found, expected = predict(keep_supervised_logits(tiny.pad)), predict(tiny.pad)
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name] == pytest.approx(expected[name], abs=EXACT)


def test_cutting_labels_without_the_first_column_is_found():
    """Broken: labels at their own kept positions, as one might cut them, are other targets."""

    def broken(rows):
        batch = keep_supervised_logits(prompt_in_the_middle)(rows)
        return batch | {"labels": prompt_in_the_middle(rows)["labels"][:, batch["logits_to_keep"]]}

    def prompt_in_the_middle(rows):
        batch = tiny.pad(rows)
        batch["labels"][:, 7:9] = tiny.IGNORED
        return batch

    right = keep_supervised_logits(prompt_in_the_middle)
    expected, found, wrong = (
        tiny.gradient_of(tiny.trainer(tiny.model("llama"), ROWS[:8], causal_lm_loss, collator=collator))
        for collator in (prompt_in_the_middle, right, broken)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)
    assert (wrong - expected).norm() > 0.1 * expected.norm()


def test_collator_can_be_pickled():
    collate = pickle.loads(pickle.dumps(keep_supervised_logits(tiny.pad)))
    assert collate == keep_supervised_logits(tiny.pad)
    assert "pad" in repr(collate)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dispatch", [None, True])
def test_dispatched_batches(dispatch, workers):
    """accelerate would cut the index as if it were rows; `None` is its default, which dispatches streams."""
    trainer = tiny.trainer(
        tiny.model("llama"),
        Stream(),
        causal_lm_loss,
        collator=keep_supervised_logits(tiny.pad),
        max_steps=1,
        dataloader_num_workers=workers,
        accelerator_config={"dispatch_batches": dispatch},
    )
    with pytest.raises(ValueError, match="does not work with dispatch_batches"):
        trainer.train()


def test_streams_that_are_not_dispatched():
    settings = {"max_steps": 3, "accelerator_config": {"dispatch_batches": False}}
    expected = tiny.parameters_after(tiny.trainer(tiny.model("llama"), Stream(), causal_lm_loss, **settings))
    trainer = tiny.trainer(
        tiny.model("llama"), Stream(), causal_lm_loss, collator=keep_supervised_logits(tiny.pad), **settings
    )
    torch.testing.assert_close(tiny.parameters_after(trainer), expected, rtol=0, atol=EXACT)


def columns(kept, rows):
    """A batch of eight positions of which `kept` predict."""
    ids = torch.stack([row["input_ids"].repeat(3)[:8] for row in rows])
    labels = ids.masked_fill(torch.arange(8) < 9 - kept, tiny.IGNORED)
    return keep_supervised_logits(lambda rows: {"input_ids": ids, "labels": labels})(rows)


@pytest.mark.parametrize("kept", range(1, 8))
def test_data_parallel(kept):
    """However many positions the replicas share out, no number comes of it; where torch can gather, with the reason."""
    error, message = (
        (ValueError, "does not survive DataParallel") if kept % 2 == 0 else ((ValueError, RuntimeError), "")
    )
    trainer = tiny.trainer(
        tiny.model("gpt2"),
        ROWS[:8],
        causal_lm_loss,
        collator=partial(columns, kept),
        replicas=2,
        per_device_train_batch_size=4,
    )
    with pytest.raises(error, match=message):
        trainer.train()


def test_logits_that_are_chosen_twice():
    with pytest.raises(ValueError, match="must not contain logits_to_keep"):
        keep_supervised_logits(keep_supervised_logits(tiny.pad))(ROWS[:2])


@pytest.mark.parametrize("labels", [None, torch.zeros(2), torch.zeros(2, 3)])
def test_no_labels_to_cut(labels):
    with pytest.raises(ValueError, match="must return integer labels"):
        keep_supervised_logits(lambda features: {"labels": labels})([])
