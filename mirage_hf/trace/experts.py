"""The chosen experts of a mixture as one recorded node, and the program that it becomes.

While a step is recorded, transformers' "batched_mm" experts call the op `mirage_hf::experts` in
place of copying the weights of the chosen experts. Run as it is, the op runs stock's function.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, library, nn

from mirage_hf.errors import GraphError
from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.ops.dtypes import COMPUTE_DTYPES
from mirage_hf.trace.record import (
    FakeOnceMode,
    Input,
    Node,
    Readers,
    Recording,
    TraceError,
    Value,
    readers_of,
    record,
)
from mirage_hf.trace.regions import Operand, Region, Result
from mirage_hf.trace.sizes import fixed_shape
from mirage_hf.trace.terms import SAME_TENSOR, elementwise_row

try:
    from transformers.integrations import moe
except ImportError:  # this version has no registry of experts
    moe = None

#: transformers' registry of experts, None in versions without one.
EXPERTS_FUNCTIONS: Any = getattr(moe, "ALL_EXPERTS_FUNCTIONS", None)

#: The op's name as nodes have it.
EXPERTS = "mirage_hf.experts"

#: The form of stock's experts that the op stands for.
_STOCK = "batched_mm"

#: The most tokens that kernels take. Of more tokens, many choose the same experts, so products of
#: all tokens of an expert read fewer bytes.
MOST_TOKENS = 16

#: What experts may have besides their two linears, in the words of transformers.
_FEATURES = ("has_gate", "has_bias")

#: Sums that a program of experts may end with: a residual, and a shared expert.
MOST_ADDED = 2

library.define(
    "mirage_hf::experts",
    "(Tensor x, Tensor index, Tensor weights, Tensor[] parameters, int number) -> Tensor",
)

_recording = threading.local()
_lock = threading.Lock()
_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _run(x: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor], number: int) -> Any:
    module = _modules.get(number)
    assert module is not None, "the experts of a recorded step are gone"
    was_active, _recording.active = getattr(_recording, "active", False), False
    try:
        return EXPERTS_FUNCTIONS[_STOCK](module, x, index, weights)
    finally:
        _recording.active = was_active


library.impl("mirage_hf::experts", "CompositeExplicitAutograd", _run)


@library.register_fake("mirage_hf::experts")
def _fake(x: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor], number: int) -> Any:
    return torch.empty_like(x)


@dataclass(frozen=True)
class Linear:
    """A linear of each expert.

    Attributes:
        weight: The name of its weights: (experts, outputs, inputs), or transposed.
        bias: The name of its biases (experts, outputs), None without any.
    """

    weight: str
    bias: str | None

    @property
    def names(self) -> list[str]:
        """The names of its parameters."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def linears_of(module: nn.Module) -> tuple[Linear, Linear] | None:
    """Return the linears of each expert of a module, None if they are not of a known form."""
    flags = [getattr(module, name, None) for name in ("has_gate", "has_bias", "is_transposed")]
    if not all(isinstance(flag, bool) for flag in flags):
        return None
    if _unknown_features(module):
        return None
    first = "gate_up_proj" if flags[0] else "up_proj"
    linears = [Linear(name, f"{name}_bias" if flags[1] else None) for name in (first, "down_proj")]
    for linear in linears:
        for name, dims in zip(linear.names, (3, 2), strict=False):
            x = module._parameters.get(name)
            if x is None or x.dim() != dims or not x.is_contiguous():
                return None
            if type(x) is not nn.Parameter or x.dtype not in COMPUTE_DTYPES:
                return None
    return linears[0], linears[1]


def _unknown_features(module: nn.Module) -> list[str]:
    """Return what transformers says that experts have, and no program computes, such as a norm."""
    said = (name for name, is_on in vars(module).items() if is_on is True)
    return [name for name in said if name.startswith("has_") and name not in _FEATURES]


def _parameters(module: nn.Module, linears: Sequence[Linear]) -> list[Tensor]:
    return [getattr(module, name) for linear in linears for name in linear.names]


