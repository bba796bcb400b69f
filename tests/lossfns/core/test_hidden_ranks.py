"""Hidden states on two gloo ranks: one run of `facts` under torchrun feeds every test."""

from functools import partial
from typing import Any

import pytest
import torch

from lossfns import causal_lm_loss, hidden_states
from metrics import build, language_modeling
from reducers import argmax, combine, sample_sums
from tests import tiny
from tests.contract.probes import summed
from tests.lossfns.core.trained import ROWS, lora

pytestmark = pytest.mark.distributed

EVAL_ROWS = sorted(tiny.lm_rows(9), key=lambda row: len(row["labels"]))  # ranks get other lengths, and are padded


class Stream(torch.utils.data.IterableDataset):
    """Rows of one length, which dispatching can concatenate."""

    def __iter__(self):
        return iter([{name: values[:4] for name, values in row.items()} for row in ROWS])


WITHOUT_FSDP = "FSDP2 runs on a CPU from torch 2.7 on"

# --- run on every rank -----------------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    found = {name: difference(*case) for name, case in TRAINING.items()}
    found["dispatched"] = difference(partial(tiny.model, "llama"), {"max_steps": 3}, Stream)
    found["evaluation"] = evaluation()
    found["sharded"] = sharded()
    return found


HALF = {"per_device_train_batch_size": 4}
TRAINING = {
    "plain": (partial(tiny.model, "llama"), HALF),
    "tied": (partial(tiny.model, "gemma2", tie_word_embeddings=True), HALF),
    "unused parameters searched": (partial(tiny.model, "llama"), HALF | {"ddp_find_unused_parameters": True}),
    "not searched": (partial(tiny.model, "llama"), HALF | {"ddp_find_unused_parameters": False}),
    "accumulation": (
        partial(tiny.model, "llama"),
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ),
    "adapter on the head": (lambda: lora(tiny.model("llama"), "q_proj", "lm_head"), HALF),
}


def difference(make, settings, rows=lambda: ROWS) -> float:
    """The largest one between parameters trained by hidden states and by logits, both on two ranks."""
    expected = tiny.parameters_after(tiny.trainer(make(), rows(), summed, **settings))
    model = make()
    loss = partial(causal_lm_loss, source=hidden_states(model))
    found = tiny.parameters_after(tiny.trainer(model, rows(), loss, **settings))
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


def evaluation() -> list[Any]:
    """Ids and scores by hidden states, by hidden states streaming, and by logits."""
    return [evaluated(True, False), evaluated(True, True), evaluated(False, False)]


def evaluated(by_hidden: bool, streaming: bool) -> list[Any]:
    model = tiny.model("cohere")
    source = {"source": hidden_states(model)} if by_hidden else {}
    trainer = tiny.trainer(
        model,
        None,
        partial(causal_lm_loss, **source),
        reducer=combine(ids=partial(argmax, shift=1, **source), sums=partial(sample_sums, shift=1, **source)),
        metric=build(language_modeling(), num_samples=len(EVAL_ROWS)),
        eval_rows=EVAL_ROWS,
        per_device_eval_batch_size=2,
        batch_eval_metrics=streaming,
    )
    scores = trainer.evaluate()
    ids = None if streaming else trainer.predict(EVAL_ROWS).predictions["ids"].tolist()
    return [ids, {name: scores[name] for name in ("eval_nll_loss", "eval_token_accuracy", "eval_tokens")}]


def sharded() -> dict[str, str]:
    """The messages for heads that FSDP2 cuts up again after forward, or alone; one it keeps whole is read."""
    return {
        "again": refusal(None, reshard_after_forward=True),
        "alone": refusal(False),
        "alone, again": refusal(True),
        "whole": refusal(None, reshard_after_forward=False),
        "whole by default": refusal(None),
    }


def refusal(head: bool | None, **options: bool) -> str:
    from torch.distributed.fsdp import fully_shard

    if not hasattr(torch.cpu.Stream, "record_event"):
        return WITHOUT_FSDP
    model = tiny.model("llama", dtype=torch.float32)
    if head is not None:
        fully_shard(model.lm_head, reshard_after_forward=head)
    fully_shard(model, **options)
    source = hidden_states(model)
    batch = tiny.pad(ROWS[:4])
    labels = batch.pop("labels")
    outputs = model(**batch)
    try:
        causal_lm_loss(outputs, labels, source=source)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks():
    return tiny.run_distributed(facts)


@pytest.mark.parametrize("case", [*TRAINING, "dispatched"])
def test_training(ranks, case):
    assert [rank[case] for rank in ranks] == pytest.approx([0, 0], abs=1e-12)


def test_evaluation(ranks):
    """Labels are padded across ranks before they meet the hidden states of their own rank, which are not."""
    for rank in ranks:
        (ids, scores), (_, streamed), (true_ids, true_scores) = rank["evaluation"]
        assert len(ids) == len(true_ids) == len(EVAL_ROWS)
        for row, *pair in zip(EVAL_ROWS, ids, true_ids, strict=True):  # what follows a row's end belongs to no label
            assert pair[0][: len(row["labels"])] == pair[1][: len(row["labels"])]
        assert scores == pytest.approx(true_scores, abs=1e-12)
        assert streamed == pytest.approx(true_scores, abs=1e-12)
        assert scores["eval_tokens"] == tiny.count(EVAL_ROWS, shift=1)


def test_a_sharded_head(ranks):
    if ranks[0]["sharded"]["whole"] == WITHOUT_FSDP:
        pytest.skip(WITHOUT_FSDP)
    for rank in ranks:
        for case, said in rank["sharded"].items():
            if case.startswith("whole"):
                assert said == "nothing was refused"
            else:
                assert "Linear is sharded (FSDP, ZeRO-3)" in said.replace("FSDPLinear", "Linear"), case
