"""Twins: copies of modules with other weights, which probes and checks run instead of the modules.

Random weights show more than real ones. For example, a norm's weight of ones would hide whether it
is used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.match import plain
from mirage_hf.match.adapters import scaling_of

#: Attention backends that take the float mask of a probe. Twins of models with another backend are
#: probed with sdpa.
FLOAT_MASK_BACKENDS = ("eager", "sdpa")


def twin(module: nn.Module, convert: Callable[[str, Tensor], Tensor]) -> Any:
    """Return a copy of a module whose parameters and buffers are `convert(name, tensor)`.

    Configs are shared and not copied.
    """
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        converted = convert(name, parameter.detach())
        memo[id(parameter)] = nn.Parameter(converted, requires_grad=False)
    for name, buffer in module.named_buffers():
        floating = buffer.is_floating_point()
        memo[id(buffer)] = convert(name, buffer) if floating else buffer.clone()
    for child in module.modules():
        config = child.__dict__.get("config")
        if config is not None and id(config) not in memo:
            memo[id(config)] = _probing_config(config)
    return copy.deepcopy(module, memo)


def _probing_config(config: Any) -> Any:
    if getattr(config, "_attn_implementation", None) in (None, *FLOAT_MASK_BACKENDS):
        return config
    config = copy.copy(config)
    config._attn_implementation = "sdpa"
    return config


def takes_float_mask(attention: Any) -> bool:
    """Return whether an attention's backend takes the float mask of a probe."""
    return getattr(attention.config, "_attn_implementation", "eager") in FLOAT_MASK_BACKENDS


def lora_scalings(module: nn.Module) -> dict[str, float]:
    """Return PEFT's scalings of adapters, by the names of their lora_B weights."""
    scalings = {}
    for name, child in module.named_modules():
        if "lora_B" in child._modules:
            for adapter, scaling in child.__dict__["scaling"].items():
                weight = f"{name}.lora_B.{adapter}.weight".removeprefix(".")
                scalings[weight] = scaling_of(scaling)
    return scalings


def random_weights(
    seed: int, scalings: Mapping[str, float] | None = None
) -> Callable[[str, Tensor], Tensor]:
    """Return a `convert` for `twin` that makes random float32 weights.

    Matrices have unit gain, norm weights are near 1.3 and biases near 0.2. That is far enough from
    0 and 1 to be seen.

    Args:
        seed: The seed for each device.
        scalings: The factor of some weights' products, by name. It becomes part of their gain,
            because programs take exponentials of scores without a shift.
    """
    gains = {name: 1 / abs(scaling) for name, scaling in (scalings or {}).items() if scaling}
    generators: dict[torch.device, torch.Generator] = {}

    def convert(name: str, tensor: Tensor) -> Tensor:
        device = tensor.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(seed))
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device=device)
        if tensor.dim() >= 2:
            return noise.mul_(tensor.shape[-1] ** -0.5 * gains.get(name, 1.0))
        return 0.3 * noise + (0.2 if name.endswith("bias") else 1.3)

    return convert


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Return what a module's forward can depend on besides the values of its weights.

    Modules of one kind share a probe.
    """
    return tuple(
        (
            name,
            type(child),
            plain.own_attributes(child),
            id(child.__dict__.get("config")),
            tuple((n, p.shape) for n, p in child._parameters.items() if p is not None),
        )
        for name, child in module.named_modules()
    )
