"""Terms: elementwise functions that say what is minimized for one token or sample.

A term takes 1-D float32 tensors of one length, bound by parameter name, and returns values of that length. Parameters
without a default are statistics of the logits (`log_prob`, `log_normalizer`, `mean_logit`, `entropy`), the `labels`, or
extra tensors from a dict of labels. Parameters with a default are options, which `functools.partial` binds.
A term must be deterministic: it is called with two artificial labels first, then with a few labels at a time, and with
all of them for `watch`. In the formulas below, p is the probability of the label, `exp(log_prob)`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._core.checks import check_positive, check_smoothing
from ._core.combined import apply_weights
from ._core.signature import Grads, derivative


def cross_entropy(log_prob: Tensor) -> Tensor:
    """Compute the negative log-likelihood of the label.

        -log p

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.

    Returns:
        `(n,)`, nats.

    References:
        Good, "Rational Decisions", 1952, https://doi.org/10.1111/j.2517-6161.1952.tb00104.x

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
    """Compute the cross-entropy to a label that spreads a part of its probability evenly over all classes.

        -(1 - label_smoothing) * log p - label_smoothing * mean over classes c of log p(c)

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.
        log_normalizer: logarithm of the sum of the exponentials of the logits, `(n,)`, nats.
        mean_logit: mean of the logits, `(n,)`, nats.
        label_smoothing: probability that is spread over all classes, in `[0, 1]`.

    Returns:
        `(n,)`, nats.

    Raises:
        ValueError: `label_smoothing` is outside `[0, 1]`.

    References:
        Szegedy, Vanhoucke, Ioffe, Shlens, Wojna, "Rethinking the Inception Architecture for Computer Vision", 2016,
        section 7, https://arxiv.org/abs/1512.00567

    Example:
        >>> logits = torch.tensor([[2.0, 0.0]])
        >>> lse = logits.logsumexp(-1)
        >>> smoothed_cross_entropy(logits[:, 0] - lse, lse, logits.mean(-1), label_smoothing=0.1)
        tensor([0.2269])
    """
    check_smoothing(label_smoothing)
    # torch.lerp would subtract the two parts, which is NaN for a label with a logit of -inf.
    return torch.add((label_smoothing - 1) * log_prob, log_normalizer - mean_logit, alpha=label_smoothing)


@derivative(smoothed_cross_entropy)
def _smoothed_cross_entropy_derivative(
    log_prob: Tensor, log_normalizer: Tensor, mean_logit: Tensor, *, label_smoothing: float
) -> Grads:
    return {"log_prob": label_smoothing - 1, "log_normalizer": label_smoothing, "mean_logit": -label_smoothing}


