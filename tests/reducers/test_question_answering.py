"""Spans of question answering, against a search over all of them."""

import math

import pytest
import torch

from reducers import spans

from .inputs import N, normal


@pytest.mark.parametrize(("top_n", "max_length"), [(1, 1), (5, 3), (20, 30), (60, 4)])
def test_spans_are_the_best_of_an_exhaustive_search(top_n, max_length):
    start, end = normal(4, 7), normal(4, 7, seed=1)
    found = spans((start, end, (normal(2, 2),)), None, top_n=top_n, max_length=max_length)
    for row in range(4):
        every = [(float(start[row, a] + end[row, b]), a, b) for a in range(7) for b in range(a, min(7, a + max_length))]
        best = sorted(every, key=lambda span: (-span[0], *span[1:]))[:top_n]
        kept = len(best)
        assert found["starts"][row].tolist() == [a for _, a, _ in best] + [N] * (top_n - kept)
        assert found["ends"][row].tolist() == [b for _, _, b in best] + [N] * (top_n - kept)
        assert found["scores"][row, :kept].tolist() == pytest.approx([score for score, _, _ in best])
    assert found["null_scores"].tolist() == (start[:, 0] + end[:, 0]).tolist()
    assert found["starts"].dtype == torch.int32


def test_spans_without_a_score_are_left_out():
    start, end = torch.tensor([[math.nan, 3.0, 1.0], [math.nan] * 3]), torch.tensor([[9.0, math.nan, 2.0], [0.0] * 3])
    found = spans((start, end), None, top_n=3)
    assert found["starts"].tolist() == [[1, 2, N], [N] * 3]
    assert found["ends"].tolist() == [[2, 2, N], [N] * 3]
    assert found["scores"].tolist() == [[5.0, 3.0, 0.0], [0.0] * 3]
    assert found["null_scores"].isnan().all()
