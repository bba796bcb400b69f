"""No call waits for the device more than once, and no backward at all, except as the registry explains."""

import copy

import pytest
import torch
from torch import nn

from lossfns.testing import loss_rules
from reducers.testing import reducer_rules
from tests import registry
from tests.test_registry import TERMS, in_loss, labels

from .simulated_device import DEVICE, counted_waits, numbers_of, on_device

COUNTS = [None, 5, torch.tensor(5)]
MASK, VALUES = torch.tensor([True, False, True]), torch.arange(3.0)


def waits_of_loss(loss, options):
    """Return the waits in forward and in backward per form of the count, and compare the loss to that on the host."""
    subject = loss_rules(**options)[0].subject(loss)
    found = []
    for count in COUNTS:
        logits, targets, items = on_device((subject.batch.logits, subject.batch.targets, count))
        logits.requires_grad_()
        fresh = copy.deepcopy(loss)  # a copy, because the loss may keep tensors of the call before on the host
        with counted_waits() as waits:
            outputs = subject.task.output(logits * 1)
            waits.clear()
            value = fresh(outputs, targets, num_items_in_batch=items)
            forward = waits.total()
            value.backward()
        torch.testing.assert_close(numbers_of(value).detach(), subject.value(subject.batch, count).detach())
        found.append((forward, waits.total() - forward))
    return found


def allowed(label):
    return registry.WAITS_MORE_OFTEN.get(label, (1, ""))[0]


@pytest.mark.parametrize("entry", registry.LOSSES, ids=labels)
def test_losses_wait_once(entry):
    found = waits_of_loss(entry.function, entry.options)
    if entry.label in registry.WAITS_MORE_OFTEN:  # the exception must be needed
        assert found == [(allowed(entry.label), 0)] * len(COUNTS)
    assert max(found) <= (allowed(entry.label), 0)


@pytest.mark.parametrize("entry", [entry for entry in TERMS if entry.name != "gaussian_nll"], ids=labels)
def test_terms_do_not_wait(entry):
    """Only the loss that the term is part of waits, once."""
    loss, options = in_loss(entry)
    assert waits_of_loss(loss, {**options, **entry.options}) == [(1, 0)] * len(COUNTS)


@pytest.mark.parametrize("entry", registry.REDUCERS, ids=labels)
def test_reducers_wait_once(entry):
    subject = reducer_rules(**entry.options)[0].subject(entry.function)
    batch = on_device((subject.batch.logits, subject.batch.labels))
    with counted_waits() as waits:
        found = entry.function(*batch)
    expected = entry.function(subject.batch.logits, subject.batch.labels)
    torch.testing.assert_close(numbers_of(found), expected, equal_nan=True)
    assert waits.total() <= allowed(entry.label), dict(waits)


def test_an_exception_belongs_to_an_entry():
    assert {*registry.WAITS_MORE_OFTEN} <= {entry.label for entry in [*registry.LOSSES, *registry.REDUCERS]}


WAITING = {
    "a number": lambda x, mask: x.sum().item(),
    "a list": lambda x, mask: x.tolist(),
    "a branch": lambda x, mask: 1 if x.sum() > 0 else 0,
    "a comparison of tensors": lambda x, mask: torch.equal(x, x),
    "a copy to the host": lambda x, mask: x.cpu(),
    "a copy to the host that does not block": lambda x, mask: x.to("cpu", non_blocking=True),
    "a copy into a tensor on the host": lambda x, mask: torch.empty(3).copy_(x),
    "a copy from the host": lambda x, mask: torch.ones(3).to(x.device),
    "a tensor made of a list": lambda x, mask: torch.tensor([1.0, 2.0], device=x.device),
    "another tensor made of a list": lambda x, mask: x.new_tensor([1.0, 2.0]),
    "a selection": lambda x, mask: x[mask],
    "a selection, filled": lambda x, mask: x.clone().index_put((mask,), x[:2]),
    "places of a mask": lambda x, mask: mask.nonzero(),
    "places of a mask, in three": lambda x, mask: torch.where(mask),
    "an index on the host": lambda x, mask: x[torch.tensor([0, 1])],
    "a masked selection": lambda x, mask: x.masked_select(mask),
    "different values": lambda x, mask: x.unique(),
    "one-hot": lambda x, mask: nn.functional.one_hot(x.long()),
    "a histogram": lambda x, mask: x.long().bincount(),
}
NOT_WAITING = {
    "a choice": lambda x, mask: x.where(mask, 0),
    "a fill": lambda x, mask: x.clone().masked_fill_(mask, 0),
    "a fill by a mask": lambda x, mask: x.clone().__setitem__(mask, 0),
    "a gather": lambda x, mask: x[mask.long()],
    "a slice": lambda x, mask: x[:2] * 2 + 1,
    "a copy from the host that does not block": lambda x, mask: torch.ones(3).to(x.device, non_blocking=True),
    "a new tensor": lambda x, mask: torch.full((3,), 2.0, device=x.device) + x.new_zeros(3),
    "an operation in place": lambda x, mask: torch.add(x, 1, out=x.new_empty(3)).mul_(2),
    "a sort": lambda x, mask: x.sort(descending=True).indices.div(2, rounding_mode="floor"),
}


@pytest.mark.parametrize(
    ("function", "expected"),
    [*((function, True) for function in WAITING.values()), *((function, False) for function in NOT_WAITING.values())],
    ids=[*WAITING, *NOT_WAITING],
)
def test_a_wait_is_counted(function, expected):
    x, mask = on_device((VALUES, MASK))
    with counted_waits() as waits:
        function(x, mask)
    assert bool(waits) is expected, dict(waits)


def test_a_wait_in_backward_is_counted():
    x = on_device(VALUES).requires_grad_()
    with counted_waits() as waits:
        doubled = x * 2
        doubled.register_hook(lambda gradient: gradient * gradient.sum().item())
        doubled.sum().backward()
    assert waits.total() == 1


def test_values_on_the_device_are_those_on_the_host():
    x, mask = on_device((VALUES, MASK))
    with counted_waits():
        found = x.where(mask, 9).cumsum(0)
        y = x.view(3, 1)
        y.add_(1)
    assert found.device == DEVICE
    assert numbers_of(found).tolist() == [0.0, 9.0, 11.0]
    assert numbers_of(x).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(AssertionError, match="outside of counted_waits"):
        x + 1
