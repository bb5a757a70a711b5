"""Searched and proven fused GPU kernels: a tensor superoptimizer, and `optimize(model)` for Hugging Face models."""
from __future__ import annotations

from torch import bfloat16, float16, float32

from mirage_hf.api import optimize, optimized, restore
from mirage_hf.graph.json_format import load_graph, load_ugraph
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.graph.symbolic import Dim
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.superoptimizer import SearchResult, superoptimize

new_graph = new_kernel_graph

__version__ = "0.1.0"

__all__ = ["Dim", "KernelGraph", "SearchResult", "UGraph", "bfloat16", "float16", "float32", "load_graph", "load_ugraph", "new_graph",
           "new_kernel_graph", "optimize", "optimized", "restore", "superoptimize"]
