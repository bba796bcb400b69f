"""The scores that the GLUE benchmark reports, task by task."""

from typing import Literal, get_args

from ._core.metric import Metric
from .classification import classification
from .regression import regression

Task = Literal["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"]


def glue(task: Task) -> Metric:
    """Score a task of GLUE by what the benchmark reports for it, among others.

    CoLA: `matthews_correlation`; SST-2, MNLI, QNLI, RTE, WNLI: `accuracy`; MRPC and QQP: `accuracy` and `f1` of the
    class 1; STS-B: `pearson` and `spearman`. The benchmark's sum of unlike numbers is not reported.

    Args:
        task: name of the task.

    Returns:
        A metric to give to the Trainer as `compute_metrics`; predictions are ids (`argmax`), for STS-B floats.

    Raises:
        ValueError: an unknown task.

    Source: A. Wang et al., "GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding",
    2018.

    Example:
        >>> "f1" in glue("mrpc").directions, "f1_macro" in glue("mnli").directions
        (True, True)
    """
    if task not in get_args(Task):
        raise ValueError(f"the tasks of GLUE are {', '.join(get_args(Task))}; {task!r} came")
    if task == "stsb":
        return regression(ranking=True)
    return classification(3) if task == "mnli" else classification(2, average="binary")
