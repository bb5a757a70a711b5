"""The guard in front of a swapped module: whether this call may run kernels, decided over instance dictionaries.

It never goes through nn.Module's attribute look-up, and returns kernels or, as text, the reason to run the stock forward.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from transformers.utils.output_capturing import _active_collector

from mirage_hf.layers.compose import Composition, Kernel, child
from mirage_hf.match import plain
from mirage_hf.match.adapters import scaling_of
from mirage_hf.match.matcher import Match
from mirage_hf.patterns.decoder_layer import EPS_NAMES, MULTIPLIERS, SWITCHES
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.swap.traced import LAYER_ARGUMENTS, share, width_of

BINDING_KEY = "_mirage_bound"
"""Where a swapped module keeps its Binding, in its instance dictionary. Copies and pickles leave it out."""

PREFILL = "prefill"
SEEN_OUTSIDE = frozenset(("hidden_states", "_hidden_states_layers"))
"""What HF's collector records from the layer's own output, which a swapped layer still gives."""

_dispatch_modes, _tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_functorch = torch._C._functorch.peek_interpreter_stack
_global_hooks, _global_pre_hooks = (
    every_module._global_forward_hooks,
    every_module._global_forward_pre_hooks,
)
_grad, _autocast = torch.is_grad_enabled, torch.is_autocast_enabled
_collector = _active_collector.get


class InstanceNumbers:
    """The instance dictionary of a swapped module, for reading. It does not keep it alive: what is in it would keep itself."""

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)

    def get(self, name: str) -> Any:
        module = self._module()
        return None if module is None else module.__dict__.get(name)


class Binding:
    """What a swapped module carries: its kernels by number of rows, and all that they rely on.

    `calls` counts runs of the kernels, `fallbacks` those of the stock forward by reason.
    """

    __slots__ = (
        "absent",
        "calls",
        "classes",
        "composition",
        "constants",
        "containers",
        "device",
        "device_type",
        "dims",
        "dropouts",
        "dtype",
        "fallbacks",
        "kernels",
        "parameters",
        "retired",
        "stock",
        "traced",
        "tuners",
        "watched",
        "width",
    )

    def __init__(self, match: Match, found: Mapping[int, Mapping[str, Resolved]]):
        self.kernels = {
            rows: {role: kernel.run for role, kernel in roles.items()}
            for rows, roles in found.items()
        }
        self.stock = type(match.module)  # no reference to the module, which holds us
        self.composition: Composition | None = match.compose()
        self.calls, self.fallbacks, self.retired = 0, Counter[str](), ""
        sizes = dict(match.parts[0].block.sizes)
        weight: Any = self.composition.parameters[match.parts[0].role][0]
        self.device, self.device_type, self.dtype = (
            weight.get_device(),
            weight.device.type,
            sizes["dtype"],
        )
        self.dims = 3 if match.kind == "layer" else None
        self.width = width_of(match)
        self.watched = tuple(_watch(match.module, path) for path in match.bypassed)
        self.dropouts = tuple(
            inner for *_, kind, inner in self.watched if issubclass(kind, nn.Dropout)
        )
        self.containers = tuple(
            inner for *_, inner in self.watched if inner["_modules"]
        )  # some call dropout as a function
        kinds: dict[Any, None] = dict.fromkeys(
            [self.stock, *(kind for _, _, _, kind, _ in self.watched)]
        )
        self.classes = tuple((kind, kind.forward) for kind in kinds)
        numbers: list[tuple[Any, str]] = [
            (inner, n) for *_, inner in self.watched for n in EPS_NAMES
        ]
        numbers += [(InstanceNumbers(match.module), n) for n in (*MULTIPLIERS, *SWITCHES)]
        self.constants = tuple(
            (inner, n, value) for inner, n in numbers if (value := inner.get(n)) is not None
        )
        self.absent = tuple(
            (inner["_parameters"], n, f"{path}.{n}")
            for path, (*_, inner) in zip(match.bypassed, self.watched, strict=True)
            for n, p in inner["_parameters"].items()
            if p is None
        )
        owned = dict.fromkeys(w for part in match.parts for w in part.weights)
        self.parameters = tuple(_pin(child(match.module, path), path, name) for path, name in owned)
        tuners = tuple(AdapterState(path, child(match.module, path)) for path in match.adapters)
        self.tuners = tuple(
            (
                t,
                child(match.module, t.path).__dict__ if t.path else None,
                _holders(child(match.module, t.path)),
            )
            for t in tuners
        )
        digests = tuple(
            (rows, tuple((role, kernel.digest) for role, kernel in roles.items()))
            for rows, roles in found.items()
        )
        self.traced = share(
            match, digests, tuners
        )  # the name of what torch.compile needs, "" once retired

    def forget(self) -> None:
        """Start counting anew."""
        self.calls, self.fallbacks = 0, Counter()

    def retire(self, reason: str) -> str:
        """Give up for good: drop every reference to what was replaced, and keep running the stock forward."""
        self.retired, self.composition, self.traced, self.kernels = reason, None, "", {}
        self.watched = self.dropouts = self.containers = self.parameters = self.absent = (
            self.classes
        ) = self.constants = self.tuners = ()
        return reason

    def choose(
        self, state: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Mapping[str, Kernel] | str:
        """Return the kernels for this call, or why it must be stock's. `state` is the module's `__dict__`."""
        if self.retired:
            return self.retired
        if state["training"]:
            return "training mode"
        if len(args) != 1 or type(args[0]) is not Tensor:
            return (
                "arguments given by position or keyword in another way"
                if len(args) != 1
                else f"input is a {type(args[0]).__name__}"
            )
        x = args[0]
        shape = x.shape
        kernels = self.kernels.get(x.numel() // self.width)
        if kernels is None or shape[-1] != self.width or len(shape) != (self.dims or len(shape)):
            return (
                PREFILL
                if len(shape) == 3 and shape[1] > 1
                else f"no kernel for {x.numel() // self.width} rows"
            )
        if x.get_device() != self.device or x.dtype is not self.dtype:
            return f"input is {x.dtype} on {x.device}"
        if self.device >= 0 and x.data_ptr() % plain.ALIGNMENT:
            return "input at an odd address"
        if _grad() and (x.requires_grad or _trainable(state)):
            return "gradients needed"
        if _autocast(self.device_type):
            return "autocast"
        if _global_hooks or _global_pre_hooks:
            return "global forward hooks"
        if _dispatch_modes() or _tracing() is not None or _functorch() is not None:
            return "a torch mode or transform is active"
        if kwargs and (
            not LAYER_ARGUMENTS.issuperset(kwargs)
            or self.dims is None
            or kwargs.get("output_attentions")
        ):
            return _kwargs_reason(kwargs)
        if (recorded := _collector()) and not SEEN_OUTSIDE.issuperset(recorded):
            return "attentions or other inner outputs asked for"
        try:
            return self._changed() or self._tuned(state) or kernels
        except KeyError as e:
            return self.retire(f"{e.args[0]} was removed")

    def _tuned(self, state: dict[str, Any]) -> str | None:
        """What PEFT would do other than when the kernels were made."""
        for tuner, inner, holders in self.tuners:
            own = state if inner is None else inner
            children = own["_modules"]
            for name, holder in holders:
                if children[name] is not holder:
                    return self.retire(f"{name} was replaced")
            if reason := tuner.reason(own):
                return reason
        return None

    def _changed(self) -> str | None:
        """What is no longer as it was when the kernels were made: children, their classes, hooks and code, weights' addresses and strides,
        and biases that were not there."""
        for siblings, name, module, kind, inner in self.watched:
            if siblings[name] is not module:
                return self.retire(f"{name} was replaced")
            if type(module) is not kind:
                return f"{name} has changed its class"
            if (inner["_forward_hooks"] or inner["_forward_pre_hooks"]) and plain.foreign_hook(
                module
            ):
                return f"forward hook on {name}"
            if "forward" in inner:
                return f"{name} has a forward of its own"
        for kind, forward in self.classes:
            if kind.forward is not forward:
                return f"the forward of class {kind.__name__} was replaced"
        for dropout in self.dropouts:
            if dropout["training"] and dropout["p"]:
                return "dropout is active"
        for container in self.containers:
            if container["training"]:
                return "a part is in training mode"
        for numbers, name, value in self.constants:
            if numbers.get(name) != value:
                return f"a {name} was changed"
        for owner, name, p, pointer, label in self.parameters:
            if owner[name] is not p:
                return self.retire(f"{label} was replaced")
            if p.data_ptr() != pointer:
                return f"{label} has moved"
            if not p.is_contiguous():
                return f"{label} has other strides"
        for owner, name, label in self.absent:
            if owner[name] is not None:
                return f"{label} was added"
        return None


def _watch(root: nn.Module, path: str) -> tuple[Any, str, nn.Module, Any, dict[str, Any]]:
    parent, _, name = path.rpartition(".")
    module = child(root, path)
    return child(root, parent)._modules, name, module, type(module), module.__dict__


def _holders(tuner: nn.Module) -> tuple[tuple[str, Any], ...]:
    """What holds the modules of a PEFT linear's adapters by name: what is watched is what was in it."""
    return tuple((name, tuner._modules[name]) for name in ("lora_A", "lora_B", "lora_dropout"))


