import math
import operator
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score, root_mean_squared_error

from metrics import best_model, best_model_kwargs, bootstrap, build, by_group, compare, regression
from metrics.regression import HIGHER_IS_BETTER

from .evaluations import assert_modes_agree, evaluation, sized

MISSING = -100.0
CORRELATIONS = ("pearson", "spearman", "kendall")
MOMENTS = ("mse", "rmse", "mae", "r2", "pearson")


@pytest.fixture(autouse=True)
def no_warning_escapes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def score(predictions, labels, **options):
    return regression(**options)(evaluation(predictions, labels))


def truth(predictions, labels):
    """scikit-learn and scipy, a target at a time, over the labels that are known."""
    found = {key: [] for key in HIGHER_IS_BETTER}
    for guesses, aims in zip(np.atleast_2d(predictions.T), np.atleast_2d(labels.T), strict=True):
        x, y = (array[aims != MISSING].astype(np.float64) for array in (guesses, aims))
        found["mse"].append(mean_squared_error(y, x))
        found["rmse"].append(root_mean_squared_error(y, x))
        found["mae"].append(mean_absolute_error(y, x))
        found["r2"].append(r2_score(y, x))
        found["pearson"].append(stats.pearsonr(x, y).statistic)
        found["spearman"].append(stats.spearmanr(x, y).statistic)
        found["kendall"].append(stats.kendalltau(x, y).statistic)
    return {key: float(np.mean(values)) for key, values in found.items()}


def targets(samples=30, count=2, seed=0, *, missing=0.3):
    generator = np.random.default_rng(seed)
    labels = generator.normal(3, 2, (samples, count)).round(1)
    predictions = labels + generator.normal(0, 1, labels.shape)
    labels[generator.random(labels.shape) < missing] = MISSING
    return predictions, labels


@settings(max_examples=60)
@given(st.data())
def test_scores_equal_scikit_learn_and_scipy(data):
    shape = data.draw(st.tuples(st.integers(2, 20), st.integers(1, 3)))
    values = arrays(np.float64, shape, elements=st.integers(-50, 50).map(lambda value: value / 4))
    predictions, labels = data.draw(values), data.draw(values)
    assume((predictions.std(0) > 0).all() and (labels.std(0) > 0).all())
    expected = pytest.approx(truth(predictions, labels), rel=1e-10, abs=1e-10)
    assert score(predictions, labels, rank_correlation=True) == expected


def test_missing_labels_are_left_out_of_their_target():
    predictions, labels = targets()
    predictions[labels == MISSING] = np.inf  # not looked at
    assert score(predictions, labels, rank_correlation=True) == pytest.approx(truth(predictions, labels), rel=1e-11)


def test_a_missing_label_counted_as_a_number_is_caught():
    predictions, labels = targets()
    assert mean_squared_error(labels, predictions) > 100 * score(predictions, labels)["mse"]


def test_float32_predictions_are_scored_in_float64():
    predictions, labels = (array.astype(np.float32) for array in targets(2000, missing=0.0))
    expected = truth(predictions, labels)
    assert score(predictions, labels, rank_correlation=True) == pytest.approx(expected, rel=1e-11)
    assert mean_squared_error(labels, predictions) != pytest.approx(expected["mse"], rel=1e-11)


def test_one_target_may_be_a_column():
    predictions, labels = targets(count=1, missing=0.0)
    expected = score(predictions, labels)
    assert score(predictions, labels[:, 0]) == score(predictions[:, 0], labels) == expected
    assert score({"ids": np.zeros(30), "kept": {"predictions": predictions}}, labels) == expected
    assert score(torch.from_numpy(predictions), torch.from_numpy(labels)) == expected


