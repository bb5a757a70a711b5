"""Find codes that tensor cores multiply, and say in which order threads hold them.

A word holds eight neighbouring codes, lowest bits first. Tensor cores want two neighbouring
elements of the summed axis in each register. So a thread takes two neighbouring words and decodes
code number e of both at once. A tile then holds code 0 of all its words, code 1 of all its words,
and so on. This is its *code order*. A sum may take its elements in any order, so the kernel holds
all tiles along such an axis in code order.

A scale that all codes of a group share may be part of the factor. A decoded code times its scale
is rounded to 16 bits, as libraries decode weights. Then one product sums over several groups, and
over the codes of each group, in one accumulator.

Codes may also be 4-bit floats (e2m1), which are exact in 16 bits. Their scale may be a power of two
in a byte (e8m0). Only bfloat16 has all these powers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from mirage_hf.codegen.plan.tiling import Tiling
from mirage_hf.graph.block import BlockInput, BlockOp, Contraction
from mirage_hf.graph.coded import is_exponent, is_packed, word_dims
from mirage_hf.graph.grouped_products import GroupedProduct, grouped_products, looks_up_e2m1
from mirage_hf.ops.dtypes import CODE_DTYPES, CODES_PER_WORD

#: The float of a 16-bit dtype whose lowest mantissa bits count 1. A code added to it is exact.
OFFSETS = {torch.float16: 1024.0, torch.bfloat16: 128.0}

#: Fewest codes of a tile in code order: two words.
PAIR = 2 * CODES_PER_WORD

#: Largest zero point that is subtracted from a code exactly in all of these dtypes.
_LARGEST_ZERO = 120


def is_code_difference(tiling: Tiling, op: BlockOp) -> bool:
    """Return True if an op subtracts an integer input from packed codes."""
    if op.fn != "sub" or op.args[0] not in tiling.inputs or op.args[1] not in tiling.inputs:
        return False
    codes, zeros = (tiling.dtype(tiling.inputs[str(a)]) for a in op.args)
    return is_packed(codes) and zeros in CODE_DTYPES and not zeros.is_floating_point


def holds_codes(tiling: Tiling, value: str) -> bool:
    """Return True if a value is packed codes, or their difference from zero points."""
    if value in tiling.inputs:
        return is_packed(tiling.dtype(tiling.inputs[value]))
    op = tiling.ops.get(value)
    if op is None or op.fn != "sub" or not isinstance(op.args[0], str):
        return False
    is_number = not isinstance(op.args[1], str)
    return op.args[0] in tiling.inputs and (
        is_code_difference(tiling, op) or (is_number and holds_codes(tiling, op.args[0]))
    )


def is_small_float(tiling: Tiling, value: str) -> bool:
    """Return True if a value is the number that a packed 4-bit float (e2m1) stands for."""
    op = tiling.ops.get(value)
    if op is None or op.args[0] not in tiling.inputs or not looks_up_e2m1(op):
        return False
    return tiling.dtype(tiling.inputs[str(op.args[0])]) is torch.uint4


def scales_in(tiling: Tiling, scale: str, dtype: torch.dtype) -> bool:
    """Return True if the scales in an input are exact in the 16-bit dtype of a factor."""
    stored = tiling.dtype(tiling.inputs[scale])
    return stored is dtype or (is_exponent(stored) and dtype is torch.bfloat16)


def groups_in_products(tiling: Tiling) -> dict[str, GroupedProduct]:
    """Return the products that tensor cores sum over all groups of codes, by their names.

    One factor is codes times the scale of their group. A tile holds one group or several.
    """
    return {
        p.contraction.product: p
        for p in grouped_products(tiling.block)
        if tiling.inputs[p.scale].bounds is None and _may_be_scaled(tiling, p)
    }


def _may_be_scaled(tiling: Tiling, p: GroupedProduct) -> bool:
    """Return True if tensor cores may multiply a value times the scale of its group.

    Powers of two in bytes need bfloat16. Only in bfloat16 are 4-bit floats decoded in pairs.
    """
    if holds_codes(tiling, p.value) and tiling.dtype(tiling.inputs[p.scale]) in OFFSETS:
        return True
    has_codes = holds_codes(tiling, p.value) or is_small_float(tiling, p.value)
    dtype = tiling.mma_dtype
    return has_codes and dtype is torch.bfloat16 and scales_in(tiling, p.scale, dtype)


def code_factors(
    tiling: Tiling,
    products: Iterable[tuple[Contraction, torch.dtype]],
    zero_points: Mapping[str, float],
) -> dict[str, torch.dtype]:
    """Return the packed inputs that are decoded to a factor's 16-bit dtype, in code order.

    The result also names the differences from zero points that are the factors.

    Args:
        tiling: The tiling.
        products: The products on tensor cores, with the dtype of their factors.
        zero_points: The number that decoding subtracts, by input.
    """
    found: dict[str, torch.dtype] = {}
    products, grouped = list(products), groups_in_products(tiling)
    formed = {c.product for c, _ in products}
    for c, dtype in products:
        for x in (c.a, c.b):
            scaled = grouped.get(c.product)
            is_scaled = scaled is not None and scaled.factor == x
            factor = x
            if scaled is not None and is_scaled:
                factor = scaled.value
                if not scales_in(tiling, scaled.scale, dtype):
                    continue
            is_float = is_scaled and is_small_float(tiling, factor)
            if is_float and dtype is not torch.bfloat16:
                continue
            if dtype not in OFFSETS or not (is_float or holds_codes(tiling, factor)):
                continue
            name = factor if factor in tiling.inputs else str(tiling.ops[factor].args[0])
            zero = zero_points.get(name, 0.0)
            is_input = factor == name
            subtracted = is_input or is_float or name in zero_points
            exact = zero <= _LARGEST_ZERO and (
                subtracted or is_code_difference(tiling, tiling.ops[factor])
            )
            readers = {x} if is_scaled else formed
            only_read_here = _readers(tiling, factor) <= readers and (
                is_input or _readers(tiling, name) == {factor}
            )
            if is_scaled:
                only_read_here &= _readers(tiling, x) <= formed
            if exact and only_read_here and _may_be_reordered(tiling, tiling.inputs[name], c.over):
                found |= {name: dtype, factor: dtype}
    return found


def packs_along(tiling: Tiling, axis: str) -> bool:
    """Return True if words of an input hold codes along an axis."""
    for i in tiling.block.inputs:
        operand = tiling.operands[i.sources[0]]
        if is_packed(operand.dtype):
            packed = word_dims(operand.dims, operand.strides)
            if axis in (i.axes[d] for d in packed):
                return True
    return False


def _readers(tiling: Tiling, value: str) -> set[str]:
    """Return the ops and accumulators that read a value."""
    found = {op.out for op in tiling.ops.values() if value in op.args}
    return found | {a.out for s in tiling.block.stages for a in s.accumulators if a.arg == value}


def _may_be_reordered(tiling: Tiling, codes: BlockInput, axis: str) -> bool:
    """Return True if nothing but sums and elementwise ops depends on the order along an axis."""
    operand = tiling.operands[codes.sources[0]]
    block, tile = tiling.block, tiling.tile(axis)
    return (
        [codes.axes[d] for d in word_dims(operand.dims, operand.strides)] == [axis]
        and tile % PAIR == 0
        and block.split_size(axis) % tile == 0
        and not any(axis in o.axes for o in block.outputs)
        and not any(
            axis in (i.bounds, i.joined)
            or (i.rotation is not None and i.rotation.axis == axis)
            or (i.padding is not None and i.padding.axis == axis)
            for i in block.inputs
        )
    )
