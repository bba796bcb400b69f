"""Rules for any `preprocess_logits_for_metrics`: what the Trainer's evaluation loop does to whatever a reducer returns.

The rules stand in the order in which they are asked, from the most particular defect to the most general.
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
from lossfns.testing.tasks import Batch, Extra, Task, find_task

from ._core import SAFE_DTYPES, Reducer

Leaves = dict[str, Tensor]
Make = Callable[[torch.Generator, int], tuple[Any, Any]]

_ADDED = 3  # columns that padding adds


@dataclass(frozen=True)
class Given:
    """What reaches a reducer in one call.

    Attributes:
        logits: a tensor, or tuples and dicts of them.
        labels: the same, or None.
    """

    logits: Any
    labels: Any

    @property
    def samples(self) -> int:
        """How many samples there are, by the labels, if any."""
        return len(next(leaf for leaf in _tensors((self.labels, self.logits)) if leaf.ndim))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Given:
        """The function's values in the place of all tensors."""
        return Given(_mapped(function, self.logits), _mapped(function, self.labels))

    def rows(self, index: Sequence[int]) -> Given:
        """Those samples, in that order; several rows a sample stand in blocks of one row each."""
        samples, places = self.samples, torch.tensor(index)

        def chosen(leaf: Tensor) -> Tensor:
            return leaf.reshape(-1, samples, *leaf.shape[1:])[:, places].flatten(0, 1) if leaf.ndim else leaf

        return self.mapped(chosen)

    def cast(self, dtype: torch.dtype) -> Given:
        """Floating logits in another dtype."""
        logits = _mapped(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, self.logits)
        return replace(self, logits=logits)

    def unlabelled(self) -> Given:
        """All labels ignored; what comes along with `labels` in a dict stays."""
        named = isinstance(self.labels, Mapping) and "labels" in self.labels
        ignored = _mapped(lambda leaf: torch.full_like(leaf, IGNORED), self.labels["labels"] if named else self.labels)
        return replace(self, labels={**self.labels, "labels": ignored} if named else ignored)


@dataclass(frozen=True)
class _OfTask:
    """Batches of a task of the kit."""

    task: Task
    extras: Mapping[str, Extra] | None

    def batch(self, classes: int, seed: int = 0) -> Given:
        batch = self.task.batch(classes, self.extras, seed)
        return Given(batch.logits, batch.targets)

    def widths(self, given: Given) -> set[int]:
        """Sizes of a second dimension that is the sequence."""
        return {split_labels(given.labels)[0].shape[1]} if self.task.sequence else set()

    def counted(self, given: Given) -> Any:
        """Index of the places in `(rows, sequence)` that a metric reads."""
        return split_labels(given.labels)[0] != IGNORED

    def resized(self, given: Given) -> tuple[Given, dict[int, int]]:
        """The same samples in a sequence of another length, and the new widths by the old ones."""
        batch = self.task.trimmed(_batch(given))
        return Given(batch.logits, batch.targets), {given.logits.shape[1]: batch.logits.shape[1]}

    def padded(self, given: Given) -> Given:
        """The same samples beside a longer one."""
        batch = self.task.padded(_batch(given), 0, _ADDED)
        return Given(batch.logits, batch.targets)


@dataclass(frozen=True)
class _Own:
    """Batches that somebody's function makes."""

    make: Make
    lengths: frozenset[int]

    def batch(self, classes: int, seed: int = 0) -> Given:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = self.make(torch.Generator().manual_seed(seed), classes)
        if not isinstance(made, tuple) or len(made) != 2:
            raise ValueError(f"batches are made as (logits, labels); a {type(made).__name__} came")
        given = Given(*made)
        sizes = [len(leaf) for leaf in _tensors((given.labels, given.logits)) if leaf.ndim]
        if not sizes or sizes[0] < 4 or any(size % sizes[0] for size in sizes):
            raise ValueError(f"the tensors of a batch are (samples, ...), of at least four samples; got {sizes} rows")
        return given

    def widths(self, given: Given) -> set[int]:
        return set(self.lengths)

    def counted(self, given: Given) -> Any:
        return ...

    def resized(self, given: Given) -> tuple[Given, dict[int, int]]:
        return self.padded(given), {length: length + _ADDED for length in self.lengths}

    def padded(self, given: Given) -> Given:
        """With what the Trainer adds before it calls a reducer, where another process has longer rows."""
        return given.mapped(self._longer)

    def _longer(self, leaf: Tensor) -> Tensor:
        if leaf.ndim < 2 or leaf.shape[1] not in self.lengths:
            return leaf
        return torch.cat([leaf, leaf.new_full((len(leaf), _ADDED, *leaf.shape[2:]), IGNORED)], 1)


