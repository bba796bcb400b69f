"""The losses as the Trainer calls them: counts, forms of outputs and labels, overwriting, graphs, bad input."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_outputs import CausalLMOutput, MoeCausalLMOutputWithPast

from lossfns import (
    causal_lm_loss,
    cross_entropy,
    focal,
    masked_lm_loss,
    multi_token_loss,
    seq2seq_lm_loss,
    smoothed_cross_entropy,
)
from lossfns._core import block
from tests import oracle, tiny

N = oracle.IGNORED
B, S, V = 2, 5, 11
LABELS = torch.tensor([[3, 1, N, 6, 9], [N, N, 2, 5, N]])
NEXT = 5  # labels that a causal loss scores
TOTAL = 6


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).to(dtype)


def nll(logits: torch.Tensor, labels: torch.Tensor = LABELS, shift: int = 1) -> torch.Tensor:
    """The sum over the labels by a loop; differentiable."""
    return -oracle.statistics(logits, labels, ("log_prob",), shift=shift)["log_prob"].sum()


def model_logits(dtype: torch.dtype = torch.float64, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, and logits as a head makes them: no leaf, with a storage of their own."""
    hidden = normal(B, S, 4, seed=seed).requires_grad_()
    return hidden, (hidden @ normal(4, V, seed=seed + 1) / 3).to(dtype)


@pytest.fixture
def rows_read(monkeypatch):
    """How many rows of logits the kernel has read so far."""
    read, rows = block.read, []
    monkeypatch.setattr(block, "read", lambda x, some, out: rows.append(len(some)) or read(x, some, out))
    return rows


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "shift"),
    [
        (causal_lm_loss, 1),
        (partial(causal_lm_loss, shift=0), 0),
        (partial(causal_lm_loss, shift=2), 2),
        (masked_lm_loss, 0),
        (seq2seq_lm_loss, 0),
    ],
    ids=["causal", "causal, shift 0", "causal, shift 2", "masked", "seq2seq"],
)
def test_the_mean_over_the_scored_labels(loss, shift):
    logits, number = normal(B, S, V), int((LABELS[:, shift:] != N).sum())
    expected = nll(logits, shift=shift) / number
    torch.testing.assert_close(loss(logits, LABELS), expected, rtol=0, atol=1e-13)
    other = nll(logits, shift=1 - min(shift, 1)) / number
    assert abs(loss(logits, LABELS) - other) > 1e-3


