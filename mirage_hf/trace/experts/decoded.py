"""Run experts without a kernel of their own: decode weights, and multiply by torch's products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mirage_hf.formats.coding import Coding, as_dtype, write_decoded
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.trace.experts.form import ExpertsForm, Linear, viewed

#: Runs a program that decodes weights, on its inputs.
Decoder = Callable[[list[Tensor]], list[Tensor]]
#: Decoders by coding, and by how many experts each decodes at once.
Decoders = Mapping[tuple[Coding, int], Decoder]

#: How many bytes of weights are decoded at once, unless one expert has more.
_DECODED_BYTES = 1 << 28

#: torch's product of sorted rows by the weights of their experts. It reads the numbers of rows on
#: the GPU. None in torch before 2.10.
_GROUPED_MM: Any = getattr(F, "grouped_mm", None)


def may_be_grouped(first: Linear, second: Linear) -> bool:
    """Return whether torch groups the products of two linears without the host.

    It does for bfloat16 on GPUs of compute capability 9 and 10, if the rows of each tensor begin at
    multiples of 16 bytes. On other GPUs it reads the numbers of rows.
    """
    tensor = first.tensors[0]
    dtype = tensor.dtype if first.coding is None else first.coding.dtype
    sizes = (first.rows, first.columns, second.rows, second.columns)
    is_apt = not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device)[0] in (9, 10)
    is_apt &= _GROUPED_MM is not None and dtype is torch.bfloat16
    return is_apt and not any(size % 8 for size in sizes)


def experts_at_once(linear: Linear) -> int:
    """Return how many experts' weights are decoded at once for grouped products.

    They divide all experts.
    """
    experts = len(linear.tensors[0])
    if linear.coding is None:
        return experts
    most = max(1, _DECODED_BYTES // (linear.rows * linear.columns * linear.coding.dtype.itemsize))
    return max(n for n in range(1, experts + 1) if experts % n == 0 and n <= most)


def decoding_program(linear: Linear, count: int) -> KernelGraph:
    """Return the program that decodes so many experts' weights: (experts, outputs, inputs)."""
    coding, graph = linear.coding, new_kernel_graph()
    assert coding is not None
    tensors = {}
    for role, stored in zip(coding.roles, linear.stacked, strict=True):
        held = replace(stored, dims=(count, *stored.dims[1:]))
        x = graph.new_input(held.dims, held.dtype, held.strides, constant=True)
        tensors[role] = x if role == "order" else as_dtype(graph, x, coding.computes)
    shape = count, linear.rows, linear.columns
    graph.mark_output(write_decoded(coding, graph, tensors, shape))
    return graph


def run_decoded(
    form: ExpertsForm,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    decoders: Decoders = MappingProxyType({}),
) -> Tensor:
    """Compute the sum of the chosen experts of each token, times their weights.

    While a CUDA graph is captured, no index can be read on the host, so all experts are decoded.

    Args:
        form: The experts.
        x: (tokens, width).
        index: (tokens, chosen). An index that is the number of experts chooses none.
        weights: (tokens, chosen).
        decoders: Runs decoding programs. Others run op by op.
    """
    experts = range(len(form.first.tensors[0]))
    needed: Sequence[int] = experts
    is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if not is_captured:
        # an index that is not of an expert may be one of another rank
        needed = [expert for expert in index.unique().tolist() if expert in experts]
    if x.dtype is torch.bfloat16 and len(x) and may_be_grouped(form.first, form.second):
        return _run_grouped(form, x, index, weights, needed, decoders)
    return _run_one_by_one(form, x, index, weights, needed, decoders, is_captured)


