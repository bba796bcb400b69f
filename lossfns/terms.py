"""What is minimised, for one token or sample: elementwise functions of the few numbers the kernel measures.

A term takes 1-D float32 tensors of one length, bound by parameter name, and returns values of that length. Parameters
without a default are statistics (`log_prob`, `log_normalizer`, `mean_logit`, `entropy`), the `labels`, or extra tensors
of a dict of labels; parameters with a default are options, bound with `functools.partial`.
The same tensors give the same values: a term sees a few items at a time, two made-up ones first, and all for `watch`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ._options import function, number
from .alignment import as_numbers
from .normalization import accumulator_dtype

Term = Callable[..., Tensor]
ClassValues = Sequence[float] | Tensor | Any  # one number a class: a list, an array, a tensor

STATISTICS = ("log_prob", "log_normalizer", "mean_logit", "entropy")
KNOWN = (*STATISTICS, "labels")


def cross_entropy(log_prob: Tensor) -> Tensor:
    """Negative log-likelihood of the label.

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.

    Returns:
        `(n,)`, nats.

    Example:
        >>> cross_entropy(torch.tensor([0.25, 1.0]).log())
        tensor([1.3863, -0.0000])
    """
    return -log_prob


def smoothed_cross_entropy(
    log_prob: Tensor, log_normalizer: Tensor, mean_logit: Tensor, *, label_smoothing: float = 0.1
) -> Tensor:
    """Cross-entropy to a label that keeps `1 - label_smoothing` and spreads the rest over all classes.

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.
        log_normalizer: log of the sum of exponentials of the logits, `(n,)`.
        mean_logit: mean of the logits, `(n,)`.
        label_smoothing: mass spread evenly, in `[0, 1]`.

    Returns:
        `(n,)`, nats.

    Raises:
        ValueError: `label_smoothing` is outside `[0, 1]`.
        TypeError: an option is no number.

    Source:
        Szegedy, Vanhoucke, Ioffe, Shlens, Wojna: Rethinking the Inception Architecture (2016), section 7.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0]])
        >>> lse = logits.logsumexp(-1)
        >>> smoothed_cross_entropy(logits[:, 0] - lse, lse, logits.mean(-1), label_smoothing=0.1)
        tensor([0.2269])
    """
    check_smoothing(label_smoothing)
    # Not lerp, whose difference of the two would be NaN for a label that is ruled out.
    return torch.add((label_smoothing - 1) * log_prob, log_normalizer - mean_logit, alpha=label_smoothing)


def focal(log_prob: Tensor, *, gamma: float = 2.0) -> Tensor:
    """Cross-entropy weighted by `(1 - p) ** gamma`, which turns easy items down.

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.
        gamma: focusing exponent, at least 0; 0 is cross-entropy.

    Returns:
        `(n,)`, nats.

    Raises:
        ValueError: `gamma` is negative.
        TypeError: an option is no number.

    Source:
        Lin, Goyal, Girshick, He, Dollar: Focal Loss for Dense Object Detection (2017), equation 4.

    Example:
        >>> focal(torch.tensor([0.5, 0.9]).log(), gamma=2.0)
        tensor([0.1733, 0.0011])
    """
    if not number(gamma, "gamma") >= 0:
        raise ValueError(f"gamma must be >= 0, got {gamma}")
    return -log_prob * probability_missed(finite_log_prob(log_prob)) ** gamma


def poly1(log_prob: Tensor, *, epsilon: float = 1.0) -> Tensor:
    """Cross-entropy plus `epsilon` times the first term of its polynomial expansion, `1 - p`.

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.
        epsilon: weight of the linear term, at least -1.

    Returns:
        `(n,)`, nats.

    Raises:
        ValueError: `epsilon` is below -1.
        TypeError: an option is no number.

    Source:
        Leng, Tan, Liu, Cubuk, Shi, Cheng, Anguelov: PolyLoss (2022), equation 6.

    Example:
        >>> poly1(torch.tensor([0.5]).log(), epsilon=1.0)
        tensor([1.1931])
    """
    if not number(epsilon, "epsilon") >= -1:
        raise ValueError(f"epsilon must be >= -1, got {epsilon}")
    return -log_prob - epsilon * torch.expm1(log_prob)


def z_loss(log_normalizer: Tensor) -> Tensor:
    """Squared log-normalizer: keeps the logits from drifting. Combine it: `weighted_sum((1, ...), (1e-4, z_loss))`.

    Args:
        log_normalizer: log of the sum of exponentials of the logits, `(n,)`.

    Returns:
        `(n,)`, squared nats.

    Source:
        Chowdhery et al.: PaLM (2022), section 5; de Brebisson, Vincent: The Z-loss (2016).

    Example:
        >>> z_loss(torch.tensor([3.0]))
        tensor([9.])
    """
    return log_normalizer.square()


def asymmetric(
    log_prob: Tensor, outcome: Tensor, *, gamma_pos: float = 0.0, gamma_neg: float = 4.0, clip: float = 0.05
) -> Tensor:
    """Focal loss of `multi_label_loss` that turns easy negatives down more, and drops those below a probability.

    Args:
        log_prob: log-probability of the outcome, `(n,)`, nats.
        outcome: whether the label is present, `(n,)` bool.
        gamma_pos: focusing exponent of present labels, at least 0.
        gamma_neg: focusing exponent of absent labels, at least 0.
        clip: probability taken off absent labels, in `[0, 1)`; what falls below 0 costs nothing.

    Returns:
        `(n,)`, nats.

    Raises:
        ValueError: `clip` is outside `[0, 1)`, or an exponent is negative.
        TypeError: an option is no number.

    Source:
        Ridnik, Ben-Baruch, Zamir, Noy, Friedman, Protter, Zelnik-Manor: Asymmetric Loss For Multi-Label
        Classification (2021), equation 7.

    Example:
        >>> asymmetric(torch.tensor([0.5, 0.5]).log(), torch.tensor([True, False]))
        tensor([0.6931, 0.0245])
    """
    if not 0.0 <= number(clip, "clip") < 1.0:
        raise ValueError(f"clip must be a probability in [0, 1), got {clip}")
    clipped = torch.logaddexp(log_prob, log_prob.new_full((), clip).log()).clamp(max=0)
    return torch.where(outcome, focal(log_prob, gamma=gamma_pos), focal(clipped, gamma=gamma_neg))


def dft(log_prob: Tensor) -> Tensor:
    """Cross-entropy times the probability of the label, through which no gradient flows: improbable labels pull less.

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.

    Returns:
        `(n,)`, nats.

    Source:
        Wu et al.: On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification (2025),
        dynamic fine-tuning.

    Example:
        >>> dft(torch.tensor([0.5, 0.1]).log())
        tensor([0.3466, 0.2303])
    """
    weight = log_prob.detach().exp()
    return of_weight(weight, -log_prob)  # 0 in the limit too


def eaft(log_prob: Tensor, entropy: Tensor, *, alpha: float = 1.0, scale: float = math.log(20)) -> Tensor:
    """Cross-entropy weighted by the entropy of the prediction: labels that contradict a confident one teach less.

    No gradient flows through the weight. The authors take the entropy of the 20 most probable tokens for that of all,
    which stands here.

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.
        entropy: entropy of the prediction, `(n,)`, nats.
        alpha: exponent of the weight, at least 0; 0 is cross-entropy.
        scale: entropy at which the weight is 1, positive, nats; the authors' is the largest of 20 tokens.

    Returns:
        `(n,)`, nats.

    Raises:
        ValueError: `alpha` is negative, or `scale` is not positive.
        TypeError: an option is no number.

    Source:
        Diao et al.: Entropy-Adaptive Fine-Tuning: Resolving Confident Conflicts to Mitigate Forgetting (2026).

    Example:
        >>> eaft(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.0, 2.9957]))
        tensor([0.0000, 0.6931])
    """
    if not (number(alpha, "alpha") >= 0 and number(scale, "scale") > 0):
        raise ValueError(f"alpha must be >= 0 and scale positive, got alpha={alpha}, scale={scale}")
    weight = (entropy.detach().clamp(min=0) / scale) ** alpha
    return of_weight(weight, -log_prob)  # a label that is ruled out has infinite cross-entropy


def entropy_bonus(entropy: Tensor) -> Tensor:
    """Negative entropy, a penalty on confidence. Combine it: `weighted_sum((1, cross_entropy), (0.1, entropy_bonus))`.

    Args:
        entropy: entropy of the prediction, `(n,)`, nats.

    Returns:
        `(n,)`, nats, at most 0.

    Source:
        Pereyra, Tucker, Chorowski, Kaiser, Hinton: Regularizing Neural Networks by Penalizing Confident Output
        Distributions (2017).

    Example:
        >>> entropy_bonus(torch.tensor([0.6931]))
        tensor([-0.6931])
    """
    return -entropy


def unlikelihood(log_prob: Tensor, negative: Tensor) -> Tensor:
    """Cross-entropy of good tokens, and `-log(1 - p)` of those that are marked as bad.

    The sequence-level form: what is made less likely is the label itself, in a repetition or any other passage that is
    marked in the dict of labels. A passage to learn nothing from has labels of -100. Where `p` is 1 to the last bit of
    float32, no gradient is left.

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.
        negative: whether the label is bad, `(n,)` bool, or numbers, 0 where it is good.

    Returns:
        `(n,)`, nats.

    Source:
        Welleck, Kulikov, Roller, Dinan, Cho, Weston: Neural Text Generation with Unlikelihood Training (2020),
        sequence-level objective.

    Example:
        >>> unlikelihood(torch.tensor([0.1, 0.1]).log(), torch.tensor([False, True]))
        tensor([2.3026, 0.1054])
    """
    return torch.where(negative != 0, -probability_missed(log_prob).log(), -log_prob)


def policy_gradient(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, *, clip: float = 0.2) -> Tensor:
    """Clipped surrogate of proximal policy optimisation: minus advantage times the ratio of new to old probability.

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.
        old_log_prob: the same under the policy that wrote it, `(n,)`, as `reducers.token_log_probs` gives it.
        advantages: what the label was worth, `(n,)`.
        clip: how far a ratio is rewarded for leaving 1, in `(0, 1)`.

    Returns:
        `(n,)`, units of the advantage.

    Raises:
        ValueError: `clip` is outside `(0, 1)`.
        TypeError: an option is no number.

    Source:
        Schulman, Wolski, Dhariwal, Radford, Klimov: Proximal Policy Optimization Algorithms (2017), equation 7.

    Example:
        >>> policy_gradient(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.4, 0.4]).log(), torch.tensor([1.0, -1.0]))
        tensor([-1.2000,  1.2500])
    """
    if not 0.0 < number(clip, "clip") < 1.0:
        raise ValueError(f"clip must lie between 0 and 1, got {clip}")
    change = log_prob - old_log_prob
    # Clipped before the exponential: a ratio that overflows would have a gradient of 0 * inf.
    risen, fallen = change.clamp(max=math.log1p(clip)), change.clamp(min=math.log1p(-clip))
    return -advantages * torch.where(advantages > 0, risen, fallen).exp()


def check_smoothing(label_smoothing: float) -> None:
    """Raise ValueError unless `label_smoothing` is a mass."""
    if not 0.0 <= number(label_smoothing, "label_smoothing") <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")


def finite_log_prob(log_prob: Tensor) -> Tensor:
    """For functions of p, whose slope times an infinite log-probability would be NaN: below the bound p is 0 anyway."""
    return log_prob.clamp(min=-1e3)


def probability_missed(log_prob: Tensor) -> Tensor:
    """1 - p without cancellation; kept off exact 0, where a power below 1 has no slope."""
    return (-torch.expm1(log_prob)).clamp(min=torch.finfo(log_prob.dtype).tiny)


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


def weighted_sum(*parts: tuple[float, Term]) -> Combined:
    """Several terms in one pass over the logits: the sum of `weight * term`.

    Args:
        *parts: pairs of a weight and a term.

    Returns:
        A term that asks for what its parts ask for; picklable if they are.

    Raises:
        TypeError: a part is not such a pair.
        ValueError: a weight is not finite, or parts hold weights for different numbers of classes.

    Example:
        >>> weighted_sum((1.0, cross_entropy), (1e-4, z_loss))
        (1 * cross_entropy + 0.0001 * z_loss)
    """
    if not parts:
        raise TypeError("weighted_sum needs at least one (weight, term) pair")
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], (int, float)) and callable(part[1])):
            raise TypeError(f"weighted_sum takes pairs (weight, term) such as (1e-4, z_loss), got {part!r}")
        if not math.isfinite(part[0]):
            raise ValueError(f"a weight must be finite, got {part!r}")
        parameters(part[1])
    weights, terms = zip(*parts, strict=True)
    return Combined(terms, tuple(map(float, weights)), classes=_classes(terms))


def token_weighted(term: Term) -> Combined:
    """The term times a weight for each token: the extra `token_weights` of a dict of labels, `(B, S)` or `(B,)`.

    The sum is still divided by the number of items, so that gradient accumulation changes nothing; weights with mean 1
    keep the size of the loss.

    Args:
        term: the term.

    Returns:
        A term that asks for `token_weights` too; picklable if `term` is.

    Example:
        >>> token_weighted(cross_entropy)(log_prob=torch.tensor([-1.0, -2.0]), token_weights=torch.tensor([1.0, 0.5]))
        tensor([1., 1.])
    """
    parameters(term)
    return Combined((term,), (1.0,), token_weights, _classes([term]))


def class_weighted(term: Term, weights: ClassValues) -> Combined:
    """The term times the weight of the item's class.

    Args:
        term: the term, computed from unweighted probabilities.
        weights: one weight a class, `(C,)`: a list, an array or a tensor of any dtype on any device.

    Returns:
        A term that asks for `labels` too; picklable if `term` is.

    Raises:
        ValueError: weights are not one finite, non-negative number a class.

    Example:
        >>> weighted = class_weighted(cross_entropy, [1.0, 3.0])
        >>> weighted(log_prob=torch.tensor([-1.0, -1.0]), labels=torch.tensor([0, 1]))
        tensor([1., 3.])
    """
    parameters(term)
    table = class_table(weights, "class weights", smallest=0.0)
    return Combined((term,), (1.0,), partial(class_weights, table=table), _classes([term], table.numel()))


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


def class_table(values: ClassValues, name: str, *, smallest: float = -math.inf) -> Tensor:
    """Numbers by class as a `(C,)` float64 tensor on the host.

    Raises:
        ValueError: not one finite number of at least `smallest` a class.
    """
    table = as_numbers(values, dtype=torch.float64)
    if table is None or table.ndim != 1 or not bool(torch.isfinite(table).all()) or bool((table < smallest).any()):
        at_least = "" if smallest == -math.inf else f" >= {smallest:g}"
        raise ValueError(f"{name} must be one finite number{at_least} a class, shape (C,), got {values!r}")
    return table.detach()


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


def parameters(term: Term, extras: Iterable[str] | None = None, known: Sequence[str] = KNOWN) -> tuple[str, ...]:
    """Names of the tensors a term asks for: its parameters without a default.

    Args:
        term: any callable with an inspectable signature; a module names its tensors in `forward`.
        extras: names in the dict of labels; None leaves unknown names for later.
        known: what the loss gives to a term.

    Raises:
        TypeError: the term has `*args`, `**kwargs` or positional-only parameters, binds what is given or is no option,
            has an option of the name of an extra, or asks for a name that is neither known nor among the extras.
    """
    extras = None if extras is None else set(extras)
    names = []
    check_options(term, "term")
    called = term.forward if isinstance(term, nn.Module) else term
    for parameter in inspect.signature(called).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"{name_of(term)}: parameter {parameter} is {parameter.kind.description}; a term names each tensor it "
                f"takes: {', '.join(known)}, or an extra of the dict of labels"
            )
        if parameter.default is not parameter.empty:
            if parameter.name in known:
                raise TypeError(
                    f"{name_of(term)} binds '{parameter.name}', which is measured for each item; drop its value"
                )
            if extras is not None and parameter.name in extras:
                raise TypeError(
                    f"'{parameter.name}' is in the dict of labels, but {name_of(term)} has an option of that name with "
                    "a value of its own. Write a term that takes the tensor by name and hands it on"
                )
        elif extras is not None and parameter.name not in {*known, *extras}:
            raise TypeError(
                f"{name_of(term)} asks for '{parameter.name}'; known are {', '.join(sorted({*known, *extras}))}. "
                "An option needs a default or a functools.partial, an extra tensor a dict of labels "
                "(collators.with_extras)"
            )
        else:
            names.append(parameter.name)
    return tuple(names)


def check_options(called: Callable[..., Any], what: str) -> None:
    """Raise TypeError where `called` is no function, or a partial that binds an option its function does not have."""
    function(called, what)
    if not isinstance(called, partial):
        return
    taken = inspect.signature(called.func).parameters.values()
    unknown = called.keywords.keys() - {parameter.name for parameter in taken}
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        options = [
            parameter.name
            for parameter in taken
            if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
        ]
        raise TypeError(
            f"{name_of(called.func)} has no option {min(unknown)!r}; options: {', '.join(options) or 'none'}"
        )


def name_of(term: Term) -> str:
    """A term as a reader would write it."""
    if isinstance(term, partial):
        shown = {key: value for key, value in term.keywords.items() if not isinstance(value, Tensor)}
        options = ", ".join(f"{key}={name_of(value) if callable(value) else value}" for key, value in shown.items())
        return f"{name_of(term.func)}({options})" if options else name_of(term.func)
    return getattr(term, "__name__", None) or repr(term)
