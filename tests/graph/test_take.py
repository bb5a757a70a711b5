"""The op take: an index in device memory chooses elements of a tensor."""

import json

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import cuda, torch_text
from mirage_hf.graph import indices, json_format, maps, symbolic, text
from mirage_hf.graph.block import (
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Role,
    Stage,
    Taken,
)
from mirage_hf.graph.dim import Dim
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline import run_ugraph
from mirage_hf.search.engine import search
from tests.helpers import indexed_programs as programs
from tests.helpers import reference_executor
from tests.helpers.indexed_programs import Mixture

SMALL = Mixture(3, 2, 5, 16, 8)
PROGRAMS = {
    "gate and up": lambda: programs.gate_up(SMALL),
    "down": lambda: programs.down(SMALL),
    "biases": lambda: programs.whole(Mixture(2, 2, 4, 8, 4, layout="interleaved", biases=True)),
    "rows": lambda: programs.rows_of_table(3, 7, 16),
    "columns": lambda: programs.columns(4, 6, 3),
}


def graph_of(dims=(5, 4, 3), index=(2, 6), dim=0, dtype="int32"):
    g = mi.new_graph()
    x = g.new_input(dims, "float32", name="x")
    e = g.new_input(index, dtype, name="e")
    return g, g.take(x, e, dim=dim)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_dims_of_the_index_replace_the_dim_that_it_chooses_from(dim, dtype):
    g, y = graph_of(dim=dim, dtype=dtype)
    x = torch.randn(5, 4, 3)
    e = torch.randint(0, x.shape[dim], (2, 6), dtype=dtype)
    (got,) = run_kernel_graph(g, [x, e])
    before = x.movedim(dim, 0)[e.long()]  # torch puts the index first
    want = before.movedim((0, 1), (dim % 3, dim % 3 + 1))
    assert y.dims == tuple(want.shape) and torch.equal(got, want)


@pytest.mark.parametrize("e", [[[-1]], [[5]], [[0, 7]]])
def test_an_index_out_of_range_is_an_error_on_a_cpu(e):
    e = torch.tensor(e, dtype=torch.int32)
    g, _ = graph_of(index=tuple(e.shape))
    with pytest.raises(errors.InputError, match="must be 0 to 4"):
        UGraph(g, g)([torch.randn(5, 4, 3), e])


def test_kernels_check_the_index_on_a_cpu():
    g = programs.gate_up(SMALL)
    inputs = programs.inputs_of(g, 0)
    inputs[1][0, 0] = 5
    ugraph = search(g, programs.SEARCH)[0][0].ugraph
    with pytest.raises(errors.InputError, match="must be 0 to 4"):
        ugraph(inputs)


def test_the_range_of_indices_is_checked():
    g, _ = graph_of(index=(2,))
    inputs = [torch.randn(5, 4, 3), torch.tensor([0, 5], dtype=torch.int32)]
    with pytest.raises(errors.InputError, match=r"input 1 \(e\): the index is 0 to 5"):
        indices.check_range(g, inputs)
    inputs[1][1] = 4
    indices.check_range(g, inputs)


def test_a_setting_asks_for_the_check(monkeypatch):
    g = programs.gate_up(SMALL)
    ugraph = search(g, programs.SEARCH)[0][0].ugraph
    seen = []
    monkeypatch.setattr(run_ugraph, "check_range", lambda graph, inputs: seen.append(graph))
    for value in ("0", "1"):
        monkeypatch.setenv("MIRAGE_HF_CHECK_INDICES", value)
        ugraph(programs.inputs_of(g, 0))
    assert seen == [g]


def test_bad_operands_are_refused():
    with pytest.raises(errors.GraphError, match="dim 3 is out of range"):
        graph_of(dim=3)
    with pytest.raises(errors.DTypeError, match="an index is int32 or int64"):
        graph_of(dtype="float32")
    g = mi.new_graph()
    codes, e = g.new_input((8, 8), "uint8"), g.new_input((2,), "int32")
    with pytest.raises(errors.DTypeError, match="cast it first"):
        g.take(codes, e)
    with pytest.raises(errors.GraphError, match="unknown argument 'axis'"):
        g.apply("take", [codes, e], {"axis": 0})


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_and_kernels_print_parse_and_survive_json(name):
    g = PROGRAMS[name]()
    for graph in (g, search(g, programs.SEARCH)[0][0].ugraph.kernels):
        assert text.parse_graph(str(graph)) == graph
        data = json.loads(json.dumps(json_format.graph_to_dict(graph)))
        assert json_format.graph_from_dict(data) == graph


@pytest.mark.parametrize("name", PROGRAMS)
def test_three_executors_agree(name):
    g = PROGRAMS[name]()
    for seed in range(3):
        inputs = programs.inputs_of(g, seed)
        want = reference_executor.run(g, inputs)
        for ranked in search(g, programs.SEARCH)[0][:6]:
            for got in (
                run_kernel_graph(ranked.ugraph.kernels, inputs, torch.float64),
                reference_executor.run(ranked.ugraph.kernels, inputs),
            ):
                assert all(map(torch.allclose, got, want)), ranked.ugraph.kernels


