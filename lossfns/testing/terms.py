"""Rules for any term: a function of the few numbers that are measured for each item."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from .._core.signature import STATISTICS, Term, parameters
from ..regression import REGRESSION_INPUTS
from .rules import Check, Finding, Report, Rule, judge, select
from .tasks import Extra

Given = dict[str, Tensor]

_MEASURED = (*STATISTICS, "labels", *REGRESSION_INPUTS, "outcome")
_ITEMS = 12


@dataclass(frozen=True)
class TermSubject:
    """A term under test, and what it is given."""

    term: Term
    classes: int
    extras: Mapping[str, Extra] | None
    tolerance: float = 1e-9

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tensors that the term asks for."""
        return parameters(self.term, self.extras or {}, _MEASURED)

    def given(self, dtype: torch.dtype = torch.float64) -> Given:
        """What is measured for twelve items, and their extras."""
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(_ITEMS, self.classes, generator=generator, dtype=torch.float64) * 2
        labels = torch.randint(self.classes, (_ITEMS,), generator=generator)
        log_probs = logits.log_softmax(-1)
        prediction, target, log_variance = torch.randn(3, _ITEMS, generator=generator, dtype=torch.float64)
        known = {
            "labels": labels,
            "log_prob": log_probs.gather(1, labels[:, None])[:, 0],
            "log_normalizer": logits.logsumexp(-1),
            "mean_logit": logits.mean(-1),
            "entropy": -(log_probs.exp() * log_probs).sum(-1),
            "prediction": prediction,
            "target": target,
            "log_variance": log_variance,
            "outcome": labels % 2 == 0,
        } | {name: extra(labels) for name, extra in (self.extras or {}).items()}
        return {name: _cast(known[name], dtype) for name in self.names}

    def slopes(self, given: Given) -> tuple[Tensor, Given]:
        """The values, and the derivative of their sum by each floating tensor that is measured."""
        leaves = {name: tensor.clone() for name, tensor in given.items()}
        wanted = [name for name in leaves if name in _MEASURED and leaves[name].is_floating_point()]
        for name in wanted:
            leaves[name].requires_grad_()
        values = self.term(**leaves)
        found = torch.autograd.grad(
            values.sum(), [leaves[name] for name in wanted], allow_unused=True, materialize_grads=True
        )
        return values.detach(), dict(zip(wanted, found, strict=True))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def signature(term: TermSubject) -> Iterator[Finding]:
    """It names each tensor that it takes, as a parameter without a default; options have one.

    Fix: `def my_term(log_prob, *, strength=1.0)`: no `*args` and `**kwargs`; measured are log_prob, log_normalizer,
    mean_logit and entropy, labels is the class id, and others come from a dict of labels.
    """
    yield "the number of tensors is more than 0", len(term.names) > 0, True


def returns(term: TermSubject) -> Iterator[Finding]:
    """It returns one floating number for each item.

    Fix: no sum, no mean; the loss adds up and divides. Unlike `(n, 1)`, `(n,)` does not broadcast to `(n, n)`.
    """
    values = term.term(**term.given())
    yield "type", "Tensor" if isinstance(values, Tensor) else type(values).__name__, "Tensor"
    yield "shape", tuple(values.shape), (_ITEMS,)
    yield "floating", values.is_floating_point(), True
    yield "finite", bool(values.isfinite().all()), True


def inputs(term: TermSubject) -> Iterator[Finding]:
    """What it is given is left as it was.

    Fix: use operations without a trailing underscore: the kernel reads the same tensors again.
    """
    given, before = term.given(), term.given()
    term.term(**given)
    for name, tensor in given.items():
        yield name, tensor, before[name]


def elementwise(term: TermSubject) -> Iterator[Finding]:
    """The value of an item depends on that item alone.

    Fix: no softmax, ranking, mean or normalisation over the items: they come in chunks of any length, empty ones too.
    """
    given = term.given()
    whole = term.term(**given)
    for size in (1, 5, _ITEMS):
        chunks = [
            {name: tensor[start : start + size] for name, tensor in given.items()} for start in range(0, _ITEMS, size)
        ]
        yield f"in chunks of {size}", torch.cat([term.term(**chunk) for chunk in chunks]), whole
    order = torch.arange(_ITEMS).roll(5)
    yield "in another order", term.term(**{name: tensor[order] for name, tensor in given.items()}), whole[order]
    yield "of nothing", tuple(term.term(**{name: tensor[:0] for name, tensor in given.items()}).shape), (0,)


