"""Reducers for the stock Trainer's `preprocess_logits_for_metrics`: a few numbers per sample or token."""

from .calibration import calibration_bins
from .classification import confusion_counts, ordinal_ids, probabilities
from .combine import combine
from .preference import pair_margins, preference_rewards, reward_scores
from .question_answering import spans
from .ranking import answer_logits, embeddings, label_rank
from .segmentation import segmentation_counts
from .speech import ctc_greedy
from .sums import sample_sums
from .text import generated_ids, text_lengths, token_bytes
from .tokens import argmax, token_log_probs, top_k

__all__ = [
    "answer_logits",
    "argmax",
    "calibration_bins",
    "combine",
    "confusion_counts",
    "ctc_greedy",
    "embeddings",
    "generated_ids",
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
