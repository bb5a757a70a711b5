"""Give the linears of a model weights in codes, each in a container of the format's own library.

The formats:

    int4        compressed-tensors "pack-quantized": groups of 128 columns, symmetric
    int4-zeros  the same with zero points, which are packed along the rows
    int4-tiles  torchao Int4WeightOnlyConfig in tiles of tensor cores ("tile_packed_to_4d"): groups
                of 128 columns. torchao makes them on a GPU only.
    int8        torchao Int8WeightOnlyConfig: a scale for each row
    fp8         transformers' FP8Linear and FP8Experts: a scale for each block of 128 by 128.
                Weights whose sizes are no multiples of 128 stay as they are.
    nf4         bitsandbytes' Linear4bit: 4-bit codes of a table in blocks of 64 along the inputs,
                with a float32 scale for each block
    hqq         HQQLinear with 4 bits: groups of 64 columns with zero points. A byte holds codes of
                two rows.
    int8-and-head
                int8, and the head has codes, too, as torchao's `quantize_` makes it
    fp8-and-head
                fp8, and the head is an FP8Linear, too. transformers makes it so if
                `modules_to_not_convert` is empty.
    mxfp4       transformers' Mxfp4GptOssExperts of gpt-oss: 4-bit floats in groups of 32 with a
                power of two each. Only experts have codes. If `triton_kernels` is installed, they
                are stored as it wants them for the GPU, and stock runs them. Otherwise they are in
                its plain order.

`with_products` gives linears torch's own product of a format instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch import library as torch_ops
from transformers import PreTrainedModel

from mirage_hf.formats import held_tensors
from mirage_hf.formats.experts import CodedExperts, coded_experts
from mirage_hf.ops.dtypes import E2M1
from mirage_hf.trace.experts.form import ExpertsForm, form_of, linear_of

#: The suffix of formats whose head has codes, too.
AND_HEAD = "-and-head"

#: Columns of a group of int4 codes, and the side of a block of float8 codes.
GROUP, BLOCK = 128, 128


def linears(
    model: PreTrainedModel, head: bool = False
) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linears of a model's layers: the parent, the name in it, and the linear.

    Args:
        model: The model.
        head: Yield the head, too. Most checkpoints leave it as it is.
    """
    last = model.get_output_embeddings()
    for parent in model.get_decoder().modules():
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not last:
                yield parent, name, child
    if head:
        path = next(path for path, module in model.named_modules() if module is last)
        parent, _, name = path.rpartition(".")
        yield model.get_submodule(parent), name, last


