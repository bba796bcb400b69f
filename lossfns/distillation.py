"""Distillation for the Trainer's `compute_loss_func`: divergences between a student and a teacher, per token.

A divergence is a function of two `(n, C)` tensors of log-probabilities, the student's `log_p` and the teacher's
`log_q`, that sums over the classes. Any function of this form can be used. It is called with a few rows at a time.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from ._core.alignment import Labels, Outputs, Selector, align, split_labels
from ._core.autograd import disable_compile
from ._core.checks import check_unit
from ._core.hidden import HiddenStates
from ._core.normalization import NumItems, item_count
from ._core.signature import STATISTICS, Term, check_options
from ._core.sources import open_source
from ._core.teacher import Comparison, Divergence, open_teacher
from ._core.term_loss import bind


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute the forward Kullback-Leibler divergence, large where the student misses classes of the teacher.

        sum(q * log(q / p))

    Args:
        log_p: log-probabilities of the student, `(n, C)`, nats.
        log_q: log-probabilities of the teacher, `(n, C)`, nats; -inf for a class that it rules out.

    Returns:
        One value per token, `(n,)`, nats. Its gradient is that of the cross-entropy to the teacher.

    References:
        Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015, section 2,
        https://arxiv.org/abs/1503.02531

        Kullback, Leibler, "On Information and Sufficiency", 1951, https://doi.org/10.1214/aoms/1177729694

    Example:
        >>> forward_kl(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]).log())
        tensor([0.6931])
    """
    return _relative_entropy(log_q, log_p)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute the reverse Kullback-Leibler divergence, large where the student predicts classes the teacher does not.

        sum(p * log(p / q))

    Args:
        log_p: log-probabilities of the student, `(n, C)`, nats.
        log_q: log-probabilities of the teacher, `(n, C)`, nats. Where it is -inf and that of the student is not, the
            value is inf: use `jensen_shannon` or `total_variation` for a teacher that rules classes out.

    Returns:
        One value per token, `(n,)`, nats.

    References:
        Gu, Dong, Wei, Huang, "MiniLLM: Knowledge Distillation of Large Language Models", 2024, equation 1,
        https://arxiv.org/abs/2306.08543

    Example:
        >>> reverse_kl(torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.5, 0.5]]).log())
        tensor([0.6931])
    """
    return _relative_entropy(log_p, log_q)


def jensen_shannon(log_p: Tensor, log_q: Tensor, *, beta: float = 0.5) -> Tensor:
    """Compute the generalized Jensen-Shannon divergence of student and teacher from their mixture.

        beta * sum(q * log(q / m)) + (1 - beta) * sum(p * log(p / m)),  m = beta * q + (1 - beta) * p

    Args:
        log_p: log-probabilities of the student, `(n, C)`, nats.
        log_q: log-probabilities of the teacher, `(n, C)`, nats; -inf for a class that it rules out.
        beta: weight of the teacher in the mixture, strictly between 0 and 1. Divided by `beta`, the value tends to
            `forward_kl` as `beta` tends to 0; divided by `1 - beta`, it tends to `reverse_kl` as `beta` tends to 1.

    Returns:
        One value per token, `(n,)`, nats, at most log 2.

    Raises:
        ValueError: `beta` is not between 0 and 1.

    References:
        Agarwal, Vieillard, Zhou, Stanczyk, Ramos, Geist, Bachem, "On-Policy Distillation of Language Models: Learning
        from Self-Generated Mistakes", 2024, equation 1, https://arxiv.org/abs/2306.13649

        Lin, "Divergence Measures Based on the Shannon Entropy", 1991, https://doi.org/10.1109/18.61115

    Example:
        >>> jensen_shannon(torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.0, 1.0]]).log())
        tensor([0.6931])
    """
    if not 0.0 < beta < 1.0:
        raise ValueError(f"beta must be between 0 and 1, got {beta}; use forward_kl or reverse_kl for the limits")
    mixture = torch.lerp(log_p.exp(), log_q.exp(), beta)
    # Probabilities that underflow do not contribute to the sum. They are kept off 0, where the gradient of the
    # logarithm is infinite. This is faster than logaddexp.
    log_m = mixture.clamp(min=torch.finfo(mixture.dtype).tiny).log()
    return beta * _relative_entropy(log_q, log_m) + (1 - beta) * _relative_entropy(log_p, log_m)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute the total variation distance, half the sum of the absolute differences between probabilities.

        sum(|p - q|) / 2

    Args:
        log_p: log-probabilities of the student, `(n, C)`, nats.
        log_q: log-probabilities of the teacher, `(n, C)`, nats; -inf for a class that it rules out.

    Returns:
        One value per token, `(n,)`, between 0 and 1.

    References:
        Wen, Li, Du, Mou, "f-Divergence Minimization for Sequence-Level Knowledge Distillation", 2023, equation 13,
        https://arxiv.org/abs/2307.15190

    Example:
        >>> total_variation(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]).log())
        tensor([0.5000])
    """
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def _relative_entropy(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return `sum(a * log(a / b))`, to which a class with `a = 0` contributes nothing, in the gradient too."""
    return (log_a.exp() * torch.where(log_a > -torch.inf, log_a - log_b, 0)).sum(-1)


def teacher_divergence(divergence: Tensor) -> Tensor:
    """Return the divergence from the teacher, as the term of `distillation_loss`; add others with `weighted_sum`.

        term = divergence

    Args:
        divergence: the divergence that the loss measures, one value per token, `(n,)`.

    Returns:
        The same tensor.

    References:
        Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015, section 2, for its weighted sum
        with the cross-entropy, https://arxiv.org/abs/1503.02531

    Example:
        >>> from lossfns import cross_entropy, weighted_sum
        >>> weighted_sum((0.5, cross_entropy), (0.5, teacher_divergence))
        (0.5 * cross_entropy + 0.5 * teacher_divergence)
    """
    return divergence


@disable_compile
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
    """Compute the mean divergence of a student from its teacher over labeled tokens, exact under accumulation.

        T ** 2 * mean over labels of divergence(log_softmax(student / T), log_softmax(teacher / T)),  T = temperature

    The teacher is given in one of three forms: `teacher_logits` `(B, L, V)` in the dict of labels; its k most probable
    classes `teacher_ids` with `teacher_log_probs` `(B, L, k)` there, where all other classes together are one more
    class; or `teacher=`, a model that is run here, without gradient, on the inputs that `collators.teacher_inputs` puts
    into the dict. The ids are checked on their device, so this loss waits for the device once more than other losses.

    Position `i` of the teacher belongs to logit `i` of the student, which predicts label `i + shift`. In evaluation the
    Trainer keeps the labels of all samples, and `teacher_logits` with them, unless `prediction_loss_only=True`.

    Args:
        outputs: what the student returned: a ModelOutput or dict with `logits`, a tuple, or logits `(B, L, V)`.
        labels: `{"labels": ids, ...}` with ids `(B, S)`, -100 for tokens from which nothing is learned, and what the
            teacher needs.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms; None counts
            the labels of this call.
        divergence: a function of the log-probabilities of student and teacher, `(n, C)` each, to one value per token:
            `forward_kl`, `reverse_kl`, `partial(jensen_shannon, beta=0.1)`, `total_variation`.
        term: the term that is minimized per token. `weighted_sum((0.5, cross_entropy), (0.5, teacher_divergence))`
            learns from the labels too.
        temperature: number by which the logits of both are divided, > 0; the divergence is multiplied by its square, so
            that gradients keep their size. `teacher_log_probs` must be computed at this temperature.
        teacher: the model in eval mode, or its `hidden_states(teacher)`, with which its logits are never materialized.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        select: a function of `outputs` that picks the student's logits.
        source: `hidden_states(student)`: read hidden states and head instead of logits, which are then never
            materialized.
        overwrite_logits: as for `causal_lm_loss`.

    Returns:
        0-d float32 (float64 for float64 logits), nats per token; 0 with a live graph when no label counts. If the
        vocabularies of student and teacher have different widths, the classes that both have are compared.

    Raises:
        ValueError: there is not exactly one teacher; it does not fit the student, is in training mode, or gives top-k
            log-probabilities that are not part of a distribution; the temperature is not positive and finite; labels as
            for `causal_lm_loss`.
        TypeError: the divergence does not return one value per token; otherwise as for `causal_lm_loss`.

    References:
        Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015, section 2,
        https://arxiv.org/abs/1503.02531

    Example:
        >>> student, teacher = torch.zeros(1, 2, 4), torch.tensor([[[9.0, 9.0, 0.0, 0.0]]]).expand(1, 2, 4)
        >>> distillation_loss(student, {"labels": torch.tensor([[0, 1]]), "teacher_logits": teacher})
        tensor(0.6919)
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    check_options(divergence, "divergence")
    ids, extras = split_labels(labels)
    check_unit("tokens", extras)
    opened = open_source(outputs, ids, select, source)
    aligned = align(opened.like, ids, shift=shift, padded=opened.padded)
    count = item_count(num_items_in_batch, len(aligned.rows), opened.like.device)
    bound = bind(term, aligned, extras, statistics=(*STATISTICS, "divergence"), classes=opened.like.shape[-1])
    comparison = Comparison(divergence, temperature, open_teacher(extras, teacher, opened.like, aligned.rows))
    comparison.check(opened.like)
    rows = replace(aligned.rows, comparison=comparison)
    return opened.loss(rows, bound, count, overwrite_logits=overwrite_logits)
