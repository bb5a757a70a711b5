"""Kernels that read what an index chooses: their text, and their numbers in the interpreter."""

import re
from dataclasses import replace

import pytest
import torch

import mirage_hf as mi
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.search.engine import search
from mirage_hf.tune import space
from mirage_hf.tune.footprint import footprint
from mirage_hf.tune.measure import random_inputs
from tests.helpers import indexed_programs as programs
from tests.helpers.indexed_programs import GPT_OSS, QWEN, SEARCH, Mixture
from tests.helpers.thorough import count
from tests.helpers.triton_interpreter import run

pytest.importorskip("triton")

#: Random programs that the interpreter runs, about 0.25 s each.
COUNT = count(1000, 20)


def best_of(g):
    return search(g, SEARCH)[0][0].ugraph


def text_of(g, **tiles: int) -> str:
    """Return the kernel of the best µGraph, with these tiles by size of axis."""
    ugraph = best_of(g)
    block = ugraph.block_ops[0].block
    schedule = Schedule({a.name: tiles[f"n{a.size}"] for a in block.axes}, num_warps=1)
    return (
        triton.program_source(ugraph, [schedule]).partition("def mirage_0")[2].partition("_comp")[0]
    )


# -- numbers ---------------------------------------------------------------------------------------


def test_random_kernels_are_as_close_to_float64_as_torch():
    found = run(f"from tests.helpers import indexed_programs as p; p.main({COUNT}, 0)")
    assert found["ran"] >= COUNT and not found["wrong"], found["wrong"][:3]


def test_nothing_is_read_for_an_index_out_of_range():
    found = run(
        "import json; from tests.helpers import indexed_programs as p;"
        "print(json.dumps(p.out_of_range()))"
    )
    assert len(found) == 4 and max(found) < 1e-4, found


def test_a_loop_may_walk_the_chosen_elements():
    found = run(
        "import json; from tests.helpers import indexed_programs as p;"
        "print(json.dumps(p.loops_over_choices()))"
    )
    assert len(found) >= 3
    assert all(error <= 2 * eager + 1e-6 for error, eager in found), found


# -- text ------------------------------------------------------------------------------------------


def test_the_index_of_a_block_is_one_number_that_gate_and_up_share():
    text = text_of(programs.gate_up(replace(QWEN, tokens=4)), n4=1, n8=1, n768=4, n2048=512)
    loads = re.findall(r"(\w+) = tl.load\(\w+_index_ptr \+ (.*)\)\n", text)
    assert len(loads) == 1
    name, at = loads[0]
    assert "arange" not in at and "[" not in at
    assert text.index(f"{name} = ") < text.index("\n    for ")
    assert text.count(f"+ {name} * {2 * 768 * 2048} +") == 2
    assert text.count(f"{name}_in, other=0.0") == 2
    assert f"{name}_in = ({name} >= 0) & ({name} < 128)" in text


def skipped_loops(g, **tiles: int) -> list[list[str]]:
    """Return for each loop of the best µGraph which inputs it needs an index for."""
    (op,) = place_kernels(best_of(g))
    schedule = Schedule({a.name: tiles[f"n{a.size}"] for a in op.block.axes}, num_warps=1)
    plan = plan_kernel(op, schedule)
    loops = [stage for stage in op.block.stages if stage.loop]
    return [[i.name for i in plan.loop_bounds.skipped_without(stage)] for stage in loops]


def test_a_loop_may_be_skipped_if_an_index_chooses_nothing():
    """Its sums are all of products with chosen weights, and a block has one index."""
    four = replace(QWEN, tokens=4)
    sizes = dict(n4=1, n8=1, n768=4, n2048=512)
    ((found,),) = skipped_loops(programs.gate_up(four), **sizes)
    assert found.startswith(("gate", "up", "w"))
    assert skipped_loops(programs.gate_up(four), **sizes | {"n8": 2}) == [[]]
    assert skipped_loops(programs.gate_up(four), **sizes | {"n2048": 2048}) == [[]]  # held whole
    with_norm = skipped_loops(programs.gate_up(replace(four, norm=True)), **sizes)
    assert with_norm == [[]] * len(with_norm)  # sums of squares count without an expert


