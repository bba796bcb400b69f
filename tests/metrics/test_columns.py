"""The names of the columns are a contract: what the reducers return is what the metrics read."""

from functools import partial

import pytest
import torch

from metrics import language, language_modeling, question_answering
from metrics._core.keys import find
from reducers import argmax, calibration_bins, combine, label_rank, sample_sums, spans, text_lengths

from .evaluations import evaluation

LOGITS = torch.randn(3, 6, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[1, 2, 3, 4, 5, 6], [-100, 2, 9, 4, -100, -100], [-100] * 6])


def test_reducers_of_language_return_what_the_metrics_read_and_nothing_else():
    emitted = sample_sums(LOGITS, LABELS, shift=1, top_k=(2, 5), entropy=True) | label_rank(LOGITS, LABELS, shift=1)
    lengths = {"bytes": torch.arange(11), "characters": torch.arange(11)}
    emitted |= text_lengths(LOGITS, LABELS, lengths=lengths, shift=1) | calibration_bins(LOGITS, LABELS, shift=1)
    assert {find(name, language.COLUMNS) for name in emitted} == set(language.COLUMNS)
    assert set(sample_sums(LOGITS, LABELS, shift=1)) == set(language.NEEDED)


@pytest.mark.parametrize("nested", [False, True])
def test_the_options_named_in_the_message_bring_the_scores(nested):
    reducer = partial(sample_sums, shift=1, top_k=5, entropy=True)
    reducer = combine(ids=partial(argmax, shift=1), sums=reducer) if nested else reducer
    scores = language_modeling()(evaluation(reducer(LOGITS, LABELS), LABELS))
    predicted = [LOGITS[0, place].log_softmax(0) for place in range(5)] + [
        LOGITS[1, place].log_softmax(0) for place in range(3)
    ]
    targets = [2, 3, 4, 5, 6, 2, 9, 4]
    pairs = list(zip(predicted, targets, strict=True))
    expected = {
        "nll_loss": -sum(float(p[y]) for p, y in pairs) / 8,
        "token_accuracy": sum(int(p.argmax()) == y for p, y in pairs) / 8,
        "top_5_accuracy": sum(y in p.topk(5).indices.tolist() for p, y in pairs) / 8,
        "entropy": sum(float(-(p.exp() * p).sum()) for p, _ in pairs) / 8,
        "sequence_accuracy": 0.0,
        "tokens": 8.0,
        "samples": 3.0,
    }
    assert {key: scores[key] for key in expected} == pytest.approx(expected, rel=1e-12)


def test_spans_returns_what_extractive_qa_reads_and_nothing_else():
    assert set(spans((LOGITS[..., 0], LOGITS[..., 1]), None)) == set(question_answering.COLUMNS)
