"""µGraphs: a tensor program together with the kernels that compute it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mirage_hf import errors
from mirage_hf.graph import effects
from mirage_hf.graph.block import BlockGraph
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp, Operand, rebuilt
from mirage_hf.ops import table

_NO_LAUNCH = ("permute", "reshape", "slice")
"""Layout ops that are views: they launch nothing (a reshape of a permuted tensor copies, and is then a launch of its own)."""


_numbered: weakref.WeakValueDictionary[int, UGraph] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class UGraph:
    """`kernels` computes what `program` says: a kernel graph with the same inputs and outputs whose ops are library calls
    and block graphs (op "customized"). `schedules` holds the codegen Schedule of each block graph once one was chosen by
    tuning or by the user; without it the cost model chooses when code is generated."""

    program: KernelGraph
    kernels: KernelGraph
    schedules: tuple[Any, ...] | None = field(default=None, compare=False)
    uid: int = field(
        default_factory=itertools.count().__next__, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        _numbered[self.uid] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return UGraph, (
            self.program,
            self.kernels,
            self.schedules,
        )  # a copy, here or in another process, has a number of its own

    @staticmethod
    def numbered(uid: int) -> UGraph:
        """The µGraph of that number."""
        return _numbered[uid]

    @property
    def num_kernels(self) -> int:
        """Kernels launched: block graphs and library calls; views are not counted, nor appends that a kernel's store does."""
        return sum(op.name not in _NO_LAUNCH for op in self.kernels.ops) - len(
            effects.stored(self.kernels)
        )

    @property
    def block_ops(self) -> tuple[KernelOp, ...]:
        """The ops that run a block graph."""
        return tuple(op for op in self.kernels.ops if op.name == CUSTOMIZED)

    @property
    def is_fused(self) -> bool:
        """Whether a searched block graph is among the kernels (False: the library path)."""
        return bool(self.block_ops)

    def __str__(self) -> str:
        return str(self.kernels)

    def __repr__(self) -> str:
        count = self.num_kernels
        return f"<UGraph: {count} kernel{'s' * (count != 1)}, {len(self.block_ops)} of them block graphs>"

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on `inputs` (order of `program.inputs`): generated kernels on a GPU, the cpu backend on a CPU.

        Errors: InputError for tensors of another shape, dtype, stride or device than the program's.
        """
        from mirage_hf.pipeline.run_ugraph import run_ugraph

        return run_ugraph(self, inputs)

    def generate_triton_program(self, path: str | Path) -> Path:
        """Write a readable, stand-alone Triton file with its own check as a script. Errors: CodegenError."""
        from mirage_hf.codegen import triton

        return triton.write_program(self, path)

    def generate_cuda_program(self, path: str | Path) -> Path:
        """Write a readable, stand-alone CUDA C++ file. Errors: CodegenError."""
        from mirage_hf.codegen import cuda

        return cuda.write_program(self, path)

    def with_blocks(self, blocks: Sequence[BlockGraph]) -> UGraph:
        """The same µGraph with other block graphs for its customized ops, in order, which take and give the same tensors."""
        kernels, changed = KernelGraph(), iter(blocks)

        def again(op: KernelOp, operands: Sequence[Operand]) -> list[DTensor]:
            op = op if op.block is None else replace(op, block=next(changed))
            return kernels.op_like(op, operands, [t.name for t in op.outputs])

        kernels.mark_output(
            *rebuilt(self.kernels, [kernels.input_like(t) for t in self.kernels.inputs], again)
        )
        return UGraph(self.program, kernels)

    def visualize(self, path: str | Path) -> Path:
        """Draw kernels and block graphs as SVG."""
        from mirage_hf.render import picture

        return picture.write_svg(self, path)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the µGraph as JSON, and write it to `path` if given; `load_ugraph` reads it."""
        from mirage_hf.graph import json_format

        return json_format.save_json(json_format.ugraph_to_dict(self), path)


