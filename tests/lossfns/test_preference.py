"""Preferences: objectives by their formulas in Python floats, pairs in the stock Trainer against a subclass of it."""

import inspect
import math
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
import transformers

from lossfns import (
    bradley_terry,
    cpo,
    dpo,
    hidden_states,
    ipo,
    kto,
    orpo,
    paired_kto,
    precompute_reference_log_probs,
    preference,
    preference_loss,
    reward_loss,
    sequence_log_probs,
    simpo,
)
from lossfns.collators import count_pairs, stack_pairs
from lossfns.preference import _score
from metrics import build, preferences
from metrics.preference import COLUMNS
from reducers import combine, pair_margins, preference_rewards, reward_scores
from tests import oracle, tiny

N = oracle.IGNORED
V = 7
BF16 = torch.bfloat16


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


PAIRS = {
    "chosen": tensor(-3.0, -12.0, -0.5, -7.25),
    "rejected": tensor(-4.0, -6.0, -0.5, -30.0),
    "reference_chosen": tensor(-3.5, -11.0, -0.75, -7.0),
    "reference_rejected": tensor(-3.0, -6.5, -0.75, -20.0),
    "chosen_tokens": tensor(2.0, 5.0, 1.0, 3.0),
    "rejected_tokens": tensor(3.0, 2.0, 1.0, 9.0),
}


def name(objective):
    return getattr(objective, "func", objective).__name__


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def log_odds(mean):
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


# Each objective and its formula for one pair: c, r log-probabilities; rc, rr those of the reference; nc, nr tokens.
OBJECTIVES = {
    "dpo": (dpo, lambda c, r, rc, rr, nc, nr: -math.log(sigmoid(0.1 * ((c - rc) - (r - rr))))),
    "dpo, noisy": (
        partial(dpo, beta=0.5, label_smoothing=0.2),
        lambda c, r, rc, rr, nc, nr: (
            -0.8 * math.log(sigmoid(0.5 * (c - rc - r + rr))) - 0.2 * math.log(sigmoid(-0.5 * (c - rc - r + rr)))
        ),
    ),
    "ipo": (
        partial(ipo, beta=0.25),
        lambda c, r, rc, rr, nc, nr: ((c - rc) / nc - (r - rr) / nr - 2.0) ** 2,
    ),
    "simpo": (
        partial(simpo, beta=2.5, gamma=0.75),
        lambda c, r, rc, rr, nc, nr: -math.log(sigmoid(2.5 * c / nc - 2.5 * r / nr - 0.75)),
    ),
    "orpo": (
        partial(orpo, weight=0.3),
        lambda c, r, rc, rr, nc, nr: -c / nc - 0.3 * math.log(sigmoid(log_odds(c / nc) - log_odds(r / nr))),
    ),
    "cpo": (
        partial(cpo, weight=0.5),
        lambda c, r, rc, rr, nc, nr: -math.log(sigmoid(0.1 * (c - r))) - 0.5 * c / nc,
    ),
}
EVERY = pytest.mark.parametrize(("objective", "formula"), OBJECTIVES.values(), ids=OBJECTIVES)


def asked(objective):
    return [name for name in inspect.signature(objective).parameters if name in PAIRS]


def called(objective, **other):
    given = {**PAIRS, **other}
    return objective(**{name: given[name] for name in asked(objective)})


# --- objectives ------------------------------------------------------------------------------------------------------


@EVERY
def test_objectives_are_their_formulas(objective, formula):
    expected = [formula(*pair) for pair in zip(*(column.tolist() for column in PAIRS.values()), strict=True)]
    assert called(objective).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("objective", [entry for entry, _ in OBJECTIVES.values()], ids=OBJECTIVES)
def test_gradients_of_objectives(objective):
    names = [name for name in asked(objective) if not name.endswith("tokens")]

    def values(*columns):
        return called(objective, **dict(zip(names, columns, strict=True)))

    assert torch.autograd.gradcheck(values, tuple(PAIRS[name].clone().requires_grad_() for name in names))