def test_torch_text_calls_the_oracle():
    g, _ = graph_of(index=(2,))
    source = "\n".join([*torch_text.functions(g), torch_text.program(g, "program")])
    names = {"torch": torch}
    exec(source, names)
    x, e = torch.randn(5, 4, 3), torch.tensor([4, 0], dtype=torch.int32)
    assert torch.equal(names["program"]([x, e])[0], x[[4, 0]])
    with pytest.raises(ValueError, match="must be 0 to 4"):
        names["program"]([x, e - 1])


def test_symbolic_tokens_get_a_size():
    tokens = Dim("tokens", 4)
    g = mi.new_graph()
    x = g.new_input((tokens, 1, 1, 16), "float32")
    e = g.new_input((tokens, 2), "int32")
    w = g.new_input((5, 8, 16), "float32", constant=True)
    g.mark_output(g.matmul(x, g.permute(g.take(w, e), (0, 1, 3, 2))))
    symbolic.check(g)
    ugraph = search(g, programs.SEARCH)[0][0].ugraph
    small = symbolic.ugraph_at(ugraph, {"tokens": 3})
    inputs = [torch.randn(3, 1, 1, 16), torch.randint(0, 5, (3, 2), dtype=torch.int32)]
    inputs.append(torch.randn(5, 8, 16))
    (y,) = small(inputs)
    want = torch.einsum("tk,tcnk->tcn", inputs[0][:, 0, 0], inputs[2][inputs[1].long()])
    assert y.shape == (3, 2, 1, 8) and torch.allclose(y[:, :, 0], want, atol=1e-5)


# -- block graphs ----------------------------------------------------------------------------------

AXES = (Axis("t", 3, Role.GRID), Axis("k", 8, Role.TILE))


def block_of(taken: Taken | None, axes=(None, "k"), axes_of_graph=AXES) -> BlockGraph:
    carried = ("t", "k") if taken and "t" in taken.axes else ("k",)
    return BlockGraph(
        axes_of_graph,
        (BlockInput("w", (0,), axes, taken=taken),),
        (Stage(None, (BlockOp("y", "mul", ("w", 2.0), carried),)),),
        (BlockOutput("y", carried, "float32"),),
    )


def test_a_value_changes_along_the_axes_of_its_index():
    block = block_of(Taken(0, 5, 1, ("t",)))
    assert block.carried["w"] == ("t", "k")
    g = mi.new_graph()
    w, e = g.new_input((5, 8), "float32"), g.new_input((3,), "int64")
    g.mark_output(*g.customized([w, e], block))
    x, at = torch.randn(5, 8), torch.tensor([4, 4, 1])
    assert torch.equal(run_kernel_graph(g, [x, at])[0], 2 * x[at])
    with pytest.raises(errors.CodegenError, match="an index chooses the elements of w"):
        cuda.program_source(UGraph(g, g))


def test_the_axes_of_an_index_cut_the_dim_that_it_chooses_from():
    (read,) = maps.maps_of(block_of(Taken(0, 5, 1, ("t",)))).inputs
    assert read.grid == (("t", 0),) and str(read) == "imap {t→0}"


@pytest.mark.parametrize(
    ("taken", "axes", "message"),
    [
        (Taken(1, 5, 1, ("t",)), (None, "k"), "that has no axis"),
        (Taken(2, 5, 1, ("t",)), (None, "k"), "that has no axis"),
        (Taken(0, 0, 1, ("t",)), (None, "k"), "among 0 elements"),
        (Taken(0, 5, 1, ("k",)), (None, "k"), "repeat or are unknown"),
        (Taken(0, 5, 1, ("x",)), (None, "k"), "repeat or are unknown"),
    ],
)
def test_block_inputs_are_checked(taken, axes, message):
    with pytest.raises(errors.GraphError, match=message):
        block_of(taken, axes)


@pytest.mark.parametrize(
    ("index", "dtype", "message"),
    [
        ((4,), "int32", r"wants an index \(3,?\)"),
        ((3,), "float32", "an index is int32 or int64"),
    ],
)
def test_the_operands_of_a_kernel_are_checked(index, dtype, message):
    g = mi.new_graph()
    w, e = g.new_input((5, 8), "float32"), g.new_input(index, dtype)
    with pytest.raises((errors.GraphError, errors.DTypeError), match=message):
        g.customized([w, e], block_of(Taken(0, 5, 1, ("t",))))
    with pytest.raises(errors.GraphError, match="has operand 7 as its index"):
        g.customized([w, e], block_of(Taken(0, 5, 7, ("t",))))
    with pytest.raises(errors.GraphError, match=r"wants \(6, 8\)"):
        g.customized([w, e], block_of(Taken(0, 6, 1, ("t",))))
