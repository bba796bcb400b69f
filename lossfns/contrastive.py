"""Losses that compare the samples of a batch with each other, for the Trainer's `compute_loss_func`.

The negatives of a sample are the others of its micro-batch, on its process. The loss is a sum over samples divided by
the Trainer's count, so that gradient accumulation and processes leave its scale alone, but not its value: 4
micro-batches of 8 contrast each sample with 7 others, one batch of 32 with 31.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._core.alignment import Labels, Outputs, Selector, select_logits, split_labels
from ._core.autograd import autocast_off, disable_compile
from ._core.checks import IGNORED, as_list, check_ids, check_logits
from ._core.normalization import NumItems, divide, item_count
from ._core.rows import compute_dtype
from ._core.signature import check_options
from ._core.sources import FromLogits
from ._core.term_loss import label_loss
from .terms import cross_entropy

Pair = tuple[Tensor, Tensor]
Mining = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # see `batch_hard`


@disable_compile
def clip_loss(
    outputs: Outputs,
    labels: Labels | None = None,
    num_items_in_batch: NumItems = None,
    *,
    select: Selector | None = None,
) -> Tensor:
    """Cross-entropy of each sample's partner among those of the batch, both ways: contrastive image-text pre-training.

    The model's own temperature is in its logits. Gradient accumulation and processes change the negatives, as this
    module says.

    Args:
        outputs: what the model returned: a ModelOutput or dict with `logits_per_text` `(B, B)`, partners on the
            diagonal.
        labels: which samples are the same, `(B,)` integers: equal ids are no negatives of each other; -100 leaves a
            sample out, as a negative too. None: all differ.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms; None counts
            the samples of this call. The Trainer counts, and evaluates, with `labels` in the batch and
            `TrainingArguments(label_names=["labels"])`; without them a step of `n` accumulated micro-batches is `n`
            times too large.
        select: a function of `outputs` that picks or makes similarities `(B, B)`, already divided by a temperature.

    Returns:
        0-d float32 (float64 for float64 logits), nats a sample, mean of both directions.

    Raises:
        ValueError: similarities are missing or not square, labels do not fit, or come in a dict with extras.
        TypeError: labels are not integers.

    Source:
        Radford et al.: Learning Transferable Visual Models From Natural Language Supervision (2021), figure 3.

    Example:
        >>> clip_loss({"logits_per_text": torch.zeros(3, 3)})
        tensor(1.0986)
        >>> clip_loss({"logits_per_text": torch.zeros(3, 3)}, torch.tensor([7, 8, 8]))
        tensor(0.8283)
    """
    found = check_logits(_named(outputs, "logits_per_text") if select is None else select(outputs))
    if found.ndim != 2 or found.shape[0] != found.shape[1]:
        raise ValueError(f"similarities must be (batch, batch), got {tuple(found.shape)}")
    places, ids = _partners(labels, found)
    return _matching(found[places][:, places], ids, num_items_in_batch, symmetric=True)


@disable_compile
def info_nce_loss(
    outputs: Outputs,
    labels: Labels | None = None,
    num_items_in_batch: NumItems = None,
    *,
    select: Callable[[Any], Pair],
    temperature: float = 0.05,
    symmetric: bool = False,
) -> Tensor:
    """Cross-entropy of each query's key among the keys of the batch, by cosine similarity.

    Gradient accumulation and processes change the negatives, as this module says.

    Args:
        outputs: what the model returned.
        labels: as in `clip_loss`.
        num_items_in_batch: as in `clip_loss`.
        select: a function of `outputs` that picks queries and keys, `(B, D)` each.
        temperature: positive; similarities are divided by it.
        symmetric: also find each key's query, and take the mean of both directions.

    Returns:
        0-d float32 (float64 for float64 embeddings), nats a sample.

    Raises:
        ValueError: embeddings or labels do not fit, as in `clip_loss`; the temperature is not positive and finite.
        TypeError: labels are not integers.

    Source:
        van den Oord, Li, Vinyals: Representation Learning with Contrastive Predictive Coding (2018), equation 4.

    Example:
        >>> from operator import itemgetter
        >>> outputs = {"queries": torch.eye(2), "keys": torch.eye(2)}
        >>> info_nce_loss(outputs, select=itemgetter("queries", "keys"), temperature=1.0)
        tensor(0.3133)
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    sides = as_list(select(outputs), "what select returns")
    if len(sides) != 2:
        raise ValueError(f"select returns queries and keys, a pair of tensors; it returned {len(sides)}")
    queries, keys = map(check_logits, sides)
    if queries.ndim != 2 or queries.shape != keys.shape:
        raise ValueError(f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} must be (batch, size) both")
    places, ids = _partners(labels, queries)
    with autocast_off(queries.device):
        units = [F.normalize(side[places].to(compute_dtype(side.dtype)), dim=-1) for side in (queries, keys)]
        similarities = units[0] @ units[1].T / temperature
    return _matching(similarities, ids, num_items_in_batch, symmetric=symmetric)


