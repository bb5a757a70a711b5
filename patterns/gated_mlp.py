"""The first half of a gated MLP: f(n · w_gate) × (n · w_up).

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
    "w_gate": "k n",
    "b_gate": "1 n",
    "w_up": "k n",
    "b_up": "1 n",
    "y": "rows n",
    "low…": "rows r",
    "b…_up": "r n",
}

LAYOUTS = (
    MlpLayout(
        "Llama, Mistral, Qwen, Granite, Gemma, OLMo, SmolLM3, EXAONE4, ERNIE 4.5, StableLM, Cohere",
        "gate_proj",
        "up_proj",
        "down_proj",
        "act_fn",
    ),
    MlpLayout("Phi3, GLM, GLM4", "gate_up_proj", "gate_up_proj", "down_proj", "activation_fn"),
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
    """Return the program of the first half of a gated MLP.

    Args:
        rows: The number of rows.
        k: The width of x.
        n: The outputs of gate and of up.
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
    lows = lora.low_inputs(g, rows, (n, n)) if lora is not None else []
    y = normed(g, x, "gamma", eps, offset, centred, norm_bias) if norm else x
    halves = []
    for name in ("gate", "up"):
        weight = g.new_input((k, n), dtype, strides=(1, k), name=f"w_{name}", constant=True)
        half = g.matmul(y, weight)
        if bias:
            half = g.add(half, g.new_input((1, n), dtype, name=f"b_{name}", constant=True))
        halves.append(half)
    if lora is not None:
        halves = lora.add_to_each(g, halves, lows)
    gate, up = halves
    g.mark_output(g.mul(activated(g, gate, activation), up))
    return g


GATED_MLP = Pattern("gated_mlp", AXES, build)
