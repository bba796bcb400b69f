import itertools
import math
import operator
import pickle
import tracemalloc
import warnings
from fractions import Fraction

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse, stats
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

import reducers
from metrics import (
    best_model,
    best_model_kwargs,
    bootstrap,
    build,
    by_group,
    classification,
    glue,
    multi_label,
    tuned_thresholds,
)
from metrics._core.keys import find
from metrics.classification import COLUMNS

from .evaluations import assert_modes_agree, cut, evaluation, sized, stream, tensors

IGNORED = -100
AVERAGES = ("macro", "micro", "weighted", "per_class")
SCORES = ("precision", "recall", "f1")
QUICK = settings(deadline=None, max_examples=40)


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


def sklearn_scores(labels, ids, num_classes):
    """Every score of ids by scikit-learn, one call a score."""
    expected = {
        "accuracy": sk.accuracy_score(labels, ids),
        "balanced_accuracy": silently(sk.balanced_accuracy_score, labels, ids),
        "matthews_correlation": silently(sk.matthews_corrcoef, labels, ids),
        "cohen_kappa": silently(sk.cohen_kappa_score, labels, ids),
    }
    functions = {"precision": sk.precision_score, "recall": sk.recall_score, "f1": sk.f1_score}
    for name, function in functions.items():
        for average in ("macro", "micro", "weighted"):
            expected[f"{name}_{average}"] = function(labels, ids, average=average, zero_division=0)
        values = function(labels, ids, average=None, labels=range(num_classes), zero_division=0)
        for label, value in enumerate(values):
            occurs = label in labels or label in ids
            expected[f"{name}/{label}"] = value if occurs else math.nan
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


# --- against scikit-learn ---------------------------------------------------------------------------------------------


@QUICK
@given(pairs())
def test_ids_score_as_in_scikit_learn(drawn):
    num_classes, labels, ids = drawn
    expected = sklearn_scores(labels, ids, num_classes)
    assert score(classification(num_classes, average=AVERAGES), ids, labels) == same(expected)


@settings(max_examples=12)
@given(st.integers(2, 4), st.integers(0, 2**32 - 1))
def test_stacks_of_matrices_score_as_in_scikit_learn(num_classes, seed):
    generator = np.random.default_rng(seed)
    stack = generator.integers(0, 4, (2, 5, num_classes, num_classes)) * (generator.random((2, 5, 1, 1)) < 0.9)
    stack[0, 0, 1:] = stack[0, 1, :, 1:] = 0  # one class in the labels, one in the predictions
    stack[1, 0, :, 0] = stack[1, 0, 0] = 0  # an absent class
    counts = {"hits": np.einsum("...ii->...i", stack), "actual": stack.sum(-1), "predicted": stack.sum(-2)}
    found = classification(num_classes, average=AVERAGES).scores(counts)
    for place in np.ndindex(2, 5):
        here = {key: values[place] for key, values in found.items()}
        matrix = stack[place]
        if not matrix.any():
            assert all(np.isnan(value) for value in here.values())
            continue
        labels, ids = np.repeat(np.indices(matrix.shape).reshape(2, -1), matrix.ravel(), axis=1)
        assert here == same(sklearn_scores(labels, ids, num_classes))


@pytest.mark.parametrize("pos_label", [0, 1, "no", "yes"])
def test_binary_scores_one_class(pos_label):
    labels, ids = np.array([0, 1, 1, 0, 1]), np.array([0, 1, 0, 1, 1])
    metric = classification(id2label={0: "no", 1: "yes"}, average="binary", pos_label=pos_label)
    place = {"no": 0, "yes": 1}.get(pos_label, pos_label)
    expected = sk.precision_recall_fscore_support(labels, ids, average="binary", pos_label=place)[:3]
    scores = score(metric, ids, labels)
    assert [scores[name] for name in SCORES] == list(expected)
    columns = metric.columns(evaluation({"confusion": sk.confusion_matrix(labels, ids).reshape(1, 4)}, labels[:1]))
    stack = metric.scores({name: np.repeat(column, 2, axis=0) for name, column in columns.items()})
    assert [stack[name][1] for name in SCORES] == list(expected)


