"""What a swapped module is to torch.compile and torch.export: the same composition, its kernels as calls of `mirage_hf::run`.

Whether a graph may hold kernels is decided while it is traced, by conditions on the live module that dynamo turns into guards.
Where one says no, the stock forward is traced. Nothing is counted: a counter would compile anew at each call.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.modules import module as every_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mirage_hf import torch_op
from mirage_hf.match.compose import Kernel, child
from mirage_hf.match.matcher import Match

KNOWN = frozenset((
    "attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings", "cache_position", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
"""Keyword arguments of a decoder layer that change nothing about its own code: they go on to attention as they are."""


def _call(digest: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    return torch_op.run(inputs, digest)  # type: ignore[no-any-return]


@torch.compiler.assume_constant_result
def _transforming() -> bool:
    """Whether vmap, grad or another transform of torch.func is being traced. Dynamo guards on those around a graph by itself."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Traced:
    """The kernels of a swapped module by number of rows, as digests, and all that they rely on."""

    def __init__(self, match: Match, digests: Mapping[int, Mapping[str, str]], width: int, tuner: Any):
        self.kernels = [(rows, {role: partial(_call, digest) for role, digest in roles.items()}) for rows, roles in digests.items()]
        self.composition = match.compose().live()
        self.kind, self.width, self.tuner = match.kind, width, tuner
        paths = dict.fromkeys(path for part in match.parts for path in part.bypassed)
        self.bypassed = [(path, *_facts(child(match.module, path))) for path in paths]
        owned = dict.fromkeys(w for part in match.parts for w in part.weights)
        self.weights = [(path, name, p.shape, p.dtype) for path, name in owned
                        if (p := child(match.module, path)._parameters[name]) is not None]
        weight: Any = child(match.module, match.parts[0].weights[-1][0])
        self.stock = (type(match.module), type(match.module).forward)
        self.device, self.dtype = weight.weight.device, dict(match.parts[0].block.sizes)["dtype"]

    def choose(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Kernel] | None:
        """Return the kernels for a call that is being traced, or None for the stock forward. `guard.Binding.choose` gives the reasons."""
        if module.training or len(args) != 1 or not self._takes(args[0]) or not self._knows(kwargs):
            return None
        if _transforming() or torch.is_autocast_enabled(self.device.type):
            return None
        if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
            return None
        if torch.is_grad_enabled() and (args[0].requires_grad or any(p.requires_grad for p in module.parameters())):
            return None
        if self.stock[0].forward is not self.stock[1] or not all(_is_as_was(module, *facts) for facts in self.bypassed):
            return None
        if not all(self._holds(module, *weight) for weight in self.weights):
            return None
        if self.tuner is not None and self.tuner.reason(module.__dict__):
            return None
        return self._for_rows(args[0].numel())

    def _takes(self, x: Any) -> bool:
        return isinstance(x, Tensor) and not is_traceable_wrapper_subclass(x) and x.dtype is self.dtype and x.device == self.device and \
            x.dim() == (3 if self.kind == "layer" else x.dim()) and x.shape[-1] == self.width

    def _knows(self, kwargs: Mapping[str, Any]) -> bool:
        if self.kind != "layer":
            return not kwargs
        return all(name in KNOWN for name in kwargs) and not kwargs.get("output_attentions")

    def _holds(self, module: nn.Module, path: str, name: str, shape: torch.Size, dtype: torch.dtype) -> bool:
        p = child(module, path)._parameters.get(name)
        return p is not None and not is_traceable_wrapper_subclass(p) and p.shape == shape and p.dtype is dtype and \
            p.device == self.device and p.is_contiguous()

    def _for_rows(self, numel: Any) -> Mapping[str, Kernel] | None:
        for rows, kernels in self.kernels:
            # a graph of torch.compile may be for one number of rows, another is compiled for others; an exported one must serve all
            same = numel == rows * self.width
            if statically_known_true(same) if torch.compiler.is_exporting() else same:
                return kernels
        return None


def _facts(module: nn.Module) -> tuple[Any, ...]:
    """What a bypassed module must still be: its class, that class's forward, and its settings where it has no children."""
    settings = {} if module._modules else {n: v for n, v in vars(module).items() if type(v) in (int, float, str) and n != "layer_idx"}
    return type(module), type(module).forward, tuple(settings.items())


def _is_as_was(root: nn.Module, path: str, kind: Any, forward: Any, settings: Sequence[tuple[str, Any]]) -> bool:
    module: Any = root
    for name in path.split("."):
        module = module._modules.get(name)
        if module is None:
            return False
    if type(module) is not kind or kind.forward is not forward:
        return False
    if not isinstance(module.forward, MethodType) or "forward" in module.__dict__:  # dynamo guards on the first only
        return False
    if module._forward_hooks or module._forward_pre_hooks:  # HF's own too: whether its collector listens cannot be asked in a graph
        return False
    return all(getattr(module, n, None) == v for n, v in settings)
