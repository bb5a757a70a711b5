"""Run ops on fake tensors quickly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

#: What is known of a tensor: shape, strides, dtype and device.
_Known = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


@dataclass(frozen=True)
class _Result:
    """A result of an op: what is known of it, and whether it is a view of the first argument.

    It may be the first argument itself.
    """

    known: _Known
    is_view: bool
    is_first: bool
    #: How many elements after the first argument a view begins.
    offset: int


@dataclass(frozen=True)
class _Results:
    """The results of an op, and the type of what holds them, if it returns several."""

    results: list[_Result]
    held_in: type | None


#: Tags of ops whose results, or what is known of them, depend on more than shapes and dtypes.
_NOT_ORDINARY = frozenset(
    (
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
    )
)

#: Views whose place in the storage does not follow from where the first argument begins.
_COUNTS_ELEMENTS = (torch.ops.aten.as_strided.default, torch.ops.aten.view.dtype)


class FakeOnceMode(FakeTensorMode):
    """A FakeTensorMode that makes a fake tensor of each real one once, and infers each op once.

    Where an op gets a real tensor, torch's mode does not look up what it knows of earlier calls of
    the op. So each product with a weight would take milliseconds.

    Where torch's mode looks results up, it takes 0.2 ms, mostly to make a key of all that is known
    of the arguments. A step of 48 layers has thousands of ops, and most of them are the same in
    each layer. So this mode looks up results of ordinary ops by a shorter key.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}  # ids stay unique while these live
        self._results: dict[Any, _Results] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op on fake tensors."""
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        args, kwargs = with_tensors(self._fake, (args, kwargs or {}))
        if not _is_ordinary(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        try:
            key = func, torch.get_default_dtype(), _key(args), _key(kwargs)
        except _NoKeyError:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if (known := self._results.get(key)) is not None:
            made = [self._made(each, args) for each in known.results]
            return made[0] if known.held_in is None else known.held_in(made)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        held_in = type(result) if type(result) in (list, tuple) else None
        given = storages((args, kwargs))
        found = [_result(each, args, given) for each in (result if held_in else [result])]
        results = [each for each in found if each is not None]
        if len(results) == len(found):
            self._results[key] = _Results(results, held_in)
        return result

    def close(self) -> None:
        """Forget the real tensors.

        A fake view holds its base where Python's garbage collector does not see it, so the mode may
        live on.
        """
        self._fakes.clear()

    def _fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._fakes:
            self._fakes[id(tensor)] = tensor, self.from_tensor(tensor)
        return self._fakes[id(tensor)][1]

    def _made(self, result: _Result, args: tuple[Any, ...]) -> FakeTensor:
        """Return the result of an op with other arguments."""
        if result.is_first:
            return args[0]
        shape, strides, dtype, device = result.known
        if result.is_view:
            elements = torch.empty(0, dtype=dtype, device="meta")
            offset = args[0].storage_offset() + result.offset
            elements.set_(args[0].untyped_storage(), offset, shape, strides)
        else:
            elements = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return FakeTensor(self, elements, device)


class _NoKeyError(Exception):
    """An argument may change the result in a way that a key does not say."""


@cache
def _is_ordinary(func: Any) -> bool:
    """Return whether what is known of an op's arguments decides what is known of its results.

    The op does not change shapes or strides of its arguments.
    """
    return (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace == "aten"
        and not _NOT_ORDINARY.intersection(func.tags)
        and func not in _COUNTS_ELEMENTS
        and "lift" not in func._opname
        and not torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        )
    )


def _key(x: Any) -> Any:
    """Return what decides the result of an op in its arguments."""
    kind = type(x)
    if kind is tuple or kind is list:
        return tuple([_key(each) for each in x])
    if kind is dict:
        return tuple([(name, _key(each)) for name, each in x.items()])
    if isinstance(x, FakeTensor):
        if not _is_plain(x):
            raise _NoKeyError
        return _known(x)
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool, Tensor, torch.Generator)):
        raise _NoKeyError
    return kind, x  # 1, 1.0 and True are equal


def _known(x: Tensor) -> _Known:
    return x.shape, x.stride(), x.dtype, x.device


def _is_plain(x: FakeTensor) -> bool:
    """Return whether shape, strides, dtype and device say all that ops ask of a tensor."""
    return (
        x.constant is None
        and x.layout is torch.strided
        and not (x.dtype.is_complex or x.is_neg() or x.is_quantized)
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def _result(x: Any, args: tuple[Any, ...], given: list[int]) -> _Result | None:
    """Return what a result is, None if it is neither a new plain tensor nor a plain view.

    Args:
        x: What the op returns.
        args: The arguments.
        given: The storages of the arguments.
    """
    if not isinstance(x, FakeTensor) or x.requires_grad or not _is_plain(x):
        return None
    (storage,) = storages(x)
    first = args[0] if args else None
    if isinstance(first, FakeTensor) and storages(first) == [storage]:
        return _Result(_known(x), True, x is first, x.storage_offset() - first.storage_offset())
    return None if storage in given else _Result(_known(x), False, False, 0)


def storages(x: Any) -> list[int]:
    """Return the storages of a tensor, or of those in tuples, lists and dicts."""
    found: list[int] = []
    with_tensors(lambda tensor: found.append(tensor.untyped_storage()._cdata), x)
    return found


def with_tensors(function: Callable[[Tensor], Any], x: Any) -> Any:
    """Return the arguments of an op with what a function returns for each tensor of them."""
    if isinstance(x, Tensor):
        return function(x)
    if type(x) in (tuple, list):
        return type(x)([with_tensors(function, each) for each in x])
    if type(x) is dict:
        return {name: with_tensors(function, each) for name, each in x.items()}
    return x
