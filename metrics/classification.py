"""Scores of classes: one class per label (sequences, tokens), or any number of classes per sample (multi-label).

Labels of -100 are left out, by the labels alone; predictions at those positions are not read.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import average_precision_score, roc_auc_score

from ._core import classes, confusion
from ._core.arguments import numbers, sequence
from ._core.build import build
from ._core.classes import check_probabilities, chosen, class_names, label_ids, per_sample, row_starts, tally
from ._core.evaluation import IGNORED, Array, Columns, missing
from ._core.metric import Metric, ratio
from .regression import regression

# The columns that are read and the reducers that return them: a contract between the two packages.
COLUMNS = {"confusion": "confusion_counts", "ids": "argmax", "probabilities": "probabilities"}

AGREEMENT = ("accuracy", "balanced_accuracy", "matthews_correlation", "cohen_kappa")
LOSSES = ("log_loss", "brier_loss", "expected_calibration_error")
AUC = ("roc_auc", "average_precision")
MULTI_LABEL_AVERAGES = ("micro", "macro", "samples", "per_class")
CALIBRATION_BINS = 15
# As in scikit-learn, probabilities are clipped to this before the logarithm.
SMALLEST = np.finfo(np.float64).eps
# Rows of a softmax sum to 1 up to rounding in float32. To recognize one, this many rows must do so, none of them with a
# probability of SURE or more, because sigmoids that are nearly 0 or 1 may sum to 1 by chance.
TELLING, SURE, ROUNDING = 4, 0.99, 1e-5
# The threshold of a class without positive labels.
UNTUNED = 0.5

HIGHER_IS_BETTER: dict[str, bool | None] = {
    **dict.fromkeys((*AGREEMENT, *AUC, *confusion.SCORES, "subset_accuracy"), True),
    **dict.fromkeys((*LOSSES, "hamming_loss"), False),
    **{f"{score}_{kind}": True for score in confusion.SCORES for kind in ("macro", "micro", "weighted", "samples")},
    **{f"{score}/{{label}}": True for score in confusion.SCORES},
}

Task = Literal["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"]


def classification(
    num_classes: int | None = None,
    *,
    id2label: Mapping[int, str] | None = None,
    average: str | Sequence[str] = "macro",
    pos_label: int | str = 1,
    auc: bool = False,
) -> Metric:
    """Score one class per label: agreement, precision, recall, F1, and probabilities if the reducer returns them.

    With p the probability vector of a label y among n, and its entries p_k::

        log_loss = -mean(log p_y)     brier_loss = mean(sum_k (p_k - [k = y])^2)
        expected_calibration_error = sum over bins of |sum of confidence - number correct| / n

    `brier_loss` is halved for two classes, as in scikit-learn; the other formulas are in `metrics._core.confusion`.

    Predictions are ids of the labels' shape, (B,) or (B, T), or a dict with some of the columns `ids`, `probabilities`
    (the labels' shape and a last dimension of C) and `confusion` (B, C * C), counts per sample of true x predicted
    class. Counts are taken from `confusion`, else from `ids`, else from the largest probability. Keys:

    - `accuracy`, `balanced_accuracy`, `matthews_correlation` (0.0 for constant predictions), `cohen_kappa`;
    - `precision_{average}`, `recall_{average}`, `f1_{average}`; for "binary" without a suffix; for "per_class"
      `f1/{label}`, with the names of `id2label`, and NaN for a class in neither labels nor predictions. Such classes
      are not part of "macro"; any other 0 / 0 is 0.0. All this follows scikit-learn's defaults;
    - with probabilities `log_loss` (nats per label), `brier_loss` and `expected_calibration_error` (of the predicted
      class, 15 bins of equal width);
    - with `auc`, `roc_auc` and `average_precision`: for two classes of `pos_label`, else of each class against the
      rest, averaged over the classes for which the score is defined.

    Without labels all scores are NaN.

    Args:
        num_classes: number of classes C.
        id2label: names of the classes, such as `model.config.id2label`, instead of `num_classes`.
        average: one or several of "macro", "micro", "weighted", "per_class", and for two classes "binary".
        pos_label: id or name of the class that "binary" scores.
        auc: also score the ranking by probability, which needs labels (B,) and all samples at once.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Raises:
        TypeError: if not exactly one of `num_classes` and `id2label` is given, or an argument has another type.
        ValueError: if an average or `pos_label` is unknown, or one class is selected from more than two.

    References:
        C. Guo et al., "On Calibration of Modern Neural Networks", 2017, https://arxiv.org/abs/1706.04599
        G. W. Brier, "Verification of forecasts expressed in terms of probability", 1950,
        https://doi.org/10.1175/1520-0493(1950)078<0001:VOFEIT>2.0.CO;2

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
        higher_is_better={key: key not in LOSSES for key in keys},
    )
    scored = (positive,) if len(names) == 2 else tuple(range(len(names)))
    return _with_auc(metric, partial(class_ranks, scored=scored, num_classes=len(names))) if auc else metric


