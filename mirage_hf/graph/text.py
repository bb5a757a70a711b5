"""Graphs as text that people read and that parses back: one line per tensor, block graphs as indented stages.

    %x = input float16 (16, 4096)
    %w = input float16 (4096, 4096) strides (1, 4096)
    %y = matmul(%x, %w) : float16 (16, 4096)
    return %y

Everything after # is a comment. Reading builds the graph through the ordinary builders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mirage_hf import errors
from mirage_hf.graph import maps
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
)
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp, row_major
from mirage_hf.graph.symbolic import Dim
from mirage_hf.ops import table

# -- printing -----------------------------------------------------------------------------------------------------------


def format_graph(graph: KernelGraph) -> str:
    """Return the graph as text, one tensor per line in the order they were made. `parse_graph` reads it."""
    made = {t.index: _input(t) for t in graph.inputs} | {
        op.outputs[0].index: _op(op) for op in graph.ops
    }
    lines = [made[i] for i in sorted(made)]
    outputs = "return " + ", ".join(map(str, graph.outputs))
    return "\n".join([*lines, outputs]).rstrip()


def _input(t: DTensor) -> str:
    strides = "" if t.strides == row_major(t.dims) else f" strides {_value(t.strides)}"
    return f"{t} = input {_type(t)}{strides}" + (" constant" if t.constant else "")


def _type(t: DTensor) -> str:
    dims = ", ".join(f"{d.name}<={int(d)}" if isinstance(d, Dim) else str(d) for d in t.dims)
    return f"{table.dtype_name(t.dtype)} ({dims})"


def _op(op: KernelOp) -> str:
    args = [str(x) if isinstance(x, DTensor) else _value(x) for x in op.inputs] + [
        f"{k}={_value(v)}" for k, v in op.attrs
    ]
    left, types = (", ".join(map(f, op.outputs)) for f in (str, _type))
    line = f"{left} = {op.name}({', '.join(args)}) : {types}"
    if op.block is None:
        return line
    body = "\n".join("  " + text for text in format_block_graph(op.block).splitlines())
    return f"{line} {{\n{body}\n}}"


def _value(v: Any) -> str:
    """A number, flag, word or tuple; floats by the shortest text that gives them back."""
    if isinstance(v, (tuple, list)):
        return errors.shape(v)
    return (
        str(v).lower()
        if isinstance(v, bool)
        else repr(v)
        if isinstance(v, (int, float))
        else str(v)
    )


def format_block_graph(block: BlockGraph) -> str:
    """Return a block graph as text: axes with their roles, loads and stores with their maps, and the stages."""
    lines = [
        "axes "
        + ", ".join(
            f"{a.name}={a.size} {a.role.value}{f' split by {a.split_axis}' if a.split_axis else ''}"
            for a in block.axes
        )
    ]
    of = {m.tensor: m for m in maps.maps_of(block).inputs}
    for i in block.inputs:
        joined = (
            f" joined {i.joined} {errors.shape(i.sizes)}"
            if i.joined
            else f" bounds {i.bounds}"
            if i.bounds
            else ""
        )
        joined += (
            f" rotated {i.rotation.axis} {i.rotation.how}{f' of {i.rotation.width}' if i.rotation.width else ''}"
            if i.rotation
            else ""
        )
        joined += (
            f" padded {i.padding.axis} {i.padding.size} with {_value(i.padding.value)}"
            if i.padding
            else ""
        )
        lines.append(
            f"%{i.name} = load {', '.join(map(str, i.sources))} {_axes(i.axes)}{joined}  # {of[i.name]}"
        )
    for stage in block.stages:
        lines.append(f"for {stage.loop} {{" if stage.loop else "once {")
        lines += [f"  %{op.out} {_axes(op.axes)} = {_call(op)}" for op in stage.body]
        lines += [
            f"  %{a.out} {_axes(a.axes)} = accumulate {a.kind}(%{a.arg}){f' shift %{a.shift}' if a.shift else ''}"
            for a in stage.accumulators
        ]
        lines.append("}")
    lines += [
        f"store %{o.value} {_axes(o.axes)} {o.dtype}  # {m}"
        for o, m in zip(block.outputs, maps.maps_of(block).outputs, strict=True)
    ]
    return "\n".join(lines)


def _axes(axes: Sequence[str | None]) -> str:
    return "[" + ", ".join(a or "1" for a in axes) + "]"


def _call(op: BlockOp) -> str:
    args = [f"%{a}" if isinstance(a, str) else _value(a) for a in op.args] + [
        f"{k}={_value(v)}" for k, v in op.attrs
    ]
    return f"{op.fn}({', '.join(args)}{f', over={op.over}' if op.over else ''})"


# -- parsing ------------------------------------------------------------------------------------------------------------


def parse_graph(text: str, source: str = "text") -> KernelGraph:
    """Build the graph that `format_graph` printed, or that somebody wrote; types after ':' may be left out.

    Errors: FormatError with the line, for text that does not parse or a graph that cannot be built.
    """
    return _Parser(text, source).graph()


_TOKEN = re.compile(
    r"(?P<skip>[ \t\r]+|\#[^\n]*)|(?P<newline>\n)|(?P<name>%[^\s,=:()\[\]{}#%]+)"
    r"|(?P<number>-?(?:\d[\w.]*(?:(?<=[eE])[+-]\w+)?|inf\b))|(?P<word>[^\W\d][\w.]*)|(?P<mark><=|[,=:()\[\]{}])|(?P<other>.)"
)
_KINDS = {"name": "a %name", "number": "a number", "word": "a word", "end": "the end"}
_WORDS = {"true": True, "false": False}


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


class _Parser:
    """Recursive descent over tokens. One method per construct of the language, in the order of the printer."""

    def __init__(self, text: str, source: str):
        self.tokens, self.source, self.at = list(_tokens(text)), source, 0

    def error(self, what: str, back: int = 0) -> errors.FormatError:
        """An error at the next token, or `back` tokens before it."""
        return errors.FormatError(
            f"{self.source}, line {self.tokens[self.at - back].line}: {what}; str(graph) shows the form"
        )

    def build(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return make(*args, **kwargs)
        except errors.GraphError as e:
            raise self.error(str(e), back=1) from e

    # -- tokens

    def take(self, kind: str) -> str:
        """Take a token of that kind."""
        return self._next(self.tokens[self.at].kind == kind, _KINDS[kind])

    def expect(self, *texts: str) -> str:
        """Take one of these words or marks."""
        return self._next(any(map(self.sees, texts)), " or ".join(texts))

    def _next(self, fits: bool, wanted: str) -> str:
        token = self.tokens[self.at]
        if not fits:
            raise self.error(f"expected {wanted}, found {token.text[:60]!r}")
        self.at += 1
        return token.text

    def sees(self, text: str) -> bool:
        return self.tokens[self.at].text == text and self.tokens[self.at].kind != "end"

    def takes(self, text: str) -> bool:
        self.at += (found := self.sees(text))
        return found

    def many(
        self, item: Callable[[], Any], start: str | None = None, end: str | None = None
    ) -> list[Any]:
        """`item`s between commas, and between brackets if given."""
        if start and end:
            self.expect(start)
            if self.takes(end):
                return []
        found = [item()]
        while self.takes(","):
            found.append(item())
        if end:
            self.expect(end)
        return found

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

    # -- kernel graphs

    def graph(self) -> KernelGraph:
        graph = KernelGraph()
        tensors: dict[str, DTensor] = {}
        while not self.takes("return"):
            for t in self.statement(graph, tensors):
                tensors[t.name] = t
        if self.tokens[self.at].kind == "name":
            graph.mark_output(*self.many(lambda: self.tensor(tensors)))
        self.take("end")
        return graph

    def tensor(self, tensors: dict[str, DTensor]) -> DTensor:
        name = self.take("name")[1:]
        if name not in tensors:
            raise self.error(f"no tensor %{name} comes before", back=1)
        return tensors[name]

    def statement(self, graph: KernelGraph, tensors: dict[str, DTensor]) -> list[DTensor]:
        names = [n[1:] for n in self.many(lambda: self.take("name"))]
        self.expect("=")
        op = self.take("word")
        if op == "input":
            dtype, dims = self.type()
            strides = tuple(self.many(self.integer, "(", ")")) if self.takes("strides") else None
            if len(names) != 1:
                return self.one_name(names)
            return [
                self.build(
                    graph.new_input, dims, dtype, strides, *names, constant=self.takes("constant")
                )
            ]
        operands, attrs = self.arguments(lambda: self.tensor(tensors))
        types = self.many(self.type) if self.takes(":") else None
        if op == CUSTOMIZED:
            made = self.build(graph.customized, operands, self.block(), names)
        else:
            made = (
                [self.build(graph.apply, op, operands, attrs, names[0])]
                if len(names) == 1
                else self.one_name(names)
            )
        if types is not None and types != [(table.dtype_name(t.dtype), t.dims) for t in made]:
            raise self.error(
                f"{op} gives {', '.join(map(_type, made))}, not what is written after ':'", back=1
            )
        return made

    def one_name(self, names: list[str]) -> list[DTensor]:
        raise self.error(
            f"{len(names)} names for one tensor; only customized has several outputs", back=1
        )

    def type(self) -> tuple[str, tuple[int, ...]]:
        return self.take("word"), tuple(self.many(self.dim, "(", ")"))

    def dim(self) -> int:
        token = self.tokens[self.at]
        if token.kind != "word" and not (
            token.text == "inf" and self.tokens[self.at + 1].text == "<="
        ):  # a dim's name, not a number
            return self.integer()
        name = self.take(token.kind)
        self.expect("<=")
        return self.build(Dim, name, self.integer())  # type: ignore[no-any-return]

    def arguments(self, operand: Callable[[], Any]) -> tuple[list[Any], dict[str, Any]]:
        """`(operands, name=value, …)`."""
        operands: list[Any] = []
        attrs: dict[str, Any] = {}

        def one() -> None:
            if self.tokens[self.at].kind == "word":
                name = self.take("word")
                self.expect("=")
                attrs[name] = self.attribute()
            else:
                operands.append(
                    self.number() if self.tokens[self.at].kind == "number" else operand()
                )

        self.many(one, "(", ")")
        return operands, attrs

    def attribute(self) -> Any:
        if self.sees("("):
            return tuple(self.many(self.integer, "(", ")"))
        if self.tokens[self.at].kind == "number":
            return self.number()
        word = self.take("word")
        return _WORDS.get(word, word)

    # -- block graphs

    def block(self) -> BlockGraph:
        self.expect("{")
        self.expect("axes")
        axes = (
            tuple(self.many(self.axis))
            if self.tokens[self.at + 1].text == "=" and self.tokens[self.at].kind == "word"
            else ()
        )
        inputs: list[BlockInput] = []
        stages: list[Stage] = []
        outputs: list[BlockOutput] = []
        while not self.takes("}"):
            if self.takes("store"):
                outputs.append(
                    BlockOutput(self.take("name")[1:], self.axis_names(), self.take("word"))
                )
            elif self.tokens[self.at].kind == "name":
                inputs.append(self.load())
            else:
                stages.append(self.stage())
        return self.build(BlockGraph, axes, tuple(inputs), tuple(stages), tuple(outputs))

    def axis(self) -> Axis:
        name = self.take("word")
        self.expect("=")
        size, role = self.integer(), Role(self.expect(*(r.value for r in Role)))
        split_axis = None
        if self.takes("split"):
            self.expect("by")
            split_axis = self.take("word")
        return Axis(name, size, role, split_axis)

    def axis_names(self) -> tuple[str | None, ...]:
        def one() -> str | None:
            return None if self.takes("1") else self.take("word")

        return tuple(self.many(one, "[", "]"))

    def load(self) -> BlockInput:
        name = self.take("name")[1:]
        self.expect("=")
        self.expect("load")
        sources, axes = tuple(self.many(self.integer)), self.axis_names()
        joined, sizes = (
            (self.take("word"), tuple(self.many(self.integer, "(", ")")))
            if self.takes("joined")
            else (None, ())
        )
        bounds = self.take("word") if self.takes("bounds") else None
        return self.build(
            BlockInput, name, sources, axes, joined, sizes, bounds, self.rotation(), self.padding()
        )

    def rotation(self) -> Rotation | None:
        if not self.takes("rotated"):
            return None
        axis, how = self.take("word"), f"{self.take('word')} {self.take('word')}"
        return self.build(Rotation, axis, how, self.integer() if self.takes("of") else None)

    def padding(self) -> Padding | None:
        if not self.takes("padded"):
            return None
        axis, size = self.take("word"), self.integer()
        self.expect("with")
        return self.build(Padding, axis, size, float(self.number()))

    def stage(self) -> Stage:
        loop = self.take("word") if self.expect("for", "once") == "for" else None
        body: list[BlockOp] = []
        accumulators: list[Accumulator] = []
        self.expect("{")
        while not self.takes("}"):
            out, axes = self.take("name")[1:], tuple(a or "1" for a in self.axis_names())
            self.expect("=")
            fn = self.take("word")
            if fn == "accumulate":
                kind = self.take("word")
                self.expect("(")
                arg = self.take("name")[1:]
                self.expect(")")
                shift = self.take("name")[1:] if self.takes("shift") else None
                accumulators.append(Accumulator(out, arg, kind, axes, shift))
            else:
                args, attrs = self.arguments(lambda: self.take("name")[1:])
                over = attrs.pop("over", None)
                body.append(
                    BlockOp(
                        out,
                        fn,
                        tuple(args),
                        axes,
                        tuple(sorted(attrs.items())),
                        None if over is None else str(over),
                    )
                )
        return Stage(loop, tuple(body), tuple(accumulators))