def _batch(given: Given) -> Batch:
    return Batch(given.logits, *split_labels(given.labels))


@dataclass(frozen=True)
class ReducerSubject:
    """A reducer under test, and how to call it."""

    reducer: Reducer
    inputs: _OfTask | _Own
    classes: int
    tolerance: float = 1e-5

    @cached_property
    def batch(self) -> Given:
        """The batch that most rules start from."""
        return self.inputs.batch(self.classes)

    @cached_property
    def result(self) -> Leaves:
        """What comes out for that batch."""
        return self.leaves(self.batch)

    def call(self, given: Given) -> Any:
        """The reducer, called as the Trainer calls it."""
        copy = given.mapped(torch.clone)
        return self.reducer(copy.logits, copy.labels)

    def leaves(self, given: Given) -> Leaves:
        """The tensors that come out, by their path."""
        return dict(_leaves(self.call(given)))


def _mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _mapped(function, branch) for key, branch in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(_mapped(function, branch) for branch in tree)
    return None if tree is None else function(tree)


def _leaves(tree: Any, path: str = "result") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, (Mapping, tuple, list)):
        for key, branch in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(branch, f"{path}[{key!r}]")
    else:
        yield path, tree


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for _, leaf in _leaves(tree) if isinstance(leaf, Tensor)]


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
        yield f"{path}, first dimension", tuple(leaf.shape[:1]), (reducer.batch.samples,)


def dtypes(reducer: ReducerSubject) -> Iterator[Finding]:
    """It returns int32, int64, float32 or float64, whatever the dtype of the logits.

    Fix: `.int()` or `.float()`: bool loses the padding of -100, uint8 turns it into 156, NumPy has no bfloat16.
    """
    for dtype in (torch.float32, torch.bfloat16):
        for path, leaf in reducer.leaves(reducer.batch.cast(dtype)).items():
            yield f"{path} of {dtype} logits, dtype is safe", str(leaf.dtype), _named(leaf.dtype)


def _named(dtype: torch.dtype) -> str:
    return str(dtype) if dtype in SAFE_DTYPES else f"one of {', '.join(map(str, SAFE_DTYPES))}"


def shapes(reducer: ReducerSubject) -> Iterator[Finding]:
    """Dimensions behind the batch are constant, or the labels' own sequence.

    Fix: let nothing else depend on the batch, such as its longest answer; the Trainer pads the second dimension only.
    """
    for rows in ([0], [3], [1, 2]):
        batch = reducer.batch.rows(rows)
        same = {width: width for width in reducer.inputs.widths(batch)}
        for what, (given, widths) in {"": (batch, same), " in another width": reducer.inputs.resized(batch)}.items():
            leaves = reducer.leaves(given)
            for path, leaf in reducer.result.items():
                behind = (widths[leaf.shape[1]], *leaf.shape[2:]) if _by_token(leaf, widths) else leaf.shape[1:]
                yield f"{path} of rows {rows}{what}, shape", tuple(leaves[path].shape), (len(rows), *behind)


def structure(reducer: ReducerSubject) -> Iterator[Finding]:
    """Names and dtypes are the same for every batch, one without any label too.

    Fix: return every entry always, 0 or -100 where there is nothing to say.
    """
    expected = {path: str(leaf.dtype) for path, leaf in reducer.result.items()}
    batches = {"one row": reducer.batch.rows([1]), "no label": reducer.batch.unlabelled()}
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


