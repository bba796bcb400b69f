"""CTC against the sum over all paths, in float64, and its errors."""

import itertools
import math

import pytest
import torch

from lossfns import ctc_loss
from tests.lossfns.cases import N
from tests.lossfns.comparisons import normal

V = 3


def spelled(path, blank=0):
    """The labels that a path of one id per frame spells: merge repeated ids, then remove blanks."""
    return tuple(key for key, _ in itertools.groupby(path) if key != blank)


def by_paths(log_probs, labels, blank=0):
    """Minus the log-probability of all paths that spell the labels (Graves et al. 2006, equation 3)."""
    paths = (p for p in itertools.product(range(V), repeat=len(log_probs)) if spelled(p, blank) == labels)
    return -math.log(math.fsum(math.exp(sum(log_probs[t, k].item() for t, k in enumerate(path))) for path in paths))


LABELS = torch.tensor([[1, 2, N], [2, 2, N], [N, N, N], [1, N, N]])
FRAMES = torch.tensor([5, 4, 5, 2])


def with_lengths(labels=LABELS, frames=FRAMES):
    return {"labels": labels, "input_lengths": torch.as_tensor(frames)}


@pytest.mark.parametrize("blank", [0, 2])
def test_loss_equals_the_sum_over_all_paths(blank):
    logits = normal(4, 5, V)
    labels = LABELS if blank == 0 else torch.where(LABELS > 0, LABELS - 1, LABELS)
    log_probs, total = logits.log_softmax(-1), 0.0
    for row in (0, 1, 3):
        ids = tuple(labels[row][labels[row] != N].tolist())
        total += by_paths(log_probs[row, : FRAMES[row]], ids, blank)
    found = ctc_loss({"logits": logits}, with_lengths(labels), blank=blank)
    assert found.item() == pytest.approx(total / 5, rel=1e-12)
    counted = ctc_loss(logits, with_lengths(labels), torch.tensor([[7], [3]]), blank=blank)
    assert counted.item() == pytest.approx(total / 10)
    without_lengths = ctc_loss(logits, labels, blank=blank)
    assert without_lengths.item() != pytest.approx(total / 5, rel=1e-3)


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (with_lengths(frames=[5, 2, 5, 2]), {}, "row 1 needs at least 3 frames for its 2 labels, got 2"),
        (torch.tensor([[1]] * 3 + [[0]]), {}, "CTC blank id 0"),
        (torch.tensor([[1]] * 3 + [[3]]), {}, "label 3 is out of range"),
        (with_lengths(frames=[5, 6, 5, 2]), {}, "input_lengths must be 0 to 5 frames"),
        (with_lengths() | {"weights": FRAMES}, {}, r"no extra tensor but 'input_lengths', got \['weights'\]"),
        (with_lengths(frames=[5, 4.9, 5, 5]), {}, "input_lengths must be integers.*got torch.float"),
    ],
)
def test_invalid_input_is_refused(labels, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ctc_loss(normal(4, 5, V), labels, **options)


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_symbol_with_a_logit_of_minus_infinity_is_ignored(zero_infinity):
    """torch's own gradient would be NaN for every symbol."""
    logits = normal(4, 5, V)
    widened = torch.cat([logits, torch.full((4, 5, 1), -torch.inf, dtype=logits.dtype)], -1).requires_grad_()
    value = ctc_loss(widened, with_lengths(), zero_infinity=zero_infinity)
    value.backward()
    plain = logits.clone().requires_grad_()
    expected = ctc_loss(plain, with_lengths(), zero_infinity=zero_infinity)
    expected.backward()
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(widened.grad[..., :V], plain.grad, rtol=0, atol=1e-12)
    assert not widened.grad[..., V].any()


def test_zero_infinity_gives_loss_zero_to_a_row_without_a_path():
    logits = normal(4, 5, V).requires_grad_()
    value = ctc_loss(logits, with_lengths(frames=torch.tensor([5, 2, 5, 2])), zero_infinity=True)
    value.backward()
    ids = {0: (1, 2), 3: (1,)}
    expected = sum(by_paths(logits.detach().log_softmax(-1)[row, : FRAMES[row]], key) for row, key in ids.items()) / 5
    assert value.item() == pytest.approx(expected)
    assert not logits.grad[1].any()
