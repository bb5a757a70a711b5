"""Record the torch ops that a function runs, on fake tensors.

The result is a list of nodes in the order of execution. A tensor is named by the node that made it.
Parameters, buffers and other real tensors are held as they are. Numbers that grow with a size, such
as the slots of a cache, are found by recording at several sizes (sizes.py).
"""

from __future__ import annotations

import logging
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from types import TracebackType
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from mirage_hf.errors import MirageError
from mirage_hf.trace.coded_linear import CodedLinear
from mirage_hf.trace.fake_mode import with_tensors
from mirage_hf.trace.host_values import HostValues
from mirage_hf.trace.questions import LengthQuestions
from mirage_hf.trace.row_values import RowValues, UnknownRowsError

#: Ops that return views. They launch nothing on a GPU.
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "as_strided",
        "detach",
        "expand",
        "narrow",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unsqueeze",
        "view",
        "view.dtype",
        "view_as",
    )
)


class TraceError(MirageError):
    """A function that cannot be recorded. The message says at which op, and where."""


@dataclass(frozen=True)
class Value:
    """Output number `output` of node number `node`."""

    node: int
    output: int = 0


@dataclass(frozen=True)
class Input:
    """A tensor that the caller gives under this name."""

    name: str


@dataclass(frozen=True, eq=False)
class Held:
    """A real tensor, such as a parameter."""

    tensor: Tensor


@dataclass(frozen=True)
class Meta:
    """What is known of a tensor without its contents. `storage` is equal for tensors that alias."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    storage: int


@dataclass(eq=False)
class Node:
    """One call of an op.

    Attributes:
        op: The op, such as `torch.ops.aten.add.Tensor`.
        args: Its arguments. Tensors are `Value`s, `Input`s or `Held`.
        kwargs: Likewise.
        outputs: One for each tensor that it returns, in order. None for others.
        where: The line of the model's code that called it.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Meta | None]
    where: str
    #: The storages that the op writes into.
    written: frozenset[int] = frozenset()

    @cached_property
    def name(self) -> str:
        """The op's name without its overload, such as "aten.add".

        A view in another dtype is "aten.view.dtype", because it has other elements.
        """
        name = f"{self.op.namespace}.{self.op._opname}"
        return f"{name}.dtype" if self.op is torch.ops.aten.view.dtype else name

    @cached_property
    def operands(self) -> tuple[Value | Input | Held, ...]:
        """The tensors among the arguments, in order."""
        found = leaves((self.args, self.kwargs))
        return tuple(x for x in found if isinstance(x, (Value, Input, Held)))


@dataclass
class Recording:
    """The nodes of a function, in order."""

    nodes: list[Node] = field(default_factory=list)
    #: What is known of inputs and of held tensors, by name and by id.
    inputs: dict[str, Meta] = field(default_factory=dict)
    held: dict[int, Meta] = field(default_factory=dict)
    #: The greatest length of a text for which the ops are these. See questions.py.
    reach: float = math.inf
    #: The linears in codes that nodes name.
    coded: tuple[CodedLinear, ...] = ()
    #: The experts that nodes name and no module has.
    forms: tuple[Any, ...] = ()
    #: By the input that keeps a state after a token: the input that has the state before it.
    moves: Mapping[str, str] = field(default_factory=dict)

    @property
    def held_tensors(self) -> list[Tensor]:
        """The real tensors that nodes read."""
        found = {id(x.tensor): x.tensor for n in self.nodes for x in n.operands if type(x) is Held}
        return list(found.values())

    @cached_property
    def changing(self) -> frozenset[int]:
        """The storages that some node writes. No node may be added any more."""
        return frozenset(s for node in self.nodes for s in node.written)

    def before(self, state: Input) -> Input:
        """Return the input that has a state before what writes `state`."""
        return Input(self.moves.get(state.name, state.name))

    def meta(self, of: Value | Input | Held) -> Meta:
        """Return what is known of a tensor."""
        if isinstance(of, Value):
            meta = self.nodes[of.node].outputs[of.output]
            assert meta is not None
            return meta
        return self.inputs[of.name] if isinstance(of, Input) else self.held[id(of.tensor)]


#: By tensor: the numbers of the nodes that read it.
Readers = dict[Value | Input, list[int]]


