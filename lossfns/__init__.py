"""Losses for the stock Trainer's `compute_loss_func`, and the terms and statistics they are made of."""

from ._core.combined import Combined
from ._core.hidden import hidden_states
from .class_weights import (
    balanced_class_weights,
    balanced_pos_weight,
    class_counts,
    effective_number_weights,
    ldam_margins,
)
from .classification import (
    classification_loss,
    coral_levels,
    corn_levels,
    multi_label_loss,
    ordinal_loss,
    token_classification_loss,
)
from .combine import add_losses, class_weighted, token_weighted, weighted_sum, with_aux_loss
from .contrastive import batch_hard, clip_loss, info_nce_loss, semi_hard, triplet_loss
from .distillation import distillation_loss, forward_kl, jensen_shannon, reverse_kl, teacher_divergence, total_variation
from .language import causal_lm_loss, masked_lm_loss, multi_token_loss, seq2seq_lm_loss
from .preference import (
    bradley_terry,
    cpo,
    dpo,
    ipo,
    kto,
    orpo,
    precompute_reference_log_probs,
    preference_loss,
    reward_loss,
    sequence_log_probs,
    simpo,
)
from .question_answering import question_answering_loss
from .regression import gaussian_nll, huber, log_cosh, mae, mse, poisson_nll, quantile, regression_loss
from .segmentation import segmentation_loss
from .speech import ctc_loss
from .statistics import head_token_statistics, token_statistics
from .terms import (
    asymmetric,
    cross_entropy,
    dft,
    eaft,
    entropy_bonus,
    focal,
    policy_gradient,
    poly1,
    smoothed_cross_entropy,
    unlikelihood,
    z_loss,
)
from .training import TrainingMetrics, watch

__version__ = "0.1.0"

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
    "teacher_divergence",
    "token_classification_loss",
    "token_statistics",
    "token_weighted",
    "total_variation",
    "triplet_loss",
    "unlikelihood",
    "watch",
    "weighted_sum",
    "with_aux_loss",
    "z_loss",
]
