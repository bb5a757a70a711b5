"""The forward of a swapped module that torch.compile and torch.export trace.

It is the same composition, with its kernels as calls of the op `mirage_hf::run`. Conditions on the
live module decide during the trace whether the graph may hold kernels. Dynamo turns them into
guards. If a condition fails, the stock forward is traced. Nothing is counted, because a counter
would cause a new compilation at each call.
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

from mirage_hf.formats.containers import stock_class
from mirage_hf.layers.compose import Composition, Kernel
from mirage_hf.layers.operands import LiveOperands, submodule
from mirage_hf.match.matches import Match
from mirage_hf.patterns.decoder_layer import CACHES, MULTIPLIERS, SWITCHES
from mirage_hf.pipeline import torch_op

#: Keyword arguments of a decoder layer that do not change its own code. They are passed on to
#: attention as they are.
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

#: The kernels' digests: (rows, ((role, digest), …)), …
Digests = tuple[tuple[int, tuple[tuple[str, str], ...]], ...]


def _call(digest: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    return torch_op.run(inputs, digest)  # type: ignore[no-any-return]


@torch.compiler.assume_constant_result
def _transform_is_active() -> bool:
    """Return whether a transform of torch.func, such as vmap or grad, is being traced.

    Dynamo itself guards on transforms around a graph.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


class TracedModule:
    """The facts about a kind of swapped module that its trace needs.

    This holds no module and no tensor, and equal modules share one. So dynamo checks its guards on
    it once a graph, and not once a layer.
    """

    def __init__(self, match: Match, digests: Digests, adapters: Sequence[Any]):
        """Record everything that a match relies on.

        Args:
            match: The match.
            digests: The digests of its kernels.
            adapters: The recorded state of its adapters (`watch.AdapterState`).
        """
        self.kernels = [
            (rows, {role: partial(_call, digest) for role, digest in roles})
            for rows, roles in digests
        ]
        self.composition: Composition = match.compose().over(None)
        self.kind = match.kind
        self.adapters = adapters
        self.stock = type(match.module)
        self.stock_forward = self.stock.forward
        self.bypassed = _bypassed(match)
        self.numbers = _layer_numbers(match)
        self.weights = [
            (operand.path, operand.name, operand.tensor.shape, operand.tensor.dtype)
            for operand in match.operands
        ]
        self.device = _device(match)
        self.dtype = dict(match.parts[0].block.sizes)["dtype"]
        self.width = match.width

    def over(self, module: nn.Module) -> Composition:
        """Return the composition over a module's weights as they are now.

        torch.export puts other weights in the module while it traces.
        """
        return self.composition.over(LiveOperands(module._modules, self.composition.parts))

    def choose(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Mapping[str, Kernel] | None:
        """Return the kernels for a call that is being traced, or None for the stock forward.

        `guard.Binding.choose` gives the reasons.
        """
        if module.training or len(args) != 1 or not self._takes(args[0]) or not self._knows(kwargs):
            return None
        if _transform_is_active() or torch.is_autocast_enabled(self.device.type):
            return None
        if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
            return None
        if torch.is_grad_enabled() and (
            args[0].requires_grad or any(p.requires_grad for p in module.parameters())
        ):
            return None
        if self.stock.forward is not self.stock_forward:
            return None
        if not all(_is_unchanged(module, *facts) for facts in self.bypassed):
            return None
        if not all(getattr(module, name, None) == value for name, value in self.numbers):
            return None
        if not all(self._has_weight(module, *weight) for weight in self.weights):
            return None
        if any(a.why_changed(submodule(module, a.path).__dict__) for a in self.adapters):
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
        known = all(name in LAYER_ARGUMENTS for name in kwargs)
        return known and not kwargs.get("output_attentions")

    def _has_weight(
        self, module: nn.Module, path: str, name: str, shape: torch.Size, dtype: torch.dtype
    ) -> bool:
        p = submodule(module, path)._parameters.get(name)
        if p is None or (type(p) is not nn.Parameter and is_traceable_wrapper_subclass(p)):
            return False
        return (
            p.shape == shape and p.dtype is dtype and p.device == self.device and p.is_contiguous()
        )

    def _for_rows(self, numel: Any) -> Mapping[str, Kernel] | None:
        for rows, kernels in self.kernels:
            # torch.compile may make a graph for one number of rows and compile others anew. An
            # exported graph must serve all.
            same = numel == rows * self.width
            if statically_known_true(same) if torch_op.exporting() else same:
                return kernels
        return None


#: The traced modules by name.
shared: dict[str, TracedModule] = {}
_names: dict[Any, str] = {}
_lock = threading.Lock()


def share(match: Match, digests: Digests, adapters: Sequence[Any]) -> str:
    """Return the name in `shared` of a match's traced module. Equal matches have the same name."""
    facts = (
        type(match.module),
        type(match.module).forward,
        match.kind,
        match.parts,
        match.layout,
        match.mlp_layout,
        digests,
        _device(match),
        _bypassed(match),
        _layer_numbers(match),
        tuple((a.path, a.active, a.scaling) for a in adapters),
    )
    with _lock:
        name = _names.setdefault(facts, str(len(_names)))
        if name not in shared:
            shared[name] = TracedModule(match, digests, adapters)
    return name


def _device(match: Match) -> torch.device:
    return match.operands.parameters(match.parts[0].role)[0].device  # type: ignore[no-any-return]


def _layer_numbers(match: Match) -> tuple[tuple[str, Any], ...]:
    """Return the multipliers and switches of a layer that its kernels were made for."""
    values = ((name, match.module.__dict__.get(name)) for name in (*MULTIPLIERS, *SWITCHES))
    return tuple((name, value) for name, value in values if value is not None)


def _bypassed(match: Match) -> tuple[Any, ...]:
    return tuple((path, *_facts(submodule(match.module, path))) for path in match.bypassed)


def _facts(module: nn.Module) -> tuple[Any, ...]:
    """Return facts about a bypassed module that must not change.

    These are its class, its stock class and that class's forward, its settings, and the parameters
    that are None. Its sizes need no record, because its weights have them.
    """
    settings = (
        {}
        if module._modules
        else {name: value for name, value in vars(module).items() if type(value) in (float, str)}
    )
    absent = tuple(name for name, p in module._parameters.items() if p is None)
    stock: Any = stock_class(module)
    return type(module), stock, stock.forward, tuple(settings.items()), absent


def _is_unchanged(
    root: nn.Module,
    path: str,
    kind: Any,
    stock: Any,
    forward: Any,
    settings: Sequence[tuple[str, Any]],
    absent: Sequence[str],
) -> bool:
    """Return whether the module at `path` still is what `_facts` recorded."""
    module: Any = root
    for name in path.split("."):
        module = module._modules.get(name)
        if module is None:
            return False
    if type(module) is not kind or stock.forward is not forward:
        return False
    # Dynamo guards on the first of these only, and both change together.
    if not hasattr(module, "forward") or "forward" in module.__dict__:
        return False
    # HF's own hooks count too, because a graph cannot ask whether its collector listens.
    if module.training or module._forward_hooks or module._forward_pre_hooks:
        return False
    return all(getattr(module, name, None) == value for name, value in settings) and all(
        module._parameters.get(name) is None for name in absent
    )
