"""4-bit floats whose products are small until they are summed: only where sums alone read them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mirage_hf as mi
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.plan.small_codes import SmallCodes
from mirage_hf.formats.bitsandbytes import TABLES
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.ops.dtypes import E2M1
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune.space import schedules

Write = Callable[[KernelGraph, DTensor, DTensor], DTensor]

ROWS, WIDTH = 16, 64


def program(write: Write, table: tuple[float, ...] = E2M1) -> KernelGraph:
    """Return a program that `write` adds to: of x (1, WIDTH), and numbers (ROWS, WIDTH)."""
    g = mi.new_graph()
    x = g.new_input((1, WIDTH), "float32", name="x")
    codes = g.cast(g.new_input((ROWS, WIDTH), "uint4", name="codes", constant=True), "float32")
    g.mark_output(write(g, x, g.lookup(codes, values=table)))
    return g


def small_codes_of(g: KernelGraph) -> list[SmallCodes]:
    """Return the small codes of each kernel of the first µGraphs that looks codes up."""
    found = [r.ugraph for r in search(g, SearchOptions(threads=1))[0][:4]]
    ops = [op for ugraph in found for op in place_kernels(ugraph) if op.block is not None]
    layouts = [plan_kernel(op, s).layout for op in ops for s in schedules(op)[:8]]
    looked_up = [layout.small_codes for layout in layouts if layout.tables]
    assert looked_up
    return looked_up


def test_products_that_are_summed_are_small():
    g = program(lambda g, x, w: g.reduction(g.mul(x, w), 1, "sum"))
    found = [f for f in small_codes_of(g) if f.inputs]
    assert found and all(len(f.inputs) == 1 and len(f.sums) == 1 for f in found)


WRITES: dict[str, Write] = {
    "the number itself is stored": lambda g, x, w: g.add(w, 0.0),
    "products are stored": lambda g, x, w: g.mul(x, w),
    "a maximum of products": lambda g, x, w: g.reduction(g.mul(x, w), 1, "max"),
    "the number is added": lambda g, x, w: g.reduction(g.add(x, w), 1, "sum"),
    "a sum of products plus the number": lambda g, x, w: g.reduction(
        g.add(g.mul(x, w), w), 1, "sum"
    ),
    "the square of the number": lambda g, x, w: g.reduction(g.mul(w, w), 1, "sum"),
    "the number is divided by": lambda g, x, w: g.reduction(g.div(x, g.add(w, 8.0)), 1, "sum"),
}


@pytest.mark.parametrize("name", WRITES)
def test_other_numbers_are_not(name):
    assert not any(f.inputs or f.sums for f in small_codes_of(program(WRITES[name])))


def test_numbers_of_other_tables_are_not():
    g = program(lambda g, x, w: g.reduction(g.mul(x, w), 1, "sum"), TABLES["nf4"])
    assert not any(f.inputs or f.sums for f in small_codes_of(g))
