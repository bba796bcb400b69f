"""Ranks of labels, probabilities of answers, and embeddings, against loops."""

import math

import pytest
import torch

from reducers import answer_logits, embeddings, label_rank
from tests import oracle

from .inputs import LABELS, B, N, S, V, normal


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_ranks_are_those_of_a_sort(shift, dtype):
    logits = normal(B, S, V).round().to(dtype)  # with many ties
    found = label_rank((torch.tensor(0.5), logits), LABELS, shift=shift)["ranks"]
    expected = torch.full_like(LABELS, N)
    for place, row in oracle.pairs(logits, LABELS, shift=shift):
        expected[place] = oracle.ranking(logits[row]).index(int(LABELS[place]))
    assert found.tolist() == expected.tolist()
    assert found.dtype == torch.int32


@pytest.mark.parametrize("side", ["left", "right"])
def test_answers_are_read_where_the_first_label_is_predicted(side):
    rows = [[N, N, 7, 5], [N, 3], [N, N, N, 9, 1]]
    logits = [normal(len(row), V, seed=len(row)) for row in rows]
    width = max(map(len, rows))
    labels = torch.full((4, width), N)  # the last row has no label
    padded = torch.zeros(4, width, V, dtype=torch.float64)
    for place, (row, x) in enumerate(zip(rows, logits, strict=True)):
        positions = slice(width - len(row), width) if side == "left" else slice(len(row))
        labels[place, positions], padded[place, positions] = torch.tensor(row), x
    found = answer_logits(padded, labels, token_ids=[9, 3, 7], shift=1)
    firsts = [x[next(i for i, label in enumerate(row) if label != N) - 1] for row, x in zip(rows, logits, strict=True)]
    for place, x in enumerate(firsts):
        weights = [math.exp(float(x[token])) for token in (9, 3, 7)]
        assert found["probabilities"][place].tolist() == pytest.approx([w / sum(weights) for w in weights], rel=1e-12)
        assert int(found["ids"][place]) == max(range(3), key=weights.__getitem__)
    assert found["answers"].tolist() == [2, 1, 0, N]
    assert (found["ids"][3].item(), found["probabilities"][3].tolist()) == (N, [0.0] * 3)


def test_first_labels_that_are_not_among_the_answers():
    logits, labels = normal(1, 3, V), torch.tensor([[N, 4, 9]])
    assert answer_logits(logits, labels, token_ids=[9, 3], shift=1)["answers"].tolist() == [N]


def test_no_answer_is_predicted_where_a_logit_is_nan():
    logits = normal(2, 3, V)
    logits[0, 1] = torch.nan
    answers = answer_logits(logits, torch.tensor([[N, N, 2], [N, N, 2]]), token_ids=[2, 3], shift=1)
    assert answers["ids"][0] == N != answers["ids"][1]


def test_embeddings_are_vectors_of_length_one():
    first, second = normal(3, 4), normal(3, 4, seed=1, dtype=torch.float16)
    found = embeddings((first, second), None, select=lambda outputs: {"queries": outputs[0], "documents": outputs[1]})
    assert torch.allclose(found["queries"], first / first.square().sum(1, keepdim=True).sqrt(), rtol=1e-12)
    assert found["documents"].dtype == torch.float32
    assert torch.equal(embeddings(first, None, select=lambda outputs: outputs, unit_length=False), first)
