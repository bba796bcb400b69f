"""The rules for reducers name every planted defect and accept right reducers, with helpful messages."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from reducers.testing import check_reducer, reducer_rules
from tests import registry
from tests.kit.verdicts import broken_rules

IGNORED = -100


def found(logits, labels):
    """Return the logits from a tensor or a tuple (right)."""
    if torch.is_tensor(logits):
        return logits
    return next(part for part in logits if torch.is_tensor(part) and part.ndim == labels.ndim + 1)


def right(logits, labels):
    """Return the predicted id for each label (right)."""
    ids = found(logits, labels).argmax(-1)
    return F.pad(ids, (1, 0), value=IGNORED)[:, :-1]


def losses(logits, labels):
    """Return sums over each row (right)."""
    logits = found(logits, labels)[:, :-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    values = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    return {"nll": values.sum(1).double(), "tokens": (labels[:, 1:] != IGNORED).sum(1)}


class Pair(NamedTuple):
    ids: torch.Tensor


def writes_to_labels(logits, labels):
    ids = right(logits, labels)
    labels[labels == IGNORED] = 0
    return ids


def without_tokens_if_there_are_none(logits, labels):
    sums = losses(logits, labels)
    return sums if (labels != IGNORED).any() else {"nll": sums["nll"]}


def filled_on_the_host(logits, labels):
    sums = torch.zeros(len(labels), dtype=torch.float64)
    for place, value in enumerate(losses(logits, labels)["nll"]):
        sums[place] = value
    return sums


_KEPT: dict[torch.Size, torch.Tensor] = {}


def into_the_same_memory(logits, labels):
    return _KEPT.setdefault(labels.shape, torch.empty_like(labels)).copy_(right(logits, labels))


def smoothed_over_calls(logits, labels):
    _KEPT.setdefault(torch.Size(), torch.zeros(())).add_(1)
    return losses(logits, labels)["nll"] / _KEPT[torch.Size()]


def without_empty_columns(logits, labels):
    used = (labels != IGNORED).any(0).nonzero()
    return right(logits, labels)[:, : int(used.max()) + 1 if len(used) else 1]


def longest_answer(logits, labels):
    return F.pad(right(logits, labels), (0, 9))[:, : int((labels != IGNORED).sum(1).max()) + 2]


def sums_without_shift(logits, labels):
    return F.cross_entropy(found(logits, labels).transpose(1, 2).float(), labels, reduction="none").sum(1)


def in_bfloat16(logits, labels):
    log_probs = found(logits, labels)[:, :-1].log_softmax(-1)
    picked = log_probs.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    return torch.where(labels[:, 1:] != IGNORED, -picked, 0.0).sum(1).float()


# By rule: name of a defect -> a reducer that has it.
_BROKEN = {
    "signature": {"needs three": lambda x, y, inputs: right(x, y)},
    "returns": {
        "a number": lambda x, y: {"ids": right(x, y), "rows": len(y)},
        "named tuple": lambda x, y: Pair(right(x, y)),
    },
    "batch_first": {
        "flattened": lambda x, y: right(x, y)[y != IGNORED],
        "mean over the batch": lambda x, y: losses(x, y)["nll"].mean(),
    },
    "dtypes": {
        "hits as bool": lambda x, y: right(x, y) == y,
        "bytes of ids": lambda x, y: right(x, y).clamp(min=0).to(torch.uint8),
        "keeps bfloat16": lambda x, y: F.pad(found(x, y).amax(-1), (1, 0))[:, :-1],
    },
    "inputs": {"writes to labels": writes_to_labels},
    "stateless": {"into the same memory": into_the_same_memory, "smoothed over calls": smoothed_over_calls},
    "device": {
        "returns on the host": lambda x, y: right(x, y).cpu(),
        "made of a list": lambda x, y: torch.tensor([row.argmax(-1).tolist() for row in found(x, y)]),
        "filled on the host": filled_on_the_host,
        "computes on the host": lambda x, y: right(found(x, y).cpu(), y),
        "through NumPy": lambda x, y: torch.from_numpy(found(x, y).float().numpy().argmax(-1)),
    },
    "tuples": {"first of the tuple": lambda x, y: right(x[0] if isinstance(x, tuple) else x, y)},
    "structure": {"without tokens if there are none": without_tokens_if_there_are_none},
    "shapes": {"longest answer": longest_answer, "without empty columns": without_empty_columns},
    "small": {"everything": lambda x, y: F.pad(found(x, y), (0, 0, 1, 0), value=0.0)[:, :-1].float()},
    "alignment": {
        "without shift": lambda x, y: found(x, y).argmax(-1),
        "sums without shift": sums_without_shift,
        "zero for no prediction": lambda x, y: right(x, y).clamp(min=0),
    },
    "padding": {"counts padding": lambda x, y: losses(x, y)["nll"] / y.shape[1]},
    "rows": {"shares of the batch": lambda x, y: losses(x, y)["nll"] / losses(x, y)["nll"].sum()},
    "precision": {"in bfloat16": in_bfloat16},
}
BROKEN = [
    pytest.param(reducer, rule, id=name) for rule, reducers in _BROKEN.items() for name, reducer in reducers.items()
]


@pytest.mark.parametrize(("reducer", "rule"), BROKEN)
def test_a_defect_breaks_its_rule_first(reducer, rule):
    assert broken_rules(reducer, reducer_rules())[0] == rule


def test_every_rule_has_a_planted_defect():
    assert {rule.name for rule in reducer_rules()} == {*_BROKEN}


def hits(logits, labels):
    """Return which labels were predicted (right)."""
    ids = right(logits, labels)
    return (ids == labels).int().masked_fill(ids == IGNORED, IGNORED)


def on_the_way(logits, labels):
    """Create tensors that are moved to the device, and numbers that need not be (right)."""
    logits = found(logits, labels)[:, :-1]
    weights = torch.ones(logits.shape[-1]).to(logits.device)
    values = F.cross_entropy(
        (logits if logits.dtype == torch.float64 else logits.float()).transpose(1, 2),
        labels[:, 1:],
        weights.to(torch.promote_types(logits.dtype, torch.float32)),
        reduction="none",
    )
    sums = torch.zeros(len(labels)).to(values)
    return sums + torch.tensor(2.0) * values.sum(1)


@pytest.mark.parametrize("reducer", [right, losses, hits, on_the_way])
def test_right_reducers_keep_every_rule(reducer):
    assert all(verdict.comparisons for verdict in check_reducer(reducer).verdicts)


SPANS = {"task": registry.starts_and_ends, "lengths": {7}}
PAIRS = {"task": registry.pairs, "lengths": {6}}
FRAMES = {"task": registry.frames, "lengths": {9}}
VECTORS = {"task": registry.two_vectors}


def wider(x):
    return x if x.dtype == torch.float64 else x.float()


def both_ends(logits, labels):
    """Return the best start and the best end (right)."""
    return {"starts": logits[0].argmax(1), "ends": logits[1].argmax(1)}


_MEMORY = torch.empty(4, dtype=torch.int64)


def into_one_memory(logits, labels):
    return torch.argmax(logits[0], 1, out=_MEMORY) if len(logits[0]) == 4 else logits[0].argmax(1)


def modifies_the_logits(logits, labels):
    logits[1].clamp_(min=0)
    return both_ends(logits, labels)


def of_rows(logits):
    """Return the logits of rows or frames from a tensor or a tuple (right)."""
    return logits if torch.is_tensor(logits) else next(part for part in logits if part.ndim == 3)


def margins(logits, labels):
    """Return one number per pair of rows (right)."""
    logits = of_rows(logits)
    chosen, rejected = wider(logits).amax(-1).sum(1).unflatten(0, (2, -1))
    return (chosen - rejected).where((labels["labels"] != IGNORED).any(1).all(1), 0)


def neighbors_as_pairs(logits, labels):
    chosen, rejected = wider(of_rows(logits)).amax((1, 2)).unflatten(0, (-1, 2)).T
    return chosen - rejected


def only_if_there_is_a_label(logits, labels):
    found = {"margins": margins(logits, labels)}
    return found if (labels["labels"] != IGNORED).any() else {}


OTHER = [
    (lambda x, y: x[0].argmax(1) + 0 * len(y), VECTORS, "signature"),
    (lambda x, y: {"frames": of_rows(x).argmax(-1), "length": 9}, FRAMES, "returns"),
    (lambda x, y: wider(of_rows(x)).amax((1, 2)), PAIRS, "batch_first"),
    (lambda x, y: x[0].argmax(1) == 0, SPANS, "dtypes"),
    (into_one_memory, SPANS, "stateless"),
    (modifies_the_logits, SPANS, "inputs"),
    (lambda x, y: torch.from_numpy(of_rows(x).float().numpy()).argmax(-1), FRAMES, "device"),
    (lambda x, y: both_ends((x[0], x[-1]), y), SPANS, "tuples"),
    (only_if_there_is_a_label, PAIRS, "structure"),
    (lambda x, y: of_rows(x).argmax(-1)[:, : int(y["input_lengths"].max())], FRAMES, "shapes"),
    (lambda x, y: wider(x[0])[:, :, None] + wider(x[1])[:, None], SPANS | {"lengths": ()}, "small"),
    (lambda x, y: wider(x[0]).amax(1) - wider(x[0]).mean(), SPANS, "rows"),
    (neighbors_as_pairs, PAIRS, "rows"),
    (lambda x, y: wider(x[0]).exp().mean(1), SPANS, "padding"),
    (lambda x, y: of_rows(x)[:, :1].logsumexp(-1).float(), FRAMES, "precision"),
]


@pytest.mark.parametrize(("reducer", "batches", "rule"), OTHER, ids=[rule for *_, rule in OTHER])
def test_a_defect_in_other_shapes_breaks_its_rule_first(reducer, batches, rule):
    assert broken_rules(reducer, reducer_rules(**batches))[0] == rule


def test_every_rule_for_other_shapes_has_a_planted_defect():
    assert {rule.name for rule in reducer_rules(**SPANS)} == {rule for *_, rule in OTHER}
    assert {rule.name for rule in reducer_rules(**VECTORS)} == {rule for *_, rule in OTHER} - {"padding"}


@pytest.mark.parametrize(("reducer", "batches"), [(both_ends, SPANS), (margins, PAIRS)])
def test_right_reducers_of_other_shapes_keep_every_rule(reducer, batches):
    assert all(verdict.comparisons for verdict in check_reducer(reducer, **batches).verdicts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": lambda generator, classes: (torch.zeros(3, classes), None)}, r"samples >= 4, got \[3\] rows"),
        ({"task": lambda generator, classes: (torch.zeros(6, classes), torch.zeros(4))}, r"got \[4, 6\] rows"),
        ({"task": lambda generator, classes: None}, r"must return \(logits, labels\), got a NoneType"),
        ({"task": lambda generator, classes: (torch.zeros(()), None)}, r"got \[\] rows"),
        ({"lengths": {8}}, r"lengths must be empty unless task is a function, got \{8\}"),
        (SPANS | {"extras": {"weights": torch.ones_like}}, "extras must be empty if task is a function"),
    ],
)
def test_wrong_batches_and_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        reducer_rules(**options)


def after_a_loss_and_none(generator, classes):
    return (torch.tensor(0.5), None, torch.randn(4, classes, generator=generator)), torch.zeros(4).long()


def third(logits, labels):
    return logits[2].argmax(1)


def test_a_batch_may_contain_a_number_and_none():
    assert broken_rules(third, reducer_rules(after_a_loss_and_none)) == []


def on_the_device(logits, labels):
    """Move indices to the host and back (right)."""
    places = (labels != IGNORED).cpu().nonzero().to(labels.device)
    ids = torch.full_like(labels, IGNORED)
    return ids.index_put(tuple(places.T), right(logits, labels)[tuple(places.T)])


def test_indices_may_be_computed_on_the_host():
    assert broken_rules(on_the_device, reducer_rules()) == []


@pytest.mark.parametrize("rule", reducer_rules(), ids=lambda rule: rule.name)
def test_rules_are_parameters_for_pytest(rule):
    rule(right)


def test_a_message_has_the_positions_that_change():
    with pytest.raises(AssertionError) as caught:
        check_reducer(_BROKEN["alignment"]["without shift"])
    assert "result, other positions that the logits at (0, 0) change: [(0, 0)], expected []" in str(caught.value)
    assert "Fix: in a causal model the logit before predicts the label" in str(caught.value)
