"""Preferences for the Trainer's `compute_loss_func`: a batch holds the chosen rows, then the rejected ones in order.

An objective is a function of a few numbers a pair, bound by name like a term: `chosen` and `rejected` (summed
log-probabilities of the two completions, or scores of a reward model), `chosen_tokens` and `rejected_tokens`, and extra
tensors of the dict of labels, above all `reference_chosen` and `reference_rejected`. All pairs of a call come at once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._core.alignment import Alignment, Labels, Outputs, Selector, align, select_logits, split_labels
from ._core.autograd import autocast_off, disable_compile
from ._core.checks import IGNORED, MARKERS, check_positive, check_smoothing, check_unit, integer
from ._core.combined import scaled
from ._core.hidden import HiddenStates
from ._core.normalization import NumItems, accumulator_dtype, item_count
from ._core.rows import Rows, compute_dtype
from ._core.signature import Term, name_of, parameters
from ._core.sources import open_source
from ._core.term_loss import Source, bind
from ._core.units import check_pairs
from .collators.wrapper import Batch, Collator, collated
from .terms import probability_missed

STATISTICS = ("chosen", "rejected", "chosen_tokens", "rejected_tokens")


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, centering: float = 0.0) -> Tensor:
    """Negative log-probability that the chosen one wins, from the scores of a reward model.

    Args:
        chosen: scores of the chosen rows, `(n,)`, logits.
        rejected: scores of the rejected rows, `(n,)`.
        margin: by how much the chosen one has to win, a number or `(n,)`. For one that travels in the dict of labels
            bind it by name: `def objective(chosen, rejected, margin): return bradley_terry(..., margin=margin)`.
        centering: weight of the squared sum of both scores, which keeps their mean near 0.

    Returns:
        `(n,)`, nats.

    Raises:
        TypeError: an option is no number.

    Source:
        Bradley, Terry: Rank Analysis of Incomplete Block Designs (1952); Touvron et al.: Llama 2 (2023), equation 2,
        for the margin; Eisenstein et al.: Helping or Herding? (2023), section 2.2, for the centering.

    Example:
        >>> bradley_terry(torch.tensor([2.0]), torch.tensor([1.0]))
        tensor([0.3133])
    """
    values = -F.logsigmoid(chosen - rejected - margin)
    if not isinstance(centering, Tensor) and centering == 0:
        return values  # the sum may be infinite, and so is the slope of its square
    return values + centering * (chosen + rejected).square()


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Direct preference optimisation: `bradley_terry` of the implicit rewards. Sums over tokens, not means.

    Args:
        chosen: log-probability of the chosen completion, `(n,)`, nats.
        rejected: log-probability of the rejected completion, `(n,)`, nats.
        reference_chosen: the same under the reference model.
        reference_rejected: the same under the reference model.
        beta: how dear it is to leave the reference, positive.
        label_smoothing: chance that the two were swapped.

    Returns:
        `(n,)`, nats.

    Raises:
        ValueError: `beta` is not positive, or `label_smoothing` is outside `[0, 1]`.
        TypeError: an option is no number.

    Source:
        Rafailov et al.: Direct Preference Optimization (2023), equation 7; Mitchell: A Note on DPO with Noisy
        Preferences (2023), equation 3, for the smoothing.

    Example:
        >>> dpo(torch.tensor([-4.0]), torch.tensor([-9.0]), torch.tensor([-5.0]), torch.tensor([-5.0]), beta=0.1)
        tensor([0.4741])
    """
    check_positive(beta, "beta")
    check_smoothing(label_smoothing)
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return scaled(1 - label_smoothing, -F.logsigmoid(margin)) + scaled(label_smoothing, -F.logsigmoid(-margin))


