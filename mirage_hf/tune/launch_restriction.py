"""Restrict schedules to a user's numbers of blocks, threads and loop trips."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mirage_hf import errors
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.gpus import H200, Device
from mirage_hf.graph.block import BlockGraph, Role
from mirage_hf.graph.kernel import KernelOp
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.tune import space
from mirage_hf.tune.cost import estimate

#: Schedules of the unrestricted space whose other choices are kept.
_BASES = 24


@dataclass(frozen=True)
class LaunchRestriction:
    """Allowed launches. An empty field allows any.

    Every block graph of a µGraph must keep to them, also one that combines partial results.

    Attributes:
        griddims: Allowed blocks per grid dim; dims of one block do not count.
        threads: Allowed threads of a block.
        franges: Allowed trips of the loop.
    """

    griddims: tuple[tuple[int, ...], ...] = ()
    threads: tuple[int, ...] = ()
    franges: tuple[int, ...] = ()

    @staticmethod
    def of(
        griddims: Iterable[Sequence[int]] | None,
        blockdims: Iterable[Sequence[int]] | None,
        franges: Iterable[int] | None,
    ) -> LaunchRestriction:
        """Return the restriction for a user's arguments.

        Raises:
            SearchError: A value is not a positive integer, or there are more than three dims.
        """
        for name, given in (("griddims", griddims), ("blockdims", blockdims), ("franges", franges)):
            if given is not None and (isinstance(given, str) or not isinstance(given, Iterable)):
                raise errors.SearchError(
                    f"{name}: {given!r} is not a list; leave it None to allow any"
                )
        allowed = [None if g is None else tuple(g) for g in (griddims, blockdims, franges)]
        if () in allowed:
            raise errors.SearchError(
                "griddims, blockdims and franges: an empty list allows nothing; leave it None to "
                "allow any"
            )
        grids = tuple(_dims("griddims", d) for d in allowed[0] or ())
        threads = tuple(math.prod(_dims("blockdims", d)) for d in allowed[1] or ())
        for t in threads:
            if t % 32 or t & (t - 1) or t > 1024:
                raise errors.SearchError(
                    f"blockdims: {t} threads; a block has a power of two from 32 to 1024 of them"
                )
        trips = _dims("franges", allowed[2], 64) if allowed[2] else ()
        return LaunchRestriction(tuple(tuple(n for n in g if n > 1) for g in grids), threads, trips)

    def schedules(self, op: KernelOp, device: Device = H200) -> list[Schedule]:
        """Return the schedules of an op that keep to the restriction, best estimate first."""
        assert op.block is not None
        found: dict[Schedule, float] = {}
        for base in space.schedules(op, device, _BASES):
            for tiles in self._tiles(op.block, dict(base.tiles)):
                for threads in self.threads or (32 * base.num_warps,):
                    s = replace(base, tiles=tiles, num_warps=threads // 32, cooperating_blocks=1)
                    try:
                        planned = plan_kernel(op, s)
                    except errors.CodegenError:
                        continue
                    cost = estimate(planned, device)
                    if (
                        cost.registers <= space.REGISTER_BUDGET
                        and cost.shared <= device.shared_bytes
                    ):
                        found[s] = cost.us
        return sorted(found, key=lambda s: (found[s], space.tie_break(s)))

    def _or_none(self, op: KernelOp) -> list[Schedule]:
        """Return the schedules, or none if the op has no kernel at all."""
        try:
            return self.schedules(op)
        except errors.CodegenError:
            return []

    def scheduled(self, ugraphs: Sequence[UGraph]) -> tuple[UGraph, ...]:
        """Return the µGraphs whose kernels keep to the restriction, with their best schedules.

        Raises:
            SearchError: There are µGraphs, and none can keep to it.
        """
        kept = []
        for u in ugraphs:
            choices = [self._or_none(op) for op in place_kernels(u)]
            if all(choices):
                kept.append(replace(u, schedules=tuple(c[0] for c in choices)))
        if ugraphs and not kept:
            limits = {"griddims": self.griddims, "threads": self.threads, "franges": self.franges}
            wanted = ", ".join(f"{name}={list(value)}" for name, value in limits.items() if value)
            block = ugraphs[0].block_ops[0].block
            assert block is not None
            axes = ", ".join(f"{a.name} {a.role.value} {a.size}" for a in block.axes)
            raise errors.SearchError(
                f"no kernel keeps to {wanted}: tiles are powers of two and the axes are {axes}; "
                "allow other numbers"
            )
        return tuple(kept)

    def _tiles(self, block: BlockGraph, base: dict[str, int]) -> Iterator[dict[str, int]]:
        """Yield the tiles that give an allowed grid and allowed trips."""
        grid = block.named(Role.GRID)
        loops = block.named(Role.LOOP)
        if self.franges and not loops and 1 not in self.franges:
            return  # without a loop there is one trip
        for counts in self._counts(len(grid)):
            tiles = dict(base)
            fits = True
            for axis, count in zip(grid, counts, strict=True) if counts is not None else ():
                tile = -(-axis.size // count)
                fits = (
                    fits
                    and tile & (tile - 1) == 0
                    and -(-axis.size // tile) == count
                    and (tile == 1 or block.axis_split_by(axis.name) is None)
                )
                tiles[axis.name] = tile
            if not fits:
                continue
            for trips in self.franges if self.franges and loops else (None,):
                if trips is not None:
                    part = block.split_size(
                        loops[0].name
                    )  # a block makes the trips of its own split
                    tile = -(-part // trips)
                    if tile & (tile - 1) or -(-part // tile) != trips:
                        continue
                    tiles[loops[0].name] = tile
                yield dict(tiles)

    def _counts(self, axes: int) -> Iterator[tuple[int, ...] | None]:
        """Yield blocks per grid axis in every order; None allows any."""
        if not self.griddims:
            yield None
            return
        seen = set()
        for dims in self.griddims:
            if len(dims) <= axes:
                for order in itertools.permutations((*dims, *[1] * (axes - len(dims)))):
                    if order not in seen:
                        seen.add(order)
                        yield order


def _dims(name: str, dims: Any, most: int = 3) -> tuple[int, ...]:
    """Return dims as a tuple of positive integers."""
    dims = tuple(dims) if isinstance(dims, Iterable) else (dims,)
    if not 1 <= len(dims) <= most or any(
        isinstance(d, bool) or not isinstance(d, int) or d < 1 for d in dims
    ):
        raise errors.SearchError(f"{name}: {dims!r} is not one to {most} positive integers")
    return dims
