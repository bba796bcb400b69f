"""Losses with one defect each, the task they are for, and the rule that has to name the defect."""

import os
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed
import torch.nn.functional as F

IGNORED = -100
_LAST: list[torch.Tensor] = []


def pairs(outputs, labels, shift=1):
    """Logits and labels that belong together, flattened, without the ignored ones: right."""
    logits = outputs.logits[:, : labels.shape[1] - shift]
    labels = labels[:, shift:]
    return logits[labels != IGNORED], labels[labels != IGNORED]


def costs(outputs, labels, shift=1):
    logits, labels = pairs(outputs, labels, shift)
    return F.cross_entropy(logits.float() if logits.dtype != torch.float64 else logits, labels, reduction="none")


def divided(values, num_items_in_batch):
    """The sum over the count in each of its forms: right."""
    count = values.numel() if num_items_in_batch is None else num_items_in_batch
    return values.sum() / torch.as_tensor(count).sum().clamp(min=1)


def right(outputs, labels, num_items_in_batch=None):
    return divided(costs(outputs, labels), num_items_in_batch)


# --- the call --------------------------------------------------------------------------------------------------------


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


# --- what counts -----------------------------------------------------------------------------------------------------


def ignores_padding_id(outputs, labels, num_items_in_batch=None):
    return right(outputs, labels.masked_fill(labels == 0, IGNORED), num_items_in_batch)


def smooths_ignored_rows(outputs, labels, num_items_in_batch=None):
    logits, values = outputs.logits, costs(outputs, labels)
    count = values.numel() if num_items_in_batch is None else num_items_in_batch
    even = (logits.logsumexp(-1) - logits.mean(-1)).sum()
    return (0.9 * values.sum() + 0.1 * even) / torch.as_tensor(count).sum().clamp(min=1)


def masks_by_multiplication(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1], labels[:, 1:]
    logits = logits if logits.dtype == torch.float64 else logits.float()
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
    logits, labels = outputs.logits[:, 1:], labels[:, :-1]
    values = F.cross_entropy(logits[labels != IGNORED], labels[labels != IGNORED], reduction="none")
    return divided(values, num_items_in_batch)


def shifts_after_flattening(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits.flatten(0, 1)[:-1], labels.flatten()[1:]
    values = F.cross_entropy(logits[labels != IGNORED], labels[labels != IGNORED], reduction="none")
    return divided(values, num_items_in_batch)


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
    logits, labels = outputs.logits[labels != IGNORED], labels[labels != IGNORED]
    values = (logits - labels).square().mean(0) if len(labels) else logits.flatten()
    return divided(values, num_items_in_batch)


# --- the count -------------------------------------------------------------------------------------------------------


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
    """Right for four rows."""
    return right(outputs, labels, num_items_in_batch) * (len(labels) / 4)


def times_the_world_size(outputs, labels, num_items_in_batch=None):
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return right(outputs, labels, num_items_in_batch) * world


def times_the_environment(outputs, labels, num_items_in_batch=None):
    return right(outputs, labels, num_items_in_batch) * int(os.environ.get("WORLD_SIZE", "1"))


def dead_when_empty(outputs, labels, num_items_in_batch=None):
    if not (labels[:, 1:] != IGNORED).any():
        return torch.tensor(0.0)
    return right(outputs, labels, num_items_in_batch)


def zero_cut_off_from_the_model(outputs, labels, num_items_in_batch=None):
    if not (labels[:, 1:] != IGNORED).any():
        return torch.zeros((), requires_grad=True) * 1
    return right(outputs, labels, num_items_in_batch)


def not_a_number_when_empty(outputs, labels, num_items_in_batch=None):
    logits, labels = pairs(outputs, labels)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    count = len(labels) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).sum()
    return F.cross_entropy(logits, labels, reduction="sum") / count


# --- the numbers -----------------------------------------------------------------------------------------------------


def in_half_precision(outputs, labels, num_items_in_batch=None):
    return divided(F.cross_entropy(*pairs(outputs, labels), reduction="none"), num_items_in_batch)


def count_of_the_dtype_of_the_logits(outputs, labels, num_items_in_batch=None):
    values = costs(outputs, labels)
    count = len(values) if num_items_in_batch is None else num_items_in_batch
    return values.sum() / torch.as_tensor(count).sum().clamp(min=1).to(outputs.logits.dtype)


