"""Losses for the stock Trainer's `compute_loss_func`, and the terms and statistics they are made of."""

from .auxiliary import add_losses, with_auxiliary
from .classification import classification_loss, multi_label_loss, token_classification_loss
from .contrastive import batch_hard, clip_loss, info_nce_loss, semi_hard, triplet_loss
from .dense import segmentation_loss
from .distillation import distillation_loss, distilled, forward_kl, jensen_shannon, reverse_kl, total_variation
from .hidden import head_token_statistics, hidden_states
from .language import causal_lm_loss, masked_lm_loss, seq2seq_lm_loss
from .multi_token import multi_token_loss
from .ordinal import coral_levels, corn_levels, ordinal_loss
from .preference import (
    bradley_terry,
    cpo,
    dpo,
    ipo,
    kto,
    orpo,
    paired_kto,
    preference_loss,
    reward_loss,
    sequence_log_probs,
    simpo,
)
from .reference import precompute_reference_log_probs
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
from .training import TrainingMetrics, watch
from .weights import balanced_class_weights, balanced_pos_weight, class_counts, effective_number_weights, ldam_margins

__all__ = [
    "Combined",
    "TrainingMetrics",
    "add_losses",
    "asymmetric",
    "balanced_class_weights",
    "balanced_pos_weight",
    "batch_hard",
    "bradley_terry",
    "causal_lm_loss",
    "class_counts",
    "class_weighted",
    "classification_loss",
    "clip_loss",
    "coral_levels",
    "corn_levels",
    "cpo",
    "cross_entropy",
    "ctc_loss",
    "dft",
    "distillation_loss",
    "distilled",
    "dpo",
    "eaft",
    "effective_number_weights",
    "entropy_bonus",
    "focal",
    "forward_kl",
    "gaussian_nll",
    "head_token_statistics",
    "hidden_states",
    "huber",
    "info_nce_loss",
    "ipo",
    "jensen_shannon",
    "kto",
    "ldam_margins",
    "log_cosh",
    "mae",
    "masked_lm_loss",
    "mse",
    "multi_label_loss",
    "multi_token_loss",
    "ordinal_loss",
    "orpo",
    "paired_kto",
    "poisson_nll",
    "policy_gradient",
    "poly1",
    "precompute_reference_log_probs",
    "preference_loss",
    "quantile",
    "question_answering_loss",
    "regression_loss",
    "reverse_kl",
    "reward_loss",
    "segmentation_loss",
    "semi_hard",
    "seq2seq_lm_loss",
    "sequence_log_probs",
    "simpo",
    "smoothed_cross_entropy",
    "token_classification_loss",
    "token_statistics",
    "token_weighted",
    "total_variation",
    "triplet_loss",
    "unlikelihood",
    "watch",
    "weighted_sum",
    "with_auxiliary",
    "z_loss",
]
