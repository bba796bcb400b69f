"""Random shapes, dtypes, strides, masks, chunks and options give the numbers of plain float64 formulas."""

import inspect
import itertools
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sklearn_metrics

import lossfns
import metrics
import reducers
from lossfns._core import rows
from lossfns._core.signature import STATISTICS
from tests import oracle

IGNORED = -100
FIELDS = (*STATISTICS, "rank", "top_id")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
CHUNK_BYTES = (1, 64, 200, rows.CPU_CHUNK_BYTES)  # one row at a time, a few, all
WIDE = 9000  # rows that are copied one by one
LAYOUTS = ("contiguous", "batch second", "classes first", "sliced")


def run(property_: Callable[[Any], None], strategy: st.SearchStrategy, number: int, **phases: Any) -> None:
    """Check a property on `number` cases, the same ones every time."""

    @settings(max_examples=number, derandomize=True, deadline=None, database=None, **phases)
    @given(strategy)
    def checked(case):
        property_(case)

    checked()


def holds(property_: Callable[[Any], None], strategy: st.SearchStrategy, *, number: int) -> None:
    """Assert that a property holds."""
    run(property_, strategy, number)


def fails(property_: Callable[[Any], None], strategy: st.SearchStrategy) -> None:
    """Assert that the same check finds a mistake within 50 cases."""
    with pytest.raises(AssertionError):
        run(property_, strategy, 50, phases=[Phase.generate], report_multiple_bugs=False)


def close(found: Any, true: Any, tolerance: float = 1e-12) -> None:
    """Equal within `tolerance`, relative to the largest true value; NaN and infinities at the same places."""
    found, true = map(as_double, (found, true))
    assert found.shape == true.shape
    scale = max([1.0, *true[true.isfinite()].abs().flatten().tolist()])
    assert torch.allclose(found, true, rtol=0, atol=tolerance * scale, equal_nan=True)


def as_double(value: Any) -> torch.Tensor:
    return value.detach().double() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


# --- batches ----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    logits: torch.Tensor
    labels: torch.Tensor
    shift: int
    chunk_bytes: int
    generator: torch.Generator

    def walked(self) -> Any:
        """A context in which chunks have the size of this case."""
        return mock.patch.object(rows, "CPU_CHUNK_BYTES", self.chunk_bytes)

    @property
    def rounding(self) -> float:
        """What the compute dtype may cost: a few units of the largest logit's last place."""
        largest = self.logits.double()[self.logits.isfinite()].abs()
        dtype = torch.float64 if self.logits.dtype == torch.float64 else torch.float32
        return 16 * torch.finfo(dtype).eps * (1 + (largest.max().item() if largest.numel() else 0.0))


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, elsewhere in memory."""
    if layout == "batch second":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "classes first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        return F.pad(x, (1, 2, 1, 0))[:, 1:, 1:-2]
    return x.contiguous()


@st.composite
def cases(draw, *, dtypes=FLOATS, scales=(1.0, 1e-6, 30.0, 1e4), dropped=True, wide=False):
    """Logits `(B, L, V)` and labels `(B, S)`: a few or none, tied, huge, tiny and absent (-inf) logits, any mask."""
    rows, width, extra, classes = (draw(st.integers(*ends)) for ends in ((0, 3), (0, 5), (0, 2), (1, 9)))
    classes = WIDE if wide else classes
    shift, scale = draw(st.sampled_from((0, 1, 2))), draw(st.sampled_from(scales))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, width + extra, classes, generator=generator, dtype=torch.float64) * scale
    x = x.round() if draw(st.booleans()) else x + draw(st.sampled_from((0.0, 500.0))) * (scale > 1)
    labels = torch.randint(classes, (rows, width), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < draw(st.sampled_from((0.0, 0.3, 1.0)))] = IGNORED
    if dropped and draw(st.booleans()):
        x[torch.rand(x.shape, generator=generator) < 0.3] = -torch.inf
        for place, row in oracle.pairs(x, labels, shift=shift):
            x[row][labels[place]] = 1.0
    logits = laid_out(x.to(draw(st.sampled_from(dtypes))), draw(st.sampled_from(LAYOUTS)))
    return Case(
        logits,
        labels.to(draw(st.sampled_from(INTEGERS[: 3 if wide else 4]))),
        shift,
        draw(st.sampled_from(CHUNK_BYTES)),
        generator,
    )


def leaf(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The same values in the same strides, to be differentiated."""
    return x.detach().to(dtype or x.dtype).requires_grad_()


