"""Schedules: the choices about a kernel that remain once its block graph is fixed.

A schedule changes how fast a kernel is and in which order it adds, never what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mirage_hf import errors
from mirage_hf.graph.block import BlockGraph, Role

#: Part of every key under which a tuned kernel is stored. Raise it when a stored schedule is no
#: longer right for the code that it gives. It stays if the code only becomes better: an entry of
#: another text is refused when it is looked up, and packaged ones are measured again.
VERSION = 10


#: The most of some fields in a stored schedule, and the most of all others. A block has 1,024
#: threads, which are 32 warps. No tuned schedule is near the others.
_MOST = {"num_warps": 32, "num_stages": 64, "steps_per_trip": 64}
_LARGE = 1 << 31


class Tiles(Mapping[str, int]):
    """An immutable, hashable mapping from axis name to tile size, in alphabetical order."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = {str(axis): int(size) for axis, size in sorted(dict(sizes).items())}
        _check_powers_of_two(self._sizes)
        self._hash = hash(tuple(self._sizes.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Tiles, (self._sizes,)  # hashes of strings differ between processes

    def __getitem__(self, axis: str) -> int:
        return self._sizes[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tiles):
            return self._sizes == other._sizes
        return NotImplemented

    def __repr__(self) -> str:
        return repr(self._sizes)


@dataclass(frozen=True, repr=False)
class Schedule:
    """How one block graph becomes one kernel.

    Prints as Python that can be pasted back, with defaults left out:

        Schedule(tiles={'k': 128, 'n': 8}, num_warps=1, num_stages=3)
    """

    #: Elements of each axis that a block holds at a time, by axis name. Powers of two.
    tiles: Mapping[str, int]
    #: Use tensor cores (MMA instructions) for the contractions that fit. Otherwise all products are
    #: multiply-adds.
    mma: bool = False
    #: With `mma`, make the larger operand the left one. Hopper's instruction takes 64 rows of the
    #: left operand.
    weights_first: bool = True
    #: Keep accumulators spread over the loop tile and reduce them once after the loop. This does
    #: not apply to products on tensor cores.
    reduce_after_loop: bool = True
    #: Load inputs that only one block reads with the policy `evict_first`, so that they leave the
    #: L2 first.
    evict_first: bool = True
    #: Warps of a block.
    num_warps: int = 4
    #: Loop iterations whose loads are in flight (Triton's `num_stages`). With two, multiply-adds of
    #: codes hold the words of the next step in registers.
    num_stages: int = 1
    #: Loop steps that are written one after another in each trip of the loop. Their loads are held
    #: in registers, and each half of them is loaded for the next trip as soon as it is used. Only
    #: loops that hold words of codes ahead take several steps (`num_stages` 1, or 2 for
    #: multiply-adds).
    steps_per_trip: int = 1
    #: Blocks that share the loop of one tile, a power of two. The last to finish adds their partial
    #: results. With `persistent_blocks` they are a thread-block cluster, and share the columns.
    cooperating_blocks: int = 1
    #: Loop steps whose constant or cached inputs a block prefetches into the L2 before its grid
    #: dependency wait. A power of two, or 0 for none.
    prefetch_steps: int = 0
    #: Load rows of caches within bounds before the grid dependency wait. It has no effect if the
    #: loop has several trips, or if registers do not hold the rows.
    load_cached_early: bool = False
    #: Let the next kernel launch before this one's grid dependency wait (PDL). It has no effect
    #: unless the placed op says that this is safe (`PlacedOp.next_may_launch_early`).
    trigger_early: bool = False
    #: Write the kernel as CUDA C++. It has tensor cores and cooperating blocks only with
    #: `persistent_blocks`. Without these, and with two or more `num_stages`, each thread loads what
    #: it needs of the next loop tile into registers. With `prefetch_steps` it loads its constants
    #: of the first tile before the wait.
    cuda: bool = False
    #: Blocks of a CUDA kernel that multiplies codes. Each walks tiles of rows. One more warp copies
    #: the codes of the next tiles, `num_stages` chunks of columns ahead, through a ring in shared
    #: memory. The others multiply on tensor cores. As signed bytes, what codes are multiplied with
    #: has 22 bits, and sums are exact. As halves it has 11. 0: a block for each tile, and no such
    #: warp.
    persistent_blocks: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.tiles, Tiles):
            object.__setattr__(self, "tiles", Tiles(self.tiles))
        _check_powers_of_two(
            {
                "num_warps": self.num_warps,
                "cooperating_blocks": self.cooperating_blocks,
                "prefetch_steps": self.prefetch_steps or 1,
            }
        )
        if self.persistent_blocks and not self.cuda:
            raise errors.CodegenError(
                f"schedule: persistent_blocks is {self.persistent_blocks}, which needs cuda=True"
            )
        for name, count in ("num_stages", self.num_stages), ("steps_per_trip", self.steps_per_trip):
            if count < 1:
                raise errors.CodegenError(f"schedule: {name} is {count}; it must be at least 1")

    def changed(self, **values: Any) -> Schedule:
        """Return the schedule with other values of some fields. It is faster than `replace`."""
        return Schedule(**(vars(self) | values))  # nothing but its fields is stored in a schedule

    def triggering_early(self, early: bool) -> Schedule:
        """Return the schedule with another value of `trigger_early`."""
        return self if self.trigger_early == early else self.changed(trigger_early=early)

    def check(self, block: BlockGraph) -> None:
        """Check that the tiles fit `block`.

        Raises:
            CodegenError: If the tiles do not name exactly the axes of `block`. If a tile axis, or
                one split of it, is not held whole. If a block would hold several splits.
        """
        names = {a.name for a in block.axes}
        if set(self.tiles) != names:
            raise errors.CodegenError(
                f"schedule: tiles are given for {sorted(self.tiles)}, "
                f"the block graph's axes are {sorted(names)}"
            )
        for axis in block.named(Role.TILE):
            part = block.split_size(axis.name)
            if self.tiles[axis.name] < part:
                size = f"size {axis.size}"
                if axis.split_axis is not None:
                    size += f", of which a block has {part},"
                raise errors.CodegenError(
                    f"schedule: tile axis {axis.name} of {size} must be held whole; "
                    f"its tile is {self.tiles[axis.name]}, give {next_power_of_two(part)}"
                )
        for axis in block.named(Role.GRID):
            split = block.axis_split_by(axis.name)
            if split is not None and self.tiles[axis.name] != 1:
                raise errors.CodegenError(
                    f"schedule: {axis.name} numbers the splits of {split}, and a block has one of "
                    f"them; its tile is {self.tiles[axis.name]}, give 1"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as plain JSON data."""
        return asdict(self) | {"tiles": dict(self.tiles)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Schedule:
        """Return the schedule that `to_dict` gave `data` for.

        Raises:
            FormatError: If the tiles are missing or a field is unknown.
        """
        defaults = {f.name: f.default for f in fields(Schedule)}
        unknown = sorted(set(data) - set(defaults))
        problem = f"unknown field {unknown[0]!r}" if unknown else ""
        tiles = data.get("tiles")
        if not isinstance(tiles, Mapping):
            problem = problem or "no tiles"
        else:
            for name, value in {**tiles, **data, "tiles": 1}.items():
                is_flag = isinstance(defaults.get(name), bool)
                if type(value) is not (bool if is_flag else int) or value > _MOST.get(name, _LARGE):
                    problem = problem or f"{name} is {value!r}"
        if problem:
            raise errors.FormatError(f"schedule: {problem}; rebuild the entry with this version")
        return Schedule(**data)

    def __repr__(self) -> str:
        arguments = [f"tiles={self.tiles!r}"]
        for f in fields(self)[1:]:
            value = getattr(self, f.name)
            if value != f.default:
                arguments.append(f"{f.name}={value!r}")
        return f"Schedule({', '.join(arguments)})"


def _check_powers_of_two(sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if size < 1 or size & (size - 1):
            raise errors.CodegenError(
                f"schedule: {name} is {size}; tiles, num_warps, cooperating_blocks and "
                "prefetch_steps must be powers of two"
            )


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def power_of_two_up_to(n: int) -> int:
    """Return the largest power of two that is at most `n`, which is 1 or more."""
    return 1 << (n.bit_length() - 1)
