"""Names of scores: those that the Trainer reserves, and the entry of a table that a name belongs to."""

import re
from collections.abc import Collection, Iterable

# Keys that the Trainer writes itself, next to the scores of compute_metrics and under the same prefix.
RESERVED = {
    *("epoch", "jit_compilation_time", "loss", "model_preparation_time", "num_input_tokens_seen", "runtime"),
    *("samples_per_second", "step", "steps_per_second", "tokens_per_second", "total_flos"),
}
# The Trainer does not add a prefix that is already there, so `eval_x` would silently replace `x`.
RESERVED_PREFIXES = ("eval_", "test_", "mem_")


def find(key: str, known: Collection[str], *, prefixed: bool = False) -> str | None:
    """Return the entry of `known` that `key` belongs to: the key itself, or else the longest match.

    Args:
        key: the name of a score, such as `top_5_accuracy`.
        known: names, or patterns with a placeholder in braces, such as `top_{k}_accuracy`.
        prefixed: whether `key` may have any prefix that ends in an underscore.

    Returns:
        An entry of `known`, or None.
    """
    if key in known:
        return key
    return max((entry for entry in known if _matches(entry, key, prefixed)), key=len, default=None)


def is_reserved(key: str) -> bool:
    """Return whether the Trainer writes a score of this name itself."""
    return key in RESERVED or key.startswith(RESERVED_PREFIXES)


def check_free(keys: Iterable[str]) -> None:
    """Raise ValueError if the Trainer writes a score of one of these names itself.

    Args:
        keys: names of scores.

    Raises:
        ValueError: if a name is reserved.
    """
    for key in keys:
        if is_reserved(key):
            raise ValueError(
                f"the score {key!r} has a name that the Trainer writes itself, so one would overwrite the other: "
                f"choose another name, such as 'nll_loss' for 'loss'. Reserved are {', '.join(sorted(RESERVED))} and "
                f"names that start with {', '.join(RESERVED_PREFIXES)}"
            )


def collision(left: Iterable[str], right: Iterable[str]) -> str | None:
    """Return a name of `right` that is also in `left`, or None; a pattern represents all names that match it."""
    left = dict.fromkeys(left)
    patterns = [entry for entry in left if _is_pattern(entry)]

    def taken(key: str) -> bool:
        known = key in left or find(key, patterns) is not None
        return known or (_is_pattern(key) and any(find(other, (key,)) for other in left))

    return next(filter(taken, right), None)


def _is_pattern(entry: str) -> bool:
    return "{" in entry


def _matches(entry: str, key: str, prefixed: bool) -> bool:
    if not _is_pattern(entry):  # compiling a regular expression for each plain name would be slow
        return key == entry or (prefixed and key[1:].endswith(f"_{entry}"))
    pattern = re.sub(r"\\\{\w+\\\}", ".+", re.escape(entry))
    return re.fullmatch(f"(?:.+_)?{pattern}" if prefixed else pattern, key) is not None
