"""Lengths of labels as text, and generated token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lossfns._core.alignment import scored_places
from lossfns._core.checks import check_ids, check_shift

from ._core import Labels, Logits, label_ids

# Byte-level vocabularies write each byte as one letter: printable bytes as themselves, the others from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}


@torch.no_grad()
def text_lengths(logits: Logits, labels: Labels, *, lengths: Mapping[str, Tensor], shift: int) -> dict[str, Tensor]:
    """Return the length of the scored labels of each sample as text.

        bits_per_byte = nll / (bytes * log(2))

    Together with `sample_sums` it gives the bits per byte and per character, which do not depend on the tokenizer.

    Args:
        logits: not used.
        labels: `(B, S)` integer ids, or a dict with `labels`; -100 is not scored.
        lengths: length of every token by unit, `(V,)` each, as `token_bytes(tokenizer)` returns them.
        shift: the shift of `sample_sums`; labels that no logit predicts do not count.

    Returns:
        `(B,)` int64 tensors with the names of `lengths`.

    Raises:
        ValueError: labels or the shift are missing, a label has no length, or `lengths` do not have one number per
            token.
        TypeError: labels are not integers.

    References:
        Gao et al., "The Pile: An 800GB Dataset of Diverse Text for Language Modeling", 2020, section 3.1 (bits per
        byte), https://arxiv.org/abs/2101.00027

    Example:
        >>> text_lengths((), torch.tensor([[-100, 2, 1]]), lengths={"bytes": torch.tensor([1, 3, 4])}, shift=1)
        {'bytes': tensor([7])}
    """
    ids = label_ids(labels)
    if ids is None or ids.ndim != 2:
        raise ValueError(f"labels must be (batch, sequence), got {None if ids is None else tuple(ids.shape)}")
    check_ids(ids)
    check_shift(shift)
    tables = lengths.values() if isinstance(lengths, Mapping) else ()
    if not tables or not all(isinstance(table, Tensor) and table.ndim == 1 for table in tables):
        raise ValueError("lengths must be a dict of tensors (V,) by unit, as token_bytes(tokenizer) returns them")
    scored = scored_places(ids, shift)
    size = min(map(len, tables))
    unknown = ids[scored & ((ids < 0) | (ids >= size))]
    if unknown.numel():
        raise ValueError(f"label {int(unknown[0])} has no length: the table has {size} tokens")
    chosen = ids.where(scored, 0)
    on_device = {name: table.to(ids.device, non_blocking=True) for name, table in lengths.items()}
    return {name: table[chosen].where(scored, 0).sum(1) for name, table in on_device.items()}


def token_bytes(tokenizer: Any) -> dict[str, Tensor]:
    """Return the length of every token of a vocabulary, in bytes and in characters, for `text_lengths`.

    A character counts at the token that holds its first byte, so that sums are right for characters that span several
    tokens. A space that a tokenizer adds before every text counts as part of the text.

    Args:
        tokenizer: a tokenizer of transformers with a byte-level vocabulary (GPT-2, Llama 3, Qwen) or SentencePiece
            pieces.

    Returns:
        `bytes` and `characters`, `(V,)` int64 each; 0 for special tokens.

    Raises:
        ValueError: the text of the tokens cannot be recovered from the vocabulary (WordPiece).

    References:
        Radford, Wu, Child, Luan, Amodei, Sutskever, "Language Models are Unsupervised Multitask Learners", 2019,
        section 2.2 (byte-level vocabularies),
        https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf

        Kudo, Richardson, "SentencePiece: A simple and language independent subword tokenizer and detokenizer for
        Neural Text Processing", 2018, https://arxiv.org/abs/1808.06226

    Example:
        >>> from types import SimpleNamespace
        >>> vocabulary = {"\u0120the": 0, "\u00c3": 1, "\u00a9": 2}
        >>> tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary, all_special_ids=[])
        >>> token_bytes(tokenizer)["bytes"], token_bytes(tokenizer)["characters"]
        (tensor([4, 1, 1]), tensor([4, 1, 0]))
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    # Each mark may also be a letter of the other kind of vocabulary, so that the more frequent one decides: U+0120 is
    # a letter of Maltese, and U+2581 occurs in the names of special tokens.
    byte_level, pieces = (sum(token.startswith(mark) for token in vocabulary) for mark in "\u0120\u2581")
    if not byte_level and not pieces:
        raise ValueError(
            "the vocabulary must be byte-level (\u0120 for a space) or of SentencePiece (\u2581 for a space): the text "
            "of other tokens is unknown"
        )
    added = set(getattr(tokenizer, "get_added_vocab", dict)())
    size = max(vocabulary.values()) + 1
    tables = {name: torch.zeros(size, dtype=torch.int64, device="cpu") for name in ("bytes", "characters")}
    for token, place in vocabulary.items():
        if place not in special:
            text = _byte_level(token, token in added) if byte_level > pieces else _piece(token)
            tables["bytes"][place] = len(text)
            tables["characters"][place] = sum(byte & 0xC0 != 0x80 for byte in text)
    return tables


@torch.no_grad()
def generated_ids(logits: Logits, labels: Labels) -> dict[str, Tensor]:
    """Return the token ids that `predict_with_generate=True` produced, under the name that text metrics read.

    Args:
        logits: integer ids `(B, T)`, or a tuple or dict that begins with them.
        labels: not used.

    Returns:
        `generated`: `(B, T)` int64.

    Raises:
        TypeError: the first output is not a tensor of ids, for instance because it is a tensor of logits.

    Example:
        >>> generated_ids(torch.tensor([[5, 6]]), None)
        {'generated': tensor([[5, 6]])}
    """
    parts = logits.values() if isinstance(logits, Mapping) else [logits] if isinstance(logits, Tensor) else logits
    found = next(iter(parts), None) if isinstance(parts, Iterable) else parts
    if not isinstance(found, Tensor) or found.is_floating_point() or found.dtype == torch.bool or found.ndim != 2:
        given = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(
            f"generated_ids takes token ids (batch, tokens), got {given}: set Seq2SeqTrainingArguments("
            "predict_with_generate=True), or use argmax, whose text is teacher-forced"
        )
    return {"generated": found.long()}


def _byte_level(token: str, added: bool) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary.

    Added tokens are matched as text. Some tokens are text without being listed as added (runs of spaces): their letters
    do not all stand for bytes.
    """
    if added or not _BYTE_OF.keys() >= {*token}:
        return token.encode()
    return bytes(_BYTE_OF[letter] for letter in token)


def _piece(token: str) -> bytes:
    """Return the bytes of a SentencePiece piece, which is text or, as `<0x0A>`, one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
