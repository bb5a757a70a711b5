"""The op table: traced bodies against their oracles, shape rules, and error texts."""

import math
import pydoc
from dataclasses import replace

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.ops import scalar, table


def entry(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
    index = x.nan_to_num(nan=math.inf).floor().clamp(0, len(values) - 1).long()
    return torch.stack(values)[index]


def byte_bits(x, start, count):
    def whole(a, n):
        return torch.tensor([int(v) % n if math.isfinite(v) else 0 for v in a.floor().flatten()])

    x, start = torch.broadcast_tensors(x, torch.as_tensor(start, dtype=x.dtype))
    places = torch.div(whole(x, 256), 2 ** whole(start, 8), rounding_mode="floor")
    return (places % 2 ** int(count)).view(x.shape).to(x.dtype)


FLOAT64 = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "log1p": torch.log1p,
    "max": torch.maximum,
    "min": torch.minimum,
    "pow": torch.pow,
    "select": lambda m, x, y: torch.where(m != 0, x, y),
    "lookup": entry,
    "bits": byte_bits,
}
ATTRS = {
    "clamp": {"min": -0.5, "max": 2.0},
    "cast": {"dtype": "float64"},
    "lookup": {"values": (0.5, -1.5, 0.0, 2.0)},
    "bits": {"count": 2},
}
ELEMENTWISE = [op.name for op in table.OPS.values() if op.kind == "elementwise"]
EXTREME = torch.tensor(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        1e-30,
        -1e-30,
        1e-300,
        30.0,
        -30.0,
        700.0,
        -700.0,
        1e30,
        -1e30,
        math.inf,
        -math.inf,
        math.nan,
    ],
    dtype=torch.float64,
)


