"""Rules for any `preprocess_logits_for_metrics`: what the Trainer's evaluation loop does to whatever a reducer returns.

The rules stand in the order in which they are asked, from the most particular defect to the most general.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lossfns.alignment import IGNORED
from lossfns.testing.rules import Check, Finding, Report, Rule, judge, select
from lossfns.testing.tasks import Batch, Extra, Task, find_task

from ._reduce import SAFE_DTYPES, Reducer

Leaves = dict[str, Tensor]


@dataclass(frozen=True)
class ReducerSubject:
    """A reducer under test, and how to call it."""

    reducer: Reducer
    task: Task
    classes: int
    extras: Mapping[str, Extra] | None
    tolerance: float = 1e-5

    @cached_property
    def batch(self) -> Batch:
        """The batch that most rules start from."""
        return self.task.batch(self.classes, self.extras)

    @cached_property
    def result(self) -> Leaves:
        """What comes out for that batch."""
        return self.leaves(self.batch)

    def call(self, batch: Batch, logits: Any = None) -> Any:
        """The reducer, called as the Trainer calls it."""
        return self.reducer(batch.logits.clone() if logits is None else logits, batch.targets)

    def leaves(self, batch: Batch, logits: Any = None) -> Leaves:
        """The tensors that come out, by their path."""
        return dict(_leaves(self.call(batch, logits)))


def _leaves(tree: Any, path: str = "result") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, (Mapping, tuple, list)):
        for key, branch in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(branch, f"{path}[{key!r}]")
    else:
        yield path, tree


def _same(what: str, given: Leaves, expected: Leaves) -> Iterator[Finding]:
    yield f"{what}, names", [*given], [*expected]
    for path, tensor in expected.items():
        yield f"{what}, {path}", given[path], tensor


# --- what comes out --------------------------------------------------------------------------------------------------


def signature(reducer: ReducerSubject) -> Iterator[Finding]:
    """It takes (logits, labels), as the Trainer calls it.

    Fix: `def my_reducer(logits, labels)`; bind further options with functools.partial, and give the function, uncalled.
    """
    reducer.call(reducer.batch)
    yield "the call", "went through", "went through"


def returns(reducer: ReducerSubject) -> Iterator[Finding]:
    """It returns tensors, or tuples, lists and dicts of them.

    Fix: no numbers, no None, no NamedTuple: the Trainer can neither gather nor join them.
    """
    result = reducer.call(reducer.batch)
    yield "a NamedTuple", hasattr(result, "_fields"), False
    for path, leaf in _leaves(result):
        yield path, "Tensor" if isinstance(leaf, Tensor) else type(leaf).__name__, "Tensor"


def batch_first(reducer: ReducerSubject) -> Iterator[Finding]:
    """The first dimension is the batch.

    Fix: keep (batch, ...) and let the metric mask by labels, or sum over each row; do not flatten, select or average:
    the Trainer cuts the first dimension to the rows of the dataset.
    """
    for path, leaf in reducer.result.items():
        yield f"{path}, first dimension", tuple(leaf.shape[:1]), (len(reducer.batch.labels),)


def dtypes(reducer: ReducerSubject) -> Iterator[Finding]:
    """It returns int32, int64, float32 or float64, whatever the dtype of the logits.

    Fix: `.int()` or `.float()`: bool loses the padding of -100, uint8 turns it into 156, NumPy has no bfloat16.
    """
    for dtype in (torch.float32, torch.bfloat16):
        for path, leaf in reducer.leaves(replace(reducer.batch, logits=reducer.batch.logits.to(dtype))).items():
            yield f"{path} of {dtype} logits, dtype is safe", str(leaf.dtype), _named(leaf.dtype)


def _named(dtype: torch.dtype) -> str:
    return str(dtype) if dtype in SAFE_DTYPES else f"one of {', '.join(map(str, SAFE_DTYPES))}"


def shapes(reducer: ReducerSubject) -> Iterator[Finding]:
    """Dimensions behind the batch are constant, or the labels' own sequence.

    Fix: let nothing else depend on the batch, such as its longest answer; the Trainer pads the second dimension only.
    """
    width = reducer.batch.labels.shape[1]
    for rows in ([0], [3], [1, 2]):
        batch = reducer.task.trimmed(reducer.batch.rows(rows))
        leaves = reducer.leaves(batch)
        for path, leaf in reducer.result.items():
            behind = (batch.labels.shape[1], *leaf.shape[2:]) if _by_token(leaf, width) else leaf.shape[1:]
            yield (
                f"{path} of labels {tuple(batch.labels.shape)}, shape",
                tuple(leaves[path].shape),
                (len(rows), *behind),
            )


def structure(reducer: ReducerSubject) -> Iterator[Finding]:
    """Names and dtypes are the same for every batch, one without any label too.

    Fix: return every entry always, 0 or -100 where there is nothing to say.
    """
    expected = {path: str(leaf.dtype) for path, leaf in reducer.result.items()}
    batches = {"one row": reducer.batch.rows([1]), "no label": reducer.batch.only()}
    for what, batch in batches.items():
        yield what, {path: str(leaf.dtype) for path, leaf in reducer.leaves(batch).items()}, expected


def small(reducer: ReducerSubject) -> Iterator[Finding]:
    """What is kept does not grow with the vocabulary.

    Fix: return ids, log-probabilities of the labels or sums over each row (`reducers.sample_sums`), not the logits.
    """
    wider = replace(reducer, classes=2 * reducer.classes).result
    for path, leaf in reducer.result.items():
        yield f"{path} of twice as many classes, shape", tuple(wider[path].shape), tuple(leaf.shape)


# --- what it may not do ----------------------------------------------------------------------------------------------


def inputs(reducer: ReducerSubject) -> Iterator[Finding]:
    """Logits and labels are left as they were: the labels go on to the metric.

    Fix: `labels = labels.masked_fill(...)`, without the underscore.
    """
    logits, targets = reducer.batch.logits.clone(), reducer.batch.targets
    reducer.reducer(logits, targets)
    yield "logits", logits, reducer.batch.logits
    yield "labels", targets["labels"] if isinstance(targets, dict) else targets, reducer.batch.labels


class _Host(Tensor):
    """A tensor that was brought to the host, and whatever is computed from it until `to(device)` sends it back."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        on_device = func is Tensor.to or (
            args and not isinstance(args[0], cls) and not isinstance(args[0], list | tuple)
        )
        return result.as_subclass(Tensor) if on_device and isinstance(result, cls) else result


