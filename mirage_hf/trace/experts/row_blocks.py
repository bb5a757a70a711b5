"""Run the experts of a prompt by kernels that take blocks of rows.

The rows that tokens give to experts are sorted into blocks, each for one expert (row_layout.py). A
block chooses its expert as a token does. So the programs are those of a step, with several rows for
each choice. A block without an expert reads no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mirage_hf.formats.coding import as_dtype
from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.settings import settings
from mirage_hf.trace.experts.form import ExpertsForm
from mirage_hf.trace.experts.gate import gate
from mirage_hf.trace.experts.row_layout import row_layout, row_sums
from mirage_hf.trace.experts.writer import ExpertsWriter, ParameterPart
from mirage_hf.trace.fake_mode import FakeOnceMode
from mirage_hf.trace.program import alike

#: Runs a program on its inputs.
Run = Callable[[list[Tensor]], list[Tensor]]


#: Rows of a block: the fewest that tensor cores multiply at once. Blocks of 64 rows were slower
#: than the library for the two mixtures that were measured (decision 027). Each block decodes its
#: expert's codes anew, so blocks of codes are longer: those of gpt-oss, the only ones measured,
#: take about as long with 32 rows as with 16, and serve twice as many tokens.
ROWS, ROWS_OF_CODES = 16, 32

#: Inputs of programs: the experts of blocks (blocks, 1), tokens (tokens, width), the tokens of rows
#: (blocks, 1, rows), results of the first program (blocks, 1, rows, width), and the routing weights
#: of rows (blocks, 1, rows, 1).
EXPERTS, GIVEN, TOKENS, BETWEEN, WEIGHTS = "experts", "given", "tokens", "between", "weights"


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of blocks of rows.

    Attributes:
        experts: How many experts there are. There are two blocks for each.
        chosen: How many experts a token chooses.
        rows: The rows of a block.
    """

    experts: int
    chosen: int
    rows: int

    @classmethod
    def of(cls, form: ExpertsForm, chosen: int) -> BlockSizes:
        """Return the sizes of blocks for experts. Each token chooses `chosen` of them."""
        rows = ROWS_OF_CODES if form.is_coded else ROWS
        return cls(len(form.first.tensors[0]), chosen, rows)

    @property
    def blocks(self) -> int:
        """How many blocks there are: each expert may have one that is not full."""
        return 2 * self.experts

    @property
    def tokens(self) -> int:
        """The most tokens for which the blocks suffice, whatever they choose."""
        return self.rows * self.experts // self.chosen


@dataclass(frozen=True, eq=False)
class BlocksProgram:
    """One of the two programs of blocks of rows.

    Attributes:
        graph: The program.
        inputs: What its inputs are: EXPERTS and others, or a part of a parameter, which is known by
            its number among those of the experts.
    """

    graph: KernelGraph
    inputs: Sequence[str | tuple[int, ParameterPart]]


def blocks_programs(
    form: ExpertsForm, sizes: BlockSizes, dtype: torch.dtype, weights_dtype: torch.dtype
) -> tuple[BlocksProgram, BlocksProgram]:
    """Return the programs of blocks: up to the second linear of an expert, and from it on.

    Args:
        form: The experts.
        sizes: The sizes of blocks.
        dtype: The dtype of the activations.
        weights_dtype: The dtype of the routing weights.

    Raises:
        GraphError: Its shapes or dtypes do not fit.
        TraceError: The function between the two linears is of another form.
    """
    first = _Program(form, sizes)
    given = first.input(GIVEN, (sizes.tokens, form.first.columns), dtype)
    tokens = first.input(TOKENS, (sizes.blocks, 1, sizes.rows), torch.int64)
    x = first.graph.take(given, tokens)
    if form.scales_inputs:
        x = as_dtype(first.graph, first.weighed(x, weights_dtype), dtype)
    with closing(FakeOnceMode()) as mode:
        h = gate(form, dtype, first.graph, partial(first.writer.linear, x, form.first), mode)
    second = _Program(form, sizes)
    shape = (sizes.blocks, 1, sizes.rows, form.second.columns)
    y = second.writer.linear(second.input(BETWEEN, shape, dtype), form.second)
    if form.scales_inputs:
        return first.ending_with(h, dtype), second.ending_with(y, dtype)
    # stock rounds no product of a float32 weight before the sum
    kept = torch.promote_types(dtype, weights_dtype)
    y = second.weighed(y, weights_dtype)
    return first.ending_with(h, dtype), second.ending_with(y, kept)


