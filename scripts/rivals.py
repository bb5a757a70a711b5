"""Hold what users can run today for the blocks of block_rows.py.

Rivals are torch code as users write it, library calls, and kernels of Liger, FlashInfer,
flash-linear-attention and mamba_ssm. A rival takes a program's inputs in order, and gives its
outputs in order. Weights come as (K, N) views of (N, K) memory, so `w.t()` is what
nn.Linear holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mirage_hf.graph.coded import uint4_codes

EPS = 1e-6


@dataclass(frozen=True)
class Rival:
    """One way to compute a block without mirage_hf.

    Attributes:
        name: The name in tables.
        run: Computes the block.
        prepare: Changes a set of inputs once, outside the timing (for example joins weights).
        whole: Whether it computes the whole block. Otherwise it is only the memory-bound core.
        compiled: Whether torch.compile of it is timed too.
        needs: The package it calls.
    """

    name: str
    run: Callable[..., Tensor | tuple[Tensor, ...]]
    prepare: Callable[..., Sequence[Tensor]] | None = None
    whole: bool = True
    compiled: bool = False
    needs: str = ""

    @property
    def absent(self) -> str:
        """Why it cannot run here; empty if it can."""
        return (
            f"{self.needs} is not installed" if self.needs and find_spec(self.needs) is None else ""
        )

    def arguments(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return its arguments for a set of inputs."""
        return list(self.prepare(*inputs)) if self.prepare else list(inputs)


def core(
    name: str, run: Callable[..., Tensor], prepare: Callable[..., Sequence[Tensor]] | None = None
) -> Rival:
    """Return a part of a block, as a bound to compare with."""
    return Rival(name, run, prepare, whole=False)


# -- RMSNorm + Linear -----------------------------------------------------------------------------


def norm_linear(x: Tensor, gamma: Tensor, w: Tensor) -> Tensor:
    """Compute RMSNorm and a linear in torch."""
    return F.linear(F.rms_norm(x, (x.shape[-1],), gamma[0], EPS), w.t())


def liger_norm_linear(x: Tensor, gamma: Tensor, w: Tensor) -> Tensor:
    """Compute Liger's RMSNorm, then a linear."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return F.linear(LigerRMSNormFunction.apply(x, gamma[0], EPS, 0.0, "llama", False), w.t())


NORM_LINEAR = (
    Rival("eager", norm_linear, compiled=True),
    core("linear alone", F.linear, lambda x, gamma, w: (x, w.t())),
    Rival("liger", liger_norm_linear, needs="liger_kernel"),
)


# -- linear of 4-bit codes ------------------------------------------------------------------------


def decoded_int4(x: Tensor, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and the decoded weight (N, K)."""
    return x, ((uint4_codes(codes, {2: 8}).to(x.dtype) - 8) * scales).flatten(1)


INT4_LINEAR = (Rival("fp16 weights", F.linear, decoded_int4),)


# -- gated MLP ------------------------------------------------------------------------------------


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Compute the first half of a gated MLP."""
    return F.silu(F.linear(x, gate.t())) * F.linear(x, up.t())


def joined(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Join gate and up into one weight."""
    return x, torch.cat([gate.t(), up.t()])


def joined_mlp(x: Tensor, w: Tensor) -> Tensor:
    """Compute the first half of a gated MLP with gate and up as one weight."""
    gate, up = F.linear(x, w).chunk(2, dim=-1)
    return F.silu(gate) * up


