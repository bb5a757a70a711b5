"""Mutants of µGraphs that decode weights: each one decodes in another way.

A mutant is a µGraph that the search found, with one change. Changes of inputs put library ops
before the kernels: they take nibbles, groups or scale rows in another order, or compute other zero
points. Changes of block graphs are those of `mutants`, and some of constants, zero points and
scales.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import torch

from mirage_hf.errors import MirageError, Rejected
from mirage_hf.formats import compressed_tensors_fp4 as fp4
from mirage_hf.formats import gguf, gptq
from mirage_hf.formats.coding import Coding, write_joined
from mirage_hf.formats.stored import Split
from mirage_hf.graph.block import Accumulator, BlockGraph, BlockOp, Stage
from mirage_hf.graph.indices import indices_of, num_choices
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp, new_kernel_graph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops.dtypes import CODE_DTYPES
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify.field_proof import prove
from tests.helpers import mutants, reference_executor
from tests.helpers.mutants import Mutant

# -- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodedProgram:
    """A linear whose weight is decoded.

    Attributes:
        graph: The program.
        roles: "x", "norm" or a role of `Coding.roles` for each input.
    """

    graph: KernelGraph
    roles: tuple[str, ...]


def coded_linear(codings: Sequence[Coding], rows: int, norm: bool = False) -> CodedProgram:
    """Return x · Wᵀ for one weight, or for several that are joined, after RMSNorm if `norm`."""
    g = new_kernel_graph()
    first = codings[0]
    x = g.new_input((rows, first.columns), first.dtype)
    roles = ["x"]
    if norm:
        x = g.rms_norm(x, g.new_input((1, first.columns), first.dtype, constant=True))
        roles.append("norm")
    _, weight = write_joined(codings, g)
    roles += [r for c in codings for r in c.roles]
    g.mark_output(g.matmul(x, weight))
    return CodedProgram(g, tuple(roles))


def coding(
    kind: str, rows: int, columns: int, group: int = 0, dtype: torch.dtype = torch.float16
) -> Coding:
    """Return the coding of a weight (rows, columns).

    Args:
        kind: "int4", "int8", "fp8", "nvfp4" or "mxfp4". Then "words", "bytes" or "floats" if
            there are zero points of that form. Zero points in words lie eight rows to a word.
        rows: The rows of the weight.
        columns: Its columns.
        group: The columns that share a scale. 0 means all of them. For "fp8" also the rows.
        dtype: The dtype of the weight.
    """
    code, _, zero_points = kind.partition(" ")
    u4, u8, i8 = torch.uint4, torch.uint8, torch.int8
    if code.endswith("fp4"):
        written = fp4.FORMATS[f"{code}-pack-quantized"]
        return fp4._coding(Split(rows, columns, group=group), dtype, written)
    if code == "fp8":
        split = Split(rows, columns, group or 1, group)
        scales = (split.per_block if group else split.per_row)(torch.float32)
        return Coding(rows, columns, dtype, split.codes(torch.float8_e4m3fn), scales)
    in_words = zero_points == "words"
    split = Split(rows, columns, 8 if in_words else 1, group)
    codes = split.codes(u4 if code == "int4" else u8 if zero_points == "floats" else i8)
    zeros = {
        "words": lambda: split.packed_along_rows(u4, 8),
        "bytes": lambda: split.per_row(u8 if code == "int4" else i8),
        "floats": lambda: split.per_row(dtype),
        "": lambda: None,
    }[zero_points]()
    middle = 8.0 if code == "int4" and zeros is None else 0.0
    return Coding(rows, columns, dtype, codes, split.per_row(dtype), zeros, middle)


def act_order(rows: int, columns: int, group: int, zero: int | None) -> Coding:
    """Return a coding of GPTQ whose columns are grouped in another order."""
    half = torch.float16
    return gptq.coding_of(rows, columns, group, torch.uint4, half, half, zero, torch.int32)


#: Programs by name.
PROGRAMS: dict[str, Callable[[], CodedProgram]] = {
    "int4, 1 row": lambda: coded_linear([coding("int4", 16, 256, 64)], 1),
    "int4, groups of 128": lambda: coded_linear([coding("int4", 16, 256, 128)], 2, norm=True),
    "int4, as many groups as columns in each": lambda: coded_linear(
        [coding("int4", 16, 256, 16)], 3
    ),
    "int4, zero points in words": lambda: coded_linear(
        [coding("int4 words", 16, 256, 64)], 2, norm=True
    ),
    "int4, zero points in bytes": lambda: coded_linear([coding("int4 bytes", 16, 128, 32)], 4),
    "int4, joined": lambda: coded_linear(
        [coding("int4", n, 128, 32) for n in (16, 8, 8)], 1, norm=True
    ),
    "int4, joined, zero points in words": lambda: coded_linear(
        [coding("int4 words", n, 128, 32) for n in (16, 16)], 2
    ),
    "int4 rows, 16 rows": lambda: coded_linear([coding("int4", 16, 128)], 16),
    "int8 rows": lambda: coded_linear([coding("int8", 16, 128)], 2, norm=True),
    "int8 groups, zero points": lambda: coded_linear([coding("int8 bytes", 16, 128, 32)], 2),
    "uint8 groups, zero points in floats": lambda: coded_linear(
        [coding("int8 floats", 16, 128, 64)], 1, norm=True
    ),
    "fp8 blocks": lambda: coded_linear([coding("fp8", 32, 128, 16)], 2),
    "fp8 blocks, norm": lambda: coded_linear([coding("fp8", 32, 128, 32)], 1, norm=True),
    "fp8 rows": lambda: coded_linear([coding("fp8", 16, 128)], 3),
    "nvfp4, 1 row": lambda: coded_linear([coding("nvfp4", 16, 128, 16)], 1),
    "nvfp4, joined": lambda: coded_linear(
        [coding("nvfp4", n, 128, 16) for n in (16, 8, 8)], 2, norm=True
    ),
    "mxfp4, 16 rows": lambda: coded_linear([coding("mxfp4", 16, 128, 32)], 16),
    "mxfp4, norm": lambda: coded_linear([coding("mxfp4", 16, 128, 32)], 2, norm=True),
    "act-order, 1 row": lambda: coded_linear([act_order(16, 128, 32, 8)], 1),
    "act-order, zero points": lambda: coded_linear([act_order(16, 64, 16, None)], 2, norm=True),
}

#: Programs of blocks of GGUF, by name.
BLOCKS: dict[str, Callable[[], CodedProgram]] = {
    "Q4_K": lambda: coded_linear([gguf.coding_of(12, 8, 256, torch.bfloat16)], 1),
    "Q5_K": lambda: coded_linear([gguf.coding_of(13, 8, 256, torch.bfloat16)], 2),
    "Q6_K": lambda: coded_linear([gguf.coding_of(14, 8, 256, torch.bfloat16)], 1),
}


def found_ugraphs(program: CodedProgram, count: int) -> list[UGraph]:
    """Return the first µGraphs of the search, and the first of each further number of kernels."""
    found, _ = search(program.graph, SearchOptions(threads=1))
    chosen = list(found[:count])
    for ranked in found[count:]:
        if ranked.ugraph.num_kernels not in {r.ugraph.num_kernels for r in chosen}:
            chosen.append(ranked)
    return [r.ugraph for r in chosen]


# -- changes of inputs ----------------------------------------------------------------------------

#: Makes another tensor of the same dims from an input, with library ops of a kernel graph.
Change = Callable[[KernelGraph, DTensor], DTensor]


def rolled(g: KernelGraph, x: DTensor, dim: int, by: int = 1) -> DTensor:
    """Move the elements along a dim by some places. The last ones come first."""
    at = -by % x.dims[dim]
    return g.concat([g.slice(x, dim, at, x.dims[dim]), g.slice(x, dim, 0, at)], dim)


def late(g: KernelGraph, x: DTensor, dim: int) -> DTensor:
    """Read the next element along a dim. The last one is read twice."""
    n = x.dims[dim]
    return g.concat([g.slice(x, dim, 1, n), g.slice(x, dim, n - 1, n)], dim)


def last_exchanged(g: KernelGraph, x: DTensor, dim: int) -> DTensor:
    """Exchange the last two elements along a dim."""
    n = x.dims[dim]
    parts = [g.slice(x, dim, n - 1, n), g.slice(x, dim, n - 2, n - 1)]
    return g.concat(([g.slice(x, dim, 0, n - 2)] if n > 2 else []) + parts, dim)


def pairs_share(g: KernelGraph, x: DTensor, dim: int) -> DTensor:
    """Read the even elements along a dim twice, as if each block were twice as long."""
    parts = (*x.dims[:dim], x.dims[dim] // 2, 2, *x.dims[dim + 1 :])
    even = g.slice(g.reshape(x, parts), dim + 1, 0, 1)
    return g.reshape(g.concat([even, even], dim + 1), x.dims)


def transposed(g: KernelGraph, x: DTensor, a: int, b: int) -> DTensor:
    """Read a tensor that is stored with two dims in the other order."""
    order = list(range(len(x.dims)))
    order[a], order[b] = b, a
    stored = [x.dims[d] for d in order]
    return g.permute(x if tuple(stored) == x.dims else g.reshape(x, stored), order)


def reordered(parts: Sequence[int], order: Sequence[int], flipped: Sequence[int] = ()) -> Change:
    """Return a change of the order of eight codes in each word.

    Args:
        parts: The dims into which a word's eight codes are split.
        order: The order of these dims.
        flipped: Dims, each of two elements, whose elements change places.
    """

    def change(g: KernelGraph, x: DTensor) -> DTensor:
        *outer, width = x.dims
        y = g.reshape(x, (*outer, width // 8, *parts))
        base = len(outer) + 1
        for d in flipped:
            y = rolled(g, y, base + d)
        y = g.permute(y, (*range(base), *(base + d for d in order)))
        return g.reshape(y, x.dims)

    return change


NIBBLE_ORDERS: dict[str, Change] = {
    "high nibble first": reordered((4, 2), (0, 1), flipped=(1,)),
    "last nibble first": reordered((2, 2, 2), (0, 1, 2), flipped=(0, 1, 2)),
    "bytes in the other order": reordered((2, 2, 2), (0, 1, 2), flipped=(0, 1)),
    "halves of a word exchanged": reordered((2, 4), (0, 1), flipped=(0,)),
    "even codes first": reordered((4, 2), (1, 0)),
    "halves interleaved": reordered((2, 4), (1, 0)),
}


def input_changes(
    program: CodedProgram, n: int
) -> Iterator[tuple[str, str, Callable[[KernelGraph, Sequence[DTensor]], DTensor]]]:
    """Yield changes of input `n`: a kind, where, and what makes the tensor from all inputs."""
    t, role = program.graph.inputs[n], program.roles[n]
    # along a stride of 0 all places are the same
    wide = [d for d, size in enumerate(t.dims) if size > 1 and t.strides[d]]

    def own(change: Callable[..., DTensor], *args: int):
        return lambda g, inputs: change(g, inputs[n], *args)

    for d in wide:
        for by in {1, -1, t.dims[d] // 2}:
            if by % t.dims[d]:
                yield f"{role} of another place", f"dim {d} by {by}", own(rolled, d, by)
        yield f"{role} off by one", f"dim {d}", own(late, d)
        yield f"{role} exchanged", f"last two of dim {d}", own(last_exchanged, d)
        if t.dims[d] % 2 == 0:
            yield f"{role} shared by too many", f"dim {d}", own(pairs_share, d)
    for a in wide:
        for b in wide[wide.index(a) + 1 :]:
            yield f"{role} transposed", f"dims {a}, {b}", own(transposed, a, b)
    if role == "codes":
        for name, change in NIBBLE_ORDERS.items():
            yield "nibbles in another order", name, own(change)
    yield from _value_changes(program, n)


def _value_changes(program: CodedProgram, n: int):
    """Yield changes of the values of an input. x and the weight of the norm have none."""
    role = program.roles[n]
    if role in ("x", "norm"):
        return

    def own(name: str, *numbers: float):
        return lambda g, inputs: g.apply(name, [inputs[n], *numbers], {})

    if role in ("codes", "zeros"):
        for by in (1.0, -1.0, 8.0, -8.0):
            yield f"{role} with an offset", str(by), own("add", by)
        yield f"{role} negated", "", own("neg")
        yield f"{role} counted twice", "", own("mul", 2.0)
        yield f"{role} squared", "", own("square")
    if role == "zeros":
        scales = n - 1
        yield "no zero points", "", own("mul", 0.0)
        for name in ("mul", "div"):

            def scaled(g, inputs, name=name):
                return g.apply(name, [inputs[n], g.cast(inputs[scales], inputs[n].dtype)], {})

            yield "zero points scaled otherwise", name, scaled
    if role in ("scales", "divisors"):
        for name in ("square", "neg", "sqrt"):
            yield f"{role} changed", name, own(name)
        yield f"{role} inverted", "", lambda g, inputs: g.div(1.0, inputs[n])
        yield f"no {role}", "", lambda g, inputs: g.div(inputs[n], inputs[n])


def _with_input(
    kernels: KernelGraph, n: int, change: Callable[[KernelGraph, Sequence[DTensor]], DTensor]
) -> KernelGraph:
    """Return the kernel graph whose ops read a changed tensor instead of input `n`."""
    made = KernelGraph()
    own = [made.input_like(t) for t in kernels.inputs]
    readable = [
        made.cast(x, "float16") if x.dtype in CODE_DTYPES and k == n else x
        for k, x in enumerate(own)
    ]
    new = {t.index: x for t, x in zip(kernels.inputs, own, strict=True)}
    new[kernels.inputs[n].index] = change(made, readable)
    for op in kernels.ops:
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        new |= {t.index: y for t, y in zip(op.outputs, made.op_like(op, args), strict=True)}
    made.mark_output(*(new[t.index] for t in kernels.outputs))
    return made


@dataclass(frozen=True)
class GraphChange:
    """A change of a µGraph.

    Attributes:
        kind: What it changes.
        where: Where it does so.
        make: Returns the changed kernel graph, or raises a MirageError if there is no such graph.
    """

    kind: str
    where: str
    make: Callable[[], KernelGraph]


def _input_changes(program: CodedProgram, ugraph: UGraph) -> Iterator[GraphChange]:
    for n, role in enumerate(program.roles):
        if role == "norm":
            continue
        for kind, where, change in input_changes(program, n):
            make = partial(_with_input, ugraph.kernels, n, change)
            yield GraphChange(kind, f"input {n}, {where}", make)


def _as_it_is(kernels: KernelGraph) -> KernelGraph:
    return kernels


def _stride_changes(program: CodedProgram, ugraph: UGraph) -> Iterator[GraphChange]:
    """Yield µGraphs that declare other strides for codes, scales or zero points."""
    for n, t in enumerate(ugraph.kernels.inputs):
        wide = [d for d, size in enumerate(t.dims) if size > 1]
        if program.roles[n] in ("x", "norm"):
            continue
        for a in wide:
            for b in wide[wide.index(a) + 1 :]:
                strides = list(t.strides)
                strides[a], strides[b] = strides[b], strides[a]
                made = KernelGraph()
                try:
                    new = {
                        s.index: made.new_input(
                            s.dims,
                            s.dtype,
                            strides if k == n else s.strides,
                            s.name,
                            constant=s.constant,
                        )
                        for k, s in enumerate(ugraph.kernels.inputs)
                    }
                except MirageError:
                    continue  # strides that words cannot have
                for op in ugraph.kernels.ops:
                    args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
                    outs = made.op_like(op, args)
                    new |= {o.index: y for o, y in zip(op.outputs, outs, strict=True)}
                made.mark_output(*(new[o.index] for o in ugraph.kernels.outputs))
                where = f"input {n}, dims {a}, {b}"
                yield GraphChange("words read in another order", where, partial(_as_it_is, made))


# -- changes of block graphs ----------------------------------------------------------------------


def _decoded_values(block: BlockGraph, op: KernelOp, inputs: set[int]) -> set[str]:
    """Return the values of a block graph that depend on given tensors of the kernel graph."""
    sources = [isinstance(x, DTensor) and x.index in inputs for x in op.inputs]
    found = {i.name for i in block.inputs if any(sources[s] for s in i.sources)}
    for stage in block.stages:
        for b in stage.body:
            if found & {*b.args}:
                found.add(b.out)
        found |= {acc.out for acc in stage.accumulators if acc.arg in found}
    return found


def _block_changes(block: BlockGraph, decoded: set[str]):
    """Yield changes of constants, zero points and scales: a kind, where, and what makes it."""
    for s, stage in enumerate(block.stages):
        for n, op in enumerate(stage.body):
            if not decoded & {op.out, *op.args}:
                continue
            yield from _constant_changes(block, s, n, op)
            if op.fn == "lookup":
                yield from _table_changes(block, s, n, op)
            if op.fn == "sub":
                yield "zero point subtracted twice", op.out, _twice(block, s, n, op)
            if op.fn == "mul" and op.over is None:
                yield from _sum_changes(block, s, op)


def _constant_changes(block: BlockGraph, s: int, n: int, op: BlockOp):
    for k, a in enumerate(op.args):
        if isinstance(a, str):
            continue
        for x in (a + 1, a - 1, 2 * a, a / 2, 0.0, -a):
            args = (*op.args[:k], x, *op.args[k + 1 :])

            def make(args=args):
                return mutants._with_op(block, s, n, replace(op, args=args))

            yield "another constant zero point", f"{op.out} {x}", make


def _table_changes(block: BlockGraph, s: int, n: int, op: BlockOp):
    """Yield graphs that look codes up in another table."""
    values = dict(op.attrs)["values"]
    tables = {
        "next entries": values[1:] + values[:1],
        "other signs": tuple(-x for x in values),
        "halves exchanged": values[8:] + values[:8],
        "first half twice": values[:8] * 2,
    }
    for k in range(1, len(values)):
        if values[k]:
            tables[f"entry {k} doubled"] = (*values[:k], 2 * values[k], *values[k + 1 :])
            tables[f"entry {k} of the one before"] = (
                *values[:k],
                values[k - 1],
                *values[k + 1 :],
            )
    for where, table in tables.items():

        def make(table=table):
            attrs = tuple((name, table if name == "values" else x) for name, x in op.attrs)
            return mutants._with_op(block, s, n, replace(op, attrs=attrs))

        yield "another table", f"{op.out} {where}", make


def _twice(block: BlockGraph, s: int, n: int, op: BlockOp):
    def make() -> BlockGraph:
        first = replace(op, out=op.out + "_once")
        return mutants._with_op(block, s, n, first, replace(op, args=(first.out, op.args[1])))

    return make


def _sum_changes(block: BlockGraph, s: int, product: BlockOp):
    """Yield graphs that sum the factors of a product, and multiply the sums."""
    factors = [a for a in product.args if isinstance(a, str)]
    stage = block.stages[s]
    for n, op in enumerate(stage.body):
        along = op.over is not None and all(op.over in block.carried[a] for a in factors)
        if op.args == (product.out,) and op.fn == "sum" and along and len(factors) == 2:

            def make(n=n, op=op):
                sums = [_sum(block, op, a) for a in factors]
                both = BlockOp(op.out, "mul", tuple(x.out for x in sums), op.axes)
                return mutants._with_op(block, s, n, *sums, both)

            yield "scaled after the wrong sum", op.out, make
    for acc in stage.accumulators:
        along = stage.loop is not None and all(stage.loop in block.carried[a] for a in factors)
        if acc.arg == product.out and acc.kind == "sum" and along and len(factors) == 2:
            yield "scaled after the wrong loop", acc.out, _loop_sums(block, s, acc, factors)


def _sum(block: BlockGraph, op: BlockOp, factor: str) -> BlockOp:
    left = set(block.reduced(block.carried[factor], str(op.over)))
    axes = tuple(a.name for a in block.axes if a.name in left)
    return BlockOp(f"{op.out}_{factor}", "sum", (factor,), axes, over=op.over)


def _loop_sums(block: BlockGraph, s: int, acc: Accumulator, factors: list[str]):
    def make() -> BlockGraph:
        stage = block.stages[s]
        loop = str(stage.loop)
        sums = []
        for a in factors:
            left = set(block.reduced(block.carried[a], loop))
            axes = tuple(x.name for x in block.axes if x.name in left)
            sums.append(Accumulator(f"{acc.out}_{a}", a, "sum", axes))
        others = tuple(x for x in stage.accumulators if x is not acc)
        product = BlockOp(acc.out, "mul", tuple(x.out for x in sums), acc.axes)
        changed = replace(stage, accumulators=(*others, *sums))
        stages = (*block.stages[:s], changed, Stage(None, (product,)), *block.stages[s + 1 :])
        return replace(block, stages=stages)

    return make


def _with_block(kernels: KernelGraph, number: int, change: Callable[[], BlockGraph]) -> KernelGraph:
    """Return the kernel graph whose op of this number has a changed block graph."""
    changed = replace(kernels.ops[number], block=change())
    return mutants._with_ops(kernels, {number: changed})


def _block_changes_of(program: CodedProgram, ugraph: UGraph) -> Iterator[GraphChange]:
    kernels = ugraph.kernels
    weights = {
        t.index
        for t, role in zip(kernels.inputs, program.roles, strict=True)
        if role not in ("x", "norm")
    }
    for number, op in enumerate(kernels.ops):
        if weights & {x.index for x in op.inputs if isinstance(x, DTensor)}:
            weights |= {t.index for t in op.outputs}
        if op.block is None:
            continue
        decoded = _decoded_values(op.block, op, weights)
        own = _block_changes(op.block, decoded)
        usual = (c for c in mutants._changes(op.block) if decoded & {*c[1].split()})
        for kind, where, make in (*own, *usual):
            make_kernels = partial(_with_block, kernels, number, make)
            yield GraphChange(kind, f"kernel {number}, {where}", make_kernels)


class Mutants:
    """The mutants of the decoding of a µGraph, each graph once.

    Building and comparing them takes most of the time, so only those that are asked for are built.
    """

    def __init__(self, program: CodedProgram, ugraph: UGraph):
        self.ugraph = ugraph
        self.changes = [
            change
            for changes in (_block_changes_of, _stride_changes, _input_changes)
            for change in changes(program, ugraph)
        ]
        self._seen = {str(ugraph.kernels)}

    def built(self, change: GraphChange) -> Mutant | None:
        """Return a mutant, or None if there is no such graph or it was returned before."""
        try:
            kernels = change.make()
        except MirageError:
            return None  # not a graph, or not one for these operands
        if (text := str(kernels)) in self._seen:
            return None
        self._seen.add(text)
        return Mutant(change.kind, change.where, UGraph(self.ugraph.program, kernels))


# -- the judge ------------------------------------------------------------------------------------


class Judge:
    """Tell by float64 numbers whether mutants of a program's µGraphs compute something else."""

    def __init__(self, program: CodedProgram, draws: int = 3):
        self.inputs = [_numbers(program, seed) for seed in range(draws)]
        self.want = [reference_executor.run(program.graph, x) for x in self.inputs]
        self.strides = [t.strides for t in program.graph.inputs]

    def __call__(self, ugraph: UGraph) -> str:
        """Return "differs", "equal" or "unclear"."""
        if [t.strides for t in ugraph.kernels.inputs] != self.strides:
            return "differs"  # it reads other elements of memory
        far = 0.0
        for x, want in zip(self.inputs, self.want, strict=True):
            far = max(far, mutants.distance(ugraph, x, want))
            if far > mutants.DIFFERS:
                return "differs"
        return "equal" if far < mutants.EQUAL else "unclear"


