"""The rules for reducers: each defect is named, nothing right is blamed, and the messages help."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from reducers.testing import check_reducer, reducer_rules

from .verdicts import broken_rules

IGNORED = -100


def found(logits, labels):
    """The logits, wherever they stand: right."""
    if torch.is_tensor(logits):
        return logits
    return next(part for part in logits if torch.is_tensor(part) and part.ndim == labels.ndim + 1)


def right(logits, labels):
    """Ids of the best logit for each label."""
    ids = found(logits, labels).argmax(-1)
    return F.pad(ids, (1, 0), value=IGNORED)[:, :-1]


def losses(logits, labels):
    """Sums over each row: right."""
    logits = found(logits, labels)[:, :-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    values = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    return {"nll": values.sum(1).double(), "tokens": (labels[:, 1:] != IGNORED).sum(1)}


class Pair(NamedTuple):
    ids: torch.Tensor


def needs_three(logits, labels, inputs):
    return right(logits, labels)


def a_number(logits, labels):
    return {"ids": right(logits, labels), "rows": len(labels)}


def named_tuple(logits, labels):
    return Pair(right(logits, labels))


def flattened(logits, labels):
    return right(logits, labels)[labels != IGNORED]


def mean_over_the_batch(logits, labels):
    return losses(logits, labels)["nll"].mean()


def hits_as_bool(logits, labels):
    return right(logits, labels) == labels


def bytes_of_ids(logits, labels):
    return right(logits, labels).clamp(min=0).to(torch.uint8)


def keeps_bfloat16(logits, labels):
    return F.pad(found(logits, labels).amax(-1), (1, 0))[:, :-1]


def writes_to_labels(logits, labels):
    ids = right(logits, labels)
    labels[labels == IGNORED] = 0
    return ids


def leaves_the_device(logits, labels):
    return right(logits, labels).cpu()


def computes_on_the_host(logits, labels):
    return right(found(logits, labels).cpu(), labels)


def through_numpy(logits, labels):
    return torch.from_numpy(found(logits, labels).float().numpy().argmax(-1))


def first_of_the_tuple(logits, labels):
    return right(logits[0] if isinstance(logits, tuple) else logits, labels)


def sometimes_less(logits, labels):
    sums = losses(logits, labels)
    return sums if (labels != IGNORED).any() else {"nll": sums["nll"]}


def longest_answer(logits, labels):
    width = int((labels != IGNORED).sum(1).max())
    return F.pad(right(logits, labels), (0, 9))[:, : width + 2]


def everything(logits, labels):
    return F.pad(found(logits, labels), (0, 0, 1, 0), value=0.0)[:, :-1].float()


def without_shift(logits, labels):
    return found(logits, labels).argmax(-1)


def sums_without_shift(logits, labels):
    logits = found(logits, labels)
    return F.cross_entropy(logits.transpose(1, 2).float(), labels, reduction="none").sum(1)


def nothing_is_zero(logits, labels):
    return right(logits, labels).clamp(min=0)


def counts_padding(logits, labels):
    sums = losses(logits, labels)
    return sums["nll"] / labels.shape[1]


def shares_of_the_batch(logits, labels):
    nll = losses(logits, labels)["nll"]
    return nll / nll.sum()


def in_bfloat16(logits, labels):
    log_probs = found(logits, labels)[:, :-1].log_softmax(-1)
    picked = log_probs.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    return torch.where(labels[:, 1:] != IGNORED, -picked, 0.0).sum(1).float()


BROKEN = [
    (needs_three, "signature"),
    (a_number, "returns"),
    (named_tuple, "returns"),
    (flattened, "batch_first"),
    (mean_over_the_batch, "batch_first"),
    (hits_as_bool, "dtypes"),
    (bytes_of_ids, "dtypes"),
    (keeps_bfloat16, "dtypes"),
    (writes_to_labels, "inputs"),
    (leaves_the_device, "device"),
    (computes_on_the_host, "device"),
    (through_numpy, "device"),
    (first_of_the_tuple, "tuples"),
    (sometimes_less, "structure"),
    (longest_answer, "shapes"),
    (everything, "small"),
    (without_shift, "alignment"),
    (sums_without_shift, "alignment"),
    (nothing_is_zero, "alignment"),
    (counts_padding, "padding"),
    (shares_of_the_batch, "rows"),
    (in_bfloat16, "precision"),
]


@pytest.mark.parametrize(("reducer", "rule"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_each_defect_is_named_by_its_rule(reducer, rule):
    assert broken_rules(reducer, reducer_rules())[0] == rule


def test_every_rule_has_something_to_catch():
    assert {rule.name for rule in reducer_rules()} == {rule for _, rule in BROKEN}


@pytest.mark.parametrize("reducer", [right, losses])
def test_nothing_right_is_blamed(reducer):
    assert all(verdict.comparisons for verdict in check_reducer(reducer).verdicts)


def on_the_device(logits, labels):
    """Indices may go over the host and come back."""
    places = (labels != IGNORED).cpu().nonzero().to(labels.device)
    ids = torch.full_like(labels, IGNORED)
    return ids.index_put(tuple(places.T), right(logits, labels)[tuple(places.T)])


def test_indices_may_be_found_on_the_host():
    assert broken_rules(on_the_device, reducer_rules()) == []


@pytest.mark.parametrize("rule", reducer_rules(), ids=lambda rule: rule.name)
def test_the_pytest_form(rule):
    rule(right)


def test_a_message_shows_which_places_change():
    with pytest.raises(AssertionError) as caught:
        check_reducer(without_shift)
    assert "result, what else the logits at (0, 0) change: [(0, 0)], expected []" in str(caught.value)
    assert "Fix: in a causal model the logit before predicts the label" in str(caught.value)
