"""Kernels that decode packed weights: their numbers, through Triton's interpreter and on a GPU."""

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import cuda, triton, triton_run
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.block import Role
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.ugraph import library_ugraph
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune import space
from mirage_hf.tune.measure import random_inputs
from mirage_hf.tune.refit import clip
from mirage_hf.verify import accept
from tests.helpers import coded_programs
from tests.helpers.coded_programs import CASES
from tests.helpers.memory import Allocations
from tests.helpers.triton_interpreter import run

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def interpreted() -> dict:
    """Return what Triton's interpreter computed."""
    return run("from tests.helpers import coded_programs; coded_programs.main()")


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_as_close_to_float64_as_torch(interpreted, name):
    assert len(interpreted[name]) >= 2
    for mma, error, eager in interpreted[name]:
        assert error <= 1.25 * eager + 1e-3, (mma, error, eager)


def test_several_rows_run_on_tensor_cores(interpreted):
    assert any(mma for mma, _, _ in interpreted["int4, 16 rows"])
    assert any(mma for mma, _, _ in interpreted["fp8 blocks, 16 rows"])


def test_kernels_convert_bytes_to_powers_of_two(interpreted):
    expected = torch.arange(256).to(torch.uint8).view(torch.float8_e8m0fnu).float()
    expected[255] = -1.0  # NaN
    assert torch.equal(torch.tensor(interpreted["powers of two"]), expected)


def test_generated_files_check_kernels_that_read_powers_of_two():
    ugraph = search(coded_programs.powers_of_two(), SearchOptions(threads=1))[0][0].ugraph
    source = triton.program_source(ugraph)
    assert "e8m0_as_float32(tl.load(" in source
    assert "powers.view(torch.float8_e8m0fnu).to(torch.float32)" in source


@pytest.mark.parametrize("rows", [1, 16])
def test_loops_may_walk_the_codes_of_words(interpreted, rows):
    """Such a loop holds no words ahead."""
    for stages, blocks, error, eager in interpreted[f"along words, {rows} rows"]:
        assert error <= 1.25 * eager + 1e-3, (stages, blocks, error, eager)


@pytest.mark.parametrize("name", coded_programs.TRIPS)
def test_trips_may_take_several_steps(interpreted, name):
    """Each step of a trip has its own words, inputs and scales. One trip may be all of a block."""
    results = interpreted[f"trips: {name}"]
    for steps, blocks, error, eager in results:
        assert error <= 1.25 * eager + 1e-3, (steps, blocks, error, eager)
    kinds = {(steps, blocks) for steps, blocks, _, _ in results}
    if name == "seven groups":  # one block takes seven steps; of two, the second has an empty one
        assert kinds == {(1, 1), (7, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4)}
    elif name == "nine groups":
        assert kinds >= {(3, 1)}  # halves of one and of two steps
    else:
        assert kinds >= {(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 4)}


