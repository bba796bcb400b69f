"""Regression losses against torch's own functions and formulas in float64; shapes, missing targets, bad input."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from lossfns import (
    cross_entropy,
    gaussian_nll,
    huber,
    log_cosh,
    mae,
    mse,
    poisson_nll,
    quantile,
    regression_loss,
    token_weighted,
    weighted_sum,
)
from tests.lossfns.comparisons import assert_same, gradient, normal

N = -100.0
B, K = 6, 3


TARGETS = normal(B, K, seed=1).index_put((torch.tensor([0, 0, 3]), torch.tensor([0, 2, 1])), torch.tensor(N).double())
TARGETS[5] = N
KNOWN = TARGETS != N
COUNT = int(KNOWN.sum())


COUNTS = TARGETS.abs().round().where(KNOWN, N)  # targets of a Poisson distribution

# name: (term, its formula in Python floats, targets)
TERMS = {
    "mse": (mse, lambda p, t: (p - t) ** 2, TARGETS),
    "mae": (mae, lambda p, t: abs(p - t), TARGETS),
    "huber": (huber, lambda p, t: 0.5 * (p - t) ** 2 if abs(p - t) <= 1 else abs(p - t) - 0.5, TARGETS),
    "huber, delta": (partial(huber, delta=0.3), lambda p,
        t: 0.5 * (p - t) ** 2 if abs(p - t) <= 0.3 else 0.3 * (abs(p - t) - 0.15), TARGETS),
    "log-cosh": (log_cosh, lambda p, t: math.log(math.cosh(p - t)), TARGETS),
    "median": (quantile, lambda p, t: 0.5 * abs(p - t), TARGETS),
    "quantile": (partial(quantile, q=0.9), lambda p, t: 0.9 * (t - p) if t >= p else 0.1 * (p - t), TARGETS),
    "Poisson": (poisson_nll, lambda p, t: math.exp(p) - t * p, COUNTS),
}  # fmt: skip
every_term = pytest.mark.parametrize(("term", "formula", "targets"), TERMS.values(), ids=TERMS)


@every_term
def test_term_equals_its_formula(term, formula, targets):
    predictions = normal(B, K)
    pairs = zip(predictions[KNOWN].tolist(), targets[KNOWN].tolist(), strict=True)
    expected = sum(formula(p, t) for p, t in pairs) / COUNT
    assert regression_loss(predictions, targets, term=term).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("term", "torch_loss", "targets"),
    [
        (mse, F.mse_loss, TARGETS),
        (mae, F.l1_loss, TARGETS),
        (partial(huber, delta=0.5), partial(F.huber_loss, delta=0.5), TARGETS),
        (poisson_nll, F.poisson_nll_loss, COUNTS),
    ],
)
def test_loss_and_gradient_equal_torch(term, torch_loss, targets):
    assert_same(
        lambda x: regression_loss(x, targets, term=term), lambda x: torch_loss(x[KNOWN], targets[KNOWN]), normal(B, K)
    )


@pytest.mark.parametrize("one_target", [False, True])
def test_gaussian_reads_the_variance_from_the_second_half(one_target):
    targets = TARGETS[:, 1] if one_target else TARGETS
    known = targets != N
    logits = normal(B, 2 if one_target else 2 * K)
    mean, log_variance = (logits[:, 0], logits[:, 1]) if one_target else (logits[:, :K], logits[:, K:])
    expected = F.gaussian_nll_loss(mean[known], targets[known], log_variance[known].exp(), full=True)
    found = regression_loss({"logits": logits}, targets, term=gaussian_nll)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_quantile_minimizes_the_pinball_loss():
    targets = torch.arange(1.0, 100.0, dtype=torch.float64)
    losses = [
        regression_loss(torch.full_like(targets, guess), targets, term=partial(quantile, q=0.8)).item()
        for guess in range(1, 100)
    ]
    assert losses.index(min(losses)) + 1 == 80


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_cosh_is_exact_for_tiny_and_huge_errors(dtype):
    errors = torch.tensor([1e-6, 1e-3, 0.1, 50.0, 1e4], dtype=dtype)
    exact = [e * e / 2 if e < 1e-2 else math.log(math.cosh(e)) if e < 100 else e - math.log(2) for e in errors.tolist()]
    found = log_cosh(errors, torch.zeros_like(errors))
    torch.testing.assert_close(found.double(), torch.tensor(exact).double(), rtol=1e-6, atol=2e-7)
    grads = gradient(lambda x: log_cosh(x, torch.zeros_like(x)).sum(), errors)
    torch.testing.assert_close(grads, errors.tanh(), rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("shape", [(B, 1), (B,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_one_target_per_sample(shape, dtype):
    targets = (10 * TARGETS[:, 1]).round().where(KNOWN[:, 1], N)
    known = KNOWN[:, 1]
    predictions = normal(B)
    found = regression_loss((predictions.view(B, 1),) if shape == (B, 1) else predictions, targets.to(dtype))
    torch.testing.assert_close(found, F.mse_loss(predictions[known], targets[known]), rtol=1e-12, atol=0)


def test_predictions_are_not_broadcast():
    """Broken: broadcasting (B, 1) against (B,) gives a table of B x B errors."""
    targets = normal(B)
    predictions = targets[:, None]
    assert regression_loss(predictions, targets) == 0.0
    assert (predictions - targets).square().mean() > 1.0


def test_terms_can_be_summed_and_weighted():
    predictions, weights = normal(B, K), torch.linspace(0, 1, B, dtype=torch.float64)
    error = (predictions - TARGETS)[KNOWN]
    found = regression_loss(predictions, TARGETS, term=weighted_sum((1.0, mse), (0.5, mae)))
    torch.testing.assert_close(found, (error.square() + 0.5 * error.abs()).mean(), rtol=0, atol=1e-13)
    found = regression_loss(predictions, {"labels": TARGETS, "token_weights": weights}, term=token_weighted(mse))
    each = weights[:, None].expand(B, K)[KNOWN]
    torch.testing.assert_close(found, (each * error.square()).sum() / COUNT, rtol=0, atol=1e-13)


def test_constant_predictions_and_one_sample():
    assert regression_loss(torch.zeros(3, 1), torch.tensor([1.0, 2.0, 3.0])).item() == pytest.approx(14 / 3)
    assert regression_loss(torch.ones(1, 1), torch.tensor([3.0])).item() == 4.0
    assert gradient(lambda x: regression_loss(x, x.detach(), term=log_cosh), torch.ones(2)).tolist() == [0.0, 0.0]


SHAPES = [((6, 1), (6, 1, 1)), ((6,), (6, 1)), ((6, 2), (6,)), ((6, 3), (6, 4)), ((6, 1), (6, 3)), ((6, 1), (1,))]
SHAPES += [((1, 1), (6,)), ((2, 3, 1), (2, 3))]


@pytest.mark.parametrize(("predictions", "targets"), SHAPES, ids=str)
def test_shapes_that_would_broadcast_raise(predictions, targets):
    with pytest.raises(ValueError, match=r"do not fit: expected \(B, 1\) or \(B,\)"):
        regression_loss(torch.zeros(predictions), torch.zeros(targets))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinite_targets_raise(value):
    with pytest.raises(ValueError, match=rf"targets must be finite, got {value} in 1 of 3.*mask_missing\(collator\)"):
        regression_loss(torch.zeros(3, 1), torch.tensor([0.0, value, N]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: regression_loss(x, TARGETS, term=cross_entropy), "known.* are log_variance, prediction"),
        (lambda x: regression_loss(x, TARGETS, term=partial(mse, target=1.0)), "binds 'target'"),
    ],
)
def test_invalid_input_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(normal(B, K))
