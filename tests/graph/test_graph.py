"""Building kernel graphs and block graphs: every program, and every error."""

from dataclasses import replace

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.graph.block import Accumulator, Axis, BlockInput, BlockOp, BlockOutput, Role, Stage
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.inputs import check_inputs
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import library_ugraph
from tests.helpers import programs, ugraphs


@pytest.mark.parametrize("small", [True, False], ids=["small", "full"])
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_programs_build(name, small):
    g = programs.build(mi, name, small)
    assert len(g.outputs) == 1 and g.outputs[0].dtype == torch.float16
    assert len(library_ugraph(g).kernels.ops) == len(g.ops) and not library_ugraph(g).is_fused


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_programs_run(name):
    g = programs.build(mi, name)
    inputs = ugraphs.random_inputs(g)
    got, want = run_kernel_graph(g, inputs)[0], run_kernel_graph(g, inputs, torch.float64)[0]
    assert got.dtype == torch.float16 and want.dtype == torch.float64
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def test_outputs_are_what_nothing_reads_unless_marked():
    g = mi.new_graph()
    x = g.new_input((2, 3))
    y, z = g.exp(x), g.neg(x)
    assert g.outputs == (y, z)
    g.mark_output(z)
    assert g.outputs == (z,)


def test_tensors_have_dims_dtype_name_and_strides():
    g = mi.new_graph()
    w = g.new_input((4, 8), mi.bfloat16, strides=(1, 4), name="w")
    assert (w.dims, w.dtype, w.name, w.strides) == ((4, 8), torch.bfloat16, "w", (1, 4))
    assert g.inputs == (w,) and str(w) == "%w"


def test_automatic_names_give_way():
    g = mi.new_graph()
    g.new_input((2,), name="t1")
    assert g.new_input((2,)).name == "t1_"


WRONG_INPUTS = [
    (dict(dims=()), "new_input: dims must be positive integers"),
    (dict(dims=(0, 3)), "new_input: dims must be positive integers"),
    (dict(dims=(1 << 40, 1 << 40)), "product below 2^63"),
    (dict(dims=(2, 3), strides=(1,)), "must be one non-negative integer per dim"),
    (dict(dims=(2, 3), strides=(-1, 1)), "must be one non-negative integer per dim"),
    (dict(dims=(2, 3), name="a b"), "'a b' is taken or not an identifier"),
    (dict(dims=(2, 3), dtype="float8"), "unsupported dtype 'float8'; supported: float16"),
    (dict(dims=(2, 3), dtype=torch.float64), "unsupported dtype torch.float64; supported: float16"),
]


@pytest.mark.parametrize("given, message", WRONG_INPUTS)
def test_wrong_inputs(given, message):
    with pytest.raises(errors.GraphError) as e:
        mi.new_graph().new_input(**given)
    assert message in str(e.value)


def test_foreign_tensors_are_refused():
    g, other = mi.new_graph(), mi.new_graph()
    x, y = g.new_input((2, 3)), other.new_input((2, 3), name="y")
    for call in (lambda: g.add(x, y), lambda: g.mark_output(y)):
        with pytest.raises(errors.GraphError, match="tensor %y belongs to another graph"):
            call()
    with pytest.raises(
        errors.GraphError, match="expected a tensor of this graph or a number, got Tensor"
    ):
        g.add(x, torch.ones(2, 3))


def test_mixed_dtypes_are_refused():
    g = mi.new_graph()
    with pytest.raises(
        errors.DTypeError,
        match=r"operands have dtypes bfloat16, float16; bring them to one with graph\.cast",
    ):
        g.add(g.new_input((2,), mi.float16), g.new_input((2,), mi.bfloat16))


def test_graphs_compare_by_content():
    assert programs.build(mi, "lora_paper") == programs.build(mi, "lora_paper")
    assert programs.build(mi, "lora_paper") != programs.build(mi, "lora_4096")


# -- block graphs ---------------------------------------------------------------------------------


