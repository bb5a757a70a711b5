"""A stock model with its optimized copy, and what may happen to a model after optimize()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mirage_hf.api import optimize
from mirage_hf.swap.guard import BINDING_KEY
from tests.helpers.tiny_models import tiny, twin_of


def layer_of(model: Any) -> Any:
    """Return the layer that the tests look at."""
    return model.model.layers[1]


def counts(model: Any) -> dict[str, int]:
    """Return how often the stock forward of that layer ran, by reason."""
    return dict(layer_of(model).__dict__[BINDING_KEY].fallbacks)


def swapped(family: str = "llama", **options: Any) -> tuple[Any, Any]:
    """Return a stock model and its optimized copy."""
    stock = tiny(family)
    return stock, optimize(twin_of(stock), **options)


def _train(m: Any) -> None:
    m.train()


def _hook_child(m: Any) -> None:
    layer_of(m).mlp.up_proj.register_forward_hook(lambda *a: None)


def _pre_hook_child(m: Any) -> None:
    layer_of(m).self_attn.register_forward_pre_hook(lambda *a: None)


def _own_forward(m: Any) -> None:
    linear = layer_of(m).self_attn.q_proj
    linear.forward = lambda x: nn.functional.linear(x, linear.weight)


def _replace(m: Any) -> None:
    other = nn.Linear(32, 48, bias=False)
    other.weight.data.copy_(layer_of(m).mlp.gate_proj.weight)
    layer_of(m).mlp.gate_proj = other


def _assign(m: Any) -> None:
    m.load_state_dict({k: 0.5 * v for k, v in m.state_dict().items()}, assign=True)


def _set_data(m: Any) -> None:
    layer_of(m).mlp.down_proj.weight.data = 2 * layer_of(m).mlp.down_proj.weight.data


def _there_and_back(m: Any) -> None:
    held = [p.data for p in m.parameters()]  # so that no weight gets its old address again
    m.bfloat16().float()
    del held


def _bias(m: Any) -> None:
    layer_of(m).self_attn.o_proj.bias = nn.Parameter(torch.linspace(-2, 2, 32))


def _transposed(m: Any) -> None:
    weight = layer_of(m).self_attn.q_proj.weight
    weight.data = weight.data.t()  # the same address, shape and dtype


#: Changes of a model, by the reason for which its layer then runs the stock forward.
EVENTS: dict[str, Callable[[Any], None]] = {
    "self_attn.o_proj.bias was added": _bias,
    "self_attn.q_proj.weight has other strides": _transposed,
    "training mode": _train,
    "forward hook on up_proj": _hook_child,
    "forward hook on self_attn": _pre_hook_child,
    "q_proj has a forward of its own": _own_forward,
    "gate_proj was replaced": _replace,
    "input_layernorm.weight was replaced": _assign,
    "mlp.down_proj.weight has moved": _set_data,
    "input is torch.bfloat16 on cpu": lambda m: m.bfloat16(),
    "input is torch.float16 on cpu": lambda m: m.half(),
    "input_layernorm.weight has moved": _there_and_back,
}