def stateless(reducer: ReducerSubject) -> Iterator[Finding]:
    """Every call starts afresh: neither numbers nor memory are kept from one to the next.

    Fix: keep no running values in the reducer, and return new tensors each time: the Trainer keeps those of each step.
    """
    first = reducer.leaves(reducer.batch)
    kept = {path: leaf.clone() for path, leaf in first.items()}
    reducer.leaves(reducer.inputs.batch(reducer.classes, seed=1))
    yield from _same("after the next batch", first, kept)
    yield from _same("the same batch again", reducer.leaves(reducer.batch), kept)


def inputs(reducer: ReducerSubject) -> Iterator[Finding]:
    """Logits and labels are left as they were: the labels go on to the metric.

    Fix: `labels = labels.masked_fill(...)`, without the underscore.
    """
    given = reducer.batch.mapped(torch.clone)
    reducer.reducer(given.logits, given.labels)
    for what in ("logits", "labels"):
        before = _leaves(getattr(reducer.batch, what))
        for (path, leaf), (_, original) in zip(_leaves(getattr(given, what), what), before, strict=True):
            yield path, leaf, original


class _Host(Tensor):
    """A tensor on the host, and whatever is computed from it until it is sent to the device."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        first, *others = args or ((),)
        sent = func in (Tensor.to, Tensor.type_as) and any(
            isinstance(where, torch.device | Tensor) for where in (*others, *(kwargs or {}).values())
        )
        on_device = sent or not isinstance(first, cls | list | tuple) or _is_number_beside(first, others)
        return result.as_subclass(Tensor) if on_device and isinstance(result, cls) else result


def _is_number_beside(first: Any, others: Any) -> bool:
    """Is it one number, which may be on the host, beside a tensor on the device?"""
    number = isinstance(first, _Host) and not first.as_subclass(Tensor).ndim
    return number and not all(isinstance(other, _Host) for other in _tensors(others))


class _Hosted(TorchFunctionMode):
    """Marks what leaves the device and what is made elsewhere, on a machine that has only one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.numpy, Tensor.__array__) and not isinstance(args[0], _Host):
            raise TypeError("a tensor on the device has no .numpy()")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        new = not _tensors((args, kwargs)) or (func is torch.tensor and not isinstance(args[0], Tensor))
        leaves = func is Tensor.cpu or (func is Tensor.to and "cpu" in args[1:])
        on_host = leaves or (new and kwargs.get("device") in (None, "cpu"))
        return result.as_subclass(_Host) if on_host and isinstance(result, Tensor) else result


def device(reducer: ReducerSubject) -> Iterator[Finding]:
    """What it returns is on the device that the logits came on.

    Fix: no `.cpu()`, no `.numpy()`, and `device=logits.device` for new tensors: the Trainer gathers on the device and
    moves what is left itself.
    """
    batch = reducer.batch  # before anything is marked: what the Trainer hands over is on the device
    with _Hosted():
        moved = reducer.leaves(batch)
    for path, leaf in moved.items():
        yield path, "on the host" if isinstance(leaf, _Host) else "on the device", "on the device"
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if there is not None:
        for path, leaf in reducer.leaves(reducer.batch.cast(torch.float32).mapped(lambda x: x.to(there))).items():
            yield path, leaf.device.type, there.type


def tuples(reducer: ReducerSubject) -> Iterator[Finding]:
    """It finds the logits in whatever a model returns: alone, first of several, behind a loss of no dimension.

    Fix: take the first floating tensor that has one dimension more than the labels; `logits[0]` is a router's loss in a
    mixture of experts.
    """
    for what, logits in _among_others(reducer.batch).items():
        yield from _same(what, reducer.leaves(replace(reducer.batch, logits=logits)), reducer.result)


def _among_others(given: Given) -> dict[str, Any]:
    """The same logits beside other things that a model returns."""
    logits, beside = given.logits, torch.zeros(given.samples, 2, 3)
    if isinstance(logits, Mapping):
        return {"a longer dict": {**logits, "beside": beside}}
    if isinstance(logits, (tuple, list)):
        return {"a longer tuple": (*logits, beside)}
    return {
        "a tuple": (logits, beside),
        "a loss, the logits, a nested tuple": (torch.tensor(0.5), logits, ((beside, beside),)),
    }


