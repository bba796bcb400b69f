"""Sums of losses, and losses that a model computes itself, by hand and in the stock Trainer."""

import math
import pickle
from functools import partial

import pytest
import torch

from lossfns import (
    add_losses,
    causal_lm_loss,
    classification_loss,
    cross_entropy,
    distillation_loss,
    focal,
    masked_lm_loss,
    seq2seq_lm_loss,
    with_aux_loss,
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


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_that_of_its_parts(name):
    parts = SUMS[name]
    added = add_losses({f"part {place}": part for place, part in enumerate(parts)})
    labels = TARGETS if "distillation" in name else LABELS
    assert_equal(measured(added, labels), summed(parts, labels))
    assert_equal(measured(pickle.loads(pickle.dumps(added)), labels), summed(parts, labels))


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_weights_are_finite(weight):
    with pytest.raises(ValueError, match="part 'ce' must have a finite weight"):
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
    with pytest.raises(ValueError, match="only the last part may overwrite the logits"):
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


# --- with_aux_loss --------------------------------------------------------------------------------------------------


def outputs(value):
    return {"logits": LOGITS, "aux_loss": torch.tensor(value)}


@pytest.mark.parametrize(("count", "share"), [(None, 1.0), (4, 1.0), (8, 0.5), (torch.tensor([[2], [6]]), 0.5)])
def test_the_term_is_weighted_by_its_share(count, share):
    """Four of the labels are predicted by a logit."""
    found = with_aux_loss(causal_lm_loss, "aux_loss", 0.5)(outputs(3.0), LABELS, count)
    expected = causal_lm_loss(LOGITS, LABELS, count) + 0.5 * share * 3.0
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    assert found.dtype == torch.float64


def test_no_label_no_term():
    loss = with_aux_loss(causal_lm_loss, "aux_loss", 0.5)
    assert loss(outputs(3.0), torch.full_like(LABELS, N), 0).item() == 0.0


def test_labels_that_stand_at_their_logits():
    found = with_aux_loss(masked_lm_loss, "aux_loss", 1.0, shift=0)(outputs(3.0), LABELS, 12)
    assert found.item() == pytest.approx(masked_lm_loss(LOGITS, LABELS, 12).item() + 3.0 * 5 / 12, rel=1e-12)


def test_labels_of_whole_samples():
    """One a sample, as a classifier has: the first one counts as the others do, in every micro-batch."""
    scores, labels = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
    loss = with_aux_loss(classification_loss, "aux_loss", 1.0, shift=0)
    given = [{"logits": scores[part], "aux_loss": torch.tensor(2.0)} for part in (slice(0, 1), slice(1, 4))]
    found = loss(given[0], labels[:1], 4) + loss(given[1], labels[1:], 4)
    assert found.item() == pytest.approx(math.log(3) + 2.0)
    with pytest.raises(ValueError, match=r"For one label per sample use shift=0"):
        with_aux_loss(classification_loss, "aux_loss", 1.0, shift=1)(given[1], labels[1:])


def test_what_has_no_weight_may_be_infinite():
    logits = torch.tensor([[[1.0, -torch.inf], [0.0, 0.0]]], requires_grad=True)
    labels, rest = torch.tensor([[N, 1]]), partial(masked_lm_loss, term=z_loss)
    found = add_losses({"a": (0.0, causal_lm_loss), "b": (1.0, rest)})(logits * 1, labels)
    assert found.item() == pytest.approx(rest(logits, labels).item())
    assert torch.autograd.grad(found, logits)[0].isfinite().all()
    given = {"logits": torch.zeros(1, 2, 2), "aux_loss": torch.tensor(torch.inf)}
    assert with_aux_loss(causal_lm_loss, "aux_loss", 0.0)(given, labels).item() == pytest.approx(math.log(2))


def test_the_shift_is_the_loss_s_own():
    def users(outputs, labels, num_items_in_batch=None, shift=1):
        return causal_lm_loss(outputs, labels, num_items_in_batch, shift=shift)

    both = add_losses({"a": (1.0, causal_lm_loss), "b": (1.0, partial(causal_lm_loss, term=z_loss))})
    for loss in (users, both, with_aux_loss(causal_lm_loss, "z", 1.0)):
        assert with_aux_loss(loss, "aux_loss", 1.0).shift == 1
    assert with_aux_loss(causal_lm_loss, "aux_loss", 1.0).shift == 1
    assert with_aux_loss(partial(causal_lm_loss, shift=0), "aux_loss", 1.0).shift == 0
    for loss in (classification_loss, masked_lm_loss, seq2seq_lm_loss, lambda outputs, labels, num_items=None: 0):
        with pytest.raises(ValueError, match=r"has no shift .* with_aux_loss\(..., shift=0\)"):
            with_aux_loss(loss, "aux_loss", 1.0)


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_is_no_number(weight):
    with pytest.raises(ValueError, match="weight"):
        with_aux_loss(causal_lm_loss, "aux_loss", weight)


@pytest.mark.parametrize("given", [{"logits": LOGITS}, {"logits": LOGITS, "aux_loss": None}, (LOGITS,)])
def test_the_term_is_missing(given):
    with pytest.raises(ValueError, match="output_router_logits = True"):
        with_aux_loss(causal_lm_loss, "aux_loss", 0.5)(given, LABELS)


def test_another_unit_is_refused():
    batch = count_sequences(lambda rows: {"labels": torch.stack(rows)}, shift=1)(list(LABELS))
    with pytest.raises(ValueError, match="count_sequences"):
        with_aux_loss(partial(causal_lm_loss, normalize="sequences"), "aux_loss", 0.5)(outputs(1.0), batch["labels"])


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
    ("loss", "right"), [(with_aux_loss(causal_lm_loss, "aux_loss", 0.5), True), (once_a_micro_batch, False)]
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
    trainer = tiny.trainer(tiny.model("mixtral"), ROWS, with_aux_loss(causal_lm_loss, "aux_loss", 0.5))
    with pytest.raises(ValueError, match="output_router_logits = True"):
        trainer.train()