@pytest.mark.parametrize("values", ["random", "extreme"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_traced_body_equals_oracle(name, values):
    op, attrs = table.lookup(name), ATTRS.get(name, {})
    x = (
        torch.randn(64, 64, dtype=torch.float64)
        if values == "random"
        else EXTREME[:, None].expand(-1, len(EXTREME))
    )
    args = (x, x.T, x.flip(0))[: op.arity[0]]
    program = op.program(**attrs)
    got = program.evaluate(FLOAT64, args, lambda c: torch.tensor(c, dtype=torch.float64))
    oracle = args[0] if name == "cast" else op.oracle(*args, **attrs)
    torch.testing.assert_close(got, oracle, rtol=1e-12, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_bodies_use_known_primitives_and_are_traced_once(name):
    op, attrs = table.lookup(name), ATTRS.get(name, {})
    assert {node[0] for node in op.program(**attrs).nodes} <= {"arg", "const", *scalar.PRIMITIVES}
    assert op.program(**attrs) is op.program(**attrs)


def test_composites_expand_to_their_oracle():
    from mirage_hf.graph.execute import run_kernel_graph

    x, w, b = (
        torch.randn(5, 16, dtype=torch.float64),
        torch.randn(1, 16, dtype=torch.float64),
        torch.randn(1, 16, dtype=torch.float64),
    )
    for name, params, attrs in (
        ("rms_norm", (w,), {"eps": 1e-3}),
        ("layer_norm", (w, b), {"eps": 1e-3}),
        ("softmax", (), {"dim": 0}),
        ("rms_norm", (), {}),
        ("layer_norm", (), {}),
        ("layer_norm", (w,), {}),
    ):
        op, g = table.lookup(name), mi.new_kernel_graph()
        tensors = [g.new_input(t.shape, "float32") for t in (x, *params)]
        g.mark_output(op.expand(g, *tensors, **attrs))
        torch.testing.assert_close(
            run_kernel_graph(g, [x, *params], torch.float64)[0], op.oracle(x, *params, **attrs)
        )


SHAPES = [
    ("add", ((3, 1), (1, 4)), {}, (3, 4)),
    ("matmul", ((2, 1, 3, 4), (5, 4, 6)), {}, (2, 5, 3, 6)),
    ("reduction", ((3, 4),), {"dim": -1}, (3, 1)),
    ("softmax", ((3, 4),), {"dim": 0}, (3, 4)),
    ("rms_norm", ((3, 4), (1, 4)), {}, (3, 4)),
    ("layer_norm", ((3, 4), (4,), (1, 4)), {}, (3, 4)),
    ("concat", ((3, 4), (2, 4), (1, 4)), {"dim": 0}, (6, 4)),
    ("slice", ((3, 9),), {"dim": 1, "start": 2, "stop": 5}, (3, 3)),
    ("reshape", ((3, 4),), {"dims": (2, 6)}, (2, 6)),
    ("permute", ((2, 3, 4),), {"order": (2, 0, 1)}, (4, 2, 3)),
    ("rope", ((2, 3, 8), (1, 3, 4), (1, 3, 4)), {}, (2, 3, 8)),
    ("cache_append", ((2, 3, 9, 4), (2, 3, 1, 4), (2,)), {}, (2, 3, 9, 4)),
    ("clamp", ((3,),), {"min": 0.0}, (3,)),
    ("cast", ((3,),), {"dtype": "bfloat16"}, (3,)),
    ("lookup", ((3, 4),), {"values": (1.0, 2.0)}, (3, 4)),
    ("bits", ((3, 4), (1, 4)), {"count": 3}, (3, 4)),
    ("within", ((2, 3, 4), (3, 1), (3, 1)), {"dim": 2}, (2, 3, 4)),
    ("softmax", ((2, 3, 4), (2, 1, 1), (2, 1, 1)), {"dim": -1}, (2, 3, 4)),
]


@pytest.mark.parametrize("name, dims, attrs, want", SHAPES, ids=[s[0] for s in SHAPES])
def test_shape_rules_agree_with_the_oracle(name, dims, attrs, want):
    op = table.lookup(name)
    assert op.infer(*dims, **(op.attrs | attrs)) == want
    tensors = [
        torch.zeros(d, dtype=torch.int64) if name == "cache_append" and i == 2 else torch.randn(d)
        for i, d in enumerate(dims)
    ]
    assert tuple(op.oracle(*tensors, **(op.attrs | attrs)).shape) == want


WRONG = [
    (
        lambda g, x, w: g.matmul(x, w),
        "matmul: inner sizes differ, X (16, 4096) and W (406, 4096): X has 4096 columns, W has 406 "
        "rows; "
        "the sizes fit if W is transposed (graph.permute, or strides=(1, 4096) at new_input)",
    ),
    (
        lambda g, x, w: g.add(x, w),
        "add: shapes (16, 4096) and (406, 4096) do not broadcast; sizes must be equal or 1, "
        "aligned at the right",
    ),
    (
        lambda g, x, w: g.reduction(x, 2),
        "reduction: dim 2 is out of range for a tensor of 2 dims; use -2 to 1",
    ),
    (
        lambda g, x, w: g.reduction(x, 1, "median"),
        "reduction: unknown kind 'median'; use sum, mean or max",
    ),
    (lambda g, x, w: g.slice(x, 0, 3, 20), "slice: [3, 20) is not a range inside dim 0 of size 16"),
    (lambda g, x, w: g.slice(x, 0, "a", 3), "slice: start must be an integer, it is 'a'"),
    (lambda g, x, w: g.reshape(x, (3, 3)), "reshape: (16, 4096) has 65536 elements, (3, 3) has 9"),
    (
        lambda g, x, w: g.reshape(x, (-1, -65536)),
        "reshape: dims must be positive integers, it is (-1, -65536)",
    ),
    (lambda g, x, w: g.permute(x, (0, 0)), "permute: (0, 0) is not an order of 2 dims"),
    (
        lambda g, x, w: g.rms_norm(x, w),
        "rms_norm: weight or bias (406, 4096) does not fit the last dim of (16, 4096); give it as "
        "(1, 4096)",
    ),
    (lambda g, x, w: g.rms_norm(x, eps=0), "rms_norm: eps must be positive, it is 0"),
    (
        lambda g, x, w: g.concat([x, g.permute(w, (1, 0))], 0),
        "concat: (16, 4096) and (4096, 406) differ outside dim 0",
    ),
    (lambda g, x, w: g.concat([], 0), "concat: needs at least one tensor"),
    (lambda g, x, w: g.clamp(x, lo=1), "clamp: unknown argument 'lo'; it takes min, max"),
    (lambda g, x, w: g.add(x), "add: takes 2 operands, got 1"),
    (
        lambda g, x, w: g.clamp(x, 0, 1),
        "clamp: takes 1 operand, got 3; give min, max by name, as min=…",
    ),
    (
        lambda g, x, w: g.add(1, 2),
        "add: needs tensors of this graph, got (1.0, 2.0); elementwise ops also take "
        "numbers, if one operand is a tensor",
    ),
    (lambda g, x, w: g.add(x, math.nan), "add: the number is NaN"),
    (lambda g, x, w: g.add(x, 10**400), "add: the number does not fit in a float64"),
    (
        lambda g, x, w: g.rope(x, w, w),
        "rope: shapes (16) and (406) do not broadcast; sizes must be equal or 1, aligned at the "
        "right",
    ),
    (
        lambda g, x, w: g.cast(x, "float8"),
        "unsupported dtype 'float8'; supported: float16, bfloat16, float32, int32, int64",
    ),
    (lambda g, x, w: g.silo(x), "unknown op 'silo' (did you mean silu?). Known ops: "),
    (
        lambda g, x, w: g.sum(x),
        "unknown op 'sum'; here it is reduction(x, dim, \"sum\"). Known ops: ",
    ),
    (
        lambda g, x, w: g.transpose(x, 0, 1),
        "unknown op 'transpose'; here it is permute. Known ops: ",
    ),
    (lambda g, x, w: g.xyzzy(x), "unknown op 'xyzzy'. Known ops: "),
]


@pytest.mark.parametrize(
    "call, message", WRONG, ids=[m.split(":")[0] + str(i) for i, (_, m) in enumerate(WRONG)]
)
def test_errors_say_what_where_and_the_way_out(call, message):
    g = mi.new_kernel_graph()
    x, w = g.new_input((16, 4096), name="X"), g.new_input((406, 4096), name="W")
    with pytest.raises(errors.GraphError) as e:
        call(g, x, w)
    assert str(e.value).startswith(message)


@pytest.mark.parametrize("graph", [mi.KernelGraph, mi.BlockGraphBuilder])
def test_help_shows_every_op_with_its_operands(graph):
    shown = pydoc.plain(pydoc.render_doc(graph))
    assert (
        "clamp(self, x, /, *, min=-inf, max=inf)\n |      x, or `min` where it is below" in shown
        and " matmul(self, a:" in shown
    )
    missing = [n for n in ELEMENTWISE if f" {n}(self, " not in shown]
    assert not missing and all(table.lookup(n).formula for n in ELEMENTWISE if n != "cast")


def test_an_op_that_is_registered_later_is_a_method_too(monkeypatch):
    monkeypatch.setattr(
        table, "OPS", {**table.OPS, "cube": replace(table.lookup("square"), name="cube")}
    )
    g = mi.new_kernel_graph()
    g.cube(g.new_input((2, 3)))
    assert g.ops[0].name == "cube"


def test_registering_a_taken_name_is_refused():
    with pytest.raises(errors.GraphError, match="op 'add' is already in the table"):
        table.register(table.lookup("add"))
