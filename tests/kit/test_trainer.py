"""`check_trainer` finds mistakes planted in a stock Trainer, and reports no problem for correct ones."""

import random
import sys
import types
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from lossfns import (
    TrainingMetrics,
    asymmetric,
    causal_lm_loss,
    classification_loss,
    focal,
    hidden_states,
    huber,
    info_nce_loss,
    masked_lm_loss,
    multi_label_loss,
    seq2seq_lm_loss,
    token_classification_loss,
    watch,
    with_aux_loss,
)
from lossfns.collators import with_extras
from lossfns.collators.labels import keep_supervised_logits, mask_first_label, with_decoder_inputs
from lossfns.testing import check_trainer
from lossfns.testing import trainer as checks
from metrics import Metric, bootstrap, build, by_dataset, by_group, classification, language_modeling, multi_label
from reducers import argmax, probabilities, sample_sums
from tests import tiny
from tests.contract.probes import skip_unless_counted
from tests.recipes.test_recipes import COMMON, SMALL, module_of

SUMS, UNSHIFTED = (partial(sample_sums, shift=shift) for shift in (1, 0))
ROWS = tiny.lm_rows(8)


def causal(model="llama", **changes):
    """Return a correct setup for a causal language model, with `changes`."""
    model = tiny.model(model, dtype=torch.float32) if isinstance(model, str) else model
    settings = {"rows": ROWS, "loss": causal_lm_loss, "reducer": SUMS, "metric": language_modeling()}
    return tiny.trainer(model, **(settings | {"eval_rows": tiny.lm_rows(6, 1)} | changes))


def classes(**changes):
    settings = {"loss": classification_loss, "reducer": argmax, "metric": classification(3)}
    rows = {"rows": tiny.class_rows(8), "eval_rows": tiny.class_rows(6, 1)}
    return tiny.trainer(tiny.model("bert_cls"), **(rows | settings | changes))


def seq2seq(**changes):
    settings = {"loss": seq2seq_lm_loss, "reducer": UNSHIFTED, "collator": tiny.pad_seq2seq}
    return causal(tiny.model("t5"), **(settings | changes))


def masked(**changes):
    settings = {"loss": masked_lm_loss, "reducer": UNSHIFTED, "eval_rows": tiny.masked_rows(6)}
    return causal(tiny.model("bert_mlm"), **({"rows": tiny.masked_rows(8)} | settings | changes))


def several_labels(**changes):
    """Return a setup with labels that do not exclude each other."""
    rows = [row | {"labels": torch.tensor([1.0, place % 2, 0])} for place, row in enumerate(tiny.class_rows(8))]
    settings = {"loss": multi_label_loss, "reducer": partial(probabilities, multi_label=True), "metric": multi_label(3)}
    return classes(**({"rows": rows, "eval_rows": rows} | settings | changes))


def tagging(**changes):
    settings = {"loss": token_classification_loss, "reducer": partial(argmax, shift=0), "metric": HITS}
    rows = {"rows": tiny.token_rows(8), "eval_rows": tiny.token_rows(6)}
    return tiny.trainer(tiny.model("bert_token"), **(rows | settings | changes))


def with_hidden_states(**options):
    model = tiny.model("llama")
    source = hidden_states(model)
    return causal(
        model,
        loss=partial(causal_lm_loss, source=source, **options),
        reducer=partial(SUMS, source=source, **options),
        collator=tiny.pad,
    )


def attached():
    training = TrainingMetrics()
    trainer = causal(loss=watch(causal_lm_loss, training, token_accuracy="correct"))
    training.attach(trainer)
    return trainer


def labels_ahead(rows):
    """A collator that has already shifted the labels."""
    batch = tiny.pad(rows)
    return batch | {"labels": torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)}


def ids_of_logits(logits, labels):
    return logits.argmax(-1)


def shifted_accuracy(prediction):
    return {"score": float((prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]).mean())}


def hits_and_rows(predictions, labels):
    return {"hits": (predictions == labels).sum(1), "rows": np.ones(len(labels))}