def test_customized_checks_operands():
    block = ugraphs.rms_norm_linear().block_ops[0].block
    g = KernelGraph()
    tensors = [g.new_input(d) for d in ((3, 64), (1, 64), (64, 47))]
    with pytest.raises(
        errors.GraphError, match=r"block input w wants \(64, 48\), operand 2 is \(64, 47\)"
    ):
        g.customized(tensors, block)
    with pytest.raises(errors.GraphError, match="block input w reads operand 2, there are 2"):
        g.customized(tensors[:2], block)


def test_contractions_are_found():
    block = ugraphs.rms_norm_linear().block_ops[0].block
    (c,) = block.contractions.values()
    assert (c.out, c.a, c.b, c.over, c.product) == ("y", "xg", "w", "k", "p")
    assert set(ugraphs.attention().block_ops[0].block.contractions) == {"s0", "s1", "acc"}


def _mutations():
    """Return changes to the RMSNorm + linear block graph.

    Each has a name, the change, and what its error says.
    """

    def stage(i, **kw):
        return lambda b: replace(
            b, stages=tuple(replace(s, **kw) if j == i else s for j, s in enumerate(b.stages))
        )

    def op(out, fn, args, axes, **kw):
        return BlockOp(out, fn, args, axes, **kw)

    return [
        (
            "two loops",
            lambda b: replace(b, axes=(*b.axes, Axis("j", 3, Role.LOOP))),
            "at most one axis loops",
        ),
        (
            "axis twice",
            lambda b: replace(b, axes=(*b.axes, Axis("m", 3, Role.TILE))),
            "axis names must be unique",
        ),
        (
            "empty axis",
            lambda b: replace(b, axes=(*b.axes, Axis("z", 0, Role.TILE))),
            "axis 'z' of size 0",
        ),
        ("name twice", stage(1, body=(op("x", "exp", ("s",), ("m",)),)), "x is defined twice"),
        (
            "bad name",
            stage(1, body=(op("a b", "exp", ("s",), ("m",)),)),
            "'a b' is not an identifier",
        ),
        (
            "unknown value",
            stage(1, body=(op("o", "exp", ("nope",), ("m",)),)),
            "o reads nope, which is not available",
        ),
        (
            "value of a loop",
            stage(1, body=(op("o", "exp", ("xg",), ("m", "k")),)),
            "o reads xg, which is not available",
        ),
        ("wrong axes", stage(1, body=(op("o", "exp", ("s",), ("m", "n")),)), "o carries"),
        (
            "an axis twice",
            stage(1, body=(op("e", "exp", ("s",), ("m", "m")), op("o", "exp", ("y",), ("m", "n")))),
            "e: axes ('m', 'm')",
        ),
        (
            "loop axis outside",
            stage(1, body=(op("o", "exp", ("x",), ("m", "k")),)),
            "carries the loop axis outside a loop",
        ),
        (
            "unknown fn",
            stage(1, body=(op("o", "expp", ("s",), ("m",)),)),
            "unknown op 'expp' (did you mean exp",
        ),
        (
            "not elementwise",
            stage(1, body=(op("o", "softmax", ("s",), ("m",)),)),
            "softmax is not elementwise",
        ),
        ("arity", stage(1, body=(op("o", "add", ("s",), ("m",)),)), "add takes 2 operands"),
        ("only numbers", stage(1, body=(op("o", "add", (1.0, 2.0), ()),)), "one a value at least"),
        (
            "attribute",
            stage(1, body=(op("o", "clamp", ("s",), ("m",), attrs=(("lo", 1.0),)),)),
            "clamp: unknown argument 'lo'",
        ),
        (
            "over a grid axis",
            stage(1, body=(op("o", "sum", ("y",), ("n",), over="m"),)),
            "must be a tile or cluster axis",
        ),
        (
            "over nothing",
            stage(1, body=(op("o", "sum", ("y",), ("m", "n"), over="zz"),)),
            "must be a tile or cluster axis",
        ),
        (
            "accumulator",
            stage(0, accumulators=(Accumulator("s", "gamma", "mean", ()),)),
            "must sum or max",
        ),
        (
            "accumulator axes",
            stage(0, accumulators=(Accumulator("s", "x2", "sum", ("m", "n")),)),
            "accumulator s carries ('m',)",
        ),
        ("stage axis", stage(0, loop="m"), "a stage loops over m, which is not the loop axis"),
        (
            "output",
            lambda b: replace(b, outputs=(BlockOutput("o", ("m",), "float16"),)),
            "output o does not carry",
        ),
        ("no output", lambda b: replace(b, outputs=()), "there is no output"),
        (
            "output dtype",
            lambda b: replace(b, outputs=(BlockOutput("o", ("m", "n"), "float8"),)),
            "unsupported dtype 'float8'",
        ),
        (
            "input axes",
            lambda b: replace(b, inputs=(replace(b.inputs[0], axes=("m", "m")), *b.inputs[1:])),
            "repeat or are unknown",
        ),
        (
            "joined sizes",
            lambda b: replace(
                b, inputs=(*b.inputs[:2], BlockInput("w", (2, 3), ("k", "n"), "n", (8, 8)))
            ),
            "sum to 48",
        ),
    ]


