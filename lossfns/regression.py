"""Losses of regression for the Trainer's `compute_loss_func`: elementwise functions of prediction and target.

A function here is a term: `weighted_sum`, `token_weighted` (a weight a sample under that name) and any function of
`prediction`, `target` and `log_variance` of one's own fit as well.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ._core.alignment import Alignment, Labels, Outputs, Selector, select_logits, split_labels
from ._core.autograd import autocast_off, disable_compile
from ._core.checks import IGNORED
from ._core.normalization import NumItems, item_count
from ._core.rows import Rows, compute_dtype
from ._core.signature import Term, parameters
from ._core.term_loss import bind

STATISTICS = ("prediction", "target", "log_variance")


def mse(prediction: Tensor, target: Tensor) -> Tensor:
    """Squared error.

    Args:
        prediction: `(n,)`.
        target: `(n,)`.

    Returns:
        `(n,)`, squared units of the target.

    Source:
        Legendre: Nouvelles methodes pour la determination des orbites des cometes (1805), least squares.

    Example:
        >>> mse(torch.tensor([1.0]), torch.tensor([3.0]))
        tensor([4.])
    """
    return (prediction - target).square()


def mae(prediction: Tensor, target: Tensor) -> Tensor:
    """Absolute error.

    Args:
        prediction: `(n,)`.
        target: `(n,)`.

    Returns:
        `(n,)`, units of the target.

    Source:
        Koenker, Bassett: Regression Quantiles (1978), for the median.

    Example:
        >>> mae(torch.tensor([1.0]), torch.tensor([3.0]))
        tensor([2.])
    """
    return (prediction - target).abs()


def huber(prediction: Tensor, target: Tensor, *, delta: float = 1.0) -> Tensor:
    """Half the squared error up to `delta`, linear beyond.

    Args:
        prediction: `(n,)`.
        target: `(n,)`.
        delta: error at which the slope stops to grow, positive, units of the target.

    Returns:
        `(n,)`, squared units of the target.

    Raises:
        ValueError: `delta` is not positive.
        TypeError: an option is no number.

    Source:
        Huber: Robust Estimation of a Location Parameter (1964).

    Example:
        >>> huber(torch.tensor([0.5, 3.0]), torch.zeros(2))
        tensor([0.1250, 2.5000])
    """
    if not delta > 0:
        raise ValueError(f"delta must be positive, got {delta}")
    return F.huber_loss(prediction, target, reduction="none", delta=delta)


def log_cosh(prediction: Tensor, target: Tensor) -> Tensor:
    """Logarithm of the hyperbolic cosine of the error: half its square near 0, its size less log 2 far away.

    Args:
        prediction: `(n,)`.
        target: `(n,)`.

    Returns:
        `(n,)`.

    Source:
        Green: Iteratively Reweighted Least Squares for Maximum Likelihood Estimation (1984); Saleh, Saleh: Statistical
        Properties of the log-cosh Loss Function Used in Machine Learning (2022).

    Example:
        >>> log_cosh(torch.tensor([1.0, 100.0]), torch.zeros(2))
        tensor([ 0.4338, 99.3069])
    """
    size = (prediction - target).abs()
    return size + torch.log1p(torch.expm1(-2 * size) / 2)  # cosh itself overflows


def quantile(prediction: Tensor, target: Tensor, *, q: float = 0.5) -> Tensor:
    """Pinball loss, least where a share `q` of the targets lies below the prediction.

    Args:
        prediction: `(n,)`.
        target: `(n,)`.
        q: the quantile, between 0 and 1.

    Returns:
        `(n,)`, units of the target; 0.5 gives half the absolute error.

    Raises:
        ValueError: `q` is not between 0 and 1.
        TypeError: an option is no number.

    Source:
        Koenker, Bassett: Regression Quantiles (1978).

    Example:
        >>> quantile(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0]), q=0.9)
        tensor([0.9000, 0.1000])
    """
    if not 0.0 < q < 1.0:
        raise ValueError(f"q must lie between 0 and 1, got {q}")
    error = target - prediction
    return torch.maximum(q * error, (q - 1) * error)


def gaussian_nll(prediction: Tensor, target: Tensor, log_variance: Tensor) -> Tensor:
    """Negative log-likelihood under a normal distribution whose variance is predicted too.

    Args:
        prediction: mean, `(n,)`.
        target: `(n,)`.
        log_variance: logarithm of the variance, `(n,)`; a model returns it in the second half of its logits.

    Returns:
        `(n,)`, nats.

    Source:
        Nix, Weigend: Estimating the Mean and Variance of the Target Probability Distribution (1994), equation 3.

    Example:
        >>> gaussian_nll(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([0.0]))
        tensor([2.9189])
    """
    scaled = (target - prediction).square() * torch.exp(-log_variance)
    return 0.5 * (math.log(2 * math.pi) + log_variance + scaled)


def poisson_nll(prediction: Tensor, target: Tensor) -> Tensor:
    """Negative log-likelihood of a count under a Poisson distribution, less `log(target!)`, which no model can change.

    Args:
        prediction: logarithm of the rate, `(n,)`.
        target: counts, `(n,)`.

    Returns:
        `(n,)`, nats.

    Source:
        Nelder, Wedderburn: Generalized Linear Models (1972).

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
    """Mean of a term over targets, exact under gradient accumulation and processes.

    Args:
        outputs: what the model returned: a ModelOutput or dict with `logits`, a tuple, or predictions of the targets'
            shape, or `(B, 1)` for targets `(B,)`. A term that asks for `log_variance` splits twice as many logits,
            `(B, 2 K)`: the first half predicts, the second is the logarithm of the variance.
        labels: targets `(B,)` or `(B, K)`, -100 where a target is missing; or `{"labels": targets, name: extra}`.
        num_items_in_batch: the Trainer's count of targets that are not -100 over the accumulation window, in any of its
            forms; None counts those of this call.
        term: what is minimised a target: `mse`, `mae`, `partial(huber, delta=2.0)`, ...
        select: a function of `outputs` that picks the predictions.

    Returns:
        0-d float32 (float64 for float64 predictions); 0 with a live graph when every target is missing.

    Raises:
        ValueError: targets are missing as a whole, NaN or infinite, or of another shape than the predictions.
        TypeError: targets are complex; the term asks for something unknown.

    Example:
        >>> regression_loss({"logits": torch.tensor([[1.0], [2.0], [0.0]])}, torch.tensor([1.5, 4.0, -100.0]))
        tensor(2.1250)
    """
    targets, extras = split_labels(labels)
    if targets.is_complex():
        raise TypeError(f"targets must be real numbers, not {targets.dtype}")
    logits = select_logits(outputs, targets[..., 0] if targets.ndim > 1 else targets, select)
    predictions = _predictions(logits, targets, "log_variance" in parameters(term, extras, STATISTICS))
    pairs = _scored(targets, logits.device)
    bound = bind(term, pairs, extras, statistics=STATISTICS)
    count = item_count(num_items_in_batch, len(pairs.rows), logits.device)
    dtype = compute_dtype(logits.dtype)
    tensors = dict(zip(STATISTICS, (predictions[0], targets.to(logits.device), *predictions[1:]), strict=False))
    with autocast_off(logits.device):
        measured = {name: tensors[name].flatten()[pairs.positions].to(dtype) for name in bound.fields}
        return bound.total(measured, count)


