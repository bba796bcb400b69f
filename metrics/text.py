"""Scores of texts: token ids are decoded, and established libraries (the extra `text`) compute the statistics.

Texts generated with `predict_with_generate` (the column `generated`, of `reducers.generated_ids` and
`reducers.ctc_greedy`) are scored under the plain keys. Ids predicted by teacher forcing (`argmax`), where the model
reads the reference while it predicts, say little about what it would write: their scores are named
`teacher_forced_{key}`.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from ._core.arguments import check
from ._core.evaluation import IGNORED, Array, Columns, describe, missing, named_columns
from ._core.metric import Metric, means, ratio

MATCH: dict[str, bool | None] = {"exact_match": True, "token_f1": True}
TRANSLATION: dict[str, bool | None] = {"bleu": True, "chrf": True, "ter": False}
ROUGE: dict[str, bool | None] = dict.fromkeys(("rouge1", "rouge2", "rougeL", "rougeLsum"), True)
TRANSCRIPTION: dict[str, bool | None] = {"wer": False, "cer": False}
TEACHER_FORCED = "teacher_forced_"
PUNCTUATION = str.maketrans("", "", string.punctuation)


def _either_way(keys: Mapping[str, bool | None]) -> dict[str, bool | None]:
    """Return the keys for generated texts and for teacher forcing."""
    return {start + key: better for start in ("", TEACHER_FORCED) for key, better in keys.items()}


HIGHER_IS_BETTER = _either_way(MATCH | TRANSLATION | ROUGE | TRANSCRIPTION)

Measure = Callable[[list[str], list[str]], Mapping[str, ArrayLike]]
Score = Callable[[Columns], Mapping[str, ArrayLike]]


class Tokenizer(Protocol):
    """An object that turns ids into texts: a tokenizer, or a processor that has one."""

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        """Return one text per sequence of ids."""


def decode(ids: Array, tokenizer: Tokenizer) -> list[str]:
    """Return texts for ids; -100 and other negative ids, special tokens and outer white space are left out.

    Args:
        ids: integers (samples, tokens), as predictions and labels come from the Trainer.
        tokenizer: an object with `batch_decode`.

    Returns:
        One text per sample.

    Raises:
        TypeError: if `ids` is not an array of integers with two dimensions, or `tokenizer` has no `batch_decode`.

    Example:
        >>> from types import SimpleNamespace
        >>> letters = SimpleNamespace(batch_decode=lambda rows, **_: [bytes(row).decode() for row in rows])
        >>> decode(np.array([[104, 105, -100], [33, -100, -100]]), letters)
        ['hi', '!']
    """
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim != 2:
        given = describe(ids) if isinstance(ids, np.ndarray) else f"a {type(ids).__name__}"
        raise TypeError(f"ids must be integers in one array (samples, tokens), got {given}")
    _check_tokenizer(tokenizer)
    rows = [row[row >= 0].tolist() for row in ids]
    return [text.strip() for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]


def text_match(tokenizer: Tokenizer) -> Metric:
    """Score texts by exact match and F1 of words, without case, punctuation and articles, as SQuAD does.

    With m the number of words that a text of p words and its reference of r words share::

        token_f1 = mean(2 m / (p + r))     exact_match = mean([the words are the same])

    Predictions are ids: the column `generated`, or an array of the labels' shape such as `argmax` returns. Labels are
    ids, -100 where there is no text. The keys are the two names above; without samples they are NaN.

    Args:
        tokenizer: an object with `batch_decode`.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Raises:
        TypeError: if `tokenizer` has no `batch_decode`.

    References:
        P. Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", 2016,
        https://arxiv.org/abs/1606.05250

    Example:
        >>> from types import SimpleNamespace
        >>> letters = SimpleNamespace(batch_decode=lambda rows, **_: [bytes(row).decode() for row in rows])
        >>> hi = np.array([[104, 105, -100]])
        >>> text_match(letters)(SimpleNamespace(predictions={"generated": hi}, label_ids=hi))["exact_match"]
        1.0
    """
    return _metric("text_match", tokenizer, _matches, partial(means, over="samples"), MATCH)


def translation(tokenizer: Tokenizer, *, tokenize: str = "13a") -> Metric:
    """Score texts by `bleu`, `chrf` and `ter` of the whole evaluation, in per cent, as sacrebleu does.

    Args:
        tokenizer: an object with `batch_decode`; predictions and labels are those of `text_match`.
        tokenize: sacrebleu's tokenizer for BLEU, such as "zh" or "ja-mecab".

    Returns:
        A metric to give to the Trainer as `compute_metrics`; it needs the extra `text`.

    Raises:
        TypeError: if `tokenizer` has no `batch_decode`.
        ValueError: if sacrebleu has no such tokenizer.
        ImportError: if the extra `text` is not installed.
        RuntimeError: if a package that the tokenizer needs is not installed, as sacrebleu says.

    References:
        M. Post, "A Call for Clarity in Reporting BLEU Scores", 2018, https://arxiv.org/abs/1804.08771
        M. Popovic, "chrF: character n-gram F-score for automatic MT evaluation", 2015,
        https://doi.org/10.18653/v1/W15-3049
        M. Snover et al., "A Study of Translation Edit Rate with Targeted Human Annotation", 2006,
        https://aclanthology.org/2006.amta-papers.25

    Example:
        >>> from types import SimpleNamespace
        >>> letters = SimpleNamespace(batch_decode=lambda rows, **_: [bytes(row).decode() for row in rows])
        >>> text = np.array([[*b"a text of five words"]])
        >>> round(translation(letters)(SimpleNamespace(predictions={"generated": text}, label_ids=text))["bleu"], 6)
        100.0
    """
    known = _library("sacrebleu.metrics").BLEU.TOKENIZERS
    if tokenize not in tuple(known):
        raise ValueError(f"tokenize must be one of {', '.join(known)}, got {tokenize!r}")
    if tokenize in ("ja-mecab", "ko-mecab"):  # these need another package; the rest load a model in the first call
        _sacrebleu(tokenize)
    measure, score = (partial(function, tokenize=tokenize) for function in (_segment_statistics, _corpus_scores))
    return _metric("translation", tokenizer, measure, score, TRANSLATION)


def summarization(tokenizer: Tokenizer, *, use_stemmer: bool = False) -> Metric:
    """Score texts by ROUGE: the mean F1 over samples of `rouge1`, `rouge2`, `rougeL`, `rougeLsum`, as rouge_score does.

    For `rougeLsum` texts must have one sentence per line.

    Args:
        tokenizer: an object with `batch_decode`; predictions and labels are those of `text_match`.
        use_stemmer: compare stems of English words.

    Returns:
        A metric to give to the Trainer as `compute_metrics`; it needs the extra `text`.

    Raises:
        TypeError: if `tokenizer` has no `batch_decode`.
        ImportError: if the extra `text` is not installed.

    References:
        C.-Y. Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004, https://aclanthology.org/W04-1013

    Example:
        >>> from types import SimpleNamespace
        >>> letters = SimpleNamespace(batch_decode=lambda rows, **_: [bytes(row).decode() for row in rows])
        >>> text = np.array([[*b"hello there"]])
        >>> summarization(letters)(SimpleNamespace(predictions={"generated": text}, label_ids=text))["rouge2"]
        1.0
    """
    _library("rouge_score.rouge_scorer")
    measure = partial(_rouge, use_stemmer=use_stemmer)
    return _metric("summarization", tokenizer, measure, partial(means, over="samples"), ROUGE)


def transcription(tokenizer: Tokenizer) -> Metric:
    """Score texts by word and character error rate, as jiwer does.

    With the substitutions, deletions and insertions that turn the references into the texts::

        wer = (edits of words) / (words of the references)     cer = the same with characters

    Args:
        tokenizer: an object with `batch_decode`; predictions and labels are those of `text_match`.

    Returns:
        A metric to give to the Trainer as `compute_metrics`; it needs the extra `text`. NaN if all references are
        empty.

    Raises:
        TypeError: if `tokenizer` has no `batch_decode`.
        ImportError: if the extra `text` is not installed.

    References:
        V. I. Levenshtein, "Binary codes capable of correcting deletions, insertions and reversals", 1966,
        https://ui.adsabs.harvard.edu/abs/1966SPhD...10..707L

    Example:
        >>> from types import SimpleNamespace
        >>> letters = SimpleNamespace(batch_decode=lambda rows, **_: [bytes(row).decode() for row in rows])
        >>> texts, references = np.array([[*b"a bat"]]), np.array([[*b"a cat"]])
        >>> transcription(letters)(SimpleNamespace(predictions={"generated": texts}, label_ids=references))
        {'wer': 0.5, 'cer': 0.2}
    """
    _library("jiwer")
    return _metric("transcription", tokenizer, _edits, _error_rates, TRANSCRIPTION)


def exact_match(text: str, reference: str) -> bool:
    """Return whether two texts have the same words, without case, punctuation and articles, as SQuAD does."""
    return _words(text) == _words(reference)


def token_f1(text: str, reference: str) -> float:
    """Return the F1 of the words of two texts, in [0, 1], as SQuAD does; 1.0 if neither has words, 0.0 if one has."""
    found, expected = _words(text), _words(reference)
    if not found or not expected:
        return float(found == expected)
    common = (Counter(found) & Counter(expected)).total()
    return 2 * common / (len(found) + len(expected))


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split()


# --- one metric, four measures ----------------------------------------------------------------------------------------


def _metric(
    name: str, tokenizer: Tokenizer, measure: Measure, score: Score, higher_is_better: Mapping[str, bool | None]
) -> Metric:
    _check_tokenizer(tokenizer)
    return Metric(
        statistics=_TextColumns(name, tokenizer, measure),
        score=_TextScores(name, score),
        higher_is_better=_either_way(higher_is_better),
    )


@dataclass(frozen=True)
class _TextColumns:
    """Statistics of decoded texts, in a nested dict under the prefix of their scores: "" or `TEACHER_FORCED`."""

    name: str
    tokenizer: Tokenizer
    measure: Measure

    def __call__(self, predictions: Any, labels: Any) -> dict[str, Any]:
        references = decode(labels, self.tokenizer)
        found = named_columns(predictions)
        ids = found.get("generated")
        prefix = "" if ids is not None else TEACHER_FORCED
        if ids is None:
            ids = predictions if isinstance(predictions, np.ndarray) else found.get("ids")
            if ids is None or ids.shape != labels.shape:
                shape = f"argmax of the labels' shape {labels.shape}"
                raise missing(f"ids: the column 'generated' (reducers.generated_ids), or {shape}", predictions)
            ids = np.where(labels == IGNORED, IGNORED, ids)
        texts = decode(ids, self.tokenizer)
        return {prefix: {**self.measure(texts, references), "samples": np.ones(len(texts), np.int64)}}

    def __repr__(self) -> str:
        return f"{self.name}_sums"


@dataclass(frozen=True)
class _TextScores:
    name: str
    score: Score

    def __call__(self, sums: Any) -> dict[str, ArrayLike]:
        return {prefix + key: value for prefix, part in sums.items() for key, value in self.score(part).items()}

    def __repr__(self) -> str:
        return f"{self.name}_scores"


def _check_tokenizer(tokenizer: Any) -> None:
    decodes = callable(getattr(tokenizer, "batch_decode", None)) and not isinstance(tokenizer, type)
    check(decodes, "tokenizer", "a tokenizer or processor with batch_decode", tokenizer)


def _matches(texts: list[str], references: list[str]) -> Columns:
    pairs = list(zip(texts, references, strict=True))
    return {
        "exact_match": np.array([exact_match(*pair) for pair in pairs], bool),
        "token_f1": np.array([token_f1(*pair) for pair in pairs], np.float64),
    }


def _sacrebleu(tokenize: str) -> dict[str, Any]:
    library = _library("sacrebleu.metrics")
    return {"bleu": library.BLEU(tokenize=tokenize), "chrf": library.CHRF(), "ter": library.TER()}


def _segment_statistics(texts: list[str], references: list[str], *, tokenize: str) -> Columns:
    """Return the statistics of each segment, which `_corpus_scores` scores after they are summed."""
    # A last pair of empty texts gives the number of statistics per segment even if there are no segments.
    given = [*texts, ""], [[*references, ""]]
    found = {name: metric._extract_corpus_statistics(*given) for name, metric in _sacrebleu(tokenize).items()}
    return {name: np.array(statistics, np.float64)[:-1] for name, statistics in found.items()}


def _corpus_scores(sums: Columns, *, tokenize: str) -> Columns:
    def score(metric: Any, sums: Array) -> Array:
        return np.apply_along_axis(lambda row: metric._compute_score_from_stats(row.tolist()).score, -1, sums)

    scores = {name: score(metric, sums[name]) for name, metric in _sacrebleu(tokenize).items()}
    return {name: np.where(sums["samples"] > 0, value, np.nan) for name, value in scores.items()}


def _rouge(texts: list[str], references: list[str], *, use_stemmer: bool) -> Columns:
    scorer = _library("rouge_score.rouge_scorer").RougeScorer([*ROUGE], use_stemmer=use_stemmer)
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {name: np.array([score[name].fmeasure for score in scores], np.float64) for name in ROUGE}


def _edits(texts: list[str], references: list[str]) -> Columns:
    jiwer = _library("jiwer")
    columns = {}
    for unit, process in (("word", jiwer.process_words), ("character", jiwer.process_characters)):
        counts = [process(reference, text) for text, reference in zip(texts, references, strict=True)]
        edits = [count.substitutions + count.deletions + count.insertions for count in counts]
        columns[f"{unit}_edits"] = np.array(edits, np.int64)
        lengths = [count.hits + count.substitutions + count.deletions for count in counts]
        columns[f"{unit}s"] = np.array(lengths, np.int64)
    return columns


def _error_rates(sums: Columns) -> Columns:
    return {"wer": ratio(sums["word_edits"], sums["words"]), "cer": ratio(sums["character_edits"], sums["characters"])}


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(f"{name.partition('.')[0]} is not installed: pip install 'lossfns[text]'") from None
