import itertools
import math
import operator
import tracemalloc
import warnings
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse, stats

import metrics
import reducers
from metrics._core.keys import find
from metrics.classification import COLUMNS

from .evaluations import assert_modes_agree, cut, evaluation, sized, stream, tensors

IGNORED = -100
AVERAGES = ("macro", "micro", "weighted", "per_class")
SCORES = ("precision", "recall", "f1")
QUICK = settings(max_examples=20)


@pytest.fixture(autouse=True)
def no_warning_escapes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def score(metric, predictions, labels):
    return metric(evaluation(predictions, labels))


def same(expected):
    return pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True)


def silently(function, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **options)


FUNCTIONS = {"precision": sk.precision_score, "recall": sk.recall_score, "f1": sk.f1_score}


def sklearn_scores(labels, ids, num_classes):
    """Every score of ids by scikit-learn, one call a score."""
    expected = {
        "accuracy": sk.accuracy_score(labels, ids),
        "balanced_accuracy": silently(sk.balanced_accuracy_score, labels, ids),
        "matthews_correlation": silently(sk.matthews_corrcoef, labels, ids),
        "cohen_kappa": silently(sk.cohen_kappa_score, labels, ids),
    }
    for name, function in FUNCTIONS.items():
        for average in ("macro", "micro", "weighted"):
            expected[f"{name}_{average}"] = function(labels, ids, average=average, zero_division=0)
        values = function(labels, ids, average=None, labels=range(num_classes), zero_division=0)
        present = {*np.unique([labels, ids]).tolist()}
        expected |= {f"{name}/{k}": value if k in present else math.nan for k, value in enumerate(values)}
    return expected


@st.composite
def pairs(draw, *, smallest=1):
    """Number of classes, labels, ids: often few samples, absent classes and constants."""
    num_classes = draw(st.integers(2, 5))
    size = draw(st.integers(smallest, 30))
    used = st.sampled_from(draw(st.lists(st.integers(0, num_classes - 1), min_size=1, max_size=num_classes)))
    labels, ids = (np.array(draw(st.lists(used, min_size=size, max_size=size))) for _ in range(2))
    return num_classes, labels, ids


def sample(num_classes, size=60, seed=0, *, ignored=0.2):
    generator = np.random.default_rng(seed)
    probabilities = generator.dirichlet(np.ones(num_classes), size)
    labels = generator.integers(0, num_classes, size)
    labels[generator.random(size) < ignored] = IGNORED
    return probabilities, labels


@QUICK
@given(pairs())
def test_ids_score_as_in_scikit_learn(drawn):
    num_classes, labels, ids = drawn
    expected, metric = sklearn_scores(labels, ids, num_classes), metrics.classification(num_classes, average=AVERAGES)
    assert score(metric, ids, labels) == same(expected)
    sums = metric.sums(metric.columns(evaluation(ids, labels)))
    stack = metric.scores({name: np.stack([0 * column, column]) for name, column in sums.items()})
    assert {key: values[1] for key, values in stack.items()} == same(expected)
    assert all(math.isnan(values[0]) for values in stack.values())


@pytest.mark.parametrize("pos_label", [0, 1, "no", "yes"])
def test_binary_scores_one_class(pos_label):
    labels, ids = np.array([0, 1, 1, 0, 1]), np.array([0, 1, 0, 1, 1])
    metric = metrics.classification(id2label={0: "no", 1: "yes"}, average="binary", pos_label=pos_label)
    place = {"no": 0, "yes": 1}.get(pos_label, pos_label)
    expected = sk.precision_recall_fscore_support(labels, ids, average="binary", pos_label=place)[:3]
    scores = score(metric, ids, labels)
    assert [scores[name] for name in SCORES] == list(expected)
    columns = metric.columns(evaluation({"confusion": sk.confusion_matrix(labels, ids).reshape(1, 4)}, labels[:1]))
    stack = metric.scores({name: np.repeat(column, 2, axis=0) for name, column in columns.items()})
    assert [stack[name][1] for name in SCORES] == list(expected)


