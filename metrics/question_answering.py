"""Extractive question answering in the stock Trainer: from the best spans of windows to answers and their scores."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ._answers import exact_match, token_f1
from ._core.arguments import check, number, numbers, sequence
from ._core.classes import IGNORED
from ._core.evaluation import Array, Columns, describe, named_columns
from ._core.metric import Metric, Statistics
from ._core.order import check_order

# The columns read here and what returns them: a contract between the two packages.
COLUMNS = dict.fromkeys(("starts", "ends", "scores", "null_scores"), "spans")

SCORES = ("exact_match", "token_f1")
DIRECTIONS: dict[str, bool | None] = dict.fromkeys(
    (*SCORES, *(f"answerable_{key}" for key in SCORES), "unanswerable_exact_match"), True
)
POSITIONS = ("start_positions", "end_positions")


@dataclass(frozen=True, eq=False)
class Questions:
    """Contexts and right answers of the examples; of each feature its example and its offsets, -1 off the context."""

    contexts: tuple[str, ...] = field(repr=False)
    answers: tuple[tuple[str, ...], ...] = field(repr=False)
    example_of: Array = field(repr=False)
    offsets: tuple[Array, ...] = field(repr=False)
    null_threshold: float
    positions: Array | None = field(repr=False)

    def __call__(self, rows: Columns) -> dict[str, ArrayLike]:
        """Return the scores that `extractive_qa` lists, from the columns of all features."""
        if self.positions is not None:
            self._check_order(rows["positions"], self.positions)
        texts = self.predicted(rows)
        golds = [answers or ("",) for answers in self.answers]
        functions = {"exact_match": exact_match, "token_f1": token_f1}
        values = {
            key: np.array(
                [
                    max(map(float, (score(text, gold) for gold in gold_texts)))
                    for text, gold_texts in zip(texts, golds, strict=True)
                ]
            )
            for key, score in functions.items()
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
                    break  # spans come best first
        if all(self.answers):
            return texts
        with np.errstate(invalid="ignore"):  # infinite scores
            absent = null - best > self.null_threshold
        return ["" if none else text for text, none in zip(texts, absent, strict=True)]

    def _check_order(self, found: Array, expected: Array) -> None:
        """A position off its window comes as it is, or as -100, which `pack_spans` makes of those off the batch."""
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
    """Score answers to questions: exact match and F1 of words, as SQuAD 1.1 and 2.0, in fractions.

    The evaluation set is `features`, one or several windows an example, and the reducer `spans`. A feature's best span
    that lies in its context is its answer, and the best of an example's features is the example's. Where some question
    has no right answer (SQuAD 2.0), the answer is "" if the best "no answer" score of the windows (the lowest) is
    higher by more than `null_threshold`. Keys: `exact_match`, `token_f1`; the same as `answerable_{key}` over the
    questions that have an answer, and `unanswerable_exact_match` over those that have none; NaN where there is none.

    The rows of the evaluation are matched with `features` by their order. Their number is checked, and, where features
    have `start_positions` and `end_positions`, the order by the labels: a sampler that reorders raises. Labels are
    these positions, or what `lossfns.collators.pack_spans` makes of them: -100 for those outside the window.

    Args:
        examples: rows with `id`, `context` and `answers`, a dict with the list `text`, empty where there is none.
        features: rows with `example_id` and `offset_mapping`, a pair of characters a token, None off the context.
        null_threshold: as above, in logits.

    Returns:
        A metric that needs all rows at once.

    Raises:
        ValueError: no feature, or one of an unknown example, or two examples of one id; a row lacks a column, or has
            other things in it.
        TypeError: examples or features are no rows, or the threshold no number.

    Source: P. Rajpurkar, R. Jia, P. Liang, "Know What You Don't Know: Unanswerable Questions for SQuAD", 2018.

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
    places = {_id(example["id"]): place for place, example in enumerate(examples)}
    if len(places) < len(examples):
        raise ValueError(f"each example has an id of its own; {len(examples)} examples came with {len(places)} ids")
    unknown = [feature["example_id"] for feature in features if _id(feature["example_id"]) not in places]
    if unknown or not features:
        raise ValueError(f"features belong to examples by example_id; {len(features)} came, unknown: {unknown[:3]}")
    positions = _positions(features) if all(name in features[0] for name in POSITIONS) else None
    questions = Questions(
        contexts=_strings("the contexts", [example["context"] for example in examples]),
        answers=tuple(_texts(example["answers"]) for example in examples),
        example_of=np.array([places[feature["example_id"]] for feature in features]),
        offsets=tuple(_offsets(feature["offset_mapping"]) for feature in features),
        null_threshold=number("null_threshold", null_threshold, "a number of logits"),
        positions=positions,
    )
    statistics: Statistics = span_columns if positions is None else _spans_and_positions
    reason = "windows are matched with questions by their place in the whole evaluation"
    return Metric(
        statistics=statistics,
        score=questions,
        directions=DIRECTIONS,
        whole=reason,
        by_position=True,
        num_samples=len(features),
    )


