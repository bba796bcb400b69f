"""Losses for the stock Trainer's `compute_loss_func`, and the terms and statistics they are made of."""

from .classification import classification_loss, multi_label_loss, token_classification_loss
from .contrastive import batch_hard, clip_loss, info_nce_loss, semi_hard, triplet_loss
from .dense import segmentation_loss
from .hidden import head_token_statistics, hidden_states
from .language import causal_lm_loss, masked_lm_loss, seq2seq_lm_loss
from .ordinal import coral_levels, corn_levels, ordinal_loss
from .regression import gaussian_nll, huber, log_cosh, mae, mse, poisson_nll, quantile, regression_loss
from .spans import question_answering_loss
from .speech import ctc_loss
from .statistics import token_statistics
from .terms import (
    Combined,
    asymmetric,
    class_weighted,
    cross_entropy,
    dft,
    eaft,
    entropy_bonus,
    focal,
    policy_gradient,
    poly1,
    smoothed_cross_entropy,
    token_weighted,
    unlikelihood,
    weighted_sum,
    z_loss,
)
from .weights import balanced_class_weights, balanced_pos_weight, class_counts, effective_number_weights, ldam_margins

__all__ = [
    "Combined",
    "asymmetric",
    "balanced_class_weights",
    "balanced_pos_weight",
    "batch_hard",
    "causal_lm_loss",
    "class_counts",
    "class_weighted",
    "classification_loss",
    "clip_loss",
    "coral_levels",
    "corn_levels",
    "cross_entropy",
    "ctc_loss",
    "dft",
    "eaft",
    "effective_number_weights",
    "entropy_bonus",
    "focal",
    "gaussian_nll",
    "head_token_statistics",
    "hidden_states",
    "huber",
    "info_nce_loss",
    "ldam_margins",
    "log_cosh",
    "mae",
    "masked_lm_loss",
    "mse",
    "multi_label_loss",
    "ordinal_loss",
    "poisson_nll",
    "policy_gradient",
    "poly1",
    "quantile",
    "question_answering_loss",
    "regression_loss",
    "segmentation_loss",
    "semi_hard",
    "seq2seq_lm_loss",
    "smoothed_cross_entropy",
    "token_classification_loss",
    "token_statistics",
    "token_weighted",
    "triplet_loss",
    "unlikelihood",
    "weighted_sum",
    "z_loss",
]
