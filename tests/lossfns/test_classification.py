"""Classification, multi-label and ordinal losses against torch's own, loops and the papers' formulas, in float64."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_outputs import SequenceClassifierOutput

from lossfns import (
    asymmetric,
    class_weighted,
    classification_loss,
    coral_levels,
    corn_levels,
    cross_entropy,
    focal,
    multi_label_loss,
    ordinal_loss,
    smoothed_cross_entropy,
    token_classification_loss,
    token_weighted,
    weighted_sum,
    z_loss,
)
from tests.lossfns.comparisons import assert_same, gradient, normal

N = -100
B, C = 6, 4
LABELS = torch.tensor([0, 3, N, 1, 1, N])
HAVE_LABEL = LABELS != N
KNOWN = 4  # labels that are not missing
WEIGHTS = [0.5, 2.0, 1.0, 3.0]
WEIGHT_TENSOR = torch.tensor(WEIGHTS, dtype=torch.float64)


def soft_labels() -> torch.Tensor:
    """Distributions with one class of probability 0; the labels that are missing in LABELS are missing here too."""
    probs = normal(B, C, seed=1).softmax(-1)
    probs[:, 2] = 0
    return (probs / probs.sum(-1, keepdim=True)).masked_fill(~HAVE_LABEL[:, None], N)


SOFT = soft_labels()
MULTI = torch.tensor([[1, 0, N, 1], [0, 0, 0, 0], [N, N, N, N], [1, 1, 1, 1], [0, N, 1, 0], [0, 1, 0, N]])
MULTI_KNOWN = int((MULTI != N).sum())


@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("weights", "normalize"), [(None, "items"), (WEIGHTS, "items"), (WEIGHTS, "weights")])
def test_hard_labels_equal_torch_cross_entropy(smoothing, weights, normalize):
    options = {"weight": weights and WEIGHT_TENSOR, "label_smoothing": smoothing}
    found = partial(classification_loss, class_weights=weights, label_smoothing=smoothing, normalize=normalize)
    assert_same(
        lambda x: found(x, LABELS),
        # torch's own mean over weighted samples divides by their weights.
        lambda x: (
            F.cross_entropy(x, LABELS, **options)
            if normalize == "weights"
            else F.cross_entropy(x, LABELS, **options, reduction="sum") / KNOWN
        ),
        normal(B, C),
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_soft_labels_equal_torch_cross_entropy(smoothing, weights):
    weight = weights and WEIGHT_TENSOR
    assert_same(
        lambda x: classification_loss(x, SOFT, class_weights=weights, label_smoothing=smoothing),
        lambda x: F.cross_entropy(x[HAVE_LABEL], SOFT[HAVE_LABEL], weight=weight, label_smoothing=smoothing),
        normal(B, C),
    )


def test_class_weights_with_smoothing_differ_from_a_weighted_smoothed_loss():
    """Both can be expressed; the tests above find a loss that confuses them."""
    logits = normal(B, C)
    smoothed = partial(smoothed_cross_entropy, label_smoothing=0.2)
    x, y = logits[HAVE_LABEL], LABELS[HAVE_LABEL]
    expected = (WEIGHT_TENSOR[y] * F.cross_entropy(x, y, label_smoothing=0.2, reduction="none")).mean()
    other = classification_loss(logits, LABELS, term=class_weighted(smoothed, WEIGHTS))
    torch.testing.assert_close(other, expected, rtol=0, atol=1e-13)
    assert abs(other - classification_loss(logits, LABELS, class_weights=WEIGHTS, label_smoothing=0.2)) > 1e-2


@pytest.mark.parametrize(
    "term",
    [
        cross_entropy,
        partial(smoothed_cross_entropy, label_smoothing=0.3),
        focal,
        class_weighted(partial(focal, gamma=0.5), WEIGHTS),
        weighted_sum((1.0, cross_entropy), (0.1, z_loss), (-0.1, lambda entropy: entropy)),
    ],
    ids=["cross_entropy", "smoothed", "focal", "weighted", "sum"],
)
def test_loss_of_mixed_labels_is_the_mixture_of_their_losses(term):
    """Mixup: 0.3 of one label and 0.7 of the other, for any term."""
    logits, first, second = normal(B, C), torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([1, 1, 0, 2, 3, 0])
    mixed = 0.3 * F.one_hot(first, C).double() + 0.7 * F.one_hot(second, C).double()
    hard = partial(classification_loss, term=term)
    assert_same(
        lambda x: hard(x, mixed), lambda x: 0.3 * hard(x, first) + 0.7 * hard(x, second), logits, tolerance=1e-12
    )


def test_normalize_weights_divides_soft_labels_by_their_expected_weights():
    logits, known = normal(B, C), SOFT[HAVE_LABEL]
    total = -(known * WEIGHT_TENSOR * logits[HAVE_LABEL].log_softmax(-1)).sum()
    found = classification_loss(logits, SOFT, class_weights=WEIGHTS, normalize="weights")
    torch.testing.assert_close(found, total / (known @ WEIGHT_TENSOR).sum(), rtol=0, atol=1e-13)


def test_class_weighted_focal_uses_the_unweighted_probability():
    logits, total = normal(B, C), 0.0
    for x, y in zip(logits, LABELS.tolist(), strict=True):
        if y != N:
            p = float(x.exp()[y] / x.exp().sum())
            total -= WEIGHTS[y] * (1 - p) ** 2 * math.log(p)
    assert float(classification_loss(logits, LABELS, term=focal, class_weights=WEIGHTS)) == pytest.approx(total / KNOWN)


def test_normalize_weights_stays_close_when_a_window_is_split():
    """Exact for one call over the window; in parts, the mean weight of each part replaces that of the window."""
    logits, labels = normal(2 * B, C), torch.cat([LABELS, LABELS.flip(0)])
    loss = partial(classification_loss, class_weights=WEIGHTS, normalize="weights")
    undivided = loss(logits, labels, 2 * KNOWN)
    torch.testing.assert_close(undivided, F.cross_entropy(logits, labels, WEIGHT_TENSOR))
    parts = loss(logits[:B], labels[:B], 2 * KNOWN) + loss(logits[B:], labels[B:], 2 * KNOWN)
    torch.testing.assert_close(parts, undivided, rtol=1e-12, atol=0)  # both halves have the same labels
    uneven = sum(loss(logits[i : i + 3], labels[i : i + 3], 2 * KNOWN) for i in range(0, 2 * B, 3))
    assert 1e-6 < abs(uneven - undivided) < 0.5 * undivided


def test_normalize_weights_divides_by_the_product_of_class_and_token_weights():
    logits, tokens = normal(B, C), torch.linspace(0.5, 3, B, dtype=torch.float64)
    weight = WEIGHT_TENSOR[LABELS[HAVE_LABEL]] * tokens[HAVE_LABEL]
    nll = F.cross_entropy(logits[HAVE_LABEL], LABELS[HAVE_LABEL], reduction="none")
    labels = {"labels": LABELS, "token_weights": tokens}
    loss = partial(classification_loss, term=token_weighted(cross_entropy), class_weights=WEIGHTS, normalize="weights")
    torch.testing.assert_close(loss(logits, labels), (weight * nll).sum() / weight.sum(), rtol=0, atol=1e-13)


def test_all_weights_zero_gives_zero():
    logits = normal(B, C).requires_grad_()
    loss = classification_loss(logits, LABELS, class_weights=[0.0] * C, normalize="weights")
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logit_adjustment_equals_the_formula_of_the_paper(dtype):
    """Menon et al. 2021, equation 10: the priors are added inside the softmax, in float32."""
    prior = torch.tensor([0.7, 0.2, 0.09, 0.01], dtype=torch.float64)
    logits = normal(B, C, dtype=dtype)
    total = 0.0
    for x, y in zip(logits.double(), LABELS.tolist(), strict=True):
        if y != N:
            total -= math.log(float(prior[y] * x[y].exp() / (prior * x.exp()).sum()))
    found = classification_loss(logits, LABELS, logit_adjustment=prior.log())
    assert float(found) == pytest.approx(total / KNOWN, rel=1e-6 if dtype != torch.float64 else 1e-13)
    found = gradient(lambda x: classification_loss(x, LABELS, logit_adjustment=prior.log()), logits)
    expected = gradient(lambda x: F.cross_entropy(x + prior.log(), LABELS), logits.double())
    torch.testing.assert_close(found, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_margins_equal_the_formula_of_the_paper(scale):
    """Cao et al. 2019, equation 12: the margin is subtracted from the label's logit only."""
    margins, logits, total = [0.5, 0.1, 0.2, 0.4], scale * normal(B, C), 0.0
    for x, y in zip(logits.tolist(), LABELS.tolist(), strict=True):
        if y != N:
            others = [x[j] for j in range(C) if j != y]
            lowered = x[y] - scale * margins[y]
            top = max([lowered, *others])
            total -= lowered - top - math.log(sum(math.exp(value - top) for value in [lowered, *others]))
    found = classification_loss(logits, LABELS, margins=[scale * margin for margin in margins])
    assert float(found) == pytest.approx(total / KNOWN, rel=1e-12)


