"""Searched and proven fused GPU kernels: a tensor superoptimizer, and `optimize` for transformers.

Make a Hugging Face model use fused kernels, and take them out again:

    import mirage_hf

    mirage_hf.optimize(model)                # in place, for decoding one sequence at a time
    model.generate(**inputs)                 # decoding steps run searched kernels
    print(model.mirage.report)               # which module runs which kernel, and how fast
    mirage_hf.restore(model)                 # the stock model again, bit for bit

Search for kernels of a tensor program of your own:

    graph = mirage_hf.new_kernel_graph()
    x, w = graph.new_input((1, 4096)), graph.new_input((4096, 4096))
    graph.mark_output(graph.matmul(graph.rms_norm(x), w))
    result = mirage_hf.superoptimize(graph)  # µGraphs that are proven equal, best first
    [y] = result([x_tensor, w_tensor])
"""

from __future__ import annotations

from torch import bfloat16, float16, float32

from mirage_hf.api import optimize, optimized, restore
from mirage_hf.attention_interface import attention_report
from mirage_hf.codegen import cuda as _cuda  # noqa: F401  registers UGraph.generate_cuda_program
from mirage_hf.errors import Rejected
from mirage_hf.experts_interface import experts_report
from mirage_hf.graph.builder import BlockGraphBuilder, new_block_graph
from mirage_hf.graph.dim import Dim
from mirage_hf.graph.json_format import load_graph, load_ugraph
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline.handwritten import ugraph
from mirage_hf.pipeline.superoptimizer import SearchResult, superoptimize
from mirage_hf.render import picture as _picture  # noqa: F401  registers UGraph.visualize
from mirage_hf.verify.accept import verify
from mirage_hf.verify.verdict import Accepted, Verdict

new_graph = new_kernel_graph

__version__ = "0.1.0"

__all__ = [
    "Accepted",
    "BlockGraphBuilder",
    "Dim",
    "KernelGraph",
    "Rejected",
    "SearchResult",
    "UGraph",
    "Verdict",
    "attention_report",
    "bfloat16",
    "experts_report",
    "float16",
    "float32",
    "load_graph",
    "load_ugraph",
    "new_block_graph",
    "new_graph",
    "new_kernel_graph",
    "optimize",
    "optimized",
    "restore",
    "superoptimize",
    "ugraph",
    "verify",
]
