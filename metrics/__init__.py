"""Metrics for `Trainer(compute_metrics=...)`: statistics per sample -> sums -> a flat dict of Python floats."""

from ._metric import Metric, build
from .directions import best_model_kwargs
from .language import language_modeling

__all__ = ["Metric", "best_model_kwargs", "build", "language_modeling"]
