"""The terms of fine-tuning, unlikelihood and policy gradients, by formulas in Python floats and by their slopes."""

import math
from functools import partial

import pytest
import torch

from lossfns import (
    causal_lm_loss,
    class_weighted,
    cross_entropy,
    dft,
    eaft,
    entropy_bonus,
    focal,
    hidden_states,
    masked_lm_loss,
    policy_gradient,
    poly1,
    token_weighted,
    unlikelihood,
    weighted_sum,
)
from lossfns.testing import check_term
from tests import oracle, tiny

N = oracle.IGNORED
V = 7
LABELS = torch.tensor([[3, 1, N, 6], [0, N, 2, 5]])
EXTRAS = {
    "negative": torch.tensor([[False, True, True, False], [True, False, False, True]]),
    "old_log_prob": torch.tensor([[-1.0, -2.5, 9.0, -0.5], [-3.0, 9.0, -1.5, -2.0]], dtype=torch.float64),
    "advantages": torch.tensor([[1.0, -1.0, 9.0, 0.5], [-2.0, 9.0, 0.0, 3.0]], dtype=torch.float64),
    "token_weights": torch.tensor([[0.5, 2.0, 9.0, 1.0], [0.25, 9.0, 0.0, 3.0]], dtype=torch.float64),
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def entropy(p):
    return -sum(q * math.log(q) for q in p)


def surrogate(q, old, advantage, clip=0.2):
    ratio = q / math.exp(old)
    return -min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)


# Each term and its formula in the probability q of the label, the probabilities p of the row, and the extras e.
FORMULAS = {
    "dft": (dft, lambda q, p, e: -q * math.log(q)),
    "eaft": (eaft, lambda q, p, e: -math.log(q) * entropy(p) / math.log(20)),
    "eaft squared": (partial(eaft, alpha=2.0, scale=1.5), lambda q, p, e: -math.log(q) * (entropy(p) / 1.5) ** 2),
    "eaft 0": (partial(eaft, alpha=0.0), lambda q, p, e: -math.log(q)),
    "confidence penalty": (
        weighted_sum((1.0, cross_entropy), (0.3, entropy_bonus)),
        lambda q, p, e: -math.log(q) - 0.3 * entropy(p),
    ),
    "unlikelihood": (unlikelihood, lambda q, p, e: -math.log(1 - q if e["negative"] else q)),
    "weighted unlikelihood": (
        token_weighted(unlikelihood),
        lambda q, p, e: -e["token_weights"] * math.log(1 - q if e["negative"] else q),
    ),
    "policy": (policy_gradient, lambda q, p, e: surrogate(q, e["old_log_prob"], e["advantages"])),
    "policy 0.5": (
        partial(policy_gradient, clip=0.5),
        lambda q, p, e: surrogate(q, e["old_log_prob"], e["advantages"], 0.5),
    ),
}


def by_formula(formula, logits):
    values = []
    for place, row in oracle.pairs(logits, LABELS):
        x = logits[row].tolist()
        whole = math.fsum(map(math.exp, x))
        p = [math.exp(value) / whole for value in x]
        extras = {name: extra[place].item() for name, extra in EXTRAS.items()}
        values.append(formula(p[int(LABELS[place])], p, extras))
    return math.fsum(values) / len(values)


def loss(logits, term, extras=EXTRAS):
    return masked_lm_loss(logits, {"labels": LABELS, **extras}, term=term)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_term_is_its_formula(name):
    term, formula = FORMULAS[name]
    logits = normal(2, 4, V)
    assert loss(logits, term).item() == pytest.approx(by_formula(formula, logits), rel=1e-13)
    single = loss(logits.float(), term)
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(by_formula(formula, logits.float()), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("dft", lambda log_prob: -log_prob),
        ("eaft", lambda log_prob, entropy: -log_prob * entropy),
        ("confidence penalty", weighted_sum((1.0, cross_entropy), (-0.3, entropy_bonus))),
        ("unlikelihood", lambda log_prob, negative: torch.where(negative, log_prob, -log_prob)),
        ("policy", lambda log_prob, old_log_prob, advantages: -(log_prob - old_log_prob).exp() * advantages),
    ],
)
def test_another_formula_is_found(name, broken):
    logits = normal(2, 4, V)
    assert loss(logits, broken).item() != pytest.approx(by_formula(FORMULAS[name][1], logits), rel=1e-3)