def calibration_error(probabilities, labels):
    """Guo et al. 2017, (2) and (3), a bin at a time."""
    confidence, right, error = probabilities.max(1), probabilities.argmax(1) == labels, 0.0
    for index in range(15):
        inside = (index / 15 < confidence) & (confidence <= (index + 1) / 15)
        error += abs((confidence - right)[inside].sum()) / len(labels)
    return error


@pytest.mark.parametrize("num_classes", [2, 4])
@pytest.mark.parametrize(("dtype", "rel"), [(np.float32, 1e-6), (np.float64, 1e-12)])
def test_probabilities_score_as_in_scikit_learn(num_classes, dtype, rel):
    probabilities, labels = sample(num_classes)
    probabilities[0], labels[0] = np.eye(num_classes)[1], 0  # a probability of 0 for the label
    known = labels != IGNORED
    p, y = probabilities[known], labels[known]
    positive = p if num_classes > 2 else p[:, 1]
    expected = sklearn_scores(y, p.argmax(1), num_classes) | {
        "log_loss": silently(sk.log_loss, y, p, labels=range(num_classes)),
        "brier_loss": sk.brier_score_loss(y, positive, labels=range(num_classes)),
        "expected_calibration_error": calibration_error(p, y),
        "roc_auc": sk.roc_auc_score(y, positive, multi_class="ovr"),
        "average_precision": sk.average_precision_score(y, positive),
    }
    metric = metrics.classification(num_classes, average=AVERAGES, auc=True)
    assert score(metric, {"probabilities": probabilities.astype(dtype)}, labels) == pytest.approx(expected, rel=rel)


def test_the_positive_class_is_ranked():
    probabilities, labels = sample(2, ignored=0)
    found = score(metrics.classification(2, pos_label=0, auc=True), {"probabilities": probabilities}, labels)
    assert found["average_precision"] == same(sk.average_precision_score(labels == 0, probabilities[:, 0]))


def test_classes_without_labels_are_left_out_of_auc():
    probabilities, labels = sample(3, ignored=0)
    labels[labels == 2] = 0
    found = score(metrics.classification(3, auc=True), {"probabilities": probabilities}, labels)
    areas = [sk.roc_auc_score(labels == label, probabilities[:, label]) for label in (0, 1)]
    assert found["roc_auc"] == same(np.mean(areas))


def tokens():
    generator = np.random.default_rng(1)
    labels = generator.integers(0, 3, (6, 7))
    labels[generator.random(labels.shape) < 0.4] = IGNORED
    labels[2] = IGNORED
    ids = generator.integers(0, 3, labels.shape).astype(np.int32)
    ids[labels == IGNORED] = generator.choice([0, 2, IGNORED, 77], (labels == IGNORED).sum())
    return ids, labels


def counted(ids, labels, num_classes):
    """What `confusion_counts` returns, a sample at a time."""
    rows = np.zeros((len(labels), num_classes**2), np.int64)
    for place, (label, id_) in enumerate(zip(labels, ids, strict=True)):
        if (known := label != IGNORED).any():
            rows[place] = sk.confusion_matrix(label[known], id_[known], labels=range(num_classes)).ravel()
    return {"confusion": rows}


def test_every_mode_and_every_column_give_one_result():
    ids, labels = tokens()
    known = labels != IGNORED
    expected = sklearn_scores(labels[known], ids[known], 3)
    columns = counted(ids, labels, 3)
    for predictions in (ids, {"ids": ids}, {"kept": columns, "ids": ids}, columns):
        for bounds in ([0, 6], [0, 1, 6], range(7)):
            metric = sized(metrics.classification(3, average=AVERAGES), 6)
            assert_modes_agree(metric, predictions, labels, bounds, expected)


def test_batches_of_different_lengths_count_as_padded_ones():
    ids, labels = tokens()
    parts, targets = cut(ids, [0, 2, 6]), cut(labels, [0, 2, 6])
    longer = [np.pad(array, ((0, 0), (0, 3)), constant_values=IGNORED) for array in (parts[1], targets[1])]
    metric = metrics.build(metrics.classification(3), num_samples=6)
    expected = score(metric, ids, labels)
    assert score(metric, [parts[0], longer[0]], [targets[0], longer[1]]) == expected
    assert stream(metric, map(tensors, [parts[0], longer[0]]), map(tensors, [targets[0], longer[1]])) == expected


