"""How a module computes with some of its parts done by kernels: the one forward that probes prove and swapped modules run.

Attention is never rewritten. Its stock forward runs on a stand-in for `self` whose projections hand out what a kernel has
computed, so RoPE, q/k norms, cache, window, softcap and attention backend are those of the installed version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.patterns import decoder_layer
from mirage_hf.patterns.lora import BlockAdapters
from mirage_hf.patterns.schema import LayerLayout, MlpLayout, PatternBlock

Kernel = Callable[[Sequence[Tensor]], list[Tensor]]
"""Runs a part's program: operands in the program's order to outputs."""


@dataclass(frozen=True)
class Part:
    """One block of a module: its role there, its sizes, and whose work it does.

    `weights` are (child path, parameter) in the order of the program's operands, which come after x; `bypassed` are the
    children, by path, whose forward is not called when the part runs. `halves`: the program has two operands for each projection,
    which are the upper and the lower half of it. `adapters`: the PEFT linears, by path, of whose one active adapter its weights are;
    what multiplies x is a part of its own (`adapter_role` its role), which scales by `scalings`, one for each adapter.
    """

    role: str
    block: PatternBlock
    weights: tuple[tuple[str, str], ...]
    bypassed: tuple[str, ...]
    halves: bool = False
    adapters: tuple[str, ...] = ()
    scalings: tuple[float, ...] = ()

    @property
    def pattern(self) -> str:
        return self.block.pattern.name

    def operands(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The weights as the program has them: (n, k) or (n,), in its order. No copy."""
        sizes = dict(self.block.sizes)
        if self.scalings:
            ranks = sizes["r"] if isinstance(sizes["r"], tuple) else (sizes["r"],)
            return [*parameters, _made(_scales, ranks, self.scalings, parameters[-1].device)]
        if (ups := sizes.get("lora")) is not None and ups.packed:
            first = len(parameters) - sum(r > 0 for r in ups.ranks)
            own = iter(parameters[first:])
            bs = [
                next(own)
                if r
                else _made(_zeros, n, ups.rank, parameters[-1].dtype, parameters[-1].device)
                for n, r in zip(sizes["n"], ups.ranks, strict=True)
            ]
            return [*parameters[:first], *bs]
        if not self.halves:
            return list(parameters)
        norms = num_norm_weights(sizes)
        upper, lower = zip(*(p.chunk(2) for p in parameters[norms:]), strict=True)
        return [*parameters[:norms], *upper, *lower]


def adapter_role(role: str) -> str:
    """The role of the part that multiplies x by what adapters of a role's linears multiply it by."""
    return f"{role}, adapters"


_there: dict[tuple[Any, ...], Tensor] = {}
"""What `_kept` has made, by how and of what."""


def _made(how: Callable[..., Tensor], *of: Any) -> Tensor:
    """An operand that is no parameter: all layers share it, and captured graphs read it. It is a constant of what is traced: kernels in a
    CUDA graph may read it before what runs ahead of them has written."""
    return _constant(how, *of) if torch.compiler.is_compiling() else _kept(how, *of)


@torch.compiler.assume_constant_result
def _constant(how: Callable[..., Tensor], *of: Any) -> Tensor:
    return _kept(how, *of)


def _kept(how: Callable[..., Tensor], *of: Any) -> Tensor:
    if (found := _there.get((how, *of))) is None:
        with torch.inference_mode(False):
            found = _there.setdefault(
                (how, *of), how(*of)
            )  # what another thread has made meanwhile may be read already
    return found