def with_codes(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Give a model's linears weights in codes, in place."""
    with torch.no_grad():
        _FORMATS[kind](model)
    return model


def _int4(model: PreTrainedModel, symmetric: bool = True) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    args = QuantizationArgs(
        num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=GROUP
    )
    config = QuantizationConfig(
        config_groups={"all": QuantizationScheme(targets=["Linear"], weights=args)},
        ignore=["lm_head"],
        format="pack-quantized",
    )
    apply_quantization_config(model, config)
    for _, _, linear in linears(model):
        groups = linear.weight.unflatten(1, (-1, GROUP))
        if symmetric:
            linear.weight_scale.copy_(groups.abs().amax(-1) / 7)
            continue
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        linear.weight_scale.copy_((most - least) / 15)
        zeros = -8 - least / linear.weight_scale
        linear.weight_zero_point.copy_(zeros.round().clamp(-8, 7))
    ModelCompressor(config).compress_model(model)
    model.to(model.device)  # it leaves shapes on the CPU


def _int8(model: PreTrainedModel, head: bool = False) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    _by_torchao(model, Int8WeightOnlyConfig(), head)


def _int4_tiles(model: PreTrainedModel) -> None:
    from torchao.quantization import Int4WeightOnlyConfig

    config = Int4WeightOnlyConfig(
        group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )
    _by_torchao(model, config)


def _by_torchao(model: PreTrainedModel, config: Any, head: bool = False) -> None:
    """Quantize the linears by torchao, and the head if asked for."""
    from torchao.quantization import quantize_

    wanted = {id(linear) for _, _, linear in linears(model, head)}
    quantize_(model, config, filter_fn=lambda m, _: id(m) in wanted)


def _nf4(model: PreTrainedModel) -> None:
    from bitsandbytes.nn import Linear4bit, Params4bit

    for parent, name, linear in list(linears(model)):
        weight, bias = linear.weight, linear.bias
        with torch.device("meta"):
            coded = Linear4bit(
                linear.in_features,
                linear.out_features,
                bias is not None,
                compute_dtype=weight.dtype,
                compress_statistics=False,
                quant_type="nf4",
            )
        codes = Params4bit(
            weight.detach(), requires_grad=False, compress_statistics=False, quant_type="nf4"
        )
        coded.weight, coded.bias = codes.to(weight.device), bias  # moving it quantizes
        setattr(parent, name, coded.eval())


def _hqq(model: PreTrainedModel) -> None:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
    for parent, name, linear in list(linears(model)):
        dtype, device = linear.weight.dtype, str(linear.weight.device)
        module = HQQLinear(linear, config, compute_dtype=dtype, device=device)
        setattr(parent, name, module.eval())


def _fp8(model: PreTrainedModel, head: bool = False) -> None:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    for parent, name, linear in list(linears(model, head)):
        n, k = linear.weight.shape
        if n % BLOCK or k % BLOCK:
            continue
        with linear.weight.device:
            coded = FP8Linear(k, n, block_size=(BLOCK, BLOCK))
        codes, scales = _in_blocks(linear.weight)
        coded.weight = nn.Parameter(codes, requires_grad=False)
        coded.weight_scale_inv.data = scales
        setattr(parent, name, coded.eval())
    for parent, name, experts in list(_experts(model)):
        weights = experts.gate_up_proj, experts.down_proj
        if not experts.has_bias and not any(n % BLOCK for w in weights for n in w.shape[1:]):
            setattr(parent, name, _fp8_experts(experts))


def _in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8 codes of a weight (n, k), and the scales of its blocks."""
    n, k = weight.shape
    blocks = weight.float().view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scales).to(torch.float8_e4m3fn)
    return codes.view(n, k), scales[:, 0, :, 0].contiguous()


def _experts(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the experts of a model's layers: the parent, the name in it, and the experts."""
    for parent in model.get_decoder().modules():
        for name, child in list(parent.named_children()):
            if isinstance(getattr(child, "gate_up_proj", None), nn.Parameter):
                yield parent, name, child


def _fp8_experts(experts: Any) -> nn.Module:
    from transformers.integrations.finegrained_fp8 import FP8Experts

    with torch.device("meta"):
        coded: Any = FP8Experts(experts.config, block_size=(BLOCK, BLOCK))
    for name in ("gate_up_proj", "down_proj"):
        both = [_in_blocks(weight) for weight in getattr(experts, name)]
        codes, scales = (torch.stack(x) for x in zip(*both, strict=True))
        setattr(coded, name, nn.Parameter(codes, requires_grad=False))
        setattr(coded, f"{name}_scale_inv", nn.Parameter(scales, requires_grad=False))
    coded.has_gate, coded.has_bias, coded.is_transposed = True, False, False
    return coded.eval()


class StridedLayout:
    """The name of `triton_kernels` for tensors in their plain order."""

    def __init__(self, shape: Any) -> None:
        """Make the order of a tensor."""

    def swizzle_data(self, data: Tensor) -> Tensor:
        """Return the bytes of a plain tensor in this order."""
        return data

    def unswizzle_data(self, data: Tensor) -> Tensor:
        """Return the plain bytes."""
        return data


def put_mxfp4(experts: Any, name: str, blocks: Tensor, scales: Tensor) -> None:
    """Put codes and scales of a checkpoint where transformers' loader puts them.

    Args:
        experts: `Mxfp4GptOssExperts`.
        name: The linear.
        blocks: The bytes (experts, outputs, groups, bytes of a group).
        scales: The exponents (experts, outputs, groups) plus 127.
    """
    experts._parameters.pop(name, None)
    count, rows, groups, width = blocks.shape
    codes = _wrapped(blocks.flatten(2).transpose(-2, -1))
    codes.shape = torch.Size((count, 2 * groups * width, rows))
    experts.__dict__[name] = codes
    config = SimpleNamespace(weight_scale=_wrapped(scales.transpose(-2, -1)))
    setattr(experts, f"{name}_precision_config", config)


def _wrapped(data: Tensor) -> Any:
    storage = SimpleNamespace(data=data, layout=StridedLayout(data.shape))
    return SimpleNamespace(storage=storage, shape=data.shape)


def with_library_of_mxfp4() -> Any:
    """Return `triton_kernels`, as transformers uses it for MXFP4. None if it is not installed.

    transformers fetches a copy of it from the Hub.
    """
    if importlib.util.find_spec("triton_kernels") is None:
        return None
    from transformers.integrations import mxfp4

    for part in ("matmul_ogs", "numerics_details.mxfp", "routing", "swiglu", "tensor"):
        importlib.import_module(f"triton_kernels.{part}")
    mxfp4.triton_kernels_hub = sys.modules["triton_kernels"]
    return mxfp4.triton_kernels_hub


def load_mxfp4(mixture: Any, experts: Any, name: str, blocks: Tensor, scales: Tensor) -> None:
    """Give `experts` of `mixture` codes as transformers does, with its library if it is installed.

    Args:
        mixture: The module that calls the router and the experts.
        experts: `Mxfp4GptOssExperts`.
        name: The linear.
        blocks: The bytes (experts, outputs, groups, bytes of a group).
        scales: The exponents (experts, outputs, groups) plus 127.
    """
    library = with_library_of_mxfp4() if blocks.is_cuda else None
    if library is None:
        put_mxfp4(experts, name, blocks, scales)
        return
    from transformers.integrations.mxfp4 import mlp_forward, swizzle_mxfp4_convertops

    swizzle_mxfp4_convertops(blocks, scales, experts, name, blocks.device, library)
    mixture.forward = MethodType(mlp_forward, mixture)


def _mxfp4(model: PreTrainedModel) -> None:
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    for parent, name, experts in list(_experts(model)):
        with torch.device("meta"):
            coded: Any = Mxfp4GptOssExperts(model.config)
        for linear in ("gate_up_proj", "down_proj"):
            both = [_in_groups(weight.T) for weight in getattr(experts, linear)]
            blocks, exponents = (torch.stack(x) for x in zip(*both, strict=True))
            load_mxfp4(parent, coded, linear, blocks, exponents)
            bias = getattr(experts, f"{linear}_bias").detach().float()
            setattr(coded, f"{linear}_bias", nn.Parameter(bias, requires_grad=False))
        setattr(parent, name, coded.eval())


def _in_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return 4-bit floats of a weight (n, k), two in a byte, and the exponents of its groups."""
    groups = weight.float().unflatten(1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-120)
    exponents = largest.log2().floor() - 2  # the largest code is 6
    numbers = torch.tensor(E2M1, device=weight.device)
    between = (numbers[1:8] + numbers[:7]) / 2
    scaled = groups / exponents.exp2()
    codes = torch.bucketize(scaled.abs(), between) + 8 * (scaled < 0)
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    return pairs.to(torch.uint8), (exponents[..., 0] + 127).to(torch.uint8)


_FORMATS: dict[str, Callable[[PreTrainedModel], None]] = {
    "int4": _int4,
    "int8": _int8,
    "int4-zeros": partial(_int4, symmetric=False),
    "int4-tiles": _int4_tiles,
    "int8-and-head": partial(_int8, head=True),
    "fp8": _fp8,
    "fp8-and-head": partial(_fp8, head=True),
    "nf4": _nf4,
    "hqq": _hqq,
    "mxfp4": _mxfp4,
}

#: The names of the formats.
FORMATS = tuple(_FORMATS)

#: Those of linears, and those that a CPU can make, too.
LINEAR_FORMATS = tuple(kind for kind in FORMATS if kind != "mxfp4")
CPU_FORMATS = tuple(kind for kind in LINEAR_FORMATS if kind != "int4-tiles")


class Product(nn.Module):
    """A linear whose weights are codes in the form that a product of torch wants."""


class Int4Product(Product):
    """Torch's own int4 product, as gpt-fast runs it."""

    def __init__(self, weight: Tensor):
        """Quantize a weight (n, k) in groups of columns."""
        super().__init__()
        groups = weight.float().unflatten(1, (-1, GROUP))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scales = (high - low).clamp_min(1e-6) / 15
        codes = ((groups - low) / scales).round().clamp(0, 15).flatten(1).to(torch.int32)
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
        self.register_buffer("codes", torch.ops.aten._convert_weight_to_int4pack(pairs, 8))
        zeros = low + scales * 8
        both = torch.cat([scales, zeros], -1).to(weight.dtype)
        self.register_buffer("scales", both.transpose(0, 1).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of x (…, k)."""
        rows = x.flatten(0, -2)
        y = torch.ops.aten._weight_int4pack_mm(rows, self.codes, GROUP, self.scales)
        return y.unflatten(0, x.shape[:-1])


class Int8Product(Product):
    """A cast of int8 codes and a product, as gpt-fast and torchao do. A compiler may fuse both."""

    def __init__(self, weight: Tensor):
        """Quantize a weight (n, k) with a scale for each row."""
        super().__init__()
        scales = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-6) / 127
        self.register_buffer("codes", (weight.float() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales[:, 0].to(weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of x (…, k)."""
        return nn.functional.linear(x, self.codes.to(x.dtype)) * self.scales


# an op of its own, so that torch.compile keeps the strides of the scales
@torch_ops.custom_op("mirage_hf_benchmarks::fp8_product", mutates_args=())
def _fp8_product(x: Tensor, scales_of_x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return torch._scaled_mm(x, codes.t(), scales_of_x, scales, out_dtype=torch.bfloat16)


@_fp8_product.register_fake
def _(x: Tensor, scales_of_x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(len(x), len(codes), dtype=torch.bfloat16)


#: Rows of x that torch's product of float8 gets at least. 16 ran, while one and two were refused.
LEAST_ROWS = 16


class Fp8Product(Product):
    """Torch's own product of float8 in blocks. It rounds x to float8, as `FP8Linear` does."""

    def __init__(self, weight: Tensor):
        """Quantize a weight (n, k) in blocks."""
        super().__init__()
        codes, scales = _in_blocks(weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of x (…, k)."""
        rows = x.flatten(0, -2)
        padded = nn.functional.pad(rows, (0, 0, 0, max(0, LEAST_ROWS - len(rows))))
        groups = padded.float().unflatten(1, (-1, BLOCK))
        scales = groups.abs().amax(-1).clamp_min(1e-6) / 448
        codes = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(1)
        # the product wants scales of x whose rows lie next to each other
        y = _fp8_product(codes, scales.t().contiguous().t(), self.codes, self.scales.t())
        return y[: len(rows)].unflatten(0, x.shape[:-1])


#: The products, by format.
PRODUCTS: dict[str, type[Product]] = {
    "int4": Int4Product,
    "int8": Int8Product,
    "fp8": Fp8Product,
}


def product_of(kind: str) -> type[Product] | None:
    """Return torch's own product of a format. None if torch has none."""
    return PRODUCTS.get(kind.removesuffix(AND_HEAD))


def with_products(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Give a model's linears torch's own product of a format, in place."""
    product = product_of(kind)
    assert product is not None, kind
    with torch.no_grad():
        for parent, name, linear in list(linears(model, kind.endswith(AND_HEAD))):
            setattr(parent, name, product(linear.weight))
    return model


def product_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the weights that `with_products` gave a model."""
    products = [m for m in model.modules() if isinstance(m, Product)]
    return sum(b.nbytes for m in products for b in m.buffers())


def parameters_of_experts(module: nn.Module) -> list[Tensor]:
    """Return the tensors that the linears of experts read, in whatever order their codes are."""
    coded = coded_experts(module)
    if isinstance(coded, CodedExperts):
        linears = linear_of(coded.first), linear_of(coded.second)
        return [x for linear in linears for x in linear.parameters]
    form = form_of(module)
    return form.parameters if isinstance(form, ExpertsForm) else []


def coded_bytes(model: PreTrainedModel, rows: int = 1) -> int:
    """Return the bytes that a step reads of a model with weights in codes: all but the table.

    Of experts, as many as `rows` tokens choose on average if each chooses at random.
    """
    head = model.get_output_embeddings()
    table = model.get_input_embeddings().weight
    chosen = getattr(model.config, "num_experts_per_tok", None) or 0
    seen: dict[int, float] = {t.data_ptr(): t.nbytes for t in held_tensors(head) or (head.weight,)}
    for module in model.get_decoder().modules():
        of_experts = parameters_of_experts(module)
        held = held_tensors(module) or tuple(
            p for p in module._parameters.values() if p is not None
        )
        for t in of_experts:
            seen[t.data_ptr()] = t.nbytes * (1 - (1 - chosen / len(t)) ** rows)
        if of_experts:
            continue
        for t in held:
            if t is not table and t.numel() > 2:
                seen[t.data_ptr()] = t.nbytes
    return round(sum(seen.values()))