# --- the kernel -------------------------------------------------------------------------------------------------------


def check_statistics(case: Case, measure=lossfns.token_statistics) -> None:
    logits, exact, before = leaf(case.logits), leaf(case.logits, torch.float64), case.logits.clone()
    with case.walked():
        found = measure(logits, case.labels, fields=FIELDS, shift=case.shift)
        true = oracle.statistics(exact, case.labels, FIELDS, shift=case.shift) if case.labels.numel() else {}
        for name in true:
            close(found[name], true[name], 0 if name in ("rank", "top_id") else case.rounding)
            assert found[name][~found["valid"]].eq(0).all()
        slopes = torch.randn(case.labels.shape, generator=case.generator, dtype=torch.float64)
        sum((found[name] * slopes).sum() for name in STATISTICS).backward()
    if true:
        sum((true[name] * slopes).sum() for name in STATISTICS).backward()
        expected = exact.grad if exact.grad is not None else torch.zeros_like(exact)
        close(logits.grad, expected, 8 * (case.rounding + torch.finfo(logits.dtype).eps))
    assert case.logits.equal(before)


def test_statistics_and_their_gradients():
    holds(check_statistics, cases(), number=120)
    holds(check_statistics, cases(wide=True), number=20)
    fails(
        partial(
            check_statistics, measure=lambda *given, shift, **named: lossfns.token_statistics(*given, shift=1, **named)
        ),
        cases(),
    )


def check_head(case: Case) -> None:
    head = torch.nn.Linear(case.logits.shape[-1], 7, dtype=case.logits.dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=case.generator))
        head.bias.zero_()
    labels = torch.where(case.labels == IGNORED, IGNORED, case.labels % 7)
    hidden, exact = leaf(case.logits), leaf(case.logits, torch.float64)
    weight = leaf(head.weight, torch.float64)
    with case.walked():
        found = lossfns.head_token_statistics(
            hidden, head, labels, fields=FIELDS[:4], shift=case.shift, scale=0.5, softcap=3.0
        )
        logits = 3 * (0.5 * (exact @ weight.T) / 3).tanh()
        true = oracle.statistics(logits, labels, FIELDS[:4], shift=case.shift) if labels.numel() else {}
        for name in true:
            close(found[name], true[name], 8 * case.rounding)
        if found["valid"].any():
            (found["log_prob"] * 2 + found["entropy"]).sum().backward()
            (true["log_prob"] * 2 + true["entropy"]).sum().backward()
            close(hidden.grad, exact.grad, 32 * case.rounding)
            close(head.weight.grad, weight.grad, 32 * case.rounding)


