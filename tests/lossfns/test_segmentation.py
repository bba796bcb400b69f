"""Segmentation: the loss against torch on interpolated logits and a loop for Dice, and what it keeps in memory."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from lossfns import class_weighted, cross_entropy, focal, segmentation, segmentation_loss
from tests.lossfns.cases import N, dice_by_loop

CLASSES = 3


def batch(dtype=torch.float64, size=(7, 6), logits=(3, 4)):
    """Four images: with holes, of one class, without a label, whole."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, CLASSES, *logits, dtype=torch.float64, generator=generator) * 2
    labels = torch.randint(CLASSES, (4, *size), generator=generator)
    labels[0][torch.rand(size, generator=generator) < 0.3] = N
    labels[1] = 2
    labels[2] = N
    return x.to(dtype), labels


def reference(x, labels, *, dice=0.0, weight=1.0):
    up = F.interpolate(x, size=labels.shape[1:], mode="bilinear", align_corners=False)
    value = weight * F.cross_entropy(up, labels, ignore_index=N)
    if not dice:
        return value
    labelled = (labels != N).flatten(1).any(1)
    return value + dice * dice_by_loop(up[labelled], labels[labelled])


SUMS = {
    "cross-entropy": (segmentation_loss, {}),
    "dice": (partial(segmentation_loss, term=None, dice=1.0), {"dice": 1.0, "weight": 0.0}),
    "their sum": (partial(segmentation_loss, dice=0.7), {"dice": 0.7}),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("size", [(7, 6), (3, 4), (12, 16)], ids=["odd", "the logits' own", "fourfold"])
def test_value_and_gradient(name, size):
    loss, options = SUMS[name]
    x, labels = batch(size=size)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    found, expected = loss({"logits": leaves[0]}, labels), reference(leaves[1], labels, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    found.backward()
    expected.backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=0, atol=1e-13)


def test_dice_by_hand():
    """Two pixels of class 0 and one of class 1, equal probabilities: 2 * 1 / (2 + 1.5) and 2 * 0.5 / (1 + 1.5)."""
    labels = torch.tensor([[[0, 0], [1, N]]])
    found = segmentation_loss(torch.zeros(1, 2, 2, 2, dtype=torch.float64), labels, term=None, dice=1.0)
    assert found.item() == pytest.approx(1 - (2 / 3.5 + 1 / 2.5) / 2, rel=1e-14)


def test_a_perfect_map_costs_nothing():
    labels = torch.randint(CLASSES, (2, 5, 5), generator=torch.Generator().manual_seed(0))
    x = 1e3 * F.one_hot(labels, CLASSES).permute(0, 3, 1, 2).float()
    assert segmentation_loss(x, labels, dice=1.0).item() == 0.0


def test_other_terms_and_class_weights():
    x, labels = batch()
    up = F.interpolate(x, size=labels.shape[1:], mode="bilinear", align_corners=False)
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    nll = F.cross_entropy(up, labels, reduction="none")
    expected = (nll * weight[labels.clamp(min=0)])[labels != N].mean()
    found = segmentation_loss(x, labels, term=class_weighted(cross_entropy, weight))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    hard = (nll * (1 - (-nll).exp()) ** 2)[labels != N].mean()
    torch.testing.assert_close(segmentation_loss(x, labels, term=focal), hard, rtol=0, atol=1e-13)


def test_interpolated_logits_are_never_in_memory_together(monkeypatch):
    """The graph keeps tensors of the size of the logits. Interpolated, they are 256 times as large."""
    x, labels = batch(torch.float32, size=(64, 64), logits=(4, 4))
    sizes, saved = [], []
    interpolate = F.interpolate
    monkeypatch.setattr(
        segmentation.F, "interpolate", lambda x, **options: sizes.append(x.shape) or interpolate(x, **options)
    )
    leaf = x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        value = segmentation_loss(leaf.clone(), labels, dice=1.0)
    assert {shape[0] for shape in sizes} == {1}
    assert max(saved) <= x.numel()
    value.backward()
    assert len(sizes) == 8, "once per image in forward, and again in backward"


@pytest.mark.parametrize(
    ("x", "labels", "options", "message"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4).long(), {"term": None}, "nothing to minimize"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 8).long(), {}, "must not have a higher resolution than labels"),
        (torch.zeros(2, 3, 4, 4), torch.full((2, 4, 4), 255), {}, r"label 255 is out of range.*replace_labels"),
    ],
)
def test_inputs_that_are_refused(x, labels, options, message):
    with pytest.raises(ValueError, match=message):
        segmentation_loss({"logits": x}, labels, **options)