def test_probabilities_of_tokens():
    probabilities, labels = sample(3)
    flat = score(metrics.classification(3), {"probabilities": probabilities}, labels)
    tokens = {"probabilities": probabilities.reshape(12, 5, 3)}
    assert score(metrics.classification(3), tokens, labels.reshape(12, 5)) == same(flat)


def test_ids_have_precedence_over_probabilities_and_counts_over_both():
    probabilities, labels = sample(3)
    alone = {"probabilities": probabilities}
    kept = alone | {"ids": np.where(labels == IGNORED, 0, labels)}
    wrong = {"confusion": np.tile(np.eye(1, 9, 1, dtype=np.int64), (60, 1))}
    found = [score(metrics.classification(3), predictions, labels) for predictions in (alone, kept, kept | wrong)]
    assert [scores["accuracy"] for scores in found[1:]] == [1.0, 0.0]
    assert found[0]["log_loss"] == found[1]["log_loss"]


def test_counts_of_each_sample_are_sparse():
    ids, labels = tokens()
    for column in metrics.classification(3).columns(evaluation(ids, labels)).values():
        assert sparse.issparse(column)
        assert column.dtype == np.int64
        assert column.nnz <= (labels != IGNORED).sum()


def test_memory_is_linear_in_the_number_of_classes():
    num_classes, generator = 30_000, np.random.default_rng(0)
    labels = generator.integers(0, num_classes, 2000)
    ids = np.where(generator.random(2000) < 0.6, labels, generator.integers(0, 9, 2000))
    metric = metrics.build(metrics.classification(num_classes), num_samples=2000)
    tracemalloc.start()
    scores = stream(metric, np.split(ids, 8), np.split(labels, 8))
    intervals = metrics.bootstrap(metrics.classification(num_classes), n=20)(evaluation(ids, labels))
    groups = metrics.by_group(metrics.classification(num_classes), np.arange(2000) % 2)(evaluation(ids, labels))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400 * 8 * num_classes  # numbers a class, of which one matrix has 30,000
    occurring = np.unique([labels, ids], return_inverse=True)[1].reshape(2, -1)  # scikit-learn's matrix is smaller so
    expected = sklearn_scores(*occurring, 0)
    assert scores == same({key: expected[key] for key in scores})
    assert intervals["accuracy_low"] <= scores["accuracy"] <= intervals["accuracy_high"]
    assert groups["matthews_correlation/0"] == same(sk.matthews_corrcoef(labels[::2], ids[::2]))


def test_one_sample_and_one_class():
    metric = metrics.classification(3, average=("macro", "per_class"), auc=True)
    scores = score(metric, {"probabilities": np.eye(3)[[1]]}, np.array([1]))
    assert scores["accuracy"] == scores["f1_macro"] == scores["f1/1"] == scores["average_precision"] == 1.0
    assert scores["matthews_correlation"] == scores["log_loss"] == scores["brier_loss"] == 0.0
    assert all(math.isnan(scores[key]) for key in ("cohen_kappa", "f1/0", "recall/2", "roc_auc"))


