"""The losses that compare the samples of a batch, against loops over pairs and triplets."""

import math
from functools import partial
from operator import itemgetter

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

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


class MatrixOperations(TorchDispatchMode):
    """Record the names of the operations that torch calls on matrices."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and getattr(args[0], "ndim", 0) == 2:
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("loss", [clip_of, lambda x, ids=None: info_nce_loss((x, x), ids, select=lambda pair: pair)])
def test_without_labels_nothing_is_selected_or_masked(loss):
    copies = {"index", "masked_fill"}
    with MatrixOperations() as calls:
        loss(SIMILARITIES, torch.arange(6))
    assert copies <= calls.names
    with MatrixOperations() as calls:
        loss(SIMILARITIES)
    assert not copies & calls.names


def test_equal_similarities_give_the_logarithm_of_the_batch_size():
    assert clip_of(torch.zeros(8, 8)).item() == pytest.approx(math.log(8))


@pytest.mark.parametrize("count", [5, 5.0, torch.tensor(5), torch.tensor([[3.0], [2.0]])], ids=str)
def test_count_in_every_form(count):
    torch.testing.assert_close(clip_of(SIMILARITIES, IDS, count), clip_of(SIMILARITIES, IDS), rtol=0, atol=1e-14)
    torch.testing.assert_close(
        clip_of(SIMILARITIES, IDS, 2 * count), clip_of(SIMILARITIES, IDS) / 2, rtol=0, atol=1e-14
    )


EMBEDDINGS = {"queries": normal(6, 4), "keys": normal(6, 4, seed=1)}
SIDES = itemgetter("queries", "keys")


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("ids", [None, IDS], ids=["all differ", "duplicates"])
def test_info_nce_equals_the_formula(ids, symmetric):
    cosines = F.cosine_similarity(EMBEDDINGS["queries"][:, None], EMBEDDINGS["keys"], dim=-1)
    found = info_nce_loss(EMBEDDINGS, ids, select=SIDES, temperature=0.5, symmetric=symmetric)
    assert found.item() == pytest.approx(by_loop(cosines / 0.5, ids, symmetric=symmetric), rel=1e-13)


def test_gradcheck():
    leaf = SIMILARITIES.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: clip_of(x, IDS), leaf)
    sides = [side.clone().requires_grad_() for side in EMBEDDINGS.values()]
    assert torch.autograd.gradcheck(lambda *sides: info_nce_loss(sides, IDS, select=tuple), sides)


# --- triplets --------------------------------------------------------------------------------------------------------

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
def test_gradcheck_of_triplets(mining):
    leaf = POINTS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: triplet_loss(x, CLASSES, mining=mining, margin=1.5), leaf)


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


# --- samples left out ------------------------------------------------------------------------------------------------

LEFT_OUT = [
    (clip_of, SIMILARITIES, IDS),
    (lambda x, ids: info_nce_loss((x, x.flip(1)), ids, select=tuple), POINTS, CLASSES),
    (partial(triplet_loss, mining=batch_hard), POINTS, CLASSES),
    (partial(triplet_loss, mining=semi_hard), POINTS, CLASSES),
]


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("loss", "inputs", "ids"), LEFT_OUT, ids=["clip", "info_nce", "batch_hard", "semi_hard"])
def test_samples_left_out_may_be_nan_or_infinite(loss, inputs, ids, wrong):
    """Masking after the computation would make the gradient of every other sample NaN."""
    right, left = (inputs.clone().requires_grad_() for _ in range(2))
    with torch.no_grad():
        left[ids == N] = wrong
    values = [loss(leaf, ids) for leaf in (right, left)]
    gradients = [torch.autograd.grad(value, leaf)[0] for value, leaf in zip(values, (right, left), strict=True)]
    assert values[0].item() == values[1].item()
    assert torch.equal(*gradients)
    assert not gradients[1][ids == N].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_samples_left_out_gives_zero(dtype):
    leaf = SIMILARITIES.to(dtype).requires_grad_()
    value = clip_of(leaf, torch.full((6,), N), 5)
    assert (value.item(), value.dtype) == (0.0, torch.float32)
    assert not torch.autograd.grad(value, leaf)[0].any()


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clip_loss({"logits": SIMILARITIES}), r"logits_per_text' among .*, got \['logits'\].*select="),
        (lambda: clip_of(SIMILARITIES[:4]), r"\(batch, batch\), got \(4, 6\)"),
        (lambda: clip_of(SIMILARITIES, IDS[:4]), r"one id per sample, of shape \(6,\), got \(4,\)"),
        (lambda: info_nce_loss(EMBEDDINGS, select=SIDES, temperature=0.0), "temperature must be positive"),
        (lambda: info_nce_loss(EMBEDDINGS, select=SIDES, temperature=torch.inf), "finite, got inf"),
        (lambda: info_nce_loss((normal(6, 4), normal(5, 4)), select=tuple), r"got \(6, 4\) and \(5, 4\)"),
        (lambda: triplet_loss(POINTS, CLASSES, margin=0.0), "margin must be positive"),
        (lambda: triplet_loss({"logits": normal(9, 2, 3)}, CLASSES), r"embeddings must be \(batch, size\)"),
        (lambda: triplet_loss(POINTS, CLASSES[:4]), "one id per sample"),
        (lambda: triplet_loss(POINTS, None), "labels are None"),
        (lambda: triplet_loss(POINTS, {"labels": CLASSES, "age": CLASSES}), r"extra tensors \['age'\].*does not read"),
        (lambda: clip_of(SIMILARITIES, {"labels": IDS, "weights": IDS}), r"extra tensors \['weights'\]"),
        (lambda: info_nce_loss(EMBEDDINGS, {"labels": IDS, "b": IDS, "a": IDS}, select=SIDES), "'a', 'b'"),
    ],
)
def test_invalid_values_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clip_of(SIMILARITIES, IDS.double()), "integer class ids"),
    ],
)
def test_invalid_types_raise(call, message):
    with pytest.raises(TypeError, match=message):
        call()


# --- accumulation ----------------------------------------------------------------------------------------------------


def test_accumulation_changes_the_negatives_but_not_the_scale():
    """Two micro-batches give the mean of their own losses, which is less than that of the whole batch."""
    halves = SIMILARITIES[:3, :3], SIMILARITIES[3:, 3:]
    found = sum(clip_of(half, None, torch.tensor(6)) for half in halves).item()
    assert found == pytest.approx(sum(by_loop(half, symmetric=True) for half in halves) / 2, rel=1e-13)
    assert found < clip_of(SIMILARITIES).item()
