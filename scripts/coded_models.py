"""Give the linears of a model weights in codes, each in a container of the format's own library.

The formats:

    int4   compressed-tensors "pack-quantized": groups of 128 columns, symmetric
    int8   torchao Int8WeightOnlyConfig: a scale for each row
    fp8    transformers' FP8Linear: a scale for each block of 128 by 128

`with_int4_products` gives linears torch's own int4 product instead, as gpt-fast does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

#: Columns of a group of int4 codes, and the side of a block of float8 codes.
GROUP, BLOCK = 128, 128


def linears(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linears of a model's layers: the parent, the name in it, and the linear.

    The head stays as it is, as in most checkpoints.
    """
    head = model.get_output_embeddings()
    for parent in model.get_decoder().modules():
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                yield parent, name, child


def with_codes(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Give a model's linears weights in codes, in place."""
    with torch.no_grad():
        _FORMATS[kind](model)
    return model


def _int4(model: PreTrainedModel) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    args = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP
    )
    config = QuantizationConfig(
        config_groups={"all": QuantizationScheme(targets=["Linear"], weights=args)},
        ignore=["lm_head"],
        format="pack-quantized",
    )
    apply_quantization_config(model, config)
    for _, _, linear in linears(model):
        groups = linear.weight.unflatten(1, (-1, GROUP))
        linear.weight_scale.copy_(groups.abs().amax(-1) / 7)
    ModelCompressor(config).compress_model(model)
    model.to(model.device)  # it leaves shapes on the CPU


def _int8(model: PreTrainedModel) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    mine = {id(linear) for _, _, linear in linears(model)}
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda m, _: id(m) in mine)


def _fp8(model: PreTrainedModel) -> None:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    for parent, name, linear in list(linears(model)):
        n, k = linear.weight.shape
        with linear.weight.device:
            coded = FP8Linear(k, n, block_size=(BLOCK, BLOCK))
        blocks = linear.weight.float().view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        codes = (blocks / scales).to(torch.float8_e4m3fn)
        coded.weight = nn.Parameter(codes.view(n, k), requires_grad=False)
        coded.weight_scale_inv.data = scales[:, 0, :, 0].contiguous()
        setattr(parent, name, coded.eval())


_FORMATS: dict[str, Callable[[PreTrainedModel], None]] = {"int4": _int4, "int8": _int8, "fp8": _fp8}

#: The names of the formats.
FORMATS = tuple(_FORMATS)


class Int4Product(nn.Module):
    """A linear that runs torch's int4 product, with weights in the form that it wants."""

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


def with_int4_products(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model's linears torch's own int4 product, in place."""
    with torch.no_grad():
        for parent, name, linear in list(linears(model)):
            setattr(parent, name, Int4Product(linear.weight))
    return model


def product_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the weights that `with_int4_products` gave a model."""
    products = [m for m in model.modules() if isinstance(m, Int4Product)]
    return sum(b.nbytes for m in products for b in m.buffers())


def coded_bytes(model: PreTrainedModel) -> int:
    """Return the bytes that a step reads of a model with weights in codes: all but the table."""
    from mirage_hf.formats import held_tensors

    head = model.get_output_embeddings().weight
    table = model.get_input_embeddings().weight
    seen: dict[int, int] = {head.data_ptr(): head.nbytes}
    for module in model.get_decoder().modules():
        held = held_tensors(module) or tuple(
            p for p in module._parameters.values() if p is not None
        )
        for t in held:
            if t is not table and t.numel() > 2:
                seen[t.data_ptr()] = t.nbytes
    return sum(seen.values())
