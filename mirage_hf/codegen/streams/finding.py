"""Find the products with codes that a kernel can stream.

`products` says what these are, and how codes may lie.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mirage_hf import errors
from mirage_hf.codegen.placement import PlacedOp
from mirage_hf.codegen.streams.products import ZEROS, Product, Products, is_grouped
from mirage_hf.codegen.streams.tables import table_bytes, table_halves
from mirage_hf.graph.block import BlockGraph, BlockInput, BlockOp, Role, Taken
from mirage_hf.graph.coded import high_first, is_exponent, is_packed
from mirage_hf.graph.kernel import DTensor
from mirage_hf.ops.dtypes import CODE_DTYPES, CODES_PER_WORD, COMPUTE_DTYPES

#: The sizes and strides of the two axes that number eight rows, in a word that holds their codes.
_ORDER_IN_WORD = (4, 1), (2, 4)

#: The sizes and strides of the axes that number the codes of eight rows and 128 columns, if words
#: lie as lanes load them: the row, the words of a lane, the codes of half a word, the four lanes of
#: a row, and the halves of a word.
_ORDER_OF_LANES = (8, 128), (4, 8), (4, 1), (4, 32), (2, 4)

#: Codes of eight rows that lie in this order side by side.
_CODES_OF_LANES = 1024

#: The most elements from a row to the next one of scales and shifts that lie in turns.
_IN_TURNS = 2

#: The most rows of the other factor: the columns of two instructions' right factors.
MOST_BATCH = 16

#: Bytes that a thread loads at a time.
_LOADED = 16

#: The most weights whose rows the 16 rows of an instruction are divided among.
_MOST_PRODUCTS = 2


@dataclass(frozen=True)
class _Part:
    """What a value is that codes enter: codes minus their zero, or sums of products of them.

    Attributes:
        codes: The input that holds the codes.
        zero: What was subtracted: a number, or an input.
        values: The table that the codes are looked up in, if there is one.
        other: The values that the codes are multiplied with. Their product is the other factor.
        scale: The scale, if there is one.
        shift: What was added after the codes were scaled: an input.
        summed: The axes of columns that were added up.
    """

    codes: str
    zero: float | str = 0.0
    values: tuple[float, ...] = ()
    other: tuple[str, ...] = ()
    scale: str | None = None
    shift: str | None = None
    summed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Offset:
    """What a value is that is subtracted from sums of codes, or added to them.

    Attributes:
        factor: The zero point or the shift, an input. It multiplies sums of columns.
        other: The values whose product is added up.
        summed: The axes of columns that were added up.
    """

    factor: str
    other: tuple[str, ...]
    summed: frozenset[str] = frozenset()

    def fits(self, part: _Part) -> bool:
        """Return whether the same columns were multiplied and added up."""
        return part.summed == self.summed and sorted(part.other) == sorted(self.other)


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
        codes = [i for i in self.block.inputs if self.operand(i).dtype in ZEROS]
        # zero points have fewer axes
        counts = [sum(a is not None for a in i.axes) for i in codes]
        self.coded = [i for i, n in zip(codes, counts, strict=True) if n == max(counts)]

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
        # A loop over inner columns adds up the same, but its tiles have all outer ones. Without an
        # index, the search finds the other loop as well, whose tiles may be smaller.
        walked = self.own_columns if self.taken is not None else self.own_columns[:1]
        if len(loops) != 1 or loops[0].loop not in walked:
            raise _refused("it has not one loop over the columns")
        for i in self.block.inputs:
            self.check_input(i)
        self.walk()
        if self.open:
            raise _refused(f"the sum {next(iter(self.open))} ends nowhere")
        self.choose()
        for o in self.block.outputs:
            if set(self.block.carried[o.value]) != {*self.rows} | {self.batch} - {None}:
                raise _refused(f"output {o.value} does not have the rows of the codes")
            if o.value in self.offsets or o.value in self.ended:
                raise _refused(f"output {o.value} is a part of a sum")
        found = Products(
            self.op,
            self.products,
            self.other,
            self.sums,
            self.rows,
            self.columns,
            batch=self.batch,
            taken=self.taken,
            values=self.values,
            pair=self.pair,
            word=self.word,
            word_rows=self.word_rows,
            lanes=self.lanes,
            row_pair=self.row_pair,
        )
        self.check_sizes(found)
        return found

    def find_axes(self) -> None:
        """Find the rows and columns of codes, and the batch."""
        self.taken = self.coded[0].taken
        own = [a for a in self.coded[0].axes if a is not None]
        chosen = [] if self.taken is None else [a for a in self.taken.axes if a is not None]
        axes = [*chosen, *own]
        self.rows = tuple(a for a in axes if self.block.role(a) is Role.GRID)
        self.columns = tuple(a for a in axes if a not in self.rows)
        self.stored_rows = self.own_rows = tuple(a for a in own if a in self.rows)
        self.row_pair = self.row_pair_of(self.coded[0])
        if self.row_pair is not None:  # a tile has both rows of a byte
            self.rows = self.own_rows = (*self.own_rows[1:], self.row_pair)
        self.own_columns = tuple(a for a in own if a in self.columns)
        pieces = tuple(a for a in chosen if a in self.columns)
        self.pair = self.pair_of(self.coded[0])
        self.word = self.word_of(self.coded[0])
        self.word_rows = self.word_rows_of(self.coded[0])
        self.lanes = self.lanes_of(self.coded[0])
        most = 2 + (self.pair is not None or self.word is not None) + len(self.lanes)
        if not self.own_rows or not 1 <= len(self.own_columns) <= most:
            raise _refused("the codes have no rows, or more than two axes of columns")
        if len(pieces) > 1 or (*self.rows[: len(chosen) - len(pieces)], *pieces) != tuple(chosen):
            raise _refused("the index has other axes than rows of codes, and then pieces")
        if any(a.split_axis is not None for a in self.block.axes):
            raise _refused("an axis is split")
        others = [a for a in self.block.axes if a.name not in axes]
        if any(a.role is not Role.GRID for a in others) or len(others) > 1:
            raise _refused("it has other axes than the rows and columns of the codes, and a batch")
        if others and others[0].size > MOST_BATCH:
            raise _refused(f"the other factor has {others[0].size} rows, more than {MOST_BATCH}")
        if others and self.taken is not None:
            raise _refused("it has an index, and a batch")
        self.batch = others[0].name if others else None

    def pair_of(self, i: BlockInput) -> str | None:
        """Return the innermost axis of codes if it numbers two of a byte, the higher one first."""
        t = self.operand(i)
        dim = high_first(t.dims, t.strides)
        return i.axes[dim] if dim == len(t.dims) - 1 else None

    def row_pair_of(self, i: BlockInput) -> str | None:
        """Return the outer axis of rows if it numbers two codes of a byte, the higher one first."""
        t = self.operand(i)
        is_outer = high_first(t.dims, t.strides) == 0 and len(self.own_rows) == 2
        return self.own_rows[0] if is_outer and i.taken is None else None

    def word_of(self, i: BlockInput) -> str | None:
        """Return the innermost axis of codes if it fills a word, and words are column-major."""
        t, axes = self.operand(i), [a for a in i.axes if a is not None]
        if not is_packed(t.dtype) or i.taken is not None or axes[-1] not in self.own_columns:
            return None
        strides = {a: s for a, s in zip(i.axes, t.strides, strict=True) if a is not None}
        is_word = self.block.axis(axes[-1]).size == CODES_PER_WORD and strides[axes[-1]] == 1
        is_in_columns = strides[self.own_rows[-1]] == CODES_PER_WORD < strides[axes[-2]]
        return axes[-1] if is_word and is_in_columns else None

    def word_rows_of(self, i: BlockInput) -> tuple[str, ...]:
        """Return the two innermost axes of rows of codes if they number the codes of a word."""
        t, axes = self.operand(i), self.own_rows[-2:]
        if not is_packed(t.dtype) or i.taken is not None or len(self.own_rows) != 3:
            return ()
        dims = [(t.dims[n], t.strides[n]) for n in map(i.axes.index, axes)]
        return axes if tuple(dims) == _ORDER_IN_WORD else ()

    def lanes_of(self, i: BlockInput) -> tuple[str, ...]:
        """Return the four innermost axes of columns if words lie as lanes load them."""
        t, axes = self.operand(i), self.own_columns[-4:]
        is_plain = is_packed(t.dtype) and i.taken is None
        if not is_plain or len(self.own_rows) != 2 or len(self.own_columns) < 5:
            return ()
        dims = [(t.dims[n], t.strides[n]) for n in map(i.axes.index, (self.own_rows[1], *axes))]
        return axes if tuple(dims) == _ORDER_OF_LANES else ()

    def check_input(self, i: BlockInput) -> None:
        """Check that an input is read plainly, or by the index, and that codes lie in rows."""
        if i.bounds or i.rotation or i.padding:
            raise _refused(f"{i.name} has bounds, a rotation or padding")
        if i.taken is not None and (self.taken is None or _place(i.taken) != _place(self.taken)):
            raise _refused(f"{i.name} has another index than the codes")
        sources = [self.op.operands[s] for s in i.sources]
        if any(_is_unread(t.dtype) for t in sources):
            raise _refused(f"{i.name} holds codes that it does not multiply")
        are_single = self.taken is not None or self.row_pair is not None
        if i.joined not in (None, self.own_rows[0]) or (i.joined and are_single):
            raise _refused(f"{i.name} is joined along {i.joined}")
        if i not in self.coded:
            return
        if tuple(a for a in i.axes if a) != (*self.stored_rows, *self.own_columns):
            raise _refused(f"the axes of {i.name} are not those of the other codes")
        if any(t.dtype is not sources[0].dtype or not t.constant for t in sources):
            raise _refused(f"{i.name} may change, or its parts have different dtypes")
        if (i.taken is None) != (self.taken is None):
            raise _refused(f"{i.name} has no index")
        if self.lanes and len(self._strides_of_rows(i, sources)) > 1:
            raise _refused(f"the parts of {i.name} have rows of different lengths")
        for t in sources:
            if self.row_pair is not None:
                lies = self._lies_in_pairs_of_rows(i, t)
            elif self.lanes:
                lies = self._lies_in_lanes(i, t)
            elif self.word is not None or self.word_rows:
                lies = self._lies_in_columns(i, t)
            else:
                lies = self._lies_in_rows(i, t) if self.taken is None else self._has_rows(i, t)
            if not lies and self.taken is not None:
                raise _refused(f"the codes of {i.name} have an index, and do not lie in rows")
            if not lies:
                raise _refused(
                    f"the codes of {i.name} lie neither row after row, nor as in GPTQ, AWQ, HQQ or "
                    "torchao's tiles"
                )

    def _strides_of_rows(self, i: BlockInput, sources: list[DTensor]) -> set[int]:
        """Return the elements from an outer row to the next one, of each source of an input."""
        return {t.strides[i.axes.index(self.own_rows[0])] for t in sources}

    def _lies_in_rows(self, i: BlockInput, t: DTensor) -> bool:
        """Return whether each axis of a tensor follows the one after it without gaps."""
        expected = 1  # the outermost axis may be joined, and its size does not count
        for axis, stride in reversed([*zip(i.axes, t.strides, strict=True)]):
            if axis is not None and axis != self.batch:
                if stride * self._sign(i, axis) != expected:
                    return False
                expected *= self.block.axis(axis).size
        return True

    def _lies_in_columns(self, i: BlockInput, t: DTensor, step: int = 1) -> bool:
        """Return whether a tensor has rows side by side, and columns without gaps around them.

        The codes of a word lie within the rows. `step` is the elements from a row to the next one.
        """
        inner = [a for a in self.own_columns if a == self.word and a in i.axes]
        outer = [a for a in reversed(self.own_columns) if a in i.axes and a not in inner]
        return self._follow(i, t, (*inner, *self._rows_of(t), *outer), step)

    def _lies_in_pairs_of_rows(self, i: BlockInput, t: DTensor) -> bool:
        """Return whether bytes hold a code of each of two rows, column after column."""
        strides = {a: s for a, s in zip(i.axes, t.strides, strict=True) if a is not None}
        if strides.pop(self.stored_rows[0]) != -1:
            return False
        expected = 2
        for axis in (*reversed(self.own_columns), self.stored_rows[1]):
            if strides.pop(axis) != expected:
                return False
            expected *= self.block.axis(axis).size
        return not strides

    def _lies_in_lanes(self, i: BlockInput, t: DTensor) -> bool:
        """Return whether all columns of eight rows lie one after another, as lanes load them.

        There may be a gap before the next eight rows.
        """
        strides = {a: s for a, s in zip(i.axes, t.strides, strict=True) if a is not None}
        dims = [(self.block.axis(a).size, strides[a]) for a in (self.own_rows[1], *self.lanes)]
        if tuple(dims) != _ORDER_OF_LANES:
            return False
        expected = _CODES_OF_LANES
        for axis in reversed(self.own_columns[: -len(self.lanes)]):
            if strides[axis] != expected:
                return False
            expected *= self.block.axis(axis).size
        rest = strides[self.own_rows[0]] - expected
        return rest >= 0 and rest % _CODES_OF_LANES == 0

    def _rows_of(self, t: DTensor) -> tuple[str, ...]:
        """Return the axes of rows that lie side by side, the inner one first."""
        if self.word_rows and is_packed(t.dtype):
            return (*self.word_rows, *reversed(self.own_rows[: -len(self.word_rows)]))
        return self.own_rows[::-1]

    def _follow(self, i: BlockInput, t: DTensor, axes: tuple[str, ...], step: int = 1) -> bool:
        """Return whether the axes of a tensor follow each other without gaps, the inner one first.

        Others have one element. `step` is the elements from one of the tensor to its next one.
        """
        strides = {a: s for a, s in zip(i.axes, t.strides, strict=True) if a is not None}
        expected = step
        for axis in axes:
            if strides.pop(axis, None) != expected:
                return False
            expected *= t.dims[i.axes.index(axis)]  # a source that is joined has some of the rows
        return not strides

    def _lies_in_words(self, i: BlockInput, t: DTensor) -> bool:
        """Return whether zero points of eight successive rows fill a word, group after group."""
        groups = tuple(a for a in self.own_columns[:1] if a in i.axes)
        if self.word_rows:
            return self._follow(i, t, (*self._rows_of(t), *groups))
        if len(self.own_rows) != 2 or self.block.axis(self.own_rows[1]).size != CODES_PER_WORD:
            return False
        outer, inner = self.own_rows
        return self._follow(i, t, (inner, *groups, outer)) or self._follow(
            i, t, (inner, outer, *groups)
        )

    def _sign(self, i: BlockInput, axis: str) -> int:
        """Return -1 for the axis of pairs of codes, whose stride is negative, and 1 otherwise."""
        return -1 if axis == self.pair and i in self.coded else 1

    def _has_rows(self, i: BlockInput, t: DTensor) -> bool:
        """Return whether a tensor has columns without gaps, in rows at equal distances."""
        expected, has_gap = 1, False
        for axis, stride in reversed([*zip(i.axes, t.strides, strict=True)]):
            if axis is None:
                continue
            stride *= self._sign(i, axis)
            if stride != expected and (axis in self.columns or has_gap or stride < expected):
                return False
            has_gap |= axis in self.rows
            expected = stride * self.block.axis(axis).size
        return True

    # -- values -----------------------------------------------------------------------------------

    def walk(self) -> None:
        """Find the products and the other sums, stage by stage."""
        self.parts: dict[str, _Part] = {i.name: _Part(i.name) for i in self.coded}
        #: Products of columns and a scale, by name: the columns, and the scale.
        self.scaled: dict[str, tuple[tuple[str, ...], str]] = {}
        coded = {i.name for i in self.coded}
        #: Values of columns that are inputs, or computed from such elementwise.
        self.elementwise = {
            i.name
            for i in self.block.inputs
            if i.name not in coded and i.taken is None and self.is_of_columns(i.name)
        }
        #: Sums of such values, by name: the value, and the axes that were added up.
        self.column_sums: dict[str, tuple[str, frozenset[str]]] = {}
        #: Zero points times columns, or times sums of them, by name.
        self.offsets: dict[str, _Offset] = {}
        self.open: set[str] = set()  # sums of the loop that still carry columns
        self.ended: set[str] = set()  # sums, and values to sum, that became parts of others
        self.read: set[str] = set()  # sums over all columns that elementwise ops read
        for stage in self.block.stages:
            for op in stage.body:
                self.visit(op, in_loop=stage.loop is not None)
            if stage.accumulators and stage.loop is None:
                raise _refused("it reduces a value after the loop")
            for a in stage.accumulators:
                if a.kind != "sum" or a.shift is not None:
                    raise _refused(f"{a.out} is no plain sum")
                assert stage.loop is not None
                self.add_up(a.out, a.arg, stage.loop)
                if {*self.columns} & {*self.block.carried[a.out]}:
                    self.open.add(a.out)

    def add_up(self, out: str, value: str, axis: str) -> None:
        """Note a sum over an axis of columns."""
        part = self.parts.get(value)
        if part is not None:
            if not part.other:
                raise _refused(f"{out} adds up codes that nothing multiplies")
            self.parts[out] = replace(part, summed=part.summed | {axis})
            return
        if (offset := self.offsets.get(value)) is not None:
            self.offsets[out] = replace(offset, summed=offset.summed | {axis})
            return
        column, summed = self.column_sums.get(value, (value, frozenset()))
        if not self.is_column(column):
            raise _refused(f"{out} is no sum over all columns")
        self.column_sums[out] = column, summed | {axis}

    def is_finished(self, value: str) -> bool:
        """Return whether a value is a sum over all columns, and no shift is added to it later."""
        part = self.parts.get(value)
        summed = part.summed if part else self.column_sums.get(value, ("", frozenset()))[1]
        return summed == {*self.columns} and value not in self.ended

    def visit(self, op: BlockOp, in_loop: bool) -> None:
        """Note what a value is."""
        named = [a for a in op.args if isinstance(a, str)]
        self.open -= set(named)
        if self.ended & set(named):
            raise _refused(f"{op.out} reads a value that is a part of another sum")
        sums = [a for a in named if a in self.parts or a in self.column_sums]
        sums += [a for a in named if a in self.offsets and self.offsets[a].summed]
        if sums and all(self.is_finished(a) for a in sums):
            self.read |= set(sums)
            sums = []  # it follows the sums
        if op.over is not None:
            if op.fn != "sum":
                raise _refused(f"{op.out} is a reduction, and no sum")
            is_sum = sums or self.is_column(named[0]) or named[0] in self.offsets
            if op.over in self.columns and is_sum:
                self.add_up(op.out, named[0], op.over)
            elif in_loop or op.over not in self.columns[: -len(self.own_columns)]:
                raise _refused(f"{op.out} reduces a value that is no product")
            return
        offset = self.offset_of(op)
        if offset is not None:  # floats may be zero points or scales
            self.offsets[op.out] = offset
        parts = [self.parts.get(a) if isinstance(a, str) else None for a in op.args]
        if any(parts) and sums:
            self.parts[op.out] = self.combined(op, parts)
        elif sums and offset is None:
            raise _refused(f"{op.out} reads a sum before it ends")
        elif op.fn == "mul" and (pair := self.columns_and_scale(op)) is not None:
            self.scaled[op.out] = pair
        elif named and all(a in self.elementwise for a in named):
            self.elementwise.add(op.out)

    def offset_of(self, op: BlockOp) -> _Offset | None:
        """Return what an op gives if it multiplies columns, or a sum of some, by an offset."""
        if op.fn != "mul" or len(op.args) != 2:
            return None
        for factor, value in (op.args, op.args[::-1]):
            if not (isinstance(value, str) and isinstance(factor, str) and self.is_offset(factor)):
                continue
            column, summed = self.column_sums.get(value, (value, frozenset()))
            other, scale = self.factors(column)
            if other and scale is None and summed != {*self.columns}:
                return _Offset(factor, other, summed)
        return None

    def combined(self, op: BlockOp, parts: list[_Part | None]) -> _Part:
        """Return what an elementwise op with codes gives."""
        first = parts[0]
        is_code = first is not None and first == _Part(first.codes)
        if first is not None and is_code and op.fn == "lookup":
            dtype = self.operand(self.block.inputs_by_name[first.codes]).dtype
            if dtype is not torch.uint4:
                raise _refused(f"{op.out} looks up codes of {dtype}")
            values = dict(op.attrs)["values"]
            assert isinstance(values, tuple)
            return replace(first, values=values)
        if first is not None and is_code and op.fn == "sub":
            zero = op.args[1]
            if isinstance(zero, (int, float)):
                return replace(first, zero=float(zero))
            if self.is_offset(zero):
                return replace(first, zero=zero)
        if first is not None and op.fn == "sub" and isinstance(op.args[1], str):
            offset = self.offsets.get(op.args[1])
            own = _Part(first.codes, other=first.other, summed=first.summed)  # plain codes
            if offset is not None and first == own and offset.fits(first):
                self.end(op)
                return replace(first, zero=offset.factor)
        if op.fn == "add" and len(parts) == 2:
            part, value = (first, op.args[1]) if first is not None else (parts[1], op.args[0])
            if part is not None and part.scale and not part.shift and isinstance(value, str):
                offset = self.offsets.get(value)
                if offset is None and self.is_offset(value):
                    offset = _Offset(value, ())
                if offset is not None and offset.fits(part):
                    self.end(op)
                    return replace(part, shift=offset.factor)
        if op.fn == "mul" and len(parts) == 2:
            part, factor = (parts[0], op.args[1]) if parts[1] is None else (parts[1], op.args[0])
            if part is not None and isinstance(factor, str) and factor not in self.parts:
                other, scale = self.factors(factor)
                carried = {*self.block.carried[factor]}
                if (other or scale) and not (scale and part.scale) and not carried & part.summed:
                    both = (*part.other, *other)
                    return replace(part, other=both, scale=scale or part.scale)
        raise _refused(f"{op.out} is {op.fn} of codes in a way that it does not compute")

    def end(self, op: BlockOp) -> None:
        """Note that the sums which an op reads are parts of its result."""
        named = {a for a in op.args if isinstance(a, str)}
        if both := sorted(named & self.read):
            raise _refused(f"{both[0]} is a part of {op.out}, and other values read it")
        self.ended |= {a for a in named if a in self.parts or a in self.offsets}

    def factors(self, value: str) -> tuple[tuple[str, ...], str | None]:
        """Return the columns and the scale whose product a value is. Either may be missing."""
        if value in self.scaled:
            return self.scaled[value]
        if self.is_scale(value):
            return (), value
        return ((value,), None) if value in self.elementwise else ((), None)

    def columns_and_scale(self, op: BlockOp) -> tuple[tuple[str, ...], str] | None:
        """Return the factors of a product of columns and a scale, or of more columns."""
        if len(op.args) != 2 or not all(isinstance(a, str) for a in op.args):
            return None
        known = [self.factors(str(a)) for a in op.args]
        if not all(columns or scale for columns, scale in known):
            return None
        scales = [scale for _, scale in known if scale is not None]
        columns = tuple(column for found, _ in known for column in found)
        return (columns, scales[0]) if len(scales) == 1 and columns else None

    def is_of_columns(self, value: str) -> bool:
        """Return whether a value carries columns, and nothing else but the batch."""
        carried = {*self.block.carried[value]} - {self.batch}
        return bool(carried) and carried <= {*self.columns}

    def is_column(self, value: str) -> bool:
        """Return whether a value has all columns and no rows, and is no result of a reduction."""
        carried = {*self.block.carried[value]} - {self.batch}
        return value in self.elementwise and carried == {*self.columns}

    def is_scale(self, value: str) -> bool:
        """Return whether a value is an input of scales: constant, for each row and group."""
        i = self.block.inputs_by_name.get(value)
        if i is None or not self.is_grouped or (i.taken is None) != (self.taken is None):
            return False
        if self.operand(i).dtype in ZEROS:
            return False
        axes = tuple(a for a in i.axes if a is not None)
        inner = len(self.own_rows) - 1
        of_rows = axes == (*self.stored_rows, self.own_columns[0])
        of_blocks = inner > 0 and axes == (*self.stored_rows[:inner], self.own_columns[0])
        of_blocks &= self.row_pair is None
        sources = [self.op.operands[s] for s in i.sources]
        if not (of_rows or of_blocks) or not all(t.constant for t in sources):
            return False
        lies = self._lies_in_rows if self.taken is None else self._has_rows
        return all(lies(i, t) for t in sources) or (
            self.taken is None and of_rows and self._have_rows_side_by_side(i, sources)
        )

    def _have_rows_side_by_side(self, i: BlockInput, sources: list[DTensor]) -> bool:
        """Return whether scales or offsets of rows lie side by side, or all with gaps of one."""
        if self.row_pair is not None:
            return False
        return any(
            all(self._lies_in_columns(i, t, step) for t in sources)
            for step in range(1, _IN_TURNS + 1)
        )

    @property
    def is_grouped(self) -> bool:
        """Whether groups of columns may have scales."""
        return is_grouped(self.own_columns, self.pair or self.word, self.lanes)

    def is_offset(self, value: str) -> bool:
        """Return whether a value is an input of zero points or shifts, for each row and group."""
        i = self.block.inputs_by_name.get(value)
        if i is None or self.taken is not None or i in self.coded:
            return False
        axes = tuple(a for a in i.axes if a is not None)
        groups = self.own_columns[:1] if self.is_grouped else ()
        sources = [self.op.operands[s] for s in i.sources]
        if axes != (*self.stored_rows, *groups) or not all(t.constant for t in sources):
            return False
        if is_packed(sources[0].dtype):
            is_unsigned = sources[0].dtype is torch.uint4
            is_unsigned &= self.row_pair is None
            return is_unsigned and all(self._lies_in_words(i, t) for t in sources)
        return sources[0].dtype in COMPUTE_DTYPES and (
            all(self._lies_in_rows(i, t) for t in sources)
            or self._have_rows_side_by_side(i, sources)
        )

    def choose(self) -> None:
        """Tell products from other sums, and check that one kernel computes all of them."""
        products = [(out, p) for out, p in self.parts.items() if self.is_finished(out)]
        if not 1 <= len(products) <= _MOST_PRODUCTS:
            raise _refused(f"it has {len(products)} products with codes; it may have two at most")
        if len({tuple(sorted(p.other)) for _, p in products}) > 1:
            raise _refused("its codes are multiplied with different values")
        dtypes = {self.operand(self.block.inputs_by_name[p.codes]).dtype for _, p in products}
        if len(dtypes) > 1 or len({p.values for _, p in products}) > 1:
            raise _refused("its codes have different dtypes or tables")
        self.values = values = products[0][1].values
        is_row = self.batch is None or self.block.axis(self.batch).size == 1
        as_bytes = table_bytes if is_row else table_halves
        if values and (self.word is not None or self.word_rows or self.lanes or self.row_pair):
            raise _refused("codes of a table lie as in GPTQ, AWQ, HQQ or torchao's tiles")
        if values and as_bytes(values) is None:
            raise _refused("its table has no positive and no negative half, or infinite entries")
        (dtype,) = dtypes
        zero = 0.0 if values else ZEROS[dtype]
        for out, part in products:
            if isinstance(part.zero, float) and part.zero != zero:
                raise _refused(f"{out} subtracts {part.zero} from codes, not {zero}")
            if isinstance(part.zero, str) and part.shift:
                raise _refused(f"{out} subtracts zero points, and adds shifts")
        self.products = tuple(
            Product(out, p.codes, p.scale, p.zero if isinstance(p.zero, str) else None, p.shift)
            for out, p in products
        )
        kinds = {(p.zero is not None, p.shift is not None) for p in self.products}
        if len(kinds) > 1:
            raise _refused("zero points or shifts are not those of all codes")
        if kinds != {(False, False)} and (values or dtype.is_floating_point):
            raise _refused("codes are floats and have zero points or shifts")
        finished = [out for out in self.column_sums if self.is_finished(out)]
        self.sums = tuple((out, self.column_sums[out][0]) for out in finished)
        self.other = products[0][1].other
        if {a for v in self.other for a in self.block.carried[v]} - {self.batch} != {*self.columns}:
            raise _refused("what codes are multiplied with does not have all columns")

    # -- sizes ------------------------------------------------------------------------------------

    def check_sizes(self, found: Products) -> None:
        """Check what the copies and the instructions need."""
        if found.group % 32 or found.piece_columns % 64 or found.row_bytes % 16:
            raise _refused(f"{found.piece_columns} columns in groups of {found.group} do not fit")
        every = [n for p in found.products for n in found.source_rows(p.codes)]
        least = found.least_rows if found.is_column_major else found.rows_of_each
        if any(n % least for n in every):
            raise _refused(f"rows of codes are no multiple of {least}")
        for name in found.read_columns:
            self._check_columns(found, name)
        scales = {p.scale for p in found.products if p.scale is not None}
        zeros = {p.zero for p in found.products if p.zero is not None}
        shifts = [p.shift for p in found.products if p.shift is not None]
        if any(is_packed(found.tensor(name).dtype) for name in shifts):
            raise _refused("shifts are codes")
        coded = {p.codes for p in found.products}
        for i in self.block.inputs:
            if self.operand(i).dtype in ZEROS and i.name not in coded | zeros:
                raise _refused(f"{i.name} holds codes that it does not multiply")
        for i in self.block.inputs:
            if is_exponent(self.operand(i).dtype) and i.name not in scales:
                raise _refused(f"{i.name} holds powers of two that are no scales")
        for p, grouped in found.grouped:
            if grouped is not None:
                self._check_grouped(found, p, grouped)
        if found.taken is not None:
            self._check_index(found, found.taken)

    def _check_columns(self, found: Products, name: str) -> None:
        i, t = self.block.inputs_by_name[name], found.tensor(name)
        axes = tuple(a for a in i.axes if a and a != self.batch)
        if t.dtype not in COMPUTE_DTYPES:
            raise _refused(f"{name} holds {t.dtype}")
        if found.is_of_pieces(name) and axes == (found.piece,):
            return
        if i.joined is not None or axes != self.columns or not self._lies_in_rows(i, t):
            raise _refused(f"{name} does not have all columns side by side")
        if found.batch_stride(name) * t.dtype.itemsize % _LOADED:
            raise _refused(f"the rows of {name} do not begin at multiples of {_LOADED} bytes")

    def _check_grouped(self, found: Products, p: Product, name: str) -> None:
        """Check scales or zero points of a product."""
        t = found.tensor(name)
        groups = found.num_groups
        inner = self.block.axis(self.rows[-1]).size
        rows = found.rows_of_each if found.is_of_rows(name) else 1
        if rows == 1 and inner % found.rows_of_each:
            raise _refused(f"blocks of {inner} rows share scales, and tiles would cross them")
        is_plain = rows > 1 and self.taken is None and not is_packed(t.dtype)
        if found.is_in_columns(name):
            groups = found.row_step(name)  # copies bring one group of all rows of a tile
        elif is_plain and not found.has_groups_side_by_side(name):
            raise _refused(f"the rows of {name} have gaps")
        if found.row_pair is not None:
            rows //= 2  # a copy brings those of one half
        bits = 4 if is_packed(t.dtype) else 8 * t.dtype.itemsize
        if self.taken is None and rows * groups * bits % (8 * _LOADED):
            what = "zero points" if name == p.zero else "shifts" if name == p.shift else "scales"
            raise _refused(f"{groups} {what} of {name} for a row are no multiple of 16 bytes")
        own = self.block.inputs_by_name[name]
        if own.sizes != self.block.inputs_by_name[p.codes].sizes:
            raise _refused(f"{name} is not joined as {p.codes} is")

    def _check_index(self, found: Products, taken: Taken) -> None:
        """Check that an index is plain, and that its experts begin at multiples of 16 bytes."""
        t, expected = self.op.operands[taken.index], 1
        for axis, stride in reversed([*zip(taken.axes, t.strides, strict=True)]):
            if axis is not None:
                if stride != expected:
                    raise _refused("the elements of the index do not lie side by side")
                expected *= self.block.axis(axis).size
        if found.sums:
            raise _refused("it has an index, and other sums")
        for p in found.products:
            is_zero = not (found.values[0] if found.values else ZEROS[found.dtype])
            if p.scale is None and not is_zero:
                # the code of a missing expert is 0, which stands for another number
                raise _refused(f"{p.codes} has an index and no scale, and code 0 is not 0")
            strides = found.row_stride(p.codes), found.chosen_stride(p.codes)
            if any(s * found.bits % (8 * _LOADED) for s in strides):
                raise _refused(f"the rows of {p.codes} do not begin at multiples of 16 bytes")


def _place(taken: Taken) -> tuple[int, tuple[str | None, ...], int]:
    """Return what equal indices have in common, whatever dim they choose from."""
    return taken.index, taken.axes, taken.size


def _is_unread(dtype: torch.dtype) -> bool:
    """Return whether a dtype is one of codes that are neither multiplied nor scales."""
    return dtype in CODE_DTYPES and dtype not in ZEROS and not is_exponent(dtype)


def _refused(why: str) -> errors.CodegenError:
    return errors.CodegenError(f"no kernel that streams codes: {why}; use a Triton kernel")
