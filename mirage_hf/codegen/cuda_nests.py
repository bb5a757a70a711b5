"""Write nests: loops of all threads of a block that stage a value's tile or store it.

Values that a reduction reads repeatedly are staged in shared memory. Everything else is computed in
float where it is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from mirage_hf.codegen.cuda_math import FLOAT, TYPES
from mirage_hf.graph.block import Axis, BlockGraph, BlockInput, BlockOutput, Role

_RESERVED = frozenset(
    """
    alignas and asm auto bool break case catch char class const continue default delete do
    double else enum explicit export extern false float for friend goto if inline int long
    mutable namespace new not operator or private protected public register return short
    signed sizeof static struct switch template this throw true try typedef union unsigned
    using virtual void volatile while xor half uint4 threads tid block memory shared partial
    run load load_constant load_plain next q u to_float from_float maximum minimum join_lanes Sum Max Shared e r v g x_ min
    copy bits_of INFINITY wait_for_previous_kernel launch_next_kernel expf sqrtf rsqrtf tanhf erff
    log1pf powf logf fmaf floorf
    max exp sqrt tanh erf log1p pow cg cluster cluster_blocks rank joined old grown
    """.split()
)


#: Names that a kernel gives to coordinates, constants and pointers.
_OURS = re.compile(
    r"(i_|at_|j_)|.*(_size|_tile|_0|_begin|_end|_count|_top|_scale|_at|_ptr\d*|_out\d*|_acc|_v|_ahead)$"
)


#: The most elements that a thread computes from one read of an input.
MOST_ROWS = 8


@dataclass(frozen=True)
class Operand:
    """A tensor as a kernel sees it.

    Attributes:
        dtype: The element type.
        strides: Elements between neighbours along each dim.
        offset: The first element after the pointer.
        constant: Whether nothing writes it while kernels run, so it may be read before the wait for
            the previous kernel.
    """

    dtype: torch.dtype
    strides: tuple[int, ...]
    offset: int = 0
    constant: bool = False


@dataclass(frozen=True)
class Array:
    """A value's tile in shared memory.

    The last axis is contiguous. The axis before it has the stride `pitch`. If `loop` is given, the
    array holds that axis for all trips of its loop, and `index` says where the current element is.
    """

    name: str
    ctype: str
    axes: tuple[str, ...]
    extents: tuple[int, ...]
    pitch: int
    loop: str | None = None
    index: str = ""

    @property
    def elements(self) -> int:
        """How many elements it has, gaps included."""
        return math.prod(self.extents[:-1]) * self.pitch if self.extents else 1

    @property
    def bytes(self) -> int:
        """How many bytes it takes, rounded up to 16."""
        itemsize = {"half": 2, "__nv_bfloat16": 2, "long long": 8}.get(self.ctype, 4)
        return -(-self.elements * itemsize // 16) * 16

    def at(self, memory: str = "shared.") -> str:
        """Return the text of the current element, in the block's own shared memory or another."""
        terms, step = [], 1
        for d in reversed(range(len(self.axes))):
            if self.extents[d] > 1:
                index = f"i_{self.axes[d]}"
                if self.axes[d] == self.loop:
                    index = self.index
                terms.append(index + (f" * {step}" if step > 1 else ""))
            step = self.pitch if d == len(self.axes) - 1 else step * self.extents[d]
        return f"{memory}{self.name}[{' + '.join(reversed(terms)) or '0'}]"


@dataclass
class Nest:
    """A loop of all threads over the tile of some axes.

    Attributes:
        axes: The axes, the last one varying fastest.
        fast: The axis along which memory is contiguous.
        vector: Elements along `fast` that are read at a time.
        over: The axis that is reduced, if any.
        rows: Axes along which a thread computes all elements from one read of the inputs.
        known: C++ names of values at the current element.
        vectors: Inputs that were read as vectors.
    """

    axes: tuple[str, ...]
    fast: str | None
    vector: int
    over: str | None = None
    rows: tuple[str, ...] = ()
    known: dict[str, str] = field(default_factory=dict)
    vectors: list[str] = field(default_factory=list)


