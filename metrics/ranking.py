"""Scores of rankings: candidates of a query, or the partner of each vector among all."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ._core.arguments import integers, string
from ._core.classes import IGNORED, missing
from ._core.evaluation import Array, Columns, describe, named_columns
from ._core.metric import Metric, ratio

DIRECTIONS: dict[str, bool | None] = {
    "mrr": True,
    "map": True,
    "ndcg_at_{k}": True,
    "recall_at_{k}": True,
    "queries": None,
}
COLUMN = "the name of a column of vectors"
# Similarities held at once.
CHUNK = 2**24


def retrieval(ks: Sequence[int] = (1, 10)) -> Metric:
    """Score the order of each query's candidates.

    Predictions are scores (B, K) of candidates, alone or as the column `scores`; labels their relevance (B, K), 0 or
    more, -100 where there is no candidate. Keys, each the mean over the queries that have a relevant candidate:

    - `mrr`: reciprocal rank of the first relevant one; `map`: average precision;
    - `ndcg_at_{k}`: discounted gain (the relevance itself) of the first k, by the best one possible;
    - `recall_at_{k}`: fraction of the relevant ones among the first k;
    - `queries`: how many have a relevant candidate.

    Among equal scores the earlier candidate comes first: put them in an order that says nothing. Without any query
    means are NaN.

    Args:
        ks: the values of k.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Raises:
        TypeError: ks are no integers.
        ValueError: a k below 1.

    Source: K. Jarvelin, J. Kekalainen, "Cumulated gain-based evaluation of IR techniques", 2002; C. D. Manning,
    P. Raghavan, H. Schutze, "Introduction to Information Retrieval", 2008, chapter 8.

    Example:
        >>> from types import SimpleNamespace
        >>> evaluated = SimpleNamespace(predictions=np.array([[0.9, 0.5, 0.1]]), label_ids=np.array([[0, 1, -100]]))
        >>> retrieval()(evaluated)["mrr"]
        0.5
    """
    ks = _checked(ks)
    keys = ("mrr", "map", *(f"{name}_at_{k}" for name in ("ndcg", "recall") for k in ks))
    return Metric(
        statistics=partial(query_sums, ks=ks),
        score=query_means,
        directions={**dict.fromkeys(keys, True), "queries": None},
    )


def query_sums(predictions: Any, labels: Any, *, ks: tuple[int, ...]) -> Columns:
    """Return the scores (B,) of each query, 0.0 without a relevant candidate, and `queries`, whether it has one.

    Raises:
        TypeError: labels are not one array, or scores not floats.
        ValueError: shapes differ, a score is NaN, or a relevance is not finite, or negative and not -100.
    """
    scores = predictions if isinstance(predictions, np.ndarray) else named_columns(predictions).get("scores")
    if scores is None:
        raise missing("scores of the candidates (B, K), alone or as the column 'scores'", predictions)
    if scores.dtype.kind != "f" or not isinstance(labels, np.ndarray):
        raise TypeError(f"scores are floats and labels one array; {describe(scores)} and {describe(labels)} came")
    there = labels != IGNORED
    known = scores.shape == labels.shape and (np.isfinite(labels) & (labels >= 0))[there].all()
    if scores.ndim != 2 or not known or np.isnan(scores[there]).any():
        raise ValueError(
            f"scores {scores.shape} and labels {labels.shape} must both be (B, K): no score NaN, and a relevance of 0 "
            "or more for each candidate, -100 where there is none"
        )
    gains = np.where(there, labels, 0).astype(np.float64)
    order = np.lexsort((-scores.astype(np.float64), ~there))  # along rows: candidates first, the best of them first
    return _of_ranked(np.take_along_axis(gains, order, 1), ks)


def query_means(sums: Columns) -> Columns:
    """Return the means that `retrieval` lists, of sums or of stacks of them."""
    means = {name: ratio(total, sums["queries"]) for name, total in sums.items() if name != "queries"}
    return {**means, "queries": sums["queries"]}


def partner_retrieval(ks: Sequence[int] = (1, 10), *, queries: str = "queries", documents: str = "documents") -> Metric:
    """Find each query's own document among the documents of all samples, by the products of their vectors.

    Predictions are columns of vectors (B, D), as `reducers.embeddings` returns. Keys: `mrr`, `recall_at_{k}`. Among
    equal products the own document comes last, so that constant vectors find nothing. A sample that is drawn twice
    would compete with itself: `bootstrap` and `compare` refuse this metric.

    Args:
        ks: the values of k.
        queries: name of a column.
        documents: name of a column.

    Returns:
        A metric that needs all rows at once.

    Raises:
        TypeError: ks are no integers, or a column's name no text.
        ValueError: a k below 1.

    Source: A. Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021, table 13.

    Example:
        >>> from types import SimpleNamespace
        >>> vectors = {"queries": np.eye(3), "documents": np.eye(3)}
        >>> partner_retrieval()(SimpleNamespace(predictions=vectors, label_ids=np.zeros(3)))["recall_at_1"]
        1.0
    """
    ks = _checked(ks)
    names = string("queries", queries, COLUMN), string("documents", documents, COLUMN)
    return Metric(
        statistics=partial(vectors, names=names),
        score=PartnerScores(ks),
        directions=dict.fromkeys(("mrr", *(f"recall_at_{k}" for k in ks)), True),
        whole="each query is compared with the documents of all samples",
        by_draw=False,
    )


def vectors(predictions: Any, labels: Any, *, names: tuple[str, str]) -> Columns:
    """Return the columns `queries` and `documents` (B, D).

    Raises:
        ValueError: one is missing, or their shapes differ.
    """
    found = named_columns(predictions)
    pair = [found.get(name) for name in names]
    first, second = pair
    if first is None or second is None or first.ndim != 2 or first.shape != second.shape:
        raise missing(f"vectors (B, D) in the columns {' and '.join(names)} (reducers.embeddings)", predictions)
    return {"queries": first, "documents": second}


@dataclass(frozen=True)
class PartnerScores:
    """The scores that `partner_retrieval` lists, from the columns of `vectors`."""

    ks: tuple[int, ...]

    def __call__(self, rows: Columns) -> Columns:
        queries, documents = rows["queries"], rows["documents"]
        step = max(1, CHUNK // max(1, len(documents)))
        ranks = [np.zeros(0, np.int64)]
        for start in range(0, len(queries), step):
            with np.errstate(over="ignore", invalid="ignore"):  # vectors of a model that diverged
                products = queries[start : start + step] @ documents.T
            own = products[np.arange(len(products)), start + np.arange(len(products))]
            ranks.append((~(products < own[:, None])).sum(1))  # NaN finds nothing either
        rank = np.concatenate(ranks)
        scores = {"mrr": 1 / rank, **{f"recall_at_{k}": rank <= k for k in self.ks}}
        return {name: ratio(values.sum(), len(values)) for name, values in scores.items()}


def _of_ranked(gains: Array, ks: tuple[int, ...]) -> Columns:
    """Return the scores of each row of gains (B, K), in the order of the ranking."""
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


def _checked(ks: Sequence[int]) -> tuple[int, ...]:
    return integers("ks", ks, "a number of first places", least=1)
