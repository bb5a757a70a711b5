"""The model fingerprint: one walk over a model for each `generate`.

It holds everything that kernels and captured steps depend on, and the reason why a model cannot use
the cache pool. Every call takes the walk, so it is written for speed. It takes about a quarter of a
microsecond for each module, parameter and buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf import cudnn_attention, float32_products
from mirage_hf.decode.model_obstacles import (
    global_obstacle,
    layers_out_of_place,
    model_obstacle,
    why_no_graph,
)
from mirage_hf.formats import holds_codes, loose_facts, memory_of
from mirage_hf.formats.containers import stock_forward
from mirage_hf.layers.rope import LengthRope, length_rope
from mirage_hf.match.adapters import scaling_of
from mirage_hf.match.plain import foreign_hook
from mirage_hf.swap.guard import BINDING_KEY

#: Attributes of PEFT's tuner layers that decide what their forward computes.
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
_PLAIN = {nn.Parameter, Tensor}
_NUMBERS = {float, int, bool, type(None)}
_SETTINGS = {float, int, bool, str}
#: Attributes that no step's forward reads. HF sets the last three: at its first capture of hidden
#: states, in a generate over a static cache, and where positions of several axes are made. Steps
#: are given these positions.
_NOT_READ = frozenset(nn.Module().__dict__) | {
    "_output_capturing_hooks_installed",
    "_previous_max_cache_length",
    "rope_deltas",
}
#: Modules whose only numbers are sizes.
_WITHOUT_NUMBERS = frozenset(
    {nn.Linear, nn.Identity, nn.ModuleList, nn.ModuleDict, nn.ParameterDict}
)
#: PEFT puts several of these modules into each linear. Most of them are empty.
_PEFT_CONTAINERS = frozenset({nn.Identity, nn.ModuleDict, nn.ParameterDict})


@dataclass(frozen=True)
class ModelFingerprint:
    """The result of one walk over a model.

    Attributes:
        facts: Everything of the model that swapped forwards, and CUDA graphs captured over them,
            depend on. It is equal for models that run the same kernels on the same memory. Of every
            module: identity, class, mode, foreign hooks, own forward and numbers. Of every tensor:
            address, dtype, shape and strides. Of PEFT: active and merged adapters, switches and
            scalings. Also which swapped modules have retired, and which configs there are.
        graph_facts: The facts, and everything else that is constant in a CUDA graph. These are
            numbers of configs, versions of buffers, and the switches that choose kernels during a
            capture.
        obstacle: Why the stock method must run, or None.
        misplaced: Why the stock method must run if the model was not traced, or None. Its layers
            are not numbered in their order.
        no_graph: Why the step must be called and not replayed, or None.
        rope: RoPE for which the model's own forward must be called, if there is any.
    """

    facts: tuple[Any, ...] = field(compare=False)  # part of graph_facts
    graph_facts: tuple[Any, ...]
    obstacle: str | None
    no_graph: str | None
    rope: LengthRope | None
    misplaced: str | None = None


def take_fingerprint(model: nn.Module) -> ModelFingerprint:
    """Take the fingerprint of a model, in one walk over its modules, parameters and buffers."""
    # without this, reading an attribute of a tensor of torchao's calls Python
    with torch._C.DisableTorchFunctionSubclass():
        return _walk(model)


def _walk(model: nn.Module) -> ModelFingerprint:
    modules = _modules_of(model)
    states = [module.__dict__ for module in modules]
    kinds = [type(module) for module in modules]
    training = [state["training"] for state in states]
    hooked = [n for n, s in enumerate(states) if s["_forward_hooks"] or s["_forward_pre_hooks"]]
    with_numbers = [
        (kind, state)
        for kind, state in zip(kinds, states, strict=True)
        if kind not in _WITHOUT_NUMBERS
    ]
    parameters = [
        p for s in states if s["_parameters"] for p in s["_parameters"].values() if p is not None
    ]
    buffers = [
        b
        for s in states
        if s["_buffers"]
        for name, b in s["_buffers"].items()
        if b is not None and not _is_longrope_frequencies(name, s)
    ]
    # Modules share configs, and to read an attribute of one calls Python.
    shared = {id(config): config for config in (state.get("config") for _, state in with_numbers)}
    # Dictionaries of configs are kept if kernels' numbers were read from them. The id of a deleted
    # config may be used again.
    configs = {
        id(values): values
        for config in shared.values()
        if (values := getattr(config, "__dict__", None)) is not None  # None has none
    }
    facts = (
        tuple(map(id, modules)),
        tuple(kinds),
        tuple((kind, stock_forward(kind)) for kind in dict.fromkeys(kinds)),
        tuple(training),
        tuple((n, hook) for n in hooked if (hook := foreign_hook(modules[n]))),
        tuple([(n, _special(state)) for n, state in enumerate(states) if _is_special(state)]),
        *_tensor_facts(parameters, buffers),
        tuple([_numbers_of(kind, state) for kind, state in with_numbers]),
        tuple(configs),
    )
    devices = {p.device for p in parameters}
    device = next(iter(devices), torch.device("cpu"))
    settings = [v for config in configs.values() for v in config.values() if type(v) in _SETTINGS]
    versions = [None if b.is_inference() else b._version for b in buffers]
    graph_facts = (facts, device, tuple(settings), tuple(versions), *_global_switches())
    unusual_kinds = {type(p) for p in parameters} - _PLAIN
    unusual = next((kind.__name__ for kind in unusual_kinds if not holds_codes(kind)), None)
    obstacle = model_obstacle(
        kinds, states, training, [modules[n] for n in hooked], unusual, devices
    )
    return ModelFingerprint(
        facts,
        graph_facts,
        obstacle or global_obstacle(device),
        why_no_graph(),
        length_rope(getattr(model, "config", None)),
        layers_out_of_place(with_numbers),
    )


def is_expected_to_hold(fingerprint: ModelFingerprint, model: nn.Module) -> bool:
    """Return whether a fingerprint probably still holds, without a walk.

    There must be no obstacle, and graphs must be allowed.
    """
    if fingerprint.obstacle or fingerprint.misplaced or fingerprint.no_graph or fingerprint.rope:
        return False
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    rope = length_rope(getattr(model, "config", None))
    return why_no_graph() is None and rope is None and global_obstacle(device) is None


def _modules_of(model: nn.Module) -> list[nn.Module]:
    """Return all modules of a model, except holders that hold nothing."""
    modules = [model]
    for module in modules:  # the list grows during the walk
        if children := module.__dict__["_modules"]:
            modules += [
                child
                for child in children.values()
                if child is not None
                and not (type(child) in _PEFT_CONTAINERS and _is_empty_container(child.__dict__))
            ]
    return modules


def _is_empty_container(state: dict[str, Any]) -> bool:
    """Return whether a container is empty and has no hooks, so that it computes nothing."""
    return not (
        state["_modules"]
        or state["_parameters"]
        or state["_buffers"]
        or state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or "forward" in state
    )


def _tensor_facts(parameters: list[Tensor], buffers: list[Tensor]) -> tuple[Any, ...]:
    """Return addresses and dtypes of tensors, and shapes and strides of parameters."""
    tensors = list(chain(parameters, buffers))
    return (
        tuple([t.data_ptr() if type(t) in _PLAIN else memory_of(t) for t in tensors]),
        tuple([t.dtype for t in tensors]),
        tuple([p.shape for p in parameters]),
        tuple([(n, p.stride()) for n, p in enumerate(parameters) if not p.is_contiguous()]),
    )


#: What reads the numbers of a module's state, by its class and the names of its attributes.
_readers: dict[tuple[Any, ...], Callable[[dict[str, Any]], Any] | None] = {}


def _numbers_of(kind: type, state: dict[str, Any]) -> Any:
    """Return the numbers among a module's own attributes, and which of them are None.

    To read all attributes of each module would take as long as the rest of the walk. So only the
    first module of a class with attributes of these names is searched for numbers. An attribute
    that is no number there is not read in other modules. Each set of names has a reader of its own,
    so one module is always read alike.
    """
    key = kind, *state
    if key not in _readers:
        names = [n for n, v in state.items() if type(v) in _NUMBERS and n not in _NOT_READ]
        _readers[key] = itemgetter(*names, "training") if names else None
    read = _readers[key]
    values = read(state) if read is not None else None
    if values is None or _NUMBERS.issuperset(map(type, values)):
        return values
    return tuple([v if type(v) in _NUMBERS else id(v) for v in values])


def _is_special(state: dict[str, Any]) -> bool:
    return (
        "forward" in state
        or "merged_adapters" in state
        or "_active_adapter" in state
        or BINDING_KEY in state
        or "meta" in state
        or "quant_storage" in state
    )


def _special(state: dict[str, Any]) -> tuple[Any, ...]:
    """Return facts that few modules have: an own forward, a tuner's attributes, our kernels.

    Linears of some containers hold tensors that are neither parameters nor buffers.
    A forward itself is kept and not its id, because the id of a deleted one may be used again.
    """
    tuner: tuple[Any, ...] | None = None
    if "merged_adapters" in state or "_active_adapter" in state:
        tuner = tuple([_comparable(state[name]) for name in _TUNER if name in state])
    bound = state.get(BINDING_KEY)
    kernels = () if bound is None else (id(bound), bound.retired)
    return state.get("forward"), tuner, kernels, loose_facts(state)


def _comparable(value: Any) -> Any:
    """Return an attribute of a tuner layer in a form that compares quickly, tensors as numbers."""
    if type(value) in _SETTINGS:
        return value
    if type(value) is dict:
        return tuple([(name, _comparable_entry(entry)) for name, entry in value.items()])
    if type(value) is list and _SETTINGS.issuperset(map(type, value)):
        return tuple(value)
    return repr(value)


def _comparable_entry(entry: Any) -> Any:
    if isinstance(entry, Tensor):
        return scaling_of(entry)
    return entry if type(entry) in _SETTINGS else repr(entry)


def _is_longrope_frequencies(name: str, state: dict[str, Any]) -> bool:
    """Return whether every forward sets a buffer anew, so that its value does not matter.

    These are the frequencies of longrope: for short texts, or for long ones.
    """
    if not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
        return False
    rope_type = state.get("rope_type")
    if isinstance(rope_type, dict):
        rope_type = rope_type.get(name.removesuffix("inv_freq").rstrip("_"))
    return rope_type == "longrope"


def _global_switches() -> tuple[Any, ...]:
    """Return the switches that choose kernels during a capture."""
    cuda = torch.backends.cuda
    return (
        float32_products.precision(),
        cuda.flash_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cudnn_attention.is_allowed(),  # another thread may check kernels
        torch.are_deterministic_algorithms_enabled(),
    )