MUTATIONS = _mutations()


@pytest.mark.parametrize(
    "change, message", [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS]
)
def test_wrong_block_graphs_are_refused(change, message):
    with pytest.raises(errors.GraphError) as e:
        change(ugraphs.rms_norm_linear().block_ops[0].block)
    assert message in str(e.value)


def test_block_inputs_need_a_size_per_source():
    with pytest.raises(errors.GraphError, match="2 sources need a joined axis and a size each"):
        BlockInput("w", (0, 1), ("n", "k"), "n", (4,))
    with pytest.raises(errors.GraphError, match="has no source"):
        BlockInput("w", (), ("n", "k"))
    assert Stage(None, ()).accumulators == ()


# -- inputs at call time --------------------------------------------------------------------------

WRONG_CALLS = [
    (lambda x, w: x, "expected a list of 2 tensors in the order of graph.inputs, got one tensor"),
    (lambda x, w: [x], "expected a list of 2 tensors in the order of graph.inputs, got 1"),
    (lambda x, w: [x, 3], "input 1 (w): expected a torch tensor, got int"),
    (lambda x, w: [x[:1], w], "input 0 (x): built for shape (2, 3), got (1, 3)"),
    (lambda x, w: [x.float(), w], "input 0 (x): built for float16, got float32"),
    (
        lambda x, w: [x, w.T.contiguous().T],
        "input 1 (w): built for strides (4, 1), got (1, 3); call .contiguous()",
    ),
    (lambda x, w: [x, w.to("meta")], "input 1 (w): is on meta, earlier inputs are on cpu"),
]


@pytest.mark.parametrize("make, message", WRONG_CALLS)
def test_wrong_tensors_at_call_time(make, message):
    g = mi.new_graph()
    g.matmul(g.new_input((2, 3), name="x"), g.new_input((3, 4), name="w"))
    x, w = torch.zeros(2, 3, dtype=torch.float16), torch.zeros(3, 4, dtype=torch.float16)
    check_inputs(g, [x, w], "cpu")
    with pytest.raises(errors.InputError) as e:
        check_inputs(g, make(x, w))
    assert str(e.value).startswith(message)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = property(lambda self: torch.device("cuda"))


def test_codes_that_do_not_begin_with_a_word_are_refused_on_a_gpu():
    g = mi.new_graph()
    g.cast(g.new_input((3, 4), "int8", name="codes"), "float16")
    whole, shifted = (torch.zeros(16, dtype=torch.int8)[n:][:12].view(3, 4) for n in (4, 1))
    check_inputs(g, [shifted])
    check_inputs(g, [whole.as_subclass(OnGpu)])
    with pytest.raises(errors.InputError, match=r"begins at byte 1 .* call .clone\(\)"):
        check_inputs(g, [shifted.as_subclass(OnGpu)])