def test_rare_classes_are_exact_among_billions_of_labels():
    """Two rare pairs, one of them right, among three billion; by fractions."""
    cells = np.zeros((1, 9), np.int64)
    cells[0, [0, 1, 4]] = 3 * 10**9, 1, 1
    hits, actual, predicted = (3 * 10**9, 1, 0), (3 * 10**9 + 1, 1, 0), (3 * 10**9, 2, 0)
    total = sum(actual)
    chance = sum(map(operator.mul, actual, predicted))
    scores = metrics.classification(3)(evaluation({"confusion": cells}, np.array([0])))
    above = Fraction(sum(hits) * total - chance)
    assert scores["cohen_kappa"] == pytest.approx(float(above / (total**2 - chance)), rel=1e-14)
    spread = [total**2 - sum(count**2 for count in counts) for counts in (actual, predicted)]
    assert scores["matthews_correlation"] == pytest.approx(float(above) / math.sqrt(math.prod(spread)), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_softmax_rounded_to_half_precision_is_accepted(dtype):
    logits = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded = logits.softmax(-1).to(dtype).double().numpy()
    assert abs(rounded.sum(-1) - 1).max() > (1e-3 if dtype is torch.bfloat16 else 1e-4)
    labels = np.zeros(2000, np.int64)
    assert score(metrics.classification(2), {"probabilities": rounded}, labels)["log_loss"] == pytest.approx(
        sk.log_loss(labels, logits.softmax(-1).numpy(), labels=[0, 1]), rel=1e-3
    )


def probabilities_of(*rows):
    return {"probabilities": np.array(rows)}


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        (probabilities_of([2.0, -1.0]), [0], r"not in \[0, 1\].*reducers\.probabilities"),
        (probabilities_of([0.4, 0.4]), [0], r"do not sum to 1.*reducers\.probabilities"),
        (probabilities_of([0.1, 0.2, 0.7]), [0], r"shape \(1, 2\) to fit the labels, got \(1, 3\); .* num_classes"),
        (probabilities_of(0.0, 1.0), [0, 1], r"shape \(2, 2\) to fit the labels, got \(2,\)"),
        (np.array([0, 2]), [0, 1], r"predicted ids must be 0 to 1, got 0 to 2"),
        (np.array([0, IGNORED]), [0, 1], "mask_first_label"),
        (np.array([0, 1]), [0, 2], r"labels must be 0 to 1, got 0 to 2"),
        (np.array([0, 1]), [0, -1], "labels must be 0 to 1, got -1 to"),
        ((np.array([0, 1]),), [0, 1], r"confusion \(reducers\.confusion_counts\)"),
        ({"logits": np.array([[0.0, 1.0]])}, [0], "got predictions logits"),
        ({"confusion": np.zeros((1, 2, 2))}, [0], r"counts \(B, 4\)"),
        ({"confusion": np.full((1, 4), IGNORED)}, [0], r"counts \(B, 4\)"),
    ],
)
def test_invalid_predictions_are_refused(predictions, labels, message):
    with pytest.raises(ValueError, match=message):
        score(metrics.classification(2), predictions, np.array(labels))


def test_probabilities_at_ignored_labels_are_not_checked():
    probabilities = np.array([[0.2, 0.8], [-100.0, -100.0]])
    assert score(metrics.classification(2), {"probabilities": probabilities}, np.array([1, IGNORED]))["accuracy"] == 1.0


def test_auc_needs_one_label_per_sample_and_probabilities():
    ids, labels = tokens()
    with pytest.raises(ValueError, match=r"one label per sample.*auc=False"):
        score(metrics.classification(3, auc=True), ids, labels)
    with pytest.raises(ValueError, match=r"needs the column 'probabilities'.*reducers\.probabilities"):
        score(metrics.classification(3, auc=True), np.array([0, 1, 2]), np.array([0, 1, 1]))
    with pytest.raises(ValueError, match="auc=False leaves them out"):
        metrics.build(metrics.classification(3, auc=True), num_samples=60)(evaluation(*sample(3)), compute_result=False)


@pytest.mark.parametrize("options", [{"average": "binary"}, {"pos_label": 2}, {"average": ("macro", "binary")}])
def test_one_class_of_many_is_refused(options):
    with pytest.raises(ValueError, match="needs two classes, got 3"):
        metrics.classification(3, **options)


METRICS = [
    metrics.classification(id2label={"0": "O", "1": "PER"}, average=("binary", *AVERAGES), auc=True),
    metrics.multi_label(3, average=("micro", "macro", "samples", "per_class"), threshold=[0.1, 0.2, 0.3], auc=True),
]