@pytest.mark.parametrize("labels", [torch.tensor([[0, N, 2], [N, N, 3]]), None], ids=["hard", "soft"])
def test_token_loss_equals_the_loss_of_a_flattened_batch(labels):
    logits = normal(2, 3, C)
    labels = SOFT.view(2, 3, C) if labels is None else labels
    flat = labels.flatten(0, 1) if labels.is_floating_point() else labels.flatten()
    assert_same(
        lambda x: token_classification_loss(x, labels, class_weights=WEIGHTS, label_smoothing=0.1),
        lambda x: classification_loss(x.flatten(0, 1), flat, class_weights=WEIGHTS, label_smoothing=0.1),
        logits,
    )


def bce(logits: torch.Tensor, labels: torch.Tensor = MULTI, **options) -> torch.Tensor:
    known = labels != N
    values = F.binary_cross_entropy_with_logits(logits, labels.where(known, 0).to(logits), **options, reduction="none")
    return values[known].mean()


def test_labels_of_weight_zero_may_have_an_infinite_loss():
    """A class with a logit of -inf, whose labels have weight 0."""
    logits = torch.tensor([[0.0, -torch.inf]], requires_grad=True)
    loss = multi_label_loss(logits * 1, torch.ones(1, 2), pos_weight=[1.0, 0.0])
    (found,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(math.log(2) / 2)
    assert found.tolist() == [[-0.25, 0.0]]


@pytest.mark.parametrize("pos_weight", [None, WEIGHTS])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float16])
def test_multi_label_equals_torch_binary_cross_entropy(pos_weight, dtype):
    weight = pos_weight and WEIGHT_TENSOR
    assert_same(
        lambda x: multi_label_loss(x, MULTI.to(dtype), pos_weight=pos_weight),
        lambda x: bce(x, pos_weight=weight),
        normal(B, C),
    )