def readers_of(nodes: Sequence[Node]) -> Readers:
    """Return the numbers of the nodes that read each tensor, in order, without held tensors."""
    readers: Readers = {}
    for number, node in enumerate(nodes):
        for x in set(node.operands):
            if not isinstance(x, Held):
                readers.setdefault(x, []).append(number)
    return readers


def renamed(node: Node, names: Mapping[Value, Value]) -> Node:
    """Return a node that reads other values."""
    if not any(x in names for x in node.operands if isinstance(x, Value)):
        return node

    def named(x: Any) -> Any:
        if isinstance(x, Value):
            return names.get(x, x)
        if isinstance(x, (tuple, list)):
            return type(x)([named(each) for each in x])
        return x

    kwargs = {name: named(x) for name, x in node.kwargs.items()}
    return replace(node, args=named(node.args), kwargs=kwargs)


def record(
    function: Callable[[], Any],
    inputs: Mapping[str, Tensor],
    mode: Any,
    length: Tensor | None = None,
    host: HostValues | None = None,
    hidden: Mapping[int, Callable[[], Tensor]] | None = None,
    row_values: RowValues | None = None,
) -> Recording:
    """Record the ops that `function` runs.

    Args:
        function: Takes nothing. It may read and write the inputs, and read real tensors.
        inputs: Fake tensors, by name.
        mode: The mode that made them.
        length: The input that is the length of the text in the cache, if there is one.
        host: The integers that the function reads on the host.
        hidden: What each softmax over so many elements must hide. The functions make masks
            (1, elements) that are true there.
        row_values: What is computed of a number that the model takes for all rows, if each row has
            another one.

    Raises:
        TraceError: The function reads other values of tensors on the host, or runs what fake
            tensors do not support.
    """
    recorder = _Recorder(inputs, length, host or HostValues(), hidden or {}, row_values)
    with host_reads_named(), torch.no_grad(), mode, recorder:
        function()
    recorder.recording.reach = min(recorder.questions.reach, recorder.host.reach())
    if recorder.recording.reach < 1:
        raise TraceError("the model takes another path for each number of tokens in the cache")
    return recorder.recording