@pytest.mark.parametrize("metric", METRICS, ids=["classification", "multi_label"])
def test_every_key_has_the_direction_that_the_package_knows(metric):
    for key, direction in metric.higher_is_better.items():
        assert metrics.best_model.HIGHER_IS_BETTER[find(key, metrics.best_model.HIGHER_IS_BETTER)] is direction
        assert metrics.best_model_kwargs(f"eval_ner_{key}", metrics.build(ner=metric))["greater_is_better"] is direction
    assert metrics.best_model_kwargs("f1/PER") == {"metric_for_best_model": "f1/PER", "greater_is_better": True}


def labelled(samples, num_classes, seed, *, missing=0.0):
    generator = np.random.default_rng(seed)
    probabilities = generator.random((samples, num_classes)).round(1)
    labels = (generator.random((samples, num_classes)) < generator.random(num_classes)).astype(np.int64)
    labels[generator.random(labels.shape) < missing] = IGNORED
    return probabilities, labels


@QUICK
@given(st.integers(1, 12), st.integers(2, 4), st.integers(0, 2**32 - 1), st.sampled_from([np.int64, np.float32]))
def test_multi_label_scores_as_in_scikit_learn(samples, num_classes, seed, dtype):
    probabilities, labels = labelled(samples, num_classes, seed)
    thresholds = np.random.default_rng(seed).random(num_classes)
    predicted = probabilities >= thresholds
    expected = {"subset_accuracy": sk.accuracy_score(labels, predicted)}
    expected["hamming_loss"] = sk.hamming_loss(labels, predicted)
    for (name, function), average in itertools.product(FUNCTIONS.items(), ("micro", "macro", "samples", None)):
        value = function(labels, predicted, average=average, zero_division=0)
        keys = [f"{name}/{label}" for label in range(num_classes)] if average is None else [f"{name}_{average}"]
        expected |= dict(zip(keys, np.atleast_1d(value), strict=True))
    metric = metrics.multi_label(num_classes, average=("micro", "macro", "samples", "per_class"), threshold=thresholds)
    evaluated = evaluation({"probabilities": probabilities}, labels.astype(dtype))
    assert metric(evaluated) == same(expected)
    stack = metric.scores({name: column[None] for name, column in metric.sums(metric.columns(evaluated)).items()})
    assert {key: value[0] for key, value in stack.items()} == same(expected)


def test_missing_labels_are_left_out_one_by_one():
    probabilities, labels = labelled(40, 3, 0, missing=0.4)
    labels[5], labels[:, 2] = IGNORED, IGNORED
    known, predicted = labels != IGNORED, probabilities >= 0.5
    own = [sk.f1_score(labels[known[:, k], k], predicted[known[:, k], k]) for k in range(2)]
    rows = [row for row in range(40) if known[row].any()]
    by_row = [sk.f1_score(labels[row][known[row]], predicted[row][known[row]], zero_division=0) for row in rows]
    metric = metrics.multi_label(3, average=("micro", "macro", "samples", "per_class"))
    found = score(metric, {"probabilities": probabilities}, labels)
    expected = {
        "f1_macro": np.mean(own),
        "f1_micro": sk.f1_score(labels[known], predicted[known]),
        "f1_samples": np.mean(by_row),
        "f1/0": own[0],
        "f1/1": own[1],
        "f1/2": math.nan,
        "hamming_loss": np.mean((labels != predicted)[known]),
        "subset_accuracy": np.mean([((labels == predicted) | ~known)[row].all() for row in rows]),
    }
    assert {key: found[key] for key in expected} == same(expected)


def test_a_missing_label_counted_as_negative_is_caught():
    probabilities, labels = labelled(40, 3, 0, missing=0.4)
    naive = score(metrics.multi_label(3), {"probabilities": probabilities}, np.where(labels == IGNORED, 0, labels))
    right = score(metrics.multi_label(3), {"probabilities": probabilities}, labels)
    assert all(naive[key] != right[key] for key in right if not key.startswith("recall"))