def walked_in_pieces(case: tuple[list[bool], int]) -> None:
    """No row is lost or met twice; a gap within a piece stands in its first quarter only, or in a short piece."""
    scored, step = case
    index = torch.tensor(scored).nonzero().flatten()
    pieces = [*rows.Rows(index, index, None).chunks(step, split_at_gaps=True)]
    assert torch.cat([index[:0], *(piece.index for piece in pieces)]).equal(index)
    for piece in pieces:
        starts = (piece.index.diff() != 1).nonzero().flatten() + 1
        assert 0 < len(piece) <= step
        assert not any(start >= max(step // rows.RUNS_PER_CHUNK, 1) for start in starts.tolist())


def test_rows_in_pieces():
    holds(walked_in_pieces, st.tuples(st.lists(st.booleans(), max_size=60), st.integers(1, 20)), number=300)


def test_statistics_from_hidden_states():
    holds(check_head, cases(dtypes=FLOATS[:2], scales=(1.0,), dropped=False), number=40)


# --- losses: term x normalize x overwrite x extras x count ------------------------------------------------------------


def smoothed(log_prob, log_normalizer, mean_logit, **_):
    return 0.8 * -log_prob + 0.2 * (log_normalizer - mean_logit)


WEIGHTS = tuple(0.5 + 0.25 * place for place in range(9))
UNWEIGHTED = {
    "cross_entropy": (lossfns.cross_entropy, lambda log_prob, **_: -log_prob),
    "smoothed": (partial(lossfns.smoothed_cross_entropy, label_smoothing=0.2), smoothed),
    "focal": (partial(lossfns.focal, gamma=1.5), lambda log_prob, **_: -log_prob * (1 - log_prob.exp()) ** 1.5),
    "three": (
        lossfns.weighted_sum((0.5, lossfns.cross_entropy), (0.1, lossfns.z_loss), (0.3, lossfns.entropy_bonus)),
        lambda log_prob, log_normalizer, entropy, **_: -0.5 * log_prob + 0.1 * log_normalizer**2 - 0.3 * entropy,
    ),
}


def weighted(name: str, by_token: bool, by_class: int) -> tuple[Callable, Callable]:
    """A term and its plain formula, times the weights of tokens and classes."""
    term, formula = UNWEIGHTED[name]
    term = lossfns.token_weighted(term) if by_token else term
    term = lossfns.class_weighted(term, WEIGHTS[:by_class]) if by_class else term
    return term, formula


def check_loss(options: tuple) -> None:
    case, name, by_token, by_class, normalize, overwrite, count_form, loss = options
    classes, shape = case.logits.shape[-1], case.labels.shape
    term, formula = weighted(name, by_token, classes if by_class else 0)
    token_weights = torch.rand(shape, generator=case.generator).round(decimals=1)
    valid = case.labels != IGNORED
    valid[:, : case.shift] = False
    every = token_weights.double() if by_token else torch.ones(shape, dtype=torch.float64)
    if by_class:
        every = every * torch.tensor(WEIGHTS, dtype=torch.float64)[case.labels.long().clamp(min=0)]
    every = every.where(valid, 0)
    own = int(valid.sum())
    given, divisor = {
        "none": (None, own),
        "int": (own + 3, own + 3),
        "tensor": (torch.tensor(2 * own + 1), 2 * own + 1),
        "gathered": (torch.tensor([[own], [4]]), own + 4),
    }[count_form]
    normalize = normalize if by_token or by_class else "tokens"
    if normalize == "weights" and every.sum() > 0:
        divisor = max(divisor, 1) * every.sum().item() / own
    labels = {"labels": case.labels, "token_weights": token_weights} if by_token else case.labels
    logits, exact = leaf(case.logits), leaf(case.logits, torch.float64)
    with case.walked():
        value = loss(
            {"logits": (logits * 1).contiguous() if overwrite else logits},
            labels,
            given,
            term=term,
            shift=case.shift,
            normalize=normalize,
            overwrite_logits=overwrite,
        )
        (3 * value).backward()
    total = exact.sum() * 0
    if own:
        found = oracle.statistics(exact, case.labels, FIELDS[:4], shift=case.shift)
        total = (formula(**found) * every).sum() / max(divisor, 1 if normalize == "tokens" else 0)
    (3 * total).backward()
    assert value.shape == ()
    assert value.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
    close(value, total, 4 * case.rounding)
    close(logits.grad, exact.grad, 32 * case.rounding + 4 * torch.finfo(logits.dtype).eps)


def loss_options(loss=lossfns.causal_lm_loss, *, wide=False):
    return st.tuples(
        cases(scales=(1.0, 5.0), dropped=False, wide=wide),
        st.sampled_from(sorted(UNWEIGHTED)),
        st.booleans(),
        st.just(False) if wide else st.booleans(),
        st.sampled_from(["tokens", "weights"]),
        st.sampled_from([False, False, True]),
        st.sampled_from(["none", "int", "tensor", "gathered"]),
        st.just(loss),
    )


def test_losses_of_language_models():
    def mean_for_sum(outputs, labels, count=None, **options):
        return lossfns.causal_lm_loss(outputs, labels, **options)

    holds(check_loss, loss_options(), number=150)
    holds(check_loss, loss_options(wide=True), number=25)
    fails(check_loss, loss_options(mean_for_sum))


def check_parts(case: Case) -> None:
    """A window in parts, each divided by the count of all, is the window in one."""
    count = int((case.labels[:, case.shift :] != IGNORED).sum())
    loss = partial(lossfns.causal_lm_loss, shift=case.shift, term=lossfns.focal)
    whole = loss(case.logits.double(), case.labels, count)
    close(sum(loss(x[None].double(), y[None], count) for x, y in zip(case.logits, case.labels, strict=True)), whole)


@pytest.mark.parametrize("weights", ["tokens", "classes"])
def test_what_has_no_weight_may_be_infinite(weights):
    logits = leaf(torch.tensor([[[0.0, -torch.inf, 1.0], [1.0, 2.0, 3.0]]]))
    labels, term = torch.tensor([[1, 2]]), lossfns.class_weighted(lossfns.cross_entropy, [1.0, 0.0, 1.0])
    if weights == "tokens":
        labels, term = (
            {"labels": labels, "token_weights": torch.tensor([[0, 1]])},
            lossfns.token_weighted(lossfns.cross_entropy),
        )
    value = lossfns.masked_lm_loss(logits, labels, term=term)
    value.backward()
    assert value.isfinite()
    assert logits.grad[0, 0].eq(0).all()
    assert logits.grad[0, 1].isfinite().all()


def test_a_window_in_parts():
    holds(check_parts, cases(scales=(1.0,), dropped=False), number=30)


@st.composite
def classified(draw):
    size, classes = draw(st.integers(0, 5)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64) * draw(st.sampled_from([1.0, 40.0]))
    hard = torch.randint(classes, (size,), generator=generator)
    missing = torch.rand(size, generator=generator) < draw(st.sampled_from([0.0, 0.4, 1.0]))
    soft = torch.rand(size, classes, generator=generator, dtype=torch.float64) ** 4
    by_class = torch.rand(3, classes, generator=generator, dtype=torch.float64) + 0.1
    chosen = [draw(st.booleans()) for _ in range(4)]
    return logits, hard, missing, soft / soft.sum(-1, keepdim=True), by_class, chosen, draw(st.sampled_from([0.0, 0.3]))


def check_classification(case) -> None:
    logits, hard, missing, soft, (weights, adjustment, margins), chosen, smoothing = case
    is_soft, with_weights, with_adjustment, divides_by_weights = chosen
    exact, mine = leaf(logits), leaf(logits)
    labels = soft.masked_fill(missing[:, None], IGNORED) if is_soft else hard.masked_fill(missing, IGNORED)
    options = {"label_smoothing": smoothing}
    if divides_by_weights and with_weights:
        options["normalize"] = "weights"
    x, target = exact, soft if is_soft else F.one_hot(hard, logits.shape[-1]).double()
    if with_weights:
        options["class_weights"] = weights
    if with_adjustment:
        options["logit_adjustment"], x = adjustment.tolist(), x + adjustment
    if with_adjustment and not is_soft:
        options["margins"], x = margins.numpy(), x - target * margins
    value = lossfns.classification_loss({"logits": mine}, labels, **options)
    each = F.cross_entropy(
        x, target, weight=weights if with_weights else None, label_smoothing=smoothing, reduction="none"
    )
    divisor = (target @ weights)[~missing].sum() if "normalize" in options else (~missing).sum()
    true = each[~missing].sum() / divisor if (~missing).any() else exact.sum() * 0
    close(value, true)
    value.backward()
    true.backward()
    close(mine.grad, exact.grad)
    close(lossfns.token_classification_loss(logits[None], labels[None], **options), value)


def test_losses_of_classes():
    holds(check_classification, classified(), number=120)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.uint8, torch.bool])