HITS = Metric(
    statistics=hits_and_rows, score=lambda sums: {"hits": sums["hits"] / sums["rows"]}, higher_is_better={"hits": True}
)


def returning(scores):
    """Return a metric with these scores."""
    return lambda prediction: scores


PLAIN = returning({"score": 1.0})


RIGHT = {
    "causal": causal,
    "accumulation": partial(causal, gradient_accumulation_steps=4),
    "counted unshifted": lambda: causal("gpt2", collator=mask_first_label(tiny.pad)),
    "hidden states": with_hidden_states,
    "classification": classes,
    "masked": masked,
    "several labels per sample": several_labels,
    "tagging": tagging,
    "seq2seq": seq2seq,
    "experts": lambda: causal(tiny.model("mixtral", output_router_logits=True),
        loss=with_aux_loss(causal_lm_loss, "aux_loss", 0.02)),
    "streaming": lambda: causal(metric=build(language_modeling(), num_samples=6), batch_eval_metrics=True),
    "best perplexity": lambda: causal(metric_for_best_model="perplexity", greater_is_better=False),
    "best loss": lambda: causal(metric_for_best_model="loss"),
    "the model's own loss": lambda: causal(loss=None),
    "training alone": lambda: tiny.trainer(tiny.model("llama"), ROWS, causal_lm_loss),
    "evaluation alone": lambda: causal(rows=None),
    "two sets": lambda: causal(eval_rows={"a": ROWS, "b": ROWS}),
    "a dict of labels": lambda: causal(collator=with_extras(WithWeights(), ["token_weights"], shift=1)),
    "intervals": lambda: causal(metric=bootstrap(language_modeling(), n=10)),
    "groups": lambda: classes(metric=by_group(classification(3), ["a", "b"] * 3), metric_for_best_model="accuracy"),
    "one metric per set": lambda: causal(eval_rows={"a": tiny.lm_rows(20), "b": ROWS},
        metric=by_dataset(*(build(language_modeling(), num_samples=number) for number in (8, 20)))),
    "grouped by length": lambda: causal(**tiny.GROUPED),
    "a function, grouped by length": lambda: causal(metric=PLAIN, **tiny.GROUPED),
    "a metric that streams alone": lambda: causal(metric=last_step_metric, batch_eval_metrics=True),
    "a metric of inputs and losses": lambda: causal(metric=inputs_metric, include_for_metrics=["inputs", "loss"],
        per_device_eval_batch_size=3),
    "generation": lambda: seq2seq(reducer=None, metric=PLAIN, trainer_class=transformers.Seq2SeqTrainer,
        arguments_class=transformers.Seq2SeqTrainingArguments, predict_with_generate=True),
    "a metric that shifts": lambda: causal(reducer=ids_of_logits, metric=shifted_accuracy),
    "predicted ids": lambda: causal(reducer=partial(argmax, shift=1), metric=HITS),
    "shifted by the collator": lambda: causal(collator=labels_ahead, loss=partial(causal_lm_loss, shift=0),
        reducer=UNSHIFTED),
    "supervised logits alone": lambda: causal(collator=keep_supervised_logits(tiny.pad)),
    "padded on the left": lambda: causal(collator=tiny.pad_left),
    "watched": attached,
    "an iterable set": lambda: causal(rows=Endless(), max_steps=1),
}  # fmt: skip


class WithWeights:
    def __call__(self, rows):
        batch = tiny.pad(rows)
        return batch | {"token_weights": torch.ones(batch["labels"].shape)}


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize("name", RIGHT)
def test_correct_setups_have_no_problems(name, capsys):
    if name == "a dict of labels":
        skip_unless_counted()
    report = check_trainer(RIGHT[name](), strict=True)
    assert report.problems == ()
    assert capsys.readouterr().out.startswith("check_trainer: no problems\n")


def mean(outputs, labels, num_items_in_batch=None):
    return causal_lm_loss(outputs, labels)


def pad_labels_with_zero(rows):
    batch = tiny.pad(rows)
    return batch | {"labels": batch["labels"].masked_fill(batch["attention_mask"] == 0, 0)}


def ignore_all(rows):
    batch = tiny.pad(rows)
    return batch | {"labels": torch.full_like(batch["labels"], -100)}