def library_ugraph(program: KernelGraph) -> UGraph:
    """The library path: every op of the program as a torch call of its own, always correct.

    A matmul with a concat of weights becomes a concat of matmuls, as stock modules compute it: no weight is copied.
    """
    made = {t.index: op for op in program.ops for t in op.outputs}

    def parts(op: KernelOp) -> tuple[Any, ...]:
        right = op.inputs[1] if op.name == "matmul" else None
        source = made.get(right.index) if isinstance(right, DTensor) else None
        if (
            source is None
            or source.name != "concat"
            or dict(source.attrs)["dim"] != len(source.outputs[0].dims) - 1
        ):
            return ()
        return source.inputs

    if not any(parts(op) for op in program.ops):
        return UGraph(program, program)
    kernels = KernelGraph()
    new = {t.index: kernels.input_like(t) for t in program.inputs}
    read = {
        x.index for op in program.ops if not parts(op) for x in op.inputs if isinstance(x, DTensor)
    }
    read |= {
        x.index
        for op in program.ops
        for x in (op.inputs[:1] + parts(op) if parts(op) else ())
        if isinstance(x, DTensor)
    }
    read |= {t.index for t in program.outputs}
    for op in program.ops:
        if op.outputs[0].index not in read:
            continue  # a concat of weights that only matmuls read
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs if not parts(op)]
        if weights := parts(op):
            out = [
                kernels.concat(
                    [kernels.matmul(new[op.inputs[0].index], new[w.index]) for w in weights], -1
                )
            ]  # type: ignore[union-attr]
        else:
            out = kernels.op_like(op, args)
        new |= {t.index: r for t, r in zip(op.outputs, out, strict=True)}
    kernels.mark_output(*(new[t.index] for t in program.outputs))
    return UGraph(program, kernels)


def check_tensors(graph: KernelGraph, inputs: Sequence[torch.Tensor]) -> None:
    """Errors: InputError unless `inputs` is a list of tensors, as many as `graph.inputs`."""
    if not isinstance(inputs, (list, tuple)) or len(inputs) != len(graph.inputs):
        got = (
            "one tensor"
            if isinstance(inputs, torch.Tensor)
            else (
                f"{len(inputs)} inputs"
                if isinstance(inputs, (list, tuple))
                else type(inputs).__name__
            )
        )
        raise errors.InputError(
            f"expected a list of {len(graph.inputs)} tensors in the order of graph.inputs, got {got}"
        )
    for i, (t, x) in enumerate(zip(graph.inputs, inputs, strict=True)):
        if not isinstance(x, torch.Tensor):
            raise errors.InputError(
                f"input {i} ({t.name}): expected a torch tensor, got {type(x).__name__}"
            )


def check_inputs(
    graph: KernelGraph, inputs: Sequence[torch.Tensor], device_type: str | None = None
) -> None:
    """Errors: InputError unless `inputs` have the dims, dtypes and strides of `graph.inputs` and lie on one device."""
    check_tensors(graph, inputs)
    device = None
    for i, (t, x) in enumerate(zip(graph.inputs, inputs, strict=True)):
        where = f"input {i} ({t.name})"
        if tuple(x.shape) != t.dims:
            raise errors.InputError(
                f"{where}: built for shape {errors.shape(t.dims)}, got {errors.shape(x.shape)}; "
                "superoptimize a graph of that shape"
            )
        if x.dtype != t.dtype:
            raise errors.InputError(
                f"{where}: built for {table.dtype_name(t.dtype)}, got {table.dtype_name(x.dtype)}; "
                "convert it, or build the graph with that dtype"
            )
        if any(a != b for a, b, d in zip(x.stride(), t.strides, t.dims, strict=True) if d > 1):
            raise errors.InputError(
                f"{where}: built for strides {errors.shape(t.strides)}, got {errors.shape(x.stride())}; "
                "call .contiguous(), or give strides= at new_input"
            )
        if device is not None and x.device != device:
            raise errors.InputError(
                f"{where}: is on {x.device}, earlier inputs are on {device}; move all inputs to one device"
            )
        device = x.device
    if device_type is not None and device is not None and device.type != device_type:
        raise errors.InputError(
            f"inputs are on {device}, this kernel runs on {device_type}; move them, or choose another backend"
        )