def calibration_error(probabilities, labels):
    """Guo et al. 2017, (2) and (3), a bin and a sample at a time."""
    error = 0.0
    for index in range(15):
        inside = [
            (max(row), float(int(np.argmax(row)) == label))
            for row, label in zip(probabilities, labels, strict=True)
            if index / 15 < max(row) <= (index + 1) / 15
        ]
        if inside:
            confidence, accuracy = (sum(values) / len(inside) for values in zip(*inside, strict=True))
            error += len(inside) / len(labels) * abs(accuracy - confidence)
    return error


@pytest.mark.parametrize("num_classes", [2, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_probabilities_score_as_in_scikit_learn(num_classes, dtype):
    probabilities, labels = sample(num_classes)
    probabilities[0] = np.eye(num_classes)[1]
    labels[0] = 0  # a probability of 0 for the label
    known = labels != IGNORED
    p, y = probabilities[known], labels[known]
    expected = sklearn_scores(y, p.argmax(1), num_classes) | {
        "log_loss": silently(sk.log_loss, y, p, labels=range(num_classes)),
        "brier_loss": sk.brier_score_loss(y, p if num_classes > 2 else p[:, 1], labels=range(num_classes)),
        "expected_calibration_error": calibration_error(p, y),
        "roc_auc": sk.roc_auc_score(y, p if num_classes > 2 else p[:, 1], multi_class="ovr"),
        "average_precision": sk.average_precision_score(y, p if num_classes > 2 else p[:, 1]),
    }
    found = score(
        classification(num_classes, average=AVERAGES, auc=True), {"probabilities": probabilities.astype(dtype)}, labels
    )
    assert found == pytest.approx(expected, rel=1e-12 if dtype == np.float64 else 1e-6)


def test_the_positive_class_is_ranked():
    probabilities, labels = sample(2, ignored=0)
    found = score(classification(2, pos_label=0, auc=True), {"probabilities": probabilities}, labels)
    assert found["average_precision"] == same(sk.average_precision_score(labels == 0, probabilities[:, 0]))


def test_classes_without_labels_are_left_out_of_auc():
    probabilities, labels = sample(3, ignored=0)
    labels[labels == 2] = 0
    found = score(classification(3, auc=True), {"probabilities": probabilities}, labels)
    areas = [sk.roc_auc_score(labels == label, probabilities[:, label]) for label in (0, 1)]
    assert found["roc_auc"] == same(np.mean(areas))


# --- what counts ------------------------------------------------------------------------------------------------------


def tokens():
    generator = np.random.default_rng(1)
    labels = generator.integers(0, 3, (6, 7))
    labels[generator.random(labels.shape) < 0.4] = IGNORED
    labels[2] = IGNORED
    ids = generator.integers(0, 3, labels.shape).astype(np.int32)
    ids[labels == IGNORED] = generator.choice([0, 2, IGNORED, 77], (labels == IGNORED).sum())
    return ids, labels


def assert_masked(metric, ids, labels):
    known = labels != IGNORED
    expected = sklearn_scores(labels[known], ids[known], 3)
    found = score(metric, ids, labels)
    assert found == same({key: expected[key] for key in found})


def test_tokens_are_masked_by_their_labels():
    assert_masked(classification(3, average=AVERAGES), *tokens())


def test_a_mask_by_predictions_is_caught():
    def masked_by_predictions(evaluated):
        ids, labels = evaluated.predictions, evaluated.label_ids
        known = ids != IGNORED
        return {"accuracy": float((ids == labels)[known].mean())}

    with pytest.raises(AssertionError):
        assert_masked(masked_by_predictions, *tokens())


def counted(ids, labels, num_classes):
    """What `confusion_counts` returns, a sample at a time."""
    rows = [
        sk.confusion_matrix(label[label != IGNORED], id_[label != IGNORED], labels=range(num_classes)).ravel()
        if (label != IGNORED).any()
        else np.zeros(num_classes**2, np.int64)
        for id_, label in zip(ids, labels, strict=True)
    ]
    return {"confusion": np.array(rows)}


def test_every_mode_and_every_column_give_one_result():
    ids, labels = tokens()
    known = labels != IGNORED
    expected = sklearn_scores(labels[known], ids[known], 3)
    columns = counted(ids, labels, 3)
    for predictions in (ids, {"ids": ids}, {"kept": columns, "ids": ids}, columns):
        for bounds in ([0, 6], [0, 1, 6], range(7)):
            metric = sized(classification(3, average=AVERAGES), 6)
            assert_modes_agree(metric, predictions, labels, bounds, expected)


def test_batches_of_different_lengths_count_as_padded_ones():
    ids, labels = tokens()
    parts, targets = cut(ids, [0, 2, 6]), cut(labels, [0, 2, 6])
    longer = [np.pad(array, ((0, 0), (0, 3)), constant_values=IGNORED) for array in (parts[1], targets[1])]
    metric = build(classification(3), num_samples=6)
    expected = score(metric, ids, labels)
    assert score(metric, [parts[0], longer[0]], [targets[0], longer[1]]) == expected
    assert stream(metric, map(tensors, [parts[0], longer[0]]), map(tensors, [targets[0], longer[1]])) == expected


def test_probabilities_of_tokens():
    probabilities, labels = sample(3)
    flat = score(classification(3), {"probabilities": probabilities}, labels)
    assert score(classification(3), {"probabilities": probabilities.reshape(12, 5, 3)}, labels.reshape(12, 5)) == same(
        flat
    )


def test_ids_have_precedence_over_probabilities_and_counts_over_both():
    probabilities, labels = sample(3)
    ids = np.where(labels == IGNORED, 0, labels)
    kept = {"probabilities": probabilities, "ids": ids}
    assert score(classification(3), kept, labels)["accuracy"] == 1.0
    wrong = np.tile(np.eye(1, 9, 1, dtype=np.int64), (60, 1))
    assert score(classification(3), {**kept, "confusion": wrong}, labels)["accuracy"] == 0.0
    assert (
        score(classification(3), kept, labels)["log_loss"]
        == score(classification(3), {"probabilities": probabilities}, labels)["log_loss"]
    )


def test_weighted_counts_are_the_counts_of_repeated_samples():
    """The counts of each sample are kept sparse, and weights times counts are the counts of a replicate."""
    ids, labels = tokens()
    metric = classification(3)
    rows = metric.columns(evaluation(ids, labels))
    for column in rows.values():
        assert sparse.issparse(column)
        assert column.dtype == np.int64
        assert column.nnz <= (labels != IGNORED).sum()
    weights = np.random.default_rng(0).integers(0, 3, (4, 6))
    stack = metric.scores({name: weights @ column for name, column in rows.items()})
    for place, times in enumerate(weights):
        again = score(metric, ids.repeat(times, axis=0), labels.repeat(times, axis=0))
        assert {key: values[place] for key, values in stack.items()} == same(again)


def many_classes(size=2000, num_classes=30_000):
    generator = np.random.default_rng(0)
    labels = generator.integers(0, num_classes, size)
    return num_classes, labels, np.where(generator.random(size) < 0.6, labels, generator.integers(0, 9, size))


def test_memory_is_linear_in_the_number_of_classes():
    num_classes, labels, ids = many_classes()
    metric = build(classification(num_classes), num_samples=len(labels))
    tracemalloc.start()
    scores = stream(metric, np.split(ids, 8), np.split(labels, 8))
    intervals = bootstrap(classification(num_classes), n=20)(evaluation(ids, labels))
    groups = by_group(classification(num_classes), np.arange(len(labels)) % 2)(evaluation(ids, labels))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400 * 8 * num_classes  # numbers a class, of which one matrix has 30,000
    occurring = np.unique([labels, ids], return_inverse=True)[1].reshape(2, -1)  # scikit-learn's matrix is smaller so
    expected = sklearn_scores(*occurring, 0)
    assert scores == same({key: expected[key] for key in scores})
    assert intervals["accuracy_low"] <= scores["accuracy"] <= intervals["accuracy_high"]
    half = slice(None, None, 2)
    assert groups["matthews_correlation/0"] == same(sk.matthews_corrcoef(labels[half], ids[half]))


# --- where little is known --------------------------------------------------------------------------------------------

UNDEFINED = [
    (np.array([], np.int64), np.array([], np.int64)),
    (np.array([1, 2]), np.array([IGNORED, IGNORED])),
    (np.zeros((0, 4), np.int32), np.zeros((0, 4), np.int64)),
]


@pytest.mark.parametrize(("ids", "labels"), UNDEFINED)
def test_without_labels_every_score_is_nan(ids, labels):
    scores = score(classification(3, average=AVERAGES), ids, labels)
    assert all(math.isnan(value) for value in scores.values())


@pytest.mark.parametrize("labels", [np.array([], np.int64), np.array([IGNORED, IGNORED])])
def test_without_labels_every_score_of_probabilities_is_nan(labels):
    scores = score(classification(3, auc=True), {"probabilities": np.full((len(labels), 3), 1 / 3)}, labels)
    assert {"log_loss", "roc_auc", "average_precision"} <= scores.keys()
    assert all(math.isnan(value) for value in scores.values())


def test_one_sample_and_one_class():
    scores = score(
        classification(3, average=("macro", "per_class"), auc=True), {"probabilities": np.eye(3)[[1]]}, np.array([1])
    )
    assert scores["accuracy"] == scores["f1_macro"] == scores["f1/1"] == scores["average_precision"] == 1.0
    assert scores["matthews_correlation"] == scores["log_loss"] == scores["brier_loss"] == 0.0
    assert all(math.isnan(scores[key]) for key in ("cohen_kappa", "f1/0", "recall/2", "roc_auc"))


def test_constant_predictions():
    labels = np.array([0, 1, 2, 1])
    scores = score(classification(3, average=("macro", "per_class")), np.ones(4, np.int64), labels)
    assert scores["matthews_correlation"] == scores["cohen_kappa"] == 0.0
    assert scores["precision/0"] == scores["f1/2"] == 0.0
    assert scores["recall/1"] == 1.0
    assert scores["balanced_accuracy"] == pytest.approx(1 / 3)


def test_rare_classes_are_exact_among_billions_of_labels():
    """Two rare pairs, one of them right, among three billion; by fractions."""
    cells = np.zeros((1, 9), np.int64)
    cells[0, [0, 1, 4]] = 3 * 10**9, 1, 1
    hits, actual, predicted = (3 * 10**9, 1, 0), (3 * 10**9 + 1, 1, 0), (3 * 10**9, 2, 0)
    total = sum(actual)
    chance = sum(map(operator.mul, actual, predicted))
    scores = classification(3)(evaluation({"confusion": cells}, np.array([0])))
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
    assert score(classification(2), {"probabilities": rounded}, labels)["log_loss"] == pytest.approx(
        sk.log_loss(labels, logits.softmax(-1).numpy(), labels=[0, 1]), rel=1e-3
    )


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predictions", "labels", "error", "message"),
    [
        (
            {"probabilities": np.array([[2.0, -1.0]])},
            np.array([0]),
            ValueError,
            r"not in \[0, 1\].*reducers\.probabilities",
        ),
        (
            {"probabilities": np.array([[0.4, 0.4]])},
            np.array([0]),
            ValueError,
            r"do not sum to 1.*reducers\.probabilities",
        ),
        ({"probabilities": np.array([[np.nan, 0.4]])}, np.array([0]), ValueError, "reducers.probabilities"),
        (
            {"probabilities": np.array([[0.1, 0.2, 0.7]])},
            np.array([0]),
            ValueError,
            r"shape \(1, 2\) to fit the labels, got \(1, 3\); .* num_classes",
        ),
        (
            {"probabilities": np.array([0.0, 1.0])},
            np.array([0, 1]),
            ValueError,
            r"shape \(2, 2\) to fit the labels, got \(2,\)",
        ),
        (np.array([[0], [1]]), np.array([0, 1]), ValueError, r"the labels, \(2,\), got \(2, 1\)"),
        (np.array([0, 2]), np.array([0, 1]), ValueError, r"predicted ids must be 0 to 1, got 0 to 2"),
        (np.array([0, IGNORED]), np.array([0, 1]), ValueError, "mask_first_label"),
        (np.array([0, 1]), np.array([0, 2]), ValueError, r"labels must be 0 to 1, got 0 to 2"),
        (np.array([0, 1]), np.array([0, -1]), ValueError, "labels must be 0 to 1, got -1 to"),
        (np.array([0, 1]), np.array([0.0, 1.0]), TypeError, "class ids"),
        (np.array([0, 1]), (np.array([0, 1]), np.array([0, 1])), TypeError, "one array of class ids"),
        ((np.array([0, 1]),), np.array([0, 1]), ValueError, r"confusion \(reducers\.confusion_counts\)"),
        ({"logits": np.array([[0.0, 1.0]])}, np.array([0]), ValueError, "got predictions logits"),
        ({"ids": np.array([0.0])}, np.array([0]), TypeError, "must be integers"),
        ({"probabilities": np.array([[0, 1]])}, np.array([0]), TypeError, "must be floats"),
        ({"confusion": np.zeros((1, 2, 2))}, np.array([0]), ValueError, r"counts \(B, 4\)"),
        ({"confusion": np.full((1, 4), IGNORED)}, np.array([0]), ValueError, r"counts \(B, 4\)"),
    ],
)
def test_invalid_predictions_are_refused(predictions, labels, error, message):
    with pytest.raises(error, match=message):
        score(classification(2), predictions, labels)


def test_probabilities_at_ignored_labels_are_not_checked():
    probabilities = np.array([[0.2, 0.8], [-100.0, -100.0]])
    assert score(classification(2), {"probabilities": probabilities}, np.array([1, IGNORED]))["accuracy"] == 1.0


def test_auc_needs_one_label_per_sample_and_probabilities():
    ids, labels = tokens()
    with pytest.raises(ValueError, match=r"one label per sample.*auc=False"):
        score(classification(3, auc=True), ids, labels)
    with pytest.raises(ValueError, match=r"needs the column 'probabilities'.*reducers\.probabilities"):
        score(classification(3, auc=True), np.array([0, 1, 2]), np.array([0, 1, 1]))
    with pytest.raises(ValueError, match="auc=False leaves them out"):
        build(classification(3, auc=True), num_samples=60)(evaluation(*sample(3)), compute_result=False)


@pytest.mark.parametrize("options", [{"average": "binary"}, {"pos_label": 2}, {"average": ("macro", "binary")}])
def test_one_class_of_many_is_refused(options):
    with pytest.raises(ValueError, match="needs two classes, got 3"):
        classification(3, **options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (classification, TypeError, "exactly one of"),
        (lambda: classification(2, id2label={0: "a", 1: "b"}), TypeError, "exactly one of"),
        (lambda: classification(2.0), TypeError, "float"),
        (lambda: classification(0), ValueError, "num_classes must be >= 1, got 0"),
        (lambda: classification(id2label={1: "a", 2: "b"}), ValueError, "0, 1, 2"),
        (lambda: classification(id2label={0: "a", 1: "a"}), ValueError, "each with a different name"),
        (lambda: classification(2, average="samples"), ValueError, "weighted, per_class, got samples"),
        (lambda: classification(2, pos_label="yes"), ValueError, "got 'yes'"),
        (lambda: multi_label(2, average="weighted"), ValueError, "micro, macro, samples, per_class, got weighted"),
        (lambda: multi_label(2, threshold=1.5), ValueError, "threshold must be a probability"),
        (lambda: multi_label(2, threshold=[0.5]), ValueError, "each of the 2 classes"),
        (lambda: multi_label(2, threshold=math.nan), ValueError, "threshold"),
    ],
)
def test_invalid_options_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- the object -------------------------------------------------------------------------------------------------------

