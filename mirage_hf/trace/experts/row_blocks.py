"""Run the experts of a prompt by kernels: blocks of rows, each of which belongs to one expert.

The rows that tokens give to experts are sorted into blocks (row_layout.py). So blocks choose
experts as single tokens do, and the programs are the same but for the rows of a block. A block
without an expert reads no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mirage_hf.formats.coding import as_dtype
from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.settings import settings
from mirage_hf.trace.experts.form import ExpertsForm
from mirage_hf.trace.experts.gate import gate
from mirage_hf.trace.experts.row_layout import ROWS, row_layout
from mirage_hf.trace.experts.writer import ExpertsWriter, ParameterPart
from mirage_hf.trace.fake_mode import FakeOnceMode
from mirage_hf.trace.program import alike

#: Runs a program on its inputs.
Run = Callable[[list[Tensor]], list[Tensor]]


def most_tokens(form: ExpertsForm, chosen: int) -> int:
    """Return the most tokens that the blocks of experts have room for."""
    return ROWS * len(form.first.tensors[0]) // chosen


@dataclass(frozen=True, eq=False)
class BlocksProgram:
    """One of the two programs of blocks of rows.

    Attributes:
        graph: The program.
        inputs: What its inputs are: EXPERTS, GIVEN, WEIGHTS, or a part of a parameter, which is
            known by its number among those of the experts.
    """

    graph: KernelGraph
    inputs: Sequence[str | tuple[int, ParameterPart]]


#: Inputs of programs: the experts of blocks (blocks, 1), rows (blocks, 1, ROWS, width), and the
#: routing weights of rows (blocks, 1, ROWS, 1).
EXPERTS, GIVEN, WEIGHTS = "experts", "given", "weights"


def blocks_programs(
    form: ExpertsForm, dtype: torch.dtype, weights_dtype: torch.dtype
) -> tuple[BlocksProgram, BlocksProgram]:
    """Return the programs of blocks: up to the second linear of an expert, and from it on.

    Args:
        form: The experts.
        dtype: The dtype of the activations.
        weights_dtype: The dtype of the routing weights.

    Raises:
        GraphError: Its shapes or dtypes do not fit.
        TraceError: The function between the two linears is of another form.
    """
    first = _Program(form, form.first.columns, dtype, weights_dtype)
    x = as_dtype(first.graph, first.weighed(first.x), dtype) if form.scales_inputs else first.x
    with closing(FakeOnceMode()) as mode:
        h = gate(form, dtype, first.graph, partial(first.writer.linear, x, form.first), mode)
    second = _Program(form, form.second.columns, dtype, weights_dtype)
    y = second.writer.linear(second.x, form.second)
    if form.scales_inputs:
        return first.ending_with(h, dtype), second.ending_with(y, dtype)
    # stock rounds no product of a float32 weight before the sum
    kept = torch.promote_types(dtype, weights_dtype)
    return first.ending_with(h, dtype), second.ending_with(second.weighed(y), kept)


class _Program:
    """A program that is being written."""

    def __init__(
        self, form: ExpertsForm, width: int, dtype: torch.dtype, weights_dtype: torch.dtype
    ):
        self.graph, self.weights_dtype = new_kernel_graph(), weights_dtype
        self.blocks = 2 * len(form.first.tensors[0])  # each expert may have one that is not full
        experts = self.graph.new_input((self.blocks, 1), torch.int64)
        self.x = self.graph.new_input((self.blocks, 1, ROWS, width), dtype)
        self.inputs: list[str | tuple[int, ParameterPart]] = [EXPERTS, GIVEN]
        numbers = {id(x): number for number, x in enumerate(form.parameters)}
        self.writer = ExpertsWriter(
            self.graph, experts, lambda x, part: self.inputs.append((numbers[id(x)], part))
        )

    def weighed(self, x: DTensor) -> DTensor:
        """Return rows times their routing weights."""
        weights = self.graph.new_input((self.blocks, 1, ROWS, 1), self.weights_dtype)
        self.inputs.append(WEIGHTS)
        return self.graph.mul(*alike(self.graph, [x, weights]))

    def ending_with(self, y: DTensor, dtype: torch.dtype) -> BlocksProgram:
        """Return the program, with its result in a dtype."""
        self.graph.mark_output(as_dtype(self.graph, y, dtype))
        return BlocksProgram(self.graph, self.inputs)


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """Kernels of the blocks of some experts.

    Attributes:
        programs: The two programs.
        runs: What runs each.
        dtype: The dtype of the activations.
        weights_dtype: The dtype of the routing weights.
        skips_blocks: Whether `runs` read nothing for an expert that does not exist. Otherwise, and
            where indices are checked, blocks without an expert read the last one.
    """

    programs: tuple[BlocksProgram, BlocksProgram]
    runs: tuple[Run, Run]
    dtype: torch.dtype
    weights_dtype: torch.dtype
    skips_blocks: bool

    def run(self, form: ExpertsForm, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute the sum of the chosen experts of each token, times their weights.

        The host reads nothing, so a CUDA graph can be captured.

        Args:
            form: The experts, which have parameters as those of the programs.
            x: (tokens, width), at most `most_tokens`.
            index: (tokens, chosen). Others than experts choose none.
            weights: (tokens, chosen).
        """
        experts = len(form.first.tensors[0])
        rows = row_layout(index, weights, experts)
        shape = 2 * experts, 1, ROWS, -1
        skips_blocks = self.skips_blocks and not settings().check_indices
        given = {
            EXPERTS: rows.experts if skips_blocks else rows.experts.clamp(max=experts - 1),
            GIVEN: x[rows.tokens].view(shape),
            WEIGHTS: rows.weights.view(shape),
        }
        for number in range(2):
            given[GIVEN] = self._run(number, form, given)
        y = given[GIVEN].view(-1, x.shape[-1])[rows.places]
        return y.masked_fill(~rows.is_kept[..., None], 0).sum(1).to(x.dtype)

    def _run(self, number: int, form: ExpertsForm, given: Mapping[str, Tensor]) -> Tensor:
        """Return the result of one of the programs."""
        inputs = [
            given[what] if isinstance(what, str) else what[1].of(form.parameters[what[0]].detach())
            for what in self.programs[number].inputs
        ]
        return self.runs[number](inputs)[0]