def _numbers(program: CodedProgram, seed: int) -> list[torch.Tensor]:
    """Return inputs as float64: small positive scales, codes in their range, normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for t, role in zip(program.graph.inputs, program.roles, strict=True):
        x = torch.rand(t.dims, generator=generator, dtype=torch.float64)
        if role in ("x", "norm"):
            x = torch.randn(t.dims, generator=generator, dtype=torch.float64)
        elif role == "order":
            (chosen,) = {num_choices(c) for c in indices_of(program.graph).values()}
            x = torch.floor(chosen * x)
        elif role.startswith("starts of"):
            x = torch.floor(8 * x)
        elif t.dtype is torch.uint8 and "factors" in program.roles:
            x = torch.floor(256 * x)  # bytes that hold fields
        elif role in ("codes", "zeros"):
            x = torch.floor(16 * x)
        else:
            x = 0.5 + x
        for d, stride in enumerate(t.strides if role == "divisors" else ()):
            x = x if stride else x.narrow(d, 0, 1).expand(t.dims)
        made.append(x)
    return made


@dataclass
class Tally:
    """What the proof said of mutants.

    Attributes:
        originals: How many µGraphs were mutated. All were proven and judged equal.
        refused: The mutants that differ and were refused, by kind.
        unevaluated: How many of these were refused for their inputs, outputs or sizes.
        proven: The mutants that differ and were proven. Each is a fault of the proof.
        equal: How many mutants compute the same function, by the judge and by the proof.
        disputed: The mutants that the judge finds equal and the proof refuses.
        unclear: The mutants that the judge cannot tell apart from rounding.
    """

    originals: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    unevaluated: int = 0
    proven: list[str] = field(default_factory=list)
    equal: int = 0
    disputed: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)

    def add(self, name: str, mutant: Mutant, what: str) -> None:
        """Prove a mutant of which the judge said `what`."""
        label = f"{name}: {mutant.kind}: {mutant.where}"
        verdict = prove(mutant.ugraph)
        is_refused = isinstance(verdict, Rejected)
        if what == "unclear":
            self.unclear.append(label)
        elif what == "equal" and is_refused:
            self.disputed.append(f"{label}: {verdict.reason}")
        elif what == "equal":
            self.equal += 1
        elif is_refused:
            self.refused[mutant.kind] += 1
            self.unevaluated += "differs from the program" not in verdict.reason
        else:
            self.proven.append(label)


def tally(
    ugraphs: int,
    count: int,
    seed: int = 0,
    programs: Mapping[str, Callable[[], CodedProgram]] = PROGRAMS,
) -> Tally:
    """Judge and prove a random choice of the mutants of all programs, one of each kind first.

    Args:
        ugraphs: How many µGraphs of one kernel to mutate for each program. One of each further
            number of kernels is mutated too.
        count: How many mutants to try. There may be fewer.
        seed: The seed of the choice.
        programs: The programs by name.
    """
    result, judges = Tally(), {}
    every: list[tuple[str, Mutants, GraphChange]] = []
    for name, make in programs.items():
        program = make()
        judges[name] = Judge(program)
        for ugraph in found_ugraphs(program, ugraphs):
            result.originals += 1
            assert judges[name](ugraph) == "equal" and not isinstance(prove(ugraph), Rejected), name
            of_ugraph = Mutants(program, ugraph)
            every += [(name, of_ugraph, change) for change in of_ugraph.changes]
    random.Random(seed).shuffle(every)
    for name, mutant in islice(_one_of_each_kind_first(every), count):
        result.add(name, mutant, judges[name](mutant.ugraph))
    return result


def _one_of_each_kind_first(
    every: Sequence[tuple[str, Mutants, GraphChange]],
) -> Iterator[tuple[str, Mutant]]:
    """Yield the mutants that can be built, with the names of their programs."""
    kinds: set[str] = set()
    later = []
    for name, of_ugraph, change in every:
        if change.kind in kinds:
            later.append((name, of_ugraph, change))
        elif mutant := of_ugraph.built(change):
            kinds.add(change.kind)
            yield name, mutant
    for name, of_ugraph, change in later:
        if mutant := of_ugraph.built(change):
            yield name, mutant
