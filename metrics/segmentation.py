"""Scores of segmentation, from counts of pixels."""

from collections.abc import Mapping, Sequence
from functools import partial

from ._core.classes import class_names
from ._core.confusion import mean_where
from ._core.evaluation import Columns
from ._core.metric import Metric, ratio
from .classification import class_counts

MEANS: dict[str, bool | None] = dict.fromkeys(("mean_iou", "mean_dice", "pixel_accuracy"), True)
HIGHER_IS_BETTER: dict[str, bool | None] = {**MEANS, "iou/{label}": True, "dice/{label}": True}


def segmentation(num_classes: int | None = None, *, id2label: Mapping[int, str] | None = None) -> Metric:
    """Score one class per pixel by intersection over union, Dice and accuracy, over all pixels of the evaluation.

    With hits h, labels a and predictions p of a class, in pixels::

        iou = h / (a + p - h)     dice = 2 h / (a + p)     pixel_accuracy = sum h / sum a

    The reducer is `segmentation_counts`, whose column `confusion` is small; ids of the labels' shape are counted here.
    Keys: `mean_iou`, `mean_dice`, averaged over the classes that occur in labels or predictions; `iou/{label}`,
    `dice/{label}`, NaN where a class does not occur; `pixel_accuracy`. Without labels all scores are NaN.

    Args:
        num_classes: number of classes.
        id2label: names of the classes, such as `model.config.id2label`, instead of `num_classes`.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Raises:
        TypeError: if not exactly one of `num_classes` and `id2label` is given, or it has another type.
        ValueError: if there are no classes, ids are not 0, 1, 2, ..., or two classes have the same name.

    References:
        M. Everingham et al., "The Pascal Visual Object Classes (VOC) Challenge", 2010,
        https://doi.org/10.1007/s11263-009-0275-4
        L. R. Dice, "Measures of the Amount of Ecologic Association Between Species", 1945,
        https://doi.org/10.2307/1932409

    Example:
        >>> import numpy as np
        >>> from types import SimpleNamespace
        >>> labels, ids = np.array([[[0, 0, 1, -100]]]), np.array([[[0, 1, 1, 1]]])
        >>> segmentation(2)(SimpleNamespace(predictions=ids, label_ids=labels))["mean_iou"]
        0.5
    """
    names = class_names(num_classes, id2label)
    by_class = {f"{score}/{name}": True for score in ("iou", "dice") for name in names}
    return Metric(
        statistics=partial(class_counts, num_classes=len(names)),
        score=partial(pixel_scores, names=names),
        higher_is_better={**MEANS, **by_class},
    )


def pixel_scores(sums: Columns, *, names: Sequence[str]) -> Columns:
    """Return the scores of `segmentation`.

    Args:
        sums: `hits`, `actual`, `predicted` (..., C), for one evaluation or a stack of them.
        names: names of the classes.

    Returns:
        Scores (...).
    """
    hits, areas = sums["hits"], sums["actual"] + sums["predicted"]
    values = {"iou": ratio(hits, areas - hits), "dice": ratio(2 * hits, areas)}
    scores = {f"mean_{name}": mean_where(value, areas > 0) for name, value in values.items()}
    scores |= {f"{name}/{label}": value[..., at] for name, value in values.items() for at, label in enumerate(names)}
    return {**scores, "pixel_accuracy": ratio(hits.sum(-1), sums["actual"].sum(-1))}
