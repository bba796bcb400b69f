"""Terms against their formulas in Python floats, the requirements on a term, and combinations of terms."""

import inspect
import math
import pickle
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lossfns import (
    Combined,
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
    smoothed_cross_entropy,
    token_weighted,
    unlikelihood,
    weighted_sum,
    z_loss,
)
from lossfns._core.block import Block
from lossfns._core.signature import parameters
from tests import oracle, tiny

N = oracle.IGNORED
V = 7
LABELS = torch.tensor([[3, 1, N, 6], [0, N, 2, 5]])
COUNT = int((LABELS != N).sum())
WEIGHTS = torch.tensor([[0.5, 2.0, 9.0, 1.0], [0.25, 9.0, 0.0, 3.0]], dtype=torch.float64)
EXTRAS = {
    "negative": torch.tensor([[False, True, True, False], [True, False, False, True]]),
    "old_log_prob": torch.tensor([[-1.0, -2.5, 9.0, -0.5], [-3.0, 9.0, -1.5, -2.0]], dtype=torch.float64),
    "advantages": torch.tensor([[1.0, -1.0, 9.0, 0.5], [-2.0, 9.0, 0.0, 3.0]], dtype=torch.float64),
    "token_weights": WEIGHTS,
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_of(logits, term, extras=EXTRAS):
    return masked_lm_loss(logits, {"labels": LABELS, **extras}, term=term)


@dataclass
class Token:
    """One label, the numbers of its row of logits, and its extras, as Python floats."""

    label: int
    log_normalizer: float
    probs: list[float]
    extras: dict[str, float]

    @property
    def p(self) -> float:
        return self.probs[self.label]

    @property
    def nll(self) -> float:
        return -math.log(self.p)

    @property
    def entropy(self) -> float:
        return -sum(q * math.log(q) for q in self.probs)

    def smoothed(self, smoothing: float) -> float:
        target = [smoothing / V + (1 - smoothing) * (c == self.label) for c in range(V)]
        return -sum(t * math.log(q) for t, q in zip(target, self.probs, strict=True))

    def surrogate(self, clip_range: float) -> float:
        """Schulman et al. (2017), equation 7."""
        ratio, advantage = self.p / math.exp(self.extras["old_log_prob"]), self.extras["advantages"]
        return -min(ratio * advantage, min(max(ratio, 1 - clip_range), 1 + clip_range) * advantage)

    def unlikelihood(self) -> float:
        return -math.log(1 - self.p if self.extras["negative"] else self.p)


def penalized(log_prob, entropy, *, beta=0.5):
    return -log_prob - beta * entropy


# name: (term, its formula for one token)
FORMULAS = {
    "cross_entropy": (cross_entropy, lambda t: t.nll),
    "smoothed": (partial(smoothed_cross_entropy, label_smoothing=0.3), lambda t: t.smoothed(0.3)),
    "smoothed fully": (partial(smoothed_cross_entropy, label_smoothing=1.0), lambda t: t.smoothed(1.0)),
    "not smoothed": (partial(smoothed_cross_entropy, label_smoothing=0.0), lambda t: t.nll),
    "focal": (focal, lambda t: (1 - t.p) ** 2 * t.nll),
    "focal 0.5": (partial(focal, gamma=0.5), lambda t: (1 - t.p) ** 0.5 * t.nll),
    "focal 0": (partial(focal, gamma=0.0), lambda t: t.nll),
    "poly1": (partial(poly1, epsilon=2.0), lambda t: t.nll + 2.0 * (1 - t.p)),
    "z_loss": (z_loss, lambda t: t.log_normalizer**2),
    "user's": (penalized, lambda t: t.nll - 0.5 * t.entropy),
    "sum": (weighted_sum((1.0, cross_entropy), (0.25, z_loss), (2.0, partial(focal, gamma=1.0))),
        lambda t: t.nll + 0.25 * t.log_normalizer**2 + 2.0 * (1 - t.p) * t.nll),
    "class weights": (class_weighted(cross_entropy, list(range(V))), lambda t: t.label * t.nll),
    "dft": (dft, lambda t: t.p * t.nll),
    "eaft": (eaft, lambda t: t.nll * t.entropy / math.log(20)),
    "eaft squared": (partial(eaft, alpha=2.0, scale=1.5), lambda t: t.nll * (t.entropy / 1.5) ** 2),
    "eaft 0": (partial(eaft, alpha=0.0), lambda t: t.nll),
    "confidence penalty": (weighted_sum((1.0, cross_entropy), (0.3, entropy_bonus)), lambda t: t.nll - 0.3 * t.entropy),
    "unlikelihood": (unlikelihood, Token.unlikelihood),
    "weighted unlikelihood": (token_weighted(unlikelihood), lambda t: t.extras["token_weights"] * t.unlikelihood()),
    "policy": (policy_gradient, lambda t: t.surrogate(0.2)),
    "policy 0.5": (partial(policy_gradient, clip_range=0.5), lambda t: t.surrogate(0.5)),
}  # fmt: skip
DETACHED = {"dft", "eaft", "eaft squared"}  # their weights pass no gradient on, so that gradcheck does not apply


def by_formula(formula, logits, extras=EXTRAS):
    """Sum the formula over the labels that count, and divide by their number."""
    values = []
    for place, row in oracle.pairs(logits, LABELS):
        powers = [math.exp(value) for value in logits[row].tolist()]
        total = math.fsum(powers)
        here = {name: extra[place].item() for name, extra in extras.items()}
        token = Token(int(LABELS[place]), math.log(total), [power / total for power in powers], here)
        values.append(formula(token))
    assert len(values) == COUNT
    return math.fsum(values) / COUNT


@pytest.mark.parametrize("name", FORMULAS)
def test_term_equals_its_formula(name):
    term, formula = FORMULAS[name]
    logits = normal(2, 4, V)
    assert loss_of(logits, term).item() == pytest.approx(by_formula(formula, logits), rel=1e-13)
    single = loss_of(logits.float(), term)
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(by_formula(formula, logits.float()), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("smoothed", partial(smoothed_cross_entropy, label_smoothing=0.2)),
        ("focal", partial(focal, gamma=1.0)),
        ("poly1", partial(poly1, epsilon=1.0)),
        ("z_loss", lambda log_normalizer: log_normalizer.abs()),
        ("class weights", class_weighted(cross_entropy, [1.0] * V)),
        ("dft", lambda log_prob: -log_prob),
        ("eaft", lambda log_prob, entropy: -log_prob * entropy),
        ("confidence penalty", weighted_sum((1.0, cross_entropy), (-0.3, entropy_bonus))),
        ("unlikelihood", lambda log_prob, negative: torch.where(negative, log_prob, -log_prob)),
        ("policy", lambda log_prob, old_log_prob, advantages: -(log_prob - old_log_prob).exp() * advantages),
    ],
)
def test_broken_term_differs_from_the_formula(name, broken):
    logits = normal(2, 4, V)
    assert loss_of(logits, broken).item() != pytest.approx(by_formula(FORMULAS[name][1], logits), rel=1e-3)


