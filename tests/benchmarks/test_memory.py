"""The byte counter against sizes computed by hand, and each of its guarantees against a counter that lacks it."""

import itertools
import math
import os
from collections.abc import Callable

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from benchmarks.memory import LiveBytes, Peak, peak_bytes, resident_peak
from lossfns import causal_lm_loss
from lossfns._core import block

KIB = 1024
SLACK = 256  # bytes: 0-d losses, counts and ones

TOKENS, VOCAB = 64, 1000


class CountsTensorsNotStorages(LiveBytes):
    """Broken: counts each view of a storage."""

    def _add(self, tree):
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        self.__dict__.setdefault("held", []).extend(tensors)
        return 0

    @property
    def live(self):
        return sum(tensor.nbytes for tensor in self.__dict__.get("held", []))


class NeverFrees(LiveBytes):
    """Broken: keeps what it counts."""

    def _add(self, tree):
        self.__dict__.setdefault("held", []).append(tree)
        return super()._add(tree)


class MissesBackward(LiveBytes):
    """Broken: does not count while autograd runs."""

    def _add(self, tree):
        return 0 if torch._C._current_graph_task_id() >= 0 else super()._add(tree)


class ForgetsTheStart(LiveBytes):
    """Broken: counts storages that existed before as new."""

    def _add(self, tree):
        super()._add(tree)
        return 0


def measured(counter: LiveBytes, fn: Callable[[], object]) -> Peak:
    with counter:
        fn()
    return Peak(counter.peak, counter.live)


HELD = torch.zeros(KIB)


@pytest.mark.parametrize(
    ("work", "counted"),
    [
        (lambda: torch.zeros(KIB).add(1).mul(2).sum(), Peak(2 * 4 * KIB, 4)),
        (lambda: torch.zeros(KIB).split(16), Peak(4 * KIB, 4 * KIB)),
        (lambda: torch.tensor([0.0] * KIB), Peak(4 * KIB, 4 * KIB)),
        (lambda: HELD.add(1), Peak(4 * KIB, 4 * KIB)),
    ],
    ids=["temporaries while they live", "the one storage of a list", "a Python list", "not what the caller holds"],
)
def test_what_is_counted(work, counted):
    assert peak_bytes(work) == counted


def test_views_and_in_place_operations_are_free():
    def work():
        x = torch.zeros(KIB)
        x.view(2, -1).t().add_(1)
        x[3:].detach().mul_(2)
        return x

    assert peak_bytes(work) == Peak(4 * KIB, 4 * KIB)


