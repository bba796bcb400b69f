"""Rules for `preprocess_logits_for_metrics`: what the Trainer's evaluation loop requires of the result of a reducer.

The rules are listed in `RULES` in the order in which they are applied, from specific defects to general ones, so that
the first broken rule is the best explanation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lossfns._core.alignment import split_labels
from lossfns._core.checks import IGNORED
from lossfns.testing.rules import Check, Finding, Report, Rule, judge, select
from lossfns.testing.tasks import Batch, Extra, Task, find_task, leaves, mapped, tensors

from ._core import SAFE_DTYPES, Reducer

Result = dict[str, Tensor]  # the tensors that a reducer returns, by their path
Make = Callable[[torch.Generator, int], tuple[Any, Any]]

_ADDED = 3  # columns of padding that the rules add


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of a reducer.

    Attributes:
        logits: a tensor, or tuples and dicts of tensors.
        labels: the same, or None.
    """

    logits: Any
    labels: Any

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(next(leaf for leaf in tensors((self.labels, self.logits)) if leaf.ndim))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Arguments:
        """Apply a function to all tensors."""
        return Arguments(mapped(function, self.logits), mapped(function, self.labels))

    def rows(self, index: Sequence[int]) -> Arguments:
        """Return these samples in this order; several rows per sample are in blocks of one row each."""
        samples, places = self.samples, torch.tensor(index)

        def chosen(leaf: Tensor) -> Tensor:
            return leaf.reshape(-1, samples, *leaf.shape[1:])[:, places].flatten(0, 1) if leaf.ndim else leaf

        return self.mapped(chosen)

    def cast(self, dtype: torch.dtype) -> Arguments:
        """Return floating logits in another dtype."""
        logits = mapped(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, self.logits)
        return replace(self, logits=logits)

    def unlabeled(self) -> Arguments:
        """Ignore all labels; other entries of a dict of `labels` stay."""
        named = isinstance(self.labels, Mapping) and "labels" in self.labels
        ignored = mapped(lambda leaf: torch.full_like(leaf, IGNORED), self.labels["labels"] if named else self.labels)
        return replace(self, labels={**self.labels, "labels": ignored} if named else ignored)


@dataclass(frozen=True)
class _TaskBatches:
    """Batches of a task."""

    task: Task
    extras: Mapping[str, Extra] | None

    def batch(self, classes: int, seed: int = 0) -> Arguments:
        """Return a batch."""
        batch = self.task.batch(classes, self.extras, seed)
        return Arguments(batch.logits, batch.targets)

    def widths(self, arguments: Arguments) -> set[int]:
        """Return the sizes of a second dimension that mean a sequence."""
        return {split_labels(arguments.labels)[0].shape[1]} if self.task.sequence else set()

    def scored(self, arguments: Arguments) -> Any:
        """Return an index of the positions in `(rows, sequence)` that a metric reads."""
        return split_labels(arguments.labels)[0] != IGNORED

    def resized(self, arguments: Arguments) -> tuple[Arguments, dict[int, int]]:
        """Return the same samples in a sequence of another length, and the new widths by the old ones."""
        batch = self.task.trimmed(Batch(arguments.logits, *split_labels(arguments.labels)))
        return Arguments(batch.logits, batch.targets), {arguments.logits.shape[1]: batch.logits.shape[1]}

    def padded(self, arguments: Arguments) -> Arguments:
        """Return the same samples with more padding."""
        batch = self.task.padded(Batch(arguments.logits, *split_labels(arguments.labels)), 0, _ADDED)
        return Arguments(batch.logits, batch.targets)


@dataclass(frozen=True)
class _MadeBatches:
    """Batches that a function of the user makes; the methods are those of `_TaskBatches`."""

    make: Make
    lengths: frozenset[int]

    def batch(self, classes: int, seed: int = 0) -> Arguments:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = self.make(torch.Generator().manual_seed(seed), classes)
        if not isinstance(made, tuple) or len(made) != 2:
            raise ValueError(f"the function must return (logits, labels), got a {type(made).__name__}")
        arguments = Arguments(*made)
        sizes = [len(leaf) for leaf in tensors((arguments.labels, arguments.logits)) if leaf.ndim]
        if not sizes or sizes[0] < 4 or any(size % sizes[0] for size in sizes):
            raise ValueError(f"all tensors of a batch must have the same number of samples >= 4, got {sizes} rows")
        return arguments

    def widths(self, arguments: Arguments) -> set[int]:
        return set(self.lengths)

    def scored(self, arguments: Arguments) -> Any:
        return ...

    def resized(self, arguments: Arguments) -> tuple[Arguments, dict[int, int]]:
        return self.padded(arguments), {length: length + _ADDED for length in self.lengths}

    def padded(self, arguments: Arguments) -> Arguments:
        """Return the samples as the Trainer pads them with -100 if another process has longer rows."""

        def longer(leaf: Tensor) -> Tensor:
            if not _by_token(leaf, self.lengths):
                return leaf
            return torch.cat([leaf, leaf.new_full((len(leaf), _ADDED, *leaf.shape[2:]), IGNORED)], 1)

        return arguments.mapped(longer)


