"""µGraphs: a tensor program together with the kernels that compute it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mirage_hf.graph import conveniences, effects
from mirage_hf.graph.block import BlockGraph
from mirage_hf.graph.json_files import save_json
from mirage_hf.graph.json_writer import ugraph_to_dict
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp, Operand
from mirage_hf.graph.rebuild import rebuilt

#: Layout ops that are views, so they launch nothing. Only a reshape of a permuted tensor launches a
#: copy, which `UGraph.num_kernels` does not count.
_VIEWS = ("permute", "reshape", "slice")


@dataclass(frozen=True)
class UGraph:
    """A tensor program and kernels that compute it.

    Calling a µGraph with a list of tensors, in the order of `program.inputs`, runs it.

    Example:
        ```python
        best = graph.superoptimize()[0]
        y, = best([x, w])
        best.generate_triton_program("kernel.py")
        ```
    """

    program: KernelGraph

    #: A kernel graph with the same inputs and outputs. Its ops are library calls and block graphs.
    kernels: KernelGraph

    #: The codegen schedule of each block graph, once tuning or the user has chosen one. None: the
    #: cost model chooses when code is generated.
    schedules: tuple[Any, ...] | None = field(default=None, compare=False)

    #: A number that no other µGraph of this process has. A copy has another one.
    uid: int = field(
        default_factory=itertools.count().__next__, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        _numbered[self.uid] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return UGraph, (self.program, self.kernels, self.schedules)

    @staticmethod
    def numbered(uid: int) -> UGraph:
        """Return the µGraph whose `uid` this is.

        Raises:
            KeyError: If it does not exist any more.
        """
        return _numbered[uid]

    @property
    def num_kernels(self) -> int:
        """How many kernels are launched: block graphs and library calls.

        Views are not counted. Cache appends that are part of another kernel's store are not
        counted either.
        """
        launched = sum(op.name not in _VIEWS for op in self.kernels.ops)
        return launched - len(effects.stored(self.kernels))

    @property
    def block_ops(self) -> tuple[KernelOp, ...]:
        """The ops that run a block graph."""
        return tuple(op for op in self.kernels.ops if op.name == CUSTOMIZED)

    @property
    def is_fused(self) -> bool:
        """True if a block graph is among the kernels, False for the library path."""
        return bool(self.block_ops)

    @property
    def is_clustered(self) -> bool:
        """True if blocks of a kernel form clusters. Only CUDA C++ is generated for it."""
        return any(op.block is not None and op.block.cluster is not None for op in self.block_ops)

    def __str__(self) -> str:
        return str(self.kernels)

    def __repr__(self) -> str:
        count = self.num_kernels
        return (
            f"<UGraph: {count} kernel{'s' * (count != 1)}, "
            f"{len(self.block_ops)} of them block graphs>"
        )

    def with_blocks(self, blocks: Sequence[BlockGraph]) -> UGraph:
        """Return a µGraph with other block graphs for its block ops, in order.

        The new block graphs take and return the same tensors.
        """
        kernels, changed = KernelGraph(), iter(blocks)

        def make(op: KernelOp, operands: Sequence[Operand]) -> list[DTensor]:
            op = op if op.block is None else replace(op, block=next(changed))
            return kernels.op_like(op, operands, [t.name for t in op.outputs])

        inputs = [kernels.input_like(t) for t in self.kernels.inputs]
        kernels.mark_output(*rebuilt(self.kernels, inputs, make))
        return UGraph(self.program, kernels)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the µGraph as JSON, and write it to `path` if given. `load_ugraph` reads it."""
        return save_json(ugraph_to_dict(self), path)

    # -- what later stages do ----------------------------------------------------------------------

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on `inputs`: generated kernels on a GPU, torch on a CPU.

        Raises:
            InputError: If a tensor has another shape, dtype, stride or device than the program's.
        """
        return conveniences.run_ugraph(self, inputs)

    def generate_triton_program(self, path: str | Path) -> Path:
        """Write a readable, stand-alone Triton file that checks itself when run as a script.

        Raises:
            CodegenError: If a block graph has no kernel.
        """
        return conveniences.write_triton_program(self, path)

    def generate_cuda_program(self, path: str | Path) -> Path:
        """Write a readable, stand-alone CUDA C++ file.

        Raises:
            CodegenError: If a block graph has no CUDA kernel.
        """
        return conveniences.write_cuda_program(self, path)

    def visualize(self, path: str | Path) -> Path:
        """Draw kernels and block graphs as SVG."""
        return conveniences.write_svg(self, path)


#: The µGraphs that are alive, by their numbers.
_numbered: weakref.WeakValueDictionary[int, UGraph] = weakref.WeakValueDictionary()


def library_ugraph(program: KernelGraph) -> UGraph:
    """Return the library path: a µGraph that runs every op of the program as a torch call.

    It is correct by construction. A matmul with a concat of weights becomes a concat of matmuls, as
    stock modules compute it. So no weight is copied.
    """
    weights_of = _concatenated_weights(program)
    if not weights_of:
        return UGraph(program, program)
    kernels = KernelGraph()
    new = {t.index: kernels.input_like(t) for t in program.inputs}
    read = _read_tensors(program, weights_of)
    for op in program.ops:
        out = op.outputs[0]
        if out.index not in read:
            continue  # only matmuls read this concat of weights, and they read the weights instead
        if out.index in weights_of:
            x = op.inputs[0]
            assert isinstance(x, DTensor)
            products = [kernels.matmul(new[x.index], new[w.index]) for w in weights_of[out.index]]
            new[out.index] = kernels.concat(products, -1)
        else:
            args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
            made = kernels.op_like(op, args)
            new |= {t.index: y for t, y in zip(op.outputs, made, strict=True)}
    kernels.mark_output(*(new[t.index] for t in program.outputs))
    return UGraph(program, kernels)


def _concatenated_weights(program: KernelGraph) -> dict[int, tuple[DTensor, ...]]:
    """Return the weights whose columns are joined for a matmul, by the matmul's result."""
    made_by = {t.index: op for op in program.ops for t in op.outputs}
    weights_of = {}
    for op in program.ops:
        right = op.inputs[1] if op.name == "matmul" else None
        concat = made_by.get(right.index) if isinstance(right, DTensor) else None
        if concat is None or concat.name != "concat":
            continue
        if dict(concat.attrs)["dim"] == len(concat.outputs[0].dims) - 1:
            weights_of[op.outputs[0].index] = tuple(_tensors(concat.inputs))
    return weights_of


def _read_tensors(program: KernelGraph, weights_of: Mapping[int, tuple[DTensor, ...]]) -> set[int]:
    """Return the tensors that ops read if matmuls read the weights of `weights_of` one by one."""
    read = {t.index for t in program.outputs}
    for op in program.ops:
        operands: Iterable[Operand] = op.inputs
        if weights := weights_of.get(op.outputs[0].index):
            operands = (op.inputs[0], *weights)
        read |= {x.index for x in _tensors(operands)}
    return read


def _tensors(operands: Iterable[Operand]) -> list[DTensor]:
    return [x for x in operands if isinstance(x, DTensor)]
