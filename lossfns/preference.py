"""Preference objectives and losses for the Trainer's `compute_loss_func`.

A batch of `n` preference pairs holds the `n` chosen sequences first, then the `n` rejected ones in the same order.

An objective is a function whose parameters are bound by name, like those of a term: `chosen` and `rejected` (summed
log-probabilities of the two completions, or scores of a reward model), `chosen_tokens` and `rejected_tokens`, and extra
tensors of the dict of labels, above all `reference_chosen` and `reference_rejected`. Each has one number per preference
pair, and an objective is called once with all pairs of a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._core.alignment import Alignment, Labels, Outputs, Selector, align, select_logits, split_labels
from ._core.autograd import autocast_off, disable_compile
from ._core.checks import IGNORED, MARKERS, check_positive, check_smoothing, check_unit
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

# What a loss measures of each preference pair, in the order in which `pair_statistics` returns it.
PAIR_STATISTICS = ("chosen", "rejected", "chosen_tokens", "rejected_tokens")
REFERENCE_COLUMNS = ("reference_chosen", "reference_rejected")


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, centering: float = 0.0) -> Tensor:
    """Compute the negative log-probability that the chosen sequence wins, from the scores of a reward model.

        -log(sigmoid(chosen - rejected - margin)) + centering * (chosen + rejected) ** 2

    Args:
        chosen: scores of the chosen sequences, `(n,)`, logits.
        rejected: scores of the rejected sequences, `(n,)`, logits.
        margin: difference of scores that the chosen sequence must exceed, a number or `(n,)`. If it is in the dict
            of labels, bind it by name: `def objective(chosen, rejected, margin)` that calls
            `bradley_terry(chosen, rejected, margin=margin)`.
        centering: weight of the squared sum of both scores, which keeps their mean near 0.

    Returns:
        One value per preference pair, `(n,)`, nats.

    References:
        Bradley, Terry, "Rank Analysis of Incomplete Block Designs: I. The Method of Paired Comparisons", 1952,
        https://doi.org/10.2307/2334029

        Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023, equation 2, for the margin,
        https://arxiv.org/abs/2307.09288

        Eisenstein et al., "Helping or Herding? Reward Model Ensembles Mitigate but do not Eliminate Reward Hacking",
        2023, section 2.2, for the centering, https://arxiv.org/abs/2312.09244

    Example:
        >>> bradley_terry(torch.tensor([2.0]), torch.tensor([1.0]))
        tensor([0.3133])
    """
    values = -F.logsigmoid(chosen - rejected - margin)
    if not isinstance(centering, Tensor) and centering == 0:
        return values  # the sum of scores may be infinite, and then 0 times the gradient of its square is NaN
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
    """Compute direct preference optimization (DPO): `bradley_terry` of the implicit rewards.

        h = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
        -(1 - label_smoothing) * log(sigmoid(h)) - label_smoothing * log(sigmoid(-h))

    Log-probabilities are summed over the tokens of a completion, not averaged.

    Args:
        chosen: log-probability of the chosen completion, `(n,)`, nats.
        rejected: log-probability of the rejected completion, `(n,)`, nats.
        reference_chosen: log-probability of the chosen completion under the reference model, `(n,)`, nats.
        reference_rejected: log-probability of the rejected completion under the reference model, `(n,)`, nats.
        beta: strength of the KL penalty toward the reference model, > 0.
        label_smoothing: probability that the two completions were swapped, in `[0, 1]`.

    Returns:
        One value per preference pair, `(n,)`, nats.

    Raises:
        ValueError: `beta` is not positive, or `label_smoothing` is outside `[0, 1]`.
        TypeError: an option is not a number.

    References:
        Rafailov, Sharma, Mitchell, Ermon, Manning, Finn, "Direct Preference Optimization: Your Language Model is
        Secretly a Reward Model", 2023, equation 7, https://arxiv.org/abs/2305.18290

        Mitchell, "A Note on DPO with Noisy Preferences and Relationship to IPO", 2023, equation 3, for the smoothing,
        https://ericmitchell.ai/cdpo.pdf

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
    """Compute identity preference optimization (IPO): squared distance of the difference of log-ratios from a target.

        ((chosen - reference_chosen) / chosen_tokens
         - (rejected - reference_rejected) / rejected_tokens - 1 / (2 * beta)) ** 2

    The log-ratios are means over the tokens of each completion, as in the authors' code; the paper writes sums.

    Args:
        chosen: log-probability of the chosen completion, `(n,)`, nats.
        rejected: log-probability of the rejected completion, `(n,)`, nats.
        reference_chosen: log-probability of the chosen completion under the reference model, `(n,)`, nats.
        reference_rejected: log-probability of the rejected completion under the reference model, `(n,)`, nats.
        chosen_tokens: number of tokens of the chosen completion, `(n,)`.
        rejected_tokens: number of tokens of the rejected completion, `(n,)`.
        beta: strength of the regularization, > 0; `tau` in the paper.

    Returns:
        One value per preference pair, `(n,)`, squared nats.

    Raises:
        ValueError: `beta` is not positive.
        TypeError: `beta` is not a number.

    References:
        Azar, Rowland, Piot, Guo, Calandriello, Valko, Munos, "A General Theoretical Paradigm to Understand Learning
        from Human Preferences", 2023, equation 17, https://arxiv.org/abs/2310.12036

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
    """Compute simple preference optimization (SimPO): `bradley_terry` of mean log-probabilities per token.

        -log(sigmoid(beta * chosen / chosen_tokens - beta * rejected / rejected_tokens - gamma))

    Args:
        chosen: log-probability of the chosen completion, `(n,)`, nats.
        rejected: log-probability of the rejected completion, `(n,)`, nats.
        chosen_tokens: number of tokens of the chosen completion, `(n,)`.
        rejected_tokens: number of tokens of the rejected completion, `(n,)`.
        beta: factor of the mean log-probabilities, > 0.
        gamma: margin by which the chosen completion has to win, after multiplication by `beta`.

    Returns:
        One value per preference pair, `(n,)`, nats.

    Raises:
        ValueError: `beta` is not positive.
        TypeError: `beta` is not a number.

    References:
        Meng, Xia, Chen, "SimPO: Simple Preference Optimization with a Reference-Free Reward", 2024, equation 6,
        https://arxiv.org/abs/2405.14734

    Example:
        >>> one = torch.tensor([1.0])
        >>> simpo(-one, -2 * one, one, one, beta=2.0, gamma=1.0)
        tensor([0.3133])
    """
    check_positive(beta, "beta")
    return bradley_terry(beta * chosen / chosen_tokens, beta * rejected / rejected_tokens, margin=gamma)


def orpo(
    chosen: Tensor, rejected: Tensor, chosen_tokens: Tensor, rejected_tokens: Tensor, *, weight: float = 0.1
) -> Tensor:
    """Compute odds ratio preference optimization (ORPO): likelihood of the chosen completion plus a log-odds ratio.

        c = chosen / chosen_tokens,  r = rejected / rejected_tokens,  log_odds(x) = x - log(1 - exp(x))
        -c - weight * log(sigmoid(log_odds(c) - log_odds(r)))

    Both parts use mean log-probabilities per token.

    Args:
        chosen: log-probability of the chosen completion, `(n,)`, nats.
        rejected: log-probability of the rejected completion, `(n,)`, nats.
        chosen_tokens: number of tokens of the chosen completion, `(n,)`.
        rejected_tokens: number of tokens of the rejected completion, `(n,)`.
        weight: weight of the log-odds ratio; lambda in the paper.

    Returns:
        One value per preference pair, `(n,)`, nats.

    References:
        Hong, Lee, Thorne, "ORPO: Monolithic Preference Optimization without Reference Model", 2024, equations 4 to 7,
        https://arxiv.org/abs/2403.07691

    Example:
        >>> half, tenth, one = torch.tensor([0.5]).log(), torch.tensor([0.1]).log(), torch.tensor([1.0])
        >>> orpo(half, tenth, one, one, weight=1.0)
        tensor([0.7985])
    """
    good, bad = chosen / chosen_tokens, rejected / rejected_tokens
    return -good + scaled(weight, bradley_terry(_log_odds(good), _log_odds(bad)))


def cpo(chosen: Tensor, rejected: Tensor, chosen_tokens: Tensor, *, beta: float = 0.1, weight: float = 1.0) -> Tensor:
    """Compute contrastive preference optimization (CPO): `dpo` without a reference, plus likelihood of the chosen one.

        -log(sigmoid(beta * (chosen - rejected))) - weight * chosen / chosen_tokens

    The preference part uses sums over tokens, the likelihood their mean, which the paper leaves open.

    Args:
        chosen: log-probability of the chosen completion, `(n,)`, nats.
        rejected: log-probability of the rejected completion, `(n,)`, nats.
        chosen_tokens: number of tokens of the chosen completion, `(n,)`.
        beta: factor of the difference, > 0.
        weight: weight of the likelihood.

    Returns:
        One value per preference pair, `(n,)`, nats.

    Raises:
        ValueError: `beta` is not positive.
        TypeError: `beta` is not a number.

    References:
        Xu, Sharaf, Chen, Tan, Shen, Van Durme, Murray, Kim, "Contrastive Preference Optimization: Pushing the
        Boundaries of LLM Performance in Machine Translation", 2024, equations 4 and 5,
        https://arxiv.org/abs/2401.08417

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
    """Compute Kahneman-Tversky optimization (KTO) of single completions, each labeled desirable or undesirable.

        desirable_weight * sigmoid(-beta * (log_ratio - reference_point))     where desirable
        undesirable_weight * sigmoid(beta * (log_ratio - reference_point))    elsewhere

    Log-probabilities are summed over the tokens of a completion, not averaged.

    Args:
        log_ratio: log-probability of the completion minus that under the reference model, `(n,)`, nats.
        desirable: `(n,)`, bool or numbers, 0 for an undesirable completion.
        reference_point: log-ratio from which gains are measured, a number or `(n,)`, nats: in the paper an estimate of
            the KL divergence from the reference model, at least 0. No gradient flows into it.
        beta: risk aversion, > 0.
        desirable_weight: weight of desirable completions; lambda_D in the paper.
        undesirable_weight: weight of undesirable completions; lambda_U in the paper.

    Returns:
        One value per completion, `(n,)`, between 0 and its weight.

    Raises:
        ValueError: `beta` is not positive.
        TypeError: an option is not a number.

    References:
        Ethayarajh, Xu, Muennighoff, Jurafsky, Kiela, "KTO: Model Alignment as Prospect Theoretic Optimization", 2024,
        equation 8, where the value is written `lambda - v`, https://arxiv.org/abs/2402.01306

    Example:
        >>> kto(torch.tensor([0.0, 10.0]), torch.tensor([True, False]), 0.0)
        tensor([0.5000, 0.7311])
    """
    check_positive(beta, "beta")
    origin = torch.as_tensor(reference_point, dtype=log_ratio.dtype, device=log_ratio.device).detach()
    gain = beta * (log_ratio - origin)
    return torch.where(desirable != 0, desirable_weight * (-gain).sigmoid(), undesirable_weight * gain.sigmoid())


