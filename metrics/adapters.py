"""Metrics of other libraries as metrics of the Trainer, and back; none of them is imported before it is used.

What they need is not known to add up, so that the rows of the whole evaluation are kept: ids or numbers, labels of -100
taken out.
"""

import copy
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse

from ._core.arguments import check, string, table
from ._core.classes import IGNORED, missing, named_predictions
from ._core.evaluation import Array, Columns, describe
from ._core.metric import Metric, check_metric

Kind = Literal["ids", "probabilities", "scores"]
REASON = "nothing says that it adds up over samples"
# Columns of a row of any length: as wide as its index allows, so that all batches fit together.
WIDTH = 2**31 - 1
BATCH = 10_000


def from_sklearn(
    function: Callable[..., Any], *, kind: Kind, greater_is_better: bool | None, name: str | None = None
) -> Metric:
    """Turn a function of true and predicted values, as scikit-learn's and SciPy's, into a metric.

    Args:
        function: returns one number; options are bound by `partial(f1_score, average="macro")`.
        kind: what it gets: "ids" (integers of the labels' shape), "scores" (floats of the labels' shape), each as one
            long array, or "probabilities" (labels, classes). Predictions come alone or as the column of that name.
        greater_is_better: the direction, None for neither.
        name: the key; None: the name of the function.

    Returns:
        A metric that needs all rows at once; NaN without any label.

    Raises:
        TypeError: what can't be called, a name that is no text, or another direction than True, False and None.
        ValueError: an unknown kind, or a function without a name.

    Example:
        >>> from sklearn.metrics import jaccard_score
        >>> metric = from_sklearn(jaccard_score, kind="ids", greater_is_better=True)
        >>> metric(SimpleNamespace(predictions=np.array([1, 1]), label_ids=np.array([1, -100])))
        {'jaccard_score': 1.0}
    """
    wanted = "a function of true and predicted values, as sklearn.metrics.f1_score"
    check(callable(function) and not isinstance(function, type), "function", wanted, function)
    key = _name(function) if name is None else string("name", name, "the key of the score")
    return _adapted(_Called(function, key), kind, {key: greater_is_better})


def from_evaluate(
    module: Any,
    *,
    kind: Kind,
    directions: Mapping[str, bool | None],
    options: Mapping[str, Any] | None = None,
) -> Metric:
    """Turn a metric of Hugging Face `evaluate` into a metric of the Trainer; nothing is downloaded, nothing cast.

    Args:
        module: a loaded metric, or the path of a script on this machine.
        kind: as for `from_sklearn`.
        directions: for every key of its result whether greater is better, None for neither.
        options: of its `compute`, as `{"average": "macro"}`.

    Returns:
        A metric that needs all rows at once; NaN without any label.

    Raises:
        ValueError: an unknown kind, or no script at the path.
        TypeError: neither a metric of `evaluate` nor a path, or directions or options that are no dict; in the call:
            floats, where the module takes integers.

    Example:
        >>> import evaluate
        >>> from metrics import classification
        >>> module = to_evaluate(classification(2), kind="ids")
        >>> metric = from_evaluate(module, kind="ids", directions=classification(2).directions)
        >>> metric(SimpleNamespace(predictions=np.array([1, 1]), label_ids=np.array([1, 0])))["accuracy"]
        0.5
    """
    table("directions", directions, "a dict of the keys of the result and whether greater is better")
    options = table("options", {} if options is None else options, 'options of compute, as {"average": "macro"}')
    if isinstance(module, (str, Path)):
        if not Path(module).exists():
            raise ValueError(f"there is no script {str(module)!r} here: metrics are never downloaded; give a path")
        module = _loaded(str(module))
    _check_methods(module, "a loaded metric of evaluate or the path of its script", "features", "add_batch", "compute")
    return _adapted(_Evaluated(module, dict(options), tuple(directions)), kind, directions)


