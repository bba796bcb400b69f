"""Losses that compare the samples of a batch with each other, for the Trainer's `compute_loss_func`.

The negatives of a sample are the other samples of its micro-batch on its process. The loss is a sum over samples
divided by the Trainer's count. Gradient accumulation and several processes therefore keep its scale, but change its
value: 4 micro-batches of 8 contrast each sample with 7 others, one batch of 32 contrasts it with 31.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._core.alignment import Labels, Outputs, Selector, output_entry, select_logits, split_labels
from ._core.autograd import autocast_off, disable_compile
from ._core.checks import IGNORED, as_list, check_ids, check_logits, check_positive
from ._core.normalization import NumItems, divide, item_count
from ._core.rows import compute_dtype
from ._core.signature import check_options
from ._core.sources import FromLogits
from ._core.term_loss import label_loss
from .terms import cross_entropy

QueriesAndKeys = tuple[Tensor, Tensor]
Mining = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # see `batch_hard`


@disable_compile
def clip_loss(
    outputs: Outputs,
    labels: Labels | None = None,
    num_items_in_batch: NumItems = None,
    *,
    select: Selector | None = None,
) -> Tensor:
    """Compute the loss of contrastive language-image pre-training: find each text's image in the batch, and vice versa.

        sum over samples i of -(log softmax(s[i, :])[i] + log softmax(s[:, i])[i]) / 2 / number of samples

    Here s are the similarities, which the model has divided by its temperature. Gradient accumulation and several
    processes change the negatives, as the module's docstring says.

    Args:
        outputs: the model's outputs: a ModelOutput or dict with `logits_per_text` `(B, B)`, whose diagonal holds the
            matching samples.
        labels: integers `(B,)` that say which samples are the same: equal ids are not negatives of each other, and -100
            leaves a sample out, also as a negative. None: all samples differ.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms. None counts
            the samples of this call. The Trainer counts, and evaluates, only with `labels` in the batch and
            `TrainingArguments(label_names=["labels"])`; without them, a step of `n` accumulated micro-batches is `n`
            times too large.
        select: a function of `outputs` that returns similarities `(B, B)`, already divided by a temperature.

    Returns:
        0-d float32 (float64 for float64 logits), nats per sample, the mean of both directions; 0 with a live graph if
        all samples are left out.

    Raises:
        ValueError: similarities are missing or not square; labels do not fit them, or come with extra tensors.
        TypeError: labels are not integers.

    References:
        Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021, figure 3,
        https://arxiv.org/abs/2103.00020

    Example:
        >>> clip_loss({"logits_per_text": torch.zeros(3, 3)})
        tensor(1.0986)
        >>> clip_loss({"logits_per_text": torch.zeros(3, 3)}, torch.tensor([7, 8, 8]))
        tensor(0.8283)
    """
    fix = "Pick the similarities with select="
    similarities = check_logits(output_entry(outputs, "logits_per_text", fix) if select is None else select(outputs))
    if similarities.ndim != 2 or similarities.shape[0] != similarities.shape[1]:
        raise ValueError(f"similarities must have shape (batch, batch), got {tuple(similarities.shape)}")
    kept, ids = _kept_samples(labels, similarities)
    return _matching_loss(similarities[kept][:, kept], ids, num_items_in_batch, symmetric=True)


@disable_compile
def info_nce_loss(
    outputs: Outputs,
    labels: Labels | None = None,
    num_items_in_batch: NumItems = None,
    *,
    select: Callable[[Any], QueriesAndKeys],
    temperature: float = 0.05,
    symmetric: bool = False,
) -> Tensor:
    """Compute the InfoNCE loss by cosine similarity: find each query's key among the keys of the batch.

        sum over samples i of -log softmax(s[i, :])[i] / number of samples
        with s[i, j] = cosine(query i, key j) / temperature

    Gradient accumulation and several processes change the negatives, as the module's docstring says.

    Args:
        outputs: the model's outputs, of any type that `select` reads.
        labels: integers `(B,)` that say which samples are the same: equal ids are not negatives of each other, and -100
            leaves a sample out, also as a negative. None: all samples differ.
        num_items_in_batch: the Trainer's count of labels, as in `clip_loss`. None counts the samples of this call.
        select: a function of `outputs` that returns queries and keys, `(B, D)` each.
        temperature: what the similarities are divided by, > 0 and finite.
        symmetric: whether to find each key's query as well, and return the mean of both directions.

    Returns:
        0-d float32 (float64 for float64 embeddings), nats per sample; 0 with a live graph if all samples are left out.

    Raises:
        ValueError: embeddings or labels do not fit each other; labels come with extra tensors; the temperature is not
            positive and finite.
        TypeError: labels are not integers.

    References:
        van den Oord, Li, Vinyals, "Representation Learning with Contrastive Predictive Coding", 2018, equation 4,
        https://arxiv.org/abs/1807.03748

    Example:
        >>> from operator import itemgetter
        >>> outputs = {"queries": torch.eye(2), "keys": torch.eye(2)}
        >>> info_nce_loss(outputs, select=itemgetter("queries", "keys"), temperature=1.0)
        tensor(0.3133)
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    embeddings = as_list(select(outputs), "the result of select")
    if len(embeddings) != 2:
        raise ValueError(f"select must return two tensors, queries and keys, got {len(embeddings)}")
    queries, keys = map(check_logits, embeddings)
    if queries.ndim != 2 or queries.shape != keys.shape:
        raise ValueError(
            f"queries and keys must both be (batch, size), got {tuple(queries.shape)} and {tuple(keys.shape)}"
        )
    kept, ids = _kept_samples(labels, queries)
    with autocast_off(queries.device):
        units = [F.normalize(side[kept].to(compute_dtype(side.dtype)), dim=-1) for side in (queries, keys)]
        similarities = units[0] @ units[1].T / temperature
    return _matching_loss(similarities, ids, num_items_in_batch, symmetric=symmetric)


