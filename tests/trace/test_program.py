"""Programs of groups: those of traced layers are the programs of patterns, with the same keys.

So a traced layer runs kernels that are stored for other models already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from mirage_hf.decode.cache_exchange import windows_of
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.rings import rings_variants
from mirage_hf.decode.step_recording import record_step
from mirage_hf.patterns import gated_mlp, linear_residual, mlp_up, rms_norm_linear
from mirage_hf.trace.record import Held
from mirage_hf.trace.step_plan import StepPlan
from mirage_hf.zoo.key import key_of
from tests.helpers.tiny_models import tiny
from tests.helpers.traced_functions import (
    ROWS,
    WIDE,
    WIDTH,
    normal,
    outputs_of,
    plan_of,
    program_kernels,
    results_of,
)

pytestmark = pytest.mark.models


def digests(programs: Any) -> set[str]:
    return {key_of(program, "cpu").digest for program in programs}


def step_of(model: Any, rows: int) -> StepPlan:
    """Return the plan of a model's step."""
    masks = MaskPlan.of(model.config)
    assert isinstance(masks, MaskPlan)
    windows = windows_of(DynamicCache(config=model.config), model.config)
    (_, own, sizes), *_ = rings_variants(windows)
    return StepPlan(record_step(model, masks, rows, own, sizes), rows)


