"""Kernels that may start before earlier launches are done.

Their PTX shows what they read before they wait.
"""

import re

import pytest
import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.codegen.triton_kernel import write_kernel
from mirage_hf.gpus import H200
from mirage_hf.patterns import GATED_MLP, LINEAR_RESIDUAL, RMS_NORM_LINEAR
from mirage_hf.patterns.lora import LORA_DOWN, BlockAdapters
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune.ranking import rank_by_estimate
from tests.helpers import kernel_cases

pytest.importorskip("triton")
CASES = {c.name: c for c in kernel_cases.cases()}
WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))


def touched(ptx: str) -> list[tuple[str, frozenset[int]]]:
    """Return the instructions that wait or touch global memory, in order.

    Each has its opcode, and the parameters that its address is computed from.
    """
    taint: dict[str, frozenset[int]] = {}
    found = []
    for line in ptx.splitlines():
        text = re.sub(r"^\s*(?:@!?%\w+\s+)?", "", line).strip().rstrip(";")
        opcode, _, rest = text.replace(";", " ").partition(" ")
        if opcode in (WAIT, TRIGGER):
            found.append((opcode, frozenset()))
            continue
        if parameter := re.match(r"ld\.param\S*\s+(%\w+), \[\w+_param_(\d+)\]", text):
            taint[parameter[1]] = frozenset({int(parameter[2])})
            continue
        names = re.findall(r"%[a-z]+\d+", rest)
        addresses = re.findall(r"\[\s*(%[a-z]+\d+)", rest)
        if re.match(
            r"(ld|st|atom|red|prefetch|cp\.async|cp\.reduce)\S*global|cp\.async\.bulk|tensormap",
            opcode,
        ):
            found.append(
                (opcode, frozenset().union(*(taint.get(a, frozenset()) for a in addresses)))
            )
            continue  # a loaded value is no address of a parameter
        if names and not opcode.startswith("."):
            taint[names[0]] = taint.get(names[0], frozenset()).union(
                *(taint.get(n, frozenset()) for n in names[1:])
            )
    return found


def too_early(ptx: str, constants: set[int]) -> list[str]:
    """Return the instructions that touch memory before the wait although they may not."""
    seen = touched(ptx)
    before = seen[: [op for op, _ in seen].index(WAIT)]
    return [
        f"{op} of {sorted(of)}"
        for op, of in before
        if op != TRIGGER
        and (not op.startswith(("ld", "prefetch", "cp.async")) or not of or of - constants)
    ]


def constants_of(case) -> list[set[int]]:
    kernels = [
        (op, write_kernel(plan_kernel(op, s), "k"))
        for op, s in zip(place_kernels(case.ugraph), case.schedules, strict=True)
    ]
    return [
        {
            n
            for n, (_, at) in enumerate(k.arguments)
            if at < len(op.inputs) and op.inputs[at].constant
        }
        for op, k in kernels
    ]


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_waits_once_before_it_reads_what_is_not_constant(name):
    case = CASES[name]
    program = triton.generate(case.ugraph, case.schedules)
    plans = [
        plan_kernel(op, s) for op, s in zip(place_kernels(case.ugraph), case.schedules, strict=True)
    ]
    for number, (kernel, constants) in enumerate(
        zip(compiler.ahead_of_time(program, 90), constants_of(case), strict=True)
    ):
        seen = [op for op, _ in touched(kernel.ptx)]
        assert seen.count(WAIT) == seen.count(TRIGGER) == 1
        if plans[
            number
        ].schedule.trigger_early:  # and the next kernel reads nothing but constants before it waits
            assert (
                seen.index(TRIGGER) < seen.index(WAIT)
                and not plans[number + 1].op.readable_before_wait
            )
        else:
            assert seen.index(TRIGGER) == seen.index(WAIT) + 1
        assert not too_early(kernel.ptx, constants)
        start = kernel.ptx.index(WAIT)
        assert not [
            label
            for label in re.findall(r"^(\$\w+):", kernel.ptx[:start], re.M)
            if re.search(rf"bra\S*\s+{re.escape(label)};", kernel.ptx[start:])
        ], "in a loop"


@pytest.mark.parametrize(
    "name, order",
    [
        ("squares, then linear mma, loop split", [1, 0, 2]),
        ("squares, then linear of scaled rows mma", [0, 1]),
    ],
)
def test_loads_of_a_loop_do_not_wait_for_what_is_computed_once_and_read_after_it(name, order):
    case = CASES[name]
    assert [
        number
        for number, _ in plan_kernel(place_kernels(case.ugraph)[-1], case.schedules[-1]).stages
    ] == order