def multi_label(
    num_classes: int | None = None,
    *,
    id2label: Mapping[int, str] | None = None,
    average: str | Sequence[str] = ("micro", "macro", "samples"),
    threshold: float | Sequence[float] = 0.5,
    auc: bool = False,
) -> Metric:
    """Score any number of classes per sample, from probabilities and thresholds.

    A class is predicted where its probability is at least the threshold. With n known labels::

        hamming_loss = (number of known labels that are wrong) / n
        subset_accuracy = (number of samples with every known label correct) / (number of samples with a known label)

    Labels are (B, C) of 0 and 1, integers or floats, -100 where a label is not known. Predictions have the column
    `probabilities` (B, C). Keys:

    - `precision_{average}`, `recall_{average}`, `f1_{average}`, for "per_class" as `f1/{label}`; 0 / 0 is 0.0, as in
      scikit-learn, and a class or sample without known labels is left out;
    - `subset_accuracy` and `hamming_loss`;
    - with `auc`, `roc_auc` and `average_precision`, averaged over the classes for which the score is defined.

    Without known labels all scores are NaN.

    Args:
        num_classes: number of classes C.
        id2label: names of the classes, such as `model.config.id2label`, instead of `num_classes`.
        average: one or several of "micro", "macro", "samples", "per_class".
        threshold: a probability, or one per class, such as `tuned_thresholds` returns.
        auc: also score the ranking by probability, which needs all samples at once.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Raises:
        TypeError: if not exactly one of `num_classes` and `id2label` is given, or an argument has another type.
        ValueError: if an average is unknown, or thresholds are not probabilities or not one per class.

    References:
        G. Tsoumakas, I. Katakis, "Multi-Label Classification: An Overview", 2007,
        https://doi.org/10.4018/jdwm.2007070101

    Example:
        >>> from types import SimpleNamespace
        >>> predictions = {"probabilities": np.array([[0.9, 0.2]])}
        >>> multi_label(2)(SimpleNamespace(predictions=predictions, label_ids=np.array([[1, 1]])))["recall_micro"]
        0.5
    """
    names = class_names(num_classes, id2label)
    averages = _averages(average, MULTI_LABEL_AVERAGES)
    keys = [*_keys_of(averages, names), "subset_accuracy", "hamming_loss"]
    metric = Metric(
        statistics=partial(label_counts, thresholds=_thresholds(threshold, len(names))),
        score=partial(label_scores, names=names, averages=averages),
        higher_is_better={key: key != "hamming_loss" for key in keys},
    )
    return _with_auc(metric, partial(label_ranks, num_classes=len(names))) if auc else metric


