"""Loss, reducer and metric in one stock Trainer, on one process and on two: training, then every way to evaluate.

Scores are compared with a loop over tokens, parameters with a plain training loop. One run of `facts` under torchrun
feeds the tests of two ranks.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lossfns import causal_lm_loss, masked_lm_loss, seq2seq_lm_loss, token_statistics
from metrics import build, language_modeling
from reducers import argmax, combine, sample_sums
from tests import oracle, tiny

TRAIN = tiny.lm_rows(8)
EVAL = tiny.lm_rows(11, seed=5)
SUMS = partial(sample_sums, top_k=(2, 5), entropy=True)
MODES: dict[str, dict[str, Any]] = {
    "concatenated": {},
    "lists": {"eval_do_concat_batches": False},
    "accumulation": {"eval_accumulation_steps": 1},
    "streaming": {"batch_eval_metrics": True},
}


@torch.no_grad()
def by_loop(model, rows=EVAL, *, shift=1, collator=tiny.pad):
    """Every score from one token after the other, row by row and so without padding, in float64."""
    sums = dict.fromkeys(("nll", "entropy", "correct", "top_2", "top_5", "tokens", "whole", "sequences"), 0.0)
    for row in rows:
        batch = collator([row])
        labels = batch.pop("labels")
        logits = model.eval()(**batch).logits
        ranks = []
        for place, at in oracle.pairs(logits, labels, shift=shift):
            x, y = logits[at].double(), int(labels[place])
            ranks.append(oracle.ranking(x).index(y))
            here = oracle.measure(x, y)
            sums["nll"] -= here["log_prob"].item()
            sums["entropy"] += here["entropy"].item()
        sums["tokens"] += len(ranks)
        for name, k in (("correct", 1), ("top_2", 2), ("top_5", 5)):
            sums[name] += sum(rank < k for rank in ranks)
        sums["sequences"] += bool(ranks)
        sums["whole"] += bool(ranks) and not any(ranks)
    tokens = sums["tokens"]
    return {
        "nll_loss": sums["nll"] / tokens,
        "perplexity": math.exp(sums["nll"] / tokens),
        "token_accuracy": sums["correct"] / tokens,
        "top_2_accuracy": sums["top_2"] / tokens,
        "top_5_accuracy": sums["top_5"] / tokens,
        "entropy": sums["entropy"] / tokens,
        "sequence_accuracy": sums["whole"] / sums["sequences"],
        "tokens": tokens,
        "samples": float(len(rows)),
    }


def scores_of(trainer):
    """What `evaluate` returns, without its prefix."""
    return {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}


def evaluator(model, rows=EVAL, *, shift=1, loss=causal_lm_loss, reducer=None, **settings):
    reducer = partial(SUMS, shift=shift) if reducer is None else reducer
    metric = build(language_modeling(), num_samples=len(rows))
    return tiny.trainer(model, None, loss, reducer=reducer, metric=metric, eval_rows=rows, **settings)


def check(found, true, tolerance=1e-12):
    """Counts are equal, everything else to `tolerance`."""
    for name in ("tokens", "samples"):
        assert found[name] == true[name]
    assert {name: found[name] for name in true} == pytest.approx(true, rel=tolerance, abs=0)


# --- perplexity ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def truth():
    return {dtype: by_loop(tiny.model("gpt2", dtype=dtype)) for dtype in (torch.float64, torch.float32)}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("mode", MODES)
def test_scores_depend_on_nothing_but_the_tokens(truth, mode, size, dtype, tolerance):
    trainer = evaluator(tiny.model("gpt2", dtype=dtype), per_device_eval_batch_size=size, **MODES[mode])
    check(scores_of(trainer), truth[dtype], tolerance)
    check(scores_of(trainer), truth[dtype], tolerance)


def test_the_exponential_of_the_trainers_loss_is_something_else(truth):
    found = [
        math.exp(scores_of(evaluator(tiny.model("gpt2"), per_device_eval_batch_size=size))["loss"])
        for size in (1, 3, 8)
    ]
    assert all(value != pytest.approx(truth[torch.float64]["perplexity"], rel=1e-3) for value in found)
    assert found[0] != pytest.approx(found[1], rel=1e-3)


def mean_of_the_row(logits, labels):
    sums = SUMS(logits, labels, shift=1)
    return sums | {"nll": sums["nll"] / sums["tokens"]}


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(partial(SUMS, shift=0), id="no shift"),
        pytest.param(lambda logits, labels: SUMS(logits.bfloat16(), labels, shift=1), id="rounded"),
        pytest.param(mean_of_the_row, id="mean of the row"),
    ],
)
def test_wrong_reducers_are_found(truth, broken):
    trainer = evaluator(tiny.model("gpt2"), reducer=broken, per_device_eval_batch_size=3)
    with pytest.raises(AssertionError):
        check(scores_of(trainer), truth[torch.float64])


def test_after_an_interruption_the_next_evaluation_is_right_or_raises(truth):
    """The Trainer does not say that an evaluation starts; a metric that only adds would count rows twice."""
    trainer = evaluator(tiny.model("gpt2"), per_device_eval_batch_size=3, **MODES["streaming"])
    sound, calls = trainer.preprocess_logits_for_metrics, []

    def interrupted(logits, labels):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return sound(logits, labels)

    trainer.preprocess_logits_for_metrics = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate()
    with pytest.raises(ValueError, match="expected num_samples=11 rows"):
        trainer.evaluate()
    check(scores_of(trainer), truth[torch.float64])


@pytest.mark.parametrize("mode", ["concatenated", "lists", "accumulation"])
def test_predictions_beside_the_scores(truth, mode):
    """Ids for `predict` and sums for the metric in one pass; ids stand where the labels stand."""
    reducer = combine(ids=partial(argmax, shift=1), sums=partial(SUMS, shift=1))
    trainer = evaluator(tiny.model("gpt2"), reducer=reducer, per_device_eval_batch_size=3, **MODES[mode])
    found = trainer.predict(EVAL)
    check({name.removeprefix("test_"): value for name, value in found.metrics.items()}, truth[torch.float64])
    batches = found.predictions["ids"] if mode != "lists" else [part["ids"] for part in found.predictions]
    rows = [row for batch in batches for row in batch] if mode == "lists" else list(batches)
    assert len(rows) == len(EVAL)
    model = tiny.model("gpt2").eval()
    for ids, row in zip(rows, EVAL, strict=True):
        logits = model(input_ids=row["input_ids"][None]).logits[0]
        expected = [oracle.ranking(x.detach())[0] for x in logits[:-1]]
        assert ids[1 : len(logits)].tolist() == expected
        assert ids[0] == tiny.IGNORED


@pytest.mark.parametrize(
    ("name", "config", "rows", "options"),
    [
        ("llama", {}, EVAL, {}),
        ("qwen2", {}, EVAL, {}),
        ("mixtral", {"output_router_logits": True}, EVAL, {}),
        ("bert_mlm", {}, tiny.masked_rows(11, seed=5), {"shift": 0, "loss": masked_lm_loss}),
        ("t5", {}, EVAL, {"shift": 0, "loss": seq2seq_lm_loss, "collator": tiny.pad_seq2seq}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("mode", ["concatenated", "streaming"])
def test_families(name, config, rows, options, mode):
    model = tiny.model(name, **config)
    truth = by_loop(model, rows, **{key: value for key, value in options.items() if key != "loss"})
    check(scores_of(evaluator(model, rows, per_device_eval_batch_size=3, **options, **MODES[mode])), truth)


def test_training_and_evaluation_together():
    """Three steps under accumulation, an evaluation after each; the last is that of the trained model."""
    trainer = tiny.trainer(
        tiny.model("llama"),
        TRAIN,
        partial(causal_lm_loss, overwrite_logits=True),
        reducer=partial(SUMS, shift=1),
        metric=language_modeling(),
        eval_rows=EVAL,
        eval_strategy="epoch",
        num_train_epochs=oracle.STEPS,
        learning_rate=oracle.LEARNING_RATE,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
    )
    trainer.train()
    model = tiny.model("llama")
    for name, value in oracle.parameters_by_hand(model, TRAIN).items():
        torch.testing.assert_close(trainer.model.get_parameter(name).double(), value, rtol=0, atol=1e-10)
    seen = tiny.logged(trainer, "eval_perplexity")
    assert len(seen) == oracle.STEPS
    assert seen[-1] == pytest.approx(by_loop(model)["perplexity"], rel=1e-9)


# --- two ranks -------------------------------------------------------------------------------------------------------

HALF_IGNORED = [
    row if place % 2 else row | {"labels": torch.full_like(row["labels"], tiny.IGNORED)}
    for place, row in enumerate(TRAIN)
]


def facts():
    """Everything that the tests below look at, as JSON."""
    return {
        "training": {name: distance(*case) for name, case in TRAINING.items()},
        "no_sync": no_sync(),
        "dtensor": dtensor(),
        "scores": {
            mode: scores_of(evaluator(tiny.model("gpt2"), per_device_eval_batch_size=2, **settings))
            for mode, settings in MODES.items()
        },
        "ids": predicted(),
    }


def mean_of_the_rank(outputs, labels, num_items_in_batch=None):
    return causal_lm_loss(outputs, labels)


TRAINING = {
    "one micro-batch": (TRAIN, causal_lm_loss, 1),
    "two micro-batches": (TRAIN, causal_lm_loss, 2),
    "overwritten logits": (TRAIN, partial(causal_lm_loss, overwrite_logits=True), 2),
    "ranks without labels": (HALF_IGNORED, causal_lm_loss, 4),
    "broken: the mean of the rank": (TRAIN, mean_of_the_rank, 2),
}


def distance(rows, loss, accumulation):
    """The largest difference between the parameters after three steps on two ranks and those of a plain loop."""
    settings = {
        "num_train_epochs": oracle.STEPS,
        "learning_rate": oracle.LEARNING_RATE,
        "per_device_train_batch_size": 4 // accumulation,
        "gradient_accumulation_steps": accumulation,
    }
    found = tiny.parameters_after(tiny.trainer(tiny.model("llama"), rows, loss, **settings))
    expected = oracle.parameters_by_hand(tiny.model("llama"), rows)
    return max((found[name] - value).abs().max().item() for name, value in expected.items())


def no_sync():
    """Two micro-batches in DDP, the first without communication: the largest difference from one process."""
    hidden = torch.randn(2, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20).view(2, 2, 5) % 7
    head = torch.nn.Linear(4, 7, dtype=torch.float64)
    torch.nn.init.ones_(head.weight)
    torch.nn.init.zeros_(head.bias)
    model, rank = torch.nn.parallel.DistributedDataParallel(head), dist.get_rank()
    with model.no_sync():
        causal_lm_loss(model(hidden[:1, rank]), labels[:1, rank], 8).backward()
    causal_lm_loss(model(hidden[1:, rank]), labels[1:, rank], 8).backward()
    logits = head(hidden)
    log_prob = oracle.statistics(logits.flatten(0, 1), labels.flatten(0, 1), ("log_prob",), shift=1)["log_prob"]
    (expected,) = torch.autograd.grad(-log_prob.sum() / 16, head.weight)
    return (head.weight.grad - expected).abs().max().item()


def dtensor():
    """What the functions say to logits that are spread over ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    logits = distribute_tensor(torch.zeros(2, 3, 8), init_device_mesh("cpu", (2,)), [Shard(2)])
    labels, said = torch.zeros(2, 3, dtype=torch.long), []
    for function in (causal_lm_loss, token_statistics, partial(argmax, shift=1)):
        try:
            function(logits, labels)
        except TypeError as error:
            said.append(str(error))
    return said