def exact(predictions, labels):
    """R2 and Pearson's correlation of one target in rational numbers, so that nothing is rounded on the way."""
    known = labels != MISSING
    x, y = ([Fraction(value) for value in array[known].tolist()] for array in (predictions, labels))
    dx, dy = ([value - sum(values) / len(values) for value in values] for values in (x, y))
    xx, yy, xy = (sum(map(operator.mul, *pair)) for pair in ((dx, dx), (dy, dy), (dx, dy)))
    squared = sum((a - b) ** 2 for a, b in zip(x, y, strict=True))
    return {"r2": float(1 - squared / yy), "pearson": float(xy) / math.sqrt(float(xx)) / math.sqrt(float(yy))}


def far(mean, samples=48, seed=0):
    """Targets that differ by 0.15 around `mean`, some missing, the first among them."""
    generator = np.random.default_rng(seed)
    labels = mean + generator.normal(0, 0.15, samples)
    predictions = labels + generator.normal(0, 0.05, samples)
    labels[[0, 1, 7]] = MISSING
    return predictions, labels


@pytest.mark.parametrize("mean", [0.0, 1e5, -1e7])
@pytest.mark.parametrize("size", [1, 3, 8, 48])
def test_large_mean_is_exact_in_every_mode(mean, size):
    predictions, labels = far(mean)
    expected = truth(predictions, labels) | exact(predictions, labels)
    scores = {key: expected[key] for key in MOMENTS}
    bounds = [*range(0, 48, size), 48]
    assert_modes_agree(sized(regression(), 48), predictions, labels, bounds, scores, rel=1e-12)


def test_large_mean_is_exact_in_joined_metrics():
    predictions, labels = far(1e5)
    joined = build(regression(rank_correlation=True), again=regression())(evaluation(predictions, labels))
    expected = truth(predictions, labels)
    assert joined == pytest.approx(expected | {f"again_{key}": expected[key] for key in MOMENTS}, rel=1e-9)
    streamed = sized(build(regression(), other=regression()), 48)()
    for at in range(47):
        streamed(evaluation(predictions[at : at + 1], labels[at : at + 1]), compute_result=False)
    scores = streamed(evaluation(predictions[47:], labels[47:]))
    assert scores["other_r2"] == scores["r2"] == pytest.approx(exact(predictions, labels)["r2"], rel=1e-12)


def test_sums_from_0_would_lose_the_digits():
    predictions, labels = far(1e7)
    x, y = predictions[labels != MISSING], labels[labels != MISSING]
    from_zero = 1 - ((x - y) ** 2).sum() / ((y * y).sum() - y.sum() ** 2 / len(y))
    assert from_zero != pytest.approx(exact(predictions, labels)["r2"], rel=1e-3)


def test_each_group_keeps_its_digits():
    sides = [far(mean, seed=seed) for seed, mean in enumerate((0.0, 1e5, -3e6))]
    predictions, labels = (np.stack(arrays, axis=1).ravel() for arrays in zip(*sides, strict=True))
    scores = by_group(regression(), ["a", "b", "c"] * 48)(evaluation(predictions, labels))
    for name, side in zip("abc", sides, strict=True):
        expected = exact(*side)
        assert {key: scores[f"{key}/{name}"] for key in expected} == pytest.approx(expected, rel=1e-12)


def test_replicates_and_comparisons_keep_their_digits():
    predictions, labels = far(1e5)
    near = predictions - 1e5, np.where(labels == MISSING, MISSING, labels - 1e5)
    intervals = [bootstrap(regression(), n=50)(evaluation(*pair)) for pair in ((predictions, labels), near)]
    assert intervals[0] == pytest.approx(intervals[1], rel=1e-9)
    units = [bootstrap(regression(), n=50, unit=list("abcdefgh") * 6)(evaluation(*pair)) for pair in (far(1e5), near)]
    assert units[0] == pytest.approx(units[1], rel=1e-9)
    worse = predictions + np.sin(np.arange(48)) / 9
    found = compare(regression(), evaluation(predictions, labels), evaluation(worse, labels), n=9)
    expected = exact(predictions, labels)["pearson"] - exact(worse, labels)["pearson"]
    assert found["pearson_difference"] == pytest.approx(expected, rel=1e-11)