def _log_odds(log_prob: Tensor) -> Tensor:
    """Return `log(p / (1 - p))`, finite at `p = 1`."""
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
    """Compute the log-probability of each sequence of labels; differentiable, and without a copy of the logits.

        log p(labels) = sum_i log p(labels[i] | inputs before i)

    Args:
        outputs: what the model returned: a ModelOutput or dict with `logits`, a tuple, or logits `(B, L, V)`.
        labels: ids `(B, S)`, -100 at positions that are not scored; or `{"labels": ids, ...}`.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        select: a function of `outputs` that picks the logits.
        source: `hidden_states(model)`: read hidden states and head instead of logits.

    Returns:
        `log_prob` `(B,)`, nats; `tokens` `(B,)`, number of scored labels; `mean_log_prob` `(B,)`, nats per token, 0 for
        a sequence without labels; `token_log_prob` `(B, S)`, nats, 0 where a label is not scored. All are float32
        (float64 for float64 logits).

    Raises:
        ValueError, TypeError: as for `causal_lm_loss`.

    References:
        Bengio, Ducharme, Vincent, Jauvin, "A Neural Probabilistic Language Model", 2003,
        https://www.jmlr.org/papers/v3/bengio03a.html

    Example:
        >>> found = sequence_log_probs(torch.zeros(1, 3, 4), torch.tensor([[-100, 2, 1]]))
        >>> found["log_prob"], found["mean_log_prob"]
        (tensor([-2.7726]), tensor([-1.3863]))
    """
    ids, _ = split_labels(labels)
    by_token, total, tokens, _ = _sequence_sums(open_source(outputs, ids, select, source), ids, shift)
    return {
        "log_prob": total.to(by_token.dtype),
        "tokens": tokens.to(by_token.dtype),
        "mean_log_prob": (total / tokens.clamp(min=1)).to(by_token.dtype),
        "token_log_prob": by_token,
    }