# --- which numbers ---------------------------------------------------------------------------------------------------


def rows(reducer: ReducerSubject) -> Iterator[Finding]:
    """Each row is reduced on its own: batches may be cut and joined anywhere, and superfluous rows cut off.

    Fix: no means, ranks or normalisation over the batch; sums over one row at a time.
    """
    every = [*range(reducer.batch.samples)]
    for cut in (1, 2):
        parts = [reducer.leaves(reducer.batch.rows(index)) for index in (every[:cut], every[cut:])]
        joined = {path: torch.cat([part[path] for part in parts]) for path in parts[0]}
        yield from _same(f"batches of {cut} and {len(every) - cut}", joined, reducer.result)
    repeated = reducer.leaves(reducer.batch.rows([*every, 0, 1]))
    kept = {path: leaf[: len(every)] for path, leaf in repeated.items()}
    yield from _same("two superfluous rows cut off", kept, reducer.result)


def alignment(reducer: ReducerSubject) -> Iterator[Finding]:
    """Place i of the output belongs to label i, and where no logit predicts it stands -100 or 0.0.

    Fix: in a causal model the logit before predicts the label: move predictions to the right by one, exactly once, so
    that no metric has to shift.
    """
    assert isinstance(reducer.inputs, _OfTask)
    labels, shift = split_labels(reducer.batch.labels)[0], reducer.inputs.task.shift
    width = labels.shape[1]
    for row, place in [(0, 0), (0, 3), (0, width - 2), (0, width - 1), (3, width - 2)]:
        scored = place + shift < width and bool(labels[row, place + shift] != IGNORED)
        found = _changed(reducer, row, place, shift)
        for path, places in found.items():
            by_token = _by_token(reducer.result[path], {width})
            allowed = {(row, place + shift)} if by_token else {(row,)} if scored else set()
            yield f"{path}, what else the logits at {(row, place)} change", sorted(places - allowed), []
        if scored:
            yield f"the logits at {(row, place)} change anything", any(found.values()), True
    for path, leaf in reducer.result.items():
        if shift and _by_token(leaf, {width}):
            first, nothing = leaf[:, :shift].double(), 0.0 if leaf.is_floating_point() else float(IGNORED)
            yield f"{path}, where no logit predicts", first, torch.full_like(first, nothing)


def _by_token(leaf: Tensor, widths: Collection[int]) -> bool:
    return leaf.ndim > 1 and leaf.shape[1] in widths


def _changed(reducer: ReducerSubject, row: int, place: int, shift: int) -> dict[str, set[tuple[int, ...]]]:
    """The places of the output that other logits at one place change, by path."""
    changed: dict[str, set[tuple[int, ...]]] = {path: set() for path in reducer.result}
    for seed in range(3):
        batch = reducer.inputs.batch(reducer.classes, seed)
        ids = split_labels(batch.labels)[0]
        label, before = int(ids[row, min(place + shift, ids.shape[1] - 1)].clamp(min=0)), reducer.leaves(batch)
        for push in (99, -99):  # a hit is seen where the label becomes the best, a miss where it was
            logits = batch.logits.clone()
            logits[row, place] *= -3
            logits[row, place, label] += push
            for path, leaf in reducer.leaves(replace(batch, logits=logits)).items():
                places = (leaf != before[path]).nonzero()
                depth = 2 if _by_token(leaf, reducer.inputs.widths(batch)) else 1
                changed[path] |= {tuple(position[:depth]) for position in places.tolist()}
    return changed


def padding(reducer: ReducerSubject) -> Iterator[Finding]:
    """More padding changes nothing.

    Fix: count the labels that are not -100, never all positions, and mask by labels, not by predictions.
    """
    counted = reducer.inputs.counted(reducer.batch)
    longer = reducer.leaves(reducer.inputs.padded(reducer.batch))
    for path, leaf in reducer.result.items():
        if _by_token(leaf, reducer.inputs.widths(reducer.batch)):
            yield path, longer[path][:, : leaf.shape[1]][counted], leaf[counted]
        else:
            yield path, longer[path], leaf


