"""Groups, intervals, comparisons and by_dataset, against loops over rows and SciPy."""

from functools import partial

import numpy as np
import pytest
from scipy import sparse, stats
from sklearn.metrics import accuracy_score, f1_score

from metrics import (
    Metric,
    bootstrap,
    build,
    by_group,
    classification,
    compare,
    language_modeling,
    regression,
    resampling,
)
from metrics._core.metric import ratio

from .evaluations import columns, evaluation, samples, truth

GENERATOR = np.random.default_rng(0)
LABELS = GENERATOR.integers(0, 3, 300)
IDS = np.where(GENERATOR.random(300) < 0.7, LABELS, GENERATOR.integers(0, 3, 300))
BETTER = np.where(GENERATOR.random(300) < 0.3, LABELS, IDS)
EVALUATED = evaluation(IDS, LABELS)
ROWS = samples(40)
SPEARMAN = Metric(
    statistics=lambda predictions, labels: {"x": predictions, "y": labels},
    score=lambda rows: {"spearman": stats.spearmanr(rows["x"], rows["y"]).statistic if len(rows["x"]) > 2 else np.nan},
    higher_is_better={"spearman": True},
    needs_all_samples="ranks",
)


def test_every_group_scores_as_alone():
    groups = [["de", "en", "fr"][place % 3] for place in range(40)]
    scores = by_group(language_modeling(), groups)(evaluation(columns(ROWS), np.zeros(40)))
    for name in ("de", "en", "fr"):
        expected = truth([row for row, group in zip(ROWS, groups, strict=True) if group == name])
        found = {key: scores.pop(f"{key}/{name}") for key in expected}
        assert found == pytest.approx(expected, rel=1e-12)
    assert not scores


def test_groups_of_metrics_that_need_all_rows():
    generator = np.random.default_rng(0)
    x, y = generator.random((2, 60))
    scores = by_group(build(SPEARMAN, regression()), [0, 1, 2] * 20)(evaluation(x, y))
    for group in range(3):
        expected = stats.spearmanr(x[group::3], y[group::3]).statistic
        assert scores[f"spearman/{group}"] == pytest.approx(expected, rel=1e-12)
        assert scores[f"mae/{group}"] == pytest.approx(abs(x - y)[group::3].mean(), rel=1e-12)


def test_another_order_or_number_of_rows_raises():
    grouped = by_group(classification(3), LABELS % 2, labels=LABELS)
    order = np.argsort(IDS, kind="stable")
    with pytest.raises(ValueError, match="a sampler reorders them"):
        grouped(evaluation(IDS[order], LABELS[order]))
    with pytest.raises(ValueError, match="num_samples=300 rows, got 299"):
        grouped(evaluation(IDS[1:], LABELS[1:]))
    by_group(classification(3), LABELS % 2)(evaluation(IDS[order], LABELS[order]))  # what goes unseen without labels


def test_order_check_ignores_padding():
    rows = [[1, 2], [-100, 1, 2, 0]]
    labels = np.array([[1, 2, -100, -100, -100], [-100, 1, 2, 0, -100]])
    assert by_group(classification(3), "ab", labels=rows)(evaluation(labels, labels))["accuracy/b"] == 1.0
    with pytest.raises(ValueError, match="2 of 2 samples, the first in row 0"):
        by_group(classification(3), "ab", labels=rows)(evaluation(labels[::-1], labels[::-1]))


def test_by_group_refuses_streaming_and_resampling():
    grouped = by_group(classification(3), LABELS % 2)
    with pytest.raises(ValueError, match="groups belong to the rows"):
        grouped(evaluation(IDS, LABELS), compute_result=False)
    for wrap in (bootstrap, partial(by_group, groups=LABELS), lambda metric: compare(metric, EVALUATED, EVALUATED)):
        with pytest.raises(ValueError, match="in their order"):
            wrap(build(classification(3), grouped=grouped))


def intervals_by_a_loop(score, count, n=2000):
    generator = np.random.default_rng(9)
    return np.quantile([score(generator.integers(0, count, count)) for _ in range(n)], (0.025, 0.975))


