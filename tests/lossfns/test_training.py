"""What training logs beside the loss: equal to a loop over the same window, whatever the accumulation and processes."""

import math
import pickle
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers

from lossfns import (
    TrainingMetrics,
    add_losses,
    causal_lm_loss,
    classification_loss,
    cross_entropy,
    focal,
    hidden_states,
    mae,
    mse,
    multi_label_loss,
    multi_token_loss,
    regression_loss,
    segmentation_loss,
    token_weighted,
    watch,
    weighted_sum,
    with_aux_loss,
    z_loss,
)
from lossfns._core.block import Block
from lossfns.collators.labels import mask_first_label
from tests import tiny

COLUMNS = {"token_accuracy": "correct", "top_5": "correct_top_5", "nll": "nll", "entropy": "entropy"}
SUM = weighted_sum((1.0, cross_entropy), (0.01, z_loss))
TWO_PARTS = partial(causal_lm_loss, term=SUM)
ROWS = tiny.lm_rows(24)


# --- the same by a loop ----------------------------------------------------------------------------------------------


def tokens(model, rows, shift=1):
    """Logits and label of every scored token, one row at a time."""
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=row["input_ids"][None]).logits[0]
        for place in range(shift, len(row["labels"])):
            if row["labels"][place] != tiny.IGNORED:
                yield logits[place - shift].double(), int(row["labels"][place])


def expected(model, rows):
    found = {name: [] for name in [*COLUMNS, "cross_entropy", "z_loss"]}
    for x, label in tokens(model, rows):
        before = int((x > x[label]).sum()) + int((x[:label] == x[label]).sum())
        p = F.softmax(x, -1)
        found["token_accuracy"].append(float(before < 1))
        found["top_5"].append(float(before < 5))
        found["nll"].append(-p[label].log().item())
        found["entropy"].append(-(p * p.log()).sum().item())
        found["cross_entropy"].append(found["nll"][-1])
        found["z_loss"].append(x.logsumexp(-1).item() ** 2)
    return {name: sum(values) / len(values) for name, values in found.items()}


# --- with the Trainer ------------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """A collator that keeps the rows of every batch, in order."""

    batches: list = field(default_factory=list)

    def __call__(self, rows):
        self.batches.append(rows)
        return tiny.pad(rows)


def watched_trainer(loss=TWO_PARTS, model="llama", rows=ROWS, columns=COLUMNS, **options):
    """A Trainer that stands still, so that every window sees the same model, and its metrics."""
    metrics = TrainingMetrics()
    made = tiny.model(model) if isinstance(model, str) else model
    settings = {"learning_rate": 0.0, "per_device_train_batch_size": 2} | options
    trainer = tiny.trainer(made, rows, watch(loss, metrics, **columns), **settings)
    metrics.attach(trainer)
    return trainer, metrics


