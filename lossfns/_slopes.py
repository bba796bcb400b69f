"""Derivatives of terms in closed form: for one chunk autograd takes as long as two passes over its logits.

Terms that are not listed here go through autograd, by themselves and in a sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType

from torch import Tensor

from ._core.combined import Combined, class_weights, sequence_share, token_weights
from ._core.signature import Term, parameters
from .terms import (
    cross_entropy,
    entropy_bonus,
    finite_log_prob,
    focal,
    poly1,
    probability_missed,
    smoothed_cross_entropy,
    z_loss,
)

Items = Mapping[str, Tensor]
Slopes = dict[str, Tensor | float]


def closed_form(term: Term) -> Callable[[Items], Slopes] | None:
    """The derivative of a term by each statistic, or None where only autograd knows it.

    Returns:
        A function of what the term is given, `(n,)` each, to the slope of each statistic: `(n,)`, or one number for all
        items. Slopes are finite where the statistics are, and for an impossible label.
    """
    if type(term) is Combined:
        return _closed_sum(term)
    plain = _plain(term)
    if not isinstance(plain, FunctionType) or plain not in _CLOSED:
        return None
    taken = inspect.signature(term).parameters.values()
    return partial(_CLOSED[plain], **{one.name: one.default for one in taken if one.default is not one.empty})


def _plain(term: Term) -> Term | None:
    """The function behind options; None where a partial binds by position, which may be a statistic."""
    if not isinstance(term, partial):
        return term
    return None if term.args else term.func


def _closed_sum(term: Combined) -> Callable[[Items], Slopes] | None:
    parts = [(weight, closed_form(one)) for weight, one in term.weighted]
    weighted = [(weight, part) for weight, part in parts if part is not None]
    if len(weighted) < len(parts) or (term.factor is not None and _plain(term.factor) not in _FACTORS):
        return None
    asked = () if term.factor is None else parameters(term.factor)

    def slopes(given: Items) -> Slopes:
        total: Slopes = {}
        for weight, part in weighted:
            for name, slope in part(given).items():
                share = slope if weight == 1.0 else weight * slope
                total[name] = total[name] + share if name in total else share
        if term.factor is None:
            return total
        weights = term.factor(**{name: given[name] for name in asked})
        return {name: slope * weights.to(given[name].dtype) for name, slope in total.items()}

    return slopes


def _cross_entropy(given: Items) -> Slopes:
    return {"log_prob": -1.0}


def _smoothed_cross_entropy(given: Items, *, label_smoothing: float) -> Slopes:
    return {"log_prob": label_smoothing - 1, "log_normalizer": label_smoothing, "mean_logit": -label_smoothing}


def _focal(given: Items, *, gamma: float) -> Slopes:
    log_prob = given["log_prob"]
    missed = probability_missed(log_prob)
    return {"log_prob": missed ** (gamma - 1) * (gamma * finite_log_prob(log_prob) * log_prob.exp() - missed)}


def _poly1(given: Items, *, epsilon: float) -> Slopes:
    return {"log_prob": -1 - epsilon * given["log_prob"].exp()}


def _z_loss(given: Items) -> Slopes:
    return {"log_normalizer": 2 * given["log_normalizer"]}


def _entropy_bonus(given: Items) -> Slopes:
    return {"entropy": -1.0}


_FACTORS = (token_weights, class_weights, sequence_share)
_CLOSED: dict[Term, Callable[..., Slopes]] = {
    cross_entropy: _cross_entropy,
    smoothed_cross_entropy: _smoothed_cross_entropy,
    focal: _focal,
    poly1: _poly1,
    z_loss: _z_loss,
    entropy_bonus: _entropy_bonus,
}
