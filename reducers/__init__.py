"""Reducers for the stock Trainer's `preprocess_logits_for_metrics`: logits in, a few numbers a sample or token out."""

from .classification import confusion_counts, ordinal_ids, probabilities
from .combination import combine
from .dense import calibration_bins, embeddings, segmentation_counts
from .preference import pair_margins, preference_rewards, reward_scores
from .ranking import answer_logits, label_rank
from .spans import spans
from .sums import sample_sums
from .text import ctc_greedy, generated, text_lengths, token_bytes
from .tokens import argmax, token_log_probs, top_k

__all__ = [
    "answer_logits",
    "argmax",
    "calibration_bins",
    "combine",
    "confusion_counts",
    "ctc_greedy",
    "embeddings",
    "generated",
    "label_rank",
    "ordinal_ids",
    "pair_margins",
    "preference_rewards",
    "probabilities",
    "reward_scores",
    "sample_sums",
    "segmentation_counts",
    "spans",
    "text_lengths",
    "token_bytes",
    "token_log_probs",
    "top_k",
]
