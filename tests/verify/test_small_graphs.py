"""Graphs at other sizes: how they are evaluated, shrunk for proofs and narrowed for numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import mirage_hf as mi
from mirage_hf.errors import GraphError, Rejected
from mirage_hf.formats.coding import Coding
from mirage_hf.formats.stored import Split
from mirage_hf.graph.algebra import TorchAlgebra
from mirage_hf.graph.block import (
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Padding,
    Role,
    Rotation,
    Stage,
)
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify import narrow, size_relations
from mirage_hf.verify import shrink as shrinking
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.interface import interface_differs
from mirage_hf.verify.narrow import _NarrowSizes, narrowed
from mirage_hf.verify.shrink import shrink, small_graph
from mirage_hf.verify.size_classes import SizeClasses
from mirage_hf.verify.size_relations import KERNELS, PROGRAM, BlockAxis, ResizeError, TensorDim
from mirage_hf.verify.verdict import Accepted
from tests.helpers import coded_mutants, coded_programs, multi_kernel_ugraphs, ugraphs

GRID = Role.GRID


class Numbers(TorchAlgebra):
    """Evaluate on float64 instead of elements of a field."""

    def __init__(self) -> None:
        super().__init__(torch.float64)

    def spread(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return x.expand(tuple(shape))


# -- evaluation -----------------------------------------------------------------------------------


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def random(*dims: int) -> torch.Tensor:
    return torch.randn(*dims, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


LO, HI = ints(0, 2, 5, 1), ints(6, 4, 5, 3)
PROGRAMS: dict[str, tuple[Callable[..., DTensor], list[torch.Tensor]]] = {
    "within the last dim": (
        lambda g, x, lo, hi: g.within(x, lo, hi, 1),
        [random(4, 6), LO.view(4, 1), HI.view(4, 1)],
    ),
    "within another dim": (
        lambda g, x, lo, hi: g.within(x, lo, hi, -2),
        [random(3, 6, 4), LO.view(1, 1, 4), HI.view(1, 1, 4)],
    ),
    "within by bounds of fewer dims": (
        lambda g, x, lo, hi: g.within(x, lo, hi, 2),
        [random(3, 4, 6), LO.view(4, 1), HI.view(4, 1)],
    ),
    "within by one pair of bounds": (
        lambda g, x, lo, hi: g.within(x, lo, hi, 0),
        [random(6, 4), ints(2), ints(5)],
    ),
    "one position": (
        lambda g, c, r, p: g.cache_append(c, r, p),
        [random(3, 8, 4), random(3, 2, 4), ints(3)],
    ),
    "at the beginning": (
        lambda g, c, r, p: g.cache_append(c, r, p),
        [random(3, 8, 4), random(3, 2, 4), ints(0)],
    ),
    "at the end": (
        lambda g, c, r, p: g.cache_append(c, r, p),
        [random(3, 8, 4), random(3, 2, 4), ints(6)],
    ),
    "a position each": (
        lambda g, c, r, p: g.cache_append(c, r, p),
        [random(3, 8, 4), random(3, 2, 4), ints(0, 6, 3)],
    ),
    "a position each, of more dims": (
        lambda g, c, r, p: g.cache_append(c, r, p),
        [random(3, 5, 8, 4), random(3, 5, 1, 4), ints(7, 0, 3).view(3, 1, 1, 1)],
    ),
    "a cache of two dims": (
        lambda g, c, r, p: g.cache_append(c, r, p),
        [random(8, 4), random(2, 4), ints(5)],
    ),
    "all slots": (
        lambda g, c, r, p: g.cache_append(c, r, p),
        [random(3, 2, 4), random(3, 2, 4), ints(0)],
    ),
    "a batch of one": (lambda g, a, b: g.matmul(a, b), [random(5, 3, 4), random(1, 4, 2)]),
    "one batch dim more": (lambda g, a, b: g.matmul(a, b), [random(2, 5, 3, 4), random(5, 4, 2)]),
    "a sum over one element": (lambda g, x: g.reduction(x, 1), [random(4, 1, 3)]),
    "a mean over one element": (lambda g, x: g.reduction(x, 1, "mean"), [random(4, 1, 3)]),
    "a mean": (lambda g, x: g.reduction(x, 0, "mean"), [random(4, 5)]),
    "a maximum": (lambda g, x: g.reduction(x, -2, "max"), [random(4, 5, 3)]),
    "a slice": (lambda g, x: g.slice(x, -2, 2, 5), [random(3, 6, 4)]),
    "the first elements": (lambda g, x: g.slice(x, 0, 0, 2), [random(3, 6)]),
    "a join of three": (lambda g, x, y: g.concat([x, y, x], 0), [random(3, 2), random(1, 2)]),
    "a permutation": (lambda g, x: g.permute(x, (-1, 0, 1)), [random(2, 3, 4)]),
    "rope of some elements": (
        lambda g, x, c, s: g.rope(x, c, s),
        [random(3, 6), *[random(3, 4)] * 2],
    ),
    "interleaved rope": (
        lambda g, x, c, s: g.rope(x, c, s, interleaved=True),
        [random(2, 3, 6), random(3, 4), random(3, 4) + 1],
    ),
    "a number first": (lambda g, x: g.sub(2.0, x), [random(3, 4)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_ops_are_evaluated_as_torch_computes_them(name: str) -> None:
    build, inputs = PROGRAMS[name]
    g = mi.new_kernel_graph()
    whole = "int32" if "within" in name else "int64"
    dtypes = ["float32" if x.is_floating_point() else whole for x in inputs]
    tensors = [g.new_input(x.shape, t) for x, t in zip(inputs, dtypes, strict=True)]
    g.mark_output(build(g, *tensors))
    classes = SizeClasses(g, g)
    (got,) = small_graph(classes, PROGRAM, classes.roots()).run(inputs, Numbers(), 1)
    (want,) = run_kernel_graph(g, [x.clone() for x in inputs], torch.float64)
    torch.testing.assert_close(got, want)


# -- shrinking ------------------------------------------------------------------------------------

SIZES = (3, 4, 2, 3, 5)


def test_a_slice_begins_where_its_first_part_ends() -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((4, 90))
    parts = [g.slice(x, 1, 40, 70), g.slice(x, 1, 0, 40), g.slice(x, 1, 70, 90)]
    g.mark_output(*parts[:1])
    small = small_graph(classes := SizeClasses(g, g), PROGRAM, classes.roots())
    assert small.starts == {0: 40, 1: 0, 2: 70} and small.dims[x.index] == (4, 90)
    h = mi.new_kernel_graph()
    x = h.new_input((4, 90))
    h.mark_output(h.slice(x, 1, 40, 70))
    program, kernels = shrink(SizeClasses(h, h), SIZES, 2)
    ((start,), (length, whole)) = program.starts.values(), (program.dims[1][1], program.dims[0][1])
    assert 0 < start < 40 and start + length < whole < 90 and kernels.starts == program.starts


def block_of(*inputs: BlockInput, n: int = 60) -> BlockGraph:
    first = inputs[0]
    copied = BlockOp("o", "mul", (first.name, 2.0), first.carried)
    return BlockGraph(
        (Axis("m", 40, GRID), Axis("n", n, GRID)),
        inputs,
        (Stage(None, (copied,)),),
        (BlockOutput("o", first.carried, "float16"),),
    )


def shrunk_block(block: BlockGraph, *dims: tuple[int, ...]) -> tuple[BlockGraph, Any]:
    g = mi.new_kernel_graph()
    g.mark_output(*g.customized([g.new_input(d) for d in dims], block))
    _, kernels = shrink(SizeClasses(g, g), SIZES, 2)
    return kernels.blocks[0], kernels.dims


def test_joined_sources_shrink_one_by_one() -> None:
    i = BlockInput("w", (0, 1), ("m", "n"), "n", (45, 15))
    block, dims = shrunk_block(block_of(i), (40, 45), (40, 15))
    sizes = block.inputs[0].sizes
    assert sizes == (dims[0][1], dims[1][1]) and sum(sizes) == block.axis("n").size < 15
    assert dims[0][0] == dims[1][0] == block.axis("m").size


def test_padding_shrinks_with_the_source() -> None:
    i = BlockInput("x", (0,), ("m", "n"), padding=Padding("n", 50, 1.5))
    block, dims = shrunk_block(block_of(i), (40, 50))
    padding = block.inputs[0].padding
    assert padding == Padding("n", dims[0][1], 1.5) and dims[0][1] < block.axis("n").size < 50


@pytest.mark.parametrize("width", [40, None])
def test_a_rotation_shrinks_to_an_even_width_or_the_whole_axis(width: int | None) -> None:
    cos = mi.new_kernel_graph()
    x, c, s = (cos.new_input((40, n)) for n in (60, width or 60, width or 60))
    cos.mark_output(cos.rope(x, c, s))
    rotation = Rotation("n", "swap halves", width)
    i = BlockInput("x", (0,), ("m", "n"), rotation=rotation)
    block = block_of(i, BlockInput("all", (0,), ("m", "n")))
    g = mi.new_kernel_graph()
    g.mark_output(*g.customized([g.new_input((40, 60))], block))
    classes = SizeClasses(g, g)
    sizes = classes.roots() | {
        classes.find(BlockAxis(side, 0, "n")): 7 if width else 6 for side in (PROGRAM, KERNELS)
    }
    rotated = size_relations.rotated_segment(KERNELS, 0, "x")
    if width:
        sizes[classes.find(rotated)] = 4
    small = shrinking.resized_block(classes, KERNELS, 0, g.ops[0], sizes).inputs[0]
    assert small.rotation == Rotation("n", "swap halves", 4 if width else None)


@pytest.mark.parametrize(
    "error, reason",
    [(GraphError("3 is odd"), "it cannot be shrunk: 3 is odd"), (ResizeError("no"), "no")],
)
def test_what_cannot_be_shrunk_is_rejected(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(shrinking, "small_graph", refuse)
    u = ugraphs.rms_norm_linear()
    assert shrink(SizeClasses(u.program, u.kernels), SIZES, 2) == Rejected(reason)


# -- narrowing ------------------------------------------------------------------------------------


def narrow_sizes(g: KernelGraph, *tensors: DTensor, reverse: bool = False) -> list[tuple[int, ...]]:
    """Return the narrow dims of some tensors of a program that is its own kernels.

    `reverse` reverses the order of the rules.
    """
    classes = SizeClasses(g, g)
    if reverse:
        classes.rules.reverse()
    sizes = _NarrowSizes(classes).run()
    keys = [[TensorDim(PROGRAM, t.index, d) for d in range(len(t.dims))] for t in tensors]
    return [tuple(sizes[classes.find(key)] for key in dims) for dims in keys]


def test_rows_and_columns_are_cut_and_what_is_summed_over_is_not() -> None:
    g = mi.new_kernel_graph()
    a, b = g.new_input((100, 90)), g.new_input((90, 20))
    g.mark_output(y := g.matmul(a, b))
    assert narrow_sizes(g, a, b, y) == [(32, 90), (90, 20), (32, 20)]


def test_batches_of_matrices_are_cut_to_two() -> None:
    g = mi.new_kernel_graph()
    a, b = g.new_input((8, 1, 3, 40, 90)), g.new_input((3, 90, 33))
    g.mark_output(y := g.exp(g.matmul(a, b)))
    assert narrow_sizes(g, a, b, y) == [(2, 1, 2, 32, 90), (2, 90, 32), (2, 1, 2, 32, 32)]


@pytest.mark.parametrize("op", ["softmax", "reduction", "sum of squares"])
def test_reduced_dims_keep_their_size(op: str) -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((50, 60, 70))
    y = g.softmax(x, 1) if op == "softmax" else g.reduction(x, 1)
    g.mark_output(g.mul(y, 2.0))
    assert narrow_sizes(g, x) == [(32, 60, 32)]


def test_a_block_keeps_all_axes_except_the_grid() -> None:
    u = multi_kernel_ugraphs.split_k(rows=40, k=50, n=90, parts=4)
    inputs = [t for t in u.kernels.inputs]
    partial = u.kernels.ops[0].outputs[0]
    assert narrow_sizes(u.kernels, *inputs, partial) == [(32, 50), (50, 32), (4, 32, 32)]


@pytest.mark.parametrize("sizes, cut", [((400, 300), (16, 16)), ((400, 9), (16, 9))])
def test_each_part_of_a_join_has_half_the_width(
    sizes: tuple[int, int], cut: tuple[int, int]
) -> None:
    g = mi.new_kernel_graph()
    a, b = (g.new_input((50, n)) for n in sizes)
    g.mark_output(y := g.exp(g.concat([a, b], 1)))
    assert narrow_sizes(g, a, b, y) == [(32, cut[0]), (32, cut[1]), (32, sum(cut))]


def test_a_batch_that_is_joined_has_one_of_each_part() -> None:
    g = mi.new_kernel_graph()
    a, b, w = g.new_input((6, 40, 50)), g.new_input((5, 40, 50)), g.new_input((11, 50, 60))
    g.mark_output(g.matmul(g.concat([a, b], 0), w))
    assert narrow_sizes(g, a, b, w) == [(1, 32, 50), (1, 32, 50), (2, 50, 32)]


@pytest.mark.parametrize("reduced", ["all", "a part"])
def test_a_join_that_something_reduces_over_keeps_its_size(reduced: str) -> None:
    g = mi.new_kernel_graph()
    a, b = g.new_input((50, 40)), g.new_input((50, 60))
    y = g.concat([a, b], 1)
    g.mark_output(g.reduction(y if reduced == "all" else a, 1), y)
    assert narrow_sizes(g, a, b, y) == [(32, 40), (32, 60), (32, 100)]


def test_a_dim_that_is_split_is_cut_with_its_parts() -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((60, 80))
    g.mark_output(y := g.reshape(x, (60, 2, 40)))
    assert narrow_sizes(g, x, y) == [(32, 32), (32, 2, 16)]


def test_a_dim_with_a_part_that_is_reduced_keeps_its_size() -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((60, 80))
    g.mark_output(g.reduction(y := g.reshape(x, (60, 2, 40)), 2))
    assert narrow_sizes(g, x, y) == [(32, 80), (32, 2, 40)]


def test_a_dim_that_is_split_in_two_ways_keeps_its_size() -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((60, 90))
    y, z = g.reshape(x, (60, 3, 30)), g.reshape(x, (60, 5, 18))
    g.mark_output(y, z)
    assert narrow_sizes(g, x, y, z) == [(32, 32), (32, 2, 16), (32, 2, 16)]
    g = mi.new_kernel_graph()
    x = g.new_input((60, 90))
    y, z = g.reshape(x, (60, 3, 30)), g.reshape(x, (60, 3, 6, 5))
    g.mark_output(y, z)
    assert narrow_sizes(g, x, y, z) == [(32, 90), (32, 3, 30), (32, 3, 6, 5)]


def test_a_join_that_is_split_afterwards() -> None:
    g = mi.new_kernel_graph()
    a, b = g.new_input((50, 40)), g.new_input((50, 60))
    g.mark_output(y := g.reshape(g.concat([a, b], 1), (50, 2, 50)))
    assert narrow_sizes(g, a, b, y) == [(32, 16), (32, 16), (32, 2, 16)]
    g = mi.new_kernel_graph()
    a, b = g.new_input((50, 40)), g.new_input((50, 60))
    g.mark_output(y := g.reshape(g.concat([a, b, a], 1), (50, 2, 70)))
    assert narrow_sizes(g, a, b, y) == [(32, 40), (32, 60), (32, 2, 70)]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_join_that_is_part_of_a_dim_is_cut_with_it(reverse: bool) -> None:
    g = mi.new_kernel_graph()
    a, b, c = g.new_input((32, 40)), g.new_input((8, 40)), g.new_input((9, 40))
    g.mark_output(y := g.reshape(g.concat([a, b, c], 0), (49 * 40,)))
    sizes = narrow_sizes(g, a, b, c, y, reverse=reverse)
    assert sizes == [(1, 16), (1, 16), (1, 16), (3 * 16,)]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_split_dim_that_is_joined_is_cut_with_the_join(reverse: bool) -> None:
    g = mi.new_kernel_graph()
    a, b = g.new_input((32, 40)), g.new_input((8, 50))
    g.mark_output(y := g.concat([g.reshape(a, (32 * 40,)), g.reshape(b, (8 * 50,))], 0))
    assert narrow_sizes(g, a, b, y, reverse=reverse) == [(2, 8), (2, 8), (32,)]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_join_of_splits_that_is_split_again_is_cut_with_its_parts(reverse: bool) -> None:
    g = mi.new_kernel_graph()
    a, b = g.new_input((6, 40, 50)), g.new_input((2, 40, 50))
    halves = [g.reshape(t, (t.dims[0] * 40, 50)) for t in (a, b)]
    g.mark_output(y := g.reshape(g.concat(halves, 0), (320 * 50,)))
    sizes = narrow_sizes(g, a, b, y, reverse=reverse)
    assert sizes == [(2, 2, 16), (2, 2, 16), (8 * 16,)]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_reduced_part_of_a_join_keeps_all_dims_that_it_is_part_of(reverse: bool) -> None:
    g = mi.new_kernel_graph()
    a, b = g.new_input((32, 40)), g.new_input((8, 40))
    y = g.reshape(g.concat([a, b], 0), (40 * 40,))
    g.mark_output(g.reduction(a, 0), y)
    assert narrow_sizes(g, a, b, y, reverse=reverse) == [(32, 40), (8, 40), (40 * 40,)]


def test_full_sizes_that_contradict_each_other_cannot_be_narrowed() -> None:
    g = mi.new_kernel_graph()
    a, b = g.new_input((50, 40)), g.new_input((50, 60))
    g.mark_output(g.concat([a, b], 1))
    classes = SizeClasses(g, g)
    classes.rules += [replace(rule, parts=rule.parts[:1]) for rule in classes.rules]
    with pytest.raises(ResizeError, match="contradict"):
        _NarrowSizes(classes).run()


def test_blocks_of_codes_are_cut_along_the_columns() -> None:
    """A check of float8 codes at their full size takes half a minute or more."""
    g = coded_programs.fp8_linear(1, 1024, 512)
    small = narrowed(search(g, SearchOptions())[0][0].ugraph)
    assert small is not None
    assert [t.dims for t in small.program.inputs] == [(1, 512), (2, 16, 4, 128), (2, 1, 4, 1)]


def test_joined_blocks_of_codes_are_cut_to_one_each() -> None:
    """A check of q, k and v in float8 at their full size takes seconds."""
    codings = []
    for rows in (1024, 256, 256):
        split = Split(rows, 512, 128, 128)
        codes, scales = split.codes(torch.float8_e4m3fn), split.per_block(torch.float32)
        codings.append(Coding(rows, 512, torch.bfloat16, codes, scales))
    g = coded_mutants.coded_linear(codings, 1, norm=True).graph
    small = narrowed(search(g, SearchOptions())[0][0].ugraph)
    assert small is not None
    assert [t.dims for t in small.program.inputs[:2]] == [(1, 512), (1, 512)]
    assert [t.dims for t in small.program.inputs[2:]] == [(1, 16, 4, 128), (1, 1, 4, 1)] * 3
    assert small.program.outputs[0].dims == (1, 48)


def in_one_kernel(build: Callable[[KernelGraph, list[DTensor]], DTensor], *dims: Any) -> UGraph:
    """Return a program with a kernel that doubles what library ops compute."""
    graphs = []
    for is_program in (True, False):
        g = mi.new_kernel_graph()
        y = build(g, [g.new_input(d) for d in dims])
        axes = tuple(Axis(f"a{k}", n, GRID) for k, n in enumerate(y.dims))
        names = tuple(a.name for a in axes)
        block = BlockGraph(
            axes,
            (BlockInput("x", (0,), names),),
            (Stage(None, (BlockOp("o", "mul", ("x", 2.0), names),)),),
            (BlockOutput("o", names, "float16"),),
        )
        g.mark_output(*([g.mul(y, 2.0)] if is_program else g.customized([y], block)))
        graphs.append(g)
    return UGraph(*graphs)


def test_a_reshape_names_the_narrow_sizes() -> None:
    small = narrowed(in_one_kernel(lambda g, x: g.reshape(x[0], (60, 2, 40)), (60, 80)))
    assert small is not None and [t.dims for t in small.program.inputs] == [(32, 32)]
    assert small.program.outputs[0].dims == small.kernels.outputs[0].dims == (32, 2, 16)


def test_a_slice_can_be_narrowed_along_other_dims_only() -> None:
    """Its attributes name the full sizes."""
    small = narrowed(in_one_kernel(lambda g, x: g.slice(x[0], 1, 2, 8), (6, 10)))
    assert small is not None and small.program.inputs[0].dims == (6, 10)
    assert narrowed(in_one_kernel(lambda g, x: g.slice(x[0], 1, 100, 300), (6, 400))) is None
    assert narrowed(in_one_kernel(lambda g, x: g.slice(x[0], 1, 2, 8), (60, 10))) is None


def test_a_slice_of_the_second_operand_does_not_matter() -> None:
    small = narrowed(in_one_kernel(lambda g, x: g.concat([x[0], x[0]], 1), (40, 90)))
    assert small is not None and small.program.inputs[0].dims == (32, 16)


def test_dims_of_large_outputs_are_narrowed_further() -> None:
    """The state of 16 sequences has 32 heads. A few of both show what rounding does."""
    small = narrowed(in_one_kernel(lambda g, x: g.reduction(x[0], 3), (16, 32, 128, 128)))
    assert small is not None and small.program.inputs[0].dims == (16, 32, 32, 128)
    small = narrowed(in_one_kernel(lambda g, x: x[0], (16, 32, 64, 128)))
    assert small is not None and small.program.outputs[0].dims == (16, 16, 16, 16)


def test_constants_stay_constant() -> None:
    g = mi.new_kernel_graph()
    x, w = g.new_input((4, 64)), g.new_input((64, 80), constant=True)
    g.mark_output(g.matmul(x, w))
    small = narrowed(search(g, SearchOptions())[0][0].ugraph)
    assert small is not None
    assert [t.constant for t in small.program.inputs] == [False, True]
    assert [t.constant for t in small.kernels.inputs] == [False, True]


def test_what_is_narrowed_has_row_major_tensors_and_the_same_interface() -> None:
    u = ugraphs.rms_norm_linear(rows=40, k=64, n=48, transposed=True)
    small = narrowed(u)
    assert small is not None and small.program.inputs[2].strides == (32, 1)
    assert [t.name for t in small.program.inputs] == ["x", "gamma", "w"]
    assert [t.dtype for t in small.program.inputs] == [t.dtype for t in u.program.inputs]
    assert interface_differs(small.program, small.kernels) is None


def test_a_narrow_form_has_the_outputs_of_the_full_one() -> None:
    """One of them is read by another kernel too, and they are not in the order of the ops."""
    program, kernels = mi.new_kernel_graph(), mi.new_kernel_graph()
    for g in (program, kernels):
        y = g.exp(g.new_input((60, 80)))
        axes = (Axis("m", 60, GRID), Axis("n", 80, GRID))
        block = BlockGraph(
            axes,
            (BlockInput("x", (0,), ("m", "n")),),
            (Stage(None, (BlockOp("o", "mul", ("x", 2.0), ("m", "n")),)),),
            (BlockOutput("o", ("m", "n"), "float16"),),
        )
        z = g.mul(y, 2.0) if g is program else g.customized([y], block)[0]
        g.mark_output(z, y)
    small = narrowed(UGraph(program, kernels))
    assert small is not None
    for g in (small.program, small.kernels):
        assert [t.dims for t in g.outputs] == [(32, 32)] * 2
        assert [t.index for t in g.outputs] == [op.outputs[0].index for op in g.ops[::-1]]


def test_no_narrow_form_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    u = ugraphs.rms_norm_linear(rows=40)
    assert narrowed(library_ugraph(u.program)) is None
    wrong = replace(u, program=ugraphs.rms_norm_linear(rows=30).program)
    assert narrowed(wrong) is None  # sizes that contradict each other

    def refuse(*_: Any) -> None:
        raise GraphError("it names the full sizes")

    monkeypatch.setattr(narrow, "resized", refuse)
    assert narrowed(u) is None


def test_other_outputs_at_narrow_sizes_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    u = ugraphs.rms_norm_linear(rows=40)
    resized = narrow.resized
    other = ugraphs.rms_norm_linear(rows=7).kernels
    monkeypatch.setattr(
        narrow,
        "resized",
        lambda c, side, sizes: other if side == KERNELS else resized(c, side, sizes),
    )
    assert narrowed(u) is None


# -- interfaces -----------------------------------------------------------------------------------


def graph(*inputs: Any, outputs: int = 1) -> KernelGraph:
    g = mi.new_kernel_graph()
    tensors = [g.new_input(*i) if isinstance(i, tuple) else g.new_input(**i) for i in inputs]
    g.mark_output(*[g.exp(tensors[0]) for _ in range(outputs)])
    return g


X = dict(dims=(3, 4))


@pytest.mark.parametrize(
    "kernels, reason",
    [
        (graph(X), None),
        (graph(X, X), "the kernels have 2 inputs, the program has 1"),
        (graph(X, outputs=3), "the kernels have 3 outputs, the program has 1"),
        (
            graph(dict(dims=(4, 3))),
            "input 0 of the kernels is float16 (4, 3) with strides (3, 1), "
            "the program's is float16 (3, 4) with strides (4, 1)",
        ),
        (graph(dict(X, dtype="float32")), "input 0 of the kernels is float32 (3, 4)"),
        (graph(dict(X, strides=(1, 3))), "float16 (3, 4) with strides (1, 3)"),
    ],
)
def test_the_first_difference_of_an_interface(kernels: KernelGraph, reason: str | None) -> None:
    found = interface_differs(graph(X), kernels)
    assert found is None if reason is None else reason in found.reason


def test_strides_of_outputs_may_be_left_out() -> None:
    """An input that is an output has the strides that it was given."""
    made = []
    for which in (0, 1):
        g = mi.new_kernel_graph()
        inputs = [g.new_input((3, 4), strides=strides) for strides in ((4, 1), (1, 3))]
        g.mark_output(inputs[which])
        made.append(g)
    found = interface_differs(*made)
    assert found is not None and found.reason.startswith("output 0 of the kernels")
    assert interface_differs(*made, output_strides=False) is None
    assert isinstance(prove(UGraph(*made)), Rejected)  # they are two inputs


def test_a_proof_does_not_ask_for_strides_of_outputs_and_mi_verify_does() -> None:
    g, h = mi.new_kernel_graph(), mi.new_kernel_graph()
    g.mark_output(g.new_input((3, 4), strides=(1, 3)))
    h.mark_output(h.mul(h.new_input((3, 4), strides=(1, 3)), 1.0))
    assert isinstance(prove(UGraph(g, h)), Accepted)
    verdict = mi.verify(g, h)
    assert isinstance(verdict, Rejected) and "with strides (4, 1)" in verdict.reason


def test_weights_are_constant_on_both_sides() -> None:
    found = interface_differs(graph(dict(X, constant=True)), graph(X))
    assert found is not None and found.reason.endswith("strides (4, 1), constant")
