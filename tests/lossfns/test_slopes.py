"""Derivatives in closed form against those of autograd, for every term that has one and for sums of them."""

import inspect
import math
from functools import partial

import pytest
import torch

from lossfns import (
    Combined,
    asymmetric,
    causal_lm_loss,
    class_weighted,
    cross_entropy,
    entropy_bonus,
    focal,
    policy_gradient,
    poly1,
    smoothed_cross_entropy,
    token_weighted,
    weighted_sum,
    z_loss,
)
from lossfns._slopes import _CLOSED, closed_form
from lossfns.terms import STATISTICS, parameters

COMPOSED = weighted_sum((0.5, focal), (0.5, smoothed_cross_entropy), (1e-4, z_loss))
TERMS = {
    "cross_entropy": cross_entropy,
    "smoothed": smoothed_cross_entropy,
    "smoothed 0.3": partial(smoothed_cross_entropy, label_smoothing=0.3),
    "not smoothed": partial(smoothed_cross_entropy, label_smoothing=0.0),
    "focal": focal,
    **{f"focal {gamma}": partial(focal, gamma=gamma) for gamma in (0.0, 0.5, 1.0, 1.5, 3.0)},
    "poly1": poly1,
    "poly1 2": partial(poly1, epsilon=2.0),
    "partial of a partial": partial(partial(poly1, epsilon=2.0), epsilon=-0.5),
    "z_loss": z_loss,
    "entropy_bonus": entropy_bonus,
    "a sum": COMPOSED,
    "the same twice": weighted_sum((2.0, cross_entropy), (-3.0, cross_entropy), (0.0, z_loss)),
    "weights": token_weighted(COMPOSED),
    "two factors": token_weighted(class_weighted(COMPOSED, [0.0, 0.5, 2.0])),
    "a sum of sums": weighted_sum((0.3, token_weighted(focal)), (2.0, COMPOSED)),
}
AUTOGRAD = {
    "a user's": lambda log_prob: -log_prob,
    "a method": torch.nn.Identity(),
    "not listed": policy_gradient,
    "a part is not listed": weighted_sum((1.0, cross_entropy), (1.0, asymmetric)),
    "a factor that is measured": Combined((cross_entropy,), (1.0,), lambda log_prob: log_prob.exp()),
}


def items(dtype=torch.float64):
    """Usual items, then a label that is ruled out, one that is certain, and one of which both is nearly so."""
    generator = torch.Generator().manual_seed(0)
    log_prob = torch.cat([-4 * torch.rand(20, generator=generator), torch.tensor([-math.inf, 0.0, -1e4, -1e-9, -80.0])])
    given = {name: torch.randn(len(log_prob), generator=generator).to(dtype) for name in STATISTICS}
    weights = torch.rand(len(log_prob), generator=generator).to(dtype).index_fill_(0, torch.tensor([2, 20]), 0)
    classes = torch.arange(len(log_prob)) % 3
    return given | {"log_prob": log_prob.to(dtype), "token_weights": weights, "labels": classes}


def by_autograd(term, given):
    """Slope of each statistic, 0 where the value does not depend on it."""
    leaves = {name: given[name].clone().requires_grad_() for name in parameters(term) if name in STATISTICS}
    values = term(**{name: leaves.get(name, given[name]) for name in parameters(term)})
    found = torch.autograd.grad(values.sum(), list(leaves.values()), allow_unused=True)
    return {name: slope for name, slope in zip(leaves, found, strict=True) if slope is not None}


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=str)
def test_closed_forms_are_the_derivatives(name, dtype, tolerance):
    given = items(dtype)
    slopes = closed_form(TERMS[name])(given)
    expected = by_autograd(TERMS[name], given)
    assert slopes.keys() == expected.keys()
    for statistic, slope in expected.items():
        found = torch.as_tensor(slopes[statistic], dtype=dtype).expand_as(slope)
        torch.testing.assert_close(found, slope, rtol=tolerance, atol=tolerance)
        assert found.isfinite().all()


def test_every_closed_form_is_tested():
    tested = {getattr(term, "func", term) for term in TERMS.values() if not isinstance(term, Combined)}
    assert tested == _CLOSED.keys()


@pytest.mark.parametrize("name", AUTOGRAD)
def test_other_terms_go_through_autograd(name):
    assert closed_form(AUTOGRAD[name]) is None


def wrapped(term):
    """The same term as a function without a closed form."""

    def call(**given):
        return term(**given)

    call.__signature__ = inspect.signature(term)
    return call


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["cross_entropy", "focal 0.5", "weights", "a sum of sums"])
def test_a_loss_is_the_same_both_ways(name, dtype):
    """One label is ruled out: its loss is infinite, its gradient is not."""
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(2, 9, 7, generator=generator)).to(dtype)
    labels = torch.randint(0, 7, (2, 9), generator=generator).index_fill_(1, torch.tensor([3]), -100)
    logits[0, :, 2], labels[0, 6] = -math.inf, 2
    weights = torch.rand(2, 9, generator=generator).index_fill_(1, torch.tensor([5]), 0)
    term, called = TERMS[name], wrapped(TERMS[name])
    extras = {"token_weights": weights} if "token_weights" in parameters(term) else {}
    found = []
    for each in (term, called):
        leaf = logits.clone().requires_grad_()
        loss = causal_lm_loss({"logits": leaf}, {"labels": labels, **extras}, term=each)
        loss.backward()
        found.append((loss, leaf.grad))
    (loss, gradient), (other_loss, other_gradient) = found
    assert closed_form(called) is None
    assert loss.isinf()
    torch.testing.assert_close(loss, other_loss, rtol=0, atol=0)
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient, other_gradient, rtol=torch.finfo(dtype).eps * 4, atol=1e-8)
