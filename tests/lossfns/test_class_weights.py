"""Class weights against scikit-learn, the papers' formulas and their own promise: a mean of 1 over the labels."""

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from lossfns import (
    balanced_class_weights,
    balanced_pos_weight,
    class_counts,
    classification_loss,
    effective_number_weights,
    ldam_margins,
    multi_label_loss,
)

LABELS = [0, 0, 0, 0, 0, 2, 1, 1, 2, 2]
FORMS = {
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


@pytest.mark.parametrize("labels", FORMS.values(), ids=FORMS)
def test_counts_of_labels_in_any_container(labels):
    counts = class_counts(labels, num_classes=4)
    assert counts.tolist() == [5.0, 2.0, 3.0, 0.0]
    assert counts.dtype == torch.float64


def test_balanced_weights_are_scikit_learns():
    expected = compute_class_weight("balanced", classes=np.arange(3), y=LABELS)
    np.testing.assert_allclose(balanced_class_weights(LABELS, num_classes=3), expected, rtol=1e-15)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999])
def test_effective_numbers_are_the_papers(beta):
    """Cui et al. 2019: E_n = 1 + beta + ... + beta^(n - 1), and weights in proportion to 1 / E_n."""
    effective = [sum(beta**power for power in range(n)) for n in (5, 2, 3)]
    weights = effective_number_weights(LABELS, num_classes=3, beta=beta)
    torch.testing.assert_close(weights / weights[0], torch.tensor([effective[0] / e for e in effective]).double())
    assert sum(weights[label].item() for label in LABELS) / len(LABELS) == pytest.approx(1.0, rel=1e-14)


def test_weights_do_not_change_the_size_of_the_loss():
    """The mean weight over the labels is 1: a model that knows nothing has the same loss with and without."""
    for weights in (
        balanced_class_weights(LABELS, num_classes=3),
        effective_number_weights(LABELS, num_classes=3, beta=0.9),
    ):
        found = classification_loss(torch.zeros(10, 3), torch.tensor(LABELS), class_weights=weights)
        assert found.item() == pytest.approx(np.log(3), rel=1e-6)
    paper = (1 - 0.9) / (1 - 0.9 ** class_counts(LABELS, num_classes=3))  # scaled to a sum of C: not a mean of 1
    paper *= 3 / paper.sum()
    assert abs(paper[LABELS].mean() - 1) > 0.05


def test_pos_weight_balances_each_label():
    labels = torch.tensor([[1, 0], [0, 1], [0, 1], [0, -100], [-100, 1]])
    weights = balanced_pos_weight(labels, num_classes=2)
    assert weights.tolist() == [3.0, 1 / 3]
    logits = torch.zeros(5, 2).requires_grad_()
    multi_label_loss(logits, labels, pos_weight=weights).backward()
    # At a chance of one half the pulls of present and absent labels cancel for each class.
    torch.testing.assert_close(logits.grad.sum(0), torch.zeros(2), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "labels",
    [[[1, 0], [0, 1]], np.array([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[True, False], [False, True]])],
    ids=["list", "array", "bool"],
)
def test_pos_weight_of_any_container(labels):
    assert balanced_pos_weight(labels, num_classes=2).tolist() == [1.0, 1.0]


def test_margins_are_the_papers():
    """Cao et al. 2019, equation 13: C / n^(1/4), with C such that the largest is 0.5."""
    margins = ldam_margins([5000, 500, 50])
    constant = 0.5 * 50**0.25
    torch.testing.assert_close(margins, torch.tensor([constant / n**0.25 for n in (5000, 500, 50)]).double())


DATASET = [{"label": 0}, {"label": 1}]  # gives its rows


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: balanced_class_weights(LABELS, num_classes=4), ValueError, r"classes \[3\] have no label"),
        (lambda: effective_number_weights(LABELS, num_classes=4), ValueError, r"classes \[3\] have no label"),
        (lambda: balanced_class_weights([], num_classes=2), ValueError, r"classes \[0, 1\] have no label"),
        (lambda: balanced_class_weights([-100], num_classes=1), ValueError, r"classes \[0\] have no label"),
        (lambda: balanced_class_weights(LABELS, num_classes=2), ValueError, "label 2 is out of range.*num_classes=3"),
        (lambda: balanced_class_weights(DATASET, num_classes=2), TypeError, r'numbers.*dict.*dataset\["label"\]'),
        (lambda: class_counts(["cat", "dog"], num_classes=2), TypeError, "numbers.*str"),
        (lambda: class_counts({"label": [0, 1]}, num_classes=2), TypeError, "numbers.*str"),
        (lambda: class_counts(np.array(["cat"]), num_classes=2), TypeError, "numbers.*ndarray"),
        (lambda: balanced_pos_weight(DATASET, num_classes=2), TypeError, "numbers.*dict"),
        (lambda: ldam_margins({0: 1.0, 1: 2.0}), ValueError, "counts must be one finite number.*a class"),
        (lambda: class_counts([0, -1], num_classes=2), ValueError, "label -1 is out of range"),
        (lambda: class_counts([0.0, 1.0], num_classes=2), TypeError, "integer class ids, not torch.float32"),
        (lambda: effective_number_weights(LABELS, num_classes=3, beta=1.0), ValueError, "beta"),
        (lambda: balanced_pos_weight([[1, 0]], num_classes=2), ValueError, r"classes \[0, 1\] are nowhere present"),
        (lambda: balanced_pos_weight([[1, 1], [1, 0]], num_classes=2), ValueError, r"classes \[0\] are nowhere"),
        (lambda: balanced_pos_weight([[1, 0.5]], num_classes=2), ValueError, "must be 1, 0 or -100"),
        (lambda: balanced_pos_weight([[1, 0, 1]], num_classes=2), ValueError, r"shape \(N, 2\)"),
        (lambda: ldam_margins([0, 3]), ValueError, r"classes \[0\] have no label"),
        (lambda: balanced_class_weights(LABELS), TypeError, "num_classes"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
