from types import SimpleNamespace

import blocks
import pytest
import torch

from mirage_hf import errors
from mirage_hf.codegen import triton
from mirage_hf.codegen.plan import plan
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.tune import cost, space, tuner
from mirage_hf.verify.verdict import Accepted


def test_round_trip_and_order_of_tiles():
    s = Schedule((("n", 8), ("k", 256), ("m", 1)), mma=True, num_warps=8)
    assert Schedule.from_dict(s.to_dict()) == s
    assert s == Schedule((("m", 1), ("k", 256), ("n", 8)), mma=True, num_warps=8)
    assert s.to_dict()["tiles"] == {"k": 256, "m": 1, "n": 8}


@pytest.mark.parametrize("bad, says", [
    (dict(tiles=(("n", 12),)), "n is 12; tiles and num_warps must be powers of two"),
    (dict(tiles=(("n", 8),), num_warps=3), "num_warps is 3"),
    (dict(tiles=(("n", 8),), num_stages=0), "num_stages is 0"),
])
def test_impossible_schedules_say_why(bad, says):
    with pytest.raises(errors.CodegenError, match=says):
        Schedule(**bad)


def test_unknown_field_of_a_stored_schedule():
    with pytest.raises(errors.FormatError, match="unknown field 'color'"):
        Schedule.from_dict({"tiles": {"n": 8}, "color": "red"})


def test_a_schedule_for_another_block_graph_is_refused():
    op = blocks.rms_norm_linear().block_ops[0]
    with pytest.raises(errors.CodegenError, match=r"tiles are given for \['n'\], the block graph's axes are \['k', 'm', 'n'\]"):
        plan(op, Schedule((("n", 8),)))


def test_a_tile_axis_is_held_whole():
    op = blocks.softmax(walk=False).block_ops[0]
    with pytest.raises(errors.CodegenError, match="tile axis n of size 100 must be held whole; its tile is 64, give 128"):
        plan(op, Schedule((("m", 1), ("n", 64))))


def test_a_grid_axis_that_no_output_carries_is_refused():
    b = blocks.Block({"m": 4, "n": 8})
    b.load("x", "mn", 0), b.load("s", "m", 1)
    b.store(b.stage().op("y", "neg", "s"), "m", blocks.torch.float16)
    g = blocks.new_kernel_graph()
    g.new_input((4, 8), name="x"), g.new_input((4,), name="s")
    op = blocks.ugraph(g, b).block_ops[0]
    with pytest.raises(errors.CodegenError, match="output y does not carry the grid axis n"):
        space.schedules(op)
    with pytest.raises(errors.CodegenError, match="output y does not carry the grid axis n"):
        triton.generate(blocks.ugraph(g, b))


SPACES = {"norm linear": blocks.rms_norm_linear(1, 4096, 4096), "3 rows": blocks.rms_norm_linear(3, 896, 37),
          "16 rows": blocks.rms_norm_linear(16, 4096, 4096), "lora": blocks.lora(1, 4096, 4096), "softmax": blocks.softmax(64, 4096),
          "ntrans": blocks.ntrans(16, 4096), "batched": blocks.batched_matmul(), "attention": blocks.attention_row(64, 1, 4096, 128)}


@pytest.mark.parametrize("name", SPACES)
def test_the_space_keeps_to_its_budgets(name):
    op = SPACES[name].block_ops[0]
    found = space.schedules(op, limit=10 ** 6)
    assert found and len(set(found)) == len(found)
    for s in found:
        estimate = cost.estimate(plan(op, s))
        assert estimate.registers <= space.REGISTER_BUDGET and estimate.shared <= cost.H200.shared_bytes
    assert space.schedules(op, limit=5) == found[:5] and space.default_schedule(op) == found[0]


def test_measured_winners_rank_high():
    """FACTS: 8 rows of W, 1024 of K, 4 warps won for one row of 4096 to 4096; 16 rows want tensor cores."""
    first = space.schedules(SPACES["norm linear"].block_ops[0], limit=4)
    assert Schedule((("m", 1), ("n", 8), ("k", 1024)), num_warps=4) in first
    assert all(s.mma for s in space.schedules(SPACES["16 rows"].block_ops[0], limit=10))


def test_rank_without_a_gpu_always_has_the_library_path():
    result = tuner.tune([SPACES["norm linear"]], device="cpu", per_graph=6)
    assert not result.measured and not result.best.is_library and result.best_searched is result.best
    assert [c.is_library for c in result.candidates].count(True) == 1 and len(result.candidates) == 7
    assert result.to_dict()["library_us"] == result.library.us
    with pytest.raises(errors.CodegenError, match="no µGraph given"):
        tuner.tune([])


def test_a_kernel_whose_results_differ_from_call_to_call_is_refused(monkeypatch):
    """A race that the one check before timing missed."""
    ugraph = SPACES["norm linear"]
    candidate = next(c for c in tuner.rank([ugraph], per_graph=1) if not c.is_library)
    calls = [0]

    def steady(inputs):
        return [torch.full((2, 3), float("nan"), dtype=torch.float16)]

    def racy(inputs):
        calls[0] += 1
        return [torch.full((2, 3), float(calls[0] == 7), dtype=torch.float16)]

    monkeypatch.setattr(tuner.measure, "time_run", lambda run, sets, replays: tuner.measure.timing([1.0], 1))
    check = SimpleNamespace(judge=lambda run: Accepted())
    for run, status in ((steady, tuner.MEASURED), (racy, tuner.REFUSED)):
        monkeypatch.setattr(tuner.compiler, "load", lambda source, digest, run=run: SimpleNamespace(run=run))
        tried = tuner._try(candidate, SimpleNamespace(source="", digest=""), [], check, [[], []], 1)
        assert tried.status == status and ("race" in tried.reason) == (status == tuner.REFUSED)
