"""A norm and the linears that read it, as one packed product.

For q, k and v it is norm(x) · [wq | wk | wv] (+ [bq | bk | bv]). Families without the norm have the
product alone. A head may scale its logits, and bound them by a softcap.
"""

from __future__ import annotations

import torch

from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.patterns.fragments import normed
from mirage_hf.patterns.lora import BlockAdapters
from mirage_hf.patterns.schema import Pattern

#: n is the sum of n…. Each weight keeps its own memory, and views split the packed output.
AXES = {
    "x": "rows k",
    "gamma": "1 k",
    "gamma_bias": "1 k",
    "w…": "k n…",
    "b…": "1 n…",
    "y": "rows n",
    "low…": "rows r n…",
    "b…_up": "r n…",
}


def build(
    rows: int,
    k: int,
    n: tuple[int, ...],
    bias: bool,
    eps: float,
    dtype: torch.dtype,
    norm: bool = True,
    offset: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    centred: bool = False,
    norm_bias: bool = False,
    lora: BlockAdapters | None = None,
) -> KernelGraph:
    """Return the program of a norm and the linears that read it.

    Args:
        rows: The number of rows.
        k: The width of x.
        n: The outputs of each linear.
        bias: Whether the linears have biases.
        eps: The epsilon of the norm.
        dtype: The dtype of everything.
        norm: Whether x is normalised first.
        offset: As in `parts.normed`.
        scale: What the product is multiplied by (a head's logits scaling).
        softcap: The bound of the scaled product, cap · tanh(y / cap), or None.
        centred: As in `parts.normed`.
        norm_bias: Whether the norm has a bias.
        lora: The adapters of the linears, if they have any.
    """
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    lows = lora.low_inputs(g, rows, n) if lora is not None else []
    if norm:
        x = normed(g, x, "gamma", eps, offset, centred, norm_bias)
    weights = [
        g.new_input((k, width), dtype, strides=(1, k), name=f"w{i}", constant=True)
        for i, width in enumerate(n)
    ]
    biases = (
        [g.new_input((1, width), dtype, name=f"b{i}", constant=True) for i, width in enumerate(n)]
        if bias
        else []
    )
    y = g.matmul(x, g.concat(weights, dim=1) if len(n) > 1 else weights[0])
    if bias:
        y = g.add(y, g.concat(biases, dim=1) if len(n) > 1 else biases[0])
    if lora is not None:
        if lora.packed:
            y = lora.add_to_packed(g, y, n, lows)
        else:
            (y,) = lora.add_to_each(g, [y], lows)
    if scale != 1:
        y = g.mul(y, scale)
    if softcap is not None:
        y = g.mul(g.tanh(g.mul(y, 1 / softcap)), softcap)
    g.mark_output(y)
    return g


RMS_NORM_LINEAR = Pattern("rms_norm_linear", AXES, build)