def _run_grouped(
    form: ExpertsForm,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    needed: Sequence[int],
    decoders: Decoders,
) -> Tensor:
    """Compute experts by products of rows that are sorted by their experts."""
    tokens, chosen = index.shape
    count = len(form.first.tensors[0])
    experts, order = index.reshape(-1).sort(stable=True)
    numbers = torch.arange(count + 1, device=x.device, dtype=experts.dtype)
    starts = torch.searchsorted(experts, numbers)
    scales = weights.reshape(-1)[order, None]
    given = x[order // chosen]
    if form.scales_inputs:
        given = (given * scales).to(x.dtype)
    y = form.gate(_grouped(form.first, given, experts, starts, needed, decoders))
    y = _grouped(form.second, y.to(x.dtype), experts, starts, needed, decoders)
    y = y.float() if form.scales_inputs else (y * scales).float()
    y = y.masked_fill(((experts < 0) | (experts >= count))[:, None], 0.0)
    return torch.empty_like(y).index_copy_(0, order, y).view(tokens, chosen, -1).sum(1).to(x.dtype)


def _grouped(
    linear: Linear,
    x: Tensor,
    experts: Tensor,
    starts: Tensor,
    needed: Sequence[int],
    decoders: Decoders,
) -> Tensor:
    """Return the products of rows by the weights of their experts, plus biases.

    Args:
        linear: The linear.
        x: The rows, sorted by expert.
        experts: The expert of each row. Results of rows without an expert are any numbers.
        starts: The first row of each expert, and the row after the last one.
        needed: Experts that rows may have.
        decoders: As for `run_decoded`.
    """
    at_once, count = experts_at_once(linear), len(linear.tensors[0])
    places = torch.arange(len(x), device=x.device)
    y = x.new_zeros(len(x) + 1, linear.rows)  # the last row takes what is not kept
    for first in sorted({expert - expert % at_once for expert in needed}):
        ends = starts[first + 1 : first + at_once + 1] - starts[first]
        rows = (places + starts[first]) % len(x)  # the rows of these experts come first
        weight = decoded_weights(linear, first, at_once, decoders)
        product = _GROUPED_MM(x[rows], weight.mT, offs=ends.int())
        del weight  # before the next ones are decoded
        y.index_copy_(0, rows.masked_fill(places >= ends[-1], len(x)), product)
    if linear.bias is None:
        return y[:-1]
    return y[:-1] + linear.bias[experts.clamp(0, count - 1)]


def _run_one_by_one(
    form: ExpertsForm,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    needed: Sequence[int],
    decoders: Decoders,
    is_captured: bool,
) -> Tensor:
    """Compute one expert after the other.

    While a graph is captured, each takes all tokens. Those that did not choose it weigh 0.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in needed:
        is_chosen = index == expert
        weight = (is_chosen * weights).sum(-1, keepdim=True)
        tokens: Any = slice(None) if is_captured else is_chosen.any(-1).nonzero()[:, 0]
        given = x[tokens]
        if form.scales_inputs:
            given = (given * weight[tokens]).to(x.dtype)
        y = form.gate(_applied(form.first, expert, given, decoders))
        y = _applied(form.second, expert, y.to(x.dtype), decoders)
        out[tokens] += (y if form.scales_inputs else y * weight[tokens]).float()
    return out.to(x.dtype)


def _applied(linear: Linear, expert: int, x: Tensor, decoders: Decoders) -> Tensor:
    y = F.linear(x, decoded_weights(linear, expert, 1, decoders)[0])
    return y if linear.bias is None else y + linear.bias[expert]


def decoded_weights(linear: Linear, first: int, count: int, decoders: Decoders) -> Tensor:
    """Return the weights (experts, outputs, inputs) of some experts.

    Args:
        linear: The linear.
        first: The first of these experts.
        count: How many experts.
        decoders: As for `run_decoded`.
    """
    experts = slice(first, first + count)
    if linear.coding is None:
        weight = linear.tensors[0][experts]
        return weight.mT if linear.is_transposed else weight
    views = [viewed(x, s)[experts] for x, s in zip(linear.tensors, linear.stacked, strict=True)]
    run = decoders.get((linear.coding, count))
    return (run(views) if run else run_kernel_graph(decoding_program(linear, count), views))[0]
