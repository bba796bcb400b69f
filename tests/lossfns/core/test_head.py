"""Statistics, losses and top ids of logits that are made a few rows at a time, against all logits and the slow loop."""

from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.hidden import Products
from lossfns import causal_lm_loss, head_token_statistics
from lossfns._core import head as head_module
from lossfns._core import head_products, rows
from lossfns._core.alignment import align
from lossfns._core.head_products import Head, LinearProducts, ModuleProducts
from lossfns._core.hidden import logits_like
from lossfns._core.signature import STATISTICS
from tests import oracle

B, S, H, V = 2, 7, 5, 19
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
LABELS = torch.tensor([[3, 1, -100, 6, 9, 18, 0], [-100, -100, 2, 5, -100, 7, 7]])
FIELDS = (*STATISTICS, "rank", "top_id")


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


class Adapter(nn.Module):
    """A frozen linear map and a low-rank one beside it, as LoRA has."""

    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(H, V), nn.Linear(H, 2, bias=False), nn.Linear(2, V, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


HEADS = {"linear": partial(nn.Linear, H, V, bias=False), "with a bias": partial(nn.Linear, H, V), "adapter": Adapter}
BEHIND = {"plain": {}, "scale": {"scale": 0.5}, "cap": {"softcap": 1.5}, "both": {"scale": 2.0, "softcap": 1.5}}


@pytest.fixture(params=HEADS)
def head(request):
    return seeded(HEADS[request.param]).double()


@pytest.fixture(params=["one chunk", "many chunks"])
def small_chunks(request, monkeypatch):
    """Two rows a block, three rows a chunk, four vocabulary rows a weight gradient."""
    if request.param == "many chunks":
        monkeypatch.setattr(rows, "CPU_CHUNK_BYTES", 2 * V * 8)
        monkeypatch.setattr(head_module, "CPU_HEAD_BYTES", 3 * V * 8)


def hidden(dtype=torch.float64):
    return torch.randn(B, S, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


def finish(z, scale=1.0, softcap=None):
    return z * scale if softcap is None else softcap * torch.tanh(z * scale / softcap)


# --- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_statistics_and_their_gradients(head, behind, shift):
    h = hidden().requires_grad_()
    wanted = [h, *(p for p in head.parameters() if p.requires_grad)]
    expected = oracle.statistics(finish(head(h), **behind), LABELS, FIELDS, shift=shift)
    found = head_token_statistics(h, head, LABELS, fields=FIELDS, shift=shift, **behind)
    assert torch.equal(found["valid"], (LABELS != -100) & (torch.arange(S) >= shift))
    for name in FIELDS:
        torch.testing.assert_close(found[name].double(), expected[name].double(), rtol=0, atol=1e-12)
    weights = torch.linspace(0.5, 2, LABELS.numel(), dtype=torch.float64).view(LABELS.shape)
    both = [sum((weights * values[name]).sum() for name in STATISTICS) for values in (found, expected)]
    for ours, theirs in zip(*(torch.autograd.grad(total, wanted) for total in both), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_gradcheck(head, behind):
    wanted = [hidden()[:1, :3].requires_grad_(), *(p for p in head.parameters() if p.requires_grad)]

    def statistics(h, *_):
        found = head_token_statistics(h, head, LABELS[:1, :3], fields=STATISTICS, shift=1, **behind)
        return tuple(found[name] for name in STATISTICS)

    assert torch.autograd.gradcheck(statistics, wanted)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_the_loss_in_one_pass(head, behind):
    h = hidden().requires_grad_()
    wanted = [h, *(p for p in head.parameters() if p.requires_grad)]
    log_prob = oracle.statistics(finish(head(h), **behind), LABELS, ("log_prob",), shift=1)["log_prob"]
    expected = torch.autograd.grad(-log_prob.sum() / 9, wanted)
    loss = causal_lm_loss({"logits": torch.zeros(B, 1, V)}, LABELS, source=Given(h, Head(head, V, **behind)))
    for _ in range(2):  # the graph is kept: a second backward gives the same
        found = torch.autograd.grad(loss, wanted, retain_graph=True)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss, wanted, create_graph=True)


class Given:
    """Stands for a source: hidden states and a head at hand."""

    def __init__(self, hidden, head):
        self.found = hidden, head

    def read(self, logits, rows):
        return self.found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", HEADS)
def test_no_less_exact_than_logits(kind, dtype):
    """Values and gradients against float64, beside those of logits in the same dtype."""
    made = seeded(HEADS[kind]).to(dtype)
    exact = seeded(HEADS[kind]).double()
    exact.load_state_dict(made.state_dict())

    def gradients(head, h, statistics):
        h.requires_grad_()
        wanted = [h, *(p for p in head.parameters() if p.requires_grad)]
        return torch.autograd.grad(-statistics(h).sum() / 9, wanted)

    usual = gradients(made, hidden(dtype), lambda h: oracle.plain(made(h), LABELS, ("log_prob",), shift=1)["log_prob"])
    true = gradients(
        exact, hidden(dtype).double(), lambda h: oracle.statistics(exact(h), LABELS, ("log_prob",), shift=1)["log_prob"]
    )
    found = gradients(made, hidden(dtype), lambda h: head_token_statistics(h, made, LABELS, shift=1)["log_prob"])
    for ours, theirs, truth in zip(found, usual, true, strict=True):
        assert ours.dtype == dtype
        oracle.assert_no_worse(ours, theirs, truth)


def test_weight_gradients_are_added_up_in_float32(monkeypatch):
    """256 chunks: added up in bfloat16 the sum would stall, as the broken variant shows."""
    made = seeded(HEADS["linear"]).bfloat16()
    h = torch.randn(1, 257, H, generator=torch.Generator().manual_seed(2)).bfloat16()
    labels = torch.full((1, 257), 3)
    exact = seeded(HEADS["linear"]).double()
    exact.load_state_dict(made.state_dict())
    log_prob = exact(h.double())[:, :-1].log_softmax(-1)[..., 3]
    (truth,) = torch.autograd.grad(-log_prob.mean(), exact.weight)

    def error():
        monkeypatch.setattr(head_module, "CPU_HEAD_BYTES", V * 2)
        loss = causal_lm_loss({"logits": torch.zeros(B, 1, V)}, labels, source=Given(h, Head(made, V)))
        (found,) = torch.autograd.grad(loss, made.weight)
        return ((found - truth).norm() / truth.norm()).item()

    right = error()
    monkeypatch.setattr(head_products, "compute_dtype", lambda dtype: dtype)
    assert right < 0.005 < 4 * right < error()


@pytest.mark.usefixtures("small_chunks")
def test_top_ids(head):
    pairs = align(logits_like(hidden(), Head(head, V)), LABELS, shift=0)
    found = head_module.head_top_ids(hidden(), Head(head, V), pairs.rows, 4)
    rows = head(hidden())[LABELS != -100]
    assert found.tolist() == [oracle.ranking(row)[:4] for row in rows.detach()]


def test_no_label_gives_zeros(head):
    h = hidden().requires_grad_()
    wanted = [h, *(p for p in head.parameters() if p.requires_grad)]
    loss = causal_lm_loss(
        {"logits": torch.zeros(B, 1, V)}, torch.full_like(LABELS, -100), source=Given(h, Head(head, V))
    )
    assert loss.item() == 0.0
    assert not any(found.any() for found in torch.autograd.grad(loss, wanted))


# --- how it is computed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_hidden", "apply_weights", "products"), [(True, True, 3), (True, False, 2), (False, True, 2)]
)
@pytest.mark.parametrize("plain", [True, False])
def test_products_with_the_vocabulary(plain, of_hidden, apply_weights, products, monkeypatch):
    """Three a supervised row, and none for what is frozen or not supervised."""
    if not plain:
        monkeypatch.setattr(head_products, "_is_plain", lambda module: False)
    head = seeded(HEADS["linear"]).double().requires_grad_(apply_weights)
    h = hidden().requires_grad_(of_hidden)
    with Products() as counted:
        causal_lm_loss({"logits": torch.zeros(B, 1, V)}, LABELS, source=Given(h, Head(head, V))).backward()
    assert counted.multiplied == products * 9 * H * V


def test_a_plain_linear_needs_no_graph_and_anything_else_does():
    kind = {name: type(work(seeded(make))) for name, make in HEADS.items()}
    assert kind == {"linear": LinearProducts, "with a bias": LinearProducts, "adapter": ModuleProducts}
    hooked, patched, subclass = (seeded(HEADS["linear"]) for _ in range(3))
    hooked.register_forward_hook(lambda module, args, out: out)
    patched.forward = lambda x: x
    subclass.__class__ = type("Quantised", (nn.Linear,), {})
    assert {type(work(each)) for each in (hooked, patched, subclass)} == {ModuleProducts}


def work(head):
    return head_products.products(Head(head, V), hidden(), (), of_hidden=False, step=1)


@pytest.mark.parametrize("kind", ["linear", "with a bias"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_plain_and_module_products_agree(kind, autocast, monkeypatch):
    """By hand and by the module."""
    head = seeded(HEADS[kind])

    def run():
        h = hidden(torch.float32).requires_grad_()
        loss = causal_lm_loss(
            {"logits": torch.zeros(B, 1, V)}, LABELS, source=Given(h, Head(head, V, autocast=autocast))
        )
        return [loss, *torch.autograd.grad(loss, [h, *head.parameters()])]

    linear = run()
    monkeypatch.setattr(head_products, "_is_plain", lambda module: False)
    torch.testing.assert_close(run(), linear, rtol=0, atol=1e-6 if autocast is None else 1e-3)


@pytest.mark.parametrize("kind", ["linear", "with a bias"])
@pytest.mark.parametrize("classes", [19, 1024, 4])
def test_transposed_products_are_products(kind, classes, monkeypatch):
    """Of all classes at once, and of some at a time."""
    monkeypatch.setattr(head_products, "CLASSES_TRANSPOSED", classes)
    head = seeded(HEADS[kind])
    rows, gradient = seeded(lambda: torch.randn(64, H + V)).split([H, V], dim=1)
    work = LinearProducts(Head(head, V), rows, [head.weight], of_hidden=True, step=64)
    exact, wide = seeded(HEADS[kind]).double(), rows.double()
    assert head_products._is_faster_transposed(work.logits(rows))
    close(work.logits(rows), exact(wide), head(rows))
    close(work.backward(gradient), gradient.double() @ exact.weight, gradient @ head.weight)
    close(work.sums[0], gradient.double().t() @ wide, gradient.t() @ rows)


def close(found, exact, usual):
    """No further from the truth than the product as it is usually written, give or take an ulp of the largest value."""
    ulp = torch.finfo(found.dtype).eps * exact.abs().max()
    assert (found - exact).abs().max() <= (usual - exact).abs().max() + ulp


def test_only_narrow_products_are_transposed():
    """Nothing else: it would take many times as long."""
    asked = {(rows, dtype): torch.empty(rows, V, dtype=dtype) for rows in (1, 8, 16, 17, 128) for dtype in DTYPES}
    found = {key for key, logits in asked.items() if head_products._is_faster_transposed(logits)}
    assert found == {(16, torch.float32), (128, torch.float32)}


@pytest.mark.parametrize(
    ("classes", "dtype", "most"),
    [
        (151_936, torch.float32, 128),
        (151_936, torch.bfloat16, 256),
        (49_152, torch.float32, 256),
        (19, torch.float32, 999),
    ],
)
def test_chunks_fill_vectors_of_rows(classes, dtype, most):
    """As many rows as memory allows, in sixteens, or all rows, if they are fewer."""
    head, h = Head(nn.Identity(), classes), torch.empty(999, 1, dtype=dtype)
    rows = [align(torch.empty(count, 3), torch.zeros(count, dtype=torch.int64), shift=0).rows for count in (999, 7)]
    assert [head_module._rows_per_product(h, head, each) for each in rows] == [most, 7]


def test_activation_checkpointing_around_the_loss():
    head, h = seeded(HEADS["adapter"]).double(), hidden().requires_grad_()
    loss = partial(causal_lm_loss, source=Given(h, Head(head, V)))
    wanted = [p for p in head.parameters() if p.requires_grad]
    expected = torch.autograd.grad(loss({"logits": torch.zeros(B, 1, V)}, LABELS), wanted)
    kept = torch.utils.checkpoint.checkpoint(
        lambda h: loss({"logits": torch.zeros(B, 1, V)}, LABELS), h, use_reentrant=False
    )
    torch.testing.assert_close(torch.autograd.grad(kept, wanted), expected, rtol=0, atol=0)


def test_tensors_saved_elsewhere():
    """Hooks that hand back copies of what was saved do not cut the head's parameters off."""
    head, h = seeded(HEADS["adapter"]).double(), hidden().requires_grad_()
    wanted = [h, head.a.weight, head.b.weight]

    def gradients():
        return torch.autograd.grad(head_token_statistics(h, head, LABELS, shift=1)["log_prob"].sum(), wanted)

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        found = gradients()
    assert all(part.any() for part in expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# --- dropout in the head ---------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout, self.linear = nn.Dropout(0.5), nn.Linear(H, V, bias=False)

    def forward(self, x):
        return self.linear(self.dropout(x))


def test_dropout_is_drawn_once_per_row_in_one_pass():
    """The gradient belongs to the drawn value: along it the loss changes as it says."""
    head = seeded(Dropping).double()
    h = hidden().requires_grad_()

    def loss():
        torch.manual_seed(3)
        return causal_lm_loss({"logits": torch.zeros(B, 1, V)}, LABELS, source=Given(h, Head(head, V)))

    with torch.random.fork_rng():
        (gradient,) = torch.autograd.grad(loss(), head.linear.weight)
        with torch.no_grad():
            head.linear.weight += 1e-6 * gradient
            up = loss()
            head.linear.weight -= 2e-6 * gradient
            down = loss()
    assert ((up - down) / 2e-6).item() == pytest.approx(gradient.square().sum().item(), rel=1e-6)


def test_dropout_is_refused_where_two_passes_are_taken():
    head = seeded(Dropping).double()
    with pytest.raises(ValueError, match="the head has dropout"):
        head_token_statistics(hidden().requires_grad_(), head, LABELS)
    head_token_statistics(hidden().requires_grad_(), head.eval(), LABELS)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"fields": ("nll",)}, ValueError, "names out of"),
        ({"labels": LABELS + 20}, ValueError, "out of range"),
        ({"labels": LABELS[:1]}, ValueError, "do not fit"),
        ({"labels": LABELS.double()}, TypeError, "integer class ids"),
    ],
)
def test_refusals(changes, error, message):
    given = {"labels": LABELS} | changes
    with pytest.raises(error, match=message):
        head_token_statistics(hidden(), seeded(HEADS["linear"]).double(), **given)


def test_nothing_to_write_over():
    source = Given(hidden(), Head(seeded(HEADS["linear"]).double(), V))
    with pytest.raises(ValueError, match="needs logits to write over"):
        causal_lm_loss({"logits": torch.zeros(B, 1, V)}, LABELS, source=source, overwrite_logits=True)


def test_choosing_logits_beside_a_source():
    source = Given(hidden(), Head(seeded(HEADS["linear"]).double(), V))
    with pytest.raises(ValueError, match="one of the two"):
        causal_lm_loss({"logits": torch.zeros(B, 1, V)}, LABELS, source=source, select=lambda outputs: outputs)
