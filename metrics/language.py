"""Scores of language models, from sums over the tokens of each sample.

The reducer has already selected, shifted and counted the tokens; nothing here reads a label or shifts anything.
"""

from typing import Any

import numpy as np

from ._core.evaluation import Columns, missing, named_columns
from ._core.keys import find
from ._core.metric import Metric, ratio

# The columns that are read and what returns them: a contract between the two packages.
NEEDED = ("nll", "tokens", "correct", "all_correct")
COLUMNS = {
    **dict.fromkeys(NEEDED, "sample_sums"),
    "correct_top_{k}": "sample_sums with top_k=k",
    "entropy": "sample_sums with entropy=True",
    **dict.fromkeys(("bytes", "characters"), "text_lengths"),
}
HIGHER_IS_BETTER: dict[str, bool | None] = {
    **dict.fromkeys(("nll_loss", "perplexity", "bits_per_byte", "bits_per_character"), False),
    **dict.fromkeys(("token_accuracy", "top_{k}_accuracy", "sequence_accuracy"), True),
    **dict.fromkeys(("entropy", "tokens", "samples")),
}


def language_modeling() -> Metric:
    """Score language models per token: negative log-likelihood, perplexity and accuracies, from sums per sample.

    With nll the summed negative log-likelihood of n tokens, in nats::

        nll_loss = nll / n     perplexity = exp(nll / n)     bits_per_byte = nll / ln(2) / bytes

    The reducer is `sample_sums`; its columns may be in a dict of predictions, or in a dict inside it. The result is a
    ratio of sums over all tokens, so it depends on neither batch size nor padding. Keys:

    - `nll_loss` (nats per token); `perplexity`, inf where the exponential overflows;
    - `token_accuracy`, and `top_{k}_accuracy` for each column `correct_top_{k}`: fractions of the tokens;
    - `entropy`, if the column is given: nats per token;
    - `sequence_accuracy`: fraction of the samples with every token correct, among those that have tokens;
    - `bits_per_byte`, `bits_per_character`, if the columns of `reducers.text_lengths` are given: log-likelihood of the
      scored tokens per length of their text, which compares models with different vocabularies;
    - `tokens`, `samples`: the number of tokens scored, and of samples.

    Without tokens, ratios are NaN and counts 0.0.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    References:
        F. Jelinek, R. L. Mercer, L. R. Bahl, J. K. Baker, "Perplexity - a measure of the difficulty of speech
        recognition tasks", 1977, https://doi.org/10.1121/1.2016299

    Example:
        >>> from types import SimpleNamespace
        >>> sums = {"nll": [3.0, 1.0], "tokens": [5.0, 3.0], "correct": [2.0, 2.0], "all_correct": [0.0, 0.0]}
        >>> sums = {name: np.array(column) for name, column in sums.items()}
        >>> scores = language_modeling()(SimpleNamespace(predictions=sums, label_ids=np.zeros((2, 6))))
        >>> scores["nll_loss"], scores["token_accuracy"], scores["tokens"]
        (0.5, 0.5, 8.0)
    """
    return Metric(statistics=token_sums, score=token_scores, higher_is_better=HIGHER_IS_BETTER)


def token_sums(predictions: Any, labels: Any) -> Columns:
    """Return the columns of `sample_sums` that `token_scores` reads, and which samples count.

    Args:
        predictions: dict of arrays (samples,), or a dict of such dicts; other arrays in it are not read.
        labels: not read.

    Returns:
        Arrays (samples,): the columns in float64 (nats, tokens), `sequences` (1 if the sample has tokens), `samples`.

    Raises:
        ValueError: if a column is missing, is present twice, or is not one number per sample.
    """
    found = {name: column for name, column in named_columns(predictions).items() if find(name, COLUMNS)}
    absent = [name for name in NEEDED if name not in found]
    if absent:
        sources = "; ".join(f"{name}: {source}" for name, source in COLUMNS.items())
        raise missing(
            f"the columns {', '.join(NEEDED)}, of which {', '.join(absent)} are missing. Set "
            "preprocess_logits_for_metrics=partial(sample_sums, shift=1), or add its columns to others by "
            f"combine(sums=partial(sample_sums, shift=1), ...). Columns and their reducers: {sources}",
            predictions,
        )
    for name, column in found.items():
        if column.ndim != 1:
            raise ValueError(f"the column {name!r} must be one sum per sample, (samples,), got shape {column.shape}")
    columns = {name: column.astype(np.float64) for name, column in found.items()}
    sequences = columns["tokens"] > 0
    columns["all_correct"] = np.where(sequences, columns["all_correct"], 0.0)
    return {**columns, "sequences": sequences, "samples": np.ones_like(sequences, dtype=np.int64)}


def token_scores(sums: Columns) -> Columns:
    """Return the scores of `language_modeling`.

    Args:
        sums: the sums of `token_sums`, each of shape (...), for one evaluation or a stack of them.

    Returns:
        Scores of the same shape.
    """
    tokens = sums["tokens"]
    nll = ratio(sums["nll"], tokens)
    with np.errstate(over="ignore"):
        scores = {"nll_loss": nll, "perplexity": np.exp(nll), "token_accuracy": ratio(sums["correct"], tokens)}
    for name, total in sums.items():
        if name.startswith("correct_top_"):
            scores[f"{name.removeprefix('correct_')}_accuracy"] = ratio(total, tokens)
    for name, unit in (("bytes", "byte"), ("characters", "character")):
        if name in sums:
            scores[f"bits_per_{unit}"] = ratio(sums["nll"] / np.log(2), sums[name])
    if "entropy" in sums:
        scores["entropy"] = ratio(sums["entropy"], tokens)
    scores["sequence_accuracy"] = ratio(sums["all_correct"], sums["sequences"])
    return {**scores, "tokens": tokens, "samples": sums["samples"]}
