"""Derivatives of terms in closed form: a graph of autograd's costs a chunk as much time as two passes over its logits.

Terms that are not listed here go through autograd, by themselves and in a sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType

from torch import Tensor

from .terms import (
    STATISTICS,
    Combined,
    Term,
    cross_entropy,
    entropy_bonus,
    focal,
    parameters,
    poly1,
    possible,
    probability_missed,
    smoothed_cross_entropy,
    z_loss,
)

Given = Mapping[str, Tensor]
Slopes = dict[str, Tensor | float]


def closed_form(term: Term) -> Callable[[Given], Slopes] | None:
    """The derivative of a term by each statistic, or None where only autograd knows it.

    Returns:
        A function of what the term is given, `(n,)` each, to the slope of each statistic: `(n,)`, or one number for all
        items. Slopes are finite where the statistics are, and for an impossible label.
    """
    if isinstance(term, Combined):
        return _closed_sum(term)
    plain = term.func if isinstance(term, partial) else term
    if not isinstance(plain, FunctionType) or plain not in _CLOSED:
        return None
    taken = inspect.signature(term).parameters.values()
    return partial(_CLOSED[plain], **{one.name: one.default for one in taken if one.default is not one.empty})


def _closed_sum(term: Combined) -> Callable[[Given], Slopes] | None:
    parts = [part for part in map(closed_form, term.terms) if part is not None]
    names = () if term.factor is None else parameters(term.factor)
    if len(parts) < len(term.terms) or not set(STATISTICS).isdisjoint(names):
        return None
    weighted = list(zip(term.weights, parts, strict=True))

    def slopes(given: Given) -> Slopes:
        total: Slopes = {}
        for weight, part in weighted:
            for name, slope in part(given).items():
                total[name] = weight * slope + total[name] if name in total else weight * slope
        if term.factor is None:
            return total
        weights = term.factor(**{name: given[name] for name in names})
        return {name: slope * weights for name, slope in total.items()}

    return slopes


def _cross_entropy(given: Given) -> Slopes:
    return {"log_prob": -1.0}


def _smoothed_cross_entropy(given: Given, *, label_smoothing: float) -> Slopes:
    return {"log_prob": label_smoothing - 1, "log_normalizer": label_smoothing, "mean_logit": -label_smoothing}


def _focal(given: Given, *, gamma: float) -> Slopes:
    log_prob = given["log_prob"]
    missed = probability_missed(log_prob)
    return {"log_prob": missed ** (gamma - 1) * (gamma * possible(log_prob) * log_prob.exp() - missed)}


def _poly1(given: Given, *, epsilon: float) -> Slopes:
    return {"log_prob": -1 - epsilon * given["log_prob"].exp()}


def _z_loss(given: Given) -> Slopes:
    return {"log_normalizer": 2 * given["log_normalizer"]}


def _entropy_bonus(given: Given) -> Slopes:
    return {"entropy": -1.0}


_CLOSED: dict[Term, Callable[..., Slopes]] = {
    cross_entropy: _cross_entropy,
    smoothed_cross_entropy: _smoothed_cross_entropy,
    focal: _focal,
    poly1: _poly1,
    z_loss: _z_loss,
    entropy_bonus: _entropy_bonus,
}
