"""The parts of a block graph: axes, inputs, ops, accumulators, stages and outputs.

They are immutable. `graph/block.py` puts them together and says what they mean as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from mirage_hf import errors


class Role(str, Enum):
    """What a kernel does with an axis."""

    #: Cut among thread blocks.
    GRID = "grid"
    #: Cut among the blocks of one thread-block cluster, one element each. The blocks can reduce
    #: values over it, through distributed shared memory.
    CLUSTER = "cluster"
    #: Walked by the stages that name it.
    LOOP = "loop"
    #: Held whole by a block.
    TILE = "tile"


#: The most blocks of a cluster that every GPU with clusters can run. More is not portable.
MAX_CLUSTER = 8


@dataclass(frozen=True)
class Axis:
    """A named axis: its size and its role."""

    name: str
    size: int
    role: Role

    #: The GRID or CLUSTER axis that numbers the splits of this LOOP or TILE axis (split-K,
    #: split-KV). None: it is not split. The size of the other axis is the number of splits. Split s
    #: holds the elements [s·n, (s+1)·n) with n = ceil(size / number of splits). No split is empty.
    split_axis: str | None = None


class AxisTable:
    """The axes of a block graph, looked up by name."""

    def __init__(self, axes: Iterable[Axis]) -> None:
        self._axes = {a.name: a for a in axes}
        splits: dict[str, str] = {}
        for a in self._axes.values():
            if a.split_axis is not None:
                splits.setdefault(a.split_axis, a.name)
        self._split_by = splits

    def get(self, name: str) -> Axis | None:
        """Return the axis called `name`, None if there is none."""
        return self._axes.get(name)

    def axis(self, name: str) -> Axis:
        """Return the axis called `name`."""
        return self._axes[name]

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return `names` in the order of the graph's axes, each once."""
        wanted = set(names)
        return tuple(name for name in self._axes if name in wanted)

    def reduced(self, axes: Iterable[str], over: str) -> set[str]:
        """Return the axes left after a reduction: `over` gives way to its split axis, if any."""
        split_axis = self._axes[over].split_axis
        added = set() if split_axis is None else {split_axis}
        return set(axes) - {over} | added

    def num_splits(self, name: str) -> int:
        """Return the number of splits of an axis, 1 if it is not split."""
        split_axis = self._axes[name].split_axis
        return 1 if split_axis is None else self._axes[split_axis].size

    def split_size(self, name: str) -> int:
        """Return how many elements of a LOOP or TILE axis one block sees: one split, or all."""
        return -(-self._axes[name].size // self.num_splits(name))

    def axis_split_by(self, name: str) -> str | None:
        """Return the axis whose splits the axis `name` numbers, None if it numbers none."""
        return self._split_by.get(name)


SWAP_HALVES = "swap halves"
SWAP_PAIRS = "swap pairs"
SIGN_HALVES = "sign halves"
SIGN_PAIRS = "sign pairs"

#: The values of `Rotation.how`.
ROTATIONS = (SWAP_HALVES, SWAP_PAIRS, SIGN_HALVES, SIGN_PAIRS)


@dataclass(frozen=True)
class Rotation:
    """How an input is read along one axis so that RoPE becomes elementwise ("rotate half").

    The elements of the axis are partners: i and i + size/2 ("halves"), or 2i and 2i + 1 ("pairs").
    A "swap" puts each element in its partner's place. A "sign" negates the first of the two. RoPE
    of x is then x · cos + swapped x · signed sin.
    """

    #: The axis. The number of elements that have partners is even.
    axis: str

    #: One of ROTATIONS.
    how: str

    #: The number of elements, from the first on, that have partners. The others stay as they are.
    #: None: all have partners.
    width: int | None = None

    @property
    def swaps(self) -> bool:
        """True if elements change places, False if some are negated."""
        return self.how in (SWAP_HALVES, SWAP_PAIRS)

    @property
    def pairs(self) -> bool:
        """True if partners are neighbours, False if they are half the width apart."""
        return self.how in (SWAP_PAIRS, SIGN_PAIRS)

    def __post_init__(self) -> None:
        if self.how not in ROTATIONS:
            raise errors.GraphError(
                f"rotation of axis {self.axis}: {self.how!r} is none of {', '.join(ROTATIONS)}"
            )


@dataclass(frozen=True)
class Padding:
    """Extends an input that is shorter than one of its axes to the length of the axis."""

    #: The axis.
    axis: str

    #: The number of elements that the source has along the axis.
    size: int

    #: The value of the elements after these.
    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise errors.GraphError(f"padding of axis {self.axis}: {self.value} is not finite")


@dataclass(frozen=True)
class Taken:
    """Says that an index in device memory chooses the elements of one dim of an input.

    So each token chooses among the weights (experts, n, k) of a mixture. The dim has no axis of its
    own. The value changes along the axes of the index instead.
    """

    #: The dim of the sources. Among the axes of the input it is None.
    dim: int

    #: The number of elements that the sources have along the dim. Nothing is read for an index
    #: below 0, or of this size or more. The value is 0 there.
    size: int

    #: The position of the index in the kernel's operand list.
    index: int

    #: The axis of each dim of the index. None: the dim has size 1.
    axes: tuple[str | None, ...]


@dataclass(frozen=True)
class BlockInput:
    """A value loaded from device memory."""

    name: str

    #: Positions in the kernel's operand list. Several sources lie end to end along `joined`, such
    #: as the weights of q, k and v. Each is read through a pointer of its own.
    sources: tuple[int, ...]

    #: The axis of each dim of the source tensors. None: the dim has size 1.
    axes: tuple[str | None, ...]

    #: The axis along which the sources are joined.
    joined: str | None = None

    #: The size of each source along `joined`.
    sizes: tuple[int, ...] = ()

    #: The bounded axis, which is not among `axes`. With it the sources are two int32 tensors lo and
    #: hi. The value is 1 where lo ≤ index along this axis < hi, else 0.
    bounds: str | None = None

    #: How the source is read along one of its axes. It applies before the padding.
    rotation: Rotation | None = None

    #: How the only source is extended along one of its axes.
    padding: Padding | None = None

    #: The dim of the sources whose elements an index chooses.
    taken: Taken | None = None

    @property
    def read_axes(self) -> tuple[str | None, ...]:
        """The axis of each dim of what is read. The axes of an index replace the dim it chooses."""
        if self.taken is None:
            return self.axes
        before, after = self.axes[: self.taken.dim], self.axes[self.taken.dim + 1 :]
        return (*before, *self.taken.axes, *after)

    @property
    def carried(self) -> tuple[str, ...]:
        """The axes of the value. Their order has no meaning."""
        own = tuple(a for a in self.read_axes if a is not None)
        return own if self.bounds is None else (*own, self.bounds)

    def __post_init__(self) -> None:
        if not self.sources:
            raise self._error("has no source; name the operand it reads")
        self._check_rotation_and_padding()
        self._check_taken()
        if self.bounds is not None:
            joins = self.joined is not None or bool(self.sizes)
            if len(self.sources) != 2 or joins or self.bounds in self.axes:
                raise self._error(
                    f"bounds of axis {self.bounds} are two tensors, lo and hi, "
                    "which are not joined and do not have that axis themselves"
                )
        elif len(self.sources) > 1 or self.sizes:
            named = self.joined is not None and self.joined in self.axes
            if not named or len(self.sizes) != len(self.sources):
                raise self._error(f"{len(self.sources)} sources need a joined axis and a size each")
        elif self.joined is not None and self.joined not in self.axes:
            raise self._error(f"is joined along {self.joined}, which is no axis of its sources")

    def _check_rotation_and_padding(self) -> None:
        if self.rotation is not None:
            axis = self.rotation.axis
            if self.bounds is not None or axis not in self.axes or axis == self.joined:
                raise self._error(
                    f"cannot be rotated along {axis}; it must be an axis of its source"
                )
        if self.padding is not None:
            axis = self.padding.axis
            if self.bounds is not None or len(self.sources) > 1 or axis not in self.axes:
                raise self._error(
                    f"cannot be padded along {axis}; it must be an axis of its only source"
                )

    def _check_taken(self) -> None:
        if self.taken is None:
            return
        dim = self.taken.dim
        if self.bounds is not None or not 0 <= dim < len(self.axes) or self.axes[dim] is not None:
            raise self._error(
                f"an index cannot choose the elements of dim {dim}; "
                "it must be a dim of its sources that has no axis"
            )
        if self.taken.size < 1:
            raise self._error(f"an index cannot choose among {self.taken.size} elements")

    def _error(self, what: str) -> errors.GraphError:
        return errors.GraphError(f"block input {self.name}: {what}")


@dataclass(frozen=True)
class BlockOp:
    """An op `out = fn(args)`: elementwise by axis name, or a reduction.

    A reduction over a TILE axis stays in the block. A reduction over the CLUSTER axis adds up what
    the blocks of a cluster hold. Every block of the cluster then has the total.
    """

    out: str

    #: The name of an elementwise op of the table. With `over`: "sum" or "max".
    fn: str

    #: Names of values, and numbers.
    args: tuple[str | float, ...]

    #: The axes that `out` carries, in the order of the graph's axes.
    axes: tuple[str, ...]

    attrs: tuple[tuple[str, float], ...] = ()

    #: The TILE or CLUSTER axis that is reduced. None: the op is elementwise.
    over: str | None = None


@dataclass(frozen=True)
class Accumulator:
    """A sum or maximum over the loop axis of a stage. Later stages may read it.

    The body of the same stage may read a maximum too, as online softmax does. There it is the
    running maximum. Values that depend on it may only flow into sums that have it as their `shift`.
    Such a sum is multiplied by e^(old − new) whenever the maximum grows. So it ends as if the final
    maximum had been known from the start.
    """

    out: str

    #: The value of the stage's body that is accumulated.
    arg: str

    #: "sum" or "max".
    kind: str

    #: The axes that `out` carries.
    axes: tuple[str, ...]

    #: For sums only: the maximum of the same stage that `arg` is relative to.
    shift: str | None = None


@dataclass(frozen=True)
class Stage:
    """A body that runs once, or once per tile of a loop axis.

    An input is loaded where the body first reads it.
    """

    #: The loop axis. None: the body runs once.
    loop: str | None

    body: tuple[BlockOp, ...]

    accumulators: tuple[Accumulator, ...] = ()

    @cached_property
    def reads(self) -> frozenset[str | float]:
        """The values that the body and the accumulators read."""
        read = {a for op in self.body for a in op.args}
        return frozenset(read | {a.arg for a in self.accumulators})


@dataclass(frozen=True)
class BlockOutput:
    """A value stored to device memory."""

    value: str

    #: The axis of each dim of the tensor. None: the dim has size 1.
    axes: tuple[str | None, ...]

    #: The dtype of the tensor, by name.
    dtype: str


@dataclass(frozen=True)
class Contraction:
    """A sum of products of two values. A schedule may give it to FMAs or to tensor cores."""

    #: The sum.
    out: str

    #: The factors.
    a: str
    b: str

    #: The axis that is summed.
    over: str

    #: The product.
    product: str