def without_labels(rows):
    batch = tiny.pad(rows)
    return {name: batch[name] for name in batch if name != "labels"}


def contrasted(outputs, labels, num_items_in_batch=None):
    return info_nce_loss(outputs, labels, num_items_in_batch, select=lambda found: (found.logits[:, 0],) * 2)


def renamed(rows):
    batch = tiny.pad(rows)
    return {"target" if name == "labels" else name: value for name, value in batch.items()}


def dict_of_labels(rows):
    batch = tiny.pad(rows)
    return batch | {"labels": {"labels": batch["labels"]}}


def last_step_metric(prediction, compute_result):
    return {"score": float(prediction.predictions["nll"].sum())} if compute_result else {}


def inputs_metric(prediction):
    return {"length": float(prediction.inputs.shape[1] + prediction.losses.mean()), "rows": len(prediction.losses)}


class Long(list):
    """A dataset that claims to have a hundred million rows."""

    def __len__(self):
        return 100_000_000


class Wrapped(torch.nn.Module):
    """A model whose outputs are those that `form` makes of the logits."""

    config = types.SimpleNamespace(keys_to_ignore_at_inference=[])

    def __init__(self, form):
        super().__init__()
        self.inner, self.form = tiny.model("llama"), form

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.form(self.inner(input_ids=input_ids, attention_mask=attention_mask).logits)


class WithoutLabelNames(Wrapped):
    def forward(self, **batch):
        batch.pop("labels", None)
        return self.inner(**batch)


def with_cache(logits):
    return {"logits": logits, "past_key_values": (torch.zeros(len(logits), 4),)}


def flat_ids(logits, labels):
    return logits.argmax(-1)[labels != -100]


def one_element(outputs, labels, num_items_in_batch=None):
    return causal_lm_loss(outputs, labels, num_items_in_batch)[None]


