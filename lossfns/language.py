"""Losses of language models for the Trainer's `compute_loss_func`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from ._core.alignment import Labels, Outputs, Selector, output_entry, scored_places, split_labels
from ._core.autograd import disable_compile
from ._core.checks import as_list, check_logits, strings
from ._core.hidden import HiddenStates
from ._core.normalization import NumItems, item_count
from ._core.signature import Term
from ._core.sources import open_source
from ._core.term_loss import label_loss
from .terms import cross_entropy

Normalize = Literal["tokens", "sequences", "weights"]


def causal_lm_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    term: Term = cross_entropy,
    shift: int = 1,
    normalize: Normalize = "tokens",
    select: Selector | None = None,
    source: HiddenStates | None = None,
    overwrite_logits: bool = False,
) -> Tensor:
    """Compute the mean of a term over the next tokens of a causal language model.

    Exact under gradient accumulation, DDP and DataParallel:

        loss = sum of term(logit at i - shift, label at i) / num_items_in_batch

    Args:
        outputs: what the model returned: a ModelOutput or dict with `logits`, a tuple, or logits `(B, L, V)`.
        labels: ids `(B, S)`, unshifted, -100 where nothing is predicted; or `{"labels": ids, name: extra}`.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms; None counts
            the labels of this call.
        term: the term to minimize per token.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        normalize: divide by the number of "tokens", even if they are weighted; by "sequences", after the mean over each
            sequence, with a collator in `collators.count_sequences`; or by "weights", which is torch's weighted mean
            and exact only without gradient accumulation in one process.
        select: a function of `outputs` that picks the logits.
        source: `hidden_states(model)`: read hidden states and head instead of logits, which then never exist.
        overwrite_logits: write the gradient over the logits and empty them: no memory besides the logits themselves,
            which cannot be read afterwards. Only while a gradient is recorded; evaluation keeps its logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats per token for cross-entropy; 0 with a live graph if no label
        counts.

    Raises:
        ValueError: labels are missing, out of range or of another shape; logits are missing or shorter than the labels;
            the logits cannot be overwritten.
        TypeError: labels are not integers, logits are ids, or the term asks for an unknown name.

    References:
        Bengio, Ducharme, Vincent, Jauvin, "A Neural Probabilistic Language Model", 2003,
        https://www.jmlr.org/papers/v3/bengio03a.html

    Example:
        >>> import torch
        >>> logits, labels = torch.zeros(1, 3, 4), torch.tensor([[-100, 2, 1]])
        >>> causal_lm_loss({"logits": logits}, labels)
        tensor(1.3863)
    """
    return token_loss(outputs, labels, num_items_in_batch, term, shift, normalize, select, source, overwrite_logits)


def masked_lm_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    term: Term = cross_entropy,
    normalize: Normalize = "tokens",
    select: Selector | None = None,
    source: HiddenStates | None = None,
    overwrite_logits: bool = False,
) -> Tensor:
    """Compute the mean of a term over the masked tokens of an encoder.

    Like `causal_lm_loss` without a shift: the logit at `i` predicts the label at `i`.

    Args:
        outputs: what the model returned: a ModelOutput or dict with `logits`, a tuple, or logits `(B, S, V)`.
        labels: ids `(B, S)`, -100 where a token is not masked; or `{"labels": ids, name: extra}`.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms; None counts
            the labels of this call.
        term: the term to minimize per masked token.
        normalize: divide by the number of "tokens", even if they are weighted; by "sequences", after the mean over each
            sequence, with a collator in `collators.count_sequences`; or by "weights", which is torch's weighted mean
            and exact only without gradient accumulation in one process.
        select: a function of `outputs` that picks the logits.
        source: `hidden_states(model)`: read hidden states and head instead of logits, which then never exist.
        overwrite_logits: write the gradient over the logits and empty them: no memory besides the logits themselves,
            which cannot be read afterwards. Only while a gradient is recorded; evaluation keeps its logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats per token for cross-entropy; 0 with a live graph if no label
        counts.

    Raises:
        ValueError: labels are missing, out of range or of another shape; logits are missing or shorter than the labels;
            the logits cannot be overwritten.
        TypeError: labels are not integers, logits are ids, or the term asks for an unknown name.

    References:
        Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for Language
        Understanding", 2019, section 3.1, https://arxiv.org/abs/1810.04805

    Example:
        >>> import torch
        >>> masked_lm_loss(torch.zeros(1, 3, 4), torch.tensor([[-100, 2, -100]]))
        tensor(1.3863)
    """
    return token_loss(outputs, labels, num_items_in_batch, term, 0, normalize, select, source, overwrite_logits)


def seq2seq_lm_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    term: Term = cross_entropy,
    normalize: Normalize = "tokens",
    select: Selector | None = None,
    source: HiddenStates | None = None,
    overwrite_logits: bool = False,
) -> Tensor:
    """Compute the mean of a term over the target tokens of an encoder-decoder.

    The logits are not shifted, because the decoder inputs are. The collator has to add `decoder_input_ids`: the Trainer
    takes the labels out of the batch before `forward`, and T5 then raises while BART silently trains on its source.
    `collators.with_decoder_inputs(collator, model)` adds them, or `DataCollatorForSeq2Seq(tokenizer, model=model)`.

    Args:
        outputs: what the model returned: a ModelOutput or dict with `logits`, a tuple, or logits `(B, S, V)`.
        labels: target ids `(B, S)`, -100 for padding; or `{"labels": ids, name: extra}`.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms; None counts
            the labels of this call.
        term: the term to minimize per target token.
        normalize: divide by the number of "tokens", even if they are weighted; by "sequences", after the mean over each
            sequence, with a collator in `collators.count_sequences`; or by "weights", which is torch's weighted mean
            and exact only without gradient accumulation in one process.
        select: a function of `outputs` that picks the logits.
        source: `hidden_states(model)`: read hidden states and head instead of logits, which then never exist.
        overwrite_logits: write the gradient over the logits and empty them: no memory besides the logits themselves,
            which cannot be read afterwards. Only while a gradient is recorded; evaluation keeps its logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats per token for cross-entropy; 0 with a live graph if no label
        counts.

    Raises:
        ValueError: labels are missing, out of range or of another shape; logits are missing or shorter than the labels;
            the logits cannot be overwritten; or the decoder saw another number of positions than there are labels.
        TypeError: labels are not integers, logits are ids, or the term asks for an unknown name.

    References:
        Sutskever, Vinyals, Le, "Sequence to Sequence Learning with Neural Networks", 2014, equation 1,
        https://arxiv.org/abs/1409.3215

    Example:
        >>> import torch
        >>> seq2seq_lm_loss(torch.zeros(1, 2, 4), torch.tensor([[3, 1]]))
        tensor(1.3863)
    """
    options = normalize, select, source, overwrite_logits
    return token_loss(outputs, labels, num_items_in_batch, term, 0, *options, decoder=True)


@disable_compile
def token_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems,
    term: Term,
    shift: int,
    normalize: Normalize,
    select: Selector | None,
    source: HiddenStates | None,
    overwrite_logits: bool,
    decoder: bool = False,
) -> Tensor:
    """Split the labels, find the logits, and compute the loss of their class ids.

    With `decoder` the decoder must have seen as many positions as there are labels.
    """
    ids, extras = split_labels(labels)
    logits = open_source(outputs, ids, select, source)
    shape = logits.like.shape
    if decoder and len(shape) == 3 and ids.ndim == 2 and shape[1] != ids.shape[1]:
        raise ValueError(
            f"the decoder saw {shape[1]} positions for {ids.shape[1]} labels. Without decoder_input_ids some models "
            "(BART) decode their source: wrap the collator in lossfns.collators.with_decoder_inputs(collator, model)"
        )
    return label_loss(
        logits,
        ids,
        extras,
        num_items_in_batch,
        term,
        shift=shift,
        normalize=normalize,
        units=("tokens", "sequences"),
        overwrite_logits=overwrite_logits,
    )


def multi_token_loss(
    outputs: Outputs,
    labels: Labels,
    num_items_in_batch: NumItems = None,
    *,
    heads: Sequence[str],
    weights: Sequence[float],
    term: Term = cross_entropy,
    overwrite_logits: bool = False,
) -> Tensor:
    """Compute the weighted sum of `causal_lm_loss` over heads that each predict one token further ahead.

    Every part is divided by the count of next tokens, the only count that the Trainer knows; the last tokens of a row
    have no label that far ahead. In packed rows the head that predicts `k` tokens ahead would predict across a boundary
    unless the first `k` labels of every sequence are -100.

        loss = sum over k of weights[k - 1] * causal_lm_loss(logits of head k, labels, shift=k)

    Args:
        outputs: what the model returned: a ModelOutput or dict with the logits `(B, L, V)` of every head.
        labels: as for `causal_lm_loss`, unshifted.
        num_items_in_batch: as for `causal_lm_loss`; None counts the next tokens of this call.
        heads: names of the heads' logits among the outputs: the first predicts the next token, the second the token
            after it, and so on.
        weights: one weight per head.
        term: the term to minimize per token, for every head.
        overwrite_logits: as for `causal_lm_loss`, for every head.

    Returns:
        0-d float32 (float64 for float64 logits).

    Raises:
        ValueError: there is not one weight per head, or the outputs lack a head; otherwise as for `causal_lm_loss`.
        TypeError: heads or weights are not a sequence; otherwise as for `causal_lm_loss`.

    References:
        Gloeckle, Idrissi, Roziere, Lopez-Paz, Synnaeve, "Better & Faster Large Language Models via Multi-token
        Prediction", 2024, equation 2, https://arxiv.org/abs/2404.19737

        DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, equations 24 and 25, https://arxiv.org/abs/2412.19437

    Example:
        >>> import torch
        >>> outputs = {"logits": torch.zeros(1, 3, 4), "further": torch.zeros(1, 3, 4)}
        >>> labels = torch.tensor([[0, 1, 2]])
        >>> multi_token_loss(outputs, labels, heads=("logits", "further"), weights=(1.0, 0.3))
        tensor(1.5942)
    """
    if not strings(heads, "heads") or len(heads) != len(as_list(weights, "weights")):
        raise ValueError(f"expected one weight per head, for at least one head, got {heads!r} and {weights!r}")
    ids, extras = split_labels(labels)
    host = ids.detach().cpu()  # once for all heads
    logits = [check_logits(output_entry(outputs, name, "heads= names the logits of each head")) for name in heads]
    count = item_count(num_items_in_batch, int(scored_places(host, 1).sum()), logits[0].device)
    parts = []
    for shift, (weight, head_logits) in enumerate(zip(weights, logits, strict=True), start=1):
        loss = causal_lm_loss(
            head_logits, {"labels": host, **extras}, count, term=term, shift=shift, overwrite_logits=overwrite_logits
        )
        parts.append(weight * loss)
    return sum(parts[1:], parts[0])
