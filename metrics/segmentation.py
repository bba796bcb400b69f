"""Scores of dense prediction, from counts of pixels."""

from collections.abc import Mapping, Sequence
from functools import partial

from ._core.classes import class_names
from ._core.confusion import mean_where
from ._core.evaluation import Columns
from ._core.metric import Metric, ratio
from .classification import class_counts

SEGMENTATION: dict[str, bool | None] = dict.fromkeys(("mean_iou", "mean_dice", "pixel_accuracy"), True)
DIRECTIONS: dict[str, bool | None] = {**SEGMENTATION, "iou/{label}": True, "dice/{label}": True}


def segmentation(num_classes: int | None = None, *, id2label: Mapping[int, str] | None = None) -> Metric:
    """Score a class for every pixel: intersection over union, Dice and accuracy, over all pixels of the evaluation.

    The reducer is `segmentation_counts`, whose column `confusion` is small; ids of the labels' shape are counted here.
    Keys: `mean_iou`, `mean_dice`, over the classes that occur in labels or predictions; `iou/{label}`, `dice/{label}`,
    NaN where a class does not occur; `pixel_accuracy`. Without any label everything is NaN.

    Args:
        num_classes: number of classes.
        id2label: names of the classes, as `model.config.id2label`, in place of `num_classes`.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Raises:
        TypeError: not exactly one of `num_classes` and `id2label`, or of another type.
        ValueError: no class, ids that are not 0, 1, 2, ..., or two classes with one name.

    Source: M. Everingham et al., "The Pascal Visual Object Classes (VOC) Challenge", 2010; L. R. Dice, "Measures of the
    Amount of Ecologic Association Between Species", 1945.

    Example:
        >>> import numpy as np
        >>> from types import SimpleNamespace
        >>> labels, ids = np.array([[[0, 0, 1, -100]]]), np.array([[[0, 1, 1, 1]]])
        >>> segmentation(2)(SimpleNamespace(predictions=ids, label_ids=labels))["mean_iou"]
        0.5
    """
    names = class_names(num_classes, id2label)
    each = {f"{score}/{name}": True for score in ("iou", "dice") for name in names}
    return Metric(
        statistics=partial(class_counts, num_classes=len(names)),
        score=partial(pixel_scores, names=names),
        directions={**SEGMENTATION, **each},
    )


def pixel_scores(sums: Columns, *, names: Sequence[str]) -> Columns:
    """Return the scores that `segmentation` lists.

    Args:
        sums: `hits`, `actual`, `predicted` (..., C): a stack of evaluations, or one.
        names: of the classes.

    Returns:
        Scores (...).
    """
    hits, areas = sums["hits"], sums["actual"] + sums["predicted"]
    values = {"iou": ratio(hits, areas - hits), "dice": ratio(2 * hits, areas)}
    scores = {f"mean_{name}": mean_where(value, areas > 0) for name, value in values.items()}
    scores |= {f"{name}/{label}": value[..., at] for name, value in values.items() for at, label in enumerate(names)}
    return {**scores, "pixel_accuracy": ratio(hits.sum(-1), sums["actual"].sum(-1))}
