"""Ranks, bits a byte, question answering, pixels, retrieval and GLUE against loops, scikit-learn and transformers."""

import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    jaccard_score,
    label_ranking_average_precision_score,
    matthews_corrcoef,
    ndcg_score,
)
from torchmetrics.functional.text import squad

from lossfns.collators import pack_spans
from metrics import (
    bootstrap,
    build,
    by_group,
    calibration,
    classification,
    compare,
    extractive_qa,
    glue,
    label_ranking,
    labels_from,
    language_modeling,
    partner_retrieval,
    regression,
    retrieval,
    segmentation,
)

from .evaluations import columns, evaluation, modes, samples, sized

N = -100


def assert_every_mode(metric, predictions, labels, expected, **tolerance):
    bounds = (0, 1, 4, len(labels))
    for mode, scores in modes(sized(metric, len(labels)), predictions, labels, bounds).items():
        found = {key: scores[key] for key in expected}
        assert found == pytest.approx(expected, nan_ok=True, **(tolerance or {"rel": 1e-12})), mode


# --- ranks and lengths ------------------------------------------------------------------------------------------------


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


def test_ranks_agree_with_scikit_learn():
    generator = np.random.default_rng(0)
    scores, labels = generator.random((40, 7)), generator.integers(0, 7, 40)
    ranks = (scores > scores[np.arange(40), labels, None]).sum(1)
    expected = label_ranking_average_precision_score(np.eye(7)[labels], scores)
    assert label_ranking()(evaluation({"ranks": ranks}, labels))["mrr"] == pytest.approx(expected, rel=1e-12)


def test_ranks_of_nothing():
    for ranks in (np.zeros((0, 3), np.int32), np.full((2, 3), N)):
        assert np.isnan(list(label_ranking()(evaluation({"ranks": ranks}, ranks)).values())).all()
    with pytest.raises(ValueError, match="needs the column 'ranks'"):
        label_ranking()(evaluation(np.zeros((2, 3)), np.zeros((2, 3))))
    with pytest.raises(ValueError, match="at least 1; "):
        label_ranking((0,))


