"""µGraphs as stand-alone Triton files: kernels, `run(inputs)`, the program in plain torch, and a self-check."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from mirage_hf import errors
from mirage_hf.codegen import launching, torch_text, triton_math
from mirage_hf.codegen.default_schedule import choose_schedule
from mirage_hf.codegen.placement import VIEWS, place_kernels
from mirage_hf.codegen.plan import KernelPlan, plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.codegen.torch_text import local
from mirage_hf.codegen.triton_kernel import KernelText, write_kernel
from mirage_hf.graph import conveniences, effects, json_format
from mirage_hf.graph.bounds import bounds_of, extent
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelOp
from mirage_hf.graph.ugraph import UGraph

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


_SHARED = (("scratch_ptr", "*fp32"), ("counters_ptr", "*i32"))
"""The last arguments of a kernel whose blocks share a loop."""


@dataclass(frozen=True)
class Launch:
    """One kernel of a program as it is launched: what is needed to compile it ahead of time."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    """(argument, Triton type), in order; `overlaps`, which follows, is true on sm_90 and newer."""
    grid: int
    num_warps: int
    num_stages: int
    scratch: int = 0
    counters: int = 0


@dataclass(frozen=True)
class GeneratedProgram:
    """A generated file and the launches in it.

    in_place: pairs (output, input), by position, that may be the same memory: `run(inputs, out)` with `out[output]` the input.
    """

    source: str
    launches: tuple[Launch, ...]
    in_place: tuple[tuple[int, int], ...] = ()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the source: what `compile.load` wants."""
        return hashlib.sha256(self.source.encode()).hexdigest()


@conveniences.write_triton_program.register
def write_program(
    ugraph: UGraph, path: str | Path, schedules: Sequence[Schedule] | None = None
) -> Path:
    """Write a readable, stand-alone Triton file with its own check as a script; returns the path. Errors: CodegenError."""
    path = Path(path)
    path.write_text(program_source(ugraph, schedules), encoding="utf-8")
    return path


def program_source(ugraph: UGraph, schedules: Sequence[Schedule] | None = None) -> str:
    """The file as text. `schedules`: one per block graph, in order; else the µGraph's own, else the cost model's first choice."""
    return generate(ugraph, schedules).source


def generate(
    ugraph: UGraph,
    schedules: Sequence[Schedule] | None = None,
    name: str = "mirage",
    next_may_launch_early: bool = False,
) -> GeneratedProgram:
    """Generate the Triton program of a µGraph; its kernels are called `name`_0, `name`_1 …

    `next_may_launch_early`: a promise about what is launched next, see `place_kernels`.
    Errors: CodegenError for a block graph or schedule that has no kernel, or a number of schedules that does not fit.
    """
    schedules = schedules or ugraph.schedules
    ops = place_kernels(ugraph, next_may_launch_early)
    if schedules is None:
        schedules = [choose_schedule(op) for op in ops]
    if len(schedules) != len(ops):
        raise errors.CodegenError(
            f"{len(schedules)} schedules for {len(ops)} block graphs; give one each, in order"
        )
    plans = [plan_kernel(op, schedule) for op, schedule in zip(ops, schedules, strict=True)]
    kernels = [write_kernel(p, f"{name}_{n}") for n, p in enumerate(plans)]
    launches = tuple(
        Launch(
            k.name,
            tuple(
                (a, POINTERS[(p.tiling.operands + p.tiling.outputs)[at].dtype])
                for a, at in k.arguments
            )
            + (_SHARED if k.scratch else ()),
            p.grid,
            p.schedule.num_warps,
            p.schedule.num_stages,
            k.scratch,
            k.counters,
        )
        for k, p in zip(kernels, plans, strict=True)
    )
    helpers = [h for h in triton_math.HELPERS if any(h in k.helpers for k in kernels)]
    own = [triton_math.HELPERS[h].strip("\n") for h in helpers] + [
        f"# {p.schedule}\n{k.source.rstrip()}" for k, p in zip(kernels, plans, strict=True)
    ]
    if kernels:
        own.append(launching.text(any(k.scratch for k in kernels)))
    functions = {
        text: None
        for graph in (ugraph.program, ugraph.kernels)
        for text in torch_text.functions(graph)
    }
    checked = all(
        op.name != CUSTOMIZED for op in ugraph.program.ops
    )  # a block graph as program has nothing to be compared with
    sections = [
        _header(ugraph, checked),
        *own,
        *(f.rstrip() for f in functions),
        _run(ugraph, kernels, launches),
    ]
    if checked:
        sections += [torch_text.program(ugraph.program, "program").rstrip(), _check(ugraph)]
    source = "\n\n\n".join(sections) + "\n"
    if not re.search(r"(?<!\w)F\.", source):
        source = source.replace("import torch.nn.functional as F\n", "")
    if not kernels:
        source = source.replace("import triton\nimport triton.language as tl\n", "").replace(
            "import copy\nimport threading\n\n", ""
        )
    return GeneratedProgram(source, launches, _in_place(ugraph, plans))