def _predictions(logits: Tensor, targets: Tensor, with_variance: bool) -> tuple[Tensor, ...]:
    """Predictions, and log-variances if asked for, each with as many elements as the targets."""
    parts = logits.chunk(2, dim=-1) if with_variance and logits.ndim and logits.shape[-1] % 2 == 0 else (logits,)
    one_target = targets.ndim == 1 and parts[0].shape == (*targets.shape, 1)
    if len(parts) != 1 + with_variance or not (one_target or parts[0].shape == targets.shape):
        shape = (
            "(B, 2) for (B,), (B, 2 K) for (B, K)" if with_variance else "(B, 1) or (B,) for (B,), (B, K) for (B, K)"
        )
        raise ValueError(
            f"predictions {tuple(logits.shape)} and targets {tuple(targets.shape)} do not fit: expected {shape}; "
            "anything else would be broadcast. select= takes a function that picks or reshapes the predictions"
        )
    return parts


def _scored(targets: Tensor, device: torch.device) -> Alignment:
    """The targets that are not missing, each beside the prediction at its own place."""
    host = targets.detach().cpu().flatten()
    positions = (host != IGNORED).nonzero().flatten()
    if not bool(host.isfinite().all()):
        wrong = host[~host.isfinite()]
        raise ValueError(
            f"{wrong.numel()} of {host.numel()} targets are {wrong[0].item()}. A missing target is {IGNORED}, which "
            "the Trainer does not count either: wrap the collator in lossfns.collators.mask_missing(collator)"
        )
    moved = positions.to(device, non_blocking=True)
    return Alignment(Rows(positions, moved, None), moved, targets.shape)
