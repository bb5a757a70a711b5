"""Kernel graphs: tensors in device memory and the ops among them.

A tensor program and the kernels that were found for it are both kernel graphs. The ops of the op
table are methods of `KernelGraph`. The method `customized` runs a block graph as one kernel.
"""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from mirage_hf import errors
from mirage_hf.graph import conveniences
from mirage_hf.graph.block import BlockGraph
from mirage_hf.graph.coded import is_packed, word_dims
from mirage_hf.graph.json_files import save_json
from mirage_hf.graph.json_writer import graph_to_dict
from mirage_hf.graph.operands import (
    check_arity,
    check_block_operands,
    computed_dtype,
    number,
    result_dims,
    several,
)
from mirage_hf.graph.printing import format_graph
from mirage_hf.graph.tensors import CUSTOMIZED, DTensor, KernelOp, Operand, row_major
from mirage_hf.ops import table

__all__ = [
    "CUSTOMIZED",
    "DTensor",
    "KernelGraph",
    "KernelOp",
    "Operand",
    "new_kernel_graph",
    "row_major",
]

_uids = itertools.count()


class BuildsBlockGraph(Protocol):
    """A block graph under construction, as `mirage_hf.new_block_graph` makes it."""

    def build(self, operands: Sequence[DTensor] | None = None) -> BlockGraph:
        """Return the block graph whose sources are positions in `operands`."""


