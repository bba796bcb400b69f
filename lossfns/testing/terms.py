"""Rules for terms: functions of the statistics that a loss measures for each item."""

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

Arguments = dict[str, Tensor]

_MEASURED = (*STATISTICS, "labels", *REGRESSION_INPUTS, "outcome")
_ITEMS = 12


@dataclass(frozen=True)
class TermSubject:
    """A term under test, and its arguments.

    Attributes:
        term: the function under test.
        classes: number of classes of the labels.
        extras: functions of the labels for further tensors.
    """

    term: Term
    classes: int
    extras: Mapping[str, Extra] | None
    tolerance: float = 1e-9

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors that the term takes."""
        return parameters(self.term, self.extras or {}, _MEASURED)

    def arguments(self, dtype: torch.dtype = torch.float64) -> Arguments:
        """Return the tensors that the term takes, for twelve items."""
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
        return _cast({name: known[name] for name in self.names}, dtype)

    def values_and_grads(self, arguments: Arguments) -> tuple[Tensor, Arguments]:
        """Return the values, and the gradient of their sum for each measured floating tensor."""
        leaves = {name: tensor.clone() for name, tensor in arguments.items()}
        wanted = {name: leaf for name, leaf in leaves.items() if name in _MEASURED and leaf.is_floating_point()}
        for leaf in wanted.values():
            leaf.requires_grad_()
        values = self.term(**leaves)
        grads = torch.autograd.grad(values.sum(), [*wanted.values()], allow_unused=True, materialize_grads=True)
        return values.detach(), dict(zip(wanted, grads, strict=True))


def _cast(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """Return the arguments with floating tensors in this dtype."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in arguments.items()}


def signature(term: TermSubject) -> Iterator[Finding]:
    """Check that the term names each tensor that it takes as a parameter without a default, and that options have one.

    Fix: `def my_term(log_prob, *, strength=1.0)`, without `*args` and `**kwargs`. The loss measures log_prob,
    log_normalizer, mean_logit and entropy; labels are the class ids; other names come from a dict of labels.
    """
    yield "the number of tensors is more than 0", len(term.names) > 0, True


def returns(term: TermSubject) -> Iterator[Finding]:
    """Check that the term returns one floating number per item.

    Fix: do not sum or average, because the loss does. Return shape `(n,)`: `(n, 1)` would broadcast to `(n, n)`.
    """
    values = term.term(**term.arguments())
    yield "type", "Tensor" if isinstance(values, Tensor) else type(values).__name__, "Tensor"
    yield "shape", tuple(values.shape), (_ITEMS,)
    yield "floating", values.is_floating_point(), True
    yield "finite", bool(values.isfinite().all()), True


def inputs(term: TermSubject) -> Iterator[Finding]:
    """Check that the term does not modify its arguments.

    Fix: use operations without a trailing underscore, because the loss reads the same tensors again.
    """
    arguments, before = term.arguments(), term.arguments()
    term.term(**arguments)
    for name, tensor in arguments.items():
        yield name, tensor, before[name]


def elementwise(term: TermSubject) -> Iterator[Finding]:
    """Check that the value of an item depends on that item only.

    Fix: do not use softmax, ranks, means or normalization over the items: they arrive in chunks of any length,
    including 0.
    """
    arguments = term.arguments()
    expected = term.term(**arguments)

    def values(index: Any) -> Tensor:
        return term.term(**{name: tensor[index] for name, tensor in arguments.items()})

    for size in (1, 5, _ITEMS):
        chunks = [values(slice(start, start + size)) for start in range(0, _ITEMS, size)]
        yield f"in chunks of {size}", torch.cat(chunks), expected
    order = torch.arange(_ITEMS).roll(5)
    yield "in another order", values(order), expected[order]
    yield "shape for no items", tuple(values(slice(0)).shape), (0,)


def dtypes(term: TermSubject) -> Iterator[Finding]:
    """Check that float32 arguments give float32 values without loss of precision.

    Fix: use `expm1` and `log1p` near p = 1; convert tables and weights to the dtype of the statistics.
    """
    arguments = term.arguments(torch.float32)
    values, grads = term.values_and_grads(arguments)
    exact, expected = term.values_and_grads(_cast(arguments, torch.float64))
    yield "dtype", str(values.dtype), "torch.float32"
    yield "values", values, exact, 1e-5
    for name, grad in grads.items():
        yield f"gradient for {name}", grad, expected[name], 1e-4


