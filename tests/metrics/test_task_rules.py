"""Every metric of tasks keeps all the rules of metrics: order, padding, batches, steps, copies, nothing to score."""

from functools import partial

import numpy as np
import pytest
from sklearn.metrics import f1_score

from metrics import (
    bootstrap,
    build,
    calibration,
    classification,
    entity_f1,
    from_sklearn,
    label_ranking,
    partner_retrieval,
    retrieval,
    segmentation,
    summarization,
    text_match,
    transcription,
    translation,
)
from metrics.testing import check_metric

from .test_text import TOKENIZER

GENERATOR = np.random.default_rng(0)
SHAPE = 8, 7
LABELS = GENERATOR.integers(0, 5, SHAPE)
IDS = np.where(GENERATOR.random(SHAPE) < 0.6, LABELS, GENERATOR.integers(0, 5, SHAPE))
LABELS[GENERATOR.random(SHAPE) < 0.2] = -100
TAGS = dict(enumerate(["O", "B-X", "I-X", "B-Y", "I-Y"]))
MACRO = partial(f1_score, average="macro")
BINS = {name: GENERATOR.integers(0, 5, (8, 4)) / 1 for name in ("bin_labels", "bin_confidence", "bin_correct")}
VECTORS = {name: GENERATOR.normal(size=(8, 3)) for name in ("queries", "documents")}

CASES = {
    "entity_f1": (entity_f1(TAGS, scheme="IOB2"), IDS),
    "entity_f1, lenient": (entity_f1(TAGS, scheme="IOB2", lenient=True), IDS),
    "label_ranking": (label_ranking(), {"ranks": np.where(LABELS < 0, -100, IDS)}),
    "calibration": (calibration(), BINS),
    "segmentation": (segmentation(5), {"ids": IDS}),
    "retrieval": (retrieval(), {"scores": GENERATOR.random(SHAPE)}),
    "text_match": (text_match(TOKENIZER), {"generated": IDS}),
    "translation": (translation(TOKENIZER), {"generated": IDS}),
    "summarization": (summarization(TOKENIZER), {"generated": IDS}),
    "transcription": (transcription(TOKENIZER), {"generated": IDS}),
    "teacher-forced": (transcription(TOKENIZER), IDS),
    "from_sklearn": (from_sklearn(MACRO, kind="ids", greater_is_better=True), IDS),
    "bootstrap": (bootstrap(classification(5), n=20), IDS),
    "partner_retrieval": (partner_retrieval(), VECTORS),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rules_are_kept(name):
    metric, predictions = CASES[name]
    report = check_metric(build(metric, num_samples=len(LABELS)), predictions=predictions, labels=LABELS)
    assert "keeps" in str(report)
    assert "0x" not in repr(metric)


def test_a_mean_over_batches_is_caught():
    def mean_of_means(eval_pred):
        predictions, labels = eval_pred
        parts = zip(predictions, labels, strict=True) if isinstance(labels, list) else [(predictions, labels)]
        return {"hits": float(np.mean([np.mean((ids == own)[own != -100]) for ids, own in parts]))}

    with pytest.raises(AssertionError, match="breaks the rule"):
        check_metric(mean_of_means, predictions=IDS, labels=LABELS, directions={"hits": True})
