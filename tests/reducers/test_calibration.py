"""Bins of confidence, against a loop."""

import math

import numpy as np
import pytest
import torch

from reducers import answer_logits, calibration_bins
from tests import oracle

from .inputs import LABELS, N, normal


def test_bins_of_confidence():
    logits = normal(3, 5, 11)
    found = calibration_bins(logits, LABELS, shift=1, bins=4)
    expected = {name: np.zeros((3, 4)) for name in found}
    for place, row in oracle.pairs(logits, LABELS, shift=1):
        p = logits[row].softmax(0)
        bin_of = min(3, math.ceil(float(p.max()) * 4) - 1)
        expected["bin_labels"][place[0], bin_of] += 1
        expected["bin_confidence"][place[0], bin_of] += float(p.max())
        expected["bin_correct"][place[0], bin_of] += int(p.argmax()) == int(LABELS[place])
    for name, sums in found.items():
        assert sums.numpy() == pytest.approx(expected[name], rel=1e-12)


def test_a_confidence_that_is_nan_stays_so():
    logits = normal(2, 3, 11)
    logits[0, 1] = torch.nan
    found = calibration_bins(logits, torch.zeros(2, 3, dtype=torch.long), shift=0, bins=4)
    assert found["bin_confidence"].sum(1).isnan().tolist() == [True, False]
    assert found["bin_labels"].sum().item() == 6
    answers = answer_logits(logits, torch.tensor([[N, N, 2], [N, N, 2]]), token_ids=[2, 3], shift=1)
    assert answers["ids"][0] == N != answers["ids"][1]
