"""One walk over a model per `generate`: what its kernels and captured steps depend on, and what keeps it from the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.layers.rope import LengthRope, length_rope
from mirage_hf.match.adapters import scaling_of
from mirage_hf.match.plain import foreign_hook
from mirage_hf.swap.guard import BINDING_KEY

_TUNER = (
    "_active_adapter",
    "_disable_adapters",
    "merged_adapters",
    "scaling",
    "lora_variant",
    "use_dora",
    "fan_in_fan_out",
    "cast_input_dtype_enabled",
)
"""Instance attributes of PEFT's tuner layers that decide what their forward does (FACTS: PEFT)."""

_SAME_IN_TRAINING = frozenset(
    {
        nn.Linear,
        nn.Embedding,
        nn.Identity,
        nn.Sequential,
        nn.ModuleList,
        nn.ModuleDict,
        nn.ParameterList,
        nn.ParameterDict,
    }
)
"""Modules that do the same in both modes: resized embeddings and new adapters arrive in training mode."""
_PLAIN = {nn.Parameter, Tensor}
_NUMBERS = {float, int, bool, type(None)}
_SETTINGS = {float, int, bool, str}
_NOT_READ = frozenset(nn.Module().__dict__) | {
    "_output_capturing_hooks_installed",
    "_previous_max_cache_length",
}
"""Attributes that no module's own forward reads; the last two are marks of HF's that come with its first capture of hidden states, and with
a generate over a static cache."""
_WITHOUT_NUMBERS = frozenset(
    {nn.Linear, nn.Identity, nn.ModuleList, nn.ModuleDict, nn.ParameterDict}
)
"""Modules whose numbers are sizes."""
_HOLDERS = frozenset({nn.Identity, nn.ModuleDict, nn.ParameterDict})
"""Modules of which PEFT has several in each linear, with nothing in most."""


@dataclass(frozen=True)
class ModelFingerprint:
    """What one walk found."""

    model: tuple[Any, ...] = field(compare=False)  # part of the key
    """All of the model that swapped forwards, and CUDA graphs captured over them, depend on: of every module its identity, class,
    mode, foreign hooks and own forward, of every tensor its address, dtype, shape and strides, PEFT's active and merged adapters,
    switches and scalings, which swapped modules have given up, the numbers of modules, and which configs they have. Equal for models that
    run the same kernels on the same memory."""
    key: tuple[Any, ...]
    """The same, the numbers of configs, the versions of buffers, and the switches that choose kernels at capture time: what is a constant
    in a CUDA graph."""
    obstacle: str | None
    """Why the stock method must run, or None."""
    no_graph: str | None
    """Why the step must be called rather than replayed, or None."""
    rope: LengthRope | None
    """RoPE for which the model's own forward must be called, if there is any."""