def test_intervals_of_counts_are_those_of_a_loop():
    low, high = intervals_by_a_loop(lambda rows: f1_score(LABELS[rows], IDS[rows], average="macro"), 300, 600)
    scores = bootstrap(classification(3), n=4000)(EVALUATED)
    assert (scores["f1_macro_low"], scores["f1_macro_high"]) == pytest.approx((low, high), abs=0.012)
    exact = stats.binom(300, accuracy_score(LABELS, IDS)).interval(0.95)
    assert (scores["accuracy_low"], scores["accuracy_high"]) == pytest.approx(np.array(exact) / 300, abs=0.008)


def test_intervals_of_sums_are_those_of_a_loop():
    predictions = columns(ROWS)
    low, high = intervals_by_a_loop(lambda rows: predictions["nll"][rows].sum() / predictions["tokens"][rows].sum(), 40)
    scores = bootstrap(language_modeling(), n=4000)(evaluation(predictions, np.zeros(40)))
    width = high - low
    assert scores["nll_loss_low"] == pytest.approx(low, abs=0.08 * width)
    assert scores["nll_loss_high"] == pytest.approx(high, abs=0.08 * width)


def test_intervals_of_metrics_that_need_all_rows():
    generator = np.random.default_rng(0)
    x, y = generator.random((2, 50))
    low, high = intervals_by_a_loop(lambda rows: stats.spearmanr(x[rows], y[rows]).statistic, 50, 800)
    scores = bootstrap(SPEARMAN, n=800)(evaluation(x, y))
    assert (scores["spearman_low"], scores["spearman_high"]) == pytest.approx((low, high), abs=0.05)


@pytest.mark.parametrize("whole", [False, True])
def test_units_are_drawn_together(whole):
    labels = np.repeat(np.arange(20), 10)  # everything within a unit is the same: 20 samples, not 200
    hits = (labels % 4 > 0).astype(np.int64)

    def rate(sums):
        hits, rows = ((sums[name].sum() if whole else sums[name]) for name in ("hits", "rows"))
        return {"rate": ratio(hits, rows)}

    metric = Metric(
        statistics=lambda predictions, labels: {"hits": predictions, "rows": np.ones(len(labels))},
        score=rate,
        higher_is_better={"rate": True},
        needs_all_samples="a test" if whole else None,
    )
    wide = bootstrap(metric, unit=[f"document {label}" for label in labels])(evaluation(hits, labels))
    narrow = bootstrap(metric)(evaluation(hits, labels))
    expected = stats.binom(20, 0.75).interval(0.95)
    assert (wide["rate_low"], wide["rate_high"]) == pytest.approx(np.array(expected) / 20, abs=0.051)
    assert narrow["rate_high"] - narrow["rate_low"] < 0.5 * (wide["rate_high"] - wide["rate_low"])


def test_equal_seeds_give_equal_intervals():
    first, again, other = (bootstrap(classification(3), seed=seed)(EVALUATED) for seed in (1, 1, 2))
    assert first == again != other


def test_intervals_inside_groups():
    grouped = by_group(bootstrap(classification(3), n=50), LABELS % 2)(EVALUATED)
    alone = bootstrap(classification(3), n=50)(evaluation(IDS[LABELS % 2 == 1], LABELS[LABELS % 2 == 1]))
    assert grouped["accuracy_low/1"] == alone["accuracy_low"]


def test_score_that_does_not_map_stacks_is_refused():
    metric = Metric(
        statistics=lambda predictions, labels: {"x": np.ones((len(labels), 2))},
        score=lambda sums: {"first": sums["x"][0]},
        higher_is_better={"first": True},
    )
    assert metric(EVALUATED) == {"first": 300.0}
    with pytest.raises(ValueError, match=r"write it with `...`"):
        bootstrap(metric)(EVALUATED)


@pytest.mark.parametrize("names", [[1, 2, "1"], [None, "None", "b"], [True, "True", "b"], [0.5, "0.5", 0.5]])
def test_values_with_the_same_string_form_are_refused(names):
    evaluated = evaluation(IDS[:3], LABELS[:3])
    for call in (
        lambda: by_group(classification(3), names),
        lambda: bootstrap(classification(3), unit=names),
        lambda: compare(classification(3), evaluated, evaluated, unit=names),
    ):
        with pytest.raises(ValueError, match="told apart by their string form") as caught:
            call()
        assert all(shown in str(caught.value) for shown in (repr(names[0]), repr(str(names[0]))))


