"""`attn_implementation="mirage"`: attention as transformers' models ask for it by name, decoding steps over a static cache by kernels.

Kernels are found for the sizes and strides of the keys, so they serve caches whose tensors stay as they are (StaticCache). Everything else
runs as `sdpa` does, or spelled out where SDPA would drop an argument, and is counted with its reason.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from mirage_hf.errors import InputError, MirageError, Rejected, described
from mirage_hf.graph import symbolic
from mirage_hf.ops.table import COMPUTE_DTYPES
from mirage_hf.patterns.attention import LONG_FROM, LONG_SLOTS, REFERENCE_SLOTS
from mirage_hf.patterns.masked_attention import MASKED_ATTENTION, shut
from mirage_hf.pipeline import resize, resolver, torch_op
from mirage_hf.pipeline.torch_op import Run
from mirage_hf.swap.traced import LAYER_ARGUMENTS
from mirage_hf.zoo.key import key_of, target_of

NAME = "mirage"

MANY = "more than one query token"
GROWING = "keys that grow at every step (DynamicCache), or a mask of your own"
HARMLESS = LAYER_ARGUMENTS | {"is_causal", "sliding_window"}
"""Keyword arguments that say nothing which the mask does not say."""

SELECTED = ("indices", "block_indices")
"""Keyword arguments that name the keys to attend to (DeepSeek-V3.2 and its like); to `eager` and `sdpa` alone the mask tells them."""

MOST_TRACED = 4
"""Lengths of the cache, of a model's heads and batch size, whose kernels compiled graphs may hold. Each makes a graph of its own, and
torch.compile gives a function up after 8; other lengths share a graph with SDPA."""

_log = logging.getLogger("mirage_hf")
_dispatch_modes, _tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_functorch = torch._C._functorch.peek_interpreter_stack


@dataclass(frozen=True)
class KernelRow:
    """A kernel of attention: what it is for, where it came from, µs per call where they were measured, over as many keys as it was tuned
    for, and calls of it so far: by models as they are, and by compiled graphs, whose replays from CUDA graphs are not counted."""

    title: str
    source: str
    time_us: float | None
    library_us: float | None
    timed_at: int
    calls: int
    calls_compiled: int
    traceable: bool
    """Whether compiled graphs may hold it (see MOST_TRACED)."""


@dataclass(frozen=True)
class AttentionReport:
    """What ran attention in this process, where models asked for it by name. What torch runs in compiled graphs is not counted."""

    kernels: tuple[KernelRow, ...]
    by_torch: Mapping[str, int]
    """Calls that torch ran, by reason."""
    without: Mapping[str, str]
    """Sizes that have no kernel, with the reason."""

    def __str__(self) -> str:
        lines = [
            f'mirage_hf: attention "{NAME}", {sum(k.calls + k.calls_compiled for k in self.kernels)} calls by kernels, '
            f"{sum(self.by_torch.values())} by torch"
        ]
        for k in self.kernels:
            library = "" if k.library_us is None else f" ({k.library_us:.1f})"
            time = (
                "" if k.time_us is None else f", {k.time_us:.1f} µs{library} over {k.timed_at} keys"
            )
            compiled = (
                f" and {k.calls_compiled} by compiled graphs, not counting replays"
                if k.calls_compiled
                else ""
            )
            rest = (
                ""
                if k.traceable
                else f", not in compiled graphs, which hold {MOST_TRACED} others like it"
            )
            lines.append(f"kernel for {k.title}: {k.calls}{compiled} ({k.source}{time}){rest}")
        lines += [f"by torch: {reason}: {n}" for reason, n in sorted(self.by_torch.items())]
        return "\n".join(
            [
                *lines,
                *(f"no kernel for {title}: {reason}" for title, reason in self.without.items()),
            ]
        )


@dataclass(frozen=True)
class _Kernel:
    run: Run
    digest: str
    device: torch.device
    found: Any
    timed_at: int


@dataclass
class _Mask:
    """What a mask's maker knew of it: whether it is over keys of a fixed number. `bounds` are (lo, hi, bias), made when the first layer
    asks. They hold while the mask's version does, outside or inside of captures of CUDA graphs, as the mask was made."""

    fixed: bool
    version: int | None
    captured: bool
    bounds: tuple[Tensor, Tensor, Tensor] | None = None


