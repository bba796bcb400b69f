"""Scores of pixels against scikit-learn."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score, jaccard_score

from metrics import segmentation

from .evaluations import assert_every_mode, evaluation

N = -100


def test_pixels_score_as_in_scikit_learn():
    generator = np.random.default_rng(0)
    labels, ids = generator.integers(0, 4, (2, 6, 8, 5))
    labels[generator.random(labels.shape) < 0.2] = N
    there = labels != N
    pair = labels[there], ids[there]
    iou, dice = jaccard_score(*pair, average=None), f1_score(*pair, average=None)
    expected = {
        "mean_iou": iou.mean(),
        "mean_dice": dice.mean(),
        "pixel_accuracy": accuracy_score(*pair),
        **{f"iou/{name}": value for name, value in enumerate(iou)},
        **{f"dice/{name}": value for name, value in enumerate(dice)},
    }
    assert_every_mode(segmentation(4), {"ids": ids}, labels, expected)
    more = segmentation(id2label=dict(enumerate("abcde")))(evaluation(ids, labels))
    assert more["mean_iou"] == pytest.approx(iou.mean())  # a class that does not occur is no part of the mean
    assert np.isnan(more["iou/e"])


def test_constant_pixels():
    ones = np.ones((1, 2, 2), np.int64)
    assert [segmentation(2)(evaluation(ones, labels))["mean_iou"] for labels in (ones, 0 * ones)] == [1.0, 0.0]
