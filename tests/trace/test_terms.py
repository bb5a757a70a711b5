"""Which torch ops are ops of the op table, and which have no term."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirage_hf.trace.term import Term
from mirage_hf.trace.terms import Terms
from tests.helpers.traced_functions import ROWS, WIDE, WIDTH, normal, recorded, terms_of

X = normal(ROWS, 1, WIDTH)
WEIGHT, GAMMA, BIAS = normal(WIDE, WIDTH, seed=1), normal(WIDTH, seed=2), normal(WIDE, seed=3)
BETA = normal(WIDTH, seed=4)


def text_of(x: Any) -> str:
    """Return a term as a formula: x for values, w for weights."""
    if not isinstance(x, Term):
        return f"{x:g}"
    if not x.is_op:
        return {"value": "x", "weight": "w"}[x.op]
    operands = ", ".join(map(text_of, x.operands))
    return f"{x.op}({operands})"


def formula(function: Callable[..., Any], x: Tensor = X) -> str:
    """Return the last term of a function as a formula, "" without any."""
    terms = terms_of(function, {"x": x})
    return text_of(terms[-1]) if terms else ""


def linear(x: Tensor) -> Tensor:
    return F.linear(x, WEIGHT)


# -- norms and activations ------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor | None = GAMMA, eps: float = 1e-5) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) if weight is None else weight * wide.to(x.dtype)


def by_power(x: Tensor) -> Tensor:
    squares = torch.pow(x, 2).mean(-1, keepdim=True) + 1e-5
    return GAMMA * (x * torch.pow(squares, -0.5))


def by_square(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * GAMMA


def with_offset(x: Tensor) -> Tensor:
    wide = rms_norm(x.float(), None)
    return (wide * (1.0 + GAMMA.float())).type_as(x)


def gelu_by_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


NORMS = {
    "rms_norm(x, w)": [
        rms_norm,
        by_power,
        by_square,
    ],
    "rms_norm(x)": [lambda x: rms_norm(x, None)],
    "rms_norm(x, add(w, 1))": [with_offset],
    "layer_norm(x, w, w)": [lambda x: F.layer_norm(x, (WIDTH,), GAMMA, BETA)],
    "layer_norm(x, w)": [lambda x: F.layer_norm(x, (WIDTH,), GAMMA)],
    "gelu_tanh(x)": [gelu_by_tanh, lambda x: F.gelu(x, approximate="tanh")],
    "gelu(x)": [F.gelu],
    "silu(x)": [F.silu],
}


@pytest.mark.parametrize(
    ("wanted", "function"), [(text, f) for text, forms in NORMS.items() for f in forms]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_activations_are_recognized(
    wanted: str, function: Callable[..., Any], dtype: torch.dtype
) -> None:
    """Also if they are computed in float32 and rounded."""
    of_weights = {"GAMMA": GAMMA.to(dtype), "BETA": BETA.to(dtype)}
    module = globals()
    before = {name: module[name] for name in of_weights}
    module.update(of_weights)
    try:
        terms = terms_of(lambda x: function(x), {"x": X.to(dtype)})
    finally:
        module.update(before)
    assert text_of(terms[-1]) == wanted
    if wanted.startswith(("rms", "layer")):
        assert terms[-1].attrs["eps"] == pytest.approx(1e-5)
    # the steps of a norm are no terms that somebody needs
    assert len(terms) <= 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),  # no eps
        lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5),  # a sum
        lambda x: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-5),  # cubes
        lambda x: (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),  # of another
        lambda x: x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),  # not the inverse
        lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.04 * x**3))),
        lambda x: 0.5 * x * (1 - torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ],
)
def test_what_is_almost_a_norm_or_gelu_is_none(function: Callable[..., Any]) -> None:
    assert not formula(function).startswith(("rms_norm", "gelu"))


# -- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "function"),
    [
        ("matmul(x, w)", linear),
        ("matmul(x, w)", lambda x: x[:, 0] @ WEIGHT.T),
        ("add(matmul(x, w), w)", lambda x: F.linear(x, WEIGHT, BIAS)),
        ("add(matmul(x, w), w)", lambda x: torch.addmm(BIAS, x[:, 0], WEIGHT.T)),
        ("add(matmul(x, w), w)", lambda x: linear(x) + BIAS),
        ("add(matmul(x, w), x)", lambda x: F.linear(x, WEIGHT[:WIDTH]) + x),
        ("add(matmul(x, w), x)", lambda x: x + F.linear(x, WEIGHT[:WIDTH])),
        ("mul(silu(matmul(x, w)), matmul(x, w))", lambda x: F.silu(linear(x)) * (x @ WEIGHT.T)),
        ("mul(matmul(x, w), 0.5)", lambda x: 0.5 * linear(x)),
        ("clamp(matmul(x, w))", lambda x: linear(x).clamp(-1, 2)),
        ("square(relu(matmul(x, w)))", lambda x: F.relu(linear(x)).square()),
        ("sub(x, matmul(x, w))", lambda x: x - F.linear(x, WEIGHT[:WIDTH])),
        ("div(matmul(x, w), 4)", lambda x: linear(x) / 4.0),
        (
            "mul(matmul(x, w), sigmoid(reduction(x)))",
            lambda x: linear(x) * x.sum(-1, True).sigmoid(),
        ),
    ],
)
def test_products_and_what_follows_them(wanted: str, function: Callable[..., Any]) -> None:
    assert formula(function) == wanted


def test_bounds_that_are_missing_are_infinite() -> None:
    for function, bounds in (
        (lambda x: linear(x).clamp(min=-1), (-1, math.inf)),
        (lambda x: linear(x).clamp_min(2), (2, math.inf)),
        (lambda x: linear(x).clamp(max=3), (-math.inf, 3)),
    ):
        *_, term = terms_of(function, {"x": X})
        assert (term.attrs["min"], term.attrs["max"]) == bounds


def test_weights_are_named_with_memory_and_strides() -> None:
    *_, product = terms_of(linear, {"x": X})
    weight = product.operands[1].weight
    assert product.dims == (ROWS, WIDE)
    assert (weight.shape, weight.strides, weight.columns) == ((WIDTH, WIDE), (1, WIDTH), None)


def test_one_parameter_is_one_weight() -> None:
    terms = terms_of(lambda x: linear(F.silu(x)) + linear(x), {"x": X})
    weights = [t.operands[1].weight for t in terms if t.op == "matmul"]
    assert len(weights) == 2
    (_, x), (_, other) = ((w.source, w) for w in weights)
    assert x.shape == other.shape


# -- parts of products ----------------------------------------------------------------------------

SPLITS: dict[str, Callable[[Tensor], Any]] = {
    "split": lambda y: y.split(4, dim=-1),
    "sizes": lambda y: y.split([4, 4, 4], dim=-1),
    "chunk": lambda y: y.chunk(3, dim=-1),
    "slices": lambda y: (y[..., :4], y[..., 4:8], y[..., 8:]),
    "narrow": lambda y: [y.narrow(-1, 4 * n, 4) for n in range(3)],
    "split by a view": lambda y: y.view(ROWS, WIDE).split(4, dim=1),
}


@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("split", SPLITS)
def test_parts_of_a_product_are_products_of_columns(split: str, bias: Tensor | None) -> None:
    def function(x: Tensor) -> Tensor:
        a, _, c = SPLITS[split](F.linear(x, WEIGHT, bias))
        return F.silu(a) * c

    (*_, joined) = terms_of(function, {"x": X})
    gate, up = joined.operands[0].operands[0], joined.operands[1]
    if bias is not None:
        assert [t.operands[1].weight.columns for t in (gate, up)] == [(0, 4), (8, 12)]
        gate, up = gate.operands[0], up.operands[0]
    assert [t.op for t in (gate, up)] == ["matmul"] * 2
    assert [t.dims for t in (gate, up)] == [(ROWS, 4)] * 2
    assert [t.operands[1].weight.columns for t in (gate, up)] == [(0, 4), (8, 12)]
    assert gate.operands[0] is up.operands[0]


def test_parts_of_parts_are_counted_from_the_product() -> None:
    """A view of a part is that part. A part of a part has no term of its own product."""

    def function(x: Tensor) -> Tensor:
        _, b = linear(x).split([4, 8], dim=-1)
        return F.silu(b.reshape(ROWS, 8))

    *_, last = terms_of(function, {"x": X})
    assert last.operands[0].operands[1].weight.columns == (4, 12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: linear(x).split(1, dim=0)[0].silu(),  # some rows
        lambda x: linear(x)[..., ::2].silu(),  # every other column
        lambda x: linear(x).view(ROWS, 3, 4).split(1, dim=1)[1].silu(),  # heads
        lambda x: linear(x).view(ROWS, 3, 4)[:, 1].silu(),
    ],
)
def test_other_parts_are_no_terms(function: Callable[..., Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "silu", F.silu, raising=False)
        terms = terms_of(function, {"x": X})
    assert not any(t.op == "silu" and t.operands[0].is_op for t in terms)


# -- what has no term -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.silu(x).view(ROWS, 2, 4).exp(),  # heads are no rows
        lambda x: x.softmax(-1),
        lambda x: x.cumsum(-1),
        lambda x: x.flip(-1),
        lambda x: x[:, 0] @ x[:, 0].T,  # no weight
        lambda x: x.view(-1).view(-1, 1) @ GAMMA.view(1, -1),  # other rows
        lambda x: x.sum(0, keepdim=True),  # over rows
        lambda x: torch.add(x, x, alpha=2),
        lambda x: torch.addmm(BIAS, x[:, 0], WEIGHT.T, alpha=2),
        lambda x: torch.addmm(normal(ROWS, WIDE), x[:, 0], WEIGHT.T),  # no bias
        lambda x: (x > 0) * 1,
        lambda x: F.layer_norm(x, (1, WIDTH)),
        lambda x: x.mean(-1),  # drops the dim
        lambda x: (x * GAMMA.view(WIDTH, 1)).sum(-1),
    ],
)
def test_what_is_not_row_wise_has_no_term(function: Callable[..., Any]) -> None:
    terms = terms_of(function, {"x": X})
    assert [t for t in terms if t.op != "silu"] == []


def test_tensors_that_are_written_have_no_term() -> None:
    """A kernel could read them too early or too late."""

    def function(x: Tensor) -> Tensor:
        y = x + 1
        y.mul_(2)
        return F.silu(y)

    assert formula(function) == ""

    def memory(x: Tensor, memory: Tensor) -> Tensor:
        memory.copy_(x)
        return F.silu(memory) * linear(x).sum(-1, True)

    terms = terms_of(memory, {"x": X, "memory": X})
    assert "silu" not in [t.op for t in terms]


def test_integers_have_no_term() -> None:
    assert formula(lambda x: -(x + 1), torch.arange(ROWS * 4).view(ROWS, 4)) == ""


def test_products_of_another_dtype_than_their_weight_have_no_term() -> None:
    (product,) = terms_of(lambda x: linear(x.float()), {"x": X.bfloat16()})
    assert product.operands[0].dtype == torch.float32
    assert formula(lambda x: linear(F.silu(x).bfloat16().float())) == "matmul(silu(x), w)"
    narrow = WEIGHT.bfloat16()
    terms = terms_of(lambda x: F.linear(x, narrow), {"x": X.bfloat16()})
    assert [t.dtype for t in terms] == [torch.bfloat16]


def test_views_of_an_input_are_one_term() -> None:
    """So products of two views are one group."""
    x = X.view(ROWS, 1, -1)
    terms = terms_of(lambda x: linear(x.view(ROWS, -1)) + linear(x.reshape(ROWS, -1)), {"x": x})
    first, second, _ = terms
    assert first.op == second.op == "matmul" and first.operands[0] is second.operands[0]


# -- who reads what -------------------------------------------------------------------------------


def test_only_terms_that_are_needed_are_kept() -> None:
    def function(x: Tensor) -> Tensor:
        F.gelu(x)
        return F.silu(x)

    assert [t.op for t in terms_of(function, {"x": X})] == ["silu"]


def test_terms_know_their_users_and_whether_others_read_them() -> None:
    def function(x: Tensor) -> Tensor:
        y = F.silu(x)
        return linear(y) + y.cumsum(-1)[..., :1]

    terms = Terms(recorded(function, {"x": X}), ROWS)
    silu, product, total = terms.all()
    assert [silu.op, product.op, total.op] == ["silu", "matmul", "add"]
    assert silu.users == [product] and product.users == [total] and total.users == []
    assert [t.escapes for t in (silu, product, total)] == [True, False, True]
    assert terms.made[silu].node < terms.made[product].node


def test_views_that_others_read_let_a_term_escape() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = linear(x)
        return y.view(ROWS, 3, 4).softmax(-1), F.silu(y)

    product, silu = terms_of(function, {"x": X})
    assert product.escapes and product.users == [silu]


def test_views_keep_the_term() -> None:
    views = [
        lambda x: x.view(ROWS, WIDTH),
        lambda x: x.unsqueeze(1),
        lambda x: x.reshape(1, ROWS, WIDTH),
        lambda x: x.to(torch.float64).float(),
        lambda x: x.clone(),
    ]
    for view in views:
        silu, product = terms_of(lambda x, view=view: linear(view(F.silu(x))), {"x": X})
        assert product.operands[0] is silu


def test_a_linear_of_torch_is_a_product() -> None:
    with torch.no_grad():
        for bias in (False, True):
            module = nn.Linear(WIDTH, WIDE, bias=bias)
            want = "add(matmul(x, w), w)" if bias else "matmul(x, w)"
            assert formula(lambda x, module=module: module(x)) == want
