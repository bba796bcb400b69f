"""Ranks of labels, logits of answers and embeddings, against loops."""

import math
from functools import partial

import pytest
import torch

from lossfns import hidden_states
from reducers import answer_logits, confusion_counts, embeddings, label_rank
from tests import oracle, tiny

from .inputs import LABELS, N, normal


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_ranks_are_those_of_a_sort(shift, dtype):
    logits = normal(3, 5, 11).round().to(dtype)  # with many ties
    found = label_rank((torch.tensor(0.5), logits), LABELS, shift=shift)["ranks"]
    expected = torch.full_like(LABELS, N)
    for place, row in oracle.pairs(logits, LABELS, shift=shift):
        expected[place] = oracle.ranking(logits[row]).index(int(LABELS[place]))
    assert found.tolist() == expected.tolist()
    assert found.dtype == torch.int32


def test_ranks_without_logits():
    model = tiny.model("llama").eval()
    ids = torch.arange(4, 16).view(2, 6)
    with torch.no_grad():
        expected = label_rank(model(input_ids=ids).logits, ids, shift=1)["ranks"]
        with hidden_states(model) as source:
            found = label_rank(model(input_ids=ids).logits, ids, shift=1, source=source)["ranks"]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_answers_stand_where_the_first_label_is_predicted(side):
    rows = [[N, N, 7, 5], [N, 3], [N, N, N, 9, 1]]
    logits = [normal(len(row), 11, seed=len(row)) for row in rows]
    width = max(map(len, rows))
    labels = torch.full((4, width), N)
    padded = torch.zeros(4, width, 11, dtype=torch.float64)
    for place, (row, x) in enumerate(zip(rows, logits, strict=True)):
        there = slice(width - len(row), width) if side == "left" else slice(len(row))
        labels[place, there], padded[place, there] = torch.tensor(row), x
    found = answer_logits(padded, labels, token_ids=[9, 3, 7], shift=1)
    firsts = [x[next(i for i, label in enumerate(row) if label != N) - 1] for row, x in zip(rows, logits, strict=True)]
    for place, x in enumerate(firsts):
        weights = [math.exp(float(x[token])) for token in (9, 3, 7)]
        assert found["probabilities"][place].tolist() == pytest.approx([w / sum(weights) for w in weights], rel=1e-12)
        assert int(found["ids"][place]) == max(range(3), key=weights.__getitem__)
    assert found["answers"].tolist() == [2, 1, 0, N]
    assert (found["ids"][3].item(), found["probabilities"][3].tolist()) == (N, [0.0] * 3)  # a row without a label


@pytest.mark.parametrize(
    "reducer", [partial(answer_logits, token_ids=[7, 9, 4], shift=1), partial(confusion_counts, shift=1)]
)
def test_answers_and_counts_without_logits(reducer):
    model = tiny.model("llama").eval()
    ids = torch.arange(4, 16).view(2, 6)
    labels = ids.clone()
    labels[0, :3] = N
    with torch.no_grad():
        expected = reducer(model(input_ids=ids).logits, labels)
        with hidden_states(model) as source:
            found = reducer(model(input_ids=ids).logits, labels, source=source)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.allclose(found[name].double(), values.double(), rtol=1e-5, atol=0)


def test_an_answer_that_is_none_of_them():
    found = answer_logits(normal(1, 3, 11), torch.tensor([[N, 4, 9]]), token_ids=[9, 3], shift=1)
    assert found["answers"].tolist() == [N]
    for token_ids in ([], [11]):
        with pytest.raises(ValueError, match="first tokens of the answers"):
            answer_logits(normal(1, 3, 11), torch.tensor([[N, 4, 9]]), token_ids=token_ids, shift=1)


def test_vectors():
    first, second = normal(3, 4), normal(3, 4, seed=1, dtype=torch.float16)
    found = embeddings((first, second), None, select=lambda outputs: {"queries": outputs[0], "documents": outputs[1]})
    assert torch.allclose(found["queries"], first / first.square().sum(1, keepdim=True).sqrt(), rtol=1e-12)
    assert found["documents"].dtype == torch.float32
    assert torch.equal(embeddings(first, None, select=lambda outputs: outputs, unit_length=False), first)
    with pytest.raises(ValueError, match="Pool tokens"):
        embeddings(normal(2, 3, 4), None, select=lambda outputs: outputs)
