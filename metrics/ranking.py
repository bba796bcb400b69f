"""Scores of rankings: of labels among classes, of the candidates of a query, of documents among all of the dataset."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ._core.arguments import integer
from ._core.classes import per_sample
from ._core.evaluation import IGNORED, Array, Columns, describe, missing, named_columns
from ._core.metric import Metric, means, ratio

# The column that `label_ranking` reads and the reducer that returns it: a contract between the two packages.
COLUMNS = {"ranks": "label_rank"}
HIGHER_IS_BETTER: dict[str, bool | None] = {
    **dict.fromkeys(("mrr", "hit_at_{k}", "map", "ndcg_at_{k}", "recall_at_{k}"), True),
    "queries": None,
}
# Number of similarities held in memory at once.
CHUNK = 2**24


def label_ranking(hits: Sequence[int] = (1, 5, 10)) -> Metric:
    """Score the ranks of labels by mean reciprocal rank and hits among the first k, for any number of classes.

    With r the rank of a label, 0 for the best::

        mrr = mean(1 / (1 + r))     hit_at_k = mean(r < k)

    The reducer is `label_rank`; its column is `ranks`, -100 where a label is not scored. The keys are `mrr` and
    `hit_at_{k}`, over all labels; without labels they are NaN.

    Args:
        hits: the values of k.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Raises:
        TypeError: if a value of k is not an integer.
        ValueError: if a value of k is less than 1.

    References:
        E. M. Voorhees, "The TREC-8 Question Answering Track Report", 1999,
        https://trec.nist.gov/pubs/trec8/papers/qa_report.pdf

    Example:
        >>> from types import SimpleNamespace
        >>> ranks = {"ranks": np.array([[-100, 0, 3]])}
        >>> label_ranking()(SimpleNamespace(predictions=ranks, label_ids=np.zeros((1, 3))))["mrr"]
        0.625
    """
    hits = _checked("hits", hits)
    keys = ("mrr", *(f"hit_at_{k}" for k in hits))
    return Metric(
        statistics=partial(rank_sums, hits=hits),
        score=partial(means, over="labels"),
        higher_is_better=dict.fromkeys(keys, True),
    )


def retrieval(ks: Sequence[int] = (1, 10)) -> Metric:
    """Score the order of the candidates of each query.

    With rel_i the relevance of the candidate at place i = 1, 2, ... and R the number of relevant candidates::

        mrr = mean(1 / place of the first relevant candidate)
        map = mean(sum over relevant i of (number of relevant candidates up to i) / i / R)
        ndcg_at_k = mean(DCG_k / ideal DCG_k),  DCG_k = sum_{i <= k} rel_i / log2(i + 1)
        recall_at_k = mean((number of relevant candidates up to k) / R)

    Predictions are scores (B, K) of candidates, alone or as the column `scores`; labels are their relevance (B, K), 0
    or more, -100 where there is no candidate. The keys are the four names above, averaged over the queries that have a
    relevant candidate, and `queries`, the number of these.

    Among equal scores the earlier candidate ranks first: order candidates independently of their relevance. Without any
    query means are NaN.

    Args:
        ks: the values of k.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Raises:
        TypeError: if a value of k is not an integer.
        ValueError: if a value of k is less than 1.

    References:
        K. Jarvelin, J. Kekalainen, "Cumulated gain-based evaluation of IR techniques", 2002,
        https://doi.org/10.1145/582415.582418
        C. D. Manning, P. Raghavan, H. Schutze, "Introduction to Information Retrieval", 2008, chapter 8,
        https://nlp.stanford.edu/IR-book/

    Example:
        >>> from types import SimpleNamespace
        >>> evaluated = SimpleNamespace(predictions=np.array([[0.9, 0.5, 0.1]]), label_ids=np.array([[0, 1, -100]]))
        >>> retrieval()(evaluated)["mrr"]
        0.5
    """
    ks = _checked("ks", ks)
    keys = ("mrr", "map", *(f"{name}_at_{k}" for name in ("ndcg", "recall") for k in ks))
    return Metric(
        statistics=partial(query_sums, ks=ks),
        score=query_means,
        higher_is_better={**dict.fromkeys(keys, True), "queries": None},
    )


def paired_retrieval(ks: Sequence[int] = (1, 10), *, queries: str = "queries", documents: str = "documents") -> Metric:
    """Score how well each query finds its own document among the documents of all samples, by dot products.

    With r the rank of the query's own document among all, 1 for the best::

        mrr = mean(1 / r)     recall_at_k = mean(r <= k)

    Predictions are columns of vectors (B, D), as `reducers.embeddings` returns. The keys are `mrr` and `recall_at_{k}`.
    Among equal products the query's own document ranks last, so that constant vectors get the worst score. A sample
    drawn twice would compete with itself, so `bootstrap` and `compare` refuse this metric.

    Args:
        ks: the values of k.
        queries: name of a column.
        documents: name of a column.

    Returns:
        A metric that needs all rows at once.

    Raises:
        TypeError: if a value of k is not an integer.
        ValueError: if a value of k is less than 1.

    References:
        A. Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021, table 13,
        https://arxiv.org/abs/2103.00020

    Example:
        >>> from types import SimpleNamespace
        >>> vectors = {"queries": np.eye(3), "documents": np.eye(3)}
        >>> paired_retrieval()(SimpleNamespace(predictions=vectors, label_ids=np.zeros(3)))["recall_at_1"]
        1.0
    """
    ks = _checked("ks", ks)
    return Metric(
        statistics=partial(vectors, names=(queries, documents)),
        score=partial(paired_scores, ks=ks),
        higher_is_better=dict.fromkeys(("mrr", *(f"recall_at_{k}" for k in ks)), True),
        needs_all_samples="each query is compared with the documents of all samples",
        supports_resampling=False,
    )


def rank_sums(predictions: Any, labels: Any, *, hits: tuple[int, ...]) -> Columns:
    """Return sums (samples,) over the labels of each sample: the scores of `label_ranking`, and `labels`, their number.

    Raises:
        ValueError: if the column `ranks` is missing, or does not hold integers.
    """
    ranks = named_columns(predictions).get("ranks")
    if ranks is None or ranks.dtype.kind not in "iu":
        raise missing("the column 'ranks' (reducers.label_rank)", predictions)
    scored = ranks >= 0
    columns = {"mrr": np.where(scored, 1 / (1.0 + np.where(scored, ranks, 0)), 0.0), "labels": scored}
    columns |= {f"hit_at_{k}": scored & (ranks < k) for k in hits}
    return {name: per_sample(values) for name, values in columns.items()}


def query_sums(predictions: Any, labels: Any, *, ks: tuple[int, ...]) -> Columns:
    """Return the scores (B,) of each query, 0.0 without a relevant candidate, and `queries`, whether it has one.

    Raises:
        TypeError: if labels are not one array, or scores are not floats.
        ValueError: if shapes differ, a score is NaN, or a relevance is not finite, or negative and not -100.
    """
    scores = predictions if isinstance(predictions, np.ndarray) else named_columns(predictions).get("scores")
    if scores is None:
        raise missing("scores of the candidates (B, K), alone or as the column 'scores'", predictions)
    if scores.dtype.kind != "f" or not isinstance(labels, np.ndarray):
        raise TypeError(f"scores must be floats and labels one array, got {describe(scores)} and {describe(labels)}")
    there = labels != IGNORED
    valid = scores.shape == labels.shape and (np.isfinite(labels) & (labels >= 0))[there].all()
    if scores.ndim != 2 or not valid or np.isnan(scores[there]).any():
        raise ValueError(
            f"scores and labels must both be (B, K), scores not NaN, and the relevance of each candidate 0 or more, "
            f"-100 where there is none; got scores {scores.shape} and labels {labels.shape}"
        )
    gains = np.where(there, labels, 0).astype(np.float64)
    order = np.lexsort((-scores.astype(np.float64), ~there))  # along rows: candidates first, the best of them first
    return _scores_of_ranked(np.take_along_axis(gains, order, 1), ks)


def query_means(sums: Columns) -> Columns:
    """Return the scores of `retrieval`, for the sums of `query_sums` or stacks of them."""
    return {**means(sums, over="queries"), "queries": sums["queries"]}


def vectors(predictions: Any, labels: Any, *, names: tuple[str, str]) -> Columns:
    """Return the columns `queries` and `documents` (B, D).

    Raises:
        ValueError: if one is missing, or their shapes differ.
    """
    found = named_columns(predictions)
    first, second = (found.get(name) for name in names)
    if first is None or second is None or first.ndim != 2 or first.shape != second.shape:
        raise missing(f"vectors (B, D) in the columns {' and '.join(names)} (reducers.embeddings)", predictions)
    return {"queries": first, "documents": second}


def paired_scores(rows: Columns, *, ks: tuple[int, ...]) -> Columns:
    """Return the scores of `paired_retrieval`, from the columns of `vectors`."""
    queries, documents = rows["queries"], rows["documents"]
    step = max(1, CHUNK // max(1, len(documents)))
    ranks = [np.zeros(0, np.int64)]
    for start in range(0, len(queries), step):
        with np.errstate(over="ignore", invalid="ignore"):  # vectors of a model that has diverged
            products = queries[start : start + step] @ documents.T
        paired = products[np.arange(len(products)), start + np.arange(len(products))]
        ranks.append((~(products < paired[:, None])).sum(1))  # a NaN product ranks last
    rank = np.concatenate(ranks)
    scores = {"mrr": 1 / rank, **{f"recall_at_{k}": rank <= k for k in ks}}
    return {name: ratio(values.sum(), len(values)) for name, values in scores.items()}


def _scores_of_ranked(gains: Array, ks: tuple[int, ...]) -> Columns:
    """Return the scores of each row of gains (B, K), which are in the order of the ranking."""
    places = 1 + np.arange(gains.shape[1])
    relevant = gains > 0
    total = relevant.sum(1)
    precision = relevant.cumsum(1) / places
    columns = {
        "queries": total > 0,
        "mrr": np.max(relevant / places, axis=1, initial=0),
        "map": (precision * relevant).sum(1) / np.maximum(total, 1),
    }
    best = -np.sort(-gains, axis=1)
    for k in ks:
        discount = np.where(places <= k, 1 / np.log2(places + 1), 0)
        ideal = (best * discount).sum(1)
        columns[f"ndcg_at_{k}"] = (gains * discount).sum(1) / np.where(ideal > 0, ideal, 1)
        columns[f"recall_at_{k}"] = relevant[:, :k].sum(1) / np.maximum(total, 1)
    return columns


def _checked(name: str, ks: Sequence[int]) -> tuple[int, ...]:
    return tuple(integer(f"each of {name}", k, minimum=1) for k in ks)