def test_multi_label_with_probabilities_and_smoothing():
    probs = normal(B, C, seed=3).sigmoid()
    assert_same(lambda x: multi_label_loss(x, probs), lambda x: bce(x, probs), normal(B, C))
    smoothed = torch.where(MULTI == N, N, 0.8 * MULTI.double() + 0.1)
    assert_same(lambda x: multi_label_loss(x, MULTI, label_smoothing=0.2), lambda x: bce(x, smoothed), normal(B, C))


def test_multi_label_takes_boolean_labels():
    labels = MULTI[3:4] == 1
    torch.testing.assert_close(multi_label_loss(normal(1, C), labels), bce(normal(1, C), labels.long()))


def asymmetric_formula(x: float, y: int, gamma_pos: float, gamma_neg: float, clip: float) -> float:
    """Ridnik et al. 2021, equations 4 to 7."""
    p = 1 / (1 + math.exp(-x))
    shifted = max(p - clip, 0.0)
    return -((1 - p) ** gamma_pos * math.log(p)) if y else -(shifted**gamma_neg * math.log(1 - shifted))


@pytest.mark.parametrize(
    "options", [(0.0, 4.0, 0.05), (1.0, 4.0, 0.05), (2.0, 2.0, 0.0), (0.0, 0.5, 0.2), (0.0, 0.0, 0.2)]
)
def test_asymmetric_equals_the_formula_of_the_paper(options):
    logits = normal(B, C)
    names = dict(zip(("gamma_pos", "gamma_neg", "clip"), options, strict=True))
    total = sum(
        asymmetric_formula(float(logits[place]), int(MULTI[place]), *options)
        for place in map(tuple, (MULTI != N).nonzero().tolist())
    )
    loss = partial(multi_label_loss, term=partial(asymmetric, **names))
    assert float(loss(logits, MULTI)) == pytest.approx(total / MULTI_KNOWN, rel=1e-12)


