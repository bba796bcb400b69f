"""The losses under torch's machinery: what is supported gives the same numbers, what is not raises."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from lossfns import causal_lm_loss, class_counts, cross_entropy, kto, token_statistics
from lossfns._core import autograd, block, rows
from lossfns._core.autograd import without_saved_tensor_hooks
from lossfns.collators import count_pairs, stack_pairs, with_extras
from tests import oracle

B, S, H, V = 2, 5, 4, 11
LABELS = torch.tensor([[3, 1, -100, 6, 9], [-100, -100, 2, 5, -100]])
NEXT = 5
HIDDEN = torch.randn(B, S, H, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def head(dtype: torch.dtype = torch.float64) -> torch.nn.Linear:
    made = torch.nn.Linear(H, V, bias=False, dtype=dtype)
    weight = torch.randn(V, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    made.weight.data.copy_(weight)
    return made


def true_gradient(dtype: torch.dtype = torch.float64, hidden: torch.Tensor = HIDDEN) -> torch.Tensor:
    """Of the mean over the next tokens by the weight of the head, from the loop."""
    made = head(dtype).double()
    log_prob = oracle.statistics(made(hidden), LABELS, ("log_prob",), shift=1)["log_prob"]
    return torch.autograd.grad(-log_prob.sum() / NEXT, made.weight)[0]


def learnable(log_prob, *, scale):
    return -log_prob * scale


TERMS = [cross_entropy, partial(learnable, scale=torch.ones((), requires_grad=True))]
passes = pytest.mark.parametrize("term", TERMS, ids=["one pass", "two passes"])
overwriting = pytest.mark.parametrize("overwrite", [False, True])


# --- supported -------------------------------------------------------------------------------------------------------


@passes
@overwriting
def test_accumulation(term, overwrite):
    made = head()
    for scale in (1, 2):
        causal_lm_loss(made(scale * HIDDEN), LABELS, term=term, overwrite_logits=overwrite).backward()
    expected = true_gradient() + true_gradient(hidden=2 * HIDDEN)
    torch.testing.assert_close(made.weight.grad, expected, rtol=0, atol=1e-13)


@overwriting
@pytest.mark.parametrize("first", [0, 3], ids=["one ignored row a sample", "most ignored"])
def test_default_device_of_the_user_is_respected(monkeypatch, overwrite, first):
    """Where the logits are is what counts: `torch.set_default_device` must not move the host's own index."""
    logits, labels = torch.randn(B, S, 1 << 13, requires_grad=True), LABELS.clamp(min=0)
    labels[:, :first] = -100
    monkeypatch.setattr(block, "LAZY_ZERO_BYTES", 0)
    causal_lm_loss(logits * 1, labels, overwrite_logits=overwrite).backward()
    expected, logits.grad = logits.grad, None
    with torch.device("meta"):
        causal_lm_loss(logits * 1, labels, overwrite_logits=overwrite).backward()
    assert torch.equal(logits.grad, expected)


def test_default_device_other_than_the_logits_is_respected():
    """The numbers that objectives and collators make of lists stay beside what they belong to."""
    ratios, rows = torch.tensor([0.5, -0.5]), [{"labels": [1, 2], "w": [0.5, 1.0]}, {"labels": [3, 4], "w": [2.0, 1.0]}]

    def collate(features):
        return {"labels": torch.tensor([row["labels"] for row in features], device="cpu")}

    def everything():
        extras = with_extras(collate, ["w"], shift=1)(rows)
        paired = stack_pairs(collate, shift=1)([{"chosen": rows[0], "rejected": rows[1], "margin": 2.0}])
        counted = count_pairs(collate, shift=1)(rows)
        found = [kto(ratios, ratios > 0, 0.25), class_counts([0, 1, 1], num_classes=2)]
        return found + [value for batch in (extras, paired, counted) for value in batch["labels"].values()]

    expected = everything()
    with torch.device("meta"):
        found = everything()
    assert all(value.is_cpu and torch.equal(value, other) for value, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=["a scale of the head", "a weight"])
def test_backward_scales_by_the_upstream_gradient_on_its_device(shape, again):
    """Elsewhere than on a CPU, of which only the shapes can be seen here."""
    gradient = torch.zeros(shape, dtype=torch.bfloat16, device="meta")
    with mock.patch.object(autograd, "graph_is_kept", return_value=again):
        found = autograd.scale_saved_gradient(gradient, torch.ones((), device="meta"), reusable=again)
    assert (found.shape, found.dtype) == (gradient.shape, gradient.dtype)


