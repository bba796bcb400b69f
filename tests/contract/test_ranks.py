"""What two gloo ranks do to losses and reducers (items 10, 14, 20, 21 and 27).

One run of `facts` under torchrun feeds every test.
"""

from functools import partial
from typing import Any

import pytest
import torch
import transformers

from tests import tiny
from tests.contract.probes import (
    LossSpy,
    MetricSpy,
    anything,
    by_head,
    even_rows,
    mean,
    mean_gradient,
    summed,
    without_logits,
)

pytestmark = pytest.mark.distributed

ROWS = tiny.lm_rows(8)
EVEN_ROWS = even_rows(8)
EVAL_ROWS = sorted(tiny.lm_rows(9), key=lambda row: len(row["labels"]))


def facts() -> dict[str, Any]:
    """Everything that the tests below look at, as JSON."""
    return {
        "average": tiny.arguments().average_tokens_across_devices,
        "gradients": {name: gradient_scale(*case) for name, case in GRADIENTS.items()},
        "head": gradient_over_the_head(),
        "counts": global_and_local_count(),
        "reduced": {name: evaluated(reducer).predictions.tolist() for name, reducer in REDUCERS.items()},
        "padded": padded_positions(),
        "generated": generated_rows(),
    }


ONE, TWO = {"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
GRADIENTS = {
    "sum, 1 step": (summed, ROWS, ONE),
    "sum, 2 steps": (summed, ROWS, TWO),
    "mean, 1 step": (mean, EVEN_ROWS, ONE),
    "mean, 2 steps": (mean, EVEN_ROWS, TWO),
    "mean, not averaged": (mean, EVEN_ROWS, ONE | {"average_tokens_across_devices": False}),
}


def gradient_scale(loss, rows, arguments):
    """The gradient's length along that of one process, and its largest difference from that multiple."""
    model = tiny.model("gpt2")
    expected = mean_gradient(model, rows)
    found = tiny.gradient_of(tiny.trainer(model, rows, loss, **arguments))
    scale = found @ expected / expected.norm() ** 2
    return [scale.item(), (found - scale * expected).abs().max().item()]


def gradient_over_the_head():
    """The largest difference between the gradient over the head in the loss and that over the logits."""
    expected = tiny.gradient_of(tiny.trainer(tiny.model("llama"), ROWS, summed, **ONE))
    model = without_logits(tiny.model("llama"))
    loss = partial(by_head, head=model.get_output_embeddings())
    return (tiny.gradient_of(tiny.trainer(model, ROWS, loss, **ONE)) - expected).abs().max().item()


def global_and_local_count():
    spy = LossSpy()
    tiny.trainer(tiny.model("gpt2"), ROWS, spy, **ONE).train()
    return [*spy.counts, int((spy.calls[0].labels != tiny.IGNORED).sum())]


def count(logits, labels):
    return (labels != tiny.IGNORED).sum(1)


def ends(logits, labels):
    return torch.stack([labels[:, 1], labels[:, 2]], 1)


REDUCERS = {
    "(B,)": count,
    "(B, 2)": ends,
    "(B, T)": lambda logits, labels: labels,
    "once a batch": lambda logits, labels: count(logits, labels).sum(),
}


def evaluated(reducer, model="gpt2", **settings):
    """The predictions of nine rows, two a rank and step, so that the last step has one row and a copy of three."""
    metric, settings = MetricSpy(), {"per_device_eval_batch_size": 2} | settings
    tiny.trainer(
        tiny.model(model), None, anything, reducer=reducer, metric=metric, eval_rows=EVAL_ROWS, **settings
    ).evaluate()
    return metric.calls[0]


def with_weights(rows):
    batch = tiny.pad(rows)
    return batch | {"labels": {"labels": batch["labels"], "token_weights": torch.ones(batch["labels"].shape)}}


def padded_positions():
    """Argmax, label and weight of every position whose logits are a row of -100."""
    seen = []

    def reducer(logits, labels):
        padded = (logits == -100).all(-1)
        values = torch.stack([logits.argmax(-1), labels["labels"], labels["token_weights"].long()], -1)
        seen.extend(values[padded].tolist())
        return labels["labels"][:, 0]

    evaluated(reducer, collator=with_weights)
    return seen


def generated_rows():
    found = evaluated(
        lambda ids, labels: ids,
        "t5",
        collator=tiny.pad_seq2seq,
        trainer_class=transformers.Seq2SeqTrainer,
        arguments_class=transformers.Seq2SeqTrainingArguments,
        predict_with_generate=True,
        generation_max_length=16,
    )
    return len(found.predictions)


@pytest.fixture(scope="module")
def ranks():
    return tiny.run_distributed(facts)


@pytest.mark.parametrize(("case", "scale"), zip(GRADIENTS, [1, 1, 2, 4, 1], strict=True))
def test_10_only_a_sum_over_the_count_is_invariant(ranks, case, scale):
    """The Trainer multiplies by the ranks and DDP averages: ours never touches the world size."""
    for rank in ranks:
        assert rank["gradients"][case] == pytest.approx([scale, 0], abs=1e-12)


def test_10_every_rank_gets_the_global_count(ranks):
    """Averaging is the default, so the one division is right on every rank without communication of ours."""
    counts, local = zip(*(rank["counts"] for rank in ranks), strict=True)
    assert set(counts) == {tiny.count(ROWS)} == {sum(local)}
    assert [rank["average"] for rank in ranks] == [True, True]


def test_14_the_head_may_be_called_in_the_loss(ranks):
    """DDP's hooks fire for the head's parameters too: the source needs no logits on several ranks either."""
    assert [rank["head"] for rank in ranks] == pytest.approx([0, 0], abs=1e-12)


LABELS = tiny.pad(EVAL_ROWS)["labels"]


@pytest.mark.parametrize(
    ("case", "expected"), [("(B,)", count(None, LABELS)), ("(B, 2)", ends(None, LABELS)), ("(B, T)", LABELS)]
)
def test_20_batch_first_outputs_are_exact(ranks, case, expected):
    """In the order of the rows, the copies that fill the last batch cut off: what per-sample sums rest on."""
    for rank in ranks:
        assert rank["reduced"][case] == expected.tolist()


def test_20_one_number_a_batch_is_wrong(ranks):
    """It is cut as if it were a row and counts the copies: there are no reducers without a batch dimension."""
    for rank in ranks:
        found = rank["reduced"]["once a batch"]
        assert len(found) < 6
        assert sum(found) != tiny.count(EVAL_ROWS)


def test_21_ranks_are_padded_before_the_reducer(ranks):
    """Whole rows of -100 logits, whose argmax is a valid id, and weights of -100: mask by the labels alone."""
    assert {tuple(values) for rank in ranks for values in rank["padded"]} == {(0, tiny.IGNORED, tiny.IGNORED)}


def test_27_generation_keeps_the_copies(ranks):
    """`Seq2SeqTrainer` gives 12 rows for 9, so text metrics cannot trust the number of rows there."""
    assert [rank["generated"] for rank in ranks] == [12, 12]
