"""Terms against their formulas, written with Python floats; what a term may look like; how terms combine."""

import inspect
import math
import pickle
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
    focal,
    masked_lm_loss,
    poly1,
    smoothed_cross_entropy,
    token_weighted,
    weighted_sum,
    z_loss,
)
from lossfns._core.block import Block
from lossfns._core.signature import parameters
from tests import oracle

N = oracle.IGNORED
V = 7
LABELS = torch.tensor([[3, 1, N, 6], [0, N, 2, 5]])
WEIGHTS = torch.tensor([[0.5, 2.0, 9.0, 1.0], [0.25, 9.0, 0.0, 3.0]], dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def entropy_bonus(log_prob, entropy, *, beta=0.5):
    return -log_prob - beta * entropy


# Each term and its formula for one row x with label y, in the probabilities p of the row.
FORMULAS = {
    "cross_entropy": (cross_entropy, lambda x, y, p: -math.log(p[y])),
    "smoothed": (
        partial(smoothed_cross_entropy, label_smoothing=0.3),
        lambda x, y, p: -sum((0.7 * (c == y) + 0.3 / V) * math.log(p[c]) for c in range(V)),
    ),
    "smoothed fully": (
        partial(smoothed_cross_entropy, label_smoothing=1.0),
        lambda x, y, p: -sum(math.log(q) for q in p) / V,
    ),
    "not smoothed": (partial(smoothed_cross_entropy, label_smoothing=0.0), lambda x, y, p: -math.log(p[y])),
    "focal": (focal, lambda x, y, p: -((1 - p[y]) ** 2) * math.log(p[y])),
    "focal 0.5": (partial(focal, gamma=0.5), lambda x, y, p: -((1 - p[y]) ** 0.5) * math.log(p[y])),
    "focal 0": (partial(focal, gamma=0.0), lambda x, y, p: -math.log(p[y])),
    "poly1": (partial(poly1, epsilon=2.0), lambda x, y, p: -math.log(p[y]) + 2.0 * (1 - p[y])),
    "z_loss": (z_loss, lambda x, y, p: math.log(sum(map(math.exp, x))) ** 2),
    "a user's": (entropy_bonus, lambda x, y, p: -math.log(p[y]) + 0.5 * sum(q * math.log(q) for q in p)),
    "a sum": (
        weighted_sum((1.0, cross_entropy), (0.25, z_loss), (2.0, partial(focal, gamma=1.0))),
        lambda x, y, p: (
            -math.log(p[y])
            + 0.25 * math.log(sum(map(math.exp, x))) ** 2
            - 2.0 * (1 - p[y]) * math.log(p[y])
        ),
    ),
    "class weights": (
        class_weighted(cross_entropy, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        lambda x, y, p: -y * math.log(p[y]),
    ),
}  # fmt: skip


def by_formula(formula, logits, labels, weights=None):
    """The sum over the labels that count, divided by their number."""
    total, number = 0.0, 0
    for place, row in oracle.pairs(logits, labels):
        x, y = logits[row].tolist(), int(labels[place])
        whole = math.fsum(map(math.exp, x))
        p = [math.exp(value) / whole for value in x]
        total += formula(x, y, p) * (1.0 if weights is None else float(weights[place]))
        number += 1
    return total / number


@pytest.mark.parametrize("name", FORMULAS)
def test_a_term_is_its_formula(name):
    term, formula = FORMULAS[name]
    logits = normal(2, 4, V)
    expected = by_formula(formula, logits, LABELS)
    assert masked_lm_loss(logits, LABELS, term=term).item() == pytest.approx(expected, rel=1e-13)
    single = masked_lm_loss(logits.float(), LABELS, term=term)
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(by_formula(formula, logits.float(), LABELS), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("smoothed", partial(smoothed_cross_entropy, label_smoothing=0.2)),
        ("focal", partial(focal, gamma=1.0)),
        ("poly1", partial(poly1, epsilon=1.0)),
        ("z_loss", lambda log_normalizer: log_normalizer.abs()),
        ("class weights", class_weighted(cross_entropy, [1.0] * V)),
    ],
)
def test_another_formula_is_found(name, broken):
    logits = normal(2, 4, V)
    assert masked_lm_loss(logits, LABELS, term=broken).item() != pytest.approx(
        by_formula(FORMULAS[name][1], logits, LABELS), rel=1e-3
    )


@pytest.mark.parametrize("ruled_out", [cross_entropy, lambda log_prob: -log_prob], ids=["closed form", "autograd"])
def test_a_part_of_weight_0_may_be_infinite(ruled_out):
    logits, labels = torch.tensor([[1.0, -torch.inf, 0.0]], requires_grad=True), torch.tensor([1])
    loss = masked_lm_loss(logits * 1, labels, term=weighted_sum((0.0, ruled_out), (0.5, z_loss)))
    (found,) = torch.autograd.grad(loss, logits)
    alone = masked_lm_loss(logits * 1, labels, term=weighted_sum((0.5, z_loss)))
    assert loss.item() == alone.item()
    assert torch.equal(found, torch.autograd.grad(alone, logits)[0])
    nothing = masked_lm_loss(logits * 1, torch.tensor([0]), term=weighted_sum((0.0, ruled_out), (0.0, z_loss)))
    assert nothing.item() == 0.0


def test_a_part_of_weight_0_that_learns_stays_in_the_graph():
    """As in a warm-up from 0: DDP waits for the gradient of each of its parameters."""
    scale = torch.nn.Parameter(torch.ones(()))

    def scaled_by(log_prob, *, factor):
        return -log_prob * factor

    for learnt in (partial(scaled_by, factor=scale), weighted_sum((2.0, partial(scaled_by, factor=scale)))):
        scale.grad = None
        masked_lm_loss(normal(2, 4, V), LABELS, term=weighted_sum((1.0, cross_entropy), (0.0, learnt))).backward()
        assert scale.grad.item() == 0.0


@pytest.mark.parametrize("hole", [False, True], ids=["finite", "-inf neighbours"])
@pytest.mark.parametrize("name", FORMULAS)
def test_gradcheck(name, hole):
    """In one pass, as every loss takes it: the derivative of the term on a chunk, then that of the statistics."""
    logits = normal(2, 4, V)
    if hole:
        logits[..., 4] = -torch.inf
    term = FORMULAS[name][0]
    assert torch.autograd.gradcheck(lambda x: causal_lm_loss(x, LABELS, term=term), logits.requires_grad_())


@pytest.mark.parametrize("name", FORMULAS)
def test_one_pass_and_autograd_of_the_whole_formula_agree(name):
    """The gradient against torch's own autograd of the term over statistics in float64."""
    term, logits = FORMULAS[name][0], normal(2, 4, V).requires_grad_()
    (found,) = torch.autograd.grad(masked_lm_loss(logits, LABELS, term=term), logits)
    names = inspect.signature(term).parameters.values()
    wanted = [parameter.name for parameter in names if parameter.default is parameter.empty]
    total, number = 0.0, 0
    for place, row in oracle.pairs(logits, LABELS):
        here = oracle.measure(logits[row], int(LABELS[place])) | {"labels": LABELS[place]}
        total, number = total + term(**{key: here[key][None] for key in wanted}).sum(), number + 1
    (expected,) = torch.autograd.grad(total / number, logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


# --- a label that is ruled out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_a_label_that_is_ruled_out_costs_infinitely_much_when_smoothed(smoothing):
    logits, labels = torch.tensor([[[1.0, -torch.inf, 0.0]]]), torch.tensor([[1]])
    found = masked_lm_loss(logits, labels, term=partial(smoothed_cross_entropy, label_smoothing=smoothing))
    assert found == F.cross_entropy(logits[0], labels[0], label_smoothing=smoothing) == torch.inf


# --- focal where nothing is missed -----------------------------------------------------------------------------------


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
def test_focal_below_one_where_the_label_is_certain(dtype):
    check_certainty(partial(focal, gamma=0.5), dtype)
    with pytest.raises(AssertionError):
        check_certainty(partial(careless_focal, gamma=0.5), dtype)


def test_focal_without_cancellation():
    """1 - p is 1e-6 here; computed as 1 - exp it would keep one digit of float32."""
    log_prob = torch.tensor([math.log1p(-1e-6)], dtype=torch.float32)
    miss = -math.expm1(float(log_prob))
    assert focal(log_prob, gamma=1.0).item() == pytest.approx(-float(log_prob) * miss, rel=1e-6, abs=0)
    assert careless_focal(log_prob, gamma=1.0).item() != pytest.approx(-float(log_prob) * miss, rel=1e-3, abs=0)


@pytest.mark.parametrize(
    ("term", "given"),
    [
        (partial(smoothed_cross_entropy, label_smoothing=1.1), "1.1"),
        (partial(smoothed_cross_entropy, label_smoothing=-0.1), "-0.1"),
        (partial(focal, gamma=-1.0), "-1.0"),
        (partial(poly1, epsilon=-1.5), "-1.5"),
    ],
)
def test_options_out_of_range(term, given):
    with pytest.raises(ValueError, match=f"must be .*got {given}"):
        masked_lm_loss(normal(2, 4, V), LABELS, term=term)


# --- what a term may look like ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (lambda *values: values[0], r"\*values is variadic positional"),
        (lambda log_prob, **rest: -log_prob, r"\*\*rest is variadic keyword"),
        (lambda log_prob, /: -log_prob, "log_prob is positional-only"),
        (
            lambda logprob: -logprob,
            "asks for 'logprob'; known are entropy, labels, log_normalizer, log_prob, mean_logit",
        ),
        (partial(cross_entropy, log_prob=torch.zeros(1)), "binds 'log_prob', which is measured"),
        (lambda log_prob, labels=None: -log_prob, "binds 'labels'"),
        (lambda labels: labels.float(), "asks for no statistic; it needs at least one of log_prob"),
        (token_weighted(cross_entropy), "asks for 'token_weights'; known are"),
        (lambda log_prob: -log_prob.mean(), r"returned \(\) for 2 items; a term is elementwise"),
        (lambda log_prob: -log_prob[:, None], r"returned \(2, 1\) for 2 items"),
        (lambda log_prob: 1.0, "returned float for 2 items"),
    ],
)
def test_terms_that_are_refused(monkeypatch, term, message):
    monkeypatch.setattr("lossfns._core.block.read", None)  # before any work on the vocabulary
    with pytest.raises(TypeError, match=message):
        masked_lm_loss(normal(2, 4, V).requires_grad_(), LABELS, term=term)


