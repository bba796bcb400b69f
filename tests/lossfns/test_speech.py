"""The loss of speech against the sum over all paths, and what it refuses before any work."""

import itertools
import math

import pytest
import torch

from lossfns import ctc_loss
from tests.lossfns.cases import N

V = 3


def normal(*shape, seed=0):
    return 2 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def said(path, blank=0):
    """What a path of one id a frame says: runs are one, blanks are none."""
    return tuple(key for key, _ in itertools.groupby(path) if key != blank)


def by_paths(log_probs, labels, blank=0):
    """Minus the log of the chance of all paths that say the labels (Graves et al. 2006, equation 3)."""
    paths = itertools.product(range(V), repeat=len(log_probs))
    chances = [
        math.exp(sum(log_probs[t, k].item() for t, k in enumerate(path)))
        for path in paths
        if said(path, blank) == labels
    ]
    return -math.log(math.fsum(chances))


LABELS = torch.tensor([[1, 2, N], [2, 2, N], [N, N, N], [1, N, N]])
FRAMES = torch.tensor([5, 4, 5, 2])


def labelled(labels=LABELS, frames=FRAMES):
    return {"labels": labels, "input_lengths": frames}


@pytest.mark.parametrize("blank", [0, 2])
def test_all_paths(blank):
    logits = normal(4, 5, V)
    labels = LABELS if blank == 0 else torch.where(LABELS > 0, LABELS - 1, LABELS)
    log_probs, total = logits.log_softmax(-1), 0.0
    for row in (0, 1, 3):
        ids = tuple(labels[row][labels[row] != N].tolist())
        total += by_paths(log_probs[row, : FRAMES[row]], ids, blank)
    found = ctc_loss({"logits": logits}, labelled(labels), blank=blank)
    assert found.item() == pytest.approx(total / 5, rel=1e-12)
    assert ctc_loss(logits, labelled(labels), torch.tensor([[7], [3]]), blank=blank).item() == pytest.approx(total / 10)
    assert ctc_loss(logits, labels, blank=blank).item() != pytest.approx(total / 5, rel=1e-3), "pads were heard"


def test_gradcheck():
    assert torch.autograd.gradcheck(lambda x: ctc_loss(x, labelled()), normal(4, 5, V).requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precision(dtype):
    logits = normal(4, 5, V).to(dtype)
    found = ctc_loss(logits, labelled())
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(ctc_loss(logits.double(), labelled()).item(), rel=1e-6)


@pytest.mark.parametrize("count", [None, 0, 7])
def test_no_label_at_all(count):
    leaf = normal(4, 5, V).requires_grad_()
    value = ctc_loss(leaf.clone(), torch.full_like(LABELS, N), count)
    value *= 1
    value.backward()
    assert value.item() == 0.0
    assert not leaf.grad.any()


@pytest.mark.parametrize(
    ("labels", "options", "error", "message"),
    [
        (labelled(frames=torch.tensor([5, 2, 5, 2])), {}, ValueError, "row 1 has 2 frames for 2 labels, which need 3"),
        (torch.tensor([[1]] * 3 + [[0]]), {}, ValueError, "contain the blank 0"),
        (torch.tensor([[1]] * 3 + [[3]]), {}, ValueError, "label 3 is out of range"),
        (
            labelled(frames=torch.tensor([5, 6, 5, 2])),
            {},
            ValueError,
            "input_lengths must be frames of the logits, 0 to 5",
        ),
        (
            labelled(frames=torch.tensor([5, 4.9, 5, 5])),
            {},
            TypeError,
            r"input_lengths must be integers, not torch.float",
        ),
        (labelled() | {"weights": FRAMES}, {}, ValueError, r"reads only 'input_lengths'.*\['weights'\]"),
        (LABELS, {"blank": 3}, ValueError, "blank=3 is none of the 3 ids"),
        (LABELS[:2], {}, ValueError, "do not fit"),
        (LABELS.double(), {}, TypeError, "integer class ids"),
    ],
)
def test_what_is_refused(labels, options, error, message):
    with pytest.raises(error, match=message):
        ctc_loss(normal(4, 5, V), labels, **options)


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_a_symbol_that_is_ruled_out(zero_infinity):
    """As if it were not there: torch makes a gradient of NaN of it, for every symbol."""
    logits = normal(4, 5, V)
    ruled_out = torch.cat([logits, torch.full((4, 5, 1), -torch.inf, dtype=logits.dtype)], -1).requires_grad_()
    value = ctc_loss(ruled_out, labelled(), zero_infinity=zero_infinity)
    value.backward()
    plain = logits.clone().requires_grad_()
    expected = ctc_loss(plain, labelled(), zero_infinity=zero_infinity)
    expected.backward()
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(ruled_out.grad[..., :V], plain.grad, rtol=0, atol=1e-12)
    assert not ruled_out.grad[..., V].any()


def test_a_row_without_a_path_may_cost_nothing():
    logits = normal(4, 5, V).requires_grad_()
    value = ctc_loss(logits, labelled(frames=torch.tensor([5, 2, 5, 2])), zero_infinity=True)
    value.backward()
    ids = {0: (1, 2), 3: (1,)}
    expected = sum(by_paths(logits.detach().log_softmax(-1)[row, : FRAMES[row]], key) for row, key in ids.items()) / 5
    assert value.item() == pytest.approx(expected)
    assert not logits.grad[1].any()
