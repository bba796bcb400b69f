"""Reducers for the stock Trainer's `preprocess_logits_for_metrics`: logits in, a few numbers a sample or token out."""

from .combination import combine
from .sums import sample_sums
from .tokens import argmax, token_log_probs, top_k

__all__ = ["argmax", "combine", "sample_sums", "token_log_probs", "top_k"]
