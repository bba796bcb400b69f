"""Distillation against scipy in float64, the limits of its divergences, and a teacher in the stock Trainer."""

from functools import partial

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy

from benchmarks.memory import peak_bytes
from lossfns import (
    causal_lm_loss,
    cross_entropy,
    distillation_loss,
    forward_kl,
    hidden_states,
    jensen_shannon,
    reverse_kl,
    teacher_divergence,
    total_variation,
    weighted_sum,
)
from lossfns.collators import teacher_inputs, with_extras
from tests import oracle, tiny

N = oracle.IGNORED
LABELS = torch.tensor([[N, 3, N, 6, 1], [0, 2, 2, N, N]])
V = 7


def normal(*shape, seed=0, dtype=torch.float64):
    return (2 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).to(dtype)


STUDENT, TEACHER = normal(2, 5, V), normal(2, 5, V, seed=1)

# The divergences of one pair of distributions p (student) and q (teacher), from scipy where it has them.
DIVERGENCES = {
    "forward": (forward_kl, lambda p, q: entropy(q, p)),
    "reverse": (reverse_kl, entropy),
    "jensen-shannon": (jensen_shannon, lambda p, q: jensenshannon(p, q) ** 2),
    "generalised": (partial(jensen_shannon, beta=0.2), lambda p,
        q: 0.2 * entropy(q, 0.2 * q + 0.8 * p) + 0.8 * entropy(p, 0.2 * q + 0.8 * p)),
    "total variation": (total_variation, lambda p, q: np.abs(p - q).sum() / 2),
}  # fmt: skip
EVERY = pytest.mark.parametrize(("divergence", "formula"), DIVERGENCES.values(), ids=DIVERGENCES)


def softmax(row, temperature=1.0):
    powers = np.exp(row.detach().double().numpy() / temperature)
    return powers / powers.sum()


def by_formula(formula, student, teacher, labels=LABELS, temperature=1.0, shift=1):
    values = [
        formula(softmax(student[row], temperature), softmax(teacher[row], temperature)) * temperature**2
        for _, row in oracle.pairs(student, labels, shift=shift)
    ]
    return sum(values), len(values)


def dense(teacher=TEACHER, labels=LABELS):
    return {"labels": labels, "teacher_logits": teacher}


def top(teacher, k, labels=LABELS, temperature=1.0):
    found = (teacher / temperature).log_softmax(-1).topk(k)
    return {"labels": labels, "teacher_ids": found.indices, "teacher_log_probs": found.values}


def gradient(loss, logits):
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


@EVERY
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("shift", [0, 1])
def test_values_match_scipy(divergence, formula, temperature, shift):
    total, _ = by_formula(formula, STUDENT, TEACHER, temperature=temperature, shift=shift)
    loss = partial(distillation_loss, divergence=divergence, temperature=temperature, shift=shift)
    assert loss(STUDENT, dense(), 5).item() == pytest.approx(total / 5, rel=1e-12)


@EVERY
@pytest.mark.parametrize("labels", [dense(), top(TEACHER, 3)], ids=["dense", "top"])
def test_gradcheck(divergence, formula, labels):
    term = weighted_sum((0.3, cross_entropy), (0.7, teacher_divergence))
    loss = partial(distillation_loss, labels=labels, divergence=divergence, temperature=2.0, term=term)
    assert torch.autograd.gradcheck(lambda logits: loss(logits * 1), STUDENT.clone().requires_grad_())


@EVERY
def test_two_passes_give_the_same_gradient(divergence, formula):
    """The gradient of a term with learnable weights cannot be written in the forward pass."""
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    two = partial(distillation_loss, labels=dense(), divergence=divergence, term=lambda divergence: scale * divergence)
    one = partial(distillation_loss, labels=dense(), divergence=divergence)
    torch.testing.assert_close(gradient(two, STUDENT), 2 * gradient(one, STUDENT), rtol=1e-12, atol=1e-15)
    two(STUDENT).backward()
    assert scale.grad.item() == pytest.approx(one(STUDENT).item(), rel=1e-12)


