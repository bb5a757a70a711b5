"""Sums of exponentials over several operands in one kernel, each kept in range.

The operands are keys of a cache, new keys and attention sinks.
"""

from __future__ import annotations

import math

import pytest
import torch

import mirage_hf as mi
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_journal import RankedUGraph
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.verdict import Accepted
from tests.helpers import reference_executor, triton_interpreter, ugraphs

SEARCH = SearchOptions(time_limit=20, threads=1)


def decoding(
    heads=2,
    group=3,
    keys=24,
    new=1,
    d=16,
    norm=False,
    rope=False,
    softcap=None,
    sink=False,
    dtype="float16",
) -> KernelGraph:
    """Build attention of a decoding step over a cache within bounds and over new keys.

    The new keys are not in the cache yet. They are normed, rotated, and returned as an output that
    goes into the cache. With a sink, a query may attend to nothing. `group` queries share a key.
    """
    g = mi.new_kernel_graph()
    q = g.new_input((heads, group, d), dtype, name="q")
    k, v = (g.new_input((heads, keys, d), dtype, name=name) for name in ("keys", "values"))
    kn, vn = (g.new_input((heads, new, d), dtype, name=name) for name in ("new_keys", "new_values"))
    lo, hi = (g.new_input((heads, 1, 1), "int32", name=name) for name in ("lo", "hi"))
    if norm:
        q, kn = (
            g.rms_norm(x, g.new_input((1, d), dtype, name=name, constant=True))
            for x, name in ((q, "qw"), (kn, "kw"))
        )
    if rope:
        cos, sin = (g.new_input((1, d), dtype, name=name) for name in ("cos", "sin"))
        q, kn = (g.rope(x, cos, sin) for x in (q, kn))

    def weights(x):
        scores = g.mul(g.matmul(q, g.permute(x, (0, 2, 1))), d**-0.5)
        return g.exp(
            scores if softcap is None else g.mul(g.tanh(g.mul(scores, 1 / softcap)), softcap)
        )

    old, fresh = g.within(weights(k), lo, hi, dim=2), weights(kn)
    total = g.add(g.reduction(old, 2), g.reduction(fresh, 2))
    if sink:
        total = g.add(total, g.exp(g.new_input((heads, 1, 1), dtype, name="sink")))
    g.mark_output(
        g.div(g.add(g.matmul(old, v), g.matmul(fresh, vn)), total), *([kn] if norm or rope else [])
    )
    return g


def softmax_with_sink(rows=5, n=32, dtype="float16") -> KernelGraph:
    """Build e^x / (e^s + Σ e^x), whose weights add up to less than 1."""
    g = mi.new_kernel_graph()
    x, sink = g.new_input((rows, n), dtype, name="x"), g.new_input((1, 1), dtype, name="sink")
    e = g.exp(x)
    g.mark_output(g.div(e, g.add(g.reduction(e, 1), g.exp(sink))))
    return g


def one_more(rows=5, n=32, dtype="float16") -> KernelGraph:
    """Build e^x / (1 + Σ e^x). The 1 is no exponential and has the shift 0."""
    g = mi.new_kernel_graph()
    e = g.exp(g.new_input((rows, n), dtype, name="x"))
    g.mark_output(g.div(e, g.add(g.reduction(e, 1), 1.0)))
    return g


PROGRAMS = {
    "one new key": decoding(),
    "new keys": decoding(new=4),
    "sink": decoding(sink=True),
    "softcap": decoding(softcap=30.0),
    "rotated": decoding(rope=True, heads=3, group=1),
    "normed": decoding(norm=True),
    "softmax with sink": softmax_with_sink(),
    "one more": one_more(),
}


def inputs_of(g: KernelGraph, scale: float = 1.0) -> list[torch.Tensor]:
    """Return random inputs, with bounds that leave one row without old keys."""
    inputs = ugraphs.random_inputs(g)
    for t, x in zip(g.inputs, inputs, strict=True):
        if t.name == "hi":
            x.copy_(torch.arange(x.numel()).view(x.shape) * 17)
        elif t.name == "lo":
            x.zero_()
        elif t.name in ("q", "qw", "x", "sink"):
            x.mul_(scale)
    return inputs