def _in_place(ugraph: UGraph, plans: Sequence[KernelPlan]) -> tuple[tuple[int, int], ...]:
    ops, inputs = ugraph.kernels.ops, [t.index for t in ugraph.kernels.inputs]
    read_last = {
        x.index: n for n, op in enumerate(ops) for x in op.inputs if isinstance(x, DTensor)
    }
    kept = {
        t.index for t in ugraph.kernels.outputs
    }  # an input that is an output too, and what views are of
    kept |= {x.index for op in ops if op.name in VIEWS for x in op.inputs if isinstance(x, DTensor)}
    planned, found = iter(plans), []
    for n, op in enumerate(ops):
        if op.name != CUSTOMIZED:
            continue
        p, operands = next(planned), [x.index for x in op.inputs if isinstance(x, DTensor)]
        # an input that is stored as it is, is read where it is stored: another output may then be written over it already
        copied = {
            operands[s]
            for o in p.tiling.block.outputs
            if o.value in p.tiling.inputs
            for s in p.tiling.inputs[o.value].sources
        }
        free = [
            x
            for x in dict.fromkeys(operands)
            if x in inputs
            and x not in kept
            and x not in copied
            and read_last[x] == n
            and operands.count(x) == 1
        ]
        for t, o in zip(op.outputs, p.tiling.block.outputs, strict=True):
            found += [
                (k, inputs.index(x))
                for k, y in enumerate(ugraph.kernels.outputs)
                if y.index == t.index
                for x in free
                if p.tiling.can_overwrite(o, operands.index(x))
            ]
    return tuple(found)


def _header(ugraph: UGraph, checked: bool) -> str:
    text = str(ugraph.kernels).replace("\\", "/").replace('"""', "'''")
    body = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
    usage = (
        "`run(inputs, out)` takes the program's inputs in order and returns its outputs, written into the tensors `out` if given"
        + ("; as\na script, this file checks itself." if checked else ".")
    )
    return f'''"""Generated by mirage_hf. The \u00b5Graph:

{body}

\u00b5Graph {json_format.digest(json_format.ugraph_to_dict(ugraph))}
{usage}
"""
import copy
import threading

import torch
import torch.nn.functional as F
import triton
import triton.language as tl'''


def _run(ugraph: UGraph, kernels: Sequence[KernelText], launches: Sequence[Launch]) -> str:
    graph = ugraph.kernels
    names = [local(t) for t in graph.inputs]
    given = {t.index: n for n, t in reversed(list(enumerate(graph.outputs)))}
    lines = [
        "def run(inputs, out=None):",
        f"    {', '.join(names)}{',' if len(names) == 1 else ''} = inputs",
    ]
    if kernels:
        lines += [
            f"    device = {names[0]}.device",
            '    if device.type == "cuda" and device.index != torch.cuda.current_device():',
            "        with torch.cuda.device(device):",
            "            return run(inputs, out)",
        ]
    steps = iter(zip(place_kernels(ugraph), kernels, launches, strict=True))
    loaded, written, stored = _loaded(ugraph), set[int](), effects.stored(graph)
    appended = {op.outputs[0].index: effects.parts_of(op)[0] for op in stored.values()}
    for op in graph.ops:
        if op.name == CUSTOMIZED:
            ran, kernel, launched = next(steps)
            written |= {t.index for t in op.outputs}
            lines += _launch(
                ran,
                kernel,
                launched,
                given,
                {n: effects.parts_of(op)[0] for n, op in stored.items()},
            )
            continue
        if op.outputs[0].index in appended:
            lines.append(
                f"    {local(op.outputs[0])} = {local(appended[op.outputs[0].index])}  # its new rows are stored"
            )
            continue
        text = torch_text.expression(op, torch_text.operand_names(op))
        if (
            op.name not in VIEWS and op.outputs[0].index in loaded
        ):  # torch keeps the order of strides in some ops
            text = f"({text}).contiguous()"
        lines.append(f"    {local(op.outputs[0])} = {text}")
    results = [
        f"out[{n}].copy_({local(t)})" if t.index not in written or given[t.index] != n else local(t)
        for n, t in enumerate(graph.outputs)
    ]
    results = [
        f"{local(t)} if out[{n}] is {local(t)} else {text}" if t.index in appended else text
        for n, (t, text) in enumerate(zip(graph.outputs, results, strict=True))
    ]
    plain = [local(t) for t in graph.outputs]
    if results != plain:
        lines += ["    if out is not None:", f"        return [{', '.join(results)}]"]
    return "\n".join([*lines, f"    return [{', '.join(plain)}]"])


