"""Metrics for `Trainer(compute_metrics=...)`: statistics per sample -> sums -> a flat dict of Python floats."""

from ._classification import classification, multi_label
from ._metric import Metric, build
from ._regression import regression
from .directions import best_model_kwargs
from .entities import entity_f1
from .generic import bootstrap, by_group, compare, dispatch
from .language import language_modeling
from .preference import preferences
from .thresholds import tuned_thresholds

__all__ = [
    "Metric",
    "best_model_kwargs",
    "bootstrap",
    "build",
    "by_group",
    "classification",
    "compare",
    "dispatch",
    "entity_f1",
    "language_modeling",
    "multi_label",
    "preferences",
    "regression",
    "tuned_thresholds",
]