# name: (a function that makes the Trainer, the rule that finds the mistake, a part of its message)
MISTAKES = {
    "mean instead of sum / count":
        (lambda: causal(loss=mean, gradient_accumulation_steps=4), "count", "up to 4 times too large"),
    "counted unshifted": (lambda: causal("gpt2", rows=tiny.lm_rows(8, prompt=False)), "count", "mask_first_label"),
    "uncounted dict of labels": (lambda: causal(collator=dict_of_labels), "count", "shift_labels"),
    "labels on padding": (lambda: causal(collator=pad_labels_with_zero), "padding", "are on padding"),
    "every label ignored": (lambda: causal(collator=ignore_all), "labels", "every label"),
    "nothing to count": (
        lambda: causal(collator=without_labels, loss=contrasted, gradient_accumulation_steps=3), "count", "3 times too"
    ),
    "labels under another name": (lambda: causal(collator=renamed, loss=mean), "labels", "target"),
    "loss of shape (1,)": (lambda: causal(loss=one_element), "loss", "shape (1,)"),
    "infinite loss":
        (lambda: causal(loss=lambda *given, **count: causal_lm_loss(*given, **count) * torch.inf), "loss", "inf"),
    "labels out of range": (lambda: causal(tiny.model("llama", vocab_size=32)), "raised", "IndexError"),
    "more classes than logits": (lambda: classes(rows=tiny.class_rows(8, num_labels=9)), "raised", "out of range"),
    "hidden states of another model": (
        lambda: causal(loss=partial(causal_lm_loss, source=hidden_states(tiny.model("llama")))),
        "raised", "saw no forward"
    ),
    "label_smoothing_factor": (lambda: causal(label_smoothing_factor=0.1), "label smoothing", "is ignored"),
    "experts without their aux_loss":
        (lambda: causal(tiny.model("mixtral", output_router_logits=True)), "aux loss", "with_aux_loss"),
    "a loss without a shift": (lambda: causal(loss=masked_lm_loss), "shift", "the loss reads the logit at each label"),
    "a loss of shift 0": (lambda: causal(loss=partial(causal_lm_loss, shift=0)), "shift", "or shift=1"),
    "a loss that shifts twice": (lambda: causal(loss=partial(causal_lm_loss, shift=2)), "shift", "2 before each label"),
    "a reducer without a shift":
        (lambda: causal(reducer=UNSHIFTED), "shift", "the reducer reads the logit at each label"),
    "a reducer that shifts twice": (lambda: causal(reducer=partial(sample_sums, shift=2)), "shift", "2 before"),
    "ids without a shift": (lambda: causal(reducer=partial(argmax, shift=0), metric=HITS), "shift", "shift=1"),
    "hidden states without a shift": (lambda: with_hidden_states(shift=0), "shift", "at each label"),
    "hidden states shifted twice": (lambda: with_hidden_states(shift=2), "shift", "2 before each label"),
    "labels shifted by the collator too": (lambda: causal(collator=labels_ahead), "shift", "leave that to the loss"),
    "the model's own loss, and no shift": (lambda: causal(loss=None, reducer=UNSHIFTED), "shift", "shift=1"),
    "a shift for masked tokens": (lambda: masked(loss=causal_lm_loss), "shift", "masked_lm_loss"),
    "a shift for a decoder with other inputs": (lambda: seq2seq(loss=causal_lm_loss), "shift", "seq2seq_lm_loss"),
    "two shifts": (lambda: tagging(reducer=partial(argmax, shift=1)), "shift", "the same shift"),
    "watched, not attached":
        (lambda: causal(loss=watch(causal_lm_loss, TrainingMetrics(), hits="correct")), "training metrics", "attach("),
    "a term as the loss":
        (lambda: causal(loss=focal), "raised", "focal is a term, an option of a loss: compute_loss_func=partial("),
    "a multi-label term as the loss":
        (lambda: several_labels(loss=asymmetric), "raised", "partial(multi_label_loss, term=asymmetric)"),
    "a regression term as the loss": (lambda: classes(loss=huber), "raised", "partial(regression_loss, term=huber)"),
    "a loss without the count": (lambda: causal(loss=lambda outputs, labels: 0), "raised", "num_items_in_batch=None"),
    "a metric that was not called":
        (lambda: causal(metric=language_modeling), "raised", "compute_metrics=language_modeling("),
    "a classification metric that was not called":
        (lambda: classes(metric=classification), "raised", "compute_metrics=classification("),
    "a softmax over several labels": (
        lambda: several_labels(reducer=probabilities, metric=PLAIN), "probabilities", "multi_label=True"
    ),
    "no decoder inputs": (lambda: seq2seq(collator=tiny.pad), "decoder inputs", "with_decoder_inputs"),
    "a plain tuple":
        (lambda: causal(Wrapped(lambda logits: (logits, logits[:, 0])), loss=lambda *_, **__: torch.ones(())),
        "logits", "ModelOutput"),
    "no logits":
        (lambda: causal(Wrapped(lambda logits: {"logits": None, "hidden": logits})), "logits", "hidden_states(model)"),
    "no label names": (lambda: causal(WithoutLabelNames(None)), "metric runs", "no labels"),
    "wrong label names": (lambda: causal(label_names=["target"]), "metric runs", "never called"),
    "prediction_loss_only": (lambda: causal(prediction_loss_only=True), "metric runs", "remove one"),
    "hidden states kept":
        (lambda: causal(tiny.model("llama", output_hidden_states=True)), "kept outputs", "hidden_states"),
    "a cache kept": (lambda: causal(Wrapped(with_cache)), "kept outputs", "past_key_values"),
    "no shift": (lambda: causal(reducer=sample_sums), "raised", "need a shift"),
    "flattened":
        (lambda: causal(reducer=flat_ids, metric=PLAIN), "reducer", "first dimension"),
    "bool":
        (lambda: causal(reducer=lambda logits, ids: logits.argmax(-1) == ids, metric=PLAIN), "reducer", "torch.bool"),
    "no reducer": (lambda: causal(reducer=None, metric=PLAIN, eval_rows=Long(ROWS)), "memory", "sample_sums"),
    "the metric of another reducer": (lambda: causal(reducer=partial(argmax, shift=1)), "raised", "needs the columns"),
    "an array as a score": (lambda: causal(metric=returning({"per_class": np.zeros(3)})), "scores", "first checkpoint"),
    "a score called loss": (lambda: causal(metric=returning({"loss": 1.0})), "scores", "rename"),
    "a prefix of the Trainer": (lambda: causal(metric=returning({"eval_score": 1.0})), "scores", "rename"),
    "another number of samples in every part":
        (lambda: causal(metric=by_dataset(build(language_modeling(), num_samples=7))), "streaming", "expects 7"),
    "no such best metric": (lambda: causal(metric_for_best_model="f1"), "best model", "is not among the scores"),
    "worst is best": (lambda: causal(metric_for_best_model="perplexity"), "best model", "worst perplexity"),
    "streaming without a length": (lambda: causal(batch_eval_metrics=True), "streaming", "num_samples"),
    "another length": (lambda: causal(metric=build(language_modeling(), num_samples=7)), "streaming", "expects 7"),
    "streaming a metric that needs all rows":
        (lambda: causal(metric=bootstrap(language_modeling()), batch_eval_metrics=True), "streaming", "cannot stream"),
    "grouped by length":
        (lambda: classes(metric=by_group(classification(3), ["a", "b"] * 3), **tiny.GROUPED), "order", "reorders"),
}  # fmt: skip