@pytest.mark.parametrize(
    ("dtype", "output"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_value_and_gradient_are_no_worse_than_usual(dtype, output, overwrite):
    def usual(logits):
        x = logits.to(output)[:, :-1].flatten(0, 1)
        return F.cross_entropy(x, LABELS[:, 1:].flatten(), reduction="sum") / NEXT

    results = {}
    for name, loss in {
        "found": partial(causal_lm_loss, labels=LABELS, overwrite_logits=overwrite),
        "usual": usual,
        "true": lambda logits: nll(logits.double()) / NEXT,
    }.items():
        leaf = normal(B, S, V, dtype=dtype).requires_grad_()
        leaf = leaf.detach().double().requires_grad_() if name == "true" else leaf
        value = loss(leaf.clone())
        value.backward()
        results[name] = value.detach(), leaf.grad
    for place in (0, 1):
        found, usual_one, true = (results[name][place] for name in ("found", "usual", "true"))
        assert found.dtype == (output, dtype)[place]
        oracle.assert_no_worse(found, usual_one, true)


# --- the count -------------------------------------------------------------------------------------------------------

COUNTS = {
    "none": (None, NEXT),
    "int": (40, 40),
    "float": (40.5, 40.5),
    "int64": (torch.tensor(40), 40),
    "float32": (torch.tensor(40.5), 40.5),
    "one device": (torch.tensor([40]), 40),
    "three devices": (torch.tensor([[20], [15], [5]]), 40),
    "zero": (0, 1),
    "a zero tensor": (torch.tensor(0), 1),
}


def check_count(loss, form):
    given, count = COUNTS[form]
    before = given.clone() if torch.is_tensor(given) else given
    logits = normal(B, S, V).requires_grad_()
    value = loss(logits, LABELS, given)
    assert value.shape == ()
    value.backward()
    expected = normal(B, S, V).requires_grad_()
    true = nll(expected) / count
    true.backward()
    torch.testing.assert_close(value, true, rtol=0, atol=1e-13)
    torch.testing.assert_close(logits.grad, expected.grad, rtol=0, atol=1e-13)
    assert torch.equal(given, before) if torch.is_tensor(given) else given == before


@pytest.mark.parametrize("form", COUNTS)
def test_every_form_of_the_count(form):
    check_count(causal_lm_loss, form)


@pytest.mark.parametrize("form", ["three devices", "zero", "none"])
def test_division_by_the_count_as_it_came_is_found(form):
    def broken(logits, labels, count):
        return nll(logits) / (1e9 if count is None else count)

    with pytest.raises(AssertionError):
        check_count(broken, form)


@pytest.mark.parametrize("count", ["40", [40], True, 4j])
def test_a_count_that_is_no_number(count, rows_read):
    with pytest.raises(TypeError, match=f"must be None, a number or a tensor, got {type(count).__name__}"):
        causal_lm_loss(normal(B, S, V), LABELS, count)
    assert not rows_read


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_large_count_loses_nothing(dtype):
    """Counts are float64: 2**24 + 1 is not a float32."""
    logits = normal(B, S, V, dtype=dtype)
    expected = nll(logits) / (2**24 + 1)
    found = causal_lm_loss(logits, LABELS, torch.tensor(2**24 + 1))
    assert found.item() == pytest.approx(expected.item(), rel=1e-13 if dtype == torch.float64 else 1e-6)


# --- nothing to learn from -------------------------------------------------------------------------------------------


def check_all_ignored(loss, count, dtype=torch.float32, overwrite=False):
    hidden, logits = model_logits(dtype)
    logits.data[0, 0] = torch.nan  # an ignored row may hold anything
    value = loss({"logits": logits}, torch.full((B, S), N), count, overwrite_logits=overwrite)
    assert value.item() == 0.0
    value *= 1
    value.backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.parametrize("count", [None, 0, 7, torch.tensor(0), torch.tensor([[0], [0]])], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("overwrite", [False, True])
def test_every_label_ignored(count, dtype, overwrite):
    for term in (cross_entropy, smoothed_cross_entropy):
        check_all_ignored(partial(causal_lm_loss, term=term), count, dtype, overwrite)


def test_masking_by_multiplication_is_found():
    def broken(outputs, labels, count, overwrite_logits):
        valid = labels != N
        log_p = outputs["logits"].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return -(log_p * valid).sum() / max(1, count)

    with pytest.raises(AssertionError):
        check_all_ignored(broken, 7)


# --- forms of outputs and labels -------------------------------------------------------------------------------------


def outputs(logits):
    """Everything a model may return, by name."""
    cache = (torch.randn(B, 4, S, 8), torch.randn(B, 4, S, 8))
    return {
        "ModelOutput": CausalLMOutput(logits=logits),
        "with a loss": CausalLMOutput(loss=torch.tensor(9.0), logits=logits),
        "Mixtral": MoeCausalLMOutputWithPast(
            aux_loss=torch.tensor(0.1), logits=logits, router_logits=(torch.randn(B * S, 4),)
        ),
        "dict": {"logits": logits, "hidden_states": torch.randn(B, S, 4)},
        "tuple": (logits,),
        "list": [logits],
        "tuple after a loss": (torch.tensor(9.0), logits),
        "tuple after ids, a cache and gates": (torch.ones(B, S, V, dtype=torch.long), cache, torch.randn(B, S), logits),
        "tuple with another batch first": (torch.randn(B * S, 1, V), logits),
        "tensor": logits,
    }


@pytest.mark.parametrize("form", outputs(normal(B, S, V)))
def test_every_form_of_the_outputs(form):
    logits = normal(B, S, V)
    found = causal_lm_loss(outputs(logits)[form], LABELS)
    torch.testing.assert_close(found, nll(logits) / NEXT, rtol=0, atol=1e-13)


def test_the_choice_can_be_made_by_hand():
    first, second = normal(B, S, V), normal(B, S, V, seed=1)
    found = causal_lm_loss((first, second), LABELS, select=lambda outputs: outputs[1])
    torch.testing.assert_close(found, nll(second) / NEXT, rtol=0, atol=1e-13)
    with pytest.raises(TypeError, match="logits must be a tensor, got tuple"):
        causal_lm_loss((first, second), LABELS, select=tuple)


@pytest.mark.parametrize("shape", [(B, S), (B,)], ids=str)
def test_extras_travel_in_a_dict_of_labels(shape):
    def term(log_prob, margin):
        return -log_prob * margin

    margin = normal(*shape, seed=5)
    labels = {"labels": LABELS, "margin": margin, "unused": torch.zeros(3)}
    found = causal_lm_loss(normal(B, S, V), labels, term=term)
    log_prob = oracle.statistics(normal(B, S, V), LABELS, ("log_prob",), shift=1)["log_prob"]
    spread = margin if margin.ndim == 2 else margin[:, None]
    torch.testing.assert_close(found, -(log_prob * spread).sum() / NEXT, rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(S,), (B, S - 1), (B, S, 1), ()], ids=str)
def test_extras_of_another_shape(shape, rows_read):
    labels = {"labels": LABELS, "margin": torch.zeros(shape)}
    with pytest.raises(ValueError, match=r"'margin' .* must have the labels' shape \(2, 5\) or one value per sample"):
        causal_lm_loss(normal(B, S, V), labels, term=lambda log_prob, margin: log_prob)
    assert not rows_read


@pytest.mark.parametrize("lead", [1, 3])
def test_logits_that_are_longer_on_the_left(lead):
    """Prompt tuning puts its virtual tokens before the text."""
    logits = normal(B, S + lead, V)
    found = causal_lm_loss(logits, LABELS)
    torch.testing.assert_close(found, nll(logits[:, lead:]) / NEXT, rtol=0, atol=1e-13)
    assert abs(found - nll(logits[:, :S]) / NEXT) > 1e-3


@pytest.mark.parametrize("train", [False, True])
def test_inputs_are_left_alone(train):
    logits, labels, margin = normal(B, S, V).requires_grad_(train), LABELS.clone(), normal(B, S, seed=3)
    kept = [tensor.detach().clone() for tensor in (logits, labels, margin)]
    count = torch.tensor([[3], [4]])
    value = causal_lm_loss(
        logits, {"labels": labels, "margin": margin}, count, term=lambda log_prob, margin: -log_prob * margin
    )
    if train:
        value.backward()
    for tensor, before in zip((logits, labels, margin), kept, strict=True):
        assert tensor.equal(before)
    assert count.tolist() == [[3], [4]]


# --- graphs ----------------------------------------------------------------------------------------------------------


def true_gradient(weight: float = 1.0) -> torch.Tensor:
    logits = normal(B, S, V).requires_grad_()
    return torch.autograd.grad(weight * nll(logits) / NEXT, logits)[0]


def test_the_loss_can_be_scaled_in_place():
    """What the Trainer does to it, also by one."""
    logits = normal(B, S, V).requires_grad_()
    loss = causal_lm_loss(logits, LABELS)
    loss *= 0.5
    loss.backward()
    torch.testing.assert_close(logits.grad, true_gradient(0.5), rtol=0, atol=1e-14)


@pytest.mark.parametrize("term", [cross_entropy, smoothed_cross_entropy])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["one pass", "two passes"])
def test_a_kept_graph_gives_the_same_gradient_every_time(dtype, term):
    logits = normal(B, S, V, dtype=dtype).requires_grad_()
    loss = causal_lm_loss(logits, LABELS, term=term)
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    kept = first.clone()
    (scaled,) = torch.autograd.grad(3 * loss, logits, retain_graph=True)
    (last,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(scaled, 3 * kept)
    assert last.equal(kept)
    assert first.equal(kept)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_two_losses_of_the_same_logits():
    logits = normal(B, S, V).requires_grad_()
    (causal_lm_loss(logits, LABELS) + 2 * masked_lm_loss(logits, LABELS)).backward()
    expected = normal(B, S, V).requires_grad_()
    (nll(expected) / NEXT + 2 * nll(expected, shift=0) / TOTAL).backward()
    torch.testing.assert_close(logits.grad, expected.grad, rtol=0, atol=1e-13)


def test_logits_without_gradient():
    assert not causal_lm_loss(normal(B, S, V), LABELS).requires_grad
    with torch.no_grad():
        assert not causal_lm_loss(normal(B, S, V).requires_grad_(), LABELS).requires_grad
    with torch.inference_mode():
        found = causal_lm_loss(normal(B, S, V), LABELS)
    torch.testing.assert_close(found.clone(), nll(normal(B, S, V)) / NEXT, rtol=0, atol=1e-13)


class Temperature(torch.nn.Module):
    """A term with something to learn."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, log_prob, log_normalizer):
        return -log_prob * self.scale + self.scale.square() * log_normalizer


def check_learnable(loss, *, as_module=True):
    term, logits = Temperature(), normal(B, S, V).requires_grad_()
    loss(logits, LABELS, term=term if as_module else term.forward).backward()
    expected, x = Temperature(), normal(B, S, V).requires_grad_()
    found = oracle.statistics(x, LABELS, ("log_prob", "log_normalizer"), shift=1)
    total = expected(**found).sum() / NEXT
    total.backward()
    torch.testing.assert_close(logits.grad, x.grad, rtol=0, atol=1e-13)
    assert term.scale.grad is not None
    torch.testing.assert_close(term.scale.grad, expected.scale.grad, rtol=0, atol=1e-13)


def test_weights_of_a_term_get_their_gradient(monkeypatch):
    check_learnable(causal_lm_loss)
    check_learnable(causal_lm_loss, as_module=False)
    check_learnable(
        lambda logits, labels, term: causal_lm_loss(logits.clone(), labels, term=term, overwrite_logits=True)
    )
    monkeypatch.setattr("lossfns._core.term_loss.is_learnable", lambda bound, like: False)
    with pytest.raises((AssertionError, RuntimeError)):
        check_learnable(causal_lm_loss)


def test_a_teacher_trained_along_gets_its_gradient():
    teacher = normal(B, S, seed=4).requires_grad_()
    labels = {"labels": LABELS, "teacher": teacher}
    causal_lm_loss(
        normal(B, S, V).requires_grad_(), labels, term=lambda log_prob, teacher: (log_prob - teacher).square()
    ).backward()
    log_prob = oracle.statistics(normal(B, S, V), LABELS, ("log_prob",), shift=1)["log_prob"]
    valid = (LABELS != N) & (torch.arange(S) > 0)
    expected = torch.where(valid, 2 * (teacher.detach() - log_prob) / NEXT, 0)
    torch.testing.assert_close(teacher.grad, expected, rtol=0, atol=1e-13)


# --- fp16 with the factor of a GradScaler ----------------------------------------------------------------------------


def check_fp16(loss):
    """A gradient of 1e-8 is 0 in float16, but not 65,536 times as much, which is what a GradScaler asks for."""
    logits = normal(B, S, V, dtype=torch.float16).requires_grad_()
    (65_536 * loss(logits, LABELS, 10_000_000)).backward()
    expected = normal(B, S, V, dtype=torch.float16).double().requires_grad_()
    (65_536 * nll(expected) / 10_000_000).backward()
    torch.testing.assert_close(logits.grad.double(), expected.grad, rtol=2e-3, atol=1e-7)


def test_gradients_in_float16_do_not_underflow():
    check_fp16(causal_lm_loss)
    check_fp16(lambda logits, labels, count: causal_lm_loss(logits.clone(), labels, count, overwrite_logits=True))

    def in_one_pass(logits, labels, count):
        (gradient,) = torch.autograd.grad(nll(logits) / count, logits)  # rounded to float16 before the factor comes
        return (logits * gradient).sum()

    with pytest.raises(AssertionError):
        check_fp16(in_one_pass)


# --- overwriting -----------------------------------------------------------------------------------------------------


DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("term", [cross_entropy, smoothed_cross_entropy])
@pytest.mark.parametrize("labels", [LABELS, torch.full((B, S), N), LABELS.clamp(min=0)], ids=["gaps", "none", "all"])
def test_overwriting_changes_no_digit(dtype, term, labels):
    results = []
    for overwrite in (False, True):
        hidden, logits = model_logits(dtype)
        loss = causal_lm_loss(logits, labels, term=term, overwrite_logits=overwrite)
        loss.backward()
        results.append((loss.detach(), hidden.grad))
    assert results[0][0].equal(results[1][0])
    assert results[0][1].equal(results[1][1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_gradient_lies_where_the_logits_lay(dtype):
    _, logits = model_logits(dtype)
    place, seen = logits.data_ptr(), []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    causal_lm_loss(logits, LABELS, overwrite_logits=True).backward()
    assert seen == [place]


@DTYPES
def test_overwritten_logits_are_empty_and_cannot_be_read(dtype):
    _, logits = model_logits(dtype)
    causal_lm_loss(CausalLMOutput(logits=logits), LABELS, overwrite_logits=True).backward()
    assert logits.shape == (0,)
    with pytest.raises((RuntimeError, IndexError)):
        logits.argmax(-1)
    with pytest.raises(ValueError, match=r"do not fit.*overwritten by an earlier loss"):
        causal_lm_loss(logits, LABELS)


@DTYPES
def test_who_saved_the_logits_is_protected_by_torch(dtype):
    _, logits = model_logits(dtype)
    regulariser = logits.square().sum()
    loss = causal_lm_loss(logits, LABELS, overwrite_logits=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + regulariser).backward()


@DTYPES
def test_who_only_added_to_the_logits_is_not_disturbed(dtype):
    hidden, logits = model_logits(dtype)
    total = logits.double().sum()
    (causal_lm_loss(logits, LABELS, overwrite_logits=True) + total).backward()
    expected, logits = model_logits(dtype)
    (causal_lm_loss(logits, LABELS) + logits.double().sum()).backward()
    torch.testing.assert_close(hidden.grad, expected.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["one pass", "two passes"])
def test_a_second_backward_is_refused(dtype):
    _, logits = model_logits(dtype)
    loss = causal_lm_loss(logits, LABELS, overwrite_logits=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"has used up the gradient|modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: normal(B, S, V).requires_grad_(), "a leaf"),
        (lambda: normal(B * S, V).requires_grad_().view(B, S, V), "a leaf, or a view of one"),
        (lambda: (1 * normal(B, S + 1, V).requires_grad_())[:, :S], "fill their storage alone"),
        (lambda: (1 * normal(2 * B, S, V).requires_grad_())[:B], "fill their storage alone"),
        (lambda: (1 * normal(S, B, V).requires_grad_()).transpose(0, 1), "fill their storage alone"),
        (lambda: (1 * normal(B, 1, V).requires_grad_()).expand(B, S, V), "fill their storage alone"),
    ],
    ids=["a leaf", "a view of a leaf", "one position less", "half a batch", "transposed", "expanded"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["one pass", "two passes"])
def test_logits_that_must_not_be_overwritten(make, reason, dtype, rows_read, monkeypatch):
    logits = make()
    if dtype == torch.float16:
        monkeypatch.setattr("lossfns._core.term_loss.is_learnable", lambda bound, like: True)
    before = logits.detach().clone()
    with pytest.raises(ValueError, match=f"overwrite_logits=True cannot write over these logits.*{reason}.*=False"):
        causal_lm_loss(logits, LABELS, overwrite_logits=True)
    assert not rows_read
    assert logits.equal(before)


def test_evaluation_keeps_its_logits():
    logits = normal(B, S, V)
    before = logits.clone()
    with torch.no_grad():
        causal_lm_loss(logits.requires_grad_(), LABELS, overwrite_logits=True)
    causal_lm_loss(logits.detach(), LABELS, overwrite_logits=True)
    assert logits.equal(before)


def test_a_whole_view_of_the_logits_may_be_overwritten():
    """What flattening heads hand over: a view that covers its base, which is emptied with it."""
    hidden, logits = model_logits()
    flat = logits.view(B * S, V)
    loss = causal_lm_loss(flat.view(B, S, V), LABELS, overwrite_logits=True)
    assert logits.numel() == 0
    loss.backward()
    expected, logits = model_logits()
    causal_lm_loss(logits, LABELS).backward()
    assert hidden.grad.equal(expected.grad)


# --- bad input -------------------------------------------------------------------------------------------------------

IDS = torch.zeros(B, S, dtype=torch.long)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"labels": None}, ValueError, "labels are None.*no key 'labels'.*Add it in the data collator"),
        ({"labels": (LABELS, LABELS)}, TypeError, "a tensor or a dict of tensors, got tuple"),
        ({"labels": {"ids": LABELS}}, ValueError, r"must contain the tensor 'labels', got the keys \['ids'\]"),
        ({"labels": torch.full((B, S), V)}, ValueError, "label 11 is out of range.*11 classes.*0 to 10"),
        ({"labels": torch.full((B, S), -1)}, ValueError, "label -1 is out of range.*replace_labels"),
        ({"labels": LABELS.double()}, TypeError, "integer class ids, got torch.float64"),
        (
            {"labels": LABELS.flatten()},
            ValueError,
            r"\(batch, sequence\), got \(10,\).*a shift after flattening",
        ),
        ({"labels": LABELS[:1]}, ValueError, r"logits \(2, 5, 11\) and labels \(1, 5\) do not fit"),
        ({"labels": LABELS[..., None]}, ValueError, r"and labels \(2, 5, 1\) do not fit"),
        ({"outputs": normal(B, S - 1, V)}, ValueError, "logits cover 4 positions, labels 5.*keep_supervised_logits"),
        ({"outputs": normal(B * S, V)}, ValueError, r"logits \(10, 11\) and labels \(2, 5\) do not fit"),
        ({"outputs": IDS}, TypeError, "expected logits, got torch.int64.*look like ids"),
        ({"outputs": {"logits": IDS}}, TypeError, "look like ids"),
        ({"outputs": (IDS,)}, ValueError, r"found no logits among the outputs \[\(2, 5\)\].*return a dict"),
        ({"outputs": {"loss": torch.zeros(())}}, ValueError, r"returned no logits.*use_liger_kernel.*Keys.*\['loss'\]"),
        ({"outputs": CausalLMOutput(loss=torch.zeros(()))}, ValueError, "returned no logits"),
        ({"outputs": "logits"}, TypeError, "ModelOutput, dict, tuple or tensor, got str"),
        ({"term": lambda logprob: logprob}, TypeError, "asks for 'logprob'"),
        ({"shift": -1}, ValueError, "shift must be an int >= 0"),
        ({"shift": 1.0}, ValueError, "shift must be an int >= 0"),
    ],
)
def test_bad_input_is_refused_before_any_work(change, error, message, rows_read):
    given = {"outputs": normal(B, S, V).requires_grad_(), "labels": LABELS} | change
    with pytest.raises(error, match=message):
        causal_lm_loss(**given)
    assert not rows_read


def test_misspelt_options_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword"):
        causal_lm_loss(normal(B, S, V), LABELS, overwrite=True)
    with pytest.raises(TypeError, match="unexpected keyword"):
        masked_lm_loss(normal(B, S, V), LABELS, shift=1)


def test_the_spy_sees_the_work(rows_read):
    causal_lm_loss(normal(B, S, V).requires_grad_(), LABELS)
    assert sum(rows_read) == NEXT


# --- several tokens at once ------------------------------------------------------------------------------------------

HEAD_LABELS = torch.tensor([[N, 3, N, 6, 2], [0, 2, 2, 1, N]])
HEADS = ("logits", "second", "third")
HEAD_WEIGHTS = (1.0, 0.3, 0.1)
HEAD_TERMS = {
    "cross-entropy": ({}, lambda p: -math.log(p)),
    "focal": ({"term": focal}, lambda p: -((1 - p) ** 2) * math.log(p)),
}


def head_logits(seed):
    return torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


HEAD_LOGITS = [head_logits(seed) for seed in range(3)]


def multi_token_by_loop(heads, labels, formula, count):
    total = 0.0
    for shift, (weight, logits) in enumerate(zip(HEAD_WEIGHTS, heads, strict=True), 1):
        for place, row in oracle.pairs(logits, labels, shift=shift):
            x = logits[row].tolist()
            total += weight * formula(math.exp(x[int(labels[place])]) / math.fsum(map(math.exp, x)))
    return total / count


@pytest.mark.parametrize(("options", "formula"), HEAD_TERMS.values(), ids=HEAD_TERMS)
@pytest.mark.parametrize(("given", "count"), [(None, 6), (11, 11), (torch.tensor([[4], [7]]), 11)])
def test_every_head_looks_one_token_further(options, formula, given, count):
    outputs = dict(zip(HEADS, HEAD_LOGITS, strict=True))
    found = multi_token_loss(outputs, HEAD_LABELS, given, heads=HEADS, weights=HEAD_WEIGHTS, **options)
    assert found.item() == pytest.approx(multi_token_by_loop(HEAD_LOGITS, HEAD_LABELS, formula, count), rel=1e-12)


def multi_token_gradients(loss):
    leaves = [logits.clone().requires_grad_() for logits in HEAD_LOGITS]
    outputs = dict(zip(HEADS, [leaf * 1 for leaf in leaves], strict=True))
    return torch.autograd.grad(loss(outputs, HEAD_LABELS, heads=HEADS, weights=HEAD_WEIGHTS), leaves)


def test_multi_token_gradients():
    def loss(*heads):
        return multi_token_loss(dict(zip(HEADS, heads, strict=True)), HEAD_LABELS, heads=HEADS, weights=HEAD_WEIGHTS)

    assert torch.autograd.gradcheck(loss, [logits.clone().requires_grad_() for logits in HEAD_LOGITS])


def test_multi_token_logits_may_be_overwritten():
    overwriting = partial(multi_token_loss, overwrite_logits=True)
    assert all(map(torch.equal, multi_token_gradients(overwriting), multi_token_gradients(multi_token_loss)))


def test_rows_too_short_to_look_ahead():
    outputs = {name: logits[:, :2] for name, logits in zip(HEADS, HEAD_LOGITS, strict=True)}
    found = multi_token_loss(outputs, HEAD_LABELS[:, :2], heads=HEADS, weights=HEAD_WEIGHTS)
    first = multi_token_loss(outputs, HEAD_LABELS[:, :2], heads=HEADS[:1], weights=HEAD_WEIGHTS[:1])
    assert found.item() == first.item()


def test_number_of_weights_equals_number_of_heads():
    with pytest.raises(ValueError, match="one weight per head"):
        multi_token_loss({"logits": HEAD_LOGITS[0]}, HEAD_LABELS, heads=HEADS, weights=(1.0,))
    with pytest.raises(TypeError, match="heads must be a sequence, got 'logits'"):
        multi_token_loss({"logits": HEAD_LOGITS[0]}, HEAD_LABELS, heads="logits", weights=(1.0,) * 6)


def test_missing_head_raises():
    with pytest.raises(ValueError, match="expected 'second' among the outputs"):
        multi_token_loss({"logits": HEAD_LOGITS[0]}, HEAD_LABELS, heads=HEADS[:2], weights=(1.0, 0.5))


class TwoHeads(torch.nn.Module):
    """A causal language model with one more head."""

    def __init__(self):
        super().__init__()
        self.model = tiny.model("llama")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.second = torch.nn.Linear(tiny.HIDDEN, tiny.VOCAB, dtype=torch.float64)

    def forward(self, input_ids, attention_mask, labels=None, **kwargs):
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        return {"logits": found.logits, "second": self.second(found.hidden_states[-1])}


def test_multi_token_accumulation_is_one_big_batch():
    rows = [{**row, "labels": row["labels"].index_fill(0, torch.tensor([0]), N)} for row in tiny.lm_rows(8)]
    loss = partial(multi_token_loss, heads=HEADS[:2], weights=(1.0, 0.5))
    found = [
        tiny.gradient_of(
            tiny.trainer(
                TwoHeads(), rows, loss, per_device_train_batch_size=8 // steps, gradient_accumulation_steps=steps
            )
        )
        for steps in (1, 4)
    ]
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    assert found[0].abs().max() > 1e-3