def tuned_thresholds(probabilities: ArrayLike, labels: ArrayLike, *, shared: bool = False) -> tuple[float, ...]:
    """Return for each class the threshold with the best F1.

    Candidates are the probabilities that occur; a class is predicted where its probability is at least the threshold.
    Among equally good thresholds the largest is taken. Tune on validation data and score on other data:
    `multi_label(num_classes, threshold=tuned_thresholds(probabilities, labels))`.

    Args:
        probabilities: floats (samples, classes) in [0, 1], as `trainer.predict(...).predictions["probabilities"]`.
        labels: 0, 1, or -100 where not known, (samples, classes).
        shared: return one threshold for all classes, with the best F1 over all labels (micro).

    Returns:
        One threshold per class, in [0, 1]; 0.5 for a class without positive labels.

    Raises:
        TypeError: if labels or probabilities are not numbers.
        ValueError: if labels are not 0, 1 or -100, probabilities are not in [0, 1], or their shapes differ.

    References:
        Z. C. Lipton, C. Elkan, B. Narayanaswamy, "Thresholding Classifiers to Maximize F1 Score", 2014,
        https://arxiv.org/abs/1402.1892

    Example:
        >>> tuned_thresholds([[0.1, 0.9], [0.3, 0.4], [0.2, 0.7]], [[0, 1], [1, 0], [0, 0]])
        (0.3, 0.9)
    """
    values = numbers("probabilities", probabilities, "floats (samples, classes) in [0, 1]")
    targets = numbers("labels", labels, "0, 1, or -100 where not known, (samples, classes)")
    if targets.ndim != 2:
        raise ValueError(f"labels must be (samples, classes), got shape {targets.shape}")
    num_classes = len(targets.T)
    known, actual = _known_and_positive(values, targets, num_classes)
    if shared:
        return (_best_threshold(values[known], actual[known]),) * num_classes
    columns = zip(values.T, known.T, actual.T, strict=True)
    return tuple(_best_threshold(column[counts], positive[counts]) for column, counts, positive in columns)


def glue(task: Task) -> Metric:
    """Score a task of the GLUE benchmark by the scores that the benchmark reports for it, among others.

    CoLA: `matthews_correlation`; SST-2, MNLI, QNLI, RTE, WNLI: `accuracy`; MRPC and QQP: `accuracy` and `f1` of the
    class 1; STS-B: `pearson` and `spearman`. The average of different scores, which the benchmark ranks by, is not
    reported.

    Args:
        task: name of the task.

    Returns:
        A metric to give to the Trainer as `compute_metrics`; predictions are ids (`argmax`), for STS-B floats.

    Raises:
        ValueError: if the task is unknown.

    References:
        A. Wang et al., "GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding", 2018,
        https://arxiv.org/abs/1804.07461

    Example:
        >>> "f1" in glue("mrpc").higher_is_better, "f1_macro" in glue("mnli").higher_is_better
        (True, True)
    """
    if task not in get_args(Task):
        raise ValueError(f"task must be one of {', '.join(get_args(Task))}, got {task!r}")
    if task == "stsb":
        return regression(rank_correlation=True)
    return classification(3) if task == "mnli" else classification(2, average="binary")


# --- one class per label ----------------------------------------------------------------------------------------------


def class_counts(predictions: Any, labels: Any, *, num_classes: int) -> Columns:
    """Return the columns that `class_scores` reads.

    Args:
        predictions: ids, or a dict with columns, as for `classification`.
        labels: integers (B,) or (B, T), -100 where ignored.
        num_classes: number of classes C.

    Returns:
        `hits`, `actual`, `predicted` (B, C) int64: how often each class is correct, true and predicted; with
        probabilities, in float64, `labels` (B,) the number of labels, `log_loss` and `brier_loss` (B,) sums over them,
        and `calibration` (B, 15) sums of confidence minus correctness.

    Raises:
        TypeError, ValueError: if labels, ids or probabilities are not valid.
    """
    found = classes.named_predictions(predictions)
    labels = label_ids(labels, num_classes)
    active = labels != IGNORED
    columns: Columns = {}
    ids = classes.predicted_ids(found["ids"], labels, num_classes) if "ids" in found else None
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
    return {**_counts_of_ids(active, chosen(labels, active), ids, num_classes), **columns}