class KernelGraph:
    """A tensor program under construction.

    Every method that adds an op returns the tensor that it makes. Elementwise ops of the table are
    methods too: `g.add(x, y)`, `g.exp(x)`. Tensors that nothing reads are the outputs, unless
    `mark_output` names them.

    Example:
        ```python
        g = mirage_hf.new_graph()
        x = g.new_input((16, 4096))
        w = g.new_input((4096, 1024), constant=True)
        g.mark_output(g.matmul(g.rms_norm(x), w))
        result = g.superoptimize()
        ```

    Raises:
        GraphError: If shapes do not fit. The message names both shapes and says what would fit.
        UnknownOpError: If the op table has no such op.
        DTypeError: If dtypes differ or are not supported.
    """

    def __init__(self) -> None:
        self._uid = next(_uids)
        self._tensors: list[DTensor] = []
        self._inputs: list[DTensor] = []
        self._ops: list[KernelOp] = []
        self._marked: list[DTensor] = []
        self._last_uses: tuple[tuple[int, ...], ...] = ()

    # -- inputs and outputs ------------------------------------------------------------------------

    def new_input(
        self,
        dims: Sequence[int],
        dtype: torch.dtype | str = torch.float16,
        strides: Sequence[int] | None = None,
        name: str | None = None,
        *,
        constant: bool = False,
    ) -> DTensor:
        """Add an input.

        Args:
            dims: Its shape.
            dtype: Its dtype, as torch's or by name. uint4, int4, uint8, int8, float8_e4m3fn and
                float8_e8m0fnu are codes, which `cast` reads. Codes of 4 bits are given as an
                int32 tensor with eight codes in each word along the dims of strides below 8, the
                first code in the lowest bits. A dim of two codes of stride −1 has its first code
                in the high half of each byte. float8_e8m0fnu is given as a uint8 tensor.
            strides: A stride per dim in elements. None: row-major. (1, k) reads the weight of an
                nn.Linear.
            name: An identifier that no other tensor of the graph has. None: t0, t1, …
            constant: True for a weight, which nothing writes while kernels run. So, if launches
                overlap, a kernel may read it before the previous kernel is done.
        """
        if isinstance(dims, int):
            raise errors.GraphError(
                f"new_input: dims is the number {dims}; give a tuple, as dims=({dims},)"
            )
        dims = several(dims, "new_input", "dims")
        positive = all(isinstance(d, int) and not isinstance(d, bool) and d > 0 for d in dims)
        if not dims or not positive or math.prod(dims) >= 1 << 63:
            raise errors.GraphError(
                "new_input: dims must be positive integers with a product below 2^63, "
                f"got {errors.shape(dims)}"
            )
        dtype = table.as_dtype(dtype)
        least = -1 if is_packed(dtype) else 0
        strides = row_major(dims) if strides is None else several(strides, "new_input", "strides")
        if len(strides) != len(dims) or not all(_is_stride(s, least) for s in strides):
            raise errors.GraphError(
                f"new_input: strides {errors.shape(strides)} must be one non-negative integer "
                f"per dim of {errors.shape(dims)}"
            )
        if is_packed(dtype):
            word_dims(dims, strides)
        tensor = self._tensor(dims, dtype, name, strides, bool(constant))
        self._inputs.append(tensor)
        return tensor

    def input_like(self, t: DTensor) -> DTensor:
        """Add an input like `t`, an input of another graph."""
        if not isinstance(t, DTensor):
            raise errors.GraphError(
                f"input_like: expected a tensor of a graph, got {type(t).__name__}"
            )
        return self.new_input(t.dims, t.dtype, t.strides, t.name, constant=t.constant)

    def mark_output(self, *tensors: DTensor) -> None:
        """Make tensors outputs, in this order."""
        self._marked += [self._own(t, "mark_output") for t in tensors]
        self._last_uses = ()

    # -- ops ---------------------------------------------------------------------------------------

    def customized(
        self,
        inputs: Sequence[DTensor],
        block_graph: BlockGraph | BuildsBlockGraph,
        names: Sequence[str | None] = (),
    ) -> list[DTensor]:
        """Run a block graph as one kernel.

        Args:
            inputs: Its operands.
            block_graph: A block graph, or one under construction (`mirage_hf.new_block_graph`).
            names: Names of the outputs. Empty: names are made.

        Returns:
            Its outputs.

        Raises:
            GraphError: If the operands do not fit.
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
            check_block_operands(block_graph, i, inputs)
        count = len(block_graph.outputs)
        if names and len(names) != count:
            raise errors.GraphError(
                f"customized: {len(names)} names for {count} outputs; give one each, or none"
            )
        outputs = tuple(
            self._tensor(block_graph.output_dims(o), table.as_dtype(o.dtype), name)
            for o, name in zip(block_graph.outputs, names or [None] * count, strict=True)
        )
        self._ops.append(KernelOp(CUSTOMIZED, inputs, outputs, (), block_graph))
        return list(outputs)

    def matmul(self, a: DTensor, b: DTensor) -> DTensor:
        """Multiply (… m k) by (… k n), which gives (… m n). Leading dims broadcast."""
        return self._apply("matmul", a, b)

    def reduction(self, x: DTensor, dim: int, kind: str = "sum") -> DTensor:
        """Reduce `dim` to size 1 by "sum", "mean" or "max"."""
        return self._apply("reduction", x, dim=dim, kind=kind)

    def rms_norm(self, x: DTensor, weight: DTensor | None = None, eps: float = 1e-6) -> DTensor:
        """Compute x / sqrt(mean(x²) + eps) over the last dim, times `weight` (1, d).

        Statistics are in float32 and cast to x's dtype before the weight.
        """
        return self._apply("rms_norm", x, *(() if weight is None else (weight,)), eps=eps)

    def layer_norm(
        self,
        x: DTensor,
        weight: DTensor | None = None,
        bias: DTensor | None = None,
        eps: float = 1e-6,
    ) -> DTensor:
        """Compute (x − mean) / sqrt(var + eps) over the last dim, times `weight`, plus `bias`.

        Weight and bias are (1, d).
        """
        if weight is None and bias is not None:
            raise errors.GraphError("layer_norm: a bias needs a weight; give a weight of ones")
        return self._apply("layer_norm", x, *(p for p in (weight, bias) if p is not None), eps=eps)

    def softmax(
        self, x: DTensor, dim: int = -1, lo: DTensor | None = None, hi: DTensor | None = None
    ) -> DTensor:
        """Compute softmax over `dim`, or only over its elements lo ≤ index < hi.

        The bounds are int32 and have size 1 at `dim`. The result is 0 outside the bounds. A row
        without an element inside the bounds is all 0.
        """
        if (lo is None) != (hi is None):
            raise errors.GraphError("softmax: a bound lo needs a bound hi; give both or none")
        bounds = () if lo is None or hi is None else (lo, hi)
        return self._apply("softmax", x, *bounds, dim=self._dim(x, dim, "softmax"))

    def within(self, x: DTensor, lo: DTensor, hi: DTensor, dim: int = -1) -> DTensor:
        """Return x where lo ≤ index along `dim` < hi, 0 elsewhere.

        lo and hi are int32, broadcast to x, and have size 1 at `dim`.
        """
        return self._apply("within", x, lo, hi, dim=self._dim(x, dim, "within"))

    def concat(self, tensors: Sequence[DTensor], dim: int) -> DTensor:
        """Join tensors along `dim`."""
        tensors = several(tensors, "concat", "tensors")
        if not tensors:
            raise errors.GraphError("concat: needs at least one tensor")
        return self._apply("concat", *tensors, dim=self._dim(tensors[0], dim, "concat"))

    def slice(self, x: DTensor, dim: int, start: int, stop: int) -> DTensor:
        """Return elements [start, stop) of `dim`."""
        return self._apply("slice", x, dim=dim, start=start, stop=stop)

    def reshape(self, x: DTensor, dims: Sequence[int]) -> DTensor:
        """Return the same elements, in row-major order, under other dims."""
        return self._apply("reshape", x, dims=several(dims, "reshape", "dims"))

    def permute(self, x: DTensor, order: Sequence[int]) -> DTensor:
        """Return x with its dims in another order. No data moves."""
        order = several(order, "permute", "order")
        return self._apply("permute", x, order=tuple(self._dim(x, d, "permute") for d in order))

    def take(self, x: DTensor, index: DTensor, dim: int = 0) -> DTensor:
        """Return the elements of `x` that an index chooses along `dim`.

        The index's dims replace `dim`: with x (experts, n, k) and an index (tokens, chosen), the
        result is (tokens, chosen, n, k). Generated kernels copy nothing, they read `x` at an
        offset.

        Args:
            x: The tensor.
            index: Whole numbers from 0 to the size of `dim` − 1, as int32 or int64. On a GPU,
                nothing is read for a number outside of that range. On a CPU it is an error.
            dim: The dim of `x`.
        """
        return self._apply("take", x, index, dim=self._dim(x, dim, "take"))

    def rope(self, x: DTensor, cos: DTensor, sin: DTensor, interleaved: bool = False) -> DTensor:
        """Apply rotary position embedding: x · cos + partner(x) · sin.

        The first r elements of the last dim are rotated. Later ones stay as they are.

        Args:
            x: (… d).
            cos: (… r), of a shape that broadcasts to x, r even.
            sin: Like cos.
            interleaved: Which element is the partner. If False, the partner of element i is
                −x[i + r/2] in the first half and x[i − r/2] in the second. If True, it is −x[i + 1]
                for even i and x[i − 1] for odd i.
        """
        return self._apply("rope", x, cos, sin, interleaved=interleaved)

    def cast(self, x: DTensor, dtype: torch.dtype | str) -> DTensor:
        """Convert to another dtype."""
        return self._apply("cast", x, dtype=table.dtype_name(table.as_dtype(dtype)))

    def cache_append(self, cache: DTensor, new: DTensor, position: DTensor) -> DTensor:
        """Write the rows `new` (b … t d) into `cache` (b … s d) in place, from slot `position` on.

        If `cache` is read only within bounds that end at `position`, the kernel that computes the
        rows also writes them to the cache. In a CUDA graph, kernels of such a program read
        `position` and the bounds early, before the previous launch is done. So the launch right
        before must not write `position` or the bounds.

        Args:
            cache: The cache.
            new: The rows.
            position: The first slot to write, as (1,). Or one slot per b, as (b,) or (b, 1, …), so
                that it can be a bound too.

        Returns:
            The new version of the cache.
        """
        return self._apply("cache_append", cache, new, position)

    def __getattr__(self, name: str) -> Callable[..., DTensor]:
        """Return the method of an elementwise op that was registered after this class was made.

        The elementwise ops (add, mul, exp, silu, …) are methods by their names in the table: see
        `table.add_methods`.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._apply, table.lookup(name).name)

    def _apply(self, name: str, *operands: Operand, **attrs: Any) -> DTensor:
        return self.apply(name, operands, attrs)

    def apply(
        self,
        name: str,
        operands: Sequence[Operand],
        attrs: dict[str, Any],
        out_name: str | None = None,
    ) -> DTensor:
        """Add the op called `name` in the table.

        Args:
            name: The op.
            operands: Tensors of this graph, and numbers for elementwise ops.
            attrs: Attributes by name.
            out_name: The name of the result. None: one is made.
        """
        entry = table.lookup(name)
        check_arity(entry, len(operands))
        table.check_attrs(name, attrs)
        attrs = entry.attrs | attrs
        operands = tuple(
            self._own(x, name) if isinstance(x, DTensor) else number(x, name) for x in operands
        )
        tensors = [x for x in operands if isinstance(x, DTensor)]
        if not tensors or (len(tensors) < len(operands) and entry.kind != "elementwise"):
            raise errors.GraphError(
                f"{name}: needs tensors of this graph, got {operands!r}; "
                "elementwise ops also take numbers, if one operand is a tensor"
            )
        dtype = computed_dtype(entry, operands)
        if entry.out_dtype:
            dtype = entry.out_dtype(dtype, **attrs)
        if dtype in table.CODE_DTYPES:
            raise errors.DTypeError(
                f"{name}: only inputs hold codes ({table.dtype_name(dtype)}); ops compute in "
                "float16, bfloat16 or float32"
            )
        out = self._tensor(result_dims(entry, operands, attrs), dtype, out_name)
        self._ops.append(KernelOp(name, operands, (out,), tuple(sorted(attrs.items()))))
        return out

    def op_like(
        self, op: KernelOp, operands: Sequence[Operand], names: Sequence[str | None] = ()
    ) -> list[DTensor]:
        """Add an op like one of another graph.

        Args:
            op: The other graph's op.
            operands: The operands of the new op.
            names: Names of its outputs. Empty: names are made.

        Returns:
            Its outputs.
        """
        if op.block is not None:
            return self.customized(operands, op.block, names)  # type: ignore[arg-type]
        return [self.apply(op.name, operands, dict(op.attrs), *names)]

    # -- tensors -----------------------------------------------------------------------------------

    def _tensor(
        self,
        dims: tuple[int, ...],
        dtype: torch.dtype,
        name: str | None,
        strides: tuple[int, ...] | None = None,
        constant: bool = False,
    ) -> DTensor:
        index = len(self._tensors)
        taken = self.names
        if name is None:
            names = (f"t{index}" + "_" * i for i in itertools.count())
            name = next(n for n in names if n not in taken)
        elif name in taken or not _is_identifier(name):
            raise errors.GraphError(
                f"tensor name {name!r} is taken or not an identifier (of NFKC form); choose another"
            )
        strides = row_major(dims) if strides is None else strides
        if math.prod(dims) * dtype.itemsize >= 1 << 63:
            raise errors.GraphError(
                f"tensor {name} of {errors.shape(dims)} has 2^63 bytes or more; make its dims less"
            )
        t = DTensor(index, dims, dtype, name, strides, self._uid, constant)
        self._tensors.append(t)
        return t

    def _own(self, t: Any, where: str) -> DTensor:
        """Return `t`, a tensor of this graph."""
        if not isinstance(t, DTensor):
            raise errors.GraphError(
                f"{where}: expected a tensor of this graph, got {type(t).__name__}; "
                "make one with graph.new_input"
            )
        if t.graph_uid != self._uid:
            raise errors.GraphError(
                f"{where}: tensor {t} belongs to another graph; "
                "build the whole program in one graph"
            )
        return t

    def _dim(self, x: Any, dim: int, where: str) -> int:
        """Return a dim of `x`, counted from the left."""
        return table.axis(dim, len(self._own(x, where).dims), where)

    # -- reading -----------------------------------------------------------------------------------

    def copy(self) -> KernelGraph:
        """Return an equal graph with the same tensors. Ops added to one are not in the other."""
        graph = KernelGraph()
        graph._uid = self._uid
        graph._tensors = [*self._tensors]
        graph._inputs = [*self._inputs]
        graph._ops = [*self._ops]
        graph._marked = [*self._marked]
        return graph

    @property
    def inputs(self) -> tuple[DTensor, ...]:
        """The inputs, in the order in which they were added. Calls take tensors in this order."""
        return tuple(self._inputs)

    @property
    def ops(self) -> tuple[KernelOp, ...]:
        """The ops, in the order in which they were added."""
        return tuple(self._ops)

    @property
    def outputs(self) -> tuple[DTensor, ...]:
        """The tensors that were marked as outputs, or else the tensors that no op reads."""
        if self._marked:
            return tuple(self._marked)
        read = {x.index for op in self._ops for x in op.inputs if isinstance(x, DTensor)}
        return tuple(o for op in self._ops for o in op.outputs if o.index not in read)

    @property
    def last_uses(self) -> tuple[tuple[int, ...], ...]:
        """For each op the indices of the tensors that nothing uses after it, except outputs."""
        if len(self._last_uses) != len(self._ops):
            last = {t.index: n for n, op in enumerate(self._ops) for t in _tensors(op)}
            for t in self.outputs:
                last.pop(t.index, None)
            ended: list[list[int]] = [[] for _ in self._ops]
            for index, number in last.items():
                ended[number].append(index)
            self._last_uses = tuple(map(tuple, ended))
        return self._last_uses

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return {t.name for t in self._tensors}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KernelGraph):
            return NotImplemented
        ours = self._inputs, self._ops, self.outputs
        return ours == (other._inputs, other._ops, other.outputs)

    __hash__ = object.__hash__

    def __str__(self) -> str:
        return format_graph(self)

    def __repr__(self) -> str:
        return (
            f"<KernelGraph: {len(self._inputs)} inputs, {len(self._ops)} ops, "
            f"{len(self.outputs)} outputs>"
        )

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the graph as JSON, and write it to `path` if given. `load_graph` reads it."""
        return save_json(graph_to_dict(self), path)

    def superoptimize(self, config: str | None = None, **options: Any) -> Any:
        """Search for faster kernels: see `mirage_hf.superoptimize`."""
        return conveniences.superoptimize(self, config=config, **options)


table.add_methods(KernelGraph, "_apply")


def new_kernel_graph() -> KernelGraph:
    """Return an empty tensor program."""
    return KernelGraph()


def _tensors(op: KernelOp) -> list[DTensor]:
    return [x for x in (*op.inputs, *op.outputs) if isinstance(x, DTensor)]


# -- checks ----------------------------------------------------------------------------------------


def _is_stride(s: Any, least: int) -> bool:
    return isinstance(s, int) and not isinstance(s, bool) and least <= s < 1 << 63


def _is_identifier(name: Any) -> bool:
    # Python normalizes identifiers to NFKC, so two names in other forms could become the same in a
    # generated file.
    return (
        isinstance(name, str)
        and name.isidentifier()
        and unicodedata.normalize("NFKC", name) == name
    )
