"""Losses of language models for the Trainer's `compute_loss_func`: source, alignment, term and count joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from ._core.alignment import Labels, Outputs, Selector, scored_places, split_labels
from ._core.autograd import uncompiled
from ._core.checks import check_logits, items, strings
from ._core.hidden import HiddenStates
from ._core.normalization import NumItems, by_weights, item_count
from ._core.signature import Term
from ._core.sources import open_source
from ._core.term_loss import label_loss
from ._linear import linear_in_term
from .terms import cross_entropy

Normalize = Literal["tokens", "sequences", "weights"]


@linear_in_term(normalize=("tokens", "sequences"))
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
    """Mean of a term over the next tokens of a causal language model, exact under gradient accumulation and processes.

    Args:
        outputs: what the model returned: a ModelOutput or dict with `logits`, a tuple, or logits `(B, L, V)`.
        labels: ids `(B, S)`, -100 where nothing is to be predicted, unshifted; or `{"labels": ids, name: extra}`.
        num_items_in_batch: the Trainer's count of labels over the accumulation window, in any of its forms; None counts
            the labels of this call.
        term: what is minimised a token.
        shift: the label at `i` is predicted by the logit at `i - shift`.
        normalize: divide by the number of "tokens", also where they are weighted; by "sequences" after the mean over
            each, with a collator in `collators.count_sequences`; or by "weights": torch's weighted mean, exact without
            gradient accumulation in one process only.
        select: a function of `outputs` that picks the logits.
        source: `hidden_states(model)`: read hidden states and head instead of logits, which then never exist.
        overwrite_logits: write the gradient over the logits and empty them: no memory beside the logits themselves, and
            nobody can read them afterwards. Only while a gradient is recorded; evaluation keeps its logits.

    Returns:
        0-d float32 (float64 for float64 logits), nats a token for cross-entropy; 0 with a live graph when no label
        counts.

    Raises:
        ValueError: labels are missing, out of range or of another shape; logits are missing or shorter than the labels;
            the logits cannot be overwritten.
        TypeError: labels are not integers, logits are ids, the term asks for something unknown.

    Example:
        >>> import torch
        >>> logits, labels = torch.zeros(1, 3, 4), torch.tensor([[-100, 2, 1]])
        >>> causal_lm_loss({"logits": logits}, labels)
        tensor(1.3863)
    """
    return token_loss(
        outputs,
        labels,
        num_items_in_batch,
        term,
        shift,
        normalize=normalize,
        select=select,
        source=source,
        overwrite_logits=overwrite_logits,
    )


@linear_in_term(normalize=("tokens", "sequences"))
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
    """Mean of a term over the masked tokens of an encoder: `causal_lm_loss` with the logit at its own label (shift 0).

    Example:
        >>> import torch
        >>> masked_lm_loss(torch.zeros(1, 3, 4), torch.tensor([[-100, 2, -100]]))
        tensor(1.3863)
    """
    return token_loss(
        outputs,
        labels,
        num_items_in_batch,
        term,
        0,
        normalize=normalize,
        select=select,
        source=source,
        overwrite_logits=overwrite_logits,
    )


@linear_in_term(normalize=("tokens", "sequences"))
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
    """Mean of a term over the target tokens of an encoder-decoder, whose decoder inputs are shifted and logits are not.

    The collator has to add `decoder_input_ids`: the Trainer takes the labels out of the batch before `forward`, and T5
    then raises while BART silently trains on its source. `collators.with_decoder_inputs(collator, model)` adds them, or
    `DataCollatorForSeq2Seq(tokenizer, model=model)`.

    Example:
        >>> import torch
        >>> seq2seq_lm_loss(torch.zeros(1, 2, 4), torch.tensor([[3, 1]]))
        tensor(1.3863)
    """
    return token_loss(
        outputs,
        labels,
        num_items_in_batch,
        term,
        0,
        normalize=normalize,
        select=select,
        source=source,
        overwrite_logits=overwrite_logits,
        decoder=True,
    )


@uncompiled
def token_loss(
    outputs: Outputs,
    labels: Labels | None,
    num_items_in_batch: NumItems,
    term: Term,
    shift: int,
    *,
    normalize: Normalize = "tokens",
    select: Selector | None = None,
    source: HiddenStates | None = None,
    overwrite_logits: bool = False,
    decoder: bool = False,
) -> Tensor:
    """What the losses of language models share: open the source, then as for any label."""
    ids, extras = split_labels(labels)
    opened = open_source(outputs, ids, select, source)
    if decoder:
        _check_decoder(opened.like, ids)
    return label_loss(
        opened,
        ids,
        extras,
        num_items_in_batch,
        term,
        shift=shift,
        weighted=by_weights(normalize, "tokens", "sequences"),
        sequences=normalize == "sequences",
        overwrite_logits=overwrite_logits,
    )


def _check_decoder(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim == 3 and labels.ndim == 2 and logits.shape[1] != labels.shape[1]:
        raise ValueError(
            f"the decoder saw {logits.shape[1]} positions for {labels.shape[1]} labels. Without decoder_input_ids some "
            "models (BART) decode their own source: wrap the collator in "
            "lossfns.collators.with_decoder_inputs(collator, model)"
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
    """Weighted sum of `causal_lm_loss` over heads of which each predicts one token further ahead.

    Every part is divided by the count of next tokens, the only one the Trainer knows; the last tokens of a row have no
    label that far ahead. In packed rows the head that looks `k` ahead would predict across a boundary unless the first
    `k` labels of every sequence are -100.

    Args:
        outputs: what the model returned: a ModelOutput or dict with the logits `(B, L, V)` of every head.
        labels: as for `causal_lm_loss`, unshifted.
        num_items_in_batch: as for `causal_lm_loss`; None counts the next tokens of this call.
        heads: names of the heads' logits among the outputs: the first predicts the next token, the second the one after
            it, and so on.
        weights: one weight a head.
        term: what is minimised a token, for every head.
        overwrite_logits: as for `causal_lm_loss`, for every head.

    Returns:
        0-d float32 (float64 for float64 logits).

    Raises:
        ValueError: not one weight a head, or the outputs lack a head; otherwise as for `causal_lm_loss`.
        TypeError: heads or weights are no sequence; otherwise as for `causal_lm_loss`.

    Source:
        Gloeckle, Idrissi, Roziere, Lopez-Paz, Synnaeve: Better & Faster Large Language Models via Multi-token
        Prediction (2024), equation 2; DeepSeek-AI: DeepSeek-V3 (2024), equations 24 and 25.

    Example:
        >>> import torch
        >>> outputs = {"logits": torch.zeros(1, 3, 4), "further": torch.zeros(1, 3, 4)}
        >>> labels = torch.tensor([[0, 1, 2]])
        >>> multi_token_loss(outputs, labels, heads=("logits", "further"), weights=(1.0, 0.3))
        tensor(1.5942)
    """
    if not strings(heads, "heads") or len(heads) != len(items(weights, "weights")):
        raise ValueError(
            f"give one weight a head, as heads=('logits', 'further'), weights=(1.0, 0.3); got {heads!r}, {weights!r}"
        )
    ids, extras = split_labels(labels)
    host = ids.detach().cpu()  # once for all heads
    logits = [_logits(outputs, name) for name in heads]
    count = item_count(num_items_in_batch, int(scored_places(host, 1).sum()), logits[0].device)
    losses = [
        causal_lm_loss(
            own, {"labels": host, **extras}, count, term=term, shift=shift, overwrite_logits=overwrite_logits
        )
        for shift, own in enumerate(logits, start=1)
    ]
    parts = [weight * loss for weight, loss in zip(weights, losses, strict=True)]
    return sum(parts[1:], parts[0])


def _logits(outputs: Outputs, name: str) -> Tensor:
    found = outputs.get(name) if isinstance(outputs, Mapping) else None
    if found is None:
        among = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise ValueError(f"the model returned no '{name}' (outputs: {among}); heads= names the logits of each head")
    return check_logits(found)