@pytest.mark.parametrize(
    "name", ["norm linear, loop split", "norm linear 16 rows mma", "split attention"]
)
def test_older_gpus_get_the_same_kernels_without_waits(name):
    for sm in (80, 89):
        for kernel in compiler.ahead_of_time(
            triton.generate(CASES[name].ugraph, CASES[name].schedules), sm
        ):
            assert "griddepcontrol" not in kernel.ptx and "prefetch.global" not in kernel.ptx


@pytest.mark.parametrize(
    "tiles, early", [(dict(m=1, n=8, k=512), "ld"), (dict(m=1, n=8, k=64), "prefetch")]
)
def test_weights_are_prefetched_before_the_wait(tiles, early):
    """Weights that are held whole are loaded. Of others the first cache lines are prefetched."""
    ugraph = kernel_cases.rms_norm_linear(1, 512, 64)
    (kernel,) = compiler.ahead_of_time(
        triton.generate(ugraph, [Schedule(tiles, prefetch_steps=2)]), 90
    )
    seen = touched(kernel.ptx)
    before = seen[: [op for op, _ in seen].index(WAIT)]
    assert {min(of) for op, of in before if op.startswith(early)} >= {2}  # the weights


@pytest.mark.parametrize("promised", [False, True])
def test_the_last_kernel_triggers_early_only_with_the_promise_that_it_may(promised):
    """Kernels before the last one trigger the next one early without a promise."""
    adapters = LORA_DOWN.build(
        rows=1, k=512, r=(4, 8), eps=1e-5, dtype=torch.bfloat16, adapter_dtype=torch.float32
    )
    ugraphs = [
        c.ugraph for c in search_and_verify(adapters, SearchOptions(time_limit=20)).candidates
    ]
    for u in (next(u for u in ugraphs if u.num_kernels == n) for n in (1, 2)):
        ops = place_kernels(u, promised)
        assert [op.next_may_launch_early for op in ops] == [True] * (len(ops) - 1) + [promised]
        ranked = rank_by_estimate([u], H200, 1, next_may_launch_early=promised)
        first = next(c for c in ranked if not c.is_library)
        assert [s.trigger_early for s in first.schedules] == [
            op.next_may_launch_early for op in ops
        ]
        for op, kernel in zip(ops, compiler.ahead_of_time(first.generate(), 90), strict=True):
            seen = [what for what, _ in touched(kernel.ptx)]
            assert (seen.index(TRIGGER) < seen.index(WAIT)) == op.next_may_launch_early
            assert seen.count(WAIT) == 1 and not any(
                x.startswith("st") for x in seen[: seen.index(WAIT)]
            )


def test_a_kernel_launched_after_adapters_reads_no_bounds_early():
    half, ups = torch.bfloat16, BlockAdapters((4,), torch.float32)
    sizes = dict(eps=1e-5, dtype=half, bias=False)
    behind = [
        RMS_NORM_LINEAR.block(
            k=64, n=(32, 16, 16), **sizes, lora=BlockAdapters((4, 4, 4), torch.float32, True)
        ),
        GATED_MLP.block(
            k=64,
            n=32,
            activation="silu",
            norm=True,
            **sizes,
            lora=BlockAdapters((4, 4), torch.float32),
        ),
        LINEAR_RESIDUAL.block(k=64, n=32, bias=False, dtype=half, lora=ups),
    ]
    for block in behind:
        for c in search_and_verify(block.program(1), SearchOptions(time_limit=20)).candidates:
            assert not any(op.readable_before_wait for op in place_kernels(c.ugraph))


def test_the_check_sees_a_load_that_is_too_early():
    program = triton.generate(
        kernel_cases.rms_norm_linear(1, 512, 64), [Schedule({"m": 1, "n": 8, "k": 512})]
    )
    ptx = compiler.ahead_of_time(program, 90)[0].ptx
    assert not too_early(ptx, {1, 2}) and too_early(ptx, {1}) and too_early(ptx, set())
    moved = ptx.replace(f"\t{WAIT}", "\t//").replace("\tret;", f"\t{WAIT}; // dummy\n\tret;")
    assert any("of [0]" in complaint for complaint in too_early(moved, {1, 2}))