def take_fingerprint(model: nn.Module) -> ModelFingerprint:
    """Look at every module, parameter and buffer once. Cost: about a quarter of a microsecond each."""
    modules = [model]
    for module in modules:  # the list grows while it is walked
        if children := module.__dict__["_modules"]:
            modules += [
                m
                for m in children.values()
                if m is not None and not (type(m) in _HOLDERS and _is_idle(m.__dict__))
            ]
    states = [m.__dict__ for m in modules]
    kinds: list[Any] = list(map(type, modules))
    training = [d["training"] for d in states]
    hooked = [n for n, d in enumerate(states) if d["_forward_hooks"] or d["_forward_pre_hooks"]]
    special = [
        (n, _special(d))
        for n, d in enumerate(states)
        if "forward" in d or "merged_adapters" in d or "_active_adapter" in d or BINDING_KEY in d
    ]
    own = [(kind, d) for kind, d in zip(kinds, states, strict=True) if kind not in _WITHOUT_NUMBERS]
    tensors = [
        t for d in states if d["_parameters"] for t in d["_parameters"].values() if t is not None
    ]
    buffers = [
        t
        for d in states
        if d["_buffers"]
        for n, t in d["_buffers"].items()
        if t is not None and not _is_passing(n, d)
    ]
    odd = [type(t).__name__ for t in tensors if type(t) not in _PLAIN]
    addresses = [id(t) if type(t) not in _PLAIN else t.data_ptr() for t in chain(tensors, buffers)]
    # by their dictionaries, which are kept where kernels' numbers were read from them: the id of a config that is gone may come back
    configs = {id(vars(c)): vars(c) for _, d in own if hasattr(c := d.get("config"), "__dict__")}
    facts = (
        tuple(map(id, modules)),
        tuple(kinds),
        tuple((kind, kind.forward) for kind in dict.fromkeys(kinds)),
        tuple(training),
        tuple((n, hook) for n in hooked if (hook := foreign_hook(modules[n]))),
        tuple(special),
        tuple(addresses),
        tuple([t.dtype for t in chain(tensors, buffers)]),
        tuple([t.shape for t in tensors]),
        tuple([(n, t.stride()) for n, t in enumerate(tensors) if not t.is_contiguous()]),
        tuple([_numbers_of(kind, d) for kind, d in own]),
        tuple(configs),
    )
    devices = {t.device for t in tensors}
    device = next(iter(devices), torch.device("cpu"))
    config = getattr(model, "config", None)
    settings = [v for d in configs.values() for v in d.values() if type(v) in _SETTINGS]
    versions = [None if t.is_inference() else t._version for t in buffers]
    key = (facts, device, tuple(settings), tuple(versions), *_global_switches())
    obstacle = (
        _in_training(kinds, training)
        or _hooked([modules[n] for n in hooked])
        or _wrapped(states)
        or _out_of_place(own)
        or (f"weights of type {odd[0]}" if odd else None)
        or _on_devices(devices)
        or _global_obstacle(device)
    )
    return ModelFingerprint(facts, key, obstacle, _no_graph(), length_rope(config))


def still_expected(model: nn.Module, last: ModelFingerprint) -> bool:
    """Whether what one sees without looking at any module is still as it was: no obstacle, and graphs are allowed."""
    device = next((t.device for t in model.parameters()), torch.device("cpu"))
    graphs = (
        last.no_graph is None
        and last.rope is None
        and _no_graph() is None
        and length_rope(getattr(model, "config", None)) is None
    )
    return last.obstacle is None and graphs and _global_obstacle(device) is None


def _is_idle(state: dict[str, Any]) -> bool:
    """Whether a holder holds nothing and no one watches it: it is no part of what the model computes until it does."""
    return not (
        state["_modules"]
        or state["_parameters"]
        or state["_buffers"]
        or state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or "forward" in state
    )


_named: dict[tuple[Any, ...], Callable[[dict[str, Any]], Any] | None] = {}
"""What reads the numbers of a module's state, by its class and the names of its attributes."""


def _numbers_of(kind: type, state: dict[str, Any]) -> Any:
    """The numbers among a module's own attributes, and which of them are None. They are looked for in the first module of a class with
    attributes of these names, because looking at all of each takes as long as the rest of the walk: an attribute that is no number there is
    not read in others. Each set of names has a reader of its own, so that one module is always read alike."""
    known = kind, *state
    if known not in _named:
        names = [n for n, v in state.items() if type(v) in _NUMBERS and n not in _NOT_READ]
        _named[known] = itemgetter(*names, "training") if names else None
    read = _named[known]
    values = read(state) if read is not None else None
    if values is None or _NUMBERS.issuperset(map(type, values)):
        return values
    return tuple([v if type(v) in _NUMBERS else id(v) for v in values])


def _special(state: dict[str, Any]) -> tuple[Any, ...]:
    """What few modules have. A forward is kept itself: the id of one that is gone may come back as another's."""
    tuner = "merged_adapters" in state or "_active_adapter" in state
    bound = state.get(BINDING_KEY)
    kernels = () if bound is None else (id(bound), bound.retired)
    return (
        state.get("forward"),
        tuple([_setting(state[name]) for name in _TUNER if name in state]) if tuner else None,
        kernels,
    )


