"""Decoding attention: each feature in one searched and proven kernel.

Random configurations are compared with SDPA.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch

from mirage_hf import errors
from mirage_hf.errors import Rejected
from mirage_hf.graph import effects
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.split_appends import split_appends
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.verdict import Accepted
from tests.helpers import attention_configs as configs
from tests.helpers import reference_executor, triton_interpreter
from tests.helpers.thorough import count

SIZES = dict(kv_heads=2, group=3, head_dim=16, scale=0.25, norm="", eps=1e-6, dtype=torch.float16)
FEATURES = {
    "biases": dict(bias=True),
    "norms of heads": dict(norm="layer"),
    "a norm of all heads": dict(norm="rms of all heads"),
    "pairs of a part": dict(rope="pairs", rotary=8),
    "softcap and sinks": dict(softcap=30.0, sinks=True),
    "a mask": dict(mask=True),
    "packed by heads": dict(norm="layer", norm_bias=False, packing="heads"),
    "several queries": dict(queries=3),
    "a window": dict(queries=3, window=True),
    "most": dict(norm="rms", bias=True, rotary=8, softcap=30.0, sinks=True, mask=True),
}

RANDOM, KINDS = count(100, 10), (5, 7, 15, 16, 21, 51)
"""Random configurations, and what they are of."""


def kind_of(**features: object) -> configs.Kind:
    return configs.Kind(2, tuple(sorted({**SIZES, **features}.items())))


@functools.cache
def one_kernel(k: configs.Kind) -> UGraph:
    program = split_appends(k.program(12))
    assert program is not None
    found, report = search(program.graph, SearchOptions(time_limit=20, threads=1, max_width=1))
    u = next((u for u in (program.join(f.ugraph) for f in found) if u.num_kernels == 1), None)
    assert u is not None and len(effects.stored(u.kernels)) == 2, report
    return u


@pytest.mark.parametrize("name", FEATURES)
def test_one_kernel_attends_and_appends(name):
    k = kind_of(**FEATURES[name])
    u = one_kernel(k)
    verdict = prove(u)
    assert isinstance(verdict, Accepted) and verdict.bound < 1e-9, verdict
    inputs = configs.inputs_of(k, u.program, random.Random(0))
    _, exact = configs.both(k, u.program, inputs)
    for run in (
        lambda x: run_kernel_graph(u.kernels, x, torch.float64),
        lambda x: reference_executor.run(u.kernels, x),
    ):
        got = run([x.double() if x.is_floating_point() else x.clone() for x in inputs])
        assert all(float((y - x).abs().max()) < 1e-9 for y, x in zip(got, exact, strict=True))


def test_a_query_that_sees_no_key_gets_nothing():
    k = kind_of(queries=3)
    u = one_kernel(k)
    inputs = configs.inputs_of(k, u.program, random.Random(0))
    x = {t.name: y for t, y in zip(u.program.inputs, inputs, strict=True)}
    x["slot"].fill_(4)
    x["lo"][0], x["lo"][1] = 4, 2
    x["new_last"].view(-1)[1] = 0
    y = run_kernel_graph(u.kernels, inputs)[0]
    assert y[0, 1].eq(0.0).all() and y[1, 1].ne(0.0).any() and y[0, 2].ne(0.0).any()


def test_bounds_of_a_window_and_of_new_keys_are_part_of_the_proof():
    u = one_kernel(kind_of(queries=3, window=True))
    (op,) = u.block_ops
    bounds = [n for n, i in enumerate(op.block.inputs) if i.bounds]
    assert len(bounds) == 3
    for wrong in bounds:
        inputs = tuple(
            replace(i, sources=i.sources[::-1]) if n == wrong else i
            for n, i in enumerate(op.block.inputs)
        )
        assert isinstance(prove(u.with_blocks([replace(op.block, inputs=inputs)])), Rejected), (
            op.block.inputs[wrong]
        )


def test_capacity_reached_is_an_error_on_a_cpu():
    k = kind_of(queries=3)
    u = one_kernel(k)
    inputs = configs.inputs_of(k, u.program, random.Random(0))
    next(x for t, x in zip(u.program.inputs, inputs, strict=True) if t.name == "slot").fill_(10)
    with pytest.raises(errors.InputError, match="slots 10 to 12 are outside a cache of 12 slots"):
        run_kernel_graph(u.kernels, inputs)


def test_other_norms_ropes_and_packings_say_what_there_is():
    for what in (dict(norm="batch"), dict(rope="thirds"), dict(packing="rows")):
        with pytest.raises(errors.GraphError, match="rms of all heads"):
            kind_of(**what).program(12)


INTERPRETED = """
import json, random, torch
from tests.helpers import attention_configs as configs
from tests.patterns import test_attention
from mirage_hf.graph import effects, symbolic
from tests.helpers.tolerances import as_close_as
from mirage_hf.codegen import compile as compiler, triton