def _zeros(n: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a packed linear without an adapter adds."""
    return torch.zeros(n, rank, dtype=dtype, device=device)


def _scales(ranks: Sequence[int], scalings: Sequence[float], device: torch.device) -> Tensor:
    """The scaling of each adapter for each of its columns."""
    scales = torch.empty(sum(ranks), dtype=torch.float32, device=device)
    for columns, scaling in zip(scales.split(list(ranks)), scalings, strict=True):
        columns.fill_(scaling)
    return scales


def child(module: nn.Module, path: str) -> nn.Module:
    """Return a descendant by dotted path, without nn.Module's attribute look-up."""
    for name in path.split(".") if path else ():
        module = module.__dict__["_modules"][name]
    return module


def stand_in(module: nn.Module, replacements: Mapping[str, Any]) -> Any:
    """Return an object that acts as `module` does, except for some children. It shares everything else with it."""
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    other.__dict__.update(replacements)
    return other


class MlpStandIn(nn.Module):
    """Stands for an MLP that runs its own forward while what surrounds it is compared: a mixture of experts would be large to copy, and
    chooses other experts where scores are close. `more`: it gives something beside what it computes."""

    def __init__(self, more: bool = False):
        super().__init__()
        self.more = more

    def forward(self, x: Tensor) -> Any:
        y = 0.5 * x + 0.25
        return (y, None) if self.more else y


FIRST = ("gated", "up")
"""The roles of the first half of an MLP, with a gate and without."""


def first_half(roles: Iterable[str]) -> str:
    """Which of some roles is the first half of an MLP, "" where none is."""
    return next((role for role in roles if role in FIRST), "")


def runs_own_mlp(parts: Sequence[Part]) -> bool:
    """Whether no part of a layer is of its MLP."""
    return not {*FIRST, "down"} & {p.role for p in parts}


def num_norm_weights(sizes: Mapping[str, Any]) -> int:
    """How many weights the norm of a block has."""
    return (1 + sizes["norm_bias"]) if sizes["norm"] else 0


def norm_parameters(name: str, sizes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The weights of a block's norm."""
    return [(name, p) for p in ("weight", "bias")[: num_norm_weights(sizes)]]


def _same(x: Tensor) -> Tensor:
    return x


def _views(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Weights as the programs read them: (n, k) as k n, vectors as one row. No copy."""
    return [p.t() if p.dim() == 2 else p[None] for p in parameters]


class LiveWeights(Mapping[str, "list[Any]"]):
    """The weights of each role as they are when asked for."""

    def __init__(self, children: Mapping[str, Any], names: Mapping[str, Sequence[tuple[str, str]]]):
        self.children, self.names = children, names

    def __getitem__(self, role: str) -> list[Any]:
        return [self._owner(path)._parameters[name] for path, name in self.names[role]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def _owner(self, path: str) -> nn.Module:
        first, _, rest = path.partition(".")
        return child(self.children[first], rest)


class Composition(ABC):
    """A live module with parts, by role. Children that stay stock are looked up at each call: they may be replaced at any time."""

    def __init__(self, module: nn.Module, parts: Sequence[Part]):
        self.parts = {p.role: p for p in parts}
        self.children: dict[str, Any] = module.__dict__[
            "_modules"
        ]  # not the module, which holds us
        self.parameters: Mapping[str, list[Any]] = {
            p.role: [child(module, path)._parameters[name] for path, name in p.weights]
            for p in parts
        }
        for p in parts:  # what `_made` gives lies there before any call: made in a capture, it would be nothing before the first replay
            p.operands(self.parameters[p.role])
        sizes = {p.role: dict(p.block.sizes) for p in parts}
        self.ups: Mapping[str, tuple[BlockAdapters, tuple[int, ...]]] = {
            role: (s["lora"], s["n"] if isinstance(s["n"], tuple) else ())
            for role, s in sizes.items()
            if s.get("lora") is not None
        }

    def _run(self, kernels: Mapping[str, Kernel], role: str, x: Tensor, *rest: Tensor) -> Tensor:
        x = x.contiguous()
        lows: list[Tensor] = []
        if role in self.ups:
            ups, widths = self.ups[role]
            lows = ups.lows(self._run(kernels, adapter_role(role), x), widths)
        return kernels[role](
            [x, *lows, *_views(self.parts[role].operands(self.parameters[role])), *rest]
        )[0]

    @abstractmethod
    def __call__(
        self, kernels: Mapping[str, Kernel], x: Tensor, kwargs: Mapping[str, Any]
    ) -> Tensor:
        """The module's output with the work of `kernels`' roles done by them."""


def multiplier(layer: nn.Module) -> float:
    """What a decoder layer says it scales by what it adds to the residual."""
    return float(
        next(
            (
                layer.__dict__[n]
                for n in decoder_layer.MULTIPLIERS
                if isinstance(layer.__dict__.get(n), int | float)
            ),
            1.0,
        )
    )


def any_norm(layer: nn.Module, layout: LayerLayout) -> Any:
    """One of a layer's norms, whose weight has the layer's width, dtype and device."""
    return layer._modules[layout.norms[0]]


def normed(children: Mapping[str, Any], norm: str, x: Tensor) -> Tensor:
    """x by the norm of that name, x itself where a layer has none."""
    return children[norm](x) if norm else x  # type: ignore[no-any-return]


def own_mlp(children: Mapping[str, Any], mlp: str, x: Tensor) -> Tensor:
    """x by the MLP of that name, which may give scores of its router beside it."""
    y = children[mlp](x)
    return y[0] if isinstance(y, tuple) else y


def added(
    children: Mapping[str, Any], norm: str, multiplier: float, residual: Tensor, y: Tensor
) -> Tensor:
    """The residual and what a layer makes of what its attention or MLP gave."""
    y = normed(children, norm, y)
    return residual + (y if multiplier == 1 else y * multiplier)


class LayerComposition(Composition):
    """A decoder layer (patterns/decoder_layer.py). Roles: qkv, out, gated or up, down; those without a kernel run stock. Attention always
    does: its kernels serve steps of decoding only (layers/step.py)."""

    def __init__(
        self, layer: nn.Module, parts: Sequence[Part], layout: LayerLayout, mlp: MlpLayout | None
    ):
        super().__init__(layer, parts)
        self.layout, self.names, self.multiplier = layout, mlp, multiplier(layer)
        self.widths = list(dict(self.parts["qkv"].block.sizes)["n"]) if "qkv" in self.parts else []
        self.first = first_half(self.parts)
        self.fused_norm = bool(self.first) and dict(self.parts[self.first].block.sizes)["norm"]

    def __call__(
        self, kernels: Mapping[str, Kernel], x: Tensor, kwargs: Mapping[str, Any]
    ) -> Tensor:
        batch, length, width = x.shape
        flat = x.reshape(-1, width).contiguous()
        h = self._attention(kernels, x, flat, kwargs)
        return self._mlp(kernels, flat if self.layout.parallel else h, h, batch, length).view(
            batch, length, width
        )

    def _attention(
        self, kernels: Mapping[str, Kernel], x: Tensor, flat: Tensor, kwargs: Mapping[str, Any]
    ) -> Tensor:
        names: LayerLayout = self.layout
        given: dict[str, Any] = {}
        if "qkv" in kernels:
            packed = self._run(kernels, "qkv", flat).view(*x.shape[:-1], -1)
            for name, y in zip(names.projections, packed.split(self.widths, -1), strict=True):
                given[name] = lambda _, y=y: y
            inner = x  # read for its shape only
        else:
            inner = normed(self.children, names.norm, x)
        if "out" in kernels:
            given[names.output] = _same
        attention, kwargs = self.children[names.attention], {"attention_mask": None, **kwargs}
        if given:
            out = type(attention).forward(
                stand_in(attention, given), hidden_states=inner, **kwargs
            )[0]
        else:
            out = attention(hidden_states=inner, **kwargs)[0]
        out = out.reshape(flat.shape[0], -1)
        return (
            self._run(kernels, "out", out, flat)
            if "out" in kernels
            else added(self.children, names.after, self.multiplier, flat, out)
        )

    def _mlp(
        self, kernels: Mapping[str, Kernel], x: Tensor, h: Tensor, batch: int, length: int
    ) -> Tensor:
        """What the layer gives, of what the MLP's norm reads and what its output is added to."""
        mlp, names = self.children[self.layout.mlp], self.layout
        if self.first in kernels:
            inner = self._run(
                kernels,
                self.first,
                x if self.fused_norm else normed(self.children, names.mlp_norm, x),
            )
            if "down" in kernels:
                return self._run(kernels, "down", inner, h)
            y = child(mlp, self.names.down)(inner)  # type: ignore[union-attr]
            return added(self.children, names.mlp_after, self.multiplier, h, y)
        given = normed(self.children, names.mlp_norm, x.view(batch, length, -1))
        if "down" not in kernels or self.names is None:
            return added(
                self.children,
                names.mlp_after,
                self.multiplier,
                h,
                own_mlp(self.children, names.mlp, given).reshape(h.shape),
            )
        inner = type(mlp).forward(stand_in(mlp, {self.names.down: _same}), given)
        return self._run(kernels, "down", inner.reshape(h.shape[0], -1), h)


class MlpComposition(Composition):
    """A gated MLP on its own: role gated (without a norm); its down projection stays stock."""

    def __init__(self, mlp: nn.Module, parts: Sequence[Part], layout: MlpLayout):
        super().__init__(mlp, parts)
        self.down = layout.down

    def __call__(
        self, kernels: Mapping[str, Kernel], x: Tensor, kwargs: Mapping[str, Any]
    ) -> Tensor:
        inner = self._run(kernels, "gated", x.reshape(-1, x.shape[-1]))
        return self.children[self.down](inner.view(*x.shape[:-1], -1))


class LoraComposition(Composition):
    """A PEFT linear with its adapter: role lora."""

    def __call__(
        self, kernels: Mapping[str, Kernel], x: Tensor, kwargs: Mapping[str, Any]
    ) -> Tensor:
        return self._run(kernels, "lora", x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def in_dtype(block: PatternBlock, rows: int, dtype: torch.dtype, **changes: Any) -> KernelGraph:
    """A block's program with all that has a dtype in one."""
    given = {
        n: dtype if isinstance(v, torch.dtype) else v.in_dtype(dtype)
        for n, v in block.sizes
        if isinstance(v, torch.dtype | BlockAdapters)
    }
    return block.program(rows, **given, **changes)


def torch_kernels(
    parts: Sequence[Part], rows: int, dtype: torch.dtype, slots: int | None = None
) -> dict[str, Kernel]:
    """The parts' programs run op by op with torch in `dtype`, caches with `slots` slots: what a probe uses in place of kernels."""
    from mirage_hf.graph.execute import run_kernel_graph

    def kernel(part: Part) -> Kernel:
        caches = {"slots": slots} if part.block.pattern.over_cache and slots is not None else {}
        program = in_dtype(part.block, rows, dtype, **caches)
        return lambda inputs: run_kernel_graph(program, inputs)

    return {p.role: kernel(p) for p in parts}