def test_multi_label_dtypes(dtype):
    def check(case):
        logits, _, missing, chances, (weights, _, _), _, smoothing = case
        labels = chances if dtype.is_floating_point else chances > 0.2
        known = (~missing[:, None]).expand_as(labels) | (dtype in (torch.uint8, torch.bool))
        labels = labels.to(dtype)
        exact, mine = leaf(logits), leaf(logits)
        value = lossfns.multi_label_loss(
            mine, labels.where(known, IGNORED).to(dtype), pos_weight=weights, label_smoothing=smoothing
        )
        target = labels.double() * (1 - smoothing) + smoothing / 2
        each = F.binary_cross_entropy_with_logits(exact, target, pos_weight=weights, reduction="none")
        true = each[known].mean() if known.any() else exact.sum() * 0
        close(value, true)
        value.backward()
        true.backward()
        close(mine.grad, exact.grad)

    holds(check, classified(), number=15)


def test_values():
    terms = {lossfns.mse: F.mse_loss, lossfns.mae: F.l1_loss, lossfns.huber: F.huber_loss}

    def check(options):
        (logits, _, missing, targets, _, _, _), term = options
        exact, mine = leaf(logits), leaf(logits)
        value = lossfns.regression_loss({"logits": mine}, targets.masked_fill(missing[:, None], IGNORED), term=term)
        true = terms[term](exact[~missing], targets[~missing]) if (~missing).any() else exact.sum() * 0
        close(value, true)
        value.backward()
        true.backward()
        close(mine.grad, exact.grad)

    holds(check, st.tuples(classified(), st.sampled_from(list(terms))), number=40)


