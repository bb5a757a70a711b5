"""What a swapped module is to torch.compile and torch.export: the same composition, its kernels as calls of `mirage_hf::run`.

Whether a graph may hold kernels is decided while it is traced, by conditions on the live module that dynamo turns into guards.
Where one says no, the stock forward is traced. Nothing is counted: a counter would compile anew at each call.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.modules import module as every_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mirage_hf.layers.compose import Kernel, LiveWeights, any_norm, child, stand_in
from mirage_hf.match.matcher import Match
from mirage_hf.patterns.decoder_layer import CACHES, MULTIPLIERS, SWITCHES
from mirage_hf.pipeline import torch_op

LAYER_ARGUMENTS = frozenset(
    (
        "attention_mask",
        "position_ids",
        *CACHES,
        "use_cache",
        "position_embeddings",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    )
)
"""Keyword arguments of a decoder layer that change nothing about its own code: they go on to attention as they are."""


def _call(digest: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    return torch_op.run(inputs, digest)  # type: ignore[no-any-return]


@torch.compiler.assume_constant_result
def _transforming() -> bool:
    """Whether vmap, grad or another transform of torch.func is being traced. Dynamo guards on those around a graph by itself."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Traced:
    """What a kind of swapped module needs while it is traced: digests of kernels by number of rows, and all that they rely on.

    It holds no module and no tensor, and equal modules share one: dynamo's guards on it are checked once a graph, not once a layer.
    """

    def __init__(self, match: Match, digests: Digests, tuners: Sequence[Any]):
        self.kernels = [
            (rows, {role: partial(_call, digest) for role, digest in roles})
            for rows, roles in digests
        ]
        self.composition = stand_in(match.compose(), {"children": None, "parameters": None})
        self.names = {part.role: part.weights for part in match.parts}
        self.kind, self.tuners, self.stock = (
            match.kind,
            tuners,
            (type(match.module), type(match.module).forward),
        )
        self.bypassed, self.own = _bypassed(match), _own(match)
        self.weights = [
            (
                path,
                name,
                child(match.module, path)._parameters[name].shape,
                child(match.module, path)._parameters[name].dtype,
            )
            for path, name in dict.fromkeys(w for part in match.parts for w in part.weights)
        ]
        self.device, self.dtype, self.width = (
            _device(match),
            dict(match.parts[0].block.sizes)["dtype"],
            width_of(match),
        )

    def over(self, module: nn.Module) -> Any:
        """The composition over a module as it is now: torch.export, for one, puts other weights in their place while it traces."""
        children = module._modules
        return stand_in(
            self.composition,
            {"children": children, "parameters": LiveWeights(children, self.names)},
        )

    def choose(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Mapping[str, Kernel] | None:
        """Return the kernels for a call that is being traced, or None for the stock forward. `guard.Binding.choose` gives the reasons."""
        if module.training or len(args) != 1 or not self._takes(args[0]) or not self._knows(kwargs):
            return None
        if _transforming() or torch.is_autocast_enabled(self.device.type):
            return None
        if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
            return None
        if torch.is_grad_enabled() and (
            args[0].requires_grad or any(p.requires_grad for p in module.parameters())
        ):
            return None
        if self.stock[0].forward is not self.stock[1] or not all(
            _is_as_was(module, *facts) for facts in self.bypassed
        ):
            return None
        if not all(getattr(module, name, None) == value for name, value in self.own):
            return None
        if not all(self._holds(module, *weight) for weight in self.weights):
            return None
        if any(tuner.reason(child(module, tuner.path).__dict__) for tuner in self.tuners):
            return None
        return self._for_rows(args[0].numel())

    def _takes(self, x: Any) -> bool:
        return (
            isinstance(x, Tensor)
            and not is_traceable_wrapper_subclass(x)
            and x.dtype is self.dtype
            and x.device == self.device
            and x.dim() == (3 if self.kind == "layer" else x.dim())
            and x.shape[-1] == self.width
        )

    def _knows(self, kwargs: Mapping[str, Any]) -> bool:
        if self.kind != "layer":
            return not kwargs
        return all(name in LAYER_ARGUMENTS for name in kwargs) and not kwargs.get(
            "output_attentions"
        )

    def _holds(
        self, module: nn.Module, path: str, name: str, shape: torch.Size, dtype: torch.dtype
    ) -> bool:
        p = child(module, path)._parameters.get(name)
        if p is None or (type(p) is not nn.Parameter and is_traceable_wrapper_subclass(p)):
            return False
        return (
            p.shape == shape and p.dtype is dtype and p.device == self.device and p.is_contiguous()
        )

    def _for_rows(self, numel: Any) -> Mapping[str, Kernel] | None:
        for rows, kernels in self.kernels:
            # a graph of torch.compile may be for one number of rows, another is compiled for others; an exported one must serve all
            same = numel == rows * self.width
            if statically_known_true(same) if torch_op.exporting() else same:
                return kernels
        return None


Digests = tuple[tuple[int, tuple[tuple[str, str], ...]], ...]
"""The kernels' digests: (rows, ((role, digest), …)), …"""

shared: dict[str, Traced] = {}
_names: dict[Any, str] = {}
_lock = threading.Lock()


def share(match: Match, digests: Digests, tuners: Sequence[Any]) -> str:
    """Return the name in `shared` of what a match needs; equal matches have the same."""
    facts = (
        type(match.module),
        type(match.module).forward,
        match.kind,
        match.parts,
        match.layouts,
        digests,
        _device(match),
        _bypassed(match),
        _own(match),
        tuple((t.path, t.one, t.scaling) for t in tuners),
    )
    with _lock:
        name = _names.setdefault(facts, str(len(_names)))
        if name not in shared:
            shared[name] = Traced(match, digests, tuners)
    return name


def width_of(match: Match) -> int:
    """The size of the last dim of a matched module's input."""
    if match.kind == "layer":
        return int(any_norm(match.module, match.layouts[0]).weight.shape[0])
    return int(dict(match.parts[0].block.sizes)["k"])


def _device(match: Match) -> torch.device:
    weight: Any = child(match.module, match.parts[0].weights[0][0])._parameters[
        match.parts[0].weights[0][1]
    ]
    return weight.device  # type: ignore[no-any-return]


def _own(match: Match) -> tuple[tuple[str, Any], ...]:
    """The numbers of a layer's own that its kernels were made for."""
    return tuple(
        (n, v) for n in (*MULTIPLIERS, *SWITCHES) if (v := match.module.__dict__.get(n)) is not None
    )


def _bypassed(match: Match) -> tuple[Any, ...]:
    return tuple((path, *_facts(child(match.module, path))) for path in match.bypassed)


def _facts(module: nn.Module) -> tuple[Any, ...]:
    """What a bypassed module must still be: its class, that class's forward, its settings (sizes are those of its weights), and which
    parameters it has not."""
    settings = (
        {}
        if module._modules
        else {n: v for n, v in vars(module).items() if type(v) in (float, str)}
    )
    absent = tuple(n for n, p in module._parameters.items() if p is None)
    return type(module), type(module).forward, tuple(settings.items()), absent


def _is_as_was(
    root: nn.Module,
    path: str,
    kind: Any,
    forward: Any,
    settings: Sequence[tuple[str, Any]],
    absent: Sequence[str],
) -> bool:
    module: Any = root
    for name in path.split("."):
        module = module._modules.get(name)
        if module is None:
            return False
    if type(module) is not kind or kind.forward is not forward:
        return False
    if (
        not hasattr(module, "forward") or "forward" in module.__dict__
    ):  # dynamo guards on the first only: both change together
        return False
    # HF's own hooks count too: whether its collector listens cannot be asked in a graph
    if module.training or module._forward_hooks or module._forward_pre_hooks:
        return False
    return all(getattr(module, n, None) == v for n, v in settings) and all(
        module._parameters.get(n) is None for n in absent
    )
