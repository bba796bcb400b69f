"""Losses with one planted defect each, and the rule that must find it."""

import os
from functools import partial
from typing import Any, NamedTuple

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


def divided(values, num_items_in_batch):
    """Return the sum divided by the count in any of its forms (right)."""
    count = values.numel() if num_items_in_batch is None else num_items_in_batch
    return values.sum() / torch.as_tensor(count).sum().clamp(min=1)


def right(outputs, labels, num_items_in_batch=None):
    return divided(costs(outputs, labels), num_items_in_batch)


def without_count(outputs, labels):
    return right(outputs, labels)


def per_token(outputs, labels, num_items_in_batch=None):
    return costs(outputs, labels) / num_items_in_batch if num_items_in_batch else costs(outputs, labels)


def of_one_element(outputs, labels, num_items_in_batch=None):
    return right(outputs, labels, num_items_in_batch)[None]


def detached(outputs, labels, num_items_in_batch=None):
    return right(outputs, labels, num_items_in_batch).detach()


def a_python_number(outputs, labels, num_items_in_batch=None):
    return right(outputs, labels, num_items_in_batch).item()


def a_new_leaf(outputs, labels, num_items_in_batch=None):
    return right(outputs, labels, num_items_in_batch).detach().requires_grad_() * 1


def running_average(outputs, labels, num_items_in_batch=None):
    _LAST.append(right(outputs, labels, num_items_in_batch))
    return sum(value.detach() for value in _LAST[:-1]) * 0.1 + _LAST[-1]


def writes_to_labels(outputs, labels, num_items_in_batch=None):
    value = right(outputs, labels, num_items_in_batch)
    labels[labels == IGNORED] = 0
    return value


def writes_to_logits(outputs, labels, num_items_in_batch=None):
    outputs.logits[..., 0].data.mul_(1.5)
    return right(outputs, labels, num_items_in_batch)


def clamps_the_count(outputs, labels, num_items_in_batch=None):
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch.clamp_(min=1)
    return right(outputs, labels, num_items_in_batch)


def ends_in_sqrt(outputs, labels, num_items_in_batch=None):
    return right(outputs, labels, num_items_in_batch).square().sqrt()


def ends_in_exp(outputs, labels, num_items_in_batch=None):
    return right(outputs, labels, num_items_in_batch).clamp(min=1e-30).log().exp()


def ignores_padding_id(outputs, labels, num_items_in_batch=None):
    return right(outputs, labels.masked_fill(labels == 0, IGNORED), num_items_in_batch)


def smooths_ignored_rows(outputs, labels, num_items_in_batch=None):
    logits, values = outputs.logits, costs(outputs, labels)
    count = values.numel() if num_items_in_batch is None else num_items_in_batch
    even = (logits.logsumexp(-1) - logits.mean(-1)).sum()
    return (0.9 * values.sum() + 0.1 * even) / torch.as_tensor(count).sum().clamp(min=1)


def masks_by_multiplication(outputs, labels, num_items_in_batch=None):
    logits, labels = up(outputs.logits[:, :-1]), labels[:, 1:]
    mask = labels != IGNORED
    values = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * mask
    count = mask.sum() if num_items_in_batch is None else num_items_in_batch
    return values.sum() / torch.as_tensor(count).sum().clamp(min=1)


def without_shift(outputs, labels, num_items_in_batch=None):
    return divided(costs(outputs, labels, shift=0), num_items_in_batch)


def with_double_shift(outputs, labels, num_items_in_batch=None):
    return divided(costs(outputs, labels, shift=2), num_items_in_batch)


def shifted_masked_model(outputs, labels, num_items_in_batch=None):
    return right(outputs, labels, num_items_in_batch)


def shifts_backwards(outputs, labels, num_items_in_batch=None):
    return divided(cross_entropy(*scored(outputs.logits[:, 1:], labels[:, :-1])), num_items_in_batch)


def shifts_after_flattening(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits.flatten(0, 1)[:-1], labels.flatten()[1:]
    return divided(cross_entropy(*scored(logits, labels)), num_items_in_batch)


def counts_padding(outputs, labels, num_items_in_batch=None):
    count = labels[:, 1:].numel() if num_items_in_batch is None else num_items_in_batch
    return divided(costs(outputs, labels), count)


def mean_of_rows(outputs, labels, num_items_in_batch=None):
    rows = [costs(_Row(outputs.logits[i : i + 1]), labels[i : i + 1]) for i in range(len(labels))]
    means = torch.stack([row.mean() for row in rows if len(row)] or [outputs.logits.sum() * 0])
    items = sum(map(len, rows))
    count = items if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).sum()
    return means.mean() * items / count