def test_options_are_bound_and_extras_are_found_by_name():
    def term(log_prob, margin, *, scale=1.0):
        return (margin - log_prob) * scale

    margins = normal(2, 4, seed=1)
    found = masked_lm_loss(normal(2, 4, V), {"labels": LABELS, "margin": margins}, term=partial(term, scale=3.0))
    expected = by_formula(lambda x, y, p: -math.log(p[y]), normal(2, 4, V), LABELS)
    assert found.item() == pytest.approx(3 * (expected + margins[LABELS != N].mean().item()), rel=1e-12)


def test_what_nobody_asks_for_is_not_computed(monkeypatch):
    measure, asked = Block.measure, []
    monkeypatch.setattr(Block, "measure", lambda block, fields: asked.append(fields) or measure(block, fields))
    for term, fields in {
        cross_entropy: ("log_prob",),
        z_loss: ("log_normalizer",),
        entropy_bonus: ("log_prob", "entropy"),
        weighted_sum((1.0, focal), (1.0, z_loss), (1.0, cross_entropy)): ("log_prob", "log_normalizer"),
    }.items():
        masked_lm_loss(normal(2, 4, V).requires_grad_(), LABELS, term=term).backward()
        assert asked == [fields]
        asked.clear()


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_token_weights_of_any_dtype(dtype):
    weights = WEIGHTS.to(dtype)
    found = masked_lm_loss(
        normal(2, 4, V), {"labels": LABELS, "token_weights": weights}, term=token_weighted(cross_entropy)
    )
    expected = by_formula(lambda x, y, p: -math.log(p[y]), normal(2, 4, V), LABELS, weights.double())
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_one_weight_a_sample():
    weights = torch.tensor([2.0, 0.5])
    found = masked_lm_loss(
        normal(2, 4, V), {"labels": LABELS, "token_weights": weights}, term=token_weighted(cross_entropy)
    )
    expected = by_formula(lambda x, y, p: -math.log(p[y]), normal(2, 4, V), LABELS, weights[:, None].expand(2, 4))
    assert found.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "weights",
    [
        [0, 1, 2, 3, 4, 5, 6],
        tuple(range(7)),
        np.arange(7),
        np.arange(7, dtype=np.float32),
        torch.arange(7),
        torch.arange(7.0, dtype=torch.bfloat16),
        torch.arange(7.0, requires_grad=True),
    ],
    ids=lambda weights: f"{type(weights).__name__} {getattr(weights, 'dtype', '')}",
)
def test_class_weights_of_any_kind(weights):
    found = masked_lm_loss(normal(2, 4, V), LABELS, term=class_weighted(cross_entropy, weights))
    assert found.item() == pytest.approx(by_formula(FORMULAS["class weights"][1], normal(2, 4, V), LABELS), rel=1e-12)