@pytest.mark.parametrize("keep", [False, True], ids=["in place", "the graph is kept"])
def test_upstream_gradient_is_not_rounded_to_the_dtype_of_the_logits(keep):
    """bfloat16 holds 0.3 as 0.30078: every gradient of 0.3 times a loss would be a quarter of a percent too large."""
    logits = head(torch.float32)(HIDDEN.float()).detach().bfloat16().requires_grad_()
    (plain,) = torch.autograd.grad(causal_lm_loss(logits, LABELS), logits)
    (scaled,) = torch.autograd.grad(0.3 * causal_lm_loss(logits, LABELS), logits, retain_graph=keep)
    assert torch.equal(scaled, (plain.float() * torch.tensor(0.3)).bfloat16())
    assert not torch.equal(scaled, plain * torch.tensor(0.3).bfloat16())


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
    ids=["float32", "bfloat16", "float16"],
)
@overwriting
def test_grad_scaler(dtype, tolerance, overwrite):
    made, scaler = head(torch.float32), torch.amp.GradScaler("cpu", init_scale=65_536.0)
    optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
    loss = causal_lm_loss(made(HIDDEN.float()).to(dtype), LABELS, overwrite_logits=overwrite)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(made.weight.grad.double(), true_gradient(), rtol=0, atol=tolerance)
    before = made.weight.detach().clone()
    scaler.step(optimizer)
    assert not made.weight.equal(before)


@passes
@overwriting
def test_hooks_on_the_logits(term, overwrite):
    made, seen = head(), []
    logits = made(HIDDEN)
    logits.register_hook(lambda gradient: seen.append(gradient.clone()))
    logits.register_hook(lambda gradient: 2 * gradient)
    causal_lm_loss(logits, LABELS, term=term, overwrite_logits=overwrite).backward()
    torch.testing.assert_close(made.weight.grad, 2 * true_gradient(), rtol=0, atol=1e-13)
    by_hand = torch.einsum("bsv,bsh->vh", seen[0], HIDDEN)
    torch.testing.assert_close(by_hand, true_gradient(), rtol=0, atol=1e-13)


@passes
def test_a_gradient_that_is_retained(term):
    made = head()
    logits = made(HIDDEN)
    logits.retain_grad()
    causal_lm_loss(logits, LABELS, term=term).backward()
    torch.testing.assert_close(torch.einsum("bsv,bsh->vh", logits.grad, HIDDEN), true_gradient(), rtol=0, atol=1e-13)


@passes
def test_save_on_cpu(term):
    made = head()
    with torch.autograd.graph.save_on_cpu():
        loss = causal_lm_loss(made(HIDDEN), LABELS, term=term)
    loss.backward()
    torch.testing.assert_close(made.weight.grad, true_gradient(), rtol=0, atol=1e-13)


def check_checkpointing(term, reentrant):
    """One run of the block in the forward pass and one in the backward pass, however many chunks there are."""
    made, calls = head(), []

    def block(hidden):
        calls.append(None)
        return causal_lm_loss(made(hidden), LABELS, term=term)

    loss = checkpoint(block, HIDDEN.clone().requires_grad_(), use_reentrant=reentrant)
    loss *= 1
    loss.backward()
    torch.testing.assert_close(made.weight.grad, true_gradient(), rtol=0, atol=1e-13)
    assert len(calls) == 2


def roundabout(log_prob):
    """Cross-entropy again; its derivative needs what autograd has saved."""
    return log_prob.square() / -log_prob


