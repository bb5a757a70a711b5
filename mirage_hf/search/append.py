"""Programs that append to caches: searched for the rows that they append, which the kernel that computes them then stores in place.

A program may append only where the slots written are not read: `cache` is read within bounds that end at the position of the
append, so it does not matter when the rows arrive. That is followed through the program (`_Reads`); appends for which it does
not hold stay library calls, in the program's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mirage_hf.graph.block import BlockGraph, BlockOutput, Role
from mirage_hf.graph.effects import APPEND, parts_of
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp, inline
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table


@dataclass(frozen=True)
class SplitAppends:
    """`graph` is `program` without its appends; it returns the rows that it computes in their place.

    outputs: for each output of the program, the output of `graph`, or the append with the output that its rows are (None: they are
    an input).
    """

    program: KernelGraph
    graph: KernelGraph
    outputs: tuple[tuple[KernelOp | None, int | None], ...]

    def join(self, ugraph: UGraph) -> UGraph:
        """The µGraph of `program` for one of `graph`."""
        copies = {
            rows.index
            for op, at in self.outputs
            if op is not None and at is None
            for rows in parts_of(op)[1:2]
        }
        kernels = KernelGraph()
        new = {t.index: kernels.input_like(t) for t in self.program.inputs}
        source, copied = _with_copies(
            ugraph.kernels, [n for n, t in enumerate(self.program.inputs) if t.index in copies]
        )
        made = inline(kernels, source, [new[t.index] for t in self.program.inputs])
        rows_of = {self.program.inputs[n].index: made[k] for n, k in copied.items()}
        results = []
        for op, at in self.outputs:
            if op is None:
                results.append(made[at])  # type: ignore[index]
                continue
            cache, rows, position = parts_of(op)
            what = made[at] if at is not None else rows_of.get(rows.index, new[rows.index])
            results.append(kernels.cache_append(new[cache.index], what, new[position.index]))
        kernels.mark_output(*results)
        return UGraph(self.program, kernels)


def split_appends(program: KernelGraph) -> SplitAppends | None:
    """Take the appends out of a program; None where there are none, or one of them must stay where it is."""
    appends = [op for op in program.ops if op.name == APPEND]
    inputs = {t.index: n for n, t in enumerate(program.inputs)}
    read = {x.index for op in program.ops for x in op.inputs if isinstance(x, DTensor)}
    outputs = {t.index for t in program.outputs}
    made = {t.index: op for op in program.ops for t in op.outputs}
    if (
        not appends
        or any(op.block is not None for op in program.ops)
        or len({parts_of(op)[0].index for op in appends}) < len(appends)
    ):
        return None
    for op in appends:
        cache, _, position = parts_of(op)
        out = op.outputs[0].index
        if (
            cache.index not in inputs
            or position.index not in inputs
            or out in read
            or out not in outputs
        ):
            return None
    if not _Reads(program, {parts_of(op)[0].index: parts_of(op)[2].index for op in appends}).safe():
        return None
    graph = KernelGraph()
    new = {t.index: graph.input_like(t) for t in program.inputs}
    for op in program.ops:
        if op.name != APPEND:
            args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
            new[op.outputs[0].index] = graph.apply(op.name, args, dict(op.attrs))
    places: list[tuple[KernelOp | None, int | None]] = []
    returned: list[DTensor] = []
    for t in program.outputs:
        append = made.get(t.index) if t.index in made and made[t.index].name == APPEND else None
        wanted = parts_of(append)[1] if append is not None else t
        if append is not None and wanted.index in inputs:
            places.append((append, None))
            continue
        if new[wanted.index] not in returned:
            returned.append(new[wanted.index])
        places.append((append, returned.index(new[wanted.index])))
    if not returned:
        return None
    graph.mark_output(*returned)
    return SplitAppends(program, graph, tuple(places))


def _with_copies(kernels: KernelGraph, wanted: list[int]) -> tuple[KernelGraph, dict[int, int]]:
    """The kernels with more outputs: inputs (by number) that a kernel has in registers anyway. The outputs that
    they are, by number of the input."""
    copied: dict[int, int] = {}
    if not wanted:
        return kernels, copied
    graph = KernelGraph()
    new = {t.index: graph.input_like(t) for t in kernels.inputs}
    more: list[DTensor] = []
    last = {n: _last_owner(kernels, kernels.inputs[n]) for n in wanted}
    for number, op in enumerate(kernels.ops):
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        if op.block is None:
            new[op.outputs[0].index] = graph.apply(op.name, args, dict(op.attrs))
            continue
        block, added = op.block, []
        for n in wanted:
            if last[n] == number:
                value = _owned(op, kernels.inputs[n])
                assert value is not None
                block = replace(block, outputs=(*block.outputs, value))
                added.append(n)
        made = graph.customized([x for x in args if isinstance(x, DTensor)], block)
        new |= {t.index: y for t, y in zip(op.outputs, made, strict=False)}
        for n, y in zip(added, made[len(op.outputs) :], strict=True):
            copied[n] = len(kernels.outputs) + len(more)
            more.append(y)
    graph.mark_output(*(new[t.index] for t in kernels.outputs), *more)
    return graph, copied


def _last_owner(kernels: KernelGraph, t: DTensor) -> int | None:
    return max((n for n, op in enumerate(kernels.ops) if _owned(op, t) is not None), default=None)


def _owned(op: KernelOp, t: DTensor) -> BlockOutput | None:
    """An input of a kernel as one more output, where it is read outside the loop."""
    block: BlockGraph | None = op.block
    if block is None:
        return None
    for i in block.inputs:
        mine = (
            i.bounds is None
            and i.rotation is None
            and i.padding is None
            and len(i.sources) == 1
            and op.inputs[i.sources[0]] is t
        )
        if mine and all(a is None or block.role(a) is not Role.LOOP for a in i.axes):
            return BlockOutput(i.name, i.axes, table.dtype_name(t.dtype))
    return None


_Open = frozenset[tuple[int, int]]
"""(cache, dim): a tensor depends on the slots of a cache along that dim, those that are written among them."""
_Marks = tuple[_Open, _Open]


@dataclass
class _Reads:
    """Where the slots that are written could be seen: a dim by dim walk through a program.

    ends: the position of the append to each cache, by index. `shut` holds (position, dim) along which a tensor is zero from that
    position on.
    """

    program: KernelGraph
    ends: dict[int, int]
    opened: dict[int, _Open] = field(default_factory=dict)
    shut: dict[int, _Open] = field(default_factory=dict)

    def safe(self) -> bool:
        """Whether no output depends on a slot that is written."""
        for t in self.program.inputs:
            self.opened[t.index] = (
                frozenset([(t.index, len(t.dims) - 2)]) if t.index in self.ends else frozenset()
            )
            self.shut[t.index] = frozenset()
        for op in self.program.ops:
            if op.name == APPEND:
                if self.opened[parts_of(op)[1].index]:
                    return False
                self.opened[op.outputs[0].index] = self.shut[op.outputs[0].index] = frozenset()
            else:
                marks = self._marks(op)
                if marks is None:
                    return False
                self.opened[op.outputs[0].index], self.shut[op.outputs[0].index] = marks
        return not any(self.opened[t.index] for t in self.program.outputs)

    def _marks(self, op: KernelOp) -> _Marks | None:
        """Along what the output is open, and along what it is shut; None where a slot that is written may be seen in all of it."""
        tensors, rank = [x for x in op.inputs if isinstance(x, DTensor)], len(op.outputs[0].dims)
        rule = _RULES.get(op.name) or _RULES.get(table.OPS[op.name].kind)
        if rule is not None:
            return rule(self, op, tensors, rank)
        return None if any(self.opened[t.index] for t in tensors) else (frozenset(), frozenset())

    def _renamed(self, t: DTensor, to: dict[int, int]) -> _Marks | None:
        """What a tensor is open and shut along, its dims renamed; None where it is open along a dim that ends here."""
        opened, shut = self.opened[t.index], self.shut[t.index]
        if any(d not in to and (self.ends[c], d) not in shut for c, d in opened):
            return None
        return _moved(opened, to), _moved(shut, to)

    def _matmul(self, op: KernelOp, tensors: Sequence[DTensor], rank: int) -> _Marks | None:
        a, b = tensors
        summed = ((a, len(a.dims) - 1), (b, len(b.dims) - 2))
        ended = {self.ends[c] for t, d in summed for c, at in self.opened[t.index] if at == d}
        if not ended <= {p for t, d in summed for p, at in self.shut[t.index] if at == d}:
            return None
        maps = [
            (t, {d: rank - len(t.dims) + d for d in range(len(t.dims)) if d != s})
            for t, s in summed
        ]
        opened, shut = (
            frozenset[tuple[int, int]]().union(*(_moved(marks[t.index], to) for t, to in maps))
            for marks in (self.opened, self.shut)
        )
        return opened, shut

    def _permute(self, op: KernelOp, tensors: Sequence[DTensor], rank: int) -> _Marks | None:
        order = [o % rank for o in dict(op.attrs)["order"]]
        if order[0] and self.opened[tensors[0].index]:  # a position counts along dim 0 of its cache
            return None
        return self._renamed(tensors[0], {o: d for d, o in enumerate(order)})

    def _bounded(self, op: KernelOp, tensors: Sequence[DTensor], rank: int) -> _Marks | None:
        """within, softmax"""
        x, dim = tensors[0], dict(op.attrs)["dim"] % rank
        # a softmax of zeros is not zero, so what was shut along other dims is not any more
        opened, shut = (
            self.opened[x.index],
            self.shut[x.index] if op.name == "within" else frozenset(),
        )
        if len(tensors) == 3:
            hi = tensors[2].index
            return frozenset((c, d) for c, d in opened if (d, self.ends[c]) != (dim, hi)), shut | {
                (hi, dim)
            }
        return None if any(d == dim for _, d in opened) else (opened, shut)

    def _reduce(self, op: KernelOp, tensors: Sequence[DTensor], rank: int) -> _Marks | None:
        dim = dict(op.attrs)["dim"] % rank
        return self._renamed(tensors[0], {d: d for d in range(rank) if d != dim})

    def _elementwise(self, op: KernelOp, tensors: Sequence[DTensor], rank: int) -> _Marks | None:
        maps = [(t, {d: rank - len(t.dims) + d for d in range(len(t.dims))}) for t in tensors]
        opened = frozenset[tuple[int, int]]().union(
            *(_moved(self.opened[t.index], to) for t, to in maps)
        )
        zeros = [_moved(self.shut[t.index], to) for t, to in maps]
        if op.name == "mul":
            return opened, frozenset[tuple[int, int]]().union(*zeros)
        if op.name in ("cast", "neg") or (op.name == "div" and isinstance(op.inputs[0], DTensor)):
            return opened, zeros[0]
        both = op.name in ("add", "sub") and len(tensors) == len(op.inputs)
        return opened, frozenset.intersection(*zeros) if both else frozenset()

    def _along_last(self, op: KernelOp, tensors: Sequence[DTensor], rank: int) -> _Marks | None:
        """Norms, rope"""
        opened = self.opened[tensors[0].index]
        if any(d == rank - 1 for _, d in opened) or any(self.opened[t.index] for t in tensors[1:]):
            return None
        return opened, frozenset()


_RULES: dict[str, Callable[[_Reads, KernelOp, Sequence[DTensor], int], _Marks | None]] = {
    "matmul": _Reads._matmul,
    "permute": _Reads._permute,
    "within": _Reads._bounded,
    "softmax": _Reads._bounded,
    "rms_norm": _Reads._along_last,
    "layer_norm": _Reads._along_last,
    "rope": _Reads._along_last,
    "reduce": _Reads._reduce,
    "elementwise": _Reads._elementwise,
}
"""By op, else by kind of op."""


def _moved(marks: _Open, to: dict[int, int]) -> _Open:
    return frozenset((c, to[d]) for c, d in marks if d in to)