class Attention:
    """The functions of one name, and what they know and count. backend: as in `optimize`; "cpu" runs kernels as torch code on the CPU."""

    def __init__(self, backend: str = "auto"):
        self.backend, self.device_type = backend, "cpu" if backend == "cpu" else "cuda"
        self._kernels: dict[Any, _Kernel | Rejected] = {}
        self._titles: dict[Any, str] = {}
        self._traceable: list[tuple[Any, str]] = []
        self._calls: Counter[Any] = Counter()
        self._calls_compiled: Counter[tuple[str, torch.device]] = Counter()
        self._by_torch: Counter[str] = Counter()
        self._lock = threading.RLock()

    def register(self, name: str) -> None:
        """Make models run these functions for `attn_implementation=name`."""
        AttentionInterface.register(name, self.attend)
        AttentionMaskInterface.register(name, self.mask)

    def report(self) -> AttentionReport:
        known = dict(self._kernels)  # other threads may be finding more
        traceable = [sizes for sizes, _ in self._traceable]
        rows = tuple(
            KernelRow(
                self._titles[key],
                k.found.source,
                k.found.time_us,
                k.found.library_us,
                k.timed_at,
                self._calls[key],
                self._calls_compiled[k.digest, k.device],
                key in traceable,
            )
            for key, k in known.items()
            if isinstance(k, _Kernel)
        )
        return AttentionReport(
            rows,
            dict(self._by_torch),
            {self._titles[key]: k.reason for key, k in known.items() if isinstance(k, Rejected)},
        )

    # -- masks ----------------------------------------------------------------------------------------------------------

    def mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """SDPA's boolean mask (batch, 1, queries, keys), or None. It remembers whether the keys are of a fixed number. For a model
        that knows no attention by name, whose own code may add the mask to scores, that of `eager`."""
        if not _takes_names(type(kwargs.get("config"))):
            return eager_mask(*args, **kwargs)
        made = sdpa_mask(*args, **kwargs)
        if made is None or torch.compiler.is_compiling():
            return made
        queries, keys = made.shape[-2:]
        start, offset = kwargs.get("q_offset", 0), kwargs.get("kv_offset", 0)
        # static layers count on the device, or have more keys than tokens; those of any sliding layer are as many as its window once it
        # has been left behind. At the one step that fills a layer this cannot be told from keys that grow
        fixed = isinstance(start, Tensor) or offset > 0 or offset + keys != start + queries
        fixed = (
            fixed and "allow_is_bidirectional_skip" not in kwargs
        )  # keys of an encoder are as many as its tokens
        made._mirage = _Mask(fixed, _version(made), _capturing(made))  # type: ignore[attr-defined]
        return made

    # -- attention ------------------------------------------------------------------------------------------------------

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
        """Return attention (batch, queries, heads, d), and no weights. query (batch, heads, queries, d), key and value (batch, kv heads,
        keys, d); softcap and s_aux (a sink per head) are served whatever runs it. Errors: InputError for keys selected by index."""
        if any(kwargs.get(name) is not None for name in SELECTED):
            raise InputError(
                f'attention "{NAME}": {type(module).__name__} selects keys by index, which is not supported; use '
                'attn_implementation="sdpa" or "eager"'
            )
        reason = self._obstacle(query, key, value, dropout, scaling, s_aux, kwargs)
        tracing = torch.compiler.is_compiling()
        if not reason and query.shape[2] == 1:
            y = (self._traced if tracing else self._called)(
                query, key, value, attention_mask, scaling, softcap, s_aux
            )
            if isinstance(y, Tensor):
                return y, None
            reason = y
        elif not reason:
            reason = MANY
            if not tracing and _fixed_prompt(
                module, query, key, attention_mask
            ):  # its steps may be compiled or captured
                self._kernel_for(_sizes(query, key, value, scaling, softcap, s_aux), key, value)
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
        return spelled_out(
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
        """Why no kernel may run, whatever the sizes; "" where one may."""
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
        """What a kernel gives, or why none runs."""
        known = getattr(mask, "_mirage", None)
        if mask is None or known is None or not known.fixed:
            return GROWING
        if (
            type(query) is not Tensor
            or _dispatch_modes()
            or _tracing() is not None
            or _functorch() is not None
        ):
            return "a dispatch mode, a trace, or a transform of torch.func"
        if known.version != _version(mask) or known.captured != _capturing(mask):
            return "a mask that was changed, or made outside of the CUDA graph"
        if mask.shape != (key.shape[0], 1, 1, key.shape[2]) or mask.device != query.device:
            return f"a mask of {tuple(mask.shape)} on {mask.device} for keys of {tuple(key.shape)} on {key.device}"
        sizes = _sizes(query, key, value, scaling, softcap, sinks)
        kernel = self._kernel_for(sizes, key, value)
        if isinstance(kernel, Rejected):
            return kernel.reason
        if (
            known.bounds is None or known.version is None or known.bounds[2].dtype != query.dtype
        ):  # no version: it may have changed
            known.bounds = bounds_of(mask, query.dtype)  # once a step, for all layers
        lo, hi, bias = known.bounds
        self._calls[sizes] += 1
        return _outputs(kernel.run(_inputs(query, key, value, lo, hi, bias, sinks)), query)

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
        """The same inside a graph, by kernels that were found before. Bounds are computed in it; the compiler fuses those of all layers."""
        if (
            mask is None
            or mask.dtype is not torch.bool
            or mask.shape != (key.shape[0], 1, 1, key.shape[2])
        ):
            return GROWING
        if torch_op.exporting():
            return "torch.export"
        sizes = _sizes(query, key, value, scaling, softcap, sinks)
        for known, digest in self._traceable:  # compared, not looked up: dynamo makes guards of it
            if known == sizes:
                lo, hi, bias = bounds_of(mask, query.dtype)
                return _outputs(
                    torch_op.run(_inputs(query, key, value, lo, hi, bias, sinks), digest), query
                )
        return "no kernel was found before compiling"

    # -- kernels --------------------------------------------------------------------------------------------------------

    def _kernel_for(self, sizes: Any, key: Tensor, value: Tensor) -> _Kernel | Rejected:
        found = self._kernels.get(sizes)
        if found is not None:
            return found
        if _capturing(key):
            return Rejected("no kernel was found before the CUDA graph was captured")
        with self._lock:
            if sizes not in self._kernels:
                block, rows, slots = _block(_Sizes(*sizes)), key.shape[0], key.shape[2]
                self._titles[sizes] = _title(block, rows, slots)
                made = self._make(
                    block,
                    rows,
                    slots,
                    (key.stride(), value.stride()),
                    key.device,
                    self._titles[sizes],
                )
                alike = [
                    known
                    for known, _ in self._traceable
                    if _Sizes(*known).but_length == _Sizes(*sizes).but_length
                ]
                if isinstance(made, _Kernel) and len(alike) < MOST_TRACED:
                    self._traceable = [*self._traceable, (sizes, made.digest)]
                self._kernels[sizes] = made
            return self._kernels[sizes]

    def _make(
        self, block: Any, rows: int, slots: int, strides: Any, device: torch.device, title: str
    ) -> _Kernel | Rejected:
        """Look the kernel up, or search and tune it, at one of two numbers of slots; and cut it to these."""
        told: list[str] = []

        def tell(*_: Any) -> None:
            if not told:
                told.append(title)
                _log.warning(
                    "attention: searching and tuning a kernel for %s; it is kept in the user's cache",
                    title,
                )

        reference = LONG_SLOTS if slots >= LONG_FROM else REFERENCE_SLOTS
        program = block.program(rows, slots=slots, strides=strides)
        try:
            with torch.inference_mode(False), torch.no_grad():
                found = resolver.resolve(
                    block.program(rows, slots=reference),
                    device=device,
                    backend=self.backend,
                    pattern=MASKED_ATTENTION.name,
                    progress=tell,
                    like=block.program(rows, slots=REFERENCE_SLOTS)
                    if reference != REFERENCE_SLOTS
                    else None,
                )
                if not found.is_fused:
                    return Rejected(found.reason)
                run = resize.at_size(found, program, device)
        except (MirageError, torch.OutOfMemoryError) as e:
            return Rejected(f"no kernel: {e if isinstance(e, MirageError) else described(e)}")
        digest = key_of(program, target_of(device)).digest

        def compiled(inputs: Sequence[Tensor]) -> list[Tensor]:
            self._calls_compiled[digest, inputs[0].device] += (
                1  # one digest serves all devices of a type
            )
            return run(inputs)

        torch_op.register(
            digest, symbolic.for_program(found.ugraph, program), compiled, device.type
        )
        return _Kernel(run, digest, device, found, reference)


def spelled_out(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attention in torch ops, with what SDPA has no argument for: a cap on scores, a sink per head. Errors: InputError for a position bias
    or a paged cache beside them."""
    if lost := next(
        (name for name in ("position_bias", "cache") if kwargs.get(name) is not None), None
    ):
        raise InputError(
            f'attention "{NAME}": {lost} together with softcap or sinks is not supported; use attn_implementation="eager"'
        )
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * (
        query.shape[-1] ** -0.5 if scaling is None else scaling
    )
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if (
        mask is None
        and query.shape[2] > 1
        and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    ):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
            if mask.dtype is torch.bool
            else scores + mask
        )
    if sinks is not None:
        scores = torch.cat(
            (scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)), -1
        )
    weights = F.softmax(scores, -1, dtype=torch.float32).to(value.dtype)[..., : key.shape[2]]
    return (
        torch.matmul(F.dropout(weights, dropout, module.training), value)
        .transpose(1, 2)
        .contiguous()
    )


def bounds_of(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """From a boolean mask (rows, 1, 1, keys): the first key that is let through and the one after the last, int32 (rows, 1, 1, 1), and the
    bias of every key. Nothing is read by the host."""
    keys = mask.shape[-1]
    at = torch.arange(keys, dtype=torch.int32, device=mask.device)
    lo = torch.where(mask, at, keys).amin(-1, keepdim=True)
    hi = torch.where(mask, at + 1, 0).amax(-1, keepdim=True)
    return (
        lo,
        hi,
        torch.full(mask.shape, shut(dtype), dtype=dtype, device=mask.device).masked_fill_(
            mask, 0.0
        ),
    )


class _Sizes(NamedTuple):
    """What a kernel is made for."""

    query: tuple[int, int, int]
    """Rows, heads, their dim."""
    key: tuple[int, ...]
    value: tuple[int, ...]
    key_strides: tuple[int, ...]
    value_strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    scaling: float
    softcap: float | None
    sinks: bool

    @property
    def but_length(self) -> tuple[Any, ...]:
        """What does not depend on the length of the cache."""
        return self.query, self.dtype, self.device, self.scaling, self.softcap, self.sinks


def _sizes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Any, ...]:
    """The fields of `_Sizes`, as a plain tuple: dynamo traces it."""
    rows, heads, _, d = query.shape
    return (
        (rows, heads, d),
        tuple(key.shape),
        tuple(value.shape),
        key.stride(),
        value.stride(),
        query.dtype,
        query.device,
        d**-0.5 if scaling is None else float(scaling),
        softcap,
        sinks is not None,
    )


def _block(sizes: _Sizes) -> Any:
    _, heads, d = sizes.query
    kv_heads = sizes.key[1]
    return MASKED_ATTENTION.block(
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=d,
        value_dim=sizes.value[-1],
        dtype=sizes.dtype,
        sinks=sizes.sinks,
        scale=sizes.scaling,
        softcap=sizes.softcap,
    )


def _title(block: Any, rows: int, slots: int) -> str:
    size = dict(block.sizes)
    more = ("" if size["softcap"] is None else ", softcap") + (", sinks" if size["sinks"] else "")
    return (
        f"{rows} x {size['kv_heads'] * size['group']} heads of {size['head_dim']} ({size['kv_heads']} of keys), {slots} keys, "
        f"{str(size['dtype']).removeprefix('torch.')}{more}"
    )


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lo: Tensor,
    hi: Tensor,
    bias: Tensor,
    sinks: Tensor | None,
) -> list[Tensor]:
    rows, heads, _, d = query.shape
    kv_heads = key.shape[1]
    inputs = [
        query.reshape(rows, kv_heads, heads // kv_heads, d).contiguous(),
        key,
        value,
        lo,
        hi,
        bias,
    ]
    return (
        inputs
        if sinks is None
        else [*inputs, sinks.reshape(1, kv_heads, heads // kv_heads, 1).contiguous()]
    )


def _outputs(outputs: list[Tensor], query: Tensor) -> Tensor:
    return outputs[0].reshape(query.shape[0], 1, query.shape[1], -1)


def _fixed_prompt(module: torch.nn.Module, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether this is a prompt over keys of a fixed number, more than its own; without a mask it is the first of its cache."""
    if key.shape[2] <= query.shape[2]:
        return False
    known = getattr(mask, "_mirage", None)
    return (
        bool(getattr(module, "is_causal", True))
        if mask is None
        else known is not None and known.fixed
    )


@torch.compiler.assume_constant_result
def _takes_names(config: type) -> bool:
    """Whether the models of a class of configs run attention that is asked for by name, as far as transformers knows them."""
    return _takes_names_once(config)


@cache
def _takes_names_once(config: type) -> bool:
    from transformers.models.auto.modeling_auto import (
        MODEL_MAPPING,
    )  # 0.2 s, which not everybody needs

    models = MODEL_MAPPING.get(config, ())
    for model in models if isinstance(models, tuple) else (models,):
        if not (
            getattr(model, "_supports_sdpa", True)
            or getattr(model, "_supports_attention_backend", True)
        ):
            _log.warning(
                'attention "%s": %s may run attention of its own whatever the name; it gets masks as "eager" does and no kernels',
                NAME,
                model.__name__,
            )
            return False
    return True


def _version(mask: Tensor) -> int | None:
    return None if mask.is_inference() else mask._version


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


_attention = Attention()
_attention.register(NAME)


def attention_report() -> AttentionReport:
    """Return what ran the attention of models with `attn_implementation="mirage"` in this process so far."""
    return _attention.report()