def test_the_index_is_read_after_the_wait():
    """The kernel before may have written it. Weights at its offset cannot be prefetched."""
    text = text_of(programs.gate_up(QWEN), n8=1, n768=4, n2048=512)
    assert text.index("gdc_wait()") < text.index("tl.load(")
    assert "prefetch(" not in text


def whole_text(**options) -> tuple[str, str]:
    """Return both kernels of the experts of a layer, the second with these options."""
    ugraph = best_of(programs.whole(replace(QWEN, tokens=2)))
    first, second = (op.block.axes for op in ugraph.block_ops)
    schedules = [
        Schedule({a.name: {2: 1, 8: 1, 768: 4, 2048: 512}[a.size] for a in first}),
        Schedule({a.name: {2: 1, 8: 8, 768: 256, 2048: 2}[a.size] for a in second}, **options),
    ]
    program = triton.generate(ugraph, schedules)
    for compiled in compiler.ahead_of_time(program, 90):
        assert "griddepcontrol.wait" in compiled.ptx
    _, one, two = program.source.split("@triton.jit\ndef mirage_")
    return one, two.partition("\n_compiled")[0]


def test_a_second_kernel_reads_the_index_before_its_wait_and_prefetches_weights():
    """The first kernel has waited for what wrote the index before it lets the second one begin."""
    first, second = whole_text(prefetch_steps=2)
    wait = second.index("gdc_wait()")
    assert second.index('down_index_ptr + b * 8 + s, cache_modifier=".cg")') < wait
    assert second.index("prefetch(down_ptr + tl.minimum(tl.maximum(down_index, 0), 127)") < wait
    assert first.index("gdc_wait()") < first.index("gdc_launch_dependents()")
    assert first.index("gdc_wait()") < first.index("_index = tl.load(")


def test_the_first_of_two_kernels_does_not_trigger_the_second_early():
    ugraph = best_of(programs.whole(QWEN))
    first, second = place_kernels(ugraph)
    assert not first.next_may_launch_early and not first.readable_before_wait
    assert [second.inputs[n].name for n in second.readable_before_wait] == ["e"]


def test_experts_held_whole_have_a_vector_of_indices():
    text = text_of(programs.down(QWEN), n2048=2, n8=8, n768=256)
    assert re.search(r"down_index = tl.load\(down_index_ptr \+ r\)", text), text
    assert "down_index[" in text and "down_index_in[" in text


def test_offsets_beyond_32_bits_are_in_64():
    m = replace(QWEN, experts=2048)  # 2048 · 1536 · 2048 elements
    for index, cast in (("int32", ".to(tl.int64)"), ("int64", "")):
        text = text_of(programs.gate_up(replace(m, index=index)), n8=1, n768=4, n2048=512)
        assert f"gate_index{cast} * {2 * 768 * 2048} + " in text
        assert "k.to(tl.int64)" not in text


def test_sources_with_other_strides_along_the_chosen_dim():
    g = mi.new_graph()
    x, e = g.new_input((1, 1, 1, 32), "float32"), g.new_input((1, 3), "int32")
    parts = [g.take(g.new_input((5, n, 32), "float32", constant=True), e) for n in (16, 48)]
    g.mark_output(g.matmul(x, g.permute(g.concat(parts, 2), (0, 1, 3, 2))))
    text = text_of(g, n3=1, n64=16, n32=32)
    assert f"_by_index = {16 * 32}" in text and f"_by_index = {48 * 32}" in text


@pytest.mark.parametrize("m", [QWEN, GPT_OSS], ids=["Qwen3-30B-A3B", "gpt-oss-20b"])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("make", [programs.gate_up, programs.down])
def test_kernels_of_models_compile_for_a_gpu(make, m, tokens):
    ugraph = best_of(make(replace(m, tokens=tokens)))
    (op,) = place_kernels(ugraph)
    found = space.schedules(op, limit=24)
    chosen = [next(s for s in found if s.mma is mma) for mma in {s.mma for s in found}]
    for schedule in chosen[: 2 if tokens == 1 else 1]:
        (compiled,) = compiler.ahead_of_time(triton.generate(ugraph, [schedule]), 90)
        assert "griddepcontrol.wait" in compiled.ptx


