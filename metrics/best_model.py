"""Which scores are better when they are greater, for `TrainingArguments`."""

import difflib
import re
from typing import TypedDict

from ._core import keys as _keys
from ._core.arguments import string
from ._core.metric import Metric, check_metric
from .classification import DIRECTIONS as CLASSIFICATION
from .language import CALIBRATION, RANKING
from .language import DIRECTIONS as LANGUAGE
from .preference import DIRECTIONS as PREFERENCE
from .question_answering import DIRECTIONS as EXTRACTIVE
from .ranking import DIRECTIONS as RETRIEVAL
from .regression import DIRECTIONS as REGRESSION
from .segmentation import DIRECTIONS as SEGMENTATION
from .text import DIRECTIONS as TEXT
from .token_classification import DIRECTIONS as ENTITIES

# Every key of every metric of this package.
DIRECTIONS: dict[str, bool | None] = {
    **LANGUAGE,
    **RANKING,
    **CALIBRATION,
    **CLASSIFICATION,
    **REGRESSION,
    **ENTITIES,
    **EXTRACTIVE,
    **SEGMENTATION,
    **RETRIEVAL,
    **TEXT,
    **PREFERENCE,
}


# What the Trainer writes beside the scores of a metric.
LOSS = re.compile("(eval_(.+_)?)?loss")
# How many scores a message names.
SHOWN = 12


class BestModelKwargs(TypedDict):
    """The two arguments of `TrainingArguments` that choose the best checkpoint."""

    metric_for_best_model: str
    greater_is_better: bool


def best_model_kwargs(key: str, metric: Metric | None = None) -> BestModelKwargs:
    """Return the arguments of `TrainingArguments` that keep the best checkpoint by `key`.

    Left alone, the Trainer takes every score for "greater is better" whose name doesn't end in "loss", and so keeps the
    checkpoint with the *worst* perplexity.

    Args:
        key: a score, as "perplexity", "eval_perplexity", or with the name given to `build` or the name of a dataset
            before it, as "lm_perplexity"; or the Trainer's own "loss", "eval_loss", "eval_{dataset}_loss".
        metric: where to look the key up; None: among the metrics of this package.

    Returns:
        `metric_for_best_model` and `greater_is_better`.

    Raises:
        TypeError: the key is no text, or the metric none.
        ValueError: no such key, or one that is neither better greater nor better less.

    Example:
        >>> best_model_kwargs("perplexity")
        {'metric_for_best_model': 'perplexity', 'greater_is_better': False}
    """
    string("key", key, 'the name of a score, as "perplexity"')
    if metric is not None:
        check_metric(metric)
    directions = DIRECTIONS if metric is None else metric.directions
    entry = _keys.find(key, directions, prefixed=True)
    greater = None if entry is None else directions[entry]
    if entry is None and LOSS.fullmatch(key):
        greater = False
    if greater is None:
        problem = "is not known" if entry is None else "has no better or worse"
        known = ["loss", *(name for name, direction in directions.items() if direction is not None)]
        close = difflib.get_close_matches(key.removeprefix("eval_"), known)
        shown = ", ".join(known[:SHOWN]) + (f" and {len(known) - SHOWN} more" if len(known) > SHOWN else "")
        hint = f"did you mean {', '.join(close)}?" if close else f"the best model can be chosen by {shown}"
        raise ValueError(f"the score {key!r} {problem}; {hint}")
    return {"metric_for_best_model": key, "greater_is_better": greater}
