"""Kernels that stream codes of random layouts give the results of float64 on the CPU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mirage_hf.codegen.cuda_kernel import CudaKernel
from mirage_hf.codegen.cuda_text import write_kernel
from mirage_hf.codegen.streams import layout
from mirage_hf.codegen.streams.kernel import write_stream_kernel
from mirage_hf.codegen.streams.layout import StreamLayout, stream_layout
from mirage_hf.codegen.streams.products import ZEROS
from mirage_hf.errors import CodegenError
from mirage_hf.graph.block import BlockGraph
from tests.helpers.streamed_graphs import (
    SHIFTS,
    Hand,
    random_column_hand,
    random_gap_hand,
    random_hand,
    random_lane_hand,
    random_pair_hand,
    random_row_hand,
    random_shift_hand,
)
from tests.helpers.thorough import THOROUGH

#: Random layouts are compiled so many at a time.
AT_ONCE = 12
MORE_STARTS = (pytest.param(n * AT_ONCE, marks=pytest.mark.thorough) for n in (3, 4))

#: How many random layouts with column-major codes or scales are compiled at a time.
COLUMNS_AT_ONCE = 16
MORE_COLUMNS = [pytest.param(n, marks=pytest.mark.thorough) for n in range(3, 8)]
#: What draws such layouts. The words of the second one hold codes of eight rows. The third one has
#: shifts, and codes in any order. The words of the fourth one lie as lanes load them. The fifth one
#: has gaps between scales, and codes in any other order. Bytes of the last one hold codes of two
#: rows.
COLUMN_HANDS = (
    random_column_hand,
    random_row_hand,
    random_shift_hand,
    random_lane_hand,
    random_gap_hand,
    random_pair_hand,
)


def check(hands: list[Hand], kernels: list[CudaKernel], folder: Path) -> None:
    """Compare the results of kernels with those of float64, in an order of threads or in two."""
    source = "\n".join(k.source for k in kernels)
    for n, k in enumerate(kernels):
        source += f"\nstatic_assert(sizeof(kernel_{n}::Shared) == {k.shared});"
    for n, (hand, kernel) in enumerate(zip(hands, kernels, strict=True)):
        want = hand.exact()
        orders = (1, 2 + n)  # from the last thread to the first, and random
        for order in orders if THOROUGH else [orders[n % 2]]:
            got = hand.run(kernel, f"kernel_{n}", order, folder, source)
            assert not isinstance(got, str), f"{hand}: {got}"
            assert hand.error(got, want) <= 1, f"{hand}, order {order}"


def drawn(first: int) -> tuple[list[Hand], list[CudaKernel]]:
    """Return random block graphs and their kernels. Few that are drawn are refused."""
    hands: list[Hand] = []
    kernels, refused = [], 0
    for seed in range(1000 * first, 1000 * first + 100):
        hand = random_hand(seed)
        try:
            kernels.append(hand.kernel(f"kernel_{len(hands)}"))
        except CodegenError:
            refused += 1
            continue
        hands.append(hand)
        if len(hands) == AT_ONCE:
            break
    assert len(hands) == AT_ONCE and refused < AT_ONCE
    return hands, kernels


@pytest.mark.parametrize("first", [0, AT_ONCE, 2 * AT_ONCE, *MORE_STARTS])
def test_random_layouts_give_the_results_of_float64(first, tmp_path, monkeypatch):
    # one chunk is under way until the ring is full, or some, or all
    monkeypatch.setattr(layout, "_FIRST_BYTES", (1, 8 << 10, 48 << 10)[first // AT_ONCE % 3])
    check(*drawn(first), tmp_path)


def drawn_columns(draw: Callable[[int], Hand], first: int = 0) -> list[Hand]:
    """Return random block graphs that a function of COLUMN_HANDS draws."""
    return [draw(n) for n in range(first, first + COLUMNS_AT_ONCE)]


@pytest.mark.parametrize("draw", COLUMN_HANDS)
@pytest.mark.parametrize("number", [0, 1, 2, *MORE_COLUMNS])
def test_random_layouts_of_columns_give_the_results_of_float64(draw, number, tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "_FIRST_BYTES", (1, 8 << 10, 48 << 10)[number % 3])
    hands = drawn_columns(draw, number * COLUMNS_AT_ONCE)
    check(hands, [hand.kernel(f"kernel_{n}") for n, hand in enumerate(hands)], tmp_path)


def test_random_layouts_of_columns_are_of_each_kind():
    hands = drawn_columns(random_column_hand)
    layouts = [stream_layout(hand.op, hand.schedule) for hand in hands]
    columns = [x for x in layouts if x.products.is_column_major]
    assert len(hands) > len(columns) >= 10
    assert {x.tile_rows for x in columns} == {16, 32}
    assert {x.vectors for x in columns} == {4, 8, 16}
    assert {x.teams > 1 for x in columns} == {x.chunks > 1 for x in columns} == {True, False}
    assert {x.batch > 1 for x in columns} == {True, False}
    assert {32, 64, 128} < {hand.group for hand in hands if hand.has_columns}
    assert {bool(hand.scale_columns) for hand in hands if hand.has_columns} == {True, False}
    assert {len(hand.rows) > 1 for hand in hands if hand.has_columns} == {True, False}
    for has in ("has_norm", "has_gate", "has_residual", "has_zeros"):
        assert {getattr(hand, has) for hand in hands if hand.has_columns} == {True, False}, has


def test_random_layouts_of_pairs_of_rows_are_of_each_kind():
    hands = [random_pair_hand(n) for n in range(48)]
    layouts = [stream_layout(hand.op, hand.schedule) for hand in hands]
    assert all(x.products.row_pair == "n" for x in layouts)
    assert {x.rows for x in layouts} == {16, 32}
    assert {x.teams > 1 for x in layouts} == {x.chunks > 1 for x in layouts} == {True, False}
    assert {x.last_chunk < x.chunk for x in layouts} == {True, False}
    assert {x.has_whole_tiles for x in layouts} == {True, False}
    assert {x.lane_bytes for x in layouts} == {8, 16}
    assert {x.batch for x in layouts} > {1, 2, 3, 5, 8}
    assert {(hand.has_zeros, bool(hand.shifts)) for hand in hands} == {
        (False, False),
        (True, False),
        (False, True),
    }


def test_random_layouts_of_rows_in_words_are_of_each_kind():
    hands = drawn_columns(random_row_hand)
    layouts = [stream_layout(hand.op, hand.schedule) for hand in hands]
    assert all(x.products.has_rows_in_words for x in layouts)
    assert {x.tile_rows for x in layouts} == {32, 64}
    assert {x.vectors for x in layouts} == {1, 2, 4}
    assert {x.lane_bytes for x in layouts} == {4, 8, 16}
    assert {x.teams > 1 for x in layouts} == {x.chunks > 1 for x in layouts} == {True, False}
    assert {x.last_chunk < x.chunk for x in layouts} == {True, False}
    assert len({x.batch for x in layouts}) >= 4
    assert {0, 32, 64, 128} <= {hand.group for hand in hands}
    assert {hand.codes for hand in hands} == {"uint4", "int4"}
    zeros = {(hand.has_zeros, hand.zeros_in_words, hand.group > 0) for hand in hands}
    assert {(True, True, True), (True, False, True), (False, False, True)} < zeros
    assert (True, True, False) in zeros
    assert {bool(hand.scale_columns) for hand in hands if hand.group} == {True, False}
    assert {hand.columns == hand.group for hand in hands} == {True, False}
    assert {len(hand.rows) > 1 for hand in hands} == {True, False}
    for has in ("has_norm", "has_gate", "has_residual"):
        assert {getattr(hand, has) for hand in hands} == {True, False}, has


def test_random_layouts_with_shifts_are_of_each_kind():
    hands = drawn_columns(random_shift_hand)
    layouts = [stream_layout(hand.op, hand.schedule) for hand in hands]
    assert all(p.shift is not None for x in layouts for p in x.products.products)
    assert {hand.shifts for hand in hands} == {*SHIFTS}
    assert {(hand.shifts, hand.scales_first) for hand in hands} >= {
        (form, first) for form in ("groups", "sums") for first in (True, False)
    }
    assert {hand.codes for hand in hands} == {"uint4", "int4", "uint8", "int8"}
    assert {hand.dtype for hand in hands} == {"bfloat16", "float16", "float32"}
    assert {(hand.has_columns, hand.has_rows_in_words) for hand in hands} == {
        (True, False),
        (False, True),
        (False, False),
    }
    orders = {(0 in hand.scale_columns, 0 in hand.shift_columns) for hand in hands}
    assert len(orders) == 4
    assert len({x.batch for x in layouts}) >= 4
    assert {x.teams > 1 for x in layouts} == {x.chunks > 1 for x in layouts} == {True, False}
    assert {len(hand.rows) > 1 for hand in hands} == {True, False}
    for has in ("has_norm", "has_gate", "has_residual", "is_turned"):
        assert {getattr(hand, has) for hand in hands} == {True, False}, has


def test_random_layouts_of_lanes_are_of_each_kind():
    hands = drawn_columns(random_lane_hand)
    layouts = [stream_layout(hand.op, hand.schedule) for hand in hands]
    assert all(x.products.is_in_lanes for x in layouts)
    assert {x.tile_rows for x in layouts} == {8, 16}
    assert {x.teams > 1 for x in layouts} == {x.chunks > 1 for x in layouts} == {True, False}
    assert {x.last_chunk < x.chunk for x in layouts} == {True, False}
    assert len({x.batch for x in layouts}) >= 4
    assert {hand.group for hand in hands} == {128, 256, 384}
    assert {hand.codes for hand in hands} == {"uint4", "int4"}
    assert {hand.dtype for hand in hands} == {"bfloat16", "float16", "float32"}
    assert {hand.shifts for hand in hands} == {"", *SHIFTS}
    orders = {(0 in hand.scale_columns, 0 in hand.shift_columns) for hand in hands}
    assert orders >= {(True, True), (True, False), (False, True)}
    assert {len(hand.rows) > 1 for hand in hands} == {True, False}
    assert {hand.padding > 0 for hand in hands} == {True, False}
    for has in ("has_norm", "has_gate", "has_residual", "has_zeros", "scale_gaps"):
        assert {getattr(hand, has) for hand in hands} == {True, False}, has


def test_random_layouts_with_gaps_are_of_each_kind():
    hands = drawn_columns(random_gap_hand)
    layouts = [stream_layout(hand.op, hand.schedule) for hand in hands]
    spaced = [[n for n, _ in enumerate(x.products.grouped) if x.is_spaced(n)] for x in layouts]
    assert all(spaced) and {len(x) for x in spaced} >= {1, 2, 3}
    assert {(hand.has_columns, hand.has_rows_in_words) for hand in hands} == {
        (True, False),
        (False, True),
        (False, False),
    }
    kinds = {(bool(hand.shifts), hand.has_zeros) for hand in hands}
    assert kinds == {(True, False), (False, True), (False, False)}
    assert {x.teams > 1 for x in layouts} == {x.chunks > 1 for x in layouts} == {True, False}
    assert len({x.batch for x in layouts}) >= 4
    assert {hand.dtype for hand in hands} == {"bfloat16", "float16", "float32"}


@pytest.mark.parametrize("rows", [(64,), (64, 128)])
def test_one_block_of_rows_may_share_scales(rows, tmp_path):
    """An axis of one block may have any stride, so it does not tell how scales lie."""
    blocks = {"codes": "float8_e4m3fn", "square": 64, "scales_first": False}
    hand = Hand(rows=rows, columns=512, group=128, dtype="float32", **blocks)
    check([hand], [hand.kernel("kernel_0")], tmp_path)


@pytest.mark.parametrize("rows", [(8,), (8, 16), (16, 8)])
def test_eight_rows_may_be_a_part_of_a_weight_in_tiles(rows, tmp_path):
    both = (0, 1)
    shape = {"rows": rows, "group": 128, "columns": 384, "dtype": "float32"}
    hand = Hand(has_gate=True, scale_columns=both, has_lanes=True, scale_gaps=True, **shape)
    assert stream_layout(hand.op, hand.schedule).is_spaced(0)
    check([hand], [hand.kernel("kernel_0")], tmp_path)


@pytest.mark.parametrize("shift_columns", [(), (0,)])
def test_scales_and_shifts_with_gaps_are_read_at_any_address(shift_columns):
    hand = Hand(
        rows=(64, 32),
        group=128,
        scale_columns=(0,),
        shifts="codes",
        shift_columns=shift_columns,
        has_lanes=True,
        scale_gaps=True,
    )
    _, launch = write_kernel(hand.op, hand.schedule, "kernel")
    names = [t.name for t in hand.op.operands]
    shifts = ["shifts00", "shifts01"] if shift_columns else []
    assert [names[n] for n in launch.anywhere] == ["scales00", "scales01", *shifts]


def test_pairs_of_groups_may_have_column_major_scales(tmp_path):
    shape = {"rows": (48,), "columns": 192, "group": 32, "tile": 4, "dtype": "float32"}
    hands = [Hand(scale_columns=(0,), **shape), Hand(scale_columns=(0, 1), has_gate=True, **shape)]
    for hand in hands:
        divided = stream_layout(hand.op, hand.schedule)
        assert divided.groups_of_unit == 2 and divided.comes_with_chunks(0)
    check(hands, [hand.kernel(f"kernel_{n}") for n, hand in enumerate(hands)], tmp_path)


@pytest.mark.parametrize("scale_columns", [(), (0,), (1,)])
def test_scales_of_two_products_may_lie_in_different_ways(scale_columns, tmp_path):
    """Scales that come with the first chunk are read by all warps, so there are no teams."""
    shape = {"rows": (160,), "columns": 640, "group": 64, "tile": 4, "stages": 4, "warps": 8}
    hand = Hand(has_columns=True, has_gate=True, blocks=1, dtype="float32", **shape)
    both = replace(hand, scale_columns=(0, 1))
    assert stream_layout(both.op, both.schedule).teams == 2
    hand = replace(hand, scale_columns=scale_columns)
    divided = stream_layout(hand.op, hand.schedule)
    assert divided.teams == 1
    assert [divided.comes_with_chunks(n) for n in (0, 1)] == [n in scale_columns for n in (0, 1)]
    check([hand], [hand.kernel("kernel_0")], tmp_path)


@pytest.mark.parametrize(("batch", "has_columns"), [(1, False), (3, False), (1, True), (2, True)])
def test_four_teams_of_warps_give_the_results_of_float64(batch, has_columns, tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "_FIRST_BYTES", 1)
    shape = {"rows": (16 * 11,), "columns": 512, "tile": 8, "warps": 16, "batch": batch}
    if has_columns:  # teams share the chunks of a tile
        shape |= {"rows": (96,), "tile": 2, "warps": 8, "has_columns": True, "scale_columns": (0,)}
    hand = Hand(stages=4, blocks=1, **shape)
    assert stream_layout(hand.op, hand.schedule).teams == 4
    check([hand], [hand.kernel("kernel_0")], tmp_path)


def test_random_layouts_have_batches_of_each_kind():
    hands = [hand for first in (0, AT_ONCE) for hand in drawn(first)[0] if hand.batch > 1]
    assert {hand.batch for hand in hands} == {2, 3, 4, 5, 7, 8, 11, 12, 13, 16}
    assert {hand.codes for hand in hands} == {str(t).removeprefix("torch.") for t in ZEROS}
    assert {hand.dtype for hand in hands} == {"bfloat16", "float16", "float32"}
    for has in ("has_norm", "has_gate", "has_residual"):
        assert len({hand.batch for hand in hands if getattr(hand, has)}) >= 3, has
    assert {len(hand.rows) > 1 for hand in hands} == {True, False}
    scales = {"block" if h.square else "group" if h.group else "row" for h in hands}
    assert scales == {"block", "group", "row"}


def random_layouts() -> list[tuple[Hand, StreamLayout]]:
    """Return the random block graphs whose results are compared above, and their layouts."""
    hands = [hand for first in (0, AT_ONCE, 2 * AT_ONCE) for hand in drawn(first)[0]]
    for draw in COLUMN_HANDS:
        for number in range(3):
            hands += drawn_columns(draw, number * COLUMNS_AT_ONCE)
    return [(hand, stream_layout(hand.op, hand.schedule)) for hand in hands]


def test_random_layouts_of_more_than_eight_rows_are_of_each_kind():
    wide = [(hand, x) for hand, x in random_layouts() if x.eights > 1]
    hands, layouts = zip(*wide, strict=True)
    assert {hand.batch for hand in hands} == {9, 11, 12, 13, 14, 16}
    assert {hand.codes for hand in hands} == {str(t).removeprefix("torch.") for t in ZEROS}
    assert {hand.dtype for hand in hands} == {"bfloat16", "float16", "float32"}
    orders = {(h.has_columns, h.has_rows_in_words, h.has_lanes, h.has_row_pairs) for h in hands}
    assert len(orders) == 5
    assert {(hand.has_zeros, bool(hand.shifts)) for hand in hands} == {
        (False, False),
        (True, False),
        (False, True),
    }
    assert {x.sets for x in layouts} == {1, 2, 4, 8}
    assert {x.sharers for x in layouts} == {1, 2, 4}
    assert {x.batch > x.rows_at_once(2) * x.row_teams for x in layouts} == {True, False}
    assert {bool(hand.table) for hand in hands} == {True, False}
    for has in ("has_norm", "has_gate", "has_residual", "is_turned"):
        assert {getattr(hand, has) for hand in hands} == {True, False}, has


def test_random_layouts_of_sharers_are_of_each_kind():
    shared = [(hand, x) for hand, x in random_layouts() if x.sharers > 1]
    hands, layouts = zip(*shared, strict=True)
    assert {x.sharers for x in layouts} == {2, 4}
    assert {hand.codes for hand in hands} == {str(t).removeprefix("torch.") for t in ZEROS}
    orders = {(h.has_columns, h.has_rows_in_words, h.has_lanes, h.has_row_pairs) for h in hands}
    assert len(orders) == 5
    assert {hand.group > 0 for hand in hands} == {True, False}
    grouped = [(x, n) for x in layouts for n, (_, name) in enumerate(x.products.grouped) if name]
    assert {x.comes_with_chunks(n) for x, n in grouped} == {True, False}
    assert {x.is_spaced(n) for x, n in grouped} == {True, False}
    assert {x.most_tiles > 1 for x in layouts} == {x.chunks > 1 for x in layouts} == {True, False}
    assert {x.last_chunk < x.chunk for x in layouts} == {True, False}
    assert {x.walkers > 1 for x in layouts} == {True, False}
    assert {x.tiles % x.walkers > 0 for x in layouts} == {True, False}
    assert {x.schedule.persistent_blocks % x.sharers > 0 for x in layouts} == {True, False}
    # a team of one warp multiplies whole shares, or its chunks of them
    one_warp = {x.chunks > 1 for x in layouts if x.teams > 1 and x.team_warps == 1}
    assert one_warp == {True, False}
    assert {x.row_teams for x in layouts} == {1, 2, 4, 8}
    assert {x.row_warps > 1 for x in layouts if x.row_teams > 1} == {True, False}
    assert {hand.has_norm for hand, x in shared if x.row_teams > 1} == {True, False}
    assert {(x.batch > 1) + (x.batch > 8) for x in layouts} == {0, 1, 2}
    for has in ("has_norm", "has_gate", "has_residual", "has_zeros", "is_turned"):
        assert {getattr(hand, has) for hand in hands} == {True, False}, has


@pytest.mark.parametrize("batch", [1, 16])
def test_eight_blocks_may_share_columns(batch, tmp_path):
    shape = {"columns": 1024, "rows": (48,), "dtype": "float32", "warps": 4, "stages": 4}
    hand = Hand(sharers=8, blocks=17, batch=batch, has_norm=True, has_residual=True, **shape)
    divided = stream_layout(hand.op, hand.schedule)
    assert (divided.walkers, divided.share, divided.most_tiles) == (2, 128, 2)
    check([hand], [hand.kernel("kernel_0")], tmp_path)


def with_two_sets(hand: Hand) -> Hand | None:
    """Double the rows of a block graph and of its tiles. None if tiles may not have two sets."""
    most = 16 // (1 + hand.has_gate)
    wide = replace(hand, rows=tuple(2 * n for n in hand.rows), tile_rows=2 * most)
    is_row_major = not (hand.has_columns or hand.has_rows_in_words or hand.has_lanes)
    if hand.batch == 1 or not is_row_major or hand.has_row_pairs:
        return None
    try:
        stream_layout(wide.op, wide.schedule)
        wide.kernel("kernel")
    except CodegenError:
        return None
    return wide


@pytest.mark.parametrize(
    ("draw", "first"),
    [(random_hand, 0), (random_hand, 400), (random_column_hand, 0), (random_shift_hand, 0)],
)
def test_two_sets_of_rows_give_the_results_of_float64(draw, first, tmp_path):
    found = (with_two_sets(draw(seed)) for seed in range(first, first + 400))
    hands = list(itertools.islice((hand for hand in found if hand is not None), AT_ONCE))
    layouts = [stream_layout(hand.op, hand.schedule) for hand in hands]
    assert len(hands) == AT_ONCE and {x.sets for x in layouts} == {2}
    assert {x.eights for x in layouts} == {1, 2}
    assert {hand.has_gate for hand in hands} == {True, False}
    if draw is random_hand:
        assert {x.sharers for x in layouts} >= {1, 2}
        assert len({hand.codes for hand in hands}) >= 4
        assert {bool(hand.table) for hand in hands} == {True, False}
    check(hands, [hand.kernel(f"kernel_{n}") for n, hand in enumerate(hands)], tmp_path)


def with_spans(hand: Hand, most: int, monkeypatch) -> StreamLayout | None:
    """Limit shared memory so that the other factor has several spans, at most so many."""
    monkeypatch.undo()
    try:
        whole = stream_layout(hand.op, hand.schedule)
    except CodegenError:
        return None
    if whole.chunks < 2:
        return None
    limit = whole.bytes_with_spans_of(-(-whole.chunks // most))
    if limit >= whole.shared_bytes:
        return None
    monkeypatch.setattr(layout, "SHARED_MOST", limit)
    return stream_layout(hand.op, hand.schedule)


@pytest.mark.parametrize(
    ("draw", "count", "kinds"),
    [
        (random_hand, 2 * AT_ONCE, 11),
        (random_column_hand, 10, 9),
        (random_row_hand, 6, 8),
        (random_shift_hand, 6, 7),
        (random_lane_hand, 8, 8),
        (random_gap_hand, 7, 8),
    ],
)
def test_other_factors_in_spans_give_the_results_of_float64(
    draw, count, kinds, tmp_path, monkeypatch
):
    hands, kernels, seen, sharers = [], [], set(), set()
    for seed in range(200):
        hand = draw(7 * seed)
        divided = with_spans(hand, 2 + seed % 3, monkeypatch)
        if divided is None:
            continue
        assert divided.spans > 1
        seen.add((divided.spans > 2, divided.last_span < divided.span, divided.batch > 1))
        seen.add(("norm", hand.has_norm, divided.batch > 1))
        sharers.add(divided.sharers)
        kernels.append(hand.kernel(f"kernel_{len(hands)}"))
        hands.append(hand)
        if len(hands) == count:
            break
    assert len(hands) == count and len(seen) >= kinds and len(sharers) > 1
    check(hands, kernels, tmp_path)


#: What declares a name in the text of a kernel.
_DECLARED = re.compile(
    r"\b(?:int|float|unsigned(?: char)?|long long|bool|auto|uint4|half|char)[&*]* "
    r"(?:__restrict__ )?(\w+)\b(?! ?\()"
)
#: What follows the first name of a declaration.
_ALSO_DECLARED = re.compile(r", (\w+) = ")


def declared(hand: Hand) -> set[str]:
    """Return the names that the text of a kernel declares, except those of values of its graph."""
    text = hand.kernel().source
    return {*_DECLARED.findall(text), *_ALSO_DECLARED.findall(text)} - {*hand.op.block.carried}


def renamed(block: BlockGraph, old: str, new: str) -> BlockGraph:
    """Return a block graph with the value `old` named `new`."""

    def name(value):
        return new if value == old else value

    stages = tuple(
        replace(
            stage,
            body=tuple(
                replace(op, out=name(op.out), args=tuple(map(name, op.args))) for op in stage.body
            ),
            accumulators=tuple(
                replace(a, out=name(a.out), arg=name(a.arg)) for a in stage.accumulators
            ),
        )
        for stage in block.stages
    )
    inputs = tuple(replace(i, name=name(i.name)) for i in block.inputs)
    outputs = tuple(replace(o, value=name(o.value)) for o in block.outputs)
    return replace(block, inputs=inputs, stages=stages, outputs=outputs)


def test_values_may_have_the_names_of_the_text_of_words_in_any_order(tmp_path):
    plain = Hand(has_residual=True, has_zeros=True, scale_columns=(0,), warps=8)
    known = declared(plain)
    hands, kernels, every = [], [], set()
    lanes = {"has_lanes": True, "group": 128, "scale_gaps": True}
    for words in ({"has_columns": True}, {"has_rows_in_words": True}, lanes):
        hand = replace(plain, **words)
        names = declared(hand) - known
        for name in sorted(names - every):
            op = replace(hand.op, block=renamed(hand.op.block, "residual", name))
            kernels.append(write_stream_kernel(op, hand.schedule, f"kernel_{len(kernels)}"))
            hands.append(hand)
        every |= names
    assert {"vector", "place", "word_step", "from", "from_16", "words_0_0"} < every
    assert {"begin_1", "first_1", "e"} < every
    check(hands, kernels, tmp_path)


#: A kernel with many names, and its values that are renamed.
NAMED = {"columns": 512, "has_norm": True, "has_residual": True, "warps": 8}
NAMES = ("sum0", "squares", "residual")


@pytest.mark.parametrize("spans", [1, 2])
@pytest.mark.parametrize("batch", [1, 4])
def test_values_may_have_the_names_of_the_text(batch, spans, tmp_path, monkeypatch):
    hand = Hand(tile=4, batch=batch, **NAMED)
    if spans > 1:
        assert with_spans(hand, spans, monkeypatch).spans == spans
    names = sorted(declared(hand))
    assert {"row", "w", "warps", "s"} < set(names)
    kernels = []
    for n, name in enumerate(names):
        for value in NAMES if name in ("n", "w") else NAMES[n % 3 : n % 3 + 1]:
            op = replace(hand.op, block=renamed(hand.op.block, value, name))
            kernels.append(write_stream_kernel(op, hand.schedule, f"kernel_{len(kernels)}"))
    check([hand] * len(kernels), kernels, tmp_path)


def test_values_may_have_the_names_of_the_text_of_sharers_and_of_12_rows(tmp_path):
    hand = Hand(tile=4, batch=12, sharers=2, blocks=8, **NAMED)
    names = sorted(declared(hand) - declared(replace(hand, batch=4, sharers=1)))
    assert {"walker", "share", "row_team", "rank", "more", "own", "own_column_3"} < set(names)
    kernels = []
    for name, value in itertools.product(names, NAMES):
        op = replace(hand.op, block=renamed(hand.op.block, value, name))
        kernels.append(write_stream_kernel(op, hand.schedule, f"kernel_{len(kernels)}"))
    check([hand] * len(kernels), kernels, tmp_path)
