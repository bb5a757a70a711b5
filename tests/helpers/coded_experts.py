"""Experts in codes, and the same experts with decoded weights.

`FP8Experts` is the library's own class, filled with random codes. `Mxfp4GptOssExperts` is, too, but
its library makes its tensors on a GPU only. So these are built in the plain order, as the sources
of transformers and of `triton_kernels` have it: (experts, bytes of the inputs, outputs), with the
bytes of an output next to each other. Experts of torchao are stock's, with parameters that torchao
makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from mirage_hf.trace.experts.op import experts_as_one_node
from mirage_hf.trace.record import record
from mirage_hf.trace.regions import Region
from mirage_hf.trace.step_plan import StepPlan
from scripts.coded_models import put_mxfp4
from tests.helpers import torchao_tensors

EXPERTS, CHOSEN, WIDTH, INNER = 6, 2, 64, 96
#: The least width of torchao's tiles.
WIDE = 128


def fp8(block: int = 32, seed: int = 0, sizes: tuple[int, int] = (WIDTH, INNER)) -> tuple[Any, Any]:
    """Return `FP8Experts`, and stock's experts with their weights decoded to float64."""
    library = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = Qwen3MoeConfig(
        hidden_size=sizes[0],
        moe_intermediate_size=sizes[1],
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    config._experts_implementation = "batched_mm"
    torch.manual_seed(seed)
    coded = with_names(library.FP8Experts(config, block_size=(block, block)))
    plain = Qwen3MoeExperts(config).double().requires_grad_(False)
    for name in ("gate_up_proj", "down_proj"):
        fill_fp8(coded, name)
        getattr(plain, name).data = decoded_fp8(coded, name, block)
    return coded.requires_grad_(False), plain


def with_names(module: Any) -> Any:
    """Set what transformers sets while it loads a model."""
    module.has_gate, module.has_bias, module.is_transposed = True, False, False
    if not hasattr(module, "_apply_gate"):
        pytest.skip("this transformers names the function of experts in another way")
    return module


def fill_fp8(module: Any, name: str) -> None:
    weight, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
    weight.data = torch.randn(weight.shape).to(torch.float8_e4m3fn)
    scale.data = torch.rand(scale.shape) + 0.1


def decoded_fp8(module: Any, name: str, block: int) -> Tensor:
    scale = getattr(module, f"{name}_scale_inv").double()
    for dim in (1, 2):
        scale = scale.repeat_interleave(block, dim)
    return (getattr(module, name).double() * scale).detach()


def shape_of_blocks(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of blocks of 16 bytes, which some versions of transformers join to rows."""
    experts, rows = parameter.shape[:2]
    return experts, rows, parameter[0, 0].numel() // 16, 16


def mxfp4(seed: int = 0, sizes: tuple[int, int] = (WIDTH, INNER)) -> tuple[Any, Any]:
    """Return `Mxfp4GptOssExperts`, and stock's experts with their weights decoded to float64."""
    library = pytest.importorskip("transformers.integrations.mxfp4")
    config = GptOssConfig(
        hidden_size=sizes[0],
        intermediate_size=sizes[1],
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    config._experts_implementation = "batched_mm"
    torch.manual_seed(seed)
    coded: Any = library.Mxfp4GptOssExperts(config)
    plain: Any = GptOssExperts(config).double().requires_grad_(False)
    for name in ("gate_up_proj", "down_proj"):
        shape = shape_of_blocks(getattr(coded, name))
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8)
        scales = torch.randint(120, 128, blocks.shape[:-1], dtype=torch.uint8)
        bias = torch.randn(blocks.shape[:2])
        decode = library.convert_moe_packed_tensors
        # bfloat16 holds each product of a code and a power of two
        getattr(plain, name).data = decode(blocks, scales).double()
        getattr(plain, f"{name}_bias").data = bias.double()
        getattr(coded, f"{name}_bias").data = bias
        put_mxfp4(coded, name, blocks, scales)
    return coded.requires_grad_(False), plain


#: What makes a tensor of torchao, and its weights in float64.
Make = Callable[[Tensor], tuple[Any, Tensor]]


def of_torchao(
    make: Make,
    second: Make | None = None,
    sizes: tuple[int, int] = (WIDTH, INNER),
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> tuple[Any, Any]:
    """Return stock's experts with parameters of torchao, and with their weights in float64.

    Args:
        make: Makes the first parameter.
        second: Makes the second one. The same as the first if it is not given.
        sizes: The inputs of an expert. The outputs of its first linear are twice the second number.
        dtype: The dtype of the weights that the library quantizes.
        seed: The seed of the weights.
    """
    config = Qwen3MoeConfig(
        hidden_size=sizes[0],
        moe_intermediate_size=sizes[1],
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    config._experts_implementation = "batched_mm"
    torch.manual_seed(seed)
    coded: Any = Qwen3MoeExperts(config).to(dtype)
    if not hasattr(coded, "has_gate"):
        pytest.skip("this transformers does not say what experts have")
    plain: Any = Qwen3MoeExperts(config).double().requires_grad_(False)
    for name, by in (("gate_up_proj", make), ("down_proj", second or make)):
        weight = torch.randn(getattr(coded, name).shape).to(dtype)
        made, getattr(plain, name).data = by(weight)
        setattr(coded, name, nn.Parameter(made, requires_grad=False))
    return coded, plain


_GROUPS, _TILES = torchao_tensors.of_rows(32), torchao_tensors.of_tiles(64)

CODED: dict[str, Callable[[], tuple[Any, Any]]] = {
    "FP8Experts": fp8,
    "Mxfp4GptOssExperts": mxfp4,
    "Int4Tensor": lambda: of_torchao(_GROUPS),
    # without zeros the library decodes in the dtype of the scales
    "Int4Tensor, symmetric": lambda: of_torchao(
        torchao_tensors.of_rows(32, symmetric=True), dtype=torch.float32
    ),
    "Int4TilePackedTo4dTensor": lambda: of_torchao(_TILES, sizes=(WIDE, WIDE)),
    "Int8Tensor": lambda: of_torchao(torchao_tensors.of_bytes("Int8")),
    "Int8Tensor, groups": lambda: of_torchao(
        torchao_tensors.of_bytes("Int8", group=32, zero_points=True)
    ),
    "Float8Tensor": lambda: of_torchao(torchao_tensors.of_bytes("Float8")),
    "Int8Tensor and Int4Tensor": lambda: of_torchao(torchao_tensors.of_bytes("Int8"), _GROUPS),
}


def width_of(name: str) -> int:
    """Return the inputs of the experts of a row of `CODED`."""
    return WIDE if name == "Int4TilePackedTo4dTensor" else WIDTH


def routing(tokens: int, width: int = WIDTH, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs (tokens, width), the chosen experts, and their weights, in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    index = torch.rand(tokens, EXPERTS, generator=generator).topk(CHOSEN)[1]
    weights = torch.rand(tokens, CHOSEN, generator=generator, dtype=torch.float64)
    return x, index, weights


def given(tokens: int, dtype: torch.dtype, name: str = "") -> dict[str, Tensor]:
    """Return what experts of `CODED` are called with."""
    x, index, weights = routing(tokens, width_of(name))
    return {"x": x.to(dtype), "index": index, "weights": weights.to(dtype)}


def plan_of(module: Any, inputs: dict[str, Tensor]) -> StepPlan:
    """Return the plan of a step that calls experts with inputs of these shapes."""

    def function(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return ALL_EXPERTS_FUNCTIONS["batched_mm"](module, x, index, weights)

    given = inputs | {"out.0": inputs["x"].clone()}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = {name: mode.from_tensor(x) for name, x in given.items()}

    def step() -> None:  # stock's own function may need kernels that must be fetched
        fakes["out.0"].copy_(function(*(fakes[name] for name in inputs)))

    with experts_as_one_node():
        return StepPlan(record(step, fakes, mode), len(inputs["x"]))


def operands_of(region: Region, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the operands of a program of experts. What lies between both programs is random."""
    operands = []
    for operand, tensor in zip(region.inputs, region.graph.inputs, strict=True):
        source: Any = getattr(operand.source, "tensor", None)
        if source is not None:
            operands.append(operand.of(source.detach()))
        elif operand.is_between:
            operands.append(torch.randn(tensor.dims).to(tensor.dtype))
        else:
            operands.append(operand.of(inputs[operand.source.name]))
    return operands


def parameters_of(module: nn.Module) -> list[Tensor]:
    """Return the tensors of a container of experts."""
    found: list[Any] = []
    for parameter in module._parameters.values():
        flatten = getattr(parameter, "__tensor_flatten__", None)
        names = flatten()[0] if flatten else ()
        found += [getattr(parameter, n) for n in names] or [parameter]
    for name in ("gate_up_proj", "down_proj"):
        wrapped, config = (module.__dict__.get(n) for n in (name, f"{name}_precision_config"))
        if wrapped is not None:
            found += [wrapped.storage.data, config.weight_scale.storage.data]
    return [x for x in found if x is not None]
