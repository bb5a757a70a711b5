"""4-bit floats whose products are small until they are summed.

The bits of such a float (e2m1) are those of a float16 of 2^-14 of its value. To multiply each by
2^14 would take an instruction. If only sums read its products, they multiply once instead. A power
of two changes no digit of a number that is 2^-126 or more. Smaller ones come from products below
2^-112, and what they lose is below 2^-135.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mirage_hf.codegen.plan.tiling import Tiling
from mirage_hf.graph.block import BlockOp
from mirage_hf.ops.dtypes import E2M1

#: What decoding by arithmetic multiplies a number by.
SMALL = 2.0**-14


@dataclass(frozen=True)
class SmallCodes:
    """Inputs that are decoded as `SMALL` times their numbers.

    Attributes:
        inputs: The inputs.
        sums: The sums of their products, which are divided by `SMALL`.
    """

    inputs: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()


def small_codes(
    tiling: Tiling, tables: Mapping[str, tuple[float, ...]], unformed: Collection[str]
) -> SmallCodes:
    """Return the inputs whose numbers only sums of products read, and these sums.

    Args:
        tiling: The tiling.
        tables: The tables of inputs whose codes are looked up as they are decoded.
        unformed: Products that are never formed, as tensor cores compute them.
    """
    inputs, sums = set[str](), set[str]()
    accumulators = [a for stage in tiling.block.stages for a in stage.accumulators]
    kept = {o.value for o in tiling.block.outputs} | {a.arg for a in accumulators}
    kept |= {a.shift for a in accumulators if a.shift is not None}

    def readers(value: str) -> list[BlockOp]:
        return [op for op in tiling.ops.values() if value in op.args]

    coded = {name for name, table in tables.items() if table == E2M1}
    numbers = {name: {op.out for op in readers(name)} for name in coded}
    every_number = set[str]().union(*numbers.values())
    for name in coded:
        products = [op for number in numbers[name] for op in readers(number)]
        read = [op for product in products for op in readers(product.out)]
        held = {*numbers[name], *(product.out for product in products)}
        are_products = all(
            op.fn == "mul" and op.over is None and sum(a in every_number for a in op.args) == 1
            for op in products
        )
        are_summed = all(op.fn == "sum" and op.over is not None for op in read)
        if are_products and are_summed and held.isdisjoint({*kept, *unformed}):
            inputs.add(name)
            sums |= {op.out for op in read}
    return SmallCodes(frozenset(inputs), frozenset(sums))