class NestWriter:
    """Writes nests. It holds the kernel's text so far, and its arrays in shared memory."""

    def __init__(
        self,
        block: BlockGraph,
        operands: Sequence[Operand],
        outputs: Sequence[Operand],
        tiles: dict[str, int],
        name: str,
        threads: int = 256,
    ):
        """Start the text of a kernel.

        Args:
            block: The block graph.
            operands: Its inputs' tensors.
            outputs: Its outputs' tensors.
            tiles: Tile sizes of the axes that are not held whole.
            name: The kernel's namespace.
            threads: Threads of a block, a power of two from 32 on.
        """
        self.threads = threads
        self.block, self.operands, self.outputs, self.name = block, operands, outputs, name
        self.tile = {a.name: tiles.get(a.name, self._whole_tile(a)) for a in block.axes}
        self.size = {a.name: a.size for a in block.axes}
        self.inputs = {i.name: i for i in block.inputs}
        self.ops = {op.out: op for op in block.ops()}
        #: Values whose tile is in shared memory now.
        self.staged: dict[str, Array] = {}
        #: Values that the current stage puts into shared memory.
        self.planned: set[str] = set()
        #: All arrays of the kernel in shared memory, by value.
        self.arrays: dict[str, Array] = {}
        #: Values that the other blocks of the cluster may read.
        self.published: set[str] = set()
        #: Floats of shared scratch memory for reductions.
        self.partial = 0
        #: Indentation of the next line.
        self.depth = 1
        self.lines: list[str] = []

    def _whole_tile(self, a: Axis) -> int:
        """Return how many elements of an axis a block sees: one of the numbers of splits."""
        numbers = a.role is Role.CLUSTER or self.block.axis_split_by(a.name) is not None
        return 1 if numbers else self.block.split_size(a.name)

    # -- text -------------------------------------------------------------------------------------

    def put(self, *lines: str) -> None:
        """Add lines at the current depth."""
        self.lines += [("" if line.startswith("#") else "  " * self.depth) + line for line in lines]

    @contextmanager
    def scope(self, head: str) -> Iterator[None]:
        """Write a braced scope."""
        self.put(f"{head} {{".lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        self.put("}")

    @contextmanager
    def repeat(self, index: str, count: int) -> Iterator[None]:
        """Write an unrolled loop, or only its body if it runs once."""
        if count == 1:
            yield
            return
        self.put("#pragma unroll")
        with self.scope(f"for (int {index} = 0; {index} < {count}; ++{index})"):
            yield

    def var(self, name: str) -> str:
        """Return a C++ name for a value."""
        name = re.sub(r"[^A-Za-z0-9_]", lambda m: f"u{ord(m.group()):x}", name)
        return name + "_" if name in _RESERVED or _OURS.match(name) else name

    def pointer(self, i: BlockInput, k: int) -> str:
        """Return the name of an input's pointer."""
        return f"{self.var(i.name)}_ptr{k if len(i.sources) > 1 else ''}"

    def trips(self, axis: str) -> int:
        """Return how many tiles an axis has, or one split of it."""
        return -(-self.block.split_size(axis) // self.tile[axis])

    def has_partial_tile(self, axis: str) -> bool:
        """Return whether the last tile of an axis, or of one of its splits, is partial."""
        split, tile = self.block.split_size(axis), self.tile[axis]
        last = self.size[axis] - (self.block.num_splits(axis) - 1) * split
        return split % tile != 0 or last % tile != 0

    def is_split(self, axis: str) -> bool:
        """Return whether a block sees only one split of an axis."""
        return self.block.axis(axis).split_axis is not None

    def begins_elsewhere(self, axis: str) -> bool:
        """Return whether tiles of an axis begin at different elements, named `axis`_0."""
        return self.is_split(axis) or self.trips(axis) > 1

    def end(self, axis: str) -> str:
        """Return the name of the end of an axis, or of the block's split of it."""
        return f"{axis}_end" if self.is_split(axis) else f"{axis}_size"

    def extent(self, axes: Sequence[str]) -> int:
        """Return the elements of a tile over some axes."""
        return math.prod(self.tile[a] for a in axes)

    def is_reduced(self, value: str) -> bool:
        """Return whether a value is the result of a reduction."""
        return value not in self.inputs and (
            value not in self.ops or self.ops[value].over is not None
        )

    # -- nests ------------------------------------------------------------------------------------

    def direct(self, value: str, filling: bool = False) -> list[str]:
        """Return the inputs that computing a value reads from device memory.

        Args:
            value: The value.
            filling: Whether it is computed in order to stage it.
        """
        found: list[str] = []

        def visit(v: str) -> None:
            staged = v in self.staged or v in self.planned
            if (staged and not (filling and v == value)) or v in found or self.is_reduced(v):
                return
            if v in self.inputs:
                found.append(v)
            else:
                for a in self.ops[v].args:
                    if isinstance(a, str):
                        visit(a)

        visit(value)
        return found

    def contiguous(self, value: str) -> str | None:
        """Return the axis along which an input's elements lie side by side."""
        i = self.inputs[value]
        sides = [
            {
                a
                for a, s in zip(i.axes, self.operands[k].strides, strict=True)
                if a and s == 1 and self.size[a] > 1
            }
            for k in i.sources
        ]
        return next((a for a in i.axes if a and all(a in side for side in sides)), None)

    def vector(self, value: str, axis: str) -> int:
        """Return how many elements along an axis a load of 16 bytes takes, 1 if unaligned."""
        i = self.inputs[value]
        n = min(16 // self.operands[k].dtype.itemsize for k in i.sources)
        steps = [
            s
            for k in i.sources
            for a, s in zip(i.axes, self.operands[k].strides, strict=True)
            if a and a != axis and self.size[a] > 1
        ]
        steps += [self.operands[k].offset for k in i.sources] + [self.size[axis], self.tile[axis]]
        steps += [self.block.split_size(axis)]
        steps += list(i.sizes) if i.joined == axis else []
        return n if self.contiguous(value) == axis and all(s % n == 0 for s in steps) else 1

    def plan(self, value: str, axes: Sequence[str], over: str | None, vectors: bool) -> Nest:
        """Return a nest whose fastest axis is contiguous in the largest input read directly."""
        read = sorted(
            self.direct(value, filling=over is None),
            key=lambda v: -self.extent(self.block.carried[v]),
        )
        contiguous = [a for v in read if (a := self.contiguous(v)) is not None]
        fast = next((a for a in contiguous if a in axes and self.tile[a] > 1), None)
        width = 1
        if fast is not None and vectors:
            carrying = [v for v in read if fast in self.block.carried[v]]
            widths = {self.vector(v, fast) for v in carrying}
            width = widths.pop() if len(widths) == 1 else 1
        elements = tuple(a for a in axes if a != over)
        repeated: tuple[str, ...] = ()
        if over is not None and width > 1:
            walked = {a for v in read for a in self.block.carried[v]}
            repeated = tuple(a for a in elements if a not in walked and self.tile[a] > 1)
            repeated = repeated if 1 < self.extent(repeated) <= MOST_ROWS else ()
            elements = tuple(a for a in elements if a not in repeated)
        if fast is None or fast == over:
            # Neighbouring lanes walk along rows of staged values.
            rows = {self.contiguous(v) for v in self.planned if v in self.inputs}
            columns = {a for v in self.planned if v in self.inputs for a in self.block.carried[v]}
            last = max(
                elements, key=lambda a: (a in rows, a in columns, self.tile[a]), default=None
            )
        else:
            last = fast
        ordered = (*(a for a in elements if a != last), *([last] if last else []))
        return Nest(ordered, fast, width, over, repeated)

    def coordinates(self, nest: Nest, index: str, clamp: bool) -> None:
        """Define i_a (in the tile) and at_a (in the tensor) of every axis from a linear index."""
        rest = index
        for a in reversed(nest.axes):
            step = nest.vector if a == nest.fast else 1
            count = self.tile[a] // step
            if self.tile[a] == 1:
                continue
            outer = [b for b in nest.axes[: nest.axes.index(a)] if self.tile[b] > 1]
            text = (f"{rest} % {count}" if outer else rest) + (f" * {step}" if step > 1 else "")
            self.put(f"const int {'j' if step > 1 else 'i'}_{a} = {text};")
            rest = f"{rest} / {count}"
        for a in nest.axes:
            if not (a == nest.fast and nest.vector > 1):
                self.global_coordinate(a, "i", clamp, 1)

    def global_coordinate(self, a: str, local: str, clamp: bool, width: int) -> None:
        """Define the coordinate of an axis in the tensor."""
        base = f"{a}_0" if self.begins_elsewhere(a) else ""
        inner = f"{local}_{a}" if self.tile[a] > 1 else ""
        text = " + ".join(t for t in (base, inner) if t) or "0"
        if clamp and self.has_partial_tile(a):
            text = f"min({text}, {a}_size - {width})"
        self.put(f"const int at_{a} = {text};")

    def load_vectors(self, nest: Nest, value: str, clamp: bool, loaded: Sequence[str] = ()) -> None:
        """Read the vectors of all inputs that lie along the fast axis.

        Args:
            nest: The nest.
            value: The value to compute.
            clamp: Whether to read within the tensor where elements lie beyond its end.
            loaded: Inputs whose vectors have been read.
        """
        if nest.vector == 1 or nest.fast is None:
            return
        names = [
            v
            for v in self.direct(value, filling=nest.over is None)
            if nest.fast in self.block.carried[v]
        ]
        nest.vectors = names
        names = [v for v in names if v not in loaded]
        if not names:
            return
        for v in names:
            self.put(f"alignas(16) {self.ctype(v)} {self.var(v)}_v[{nest.vector}];")
        with self.scope(""):
            self.global_coordinate(nest.fast, "j", clamp and nest.fast != nest.over, nest.vector)
            for v in names:
                self.put(f"load({self.var(v)}_v, {self.element(v)});")

    def address(self, i: BlockInput) -> str:
        """Return a C++ lambda from coordinates to the address of an input's element."""
        axes = [a for a in i.axes if a is not None]

        def at(source: int, k: int, start: int) -> str:
            t = self.operands[source]
            reach = t.offset + sum(
                (self.size[a] - 1) * s for a, s in zip(i.axes, t.strides, strict=True) if a
            )
            wide = "LL" if reach >= 1 << 31 else ""
            terms = [
                (f"(at_{a} - {start})" if a == i.joined and start else f"at_{a}")
                + (f" * {s}{wide}" if s != 1 else "")
                for a, s in zip(i.axes, t.strides, strict=True)
                if a and s
            ]
            return " + ".join([self.pointer(i, k), *([str(t.offset)] if t.offset else []), *terms])

        text, start = "", 0
        for k, source in enumerate(i.sources):
            piece = at(source, k, start)
            start += i.sizes[k] if i.sizes else 0
            text += piece if k == len(i.sources) - 1 else f"at_{i.joined} < {start} ? {piece} : "
        parameters = ", ".join(f"int at_{a}" for a in axes)
        return f"const auto {self.var(i.name)}_at = [&]({parameters}) {{ return {text}; }};"

    def ctype(self, value: str) -> str:
        """Return an input's C++ type."""
        return TYPES[self.operands[self.inputs[value].sources[0]].dtype]

    def element(self, value: str) -> str:
        """Return the address of an input's current element."""
        return f"{self.var(value)}_at({', '.join(f'at_{a}' for a in self.inputs[value].axes if a)})"

    def ref(self, nest: Nest, value: str) -> str:
        """Return the text of a value at the current element.

        Values it needs are defined first, each once.
        """
        if value in nest.known:
            return nest.known[value]
        if value in self.staged:
            array = self.staged[value]
            text = array.at() if array.ctype == "float" else f"to_float({array.at()})"
        elif value in nest.vectors:
            text = f"to_float({self.var(value)}_v[v])"
        elif value in self.inputs:
            text = f"to_float(*{self.element(value)})"
        else:
            op = self.ops[value]
            args = [self.ref(nest, a) if isinstance(a, str) else a for a in op.args]
            text = FLOAT.apply(op.fn, args, dict(op.attrs))
        name = self.var(value)
        self.put(f"const float {name} = {text};")
        nest.known[value] = name
        return name

    @contextmanager
    def each(self, count: int, shares: bool = False) -> Iterator[None]:
        """Write a loop of all threads over `count` elements, or a branch if each has at most one.

        Args:
            count: Number of elements.
            shares: Whether the blocks of a cluster share the elements.
        """
        first, threads, most = "tid", "threads", self.threads
        if shares and self.block.cluster is not None:
            first = "tid + threads * int(cluster.block_rank())"
            threads, most = "threads * cluster_blocks", most * self.block.cluster.size
        if count > most:
            self.put("#pragma unroll 1")
            with self.scope(f"for (int e = {first}; e < {count}; e += {threads})"):
                yield
            return
        with self.scope(f"if (const int e = {first}; e < {count})"):
            yield

    @contextmanager
    def elements(self, nest: Nest, shares: bool = False) -> Iterator[None]:
        """Write a loop over every element of a nest, without those beyond the end of an axis.

        Args:
            nest: The nest.
            shares: Whether the blocks of a cluster share the elements.
        """
        count = self.extent(nest.axes) // nest.vector
        with self.each(count, shares):
            self.coordinates(nest, "e", clamp=False)
            within = [
                f"{'j' if a == nest.fast and nest.vector > 1 else 'i'}_{a} < {self.end(a)} - {a}_0"
                for a in nest.axes
                if self.has_partial_tile(a)
            ]
            with self.scope(f"if ({' && '.join(within)})") if within else nullcontext():
                yield

    def fill(self, value: str) -> None:
        """Stage a value's tile in shared memory."""
        axes = self.block.carried[value]
        nest = self.plan(value, axes, None, vectors=True)
        last = nest.axes[-1] if nest.axes else None
        order = nest.axes if value in self.inputs else axes
        half = (
            value in self.inputs
            and self.operands[self.inputs[value].sources[0]].dtype.itemsize == 2
        )
        pitch = self.tile[order[-1]]
        if value in self.inputs and len(order) > 1 and self.reduced_over(value, order[-1]):
            pitch += 2 if half else 1  # so lanes that walk down a column meet different banks
        array = self.keep(
            value, self.ctype(value) if value in self.inputs else "float", order, pitch
        )
        self.put(
            f"// {value} [{', '.join(axes)}]"
            + (" from device memory" if value in self.inputs else "")
        )
        with self.elements(nest):
            if value in self.inputs and nest.vector > 1 and array.pitch % nest.vector == 0:
                self.put(f"const int i_{last} = j_{last};")
                self.global_coordinate(str(last), "i", False, 1)
                self.put(f"copy<{nest.vector}>(&{array.at()}, {self.element(value)});")
            elif nest.vector > 1:
                self.load_vectors(nest, value, clamp=False)
                with self.repeat("v", nest.vector):
                    self.put(f"const int i_{last} = j_{last} + v;")
                    self.global_coordinate(str(last), "i", False, 1)
                    text = f"{self.var(value)}_v[v]"
                    if value not in self.inputs:
                        text = self.ref(nest, value)
                    self.put(f"{array.at()} = {text};")
            elif value in self.inputs:
                self.put(f"{array.at()} = *{self.element(value)};")
            else:
                self.put(f"{array.at()} = {self.ref(nest, value)};")
        self.staged[value] = array

    def reduced_over(self, value: str, axis: str) -> bool:
        """Return whether a reduction that reads an input runs over an axis."""
        return self.block.role(axis) is Role.LOOP or any(
            op.over == axis for op in self.ops.values()
        )

    def keep(self, value: str, ctype: str, order: Sequence[str], pitch: int | None = None) -> Array:
        """Reserve shared memory for a value."""
        extents = tuple(self.tile[a] for a in order)
        array = Array(
            self.var(value), ctype, tuple(order), extents, pitch or (extents[-1] if extents else 1)
        )
        return self.arrays.setdefault(value, array)

    def store(self, o: BlockOutput) -> None:
        """Store an output.

        If blocks differ along an axis that the output lacks, the first block stores it. The blocks
        of a cluster share the elements, unless each holds a part of the output.
        """
        n = self.block.outputs.index(o)
        t = self.outputs[n]
        axes = tuple(a for a in o.axes if a is not None)
        nest = Nest(axes, axes[-1] if axes else None, 1)
        replicas = [a for a in self.block.named(Role.GRID, Role.CLUSTER) if not self.cuts(a, axes)]
        alone = [
            f"{a.name}_0 == 0" for a in replicas if a.role is Role.GRID and self.trips(a.name) > 1
        ]
        self.put(f"// {o.value} [{', '.join(a or '1' for a in o.axes)}] to device memory")
        with (
            self.scope(f"if ({' && '.join(alone)})") if alone else nullcontext(),
            self.elements(nest, shares=self.block.cluster in replicas),
        ):
            reach = sum((self.size[a] - 1) * s for a, s in zip(o.axes, t.strides, strict=True) if a)
            wide = "LL" if reach >= 1 << 31 else ""
            at = (
                " + ".join(
                    f"at_{a}" + (f" * {s}{wide}" if s != 1 else "")
                    for a, s in zip(o.axes, t.strides, strict=True)
                    if a
                )
                or "0"
            )
            value = self.ref(nest, o.value)
            self.put(f"{self.var(o.value)}_out{n}[{at}] = from_float<{TYPES[t.dtype]}>({value});")

    def cuts(self, a: Axis, axes: Sequence[str]) -> bool:
        """Return whether blocks that differ along an axis see different elements of `axes`."""
        return a.name in axes or self.block.axis_split_by(a.name) in axes
