"""The Python bindings of the C++ core: programs as text, and the rejection of malformed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from mirage_hf import _core
from mirage_hf.search import map_restriction
from mirage_hf.search.core_program import core_limits
from mirage_hf.search.search_options import SearchOptions

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


def test_the_cores_default_rates_are_the_h200s() -> None:
    passed = core_limits(SearchOptions(), (), [], 1, 1.0).gpu
    for limits in (_core.Limits(), _core.GpuRates()):
        rates = getattr(limits, "gpu", limits)
        names = [name for name in dir(rates) if not name.startswith("_")]
        assert names and all(getattr(rates, n) == getattr(passed, n) for n in names)


def test_a_float32_output_moves_twice_the_bytes() -> None:
    wide = SUM.replace("output v1", "output v1:4")
    assert _core.parse_program(wide).output_itemsizes == [4]
    assert _core.parse_program(SUM).output_itemsizes == [2]
    costs = [
        _core.search(_core.parse_program(text), _core.Limits(), None).stats.best_us
        for text in (SUM, wide)
    ]
    assert costs[0] < costs[1]


def test_the_largest_tile_is_the_cores() -> None:
    assert _core.largest_tile == map_restriction.LARGEST_TILE
