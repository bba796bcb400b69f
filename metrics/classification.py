"""Scores of classes: one class a label (sequences, tokens), or any number of them a sample (multi-label).

Labels of -100 are left out, by the labels alone; what is predicted there is not looked at.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import average_precision_score, roc_auc_score

from ._core import confusion
from ._core.arguments import numbers, sequence
from ._core.classes import (
    IGNORED,
    check_probabilities,
    chosen,
    class_names,
    label_ids,
    missing,
    named_predictions,
    per_sample,
    predicted_ids,
    row_starts,
    tally,
)
from ._core.confusion import Counts
from ._core.evaluation import Array, Columns
from ._core.metric import Metric, build, ratio

# The columns read here and the reducers that return them: a contract between the two packages.
COLUMNS = {"confusion": "confusion_counts", "ids": "argmax", "probabilities": "probabilities"}

AGREEMENT = ("accuracy", "balanced_accuracy", "matthews_correlation", "cohen_kappa")
LOSSES = ("log_loss", "brier_loss", "expected_calibration_error")
RANKING = ("roc_auc", "average_precision")
MULTI_LABEL_AVERAGES = ("micro", "macro", "samples", "per_class")

DIRECTIONS: dict[str, bool | None] = {
    **dict.fromkeys((*AGREEMENT, *RANKING, *confusion.SCORES, "subset_accuracy"), True),
    **dict.fromkeys((*LOSSES, "hamming_loss"), False),
    **{f"{score}_{kind}": True for score in confusion.SCORES for kind in ("macro", "micro", "weighted", "samples")},
    **{f"{score}/{{label}}": True for score in confusion.SCORES},
}

CALIBRATION_BINS = 15
# As in scikit-learn: the logarithm of a probability below this is that of this.
SMALLEST = np.finfo(np.float64).eps
# A softmax is known by rows that sum to 1 but for rounding in float32: by how many, without a class that is sure.
TELLING, SURE, ROUNDING = 4, 0.99, 1e-5
RANKING_REASON = "ROC-AUC and average precision rank each sample among all; ranking=False leaves them out"


def classification(
    num_classes: int | None = None,
    *,
    id2label: Mapping[int, str] | None = None,
    average: str | Sequence[str] = "macro",
    pos_label: int | str = 1,
    ranking: bool = False,
) -> Metric:
    """Score one class a label: agreement, precision, recall, F1, and probabilities where the reducer kept them.

    Predictions are ids of the labels' shape, (B,) or (B, T), or a dict that holds some of the columns `ids`,
    `probabilities` (of the labels' shape and a dimension of C) and `confusion` (B, C * C), counts a sample of true x
    predicted class. Counts come from `confusion`, else from `ids`, else from the largest probability. Keys:

    - `accuracy`, `balanced_accuracy`, `matthews_correlation` (0.0 for constant predictions), `cohen_kappa`;
    - `precision_{average}`, `recall_{average}`, `f1_{average}`; for "binary" without a suffix; for "per_class"
      `f1/{label}`, with the names of `id2label`, and NaN for a class in neither labels nor predictions. Such classes
      are no part of "macro"; 0 / 0 is otherwise 0.0. All this as scikit-learn does by default;
    - with probabilities `log_loss` (nats a label), `brier_loss` (halved for two classes, as scikit-learn does) and
      `expected_calibration_error` (of the predicted class, 15 bins of equal width);
    - with `ranking`, `roc_auc` and `average_precision`: for two classes of `pos_label`, else each class against the
      rest and the mean over those for which the score is defined.

    Without any label everything is NaN.

    Args:
        num_classes: number of classes C.
        id2label: names of the classes, as `model.config.id2label`, in place of `num_classes`.
        average: one or several of "macro", "micro", "weighted", "per_class", and for two classes "binary".
        pos_label: id or name of the class that "binary" scores.
        ranking: also score the order of the probabilities, which needs labels (B,) and all samples at once.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Raises:
        TypeError: not exactly one of `num_classes` and `id2label`, or of another type; an average that is no name.
        ValueError: an unknown average or `pos_label`, or one class picked out of more than two.

    Source: C. Guo et al., "On Calibration of Modern Neural Networks", 2017; G. W. Brier, "Verification of forecasts
    expressed in terms of probability", 1950; for the others see `metrics.confusion`.

    Example:
        >>> from types import SimpleNamespace
        >>> evaluated = SimpleNamespace(predictions=np.array([0, 1, 1, 1]), label_ids=np.array([0, 0, 1, -100]))
        >>> scores = classification(2, average="binary")(evaluated)
        >>> scores["precision"], scores["recall"]
        (0.5, 1.0)
    """
    names = class_names(num_classes, id2label)
    averages = _averages(average, confusion.AVERAGES)
    positive = _positive(pos_label, names, averages)
    keys = [*AGREEMENT, *_keys_of(averages, names), *LOSSES]
    metric = Metric(
        statistics=partial(class_counts, num_classes=len(names)),
        score=partial(class_scores, names=names, averages=averages, positive=positive),
        directions={key: key not in LOSSES for key in keys},
    )
    if not ranking:
        return metric
    only = (positive,) if len(names) == 2 else tuple(range(len(names)))
    return build(metric, _ranking(partial(class_ranks, classes=only, num_classes=len(names))))


def multi_label(
    num_classes: int | None = None,
    *,
    id2label: Mapping[int, str] | None = None,
    average: str | Sequence[str] = ("micro", "macro", "samples"),
    threshold: float | Sequence[float] = 0.5,
    ranking: bool = False,
) -> Metric:
    """Score any number of classes a sample, from probabilities and thresholds.

    Labels are (B, C) of 0 and 1, integers or floats, -100 where a label is not known. Predictions hold the
    column `probabilities` (B, C); a class is predicted where its probability is at least the threshold. Keys:

    - `precision_{average}`, `recall_{average}`, `f1_{average}`, for "per_class" as `f1/{label}`; 0 / 0 is 0.0, as in
      scikit-learn, and a class or sample without any known label is left out;
    - `subset_accuracy`: fraction of the samples with every known label right; `hamming_loss`: fraction of the known
      labels that are wrong;
    - with `ranking`, `roc_auc` and `average_precision`, the mean over the classes for which the score is defined.

    Without any known label everything is NaN.

    Args:
        num_classes: number of classes C.
        id2label: names of the classes, as `model.config.id2label`, in place of `num_classes`.
        average: one or several of "micro", "macro", "samples", "per_class".
        threshold: a probability, or one for each class, as `tuned_thresholds` returns.
        ranking: also score the order of the probabilities, which needs all samples at once.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Raises:
        TypeError: not exactly one of `num_classes` and `id2label`, or of another type; an average that is no name, or
            thresholds that are no numbers.
        ValueError: an unknown average, or thresholds that are no probabilities or not one for each class.

    Source: G. Tsoumakas, I. Katakis, "Multi-Label Classification: An Overview", 2007.

    Example:
        >>> from types import SimpleNamespace
        >>> kept = {"probabilities": np.array([[0.9, 0.2]])}
        >>> multi_label(2)(SimpleNamespace(predictions=kept, label_ids=np.array([[1, 1]])))["recall_micro"]
        0.5
    """
    names = class_names(num_classes, id2label)
    averages = _averages(average, MULTI_LABEL_AVERAGES)
    keys = [*_keys_of(averages, names), "subset_accuracy", "hamming_loss"]
    metric = Metric(
        statistics=partial(label_counts, thresholds=_thresholds(threshold, len(names))),
        score=partial(label_scores, names=names, averages=averages),
        directions={key: key != "hamming_loss" for key in keys},
    )
    return build(metric, _ranking(partial(label_ranks, num_classes=len(names)))) if ranking else metric


# --- one class a label ------------------------------------------------------------------------------------------------


def class_counts(predictions: Any, labels: Any, *, num_classes: int) -> Columns:
    """Return the columns that `class_scores` reads.

    Args:
        predictions: ids, or a dict with columns, as for `classification`.
        labels: integers (B,) or (B, T), -100 where ignored.
        num_classes: number of classes C.

    Returns:
        `hits`, `actual`, `predicted` (B, C) int64: how often each class is right, true and predicted; with
        probabilities, in float64, `labels` (B,) counted, `log_loss` and `brier_loss` (B,) sums over them, and
        `calibration` (B, 15) sums of confidence minus correctness.

    Raises:
        TypeError, ValueError: labels, ids or probabilities are none.
    """
    found = named_predictions(predictions)
    labels = label_ids(labels, num_classes)
    active = labels != IGNORED
    columns: Columns = {}
    ids = predicted_ids(found["ids"], labels, num_classes) if "ids" in found else None
    if "probabilities" in found:
        check_probabilities(found["probabilities"], (*labels.shape, num_classes), softmax=True, where=active)
        scored = chosen(found["probabilities"], active).astype(np.float64)
        ids = scored.argmax(-1) if ids is None else ids
        columns = _probability_sums(scored, chosen(labels, active), active)
    if "confusion" in found:
        return {**_counts_of_cells(found["confusion"], num_classes), **columns}
    if ids is None:
        sources = ", ".join(f"{name} (reducers.{source})" for name, source in COLUMNS.items())
        raise missing(f"predicted ids, or a dict with one of the columns {sources}", predictions)
    return {**_counts_of_pairs(active, chosen(labels, active), ids, num_classes), **columns}


def class_scores(sums: Columns, *, names: tuple[str, ...], averages: tuple[str, ...], positive: int) -> Columns:
    """Return the scores that `classification` lists, without the ranking.

    Args:
        sums: the sums of `class_counts`, or stacks of them.
        names: of the classes.
        averages: of precision, recall and F1.
        positive: the class that "binary" scores.

    Returns:
        Scores of the stack's shape.
    """
    counts = Counts(*(sums[name] for name in Counts._fields))
    scores = confusion.agreement(counts)
    for average in averages:
        values = confusion.precision_recall_f1(counts, average=average, positive=positive)
        scores |= _named(values, average, names)
    if "labels" in sums:
        scores |= {name: ratio(sums[name], sums["labels"]) for name in ("log_loss", "brier_loss")}
        scores["expected_calibration_error"] = ratio(abs(sums["calibration"]).sum(-1), sums["labels"])
    return scores


def class_ranks(predictions: Any, labels: Any, *, classes: tuple[int, ...], num_classes: int) -> Columns:
    """Return the columns that `rank_scores` reads: `probabilities` and `targets` (B, classes), -100 where ignored."""
    labels = label_ids(labels, num_classes)
    if labels.ndim != 1:
        raise ValueError(f"ranking takes one label a sample, (B,); labels have shape {labels.shape}. Say ranking=False")
    probabilities = _probabilities(predictions)
    check_probabilities(probabilities, (len(labels), num_classes), softmax=True, where=labels != IGNORED)
    targets = np.where(labels[:, None] == IGNORED, IGNORED, labels[:, None] == np.array(classes))
    return {"probabilities": probabilities[:, classes], "targets": targets}


def _probability_sums(probabilities: Array, labels: Array, active: Array) -> Columns:
    """Return sums a sample over its labels that count; `probabilities` and `labels` hold those only."""
    entry = np.arange(len(labels))
    off = probabilities.copy()
    off[entry, labels] -= 1
    brier = (off**2).sum(-1) / (2 if probabilities.shape[-1] == 2 else 1)
    confidence = probabilities.max(-1, initial=0)
    gaps = confidence - (probabilities.argmax(-1) == labels)
    bins = np.clip(np.ceil(confidence * CALIBRATION_BINS).astype(np.int64) - 1, 0, CALIBRATION_BINS - 1)

    def summed(values: Array) -> Array:
        spread = np.zeros(active.shape)
        spread[active] = values
        return per_sample(spread)

    return {
        "labels": per_sample(active),
        "log_loss": summed(-np.log(np.maximum(probabilities[entry, labels], SMALLEST))),
        "brier_loss": summed(brier),
        "calibration": tally(row_starts(active), bins, CALIBRATION_BINS, gaps),
    }


def _counts_of_pairs(active: Array, labels: Array, ids: Array, num_classes: int) -> Columns:
    """Return the counts a sample of labels and ids, both of the entries that count only."""
    starts = row_starts(active)
    labels, ids = (cells.astype(starts.dtype, copy=False) for cells in (labels, ids))  # for all of them, and once
    once = np.ones(len(labels), np.int64)
    return {
        "hits": tally(starts, labels, num_classes, (labels == ids).astype(np.int64)),
        "actual": tally(starts, labels, num_classes, once),
        "predicted": tally(starts, ids, num_classes, once),
    }


def _counts_of_cells(cells: Array, num_classes: int) -> Columns:
    """Return the counts a sample of confusion matrices (B, C * C)."""
    if cells.shape[1:] != (num_classes**2,) or not (np.isfinite(cells) & (cells >= 0)).all():
        raise ValueError(
            f"the column 'confusion' has shape {cells.shape}, numbers from {cells.min(initial=0)}: it must hold counts "
            f"(B, {num_classes**2}), true class x predicted class in rows of num_classes={num_classes}, as "
            "reducers.confusion_counts returns; -1 stands for logits that are NaN, of a model that has diverged"
        )
    return confusion.counts_of(cells.reshape(-1, num_classes, num_classes))._asdict()


# --- any number of classes a sample -----------------------------------------------------------------------------------


def label_counts(predictions: Any, labels: Any, *, thresholds: tuple[float, ...]) -> Columns:
    """Return the columns that `label_scores` reads.

    Args:
        predictions: a dict with the column `probabilities` (B, C).
        labels: 0, 1 or -100 (B, C).
        thresholds: for each class the smallest probability with which it is predicted.

    Returns:
        `confusion` (B, C * 4) int64, a 2 x 2 matrix a class; (B,): `samples` (any label known), `subset` (all known
        labels right), and of each sample's own labels `precision`, `recall` and `f1`.

    Raises:
        TypeError, ValueError: labels or probabilities are none.
    """
    known, actual, probabilities = _label_pairs(predictions, labels, len(thresholds))
    predicted = (probabilities >= np.array(thresholds)) & known
    cells = (np.arange(len(thresholds)) * 4 + actual * 2 + predicted)[known]
    samples = known.any(1)
    own = confusion.scores_of_counts((actual & predicted).sum(1), predicted.sum(1), actual.sum(1))
    return {
        "confusion": tally(row_starts(known), cells, len(thresholds) * 4),
        "samples": samples,
        "subset": samples & (actual == predicted).all(1),
        **own,
    }


def label_scores(sums: Columns, *, names: tuple[str, ...], averages: tuple[str, ...]) -> Columns:
    """Return the scores that `multi_label` lists, without the ranking.

    Args:
        sums: the sums of `label_counts`, or stacks of them.
        names: of the classes.
        averages: of precision, recall and F1.

    Returns:
        Scores of the stack's shape.
    """
    counts = sums["confusion"]
    matrices = counts.reshape(*counts.shape[:-1], len(names), 2, 2)
    pooled, known = matrices.sum(-3), matrices.sum((-2, -1))
    classes = _of_yes(matrices)
    values: dict[str, Callable[[], Columns]] = {
        "micro": lambda: _of_yes(pooled),
        "macro": lambda: {score: confusion.mean_where(value, known > 0) for score, value in classes.items()},
        "samples": lambda: {score: ratio(sums[score], sums["samples"]) for score in confusion.SCORES},
        "per_class": lambda: classes,
    }
    scores: Columns = {}
    for average in averages:
        scores |= _named(values[average](), average, names)
    scores["subset_accuracy"] = ratio(sums["subset"], sums["samples"])
    return {**scores, "hamming_loss": ratio(pooled[..., 0, 1] + pooled[..., 1, 0], known.sum(-1))}


def label_ranks(predictions: Any, labels: Any, *, num_classes: int) -> Columns:
    """Return the columns that `rank_scores` reads: `probabilities` and `targets` (B, C), -100 where not known."""
    known, actual, probabilities = _label_pairs(predictions, labels, num_classes)
    return {"probabilities": probabilities, "targets": np.where(known, actual, IGNORED)}


def label_pairs(probabilities: Array, labels: Any, num_classes: int) -> tuple[Array, Array]:
    """Return which labels of (B, C) are known and which of those are 1.

    Raises:
        TypeError: labels are not one array.
        ValueError: a label is not 0, 1 or -100, or these are no probabilities of the labels' shape, or of one label a
            sample where the labels are not.
    """
    if not isinstance(labels, np.ndarray):
        raise TypeError(f"labels must be one array (B, {num_classes}); a {type(labels).__name__} came")
    if labels.shape[1:] != (num_classes,) or not np.isin(labels, (0, 1, IGNORED)).all():
        raise ValueError(
            f"labels of shape {labels.shape} and dtype {labels.dtype} came: they must be 0, 1, or -100 where not "
            f"known, (B, {num_classes}), where {num_classes} is num_classes, and has to be the model's num_labels"
        )
    known, actual = labels != IGNORED, labels == 1
    check_probabilities(probabilities, labels.shape, softmax=False, where=known)
    complete = known.all(1)
    _refuse_softmax(chosen(probabilities, complete), chosen(actual, complete))
    return known, actual


def _refuse_softmax(probabilities: Array, actual: Array) -> None:
    """Refuse rows (B, C) of one distribution each, where the labels are not one a sample.

    One label a sample may be scored so. Sigmoids sum to 1 by chance, where each is all but 0 or 1, or in pairs of a
    head that is still 0; several rows of anything else do not.
    """
    if not (abs(probabilities.sum(-1, dtype=np.float64) - 1) < ROUNDING).all() or (actual.sum(-1) == 1).all():
        return
    telling = (probabilities.max(-1, initial=0) < SURE) & (probabilities != 0.5).any(-1)
    if telling.sum() >= TELLING:
        raise ValueError(
            "all rows of 'probabilities' sum to 1, and the labels are not one a sample: these are a softmax over the "
            "classes. What returns a probability for each label is partial(reducers.probabilities, multi_label=True)"
        )


def _label_pairs(predictions: Any, labels: Any, num_classes: int) -> tuple[Array, Array, Array]:
    probabilities = _probabilities(predictions)
    return *label_pairs(probabilities, labels, num_classes), probabilities.astype(np.float64)


def _of_yes(matrices: Array) -> Columns:
    """Return precision, recall and F1 of the second class of each 2 x 2 matrix, NaN where it counts nothing."""
    return confusion.precision_recall_f1(confusion.counts_of(matrices), average="binary")


# --- both -------------------------------------------------------------------------------------------------------------


def rank_scores(rows: Columns) -> dict[str, ArrayLike]:
    """Return ROC-AUC and average precision, each the mean over the classes for which it is defined.

    Args:
        rows: `probabilities` and `targets` (samples, classes), a target 0, 1, or -100 where it does not count.

    Returns:
        Two numbers; NaN where no class has what the score needs: both kinds of labels, or any positive one.
    """
    areas, precisions = [np.nan], [np.nan]
    for probabilities, targets in zip(rows["probabilities"].T, rows["targets"].T, strict=True):
        known = targets != IGNORED
        pair = targets[known], probabilities[known]
        if pair[0].any():
            precisions.append(average_precision_score(*pair))
            if not pair[0].all():
                areas.append(roc_auc_score(*pair))
    return {"roc_auc": np.mean(areas[1:] or areas), "average_precision": np.mean(precisions[1:] or precisions)}


def _ranking(statistics: Any) -> Metric:
    directions = {key: DIRECTIONS[key] for key in RANKING}
    return Metric(statistics=statistics, score=rank_scores, directions=directions, whole=RANKING_REASON)


def _probabilities(predictions: Any) -> Array:
    found = named_predictions(predictions)
    if "probabilities" not in found:
        raise missing("the column 'probabilities' (reducers.probabilities)", predictions)
    return found["probabilities"]


def _keys_of(averages: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the keys of precision, recall and F1."""
    placeholders = dict.fromkeys(confusion.SCORES, np.zeros(len(names)))
    return [key for average in averages for key in _named(placeholders, average, names)]


def _named(values: Columns, average: str, names: Sequence[str]) -> Columns:
    if average == "per_class":
        return {f"{score}/{name}": value[..., at] for score, value in values.items() for at, name in enumerate(names)}
    return values if average == "binary" else {f"{score}_{average}": value for score, value in values.items()}


def _averages(average: str | Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    wanted = f"one or several of {', '.join(known)}"
    averages = [average] if isinstance(average, str) else sequence("average", average, wanted)
    if unknown := [name for name in averages if name not in known]:
        raise ValueError(f"average is {wanted}; {', '.join(map(str, unknown))} came")
    return tuple(averages)


def _positive(pos_label: int | str, names: tuple[str, ...], averages: tuple[str, ...]) -> int:
    """Return the id of the positive class, 1 where there is none to pick."""
    if len(names) != 2:
        if "binary" in averages or pos_label != 1:
            raise ValueError(
                f"a binary score needs two classes and there are {len(names)}: choose average='macro', 'micro', "
                "'weighted' or 'per_class', and leave pos_label out"
            )
        return 1
    place = names.index(pos_label) if pos_label in names else pos_label
    if place not in (0, 1):
        raise ValueError(f"pos_label is 0, 1, {names[0]!r} or {names[1]!r}; {pos_label!r} came")
    return int(place)


def _thresholds(threshold: float | Sequence[float], num_classes: int) -> tuple[float, ...]:
    wanted = f"a probability, or one for each of the {num_classes} classes"
    given = numbers("threshold", threshold, wanted).astype(np.float64)
    if given.shape not in ((), (num_classes,)) or not ((given >= 0) & (given <= 1)).all():
        raise ValueError(f"threshold is {wanted}; {threshold} came. A logit x is the probability 1 / (1 + exp(-x))")
    return tuple(np.broadcast_to(given, num_classes).tolist())
