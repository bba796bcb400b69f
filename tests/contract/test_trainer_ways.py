"""Ways of the Trainer that users meet beside the three hooks (items 27 and 28)."""

import pytest
import torch
import transformers

from tests import tiny
from tests.contract.probes import LossSpy, MetricSpy, ReducerSpy, anything, since

ROWS = tiny.lm_rows(10)


def test_27_grouping_by_length_reorders_evaluation():
    """Predictions no longer follow the dataset, so a metric never joins them to rows of its own."""
    reducer = ReducerSpy(lambda logits, labels: labels[:, 0])
    lengths = []
    for arguments in ({}, tiny.GROUPED):
        trainer = tiny.trainer(tiny.model("gpt2"), None, anything, reducer=reducer, **arguments)
        labels = trainer.predict(ROWS).label_ids
        lengths.append((labels != tiny.IGNORED).sum(1).tolist())
    in_order = [tiny.count([row]) for row in ROWS]
    assert lengths[0] == in_order
    assert lengths[1] != in_order
    assert sorted(lengths[1]) == sorted(in_order)


def start_and_end(rows):
    """Both positions in one `labels` tensor and no key that the model would make a loss of."""
    batch = tiny.pad(rows)
    return batch | {"labels": torch.stack([batch.pop("start_positions"), batch.pop("end_positions")], 1)}


@pytest.mark.parametrize("named", [True, False])
def test_28_packed_positions_need_label_names(named):
    """A question-answering model names other labels, so `labels` are seen in evaluation only if one says so."""
    spy, metric = LossSpy(), MetricSpy()
    rows = tiny.qa_rows(8)
    names = {"label_names": ["labels"]} if named else {}
    trainer = tiny.trainer(
        tiny.model("bert_qa"), rows, spy, metric=metric, eval_rows=rows, collator=start_and_end, **names
    )
    trainer.train()
    assert spy.counts == [16]
    if named:
        assert "eval_loss" in trainer.evaluate()
        assert len(metric.calls) == 1
    elif since("5.0"):
        assert "eval_loss" not in trainer.evaluate()
        assert metric.calls == []
    else:
        with pytest.raises(TypeError, match="labels"):
            trainer.evaluate()


def test_28_model_init_makes_another_model():
    """A loss that closed over the first one trains nothing, so the hidden-state source refuses `model_init`."""
    made = []

    def init():
        made.append(tiny.model("gpt2"))
        return made[-1]

    trainer = transformers.Trainer(
        model_init=init, args=tiny.arguments(), train_dataset=ROWS, data_collator=tiny.pad, compute_loss_func=anything
    )
    first = trainer.model
    trainer.train()
    assert trainer.model is made[-1]
    assert trainer.model is not first


class Reporter(transformers.TrainerCallback):
    """A callback that adds a value to the logs and, as `seen`, keeps the names that were there before."""

    def __init__(self, name):
        self.name = name
        self.seen = set()

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen |= set(logs)
        logs[self.name] = 1.0


def test_28_on_log_comes_too_late():
    """`log_history` is written and reporters run before user callbacks: `watch` puts its values in earlier."""
    reporter, late = Reporter("early"), Reporter("late")
    trainer = tiny.trainer(tiny.model("gpt2"), ROWS, anything, callbacks=[reporter, late])
    trainer.train()
    assert "late" not in reporter.seen
    assert "early" in late.seen
    assert tiny.logged(trainer, "early") == tiny.logged(trainer, "late") == []
