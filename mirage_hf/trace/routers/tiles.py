"""Write the kernel of a router top to bottom: its loads, tiles and stores.

A tensor of a row is a tile over named axes. elements.py and choices.py write the ops.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mirage_hf.codegen import triton_math
from mirage_hf.ops.dtypes import COMPUTE_DTYPES
from mirage_hf.trace.routers.steps import Form, Local, Router, Step


@dataclass(frozen=True)
class RouterText:
    """A kernel of a router.

    Attributes:
        name: The kernel's name.
        source: The text of the file.
        num_warps: Warps of a block.
    """

    name: str
    source: str
    num_warps: int

    @property
    def digest(self) -> str:
        """The SHA-256 of the text."""
        return hashlib.sha256(self.source.encode()).hexdigest()


class UnwrittenError(Exception):
    """A router that is not written as a kernel.

    Attributes:
        step: The number of the step that is not, None if no step is the reason.
    """

    def __init__(self, why: str, step: int | None = None):
        super().__init__(why)
        self.step = step


class SplitError(Exception):
    """An axis of an input must be two axes."""

    def __init__(self, axis: str, inner: int):
        super().__init__(axis)
        self.axis, self.inner = axis, inner


@dataclass(frozen=True)
class Tile:
    """A tensor of a row in the kernel.

    Attributes:
        text: The name of its tile, or a number.
        axes: The axes of the tile, in order.
        dims: For each dim of the tensor its axes. Those that the tile lacks repeat its elements.
        kind: "float", "int" or "bool".
        source: The input that it is, None for computed tensors.
    """

    text: str
    axes: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]
    kind: str = "float"
    source: int | None = None


@dataclass
class RouterWriter:
    """Writes the kernel of a router, top to bottom."""

    router: Router
    splits: dict[str, int]
    #: Returns what writes a step.
    writer_of: Callable[[Step], Callable[[RouterWriter, Step], list[Tile]]]
    lines: list[str] = field(default_factory=list)
    #: The sizes of axes. Tiles have their axes in this order.
    sizes: dict[str, int] = field(default_factory=dict)
    tiles: dict[Local, Tile] = field(default_factory=dict)
    count: int = 0
    largest: int = 1

    def write(self) -> RouterText:
        """Return the kernel.

        Raises:
            UnwrittenError: It cannot be written.
            SplitError: An axis must be split first.
        """
        router = self.router
        for n, form in enumerate(router.inputs):
            self.tiles[Local(-1, n)] = self._load(n, form, router.is_weight[n])
        for n, step in enumerate(router.steps):
            try:
                results = self.writer_of(step)(self, step)
            except UnwrittenError as error:
                raise UnwrittenError(str(error), n) from None
            self.tiles |= {Local(n, k): tile for k, tile in enumerate(results)}
        for n, result in enumerate(router.results):
            if result not in self.tiles:
                raise UnwrittenError("a result that is not computed", result.step)
            self._store(n, self.tiles[result], self.form(result))
        return self._file()

    def form(self, x: Local) -> Form:
        """Return the form of a tensor of the router."""
        if x.step < 0:
            return self.router.inputs[x.output]
        return self.router.steps[x.step].outputs[x.output]

    def _file(self) -> RouterText:
        body = [f"i_{a} = tl.arange(0, {padded(n)})" for a, n in self.sizes.items()]
        names = [f"in{n}" for n in range(len(self.router.inputs))]
        names += [f"out{n}" for n in range(len(self.router.results))]
        text = "\n".join(f"    {line}" for line in [*_BEGIN, *body, *self.lines])
        name = f"route_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        kernel = f"@triton.jit\ndef {name}({', '.join(names)}, overlaps: tl.constexpr):\n{text}\n"
        needed = triton_math.helpers_of(f"INTERPRETED, {_EXP}{kernel}")
        helpers = [triton_math.HELPERS[h].strip("\n") for h in needed]
        source = "\n\n\n".join([_HEAD, *helpers, _EXP, kernel])
        warps = min(8, max(1, self.largest // 1024))
        return RouterText(name, source, warps)

    # -- tiles

    def assign(self, text: str) -> str:
        """Write an assignment to a new name and return it."""
        name = self.new_name("v")
        self.lines.append(f"{name} = {text}")
        return name

    def new_name(self, role: str) -> str:
        """Return a name that the text does not have yet."""
        self.count += 1
        return f"{role}{self.count}"

    def axes_of(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return axes in the order of tiles."""
        wanted = {*axes}
        ordered = tuple(a for a in self.sizes if a in wanted)
        self.largest = max(self.largest, math.prod(padded(self.sizes[a]) for a in ordered))
        return ordered

    def over(self, text: str, has: Sequence[str], axes: Sequence[str]) -> str:
        """Return a tile with new dims where it lacks axes."""
        if not has or tuple(has) == tuple(axes):
            return text
        return f"{text}[{', '.join(':' if a in has else 'None' for a in axes)}]"

    def place(self, axis: str, axes: Sequence[str]) -> str:
        """Return the numbers of the places along an axis, as a tile that spreads over axes."""
        return self.over(f"i_{axis}", (axis,), axes)

    def mask(self, axes: Sequence[str], over: Sequence[str]) -> str | None:
        """Return what is true inside the sizes of axes, None if it is true everywhere."""
        tests = [
            f"({self.place(a, over)} < {self.sizes[a]})"
            for a in axes
            if self.sizes[a] != padded(self.sizes[a])
        ]
        return " & ".join(tests) or None

    def offset(self, entries: Sequence[str], axes: Sequence[str]) -> str:
        """Return the number of an element, where the entries number it row by row."""
        terms, stride = [], 1
        for a in reversed(entries):
            terms.append(f"{self.place(a, axes)} * {stride}")
            stride *= self.sizes[a]
        return " + ".join(terms) or "0"

    def new_axis(self, size: int) -> str:
        """Return a new axis."""
        name = f"c{len(self.sizes)}"
        self.sizes[name] = size
        return name

    def tensor(self, x: Any) -> Tile:
        """Return a tensor among the arguments of a step."""
        if not isinstance(x, Local) or x not in self.tiles:
            raise UnwrittenError("an argument that is no tensor of the router")
        return self.tiles[x]

    def _load(self, n: int, form: Form, is_weight: bool) -> Tile:
        kind = kind_of(form.dtype)
        shape = form.shape
        entries: list[tuple[str, ...]] = []
        for d, size in enumerate(shape):
            is_row = d == 0 and not is_weight
            entries.append(() if is_row or size == 1 else self._input_axes(size))
        flat = [a for entry in entries for a in entry]
        if len({*flat}) != len(flat):
            raise UnwrittenError("an input with two equal dims")
        axes = self.axes_of(flat)
        row = "" if is_weight else f"row * {math.prod(shape[1:])} + "
        pointer = f"in{n} + {row}{self.offset(flat, axes)}"
        mask = self.mask(flat, axes)
        text = f"tl.load({pointer}{f', mask={mask}, other=0' if mask else ''})"
        text += {"float": ".to(tl.float32)", "int": ".to(tl.int32)", "bool": " != 0"}[kind]
        return Tile(self.assign(text), axes, tuple(entries), kind, n)

    def _input_axes(self, size: int) -> tuple[str, ...]:
        """Return the axes of a dim of an input. Equal sizes have the same axes."""
        name = f"e{size}"
        if name not in self.splits:
            self.sizes.setdefault(name, size)
            return (name,)
        inner = self.splits[name]
        self.sizes.setdefault(f"{name}_groups", size // inner)
        self.sizes.setdefault(f"{name}_places", inner)
        return (f"{name}_groups", f"{name}_places")

    def _store(self, n: int, tile: Tile, form: Form) -> None:
        flat = [a for entry in tile.dims for a in entry]
        axes = self.axes_of(flat)
        size = math.prod(self.sizes[a] for a in flat)
        text = self.over(tile.text, tile.axes, axes)
        if tile.kind == "int":
            text = f"{text}.to(tl.int64)"
        mask = self.mask(flat, axes)
        pointer = f"out{n} + row * {size} + {self.offset(flat, axes)}"
        if axes and tile.axes != axes:
            dims = ", ".join(str(padded(self.sizes[a])) for a in axes)
            text = f"tl.broadcast_to({text}, [{dims}])"
        self.lines.append(
            f"tl.store({pointer}, {text}.to(out{n}.dtype.element_ty)"
            f"{f', mask={mask}' if mask else ''})"
        )

    # -- steps

    def rounded(self, text: str, dtype: torch.dtype) -> str:
        """Return a float32 tile as torch stores it in a dtype."""
        names = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
        return f"({text}).to({names[dtype]}).to(tl.float32)" if dtype in names else text

    def result(
        self, text: str, axes: Sequence[str], dims: Sequence[tuple[str, ...]], form: Form
    ) -> Tile:
        """Write a result of a step and return it."""
        kind = kind_of(form.dtype)
        name = self.assign(self.rounded(text, form.dtype) if kind == "float" else text)
        return Tile(name, tuple(axes), tuple(dims), kind)

    def broadcast(
        self, operands: Sequence[Any], kinds: Sequence[str] = ("float",)
    ) -> tuple[list[str], tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """Return operands over common axes, these axes, and the dims of the result."""
        found = [self.tensor(x) if isinstance(x, Local) else x for x in operands]
        tiles = [x for x in found if isinstance(x, Tile)]
        if any(t.kind not in kinds for t in tiles):
            raise UnwrittenError("an operand of another type")
        rank = max(len(t.dims) for t in tiles)
        dims: list[tuple[str, ...]] = [()] * rank
        for t in tiles:
            for d, entry in enumerate(t.dims, rank - len(t.dims)):
                if entry and dims[d] and entry != dims[d]:
                    raise UnwrittenError("operands with other dims")
                dims[d] = entry or dims[d]
        axes = self.axes_of([a for t in tiles for a in t.axes])
        texts = [
            self.over(x.text, x.axes, axes)
            if isinstance(x, Tile)
            else triton_math.constant(float(x)).text
            for x in found
        ]
        return texts, axes, tuple(dims)

    def reduced(self, text: str, function: str, along: Sequence[str], axes: Sequence[str]) -> str:
        """Return a tile reduced along some of its axes."""
        for a in reversed([a for a in axes if a in along]):
            text = f"tl.{function}({text}, {list(axes).index(a)})"
            axes = [b for b in axes if b != a]
        return text

    def inside(self, text: str, along: Sequence[str], axes: Sequence[str], other: str) -> str:
        """Return a tile with another number outside of the sizes of axes."""
        mask = self.mask(along, axes)
        return f"tl.where({mask}, {text}, {other})" if mask else text

    def filled(self, tile: Tile) -> tuple[str, tuple[str, ...]]:
        """Return a tile that has all axes of its dims, and these axes."""
        axes = self.axes_of([a for entry in tile.dims for a in entry])
        text = self.over(tile.text, tile.axes, axes)
        if axes != tile.axes:
            dims = ", ".join(str(padded(self.sizes[a])) for a in axes)
            text = self.assign(f"tl.broadcast_to({text}, [{dims}])")
        return text, axes


def padded(size: int) -> int:
    """Return the size that a dim of a tile has for an axis: the next power of two."""
    return 1 << (size - 1).bit_length()


def kind_of(dtype: torch.dtype) -> str:
    """Return the kind of a tile.

    Raises:
        UnwrittenError: Tiles do not hold this dtype.
    """
    if dtype in COMPUTE_DTYPES:
        return "float"
    if dtype in (torch.int64, torch.int32):
        return "int"
    if dtype is torch.bool:
        return "bool"
    raise UnwrittenError(f"tensors of {dtype}")


# -- the text of every file ------------------------------------------------------------------------

_HEAD = '''"""A router as one kernel (mirage_hf/trace/routers/text.py)."""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

#: What no element's integer is: its place was taken.
TAKEN = tl.constexpr(-(2**31))'''

_EXP = '''@triton.jit
def exact_exp(x):
    """Return e^x, rounded as torch does. `tl.exp` first multiplies by log2(e), which is coarser."""
    if INTERPRETED:
        return tl.exp(x)
    return libdevice.exp(x)


@triton.jit
def ordered(x):
    """Return the bits of each float as an int32, in the order of floats.

    −0 becomes 0. NaN is greater than any number.
    """
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def from_ordered(bits):
    """Return the floats whose bits `ordered` gave."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)'''

_BEGIN = (
    "if overlaps:",
    "    tl.extra.cuda.gdc_wait()",
    "    tl.extra.cuda.gdc_launch_dependents()",
    "row = tl.program_id(0)",
)
