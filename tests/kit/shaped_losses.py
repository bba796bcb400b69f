"""Right and broken losses in plain torch for outputs or labels of other shapes."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tests import registry

from . import tasks
from .broken_losses import IGNORED, as_loss, divided, up


def at_full_size(outputs, labels):
    logits = up(outputs["logits"])
    return logits if logits.shape[2:] == labels.shape[1:] else F.interpolate(logits, labels.shape[1:], mode="bilinear")


def pixels(outputs, labels, num_items_in_batch=None):
    mask = labels != IGNORED
    logits = at_full_size(outputs, labels).movedim(1, -1)[mask]
    return divided(F.cross_entropy(logits, labels[mask], reduction="none"), num_items_in_batch)


def averaged_images(outputs, labels, num_items_in_batch=None):
    values = F.cross_entropy(up(outputs["logits"]), labels, reduction="none")
    scored = (labels != IGNORED).flatten(1).sum(1)
    count = scored.sum() if num_items_in_batch is None else num_items_in_batch
    return divided(values.flatten(1).mean(1) * scored, count)


def averaged_pixels(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(at_full_size(outputs, labels), labels)


def both_ends(outputs, labels, num_items_in_batch=None):
    mask = labels != IGNORED
    logits = up(torch.stack([outputs.start_logits, outputs.end_logits], 1))[mask]
    return divided(F.cross_entropy(logits, labels[mask], reduction="none"), num_items_in_batch)


def mean_of_both_ends(outputs, labels, num_items_in_batch=None):
    """The loss of the models in transformers."""
    ends = zip((outputs.start_logits, outputs.end_logits), labels.unbind(1), strict=True)
    return sum(F.cross_entropy(up(logits), places) for logits, places in ends) / 2


def paths(outputs, labels, num_items_in_batch=None, *, reduction="sum"):
    logits = up(outputs.logits)
    lengths = (labels != IGNORED).sum(1)
    kept = lengths > 0
    count = lengths.sum() if num_items_in_batch is None else num_items_in_batch
    if not kept.any():
        return divided(logits[kept].flatten(), count)
    log_probs = logits[kept].log_softmax(-1).transpose(0, 1)
    frames = torch.full((int(kept.sum()),), logits.shape[1])
    values = F.ctc_loss(log_probs, labels[labels != IGNORED], frames, lengths[kept], reduction="none")
    if reduction == "mean":
        return (values / lengths[kept]).mean()
    if reduction == "rows":
        values = values / lengths[kept] * lengths.sum() / kept.sum()
    return divided(values, count)


def squares(outputs, labels, num_items_in_batch=None):
    mask = labels != IGNORED
    return divided((up(outputs.logits)[mask] - labels[mask]).square(), num_items_in_batch)


def means_of_targets(outputs, labels, num_items_in_batch=None):
    """The mean over the targets of a row, as if none were missing."""
    mask = labels != IGNORED
    rows = torch.where(mask, up(outputs.logits) - labels, 0.0).square().sum(1) / mask.sum(1).clamp(min=1)
    return divided(rows, mask.any(1).sum() if num_items_in_batch is None else num_items_in_batch)


def normal(outputs, labels, num_items_in_batch=None):
    mask = labels != IGNORED
    mean, log_variance = up(outputs.logits)[mask].unbind(1)
    values = 0.5 * (log_variance + (labels[mask] - mean) ** 2 / log_variance.exp())
    return divided(values, num_items_in_batch)


def diagonal(similarities, num_items_in_batch):
    targets = torch.arange(len(similarities))
    values = [F.cross_entropy(side, targets, reduction="none") for side in (similarities, similarities.T)]
    if not len(similarities):
        return divided(similarities.flatten(), num_items_in_batch)
    return divided(sum(values) / 2, num_items_in_batch)


def matched(outputs, labels, num_items_in_batch=None):
    kept = labels != IGNORED
    return diagonal(up(outputs["logits_per_text"])[kept][:, kept], num_items_in_batch)


def contrasted_with_ignored_samples(outputs, labels, num_items_in_batch=None):
    kept = labels != IGNORED
    similarities = up(outputs["logits_per_text"])
    values = F.cross_entropy(similarities, torch.arange(len(labels)), reduction="none")[kept]
    return divided(values, num_items_in_batch)


def cosines(outputs, labels, num_items_in_batch=None):
    kept = labels != IGNORED
    queries, keys = (F.normalize(up(outputs[side])[kept], dim=-1) for side in ("queries", "keys"))
    return diagonal(queries @ keys.T / 0.1, num_items_in_batch)


def cosines_masked_afterwards(outputs, labels, num_items_in_batch=None):
    kept = labels != IGNORED
    queries, keys = (F.normalize(up(outputs[side]), dim=-1) for side in ("queries", "keys"))
    similarities = (queries @ keys.T / 0.1).masked_fill(~(kept[:, None] & kept), -1e9)
    return divided(F.cross_entropy(similarities, torch.arange(len(labels)), reduction="none")[kept], num_items_in_batch)


def triplets(outputs, labels, num_items_in_batch=None):
    kept = labels != IGNORED
    points, ids = up(outputs.logits)[kept], labels[kept]
    costs = [points[:0].sum()]
    for i in range(len(ids)):
        same = [(points[i] - points[j]).norm() for j in range(len(ids)) if j != i and ids[j] == ids[i]]
        others = [(points[i] - points[j]).norm() for j in range(len(ids)) if ids[j] != ids[i]]
        if same and others:
            costs.append(F.relu(0.2 + torch.stack(same).max() - torch.stack(others).min()))
    return divided(torch.stack(costs), kept.sum() if num_items_in_batch is None else num_items_in_batch)


def ahead(logits, labels, shift, reduction="sum"):
    labels = labels[:, shift:]
    mask = labels != IGNORED
    return F.cross_entropy(up(logits)[:, : labels.shape[1]][mask], labels[mask], reduction=reduction)


def next_tokens(labels, num_items_in_batch):
    count = (labels[:, 1:] != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return torch.as_tensor(count).sum().clamp(min=1)


def heads(outputs, labels, num_items_in_batch=None, *, shifts=(1, 2)):
    parts = [ahead(outputs[name], labels, shift) for name, shift in zip(("logits", "further"), shifts, strict=True)]
    return (parts[0] + 0.3 * parts[1]) / next_tokens(labels, num_items_in_batch)


def each_head_by_its_count(outputs, labels, num_items_in_batch=None):
    first = ahead(outputs["logits"], labels, 1) / next_tokens(labels, num_items_in_batch)
    return first + 0.3 * ahead(outputs["further"], labels, 2) / next_tokens(labels[:, 1:], num_items_in_batch)


def balanced(outputs, labels, num_items_in_batch=None):
    items = int((labels[:, 1:] != IGNORED).sum())
    total = ahead(outputs["logits"], labels, 1) + 0.1 * items * float(outputs["aux_loss"])
    return total / next_tokens(labels, num_items_in_batch)


def undivided_router_loss(outputs, labels, num_items_in_batch=None):
    """The loss of the models in transformers."""
    return ahead(outputs["logits"], labels, 1) / next_tokens(labels, num_items_in_batch) + 0.1 * outputs["aux_loss"]


def divergences(outputs, labels, *, masked=True):
    ids = labels["labels"][:, 1:]
    mask = ids != IGNORED if masked else torch.ones_like(ids, dtype=torch.bool)
    student, teacher = (up(logits[:, :-1])[mask] for logits in (outputs.logits, labels["teacher_logits"]))
    log_p, log_q = student.log_softmax(-1), teacher.to(student.dtype).log_softmax(-1)
    return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)


def taught(outputs, labels, num_items_in_batch=None):
    return divided(divergences(outputs, labels), num_items_in_batch)


def margins(outputs, labels, *, shift=1, masked=True):
    """Return the margin of each pair between its chosen and rejected completion, and which pairs count."""
    ids = labels["labels"].permute(2, 0, 1).flatten(0, 1)[:, shift:]
    mask = ids != IGNORED
    log_probs = up(outputs["logits"])[:, : ids.shape[1]].log_softmax(-1)
    found = log_probs.gather(-1, ids.clamp(min=0)[..., None])[..., 0]
    sums = (torch.where(mask, found, 0.0) if masked else found).sum(1).view(2, -1)
    reference = torch.stack([labels["reference_chosen"], labels["reference_rejected"]]).to(sums.dtype)
    return (sums - reference)[0] - (sums - reference)[1], mask.any(1).view(2, -1).all(0)


def preferred(outputs, labels, num_items_in_batch=None, **options):
    margin, counted = margins(outputs, labels, **options)
    return divided(-F.logsigmoid(0.1 * margin[counted]), num_items_in_batch)


def empty_completions_too(outputs, labels, num_items_in_batch=None):
    margin, counted = margins(outputs, labels)
    return divided(-F.logsigmoid(0.1 * margin), counted.sum() if num_items_in_batch is None else num_items_in_batch)


def ranked(outputs, labels, num_items_in_batch=None):
    chosen, rejected = up(outputs["logits"]).view(2, -1)[:, labels != IGNORED]
    return divided(-F.logsigmoid(chosen - rejected), num_items_in_batch)


def neighbors_ranked(outputs, labels, num_items_in_batch=None):
    """As if chosen and rejected rows alternated."""
    chosen, rejected = up(outputs["logits"]).view(-1, 2)[labels != IGNORED].T
    return divided(-F.logsigmoid(chosen - rejected), num_items_in_batch)


CONTRASTED = dict.fromkeys(("every_label", "additive", "accumulation"), "contrasts the samples of a call")
COARSE_IMAGES = {"task": tasks.COARSE_IMAGES}
SPANS, FRAMES, TARGETS = {"task": tasks.SPANS}, {"task": tasks.FRAMES}, {"task": tasks.TARGETS}
VARIANCES = {"task": tasks.VARIANCES, "skip": {"extremes": "an exponential"}}
SIMILARITIES = {"task": tasks.SIMILARITIES, "skip": CONTRASTED}
VIEWS = {"task": tasks.VIEWS, "skip": CONTRASTED}
EMBEDDINGS = {"task": tasks.EMBEDDINGS, "skip": CONTRASTED}
TWO_HEADS, ROUTED, REWARDS = {"task": tasks.TWO_HEADS}, {"task": tasks.ROUTED}, {"task": tasks.REWARDS}

RIGHT: list[tuple[Any, dict[str, Any]]] = [
    (pixels, registry.IMAGES),
    (pixels, COARSE_IMAGES),
    (both_ends, SPANS),
    (paths, FRAMES),
    (squares, TARGETS),
    (normal, VARIANCES),
    (matched, SIMILARITIES),
    (cosines, VIEWS),
    (triplets, EMBEDDINGS),
    (heads, TWO_HEADS),
    (balanced, ROUTED),
    (taught, registry.TAUGHT),
    (preferred, registry.COMPLETIONS),
    (ranked, REWARDS),
]
# (the task, the rule, the defect that breaks it first, a function of the outputs x, the labels y and the count n)
_BROKEN: list[tuple[dict[str, Any], str, str, Any]] = [
    (registry.IMAGES, "count_given", "averaged pixels", averaged_pixels),
    (registry.IMAGES, "padding", "all pixels counted", lambda x, y, n: pixels(x, y, y.numel() if n is None else n)),
    (registry.IMAGES, "padding", "averaged images", averaged_images),
    (registry.IMAGES, "reads", "pixels from above", lambda x, y, n: pixels({"logits": x["logits"].roll(1, -2)}, y, n)),
    (registry.IMAGES, "ignored", "pixels from the left", lambda x, y,
     n: pixels({"logits": x["logits"].roll(1, -1)}, y, n)),
    (COARSE_IMAGES, "selects", "averaged pixels", averaged_pixels),
    (SPANS, "count_given", "mean of both ends", mean_of_both_ends),
    (SPANS, "count_none", "missing ends counted", lambda x, y, n: both_ends(x, y, y.numel() if n is None else n)),
    (SPANS, "count_none", "spans with a start", lambda x, y,
     n: both_ends(x, y.masked_fill(y[:, :1] == IGNORED, IGNORED), n)),
    (SPANS, "ignored", "missing ends at 0", lambda x, y, n: both_ends(x, y.clamp(min=0), n)),
    (FRAMES, "count_given", "mean", partial(paths, reduction="mean")),
    (FRAMES, "additive", "mean of rows", partial(paths, reduction="rows")),
    (TARGETS, "count_none", "means of targets", means_of_targets),
    (VARIANCES, "count_given", "mean of normals", lambda x, y, n: normal(x, y)),
    (SIMILARITIES, "ignored", "mean of matches", lambda x, y, n: diagonal(up(x["logits_per_text"]), None)),
    (SIMILARITIES, "ignored", "contrasted with ignored samples", contrasted_with_ignored_samples),
    (VIEWS, "ignored", "mean of cosines", lambda x, y, n: cosines(x, torch.zeros_like(y))),
    (VIEWS, "selects", "cosines masked afterwards", cosines_masked_afterwards),
    (EMBEDDINGS, "count_given", "mean of active triplets", lambda x, y, n: triplets(x, y, 2)),
    (TWO_HEADS, "reads", "the same shift twice", partial(heads, shifts=(1, 1))),
    (TWO_HEADS, "count_none", "each head by its count", each_head_by_its_count),
    (ROUTED, "count_given", "undivided router loss", undivided_router_loss),
    (ROUTED, "additive", "router loss by rows", lambda x, y,
     n: (ahead(x["logits"], y, 1) + 0.1 * len(y) * x["aux_loss"]) / next_tokens(y, n)),
    (registry.TAUGHT, "count_given", "mean", lambda x, y, n: divergences(x, y).mean()),
    (registry.TAUGHT, "ignored", "prompts too", lambda x, y,
     n: divided(divergences(x, y, masked=False), next_tokens(y["labels"], n))),
    (registry.COMPLETIONS, "reads", "unshifted", partial(preferred, shift=0)),
    (registry.COMPLETIONS, "ignored", "unmasked", partial(preferred, masked=False)),
    (registry.COMPLETIONS, "count_given", "mean", lambda x, y, n: -F.logsigmoid(0.1 * margins(x, y)[0]).mean()),
    (registry.COMPLETIONS, "additive", "empty completions too", empty_completions_too),
    (registry.COMPLETIONS, "count_none", "by tokens", lambda x, y, n: preferred(x, y, next_tokens(y["labels"], n))),
    (REWARDS, "ignored", "mean", lambda x, y, n: ranked(x, torch.zeros_like(y))),
    (REWARDS, "ignored", "neighbors ranked", neighbors_ranked),
]  # fmt: skip
BROKEN = [(as_loss(loss, name), rule, options) for options, rule, name, loss in _BROKEN]
