"""Kernel graphs: tensors in device memory and the ops among them. A tensor program and a found µGraph are both one.

Ops on a `KernelGraph` are its methods, one per row of the op table; `customized` runs a block graph as one kernel.
"""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mirage_hf import errors
from mirage_hf.graph.block import BlockGraph
from mirage_hf.ops import table

if TYPE_CHECKING:
    from mirage_hf.graph.builder import BlockGraphBuilder

_uids = itertools.count()


@dataclass(frozen=True)
class DTensor:
    """A tensor in device memory: `dims`, `dtype`, `name`, and a stride per dim in elements (row-major unless given).

    `constant`: an input that no other kernel of a captured CUDA graph writes, a weight. Kernels may read it before the kernels
    ahead of them are done.
    """

    index: int
    dims: tuple[int, ...]
    dtype: torch.dtype
    name: str
    strides: tuple[int, ...]
    graph_uid: int = field(compare=False, repr=False)
    constant: bool = False

    def __str__(self) -> str:
        return f"%{self.name}"


Operand = DTensor | float


@dataclass(frozen=True)
class KernelOp:
    """One op: its row's name, operands, outputs, and attributes (sorted pairs); `block` for "customized"."""

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[DTensor, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    block: BlockGraph | None = None


CUSTOMIZED = "customized"


def row_major(dims: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for d in reversed(dims):
        strides.append(step)
        step *= d
    return tuple(reversed(strides))


class KernelGraph:
    """A tensor program under construction. Every method that adds an op returns the tensor it makes.

    Errors: GraphError for shapes that do not fit (with both shapes and the way out), UnknownOpError, DTypeError.
    """

    def __init__(self) -> None:
        self._uid = next(_uids)
        self._tensors: list[DTensor] = []
        self._inputs: list[DTensor] = []
        self._ops: list[KernelOp] = []
        self._marked: list[DTensor] = []

    # -- building -------------------------------------------------------------------------------------------------------

    def new_input(
        self,
        dims: Sequence[int],
        dtype: torch.dtype | str = torch.float16,
        strides: Sequence[int] | None = None,
        name: str | None = None,
        *,
        constant: bool = False,
    ) -> DTensor:
        """Add an input of shape `dims`; `strides` in elements, row-major unless given ((1, k) reads an nn.Linear weight).

        dtype: torch's, or its name. name: an identifier of no other tensor of the graph; without it t0, t1 …
        constant: a weight, which nothing writes while kernels run; it is read early where a launch overlaps the one before.
        """
        if isinstance(dims, int):
            raise errors.GraphError(
                f"new_input: dims is the number {dims}; give a tuple, as dims=({dims},)"
            )
        dims = several(dims, "new_input", "dims")
        if (
            not dims
            or any(not isinstance(d, int) or isinstance(d, bool) or d < 1 for d in dims)
            or math.prod(dims) >= 1 << 63
        ):
            raise errors.GraphError(
                f"new_input: dims must be positive integers with a product below 2^63, got {errors.shape(dims)}"
            )
        strides = row_major(dims) if strides is None else several(strides, "new_input", "strides")
        if len(strides) != len(dims) or any(
            not isinstance(s, int) or isinstance(s, bool) or not 0 <= s < 1 << 63 for s in strides
        ):
            raise errors.GraphError(
                f"new_input: strides {errors.shape(strides)} must be one non-negative integer per dim of {errors.shape(dims)}"
            )
        tensor = self._tensor(dims, table.as_dtype(dtype), name, strides, bool(constant))
        self._inputs.append(tensor)
        return tensor

    def input_like(self, t: DTensor) -> DTensor:
        """Add an input like an input of another graph."""
        if not isinstance(t, DTensor):
            raise errors.GraphError(
                f"input_like: expected a tensor of a graph, got {type(t).__name__}"
            )
        return self.new_input(t.dims, t.dtype, t.strides, t.name, constant=t.constant)

    def mark_output(self, *tensors: DTensor) -> None:
        """Make tensors outputs, in this order. Without it, the tensors that nothing reads are the outputs."""
        self._marked += [self._own(t, "mark_output") for t in tensors]

    def customized(
        self,
        inputs: Sequence[DTensor],
        block_graph: BlockGraph | BlockGraphBuilder,
        names: Sequence[str | None] = (),
    ) -> list[DTensor]:
        """Run a block graph, found or written with `mirage_hf.new_block_graph`, as one kernel on `inputs`; returns its outputs,
        called `names` if given.

        Errors: GraphError when the operands do not fit.
        """
        inputs = tuple(self._own(t, CUSTOMIZED) for t in several(inputs, CUSTOMIZED, "inputs"))
        if not isinstance(block_graph, BlockGraph):
            if not hasattr(block_graph, "build"):
                raise errors.GraphError(
                    f"customized: expected a block graph, got {type(block_graph).__name__}; "
                    "make one with mi.new_block_graph"
                )
            block_graph = block_graph.build(inputs)
        for i in block_graph.inputs:
            for source, extent in zip(i.sources, i.sizes or (None,) * len(i.sources), strict=True):
                if not 0 <= source < len(inputs):
                    raise errors.GraphError(
                        f"customized: block input {i.name} reads operand {source}, there are {len(inputs)}"
                    )
                want = tuple(
                    1
                    if a is None
                    else extent
                    if a == i.joined and extent
                    else block_graph.extent(i, a)
                    for a in i.axes
                )
                if want != inputs[source].dims:
                    raise errors.GraphError(
                        f"customized: block input {i.name} wants {errors.shape(want)}, "
                        f"operand {source} is {errors.shape(inputs[source].dims)}"
                    )
                if i.bounds is not None and inputs[source].dtype != torch.int32:
                    raise errors.DTypeError(
                        f"customized: block input {i.name} holds bounds, which are int32; operand {source} is "
                        f"{table.dtype_name(inputs[source].dtype)}"
                    )
        if names and len(names) != len(block_graph.outputs):
            raise errors.GraphError(
                f"customized: {len(names)} names for {len(block_graph.outputs)} outputs; give one each, or none"
            )
        named = zip(block_graph.outputs, names or [None] * len(block_graph.outputs), strict=True)
        outputs = tuple(
            self._tensor(block_graph.output_dims(o), table.as_dtype(o.dtype), name)
            for o, name in named
        )
        self._ops.append(KernelOp(CUSTOMIZED, inputs, outputs, (), block_graph))
        return list(outputs)

    def matmul(self, a: DTensor, b: DTensor) -> DTensor:
        """The product of (… m k) and (… k n), which is (… m n); leading dims broadcast."""
        return self._apply("matmul", a, b)

    def reduction(self, x: DTensor, dim: int, kind: str = "sum") -> DTensor:
        """Reduce `dim` to size 1 by "sum", "mean" or "max"."""
        return self._apply("reduction", x, dim=dim, kind=kind)

    def rms_norm(self, x: DTensor, weight: DTensor | None = None, eps: float = 1e-6) -> DTensor:
        """x / sqrt(mean(x²) + eps) over the last dim, times `weight` (1, d). Statistics in float32, cast, then the weight."""
        return self._apply("rms_norm", x, *(() if weight is None else (weight,)), eps=eps)

    def layer_norm(
        self,
        x: DTensor,
        weight: DTensor | None = None,
        bias: DTensor | None = None,
        eps: float = 1e-6,
    ) -> DTensor:
        """(x − mean) / sqrt(var + eps) over the last dim, times `weight`, plus `bias`, each (1, d)."""
        if weight is None and bias is not None:
            raise errors.GraphError("layer_norm: a bias needs a weight; give a weight of ones")
        return self._apply("layer_norm", x, *(p for p in (weight, bias) if p is not None), eps=eps)

    def softmax(
        self, x: DTensor, dim: int = -1, lo: DTensor | None = None, hi: DTensor | None = None
    ) -> DTensor:
        """Softmax over `dim`; with int32 bounds (size 1 at `dim`) over lo ≤ index < hi: 0 elsewhere, and where there is none."""
        if (lo is None) != (hi is None):
            raise errors.GraphError("softmax: a bound lo needs a bound hi; give both or none")
        bounds = () if lo is None or hi is None else (lo, hi)
        return self._apply(
            "softmax", x, *bounds, dim=table.axis(dim, len(self._own(x, "softmax").dims), "softmax")
        )

    def within(self, x: DTensor, lo: DTensor, hi: DTensor, dim: int = -1) -> DTensor:
        """x where lo ≤ index along `dim` < hi, 0 elsewhere; lo and hi are int32, broadcast to x, and have size 1 at `dim`."""
        return self._apply(
            "within", x, lo, hi, dim=table.axis(dim, len(self._own(x, "within").dims), "within")
        )

    def concat(self, tensors: Sequence[DTensor], dim: int) -> DTensor:
        """Join tensors along `dim`."""
        tensors = several(tensors, "concat", "tensors")
        if not tensors:
            raise errors.GraphError("concat: needs at least one tensor")
        return self._apply(
            "concat",
            *tensors,
            dim=table.axis(dim, len(self._own(tensors[0], "concat").dims), "concat"),
        )

    def slice(self, x: DTensor, dim: int, start: int, stop: int) -> DTensor:
        """Elements [start, stop) of `dim`."""
        return self._apply("slice", x, dim=dim, start=start, stop=stop)

    def reshape(self, x: DTensor, dims: Sequence[int]) -> DTensor:
        """The same elements in row-major order under other dims."""
        return self._apply("reshape", x, dims=several(dims, "reshape", "dims"))

    def permute(self, x: DTensor, order: Sequence[int]) -> DTensor:
        """Dims in another order; no data moves."""
        rank = len(self._own(x, "permute").dims)
        return self._apply(
            "permute",
            x,
            order=tuple(table.axis(o, rank, "permute") for o in several(order, "permute", "order")),
        )

    def rope(self, x: DTensor, cos: DTensor, sin: DTensor, interleaved: bool = False) -> DTensor:
        """Rotary position embedding: x · cos + partner(x) · sin on the first r elements of the last dim; those behind stay.

        cos, sin: (… r), of one shape that broadcasts to x, r even. The partner of element i is −x[i + r/2] in the first half and
        x[i − r/2] in the second; with `interleaved`, −x[i + 1] for even and x[i − 1] for odd i.
        """
        return self._apply("rope", x, cos, sin, interleaved=interleaved)

    def cast(self, x: DTensor, dtype: torch.dtype | str) -> DTensor:
        """Convert to another dtype."""
        return self._apply("cast", x, dtype=table.dtype_name(table.as_dtype(dtype)))

    def cache_append(self, cache: DTensor, new: DTensor, position: DTensor) -> DTensor:
        """Write rows `new` (b … t d) at slots position… of `cache` (b … s d), in place; returns the new version of the cache.

        `position`: (1,), or one for each b, as (b,) or (b, 1, …), so that it can be a bound too: where `cache` is read within bounds
        that end at `position` only, the kernel that computes the rows writes them. In a CUDA graph the launch right ahead of such a
        program's kernel must not write `position` or bounds: they are read before that one is done.
        """
        return self._apply("cache_append", cache, new, position)

    def __getattr__(self, name: str) -> Callable[..., DTensor]:
        """The elementwise ops (add, mul, exp, silu …) are methods by their names in the table: see `table.add_methods`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._apply, table.lookup(name).name)  # a row of later

    def _apply(self, name: str, *operands: Operand, **attrs: Any) -> DTensor:
        return self.apply(name, operands, attrs)

    def apply(
        self,
        name: str,
        operands: Sequence[Operand],
        attrs: dict[str, Any],
        out_name: str | None = None,
    ) -> DTensor:
        """Add the op called `name` in the table; its result is called `out_name` if given."""
        row = table.lookup(name)
        low, high = row.arity
        if not low <= len(operands) <= high:
            count = low if low == high else f"{low} to {high}"
            named = (
                f"; give {', '.join(row.attrs)} by name, as {next(iter(row.attrs))}=…"
                if row.attrs and len(operands) > high
                else ""
            )
            raise errors.GraphError(
                f"{name}: takes {count} operand{'s' * (high != 1)} ({row.signature}), got {len(operands)}{named}"
            )
        table.check_attrs(name, attrs)
        attrs = row.attrs | attrs
        operands = tuple(
            self._own(x, name) if isinstance(x, DTensor) else number(x, name) for x in operands
        )
        tensors = [x for x in operands if isinstance(x, DTensor)]
        if not tensors or (len(tensors) < len(operands) and row.kind != "elementwise"):
            raise errors.GraphError(
                f"{name}: needs tensors of this graph, got {operands!r}; "
                "elementwise ops take numbers too, beside a tensor"
            )
        given = _dtype_of(row, operands)
        shapes = [x.dims if isinstance(x, DTensor) else () for x in operands]
        try:
            dims = row.infer(*shapes, **attrs)
        except errors.GraphError as e:
            if (
                name == "matmul"
                and len(shapes[0]) > 1
                and len(shapes[1]) > 1
                and shapes[0][-1] != shapes[1][-2]
            ):
                raise errors.inner_sizes_differ(
                    tensors[0].name, shapes[0], tensors[1].name, shapes[1]
                ) from None
            raise e
        dtype = row.out_dtype(given, **attrs) if row.out_dtype else given
        out = self._tensor(dims, dtype, out_name)
        self._ops.append(KernelOp(name, operands, (out,), tuple(sorted(attrs.items()))))
        return out

    def op_like(
        self, op: KernelOp, operands: Sequence[Operand], names: Sequence[str | None] = ()
    ) -> list[DTensor]:
        """Add an op like one of another graph on `operands`; returns its outputs, called `names` if given."""
        if op.block is not None:
            return self.customized(operands, op.block, names)  # type: ignore[arg-type]
        return [self.apply(op.name, operands, dict(op.attrs), *names)]

    def _tensor(
        self,
        dims: tuple[int, ...],
        dtype: torch.dtype,
        name: str | None,
        strides: tuple[int, ...] | None = None,
        constant: bool = False,
    ) -> DTensor:
        index = len(self._tensors)
        taken = {t.name for t in self._tensors}
        if name is None:
            name = next(
                n for n in (f"t{index}" + "_" * i for i in itertools.count()) if n not in taken
            )
        elif (
            not isinstance(name, str)
            or name in taken
            or not name.isidentifier()
            or unicodedata.normalize("NFKC", name) != name
        ):
            # Python reads identifiers in that form, so in generated files two names could be one
            raise errors.GraphError(
                f"tensor name {name!r} is taken or not an identifier (of NFKC form); choose another"
            )
        t = DTensor(
            index,
            dims,
            dtype,
            name,
            row_major(dims) if strides is None else strides,
            self._uid,
            constant,
        )
        self._tensors.append(t)
        return t

    def _own(self, t: Any, where: str) -> DTensor:
        if not isinstance(t, DTensor):
            raise errors.GraphError(
                f"{where}: expected a tensor of this graph, got {type(t).__name__}; make one with graph.new_input"
            )
        if t.graph_uid != self._uid:
            raise errors.GraphError(
                f"{where}: tensor {t} belongs to another graph; build the whole program in one graph"
            )
        return t

    # -- reading --------------------------------------------------------------------------------------------------------

    def copy(self) -> KernelGraph:
        """An equal graph of the same tensors: ops that are added to one are not in the other."""
        graph = KernelGraph()
        graph._uid, graph._tensors, graph._inputs, graph._ops, graph._marked = (
            self._uid,
            [*self._tensors],
            [*self._inputs],
            [*self._ops],
            [*self._marked],
        )
        return graph

    @property
    def inputs(self) -> tuple[DTensor, ...]:
        """The inputs, in the order in which they were added; calls take their tensors in it."""
        return tuple(self._inputs)

    @property
    def ops(self) -> tuple[KernelOp, ...]:
        """The ops, in the order in which they were added."""
        return tuple(self._ops)

    @property
    def outputs(self) -> tuple[DTensor, ...]:
        """What was marked as output, in that order; where nothing was, the tensors that no op reads."""
        if self._marked:
            return tuple(self._marked)
        read = {x.index for op in self._ops for x in op.inputs if isinstance(x, DTensor)}
        return tuple(o for op in self._ops for o in op.outputs if o.index not in read)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KernelGraph):
            return NotImplemented
        return (self._inputs, self._ops, self.outputs) == (
            other._inputs,
            other._ops,
            other.outputs,
        )

    __hash__ = object.__hash__

    def __str__(self) -> str:
        from mirage_hf.graph import text

        return text.format_graph(self)

    def __repr__(self) -> str:
        return f"<KernelGraph: {len(self._inputs)} inputs, {len(self._ops)} ops, {len(self.outputs)} outputs>"

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the graph as JSON, and write it to `path` if given."""
        from mirage_hf.graph import json_format

        return json_format.save_json(json_format.graph_to_dict(self), path)

    def superoptimize(self, config: str | None = None, **options: Any) -> Any:
        """Search for faster kernels: see `mirage_hf.superoptimize`."""
        from mirage_hf.pipeline.superoptimizer import superoptimize

        return superoptimize(self, config=config, **options)


table.add_methods(KernelGraph, "_apply")


def ragged(name: str, operands: Sequence[Operand]) -> tuple[DTensor, ...]:
    """The bounds among the operands of an op of the table: lo and hi, or none."""
    has = table.lookup(name).kind == "bounds" or name == "softmax"
    return tuple(x for x in operands[1:3] if isinstance(x, DTensor)) if has else ()


def _dtype_of(row: table.Op, operands: Sequence[Operand]) -> torch.dtype:
    """The one dtype that an op of the table computes in, or moves. Errors: DTypeError where there are several, or one it cannot have."""
    tensors, bounds = [x for x in operands if isinstance(x, DTensor)], ragged(row.name, operands)
    for t in bounds:
        if t.dtype != torch.int32:
            raise errors.DTypeError(
                f"{row.name}: bound {t.name} is {table.dtype_name(t.dtype)}; bounds are int32"
            )
    floats = {t.dtype for t in tensors if t.dtype in table.COMPUTE_DTYPES}
    if row.kind == "effect":
        if tensors[2].dtype in table.COMPUTE_DTYPES:
            raise errors.DTypeError(
                f"{row.name}: position {tensors[2].name} is {table.dtype_name(tensors[2].dtype)}; positions are int32"
            )
        dtypes = {t.dtype for t in tensors[:2]}
    elif row.name == "cast" or (row.kind == "layout" and row.name != "rope"):
        dtypes = floats or {t.dtype for t in tensors}
    else:
        whole = next((t for t in tensors if t.dtype not in floats and t not in bounds), None)
        if whole is not None and not (floats and row.kind == "elementwise"):
            raise errors.DTypeError(
                f"{row.name}: {whole.name} is {table.dtype_name(whole.dtype)}, and ops compute with floating-point "
                "numbers; convert it with graph.cast"
            )
        dtypes = floats
    if len(dtypes) > 1:
        found = ", ".join(sorted(map(table.dtype_name, dtypes)))
        raise errors.DTypeError(
            f"{row.name}: operands have dtypes {found}; bring them to one with graph.cast"
        )
    return dtypes.pop()


def several(x: Any, where: str, what: str) -> tuple[Any, ...]:
    """`x` as a tuple. Errors: GraphError where it is none and no list."""
    try:
        return tuple(x)
    except TypeError:
        raise errors.GraphError(f"{where}: {what} must be a tuple or list, it is {x}") from None


def number(x: Any, where: str) -> float:
    if isinstance(x, bool) or not isinstance(x, Real):
        raise errors.GraphError(
            f"{where}: expected a tensor of this graph or a number, got {type(x).__name__}"
        )
    try:
        number = float(x)
    except OverflowError:
        raise errors.GraphError(f"{where}: the number does not fit in a float64") from None
    if math.isnan(number):
        raise errors.GraphError(f"{where}: the number is NaN")
    return number


def new_kernel_graph() -> KernelGraph:
    """Return an empty tensor program."""
    return KernelGraph()


def inline(graph: KernelGraph, part: KernelGraph, tensors: Sequence[DTensor]) -> list[DTensor]:
    """Add the ops of `part` to `graph`, reading `tensors` for its inputs; returns what stands for its outputs.

    Names that somebody gave are kept, with an underscore where they are taken; others are made anew. Block graphs stay as they are.
    Errors: GraphError when `tensors` do not fit the inputs of `part`.
    """
    if [(t.dims, t.dtype) for t in tensors] != [(t.dims, t.dtype) for t in part.inputs]:
        given, wanted = (
            ", ".join(f"{table.dtype_name(t.dtype)} {errors.shape(t.dims)}" for t in ts)
            for ts in (tensors, part.inputs)
        )
        raise errors.GraphError(
            f"inline: the graph reads {wanted or 'nothing'}, it was given {given or 'nothing'}; "
            "give a tensor like each of its inputs, in their order"
        )

    def named(op: KernelOp, operands: Sequence[Operand]) -> list[DTensor]:
        taken = {t.name for t in graph._tensors}
        names: list[str | None] = []
        for t in op.outputs:
            name = None if t.name.rstrip("_") == f"t{t.index}" else t.name
            while name is not None and name in taken:
                name += "_"
            names.append(name)
            taken |= {name} if name is not None else set()
        return graph.op_like(op, operands, names)

    return rebuilt(part, tensors, named)


def rebuilt(
    graph: KernelGraph,
    inputs: Sequence[DTensor],
    again: Callable[[KernelOp, list[Operand]], Sequence[DTensor]],
) -> list[DTensor]:
    """What stands for the outputs of `graph` when every op is made again, in order: by `again`, which is given the op and, for its
    operands, what stands for them; for the inputs of `graph` that are `inputs`."""
    new = {t.index: x for t, x in zip(graph.inputs, inputs, strict=True)}
    for op in graph.ops:
        made = again(op, [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs])
        new |= {t.index: x for t, x in zip(op.outputs, made, strict=True)}
    return [new[t.index] for t in graph.outputs]