METRICS = [
    classification(id2label={"0": "O", "1": "PER"}, average=("binary", *AVERAGES), auc=True),
    multi_label(3, average=("micro", "macro", "samples", "per_class"), threshold=[0.1, 0.2, 0.3], auc=True),
]


@pytest.mark.parametrize("metric", METRICS, ids=["classification", "multi_label"])
def test_every_key_has_the_direction_that_the_package_knows(metric):
    for key, direction in metric.higher_is_better.items():
        assert best_model.HIGHER_IS_BETTER[find(key, best_model.HIGHER_IS_BETTER)] is direction
        assert best_model_kwargs(f"eval_ner_{key}", build(ner=metric))["greater_is_better"] is direction
    assert best_model_kwargs("f1/PER") == {"metric_for_best_model": "f1/PER", "greater_is_better": True}


@pytest.mark.parametrize("metric", METRICS, ids=["classification", "multi_label"])
def test_copies_are_equal_and_results_plain(metric):
    twin = pickle.loads(pickle.dumps(metric))
    assert repr(twin) == repr(metric)
    assert " at 0x" not in repr(metric)
    probabilities, labels = np.array([[0.2, 0.8, 0.5], [0.7, 0.3, 0.1]]), np.array([[1, 1, 0], [1, 0, 0]])
    if len(metric.higher_is_better) == len(METRICS[0].higher_is_better):
        probabilities, labels = probabilities[:, :2], labels[:, 0]
    scores = score(twin, {"probabilities": probabilities}, labels)
    assert list(scores) == list(metric.higher_is_better)
    assert all(type(value) is float for value in scores.values())


