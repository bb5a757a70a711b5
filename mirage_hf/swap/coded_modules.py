"""Let the modules of a model whose weights are codes decode their own weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mirage_hf.errors import CodegenError, OptimizeError, Rejected, SearchError, VerificationError
from mirage_hf.formats import CodedWeight, Coding, coded_weight, decoding_hooks
from mirage_hf.formats.experts import CodedExperts, coded_experts, replaced_forward
from mirage_hf.formats.parts import in_parts
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.ops.dtypes import COMPUTE_DTYPES
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.swap.coded_forward import (
    DECODED_BYTES,
    CodedBinding,
    Decoding,
    decoding_program,
)
from mirage_hf.swap.experts_forward import CodedExpertsBinding
from mirage_hf.swap.ledger import Ledger
from mirage_hf.swap.own_forward import FORWARD_KEY, Binding, bind_forward
from mirage_hf.swap.plain_copies import take_attribute, take_hook
from mirage_hf.trace.experts.decoded import Decoder, experts_at_once, may_be_grouped
from mirage_hf.trace.experts.decoded import decoding_program as experts_program
from mirage_hf.trace.experts.form import linear_of


def bind_coded_modules(model: nn.Module, ledger: Ledger, resolve: Callable[..., Resolved]) -> None:
    """Let each module whose weights are codes decode its own in calls without a kernel.

    Args:
        model: The model.
        ledger: Takes what undoes it.
        resolve: Finds the kernel of a program, as `resolver.resolve`.

    Raises:
        OptimizeError: A weight cannot be decoded, or its library computes other numbers. One
            linear of each coding is compared. Or codes cannot be put in the plain order and back.
    """
    found: dict[Coding, Decoding] = {}
    decoders: dict[Coding, Decoder] = {}
    of_experts: dict[tuple[Coding, int], Decoder] = {}
    dtype = dtype_of(model)
    modules = [*model.named_modules()]
    weights = [(path, m, coded_weight(m, dtype)) for path, m in modules]
    for module, name in decoding_hooks(model):
        ledger.undos.append(take_hook(module, name))
    for path, module, weight in weights:
        if not isinstance(weight, CodedWeight):
            continue
        coding = weight.coding
        is_first = coding not in found
        if is_first:
            parts = in_parts(coding, DECODED_BYTES)
            for part in parts:
                if part.coding not in decoders:
                    program = decoding_program(part.coding)
                    decoders[part.coding] = _decoder(path, program, resolve)
            found[coding] = Decoding(parts, tuple(decoders[part.coding] for part in parts))
        binding = CodedBinding(weight=weight, decoding=found[coding])
        difference = binding.difference(module) if is_first else None
        if difference is not None:
            raise OptimizeError(
                f"optimize: {path}: our decoding of its codes gives other results than its "
                f"library (relative difference {difference:.2g}); its weights are damaged, or "
                "of a version that is read wrongly: load the model again, or leave it stock"
            )
        ledger.undos.append(bind_forward(module, binding))
    for path, module in modules:
        experts = coded_experts(module, dtype)
        if isinstance(experts, CodedExperts):
            linears = linear_of(experts.first), linear_of(experts.second)
            are_grouped = may_be_grouped(*linears)
            for stack, linear in zip((experts.first, experts.second), linears, strict=True):
                count = experts_at_once(linear) if are_grouped else 1
                key = stack.coding, count
                if key not in of_experts:
                    program = experts_program(linear, count)
                    of_experts[key] = _decoder(path, program, resolve)
            ledger.undos.append(bind_forward(module, CodedExpertsBinding(decoders=of_experts)))
            _put_in_plain_order(path, experts, module.__dict__[FORWARD_KEY])
    for _, module in modules:
        bindings = [child.__dict__.get(FORWARD_KEY) for child in module.children()]
        of_child = next((b for b in bindings if isinstance(b, CodedExpertsBinding)), None)
        if of_child is not None and replaced_forward(module):
            # the forward of its class calls the router and the experts
            of_child.undos.append(take_attribute(module, "forward"))


def _put_in_plain_order(path: str, experts: CodedExperts, binding: Binding) -> None:
    """Rewrite codes that are in an order of their library's, as long as experts are bound.

    Raises:
        OptimizeError: The library cannot convert them back.
    """
    for stack in (experts.first, experts.second):
        why = stack.swizzled and stack.swizzled.put_in_plain_order(binding.undos)
        if why:
            raise OptimizeError(
                f"optimize: {path}: {why}; load the model with Mxfp4Config(dequantize=True)"
            )


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype in which a model computes: its own, or that of its first float weight."""
    own = getattr(model, "dtype", None)
    if isinstance(own, torch.dtype) and own in COMPUTE_DTYPES:
        return own
    floats = (p.dtype for p in model.parameters() if p.dtype in COMPUTE_DTYPES)
    return next(floats, torch.bfloat16)


def unread_experts(model: nn.Module) -> str:
    """Return why codes of experts are not read, by the first ones. Empty if there are none."""
    for path, module in model.named_modules():
        found = coded_experts(module)
        if isinstance(found, Rejected):
            return f"the codes of {path} are not read: {found.reason}"
    return ""


def _decoder(path: str, program: KernelGraph, resolve: Callable[..., Resolved]) -> Decoder:
    """Return what runs the program that decodes a module's weights.

    Raises:
        OptimizeError: It cannot be decoded.
    """
    try:
        return resolve(program, pattern="decoding").run
    except (SearchError, VerificationError, CodegenError) as error:
        raise OptimizeError(f"optimize: {path} cannot be decoded: {error}") from None
