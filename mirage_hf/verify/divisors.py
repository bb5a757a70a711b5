"""Find kernels that divide by something that may be 0, where the program does not.

Proofs draw numbers at random, so no divisor is ever 0, or near it. A kernel that computes s·(x + y)
as (x + y) / x · (s·x) is proven equal. But it is wrong where x is 0, and far off where x is small.

So a kernel may divide by what is always positive, such as a sum of exponentials or a root. It may
divide by what is never negative, such as a masked sum, if the program divides by such a value, too.
If the program divides by anything else, its kernels may divide by anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from mirage_hf.errors import Rejected
from mirage_hf.graph.block import BlockGraph
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.expand import expand


class Sign(IntEnum):
    """What is known of the sign of a value. A larger one says more."""

    UNKNOWN = 0
    NOT_NEGATIVE = 1
    POSITIVE = 2


#: Ops that divide their first operand by the second.
_DIVISIONS = ("div", "ratio")

#: Ops whose result counts as positive. A root of 0 is 0, but only a program's own roots are in its
#: kernels.
_POSITIVE = frozenset("exp rsqrt sigmoid softplus sqrt".split())

#: Ops whose result is not negative, and positive if all operands are.
_NOT_NEGATIVE = frozenset("relu square".split())

#: Ops whose result has the sign that is known of all operands.
_OF_ALL = frozenset("concat div min mul ratio".split())

#: Ops whose result has the sign that is known of the first operand.
_OF_FIRST = frozenset("cast max mean permute pow reduction repeat reshape slice sum take".split())


def new_divisor(ugraph: UGraph) -> Rejected | None:
    """Return why kernels divide by something that may be 0 where the program does not, or None."""
    allowed = min((sign for _, sign in _divisors(expand(ugraph.program))), default=Sign.POSITIVE)
    for name, sign in _divisors(ugraph.kernels):
        if sign < allowed:
            return Rejected(f"it divides by {name}, which may be 0, and the program does not")
    return None


def _divisors(graph: KernelGraph) -> Iterator[tuple[str, Sign]]:
    """Yield the divisors of a graph and of its kernels, except for numbers, with their signs."""
    signs: dict[str, Sign] = {}
    for op in graph.ops:
        if op.block is None:
            operands = [_name(x) if isinstance(x, DTensor) else x for x in op.inputs]
            if op.name in _DIVISIONS and isinstance(operands[1], str):
                yield operands[1], signs.get(operands[1], Sign.UNKNOWN)
            for t in op.outputs:
                signs[_name(t)] = sign_of(op.name, operands, signs, dict(op.attrs))
        else:
            yield from _divisors_of_block(op, op.block, signs)


def _name(t: DTensor) -> str:
    return f"%t{t.index}"


def _divisors_of_block(
    op: KernelOp, block: BlockGraph, signs: dict[str, Sign]
) -> Iterator[tuple[str, Sign]]:
    """Yield a kernel's divisors, and add the signs of its results."""
    inside: dict[str, Sign] = {}
    for read in block.inputs:
        sources = [op.inputs[number] for number in read.sources]
        known = [signs.get(_name(x), Sign.UNKNOWN) for x in sources if isinstance(x, DTensor)]
        if read.padding is not None:
            known.append(_of_number(read.padding.value))
        if read.rotation is not None:
            known.append(Sign.UNKNOWN)
        inside[read.name] = Sign.NOT_NEGATIVE if read.bounds is not None else min(known)
    for stage in block.stages:
        for operation in stage.body:
            args = operation.args
            if operation.fn in _DIVISIONS and isinstance(args[1], str):
                yield args[1], inside[args[1]]
            inside[operation.out] = sign_of(operation.fn, args, inside, dict(operation.attrs))
        for accumulator in stage.accumulators:
            inside[accumulator.out] = inside[accumulator.arg]
    for t, stored in zip(op.outputs, block.outputs, strict=True):
        signs[_name(t)] = inside[stored.value]


def sign_of(
    name: str, operands: Sequence[object], signs: Mapping[str, Sign], attrs: Mapping[str, Any]
) -> Sign:
    """Return what is known of the sign of an op's result.

    Args:
        name: The op.
        operands: Names of values, and numbers.
        signs: What is known of the values.
        attrs: The op's attributes.
    """
    if name in _POSITIVE:
        return Sign.POSITIVE
    if name == "bits":
        return Sign.NOT_NEGATIVE
    known = [signs.get(x, Sign.UNKNOWN) if isinstance(x, str) else _of_number(x) for x in operands]
    lowest = min(known)
    if name in _NOT_NEGATIVE or (name == "mul" and operands[0] == operands[1]):
        return max(lowest, Sign.NOT_NEGATIVE)
    if name == "max" and len(known) > 1:
        return max(known)
    if name == "add":  # a positive number and what is not negative
        return max(known) if lowest else Sign.UNKNOWN
    if name == "clamp":
        return max(known[0], _of_number(attrs.get("min")))
    if name == "select":
        return min(known[1:])
    if name in ("matmul", "within"):  # masks, and sums of nothing, may be 0
        of = lowest if name == "matmul" else known[0]
        return min(of, Sign.NOT_NEGATIVE)
    if name in _OF_FIRST:
        return known[0]
    return lowest if name in _OF_ALL else Sign.UNKNOWN


def _of_number(x: object) -> Sign:
    if not isinstance(x, (int, float)) or x < 0:
        return Sign.UNKNOWN
    return Sign.POSITIVE if x > 0 else Sign.NOT_NEGATIVE