@pytest.mark.parametrize("term", [*TERMS, roundabout], ids=["one pass", "two passes", "saved values"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_around_the_loss(term, reentrant, monkeypatch):
    monkeypatch.setattr(rows, "CPU_CHUNK_BYTES", 1)
    check_checkpointing(term, reentrant)


def test_hooks_on_the_graph_of_a_chunk_are_found(monkeypatch):
    monkeypatch.setattr(rows, "CPU_CHUNK_BYTES", 1)
    monkeypatch.setattr("lossfns._core.term_loss.without_saved_tensor_hooks", nullcontext)
    with pytest.raises(AssertionError, match=r"assert [3-9] == 2"):
        check_checkpointing(roundabout, False)


def test_saved_tensor_hooks_of_the_user_are_restored():
    graph, saved, x = torch.autograd.graph, [], torch.ones(2, requires_grad=True)
    with graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        with without_saved_tensor_hooks(), without_saved_tensor_hooks():
            x.exp()
        assert not saved
        x.exp()
    assert len(saved) == 1
    with graph.disable_saved_tensors_hooks("of the user"):
        with without_saved_tensor_hooks():
            x.exp()
        with pytest.raises(RuntimeError, match="of the user"), graph.save_on_cpu():
            pass


def test_checkpointing_does_not_go_with_overwriting():
    """The logits are gone when they are wanted again; that raises."""
    loss = checkpoint(
        partial(causal_lm_loss, labels=LABELS, overwrite_logits=True), head()(HIDDEN), use_reentrant=False
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def by_matrix(log_prob, log_normalizer):
    """A term that autocast would round."""
    return -(torch.stack([log_prob, log_normalizer], -1) @ log_prob.new_tensor([[1.0], [0.1]]))[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing_inside(dtype):
    results = []
    for enabled in (False, True):
        logits = head()(HIDDEN).to(dtype).detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = causal_lm_loss(logits, LABELS, term=by_matrix)
        loss.backward()
        results.append((loss.detach(), logits.grad))
    for plain, cast in zip(*results, strict=True):
        assert cast.equal(plain)
        assert cast.dtype == plain.dtype


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


def test_one_graph_break_in_a_compiled_step(dynamo):
    made = head()

    def step(hidden):
        return 2 * causal_lm_loss(made(torch.tanh(hidden)), LABELS)

    explained = dynamo.explain(step)(HIDDEN)
    assert explained.graph_break_count == 1, explained.break_reasons
    assert explained.graph_count == 2


@passes
@overwriting
def test_a_compiled_step_gives_the_same_numbers(dynamo, term, overwrite):
    def step(made, hidden):
        return causal_lm_loss(made(hidden), LABELS, term=term, overwrite_logits=overwrite)

    plain, compiled = head(), head()
    expected = step(plain, HIDDEN)
    expected.backward()
    found = torch.compile(step, backend="eager")(compiled, HIDDEN)
    found.backward()
    assert found.equal(expected)
    assert compiled.weight.grad.equal(plain.weight.grad)


# --- is the graph kept? ----------------------------------------------------------------------------------------------


def asked_inside_backward(**options):
    answers = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 1 * x

        @staticmethod
        def backward(ctx, upstream):
            answers.append(autograd.graph_is_kept())
            return upstream

    Ask.apply(torch.ones(1, requires_grad=True)).backward(**options)
    return answers


def test_torch_still_tells_whether_the_graph_is_kept():
    assert hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert asked_inside_backward(retain_graph=True) == [True]
    assert asked_inside_backward(retain_graph=False) == [False]
    assert asked_inside_backward() == [False]


def check_twice():
    """A gradient at three times the scale, then one as it is."""
    logits = head()(HIDDEN).detach().requires_grad_()
    loss = causal_lm_loss(logits, LABELS)
    (scaled,) = torch.autograd.grad(3 * loss, logits, retain_graph=True)
    kept = scaled.clone()
    (last,) = torch.autograd.grad(loss, logits)
    assert scaled.equal(kept)
    torch.testing.assert_close(torch.einsum("bsv,bsh->vh", last, HIDDEN), true_gradient(), rtol=0, atol=1e-13)


def test_gradient_is_copied_when_torch_cannot_tell_whether_the_graph_is_kept(monkeypatch):
    check_twice()
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert asked_inside_backward() == [True]
    check_twice()


def test_sharing_the_buffer_while_the_graph_is_kept_is_found(monkeypatch):
    monkeypatch.setattr(autograd, "graph_is_kept", lambda: False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        check_twice()


# --- refused ---------------------------------------------------------------------------------------------------------


def value(logits, labels=LABELS):
    return causal_lm_loss(logits, labels)


def log_probs(logits, labels=LABELS):
    return token_statistics(logits, labels)["log_prob"].sum()


functions = pytest.mark.parametrize("function", [value, log_probs])


def dual(function):
    logits = head()(HIDDEN).detach()
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(logits, logits))


@functions
@pytest.mark.parametrize(
    ("transform", "message"),
    [
        pytest.param(lambda f: torch.func.grad(f)(head()(HIDDEN)), "torch.func transforms", id="grad"),
        pytest.param(lambda f: torch.func.vjp(f, head()(HIDDEN)), "torch.func transforms", id="vjp"),
        pytest.param(lambda f: torch.func.jacrev(f)(head()(HIDDEN)), "torch.func transforms", id="jacrev"),
        pytest.param(lambda f: torch.func.vmap(f)(head()(HIDDEN)[None]), "torch.func transforms", id="vmap"),
        pytest.param(
            lambda f: torch.func.vmap(f)(head()(HIDDEN)[None], LABELS[None]), "torch.func transforms", id="vmap, labels"
        ),
        pytest.param(
            lambda f: torch.func.jvp(f, (head()(HIDDEN).detach(),), (HIDDEN.new_ones(B, S, V),)),
            "torch.func transforms",
            id="jvp",
        ),
        pytest.param(dual, "no forward-mode derivative", id="forward mode"),
    ],
)
def test_transforms_are_refused(function, transform, message):
    with pytest.raises(RuntimeError, match=message):
        transform(function)


@functions
def test_second_derivatives_are_refused(function):
    """Silence would be wrong: the second-order term is missing."""
    logits = head()(HIDDEN).detach().requires_grad_()
    loss = function(logits)
    with pytest.raises(RuntimeError, match="create_graph=True: lossfns has no second derivative"):
        torch.autograd.grad(loss.square(), logits, create_graph=True)


@passes
def test_second_derivatives_are_refused_in_both_ways(term):
    logits = head()(HIDDEN).detach().requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        causal_lm_loss(logits, LABELS, term=term).backward(create_graph=True)
