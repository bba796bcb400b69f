"""The kernel against a loop in float64: values, gradients, precision, ties, and what is not a number."""

from functools import partial

import pytest
import torch

from lossfns import token_statistics
from lossfns._core import block
from lossfns._core import rows as row_chunks
from tests import oracle

FIELDS = ("log_prob", "log_normalizer", "mean_logit", "entropy")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
B, S, V = 3, 6, 17
N = oracle.IGNORED
LABELS = torch.tensor([[4, 0, 16, 3, 9, 1], [N, N, 5, N, 2, N], [N, 7, 8, 11, N, N]])


def normal(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, dtype=torch.float64, generator=generator)).to(dtype)


def with_gradient(compute, logits, labels, fields, **options):
    """What `compute` measures, and the gradient of a sum with a weight of its own for every number."""
    x = logits.detach().requires_grad_()
    found = compute(x, labels, fields=fields, **options)
    total = sum(
        (found[name].double() * normal(*labels.shape, seed=1 + place)).sum() for place, name in enumerate(fields)
    )
    (gradient,) = torch.autograd.grad(total, x)
    return {name: found[name].detach() for name in fields}, gradient


def check(compute, logits, labels, fields=FIELDS, **options):
    """No further from float64 than the same formula written down in the same dtype, plus one ulp of the output."""
    true, true_slope = with_gradient(oracle.statistics, logits.double(), labels, fields, **options)
    usual, usual_slope = with_gradient(oracle.plain, logits, labels, fields, **options)
    found, slope = with_gradient(compute, logits, labels, fields, **options)
    output = torch.float64 if logits.dtype == torch.float64 else torch.float32
    for name in fields:
        assert found[name].dtype == output
        oracle.assert_no_worse(found[name], usual[name], true[name])
    assert slope.dtype == logits.dtype
    oracle.assert_no_worse(slope, usual_slope, true_slope)


# --- values and gradients --------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda dtype: normal(B, S, V, dtype=dtype),
    "transposed": lambda dtype: normal(S, B, V, dtype=dtype).transpose(0, 1),
    "classes not last in memory": lambda dtype: normal(B, V, S, dtype=dtype).transpose(1, 2),
    "sliced": lambda dtype: normal(B, 2 * S, V + 3, dtype=dtype)[:, ::2, 1:-2],
    "expanded rows": lambda dtype: normal(B, 1, V, dtype=dtype).expand(B, S, V),
    "expanded batch": lambda dtype: normal(1, S, V, dtype=dtype).expand(B, S, V),
    "expanded classes": lambda dtype: normal(B, S, 1, dtype=dtype).expand(B, S, V),
    "wide": lambda dtype: normal(B, S, V, dtype=dtype, scale=30.0),
    "far from 0": lambda dtype: normal(B, S, V, dtype=dtype) + 1000,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients(layout, dtype):
    check(token_statistics, LAYOUTS[layout](dtype), LABELS, shift=1)


