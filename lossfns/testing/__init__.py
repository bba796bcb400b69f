"""Checks for your own losses and terms, and for a Trainer before it runs."""

from .losses import check_loss, loss_rules
from .tasks import Task
from .terms import check_term, term_rules
from .trainer import check_trainer

__all__ = ["Task", "check_loss", "check_term", "check_trainer", "loss_rules", "term_rules"]
