"""A user's restrictions on how kernels cut their tensors: allowed imaps, omaps and fmaps (Mirage, arXiv 2405.05751, section 4.3).

An imap or omap is a dict from grid dims x, y, z to tensor dims, or a tuple in that order; None, -1 and what is left out are
replicas. The grid axes of our block graphs have no order, so a kernel keeps to a restriction if its grid axes can be called x, y
and z such that the map of every tensor it reads is one of the imaps and of every tensor it stores one of the omaps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mirage_hf import errors
from mirage_hf.graph.block import BlockGraph, Role
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.maps import TensorMap, maps_of
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.spec import Spec

GRID_DIMS = ("x", "y", "z")
GridMap = tuple[tuple[int, int], ...]
"""Sorted pairs of a grid dim's place and the tensor dim that it cuts."""

LARGEST_TILE = 16384
"""Elements that a block may hold of a value along axes that are held whole, as in csrc/core/kernel/tile_sizes.h."""


@dataclass(frozen=True)
class MapRestriction:
    """Allowed maps of every kernel of a µGraph; None: any. `fmaps` are dims that the loop may walk, None among them a replica."""

    imaps: tuple[GridMap, ...] | None = None
    omaps: tuple[GridMap, ...] | None = None
    fmaps: tuple[int | None, ...] | None = None

    @staticmethod
    def of(imaps: Any = None, omaps: Any = None, fmaps: Any = None) -> MapRestriction | None:
        """Errors: SearchError for what are not maps. None when nothing is restricted."""
        if imaps is None and omaps is None and fmaps is None:
            return None

        def grid_maps(name: str, given: Any) -> tuple[GridMap, ...] | None:
            return (
                None
                if given is None
                else tuple(dict.fromkeys(_grid_map(name, m) for m in _list(name, given)))
            )

        walked = (
            None
            if fmaps is None
            else tuple(dict.fromkeys(_dim("fmaps", d) for d in _list("fmaps", fmaps)))
        )
        return MapRestriction(grid_maps("imaps", imaps), grid_maps("omaps", omaps), walked)

    def check(self, graph: KernelGraph) -> None:
        """Errors: SearchError for a dim that no tensor of the program has, nor a tensor of partial results, which has one more."""
        for name, tensors in (
            ("imaps", graph.inputs),
            ("omaps", graph.outputs),
            ("fmaps", graph.inputs),
        ):
            allowed = getattr(self, name) or ()
            dims = (
                [d for d in allowed if d is not None]
                if name == "fmaps"
                else [d for m in allowed for _, d in m]
            )
            rank = max(len(t.dims) for t in (*graph.inputs, *graph.outputs))
            if dims and max(dims) > rank:
                what = "outputs" if name == "omaps" else "inputs"
                raise errors.SearchError(
                    f"{name}: dim {max(dims)} is one that no tensor has; the program's {what} are "
                    + ", ".join(f"{t.name} {errors.shape(t.dims)}" for t in tensors)
                )

    def keep(self, ugraph: UGraph) -> UGraph | None:
        """The µGraph if every kernel keeps to it, or the same one where it does because axes that were cut are held whole instead."""
        blocks = [
            next(filter(self._fits, _with_fewer_blocks(op.block)), None)
            for op in ugraph.block_ops
            if op.block is not None
        ]
        if None in blocks:
            return None
        if blocks == [op.block for op in ugraph.block_ops]:
            return ugraph
        return ugraph.with_blocks(blocks)  # type: ignore[arg-type]

    def _fits(self, block: BlockGraph) -> bool:
        maps = maps_of(block)
        return self._holds(
            [a.name for a in block.named(Role.GRID)],
            [dict(m.grid) for m in maps.inputs],
            [dict(m.grid) for m in maps.outputs],
            [_walked(m) for m in maps.inputs],
        )

    def _holds(
        self,
        grid: Sequence[str],
        inputs: Sequence[Mapping[str, int | None]],
        outputs: Sequence[Mapping[str, int | None]],
        walked: Iterable[int | None],
    ) -> bool:
        if self.fmaps is not None and any(d not in self.fmaps for d in walked):
            return False

        def among(
            m: Mapping[str, int | None],
            allowed: tuple[GridMap, ...] | None,
            place: Mapping[str, int],
        ) -> bool:
            return (
                allowed is None
                or tuple(sorted((place[a], d) for a, d in m.items() if d is not None)) in allowed
            )

        if self.imaps is None and self.omaps is None:
            return True
        return any(
            all(among(m, self.imaps, place) for m in inputs)
            and all(among(m, self.omaps, place) for m in outputs)
            for place in (
                dict(zip(grid, order, strict=True))
                for order in itertools.permutations(
                    range(max(len(GRID_DIMS), len(grid))), len(grid)
                )
            )
        )

    def roles(self, spec: Spec) -> list[tuple[tuple[str, Role], ...]]:
        """Roles to force, in turn: the core keeps only the cheapest loops of each kernel, so each loop that a single kernel may have
        is searched by itself. It leaves no choice of grid axes (see `_with_fewer_blocks`)."""
        if self.fmaps is None:
            return []
        reads = [t.index for t in spec.terms if t.op == "input"]
        reduced = [a for a in spec.sizes if not all(a in index for _, index, _ in spec.outputs)]
        loops = [
            a
            for a in spec.sizes
            if all((index.index(a) if a in index else None) in self.fmaps for index in reads)
        ]
        none = [tuple((a, Role.TILE) for a in reduced)] if None in self.fmaps and reduced else []
        return [*(((a, Role.LOOP),) for a in loops), *none]

    def refusal(self, ugraph: UGraph, stop: str) -> errors.SearchError:
        """What to raise when no kernel keeps to it, `ugraph` being the best one that was found without."""
        given = {name: getattr(self, name) for name in ("imaps", "omaps", "fmaps")}
        wanted = ", ".join(
            f"{name}={_shown(name, allowed)}"
            for name, allowed in given.items()
            if allowed is not None
        )
        op = next(
            op for op in ugraph.block_ops if op.block is not None and not self._fits(op.block)
        )
        assert op.block is not None
        maps = maps_of(op.block)
        tensors = "; ".join(f"{m.tensor} {m}" for m in (*maps.inputs, *maps.outputs))
        early = "" if stop == "exhausted" else f" before the search stopped ({stop})"
        return errors.SearchError(
            f"no kernel that was found keeps to {wanted}{early}: the best has {tensors}; "
            "allow those maps, or leave a list None"
        )


