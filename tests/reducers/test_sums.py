"""sample_sums against a loop over samples and labels."""

import pytest
import torch

from reducers import sample_sums
from tests import oracle

from .inputs import LABELS, B, N, S, V, normal


def logits_of(dtype: torch.dtype = torch.float64, *, ties: bool = False) -> torch.Tensor:
    made = normal(B, S, V).round() if ties else normal(B, S, V)
    made[2, :-1] += 9 * torch.nn.functional.one_hot(LABELS[2, 1:].clamp(min=0), V)  # all correct at shift 1
    return made.to(dtype)


def by_loop(logits, labels, *, shift, top_k=(), entropy=False):
    """Return every column as Python floats, one sample after the other."""
    ks = (top_k,) if isinstance(top_k, int) else top_k
    names = ["nll", "tokens", "correct", *(f"correct_top_{k}" for k in ks), *(["entropy"] if entropy else [])]
    sums = {name: [0.0] * len(labels) for name in names}
    for place, row in oracle.pairs(logits, labels, shift=shift):
        x, y, sample = logits[row].double(), int(labels[place]), place[0]
        rank, here = oracle.ranking(x).index(y), oracle.measure(x, y)
        sums["nll"][sample] -= here["log_prob"].item()
        sums["tokens"][sample] += 1
        sums["correct"][sample] += rank == 0
        for k in ks:
            sums[f"correct_top_{k}"][sample] += rank < k
        if entropy:
            sums["entropy"][sample] += here["entropy"].item()
    pairs = zip(sums["tokens"], sums["correct"], strict=True)
    return sums | {"all_correct": [float(tokens > 0 and tokens == correct) for tokens, correct in pairs]}


def check(reducer, *, shift, tolerance=1e-12, logits=None, **options):
    logits = logits_of() if logits is None else logits
    found = reducer(logits, LABELS, shift=shift, **options)
    expected = by_loop(logits, LABELS, shift=shift, **options)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == torch.float64
        assert found[name].tolist() == pytest.approx(values, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_k": (1, 2, 20)}, {"entropy": True, "top_k": [5]}], ids=str)
def test_sums_are_those_of_a_loop(shift, ties, options):
    check(sample_sums, shift=shift, logits=logits_of(ties=ties), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_of_lower_precision_are_float64(dtype):
    """Only the logits are rounded."""
    check(sample_sums, shift=1, logits=logits_of(dtype), tolerance=1e-6, top_k=(2,), entropy=True)


def test_all_correct_needs_labels_and_no_error():
    assert sample_sums(logits_of(), LABELS, shift=1)["all_correct"].tolist() == [0.0, 0.0, 1.0, 0.0]


BROKEN = {
    "no shift": lambda x, y, shift: sample_sums(x, y, shift=0),
    "rounded": lambda x, y, shift: sample_sums(x.bfloat16(), y, shift=shift),
    "twice": lambda x, y, shift: {name: value * 2 for name, value in sample_sums(x, y, shift=shift).items()},
    "empty ones": lambda x, y, shift: sample_sums(x, y, shift=shift) | {"all_correct": torch.ones(B).double()},
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_the_comparison_finds_broken_sums(broken):
    with pytest.raises(AssertionError):
        check(broken, shift=1)


def test_one_label_per_sample():
    logits, labels = logits_of()[:, 0], torch.tensor([1, N, 3, 4])
    found = sample_sums(logits, labels, top_k=2)
    assert found["tokens"].tolist() == [1.0, 0.0, 1.0, 1.0]
    true = oracle.statistics(logits, labels, ("log_prob", "rank"))
    assert found["nll"].tolist() == pytest.approx((-true["log_prob"]).tolist())
    assert found["correct_top_2"].tolist() == ((true["rank"] < 2) & (labels != N)).double().tolist()


@pytest.mark.parametrize("options", [{}, {"top_k": (1, V)}], ids=str)
def test_logits_that_are_nan_are_never_correct(options):
    logits = torch.full((1, 3, V), torch.nan)
    logits[0, 1] = torch.arange(V).float()
    logits[0, 1, 5] = torch.nan
    found = sample_sums(logits, torch.tensor([[0, V - 1, 5]]), shift=0, **options)
    assert found["tokens"].tolist() == [3.0]
    assert found["nll"].isnan().all()
    for name in set(found) - {"tokens", "nll"}:
        assert found[name].tolist() == [0.0], name