def test_bradley_terry():
    chosen, rejected = tensor(1.0, -2.0), tensor(0.5, 3.0)
    margins = tensor(0.25, 1.0)
    found = bradley_terry(chosen, rejected, margin=margins, centering=0.1)
    expected = [
        -math.log(sigmoid(1.0 - 0.5 - 0.25)) + 0.1 * (1.0 + 0.5) ** 2,
        -math.log(sigmoid(-2.0 - 3.0 - 1.0)) + 0.1 * (-2.0 + 3.0) ** 2,
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_kto():
    """Equation 8 of the paper, `lambda - v`, for one completion at a time."""
    ratios, desirable = tensor(1.5, -2.0, 0.25), torch.tensor([True, False, False])
    options = {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.75}
    found = kto(ratios, desirable, 0.5, **options)
    assert torch.equal(found, kto(ratios, desirable.long(), 0.5, **options))  # as with_extras hands it over
    expected = [
        1.5 - 1.5 * sigmoid(0.2 * (1.5 - 0.5)),
        0.75 - 0.75 * sigmoid(0.2 * (0.5 - -2.0)),
        0.75 - 0.75 * sigmoid(0.2 * (0.5 - 0.25)),
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_paired_kto():
    good = (PAIRS["chosen"] - PAIRS["reference_chosen"]).tolist()
    bad = (PAIRS["rejected"] - PAIRS["reference_rejected"]).tolist()
    points = [max(0.0, sum(half) / 4) for half in (bad, good)]
    expected = [
        1 - sigmoid(0.1 * (g - points[0])) + 1 - sigmoid(0.1 * (points[1] - b)) for g, b in zip(good, bad, strict=True)
    ]
    assert called(paired_kto).tolist() == pytest.approx(expected, rel=1e-12)


def test_no_gradient_flows_into_the_reference_point():
    ratios = tensor(1.0, 2.0).requires_grad_()
    kto(ratios, torch.tensor([True, True]), ratios.mean()).sum().backward()
    expected = [-0.1 * sigmoid(0.1 * (r - 1.5)) * (1 - sigmoid(0.1 * (r - 1.5))) for r in (1.0, 2.0)]
    assert ratios.grad.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("objective", [dpo, simpo, paired_kto, cpo, orpo, ipo])
def test_no_strength_no_preference(objective):
    """With a vanishing coefficient, only what is no preference is left."""
    limits = {
        dpo: (partial(dpo, beta=1e-12), [math.log(2)] * 4),
        simpo: (partial(simpo, beta=1e-12, gamma=0.0), [math.log(2)] * 4),
        paired_kto: (partial(paired_kto, beta=1e-12), [1.0] * 4),
        cpo: (partial(cpo, beta=1e-12, weight=0.0), [math.log(2)] * 4),
        orpo: (partial(orpo, weight=0.0), (-PAIRS["chosen"] / PAIRS["chosen_tokens"]).tolist()),
        ipo: (lambda **pairs: ipo(**pairs, beta=1e-6) * 4e-12, [1.0] * 4),
    }
    limit, expected = limits[objective]
    names = asked(objective)
    assert limit(**{name: PAIRS[name] for name in names}).tolist() == pytest.approx(expected, rel=1e-4)


def test_equal_pairs():
    same = {
        "rejected": PAIRS["chosen"],
        "reference_rejected": PAIRS["reference_chosen"],
        "rejected_tokens": PAIRS["chosen_tokens"],
    }
    assert called(dpo, **same).tolist() == pytest.approx([math.log(2)] * 4)
    assert called(partial(simpo, gamma=0.0), **same).tolist() == pytest.approx([math.log(2)] * 4)
    assert called(partial(ipo, beta=0.5), **same).tolist() == pytest.approx([1.0] * 4)
    assert called(bradley_terry, **same).tolist() == pytest.approx([math.log(2)] * 4)


def test_a_certain_completion_has_finite_odds():
    certain = {"chosen": tensor(0.0, -1e-300), "rejected": tensor(-1.0, 0.0)}
    ones = torch.ones(2, dtype=torch.float64)
    assert orpo(**certain, chosen_tokens=ones, rejected_tokens=ones).isfinite().all()


def test_senseless_options():
    with pytest.raises(ValueError, match="beta must be positive"):
        called(partial(ipo, beta=0.0))
    with pytest.raises(ValueError, match="label_smoothing must be in"):
        called(partial(dpo, label_smoothing=1.5))


# --- log-probabilities of sequences ----------------------------------------------------------------------------------

IDS = torch.tensor([[N, 3, 5, N], [0, 2, 2, 6], [1, N, N, N], [N, 4, N, 0]])
LOGITS = 2 * torch.randn(4, 4, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_loop(logits, ids, shift=1):
    """Sum and number of the log-probabilities of each row."""
    sums = [[0.0, 0] for _ in ids]
    for place, row in oracle.pairs(logits, ids, shift=shift):
        x = logits[row].tolist()
        sums[place[0]][0] += x[int(ids[place])] - math.log(math.fsum(map(math.exp, x)))
        sums[place[0]][1] += 1
    return sums


@pytest.mark.parametrize("shift", [0, 1])
def test_sequence_log_probs(shift):
    found = sequence_log_probs({"logits": LOGITS}, IDS, shift=shift)
    for row, (total, tokens) in enumerate(by_loop(LOGITS, IDS, shift)):
        assert found["log_prob"][row].item() == pytest.approx(total, rel=1e-12)
        assert found["tokens"][row].item() == tokens
        assert found["mean_log_prob"][row].item() == pytest.approx(total / max(tokens, 1), rel=1e-12)
    torch.testing.assert_close(found["token_log_prob"].sum(-1), found["log_prob"])


def test_gradients_of_sequence_log_probs():
    def values(logits):
        return tuple(sequence_log_probs(logits, IDS)[name] for name in ("log_prob", "mean_log_prob"))

    assert torch.autograd.gradcheck(values, LOGITS.clone().requires_grad_())


def test_long_sequences_add_up_in_float64():
    logits = torch.randn(1, 20_001, 3, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(1, 20_001, dtype=torch.int64)
    exact = logits[:, :-1].double().log_softmax(-1)[..., 0].sum().item()
    assert sequence_log_probs(logits, ids)["log_prob"].item() == pytest.approx(exact, rel=1e-7)


# --- the loss --------------------------------------------------------------------------------------------------------

REFERENCE = {"reference_chosen": tensor(-3.0, -4.0), "reference_rejected": tensor(-2.0, -5.0)}


def stacked(ids):
    return torch.stack(ids.chunk(2), -1)


def expected_dpo(ids=IDS):
    sums = by_loop(LOGITS, ids)
    values = []
    for pair in range(2):
        (c, nc), (r, nr) = sums[pair], sums[pair + 2]
        if nc and nr:
            rc, rr = (REFERENCE[name][pair].item() for name in REFERENCE)
            values.append(-math.log(sigmoid(0.1 * (c - rc - r + rr))))
    return values


def test_pairs_with_an_empty_completion_do_not_count():
    """The third row has no label that a logit predicts, so its pair, the first, is left out."""
    values = expected_dpo()
    assert len(values) == 1
    loss = preference_loss(LOGITS, {"labels": stacked(IDS), **REFERENCE})
    assert loss.item() == pytest.approx(values[0], rel=1e-12)
    logits = LOGITS.clone().requires_grad_()
    preference_loss(logits, {"labels": stacked(IDS), **REFERENCE}).backward()
    assert not logits.grad[[0, 2]].any()
    assert logits.grad[[1, 3]].any()


@pytest.mark.parametrize("objective", [orpo, simpo, paired_kto])
def test_all_rows_masked(objective):
    logits = LOGITS.clone().requires_grad_()
    loss = preference_loss(logits, {"labels": torch.full((2, 4, 2), N), **REFERENCE}, objective=objective)
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()


@pytest.mark.parametrize("objective", [dpo, ipo, simpo, orpo, cpo, paired_kto])
def test_gradients_of_the_loss(objective):
    ids = IDS.clone()
    ids[2, 1] = 3
    labels = {"labels": stacked(ids), "pair_ids": torch.arange(2), **REFERENCE}
    assert torch.autograd.gradcheck(
        lambda logits: preference_loss(logits, labels, 3, objective=objective), LOGITS.clone().requires_grad_()
    )


def test_padding_is_never_scored():
    wider = torch.cat([LOGITS, torch.full((4, 3, V), torch.nan, dtype=torch.float64)], 1)
    ids = torch.cat([IDS, torch.full((4, 3), N)], 1)
    assert (
        preference_loss(wider, {"labels": stacked(ids), **REFERENCE}).item()
        == preference_loss(LOGITS, {"labels": stacked(IDS), **REFERENCE}).item()
    )


def test_rows_one_after_the_other():
    """Labels of rows, as `count_pairs` leaves them, say the same."""
    collate = count_pairs(lambda rows: {"labels": torch.stack(rows)}, shift=1)
    batch = collate(list(IDS))
    assert (batch["shift_labels"] != N).sum() == 1
    found = preference_loss(LOGITS, {**batch["labels"], **REFERENCE}, 1)
    assert found.item() == preference_loss(LOGITS, {"labels": stacked(IDS), **REFERENCE}).item()


def test_refusals():
    with pytest.raises(ValueError, match="are no pairs"):
        preference_loss(LOGITS[:3], IDS[:3], objective=simpo)
    with pytest.raises(TypeError, match="train on precompute_reference_log_probs"):
        preference_loss(LOGITS, IDS)
    with pytest.raises(ValueError, match="stack_pairs"):
        preference_loss(LOGITS, stacked(IDS), 9, objective=simpo)
    with pytest.raises(ValueError, match=r"num_labels=1 gives a score"):
        reward_loss(torch.zeros(4, 2), torch.zeros(2))
    with pytest.raises(ValueError, match="the Trainer would cut some"):
        preference_rewards(LOGITS, IDS, shift=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rewards_of_a_reward_model(dtype):
    scores = tensor(1.0, 2.0, -0.5, 0.5, 2.5, 7.0).to(dtype).requires_grad_()
    marks = torch.tensor([0, 0, N])
    loss = reward_loss({"logits": scores[:, None]}, marks, 4, objective=partial(bradley_terry, centering=0.5))
    expected = (-math.log(sigmoid(0.5)) - math.log(sigmoid(-0.5)) + 0.5 * (1.5**2 + 4.5**2)) / 4
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert loss.dtype == torch.float32
    loss.backward()
    assert not scores.grad[[2, 5]].any()


def margin_objective(chosen, rejected, margin):
    return bradley_terry(chosen, rejected, margin=margin)


def test_margins_in_the_labels():
    labels = {"labels": torch.zeros(2, dtype=torch.int64), "margin": tensor(1.0, 3.0)}
    found = reward_loss(tensor(4.0, 1.0, 0.0, 0.0)[:, None], labels, objective=margin_objective)
    expected = (-math.log(sigmoid(3.0)) - math.log(sigmoid(-2.0))) / 2
    assert found.item() == pytest.approx(expected, rel=1e-12)


# --- the stock Trainer -----------------------------------------------------------------------------------------------

CHOSEN, REJECTED = tiny.lm_rows(8), tiny.lm_rows(8, seed=1)
DATA = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in zip(CHOSEN, REJECTED, strict=True)]
COLLATE = stack_pairs(tiny.pad, shift=1)
STEPS = {"num_train_epochs": 3, "learning_rate": 0.1}


def referenced(data=DATA, **options):
    return precompute_reference_log_probs(tiny.model("llama", seed=3), data, COLLATE, **options)


class SubclassedDPO(transformers.Trainer):
    """DPO as it is usually written: both models in memory, one forward for each half, plain log-probabilities."""

    reference: torch.nn.Module

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ratios = []
        for half in inputs:
            labels = half["labels"][:, 1:]
            given = {name: half[name] for name in ("input_ids", "attention_mask")}
            with torch.no_grad():
                reference = self.log_probs(self.reference, given, labels)
            ratios.append(self.log_probs(model, given, labels) - reference)
        return -torch.nn.functional.logsigmoid(0.1 * (ratios[0] - ratios[1])).mean()

    @staticmethod
    def log_probs(model, given, labels):
        found = model(**given).logits[:, :-1].log_softmax(-1)
        found = found.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return torch.where(labels != N, found, 0).sum(-1)

    def _prepare_inputs(self, inputs):
        return inputs


def halves(pairs):
    return [tiny.pad([pair[side] for pair in pairs]) for side in ("chosen", "rejected")]


class Parameters(transformers.TrainerCallback):
    """Keeps the parameters after every step."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.steps.append(tiny.parameters(model))


@pytest.mark.parametrize("hidden", [False, True])
def test_dpo_is_that_of_a_subclass_step_by_step(hidden):
    theirs, ours = Parameters(), Parameters()
    changes = STEPS | {"per_device_train_batch_size": 4}
    subclassed = tiny.trainer(
        tiny.model("llama"), DATA, collator=halves, trainer_class=SubclassedDPO, callbacks=[theirs], **changes
    )
    subclassed.reference = tiny.model("llama", seed=3)
    subclassed.train()
    model = tiny.model("llama")
    loss = partial(preference_loss, source=hidden_states(model)) if hidden else preference_loss
    tiny.trainer(model, referenced(), loss, collator=COLLATE, callbacks=[ours], **changes).train()
    assert len(ours.steps) == len(theirs.steps) == 6
    for found, expected in zip(ours.steps, theirs.steps, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)
    moved = max((theirs.steps[0][name] - value).abs().max() for name, value in theirs.steps[-1].items())
    assert moved > 1e-3


def with_empty():
    """One pair has a completion without a label, so that micro-batches have unequal counts."""
    empty = {**REJECTED[2], "labels": torch.full_like(REJECTED[2]["labels"], N)}
    return [*DATA[:2], {"chosen": CHOSEN[2], "rejected": empty}, *DATA[3:]]


def accumulated(loss, data, steps):
    changes = STEPS | {"per_device_train_batch_size": 8 // steps, "gradient_accumulation_steps": steps}
    return tiny.parameters_after(tiny.trainer(tiny.model("llama"), data, loss, collator=COLLATE, **changes))


@pytest.mark.parametrize("objective", [dpo, ipo, simpo, orpo, cpo])
def test_accumulation_is_one_big_batch(objective):
    loss, data = partial(preference_loss, objective=objective), referenced(with_empty())
    once, often = accumulated(loss, data, 1), accumulated(loss, data, 4)
    for name, value in once.items():
        torch.testing.assert_close(often[name], value, rtol=0, atol=1e-11, msg=name)


def mean_of_the_call(outputs, labels, num_items_in_batch=None):
    """Broken: what a loss that does not know the window does, divided by its micro-batches as the Trainer would."""
    return preference_loss(outputs, labels) / (16 // outputs["logits"].shape[0])


def test_unequal_counts_tell_the_mistake_apart():
    data = referenced(with_empty())
    once, often = accumulated(mean_of_the_call, data, 1), accumulated(mean_of_the_call, data, 4)
    assert max((often[name] - value).abs().max() for name, value in once.items()) > 1e-6


def test_paired_kto_mixes_the_pairs_of_a_call():
    """Why it is no sum over pairs: its reference points are means over those of one call."""
    loss, data = partial(preference_loss, objective=partial(paired_kto, beta=1.0)), referenced()
    once, often = accumulated(loss, data, 1), accumulated(loss, data, 4)
    assert max((often[name] - value).abs().max() for name, value in once.items()) > 1e-6


def test_a_reward_model_in_the_trainer():
    data = [
        {side: {name: row[name] for name in ("input_ids", "attention_mask")} for side, row in pair.items()}
        for pair in DATA
    ]
    gradients = []
    for accumulation in (1, 4):
        trainer = tiny.trainer(
            tiny.model("llama_cls", num_labels=1),
            [{**pair, "margin": 0.5} for pair in data],
            partial(reward_loss, objective=margin_objective),
            collator=stack_pairs(tiny.pad),
            eval_rows=[{**pair, "margin": 0.5} for pair in data[:5]],
            reducer=reward_scores,
            metric=preferences(),
            per_device_train_batch_size=8 // accumulation,
            per_device_eval_batch_size=2,
            gradient_accumulation_steps=accumulation,
        )
        gradients.append(tiny.gradient_of(trainer))
        assert trainer.evaluate()["eval_pairs"] == 5
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("streamed", [False, True])
def test_evaluation(streamed):
    """The last batch is short: the Trainer cuts pairs, not rows, and no reward is lost."""
    data = referenced(with_empty()[:7])
    model = tiny.model("llama")
    metric = build(preferences(), num_samples=7) if streamed else preferences()
    trainer = tiny.trainer(
        model,
        loss=preference_loss,
        collator=COLLATE,
        eval_rows=data,
        reducer=partial(preference_rewards, shift=1, beta=0.1),
        metric=metric,
        per_device_eval_batch_size=3,
        batch_eval_metrics=streamed,
    )
    found = trainer.evaluate()
    rewards = []
    for index, pair in enumerate(with_empty()[:7]):
        if index == 2:
            continue
        sides = []
        for side, row in pair.items():
            with torch.no_grad():
                logits = model(row["input_ids"][None]).logits
            ((total, _),) = by_loop(logits, row["labels"][None])
            sides.append(0.1 * (total - data[index][f"reference_{side}"].item()))
        rewards.append(sides)
    chosen, rejected = np.array(rewards).T
    assert found["eval_pairs"] == 6
    assert found["eval_reward_chosen"] == pytest.approx(chosen.mean(), rel=1e-9)
    assert found["eval_reward_margin"] == pytest.approx((chosen - rejected).mean(), rel=1e-9)
    assert found["eval_reward_accuracy"] == (chosen > rejected).mean()


def one_or_two_ranks():
    """Seven pairs, one without a label, two of them a process: the last batch is short, widths differ across ranks."""
    trainer = tiny.trainer(
        tiny.model("llama"),
        referenced(with_empty()),
        preference_loss,
        collator=COLLATE,
        eval_rows=referenced(with_empty()[:7]),
        reducer=partial(preference_rewards, shift=1, beta=0.1),
        metric=preferences(),
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
        per_device_eval_batch_size=2,
        train_sampling_strategy="sequential",
    )
    gradient = tiny.gradient_of(trainer)
    found = trainer.evaluate()
    return gradient.tolist(), {name: value for name, value in found.items() if "reward" in name or "pairs" in name}


@pytest.mark.distributed
def test_two_ranks():
    gradient, scores = one_or_two_ranks()
    for found in tiny.run_distributed(one_or_two_ranks):
        assert found[0] == pytest.approx(gradient, abs=1e-12)
        assert found[1] == pytest.approx(scores, rel=1e-9)
    assert scores["eval_pairs"] == 6


def test_rewards_a_token_and_combined():
    ids = IDS.clone()
    ids[2, 1] = 3
    labels = {"labels": stacked(ids)}
    reducer = combine(rewards=partial(preference_rewards, shift=1, beta=2.0, per_token=True))
    found = reducer(LOGITS, labels)["rewards"]
    means = [2.0 * total / tokens for total, tokens in by_loop(LOGITS, ids)]
    assert found["reward_chosen"].tolist() == pytest.approx(means[:2], rel=1e-12)
    assert found["reward_rejected"].tolist() == pytest.approx(means[2:], rel=1e-12)


def test_reducers_return_what_the_metric_reads():
    found = preference_rewards(LOGITS, {"labels": stacked(IDS)}, shift=1)
    assert {*found} == {*reward_scores(torch.zeros(2, 1), torch.zeros(1))} == {*COLUMNS}


def test_ties_count_half():
    columns = {"reward_chosen": [2.0, 1.0, 0.0, 5.0], "reward_rejected": [1.0, 1.0, 3.0, 0.0], "pairs": [1, 1, 1, 0]}
    predictions = {name: np.array(column, dtype=np.float64) for name, column in columns.items()}
    scores = preferences()(transformers.EvalPrediction(predictions, np.zeros(4)))
    assert scores == {
        "reward_chosen": 1.0,
        "reward_rejected": pytest.approx(5 / 3),
        "reward_margin": pytest.approx(-2 / 3),
        "reward_accuracy": 0.5,
        "pairs": 3.0,
    }
    with pytest.raises(ValueError, match="missing: pairs"):
        preferences()(
            transformers.EvalPrediction({"reward_chosen": np.ones(1), "reward_rejected": np.ones(1)}, np.ones(1))
        )


@pytest.mark.parametrize("objective", [dpo, simpo, orpo, partial(cpo, weight=0.5)], ids=name)
def test_a_rejected_completion_that_is_ruled_out_costs_nothing(objective):
    """The chosen one is certain to win; NaN of one pair would be NaN of all."""
    logits, ids = torch.zeros(2, 2, V, dtype=torch.float64), torch.tensor([[N, 1], [N, 2]])
    logits[1, 0, 2] = -torch.inf
    references = dict.fromkeys(("reference_chosen", "reference_rejected"), torch.zeros(1, dtype=torch.float64))
    leaf = logits.requires_grad_()
    loss = preference_loss(leaf * 1, {"labels": ids} | references, objective=objective)
    (gradient,) = torch.autograd.grad(loss, leaf)
    likelihood = {"orpo": 1.0, "cpo": 0.5}.get(name(objective), 0.0)
    assert loss.item() == pytest.approx(likelihood * math.log(V), abs=1e-12)
    assert gradient.isfinite().all()
    assert reward_loss(torch.tensor([[1.0], [-torch.inf]]), torch.tensor([0])).item() == 0.0


@pytest.mark.parametrize(
    ("objective", "message"),
    [(dpo, "asks for reference_chosen, reference_rejected"), (lambda chosen, typo: chosen, "asks for 'typo'")],
)
def test_an_objective_that_cannot_be_computed_is_refused_before_the_logits_are_read(objective, message, monkeypatch):
    monkeypatch.setattr("lossfns.preference.pair_statistics", lambda *given: pytest.fail("the logits were read"))
    monkeypatch.setattr("lossfns.preference.score_pairs", lambda *given: pytest.fail("the scores were read"))
    with pytest.raises(TypeError, match=message):
        preference_loss(torch.zeros(2, 3, V), torch.zeros(2, 3, dtype=torch.long), objective=objective)
    with pytest.raises(TypeError, match=message):
        reward_loss(torch.zeros(2, 1), torch.zeros(1, dtype=torch.long), objective=objective)


# --- the reference, once ---------------------------------------------------------------------------------------------


def test_reference_log_probs_are_those_of_a_loop(capfd):
    model = tiny.model("llama", seed=3).train()
    model.lm_head.eval()
    found = precompute_reference_log_probs(model, DATA, COLLATE, batch_size=3)
    assert model.training
    assert model.model.training
    assert not model.lm_head.training
    assert len(found) == 8
    for index in (0, 5, 7):
        for side in ("chosen", "rejected"):
            row = DATA[index][side]
            with torch.no_grad():
                logits = model(row["input_ids"][None]).logits
            ((total, _),) = by_loop(logits, row["labels"][None])
            assert found[index][f"reference_{side}"].item() == pytest.approx(total, rel=1e-12)
    assert "reference log-probabilities" in capfd.readouterr().err


def test_the_reference_from_hidden_states():
    model = tiny.model("llama", seed=3)
    with hidden_states(model) as source:
        found = precompute_reference_log_probs(model, DATA, COLLATE, source=source)
    torch.testing.assert_close(found.log_probs, referenced().log_probs, rtol=1e-12, atol=0)


def test_the_cache_belongs_to_its_model_and_data(tmp_path):
    cache = tmp_path / "reference.pt"
    first = referenced(cache=cache)
    again = pickle.loads(pickle.dumps(referenced(cache=cache)))
    assert torch.equal(first.log_probs, again.log_probs)
    for other, data in ((tiny.model("llama", seed=4), DATA), (tiny.model("llama", seed=3), DATA[::-1])):
        with pytest.raises(ValueError, match="was made from other pairs"):
            precompute_reference_log_probs(other, data, COLLATE, cache=cache)


def test_the_cache_is_read(tmp_path, monkeypatch):
    cache = tmp_path / "reference.pt"
    first = referenced(cache=cache)
    scored = []
    monkeypatch.setattr("lossfns.preference._score", lambda *given: scored.append(1) or _score(*given))
    assert torch.equal(referenced(cache=cache).log_probs, first.log_probs)
    assert len(scored) == 1  # the first batch of several: was it the same forward?


def test_a_cache_that_cannot_be_written_is_refused_first(tmp_path, monkeypatch):
    monkeypatch.setattr("lossfns.preference.collated", lambda *given: pytest.fail("a batch was made"))
    with pytest.raises(ValueError, match=r"in a folder that is there: make .*nowhere first"):
        referenced(cache=tmp_path / "nowhere" / "reference.pt")
    with pytest.raises(ValueError, match="must be a file"):
        referenced(cache=tmp_path)
    monkeypatch.setattr("os.access", lambda folder, mode: False)
    with pytest.raises(ValueError, match="is read-only"):
        referenced(cache=tmp_path / "reference.pt")


@pytest.mark.parametrize(
    "damaged", [None, b"", b"hello world", b"\x80"], ids=["half of it", "nothing", "text", "a byte"]
)
def test_a_damaged_cache_is_named(tmp_path, damaged):
    cache = tmp_path / "reference.pt"
    referenced(cache=cache)
    kept = cache.read_bytes()
    cache.write_bytes(kept[: len(kept) // 2] if damaged is None else damaged)
    with pytest.raises(ValueError, match="cannot be read: it is damaged"):
        referenced(cache=cache)


def test_another_file_is_no_cache(tmp_path):
    torch.save({"weights": torch.zeros(2)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model.pt is no cache of log-probabilities"):
        referenced(cache=tmp_path / "model.pt")


def test_a_cache_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def half(kept, path):
        path.write_bytes(b"half")
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", half)
        with pytest.raises(OSError, match="full"):
            referenced(cache=tmp_path / "reference.pt")
    assert not [*tmp_path.iterdir()]
    first = referenced(cache=tmp_path / "reference.pt")
    assert torch.equal(referenced(cache=tmp_path / "reference.pt").log_probs, first.log_probs)


def test_several_may_write_a_cache_at_once(tmp_path):
    (tmp_path / "link.pt").symlink_to(tmp_path / "reference.pt")
    kept = {"made_from": "", "log_probs": torch.zeros(100, 2)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: preference._save(tmp_path / "link.pt", kept), range(40)))
    assert {path.name for path in tmp_path.iterdir()} == {"link.pt", "reference.pt"}
    assert torch.equal(preference._load(tmp_path / "reference.pt", ""), kept["log_probs"])


def test_weights_that_are_learnt():
    """A tensor is never taken for no weight, whatever its value."""
    zero, margins = torch.zeros((), requires_grad=True), torch.tensor([0.5, 0.0])
    chosen, rejected = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 3.0])
    for loss in (bradley_terry(chosen, rejected, centering=zero), cpo(chosen, rejected, chosen, weight=zero)):
        assert torch.autograd.grad(loss.sum(), zero)[0] != 0
    found = bradley_terry(chosen, rejected, centering=margins)
    assert found.tolist() == pytest.approx((bradley_terry(chosen, rejected) + torch.tensor([4.5, 0.0])).tolist())


def test_a_batch_of_bfloat16_has_a_cache(tmp_path):
    def pad(rows):
        return {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows), "pixels": torch.ones(2, dtype=BF16)}

    class Seeing(Switched):
        def forward(self, input_ids, pixels):
            return super().forward(input_ids)

    given = Seeing(), [{"chosen": [1, 2], "rejected": [1, 3]}], stack_pairs(pad, shift=1)
    first = precompute_reference_log_probs(*given, cache=tmp_path / "reference.pt")
    again = precompute_reference_log_probs(*given, cache=tmp_path / "reference.pt")
    assert torch.equal(again.log_probs, first.log_probs)


class Switched(torch.nn.Module):
    """A model with something like an adapter, which is on or off whatever its weights."""

    on = True

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 5)

    def forward(self, input_ids):
        return self.embedding(input_ids) * (3.0 if self.on else 1.0)


def test_the_cache_belongs_to_its_forward(tmp_path):
    def pad(rows):
        return {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows)}

    torch.manual_seed(0)
    model, pairs = Switched(), [{"chosen": [1, 2], "rejected": [1, 3]}]
    given = model, pairs, stack_pairs(pad, shift=1)
    first = precompute_reference_log_probs(*given, cache=tmp_path / "reference.pt")
    assert torch.equal(
        precompute_reference_log_probs(*given, cache=tmp_path / "reference.pt").log_probs, first.log_probs
    )
    model.on = False
    with pytest.raises(ValueError, match="another forward of the same weights"):
        precompute_reference_log_probs(*given, cache=tmp_path / "reference.pt")


# --- the collator ----------------------------------------------------------------------------------------------------


def test_stack_pairs():
    batch = pickle.loads(pickle.dumps(COLLATE))([{**pair, "margin": 0.5} for pair in with_empty()[1:4]])
    rows = [*CHOSEN[1:4], *[pair["rejected"] for pair in with_empty()[1:4]]]
    padded = tiny.pad(rows)
    assert torch.equal(batch["input_ids"], padded["input_ids"])
    assert torch.equal(batch["labels"]["labels"][..., 0], padded["labels"][:3])
    assert torch.equal(batch["labels"]["labels"][..., 1], padded["labels"][3:])
    assert batch["shift_labels"].tolist() == [0, N, 0]
    assert batch["labels"]["margin"].tolist() == [0.5] * 3
    assert next(iter(batch)) == "labels"  # by which the Trainer counts samples


def test_what_is_no_pair():
    with pytest.raises(ValueError, match="expected a pair"):
        COLLATE(CHOSEN[:2])
    with pytest.raises(ValueError, match="need a shift"):
        stack_pairs(tiny.pad)(DATA[:2])


def test_margins_are_those_of_each_pair_that_counts():
    scores = torch.tensor([[2.0], [0.0], [3.0], [1.5], [4.0], [-1.0]])
    torch.testing.assert_close(
        pair_margins(scores, torch.tensor([0, N, 0])),
        torch.tensor([0.5, torch.nan, 4.0], dtype=torch.float64),
        rtol=0,
        atol=0,
        equal_nan=True,
    )
    rewards = preference_rewards(LOGITS, {"labels": stacked(IDS)}, shift=1)
    found = pair_margins(LOGITS, {"labels": stacked(IDS)}, rewards=partial(preference_rewards, shift=1))
    for margin, chosen, rejected, counts in zip(found, *rewards.values(), strict=True):
        assert margin.isnan() if not counts else margin == chosen - rejected
