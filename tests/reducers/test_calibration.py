"""Bins of confidence, against a loop."""

import math

import numpy as np
import pytest
import torch

from reducers import calibration_bins
from tests import oracle

from .inputs import LABELS, B, S, V, normal


def test_bins_of_confidence():
    logits = normal(B, S, V)
    found = calibration_bins(logits, LABELS, shift=1, bins=4)
    expected = {name: np.zeros((B, 4)) for name in found}
    for place, row in oracle.pairs(logits, LABELS, shift=1):
        p = logits[row].softmax(0)
        bin_of = min(3, math.ceil(float(p.max()) * 4) - 1)
        expected["bin_labels"][place[0], bin_of] += 1
        expected["bin_confidence"][place[0], bin_of] += float(p.max())
        expected["bin_correct"][place[0], bin_of] += int(p.argmax()) == int(LABELS[place])
    for name, sums in found.items():
        assert sums.numpy() == pytest.approx(expected[name], rel=1e-12)


def test_confidence_is_nan_where_a_logit_is_nan():
    logits = normal(2, 3, V)
    logits[0, 1] = torch.nan
    found = calibration_bins(logits, torch.zeros(2, 3, dtype=torch.long), shift=0, bins=4)
    assert found["bin_confidence"].sum(1).isnan().tolist() == [True, False]
    assert found["bin_labels"].sum().item() == 6
