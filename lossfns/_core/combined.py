"""Terms made of terms: weighted sums and factors per item."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from .normalization import accumulator_dtype
from .signature import Term, name_of, parameters


@dataclass(frozen=True, eq=False, repr=False)
class Combined:
    """A term made of terms: the weighted sum of `terms`, times a factor of each item. Built by the functions below.

    Attributes:
        terms: the parts.
        weights: one number a part.
        factor: a term whose value multiplies the sum, or None.
        classes: number of classes the logits must have, or None where any number will do.
    """

    terms: tuple[Term, ...]
    weights: tuple[float, ...]
    factor: Term | None = None
    classes: int | None = None

    def __call__(self, **given: Tensor) -> Tensor:
        (first, values), *others = [
            (weight, term(**{name: given[name] for name in names})) for weight, term, names in self._bound
        ]
        values = values if first == 1.0 else first * values
        for weight, part in others:
            values = torch.add(values, part, alpha=weight)  # one node of the graph, not two
        if self.factor is None:
            return values
        weights = self.factor(**{name: given[name] for name in self._factor_names}).to(values.dtype)
        return of_weight(weights, values)

    @property
    def weighted(self) -> list[tuple[float, Term]]:
        """Weights and terms of the parts that count: what has no weight may be infinite. All of them if none counts.

        A part that learns counts: DDP waits for the gradients of all parameters, be they 0.
        """
        pairs = list(zip(self.weights, self.terms, strict=True))
        return [pair for pair in pairs if pair[0] != 0 or _has_parameters(pair[1])] or pairs

    @cached_property
    def _bound(self) -> list[tuple[float, Term, tuple[str, ...]]]:
        return [(weight, term, parameters(term)) for weight, term in self.weighted]

    @cached_property
    def _factor_names(self) -> tuple[str, ...]:
        return () if self.factor is None else parameters(self.factor)

    @property
    def __signature__(self) -> inspect.Signature:
        parts = self.terms if self.factor is None else (*self.terms, self.factor)
        names = dict.fromkeys(name for part in parts for name in parameters(part))
        return inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])

    def __repr__(self) -> str:
        pairs = zip(self.weights, self.terms, strict=True)
        inner = " + ".join(f"{weight:g} * {name_of(term)}" for weight, term in pairs)
        return f"({inner})" if self.factor is None else f"{name_of(self.factor)} * ({inner})"


def of_weight(weights: Tensor, values: Tensor) -> Tensor:
    """`weights * values` of items, `(n,)` each: what has no weight may be infinite."""
    return weights * values.masked_fill(weights == 0, 0)


def scaled(weight: float | Tensor, values: Tensor) -> Tensor:
    """`weight * values`, where values of weight 0 may be infinite; a tensor is a weight to be learnt, be it 0."""
    kept = isinstance(weight, Tensor) or weight != 0
    return weight * (values if kept else values.masked_fill(~values.isfinite(), 0))


def _has_parameters(term: Term) -> bool:
    if isinstance(term, Combined):
        return any(map(_has_parameters, term.terms))
    if isinstance(term, partial):
        return _has_parameters(term.func) or any(isinstance(value, Tensor) for value in term.keywords.values())
    return isinstance(term, nn.Module)


def sequence_averaged(term: Term) -> Combined:
    """The term times the extra `sequence_share`, one over the number of items in the item's sequence."""
    return Combined((term,), (1.0,), sequence_share, _classes([term]))


# Factors have the names that a reader of a message knows.
def token_weights(token_weights: Tensor) -> Tensor:
    """The weight of each item."""
    return token_weights


def sequence_share(sequence_share: Tensor) -> Tensor:
    """One over the number of items in each item's sequence."""
    return sequence_share


def class_weights(labels: Tensor, *, table: Tensor) -> Tensor:
    """The weight of each item's class."""
    return table.to(labels.device, accumulator_dtype(labels.device), non_blocking=True)[labels]


def summands(term: Term) -> tuple[Combined, ...]:
    """The terms that a sum is made of, without their weights, each under the factors of the sum; none of another."""
    if not isinstance(term, Combined):
        return ()
    inner = term.terms if len(term.terms) > 1 else summands(term.terms[0])
    return tuple(replace(term, terms=(part,), weights=(1.0,)) for part in inner)


def plain_name(term: Term) -> str:
    """The name of the function behind a term, without its options and factors."""
    if isinstance(term, Combined) and len(term.terms) == 1:
        return plain_name(term.terms[0])
    return plain_name(term.func) if isinstance(term, partial) else name_of(term)


def factors(term: Term) -> tuple[Term, ...]:
    """The factors that weight a whole term: of `class_weighted(token_weighted(term), ...)` both."""
    if not isinstance(term, Combined):
        return ()
    inner = factors(term.terms[0]) if len(term.terms) == 1 else ()
    return inner if term.factor is None else (term.factor, *inner)


def _classes(terms: Iterable[Term], *more: int) -> int | None:
    """The one number of classes that weighted parts agree on."""
    numbers = {*more, *(getattr(term, "classes", None) for term in terms)} - {None}
    if len(numbers) > 1:
        raise ValueError(
            f"the parts are weighted for different numbers of classes: {sorted(str(number) for number in numbers)}"
        )
    return numbers.pop() if numbers else None