def _loaded(ugraph: UGraph) -> set[int]:
    """The tensors that kernels read, themselves or through views."""
    found: set[int] = set()
    for op in reversed(ugraph.kernels.ops):
        if op.name == CUSTOMIZED or (op.name in VIEWS and op.outputs[0].index in found):
            found |= {x.index for x in op.inputs if isinstance(x, DTensor)}
    return found


def _launch(
    op: KernelOp,
    kernel: KernelText,
    launch: Launch,
    given: Mapping[int, int],
    caches: Mapping[int, DTensor],
) -> list[str]:
    tensors = [*(t for t in op.inputs if isinstance(t, DTensor)), *op.outputs]
    lines = []
    for t in op.outputs:
        if t.index in caches:
            lines.append(f"    {local(t)} = {local(caches[t.index])}")
            continue
        dtype = "" if tensors[0].dtype == t.dtype else f", dtype={t.dtype}"
        new = f"{local(tensors[0])}.new_empty({t.dims}{dtype})"  # quicker than torch.empty
        lines.append(
            f"    {local(t)} = "
            + (f"{new} if out is None else out[{given[t.index]}]" if t.index in given else new)
        )
    arguments = [local(tensors[at]) for _, at in kernel.arguments]
    if launch.scratch:
        arguments += [
            f"torch.empty({launch.scratch}, dtype=torch.float32, device=device)",
            f"counters({launch.counters}, device)",
        ]
    how = f"num_warps={launch.num_warps}, num_stages={launch.num_stages}"
    return [*lines, f"    launch({kernel.name}, {launch.grid}, [{', '.join(arguments)}], {how})"]


def _check(ugraph: UGraph) -> str:
    # some rows of random bounds are empty
    drawn = "".join(
        f"\n    inputs[{n}].random_(0, {most})"
        for b in bounds_of(ugraph.program)
        for n, most in (
            (b.lo, extent(ugraph.program, b) // 2 + 1),
            (b.hi, extent(ugraph.program, b) + 1),
        )
    )
    drawn += "".join(
        f"\n    inputs[{n}].random_(0, {cache.dims[-2] - rows.dims[-2] + 1})"
        for n, cache, rows in effects.positions_of(ugraph.program)
    )
    shapes = ",\n              ".join(
        f"({t.dims}, {t.strides}, {t.dtype})" for t in ugraph.program.inputs
    )
    return f'''def random_input(dims, strides, dtype, device):
    x = torch.empty(1 + sum((n - 1) * s for n, s in zip(dims, strides)), dtype=dtype, device=device)
    return (x.normal_() if dtype.is_floating_point else x.zero_()).as_strided(dims, strides)


def check(device):
    """Compare with the program in float64: not further from it than the same ops in torch, give or take one rounding."""
    shapes = [{shapes}]
    torch.manual_seed(0)
    inputs = [random_input(*shape, device) for shape in shapes]{drawn}
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    for ours, eager, exact in zip(run(inputs), program(inputs), program(wide)):
        finite = exact.isfinite() & eager.isfinite()  # elsewhere any result is right
        if not finite.any():
            continue
        ours, eager, exact = (y[finite] for y in (ours, eager, exact))
        error, stock = ((y.double() - exact).abs().max().item() for y in (ours, eager))
        ulp = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0
        bound = 1.25 * stock + ulp * exact.abs().max().item()
        print(f"error {{error:.3g}}, torch {{stock:.3g}}, allowed {{bound:.3g}}")
        assert error <= bound, "the result is further from float64 than torch's"


if __name__ == "__main__":
    import os
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("there is no GPU here; TRITON_INTERPRET=1 runs the kernels on the CPU, slowly")
    check("cuda" if torch.cuda.is_available() else "cpu")'''
