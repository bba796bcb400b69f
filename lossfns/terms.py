"""What is minimised, for one token or sample: elementwise functions of the few numbers the kernel measures.

A term takes 1-D float32 tensors of one length, bound by parameter name, and returns values of that length. Parameters
without a default are statistics (`log_prob`, `log_normalizer`, `mean_logit`, `entropy`), the `labels`, or extra tensors
of a dict of labels; parameters with a default are options, bound with `functools.partial`.
The same tensors give the same values: a term sees a few items at a time, two made-up ones first, and all for `watch`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._core.checks import check_smoothing
from ._core.combined import apply_weights
from ._core.signature import Grads, derivative


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


@derivative(cross_entropy)
def _cross_entropy_derivative(log_prob: Tensor) -> Grads:
    return {"log_prob": -1.0}


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


@derivative(smoothed_cross_entropy)
def _smoothed_cross_entropy_derivative(
    log_prob: Tensor, log_normalizer: Tensor, mean_logit: Tensor, *, label_smoothing: float
) -> Grads:
    return {"log_prob": label_smoothing - 1, "log_normalizer": label_smoothing, "mean_logit": -label_smoothing}


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
    if not gamma >= 0:
        raise ValueError(f"gamma must be >= 0, got {gamma}")
    return -log_prob * probability_missed(finite_log_prob(log_prob)) ** gamma


@derivative(focal)
def _focal_derivative(log_prob: Tensor, *, gamma: float) -> Grads:
    missed = probability_missed(log_prob)
    return {"log_prob": missed ** (gamma - 1) * (gamma * finite_log_prob(log_prob) * log_prob.exp() - missed)}


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
    if not epsilon >= -1:
        raise ValueError(f"epsilon must be >= -1, got {epsilon}")
    return -log_prob - epsilon * torch.expm1(log_prob)


@derivative(poly1)
def _poly1_derivative(log_prob: Tensor, *, epsilon: float) -> Grads:
    return {"log_prob": -1 - epsilon * log_prob.exp()}


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


@derivative(z_loss)
def _z_loss_derivative(log_normalizer: Tensor) -> Grads:
    return {"log_normalizer": 2 * log_normalizer}


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
    if not 0.0 <= clip < 1.0:
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
    return apply_weights(weight, -log_prob)  # 0 in the limit too


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
    if not (alpha >= 0 and scale > 0):
        raise ValueError(f"alpha must be >= 0 and scale positive, got alpha={alpha}, scale={scale}")
    weight = (entropy.detach().clamp(min=0) / scale) ** alpha
    return apply_weights(weight, -log_prob)  # a label that is ruled out has infinite cross-entropy


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


@derivative(entropy_bonus)
def _entropy_bonus_derivative(entropy: Tensor) -> Grads:
    return {"entropy": -1.0}


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
    if not 0.0 < clip < 1.0:
        raise ValueError(f"clip must lie between 0 and 1, got {clip}")
    change = log_prob - old_log_prob
    # Clipped before the exponential: a ratio that overflows would have a gradient of 0 * inf.
    risen, fallen = change.clamp(max=math.log1p(clip)), change.clamp(min=math.log1p(-clip))
    return -advantages * torch.where(advantages > 0, risen, fallen).exp()


def finite_log_prob(log_prob: Tensor) -> Tensor:
    """For functions of p, whose slope times an infinite log-probability would be NaN: below the bound p is 0 anyway."""
    return log_prob.clamp(min=-1e3)


def probability_missed(log_prob: Tensor) -> Tensor:
    """1 - p without cancellation; kept off exact 0, where a power below 1 has no slope."""
    return (-torch.expm1(log_prob)).clamp(min=torch.finfo(log_prob.dtype).tiny)