def liger_mlp(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Compute the first half of a gated MLP with Liger's SiLU · up."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(F.linear(x, gate.t()), F.linear(x, up.t()))


GATED_MLP = (
    Rival("eager", gated_mlp, compiled=True),
    Rival("joined weights", joined_mlp, joined, compiled=True),
    core("linear alone", F.linear, joined),
    Rival("liger", liger_mlp, needs="liger_kernel"),
)


# -- LoRA -----------------------------------------------------------------------------------------


def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute a linear and its adapter."""
    return F.linear(x, w.t()) + F.linear(F.linear(x, a.t()), b.t())


def lora_addmm(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute a linear and its adapter with addmm."""
    return torch.addmm(F.linear(x, w.t()), F.linear(x, a.t()), b)


LORA = (
    Rival("eager", lora, compiled=True),
    Rival("addmm", lora_addmm),
    core("linear alone", F.linear, lambda x, w, a, b: (x, w.t())),
)


# -- attention ------------------------------------------------------------------------------------


def sdpa_heads(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Call SDPA with the heads grouped by sequence."""
    batch = [x.view(-1, heads, *x.shape[1:]) for x in (q, k, v)]
    return F.scaled_dot_product_attention(batch[0], batch[1], batch[2]).view_as(q)


def sdpa_gqa(q: Tensor, k: Tensor, v: Tensor, kv_heads: int) -> Tensor:
    """Call SDPA as a model does: one query token a head."""
    group, d = q.shape[1:]
    k, v = (x.view(-1, kv_heads, *x.shape[1:]) for x in (k, v))
    return F.scaled_dot_product_attention(
        q.view(-1, kv_heads * group, 1, d), k, v, enable_gqa=True
    ).view_as(q)


def sdpa_rows(q: Tensor, k: Tensor, v: Tensor, kv_heads: int) -> Tensor:
    """Call SDPA with the query heads of a group as rows, so each key is read once."""
    return sdpa_heads(q, k, v, kv_heads)


@cache
def _flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_gqa(q: Tensor, k: Tensor, v: Tensor, kv_heads: int) -> Tensor:
    """Call flex_attention with grouped heads."""
    from torch.nn.attention.flex_attention import flex_attention

    group, d = q.shape[1:]
    k, v = (x.view(-1, kv_heads, *x.shape[1:]) for x in (k, v))
    run = _flex_attention() if q.is_cuda else flex_attention
    return run(q.view(-1, kv_heads * group, 1, d), k, v, enable_gqa=True).view_as(q)


@cache
def _paged_decode(
    batch: int,
    kv_heads: int,
    group: int,
    keys: int,
    d: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Return FlashInfer's decoding over a cache of one page a sequence."""
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=device), "HND", use_tensor_cores=group >= 4
    )
    pages = torch.arange(batch + 1, dtype=torch.int32, device=device)
    wrapper.plan(
        pages,
        pages[:batch],
        torch.full((batch,), keys, dtype=torch.int32, device=device),
        kv_heads * group,
        kv_heads,
        d,
        keys,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    return wrapper


def flashinfer_gqa(q: Tensor, k: Tensor, v: Tensor, kv_heads: int) -> Tensor:
    """Call FlashInfer's decode attention."""
    (_, group, d), keys, batch = q.shape, k.shape[1], q.shape[0] // kv_heads
    k, v = (x.view(batch, kv_heads, keys, d) for x in (k, v))
    return (
        _paged_decode(batch, kv_heads, group, keys, d, q.dtype, q.device)
        .run(q.view(batch, -1, d), (k, v))
        .view_as(q)
    )


def gqa_decode(kv_heads: int = 2) -> tuple[Rival, ...]:
    """Return the rivals of GQA decoding."""
    return (
        Rival("eager", partial(sdpa_gqa, kv_heads=kv_heads), compiled=True),
        Rival("sdpa rows", partial(sdpa_rows, kv_heads=kv_heads)),
        Rival("flex_attention", partial(flex_gqa, kv_heads=kv_heads)),
        Rival("flashinfer", partial(flashinfer_gqa, kv_heads=kv_heads), needs="flashinfer"),
    )


def attention_paper(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention with unscaled scores."""
    return torch.softmax(q @ k, dim=-1) @ v


def sdpa_paper(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call SDPA with one batch of many heads; its fused kernels want four dims."""
    return F.scaled_dot_product_attention(q[None], k.mT[None], v[None], scale=1.0)[0]


def sdpa_stored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call SDPA on keys that are stored as it wants them."""
    return F.scaled_dot_product_attention(q[None], k[None], v[None], scale=1.0)[0]


GQA_PAPER = (
    Rival("eager", attention_paper, compiled=True),
    Rival("sdpa", sdpa_paper),
    core("sdpa, k stored (keys, d)", sdpa_stored, lambda q, k, v: (q, k.mT.contiguous(), v)),
)


def qk_norm_attention(
    q: Tensor, k: Tensor, v: Tensor, gamma_q: Tensor, gamma_k: Tensor, heads: int
) -> Tensor:
    """Compute LayerNorm on q and k, then attention."""
    d = q.shape[-1]
    q, k = (
        F.layer_norm(q, (d,), gamma_q.view(d), None, EPS),
        F.layer_norm(k, (d,), gamma_k.view(d), None, EPS),
    )
    return sdpa_heads(q, k, v, heads)


def liger_qk_norm(
    q: Tensor, k: Tensor, v: Tensor, gamma_q: Tensor, gamma_k: Tensor, zeros: Tensor, heads: int
) -> Tensor:
    """Compute Liger's LayerNorm on q and k, then attention."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    q, k = (
        LigerLayerNormFunction.apply(x, gamma.view(-1), zeros, EPS)
        for x, gamma in ((q, gamma_q), (k, gamma_k))
    )
    return sdpa_heads(q, k, v, heads)


def qk_norm(heads: int = 16) -> tuple[Rival, ...]:
    """Return the rivals of q/k norm and attention."""
    return (
        Rival("eager", partial(qk_norm_attention, heads=heads), compiled=True),
        core(
            "sdpa alone",
            partial(sdpa_heads, heads=heads),
            lambda q, k, v, gamma_q, gamma_k: (q, k, v),
        ),
        Rival(
            "liger",
            partial(liger_qk_norm, heads=heads),
            needs="liger_kernel",
            prepare=lambda q, k, v, gamma_q, gamma_k: (
                q,
                k,
                v,
                gamma_q,
                gamma_k,
                torch.zeros_like(gamma_q).view(-1),
            ),
        ),
    )


# -- multi-head latent attention ------------------------------------------------------------------


def mla_stock(qn: Tensor, qr: Tensor, c: Tensor, kr: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """Expand keys and values of all heads from the latent, as transformers does."""
    scale = (qn.shape[-1] + qr.shape[-1]) ** -0.5
    key, value = torch.matmul(c, wk), torch.matmul(c, wv)
    key = torch.cat([key, kr.expand(-1, key.shape[1], -1, -1)], dim=-1)
    return F.scaled_dot_product_attention(torch.cat([qn, qr], dim=-1), key, value, scale=scale)


def mla_absorbed(qn: Tensor, qr: Tensor, c: Tensor, kr: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """Move the up-projections to the query and the result by hand."""
    scale = (qn.shape[-1] + qr.shape[-1]) ** -0.5
    q = torch.einsum("bhqd,hld->bhql", qn, wk[0])
    scores = torch.einsum("bhql,bkl->bhqk", q, c[:, 0]) + torch.einsum(
        "bhqr,bkr->bhqk", qr, kr[:, 0]
    )
    mixed = torch.einsum("bhqk,bkl->bhql", torch.softmax(scores * scale, dim=-1), c[:, 0])
    return torch.einsum("bhql,hlv->bhqv", mixed, wv[0])


def latent_core(q: Tensor, keys: Tensor, c: Tensor) -> Tensor:
    """Compute the products over the latent alone."""
    return torch.softmax(q @ keys.mT, dim=-1) @ c


def _latent(
    qn: Tensor, qr: Tensor, c: Tensor, kr: Tensor, wk: Tensor, wv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries in the right shape, and [latent | rope] keys stored together."""
    keys = torch.cat([c[:, 0], kr[:, 0]], dim=-1)
    return keys[:, : qn.shape[1]] * keys.shape[-1] ** -0.5, keys, c[:, 0]


MLA = (
    Rival("eager", mla_stock, compiled=True),
    Rival("absorbed", mla_absorbed, compiled=True),
    core("products over the latent alone", latent_core, _latent),
)


# -- nTrans ---------------------------------------------------------------------------------------


def ntrans(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
    """Compute the residual of nGPT."""

    def norm(z: Tensor) -> Tensor:
        return z / torch.linalg.vector_norm(z, dim=-1, keepdim=True)

    return norm(x + a * (norm(y) - x))


NTRANS = (Rival("eager", ntrans, compiled=True),)


# -- steps of recurrences -------------------------------------------------------------------------


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 if it has it already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gated_delta_step(
    state: Tensor, log_decay: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute a step of the gated delta rule in torch."""
    q, k, v, beta = (_wide(x) for x in (q, k, v, beta))
    faded = state * log_decay.exp()
    delta = (v - (faded * k).sum(-2, keepdim=True)) * beta
    new = faded + k * delta
    out = (new * (q * q.shape[-2] ** -0.5)).sum(-2, keepdim=True)
    return new, out.to(_result_dtype(out))


def _result_dtype(x: Tensor) -> torch.dtype:
    """Return bfloat16, in which layers go on, or float64 for results in float64."""
    return x.dtype if x.dtype == torch.float64 else torch.bfloat16


def fla_gated_delta(
    state: Tensor,
    log_decay: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    key_heads: int,
) -> tuple[Tensor, Tensor]:
    """Call the kernel of flash-linear-attention for a text of one token."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    group, key, value = state.shape[1:]
    heads = key_heads * group
    out, new = fused_recurrent_gated_delta_rule(
        q.view(-1, 1, key_heads, key),
        k.view(-1, 1, key_heads, key),
        v.view(-1, 1, heads, value),
        g=log_decay.view(-1, 1, heads),
        beta=beta.view(-1, 1, heads),
        initial_state=state.view(-1, heads, key, value),
        output_final_state=True,
    )
    return new.view_as(state), out.view_as(v)


def gated_delta(key_heads: int = 16) -> tuple[Rival, ...]:
    """Return the rivals of a step of the gated delta rule."""
    return (
        Rival("eager", gated_delta_step, compiled=True),
        Rival("fla", partial(fla_gated_delta, key_heads=key_heads), needs="fla"),
    )


def mamba2_step(
    state: Tensor,
    x: Tensor,
    z: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a_log: Tensor,
    d: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute a step of Mamba-2 in torch."""
    x, z, dt, b, c, a_log, d = (_wide(t) for t in (x, z, dt, b, c, a_log, d))
    new = state * (dt * -a_log.exp()).exp() + dt * b * x
    y = (new * c).sum(-1, keepdim=True) + x * d
    y = y * F.silu(z)
    return new, y.to(_result_dtype(y))


def _as_mamba_ssm_takes_it(
    state: Tensor,
    x: Tensor,
    z: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a_log: Tensor,
    d: Tensor,
) -> list[Tensor]:
    """Return the kernel's arguments. It updates the state in place, so it gets one of its own.

    Numbers of a head are expanded, which tells the kernel that they are equal.
    """
    rows, heads, head_dim, size = state.shape
    decay = -_wide(a_log).exp()
    return [
        state.clone(),
        x.view(rows, heads, head_dim),
        dt.view(rows, heads, 1).expand(rows, heads, head_dim),
        decay.view(heads, 1, 1).expand(heads, head_dim, size),
        b.view(rows, 1, size),
        c.view(rows, 1, size),
        d.view(heads, 1).expand(heads, head_dim),
        z.view(rows, heads, head_dim),
    ]


def mamba_ssm_step(state: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    """Call the kernel of mamba_ssm."""
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    return state, selective_state_update(state, *given)[..., None]


MAMBA2 = (
    Rival("eager", mamba2_step, compiled=True),
    Rival("mamba_ssm", mamba_ssm_step, _as_mamba_ssm_takes_it, needs="mamba_ssm"),
)