def predicted():
    reducer = combine(ids=partial(argmax, shift=1), sums=partial(SUMS, shift=1))
    found = evaluator(tiny.model("gpt2"), reducer=reducer, per_device_eval_batch_size=2).predict(EVAL)
    return found.predictions["ids"].tolist()


@pytest.fixture(scope="module")
def ranks():
    return tiny.run_distributed(facts)


@pytest.mark.distributed
@pytest.mark.parametrize("name", TRAINING)
def test_two_ranks_train_as_one(ranks, name):
    for rank in ranks:
        if name.startswith("broken"):
            assert rank["training"][name] > 1e-4
        else:
            assert rank["training"][name] < 1e-12


@pytest.mark.distributed
def test_accumulation_without_communication(ranks):
    assert all(rank["no_sync"] < 1e-14 for rank in ranks)


@pytest.mark.distributed
def test_spread_logits_are_refused(ranks):
    for rank in ranks:
        assert len(rank["dtensor"]) == 3
        assert all("got a DTensor: call full_tensor()" in said for said in rank["dtensor"])


@pytest.mark.distributed
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_score_as_one(ranks, truth, mode):
    for rank in ranks:
        check(rank["scores"][mode], truth[torch.float64])


@pytest.mark.distributed
def test_two_ranks_predict_as_one(ranks):
    """Padding across ranks only adds columns."""
    single = predicted()
    for rank in ranks:
        assert len(rank["ids"]) == len(single)
        for found, expected, row in zip(rank["ids"], single, EVAL, strict=True):
            length = len(row["labels"])
            assert found[:length] == expected[:length]
