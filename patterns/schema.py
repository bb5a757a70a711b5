"""What a pattern is: a block's tensor program with named axes, and rows that say how families name the block's parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mirage_hf.graph.kernel import KernelGraph


@dataclass(frozen=True)
class Pattern:
    """A block of a model: its name, the axes of its operands in the program's order, and the builder of that program.

    `build(rows=…, dtype=…, **sizes)` uses the public graph API only. Weights of an nn.Linear enter as "k n", stored (n, k).
    `searched_at`: of what is over a cache, the slots beside which it is searched, whatever number of them kernels are tuned for: the
    larger of both is searched, the smaller is checked.
    `next_may_launch_early`: a promise about the kernel that is launched right after this block's (see `placement.place_kernels`).
    """

    name: str
    axes: Mapping[str, str]
    build: Callable[..., KernelGraph]
    searched_at: int | None = None
    next_may_launch_early: bool = False

    @property
    def over_cache(self) -> bool:
        """Whether a size of it is the number of slots of a cache."""
        return any("slots" in axes.split() for axes in self.axes.values())

    def block(self, **sizes: Any) -> PatternBlock:
        """This pattern at given sizes, rows left open."""
        return PatternBlock(self, tuple(sorted(sizes.items())))


@dataclass(frozen=True)
class PatternBlock:
    """A pattern at the sizes of one module: what a kernel is made for, once per number of rows. Equal blocks share kernels."""

    pattern: Pattern
    sizes: tuple[tuple[str, Any], ...]

    def program(self, rows: int, **changes: Any) -> KernelGraph:
        """The tensor program for `rows` rows, to be read only; `changes` replace sizes (a wider dtype for a probe)."""
        return _program(self, rows, tuple(sorted(changes.items())))

    def searched(self, rows: int) -> KernelGraph | None:
        """The program beside which that for `rows` rows is searched, at another number of slots; None where it is that itself."""
        if self.pattern.searched_at is None:
            return None
        other = self.program(rows, slots=self.pattern.searched_at)
        return None if other == self.program(rows) else other

    def __hash__(self) -> int:
        return hash((self.pattern.name, self.sizes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PatternBlock) and (self.pattern.name, self.sizes) == (
            other.pattern.name,
            other.sizes,
        )


@lru_cache(maxsize=512)  # probes and steps on a CPU ask for one program again and again
def _program(block: PatternBlock, rows: int, changes: tuple[tuple[str, Any], ...]) -> KernelGraph:
    return block.pattern.build(rows=rows, **{**dict(block.sizes), **dict(changes)})


@dataclass(frozen=True)
class LatentLayout:
    """How families name what is between the projections of latent attention: the latent's norm and the weight that expands it; where q has
    a low-rank projection, its norm and what expands it."""

    norm: str
    expand: str
    q_norm: str = ""
    q_expand: str = ""


@dataclass(frozen=True)
class LayerLayout:
    """How families name the children of a decoder layer, and those of its attention. A norm that they have not is "".

    `norm` and `mlp_norm` are those before attention and MLP, `after` and `mlp_after` those of what these give, before it is added.
    One name in `projections`: q, k and v are one linear. `latent`: of attention whose cache holds latents. `parallel`: the MLP and its
    norm, which may be attention's, read what attention's norm reads, and the sum of both is added to it.
    """

    families: str
    norm: str
    attention: str
    projections: tuple[str, ...]
    output: str
    mlp_norm: str
    mlp: str
    after: str = ""
    mlp_after: str = ""
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    latent: LatentLayout | None = None
    parallel: bool = False

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms that the layer has."""
        return tuple(
            dict.fromkeys(n for n in (self.norm, self.after, self.mlp_norm, self.mlp_after) if n)
        )


@dataclass(frozen=True)
class CausalLayout:
    """How families name the children of a causal language model, and those of its backbone."""

    families: str
    backbone: str
    embedding: str
    layers: str
    norm: str
    rotary: str
    head: str


@dataclass(frozen=True)
class MlpLayout:
    """How families name the children of an MLP. Where `gate` and `up` are one name, they are the halves of one linear; an MLP without a
    gate has no `gate`."""

    families: str
    gate: str
    up: str
    down: str
    activation: str

    @property
    def linears(self) -> tuple[str, ...]:
        """Those that read the MLP's input."""
        return tuple(dict.fromkeys(n for n in (self.gate, self.up) if n))

    @property
    def first(self) -> str:
        """The role of the part that they are."""
        return "gated" if self.gate else "up"