# -- costs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (2, 16), (64, 128)])
def test_the_bytes_of_a_kernel_are_those_of_the_chosen_experts(tokens, experts):
    ugraph = best_of(programs.gate_up(replace(QWEN, tokens=tokens)))
    (op,) = place_kernels(ugraph)
    plan = plan_kernel(op, space.schedules(op, limit=1)[0])
    weights = experts * 2 * 768 * 2048 * 2
    others = tokens * (2048 * 2 + 8 * 4 + 8 * 768 * 2)
    assert footprint(plan).moved == weights + others


def test_gate_and_up_in_every_second_column_are_read_together():
    """Their reads are as quick as those of columns side by side, except alone."""
    shares = {}
    for make in (programs.gate_up, programs.gate_alone):
        (op,) = place_kernels(best_of(make(replace(GPT_OSS, biases=False))))
        tiles = {a.name: {2880: 64, 4: 1}[a.size] for a in op.block.axes}
        shares[make] = footprint(plan_kernel(op, Schedule(tiles))).contiguity
    assert shares[programs.gate_up] > 0.9 > 0.1 > shares[programs.gate_alone]


def test_inputs_for_measurements_choose_different_experts():
    inputs = random_inputs(programs.gate_up(replace(QWEN, tokens=4, width=8, inner=4)), "cpu")
    assert len(inputs[1].unique()) == 32
    inputs = random_inputs(programs.gate_up(Mixture(3, 2, 4, 8, 4)), "cpu")
    assert inputs[1].unique().tolist() == [0, 1, 2, 3]
    inputs = random_inputs(programs.gate_up(Mixture(6, 1, 3, 8, 4)), "cpu")
    first, second = inputs[1].view(3, 2).unbind(1)  # blocks of one expert lie side by side
    assert torch.equal(first, second) and len(first.unique()) == 3


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "m",
    [QWEN, replace(QWEN, index="int64", norm=True), GPT_OSS],
    ids=["Qwen3-30B-A3B", "with a norm", "gpt-oss-20b"],
)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("make", [programs.gate_up, programs.down, programs.whole])
def test_kernels_on_a_gpu_are_as_close_to_float64_as_torch(make, m, tokens):
    g = make(replace(m, tokens=tokens))
    best = mi.superoptimize(g)[0]
    index = next(n for n, t in enumerate(g.inputs) if t.name == "e")
    for kind in ("different", "random", "one"):
        inputs = random_inputs(g, "cuda")
        if kind != "different":
            inputs[index].random_(0, m.experts if kind == "random" else 1)
        exact = run_kernel_graph(g, inputs, torch.float64)[0]
        eager = run_kernel_graph(g, inputs)[0]
        (y,) = best(inputs)
        allowed = 1.25 * (eager - exact).abs().max() + 1e-3 * exact.abs().max()
        assert (y - exact).abs().max() <= allowed, kind


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [0, 4])
def test_kernels_that_read_an_index_early_see_its_last_change(steps):
    """In a CUDA graph launches overlap. The second kernel reads the index before its wait."""
    g = programs.whole(replace(QWEN, tokens=2))
    ugraph = best_of(g)
    chosen = [
        replace(space.schedules(op, limit=1)[0], prefetch_steps=steps * n)
        for n, op in enumerate(place_kernels(ugraph))
    ]
    program = triton.generate(ugraph, chosen)
    kernels = compiler.load(program.source, program.digest).run
    inputs = random_inputs(g, "cuda")
    choices = [torch.randint_like(inputs[1], 128) for _ in range(50)]
    want = [kernels([inputs[0], e, *inputs[2:]])[0] for e in choices]
    kernels(inputs)
    torch.cuda.synchronize()
    graph, got = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for e in choices:
            inputs[1].copy_(e)
            got.append(kernels(inputs)[0])
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, got, want))


@pytest.mark.gpu
def test_a_gpu_reads_nothing_for_an_index_out_of_range():
    g = programs.gate_up(replace(QWEN, tokens=2))
    inputs = random_inputs(g, "cuda")
    best = mi.superoptimize(g)[0]
    (want,) = best(inputs)
    inputs[1][0, 1], inputs[1][1, 0] = -1, 1 << 30
    (y,) = best(inputs)
    torch.cuda.synchronize()
    want[0, 1] = want[1, 0] = 0.0
    assert torch.equal(y, want)