@pytest.mark.parametrize("name", [name for name in FORMULAS if name not in DETACHED])
def test_gradcheck_beside_a_logit_of_minus_infinity(name):
    logits = normal(2, 4, V)
    logits[..., 4] = -torch.inf
    labels = {"labels": LABELS, **EXTRAS}
    assert torch.autograd.gradcheck(
        lambda x: causal_lm_loss(x, labels, term=FORMULAS[name][0]), logits.requires_grad_()
    )


@pytest.mark.parametrize("name", FORMULAS)
def test_gradient_equals_autograd_of_the_whole_formula(name):
    """Against torch's own autograd of the term over statistics in float64."""
    term, logits = FORMULAS[name][0], normal(2, 4, V).requires_grad_()
    (found,) = torch.autograd.grad(loss_of(logits, term), logits)
    total = 0.0
    for place, row in oracle.pairs(logits, LABELS):
        here = oracle.measure(logits[row], int(LABELS[place])) | {"labels": LABELS[place]}
        here |= {key: extra[place] for key, extra in EXTRAS.items()}
        total = total + term(**{key: here[key][None] for key in parameters(term)}).sum()
    (expected,) = torch.autograd.grad(total / COUNT, logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["eaft", "confidence penalty", "unlikelihood", "policy"])
def test_hidden_states_give_the_loss_and_gradients_of_logits(name):
    batch = tiny.pad(tiny.lm_rows(4))
    labels = batch.pop("labels")
    extras = {"negative": labels % 3 == 0, "old_log_prob": -(labels % 5).double(), "advantages": normal(len(labels))}
    found = []
    for with_source in (False, True):
        model = tiny.model("llama")
        source = hidden_states(model) if with_source else None
        value = causal_lm_loss(model(**batch), {"labels": labels, **extras}, term=FORMULAS[name][0], source=source)
        value.backward()
        found.append([value.detach(), *(parameter.grad for parameter in model.parameters())])
    for logits, hidden in zip(*found, strict=True):
        torch.testing.assert_close(hidden, logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("term", "weight"), [(dft, lambda p, h: p), (eaft, lambda p, h: h / math.log(20))])
