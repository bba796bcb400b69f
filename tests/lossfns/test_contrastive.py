"""The losses that compare the samples of a batch, against loops over pairs and triplets."""

import math
from operator import itemgetter

import pytest
import torch
import torch.nn.functional as F

from lossfns import batch_hard, clip_loss, info_nce_loss, semi_hard, triplet_loss
from tests.lossfns.cases import N


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


SIMILARITIES = 2 * normal(6, 6)
IDS = torch.tensor([7, 8, 8, 9, N, 7])


def by_loop(similarities, ids=None, *, symmetric):
    """The cross-entropy of each sample against the others that are neither left out nor the same."""
    ids = list(range(len(similarities))) if ids is None else ids.tolist()
    values = []
    for matrix in (similarities, similarities.T)[: 1 + symmetric]:
        for i, row in enumerate(matrix.tolist()):
            others = [row[j] for j, key in enumerate(ids) if key not in (ids[i], N)]
            if ids[i] != N:
                values.append(math.log(sum(map(math.exp, [row[i], *others]))) - row[i])
    return math.fsum(values) / len(values)


def clip_of(similarities, labels=None, count=None):
    return clip_loss({"logits_per_text": similarities}, labels, count)


@pytest.mark.parametrize("ids", [None, IDS, torch.arange(6)], ids=["all differ", "duplicates", "different ids"])
def test_clip_loss_equals_the_formula(ids):
    found = clip_of(SIMILARITIES, ids)
    assert found.item() == pytest.approx(by_loop(SIMILARITIES, ids, symmetric=True), rel=1e-13)
    assert found.item() != pytest.approx(by_loop(SIMILARITIES, ids, symmetric=False), rel=1e-3)


def test_duplicates_as_negatives_would_increase_the_loss():
    """Broken: without masking, two samples that are the same repel each other."""
    assert clip_of(SIMILARITIES, IDS) < clip_of(SIMILARITIES, torch.where(IDS == N, IDS, torch.arange(6)))


def test_equal_similarities_give_the_logarithm_of_the_batch_size():
    assert clip_of(torch.zeros(8, 8)).item() == pytest.approx(math.log(8))


EMBEDDINGS = {"queries": normal(6, 4), "keys": normal(6, 4, seed=1)}
SIDES = itemgetter("queries", "keys")


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("ids", [None, IDS], ids=["all differ", "duplicates"])
def test_info_nce_equals_the_formula(ids, symmetric):
    cosines = F.cosine_similarity(EMBEDDINGS["queries"][:, None], EMBEDDINGS["keys"], dim=-1)
    found = info_nce_loss(EMBEDDINGS, ids, select=SIDES, temperature=0.5, symmetric=symmetric)
    assert found.item() == pytest.approx(by_loop(cosines / 0.5, ids, symmetric=symmetric), rel=1e-13)


POINTS = normal(9, 3, seed=3)
CLASSES = torch.tensor([0, 0, 0, 1, 1, 2, N, 1, 0])


def triplet_formula(points, classes, margin, hardest):
    """The loss by a loop over anchors; an anchor without a triplet has loss 0."""
    values = []
    for i, anchor in enumerate(classes.tolist()):
        if anchor == N:
            continue
        kept = [j for j, other in enumerate(classes.tolist()) if other != N and j != i]
        distance = {j: math.dist(points[i].tolist(), points[j].tolist()) for j in kept}
        same = [distance[j] for j in kept if classes[j] == anchor]
        others = [distance[j] for j in kept if classes[j] != anchor]
        if not same or not others:
            values.append(0.0)
        elif hardest:
            values.append(max(0.0, margin + max(same) - min(others)))
        else:
            chosen = [min([d for d in others if d > p] or [max(others)]) for p in same]
            losses = [max(0.0, margin + p - n) for p, n in zip(same, chosen, strict=True)]
            values.append(math.fsum(losses) / len(same))
    return math.fsum(values) / len(values)


@pytest.mark.parametrize("margin", [0.2, 1.5])
@pytest.mark.parametrize("mining", [batch_hard, semi_hard])
def test_triplet_loss_equals_the_formula(mining, margin):
    found = triplet_loss({"logits": POINTS}, CLASSES, mining=mining, margin=margin)
    expected = triplet_formula(POINTS, CLASSES, margin, mining is batch_hard)
    assert found.item() == pytest.approx(expected, rel=1e-13)
    assert found.item() != pytest.approx(triplet_formula(POINTS, CLASSES, margin, mining is semi_hard), rel=1e-3)


@pytest.mark.parametrize("mining", [batch_hard, semi_hard])
@pytest.mark.parametrize(
    "classes", [torch.full((9,), N), torch.zeros(9).long(), torch.arange(9)], ids=["none", "one", "all"]
)
def test_no_triplet_gives_zero_with_a_graph(mining, classes):
    leaf = POINTS.clone().requires_grad_()
    value = triplet_loss(leaf, classes, 9, mining=mining)
    value *= 1
    value.backward()
    assert value.item() == 0.0
    assert not leaf.grad.any()


@pytest.mark.parametrize("mining", [batch_hard, semi_hard])
def test_equal_embeddings_have_a_finite_gradient(mining):
    leaf = POINTS[[0, 0, 1, 1]].clone().requires_grad_()
    triplet_loss(leaf, torch.tensor([0, 0, 1, 0]), mining=mining).backward()
    assert leaf.grad.isfinite().all()


def test_distances_of_near_embeddings_are_exact():
    """Far from the origin, differences of squares would lose a distance of 1e-3 in float32."""
    points = torch.tensor([[100.0, 0.0], [100.001, 0.0], [100.0, 0.002]])
    classes = torch.tensor([0, 0, 1])
    found = triplet_loss(points, classes, margin=0.01).item()
    assert found == pytest.approx(triplet_formula(points, classes, 0.01, True), rel=1e-3)
    broken = torch.cdist(points, points, compute_mode="use_mm_for_euclid_dist")
    assert broken[0, 1].item() != pytest.approx(1e-3, rel=0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clip_loss({"logits": SIMILARITIES}), r"logits_per_text' among .*, got \['logits'\].*select="),
        (lambda: clip_of(SIMILARITIES[:4]), r"\(batch, batch\), got \(4, 6\)"),
        (lambda: clip_of(SIMILARITIES, IDS[:4]), r"one id per sample, of shape \(6,\), got \(4,\)"),
        (lambda: info_nce_loss((normal(6, 4), normal(5, 4)), select=tuple), r"got \(6, 4\) and \(5, 4\)"),
        (lambda: triplet_loss({"logits": normal(9, 2, 3)}, CLASSES), r"embeddings must be \(batch, size\)"),
        (lambda: triplet_loss(POINTS, {"labels": CLASSES, "age": CLASSES}), r"extra tensors \['age'\]"),
        (lambda: clip_of(SIMILARITIES, {"labels": IDS, "weights": IDS}), r"extra tensors \['weights'\]"),
        (lambda: info_nce_loss(EMBEDDINGS, {"labels": IDS, "b": IDS, "a": IDS}, select=SIDES), "'a', 'b'"),
    ],
)
def test_invalid_input_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_accumulation_changes_the_negatives_but_not_the_scale():
    """Two micro-batches give the mean of their own losses, which is less than that of the whole batch."""
    halves = SIMILARITIES[:3, :3], SIMILARITIES[3:, 3:]
    found = sum(clip_of(half, None, torch.tensor(6)) for half in halves).item()
    assert found == pytest.approx(sum(by_loop(half, symmetric=True) for half in halves) / 2, rel=1e-13)
    assert found < clip_of(SIMILARITIES).item()