def test_auc_of_labels_equals_scikit_learn():
    probabilities, labels = labelled(40, 3, 5, missing=0.3)
    labels[:, 2] = 0  # never positive: neither score is defined
    pairs_of = [(labels[labels[:, k] != IGNORED, k], probabilities[labels[:, k] != IGNORED, k]) for k in range(2)]
    found = score(metrics.multi_label(3, auc=True), {"probabilities": probabilities}, labels)
    assert found["roc_auc"] == same(np.mean([sk.roc_auc_score(*pair) for pair in pairs_of]))
    assert found["average_precision"] == same(np.mean([sk.average_precision_score(*pair) for pair in pairs_of]))


def test_a_threshold_is_a_probability_and_reached_by_equality():
    found = [
        score(metrics.multi_label(1, threshold=at), {"probabilities": np.array([[0.5]])}, np.array([[1]]))["f1_micro"]
        for at in (0.5, 0.51)
    ]
    assert found == [1.0, 0.0]


def several(kind, rows):
    logits = torch.tensor(np.random.default_rng(0).normal(size=(rows, 3)), dtype=torch.float32)
    return (logits.softmax(-1) if kind == "softmax" else logits.sigmoid()).numpy()


SEVERAL = np.array([[1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0]] * 3)


@pytest.mark.parametrize("metric", [metrics.multi_label(3), metrics.multi_label(3, auc=True)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softmax_is_refused_unless_each_sample_has_one_label(metric, dtype):
    with pytest.raises(ValueError, match=r"sum to 1.*partial\(reducers\.probabilities, multi_label=True\)"):
        score(metric, {"probabilities": several("softmax", 12).astype(dtype)}, SEVERAL)
    with pytest.raises(ValueError, match="sum to 1"):
        metrics.tuned_thresholds(several("softmax", 12), SEVERAL)


@pytest.mark.parametrize(
    ("probabilities", "labels"),
    [
        (several("sigmoid", 12), SEVERAL),
        (several("softmax", 12), np.eye(3, dtype=int)[np.arange(12) % 3]),  # one label a sample, against the rest
        (several("softmax", 1), SEVERAL[:1]),  # by chance
        (np.eye(3)[np.arange(12) % 3], SEVERAL),  # decisions, not chances
        (np.full((12, 2), 0.5), SEVERAL[:, :2]),  # a head that was never trained
        (np.ones((12, 1)), SEVERAL[:, :1]),
        (several("softmax", 12), np.where(SEVERAL == 0, -100, SEVERAL)),  # nobody knows whether there are others
    ],
)
def test_rows_that_sum_to_1_by_chance_are_scored(probabilities, labels):
    assert score(metrics.multi_label(probabilities.shape[1]), {"probabilities": probabilities}, labels)


def test_floats_without_a_name_are_not_taken_for_probabilities():
    """They may be logits, whatever their values are."""
    for metric, labels in ((metrics.classification(2), np.array([1])), (metrics.multi_label(2), np.array([[0, 1]]))):
        with pytest.raises(ValueError, match=r"reducers\.probabilities.*got predictions one array \(1, 2\)"):
            score(metric, np.array([[0.25, 0.75]]), labels)


def test_bfloat16_probabilities_of_a_step():
    labels = torch.tensor([0, 1, 1])
    probabilities = torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]], dtype=torch.bfloat16)
    assert score(metrics.classification(2), {"probabilities": probabilities}, labels)["log_loss"] > 10


def test_the_metrics_read_what_the_reducers_return():
    logits = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, IGNORED, 0, 1, 2, 0])
    known = labels != IGNORED
    expected = sklearn_scores(labels[known].numpy(), logits[known].argmax(1).numpy(), 3)
    for column, source in COLUMNS.items():
        reduced = getattr(reducers, source)(logits, labels)
        assert column == "ids" or reduced.keys() == {column}
        found = score(metrics.classification(3), reduced, labels)
        shared = found.keys() & expected.keys()
        assert {key: found[key] for key in shared} == same({key: expected[key] for key in shared})
    several = reducers.probabilities(logits, torch.ones(8, 3), multi_label=True)
    recall = score(metrics.multi_label(3), several, torch.ones(8, 3))["recall_micro"]
    assert recall == same(float((logits >= 0).double().mean()))