class _Program:
    """A program that is being written."""

    def __init__(self, form: ExpertsForm, sizes: BlockSizes):
        self.graph, self.sizes = new_kernel_graph(), sizes
        self.inputs: list[str | tuple[int, ParameterPart]] = []
        numbers = {id(x): number for number, x in enumerate(form.parameters)}
        experts = self.input(EXPERTS, (sizes.blocks, 1), torch.int64)
        self.writer = ExpertsWriter(
            self.graph, experts, lambda x, part: self.inputs.append((numbers[id(x)], part))
        )

    def input(self, name: str, dims: tuple[int, ...], dtype: torch.dtype) -> DTensor:
        """Add an input that is no parameter."""
        self.inputs.append(name)
        return self.graph.new_input(dims, dtype)

    def weighed(self, x: DTensor, dtype: torch.dtype) -> DTensor:
        """Return rows times their routing weights, which have a dtype."""
        weights = self.input(WEIGHTS, (self.sizes.blocks, 1, self.sizes.rows, 1), dtype)
        return self.graph.mul(*alike(self.graph, [x, weights]))

    def ending_with(self, y: DTensor, dtype: torch.dtype) -> BlocksProgram:
        """Return the program, with its result in a dtype."""
        self.graph.mark_output(as_dtype(self.graph, y, dtype))
        return BlocksProgram(self.graph, self.inputs)


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """Kernels of the blocks of some experts.

    Attributes:
        sizes: The sizes of the blocks.
        programs: The two programs.
        runs: What runs each.
        dtype: The dtype of the activations.
        weights_dtype: The dtype of the routing weights.
        skips_blocks: Whether `runs` read nothing for an expert or a token that does not exist.
            Otherwise, and where indices are checked, they read another one.
    """

    sizes: BlockSizes
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
            x: (tokens, width), at most `sizes.tokens`.
            index: (tokens, chosen). Others than experts choose none.
            weights: (tokens, chosen).
        """
        sizes = self.sizes
        missing = (0, 0, 0, sizes.tokens - len(x))  # one kernel serves all numbers of tokens
        index, weights = F.pad(index, missing, value=sizes.experts), F.pad(weights, missing)
        rows = row_layout(index, weights, sizes.experts, sizes.rows)
        experts, tokens = rows.experts, rows.tokens
        if not self.skips_blocks or settings().check_indices:
            experts, tokens = experts.clamp(max=sizes.experts - 1), tokens.clamp(min=0)
        given = {
            EXPERTS: experts[:, None],
            GIVEN: F.pad(x, missing).contiguous(),
            TOKENS: tokens[:, None],
            WEIGHTS: rows.weights[:, None, :, None],
        }
        given[BETWEEN] = self._run(0, form, given)
        y = self._run(1, form, given).view(-1, x.shape[-1])
        return row_sums(y, rows, len(x), x.dtype)

    def takes(self, x: Tensor, index: Tensor, weights: Tensor) -> bool:
        """Return whether tensors have the shapes and dtypes that the kernels were made for."""
        sizes, width = self.sizes, self.programs[0].graph.inputs[1].dims[-1]
        return (
            x.dim() == 2
            and x.shape[1] == width
            and 0 < len(x) <= sizes.tokens
            and index.shape == weights.shape == (len(x), sizes.chosen)
            and (x.dtype, weights.dtype) == (self.dtype, self.weights_dtype)
            and index.dtype in (torch.int32, torch.int64)
            and x.device == index.device == weights.device
        )

    def _run(self, number: int, form: ExpertsForm, given: Mapping[str, Tensor]) -> Tensor:
        """Return the result of one of the programs."""
        inputs = [
            given[what] if isinstance(what, str) else what[1].of(form.parameters[what[0]].detach())
            for what in self.programs[number].inputs
        ]
        return self.runs[number](inputs)[0]
