"""The arguments of `TrainingArguments` that keep the best checkpoint, from the direction of each score."""

import difflib
import re
from typing import TypedDict

from ._core.keys import find
from ._core.metric import Metric, check_metric
from .calibration import HIGHER_IS_BETTER as CALIBRATION
from .classification import HIGHER_IS_BETTER as CLASSIFICATION
from .language import HIGHER_IS_BETTER as LANGUAGE
from .preference import HIGHER_IS_BETTER as PREFERENCE
from .question_answering import HIGHER_IS_BETTER as QUESTION_ANSWERING
from .ranking import HIGHER_IS_BETTER as RANKING
from .regression import HIGHER_IS_BETTER as REGRESSION
from .segmentation import HIGHER_IS_BETTER as SEGMENTATION
from .text import HIGHER_IS_BETTER as TEXT
from .token_classification import HIGHER_IS_BETTER as TOKEN_CLASSIFICATION

# Every key of every metric of this package.
HIGHER_IS_BETTER = LANGUAGE | RANKING | CALIBRATION | CLASSIFICATION | REGRESSION | TOKEN_CLASSIFICATION
HIGHER_IS_BETTER |= QUESTION_ANSWERING | SEGMENTATION | TEXT | PREFERENCE

# The losses that the Trainer writes next to the scores of a metric.
LOSS = re.compile("(eval_(.+_)?)?loss")
# The number of scores that an error message names.
SHOWN = 12


class BestModelKwargs(TypedDict):
    """The two arguments of `TrainingArguments` that select the best checkpoint."""

    metric_for_best_model: str
    greater_is_better: bool


def best_model_kwargs(key: str, metric: Metric | None = None) -> BestModelKwargs:
    """Return the arguments of `TrainingArguments` that keep the best checkpoint by the score `key`.

    Without them the Trainer assumes that greater is better for every score whose name does not end in "loss", and so
    keeps the checkpoint with the *worst* perplexity.

    Args:
        key: a score, such as "perplexity" or "eval_perplexity"; a name given to `build`, or the name of a dataset, may
            precede it, as in "lm_perplexity"; or the Trainer's own "loss", "eval_loss", "eval_{dataset}_loss".
        metric: the metric that returns the score; None: any metric of this package.

    Returns:
        `metric_for_best_model` and `greater_is_better`.

    Raises:
        TypeError: if `metric` is not a metric.
        ValueError: if the score is unknown, or neither greater nor smaller is better.

    Example:
        >>> best_model_kwargs("perplexity")
        {'metric_for_best_model': 'perplexity', 'greater_is_better': False}
    """
    if metric is not None:
        check_metric(metric)
    directions = HIGHER_IS_BETTER if metric is None else metric.higher_is_better
    entry = find(key, directions, prefixed=True)
    greater = None if entry is None else directions[entry]
    if entry is None and LOSS.fullmatch(key):
        greater = False
    if greater is None:
        problem = "is unknown" if entry is None else "is neither better greater nor better smaller"
        known = ["loss", *(name for name, better in directions.items() if better is not None)]
        close = difflib.get_close_matches(key.removeprefix("eval_"), known)
        shown = ", ".join(known[:SHOWN]) + (f" and {len(known) - SHOWN} more" if len(known) > SHOWN else "")
        hint = f"did you mean {', '.join(close)}?" if close else f"the best model can be selected by {shown}"
        raise ValueError(f"the score {key!r} {problem}; {hint}")
    return {"metric_for_best_model": key, "greater_is_better": greater}
