"""The real models and texts exist, are what they claim to be, and an error says how to install them."""

from importlib import metadata

import numpy as np
import pytest
import torch

from benchmarks import assets


@pytest.fixture(scope="module")
def ratings():
    return assets.rated_texts()


def test_smollm2_continues_a_sentence():
    model, tokenizer = assets.smollm2()
    assert model.config.model_type == "llama"
    assert model.config.vocab_size == len(tokenizer) == 49_152
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    # The Trainer refuses a model that still calls itself quantised.
    assert getattr(model, "hf_quantizer", None) is None
    ids = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        last = model(**ids).logits[0, -1]
    assert tokenizer.decode(last.argmax()) == " Paris"


def test_minilm_is_an_encoder():
    from transformers import AutoModel

    model = AutoModel.from_pretrained(assets.minilm_path(), local_files_only=True)
    assert model.config.hidden_size == 384


def test_speeches_are_in_order():
    speeches = assets.sotu_speeches()
    assert len(speeches) == 249
    assert (speeches[0].year, speeches[-1].year) == (1790, 2026)
    assert speeches[0].text.split()[:2] == ["Fellow-Citizens", "of"]
    assert [speech.year for speech in speeches] == sorted(speech.year for speech in speeches)
    assert {speech.party for speech in speeches} >= {"Democratic", "Republican", "Whig"}


def test_texts_have_their_own_ratings(ratings):
    """The mean and deviation that the authors published are those of the scores read for the same text."""
    assert len(ratings) == 10_605 + 3_708 + 5_190
    for rated in ratings:
        assert rated.mean == pytest.approx(np.mean(rated.ratings), abs=1e-6)
        assert rated.sd == pytest.approx(np.std(rated.ratings), abs=1e-5)
    assert all(len(rated.ratings) >= 15 for rated in ratings)


def test_texts_are_matched_by_name_and_not_by_line(ratings):
    """From the 263rd product on, the files of texts and of ratings list the sentences in different orders."""
    means = {rated.text: rated.mean for rated in ratings if rated.source == "amazonReviewSnippets"}
    # The means of these two in the file of texts; matched by line they would be other sentences'.
    wrong_device = "i made the mistake of thinking i could easily manage my mp3 library with this device."
    assert means[wrong_device] == pytest.approx(-1.8)
    tracks = "i initially loaded about 3700 tracks with the intent of ripping the majority of my remaining cds to mp3."
    assert means[tracks] == pytest.approx(0.2)


def test_treebank_has_a_tag_for_each_token():
    sentences = assets.conllu_sentences()
    assert len(sentences) == 4_851
    assert all(len(sentence.tokens) == len(sentence.tags) > 0 for sentence in sentences)
    assert len({tag for sentence in sentences for tag in sentence.tags}) == 14
    assert sentences[0].tokens[:2] == ("Burda", "da")


def test_chunks_are_aligned_with_those_of_a_chunker():
    sentences = assets.chunked_sentences()
    assert len(sentences) == len({sentence.tokens for sentence in sentences}) == 40
    assert sentences[0].tokens[:3] == ("Rockwell", "International", "Corp.")
    pairs = [pair for sentence in sentences for pair in zip(sentence.chunks, sentence.found, strict=True)]
    assert len(pairs) == 961
    assert sum(chunk == found for chunk, found in pairs) == 808  # accuracy 84.08 %, says conlleval
    assert assets.conlleval().startswith("#!/usr/bin/perl")


@pytest.mark.parametrize(("size", "the"), [(151_643, 785), (248_044, 760)])
def test_qwen_ids_fill_the_vocabulary(size, the):
    ids = assets.qwen_token_ids("The labels are real text. " + assets.english_text()[:20_000], vocabulary_size=size)
    assert ids[0] == the
    assert size // 4 < max(ids) < size


def test_error_for_a_missing_package_or_archive_names_the_command(monkeypatch, tmp_path):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(FileNotFoundError, match=r"'sotu' is not installed.*make data"):
        assets.sotu_speeches()
    monkeypatch.setattr(assets, "DATA", tmp_path)
    with pytest.raises(FileNotFoundError, match="make data"):
        assets.conllu_sentences()