def test_a_dict_of_labels_that_raises_is_reported_once(monkeypatch, capsys):
    """From Python 3.12 on the Trainer raises an error for a dict of labels; it is reported once."""

    def count(trainer, batches, device):
        raise KeyError(..., slice(1, None))

    monkeypatch.setattr(transformers.Trainer, "_get_num_items_in_batch", count)
    report = check_trainer(causal(collator=dict_of_labels))
    assert [name for name, _ in report.problems] == ["count"]
    report = check_trainer(causal())
    assert ("raised", True) in {(name, "shift_labels" in finding.fix) for name, finding in report.problems}


@pytest.mark.parametrize(("make", "check", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_found(make, check, message, capsys):
    report = check_trainer(make())
    said = [f"{finding.found} -> {finding.fix}" for name, finding in report.problems if name == check]
    assert any(message in text for text in said), report
    assert "\n! " in capsys.readouterr().out
    with pytest.raises(AssertionError, match="problem"):
        check_trainer(make(), strict=True)


def test_a_wrong_shift_of_an_encoder_decoder_is_not_reported_as_a_wrong_count():
    unmasked = tiny.lm_rows(8, prompt=False)
    trainer = seq2seq(
        rows=unmasked, loss=causal_lm_loss, collator=with_decoder_inputs(tiny.pad, tiny.model("t5")), reducer=SUMS
    )
    report = check_trainer(trainer)
    assert [name for name, _ in report.problems] == ["shift", "shift"]
    assert "mask_first_label" not in str(report)


def test_the_cause_is_reported_before_the_errors_it_raises():
    (cause, _), *rest = check_trainer(seq2seq(collator=tiny.pad)).problems
    assert cause == "decoder inputs"
    assert {finding.fix for _, finding in rest} == {"add the decoder inputs first"}


def test_a_shift_is_found_by_negating_logits_which_are_restored():
    trainer = causal()
    kept = []
    trainer.preprocess_logits_for_metrics = lambda logits, labels: kept.append(logits.clone()) or SUMS(logits, labels)
    assert check_trainer(trainer).problems == ()
    first, *others = kept
    assert len(others) == 4
    assert torch.equal(first, others[0])
    assert [int((other != first).any(-1).sum()) for other in others[1:]] == [1, 1, 1]


def problems(trainer, check):
    return [finding.found for name, finding in check_trainer(trainer).problems if name == check]


def test_an_unsupported_release_is_a_problem(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.3.0")
    assert "5.3.0" in problems(causal(), "releases")[0]


def test_another_module_of_the_same_name_is_a_problem(monkeypatch):
    monkeypatch.setitem(sys.modules, "metrics", types.ModuleType("metrics"))
    assert "metrics" in problems(classes(metric=None), "packages")[0]


def test_settings_of_several_processes(monkeypatch):
    trainer = causal(average_tokens_across_devices=False)
    monkeypatch.setattr(type(trainer.args), "world_size", property(lambda args: 2))
    said = "; ".join(problems(trainer, "processes"))
    assert "ddp_find_unused_parameters" in said
    assert "its own count" in said


def test_liger_which_removes_the_logits_and_an_iterator_are_problems():
    trainer, rows = causal(), iter(ROWS)
    trainer.args.use_liger_kernel = True
    assert "use_liger_kernel" in problems(trainer, "logits")[0]
    trainer.train_dataset = rows
    assert "iterator" in problems(trainer, "raised")[0]
    assert len(list(rows)) == len(ROWS)


def test_supported_releases_are_those_of_pyproject():
    project = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    (line,) = (line for line in project.splitlines() if line.strip().startswith('"transformers'))
    assert line.strip().strip('",').removeprefix("transformers") == checks.SUPPORTED


class Drawing:
    """A collator that draws from every random number generator."""

    def __call__(self, rows):
        torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        return tiny.pad(rows)


def state(trainer):
    return {
        "model": {name: value.clone() for name, value in trainer.model.state_dict().items()},
        "modes": [module.training for module in trainer.model.modules()],
        "attributes": {name: id(value) for name, value in vars(trainer).items()},
        "log": list(trainer.state.log_history),
        "random": [torch.get_rng_state(), random.getstate(), np.random.get_state()],  # noqa: NPY002
        "loaders": len(trainer.accelerator._dataloaders),
        "gradients": [parameter.grad for parameter in trainer.model.parameters()],
    }


@pytest.mark.parametrize("loss", [causal_lm_loss, one_element, mean])
def test_nothing_is_changed(loss):
    trainer = causal(loss=loss, collator=Drawing(), metric=build(language_modeling(), num_samples=6))
    trainer.model.train()
    trainer.model.lm_head.eval()
    before = state(trainer)
    check_trainer(trainer)
    after = state(trainer)
    for name in ("modes", "attributes", "log", "loaders", "gradients"):
        assert after[name] == before[name]
    assert all(torch.equal(after["model"][name], value) for name, value in before["model"].items())
    assert torch.equal(after["random"][0], before["random"][0])
    assert after["random"][1] == before["random"][1]
    assert all(np.array_equal(a, b) for a, b in zip(after["random"][2], before["random"][2], strict=True))


def test_training_and_evaluation_are_the_same_after_a_check():
    checked, other = causal(), causal()
    check_trainer(checked)
    assert torch.equal(tiny.gradient_of(checked), tiny.gradient_of(other))
    assert checked.evaluate()["eval_perplexity"] == other.evaluate()["eval_perplexity"]
    assert check_trainer(checked).problems == ()


def two_ranks():
    trainer = causal(per_device_train_batch_size=4, ddp_find_unused_parameters=False, loss=mean)
    said = [finding.found for _, finding in check_trainer(trainer).problems]
    trainer.train()
    return said


@pytest.mark.distributed
def test_two_processes():
    for said in tiny.run_distributed(two_ranks):
        (problem,) = said
        assert "up to 2 times too large" in problem


def test_a_check_makes_one_forward_for_training_and_one_for_evaluation():
    trainer = causal()
    with mock.patch.object(type(trainer.model), "forward", autospec=True, side_effect=type(trainer.model).forward) as f:
        check_trainer(trainer)
    assert f.call_count == 2


@pytest.mark.parametrize("name", sorted(SMALL))
def test_recipes_have_no_problems(name, monkeypatch, tmp_path):
    class StoppedError(Exception):
        pass

    def check_and_stop(trainer, *given, **options):
        raise StoppedError(check_trainer(trainer).problems)

    monkeypatch.setattr(transformers.Trainer, "train", check_and_stop)
    monkeypatch.setattr(transformers.Trainer, "evaluate", lambda *given, **options: check_and_stop(*given))
    if name in {"distillation", "dpo"}:
        skip_unless_counted()
    with pytest.raises(StoppedError) as stopped:
        module_of(name).main([*COMMON, *SMALL[name].split(), "--output_dir", str(tmp_path)])
    assert stopped.value.args == ((),)
