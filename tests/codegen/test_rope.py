"""Rotary embeddings inside of kernels: searched, proven and generated.

Such a kernel reads an input with partners swapped and signed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import cuda, triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format, text
from mirage_hf.graph.block import (
    ROTATIONS,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Role,
    Rotation,
    Stage,
)
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_journal import RankedUGraph
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune import space
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.verdict import Accepted
from tests.helpers import reference_executor, triton_interpreter, ugraphs

SEARCH = SearchOptions(time_limit=20, threads=1)


def rotation(
    heads=3, rows=2, d=16, interleaved=False, norm=False, part=None, dtype="float16"
) -> KernelGraph:
    """Build a rotation of q and k, or of the first `part` elements of each head.

    Norms come first, as in Qwen3.
    """
    g = mi.new_kernel_graph()
    q, k = (
        g.new_input((heads, rows, d), dtype, name="q"),
        g.new_input((heads - 1, rows, d), dtype, name="k"),
    )
    cos, sin = (g.new_input((rows, part or d), dtype, name=name) for name in ("cos", "sin"))
    qw, kw = (
        g.new_input((1, d), dtype, name=name, constant=True) if norm else None
        for name in ("qw", "kw")
    )
    normed = [g.rms_norm(x, w) if norm else x for x, w in ((q, qw), (k, kw))]
    g.mark_output(*(g.rope(x, cos, sin, interleaved=interleaved) for x in normed))
    return g


def projected(rows=2, hidden=32, d=16, dtype="float16") -> KernelGraph:
    """Build a rotation after a projection. It reads the columns of the weight in swapped order."""
    g = mi.new_kernel_graph()
    x, w = (
        g.new_input((rows, hidden), dtype, name="x"),
        g.new_input((hidden, d), dtype, name="w", constant=True),
    )
    cos, sin = (g.new_input((rows, d), dtype, name=name) for name in ("cos", "sin"))
    g.mark_output(g.rope(g.matmul(x, w), cos, sin))
    return g


def attention(heads=2, keys=24, d=16, dtype="float16") -> KernelGraph:
    g = mi.new_kernel_graph()
    q = g.new_input((heads, 1, d), dtype, name="q")
    k, v = (g.new_input((heads, keys, d), dtype, name=name) for name in ("keys", "v"))
    cos, sin = (g.new_input((1, d), dtype, name=name) for name in ("cos", "sin"))
    lo, hi = (g.new_input((heads, 1, 1), "int32", name=name) for name in ("lo", "hi"))
    scores = g.mul(g.matmul(g.rope(q, cos, sin), g.permute(k, (0, 2, 1))), d**-0.5)
    g.mark_output(g.matmul(g.softmax(scores, lo=lo, hi=hi), v))
    return g


PROGRAMS = {
    "halves": rotation(),
    "pairs": rotation(interleaved=True),
    "normed": rotation(norm=True, d=40),
    "normed pairs": rotation(norm=True, interleaved=True, d=6),
    "part": rotation(d=12, part=8),
    "normed pairs of a part": rotation(norm=True, interleaved=True, d=20, part=6),
    "projected": projected(),
    "attention": attention(),
}


def inputs_of(g: KernelGraph) -> list[torch.Tensor]:
    inputs = ugraphs.random_inputs(g)
    for t, x in zip(g.inputs, inputs, strict=True):
        if t.name == "hi":
            x.fill_(17)
        elif t.name == "lo":
            x.copy_(torch.arange(x.numel()).view(x.shape))
    return inputs


def found_of(g: KernelGraph) -> list[RankedUGraph]:
    found, report = search(g, SEARCH)
    assert found, report
    return found


def rotations(u: UGraph) -> list[Rotation]:
    return [i.rotation for op in u.block_ops for i in op.block.inputs if i.rotation]


@pytest.mark.parametrize("name", PROGRAMS)
def test_found_proven_and_right(name):
    g = PROGRAMS[name]
    found = found_of(g)
    assert found[0].ugraph.num_kernels == 1 and rotations(found[0].ugraph)
    for f in found[:6]:
        verdict = prove(f.ugraph)
        assert isinstance(verdict, Accepted) and verdict.bound < 1e-9, verdict
        kernels = f.ugraph.kernels
        assert str(text.parse_graph(str(kernels))) == str(kernels)
        assert (
            json_format.graph_from_dict(json.loads(json.dumps(json_format.graph_to_dict(kernels))))
            == kernels
        )
        wide = [x.double() if x.is_floating_point() else x for x in inputs_of(g)]
        for got, again, want in zip(
            run_kernel_graph(kernels, wide, torch.float64),
            reference_executor.run(kernels, wide),
            run_kernel_graph(g, wide, torch.float64),
            strict=True,
        ):
            assert (
                float((got - want).abs().max()) < 1e-9 and float((again - want).abs().max()) < 1e-9
            )


@pytest.mark.parametrize(
    "name", ["halves", "normed pairs", "part", "normed pairs of a part", "attention"]
)
def test_another_rotation_is_refused(name):
    """Every rotated input is rotated in every other way, or not at all.

    If a part rotates, another part is tried, or the whole.
    """
    u = next(f.ugraph for f in found_of(PROGRAMS[name]) if f.ugraph.num_kernels == 1)
    (op,) = u.block_ops
    for n, i in enumerate(op.block.inputs):
        others = (
            [Rotation(i.rotation.axis, how) for how in ROTATIONS if how != i.rotation.how] + [None]
            if i.rotation
            else []
        )
        changed = [replace(i, rotation=rotation) for rotation in others]
        changed += (
            [replace(i, rotation=replace(i.rotation, width=None))]
            if i.rotation and i.rotation.width
            else []
        )
        changed += (
            [replace(i, padding=replace(i.padding, value=i.padding.value + 1.0))]
            if i.padding
            else []
        )
        for wrong in changed:
            inputs = tuple(wrong if k == n else x for k, x in enumerate(op.block.inputs))
            kernels = KernelGraph()
            made = kernels.customized(
                [kernels.input_like(t) for t in u.kernels.inputs],
                _operands(u, replace(op.block, inputs=inputs)),
            )
            kernels.mark_output(*made)
            assert isinstance(prove(UGraph(u.program, kernels)), Rejected), (i, wrong)


def _operands(u: UGraph, block: BlockGraph) -> BlockGraph:
    """Return the block graph with its operands numbered as the inputs of the kernel graph."""
    (op,) = u.block_ops
    at = {n: u.kernels.inputs.index(t) for n, t in enumerate(op.inputs)}
    return replace(
        block,
        inputs=tuple(replace(i, sources=tuple(at[s] for s in i.sources)) for i in block.inputs),
    )


@pytest.mark.parametrize(
    "build, says",
    [
        (
            lambda g, x, c: g.rope(x, g.exp(g.new_input((4, 4))), g.new_input((4, 4))),
            "one whose cosine is computed too",
        ),
        (
            lambda g, x, c: g.rope(x, g.exp(c), g.exp(c)),
            "rope whose sine is computed ends a kernel",
        ),
        (lambda g, x, c: g.rope(g.rope(x, c, c), c, c), "rope of a rotated dim"),
        (
            lambda g, x, c: g.rope(
                g.within(x, *(g.new_input((4, 1), "int32") for _ in range(2)), dim=1), c, c
            ),
            "bounds along the dim",
        ),
    ],
)
def test_a_rotation_that_ends_a_kernel_says_why(build, says):
    g = mi.new_kernel_graph()
    g.mark_output(build(g, g.new_input((4, 8)), g.new_input((4, 8))))
    found, report = search(g, SEARCH)
    assert not found and says in report.reason


def test_a_rotation_of_keys_and_queries_is_one_kernel_that_reads_each_twice():
    u = found_of(rotation(norm=True))[0].ugraph
    assert u.num_kernels == 1 and {t.how for t in rotations(u)} == {"swap halves", "sign halves"}


@pytest.mark.parametrize(
    "rotation, size, says",
    [
        (Rotation("k", "swap halves"), 5, "must be even"),
        (Rotation("m", "swap halves"), 4, "an axis of its source"),
        (Rotation("k", "swap halves", 6), 4, "6 of the 4 elements along axis k cannot be partners"),
    ],
)
def test_impossible_rotations_say_why(rotation, size, says):
    with pytest.raises(errors.GraphError, match=says):
        BlockGraph(
            (Axis("k", size, Role.GRID),),
            (BlockInput("x", (0,), ("k",), rotation=rotation),),
            (Stage(None, (BlockOp("y", "exp", ("x",), ("k",)),)),),
            (BlockOutput("y", ("k",), "float16"),),
        )
    with pytest.raises(errors.GraphError, match="is none of swap halves"):
        Rotation("k", "mirror")


def test_damaged_rotations_in_files_say_where():
    kernels = found_of(PROGRAMS["halves"])[0].ugraph.kernels
    with pytest.raises(
        errors.FormatError, match="line 9: rotation of axis n: 'swap thirds' is none of swap halves"
    ):
        text.parse_graph(str(kernels).replace("swap halves", "swap thirds"))
    data = json.loads(
        json.dumps(json_format.graph_to_dict(kernels)).replace('"swap halves"', '"swap thirds"')
    )
    with pytest.raises(errors.MirageError, match="none of swap halves"):
        json_format.graph_from_dict(data)


def test_a_rotated_input_is_not_written_over():
    """Another thread may still read an element's partner when the element is stored."""
    g = mi.new_kernel_graph()
    x = g.new_input((4, 16), "float32", name="x")
    g.mark_output(g.rope(x, *(g.new_input((4, 16), "float32") for _ in range(2))))
    u = found_of(g)[0].ugraph
    (op,) = place_kernels(u)
    p = plan_kernel(op, space.default_schedule(op))
    assert not p.tiling.can_overwrite(op.block.outputs[0], [t.name for t in op.inputs].index("x"))


