"""Name the axes of recorded tensors, so that ops over several dims become tensor programs.

Each dim of a recorded tensor stands for one axis, for several (where a view merged dims), or for
none (if its size is 1). Two dims that an op aligns are the same axis. Views and casts between
floats make no new tensor here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mirage_hf.ops.dtypes import COMPUTE_DTYPES
from mirage_hf.trace.record import Held, Input, Node, Recording, Value
from mirage_hf.trace.sizes import fixed_shape
from mirage_hf.trace.torch_ops import SAME_TENSOR, elementwise_op

Tensorlike = Value | Input | Held


class UnfitError(Exception):
    """An error: an op cannot be written over axes."""


class Axis:
    """An axis of a program. It may be found to be equal to another one, or to be two axes."""

    def __init__(self, size: int):
        self.size = size
        self._same: Axis | None = None
        self._parts: tuple[Axis, Axis] | None = None

    @property
    def atoms(self) -> list[Axis]:
        """The axes that it stands for. They are not split, and equal ones are the same object."""
        if self._same is not None:
            return self._same.atoms
        return [self] if self._parts is None else atoms_of(self._parts)

    def split(self, first: int) -> None:
        """Split an atom into an axis of `first` elements and the rest."""
        if self.size % first:
            raise UnfitError("dims are merged in different ways")
        self._parts = Axis(first), Axis(self.size // first)

    def unite(self, other: Axis) -> None:
        """Make two atoms equal."""
        if self is not other:
            other._same = self


def atoms_of(axes: Iterable[Axis]) -> list[Axis]:
    """Return the atoms of several axes, in order."""
    return [atom for axis in axes for atom in axis.atoms]


def align(a: Sequence[Axis], b: Sequence[Axis]) -> None:
    """Make the axes of two dims of equal size equal, in order. Longer ones are split."""
    a, b = atoms_of(a), atoms_of(b)
    while a and b:
        x, y = a.pop(0), b.pop(0)
        if x.size != y.size:
            longer, shorter = (x, y) if x.size > y.size else (y, x)
            longer.split(shorter.size)
        x.atoms[0].unite(y.atoms[0])
        a, b = x.atoms[1:] + a, y.atoms[1:] + b


Dims = tuple[tuple[Axis, ...], ...]


@dataclass(eq=False)
class AxisTensor:
    """A tensor of a program: one that is given, or an op's result.

    Attributes:
        own: The axes that it varies along. For a given tensor they are in the order of its memory.
        source: The recorded tensor, if it is given.
        op: The op of the op table, if it is computed. "reduction" reduces `over`.
        operands: Tensors and numbers.
        attrs: The op's attributes.
        over: The axes that a reduction reduces.
    """

    own: list[Axis]
    source: Tensorlike | None = None
    op: str = ""
    operands: tuple[Any, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    over: tuple[Axis, ...] = ()


@dataclass(frozen=True, eq=False)
class Labelled:
    """A recorded tensor: the tensor that holds its elements, and the axes of its dims."""

    tensor: AxisTensor
    dims: Dims


def is_view(recording: Recording, node: Node) -> bool:
    """Return whether a node gives its operand's elements, all of them, perhaps in another order."""
    if node.name in ("aten.slice", "aten.select"):
        source, output = node.args[0], node.outputs[0]
        if not isinstance(source, (Value, Input, Held)) or output is None:
            return False
        sizes = fixed_shape(recording.meta(source)), fixed_shape(output)
        return None not in sizes and math.prod(sizes[0] or ()) == math.prod(sizes[1] or ())
    return node.name in SAME_TENSOR or node.name in _VIEW_RULES


def may_be_written(node: Node) -> bool:
    """Return whether the name of a node's op is one that `Labels` can write."""
    return node.name in ("aten.sum", "aten.mean", "aten.bmm") or elementwise_op(node) is not None


