"""µGraphs as stand-alone Triton files.

A file holds the kernels, `run(inputs)`, the program in plain torch, and a check that compares them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mirage_hf import errors, files
from mirage_hf.codegen import (
    cuda_launching,
    cuda_text,
    launching,
    torch_text,
    triton_math,
    triton_run,
)
from mirage_hf.codegen.default_schedule import choose_schedule
from mirage_hf.codegen.generated_program import POINTER_TYPES, GeneratedProgram, Launch
from mirage_hf.codegen.placement import VIEWS, PlacedOp, place_kernels
from mirage_hf.codegen.plan import KernelPlan, plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.codegen.triton_kernel import KernelText, write_kernel
from mirage_hf.graph import conveniences, json_format
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor
from mirage_hf.graph.ugraph import UGraph

__all__ = ["GeneratedProgram", "Launch", "generate", "program_source", "write_program"]

#: The last arguments of a kernel whose blocks cooperate.
_COOPERATION_ARGUMENTS = (("scratch_ptr", "*fp32"), ("counters_ptr", "*i32"))


@conveniences.write_triton_program.register
def write_program(
    ugraph: UGraph, path: str | Path, schedules: Sequence[Schedule] | None = None
) -> Path:
    """Write a readable, stand-alone Triton file that checks itself as a script.

    Args:
        ugraph: The µGraph.
        path: Where to write the file.
        schedules: As for `generate`.

    Returns:
        The path.

    Raises:
        CodegenError: If a block graph has no kernel.
    """
    path = Path(path)
    files.write_text(path, program_source(ugraph, schedules))
    return path


def program_source(ugraph: UGraph, schedules: Sequence[Schedule] | None = None) -> str:
    """Return the file as text. The arguments are those of `generate`."""
    return generate(ugraph, schedules).source


def generate(
    ugraph: UGraph,
    schedules: Sequence[Schedule] | None = None,
    name: str = "mirage",
    next_may_launch_early: bool = False,
) -> GeneratedProgram:
    """Generate the Triton program of a µGraph.

    Args:
        ugraph: The µGraph.
        schedules: One for each block graph, in order. By default the µGraph's own, else the cost
            model's first choice.
        name: The kernels are called `name`_0, `name`_1 and so on.
        next_may_launch_early: See `placement.place_kernels`.

    Raises:
        CodegenError: If a block graph or schedule has no kernel, or the number of schedules is
            wrong.
    """
    ops = place_kernels(ugraph, next_may_launch_early)
    chosen = _chosen(ugraph, ops, schedules)
    plans = [None if s.cuda else plan_kernel(op, s) for op, s in zip(ops, chosen, strict=True)]
    kernels, launches = [], []
    for n, (op, schedule, plan) in enumerate(zip(ops, chosen, plans, strict=True)):
        if plan is None:
            kernel, launch = cuda_text.write_kernel(op, schedule, f"{name}_{n}")
        else:
            kernel = write_kernel(plan, f"{name}_{n}")
            launch = _launch(plan, kernel)
        kernels.append(kernel)
        launches.append(launch)
    source = _source(ugraph, ops, chosen, kernels, launches)
    return GeneratedProgram(source, tuple(launches), _in_place(ugraph, plans))


def _chosen(
    ugraph: UGraph, ops: Sequence[PlacedOp], schedules: Sequence[Schedule] | None
) -> Sequence[Schedule]:
    schedules = schedules or ugraph.schedules
    if schedules is None:
        return [choose_schedule(op) for op in ops]
    if len(schedules) != len(ops):
        raise errors.CodegenError(
            f"{len(schedules)} schedules for {len(ops)} block graphs; give one each, in order"
        )
    return schedules


def _launch(plan: KernelPlan, kernel: KernelText) -> Launch:
    tensors = plan.tiling.operands + plan.tiling.outputs
    signature = tuple((name, POINTER_TYPES[tensors[at].dtype]) for name, at in kernel.arguments)
    if kernel.scratch:
        signature += _COOPERATION_ARGUMENTS
    schedule = plan.schedule
    return Launch(
        kernel.name,
        signature,
        plan.grid,
        schedule.num_warps,
        schedule.num_stages,
        kernel.scratch,
        kernel.counters,
    )


# -- the file -------------------------------------------------------------------------------------


def _source(
    ugraph: UGraph,
    ops: Sequence[PlacedOp],
    schedules: Sequence[Schedule],
    kernels: Sequence[KernelText],
    launches: Sequence[Launch],
) -> str:
    """Return the text of the file, without imports that nothing uses."""
    # If the program itself is a block graph, there is nothing to compare the kernels with.
    is_checked = all(op.name != CUSTOMIZED for op in ugraph.program.ops)
    sections = [_header(ugraph, is_checked), *_helpers(kernels)]
    has_cuda = any(s.cuda for s in schedules)
    has_triton = not all(s.cuda for s in schedules)
    if has_cuda:
        sections.append(cuda_text.helpers(schedules))
    for schedule, kernel in zip(schedules, kernels, strict=True):
        sections.append(f"# {schedule}\n{kernel.source.rstrip()}")
    if has_triton:
        sections.append(launching.text(any(k.scratch for k in kernels)))
    if has_cuda:
        sections.append(cuda_launching.text())
    sections += _torch_functions(ugraph)
    sections.append(triton_run.run_text(ugraph, ops, kernels, launches))
    if is_checked:
        sections.append(torch_text.program(ugraph.program, "program").rstrip())
        sections.append(triton_run.check_text(ugraph))
    source = "\n\n\n".join(sections) + "\n"
    if "INTERPRETED" in source:
        source = source.replace("import copy\n", "import copy\nimport os\n", 1)
    if not re.search(r"(?<!\w)F\.", source):
        source = source.replace("import torch.nn.functional as F\n", "")
    if has_cuda:
        source = source.replace(
            "import copy\n",
            "import copy\nimport ctypes\nimport hashlib\nimport os\nimport tempfile\n",
            1,
        )
    if not has_triton:
        source = source.replace("import triton\nimport triton.language as tl\n", "")
        source = source.replace("import copy\n", "", 1)
    if not kernels:
        source = source.replace("import threading\n\n", "")
    return source


def _helpers(kernels: Sequence[KernelText]) -> list[str]:
    """Return the source of the helper functions that kernels call."""
    called = [h for h in triton_math.HELPERS if any(h in k.helpers for k in kernels)]
    return [triton_math.HELPERS[h].strip("\n") for h in called]


def _torch_functions(ugraph: UGraph) -> list[str]:
    """Return the source of this package's oracles that torch expressions of the file call."""
    texts = [
        text for graph in (ugraph.program, ugraph.kernels) for text in torch_text.functions(graph)
    ]
    return [text.rstrip() for text in dict.fromkeys(texts)]