def extremes(term: TermSubject) -> Iterator[Finding]:
    """Check that values and gradients are finite for labels with probability 1 and 0, and for very large logits.

    Fix: use `torch.expm1(log_prob)` for p - 1; apply `clamp(min=tiny)` before a logarithm or a power below 1.
    """
    ends = {"log_prob": (0.0, -1e4), "log_normalizer": (1e4, -1e4), "mean_logit": (1e4, -1e4), "entropy": (0.0, 10.0)}
    ends |= dict.fromkeys(("prediction", "target"), (1e4, -1e4)) | {"log_variance": (20.0, -20.0)}
    for end in (0, 1):
        arguments = term.arguments(torch.float32)
        moved = {name: torch.full_like(arguments[name], ends[name][end]) for name in arguments if name in ends}
        values, grads = term.values_and_grads(arguments | moved)
        point = ", ".join(f"{name} = {ends[name][end]:g}" for name in moved)
        yield f"at {point}, the value is finite", bool(values.isfinite().all()), True
        for name, grad in grads.items():
            yield f"at {point}, the gradient for {name} is finite", bool(grad.isfinite().all()), True


def gradient(term: TermSubject) -> Iterator[Finding]:
    """Check that the gradients are the derivatives of the values.

    Fix: do not use detach() or .data where a gradient should flow; if it should not, skip this rule with the reason.
    """
    arguments, step = term.arguments(), 1e-6
    _, grads = term.values_and_grads(arguments)
    for name, grad in grads.items():
        up, down = (term.term(**{**arguments, name: arguments[name] + move}) for move in (step, -step))
        yield f"gradient for {name}", grad, (up - down) / (2 * step), 1e-5


def picklable(term: TermSubject) -> Iterator[Finding]:
    """Check that the term can be pickled.

    Fix: use a module-level function, functools.partial of one, or a frozen dataclass, not a lambda or inner function.
    """
    again = replace(term, term=pickle.loads(pickle.dumps(term.term)))
    yield "the values of the unpickled copy", again.term(**again.arguments()), term.term(**term.arguments())


RULES: tuple[Check, ...] = (signature, returns, inputs, elementwise, dtypes, extremes, gradient, picklable)


def term_rules(
    *, classes: int = 7, extras: Mapping[str, Extra] | None = None, skip: Mapping[str, str] | None = None
) -> list[Rule]:
    """Return the rules for terms, to use with `pytest.mark.parametrize`.

    Args:
        classes: number of classes of the labels.
        extras: further tensors that the term takes by name: functions of the labels `(n,)` that return `(n,)`.
        skip: rules that this term need not keep, with the reason.

    Returns:
        The rules: `rule(my_term)` returns a verdict or raises AssertionError, and `rule.name` is its name.

    Raises:
        ValueError: `skip` names an unknown rule or gives no reason.

    Example:
        >>> [rule.name for rule in term_rules()][3]
        'elementwise'
    """
    subject: Callable[[Any], TermSubject] = partial(TermSubject, classes=classes, extras=extras)
    return select(RULES, subject, skip)


def check_term(term: Term, **options: Any) -> Report:
    """Check a term, as in `causal_lm_loss(term=...)`, against all rules for terms.

    Args:
        term: a function of 1-D tensors, which are passed by name.
        **options: the options of `term_rules`.

    Returns:
        The report of all comparisons, to print.

    Raises:
        AssertionError: a rule is broken; the message has its name, the given and expected values, and the fix.
        ValueError: as for `term_rules`.

    Example:
        >>> def centered(log_prob):
        ...     return log_prob.mean() - log_prob
        >>> check_term(centered)
        Traceback (most recent call last):
        AssertionError: centered breaks the rule `elementwise`.
          The value of an item depends on that item only.
          in chunks of 1: ...
    """
    return judge(term, term_rules(**options), options.get("skip"))