def _pin(owner: nn.Module, path: str, name: str) -> tuple[Any, str, Tensor, int, str]:
    parameter = owner._parameters[name]
    assert parameter is not None, path
    return owner._parameters, name, parameter, parameter.data_ptr(), f"{path}.{name}"


def _trainable(state: Mapping[str, Any]) -> bool:
    """Whether any parameter within a module wants gradients: those of stock parts reach the kernels' inputs."""
    return any(p is not None and p.requires_grad for p in state["_parameters"].values()) or any(
        _trainable(m.__dict__) for m in state["_modules"].values() if m is not None
    )


def _kwargs_reason(kwargs: Mapping[str, Any]) -> str:
    unknown = sorted(set(kwargs) - LAYER_ARGUMENTS)
    return (
        f"unknown argument {unknown[0]}"
        if unknown
        else "output_attentions"
        if kwargs.get("output_attentions")
        else "keyword arguments"
    )


class AdapterState:
    """The state of a PEFT linear that a kernel was made for, checked at each call. path: where in the swapped module, "" for itself."""

    __slots__ = ("many", "one", "path", "scaling")

    def __init__(self, path: str, module: Any):
        self.path, active = path, module._active_adapter
        self.one = active if isinstance(active, str) else active[0]
        self.many = [self.one]
        self.scaling = scaling_of(module.scaling[self.one])

    def reason(self, d: Mapping[str, Any]) -> str | None:
        if d["_disable_adapters"]:
            return "adapters disabled"
        if d["merged_adapters"]:
            return "adapter merged"
        if d["_active_adapter"] != self.one and d["_active_adapter"] != self.many:
            return "another adapter is active"
        scaling = d["scaling"].get(self.one)
        if self._rewritten(scaling) if isinstance(scaling, Tensor) else scaling != self.scaling:
            return "the adapter's scaling has changed"
        if (
            self.one in d.get("lora_variant", ())
            or d.get("fan_in_fan_out")
            or not d.get("cast_input_dtype_enabled", True)
        ):
            return "the adapter has become a variant"
        return None

    def _rewritten(self, scaling: Tensor) -> bool:
        # a graph cannot ask what a tensor holds; there the adapter runs as stock's
        return torch.compiler.is_compiling() or scaling_of(scaling) != self.scaling