def dtypes(term: TermSubject) -> Iterator[Finding]:
    """float32 in, float32 out, and precise.

    Fix: `expm1` and `log1p` near p = 1; bring tables and weights to the dtype of what is measured.
    """
    values, slopes = term.slopes(term.given(torch.float32))
    exact, expected = term.slopes(
        {name: _cast(tensor, torch.float64) for name, tensor in term.given(torch.float32).items()}
    )
    yield "dtype", str(values.dtype), "torch.float32"
    yield "values", values, exact, 1e-5
    for name, slope in slopes.items():
        yield f"slope by {name}", slope, expected[name], 1e-4


def extremes(term: TermSubject) -> Iterator[Finding]:
    """Values and slopes are finite for certain and for impossible labels, and for very large logits.

    Fix: `torch.expm1(log_prob)` for p - 1; `clamp(min=tiny)` under a power below 1 or a logarithm, before it is taken.
    """
    given = term.given(torch.float32)
    ends = {"log_prob": (0.0, -1e4), "log_normalizer": (1e4, -1e4), "mean_logit": (1e4, -1e4), "entropy": (0.0, 10.0)}
    ends |= dict.fromkeys(("prediction", "target"), (1e4, -1e4)) | {"log_variance": (20.0, -20.0)}
    for place in (0, 1):
        moved = {
            name: torch.full_like(tensor, ends[name][place]) if name in ends else tensor
            for name, tensor in given.items()
        }
        values, slopes = term.slopes(moved)
        point = ", ".join(f"{name} = {ends[name][place]:g}" for name in given if name in ends)
        yield f"at {point}, the value is finite", bool(values.isfinite().all()), True
        for name, slope in slopes.items():
            yield f"at {point}, the slope by {name} is finite", bool(slope.isfinite().all()), True


def gradient(term: TermSubject) -> Iterator[Finding]:
    """The slopes are the derivatives.

    Fix: do not detach or use .data where a gradient should flow; where that is meant, skip says why.
    """
    given, step = term.given(), 1e-6
    _, slopes = term.slopes(given)
    for name, slope in slopes.items():
        up, down = (term.term(**{**given, name: given[name] + move}) for move in (step, -step))
        yield f"slope by {name}", slope, (up - down) / (2 * step), 1e-5


def picklable(term: TermSubject) -> Iterator[Finding]:
    """It survives pickling.

    Fix: a module-level function, functools.partial over one, or a frozen dataclass; no lambda, no inner function.
    """
    again = replace(term, term=pickle.loads(pickle.dumps(term.term)))
    yield "the values of its copy", again.term(**again.given()), term.term(**term.given())


RULES: tuple[Check, ...] = (signature, returns, inputs, elementwise, dtypes, extremes, gradient, picklable)


def term_rules(
    *, classes: int = 7, extras: Mapping[str, Extra] | None = None, skip: Mapping[str, str] | None = None
) -> list[Rule]:
    """The rules that a term has to keep, one callable each, for `pytest.mark.parametrize`.

    Args:
        classes: number of classes of the labels.
        extras: what else the term asks for by name: functions of the labels `(n,)` that return `(n,)`.
        skip: rules that this term need not keep, each with its reason.

    Returns:
        Callables with a name: `rule(my_term)` raises AssertionError, or returns what was compared.

    Raises:
        ValueError: no such rule, no reason.

    Example:
        >>> [rule.name for rule in term_rules()][3]
        'elementwise'
    """
    subject: Callable[[Any], TermSubject] = partial(TermSubject, classes=classes, extras=extras)
    return select(RULES, subject, skip)


def check_term(term: Term, **options: Any) -> Report:
    """Hold a term, as `causal_lm_loss(term=...)` takes it, to all the rules of terms.

    Args:
        term: a function of 1-D tensors, bound by name.
        **options: those of `term_rules`.

    Returns:
        What was compared, if every rule is kept; `print` it.

    Raises:
        AssertionError: a rule is broken: its name, what was given and expected, and how to mend it.
        ValueError: no such rule, no reason.

    Example:
        >>> def centred(log_prob):
        ...     return log_prob.mean() - log_prob
        >>> check_term(centred)
        Traceback (most recent call last):
        AssertionError: centred breaks the rule `elementwise`.
          The value of an item depends on that item alone.
          in chunks of 1: ...
    """
    return judge(term, term_rules(**options), options.get("skip"))
