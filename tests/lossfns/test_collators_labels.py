"""Collators that change labels: decoder inputs of encoder-decoders, spans of question answering."""

import pickle

import pytest
import torch
import transformers

from lossfns.collators import count_sequences, with_extras
from lossfns.collators.labels import pack_spans, with_decoder_inputs
from tests import tiny
from tests.lossfns.cases import CASES, N, trainer, whisper

ROWS = tiny.lm_rows(4, prompt=False)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_decoder_inputs_equal_those_of_the_model(name):
    model = tiny.model(name)
    batch = with_decoder_inputs(tiny.pad, model)(ROWS)
    expected = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    assert torch.equal(batch["decoder_input_ids"], expected)


def test_decoder_inputs_of_whisper_which_has_no_method_for_them():
    from transformers.models.whisper.modeling_whisper import shift_tokens_right

    batch = with_decoder_inputs(tiny.pad, whisper())(ROWS)
    assert torch.equal(batch["decoder_input_ids"], shift_tokens_right(batch["labels"], tiny.PAD, 1))


def test_the_collator_does_not_hold_the_model():
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
def test_decoder_inputs_with_labels_in_a_dict(wrap):
    rows = [row | {"token_weights": torch.ones(len(row["labels"]))} for row in ROWS]
    model = tiny.model("bart")
    inside = wrap(with_decoder_inputs(tiny.pad, model))(rows)
    outside = with_decoder_inputs(wrap(tiny.pad), model)(rows)
    assert torch.equal(inside["decoder_input_ids"], outside["decoder_input_ids"])


def mbart():
    sizes = {
        f"{part}_{size}": 2 for part in ("encoder", "decoder") for size in ("layers", "attention_heads", "ffn_dim")
    }
    config = transformers.MBartConfig(vocab_size=16, d_model=8, decoder_start_token_id=2, **sizes)
    return transformers.MBartForConditionalGeneration(config)


def test_a_model_that_does_not_shift_its_labels_is_refused():
    """MBart starts with the language id at the end of the labels."""
    with pytest.raises(ValueError, match=r"MBart.*does not derive its decoder inputs.*use DataCollatorForSeq2Seq"):
        with_decoder_inputs(tiny.pad, mbart())


def test_a_model_without_a_start_token_is_refused():
    with pytest.raises(ValueError, match=r"config must have decoder_start_token_id.*got None and 0"):
        with_decoder_inputs(tiny.pad, tiny.model("llama"))


def shorter(rows):
    """Targets of another length than the sources."""
    return tiny.pad([row | {"labels": row["labels"][:-1]} for row in rows])


def test_bart_on_its_own_source_is_explained():
    case = CASES["bart"]._replace(collator=shorter)
    with pytest.raises(ValueError, match=r"the decoder saw 12 positions for 11 labels.*with_decoder_inputs"):
        trainer(case).train()


def test_bart_learns_another_gradient_without_decoder_inputs():
    """Where source and target have equal lengths, no error is possible, and BART learns to repeat its source."""
    rows = [row | {"labels": row["labels"].flip(0)} for row in CASES["bart"].rows]
    case = CASES["bart"]._replace(rows=rows)
    right, wrong = (tiny.gradient_of(trainer(one)) for one in (case, case._replace(collator=tiny.pad)))
    assert (right - wrong).abs().max() > 1e-3


def test_positions_outside_the_window_are_ignored():
    rows = [
        {"input_ids": [5, 6, 7], "start_positions": start, "end_positions": end}
        for start, end in ((0, 2), (1, 3), (-1, 9))
    ]
    batch = pack_spans(torch.utils.data.default_collate)(
        [{name: torch.tensor(value) for name, value in row.items()} for row in rows]
    )
    assert batch["labels"].tolist() == [[0, 2], [1, N], [N, N]]
    assert batch.keys() == {"input_ids", "labels"}
    assert pickle.loads(pickle.dumps(pack_spans(tiny.pad))) == pack_spans(tiny.pad)


def test_missing_positions_are_refused():
    with pytest.raises(ValueError, match="start_positions and end_positions"):
        pack_spans(tiny.pad)([{"input_ids": torch.tensor([5, 6])}])
