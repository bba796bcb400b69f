"""Sums of losses, and terms of a model's own, by hand and in the stock Trainer."""

import pickle
from functools import partial

import pytest
import torch

from lossfns import (
    add_losses,
    causal_lm_loss,
    class_weighted,
    cross_entropy,
    distillation_loss,
    focal,
    masked_lm_loss,
    segmentation_loss,
    with_auxiliary,
    z_loss,
)
from lossfns.collators import count_sequences, teacher_inputs
from tests import oracle, tiny

N = oracle.IGNORED
V = 7
LABELS = torch.tensor([[N, 3, N, 6], [0, 2, N, 1]])
LOGITS = torch.randn(2, 4, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TEACHER = torch.randn(2, 4, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = {"labels": LABELS, "teacher_logits": TEACHER}


def measured(loss, labels=LABELS, count=9):
    leaf = LOGITS.clone().requires_grad_()
    value = loss({"logits": leaf * 1}, labels, count)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def summed(parts, labels=LABELS):
    weighted = [(weight, measured(loss, labels)) for weight, loss in parts]
    return [sum(weight * values[place] for weight, values in weighted) for place in range(2)]


# --- add_losses ------------------------------------------------------------------------------------------------------

SUMS = {
    "one": [(2.0, causal_lm_loss)],
    "terms": [
        (0.5, causal_lm_loss),
        (0.25, partial(causal_lm_loss, term=focal)),
        (1e-2, partial(causal_lm_loss, term=z_loss)),
    ],
    "alignments": [(0.5, causal_lm_loss), (0.5, masked_lm_loss)],
    "distillation": [(0.5, causal_lm_loss), (0.5, partial(distillation_loss, temperature=2.0))],
    "one distillation": [(0.3, partial(distillation_loss, term=cross_entropy)), (0.7, distillation_loss)],
    "other options": [
        (0.5, partial(causal_lm_loss, shift=2)),
        (0.5, causal_lm_loss),
        (1.0, partial(causal_lm_loss, term=z_loss)),
    ],
}
CALLS = {"one": 1, "terms": 1, "alignments": 2, "distillation": 2, "one distillation": 1, "other options": 2}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_that_of_its_parts(name):
    parts = SUMS[name]
    added = add_losses({f"part {place}": part for place, part in enumerate(parts)})
    labels = TARGETS if "distillation" in name else LABELS
    assert_equal(measured(added, labels), summed(parts, labels))
    assert len(added.calls) == CALLS[name]
    assert_equal(measured(pickle.loads(pickle.dumps(added)), labels), summed(parts, labels))


PIXELS = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
CLASSES = PIXELS.argmin(1)
WEIGHTED = partial(causal_lm_loss, normalize="weights")


@pytest.mark.parametrize(
    ("parts", "batch"),
    [
        (
            [(1.0, partial(segmentation_loss, term=term, dice=0.5)) for term in (cross_entropy, focal)],
            (PIXELS, CLASSES),
        ),
        (
            [(0.5, partial(WEIGHTED, term=class_weighted(term, range(7)))) for term in (cross_entropy, focal)],
            (LOGITS, LABELS),
        ),
    ],
    ids=["dice", "weights"],
)
def test_a_sum_of_losses_that_is_not_the_loss_of_a_sum(parts, batch):
    added = add_losses(dict(zip("ab", parts, strict=True)))
    expected = sum(weight * loss(*batch) for weight, loss in parts)
    torch.testing.assert_close(added(*batch), expected, rtol=1e-12, atol=0)
    assert len(added.calls) == 2


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_weights_are_finite(weight):
    with pytest.raises(ValueError, match="the weight of part 'ce' must be finite"):
        add_losses({"ce": (weight, causal_lm_loss)})


def test_parts_of_a_user():
    def squares(outputs, labels, num_items_in_batch=None):
        return outputs["logits"].square().sum() / num_items_in_batch

    parts = [(0.5, squares), (2.0, causal_lm_loss)]
    assert_equal(measured(add_losses(dict(zip("ab", parts, strict=True)))), summed(parts))


def test_only_the_last_reader_overwrites():
    last = partial(masked_lm_loss, overwrite_logits=True)
    added = add_losses({"first": (0.5, causal_lm_loss), "last": (0.5, last)})
    assert_equal(measured(added), summed([(0.5, causal_lm_loss), (0.5, masked_lm_loss)]))
    with pytest.raises(ValueError, match="another part reads the logits after it"):
        add_losses({"last": (0.5, last), "first": (0.5, causal_lm_loss)})


@pytest.mark.parametrize("part", [causal_lm_loss, (causal_lm_loss, 0.5), (0.5, "causal_lm_loss"), (0.5,)])
def test_what_is_no_part(part):
    with pytest.raises(TypeError, match=r"must be \(weight, loss\)"):
        add_losses({"ce": part})


def test_nothing_to_add():
    with pytest.raises(TypeError, match="at least one part"):
        add_losses({})


def test_distillation_and_labels_in_the_stock_trainer():
    rows, teacher = tiny.lm_rows(8), tiny.model("qwen2", seed=7).eval()
    loss = add_losses({"ce": (0.5, causal_lm_loss), "kd": (0.5, partial(distillation_loss, teacher=teacher))})
    gradients = [
        tiny.gradient_of(
            tiny.trainer(
                tiny.model("llama"),
                rows,
                loss,
                collator=teacher_inputs(tiny.pad, shift=1),
                per_device_train_batch_size=8 // steps,
                gradient_accumulation_steps=steps,
            )
        )
        for steps in (1, 4)
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


# --- with_auxiliary --------------------------------------------------------------------------------------------------


def outputs(value):
    return {"logits": LOGITS, "aux_loss": torch.tensor(value)}


@pytest.mark.parametrize(("count", "share"), [(None, 1.0), (4, 1.0), (8, 0.5), (torch.tensor([[2], [6]]), 0.5)])
def test_the_term_is_weighted_by_its_share(count, share):
    """Four of the labels are predicted by a logit."""
    found = with_auxiliary(causal_lm_loss, "aux_loss", 0.5)(outputs(3.0), LABELS, count)
    expected = causal_lm_loss(LOGITS, LABELS, count) + 0.5 * share * 3.0
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    assert found.dtype == torch.float64


def test_no_label_no_term():
    loss = with_auxiliary(causal_lm_loss, "aux_loss", 0.5)
    assert loss(outputs(3.0), torch.full_like(LABELS, N), 0).item() == 0.0


def test_labels_that_stand_at_their_logits():
    found = with_auxiliary(masked_lm_loss, "aux_loss", 1.0, shift=0)(outputs(3.0), LABELS, 12)
    assert found.item() == pytest.approx(masked_lm_loss(LOGITS, LABELS, 12).item() + 3.0 * 5 / 12, rel=1e-12)


@pytest.mark.parametrize("given", [{"logits": LOGITS}, {"logits": LOGITS, "aux_loss": None}, (LOGITS,)])
def test_the_term_is_missing(given):
    with pytest.raises(ValueError, match="output_router_logits = True"):
        with_auxiliary(causal_lm_loss, "aux_loss", 0.5)(given, LABELS)


def test_another_unit_is_refused():
    batch = count_sequences(lambda rows: {"labels": torch.stack(rows)}, shift=1)(list(LABELS))
    with pytest.raises(ValueError, match="count_sequences"):
        with_auxiliary(partial(causal_lm_loss, normalize="sequences"), "aux_loss", 0.5)(outputs(1.0), batch["labels"])


# Equal micro-batches route alike, so that their balance is that of all.
ROWS = tiny.lm_rows(2) * 4


def mixtral(loss, steps, **config):
    return tiny.trainer(
        tiny.model("mixtral", output_router_logits=True, **config),
        ROWS,
        loss,
        per_device_train_batch_size=8 // steps,
        gradient_accumulation_steps=steps,
        train_sampling_strategy="sequential",
    )


def once_a_micro_batch(outputs, labels, num_items_in_batch=None):
    """Broken: what a model's own loss does."""
    return causal_lm_loss(outputs, labels, num_items_in_batch) + 0.5 * outputs["aux_loss"]


@pytest.mark.parametrize(
    ("loss", "right"), [(with_auxiliary(causal_lm_loss, "aux_loss", 0.5), True), (once_a_micro_batch, False)]
)
def test_a_router_keeps_its_coefficient(loss, right):
    one, four = (mixtral(loss, steps) for steps in (1, 4))
    gradients = [tiny.gradient_of(trainer) for trainer in (one, four)]
    assert torch.allclose(*gradients, rtol=0, atol=1e-12) is right
    model = tiny.model("mixtral", output_router_logits=True)
    batch = tiny.pad(ROWS)
    labels = batch.pop("labels")
    found = model(**batch)
    expected = causal_lm_loss(found.logits, labels) + 0.5 * found.aux_loss
    expected.backward()
    own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], own, rtol=0, atol=1e-12)


def test_a_router_that_is_off():
    trainer = tiny.trainer(tiny.model("mixtral"), ROWS, with_auxiliary(causal_lm_loss, "aux_loss", 0.5))
    with pytest.raises(ValueError, match="output_router_logits = True"):
        trainer.train()
