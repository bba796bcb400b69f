"""Losses with one planted defect each, and the rule that must find it."""

import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F

IGNORED = -100
_LAST: list[torch.Tensor] = []


def up(logits):
    return logits if logits.dtype == torch.float64 else logits.float()


def scored(logits, labels):
    """Return the logits and labels at labels that are not ignored."""
    return logits[labels != IGNORED], labels[labels != IGNORED]


def pairs(outputs, labels, shift=1):
    """Return labels and the logits that predict them, without ignored labels (right)."""
    return scored(outputs.logits[:, : labels.shape[1] - shift], labels[:, shift:])


def costs(outputs, labels, shift=1):
    logits, labels = pairs(outputs, labels, shift)
    return cross_entropy(up(logits), labels)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


def items(values, num_items_in_batch):
    """Return the divisor for the count in any of its forms (right)."""
    count = values.numel() if num_items_in_batch is None else num_items_in_batch
    return torch.as_tensor(count).sum().clamp(min=1)


def divided(values, num_items_in_batch):
    return values.sum() / items(values, num_items_in_batch)


def right(outputs, labels, num_items_in_batch=None):
    return divided(costs(outputs, labels), num_items_in_batch)


def without_shift(outputs, labels, num_items_in_batch=None):
    return divided(costs(outputs, labels, shift=0), num_items_in_batch)


def without_count(outputs, labels):
    return right(outputs, labels)


def mean(outputs, labels, num_items_in_batch=None):
    return costs(outputs, labels).mean()


def running_average(x, y, n):
    _LAST.append(right(x, y, n))
    return sum(value.detach() for value in _LAST[:-1]) * 0.1 + _LAST[-1]


def writes_to_labels(x, y, n):
    value = right(x, y, n)
    y[y == IGNORED] = 0
    return value


def writes_to_logits(x, y, n):
    x.logits[..., 0].data.mul_(1.5)
    return right(x, y, n)


def smooths_ignored_rows(x, y, n):
    values = costs(x, y)
    even = (x.logits.logsumexp(-1) - x.logits.mean(-1)).sum()
    return (0.9 * values.sum() + 0.1 * even) / items(values, n)


def masks_by_multiplication(x, y, n):
    logits, labels = up(x.logits[:, :-1]), y[:, 1:]
    mask = labels != IGNORED
    values = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * mask
    return values.sum() / items(values[mask], n)


def mean_of_rows(x, y, n):
    rows = [costs(SimpleNamespace(logits=x.logits[[i]]), y[[i]]) for i in range(len(y))]
    means = torch.stack([row.mean() for row in rows if len(row)] or [x.logits.sum() * 0])
    return means.mean() * sum(map(len, rows)) / items(torch.cat(rows), n)


def focal_after_the_mean(x, y, n):
    values = costs(x, y)
    mean = values.sum() / max(1, len(values))
    return divided((1 - torch.exp(-mean)) ** 2 * mean * torch.ones_like(values), n)


def favours_the_first_row(x, y, n):
    row = (y[:, 1:] != IGNORED).nonzero()[:, 0]
    return divided(costs(x, y) * (1 + (row == 0)), n)


def broadcasts(x, y, n):
    logits, labels = scored(x.logits, y)
    return divided((logits - labels).square().mean(0) if len(labels) else logits.flatten(), n)


def only_rows_without_a_gap(x, y, n):
    kept = (y != IGNORED).all(1)
    return divided(F.binary_cross_entropy_with_logits(x.logits[kept], y[kept], reduction="none"), n)


def divides_the_counts(x, y, n):
    return right(x, y, n.mul_(2)) * 2 if torch.is_tensor(n) and n.ndim == 2 else right(x, y, n)


def needs_a_whole_number(x, y, n):
    if torch.is_tensor(n) and n.is_floating_point():
        raise TypeError("the count must be an integer")
    return right(x, y, n)


def times_the_world_size(x, y, n):
    return right(x, y, n) * (torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)


def minus_the_maximum_of_the_batch(x, y, n):
    logits, labels = pairs(x, y)
    logits = up(logits) - up(logits).detach().max() if len(logits) else up(logits)
    return divided(logits.exp().sum(-1).log() - logits.gather(1, labels[:, None])[:, 0], n)


def log_of_softmax(x, y, n):
    logits, labels = pairs(x, y)
    return divided(-up(logits).softmax(-1).gather(1, labels[:, None])[:, 0].log(), n)


def unless_empty(other):
    """Return a loss that is right if a label counts, and `other` if none does."""
    return lambda x, y, n: right(x, y, n) if (y[:, 1:] != IGNORED).any() else other


def focal_from_the_weighted_probability(outputs, labels, num_items_in_batch=None, *, weights):
    logits, labels = scored(up(outputs.logits), labels)
    values = F.cross_entropy(logits, labels, weight=weights.to(logits.dtype), reduction="none")
    return divided((1 - torch.exp(-values)) ** 2 * values, num_items_in_batch)


def reweighted(weights):
    return partial(focal_from_the_weighted_probability, weights=weights)


def as_loss(function, name):
    """Return a loss of a function of the outputs x, the labels y and the count n."""

    def loss(outputs, labels, num_items_in_batch=None):
        return function(outputs, labels, num_items_in_batch)

    loss.__name__ = name
    return loss