@EVERY
def test_the_logits_may_be_overwritten(divergence, formula):
    loss = partial(distillation_loss, labels=dense(), divergence=divergence)
    logits = STUDENT.clone().requires_grad_()
    overwritten = logits * 1
    loss(overwritten, overwrite_logits=True).backward()
    assert not overwritten.numel()
    torch.testing.assert_close(logits.grad, gradient(loss, STUDENT), rtol=0, atol=0)


@EVERY
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_the_loss_is_zero_if_student_and_teacher_agree(divergence, formula, temperature):
    loss = partial(distillation_loss, divergence=divergence, temperature=temperature)
    shifted = STUDENT + 5  # logits differ, probabilities do not
    for labels in (dense(shifted), top(STUDENT, 3, temperature=temperature), top(STUDENT, V, temperature=temperature)):
        assert abs(loss(STUDENT, labels).item()) < 1e-14
        if divergence is not total_variation:  # whose gradient jumps there
            assert gradient(partial(loss, labels=labels), STUDENT).abs().max() < 1e-14


@pytest.mark.parametrize(("beta", "scale", "limit"), [(1e-7, 1e-7, forward_kl), (1 - 1e-7, 1e-7, reverse_kl)])
def test_jensen_shannon_tends_to_both_divergences(beta, scale, limit):
    log_p, log_q = STUDENT[0].log_softmax(-1), TEACHER[0].log_softmax(-1)
    torch.testing.assert_close(
        jensen_shannon(log_p, log_q, beta=beta) / scale, limit(log_p, log_q), rtol=1e-5, atol=1e-7
    )


def test_temperature_keeps_the_size_of_gradients():
    """Hinton 2015: at a high temperature the gradient is that of half the squared distance of centred logits, by V."""
    hot = gradient(partial(distillation_loss, labels=dense(), temperature=1e4), STUDENT)
    difference = STUDENT - TEACHER
    matched = (difference - difference.mean(-1, keepdim=True)) / V / 5
    for _, row in oracle.pairs(STUDENT, LABELS, shift=1):
        torch.testing.assert_close(hot[row], matched[row], rtol=1e-3, atol=1e-5)


@EVERY
def test_classes_that_the_teacher_rules_out(divergence, formula):
    teacher = TEACHER.clone()
    teacher[..., 2:4] = -torch.inf
    loss = partial(distillation_loss, labels=dense(teacher), divergence=divergence)
    if divergence is reverse_kl:
        assert loss(STUDENT).item() == float("inf")
        return
    with np.errstate(divide="ignore"):
        total, items = by_formula(formula, STUDENT, teacher)
    assert loss(STUDENT).item() == pytest.approx(total / items, rel=1e-12)
    assert torch.autograd.gradcheck(lambda logits: loss(logits * 1), STUDENT.clone().requires_grad_())


@EVERY
def test_classes_that_both_rule_out(divergence, formula):
    student, teacher = STUDENT.clone(), TEACHER.clone()
    student[..., 2] = teacher[..., 2] = -torch.inf
    loss = partial(distillation_loss, labels=dense(teacher), divergence=divergence)
    kept = [0, 1, 3, 4, 5, 6]
    renamed = torch.where(LABELS > 2, LABELS - 1, LABELS).masked_fill(LABELS == 2, 0)
    expected = partial(distillation_loss, labels=dense(teacher[..., kept], renamed), divergence=divergence)
    assert loss(student).item() == pytest.approx(expected(student[..., kept]).item(), rel=1e-12)
    found = gradient(loss, student)
    assert not found[..., 2].any()
    torch.testing.assert_close(found[..., kept], gradient(expected, student[..., kept]), rtol=1e-10, atol=1e-15)


def test_a_plain_formula_breaks_on_what_is_ruled_out():
    """The broken variant that the two tests above exclude: `0 * -inf` is NaN."""
    log_q = TEACHER[0].masked_fill(torch.arange(V) == 2, -torch.inf).log_softmax(-1)
    assert (log_q.exp() * (log_q - STUDENT[0].log_softmax(-1))).sum(-1).isnan().all()