class Labels:
    """The axes of some nodes of a recording, and of the tensors that they read.

    Args:
        recording: The recording.
        members: The numbers of the nodes that are written. Views between them are no members.
        state: The only tensor that they may read although a node writes it.
    """

    def __init__(self, recording: Recording, members: Iterable[int], state: Input | None = None):
        self.recording = recording
        self.members, self.state = set(members), state
        self.changing = recording.changing
        self._of_state = None if state is None else recording.meta(state).storage
        self.known: dict[Any, Labelled] = {}
        #: The tensors in order of their first use.
        self.tensors: list[AxisTensor] = []

    def of(self, x: Tensorlike) -> Labelled:
        """Return the axes of a tensor.

        Raises:
            UnfitError: A member on the way to it cannot be written.
        """
        key = id(x.tensor) if isinstance(x, Held) else x
        if key not in self.known:
            self.known[key] = self._label(x)
        return self.known[key]

    def _label(self, x: Tensorlike) -> Labelled:
        if isinstance(x, Value):
            node = self.recording.nodes[x.node]
            if x.node in self.members:
                return self._computed(node)
            storage = self.recording.meta(x).storage
            if is_view(self.recording, node) and (
                storage == self._of_state or storage not in self.changing
            ):
                found = self._viewed(node, x)
                if found is not None:
                    return found
        return self._given(x)

    def _given(self, x: Tensorlike) -> Labelled:
        shape = self._shape(x)
        storage = self.recording.meta(x).storage
        if x != self.state and storage in self.changing:
            raise UnfitError("an operand is written, or is a part of the state")
        if self.recording.meta(x).dtype not in COMPUTE_DTYPES:
            raise UnfitError("an operand is no float of 16 or 32 bits")
        dims: Dims = tuple((Axis(size),) if size > 1 else () for size in shape)
        tensor = AxisTensor([axis for group in dims for axis in group], x)
        self.tensors.append(tensor)
        return Labelled(tensor, dims)

    def _shape(self, x: Tensorlike) -> Sequence[int]:
        shape = fixed_shape(self.recording.meta(x))
        if shape is None or 0 in shape:
            raise UnfitError("a dim grows with the cache, or has no element")
        return shape

    # -- views -------------------------------------------------------------------------------------

    def _viewed(self, node: Node, x: Value) -> Labelled | None:
        """Return the axes of a view's result, None if they cannot be told."""
        source = node.args[0]
        if not isinstance(source, (Value, Input, Held)):
            return None
        if not self.recording.meta(source).dtype.is_floating_point:
            return None
        if not self.recording.meta(x).dtype.is_floating_point:
            return None
        before = self.of(source)
        rule = _VIEW_RULES.get(node.name, _regrouped)
        dims = rule(node, before.dims, self._shape(x))
        return None if dims is None else Labelled(before.tensor, dims)

    # -- computing ---------------------------------------------------------------------------------

    def _computed(self, node: Node) -> Labelled:
        if node.name in ("aten.sum", "aten.mean"):
            return self._reduced(node)
        if node.name == "aten.bmm":
            return self._product(node)
        known = elementwise_op(node)
        assert known is not None
        op, args, attrs = known
        operands: list[Any] = []
        result: list[tuple[Axis, ...]] = [() for _ in self._shape_of(node)]
        for x in args:
            if isinstance(x, (int, float)) and not isinstance(x, bool):
                operands.append(x)
                continue
            if not isinstance(x, (Value, Input, Held)):
                raise UnfitError(f"{node.name} has an argument of another kind")
            labelled = self.of(x)
            operands.append(labelled.tensor)
            offset = len(result) - len(labelled.dims)
            for d, group in enumerate(labelled.dims):
                result[offset + d] = _aligned(result[offset + d], group)
        return self._add(op, operands, attrs, tuple(result))

    def _shape_of(self, node: Node) -> Sequence[int]:
        meta = node.outputs[0]
        shape = None if meta is None else fixed_shape(meta)
        if shape is None or 0 in shape:
            raise UnfitError("a dim grows with the cache, or has no element")
        return shape

    def _add(
        self, op: str, operands: Sequence[Any], attrs: dict[str, Any], dims: Dims, over: Dims = ()
    ) -> Labelled:
        tensors = [x for x in operands if isinstance(x, AxisTensor)]
        reduced = atoms_of(axis for group in over for axis in group)
        own = dict.fromkeys(a for t in tensors for a in atoms_of(t.own) if a not in reduced)
        tensor = AxisTensor([*own], None, op, tuple(operands), attrs, tuple(reduced))
        self.tensors.append(tensor)
        return Labelled(tensor, dims)

    def _reduced(self, node: Node) -> Labelled:
        if len(node.args) < 2 or node.args[1] is None or node.kwargs:
            raise UnfitError("a sum over all dims, or of another dtype")
        x = self.of(node.args[0])
        keeps = len(node.args) > 2 and node.args[2]
        over = {d % len(x.dims) for d in node.args[1]}
        reduced = tuple(x.dims[d] for d in sorted(over))
        carried = set(atoms_of(x.tensor.own))
        if not carried.issuperset(atoms_of(axis for group in reduced for axis in group)):
            raise UnfitError("a sum of equal numbers")
        dims = [() if d in over else g for d, g in enumerate(x.dims) if d not in over or keeps]
        attrs = {"kind": node.name.removeprefix("aten.")}
        return self._add("reduction", [x.tensor], attrs, tuple(dims), reduced)

    def _product(self, node: Node) -> Labelled:
        """Return a batched product as a multiplication and a sum."""
        a, b = (self.of(x) for x in node.args)
        (batch, m, k), (other, own_k, n) = a.dims, b.dims
        batch, k = _aligned(batch, other), _aligned(k, own_k)
        if m and n:
            raise UnfitError("a product of two matrices")
        product = self._add("mul", [a.tensor, b.tensor], {}, (batch, m, n, k))
        return self._add("reduction", [product.tensor], {"kind": "sum"}, (batch, m, n), (k,))


