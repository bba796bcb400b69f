"""Losses of regression for the Trainer's `compute_loss_func`: elementwise functions of prediction and target.

The functions here are terms: they combine with `weighted_sum` and `token_weighted` (whose extra tensor `token_weights`
may hold one weight per sample), and any function of `prediction`, `target` and `log_variance` can be used instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ._core.alignment import Alignment, Labels, Outputs, Selector, select_logits, split_labels
from ._core.autograd import autocast_off, disable_compile
from ._core.checks import IGNORED, check_positive
from ._core.normalization import NumItems, item_count
from ._core.rows import Rows, compute_dtype
from ._core.signature import Term, parameters
from ._core.term_loss import bind

# What `regression_loss` gives to a term, by parameter name.
REGRESSION_INPUTS = ("prediction", "target", "log_variance")


def mse(prediction: Tensor, target: Tensor) -> Tensor:
    """Compute the squared error, which the mean of the targets minimizes.

        (prediction - target) ** 2

    Args:
        prediction: `(n,)`, in units of the target.
        target: `(n,)`.

    Returns:
        `(n,)`, in squared units of the target.

    References:
        Gneiting, "Making and Evaluating Point Forecasts", 2011, https://arxiv.org/abs/0912.0902

    Example:
        >>> mse(torch.tensor([1.0]), torch.tensor([3.0]))
        tensor([4.])
    """
    return (prediction - target).square()


def mae(prediction: Tensor, target: Tensor) -> Tensor:
    """Compute the absolute error, which the median of the targets minimizes.

        |prediction - target|

    Args:
        prediction: `(n,)`, in units of the target.
        target: `(n,)`.

    Returns:
        `(n,)`, in units of the target.

    References:
        Gneiting, "Making and Evaluating Point Forecasts", 2011, https://arxiv.org/abs/0912.0902

    Example:
        >>> mae(torch.tensor([1.0]), torch.tensor([3.0]))
        tensor([2.])
    """
    return (prediction - target).abs()


def huber(prediction: Tensor, target: Tensor, *, delta: float = 1.0) -> Tensor:
    """Compute the Huber loss: half the squared error for small errors, linear for large ones.

        0.5 * error ** 2                  where |error| <= delta
        delta * (|error| - 0.5 * delta)   elsewhere, with error = prediction - target

    Args:
        prediction: `(n,)`, in units of the target.
        target: `(n,)`.
        delta: threshold between the quadratic and the linear part, > 0, in units of the target.

    Returns:
        `(n,)`, in squared units of the target.

    Raises:
        ValueError: `delta` is not positive.

    References:
        Huber, "Robust Estimation of a Location Parameter", 1964, https://doi.org/10.1214/aoms/1177703732

    Example:
        >>> huber(torch.tensor([0.5, 3.0]), torch.zeros(2))
        tensor([0.1250, 2.5000])
    """
    check_positive(delta, "delta")
    return F.huber_loss(prediction, target, reduction="none", delta=delta)


def log_cosh(prediction: Tensor, target: Tensor) -> Tensor:
    """Compute the logarithm of the hyperbolic cosine of the error.

        log(cosh(prediction - target))

    It is half the squared error near 0 and the absolute error minus log 2 far from it.

    Args:
        prediction: `(n,)`, in units of the target.
        target: `(n,)`.

    Returns:
        `(n,)`.

    References:
        Green, "Iteratively Reweighted Least Squares for Maximum Likelihood Estimation, and some Robust and Resistant
        Alternatives", 1984, https://doi.org/10.1111/j.2517-6161.1984.tb01288.x

        Saleh, Saleh, "Statistical Properties of the log-cosh Loss Function Used in Machine Learning", 2022,
        https://arxiv.org/abs/2208.04564

    Example:
        >>> log_cosh(torch.tensor([1.0, 100.0]), torch.zeros(2))
        tensor([ 0.4338, 99.3069])
    """
    size = (prediction - target).abs()
    return size + torch.log1p(torch.expm1(-2 * size) / 2)  # torch.cosh overflows for large errors.


def quantile(prediction: Tensor, target: Tensor, *, q: float = 0.5) -> Tensor:
    """Compute the pinball loss, which the quantile `q` of the targets minimizes.

        max(q * (target - prediction), (q - 1) * (target - prediction))

    Args:
        prediction: `(n,)`, in units of the target.
        target: `(n,)`.
        q: the quantile, in `(0, 1)`; 0.5 gives half the absolute error.

    Returns:
        `(n,)`, in units of the target.

    Raises:
        ValueError: `q` is outside `(0, 1)`.

    References:
        Koenker, Bassett, "Regression Quantiles", 1978, https://doi.org/10.2307/1913643

    Example:
        >>> quantile(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0]), q=0.9)
        tensor([0.9000, 0.1000])
    """
    if not 0.0 < q < 1.0:
        raise ValueError(f"q must be in (0, 1), got {q}")
    error = target - prediction
    return torch.maximum(q * error, (q - 1) * error)


def gaussian_nll(prediction: Tensor, target: Tensor, log_variance: Tensor) -> Tensor:
    """Compute the negative log-likelihood of a normal distribution whose mean and variance are predicted.

        0.5 * (log(2 * pi) + log_variance + (target - prediction) ** 2 / exp(log_variance))

    Args:
        prediction: predicted mean, `(n,)`, in units of the target.
        target: `(n,)`.
        log_variance: logarithm of the predicted variance, `(n,)`: the second half of the model's logits.

    Returns:
        `(n,)`, nats.

    References:
        Nix, Weigend, "Estimating the Mean and Variance of the Target Probability Distribution", 1994, equation 3,
        https://doi.org/10.1109/ICNN.1994.374138

    Example:
        >>> gaussian_nll(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([0.0]))
        tensor([2.9189])
    """
    scaled = (target - prediction).square() * torch.exp(-log_variance)
    return 0.5 * (math.log(2 * math.pi) + log_variance + scaled)


def poisson_nll(prediction: Tensor, target: Tensor) -> Tensor:
    """Compute the negative log-likelihood of a count under a Poisson distribution, without its constant log(target!).

        exp(prediction) - target * prediction

    Args:
        prediction: logarithm of the predicted rate, `(n,)`.
        target: counts, `(n,)`.

    Returns:
        `(n,)`, nats.

    References:
        Nelder, Wedderburn, "Generalized Linear Models", 1972, https://doi.org/10.2307/2344614

    Example:
        >>> poisson_nll(torch.tensor([0.0]), torch.tensor([3.0]))
        tensor([1.])
    """
    return prediction.exp() - target * prediction


@disable_compile
def regression_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    term: Term = mse,
    select: Selector | None = None,
) -> Tensor:
    """Compute the mean of a term over targets, exact under gradient accumulation and DDP.

        sum over targets of term(prediction, target) / number of targets

    Args:
        outputs: the model's outputs: a ModelOutput or dict with `logits`, a tuple, or predictions of the targets'
            shape, or `(B, 1)` for targets `(B,)`. If the term asks for `log_variance`, the last dimension is twice as
            large, `(B, 2 K)`: predictions first, then the logarithms of the variances.
        labels: targets `(B,)` or `(B, K)`, -100 where a target is missing; or `{"labels": targets, name: extra}`.
        num_items_in_batch: the Trainer's count of targets that are not -100 over the accumulation window, in any of its
            forms. None counts the targets of this call.
        term: what is minimized per target: `mse`, `mae`, `partial(huber, delta=2.0)`, ...
        select: a function of `outputs` that returns the predictions.

    Returns:
        0-d float32 (float64 for float64 predictions), in units of the term; 0 with a live graph if every target is
        missing.

    Raises:
        ValueError: there are no labels; targets are NaN, infinite or of another shape than the predictions.
        TypeError: targets are complex; the term asks for an unknown tensor.

    References:
        Gneiting, "Making and Evaluating Point Forecasts", 2011, https://arxiv.org/abs/0912.0902

    Example:
        >>> regression_loss({"logits": torch.tensor([[1.0], [2.0], [0.0]])}, torch.tensor([1.5, 4.0, -100.0]))
        tensor(2.1250)
    """
    targets, extras = split_labels(labels)
    if targets.is_complex():
        raise TypeError(f"targets must be real numbers, got {targets.dtype}")
    logits = select_logits(outputs, targets[..., 0] if targets.ndim > 1 else targets, select)
    predictions = _predictions(logits, targets, "log_variance" in parameters(term, extras, REGRESSION_INPUTS))
    known = _known_targets(targets, logits.device)
    bound = bind(term, known, extras, statistics=REGRESSION_INPUTS)
    count = item_count(num_items_in_batch, len(known.rows), logits.device)
    dtype = compute_dtype(logits.dtype)
    inputs = dict(zip(REGRESSION_INPUTS, (predictions[0], targets.to(logits.device), *predictions[1:]), strict=False))
    with autocast_off(logits.device):
        measured = {name: inputs[name].flatten()[known.positions].to(dtype) for name in bound.fields}
        return bound.total(measured, count)


def _predictions(logits: Tensor, targets: Tensor, with_variance: bool) -> tuple[Tensor, ...]:
    """Return predictions, and log-variances if the term asks for them, each with as many elements as the targets."""
    parts = logits.chunk(2, dim=-1) if with_variance and logits.ndim and logits.shape[-1] % 2 == 0 else (logits,)
    one_target = targets.ndim == 1 and parts[0].shape == (*targets.shape, 1)
    if len(parts) != 1 + with_variance or not (one_target or parts[0].shape == targets.shape):
        shape = (
            "(B, 2) for (B,), (B, 2 K) for (B, K)" if with_variance else "(B, 1) or (B,) for (B,), (B, K) for (B, K)"
        )
        raise ValueError(
            f"predictions {tuple(logits.shape)} and targets {tuple(targets.shape)} do not fit: expected {shape}, "
            "because other shapes would be broadcast. Pick or reshape the predictions with select="
        )
    return parts


def _known_targets(targets: Tensor, device: torch.device) -> Alignment:
    """Return the targets that are not missing, each aligned with the prediction at its own position."""
    host = targets.detach().cpu().flatten()
    wrong = host[~host.isfinite()]
    if wrong.numel():
        raise ValueError(
            f"targets must be finite, got {wrong[0].item()} in {wrong.numel()} of {host.numel()}. Mark missing targets "
            f"with {IGNORED}: wrap the collator in lossfns.collators.mask_missing(collator)"
        )
    positions = (host != IGNORED).nonzero().flatten()
    moved = positions.to(device, non_blocking=True)
    return Alignment(Rows(positions, moved, None), moved, targets.shape)
