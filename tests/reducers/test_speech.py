"""Best paths of speech models, against paths written out."""

import pytest
import torch

from reducers import ctc_greedy

from .inputs import N


def test_best_paths_of_frames():
    paths = [[0, 5, 5, 0, 5, 3], [1, 1, 1, 0, 0, 0], [0] * 6, [2, 0, 2, 2, 4, 4]]
    logits = torch.nn.functional.one_hot(torch.tensor(paths), 7).float()
    logits[1, 4:] = N  # frames added across ranks

    def ids(labels, **options):
        rows = ctc_greedy(logits, labels, **options)["generated"].tolist()
        assert all(row == sorted(row, key=lambda label: label == N) for row in rows)  # -100 comes last
        return [[label for label in row if label != N] for row in rows]

    assert ids(None) == [[5, 5, 3], [1], [], [2, 2, 4]]
    assert ids({"input_lengths": torch.tensor([2, 6, 6, 3])}, blank=0) == [[5], [1], [], [2, 2]]
    with pytest.raises(TypeError, match=r"input_lengths must be integers.*torch.float32"):
        ids({"input_lengths": torch.tensor([2.5, 6, 6, 3])})
