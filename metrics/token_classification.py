"""Entity-level precision, recall and F1: an entity counts where its type, its first and its last token are right.

Everything works on one long array of all scored tokens, with an `O` after each sample that keeps samples apart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ._core.classes import IGNORED, label_ids, missing, named_predictions, names_of, predicted_ids
from ._core.confusion import scores_of_counts
from ._core.evaluation import Array, Columns
from ._core.metric import Metric

KEYS = ("entity_precision", "entity_recall", "entity_f1")
DIRECTIONS: dict[str, bool | None] = {
    **dict.fromkeys(KEYS, True),
    **{f"{key}/{{type}}": True for key in KEYS},
    "entities": None,
}

# Which tag after which opens an entity, goes on in it, and tells that the one before was complete: two prefixes and how
# the types compare: = same, ! different, . any. L and U are written E and S; X stands for every prefix.
SCHEMES = {
    "IOB1": ("OI. II! BI. IB= BB=", "BI= II=", "II! IO. IB. BO. BI! BB="),
    "IOB2": ("XB.", "BI= II=", "IO. II! IB. BO. BI! BB."),
    "IOE1": ("OI. II! EI. EE=", "II= IE=", "II! IO. IE! EI= EE="),
    "IOE2": ("OI. OE. EI. EE. II! IE!", "II= IE=", "EX."),
    "IOBES": ("XB. XS.", "BI= BE= II= IE=", "SX. EX."),
}
# conlleval, as seqeval has it: what opens an entity, and what closes the one before.
LENIENT_START = "XB. XS. EE. EI. SE. SI. OE. OI. XB! XI! XE! XS!"
LENIENT_END = "EX. SX. BB. BS. BO. IB. IS. IO. BX! IX! EX! SX!"

PREFIXES = "OBIES"


@dataclass(frozen=True)
class Tags:
    """What each label id says: the place of its prefix in `PREFIXES`, and of its type in `names`, -1 outside.

    After the ids comes one more tag, which stands between samples and is outside.
    """

    prefixes: tuple[int, ...]
    types: tuple[int, ...]
    names: tuple[str, ...]

    def pairs(self, patterns: str) -> Array:
        """Return a bool array (tags, tags): whether a tag after another is among the patterns."""
        prefixes, types = np.array(self.prefixes), np.array(self.types)
        same = (types[:, None] == types).astype(np.int64)
        found: Array = _table(patterns)[prefixes[:, None], prefixes, same]
        return found


class Entities(NamedTuple):
    """Entities in their order: places of the first token and of the one after the last, and types."""

    starts: Array
    ends: Array
    types: Array


def entity_f1(id2label: Mapping[int, str], *, scheme: str, lenient: bool = False) -> Metric:
    """Score entities, as seqeval and conlleval do.

    Predictions are ids (B, T) of tags (`argmax`), alone or as the column `ids`; tokens whose label is -100 (special
    tokens, later parts of a word, padding) are taken out before entities are read. Keys: `entity_precision`,
    `entity_recall`, `entity_f1` over all entities, and each as `{key}/{type}`; `entities`, how many the labels hold.

    0 / 0 is 0.0. A type that occurs neither in labels nor in predictions is NaN; without any label everything is.

    Args:
        id2label: tags by id, as `model.config.id2label`: "O", or a prefix, "-" and the type, as "B-PER".
        scheme: "IOB1", "IOB2", "IOE1", "IOE2", "IOBES" or "BILOU".
        lenient: read entities out of sequences that break the scheme, as conlleval and seqeval's default mode do; L and
            U of BILOU, which neither of them knows, are read as E and S of IOBES. Else only what the scheme allows
            counts, for all six as in seqeval's `mode="strict"`.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Raises:
        TypeError: `id2label` is no dict.
        ValueError: an unknown scheme, or a tag that is none of its own; ids that are not 0, 1, 2, ...

    Source: E. F. Tjong Kim Sang, S. Buchholz, "Introduction to the CoNLL-2000 Shared Task: Chunking", 2000 (conlleval);
    H. Nakayama, "seqeval: A Python framework for sequence labeling evaluation", 2018.

    Example:
        >>> from types import SimpleNamespace
        >>> labels, ids = np.array([[1, 2, 0, 1]]), np.array([[1, 2, 0, 0]])
        >>> metric = entity_f1({0: "O", 1: "B-PER", 2: "I-PER"}, scheme="IOB2")
        >>> metric(SimpleNamespace(predictions=ids, label_ids=labels))["entity_recall/PER"]
        0.5
    """
    tags = _tags(names_of(id2label), scheme)
    return Metric(
        statistics=partial(entity_counts, tags=tags, scheme=None if lenient else scheme),
        score=partial(entity_scores, names=tags.names),
        directions={key: True for name in ("", *tags.names) for key in _keys_of(name)} | {"entities": None},
    )


def entity_counts(predictions: Any, labels: Any, *, tags: Tags, scheme: str | None) -> Columns:
    """Return the columns that `entity_scores` reads.

    Args:
        predictions: ids (B, T), alone or as a column.
        labels: ids (B, T), -100 where ignored.
        tags: what the ids say.
        scheme: what entities look like; None: anything, as conlleval reads it.

    Returns:
        int64: `right`, `predicted` and `actual` (B, types); `tokens` (B,).

    Raises:
        TypeError, ValueError: labels or ids are none.
    """
    ids = named_predictions(predictions).get("ids")
    if ids is None:
        raise missing("ids (B, T) of tags, alone or as the column 'ids' (reducers.argmax)", predictions)
    labels = label_ids(labels, len(tags.prefixes) - 1)
    if labels.ndim != 2:
        raise ValueError(f"labels of tokens are (B, T); these have shape {labels.shape}")
    active = labels != IGNORED
    lengths = active.sum(1)
    read = partial(entities, tags=tags) if scheme is None else partial(strict_entities, tags=tags, scheme=scheme)
    predicted_ids(ids, labels, len(tags.prefixes) - 1)  # for its checks
    true, found = (read(_joined(table, active, tags)) for table in (labels, ids))
    kinds = {"actual": true, "predicted": found, "right": _common(true, found)}
    table = len(labels), len(tags.names)
    sample = np.repeat(np.arange(len(labels), dtype=np.int32) * np.int32(table[1]), lengths + 1)
    columns: Columns = {"tokens": lengths}
    for kind, spans in kinds.items():
        cells = sample[spans.starts] + spans.types
        columns[kind] = np.bincount(cells, minlength=math.prod(table)).reshape(table)
    return columns


def entity_scores(sums: Columns, *, names: Sequence[str]) -> Columns:
    """Return the scores that `entity_f1` lists.

    Args:
        sums: the sums of `entity_counts`, or stacks of them.
        names: of the types.

    Returns:
        Scores of the stack's shape.
    """
    counts = [sums[kind] for kind in ("right", "predicted", "actual")]
    scored = sums["tokens"] > 0
    values = scores_of_counts(*(count.sum(-1) for count in counts)).values()
    scores = {key: np.where(scored, value, np.nan) for key, value in zip(_keys_of(""), values, strict=True)}
    by_type = scores_of_counts(*counts).values()
    occurs = counts[1] + counts[2] > 0
    for place, name in enumerate(names):
        for key, value in zip(_keys_of(name), by_type, strict=True):
            scores[key] = np.where(occurs[..., place], value[..., place], np.nan)
    return {**scores, "entities": counts[2].sum(-1)}


def entities(ids: Array, *, tags: Tags) -> Entities:
    """Return the entities of a sequence, read as conlleval does.

    Args:
        ids: (1 + tokens,), of which the first and the last are outside.
        tags: what the ids say.

    Returns:
        Entities, by places in `ids[1:]`.
    """
    pair = _pairs(ids, tags)
    starts = np.flatnonzero(tags.pairs(LENIENT_START).ravel()[pair])
    ends = np.flatnonzero(tags.pairs(LENIENT_END).ravel()[pair])
    return Entities(starts, ends, np.array(tags.types)[ids[1:][starts]])


def strict_entities(ids: Array, *, tags: Tags, scheme: str) -> Entities:
    """Return the entities of a sequence that the scheme allows.

    Args:
        ids: as for `entities`.
        tags: what the ids say.
        scheme: a key of `SCHEMES`, or "BILOU".

    Returns:
        As `entities`.
    """
    opens, goes_on, closes = (tags.pairs(patterns).ravel() for patterns in SCHEMES[_spelt(scheme)])
    pair = _pairs(ids, tags)
    # A run is a token that goes on in nothing, and all that follow which do. Its first opening begins its only entity.
    bounds = ~goes_on[pair]
    runs, run_of = np.flatnonzero(bounds), np.cumsum(bounds, dtype=np.int32)
    starts = np.flatnonzero(opens[pair])
    run = run_of[starts]
    first = np.append(True, run[1:] != run[:-1])[: len(run)]
    starts, ends = starts[first], runs[run[first]]
    complete = closes[pair[ends]]
    return Entities(starts[complete], ends[complete], np.array(tags.types)[ids[1:][starts[complete]]])


def _joined(ids: Array, active: Array, tags: Tags) -> Array:
    """Return the active ids of all samples in a row, one outside before, between and after them."""
    outside = np.int32(len(tags.prefixes) - 1)
    table = np.pad(ids.astype(np.int32), ((0, 0), (1, 0)), constant_values=outside)
    return np.append(table[np.pad(active, ((0, 0), (1, 0)), constant_values=True)], outside)


def _pairs(ids: Array, tags: Tags) -> Array:
    """Return, for all but the first id, the cell of the one before and itself in the tables of `Tags.pairs`."""
    pair: Array = ids[:-1] * np.int32(len(tags.prefixes)) + ids[1:]
    return pair


def _common(left: Entities, right: Entities) -> Entities:
    """Return the entities of `left` that are among those of `right`."""
    place = np.searchsorted(right.starts, left.starts)
    place[place == len(right.starts)] = -1
    same = np.ones(len(place), bool)
    for own, others in zip(left, right, strict=True):
        same &= own == others[place] if len(others) else False
    return Entities(*(part[same] for part in left))


def _table(patterns: str) -> Array:
    """Return a bool array [prefix before, prefix, same type] of the patterns."""
    table = np.zeros((len(PREFIXES), len(PREFIXES), 2), bool)
    for before, prefix, types in map(tuple, patterns.split()):
        rows, columns = ([*PREFIXES] if name == "X" else [name] for name in (before, prefix))
        for same in {"=": [1], "!": [0], ".": [0, 1]}[types]:
            for row in rows:
                for column in columns:
                    table[PREFIXES.index(row), PREFIXES.index(column), same] = True
    return table


def _tags(labels: Sequence[str], scheme: str) -> Tags:
    known = (*SCHEMES, "BILOU")
    if scheme not in known:
        raise ValueError(f"scheme is one of {', '.join(known)}; {scheme!r} came")
    allowed = "OIB" if scheme.startswith("IOB") and scheme != "IOBES" else "OIE" if scheme[:3] == "IOE" else scheme
    kinds = [label.partition("-")[2] or "_" for label in labels if label != "O"]
    names = tuple(sorted(set(kinds)))
    wrong = [label for label in labels if label[:1] not in {*allowed} or (label != "O" and label[1:2] not in {"", "-"})]
    if wrong or not names or "O-" in [label[:2] for label in labels]:
        raise ValueError(
            f"tags of {scheme} are 'O' and, with a type as in 'B-PER', {', '.join(sorted(set(allowed) - {'O'}))}; "
            f"{', '.join(map(repr, wrong or labels))} came"
        )
    prefixes = tuple(PREFIXES.index(_spelt(label[0]) if scheme == "BILOU" else label[0]) for label in labels)
    types = iter(kinds)
    places = tuple(-1 if label == "O" else names.index(next(types)) for label in labels)
    return Tags((*prefixes, PREFIXES.index("O")), (*places, -1), names)


def _spelt(name: str) -> str:
    """Return a scheme or a prefix of BILOU as IOBES spells it."""
    return {"BILOU": "IOBES", "L": "E", "U": "S"}.get(name, name)


def _keys_of(name: str) -> tuple[str, ...]:
    return tuple(f"{key}/{name}" if name else key for key in KEYS)
