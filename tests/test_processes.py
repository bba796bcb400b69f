"""Two and three processes, and two replicas, train and evaluate as one process does that sees every row.

They take minutes, so `make test` leaves them out and `make test-distributed` runs them. One run of `facts` under
torchrun provides the numbers for the tests of two or three processes. What a test records is shown in
`benchmarks/RESULTS.md`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lossfns import causal_lm_loss, hidden_states
from tests import oracle, tiny
from tests.lossfns.core.trained import lora
from tests.test_end_to_end import EVAL, MODES, by_loop, check, evaluator, scores_of

pytestmark = [pytest.mark.distributed, pytest.mark.heavy, pytest.mark.timeout(1800)]

IGNORING_RANK = 1
BROKEN = "broken: "


# --- one process -----------------------------------------------------------------------------------------------------


def rows_for(world: int, *, ignored: bool = False) -> list[tiny.Row]:
    """Return rows for three steps of two rows per process, minus one row; one rank has no labels if `ignored`."""
    rows = tiny.lm_rows(6 * world - 1)
    silent = [ignored and place // 2 % world == IGNORING_RANK for place in range(len(rows))]
    return [without_labels(row) if mute else row for row, mute in zip(rows, silent, strict=True)]


def without_labels(row: tiny.Row) -> tiny.Row:
    return row | {"labels": torch.full_like(row["labels"], tiny.IGNORED)}


def by_hand(model: torch.nn.Module, rows: list[tiny.Row], window: int) -> dict[str, torch.Tensor]:
    """Return the parameters after one plain step per `window` rows, in order, computed by torch alone."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=oracle.LEARNING_RATE)
    for first in range(0, len(rows), window):
        batch = tiny.pad(rows[first : first + window])
        labels = batch.pop("labels")
        logits = model(**batch).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return tiny.parameters(model)


# --- run on every rank -----------------------------------------------------------------------------------------------


def mean_of_the_process(outputs, labels, num_items_in_batch=None):
    return causal_lm_loss(outputs, labels)


def world_counted_twice(outputs, labels, num_items_in_batch=None):
    return causal_lm_loss(outputs, labels, num_items_in_batch) * dist.get_world_size()


def count_of_a_replica(outputs, labels, num_items_in_batch=None):
    return causal_lm_loss(outputs, labels, num_items_in_batch[0])


# GPT-2 computes in its own dtype throughout. The norms of Llama are float32, and their rounding would hide 1e-8.
gpt2 = partial(tiny.model, "gpt2", tie_word_embeddings=False)
TWO_ROWS = {"per_device_train_batch_size": 2, "accelerator_config": {"even_batches": False}}
ACCUMULATED = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
TRAINING: dict[str, tuple[Callable[[], torch.nn.Module], Any, dict[str, Any], bool]] = {
    "uneven last batch": (gpt2, causal_lm_loss, TWO_ROWS, False),
    "uneven last batch, accumulated": (gpt2, causal_lm_loss, ACCUMULATED, False),
    "one process with every label ignored": (gpt2, causal_lm_loss, TWO_ROWS, True),
    "over the logits": (gpt2, partial(causal_lm_loss, overwrite_logits=True), TWO_ROWS, False),
    "hidden states": (gpt2, hidden_states, TWO_ROWS, False),
    "hidden states, one process with every label ignored": (gpt2, hidden_states, TWO_ROWS, True),
    "gradient checkpointing": (gpt2, causal_lm_loss, TWO_ROWS | CHECKPOINTED, False),
    "gradient checkpointing, hidden states": (gpt2, hidden_states, TWO_ROWS | CHECKPOINTED, False),
    "PEFT": (lambda: lora(gpt2(), "c_attn"), causal_lm_loss, TWO_ROWS, False),
    "PEFT on the head, hidden states": (lambda: lora(gpt2(), "c_attn", "lm_head"), hidden_states, TWO_ROWS, False),
    "torch_compile": (gpt2, causal_lm_loss, TWO_ROWS | {"torch_compile": True}, False),
    "torch_compile (aot_eager), hidden states": (
        gpt2,
        hidden_states,
        TWO_ROWS | {"torch_compile": True, "torch_compile_backend": "aot_eager"},  # the other compiles for minutes
        False,
    ),
    BROKEN + "the mean of the process, the others forgotten": (gpt2, mean_of_the_process, TWO_ROWS, False),
    BROKEN + "the world size counted twice": (gpt2, world_counted_twice, TWO_ROWS, True),
}


