"""The dims of tensors inside a kernel, and the products that run on tensor cores.

A tensor has one dim for each axis that it carries and whose tile is larger than 1, in
`TensorLayout.order`. Axes of tile 1 are scalars.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from mirage_hf.codegen.plan import code_order
from mirage_hf.codegen.plan.code_runs import byte_words, partial_sums, run_lengths
from mirage_hf.codegen.plan.small_codes import SmallCodes, small_codes
from mirage_hf.codegen.plan.stages import running_maxima
from mirage_hf.codegen.plan.tiling import Tiling
from mirage_hf.graph.block import BlockInput, BlockOp, Contraction, Role
from mirage_hf.graph.coded import is_packed
from mirage_hf.graph.grouped_products import GroupedProduct
from mirage_hf.ops.dtypes import CODE_DTYPES, CODES_PER_WORD, COMPUTE_DTYPES

#: Fewest rows of a product on tensor cores, and fewest elements that each of its sums adds.
MMA_MIN = 16

#: Fewest columns of a product on tensor cores.
MMA_COLUMNS = 8

#: Most elements of an axis that are unrolled, so that each is a variable of its own.
MOST_UNROLLED = 8

#: Bits of a packed code.
_CODE_BITS = 32 // CODES_PER_WORD

#: Ends the name of a dim that numbers the runs of an axis.
_RUNS = "/runs"

#: Most orders of axes that are tried. These are all orders of seven axes.
_MOST_ORDERS = 5040


@dataclass(frozen=True)
class Dot:
    """A product on tensor cores: `out` = left · right, both cast to `dtype`.

    The rows may range over several axes, like heads and queries. So may the columns.
    """

    contraction: Contraction
    left: str
    right: str
    #: True if the left tile is stored as (over, rows) instead of (rows, over).
    left_transposed: bool
    #: True if the right tile is stored as (columns, over) instead of (over, columns). A right tile
    #: of one column has only the dim `over`.
    right_transposed: bool
    dtype: torch.dtype
    #: The axis of groups, if the product sums over several in a tile. See code_order.py.
    groups: str | None = None

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes that the product sums over."""
        over = self.contraction.over
        return (over,) if self.groups is None else (self.groups, over)


