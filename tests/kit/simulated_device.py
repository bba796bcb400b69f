"""A simulated device that counts how often the host waits for it.

Tensors on the simulated device keep their values on the host. On a real device the host would wait whenever it reads a
value, or creates a tensor whose size depends on values.
"""

from collections import Counter
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
aten = torch.ops.aten
# Operations that wait: they return a Python number, or an output whose size depends on values.
WAITS = {
    aten._local_scalar_dense,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten.bincount,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.repeat_interleave,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class OnDevice(Tensor):
    """A tensor on the simulated device, with its values on the host."""

    @staticmethod
    def __new__(cls, numbers):
        return Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=DEVICE,
        )

    def __init__(self, numbers):
        self.numbers = numbers

    def data_ptr(self):
        return self.numbers.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a tensor on the device, outside of counted_waits()")


def on_device(tree):
    """Move the tensors of a tree to the simulated device."""
    return tree_map(lambda leaf: OnDevice(leaf.detach().clone()) if isinstance(leaf, Tensor) else leaf, tree)


def numbers_of(tree):
    """Return the tensors of a tree with their values on the host."""
    return tree_map(lambda leaf: leaf.numbers if isinstance(leaf, OnDevice) else leaf, tree)


class _Waits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        here = any(isinstance(leaf, OnDevice) for leaf in tree_leaves((args, kwargs)))
        there = here if device is None else torch.device(device) == DEVICE
        if here or there:
            self._count(func, args, kwargs, here, there)
        if there and device is not None:
            kwargs["device"] = torch.device("cpu")
        if func is aten._to_copy.default and here != there:
            kwargs.pop("non_blocking", None)
        result = func(*numbers_of(args), **numbers_of(kwargs))
        if not there:
            return result
        return _returned(func, args, kwargs, result)

    def _count(self, func, args, kwargs, here, there):
        name = func.overloadpacket
        if name is aten._to_copy and here != there and not (there and kwargs.get("non_blocking")):
            self.found[f"{func}"] += 1
        elif name is aten.copy_ and isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice):
            waits = not (isinstance(args[0], OnDevice) and len(args) > 2 and args[2])
            self.found[f"{func}"] += waits
        elif name in WAITS or (name in INDEXING and _waits_for_indices(name, args)):
            self.found[f"{func}"] += 1


def _waits_for_indices(name, args):
    indices = [index for index in args[1] if index is not None]
    masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    if name is not aten.index and masks and len(indices) == 1 and args[2].numel() == 1:
        return False  # a masked_fill
    return bool(masks) or any(not isinstance(index, OnDevice) for index in indices)


def _returned(func, args, kwargs, result):
    """Move the result of an operation to the device, or return the tensors that it modified in place."""
    written = {id(tensor.numbers): tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, OnDevice)}
    schema = func._schema

    def back(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        return written[id(leaf)] if schema.is_mutable and id(leaf) in written else OnDevice(leaf)

    return tree_map(back, result)


class _FromPython(TorchFunctionMode):
    """Create tensors from Python numbers on the host first, which torch does not do for the simulated device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is Tensor.new_tensor:
            like, *args = args
            func, kwargs = torch.tensor, {"dtype": like.dtype, "device": like.device, **kwargs}
        if func not in (torch.tensor, torch.as_tensor) or kwargs.get("device") != DEVICE or isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)


@contextmanager
def counted_waits():
    """Count per operation how often the host waits for the device."""
    with _FromPython(), _Waits() as waits:
        yield waits.found
