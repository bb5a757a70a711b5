"""Run the experts of a prompt by kernels: blocks of rows, each of which belongs to one expert.

The rows that tokens give to experts are sorted by expert. Each expert gets as many blocks of a
fixed number of rows as it needs. So blocks choose experts as single tokens do, and the programs are
the same but for the rows of a block. A block without an expert reads no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mirage_hf.formats.coding import as_dtype
from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.settings import settings
from mirage_hf.trace.experts.form import ExpertsForm
from mirage_hf.trace.experts.gate import gate
from mirage_hf.trace.experts.writer import ExpertsWriter, ParameterPart
from mirage_hf.trace.fake_mode import FakeOnceMode
from mirage_hf.trace.program import alike

#: Runs a program on its inputs.
Run = Callable[[list[Tensor]], list[Tensor]]

#: Rows of a block: the fewest that tensor cores multiply at once.
ROWS = 16


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


class RowsOfExperts(NamedTuple):
    """Where rows lie in blocks. A row is an expert's work on a token.

    Attributes:
        experts: (blocks, 1): the expert of each block. Their number stands for none.
        source: (blocks · ROWS): the row in each place, by token and then by choice. Places without
            a row have row 0.
        place: (tokens, chosen): where each row lies. Rows without an expert have place 0.
        is_kept: (tokens, chosen): whether a row has an expert.
    """

    experts: Tensor
    source: Tensor
    place: Tensor
    is_kept: Tensor

    @classmethod
    def of(cls, index: Tensor, experts: int) -> RowsOfExperts:
        """Lay rows out in blocks, without the host.

        Args:
            index: (tokens, chosen): the expert of each row. Others are those of no expert.
            experts: How many experts there are.
        """
        is_kept = (index >= 0) & (index < experts)
        owner, order = index.masked_fill(~is_kept, experts).view(-1).sort(stable=True)
        numbers = torch.arange(experts + 1, device=index.device, dtype=owner.dtype)
        starts = torch.searchsorted(owner, numbers)
        needed = (starts[1:] - starts[:-1] + (ROWS - 1)) // ROWS
        ends = needed.cumsum(0)
        blocks = torch.arange(2 * experts, device=index.device)
        of_blocks = torch.searchsorted(ends, blocks, right=True)
        begins = (ends - needed) * ROWS - starts[:-1]
        spare = 2 * experts * ROWS  # the place of rows without an expert
        places = F.pad(begins, (0, 1))[owner] + torch.arange(len(owner), device=index.device)
        places = places.masked_fill(owner == experts, spare)
        source = order.new_zeros(spare + 1).index_copy_(0, places, order)[:-1]
        place = torch.empty_like(order).index_copy_(0, order, places).view(index.shape)
        return cls(of_blocks[:, None], source, place.masked_fill(~is_kept, 0), is_kept)


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
        rows = RowsOfExperts.of(index, experts)
        tokens = rows.source // index.shape[1]
        shape = 2 * experts, 1, ROWS, -1
        skips_blocks = self.skips_blocks and not settings().check_indices
        given = {
            EXPERTS: rows.experts if skips_blocks else rows.experts.clamp(max=experts - 1),
            GIVEN: x[tokens].view(shape),
            WEIGHTS: weights.reshape(-1)[rows.source].view(shape),
        }
        for number in range(2):
            given[GIVEN] = self._run(number, form, given)
        y = given[GIVEN].view(-1, x.shape[-1])[rows.place]
        return y.masked_fill(~rows.is_kept[..., None], 0).sum(1).to(x.dtype)

    def _run(self, number: int, form: ExpertsForm, given: Mapping[str, Tensor]) -> Tensor:
        """Return the result of one of the programs."""
        inputs = [
            given[what] if isinstance(what, str) else what[1].of(form.parameters[what[0]].detach())
            for what in self.programs[number].inputs
        ]
        return self.runs[number](inputs)[0]
