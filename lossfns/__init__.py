"""Losses for the stock Trainer's `compute_loss_func`, and the terms and statistics they are made of."""

from .hidden import head_token_statistics, hidden_states
from .language import causal_lm_loss, masked_lm_loss, seq2seq_lm_loss
from .statistics import token_statistics
from .terms import (
    Combined,
    class_weighted,
    cross_entropy,
    focal,
    poly1,
    smoothed_cross_entropy,
    token_weighted,
    weighted_sum,
    z_loss,
)

__all__ = [
    "Combined",
    "causal_lm_loss",
    "class_weighted",
    "cross_entropy",
    "focal",
    "head_token_statistics",
    "hidden_states",
    "masked_lm_loss",
    "poly1",
    "seq2seq_lm_loss",
    "smoothed_cross_entropy",
    "token_statistics",
    "token_weighted",
    "weighted_sum",
    "z_loss",
]
