"""Lower a customized op: the values that its kernel stores, as if they were written out in ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mirage_hf.graph.block import BlockInput
from mirage_hf.graph.kernel import DTensor, KernelOp
from mirage_hf.search.block_definitions import Reduction, axis_uses, definitions
from mirage_hf.search.dim_classes import DimClasses
from mirage_hf.search.lowered_program import NotLowerableError
from mirage_hf.search.tensor_index import Index, TakenDim, aligned, axes_of
from mirage_hf.search.terms import TermBuilder


class ProgramLowering(Protocol):
    """The lowering of the program around the customized op: `lowering.Lowering`."""

    classes: DimClasses
    terms: TermBuilder

    def tensor(self, t: DTensor, index: Index) -> int:
        """Return the term of a tensor under an index."""

    def taken_dim(self, chooser: DTensor, places: Index) -> TakenDim:
        """Return the place of a dim whose elements an index chooses."""

    def joined(self, tensors: Sequence[DTensor], dim: int, index: Index) -> int:
        """Return inputs that lie end to end along a dim as one input."""


def lower_customized(lowering: ProgramLowering, op: KernelOp, t: DTensor, index: Index) -> int:
    """Return the term of an output of a customized op.

    Args:
        lowering: The program that the op belongs to.
        op: The customized op.
        t: One of its outputs.
        index: The index of `t`.

    Raises:
        NotLowerableError: If the kernel does something that terms cannot express.
    """
    axes = axes_of(index)
    if axes != index:
        raise NotLowerableError(
            "rope of what a kernel of the program stores: the search does not look into that"
        )
    return _StoredValue(lowering, op, t, axes).term()


class _StoredValue:
    """One output of a kernel, over the axes of its index and fresh axes for those it reduces."""

    def __init__(
        self, lowering: ProgramLowering, op: KernelOp, t: DTensor, index: tuple[str | None, ...]
    ):
        assert op.block is not None
        self.lowering, self.terms = lowering, lowering.terms
        self.op, self.block = op, op.block
        self.output = op.block.outputs[op.outputs.index(t)]
        self.made = definitions(op.block)
        #: The axis that numbers the splits of another axis, by that other axis.
        self.splits = {a.name: a.split_axis for a in op.block.axes if a.split_axis is not None}
        if op.block.cluster is not None and op.block.cluster.name in self.splits.values():
            raise NotLowerableError(
                "a kernel of the program adds up splits among the blocks of a cluster: "
                "the search does not look into that"
            )
        #: The program's axis for each axis of the block graph, None for one of size 1.
        self.names = self._axis_names(index)
        self._terms: dict[str, int] = {}

    def term(self) -> int:
        return self._value(self.output.value)

    def _axis_names(self, index: tuple[str | None, ...]) -> dict[str, str | None]:
        names = {a: name for a, name in zip(self.output.axes, index, strict=True) if a is not None}
        for use in axis_uses(self.op):
            if use.axis not in names:
                fresh = self.block.axis(use.axis).size > 1
                taken = tuple(names.values())
                names[use.axis] = (
                    self.lowering.classes.axis(use.tensor, use.dim, taken) if fresh else None
                )
        for a in self.block.axes:
            if a.name not in names and a.name not in self.splits.values() and a.size > 1:
                raise NotLowerableError(
                    f"axis {a.name} of a kernel is that of joined inputs alone: "
                    "the search does not fuse it yet"
                )
        return names

    def _value(self, arg: str | float) -> int:
        """Return a value of the block graph, or a number, as a term."""
        if not isinstance(arg, str):
            return self.terms.constant(arg)
        if arg not in self._terms:
            made = self.made[arg]
            if isinstance(made, BlockInput):
                self._terms[arg] = self._loaded(made)
            elif isinstance(made, Reduction):
                self._terms[arg] = self._reduced(made)
            else:
                args = [self._value(x) for x in made.args]
                self._terms[arg] = self.terms.elementwise(made.fn, args, made.attrs)
        return self._terms[arg]

    def _reduced(self, made: Reduction) -> int:
        arg = self._value(made.arg)
        axis = self.names.get(made.axis)
        if axis is None:
            return arg
        split = self.names.get(self.splits.get(made.axis, ""))
        if split is None:
            return self.terms.reduce(made.kind, arg, axis)
        return self.terms.reduce_splits(made.kind, arg, axis, split, made.axis)

    def _loaded(self, i: BlockInput) -> int:
        if i.bounds is not None:
            raise NotLowerableError(
                "bounds that a kernel of the program reads: the search does not look into that"
            )
        if i.rotation is not None or i.padding is not None:
            raise NotLowerableError(
                "an input that a kernel of the program rotates or pads: "
                "the search does not look into that"
            )
        index: Index = tuple(None if a is None else self.names[a] for a in i.axes)
        if i.taken is not None:
            chooser = self.op.inputs[i.taken.index]
            assert isinstance(chooser, DTensor)
            places = tuple(None if a is None else self.names[a] for a in i.taken.axes)
            place = self.lowering.taken_dim(chooser, places)
            index = (*index[: i.taken.dim], place, *index[i.taken.dim + 1 :])
        tensors = [x for s in i.sources if isinstance(x := self.op.inputs[s], DTensor)]
        if len(tensors) == 1:
            return self.lowering.tensor(tensors[0], aligned(index, tensors[0].dims))
        assert i.joined is not None
        return self.lowering.joined(tensors, i.axes.index(i.joined), index)