def test_class_names_appear_in_the_keys():
    scores = score(classification(id2label={0: "O", 1: "PER"}, average="per_class"), np.array([1]), np.array([1]))
    assert scores["f1/PER"] == 1.0
    assert math.isnan(scores["f1/O"])


# --- any number of classes a sample -----------------------------------------------------------------------------------


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
    functions = {"precision": sk.precision_score, "recall": sk.recall_score, "f1": sk.f1_score}
    expected = {"subset_accuracy": sk.accuracy_score(labels, predicted)}
    expected["hamming_loss"] = sk.hamming_loss(labels, predicted)
    for (name, function), average in itertools.product(functions.items(), ("micro", "macro", "samples", None)):
        value = function(labels, predicted, average=average, zero_division=0)
        keys = [f"{name}/{label}" for label in range(num_classes)] if average is None else [f"{name}_{average}"]
        expected |= dict(zip(keys, np.atleast_1d(value), strict=True))
    metric = multi_label(num_classes, average=("micro", "macro", "samples", "per_class"), threshold=thresholds)
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
    by_row = [
        sk.f1_score(labels[row][known[row]], predicted[row][known[row]], zero_division=0, pos_label=1) for row in rows
    ]
    found = score(
        multi_label(3, average=("micro", "macro", "samples", "per_class")), {"probabilities": probabilities}, labels
    )
    assert found["f1_macro"] == same(np.mean(own))
    assert found["f1_micro"] == same(sk.f1_score(labels[known], predicted[known]))
    assert found["f1_samples"] == same(np.mean(by_row))
    assert [found["f1/0"], found["f1/1"]] == same(own)
    assert math.isnan(found["f1/2"])
    assert found["hamming_loss"] == same(np.mean((labels != predicted)[known]))
    assert found["subset_accuracy"] == same(np.mean([((labels == predicted) | ~known)[row].all() for row in rows]))