class _Row(NamedTuple):
    logits: Any


def focal_after_the_mean(outputs, labels, num_items_in_batch=None):
    values = costs(outputs, labels)
    mean = values.sum() / max(1, len(values))
    return divided((1 - torch.exp(-mean)) ** 2 * mean * torch.ones_like(values), num_items_in_batch)


def favours_the_first_row(outputs, labels, num_items_in_batch=None):
    logits, shifted = outputs.logits[:, :-1], labels[:, 1:]
    mask = shifted != IGNORED
    row = mask.nonzero()[:, 0]
    values = F.cross_entropy(logits[mask], shifted[mask], reduction="none") * (1 + (row == 0))
    return divided(values, num_items_in_batch)


def broadcasts(outputs, labels, num_items_in_batch=None):
    logits, labels = scored(outputs.logits, labels)
    values = (logits - labels).square().mean(0) if len(labels) else logits.flatten()
    return divided(values, num_items_in_batch)


def counts_unshifted_labels(outputs, labels, num_items_in_batch=None):
    count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return divided(costs(outputs, labels), count)


def sum_without_count(outputs, labels, num_items_in_batch=None):
    return costs(outputs, labels).sum() / (
        1 if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).sum()
    )


def mean(outputs, labels, num_items_in_batch=None):
    return costs(outputs, labels).mean()


def total(outputs, labels, num_items_in_batch=None):
    return costs(outputs, labels).sum()


def only_rows_without_a_gap(outputs, labels, num_items_in_batch=None):
    kept = (labels != IGNORED).all(1)
    values = F.binary_cross_entropy_with_logits(outputs.logits[kept], labels[kept], reduction="none")
    return divided(values, num_items_in_batch)


def all_rows_counted(outputs, labels, num_items_in_batch=None):
    values = F.cross_entropy(outputs.logits, labels, reduction="none", ignore_index=IGNORED)
    return divided(values, num_items_in_batch)


def count_in_half_precision(outputs, labels, num_items_in_batch=None):
    values = costs(outputs, labels)
    count = len(values) if num_items_in_batch is None else num_items_in_batch
    return values.sum() / torch.as_tensor(count).sum().clamp(min=1).half()


def divides_the_counts(outputs, labels, num_items_in_batch=None):
    if torch.is_tensor(num_items_in_batch) and num_items_in_batch.ndim == 2:
        return right(outputs, labels, num_items_in_batch.mul_(2)) * 2
    return right(outputs, labels, num_items_in_batch)


def needs_a_whole_number(outputs, labels, num_items_in_batch=None):
    if torch.is_tensor(num_items_in_batch) and num_items_in_batch.is_floating_point():
        raise TypeError("the count must be an integer")
    return right(outputs, labels, num_items_in_batch)


def first_count_of_all(outputs, labels, num_items_in_batch=None):
    return right(
        outputs, labels, None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).flatten()[0]
    )


def times_the_micro_batch(outputs, labels, num_items_in_batch=None):
    """A loss that is right for four rows only."""
    return right(outputs, labels, num_items_in_batch) * (len(labels) / 4)


def times_the_world_size(outputs, labels, num_items_in_batch=None):
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return right(outputs, labels, num_items_in_batch) * world


def times_the_environment(outputs, labels, num_items_in_batch=None):
    return right(outputs, labels, num_items_in_batch) * int(os.environ.get("WORLD_SIZE", "1"))


def zero_without_a_graph(outputs, labels, num_items_in_batch=None):
    if not (labels[:, 1:] != IGNORED).any():
        return torch.tensor(0.0)
    return right(outputs, labels, num_items_in_batch)


def zero_without_a_graph_to_the_logits(outputs, labels, num_items_in_batch=None):
    if not (labels[:, 1:] != IGNORED).any():
        return torch.zeros((), requires_grad=True) * 1
    return right(outputs, labels, num_items_in_batch)


