"""What tests of `mirage_hf.formats` share: decoding, programs of a coding, and wrong decodings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from mirage_hf.formats import CodedWeight, coded_weight
from mirage_hf.formats.coding import Coding, write_joined
from mirage_hf.graph.coded import is_packed
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify.accept import accept


def read(module: torch.nn.Module) -> CodedWeight:
    """Return the weight of a module that must be readable."""
    found = coded_weight(module)
    assert isinstance(found, CodedWeight), found
    return found


def decoded(coding: Coding, tensors) -> torch.Tensor:
    """Return the weight (rows, columns) that a program decodes."""
    g = new_kernel_graph()
    _, weight = coding.write(g)
    g.mark_output(weight)
    return run_kernel_graph(g, list(tensors))[0].T


def linear(coding: Coding, rows: int, norm: bool) -> KernelGraph:
    """Return x · Wᵀ, after RMSNorm if `norm`."""
    return joined([coding], rows, norm)


def joined(codings: Sequence[Coding], rows: int, norm: bool) -> KernelGraph:
    """Return x · Wᵀ, after RMSNorm if `norm`, for the rows of several weights."""
    g, coding = new_kernel_graph(), codings[0]
    x = g.new_input((rows, coding.columns), coding.dtype)
    if norm:
        x = g.rms_norm(x, g.new_input((1, coding.columns), coding.dtype, constant=True))
    g.mark_output(g.matmul(x, write_joined(codings, g)[1]))
    return g


def proven_as_one_kernel(program: KernelGraph) -> bool:
    """Return whether the search finds a kernel that computes all, and proves it."""
    found, _ = search(program, SearchOptions(threads=1))
    single = [r for r in found if r.ugraph.num_kernels == 1]
    return bool(single) and bool(accept(single, keep=1).candidates)


def lies_in_module(weight: CodedWeight, module: torch.nn.Module) -> bool:
    """Return whether the tensors of a weight are memory of the module."""
    from mirage_hf.formats import held_tensors

    own = {t.untyped_storage().data_ptr() for t in held_tensors(module)}
    return all(t.untyped_storage().data_ptr() in own for t in weight.tensors)


def mutants(weight: CodedWeight) -> Iterator[tuple[str, Coding, list[torch.Tensor]]]:
    """Yield wrong decodings of a weight: a name, the coding and the tensors that it reads."""
    coding, tensors = weight.coding, list(weight.tensors)
    if is_packed(coding.codes.dtype):
        words, low = tensors[0], 0x0F0F0F0F
        turned = ((words >> 4) & low) | ((words & low) << 4)
        yield "nibbles in the other order", coding, [turned, *tensors[1:]]
    if len(set(coding.scales.dims)) > 1:
        dim = max(range(len(coding.scales.dims)), key=lambda d: coding.scales.dims[d])
        moved = tensors[1].roll(1, dim)
        yield "scales of another row or group", coding, [tensors[0], moved, *tensors[2:]]
    if coding.zeros is not None:
        yield "no zero points", replace(coding, zeros=None), tensors[:2]
        moved = tensors[2].roll(1, 0)
        yield "zero points of another row", coding, [*tensors[:2], moved]
    if coding.shifts is not None:
        yield "nothing is added", replace(coding, shifts=None), tensors[:-1]
        yield "what is added to another row", coding, [*tensors[:-1], tensors[-1].roll(1, 0)]
    yield "another zero point", replace(coding, zero=coding.zero + 1), tensors


def caught(weight: CodedWeight, expected: torch.Tensor) -> dict[str, bool]:
    """Return for each mutant whether it decodes to something else."""
    return {
        name: not torch.equal(decoded(coding, tensors), expected)
        for name, coding, tensors in mutants(weight)
    }
