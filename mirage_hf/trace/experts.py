"""The chosen experts of a mixture as one recorded node, and the program that it becomes.

While a step is recorded, transformers' "batched_mm" experts call the op `mirage_hf::experts` in
place of copying the weights of the chosen experts. Run as it is, the op runs stock's function.
Experts whose weights are codes run `run_decoded` instead, because their library may have to fetch
kernels.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from mirage_hf.errors import GraphError, Rejected
from mirage_hf.formats.coding import Coding, Stored, as_dtype, write_decoded
from mirage_hf.formats.experts import CodedStack, coded_experts, settings_of
from mirage_hf.graph import coded
from mirage_hf.graph.execute import run_kernel_graph
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
from mirage_hf.trace.torch_ops import SAME_TENSOR, elementwise_row

try:
    from transformers.integrations import moe
except ImportError:  # this version has no registry of experts
    moe = None
try:
    from transformers.integrations import finegrained_fp8
except ImportError:
    finegrained_fp8 = None

#: transformers' registry of experts, None in versions without one.
EXPERTS_FUNCTIONS: Any = getattr(moe, "ALL_EXPERTS_FUNCTIONS", None)
#: The one of experts in float8.
_FP8_FUNCTIONS: Any = getattr(finegrained_fp8, "ALL_FP8_EXPERTS_FUNCTIONS", None)
#: All that there are.
REGISTRIES = tuple(x for x in (EXPERTS_FUNCTIONS, _FP8_FUNCTIONS) if x is not None)

#: The op's name as nodes have it.
EXPERTS = "mirage_hf.experts"

#: The form of stock's experts that the op stands for.
_STOCK = "batched_mm"

#: The most tokens that kernels take. Of more tokens, many choose the same experts, so products of
#: all tokens of an expert read fewer bytes.
MOST_TOKENS = 16

#: Sums that a program of experts may end with: a residual, and a shared expert.
MOST_ADDED = 2

library.define(
    "mirage_hf::experts",
    "(Tensor x, Tensor index, Tensor weights, Tensor[] parameters, int number) -> Tensor",
)

_recording = threading.local()
_lock = threading.Lock()
_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_forms: weakref.WeakValueDictionary[int, ExpertsForm] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _run(x: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor], number: int) -> Any:
    module = _modules.get(number)
    was_active, _recording.active = getattr(_recording, "active", False), False
    try:
        form = _form_named(number, x.dtype)
        if isinstance(form, ExpertsForm) and (form.is_coded or module is None):
            return run_decoded(form, x, index, weights)
        assert module is not None, "the experts of a recorded step are gone"
        return EXPERTS_FUNCTIONS[_STOCK](module, x, index, weights)
    finally:
        _recording.active = was_active


library.impl("mirage_hf::experts", "CompositeExplicitAutograd", _run)


@library.register_fake("mirage_hf::experts")
def _fake(x: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor], number: int) -> Any:
    return torch.empty_like(x)


#: Runs the program that decodes a weight on its inputs.
Decoder = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear of each expert.

    Attributes:
        tensors: What holds its weights, for all experts: one tensor (experts, outputs, inputs), or
            those of a container.
        bias: Its biases (experts, outputs), None without any.
        rows: Its outputs.
        columns: Its inputs.
        is_transposed: Whether the tensor is (experts, inputs, outputs).
        coding: How the codes of one expert become its weight. None if the weights are plain.
    """

    tensors: tuple[Tensor, ...]
    bias: Tensor | None
    rows: int
    columns: int
    is_transposed: bool = False
    coding: Coding | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors that it reads."""
        return [*self.tensors] if self.bias is None else [*self.tensors, self.bias]

    def decoded(self, expert: int, decoders: Mapping[Coding, Decoder]) -> Tensor:
        """Return the weight of one expert (outputs, inputs).

        Args:
            expert: The number of the expert.
            decoders: Runs decoding programs. Others run op by op.
        """
        if self.coding is None:
            weight = self.tensors[0][expert]
            return weight.T if self.is_transposed else weight
        views = [_viewed(x, s)[expert] for x, s in zip(self.tensors, self.stacked, strict=True)]
        if self.coding in decoders:
            return decoders[self.coding](views)[0]
        graph = new_kernel_graph()
        _, weight = self.coding.write(graph)
        graph.mark_output(graph.permute(weight, (1, 0)))
        return run_kernel_graph(graph, views)[0]

    @property
    def stacked(self) -> list[Stored]:
        """The inputs of programs for all experts: those of the coding, after a dim of experts."""
        assert self.coding is not None
        stacks = []
        for stored, held in zip(self.coding.stored, self.tensors, strict=True):
            elements = held.stride(0) * held.element_size() * 8 // _bits_of(stored.dtype)
            dims, strides = (len(held), *stored.dims), (elements, *stored.strides)
            stacks.append(Stored(dims, strides, stored.dtype))
        return stacks


def _bits_of(dtype: torch.dtype) -> int:
    return 4 if coded.is_packed(dtype) else 8 * dtype.itemsize


def _viewed(x: Tensor, stored: Stored) -> Tensor:
    """Return a tensor of a container as a program reads it."""
    given = new_kernel_graph().new_input(stored.dims, stored.dtype, stored.strides)
    wanted = coded.storage(given)
    flat = x.detach().as_strided((x.numel(),), (1,)).view(wanted.dtype)
    return flat.as_strided(wanted.dims, wanted.strides)


@dataclass(frozen=True, eq=False)
class ExpertsForm:
    """What the experts of a module compute.

    Attributes:
        first: The first linear: gate and up, or up alone.
        second: The linear that follows the function.
        gate: The function between the two linears.
        scales_inputs: Whether the weights of a token's experts scale their inputs, and not their
            results.
    """

    first: Linear
    second: Linear
    gate: Callable[[Tensor], Tensor]
    scales_inputs: bool = False

    @property
    def is_coded(self) -> bool:
        """Whether the weights are codes."""
        return self.first.coding is not None

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors that the experts read."""
        return self.first.parameters + self.second.parameters