# (rule, the defect that breaks it first, a function of the outputs x, the labels y and the count n)
DEFECTS: list[tuple[str, str, Any]] = [
    ("returns", "per token", lambda x, y, n: costs(x, y) / n if n else costs(x, y)),
    ("returns", "of one element", lambda x, y, n: right(x, y, n)[None]),
    ("returns", "detached", lambda x, y, n: right(x, y, n).detach()),
    ("returns", "a Python number", lambda x, y, n: right(x, y, n).item()),
    ("returns", "a new leaf", lambda x, y, n: right(x, y, n).detach().requires_grad_() * 1),
    ("stateless", "running average", running_average),
    ("inputs", "writes to labels", writes_to_labels),
    ("inputs", "writes to logits", writes_to_logits),
    ("inputs", "clamps the count", lambda x, y, n: right(x, y, n.clamp_(min=1) if torch.is_tensor(n) else n)),
    ("in_place", "ends in sqrt", lambda x, y, n: right(x, y, n).square().sqrt()),
    ("in_place", "ends in exp", lambda x, y, n: right(x, y, n).clamp(min=1e-30).log().exp()),
    ("every_label", "ignores the padding id", lambda x, y, n: right(x, y.masked_fill(y == 0, IGNORED), n)),
    ("ignored", "smooths ignored rows", smooths_ignored_rows),
    ("selects", "masks by multiplication", masks_by_multiplication),
    ("reads", "double shift", lambda x, y, n: divided(costs(x, y, shift=2), n)),
    ("reads", "shifts backwards", lambda x, y, n: divided(cross_entropy(*scored(x.logits[:, 1:], y[:, :-1])), n)),
    ("reads", "shifts after flattening", lambda x, y,
     n: divided(cross_entropy(*scored(x.logits.flatten(0, 1)[:-1], y.flatten()[1:])), n)),
    ("padding", "counts padding", lambda x, y, n: divided(costs(x, y), y[:, 1:].numel() if n is None else n)),
    ("additive", "mean of rows", mean_of_rows),
    ("additive", "focal after the mean", focal_after_the_mean),
    ("permutation", "favours the first row", favours_the_first_row),
    ("count_none", "counts unshifted labels", lambda x, y,
     n: divided(costs(x, y), (y != IGNORED).sum() if n is None else n)),
    ("count_none", "sum without a count", lambda x, y,
     n: costs(x, y).sum() / (1 if n is None else torch.as_tensor(n).sum())),
    ("count_given", "total", lambda x, y, n: costs(x, y).sum()),
    ("count_given", "count in half precision", lambda x, y, n: costs(x, y).sum() / items(costs(x, y), n).half()),
    ("count_forms", "needs a whole number", needs_a_whole_number),
    ("data_parallel", "first count of all", lambda x, y,
     n: right(x, y, None if n is None else torch.as_tensor(n).flatten()[0])),
    ("data_parallel", "divides the counts", divides_the_counts),
    ("accumulation", "right for four rows only", lambda x, y, n: right(x, y, n) * (len(y) / 4)),
    ("processes", "times the world size", times_the_world_size),
    ("processes", "times the environment", lambda x, y, n: right(x, y, n) * int(os.environ.get("WORLD_SIZE", "1"))),
    ("all_ignored", "zero without a graph", unless_empty(torch.tensor(0.0))),
    ("all_ignored", "zero without a graph to the logits", unless_empty(torch.zeros((), requires_grad=True) * 1)),
    ("all_ignored", "NaN if empty", lambda x, y,
     n: costs(x, y).sum() / (len(costs(x, y)) if n is None else torch.as_tensor(n).sum())),
    ("dtypes", "in half precision", lambda x, y, n: divided(cross_entropy(*pairs(x, y)), n)),
    ("dtypes", "count of the dtype of the logits", lambda x, y,
     n: costs(x, y).sum() / items(costs(x, y), n).to(x.logits.dtype)),
    ("extremes", "log of softmax", log_of_softmax),
    ("extremes", "minus the maximum of the batch", minus_the_maximum_of_the_batch),
    ("gradient", "stops half the gradient", lambda x, y, n: divided(0.5 * costs(x, y) + 0.5 * costs(x, y).detach(), n)),
    ("picklable", "unpicklable", right),
]  # fmt: skip


def softmax_twice(outputs, labels, num_items_in_batch=None):
    logits, labels = pairs(outputs, labels)
    return divided(cross_entropy(up(logits).softmax(-1), labels), num_items_in_batch)


def all_rows_counted(x, y, n):
    return divided(F.cross_entropy(x.logits, y, reduction="none", ignore_index=IGNORED), n)


BROKEN: list[tuple[Any, str, dict[str, Any]]] = [
    (without_count, "signature", {}),
    (without_shift, "reads", {}),
    (mean, "count_given", {}),
    *((as_loss(loss, name), rule, {}) for rule, name, loss in DEFECTS),
    (as_loss(right, "shifts a masked model"), "reads", {"task": "masked_lm"}),
    (as_loss(broadcasts, "broadcasts"), "additive", {"task": "regression"}),
    (as_loss(only_rows_without_a_gap, "only rows without a gap"), "count_none", {"task": "multi_label"}),
    (as_loss(all_rows_counted, "all rows counted"), "count_none", {"task": "classification"}),
    (reweighted(torch.ones(7)), "scales_with_weights", {"task": "classification", "reweight": reweighted}),
    (softmax_twice, "matches_reference", {"reference": cross_entropy}),
]
