"""Block graphs with an index that no kernel can stream are refused with a reason."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import pytest

from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.streams.finding import streamed_products
from mirage_hf.codegen.streams.layout import stream_layout
from mirage_hf.errors import CodegenError
from mirage_hf.graph.block import Accumulator, BlockGraph, BlockInput, BlockOp, Stage, Taken
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops.dtypes import E2M1
from tests.helpers.streamed_experts import Experts

#: The name, the dims and the dtype of an operand.
Operand = tuple[str, tuple[int, ...], str]


def placed(
    e: Experts,
    block: BlockGraph | None = None,
    strides: Mapping[str, tuple[int, ...]] | None = None,
    more: Sequence[Operand] = (),
) -> PlacedOp:
    """Return the op of another block graph with the operands of experts.

    Args:
        e: Experts that fit.
        block: The other block graph. None: that of the experts.
        strides: Strides of operands, by name. Others are those of the experts.
        more: Further operands.
    """
    g = KernelGraph()
    tensors = [
        g.new_input(
            t.dims,
            t.dtype,
            (strides or {}).get(str(t.name), t.strides),
            name=t.name,
            constant=t.constant,
        )
        for t in e.graph.inputs
    ]
    for name, dims, dtype in more:
        is_constant = not dtype.startswith("int")
        tensors.append(g.new_input(dims, dtype, name=name, constant=is_constant))
    g.mark_output(*g.customized(tensors, block or block_of(e)))
    return place_kernels(UGraph(g, g))[0]


def block_of(e: Experts) -> BlockGraph:
    """Return the block graph of experts."""
    (op,) = e.graph.ops
    assert op.block is not None
    return op.block


def stride_of(e: Experts, name: str) -> tuple[int, ...]:
    """Return the strides of an operand."""
    return next(t.strides for t in e.graph.inputs if t.name == name)


def with_input(e: Experts, name: str, **changes) -> BlockGraph:
    """Return the block graph of experts with an input that differs."""
    block = block_of(e)
    inputs = tuple(replace(i, **changes) if i.name == name else i for i in block.inputs)
    return replace(block, inputs=inputs)


def stages_with(e: Experts, out: str, *ops: BlockOp) -> tuple[Stage, ...]:
    """Return the stages of experts with other ops in place of one."""
    stages = []
    for stage in block_of(e).stages:
        body = [ops if o.out == out else (o,) for o in stage.body]
        stages.append(replace(stage, body=tuple(itertools.chain(*body))))
    return tuple(stages)


def with_ops(e: Experts, out: str, *ops: BlockOp) -> BlockGraph:
    """Return the block graph of experts with other ops in place of one."""
    return replace(block_of(e), stages=stages_with(e, out, *ops))


def op_of(e: Experts, out: str) -> BlockOp:
    """Return an op of the block graph of experts."""
    return block_of(e).ops_by_name[out]


def input_of(e: Experts, name: str) -> BlockInput:
    """Return an input of the block graph of experts."""
    return block_of(e).inputs_by_name[name]


def taken_of(e: Experts) -> Taken:
    """Return how the index chooses codes."""
    taken = input_of(e, "codes0").taken
    assert taken is not None
    return taken


def refusal(op: PlacedOp) -> str:
    """Return why an op has no kernel."""
    with pytest.raises(CodegenError) as raised:
        streamed_products(op)
    return str(raised.value)


ROWS = Experts(has_gate=True, has_bias=True)
PIECES = Experts(chosen=0, pieces=2, has_bias=True, has_weights=True)


@pytest.mark.parametrize("e", [ROWS, PIECES, Experts(pieces=2, index=(0, 1, 2, 3))])
def test_the_graphs_that_are_changed_here_are_accepted(e):
    assert streamed_products(placed(e)).taken == taken_of(e)


def second_index(e: Experts, name: str) -> PlacedOp:
    """Return an op whose input `name` has an index of its own."""
    own = replace(taken_of(e), index=len(e.graph.inputs))
    dims = e.graph.inputs[0].dims
    return placed(e, with_input(e, name, taken=own), more=[("other_index", dims, "int64")])


@pytest.mark.parametrize("name", ["codes1", "scales0", "bias1"])
def test_there_is_one_index(name):
    assert f"{name} has another index than the codes" in refusal(second_index(ROWS, name))


def test_the_index_has_the_same_axes_everywhere():
    e = Experts(pieces=2, index=(0, 1, 2, 3), has_bias=True)
    turned = replace(taken_of(e), axes=(None, "s", "b"))
    text = refusal(placed(e, with_input(e, "bias0", taken=turned)))
    assert "bias0 has another index than the codes" in text


def test_the_index_chooses_among_as_many_experts_everywhere():
    own = replace(taken_of(ROWS), size=5)
    block = with_input(ROWS, "bias0", taken=own, sources=(len(ROWS.graph.inputs),))
    text = refusal(placed(ROWS, block, more=[("more_biases", (5, 32), "float32")]))
    assert "bias0 has another index than the codes" in text


def test_rows_come_before_pieces_in_the_index():
    e = Experts(pieces=2, index=(0, 1, 2, 3))
    block = block_of(e)
    turned = replace(taken_of(e), axes=(None, "s", "b"))
    inputs = tuple(replace(i, taken=turned) if i.taken else i for i in block.inputs)
    text = refusal(placed(e, replace(block, inputs=inputs)))
    assert "the index has other axes than rows of codes, and then pieces" in text


@pytest.mark.parametrize("e", [ROWS, PIECES])
def test_the_elements_of_the_index_lie_side_by_side(e):
    text = refusal(placed(e, strides={"index": (4, 2)}))
    assert "the elements of the index do not lie side by side" in text


def without_index(e: Experts, name: str, *ops: BlockOp) -> PlacedOp:
    """Return an op whose input `name` is the same for all experts.

    Args:
        e: Experts that fit.
        name: The input.
        ops: Ops that take the place of the one with the first one's result.
    """
    i = input_of(e, name)
    t = e.graph.inputs[i.sources[0]]
    own = replace(i, taken=None, axes=i.axes[1:], sources=(len(e.graph.inputs),))
    inputs = tuple(own if i.name == name else i for i in block_of(e).inputs)
    stages = stages_with(e, ops[0].out, *ops) if ops else block_of(e).stages
    block = replace(block_of(e), inputs=inputs, stages=stages)
    dtype = str(t.dtype).removeprefix("torch.")
    return placed(e, block, more=[("shared", t.dims[1:], dtype)])


@pytest.mark.parametrize(
    ("number", "why"),
    [(0, "it has other axes than the rows and columns"), (1, "codes1 has no index")],
)
def test_all_codes_have_the_index(number, why):
    e = Experts(chosen=0, pieces=2, has_gate=True)
    numbers = replace(op_of(e, f"numbers{number}"), axes=("n", "k", "r"))
    assert why in refusal(without_index(e, f"codes{number}", numbers))


def test_scales_have_the_index():
    text = refusal(without_index(ROWS, "scales1"))
    assert "times1 is mul of codes in a way that it does not compute" in text


def test_codes_are_not_multiplied_with_what_the_index_chooses():
    e = Experts(codes="int8", scales="bfloat16", group=64)
    chosen = {"taken": taken_of(e), "axes": (None, "k", "r"), "sources": (len(e.graph.inputs),)}
    block = with_input(e, "x", **chosen)
    text = refusal(placed(e, block, more=[("all_x", (4, 2, 64), "float32")]))
    assert "product0 is mul of codes in a way that it does not compute" in text


@pytest.mark.parametrize(("place", "more"), [(0, 8), (1, 8), (1, 16)])
def test_experts_and_rows_begin_at_multiples_of_16_bytes(place, more):
    codes = [*stride_of(PIECES, "codes0")]
    codes[place] += more
    if place == 1:
        codes[0] = codes[1] * PIECES.rows
    text = refusal(placed(PIECES, strides={"codes0": tuple(codes)}))
    assert "the rows of codes0 do not begin at multiples of 16 bytes" in text


def test_rows_and_experts_may_lie_apart():
    codes = [*stride_of(PIECES, "codes0")]
    codes[1] += 32
    codes[0] = codes[1] * PIECES.rows + 64
    found = streamed_products(placed(PIECES, strides={"codes0": tuple(codes)}))
    assert (found.chosen_stride("codes0"), found.row_stride("codes0")) == tuple(codes[:2])


def test_the_columns_of_codes_lie_side_by_side():
    experts, row, group, _ = stride_of(PIECES, "codes0")
    wide = (2 * experts, 2 * row, 2 * group, 1)
    text = refusal(placed(PIECES, strides={"codes0": wide}))
    assert "the codes of codes0 have an index, and do not lie in rows" in text


class InWords(Experts):
    """Experts whose rows have three axes, as those of AWQ: eight rows have two."""

    @property
    def own_row_axes(self) -> tuple[str, ...]:
        return ("n", "o", "p")

    @cached_property
    def sizes(self) -> dict[str, int]:
        return super().sizes | {"n": self.rows // 8, "o": 4, "p": 2}


def test_words_of_experts_hold_codes_of_one_row():
    e = InWords(codes="uint4", scales="bfloat16")
    assert not streamed_products(placed(e)).has_rows_in_words
    strides = (e.rows * e.columns, 8, 1, 4, e.rows * e.group, e.rows)
    text = refusal(placed(e, strides={"codes0": strides}))
    assert "the codes of codes0 have an index, and do not lie in rows" in text


def test_weights_with_an_index_are_not_joined():
    e = Experts(codes="int8", scales="bfloat16", group=64)
    at = len(e.graph.inputs)
    parts = {"sources": (at, at + 1), "joined": "n", "sizes": (16, 16)}
    more = [(f"part{n}", (4, 16, 2, 64), "int8") for n in range(2)]
    text = refusal(placed(e, with_input(e, "codes0", **parts), more=more))
    assert "codes0 is joined along n" in text


def test_there_are_no_sums_besides_an_index():
    e = Experts(has_bias=True)
    loop, after = block_of(e).stages
    columns = ("k", "r")
    square = BlockOp("square", "mul", ("x", "x"), columns)
    part = BlockOp("part", "sum", ("square",), ("k",), over="r")
    loop = Stage(
        loop.loop,
        (*loop.body, square, part),
        (*loop.accumulators, Accumulator("squares", "part", "sum", ())),
    )
    last = after.body[-1]
    scale = BlockOp("rms", "rsqrt", ("squares",), ())
    normed = replace(last, args=(last.args[0], "rms"))
    after = replace(after, body=(*after.body[:-1], scale, normed))
    text = refusal(placed(e, replace(block_of(e), stages=(loop, after))))
    assert "it has an index, and other sums" in text


def with_powers(e: Experts, name: str) -> PlacedOp:
    """Return an op whose input `name` holds powers of two."""
    i = input_of(e, name)
    t = e.graph.inputs[i.sources[0]]
    block = with_input(e, name, sources=(len(e.graph.inputs),))
    return placed(e, block, more=[("powers", t.dims, "float8_e8m0fnu")])


@pytest.mark.parametrize(("e", "name"), [(ROWS, "bias1"), (PIECES, "bias0")])
def test_powers_of_two_are_scales(e, name):
    assert f"{name} holds powers of two that are no scales" in refusal(with_powers(e, name))


@pytest.mark.parametrize("name", ["x", "weights"])
def test_activations_are_no_powers_of_two(name):
    assert f"{name} holds torch.float8_e8m0fnu" in refusal(with_powers(PIECES, name))


def test_a_factor_carries_no_axis_that_was_added_up():
    e = Experts(chosen=0, pieces=2, walks_groups=False)
    early = BlockOp("early0", "sum", ("open0",), ("n", "k"), over="s")
    times = replace(op_of(e, "times0"), args=("early0", "scales0"))
    text = refusal(placed(e, with_ops(e, "times0", early, times)))
    assert "times0 is mul of codes in a way that it does not compute" in text


def with_total(e: Experts, in_loop: bool) -> PlacedOp:
    """Return an op that multiplies its results with the sum of the weights of all pieces."""
    before, loop, after = block_of(e).stages
    total = BlockOp("total", "sum", ("weights",), (), over="s")
    last = replace(after.body[-1], args=(after.body[-1].args[0], "total"))
    if in_loop:
        loop = replace(loop, body=(*loop.body, total))
    after = replace(after, body=(*after.body[:-1], *(() if in_loop else (total,)), last))
    return placed(e, replace(block_of(e), stages=(before, loop, after)))


def test_what_the_loop_adds_up_over_pieces_is_a_product():
    text = refusal(with_total(PIECES, in_loop=True))
    assert "total reduces a value that is no product" in text
    assert streamed_products(with_total(PIECES, in_loop=False))


@pytest.mark.parametrize("codes", ["uint4", "e2m1", "int8", "float8_e4m3fn"])
def test_a_batch_has_no_index(codes):
    text = refusal(placed(Experts(codes=codes, scales="bfloat16", batch=2)))
    assert "it has an index, and a batch" in text


@pytest.mark.parametrize("values", [E2M1[:8] * 2, E2M1[1::2] * 2, (0.0,) * 16])
def test_halves_of_a_table_have_a_sign_each(values):
    other = replace(op_of(PIECES, "numbers0"), attrs=(("values", values),))
    text = refusal(placed(PIECES, with_ops(PIECES, "numbers0", other)))
    assert "its table has no positive and no negative half, or infinite entries" in text


def test_both_products_look_up_their_codes():
    other = replace(op_of(ROWS, "numbers1"), fn="sub", args=("codes1", 8.0), attrs=())
    text = refusal(placed(ROWS, with_ops(ROWS, "numbers1", other)))
    assert "its codes have different dtypes" in text


def test_small_floats_have_no_zero():
    numbers = op_of(PIECES, "numbers0")
    centered = replace(numbers, out="centered0", fn="sub", args=("codes0", 8.0), attrs=())
    block = with_ops(PIECES, "numbers0", centered, replace(numbers, args=("centered0",)))
    text = refusal(placed(PIECES, block))
    assert "numbers0 is lookup of codes in a way that it does not compute" in text


@pytest.mark.parametrize(
    ("e", "why"),
    [
        (Experts(rows=24), "rows of codes are no multiple of 16"),
        (Experts(rows=20, has_gate=True), "rows of codes are no multiple of 8"),
        (Experts(columns=96), "96 columns in groups of 32 do not fit"),
        (Experts(group=16), "128 columns in groups of 16 do not fit"),
        (
            Experts(codes="float8_e4m3fn", scales="float32", rows=48, square=24),
            "blocks of 24 rows share scales",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_sizes_have_to_fit(e, why):
    assert why in refusal(placed(e))


def test_tiles_of_8_rows_are_multiplied_as_signed_bytes():
    e = Experts(tile_rows=8)
    assert e.layout.rows == 8
    floats = replace(e, codes="float8_e4m3fn", scales="float32")
    with pytest.raises(CodegenError, match="has tiles of 1 along b, 16 along n"):
        assert floats.layout


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tile_rows": 4}, "has tiles of 16 along n"),
        ({"tile_rows": 32}, "has tiles of 16 along n"),
        ({"warps": 32}, "16 warps"),
        ({"blocks": 0}, "persistent blocks"),
        ({"columns": 32768, "stages": 8, "tile": 1024}, "bytes of shared memory, a block has"),
    ],
)
def test_schedules_have_to_fit(changes, why):
    with pytest.raises(CodegenError, match=why):
        replace(PIECES, **changes).kernel()


@pytest.mark.parametrize("e", [ROWS, PIECES])
def test_blocks_share_no_columns_of_experts(e):
    assert e.columns % 128 == 0  # shares would fit
    shares = e.schedule.changed(cooperating_blocks=2)
    with pytest.raises(
        CodegenError, match="an index chooses the codes, so blocks share no columns"
    ):
        stream_layout(e.op, shares)


@pytest.mark.parametrize("e", [ROWS, PIECES])
def test_codes_with_an_index_have_no_shifts(e):
    """Scales stand for shifts: they have the index, and an element for each row and group."""
    product = op_of(e, "product0")
    (value, other), axes = product.args, tuple(a for a in product.axes if a not in e.batch_axes)
    scaled = BlockOp("scaled", "mul", (value, "scales0"), axes)
    weight = BlockOp("weight", "add", ("scaled", "scales0"), axes)
    block = with_ops(e, "product0", scaled, weight, replace(product, args=("weight", other)))
    text = refusal(placed(e, block))
    assert "weight is add of codes in a way that it does not compute" in text