def lines(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("steps", [1, 3])
def test_every_line_is_the_mean_over_its_window(accumulation, steps):
    recorder = Recorder()
    trainer, _ = watched_trainer(collator=recorder, gradient_accumulation_steps=accumulation, logging_steps=steps)
    trainer.train()
    window = accumulation * steps
    assert len(lines(trainer)) == 12 // window
    for place, line in enumerate(lines(trainer)):
        rows = [row for batch in recorder.batches[place * window : (place + 1) * window] for row in batch]
        wanted = expected(trainer.model, rows)
        columns = {name: line[name] for name in COLUMNS}
        assert columns == pytest.approx({name: wanted[name] for name in COLUMNS}, rel=1e-9)
        if steps == 1:  # the loss of several steps is the mean of theirs
            assert line["z_loss"] == pytest.approx(wanted["z_loss"], rel=1e-9)
            assert line["cross_entropy"] == pytest.approx(wanted["cross_entropy"], rel=1e-9)


def test_a_mean_over_batches_is_another_number():
    """What a callback that averages the accuracies of the micro-batches would log: these rows tell them apart."""
    model, recorder = tiny.model("llama"), Recorder()
    trainer, _ = watched_trainer(model=model, collator=recorder, gradient_accumulation_steps=4, logging_steps=3)
    trainer.train()
    batches = [expected(model, batch) for batch in recorder.batches]
    for name in COLUMNS:
        of_batches = sum(batch[name] for batch in batches) / len(batches)
        assert lines(trainer)[0][name] != pytest.approx(of_batches, rel=1e-3)


def test_a_callback_that_comes_last_reaches_nobody():
    """Why the metrics go to the front: where callbacks are added, the reporter has read the line before."""
    reporter = Reporter()
    trainer, _ = watched_trainer(callbacks=[reporter])
    callbacks = trainer.callback_handler.callbacks
    callbacks.append(callbacks.pop(0))
    trainer.train()
    assert not any("token_accuracy" in line for line in reporter.seen)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_weights_times_parts_are_the_logged_loss(accumulation):
    trainer, _ = watched_trainer(gradient_accumulation_steps=accumulation)
    trainer.train()
    for line in lines(trainer):
        assert line["cross_entropy"] + 0.01 * line["z_loss"] == pytest.approx(line["loss"], abs=1e-4)


def two_ranks():
    found = {}
    for accumulation in (1, 4):
        trainer, _ = watched_trainer(gradient_accumulation_steps=accumulation, logging_steps={1: 6, 4: 2}[accumulation])
        trainer.train()
        found[accumulation] = lines(trainer)[0]
    return found


@pytest.mark.distributed
def test_two_processes_log_the_mean_over_both():
    wanted = expected(tiny.model("llama"), ROWS)
    for rank in tiny.run_distributed(two_ranks):
        for accumulation in ("1", "4"):
            line = rank[accumulation]
            assert {name: line[name] for name in COLUMNS} == pytest.approx(
                {name: wanted[name] for name in COLUMNS}, rel=1e-9
            )
            assert line["cross_entropy"] + 0.01 * line["z_loss"] == pytest.approx(line["loss"], abs=1e-4)


def test_replicas_of_one_process():
    trainer, _ = watched_trainer(replicas=2, per_device_train_batch_size=6, logging_steps=2)
    trainer.train()
    wanted, line = expected(trainer.model, ROWS), lines(trainer)[0]
    assert {name: line[name] for name in COLUMNS} == pytest.approx({name: wanted[name] for name in COLUMNS}, rel=1e-9)
    assert line["cross_entropy"] + 0.01 * line["z_loss"] == pytest.approx(line["loss"], abs=1e-4)


def test_the_gradient_is_that_of_the_loss_alone():
    alone = tiny.gradient_of(tiny.trainer(tiny.model("llama"), ROWS, partial(causal_lm_loss, term=SUM)))
    trainer, _ = watched_trainer(learning_rate=1.0, per_device_train_batch_size=8)
    assert torch.equal(tiny.gradient_of(trainer), alone)


class Reporter(transformers.TrainerCallback):
    """What a reporter sees; given to the Trainer before the metrics are attached."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def test_reporters_and_history_agree(capsys):
    reporter = Reporter()
    trainer, _ = watched_trainer(callbacks=[reporter], logging_steps=4)
    trainer.add_callback(transformers.PrinterCallback)
    trainer.train()
    shown = [line["token_accuracy"] for line in reporter.seen if "token_accuracy" in line]
    assert shown == [line["token_accuracy"] for line in lines(trainer)]
    assert len(shown) == 3
    assert capsys.readouterr().out.count("token_accuracy") == 3


def test_evaluation_is_left_out_and_its_lines_alone():
    trainer, _ = watched_trainer(
        eval_rows=tiny.lm_rows(5, seed=7), eval_strategy="steps", eval_steps=1, logging_steps=12
    )
    trainer.train()
    wanted = expected(trainer.model, ROWS)
    assert lines(trainer)[0]["token_accuracy"] == pytest.approx(wanted["token_accuracy"], rel=1e-12)
    assert all("token_accuracy" not in entry for entry in trainer.state.log_history if "loss" not in entry)


class Stopped(transformers.TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def test_a_training_starts_with_empty_sums():
    trainer, metrics = watched_trainer(gradient_accumulation_steps=4, logging_steps=3)
    trainer.add_callback(Stopped)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert metrics._sums
    trainer.remove_callback(Stopped)
    trainer.train()
    wanted = expected(trainer.model, ROWS)
    assert lines(trainer)[0]["nll"] == pytest.approx(wanted["nll"], rel=1e-12)


def test_hidden_states():
    model = tiny.model("llama")
    with hidden_states(model) as source:
        trainer, _ = watched_trainer(partial(causal_lm_loss, term=SUM, source=source), model, logging_steps=12)
        trainer.train()
    wanted, line = expected(model, ROWS), lines(trainer)[0]
    assert {name: line[name] for name in COLUMNS} == pytest.approx({name: wanted[name] for name in COLUMNS}, rel=1e-9)


def test_a_classifier():
    rows = tiny.class_rows(8)
    trainer, _ = watched_trainer(classification_loss, "bert_cls", rows, {"accuracy": "correct"}, logging_steps=4)
    trainer.train()
    with torch.no_grad():
        guesses = [trainer.model(input_ids=row["input_ids"][None]).logits.argmax(-1).item() for row in rows]
    right = [guess == int(row["labels"]) for guess, row in zip(guesses, rows, strict=True)]
    assert lines(trainer)[0]["accuracy"] == pytest.approx(sum(right) / len(right))


def test_a_window_without_labels_is_nan_and_does_no_harm():
    rows = [row | {"labels": torch.full_like(row["labels"], tiny.IGNORED)} for row in tiny.lm_rows(4)]
    trainer, _ = watched_trainer(rows=rows)
    trainer.train()
    assert all(line["loss"] == 0 and line["token_accuracy"] != line["token_accuracy"] for line in lines(trainer))


# --- parts -----------------------------------------------------------------------------------------------------------


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 6, 11, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(11, (3, 6), generator=generator)
    labels[0, :3] = -100
    return logits, labels


def means(loss, labels=None, count=None, **columns):
    metrics = TrainingMetrics()
    logits, own = batch()
    value = watch(loss, metrics, **columns)({"logits": logits, "aux_loss": torch.tensor(0.5)}, labels or own, count)
    return value.item(), metrics.means()


def test_parts_of_add_losses_in_one_pass():
    parts = {"ce": (0.5, causal_lm_loss), "focal": (0.25, partial(causal_lm_loss, term=focal))}
    logits, labels = batch()
    value, found = means(add_losses(parts))
    assert found == pytest.approx({name: loss(logits, labels).item() for name, (_, loss) in parts.items()})
    assert value == pytest.approx(sum(weight * found[name] for name, (weight, _) in parts.items()))


def own_loss(outputs, labels, num_items_in_batch=None):
    return outputs["logits"].square().mean()


def test_parts_of_add_losses_one_after_the_other():
    parts = {"size": (0.1, own_loss), "ce": (1.0, causal_lm_loss), "unshifted": (0.5, partial(causal_lm_loss, shift=0))}
    logits, labels = batch()
    value, found = means(add_losses(parts), accuracy="correct")
    given = {"logits": logits}
    wanted = {name: loss(given, labels).item() for name, (_, loss) in parts.items()}
    assert {name: found[name] for name in parts} == pytest.approx(wanted)
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100]
    assert found["accuracy"] == pytest.approx(right.double().mean().item())  # of the first that measures, once
    assert value == pytest.approx(sum(weight * wanted[name] for name, (weight, _) in parts.items()))


def test_factors_of_the_whole_stay_on_the_parts():
    _, labels = batch()
    weights = torch.rand(labels.shape, dtype=torch.float64)
    loss = partial(causal_lm_loss, term=token_weighted(SUM))
    value, found = means(loss, {"labels": labels, "token_weights": weights})
    assert value == pytest.approx(found["cross_entropy"] + 0.01 * found["z_loss"])


def test_an_auxiliary_term_is_a_part():
    value, found = means(with_aux_loss(partial(causal_lm_loss, term=SUM), "aux_loss", 2.0))
    assert value == pytest.approx(found["cross_entropy"] + 0.01 * found["z_loss"] + 1.0)
    assert found["aux_loss"] == 0.5
    value, found = means(with_aux_loss(causal_lm_loss, "aux_loss", 2.0))
    assert found == pytest.approx({"causal_lm_loss": value - 1.0, "aux_loss": 0.5})


def test_an_auxiliary_term_of_a_part_stays_in_it():
    value, found = means(add_losses({"router": (0.5, with_aux_loss(causal_lm_loss, "aux_loss", 2.0))}))
    assert found == pytest.approx({"router": 2 * value})


def test_an_auxiliary_term_is_the_mean_over_the_window():
    """Of micro-batches of different lengths, each with a term of its own, weighted by their labels."""
    logits, labels = batch()
    metrics, terms = TrainingMetrics(), [0.5, 2.0, -1.0]
    loss = watch(with_aux_loss(causal_lm_loss, "aux_loss", 0.1), metrics)
    numbers = (labels[:, 1:] != -100).sum(1).tolist()
    for i, term in enumerate(terms):
        row = slice(i, i + 1)
        loss({"logits": logits[row], "aux_loss": torch.tensor(term)}, labels[row], sum(numbers))
    expected = sum(number * term for number, term in zip(numbers, terms, strict=True)) / sum(numbers)
    assert metrics.means()["aux_loss"] == pytest.approx(expected)
    assert len(set(numbers)) > 1


def test_half_a_window_weighs_half():
    logits, labels = batch()
    metrics = TrainingMetrics()
    loss = watch(partial(causal_lm_loss, term=SUM), metrics)
    count = int((labels[:, 1:] != -100).sum())
    whole = sum(loss(logits[i : i + 1], labels[i : i + 1], count).item() for i in range(3))
    found = metrics.means()
    assert found["cross_entropy"] + 0.01 * found["z_loss"] == pytest.approx(whole)


# --- cost ------------------------------------------------------------------------------------------------------------


def test_one_pass_over_the_logits(monkeypatch):
    """Each chunk is brought into the cache, and its softmax taken, as often as without anybody watching."""
    measured = []
    original = Block.measure
    monkeypatch.setattr(
        Block, "measure", lambda block, fields: measured.append((len(block.rows), *fields)) or original(block, fields)
    )
    logits, labels = batch()
    causal_lm_loss(logits, labels)
    plain = list(measured)
    measured.clear()
    watch(causal_lm_loss, TrainingMetrics(), accuracy="correct")(logits, labels)
    assert [rows for rows, *_ in measured] == [rows for rows, *_ in plain]
    assert {fields for _, *fields in map(tuple, measured) for fields in [tuple(fields)]} == {("log_prob", "rank")}
    measured.clear()
    watch(causal_lm_loss, TrainingMetrics(), nll="nll")(logits, labels)
    assert measured == plain


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"accuracy": "correkt"}, "unknown column 'correkt'"),
        ({"accuracy": "correct_top_0"}, "unknown column 'correct_top_0'"),
        ({"loss": "nll"}, "rename"),
        ({"eval_accuracy": "correct"}, "rename"),
    ],
)
def test_wrong_names(columns, message):
    with pytest.raises(ValueError, match=message):
        watch(causal_lm_loss, TrainingMetrics(), **columns)


def test_two_parts_of_one_name():
    term = weighted_sum((1.0, focal), (1.0, partial(focal, gamma=1.0)))
    with pytest.raises(ValueError, match="two values would be logged as 'focal'"):
        means(partial(causal_lm_loss, term=term))
    with pytest.raises(ValueError, match="two values would be logged as 'z_loss'"):
        means(partial(causal_lm_loss, term=SUM), z_loss="nll")


def test_a_loss_that_measures_no_classes():
    loss = watch(regression_loss, TrainingMetrics(), accuracy="correct")
    with pytest.raises(ValueError, match="cannot be watched"):
        loss(torch.zeros(3, 1, requires_grad=True), torch.ones(3))


@pytest.mark.parametrize("joined", [True, False], ids=["weighted_sum", "add_losses"])
def test_parts_of_losses_beside_the_kernel(joined):
    predictions, targets = torch.tensor([[1.0], [5.0]], requires_grad=True), torch.tensor([2.0, 2.0])
    metrics = TrainingMetrics()
    parts = {"mse": (0.5, partial(regression_loss, term=mse)), "mae": (2.0, partial(regression_loss, term=mae))}
    one = partial(regression_loss, term=weighted_sum((0.5, mse), (2.0, mae)))
    value = watch(one if joined else add_losses(parts), metrics)(predictions, targets)
    assert metrics.means() == {"mse": 5.0, "mae": 2.0}
    assert value.item() == 0.5 * 5.0 + 2.0 * 2.0


def test_parts_of_yes_or_no_labels():
    metrics = TrainingMetrics()
    loss = partial(multi_label_loss, term=weighted_sum((1.0, cross_entropy), (0.5, focal)), pos_weight=[3.0])
    value = watch(loss, metrics)(torch.zeros(2, 1, requires_grad=True), torch.tensor([[1], [0]]))
    nll, found = math.log(2), metrics.means()
    assert found == pytest.approx({"cross_entropy": 2 * nll, "focal": 0.5 * nll})  # weights 3 and 1 over two labels
    assert value.item() == pytest.approx(found["cross_entropy"] + 0.5 * found["focal"])


def test_parts_that_a_loss_cannot_tell_apart():
    loss = partial(segmentation_loss, term=weighted_sum((1.0, cross_entropy), (0.5, focal)))
    pixels = torch.zeros(1, 2, 1, 1, requires_grad=True), torch.tensor([[[0]]])
    with pytest.raises(ValueError, match="does not measure the parts of its term separately"):
        watch(loss, TrainingMetrics())(*pixels)
    metrics = TrainingMetrics()
    terms = {term.__name__: (1.0, partial(segmentation_loss, term=term)) for term in (cross_entropy, focal)}
    watch(add_losses(terms), metrics)(*pixels)
    assert metrics.means() == pytest.approx({"cross_entropy": math.log(2), "focal": math.log(2) / 4})


def test_of_several_heads_the_next_token_is_watched():
    labels, metrics = torch.tensor([[0, 1, 2, 3]]), TrainingMetrics()
    right = 20.0 * F.one_hot(labels.roll(-1), 4).float()
    outputs = {"next": right.requires_grad_(), "second": torch.zeros(1, 4, 4, requires_grad=True)}
    loss = partial(multi_token_loss, heads=("next", "second"), weights=(1.0, 1.0))
    watch(loss, metrics, accuracy="correct", nll="nll")(outputs, labels)
    assert metrics.means() == pytest.approx({"accuracy": 1.0, "nll": 0.0}, abs=1e-6)


def test_parts_that_nobody_counts():
    with pytest.raises(ValueError, match="does not divide by the Trainer's count"):
        means(add_losses({"a": (1.0, own_loss), "b": (1.0, partial(own_loss))}))


def test_metrics_that_nothing_fills():
    trainer = tiny.trainer(tiny.model("llama"), ROWS, causal_lm_loss)
    with pytest.raises(ValueError, match="must be watch"):
        TrainingMetrics().attach(trainer)


def test_picklable():
    loss = watch(causal_lm_loss, TrainingMetrics(), accuracy="correct")
    copy = pickle.loads(pickle.dumps(loss))
    logits, labels = batch()
    assert torch.equal(copy(logits, labels), loss(logits, labels))
    assert repr(copy) == "watch(causal_lm_loss, accuracy='correct')"


def test_counts_of_unshifted_classes():
    """GPT-2 is counted unshifted: the share of the window, not the Trainer's count, is what parts are averaged by."""
    trainer, _ = watched_trainer(
        model="gpt2", collator=mask_first_label(tiny.pad), gradient_accumulation_steps=4, logging_steps=3
    )
    trainer.train()
    assert lines(trainer)[0]["nll"] == pytest.approx(expected(trainer.model, ROWS)["nll"], rel=1e-9)