# --- reducers ---------------------------------------------------------------------------------------------------------


def check_reducers(case: Case) -> None:
    logits, labels, shift = case.logits, case.labels, case.shift
    classes, before = logits.shape[-1], labels.clone()
    order = {place: oracle.ranking(logits[row]) for place, row in oracle.pairs(logits, labels, shift=shift)}
    with case.walked():
        sums = reducers.sample_sums(logits, labels, shift=shift, top_k=(1, 3), entropy=True)
        ids = reducers.argmax(logits, labels, shift=shift)
        best = reducers.top_k(logits, labels, shift=shift, k=classes)
        ranks = reducers.label_rank(logits, labels, shift=shift)["ranks"]
        counts = reducers.confusion_counts(logits, labels, shift=shift)["confusion"]
    tokens, hits = np.zeros(len(labels)), np.zeros((2, len(labels)))
    table = np.zeros((len(labels), classes, classes))
    for place, ranking in order.items():
        label = int(labels[place])
        tokens[place[0]] += 1
        hits[:, place[0]] += [ranking.index(label) < k for k in (1, 3)]
        table[place[0], label, ranking[0]] += 1
        assert best[place].tolist() == ranking
        assert (int(ids[place]), int(ranks[place])) == (ranking[0], ranking.index(label))
    for name, true in {"tokens": tokens, "correct": hits[0], "correct_top_3": hits[1]}.items():
        assert sums[name].tolist() == true.tolist()
    assert np.array_equal(counts.numpy().reshape(table.shape), table)
    if labels.numel():
        true = oracle.statistics(logits, labels, ("log_prob", "entropy"), shift=shift)
        close(sums["nll"], -true["log_prob"].sum(-1), 4 * case.rounding)
        close(sums["entropy"], true["entropy"].sum(-1), 4 * case.rounding)
    assert labels.equal(before)


