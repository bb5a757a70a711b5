"""The tensor programs that the superoptimizer must handle, written with its public API.

Each builder takes the module (`import mirage_hf as mi`) and sizes, and returns a kernel graph.
`PROGRAMS` lists them with the sizes of the original paper or of a real model, and a number of
kernels. `SMALL` has reduced sizes for tests.
"""

import math


def rms_norm_linear(mi, rows=16, k=4096, n=4096, weight=True, dtype=None):
    g = mi.new_kernel_graph()
    dt = dtype or mi.float16
    x = g.new_input(dims=(rows, k), dtype=dt)
    gamma = g.new_input(dims=(1, k), dtype=dt) if weight else None
    w = g.new_input(dims=(k, n), dtype=dt)
    o = g.matmul(g.rms_norm(x, gamma) if weight else g.rms_norm(x), w)
    g.mark_output(o)
    return g


def gqa_exp(mi, heads=2, q=256, keys=4096, d=64):
    """Softmax spelled out, without mark_output: a result that nothing reads is an output."""
    g = mi.new_graph()
    Q = g.new_input(dims=(heads, q, d), dtype=mi.float16)
    K = g.new_input(dims=(heads, d, keys), dtype=mi.float16)
    V = g.new_input(dims=(heads, keys, d), dtype=mi.float16)
    E = g.exp(g.matmul(Q, K))
    g.matmul(g.div(E, g.reduction(E, 2)), V)
    return g


def attention(mi, heads=64, q=1, keys=4096, d=128):
    g = mi.new_kernel_graph()
    Q = g.new_input(dims=(heads, q, d), dtype=mi.float16)
    K = g.new_input(dims=(heads, d, keys), dtype=mi.float16)
    V = g.new_input(dims=(heads, keys, d), dtype=mi.float16)
    g.mark_output(g.matmul(g.softmax(g.matmul(Q, K)), V))
    return g


def qk_norm_attention(mi, heads=16, q=1, keys=4096, d=128, norm="layer_norm"):
    g = mi.new_kernel_graph()
    Q = g.new_input(dims=(heads, q, d), dtype=mi.float16)
    K = g.new_input(dims=(heads, keys, d), dtype=mi.float16)
    V = g.new_input(dims=(heads, keys, d), dtype=mi.float16)
    gq, gk = (g.new_input(dims=(1, 1, d), dtype=mi.float16) for _ in range(2))
    n = getattr(g, norm)
    s = g.mul(g.matmul(n(Q, gq), g.permute(n(K, gk), (0, 2, 1))), 1 / math.sqrt(d))
    g.mark_output(g.matmul(g.softmax(s), V))
    return g


def lora(mi, rows=16, k=256, n=4096, r=16):
    g = mi.new_kernel_graph()
    X = g.new_input(dims=(rows, k), dtype=mi.float16)
    W = g.new_input(dims=(k, n), dtype=mi.float16)
    A = g.new_input(dims=(k, r), dtype=mi.float16)
    B = g.new_input(dims=(r, n), dtype=mi.float16)
    D = g.matmul(X, A)
    E = g.matmul(D, B)
    C = g.matmul(X, W)
    g.mark_output(g.add(C, E))
    return g


def gated_mlp(mi, rows=8, k=4096, n=4096, norm=False):
    g = mi.new_kernel_graph()
    X = g.new_input(dims=(rows, k), dtype=mi.float16)
    W1 = g.new_input(dims=(k, n), dtype=mi.float16)
    W2 = g.new_input(dims=(k, n), dtype=mi.float16)
    x = g.rms_norm(X) if norm else X
    g.mark_output(g.mul(g.silu(g.matmul(x, W1)), g.matmul(x, W2)))
    return g


def mla_decode(mi, batch=1, heads=16, keys=4096, latent=512, nope=128, rope=64, v=128):
    """Latent attention as stock transformers computes it: keys and values are expanded again.

    The search must move the up-projections.
    """
    g = mi.new_kernel_graph()
    qn = g.new_input(dims=(batch, heads, 1, nope), dtype=mi.float16)
    qr = g.new_input(dims=(batch, heads, 1, rope), dtype=mi.float16)
    c = g.new_input(dims=(batch, 1, keys, latent), dtype=mi.float16)
    kr = g.new_input(dims=(batch, 1, keys, rope), dtype=mi.float16)
    wk = g.new_input(dims=(1, heads, latent, nope), dtype=mi.float16)
    wv = g.new_input(dims=(1, heads, latent, v), dtype=mi.float16)
    k = g.matmul(c, wk)
    s = g.add(g.matmul(qn, g.permute(k, (0, 1, 3, 2))), g.matmul(qr, g.permute(kr, (0, 1, 3, 2))))
    p = g.softmax(g.mul(s, 1 / math.sqrt(nope + rope)))
    g.mark_output(g.matmul(p, g.matmul(c, wv)))
    return g


def ntrans(mi, rows=8, n=4096):
    """nGPT's normalized residual: norm(x + alpha * (norm(y) - x)), norm(z) = z / sqrt(sum z^2)."""
    g = mi.new_kernel_graph()
    x, y, a = (g.new_input(dims=(rows, n), dtype=mi.float16) for _ in range(3))

    def norm(z):
        return g.div(z, g.sqrt(g.reduction(g.square(z), 1)))

    g.mark_output(norm(g.add(x, g.mul(a, g.sub(norm(y), x)))))
    return g


# name: (builder, sizes, k): a µGraph with at most k kernels must be among the results; ranking is
# by cost, not by count
PROGRAMS = {
    "rms_norm_linear": (rms_norm_linear, {}, 1),
    "rms_norm_linear_plain": (rms_norm_linear, dict(weight=False), 1),
    "rms_norm_linear_paper": (rms_norm_linear, dict(rows=2, n=6144), 1),
    "gqa_paper": (gqa_exp, {}, 2),
    "attention_decode": (attention, {}, 2),
    "qk_norm_attention": (qk_norm_attention, {}, 2),
    "lora_paper": (lora, {}, 1),
    "lora_4096": (lora, dict(rows=1, k=4096), 1),
    "gated_mlp": (gated_mlp, {}, 1),
    "norm_gated_mlp": (gated_mlp, dict(rows=1, norm=True), 1),
    "mla_decode": (mla_decode, {}, 3),
    "ntrans": (ntrans, {}, 1),
}


# the same programs at sizes that a unit test can run
SMALL = {
    "rms_norm_linear": dict(rows=3, k=64, n=48),
    "rms_norm_linear_plain": dict(rows=3, k=64, n=48, weight=False),
    "rms_norm_linear_paper": dict(rows=2, k=40, n=96),
    "gqa_paper": dict(heads=2, q=5, keys=24, d=8),
    "attention_decode": dict(heads=4, q=1, keys=24, d=8),
    "qk_norm_attention": dict(heads=3, q=1, keys=24, d=8),
    "lora_paper": dict(rows=4, k=32, n=40, r=4),
    "lora_4096": dict(rows=1, k=32, n=40, r=4),
    "gated_mlp": dict(rows=4, k=32, n=40),
    "norm_gated_mlp": dict(rows=1, k=32, n=40, norm=True),
    "mla_decode": dict(heads=2, keys=12, latent=16, nope=8, rope=4, v=8),
    "ntrans": dict(rows=3, n=40),
}


def build(mi, name, small=True):
    """Return the program called `name`, at its reduced sizes unless told otherwise."""
    builder, sizes, _ = PROGRAMS[name]
    return builder(mi, **(sizes | (SMALL[name] if small else {})))