def ipo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """Identity preference optimisation: squared distance of the difference of log-ratios from `1 / (2 beta)`.

    Log-ratios are means over the tokens of each completion, as the authors have it; the paper writes sums.

    Args:
        chosen: as for `dpo`.
        rejected: as for `dpo`.
        reference_chosen: as for `dpo`.
        reference_rejected: as for `dpo`.
        chosen_tokens: tokens of the chosen completion, `(n,)`.
        rejected_tokens: tokens of the rejected completion, `(n,)`.
        beta: strength of the regularisation, positive; `tau` in the paper.

    Returns:
        `(n,)`, squared nats.

    Raises:
        ValueError: `beta` is not positive.
        TypeError: an option is no number.

    Source:
        Azar et al.: A General Theoretical Paradigm to Understand Learning from Human Preferences (2023), equation 17.

    Example:
        >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
        >>> ipo(-one, -two, -one, -one, one, two, beta=0.5)
        tensor([0.2500])
    """
    check_positive(beta, "beta")
    ratio = (chosen - reference_chosen) / chosen_tokens - (rejected - reference_rejected) / rejected_tokens
    return (ratio - 1 / (2 * beta)).square()


def simpo(
    chosen: Tensor,
    rejected: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> Tensor:
    """Simple preference optimisation: `bradley_terry` of mean log-probabilities a token, without a reference.

    Args:
        chosen: as for `dpo`.
        rejected: as for `dpo`.
        chosen_tokens: as for `ipo`.
        rejected_tokens: as for `ipo`.
        beta: factor of the means, positive.
        gamma: by how much the chosen one has to win, after the factor.

    Returns:
        `(n,)`, nats.

    Raises:
        ValueError: `beta` is not positive.
        TypeError: an option is no number.

    Source:
        Meng, Xia, Chen: SimPO: Simple Preference Optimization with a Reference-Free Reward (2024), equation 6.

    Example:
        >>> one = torch.tensor([1.0])
        >>> simpo(-one, -2 * one, one, one, beta=2.0, gamma=1.0)
        tensor([0.3133])
    """
    check_positive(beta, "beta")
    good, bad = beta * chosen / chosen_tokens, beta * rejected / rejected_tokens
    return bradley_terry(good, bad, margin=gamma)


def orpo(
    chosen: Tensor, rejected: Tensor, chosen_tokens: Tensor, rejected_tokens: Tensor, *, weight: float = 0.1
) -> Tensor:
    """Odds ratio preference optimisation: likelihood of the chosen completion, and odds above those of the other.

    Both parts are of mean log-probabilities a token: the likelihood as the mean over its tokens, pair by pair.

    Args:
        chosen: as for `dpo`.
        rejected: as for `dpo`.
        chosen_tokens: as for `ipo`.
        rejected_tokens: as for `ipo`.
        weight: of the log-odds ratio; lambda in the paper.

    Returns:
        `(n,)`, nats.

    Raises:
        TypeError: an option is no number.

    Source:
        Hong, Lee, Thorne: ORPO: Monolithic Preference Optimization without Reference Model (2024), equations 4 to 7.

    Example:
        >>> half, tenth, one = torch.tensor([0.5]).log(), torch.tensor([0.1]).log(), torch.tensor([1.0])
        >>> orpo(half, tenth, one, one, weight=1.0)
        tensor([0.7985])
    """
    good, bad = chosen / chosen_tokens, rejected / rejected_tokens
    return -good + scaled(weight, bradley_terry(_log_odds(good), _log_odds(bad)))


def cpo(chosen: Tensor, rejected: Tensor, chosen_tokens: Tensor, *, beta: float = 0.1, weight: float = 1.0) -> Tensor:
    """Contrastive preference optimisation: `dpo` without a reference, and likelihood of the chosen completion.

    The preference is of sums over tokens, the likelihood a mean over them, which the paper leaves open.

    Args:
        chosen: as for `dpo`.
        rejected: as for `dpo`.
        chosen_tokens: as for `ipo`.
        beta: factor of the difference, positive.
        weight: of the likelihood.

    Returns:
        `(n,)`, nats.

    Raises:
        ValueError: `beta` is not positive.
        TypeError: an option is no number.

    Source:
        Xu et al.: Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation
        (2024), equations 4 and 5.

    Example:
        >>> cpo(torch.tensor([-2.0]), torch.tensor([-12.0]), torch.tensor([2.0]), beta=0.1)
        tensor([1.3133])
    """
    check_positive(beta, "beta")
    return bradley_terry(beta * chosen, beta * rejected) + scaled(weight, -chosen / chosen_tokens)


def kto(
    log_ratio: Tensor,
    desirable: Tensor,
    reference_point: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimisation of completions of which each is desirable or not. Sums over tokens, not means.

    Args:
        log_ratio: log-probability of the completion less that under the reference model, `(n,)`, nats.
        desirable: `(n,)` bool, or numbers, 0 where it is not.
        reference_point: what a gain is measured from, a number or `(n,)`, nats: the paper's estimate of the divergence
            from the reference model, at least 0. No gradient flows into it.
        beta: risk aversion, positive.
        desirable_weight: lambda of desirable completions.
        undesirable_weight: lambda of undesirable completions.

    Returns:
        `(n,)`, 0 to the weight.

    Raises:
        ValueError: `beta` is not positive.
        TypeError: an option is no number.

    Source:
        Ethayarajh, Xu, Muennighoff, Jurafsky, Kiela: KTO: Model Alignment as Prospect Theoretic Optimization (2024),
        equation 8, with `lambda - v` written as one.

    Example:
        >>> kto(torch.tensor([0.0, 10.0]), torch.tensor([True, False]), 0.0)
        tensor([0.5000, 0.7311])
    """
    check_positive(beta, "beta")
    origin = reference_point
    gain = beta * (log_ratio - torch.as_tensor(origin, dtype=log_ratio.dtype, device=log_ratio.device).detach())
    return torch.where(desirable != 0, desirable_weight * (-gain).sigmoid(), undesirable_weight * gain.sigmoid())


def paired_kto(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """`kto` of both completions of each pair: the chosen one is desirable, the rejected one not.

    Each half is measured from the mean log-ratio of the other half of the call, at least 0. That mixes the pairs of a
    call, so that the value depends on how a window is cut into micro-batches.

    Args:
        chosen: as for `dpo`.
        rejected: as for `dpo`.
        reference_chosen: as for `dpo`.
        reference_rejected: as for `dpo`.
        beta: as for `kto`.
        desirable_weight: as for `kto`.
        undesirable_weight: as for `kto`.

    Returns:
        `(n,)`: the sum of both values.

    Raises:
        ValueError: `beta` is not positive.

    Source:
        Ethayarajh et al.: KTO (2024), section 4.2, and its first public implementation for pairs.

    Example:
        >>> paired_kto(torch.tensor([-4.0]), torch.tensor([-9.0]), torch.tensor([-5.0]), torch.tensor([-5.0]))
        tensor([0.8526])
    """
    good, bad = chosen - reference_chosen, rejected - reference_rejected
    ratios = torch.cat([good, bad])
    halves = [half.mean().clamp(min=0).expand_as(half) for half in (bad, good)]
    values = kto(
        ratios,
        torch.arange(len(ratios), device=ratios.device) < len(good),
        torch.cat(halves),
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    return values[: len(good)] + values[len(good) :]


def _log_odds(log_prob: Tensor) -> Tensor:
    """`log(p / (1 - p))`, finite at `p = 1`."""
    return log_prob - probability_missed(log_prob).log()


@disable_compile
def sequence_log_probs(
    outputs: Outputs,
    labels: Labels,
    *,
    shift: int = 1,
    select: Selector | None = None,
    source: HiddenStates | None = None,
) -> dict[str, Tensor]:
    """Log-probability of each row's labels together; differentiable, without a copy of the logits.

    Args:
        outputs: what the model returned: a ModelOutput or dict with `logits`, a tuple, or logits `(B, L, V)`.
        labels: ids `(B, S)`, -100 where nothing is scored; or `{"labels": ids, ...}`.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        select: a function of `outputs` that picks the logits.
        source: `hidden_states(model)`: read hidden states and head instead of logits.

    Returns:
        `log_prob` `(B,)`, nats; `tokens` `(B,)`, scored labels; `mean_log_prob` `(B,)`, their ratio, 0 for a row
        without labels; `token_log_prob` `(B, S)`, 0 where nothing is scored. float32 (float64 for float64 logits).

    Raises:
        ValueError, TypeError: as for `causal_lm_loss`.

    Example:
        >>> found = sequence_log_probs(torch.zeros(1, 3, 4), torch.tensor([[-100, 2, 1]]))
        >>> found["log_prob"], found["mean_log_prob"]
        (tensor([-2.7726]), tensor([-1.3863]))
    """
    ids, _ = split_labels(labels)
    opened = open_source(outputs, ids, select, source)
    pairs = align(opened.like, ids, shift=shift, padded=opened.padded)
    by_token = pairs.scatter(opened.statistics(pairs.rows, ("log_prob",))["log_prob"])
    total, tokens = sequence_sums(by_token, pairs)
    return {
        "log_prob": total.to(by_token.dtype),
        "tokens": tokens.to(by_token.dtype),
        "mean_log_prob": (total / tokens.clamp(min=1)).to(by_token.dtype),
        "token_log_prob": by_token,
    }


def sequence_sums(by_token: Tensor, pairs: Alignment) -> tuple[Tensor, Tensor]:
    """Sums over each row of values `(B, S)`, and the number of scored labels, `(B,)` each, float64."""
    dtype = accumulator_dtype(by_token.device)
    scored = pairs.scatter(torch.ones_like(pairs.positions, dtype=dtype))
    return by_token.sum(-1, dtype=dtype), scored.sum(-1)


@disable_compile
def preference_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    objective: Term = dpo,
    shift: int = 1,
    select: Selector | None = None,
    source: HiddenStates | None = None,
) -> Tensor:
    """Mean of an objective over pairs of completions, exact under gradient accumulation and processes.

    Args:
        outputs: what the model returned for `2 n` rows, the chosen ones and then the rejected ones: a ModelOutput or
            dict with `logits`, a tuple, or logits `(2 n, L, V)`.
        labels: what `collators.stack_pairs` makes: `{"labels": ids (n, S, 2), name: numbers (n,)}`, -100 over prompts
            and padding. Ids may also be `(2 n, S)`, for loops of one's own and `collators.count_pairs`.
        num_items_in_batch: the Trainer's count of pairs over the accumulation window, in any of its forms; None counts
            those of this call. A pair counts if both of its completions have a label.
        objective: a function of `chosen`, `rejected` (nats), `chosen_tokens`, `rejected_tokens` and extras by name:
            `dpo`, `ipo`, `simpo`, `orpo`, `cpo`, `paired_kto`.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        select: a function of `outputs` that picks the logits.
        source: `hidden_states(model)`: read hidden states and head instead of logits, which then never exist.

    Returns:
        0-d float32 (float64 for float64 logits); 0 with a live graph when no pair counts.

    Raises:
        ValueError: rows that are no pairs; labels and logits as for `causal_lm_loss`.
        TypeError: the objective asks for something that is neither measured nor in the dict of labels, as the reference
            log-probabilities of `precompute_reference_log_probs`.

    Example:
        >>> logits, ids = torch.zeros(2, 2, 4), torch.tensor([[0, 1], [0, 2]])
        >>> preference_loss(logits, ids, objective=simpo)
        tensor(1.3133)
    """
    ids, extras = split_labels(labels)
    if num_items_in_batch is not None:
        check_unit("pairs", extras)
    if ids.ndim == 2 and MARKERS["pairs"] in extras:
        ids = check_pairs(ids, extras[MARKERS["pairs"]])
    _check_objective(objective, extras, STATISTICS)
    rows = pair_rows(ids)
    opened = open_source(outputs, rows, select, source)
    measured, counted = pair_statistics(opened, rows, shift)
    loss = _pair_loss(measured, counted, extras, num_items_in_batch, objective)
    return loss.to(compute_dtype(opened.like.dtype))


@disable_compile
def reward_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    objective: Term = bradley_terry,
    select: Selector | None = None,
) -> Tensor:
    """Mean of an objective over pairs of scores of a reward model, exact under gradient accumulation and processes.

    Args:
        outputs: what the model returned for `2 n` rows, the chosen ones and then the rejected ones: a ModelOutput or
            dict with `logits`, a tuple, or one score a row, `(2 n, 1)` or `(2 n,)`.
        labels: `(n,)`, -100 where a pair does not count, as `collators.stack_pairs` makes them; or
            `{"labels": labels, name: numbers (n,)}`.
        num_items_in_batch: the Trainer's count of pairs over the accumulation window, in any of its forms; None counts
            those of this call.
        objective: a function of `chosen` and `rejected`, and of extras by name.
        select: a function of `outputs` that picks the scores.

    Returns:
        0-d float32 (float64 for float64 scores); 0 with a live graph when no pair counts.

    Raises:
        ValueError: scores and labels do not fit.
        TypeError: the objective asks for something unknown.

    Example:
        >>> reward_loss(torch.tensor([[2.0], [1.0]]), torch.tensor([0]))
        tensor(0.3133)
    """
    marks, extras = split_labels(labels)
    _check_objective(objective, extras, STATISTICS[:2])
    (chosen, rejected), counted, dtype = score_pairs(outputs, marks, select)
    loss = _pair_loss({"chosen": chosen, "rejected": rejected}, counted, extras, num_items_in_batch, objective)
    return loss.to(compute_dtype(dtype))


def pair_rows(ids: Tensor) -> Tensor:
    """Labels of pairs, `(n, S, 2)` or `(2 n, S)`, as `(2 n, S)`: the chosen rows, then the rejected ones.

    Raises:
        ValueError: another shape.
    """
    if ids.ndim == 3 and ids.shape[-1] == 2:
        return ids.permute(2, 0, 1).flatten(0, 1)
    if ids.ndim == 2 and ids.shape[0] % 2 == 0:
        return ids
    raise ValueError(
        f"labels of shape {tuple(ids.shape)} are no pairs: expected (pairs, tokens, 2), as collators.stack_pairs makes "
        "them, or an even number of rows, the chosen ones first"
    )


def pair_statistics(opened: Source, rows: Tensor, shift: int) -> tuple[dict[str, Tensor], Tensor]:
    """What objectives know of each pair, `(n,)` each by name, and which pairs count, `(n,)` bool on the host.

    Args:
        opened: where the logits come from.
        rows: labels `(2 n, S)`.
        shift: the label at `i` is predicted by the logit at `i - shift`.
    """
    pairs = align(opened.like, rows, shift=shift, padded=opened.padded)
    by_token = pairs.scatter(opened.statistics(pairs.rows, ("log_prob",))["log_prob"])
    totals, tokens = (values.view(2, -1) for values in sequence_sums(by_token, pairs))
    labelled = pairs.rows.index.div(opened.like.shape[1], rounding_mode="floor")
    counted = torch.zeros(len(rows), dtype=torch.bool, device="cpu").index_fill_(0, labelled, True).view(2, -1).all(0)
    return dict(zip(STATISTICS, (*totals, *tokens), strict=True)), counted


def score_pairs(outputs: Outputs, marks: Tensor, select: Selector | None) -> tuple[Tensor, Tensor, torch.dtype]:
    """Scores of chosen and rejected rows `(2, n)` float64, which pairs count `(n,)` bool on the host, and their dtype.

    Raises:
        ValueError: not one score for each of `2 n` rows and one label for each of `n` pairs.
    """
    scores = select_logits(outputs, marks.repeat(2) if marks.ndim == 1 else None, select)
    if marks.ndim != 1 or scores.shape not in ((2 * len(marks), 1), (2 * len(marks),)):
        raise ValueError(
            f"scores {tuple(scores.shape)} and labels {tuple(marks.shape)} do not fit: expected one score a row, the "
            "chosen ones first, and one label a pair, as collators.stack_pairs makes them; num_labels=1 gives a score"
        )
    pairs = scores.reshape(2, -1).to(accumulator_dtype(scores.device))
    return pairs, marks.detach().cpu() != IGNORED, scores.dtype


def _check_objective(objective: Term, extras: dict[str, Tensor], statistics: Sequence[str]) -> None:
    """Raise TypeError where an objective asks for what is neither measured nor among the extras."""
    missing = [name for name in parameters(objective) if name.startswith("reference_") and name not in extras]
    if missing:
        raise TypeError(
            f"{name_of(objective)} asks for {', '.join(missing)}, which the dict of labels lacks: train on "
            "precompute_reference_log_probs(model, dataset, collator), with the collator stack_pairs(...)"
        )
    parameters(objective, extras, statistics)


def _pair_loss(
    measured: dict[str, Tensor],
    counted: Tensor,
    extras: dict[str, Tensor],
    num_items_in_batch: NumItems,
    objective: Term,
) -> Tensor:
    """Bind the objective to the pairs that count, sum and divide."""
    there, device = counted.nonzero().flatten(), measured["chosen"].device
    moved = there.to(device, non_blocking=True)
    pairs = Alignment(Rows(there, moved, None), moved, counted.shape)
    bound = bind(objective, pairs, extras, statistics=tuple(measured))
    count = item_count(num_items_in_batch, len(there), device)
    with autocast_off(device):
        return bound.total({name: measured[name][moved] for name in bound.fields}, count)


NAMES = ("reference_chosen", "reference_rejected")


@dataclass(frozen=True, repr=False)
class WithReference:
    """A dataset of pairs whose items carry the two log-probabilities of a reference model.

    Attributes:
        dataset: items `{"chosen": row, "rejected": row, ...}`.
        log_probs: `(N, 2)`, nats.
    """

    dataset: Sequence[Mapping[str, Any]]
    log_probs: Tensor

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.dataset[index], **dict(zip(NAMES, self.log_probs[index], strict=True))}

    def __repr__(self) -> str:
        return f"WithReference({len(self)} pairs)"


def precompute_reference_log_probs(
    model: nn.Module,
    dataset: Sequence[Mapping[str, Any]],
    collator: Collator,
    *,
    shift: int = 1,
    batch_size: int = 8,
    cache: str | PathLike[str] | None = None,
    source: HiddenStates | None = None,
) -> WithReference:
    """Score every pair under the reference model, so that DPO runs without it.

    Call it before training, with the model that is about to be trained, or with the adapters of PEFT switched off
    (`with model.disable_adapter():`), and where it matters under the autocast of training. It runs in eval mode.

    Args:
        model: the reference, on the device it is to run on.
        dataset: one item a pair, `{"chosen": row, "rejected": row}`.
        collator: `stack_pairs(...)`, the one of the training.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        batch_size: pairs in a batch.
        cache: a file; if it is there it is read instead and its first batch scored again, and it is written if not.
        source: `hidden_states(model)`: the logits of a batch never exist.

    Returns:
        The dataset with `reference_chosen` and `reference_rejected` (0-d tensors, nats) in every item, where
        `stack_pairs` and `dpo` find them; float32 (float64 for float64 logits).

    Raises:
        ValueError: an item is no pair, `batch_size` below 1; the cache cannot be read, its folder is not there, or it
            was made from other data, or by another model or forward; labels and logits as for `sequence_log_probs`.
        TypeError: as `sequence_log_probs`; the collator returns no dict, the dataset has no length or no items by
            number, `batch_size` is no int.

    Example:
        >>> from lossfns.collators import stack_pairs
        >>> class Uniform(nn.Module):
        ...     def forward(self, input_ids): return torch.zeros(*input_ids.shape, 4)
        >>> pad = lambda rows: {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows)}
        >>> pairs = [{"chosen": [1, 2], "rejected": [1, 3]}]
        >>> precompute_reference_log_probs(Uniform(), pairs, stack_pairs(pad, shift=1))[0]["reference_chosen"]
        tensor(-1.3863)
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(f"dataset must have a length and items by number, got a {type(dataset).__name__}")
    if integer(batch_size, "batch_size") < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if cache is not None:
        _check_place(Path(cache))
    made_from = _fingerprint(model, _batches(dataset, collator, batch_size, "hashing"), (shift,)) if cache else ""
    with _evaluating(model):
        if cache is not None and Path(cache).exists():
            log_probs = _load(Path(cache), made_from)
            if len(dataset):
                first = collated(collator, [dataset[index] for index in range(min(batch_size, len(dataset)))])
                _check_forward(Path(cache), log_probs, _score(model, first, shift, source))
            return WithReference(dataset, log_probs)
        parts = [_score(model, batch, shift, source) for batch in _batches(dataset, collator, batch_size, "reference")]
    log_probs = torch.cat(parts) if parts else torch.empty(0, 2, device="cpu")
    if cache is not None:
        _save(Path(cache), {"made_from": made_from, "log_probs": log_probs})
    return WithReference(dataset, log_probs)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode in this block; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _batches(dataset: Sequence[Mapping[str, Any]], collator: Collator, batch_size: int, what: str) -> Iterator[Batch]:
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    for start in tqdm(range(0, len(dataset), batch_size), desc=f"{what} log-probabilities", unit="batch"):
        yield collated(collator, [dataset[index] for index in range(start, min(start + batch_size, len(dataset)))])


@torch.no_grad()
def _score(model: nn.Module, batch: Batch, shift: int, source: HiddenStates | None) -> Tensor:
    """Log-probabilities of one batch of pairs, `(n, 2)` on the host."""
    device = next(iter(model.parameters()), torch.empty(0, device="cpu")).device
    ids, _ = split_labels(batch["labels"])
    outputs = model(
        **{name: value.to(device) for name, value in batch.items() if name not in ("labels", "shift_labels")}
    )
    found = sequence_log_probs(outputs, pair_rows(ids), shift=shift, source=source)
    return found["log_prob"].view(2, -1).T.cpu()


def _fingerprint(model: nn.Module, batches: Iterator[Batch], options: tuple[int, ...]) -> str:
    """A hash of every batch, and of a thousand values of every weight."""
    digest = hashlib.sha256(repr(options).encode())
    for batch in batches:
        for name, value in {**batch, "labels": split_labels(batch["labels"])[0]}.items():
            _digest(digest, name, value)
    for name, value in model.state_dict().items():
        flat = value.detach().flatten()
        _digest(digest, name, flat[:: max(1, flat.numel() // 1000)].double())
    return digest.hexdigest()


def _digest(digest: Any, name: str, value: Tensor) -> None:
    digest.update(f"{name} {tuple(value.shape)}".encode())
    digest.update(value.cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes())


def _check_forward(cache: Path, log_probs: Tensor, own: Tensor) -> None:
    """Raise where the same weights score the first pairs otherwise: adapters on or off are not among the weights."""
    if not torch.allclose(log_probs[: len(own)].to(own), own, rtol=1e-2, equal_nan=True):
        raise ValueError(
            f"the cache {cache} was made by another forward of the same weights: with adapters switched on or off "
            "(model.disable_adapter()), or in another precision. Delete it, or name another file"
        )


def _check_place(cache: Path) -> None:
    """Raise ValueError where no cache can be written: before the work, not after it."""
    folder = cache.parent
    if not folder.is_dir() or cache.is_dir():
        raise ValueError(f"the cache {cache} must be a file in a folder that is there: make {folder} first")
    if not cache.exists() and not os.access(folder, os.W_OK):
        raise ValueError(f"the cache {cache} cannot be written: {folder} is read-only")


def _save(cache: Path, kept: Mapping[str, Any]) -> None:
    """Write a cache whole or not at all: another process may look for it meanwhile, or write it too."""
    own = cache.resolve().with_name(f"{uuid4().hex}.part")
    try:
        torch.save(kept, own)
        own.replace(cache.resolve())
    finally:
        own.unlink(missing_ok=True)


def _load(cache: Path, made_from: str) -> Tensor:
    """Log-probabilities out of a cache; raises ValueError where it is none or was made from something else."""
    try:
        kept = torch.load(cache, weights_only=True)
    except Exception as error:  # as many kinds as a file may have bytes
        raise ValueError(f"the cache {cache} cannot be read: it is damaged, or another file. Delete it") from error
    if not isinstance(kept, Mapping) or kept.keys() != {"made_from", "log_probs"}:
        raise ValueError(f"{cache} is no cache of log-probabilities: name another file")
    if kept["made_from"] != made_from:
        raise ValueError(
            f"the cache {cache} was made from other pairs, another collator or batch size, or by another model; delete "
            "it, or name another file"
        )
    log_probs: Tensor = kept["log_probs"]
    return log_probs