def precision(reducer: ReducerSubject) -> Iterator[Finding]:
    """Numbers are computed in float32 at least, whatever the dtype of the logits.

    Fix: `logits.float()`, a few rows at a time; bfloat16 arithmetic is off by a tenth of a nat for each token.
    """
    rounded = reducer.batch.cast(torch.bfloat16)
    given, expected = reducer.leaves(rounded), reducer.leaves(rounded.cast(torch.float64))
    for path, leaf in expected.items():
        yield f"{path} of bfloat16 logits", given[path], leaf, 1e-4


RULES: tuple[Check, ...] = (
    signature,
    returns,
    batch_first,
    dtypes,
    stateless,
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


def _asked(inputs: _OfTask | _Own) -> list[Check]:
    without: tuple[Check, ...] = () if isinstance(inputs, _OfTask) and inputs.task.sequence else _OF_SEQUENCES
    if isinstance(inputs, _Own):
        without = (alignment,) if inputs.lengths else (alignment, padding)
    return [rule for rule in RULES if rule not in without]


def _inputs(
    task: str | Task | Make, classes: int, extras: Mapping[str, Extra] | None, lengths: Collection[int]
) -> _OfTask | _Own:
    if not callable(task):
        if lengths:
            raise ValueError("lengths are for batches of your own; the tasks of the kit know theirs")
        return _OfTask(find_task(task), extras)
    if extras:
        raise ValueError("extras are for the tasks of the kit; put them into the labels of your own batches")
    own = _Own(task, frozenset(lengths))
    own.batch(classes)  # what is wrong with it is the user's to know, and no broken rule
    return own


def reducer_rules(
    task: str | Task | Make = "causal_lm",
    *,
    classes: int = 7,
    extras: Mapping[str, Extra] | None = None,
    lengths: Collection[int] = (),
    skip: Mapping[str, str] | None = None,
) -> list[Rule]:
    """The rules that a reducer for a task has to keep, one callable each, for `pytest.mark.parametrize`.

    Args:
        task: as in `lossfns.testing.loss_rules`, the logits alone; or, for outputs of any other shape, a function
            `(generator, classes) -> (logits, labels)` that makes a batch as it reaches the reducer: tensors, or tuples
            and dicts of them, of at least four samples, several rows a sample in blocks as of `stack_pairs`; labels may
            be None. Which place belongs to which label is not asked then.
        classes: number of classes of the logits; with a function, whatever the reducer's output may not grow with.
        extras: what else the labels carry, in a dict under these names: functions of the labels.
        lengths: with a function, sizes of a second dimension, as of tokens or frames, that differ from batch to batch,
            and that nothing else has: there the Trainer pads with -100.
        skip: rules that this reducer need not keep, each with its reason, as `{"small": "ten classes"}`.

    Returns:
        Callables with a name: `rule(my_reducer)` raises AssertionError, or returns what was compared.

    Raises:
        ValueError: no such task, no such rule, no reason; no batch, one of fewer samples, or of tensors without a row
            for each (a number, as a loss, has none); options of the one way of making batches with the other.

    Example:
        >>> from reducers import sample_sums
        >>> [rule(partial(sample_sums, shift=1)).rule for rule in reducer_rules()][:2]
        ['signature', 'returns']
    """
    inputs = _inputs(task, classes, extras, lengths)
    return select(_asked(inputs), partial(ReducerSubject, inputs=inputs, classes=classes), skip)


def check_reducer(reducer: Reducer, task: str | Task | Make = "causal_lm", **options: Any) -> Report:
    """Hold a `preprocess_logits_for_metrics` to all the rules of its task.

    Args:
        reducer: `(logits, labels) -> tensors`.
        task: what the model is for, or a function that makes batches of any other shape, as in `reducer_rules`.
        **options: those of `reducer_rules`.

    Returns:
        What was compared, if every rule is kept; `print` it.

    Raises:
        AssertionError: a rule is broken: its name, what was given and expected, and how to mend it.
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
