"""The evaluation that the Trainer passes to `compute_metrics`, as NumPy arrays whose dim 0 is the sample.

An evaluation is given as arrays, as lists of batches (`eval_do_concat_batches=False`), or step by step as torch tensors
(`batch_eval_metrics=True`). Tensors are recognized by their methods, so that this module does not import torch.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Columns = dict[str, Array]
# The label that marks what is not scored.
IGNORED = -100


class EvalPrediction(Protocol):
    """The part of `transformers.EvalPrediction` that metrics read."""

    @property
    def predictions(self) -> Any:
        """The output of the reducer."""

    @property
    def label_ids(self) -> Any:
        """The labels, as the collator made them."""


class Batch(NamedTuple):
    """Predictions and labels of the same `rows` samples, each an array or nested tuples and dicts of arrays."""

    predictions: Any
    labels: Any
    rows: int


def holds_tensors(eval_pred: EvalPrediction) -> bool:
    """Return True for tensors (a step of a streaming evaluation) and False for NumPy arrays (a whole evaluation).

    Raises:
        TypeError: if `eval_pred` is not an EvalPrediction.
    """
    _check_evaluation(eval_pred)
    return any(_is_tensor(leaf) for _, leaf in leaves(eval_pred.predictions))


def batches(eval_pred: EvalPrediction) -> list[Batch]:
    """Return the evaluation as batches of NumPy arrays: one, or several where the Trainer kept lists.

    Args:
        eval_pred: predictions and labels. Predictions may be nested; labels are an array, a tuple of arrays, or a dict
            whose entry "labels" is taken. A list of labels is a list of batches, and predictions must then be a list
            of the same length.

    Returns:
        At least one batch.

    Raises:
        TypeError: if `eval_pred` is not an EvalPrediction, or a leaf is neither an array nor a tensor.
        ValueError: if labels are missing, or an array does not have one row per sample.
    """
    _check_evaluation(eval_pred)
    predictions, labels = eval_pred.predictions, eval_pred.label_ids
    if not isinstance(labels, list):
        return [_batch(predictions, labels)]
    if not isinstance(predictions, list) or len(predictions) != len(labels) or not labels:
        count = len(predictions) if isinstance(predictions, list) else f"a {type(predictions).__name__}"
        raise ValueError(
            f"labels are a list of {len(labels)} batches and predictions {count}: with eval_do_concat_batches=False "
            "both must be lists with one entry per batch, and at least one batch"
        )
    return [_batch(*pair) for pair in zip(predictions, labels, strict=True)]


def named_columns(predictions: Any) -> Columns:
    """Return the arrays of a dict by name, including those of dicts inside it (the output of `reducers.combine`).

    Args:
        predictions: predictions of any structure; anything but a dict has no names and gives an empty dict.

    Returns:
        The arrays by their innermost name.

    Raises:
        ValueError: if two arrays have the same name.
    """
    found: Columns = {}
    for outer, value in predictions.items() if isinstance(predictions, Mapping) else ():
        for name, array in value.items() if isinstance(value, Mapping) else ((outer, value),):
            if name in found:
                raise ValueError(
                    f"two columns are called {name!r}, but each name must occur once: {describe(predictions)}"
                )
            found[name] = array
    return found


def describe(tree: Any) -> str:
    """Return names, shapes and dtypes of all arrays in `tree`, for error messages."""
    return ", ".join(f"{path or 'one array'} {leaf.shape} {leaf.dtype}" for path, leaf in leaves(tree)) or "nothing"


def missing(expected: str, predictions: Any) -> ValueError:
    """Return the error for predictions that lack what a metric reads.

    Args:
        expected: what the metric reads.
        predictions: what it was given.

    Returns:
        The error, to be raised.
    """
    return ValueError(f"the metric needs {expected}; got predictions {describe(predictions)}")


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of nested dicts, tuples and lists with its path, such as `sums.nll` or `0`."""
    if not isinstance(tree, (Mapping, tuple, list)):
        yield path, tree
        return
    for key, branch in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from leaves(branch, f"{path}.{key}" if path else str(key))


def mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return `tree` with each leaf replaced by `function(leaf, *leaves_of_others)`; lists become tuples.

    Args:
        function: a function of as many leaves as there are trees.
        tree: nested dicts, tuples and lists.
        others: trees of the same structure.

    Returns:
        A tree of the same structure.
    """
    if isinstance(tree, Mapping):
        return {key: mapped(function, branch, *(other[key] for other in others)) for key, branch in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(mapped(function, *branches) for branches in zip(tree, *others, strict=True))
    return function(tree, *others)


def _check_evaluation(eval_pred: Any) -> None:
    if not (hasattr(eval_pred, "predictions") and hasattr(eval_pred, "label_ids")):
        raise TypeError(
            f"a metric takes an EvalPrediction (.predictions, .label_ids), got {type(eval_pred).__name__}: give the "
            "metric to the Trainer as compute_metrics=, without calling it"
        )


def _batch(predictions: Any, label_ids: Any) -> Batch:
    labels = mapped(_to_numpy, _labels(label_ids))
    predictions = mapped(_to_numpy, predictions)
    found = [("labels", path, leaf) for path, leaf in leaves(labels)]
    if not found:
        raise ValueError("labels are missing: a metric needs at least one array of labels")
    found += [("predictions", path, leaf) for path, leaf in leaves(predictions)]
    shape = found[0][2].shape
    for side, path, leaf in found:
        if leaf.ndim == 0 or leaf.shape[:1] != shape[:1]:
            raise ValueError(
                f"{'.'.join(filter(None, (side, path)))} has shape {leaf.shape}, the labels have shape {shape}: dim 0 "
                "must be the sample in both. A reducer must not average over the batch, nor select or flatten tokens"
            )
    return Batch(predictions, labels, shape[0])


def _labels(label_ids: Any) -> Any:
    if isinstance(label_ids, Mapping):
        if "labels" not in label_ids:
            raise ValueError(f"a dict of labels needs the key 'labels', got {', '.join(map(str, label_ids))}")
        return label_ids["labels"]
    return tuple(map(_labels, label_ids)) if isinstance(label_ids, tuple) else label_ids


def _is_tensor(leaf: Any) -> bool:
    return hasattr(leaf, "detach") and hasattr(leaf, "cpu")


def _to_numpy(leaf: Any) -> Array:
    if isinstance(leaf, np.ndarray):
        return leaf
    if not _is_tensor(leaf):
        raise TypeError(
            "predictions and labels must be arrays or tensors, or tuples and dicts of them, got a "
            f"{type(leaf).__name__} ({leaf!r}). A reducer must return tensors only, and compute_metrics needs labels"
        )
    tensor = leaf.detach().cpu()
    array: Array = (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()  # NumPy has no bfloat16
    return array