def test_bits_of_a_byte_and_a_character():
    rows = samples(8)
    predictions = columns(rows) | {"bytes": np.arange(8), "characters": np.arange(8) // 2}
    bits = math.fsum(token[0] for row in rows for token in row) / math.log(2)
    expected = {"bits_per_byte": bits / 28, "bits_per_character": bits / 12}
    assert_every_mode(language_modeling(), predictions, np.zeros(8), expected)
    assert "bits_per_byte" not in language_modeling()(evaluation(columns(rows), np.zeros(8)))


def test_calibration_is_that_of_a_loop():
    generator = np.random.default_rng(0)
    confidence, right = generator.random(60), generator.random(60) < 0.5
    place = np.ceil(confidence * 4).astype(int) - 1
    sums = {name: np.zeros((60, 4)) for name in ("bin_labels", "bin_confidence", "bin_correct")}
    for column, values in zip(sums.values(), (np.ones(60), confidence, right), strict=True):
        column[np.arange(60), place] = values
    gaps = [abs((confidence - right)[place == at].mean()) for at in range(4)]
    expected = {
        "expected_calibration_error": sum(gap * np.mean(place == at) for at, gap in enumerate(gaps)),
        "maximum_calibration_error": max(gaps),
    }
    assert_every_mode(calibration(), sums, np.zeros(60), expected)
    nothing = {name: column[:0] for name, column in sums.items()}
    assert np.isnan(list(calibration()(evaluation(nothing, np.zeros(0))).values())).all()
    for wrong in (np.zeros(60), {name: column[:, 0] for name, column in sums.items()}):
        with pytest.raises(ValueError, match=r"\(samples, bins\) of calibration_bins"):
            calibration()(evaluation(wrong, np.zeros(60)))


def test_labels_out_of_a_column():
    found = {"ids": np.array([0, 1, 1]), "answers": np.array([0, 0, N])}
    metric = labels_from(classification(2), "answers")
    assert metric(evaluation(found, np.zeros((3, 7))))["accuracy"] == 0.5
    with pytest.raises(ValueError, match="'other' is to be the labels; predictions hold ids"):
        labels_from(classification(2), "other")(evaluation(found, np.zeros((3, 7))))


# --- question answering -----------------------------------------------------------------------------------------------

TEXT = "The Normans (Norman: Nourmands) were the people who in the 10th century gave their name to Normandy."
WORDS = [(start, start + len(word)) for word in TEXT.split() for start in [TEXT.index(word)]]
QUESTION = [None, None, None]


def example(name, *answers):
    return {"id": name, "context": TEXT, "answers": {"text": list(answers)}}


def window(name, first, last, **positions):
    return {"example_id": name, "offset_mapping": [*QUESTION, *WORDS[first:last], None], **positions}


EXAMPLES = [example("a", "the 10th century", "10th"), example("b", "Normandy."), example("c")]
FEATURES = [window("a", 0, 9), window("a", 5, 16), window("b", 8, 16), window("c", 0, 16)]
# (token, token, score) a window, best first; tokens 0 to 2 are the question
FOUND = [
    [(1, 2, 9.0), (3, 4, 3.0), (4, 4, 2.0)],
    [(4, 6, 8.0), (7, 7, 5.0), (3, 3, 1.0)],
    [(0, 0, 7.0), (9, 10, 6.0), (N, N, 0.0)],
    [(5, 5, 1.0), (0, 2, 0.5), (30, 31, 0.1)],
]
NULLS = [4.0, 5.0, 2.0, 8.0]


def spans_of(found=FOUND, nulls=NULLS):
    starts, ends, scores = (np.array([[span[at] for span in row] for row in found]) for at in range(3))
    return {
        "starts": starts.astype(np.int32),
        "ends": ends.astype(np.int32),
        "scores": scores,
        "null_scores": np.array(nulls),
    }


def answers_by_hand(threshold=0.0, *, nulls=True):
    """As `run_qa` of transformers' examples: candidates of all windows, best first, and the lowest null score."""
    texts = {}
    for row in EXAMPLES:
        places = [place for place, feature in enumerate(FEATURES) if feature["example_id"] == row["id"]]
        candidates = []
        for place in places:
            offsets = FEATURES[place]["offset_mapping"]
            for start, end, score in FOUND[place]:
                if 0 <= start <= end < len(offsets) and offsets[start] and offsets[end]:
                    candidates.append((score, TEXT[offsets[start][0] : offsets[end][1]]))
        score, text = max(candidates, key=lambda pair: pair[0], default=(-math.inf, ""))
        none = min(NULLS[place] for place in places)
        texts[row["id"]] = "" if nulls and none - score > threshold else text
    return texts


def expected_answers(texts, rows):
    golds = [row["answers"]["text"] or [""] for row in rows]
    scores = squad(
        [{"id": row["id"], "prediction_text": texts[row["id"]]} for row in rows],
        [
            {"id": row["id"], "answers": {"text": gold, "answer_start": [0]}}
            for row, gold in zip(rows, golds, strict=True)
        ],
    )
    return float(scores["exact_match"]) / 100, float(scores["f1"]) / 100


@pytest.mark.parametrize("threshold", [-9.0, 0.0, 9.0])
def test_answers_score_as_in_squad(threshold):
    scores = extractive_qa(EXAMPLES, FEATURES, null_threshold=threshold)(evaluation(spans_of(), np.zeros(4)))
    exact, f1 = expected_answers(answers_by_hand(threshold), EXAMPLES)
    assert (scores["exact_match"], scores["token_f1"]) == pytest.approx((exact, f1), rel=1e-6)
    assert scores["unanswerable_exact_match"] == float(threshold < 8)


def test_where_every_question_has_an_answer_one_is_given():
    scores = extractive_qa(EXAMPLES[:2], FEATURES[:3])(evaluation(spans_of(FOUND[:3], NULLS[:3]), np.zeros(3)))
    exact, f1 = expected_answers(answers_by_hand(nulls=False), EXAMPLES[:2])
    assert (scores["exact_match"], scores["token_f1"]) == pytest.approx((exact, f1), rel=1e-6)
    assert np.isnan(scores["unanswerable_exact_match"])
    assert scores["answerable_token_f1"] == scores["token_f1"]


def test_windows_are_told_by_their_order():
    placed = [
        feature | {"start_positions": place, "end_positions": place + 1} for place, feature in enumerate(FEATURES)
    ]
    metric = extractive_qa(EXAMPLES, placed)
    labels = np.arange(4), np.arange(1, 5)
    expected = extractive_qa(EXAMPLES, FEATURES)(evaluation(spans_of(), np.zeros(4)))
    assert metric(evaluation(spans_of(), labels)) == expected == metric(evaluation(spans_of(), np.stack(labels, 1)))
    with pytest.raises(ValueError, match="sampler reorders"):
        metric(evaluation(spans_of(FOUND[::-1], NULLS[::-1]), tuple(label[::-1] for label in labels)))
    with pytest.raises(ValueError, match="3 rows came"):
        metric(evaluation(spans_of(FOUND[:3], NULLS[:3]), tuple(label[:3] for label in labels)))
    with pytest.raises(ValueError, match="matched with questions by their place"):
        metric(evaluation(spans_of(), labels), compute_result=False)
    with pytest.raises(ValueError, match="one after the other"):
        bootstrap(metric)
    assert pickle.loads(pickle.dumps(metric))(evaluation(spans_of(), labels)) == expected


@pytest.mark.parametrize("place", [-1, 15, 400])
def test_positions_outside_the_window_come_as_pack_spans_makes_them(place):
    ends = [5, place, 6, 7]
    placed = [feature | {"start_positions": 4, "end_positions": at} for feature, at in zip(FEATURES, ends, strict=True)]
    collate = pack_spans(lambda rows: {name: torch.tensor([row[name] for row in rows]) for name in rows[0]})
    rows = [{name: row[name] for name in ("start_positions", "end_positions")} for row in placed]
    packed = collate([row | {"input_ids": [0] * 20} for row in rows])["labels"].numpy()
    raw = np.array([[*row.values()] for row in rows])
    metric = extractive_qa(EXAMPLES, placed)
    expected = extractive_qa(EXAMPLES, FEATURES)(evaluation(spans_of(), np.zeros(4)))
    # 15 is off its window of 15 tokens, but not off a batch that is padded to 20; off one that isn't, it is.
    narrow = np.where(packed == 15, N, packed)
    for labels in (packed, narrow, raw):
        assert metric(evaluation(spans_of(), labels)) == expected
        with pytest.raises(ValueError, match="the labels of 2 of 4 samples, the first in row 0"):
            metric(evaluation(spans_of(), labels[[2, 1, 0, 3]]))
    assert metric(evaluation(spans_of(), tuple(raw.T))) == expected
    with pytest.raises(ValueError, match="the labels of 1 of 4 samples, the first in row 0"):
        metric(evaluation(spans_of(), np.where(packed == 5, N, packed)))  # an answer inside its window is not lost


def test_labels_beside_positions_are_a_pair():
    placed = [feature | {"start_positions": 4, "end_positions": 5} for feature in FEATURES]
    for labels in (np.zeros(4), np.zeros((4, 3)), (np.zeros(4), np.zeros((4, 2)))):
        with pytest.raises(ValueError, match=r"one array \(B, 2\), as lossfns\.collators\.pack_spans makes it"):
            extractive_qa(EXAMPLES, placed)(evaluation(spans_of(), labels))
    with pytest.raises(TypeError, match="start_positions and end_positions is a token each, in all features"):
        extractive_qa(EXAMPLES, [*placed[:3], FEATURES[3]])


def test_what_is_no_question_is_refused():
    with pytest.raises(ValueError, match="unknown: \\['z'\\]"):
        extractive_qa(EXAMPLES, [window("z", 0, 3)])
    with pytest.raises(ValueError, match="4 examples came with 3 ids"):
        extractive_qa([*EXAMPLES[:3], EXAMPLES[0]], FEATURES[:3])
    with pytest.raises(ValueError, match="preprocess_logits_for_metrics=spans"):
        extractive_qa(EXAMPLES, FEATURES)(evaluation(np.zeros((4, 9)), np.zeros(4)))
    with pytest.raises(ValueError, match="the model has diverged"):
        extractive_qa(EXAMPLES, FEATURES)(evaluation(spans_of(nulls=[0.0, np.nan, 0.0, 0.0]), np.zeros(4)))


# --- pixels -----------------------------------------------------------------------------------------------------------


def test_pixels_score_as_in_scikit_learn():
    generator = np.random.default_rng(0)
    labels, ids = generator.integers(0, 4, (2, 6, 8, 5))
    labels[generator.random(labels.shape) < 0.2] = N
    there = labels != N
    pair = labels[there], ids[there]
    iou, dice = jaccard_score(*pair, average=None), f1_score(*pair, average=None)
    expected = {
        "mean_iou": iou.mean(),
        "mean_dice": dice.mean(),
        "pixel_accuracy": accuracy_score(*pair),
        **{f"iou/{name}": value for name, value in enumerate(iou)},
        **{f"dice/{name}": value for name, value in enumerate(dice)},
    }
    assert_every_mode(segmentation(4), {"ids": ids}, labels, expected)
    more = segmentation(id2label=dict(enumerate("abcde")))(evaluation(ids, labels))
    assert more["mean_iou"] == pytest.approx(iou.mean())  # a class that does not occur is no part of the mean
    assert np.isnan(more["iou/e"])


def test_no_pixels_one_class_and_constants():
    for labels in (np.zeros((0, 2, 2), np.int64), np.full((2, 2, 2), N)):
        assert np.isnan(list(segmentation(2)(evaluation(np.zeros_like(labels), labels)).values())).all()
    ones = np.ones((1, 2, 2), np.int64)
    assert segmentation(2)(evaluation(ones, ones))["mean_iou"] == 1.0
    assert segmentation(2)(evaluation(ones, 0 * ones))["mean_iou"] == 0.0


# --- retrieval --------------------------------------------------------------------------------------------------------

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


def test_rankings_of_nothing_and_of_equals():
    for labels in (np.zeros((0, 3), np.int64), np.full((2, 3), N), np.zeros((2, 3), np.int64)):
        scores = retrieval()(evaluation(np.zeros(labels.shape), labels))
        assert scores.pop("queries") == 0
        assert np.isnan(list(scores.values())).all()
    assert retrieval()(evaluation(np.zeros((1, 4)), np.array([[0, 0, 1, 0]])))["mrr"] == pytest.approx(1 / 3)


def test_a_candidate_that_is_ruled_out_comes_before_none():
    scores, labels = np.array([[0.5, -np.inf, 0.1]]), np.array([[N, 1, 0]])
    assert retrieval()(evaluation(scores, labels))["mrr"] == 0.5


@pytest.mark.parametrize(
    ("scores", "labels", "error", "message"),
    [
        (np.zeros((2, 3), np.int64), np.zeros((2, 3)), TypeError, "scores are floats"),
        (np.zeros((2, 3)), np.zeros((2, 2)), ValueError, r"must both be \(B, K\)"),
        (np.zeros((2, 3)), np.full((2, 3), -1), ValueError, "0 or more"),
        ({"other": np.zeros((2, 3))}, np.zeros((2, 3)), ValueError, "column 'scores'"),
    ],
)
def test_what_is_no_ranking_is_refused(scores, labels, error, message):
    with pytest.raises(error, match=message):
        retrieval()(evaluation(scores, labels))


def test_partners_are_found_among_all(monkeypatch):
    generator = np.random.default_rng(0)
    queries, documents = generator.normal(size=(2, 30, 5))
    products = queries @ documents.T
    ranks = [sorted(-products[row]).index(-products[row, row]) + 1 for row in range(30)]
    expected = {"mrr": np.mean([1 / rank for rank in ranks]), "recall_at_10": np.mean([rank <= 10 for rank in ranks])}
    vectors = evaluation({"queries": queries, "documents": documents}, np.zeros(30))
    for chunk in (2**24, 70):
        monkeypatch.setattr("metrics.ranking.CHUNK", chunk)
        scores = partner_retrieval()(vectors)
        assert {key: scores[key] for key in expected} == pytest.approx(expected, rel=1e-12)
    constant = partner_retrieval()(evaluation({"queries": np.ones((4, 2)), "documents": np.ones((4, 2))}, np.zeros(4)))
    assert constant["recall_at_1"] == 0.0
    assert np.isnan(
        partner_retrieval()(evaluation({"queries": np.ones((0, 2)), "documents": np.ones((0, 2))}, np.zeros(0)))["mrr"]
    )
    with pytest.raises(ValueError, match="documents of all samples"):
        partner_retrieval()(vectors, compute_result=False)
    with pytest.raises(ValueError, match="queries and documents"):
        partner_retrieval()(evaluation({"queries": queries}, np.zeros(30)))


@pytest.mark.parametrize("metric", [partner_retrieval(), build(partner_retrieval(), regression())])
def test_partners_are_not_drawn_twice(metric):
    vectors = evaluation({"queries": np.eye(30), "documents": np.eye(30)}, np.zeros(30))
    for draw in (bootstrap, lambda metric: compare(metric, vectors, vectors)):
        with pytest.raises(ValueError, match="would compete with itself"):
            draw(metric)
    assert by_group(partner_retrieval(), "ab" * 15)(vectors)["recall_at_1/b"] == 1.0


# --- GLUE -------------------------------------------------------------------------------------------------------------


def test_glue_reports_what_the_benchmark_reports():
    generator = np.random.default_rng(0)
    labels, ids = generator.integers(0, 2, (2, 50))
    assert glue("cola")(evaluation(ids, labels))["matthews_correlation"] == pytest.approx(
        matthews_corrcoef(labels, ids)
    )
    for task in ("mrpc", "qqp"):
        scores = glue(task)(evaluation(ids, labels))
        assert (scores["f1"], scores["accuracy"]) == pytest.approx((f1_score(labels, ids), accuracy_score(labels, ids)))
    x, y = generator.random((2, 50))
    scores = glue("stsb")(evaluation(x, y))
    assert scores["spearman"] == pytest.approx(stats.spearmanr(x, y).statistic)
    assert scores["pearson"] == pytest.approx(stats.pearsonr(x, y).statistic)
    assert glue("mnli")(evaluation(ids + 1, labels))["accuracy"] == np.mean(ids + 1 == labels)
    with pytest.raises(ValueError, match=r"cola, sst2.*'ax' came"):
        glue("ax")


def test_all_of_them_join():
    metric = build(label_ranking(), a=retrieval(), b=segmentation(2), num_samples=4)
    assert metric.directions["a_ndcg_at_1"] is True
    assert partial(repr, metric)().startswith("Metric(")
