"""Declare the blocks that bench_blocks.py times: programs, batch sizes, targets, rivals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import mirage_hf as mi
from mirage_hf.gpus import H200
from mirage_hf.graph.coded import stored_bytes
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.patterns.attention import LONG_SLOTS
from scripts import rivals
from scripts.rivals import Rival

HALF = torch.float16


# -- programs -------------------------------------------------------------------------------------

# Weights are stored (N, K), as nn.Linear stores them. Caches of earlier tokens are constants, as
# weights are, so that kernels may prefetch them before they wait for the query.


def weight(g: KernelGraph, k: int, n: int, name: str) -> DTensor:
    """Add a weight stored (N, K), as nn.Linear stores it."""
    return g.new_input((k, n), HALF, strides=(1, k), name=name, constant=True)


def norm_linear(rows: int, k: int = 4096, n: int = 4096) -> KernelGraph:
    """Build RMSNorm and a linear."""
    g = mi.new_kernel_graph()
    x, gamma = (
        g.new_input((rows, k), HALF, name="x"),
        g.new_input((1, k), HALF, name="gamma", constant=True),
    )
    g.mark_output(g.matmul(g.rms_norm(x, gamma, rivals.EPS), weight(g, k, n, "w")))
    return g


def int4_linear(rows: int, k: int = 4096, n: int = 14336, group: int = 128) -> KernelGraph:
    """Build a linear whose weight is 4-bit codes in groups, each with a scale."""
    g = mi.new_kernel_graph()
    x = g.new_input((rows, k), HALF, name="x")
    codes = g.new_input((n, k // group, group), "uint4", name="codes", constant=True)
    scales = g.new_input((n, k // group, 1), HALF, name="scales", constant=True)
    w = g.mul(g.sub(g.cast(codes, HALF), 8.0), scales)
    g.mark_output(g.matmul(x, g.permute(g.reshape(w, (n, k)), (1, 0))))
    return g


def gated_mlp(rows: int, k: int = 4096, n: int = 4096) -> KernelGraph:
    """Build the first half of a gated MLP."""
    g = mi.new_kernel_graph()
    x = g.new_input((rows, k), HALF, name="x")
    gate, up = (g.matmul(x, weight(g, k, n, name)) for name in ("gate", "up"))
    g.mark_output(g.mul(g.silu(gate), up))
    return g


def lora(rows: int, k: int = 4096, n: int = 4096, r: int = 16) -> KernelGraph:
    """Build a linear and its adapter."""
    g = mi.new_kernel_graph()
    x = g.new_input((rows, k), HALF, name="x")
    base = g.matmul(x, weight(g, k, n, "w"))
    g.mark_output(g.add(base, g.matmul(g.matmul(x, weight(g, k, r, "a")), weight(g, r, n, "b"))))
    return g


def gqa_decode(
    rows: int,
    kv_heads: int = 2,
    group: int = 4,
    keys: int = 4096,
    d: int = 128,
    dtype: torch.dtype = HALF,
) -> KernelGraph:
    """Build one token's attention over a cache.

    Query heads that share a key head are rows of one product.
    """
    g = mi.new_kernel_graph()
    q = g.new_input((rows * kv_heads, group, d), dtype, name="q")
    k, v = (
        g.new_input((rows * kv_heads, keys, d), dtype, name=name, constant=True) for name in "kv"
    )
    g.mark_output(
        g.matmul(g.softmax(g.mul(g.matmul(q, g.permute(k, (0, 2, 1))), 1 / math.sqrt(d))), v)
    )
    return g


def gqa_paper(
    rows: int, heads: int = 2, q: int = 256, keys: int = 4096, d: int = 64
) -> KernelGraph:
    """Build the paper's attention: scores are not scaled, and keys are stored (d, keys)."""
    g = mi.new_kernel_graph()
    Q = g.new_input((heads * rows, q, d), HALF, name="q")
    K, V = (
        g.new_input((heads * rows, d, keys), HALF, name="k"),
        g.new_input((heads * rows, keys, d), HALF, name="v"),
    )
    g.mark_output(g.matmul(g.softmax(g.matmul(Q, K)), V))
    return g


def qk_norm_attention(rows: int, heads: int = 16, keys: int = 4096, d: int = 128) -> KernelGraph:
    """Build LayerNorm on the query and on every key, then one token's attention."""
    g = mi.new_kernel_graph()
    q = g.new_input((rows * heads, 1, d), HALF, name="q")
    k, v = (g.new_input((rows * heads, keys, d), HALF, name=name, constant=True) for name in "kv")
    gq, gk = (
        g.new_input((1, 1, d), HALF, name=name, constant=True) for name in ("gamma_q", "gamma_k")
    )
    keys_t = g.permute(g.layer_norm(k, gk, eps=rivals.EPS), (0, 2, 1))
    g.mark_output(
        g.matmul(
            g.softmax(
                g.mul(g.matmul(g.layer_norm(q, gq, eps=rivals.EPS), keys_t), 1 / math.sqrt(d))
            ),
            v,
        )
    )
    return g