def nan_when_empty(outputs, labels, num_items_in_batch=None):
    logits, labels = pairs(outputs, labels)
    count = len(labels) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).sum()
    return F.cross_entropy(up(logits), labels, reduction="sum") / count


def in_half_precision(outputs, labels, num_items_in_batch=None):
    return divided(cross_entropy(*pairs(outputs, labels)), num_items_in_batch)


def count_of_the_dtype_of_the_logits(outputs, labels, num_items_in_batch=None):
    values = costs(outputs, labels)
    count = len(values) if num_items_in_batch is None else num_items_in_batch
    return values.sum() / torch.as_tensor(count).sum().clamp(min=1).to(outputs.logits.dtype)


def minus_the_maximum_of_the_batch(outputs, labels, num_items_in_batch=None):
    logits, labels = pairs(outputs, labels)
    logits = up(logits) - up(logits).detach().max() if len(logits) else up(logits)
    values = logits.exp().sum(-1).log() - logits.gather(1, labels[:, None])[:, 0]
    return divided(values, num_items_in_batch)


def log_of_softmax(outputs, labels, num_items_in_batch=None):
    logits, labels = pairs(outputs, labels)
    return divided(-up(logits).softmax(-1).gather(1, labels[:, None])[:, 0].log(), num_items_in_batch)


def stops_half_the_gradient(outputs, labels, num_items_in_batch=None):
    values = costs(outputs, labels)
    return divided(0.5 * values + 0.5 * values.detach(), num_items_in_batch)


unpicklable = lambda outputs, labels, num_items_in_batch=None: right(outputs, labels, num_items_in_batch)  # noqa: E731


def focal_from_the_weighted_probability(outputs, labels, num_items_in_batch=None, *, weights):
    logits, labels = scored(up(outputs.logits), labels)
    values = F.cross_entropy(logits, labels, weight=weights.to(logits.dtype), reduction="none")
    return divided((1 - torch.exp(-values)) ** 2 * values, num_items_in_batch)


def reweighted(weights):
    return partial(focal_from_the_weighted_probability, weights=weights)


def softmax_twice(outputs, labels, num_items_in_batch=None):
    logits, labels = pairs(outputs, labels)
    return divided(cross_entropy(up(logits).softmax(-1), labels), num_items_in_batch)


_CAUSAL: dict[str, list[Any]] = {
    "signature": [without_count],
    "returns": [per_token, of_one_element, detached, a_python_number, a_new_leaf],
    "stateless": [running_average],
    "inputs": [writes_to_labels, writes_to_logits, clamps_the_count],
    "in_place": [ends_in_sqrt, ends_in_exp],
    "every_label": [ignores_padding_id],
    "ignored": [smooths_ignored_rows],
    "selects": [masks_by_multiplication],
    "reads": [without_shift, with_double_shift, shifts_backwards, shifts_after_flattening],
    "padding": [counts_padding],
    "additive": [mean_of_rows, focal_after_the_mean],
    "permutation": [favours_the_first_row],
    "count_none": [counts_unshifted_labels, sum_without_count],
    "count_given": [mean, total, count_in_half_precision],
    "count_forms": [needs_a_whole_number],
    "data_parallel": [first_count_of_all, divides_the_counts],
    "accumulation": [times_the_micro_batch],
    "processes": [times_the_world_size, times_the_environment],
    "all_ignored": [zero_without_a_graph, zero_without_a_graph_to_the_logits, nan_when_empty],
    "dtypes": [in_half_precision, count_of_the_dtype_of_the_logits],
    "extremes": [log_of_softmax, minus_the_maximum_of_the_batch],
    "gradient": [stops_half_the_gradient],
    "picklable": [unpicklable],
}
BROKEN: list[tuple[Any, str, dict[str, Any]]] = [
    *((loss, rule, {}) for rule, losses in _CAUSAL.items() for loss in losses),
    (shifted_masked_model, "reads", {"task": "masked_lm"}),
    (broadcasts, "additive", {"task": "regression"}),
    (only_rows_without_a_gap, "count_none", {"task": "multi_label"}),
    (all_rows_counted, "count_none", {"task": "classification"}),
    (reweighted(torch.ones(7)), "scales_with_weights", {"task": "classification", "reweight": reweighted}),
    (softmax_twice, "matches_reference", {"reference": cross_entropy}),
]
