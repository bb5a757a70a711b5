"""Which dims have one size, and which sizes follow from others, for each op and for block graphs.

Proofs of whole programs hide most mistakes here: too few classes only make a proof harder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import mirage_hf as mi
from mirage_hf.graph.block import (
    Accumulator,
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
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.verify import op_sizes
from mirage_hf.verify.size_classes import SizeClasses
from mirage_hf.verify.size_relations import (
    KERNELS,
    PROGRAM,
    AxisSegment,
    BlockAxis,
    DimSegment,
    Key,
    ResizeError,
    SizeRule,
    TensorDim,
)

GRID, LOOP = Role.GRID, Role.LOOP


def dim(t: DTensor, d: int, side: str = PROGRAM) -> TensorDim:
    return TensorDim(side, t.index, d % len(t.dims))


def together(classes: SizeClasses, *keys: Key) -> bool:
    return len({classes.find(key) for key in keys}) == 1


def rules_of(classes: SizeClasses, side: str = PROGRAM) -> list[SizeRule]:
    return [rule for rule in classes.rules if rule.total.side == side]


def of_program(g: KernelGraph, *outputs: DTensor) -> SizeClasses:
    """Return the classes of a program that is its own kernels."""
    g.mark_output(*outputs)
    return SizeClasses(g, g)


def of_block(
    inputs: Sequence[tuple[int, ...]], axes: Sequence[Axis], reads: Sequence[BlockInput]
) -> tuple[SizeClasses, list[DTensor]]:
    """Return the classes of a kernel that stores the product of its inputs, and its tensors."""
    g = mi.new_kernel_graph()
    tensors = [g.new_input(dims) for dims in inputs]
    named = tuple(a.name for a in axes)
    ops = [BlockOp("p0", "mul", (reads[0].name, 1.0), reads[0].carried)]
    for n, i in enumerate(reads[1:], 1):
        carried = tuple(a for a in named if a in ops[-1].axes or a in i.carried)
        ops.append(BlockOp(f"p{n}", "mul", (ops[-1].out, i.name), carried))
    last = ops[-1]
    block = BlockGraph(
        tuple(axes),
        tuple(reads),
        (Stage(None, tuple(ops)),),
        (BlockOutput(last.out, last.axes, "float16"),),
    )
    g.mark_output(*g.customized(tensors, block))
    return SizeClasses(g, g), tensors


# -- ops ------------------------------------------------------------------------------------------


def test_elementwise_ops_align_dims_at_the_right() -> None:
    g = mi.new_kernel_graph()
    x, y = g.new_input((2, 3, 4)), g.new_input((3, 1))
    z = g.add(x, y)
    classes = of_program(g, z)
    assert all(together(classes, dim(x, d), dim(z, d)) for d in range(3))
    assert together(classes, dim(y, 0), dim(z, 1))
    assert not together(classes, dim(y, 1), dim(z, 2))
    assert not together(classes, dim(z, 1), dim(z, 2)) and not classes.reduced


@pytest.mark.parametrize("along, where", [(1, 1), (-1, 2), (-2, 1)])
def test_a_composite_is_elementwise_except_along_one_dim(along: int, where: int) -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((2, 4, 6))
    y = g.softmax(x, along)
    classes = of_program(g, y)
    assert all(together(classes, dim(x, d), dim(y, d)) for d in range(3))
    assert classes.reduced == {dim(x, where), dim(x, where, KERNELS)}


def test_a_norm_reduces_the_last_dim_and_its_weight_has_that_size() -> None:
    g = mi.new_kernel_graph()
    x, gamma = g.new_input((4, 6)), g.new_input((1, 6))
    classes = of_program(g, y := g.rms_norm(x, gamma))
    assert together(classes, dim(x, 1), dim(gamma, 1), dim(y, 1))
    assert together(classes, dim(x, 0), dim(y, 0))
    assert classes.reduced == {dim(x, 1), dim(x, 1, KERNELS)}


def test_a_norm_of_three_dims_reduces_the_last_one_too() -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((2, 4, 6))
    classes = of_program(g, g.rms_norm(x))
    assert classes.reduced == {dim(x, 2), dim(x, 2, KERNELS)}


def test_bounds_keep_dims_and_reduce_one() -> None:
    g = mi.new_kernel_graph()
    x, lo, hi = g.new_input((4, 6)), g.new_input((4, 1), "int32"), g.new_input((4, 1), "int32")
    classes = of_program(g, y := g.within(x, lo, hi, 1))
    assert together(classes, dim(x, 0), dim(lo, 0), dim(hi, 0), dim(y, 0))
    assert together(classes, dim(x, 1), dim(y, 1)) and not together(classes, dim(x, 1), dim(lo, 1))
    assert classes.reduced == {dim(x, 1), dim(x, 1, KERNELS)}


def test_matmul_joins_rows_columns_the_inner_dim_and_batch_dims() -> None:
    g = mi.new_kernel_graph()
    a, b = g.new_input((5, 2, 3, 4)), g.new_input((1, 2, 4, 6))
    y = g.matmul(a, b)
    classes = of_program(g, y)
    assert together(classes, dim(a, 3), dim(b, 2))
    assert together(classes, dim(a, 2), dim(y, 2)) and together(classes, dim(b, 3), dim(y, 3))
    assert together(classes, dim(a, 1), dim(b, 1), dim(y, 1))
    assert together(classes, dim(a, 0), dim(y, 0)) and not together(classes, dim(b, 0), dim(y, 0))
    assert not together(classes, dim(a, 3), dim(y, 3)) and not classes.reduced


def test_a_batch_dim_is_not_the_inner_dim_even_if_the_sizes_are_equal() -> None:
    g = mi.new_kernel_graph()
    a, b = g.new_input((4, 4, 4)), g.new_input((4, 4, 4))
    y = g.matmul(a, b)
    classes = of_program(g, y)
    keys = [dim(a, 2), dim(y, 0), dim(y, 1), dim(y, 2)]
    assert len({classes.find(key) for key in keys}) == 4


@pytest.mark.parametrize("over", [0, 1, -1])
def test_a_reduction_keeps_all_other_dims(over: int) -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((2, 3, 4))
    y = g.reduction(x, over)
    classes = of_program(g, y)
    for d in range(3):
        assert together(classes, dim(x, d), dim(y, d)) is (d != over % 3)
    assert classes.reduced == {dim(x, over), dim(x, over, KERNELS)}


def test_a_permutation_moves_dims() -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((2, 3, 4))
    y = g.permute(x, (2, 0, -2))
    classes = of_program(g, y)
    assert all(together(classes, dim(x, d), dim(y, k)) for k, d in enumerate((2, 0, 1)))
    assert not together(classes, dim(y, 0), dim(y, 1)) and not classes.rules


@pytest.mark.parametrize("along", [1, -1])
def test_a_concatenation_is_as_long_as_its_parts(along: int) -> None:
    g = mi.new_kernel_graph()
    a, b = g.new_input((2, 3)), g.new_input((2, 5))
    y = g.concat([a, b], along)
    classes = of_program(g, y)
    assert together(classes, dim(a, 0), dim(b, 0), dim(y, 0))
    assert rules_of(classes) == [SizeRule("sum", dim(y, 1), (dim(a, 1), dim(b, 1)))]


def test_a_concatenation_of_one_tensor_is_that_tensor() -> None:
    g = mi.new_kernel_graph()
    a = g.new_input((2, 3))
    classes = of_program(g, y := g.concat([a], 1))
    assert together(classes, dim(a, 1), dim(y, 1)) and not classes.rules


@pytest.mark.parametrize(
    "start, stop, parts", [(2, 5, (2, 3, 4)), (0, 5, (5, 4)), (2, 9, (2, 7)), (0, 9, ())]
)
def test_a_slice_leaves_what_is_before_and_after(
    start: int, stop: int, parts: tuple[int, ...]
) -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((3, 9))
    y = g.slice(x, -1, start, stop)
    classes = of_program(g, y)
    assert together(classes, dim(x, 0), dim(y, 0))
    if not parts:
        assert together(classes, dim(x, 1), dim(y, 1)) and not classes.rules
        return
    (rule,) = rules_of(classes)
    keys: list[Key] = [dim(y, 1)]
    if start:
        keys.insert(0, DimSegment(PROGRAM, y.index, "before"))
    if stop < 9:
        keys.append(DimSegment(PROGRAM, y.index, "after"))
    assert rule == SizeRule("sum", dim(x, 1), tuple(keys))
    assert tuple(classes.full[key] for key in rule.parts) == parts
    assert not together(classes, dim(x, 1), dim(y, 1))


@pytest.mark.parametrize(
    "old, new, rules",
    [
        ((6, 4), (6, 4), []),
        ((6, 4), (2, 3, 4), [(("x", 0), (("y", 0), ("y", 1)))]),
        ((2, 3, 4), (6, 4), [(("y", 0), (("x", 0), ("x", 1)))]),
        ((2, 3, 4), (2, 12), [(("y", 1), (("x", 1), ("x", 2)))]),
        ((24,), (2, 3, 4), [(("x", 0), (("y", 0), ("y", 1), ("y", 2)))]),
        ((1, 4), (2, 2), [(("x", 1), (("y", 0), ("y", 1)))]),
        ((2, 1, 2), (4, 1), [(("y", 0), (("x", 0), ("x", 2)))]),
        ((1, 6), (6, 1), []),
        ((1, 1), (1,), []),
    ],
)
def test_a_reshape_pairs_runs_of_dims_with_equal_products(
    old: tuple[int, ...], new: tuple[int, ...], rules: list[Any]
) -> None:
    """Dims of size 1 take no part."""
    g = mi.new_kernel_graph()
    x = g.new_input(old)
    y = g.reshape(x, new)
    classes = of_program(g, y)
    tensors = {"x": x, "y": y}
    assert rules_of(classes) == [
        SizeRule("product", dim(tensors[t], d), tuple(dim(tensors[s], e) for s, e in parts))
        for (t, d), parts in rules
    ]
    for d, n in enumerate(old):
        for e, m in enumerate(new):
            if n == m > 1:
                assert together(classes, dim(x, d), dim(y, e))


@pytest.mark.parametrize("new", [(6, 4), (3, 8)])
def test_a_reshape_without_common_factors_is_not_resized(new: tuple[int, ...]) -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((4, 6))
    with pytest.raises(ResizeError, match="no common factors"):
        of_program(g, g.reshape(x, new))


def test_rope_rotates_an_even_part_of_the_last_dim() -> None:
    g = mi.new_kernel_graph()
    x, cos, sin = g.new_input((2, 6, 10)), g.new_input((1, 6, 4)), g.new_input((1, 6, 4))
    y = g.rope(x, cos, sin)
    classes = of_program(g, y)
    two, half, rest = (DimSegment(PROGRAM, y.index, name) for name in ("two", "half", "rest"))
    assert (classes.full[two], classes.full[half], classes.full[rest]) == (2, 2, 6)
    assert together(classes, dim(x, 1), dim(cos, 1), dim(sin, 1), dim(y, 1))
    assert together(classes, dim(x, 0), dim(y, 0))
    assert not together(classes, dim(x, 0), dim(cos, 0))
    assert together(classes, dim(x, 2), dim(y, 2)) and together(classes, dim(cos, 2), dim(sin, 2))
    assert not together(classes, dim(x, 2), dim(cos, 2))
    assert rules_of(classes) == [
        SizeRule("product", dim(cos, 2), (two, half)),
        SizeRule("sum", dim(x, 2), (dim(cos, 2), rest)),
    ]
    assert two in classes.fixed and {dim(x, 2), dim(cos, 2)} <= classes.reduced
    for sizes in ((3, 5), (5, 2, 2)):
        small = classes.small_sizes(sizes, 2)
        width = small[classes.find(dim(cos, 2))]
        assert width == 2 * small[classes.find(half)]
        assert small[classes.find(dim(x, 2))] == width + small[classes.find(rest)]


def test_rope_of_a_whole_dim_has_no_rest() -> None:
    g = mi.new_kernel_graph()
    x, cos, sin = g.new_input((6, 4)), g.new_input((6, 4)), g.new_input((6, 4))
    y = g.rope(x, cos, sin)
    classes = of_program(g, y)
    assert together(classes, dim(x, 1), dim(cos, 1), dim(sin, 1), dim(y, 1))
    assert [rule.kind for rule in rules_of(classes)] == ["product"]
    assert classes.small_sizes((3, 3, 3), 2)[classes.find(dim(x, 1))] == 4


@pytest.mark.parametrize("each", [True, False], ids=["a position each", "one position"])
def test_an_append_leaves_a_rest_of_the_slots(each: bool) -> None:
    g = mi.new_kernel_graph()
    cache, rows = g.new_input((4, 8, 6)), g.new_input((4, 3, 6))
    position = g.new_input((4,) if each else (1,), "int64")
    y = g.cache_append(cache, rows, position)
    classes = of_program(g, y)
    assert all(together(classes, dim(cache, d), dim(y, d)) for d in range(2))
    assert together(classes, dim(rows, 0), dim(y, 0)) and together(classes, dim(rows, 2), dim(y, 2))
    assert together(classes, dim(position, 0), dim(y, 0)) is each
    rest = DimSegment(PROGRAM, y.index, "rest")
    assert rules_of(classes) == [SizeRule("sum", dim(y, 1), (dim(rows, 1), rest))]
    assert classes.full[rest] == 5


def test_an_append_that_fills_its_cache_has_no_rest() -> None:
    g = mi.new_kernel_graph()
    cache, rows = g.new_input((4, 3, 6)), g.new_input((4, 3, 6))
    classes = of_program(g, y := g.cache_append(cache, rows, g.new_input((1,), "int64")))
    assert together(classes, dim(rows, 1), dim(cache, 1), dim(y, 1)) and not classes.rules


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_computing_with_whole_numbers_is_not_proven(dtype: str) -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((4, 6), dtype)
    with pytest.raises(ResizeError, match="whole numbers"):
        of_program(g, g.concat([x, x], 0))
    h = mi.new_kernel_graph()
    with pytest.raises(ResizeError, match="whole numbers"):
        of_program(h, h.cast(h.new_input((4, 6)), dtype))


# -- both sides -----------------------------------------------------------------------------------


def test_inputs_and_outputs_of_both_sides_have_one_size() -> None:
    """What is between them need not."""
    program, kernels = (mi.new_kernel_graph() for _ in range(2))
    made = []
    for g in (program, kernels):
        x, w = g.new_input((4, 4)), g.new_input((4, 4))
        y = g.matmul(g.exp(x) if g is program else x, w)
        g.mark_output(y)
        made.append((x, w, y))
    classes = SizeClasses(program, kernels)
    for a, b in zip(*made, strict=True):
        assert all(together(classes, dim(a, d), dim(b, d, KERNELS)) for d in range(2))
    x, w, _ = made[0]
    assert not together(classes, dim(x, 0), dim(x, 1)) and not together(
        classes, dim(w, 0), dim(w, 1)
    )


def test_dims_of_two_sizes_never_meet() -> None:
    program, kernels = mi.new_kernel_graph(), mi.new_kernel_graph()
    program.mark_output(program.exp(program.new_input((4, 9))))
    kernels.mark_output(kernels.exp(kernels.new_input((4, 3))))
    with pytest.raises(ResizeError, match=r"sizes \[3, 9\] meet"):
        SizeClasses(program, kernels)


def test_equal_parts_of_equal_dims_are_equal() -> None:
    """Two slices of one dim at one place have one size, and so do joins of the same parts."""
    g = mi.new_kernel_graph()
    x = g.new_input((3, 9))
    a, b, c = (g.slice(x, 1, start, start + 4) for start in (2, 2, 3))
    y, z = (g.concat([a, b], 1) for _ in range(2))
    classes = of_program(g, y, z, c)
    assert together(classes, dim(a, 1), dim(b, 1)) and together(classes, dim(y, 1), dim(z, 1))
    assert not together(classes, dim(a, 1), dim(c, 1))
    before = [DimSegment(PROGRAM, t.index, "before") for t in (a, b, c)]
    assert together(classes, *before[:2]) and not together(classes, *before[1:])


def test_a_sum_and_a_product_of_equal_parts_are_two_dims() -> None:
    g = mi.new_kernel_graph()
    a, b = g.new_input((2, 2)), g.new_input((2, 2))
    y, z = g.concat([a, b], 1), g.reshape(a, (4,))
    classes = of_program(g, y, z)
    assert not together(classes, dim(y, 1), dim(z, 0))


# -- block graphs ---------------------------------------------------------------------------------

M, N, K = Axis("m", 3, GRID), Axis("n", 6, GRID), Axis("k", 8, GRID)


def axis(name: str, side: str = PROGRAM) -> BlockAxis:
    return BlockAxis(side, 0, name)


def test_axes_of_a_block_are_dims_of_its_inputs_and_outputs() -> None:
    classes, (x, w) = of_block(
        [(3, 8), (1, 8)],
        [M, K],
        [BlockInput("x", (0,), ("m", "k")), BlockInput("w", (1,), (None, "k"))],
    )
    out = classes.program.outputs[0]
    assert together(classes, axis("m"), dim(x, 0), dim(out, 0))
    assert together(classes, axis("k"), dim(x, 1), dim(w, 1), dim(out, 1))
    assert not together(classes, axis("m"), dim(w, 0)) and not classes.rules


def test_a_joined_input_is_as_long_as_its_sources() -> None:
    classes, (a, b) = of_block(
        [(4, 8), (2, 8)], [N, K], [BlockInput("w", (0, 1), ("n", "k"), "n", (4, 2))]
    )
    assert rules_of(classes) == [SizeRule("sum", axis("n"), (dim(a, 0), dim(b, 0)))]
    assert together(classes, axis("k"), dim(a, 1), dim(b, 1))


def test_a_padded_input_is_shorter_than_its_axis() -> None:
    classes, (x, w) = of_block(
        [(3, 5), (3, 8)],
        [M, K],
        [
            BlockInput("x", (0,), ("m", "k"), padding=Padding("k", 5, 0.0)),
            BlockInput("w", (1,), ("m", "k")),
        ],
    )
    padding = AxisSegment(PROGRAM, 0, "x", "padding")
    assert rules_of(classes) == [SizeRule("sum", axis("k"), (dim(x, 1), padding))]
    assert classes.full[padding] == 3
    assert together(classes, axis("m"), dim(x, 0), dim(w, 0))
    assert together(classes, axis("k"), dim(w, 1)) and not together(classes, axis("k"), dim(x, 1))


@pytest.mark.parametrize("width", [None, 6])
def test_a_rotation_of_limited_width_cuts_its_axis(width: int | None) -> None:
    rotation = Rotation("k", "swap halves", width)
    classes, (x,) = of_block(
        [(3, 8)], [M, K], [BlockInput("x", (0,), ("m", "k"), rotation=rotation)]
    )
    assert together(classes, axis("k"), dim(x, 1))
    if width is None:
        assert not classes.rules
        return
    rotated, straight = (AxisSegment(PROGRAM, 0, "x", name) for name in ("rotated", "straight"))
    assert rules_of(classes) == [SizeRule("sum", axis("k"), (rotated, straight))]
    assert (classes.full[rotated], classes.full[straight]) == (6, 2)


def split_sums(size: int, splits: int) -> tuple[SizeClasses, BlockAxis, BlockAxis]:
    """Return the classes of sums over the splits of an axis, the axis and its splits."""
    g = mi.new_kernel_graph()
    block = BlockGraph(
        (Axis("m", 3, GRID), Axis("s", splits, GRID), Axis("k", size, LOOP, "s")),
        (BlockInput("x", (0,), ("m", "k")),),
        (Stage("k", (), (Accumulator("part", "x", "sum", ("m", "s")),)),),
        (BlockOutput("part", ("s", "m"), "float32"),),
    )
    g.mark_output(*g.customized([g.new_input((3, size))], block))
    return SizeClasses(g, g), axis("k"), axis("s")


def test_a_split_axis_and_the_number_of_its_splits_are_a_pair() -> None:
    classes, whole, splits = split_sums(64, 4)
    pairs = [(axis("k", side), axis("s", side)) for side in (PROGRAM, KERNELS)]
    assert classes.splits == pairs and not together(classes, whole, splits)


@pytest.mark.parametrize(
    "size, splits, split_size, small",
    [
        (64, 2, 2, (4, 2)),
        (64, 4, 2, (4, 2)),
        (64, 4, 3, (8, 3)),  # the last of more than two splits is shorter
        (64, 4, 4, (15, 4)),
        (7, 3, 3, (7, 3)),
        (4, 4, 3, (3, 3)),  # two of two elements would leave the third split empty
        (5, 3, 4, (5, 3)),
        (3, 2, 2, (3, 2)),
    ],
)
def test_no_split_is_empty_at_small_sizes(
    size: int, splits: int, split_size: int, small: tuple[int, int]
) -> None:
    classes, whole, number = split_sums(size, splits)
    sizes = classes.small_sizes((5,), split_size)
    assert (sizes[classes.find(whole)], sizes[classes.find(number)]) == small


# -- small sizes ----------------------------------------------------------------------------------


def sizes_of(classes: SizeClasses, t: DTensor, sizes: Sequence[int]) -> tuple[int, ...]:
    small = classes.small_sizes(sizes, 2)
    return tuple(small[classes.find(dim(t, d))] for d in range(len(t.dims)))


def test_small_sizes_are_used_in_turn_and_none_is_larger_than_the_dim() -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((9, 1, 9, 2, 9, 9))
    classes = of_program(g, g.exp(x))
    assert sizes_of(classes, x, (3, 4, 5)) == (3, 1, 4, 2, 3, 4)
    assert sizes_of(classes, x, (20,)) == (9, 1, 9, 2, 9, 9)


def test_what_is_joined_shrinks_with_its_parts() -> None:
    g = mi.new_kernel_graph()
    a, b = g.new_input((9, 9)), g.new_input((9, 7))
    y = g.reshape(g.concat([a, b], 1), (144,))
    classes = of_program(g, y)
    assert sizes_of(classes, a, (2, 3, 4)) == (2, 3) and sizes_of(classes, b, (2, 3, 4)) == (2, 4)
    assert sizes_of(classes, y, (2, 3, 4)) == (14,)


@pytest.mark.parametrize("kind, value", [("sum", 9), ("product", 24)])
def test_a_rule_adds_or_multiplies(kind: str, value: int) -> None:
    key = TensorDim(PROGRAM, 0, 0)
    assert SizeRule(kind, key, (key,) * 3).value((2, 3, 4)) == value


def test_a_dim_that_is_joined_from_itself_has_no_small_size() -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((4, 9))
    classes = of_program(g, y := g.slice(x, 1, 0, 4))
    classes.full[dim(x, 1)] = classes.full[dim(y, 1)]  # as if both could have one size
    classes.join(dim(x, 1), dim(y, 1))
    with pytest.raises(ResizeError, match="into itself"):
        classes.small_sizes((3,), 2)


def test_dims_that_are_made_of_each_other_have_no_small_size() -> None:
    g = mi.new_kernel_graph()
    a, b = g.new_input((9,)), g.new_input((8,))
    classes = of_program(g, g.exp(a), g.exp(b))
    for total, part in ((a, b), (b, a)):
        rest = DimSegment(PROGRAM, total.index, "rest")
        classes.full[rest] = 1
        classes.rules.append(SizeRule("sum", dim(total, 0), (dim(part, 0), rest)))
    with pytest.raises(ResizeError, match="made of each other"):
        classes.small_sizes((3,), 2)


def test_a_dim_cut_in_two_ways_has_no_small_size() -> None:
    """Two of its parts follow one rule, three the other."""
    g = mi.new_kernel_graph()
    x = g.new_input((3, 9))
    parts = [g.slice(x, 1, a, b) for a, b in ((0, 4), (4, 9), (0, 2), (2, 6), (6, 9))]
    classes = of_program(g, *parts)
    with pytest.raises(ResizeError, match="do not shrink together"):
        classes.small_sizes((3, 4, 2, 3, 5), 2)


def test_an_op_that_nobody_described_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((4, 6))
    monkeypatch.setattr(op_sizes, "_RULES", {})
    with pytest.raises(ResizeError, match="exp cannot be proven yet"):
        of_program(g, g.exp(x))


def test_axes_and_parts_of_tensors_with_equal_names_and_numbers_are_apart() -> None:
    keys = [
        TensorDim(PROGRAM, 0, 0),
        BlockAxis(PROGRAM, 0, "rest"),
        DimSegment(PROGRAM, 0, "rest"),
        AxisSegment(PROGRAM, 0, "x", "rest"),
    ]
    assert len(set(keys)) == len(keys)
