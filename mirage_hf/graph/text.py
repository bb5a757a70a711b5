"""Read graphs from text, as `str(graph)` prints it or as a user writes it.

A graph has one line per tensor. Block graphs are indented stages:

    %x = input float16 (16, 4096)
    %w = input float16 (4096, 4096) strides (1, 4096)
    %y = matmul(%x, %w) : float16 (16, 4096)
    return %y

The first line of a block graph lists its axes with their roles, such as `m=16 grid`, `c=4 cluster`
and `k=4096 loop split by c`. It has a line for each tile that it loads, such as
`%x_swapped = load 0 [m, k] rotated k swap halves`. In `%w = load 1 [1, n, k] taken 0 of 8 by 2 [m]`
operand 2 is an index that chooses among the 8 elements of dim 0.

Everything after # is a comment, and the types after ':' may be left out. `graph/printing.py` prints
graphs. Reading builds the graph through the ordinary builders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mirage_hf import errors
from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Padding,
    Role,
    Rotation,
    Stage,
    Taken,
)
from mirage_hf.graph.dim import Dim
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph
from mirage_hf.graph.printing import format_block_graph, format_graph, tensor_type
from mirage_hf.ops import table

__all__ = ["format_block_graph", "format_graph", "parse_graph"]


def parse_graph(text: str, source: str = "text") -> KernelGraph:
    """Build the graph that a text describes.

    Args:
        text: The text.
        source: A name for the text, for error messages.

    Raises:
        FormatError: If the text does not parse or the graph cannot be built. The message names the
        line.
    """
    return _Parser(text, source).graph()


# -- tokens ----------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""
    (?P<skip>[ \t\r]+|\#[^\n]*)
    |(?P<newline>\n)
    |(?P<name>%[^\s,=:()\[\]{}#%]+)
    |(?P<number>-?(?:\d[\w.]*(?:(?<=[eE])[+-]\w+)?|inf\b))
    |(?P<word>[^\W\d][\w.]*)
    |(?P<mark><=|[,=:()\[\]{}])
    |(?P<other>.)
    """,
    re.VERBOSE,
)
_KINDS = {"name": "a %name", "number": "a number", "word": "a word", "end": "the end"}
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(text: str) -> Iterator[_Token]:
    line = 1
    for m in _TOKEN.finditer(text):
        kind = str(m.lastgroup)
        line += kind == "newline"
        if kind not in ("skip", "newline"):
            yield _Token(kind, m.group(), line)
    yield _Token("end", "the end", line)


