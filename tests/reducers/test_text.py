"""Lengths of texts and generated ids, against Python strings."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks import assets
from reducers import generated_ids, sample_sums, text_lengths, token_bytes

from .inputs import LABELS, B, N, S, V, normal

TEXTS = ["State of the Union: a naïve plan, 5 € — 日本語 and 🙂.", "  two  spaces\n\nand lines", "É" * 9]


def byte_level():
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer, trained.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        [assets.english_text()[:20_000], *TEXTS],
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<eos>")


def pieces():
    tokens = ["<pad>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    trained = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], byte_fallback=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    return PreTrainedTokenizerFast(tokenizer_object=trained, pad_token="<pad>")


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_tokens_have_the_length_of_their_text(make):
    tokenizer = make()
    table = token_bytes(tokenizer)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert int(table["bytes"][ids].sum()) == len(text.encode())
        assert int(table["characters"][ids].sum()) == len(text)
    assert int(table["bytes"][tokenizer.all_special_ids].sum()) == 0


@pytest.mark.parametrize(
    ("vocabulary", "lengths", "characters"),
    [
        ({"\u2581the": 0, "\u2581a": 1, "\u0120": 2}, [4, 2, 2], [4, 2, 1]),  # a Maltese letter among pieces
        ({"\u0120the": 0, "\u0120a": 1, "    ": 2, "<a\u2581b>": 3}, [4, 2, 4, 7], [4, 2, 4, 5]),  # added as text
    ],
    ids=["pieces", "byte-level"],
)
def test_marks_of_the_other_kind_of_vocabulary(vocabulary, lengths, characters):
    table = token_bytes(SimpleNamespace(get_vocab=lambda: vocabulary, all_special_ids=[]))
    assert {name: values.tolist() for name, values in table.items()} == {"bytes": lengths, "characters": characters}


def test_added_tokens_have_the_length_of_their_text():
    """Added tokens are matched as text, also where their letters stand for other bytes."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["\u00e9!"])
    ids = tokenizer("\u00e9!", add_special_tokens=False)["input_ids"]
    table = token_bytes(tokenizer)
    assert len(ids) == 1
    assert (int(table["bytes"][ids]), int(table["characters"][ids])) == (3, 2)


def test_tokens_of_a_real_vocabulary():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.DATA / "smollm2")
    table = token_bytes(tokenizer)
    ids = tokenizer(text := assets.english_text()[:50_000] + TEXTS[0])["input_ids"]
    assert int(table["bytes"][ids].sum()) == len(text.encode())
    assert int(table["characters"][ids].sum()) == len(text)


def test_wordpiece_vocabularies_are_rejected():
    trained = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match="must be byte-level"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=trained, unk_token="[UNK]"))


def test_lengths_count_where_the_sums_count():
    ones = {"bytes": torch.ones(V, dtype=torch.long), "characters": torch.arange(V)}
    for shift in (0, 1):
        found = text_lengths((), LABELS, lengths=ones, shift=shift)
        assert found["bytes"].tolist() == sample_sums(normal(B, S, V), LABELS, shift=shift)["tokens"].tolist()
    assert text_lengths((), {"labels": LABELS}, lengths=ones, shift=1)["characters"].tolist() == [25, 7, 26, 0]
    with pytest.raises(ValueError, match="label 12 has no length: the table has 9"):
        text_lengths((), LABELS, lengths={"bytes": torch.ones(9)}, shift=1)


def test_generated_ids_are_the_first_output():
    assert generated_ids((torch.tensor([[3, N]], dtype=torch.int32), normal(1)), None)["generated"].tolist() == [[3, N]]
