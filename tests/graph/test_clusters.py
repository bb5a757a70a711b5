"""The CLUSTER role: its rules, its text and JSON, its picture, and how it is executed."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format, maps
from mirage_hf.graph.algebra import TorchAlgebra
from mirage_hf.graph.block import Axis, BlockInput, BlockOp, BlockOutput, Role, Stage
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.execute_block import run_block_graph
from mirage_hf.graph.text import parse_graph
from mirage_hf.render import picture
from mirage_hf.search.lowering import lower
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.verdict import Accepted
from tests.helpers import cluster_ugraphs, mutants, reference_executor

BLOCK = cluster_ugraphs.split_linear().block_ops[0].block


def with_axis(name: str, **changes):
    """Return the axes of `BLOCK` with one changed."""
    return tuple(replace(a, **changes) if a.name == name else a for a in BLOCK.axes)


@pytest.mark.parametrize("name", cluster_ugraphs.ALL)
def test_graphs_are_proven_and_computed_like_the_reference(name):
    u = cluster_ugraphs.ALL[name]()
    verdict = prove(u)
    assert isinstance(verdict, Accepted) and verdict.bound < 1e-9
    inputs = mutants.float64_inputs(u.program)
    want = reference_executor.run(u.program, inputs)
    for got in (
        reference_executor.run(u.kernels, inputs),
        run_kernel_graph(u.kernels, inputs, torch.float64),
    ):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("name", cluster_ugraphs.ALL)
def test_blocks_of_a_cluster_run_one_by_one_in_any_number_of_pieces(name, pieces):
    u = cluster_ugraphs.ALL[name]()
    op = u.block_ops[0]
    inputs = mutants.float64_inputs(u.program)
    got = run_block_graph(op.block, inputs[: len(op.inputs)], TorchAlgebra(torch.float64), pieces)
    want = reference_executor.run(u.program, inputs)
    torch.testing.assert_close(got[0], want[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", cluster_ugraphs.ALL)
def test_text_and_json_read_back(name):
    u = cluster_ugraphs.ALL[name]()
    assert parse_graph(str(u.kernels)) == u.kernels
    assert json_format.ugraph_from_dict(json_format.ugraph_to_dict(u)) == u


def test_text_names_the_role_the_split_and_the_maps():
    text = str(cluster_ugraphs.split_linear().kernels)
    assert "axes m=3 grid, n=48 grid, c=4 cluster, k=64 loop split by c" in text
    assert "%x = load 0 [m, k]  # imap {m→0, n→φ, c→1}, fmap {k→1}" in text
    assert "%y [m, n] = sum(%part, over=c)" in text
    assert "omap {m→0, n→1, c→φ}" in str(maps.maps_of(BLOCK).outputs[0])


def test_the_picture_shows_the_exchange():
    root = ElementTree.fromstring(picture.svg(cluster_ugraphs.rms_norm_linear()))
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    for line in (
        "among the blocks of a cluster",
        "cluster c",
        "cluster  c = 4 (split of k)",
        "y = Σ[c] y_part",
    ):
        assert line in texts, line


@pytest.mark.parametrize("size", [1, 9, 16])
def test_a_cluster_has_two_to_eight_blocks(size):
    with pytest.raises(errors.GraphError, match=f"c has {size} elements.*has 2 to 8 blocks"):
        replace(BLOCK, axes=with_axis("c", size=size))


def test_at_most_one_axis_is_a_cluster():
    with pytest.raises(errors.GraphError, match="m and c are both cut among the blocks of a clus"):
        replace(BLOCK, axes=with_axis("m", role=Role.CLUSTER))


def test_a_cluster_axis_is_not_split():
    axes = (*BLOCK.axes, Axis("g", 2, Role.GRID))
    axes = tuple(replace(a, split_axis="g") if a.name == "c" else a for a in axes)
    with pytest.raises(errors.GraphError, match="only a loop or tile axis is split, and a grid or"):
        replace(BLOCK, axes=axes)


def test_a_part_is_not_stored_as_a_total():
    with pytest.raises(errors.GraphError, match=r"output part does not carry the axes"):
        replace(BLOCK, outputs=(BlockOutput("part", ("m", "n"), "float16"),))


def test_parts_may_be_stored_side_by_side_for_another_kernel():
    stored = replace(
        BLOCK, stages=BLOCK.stages[:1], outputs=(BlockOutput("part", ("c", "m", "n"), "float32"),)
    )
    x, w = torch.randn(3, 64, dtype=torch.float64), torch.randn(64, 48, dtype=torch.float64)
    (parts,) = run_block_graph(stored, [x, w], TorchAlgebra(torch.float64), 2)
    want = torch.stack([x[:, k : k + 16] @ w[k : k + 16] for k in range(0, 64, 16)])
    torch.testing.assert_close(parts, want)


def test_an_exchange_is_not_in_a_loop():
    looped = Stage("k", BLOCK.stages[1].body)
    with pytest.raises(errors.GraphError, match="inside the loop over k; reduce it in a stage"):
        replace(BLOCK, stages=(BLOCK.stages[0], looped))


def test_what_is_exchanged_does_not_carry_the_axis_that_the_cluster_splits():
    block = cluster_ugraphs.rms_norm().block_ops[0].block
    body = block.stages[0].body
    wrong = (
        *body[:3],
        BlockOp("z", "mul", ("x", "part"), ("m", "c", "k")),
        BlockOp("y", "sum", ("z",), ("m", "k"), (), "c"),
        *body[3:],
    )
    with pytest.raises(errors.GraphError, match="y reduces over c, but z still carries k"):
        replace(block, stages=(Stage(None, wrong),))


@pytest.mark.parametrize("over", ["m", "n", "k", "z"])
def test_only_tile_and_cluster_axes_are_reduced(over):
    total = replace(BLOCK.stages[1].body[0], over=over)
    with pytest.raises(errors.GraphError):
        replace(BLOCK, stages=(BLOCK.stages[0], Stage(None, (total,))))


def test_a_bias_added_before_the_exchange_is_refused_by_the_proof():
    """Each block of the cluster adds it, so the total has it as often as there are blocks."""
    g = mi.new_kernel_graph()
    x, w, b = g.new_input((3, 64)), g.new_input((64, 48)), g.new_input((1, 48))
    g.mark_output(g.add(g.matmul(x, w), b))
    inputs = (*BLOCK.inputs, BlockInput("b", (2,), (None, "n")))
    early = Stage(
        None,
        (
            BlockOp("biased", "add", ("part", "b"), ("m", "n", "c")),
            BlockOp("y", "sum", ("biased",), ("m", "n"), (), "c"),
        ),
    )
    late = Stage(
        None,
        (
            BlockOp("total", "sum", ("part",), ("m", "n"), (), "c"),
            BlockOp("y", "add", ("total", "b"), ("m", "n")),
        ),
    )

    def fused(stage: Stage):
        block = replace(BLOCK, inputs=inputs, stages=(BLOCK.stages[0], stage))
        return mutants.fuse(g, block)

    assert isinstance(prove(fused(late)), Accepted)
    verdict = prove(fused(early))
    assert isinstance(verdict, Rejected) and "differs from the program" in verdict.reason


def test_the_search_does_not_look_into_kernels_that_add_up_splits_in_a_cluster():
    """Lowering would take the sum of a function of each part for the function of the sum."""
    lowered = lower(cluster_ugraphs.split_linear().kernels)
    assert isinstance(lowered, Rejected)
    assert "adds up splits among the blocks of a cluster" in lowered.reason


# -- written by hand -------------------------------------------------------------------------------


def linear_of_norm(k: int = 512, n: int = 64):
    """Return the program RMSNorm + Linear, and an empty kernel graph with its inputs."""
    program, kernels = mi.new_kernel_graph(), mi.new_kernel_graph()
    made = []
    for g in (program, kernels):
        made.append((g.new_input((8, k), name="x"), g.new_input((k, n), name="w")))
    program.mark_output(program.matmul(program.rms_norm(made[0][0]), made[0][1]))
    return program, kernels, *made[1]


def test_a_cluster_is_written_by_hand():
    program, kernels, X, W = linear_of_norm()
    bg = mi.new_block_graph(grid_dim=(4, 8), forloop_range=2, cluster="y")
    x, w = bg.new_input(X, {"y": 1}, fmap=1), bg.new_input(W, {"x": 1, "y": 0}, fmap=0)
    assert (x.dims, w.dims) == ((8, 32), (32, 16))
    y = bg.cluster_reduction(bg.accum(bg.matmul(x, w)))
    s = bg.cluster_reduction(bg.accum(bg.reduction(bg.square(x), 1)))
    bg.new_output(bg.mul(y, bg.rsqrt(bg.add(bg.mul(s, 1 / 512), 1e-6))), omap={"x": 1})
    kernels.mark_output(*kernels.customized([X, W], bg))
    block = kernels.ops[0].block
    assert [(a.name, a.size, a.role.value, a.split_axis) for a in block.axes] == [
        ("n", 64, "grid", None),
        ("k_split", 8, "cluster", None),
        ("m", 8, "tile", None),
        ("k", 512, "loop", "k_split"),
    ]
    u = mi.ugraph(program, kernels)
    inputs = [torch.randn(t.dims).half() for t in program.inputs]
    want = reference_executor.run(program, inputs)[0]
    torch.testing.assert_close(u(inputs)[0].double(), want, rtol=1e-2, atol=1e-2)
    with pytest.raises(errors.GraphError, match="blocks form clusters, which Triton does not"):
        bg.schedule()


def test_each_block_of_a_cluster_stores_its_part_of_a_row():
    program, kernels = mi.new_kernel_graph(), mi.new_kernel_graph()
    program.mark_output(program.softmax(program.new_input((4, 96))))
    X = kernels.new_input((4, 96))
    bg = mi.new_block_graph(grid_dim=(4, 2), cluster="y")
    x = bg.new_input(X, {"x": 0, "y": 1})
    e = bg.exp(bg.sub(x, bg.cluster_reduction(bg.reduction(x, 1, "max"), "max")))
    bg.new_output(bg.div(e, bg.cluster_reduction(bg.reduction(e, 1))), omap={"x": 0, "y": 1})
    kernels.mark_output(*kernels.customized([X], bg))
    assert isinstance(mi.verify(program, kernels), Accepted)


def test_a_forgotten_cluster_reduction_leaves_partial_results():
    program, kernels, X, W = linear_of_norm()
    bg = mi.new_block_graph(grid_dim=(4, 8), cluster="y")
    x, w = bg.new_input(X, {"y": 1}), bg.new_input(W, {"x": 1, "y": 0})
    bg.new_output(bg.matmul(x, w), omap={"x": 1})
    made = kernels.customized([X, W], bg)
    assert made[0].dims == (8, 8, 64)  # one for each block of a cluster
    kernels.mark_output(*made)
    assert isinstance(mi.verify(program, kernels), Rejected)


@pytest.mark.parametrize("cluster", ["z", "x", "y", 3])
def test_the_cluster_is_a_grid_dim_of_two_to_eight_blocks(cluster):
    with pytest.raises(errors.GraphError, match="must be one of the grid dims x, y, and have 2 to"):
        mi.new_block_graph(grid_dim=(16, 1), cluster=cluster)


def test_only_partial_results_of_a_cluster_are_reduced_among_its_blocks():
    _, _, X, W = linear_of_norm()
    plain = mi.new_block_graph(grid_dim=(4, 8))
    x, w = plain.new_input(X, {"y": 1}), plain.new_input(W, {"x": 1, "y": 0})
    with pytest.raises(errors.GraphError, match="no partial result of the blocks of a cluster"):
        plain.cluster_reduction(plain.matmul(x, w))
    bg = mi.new_block_graph(grid_dim=(4, 8), forloop_range=2, cluster="y")
    x, w = bg.new_input(X, {"y": 1}, 1), bg.new_input(W, {"x": 1, "y": 0}, 0)
    with pytest.raises(errors.GraphError, match="no partial result of the blocks of a cluster"):
        bg.cluster_reduction(x)
    with pytest.raises(errors.GraphError, match="is the sum over one trip of the loop only"):
        bg.cluster_reduction(bg.matmul(x, w))
    whole = mi.new_block_graph(grid_dim=(4, 8), cluster="y")
    x_whole = whole.new_input(X, {"y": 1})
    scaled = whole.mul(x_whole, whole.reduction(x_whole, 1))
    with pytest.raises(errors.GraphError, match="still holds dim 1 of x; reduce or accumulate it"):
        whole.cluster_reduction(scaled)
    y = bg.accum(bg.matmul(x, w))
    with pytest.raises(errors.GraphError, match="unknown kind 'mean'; use sum or max"):
        bg.cluster_reduction(y, "mean")
    total = bg.cluster_reduction(y)
    with pytest.raises(errors.GraphError, match="no partial result of the blocks of a cluster"):
        bg.cluster_reduction(total)