def _kept_samples(labels: Labels | None, samples: Tensor) -> tuple[Tensor | slice, Tensor | None]:
    """Return the positions of the samples that are not left out, and their ids `(n,)`; without labels, all and None."""
    if labels is None:
        return slice(None), None
    ids, extras = split_labels(labels)
    if extras:
        raise ValueError(
            f"labels must be the ids alone, got the extra tensors {sorted(extras)}, which this loss does not read"
        )
    check_ids(ids)
    if ids.shape != samples.shape[:1]:
        raise ValueError(f"labels must be one id per sample, of shape ({len(samples)},), got {tuple(ids.shape)}")
    ids = ids.to(samples.device)
    kept = (ids != IGNORED).nonzero().flatten()
    return kept, ids[kept]


def _matching_loss(
    similarities: Tensor, ids: Tensor | None, num_items_in_batch: NumItems, *, symmetric: bool
) -> Tensor:
    """Return the cross-entropy of the diagonal in each row, or the mean over rows and columns.

    Samples of equal ids are not negatives of each other.
    """
    if not len(similarities):
        empty = similarities.flatten().to(compute_dtype(similarities.dtype))
        return divide(empty, item_count(num_items_in_batch, 0, similarities.device))
    targets = torch.arange(len(similarities), device="cpu")
    if ids is not None:
        same = (ids[:, None] == ids).fill_diagonal_(False)
        similarities = similarities.masked_fill(same, -torch.inf)
    if symmetric:
        similarities, targets = torch.cat([similarities, similarities.T]), targets.repeat(2)
        num_items_in_batch = None if num_items_in_batch is None else 2 * num_items_in_batch
    return label_loss(FromLogits(similarities), targets, {}, num_items_in_batch, cross_entropy)