def test_no_gradient_through_the_weight(term, weight):
    """The gradient is that of cross-entropy, p - onehot, times the weight, which no difference quotient would find."""
    logits = normal(2, 4, V).requires_grad_()
    loss_of(logits, term).backward()
    expected = torch.zeros_like(logits)
    for place, row in oracle.pairs(logits, LABELS):
        probs = logits[row].detach().softmax(-1)
        onehot = F.one_hot(LABELS[place], V)
        expected[row] = weight(probs[LABELS[place]], torch.special.entr(probs).sum()) * (probs - onehot) / COUNT
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-14)


# Schulman et al. (2017), figure 1: advantage, ratio, value, derivative by the ratio.
CASES = [
    (1.0, 1.0, -1.0, -1.0),
    (1.0, 1.5, -1.2, 0.0),
    (1.0, 0.5, -0.5, -1.0),
    (-1.0, 1.0, 1.0, 1.0),
    (-1.0, 1.5, 1.5, 1.0),
    (-1.0, 0.5, 0.8, 0.0),
]


@pytest.mark.parametrize(("advantage", "ratio", "value", "by_ratio"), CASES)
def test_policy_gradient_in_the_cases_of_the_paper(advantage, ratio, value, by_ratio):
    log_prob = torch.tensor([math.log(ratio) - 2.0], dtype=torch.float64, requires_grad=True)
    found = policy_gradient(log_prob, log_prob.new_tensor([-2.0]), log_prob.new_tensor([advantage]))
    (grad,) = torch.autograd.grad(found.sum(), log_prob)
    assert found.item() == pytest.approx(value)
    assert grad.item() == pytest.approx(by_ratio * ratio)


def test_ratio_that_overflows_has_a_gradient_of_zero():
    log_prob = torch.tensor([-0.1], requires_grad=True)
    policy_gradient(log_prob, torch.tensor([-1e4]), torch.tensor([1.0])).backward()
    assert log_prob.grad.item() == 0.0


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_smoothed_loss_of_an_impossible_label_is_infinite(smoothing):
    logits, labels = torch.tensor([[[1.0, -torch.inf, 0.0]]]), torch.tensor([[1]])
    found = masked_lm_loss(logits, labels, term=partial(smoothed_cross_entropy, label_smoothing=smoothing))
    assert found == F.cross_entropy(logits[0], labels[0], label_smoothing=smoothing) == torch.inf


