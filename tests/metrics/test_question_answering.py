"""Ranks, bits a byte, question answering, pixels, retrieval and GLUE against loops, scikit-learn and transformers."""

import math
import pickle

import numpy as np
import pytest
import torch
from torchmetrics.functional.text import squad

from lossfns.collators import pack_spans
from metrics import bootstrap, extractive_qa, question_answering
from reducers import spans

from .evaluations import evaluation

N = -100


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
    starts, ends, scores = np.moveaxis(np.array(found), -1, 0)
    columns = {"starts": starts.astype(np.int32), "ends": ends.astype(np.int32), "scores": scores}
    return columns | {"null_scores": np.array(nulls)}


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
    found = [{"id": row["id"], "prediction_text": texts[row["id"]]} for row in rows]
    golds = [{"text": row["answers"]["text"] or [""], "answer_start": [0]} for row in rows]
    scores = squad(found, [{"id": row["id"], "answers": gold} for row, gold in zip(rows, golds, strict=True)])
    return float(scores["exact_match"]) / 100, float(scores["f1"]) / 100


@pytest.mark.parametrize("threshold", [-9.0, 0.0, 9.0])
def test_answers_score_as_in_squad(threshold):
    scores = extractive_qa(EXAMPLES, FEATURES, null_threshold=threshold)(evaluation(spans_of(), np.zeros(4)))
    exact, f1 = expected_answers(answers_by_hand(threshold), EXAMPLES)
    assert (scores["exact_match"], scores["token_f1"]) == pytest.approx((exact, f1), rel=1e-6)
    assert scores["unanswerable_exact_match"] == float(threshold < 8)


def test_no_answer_is_never_predicted_if_all_questions_have_answers():
    scores = extractive_qa(EXAMPLES[:2], FEATURES[:3])(evaluation(spans_of(FOUND[:3], NULLS[:3]), np.zeros(3)))
    exact, f1 = expected_answers(answers_by_hand(nulls=False), EXAMPLES[:2])
    assert (scores["exact_match"], scores["token_f1"]) == pytest.approx((exact, f1), rel=1e-6)
    assert np.isnan(scores["unanswerable_exact_match"])
    assert scores["answerable_token_f1"] == scores["token_f1"]


def test_order_of_windows_is_checked_by_positions():
    placed = [window | {"start_positions": at, "end_positions": at + 1} for at, window in enumerate(FEATURES)]
    metric = extractive_qa(EXAMPLES, placed)
    labels = np.arange(4), np.arange(1, 5)
    expected = extractive_qa(EXAMPLES, FEATURES)(evaluation(spans_of(), np.zeros(4)))
    assert metric(evaluation(spans_of(), labels)) == expected == metric(evaluation(spans_of(), np.stack(labels, 1)))
    with pytest.raises(ValueError, match="sampler reorders"):
        metric(evaluation(spans_of(FOUND[::-1], NULLS[::-1]), tuple(label[::-1] for label in labels)))
    with pytest.raises(ValueError, match="num_samples=4 rows, got 3"):
        metric(evaluation(spans_of(FOUND[:3], NULLS[:3]), tuple(label[:3] for label in labels)))
    with pytest.raises(ValueError, match="matched with questions by their place"):
        metric(evaluation(spans_of(), labels), compute_result=False)
    with pytest.raises(ValueError, match="in their order"):
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


def test_labels_must_be_a_pair_of_positions():
    placed = [feature | {"start_positions": 4, "end_positions": 5} for feature in FEATURES]
    for labels in (np.zeros(4), np.zeros((4, 3)), (np.zeros(4), np.zeros((4, 2)))):
        with pytest.raises(ValueError, match=r"one array \(B, 2\), as lossfns\.collators\.pack_spans makes it"):
            extractive_qa(EXAMPLES, placed)(evaluation(spans_of(), labels))
    with pytest.raises(TypeError, match="start_positions and end_positions must be one token each, in all features"):
        extractive_qa(EXAMPLES, [*placed[:3], FEATURES[3]])


def test_invalid_examples_features_and_predictions_are_refused():
    with pytest.raises(ValueError, match="unknown ids \\['z'\\]"):
        extractive_qa(EXAMPLES, [window("z", 0, 3)])
    with pytest.raises(ValueError, match="got 4 examples with 3 ids"):
        extractive_qa([*EXAMPLES[:3], EXAMPLES[0]], FEATURES[:3])
    with pytest.raises(ValueError, match="the model has diverged"):
        extractive_qa(EXAMPLES, FEATURES)(evaluation(spans_of(nulls=[0.0, np.nan, 0.0, 0.0]), np.zeros(4)))


def test_spans_returns_what_extractive_qa_reads_and_nothing_else():
    assert set(spans((torch.zeros(3, 6), torch.zeros(3, 6)), None)) == set(question_answering.COLUMNS)
