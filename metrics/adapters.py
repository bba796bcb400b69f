"""Metrics of other libraries as metrics for the Trainer, and back; no library is imported before it is used.

It is not known whether these metrics can be summed over samples, so the rows of the whole evaluation are kept: ids or
numbers, without those whose label is -100.
"""

import copy
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse

from ._core.arguments import check
from ._core.classes import named_predictions, per_sample
from ._core.evaluation import IGNORED, Array, Columns, describe, missing
from ._core.metric import Metric, check_metric

Kind = Literal["ids", "probabilities", "scores"]
# Columns of a sparse row of any length: as many as the index allows, so that all batches have the same width.
WIDTH = 2**31 - 1
BATCH = 10_000


def from_sklearn(
    function: Callable[..., Any], *, kind: Kind, greater_is_better: bool | None, name: str | None = None
) -> Metric:
    """Return a metric from a function of true and predicted values, such as those of scikit-learn and SciPy.

    Args:
        function: returns one number; options are bound by `partial(f1_score, average="macro")`.
        kind: what the function takes: "ids" (integers of the labels' shape), "scores" (floats of the labels' shape),
            each as one long array, or "probabilities" (labels, classes). Predictions are an array, or have a column of
            that name.
        greater_is_better: the direction, None for neither.
        name: the key; None: the name of the function.

    Returns:
        A metric that needs all rows at once; NaN without labels.

    Raises:
        TypeError: if the function cannot be called, or the direction is not True, False or None.
        ValueError: if the kind is unknown, or the function has no name.

    Example:
        >>> from sklearn.metrics import jaccard_score
        >>> metric = from_sklearn(jaccard_score, kind="ids", greater_is_better=True)
        >>> metric(SimpleNamespace(predictions=np.array([1, 1]), label_ids=np.array([1, -100])))
        {'jaccard_score': 1.0}
    """
    expected = "a function of true and predicted values, such as sklearn.metrics.f1_score"
    check(callable(function) and not isinstance(function, type), "function", expected, function)
    found: Any = function.func if isinstance(function, partial) else function
    key = str(getattr(found, "__name__", "<lambda>") if name is None else name)
    if name is None and not key.isidentifier():
        raise ValueError(f"the function has no name that could be a key, got {key!r}: set name=")
    return _adapted(partial(_called, function=function, key=key), kind, {key: greater_is_better})


def from_evaluate(
    module: Any, *, kind: Kind, higher_is_better: Mapping[str, bool | None], options: Mapping[str, Any] | None = None
) -> Metric:
    """Return a metric from a loaded metric of Hugging Face `evaluate`; nothing is downloaded or cast.

    Args:
        module: a loaded metric, `evaluate.load(...)`.
        kind: as for `from_sklearn`.
        higher_is_better: for every key of its result whether greater is better, None for neither.
        options: options of its `compute`, such as `{"average": "macro"}`.

    Returns:
        A metric that needs all rows at once; NaN without labels.

    Raises:
        ValueError: if the kind is unknown.
        TypeError: if `module` is not a loaded metric; in the call: if the values are floats and the module takes
            integers.

    Example:
        >>> import evaluate
        >>> from metrics import classification
        >>> module = to_evaluate(classification(2), kind="ids")
        >>> metric = from_evaluate(module, kind="ids", higher_is_better=classification(2).higher_is_better)
        >>> metric(SimpleNamespace(predictions=np.array([1, 1]), label_ids=np.array([1, 0])))["accuracy"]
        0.5
    """
    _check_methods(module, "a loaded metric, evaluate.load(...)", "features", "add_batch", "compute")
    return _adapted(partial(_evaluated, module=module, options=dict(options or {})), kind, higher_is_better)


