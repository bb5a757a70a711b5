"""Decoder layers as kernel graphs, spelled as transformers spells them.

They use reshape, permute, rotary embedding and grouped heads.
"""

import math


def decoder_layer(
    mi,
    hidden=2048,
    heads=32,
    kv=8,
    ffn=8192,
    tokens=1,
    past=0,
    sandwich=False,
    dtype="float16",
    swapped=False,
):
    """Build a Llama layer (two norms), or with `sandwich` a Gemma layer (four norms).

    It has `tokens` new rows after `past` cached ones. `swapped` commutes operands and computes
    values before queries; the function is the same.
    """
    g = mi.new_kernel_graph()
    d, group, keys = hidden // heads, heads // kv, past + tokens

    def weight(k, n, name):
        return g.new_input((k, n), dtype, strides=(1, k), name=name)

    def two(op, a, b):
        return op(b, a) if swapped else op(a, b)

    def by_head(x, n):
        return g.permute(g.reshape(x, (tokens, n, d)), (1, 0, 2))

    x = g.new_input((tokens, hidden), dtype, name="x")
    cos, sin = (g.new_input((tokens, d), dtype, name=n) for n in ("cos", "sin"))
    gammas = [
        g.new_input((1, hidden), dtype, name=f"gamma{n}") for n in range(4 if sandwich else 2)
    ]
    wq, wk, wv, wo = (
        weight(*size, name)
        for size, name in (
            ((hidden, heads * d), "wq"),
            ((hidden, kv * d), "wk"),
            ((hidden, kv * d), "wv"),
            ((heads * d, hidden), "wo"),
        )
    )
    gate, up, down = (
        weight(hidden, ffn, "gate"),
        weight(hidden, ffn, "up"),
        weight(ffn, hidden, "down"),
    )
    mask = g.new_input((1, 1, tokens, keys), dtype, name="mask")
    cached = (
        [g.new_input((kv, past, d), dtype, name=n) for n in ("past_k", "past_v")] if past else []
    )
    h = g.rms_norm(x, gammas[0])
    made = {}
    for name, w, n in (("v", wv, kv), ("k", wk, kv), ("q", wq, heads))[:: 1 if swapped else -1]:
        made[name] = by_head(g.matmul(h, w), n)
    q, k, v = g.rope(made["q"], cos, sin), g.rope(made["k"], cos, sin), made["v"]
    if past:
        k, v = g.concat([cached[0], k], 1), g.concat([cached[1], v], 1)
    q4, k4, v4 = (
        g.reshape(t, dims)
        for t, dims in ((q, (kv, group, tokens, d)), (k, (kv, 1, keys, d)), (v, (kv, 1, keys, d)))
    )
    scores = two(g.add, g.mul(g.matmul(q4, g.permute(k4, (0, 1, 3, 2))), 1 / math.sqrt(d)), mask)
    a = g.reshape(g.matmul(g.softmax(scores), v4), (heads, tokens, d))
    o = g.matmul(g.reshape(g.permute(a, (1, 0, 2)), (tokens, heads * d)), wo)
    r = two(g.add, x, g.rms_norm(o, gammas[2]) if sandwich else o)
    n = g.rms_norm(r, gammas[1])
    if swapped:
        right = g.matmul(n, up)
    left = (g.gelu_tanh if sandwich else g.silu)(g.matmul(n, gate))
    m = g.matmul(two(g.mul, left, right if swapped else g.matmul(n, up)), down)
    g.mark_output(
        two(g.add, r, g.rms_norm(m, gammas[3]) if sandwich else m), *((k, v) if past else ())
    )
    return g
