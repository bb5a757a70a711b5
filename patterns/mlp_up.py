"""The first half of an MLP without a gate: f(n · w).

n is x, or x normalised by the norm before the MLP.
"""

from __future__ import annotations

import torch

from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.patterns.fragments import activated, normed
from mirage_hf.patterns.lora import BlockAdapters
from mirage_hf.patterns.schema import MlpLayout, Pattern

AXES = {
    "x": "rows k",
    "gamma": "1 k",
    "gamma_bias": "1 k",
    "w": "k n",
    "b": "1 n",
    "y": "rows n",
    "low0": "rows r",
    "b0_up": "r n",
}

LAYOUTS = (
    MlpLayout("StarCoder2", gate="", up="c_fc", down="c_proj", activation="act"),
    MlpLayout("GPT-NeoX", gate="", up="dense_h_to_4h", down="dense_4h_to_h", activation="act"),
    MlpLayout("Phi", gate="", up="fc1", down="fc2", activation="activation_fn"),
    MlpLayout("Nemotron, Arcee", gate="", up="up_proj", down="down_proj", activation="act_fn"),
)


def build(
    rows: int,
    k: int,
    n: int,
    activation: str,
    norm: bool,
    bias: bool,
    eps: float,
    dtype: torch.dtype,
    offset: float = 0.0,
    centred: bool = False,
    norm_bias: bool = False,
    lora: BlockAdapters | None = None,
) -> KernelGraph:
    """Return the program of the first half of an MLP without a gate.

    Args:
        rows: The number of rows.
        k: The width of x.
        n: The outputs of the linear.
        activation: One of `parts.activations()`.
        norm: Whether x is normalised first.
        bias: Whether the linears have biases.
        eps: The epsilon of the norm.
        dtype: The dtype of everything.
        offset: As in `parts.normed`.
        centred: As in `parts.normed`.
        norm_bias: Whether the norm has a bias.
        lora: The adapters of the linears, if they have any.
    """
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    lows = lora.low_inputs(g, rows, (n,)) if lora is not None else []
    x = normed(g, x, "gamma", eps, offset, centred, norm_bias) if norm else x
    y = g.matmul(x, g.new_input((k, n), dtype, strides=(1, k), name="w", constant=True))
    if bias:
        y = g.add(y, g.new_input((1, n), dtype, name="b", constant=True))
    if lora is not None:
        (y,) = lora.add_to_each(g, [y], lows)
    g.mark_output(activated(g, y, activation))
    return g


MLP_UP = Pattern("mlp_up", AXES, build)
