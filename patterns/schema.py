"""What a pattern is: a tensor program with named axes.

A layout names the modules of a pattern as a family of models names them. Some models compute what a
known family computes, under other names. To support one, add an entry to `decoder_layer.LAYOUTS`.
If names in the model, MLP or MLP input differ, too, add entries to `causal_lm.LAYOUTS`,
`gated_mlp.LAYOUTS` or `mlp_up.LAYOUTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mirage_hf.graph.kernel import KernelGraph


@dataclass(frozen=True)
class Pattern:
    """A block that models have, as a function that writes it as a kernel graph.

    Example:
        >>> def build(rows: int, k: int, n: int, dtype: torch.dtype) -> KernelGraph:
        ...     g = new_kernel_graph()
        ...     x = g.new_input((rows, k), dtype, name="x")
        ...     w = g.new_input((k, n), dtype, strides=(1, k), name="w", constant=True)
        ...     g.mark_output(g.relu(g.matmul(x, w)))
        ...     return g
        >>> RELU_LINEAR = Pattern("relu_linear", {"x": "rows k", "w": "k n", "y": "rows n"}, build)
        >>> RELU_LINEAR.block(k=2048, n=8192, dtype=torch.bfloat16).program(rows=1)
    """

    #: The pattern's name, as `optimize(patterns=[…])` and reports have it.
    name: str
    #: The axes of each operand and of the output, in the program's order. "…" stands for several.
    axes: Mapping[str, str]
    #: Called as `build(rows=…, dtype=…, **sizes)`. It uses only the public graph API. The weight of
    #: an nn.Linear, which is stored as (n, k), enters as (k, n) with strides (1, k).
    build: Callable[..., KernelGraph]
    #: For patterns over a cache, the slots at which to search for kernels, whatever number they
    #: are tuned for. The larger number is searched, and the smaller is checked.
    searched_at: int | None = None
    #: A promise about the kernel that is launched right after this block's: that it may launch
    #: early (see `placement.place_kernels`).
    next_may_launch_early: bool = False

    @property
    def over_cache(self) -> bool:
        """Whether one of the sizes is the number of slots of a cache."""
        return any("slots" in axes.split() for axes in self.axes.values())

    def block(self, **sizes: Any) -> PatternBlock:
        """Return this pattern at given sizes, for any number of rows."""
        return PatternBlock(self, tuple(sorted(sizes.items())))


@dataclass(frozen=True)
class PatternBlock:
    """A pattern at the sizes of one module.

    A kernel is made for a block and a number of rows. Equal blocks share their kernels.
    """

    pattern: Pattern
    #: (name, value) in the order of the names.
    sizes: tuple[tuple[str, Any], ...]

    def program(self, rows: int, **changes: Any) -> KernelGraph:
        """Return the tensor program for `rows` rows. It is shared, so do not change it.

        Args:
            rows: The number of rows.
            changes: Sizes that differ, such as a wider dtype for a probe.
        """
        return _program(self, rows, tuple(sorted(changes.items())))

    def searched(self, rows: int) -> KernelGraph | None:
        """Return the program at the other number of slots that a search looks at, or None.

        See `Pattern.searched_at`.
        """
        if self.pattern.searched_at is None:
            return None
        other = self.program(rows, slots=self.pattern.searched_at)
        return None if other == self.program(rows) else other

    def __hash__(self) -> int:
        """Return a hash of the pattern's name and the sizes."""
        return hash((self.pattern.name, self.sizes))

    def __eq__(self, other: object) -> bool:
        """Compare the pattern's name and the sizes."""
        if not isinstance(other, PatternBlock):
            return False
        return (self.pattern.name, self.sizes) == (other.pattern.name, other.sizes)


# Probes and steps on a CPU ask for the same programs again and again.
@lru_cache(maxsize=512)
def _program(block: PatternBlock, rows: int, changes: tuple[tuple[str, Any], ...]) -> KernelGraph:
    return block.pattern.build(rows=rows, **{**dict(block.sizes), **dict(changes)})


# -- layouts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LatentLayout:
    """How a family names the inner modules of multi-head latent attention.

    The module's forward must be that of `DeepseekV2Attention` or `DeepseekV3Attention`: its cache
    holds latents and rotated keys.

    Example:
        DeepSeek-V3: `LatentLayout("kv_a_layernorm", "kv_b_proj", "q_a_layernorm", "q_b_proj")`.
    """

    #: The RMSNorm of the latents: `kv_a_layernorm`.
    norm: str
    #: The linear that expands latents to the keys and values of all heads: `kv_b_proj`.
    expand: str
    #: The RMSNorm of a query with a low-rank projection (`q_a_layernorm`), or "".
    q_norm: str = ""
    #: The linear that expands such a query to all heads (`q_b_proj`), or "".
    q_expand: str = ""


