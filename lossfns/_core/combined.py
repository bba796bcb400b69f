"""Terms made of terms: weighted sums, and factors per label."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from .normalization import accumulator_dtype
from .signature import Derivative, Grads, Term, derivative_of, name_of, parameters


@dataclass(frozen=True, eq=False, repr=False)
class Combined:
    """The weighted sum of `terms`, times a factor per label, as `weighted_sum` and `class_weighted` build it.

    Attributes:
        terms: the parts.
        weights: one number per part.
        factor: a function of labels or extras whose value multiplies the sum, or None.
        classes: number of classes that the logits must have, or None for any number.
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
        return apply_weights(weights, values)

    @cached_property
    def derivative(self) -> Derivative | None:
        """The closed derivative of the sum if all its parts have one, otherwise None; see `signature.derivative`."""
        parts = [(weight, derivative_of(term), names) for weight, term, names in self._bound]
        closed = [(weight, part, names) for weight, part, names in parts if part is not None]
        if len(closed) < len(parts) or type(self) is not Combined or not _is_constant(self.factor):
            return None

        def grads(**given: Tensor) -> Grads:
            total: Grads = {}
            for weight, part, names in closed:
                for name, grad in part(**{each: given[each] for each in names}).items():
                    weighted = grad if weight == 1.0 else weight * grad
                    total[name] = total[name] + weighted if name in total else weighted
            if self.factor is None:
                return total
            weights = self.factor(**{name: given[name] for name in self._factor_names})
            return {name: grad * weights.to(given[name].dtype) for name, grad in total.items()}

        grads.term = self  # type: ignore[attr-defined]
        return grads

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is computed from the fields: a closure cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name in self.__dataclass_fields__}

    @cached_property
    def _bound(self) -> list[tuple[float, Term, tuple[str, ...]]]:
        """Weight, term and parameters of the parts that count: a part of weight 0 may be infinite. All if none counts.

        A part with parameters to learn counts even with weight 0: DDP waits for the gradients of all parameters.
        """
        pairs = list(zip(self.weights, self.terms, strict=True))
        counted = [pair for pair in pairs if pair[0] != 0 or _has_parameters(pair[1])] or pairs
        return [(weight, term, parameters(term)) for weight, term in counted]

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


def apply_weights(weights: Tensor, values: Tensor) -> Tensor:
    """Return `weights * values`, `(n,)` each, where a value of weight 0 may be infinite or NaN."""
    return weights * values.masked_fill(weights == 0, 0)


def scaled(weight: float | Tensor, values: Tensor) -> Tensor:
    """Return `weight * values`; values of weight 0 may be infinite, unless the weight is a tensor to be learned."""
    kept = isinstance(weight, Tensor) or weight != 0
    return weight * (values if kept else values.masked_fill(~values.isfinite(), 0))


def _has_parameters(term: Term) -> bool:
    if isinstance(term, Combined):
        return any(map(_has_parameters, term.terms))
    if isinstance(term, partial):
        return _has_parameters(term.func) or any(isinstance(value, Tensor) for value in term.keywords.values())
    return isinstance(term, nn.Module)


def sequence_averaged(term: Term) -> Combined:
    """Return the term times the extra `sequence_weights`, one over the number of labels in the label's sequence."""
    return Combined((term,), (1.0,), sequence_weights, common_classes([term]))


# Factors are named after the tensors that they read, so that messages show a name that the user knows.
def token_weights(token_weights: Tensor) -> Tensor:
    """Return the weight of each token."""
    return token_weights


def sequence_weights(sequence_weights: Tensor) -> Tensor:
    """Return one over the number of labels in each label's sequence."""
    return sequence_weights


def class_weights(labels: Tensor, *, table: Tensor) -> Tensor:
    """Return the weight of each label's class."""
    return table.to(labels.device, accumulator_dtype(labels.device), non_blocking=True)[labels]


def _is_constant(factor: Term | None) -> bool:
    """Return whether the factor is known to depend on labels and extras alone."""
    function = factor.func if isinstance(factor, partial) and not factor.args else factor
    return function in (None, token_weights, sequence_weights, class_weights)


def summands(term: Term) -> tuple[Combined, ...]:
    """Return the parts of a sum without their weights, each with the factors of the sum; () for any other term."""
    if not isinstance(term, Combined):
        return ()
    inner = term.terms if len(term.terms) > 1 else summands(term.terms[0])
    return tuple(replace(term, terms=(part,), weights=(1.0,)) for part in inner)


def function_name(term: Term) -> str:
    """Return the name of the function behind a term, without its options and factors."""
    if isinstance(term, Combined) and len(term.terms) == 1:
        return function_name(term.terms[0])
    return function_name(term.func) if isinstance(term, partial) else name_of(term)


def factors(term: Term) -> tuple[Term, ...]:
    """Return the factors that weight a whole term: both of `class_weighted(token_weighted(term), ...)`."""
    if not isinstance(term, Combined):
        return ()
    inner = factors(term.terms[0]) if len(term.terms) == 1 else ()
    return inner if term.factor is None else (term.factor, *inner)


def common_classes(terms: Iterable[Term], *more: int) -> int | None:
    """Return the number of classes that all class-weighted parts agree on, or None without such parts."""
    numbers = {*more, *(getattr(term, "classes", None) for term in terms)} - {None}
    if len(numbers) > 1:
        raise ValueError(f"class-weighted parts must have the same number of classes, got {sorted(map(str, numbers))}")
    return numbers.pop() if numbers else None
