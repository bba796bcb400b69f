"""Metrics for `Trainer(compute_metrics=...)`: statistics per sample -> sums -> a flat dict of Python floats."""

from ._core.metric import Metric, build
from ._glue import glue
from .adapters import from_evaluate, from_sklearn, from_torchmetrics, to_evaluate
from .best_model import best_model_kwargs
from .classification import classification, multi_label
from .language import calibration, label_ranking, language_modeling
from .preference import preferences
from .question_answering import extractive_qa
from .ranking import partner_retrieval, retrieval
from .regression import regression
from .resampling import bootstrap, by_group, compare, dispatch, labels_from
from .segmentation import segmentation
from .text import decode, summarization, text_match, transcription, translation
from .thresholds import tuned_thresholds
from .token_classification import entity_f1

__all__ = [
    "Metric",
    "best_model_kwargs",
    "bootstrap",
    "build",
    "by_group",
    "calibration",
    "classification",
    "compare",
    "decode",
    "dispatch",
    "entity_f1",
    "extractive_qa",
    "from_evaluate",
    "from_sklearn",
    "from_torchmetrics",
    "glue",
    "label_ranking",
    "labels_from",
    "language_modeling",
    "multi_label",
    "partner_retrieval",
    "preferences",
    "regression",
    "retrieval",
    "segmentation",
    "summarization",
    "text_match",
    "to_evaluate",
    "transcription",
    "translation",
    "tuned_thresholds",
]