def test_the_library_path_never_copies_joined_weights():
    g = mi.new_kernel_graph()
    x, gamma = g.new_input((2, 64)), g.new_input((1, 64))
    weights = [g.new_input((64, n), strides=(1, 64)) for n in (32, 16, 16)]
    biases = [g.new_input((1, n)) for n in (32, 16, 16)]
    g.mark_output(g.add(g.matmul(g.rms_norm(x, gamma), g.concat(weights, 1)), g.concat(biases, 1)))
    library = library_ugraph(g)
    assert [op.name for op in library.kernels.ops] == [
        "rms_norm",
        "matmul",
        "matmul",
        "matmul",
        "concat",
        "concat",
        "add",
    ]
    inputs = [
        torch.empty_strided(t.dims, t.strides, dtype=torch.float64).normal_() for t in g.inputs
    ]
    joined, apart = (
        run_kernel_graph(graph, inputs, torch.float64)[0] for graph in (g, library.kernels)
    )
    assert float((joined - apart).abs().max()) < 1e-9


@pytest.mark.parametrize(
    "wrong",
    [
        lambda g, x: g.permute(x, (0, 5)),
        lambda g, x: g.permute(x, (0, 3)),
        lambda g, x: g.permute(x, (0, "a")),
        lambda g, x: g.permute(x, 1),
        lambda g, x: g.permute(3, (0, 1)),
        lambda g, x: g.permute(x, (False, True)),
        lambda g, x: g.reshape(x, 24),
        lambda g, x: g.concat(x, 0),
        lambda g, x: g.concat([1, 2], 0),
        lambda g, x: g.softmax(5),
        lambda g, x: g.within(None, x, x),
        lambda g, x: g.new_input(None),
        lambda g, x: g.new_input((2, 3), strides=3),
        lambda g, x: g.new_input((2, 3), name=3),
        lambda g, x: g.new_input((2, 3), name="\ufb01"),
        lambda g, x: g.input_like(3),
        lambda g, x: g.customized(x, mi.new_block_graph()),
        lambda g, x: g.customized(None, None),
    ],
)
def test_wrong_arguments_are_errors_of_the_graph_and_change_nothing(wrong):
    g = mi.new_kernel_graph()
    x = g.new_input((4, 6))
    before = str(g)
    with pytest.raises(errors.GraphError):
        wrong(g, x)
    assert str(g) == before


def test_outputs_are_marked_all_or_none():
    g = mi.new_kernel_graph()
    x = g.new_input((4, 6))
    y = g.exp(x)
    with pytest.raises(errors.GraphError):
        g.mark_output(x, None)
    assert g.outputs == (y,)


@pytest.mark.parametrize(
    "of",
    [
        lambda g, n, x: g.mul(n, 3),
        lambda g, n, x: g.exp(n),
        lambda g, n, x: g.add(n, n),
        lambda g, n, x: g.reduction(n, 1),
        lambda g, n, x: g.softmax(n),
        lambda g, n, x: g.within(n, g.slice(n, 1, 0, 1), g.slice(n, 1, 0, 1)),
        lambda g, n, x: g.rms_norm(n),
        lambda g, n, x: g.matmul(x, n),
        lambda g, n, x: g.rope(n, n, n),
        lambda g, n, x: g.cache_append(x, x, g.new_input((1,), "float32")),
        lambda g, n, x: g.concat([n, g.new_input((4, 4), "int64")], 1),
    ],
)
def test_whole_numbers_are_not_computed_with(of):
    """torch would give another dtype than the graph says, or raise an error when it runs."""
    g = mi.new_kernel_graph()
    n, x = g.new_input((4, 4), "int32"), g.new_input((4, 4), "float32")
    with pytest.raises(errors.DTypeError):
        of(g, n, x)
    g.mul(g.cast(n, "float32"), 3)
    g.permute(g.concat([n, n], 1), (1, 0))
