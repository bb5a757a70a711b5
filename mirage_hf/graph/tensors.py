"""The parts of a kernel graph: tensors in device memory, and the ops among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mirage_hf.graph.block import BlockGraph

#: The name of ops that run a block graph.
CUSTOMIZED = "customized"


@dataclass(frozen=True)
class DTensor:
    """A tensor in device memory. `KernelGraph.new_input` and the ops of a graph make them."""

    #: Position among the tensors of its graph, in the order in which they were made.
    index: int

    dims: tuple[int, ...]
    dtype: torch.dtype
    name: str

    #: A stride per dim, in elements.
    strides: tuple[int, ...]

    #: The graph that the tensor belongs to.
    graph_uid: int = field(compare=False, repr=False)

    #: True for weights: inputs that no other kernel of a captured CUDA graph writes. Kernels may
    #: read them before the kernels launched earlier are done.
    constant: bool = False

    def __str__(self) -> str:
        return f"%{self.name}"


Operand = DTensor | float


@dataclass(frozen=True)
class KernelOp:
    """One op of a kernel graph."""

    #: Its name in the op table, or CUSTOMIZED.
    name: str

    inputs: tuple[Operand, ...]
    outputs: tuple[DTensor, ...]

    #: Attributes, sorted by name.
    attrs: tuple[tuple[str, Any], ...] = ()

    #: The block graph of a CUSTOMIZED op.
    block: BlockGraph | None = None


class GraphContents(Protocol):
    """The parts of a kernel graph that printing and JSON need."""

    @property
    def inputs(self) -> Sequence[DTensor]:
        """The inputs."""

    @property
    def ops(self) -> Sequence[KernelOp]:
        """The ops, in the order in which they were added."""

    @property
    def outputs(self) -> Sequence[DTensor]:
        """The outputs."""


class UGraphContents(Protocol):
    """The parts of a µGraph that JSON needs."""

    @property
    def program(self) -> GraphContents:
        """The tensor program."""

    @property
    def kernels(self) -> GraphContents:
        """The kernels that compute it."""


def row_major(dims: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor."""
    strides, step = [], 1
    for d in reversed(dims):
        strides.append(step)
        step *= d
    return tuple(reversed(strides))