def _one_node(stock: Any) -> Any:
    def experts(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Any:
        """Call the op while this thread records a step, else what was registered before."""
        linears = linears_of(module) if getattr(_recording, "active", False) else None
        if linears is None or x.dim() != 2:
            return stock(module, x, index, weights)
        number = _recording.numbers.setdefault(id(module), next(_numbers))
        _modules[number] = module
        parameters = _parameters(module, linears)
        return torch.ops.mirage_hf.experts(x, index, weights, parameters, number)

    return experts


@contextmanager
def experts_as_one_node() -> Iterator[None]:
    """Let this thread's calls of "batched_mm" experts be one op each."""
    if EXPERTS_FUNCTIONS is None:
        yield
        return
    with _lock:  # one recording at a time, or the functions would be put back in a wrong order
        own = EXPERTS_FUNCTIONS._local_mapping
        stock, was_own = EXPERTS_FUNCTIONS[_STOCK], _STOCK in own
        own[_STOCK] = _one_node(stock)
        _recording.active, _recording.numbers = True, {}
        try:
            yield
        finally:
            _recording.active, _recording.numbers = False, {}
            if was_own:
                own[_STOCK] = stock
            else:
                del own[_STOCK]


# -- programs --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part(Operand):
    """Some columns of a parameter of experts, as an input of a program. Nothing is copied.

    Attributes:
        dim: The dim of the columns.
        columns: Which they are.
    """

    dim: int = 0
    columns: slice = field(default_factory=lambda: slice(None))

    def of(self, x: Tensor) -> Tensor:
        """Return the program's input."""
        return x[(slice(None),) * self.dim + (self.columns,)]


def find_experts(
    recording: Recording, ancestors: Sequence[int], taken: Collection[int]
) -> list[Region]:
    """Return the programs of chosen experts, two for each node of at most MOST_TOKENS tokens.

    The first gives what is between the two linears of an expert. The second one ends with the sums
    that follow the experts. Searched together they would take a minute.

    Args:
        recording: The recording.
        ancestors: For each node those that must run before it (`order.ancestors`).
        taken: Nodes that run in other units.
    """
    readers = readers_of(recording.nodes)
    found = []
    for number, node in enumerate(recording.nodes):
        if node.name == EXPERTS and recording.meta(node.args[0]).shape[0] <= MOST_TOKENS:
            added = _added(recording, ancestors, readers, number, taken)
            try:
                found += _Writer(recording, number, added).write()
            except (GraphError, TraceError):
                continue
    return found


def _added(
    recording: Recording,
    ancestors: Sequence[int],
    readers: Readers,
    number: int,
    taken: Collection[int],
) -> list[tuple[int, Any]]:
    """Return the sums that follow experts: the node of each, and what it adds."""
    size = math.prod(fixed_shape(recording.meta(Value(number))) or ())
    found: list[tuple[int, Any]] = []
    value, changing = Value(number), recording.changing
    while len(found) < MOST_ADDED:
        users = readers.get(value, [])
        if len(users) != 1:
            break
        (user,) = users
        node = recording.nodes[user]
        if node.name in SAME_TENSOR:
            if recording.meta(Value(user)).dtype != recording.meta(value).dtype:
                break
            value = Value(user)
            continue
        others = [x for x in node.args if x != value]
        if node.name != "aten.add" or node.kwargs or len(others) != 1 or user in taken:
            break
        (other,) = others
        if not isinstance(other, (Value, Input)) or recording.meta(other).storage in changing:
            break
        if isinstance(other, Value) and (ancestors[other.node] | 1 << other.node) >> number & 1:
            break
        sizes = [fixed_shape(recording.meta(x)) for x in (Value(user), other)]
        dtypes = {recording.meta(x).dtype for x in (Value(user), other, value)}
        if any(s is None or math.prod(s) != size for s in sizes) or len(dtypes) > 1:
            break
        found.append((user, other))
        value = Value(user)
    return found


class _Writer:
    """Writes the program of one node: experts, their weights, and what is added."""

    def __init__(self, recording: Recording, number: int, added: list[tuple[int, Any]]):
        self.recording, self.number, self.added = recording, number, added
        node = recording.nodes[number]
        self.x, self.index, self.weights, self.parameters, name = node.args
        module = _modules.get(name)
        linears = None if module is None else linears_of(module)
        if module is None or linears is None:
            raise TraceError("the experts are gone, or have other weights now")
        self.module, self.linears = module, linears
        self.held = dict(
            zip([n for linear in linears for n in linear.names], self.parameters, strict=True)
        )
        self.rows, self.width = recording.meta(self.x).shape
        self.chosen = recording.meta(self.index).shape[-1]
        self.dtype = recording.meta(self.x).dtype

    def write(self) -> list[Region]:
        """Return the two programs as regions.

        Raises:
            GraphError: Its shapes or dtypes do not fit.
            TraceError: The function between the two linears is of another form.
        """
        first, second = self.linears
        between = Value(self.number, 1)  # a result that the recorded node does not have
        return [self._first_program(first, between), self._second_program(second, between)]

    def _begin(self) -> None:
        """Begin a program."""
        self.graph: KernelGraph = new_kernel_graph()
        self.inputs: list[Operand] = []
        self.e = self._given(self.index, (self.rows, self.chosen), torch.int64)

    def _first_program(self, linear: Linear, between: Value) -> Region:
        self._begin()
        x = self._given(self.x, (self.rows, 1, 1, self.width), self.dtype)
        weight = self.held[linear.weight].tensor
        h = gate(self.module, weight, self.graph, self._first(x, linear))
        self.graph.mark_output(h)
        return self._region((self.number,), between, h.dims, h.dims, linear)

    def _second_program(self, linear: Linear, between: Value) -> Region:
        self._begin()
        graph, rows, meta = self.graph, self.rows, self.recording.meta
        weight = self.held[linear.weight].tensor
        inner = weight.shape[3 - self._outputs_dim]
        h = self._given(between, (rows, self.chosen, 1, inner), weight.dtype)
        chosen = self._chosen(linear.weight, self._outputs_dim, slice(None))
        y = self._with_bias(self._product(h, chosen), linear.bias, slice(None))
        dims = rows, self.chosen, 1, 1
        weights = self._given(self.weights, dims, meta(self.weights).dtype)
        out = graph.reduction(graph.mul(*self._alike(y, weights)), 1)
        for _, other in self.added:
            addend = self._given(other, (rows, 1, 1, self.width), meta(other).dtype)
            out = graph.add(*self._alike(addend, out))
        graph.mark_output(out if out.dtype == self.dtype else graph.cast(out, self.dtype))
        value = Value(self.added[-1][0]) if self.added else Value(self.number)
        nodes = (self.number, *(n for n, _ in self.added))
        shape = tuple(fixed_shape(meta(value)) or ())
        return self._region(nodes, value, (rows, self.width), shape, linear)

    def _region(
        self,
        nodes: tuple[int, ...],
        value: Value,
        sizes: tuple[int, ...],
        shape: tuple[int, ...],
        linear: Linear,
    ) -> Region:
        result = Result(value, sizes, tuple(range(len(sizes))), sizes, sizes, shape)
        whole = sum(self.held[name].tensor.nbytes for name in linear.names)
        experts = len(self.held[linear.weight].tensor)
        reads = whole * min(self.rows * self.chosen, experts) // experts
        return Region(None, nodes, self.graph, self.inputs, [result], reads=reads)

    @property
    def _outputs_dim(self) -> int:
        """The dim of weights that has the outputs."""
        return 2 if self.module.is_transposed else 1

    def _first(self, x: DTensor, linear: Linear) -> Callable[[slice], DTensor]:
        """Return what gives some columns of the first linear's result."""

        def columns(part: slice) -> DTensor:
            weight = self._chosen(linear.weight, self._outputs_dim, part)
            return self._with_bias(self._product(x, weight), linear.bias, part)

        return columns

    def _product(self, x: DTensor, weight: DTensor) -> DTensor:
        """Return products (rows, chosen, 1, outputs) with the chosen weights."""
        if self._outputs_dim == 1:
            weight = self.graph.permute(weight, (0, 1, 3, 2))
        return self.graph.matmul(x, weight)

    def _with_bias(self, y: DTensor, bias: str | None, part: slice) -> DTensor:
        if bias is None:
            return y
        chosen = self._chosen(bias, 1, part)
        return self.graph.add(
            y, self.graph.reshape(chosen, (self.rows, self.chosen, 1, y.dims[-1]))
        )

    def _chosen(self, name: str, dim: int, part: slice) -> DTensor:
        """Return the chosen experts' part of a parameter."""
        held = self.held[name]
        operand = Part(held, (), (), (), dim=dim, columns=part)
        given = operand.of(held.tensor.detach())
        x = self.graph.new_input(given.shape, given.dtype, strides=given.stride(), constant=True)
        self.inputs.append(operand)
        return self.graph.take(x, self.e)

    def _given(self, source: Any, dims: tuple[int, ...], dtype: torch.dtype) -> DTensor:
        is_between = source == Value(self.number, 1)
        self.inputs.append(Operand(source, dims, tuple(range(len(dims))), dims, is_between))
        return self.graph.new_input(dims, dtype)

    def _alike(self, *tensors: DTensor) -> list[DTensor]:
        """Return tensors in one dtype: float32 if they have several."""
        if len({x.dtype for x in tensors}) == 1:
            return [*tensors]
        cast = self.graph.cast
        return [x if x.dtype == torch.float32 else cast(x, torch.float32) for x in tensors]


def gate(
    module: Any, weight: Tensor, graph: KernelGraph, columns: Callable[[slice], DTensor]
) -> DTensor:
    """Write the function between the two linears of experts.

    Args:
        module: The experts.
        weight: The weights of the first linear.
        graph: The program.
        columns: Gives columns of the first linear's result.

    Raises:
        TraceError: The function is of another form.
    """
    function = module._apply_gate if module.has_gate else module.act_fn
    width = weight.shape[2 if module.is_transposed else 1]
    mode = FakeOnceMode()
    try:
        with mode:
            x = torch.empty(1, width, dtype=weight.dtype, device=weight.device)
        recording = record(lambda: function(x), {"x": x}, mode)
    finally:
        mode.close()
    made: dict[Any, Any] = {}

    def tensor(key: Any) -> Any:
        """Return the tensor of an operand. Columns are computed when they are read."""
        if isinstance(key, (int, float)) and not isinstance(key, bool):
            return key
        if key not in made:
            raise TraceError("experts whose gate reads other tensors")
        if isinstance(made[key], range):
            part = made[key]
            made[key] = columns(slice(part.start, part.stop, part.step))
        return made[key]

    made[Input("x")] = range(width)
    for number, node in enumerate(recording.nodes):
        if node.name in SAME_TENSOR:
            made[Value(number)] = made[node.args[0]]
        elif node.name in ("aten.split", "aten.split_with_sizes", "aten.slice"):
            _note_parts(made, number, node)
        elif (row := elementwise_row(node)) is not None:
            op, args, attrs = row
            made[Value(number)] = graph.apply(op, [tensor(a) for a in args], attrs)
        else:
            raise TraceError(f"experts whose gate runs {node.name}")
    result: DTensor = tensor(Value(len(recording.nodes) - 1))
    return result


def _note_parts(made: dict[Any, Any], number: int, node: Node) -> None:
    """Note which columns each result of a split or a slice is."""
    whole = made.get(node.args[0])
    dim = node.args[2] if node.name != "aten.slice" and len(node.args) > 2 else None
    if node.name == "aten.slice":
        dim = node.args[1] if len(node.args) > 1 else 0
    if not isinstance(whole, range) or dim not in (1, -1):
        raise TraceError("experts whose gate takes parts of a result")
    if node.name == "aten.slice":
        made[Value(number)] = whole[slice(*[*node.args[2:], None, None, None][:3])]
        return
    start = 0
    for output, meta in enumerate(node.outputs):
        assert meta is not None
        made[Value(number, output)] = whole[start : start + meta.shape[-1]]
        start += meta.shape[-1]