IMPOSSIBLE = {
    # name: (term, its value, its derivative by -log_prob)
    "focal": (partial(focal, gamma=2.0), math.inf, 1.0),
    "focal 0.5": (partial(focal, gamma=0.5), math.inf, 1.0),
    "focal 0": (partial(focal, gamma=0.0), math.inf, 1.0),
    "poly1": (poly1, math.inf, 1.0),
    "dft": (dft, 0.0, 0.0),
    "eaft": (eaft, math.inf, math.log(V - 1) / math.log(20)),
    "class weighted": (class_weighted(focal, [2.0] * V), math.inf, 2.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_gradient_of_an_impossible_label_is_the_limit(name, dtype):
    """With a logit of -inf, cross-entropy is infinite and its derivative by log_prob is -1; nothing is NaN."""
    term, value, derivative = IMPOSSIBLE[name]
    logits = torch.zeros(1, 2, V, dtype=dtype)
    logits[0, 0, 3] = -torch.inf
    logits.requires_grad_()
    found = masked_lm_loss(logits, torch.tensor([[3, N]]), term=term)
    found.backward()
    assert found.item() == pytest.approx(value)
    expected = torch.full((V,), derivative / (V - 1)).index_fill(0, torch.tensor([3]), -derivative).to(dtype)
    torch.testing.assert_close(logits.grad[0, 0], expected, rtol=2e-3 if dtype == torch.float16 else 1e-6, atol=0)


@pytest.mark.parametrize(
    ("formula", "term"), [(lambda x: -x * (-torch.expm1(x)) ** 2, focal), (lambda x: -x * x.detach().exp(), dft)]
)
def test_plain_formula_is_nan_for_an_impossible_label(formula, term):
    for function, broken in ((formula, True), (term, False)):
        leaf = torch.tensor([-torch.inf]).requires_grad_()
        assert torch.autograd.grad(function(leaf).sum(), leaf)[0].isnan().item() == (broken and term is focal)
        assert function(leaf).isnan().item() == (broken and term is dft)


def test_eaft_ignores_a_label_against_a_certain_prediction():
    logits = torch.full((1, V), -torch.inf).index_fill(1, torch.tensor(2), 0.0).requires_grad_()
    loss = masked_lm_loss(logits, torch.tensor([3]), term=eaft)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, logits)[0].any()


def careless_focal(log_prob, *, gamma=2.0):
    return -log_prob * (1 - log_prob.exp()) ** gamma


def check_certainty(term, dtype):
    logits = torch.tensor([[[1000.0, 0.0, 0.0], [0.0, 0.0, 0.0]]], dtype=dtype, requires_grad=True)
    loss = masked_lm_loss(logits, torch.tensor([[0, 1]]), term=term)
    loss.backward()
    expected = (2 / 3) ** 0.5 * math.log(3) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert logits.grad.isfinite().all()
    assert not logits.grad[0, 0].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_focal_with_gamma_below_one_is_finite_for_a_certain_label(dtype):
    check_certainty(partial(focal, gamma=0.5), dtype)
    with pytest.raises(AssertionError):
        check_certainty(partial(careless_focal, gamma=0.5), dtype)


def test_focal_without_cancellation():
    """1 - p is 1e-6 here; computed as 1 - exp it would keep one digit of float32."""
    log_prob = torch.tensor([math.log1p(-1e-6)], dtype=torch.float32)
    expected = -float(log_prob) * -math.expm1(float(log_prob))
    assert focal(log_prob, gamma=1.0).item() == pytest.approx(expected, rel=1e-6, abs=0)
    assert careless_focal(log_prob, gamma=1.0).item() != pytest.approx(expected, rel=1e-3, abs=0)


def test_unlikelihood_without_cancellation():
    """1 - p is 1e-6 here; computed as 1 - exp(log_prob) it would keep one digit of float32. For p = 1 it is finite."""
    log_prob = torch.tensor([math.log1p(-1e-6)])
    expected = -math.log(-math.expm1(log_prob.item()))
    assert unlikelihood(log_prob, torch.tensor([True])).item() == pytest.approx(expected, rel=1e-6)
    assert -(1 - log_prob.exp()).log().item() != pytest.approx(expected, rel=1e-4)
    certain = torch.tensor([0.0], requires_grad=True)
    unlikelihood(certain, torch.tensor([True])).backward()
    assert certain.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_negative_labels_are_marked_in_any_dtype(dtype):
    marks = {"negative": EXTRAS["negative"].to(dtype)}
    assert loss_of(normal(2, 4, V), unlikelihood, marks) == loss_of(normal(2, 4, V), unlikelihood)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (lambda *values: values[0], r"\*values is variadic positional"),
        (lambda log_prob, **rest: -log_prob, r"\*\*rest is variadic keyword"),
        (lambda log_prob, /: -log_prob, "log_prob is positional-only"),
        (
            lambda logprob: -logprob,
            r"asks for 'logprob'; known( names)? are entropy, labels, log_normalizer, log_prob, mean_logit",
        ),
        (partial(cross_entropy, log_prob=torch.zeros(1)), "binds 'log_prob', which the loss measures"),
        (lambda log_prob, labels=None: -log_prob, "binds 'labels'"),
        (lambda labels: labels.float(), "at least one .*log_prob"),
        (token_weighted(cross_entropy), "asks for 'token_weights'"),
        (lambda log_prob: -log_prob.mean(), r"returned \(\) for 2"),
        (lambda log_prob: -log_prob[:, None], r"returned \(2, 1\) for 2"),
        (lambda log_prob: 1.0, "returned float for 2"),
    ],
)
def test_invalid_terms_raise_before_any_work(monkeypatch, term, message):
    monkeypatch.setattr("lossfns._core.block.read", None)  # before any work on the vocabulary
    with pytest.raises(TypeError, match=message):
        masked_lm_loss(normal(2, 4, V).requires_grad_(), LABELS, term=term)


