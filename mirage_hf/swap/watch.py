"""Records of everything that a swapped module's kernels rely on, compared at each call.

They are made with the kernels. The guard (swap/guard.py) reads them on every call of a module. They
hold instance dictionaries, because nn.Module's attribute look-up would cost more than the
comparison.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.layers.model_kernels import WatchedNumber
from mirage_hf.layers.operands import Operand, submodule
from mirage_hf.match.adapters import active_adapters, scaling_of
from mirage_hf.match.matches import Match
from mirage_hf.patterns.decoder_layer import EPS_NAMES, MULTIPLIERS, SWITCHES


@dataclass(slots=True)
class WatchedChild:
    """A bypassed child, with its class and its place."""

    #: The dictionary of children that it is in, and its name there.
    siblings: Mapping[str, Any]
    name: str
    module: nn.Module
    kind: Any
    #: The instance dictionary of the module.
    state: dict[str, Any]

    @classmethod
    def at(cls, root: nn.Module, path: str) -> WatchedChild:
        """Watch the descendant at a dotted path."""
        parent, _, name = path.rpartition(".")
        module = submodule(root, path)
        siblings = submodule(root, parent)._modules
        return cls(siblings, name, module, type(module), module.__dict__)


@dataclass(slots=True)
class WatchedWeight:
    """A weight that kernels read, with the address that it had."""

    #: The dictionary of parameters that it is in, and its name there.
    owner: Mapping[str, Any]
    name: str
    tensor: Tensor
    pointer: int
    #: Its name in the swapped module.
    label: str

    @classmethod
    def of(cls, operand: Operand) -> WatchedWeight:
        """Watch an operand of the module."""
        tensor = operand.tensor
        return cls(operand.owner, operand.name, tensor, tensor.data_ptr(), operand.label)


@dataclass(slots=True)
class WatchedAbsence:
    """A parameter that was None, such as the bias of a linear without one."""

    owner: Mapping[str, Any]
    name: str
    label: str


class InstanceNumbers:
    """The instance dictionary of a swapped module, for reading.

    It does not keep the module alive, because the module holds it.
    """

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module):
        """Read from `module`."""
        self._module = weakref.ref(module)

    def get(self, name: str) -> Any:
        """Return an attribute of the instance, or None."""
        module = self._module()
        return None if module is None else module.__dict__.get(name)


def watched_numbers(match: Match, children: tuple[WatchedChild, ...]) -> Iterator[WatchedNumber]:
    """Yield the numbers of a match: epsilons of its norms, multipliers and switches of a layer."""
    places: list[tuple[Any, str]] = [(c.state, name) for c in children for name in EPS_NAMES]
    own = InstanceNumbers(match.module)
    places += [(own, name) for name in (*MULTIPLIERS, *SWITCHES)]
    for owner, name in places:
        value = owner.get(name)
        if value is not None:
            yield WatchedNumber(owner, name, value)


def watched_absences(match: Match, children: tuple[WatchedChild, ...]) -> Iterator[WatchedAbsence]:
    """Yield the parameters that the bypassed children do not have."""
    for path, child in zip(match.bypassed, children, strict=True):
        parameters = child.state["_parameters"]
        for name, parameter in parameters.items():
            if parameter is None:
                yield WatchedAbsence(parameters, name, f"{path}.{name}")


# -- PEFT ------------------------------------------------------------------------------------------


class AdapterState:
    """The state of a PEFT linear that a kernel was made for. Compared at each call.

    It holds no module. Traced graphs share it (swap/traced.py).
    """

    __slots__ = ("active", "active_list", "path", "scaling")

    def __init__(self, path: str, module: Any):
        """Record the state of `module`, which is at `path` in the swapped module."""
        self.path = path
        self.active = active_adapters(module)[0]
        self.active_list = [self.active]
        self.scaling = scaling_of(module.scaling[self.active])

    def why_changed(self, state: Mapping[str, Any]) -> str | None:
        """Return what PEFT would do differently now, or None.

        Args:
            state: The instance dictionary of the PEFT linear.
        """
        if state["_disable_adapters"]:
            return "its adapters were disabled"
        if state["merged_adapters"]:
            return "its adapter was merged"
        active = state["_active_adapter"]
        if active != self.active and active != self.active_list:
            return "another adapter is active"
        scaling = state["scaling"].get(self.active)
        if isinstance(scaling, Tensor):
            changed = self._rewritten(scaling)
        else:
            changed = scaling != self.scaling
        if changed:
            return "the adapter's scaling has changed"
        if (
            self.active in state.get("lora_variant", ())
            or state.get("fan_in_fan_out")
            or not state.get("cast_input_dtype_enabled", True)
        ):
            return "the adapter has become a variant"
        return None

    def _rewritten(self, scaling: Tensor) -> bool:
        # A traced graph cannot read a tensor's value. There the stock forward of the adapter runs.
        return torch.compiler.is_compiling() or scaling_of(scaling) != self.scaling


@dataclass(slots=True)
class WatchedAdapter:
    """A PEFT linear whose adapter kernels compute."""

    recorded: AdapterState
    #: The instance dictionary of the linear, or None if it is the swapped module itself.
    state: dict[str, Any] | None
    #: (name, module) of each container of the adapters' modules, such as `lora_A`.
    containers: tuple[tuple[str, Any], ...]

    @classmethod
    def at(cls, root: nn.Module, path: str) -> WatchedAdapter:
        """Watch the PEFT linear at a dotted path. "" is the root itself."""
        linear = submodule(root, path)
        names = ("lora_A", "lora_B", "lora_dropout")
        containers = tuple((name, linear._modules[name]) for name in names)
        return cls(AdapterState(path, linear), linear.__dict__ if path else None, containers)