def from_torchmetrics(
    module: Any, *, kind: Kind, greater_is_better: bool | None = None, name: str | None = None
) -> Metric:
    """Turn a torchmetrics object into a metric of the Trainer.

    Args:
        module: a `torchmetrics.Metric`; it is copied, so that its own state stays as it is.
        kind: as for `from_sklearn`.
        greater_is_better: the direction; None: what the object says.
        name: the key; None: the name of its class. Where the object computes several numbers, as one for each class,
            their keys are `{name}_{place}`, or `{name}_{key}` where it names them.

    Returns:
        A metric that needs all rows at once; NaN without any label.

    Raises:
        ValueError: an unknown kind.
        TypeError: not an object of `torchmetrics.Metric`, a name that is no text, or another direction than True, False
            and None; in the call: it computes something else than numbers.

    Example:
        >>> from torchmetrics.classification import BinaryAccuracy
        >>> metric = from_torchmetrics(BinaryAccuracy(), kind="ids")
        >>> metric(SimpleNamespace(predictions=np.array([1, 1]), label_ids=np.array([1, 0])))
        {'BinaryAccuracy': 0.5}
    """
    one = "a torchmetrics.Metric (of a MetricCollection one after the other, in build())"
    _check_methods(module, one, "higher_is_better", "reset", "update", "compute")
    key = type(module).__name__ if name is None else string("name", name, "the key of the score")
    better = module.higher_is_better if greater_is_better is None else greater_is_better
    return _adapted(_Updated(module, key), kind, {key: better, f"{key}_{{part}}": better})


def to_evaluate(metric: Metric, *, kind: Kind) -> Any:
    """Turn a metric of this package into one of Hugging Face `evaluate`, for its Evaluator and `combine`.

    Args:
        metric: any metric of labels (samples,).
        kind: what predictions are, as for `from_sklearn`.

    Returns:
        An `evaluate.Metric`; `compute(predictions=, references=)` returns the scores.

    Raises:
        TypeError: not a metric of this package.
        ValueError: an unknown kind.

    Example:
        >>> from metrics import classification
        >>> to_evaluate(classification(2), kind="ids").compute(predictions=[1, 1], references=[1, 0])["accuracy"]
        0.5
    """
    check_metric(metric)
    _check_kind(kind)
    evaluate = _import_evaluate()
    datasets = sys.modules["datasets"]  # evaluate has imported it
    number = datasets.Value("int64" if kind == "ids" else "float64")
    features = {
        "predictions": datasets.Sequence(number) if kind == "probabilities" else number,
        "references": datasets.Value("float64" if kind == "scores" else "int64"),
    }

    class Wrapped(evaluate.Metric):  # type: ignore[misc,name-defined]
        def _info(self) -> Any:
            text = {"description": repr(metric), "citation": "", "inputs_description": "predictions, references"}
            return evaluate.MetricInfo(**text, features=datasets.Features(features))

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            found = {kind: np.array(predictions)} if kind == "probabilities" else np.array(predictions)
            return metric(SimpleNamespace(predictions=found, label_ids=np.array(references)))

    # Even in memory it makes a folder, by default in the home directory.
    return Wrapped(keep_in_memory=True, cache_dir=tempfile.gettempdir())


# --- all of them ------------------------------------------------------------------------------------------------------


def labelled_values(predictions: Any, labels: Any, *, kind: Kind) -> dict[str, Any]:
    """Return predictions and labels of each sample where the label counts, as sparse rows of any length.

    Raises:
        TypeError: labels are not one array, or predictions of another kind.
        ValueError: predictions are missing, or not of the labels' shape.
    """
    if not isinstance(labels, np.ndarray):
        raise TypeError(f"labels must be one array; {describe(labels)} came")
    alone = isinstance(predictions, np.ndarray)
    found = predictions if alone else named_predictions(predictions).get(kind)
    if found is None:
        raise missing(f"{kind}, alone or as the column {kind!r}", predictions)
    if (found.dtype.kind in "iu") != (kind == "ids"):
        raise TypeError(f"{kind} must be {'integers' if kind == 'ids' else 'floats'}; {describe(found)} came")
    if found.shape[: labels.ndim] != labels.shape or found.ndim != labels.ndim + (kind == "probabilities"):
        raise ValueError(f"{kind} have shape {found.shape}, labels {labels.shape}: they don't fit")
    active = labels != IGNORED
    return {"predictions": _ragged(found, active), "labels": _ragged(labels, active)}


def _ragged(values: Array, active: Array) -> Any:
    counts = active.reshape(len(active), math.prod(active.shape[1:])).sum(1)
    counts *= math.prod(values.shape[active.ndim :])
    ends = np.concatenate([[0], np.cumsum(counts)])
    places = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)
    return sparse.csr_array((values[active].ravel(), places, ends), shape=(len(active), WIDTH))


@dataclass(frozen=True)
class _Whole:
    """A function of long arrays as a score of sparse rows; without any label every key is NaN."""

    compute: Callable[[Array, Array], Mapping[str, ArrayLike]]
    keys: tuple[str, ...]
    by_class: bool

    def __repr__(self) -> str:
        return f"{type(self.compute).__name__.strip('_').lower()}({', '.join(self.keys)})"

    def __call__(self, rows: Columns) -> Mapping[str, ArrayLike]:
        columns: Any = rows
        labels, predictions = columns["labels"].data, columns["predictions"].data
        if not labels.size:
            return dict.fromkeys(self.keys, np.nan)
        return self.compute(labels, predictions.reshape(len(labels), -1) if self.by_class else predictions)