@pytest.mark.parametrize("name", ["confidence penalty", "unlikelihood", "weighted unlikelihood", "policy", "eaft 0"])
def test_gradcheck(name):
    assert torch.autograd.gradcheck(lambda x: loss(x, FORMULAS[name][0]), normal(2, 4, V).requires_grad_())


@pytest.mark.parametrize(
    ("term", "weight"),
    [(dft, lambda q, p: q), (eaft, lambda q, p: entropy(p) / math.log(20))],
    ids=["dft", "eaft"],
)
def test_no_gradient_through_the_weight(term, weight):
    """The slope is that of cross-entropy, p - onehot, times the weight; what no difference quotient would find."""
    logits = normal(2, 4, V).requires_grad_()
    loss(logits, term).backward()
    expected = torch.zeros_like(logits)
    for place, row in oracle.pairs(logits, LABELS):
        p = logits[row].detach().softmax(-1)
        onehot = torch.nn.functional.one_hot(LABELS[place], V)
        expected[row] = weight(p[LABELS[place]].item(), p.tolist()) * (p - onehot) / 6
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-14)


# Schulman et al. (2017), table 1 of cases, figure 1: advantage, ratio, value, slope by the ratio.
CASES = [
    (1.0, 1.0, -1.0, -1.0),
    (1.0, 1.5, -1.2, 0.0),
    (1.0, 0.5, -0.5, -1.0),
    (-1.0, 1.0, 1.0, 1.0),
    (-1.0, 1.5, 1.5, 1.0),
    (-1.0, 0.5, 0.8, 0.0),
]


@pytest.mark.parametrize(("advantage", "ratio", "value", "slope"), CASES)
def test_the_clipped_surrogate(advantage, ratio, value, slope):
    given = torch.tensor([math.log(ratio) - 2.0], dtype=torch.float64, requires_grad=True)
    old, worth = given.new_tensor([-2.0]), given.new_tensor([advantage])
    found = policy_gradient(given, old, worth)
    (by_log_prob,) = torch.autograd.grad(found.sum(), given)
    assert found.item() == pytest.approx(value)
    assert by_log_prob.item() == pytest.approx(slope * ratio)


def test_a_ratio_that_overflows_has_no_nan():
    given = torch.tensor([-0.1], requires_grad=True)
    policy_gradient(given, torch.tensor([-1e4]), torch.tensor([1.0])).backward()
    assert given.grad.item() == 0.0


def with_gradient(loss, logits):
    leaf = logits.clone().requires_grad_()
    value = loss(leaf)
    return value.item(), torch.autograd.grad(value, leaf)[0]