def facts() -> dict[str, Any]:
    """Return all numbers that the tests below check, as JSON."""
    world = tiny.arguments().world_size  # the first arguments start the processes' group
    return {
        "training": {name: distance(world, *case) for name, case in TRAINING.items()},
        "scores": {
            mode: scores_of(evaluator(gpt2(), per_device_eval_batch_size=2, **settings))
            for mode, settings in MODES.items()
        },
        "without labels": scores_of(evaluator(gpt2(), ignored_in_evaluation(world), per_device_eval_batch_size=2)),
        "fsdp": {name: run() for name, run in FSDP.items()},
    }


def distance(world, make, loss, settings, ignored) -> float:
    """Return the largest difference between the parameters after three steps and those of one process."""
    rows = rows_for(world, ignored=ignored)
    seen = rows if "accelerator_config" in settings else [*rows, rows[0]]  # accelerate fills up with the first rows
    expected = by_hand(make(), seen, 2 * world)
    model = make()
    if loss is hidden_states:
        loss = partial(causal_lm_loss, source=hidden_states(model))
    trainer = tiny.trainer(model, rows, loss, learning_rate=oracle.LEARNING_RATE, **settings)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    trainer.train()
    torch._dynamo.reset()
    found = tiny.parameters(getattr(trainer.model, "_orig_mod", trainer.model))
    return max((found[name] - value).abs().max().item() for name, value in expected.items())


