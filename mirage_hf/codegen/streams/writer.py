"""What all parts of the text of a kernel that streams codes need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from mirage_hf.codegen.cuda_math import TYPES
from mirage_hf.codegen.cuda_nests import Nest, NestWriter, Operand
from mirage_hf.codegen.placement import PlacedOp
from mirage_hf.codegen.streams.layout import StreamLayout
from mirage_hf.graph.block import BlockInput
from mirage_hf.graph.coded import is_exponent, is_packed

#: Numbers of barriers. At the first one all threads meet, once the other factor is in place. At the
#: second one the threads that compute meet: before and after a later span's factor is written, and
#: at the end.
FACTOR_READY, COMPUTED = 1, 2

#: Names of the text, which values of the block graph may not have.
_NAMES = frozenset(
    """
    above at b b_0 batch below bits blocks chunk_bytes chunks codes columns digits expert
    exponent factor first first_0 first_1 from g group halves held held_digits held_step
    held_steps high_0 high_1 holds is_swapped j k lane largest left less lie_together low_0
    low_1 low_less low_sums lower lower_0 lower_1 m magic mine more n of_piece of_tile own piece
    pitch place q r right row row_0 row_bytes row_team row_teams row_threads row_tid row_warp
    row_warps scaled share sharers shift_0 shift_1 size span stages step stores sums t team
    team_warp team_warps tiles to unit unit_sum unit_sums units up upper upper_0 upper_1 vector
    w walker walkers warp warps word word_step Words worth_0 worth_1 zero_0 zero_1
    """.split()
)


#: What numbered names of the text begin with.
_PREFIXES = tuple("begin_ first_ from_ own_ place_ step_ sum_ table_ to_ words_ x_".split())


class StreamWriter(NestWriter):
    """Holds the text of a kernel, its layout and its names."""

    def var(self, name: str) -> str:
        """Return a C++ name for a value."""
        given, name = name, super().var(name)
        is_numbered = name == given and name.startswith(_PREFIXES)
        is_taken = name in _NAMES or is_numbered or name.endswith("_held")
        return name + "_" if is_taken else name

    def __init__(self, layout: StreamLayout, op: PlacedOp, name: str):
        self.layout, self.found = layout, layout.products
        operands = [Operand(t.dtype, t.strides, constant=t.constant) for t in op.operands]
        outputs = [Operand(t.dtype, t.strides) for t in op.outputs]
        super().__init__(self.found.block, operands, outputs, {}, name, 32 * layout.warps)
        self.early = layout.schedule.trigger_early
        self.coded = {p.codes for p in self.found.products}
        self.scales = {p.scale for p in self.found.products if p.scale is not None}
        self.offsets = {p.offset for p in self.found.products if p.offset is not None}

    @property
    def has_index(self) -> bool:
        """Whether an index chooses among experts."""
        return self.found.taken is not None

    @property
    def summing_warps(self) -> str:
        """The text of the number of warps that have sums of a tile."""
        return "team_warps" if self.sums_by_team else "warps"

    @property
    def summing_warp(self) -> str:
        """The text of the number of a warp among those that have sums of its tile."""
        return "team_warp" if self.sums_by_team else "warp"

    @property
    def sums_by_team(self) -> bool:
        """Whether one team has all sums of a tile."""
        return self.layout.summing_warps < self.layout.warps

    @property
    def walker(self) -> str:
        """The number of the block among those that walk tiles: that of its cluster, if any."""
        return "walker" if self.layout.sharers > 1 else "int(blockIdx.x)"

    @property
    def walkers(self) -> str:
        """How many blocks walk tiles, or clusters."""
        return "walkers" if self.layout.sharers > 1 else "blocks"

    def before_share(self, of_share: int, first: str = " + ") -> str:
        """Return the text of how much lies before a block's share of columns. Empty: nothing.

        Args:
            of_share: How much a share is.
            first: What comes first in the text.
        """
        return f"{first}share * {of_share}" if self.layout.sharers > 1 else ""

    def each_piece(self) -> AbstractContextManager[None]:
        """Write the loop over pieces `q`, if there are several, and which expert each is of.

        The number of an expert is negative if it does not exist.
        """
        return self._pieces() if self.has_index else nullcontext()

    @contextmanager
    def _pieces(self) -> Iterator[None]:
        pieces, choice = self.found.num_pieces, f"row_0 / {self.found.num_own_rows}"
        with self.scope(f"for (int q = 0; q < {pieces}; ++q)") if pieces > 1 else nullcontext():
            at = f"{choice} * {pieces} + q" if pieces > 1 else choice
            self.put(f"const int expert = shared.chosen[{at}];")
            yield

    def scale_begin(self, number: int) -> str:
        """Return the address of the first scale of a tile that an expert has, as an integer."""
        p = self.found.products[number]
        assert p.scale is not None
        i, rows = self.inputs[p.scale], f"row_0 % {self.found.num_own_rows}"
        if self.layout.scale_rows(p.scale) == 1:
            rows = f"{rows} / {self.block.axis(self.found.rows[-1]).size}"
        chosen, own = self.found.chosen_stride(p.scale), self.found.row_stride(p.scale)
        return (
            f"reinterpret_cast<unsigned long long>({self.pointer(i, 0)} + expert * {chosen}LL + "
            f"{rows} * {own})"
        )

    def scale_shift(self, number: int) -> str:
        """Return the bytes from a multiple of 16 to the first scale of a tile of an expert."""
        p = self.found.products[number]
        assert p.scale is not None
        size = self.found.tensor(p.scale).dtype.itemsize
        chosen, row = self.found.chosen_stride(p.scale), self.found.row_stride(p.scale)
        of_tile = row * (self.layout.tile_rows if self.layout.scale_rows(p.scale) > 1 else 1)
        if chosen * size % 16 or of_tile * size % 16:
            return f"{self.scale_begin(number)} & 15"
        pointer = self.pointer(self.inputs[p.scale], 0)
        return f"reinterpret_cast<unsigned long long>({pointer}) & 15"

    @property
    def has_spans(self) -> bool:
        """Whether the other factor has several spans of columns. The text numbers them `span`."""
        return self.layout.spans > 1

    @property
    def chunk_number(self) -> str:
        """The number of chunk `c` among those of a tile."""
        return f"(span * {self.layout.span_chunks} + c)" if self.has_spans else "c"

    def first_of_tile(self, number: int) -> str:
        """Return the address of the first scale or offset of a tile in the first group of columns.

        Scales or offsets of successive rows lie side by side.
        """
        p, name = self.found.grouped[number]
        assert name is not None
        step = self.found.row_step(name)
        of_row = "/ 2" if is_packed(self.found.tensor(name).dtype) else f"* {step}" * (step > 1)
        return self._of_source(
            self.inputs[name],
            self.found.source_rows(p.codes),
            "row_0",
            lambda at: f" + {at} {of_row}".rstrip(),
        )

    def _of_source(
        self, i: BlockInput, pieces: Sequence[int], row: str, address: Callable[[str], str]
    ) -> str:
        """Return an address in the source of an input that holds a row."""
        text, start = "", 0
        for k, count in enumerate(pieces):
            at = f"({row} - {start})" if start else row
            piece = f"{self.pointer(i, k)}{address(at)}"
            start += count
            text += piece if k == len(pieces) - 1 else f"{row} < {start} ? {piece} : "
        return f"({text})" if len(pieces) > 1 else text

    def scale_slot(self, number: int) -> str:
        """Return the place of scales, zero points or shifts of tile `i`, its piece, or its chunk.

        Args:
            number: Their number in `Products.grouped`.
        """
        place = f"shared.{self.kind_of(number)}_{number % len(self.found.products)}"
        if self.layout.comes_with_chunks(number):
            return f"{place}[s]"
        tile = "(span * mine + i)" if self.has_spans else "i"
        if self.has_index:
            tile = "(n / chunks)"  # those that are missing have no slot
        return f"{place}[{tile} % {self.layout.scale_slots(number)}]"

    def kind_of(self, number: int) -> str:
        """Return "scales", "zeros" or "shifts": what a number in `Products.grouped` stands for."""
        if number < len(self.found.products):
            return "scales"
        return "zeros" if self.found.grouped[number][0].shift is None else "shifts"

    def of_span(self, full: int, last: int) -> str:
        """Return the text of a count that the last span may have less of."""
        return f"(span < {self.layout.spans - 1} ? {full} : {last})" if full != last else f"{full}"

    def add_to(self, place: str, value: str) -> str:
        """Return a statement that stores a value, or adds it to that of earlier spans."""
        return f"{place} = {value}{f' + (span ? {place} : 0.0f)' if self.has_spans else ''};"

    def of_batch(self, count: int) -> str:
        """Return the text of `count` times the batch."""
        return f"{count} * batch" if self.layout.batch > 1 else f"{count}"

    def swapped(self, word: str) -> str:
        """Return what the number of a vector is combined with in shared memory, by exclusive or.

        Args:
            word: The row of words in a chunk.
        """
        return f"({word} & 3) * 2" if self.layout.vectors >= 8 else f"({word} & 2)"

    # -- values -----------------------------------------------------------------------------------

    def ctype(self, value: str) -> str:
        """Return an input's C++ type."""
        dtype = self.operands[self.inputs[value].sources[0]].dtype
        return "unsigned char" if is_exponent(dtype) else TYPES[dtype]

    def coordinates_of(self, i: BlockInput) -> list[str]:
        """Return the axes that say which element of an input is read."""
        chosen = () if i.taken is None else i.taken.axes
        return [a for a in (*i.axes, *chosen) if a is not None]

    def element(self, value: str) -> str:
        """Return the address of an input's current element."""
        arguments = ", ".join(f"at_{a}" for a in self.coordinates_of(self.inputs[value]))
        return f"{self.var(value)}_at({arguments})"

    def address(self, i: BlockInput) -> str:
        """Return a C++ lambda from coordinates to the address of an input's element.

        If an index chooses the element, and the expert does not exist, there is no address.
        """
        if i.taken is None:
            return super().address(i)
        (source,), index = i.sources, self.operands[i.taken.index]
        pairs = zip(i.taken.axes, index.strides, strict=True)
        at = " + ".join(f"at_{a}" + (f" * {s}" if s != 1 else "") for a, s in pairs if a) or "0"
        pairs = zip(i.axes, self.operands[source].strides, strict=True)
        terms = "".join(f" + at_{a} * {s}LL" for a, s in pairs if a)
        parameters = ", ".join(f"int at_{a}" for a in self.coordinates_of(i))
        kind, chosen = self.ctype(i.name), self.found.chosen_stride(i.name)
        return (
            f"const auto {self.var(i.name)}_at = [&]({parameters}) {{ "
            f"const int expert = shared.chosen[{at}]; return expert < 0 ? (const {kind}*)nullptr : "
            f"{self.pointer(i, 0)} + expert * {chosen}LL{terms}; }};"
        )

    def read(self, value: str) -> str:
        """Return the text of an input's current element."""
        if self.inputs[value].taken is None:
            return f"to_float(*{self.element(value)})"
        return f"read_if_any({self.element(value)})"

    def ref(self, nest: Nest, value: str) -> str:
        """Return the text of a value at the current element.

        Values it needs are defined first, each once. A sum over pieces is a loop.
        """
        op = self.ops.get(value)
        if value in nest.known or value in self.staged:
            return super().ref(nest, value)
        name = self.var(value)
        if value in self.inputs:
            self.put(f"const float {name} = {self.read(value)};")
        elif op is not None and op.over is not None:
            self.put(f"float {name} = 0.0f;", "#pragma unroll")
            count = self.found.num_pieces
            with self.scope(f"for (int at_{op.over} = 0; at_{op.over} < {count}; ++at_{op.over})"):
                inner = Nest((), None, 1, known=dict(nest.known))
                self.put(f"{name} += {self.ref(inner, str(op.args[0]))};")
        else:
            return super().ref(nest, value)
        nest.known[value] = name
        return name

    @property
    def is_signed(self) -> bool:
        """Whether codes are signed integers."""
        return self.found.dtype in (torch.int4, torch.int8)
