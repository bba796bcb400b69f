"""What the Trainer hands to compute_metrics, as NumPy arrays whose dim 0 is the sample.

One evaluation comes as arrays, as lists of batches (`eval_do_concat_batches=False`), or step by step as torch tensors
(`batch_eval_metrics=True`). Tensors are known by their methods: nothing here imports torch.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Columns = dict[str, Array]


class EvalPrediction(Protocol):
    """The part of `transformers.EvalPrediction` that metrics read."""

    @property
    def predictions(self) -> Any:
        """What the reducer returned."""

    @property
    def label_ids(self) -> Any:
        """The labels, as the collator made them."""


class Batch(NamedTuple):
    """Predictions and labels of the same `rows` samples: an array, or tuples and dicts of arrays."""

    predictions: Any
    labels: Any
    rows: int


def holds_tensors(eval_pred: EvalPrediction) -> bool:
    """Return whether tensors came (a step of a streaming evaluation), and not NumPy arrays (a whole one).

    Raises:
        TypeError: what came is not an EvalPrediction.
    """
    _check_evaluation(eval_pred)
    return any(_is_tensor(leaf) for _, leaf in leaves(eval_pred.predictions))


def batches(eval_pred: EvalPrediction) -> list[Batch]:
    """Return the evaluation as batches of NumPy arrays: one, or several where the Trainer kept lists.

    Args:
        eval_pred: predictions and labels; the predictions nested at will, the labels an array, a tuple of arrays, or a
            dict whose "labels" are taken. Lists of labels are batches, and the predictions then a list of the same
            length.

    Returns:
        At least one batch.

    Raises:
        TypeError: what came is not an EvalPrediction, or a leaf is neither array nor tensor.
        ValueError: labels are missing, or something has not one row for each sample.
    """
    _check_evaluation(eval_pred)
    predictions, labels = eval_pred.predictions, eval_pred.label_ids
    if not isinstance(labels, list):
        return [_batch(predictions, labels)]
    if not isinstance(predictions, list) or len(predictions) != len(labels) or not labels:
        count = len(predictions) if isinstance(predictions, list) else f"a {type(predictions).__name__}"
        raise ValueError(
            f"labels came as a list of {len(labels)} batches, predictions as {count}: "
            "with eval_do_concat_batches=False both are lists with one entry for each batch, at least one"
        )
    return [_batch(*pair) for pair in zip(predictions, labels, strict=True)]


def named_columns(predictions: Any) -> Columns:
    """Return the arrays of a dict by name, together with those of the dicts inside it (what `combine` returns).

    Args:
        predictions: anything; what is not a dict has no names and gives an empty result.

    Returns:
        The arrays by their innermost name.

    Raises:
        ValueError: two arrays have one name.
    """
    found: Columns = {}
    for outer, value in predictions.items() if isinstance(predictions, Mapping) else ():
        for name, array in value.items() if isinstance(value, Mapping) else ((outer, value),):
            if name in found:
                raise ValueError(
                    f"predictions hold two columns called {name!r} ({describe(predictions)}): "
                    "let the reducer return each name once"
                )
            found[name] = array
    return found


def describe(tree: Any) -> str:
    """Return names, shapes and dtypes of everything in `tree`, for error messages."""
    return ", ".join(f"{path or 'one array'} {leaf.shape} {leaf.dtype}" for path, leaf in leaves(tree)) or "nothing"


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of nested dicts, tuples and lists with its path, as `sums.nll` or `0`."""
    if not isinstance(tree, (Mapping, tuple, list)):
        yield path, tree
        return
    for key, branch in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from leaves(branch, f"{path}.{key}" if path else str(key))


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with the function's value in the place of each leaf."""
    if isinstance(tree, Mapping):
        return {key: mapped(function, branch) for key, branch in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(mapped(function, branch) for branch in tree)
    return function(tree)


def _check_evaluation(eval_pred: Any) -> None:
    if not (hasattr(eval_pred, "predictions") and hasattr(eval_pred, "label_ids")):
        raise TypeError(
            f"a metric takes an EvalPrediction (.predictions, .label_ids), not {type(eval_pred).__name__}: "
            "give it to the Trainer as compute_metrics=, uncalled"
        )


def _batch(predictions: Any, label_ids: Any) -> Batch:
    labels = mapped(_to_numpy, _labels(label_ids))
    predictions = mapped(_to_numpy, predictions)
    found = [("labels", path, leaf) for path, leaf in leaves(labels)]
    if not found:
        raise ValueError("no labels came; a metric needs at least one array of them")
    found += [("predictions", path, leaf) for path, leaf in leaves(predictions)]
    shape = found[0][2].shape
    for side, path, leaf in found:
        if leaf.ndim == 0 or leaf.shape[:1] != shape[:1]:
            raise ValueError(
                f"{'.'.join(filter(None, (side, path)))} has shape {leaf.shape}, the labels have shape {shape}: "
                "dim 0 must be the sample in all of them. A reducer returns (batch, ...): it neither averages over "
                "the batch nor selects or flattens tokens"
            )
    return Batch(predictions, labels, shape[0])


def _labels(label_ids: Any) -> Any:
    if isinstance(label_ids, Mapping):
        if "labels" not in label_ids:
            raise ValueError(f"a dict of labels needs the key 'labels'; it has {', '.join(map(str, label_ids))}")
        return label_ids["labels"]
    return tuple(map(_labels, label_ids)) if isinstance(label_ids, tuple) else label_ids


def _is_tensor(leaf: Any) -> bool:
    return hasattr(leaf, "detach") and hasattr(leaf, "cpu")


def _to_numpy(leaf: Any) -> Array:
    if isinstance(leaf, np.ndarray):
        return leaf
    if not _is_tensor(leaf):
        raise TypeError(
            f"predictions and labels must be arrays or tensors, or tuples and dicts of them; a {type(leaf).__name__} "
            f"came ({leaf!r}). A reducer returns tensors only, and compute_metrics needs labels"
        )
    tensor = leaf.detach().cpu()
    array: Array = (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()  # NumPy has no bfloat16
    return array
