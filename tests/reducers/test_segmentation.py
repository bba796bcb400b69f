"""Confusion matrices of images, against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix

from reducers import segmentation_counts

from .inputs import N, normal


@pytest.mark.parametrize("size", [(4, 4), (9, 6)])
def test_pixels_are_counted_at_the_size_of_the_labels(size):
    logits = normal(3, 5, 4, 4, dtype=torch.float32)
    labels = torch.randint(0, 5, (3, *size), generator=torch.Generator().manual_seed(0))
    labels[0, :2], labels[2] = N, N
    found = segmentation_counts((torch.tensor(1.0), logits), labels)["confusion"]
    large = torch.nn.functional.interpolate(logits, size=size, mode="bilinear", align_corners=False)
    for row, (target, best) in enumerate(zip(labels.numpy(), large.argmax(1).numpy(), strict=True)):
        there = target != N
        expected = confusion_matrix(target[there], best[there], labels=range(5)) if there.any() else np.zeros(25)
        assert found[row].tolist() == expected.ravel().tolist()


def test_images_with_nan_logits_are_not_counted():
    logits, labels = normal(3, 5, 2, 2), torch.zeros(3, 2, 2, dtype=torch.long)
    expected = segmentation_counts(logits, labels)["confusion"]
    logits[0, 3, 1, 1], logits[1, :, 0, 0], labels[1, 0, 0] = torch.nan, torch.nan, N
    expected[0], expected[1] = -1, segmentation_counts(logits[1:2].nan_to_num(), labels[1:2])["confusion"][0]
    assert torch.equal(segmentation_counts(logits, labels)["confusion"], expected)


def test_labels_without_pixels_are_refused():
    with pytest.raises(ValueError, match=r"not empty, got \(2, 0, 2\)"):
        segmentation_counts(normal(2, 5, 2, 2), torch.zeros(2, 0, 2, dtype=torch.long), select=lambda outputs: outputs)
