"""Say what programs that differ in sizes and constants have in common.

Which µGraphs compute a program does not depend on its sizes, so those of a search serve programs of
other sizes. Two programs have one structure if they are equal after every size above 1 and every
constant is left out. A size of 1 stays, because such a dim broadcasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mirage_hf.graph import json_format, symbolic
from mirage_hf.graph.block import BlockGraph
from mirage_hf.graph.dim import Dim
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.expand import expand
from mirage_hf.zoo.key import canonical

#: Numbers that rewrites know, such as in x · 1 = x. They are part of the structure.
_KNOWN_NUMBERS = frozenset({-math.inf, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, math.inf})

#: The attributes of ops that hold sizes or positions.
_SIZES = frozenset({"dims", "start", "stop"})


@dataclass(frozen=True)
class Structure:
    """The structure of a program, and the sizes that it leaves out.

    Attributes:
        digest: A digest of the structure.
        sizes: The sizes above 1 of the inputs' dims, in order.
    """

    digest: str
    sizes: tuple[int, ...]

    def doublings_to(self, other: Structure) -> float:
        """Return the largest ratio of two sizes at one place, as doublings.

        It is infinite if the structures differ.
        """
        if self.digest != other.digest:
            return math.inf
        pairs = zip(self.sizes, other.sizes, strict=True)
        return max((abs(math.log2(a / b)) for a, b in pairs), default=0.0)


def structure_of(program: KernelGraph) -> Structure | None:
    """Return the structure of a program, or None if it has symbolic dims."""
    dims = [n for t in program.inputs for n in t.dims]
    if any(isinstance(n, Dim) for n in dims):
        return None
    left_out = dict.fromkeys(x for op in program.ops for x in _numbers(op))
    names = {x: f"c{n}" for n, x in enumerate(left_out)}
    data = canonical(program)
    nodes = [_without_sizes(node, names) for node in data["nodes"]]
    digest = json_format.digest(data | {"nodes": nodes})
    return Structure(digest, tuple(int(n) for n in dims if n > 1))


def _numbers(op: KernelOp) -> Iterator[float]:
    """Yield the numbers of an op that a structure leaves out."""
    values: Iterable[Any] = (*op.inputs, *(value for _, value in op.attrs))
    return (x for x in values if _is_left_out(x))


def _is_left_out(value: Any) -> bool:
    return isinstance(value, float) and value not in _KNOWN_NUMBERS


def _without_sizes(node: Mapping[str, Any], names: Mapping[float, str]) -> dict[str, Any]:
    """Return a node of a program's JSON with marks in place of sizes and numbers."""
    if node["op"] == "input":
        order = _order_in_memory(node["dims"], node["strides"])
        return {**node, "dims": _marks(node["dims"]), "strides": order}

    def mark(value: Any) -> Any:
        return names[value] if _is_left_out(value) else value

    attrs = node.get("attrs", {}).items()
    return {
        **node,
        "attrs": {name: _marks(x) if name in _SIZES else mark(x) for name, x in attrs},
        "inputs": [mark(x) for x in node["inputs"]],
        "outputs": [t | {"dims": _marks(t["dims"])} for t in node["outputs"]],
    }


def _marks(sizes: Any) -> Any:
    """Return "n" in place of sizes and positions above 1."""
    if isinstance(sizes, (list, tuple)):
        return [_marks(n) for n in sizes]
    return "n" if isinstance(sizes, int) and sizes > 1 else sizes


def _order_in_memory(dims: list[int], strides: list[int]) -> list[list[int]]:
    """Return the dims above 1 from the largest stride on, those that repeat, and the packed one."""
    long = [d for d, n in enumerate(dims) if n > 1]
    order = sorted(long, key=lambda d: -strides[d])
    return [order, *([d for d in long if strides[d] == stride] for stride in (0, 1))]


# -- from one program to another of its structure --------------------------------------------------


def for_other_sizes(ugraph: UGraph, program: KernelGraph) -> UGraph:
    """Return a µGraph for another program of the same structure. It must be proven.

    Sizes follow from the operands. Numbers, and attributes of library ops, are replaced by value:
    if two that are equal in the old program differ in the new one, the old value stays.

    Raises:
        GraphError: The kernels do not fit the program.
    """
    changes = _Changes.between(ugraph.program, program)
    return symbolic.for_program(ugraph, program, change=changes.of)


@dataclass(frozen=True)
class _Changes:
    """What changes in kernels from one program to another of its structure.

    Attributes:
        numbers: New numbers by old ones.
        attrs: New values of sizes by the op's name, the attribute's name, and the old value.
    """

    numbers: Mapping[float, float]
    attrs: Mapping[tuple[str, str, Any], Any]

    @staticmethod
    def between(old: KernelGraph, new: KernelGraph) -> _Changes:
        numbers = [
            pair
            for before, after in _pairs(expand(old), expand(new))
            for pair in zip(_all_numbers(before), _all_numbers(after), strict=True)
        ]
        attrs = [
            ((before.name, name, x), y)
            for before, after in _pairs(old, new)
            for (name, x), (_, y) in zip(before.attrs, after.attrs, strict=True)
            if name in _SIZES
        ]
        return _Changes(_unambiguous(numbers), _unambiguous(attrs))

    def of(self, op: KernelOp) -> KernelOp:
        """Return an op of a µGraph with its new numbers and attributes."""
        return replace(
            op,
            inputs=tuple(self._number(x) for x in op.inputs),
            attrs=tuple((name, self._attr(op.name, name, x)) for name, x in op.attrs),
            block=None if op.block is None else self._of_block(op.block),
        )

    def _of_block(self, block: Any) -> BlockGraph:
        stages = tuple(
            replace(
                stage,
                body=tuple(
                    replace(
                        op,
                        args=tuple(map(self._number, op.args)),
                        attrs=tuple((name, self._number(x)) for name, x in op.attrs),
                    )
                    for op in stage.body
                ),
            )
            for stage in block.stages
        )
        return BlockGraph(block.axes, block.inputs, stages, block.outputs)

    def _number(self, x: Any) -> Any:
        return self.numbers.get(x, x) if isinstance(x, float) else x

    def _attr(self, op: str, name: str, value: Any) -> Any:
        if name in _SIZES:
            return self.attrs.get((op, name, value), value)
        return self._number(value)


def _pairs(old: KernelGraph, new: KernelGraph) -> Iterable[tuple[KernelOp, KernelOp]]:
    return zip(old.ops, new.ops, strict=True)


def _all_numbers(op: KernelOp) -> Iterator[float]:
    """Yield the numbers of an op. A mean multiplies by one over its size."""
    yield from _numbers(op)
    attrs = dict(op.attrs)
    if op.name == "reduction" and attrs["kind"] == "mean":
        x = op.inputs[0]
        assert isinstance(x, DTensor)
        yield 1.0 / x.dims[attrs["dim"]]


def _unambiguous(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a dict of the pairs, without keys that have several values."""
    values: dict[Any, set[Any]] = {}
    for key, value in pairs:
        values.setdefault(key, set()).add(value)
    return {key: next(iter(found)) for key, found in values.items() if len(found) == 1}
