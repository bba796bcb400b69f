"""Entity-level precision, recall and F1: an entity is correct if its type, its first and its last token are.

All functions work on one long array of all scored tokens, with an `O` after each sample that separates samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ._core.classes import label_ids, named_predictions, names_of, predicted_ids
from ._core.confusion import scores_of_counts
from ._core.evaluation import IGNORED, Array, Columns, missing
from ._core.metric import Metric

KEYS = ("entity_precision", "entity_recall", "entity_f1")
HIGHER_IS_BETTER: dict[str, bool | None] = {
    **dict.fromkeys(KEYS, True),
    **{f"{key}/{{type}}": True for key in KEYS},
    "entities": None,
}

# Pairs of consecutive tags that open an entity, continue it, and complete the entity before. A pair is two prefixes and
# how the types compare: = same, ! different, . any. L and U are written E and S; X stands for every prefix.
SCHEMES = {
    "IOB1": ("OI. II! BI. IB= BB=", "BI= II=", "II! IO. IB. BO. BI! BB="),
    "IOB2": ("XB.", "BI= II=", "IO. II! IB. BO. BI! BB."),
    "IOE1": ("OI. II! EI. EE=", "II= IE=", "II! IO. IE! EI= EE="),
    "IOE2": ("OI. OE. EI. EE. II! IE!", "II= IE=", "EX."),
    "IOBES": ("XB. XS.", "BI= BE= II= IE=", "SX. EX."),
}
# conlleval, as in seqeval: pairs that open an entity, and pairs that close the entity before.
LENIENT_START = "XB. XS. EE. EI. SE. SI. OE. OI. XB! XI! XE! XS!"
LENIENT_END = "EX. SX. BB. BS. BO. IB. IS. IO. BX! IX! EX! SX!"

PREFIXES = "OBIES"


@dataclass(frozen=True)
class Tags:
    """Prefix of each label id as an index into `PREFIXES`, and its type as an index into `names`, -1 outside.

    After the ids there is one more tag, which separates samples and is outside.
    """

    prefixes: tuple[int, ...]
    types: tuple[int, ...]
    names: tuple[str, ...]

    def pairs(self, patterns: str) -> Array:
        """Return a bool array (tags, tags), True where the pair of a tag and the next is among the patterns."""
        prefixes, types = np.array(self.prefixes), np.array(self.types)
        same = (types[:, None] == types).astype(np.int64)
        found: Array = _table(patterns)[prefixes[:, None], prefixes, same]
        return found


class Entities(NamedTuple):
    """Entities in their order: index of the first token, index after the last token, and type."""

    starts: Array
    ends: Array
    types: Array


def entity_f1(id2label: Mapping[int, str], *, scheme: str, lenient: bool = False) -> Metric:
    """Score entities, as seqeval and conlleval do.

    With c the number of correct entities, p of predicted and a of actual entities::

        entity_precision = c / p     entity_recall = c / a     entity_f1 = 2 c / (p + a)

    Predictions are ids (B, T) of tags (`argmax`), alone or as the column `ids`; tokens whose label is -100 (special
    tokens, later parts of a word, padding) are removed before entities are read. The keys are the three names above,
    over all entities, and each as `{key}/{type}`; and `entities`, the number of entities in the labels.

    0 / 0 is 0.0. A type that occurs neither in labels nor in predictions is NaN; without labels all scores are NaN.

    Args:
        id2label: tags by id, such as `model.config.id2label`: "O", or a prefix, "-" and the type, as in "B-PER".
        scheme: "IOB1", "IOB2", "IOE1", "IOE2", "IOBES" or "BILOU".
        lenient: also read entities from sequences that break the scheme, as conlleval and seqeval's default mode do; L
            and U of BILOU, which neither of them supports, are read as E and S of IOBES. Otherwise only entities that
            the scheme allows count, for all six schemes as in seqeval's `mode="strict"`.

    Returns:
        A metric to give to the Trainer as `compute_metrics`.

    Raises:
        TypeError: if `id2label` is not a dict.
        ValueError: if the scheme is unknown, a tag does not belong to it, or ids are not 0, 1, 2, ...

    References:
        E. F. Tjong Kim Sang, S. Buchholz, "Introduction to the CoNLL-2000 Shared Task: Chunking", 2000,
        https://aclanthology.org/W00-0726 (conlleval)
        H. Nakayama, "seqeval: A Python framework for sequence labeling evaluation", 2018,
        https://github.com/chakki-works/seqeval

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
        higher_is_better={key: True for name in ("", *tags.names) for key in _keys_of(name)} | {"entities": None},
    )