def class_scores(sums: Columns, *, names: tuple[str, ...], averages: tuple[str, ...], positive: int) -> Columns:
    """Return the scores of `classification`, without those of `auc`.

    Args:
        sums: the sums of `class_counts`, or stacks of them.
        names: names of the classes.
        averages: averages of precision, recall and F1.
        positive: the class that "binary" scores.

    Returns:
        Scores of the stack's shape.
    """
    counts = confusion.Counts(*(sums[name] for name in confusion.Counts._fields))
    scores = confusion.agreement(counts)
    for average in averages:
        values = confusion.precision_recall_f1(counts, average=average, positive=positive)
        scores |= _named(values, average, names)
    if "labels" in sums:
        scores |= {name: ratio(sums[name], sums["labels"]) for name in ("log_loss", "brier_loss")}
        scores["expected_calibration_error"] = ratio(abs(sums["calibration"]).sum(-1), sums["labels"])
    return scores


def class_ranks(predictions: Any, labels: Any, *, scored: tuple[int, ...], num_classes: int) -> Columns:
    """Return the columns that `auc_scores` reads: `probabilities` and `targets` (B, scored), -100 where ignored."""
    labels = label_ids(labels, num_classes)
    if labels.ndim != 1:
        raise ValueError(f"auc=True needs one label per sample, (B,), got shape {labels.shape}. Set auc=False")
    probabilities = _probabilities(predictions)
    check_probabilities(probabilities, (len(labels), num_classes), softmax=True, where=labels != IGNORED)
    targets = np.where(labels[:, None] == IGNORED, IGNORED, labels[:, None] == np.array(scored))
    return {"probabilities": probabilities[:, scored], "targets": targets}


def _probability_sums(probabilities: Array, labels: Array, active: Array) -> Columns:
    """Return sums per sample over its active labels; `probabilities` and `labels` hold the active entries only."""
    entry = np.arange(len(labels))
    errors = probabilities.copy()
    errors[entry, labels] -= 1
    brier = (errors**2).sum(-1) / (2 if probabilities.shape[-1] == 2 else 1)
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


def _counts_of_ids(active: Array, labels: Array, ids: Array, num_classes: int) -> Columns:
    """Return the counts per sample; `labels` and `ids` hold the active entries only."""
    starts = row_starts(active)
    labels, ids = (cells.astype(starts.dtype, copy=False) for cells in (labels, ids))  # one index dtype for all counts
    ones = np.ones(len(labels), np.int64)
    return {
        "hits": tally(starts, labels, num_classes, (labels == ids).astype(np.int64)),
        "actual": tally(starts, labels, num_classes, ones),
        "predicted": tally(starts, ids, num_classes, ones),
    }


def _counts_of_cells(cells: Array, num_classes: int) -> Columns:
    """Return the counts per sample of confusion matrices (B, C * C)."""
    if cells.shape[1:] != (num_classes**2,) or not (np.isfinite(cells) & (cells >= 0)).all():
        raise ValueError(
            f"the column 'confusion' must hold counts (B, {num_classes**2}), true class x predicted class of "
            f"num_classes={num_classes}, as reducers.confusion_counts returns, got shape {cells.shape} and numbers "
            f"from {cells.min(initial=0)}; -1 means NaN logits, of a model that has diverged"
        )
    return confusion.counts_of(cells.reshape(-1, num_classes, num_classes))._asdict()


# --- any number of classes per sample ---------------------------------------------------------------------------------