def test_releasing_existing_memory_lowers_the_count():
    holder = [torch.zeros(KIB)]

    def work():
        half = holder[0][: KIB // 2].clone()
        holder.clear()
        return half

    assert peak_bytes(work) == Peak(2 * KIB, -2 * KIB)


def test_storage_released_by_set_or_data_is_not_counted_and_moved_storage_is():
    def release():
        x = torch.zeros(KIB)
        x.set_()
        y = torch.zeros(KIB)
        y.data = torch.zeros(1)
        return torch.zeros(KIB), x, y

    def move():
        x, y = torch.zeros(KIB), torch.zeros(KIB)
        return torch.empty(0).set_(x), y.data

    assert peak_bytes(release) == Peak(4 * KIB + 4, 4 * KIB + 4)
    assert peak_bytes(move) == Peak(8 * KIB, 8 * KIB)


def test_resized_storages_count_at_their_size():
    def work():
        x = torch.zeros(KIB)
        x.untyped_storage().resize_(0)
        return torch.zeros(KIB).resize_(3 * KIB), x

    assert peak_bytes(work) == Peak(12 * KIB, 12 * KIB)


class TwoCopies(torch.autograd.Function):
    """Saves one copy, makes one temporary copy in backward, fills a third."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        return saved.mul(2).mul(gradient)


def test_custom_autograd_functions_are_seen_in_both_directions():
    x = torch.zeros(KIB, requires_grad=True)
    forward = peak_bytes(lambda: TwoCopies.apply(x))
    both = peak_bytes(lambda: TwoCopies.apply(x).backward())
    assert forward == Peak(4 * KIB + 4, 4 * KIB + 4)
    assert 12 * KIB <= both.peak <= 12 * KIB + SLACK
    assert both.kept == 4 * KIB  # x.grad


def test_an_error_leaves_no_counter_behind():
    with pytest.raises(RuntimeError, match="must match the size"):
        peak_bytes(lambda: torch.zeros(2) + torch.zeros(3))
    assert peak_bytes(lambda: torch.zeros(KIB)) == Peak(4 * KIB, 4 * KIB)


def logits_and_labels(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, TOKENS, VOCAB, dtype=dtype, requires_grad=True), torch.zeros(1, TOKENS, dtype=torch.long)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 3.0), (torch.bfloat16, 6.0)])
def test_the_stock_loss_makes_three_float32_copies(dtype, copies, released):
    """In the Trainer, what is counted begins before the logits, which go when the loss returns."""
    source, labels = logits_and_labels(dtype)

    def step():
        logits = source * 1.0 if released else source
        loss = ForCausalLMLoss(logits, labels, VOCAB)
        del logits
        loss.backward()

    counted = peak_bytes(step)
    labels_bytes = 2 * 8 * (TOKENS + 1)  # padded and shifted
    assert copies * source.nbytes <= counted.peak <= copies * source.nbytes + labels_bytes + SLACK
    assert counted.kept == source.nbytes


HEADLINE = (2, 512, 151_936)


def large_logits(dtype: torch.dtype) -> torch.Tensor:
    weight = torch.zeros((), dtype=dtype, requires_grad=True)
    return weight.expand(HEADLINE).clone()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("dtype", "released"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_the_loss_needs_one_copy_of_the_logits_or_none(dtype, released, overwrite):
    """Above logits that the caller holds, or that are made and released in the step, as in the Trainer."""
    held, labels = [] if released else [large_logits(dtype)], torch.arange(1024).view(2, 512)
    size = dtype.itemsize * math.prod(HEADLINE)

    def step():
        logits = large_logits(dtype) if released else held[0]
        loss = causal_lm_loss({"logits": logits}, labels, overwrite_logits=overwrite)
        del logits
        loss.backward()

    assert released * size <= peak_bytes(step).peak <= (released + (0.05 if overwrite else 1.05)) * size


def half_ignored_gradient(logits: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(1024).view(2, 512)
    labels[:, :256] = -100
    return torch.autograd.grad(causal_lm_loss({"logits": logits}, labels), logits)[0]


def test_a_gradient_half_of_which_stays_zero_counts_in_full():
    """Python allocates it, not torch: the counter must not treat it as memory that existed before."""
    logits = torch.zeros(HEADLINE, dtype=torch.bfloat16, requires_grad=True)
    assert logits.nbytes <= peak_bytes(lambda: half_ignored_gradient(logits)).peak <= 1.1 * logits.nbytes


@pytest.mark.skipif(
    any(name.startswith("MALLOC_") for name in os.environ),
    reason="memory that the allocator keeps or fills does not show as growth",
)
@pytest.mark.parametrize(("mostly_scored", "share"), [(block.MOSTLY_SCORED, (0.5, 0.65)), (0.0, (1.0, 1.15))])
def test_pages_of_ignored_rows_stay_untouched(monkeypatch, mostly_scored, share):
    """The gradient takes half of its size from the system; explicitly cleared it takes all."""
    monkeypatch.setattr(block, "MOSTLY_SCORED", mostly_scored)
    logits = torch.zeros(HEADLINE, dtype=torch.bfloat16, requires_grad=True)
    taken = resident_peak(lambda: half_ignored_gradient(logits))
    assert share[0] <= taken / logits.nbytes <= share[1]


def stock_step():
    logits, labels = logits_and_labels(torch.bfloat16)
    return lambda: torch.autograd.grad(ForCausalLMLoss(logits, labels, VOCAB), logits)[:0]


@pytest.mark.parametrize("broken", [CountsTensorsNotStorages, NeverFrees, MissesBackward, ForgetsTheStart])
def test_broken_counter_is_detected(broken):
    step, expected = stock_step(), 6 * 2 * TOKENS * VOCAB
    right, wrong = measured(LiveBytes(), step), measured(broken(), step)
    assert abs(right.peak - expected) < 0.02 * right.peak
    assert abs(wrong.peak - expected) > 0.1 * right.peak


def test_counter_agrees_with_the_allocator():
    """torch's profiler records every allocation, including temporaries inside kernels."""
    step = stock_step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    highest = max(itertools.accumulate(event.nbytes() for event in events))
    assert peak_bytes(step).peak == pytest.approx(highest, rel=0.02)


def test_the_resident_peak_sees_temporaries_of_python_and_torch():
    size = 128 << 20
    assert size <= resident_peak(lambda: bytearray(b"x") * size) <= 1.25 * size
    assert 0.98 * size <= resident_peak(lambda: float(torch.ones(size // 4).sum())) <= 1.25 * size
    assert resident_peak(lambda: None) < size / 16
