"""The torch op `mirage_hf::run`: kernels inside graphs of torch.compile and torch.export, which name them by digest.

`run(Tensor[] inputs, str program) -> Tensor[]` mutates nothing and returns new row-major tensors. A digest is that of a zoo key, or
of a µGraph, and the same in every process: a graph that was saved finds its kernels among those registered in the process that
loads it, else in the user's cache and the packaged zoo.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mirage_hf import errors
from mirage_hf.codegen import compile as compiled
from mirage_hf.codegen.plan import WGMMA_TAKES_8_COLUMNS
from mirage_hf.codegen.triton import GeneratedProgram, generate
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.ugraph import UGraph, check_inputs
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.key import KERNEL_FORMAT
from mirage_hf.zoo.store import chain

_log = logging.getLogger("mirage_hf")

Run = Callable[[Sequence[Tensor]], list[Tensor]]


def exporting() -> bool:
    """Whether torch.export is at work. `torch.compiler.is_exporting()` is folded to True in every graph of torch 2.11 (not in 2.13)."""
    return torch.compiler._is_exporting_flag


def launcher(source: str) -> Run:
    """Return what runs a generated source's kernels on the device of the first input. Errors: CodegenError."""
    return compiled.load(source, GeneratedProgram(source, ()).digest).run  # type: ignore[no-any-return]


class _Program:
    """What a digest stands for: a µGraph, what runs it, and the type of device that it runs on (None: that of its inputs)."""

    def __init__(self, ugraph: UGraph, run: Run, device_type: str | None):
        self.graph, self.run, self.device_type = ugraph.program, run, device_type
        self.expected = [(t.dims, t.strides, t.dtype) for t in self.graph.inputs]
        outputs = {t.index for t in ugraph.kernels.outputs}
        made = {t.index for op in ugraph.block_ops for t in op.outputs}
        self.is_fresh = outputs <= made and len(outputs) == len(
            ugraph.kernels.outputs
        )  # block graphs write tensors of their own

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Errors: InputError for tensors that the program was not made for."""
        device = inputs[0].device
        if (
            device.type != (self.device_type or device.type)
            or any(x.device != device for x in inputs)
            or [(x.shape, x.stride(), x.dtype) for x in inputs] != self.expected
        ):
            check_inputs(
                self.graph, inputs, self.device_type
            )  # strides of dims of one element may be any


_known: dict[str, _Program] = {}
_lock = threading.Lock()


def register(digest: str, ugraph: UGraph, run: Run, device_type: str | None) -> None:
    """Make `run` what the op does for `digest` in this process, on one type of device or (None) on any. The latest holds: equal
    digests stand for equal programs."""
    with _lock:
        _known[digest] = _Program(ugraph, run, device_type)


def _find(digest: str) -> _Program:
    known = _known.get(digest)
    if known is None:
        entry = chain().find(digest)
        if not isinstance(entry, Entry) or entry.key.kernel_format != KERNEL_FORMAT:
            reason = "made by another version" if isinstance(entry, Entry) else entry.reason
            raise errors.ZooError(
                f"mirage_hf::run: no kernel for program {digest[:12]}… in this process ({reason}); run mirage_hf.optimize here as it was "
                "run where the graph was made, with the same zoo, or copy that zoo or cache here (MIRAGE_HF_CACHE says where it is). A "
                "µGraph that was called on its own must be compiled anew"
            )
        on_gpu = entry.key.target != "cpu"
        run = (
            _kernels_of(entry)
            if on_gpu and entry.ugraph.is_fused
            else partial(run_kernel_graph, entry.ugraph.kernels)
        )
        register(digest, entry.ugraph, run, "cuda" if on_gpu else "cpu")
        known = _known[digest]
    return known


def _kernels_of(entry: Entry) -> Run:
    """Return what runs an entry's searched kernels, as they are safe with the Triton that is installed (see `_serves` in kernels.py): a
    graph that names them cannot have others, so those that are not are generated here, or the program runs in torch, with a warning."""
    if not WGMMA_TAKES_8_COLUMNS:
        return launcher(entry.kernel)
    try:
        return launcher(generate(entry.ugraph, entry.schedules).source)
    except errors.CodegenError as e:
        _log.warning(
            "mirage_hf::run: program %s… runs in torch: its kernel was made for another Triton (%s); optimize and export the "
            "model again here",
            entry.key.digest[:12],
            e,
        )
        return lambda inputs: _apart(inputs, run_kernel_graph(entry.ugraph.program, inputs))


def _run(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    known = _find(program)
    known.check(inputs)
    outputs = [y.contiguous() for y in known.run(inputs)]
    return outputs if known.is_fresh else _apart(inputs, outputs)


def _apart(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs that share no memory with inputs or with each other."""
    held, apart = {x.untyped_storage().data_ptr() for x in inputs}, []
    for y in outputs:
        apart.append(y.clone() if y.untyped_storage().data_ptr() in held else y)
        held.add(apart[-1].untyped_storage().data_ptr())
    return apart


def _fake(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    known = _find(program)
    known.check(inputs)
    return [inputs[0].new_empty(t.dims, dtype=t.dtype) for t in known.graph.outputs]


def _no_gradient(ctx: Any, *_: Any) -> None:
    raise errors.InputError(
        "mirage_hf::run: searched kernels have no gradient; run them under torch.no_grad(). A model that was optimized "
        "has gradients if it is compiled or exported with gradients enabled: its stock forward is then traced"
    )


# define and impl cost 5 µs a call, custom_op 14 µs; the error for gradients costs 4 more, and torch's default would warn and go on
torch.library.define(
    "mirage_hf::run",
    "(Tensor[] inputs, str program) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)
torch.library.impl("mirage_hf::run", "default", _run)
torch.library.register_fake("mirage_hf::run", _fake)
torch.library.register_autograd("mirage_hf::run", _no_gradient)

run: Any = torch.ops.mirage_hf.run.default