def test_tokens_without_a_label_are_never_read():
    student, teacher = STUDENT.clone(), TEACHER.clone()
    read = torch.zeros(2, 5, dtype=torch.bool)
    for _, row in oracle.pairs(student, LABELS, shift=1):
        read[row] = True
    student[~read], teacher[~read] = torch.nan, torch.inf
    loss = partial(distillation_loss, labels=dense(teacher))
    assert loss(student).item() == distillation_loss(STUDENT, dense()).item()
    assert not gradient(loss, student)[~read].any()


@EVERY
@pytest.mark.parametrize("more", [-2, 3])
def test_vocabularies_of_other_widths_are_cut_to_the_common_classes(divergence, formula, more):
    teacher = normal(2, 5, V + more, seed=2)
    width = min(V, V + more)
    labels = LABELS.clamp(max=width - 1)
    total, items = by_formula(formula, STUDENT[..., :width], teacher[..., :width], labels)
    loss = partial(distillation_loss, labels=dense(teacher, labels), divergence=divergence)
    assert loss(STUDENT).item() == pytest.approx(total / items, rel=1e-12)
    assert not gradient(loss, STUDENT)[..., width:].any()


@EVERY
def test_top_k_is_the_divergence_of_merged_distributions(divergence, formula):
    """All other classes are one class. The value grows with k up to that of all classes."""

    def merged(k):
        def one(p, q):
            best = np.argsort(-q)[:k]
            both = [np.append(values[best], np.delete(values, best).sum()) for values in (p, q)]
            return formula(*both)

        return by_formula(one if k < V else formula, STUDENT, TEACHER)

    found = [distillation_loss(STUDENT, top(TEACHER, k), divergence=divergence).item() for k in range(1, V + 1)]
    for k, value in enumerate(found, 1):
        total, items = merged(k)
        assert value == pytest.approx(total / items, rel=1e-9)
    assert found == sorted(found)
    assert found[-1] == pytest.approx(distillation_loss(STUDENT, dense(), divergence=divergence).item(), rel=1e-12)


@EVERY
def test_top_k_of_a_certain_teacher_is_finite(divergence, formula):
    """Rounding leaves no probability for its other classes, where the student always has some."""
    labels = top(TEACHER.bfloat16() * 20, 2)
    assert distillation_loss(STUDENT.float(), labels, divergence=divergence).isfinite()


def test_a_longer_teacher_or_student_is_aligned_at_the_right():
    prompted = torch.cat([normal(2, 3, V, seed=5), TEACHER], 1)
    assert distillation_loss(STUDENT, dense(prompted)).item() == distillation_loss(STUDENT, dense()).item()
    student = torch.cat([normal(2, 2, V, seed=6), STUDENT], 1)
    assert distillation_loss(student, dense()).item() == distillation_loss(STUDENT, dense()).item()


REFUSED = {
    "no teacher": ({"labels": LABELS}, {}, "needs one teacher, got none"),
    "two teachers": (dense() | top(TEACHER, 2), {}, "got teacher_logits and teacher_ids"),
    "bool ids": (top(TEACHER, 2) | {"teacher_ids": torch.ones(2, 5, 2).bool()}, {}, "must be integers.*got torch.bool"),
    "an id twice": (top(TEACHER, 2) | {"teacher_ids": torch.ones(2, 5, 2).long()}, {}, "got a class twice"),
    "no id": (top(TEACHER, 0), {}, r"teacher_ids must have shape.*classes or k\).*got \(2, 5, 0\)"),
    "probabilities": (top(TEACHER, 2) | {"teacher_log_probs": torch.full((2, 5, 2), 0.4)}, {},
        "must be log-probabilities over all classes"),
    "no number": (top(TEACHER, 2) | {"teacher_log_probs": torch.full((2, 5, 2), torch.nan)}, {}, "sum to nan"),
    "a gradient": (dense(TEACHER.clone().requires_grad_()), {}, "must not require a gradient"),
    "another unit": (dense() | {"sequence_ids": LABELS}, {}, "the Trainer counts sequences"),
    "beta": (dense(), {"divergence": partial(jensen_shannon, beta=1.5)}, "beta must be between 0 and 1, got 1.5"),
    "nothing to read": ({"labels": LABELS}, {"teacher": torch.nn.Identity()}, "no inputs for the teacher"),
}  # fmt: skip