def _with_fewer_blocks(block: BlockGraph) -> Iterator[BlockGraph]:
    """The block graph as it is, then with grid axes held whole instead, as few as possible. The search cuts every axis that it may;
    a grid dim of one block is the same as none, so what it finds stands for these as well."""
    numbers = {a.split_axis for a in block.axes}
    free = [a for a in block.named(Role.GRID) if a.name not in numbers]
    for n in range(len(free) + 1):
        for whole in itertools.combinations(free, n):
            held = replace(
                block,
                axes=tuple(replace(a, role=Role.TILE) if a in whole else a for a in block.axes),
            )
            if not whole or _largest_tile(held) <= LARGEST_TILE:
                yield held


def _largest_tile(block: BlockGraph) -> int:
    """Elements of the tile axes of a value, products that are only summed left out: they are never formed."""
    products = {c.product for c in block.contractions.values()}
    return max(
        math.prod(block.split_size(a) for a in axes if block.role(a) is Role.TILE)
        for name, axes in block.carried.items()
        if name not in products
    )


def _walked(m: TensorMap) -> int | None:
    return next((d for _, d in m.loop), None)


def _list(name: str, given: Any) -> list[Any]:
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise errors.SearchError(
            f"{name}: {given!r} is not a list of maps; leave it None to allow any"
        )
    given = list(given)
    if not given:
        raise errors.SearchError(
            f"{name}: the list is empty, so nothing would be allowed; leave it None to allow any"
        )
    return given


def _dim(name: str, d: Any) -> int | None:
    if d is None or (d == -1 and not isinstance(d, (bool, float))):
        return None
    if isinstance(d, bool) or not isinstance(d, int) or d < 0:
        raise errors.SearchError(
            f"{name}: {d!r} is not a tensor dim; use 0, 1, …, or None (or -1) for a replica"
        )
    return d


def _grid_map(name: str, given: Any) -> GridMap:
    if isinstance(given, Mapping):
        unknown = [g for g in given if g not in GRID_DIMS]
        if unknown:
            raise errors.SearchError(
                f"{name}: {given!r} names the grid dim {unknown[0]!r}; they are x, y and z"
            )
        pairs = [(GRID_DIMS.index(g), _dim(name, d)) for g, d in given.items()]
    elif (
        isinstance(given, Sequence)
        and not isinstance(given, str)
        and 1 <= len(given) <= len(GRID_DIMS)
    ):
        pairs = [(g, _dim(name, d)) for g, d in enumerate(given)]
    else:
        raise errors.SearchError(
            f"{name}: {given!r} is not a map; give a dict like {{'x': 0, 'y': None}} or a tuple like (0, -1, -1)"
        )
    cut = [d for _, d in pairs if d is not None]
    if len(set(cut)) < len(cut):
        raise errors.SearchError(
            f"{name}: {given!r} sends two grid dims to one tensor dim; a dim is cut by one of them"
        )
    return tuple(sorted((g, d) for g, d in pairs if d is not None))


def _shown(name: str, allowed: Sequence[Any]) -> str:
    if name == "fmaps":
        return str(list(allowed))
    return (
        "["
        + ", ".join("{" + ", ".join(f"{GRID_DIMS[g]}→{d}" for g, d in m) + "}" for m in allowed)
        + "]"
    )