def from_torchmetrics(
    module: Any, *, kind: Kind, greater_is_better: bool | None = None, name: str | None = None
) -> Metric:
    """Return a metric from a torchmetrics object.

    Args:
        module: a `torchmetrics.Metric`; it is copied, so that its state does not change.
        kind: as for `from_sklearn`.
        greater_is_better: the direction; None: what the object says.
        name: the key; None: the name of its class. If the object computes several numbers, such as one per class,
            their keys are `{name}_{place}`, or `{name}_{key}` if it names them.

    Returns:
        A metric that needs all rows at once; NaN without labels.

    Raises:
        ValueError: if the kind is unknown.
        TypeError: if `module` is not an object of `torchmetrics.Metric`, or the direction is not True, False or None;
            in the call: if it computes anything but numbers.

    Example:
        >>> from torchmetrics.classification import BinaryAccuracy
        >>> metric = from_torchmetrics(BinaryAccuracy(), kind="ids")
        >>> metric(SimpleNamespace(predictions=np.array([1, 1]), label_ids=np.array([1, 0])))
        {'BinaryAccuracy': 0.5}
    """
    expected = "a torchmetrics.Metric (the members of a MetricCollection one by one, joined by build())"
    _check_methods(module, expected, "higher_is_better", "reset", "update", "compute")
    key = type(module).__name__ if name is None else name
    better = module.higher_is_better if greater_is_better is None else greater_is_better
    return _adapted(partial(_updated, module=module, key=key), kind, {key: better, f"{key}_{{part}}": better})


def to_evaluate(metric: Metric, *, kind: Kind) -> Any:
    """Return a metric of Hugging Face `evaluate` from a metric of this package, for its Evaluator and `combine`.

    Args:
        metric: any metric of labels (samples,).
        kind: what predictions are, as for `from_sklearn`.

    Returns:
        An `evaluate.Metric`; `compute(predictions=, references=)` returns the scores.

    Raises:
        TypeError: if `metric` is not a metric of this package.
        ValueError: if the kind is unknown.

    Example:
        >>> from metrics import classification
        >>> to_evaluate(classification(2), kind="ids").compute(predictions=[1, 1], references=[1, 0])["accuracy"]
        0.5
    """
    check_metric(metric)
    _check_kind(kind)
    import evaluate

    datasets = sys.modules["datasets"]  # evaluate has imported it
    number = datasets.Value("int64" if kind == "ids" else "float64")
    features = {
        "predictions": datasets.Sequence(number) if kind == "probabilities" else number,
        "references": datasets.Value("float64" if kind == "scores" else "int64"),
    }

    class Wrapped(evaluate.Metric):  # type: ignore[misc]
        def _info(self) -> Any:
            text = {"description": repr(metric), "citation": "", "inputs_description": "predictions, references"}
            return evaluate.MetricInfo(**text, features=datasets.Features(features))

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            found = {kind: np.array(predictions)} if kind == "probabilities" else np.array(predictions)
            return metric(SimpleNamespace(predictions=found, label_ids=np.array(references)))

    # Even in memory it creates a folder, by default in the home directory.
    return Wrapped(keep_in_memory=True, cache_dir=tempfile.gettempdir())


# --- shared by all ----------------------------------------------------------------------------------------------------


def scored_values(predictions: Any, labels: Any, *, kind: Kind) -> dict[str, Any]:
    """Return predictions and labels of each sample where the label is not ignored, as sparse rows of any length.

    Raises:
        TypeError: if labels are not one array, or predictions are of another kind.
        ValueError: if predictions are missing, or do not have the labels' shape.
    """
    if not isinstance(labels, np.ndarray):
        raise TypeError(f"labels must be one array, got {describe(labels)}")
    alone = isinstance(predictions, np.ndarray)
    found = predictions if alone else named_predictions(predictions).get(kind)
    if found is None:
        raise missing(f"{kind}, alone or as the column {kind!r}", predictions)
    if (found.dtype.kind in "iu") != (kind == "ids"):
        raise TypeError(f"{kind} must be {'integers' if kind == 'ids' else 'floats'}, got {describe(found)}")
    if found.shape[: labels.ndim] != labels.shape or found.ndim != labels.ndim + (kind == "probabilities"):
        raise ValueError(f"{kind} of shape {found.shape} do not fit labels of shape {labels.shape}")
    active = labels != IGNORED
    return {"predictions": _ragged(found, active), "labels": _ragged(labels, active)}


