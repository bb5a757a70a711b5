"""Read how the experts of a mixture store their weights in codes, without copying them.

`FP8Experts` of transformers has float8 codes with a float32 scale for each block of each expert.
`Mxfp4GptOssExperts` has 4-bit floats (e2m1) in groups of 32 inputs with a power of two each. Its
library may store them in an order of its own for each kind of GPU. Kernels read the plain order:
the codes of the inputs of an output, and then the next output. `CodedStack.swizzled` leads there.

The parameters of plain experts may be tensors of torchao. These have a dim of experts before the
dims of a linear's weight. transformers loads such models, and runs few of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf import errors
from mirage_hf.errors import Rejected
from mirage_hf.formats import containers, torchao
from mirage_hf.formats.coding import Coding
from mirage_hf.formats.containers import uneven, wrong_tensor
from mirage_hf.formats.stored import Split
from mirage_hf.formats.swizzled import Swizzled, swizzled
from mirage_hf.ops.dtypes import COMPUTE_DTYPES, E2M1

_FP8 = "transformers.integrations.finegrained_fp8.FP8Experts"
_MXFP4 = "transformers.integrations.mxfp4.Mxfp4GptOssExperts"

#: Inputs of a group of `Mxfp4GptOssExperts`.
_GROUP = 32

#: The class of `triton_kernels` for the plain order.
_PLAIN = "StridedLayout"

#: What transformers says of experts that it calls by name, in its words.
_SETTINGS = ("has_gate", "has_bias", "is_transposed")

#: The parameters of such experts.
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


@dataclass(frozen=True, eq=False)
class CodedStack:
    """A linear of each expert, in codes.

    Attributes:
        coding: How the codes of one expert become its weight.
        tensors: For each input of `coding` the tensor of the container that holds it for all
            experts, in the order of memory.
        bias: The biases (experts, outputs), None without any.
        swizzled: What puts the codes of `tensors` in the order that `coding` reads, before they are
            read. None if they are in that order.
    """

    coding: Coding
    tensors: tuple[Tensor, ...]
    bias: Tensor | None = None
    swizzled: Swizzled | None = None


@dataclass(frozen=True, eq=False)
class CodedExperts:
    """The linears of experts, in codes.

    Attributes:
        first: The first linear: gate and up, or up alone.
        second: The linear that follows their function.
        gate: The function between the two linears.
    """

    first: CodedStack
    second: CodedStack
    gate: Callable[[Tensor], Tensor]


def coded_experts(
    module: nn.Module, dtype: torch.dtype = torch.bfloat16
) -> CodedExperts | Rejected | None:
    """Return how experts store their weights in codes.

    Args:
        module: The module of all experts of a layer.
        dtype: The dtype of the activations.

    Returns:
        The weights, or why they cannot be read. None if the module has no coded experts that we
        know.
    """
    kinds = {containers.qualified_name(module)}
    kinds |= {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}
    reader = next((read for name, read in _READERS.items() if name in kinds), None)
    if reader is None and any(map(torchao.is_weight, map(module._parameters.get, _WEIGHTS))):
        reader = _torchao
    if reader is None:
        return None
    try:
        return reader(module, dtype)
    except _UnreadError as error:
        return Rejected(f"{type(module).__name__}: {error}")


def replaced_forward(module: nn.Module) -> bool:
    """Return whether a library replaced the forward of a mixture by one for its own kernels.

    The forward of its class calls the router and the experts.
    """
    forward = module.__dict__.get("forward")
    return getattr(forward, "__func__", forward) in _MXFP4_FORWARDS


@dataclass(frozen=True)
class Settings:
    """What transformers says of experts that it calls by name.

    Attributes:
        has_gate: Whether the first linear has gate and up. Otherwise it has up alone.
        has_bias: Whether the linears have biases.
        is_transposed: Whether the weights are (experts, inputs, outputs).
    """

    has_gate: bool
    has_bias: bool
    is_transposed: bool

    @property
    def names(self) -> tuple[str, str]:
        """The parameters of the two linears."""
        return "gate_up_proj" if self.has_gate else "up_proj", "down_proj"


def settings_of(module: nn.Module) -> Settings | None:
    """Return what transformers says of experts.

    None if it says nothing, or that they have something that no program computes, such as a norm.
    """
    said = [getattr(module, name, None) for name in _SETTINGS]
    features = (name for name, is_on in vars(module).items() if is_on is True)
    others = [name for name in features if name.startswith("has_") and name not in _SETTINGS]
    if others or not all(isinstance(flag, bool) for flag in said):
        return None
    return Settings(*said)  # type: ignore[arg-type]


class _UnreadError(Exception):
    """Codes of experts that are not read, and why."""


def _check(why: str | None) -> None:
    if why:
        raise _UnreadError(why)


def _fp8(module: Any, dtype: torch.dtype) -> CodedExperts:
    if getattr(module, "has_bias", False):
        raise _UnreadError("its experts have biases")
    if module.block_size is None:
        raise _UnreadError("its scales are not for blocks")
    # transformers ≥ 5.10 says whether there is a gate
    has_gate = getattr(module, "has_gate", True)
    first = "gate_up_proj" if has_gate else "up_proj"
    stacks = [_fp8_linear(module, name, dtype) for name in (first, "down_proj")]
    return CodedExperts(stacks[0], stacks[1], module._apply_gate if has_gate else module.act_fn)


def _fp8_linear(module: Any, name: str, dtype: torch.dtype) -> CodedStack:
    weight, scale = getattr(module, name, None), getattr(module, f"{name}_scale_inv", None)
    if not isinstance(weight, Tensor) or weight.dim() != 3:
        raise _UnreadError(f"{name} is missing or of another form")
    experts, rows, columns = weight.shape
    height, width = module.block_size
    _check(uneven("outputs", rows, height) or uneven("inputs", columns, width))
    split = Split(rows, columns, height, width)
    shape = (experts, rows // height, columns // width)
    _check(
        wrong_tensor(name, weight, (experts, rows, columns), (torch.float8_e4m3fn,))
        or wrong_tensor("its scale", scale, shape, (torch.float32,))
        or containers.other_device(weight, scale)
    )
    assert scale is not None
    codes, scales = split.codes(torch.float8_e4m3fn), split.per_block(torch.float32)
    return CodedStack(Coding(rows, columns, dtype, codes, scales), (weight, scale))


def _mxfp4(module: Any, dtype: torch.dtype) -> CodedExperts:
    alpha, limit = module.alpha, module.limit

    def gate(x: Tensor) -> Tensor:
        """Compute the function of the library's `swiglu` between the two linears."""
        gates, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(min=-limit, max=limit)
        return (up + 1) * (gates * torch.sigmoid(gates * alpha))

    stacks = [_mxfp4_linear(module, name, dtype) for name in ("gate_up_proj", "down_proj")]
    return CodedExperts(stacks[0], stacks[1], gate)