def test_cuda_says_that_it_has_no_rotations():
    with pytest.raises(errors.CodegenError, match="is rotated along axis"):
        cuda.program_source(found_of(PROGRAMS["halves"])[0].ugraph)


@pytest.mark.parametrize("sm", [80, 90])
def test_compiles_ahead_of_time(sm, tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    for g in (
        rotation(heads=32, rows=1, d=128, norm=True, part=64, dtype="bfloat16"),
        attention(heads=8, keys=4096, d=128, dtype="bfloat16"),
        projected(16, 512, 128),
    ):
        for kernel in compiler.ahead_of_time(triton.generate(found_of(g)[0].ugraph), sm):
            assert kernel.asm["cubin"]


def test_rows_in_variables_of_their_own_claim_no_alignment(tmp_path, monkeypatch):
    """The partners of single rows are 0 and 2, and 1 and 3."""
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    g = mi.new_kernel_graph()
    x, cos, sin = (g.new_input((256, 4), name=name) for name in ("x", "cos", "sin"))
    g.mark_output(
        g.matmul(g.permute(g.rope(x, cos, sin), (1, 0)), g.new_input((256, 512), name="w"))
    )
    tried = 0
    for f in [f for f in found_of(g) if f.ugraph.num_kernels == 1][:3]:
        (op,) = place_kernels(f.ugraph)
        rotated = {i.rotation.axis for i in op.block.inputs if i.rotation}
        for schedule in [
            s for s in space.schedules(op) if plan_kernel(op, s).layout.unrolled in rotated
        ][:1]:
            program = triton.generate(f.ugraph, [schedule])
            assert "tl.where(" in program.source and "multiple_of" not in program.source
            assert compiler.ahead_of_time(program, 90)[0].asm["cubin"]
            tried += 1
    assert tried


INTERPRETED = """
import json
import torch
from tests.codegen import test_rope
from mirage_hf.codegen import compile as compiler, triton
from mirage_hf.graph.execute import run_kernel_graph

programs = test_rope.PROGRAMS | {
    "rows": test_rope.rotation(rows=9, d=80, norm=True),
    "tensor cores": test_rope.projected(16, 64, 32),
    "bf16": test_rope.rotation(d=64, dtype="bfloat16"),
    "many keys": test_rope.attention(keys=300, d=32),
}
found = {}
for name, g in programs.items():
    inputs = test_rope.inputs_of(g)
    want = run_kernel_graph(g, inputs, torch.float64)
    found[name] = 0.0
    for f in test_rope.found_of(g)[:3]:
        program = triton.generate(f.ugraph)
        module = compiler.load(program.source, program.digest)
        module.check("cpu")
        for x, y in zip(module.run(inputs), want, strict=True):
            found[name] = max(found[name], float((x - y).abs().max() / y.abs().max()))
print(json.dumps(found))
"""


def test_triton_text_equals_torch():
    for name, error in triton_interpreter.run(INTERPRETED).items():
        assert error < (1e-2 if name == "bf16" else 2e-3), (name, error)


def test_partners_are_read_from_memory_wherever_the_tile_lies(tmp_path):
    """A block that holds 8 of 64 elements holds no element's partner."""
    u = found_of(rotation(d=64))[0].ugraph
    (op,) = place_kernels(u)
    axis = next(i.rotation.axis for i in op.block.inputs if i.rotation)
    schedule = space.default_schedule(op)
    assert op.block.role(axis) is Role.GRID
    source = triton.generate(u, [replace(schedule, tiles=dict(schedule.tiles) | {axis: 8})]).source
    assert f"tl.where({axis} < 32, {axis} + 32, {axis} - 32), 8), 8)" in source
    script = tmp_path / "kernel.py"
    script.write_text(source)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0 and "error" in done.stdout, done.stderr[-2000:]
