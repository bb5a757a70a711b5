"""What all parts of the text of a kernel that streams codes need."""

from __future__ import annotations

import torch

from mirage_hf.codegen.cuda_nests import NestWriter, Operand
from mirage_hf.codegen.placement import PlacedOp
from mirage_hf.codegen.streams.layout import StreamLayout

#: Numbers of barriers. At the first one all threads meet, once the other factor is in place. At the
#: second one the threads that compute meet: before and after a later span's factor is written, and
#: at the end.
FACTOR_READY, COMPUTED = 1, 2

#: Names of the text, which values of the block graph may not have.
_NAMES = frozenset(
    """
    above at b b_0 batch below bits blocks chunk_bytes chunks codes columns digits exponent factor
    first g halves high_0 high_1 j lane largest left m low_0 low_1 lower lower_0 lower_1 magic mine
    n own own_row own_tile piece pitch right row row_0 row_bytes scaled second size span stages step
    stores sums t tiles to unit units up upper upper_0 upper_1 warp warps worth_0 worth_1
    w Words
    """.split()
)


class StreamWriter(NestWriter):
    """Holds the text of a kernel, its layout and its names."""

    def var(self, name: str) -> str:
        """Return a C++ name for a value."""
        name = super().var(name)
        is_taken = name in _NAMES or name.startswith("sum_") or name.endswith("_held")
        return name + "_" if is_taken else name

    def __init__(self, layout: StreamLayout, op: PlacedOp, name: str):
        self.layout, self.found = layout, layout.products
        operands = [Operand(t.dtype, t.strides, constant=t.constant) for t in op.operands]
        outputs = [Operand(t.dtype, t.strides) for t in op.outputs]
        super().__init__(self.found.block, operands, outputs, {}, name, 32 * layout.warps)
        self.early = layout.schedule.trigger_early
        self.coded = {p.codes for p in self.found.products}
        self.scales = {p.scale for p in self.found.products if p.scale is not None}

    @property
    def has_spans(self) -> bool:
        """Whether the other factor has several spans of columns. The text numbers them `span`."""
        return self.layout.spans > 1

    @property
    def chunk_number(self) -> str:
        """The number of chunk `c` among those of a tile."""
        return f"(span * {self.layout.span_chunks} + c)" if self.has_spans else "c"

    def scale_slot(self, number: int) -> str:
        """Return the place of the scales of tile `i`."""
        tile = "(span * mine + i)" if self.has_spans else "i"
        return f"shared.scales_{number}[{tile} % {self.layout.scale_slots}]"

    def of_span(self, full: int, last: int) -> str:
        """Return the text of a count that the last span may have less of."""
        return f"(span < {self.layout.spans - 1} ? {full} : {last})" if full != last else f"{full}"

    def add_to(self, place: str, value: str) -> str:
        """Return a statement that stores a value, or adds it to that of earlier spans."""
        return f"{place} = {value}{f' + (span ? {place} : 0.0f)' if self.has_spans else ''};"

    def of_batch(self, count: int) -> str:
        """Return the text of `count` times the batch."""
        return f"{count} * batch" if self.layout.batch > 1 else f"{count}"

    @property
    def is_signed(self) -> bool:
        """Whether codes are signed integers."""
        return self.found.dtype in (torch.int4, torch.int8)