def _aligned(a: tuple[Axis, ...], b: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return the axes of two dims that an op aligns. A dim of one element has none."""
    if a and b:
        align(a, b)
    return a or b


# -- the axes of views -----------------------------------------------------------------------------


def _regrouped(node: Node, dims: Dims, shape: Sequence[int]) -> Dims | None:
    """Return the axes where elements stay in order."""
    waiting = atoms_of(axis for group in dims for axis in group)
    result: list[tuple[Axis, ...]] = []
    for size in shape:
        group: list[Axis] = []
        missing = size
        while missing > 1:
            axis = waiting.pop(0)
            if axis.size > missing:
                axis.split(missing)
                axis, rest = axis.atoms
                waiting.insert(0, rest)
            if missing % axis.size:
                raise UnfitError("dims are merged in different ways")
            missing //= axis.size
            group.append(axis)
        result.append(tuple(group))
    return tuple(result)


def _expanded(node: Node, dims: Dims, shape: Sequence[int]) -> Dims | None:
    padded = [()] * (len(shape) - len(dims)) + list(dims)
    return tuple(
        (Axis(size),) if size > 1 and not group else group
        for size, group in zip(shape, padded, strict=True)
    )


def _permuted(node: Node, dims: Dims, shape: Sequence[int]) -> Dims | None:
    name, rank = node.name, len(dims)
    if name == "aten.permute":
        order = [d % rank for d in node.args[1]]
    else:
        order = list(range(rank))
        a, b = (0, rank - 1) if name == "aten.t" else (d % rank for d in node.args[1:3])
        order[a], order[b] = order[b], order[a]
    return tuple(dims[d] for d in order)


def _selected(node: Node, dims: Dims, shape: Sequence[int]) -> Dims | None:
    dim = node.args[1] % len(dims)
    return None if dims[dim] else dims[:dim] + dims[dim + 1 :]


def _sliced(node: Node, dims: Dims, shape: Sequence[int]) -> Dims | None:
    """Return the axes of a slice that takes everything."""
    sizes = [math.prod(axis.size for axis in group) for group in dims]
    return dims if sizes == list(shape) else None


_VIEW_RULES = {
    "aten.expand": _expanded,
    "aten.permute": _permuted,
    "aten.transpose": _permuted,
    "aten.t": _permuted,
    "aten.select": _selected,
    "aten.slice": _sliced,
}