def programs_of(model: Any, rows: int) -> set[str]:
    plan = step_of(model, rows)
    assert not plan.reasons
    return digests(program.graph for program in plan.programs.values())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32),
        ("llama", torch.bfloat16),
        ("qwen2", torch.bfloat16),  # biases of q, k and v
        ("gemma", torch.bfloat16),  # a norm with 1 + w, in float32
        ("gemma", torch.float32),
        ("starcoder2", torch.bfloat16),  # LayerNorm, biases, no gate
    ],
)
def test_a_traced_layer_has_the_programs_of_patterns(
    family: str, dtype: torch.dtype, rows: int
) -> None:
    model = tiny(family, dtype=dtype, num_hidden_layers=1)
    config, layer = model.config, model.model.layers[0]
    k, wide = config.hidden_size, config.intermediate_size
    heads = [p.out_features for p in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
    n = (heads[0], heads[1], heads[1])
    centred = family == "starcoder2"
    eps = config.norm_epsilon if centred else config.rms_norm_eps
    offset = 1.0 if family == "gemma" else 0.0
    norm = {"offset": offset, "centred": centred, "norm_bias": centred}
    qkv_bias = family in ("qwen2", "starcoder2")
    wanted = [
        rms_norm_linear.build(rows, k, n, qkv_bias, eps, dtype, **norm),
        rms_norm_linear.build(rows, k, (config.vocab_size,), False, eps, dtype, **norm),
        linear_residual.build(rows, n[0], k, centred, dtype),
        linear_residual.build(rows, wide, k, centred, dtype),
    ]
    if centred:
        wanted.append(mlp_up.build(rows, k, wide, "gelu_tanh", True, True, eps, dtype, **norm))
    else:
        activation = "gelu_tanh" if family == "gemma" else "silu"
        wanted.append(
            gated_mlp.build(rows, k, wide, activation, True, False, eps, dtype, offset=offset)
        )
    assert programs_of(model, rows) == digests(wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpt2s_layers_have_the_programs_of_patterns(dtype: torch.dtype) -> None:
    """Its weights are stored the other way round. Only the head has a pattern's key."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, initializer_range=0.1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval().to(dtype)
    plan = step_of(model, 1)
    assert not plan.reasons
    programs = [p.graph for p in plan.programs.values()]
    head = rms_norm_linear.build(1, 32, (99,), False, 1e-5, dtype, centred=True, norm_bias=True)
    assert digests([head]) <= digests(programs) and len(digests(programs)) == 5
    qkv = next(p for p in programs if p.outputs[0].dims == (1, 96))
    assert [op.name for op in qkv.ops][-3:] == ["layer_norm", "matmul", "add"]
    assert qkv.inputs[3].strides == (96, 1) and qkv.inputs[3].dims == (32, 96)


# -- groups without a program ---------------------------------------------------------------------


def reason(function: Callable[..., Any], **inputs: Tensor) -> str:
    plan = plan_of(function, inputs)
    assert not plan.programs
    (found,) = plan.reasons.values()
    return found


def test_groups_of_several_narrow_dtypes_have_no_program() -> None:
    x, weight = normal(ROWS, WIDTH).bfloat16(), normal(WIDTH, WIDTH).bfloat16()
    half = normal(ROWS, WIDTH).half()
    found = reason(lambda x, half: F.linear(x, weight) + half, x=x, half=half)
    assert found == "an input of torch.float16 beside weights of torch.bfloat16"
    found = reason(lambda x: F.linear(x, weight).half() * 2, x=x)
    assert found == "a result of another dtype than the weights"


def test_products_side_by_side_with_wide_biases_have_no_program() -> None:
    weights = [normal(n, WIDTH).bfloat16() for n in (WIDTH, WIDE)]
    biases = [normal(len(weight)) for weight in weights]

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, w) + b for w, b in zip(weights, biases, strict=True))

    found = reason(function, x=normal(ROWS, WIDTH).bfloat16())
    assert found == "results of another dtype than the weights"


# -- groups with float32 beside narrower weights --------------------------------------------------


def _wide_residual(x: Tensor, wide: Tensor) -> Tensor:
    """As Mamba's layers end: the residual stays in float32."""
    return F.linear(x, NARROW) + wide


def _wide_result(x: Tensor, wide: Tensor) -> Tensor:
    return F.linear(x, NARROW).float() * 2


def _wide_factor(x: Tensor, wide: Tensor) -> Tensor:
    """Narrow inputs and results, with float32 between."""
    return (F.linear(x, NARROW) * wide).bfloat16()


def _wide_norm(x: Tensor, wide: Tensor) -> Tensor:
    """As Mamba's layers begin: the norm reads a float32 residual."""
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.linear(SCALE * y.bfloat16(), NARROW)


def _wide_router(x: Tensor, wide: Tensor) -> Tensor:
    """As some routers: the input and the weight are cast in each step."""
    return F.linear(x.float(), NARROW.float())


def _wide_router_of_columns(x: Tensor, wide: Tensor) -> Tensor:
    return x.float() @ NARROW.float()


NARROW = normal(WIDTH, WIDTH, seed=5).bfloat16()
SCALE = (1 + 0.1 * normal(WIDTH, seed=6)).bfloat16()


@pytest.mark.parametrize(
    "function",
    [
        _wide_residual,
        _wide_result,
        _wide_factor,
        _wide_norm,
        _wide_router,
        _wide_router_of_columns,
    ],
)
def test_float32_beside_narrower_weights(function: Callable[..., Tensor]) -> None:
    inputs = {"x": normal(ROWS, WIDTH).bfloat16(), "wide": normal(ROWS, WIDTH, seed=7)}
    plan = plan_of(function, inputs)
    assert len(plan.programs) == 1 and not plan.reasons
    plan.schedule(program_kernels(plan))
    (wanted,) = outputs_of(function, inputs)
    (got,) = results_of(plan, inputs, (wanted,))
    assert got.dtype == wanted.dtype
    # two roundings to bfloat16, each of at most 2^-8
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=2**-5)


def test_a_weight_that_is_cast_is_read_where_it_lies() -> None:
    weight = normal(WIDE, WIDTH).bfloat16()
    inputs = {"x": normal(ROWS, WIDTH).bfloat16()}

    def function(x: Tensor) -> Tensor:
        return F.linear(x.float(), weight.float())

    plan = plan_of(function, inputs)
    (program,) = plan.programs.values()
    (held,) = (t for t in program.graph.inputs if t.constant)
    assert held.dtype is torch.bfloat16 and held.strides == (1, WIDTH)
    assert plan.weight_bytes == weight.nbytes
    plan.schedule(program_kernels(plan))
    left = [u.node for u in plan.step_ops if u.node is not None]
    assert not any(isinstance(x, Held) for node in left for x in node.operands)
    weight.mul_(2)
    (wanted,) = outputs_of(function, inputs)
    torch.testing.assert_close(results_of(plan, inputs, (wanted,))[0], wanted)


def test_a_cast_of_what_a_step_writes_is_no_weight() -> None:
    """A kernel would read what the step wrote after the cast."""
    state = normal(WIDE, WIDTH).bfloat16()

    def function(x: Tensor) -> Tensor:
        wide = state.float()
        state.mul_(2)
        return F.linear(x.float(), wide)

    assert not plan_of(function, {"x": normal(ROWS, WIDTH).bfloat16()}).programs


def test_parts_of_a_packed_weight_are_inputs_of_their_own() -> None:
    weight = normal(2 * WIDE, WIDTH)

    def function(x: Tensor) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, dim=-1)
        return F.silu(gate) * up

    (program,) = plan_of(function, {"x": normal(ROWS, WIDTH)}).programs.values()
    wanted = gated_mlp.build(ROWS, WIDTH, WIDE, "silu", False, False, 0.0, torch.float32)
    assert digests([program.graph]) == digests([wanted])
    assert [t.weight.columns for t in program.inputs if t.weight] == [(0, WIDE), (WIDE, 2 * WIDE)]


def test_results_say_which_columns_of_which_output_they_are() -> None:
    linears = nn.ModuleList([nn.Linear(WIDTH, n) for n in (4, 6, 10)])

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x).cumsum(-1) for linear in linears)

    (program,) = plan_of(function, {"x": normal(ROWS, WIDTH)}).programs.values()
    assert [(t.op, n, columns) for t, n, columns in program.results] == [
        ("add", 0, (0, 4)),
        ("add", 0, (4, 10)),
        ("add", 0, (10, 20)),
    ]
    assert [tuple(t.dims) for t in program.graph.outputs] == [(ROWS, 20)]
    wanted = rms_norm_linear.build(ROWS, WIDTH, (4, 6, 10), True, 0.0, torch.float32, norm=False)
    assert digests([program.graph]) == digests([wanted])
