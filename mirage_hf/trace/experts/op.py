"""The experts of a mixture as one op, `mirage_hf::experts`.

While a step is recorded, transformers' "batched_mm" experts call the op in place of copying the
weights of the chosen experts. Run as it is, the op runs stock's function. Experts whose weights are
codes run `run_decoded` instead, because their library may have to fetch kernels.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, library, nn

from mirage_hf.errors import Rejected
from mirage_hf.trace.experts.decoded import run_decoded
from mirage_hf.trace.experts.form import OTHER_FORM, ExpertsForm, form_of

try:
    from transformers.integrations import moe
except ImportError:  # this version has no registry of experts
    moe = None
try:
    from transformers.integrations import finegrained_fp8
except ImportError:
    finegrained_fp8 = None

#: transformers' registry of experts, None in versions without one.
EXPERTS_FUNCTIONS: Any = getattr(moe, "ALL_EXPERTS_FUNCTIONS", None)
#: transformers' registry of experts in float8.
_FP8_FUNCTIONS: Any = getattr(finegrained_fp8, "ALL_FP8_EXPERTS_FUNCTIONS", None)
#: The registries that this version has.
REGISTRIES = tuple(x for x in (EXPERTS_FUNCTIONS, _FP8_FUNCTIONS) if x is not None)

#: The op's name as nodes have it.
EXPERTS = "mirage_hf.experts"

#: The name of the experts function of transformers that the op replaces.
_STOCK = "batched_mm"

#: The most tokens that kernels take. Of more tokens, many choose the same experts, so products of
#: all tokens of an expert read fewer bytes.
MOST_TOKENS = 16

library.define(
    "mirage_hf::experts",
    "(Tensor x, Tensor index, Tensor weights, Tensor[] parameters, int number) -> Tensor",
)

_recording = threading.local()
_lock = threading.Lock()
_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_forms: weakref.WeakValueDictionary[int, ExpertsForm] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _run(x: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor], number: int) -> Any:
    module = _modules.get(number)
    was_active, _recording.active = getattr(_recording, "active", False), False
    try:
        form = form_named(number, x.dtype)
        if isinstance(form, ExpertsForm) and (form.is_coded or module is None):
            return run_decoded(form, x, index, weights)
        assert module is not None, "the experts of a recorded step are gone"
        return EXPERTS_FUNCTIONS[_STOCK](module, x, index, weights)
    finally:
        _recording.active = was_active


library.impl("mirage_hf::experts", "CompositeExplicitAutograd", _run)


@library.register_fake("mirage_hf::experts")
def _fake(x: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor], number: int) -> Any:
    return torch.empty_like(x)


def number_of_form(form: ExpertsForm) -> int:
    """Return a number by which nodes name experts that no module has.

    The caller must keep the experts alive.
    """
    number = next(_numbers)
    _forms[number] = form
    return number


def form_named(number: int, dtype: torch.dtype) -> ExpertsForm | Rejected:
    """Return the experts that a node names."""
    if number in _forms:
        return _forms[number]
    module = _modules.get(number)
    return OTHER_FORM if module is None else form_of(module, dtype)


def _one_node(stock: Any) -> Any:
    def experts(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Any:
        """Call the op while this thread records a step, else what was registered before."""
        node = as_node(module, x, index, weights)
        return stock(module, x, index, weights) if node is None else node

    return experts


def as_node(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Any:
    """Call the op if this thread records a step, and the experts have a known form. Else None."""
    if not getattr(_recording, "active", False) or x.dim() != 2:
        return None
    form = form_of(module, x.dtype)
    if isinstance(form, Rejected):
        return None
    number = _recording.numbers.setdefault(id(module), next(_numbers))
    _modules[number] = module
    return torch.ops.mirage_hf.experts(x, index, weights, form.parameters, number)


@contextmanager
def experts_as_one_node() -> Iterator[None]:
    """Let this thread's calls of "batched_mm" experts be one op each."""
    with _lock, ExitStack() as undos:  # one at a time, or functions would be put back in disorder
        for registry in REGISTRIES:
            own = registry._local_mapping
            if _STOCK in own:
                undos.callback(own.__setitem__, _STOCK, own[_STOCK])
            else:
                undos.callback(own.pop, _STOCK)
            own[_STOCK] = _one_node(registry[_STOCK])
        _recording.active, _recording.numbers = True, {}
        try:
            yield
        finally:
            _recording.active, _recording.numbers = False, {}
