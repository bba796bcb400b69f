"""What is right, the slow way and by torch alone: statistics by a loop over the labels, training by a plain loop."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tests import tiny

IGNORED = -100
STEPS = 3
LEARNING_RATE = 0.1

Place = tuple[int, ...]


def pairs(logits: Tensor, labels: Tensor, *, shift: int = 0, ignored: int = IGNORED) -> Iterator[tuple[Place, Place]]:
    """The place of each label that counts, and the place of the logit that predicts it."""
    lead = logits.shape[labels.ndim - 1] - labels.shape[-1]
    for place in itertools.product(*map(range, labels.shape)):
        if place[-1] >= shift and int(labels[place]) != ignored:
            yield place, (*place[:-1], place[-1] + lead - shift)


def measure(x: Tensor, y: int) -> dict[str, Tensor]:
    """The differentiable statistics of one row and its label; logits of -inf are classes that are not there."""
    there = x[x > -torch.inf]
    highest = there.max().detach()
    normalizer = (there - highest).exp().sum().log() + highest
    log_p = there - normalizer
    return {
        "log_prob": x[y] - normalizer,
        "log_normalizer": normalizer,
        "mean_logit": there.sum() / len(there),
        "entropy": -(log_p.exp() * log_p).sum(),
    }


def ranking(x: Tensor) -> list[int]:
    """Class ids from the best to the worst logit; the smaller id first among equals."""
    values = x.tolist()
    return sorted(range(len(values)), key=lambda index: (-values[index], index))


def statistics(
    logits: Tensor, labels: Tensor, fields: tuple[str, ...], *, shift: int = 0, ignored: int = IGNORED
) -> dict[str, Tensor]:
    """The statistics `fields` at every label, of the labels' shape, float64 (integers for ranks), 0 where none."""
    nothing = logits.flatten()[:0].sum().double()
    found = {name: [nothing] * labels.numel() for name in fields}
    for place, row in pairs(logits, labels, shift=shift, ignored=ignored):
        x, y = logits[row].double(), int(labels[place])
        order = ranking(x.detach())
        ranks = {"rank": torch.tensor(order.index(y)), "top_id": torch.tensor(order[0])}
        here = measure(x, y) | ranks
        flat = 0
        for index, size in zip(place, labels.shape, strict=True):
            flat = flat * size + index
        for name in fields:
            found[name][flat] = here[name]
    return {name: torch.stack(values).view(labels.shape) for name, values in found.items() if values}


def plain(logits: Tensor, labels: Tensor, fields: tuple[str, ...], *, shift: int = 0) -> dict[str, Tensor]:
    """The same in one go, as a user would write it in the dtype losses are computed in: what precision may cost."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    x = x[:, x.shape[1] - labels.shape[1] :]
    x = torch.cat([x[:, :shift], x[:, : x.shape[1] - shift]], 1)
    labels = labels.long()
    valid = labels != IGNORED
    valid[:, :shift] = False
    log_p = x.log_softmax(-1)
    found = {
        "log_prob": log_p.gather(-1, labels.masked_fill(~valid, 0)[..., None])[..., 0],
        "log_normalizer": x.logsumexp(-1),
        "mean_logit": x.mean(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
    }
    return {name: found[name].where(valid, 0) for name in fields}


def error(found: Tensor, true: Tensor) -> float:
    """The largest difference; equal infinities are equal, NaN is further away than anything."""
    difference = (found.double() - true.double()).abs().masked_fill(found.double() == true.double(), 0)
    return difference.nan_to_num(nan=torch.inf).max().item() if difference.numel() else 0.0


def assert_no_worse(found: Tensor, usual: Tensor, true: Tensor) -> None:
    """The error is at most that of the usual formula in the same dtype, plus one unit in the last place.

    In float64 the truth has such an error itself, so there it is a few units.
    """
    finite = true.double().masked_select(true.isfinite()).abs()
    largest = finite.max().item() if finite.numel() else 0.0
    units = 32 if found.dtype == torch.float64 else 1
    assert error(found, true) <= error(usual, true) + units * torch.finfo(found.dtype).eps * largest


def parameters_by_hand(
    model: torch.nn.Module,
    rows: Sequence[tiny.Row],
    *,
    shift: int = 1,
    collator: Callable[[Sequence[tiny.Row]], tiny.Row] = tiny.pad,
    windows: int = 1,
) -> dict[str, Tensor]:
    """The parameters after three plain steps, each over all rows at once.

    With several `windows`: over the mean of the means of that many micro-batches, the usual mistake.
    """
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    size = len(rows) // windows
    for _ in range(STEPS):
        for first in range(0, len(rows), size):
            batch = collator(rows[first : first + size])
            labels = batch.pop("labels")
            logits = model(**batch).logits
            logits, labels = logits[:, : logits.shape[1] - shift].flatten(0, 1), labels[:, shift:].flatten()
            (F.cross_entropy(logits, labels) / windows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return tiny.parameters(model)