def entity_counts(predictions: Any, labels: Any, *, tags: Tags, scheme: str | None) -> Columns:
    """Return the columns that `entity_scores` reads.

    Args:
        predictions: ids (B, T), alone or as a column.
        labels: ids (B, T), -100 where ignored.
        tags: prefix and type of each id.
        scheme: the scheme of the entities; None: read leniently, as conlleval does.

    Returns:
        int64: `correct`, `predicted` and `actual` (B, types); `tokens` (B,).

    Raises:
        TypeError, ValueError: if labels or ids are not valid.
    """
    ids = named_predictions(predictions).get("ids")
    if ids is None:
        raise missing("ids (B, T) of tags, alone or as the column 'ids' (reducers.argmax)", predictions)
    labels = label_ids(labels, len(tags.prefixes) - 1)
    if labels.ndim != 2:
        raise ValueError(f"labels of tokens must be (B, T), got shape {labels.shape}")
    active = labels != IGNORED
    lengths = active.sum(1)
    read = partial(entities, tags=tags) if scheme is None else partial(strict_entities, tags=tags, scheme=scheme)
    predicted_ids(ids, labels, len(tags.prefixes) - 1)  # for its checks
    true, found = (read(_joined(array, active, tags)) for array in (labels, ids))
    kinds = {"actual": true, "predicted": found, "correct": _common(true, found)}
    table = len(labels), len(tags.names)
    sample = np.repeat(np.arange(len(labels), dtype=np.int32) * np.int32(table[1]), lengths + 1)
    columns: Columns = {"tokens": lengths}
    for kind, spans in kinds.items():
        cells = sample[spans.starts] + spans.types
        columns[kind] = np.bincount(cells, minlength=math.prod(table)).reshape(table)
    return columns


def entity_scores(sums: Columns, *, names: Sequence[str]) -> Columns:
    """Return the scores of `entity_f1`.

    Args:
        sums: the sums of `entity_counts`, or stacks of them.
        names: names of the types.

    Returns:
        Scores of the stack's shape.
    """
    counts = [sums[kind] for kind in ("correct", "predicted", "actual")]
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
        tags: prefix and type of each id.

    Returns:
        Entities, by indices into `ids[1:]`.
    """
    pair = _pairs(ids, tags)
    starts = np.flatnonzero(tags.pairs(LENIENT_START).ravel()[pair])
    ends = np.flatnonzero(tags.pairs(LENIENT_END).ravel()[pair])
    return Entities(starts, ends, np.array(tags.types)[ids[1:][starts]])


def strict_entities(ids: Array, *, tags: Tags, scheme: str) -> Entities:
    """Return the entities of a sequence that the scheme allows.

    Args:
        ids: as for `entities`.
        tags: prefix and type of each id.
        scheme: a key of `SCHEMES`, or "BILOU".

    Returns:
        As for `entities`.
    """
    opens, continues, completes = (tags.pairs(patterns).ravel() for patterns in SCHEMES[_spelt(scheme)])
    pair = _pairs(ids, tags)
    # A run is a token that continues nothing, and the tokens after it that continue it. It holds at most one entity,
    # which starts at the first token that opens one.
    bounds = ~continues[pair]
    runs, run_of = np.flatnonzero(bounds), np.cumsum(bounds, dtype=np.int32)
    starts = np.flatnonzero(opens[pair])
    run = run_of[starts]
    first = np.append(True, run[1:] != run[:-1])[: len(run)]
    starts, ends = starts[first], runs[run[first]]
    complete = completes[pair[ends]]
    return Entities(starts[complete], ends[complete], np.array(tags.types)[ids[1:][starts[complete]]])


def _joined(ids: Array, active: Array, tags: Tags) -> Array:
    """Return the active ids of all samples in one array, with an outside tag before, between and after them."""
    outside = np.int32(len(tags.prefixes) - 1)
    table = np.pad(ids.astype(np.int32), ((0, 0), (1, 0)), constant_values=outside)
    return np.append(table[np.pad(active, ((0, 0), (1, 0)), constant_values=True)], outside)


def _pairs(ids: Array, tags: Tags) -> Array:
    """Return, for each id but the first, the flat index of it and the id before in the tables of `Tags.pairs`."""
    pair: Array = ids[:-1] * np.int32(len(tags.prefixes)) + ids[1:]
    return pair


def _common(left: Entities, right: Entities) -> Entities:
    """Return the entities of `left` that are among those of `right`."""
    place = np.searchsorted(right.starts, left.starts)
    place[place == len(right.starts)] = -1
    same = np.ones(len(place), bool)
    for part, others in zip(left, right, strict=True):
        same &= part == others[place] if len(others) else False
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
        raise ValueError(f"scheme must be one of {', '.join(known)}, got {scheme!r}")
    allowed = "OIB" if scheme.startswith("IOB") and scheme != "IOBES" else "OIE" if scheme[:3] == "IOE" else scheme
    kinds = [label.partition("-")[2] or "_" for label in labels if label != "O"]
    names = tuple(sorted(set(kinds)))
    wrong = [label for label in labels if label[:1] not in {*allowed} or (label != "O" and label[1:2] not in {"", "-"})]
    if wrong or not names or "O-" in [label[:2] for label in labels]:
        raise ValueError(
            f"tags of {scheme} must be 'O' or, with a type as in 'B-PER', {', '.join(sorted(set(allowed) - {'O'}))}, "
            f"got {', '.join(map(repr, wrong or labels))}"
        )
    prefixes = tuple(PREFIXES.index(_spelt(label[0]) if scheme == "BILOU" else label[0]) for label in labels)
    types = iter(kinds)
    places = tuple(-1 if label == "O" else names.index(next(types)) for label in labels)
    return Tags((*prefixes, PREFIXES.index("O")), (*places, -1), names)


def _spelt(name: str) -> str:
    """Return a scheme or a prefix of BILOU in the spelling of IOBES."""
    return {"BILOU": "IOBES", "L": "E", "U": "S"}.get(name, name)


def _keys_of(name: str) -> tuple[str, ...]:
    return tuple(f"{key}/{name}" if name else key for key in KEYS)