def test_scores_are_exact_if_the_first_label_is_an_outlier():
    predictions, labels = far(1e5)
    labels[0], predictions[0] = 0.0, 3.0
    assert score(predictions, labels)["r2"] == pytest.approx(exact(predictions, labels)["r2"], rel=1e-12)


def test_bootstrap_is_exact_with_an_outlier():
    """Of two units, one the sample far off, a quarter of the replicates draws the other one twice."""
    predictions, labels = far(0.0)
    for place in (2, 47):
        distant = labels.copy()
        distant[place] = 1e6
        rest = (labels != MISSING) & (np.arange(48) != place)
        units = (np.arange(48) == place).tolist()
        found = bootstrap(regression(), n=100, unit=units)(evaluation(predictions, distant))
        assert found["r2_high"] == pytest.approx(r2_score(labels[rest], predictions[rest]), rel=1e-12)


def test_one_sample_has_errors_and_no_correlation():
    scores = score(np.array([2.0]), np.array([5.0]), rank_correlation=True)
    assert [scores[key] for key in ("mse", "rmse", "mae")] == [9.0, 3.0, 3.0]
    assert all(math.isnan(scores[key]) for key in ("r2", *CORRELATIONS))


@pytest.mark.parametrize("constant", [0.1, 1e6 / 3, 0.0, -7.0])
def test_constants_have_no_correlation(constant):
    values, constants = np.arange(7) / 3, np.full(7, constant)
    for predictions, labels, r2 in (
        (constants, values, r2_score(values, constants)),
        (values, constants, math.nan),
    ):
        scores = score(predictions, labels, rank_correlation=True)
        expected = {"mae": abs(values - constant).mean(), "r2": r2, **dict.fromkeys(CORRELATIONS, math.nan)}
        assert {key: scores[key] for key in expected} == pytest.approx(expected, nan_ok=True)


def test_targets_without_labels_are_left_out_and_constant_predictions_are_not():
    predictions, labels = targets(missing=0.0)
    expected = truth(predictions[:, 0], labels[:, 0])
    labels[:, 1] = MISSING
    assert score(predictions, labels, rank_correlation=True) == pytest.approx(expected, rel=1e-11)
    predictions, labels = targets(missing=0.0)
    predictions[:, 1] = 3.0
    scores = score(predictions, labels, rank_correlation=True)
    assert all(math.isnan(scores[key]) for key in CORRELATIONS)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_predictions_are_not_scored(value):
    predictions, labels = targets(missing=0.0)
    predictions[3, 1] = value
    scores = score(predictions, labels, rank_correlation=True)
    assert not any(math.isfinite(scores[key]) for key in ("mse", "rmse", "mae", "r2"))
    assert all(math.isnan(scores[key]) for key in CORRELATIONS[: 1 if value == np.inf else 3])


def test_ranks_need_every_sample():
    with pytest.raises(ValueError, match=r"rank each sample among all; rank_correlation=False leaves them out"):
        build(regression(rank_correlation=True), num_samples=9)(evaluation(*targets()), compute_result=False)


@pytest.mark.parametrize(
    ("labels", "message"),
    [(np.zeros((3, 2)), r"predictions \(3, 1\) and labels \(3, 2\).*num_labels"), (np.full(3, np.nan), "mask_missing")],
)
def test_error_for_invalid_labels_names_the_remedy(labels, message):
    with pytest.raises(ValueError, match=message):
        score(np.zeros(3), labels)


def test_directions_are_known():
    assert HIGHER_IS_BETTER.items() <= best_model.HIGHER_IS_BETTER.items()
    assert [best_model_kwargs(key)["greater_is_better"] for key in ("rmse", "pearson")] == [False, True]
