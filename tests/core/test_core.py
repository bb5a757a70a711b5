"""The Python bindings of the C++ core: programs as text, and the refusal of malformed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from mirage_hf import _core

CORPUS = sorted((Path(__file__).parents[2] / "csrc" / "tests" / "corpus").glob("*.txt"))
SUM = "axis m 4\nv0 = input @0 8 m\nv1 = sum v0 m\noutput v1\n"


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.stem)
def test_text_is_read_back(path: Path) -> None:
    program = _core.parse_program(path.read_text())
    assert _core.parse_program(program.text()).text() == program.text()


def test_text_gives_the_program() -> None:
    program = _core.parse_program(SUM)
    assert program.text() == SUM
    assert [n.op for n in program.nodes] == [_core.Op.input, _core.Op.sum]
    assert _core.search(program, _core.Limits(), None).candidates


def test_malformed_text_is_refused_with_its_line() -> None:
    with pytest.raises(ValueError, match="line 3: expected an axis, found n"):
        _core.parse_program(SUM.replace("sum v0 m", "sum v0 n"))


def test_a_malformed_program_never_reaches_the_search() -> None:
    program = _core.Program()
    program.axes = [_core.AxisInfo("m", 4)]
    node = _core.Node()
    node.op, node.args = _core.Op.exp, [7]
    program.nodes, program.outputs = [node], [0]
    for use in (program.text, lambda: _core.search(program, _core.Limits(), None)):
        with pytest.raises(ValueError, match="node 0: expected an earlier node, found 7"):
            use()
