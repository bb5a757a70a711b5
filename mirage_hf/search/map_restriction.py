"""Restrict how kernels cut their tensors: allowed imaps, omaps and fmaps.

The maps are those of Mirage (arXiv 2405.05751, section 4.3). An imap or omap sends the grid dims x,
y and z to tensor dims. Our grid axes have no order, so some assignment of x, y and z to them must
keep to the restriction. Then every tensor that the kernel reads has one of the imaps, and every
tensor that it stores has one of the omaps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mirage_hf import errors
from mirage_hf.graph.block import BlockGraph, Role
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.maps import TensorMap, maps_of
from mirage_hf.graph.tiles import GRID_DIMS
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.grid_maps import GridMap, maps_text, read_grid_maps, read_loop_dims
from mirage_hf.search.lowered_program import LoweredProgram
from mirage_hf.search.search_report import StopReason

#: The most elements of a value that a block may hold along its tile axes. tests/core checks that it
#: equals the core's.
LARGEST_TILE = 16384


@dataclass(frozen=True)
class MapRestriction:
    """The maps that every kernel of a µGraph may have.

    Attributes:
        imaps: Allowed maps of the tensors that a kernel reads, or None for any.
        omaps: Allowed maps of the tensors that it stores, or None for any.
        fmaps: Allowed dims that the loop may walk in the tensors that a kernel reads. None among
            them stands for a tensor that the loop does not walk. Or None for any.
    """

    imaps: tuple[GridMap, ...] | None = None
    omaps: tuple[GridMap, ...] | None = None
    fmaps: tuple[int | None, ...] | None = None

    @staticmethod
    def of(imaps: Any = None, omaps: Any = None, fmaps: Any = None) -> MapRestriction | None:
        """Return the restriction that a user asks for, or None if everything is allowed.

        Args:
            imaps: A list of dicts such as {"x": 0, "y": None}, or of tuples such as (0, -1, -1).
                None, -1 and grid dims that are left out are replicas.
            omaps: The same for stored tensors.
            fmaps: A list of tensor dims.

        Raises:
            SearchError: If an argument is not such a list.
        """
        if imaps is None and omaps is None and fmaps is None:
            return None
        return MapRestriction(
            None if imaps is None else read_grid_maps("imaps", imaps),
            None if omaps is None else read_grid_maps("omaps", omaps),
            None if fmaps is None else read_loop_dims("fmaps", fmaps),
        )

    def check(self, graph: KernelGraph) -> None:
        """Raise SearchError if a map names a dim that no tensor of the program can have.

        Partial results have one dim more than the tensors of the program.
        """
        rank = max(len(t.dims) for t in (*graph.inputs, *graph.outputs))
        for name, dims in self._dims().items():
            if dims and max(dims) > rank:
                what = "outputs" if name == "omaps" else "inputs"
                tensors = getattr(graph, what)
                shapes = ", ".join(f"{t.name} {errors.shape(t.dims)}" for t in tensors)
                raise errors.SearchError(
                    f"{name}: dim {max(dims)} is one that no tensor has; "
                    f"the program's {what} are {shapes}"
                )

    def _dims(self) -> dict[str, list[int]]:
        """Return the tensor dims that each option names."""
        return {
            "imaps": [dim for m in self.imaps or () for _, dim in m],
            "omaps": [dim for m in self.omaps or () for _, dim in m],
            "fmaps": [dim for dim in self.fmaps or () if dim is not None],
        }

    def restricted(self, ugraph: UGraph) -> UGraph | None:
        """Return a µGraph whose kernels all have allowed maps, or None if there is none.

        It is `ugraph` itself, or the same kernels with some grid axes held whole by each block.
        """
        old = [op.block for op in ugraph.block_ops if op.block is not None]
        new = []
        for block in old:
            allowed = next(filter(self._allows, _with_fewer_blocks(block)), None)
            if allowed is None:
                return None
            new.append(allowed)
        return ugraph if new == old else ugraph.with_blocks(new)

    def _allows(self, block: BlockGraph) -> bool:
        maps = maps_of(block)
        if self.fmaps is not None and any(_loop_dim(m) not in self.fmaps for m in maps.inputs):
            return False
        if self.imaps is None and self.omaps is None:
            return True
        return any(
            _all_among(maps.inputs, self.imaps, names)
            and _all_among(maps.outputs, self.omaps, names)
            for names in _namings([a.name for a in block.named(Role.GRID)])
        )

    def roles(self, lowered: LoweredProgram) -> list[tuple[tuple[str, Role], ...]]:
        """Return the roles to force, in turn, so that the search finds every allowed loop.

        The core keeps only the cheapest loops of each kernel. So each loop that a single kernel may
        have is searched by itself. Grid axes need no forcing, see `_with_fewer_blocks`.
        """
        if self.fmaps is None:
            return []
        reads = [
            (lowered.inputs[term.source], term.index)
            for term in lowered.terms
            if term.op == "input"
        ]
        forced: list[tuple[tuple[str, Role], ...]] = []
        for axis in lowered.sizes:
            dims = [
                read.source_dim(index.index(axis)) if axis in index else None
                for read, index in reads
            ]
            if all(dim in self.fmaps for dim in dims):
                forced.append(((axis, Role.LOOP),))
        reduced = [
            axis
            for axis in lowered.sizes
            if not all(axis in output.index for output in lowered.outputs)
        ]
        if None in self.fmaps and reduced:
            forced.append(tuple((axis, Role.TILE) for axis in reduced))
        return forced

    def no_kernel_error(self, best: UGraph, stop: StopReason) -> errors.SearchError:
        """Return the error for a search in which no kernel has allowed maps.

        Args:
            best: The best µGraph that was found without the restriction.
            stop: Why the search stopped.
        """
        options = {name: getattr(self, name) for name in ("imaps", "omaps", "fmaps")}
        wanted = ", ".join(
            f"{name}={maps_text(name, allowed)}"
            for name, allowed in options.items()
            if allowed is not None
        )
        blocks = [op.block for op in best.block_ops if op.block is not None]
        maps = maps_of(next(block for block in blocks if not self._allows(block)))
        tensors = "; ".join(f"{m.tensor} {m}" for m in (*maps.inputs, *maps.outputs))
        early = "" if stop == StopReason.EXHAUSTED else f" before the search stopped ({stop})"
        return errors.SearchError(
            f"no kernel that was found keeps to {wanted}{early}: the best has {tensors}; "
            "allow those maps, or leave a list None"
        )


def _loop_dim(m: TensorMap) -> int | None:
    """Return the tensor dim that the loop walks, None for a replica."""
    return next((dim for _, dim in m.loop), None)


def _namings(grid: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield every assignment of x, y and z (as 0, 1 and 2) to grid axes."""
    numbers = range(max(len(GRID_DIMS), len(grid)))
    for order in itertools.permutations(numbers, len(grid)):
        yield dict(zip(grid, order, strict=True))