def below_the_largest_of_all(outputs, labels, num_items_in_batch=None):
    logits, labels = pairs(outputs, labels)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits - logits.detach().max() if len(logits) else logits
    values = logits.exp().sum(-1).log() - logits.gather(1, labels[:, None])[:, 0]
    return divided(values, num_items_in_batch)


def log_of_softmax(outputs, labels, num_items_in_batch=None):
    logits, labels = pairs(outputs, labels)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return divided(-logits.softmax(-1).gather(1, labels[:, None])[:, 0].log(), num_items_in_batch)


def stops_half_the_gradient(outputs, labels, num_items_in_batch=None):
    values = costs(outputs, labels)
    return divided(0.5 * values + 0.5 * values.detach(), num_items_in_batch)


unpicklable = lambda outputs, labels, num_items_in_batch=None: right(outputs, labels, num_items_in_batch)  # noqa: E731


def focal_from_the_weighted_probability(outputs, labels, num_items_in_batch=None, *, weights):
    logits = outputs.logits if outputs.logits.dtype == torch.float64 else outputs.logits.float()
    mask = labels != IGNORED
    values = F.cross_entropy(logits[mask], labels[mask], weight=weights.to(logits.dtype), reduction="none")
    return divided((1 - torch.exp(-values)) ** 2 * values, num_items_in_batch)


def reweighted(weights):
    return partial(focal_from_the_weighted_probability, weights=weights)


def softmax_twice(outputs, labels, num_items_in_batch=None):
    logits, labels = pairs(outputs, labels)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return divided(F.cross_entropy(logits.softmax(-1), labels, reduction="none"), num_items_in_batch)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


BROKEN: list[tuple[Any, str, dict[str, Any]]] = [
    (without_count, "signature", {}),
    (per_token, "returns", {}),
    (of_one_element, "returns", {}),
    (detached, "returns", {}),
    (a_python_number, "returns", {}),
    (a_new_leaf, "returns", {}),
    (running_average, "stateless", {}),
    (writes_to_labels, "inputs", {}),
    (writes_to_logits, "inputs", {}),
    (clamps_the_count, "inputs", {}),
    (ends_in_sqrt, "in_place", {}),
    (ends_in_exp, "in_place", {}),
    (ignores_padding_id, "every_label", {}),
    (smooths_ignored_rows, "ignored", {}),
    (masks_by_multiplication, "selects", {}),
    (without_shift, "reads", {}),
    (with_double_shift, "reads", {}),
    (shifted_masked_model, "reads", {"task": "masked_lm"}),
    (shifts_backwards, "reads", {}),
    (shifts_after_flattening, "reads", {}),
    (counts_padding, "padding", {}),
    (mean_of_rows, "additive", {}),
    (focal_after_the_mean, "additive", {}),
    (favours_the_first_row, "permutation", {}),
    (broadcasts, "additive", {"task": "regression"}),
    (counts_unshifted_labels, "count_none", {}),
    (sum_without_count, "count_none", {}),
    (only_rows_without_a_gap, "count_none", {"task": "multi_label"}),
    (all_rows_counted, "count_none", {"task": "classification"}),
    (mean, "count_given", {}),
    (total, "count_given", {}),
    (count_in_half_precision, "count_given", {}),
    (needs_a_whole_number, "count_forms", {}),
    (first_count_of_all, "data_parallel", {}),
    (divides_the_counts, "data_parallel", {}),
    (times_the_micro_batch, "accumulation", {}),
    (times_the_world_size, "processes", {}),
    (times_the_environment, "processes", {}),
    (dead_when_empty, "all_ignored", {}),
    (zero_cut_off_from_the_model, "all_ignored", {}),
    (not_a_number_when_empty, "all_ignored", {}),
    (in_half_precision, "dtypes", {}),
    (count_of_the_dtype_of_the_logits, "dtypes", {}),
    (log_of_softmax, "extremes", {}),
    (below_the_largest_of_all, "extremes", {}),
    (stops_half_the_gradient, "gradient", {}),
    (unpicklable, "picklable", {}),
    (reweighted(torch.ones(7)), "scales_with_weights", {"task": "classification", "reweight": reweighted}),
    (softmax_twice, "matches_reference", {"reference": cross_entropy}),
]