@dataclass(frozen=True)
class TensorLayout:
    """The dims of a kernel's tensors. The tiling and the kind of product alone decide them."""

    tiling: Tiling
    #: Products that fit run on tensor cores (`Schedule.mma`).
    mma: bool
    #: The larger operand is the left one (`Schedule.weights_first`).
    weights_first: bool

    # -- dims -------------------------------------------------------------------------------------

    def dims(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the axes among `axes` that are dims of a tensor, in order."""
        return tuple(a for a in self._all_dims if a in axes)

    @cached_property
    def _all_dims(self) -> tuple[str, ...]:
        """All axes that can be dims, in order."""
        return tuple(filter(self.is_dim, self.order))

    def is_dim(self, axis: str) -> bool:
        """Return True if an axis is a dim of the tensors that carry it."""
        return self.tiling.tile(axis) > 1 and axis != self.unrolled

    def value_dims(self, value: str) -> tuple[str, ...]:
        """Return the dims of a value. The runs of a partial sum are its last dim."""
        dims = self.dims(self.tiling.block.carried[value])
        over = self.partial_sums.get(value)
        return dims if over is None else (*dims, runs_of(over))

    def dim_size(self, dim: str) -> int:
        """Return the size of a dim in a tile: of an axis, or of its runs."""
        over = dim.removesuffix(_RUNS)
        size = self.tiling.tile(over)
        return size if over == dim else size // self.run_lengths[over]

    @cached_property
    def run_lengths(self) -> Mapping[str, int]:
        """How many codes a thread adds on its own, by axis. See code_runs.py."""
        return {} if self.mma else run_lengths(self.tiling)

    @cached_property
    def partial_sums(self) -> Mapping[str, str]:
        """The values that have one element for each run of codes, with the axis of the runs."""
        return partial_sums(self.tiling, self.run_lengths) if self.run_lengths else {}

    @cached_property
    def byte_words(self) -> Mapping[str, str]:
        """The inputs whose bytes are loaded as words of four codes, with the axis of a word."""
        if not self.run_lengths:
            return {}
        words = byte_words(self.tiling, self.run_lengths)
        return {name: axis for name, axis in words.items() if name not in self.kept_as_stored}

    @cached_property
    def unrolled(self) -> str | None:
        """The axis whose elements in a tile are separate variables instead of a dim, if any.

        These are the rows of products by multiply-adds. If they were a dim, the weights would be
        broadcast against it. Triton would first move all weights to another register layout.
        """
        if self.mma:
            return None
        tiling, block = self.tiling, self.tiling.block
        rows = {
            a
            for c in block.contractions.values()
            for a in set(block.carried[c.a]) ^ set(block.carried[c.b])
            if a not in block.carried[self._weight(c)]
        }
        rows -= {a for i in block.inputs if len(i.sources) > 1 for a in i.carried}
        rows -= {a for i in block.inputs if i.taken is not None for a in i.carried}
        rows -= {a for i in block.inputs if is_packed(tiling.dtype(i)) for a in i.carried}
        for a in block.named(Role.GRID):
            if a.name in rows and 1 < tiling.tile(a.name) <= MOST_UNROLLED:
                return a.name
        return None

    @property
    def lanes(self) -> int:
        """The number of variables for the elements of the unrolled axis."""
        return self.tiling.tile(self.unrolled) if self.unrolled else 0

    @cached_property
    def spreadable(self) -> frozenset[str]:
        """The accumulators that may stay spread over the loop tile inside the loop.

        A running maximum must be that of whole tiles, because the body reads it. A sum that is
        relative to it is rescaled as it grows. So both are reduced in each step.
        """
        loop, carried = self.tiling.loop, self.tiling.block.carried
        if loop is None or not self.is_dim(loop):
            return frozenset()
        return frozenset(
            a.out
            for s in self.tiling.block.stages
            for a in s.accumulators
            if a.out not in self.dots
            and a.shift is None
            and loop in carried[a.arg]
            and a.out not in running_maxima(s)
        )

    @cached_property
    def accumulated(self) -> dict[str, int]:
        """The elements of each accumulator, by name. The unrolled axis does not count."""
        return self._accumulated(self.tiling.tile)

    @cached_property
    def accumulated_within(self) -> dict[str, int]:
        """The same up to the ends of axes, see `Tiling.within`."""
        return self._accumulated(self.tiling.within)

    def _accumulated(self, size: Callable[[str], int]) -> dict[str, int]:
        return {
            a.out: math.prod(size(axis) for axis in a.axes if self.is_dim(axis))
            for a in self.tiling.block.accumulators
        }

    @cached_property
    def accumulated_elements(self) -> int:
        """The elements of all accumulators."""
        return sum(self.tiling.elements[a.out] for a in self.tiling.block.accumulators)

    # -- order of dims ----------------------------------------------------------------------------

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The axes in the order of tensor dims.

        Grid axes come first, then tile axes, then the loop axis. A tensor-core product may change
        this: it wants its rows before its summed axis, and its summed axis before its columns.
        """
        axes = [
            a.name
            for role in (Role.GRID, Role.TILE, Role.LOOP)
            for a in self.tiling.block.named(role)
        ]
        wishes = _PartialOrder(axes)
        for over in self.run_lengths:
            self._wish_for_runs(wishes, over)
        for i in self._inputs_of_several_products():
            for first, second in itertools.pairwise(self._stored_order(i)):
                wishes.add(first, second)
        for c in self._mma_contractions:
            choices = list(self._wished_orders(c))
            for first, second in next(filter(wishes.allow, choices), choices[0]):
                wishes.add(first, second)
        order = wishes.sorted()
        if not self._becomes_tf32(order):
            return order
        safe_orders = (
            p
            for p in itertools.islice(wishes.all_orders(order), _MOST_ORDERS)
            if not self._becomes_tf32(p)
        )
        return next(safe_orders, order)

    def _wish_for_runs(self, wishes: _PartialOrder, over: str) -> None:
        """Let threads share the runs of codes of one row, and hold several rows each.

        So a thread needs few other factors. Triton 3.6 spreads threads over the last dim, then
        over the first, then over those between.
        """
        grid = [a.name for a in self.tiling.block.named(Role.GRID)]
        others = [a for a in self.tiling.tiles if a not in grid and a != over]
        for a in others:
            for row in grid:
                wishes.add(a, row)
        for a in (*others, *grid):
            wishes.add(a, over)

    def _inputs_of_several_products(self) -> Iterator[BlockInput]:
        """Yield the inputs that several products read, summed over different axes.

        They keep the order in which they are stored. Otherwise Triton 3.6 does not copy them ahead.
        """
        factors = dict.fromkeys(x for c in self._mma_contractions for x in (c.a, c.b))
        for name in factors:
            summed = {c.over for c in self._mma_contractions if name in (c.a, c.b)}
            if name in self.tiling.inputs and len(summed) > 1:
                yield self.tiling.inputs[name]

    def _stored_order(self, i: BlockInput) -> list[str]:
        """Return the dims of an input by falling stride."""
        strides = self.tiling.operands[i.sources[0]].strides
        stored = sorted(
            (-stride, axis)
            for axis, stride in zip(i.axes, strides, strict=True)
            if axis and self.tiling.tile(axis) > 1
        )
        return [axis for _, axis in stored]

    def _wished_orders(self, c: Contraction) -> Iterator[list[tuple[str, str]]]:
        """Yield pairs (earlier, later) of axes for a product: as scheduled, then transposed."""
        left, right = self._sides(c)
        for x, y in ((left, right), (right, left)):
            summed = self._summed(c)
            rows_first = [(a, s) for a in self._free(x, c) for s in summed]
            columns_last = [(s, a) for a in self._free(y, c) for s in summed]
            yield rows_first + columns_last + list(itertools.pairwise(summed))

    def _becomes_tf32(self, order: Sequence[str]) -> bool:
        """Return True if Triton would move a sum of float32 products to TF32 tensor cores.

        Triton 3.6 rewrites a sum over the middle dim of x[m, k, 1] · y[1, k, n] as a `tl.dot` with
        rounded factors. Its errors were 25 times those of multiply-adds. Triton does not do this if
        the summed axis is first or last.
        """
        block, tiling = self.tiling.block, self.tiling
        on_tensor_cores = {c.product for c in self._mma_contractions}
        for c in block.contractions.values():
            carried = {*block.carried[c.a], *block.carried[c.b]} - {self.unrolled}
            dims = [a for a in order if a in carried and tiling.tile(a) > 1]
            if c.product not in on_tensor_cores and c.over in dims[1:-1]:
                return True
        return False

    # -- tensor cores -----------------------------------------------------------------------------

    @cached_property
    def dots(self) -> dict[str, Dot]:
        """The products on tensor cores, by the name of the sum."""
        dots = {}
        for c in self._mma_contractions:
            dot = self._dot(c)
            if dot is not None:
                dots[c.out] = dot
        return dots

    def _dot(self, c: Contraction) -> Dot | None:
        """Return a product as `tl.dot` takes it, if its rows and its columns are adjacent dims."""
        place = {a: n for n, a in enumerate(self.order)}
        free = {x: sorted(place[a] for a in self._free(x, c)) for x in (c.a, c.b)}
        # A factor without rows of its own is one column.
        left, right = sorted((c.a, c.b), key=lambda x: (not free[x], free[x]))
        summed = self._summed(c)
        over = place[c.over]
        if any(p and p[0] < place[a] < p[-1] for p in free.values() for a in summed):
            return None
        if not _are_adjacent([place[a] for a in summed], free.values()):
            return None
        if free[right] and free[left][-1] > free[right][0]:
            return None
        if self.tiling.numel(self._free(left, c)) < MMA_MIN:
            return None  # too few rows: they would have to be the columns
        inputs = [self.tiling.inputs[x] for x in (left, right) if x in self.tiling.inputs]
        stored = {d for i in inputs if (d := self.tiling.dtype(i)) not in CODE_DTYPES}
        if not stored:
            dtype = self.tiling.mma_dtype
        else:
            dtype = stored.pop() if len(stored) == 1 else torch.float32
        is_column_last = not free[right] or over < free[right][0]
        grouped = self._grouped.get(c.product)
        groups = None
        if grouped is not None and self.tiling.tile(grouped.groups) > 1:
            groups = grouped.groups
        return Dot(c, left, right, free[left][0] > over, not is_column_last, dtype, groups)

    def rows(self, dot: Dot) -> int:
        """Return the rows of a product's left tile."""
        return self._sizes_of_dots[dot.contraction.out][0]

    def columns(self, dot: Dot) -> int:
        """Return the columns of a product's right tile."""
        return self._sizes_of_dots[dot.contraction.out][1]

    @cached_property
    def _sizes_of_dots(self) -> dict[str, tuple[int, int]]:
        """The rows and the columns of each product on tensor cores, by the name of the sum."""
        sizes = {}
        for out, dot in self.dots.items():
            rows, columns = (self._free(x, dot.contraction) for x in (dot.left, dot.right))
            sizes[out] = self.tiling.numel(rows), self.tiling.numel(columns)
        return sizes

    @cached_property
    def _mma_contractions(self) -> tuple[Contraction, ...]:
        if not self.mma:
            return ()
        contractions = self.tiling.block.contractions.values()
        totals = {name: p.total for name, p in self._grouped.items()}
        products = (replace(c, out=totals.get(c.product, c.out)) for c in contractions)
        return tuple(c for c in products if self._fits_mma(c))

    @cached_property
    def _grouped(self) -> Mapping[str, GroupedProduct]:
        """The products that tensor cores sum over all groups of codes, by their names."""
        if not self.mma or not self.tiling.op.reads_packed_codes:
            return {}
        return code_order.groups_in_products(self.tiling)

    def _summed(self, c: Contraction) -> tuple[str, ...]:
        """Return the axes that a product on tensor cores sums over."""
        grouped = self._grouped.get(c.product)
        return (c.over,) if grouped is None else (grouped.groups, c.over)

    def _fits_mma(self, c: Contraction) -> bool:
        tiling = self.tiling
        a, b = (self._free(x, c) for x in (c.a, c.b))
        sizes = tiling.numel(a), tiling.numel(b)
        inputs = [tiling.inputs[x] for x in (c.a, c.b) if x in tiling.inputs]
        return (
            tiling.mma_dtype is not torch.float32
            and not set(a) & set(b)
            and tiling.numel(self._summed(c)) >= MMA_MIN
            and min(sizes) >= (1 if self._is_vector_of_codes(c) else MMA_COLUMNS)
            and max(sizes) >= MMA_MIN
            and all(tiling.dtype(i) in (*COMPUTE_DTYPES, *CODE_DTYPES) for i in inputs)
        )

    def _is_vector_of_codes(self, c: Contraction) -> bool:
        """Return True if a product multiplies codes with one vector.

        On tensor cores the codes of a vector take half as many instructions as with multiply-adds.
        """
        factors = [x for x in (c.a, c.b) if code_order.holds_codes(self.tiling, x)]
        return len(factors) == 1 and not all(self._free(x, c) for x in (c.a, c.b))

    def _free(self, value: str, c: Contraction) -> tuple[str, ...]:
        """Return the axes of a factor that a product does not sum over."""
        carried, summed = self.tiling.block.carried[value], self._summed(c)
        return tuple(a for a in carried if a not in summed and self.tiling.tile(a) > 1)

    def _sides(self, c: Contraction) -> tuple[str, str]:
        """Return the factors as (left, right), in the order that the schedule wants."""
        weight = self._weight(c)
        other = c.b if weight == c.a else c.a
        return (weight, other) if self.weights_first else (other, weight)

    def _weight(self, c: Contraction) -> str:
        """Return the factor with more data.

        An input, one scaled by another, or decoded codes count as more than a computed value. Of
        two such factors, the larger one is returned.
        """
        inputs, block = self.tiling.inputs, self.tiling.block

        def weigh(x: str) -> tuple[bool, int]:
            op = self.tiling.ops.get(x)
            is_scaled = op is not None and op.fn == "mul" and all(a in inputs for a in op.args)
            size = math.prod(block.axis(a).size for a in block.carried[x])
            return x in inputs or is_scaled or x in self.weights_of_codes, size

        return max((c.a, c.b), key=weigh)

    # -- codes ------------------------------------------------------------------------------------

    @cached_property
    def zero_points(self) -> Mapping[str, float]:
        """The number that is subtracted from codes as they are decoded, by packed input.

        It is subtracted at no cost if nothing reads the codes without subtracting it.
        """
        tiling, found = self.tiling, {}
        if not tiling.op.reads_packed_codes:
            return {}
        accumulated = {a.arg for s in tiling.block.stages for a in s.accumulators}
        for i in tiling.block.inputs:
            if not is_packed(tiling.dtype(i)) or i.name in accumulated:
                continue
            readers = [op for op in tiling.ops.values() if i.name in op.args]
            zeros = {op.args[1] if _subtracts_from(i.name, op) else None for op in readers}
            zero = zeros.pop() if len(zeros) == 1 else None
            if isinstance(zero, (int, float)) and zero in range(1 << 16):
                found[i.name] = float(zero)
        return found

    @cached_property
    def tables(self) -> Mapping[str, tuple[float, ...]]:
        """The tables of packed inputs whose codes are looked up as they are decoded.

        Only inputs whose codes nothing reads in another way have one.
        """
        tiling, found = self.tiling, {}
        if not tiling.op.reads_packed_codes:
            return {}
        accumulated = {a.arg for s in tiling.block.stages for a in s.accumulators}
        for i in tiling.block.inputs:
            if tiling.dtype(i) is not torch.uint4 or i.name in accumulated:
                continue
            readers = [op for op in tiling.ops.values() if i.name in op.args]
            tables = {dict(op.attrs)["values"] if op.fn == "lookup" else None for op in readers}
            table: Any = tables.pop() if len(tables) == 1 else None
            if table is not None and len(table) == 1 << _CODE_BITS:
                found[i.name] = table
        return found

    @cached_property
    def decoded(self) -> frozenset[str]:
        """The values that are there once codes are decoded.

        These are differences of codes and zero points, and elements of tables.
        """
        ops = self.tiling.ops.values()
        inputs = {*self.zero_points, *self.tables}
        if not inputs:
            return frozenset()
        return frozenset(op.out for op in ops if op.args and op.args[0] in inputs)

    @cached_property
    def small_codes(self) -> SmallCodes:
        """The 4-bit floats whose products are small until they are summed. See small_codes.py."""
        return small_codes(self.tiling, self.tables, self.unformed_products)

    @cached_property
    def code_factors(self) -> Mapping[str, torch.dtype]:
        """The 16-bit dtypes of factors in codes, and of the inputs that hold them.

        They are decoded to this dtype, in code order. See code_order.py.
        """
        if not self.dots or not self.tiling.op.reads_packed_codes:
            return {}
        products = ((d.contraction, d.dtype) for d in self.dots.values())
        return code_order.code_factors(self.tiling, products, self.zero_points)

    @cached_property
    def code_ordered(self) -> frozenset[str]:
        """The axes whose tiles are in code order."""
        factors = self.code_factors
        scaled = {p.factor for p in self._grouped.values() if p.value in factors}
        return frozenset(
            d.contraction.over
            for d in self.dots.values()
            if not {d.left, d.right}.isdisjoint(factors.keys() | scaled)
        )

    @cached_property
    def weights_of_codes(self) -> frozenset[str]:
        """The values that are computed from codes and other weights alone."""
        tiling = self.tiling
        constant = {i.name for i in tiling.block.inputs if tiling.is_constant(i)}
        made = {i.name for i in tiling.block.inputs if tiling.dtype(i) in CODE_DTYPES}
        for op in tiling.ops.values():
            read = {a for a in op.args if isinstance(a, str)}
            if op.over is None and read & made and read <= made | constant:
                made.add(op.out)
        return frozenset(made)

    # -- factors ----------------------------------------------------------------------------------

    @cached_property
    def unformed_products(self) -> frozenset[str]:
        """Elementwise products that only feed tensor cores and are never formed.

        Sums over one group are among them if tensor cores sum over several groups.
        """
        of_groups = {p.contraction.out for p in self._grouped.values() if p.total in self.dots}
        return frozenset(d.contraction.product for d in self.dots.values()) | of_groups

    @cached_property
    def scaled_factors(self) -> frozenset[str]:
        """The factors of tensor cores that are codes times the scale of their group."""
        scaled = {p.factor for p in self._grouped.values() if p.value in self.code_factors}
        return self.half_products & scaled

    @cached_property
    def half_products(self) -> frozenset[str]:
        """Products of two inputs that are computed in their 16-bit dtype.

        They are factors of tensor-core products only, all of that dtype. So they are rounded once,
        as a float32 product would be when it becomes a factor. One input may hold codes, which are
        exact in that dtype.
        """
        block = self.tiling.block
        kept = {o.value for o in block.outputs}
        kept |= {a.arg for s in block.stages for a in s.accumulators}
        dtypes = {x: d.dtype for d in self.dots.values() for x in (d.left, d.right)}
        return frozenset(
            x for x, dtype in dtypes.items() if x not in kept and self._is_half_product(x, dtype)
        )

    def _is_half_product(self, value: str, dtype: torch.dtype) -> bool:
        ops = self.tiling.ops
        op = ops.get(value)
        if op is None or op.fn != "mul" or op.over is not None or dtype.itemsize != 2:
            return False
        readers = [o.out for o in ops.values() if value in o.args]
        only_feeds_dots = all(r in self.unformed_products for r in readers)
        return only_feeds_dots and all(self._is_stored_in(a, dtype) for a in op.args)

    def _is_stored_in(self, x: str | float, dtype: torch.dtype) -> bool:
        if self.code_factors.get(str(x)) is dtype:
            return True
        i = self.tiling.inputs.get(str(x))
        if i is None or i.bounds is not None:
            return False
        is_scale = any(p.scale == i.name for p in self._grouped.values())
        if is_scale:
            return code_order.scales_in(self.tiling, i.name, dtype)
        return self.tiling.dtype(i) is dtype

    @cached_property
    def kept_as_stored(self) -> frozenset[str]:
        """Inputs that stay in the dtype they are stored in, instead of becoming float32.

        These are factors on tensor cores, and bytes of which the op `bits` takes some bits. Packed
        codes are decoded to float32 as they are loaded.
        """
        read: set[str | float] = {x for d in self.dots.values() for x in (d.left, d.right)}
        read |= {a for out in self.half_products for a in self.tiling.ops[out].args}
        inputs = self.tiling.inputs
        bytes_ = {n for n, i in inputs.items() if self.tiling.dtype(i) is torch.uint8}
        if bytes_:
            bits = [op for op in self.tiling.ops.values() if op.fn == "bits"]
            read |= {a for op in bits for a in op.args if a in bytes_}
        return frozenset(
            str(x) for x in read if x in inputs and not is_packed(self.tiling.dtype(inputs[str(x)]))
        )


def _are_adjacent(summed: Sequence[int], others: Iterable[Sequence[int]]) -> bool:
    """Return True if the places of summed dims rise, and no other dims are between them."""
    first, last = summed[0], summed[-1]
    return first <= last and not any(first < place < last for x in others for place in x)


def _subtracts_from(value: str, op: BlockOp) -> bool:
    """Return True if an op subtracts a number from a value."""
    return op.fn == "sub" and op.args[0] == value and not isinstance(op.args[1], str)


def runs_of(axis: str) -> str:
    """Return the name of the dim that numbers the runs of codes along an axis."""
    return axis + _RUNS


class _PartialOrder:
    """A partial order of axes: pairs of axes, the first to come before the second."""

    def __init__(self, axes: Sequence[str]) -> None:
        self._axes = list(axes)
        self._after: dict[str, set[str]] = {a: set() for a in axes}

    def add(self, first: str, second: str) -> None:
        """Let `first` come before `second`, unless the opposite was already wanted."""
        if not self._reaches(second, first):
            self._after[first].add(second)

    def allow(self, pairs: Sequence[tuple[str, str]]) -> bool:
        """Return True if no pair (first, second) contradicts the pairs that were added."""
        return not any(self._reaches(second, first) for first, second in pairs)

    def _reaches(self, start: str, goal: str) -> bool:
        return start == goal or any(self._reaches(x, goal) for x in self._after[start])

    def sorted(self) -> tuple[str, ...]:
        """Return the axes in a topological order that changes as little as possible."""
        axes, order = list(self._axes), []
        while axes:
            free = next(a for a in axes if not any(a in self._after[x] for x in axes))
            order.append(free)
            axes.remove(free)
        return tuple(order)

    def all_orders(self, start: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Yield the permutations of `start` that keep to the pairs that were added."""
        for p in itertools.permutations(start):
            if all(p.index(a) <= p.index(b) for a in self._after for b in self._after[a]):
                yield p