def _all_among(
    maps: Sequence[TensorMap], allowed: tuple[GridMap, ...] | None, names: Mapping[str, int]
) -> bool:
    """Return True if every map is allowed when the grid axes have the names in `names`."""
    if allowed is None:
        return True
    for m in maps:
        pairs = sorted((names[axis], dim) for axis, dim in m.grid if dim is not None)
        if tuple(pairs) not in allowed:
            return False
    return True


def _with_fewer_blocks(block: BlockGraph) -> Iterator[BlockGraph]:
    """Yield the block graph, then its forms with one, two, … grid axes held whole.

    The search cuts every axis that it may. A grid dim of one block is the same as none. So a block
    graph that the search finds stands for these block graphs too.
    """
    numbers = {a.split_axis for a in block.axes}
    free = [a for a in block.named(Role.GRID) if a.name not in numbers]
    for n in range(len(free) + 1):
        for whole in itertools.combinations(free, n):
            axes = tuple(replace(a, role=Role.TILE) if a in whole else a for a in block.axes)
            held = replace(block, axes=axes)
            if not whole or _largest_tile(held) <= LARGEST_TILE:
                yield held


def _largest_tile(block: BlockGraph) -> int:
    """Return the most elements that a value has along its tile axes.

    Products that are only summed do not count, because they are never formed.
    """
    products = {c.product for c in block.contractions.values()}
    return max(
        math.prod(block.split_size(a) for a in axes if block.role(a) is Role.TILE)
        for name, axes in block.carried.items()
        if name not in products
    )