def span_columns(predictions: Any, labels: Any) -> Columns:
    """Return the columns of `reducers.spans`.

    Raises:
        ValueError: one is missing, or of another shape, or logits were NaN.
    """
    found = named_columns(predictions)
    if any(name not in found for name in COLUMNS):
        raise ValueError(
            f"extractive_qa needs the columns {', '.join(COLUMNS)}; predictions hold {describe(predictions)}. Set "
            "preprocess_logits_for_metrics=spans"
        )
    columns = {name: found[name] for name in COLUMNS}
    spans = {columns[name].shape for name in ("starts", "ends", "scores")}
    if len(spans) > 1 or columns["starts"].ndim != 2 or columns["null_scores"].ndim != 1:
        raise ValueError(f"starts, ends and scores are (B, spans), null_scores (B,); they are {describe(columns)}")
    if np.isnan(columns["null_scores"]).any():
        raise ValueError("null_scores are NaN, as the logits were: the model has diverged")
    return columns


def _spans_and_positions(predictions: Any, labels: Any) -> Columns:
    several = isinstance(labels, tuple) and len({part.shape for part in labels}) == 1
    pair = np.stack(labels, axis=1) if several else labels
    if not isinstance(pair, np.ndarray) or pair.ndim != 2 or pair.shape[1] < 2 or (pair[:, 2:] != IGNORED).any():
        raise ValueError(
            f"features have {' and '.join(POSITIONS)}: labels must be both of them, or one array (B, 2), as "
            f"lossfns.collators.pack_spans makes it; {describe(labels)} came"
        )
    return {**span_columns(predictions, labels), "positions": pair[:, :2]}  # all else is padding


def _rows(what: str, rows: Any, columns: tuple[str, ...]) -> list[Mapping[str, Any]]:
    if not isinstance(rows, Iterable):
        raise TypeError(f"{what} are rows with {', '.join(columns)}, as of a dataset; a {type(rows).__name__} came")
    found = list(rows)
    for place, row in enumerate(found):
        if not isinstance(row, Mapping) or any(column not in row for column in columns):
            has = ", ".join(map(str, row)) if isinstance(row, Mapping) else f"a {type(row).__name__}"
            raise ValueError(f"{what} are rows with {', '.join(columns)}; row {place} has {has}")
    return found


def _id(value: Any) -> Hashable:
    check(isinstance(value, Hashable), "an example's id", "a text or a number", value)
    found: Hashable = value
    return found


def _positions(features: list[Mapping[str, Any]]) -> Array:
    """Return start and end of the answers (features, 2)."""
    pairs = [[feature.get(name) for name in POSITIONS] for feature in features]
    name, wanted = " and ".join(POSITIONS), "a token each, in all features if in the first"
    found = numbers(name, pairs, wanted)
    check(found.ndim == 2, name, wanted, pairs)
    return found


def _texts(answers: Any) -> tuple[str, ...]:
    if not isinstance(answers, Mapping) or "text" not in answers:
        raise ValueError(f"answers are a dict with the list 'text', empty where there is none; {answers!r} came")
    return _strings("the 'text' of answers", answers["text"])


def _strings(name: str, values: Any) -> tuple[str, ...]:
    wanted = "a list of texts"
    found = [None] if isinstance(values, str) else sequence(name, values, wanted)
    check(all(isinstance(text, str) for text in found), name, wanted, values)
    return tuple(found)


def _offsets(pairs: Any) -> Array:
    try:
        return np.array([(-1, -1) if pair is None else tuple(pair) for pair in pairs], np.int64).reshape(-1, 2)
    except (TypeError, ValueError) as error:
        wanted = "a pair of characters for each token, None off the context"
        raise ValueError(f"offset_mapping is {wanted}; {short(pairs)} came") from error


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else np.nan
