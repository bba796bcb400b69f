"""Log-probabilities of a reference model, computed once: afterwards no second model is in memory."""

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

from ._batch import Batch, Collator, collated
from ._options import whole
from .alignment import split_labels
from .hidden import HiddenStates
from .preference import pair_rows, sequence_log_probs

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
    if whole(batch_size, "batch_size") < 1:
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