@contextmanager
def host_reads_named() -> Iterator[None]:
    """Say which line of a model does what fake tensors cannot do. Torch does not log it.

    Raises:
        TraceError: Values of tensors are read on the host, or an op has no fake kernel.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = _innermost_line(error.__traceback__)
        raise TraceError(
            f"{where} reads values of the device on the host ({error.func}), so its ops may differ "
            "from step to step"
        ) from None
    except UnsupportedOperatorException as error:
        where = _innermost_line(error.__traceback__)
        raise TraceError(f"{where} runs an op without a fake kernel ({error.func})") from None
    finally:
        logger.setLevel(before)


class _Recorder(TorchDispatchMode):
    """Writes down each op before fake tensors run it."""

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        length: Tensor | None,
        host: HostValues,
        hidden: Mapping[int, Callable[[], Tensor]],
        row_values: RowValues | None,
    ):
        super().__init__()
        self.host, self.hidden, self.row_values = host, hidden, row_values
        self._masks: dict[int, Tensor] = {}
        self.recording = Recording()
        self.questions = LengthQuestions(length)
        self._storages: dict[int, int] = {}
        self._kept: list[Any] = []  # ids stay unique while the objects live
        self._names: dict[int, Value | Input] = {}
        for name, tensor in inputs.items():
            self._names[id(tensor)] = Input(name)
            self.recording.inputs[name] = self._meta(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op and write it down."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            answer = self.questions.answer(args[0])
            if answer is None:
                raise DataDependentOutputException(func)
            return answer
        if func.namespace == "prim":  # reads what is known of a tensor, such as its device
            return func(*args, **kwargs)
        if self.host.has_symbols and any(isinstance(x, SymInt) for x in leaves((args, kwargs))):
            return self._lowered(func, args, kwargs)
        if self.row_values is not None and self.row_values.reads((args, kwargs)):
            return self._of_each_row(self.row_values, func, args, kwargs)
        if func is torch.ops.aten._softmax.default:
            args = (self._scores_of_tokens(*args[:2]), *args[1:])
        named_args = with_tensors(self._name, args)
        named_kwargs = with_tensors(self._name, kwargs)
        result = func(*args, **kwargs)
        self.questions.note(func, args, kwargs, result)
        written = frozenset(
            self._storage(x)
            for x, argument in _written(func, args, kwargs)
            for x in _tensors(argument)
        )
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        number = len(self.recording.nodes)
        metas: list[Meta | None] = []
        for position, output in enumerate(outputs):
            if not isinstance(output, Tensor):
                metas.append(None)
                continue
            metas.append(self._meta(output))
            # an op that writes returns the tensor that it was given
            self._names[id(output)] = Value(number, position)
            self._kept.append(output)
        if self.row_values is not None:
            self.row_values.note((args, kwargs), outputs)
        self.recording.nodes.append(
            Node(func, named_args, named_kwargs, metas, _calling_line(), written)
        )
        return result

    def _lowered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that takes an integer of the host as ops that read it on the device."""
        with self:
            result = self.host.lowered(func, args, kwargs)
        if result is NotImplemented:
            raise TraceError(f"{_calling_line()} makes a shape of the number of tokens ({func})")
        return result

    def _of_each_row(
        self, row_values: RowValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an op on a number that the model takes for all rows, for the number of each row."""
        seen = func(*args, **kwargs)
        self.questions.note(func, args, kwargs, seen)
        try:
            with self:
                return row_values.run(func, args, kwargs, seen)
        except (UnknownRowsError, RuntimeError) as error:
            raise TraceError(
                f"{_calling_line()} takes one number of tokens for all rows ({func}): {error}"
            ) from None

    def _scores_of_tokens(self, scores: Tensor, dim: int) -> Tensor:
        """Return the scores of a softmax, with −inf for slots that hold no token."""
        count = scores.shape[dim]
        if count not in self.hidden or dim % scores.ndim != scores.ndim - 1:
            return scores
        with self:
            if count not in self._masks:
                self._masks[count] = self.hidden[count]()
            return scores.masked_fill(self._masks[count], -math.inf)

    def _name(self, tensor: Tensor) -> Value | Input | Held:
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        if isinstance(tensor, FakeTensor):
            raise TraceError(
                f"{_calling_line()} reads a tensor of shape {tuple(tensor.shape)} that an earlier "
                "call has made"
            )
        self._kept.append(tensor)
        self.recording.held.setdefault(id(tensor), self._meta(tensor))
        return Held(tensor)

    def _storage(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = len(self._storages)
            self._kept.append(storage)
        return self._storages[key]

    def _meta(self, tensor: Tensor) -> Meta:
        return Meta(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device,
            self._storage(tensor),
        )


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the arguments that an op writes into, with their declarations."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if alias is None or not alias.is_write:
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        if given is not None:
            found.append((argument, given))
    return found


def _tensors(x: Any) -> list[Tensor]:
    return [t for t in leaves(x) if isinstance(t, Tensor)]


def numbers_of(node: Node) -> set[Any]:
    """Return the integers among a node's arguments."""
    return {x for x in leaves((node.args, node.kwargs)) if type(x) is int}


def leaves(x: Any) -> list[Any]:
    """Return what nested tuples, lists and dicts hold, in order."""
    if isinstance(x, (tuple, list)):
        return [leaf for each in x for leaf in leaves(each)]
    if isinstance(x, dict):
        return [leaf for each in x.values() for leaf in leaves(each)]
    return [x]


# -- where an op was called ------------------------------------------------------------------------

#: Our own code that calls a model's forward.
_STEP = "mirage_hf/decode/step.py"
_NOT_MODELS = ("/torch/", "/mirage_hf/", "transformers/utils/")


@cache
def _is_model_code(file: str) -> bool:
    return not any(part in file for part in _NOT_MODELS)


def _calling_line() -> str:
    """Return the innermost line of the call stack that belongs to a model."""
    frame: Any = sys._getframe(1)
    while frame is not None and not _is_model_code(frame.f_code.co_filename):
        if frame.f_code.co_filename.endswith(_STEP):
            return "the end of the step"
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _innermost_line(trace: TracebackType | None) -> str:
    """Return the innermost line of a traceback that belongs to a model."""
    lines = [f for f in traceback.extract_tb(trace) if _is_model_code(f.filename)]
    if not lines:
        return "the model"
    return f"{lines[-1].filename.rpartition('/')[2]}:{lines[-1].lineno}"
