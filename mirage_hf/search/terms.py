"""Build the terms of a lowered program. Equal terms are built once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from mirage_hf.graph.block import Rotation
from mirage_hf.ops import table
from mirage_hf.search.lowered_program import LoweredInput, LoweredProgram, NotLowerableError, Term
from mirage_hf.search.tensor_index import Index, PaddedAxis, TakenDim, axes_of, unpadded

#: Powers that are multiplied out.
_SMALL_POWERS = (2.0, 3.0, 4.0)


class TermBuilder:
    """The terms and inputs of a program that is being lowered. A term is named by its number."""

    def __init__(self) -> None:
        self.terms: list[Term] = []
        self.inputs: list[LoweredInput] = []
        self._numbers: dict[Term, int] = {}

    def _add(self, term: Term) -> int:
        if term not in self._numbers:
            self._numbers[term] = len(self.terms)
            self.terms.append(term)
        return self._numbers[term]

    def constant(self, value: float) -> int:
        """Return a number as a term."""
        return self._add(Term("constant", value=float(value)))

    def op(
        self,
        op: str,
        *args: int,
        fn: str = "",
        attrs: tuple[tuple[str, float], ...] = (),
    ) -> int:
        """Return an elementwise op, which depends on the axes of all its arguments."""
        axes = {axis for arg in args for axis in self.terms[arg].axes}
        return self._add(Term(op, args, tuple(sorted(axes)), fn=fn, attrs=attrs))

    def reduce(self, kind: str, arg: int, axis: str) -> int:
        """Return the "sum" or "max" of a term over an axis.

        `arg` may hold partial results, one for each split of another axis. If `axis` numbers these
        splits, the result is the reduction over that whole other axis.
        """
        term = self.terms[arg]
        if term.op == "partial" and term.fn == kind and term.index[0] == axis:
            return self.reduce(kind, term.args[0], term.axis)
        axes = set(term.axes) - {axis}
        return self._add(Term(kind, (arg,), tuple(sorted(axes)), axis=axis))

    def reduce_splits(self, kind: str, arg: int, axis: str, split: str, name: str) -> int:
        """Return a placeholder for the reductions over each split of an axis.

        A later `reduce` over `split` resolves it. `name` is the axis in the kernel's block graph,
        for the error if nothing resolves it.
        """
        axes = {*self.terms[arg].axes, split} - {axis}
        index = (split, name)
        return self._add(
            Term("partial", (arg,), tuple(sorted(axes)), -1, index, fn=kind, axis=axis)
        )

    def read(self, source: LoweredInput, index: Index) -> int:
        """Return the term that reads an input under an index.

        Raises:
            NotLowerableError: If one input would be rotated or padded along two dims, or along the
                dim of its sources.
        """
        rotations = [
            (d, place.how, place.width)
            for d, place in enumerate(map(unpadded, index))
            if isinstance(place, Rotation)
        ]
        if len(rotations) > 1 or (
            rotations and (source.bounds is not None or source.joined == rotations[0][0])
        ):
            raise NotLowerableError(
                "an input that is rotated along two dims, or along the dim of its sources, "
                "ends a kernel"
            )
        paddings = [(d, p.value) for d, p in enumerate(index) if isinstance(p, PaddedAxis)]
        if len(paddings) > 1 or (
            paddings and (source.bounds is not None or len(source.sources) > 1)
        ):
            raise NotLowerableError(
                "an input that is padded along two dims, or lies in several tensors, ends a kernel"
            )
        source = replace(
            source,
            taken=self._taken(source, index),
            rotation=rotations[0] if rotations else None,
            padding=paddings[0] if paddings else None,
        )
        if source not in self.inputs:
            self.inputs.append(source)
        names = axes_of(index)
        carried = tuple(sorted(axis for axis in names if axis))
        return self._add(Term("input", (), carried, self.inputs.index(source), names))

    def _taken(self, source: LoweredInput, index: Index) -> tuple[int, int, tuple[int, ...]] | None:
        """Return the dim of an input whose elements an index chooses, as `LoweredInput.taken`."""
        taken = [(d, place) for d, place in enumerate(index) if isinstance(place, TakenDim)]
        if not taken:
            return None
        (dim, place), *others = taken
        if others or source.bounds is not None or source.joined == dim:
            raise NotLowerableError(
                "an input of which indices choose elements along two dims, or along the dim of its "
                "sources, ends a kernel"
            )
        return dim, place.number, place.sizes

    def elementwise(
        self, fn: str, args: Sequence[int], attrs: tuple[tuple[str, float], ...]
    ) -> int:
        """Return an elementwise op of the table, written out unless it is opaque.

        Raises:
            NotLowerableError: If it is a cast to an integer dtype.
        """
        row = table.OPS[fn]
        if fn == "cast":
            dtype = dict(attrs)["dtype"]
            if table.as_dtype(dtype) not in table.COMPUTE_DTYPES:  # type: ignore[arg-type]
                raise NotLowerableError(
                    f"cast to {dtype} ends a kernel: it rounds to whole numbers"
                )
            return args[0]
        if fn == "pow" and self._is_small_power(args[1]):
            power = args[0]
            for _ in range(int(self.terms[args[1]].value) - 1):
                power = self.op("mul", power, args[0])
            return power
        if row.opaque or fn == "select":
            return self.op("opaque", *args, fn=fn, attrs=attrs)
        if fn == "ratio":
            return self.op("div", *args)
        names = ("add", "sub", "mul", "div", "exp")
        algebra: dict[str, Callable[..., int]] = {name: partial(self.op, name) for name in names}
        algebra["neg"] = lambda x: self.op("mul", self.constant(-1.0), x)
        return row.program(**dict(attrs)).evaluate(algebra, args, self.constant)

    def _is_small_power(self, exponent: int) -> bool:
        term = self.terms[exponent]
        return term.op == "constant" and term.value in _SMALL_POWERS


def without_partials(program: LoweredProgram) -> LoweredProgram:
    """Remove the placeholders of partial results, which nothing reads once they are combined.

    Raises:
        NotLowerableError: If an output needs partial results that are not combined.
    """
    if all(term.op != "partial" for term in program.terms):
        return program
    numbers = {old: new for new, old in enumerate(sorted(_used(program)))}
    terms = tuple(_renumbered(program.terms[old], numbers) for old in numbers)
    outputs = tuple(replace(output, term=numbers[output.term]) for output in program.outputs)
    named = {axis for term in terms for axis in (*term.axes, term.axis)}
    named |= {axis for output in outputs for axis in output.index if axis}
    sizes = {axis: size for axis, size in program.sizes.items() if axis in named}
    return replace(program, sizes=sizes, terms=terms, outputs=outputs)


def _used(program: LoweredProgram) -> set[int]:
    """Return the terms that the outputs need."""
    used: set[int] = set()
    waiting = [output.term for output in program.outputs]
    while waiting:
        number = waiting.pop()
        term = program.terms[number]
        if term.op == "partial":
            raise NotLowerableError(
                f"a kernel of the program stores the {term.fn} over each split of axis "
                f"{term.index[1]}, and they are not combined by a {term.fn} over the splits alone: "
                "the search does not look into that"
            )
        if number not in used:
            used.add(number)
            waiting += term.args
    return used


def _renumbered(term: Term, numbers: dict[int, int]) -> Term:
    return replace(term, args=tuple(numbers[arg] for arg in term.args))