wrong = []
for seed in range(test_attention.RANDOM):
    draw = random.Random(seed)
    number = test_attention.KINDS[seed % len(test_attention.KINDS)]
    k, slots = configs.kind(number, configs.SMALL), draw.choice(configs.SMALL["slots"])
    u, schedules = configs.chosen(k, slots, draw, 32, 16, blocks=8)
    g, program = u.program, triton.generate(u, schedules)
    inputs = configs.inputs_of(k, g, draw)
    stock, exact = configs.both(k, g, inputs)
    after = configs.copied(inputs)
    got = compiler.load(program.source, program.digest).run(after)
    what = f"seed {seed} kind {number} ({k}) slots {slots} {[*map(str, schedules)]}"
    try:
        as_close_as(got, stock, exact, what)
        assert configs.untouched(k, g, inputs, after), (
            f"{what}: a slot that is not appended to has changed"
        )
    except AssertionError as e:
        wrong.append(str(e))

k, slots = (
    configs.kind(16, configs.SMALL),
    24,
)  # three queries; of rows past the end nothing is written, there or elsewhere
c = next(c for c in configs.searched(k, 32, 32) if len(effects.stored(c.ugraph.kernels)) == 2)
u = symbolic.for_program(c.ugraph, k.program(slots))
program = triton.generate(u)
for at in (slots - 1, slots, -2):
    inputs = configs.inputs_of(k, u.program, random.Random(0))
    for t, x in zip(u.program.inputs, inputs):
        if t.name in ("lo", "slot"):
            x.fill_(at if t.name == "slot" else 0)
    around = []  # caches in the middle of more memory
    for n, t in enumerate(u.program.inputs):
        if t.name in ("keys", "values"):
            memory = torch.full((3, inputs[n].numel()), 7.0, dtype=t.dtype)
            memory[1] = inputs[n].flatten()
            inputs[n] = memory[1].view(t.dims)
            around.append((memory, memory.clone()))
    compiler.load(program.source, program.digest).run(inputs)
    for memory, before in around:
        changed = (memory != before).view(3, -1, slots, k["head_dim"]).any(-1).any(1)
        inside = {at + i for i in range(k["queries"])} & set(range(slots))
        if (
            changed[0].any()
            or changed[2].any()
            or set(changed[1].nonzero().flatten().tolist()) != inside
        ):
            wrong.append(f"slot {at} of {slots}: {changed.nonzero().tolist()} were written")
print(json.dumps(wrong))
"""


def test_random_configurations_are_as_close_to_float64_as_sdpa():
    kinds = [configs.kind(n, configs.SMALL) for n in KINDS]
    for name, wanted in (
        ("norm", configs.NORMS),
        ("rope", configs.ROPES),
        ("bias", (False, True)),
        ("sinks", (False, True)),
        ("mask", (False, True)),
        ("window", (False, True)),
        ("queries", (1, 2, 3)),
        ("head_dim", (64, 80)),
    ):
        assert {k[name] for k in kinds} == set(wanted), f"{name}: {[k[name] for k in kinds]}"
    wrong = triton_interpreter.run(INTERPRETED)
    assert not wrong, "\n".join(wrong[:8])
