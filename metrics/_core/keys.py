"""The names of scores: which the Trainer keeps for itself, and which name belongs to which entry of a table."""

import re
from collections.abc import Collection, Iterable

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


def find(key: str, known: Collection[str], *, prefixed: bool = False) -> str | None:
    """Return the entry of `known` that names `key`: itself, or the longest; or None.

    Args:
        key: a score's name, as `top_5_accuracy`.
        known: names, or patterns with a placeholder in braces, as `top_{k}_accuracy`.
        prefixed: whether `key` may have any prefix that ends in an underscore.

    Returns:
        An entry of `known`, or None.
    """
    if key in known:
        return key
    return max((entry for entry in known if _names(entry, key, prefixed)), key=len, default=None)


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
    left = dict.fromkeys(left)
    patterns = [entry for entry in left if _is_pattern(entry)]

    def taken(key: str) -> bool:
        own = key in left or find(key, patterns) is not None
        return own or (_is_pattern(key) and any(find(other, (key,)) for other in left))

    return next(filter(taken, right), None)


def _is_pattern(entry: str) -> bool:
    return "{" in entry


def _names(entry: str, key: str, prefixed: bool) -> bool:
    if not _is_pattern(entry):  # nearly all of them, where each would compile a regular expression of its own
        return key == entry or (prefixed and key[1:].endswith(f"_{entry}"))
    pattern = re.sub(r"\\\{\w+\\\}", ".+", re.escape(entry))
    return re.fullmatch(f"(?:.+_)?{pattern}" if prefixed else pattern, key) is not None