def test_partial_binds_options_and_extras_are_passed_by_name():
    def term(log_prob, margin, *, scale=1.0):
        return (margin - log_prob) * scale

    margins = normal(2, 4, seed=1)
    found = masked_lm_loss(normal(2, 4, V), {"labels": LABELS, "margin": margins}, term=partial(term, scale=3.0))
    expected = by_formula(lambda token: token.nll, normal(2, 4, V))
    assert found.item() == pytest.approx(3 * (expected + margins[LABELS != N].mean().item()), rel=1e-12)


def test_only_the_statistics_that_a_term_takes_are_computed(monkeypatch):
    measure, asked = Block.measure, []
    monkeypatch.setattr(Block, "measure", lambda block, fields: asked.append(fields) or measure(block, fields))
    for term, fields in {
        cross_entropy: ("log_prob",),
        z_loss: ("log_normalizer",),
        penalized: ("log_prob", "entropy"),
        weighted_sum((1.0, focal), (1.0, z_loss), (1.0, cross_entropy)): ("log_prob", "log_normalizer"),
    }.items():
        masked_lm_loss(normal(2, 4, V).requires_grad_(), LABELS, term=term).backward()
        assert asked == [fields]
        asked.clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("weights", [WEIGHTS, torch.tensor([2.0, 0.5])], ids=["per label", "per sample"])
def test_token_weights(weights, dtype):
    weights = weights.to(dtype)
    extras = {"token_weights": weights}
    found = loss_of(normal(2, 4, V), token_weighted(cross_entropy), extras)
    per_token = weights.double() if weights.ndim == 2 else weights[:, None].expand(2, 4)
    expected = by_formula(
        lambda token: token.extras["token_weights"] * token.nll, normal(2, 4, V), {"token_weights": per_token}
    )
    assert found.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "weights",
    [
        [*range(7)],
        tuple(range(7)),
        np.arange(7),
        np.arange(7, dtype=np.float32),
        torch.arange(7.0, dtype=torch.bfloat16),
        torch.arange(7.0, requires_grad=True),
    ],
    ids=lambda weights: f"{type(weights).__name__} {getattr(weights, 'dtype', '')}",
)
def test_class_weights_of_any_type(weights):
    found = masked_lm_loss(normal(2, 4, V), LABELS, term=class_weighted(cross_entropy, weights))
    assert found.item() == pytest.approx(by_formula(FORMULAS["class weights"][1], normal(2, 4, V)), rel=1e-12)


class Confident(torch.nn.Module):
    def forward(self, log_prob, *, floor=-2.0):
        return -log_prob.clamp(min=floor)


def test_module_names_its_tensors_in_forward():
    logits, labels = torch.zeros(1, 2, 9), torch.tensor([[0, 1]])
    summed = weighted_sum((1.0, Confident()), (0.5, cross_entropy))
    assert repr(summed) == "(1 * Confident() + 0.5 * cross_entropy)"
    found = pickle.loads(pickle.dumps(partial(causal_lm_loss, term=summed)))(logits, labels)
    assert found.item() == pytest.approx(2.0 + 0.5 * math.log(9))


def test_class_weights_for_another_number_of_classes_raise():
    three, seven = class_weighted(cross_entropy, [1.0] * 3), class_weighted(focal, [1.0] * 7)
    with pytest.raises(ValueError, match=r"weights for 3 classes.* 7"):
        masked_lm_loss(normal(2, 4, V), LABELS, term=three)
    with pytest.raises(ValueError, match=r"number.? of classes.*3.*7"):
        weighted_sum((1.0, three), (1.0, seven))


NESTED = weighted_sum(
    (1.0, class_weighted(partial(smoothed_cross_entropy, label_smoothing=0.2), range(V))),
    (0.5, token_weighted(weighted_sum((1e-4, z_loss), (1.0, focal)))),
)