@dataclass(frozen=True)
class LayerLayout:
    """How a family names the children of a decoder layer, and those of its attention.

    The layer must be called as transformers calls its decoder layers, and return a tensor:
    `layer(hidden_states, attention_mask=…, position_ids=…, past_key_values=…, use_cache=…,
    position_embeddings=(cos, sin))`. It passes these on to its attention. Attention returns
    (output, weights), and reads its keys and values from `past_key_values.update(key, value,
    layer_idx)`. It has these attributes:

    - `layer_idx`: the number of the layer;
    - `head_dim`: the elements of a head, an int;
    - `scaling`: the factor of scores, a float, usually head_dim ** -0.5;
    - `num_key_value_groups`: the heads of queries for each head of keys. It is needed only if q, k
      and v are one linear and heads share keys.

    Names only suggest what a layer computes. Before anything is replaced, a probe compares the
    layer with the patterns. A norm that the family does not have is "".

    Example:
        Llama, `x + o_proj(attention(q_proj, k_proj, v_proj of input_layernorm(x)))` and so on:

        >>> LayerLayout(
        ...     "Llama",
        ...     norm="input_layernorm",
        ...     attention="self_attn",
        ...     projections=("q_proj", "k_proj", "v_proj"),
        ...     output="o_proj",
        ...     mlp_norm="post_attention_layernorm",
        ...     mlp="mlp",
        ... )
    """

    #: The families that have this layout, for error messages and documentation.
    families: str
    #: The norm before attention (Llama: `input_layernorm`), or "".
    norm: str
    #: The attention module (Llama: `self_attn`).
    attention: str
    #: The linears of q, k and v in attention, in this order (Llama: `q_proj`, `k_proj`, `v_proj`).
    #: One name means that one linear gives all three (Phi3: `qkv_proj`). With `latent`, they are
    #: the query's first linear and the one that gives the latent and the key for RoPE.
    projections: tuple[str, ...]
    #: The linear in attention that its result goes through (Llama: `o_proj`).
    output: str
    #: The norm before the MLP (Llama: `post_attention_layernorm`), or "".
    mlp_norm: str
    #: The MLP (Llama: `mlp`). An `MlpLayout` names its children. An MLP without one, such as a
    #: mixture of experts, runs its own forward.
    mlp: str
    #: The norm of what attention gives, before it is added (Gemma2: `post_attention_layernorm`).
    after: str = ""
    #: The norm of what the MLP gives, before it is added (Gemma2: `post_feedforward_layernorm`).
    mlp_after: str = ""
    #: The norms of q and k in attention, if it has any (Qwen3: `q_norm`, `k_norm`).
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    #: The inner modules of multi-head latent attention (DeepSeek), or None for other attention.
    latent: LatentLayout | None = None
    #: True if the MLP reads the layer's input, as attention does, and both are added to it (Cohere,
    #: Phi, GPT-NeoX). `mlp_norm` may be `norm` then.
    parallel: bool = False

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms that the layer has, except for those of heads."""
        names = (self.norm, self.after, self.mlp_norm, self.mlp_after)
        return tuple(dict.fromkeys(name for name in names if name))


@dataclass(frozen=True)
class CausalLayout:
    """How a family names the children of a causal language model, and those of its backbone.

    The model's forward takes `input_ids`, `position_ids`, `past_key_values`, `use_cache` and
    `logits_to_keep`, and returns an object with `logits`. It has `config` and `generate`.

    Example:
        `LlamaForCausalLM`, whose backbone is `model`:

        >>> CausalLayout(
        ...     "Llama",
        ...     backbone="model",
        ...     embedding="embed_tokens",
        ...     layers="layers",
        ...     norm="norm",
        ...     rotary="rotary_emb",
        ...     head="lm_head",
        ... )
    """

    #: The families that have this layout.
    families: str
    #: The model without its head, a child of the model (Llama: `model`).
    backbone: str
    #: The nn.Embedding of tokens, a child of the backbone (Llama: `embed_tokens`).
    embedding: str
    #: The nn.ModuleList of decoder layers, a child of the backbone (Llama: `layers`).
    layers: str
    #: The norm after the last layer, a child of the backbone (Llama: `norm`).
    norm: str
    #: The module that is called as `rotary(x, position_ids)` and returns cos and sin, a child of
    #: the backbone (Llama: `rotary_emb`).
    rotary: str
    #: The linear that gives logits, a child of the model (Llama: `lm_head`).
    head: str


@dataclass(frozen=True)
class MlpLayout:
    """How a family names the children of an MLP.

    The MLP computes down(activation(gate(x)) · up(x)), or down(activation(up(x))) without a gate.
    Its forward takes x and returns a tensor.

    Example:
        Llama: `MlpLayout("Llama", "gate_proj", "up_proj", "down_proj", "act_fn")`.
    """

    #: The families that have this layout.
    families: str
    #: The linear whose output the activation is applied to (Llama: `gate_proj`). "" means that the
    #: MLP has no gate. If it is the same as `up`, both are the halves of one linear, gate first
    #: (Phi3: `gate_up_proj`).
    gate: str
    #: The linear that the gate is multiplied by, or the only one before the activation (Llama:
    #: `up_proj`, StarCoder2: `c_fc`).
    up: str
    #: The linear back to the layer's width (Llama: `down_proj`, StarCoder2: `c_proj`).
    down: str
    #: The activation module, without parameters (Llama: `act_fn`). A probe finds out which function
    #: it computes.
    activation: str

    @property
    def packed_gate_up(self) -> bool:
        """Whether gate and up are the halves of one linear."""
        return self.gate == self.up

    @property
    def linears(self) -> tuple[str, ...]:
        """The linears that read the MLP's input."""
        return tuple(dict.fromkeys(name for name in (self.gate, self.up) if name))

    @property
    def first(self) -> str:
        """The role of the part that computes these linears: "gated" or "up"."""
        return "gated" if self.gate else "up"
