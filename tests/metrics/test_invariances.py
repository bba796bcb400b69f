"""Laws that hold for every metric, as scikit-learn's common tests have them: order, repetition, names of classes."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from sklearn.metrics import f1_score

import metrics
from metrics._core.evaluation import mapped
from tests import registry
from tests.registry import Entry

from . import test_text
from .evaluations import evaluation

N = -100
AVERAGES = ("macro", "micro", "weighted", "per_class")
SIDE_AVERAGES = ("macro", "micro", "samples", "per_class")
COUNTS = {"tokens", "samples", "entities", "queries", "pairs"}
GENERATOR = np.random.default_rng(0)
CHANCES = GENERATOR.dirichlet(np.ones(4), 24)
ROWS = {"predictions": {"probabilities": CHANCES}, "labels": GENERATOR.integers(0, 4, 24)}
SIDES = {"predictions": {"probabilities": GENERATOR.random((24, 3))}, "labels": GENERATOR.integers(0, 2, (24, 3))}
REALS = {"predictions": GENERATOR.random((24, 2)), "labels": GENERATOR.random((24, 2))}
PAIRS = {name: GENERATOR.random(24) for name in ("reward_chosen", "reward_rejected")} | {"pairs": np.arange(24) % 3 / 2}

TEXTS = {"predictions": test_text.PREDICTIONS, "labels": test_text.LABELS}
# A bootstrap draws at random; where no four words are right, sacrebleu's smoothing depends on the length of the texts.
APART = {"bootstrap", "translation"}


def is_lawful(entry):
    """Whether the metric says that it can be computed on any samples, also several times on one."""
    metric = entry.function
    return (
        entry.name not in APART
        and isinstance(metric, metrics.Metric)
        and metric.supports_resampling
        and not metric.depends_on_order
    )


METRICS = [
    *filter(is_lawful, registry.METRICS),
    Entry("classification", metrics.classification(4, average=AVERAGES, auc=True), ROWS, "ranking"),
    Entry("multi_label", metrics.multi_label(3, average=SIDE_AVERAGES, auc=True), SIDES, "ranking"),
    Entry("regression", metrics.regression(rank_correlation=True), REALS, "ranking"),
    Entry("translation", metrics.translation(test_text.TOKENIZER), TEXTS),
    Entry("preferences", metrics.preferences(), {"predictions": PAIRS, "labels": np.zeros(24)}),
    Entry(
        "glue",
        metrics.glue("stsb"),
        {"predictions": REALS["predictions"][:, 0], "labels": REALS["labels"][:, 0]},
        "stsb",
    ),
]


def scored(entry, rows):
    """The scores of some of the samples, each as often as it is named."""
    chosen = (mapped(lambda leaf: leaf[rows], entry.options[name]) for name in ("predictions", "labels"))
    return replace(entry.function, num_samples=None)(evaluation(*chosen))


def every_row(entry):
    return np.arange(len(entry.options["labels"]))


def same(expected):
    return pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


def assert_order_does_not_matter(entry):
    order = np.random.default_rng(1).permutation(every_row(entry))
    assert scored(entry, order) == same(scored(entry, every_row(entry)))


def assert_repetition_is_weight(entry):
    once, twice = (scored(entry, np.tile(every_row(entry), times)) for times in (1, 2))
    assert twice == same({key: value * (1 + (key in COUNTS)) for key, value in once.items()})
    if not entry.function.needs_all_samples:
        evaluated = evaluation(entry.options["predictions"], entry.options["labels"])
        columns, _ = entry.function.centered(entry.function.columns(evaluated), {})
        weights = np.random.default_rng(2).integers(0, 4, len(every_row(entry)))
        weighted = entry.function.result(mapped(lambda column: weights @ column, columns))
        assert weighted == same(scored(entry, np.repeat(every_row(entry), weights)))


@pytest.mark.parametrize("entry", METRICS, ids=lambda entry: entry.label)
def test_the_order_of_samples_does_not_matter(entry):
    assert_order_does_not_matter(entry)


@pytest.mark.parametrize("entry", METRICS, ids=lambda entry: entry.label)
def test_a_sample_that_comes_twice_is_one_of_weight_two(entry):
    assert_repetition_is_weight(entry)


@pytest.mark.parametrize("entry", METRICS, ids=lambda entry: entry.label)
def test_without_samples_every_ratio_is_nan_and_every_count_0(entry):
    scores = scored(entry, every_row(entry)[:0])
    assert scores == pytest.approx({key: 0.0 if key in COUNTS else math.nan for key in scores}, nan_ok=True)


UNKNOWN = ("classification", "multi_label", "regression", "segmentation", "entity_f1", "retrieval", "from_")


@pytest.mark.parametrize(
    "entry", [entry for entry in METRICS if entry.name.startswith(UNKNOWN)], ids=lambda entry: entry.label
)
def test_without_labels_every_ratio_is_nan_and_every_count_0(entry):
    labels = np.full_like(entry.options["labels"], N)
    scores = replace(entry.function, num_samples=None)(evaluation(entry.options["predictions"], labels))
    assert scores == pytest.approx({key: 0.0 if key in COUNTS else math.nan for key in scores}, nan_ok=True)


def test_metrics_that_break_the_invariances_are_caught():
    def kept(name, score):
        statistics = lambda predictions, labels: {"x": predictions}  # noqa: E731
        own = metrics.Metric(
            statistics=statistics, score=score, higher_is_better={"score": True}, needs_all_samples="a test"
        )
        return Entry(name, own, {"predictions": GENERATOR.random(8), "labels": np.zeros(8)})

    with pytest.raises(AssertionError):
        assert_order_does_not_matter(kept("first", lambda rows: {"score": rows["x"][0]}))
    with pytest.raises(AssertionError):
        assert_repetition_is_weight(kept("sample deviation", lambda rows: {"score": rows["x"].std(ddof=1)}))


NAMES = ("O", "B-X", "I-X", "B-Y", "I-Y")
NEW = np.array([3, 0, 4, 1, 2])  # the new id of each class
TAGGED = GENERATOR.integers(0, 5, (12, 7))
IDS = np.where(GENERATOR.random((12, 7)) < 0.6, TAGGED, GENERATOR.integers(0, 5, (12, 7)))
TAGGED[GENERATOR.random((12, 7)) < 0.2] = N
SPREAD = GENERATOR.dirichlet(np.ones(5), 12)

RELABELLED = {
    "classification": (partial(metrics.classification, average=AVERAGES), IDS, TAGGED),
    "classification with probabilities": (
        partial(metrics.classification, average=AVERAGES, auc=True),
        {"probabilities": SPREAD},
        TAGGED[:, 0],
    ),
    "multi_label": (
        partial(metrics.multi_label, average=SIDE_AVERAGES, auc=True),
        {"probabilities": GENERATOR.random((12, 5))},
        GENERATOR.integers(0, 2, (12, 5)),
    ),
    "segmentation": (metrics.segmentation, {"ids": IDS}, TAGGED),
    "entity_f1": (partial(metrics.entity_f1, scheme="IOB2"), IDS, TAGGED),
    "entity_f1 lenient": (partial(metrics.entity_f1, scheme="IOB2", lenient=True), IDS, TAGGED),
    "from_sklearn": (
        lambda id2label: metrics.from_sklearn(partial(f1_score, average="macro"), kind="ids", greater_is_better=True),
        IDS,
        TAGGED,
    ),
}


def renamed(values):
    """Ids by their new numbers, columns of classes in their new places."""
    if values.dtype.kind in "iu" and values.max() > 1:
        return np.where(values == N, N, NEW[values.clip(0)])
    return values[:, np.argsort(NEW)]


@pytest.mark.parametrize("case", RELABELLED)
def test_scores_do_not_depend_on_the_numbers_of_classes(case):
    make, predictions, labels = RELABELLED[case]
    before = make(id2label=dict(enumerate(NAMES)))(evaluation(predictions, labels))
    metric = make(id2label={int(NEW[place]): name for place, name in enumerate(NAMES)})
    assert metric(evaluation(mapped(renamed, predictions), renamed(labels))) == same(before)
    assert metric(evaluation(predictions, renamed(labels))) != same(before)
