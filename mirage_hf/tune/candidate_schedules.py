"""List the schedules of a block graph that are worth an estimate: tiles, warps and stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from mirage_hf.codegen.plan.layout import MMA_COLUMNS, MMA_MIN
from mirage_hf.codegen.plan.pipelining import HELD_STAGES
from mirage_hf.codegen.schedule import Schedule, Tiles, next_power_of_two
from mirage_hf.graph.block import Axis, BlockGraph, BlockInput, Role
from mirage_hf.graph.coded import is_packed, word_dims
from mirage_hf.graph.grouped_products import grouped_products
from mirage_hf.graph.kernel import DTensor, KernelOp
from mirage_hf.ops.dtypes import BYTE_DTYPES, CODE_DTYPES
from mirage_hf.tune.decoding_tiles import decoding_tiles

#: Most rows that multiply-adds are tried for.
FMA_ROWS = 8

#: Most elements of a side of a tensor-core product that several axes share.
LONGEST_SIDE = 128

#: Grid axes of a kernel without products that get several tiles, the last ones. More blocks do the
#: same as longer tiles of the axes before.
_MOST_TILED = 3

#: Warps to try with multiply-adds.
_FMA_WARPS = (1, 2, 4, 8)

#: Warps and steps of a trip to try if multiply-adds of bytes hold the words of later steps.
_AHEAD_WARPS, _AHEAD_STEPS = (1, 2, 4, 8, 16), (1, 2, 4)

#: Pairs of warps and stages to try on tensor cores, if loops take several steps or are held whole.
_WALKED_MMA_LAUNCHES = tuple(itertools.product((4, 8), (2, 3, 4, 6)))
_HELD_MMA_LAUNCHES = ((4, 1), (8, 1))

#: The same with the weights as the second factor, tried if a tile has at least `_LONG_TILE`
#: elements.
_WALKED_WEIGHTS_SECOND = ((4, 3), (4, 4), (8, 3))
_HELD_WEIGHTS_SECOND = ((4, 1), (8, 1))
_LONG_TILE = 64

#: The same for codes. Each warp decodes 16 rows of its own, so short tiles need few warps. With one
#: stage, words are loaded one step ahead into registers.
_WALKED_CODED_LAUNCHES = ((1, 1), (1, 3), (1, 4), (2, 3), (2, 4))

#: Codes of a row in one step, if a product on tensor cores sums over several groups of them.
_CODES_OF_GROUPS = (128, 256)

#: The longest tile of their weights. Each block puts the other factor into code order, so fewer
#: blocks do less.
_LONGEST_OF_GROUPS = 256

#: Warps and stages to try for such products, with the weights as either factor.
_GROUPED_LAUNCHES = ((2, 3), (2, 4), (4, 2), (4, 3), (4, 4), (8, 2), (8, 3), (8, 4))

#: Most steps of a trip to try if a warp holds words ahead. Sixteen steps of 16 rows spilled
#: registers.
LONGEST_TRIP = 8


def candidate_schedules(op: KernelOp) -> Iterator[Schedule]:
    """Yield every schedule of an op to estimate: of multiply-adds, then of tensor cores."""
    assert op.block is not None
    has_packed_codes = bool(packed_axes(op))
    has_bytes = any(isinstance(t, DTensor) and t.dtype in BYTE_DTYPES for t in op.inputs)
    for mma in (False, True) if op.block.contractions else (False,):
        choices = _TileChoices(op, op.block, mma)
        for tiles in choices.all():
            walks = _walks_loop(op.block, tiles)
            if not mma:
                yield from _multiply_add_schedules(tiles, walks)
                if walks and has_bytes:
                    yield from _schedules_of_words(op.block, tiles)
                continue
            if walks and has_packed_codes and _takes_several_groups(op.block, tiles):
                for weights_first, launch in itertools.product((True, False), _GROUPED_LAUNCHES):
                    warps, stages = launch
                    yield Schedule(
                        tiles,
                        mma=True,
                        weights_first=weights_first,
                        num_warps=warps,
                        num_stages=stages,
                    )
                continue
            yield from _tensor_core_schedules(tiles, walks)
            if not walks and (padded := choices.with_rows(tiles)) is not None:
                for warps, stages in _HELD_WEIGHTS_SECOND:
                    yield Schedule(
                        padded, mma=True, weights_first=False, num_warps=warps, num_stages=stages
                    )
            if walks and has_packed_codes:
                for warps, stages in _WALKED_CODED_LAUNCHES:
                    yield Schedule(tiles, mma=True, num_warps=warps, num_stages=stages)
                for steps in _trips(op.block, tiles):
                    yield Schedule(tiles, mma=True, num_warps=1, steps_per_trip=steps)


def _takes_several_groups(block: BlockGraph, tiles: Mapping[str, int]) -> bool:
    """Return whether a product may sum over several groups of codes at once."""
    return any(tiles[p.groups] > 1 for p in grouped_products(block))


def _trips(block: BlockGraph, tiles: Mapping[str, int]) -> list[int]:
    """Return the steps of a trip to try: those that the steps of a loop are a multiple of."""
    (loop,) = block.named(Role.LOOP)
    steps = -(-block.split_size(loop.name) // tiles[loop.name])
    return [n for n in range(2, LONGEST_TRIP + 1) if steps % n == 0]


def packed_axes(op: KernelOp) -> dict[str | None, int]:
    """Return the axes along which words hold codes, with the least tile that has whole words."""
    assert op.block is not None
    operands = tuple(t for t in op.inputs if isinstance(t, DTensor))
    least: dict[str | None, int] = {}
    for i in op.block.inputs:
        for t in [operands[s] for s in i.sources if is_packed(operands[s].dtype)]:
            for d, count in word_dims(t.dims, t.strides).items():
                least[i.axes[d]] = max(count, least.get(i.axes[d], 1))
    return least


def _walks_loop(block: BlockGraph, tiles: Mapping[str, int]) -> bool:
    """Return whether a loop takes more than one step."""
    return any(tiles[a.name] < block.split_size(a.name) for a in block.named(Role.LOOP))


def _multiply_add_schedules(tiles: Mapping[str, int], walks: bool) -> Iterator[Schedule]:
    stages_to_try, lazy_to_try = ((1, 3), (True, False)) if walks else ((1,), (True,))
    for warps, stages, lazy in itertools.product(_FMA_WARPS, stages_to_try, lazy_to_try):
        yield Schedule(tiles, reduce_after_loop=lazy, num_warps=warps, num_stages=stages)


def _schedules_of_words(block: BlockGraph, tiles: Mapping[str, int]) -> Iterator[Schedule]:
    """Yield the schedules of multiply-adds that hold the words of later steps in registers."""
    trips = {1, *_trips(block, tiles)}
    for warps, steps in itertools.product(_AHEAD_WARPS, _AHEAD_STEPS):
        if steps in trips:
            yield Schedule(tiles, num_warps=warps, num_stages=HELD_STAGES, steps_per_trip=steps)


def _tensor_core_schedules(tiles: Mapping[str, int], walks: bool) -> Iterator[Schedule]:
    for warps, stages in _WALKED_MMA_LAUNCHES if walks else _HELD_MMA_LAUNCHES:
        yield Schedule(tiles, mma=True, num_warps=warps, num_stages=stages)
    if max(tiles.values()) >= _LONG_TILE:
        for warps, stages in _WALKED_WEIGHTS_SECOND if walks else _HELD_WEIGHTS_SECOND:
            yield Schedule(tiles, mma=True, weights_first=False, num_warps=warps, num_stages=stages)


class _TileChoices:
    """The tiles to try for a block graph, on tensor cores (`mma`) or not.

    A *side* of a matrix product is the set of axes that only one of its factors has: its rows or
    its columns.
    """

    def __init__(self, op: KernelOp, block: BlockGraph, mma: bool):
        self._op, self._block, self._mma = op, block, mma
        operands = tuple(t for t in op.inputs if isinstance(t, DTensor))
        largest = max(
            block.inputs, key=lambda i: sum(math.prod(operands[s].dims) for s in i.sources)
        )
        self._largest = largest
        self._largest_axes = set(largest.read_axes)
        self._packed_axes = packed_axes(op)
        #: What tiles must divide, so that a tile of words lies in one of several joined tensors.
        self._divided = {
            i.joined: math.gcd(*i.sizes[:-1])
            for i in block.inputs
            if len(i.sources) > 1 and is_packed(operands[i.sources[0]].dtype)
        }
        #: Pairs of grid axes of codes that split one dim: that of blocks, that within a block.
        self._nested: list[tuple[str, str]] = []
        #: Whether a product on tensor cores may sum over several groups of codes.
        self._has_groups = bool(self._packed_axes) and bool(grouped_products(block))
        #: The axes of codes that threads multiply.
        self._code_axes: set[str | None] = set()
        #: Those of them along which successive codes lie in different words.
        self._strided_axes: set[str | None] = set()
        codes = operands[largest.sources[0]]
        if codes.dtype in CODE_DTYPES and not mma:
            self._code_axes = self._largest_axes
            contiguous = {a for a, s in zip(largest.axes, codes.strides, strict=True) if s == 1}
            self._nested = self._nested_axes(largest, codes)
            self._strided_axes = self._code_axes - contiguous - self._packed_axes.keys()
        self._summed = {c.over for c in block.contractions.values()}
        self._sides: list[set[str]] = []
        #: The axes by which a result of another product is multiplied, such as added up parts.
        self._beside_results: set[str] = set()
        for c in block.contractions.values():
            left, right = (set(block.carried[x]) - {c.over} for x in (c.a, c.b))
            self._sides += [left - right, right - left]
            if c.a in block.contractions:
                self._beside_results |= right - left
            if c.b in block.contractions:
                self._beside_results |= left - right

    def _nested_axes(self, i: BlockInput, codes: DTensor) -> list[tuple[str, str]]:
        """Return the pairs (outer, inner) of grid axes that split one dim of the codes.

        A step along the outer axis passes all elements of the inner one.
        """
        grid = {a.name for a in self._block.named(Role.GRID) if a.size > 1}
        dims = [
            (a, n, s)
            for a, n, s in zip(i.axes, codes.dims, codes.strides, strict=True)
            if a is not None and a in grid
        ]
        return [
            (a, b)
            for a, _, s in dims
            for b, n, t in dims
            if a != b and b != i.joined and s == n * t and t > 0
        ]

    def all(self) -> Iterator[Tiles]:
        """Yield a tile for every axis, in all combinations that suit this kind of product."""
        choices = [self._whole_words(a, self._tiles(a)) for a in self._block.axes]
        names = [a.name for a in self._block.axes]
        if not self._sides and self._code_axes:
            decoding = decoding_tiles(self._op, self._largest, self._packed_axes)
            if decoding:
                yield from decoding
                return
        if not self._sides:
            grid = [n for n, a in enumerate(self._block.axes) if a.role is Role.GRID]
            tiled = [n for n in grid if len(choices[n]) > 1]
            choices = [c[:1] if n in tiled[:-_MOST_TILED] else c for n, c in enumerate(choices)]
        for sizes in itertools.product(*choices):
            tiles = Tiles(dict(zip(names, sizes, strict=True)))
            if not self._fills_inner(tiles):
                continue
            if not self._mma or all(self._fits(side, tiles) for side in self._sides):
                yield tiles

    def _fills_inner(self, tiles: Mapping[str, int]) -> bool:
        """Return whether tiles of codes cut only one of two axes that split one dim.

        A tile of two blocks of 32 rows reads what one of 64 rows does.
        """
        return all(
            tiles[outer] == 1 or tiles[inner] >= self._block.split_size(inner)
            for outer, inner in self._nested
        )

    def _tiles(self, a: Axis) -> tuple[int, ...]:
        """Return the tiles to try for one axis; empty if this kind of product does not suit it."""
        whole = next_power_of_two(self._block.split_size(a.name))
        if a.role is Role.TILE:
            if not self._mma or a.size <= 1:
                return (whole,)
            return (max(whole, MMA_MIN if a.name in self._summed else self._least(a)),)
        if a.role is Role.LOOP:
            steps = self._batch_tiles(whole) if self._is_batch(a) else self._loop_tiles(whole)
            steps += self._group_tiles(a, whole)
            if a.name not in self._strided_axes:
                return steps
            return tuple(sorted({*self._batch_tiles(whole), *steps}))
        if self._block.axis_split_by(a.name) is not None:
            return (1,)
        is_batch = self._sides and not any(a.name in side for side in self._sides)
        if is_batch and a.name not in self._code_axes:  # on both sides of every product, or on none
            return (1,)
        return self._tensor_core_grid_tiles(a, whole) if self._mma else self._grid_tiles(a, whole)

    def _whole_words(self, a: Axis, tiles: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tiles of whole words that lie in one tensor, if words hold codes."""
        if a.name in self._divided:
            tiles = tuple(t for t in tiles if self._divided[a.name] % t == 0)
        least, size = self._packed_axes.get(a.name), self._block.split_size(a.name)
        if least is None:
            return tiles
        whole = tuple(t for t in tiles if t >= least and size % t == 0)
        if whole or a.role is not Role.LOOP:
            return whole
        # such as 48, which no tile of 32 divides
        longest = size & -size
        return (longest,) if longest >= max(least, MMA_MIN if self._mma else 1) else ()

    def _is_batch(self, a: Axis) -> bool:
        """Return whether both factors of a product carry an axis that it does not sum over.

        An example is a loop over groups of codes: each group is a product of its own.
        """
        carried = self._block.carried
        return any(
            a.name != c.over and a.name in carried[c.a] and a.name in carried[c.b]
            for c in self._block.contractions.values()
        )

    def _batch_tiles(self, whole: int) -> tuple[int, ...]:
        """Return the tiles to try for a loop over products. Tensor cores take one at a time."""
        return (1,) if self._mma else _powers_of_two(1, min(32, whole))

    def _group_tiles(self, a: Axis, whole: int) -> tuple[int, ...]:
        """Return the groups to try in one product on tensor cores, if it may sum over several."""
        if not self._mma or not self._has_groups:
            return ()
        sizes = [
            self._block.split_size(p.contraction.over)
            for p in grouped_products(self._block)
            if p.groups == a.name
        ]
        codes = max(sizes, default=0)
        return tuple(n for n in _powers_of_two(2, whole) if codes * n in _CODES_OF_GROUPS)

    def _loop_tiles(self, whole: int) -> tuple[int, ...]:
        longest = 256 if self._mma else 4096
        shortest = max(whole, MMA_MIN) if self._mma else whole
        return _powers_of_two(32, min(longest, whole)) or (shortest,)

    def _grid_tiles(self, a: Axis, whole: int) -> tuple[int, ...]:
        if a.name in self._largest_axes | self._beside_results:
            return _powers_of_two(1, min(128, whole))
        # Rows: one tile of the largest input serves all of them. Codes may have no products on
        # tensor cores, so they are decoded again for each tile of rows.
        if whole <= FMA_ROWS:
            return (whole,)
        return (FMA_ROWS,) if self._code_axes and whole <= 2 * FMA_ROWS else ()

    def _tensor_core_grid_tiles(self, a: Axis, whole: int) -> tuple[int, ...]:
        shares_a_side = any(
            set(self._own_axes(side)) - {a} for side in self._sides if a.name in side
        )
        if shares_a_side:
            least = self._least(a)
            return _powers_of_two(least, min(128, max(whole, least)))
        is_rows = a.name not in self._largest_axes
        least = MMA_COLUMNS if is_rows and whole < MMA_MIN else MMA_MIN
        longest = 128 if is_rows or not self._has_groups else _LONGEST_OF_GROUPS
        return _powers_of_two(least, min(longest, max(whole, MMA_MIN)))

    def _own_axes(self, side: set[str]) -> list[Axis]:
        """Return the axes of a side that have tiles of their own."""
        return [
            x
            for x in self._block.axes
            if x.name in side
            and x.size > 1
            and x.role is not Role.LOOP
            and self._block.axis_split_by(x.name) is None
        ]

    def _least(self, a: Axis) -> int:
        """Return the smallest tile with which all products of an axis suit tensor cores.

        If all axes of a side are too short, one is padded. This is the last that is held whole, or
        the last of all if none is.
        """
        least = 1
        for side in self._sides:
            if a.name not in side:
                continue
            axes = list({x.name: x for x in (*self._own_axes(side), a)}.values())
            axes.sort(key=lambda x: (x.role is Role.TILE, self._block.axes.index(x)))
            if axes[-1] is a:
                rest = math.prod(next_power_of_two(x.size) for x in axes[:-1])
                enough = self._shortest(side)
                least = max(least, enough // min(enough, rest))
        return least

    def _shortest(self, side: set[str]) -> int:
        """Return the fewest elements that a side of a tensor-core product may have.

        Fewer are allowed if the largest input has its rows on the other side.
        """
        size = math.prod(next_power_of_two(x.size) for x in self._own_axes(side))
        if size <= MMA_COLUMNS and not side & self._largest_axes:
            return MMA_COLUMNS
        return MMA_MIN

    def with_rows(self, tiles: Tiles) -> Tiles | None:
        """Return the tiles with each side of 8 elements padded to 16, so that it can be rows.

        None if no such side has an axis that is held whole, as the queries of attention are. With
        Triton 3.7 and newer, products of 8 columns are asynchronous. Then those of attention whose
        loop has one step are refused (`Pipelining.check`). Products of 16 rows are synchronous, so
        they are allowed.
        """
        padded = dict(tiles)
        for side in self._sides:
            axes = self._own_axes(side)
            held = [a.name for a in axes if a.role is Role.TILE]
            is_short = math.prod(tiles[a.name] for a in axes) == MMA_COLUMNS
            if held and is_short and self._shortest(side) == MMA_COLUMNS:
                padded[held[-1]] = tiles[held[-1]] * MMA_MIN // MMA_COLUMNS
        return Tiles(padded) if padded != dict(tiles) else None

    def _fits(self, side: set[str], tiles: Mapping[str, int]) -> bool:
        """Return whether a side of several axes is neither too short nor too long."""
        axes = self._own_axes(side)
        if len(axes) < 2:
            return True
        size = math.prod(tiles[x.name] for x in axes)
        held = math.prod(tiles[x.name] for x in axes if x.role is Role.TILE)
        return self._shortest(side) <= size <= max(LONGEST_SIDE, held)


def _powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """Return the powers of two from `least`, which is one, to `most`."""
    return tuple(1 << n for n in range(least.bit_length() - 1, most.bit_length()))
