"""Scores of language models, from sums over the tokens of each sample.

A reducer has already chosen, shifted and counted the tokens; nothing here looks at a label or shifts anything.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ._core import keys as _keys
from ._core.arguments import integers
from ._core.classes import per_sample
from ._core.evaluation import Columns, describe, named_columns
from ._core.metric import Metric, ratio

# The columns read here and what makes `reducers.sample_sums` return them: a contract between the two packages.
COLUMNS = {
    "nll": "sample_sums",
    "tokens": "sample_sums",
    "correct": "sample_sums",
    "all_correct": "sample_sums",
    "correct_top_{k}": "sample_sums with top_k=k",
    "entropy": "sample_sums with entropy=True",
    "bytes": "text_lengths",
    "characters": "text_lengths",
    "ranks": "label_rank",
    "bin_{sum}": "calibration_bins",
}
NEEDED = ("nll", "tokens", "correct", "all_correct")

DIRECTIONS: dict[str, bool | None] = {
    "nll_loss": False,
    "perplexity": False,
    "token_accuracy": True,
    "top_{k}_accuracy": True,
    "entropy": None,
    "sequence_accuracy": True,
    "tokens": None,
    "samples": None,
    "bits_per_byte": False,
    "bits_per_character": False,
}
RANKING: dict[str, bool | None] = {"mrr": True, "hit_at_{k}": True}
CALIBRATION: dict[str, bool | None] = {"expected_calibration_error": False, "maximum_calibration_error": False}
BINS = ("bin_labels", "bin_confidence", "bin_correct")


def language_modeling() -> Metric:
    """Score language models by token: negative log-likelihood, perplexity and accuracies, from per-sample sums.

    The reducer is `sample_sums`; its columns may stand in a dict of predictions, or in a dict inside it. The result is
    a ratio of sums over all tokens, so it depends on neither batch size nor padding. Keys:

    - `nll_loss`: nats a token; `perplexity`: its exponential, inf where that overflows;
    - `token_accuracy`, `top_{k}_accuracy` for each column `correct_top_{k}`: fractions of the tokens;
    - `entropy`, if the column came: nats a token;
    - `sequence_accuracy`: fraction of the samples with every token right, among those that have any token;
    - `bits_per_byte`, `bits_per_character`, if `reducers.text_lengths` stands beside: log-likelihood of the scored
      tokens by the length of their text, which compares models of different vocabularies;
    - `tokens`, `samples`: how many were scored, and how many came.

    Without any token, ratios are NaN and counts 0.0.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Source: F. Jelinek, R. L. Mercer, L. R. Bahl, J. K. Baker, "Perplexity - a measure of the difficulty of speech
    recognition tasks", 1977.

    Example:
        >>> from types import SimpleNamespace
        >>> sums = {"nll": [3.0, 1.0], "tokens": [5.0, 3.0], "correct": [2.0, 2.0], "all_correct": [0.0, 0.0]}
        >>> sums = {name: np.array(column) for name, column in sums.items()}
        >>> scores = language_modeling()(SimpleNamespace(predictions=sums, label_ids=np.zeros((2, 6))))
        >>> scores["nll_loss"], scores["token_accuracy"], scores["tokens"]
        (0.5, 0.5, 8.0)
    """
    return Metric(statistics=token_sums, score=token_scores, directions=DIRECTIONS)


def token_sums(predictions: Any, labels: Any) -> Columns:
    """Return the columns of `sample_sums` that `token_scores` reads, and who counts as a sample.

    Args:
        predictions: dict of arrays (samples,), or a dict of such dicts; other arrays may stand beside them.
        labels: not read.

    Returns:
        Arrays (samples,): the columns in float64 (nats, tokens), `sequences` (has a token), `samples`.

    Raises:
        ValueError: a column is missing, stands there twice, or is not one number a sample.
    """
    read = COLUMNS.keys() - {"ranks", "bin_{sum}"}
    found = {name: column for name, column in named_columns(predictions).items() if _keys.find(name, read)}
    missing = [name for name in NEEDED if name not in found]
    if missing:
        raise ValueError(_missing(missing, predictions))
    for name, column in found.items():
        if column.ndim != 1:
            raise ValueError(
                f"the column {name!r} has shape {column.shape}: it must be one sum a sample, ({len(column)},), "
                "as sample_sums returns"
            )
    columns = {name: column.astype(np.float64) for name, column in found.items()}
    sequences = columns["tokens"] > 0
    columns["all_correct"] = np.where(sequences, columns["all_correct"], 0.0)
    return {**columns, "sequences": sequences, "samples": np.ones_like(sequences, dtype=np.int64)}


def token_scores(sums: Columns) -> Columns:
    """Return the scores that `language_modeling` lists.

    Args:
        sums: the sums of `token_sums`, each of shape (...): a stack of evaluations, or one.

    Returns:
        Scores of the same shape.
    """
    tokens = sums["tokens"]
    nll = ratio(sums["nll"], tokens)
    with np.errstate(over="ignore"):
        scores = {"nll_loss": nll, "perplexity": np.exp(nll), "token_accuracy": ratio(sums["correct"], tokens)}
    for name, total in sums.items():
        if name.startswith("correct_top_"):
            scores[f"{name.removeprefix('correct_')}_accuracy"] = ratio(total, tokens)
    for name, unit in (("bytes", "byte"), ("characters", "character")):
        if name in sums:
            scores[f"bits_per_{unit}"] = ratio(sums["nll"] / np.log(2), sums[name])
    if "entropy" in sums:
        scores["entropy"] = ratio(sums["entropy"], tokens)
    scores["sequence_accuracy"] = ratio(sums["all_correct"], sums["sequences"])
    return {**scores, "tokens": tokens, "samples": sums["samples"]}


def label_ranking(hits: Sequence[int] = (1, 5, 10)) -> Metric:
    """Score the ranks of labels: mean reciprocal rank and hits among the first k, whatever the number of classes.

    The reducer is `label_rank`; its column is `ranks`, 0 for the best, -100 where nothing is scored. Keys: `mrr` and
    `hit_at_{k}`, over all labels; NaN without any.

    Args:
        hits: the values of k.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Raises:
        TypeError: hits are no integers.
        ValueError: a k below 1.

    Source: E. M. Voorhees, "The TREC-8 Question Answering Track Report", 1999.

    Example:
        >>> from types import SimpleNamespace
        >>> ranks = {"ranks": np.array([[-100, 0, 3]])}
        >>> label_ranking()(SimpleNamespace(predictions=ranks, label_ids=np.zeros((1, 3))))["mrr"]
        0.625
    """
    hits = integers("hits", hits, "a number of first places", least=1)
    keys = ("mrr", *(f"hit_at_{k}" for k in hits))
    return Metric(statistics=partial(rank_sums, hits=hits), score=rank_scores, directions=dict.fromkeys(keys, True))


def rank_sums(predictions: Any, labels: Any, *, hits: tuple[int, ...]) -> Columns:
    """Return what `rank_scores` reads: sums (samples,) over the labels of each sample, and `labels`, how many."""
    ranks = named_columns(predictions).get("ranks")
    if ranks is None or ranks.dtype.kind not in "iu":
        raise ValueError(
            f"label_ranking() needs the column 'ranks' (label_rank); predictions hold {describe(predictions)}"
        )
    scored = ranks >= 0
    columns = {"mrr": np.where(scored, 1 / (1.0 + np.where(scored, ranks, 0)), 0.0), "labels": scored}
    columns |= {f"hit_at_{k}": scored & (ranks < k) for k in hits}
    return {name: per_sample(values) for name, values in columns.items()}


def rank_scores(sums: Columns) -> Columns:
    """Return the means that `label_ranking` lists, of sums or of stacks of them."""
    return {name: ratio(total, sums["labels"]) for name, total in sums.items() if name != "labels"}


def calibration() -> Metric:
    """Score how far confidence is from accuracy, over bins of confidence, whatever the number of classes.

    The reducer is `calibration_bins`, whose columns are read. Keys: `expected_calibration_error`, the mean gap over
    labels, and `maximum_calibration_error`, the largest gap of a bin; NaN without any label.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Source: C. Guo et al., "On Calibration of Modern Neural Networks", 2017.

    Example:
        >>> from types import SimpleNamespace
        >>> bins = {"bin_labels": [[1, 3]], "bin_confidence": [[0.25, 2.75]], "bin_correct": [[0, 2]]}
        >>> bins = {name: np.array(sums) for name, sums in bins.items()}
        >>> calibration()(SimpleNamespace(predictions=bins, label_ids=np.zeros((1, 4))))
        {'expected_calibration_error': 0.25, 'maximum_calibration_error': 0.25}
    """
    return Metric(statistics=bin_sums, score=gaps, directions=CALIBRATION)


def bin_sums(predictions: Any, labels: Any) -> Columns:
    """Return the columns of `calibration_bins` (samples, bins).

    Raises:
        ValueError: one is missing, or of another shape.
    """
    found = named_columns(predictions)
    shapes = {found[name].shape if name in found else () for name in BINS}
    if len(shapes) > 1 or any(len(shape) != 2 or shape[1] == 0 for shape in shapes):
        raise ValueError(
            f"calibration() needs the columns {', '.join(BINS)} (samples, bins) of calibration_bins; predictions hold "
            f"{describe(predictions)}"
        )
    return {name: found[name] for name in BINS}


@np.errstate(invalid="ignore")  # infinite sums have no difference: NaN
def gaps(sums: Columns) -> Columns:
    """Return the scores that `calibration` lists, of sums or of stacks of them."""
    labels = sums["bin_labels"]
    gap = abs(sums["bin_confidence"] - sums["bin_correct"])
    largest = np.max(np.where(labels > 0, ratio(gap, labels), 0.0), axis=-1)
    total = labels.sum(-1)
    return {
        "expected_calibration_error": ratio(gap.sum(-1), total),
        "maximum_calibration_error": np.where(total > 0, largest, np.nan),
    }


def _missing(missing: list[str], predictions: Any) -> str:
    sources = "; ".join(f"{name}: {source}" for name, source in COLUMNS.items())
    return (
        f"language_modeling() needs the columns {', '.join(NEEDED)}; missing: {', '.join(missing)}. "
        f"Predictions hold {describe(predictions)}. "
        "Set preprocess_logits_for_metrics=partial(sample_sums, shift=1), or keep its columns beside others by "
        f"combine(sums=partial(sample_sums, shift=1), ...). What returns which column: {sources}"
    )
