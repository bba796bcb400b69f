"""Reducers for the stock Trainer's `preprocess_logits_for_metrics`: logits in, a few numbers a sample or token out."""

from .classification import confusion_counts, ordinal_ids, probabilities
from .combination import combine
from .sums import sample_sums
from .tokens import argmax, token_log_probs, top_k

__all__ = [
    "argmax",
    "combine",
    "confusion_counts",
    "ordinal_ids",
    "probabilities",
    "sample_sums",
    "token_log_probs",
    "top_k",
]
