"""Calibration errors against a loop."""

import numpy as np
import pytest

from metrics import calibration

from .evaluations import assert_every_mode, evaluation


def test_calibration_is_that_of_a_loop():
    generator = np.random.default_rng(0)
    confidence, right = generator.random(60), generator.random(60) < 0.5
    place = np.ceil(confidence * 4).astype(int) - 1
    sums = {name: np.zeros((60, 4)) for name in ("bin_labels", "bin_confidence", "bin_correct")}
    for column, values in zip(sums.values(), (np.ones(60), confidence, right), strict=True):
        column[np.arange(60), place] = values
    gaps = [abs((confidence - right)[place == at].mean()) for at in range(4)]
    expected = {
        "expected_calibration_error": sum(gap * np.mean(place == at) for at, gap in enumerate(gaps)),
        "maximum_calibration_error": max(gaps),
    }
    assert_every_mode(calibration(), sums, np.zeros(60), expected)
    one = {name: column[:, 0] for name, column in sums.items()}
    with pytest.raises(ValueError, match=r"\(samples, bins\) of calibration_bins"):
        calibration()(evaluation(one, np.zeros(60)))
