"""Find the products with codes that a kernel can stream.

Such a kernel computes Σ (codes − zero) · other for one row of `other`, or for a batch of up to
eight. Sums over groups of columns may be multiplied by scales. All rows of codes share `other`, and
any sums that no row of codes enters, such as the sum of squares of a norm. What follows the sums is
elementwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from mirage_hf import errors
from mirage_hf.codegen.placement import PlacedOp
from mirage_hf.graph.block import BlockGraph, BlockInput, BlockOp, Role, Stage
from mirage_hf.graph.coded import is_packed
from mirage_hf.graph.kernel import DTensor
from mirage_hf.ops.dtypes import CODE_DTYPES, COMPUTE_DTYPES

#: Rows of codes that a warp multiplies at a time: those of the instruction's left factor.
ROWS = 16

#: The number that each dtype of codes has to have subtracted. The instructions multiply signed
#: bytes, or halves.
ZEROS = {
    torch.uint4: 8.0,
    torch.int4: 0.0,
    torch.uint8: 128.0,
    torch.int8: 0.0,
    torch.float8_e4m3fn: 0.0,
}

#: The most rows of the other factor: the columns of the instruction's right factor.
MOST_BATCH = 8

#: Bytes that a thread loads at a time.
_LOADED = 16

#: The most weights whose rows the 16 rows of an instruction are divided among.
_MOST_PRODUCTS = 2


@dataclass(frozen=True)
class Product:
    """A sum of codes times the other factor.

    Attributes:
        out: The accumulator.
        codes: The input that holds the codes.
        scale: The input that multiplies the sum of each group of columns, if there is one.
    """

    out: str
    codes: str
    scale: str | None


@dataclass(frozen=True)
class _Part:
    """What a value of the loop is: codes minus their zero, or their products."""

    codes: str
    zero: float = 0.0
    other: str | None = None
    scale: str | None = None


@dataclass(frozen=True)
class Products:
    """What a kernel that streams codes computes.

    Attributes:
        op: The placed op.
        products: The sums of codes times `other`.
        other: The value that all codes are multiplied with. It carries `columns`, and may carry
            `batch`.
        sums: Accumulators of values that carry `columns`, and may carry `batch`, with these values.
        rows: The axes that number the rows of codes, the outer one first.
        columns: The summed axes, the outer one first.
        batch: The axis that numbers the rows of `other`, if there is one.
    """

    op: PlacedOp
    products: tuple[Product, ...]
    other: str
    sums: tuple[tuple[str, str], ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    batch: str | None = None

    @property
    def block(self) -> BlockGraph:
        """The block graph."""
        assert self.op.block is not None
        return self.op.block

    def tensor(self, name: str) -> DTensor:
        """Return the operand that an input reads: the first, if several are joined."""
        return self.op.operands[self.block.inputs_by_name[name].sources[0]]

    @property
    def num_rows(self) -> int:
        """How many rows of codes each product has."""
        return self._size(self.rows)

    @property
    def num_columns(self) -> int:
        """How many columns all codes have."""
        return self._size(self.columns)

    @property
    def batch_size(self) -> int:
        """How many rows `other` has."""
        return 1 if self.batch is None else self.block.axis(self.batch).size

    @property
    def group(self) -> int:
        """How many columns share a scale."""
        return self.block.axis(self.columns[-1]).size if len(self.columns) > 1 else self.num_columns

    @property
    def rows_of_each(self) -> int:
        """How many rows of each product a warp multiplies at a time."""
        return ROWS // len(self.products)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the codes."""
        return self.tensor(self.products[0].codes).dtype

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if is_packed(self.dtype) else 8

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of codes."""
        return self.num_columns * self.bits // 8

    @property
    def read_columns(self) -> tuple[str, ...]:
        """The inputs that carry columns: what `other` and `sums` are computed from."""
        read = dict.fromkeys(
            name for value in (self.other, *(v for _, v in self.sums)) for name in self._read(value)
        )
        return tuple(read)

    def batch_stride(self, name: str) -> int:
        """Return the elements between rows of an input of `read_columns`, 0 if it has one row."""
        i, t = self.block.inputs_by_name[name], self.tensor(name)
        return sum(s for a, s in zip(i.axes, t.strides, strict=True) if a and a == self.batch)

    def scale_rows(self, product: Product) -> int:
        """Return how many rows of scales a product has for the rows of a tile."""
        assert product.scale is not None
        carried = self.block.carried[product.scale]
        return self.rows_of_each if self.rows[-1] in carried else 1

    def pieces(self, name: str) -> tuple[int, ...]:
        """Return how many rows of codes each source of an input has."""
        i = self.block.inputs_by_name[name]
        inner = self._size(self.rows[1:])
        return tuple(n * inner for n in i.sizes or (self.block.axis(self.rows[0]).size,))

    def _size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.block.axis(a).size for a in axes)

    def _read(self, value: str) -> Iterator[str]:
        """Yield the inputs that a value is computed from."""
        op = self.block.ops_by_name.get(value)
        if op is None:
            yield value
        else:
            for a in op.args:
                if isinstance(a, str):
                    yield from self._read(a)


def streamed_products(op: PlacedOp) -> Products:
    """Return what a kernel that streams codes computes for a placed op.

    Raises:
        CodegenError: The op has no such kernel. The message says why.
    """
    return _Finder(op).found()


def reads_codes(op: PlacedOp) -> bool:
    """Return whether an operand of a placed op holds codes."""
    return any(t.dtype in CODE_DTYPES for t in op.operands)


class _Finder:
    """Looks at the parts of a block graph, from its inputs to its outputs."""

    def __init__(self, op: PlacedOp):
        self.op = op
        assert op.block is not None
        self.block: BlockGraph = op.block
        self.coded = [i for i in self.block.inputs if self.operand(i).dtype in ZEROS]

    def operand(self, i: BlockInput) -> DTensor:
        return self.op.operands[i.sources[0]]

    def found(self) -> Products:
        """Return the products."""
        if self.op.appends or self.op.caches:
            raise _refused("it appends to a cache")
        if not self.coded:
            raise _refused("no input holds codes that it multiplies")
        self.find_axes()
        loops = [s for s in self.block.stages if s.loop is not None]
        first = self.block.stages[0]
        if loops != [first] or first.loop != self.columns[0]:
            raise _refused("not one loop over the columns comes first")
        for i in self.block.inputs:
            self.check_input(i)
        self.walk(first)
        for stage in self.block.stages[1:]:
            self.close(stage)
        if self.open:
            raise _refused(f"the sum {next(iter(self.open))} ends nowhere")
        self.choose()
        for o in self.block.outputs:
            if set(self.block.carried[o.value]) != {*self.rows} | {self.batch} - {None}:
                raise _refused(f"output {o.value} does not have the rows of the codes")
        found = Products(
            self.op, self.products, self.other, self.sums, self.rows, self.columns, self.batch
        )
        self.check_sizes(found)
        return found

    def find_axes(self) -> None:
        """Find the rows and columns of codes, and the batch."""
        axes = [a for a in self.coded[0].axes if a is not None]
        self.rows = tuple(a for a in axes if self.block.role(a) is Role.GRID)
        self.columns = tuple(a for a in axes if a not in self.rows)
        if not self.rows or not 1 <= len(self.columns) <= 2:
            raise _refused("the codes have no rows, or more than two axes of columns")
        if any(a.split_axis is not None for a in self.block.axes):
            raise _refused("an axis is split")
        others = [a for a in self.block.axes if a.name not in axes]
        if any(a.role is not Role.GRID for a in others) or len(others) > 1:
            raise _refused("it has other axes than the rows and columns of the codes, and a batch")
        if others and others[0].size > MOST_BATCH:
            raise _refused(f"the other factor has {others[0].size} rows, more than {MOST_BATCH}")
        self.batch = others[0].name if others else None

    def check_input(self, i: BlockInput) -> None:
        """Check that an input is read plainly, and that codes lie row after row."""
        if i.bounds or i.rotation or i.taken or i.padding:
            raise _refused(f"{i.name} has bounds, a rotation, an index or padding")
        sources = [self.op.operands[s] for s in i.sources]
        if any(t.dtype in CODE_DTYPES and t.dtype not in ZEROS for t in sources):
            raise _refused(f"{i.name} holds codes that it does not multiply")
        if i not in self.coded:
            if i.joined not in (None, self.rows[0]):
                raise _refused(f"{i.name} is joined along {i.joined}")
            return
        if tuple(a for a in i.axes if a) != (*self.rows, *self.columns):
            raise _refused(f"the axes of {i.name} are not those of the other codes")
        if any(t.dtype is not sources[0].dtype or not t.constant for t in sources):
            raise _refused(f"{i.name} may change, or its parts have different dtypes")
        if i.joined not in (None, self.rows[0]):
            raise _refused(f"{i.name} is joined along {i.joined}")
        for t in sources:
            if not self._lies_in_rows(i, t):
                raise _refused(f"the codes of {i.name} do not lie row after row")

    def _lies_in_rows(self, i: BlockInput, t: DTensor) -> bool:
        """Return whether each axis of a tensor follows the one after it without gaps."""
        expected = 1  # the outermost axis may be joined, and its size does not count
        for axis, stride in reversed([*zip(i.axes, t.strides, strict=True)]):
            if axis is not None and axis != self.batch:
                if stride != expected:
                    return False
                expected *= self.block.axis(axis).size
        return True

    # -- the loop ---------------------------------------------------------------------------------

    def walk(self, stage: Stage) -> None:
        """Find the products and the sums of the loop."""
        self.parts: dict[str, _Part] = {i.name: _Part(i.name) for i in self.coded}
        self.scaled: dict[str, tuple[str, str]] = {}  # columns times a scale, by name
        coded = {i.name for i in self.coded}
        #: Values of columns that are inputs, or computed from such elementwise.
        self.elementwise = {
            i.name
            for i in self.block.inputs
            if i.name not in coded
            and {*self.block.carried[i.name]} - {self.batch} == {*self.columns}
        }
        self.column_sums: dict[str, str] = {}
        for op in stage.body:
            self.visit(op)
        self.totals: dict[str, _Part | str] = {}  # finished sums: of codes, or of plain columns
        self.open: dict[str, _Part | str] = {}  # sums that still carry the inner columns
        for a in stage.accumulators:
            part = self.parts.get(a.arg)
            if a.kind != "sum" or a.shift is not None:
                raise _refused(f"{a.out} is no plain sum")
            if part is not None and part.other is None:
                raise _refused(f"{a.out} adds up codes that nothing multiplies")
            value = part or self.column_sums.get(a.arg, a.arg)
            if isinstance(value, str) and not self.is_column(value):
                raise _refused(f"{a.out} is no sum over all columns")
            is_open = len(self.columns) > 1 and self.columns[1] in self.block.carried[a.out]
            (self.open if is_open else self.totals)[a.out] = value

    def close(self, stage: Stage) -> None:
        """Note the sums over the inner columns that end after the loop. Nothing else is reduced."""
        if stage.accumulators:
            raise _refused("it reduces a value after the loop")
        for op in stage.body:
            read = [a for a in op.args if a in self.open]
            if op.over is None and not read:
                continue
            if op.fn != "sum" or op.over != self.columns[-1] or len(read) != 1:
                raise _refused(f"{op.out} reduces a value after the loop")
            self.totals[op.out] = self.open.pop(str(read[0]))

    def choose(self) -> None:
        """Tell products from other sums, and check that one kernel computes all of them."""
        products = [(out, v) for out, v in self.totals.items() if isinstance(v, _Part)]
        if not 1 <= len(products) <= _MOST_PRODUCTS:
            raise _refused(f"it has {len(products)} products with codes; it may have two at most")
        if len({p.other for _, p in products}) > 1:
            raise _refused("its codes are multiplied with different values")
        dtypes = {self.operand(self.block.inputs_by_name[p.codes]).dtype for _, p in products}
        if len(dtypes) > 1:
            raise _refused("its codes have different dtypes")
        zero = ZEROS[dtypes.pop()]
        for out, part in products:
            if part.zero != zero:
                raise _refused(f"{out} subtracts {part.zero} from codes, not {zero}")
        self.products = tuple(Product(out, p.codes, p.scale) for out, p in products)
        self.sums = tuple((out, v) for out, v in self.totals.items() if isinstance(v, str))
        self.other = str(products[0][1].other)

    def visit(self, op: BlockOp) -> None:
        """Note what a value of the loop's body is."""
        parts = [self.parts.get(a) if isinstance(a, str) else None for a in op.args]
        if all(p is None for p in parts):
            if op.over is not None and op.fn == "sum":
                self.column_sums[op.out] = str(op.args[0])
            elif op.fn == "mul" and (pair := self.column_and_scale(op)) is not None:
                self.scaled[op.out] = pair
            elif op.over is None:
                named = [a for a in op.args if isinstance(a, str)]
                if named and all(a in self.elementwise for a in named):
                    self.elementwise.add(op.out)
            return
        if op.over is not None:
            if parts[0] is None or parts[0].other is None or op.fn != "sum":
                raise _refused(f"{op.out} reduces codes")
            self.parts[op.out] = parts[0]
            return
        self.parts[op.out] = self.combined(op, parts)

    def combined(self, op: BlockOp, parts: list[_Part | None]) -> _Part:
        """Return what an elementwise op with codes gives."""
        if op.fn == "sub" and parts[0] is not None:
            zero = op.args[1]
            if parts[0] == _Part(parts[0].codes) and isinstance(zero, (int, float)):
                return replace(parts[0], zero=float(zero))
        if op.fn == "mul" and len(parts) == 2:
            part, factor = (parts[0], op.args[1]) if parts[1] is None else (parts[1], op.args[0])
            if part is not None and isinstance(factor, str) and factor not in self.parts:
                other, scale = self.factors(factor)
                clashes = (other and part.other) or (scale and part.scale)
                if (other or scale) and not clashes:
                    return replace(part, other=other or part.other, scale=scale or part.scale)
        raise _refused(f"{op.out} is {op.fn} of codes in a way that it does not compute")

    def factors(self, value: str) -> tuple[str | None, str | None]:
        """Return the columns and the scale whose product a value is. Either may be missing."""
        if value in self.scaled:
            return self.scaled[value]
        if self.is_scale(value):
            return None, value
        return (value, None) if self.is_column(value) else (None, None)

    def column_and_scale(self, op: BlockOp) -> tuple[str, str] | None:
        """Return the factors of a product of columns and a scale."""
        a, b = (str(x) for x in op.args)
        for column, scale in (a, b), (b, a):
            if self.is_scale(scale) and self.is_column(column):
                return column, scale
        return None

    def is_column(self, value: str) -> bool:
        """Return whether a value has all columns and no rows, and is no result of a reduction."""
        return value in self.elementwise

    def is_scale(self, value: str) -> bool:
        """Return whether a value is an input of scales: constant, for each row and group."""
        i = self.block.inputs_by_name.get(value)
        if i is None or len(self.columns) == 1:
            return False
        carried = tuple(a for a in i.axes if a is not None)
        inner = len(self.rows) - 1
        of_rows = carried == (*self.rows, self.columns[0])
        of_blocks = inner > 0 and carried == (*self.rows[:inner], self.columns[0])
        sources = [self.op.operands[s] for s in i.sources]
        return (of_rows or of_blocks) and all(
            t.constant and self._lies_in_rows(i, t) for t in sources
        )

    # -- sizes ------------------------------------------------------------------------------------

    def check_sizes(self, found: Products) -> None:
        """Check what the copies and the instructions need."""
        if found.group % 32 or found.num_columns % 64 or found.row_bytes % 16:
            raise _refused(f"{found.num_columns} columns in groups of {found.group} do not fit")
        pieces = [n for p in found.products for n in found.pieces(p.codes)]
        if any(n % found.rows_of_each for n in pieces):
            raise _refused(f"rows of codes are no multiple of {found.rows_of_each}")
        for name in found.read_columns:
            i, t = self.block.inputs_by_name[name], found.tensor(name)
            in_order = tuple(a for a in i.axes if a and a != self.batch) == self.columns
            if i.joined is not None or not in_order or not self._lies_in_rows(i, t):
                raise _refused(f"{name} does not have all columns side by side")
            if found.batch_stride(name) * t.dtype.itemsize % _LOADED:
                raise _refused(f"the rows of {name} do not begin at multiples of {_LOADED} bytes")
            if t.dtype not in COMPUTE_DTYPES:
                raise _refused(f"{name} holds {t.dtype}")
        for p in found.products:
            if p.scale is not None:
                self._check_scale(found, p)

    def _check_scale(self, found: Products, p: Product) -> None:
        assert p.scale is not None
        t = found.tensor(p.scale)
        groups = found.num_columns // found.group
        inner = self.block.axis(self.rows[-1]).size
        if found.scale_rows(p) == 1 and inner % found.rows_of_each:
            raise _refused(f"blocks of {inner} rows share scales, and tiles would cross them")
        if found.scale_rows(p) * groups * t.dtype.itemsize % 16:
            raise _refused(f"{groups} scales of {p.scale} for a row are no multiple of 16 bytes")
        rows = self.block.inputs_by_name[p.scale]
        if rows.sizes != self.block.inputs_by_name[p.codes].sizes:
            raise _refused(f"{p.scale} is not joined as {p.codes} is")


def _refused(why: str) -> errors.CodegenError:
    return errors.CodegenError(f"no kernel that streams codes: {why}; use a Triton kernel")
