"""Methods of graphs whose work is done by later stages."""

from __future__ import annotations

from pathlib import Path

import pytest

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.graph import conveniences
from mirage_hf.graph.conveniences import Convenience
from mirage_hf.graph.ugraph import library_ugraph

DECLARED = [c for c in vars(conveniences).values() if isinstance(c, Convenience)]


@pytest.mark.parametrize("convenience", DECLARED, ids=lambda c: c.method)
def test_importing_the_package_registers_them_all(convenience: Convenience[..., object]) -> None:
    function = convenience._function
    assert function is not None
    assert function.__module__ == convenience.module


def test_a_stage_that_is_not_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = mi.new_graph()
    g.relu(g.new_input((2, 3)))
    monkeypatch.setattr(conveniences.write_svg, "_function", None)
    with pytest.raises(
        errors.MirageError, match=r"visualize\(\) needs mirage_hf.render.picture, which is not"
    ):
        library_ugraph(g).visualize(tmp_path / "u.svg")