def _by_token(leaf: Tensor, widths: Collection[int]) -> bool:
    return leaf.ndim > 1 and leaf.shape[1] in widths


@dataclass(frozen=True)
class ReducerSubject:
    """A reducer under test, and the ways to call it.

    Attributes:
        reducer: the function under test.
        batches: makes its arguments.
        classes: number of classes of the logits.
    """

    reducer: Reducer
    batches: _TaskBatches | _MadeBatches
    classes: int
    tolerance: float = 1e-5

    @cached_property
    def batch(self) -> Arguments:
        """The batch that most rules use."""
        return self.batches.batch(self.classes)

    @cached_property
    def widths(self) -> set[int]:
        """The sizes of a second dimension that mean a sequence in that batch."""
        return self.batches.widths(self.batch)

    @cached_property
    def result(self) -> Result:
        """The result for that batch."""
        return self.leaves(self.batch)

    def call(self, arguments: Arguments) -> Any:
        """Call the reducer as the Trainer does."""
        copy = arguments.mapped(torch.clone)
        return self.reducer(copy.logits, copy.labels)

    def leaves(self, arguments: Arguments) -> Result:
        """Return the tensors of the result by their path."""
        return dict(leaves(self.call(arguments)))


def _same(what: str, given: Result, expected: Result) -> Iterator[Finding]:
    yield f"{what}, names", [*given], [*expected]
    for path, tensor in expected.items():
        yield f"{what}, {path}", given[path], tensor


# --- the result ------------------------------------------------------------------------------------------------------


