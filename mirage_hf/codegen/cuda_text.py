"""CUDA kernels as parts of a generated Python file, which compiles them by NVRTC."""

from __future__ import annotations

from mirage_hf import errors
from mirage_hf.codegen import cuda_kernel
from mirage_hf.codegen.cuda_kernel import CudaKernel
from mirage_hf.codegen.cuda_math import (
    CLUSTERS_WITHOUT_HEADERS,
    DEVICE_HELPERS,
    TYPES,
    WITHOUT_HEADERS,
)
from mirage_hf.codegen.cuda_nests import Operand
from mirage_hf.codegen.generated_program import POINTER_TYPES, Launch
from mirage_hf.codegen.placement import PlacedOp
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.codegen.triton_kernel import KernelText
from mirage_hf.graph.kernel import DTensor

#: The name of the helpers in a file.
_HELPERS = "CUDA_HELPERS"


def helpers() -> str:
    """Return the definition of what every CUDA kernel of a file needs."""
    device = DEVICE_HELPERS.replace("__host__ ", "")
    text = (WITHOUT_HEADERS + CLUSTERS_WITHOUT_HEADERS + device).rstrip()
    return f'{_HELPERS} = r"""\n{text}\n"""'


def obstacle(op: PlacedOp) -> str:
    """Return why only the Triton generator writes a placed op; empty if CUDA may be written."""
    tensors = [t for t in (*op.inputs, *op.outputs) if isinstance(t, DTensor)]
    unknown = next((t for t in tensors if t.dtype not in TYPES), None)
    if unknown is not None:
        return f"{unknown.name} holds {unknown.dtype}"
    if op.appends or op.caches:
        return "it appends to a cache"
    assert op.block is not None
    return cuda_kernel.obstacle(op.block)


def plan_kernel(op: PlacedOp, schedule: Schedule, name: str) -> CudaKernel:
    """Return the kernel of a placed op.

    Raises:
        CodegenError: Only the Triton generator writes the op, or the schedule does not fit.
    """
    block = op.block
    assert block is not None
    why = obstacle(op)
    if why:
        raise errors.CodegenError(f"{name}: {why}; the CUDA generator does not write that")
    tensors = [t for t in op.inputs if isinstance(t, DTensor)]
    if schedule.mma or schedule.cooperating_blocks > 1:
        raise errors.CodegenError(
            f"{name}: {schedule}: CUDA kernels have no tensor cores and no cooperating blocks; "
            "leave mma and cooperating_blocks out"
        )
    operands = [Operand(t.dtype, t.strides, constant=t.constant) for t in tensors]
    outputs = [Operand(t.dtype, t.strides) for t in op.outputs]
    early = schedule.trigger_early and op.next_may_launch_early
    return cuda_kernel.write_kernel(
        block, operands, outputs, name, schedule.triggering_early(early)
    )


def write_kernel(op: PlacedOp, schedule: Schedule, name: str) -> tuple[KernelText, Launch]:
    """Return the text of a placed op's kernel, a string of the file, and its launch.

    Raises:
        CodegenError: Only the Triton generator writes the op, or the schedule does not fit.
    """
    kernel = plan_kernel(op, schedule, name)
    assert op.block is not None
    tensors = [t for t in op.inputs if isinstance(t, DTensor)]
    read = [s for i in op.block.inputs for s in i.sources]
    written = [len(tensors) + n for n in range(len(op.outputs))]
    everything = (*tensors, *op.outputs)
    arguments = tuple((f"tensor_{n}", at) for n, at in enumerate((*read, *written)))
    signature = tuple((name_, POINTER_TYPES[everything[at].dtype]) for name_, at in arguments)
    text = kernel.source.replace("\\", "/").replace('"""', "'''").rstrip()
    source = f'{name} = {_HELPERS} + r"""\n{text}\n"""'
    launch = Launch(
        name,
        signature,
        kernel.grid,
        schedule.num_warps,
        schedule.num_stages,
        cuda=True,
        shared=kernel.shared,
        num_outputs=len(written),
    )
    return KernelText(name, source, (), arguments, 0, 0), launch