class Confident(torch.nn.Module):
    def forward(self, log_prob, *, floor=-2.0):
        return -log_prob.clamp(min=floor)


def test_a_module_names_its_tensors_in_forward():
    logits, labels = torch.zeros(1, 2, 9), torch.tensor([[0, 1]])
    summed = weighted_sum((1.0, Confident()), (0.5, cross_entropy))
    assert repr(summed) == "(1 * Confident() + 0.5 * cross_entropy)"
    found = pickle.loads(pickle.dumps(partial(causal_lm_loss, term=summed)))(logits, labels)
    assert found.item() == pytest.approx(2.0 + 0.5 * math.log(9))


def test_a_module_of_torch_asks_for_other_tensors():
    with pytest.raises(TypeError, match=r"CrossEntropyLoss\(\) asks for 'input'; known are .*log_prob"):
        causal_lm_loss(torch.zeros(1, 2, 9), torch.tensor([[0, 1]]), term=torch.nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    "weights", [[[1.0, 2.0]], 1.0, [1.0, -1.0], [1.0, math.nan], [math.inf, 1.0], {0: 1.0}, "ab", [[1.0], []]]
)
def test_class_weights_that_are_refused(weights):
    with pytest.raises(ValueError, match=r"one finite number >= 0 a class, shape \(C,\), got"):
        class_weighted(cross_entropy, weights)


