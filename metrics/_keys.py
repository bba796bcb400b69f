"""The names of scores: which the Trainer keeps for itself, and which name belongs to which entry of a table."""

import re
from collections.abc import Iterable

# What the Trainer writes under its own prefix beside, or over, the scores of compute_metrics.
RESERVED = frozenset(
    {
        "epoch",
        "jit_compilation_time",
        "loss",
        "model_preparation_time",
        "num_input_tokens_seen",
        "runtime",
        "samples_per_second",
        "step",
        "steps_per_second",
        "tokens_per_second",
        "total_flos",
    }
)
# The Trainer leaves a prefix alone that is there already, so `eval_x` would silently replace `x`.
RESERVED_PREFIXES = ("eval_", "test_", "mem_")


def find(key: str, known: Iterable[str], *, prefixed: bool = False) -> str | None:
    """Return the longest entry of `known` that names `key`, or None.

    Args:
        key: a score's name, as `top_5_accuracy`.
        known: names, or patterns with a placeholder in braces, as `top_{k}_accuracy`.
        prefixed: whether `key` may have any prefix that ends in an underscore.

    Returns:
        An entry of `known`, or None.
    """
    prefix = "(?:.+_)?" if prefixed else ""
    fitting = [entry for entry in known if re.fullmatch(prefix + _pattern(entry), key)]
    return max(fitting, key=len, default=None)


def check_free(keys: Iterable[str]) -> None:
    """Refuse names that the Trainer writes itself.

    Args:
        keys: names of scores.

    Raises:
        ValueError: a name is reserved.
    """
    for key in keys:
        if key in RESERVED or key.startswith(RESERVED_PREFIXES):
            raise ValueError(
                f"the score {key!r} has a name that the Trainer writes itself: one would overwrite the other. Choose "
                f"another name, as 'nll_loss' for 'loss'. Reserved are {', '.join(sorted(RESERVED))} and what starts "
                f"with {', '.join(RESERVED_PREFIXES)}"
            )


def collision(left: Iterable[str], right: Iterable[str]) -> str | None:
    """Return a name of `right` that `left` has too, or None; a pattern has all the names that fit it."""
    left = tuple(left)
    return next((key for key in right if find(key, left) or any(find(other, (key,)) for other in left)), None)


def _pattern(entry: str) -> str:
    return re.sub(r"\\\{\w+\\\}", ".+", re.escape(entry))