def label_counts(predictions: Any, labels: Any, *, thresholds: tuple[float, ...]) -> Columns:
    """Return the columns that `label_scores` reads.

    Args:
        predictions: a dict with the column `probabilities` (B, C).
        labels: 0, 1 or -100 (B, C).
        thresholds: the smallest probability with which each class is predicted.

    Returns:
        `confusion` (B, C * 4) int64, a 2 x 2 matrix per class; (B,): `samples` (a label is known), `subset` (all known
        labels correct), and `precision`, `recall` and `f1` of each sample's labels.

    Raises:
        TypeError, ValueError: if labels or probabilities are not valid.
    """
    probabilities = _probabilities(predictions)
    known, actual = _known_and_positive(probabilities, labels, len(thresholds))
    predicted = (probabilities.astype(np.float64) >= np.array(thresholds)) & known
    cells = (np.arange(len(thresholds)) * 4 + actual * 2 + predicted)[known]
    samples = known.any(1)
    return {
        "confusion": tally(row_starts(known), cells, len(thresholds) * 4),
        "samples": samples,
        "subset": samples & (actual == predicted).all(1),
        **confusion.scores_of_counts((actual & predicted).sum(1), predicted.sum(1), actual.sum(1)),
    }


def label_scores(sums: Columns, *, names: tuple[str, ...], averages: tuple[str, ...]) -> Columns:
    """Return the scores of `multi_label`, without those of `auc`.

    Args:
        sums: the sums of `label_counts`, or stacks of them.
        names: names of the classes.
        averages: averages of precision, recall and F1.

    Returns:
        Scores of the stack's shape.
    """
    counts = sums["confusion"]
    matrices = counts.reshape(*counts.shape[:-1], len(names), 2, 2)
    pooled, known = matrices.sum(-3), matrices.sum((-2, -1))
    by_class = _scores_of_positives(matrices)
    values: dict[str, Callable[[], Columns]] = {
        "micro": lambda: _scores_of_positives(pooled),
        "macro": lambda: {score: confusion.mean_where(value, known > 0) for score, value in by_class.items()},
        "samples": lambda: {score: ratio(sums[score], sums["samples"]) for score in confusion.SCORES},
        "per_class": lambda: by_class,
    }
    scores: Columns = {}
    for average in averages:
        scores |= _named(values[average](), average, names)
    scores["subset_accuracy"] = ratio(sums["subset"], sums["samples"])
    return {**scores, "hamming_loss": ratio(pooled[..., 0, 1] + pooled[..., 1, 0], known.sum(-1))}


def label_ranks(predictions: Any, labels: Any, *, num_classes: int) -> Columns:
    """Return the columns that `auc_scores` reads: `probabilities` and `targets` (B, C), -100 where not known."""
    probabilities = _probabilities(predictions)
    known, actual = _known_and_positive(probabilities, labels, num_classes)
    return {"probabilities": probabilities, "targets": np.where(known, actual, IGNORED)}


def _known_and_positive(probabilities: Array, labels: Any, num_classes: int) -> tuple[Array, Array]:
    """Return which labels of (B, C) are known and which are 1, after checking labels and probabilities.

    Raises:
        TypeError: if labels are not one array.
        ValueError: if a label is not 0, 1 or -100, the shape of the probabilities differs, or they are a softmax
            although some samples do not have exactly one label.
    """
    if not isinstance(labels, np.ndarray):
        raise TypeError(f"labels must be one array (B, {num_classes}), got a {type(labels).__name__}")
    if labels.shape[1:] != (num_classes,) or not np.isin(labels, (0, 1, IGNORED)).all():
        raise ValueError(
            f"labels must be 0, 1, or -100 where not known, (B, {num_classes}), where {num_classes} is num_classes and "
            f"must be the model's num_labels; got shape {labels.shape} and dtype {labels.dtype}"
        )
    known, actual = labels != IGNORED, labels == 1
    check_probabilities(probabilities, labels.shape, softmax=False, where=known)
    complete = known.all(1)
    _refuse_softmax(chosen(probabilities, complete), chosen(actual, complete))
    return known, actual