def number_of_form(form: ExpertsForm) -> int:
    """Return a number by which nodes name experts that no module has. The caller keeps them."""
    number = next(_numbers)
    _forms[number] = form
    return number


def _form_named(number: int, dtype: torch.dtype) -> ExpertsForm | Rejected:
    """Return the experts that a node names."""
    if number in _forms:
        return _forms[number]
    module = _modules.get(number)
    return _OTHER_FORM if module is None else form_of(module, dtype)


_OTHER_FORM = Rejected("experts whose weights are of another form")


def form_of(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> ExpertsForm | Rejected:
    """Return what the experts of a module compute, or why it is not known.

    Args:
        module: Any module.
        dtype: The dtype of the activations. Only experts in codes need it.
    """
    found = coded_experts(module, dtype)
    if isinstance(found, Rejected):
        return found
    if found is not None:
        return ExpertsForm(_of_codes(found.first), _of_codes(found.second), found.gate)
    settings = settings_of(module)
    if settings is None:
        return _OTHER_FORM
    linears = []
    for name in settings.names:
        names = (name, f"{name}_bias")[: 1 + settings.has_bias]
        held = [module._parameters.get(n) for n in names]
        if not all(map(_is_plain, held, (3, 2))):
            return _OTHER_FORM
        weight, *bias = held
        assert weight is not None
        is_transposed = settings.is_transposed
        rows, columns = reversed(weight.shape[1:]) if is_transposed else weight.shape[1:]
        linears.append(Linear((weight,), bias[0] if bias else None, rows, columns, is_transposed))
    gate: Any = module._apply_gate if settings.has_gate else module.act_fn
    return ExpertsForm(linears[0], linears[1], gate)


def _of_codes(stack: CodedStack) -> Linear:
    coding = stack.coding
    return Linear(stack.tensors, stack.bias, coding.rows, coding.columns, coding=coding)


def _is_plain(x: Any, dims: int) -> bool:
    """Return whether a parameter is plain weights of so many dims, stored row by row."""
    if type(x) is not nn.Parameter or x.dim() != dims or not x.is_contiguous():
        return False
    return x.dtype in COMPUTE_DTYPES


def run_decoded(
    form: ExpertsForm,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    decoders: Mapping[Coding, Decoder] = MappingProxyType({}),
) -> Tensor:
    """Compute the sum of the chosen experts of each token, times their weights.

    The weights of one expert at a time are decoded. While a CUDA graph is captured, no index can be
    read on the host, so every expert is decoded, and those that a token did not choose weigh 0.

    Args:
        form: The experts.
        x: (tokens, width).
        index: (tokens, chosen).
        weights: (tokens, chosen).
        decoders: Runs decoding programs, by coding. Others run op by op.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    experts = range(len(form.first.tensors[0]))
    for expert in experts if is_captured else index.unique().tolist():
        if expert not in experts:  # such as those of other ranks
            continue
        is_chosen = index == expert
        weight = (is_chosen * weights).sum(-1, keepdim=True)
        tokens: Any = slice(None) if is_captured else is_chosen.any(-1).nonzero()[:, 0]
        given = x[tokens]
        if form.scales_inputs:
            given = (given * weight[tokens]).to(x.dtype)
        y = form.gate(_applied(form.first, expert, given, decoders))
        y = _applied(form.second, expert, y.to(x.dtype), decoders)
        out[tokens] += (y if form.scales_inputs else y * weight[tokens]).float()
    return out.to(x.dtype)


def _applied(linear: Linear, expert: int, x: Tensor, decoders: Mapping[Coding, Decoder]) -> Tensor:
    y = F.linear(x, linear.decoded(expert, decoders))
    return y if linear.bias is None else y + linear.bias[expert]


def _one_node(stock: Any) -> Any:
    def experts(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Any:
        """Call the op while this thread records a step, else what was registered before."""
        node = as_node(module, x, index, weights)
        return stock(module, x, index, weights) if node is None else node

    return experts


def as_node(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Any:
    """Call the op if this thread records a step, and the experts have a known form. Else None."""
    if not getattr(_recording, "active", False) or x.dim() != 2:
        return None
    form = form_of(module, x.dtype)
    if isinstance(form, Rejected):
        return None
    number = _recording.numbers.setdefault(id(module), next(_numbers))
    _modules[number] = module
    return torch.ops.mirage_hf.experts(x, index, weights, form.parameters, number)


@contextmanager
def experts_as_one_node() -> Iterator[None]:
    """Let this thread's calls of "batched_mm" experts be one op each."""
    with _lock, ExitStack() as undos:  # one at a time, or functions would be put back in disorder
        for registry in REGISTRIES:
            own = registry._local_mapping
            if _STOCK in own:
                undos.callback(own.__setitem__, _STOCK, own[_STOCK])
            else:
                undos.callback(own.pop, _STOCK)
            own[_STOCK] = _one_node(registry[_STOCK])
        _recording.active, _recording.numbers = True, {}
        try:
            yield
        finally:
            _recording.active, _recording.numbers = False, {}


# -- programs --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part(Operand):
    """Some columns of a parameter of experts, as an input of a program. Nothing is copied.

    Attributes:
        dim: The dim of the columns.
        columns: Which they are.
        stored: How a program reads a tensor of a container. None for plain parameters.
    """

    dim: int = 0
    columns: slice = field(default_factory=lambda: slice(None))
    stored: Stored | None = None

    def of(self, x: Tensor) -> Tensor:
        """Return the program's input."""
        x = x if self.stored is None else _viewed(x, self.stored)
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
        form = _form_named(name, recording.meta(self.x).dtype)
        if not isinstance(form, ExpertsForm):
            raise TraceError("the experts are gone, or have other weights now")
        self.form = form
        self.held = {id(x): held for x, held in zip(form.parameters, self.parameters, strict=True)}
        self.rows, self.width = recording.meta(self.x).shape
        self.chosen = recording.meta(self.index).shape[-1]
        self.dtype = recording.meta(self.x).dtype

    def write(self) -> list[Region]:
        """Return the two programs as regions.

        Raises:
            GraphError: Its shapes or dtypes do not fit.
            TraceError: The function between the two linears is of another form.
        """
        between = Value(self.number, 1)  # a result that the recorded node does not have
        return [self._first_program(between), self._second_program(between)]

    def _begin(self) -> None:
        """Begin a program."""
        self.graph: KernelGraph = new_kernel_graph()
        self.inputs: list[Operand] = []
        self.e = self._given(self.index, (self.rows, self.chosen), torch.int64)

    def _first_program(self, between: Value) -> Region:
        self._begin()
        linear = self.form.first
        x = self._given(self.x, (self.rows, 1, 1, self.width), self.dtype)
        if self.form.scales_inputs:
            x = as_dtype(self.graph, self._weighed(x), self.dtype)
        h = gate(self.form, self.dtype, self.graph, self._first(x, linear))
        h = as_dtype(self.graph, h, self.dtype)
        self.graph.mark_output(h)
        return self._region((self.number,), between, h.dims, h.dims, linear)

    def _second_program(self, between: Value) -> Region:
        self._begin()
        graph, rows, meta, linear = self.graph, self.rows, self.recording.meta, self.form.second
        h = self._given(between, (rows, self.chosen, 1, linear.columns), self.dtype)
        y = self._with_bias(self._product(h, linear, slice(None)), linear, slice(None))
        out = graph.reduction(y if self.form.scales_inputs else self._weighed(y), 1)
        for _, other in self.added:
            addend = self._given(other, (rows, 1, 1, self.width), meta(other).dtype)
            out = graph.add(*self._alike(addend, out))
        graph.mark_output(as_dtype(graph, out, self.dtype))
        value = Value(self.added[-1][0]) if self.added else Value(self.number)
        nodes = (self.number, *(n for n, _ in self.added))
        shape = tuple(fixed_shape(meta(value)) or ())
        return self._region(nodes, value, (rows, self.width), shape, linear)

    def _weighed(self, x: DTensor) -> DTensor:
        """Return a tensor of each chosen expert times its weight."""
        dims, dtype = (self.rows, self.chosen, 1, 1), self.recording.meta(self.weights).dtype
        return self.graph.mul(*self._alike(x, self._given(self.weights, dims, dtype)))

    def _region(
        self,
        nodes: tuple[int, ...],
        value: Value,
        sizes: tuple[int, ...],
        shape: tuple[int, ...],
        linear: Linear,
    ) -> Region:
        result = Result(value, sizes, tuple(range(len(sizes))), sizes, sizes, shape)
        whole = sum(x.nbytes for x in linear.parameters)
        experts = len(linear.tensors[0])
        reads = whole * min(self.rows * self.chosen, experts) // experts
        return Region(None, nodes, self.graph, self.inputs, [result], reads=reads)

    def _first(self, x: DTensor, linear: Linear) -> Callable[[slice], DTensor]:
        """Return what gives some columns of the first linear's result."""
        return lambda part: self._with_bias(self._product(x, linear, part), linear, part)

    def _product(self, x: DTensor, linear: Linear, part: slice) -> DTensor:
        """Return products (rows, chosen, 1, outputs) with some outputs of the chosen weights."""
        if linear.coding is not None:
            weight = self._decoded(linear, linear.coding, part)
        else:
            dim = 2 if linear.is_transposed else 1
            weight = self._chosen(linear.tensors[0], dim, part)
        if not linear.is_transposed:
            weight = self.graph.permute(weight, (0, 1, 3, 2))
        return self.graph.matmul(x, weight)

    def _decoded(self, linear: Linear, coding: Coding, part: slice) -> DTensor:
        """Return some rows of the chosen weights, decoded after they are chosen.

        Raises:
            TraceError: These rows are not whole blocks of the codes.
        """
        rows = range(linear.rows)[part]
        tensors = {}
        for role, tensor, stored in zip(coding.roles, linear.tensors, linear.stacked, strict=True):
            block = linear.rows // stored.dims[1]
            blocks = slice(None)
            if stored.dims[1] > 1:
                if block > 1 and (rows.step != 1 or rows.start % block or len(rows) % block):
                    raise TraceError("experts whose gate takes parts of blocks of codes")
                blocks = slice(rows.start // block, -(-rows.stop // block), rows.step)
            tensors[role] = self._chosen(tensor, 1, blocks, stored, coding.computes)
        shape = (self.rows, self.chosen, len(rows), linear.columns)
        return write_decoded(coding, self.graph, tensors, shape)

    def _with_bias(self, y: DTensor, linear: Linear, part: slice) -> DTensor:
        if linear.bias is None:
            return y
        chosen = self._chosen(linear.bias, 1, part)
        bias = self.graph.reshape(chosen, (self.rows, self.chosen, 1, y.dims[-1]))
        return self.graph.add(*self._alike(y, bias))

    def _chosen(
        self,
        tensor: Tensor,
        dim: int,
        part: slice,
        stored: Stored | None = None,
        dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return the chosen experts' part of a parameter, codes as floats of a dtype."""
        held = self.held[id(tensor)]
        operand = Part(held, (), (), (), dim=dim, columns=part, stored=stored)
        if stored is None:
            given = operand.of(held.tensor.detach())
            x = self.graph.new_input(
                given.shape, given.dtype, strides=given.stride(), constant=True
            )
        else:
            dims, strides = [*stored.dims], [*stored.strides]
            dims[dim] = len(range(dims[dim])[part])
            strides[dim] *= part.step or 1
            x = self.graph.new_input(dims, stored.dtype, strides=strides, constant=True)
        self.inputs.append(operand)
        return self.graph.take(x if dtype is None else as_dtype(self.graph, x, dtype), self.e)

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
    form: ExpertsForm,
    dtype: torch.dtype,
    graph: KernelGraph,
    columns: Callable[[slice], DTensor],
) -> DTensor:
    """Write the function between the two linears of experts.

    Args:
        form: The experts.
        dtype: The dtype of the activations.
        graph: The program.
        columns: Gives columns of the first linear's result.

    Raises:
        TraceError: The function is of another form.
    """
    width = form.first.rows
    mode = FakeOnceMode()
    try:
        with mode:
            x = torch.empty(1, width, dtype=dtype, device=form.first.tensors[0].device)
        recording = record(lambda: form.gate(x), {"x": x}, mode)
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
