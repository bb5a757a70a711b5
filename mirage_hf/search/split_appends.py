"""Take the cache appends out of a program, so that the search sees only what it computes.

The program without appends returns the rows that it would append. Once kernels are found for it,
the appends are put back. Then the kernel that computes the rows may store them into the cache
itself.

This works only if the program does not read the slots that it writes (see `written_slots`). Other
appends stay library calls, in the program's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mirage_hf.graph.block import BlockOutput, Role
from mirage_hf.graph.effects import APPEND, parts_of
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.graph.rebuild import inline
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table
from mirage_hf.search.written_slots import WrittenSlots


@dataclass(frozen=True)
class _Result:
    """An output of the program.

    Attributes:
        append: The append that returns this output, or None.
        output: The number of the same output in the program without appends. For an append, it is
            the number of the output that holds the rows, or None if the rows are an input.
    """

    append: KernelOp | None
    output: int | None


@dataclass(frozen=True)
class SplitAppends:
    """A program, and the same program without its appends.

    Attributes:
        program: The program as it is.
        graph: The program without appends. It returns the rows that it computes for them.
        results: Where each output of the program comes from.
    """

    program: KernelGraph
    graph: KernelGraph
    results: tuple[_Result, ...]

    def join(self, ugraph: UGraph) -> UGraph:
        """Return the µGraph of `program` for one of `graph`."""
        kernels = KernelGraph()
        new = {t.index: kernels.input_like(t) for t in self.program.inputs}
        source, copies = _with_copies(ugraph.kernels, self._appended_inputs())
        made = inline(kernels, source, [new[t.index] for t in self.program.inputs])
        copied = {self.program.inputs[n].index: made[k] for n, k in copies.items()}
        outputs = []
        for result in self.results:
            value = made[result.output] if result.output is not None else None
            if result.append is not None:
                cache, rows, position = parts_of(result.append)
                if value is None:
                    value = copied.get(rows.index, new[rows.index])
                value = kernels.cache_append(new[cache.index], value, new[position.index])
            assert value is not None
            outputs.append(value)
        kernels.mark_output(*outputs)
        return UGraph(self.program, kernels)

    def _appended_inputs(self) -> list[int]:
        """Return the inputs, by number, that the program appends unchanged."""
        rows = {
            parts_of(result.append)[1].index
            for result in self.results
            if result.append is not None and result.output is None
        }
        return [n for n, t in enumerate(self.program.inputs) if t.index in rows]


def split_appends(program: KernelGraph) -> SplitAppends | None:
    """Take the appends out of a program.

    Returns:
        The program with and without appends. None if it has no appends, if an append must stay
        where it is, or if the program has no other ops.
    """
    appends = [op for op in program.ops if op.name == APPEND]
    if not appends or not _may_be_split(program, appends):
        return None
    graph = KernelGraph()
    new = {t.index: graph.input_like(t) for t in program.inputs}
    for op in program.ops:
        if op.name != APPEND:
            args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
            new[op.outputs[0].index] = graph.apply(op.name, args, dict(op.attrs))
    inputs = {t.index for t in program.inputs}
    append_of = {op.outputs[0].index: op for op in appends}
    results: list[_Result] = []
    returned: list[DTensor] = []
    for t in program.outputs:
        append = append_of.get(t.index)
        needed = t if append is None else parts_of(append)[1]
        if append is not None and needed.index in inputs:
            results.append(_Result(append, None))
            continue
        if new[needed.index] not in returned:
            returned.append(new[needed.index])
        results.append(_Result(append, returned.index(new[needed.index])))
    if not returned:
        return None
    graph.mark_output(*returned)
    return SplitAppends(program, graph, tuple(results))


def _may_be_split(program: KernelGraph, appends: Sequence[KernelOp]) -> bool:
    """Return True if no result of the program depends on when its appends happen."""
    caches = [parts_of(op)[0].index for op in appends]
    if len(set(caches)) < len(caches) or any(op.block is not None for op in program.ops):
        return False
    inputs = {t.index for t in program.inputs}
    outputs = {t.index for t in program.outputs}
    read = {x.index for op in program.ops for x in op.inputs if isinstance(x, DTensor)}
    for op in appends:
        cache, _, position = parts_of(op)
        out = op.outputs[0].index
        if not {cache.index, position.index} <= inputs or out in read or out not in outputs:
            return False
    ends = {parts_of(op)[0].index: parts_of(op)[2].index for op in appends}
    return WrittenSlots(program, ends).are_unread()


def _with_copies(kernels: KernelGraph, wanted: Sequence[int]) -> tuple[KernelGraph, dict[int, int]]:
    """Return kernels that also store some inputs, which they hold in registers anyway.

    Args:
        kernels: A kernel graph.
        wanted: The inputs to store, by number.

    Returns:
        The kernel graph with more outputs, and the output that holds each input. An input is
        missing if no kernel holds it outside of its loop.
    """
    copies: dict[int, int] = {}
    if not wanted:
        return kernels, copies
    graph = KernelGraph()
    new = {t.index: graph.input_like(t) for t in kernels.inputs}
    copied: list[DTensor] = []
    owners = {n: _last_owner(kernels, kernels.inputs[n]) for n in wanted}
    for number, op in enumerate(kernels.ops):
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        if op.block is None:
            new[op.outputs[0].index] = graph.apply(op.name, args, dict(op.attrs))
            continue
        owned = [n for n in wanted if owners[n] == number]
        more = [_as_output(op, kernels.inputs[n]) for n in owned]
        outputs = (*op.block.outputs, *(o for o in more if o is not None))
        tensors = [x for x in args if isinstance(x, DTensor)]
        made = graph.customized(tensors, replace(op.block, outputs=outputs))
        new |= {t.index: y for t, y in zip(op.outputs, made, strict=False)}
        for n, y in zip(owned, made[len(op.outputs) :], strict=True):
            copies[n] = len(kernels.outputs) + len(copied)
            copied.append(y)
    graph.mark_output(*(new[t.index] for t in kernels.outputs), *copied)
    return graph, copies


def _last_owner(kernels: KernelGraph, t: DTensor) -> int | None:
    """Return the last kernel that can store an input, by number."""
    owners = [n for n, op in enumerate(kernels.ops) if _as_output(op, t) is not None]
    return max(owners, default=None)


def _as_output(op: KernelOp, t: DTensor) -> BlockOutput | None:
    """Return an input of a kernel as one more output, or None if only the loop reads it."""
    block = op.block
    if block is None:
        return None
    for i in block.inputs:
        options = (i.bounds, i.rotation, i.padding, i.taken)
        as_it_is = all(option is None for option in options)
        is_input = as_it_is and len(i.sources) == 1 and op.inputs[i.sources[0]] is t
        if is_input and all(a is None or block.role(a) is not Role.LOOP for a in i.axes):
            return BlockOutput(i.name, i.axes, table.dtype_name(t.dtype))
    return None