@pytest.mark.parametrize(("labels", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_inputs_that_are_refused(labels, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        distillation_loss(STUDENT, labels, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounded_log_probs_pass_the_check_of_their_sum(dtype):
    found = top(TEACHER, V - 1)
    rounded = found | {"teacher_log_probs": found["teacher_log_probs"].to(dtype)}
    assert distillation_loss(STUDENT, rounded).item() == pytest.approx(
        distillation_loss(STUDENT, found).item(), rel=0.02
    )


def test_top_k_is_checked_only_for_labelled_tokens():
    found = top(TEACHER, 2)
    places = torch.ones(2, 5, dtype=torch.bool)
    places[0, [0, 2, 3]] = places[1, [0, 1]] = False  # positions whose logit predicts a label
    rest = {"teacher_ids": found["teacher_ids"].masked_fill(places[..., None], N)}
    rest["teacher_log_probs"] = found["teacher_log_probs"].masked_fill(places[..., None], 9.0)
    assert distillation_loss(STUDENT, {"labels": LABELS, **rest}) == distillation_loss(STUDENT, found)


def test_a_wrong_beta_does_not_change_the_logits():
    logits = STUDENT.clone().requires_grad_() * 1
    with pytest.raises(ValueError, match="beta"):
        distillation_loss(logits, dense(), divergence=partial(jensen_shannon, beta=2.0), overwrite_logits=True)
    assert torch.equal(logits, STUDENT)


@pytest.mark.parametrize(("labels", "classes"), [(dense(), V), (dense(TEACHER[..., :5]), 5), (top(TEACHER, 2), 3)])
def test_a_divergence_may_hold_one_number_per_class(labels, classes):
    weights = torch.arange(1.0, classes + 1, dtype=torch.float64)
    assert (
        distillation_loss(STUDENT, labels, divergence=lambda log_p, log_q: (weights * (log_p - log_q) ** 2).sum(-1)) > 0
    )


@pytest.mark.parametrize("divergence", [forward_kl, jensen_shannon], ids=lambda divergence: divergence.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_stays_near_one_gradient(divergence, dtype):
    tokens, width = 640, 50_000
    logits = torch.zeros(1, tokens, width, dtype=dtype).requires_grad_()
    labels = dense(torch.ones(1, tokens, width, dtype=dtype), torch.zeros(1, tokens, dtype=torch.int64))

    def step():
        return torch.autograd.grad(distillation_loss(logits, labels, divergence=divergence), logits)

    assert peak_bytes(step).peak < 1.25 * logits.nbytes


ROWS = tiny.lm_rows(8)
COLLATE = teacher_inputs(tiny.pad, shift=1)


def frozen(**config):
    return tiny.model("qwen2", seed=7, **config).eval()


def by_hand(model, teacher, divergence=torch.nn.functional.kl_div):
    """Three plain steps over all rows with torch's divergence."""
    optimizer = torch.optim.SGD(model.parameters(), lr=oracle.LEARNING_RATE)
    batch = tiny.pad(ROWS)
    labels = batch.pop("labels")[:, 1:]
    with torch.no_grad():
        target = teacher(**batch).logits[:, :-1][labels != N].log_softmax(-1)
    for _ in range(oracle.STEPS):
        found = model(**batch).logits[:, :-1][labels != N].log_softmax(-1)
        divergence(found, target, log_target=True, reduction="batchmean").backward()
        optimizer.step()
        optimizer.zero_grad()
    return tiny.parameters(model)


def trained(model, loss, accumulation):
    return tiny.parameters_after(
        tiny.trainer(
            model,
            ROWS,
            loss,
            collator=COLLATE,
            num_train_epochs=oracle.STEPS,
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
            learning_rate=oracle.LEARNING_RATE,
        )
    )


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_frozen_model_in_the_stock_trainer(accumulation, hidden):
    model, teacher = tiny.model("llama"), frozen()
    expected = by_hand(tiny.model("llama"), frozen())
    options = {"teacher": hidden_states(teacher), "source": hidden_states(model)} if hidden else {"teacher": teacher}
    found = trained(model, partial(distillation_loss, **options), accumulation)
    before = tiny.parameters(tiny.model("llama"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-11, msg=name)
    assert max((before[name] - value).abs().max() for name, value in expected.items()) > 1e-2


def test_teacher_logits_from_hidden_states_are_computed_in_parts(monkeypatch):
    monkeypatch.setattr("lossfns._core.rows.CPU_CHUNK_BYTES", 3 * 8 * 8 * tiny.VOCAB)  # three rows a chunk
    monkeypatch.setattr("lossfns._core.teacher._CHUNKS_PER_PRODUCT", 2)
    model, teacher = tiny.model("llama"), frozen(vocab_size=tiny.VOCAB + 5)
    batch = COLLATE(ROWS)
    labels = batch.pop("labels")
    batch.pop("shift_labels")
    expected = distillation_loss(model(**batch), labels, teacher=teacher, divergence=reverse_kl)
    with hidden_states(teacher) as source:
        found = distillation_loss(model(**batch), labels, teacher=source, divergence=reverse_kl)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_teacher_in_training_mode_is_refused():
    batch = COLLATE(ROWS)
    with pytest.raises(ValueError, match=r"call teacher\.eval\(\)"):
        distillation_loss(normal(8, 12, tiny.VOCAB), batch["labels"], teacher=frozen().train())


@pytest.mark.parametrize("collator", [tiny.pad, tiny.pad_left])
def test_top_k_columns_of_a_dataset(collator):
    """They are computed once, padded with their labels and compared with the right logits."""
    teacher, model, rows = frozen(), tiny.model("llama"), []
    for row in ROWS:
        with torch.no_grad():
            found = teacher(row["input_ids"][None]).logits[0].log_softmax(-1).topk(5)
        rows.append({**row, "teacher_ids": found.indices, "teacher_log_probs": found.values})
    batch = with_extras(collator, ["teacher_ids", "teacher_log_probs"], shift=1)(rows)
    labels, _ = batch.pop("labels"), batch.pop("shift_labels")
    total, items = 0.0, 0
    for row in rows:
        outputs, targets = model(row["input_ids"][None]), {name: row[name][None] for name in labels}
        count = tiny.count([row], shift=1)
        total, items = total + count * distillation_loss(outputs, targets).item(), items + count
    assert distillation_loss(model(**batch), labels).item() == pytest.approx(total / items, rel=1e-6)


def test_a_weighted_sum_with_cross_entropy():
    both = partial(distillation_loss, term=weighted_sum((0.25, cross_entropy), (0.75, teacher_divergence)))
    expected = 0.25 * causal_lm_loss(STUDENT, LABELS) + 0.75 * distillation_loss(STUDENT, dense())
    assert both(STUDENT, dense()).item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("broken", "message"),
    [({"term": lambda log_prob, typo: log_prob}, "asks for 'typo'"), ({"divergence": partial(forward_kl, t=1)}, "'t'")],
)
def test_wrong_terms_and_divergences_are_refused_before_the_teacher_runs(broken, message):
    class Teacher(torch.nn.Module):
        def forward(self, input_ids):
            pytest.fail("the teacher ran")

    given = {"labels": LABELS, "teacher_input_ids": torch.zeros_like(LABELS)}
    with pytest.raises(TypeError, match=message):
        distillation_loss(STUDENT, given, teacher=Teacher().eval(), **broken)
