"""Metrics for `Trainer(compute_metrics=...)`: statistics per sample -> sums -> a flat dict of Python floats."""

from ._core.build import build, by_dataset, with_labels_from
from ._core.metric import Metric
from .adapters import from_evaluate, from_sklearn, from_torchmetrics, to_evaluate
from .best_model import best_model_kwargs
from .calibration import calibration
from .classification import classification, glue, multi_label, tuned_thresholds
from .language import language_modeling
from .preference import preferences
from .question_answering import extractive_qa
from .ranking import label_ranking, paired_retrieval, retrieval
from .regression import regression
from .resampling import bootstrap, by_group, compare
from .segmentation import segmentation
from .text import decode, summarization, text_match, transcription, translation
from .token_classification import entity_f1

__all__ = [
    "Metric",
    "best_model_kwargs",
    "bootstrap",
    "build",
    "by_dataset",
    "by_group",
    "calibration",
    "classification",
    "compare",
    "decode",
    "entity_f1",
    "extractive_qa",
    "from_evaluate",
    "from_sklearn",
    "from_torchmetrics",
    "glue",
    "label_ranking",
    "language_modeling",
    "multi_label",
    "paired_retrieval",
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
    "with_labels_from",
]