def test_a_missing_label_counted_as_negative_is_caught():
    probabilities, labels = labelled(40, 3, 0, missing=0.4)
    naive = score(multi_label(3), {"probabilities": probabilities}, np.where(labels == IGNORED, 0, labels))
    right = score(multi_label(3), {"probabilities": probabilities}, labels)
    assert all(naive[key] != right[key] for key in right if not key.startswith("recall"))


def test_auc_of_labels_equals_scikit_learn():
    probabilities, labels = labelled(40, 3, 5, missing=0.3)
    labels[:, 2] = 0  # never positive: neither score is defined
    pairs_of = [(labels[labels[:, k] != IGNORED, k], probabilities[labels[:, k] != IGNORED, k]) for k in range(2)]
    found = score(multi_label(3, auc=True), {"probabilities": probabilities}, labels)
    assert found["roc_auc"] == same(np.mean([sk.roc_auc_score(*pair) for pair in pairs_of]))
    assert found["average_precision"] == same(np.mean([sk.average_precision_score(*pair) for pair in pairs_of]))


@pytest.mark.parametrize("labels", [np.zeros((0, 3), np.int64), np.full((2, 3), IGNORED)])
def test_no_known_label_is_nan(labels):
    metric = multi_label(3, average=("macro", "per_class", "samples", "micro"), auc=True)
    assert all(
        math.isnan(value) for value in score(metric, {"probabilities": np.full(labels.shape, 0.5)}, labels).values()
    )


