"""`attn_implementation="mirage"`: attention that transformers' models ask for by name.

Decoding steps over a static cache run searched kernels. Kernels are found for the sizes and strides
of the keys, so they serve caches whose tensors stay as they are (StaticCache). Everything else runs
in SDPA, or in torch ops if SDPA would drop an argument, and is counted with its reason.
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
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from mirage_hf.errors import InputError, MirageError, Rejected, described
from mirage_hf.graph import symbolic
from mirage_hf.ops.table import COMPUTE_DTYPES
from mirage_hf.patterns.attention import LONG_FROM, LONG_SLOTS, REFERENCE_SLOTS
from mirage_hf.patterns.masked_attention import MASKED_ATTENTION, masked_bias
from mirage_hf.pipeline import resize, resolver, torch_op
from mirage_hf.pipeline.torch_op import Run
from mirage_hf.swap.traced import LAYER_ARGUMENTS
from mirage_hf.zoo.key import key_of, target_of

NAME = "mirage"

#: Reasons why torch runs attention.
MANY = "more than one query token"
GROWING = "keys that grow at every step (DynamicCache), or a mask of your own"

#: Keyword arguments that add nothing to what the mask says.
HARMLESS = LAYER_ARGUMENTS | {"is_causal", "sliding_window"}

#: Keyword arguments that name the keys to attend to (DeepSeek-V3.2 and similar models). For `eager`
#: and `sdpa` the mask alone says it.
SELECTED = ("indices", "block_indices")

#: Lengths of the cache whose kernels compiled graphs may hold, for each batch size of a model's
#: heads. Each makes a graph of its own, and torch.compile gives up on a function after 8. Other
#: lengths share a graph with SDPA.
MOST_TRACED = 4

_log = logging.getLogger("mirage_hf")
_dispatch_modes, _tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_functorch = torch._C._functorch.peek_interpreter_stack


@dataclass(frozen=True)
class KernelRow:
    """One attention kernel in the report.

    Attributes:
        title: The sizes that it is for.
        source: Where it came from.
        time_us: Microseconds a call, over `timed_at` keys. None if it was not measured.
        library_us: The same for the library path.
        timed_at: The number of keys that it was tuned for.
        calls: Calls so far by models that are not compiled.
        calls_compiled: Calls so far by compiled graphs. Replays from CUDA graphs are not counted.
        traceable: True if compiled graphs may hold it, see `MOST_TRACED`.
    """

    title: str
    source: str
    time_us: float | None
    library_us: float | None
    timed_at: int
    calls: int
    calls_compiled: int
    traceable: bool

    def __str__(self) -> str:
        time = ""
        if self.time_us is not None:
            library = "" if self.library_us is None else f" ({self.library_us:.1f})"
            time = f", {self.time_us:.1f} µs{library} over {self.timed_at} keys"
        calls = str(self.calls)
        if self.calls_compiled:
            calls += f" and {self.calls_compiled} by compiled graphs, not counting replays"
        note = ""
        if not self.traceable:
            note = f", not in compiled graphs, which hold {MOST_TRACED} others like it"
        return f"kernel for {self.title}: {calls} ({self.source}{time}){note}"


@dataclass(frozen=True)
class AttentionReport:
    """What ran attention in this process for models that asked for it by name.

    What torch runs in compiled graphs is not counted.

    Attributes:
        kernels: The kernels found so far.
        by_torch: Calls that torch ran, by reason.
        without: Why there is no kernel, by sizes.
    """

    kernels: tuple[KernelRow, ...]
    by_torch: Mapping[str, int]
    without: Mapping[str, str]

    def __str__(self) -> str:
        by_kernels = sum(k.calls + k.calls_compiled for k in self.kernels)
        by_torch = sum(self.by_torch.values())
        return "\n".join(
            [
                f'mirage_hf: attention "{NAME}", {by_kernels} calls by kernels, '
                f"{by_torch} by torch",
                *map(str, self.kernels),
                *(f"by torch: {reason}: {n}" for reason, n in sorted(self.by_torch.items())),
                *(f"no kernel for {title}: {reason}" for title, reason in self.without.items()),
            ]
        )


@dataclass(frozen=True)
class _Kernel:
    """A kernel for one size of the cache, ready to run."""

    run: Run
    digest: str
    device: torch.device
    resolved: resolver.Resolved
    timed_at: int


@dataclass
class _Mask:
    """What is known of a mask when it is made.

    Attributes:
        fixed: True if it is over keys of a fixed number.
        version: The mask's version. `bounds` hold while it stays the same.
        captured: True if it was made while a CUDA graph was captured. `bounds` hold only inside of
            captures, or only outside of them.
        bounds: (lo, hi, bias), made when the first layer asks.
    """

    fixed: bool
    version: int | None
    captured: bool
    bounds: tuple[Tensor, Tensor, Tensor] | None = None


class Attention:
    """The attention and mask functions of one name, with their kernels and counts.

    Args:
        backend: As in `optimize`. "cpu" runs kernels as torch code on the CPU.
    """

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
        """Return what ran so far."""
        known = dict(self._kernels)  # other threads may be finding more
        traceable = [sizes for sizes, _ in self._traceable]
        rows = tuple(
            KernelRow(
                title=self._titles[key],
                source=k.resolved.source,
                time_us=k.resolved.time_us,
                library_us=k.resolved.library_us,
                timed_at=k.timed_at,
                calls=self._calls[key],
                calls_compiled=self._calls_compiled[k.digest, k.device],
                traceable=key in traceable,
            )
            for key, k in known.items()
            if isinstance(k, _Kernel)
        )
        return AttentionReport(
            rows,
            dict(self._by_torch),
            {self._titles[key]: k.reason for key, k in known.items() if isinstance(k, Rejected)},
        )

    # -- masks ---------------------------------------------------------------------------------

    def mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return SDPA's boolean mask (batch, 1, queries, keys), or None.

        The mask remembers whether the number of keys is fixed. A model that knows no attention by
        name, whose own code may add the mask to scores, gets the mask of `eager`.
        """
        if not _takes_names(type(kwargs.get("config"))):
            return eager_mask(*args, **kwargs)
        made = sdpa_mask(*args, **kwargs)
        if made is None or torch.compiler.is_compiling():
            return made
        queries, keys = made.shape[-2:]
        start, offset = kwargs.get("q_offset", 0), kwargs.get("kv_offset", 0)
        # Static layers count on the device, or have more keys than tokens. A sliding layer has as
        # many keys as its window once the text is longer than the window. At the one step that
        # fills a layer this looks like keys that grow.
        fixed = isinstance(start, Tensor) or offset > 0 or offset + keys != start + queries
        fixed = (
            fixed and "allow_is_bidirectional_skip" not in kwargs
        )  # keys of an encoder are as many as its tokens
        made._mirage = _Mask(fixed, _version(made), _capturing(made))  # type: ignore[attr-defined]
        return made

    # -- attention -----------------------------------------------------------------------------

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
            return (
                f"a mask of {tuple(mask.shape)} on {mask.device} "
                f"for keys of {tuple(key.shape)} on {key.device}"
            )
        sizes = _sizes(query, key, value, scaling, softcap, sinks)
        kernel = self._kernel_for(sizes, key, value)
        if isinstance(kernel, Rejected):
            return kernel.reason
        may_have_changed = known.version is None
        if known.bounds is None or may_have_changed or known.bounds[2].dtype != query.dtype:
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
        """Return the same inside a compiled graph, by kernels that were found before.

        Bounds are computed in the graph. The compiler fuses those of all layers.
        """
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

    # -- kernels -------------------------------------------------------------------------------

    def _kernel_for(self, sizes: Any, key: Tensor, value: Tensor) -> _Kernel | Rejected:
        """Return the kernel for these sizes, or why there is none. It is made at the first call."""
        known = self._kernels.get(sizes)
        if known is not None:
            return known
        if _capturing(key):
            return Rejected("no kernel was found before the CUDA graph was captured")
        with self._lock:
            if sizes not in self._kernels:
                self._kernels[sizes] = self._make_and_list(sizes, key, value)
            return self._kernels[sizes]

    def _make_and_list(self, sizes: Any, key: Tensor, value: Tensor) -> _Kernel | Rejected:
        """Make the kernel for these sizes, and let compiled graphs hold it if there is room."""
        block, rows, slots = _block(_Sizes(*sizes)), key.shape[0], key.shape[2]
        title = _title(block, rows, slots)
        self._titles[sizes] = title
        strides = key.stride(), value.stride()
        kernel = self._make(block, rows, slots, strides, key.device, title)
        other_lengths = [
            known
            for known, _ in self._traceable
            if _Sizes(*known).but_length == _Sizes(*sizes).but_length
        ]
        if isinstance(kernel, _Kernel) and len(other_lengths) < MOST_TRACED:
            self._traceable = [*self._traceable, (sizes, kernel.digest)]
        return kernel

    def _make(
        self, block: Any, rows: int, slots: int, strides: Any, device: torch.device, title: str
    ) -> _Kernel | Rejected:
        """Look the kernel up, or search and tune it, and cut it to the sizes asked for.

        It is tuned at one of two reference numbers of slots.
        """
        reference = LONG_SLOTS if slots >= LONG_FROM else REFERENCE_SLOTS
        program = block.program(rows, slots=slots, strides=strides)
        smaller = block.program(rows, slots=REFERENCE_SLOTS)
        try:
            with torch.inference_mode(False), torch.no_grad():
                resolved = resolver.resolve(
                    block.program(rows, slots=reference),
                    device=device,
                    backend=self.backend,
                    pattern=MASKED_ATTENTION.name,
                    progress=_Announcement(title),
                    like=smaller if reference != REFERENCE_SLOTS else None,
                )
                if not resolved.is_fused:
                    return Rejected(resolved.reason)
                run = resize.at_size(resolved, program, device)
        except (MirageError, torch.OutOfMemoryError) as e:
            return Rejected(f"no kernel: {e if isinstance(e, MirageError) else described(e)}")
        digest = key_of(program, target_of(device)).digest

        def compiled(inputs: Sequence[Tensor]) -> list[Tensor]:
            # counted by device, because one digest serves all devices of a type
            self._calls_compiled[digest, inputs[0].device] += 1
            return run(inputs)

        ugraph = symbolic.for_program(resolved.ugraph, program)
        torch_op.register(digest, ugraph, compiled, device.type)
        return _Kernel(run, digest, device, resolved, reference)