RULED_OUT = {
    # term, its value, and its slope by -log_prob
    "focal": (partial(focal, gamma=2.0), math.inf, 1.0),
    "focal 0.5": (partial(focal, gamma=0.5), math.inf, 1.0),
    "focal 0": (partial(focal, gamma=0.0), math.inf, 1.0),
    "poly1": (poly1, math.inf, 1.0),
    "dft": (dft, 0.0, 0.0),
    "eaft": (eaft, math.inf, math.log(V - 1) / math.log(20)),
    "class weighted": (class_weighted(focal, [2.0] * V), math.inf, 2.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("name", RULED_OUT)
def test_a_label_that_is_ruled_out_has_the_slope_of_the_limit(name, dtype):
    """A logit of -inf: cross-entropy is infinite there and pushes by 1; nothing is NaN."""
    term, value, slope = RULED_OUT[name]
    logits = torch.zeros(1, 2, V, dtype=dtype)
    logits[0, 0, 3] = -torch.inf
    loss, gradient = with_gradient(lambda x: masked_lm_loss(x, torch.tensor([[3, N]]), term=term), logits)
    assert loss == pytest.approx(value)
    others = torch.full((V,), slope / (V - 1)).index_fill(0, torch.tensor([3]), -slope)
    torch.testing.assert_close(
        gradient[0, 0], others.to(gradient.dtype), rtol=2e-3 if dtype == torch.float16 else 1e-6, atol=0
    )


def test_a_label_against_a_certain_prediction_teaches_eaft_nothing():
    logits = torch.full((1, 1, V), -torch.inf)
    logits[0, 0, 2] = 0.0
    loss, gradient = with_gradient(lambda x: masked_lm_loss(x, torch.tensor([[3]]), term=eaft), logits)
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("formula", "term"), [(lambda x: -x * (-torch.expm1(x)) ** 2, focal), (lambda x: -x * x.detach().exp(), dft)]
)
def test_the_plain_formula_breaks_on_what_is_ruled_out(formula, term):
    for function, broken in ((formula, True), (term, False)):
        leaf = torch.tensor([-torch.inf]).requires_grad_()
        assert torch.autograd.grad(function(leaf).sum(), leaf)[0].isnan().item() == (broken and term is focal)
        assert function(leaf).isnan().item() == (broken and term is dft)


def test_unlikelihood_without_cancellation():
    """1 - p is 1e-6: as 1 - exp(log_prob) one digit of float32 would be left; and p = 1 is finite."""
    log_prob = torch.tensor([math.log1p(-1e-6)])
    expected = -math.log(-math.expm1(log_prob.item()))
    assert unlikelihood(log_prob, torch.tensor([True])).item() == pytest.approx(expected, rel=1e-6)
    assert -(1 - log_prob.exp()).log().item() != pytest.approx(expected, rel=1e-4)
    certain = torch.tensor([0.0], requires_grad=True)
    unlikelihood(certain, torch.tensor([True])).backward()
    assert certain.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_marks_of_any_dtype(dtype):
    marks = {"negative": EXTRAS["negative"].to(dtype)}
    assert loss(normal(2, 4, V), unlikelihood, marks) == loss(normal(2, 4, V), unlikelihood)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (partial(eaft, alpha=-1.0), "alpha=-1.0"),
        (partial(eaft, scale=0.0), "scale=0.0"),
        (partial(policy_gradient, clip=0.0), "clip must lie between 0 and 1, got 0.0"),
        (partial(policy_gradient, clip=1.0), "clip must lie between 0 and 1, got 1.0"),
    ],
)
def test_options_out_of_range(term, message):
    with pytest.raises(ValueError, match=message):
        loss(normal(2, 4, V), term)


def test_an_extra_that_is_missing_is_named():
    with pytest.raises(TypeError, match=r"unlikelihood asks for 'negative'.*collators.with_extras"):
        loss(normal(2, 4, V), unlikelihood, {})


# --- from hidden states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dft", "eaft", "confidence penalty", "unlikelihood", "policy"])
def test_from_hidden_states(name):
    """The same loss and gradients where the logits never exist."""
    batch = tiny.pad(tiny.lm_rows(4))
    labels = batch.pop("labels")
    marks = torch.Generator().manual_seed(0)
    extras = {
        "negative": torch.rand(labels.shape, generator=marks) < 0.3,
        "old_log_prob": -4 * torch.rand(labels.shape, generator=marks, dtype=torch.float64),
        "advantages": torch.randn(len(labels), generator=marks, dtype=torch.float64),
    }
    found = []
    for with_source in (False, True):
        model = tiny.model("llama")
        source = hidden_states(model) if with_source else None
        value = causal_lm_loss(model(**batch), {"labels": labels, **extras}, term=FORMULAS[name][0], source=source)
        value.backward()
        found.append([value.detach(), *(parameter.grad for parameter in model.parameters())])
    for logits, hidden in zip(*found, strict=True):
        torch.testing.assert_close(hidden, logits, rtol=0, atol=1e-12)


# --- the rules of the kit --------------------------------------------------------------------------------------------

STOPPED = "the weight passes no gradient on, so the slope is not the derivative"


@pytest.mark.parametrize(
    ("term", "options"),
    [
        (dft, {"skip": {"gradient": STOPPED}}),
        (eaft, {"skip": {"gradient": STOPPED}}),
        (entropy_bonus, {}),
        (unlikelihood, {"extras": {"negative": lambda labels: labels % 3 == 0}}),
        (
            policy_gradient,
            {
                "extras": {
                    "old_log_prob": lambda labels: -0.3 * labels.double(),
                    "advantages": lambda labels: labels.double() - 2.5,
                },
            },
        ),
    ],
    ids=["dft", "eaft", "entropy_bonus", "unlikelihood", "policy_gradient"],
)
def test_rules(term, options):
    check_term(term, **options)