@pytest.mark.parametrize("name", coded_programs.BYTES)
def test_words_of_bytes_may_be_held_for_later_steps(interpreted, name):
    results = interpreted[f"bytes: {name}"]
    for stages, steps, blocks, error, eager in results:
        assert error <= 1.25 * eager + 1e-3, (stages, steps, blocks, error, eager)
    kinds = {(stages, steps, blocks) for stages, steps, blocks, _, _ in results}
    assert kinds >= {(1, 1, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (2, 4, 1), (3, 1, 2)}


def test_multiply_adds_load_the_words_of_the_next_step_before_they_compute():
    ugraph, schedule = coded_programs.walking_bytes(coded_programs.int8_linear(1, 32, 4096))
    source = triton.program_source(ugraph, [schedule])
    lines = source[source.index("num_stages=1") :].splitlines()
    taken = next(n for n, line in enumerate(lines) if "codes_words = codes_words_next0" in line)
    loaded = next(n for n, line in enumerate(lines) if "codes_words_next0 = tl.load(" in line)
    decoded = next(
        n for n, line in enumerate(lines) if "int8_words_as_float32(codes_words)" in line
    )
    assert taken < loaded < decoded
    assert "mask=k_follows, eviction" in lines[loaded]  # no step reads what does not follow
    assert any("+= tl.sum(tl.reshape(" in line and ", 16]), axis=2)" in line for line in lines)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn"])
def test_kernels_convert_every_byte_of_a_word(interpreted, dtype):
    expected = torch.arange(256).to(torch.uint8).view(getattr(torch, dtype)).float()
    expected = torch.where(expected.isnan(), -1.0, expected)
    assert torch.equal(torch.tensor(interpreted[f"every {dtype}"]), expected)


def group_loop(rows: int):
    """Return a µGraph that loops over groups of 128 codes."""
    found, _ = search(coded_programs.int4_linear(rows, 64, 512, 128), SearchOptions(threads=1))
    return next(
        r.ugraph
        for r in found
        if r.ugraph.num_kernels == 1
        and {a.size: a.role.value for a in r.ugraph.block_ops[0].block.axes}[4] == "loop"
    )


def axes_by_size(ugraph) -> dict:
    return {a.size: a.name for a in ugraph.block_ops[0].block.axes}


def test_words_are_loaded_once_and_decoded_in_registers():
    ugraph = group_loop(1)
    axis = axes_by_size(ugraph)
    schedule = Schedule({axis[64]: 4, axis[4]: 1, axis[128]: 128}, num_warps=1)
    (text,) = [
        line
        for line in triton.program_source(ugraph, [schedule]).splitlines()
        if "codes_ptr +" in line
    ]
    assert "tl.arange(0, 16)" in text and "uint4_as_float32(tl.load(" in text


def scaled_sums(rows: int = 1):
    """Return a µGraph that multiplies the sum over a group of 128 codes by the group's scale."""
    found, _ = search(coded_programs.int4_linear(rows, 64, 512, 128), SearchOptions(threads=1))
    for ranked in found:
        block = ranked.ugraph.block_ops[0].block
        if ranked.ugraph.num_kernels > 1 or all(s.loop is None for s in block.stages):
            continue
        sums = {op.out for op in block.ops() if op.over is not None}
        if any(op.fn == "mul" and "scales" in op.args and sums & {*op.args} for op in block.ops()):
            return ranked.ugraph
    raise AssertionError("no µGraph scales sums")


def test_threads_add_runs_of_codes_before_they_exchange_sums():
    ugraph = scaled_sums()
    axis = axes_by_size(ugraph)
    schedule = Schedule({axis[64]: 16, axis[4]: 4, axis[128]: 128}, num_warps=1)
    lines = triton.program_source(ugraph, [schedule]).splitlines()
    runs = next(n for n, line in enumerate(lines) if "tl.sum(tl.reshape(" in line)
    assert ", 4, 32]), axis=3)" in lines[runs], lines[runs]  # four runs of 32 codes stay apart
    scaled = next(
        n for n, line in enumerate(lines) if "scales[" in line and " = tl.load" not in line
    )
    whole = next(n for n, line in enumerate(lines) if n > runs and "tl.sum(" in line)
    assert runs < scaled < whole, "\n".join(lines[runs : whole + 1])


def tensor_core_text(rows: int, **options) -> str:
    """Return the text of a kernel that multiplies groups of 128 codes on tensor cores."""
    ugraph = scaled_sums(rows)
    axis = axes_by_size(ugraph)
    tiles = {axis[64]: 16, axis[4]: 1, axis[128]: 128} | ({axis[16]: 16} if rows > 1 else {})
    schedule = Schedule(tiles, mma=True, num_warps=1, **options)
    return triton.program_source(ugraph, [schedule]).partition("def mirage_0")[2]


@pytest.mark.parametrize("rows", [1, 16])
def test_tensor_cores_take_codes_in_code_order(rows):
    """Codes become halves as they are decoded. What they are multiplied with is reordered."""
    text = tensor_core_text(rows, num_stages=3)
    factors = [line for line in text.splitlines() if "uint4_pairs(tl.reshape(" in line]
    assert len(factors) == 1 and "1032.0, tl.float16)" in factors[0]  # 1024 + 8
    assert "uint4_as_float32" not in text
    assert "[16, 8" in next(line for line in text.splitlines() if "tl.load(x_ptr" in line)


def test_one_row_is_a_column_of_a_product_on_tensor_cores():
    text = tensor_core_text(1, num_stages=3)
    assert "[:, None])" in next(line for line in text.splitlines() if "tl.dot(" in line)


def test_words_are_loaded_one_step_ahead_into_registers():
    """The first step's words are constants, so they are loaded before the wait."""
    text = tensor_core_text(1)
    assert text.index("codes_words_next = tl.load(") < text.index("gdc_wait()")
    head, _, loop = text.partition("for ")
    first, second = (
        loop.index("codes_words = codes_words_next"),
        loop.index("codes_words_next = tl"),
    )
    assert "codes_words_next" in head and first < second
    assert "mask=" in loop[second : loop.index("\n", second)]  # the last step loads nothing


def test_each_half_of_a_trip_is_loaded_again_once_it_is_used():
    """The first trip's words are loaded before the wait, and the second half after the first."""
    text = tensor_core_text(1, steps_per_trip=2)
    early = text.partition("gdc_wait()")[0]
    assert "codes_words_next0 = tl.load(" in early and "codes_words_next1 = tl.load(" in early
    loop = text.partition("for k_trip in range(0, 4, 2):")[2]
    at = [loop.index(f"codes_words{x}") for x in (" = codes_words_next0", "_next0 = tl.load(")]
    at += [loop.index(f"codes_words{x}") for x in (" = codes_words_next1", "_next1 = tl.load(")]
    assert at == sorted(at)


def test_a_block_of_one_trip_loads_nothing_in_its_loop():
    text = tensor_core_text(1, steps_per_trip=2, cooperating_blocks=2)
    loop = text.partition("for k_trip in range(0, 2, 2):")[2].partition("tl.store(")[0]
    assert loop.count("tl.dot(") == 2 and "tl.load(" not in loop


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(steps_per_trip=2, num_stages=3), "holds no words of codes ahead; give 1"),
        (dict(steps_per_trip=8), "trips of 8 steps do not divide the 4 steps of a block"),
        (dict(steps_per_trip=3), "trips of 3 steps do not divide the 4 steps of a block"),
        (dict(steps_per_trip=0), "steps_per_trip is 0; it must be at least 1"),
    ],
)
def test_impossible_trips_say_why(options, says):
    with pytest.raises(errors.CodegenError, match=says):
        tensor_core_text(1, **options)


