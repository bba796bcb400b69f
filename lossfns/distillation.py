"""Distillation for the Trainer's `compute_loss_func`: divergences between a student and a teacher, token by token.

A divergence is a function of two `(n, C)` tensors of log-probabilities, the student's and the teacher's, that sums over
the classes; any function of one's own fits as well. It is measured on a few rows at a time.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from ._core.alignment import Labels, Outputs, Selector, align, split_labels
from ._core.autograd import uncompiled
from ._core.checks import check_unit, number
from ._core.hidden import HiddenStates
from ._core.normalization import NumItems, item_count
from ._core.signature import STATISTICS, Term, check_options
from ._core.sources import open_source
from ._core.teacher import Comparison, Divergence, open_teacher
from ._core.term_loss import bind
from ._linear import linear_in_term


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Kullback-Leibler divergence of the student from the teacher, `sum q log(q / p)`: covers all the teacher does.

    Args:
        log_p: log-probabilities of the student, `(n, C)`, nats.
        log_q: log-probabilities of the teacher, `(n, C)`, nats; -inf is a class it rules out.

    Returns:
        `(n,)`, nats; its gradient is that of the cross-entropy to the teacher.

    Source:
        Hinton, Vinyals, Dean: Distilling the Knowledge in a Neural Network (2015), section 2; Kullback, Leibler: On
        Information and Sufficiency (1951).

    Example:
        >>> forward_kl(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]).log())
        tensor([0.6931])
    """
    return _relative_entropy(log_q, log_p)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Kullback-Leibler divergence of the teacher from the student, `sum p log(p / q)`: stays within what it does.

    Args:
        log_p: log-probabilities of the student, `(n, C)`, nats.
        log_q: log-probabilities of the teacher, `(n, C)`, nats. Where it is -inf and the student is not, the value is
            inf: take `jensen_shannon` or `total_variation` for a teacher that rules classes out.

    Returns:
        `(n,)`, nats.

    Source:
        Gu, Dong, Wei, Huang: MiniLLM: Knowledge Distillation of Large Language Models (2024), equation 1.

    Example:
        >>> reverse_kl(torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.5, 0.5]]).log())
        tensor([0.6931])
    """
    return _relative_entropy(log_p, log_q)


def jensen_shannon(log_p: Tensor, log_q: Tensor, *, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence: of both from the mixture `m = beta q + (1 - beta) p`.

    Args:
        log_p: log-probabilities of the student, `(n, C)`, nats.
        log_q: log-probabilities of the teacher, `(n, C)`, nats; -inf is a class it rules out.
        beta: between 0 and 1. Divided by `beta` it tends to `forward_kl` as `beta` tends to 0, divided by `1 - beta` to
            `reverse_kl` as it tends to 1.

    Returns:
        `(n,)`, nats: `beta sum q log(q / m) + (1 - beta) sum p log(p / m)`, at most log 2.

    Raises:
        ValueError: `beta` is not between 0 and 1.
        TypeError: an option is no number.

    Source:
        Agarwal et al.: On-Policy Distillation of Language Models (2024), equation 1; Lin: Divergence Measures Based on
        the Shannon Entropy (1991).

    Example:
        >>> jensen_shannon(torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.0, 1.0]]).log())
        tensor([0.6931])
    """
    if not 0.0 < number(beta, "beta") < 1.0:
        raise ValueError(f"beta must lie between 0 and 1, got {beta}; forward_kl and reverse_kl are its ends")
    mixture = torch.lerp(log_p.exp(), log_q.exp(), beta)
    # What underflows has no part in the sum; kept off 0, where the logarithm has no slope. Faster than logaddexp.
    log_m = mixture.clamp(min=torch.finfo(mixture.dtype).tiny).log()
    return beta * _relative_entropy(log_q, log_m) + (1 - beta) * _relative_entropy(log_p, log_m)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Total variation distance: half the sum of the differences between probabilities.

    Args:
        log_p: log-probabilities of the student, `(n, C)`, nats.
        log_q: log-probabilities of the teacher, `(n, C)`, nats; -inf is a class it rules out.

    Returns:
        `(n,)`, 0 to 1.

    Source:
        Wen, Li, Du, Mou: f-Divergence Minimization for Sequence-Level Knowledge Distillation (2023), equation 13.

    Example:
        >>> total_variation(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]).log())
        tensor([0.5000])
    """
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def _relative_entropy(log_a: Tensor, log_b: Tensor) -> Tensor:
    """`sum a log(a / b)`, where nothing is left of a class whose `a` is 0, in the gradient too."""
    return (log_a.exp() * torch.where(log_a > -torch.inf, log_a - log_b, 0)).sum(-1)


def teacher_divergence(divergence: Tensor) -> Tensor:
    """Term of `distillation_loss`: the divergence from the teacher, to be summed up with others in one pass.

    Args:
        divergence: what the loss measures for each token, `(n,)`.

    Returns:
        The same.

    Example:
        >>> from lossfns import cross_entropy, weighted_sum
        >>> weighted_sum((0.5, cross_entropy), (0.5, teacher_divergence))
        (0.5 * cross_entropy + 0.5 * teacher_divergence)
    """
    return divergence


@linear_in_term()
@uncompiled
def distillation_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    divergence: Divergence = forward_kl,
    term: Term = teacher_divergence,
    temperature: float = 1.0,
    teacher: nn.Module | HiddenStates | None = None,
    shift: int = 1,
    select: Selector | None = None,
    source: HiddenStates | None = None,
    overwrite_logits: bool = False,
) -> Tensor:
    """Mean divergence of a student from its teacher over the tokens that count, exact under gradient accumulation.

    The teacher is one of three: `teacher_logits` `(B, L, V)` in the dict of labels; its best `teacher_ids` and
    `teacher_log_probs` `(B, L, k)` there, all other classes being taken together as one more; or `teacher=`, a model
    that is run here, without gradient, on what `collators.teacher_inputs` put into the dict. Best ids are checked on
    their device, which is waited for once more than by other losses. Position `i` stands beside logit `i` of the
    student, which predicts label `i + shift`. In evaluation the Trainer keeps the labels of all samples, and
    `teacher_logits` with them, unless `prediction_loss_only=True`.

    Args:
        outputs: what the student returned: a ModelOutput or dict with `logits`, a tuple, or logits `(B, L, V)`.
        labels: `{"labels": ids, ...}` with ids `(B, S)`, -100 where nothing is to be learned, and what the teacher
            needs.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms; None counts
            the labels of this call.
        divergence: a function of the log-probabilities of student and teacher, `(n, C)` each, to one value a token:
            `forward_kl`, `reverse_kl`, `partial(jensen_shannon, beta=0.1)`, `total_variation`.
        term: what is minimised a token: `weighted_sum((0.5, cross_entropy), (0.5, teacher_divergence))` learns from labels too.
        temperature: positive; logits of both are divided by it, and the divergence multiplied by its square, so that
            gradients keep their size. `teacher_log_probs` have to be taken at this temperature.
        teacher: the model in eval mode, or its `hidden_states(teacher)`, with which its logits never exist.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        select: a function of `outputs` that picks the student's logits.
        source: `hidden_states(student)`: read hidden states and head instead of logits, which then never exist.
        overwrite_logits: as for `causal_lm_loss`.

    Returns:
        0-d float32 (float64 for float64 logits), nats a token; 0 with a live graph when no label counts. Where student
        and teacher have vocabularies of different widths, the classes that both have are compared.

    Raises:
        ValueError: no teacher, or several; one that does not fit the student, is in training mode, or gives best tokens
            that are not part of a distribution; a temperature that is not positive and finite; labels as for
            `causal_lm_loss`.
        TypeError: the divergence does not return one value a token; otherwise as for `causal_lm_loss`.

    Source:
        Hinton, Vinyals, Dean: Distilling the Knowledge in a Neural Network (2015), for the temperature.

    Example:
        >>> student, teacher = torch.zeros(1, 2, 4), torch.tensor([[[9.0, 9.0, 0.0, 0.0]]]).expand(1, 2, 4)
        >>> distillation_loss(student, {"labels": torch.tensor([[0, 1]]), "teacher_logits": teacher})
        tensor(0.6919)
    """
    if not 0 < number(temperature, "temperature") < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    check_options(divergence, "divergence")
    ids, extras = split_labels(labels)
    check_unit(None, extras)
    opened = open_source(outputs, ids, select, source)
    pairs = align(opened.like, ids, shift=shift, padded=opened.padded)
    count = item_count(num_items_in_batch, len(pairs.rows), opened.like.device)
    bound = bind(term, pairs, extras, statistics=(*STATISTICS, "divergence"), classes=opened.like.shape[-1])
    comparison = Comparison(divergence, temperature, open_teacher(extras, teacher, opened.like, pairs.rows))
    comparison.check(opened.like)
    rows = replace(pairs.rows, comparison=comparison)
    return opened.loss(rows, bound, count, overwrite_logits=overwrite_logits)