def _named(outputs: Outputs, name: str) -> Tensor:
    found: Tensor | None = outputs.get(name) if isinstance(outputs, Mapping) else None
    if found is None:
        given = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise ValueError(f"expected an output with {name}, got {given}; select= takes a function that picks it")
    return found


def _partners(labels: Labels | None, samples: Tensor) -> tuple[Tensor | slice, Tensor | None]:
    """As `_counted`; without labels all count, and all differ."""
    return (slice(None), None) if labels is None else _counted(labels, samples)


def _counted(labels: Labels, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the samples that count, and what tells them apart, `(n,)` each on the device of `samples`."""
    ids = _only_ids(labels)
    check_ids(ids)
    if ids.shape != samples.shape[:1]:
        raise ValueError(f"labels {tuple(ids.shape)} must be one id a sample, ({len(samples)},)")
    ids = ids.to(samples.device)
    places = (ids != IGNORED).nonzero().flatten()
    return places, ids[places]


def _only_ids(labels: Labels) -> Tensor:
    ids, extras = split_labels(labels)
    if extras:
        raise ValueError(
            f"contrasts have no term that reads {sorted(extras)} of the dict of labels, which would be dropped: give "
            "the ids alone"
        )
    return ids


def _matching(similarities: Tensor, ids: Tensor | None, num_items_in_batch: NumItems, *, symmetric: bool) -> Tensor:
    """Cross-entropy of the diagonal, by rows, or by rows and columns; what counts as the same is no negative."""
    if not len(similarities):
        nothing = similarities.flatten().to(compute_dtype(similarities.dtype))
        return divide(nothing, item_count(num_items_in_batch, 0, similarities.device))
    targets = torch.arange(len(similarities), device="cpu")
    if ids is not None:
        same = (ids[:, None] == ids).fill_diagonal_(False)
        similarities = similarities.masked_fill(same, -torch.inf)
    if symmetric:
        similarities, targets = torch.cat([similarities, similarities.T]), targets.repeat(2)
        num_items_in_batch = None if num_items_in_batch is None else 2 * num_items_in_batch
    return label_loss(FromLogits(similarities), targets, {}, num_items_in_batch, cross_entropy)


def batch_hard(distances: Tensor, positive: Tensor, negative: Tensor, margin: float) -> Tensor:
    """Cost of the farthest positive against the nearest negative of each anchor.

    Args:
        distances: `(B, B)`.
        positive: which samples are of the anchor's class, without itself, `(B, B)` bool.
        negative: which are of another, `(B, B)` bool.
        margin: by how much a negative has to be farther away.

    Returns:
        `(B,)`; of no meaning for anchors without a positive or a negative.

    Source:
        Hermans, Beyer, Leibe: In Defense of the Triplet Loss for Person Re-Identification (2017), equation 5.

    Example:
        >>> distances = torch.tensor([[0.0, 1.0, 0.5], [1.0, 0.0, 0.5], [0.5, 0.5, 0.0]])
        >>> same = torch.tensor([[True, True, False], [True, True, False], [False, False, True]])
        >>> batch_hard(distances, same ^ torch.eye(3).bool(), ~same, 0.2)[:2]
        tensor([0.7000, 0.7000])
    """
    farthest = distances.masked_fill(~positive, -torch.inf).amax(1)
    nearest = distances.masked_fill(~negative, torch.inf).amin(1)
    return F.relu(margin + farthest - nearest)


def semi_hard(distances: Tensor, positive: Tensor, negative: Tensor, margin: float) -> Tensor:
    """Mean cost of an anchor's positives, each against the nearest negative beyond it, or else the farthest.

    Args:
        distances: as in `batch_hard`.
        positive: as in `batch_hard`.
        negative: as in `batch_hard`.
        margin: as in `batch_hard`.

    Returns:
        As `batch_hard`.

    Source:
        Schroff, Kalenichenko, Philbin: FaceNet (2015), section 3.2.

    Example:
        >>> distances = torch.tensor([[0.0, 1.0, 1.1], [1.0, 0.0, 0.5], [1.1, 0.5, 0.0]])
        >>> same = torch.tensor([[True, True, False], [True, True, False], [False, False, True]])
        >>> semi_hard(distances, same ^ torch.eye(3).bool(), ~same, 0.2)[:2]
        tensor([0.1000, 0.7000])
    """
    beyond = negative[:, None] & (distances[:, None] > distances[:, :, None])  # anchor, positive, negative
    nearest = distances[:, None].masked_fill(~beyond, torch.inf).amin(2)
    farthest = distances.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
    costs = F.relu(margin + distances - torch.where(beyond.any(2), nearest, farthest))
    return costs.where(positive, 0).sum(1) / positive.sum(1).clamp(min=1)


@disable_compile
def triplet_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    mining: Mining = batch_hard,
    margin: float = 0.2,
    select: Selector | None = None,
) -> Tensor:
    """How much nearer than a margin the samples of other classes come, by Euclidean distance, than those of one's own.

    Gradient accumulation and processes change the triplets, as this module says.

    Args:
        outputs: what the model returned: a ModelOutput or dict whose `logits` are embeddings, or embeddings `(B, D)`.
        labels: class ids `(B,)`; -100 leaves a sample out.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms; None counts
            those of this call. A sample without another of its class, or of another class, in the batch costs nothing
            and is counted all the same.
        mining: which triplets: `batch_hard` or `semi_hard`.
        margin: by how much a negative has to be farther away than a positive, positive.
        select: a function of `outputs` that picks the embeddings, as `operator.attrgetter("pooler_output")`.

    Returns:
        0-d float32 (float64 for float64 embeddings), a distance; 0 with a live graph when there is no triplet.

    Raises:
        ValueError: labels are missing or do not fit the embeddings, as in `clip_loss`; the margin is not positive.
        TypeError: labels are not integers, or the mining does not return one cost an anchor or has no such option.

    Source:
        See `batch_hard` and `semi_hard`.

    Example:
        >>> embeddings = torch.tensor([[0.0], [1.0], [0.5]])
        >>> triplet_loss(embeddings, torch.tensor([0, 0, 1]), margin=0.2)
        tensor(0.4667)
    """
    if not margin > 0:
        raise ValueError(f"margin must be positive, got {margin}")
    check_options(mining, "mining")
    ids = _only_ids(labels)
    embeddings = select_logits(outputs, ids, select)
    if embeddings.ndim != 2:
        raise ValueError(f"embeddings must be (batch, size), got {tuple(embeddings.shape)}; select= picks them")
    places, ids = _counted(ids, embeddings)
    same = ids[:, None] == ids
    positive, negative = same ^ torch.eye(len(ids), dtype=torch.bool, device=ids.device), ~same
    with autocast_off(embeddings.device):
        x = embeddings[places].to(compute_dtype(embeddings.dtype))
        # The other mode takes differences of squares: near samples lose their digits, and equal ones their gradient.
        distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
        costs = mining(distances, positive, negative, margin) if len(ids) else distances.sum(1)
        if costs.shape != ids.shape:
            raise TypeError(f"mining returned {tuple(costs.shape)} for {len(ids)} anchors, not one cost an anchor")
        costs = costs.where(positive.any(1) & negative.any(1), 0)
        return divide(costs, item_count(num_items_in_batch, len(ids), embeddings.device))