def test_a_form_for_tensor_cores_is_kept_beside_those_for_multiply_adds(monkeypatch):
    """The search finds six others before it. None of them has a kernel with tensor cores."""
    g = mi.new_graph()
    x, residual = (g.new_input((1, 4096), "bfloat16") for _ in range(2))
    codes = g.new_input((4096, 32, 128), "uint4", constant=True)
    scales = g.new_input((4096, 32, 1), "bfloat16", constant=True)
    weight = g.reshape(g.mul(g.sub(g.cast(codes, "bfloat16"), 8.0), scales), (4096, 4096))
    g.mark_output(g.add(g.matmul(x, g.permute(weight, (1, 0))), residual))

    def has_one_for_tensor_cores():
        kept = search_and_verify(g, SearchOptions(threads=1)).ugraphs()
        kernels = [place_kernels(u)[0] for u in kept if u.num_kernels == 1]
        return any(s.mma for op in kernels for s in space.schedules(op))

    assert has_one_for_tensor_cores()
    monkeypatch.setattr(accept, "suits_tensor_cores", lambda ugraph: True)
    assert not has_one_for_tensor_cores(), "it would be kept anyway"


@pytest.mark.parametrize("steps, blocks, fits", [(8, 1, 4), (3, 1, 2), (4, 2, 2), (7, 4, 1)])
def test_a_trip_takes_fewer_steps_of_a_shorter_loop(steps, blocks, fits):
    block = scaled_sums().block_ops[0].block
    tiles = {a.name: a.size if a.role is Role.TILE else 1 for a in block.axes}
    schedule = Schedule(tiles, steps_per_trip=steps, cooperating_blocks=blocks)
    assert clip(schedule, block).steps_per_trip == fits


