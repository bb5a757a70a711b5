"""Where the kernels of a µGraph run: their operands' strides, and the kernels around them.

The text of a kernel depends on more than its block graph. It depends on the strides of its operands
at run time, and on the caches that it appends to. It also depends on the kernels before and after
it, which decide what programmatic dependent launch (PDL) allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from mirage_hf.graph import effects
from mirage_hf.graph.coded import is_packed
from mirage_hf.graph.indices import indices_of
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp, Operand
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table

#: Library ops whose result may be a view with strides of its own.
VIEWS = ("permute", "reshape", "slice")


@dataclass(frozen=True)
class Append:
    """An output that a kernel stores as new rows of a cache."""

    #: Number of the output.
    output: int
    #: Number of the operand that holds the first slot to write.
    position: int
    #: Number of slots of the cache: its dim before the last.
    slots: int


@dataclass(frozen=True)
class PlacedOp(KernelOp):
    """A `customized` op as it runs.

    Its operands have their strides at run time. Its outputs have the strides of the memory that
    they are stored to.
    """

    appends: tuple[Append, ...] = ()
    #: Operands that this or another kernel of the µGraph appends to.
    caches: frozenset[int] = frozenset()
    #: Bounds, positions and indices that may be read before the grid dependency wait, while the
    #: previous kernel still runs. Bounds and positions: only in µGraphs that append to caches (see
    #: `launching.launch`). Indices: inputs of the µGraph, unless this is its first kernel. An
    #: earlier kernel of the µGraph has waited then, so they were written.
    readable_before_wait: frozenset[int] = frozenset()
    #: True if only generated kernels read the op's partial results, so their layout is free.
    has_private_partials: bool = False
    #: True if the next kernel may launch at any time: it reads no bounds or positions before its
    #: own wait.
    next_may_launch_early: bool = False

    @cached_property
    def operands(self) -> tuple[DTensor, ...]:
        """The tensors that the kernel reads."""
        return tuple(t for t in self.inputs if isinstance(t, DTensor))

    @cached_property
    def reads_packed_codes(self) -> bool:
        """True if some operand holds several codes in a word."""
        return any(is_packed(t.dtype) for t in self.operands)


def placed(op: KernelOp) -> PlacedOp:
    """Return an op as it runs by itself, if no µGraph has placed it."""
    if isinstance(op, PlacedOp):
        return op
    return PlacedOp(op.name, op.inputs, op.outputs, op.attrs, op.block)


def place_kernels(ugraph: UGraph, next_may_launch_early: bool = False) -> tuple[PlacedOp, ...]:
    """Return the `customized` ops of a µGraph as they run.

    Views have the strides that torch gives them. Kernels write row-major tensors, or rows of
    caches. The results of other library calls are made row-major.

    Args:
        ugraph: The µGraph.
        next_may_launch_early: A promise about the kernel that is launched right after this program.
            It is a generated kernel that reads this program's result, and before its grid
            dependency wait it reads only constants. Such a kernel may launch before the last
            kernel of this program has waited.
    """
    kernels = ugraph.kernels
    stored = effects.stored(kernels)
    appends = (effects.parts_of(op) for op in kernels.ops if op.name == effects.APPEND)
    caches = {cache.index for cache, _, _ in appends}
    # In µGraphs with caches, positions are advanced before a step begins. Elsewhere nothing says
    # who writes bounds.
    integers = {t.index for t in kernels.inputs if t.dtype in (torch.int32, torch.int64) and caches}
    indices = {kernels.inputs[n].index for n in indices_of(kernels)}
    read_elsewhere = _read_by_library(kernels)
    strided: dict[int, DTensor] = {}
    block_ops: list[PlacedOp] = []
    for op in kernels.ops:
        inputs = tuple(strided.get(x.index, x) if isinstance(x, DTensor) else x for x in op.inputs)
        if op.name == CUSTOMIZED:
            inputs, outputs, appended = _stored_outputs(op, inputs, stored)
            block_ops.append(
                PlacedOp(
                    op.name,
                    inputs,
                    outputs,
                    op.attrs,
                    op.block,
                    appends=appended,
                    caches=_positions(inputs, caches),
                    readable_before_wait=_positions(
                        inputs, integers | indices if block_ops else integers
                    ),
                    has_private_partials=read_elsewhere.isdisjoint(t.index for t in op.outputs),
                )
            )
        elif op.name in VIEWS and isinstance(inputs[0], DTensor):
            view = op.outputs[0]
            strides, is_copy = _laid_out(op, inputs[0])
            constant = inputs[0].constant and not is_copy
            strided[view.index] = replace(view, strides=strides, constant=constant)
    last_may_trigger = next_may_launch_early and kernels.ops[-1].name == CUSTOMIZED
    return tuple(
        replace(
            op,
            next_may_launch_early=last_may_trigger
            if following is None
            else not following.readable_before_wait,
        )
        for op, following in itertools.zip_longest(block_ops, block_ops[1:])
    )


def _read_by_library(kernels: KernelGraph) -> set[int]:
    """Return the tensors that something other than a generated kernel reads, outputs among them."""
    library_ops = (op for op in kernels.ops if op.name != CUSTOMIZED)
    read = {x.index for op in library_ops for x in op.inputs if isinstance(x, DTensor)}
    return read | {t.index for t in kernels.outputs}


def _stored_outputs(
    op: KernelOp, inputs: tuple[Operand, ...], stored: Mapping[int, KernelOp]
) -> tuple[tuple[Operand, ...], tuple[DTensor, ...], tuple[Append, ...]]:
    """Return the operands followed by append positions, the outputs as stored, and the appends."""
    outputs, appends = list(op.outputs), []
    for n, t in enumerate(op.outputs):
        if t.index in stored:
            cache, _, position = effects.parts_of(stored[t.index])
            outputs[n] = replace(t, strides=cache.strides)
            appends.append(Append(n, len(inputs), cache.dims[-2]))
            inputs = (*inputs, position)
    return inputs, tuple(outputs), tuple(appends)


def _positions(operands: Iterable[Operand], wanted: set[int]) -> frozenset[int]:
    """Return the numbers of the operands that are among `wanted`."""
    return frozenset(
        n for n, x in enumerate(operands) if isinstance(x, DTensor) and x.index in wanted
    )


def _laid_out(op: KernelOp, x: DTensor) -> tuple[tuple[int, ...], bool]:
    """Return the strides that torch gives the result of a layout op, and whether it copies."""
    empty = torch.empty_strided(x.dims, x.strides, dtype=x.dtype, device="meta")
    result = table.lookup(op.name).oracle(empty, **dict(op.attrs))
    is_copy = result.untyped_storage()._cdata != empty.untyped_storage()._cdata
    return tuple(result.stride()), is_copy
