"""The op `mirage_hf::run`: its fake, its errors, and no aliasing.

Compiled µGraphs call it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mirage_hf as mi
from mirage_hf.errors import InputError, ZooError
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.ugraph import library_ugraph
from mirage_hf.pipeline import resolver, torch_op

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch_op, "_known", {})
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def known(graph: Any, name: str = "it") -> str:
    """Register a program that runs by its own ops."""
    torch_op.register(name, library_ugraph(graph), partial(run_kernel_graph, graph), "cpu")
    return name


def linear() -> Any:
    g = mi.new_graph()
    x, w = (
        g.new_input((4, 8), "float32", name="x"),
        g.new_input((8, 6), "float32", strides=(1, 8), name="w"),
    )
    g.mark_output(g.matmul(g.silu(x), w))
    return g


def views() -> Any:
    """Return a program whose outputs need copies.

    In torch they would be an input, a view of it, and one tensor twice.
    """
    g = mi.new_graph()
    x, y = g.new_input((4, 8), "float32", name="x"), g.new_input((4, 8), "float32", name="y")
    total = g.add(x, y)
    g.mark_output(g.permute(x, (1, 0)), total, g.reshape(total, (8, 4)), g.permute(total, (1, 0)))
    return g


@pytest.mark.parametrize("program", [linear, views])
def test_the_op_keeps_torchs_rules(program: Any) -> None:
    graph = program()
    inputs = [torch.randn(t.dims) if t.name != "w" else torch.randn(6, 8).t() for t in graph.inputs]
    outcome = torch.library.opcheck(torch_op.run, (inputs, known(graph)))
    assert set(outcome.values()) == {"SUCCESS"}
    outputs = torch_op.run(inputs, "it")
    assert all(
        torch.equal(a, b) for a, b in zip(outputs, run_kernel_graph(graph, inputs), strict=True)
    )
    assert all(y.is_contiguous() for y in outputs)
    assert len({t.untyped_storage().data_ptr() for t in (*inputs, *outputs)}) == len(inputs) + len(
        outputs
    )


def test_tensors_it_was_not_made_for_are_refused() -> None:
    name, x, w = known(linear()), torch.randn(4, 8), torch.randn(6, 8).t()
    for inputs, words in (
        ((x, w.contiguous()), "strides"),
        ((x.double(), w), "float64"),
        ((x[:3], w), "shape"),
        ((x,), "2 tensors"),
        ((x.to("meta"), w.to("meta")), "inputs are on meta"),
    ):
        with pytest.raises(InputError, match=words):
            torch_op.run(list(inputs), name)
    with pytest.raises(
        ZooError,
        match=r"no kernel for program 0123456789ab… in this process "
        r"\(.*run mirage_hf.optimize here",
    ):
        torch_op.run([x, w], "0123456789abcdef")


def test_rows_of_one_may_have_any_stride() -> None:
    g = mi.new_graph()
    g.mark_output(g.silu(g.new_input((1, 8), "float32", name="x")))
    x = torch.randn(8, 2).t()[:1].clone()
    x = x.as_strided((1, 8), (99, 1))
    assert torch.equal(torch_op.run([x], known(g))[0], torch.nn.functional.silu(x))


def test_gradients_are_an_error_and_not_lost() -> None:
    name, w = known(linear()), torch.randn(6, 8).t().requires_grad_()
    (y,) = torch_op.run([torch.randn(4, 8), w], name)
    with pytest.raises(InputError, match="have no gradient"):
        y.sum().backward()


@pytest.fixture(scope="module")
def found() -> Any:
    return mi.superoptimize(linear(), backend="cpu", cache=False)


@pytest.mark.parametrize("which", ["result", "best", "library"])
def test_a_ugraph_in_a_compiled_function_is_one_op(found: Any, which: str) -> None:
    call = {"result": found, "best": found[0], "library": found[-1]}[which]
    seen: list[int] = []

    def backend(gm: Any, _: Any) -> Any:
        seen.append(sum(n.target is torch_op.run for n in gm.graph.nodes))
        return gm

    x, w = torch.randn(4, 8), torch.randn(6, 8).t()
    for inner in (backend, "aot_eager"):
        torch.compiler.reset()
        got = torch.compile(lambda x, w: call([2 * x, w])[0] + 1, backend=inner, fullgraph=True)(
            x, w
        )
        assert torch.equal(got, call([2 * x, w])[0] + 1)
    assert seen == [1]


def test_symbolic_dims_are_compiled_for_each_size() -> None:
    g = mi.new_graph()
    x = g.new_input((mi.Dim("rows", max=8), 16), "float32", name="x")
    g.mark_output(g.mul(g.silu(x), x))
    found = mi.superoptimize(g, backend="cpu", cache=False)
    run = torch.compile(lambda x: found([x])[0] + 1, backend="eager", fullgraph=True)
    for rows in (3, 4, 6):
        x = torch.randn(rows, 16)
        assert torch.equal(run(x), found([x])[0] + 1)


def test_kernels_are_found_by_digest_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    digest = resolver.resolve(linear(), device="cpu").digest
    inputs = [torch.randn(4, 8), torch.randn(6, 8).t()]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: torch_op.run(inputs, digest)[0], range(8)))
    torch.testing.assert_close(results[0], torch.nn.functional.silu(inputs[0]) @ inputs[1])
    assert all(torch.equal(results[0], y) for y in results) and list(torch_op._known) == [digest]
    torch_op._known.clear()
    monkeypatch.setattr(torch_op, "KERNEL_FORMAT", 0)
    with pytest.raises(ZooError, match="made by another version"):
        torch_op.run(inputs, digest)


def test_copies_of_a_ugraph_have_numbers_of_their_own() -> None:
    """Compiled code finds a µGraph by its number, so a copy must not take the number of another."""
    ugraph = library_ugraph(linear())
    for other in (copy.deepcopy(ugraph), pickle.loads(pickle.dumps(ugraph)), replace(ugraph)):
        assert (
            other == ugraph
            and other.uid != ugraph.uid
            and type(ugraph).numbered(other.uid) is other
        )
    assert type(ugraph).numbered(ugraph.uid) is ugraph