def test_zero_points_that_are_numbers_are_subtracted_by_the_decoding():
    ugraph = group_loop(1)
    axis = axes_by_size(ugraph)
    schedule = Schedule({axis[64]: 4, axis[4]: 1, axis[128]: 128}, num_warps=1)
    text = triton.program_source(ugraph, [schedule])
    assert (
        ", 8.0)" in text and "- 8.0" not in text.partition("def mirage_0")[2].partition("def ")[0]
    )


def test_a_tile_of_part_of_a_word_is_refused():
    found, _ = search(coded_programs.int4_linear(1, 64, 512, 128), SearchOptions(threads=1))
    ugraph = next(
        r.ugraph
        for r in found
        if {a.size: a.role.value for a in r.ugraph.block_ops[0].block.axes}.get(128) == "loop"
    )
    axis = axes_by_size(ugraph)
    schedule = Schedule({axis[64]: 4, axis[4]: 4, axis[128]: 4})
    (op,) = ugraph.block_ops
    with pytest.raises(errors.CodegenError, match="part of a word"):
        plan_kernel(op, schedule)


@pytest.mark.parametrize("blocks, fits", [(1, True), (2, False)])
def test_blocks_that_share_words_take_equal_parts(blocks, fits):
    """Neighbours of a schedule may have other numbers of blocks, and are planned before written."""
    found, _ = search(coded_programs.int8_linear(1, 32, 384), SearchOptions(threads=1))
    ugraph = next(r.ugraph for r in found if [*r.ugraph.block_ops[0].block.named(Role.LOOP)])
    (op,) = ugraph.block_ops
    (loop,) = op.block.named(Role.LOOP)
    tiles = {a.name: 1 for a in op.block.axes} | {loop.name: 128}
    schedule = Schedule(tiles, cooperating_blocks=blocks)
    if fits:
        assert "int8_words_as_float32(" in triton.program_source(ugraph, [schedule])
    else:
        with pytest.raises(errors.CodegenError, match="past the end of its codes"):
            plan_kernel(op, schedule)


def test_a_cuda_file_of_codes_is_refused():
    with pytest.raises(errors.CodegenError, match="holds codes"):
        cuda.program_source(group_loop(1))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("make", [coded_programs.int4_linear, coded_programs.fp8_linear])
def test_kernels_on_a_gpu_are_as_close_to_float64_as_torch(rows, make):
    sizes = (512, 1024, 128) if make is coded_programs.int4_linear else (512, 1024)
    g = make(rows, *sizes)
    inputs = random_inputs(g, "cuda")
    exact = run_kernel_graph(g, inputs, torch.float64)[0]
    eager = run_kernel_graph(g, inputs)[0]
    (y,) = mi.superoptimize(g)[0](inputs)
    allowed = 1.25 * (eager - exact).abs().max() + 1e-3 * exact.abs().max()
    assert (y - exact).abs().max() <= allowed


def decodings(large: int, monkeypatch) -> tuple[str, int, torch.Tensor]:
    """Return the library path of two weights, the most bytes that it held, and its result."""
    monkeypatch.setattr(triton_run, "_LARGE", large)
    g = mi.new_graph()
    x = g.new_input((1, 512), "float16")
    y = x
    for _ in range(2):
        codes = g.new_input((512, 512), "uint4", constant=True)
        scales = g.new_input((512, 1), "float16", constant=True)
        w = g.mul(g.sub(g.cast(codes, "float16"), 8.0), scales)
        y = g.matmul(y, g.permute(w, (1, 0)))
    g.mark_output(y)
    program = triton.generate(library_ugraph(g))
    inputs = random_inputs(g, "cpu")
    run = compiler.load(program.source, program.digest).run
    with Allocations() as counted:
        (result,) = run(inputs)
    return program.source, counted.peak, result


def test_a_library_path_deletes_decoded_weights(monkeypatch):
    """A weight takes 0.5 MiB in float16. Three forms of two weights were alive at the end."""
    kept, held, expected = decodings(1 << 40, monkeypatch)
    source, peak, result = decodings(1 << 16, monkeypatch)
    assert "    del " in source and "    del " not in kept.partition("def program")[0]
    assert torch.equal(result, expected)
    assert held >= 6 * 2**19 and peak <= 3 * 2**19