def ignored_in_evaluation(world):
    """Return `EVAL`, where one process gets no label in any batch of two rows."""
    return [without_labels(row) if place // 2 % world == IGNORING_RANK else row for place, row in enumerate(EVAL)]


def fsdp(loss, *, accumulation: int = 1, checkpointed: bool = False, factor: int | None = None) -> float:
    """Return the largest difference from one process after three steps of a model that FSDP2 shards.

    The Trainer starts FSDP only on an accelerator, so this repeats what it does: it passes the count of all processes
    and multiplies the loss by their number (`factor`), because the gradients are averaged.
    """
    from torch.distributed.fsdp import fully_shard

    world, rank = dist.get_world_size(), dist.get_rank()
    rows = rows_for(world)
    model = gpt2().train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.transformer.h:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=False)
    if loss is hidden_states:
        loss = partial(causal_lm_loss, source=hidden_states(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=oracle.LEARNING_RATE)
    for first in range(0, len(rows), 2 * world):
        window = rows[first : first + 2 * world]
        mine = window[2 * rank : 2 * rank + 2]
        parts = [mine[place::accumulation] or [without_labels(mine[0])] for place in range(accumulation)]
        for place, part in enumerate(parts):
            model.set_requires_gradient_sync(place == accumulation - 1)
            batch = tiny.pad(part)
            labels = batch.pop("labels")
            value = loss(model(**batch), labels, tiny.count(window, shift=1))
            (value * (factor or world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = by_hand(gpt2(), rows, 2 * world)
    found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    return max((found[name] - value).abs().max().item() for name, value in expected.items())


FSDP: dict[str, Callable[[], float]] = {
    "logits": partial(fsdp, causal_lm_loss),
    "logits, accumulated": partial(fsdp, causal_lm_loss, accumulation=2),
    "hidden states": partial(fsdp, hidden_states),
    "hidden states, accumulated": partial(fsdp, hidden_states, accumulation=2),
    "hidden states, gradient checkpointing": partial(fsdp, hidden_states, checkpointed=True),
    BROKEN + "the world size forgotten": partial(fsdp, causal_lm_loss, factor=1),
}

# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 3])
def processes(request):
    return tiny.run_distributed(facts, request.param, timeout=1500)


@pytest.fixture(scope="module")
def truth():
    return by_loop(gpt2())


@pytest.mark.parametrize("name", TRAINING)
def test_processes_train_as_one(processes, name, record_property):
    differences = [process["training"][name] for process in processes]
    record(record_property, f"training: {name}", len(processes), f"parameters off by {max(differences):.1e}")
    if name.startswith(BROKEN):
        assert min(differences) > 1e-4
    else:
        assert max(differences) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_processes_score_as_one(processes, mode, record_property, truth):
    found = [process["scores"][mode] for process in processes]
    record(record_property, f"evaluation of 11 rows, {mode}", len(processes), how_far(found, truth))
    for scores in found:
        check(scores, truth)


def test_process_without_labels_changes_no_score(processes, record_property):
    expected = by_loop(gpt2(), ignored_in_evaluation(len(processes)))
    found = [process["without labels"] for process in processes]
    record(record_property, "evaluation, one process without labels", len(processes), how_far(found, expected))
    for scores in found:
        check(scores, expected)


@pytest.mark.parametrize("name", FSDP)
def test_sharded_models_train_as_one(processes, name, record_property):
    """For hidden states the head is not resharded after forward; test_hidden_ranks.py checks that others fail."""
    differences = [process["fsdp"][name] for process in processes]
    record(record_property, f"FSDP2 on the CPU: {name}", len(processes), f"parameters off by {max(differences):.1e}")
    if name.startswith(BROKEN):
        assert min(differences) > 1e-4
    else:
        assert max(differences) < 1e-12


@pytest.mark.parametrize(
    ("loss", "right"),
    [
        pytest.param(causal_lm_loss, True, id="logits"),
        pytest.param(partial(causal_lm_loss, overwrite_logits=True), True, id="over the logits"),
        pytest.param(mean_of_the_process, False, id="broken: the mean of all rows"),
        pytest.param(count_of_a_replica, False, id="broken: the count of one replica"),
    ],
)
@pytest.mark.parametrize("ignored", [False, True], ids=["", "one replica without labels"])
def test_two_replicas_train_as_one(loss, right, ignored, record_property, request):
    """DataParallel passes all outputs, and the count once per replica."""
    rows = rows_for(2, ignored=ignored)
    trainer = tiny.trainer(
        gpt2(), rows, loss, replicas=2, per_device_train_batch_size=2, learning_rate=oracle.LEARNING_RATE
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    found, expected = tiny.parameters_after(trainer), by_hand(gpt2(), rows, 4)
    difference = max((found[name] - value).abs().max().item() for name, value in expected.items())
    what = f"DataParallel: training: {request.node.callspec.id.strip('-')}"
    record(record_property, what, "2 replicas", f"parameters off by {difference:.1e}")
    assert (difference < 1e-12) is right


def test_two_replicas_score_as_one(truth, record_property):
    found = scores_of(evaluator(gpt2(), replicas=2, per_device_eval_batch_size=2))
    record(record_property, "DataParallel: evaluation of 11 rows", "2 replicas", how_far([found], truth))
    check(found, truth)


def how_far(found: Sequence[Mapping[str, float]], truth: Mapping[str, float]) -> str:
    """Return the largest relative difference of a score, as text for the report."""
    off = (abs(scores[name] - value) / abs(value or 1) for scores in found for name, value in truth.items())
    return f"scores off by {max(off):.1e}"


def record(record_property: Callable[[str, object], None], what: str, processes: object, result: str) -> None:
    for name, value in (("what", what), ("processes", processes), ("result", result)):
        record_property(name, value)