class _TokenReader:
    """Reads tokens one by one. Errors name the line."""

    def __init__(self, text: str, source: str) -> None:
        self.tokens, self.source, self.position = list(_tokens(text)), source, 0

    @property
    def next(self) -> _Token:
        return self.tokens[self.position]

    def error(self, what: str, back: int = 0) -> errors.FormatError:
        """Return an error at the next token, or `back` tokens before it."""
        line = self.tokens[self.position - back].line
        return errors.FormatError(f"{self.source}, line {line}: {what}; str(graph) shows the form")

    def build(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a builder. If it rejects its arguments, raise the error at the last token."""
        try:
            return make(*args, **kwargs)
        except errors.GraphError as e:
            raise self.error(str(e), back=1) from e

    def take(self, kind: str) -> str:
        """Take a token of a kind."""
        return self._take_if(self.next.kind == kind, _KINDS[kind])

    def expect(self, *texts: str) -> str:
        """Take one of these words or marks."""
        return self._take_if(any(map(self.sees, texts)), " or ".join(texts))

    def _take_if(self, fits: bool, wanted: str) -> str:
        token = self.next
        if not fits:
            raise self.error(f"expected {wanted}, found {token.text[:60]!r}")
        self.position += 1
        return token.text

    def sees(self, text: str) -> bool:
        """Return whether the next token is this word or mark."""
        return self.next.text == text and self.next.kind != "end"

    def takes(self, text: str) -> bool:
        """Take the next token if it is this word or mark. Return whether it was."""
        seen = self.sees(text)
        self.position += seen
        return seen

    def many(
        self, item: Callable[[], Any], start: str | None = None, end: str | None = None
    ) -> list[Any]:
        """Return items between commas, and between brackets if given."""
        if start and end:
            self.expect(start)
            if self.takes(end):
                return []
        items = [item()]
        while self.takes(","):
            items.append(item())
        if end:
            self.expect(end)
        return items

    def number(self) -> int | float:
        text = self.take("number")
        try:
            return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        except ValueError:
            raise self.error(f"{text[:60]!r} is not a number", back=1) from None

    def integer(self) -> int:
        value = self.number()
        if not isinstance(value, int):
            raise self.error(f"{value!r} is not an integer", back=1)
        return value


class _Parser(_TokenReader):
    """Recursive descent: one method per construct of the language, in the order of the printer."""

    # -- kernel graphs -----------------------------------------------------------------------------

    def graph(self) -> KernelGraph:
        graph = KernelGraph()
        tensors: dict[str, DTensor] = {}
        while not self.takes("return"):
            for t in self.statement(graph, tensors):
                tensors[t.name] = t
        if self.next.kind == "name":
            graph.mark_output(*self.many(lambda: self.tensor(tensors)))
        self.take("end")
        return graph

    def tensor(self, tensors: dict[str, DTensor]) -> DTensor:
        name = self.value_name()
        if name not in tensors:
            raise self.error(f"no tensor %{name} comes before", back=1)
        return tensors[name]

    def value_name(self) -> str:
        return self.take("name")[1:]

    def statement(self, graph: KernelGraph, tensors: dict[str, DTensor]) -> list[DTensor]:
        names = self.many(self.value_name)
        self.expect("=")
        op = self.take("word")
        if op == "input":
            return [self.input(graph, names)]
        operands, attrs = self.arguments(lambda: self.tensor(tensors))
        types = self.many(self.type) if self.takes(":") else None
        if op == CUSTOMIZED:
            made = self.build(graph.customized, operands, self.block(), names)
        else:
            made = [self.build(graph.apply, op, operands, attrs, self.single(names))]
        if types is not None and types != [(table.dtype_name(t.dtype), t.dims) for t in made]:
            raise self.error(
                f"{op} gives {', '.join(map(tensor_type, made))}, not what is written after ':'",
                back=1,
            )
        return made

    def input(self, graph: KernelGraph, names: list[str]) -> DTensor:
        dtype, dims = self.type()
        strides = tuple(self.many(self.integer, "(", ")")) if self.takes("strides") else None
        name = self.single(names)
        constant = self.takes("constant")
        made: DTensor = self.build(graph.new_input, dims, dtype, strides, name, constant=constant)
        return made

    def single(self, names: list[str]) -> str:
        """Return the only name."""
        if len(names) != 1:
            raise self.error(
                f"{len(names)} names for one tensor; only customized has several outputs", back=1
            )
        return names[0]

    def type(self) -> tuple[str, tuple[int, ...]]:
        return self.take("word"), tuple(self.many(self.dim, "(", ")"))

    def dim(self) -> int:
        following = self.tokens[min(self.position + 1, len(self.tokens) - 1)]
        called_inf = self.next.text == "inf" and following.text == "<="  # a name, not a number
        if self.next.kind != "word" and not called_inf:
            return self.integer()
        name = self.take(self.next.kind)
        self.expect("<=")
        return self.build(Dim, name, self.integer())  # type: ignore[no-any-return]

    def arguments(self, operand: Callable[[], Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return operands and attributes of `(operands, name=value, …)`."""
        operands: list[Any] = []
        attrs: dict[str, Any] = {}

        def argument() -> None:
            if self.next.kind == "word":
                name = self.take("word")
                self.expect("=")
                attrs[name] = self.attribute()
            elif self.next.kind == "number":
                operands.append(self.number())
            else:
                operands.append(operand())

        self.many(argument, "(", ")")
        return operands, attrs

    def attribute(self) -> Any:
        if self.sees("("):
            return tuple(self.many(self.number, "(", ")"))
        if self.next.kind == "number":
            return self.number()
        word = self.take("word")
        return _FLAGS.get(word, word)

    # -- block graphs ------------------------------------------------------------------------------

    def block(self) -> BlockGraph:
        self.expect("{")
        self.expect("axes")
        has_axes = self.next.kind == "word" and self.tokens[self.position + 1].text == "="
        axes = tuple(self.many(self.axis)) if has_axes else ()
        inputs: list[BlockInput] = []
        stages: list[Stage] = []
        outputs: list[BlockOutput] = []
        while not self.takes("}"):
            if self.takes("store"):
                value, value_axes = self.value_name(), self.axis_names()
                outputs.append(BlockOutput(value, value_axes, self.take("word")))
            elif self.next.kind == "name":
                inputs.append(self.load())
            else:
                stages.append(self.stage())
        block: BlockGraph = self.build(
            BlockGraph, axes, tuple(inputs), tuple(stages), tuple(outputs)
        )
        return block

    def axis(self) -> Axis:
        name = self.take("word")
        self.expect("=")
        size = self.integer()
        role = Role(self.expect(*(r.value for r in Role)))
        split_axis = None
        if self.takes("split"):
            self.expect("by")
            split_axis = self.take("word")
        return Axis(name, size, role, split_axis)

    def axis_names(self) -> tuple[str | None, ...]:
        def name() -> str | None:
            return None if self.takes("1") else self.take("word")

        return tuple(self.many(name, "[", "]"))

    def load(self) -> BlockInput:
        name = self.value_name()
        self.expect("=")
        self.expect("load")
        sources, axes = tuple(self.many(self.integer)), self.axis_names()
        joined, sizes = None, ()
        if self.takes("joined"):
            joined, sizes = self.take("word"), tuple(self.many(self.integer, "(", ")"))
        bounds = self.take("word") if self.takes("bounds") else None
        rotation, padding, taken = self.rotation(), self.padding(), self.taken()
        made: BlockInput = self.build(
            BlockInput, name, sources, axes, joined, sizes, bounds, rotation, padding, taken
        )
        return made

    def rotation(self) -> Rotation | None:
        """Read `rotated AXIS HOW [of WIDTH]`, if it is next.

        HOW is one of ROTATIONS, such as "swap halves".
        """
        if not self.takes("rotated"):
            return None
        axis, how = self.take("word"), f"{self.take('word')} {self.take('word')}"
        width = self.integer() if self.takes("of") else None
        made: Rotation = self.build(Rotation, axis, how, width)
        return made

    def padding(self) -> Padding | None:
        if not self.takes("padded"):
            return None
        axis, size = self.take("word"), self.integer()
        self.expect("with")
        made: Padding = self.build(Padding, axis, size, float(self.number()))
        return made

    def taken(self) -> Taken | None:
        """Read `taken DIM of SIZE by OPERAND [AXES]`, if it is next."""
        if not self.takes("taken"):
            return None
        dim = self.integer()
        self.expect("of")
        size = self.integer()
        self.expect("by")
        return Taken(dim, size, self.integer(), self.axis_names())

    def stage(self) -> Stage:
        loop = self.take("word") if self.expect("for", "once") == "for" else None
        body: list[BlockOp] = []
        accumulators: list[Accumulator] = []
        self.expect("{")
        while not self.takes("}"):
            out, axes = self.value_name(), tuple(a or "1" for a in self.axis_names())
            self.expect("=")
            fn = self.take("word")
            if fn == "accumulate":
                accumulators.append(self.accumulator(out, axes))
            else:
                body.append(self.block_op(out, axes, fn))
        return Stage(loop, tuple(body), tuple(accumulators))

    def accumulator(self, out: str, axes: tuple[str, ...]) -> Accumulator:
        kind = self.take("word")
        self.expect("(")
        arg = self.value_name()
        self.expect(")")
        shift = self.value_name() if self.takes("shift") else None
        return Accumulator(out, arg, kind, axes, shift)

    def block_op(self, out: str, axes: tuple[str, ...], fn: str) -> BlockOp:
        args, attrs = self.arguments(self.value_name)
        over = attrs.pop("over", None)
        return BlockOp(
            out,
            fn,
            tuple(args),
            axes,
            tuple(sorted(attrs.items())),
            None if over is None else str(over),
        )