def mla_decode(
    rows: int,
    heads: int = 16,
    keys: int = 4096,
    latent: int = 512,
    nope: int = 128,
    rope: int = 64,
    value: int = 128,
) -> KernelGraph:
    """Build latent attention as transformers writes it. The search moves the up-projections."""
    g = mi.new_kernel_graph()
    qn, qr = (
        g.new_input((rows, heads, 1, nope), HALF, name="q_nope"),
        g.new_input((rows, heads, 1, rope), HALF, name="q_rope"),
    )
    c, kr = (
        g.new_input((rows, 1, keys, n), HALF, name=name, constant=True)
        for name, n in (("latent", latent), ("k_rope", rope))
    )
    wk, wv = (
        g.new_input(
            (1, heads, latent, d),
            HALF,
            strides=(heads * d * latent, d * latent, 1, latent),
            name=name,
            constant=True,
        )
        for name, d in (("w_k", nope), ("w_v", value))
    )
    scores = g.matmul(qn, g.permute(g.matmul(c, wk), (0, 1, 3, 2)))
    scores = g.add(scores, g.matmul(qr, g.permute(kr, (0, 1, 3, 2))))
    g.mark_output(g.matmul(g.softmax(g.mul(scores, 1 / math.sqrt(nope + rope))), g.matmul(c, wv)))
    return g


def ntrans(rows: int, n: int = 4096) -> KernelGraph:
    """Build the residual of nGPT: norm(x + a · (norm(y) − x))."""
    g = mi.new_kernel_graph()
    x, y, a = (g.new_input((rows, n), HALF, name=name) for name in "xya")

    def norm(z: DTensor) -> DTensor:
        return g.div(z, g.sqrt(g.reduction(g.square(z), 1)))

    g.mark_output(norm(g.add(x, g.mul(a, g.sub(norm(y), x)))))
    return g


# A step of a recurrence has the form in which a traced step has it: the state is the first input,
# the next state the first output. Other inputs are those that the libraries' kernels take.

BF16, FP32 = torch.bfloat16, torch.float32


def gated_delta(
    rows: int, key_heads: int = 16, group: int = 2, key: int = 128, value: int = 128
) -> KernelGraph:
    """Build one token's gated delta rule, with a state (key, value) for each value head.

    `group` value heads share a query and a key. Both are normed before.
    """
    g = mi.new_kernel_graph()

    def given(name: str, *dims: int) -> DTensor:
        return g.cast(g.new_input((rows * key_heads, *dims), BF16, name=name), FP32)

    state = g.new_input((rows * key_heads, group, key, value), FP32, name="state")
    log_decay = g.new_input((rows * key_heads, group, 1, 1), FP32, name="log_decay")
    q, k = given("q", 1, key, 1), given("k", 1, key, 1)
    v, beta = given("v", group, 1, value), given("beta", group, 1, 1)
    faded = g.mul(state, g.exp(log_decay))
    delta = g.mul(g.sub(v, g.reduction(g.mul(faded, k), 2)), beta)
    new = g.add(faded, g.mul(k, delta))
    out = g.reduction(g.mul(new, g.mul(q, 1 / math.sqrt(key))), 2)
    g.mark_output(new, g.cast(out, BF16))
    return g


def mamba2(rows: int, heads: int = 64, head_dim: int = 64, state: int = 128) -> KernelGraph:
    """Build one token's scan of Mamba-2, with a state (head_dim, state) for each head.

    All heads share b and c. The result is gated by z.
    """
    g = mi.new_kernel_graph()

    def given(name: str, *dims: int, constant: bool = False) -> DTensor:
        return g.cast(g.new_input(dims, BF16, name=name, constant=constant), FP32)

    old = g.new_input((rows, heads, head_dim, state), FP32, name="state")
    x, z = (given(name, rows, heads, head_dim, 1) for name in "xz")
    dt = given("dt", rows, heads, 1, 1)
    b, c = (given(name, rows, 1, 1, state) for name in "bc")
    a_log, d = (given(name, 1, heads, 1, 1, constant=True) for name in ("a_log", "d"))
    decay = g.exp(g.mul(dt, g.neg(g.exp(a_log))))
    new = g.add(g.mul(old, decay), g.mul(g.mul(dt, b), x))
    y = g.add(g.reduction(g.mul(new, c), 3), g.mul(x, d))
    g.mark_output(new, g.cast(g.mul(y, g.silu(z)), BF16))
    return g


