"""Compare the inputs and outputs of a program and of its kernels."""

from __future__ import annotations

from mirage_hf import errors
from mirage_hf.errors import Rejected
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.ops import table


def interface_differs(
    program: KernelGraph, kernels: KernelGraph, *, output_strides: bool = True
) -> Rejected | None:
    """Return the first difference between the inputs and outputs of two graphs, or None.

    Args:
        program: The program.
        kernels: The kernel graph that should compute it.
        output_strides: Whether outputs must have the same strides.
    """
    for what, ours, theirs in (
        ("input", kernels.inputs, program.inputs),
        ("output", kernels.outputs, program.outputs),
    ):
        if len(ours) != len(theirs):
            return Rejected(f"the kernels have {len(ours)} {what}s, the program has {len(theirs)}")
        with_strides = what == "input" or output_strides
        for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if _interface(a, with_strides) != _interface(b, with_strides):
                return Rejected(
                    f"{what} {n} of the kernels is {_text(a)}, the program's is {_text(b)}"
                )
    return None


def _interface(t: DTensor, with_strides: bool) -> tuple[object, ...]:
    layout = (t.strides, t.constant) if with_strides else ()
    return (t.dims, t.dtype, *layout)


def _text(t: DTensor) -> str:
    constant = ", constant" if t.constant else ""
    dims, strides = errors.shape(t.dims), errors.shape(t.strides)
    return f"{table.dtype_name(t.dtype)} {dims} with strides {strides}{constant}"
