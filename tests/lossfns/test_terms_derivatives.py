"""Closed derivatives against autograd, for every term that declares one and for sums of them."""

import functools
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
    terms,
    token_weighted,
    weighted_sum,
    z_loss,
)
from lossfns._core.signature import STATISTICS, derivative_of, parameters

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


class Clipped(Combined):
    """A sum that is changed afterwards."""

    def __call__(self, **given):
        return super().__call__(**given).clamp(max=1.0)


class Unhashable:
    __hash__ = None

    def __call__(self, log_prob):
        return -log_prob


AUTOGRAD = {
    "a user's": lambda log_prob: -log_prob,
    "a module": torch.nn.Identity(),
    "a callable": Unhashable(),
    "not listed": policy_gradient,
    "a part is not listed": weighted_sum((1.0, cross_entropy), (1.0, asymmetric)),
    "a user's factor": Combined((cross_entropy,), (1.0,), lambda log_prob: log_prob.exp()),
    "changed afterwards": Clipped((cross_entropy,), (1.0,)),
    "a statistic that is bound": partial(smoothed_cross_entropy, torch.zeros(())),
    "a decorated copy": functools.wraps(cross_entropy)(lambda log_prob: -2 * log_prob),
    "an option to learn": partial(focal, gamma=torch.nn.Parameter(torch.tensor(2.0))),
}


def items(dtype=torch.float64):
    """Usual items, then labels that are ruled out, certain, or nearly so."""
    generator = torch.Generator().manual_seed(0)
    log_prob = torch.cat([-4 * torch.rand(20, generator=generator), torch.tensor([-math.inf, 0.0, -1e4, -1e-9, -80.0])])
    given = {name: torch.randn(len(log_prob), generator=generator).to(dtype) for name in STATISTICS}
    weights = torch.rand(len(log_prob), generator=generator).to(dtype).index_fill_(0, torch.tensor([2, 20]), 0)
    classes = torch.arange(len(log_prob)) % 3
    return given | {"log_prob": log_prob.to(dtype), "token_weights": weights, "labels": classes}


def by_autograd(term, given):
    """Derivative by each statistic that the value depends on."""
    leaves = {name: given[name].clone().requires_grad_() for name in parameters(term) if name in STATISTICS}
    values = term(**{name: leaves.get(name, given[name]) for name in parameters(term)})
    found = torch.autograd.grad(values.sum(), list(leaves.values()), allow_unused=True)
    return {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=str)
def test_closed_derivative_equals_autograd(name, dtype, tolerance):
    given = items(dtype)
    derivative = derivative_of(TERMS[name])
    grads = derivative(**{each: given[each] for each in parameters(TERMS[name])})
    expected = by_autograd(TERMS[name], given)
    assert grads.keys() == expected.keys()
    for statistic, grad in expected.items():
        found = torch.as_tensor(grads[statistic], dtype=dtype).expand_as(grad)
        torch.testing.assert_close(found, grad, rtol=tolerance, atol=tolerance)
        assert found.isfinite().all()


def test_every_declared_derivative_is_tested():
    tested = {getattr(term, "func", term) for term in TERMS.values() if not isinstance(term, Combined)}
    assert tested == {term for term in vars(terms).values() if hasattr(term, "derivative")}


@pytest.mark.parametrize("name", AUTOGRAD)
def test_other_terms_use_autograd(name):
    assert derivative_of(AUTOGRAD[name]) is None


def wrapped(term):
    """The same term as a function without a closed form."""

    def call(**given):
        return term(**given)

    call.__signature__ = inspect.signature(term)
    return call


@pytest.mark.parametrize("ruled_out", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["cross_entropy", "focal 0.5", "weights", "a sum of sums"])
def test_loss_and_gradient_are_the_same_with_and_without_closed_derivative(name, dtype, ruled_out):
    """Also where the loss is infinite: its gradient is not."""
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(2, 9, 7, generator=generator)).to(dtype)
    labels = torch.randint(0, 7, (2, 9), generator=generator).index_fill_(1, torch.tensor([3]), -100)
    if ruled_out:
        logits[0, :, 2], labels[0, 6] = -math.inf, 2
    weights = torch.rand(2, 9, generator=generator).index_fill_(1, torch.tensor([5]), 0)
    term, called = TERMS[name], wrapped(TERMS[name])
    assert derivative_of(called) is None
    (loss, gradient), (other_loss, other_gradient) = (step(logits, labels, weights, each) for each in (term, called))
    assert bool(loss.isinf()) is ruled_out
    torch.testing.assert_close(loss, other_loss, rtol=torch.finfo(loss.dtype).eps, atol=0)
    largest = other_gradient.abs().max().item()
    assert gradient.isfinite().all()
    torch.testing.assert_close(
        gradient, other_gradient, rtol=0, atol=4 * torch.finfo(dtype).eps * largest
    )  # a few roundings each


def step(logits, labels, weights, term):
    """Loss and gradient of a language model."""
    leaf = logits.clone().requires_grad_()
    extras = {"token_weights": weights} if "token_weights" in parameters(term) else {}
    loss = causal_lm_loss({"logits": leaf}, {"labels": labels, **extras}, term=term)
    loss.backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("of_weights", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_weights_of_any_dtype_do_not_round_the_gradient(dtype, of_weights):
    """The weights are what they are; all else is computed in the dtype of the statistics."""
    generator = torch.Generator().manual_seed(2)
    logits, labels = torch.randn(2, 9, 7, generator=generator).to(dtype), torch.arange(18).view(2, 9) % 7
    weights = (2 * torch.rand(2, 9, generator=generator)).to(of_weights)
    term = token_weighted(weighted_sum((1e-8, cross_entropy), (0.1, smoothed_cross_entropy)))
    _, found = step(logits, labels, weights, term)
    _, expected = step(logits.double(), labels, weights.double(), term)
    torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=torch.finfo(dtype).eps)
    assert found.any()


def test_value_and_gradient_use_the_same_draw_of_a_random_term():
    """A term that draws, draws once for both."""
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 33, 7), torch.arange(132).view(4, 33) % 7
    drawn = []

    def dropped(log_prob):
        drawn.append(torch.rand_like(log_prob) > 0.5)
        return -log_prob * drawn[-1]

    loss, gradient = step(logits, labels, None, dropped)
    kept = torch.cat(drawn[1:])  # the first is a trial on two items
    expected = -logits[:, :-1].log_softmax(-1).gather(2, labels[:, 1:, None]).flatten()[kept].sum() / len(kept)
    assert gradient[:, :-1].flatten(0, 1).any(-1).equal(kept)
    torch.testing.assert_close(loss, expected)