def test_a_threshold_is_a_probability_and_reached_by_equality():
    found = [
        score(multi_label(1, threshold=at), {"probabilities": np.array([[0.5]])}, np.array([[1]]))["f1_micro"]
        for at in (0.5, 0.51)
    ]
    assert found == [1.0, 0.0]


@pytest.mark.parametrize(
    ("predictions", "labels", "error", "message"),
    [
        (
            {"probabilities": np.array([[3.0, -2.0]])},
            np.array([[1, 0]]),
            ValueError,
            r"reducers\.probabilities with multi_label=True",
        ),
        ({"probabilities": np.array([[0.5, 0.5]])}, np.array([[1, 2]]), ValueError, "0, 1, or -100"),
        ({"probabilities": np.array([[0.5, 0.5]])}, np.array([[1, np.nan]]), ValueError, "0, 1, or -100"),
        ({"probabilities": np.array([[0.5, 0.5]])}, np.array([1]), ValueError, r"\(B, 2\), where 2 is num_classes"),
        (
            {"probabilities": np.array([[0.5]])},
            np.array([[1, 0]]),
            ValueError,
            r"shape \(1, 2\) to fit the labels, got \(1, 1\); .* num_classes",
        ),
        (np.array([[1, 0]]), np.array([[1, 0]]), ValueError, "the column 'probabilities'"),
        ({"probabilities": np.array([[0.5, 0.5]])}, (np.array([[1, 0]]),), TypeError, "tuple"),
    ],
)
def test_invalid_multi_label_predictions_are_refused(predictions, labels, error, message):
    with pytest.raises(error, match=message):
        score(multi_label(2), predictions, labels)