def signature(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that the reducer can be called as the Trainer calls it: (logits, labels).

    Fix: `def my_reducer(logits, labels)`; bind further options with functools.partial, and pass the function without
    calling it.
    """
    reducer.call(reducer.batch)
    yield "the call", "returned", "returned"


def returns(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that the reducer returns tensors, or tuples, lists and dicts of tensors.

    Fix: do not return numbers, None or a NamedTuple: the Trainer can neither gather nor concatenate them.
    """
    result = reducer.call(reducer.batch)
    yield "a NamedTuple", hasattr(result, "_fields"), False
    for path, leaf in leaves(result):
        yield path, "Tensor" if isinstance(leaf, Tensor) else type(leaf).__name__, "Tensor"


def batch_first(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that the first dimension is the batch.

    Fix: keep (batch, ...) and let the metric mask by labels, or sum over each row; do not flatten, select or average,
    because the Trainer truncates the first dimension to the number of rows of the dataset.
    """
    for path, leaf in reducer.result.items():
        yield f"{path}, first dimension", tuple(leaf.shape[:1]), (reducer.batch.samples,)


def dtypes(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that the result is int32, int64, float32 or float64 for logits of any dtype.

    Fix: `.int()` or `.float()`: bool loses the padding value -100, uint8 turns it into 156, NumPy has no bfloat16.
    """
    for dtype in (torch.float32, torch.bfloat16):
        for path, leaf in reducer.leaves(reducer.batch.cast(dtype)).items():
            expected = str(leaf.dtype) if leaf.dtype in SAFE_DTYPES else f"one of {', '.join(map(str, SAFE_DTYPES))}"
            yield f"{path} for {dtype} logits, dtype is safe", str(leaf.dtype), expected


# --- side effects and devices ----------------------------------------------------------------------------------------


def stateless(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that calls are independent: the reducer keeps neither values nor memory from one call to the next.

    Fix: do not store running values in the reducer, and return new tensors, because the Trainer keeps those of
    each step.
    """
    first = reducer.leaves(reducer.batch)
    kept = {path: leaf.clone() for path, leaf in first.items()}
    reducer.leaves(reducer.batches.batch(reducer.classes, seed=1))
    yield from _same("after the next batch", first, kept)
    yield from _same("the same batch again", reducer.leaves(reducer.batch), kept)


def inputs(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that the reducer modifies neither logits nor labels, which the metric gets next.

    Fix: use operations that return a copy, without a trailing underscore: `labels = labels.masked_fill(...)`.
    """
    given = reducer.batch.mapped(torch.clone)
    reducer.reducer(given.logits, given.labels)
    for what in ("logits", "labels"):
        before = leaves(getattr(reducer.batch, what))
        for (path, leaf), (_, original) in zip(leaves(getattr(given, what), what), before, strict=True):
            yield path, leaf, original


class _HostTensor(Tensor):
    """A tensor marked as being on the host, and what is computed from it until it is sent to a device."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        first, *others = args or ((),)
        sent = func in (Tensor.to, Tensor.type_as) and any(
            isinstance(where, torch.device | Tensor) for where in (*others, *(kwargs or {}).values())
        )
        on_device = sent or not isinstance(first, cls | list | tuple) or _is_number(first, others)
        return result.as_subclass(Tensor) if on_device and isinstance(result, cls) else result


def _is_number(first: Any, others: Any) -> bool:
    """Return whether a tensor is a single number, which may be on the host, combined with a tensor on the device."""
    number = isinstance(first, _HostTensor) and not first.as_subclass(Tensor).ndim
    return number and not all(isinstance(other, _HostTensor) for other in tensors(others))


class _MarkHost(TorchFunctionMode):
    """Mark tensors that are moved to the host or created there, on a machine that may have no other device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.numpy, Tensor.__array__) and not isinstance(args[0], _HostTensor):
            raise TypeError("a tensor on the device has no .numpy()")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        new = not tensors((args, kwargs)) or (func is torch.tensor and not isinstance(args[0], Tensor))
        moved = func is Tensor.cpu or (func is Tensor.to and "cpu" in args[1:])
        on_host = moved or (new and kwargs.get("device") in (None, "cpu"))
        return result.as_subclass(_HostTensor) if on_host and isinstance(result, Tensor) else result


def device(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that the result is on the device of the logits.

    Fix: do not use `.cpu()` or `.numpy()`, and create tensors with `device=logits.device`: the Trainer gathers the
    results on the device and then moves them to the host.
    """
    batch = reducer.batch  # made before tensors are marked, because the Trainer passes tensors on the device
    with _MarkHost():
        result = reducer.leaves(batch)
    for path, leaf in result.items():
        yield path, "on the host" if isinstance(leaf, _HostTensor) else "on the device", "on the device"
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if there is not None:
        for path, leaf in reducer.leaves(reducer.batch.cast(torch.float32).mapped(lambda x: x.to(there))).items():
            yield path, leaf.device.type, there.type


def tuples(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that the reducer finds the logits if the model also returns other tensors.

    Fix: use the first floating tensor that has one dimension more than the labels; `logits[0]` is the router loss in a
    mixture of experts.
    """
    for what, logits in _among_others(reducer.batch).items():
        yield from _same(what, reducer.leaves(replace(reducer.batch, logits=logits)), reducer.result)


def _among_others(arguments: Arguments) -> dict[str, Any]:
    """Return the same logits together with other outputs of a model."""
    logits, other = arguments.logits, torch.zeros(arguments.samples, 2, 3)
    if isinstance(logits, Mapping):
        return {"a longer dict": {**logits, "other": other}}
    if isinstance(logits, (tuple, list)):
        return {"a longer tuple": (*logits, other)}
    return {
        "a tuple": (logits, other),
        "a loss, the logits, a nested tuple": (torch.tensor(0.5), logits, ((other, other),)),
    }


# --- shapes ----------------------------------------------------------------------------------------------------------


def structure(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that names and dtypes are the same for every batch, including one without labels.

    Fix: always return all entries, with 0 or -100 where there is no value.
    """
    expected = {path: str(leaf.dtype) for path, leaf in reducer.result.items()}
    batches = {"one row": reducer.batch.rows([1]), "no label": reducer.batch.unlabeled()}
    for what, batch in batches.items():
        yield what, {path: str(leaf.dtype) for path, leaf in reducer.leaves(batch).items()}, expected


def shapes(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that the dimensions after the batch are constant, or the sequence of the labels.

    Fix: let no other dimension depend on the batch, such as on its longest answer: the Trainer pads the second
    dimension only.
    """
    for index in ([0], [3], [1, 2]):
        batch = reducer.batch.rows(index)
        same = {width: width for width in reducer.batches.widths(batch)}
        for what, (given, widths) in {"": (batch, same), " in another width": reducer.batches.resized(batch)}.items():
            found = reducer.leaves(given)
            for path, leaf in reducer.result.items():
                rest = (widths[leaf.shape[1]], *leaf.shape[2:]) if _by_token(leaf, widths) else leaf.shape[1:]
                yield f"{path} for rows {index}{what}, shape", tuple(found[path].shape), (len(index), *rest)


def small(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that the size of the result does not grow with the vocabulary.

    Fix: return ids, log-probabilities of the labels or sums over each row (`reducers.sample_sums`), not the logits.
    """
    wider = replace(reducer, classes=2 * reducer.classes).result
    for path, leaf in reducer.result.items():
        yield f"{path} for twice as many classes, shape", tuple(wider[path].shape), tuple(leaf.shape)


# --- values ----------------------------------------------------------------------------------------------------------


def rows(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that rows are reduced independently, so that batches can be split, joined and truncated anywhere.

    Fix: do not average, rank or normalize over the batch; sum over one row at a time.
    """
    every = [*range(reducer.batch.samples)]
    for cut in (1, 2):
        parts = [reducer.leaves(reducer.batch.rows(index)) for index in (every[:cut], every[cut:])]
        joined = {path: torch.cat([part[path] for part in parts]) for path in parts[0]}
        yield from _same(f"batches of {cut} and {len(every) - cut}", joined, reducer.result)
    repeated = reducer.leaves(reducer.batch.rows([*every, 0, 1]))
    kept = {path: leaf[: len(every)] for path, leaf in repeated.items()}
    yield from _same("two additional rows, truncated", kept, reducer.result)


def alignment(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that position i of the result belongs to label i, with -100 or 0.0 where no logit predicts it.

    Fix: in a causal model the logit before predicts the label: move predictions to the right by one, exactly once, so
    that no metric has to shift.
    """
    assert isinstance(reducer.batches, _TaskBatches)
    labels, shift = split_labels(reducer.batch.labels)[0], reducer.batches.task.shift
    width = labels.shape[1]
    for row, place in [(0, 0), (0, 3), (0, width - 2), (0, width - 1), (3, width - 2)]:
        scored = place + shift < width and bool(labels[row, place + shift] != IGNORED)
        found = _changed(reducer, row, place, shift)
        for path, places in found.items():
            by_token = _by_token(reducer.result[path], {width})
            allowed = {(row, place + shift)} if by_token else {(row,)} if scored else set()
            yield f"{path}, other positions that the logits at {(row, place)} change", sorted(places - allowed), []
        if scored:
            yield f"the logits at {(row, place)} change anything", any(found.values()), True
    for path, leaf in reducer.result.items():
        if shift and _by_token(leaf, {width}):
            first, nothing = leaf[:, :shift].double(), 0.0 if leaf.is_floating_point() else float(IGNORED)
            yield f"{path}, where no logit predicts", first, torch.full_like(first, nothing)


def _changed(reducer: ReducerSubject, row: int, place: int, shift: int) -> dict[str, set[tuple[int, ...]]]:
    """Return, by path, the positions of the result that change with the logits at one position."""
    changed: dict[str, set[tuple[int, ...]]] = {path: set() for path in reducer.result}
    for seed in range(3):
        batch = reducer.batches.batch(reducer.classes, seed)
        ids, before = split_labels(batch.labels)[0], reducer.leaves(batch)
        label, widths = int(ids[row, min(place + shift, ids.shape[1] - 1)].clamp(min=0)), reducer.batches.widths(batch)
        for push in (99, -99):  # makes the label the best class, so that a hit shows, and the worst, for a miss
            logits = batch.logits.clone()
            logits[row, place] *= -3
            logits[row, place, label] += push
            for path, leaf in reducer.leaves(replace(batch, logits=logits)).items():
                depth = 2 if _by_token(leaf, widths) else 1
                changed[path] |= {tuple(place[:depth]) for place in (leaf != before[path]).nonzero().tolist()}
    return changed


def padding(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that more padding does not change the result.

    Fix: count the labels that are not -100, not all positions, and mask by labels, not by predictions.
    """
    scored = reducer.batches.scored(reducer.batch)
    longer = reducer.leaves(reducer.batches.padded(reducer.batch))
    for path, leaf in reducer.result.items():
        if _by_token(leaf, reducer.widths):
            yield path, longer[path][:, : leaf.shape[1]][scored], leaf[scored]
        else:
            yield path, longer[path], leaf


def precision(reducer: ReducerSubject) -> Iterator[Finding]:
    """Check that values are computed in float32 or float64 for logits of any dtype.

    Fix: `logits.float()`, a few rows at a time; in bfloat16 the error is about 0.1 nats per token.
    """
    rounded = reducer.batch.cast(torch.bfloat16)
    given, expected = reducer.leaves(rounded), reducer.leaves(rounded.cast(torch.float64))
    for path, leaf in expected.items():
        yield f"{path} for bfloat16 logits", given[path], leaf, 1e-4


RULES: tuple[Check, ...] = (
    signature, returns, batch_first, dtypes,
    stateless, inputs, device, tuples,
    structure, shapes, small,
    rows, alignment, padding, precision,
)  # fmt: skip


def _batches(
    task: str | Task | Make, classes: int, extras: Mapping[str, Extra] | None, lengths: Collection[int]
) -> _TaskBatches | _MadeBatches:
    if not callable(task):
        if lengths:
            raise ValueError(f"lengths must be empty unless task is a function, got {lengths}")
        return _TaskBatches(find_task(task), extras)
    if extras:
        raise ValueError("extras must be empty if task is a function: let the function add them to the labels")
    made = _MadeBatches(task, frozenset(lengths))
    made.batch(classes)  # raises an error of the function here, where it is not mistaken for a broken rule
    return made


def reducer_rules(
    task: str | Task | Make = "causal_lm",
    *,
    classes: int = 7,
    extras: Mapping[str, Extra] | None = None,
    lengths: Collection[int] = (),
    skip: Mapping[str, str] | None = None,
) -> list[Rule]:
    """Return the rules for the reducers of a task, to use with `pytest.mark.parametrize`.

    Args:
        task: a task as for `lossfns.testing.loss_rules`, whose logits the reducer gets; or, for outputs of other
            shapes, a function `(generator, classes) -> (logits, labels)` that makes the arguments of the reducer:
            tensors, or tuples and dicts of tensors, of at least four samples. Several rows per sample are in blocks, as
            from `stack_pairs`; labels may be None. The rule `alignment` does not apply to a function.
        classes: number of classes of the logits; with a function, any size that the result must not grow with.
        extras: further entries of a dict of labels by name: functions of the labels.
        lengths: with a function, the sizes of a second dimension that differ from batch to batch, such as tokens or
            frames, and that no other dimension has. The Trainer pads there with -100.
        skip: rules that this reducer need not keep, with the reason, as in `{"small": "ten classes"}`.

    Returns:
        The rules: `rule(my_reducer)` returns a verdict or raises AssertionError, and `rule.name` is its name.

    Raises:
        ValueError: the task is unknown; `skip` names an unknown rule or gives no reason; the function does not return
            a batch of at least four samples with one row or block of rows per sample (a number such as a loss has no
            rows); or `lengths` is given without a function, or `extras` with one.

    Example:
        >>> from reducers import sample_sums
        >>> [rule(partial(sample_sums, shift=1)).rule for rule in reducer_rules()][:2]
        ['signature', 'returns']
    """
    batches = _batches(task, classes, extras, lengths)
    left_out: tuple[Check, ...]
    if isinstance(batches, _MadeBatches):
        left_out = (alignment,) if batches.lengths else (alignment, padding)
    else:
        left_out = () if batches.task.sequence else (shapes, small, alignment, padding)
    checks = [rule for rule in RULES if rule not in left_out]
    return select(checks, partial(ReducerSubject, batches=batches, classes=classes), skip)


def check_reducer(reducer: Reducer, task: str | Task | Make = "causal_lm", **options: Any) -> Report:
    """Check a `preprocess_logits_for_metrics` against all rules of its task.

    Args:
        reducer: `(logits, labels) -> tensors`.
        task: the task of the model, or a function that makes batches of another shape, as for `reducer_rules`.
        **options: the options of `reducer_rules`.

    Returns:
        The report of all comparisons, to print.

    Raises:
        AssertionError: a rule is broken; the message has its name, the given and expected values, and the fix.
        ValueError: as for `reducer_rules`.

    Example:
        >>> def boxes(generator, classes):
        ...     scores, corners = torch.randn(2, 4, 9, 4, generator=generator)
        ...     return {"logits": scores, "boxes": corners}, None
        >>> check_reducer(lambda outputs, labels: outputs["boxes"].mean(), boxes)
        Traceback (most recent call last):
        AssertionError: <lambda> breaks the rule `batch_first`.
          The first dimension is the batch.
          result, first dimension: (), expected (4,)
          ...
    """
    return judge(reducer, reducer_rules(task, **options), options.get("skip"))