def batch_hard(distances: Tensor, positive: Tensor, negative: Tensor, margin: float) -> Tensor:
    """Compute the triplet loss of each anchor with its farthest positive and its nearest negative.

        max(0, margin + max over positives of distance - min over negatives of distance)

    Args:
        distances: pairwise distances, `(B, B)`, one row per anchor.
        positive: which samples are of the anchor's class, without the anchor itself, `(B, B)` bool.
        negative: which samples are of another class, `(B, B)` bool.
        margin: how much farther a negative should be than a positive, in units of the distances.

    Returns:
        `(B,)`, in units of the distances; undefined for anchors without a positive or without a negative.

    References:
        Hermans, Beyer, Leibe, "In Defense of the Triplet Loss for Person Re-Identification", 2017, equation 5,
        https://arxiv.org/abs/1703.07737

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
    """Compute the triplet loss of each anchor with all its positives, each with a semi-hard negative.

        mean over positives of max(0, margin + distance to the positive - distance to its negative)

    The negative of a positive is the nearest one that is farther away than the positive, or else the farthest of all.

    Args:
        distances: pairwise distances, `(B, B)`, one row per anchor.
        positive: which samples are of the anchor's class, without the anchor itself, `(B, B)` bool.
        negative: which samples are of another class, `(B, B)` bool.
        margin: how much farther a negative should be than a positive, in units of the distances.

    Returns:
        `(B,)`, in units of the distances; undefined for anchors without a positive or without a negative.

    References:
        Schroff, Kalenichenko, Philbin, "FaceNet: A Unified Embedding for Face Recognition and Clustering", 2015,
        section 3.2, https://arxiv.org/abs/1503.03832

    Example:
        >>> distances = torch.tensor([[0.0, 1.0, 1.1], [1.0, 0.0, 0.5], [1.1, 0.5, 0.0]])
        >>> same = torch.tensor([[True, True, False], [True, True, False], [False, False, True]])
        >>> semi_hard(distances, same ^ torch.eye(3).bool(), ~same, 0.2)[:2]
        tensor([0.1000, 0.7000])
    """
    farther = negative[:, None] & (distances[:, None] > distances[:, :, None])  # (anchor, positive, negative)
    nearest = distances[:, None].masked_fill(~farther, torch.inf).amin(2)
    farthest = distances.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
    values = F.relu(margin + distances - torch.where(farther.any(2), nearest, farthest))
    return values.where(positive, 0).sum(1) / positive.sum(1).clamp(min=1)


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
    """Compute the triplet loss by Euclidean distance: samples of a class should be nearer than those of other classes.

        sum over anchors of mining(distances, ...) / number of samples

    Gradient accumulation and several processes change the triplets, as the module's docstring says.

    Args:
        outputs: the model's outputs: a ModelOutput or dict whose `logits` are embeddings, or embeddings `(B, D)`.
        labels: class ids `(B,)`; -100 leaves a sample out.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms. None counts
            the samples of this call. A sample that has no other of its class in the batch, or none of another class,
            has loss 0 and is counted as well.
        mining: which triplets to use: `batch_hard`, `semi_hard`, or a function of the same arguments.
        margin: how much farther a negative should be than a positive, > 0, a distance.
        select: a function of `outputs` that returns the embeddings, such as `operator.attrgetter("pooler_output")`.

    Returns:
        0-d float32 (float64 for float64 embeddings), a distance per sample; 0 with a live graph if there is no triplet.

    Raises:
        ValueError: there are no labels; labels do not fit the embeddings, or come with extra tensors; `margin` is not
            positive.
        TypeError: labels are not integers; `mining` does not return one value per anchor, or binds an unknown option.

    References:
        Hermans, Beyer, Leibe, "In Defense of the Triplet Loss for Person Re-Identification", 2017, equation 5
        (`batch_hard`), https://arxiv.org/abs/1703.07737

        Schroff, Kalenichenko, Philbin, "FaceNet: A Unified Embedding for Face Recognition and Clustering", 2015,
        section 3.2 (`semi_hard`), https://arxiv.org/abs/1503.03832

    Example:
        >>> embeddings = torch.tensor([[0.0], [1.0], [0.5]])
        >>> triplet_loss(embeddings, torch.tensor([0, 0, 1]), margin=0.2)
        tensor(0.4667)
    """
    check_positive(margin, "margin")
    check_options(mining, "mining")
    embeddings = select_logits(outputs, split_labels(labels)[0], select)
    if embeddings.ndim != 2:
        raise ValueError(f"embeddings must be (batch, size), got {tuple(embeddings.shape)}. Pick them with select=")
    kept, ids = _kept_samples(labels, embeddings)
    assert ids is not None  # split_labels has refused missing labels
    same = ids[:, None] == ids
    positive, negative = same ^ torch.eye(len(ids), dtype=torch.bool, device=ids.device), ~same
    with autocast_off(embeddings.device):
        x = embeddings[kept].to(compute_dtype(embeddings.dtype))
        # The other mode subtracts squares: distances of near samples lose digits, and those of equal samples their
        # gradient.
        distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
        values = mining(distances, positive, negative, margin) if len(ids) else distances.sum(1)
        if values.shape != ids.shape:
            raise TypeError(f"mining must return one value per anchor, {tuple(ids.shape)}, got {tuple(values.shape)}")
        values = values.where(positive.any(1) & negative.any(1), 0)
        return divide(values, item_count(num_items_in_batch, len(ids), embeddings.device))