def several(kind, rows):
    logits = torch.tensor(np.random.default_rng(0).normal(size=(rows, 3)), dtype=torch.float32)
    return (logits.softmax(-1) if kind == "softmax" else logits.sigmoid()).numpy()


SEVERAL = np.array([[1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0]] * 3)


@pytest.mark.parametrize("metric", [multi_label(3), multi_label(3, auc=True)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softmax_is_refused_unless_each_sample_has_one_label(metric, dtype):
    with pytest.raises(ValueError, match=r"sum to 1.*partial\(reducers\.probabilities, multi_label=True\)"):
        score(metric, {"probabilities": several("softmax", 12).astype(dtype)}, SEVERAL)
    with pytest.raises(ValueError, match="sum to 1"):
        tuned_thresholds(several("softmax", 12), SEVERAL)


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
    assert score(multi_label(probabilities.shape[1]), {"probabilities": probabilities}, labels)


def test_floats_without_a_name_are_not_taken_for_probabilities():
    """They may be logits, whatever their values are."""
    for metric, labels in ((classification(2), np.array([1])), (multi_label(2), np.array([[0, 1]]))):
        with pytest.raises(ValueError, match=r"reducers\.probabilities.*got predictions one array \(1, 2\)"):
            score(metric, np.array([[0.25, 0.75]]), labels)


def test_bfloat16_probabilities_of_a_step():
    labels = torch.tensor([0, 1, 1])
    probabilities = torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]], dtype=torch.bfloat16)
    assert score(classification(2), {"probabilities": probabilities}, labels)["log_loss"] > 10


def test_the_metrics_read_what_the_reducers_return():
    logits = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, IGNORED, 0, 1, 2, 0])
    known = labels != IGNORED
    expected = sklearn_scores(labels[known].numpy(), logits[known].argmax(1).numpy(), 3)
    for column, source in COLUMNS.items():
        reduced = getattr(reducers, source)(logits, labels)
        assert column == "ids" or reduced.keys() == {column}
        found = score(classification(3), reduced, labels)
        assert {key: found[key] for key in expected if key in found} == same(
            {key: value for key, value in expected.items() if key in found}
        )
    chances = reducers.probabilities(logits, torch.ones(8, 3), multi_label=True)
    assert score(multi_label(3), chances, torch.ones(8, 3))["recall_micro"] == same(
        float((logits >= 0).double().mean())
    )