@dataclass(frozen=True)
class _Called:
    function: Callable[..., Any]
    key: str

    def __call__(self, labels: Array, predictions: Array) -> dict[str, ArrayLike]:
        return {self.key: self.function(labels, predictions)}


@dataclass(frozen=True)
class _Evaluated:
    module: Any
    options: Mapping[str, Any] = field(hash=False)
    keys: tuple[str, ...]

    def __call__(self, labels: Array, predictions: Array) -> Mapping[str, ArrayLike]:
        given = {"predictions": predictions, "references": labels}
        for name, values in given.items():
            _check_cast(self.module, name, values)
        for start in range(0, len(labels), BATCH):
            self.module.add_batch(**{name: values[start : start + BATCH] for name, values in given.items()})
        result: Mapping[str, ArrayLike] = self.module.compute(**self.options)
        return result


@dataclass(frozen=True)
class _Updated:
    module: Any
    key: str

    def __call__(self, labels: Array, predictions: Array) -> dict[str, ArrayLike]:
        torch = sys.modules["torch"]  # the object has imported it
        module = copy.deepcopy(self.module)
        module.reset()
        module.update(torch.from_numpy(predictions.copy()), torch.from_numpy(labels.copy()))
        return self._named(module.compute())

    def _named(self, computed: Any) -> dict[str, ArrayLike]:
        several = computed if isinstance(computed, Mapping) else {}
        if getattr(computed, "ndim", 0) == 1:
            several = dict(enumerate(computed))
        found = {f"{self.key}_{part}": value for part, value in several.items()} or {self.key: computed}
        if any(getattr(value, "ndim", None) != 0 for value in found.values()):
            raise TypeError(
                f"{self.key} computes {describe(computed) if isinstance(computed, tuple | list) else found}; the "
                "Trainer logs single numbers. Choose an average, or subclass it to return a few of them by name"
            )
        return {name: value.item() for name, value in found.items()}


def _adapted(compute: Any, kind: Kind, directions: Mapping[str, bool | None]) -> Metric:
    _check_kind(kind)
    return Metric(
        statistics=partial(labelled_values, kind=kind),
        score=_Whole(compute, tuple(key for key in directions if "{" not in key), kind == "probabilities"),
        directions=directions,
        whole=REASON,
    )


def _check_methods(module: Any, wanted: str, *names: str) -> None:
    if isinstance(module, type) or not all(hasattr(module, name) for name in names):
        came = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise TypeError(f"the adapter takes {wanted}; {came} came")


def _check_kind(kind: str) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"kind is one of {', '.join(get_args(Kind))}; {kind!r} came")


def _check_cast(module: Any, name: str, values: Array) -> None:
    """Refuse floats where the module would make integers of them without a word."""
    features = module.features if isinstance(module.features, list) else [module.features]
    dtypes = [str(getattr(feature.get(name), "dtype", "")) for feature in features]
    if values.dtype.kind == "f" and any("int" in dtype for dtype in dtypes):
        raise TypeError(f"{name} are floats, and the module would cut them to {dtypes[0]}: give it ids")


def _loaded(path: str) -> Any:
    """Return the metric of a script as `evaluate.load` does, which would write into the home directory."""
    folder = tempfile.gettempdir()
    _import_evaluate()
    loading = sys.modules["evaluate.loading"]
    found = loading.evaluation_module_factory(path, dynamic_modules_path=_place_of_scripts()[1])
    module = loading.import_main_class(found.module_path)(keep_in_memory=True, cache_dir=folder, hash=found.hash)
    module.download_and_prepare()
    return module


@cache
def _place_of_scripts() -> tuple[tempfile.TemporaryDirectory[str], str]:
    """Return a folder that lasts as long as the process, and the package in it that scripts are copied to."""
    folder = tempfile.TemporaryDirectory(prefix="evaluate-")
    return folder, sys.modules["evaluate.loading"].init_dynamic_modules("evaluate_scripts", folder.name)


def _import_evaluate() -> Any:
    import evaluate

    return evaluate


def _name(function: Any) -> str:
    found = getattr(function.func if isinstance(function, partial) else function, "__name__", "<lambda>")
    if not str(found).isidentifier():
        raise ValueError(f"the function is called {found!r}: say name=")
    return str(found)