def test_combination_takes_the_tensors_of_its_parts():
    names = ["log_prob", "log_normalizer", "mean_logit", "labels", "token_weights"]
    assert list(inspect.signature(NESTED).parameters) == names
    assert NESTED.classes == V


def test_nested_combination_equals_its_formula():
    def formula(token):
        inner = 1e-4 * token.log_normalizer**2 + (1 - token.p) ** 2 * token.nll
        return token.label * token.smoothed(0.2) + 0.5 * token.extras["token_weights"] * inner

    logits = normal(2, 4, V)
    assert loss_of(logits, NESTED).item() == pytest.approx(by_formula(formula, logits), rel=1e-12)


def test_combination_has_a_repr_and_can_be_pickled():
    assert repr(weighted_sum((1.0, cross_entropy), (1e-4, z_loss))) == "(1 * cross_entropy + 0.0001 * z_loss)"
    assert "focal(gamma=0.5)" in repr(weighted_sum((2.0, partial(focal, gamma=0.5))))
    assert "tensor" not in repr(NESTED)
    copy = pickle.loads(pickle.dumps(NESTED))
    assert isinstance(copy, Combined)
    assert loss_of(normal(2, 4, V), copy).equal(loss_of(normal(2, 4, V), NESTED))
    with pytest.raises(AttributeError):
        NESTED.weights = (1.0,)


def test_combination_reads_the_logits_once(monkeypatch):
    from lossfns._core import block

    read, rows = block.read, []
    monkeypatch.setattr(block, "read", lambda x, some, out: rows.append(len(some)) or read(x, some, out))
    loss_of(normal(2, 4, V).requires_grad_(), NESTED).backward()
    assert sum(rows) == COUNT


@pytest.mark.parametrize("part", [cross_entropy, lambda log_prob: -log_prob], ids=["closed form", "autograd"])
def test_part_of_weight_zero_may_be_infinite(part):
    logits, labels = torch.tensor([[1.0, -torch.inf, 0.0]], requires_grad=True), torch.tensor([1])
    loss = masked_lm_loss(logits * 1, labels, term=weighted_sum((0.0, part), (0.5, z_loss)))
    (found,) = torch.autograd.grad(loss, logits)
    alone = masked_lm_loss(logits * 1, labels, term=weighted_sum((0.5, z_loss)))
    assert loss.item() == alone.item()
    assert torch.equal(found, torch.autograd.grad(alone, logits)[0])
    nothing = masked_lm_loss(logits * 1, torch.tensor([0]), term=weighted_sum((0.0, part), (0.0, z_loss)))
    assert nothing.item() == 0.0


def test_learned_part_of_weight_zero_stays_in_the_graph():
    """As in a warm-up from 0: DDP waits for the gradients of all parameters."""
    scale = torch.nn.Parameter(torch.ones(()))

    def scaled_by(log_prob, *, factor):
        return -log_prob * factor

    for learned in (partial(scaled_by, factor=scale), weighted_sum((2.0, partial(scaled_by, factor=scale)))):
        scale.grad = None
        masked_lm_loss(normal(2, 4, V), LABELS, term=weighted_sum((1.0, cross_entropy), (0.0, learned))).backward()
        assert scale.grad.item() == 0.0


@pytest.mark.parametrize(
    "parts",
    [(), (cross_entropy,), ((cross_entropy, 1.0),), ((1.0, "focal"),), ((1.0, cross_entropy, 2.0),)],
    ids=["none", "no weight", "weight last", "a text", "three values"],
)
def test_invalid_parts_of_a_sum_raise(parts):
    with pytest.raises(TypeError, match=r"\(weight, term\)"):
        weighted_sum(*parts)


def test_extra_with_the_name_of_an_option_raises():
    def powered(log_prob, *, gamma=2.0):
        return -log_prob * gamma

    with pytest.raises(TypeError, match="'gamma' is in the dict of labels"):
        parameters(powered, {"gamma": torch.ones(2)})
    assert parameters(powered, {"token_weights": torch.ones(2)}) == ("log_prob",)


def test_missing_extra_is_named():
    with pytest.raises(TypeError, match=r"unlikelihood asks for 'negative'.*collators.with_extras"):
        loss_of(normal(2, 4, V), unlikelihood, {})
