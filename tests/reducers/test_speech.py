"""Best paths of speech models, against paths written out."""

import pytest
import torch

from reducers import ctc_greedy

from .inputs import N


def test_best_paths_of_frames():
    paths = [[0, 5, 5, 0, 5, 3], [1, 1, 1, 0, 0, 0], [0] * 6, [2, 0, 2, 2, 4, 4]]
    logits = torch.nn.functional.one_hot(torch.tensor(paths), 7).float()
    logits[1, 4:] = N  # frames added across ranks
    found = ctc_greedy(logits, None)["generated"]
    assert [[place for place in row if place != N] for row in found.tolist()] == [[5, 5, 3], [1], [], [2, 2, 4]]
    with pytest.raises(TypeError, match=r"input_lengths must be integers, not torch.float32"):
        ctc_greedy(logits, {"input_lengths": torch.tensor([2.5, 6, 6, 3])})
    cut = ctc_greedy(logits, {"input_lengths": torch.tensor([2, 6, 6, 3])}, blank=0)["generated"]
    assert [[place for place in row if place != N] for row in cut.tolist()] == [[5], [1], [], [2, 2]]
