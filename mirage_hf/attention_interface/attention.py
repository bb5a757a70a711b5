"""Attention as transformers calls it: by a kernel if one may run, else by SDPA or torch ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from mirage_hf.attention_interface.constants import NAME
from mirage_hf.attention_interface.kernels import KernelsBySizes
from mirage_hf.attention_interface.masks import (
    bounds_of,
    facts_of,
    is_capturing,
    is_fixed_prompt,
    make_mask,
    version_of,
)
from mirage_hf.attention_interface.report import AttentionReport
from mirage_hf.attention_interface.sizes import kernel_inputs, kernel_output, sizes_of
from mirage_hf.attention_interface.torch_attention import attention_in_torch
from mirage_hf.errors import InputError, Rejected
from mirage_hf.ops.dtypes import COMPUTE_DTYPES
from mirage_hf.pipeline import torch_op
from mirage_hf.swap.traced import LAYER_ARGUMENTS

#: Reasons why torch runs attention.
MANY = "more than one query token"
GROWING = "keys that grow at every step (DynamicCache), or a mask of your own"

#: Keyword arguments that add nothing to what the mask says.
HARMLESS = LAYER_ARGUMENTS | {"is_causal", "sliding_window"}

#: Keyword arguments that name the keys to attend to (DeepSeek-V3.2 and similar models). For `eager`
#: and `sdpa` the mask alone says it.
SELECTED = ("indices", "block_indices")

_dispatch_modes, _tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_functorch = torch._C._functorch.peek_interpreter_stack


class Attention:
    """The attention and mask functions of one name, with their kernels and counts.

    Args:
        backend: As in `optimize`. "cpu" runs kernels as torch code on the CPU.
    """

    def __init__(self, backend: str = "auto"):
        self.backend, self.device_type = backend, "cpu" if backend == "cpu" else "cuda"
        self.kernels = KernelsBySizes(backend)
        self._by_torch: Counter[str] = Counter()

    def register(self, name: str) -> None:
        """Make models run these functions for `attn_implementation=name`."""
        AttentionInterface.register(name, self.attend)
        AttentionMaskInterface.register(name, self.mask)

    def report(self) -> AttentionReport:
        """Return what ran so far."""
        rows, without = self.kernels.report()
        return AttentionReport(rows, dict(self._by_torch), without)

    def mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the mask of a call, as `make_mask` does."""
        return make_mask(*args, **kwargs)

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention. The arguments are those of transformers' attention functions.

        Args:
            module: The attention module.
            query: (batch, heads, queries, d).
            key: (batch, kv heads, keys, d).
            value: (batch, kv heads, keys, value d).
            attention_mask: As `mask` makes it.
            dropout: The probability of dropout.
            scaling: The factor of scores. None: 1 / sqrt(d).
            softcap: The cap on scores, which every path applies.
            s_aux: A sink per head, which every path applies.
            **kwargs: Further arguments of transformers.

        Returns:
            Attention (batch, queries, heads, value d), and None for the weights.

        Raises:
            InputError: Keys are selected by index.
        """
        if any(kwargs.get(name) is not None for name in SELECTED):
            raise InputError(
                f'attention "{NAME}": {type(module).__name__} selects keys by index, '
                'which is not supported; use attn_implementation="sdpa" or "eager"'
            )
        reason = self._obstacle(query, key, value, dropout, scaling, s_aux, kwargs)
        tracing = torch.compiler.is_compiling()
        if not reason and query.shape[2] == 1:
            run = self._traced if tracing else self._called
            y = run(query, key, value, attention_mask, scaling, softcap, s_aux)
            if isinstance(y, Tensor):
                return y, None
            reason = y
        elif not reason:
            reason = MANY
            if not tracing and is_fixed_prompt(module, query, key, attention_mask):
                # found now, because the prompt's steps may be compiled or captured
                self.kernels.find(sizes_of(query, key, value, scaling, softcap, s_aux), key, value)
        if not tracing:
            self._by_torch[reason] += 1
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                **kwargs,
            )
        return attention_in_torch(
            module, query, key, value, attention_mask, dropout, scaling, softcap, s_aux, **kwargs
        ), None

    def _obstacle(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout: float,
        scaling: Any,
        sinks: Tensor | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        """Return why no kernel may run, whatever the sizes; "" if one may."""
        given = (query, key, value) if sinks is None else (query, key, value, sinks)
        if query.device.type != self.device_type:
            return f"tensors on {query.device.type}"
        if dropout:
            return "dropout"
        if torch.is_grad_enabled() and any([x.requires_grad for x in given]):
            return "gradients"
        if any([is_traceable_wrapper_subclass(x) for x in given]):
            return "tensors of another class"
        if query.dtype not in COMPUTE_DTYPES or any(
            [x.dtype != query.dtype or x.device != query.device for x in given]
        ):
            return f"dtypes or devices that differ, or {query.dtype}"
        if torch.is_autocast_enabled(query.device.type):
            return "autocast"
        if scaling is not None and not isinstance(scaling, (int, float)):
            return "a scaling that is no number"
        for name, x in kwargs.items():
            if x is not None and x is not False and name not in HARMLESS:
                return f"the argument {name}"
        return ""

    def _called(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor | str:
        """Return the result of a kernel, or why none runs."""
        known = facts_of(mask)
        if mask is None or known is None or not known.fixed:
            return GROWING
        if (
            type(query) is not Tensor
            or _dispatch_modes()
            or _tracing() is not None
            or _functorch() is not None
        ):
            return "a dispatch mode, a trace, or a transform of torch.func"
        if known.version != version_of(mask) or known.captured != is_capturing(mask):
            return "a mask that was changed, or made outside of the CUDA graph"
        if mask.shape != (key.shape[0], 1, 1, key.shape[2]) or mask.device != query.device:
            return (
                f"a mask of {tuple(mask.shape)} on {mask.device} "
                f"for keys of {tuple(key.shape)} on {key.device}"
            )
        sizes = sizes_of(query, key, value, scaling, softcap, sinks)
        kernel = self.kernels.find(sizes, key, value)
        if isinstance(kernel, Rejected):
            return kernel.reason
        may_have_changed = known.version is None
        if known.bounds is None or may_have_changed or known.bounds[2].dtype != query.dtype:
            known.bounds = bounds_of(mask, query.dtype)  # once a step, for all layers
        lo, hi, bias = known.bounds
        self.kernels.calls[sizes] += 1
        inputs = kernel_inputs(query, key, value, lo, hi, bias, sinks)
        return kernel_output(kernel.run(inputs), query)

    def _traced(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor | str:
        """Return the result of a kernel inside a compiled graph, or why none runs.

        Only kernels that were found before run. Bounds are computed in the graph, and the compiler
        fuses those of all layers.
        """
        if (
            mask is None
            or mask.dtype is not torch.bool
            or mask.shape != (key.shape[0], 1, 1, key.shape[2])
        ):
            return GROWING
        if torch_op.exporting():
            return "torch.export"
        sizes = sizes_of(query, key, value, scaling, softcap, sinks)
        for known, digest in self.kernels.traceable:
            if known == sizes:  # compared, not looked up: dynamo makes guards of it
                lo, hi, bias = bounds_of(mask, query.dtype)
                inputs = kernel_inputs(query, key, value, lo, hi, bias, sinks)
                return kernel_output(torch_op.run(inputs, digest), query)
        return "no kernel was found before compiling"