def test_glue_reports_what_the_benchmark_reports():
    generator = np.random.default_rng(0)
    (labels, ids), (x, y) = generator.integers(0, 2, (2, 50)), generator.random((2, 50))
    both = {"f1": sk.f1_score(labels, ids), "accuracy": sk.accuracy_score(labels, ids)}
    for task, predictions, targets, expected in (
        ("cola", ids, labels, {"matthews_correlation": sk.matthews_corrcoef(labels, ids)}),
        ("mrpc", ids, labels, both),
        ("qqp", ids, labels, both),
        ("stsb", x, y, {"spearman": stats.spearmanr(x, y).statistic, "pearson": stats.pearsonr(x, y).statistic}),
        ("mnli", ids + 1, labels, {"accuracy": np.mean(ids + 1 == labels)}),
    ):
        found = score(metrics.glue(task), predictions, targets)
        assert {key: found[key] for key in expected} == pytest.approx(expected), task
    with pytest.raises(ValueError, match=r"cola, sst2.*got 'ax'"):
        metrics.glue("ax")


def best_by_trying(probabilities, labels):
    """The largest of the probabilities with the best F1, by trying each."""
    scores = {at: sk.f1_score(labels, probabilities >= at, zero_division=0) for at in {*probabilities.tolist()}}
    best = max(scores.values(), default=0.0)
    return max(at for at, value in scores.items() if value >= best - 1e-12) if labels.any() else 0.5


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(1, 15))
def test_no_probability_gives_a_better_f1(seed, samples):
    probabilities, labels = labelled(samples, 3, seed, missing=0.2)
    known = labels != IGNORED
    expected = tuple(best_by_trying(probabilities[known[:, k], k], labels[known[:, k], k]) for k in range(3))
    assert metrics.tuned_thresholds(probabilities, labels) == expected
    shared = metrics.tuned_thresholds(probabilities, labels, shared=True)
    assert shared == (best_by_trying(probabilities[known], labels[known]),) * 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_metric_reaches_what_was_tuned(dtype):
    probabilities, labels = labelled(200, 3, 0, missing=0.2)
    probabilities = probabilities.astype(dtype)
    evaluated = evaluation({"probabilities": probabilities}, labels)
    tuned = metrics.multi_label(3, threshold=metrics.tuned_thresholds(probabilities, labels), average="per_class")(
        evaluated
    )
    plain = metrics.multi_label(3, average="per_class")(evaluated)
    for k in range(3):
        known = labels[:, k] != IGNORED
        at = best_by_trying(probabilities[known, k], labels[known, k])
        reached = probabilities[known, k] >= np.float64(at)
        assert tuned[f"f1/{k}"] == pytest.approx(sk.f1_score(labels[known, k], reached))
        assert tuned[f"f1/{k}"] > plain[f"f1/{k}"] or at == 0.5


def test_without_a_positive_label_the_threshold_is_a_half():
    labels = np.array([[0, 1, IGNORED], [0, 1, IGNORED]])
    assert metrics.tuned_thresholds(np.array([[0.9, 0.3, 0.2], [0.8, 0.6, 0.1]]), labels) == (0.5, 0.3, 0.5)
    assert metrics.tuned_thresholds(np.zeros((0, 2)), np.zeros((0, 2), np.int64)) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        ([[3.0, -2.0]], [[1, 0]], r"reducers\.probabilities with multi_label=True"),
        ([[0.5, 0.5]], [[1, 2]], "0, 1, or -100"),
        ([[0.5, 0.5]], [[1, np.nan]], "0, 1, or -100"),
        ([[0.5, 0.5]], [1], r"\(B, 2\), where 2 is num_classes|\(samples, classes\)"),
    ],
)
def test_invalid_probabilities_and_labels_of_several_are_refused(probabilities, labels, message):
    probabilities, labels = np.array(probabilities), np.array(labels)
    scored = partial(score, metrics.multi_label(2), {"probabilities": probabilities})
    for call in (scored, partial(metrics.tuned_thresholds, probabilities)):
        with pytest.raises(ValueError, match=message):
            call(labels)
