"""The parts of a module that kernels can run: which block, which role, which weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mirage_hf.errors import Rejected
from mirage_hf.patterns.attention import ATTENTION, for_several_tokens
from mirage_hf.patterns.mla import MLA, MLA_APPEND
from mirage_hf.patterns.mla import for_several_tokens as of_latents
from mirage_hf.patterns.schema import PatternBlock

#: The roles of the first half of an MLP, with a gate and without.
FIRST_MLP_ROLES = ("gated", "up")

#: The role of attention's kernels that were tuned for long caches.
LONG_CACHES_ROLE = "attention, long caches"


@dataclass(frozen=True)
class Part:
    """One block of a module that a kernel can run, and the work of the module that it does.

    For example, the part "qkv" of a Llama layer is a block of the pattern `rms_norm_linear`. It
    reads the weights of `input_layernorm`, `q_proj`, `k_proj` and `v_proj`. When it runs, the
    forwards of these four modules are not called.
    """

    #: What the block is for its module, such as "qkv", "out", "gated" or "down". No two parts of a
    #: module have the same role.
    role: str
    #: The pattern and its sizes. Parts with equal blocks share kernels.
    block: PatternBlock
    #: (path of a child, name of its parameter), in the order of the program's operands after x.
    weights: tuple[tuple[str, str], ...]
    #: The children, by path, whose forward is not called when the part runs.
    bypassed: tuple[str, ...]
    #: True if one linear holds gate and up. The program has an operand for each half of it.
    packed_gate_up: bool = False
    #: The PEFT linears, by path, whose one active adapter the part computes.
    adapters: tuple[str, ...] = ()
    #: The scaling of each adapter, if the part is their first products (see `adapter_role`).
    scalings: tuple[float, ...] = ()

    @property
    def pattern(self) -> str:
        """The name of the block's pattern."""
        return self.block.pattern.name


@dataclass(frozen=True, order=True)
class StepShape:
    """How many tokens a decoding step takes.

    Attributes:
        batch: Sequences.
        tokens: New tokens of each sequence. Steps that verify drafts have several.
        windowed: Whether steps of several tokens serve layers with sliding windows. Each token then
            has bounds of its own among the cached keys.
    """

    batch: int
    tokens: int = 1
    windowed: bool = False

    @property
    def rows(self) -> int:
        """New tokens of all sequences."""
        return self.batch * self.tokens

    def __str__(self) -> str:
        if self.tokens == 1:
            return f"{self.batch} rows"
        return f"{self.batch} x {self.tokens} rows"


def block_at(block: PatternBlock, shape: StepShape) -> tuple[PatternBlock, int] | Rejected:
    """Return the block that runs in steps of a shape, and the rows of its program.

    Blocks over a cache count sequences as rows. All others count tokens.
    """
    if shape.tokens == 1 or not block.pattern.over_cache:
        return block, shape.rows
    if block.pattern in (MLA, MLA_APPEND):
        return of_latents(block, shape.tokens), shape.batch
    if block.pattern is not ATTENTION:
        return Rejected(f"{block.pattern.name} takes one new token of each sequence")
    return for_several_tokens(block, shape.tokens, window=shape.windowed), shape.batch


def adapter_role(role: str) -> str:
    """Return the role of the part that multiplies x by the lora_A weights of `role`'s linears."""
    return f"{role}, adapters"


def first_mlp_role(roles: Iterable[str]) -> str:
    """Return which of `roles` is the first half of an MLP, or "" if none is."""
    return next((role for role in roles if role in FIRST_MLP_ROLES), "")


def runs_own_mlp(parts: Sequence[Part]) -> bool:
    """Return whether no part of a layer belongs to its MLP, so that the MLP's own forward runs."""
    return not {*FIRST_MLP_ROLES, "down"} & {part.role for part in parts}


def num_norm_weights(sizes: Mapping[str, Any]) -> int:
    """Return how many weights the norm of a block has: none, a weight, or a weight and a bias."""
    return (1 + sizes["norm_bias"]) if sizes["norm"] else 0


def norm_parameters(path: str, sizes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the weights of the norm at `path`, as `Part.weights` lists them."""
    return [(path, name) for name in ("weight", "bias")[: num_norm_weights(sizes)]]