def _ragged(values: Array, active: Array) -> Any:
    counts = per_sample(active) * math.prod(values.shape[active.ndim :])
    ends = np.concatenate([[0], np.cumsum(counts)])
    places = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)
    return sparse.csr_array((values[active].ravel(), places, ends), shape=(len(active), WIDTH))


@dataclass(frozen=True)
class _Score:
    """A function of long arrays as a score of sparse rows; without labels every key is NaN."""

    compute: Callable[[Array, Array], Mapping[str, ArrayLike]]
    keys: tuple[str, ...]
    by_class: bool

    def __repr__(self) -> str:
        return f"adapted({', '.join(self.keys)})"

    def __call__(self, rows: Columns) -> Mapping[str, ArrayLike]:
        columns: Any = rows
        labels, predictions = columns["labels"].data, columns["predictions"].data
        if not labels.size:
            return dict.fromkeys(self.keys, np.nan)
        return self.compute(labels, predictions.reshape(len(labels), -1) if self.by_class else predictions)


def _called(labels: Array, predictions: Array, *, function: Callable[..., Any], key: str) -> dict[str, ArrayLike]:
    return {key: function(labels, predictions)}


def _evaluated(labels: Array, predictions: Array, *, module: Any, options: Mapping[str, Any]) -> dict[str, ArrayLike]:
    given = {"predictions": predictions, "references": labels}
    for name, values in given.items():
        _check_cast(module, name, values)
    for start in range(0, len(labels), BATCH):
        module.add_batch(**{name: values[start : start + BATCH] for name, values in given.items()})
    return dict(module.compute(**options))


def _updated(labels: Array, predictions: Array, *, module: Any, key: str) -> dict[str, ArrayLike]:
    torch = sys.modules["torch"]  # torchmetrics has imported it
    module = copy.deepcopy(module)
    module.reset()
    module.update(torch.from_numpy(predictions.copy()), torch.from_numpy(labels.copy()))
    computed = module.compute()
    several = computed if isinstance(computed, Mapping) else {}
    if getattr(computed, "ndim", 0) == 1:
        several = dict(enumerate(computed))
    found = {f"{key}_{part}": value for part, value in several.items()} or {key: computed}
    if any(getattr(value, "ndim", None) != 0 for value in found.values()):
        raise TypeError(
            f"{key} must compute single numbers, which the Trainer can log, got "
            f"{describe(computed) if isinstance(computed, tuple | list) else found}. Choose an average, or subclass it "
            "to return a few numbers by name"
        )
    return {name: value.item() for name, value in found.items()}


def _adapted(compute: Any, kind: Kind, higher_is_better: Mapping[str, bool | None]) -> Metric:
    _check_kind(kind)
    return Metric(
        statistics=partial(scored_values, kind=kind),
        score=_Score(compute, tuple(key for key in higher_is_better if "{" not in key), kind == "probabilities"),
        higher_is_better=higher_is_better,
        needs_all_samples="it is not known whether it can be summed over samples",
    )


def _check_methods(module: Any, expected: str, *names: str) -> None:
    if isinstance(module, type) or not all(hasattr(module, name) for name in names):
        given = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise TypeError(f"module must be {expected}, got {given}")


def _check_kind(kind: str) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")


def _check_cast(module: Any, name: str, values: Array) -> None:
    """Raise TypeError for floats that the module would silently cast to integers."""
    features = module.features if isinstance(module.features, list) else [module.features]
    dtypes = [str(getattr(feature.get(name), "dtype", "")) for feature in features]
    if values.dtype.kind == "f" and any("int" in dtype for dtype in dtypes):
        raise TypeError(f"{name} are floats, which the module would truncate to {dtypes[0]}: give it ids")