def test_weights_for_another_number_of_classes():
    three, seven = class_weighted(cross_entropy, [1.0] * 3), class_weighted(focal, [1.0] * 7)
    with pytest.raises(ValueError, match="holds weights for 3 classes, the logits have 7"):
        masked_lm_loss(normal(2, 4, V), LABELS, term=three)
    with pytest.raises(ValueError, match=r"different numbers of classes: .*3.*7"):
        weighted_sum((1.0, three), (1.0, seven))


# --- Combined --------------------------------------------------------------------------------------------------------

NESTED = weighted_sum(
    (1.0, class_weighted(partial(smoothed_cross_entropy, label_smoothing=0.2), range(V))),
    (0.5, token_weighted(weighted_sum((1e-4, z_loss), (1.0, focal)))),
)


def test_a_combination_asks_for_what_its_parts_ask_for():
    assert list(inspect.signature(NESTED).parameters) == [
        "log_prob",
        "log_normalizer",
        "mean_logit",
        "labels",
        "token_weights",
    ]
    assert NESTED.classes == V


def test_a_nested_combination_is_its_formula():
    labels = {"labels": LABELS, "token_weights": WEIGHTS}
    found = masked_lm_loss(normal(2, 4, V), labels, term=NESTED)
    smoothed = by_formula(
        lambda x, y, p: -y * sum((0.8 * (c == y) + 0.2 / V) * math.log(p[c]) for c in range(V)), normal(2, 4, V), LABELS
    )
    weighted = by_formula(
        lambda x, y, p: (
            1e-4 * math.log(sum(map(math.exp, x))) ** 2 - (1 - p[y]) ** 2 * math.log(p[y])
        ), normal(2, 4, V), LABELS, WEIGHTS,
    )  # fmt: skip
    assert found.item() == pytest.approx(smoothed + 0.5 * weighted, rel=1e-12)


def test_a_combination_is_read_and_copied():
    assert repr(weighted_sum((1.0, cross_entropy), (1e-4, z_loss))) == "(1 * cross_entropy + 0.0001 * z_loss)"
    assert "focal(gamma=0.5)" in repr(weighted_sum((2.0, partial(focal, gamma=0.5))))
    assert "tensor" not in repr(NESTED)
    copy = pickle.loads(pickle.dumps(NESTED))
    assert isinstance(copy, Combined)
    labels = {"labels": LABELS, "token_weights": WEIGHTS}
    assert masked_lm_loss(normal(2, 4, V), labels, term=copy).equal(
        masked_lm_loss(normal(2, 4, V), labels, term=NESTED)
    )
    with pytest.raises(AttributeError):
        NESTED.weights = (1.0,)


def test_a_combination_costs_one_pass(monkeypatch):
    from lossfns._core import block

    read, rows = block.read, []
    monkeypatch.setattr(block, "read", lambda x, some, out: rows.append(len(some)) or read(x, some, out))
    labels = {"labels": LABELS, "token_weights": WEIGHTS}
    masked_lm_loss(normal(2, 4, V).requires_grad_(), labels, term=NESTED).backward()
    assert sum(rows) == int((LABELS != N).sum())


@pytest.mark.parametrize(
    "parts", [(), (cross_entropy,), ((cross_entropy, 1.0),), ((1.0, "focal"),), ((1.0, cross_entropy, 2.0),)], ids=str
)
def test_sums_that_are_refused(parts):
    with pytest.raises(TypeError, match=r"pairs? \(weight, term\)|\(weight, term\) pair"):
        weighted_sum(*parts)


def test_an_extra_is_not_silently_an_option():
    def powered(log_prob, *, gamma=2.0):
        return -log_prob * gamma

    with pytest.raises(TypeError, match="'gamma' is in the dict of labels"):
        parameters(powered, {"gamma": torch.ones(2)})
    assert parameters(powered, {"token_weights": torch.ones(2)}) == ("log_prob",)
