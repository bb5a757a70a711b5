"""The guard of a swapped module: whether a call may run kernels.

It decides over instance dictionaries, because nn.Module's attribute look-up would take longer than
the comparisons. The answer is the kernels or, as a string, the reason to run the stock forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from transformers.utils.output_capturing import _active_collector

from mirage_hf.formats.containers import stock_class
from mirage_hf.layers.compose import Composition, Kernel
from mirage_hf.layers.model_kernels import WatchedNumber
from mirage_hf.match import plain
from mirage_hf.match.matches import Match
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.swap.traced import LAYER_ARGUMENTS, share
from mirage_hf.swap.watch import (
    WatchedAbsence,
    WatchedAdapter,
    WatchedChild,
    WatchedWeight,
    watched_absences,
    watched_numbers,
)

#: Where a swapped module keeps its Binding, in its instance dictionary. Copies and pickles leave it
#: out.
BINDING_KEY = "_mirage_bound"

#: The reason for calls with several tokens of a sequence.
PREFILL = "prefill"

#: What HF's collector records from the layer's own output, which a swapped layer still gives.
SEEN_OUTSIDE = frozenset(("hidden_states", "_hidden_states_layers"))

# Local names save attribute look-ups at each call.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state
_functorch = torch._C._functorch.peek_interpreter_stack
_global_hooks = every_module._global_forward_hooks
_global_pre_hooks = every_module._global_forward_pre_hooks
_grad_enabled = torch.is_grad_enabled
_autocast_enabled = torch.is_autocast_enabled
_collector = _active_collector.get


class Binding:
    """What a swapped module carries: its kernels, and everything that they rely on."""

    __slots__ = (
        "absences",
        "adapters",
        "before_call",
        "calls",
        "children",
        "classes",
        "composition",
        "containers",
        "device",
        "device_type",
        "dims",
        "dropouts",
        "dtype",
        "fallbacks",
        "kernels",
        "numbers",
        "retired",
        "stock",
        "traced",
        "weights",
        "width",
    )

    #: What runs the module's parts, by number of rows and role.
    kernels: dict[int, Mapping[str, Kernel]]
    #: The stock class. There is no reference to the module, which holds this.
    stock: type[nn.Module]
    #: The module's forward over its kernels. None once retired.
    composition: Composition | None
    #: How many calls ran kernels, and how many ran the stock forward, by reason.
    calls: int
    fallbacks: Counter[str]
    #: Why no call runs kernels any more, or "".
    retired: str
    #: Called before each call of the module. Kernels may be replaced then.
    before_call: Callable[[], None] | None
    #: The name of what torch.compile needs (see `traced.share`), or "" once retired.
    traced: str

    def __init__(self, match: Match, resolved: Mapping[int, Mapping[str, Resolved]]):
        """Bind a match to its kernels, by number of rows and role."""
        self.stock = type(match.module)
        self.composition = match.compose()
        self.before_call = None
        self.calls, self.fallbacks, self.retired = 0, Counter(), ""
        self._expect_input(match)
        self._watch(match)
        self.use(match, resolved)

    def use(self, match: Match, resolved: Mapping[int, Mapping[str, Resolved]]) -> None:
        """Run these kernels from the next call on, by number of rows and role."""
        self.kernels = {
            rows: {role: kernel.run for role, kernel in by_role.items()}
            for rows, by_role in resolved.items()
        }
        digests = tuple(
            (rows, tuple((role, kernel.digest) for role, kernel in by_role.items()))
            for rows, by_role in resolved.items()
        )
        self.traced = share(match, digests, tuple(a.recorded for a in self.adapters))

    def _expect_input(self, match: Match) -> None:
        weight = match.operands.parameters(match.parts[0].role)[0]
        self.device: int = weight.get_device()
        self.device_type: str = weight.device.type
        self.dtype: torch.dtype = dict(match.parts[0].block.sizes)["dtype"]
        #: The dims of the input, or None if any number will do.
        self.dims: int | None = 3 if match.kind == "layer" else None
        self.width: int = match.width

    def _watch(self, match: Match) -> None:
        children = tuple(WatchedChild.at(match.module, path) for path in match.bypassed)
        self.children: tuple[WatchedChild, ...] = children
        self.dropouts: tuple[dict[str, Any], ...] = tuple(
            child.state for child in children if issubclass(child.kind, nn.Dropout)
        )
        # Some containers call dropout as a function.
        self.containers: tuple[dict[str, Any], ...] = tuple(
            child.state for child in children if child.state["_modules"]
        )
        stock = (stock_class(child.module) for child in children)
        kinds: dict[Any, None] = dict.fromkeys([self.stock, *stock])
        self.classes: tuple[tuple[Any, Any], ...] = tuple((kind, kind.forward) for kind in kinds)
        self.numbers: tuple[WatchedNumber, ...] = tuple(watched_numbers(match, children))
        self.absences: tuple[WatchedAbsence, ...] = tuple(watched_absences(match, children))
        self.weights: tuple[WatchedWeight, ...] = tuple(map(WatchedWeight.of, match.operands))
        self.adapters: tuple[WatchedAdapter, ...] = tuple(
            WatchedAdapter.at(match.module, path) for path in match.adapters
        )

    def forget(self) -> None:
        """Start counting anew."""
        self.calls, self.fallbacks = 0, Counter()

    def retire(self, reason: str) -> str:
        """Give up for good, and drop every reference to what was replaced.

        The stock forward runs from now on. Returns the reason.
        """
        self.retired, self.composition, self.traced, self.kernels = reason, None, "", {}
        self.children = self.classes = self.weights = self.absences = ()
        self.dropouts = self.containers = self.numbers = self.adapters = ()
        self.before_call = None
        return reason

    def choose(
        self, state: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Mapping[str, Kernel] | str:
        """Return the kernels for a call, or why the stock forward must run.

        Args:
            state: The module's instance dictionary.
            args: The positional arguments of the call.
            kwargs: Its keyword arguments.
        """
        if self.retired:
            return self.retired
        if state["training"]:
            return "training mode"
        if len(args) != 1:
            return "expected one positional argument"
        x = args[0]
        if type(x) is not Tensor:
            return f"input is a {type(x).__name__}"
        shape = x.shape
        rows = x.numel() // self.width
        kernels = self.kernels.get(rows)
        if kernels is None or shape[-1] != self.width or len(shape) != (self.dims or len(shape)):
            return PREFILL if len(shape) == 3 and shape[1] > 1 else f"no kernel for {rows} rows"
        if x.get_device() != self.device or x.dtype is not self.dtype:
            return f"input is {x.dtype} on {x.device}"
        if self.device >= 0 and x.data_ptr() % plain.ALIGNMENT:
            return f"input is not {plain.ALIGNMENT}-byte aligned"
        if _grad_enabled() and (x.requires_grad or _needs_gradients(state)):
            return "gradients needed"
        if _autocast_enabled(self.device_type):
            return "autocast"
        if _global_hooks or _global_pre_hooks:
            return "global forward hooks"
        if _dispatch_modes() or _tracing_state() is not None or _functorch() is not None:
            return "a torch mode or transform is active"
        if kwargs and (
            not LAYER_ARGUMENTS.issuperset(kwargs)
            or self.dims is None
            or kwargs.get("output_attentions")
        ):
            return _why_not_kwargs(kwargs)
        if (recorded := _collector()) and not SEEN_OUTSIDE.issuperset(recorded):
            return "attentions or other inner outputs asked for"
        try:
            return self._why_changed() or self._why_adapters_changed(state) or kernels
        except KeyError as error:
            return self.retire(f"{error.args[0]} was removed")

    def _why_adapters_changed(self, state: dict[str, Any]) -> str | None:
        """Return what PEFT would do differently than when the kernels were made, or None."""
        for adapter in self.adapters:
            own = state if adapter.state is None else adapter.state
            children = own["_modules"]
            for name, container in adapter.containers:
                if children[name] is not container:
                    return self.retire(f"{name} was replaced")
            if reason := adapter.recorded.why_changed(own):
                return reason
        return None

    def _why_changed(self) -> str | None:
        """Return what is no longer as it was when the kernels were made, or None.

        These are children, their classes, hooks and code, the addresses and strides of weights, and
        biases that did not exist.
        """
        for child in self.children:
            if child.siblings[child.name] is not child.module:
                return self.retire(f"{child.name} was replaced")
            if type(child.module) is not child.kind:
                return f"{child.name} has changed its class"
            state = child.state
            hooked = state["_forward_hooks"] or state["_forward_pre_hooks"]
            if hooked and plain.foreign_hook(child.module):
                return f"forward hook on {child.name}"
            if "forward" in state:
                return f"{child.name} has a forward of its own"
        for kind, forward in self.classes:
            if kind.forward is not forward:
                return f"the forward of class {kind.__name__} was replaced"
        for dropout in self.dropouts:
            if dropout["training"] and dropout["p"]:
                return "dropout is active"
        for container in self.containers:
            if container["training"]:
                return "a part is in training mode"
        for number in self.numbers:
            if number.owner.get(number.name) != number.value:
                return f"a {number.name} was changed"
        for weight in self.weights:
            tensor = weight.tensor
            if weight.owner[weight.name] is not tensor:
                return self.retire(f"{weight.label} was replaced")
            if tensor.data_ptr() != weight.pointer:
                return f"{weight.label} has moved"
            if not tensor.is_contiguous():
                return f"{weight.label} has other strides"
        for absence in self.absences:
            if absence.owner[absence.name] is not None:
                return f"{absence.label} was added"
        return None


def _needs_gradients(state: Mapping[str, Any]) -> bool:
    """Return whether any parameter within a module needs gradients.

    Those of stock parts count, because they reach the kernels' inputs.
    """
    if any(p is not None and p.requires_grad for p in state["_parameters"].values()):
        return True
    return any(_needs_gradients(m.__dict__) for m in state["_modules"].values() if m is not None)


def _why_not_kwargs(kwargs: Mapping[str, Any]) -> str:
    unknown = sorted(set(kwargs) - LAYER_ARGUMENTS)
    if unknown:
        return f"unknown argument {unknown[0]}"
    return "output_attentions" if kwargs.get("output_attentions") else "keyword arguments"
