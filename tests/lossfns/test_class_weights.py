"""Class weights against scikit-learn and the papers' formulas; their mean over the labels is 1."""

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

import lossfns

LABELS = [0, 0, 0, 0, 0, 2, 1, 1, 2, 2]
CONTAINERS = {
    "list": LABELS,
    "tensor": torch.tensor(LABELS, dtype=torch.int32),
    "array": np.array(LABELS, np.int16),
    "matrix": torch.tensor(LABELS).view(2, 5),
    "rows": [torch.tensor(LABELS[:4]), np.array(LABELS[4:])],
    "ragged": [LABELS[:3], [], LABELS[3:]],
    "with -100": [[-100, *LABELS[:5]], [*LABELS[5:], -100, -100]],
    "iterator": iter(LABELS),
    "tensors": [*torch.tensor(LABELS)],
}


@pytest.mark.parametrize("labels", CONTAINERS.values(), ids=CONTAINERS)
def test_class_counts_of_any_container(labels):
    counts = lossfns.class_counts(labels, num_classes=4)
    assert counts.tolist() == [5.0, 2.0, 3.0, 0.0]
    assert counts.dtype == torch.float64


def test_balanced_weights_equal_scikit_learn():
    expected = compute_class_weight("balanced", classes=np.arange(3), y=LABELS)
    np.testing.assert_allclose(lossfns.balanced_class_weights(LABELS, num_classes=3), expected, rtol=1e-15)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999])
def test_effective_number_weights_equal_the_formula_of_the_paper(beta):
    """Cui et al. 2019: E_n = 1 + beta + ... + beta^(n - 1), and weights in proportion to 1 / E_n."""
    effective = [sum(beta**power for power in range(n)) for n in (5, 2, 3)]
    weights = lossfns.effective_number_weights(LABELS, num_classes=3, beta=beta)
    torch.testing.assert_close(weights / weights[0], torch.tensor([effective[0] / e for e in effective]).double())
    assert sum(weights[label].item() for label in LABELS) / len(LABELS) == pytest.approx(1.0, rel=1e-14)


def test_weights_keep_the_scale_of_the_loss():
    """The mean weight over the labels is 1: uniform predictions have the same loss with and without weights."""
    for weights in (
        lossfns.balanced_class_weights(LABELS, num_classes=3),
        lossfns.effective_number_weights(LABELS, num_classes=3, beta=0.9),
    ):
        found = lossfns.classification_loss(torch.zeros(10, 3), torch.tensor(LABELS), class_weights=weights)
        assert found.item() == pytest.approx(np.log(3), rel=1e-6)
    paper = (1 - 0.9) / (1 - 0.9 ** lossfns.class_counts(LABELS, num_classes=3))  # scaled to a sum of C
    paper *= 3 / paper.sum()
    assert abs(paper[LABELS].mean() - 1) > 0.05


def test_pos_weight_balances_each_label():
    labels = torch.tensor([[1, 0], [0, 1], [0, 1], [0, -100], [-100, 1]])
    weights = lossfns.balanced_pos_weight(labels, num_classes=2)
    assert weights.tolist() == [3.0, 1 / 3]
    logits = torch.zeros(5, 2).requires_grad_()
    lossfns.multi_label_loss(logits, labels, pos_weight=weights).backward()
    # At a probability of one half, the gradients of present and absent labels cancel for each class.
    torch.testing.assert_close(logits.grad.sum(0), torch.zeros(2), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "labels",
    [[[1, 0], [0, 1]], np.array([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[True, False], [False, True]])],
    ids=["list", "array", "bool"],
)
def test_pos_weight_of_any_container(labels):
    assert lossfns.balanced_pos_weight(labels, num_classes=2).tolist() == [1.0, 1.0]


def test_ldam_margins_equal_the_formula_of_the_paper():
    """Cao et al. 2019, equation 13: C / n^(1/4), with C such that the largest is 0.5."""
    margins = lossfns.ldam_margins([5000, 500, 50])
    constant = 0.5 * 50**0.25
    torch.testing.assert_close(margins, torch.tensor([constant / n**0.25 for n in (5000, 500, 50)]).double())


DATASET = [{"label": 0}, {"label": 1}]  # iterates over its rows


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lossfns.balanced_class_weights(LABELS, num_classes=4), r"got none for classes \[3\]"),
        (lambda: lossfns.balanced_class_weights([], num_classes=2), r"got none for classes \[0, 1\]"),
        (lambda: lossfns.balanced_class_weights(LABELS, num_classes=2), "label 2 is out of range.*num_classes=3"),
        (lambda: lossfns.ldam_margins({0: 1.0, 1: 2.0}), "counts must be one finite number.* class"),
        (lambda: lossfns.balanced_pos_weight([[1, 0]], num_classes=2), r"present and one absent .* classes \[0, 1\]"),
        (lambda: lossfns.balanced_pos_weight([[1, 1], [1, 0]], num_classes=2), r"got none for classes \[0\]"),
        (lambda: lossfns.balanced_pos_weight([[1, 0, 1]], num_classes=2), r"= \(N, 2\)"),
        (lambda: lossfns.balanced_class_weights(DATASET, num_classes=2), r'numbers.*dict.*dataset\["label"\]'),
        (lambda: lossfns.class_counts(["cat", "dog"], num_classes=2), "numbers.*str"),
    ],
)
def test_invalid_input_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