def test_reducers():
    holds(check_reducers, cases(), number=80)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_pixels_of_any_integer(dtype):
    classes = 100
    labels = torch.arange(classes).view(1, 10, 10)
    logits = F.one_hot(labels, classes).permute(0, 3, 1, 2).float()
    found = reducers.segmentation_counts(logits, labels.to(dtype))["confusion"]
    assert found.view(classes, classes).equal(torch.eye(classes, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_uint8_label_156_is_not_the_ignored_index(dtype):
    """It is what -100 becomes in uint8."""
    logits, label = (
        torch.randn(1, 200, generator=torch.Generator().manual_seed(0)).double(),
        torch.tensor([156], dtype=dtype),
    )
    true = F.cross_entropy(logits, torch.tensor([156]))
    close(lossfns.classification_loss(logits, label), true)
    close(lossfns.ctc_loss(logits[None], label[None]), true)
    close(lossfns.causal_lm_loss(logits[None].expand(1, 2, 200), label.expand(1, 2)), true)
    close(lossfns.regression_loss(torch.zeros(1), label), 156.0**2)
    assert reducers.sample_sums(logits, label)["tokens"] == 1
    assert reducers.text_lengths((), label[None], lengths={"bytes": torch.arange(200)}, shift=0)["bytes"] == 156


# --- metrics ----------------------------------------------------------------------------------------------------------


def evaluation(predictions, labels):
    return SimpleNamespace(predictions=predictions, label_ids=labels)


def delivered(metric, predictions: dict, labels: np.ndarray, way: str, cuts: list[int]) -> dict[str, float]:
    """The scores of an evaluation that comes whole, as a list of batches, or step by step after one that broke off."""
    if way == "whole" or not len(labels):
        return metric(evaluation(predictions, labels))
    ends = sorted({0, len(labels), *(cut % len(labels) for cut in cuts)})
    parts = [slice(*pair) for pair in itertools.pairwise(ends)]
    steps = [({name: value[part] for name, value in predictions.items()}, labels[part]) for part in parts]
    if way == "batches":
        return metric(evaluation([step for step, _ in steps], [own for _, own in steps]))
    streamed = metrics.build(metric, num_samples=len(labels))
    tensors = [
        evaluation({name: torch.from_numpy(value.copy()) for name, value in step.items()}, torch.from_numpy(own.copy()))
        for step, own in steps
    ]
    if len(steps) > 1:
        streamed(tensors[0], compute_result=False)
        streamed.reset()
    for step in tensors[:-1]:
        assert streamed(step, compute_result=False) == {}
    return streamed(tensors[-1], compute_result=True)


WAYS = st.sampled_from(["whole", "batches", "steps"])
CUTS = st.lists(st.integers(0, 50), max_size=3)


@st.composite
def tagged(draw):
    """Labels `(B,)` or `(B, T)` of a few classes, some ignored, and what a model says."""
    shape = draw(st.sampled_from([(0,), (1,), (12,), (4, 5), (3, 0)]))
    classes = draw(st.integers(2, 4))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    labels = generator.integers(0, classes, shape)
    labels[generator.random(shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = IGNORED
    probabilities = generator.dirichlet(np.full(classes, 0.7), shape)
    dtype = draw(st.sampled_from([np.int64, np.int32, np.int8]))
    return labels.astype(dtype), probabilities.astype(draw(st.sampled_from([np.float64, np.float32]))), classes


def check_class_scores(options) -> None:
    (labels, probabilities, classes), kind, way, cuts = options
    ids = probabilities.argmax(-1)
    known = labels != IGNORED
    table = np.zeros((len(labels), classes, classes), np.int64)
    for place in zip(*known.nonzero(), strict=True):
        table[place[0], labels[place], ids[place]] += 1
    predictions = {
        "ids": {"ids": ids.astype(np.int32)},
        "probabilities": {"probabilities": probabilities},
        "confusion": {"confusion": table.reshape(len(labels), classes**2)},
    }[kind]
    metric = metrics.classification(classes, average=("macro", "micro", "weighted"))
    scores = delivered(metric, predictions, labels, way, cuts)
    true, found = labels[known], ids[known]
    if not len(true):
        assert all(np.isnan(value) for value in scores.values())
        return
    expected = {
        "accuracy": (true == found).mean(),
        "matthews_correlation": sklearn_metrics.matthews_corrcoef(true, found),
        **{
            f"f1_{average}": sklearn_metrics.f1_score(true, found, average=average, zero_division=0)
            for average in ("macro", "micro", "weighted")
        },
    }
    if kind == "probabilities":
        chances = probabilities[known].astype(np.float64)
        at_label = chances[np.arange(len(true)), true]
        expected["log_loss"] = -np.log(np.maximum(at_label, np.finfo(np.float64).eps)).mean()
        square = ((chances - np.eye(classes)[true]) ** 2).sum(-1).mean()
        expected["brier_loss"] = square / 2 if classes == 2 else square
    for name, value in expected.items():
        close(scores[name], value)


def test_scores_of_classes():
    kinds = st.sampled_from(["ids", "probabilities", "confusion"])
    holds(check_class_scores, st.tuples(tagged(), kinds, WAYS, CUTS), number=80)


def check_other_scores(options) -> None:
    (_, probabilities, classes), way, cuts = options
    table = probabilities.reshape(-1, classes).astype(np.float64)
    present = (table > 0.3).astype(np.int64)
    present[table < 0.05] = IGNORED
    known = present != IGNORED
    side_by_side = table**2  # no softmax, which is refused here
    scores = delivered(metrics.multi_label(classes, threshold=0.2), {"probabilities": side_by_side}, present, way, cuts)
    if known.any():
        pair = present[known], side_by_side[known] >= 0.2
        close(scores["hamming_loss"], (pair[0] != pair[1]).mean())
        close(scores["f1_micro"], sklearn_metrics.f1_score(*pair, zero_division=0))
    # values: the chances themselves, against the same numbers in another order
    targets = table[::-1].copy()
    targets[targets < 0.05] = IGNORED
    there = targets != IGNORED
    scores = delivered(metrics.regression(), {"predictions": table}, targets, way, cuts)
    columns = [(table[own, at], targets[own, at]) for at, own in enumerate(there.T) if own.any()]
    close(scores["mse"], np.mean([((x - y) ** 2).mean() for x, y in columns]) if columns else np.nan)
    differing = [pair for pair in columns if len(pair[0]) > 1]
    if differing:
        close(scores["pearson"], np.mean([stats.pearsonr(*pair)[0] for pair in differing]), 1e-8)
        close(scores["r2"], np.mean([sklearn_metrics.r2_score(y, x) for x, y in differing]), 1e-8)
    # rankings of the classes as candidates
    relevance = np.where(present == IGNORED, IGNORED, present * (1 + np.arange(classes)))
    scores = delivered(metrics.retrieval((2,)), {"scores": table}, relevance, way, cuts)
    found = []
    for own, labels in zip(table, relevance, strict=True):
        candidates = labels != IGNORED
        gains, order = labels[candidates], np.argsort(-own[candidates], kind="stable")
        if (gains > 0).any():
            hits = gains[order] > 0
            gain, ideal = (
                (g[:2] / np.log2(np.arange(2, 2 + len(g[:2])))).sum() for g in (gains[order], -np.sort(-gains))
            )
            found.append((1 / (1 + hits.argmax()), hits[:2].sum() / hits.sum(), gain / ideal))
    means = np.mean(found, axis=0) if found else [np.nan] * 3
    close([scores["mrr"], scores["recall_at_2"], scores["ndcg_at_2"]], means)


def test_scores_of_labels_values_and_rankings():
    holds(check_other_scores, st.tuples(tagged(), WAYS, CUTS), number=60)


def test_scores_of_groups_are_those_of_their_rows():
    def check(case):
        labels, probabilities, classes = case
        if not len(labels):
            return
        groups = np.arange(len(labels)) % 3
        ids, metric = probabilities.argmax(-1), metrics.classification(classes)
        scores = metrics.by_group(metric, groups)(evaluation(ids, labels))
        for name in set(groups):
            own = metric(evaluation(ids[groups == name], labels[groups == name]))
            close([scores[f"{key}/{name}"] for key in own], list(own.values()))

    holds(check, tagged(), number=40)


@pytest.mark.parametrize("side", ["queries", "documents"])
def test_nan_vectors_retrieve_nothing(side):
    vectors = {"queries": np.eye(12), "documents": np.eye(12)}
    vectors[side] = np.full((12, 12), np.nan)
    assert metrics.paired_retrieval((1, 10))(evaluation(vectors, np.zeros(12))) == {
        "mrr": 1 / 12,
        "recall_at_1": 0.0,
        "recall_at_10": 0.0,
    }


# --- copies and threads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", [lossfns, reducers, metrics], ids=lambda package: package.__name__)
def test_everything_exported_is_pickled_by_name(package):
    for name in package.__all__:
        exported = getattr(package, name)
        if inspect.isfunction(exported):
            assert pickle.loads(pickle.dumps(exported)) is exported


def test_threads_do_not_see_each_other():
    generator = torch.Generator().manual_seed(0)
    batches_ = [
        (torch.randn(2, 40, 300, generator=generator), torch.randint(300, (2, 40), generator=generator))
        for _ in range(6)
    ]

    def run(batch):
        logits, labels = leaf(batch[0]), batch[1]
        value = lossfns.causal_lm_loss({"logits": logits}, labels, term=lossfns.focal)
        value.backward()
        return value.detach(), logits.grad, reducers.sample_sums(*batch, shift=1, entropy=True)["entropy"]

    alone = [run(batch) for batch in batches_]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, batches_ * 4))
    for place, found in enumerate(together):
        assert all(map(torch.equal, found, alone[place % len(batches_)]))