def _sequence_sums(opened: Source, ids: Tensor, shift: int) -> tuple[Tensor, Tensor, Tensor, Alignment]:
    """Return log-probabilities `(B, S)`, their float64 sums `(B,)`, the label counts `(B,)` and the alignment."""
    aligned = align(opened.like, ids, shift=shift, padded=opened.padded)
    by_token = aligned.scatter(opened.statistics(aligned.rows, ("log_prob",))["log_prob"])
    dtype = accumulator_dtype(by_token.device)
    scored = aligned.scatter(torch.ones_like(aligned.positions, dtype=dtype))
    return by_token, by_token.sum(-1, dtype=dtype), scored.sum(-1), aligned


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
    """Compute the mean of an objective over pairs of completions, exact under gradient accumulation and DDP.

        sum over preference pairs of objective(...) / number of preference pairs in the accumulation window

    Args:
        outputs: what the model returned for `2 n` sequences, the chosen ones and then the rejected ones: a ModelOutput
            or dict with `logits`, a tuple, or logits `(2 n, L, V)`.
        labels: what `collators.stack_pairs` returns: `{"labels": ids (n, S, 2), name: numbers (n,)}`, -100 over prompts
            and padding. Ids may also be `(2 n, S)`, for custom loops and `collators.count_pairs`.
        num_items_in_batch: the Trainer's count of preference pairs over the accumulation window, in any of its forms;
            None counts those of this call. A pair counts if both of its completions have a label.
        objective: a function of `chosen`, `rejected` (nats), `chosen_tokens`, `rejected_tokens` and extras by name:
            `dpo`, `ipo`, `simpo`, `orpo`, `cpo`, or your own.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        select: a function of `outputs` that picks the logits.
        source: `hidden_states(model)`: read hidden states and head instead of logits, which are then never
            materialized.

    Returns:
        0-d float32 (float64 for float64 logits), in the unit of the objective per preference pair; 0 with a live graph
        when no pair counts.

    Raises:
        ValueError: the sequences do not form pairs; labels and logits as for `causal_lm_loss`.
        TypeError: the objective asks for a tensor that is neither measured nor in the dict of labels, such as the
            reference log-probabilities of `precompute_reference_log_probs`.

    References:
        Rafailov, Sharma, Mitchell, Ermon, Manning, Finn, "Direct Preference Optimization: Your Language Model is
        Secretly a Reward Model", 2023, https://arxiv.org/abs/2305.18290

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
    _check_objective(objective, extras, PAIR_STATISTICS)
    ids = pair_rows(ids)
    opened = open_source(outputs, ids, select, source)
    measured, counted = pair_statistics(opened, ids, shift)
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
    """Compute the mean of an objective over pairs of reward scores, exact under gradient accumulation and DDP.

        sum over preference pairs of objective(...) / number of preference pairs in the accumulation window

    Args:
        outputs: what the model returned for `2 n` sequences, the chosen ones and then the rejected ones: a ModelOutput
            or dict with `logits`, a tuple, or one score per sequence, `(2 n, 1)` or `(2 n,)`.
        labels: `(n,)`, -100 for a pair that does not count, as `collators.stack_pairs` returns them; or
            `{"labels": labels, name: numbers (n,)}`.
        num_items_in_batch: the Trainer's count of preference pairs over the accumulation window, in any of its forms;
            None counts those of this call.
        objective: a function of `chosen` and `rejected`, and of extras by name.
        select: a function of `outputs` that picks the scores.

    Returns:
        0-d float32 (float64 for float64 scores), in the unit of the objective per preference pair; 0 with a live graph
        when no pair counts.

    Raises:
        ValueError: scores and labels do not fit.
        TypeError: the objective asks for an unknown tensor.

    References:
        Ouyang et al., "Training language models to follow instructions with human feedback", 2022, equation 1,
        https://arxiv.org/abs/2203.02155

    Example:
        >>> reward_loss(torch.tensor([[2.0], [1.0]]), torch.tensor([0]))
        tensor(0.3133)
    """
    marks, extras = split_labels(labels)
    _check_objective(objective, extras, PAIR_STATISTICS[:2])
    (chosen, rejected), counted, dtype = score_pairs(outputs, marks, select)
    loss = _pair_loss({"chosen": chosen, "rejected": rejected}, counted, extras, num_items_in_batch, objective)
    return loss.to(compute_dtype(dtype))


def pair_rows(ids: Tensor) -> Tensor:
    """Return the labels of preference pairs, `(n, S, 2)` or `(2 n, S)`, as `(2 n, S)`, the chosen ones first.

    Raises:
        ValueError: the labels have another shape.
    """
    if ids.ndim == 3 and ids.shape[-1] == 2:
        return ids.permute(2, 0, 1).flatten(0, 1)
    if ids.ndim == 2 and ids.shape[0] % 2 == 0:
        return ids
    raise ValueError(
        f"labels must be (pairs, tokens, 2), as stack_pairs makes them, or (2 * pairs, tokens), got {tuple(ids.shape)}"
    )


def pair_statistics(opened: Source, ids: Tensor, shift: int) -> tuple[dict[str, Tensor], Tensor]:
    """Measure the statistics that objectives can ask for, and which preference pairs count.

    Args:
        opened: where the logits come from.
        ids: labels `(2 n, S)`, those of the chosen sequences first.
        shift: the label at `i` is predicted by the logit at `i - shift`.

    Returns:
        One `(n,)` tensor per name of `PAIR_STATISTICS`, and `(n,)` bool on the host.
    """
    _, totals, tokens, aligned = _sequence_sums(opened, ids, shift)
    labeled = aligned.rows.index.div(opened.like.shape[1], rounding_mode="floor")
    counted = torch.zeros(len(ids), dtype=torch.bool, device="cpu").index_fill_(0, labeled, True).view(2, -1).all(0)
    return dict(zip(PAIR_STATISTICS, (*totals.view(2, -1), *tokens.view(2, -1)), strict=True)), counted


def score_pairs(outputs: Outputs, marks: Tensor, select: Selector | None) -> tuple[Tensor, Tensor, torch.dtype]:
    """Return the scores of chosen and rejected sequences, which preference pairs count, and the scores' dtype.

    Args:
        outputs: what the model returned, one score per sequence, the chosen ones first.
        marks: `(n,)`, -100 for a pair that does not count.
        select: a function of `outputs` that picks the scores.

    Returns:
        Scores `(2, n)` float64, `(n,)` bool on the host, and the original dtype of the scores.

    Raises:
        ValueError: there is not one score for each of `2 n` sequences and one label for each of `n` pairs.
    """
    scores = select_logits(outputs, marks.repeat(2) if marks.ndim == 1 else None, select)
    if marks.ndim != 1 or scores.shape not in ((2 * len(marks), 1), (2 * len(marks),)):
        raise ValueError(
            "expected one score per sequence, the chosen ones first, and one label per pair, as collators.stack_pairs "
            f"returns them, got scores {tuple(scores.shape)} and labels {tuple(marks.shape)}; a model with "
            "num_labels=1 returns one score"
        )
    by_side = scores.reshape(2, -1).to(accumulator_dtype(scores.device))
    return by_side, marks.detach().cpu() != IGNORED, scores.dtype


def _check_objective(objective: Term, extras: dict[str, Tensor], statistics: Sequence[str]) -> None:
    """Raise TypeError if an objective asks for something that is neither measured nor among the extras."""
    missing = [name for name in parameters(objective) if name.startswith("reference_") and name not in extras]
    if missing:
        raise TypeError(
            f"{name_of(objective)} asks for {', '.join(missing)}, but the dict of labels does not contain them: train "
            "on precompute_reference_log_probs(model, dataset, collator), with the collator stack_pairs(...)"
        )
    parameters(objective, extras, statistics)


def _pair_loss(
    measured: dict[str, Tensor],
    counted: Tensor,
    extras: dict[str, Tensor],
    num_items_in_batch: NumItems,
    objective: Term,
) -> Tensor:
    """Bind the objective to the preference pairs that count, sum its values and divide by the count."""
    index, device = counted.nonzero().flatten(), measured["chosen"].device
    on_device = index.to(device, non_blocking=True)
    aligned = Alignment(Rows(index, on_device, None), on_device, counted.shape)
    bound = bind(objective, aligned, extras, statistics=tuple(measured))
    count = item_count(num_items_in_batch, len(index), device)
    with autocast_off(device):
        return bound.total({name: measured[name][on_device] for name in bound.fields}, count)


def precompute_reference_log_probs(
    model: nn.Module,
    dataset: Any,
    collator: Collator,
    *,
    shift: int = 1,
    batch_size: int = 8,
    source: HiddenStates | None = None,
) -> Any:
    """Add the log-probabilities of a reference model to a dataset of preference pairs, so that DPO trains without it.

    Call it before training, with the model that is about to be trained, or with the adapters of PEFT switched off
    (`with model.disable_adapter():`), and, where rounding matters, under the autocast of training. The model runs in
    eval mode, without gradient.

    Args:
        model: the reference model, on the device it is to run on.
        dataset: one item per preference pair, `{"chosen": features, "rejected": features}`: a `datasets.Dataset`, a
            list, or any other sequence.
        collator: `stack_pairs(...)`, the same as in training. Values of its batch that are not tensors are passed to
            the model unchanged.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        batch_size: number of preference pairs per batch.
        source: `hidden_states(model)`: the logits of a batch are never materialized.

    Returns:
        The dataset with two more columns, `reference_chosen` and `reference_rejected`, nats, where `stack_pairs` and
        `dpo` find them; columns of these names are replaced. For a `datasets.Dataset` this is a new `datasets.Dataset`,
        whose columns are float32 (float64 for float64 logits); otherwise a list of dicts with a float in each.

    Raises:
        ValueError: an item is not a preference pair, or `batch_size` is below 1; labels and logits as for
            `sequence_log_probs`.
        TypeError: as for `sequence_log_probs`; the collator does not return a dict.

    References:
        Rafailov, Sharma, Mitchell, Ermon, Manning, Finn, "Direct Preference Optimization: Your Language Model is
        Secretly a Reward Model", 2023, https://arxiv.org/abs/2305.18290

    Example:
        >>> from lossfns.collators import stack_pairs
        >>> class Uniform(nn.Module):
        ...     def forward(self, input_ids): return torch.zeros(*input_ids.shape, 4)
        >>> collate = stack_pairs(lambda rows: dict.fromkeys(("input_ids", "labels"), torch.tensor(rows)), shift=1)
        >>> precompute_reference_log_probs(Uniform(), [{"chosen": [1, 2], "rejected": [1, 3]}], collate)
        [{'chosen': [1, 2], 'rejected': [1, 3], 'reference_chosen': -1.3862..., 'reference_rejected': -1.3862...}]
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    with _evaluating(model):
        parts = [_score(model, batch, shift, source) for batch in _batches(dataset, collator, batch_size)]
    log_probs = torch.cat(parts, dim=1) if parts else torch.empty(2, 0, device="cpu")
    datasets = sys.modules.get("datasets")  # an instance of its Dataset exists only if it was imported
    if datasets is None or not isinstance(dataset, datasets.Dataset):
        items = (dataset[index] for index in range(len(dataset)))
        scored = zip(items, log_probs.T.tolist(), strict=True)
        return [{**item, **dict(zip(REFERENCE_COLUMNS, values, strict=True))} for item, values in scored]
    dataset = dataset.remove_columns([name for name in REFERENCE_COLUMNS if name in dataset.column_names])
    for name, values in zip(REFERENCE_COLUMNS, log_probs.numpy(), strict=True):
        dataset = dataset.add_column(name, values)
    return dataset


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, and every module back into its former mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _batches(dataset: Any, collator: Collator, batch_size: int) -> Iterator[Batch]:
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    for start in tqdm(range(0, len(dataset), batch_size), desc="reference log-probabilities", unit="batch"):
        yield collated(collator, [dataset[index] for index in range(start, min(start + batch_size, len(dataset)))])


@torch.no_grad()
def _score(model: nn.Module, batch: Batch, shift: int, source: HiddenStates | None) -> Tensor:
    """Return the log-probabilities of one batch of preference pairs, `(2, n)` on the host."""
    from accelerate.utils import send_to_device

    device = next(iter(model.parameters()), torch.empty(0, device="cpu")).device
    ids, _ = split_labels(batch["labels"])
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
    outputs = model(**send_to_device(inputs, device))
    return sequence_log_probs(outputs, pair_rows(ids), shift=shift, source=source)["log_prob"].view(2, -1).cpu()