# -- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A block at one batch size.

    Attributes:
        block: The block's name.
        rows: The batch size.
        build: Builds the tensor program.
        target_us: The time to reach.
        rivals: What it is compared with.
        sizes: Other sizes of the program.
        flops: Operations of its products, if they may take longer than its bytes.
        tuned_at: Sizes at which kernels are searched and tuned before they are refitted to the
            row's own.
    """

    block: str
    rows: int
    build: Callable[..., KernelGraph]
    target_us: float
    rivals: tuple[Rival, ...]
    sizes: tuple[tuple[str, Any], ...] = ()
    flops: float = 0.0
    tuned_at: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The block and its rows."""
        return f"{self.block}:{self.rows}"

    def program(self, **changes: Any) -> KernelGraph:
        """Return the tensor program; `changes` replace sizes."""
        return self.build(**{"rows": self.rows, **dict(self.sizes), **changes})

    def floor_us(self, program: KernelGraph) -> float:
        """Return the µs to move every tensor once, or to compute the products if that is longer."""
        return 1e6 * max(
            sum(map(stored_bytes, (*program.inputs, *program.outputs))) / H200.bandwidth,
            self.flops / H200.mma_rate,
        )


def _rows(
    block: str,
    build: Callable[..., KernelGraph],
    against: tuple[Rival, ...],
    targets: dict[int, float],
    flops: float = 0.0,
    **sizes: int,
) -> list[Row]:
    return [
        Row(block, rows, build, us, against, tuple(sizes.items()), flops * rows)
        for rows, us in targets.items()
    ]


#: The target of a row that mostly moves bytes: a share of the read bandwidth. A short kernel may
#: take START_US beyond its floor, to launch and to join partial results.
LONG_SHARE, START_US = 0.75, 5.0


def _at_bandwidth(row: Row) -> Row:
    """Return the row with the target of rows that mostly move bytes."""
    floor = row.floor_us(row.program())
    return replace(row, target_us=max(floor / LONG_SHARE, floor + START_US))


def _recurrence(
    block: str, build: Callable[..., KernelGraph], against: tuple[Rival, ...]
) -> list[Row]:
    return [_at_bandwidth(Row(block, rows, build, 0.0, against)) for rows in (1, 16, 64)]


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        *_rows("norm_linear", norm_linear, rivals.NORM_LINEAR, {1: 10.5, 16: 11.5}),
        *_rows(
            "norm_linear_6144",
            norm_linear,
            rivals.NORM_LINEAR,
            {2: 14.0, 16: 14.5, 32: 15.0},
            n=6144,
        ),
        *_rows("int4_linear", int4_linear, rivals.INT4_LINEAR, {1: 13.0, 4: 13.0, 16: 14.0}),
        *_rows("gated_mlp", gated_mlp, rivals.GATED_MLP, {1: 18.5, 8: 19.0, 16: 20.0}),
        *_rows("lora", lora, rivals.LORA, {1: 11.0, 16: 13.0}),
        *_rows("lora_256", lora, rivals.LORA, {16: 5.5}, k=256),
        *_rows("gqa_decode", gqa_decode, rivals.gqa_decode(), {1: 6.0, 8: 11.0, 16: 19.0}),
        *_rows(
            "gqa_paper",
            gqa_paper,
            rivals.GQA_PAPER,
            {1: 12.0, 8: 20.0, 16: 32.0},
            flops=4.0 * 2 * 256 * 4096 * 64,
        ),
        *_rows("qk_norm_attention", qk_norm_attention, rivals.qk_norm(), {1: 16.0, 8: 78.0}),
        *_rows("mla_decode", mla_decode, rivals.MLA, {1: 15.0, 16: 40.0}),
        *_rows("ntrans", ntrans, rivals.NTRANS, {1: 2.8, 8: 2.8, 16: 2.8}),
        *_recurrence("gated_delta", gated_delta, rivals.gated_delta()),
        *_recurrence("mamba2", mamba2, rivals.MAMBA2),
    )
}


def _long(d: int, keys: int, rows: int, kv_heads: int = 8) -> Row:
    sizes = {"kv_heads": kv_heads, "keys": keys, "d": d, "dtype": torch.bfloat16}
    return _at_bandwidth(
        Row(
            f"attention_d{d}_{keys >> 10}k",
            rows,
            gqa_decode,
            0.0,
            rivals.gqa_decode(kv_heads),
            tuple(sizes.items()),
            tuned_at=(("keys", LONG_SLOTS),),
        )
    )


#: One token's attention over long caches: 32 query heads, 8 key heads.
LONG: dict[str, Row] = {
    row.name: row
    for row in (
        _long(d, keys, rows)
        for d in (64, 128)
        for keys in (8192, 32768, 131072)
        for rows in (1, 8, 64)
    )
}