@pytest.mark.parametrize("groups", [[1, np.int64(1), 2], np.array([1, 1, 2]), ("1", np.str_("1"), "2")])
def test_numbers_of_python_and_numpy_are_one_group(groups):
    scores = by_group(classification(3), groups)(evaluation(LABELS[:3], LABELS[:3]))
    assert [key for key in scores if key.startswith("accuracy/")] == ["accuracy/1", "accuracy/2"]


def test_integers_of_numpy_are_integers():
    assert build(classification(np.int64(2)), num_samples=np.int64(7)).num_samples == 7
    given = {"n": np.int64(20), "seed": np.uint8(3)}
    assert bootstrap(classification(3), **given)(EVALUATED) == bootstrap(classification(3), n=20, seed=3)(EVALUATED)


def test_number_of_units_is_checked():
    wrong = r"one value per sample, in their order, got 3 for 300 samples|num_samples=3 rows, got 300"
    drawn = bootstrap(classification(3), unit="abc")
    for metric in (drawn, build(classification(3), drawn), partial(compare, classification(3), EVALUATED, unit="abc")):
        with pytest.raises(ValueError, match=wrong):
            metric(EVALUATED)
    with pytest.raises(ValueError, match="the same num_samples, got 300, 3"):
        build(classification(3), drawn, num_samples=300)


def test_samples_with_equal_statistics_are_drawn_as_one():
    metric = classification(3)
    sample = resampling._sample(metric, metric.columns(evaluation(np.tile(IDS, 100), np.tile(LABELS, 100))), None)
    pairs, counts = np.unique(np.stack([LABELS, IDS]), axis=1, return_counts=True)
    assert sorted(sample.counts) == sorted(100 * counts)
    assert sample.columns["actual"].shape == (pairs.shape[1], 3)


ALIKE = {
    "signs": np.array([[1.0], [-1.0], [2.0], [-2.0], [0.0], [-0.0], [np.inf], [-np.inf]]),
    "small integers": np.array([*np.ndindex(17, 17, 17)], np.float64),
    "powers of two": 2.0 ** np.arange(-1000, 1000)[:, None],
    "a coarse grid": np.arange(-4000, 4000)[:, None] / 64,
}


