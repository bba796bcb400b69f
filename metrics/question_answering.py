"""Extractive question answering: from the best spans of windows to answers and their scores."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ._core.arguments import check, numbers, sequence
from ._core.evaluation import IGNORED, Array, Columns, describe, missing, named_columns
from ._core.metric import Metric
from ._core.order import check_order
from .text import exact_match, token_f1

# The columns that are read and the reducer that returns them: a contract between the two packages.
COLUMNS = dict.fromkeys(("starts", "ends", "scores", "null_scores"), "spans")

SCORES = ("exact_match", "token_f1")
HIGHER_IS_BETTER: dict[str, bool | None] = dict.fromkeys(
    (*SCORES, *(f"answerable_{key}" for key in SCORES), "unanswerable_exact_match"), True
)
POSITIONS = ("start_positions", "end_positions")


@dataclass(frozen=True, eq=False)
class Questions:
    """The score function of `extractive_qa`, with the data of the examples and features that it needs.

    Attributes:
        contexts: the context of each example.
        answers: the correct answers of each example.
        example_of: the index of each feature's example.
        offsets: first and last character of each token of each feature, -1 outside the context.
        null_threshold: see `extractive_qa`.
        positions: start and end of the answer of each feature, or None.
    """

    contexts: tuple[str, ...] = field(repr=False)
    answers: tuple[tuple[str, ...], ...] = field(repr=False)
    example_of: Array = field(repr=False)
    offsets: tuple[Array, ...] = field(repr=False)
    null_threshold: float
    positions: Array | None = field(repr=False)

    def __call__(self, rows: Columns) -> dict[str, ArrayLike]:
        """Return the scores of `extractive_qa`, from the columns of all features."""
        if self.positions is not None:
            self._check_order(rows["positions"], self.positions)
        pairs = list(zip(self.predicted(rows), [answers or ("",) for answers in self.answers], strict=True))
        values = {
            key: np.array([max(float(score(text, answer)) for answer in answers) for text, answers in pairs])
            for key, score in (("exact_match", exact_match), ("token_f1", token_f1))
        }
        answerable = np.array([bool(answers) for answers in self.answers])
        scores = {key: _mean(value) for key, value in values.items()}
        scores |= {f"answerable_{key}": _mean(value[answerable]) for key, value in values.items()}
        return {**scores, "unanswerable_exact_match": _mean(values["exact_match"][~answerable])}

    def predicted(self, rows: Columns) -> list[str]:
        """Return the answer to each question, from the columns of all features; empty for "no answer"."""
        count = len(self.contexts)
        best, null = np.full(count, -np.inf), np.full(count, np.inf)
        texts = [""] * count
        for feature, example in enumerate(self.example_of):
            null[example] = min(null[example], rows["null_scores"][feature])
            spans = (rows[name][feature] for name in ("starts", "ends", "scores"))
            for start, end, score in zip(*spans, strict=True):
                place = self._place(feature, start, end)
                if place is not None:
                    if score > best[example]:
                        best[example], texts[example] = score, self.contexts[example][place]
                    break  # spans are sorted, the best first
        if all(self.answers):
            return texts
        with np.errstate(invalid="ignore"):  # infinite scores
            unanswered = null - best > self.null_threshold
        return ["" if none else text for text, none in zip(texts, unanswered, strict=True)]

    def _check_order(self, found: Array, expected: Array) -> None:
        """Raise if positions differ; `pack_spans` sets those outside the batch, and so outside the window, to -100."""
        widths = np.array([len(offsets) for offsets in self.offsets])[:, None]
        outside = (expected < 0) | (expected >= widths)
        check_order(((found != expected) & ~(outside & (found == IGNORED))).any(1))

    def _place(self, feature: int, start: int, end: int) -> slice | None:
        offsets = self.offsets[feature]
        if not 0 <= start <= end < len(offsets) or min(offsets[start, 0], offsets[end, 0]) < 0:
            return None
        return slice(offsets[start, 0], offsets[end, 1])


def extractive_qa(
    examples: Iterable[Mapping[str, Any]], features: Iterable[Mapping[str, Any]], *, null_threshold: float = 0.0
) -> Metric:
    """Score answers to questions by exact match and F1 of words, as SQuAD 1.1 and 2.0 do, in [0, 1].

    The scores of an answer are its best over the correct answers, computed as by `text_match`.

    The evaluation set is `features`, one or several windows per example, and the reducer is `spans`. The best span of a
    feature that lies in its context is its answer, and the best over the features of an example is the example's. If
    some question has no correct answer (SQuAD 2.0), the answer is "" where the lowest "no answer" score of the windows
    exceeds the score of the best span by more than `null_threshold`. Keys: `exact_match`, `token_f1`; the same as
    `answerable_{key}` over the questions that have an answer; and `unanswerable_exact_match` over those that have none.
    A score without questions is NaN.

    The rows of the evaluation are matched with `features` by their order. Their number is checked, and if features have
    `start_positions` and `end_positions` the order is checked by the labels: a sampler that reorders raises. Labels are
    these positions, or the output of `lossfns.collators.pack_spans`: -100 for those outside the window.

    Args:
        examples: rows with `id`, `context` and `answers`, a dict with the list `text`, empty where there is none.
        features: rows with `example_id` and `offset_mapping`, a pair of characters per token, None outside the context.
        null_threshold: see above, in logits.

    Returns:
        A metric that needs all rows at once.

    Raises:
        TypeError: if contexts, answers, positions or offsets have another type.
        ValueError: if there are no features, a feature belongs to an unknown example, two examples have the same id, a
            row lacks a column, or `null_threshold` is NaN.

    References:
        P. Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", 2016,
        https://arxiv.org/abs/1606.05250
        P. Rajpurkar, R. Jia, P. Liang, "Know What You Don't Know: Unanswerable Questions for SQuAD", 2018,
        https://arxiv.org/abs/1806.03822

    Example:
        >>> from types import SimpleNamespace
        >>> examples = [{"id": 7, "context": "It rains.", "answers": {"text": ["rains"]}}]
        >>> features = [{"example_id": 7, "offset_mapping": [None, (0, 2), (3, 8), (8, 9)]}]
        >>> found = {"starts": np.array([[0, 2]]), "ends": np.array([[1, 2]]), "scores": np.array([[9.0, 3.0]])}
        >>> found = SimpleNamespace(predictions=found | {"null_scores": np.zeros(1)}, label_ids=np.array([[2, 2]]))
        >>> extractive_qa(examples, features)(found)["exact_match"]
        1.0
    """
    examples = _rows("examples", examples, ("id", "context", "answers"))
    features = _rows("features", features, ("example_id", "offset_mapping"))
    places = {example["id"]: place for place, example in enumerate(examples)}
    if len(places) < len(examples):
        raise ValueError(f"each example must have a different id, got {len(examples)} examples with {len(places)} ids")
    unknown = [feature["example_id"] for feature in features if feature["example_id"] not in places]
    if unknown or not features:
        raise ValueError(
            f"features must belong to the examples, got {len(features)} features, unknown ids {unknown[:3]}"
        )
    if math.isnan(null_threshold):
        raise ValueError("null_threshold must be a number of logits, got nan")
    answers = _rows("the answers of examples", [example["answers"] for example in examples], ("text",))
    positions = _positions(features) if all(name in features[0] for name in POSITIONS) else None
    questions = Questions(
        contexts=_strings("the contexts", [example["context"] for example in examples]),
        answers=tuple(_strings("the 'text' of answers", answer["text"]) for answer in answers),
        example_of=np.array([places[feature["example_id"]] for feature in features]),
        offsets=tuple(_offsets(feature["offset_mapping"]) for feature in features),
        null_threshold=null_threshold,
        positions=positions,
    )
    return Metric(
        statistics=span_columns if positions is None else spans_and_positions,
        score=questions,
        higher_is_better=HIGHER_IS_BETTER,
        needs_all_samples="windows are matched with questions by their place in the whole evaluation",
        depends_on_order=True,
        num_samples=len(features),
    )


def span_columns(predictions: Any, labels: Any) -> Columns:
    """Return the columns of `reducers.spans`.

    Raises:
        ValueError: if a column is missing or has another shape, or logits were NaN.
    """
    found = named_columns(predictions)
    if any(name not in found for name in COLUMNS):
        raise missing(f"the columns {', '.join(COLUMNS)} (set preprocess_logits_for_metrics=spans)", predictions)
    columns = {name: found[name] for name in COLUMNS}
    shapes = {columns[name].shape for name in ("starts", "ends", "scores")}
    if len(shapes) > 1 or columns["starts"].ndim != 2 or columns["null_scores"].ndim != 1:
        raise ValueError(f"starts, ends and scores must be (B, spans) and null_scores (B,), got {describe(columns)}")
    if np.isnan(columns["null_scores"]).any():
        raise ValueError("null_scores are NaN because the logits are: the model has diverged")
    return columns


def spans_and_positions(predictions: Any, labels: Any) -> Columns:
    """Return the columns of `reducers.spans`, and `positions` (B, 2), start and end of the answers.

    Raises:
        ValueError: if labels are not a pair of positions, or as for `span_columns`.
    """
    several = isinstance(labels, tuple) and len({part.shape for part in labels}) == 1
    pair = np.stack(labels, axis=1) if several else labels
    if not isinstance(pair, np.ndarray) or pair.ndim != 2 or pair.shape[1] < 2 or (pair[:, 2:] != IGNORED).any():
        raise ValueError(
            f"features have {' and '.join(POSITIONS)}, so labels must be both of them, or one array (B, 2), as "
            f"lossfns.collators.pack_spans makes it; got {describe(labels)}"
        )
    return {**span_columns(predictions, labels), "positions": pair[:, :2]}  # the rest is padding


def _rows(name: str, rows: Iterable[Any], columns: tuple[str, ...]) -> list[Mapping[str, Any]]:
    found = list(rows)
    for place, row in enumerate(found):
        absent = [column for column in columns if not isinstance(row, Mapping) or column not in row]
        if absent:
            raise ValueError(f"{name} must be dicts with {', '.join(columns)}; row {place} lacks {', '.join(absent)}")
    return found


def _positions(features: list[Mapping[str, Any]]) -> Array:
    """Return start and end of the answers (features, 2)."""
    pairs = [[feature.get(name) for name in POSITIONS] for feature in features]
    name, expected = " and ".join(POSITIONS), "one token each, in all features if in the first"
    found = numbers(name, pairs, expected)
    check(found.ndim == 2, name, expected, pairs)
    return found


def _strings(name: str, values: Any) -> tuple[str, ...]:
    found = sequence(name, values, "a list of texts")
    fits = not isinstance(values, str) and all(isinstance(text, str) for text in found)
    check(fits, name, "a list of texts", values)
    return tuple(found)


def _offsets(pairs: Iterable[Any]) -> Array:
    name, expected = "offset_mapping", "a pair of characters per token, None outside the context"
    given = [(-1, -1) if pair is None else pair for pair in pairs]
    found = numbers(name, given, expected) if given else np.zeros((0, 2))
    check(found.ndim == 2 and found.shape[1] == 2, name, expected, given)
    return found.astype(np.int64)


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else np.nan