def focal(log_prob: Tensor, *, gamma: float = 2.0) -> Tensor:
    """Compute the focal loss: cross-entropy scaled to down-weight labels that are already predicted well.

        -(1 - p) ** gamma * log p

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.
        gamma: focusing exponent, >= 0; 0 is cross-entropy.

    Returns:
        `(n,)`, nats.

    Raises:
        ValueError: `gamma` is negative.

    References:
        Lin, Goyal, Girshick, He, Dollár, "Focal Loss for Dense Object Detection", 2017, equation 4,
        https://arxiv.org/abs/1708.02002

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
    """Compute cross-entropy with a larger first coefficient of its polynomial expansion in 1 - p.

        -log p + epsilon * (1 - p)

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.
        epsilon: weight that is added to the linear term, >= -1; 0 is cross-entropy.

    Returns:
        `(n,)`, nats.

    Raises:
        ValueError: `epsilon` is below -1.

    References:
        Leng, Tan, Liu, Cubuk, Shi, Cheng, Anguelov, "PolyLoss: A Polynomial Expansion Perspective of Classification
        Loss Functions", 2022, equation 6, https://arxiv.org/abs/2204.12511

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
    """Compute the squared log-normalizer, a penalty that keeps the sum of the exponentials of the logits near 1.

        (log of the sum over classes c of exp(logit(c))) ** 2

    Add it to another term with a small weight: `weighted_sum((1.0, cross_entropy), (1e-4, z_loss))`.

    Args:
        log_normalizer: logarithm of the sum of the exponentials of the logits, `(n,)`, nats.

    Returns:
        `(n,)`, squared nats.

    References:
        Devlin, Zbib, Huang, Lamar, Schwartz, Makhoul, "Fast and Robust Neural Network Joint Models for Statistical
        Machine Translation", 2014, https://doi.org/10.3115/v1/P14-1129

        Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, section 5,
        https://arxiv.org/abs/2204.02311

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
    """Compute the asymmetric loss of `multi_label_loss`, which down-weights absent labels more than present ones.

        -(1 - q) ** gamma_pos * log q    where the label is present
        -r ** gamma_neg * log(1 - r)     where it is absent, with r = max(q - clip, 0)

    Here q is the predicted probability that the label is present.

    Args:
        log_prob: log-probability of the outcome, `(n,)`, nats: of q where the label is present, of 1 - q elsewhere.
        outcome: whether the label is present, `(n,)` bool.
        gamma_pos: focusing exponent of present labels, >= 0.
        gamma_neg: focusing exponent of absent labels, >= 0.
        clip: probability subtracted for absent labels, in `[0, 1)`. An absent label with a smaller q has loss 0.

    Returns:
        `(n,)`, nats.

    Raises:
        ValueError: `clip` is outside `[0, 1)`, or an exponent is negative.

    References:
        Ridnik, Ben-Baruch, Zamir, Noy, Friedman, Protter, Zelnik-Manor, "Asymmetric Loss For Multi-Label
        Classification", 2021, equation 7, https://arxiv.org/abs/2009.14119

    Example:
        >>> asymmetric(torch.tensor([0.5, 0.5]).log(), torch.tensor([True, False]))
        tensor([0.6931, 0.0245])
    """
    if not 0.0 <= clip < 1.0:
        raise ValueError(f"clip must be a probability in [0, 1), got {clip}")
    clipped = torch.logaddexp(log_prob, log_prob.new_full((), clip).log()).clamp(max=0)
    return torch.where(outcome, focal(log_prob, gamma=gamma_pos), focal(clipped, gamma=gamma_neg))


def dft(log_prob: Tensor) -> Tensor:
    """Compute the loss of dynamic fine-tuning: cross-entropy weighted by the probability of the label.

        -stop_gradient(p) * log p

    Labels that the model finds improbable get smaller gradients.

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.

    Returns:
        `(n,)`, nats.

    References:
        Wu et al., "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification", 2025,
        https://arxiv.org/abs/2508.05629

    Example:
        >>> dft(torch.tensor([0.5, 0.1]).log())
        tensor([0.3466, 0.2303])
    """
    weight = log_prob.detach().exp()
    return apply_weights(weight, -log_prob)  # The limit for p -> 0 is 0, and not 0 * inf.


def eaft(log_prob: Tensor, entropy: Tensor, *, alpha: float = 1.0, scale: float = math.log(20)) -> Tensor:
    """Compute the loss of entropy-adaptive fine-tuning: cross-entropy weighted by the entropy of the prediction.

        -(stop_gradient(entropy) / scale) ** alpha * log p

    Labels that contradict a confident prediction get small gradients. The paper approximates the entropy by that of the
    20 most probable tokens; this function uses the entropy over all tokens.

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.
        entropy: entropy of the prediction, `(n,)`, nats.
        alpha: exponent of the weight, >= 0; 0 is cross-entropy.
        scale: entropy at which the weight is 1, > 0, nats. The paper's is the largest entropy of 20 tokens.

    Returns:
        `(n,)`, nats.

    Raises:
        ValueError: `alpha` is negative, or `scale` is not positive.

    References:
        Diao, Yang, Gong, Zhang, Yan, Han, Liang, Xu, Ma, "Entropy-Adaptive Fine-Tuning: Resolving Confident Conflicts
        to Mitigate Forgetting", 2026, https://arxiv.org/abs/2601.02151

    Example:
        >>> eaft(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.0, 2.9957]))
        tensor([0.0000, 0.6931])
    """
    if not alpha >= 0:
        raise ValueError(f"alpha must be >= 0, got {alpha}")
    check_positive(scale, "scale")
    weight = (entropy.detach().clamp(min=0) / scale) ** alpha
    return apply_weights(weight, -log_prob)  # The cross-entropy is infinite where the label has a logit of -inf.


def entropy_bonus(entropy: Tensor) -> Tensor:
    """Compute the negative entropy of the prediction, a penalty on confidence.

        sum over classes c of p(c) * log p(c)

    Add it to another term: `weighted_sum((1.0, cross_entropy), (0.1, entropy_bonus))`.

    Args:
        entropy: entropy of the prediction, `(n,)`, nats.

    Returns:
        `(n,)`, nats, <= 0.

    References:
        Pereyra, Tucker, Chorowski, Kaiser, Hinton, "Regularizing Neural Networks by Penalizing Confident Output
        Distributions", 2017, https://arxiv.org/abs/1701.06548

    Example:
        >>> entropy_bonus(torch.tensor([0.6931]))
        tensor([-0.6931])
    """
    return -entropy


@derivative(entropy_bonus)
def _entropy_bonus_derivative(entropy: Tensor) -> Grads:
    return {"entropy": -1.0}


def unlikelihood(log_prob: Tensor, negative: Tensor) -> Tensor:
    """Compute cross-entropy for good labels and the unlikelihood loss for labels that are marked as negative.

        -log(1 - p)    where the label is negative
        -log p         elsewhere

    This is the sequence-level form: the label itself becomes less likely, in a repetition or in any other passage that
    the dict of labels marks. To learn nothing from a passage, set its labels to -100. Where p is 1 in float32, the
    gradient is 0.

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.
        negative: whether the label is negative, `(n,)` bool, or numbers that are 0 for good labels.

    Returns:
        `(n,)`, nats.

    References:
        Welleck, Kulikov, Roller, Dinan, Cho, Weston, "Neural Text Generation with Unlikelihood Training", 2020,
        sequence-level objective, https://arxiv.org/abs/1908.04319

    Example:
        >>> unlikelihood(torch.tensor([0.1, 0.1]).log(), torch.tensor([False, True]))
        tensor([2.3026, 0.1054])
    """
    return torch.where(negative != 0, -probability_missed(log_prob).log(), -log_prob)


def policy_gradient(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, *, clip_range: float = 0.2) -> Tensor:
    """Compute the clipped surrogate loss of proximal policy optimization.

        -min(ratio * advantage, clamp(ratio, 1 - clip_range, 1 + clip_range) * advantage)

    Here ratio is `exp(log_prob - old_log_prob)`.

    Args:
        log_prob: log-probability of the label, `(n,)`, nats.
        old_log_prob: log-probability of the label under the policy that generated it, `(n,)`, nats, as
            `reducers.token_log_probs` returns it.
        advantages: advantage of the label, `(n,)`.
        clip_range: distance of the ratio from 1 beyond which it gets no further reward, in `(0, 1)`.

    Returns:
        `(n,)`, in units of the advantage.

    Raises:
        ValueError: `clip_range` is outside `(0, 1)`.

    References:
        Schulman, Wolski, Dhariwal, Radford, Klimov, "Proximal Policy Optimization Algorithms", 2017, equation 7,
        https://arxiv.org/abs/1707.06347

    Example:
        >>> policy_gradient(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.4, 0.4]).log(), torch.tensor([1.0, -1.0]))
        tensor([-1.2000,  1.2500])
    """
    if not 0.0 < clip_range < 1.0:
        raise ValueError(f"clip_range must be in (0, 1), got {clip_range}")
    log_ratio = log_prob - old_log_prob
    # Clamp before the exponential: a ratio that overflows would have a gradient of 0 * inf.
    upper, lower = log_ratio.clamp(max=math.log1p(clip_range)), log_ratio.clamp(min=math.log1p(-clip_range))
    return -advantages * torch.where(advantages > 0, upper, lower).exp()


def finite_log_prob(log_prob: Tensor) -> Tensor:
    """Return a finite log-probability for functions of p, whose derivative times -inf would be NaN.

    Below the bound, p is 0 in float64 already.
    """
    return log_prob.clamp(min=-1e3)


def probability_missed(log_prob: Tensor) -> Tensor:
    """Return 1 - p without cancellation, bounded away from 0, where a power below 1 has no finite derivative."""
    return (-torch.expm1(log_prob)).clamp(min=torch.finfo(log_prob.dtype).tiny)