def test_asymmetric_with_equal_exponents_is_binary_focal():
    logits = normal(B, C)
    torch.testing.assert_close(
        multi_label_loss(logits, MULTI, term=partial(asymmetric, gamma_pos=2.0, gamma_neg=2.0, clip=0.0)),
        multi_label_loss(logits, MULTI, term=focal),
        rtol=0,
        atol=1e-13,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("term", [cross_entropy, focal, asymmetric, partial(asymmetric, gamma_neg=0.5, clip=0.0)])
def test_extreme_logits_stay_finite(term, dtype):
    logits = torch.tensor([[6e4, -6e4, 6e4, -6e4, 0.0]], dtype=dtype)
    labels = torch.tensor([[1, 1, 0, 0, 1]])
    assert multi_label_loss(logits, labels, term=term).isfinite()
    assert gradient(lambda x: multi_label_loss(x, labels, term=term), logits).isfinite().all()


def test_token_weights_per_label_and_per_sample():
    logits, weights = normal(B, C), torch.linspace(0, 2, B * C, dtype=torch.float64).view(B, C)
    known = MULTI != N
    values = F.binary_cross_entropy_with_logits(logits, MULTI.double(), reduction="none")
    for given in (weights, weights[:, 1]):
        found = multi_label_loss(logits, {"labels": MULTI, "token_weights": given}, term=token_weighted(cross_entropy))
        per_label = given if given.ndim == 2 else given[:, None].expand(B, C)
        torch.testing.assert_close(found, (per_label * values)[known].sum() / MULTI_KNOWN, rtol=0, atol=1e-13)


def test_coral_equals_the_formula_of_the_paper():
    """Cao et al. 2020, equation 4, as written in the authors' code."""
    levels = torch.tensor([[float(y > k) for k in range(C)] for y in LABELS.tolist() if y != N])

    def expected(x):
        x = x[HAVE_LABEL]
        return -(F.logsigmoid(x) * levels + (F.logsigmoid(x) - x) * (1 - levels)).sum(1).mean()

    assert_same(lambda x: ordinal_loss(x, LABELS), expected, normal(B, C))


def test_corn_equals_the_formula_of_the_paper_but_for_the_divisor():
    """Shi et al. 2021, section 3.3: threshold k has the samples above threshold k - 1. Here samples divide."""

    def expected(x):
        total, terms = 0.0, 0
        known = [(row, y) for row, y in zip(x, LABELS.tolist(), strict=True) if y != N]
        for k in range(C):
            for row, y in known:
                if y > k - 1:
                    p = 1 / (1 + (-row[k]).exp())
                    total = total - (p.log() if y > k else (1 - p).log())
                    terms += 1
        assert terms == 1 + 4 + 2 + 2
        return total / KNOWN

    assert_same(lambda x: ordinal_loss(x, LABELS, levels=corn_levels), expected, normal(B, C), tolerance=1e-12)


def test_levels():
    assert coral_levels(torch.tensor([2]), 4).tolist() == [[1, 1, 0, 0]]
    assert corn_levels(torch.tensor([2]), 4).tolist() == [[1, 1, 0, N]]


LOSSES = {
    "hard": (partial(classification_loss, class_weights=WEIGHTS, label_smoothing=0.1), LABELS),
    "soft": (partial(classification_loss, term=weighted_sum((1, focal), (0.1, lambda entropy: entropy))), SOFT),
    "multi-label": (partial(multi_label_loss, term=asymmetric, pos_weight=WEIGHTS, label_smoothing=0.1), MULTI),
    "ordinal": (ordinal_loss, LABELS),
}
every_loss = pytest.mark.parametrize(("loss", "labels"), LOSSES.values(), ids=LOSSES)


@every_loss
def test_rows_without_a_label_may_be_nan(loss, labels):
    unlabeled = (labels if labels.ndim > 1 else labels[:, None]).eq(N).all(-1)
    spoilt = normal(B, C).masked_fill(unlabeled[:, None], torch.nan)
    torch.testing.assert_close(loss(spoilt, labels), loss(normal(B, C), labels))
    assert not gradient(lambda x: loss(x, labels), spoilt)[unlabeled].any()


@every_loss
def test_outputs_of_any_form_give_the_same_loss(loss, labels):
    logits, hidden = normal(B, C), normal(B, 3, 5)
    for outputs in (
        SequenceClassifierOutput(logits=logits, hidden_states=(hidden,)),
        {"loss": torch.tensor(1.0), "logits": logits},
        (torch.tensor(1.0), logits, (hidden,)),
    ):
        assert loss(outputs, labels) == loss(outputs, {"labels": labels}) == loss(logits, labels)
    assert loss({"scores": logits}, labels, select=lambda outputs: outputs["scores"]) == loss(logits, labels)


@every_loss
def test_autocast_changes_nothing(loss, labels):
    logits = normal(B, C, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = loss(logits, labels)
    assert inside == loss(logits, labels)
    assert inside.dtype == torch.float32


def test_labels_of_one_class_only():
    assert classification_loss(torch.ones(2, 1), torch.tensor([0, 0])).item() == 0.0
    assert float(classification_loss(torch.zeros(3, 2), torch.tensor([1, 1, 1]))) == pytest.approx(math.log(2))
    assert float(ordinal_loss(torch.zeros(2, 1), torch.tensor([0, 1]))) == pytest.approx(math.log(2))


def test_class_of_probability_zero_may_have_a_logit_of_minus_infinity():
    logits = normal(B, C).index_fill_(1, torch.tensor(2), -torch.inf)
    found = gradient(lambda x: classification_loss(x, SOFT), logits)
    assert classification_loss(logits, SOFT).isfinite()
    assert found.isfinite().all()


OTHERS = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).expand(B, C)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: classification_loss(x, LABELS + 5), "label -95 is out of range"),
        (lambda x: classification_loss(x, LABELS.clamp(max=3).where(LABELS != 3, 9)), "9 is out of range"),
        (lambda x: classification_loss(x, MULTI), "multi_label_loss"),
        (lambda x: classification_loss(x[:, None], LABELS[:, None]), "token_classification_loss"),
        (lambda x: token_classification_loss(x, LABELS), r"class ids \(batch, tokens\)"),
        (lambda x: classification_loss(x, 2 * OTHERS), "a distribution.*multi_label_loss"),
        (lambda x: classification_loss(x, OTHERS.index_fill(1, torch.tensor(3), N)), "a distribution"),
        (lambda x: classification_loss(x, LABELS, label_smoothing=0.1, term=focal), "got term=focal"),
        (lambda x: classification_loss(x, LABELS, normalize="weights"), "cross_entropy has none"),
        (lambda x: token_classification_loss(x[:, None], LABELS[:, None], normalize="items"), "'tokens' or 'weights'"),
        (lambda x: classification_loss(x, SOFT, margins=WEIGHTS), "margins need class ids"),
        (lambda x: multi_label_loss(x, LABELS), "classification_loss"),
        (lambda x: multi_label_loss(x, MULTI + 1), r"labels must be 1 \(present\).*got 2"),
        (lambda x: multi_label_loss(x, MULTI * torch.nan), "got nan.*mask_missing"),
        (lambda x: ordinal_loss(x, LABELS.where(LABELS != 3, 5)), "labels must be 0 to 4"),
        (lambda x: ordinal_loss(x, MULTI), "one logit per threshold"),
        (lambda x: classification_loss(x, LABELS.float()), "integer class ids.*torch.float32"),
        (lambda x: classification_loss(x, LABELS, term=asymmetric), "asks for 'outcome'"),
        (lambda x: multi_label_loss(x, MULTI, term=z_loss), "known.* are log_prob, outcome"),
        (lambda x: multi_label_loss(x, MULTI, term=class_weighted(cross_entropy, [1, 2])), "asks for 'labels'"),
    ],
)
def test_invalid_input_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(normal(B, C))