@pytest.mark.parametrize("sparsely", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", ALIKE)
def test_samples_with_different_statistics_have_different_hashes(name, sparsely):
    table = ALIKE[name]
    column = sparse.csr_array(table) if sparsely else table
    different = len(np.unique(table.view(np.int64), axis=0)) - (sparsely and name == "signs")  # no zero is stored
    assert len(np.unique(resampling._row_hash({"x": column}))) == different
    assert len(np.unique(resampling._row_hash({"one": np.ones((len(table), 1)), "x": column}))) == different


@pytest.mark.parametrize("form", [sparse.csc_array, sparse.coo_matrix, sparse.lil_array])
def test_a_sparse_column_is_read_in_any_form(form):
    def made(convert):
        metric = Metric(
            statistics=lambda predictions, labels: {"x": convert(np.diag(np.arange(6.0))), "n": np.ones(6)},
            score=lambda sums: {"mean": sums["x"].sum(-1) / sums["n"]},
            higher_is_better={"mean": True},
        )
        return bootstrap(metric, n=200)(evaluation(np.zeros(6), np.zeros(6)))

    assert made(form) == made(np.asarray)


def test_nan_prediction_affects_only_replicates_that_draw_it():
    generator = np.random.default_rng(0)
    truth = generator.random(40)
    predictions = truth + 0.3 * generator.random(40)
    predictions[3] = np.nan
    scores = bootstrap(regression(), n=400)(evaluation(predictions, truth))
    drawn = [draw for draw in generator.integers(40, size=(4000, 40)) if 3 not in draw]
    expected = np.quantile([stats.pearsonr(predictions[draw], truth[draw]).statistic for draw in drawn], (0.025, 0.975))
    assert (scores["pearson_low"], scores["pearson_high"]) == pytest.approx(tuple(expected), abs=0.03)


@pytest.mark.parametrize("metric", [classification(3), SPEARMAN, regression()])
def test_chunk_size_does_not_matter(metric, monkeypatch):
    offset = 0 if "accuracy" in metric.higher_is_better else 0.0  # ids stay integers
    evaluated, other = evaluation(IDS + offset, LABELS), evaluation(BETTER + offset, LABELS)

    def everything():
        grouped = (by_group(each, np.arange(300) % 4)(evaluated) for each in (metric, bootstrap(metric, n=7)))
        return [*grouped, compare(metric, evaluated, other, n=7)]

    expected = everything()
    monkeypatch.setattr(resampling, "CHUNK", 20)
    for found, scores in zip(everything(), expected, strict=True):
        assert found == pytest.approx(scores, rel=1e-12, nan_ok=True)


def test_two_runs_are_compared_as_mcnemar_does():
    scores = compare(classification(3), evaluation(BETTER, LABELS), EVALUATED, n=4000)
    assert scores["accuracy_difference"] == pytest.approx(np.mean(BETTER == LABELS) - np.mean(IDS == LABELS))
    assert 0 < scores["accuracy_difference_low"] < scores["accuracy_difference"] < scores["accuracy_difference_high"]
    assert scores["accuracy_p_value"] == 1 / 4001


def test_the_p_value_is_that_of_a_sign_test():
    left, right = np.zeros(40, np.int64), np.zeros(40, np.int64)
    left[:12], right[12:17] = 1, 1  # right 12 times alone, and the other 5 times
    labels = np.ones(40, np.int64)
    scores = compare(classification(2), evaluation(left, labels), evaluation(right, labels), n=20_000)
    assert scores["accuracy_p_value"] == pytest.approx(stats.binomtest(12, 17).pvalue, abs=0.012)


def test_a_run_does_not_differ_from_itself():
    for metric in (classification(3), SPEARMAN):
        scores = compare(metric, EVALUATED, EVALUATED, n=50)
        assert {value for key, value in scores.items() if key.endswith("difference")} == {0.0}
        assert {value for key, value in scores.items() if key.endswith("p_value")} == {1.0}


@pytest.mark.parametrize("far", [0, 1, 2], ids=["neither", "first", "second"])
def test_compare_is_exact_if_one_run_has_a_large_offset(far):
    generator = np.random.default_rng(0)
    truth, *noise = generator.random((3, 50))
    runs = [
        evaluation(truth + share * part + 1e9 * (far == side), truth)
        for side, (share, part) in enumerate(zip((0.1, 0.5), noise, strict=True), 1)
    ]
    own = [regression()(run)["pearson"] for run in runs]
    scores = compare(regression(), *runs, n=20)
    assert scores["pearson_difference"] == pytest.approx(own[0] - own[1], rel=1e-12)
    assert scores["pearson_difference_low"] <= scores["pearson_difference"] <= scores["pearson_difference_high"]


def test_runs_of_metrics_that_need_all_rows_are_compared_by_permutation():
    generator = np.random.default_rng(0)
    truth, noise = generator.random((2, 80))
    good, bad = truth + 0.1 * noise, noise
    scores = compare(SPEARMAN, evaluation(good, truth), evaluation(bad, truth), n=200)
    difference = stats.spearmanr(good, truth).statistic - stats.spearmanr(bad, truth).statistic
    assert scores["spearman_difference"] == pytest.approx(difference, rel=1e-12)
    assert scores["spearman_p_value"] == 1 / 201


def test_units_change_sides_together():
    left, right = np.repeat([1, 1, 1, 0], 50), np.repeat([0, 0, 0, 1], 50)
    labels = np.ones(200, np.int64)
    runs = evaluation(left, labels), evaluation(right, labels)
    together = compare(classification(2), *runs, unit=np.repeat(np.arange(4), 50), n=2000)
    assert compare(classification(2), *runs, n=2000)["accuracy_p_value"] < 0.01
    assert together["accuracy_p_value"] == pytest.approx(10 / 16, abs=0.04)  # 3 of 4 against 1: 10 of 16 sign patterns


def test_runs_of_other_samples_or_columns_are_refused():
    more = evaluation({"ids": IDS, "probabilities": np.eye(3)[IDS]}, LABELS)
    other = evaluation(IDS[::-1], LABELS[::-1])
    for first, second, what in ((EVALUATED, more, "one reducer for both"), (EVALUATED, other, "the same labels")):
        for runs in ((first, second), (second, first)):
            with pytest.raises(ValueError, match=what):
                compare(classification(3), *runs)