def _setting(value: Any) -> Any:
    """An attribute of a tuner layer, as what compares quickly; the tensors in it as numbers."""
    if type(value) in _SETTINGS:
        return value
    if type(value) is dict:
        return (
            tuple(
                [
                    (
                        name,
                        scaling_of(x)
                        if isinstance(x, Tensor)
                        else x
                        if type(x) in _SETTINGS
                        else repr(x),
                    )
                    for name, x in value.items()
                ]
            )
            if value
            else ()
        )
    return (
        tuple(value)
        if type(value) is list and _SETTINGS.issuperset(map(type, value))
        else repr(value)
    )


def _in_training(kinds: Sequence[type], training: Sequence[bool]) -> str | None:
    if not any(training):
        return None
    kind = next(
        (k for k, on in zip(kinds, training, strict=True) if on and k not in _SAME_IN_TRAINING),
        None,
    )
    return None if kind is None else f"training mode ({kind.__name__})"


def _hooked(modules: Sequence[nn.Module]) -> str | None:
    for module in modules:
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if who := _foreign_hook(hooks):
                return f"forward hook {who} on {type(module).__name__}"
    return None


def _wrapped(states: Sequence[dict[str, Any]]) -> str | None:
    for d in states:
        if "_hf_hook" in d:
            return "accelerate hooks"
        if d.get("_compiled_call_impl") is not None:
            return "a compiled module"
    return None


def _out_of_place(modules: Sequence[tuple[type, dict[str, Any]]]) -> str | None:
    """A layer that is there twice adds two keys to one layer of stock's cache in every step; the pool has a slot for one. Of layers
    that were moved, or whose numbers have gaps, masks are made by their place and caches by their number; without the first one stock takes
    every cache to be empty."""
    numbers: dict[type, list[int]] = {}
    for kind, d in modules:
        if isinstance(n := d.get("layer_idx"), int):
            numbers.setdefault(kind, []).append(n)
    for kind, each in numbers.items():
        if len(set(each)) < len(each):
            return f"more than one {kind.__name__} has the layer_idx {next(n for at, n in enumerate(each) if n in each[:at])}"
        if each != sorted(each):
            return f"{kind.__name__}s that are not in the order of their layer_idx"
    present = {n for each in numbers.values() for n in each}
    absent = next((n for n in range(max(present, default=0)) if n not in present), None)
    return None if absent is None else f"no layer with the layer_idx {absent}"


def _on_devices(devices: set[torch.device]) -> str | None:
    if len(devices) > 1:
        return "weights on several devices: " + ", ".join(sorted(map(str, devices)))
    kind = next((d.type for d in devices), "cpu")
    return None if kind in ("cpu", "cuda") else f"device type {kind}"


def _foreign_hook(hooks: dict[int, Any]) -> str | None:
    """Return a hook that is not HF's own output capture, which does nothing while nobody collects."""
    for hook in hooks.values():
        if not (getattr(hook, "__module__", None) or "").startswith("transformers."):
            return getattr(hook, "__qualname__", type(hook).__name__)
    return None


def _global_obstacle(device: torch.device) -> str | None:
    every_module = nn.modules.module
    if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
        return "global forward hooks"
    if torch.is_autocast_enabled(device.type):
        return "autocast"
    if torch.compiler.is_compiling():
        return "inside torch.compile"
    return None


def _global_switches() -> tuple[Any, ...]:
    """Switches that choose kernels at capture time."""
    cuda = torch.backends.cuda
    return (
        torch.get_float32_matmul_precision(),
        cuda.matmul.allow_tf32,
        cuda.flash_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _no_graph() -> str | None:
    """A mode sees no ops of a replay."""
    return "a torch dispatch mode is active" if torch._C._len_torch_dispatch_stack() else None


def _is_passing(name: str, state: dict[str, Any]) -> bool:
    """Whether a buffer holds what the last forward has put there and the next one puts there anew: frequencies of longrope, those for short
    texts or for long ones."""
    if not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
        return False
    kinds = state.get("rope_type")
    return (
        kinds.get(name.removesuffix("inv_freq").rstrip("_")) if isinstance(kinds, dict) else kinds
    ) == "longrope"