class _Hosted(TorchFunctionMode):
    """Marks what leaves the device, on a machine that has only one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.numpy, Tensor.__array__) and not isinstance(args[0], _Host):
            raise TypeError("a tensor on the device has no .numpy()")
        result = func(*args, **(kwargs or {}))
        leaves = func is Tensor.cpu or (func is Tensor.to and "cpu" in args[1:])
        return result.as_subclass(_Host) if leaves else result


def device(reducer: ReducerSubject) -> Iterator[Finding]:
    """What it returns is on the device that the logits came on.

    Fix: no `.cpu()`, no `.numpy()`: the Trainer gathers on the device and moves what is left itself.
    """
    with _Hosted():
        moved = reducer.leaves(reducer.batch)
    for path, leaf in moved.items():
        yield path, "on the host" if isinstance(leaf, _Host) else "on the device", "on the device"
    if torch.accelerator.is_available():
        there = torch.accelerator.current_accelerator()
        batch = Batch(
            reducer.batch.logits.float().to(there),
            reducer.batch.labels.to(there),
            {name: extra.to(there) for name, extra in reducer.batch.extras.items()},
        )
        for path, leaf in reducer.leaves(batch).items():
            yield path, leaf.device.type, batch.logits.device.type


def tuples(reducer: ReducerSubject) -> Iterator[Finding]:
    """It finds the logits in whatever a model returns: alone, first of several, behind a loss of no dimension.

    Fix: take the first floating tensor that has one dimension more than the labels; `logits[0]` is a router's loss in a
    mixture of experts.
    """
    logits = reducer.batch.logits
    beside = torch.zeros(len(logits), 2, 3)
    cases = {
        "a tuple": (logits, beside),
        "a loss, the logits, a nested tuple": (torch.tensor(0.5), logits, ((beside, beside),)),
    }
    for what, given in cases.items():
        yield from _same(what, reducer.leaves(reducer.batch, given), reducer.result)


# --- which numbers ---------------------------------------------------------------------------------------------------


def rows(reducer: ReducerSubject) -> Iterator[Finding]:
    """Each row is reduced on its own: batches may be cut and joined anywhere, and superfluous rows cut off.

    Fix: no means, ranks or normalisation over the batch; sums over one row at a time.
    """
    for split in ([[0], [1, 2, 3]], [[0, 1], [2, 3]]):
        parts = [reducer.leaves(reducer.batch.rows(index)) for index in split]
        joined = {path: torch.cat([part[path] for part in parts]) for path in parts[0]}
        yield from _same(f"batches of {' and '.join(str(len(index)) for index in split)}", joined, reducer.result)
    repeated = reducer.leaves(reducer.batch.rows([0, 1, 2, 3, 0, 1]))
    yield from _same(
        "two superfluous rows cut off", {path: leaf[:4] for path, leaf in repeated.items()}, reducer.result
    )


def alignment(reducer: ReducerSubject) -> Iterator[Finding]:
    """Place i of the output belongs to label i, and where no logit predicts it stands -100 or 0.0.

    Fix: in a causal model the logit before predicts the label: move predictions to the right by one, exactly once, so
    that no metric has to shift.
    """
    labels, shift = reducer.batch.labels, reducer.task.shift
    width = labels.shape[1]
    for row, place in [(0, 0), (0, 3), (0, width - 2), (0, width - 1), (3, width - 2)]:
        scored = place + shift < width and bool(labels[row, place + shift] != IGNORED)
        found = _changed(reducer, row, place)
        for path, places in found.items():
            by_token = _by_token(reducer.result[path], width)
            allowed = {(row, place + shift)} if by_token else {(row,)} if scored else set()
            yield f"{path}, what else the logits at {(row, place)} change", sorted(places - allowed), []
        if scored:
            yield f"the logits at {(row, place)} change anything", any(found.values()), True
    for path, leaf in reducer.result.items():
        if shift and _by_token(leaf, width):
            first, nothing = leaf[:, :shift].double(), 0.0 if leaf.is_floating_point() else float(IGNORED)
            yield f"{path}, where no logit predicts", first, torch.full_like(first, nothing)


def _by_token(leaf: Tensor, width: int) -> bool:
    return leaf.ndim > 1 and leaf.shape[1] == width


def _changed(reducer: ReducerSubject, row: int, place: int) -> dict[str, set[tuple[int, ...]]]:
    """The places of the output that other logits at one place change, by path."""
    changed: dict[str, set[tuple[int, ...]]] = {path: set() for path in reducer.result}
    for seed in range(3):
        batch = reducer.task.batch(reducer.classes, reducer.extras, seed)
        other = replace(batch, logits=batch.logits.clone())
        other.logits[row, place] *= -3
        before, after = reducer.leaves(batch), reducer.leaves(other)
        for path, leaf in after.items():
            places = (leaf != before[path]).nonzero()
            depth = 2 if _by_token(leaf, batch.labels.shape[1]) else 1
            changed[path] |= {tuple(position[:depth]) for position in places.tolist()}
    return changed


def padding(reducer: ReducerSubject) -> Iterator[Finding]:
    """More padding changes nothing.

    Fix: count the labels that are not -100, never all positions, and mask by labels, not by predictions.
    """
    width, scored = reducer.batch.labels.shape[1], reducer.batch.labels != IGNORED
    longer = reducer.leaves(reducer.task.padded(reducer.batch, 0, 3))
    for path, leaf in reducer.result.items():
        if _by_token(leaf, width):
            yield path, longer[path][:, :width][scored], leaf[scored]
        else:
            yield path, longer[path], leaf


def precision(reducer: ReducerSubject) -> Iterator[Finding]:
    """Numbers are computed in float32 at least, whatever the dtype of the logits.

    Fix: `logits.float()`, a few rows at a time; bfloat16 arithmetic is off by a tenth of a nat for each token.
    """
    rounded = reducer.batch.logits.bfloat16()
    given = reducer.leaves(replace(reducer.batch, logits=rounded))
    expected = reducer.leaves(replace(reducer.batch, logits=rounded.double()))
    for path, leaf in expected.items():
        yield f"{path} of bfloat16 logits", given[path], leaf, 1e-4


RULES: tuple[Check, ...] = (
    signature,
    returns,
    batch_first,
    dtypes,
    inputs,
    device,
    tuples,
    structure,
    shapes,
    small,
    rows,
    alignment,
    padding,
    precision,
)
_OF_SEQUENCES = (shapes, small, alignment, padding)


def reducer_rules(
    task: str | Task = "causal_lm",
    *,
    classes: int = 7,
    extras: Mapping[str, Extra] | None = None,
    skip: Mapping[str, str] | None = None,
) -> list[Rule]:
    """The rules that a reducer for a task has to keep, one callable each, for `pytest.mark.parametrize`.

    Args:
        task: as in `lossfns.testing.loss_rules`.
        classes: number of classes of the logits.
        extras: what else the labels carry, in a dict under these names: functions of the labels.
        skip: rules that this reducer need not keep, each with its reason, as `{"small": "ten classes"}`.

    Returns:
        Callables with a name: `rule(my_reducer)` raises AssertionError, or returns what was compared.

    Raises:
        ValueError: no such task, no such rule, no reason.

    Example:
        >>> from reducers import sample_sums
        >>> [rule(partial(sample_sums, shift=1)).rule for rule in reducer_rules()][:2]
        ['signature', 'returns']
    """
    found = find_task(task)
    subject = partial(ReducerSubject, task=found, classes=classes, extras=extras)
    return select([rule for rule in RULES if found.sequence or rule not in _OF_SEQUENCES], subject, skip)


def check_reducer(reducer: Reducer, task: str | Task = "causal_lm", **options: Any) -> Report:
    """Hold a `preprocess_logits_for_metrics` to all the rules of its task.

    Args:
        reducer: `(logits, labels) -> tensors`.
        task: what the model is for, as in `lossfns.testing.loss_rules`.
        **options: those of `reducer_rules`.

    Returns:
        What was compared, if every rule is kept; `print` it.

    Raises:
        AssertionError: a rule is broken: its name, what was given and expected, and how to mend it.
        ValueError: no such task, no such rule, no reason.

    Example:
        >>> def flat(logits, labels):
        ...     return logits.argmax(-1)[labels != -100]
        >>> check_reducer(flat)
        Traceback (most recent call last):
        AssertionError: flat breaks the rule `batch_first`.
          The first dimension is the batch.
          result, first dimension: (16,), expected (4,)
          ...
    """
    return judge(reducer, reducer_rules(task, **options), options.get("skip"))