def exact(g: KernelGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the result in float64, in which no exponential of these inputs overflows."""
    found = run_kernel_graph(
        g, [x.double() if x.is_floating_point() else x for x in inputs], torch.float64
    )
    assert all(y.isfinite().all() for y in found)
    return found


def error_of(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Return the largest error, divided by the size of the output if that exceeds 1.

    It is infinite if a result is not finite.
    """
    errors = [
        float((x - y).abs().max()) / max(1.0, float(y.abs().max()))
        for x, y in zip(got, want, strict=True)
    ]
    return max(errors) if all(x.isfinite().all() for x in got) else math.inf


def found_of(g: KernelGraph) -> list[RankedUGraph]:
    found, report = search(g, SEARCH)
    assert found, report
    return found


def in_range(f: RankedUGraph) -> bool:
    return any(op.fn == "max" for o in f.ugraph.block_ops for op in o.block.ops())


@pytest.mark.parametrize("name", PROGRAMS)
def test_few_kernels_proven_and_right(name):
    g = PROGRAMS[name]
    found = found_of(g)
    best = min(found, key=lambda f: f.ugraph.num_kernels)
    assert in_range(best) and best.ugraph.num_kernels == 1
    for f in found[:4]:
        verdict = prove(f.ugraph)
        assert isinstance(verdict, Accepted) and verdict.bound < 1e-9, verdict
        inputs = [x.double() if x.is_floating_point() else x for x in inputs_of(g)]
        for got in (
            run_kernel_graph(f.ugraph.kernels, inputs, torch.float64),
            reference_executor.run(f.ugraph.kernels, inputs),
        ):
            assert error_of(got, exact(g, inputs)) < 1e-9


@pytest.mark.parametrize("name", PROGRAMS)
def test_large_scores_stay_finite_where_the_program_as_written_overflows(name):
    g = PROGRAMS[name]
    inputs = inputs_of(g, scale=40.0)
    assert not run_kernel_graph(g, inputs)[0].isfinite().all()
    kept = [f for f in found_of(g)[:3] if in_range(f)]
    assert kept and all(
        error_of(run_kernel_graph(f.ugraph.kernels, inputs), exact(g, inputs)) < 5e-3 for f in kept
    )


def _masked_and_more(g, x, z, a, b):
    return g.add(g.within(x, *a, dim=1), z)


def _masked_exponential(g, x, z, a, b):
    return g.add(g.within(g.exp(x), *a, dim=1), g.exp(z))


def _two_masks(g, x, z, a, b):
    return g.sub(g.within(x, *a, dim=1), g.within(x, *b, dim=1))


@pytest.mark.parametrize(
    "build",
    [_masked_and_more, _masked_exponential, _two_masks],
    ids=lambda f: f.__name__.strip("_"),
)
def test_sums_of_masked_values(build):
    """Nothing here has a shift that a division would cancel."""
    g = mi.new_kernel_graph()
    x, z = (g.new_input((5, 24), "float32", name=name) for name in ("x", "z"))
    a, b = (
        [g.new_input((5, 1), "int32", name=name) for name in names]
        for names in (("lo", "hi"), ("lo2", "hi2"))
    )
    g.mark_output(build(g, x, z, a, b))
    inputs = [t.double() if t.is_floating_point() else t for t in ugraphs.random_inputs(g)]
    for t, n in zip(inputs[2:], (2, 20, 7, 11), strict=False):
        t.fill_(n)
    for f in found_of(g):
        assert f.ugraph.num_kernels == 1 and isinstance(prove(f.ugraph), Accepted)
        assert (
            error_of(run_kernel_graph(f.ugraph.kernels, inputs, torch.float64), exact(g, inputs))
            < 1e-9
        )


@pytest.mark.parametrize("sm", [80, 90])
def test_compiles_ahead_of_time(sm, tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    for g in (
        decoding(8, 4, 4096, d=128, norm=True, rope=True, dtype="bfloat16"),
        decoding(2, 7, 300, new=2, d=80, sink=True, softcap=30.0),
    ):
        for kernel in compiler.ahead_of_time(triton.generate(found_of(g)[0].ugraph), sm):
            assert kernel.asm["cubin"]


INTERPRETED = """
import json
from tests.codegen import test_shifts
from mirage_hf.codegen import compile as compiler, triton

found = {}
for name, g in test_shifts.PROGRAMS.items():
    for scale in (1.0, 40.0):
        inputs = test_shifts.inputs_of(g, scale)
        want = test_shifts.exact(g, inputs)
        for f in [f for f in test_shifts.found_of(g) if test_shifts.in_range(f)][:2]:
            program = triton.generate(f.ugraph)
            error = test_shifts.error_of(
                compiler.load(program.source, program.digest).run(inputs), want
            )
            found[name] = max(found.get(name, 0.0), error)
print(json.dumps(found))
"""


def test_triton_text_equals_torch():
    found = triton_interpreter.run(INTERPRETED)
    assert found.keys() == PROGRAMS.keys() and all(error < 5e-3 for error in found.values()), found
