"""Ranks of labels, retrieval and paired retrieval against loops and scikit-learn."""

import math

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, ndcg_score

from metrics import bootstrap, build, by_group, compare, label_ranking, paired_retrieval, regression, retrieval

from .evaluations import assert_every_mode, evaluation

N = -100


def test_ranks_give_reciprocals_and_hits():
    generator = np.random.default_rng(0)
    ranks = generator.integers(0, 12, (9, 5)).astype(np.int32)
    ranks[generator.random(ranks.shape) < 0.3] = N
    flat = [rank for rank in ranks.ravel().tolist() if rank >= 0]
    expected = {
        "mrr": math.fsum(1 / (1 + rank) for rank in flat) / len(flat),
        "hit_at_1": sum(rank == 0 for rank in flat) / len(flat),
        "hit_at_5": sum(rank < 5 for rank in flat) / len(flat),
    }
    assert_every_mode(label_ranking((1, 5)), {"ranks": ranks}, np.zeros_like(ranks), expected)


KS = (1, 3)


def retrieval_by_hand(scores, labels):
    """scikit-learn's nDCG and average precision, a query at a time."""
    found = {name: [] for name in ("mrr", "map", *(f"{score}_at_{k}" for score in ("ndcg", "recall") for k in KS))}
    for given, relevance in zip(scores, labels, strict=True):
        row, target = given[relevance != N], relevance[relevance != N]
        if not (target > 0).any():
            continue
        order = np.argsort(-row)
        found["map"].append(average_precision_score(target > 0, row))
        found["mrr"].append(1 / (1 + next(place for place, at in enumerate(order) if target[at] > 0)))
        for k in KS:
            found[f"ndcg_at_{k}"].append(ndcg_score([target], [row], k=k) if len(row) > 1 else 1.0)
            found[f"recall_at_{k}"].append((target[order[:k]] > 0).sum() / (target > 0).sum())
    return {name: np.mean(values) for name, values in found.items()} | {"queries": len(found["mrr"])}


def test_rankings_score_as_in_scikit_learn():
    generator = np.random.default_rng(0)
    scores, labels = generator.random((20, 6)), generator.integers(0, 3, (20, 6))
    labels[generator.random(labels.shape) < 0.2] = N
    labels[3], labels[4] = 0, N
    expected = retrieval_by_hand(scores, labels)
    assert expected["queries"] < 20
    assert_every_mode(retrieval(KS), {"scores": scores}, labels, expected)
    grouped = by_group(retrieval(KS), np.arange(20) % 2)(evaluation(scores, labels))
    assert grouped["map/1"] == pytest.approx(retrieval_by_hand(scores[1::2], labels[1::2])["map"])


def test_queries_without_a_relevant_candidate_do_not_count_and_ties_keep_their_order():
    scores = retrieval()(evaluation(np.zeros((2, 3)), np.zeros((2, 3), np.int64)))
    assert scores.pop("queries") == 0
    assert np.isnan(list(scores.values())).all()
    assert retrieval()(evaluation(np.zeros((1, 4)), np.array([[0, 0, 1, 0]])))["mrr"] == pytest.approx(1 / 3)


def test_candidate_with_score_minus_inf_ranks_before_a_missing_one():
    scores, labels = np.array([[0.5, -np.inf, 0.1]]), np.array([[N, 1, 0]])
    assert retrieval()(evaluation(scores, labels))["mrr"] == 0.5


def vectors(queries, documents):
    return evaluation({"queries": queries, "documents": documents}, np.zeros(len(queries)))


@pytest.mark.parametrize("chunk", [2**24, 70])
def test_paired_retrieval_ranks_documents_of_all_samples(monkeypatch, chunk):
    queries, documents = np.random.default_rng(0).normal(size=(2, 30, 5))
    products = queries @ documents.T
    ranks = np.array([sorted(-products[row]).index(-products[row, row]) + 1 for row in range(30)])
    monkeypatch.setattr("metrics.ranking.CHUNK", chunk)
    scores = paired_retrieval()(vectors(queries, documents))
    assert scores["mrr"] == pytest.approx(np.mean(1 / ranks), rel=1e-12)
    assert scores["recall_at_10"] == pytest.approx(np.mean(ranks <= 10), rel=1e-12)


def test_paired_retrieval_of_equal_vectors_finds_nothing_and_of_no_samples_is_nan():
    assert paired_retrieval()(vectors(np.ones((4, 2)), np.ones((4, 2))))["recall_at_1"] == 0.0
    assert np.isnan(paired_retrieval()(vectors(np.ones((0, 2)), np.ones((0, 2))))["mrr"])


@pytest.mark.parametrize("metric", [paired_retrieval(), build(paired_retrieval(), regression())])
def test_paired_retrieval_refuses_resampling(metric):
    itself = vectors(np.eye(30), np.eye(30))
    for draw in (bootstrap, lambda metric: compare(metric, itself, itself)):
        with pytest.raises(ValueError, match="would compete with itself"):
            draw(metric)
    assert by_group(paired_retrieval(), "ab" * 15)(itself)["recall_at_1/b"] == 1.0
