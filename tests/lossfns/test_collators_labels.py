"""Encoder-decoders: the inputs of the decoder, and what happens without them."""

import pickle

import pytest
import torch
import transformers

from lossfns import seq2seq_lm_loss
from lossfns.collators import count_sequences, with_extras
from lossfns.collators.labels import with_decoder_inputs
from tests import tiny
from tests.lossfns.cases import CASES, N, trainer, whisper

ROWS = tiny.lm_rows(4, prompt=False)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_they_are_what_the_model_makes(name):
    model = tiny.model(name)
    batch = with_decoder_inputs(tiny.pad, model)(ROWS)
    expected = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    assert torch.equal(batch["decoder_input_ids"], expected)


def test_whisper_has_no_method_and_shifts_the_same():
    from transformers.models.whisper.modeling_whisper import shift_tokens_right

    batch = with_decoder_inputs(tiny.pad, whisper())(ROWS)
    assert torch.equal(batch["decoder_input_ids"], shift_tokens_right(batch["labels"], tiny.PAD, 1))


def test_they_do_not_carry_the_model():
    collator = with_decoder_inputs(tiny.pad, tiny.model("t5"))
    assert len(pickle.dumps(collator)) < 500
    assert pickle.loads(pickle.dumps(collator)) == collator


@pytest.mark.parametrize(
    "wrap",
    [
        lambda collator: count_sequences(collator, shift=0),
        lambda collator: with_extras(collator, ["token_weights"], shift=0),
    ],
)
def test_labels_in_a_dict(wrap):
    rows = [row | {"token_weights": torch.ones(len(row["labels"]))} for row in ROWS]
    model = tiny.model("bart")
    inside = wrap(with_decoder_inputs(tiny.pad, model))(rows)
    outside = with_decoder_inputs(wrap(tiny.pad), model)(rows)
    assert torch.equal(inside["decoder_input_ids"], outside["decoder_input_ids"])


def mbart():
    config = transformers.MBartConfig(
        vocab_size=16,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        decoder_start_token_id=2,
    )
    return transformers.MBartForConditionalGeneration(config)


def test_a_model_that_shifts_in_its_own_way():
    """MBart begins with the language at the end of the labels."""
    with pytest.raises(ValueError, match=r"MBart.*a way of its own; use DataCollatorForSeq2Seq"):
        with_decoder_inputs(tiny.pad, mbart())


def test_a_model_without_a_first_token():
    with pytest.raises(ValueError, match=r"config.decoder_start_token_id.*got None and 0"):
        with_decoder_inputs(tiny.pad, tiny.model("llama"))


# --- without them ----------------------------------------------------------------------------------------------------


def shorter(rows):
    """Targets of another length than the sources."""
    return tiny.pad([row | {"labels": row["labels"][:-1]} for row in rows])


def test_bart_on_its_own_source_is_explained():
    case = CASES["bart"]._replace(collator=shorter)
    with pytest.raises(ValueError, match=r"the decoder saw 12 positions for 11 labels.*with_decoder_inputs"):
        trainer(case).train()


def test_what_the_error_prevents():
    """Of equal lengths nobody can tell, and BART learns to repeat what it sees."""
    rows = [row | {"labels": row["labels"].flip(0)} for row in CASES["bart"].rows]
    case = CASES["bart"]._replace(rows=rows)
    right, wrong = (tiny.gradient_of(trainer(one)) for one in (case, case._replace(collator=tiny.pad)))
    assert (right - wrong).abs().max() > 1e-3


def test_logits_of_another_length():
    with pytest.raises(ValueError, match="3 positions for 2 labels"):
        seq2seq_lm_loss(torch.zeros(1, 3, 4), torch.tensor([[1, N]]))