def _header(ugraph: UGraph, is_checked: bool) -> str:
    text = str(ugraph.kernels).replace("\\", "/").replace('"""', "'''")
    graph = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
    digest = json_format.digest(json_format.ugraph_to_dict(ugraph))
    usage = (
        "`run(inputs, out)` takes the program's inputs in order and returns its outputs.\n"
        "If `out` is given, they are written into its tensors."
    )
    if is_checked:
        usage += "\nAs a script, this file checks itself."
    return f'''"""Generated by mirage_hf. The \u00b5Graph:

{graph}

\u00b5Graph {digest}
{usage}
"""
import copy
import threading

import torch
import torch.nn.functional as F
import triton
import triton.language as tl'''


# -- outputs over inputs --------------------------------------------------------------------------


def _in_place(ugraph: UGraph, plans: Sequence[KernelPlan | None]) -> tuple[tuple[int, int], ...]:
    """Return the pairs (output, input), by position, that may share memory.

    A kernel without a plan, which is CUDA C++, has none.
    """
    graph = ugraph.kernels
    inputs = [t.index for t in graph.inputs]
    last_reader = {
        x.index: n for n, op in enumerate(graph.ops) for x in op.inputs if isinstance(x, DTensor)
    }
    kept = _inputs_to_keep(ugraph)
    remaining, pairs = iter(plans), []
    for n, op in enumerate(graph.ops):
        if op.name != CUSTOMIZED:
            continue
        plan = next(remaining)
        if plan is None:
            continue
        operands = [x.index for x in op.inputs if isinstance(x, DTensor)]
        kept_here = kept | _stored_unchanged(plan, operands)
        free = [
            x
            for x in dict.fromkeys(operands)
            if x in inputs and x not in kept_here and last_reader[x] == n and operands.count(x) == 1
        ]
        for t, o in zip(op.outputs, plan.tiling.block.outputs, strict=True):
            numbers = [k for k, y in enumerate(graph.outputs) if y.index == t.index]
            sources = [x for x in free if plan.tiling.can_overwrite(o, operands.index(x))]
            pairs += [(k, inputs.index(x)) for k in numbers for x in sources]
    return tuple(pairs)


def _inputs_to_keep(ugraph: UGraph) -> set[int]:
    """Return the tensors that must not be overwritten: outputs, and tensors that have views."""
    kept = {t.index for t in ugraph.kernels.outputs}
    for op in ugraph.kernels.ops:
        if op.name in VIEWS:
            kept |= {x.index for x in op.inputs if isinstance(x, DTensor)}
    return kept


def _stored_unchanged(plan: KernelPlan, operands: Sequence[int]) -> set[int]:
    """Return the operands that a kernel stores unchanged.

    A kernel reads such an operand when it stores it. By then another output may have been written
    over the operand.
    """
    tiling = plan.tiling
    copies = [tiling.inputs[o.value] for o in tiling.block.outputs if o.value in tiling.inputs]
    return {operands[s] for i in copies for s in i.sources}
