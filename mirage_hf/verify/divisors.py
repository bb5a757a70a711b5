"""Find kernels that divide by something that the program does not divide by.

Proofs draw numbers at random, so no divisor is ever 0, or near it. A kernel that computes s·(x + y)
as (x + y) / x · (s·x) is proven equal. But it is wrong where x is 0, and far off where x is small.
So a kernel may divide only by what is never negative, such as a sum of exponentials or a root. That
is 0 only if all of its terms are. A program may divide by anything, and its kernels then, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mirage_hf.errors import Rejected
from mirage_hf.graph.block import BlockGraph
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.expand import expand

#: Ops that divide their first operand by the second.
_DIVISIONS = ("div", "ratio")

#: Ops whose result is never negative, whatever they read.
_NEVER_NEGATIVE = frozenset("bits exp relu rsqrt sigmoid softplus sqrt square".split())

#: Ops whose result is not negative if no operand is, and those if the first operand is not.
_OF_ALL = frozenset("add concat div matmul min mul ratio".split())
_OF_FIRST = frozenset(
    "cast max mean permute pow reduction repeat reshape slice sum take within".split()
)


def new_divisor(ugraph: UGraph) -> Rejected | None:
    """Return why kernels divide by something that may be 0 where the program does not, or None."""
    found = next(_signed_divisors(ugraph.kernels), None)
    if found is None or next(_signed_divisors(expand(ugraph.program)), None) is not None:
        return None
    return Rejected(f"it divides by {found}, which may be 0, and the program does not")


def _signed_divisors(graph: KernelGraph) -> Iterator[str]:
    """Yield the divisors of a graph and of its kernels that may be negative."""
    signs: dict[str, bool] = {}
    for op in graph.ops:
        if op.block is None:
            operands = [_name(x) if isinstance(x, DTensor) else x for x in op.inputs]
            if op.name in _DIVISIONS and not _is_never_negative(operands[1], signs):
                yield str(operands[1])
            for t in op.outputs:
                signs[_name(t)] = _result_is_never_negative(op.name, operands, signs)
        else:
            yield from _signed_divisors_of_block(op, op.block, signs)


def _name(t: DTensor) -> str:
    return f"%t{t.index}"


def _signed_divisors_of_block(
    op: KernelOp, block: BlockGraph, signs: dict[str, bool]
) -> Iterator[str]:
    """Yield a kernel's divisors that may be negative, and add the signs of its results."""
    inside: dict[str, bool] = {}
    for read in block.inputs:
        sources = [op.inputs[number] for number in read.sources]
        is_as_stored = read.rotation is None and (read.padding is None or read.padding.value >= 0)
        inside[read.name] = read.bounds is not None or (
            is_as_stored
            and all(isinstance(x, DTensor) and signs.get(_name(x), False) for x in sources)
        )
    for stage in block.stages:
        for operation in stage.body:
            if operation.fn in _DIVISIONS and not _is_never_negative(operation.args[1], inside):
                yield operation.args[1] if isinstance(operation.args[1], str) else "a number"
            inside[operation.out] = _result_is_never_negative(operation.fn, operation.args, inside)
        for accumulator in stage.accumulators:
            inside[accumulator.out] = inside[accumulator.arg]
    for t, stored in zip(op.outputs, block.outputs, strict=True):
        signs[_name(t)] = inside[stored.value]


def _result_is_never_negative(
    name: str, operands: Sequence[object], signs: Mapping[str, bool]
) -> bool:
    """Return whether the result of an op is known not to be negative."""
    if name in _NEVER_NEGATIVE:
        return True
    known = [_is_never_negative(x, signs) for x in operands]
    if name == "max" and any(known):
        return True
    if name == "select":
        return all(known[1:])
    if name in ("mul", "matmul") and operands[0] == operands[1]:
        return True
    return known[0] if name in _OF_FIRST else name in _OF_ALL and all(known)


def _is_never_negative(operand: object, signs: Mapping[str, bool]) -> bool:
    if isinstance(operand, str):
        return signs.get(operand, False)
    return isinstance(operand, (int, float)) and operand >= 0
