"""CUDA kernels as parts of a generated Python file, which compiles them by NVRTC."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from mirage_hf import errors
from mirage_hf.codegen import cuda_kernel, cuda_launching
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
from mirage_hf.codegen.streams.finding import reads_codes, streamed_products
from mirage_hf.codegen.streams.helpers import HELPERS as STREAM_HELPERS
from mirage_hf.codegen.streams.kernel import write_stream_kernel
from mirage_hf.codegen.streams.products import ZEROS
from mirage_hf.codegen.triton_kernel import KernelText
from mirage_hf.graph.kernel import DTensor

#: The name of the helpers in a file.
_HELPERS = "CUDA_HELPERS"


def helpers(schedules: Iterable[Schedule]) -> str:
    """Return the definition of what the CUDA kernels of a file need."""
    device = DEVICE_HELPERS.replace("__host__ ", "")
    text = (WITHOUT_HEADERS + CLUSTERS_WITHOUT_HEADERS + device).rstrip()
    if any(s.persistent_blocks for s in schedules):
        text += f"\n\n{STREAM_HELPERS.rstrip()}"
    return f'{_HELPERS} = r"""\n{text}\n"""'


@cache
def missing_tools() -> str:
    """Return why CUDA kernels cannot be compiled and launched here; empty if they can."""
    try:
        cuda_launching.cuda_bindings()
    except RuntimeError as e:
        return str(e)
    return ""


def obstacle(op: PlacedOp) -> str:
    """Return why only the Triton generator writes a placed op; empty if CUDA may be written."""
    if reads_codes(op):
        try:
            streamed_products(op)
        except errors.CodegenError as e:
            return str(e)
        return ""
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
    if schedule.mma or (schedule.cooperating_blocks > 1 and not schedule.persistent_blocks):
        raise errors.CodegenError(
            f"{name}: {schedule}: CUDA kernels have no cooperating blocks unless they stream codes, "
            "and choose tensor cores themselves; leave mma and cooperating_blocks out"
        )
    schedule = schedule.triggering_early(schedule.trigger_early and op.next_may_launch_early)
    if reads_codes(op) or schedule.persistent_blocks:
        if not reads_codes(op) or not schedule.persistent_blocks:
            raise errors.CodegenError(
                f"{name}: {schedule}: CUDA kernels that read codes have persistent blocks, and "
                "others have none"
            )
        return write_stream_kernel(op, schedule, name)
    operands = [Operand(t.dtype, t.strides, constant=t.constant) for t in tensors]
    outputs = [Operand(t.dtype, t.strides) for t in op.outputs]
    return cuda_kernel.write_kernel(block, operands, outputs, name, schedule)


def _read_anywhere(op: PlacedOp, unaligned: frozenset[str]) -> tuple[int, ...]:
    """Return the inputs of a kernel that it reads at any address, by number.

    These are an index, scales and biases that it chooses, and scales and shifts that take turns.
    Copying them would cost memory and time.
    """
    assert op.block is not None
    sources = [(i, op.operands[s].dtype) for i in op.block.inputs for s in i.sources]
    chosen = [
        n
        for n, (i, dtype) in enumerate(sources)
        if (i.taken and dtype not in ZEROS) or i.name in unaligned
    ]
    indices = {i.taken.index for i in op.block.inputs if i.taken is not None}
    return (*chosen, *range(len(sources), len(sources) + len(indices)))


def write_kernel(op: PlacedOp, schedule: Schedule, name: str) -> tuple[KernelText, Launch]:
    """Return the text of a placed op's kernel, a string of the file, and its launch.

    Raises:
        CodegenError: Only the Triton generator writes the op, or the schedule does not fit.
    """
    kernel = plan_kernel(op, schedule, name)
    assert op.block is not None
    tensors = [t for t in op.inputs if isinstance(t, DTensor)]
    read = [s for i in op.block.inputs for s in i.sources]
    read += dict.fromkeys(i.taken.index for i in op.block.inputs if i.taken is not None)
    written = [len(tensors) + n for n in range(len(op.outputs))]
    everything = (*tensors, *op.outputs)
    arguments = tuple((f"tensor_{n}", at) for n, at in enumerate((*read, *written)))
    signature = tuple((name_, POINTER_TYPES[everything[at].dtype]) for name_, at in arguments)
    text = (kernel.helpers + kernel.source).replace("\\", "/").replace('"""', "'''").rstrip()
    source = f'{name} = {_HELPERS} + r"""\n{text}\n"""'
    launch = Launch(
        name,
        signature,
        kernel.grid,
        kernel.threads // 32,
        schedule.num_stages,
        cuda=True,
        shared=kernel.shared,
        num_outputs=len(written),
        anywhere=_read_anywhere(op, kernel.unaligned),
    )
    return KernelText(name, source, (), arguments, 0, 0), launch
