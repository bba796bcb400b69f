"""Checks for anybody's loss or term."""

from .losses import check_loss, loss_rules
from .terms import check_term, term_rules

__all__ = ["check_loss", "check_term", "loss_rules", "term_rules"]
