"""Scores of texts against sacrebleu, rouge_score, jiwer and a loop over SQuAD's rules."""

import sys
from functools import partial

import jiwer
import numpy as np
import pytest
import sacrebleu
from rouge_score import rouge_scorer
from torchmetrics.functional.text import squad

from metrics import bootstrap, build, compare, decode, summarization, text_match, transcription, translation

from .evaluations import evaluation, modes, sized

N, PAD = -100, 0


WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "ran", "over", "hill,", "and", "The", "Mat.", "slowly", "home"]


class Words:
    """A tokenizer of whole words; 0 is the pad token."""

    words = ("<pad>", *WORDS)

    def batch_decode(self, rows, skip_special_tokens=False):
        return [" ".join(self.words[place] for place in row if place or not skip_special_tokens) for row in rows]


TOKENIZER = Words()
GENERATOR = np.random.default_rng(0)


def padded(rows, value, width=14):
    return np.array([[*row, *[value] * (width - len(row))] for row in rows])


def made(count=12):
    """References, and generations that differ in some words; one of each is empty."""
    references = [GENERATOR.integers(1, len(Words.words), GENERATOR.integers(4, 13)).tolist() for _ in range(count)]
    other = partial(GENERATOR.integers, 1, len(WORDS) + 1)
    found = [[place if GENERATOR.random() < 0.8 else int(other()) for place in row] for row in references]
    found = [row[: max(1, len(row) - int(GENERATOR.integers(3)))] for row in found]
    found[3], references[5] = [], []
    return found, references


FOUND, REFERENCES = made()
PREDICTIONS, LABELS = {"generated": padded(FOUND, PAD)}, padded(REFERENCES, N)
TEXTS = TOKENIZER.batch_decode(FOUND), TOKENIZER.batch_decode(REFERENCES)


def expected_scores():
    texts, references = TEXTS
    words, letters = jiwer.process_words(references, texts), jiwer.process_characters(references, texts)
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"])
    rouge = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    match = squad(
        [{"id": str(place), "prediction_text": text} for place, text in enumerate(texts)],
        [{"id": str(place), "answers": {"text": [text], "answer_start": [0]}} for place, text in enumerate(references)],
    )
    return {
        "bleu": sacrebleu.corpus_bleu(texts, [references]).score,
        "chrf": sacrebleu.corpus_chrf(texts, [references]).score,
        "ter": sacrebleu.corpus_ter(texts, [references]).score,
        "wer": words.wer,
        "cer": letters.cer,
        "exact_match": float(match["exact_match"]) / 100,
        "token_f1": float(match["f1"]) / 100,
        **{name: np.mean([score[name].fmeasure for score in rouge]) for name in rouge[0]},
    }


def every_metric():
    return build(text_match(TOKENIZER), translation(TOKENIZER), summarization(TOKENIZER), transcription(TOKENIZER))


@pytest.mark.parametrize(
    ("make", "library"),
    [(translation, "sacrebleu.metrics"), (summarization, "rouge_score.rouge_scorer"), (transcription, "jiwer")],
)
def test_a_library_that_is_missing_is_named_before_the_first_evaluation(monkeypatch, make, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r"pip install 'lossfns\[text\]'"):
        make(TOKENIZER)


def test_decode_ignores_negative_ids_and_refuses_other_types():
    ids = np.array([[3, 5, N, N], [N, 1, PAD, PAD], [N] * 4])
    assert decode(ids, TOKENIZER) == ["cat sat", "the", ""]
    assert decode(ids[:0], TOKENIZER) == []


def test_every_mode_scores_as_the_libraries_do():
    for mode, scores in modes(sized(every_metric(), 12), PREDICTIONS, LABELS, (0, 1, 4, 12)).items():
        assert scores == pytest.approx(expected_scores(), rel=1e-6), mode


def test_a_mean_over_sentences_is_caught():
    each = [sacrebleu.sentence_bleu(text, [reference]).score for text, reference in zip(*TEXTS, strict=True)]
    assert abs(np.mean(each) - expected_scores()["bleu"]) > 1


def test_teacher_forced_texts_have_prefixed_keys():
    ids = padded(FOUND, PAD)
    scores = every_metric()(evaluation(ids, LABELS))
    assert all(key.startswith("teacher_forced_") for key in scores)
    # Ids behind the labels are no part of the text.
    kept = [row[: len(reference)] for row, reference in zip(ids.tolist(), REFERENCES, strict=True)]
    word_error = jiwer.process_words(TEXTS[1], TOKENIZER.batch_decode(kept, skip_special_tokens=True)).wer
    assert scores["teacher_forced_wer"] == pytest.approx(word_error, rel=1e-12)
    with pytest.raises(ValueError, match="the column 'generated'"):
        text_match(TOKENIZER)(evaluation(ids[:, :3], LABELS))


@pytest.mark.parametrize("rows", [0, 2])
def test_without_texts(rows):
    labels = np.full((rows, 3), N)
    scores = every_metric()(evaluation({"generated": labels}, labels))
    assert np.isnan([scores["wer"], scores["cer"]]).all()
    if not rows:
        assert np.isnan(list(scores.values())).all()
    else:
        assert scores["exact_match"] == 1.0
        assert scores["bleu"] == scores["rouge1"] == 0.0


def test_intervals_and_comparisons_of_texts():
    metric = translation(TOKENIZER)
    evaluated = evaluation(PREDICTIONS, LABELS)
    scores = build(metric, bootstrap(metric, n=200))(evaluated)
    assert scores["bleu_low"] < scores["bleu"] < scores["bleu_high"]
    right = evaluation({"generated": np.where(LABELS == N, PAD, LABELS)}, LABELS)
    assert compare(metric, right, evaluated, n=200)["chrf_p_value"] < 0.05