@pytest.mark.parametrize("field", FIELDS)
def test_each_statistic_alone(field):
    check(token_statistics, normal(B, S, V, dtype=torch.float32), LABELS, (field,))


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("lead", [0, 1, 4])
def test_the_shift_and_logits_that_are_longer_on_the_left(lead, shift):
    check(token_statistics, normal(B, S + lead, V), LABELS, shift=shift)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(
            lambda x, labels, fields, shift: token_statistics(x, labels, fields=fields, shift=0), id="no shift"
        ),
        pytest.param(
            lambda x, labels, fields, shift: token_statistics(x[:, :S], labels, fields=fields, shift=shift),
            id="cut right",
        ),
        pytest.param(
            lambda x, labels, fields, shift: {
                name: value.float()
                for name, value in oracle.plain(x.bfloat16().double(), labels, fields, shift=shift).items()
            },
            id="logits rounded",
        ),
        pytest.param(
            lambda x, labels, fields, shift: {
                name: value.detach() + 0 * x.sum()
                for name, value in token_statistics(x, labels, fields=fields, shift=shift).items()
            },
            id="no gradient",
        ),
    ],
)
def test_the_check_finds(broken):
    logits = normal(B, S + 1, V, dtype=torch.float32)
    check(token_statistics, logits, LABELS, shift=1)
    with pytest.raises(AssertionError):
        check(broken, logits, LABELS, shift=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_arithmetic_is_found(dtype):
    def in_its_own_dtype(logits, labels, fields):
        log_p = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return {"log_prob": log_p.where(labels != N, 0).float()}

    logits = normal(B, S, V, dtype=dtype)
    check(token_statistics, logits, LABELS, ("log_prob",))
    with pytest.raises(AssertionError):
        check(in_its_own_dtype, logits, LABELS, ("log_prob",))


PATTERNS = {
    "all": [[1, 2, 3, 4], [5, 6, 7, 8]],
    "a run inside": [[N, 2, 3, 4], [5, 6, N, N]],
    "gaps": [[1, N, 3, N], [N, 6, N, 8]],
    "the last one": [[N, N, N, N], [N, N, N, 8]],
    "none": [[N] * 4] * 2,
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_any_pattern_of_labels(pattern, layout):
    labels = torch.tensor(PATTERNS[pattern])
    check(token_statistics, LAYOUTS[layout](torch.float64)[:2, :4], labels)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_integer_labels_of_any_width(dtype):
    labels = torch.tensor([[0, 1, 156 if dtype == torch.uint8 else 101]], dtype=dtype)  # 156 is -100 modulo 256
    check(token_statistics, normal(1, 3, 200), labels)


@pytest.mark.parametrize("shape", [(), (5,), (2, 1, 3)], ids=str)
def test_labels_of_any_rank(shape):
    labels = torch.arange(5)[torch.zeros(shape, dtype=torch.long)] + 2
    logits = normal(*shape, V)
    if not shape:
        with pytest.raises(ValueError, match="do not fit"):
            token_statistics(logits, labels)
        return
    found = token_statistics(logits, labels, fields=FIELDS)
    for name, value in oracle.statistics(logits, labels, FIELDS).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-13)


def test_a_dimension_of_one_may_have_any_stride():
    logits = normal(84).as_strided((2, 1, 3, 7), (42, 42, 7, 1))
    labels = torch.tensor([[[1, 2, 3]], [[4, 5, 6]]])
    found = token_statistics(logits, labels)["log_prob"]
    torch.testing.assert_close(found, oracle.statistics(logits, labels, ("log_prob",))["log_prob"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("ignored", [0, 255, -1])
def test_another_ignored_id(ignored):
    labels = torch.tensor([[1, 0, 3], [ignored, 5, ignored]])
    logits = normal(2, 3, V)
    found = token_statistics(logits, labels, ignore_index=ignored)
    true = oracle.statistics(logits, labels, ("log_prob",), ignored=ignored)
    torch.testing.assert_close(found["log_prob"], true["log_prob"], rtol=0, atol=1e-13)
    assert found["valid"].tolist() == (labels != ignored).tolist()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("shape", [(0, 4), (3, 4), (2, 1)], ids=["empty batch", "all ignored", "one position"])
def test_nothing_to_score(shape, shift):
    labels = torch.full(shape, N)
    logits = normal(*shape, V, dtype=torch.float32).requires_grad_()
    found = token_statistics(logits, labels, fields=(*FIELDS, "rank", "top_id"), shift=shift)
    for name, value in found.items():
        assert value.shape == shape
        assert not value.any()
        assert value.dtype == {"valid": torch.bool, "rank": torch.int32, "top_id": torch.int32}.get(name, torch.float32)
    sum(found[name].sum() for name in FIELDS).backward()
    assert logits.grad.shape == logits.shape
    assert not logits.grad.any()


# --- chunks ----------------------------------------------------------------------------------------------------------


def chunked(monkeypatch, rows, logits, fields=FIELDS):
    monkeypatch.setattr(row_chunks, "CPU_CHUNK_BYTES", rows * 4 * logits.shape[-1])
    return with_gradient(token_statistics, logits, torch.arange(logits.shape[0]), fields)


def assert_within(left: torch.Tensor, right: torch.Tensor, ulps: int) -> None:
    torch.testing.assert_close(left, right, rtol=ulps * torch.finfo(left.dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_agree_over_chunk_sizes(monkeypatch, dtype):
    logits = normal(50, 1009, dtype=dtype)
    whole, slope = chunked(monkeypatch, 50, logits)
    for rows in (1, 3, 8, 49):
        found, gradient = chunked(monkeypatch, rows, logits)
        for name in FIELDS:
            assert_within(found[name], whole[name], 4)
        assert_within(gradient, slope, 4)
    rounded = whole["log_prob"] * (1 + 8 * torch.finfo(torch.float32).eps)
    with pytest.raises(AssertionError):
        assert_within(rounded, whole["log_prob"], 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scored", [0, 1, 6, 8])
def test_rows_that_are_not_scored_have_no_gradient(monkeypatch, dtype, scored):
    """Whether their memory comes as zeros or is cleared; `scored` of 8 rows that are taken one by one."""
    logits, labels = normal(8, 1 << 15, dtype=dtype), torch.arange(8) * 7
    labels[torch.tensor([3, 0, 6, 1, 4, 7, 2, 5])[scored:]] = N
    monkeypatch.setattr(block, "LAZY_ZERO_BYTES", 0)
    _, slope = with_gradient(token_statistics, logits, labels, ("log_prob",))
    monkeypatch.setattr(block, "MOSTLY_SCORED", -1.0)
    _, cleared = with_gradient(token_statistics, logits, labels, ("log_prob",))
    assert torch.equal(slope, cleared)
    assert slope.any(-1).tolist() == (labels != N).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (1,), (64, 1 << 15)])
def test_lazily_zeroed_memory_equals_torch_zeros(shape, dtype):
    found = row_chunks.lazy_zeros(shape, dtype)
    assert torch.equal(found, torch.zeros(shape, dtype=dtype))
    assert found.is_contiguous()
    found += 1
    assert torch.equal(found, torch.ones(shape, dtype=dtype))
    assert not row_chunks.lazy_zeros(shape, dtype).any()


def test_chunks_hold_at_least_one_row_and_only_scored_rows(monkeypatch):
    read, lengths = block.read, []
    monkeypatch.setattr(block, "read", lambda logits, rows, out: lengths.append(len(rows)) or read(logits, rows, out))
    monkeypatch.setattr(row_chunks, "CPU_CHUNK_BYTES", 1)
    token_statistics(normal(B, S, V), LABELS)
    assert lengths == [1] * int((LABELS != N).sum())


# --- ties, infinities, NaN -------------------------------------------------------------------------------------------


def smaller_ids_win(logits, labels):
    """`rank` and `top_id` by counting."""
    return token_statistics(logits, labels, fields=("rank", "top_id"))


def check_ties(compute):
    logits = torch.randint(0, 3, (4, 9, 7), generator=torch.Generator().manual_seed(0)).float()
    labels = torch.arange(36).view(4, 9) % 7
    true = oracle.statistics(logits, labels, ("rank", "top_id"))
    for dtype in DTYPES:
        found = compute(logits.to(dtype), labels)
        for name in true:
            assert found[name].tolist() == true[name].tolist()


def test_equal_logits_are_ranked_by_id():
    check_ties(smaller_ids_win)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda x, y: {"rank": (x > x.gather(-1, y[..., None])).sum(-1)}, id="larger logits only"),
        pytest.param(lambda x, y: {"rank": (x >= x.gather(-1, y[..., None])).sum(-1) - 1}, id="every equal one"),
        pytest.param(lambda x, y: {"top_id": x.shape[-1] - 1 - x.flip(-1).argmax(-1)}, id="the larger id"),
    ],
)
def test_other_rules_for_ties_are_found(broken):
    def mixed(logits, labels):
        return smaller_ids_win(logits, labels) | broken(logits, labels)

    with pytest.raises(AssertionError):
        check_ties(mixed)


INFINITE = torch.tensor(
    [[[1.0, -torch.inf, 0.5, -torch.inf], [-torch.inf, 2.0, -torch.inf, -torch.inf], [3.0, 1.0, 0.0, 2.0]]]
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_minus_infinity(dtype):
    """Classes that are not there: no share in entropy or mean, no gradient, and no NaN."""
    logits, labels = INFINITE.to(dtype), torch.tensor([[2, 1, 0]])
    true, true_slope = with_gradient(oracle.statistics, logits.double(), labels, FIELDS)
    found, slope = with_gradient(token_statistics, logits, labels, FIELDS)
    for name in FIELDS:
        torch.testing.assert_close(found[name], true[name].to(found[name].dtype), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(slope.double(), true_slope, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert (slope[logits == -torch.inf] == 0).all()


def test_a_label_of_probability_zero():
    logits = INFINITE.clone()
    assert token_statistics(logits, torch.tensor([[1, N, N]]))["log_prob"].tolist() == [[-torch.inf, 0.0, 0.0]]


@pytest.mark.parametrize("poison", [-torch.inf, torch.inf, torch.nan])
def test_ignored_rows_are_not_read(poison):
    def masked_by_multiplication(x, labels, fields):
        return {name: oracle.plain(x, labels.clamp(min=0), (name,))[name] * (labels != N) for name in fields}

    def check_ignored(compute):
        clean = normal(B, S, V)
        poisoned = clean.masked_fill((LABELS == N)[..., None], poison)
        expected, expected_slope = with_gradient(oracle.statistics, clean, LABELS, FIELDS)
        found, slope = with_gradient(compute, poisoned, LABELS, FIELDS)
        for name in FIELDS:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-13)
        torch.testing.assert_close(slope, expected_slope, rtol=0, atol=1e-13)

    check_ignored(token_statistics)
    with pytest.raises(AssertionError):
        check_ignored(masked_by_multiplication)


@pytest.mark.parametrize("place", [0, 2], ids=["the label", "another class"])
def test_a_nan_ranks_above_every_number(place):
    logits = torch.tensor([[5.0, 1.0, 0.0]])
    logits[0, place] = torch.nan
    found = token_statistics(logits, torch.tensor([0]), fields=("rank", "log_prob"))
    assert found["rank"] > 0
    assert found["log_prob"].isnan()


# --- autograd --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hole", [False, True], ids=["finite", "-inf neighbours"])
@pytest.mark.parametrize("field", FIELDS)
def test_gradcheck(field, hole):
    logits, labels = normal(2, 3, 5), torch.tensor([[1, N, 4], [N, 2, 0]])
    if hole:
        logits[..., 3] = -torch.inf
    compute = partial(token_statistics, labels=labels, fields=(field,), shift=1)
    assert torch.autograd.gradcheck(lambda x: compute(x)[field], logits.requires_grad_())


def test_statistics_share_one_backward():
    check(token_statistics, normal(B, S, V), LABELS, FIELDS, shift=1)
    logits = normal(B, S, V).requires_grad_()
    found = token_statistics(logits, LABELS, fields=(*FIELDS, "rank", "top_id"))
    assert [name for name, value in found.items() if value.requires_grad] == list(FIELDS)


def test_inputs_are_left_alone():
    logits, labels = normal(B, S, V, dtype=torch.bfloat16), LABELS.clone()
    before = logits.clone()
    with_gradient(token_statistics, logits, labels, FIELDS)
    assert logits.equal(before)
    assert labels.equal(LABELS)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"fields": "log_prob"}, ValueError, "sequence of different names out of log_prob, .*top_id; got 'log_prob'"),
        ({"fields": ("log_prob", "logprob")}, ValueError, "logprob"),
        (
            {"logits": torch.zeros(2, 3, 5, dtype=torch.long)},
            TypeError,
            r"expected logits, got torch.int64.*look like ids",
        ),
        ({"labels": torch.zeros(2, 3)}, TypeError, "integer class ids, got torch.float32"),
        ({"labels": torch.zeros(2, 3, dtype=torch.bool)}, TypeError, "integer class ids, got torch.bool"),
        ({"labels": torch.full((2, 3), 5)}, ValueError, r"label 5 is out of range.*5 classes.*0 to 4.*replace_labels"),
        ({"labels": torch.full((2, 3), -1)}, ValueError, r"label -1 is out of range"),
        ({"labels": torch.zeros(2, 4, dtype=torch.long)}, ValueError, "logits cover 3 positions, labels 4"),
        ({"labels": torch.zeros(3, 3, dtype=torch.long)}, ValueError, r"\(2, 3, 5\) and labels \(3, 3\) do not fit"),
        ({"labels": torch.zeros(3, dtype=torch.long), "shift": 1}, ValueError, r"\(batch, sequence\), got \(3,\)"),
        ({"shift": -1}, ValueError, "shift must be an int >= 0"),
        ({"shift": True}, ValueError, "shift must be an int >= 0"),
    ],
)
def test_bad_input_is_refused_before_any_work(monkeypatch, change, error, message):
    monkeypatch.setattr(block, "read", None)
    given = {"logits": torch.zeros(2, 3, 5), "labels": torch.zeros(2, 3, dtype=torch.long)} | change
    with pytest.raises(error, match=message):
        token_statistics(**given)
