"""The stock Trainer over `language_modeling`, in every mode, against a loop over the tokens."""

import json
import math
from pathlib import Path

import pytest
import torch

from metrics import best_model_kwargs, build, language_modeling
from tests import tiny

from .evaluations import COUNTS

TOKENS = tiny.lm_rows(10, seed=5)
MODES = {
    "concatenated": {},
    "lists": {"eval_do_concat_batches": False},
    "accumulated": {"eval_accumulation_steps": 1},
    "accumulated lists": {"eval_accumulation_steps": 2, "eval_do_concat_batches": False},
    "streaming": {"batch_eval_metrics": True},
}


def sums(logits, labels):
    """What `sample_sums(shift=1)` returns, written plainly."""
    log_probs, targets = logits[:, :-1].log_softmax(-1), labels[:, 1:]
    scored = targets != tiny.IGNORED
    nll = -log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0].where(scored, 0)
    right = (log_probs.argmax(-1) == targets) & scored
    columns = {
        "nll": nll.sum(1),
        "tokens": scored.sum(1),
        "correct": right.sum(1),
        "all_correct": (right | ~scored).all(1),
    }
    return {name: column.double() for name, column in columns.items()}


def loop(model, rows):
    """Perplexity and counts, a sample and a token at a time, without padding."""
    nll, hits, tokens = [], 0, 0
    for row in rows:
        logits = model(input_ids=row["input_ids"][None]).logits[0].double()
        for before, label in zip(logits, row["labels"][1:].tolist(), strict=False):
            if label != tiny.IGNORED:
                nll.append(float(before.logsumexp(0) - before[label]))
                hits += int(before.argmax()) == label
                tokens += 1
    mean = math.fsum(nll) / tokens
    return {
        "nll_loss": mean,
        "perplexity": math.exp(mean),
        "token_accuracy": hits / tokens,
        "tokens": float(tokens),
        "samples": float(len(rows)),
    }


@pytest.fixture(scope="module")
def model():
    return tiny.model("llama").eval()


@pytest.fixture(scope="module")
def expected(model):
    with torch.no_grad():
        return loop(model, TOKENS)


def evaluator(model, **options):
    metric = build(language_modeling(), num_samples=len(TOKENS))
    return tiny.trainer(model, eval_rows=TOKENS, reducer=sums, metric=metric, **options)


def assert_scores(result, expected, rel=1e-12):
    scores = {key: result[f"eval_{key}"] for key in expected}
    assert scores == pytest.approx(expected, rel=rel, abs=0)
    assert all(scores[name] == expected[name] for name in COUNTS)
    assert all(type(value) is float for value in scores.values())


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_and_batch_size_equals_the_loop(model, expected, mode, batch):
    trainer = evaluator(model, per_device_eval_batch_size=batch, **MODES[mode])
    assert_scores(trainer.evaluate(), expected)
    assert_scores(trainer.evaluate(), expected)


@pytest.mark.parametrize("mode", MODES)
def test_in_float32(expected, mode):
    trainer = evaluator(tiny.model("llama", dtype=torch.float32), per_device_eval_batch_size=3, **MODES[mode])
    assert_scores(trainer.evaluate(), expected, rel=1e-6)


def test_the_trainers_own_mean_is_another_number(model, expected):
    losses = [evaluator(model, per_device_eval_batch_size=batch).evaluate()["eval_loss"] for batch in (3, 8)]
    assert all(abs(loss - expected["nll_loss"]) > 1e-4 for loss in losses)


class BrokeOffError(Exception):
    pass


def test_streaming_after_an_evaluation_that_broke_off(model, expected):
    trainer = evaluator(model, per_device_eval_batch_size=3, batch_eval_metrics=True)
    calls = []

    def broken(logits, labels):
        calls.append(len(labels))
        if len(calls) == 3:
            raise BrokeOffError
        return sums(logits, labels)

    trainer.preprocess_logits_for_metrics = broken
    with pytest.raises(BrokeOffError):
        trainer.evaluate()
    trainer.preprocess_logits_for_metrics = sums
    with pytest.raises(ValueError, match="broke off"):
        trainer.evaluate()
    assert_scores(trainer.evaluate(), expected)


def test_streaming_without_the_count_is_refused(model):
    trainer = tiny.trainer(
        model,
        eval_rows=TOKENS,
        reducer=sums,
        metric=language_modeling(),
        batch_eval_metrics=True,
        per_device_eval_batch_size=4,
    )
    with pytest.raises(ValueError, match="num_samples"):
        trainer.evaluate()


@pytest.mark.parametrize("mode", MODES)
def test_predict_names_the_same_scores(model, expected, mode):
    result = evaluator(model, per_device_eval_batch_size=3, **MODES[mode]).predict(TOKENS).metrics
    assert result["test_perplexity"] == pytest.approx(expected["perplexity"], rel=1e-12)


def test_without_a_reducer_the_message_names_it(model):
    trainer = tiny.trainer(model, eval_rows=TOKENS, metric=language_modeling())
    with pytest.raises(ValueError, match=r"hold one array \(10, \d+, 64\).*sample_sums"):
        trainer.evaluate()


@pytest.mark.parametrize(("arguments", "kept"), [(best_model_kwargs("perplexity"), min), ({}, max)])
def test_the_best_checkpoint_is_kept_and_its_state_written(arguments, kept):
    arguments = arguments or {"metric_for_best_model": "perplexity"}  # the Trainer's guess: greater is better
    trainer = tiny.trainer(
        tiny.model("llama", seed=1),
        tiny.lm_rows(8),
        reducer=sums,
        metric=language_modeling(),
        eval_rows=TOKENS,
        learning_rate=0.1,
        num_train_epochs=3,
        save_strategy="epoch",
        eval_strategy="epoch",
        load_best_model_at_end=True,
        **arguments,
    )
    trainer.train()
    seen = tiny.logged(trainer, "eval_perplexity")
    assert len(set(seen)) == 3
    assert trainer.state.best_metric == kept(seen)
    checkpoint = max(Path(trainer.args.output_dir).glob("checkpoint-*"))
    written = json.loads((checkpoint / "trainer_state.json").read_text())
    assert [entry["eval_perplexity"] for entry in written["log_history"] if "eval_perplexity" in entry] == seen


def two_ranks():
    model = tiny.model("llama").eval()
    return {
        mode: evaluator(model, per_device_eval_batch_size=3, **options).evaluate() for mode, options in MODES.items()
    }


def test_two_processes_equal_the_loop(expected):
    for results in tiny.run_distributed(two_ranks):
        for result in results.values():
            assert_scores(result, expected)
