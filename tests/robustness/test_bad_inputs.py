"""Every public function refuses bad inputs with a message, instead of returning a wrong number or hanging.

The calls that work and the values that must be refused are those of `tests/registry.py`. The docstrings promise a
ValueError, TypeError or RuntimeError; an IndexError, AttributeError or KeyError was not thought of.
"""

import contextlib
import itertools
import linecache
import operator
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import metrics
from metrics._core.evaluation import leaves, mapped
from tests.bad_values import INF, NAN
from tests.registry import EXPORTS, FURTHER, evaluated

PROMISED = (ValueError, TypeError, RuntimeError)
CALLED = [export for export in [*EXPORTS, *FURTHER] if export.works is not None]
BAD = {f"{export.name}-{name}": (export, name) for export in CALLED for name in export.all_bad}
EVALUATIONS = {export.name: export.evaluation for export in EXPORTS if export.evaluation}


def described(value: Any) -> str:
    return f"{tuple(value.shape)}{value.dtype}" if isinstance(value, (torch.Tensor, np.ndarray)) else repr(value)


def assert_refused(call: Callable[[], Any]) -> None:
    """Assert that the error was raised by the packages: one from another library does not say what to do."""
    with pytest.raises(PROMISED) as caught:
        call()
    assert len(str(caught.value)) > 10, "an error says what was wrong"
    if "meta tensor" not in str(caught.value):  # torch says all there is to say about a tensor without values
        frame, line = list(traceback.walk_tb(caught.tb))[-1]
        assert frame.f_globals["__name__"].partition(".")[0] in ("lossfns", "reducers", "metrics"), caught.value
        assert linecache.getline(frame.f_code.co_filename, line).strip().startswith("raise "), caught.value


def raising(error: BaseException) -> Callable[[], Any]:
    def call():
        raise error

    return call


NOT_REFUSALS = {
    "index error": raising(IndexError("list index out of range")),
    "key error": raising(KeyError("labels")),
    "attribute error": raising(AttributeError("no shape")),
    "a number": lambda: 1.0,
    "no message": raising(ValueError()),
    "of Python": lambda: [][operator.index(2.5)],
    "of numpy": lambda: np.asarray("text", np.float64),
}


@pytest.mark.parametrize("call", NOT_REFUSALS.values(), ids=NOT_REFUSALS)
def test_results_and_errors_from_elsewhere_are_not_refusals(call):
    with pytest.raises((AssertionError, pytest.fail.Exception, IndexError, KeyError, AttributeError)):
        assert_refused(call)


@pytest.mark.parametrize("export", CALLED, ids=lambda export: export.name)
def test_the_call_works_until_an_option_is_misspelt(export):
    export()
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        export(lable_smoothing=0.1)


@pytest.mark.parametrize(("export", "name"), BAD.values(), ids=BAD)
def test_bad_values_are_refused(export, name):
    for value in export.all_bad[name]:
        try:
            assert_refused(lambda value=value: export(**{name: value}))
        except BaseException as error:
            error.add_note(f"{export.name}({name}={described(value)})")
            raise


COMMON = {
    "no evaluation": lambda given: None,
    "no predictions": lambda given: evaluated(None, given.label_ids),
    "no labels": lambda given: evaluated(given.predictions, None),
    "lists": lambda given: evaluated([1, 2], given.label_ids),
    "texts": lambda given: evaluated("abc", given.label_ids),
    "a number": lambda given: evaluated(np.array(1), given.label_ids),
    "too many rows": lambda given: evaluated(given.predictions, np.concatenate([given.label_ids] * 2)),
    "unequal batches": lambda given: evaluated([given.predictions], [given.label_ids] * 2),
    "no batch": lambda given: evaluated([], []),
}


@pytest.mark.parametrize(("metric", "what"), list(itertools.product(EVALUATIONS, COMMON)))
def test_what_is_not_an_evaluation_is_refused(metric, what):
    case = EVALUATIONS[metric]
    assert_refused(lambda: case.metric(COMMON[what](evaluated(case.predictions, case.labels))))


@pytest.mark.parametrize("case", EVALUATIONS.values(), ids=EVALUATIONS)
def test_bad_evaluations_are_refused_and_forgotten(case):
    before = case.metric(evaluated(case.predictions, case.labels))
    for bad in case.all_bad_predictions:
        assert_refused(lambda bad=bad: case.metric(evaluated(bad, case.labels)))
    for bad in case.bad_labels:
        assert_refused(lambda bad=bad: case.metric(evaluated(case.predictions, bad)))
    np.testing.assert_equal(case.metric(evaluated(case.predictions, case.labels)), before)


def with_values(predictions: Any, place: str, values: list[float]) -> Any:
    """Return a copy of `predictions` whose first numbers in one place are `values`."""
    copied = mapped(np.copy, predictions)
    found = dict(leaves(copied))[place].reshape(-1)
    found[: len(values)] = values[: len(found)]
    return copied


FLOATS = [
    (name, place)
    for name, case in EVALUATIONS.items()
    for place, leaf in leaves(case.predictions)
    if leaf.dtype.kind == "f"
]


@pytest.mark.parametrize("values", [[INF], [-INF], [NAN], [INF, -INF], [INF, NAN]], ids=str)
@pytest.mark.parametrize(("name", "place"), FLOATS)
def test_what_is_not_finite_is_refused_or_scored_without_a_warning(name, place, values):
    case = EVALUATIONS[name]
    score, labels = case.metric, case.labels
    good, bad = evaluated(case.predictions, labels), evaluated(with_values(case.predictions, place, values), labels)
    groups = [place % 2 for place in range(len(labels))]
    calls = [
        lambda: score(bad),
        lambda: score(evaluated([bad.predictions] * 2, [labels] * 2)),
        lambda: metrics.by_group(score, groups)(bad),
        lambda: metrics.bootstrap(score, n=5)(bad),
        lambda: metrics.compare(score, bad, good, n=5),
    ]
    for call in calls:
        with warnings.catch_warnings(), contextlib.suppress(*PROMISED):
            warnings.simplefilter("error")
            call()
