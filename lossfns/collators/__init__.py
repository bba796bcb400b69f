"""Wrappers around any data collator that add to a batch what a loss, a reducer or the Trainer's count needs.

Each wrapper raises TypeError if the object it wraps is not callable, and in the call if that does not return a dict.
"""

from .label_dicts import count_sequences, mask_sequence_starts, with_extras
from .labels import (
    keep_supervised_logits,
    mask_first_label,
    mask_missing,
    pack_spans,
    replace_labels,
    with_decoder_inputs,
)
from .pairs import count_pairs, stack_pairs
from .teacher import teacher_inputs

__all__ = [
    "count_pairs",
    "count_sequences",
    "keep_supervised_logits",
    "mask_first_label",
    "mask_missing",
    "mask_sequence_starts",
    "pack_spans",
    "replace_labels",
    "stack_pairs",
    "teacher_inputs",
    "with_decoder_inputs",
    "with_extras",
]
