"""Scores of texts: token ids are decoded, and well-kept libraries (the extra `text`) count what adds up over samples.

What `predict_with_generate` produced (the column `generated`, of `reducers.generated` and `reducers.ctc_greedy`) is
scored under the plain keys. Ids that a model predicted while it read the right answer (`argmax`) say little about what
it would write: their scores are called `teacher_forced_{key}`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from ._answers import exact_match, token_f1
from ._core.arguments import check
from ._core.classes import IGNORED, missing
from ._core.evaluation import Array, Columns, describe, named_columns
from ._core.metric import Metric, ratio

MATCH: dict[str, bool | None] = {"exact_match": True, "token_f1": True}
TRANSLATION: dict[str, bool | None] = {"bleu": True, "chrf": True, "ter": False}
ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
TRANSCRIPTION: dict[str, bool | None] = {"wer": False, "cer": False}
TEACHER_FORCED = "teacher_forced_"

_PLAIN: dict[str, bool | None] = {**MATCH, **TRANSLATION, **dict.fromkeys(ROUGE, True), **TRANSCRIPTION}
DIRECTIONS: dict[str, bool | None] = {start + key: up for start in ("", TEACHER_FORCED) for key, up in _PLAIN.items()}

Measure = Callable[[list[str], list[str]], Mapping[str, ArrayLike]]


class Tokenizer(Protocol):
    """What can turn ids into texts: a tokenizer, or a processor that has one."""

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        """Return a text for each sequence of ids."""


def decode(ids: Array, tokenizer: Tokenizer) -> list[str]:
    """Turn ids into texts; -100 and other negative ids, special tokens and outer white space are left out.

    Args:
        ids: integers (samples, tokens), as predictions and labels come from the Trainer.
        tokenizer: anything with `batch_decode`.

    Returns:
        A text a sample.

    Raises:
        TypeError: not an array of integers with two dimensions, or no tokenizer.

    Example:
        >>> from types import SimpleNamespace
        >>> letters = SimpleNamespace(batch_decode=lambda rows, **_: [bytes(row).decode() for row in rows])
        >>> decode(np.array([[104, 105, -100], [33, -100, -100]]), letters)
        ['hi', '!']
    """
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim != 2:
        came = describe(ids) if isinstance(ids, np.ndarray) else f"a {type(ids).__name__}"
        raise TypeError(f"ids must be integers in one array (samples, tokens); {came} came")
    _check_tokenizer(tokenizer)
    rows = [row[row >= 0].tolist() for row in ids]
    return [text.strip() for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]


def text_match(tokenizer: Tokenizer) -> Metric:
    """Score texts by exact match and F1 of words, without case, punctuation and articles, as SQuAD does.

    Predictions are ids, the column `generated`, or the labels' shape as `argmax` returns; labels are ids, -100 where
    there is no text. Keys: `exact_match`, `token_f1` (the mean over samples); NaN without samples.

    Args:
        tokenizer: anything with `batch_decode`.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Raises:
        TypeError: no tokenizer.

    Source: P. Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", 2016.

    Example:
        >>> from types import SimpleNamespace
        >>> letters = SimpleNamespace(batch_decode=lambda rows, **_: [bytes(row).decode() for row in rows])
        >>> hi = np.array([[104, 105, -100]])
        >>> text_match(letters)(SimpleNamespace(predictions={"generated": hi}, label_ids=hi))["exact_match"]
        1.0
    """
    return _metric("text_match", tokenizer, _matches, _means, MATCH)


def translation(tokenizer: Tokenizer, *, tokenize: str = "13a") -> Metric:
    """Score texts by `bleu`, `chrf` and `ter` of the whole evaluation, in per cent, as sacrebleu does.

    Args:
        tokenizer: anything with `batch_decode`; predictions and labels as for `text_match`.
        tokenize: sacrebleu's tokeniser for BLEU, as "zh" or "ja-mecab".

    Returns:
        A metric to give to the Trainer as `compute_metrics`; needs the extra `text`.

    Raises:
        TypeError: no tokenizer.
        ValueError: a tokeniser that sacrebleu doesn't have.
        ImportError: the extra `text` is not installed.
        RuntimeError: what the tokeniser itself needs is not installed, as sacrebleu says.

    Source: M. Post, "A Call for Clarity in Reporting BLEU Scores", 2018; M. Popovic, "chrF: character n-gram F-score
    for automatic MT evaluation", 2015; M. Snover et al., "A Study of Translation Edit Rate", 2006.

    Example:
        >>> from types import SimpleNamespace
        >>> letters = SimpleNamespace(batch_decode=lambda rows, **_: [bytes(row).decode() for row in rows])
        >>> text = np.array([[*b"a text of five words"]])
        >>> round(translation(letters)(SimpleNamespace(predictions={"generated": text}, label_ids=text))["bleu"], 6)
        100.0
    """
    counting = _Sacrebleu(tokenize)
    known = _library("sacrebleu.metrics").BLEU.TOKENIZERS
    if tokenize not in tuple(known):
        raise ValueError(f"tokenize is one of {', '.join(known)}; {tokenize!r} came")
    if tokenize in ("ja-mecab", "ko-mecab"):  # they need a package of their own; others load a model in the first call
        counting.metrics()
    return _metric("translation", tokenizer, counting.statistics, counting.scores, TRANSLATION)


def summarization(tokenizer: Tokenizer, *, use_stemmer: bool = False) -> Metric:
    """Score texts by ROUGE: the mean F1 over samples of `rouge1`, `rouge2`, `rougeL`, `rougeLsum`, as rouge_score does.

    For `rougeLsum` texts have one sentence a line.

    Args:
        tokenizer: anything with `batch_decode`; predictions and labels as for `text_match`.
        use_stemmer: compare stems of English words.

    Returns:
        A metric to give to the Trainer as `compute_metrics`; needs the extra `text`.

    Raises:
        TypeError: no tokenizer.
        ImportError: the extra `text` is not installed.

    Source: C.-Y. Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004.

    Example:
        >>> from types import SimpleNamespace
        >>> letters = SimpleNamespace(batch_decode=lambda rows, **_: [bytes(row).decode() for row in rows])
        >>> text = np.array([[*b"hello there"]])
        >>> summarization(letters)(SimpleNamespace(predictions={"generated": text}, label_ids=text))["rouge2"]
        1.0
    """
    _library("rouge_score.rouge_scorer")
    return _metric("summarization", tokenizer, _Rouge(use_stemmer), _means, dict.fromkeys(ROUGE, True))


def transcription(tokenizer: Tokenizer) -> Metric:
    """Score texts by `wer` and `cer`: edits of words and characters by the length of the references, as jiwer does.

    Args:
        tokenizer: anything with `batch_decode`; predictions and labels as for `text_match`.

    Returns:
        A metric to give to the Trainer as `compute_metrics`; needs the extra `text`. NaN where no reference has any.

    Raises:
        TypeError: no tokenizer.
        ImportError: the extra `text` is not installed.

    Source: V. I. Levenshtein, "Binary codes capable of correcting deletions, insertions and reversals", 1966.

    Example:
        >>> from types import SimpleNamespace
        >>> letters = SimpleNamespace(batch_decode=lambda rows, **_: [bytes(row).decode() for row in rows])
        >>> heard, said = np.array([[*b"a bat"]]), np.array([[*b"a cat"]])
        >>> transcription(letters)(SimpleNamespace(predictions={"generated": heard}, label_ids=said))
        {'wer': 0.5, 'cer': 0.2}
    """
    _library("jiwer")
    return _metric("transcription", tokenizer, _edits, _error_rates, TRANSCRIPTION)


def texts(predictions: Any, labels: Any, tokenizer: Tokenizer) -> tuple[list[str], list[str], bool]:
    """Return the predicted texts, the references, and whether the model read the references while it predicted.

    Raises:
        TypeError: labels or predictions are no ids.
        ValueError: predictions hold neither `generated` nor ids of the labels' shape.
    """
    references = decode(labels, tokenizer)
    found = named_columns(predictions)
    if "generated" in found:
        return decode(found["generated"], tokenizer), references, False
    ids = predictions if isinstance(predictions, np.ndarray) else found.get("ids")
    if ids is None or ids.shape != labels.shape:
        raise missing(
            f"ids: the column 'generated' (reducers.generated), or argmax of the labels' shape {labels.shape}",
            predictions,
        )
    return decode(np.where(labels == IGNORED, IGNORED, ids), tokenizer), references, True


# --- one metric, four ways to count -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TextColumns:
    """Statistics of decoded texts, under the names that say how the texts came about."""

    name: str
    tokenizer: Tokenizer
    measure: Measure

    def __repr__(self) -> str:
        return f"{self.name}_sums"

    def __call__(self, predictions: Any, labels: Any) -> dict[str, ArrayLike]:
        found, references, forced = texts(predictions, labels, self.tokenizer)
        columns = {**self.measure(found, references), "samples": np.ones(len(found), np.int64)}
        return {TEACHER_FORCED * forced + name: column for name, column in columns.items()}


@dataclass(frozen=True)
class _TextScores:
    name: str
    score: Callable[[Columns], Mapping[str, ArrayLike]]

    def __repr__(self) -> str:
        return f"{self.name}_scores"

    def __call__(self, sums: Columns) -> dict[str, ArrayLike]:
        start = TEACHER_FORCED * ("samples" not in sums)
        own = {name.removeprefix(start): value for name, value in sums.items()}
        return {start + key: value for key, value in self.score(own).items()}


def _metric(
    name: str,
    tokenizer: Tokenizer,
    measure: Measure,
    score: Callable[[Columns], Mapping[str, ArrayLike]],
    directions: Mapping[str, bool | None],
) -> Metric:
    _check_tokenizer(tokenizer)
    return Metric(
        statistics=_TextColumns(name, tokenizer, measure),
        score=_TextScores(name, score),
        directions={start + key: better for start in ("", TEACHER_FORCED) for key, better in directions.items()},
    )


def _check_tokenizer(tokenizer: Any) -> None:
    decodes = callable(getattr(tokenizer, "batch_decode", None)) and not isinstance(tokenizer, type)
    check(decodes, "the tokenizer", "a tokenizer or processor, which has batch_decode", tokenizer)


def _matches(found: list[str], references: list[str]) -> Columns:
    pairs = list(zip(found, references, strict=True))
    return {
        "exact_match": np.array([exact_match(*pair) for pair in pairs], bool),
        "token_f1": np.array([token_f1(*pair) for pair in pairs], np.float64),
    }


def _means(sums: Columns) -> Columns:
    return {name: ratio(total, sums["samples"]) for name, total in sums.items() if name != "samples"}


@dataclass(frozen=True)
class _Sacrebleu:
    """The statistics of each segment, which sacrebleu itself adds up."""

    tokenize: str

    def metrics(self) -> dict[str, Any]:
        library = _library("sacrebleu.metrics")
        return {"bleu": library.BLEU(tokenize=self.tokenize), "chrf": library.CHRF(), "ter": library.TER()}

    def statistics(self, found: list[str], references: list[str]) -> Columns:
        # One more pair of empty texts tells how many numbers a segment has, where there is none.
        given = [*found, ""], [[*references, ""]]
        return {
            name: np.array(metric._extract_corpus_statistics(*given), np.float64)[:-1]
            for name, metric in self.metrics().items()
        }

    def scores(self, sums: Columns) -> Columns:
        metrics = self.metrics()

        def score(name: str) -> Array:
            return np.apply_along_axis(
                lambda row: metrics[name]._compute_score_from_stats(row.tolist()).score, -1, sums[name]
            )

        return {name: np.where(sums["samples"] > 0, score(name), np.nan) for name in metrics}


@dataclass(frozen=True)
class _Rouge:
    use_stemmer: bool

    def __call__(self, found: list[str], references: list[str]) -> Columns:
        scorer = _library("rouge_score.rouge_scorer").RougeScorer([*ROUGE], use_stemmer=self.use_stemmer)
        scores = [scorer.score(reference, text) for text, reference in zip(found, references, strict=True)]
        return {name: np.array([score[name].fmeasure for score in scores], np.float64) for name in ROUGE}


def _edits(found: list[str], references: list[str]) -> Columns:
    jiwer = _library("jiwer")
    columns: dict[str, list[int]] = {
        name: [] for unit in ("word", "character") for name in (f"{unit}_edits", f"{unit}s")
    }
    for text, reference in zip(found, references, strict=True):
        for unit, process in (("word", jiwer.process_words), ("character", jiwer.process_characters)):
            counts = process(reference, text)
            columns[f"{unit}_edits"].append(counts.substitutions + counts.deletions + counts.insertions)
            columns[f"{unit}s"].append(counts.hits + counts.substitutions + counts.deletions)
    return {name: np.array(values, np.int64) for name, values in columns.items()}


def _error_rates(sums: Columns) -> Columns:
    return {"wer": ratio(sums["word_edits"], sums["words"]), "cer": ratio(sums["character_edits"], sums["characters"])}


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(f"{name.partition('.')[0]} is not installed: pip install 'lossfns[text]'") from None