def test_glue_reports_what_the_benchmark_reports():
    generator = np.random.default_rng(0)
    labels, ids = generator.integers(0, 2, (2, 50))
    assert glue("cola")(evaluation(ids, labels))["matthews_correlation"] == pytest.approx(
        matthews_corrcoef(labels, ids)
    )
    for task in ("mrpc", "qqp"):
        scores = glue(task)(evaluation(ids, labels))
        assert (scores["f1"], scores["accuracy"]) == pytest.approx((f1_score(labels, ids), accuracy_score(labels, ids)))
    x, y = generator.random((2, 50))
    scores = glue("stsb")(evaluation(x, y))
    assert scores["spearman"] == pytest.approx(stats.spearmanr(x, y).statistic)
    assert scores["pearson"] == pytest.approx(stats.pearsonr(x, y).statistic)
    assert glue("mnli")(evaluation(ids + 1, labels))["accuracy"] == np.mean(ids + 1 == labels)
    with pytest.raises(ValueError, match=r"cola, sst2.*got 'ax'"):
        glue("ax")


def drawn(seed, samples, num_classes=3, dtype=np.float32):
    generator = np.random.default_rng(seed)
    probabilities = generator.random((samples, num_classes)).round(1).astype(dtype)
    labels = (generator.random(probabilities.shape) < probabilities).astype(np.int64)
    labels[generator.random(labels.shape) < 0.2] = IGNORED
    return probabilities, labels


def best_by_trying(probabilities, labels):
    """The largest of the probabilities with the best F1, by trying each."""
    scores = {
        float(at): f1_score(labels, probabilities >= at, zero_division=0) for at in sorted({*probabilities.tolist()})
    }
    best = max(scores.values(), default=0.0)
    return max(at for at, value in scores.items() if value >= best - 1e-12) if labels.any() else 0.5


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 15))
def test_no_probability_gives_a_better_f1(seed, samples):
    probabilities, labels = drawn(seed, samples)
    known = labels != IGNORED
    expected = tuple(best_by_trying(probabilities[known[:, k], k], labels[known[:, k], k]) for k in range(3))
    assert tuned_thresholds(probabilities, labels) == expected
    shared = tuned_thresholds(probabilities, labels, shared=True)
    assert shared == (best_by_trying(probabilities[known], labels[known]),) * 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_metric_reaches_what_was_tuned(dtype):
    probabilities, labels = drawn(0, 200, dtype=dtype)
    evaluated = evaluation({"probabilities": probabilities}, labels)
    tuned = multi_label(3, threshold=tuned_thresholds(probabilities, labels), average="per_class")(evaluated)
    plain = multi_label(3, average="per_class")(evaluated)
    for k in range(3):
        known = labels[:, k] != IGNORED
        at = best_by_trying(probabilities[known, k], labels[known, k])
        assert tuned[f"f1/{k}"] == pytest.approx(f1_score(labels[known, k], probabilities[known, k] >= np.float64(at)))
        assert tuned[f"f1/{k}"] > plain[f"f1/{k}"] or at == 0.5


def test_without_a_positive_label_the_threshold_is_a_half():
    labels = np.array([[0, 1, IGNORED], [0, 1, IGNORED]])
    assert tuned_thresholds(np.array([[0.9, 0.3, 0.2], [0.8, 0.6, 0.1]]), labels) == (0.5, 0.3, 0.5)
    assert tuned_thresholds(np.zeros((0, 2)), np.zeros((0, 2), np.int64)) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        (np.array([[3.0]]), np.array([[1]]), r"reducers\.probabilities with multi_label=True"),
        (np.array([[0.5]]), np.array([[2]]), "0, 1, or -100"),
        (np.array([0.5]), np.array([1]), r"\(samples, classes\)"),
        (np.array([[0.5, 0.2]]), np.array([[1]]), "to fit the labels"),
    ],
)
def test_invalid_probabilities_are_refused(probabilities, labels, message):
    with pytest.raises(ValueError, match=message):
        tuned_thresholds(probabilities, labels)