def _mxfp4_linear(module: Any, name: str, dtype: torch.dtype) -> CodedStack:
    config, bias = getattr(module, f"{name}_precision_config"), getattr(module, f"{name}_bias")
    if config is None:
        raise _UnreadError(f"{name} has no scales")
    scales = _in_plain_order("its scales", config.weight_scale)
    wrapped = getattr(module, name)
    other = _in_other_order(name, wrapped, type(config.weight_scale.storage.layout))
    codes = _in_plain_order(name, wrapped) if other is None else other.plain
    experts, packed, rows = codes.shape
    columns = 2 * packed
    _check(uneven("inputs", columns, _GROUP))
    shape = (experts, columns // _GROUP, rows)
    if tuple(scales.shape) != shape:
        raise _UnreadError(f"its scales have shape {errors.shape(scales.shape)}")
    _check(
        wrong_tensor("its biases", bias, (experts, rows), (torch.float32, dtype))
        or containers.other_device(codes, scales, bias)
    )
    split = Split(rows, columns, group=_GROUP)
    coding = Coding(
        rows,
        columns,
        dtype,
        split.codes(torch.uint4),
        split.per_row(torch.float8_e8m0fnu),
        table=E2M1,
    )
    return CodedStack(coding, (codes, scales), bias, other)


def _torchao(module: Any, dtype: torch.dtype) -> CodedExperts:
    settings = settings_of(module)
    if settings is None:
        raise _UnreadError("its experts are called in a way of their own")
    if settings.is_transposed:
        raise _UnreadError("its weights are stored (experts, inputs, outputs)")
    stacks = [_torchao_linear(module, name, settings.has_bias, dtype) for name in settings.names]
    return CodedExperts(
        stacks[0], stacks[1], module._apply_gate if settings.has_gate else module.act_fn
    )


def _torchao_linear(module: Any, name: str, has_bias: bool, dtype: torch.dtype) -> CodedStack:
    weight = module._parameters.get(name)
    if not torchao.is_weight(weight):
        raise _UnreadError(f"{name} has no codes, but the other linear does")
    if weight.dim() != 3:
        raise _UnreadError(f"{name} has shape {errors.shape(weight.shape)}")
    found = torchao.codes_of(weight)
    if isinstance(found, str):
        raise _UnreadError(f"{name}: {found}")
    coding, held = found
    bias = module._parameters.get(f"{name}_bias") if has_bias else None
    if has_bias:
        _check(wrong_tensor("its biases", bias, (len(weight), coding.rows), COMPUTE_DTYPES))
    _check(containers.other_device(*held, bias))
    return CodedStack(replace(coding, dtype=dtype), held, bias)


def _in_plain_order(name: str, wrapped: Any) -> Tensor:
    """Return the bytes of a tensor of `triton_kernels`: (experts, bytes of the inputs, outputs).

    The bytes of one output are next to each other.
    """
    order = _order_of(wrapped)
    if order != _PLAIN:
        raise _UnreadError(f"{name} is in the order {order} of its library")
    data = wrapped.storage.data
    if type(data) not in containers.PLAIN_TENSORS or data.dim() != 3:
        raise _UnreadError(f"{name} is of another form")
    _, width, rows = data.shape
    experts_apart = data.stride(0) >= width * rows
    if data.dtype is not torch.uint8 or data.stride()[1:] != (1, width) or not experts_apart:
        raise _UnreadError(f"{name} is not stored output by output")
    return data  # type: ignore[no-any-return]


def _in_other_order(name: str, wrapped: Any, plain_layout: Callable[..., Any]) -> Swizzled | None:
    """Return the codes of a tensor of `triton_kernels` in an order for a kind of GPU."""
    order = _order_of(wrapped)
    if order in (_PLAIN, "NoneType"):
        return None
    found = swizzled(wrapped, plain_layout)
    if found is None:
        raise _UnreadError(
            f"{name} is in the order {order} of its library, which is not known to convert it; "
            "load the model with Mxfp4Config(dequantize=True)"
        )
    return found


def _order_of(wrapped: Any) -> str:
    """Return the name of a tensor's layout class in `triton_kernels`, "NoneType" without any."""
    return type(getattr(getattr(wrapped, "storage", None), "layout", None)).__name__


try:
    from transformers.integrations import mxfp4 as _library
except ImportError:
    _library = None  # type: ignore[assignment]

#: What transformers puts in the place of the forward of mixtures with `Mxfp4GptOssExperts`.
_MXFP4_FORWARDS = [f for f in (getattr(_library, "mlp_forward", None),) if f is not None]

_READERS: dict[str, Callable[[Any, torch.dtype], CodedExperts]] = {_FP8: _fp8, _MXFP4: _mxfp4}
