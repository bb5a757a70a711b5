"""The first half of a gated MLP: f(n · w_gate) × (n · w_up), where n is x, or x normalised by the norm before it."""

from __future__ import annotations

import torch

from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.patterns.lora import BlockAdapters
from mirage_hf.patterns.parts import activated, normed
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
    """`offset`, `centred`, `norm_bias`: what the norm is, as in `parts.normed`."""
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    lows = lora.low_inputs(g, rows, (n, n)) if lora is not None else []
    y = normed(g, x, "gamma", eps, offset, centred, norm_bias) if norm else x
    halves = []
    for name in ("gate", "up"):
        half = g.matmul(
            y, g.new_input((k, n), dtype, strides=(1, k), name=f"w_{name}", constant=True)
        )
        halves.append(
            g.add(half, g.new_input((1, n), dtype, name=f"b_{name}", constant=True))
            if bias
            else half
        )
    halves = halves if lora is None else lora.apart(g, halves, lows)
    g.mark_output(g.mul(activated(g, halves[0], activation), halves[1]))
    return g


GATED_MLP = Pattern("gated_mlp", AXES, build)