def _refuse_softmax(probabilities: Array, actual: Array) -> None:
    """Raise ValueError if all rows (B, C) are a softmax although some samples do not have exactly one label.

    With exactly one label per sample a softmax may be scored. Sigmoids sum to 1 by chance where each is nearly 0 or 1,
    or where a zero-initialized head predicts 0.5 for two classes; in several other rows they do not.
    """
    if not (abs(probabilities.sum(-1, dtype=np.float64) - 1) < ROUNDING).all() or (actual.sum(-1) == 1).all():
        return
    telling = (probabilities.max(-1, initial=0) < SURE) & (probabilities != 0.5).any(-1)
    if telling.sum() >= TELLING:
        raise ValueError(
            "all rows of 'probabilities' sum to 1, as a softmax over classes does, but samples do not have exactly one "
            "label each. Use the reducer partial(reducers.probabilities, multi_label=True)"
        )


def _scores_of_positives(matrices: Array) -> Columns:
    """Return precision, recall and F1 of the second class of each 2 x 2 matrix, NaN where its counts are all 0."""
    return confusion.precision_recall_f1(confusion.counts_of(matrices), average="binary")


def _best_threshold(probabilities: Array, actual: Array) -> float:
    if not actual.any():
        return UNTUNED
    order = np.argsort(-probabilities, kind="stable")
    candidates, hits = probabilities[order], actual[order].cumsum()
    f1 = confusion.scores_of_counts(hits, np.arange(1, len(hits) + 1), hits[-1])["f1"]
    last_of_equals = np.append(candidates[1:] != candidates[:-1], True)
    return float(candidates[np.where(last_of_equals, f1, -1.0).argmax()])


# --- shared by both ---------------------------------------------------------------------------------------------------


def auc_scores(rows: Columns) -> dict[str, ArrayLike]:
    """Return ROC-AUC and average precision, each averaged over the classes for which it is defined.

    Args:
        rows: `probabilities` and `targets` (samples, classes); a target is 0, 1, or -100 where it is ignored.

    Returns:
        Two numbers. ROC-AUC is NaN where no class has both kinds of labels, average precision where no class has
        positive labels.
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


def _with_auc(metric: Metric, statistics: Any) -> Metric:
    reason = "ROC-AUC and average precision rank each sample among all; auc=False leaves them out"
    better: dict[str, bool | None] = dict.fromkeys(AUC, True)
    ranks = Metric(statistics=statistics, score=auc_scores, higher_is_better=better, needs_all_samples=reason)
    return build(metric, ranks)


def _probabilities(predictions: Any) -> Array:
    found = classes.named_predictions(predictions)
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
    expected = f"one or several of {', '.join(known)}"
    averages = [average] if isinstance(average, str) else sequence("average", average, expected)
    if unknown := [name for name in averages if name not in known]:
        raise ValueError(f"average must be {expected}, got {', '.join(map(str, unknown))}")
    return tuple(averages)


def _positive(pos_label: int | str, names: tuple[str, ...], averages: tuple[str, ...]) -> int:
    """Return the id of the positive class; 1 if there are not two classes to choose from."""
    if len(names) != 2:
        if "binary" in averages or pos_label != 1:
            raise ValueError(
                f"a binary score needs two classes, got {len(names)}: choose average='macro', 'micro', 'weighted' or "
                "'per_class', and leave pos_label out"
            )
        return 1
    place = names.index(pos_label) if pos_label in names else pos_label
    if place not in (0, 1):
        raise ValueError(f"pos_label must be 0, 1, {names[0]!r} or {names[1]!r}, got {pos_label!r}")
    return int(place)


def _thresholds(threshold: float | Sequence[float], num_classes: int) -> tuple[float, ...]:
    expected = f"a probability, or one for each of the {num_classes} classes"
    given = numbers("threshold", threshold, expected).astype(np.float64)
    if given.shape not in ((), (num_classes,)) or not ((given >= 0) & (given <= 1)).all():
        raise ValueError(f"threshold must be {expected}, got {threshold}. A logit x is the probability 1/(1+exp(-x))")
    return tuple(np.broadcast_to(given, num_classes).tolist())
