"""Checks for anybody's loss or term, and for a Trainer before it runs."""

from .losses import check_loss, loss_rules
from .terms import check_term, term_rules
from .trainer import check_trainer

__all__ = ["check_loss", "check_term", "check_trainer", "loss_rules", "term_rules"]