class _Announcement:
    """Warns once that a kernel is searched for, when it is called as `progress`."""

    def __init__(self, title: str) -> None:
        self._title, self._made = title, False

    def __call__(self, *_: Any) -> None:
        if not self._made:
            self._made = True
            _log.warning(
                "attention: searching and tuning a kernel for %s; it is kept in the user's cache",
                self._title,
            )


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
    """Compute attention in torch ops, with a softcap and sinks, which SDPA has no arguments for.

    The arguments are those of `Attention.attend`.

    Raises:
        InputError: There is a position bias or a paged cache as well.
    """
    if lost := next(
        (name for name in ("position_bias", "cache") if kwargs.get(name) is not None), None
    ):
        raise InputError(
            f'attention "{NAME}": {lost} together with softcap or sinks is not supported; '
            'use attn_implementation="eager"'
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
    weights = functional.softmax(scores, -1, dtype=torch.float32).to(value.dtype)[
        ..., : key.shape[2]
    ]
    return (
        torch.matmul(functional.dropout(weights, dropout, module.training), value)
        .transpose(1, 2)
        .contiguous()
    )


def bounds_of(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bounds and the bias that a boolean mask (rows, 1, 1, keys) stands for.

    The host reads nothing.

    Returns:
        The first key that is let through and the one after the last, int32 (rows, 1, 1, 1), and the
        bias of every key.
    """
    keys = mask.shape[-1]
    at = torch.arange(keys, dtype=torch.int32, device=mask.device)
    lo = torch.where(mask, at, keys).amin(-1, keepdim=True)
    hi = torch.where(mask, at + 1, 0).amax(-1, keepdim=True)
    return (
        lo,
        hi,
        torch.full(mask.shape, masked_bias(dtype), dtype=dtype, device=mask.device).masked_fill_(
            mask, 0.0
        ),
    )


class _Sizes(NamedTuple):
    """The sizes that a kernel is made for.

    Attributes:
        query: Rows, heads, and their dim.
        key: The shape of the keys.
        value: The shape of the values.
        key_strides: The strides of the keys.
        value_strides: The strides of the values.
        dtype: The dtype of all tensors.
        device: Their device.
        scaling: The factor of scores.
        softcap: The cap on scores.
        sinks: True if there is a sink per head.
    """

    query: tuple[int, int, int]
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
        """Everything that does not depend on the length of the cache."""
        return self.query, self.dtype, self.device, self.scaling, self.softcap, self.sinks


def _sizes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Any, ...]:
    """Return the fields of `_Sizes` as a plain tuple, which dynamo can trace."""
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
    heads = size["kv_heads"] * size["group"]
    dtype = str(size["dtype"]).removeprefix("torch.")
    return (
        f"{rows} x {heads} heads of {size['head_dim']} ({size['kv_heads']} of keys), "
        f"{slots} keys, {dtype}{more}"
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
    """Return True for a prompt over a fixed number of keys, which is larger than its own.

    Without a mask it is the first prompt of its cache.
    """
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
    """Return True if models of a config class run attention that is asked for by name.

    This is what transformers says of them.
    """
    return _takes_names_once(config)


@cache
def _takes_names_once(config: type) -> bool:
    from transformers.models.auto.modeling_auto import (
        MODEL_MAPPING,
    )  # 0.2 s, which not every user needs

    models = MODEL_MAPPING.get(config, ())
    for model in models if isinstance(models, tuple) else (models,):
        if not (
            getattr(model, "_supports_sdpa", True)
            or getattr(model, "_supports_attention_backend", True)
        ):
            _log.warning(
                'attention "%s": %s may run attention of its own whatever the name; '
                'it gets masks as "eager" does and no kernels',
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
    """Return what ran the attention of models with `attn_implementation="mirage"` so far.

    The counts are those of this process.
    """
    return _attention.report()
