"""Sums over codes, which each thread begins on its own.

A thread loads 16 bytes of codes at a time. First it adds what it computed from one such *run*. The
sums of the runs are added later: after they have been multiplied by a scale, say, or after a loop.
So threads exchange numbers once, and not in each group of codes.
"""

from __future__ import annotations

from collections.abc import Mapping

from mirage_hf.codegen.plan.tiling import Tiling
from mirage_hf.graph.block import BlockInput, BlockOp, Role
from mirage_hf.graph.coded import is_packed, word_dims
from mirage_hf.graph.tensors import DTensor
from mirage_hf.ops.dtypes import BYTE_DTYPES, CODE_DTYPES, element_bytes

#: Bytes of codes that a thread loads at a time, and bytes of a word of packed codes.
RUN_BYTES, WORD_BYTES = 16, 4

#: Offsets from here on do not fit in 32 bits.
_FAR = 2**31


def run_lengths(tiling: Tiling) -> Mapping[str, int]:
    """Return how many codes a run has, by the axis along which codes are stored."""
    lengths: dict[str, int] = {}
    for i in tiling.block.inputs:
        dtype = tiling.dtype(i)
        if dtype not in CODE_DTYPES or (len(i.sources) > 1 and not tiling.selects_source(i)):
            continue
        for axis, most in _runs(i, tiling.operands[i.sources[0]]):
            if axis == i.joined or tiling.block.role(axis) is Role.GRID:
                continue
            length = min(tiling.tile(axis), most)
            if length > 1 and tiling.block.split_size(axis) % tiling.tile(axis) == 0:
                lengths[axis] = min(length, lengths.get(axis, length))
    return lengths


def _runs(i: BlockInput, operand: DTensor) -> list[tuple[str, int]]:
    """Return the axes of a run of codes, the shortest stride first, and how long it is on each."""
    if not is_packed(operand.dtype):
        length = int(RUN_BYTES / element_bytes(operand.dtype))
        contiguous = [a for a, s in zip(i.axes, operand.strides, strict=True) if a and s == 1]
        return [(a, length) for a in contiguous[:1]]
    counts = list(word_dims(operand.dims, operand.strides).items())
    longest, count = counts[0]  # only along this dim are there codes of further words
    counts[0] = longest, count * RUN_BYTES // WORD_BYTES
    return [(str(i.axes[d]), n) for d, n in reversed(counts)]


def byte_words(tiling: Tiling, lengths: Mapping[str, int]) -> dict[str, str]:
    """Return the inputs whose bytes are loaded as words of four codes, with the axis of a word.

    Words stay words in registers until their codes are multiplied, so a step can hold those of the
    next one. Each thread then decodes all four codes of a word at once. Bytes beside packed codes
    are scales or zero points, which stay as they are.

    Args:
        tiling: The tiling.
        lengths: How many codes a run has, by axis.
    """
    words: dict[str, str] = {}
    if any(is_packed(tiling.dtype(i)) for i in tiling.block.inputs):
        return words
    for i in tiling.block.inputs:
        if tiling.dtype(i) not in BYTE_DTYPES or i.rotation or i.padding or i.bounds is not None:
            continue
        if len(i.sources) > 1 and (not tiling.selects_source(i) or tiling.differing_dims(i)):
            continue
        operand = tiling.operands[i.sources[0]]
        strides = list(zip(i.axes, operand.strides, strict=True))
        contiguous = [a for a, s in strides if a is not None and s == 1]
        others = [s for s in operand.strides if s != 1]
        reach = sum(s * (n - 1) for s, n in zip(operand.strides, operand.dims, strict=True))
        if len(contiguous) != 1 or any(s % WORD_BYTES for s in others) or reach >= _FAR:
            continue
        (axis,) = contiguous
        if axis != i.joined and lengths.get(axis, 0) % WORD_BYTES == 0 and axis in lengths:
            words[i.name] = axis
    return words


def partial_sums(tiling: Tiling, lengths: Mapping[str, int]) -> dict[str, str]:
    """Return the values that have one element for each run, by name, with the axis of the runs.

    These are sums over runs, and products of such a sum and values without this axis. Something
    must add each of them up: a sum over another axis, or an accumulator.
    """
    block = tiling.block
    readers: dict[str, list[BlockOp]] = {}
    for op in tiling.ops.values():
        for a in op.args:
            readers.setdefault(str(a), []).append(op)
    accumulated = {a.arg for s in block.stages for a in s.accumulators if a.kind == "sum"}
    kept = {a.arg for s in block.stages for a in s.accumulators} - accumulated
    kept |= {a.shift for s in block.stages for a in s.accumulators if a.shift is not None}
    kept |= {o.value for o in block.outputs}

    def chain(value: str) -> set[str] | None:
        """Return a value with the products made of it, None if something needs the whole sum."""
        if value in kept:
            return None
        found = {value}
        for op in readers.get(value, ()):
            if op.fn == "sum":
                continue
            if op.fn != "mul" or [str(a) for a in op.args].count(value) != 1:
                return None
            further = chain(op.out)
            if further is None:
                return None
            found |= further
        return found

    partial: dict[str, str] = {}
    for op in tiling.ops.values():
        over = op.over
        if op.fn != "sum" or over is None or over not in lengths:
            continue
        if tiling.tile(over) == lengths[over] or str(op.args[0]) in partial:
            continue
        made = chain(op.out)
        if made is not None and partial.keys().isdisjoint(made):
            partial |= dict.fromkeys(made, over)
    return partial
