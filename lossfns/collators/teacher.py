"""A collator wrapper that passes the inputs of a teacher model to `distillation_loss`."""

from __future__ import annotations

from collections.abc import Sequence

from .._core.checks import strings
from .._core.teacher import PREFIX
from .label_dicts import WithExtras, with_extras
from .wrapper import Batch, Changed, Collator


def teacher_inputs(
    collator: Collator, *, shift: int | None = None, names: Sequence[str] = ("input_ids", "attention_mask")
) -> WithExtras:
    """Copy the inputs of a teacher into the dict of labels, where `distillation_loss(teacher=model)` finds them.

    This is needed because a loss receives only the outputs and labels of a batch. Student and teacher must share the
    tokenizer.

    Args:
        collator: any data collator that returns `labels` `(B, S)`.
        shift: 1 for causal models, 0 for all others; required for labels `(B, S)`.
        names: the inputs of the teacher's forward.

    Returns:
        A picklable collator: `with_extras` for `teacher_input_ids` and so on.

    Raises:
        TypeError: `names` are not strings.
        ValueError: in the call: the batch lacks one of the inputs, or `shift` is missing.
        ImportError: as for `with_extras`.

    Example:
        >>> import torch
        >>> collate = teacher_inputs(lambda rows: {name: torch.tensor([row[name] for row in rows]) for name in rows[0]},
        ...                          shift=1, names=["input_ids"])
        >>> sorted(collate([{"input_ids": [5, 6], "labels": [5, 6]}])["labels"])
        ['labels', 'teacher_input_ids']
    """
    read = strings(names, "names")
    return with_extras(Changed(collator, _with_copies, {"names": read}), [PREFIX + name for name in read], shift=shift)


def _with_copies(batch: Batch, names: Sequence[str]) -> Batch:
    """Copy inputs of the model under the names of the teacher's inputs."""
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(f"the teacher needs {missing}, but the collator returns {sorted(batch)}; pass names=")
    return {**batch, **{PREFIX + name: batch[name] for name in names}}
