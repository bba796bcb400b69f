"""Text: how long the labels are, what was generated, what a speech model heard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lossfns._core.alignment import scored_places
from lossfns._core.checks import check_ids, check_shift

from ._core import Labels, Logits, label_ids


@torch.no_grad()
def text_lengths(logits: Logits, labels: Labels, *, lengths: Mapping[str, Tensor], shift: int) -> dict[str, Tensor]:
    """Length of the scored labels of each sample as text; beside `sample_sums` it gives bits a byte and a character.

    Args:
        logits: not read.
        labels: `(B, S)` ids, -100 where nothing is scored, or a dict with `labels`.
        lengths: by unit, the length of every token, `(V,)`, as `token_bytes(tokenizer)` returns.
        shift: as for `sample_sums`: labels that no logit predicts do not count.

    Returns:
        `(B,)` int64 under the names of `lengths`.

    Raises:
        ValueError: no labels, no shift, an id that has no length, or lengths that are not one number a token.
        TypeError: labels are not integers.

    Example:
        >>> text_lengths((), torch.tensor([[-100, 2, 1]]), lengths={"bytes": torch.tensor([1, 3, 4])}, shift=1)
        {'bytes': tensor([7])}
    """
    ids = label_ids(labels)
    if ids is None or ids.ndim != 2:
        raise ValueError(f"labels of tokens are (batch, sequence); got {None if ids is None else tuple(ids.shape)}")
    check_ids(ids)
    check_shift(shift)
    tables = lengths.values() if isinstance(lengths, Mapping) else ()
    if not tables or not all(isinstance(table, Tensor) and table.ndim == 1 for table in tables):
        raise ValueError("lengths are tensors (V,) by unit, as token_bytes(tokenizer) returns")
    scored = scored_places(ids, shift)
    longest = min(len(table) for table in lengths.values())
    unknown = ids[scored & ((ids < 0) | (ids >= longest))]
    if unknown.numel():
        raise ValueError(f"label {int(unknown[0])} has no length: the table has {longest} tokens")
    chosen = ids.where(scored, 0)
    on_device = {name: table.to(ids.device, non_blocking=True) for name, table in lengths.items()}
    return {name: table[chosen].where(scored, 0).sum(1) for name, table in on_device.items()}


def token_bytes(tokenizer: Any) -> dict[str, Tensor]:
    """Length of every token of a vocabulary, in bytes and in characters, for `text_lengths`.

    A character counts where its first byte stands, so that sums are right where it is spread over several tokens. A
    space that a tokenizer puts before every text counts as part of it.

    Args:
        tokenizer: of a model with a byte-level vocabulary (GPT-2, Llama 3, Qwen), or one of SentencePiece pieces.

    Returns:
        `bytes` and `characters`, `(V,)` int64; 0 for special tokens.

    Raises:
        ValueError: a vocabulary whose tokens do not say what text they stand for (WordPiece).
        TypeError: not a tokenizer.

    Source:
        Radford et al.: Language Models are Unsupervised Multitask Learners (2019), section 2.2, for the alphabet.

    Example:
        >>> from types import SimpleNamespace
        >>> vocabulary = {"\u0120the": 0, "\u00c3": 1, "\u00a9": 2}
        >>> tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary, all_special_ids=[])
        >>> token_bytes(tokenizer)["bytes"], token_bytes(tokenizer)["characters"]
        (tensor([4, 1, 1]), tensor([4, 1, 0]))
    """
    if not (hasattr(tokenizer, "get_vocab") and hasattr(tokenizer, "all_special_ids")):
        raise TypeError(f"token_bytes takes a tokenizer of transformers, not {type(tokenizer).__name__}")
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    # Either mark may also be a letter of the other kind of vocabulary: a Maltese one, a name of a special token.
    byte_level, pieces = (sum(token.startswith(mark) for token in vocabulary) for mark in "\u0120\u2581")
    if byte_level > pieces:
        byte_of, added = _byte_alphabet(), set(getattr(tokenizer, "get_added_vocab", dict)())
        read = {token: token.encode() if token in added else _letters(token, byte_of) for token in vocabulary}
    elif pieces:
        read = {token: _piece(token) for token in vocabulary}
    else:
        raise ValueError(
            "the vocabulary is neither byte-level (tokens with \u0120 for a space) nor of SentencePiece (\u2581): its "
            "tokens do not say which text they stand for"
        )
    size = max(vocabulary.values()) + 1
    tables = {name: torch.zeros(size, dtype=torch.int64, device="cpu") for name in ("bytes", "characters")}
    for token, place in vocabulary.items():
        if place not in special:
            tables["bytes"][place] = len(read[token])
            tables["characters"][place] = sum(byte & 0xC0 != 0x80 for byte in read[token])
    return tables


@torch.no_grad()
def generated(logits: Logits, labels: Labels) -> dict[str, Tensor]:
    """Token ids that `predict_with_generate=True` produced, named so that text metrics know them for generations.

    Args:
        logits: ids `(B, T)`, or a tuple that begins with them.
        labels: not read.

    Returns:
        `generated`: `(B, T)` int64.

    Raises:
        TypeError: logits came, not ids.

    Example:
        >>> generated(torch.tensor([[5, 6]]), None)
        {'generated': tensor([[5, 6]])}
    """
    parts = logits.values() if isinstance(logits, Mapping) else [logits] if isinstance(logits, Tensor) else logits
    found = next(iter(parts), None) if isinstance(parts, Iterable) else parts
    if not isinstance(found, Tensor) or found.is_floating_point() or found.dtype == torch.bool or found.ndim != 2:
        kind = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(
            f"generated takes token ids (batch, tokens), and {kind} came: set Seq2SeqTrainingArguments("
            "predict_with_generate=True), or use argmax, whose text is teacher-forced"
        )
    return {"generated": found.long()}


def _byte_alphabet() -> dict[str, int]:
    """The letters that stand for bytes in byte-level vocabularies: printable ones for themselves, the others moved."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(moved)}


def _letters(token: str, byte_of: dict[str, int]) -> bytes:
    """The bytes a token stands for; plain text that is not said to be added (runs of spaces) stands for itself."""
    return bytes(byte_of[letter] for letter in token) if byte_of.keys() >= {*token} else token.encode()


def _piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
