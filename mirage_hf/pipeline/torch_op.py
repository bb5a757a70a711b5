"""The torch op `mirage_hf::run`: kernels inside graphs of torch.compile and torch.export.

`run(Tensor[] inputs, str program) -> Tensor[]` mutates nothing and returns new row-major tensors.
`program` is the digest of a zoo key or of a µGraph. Digests are the same in every process. So a
saved graph finds its kernels in the process that loads it. They are either registered there, or in
the user's cache or the packaged zoo.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import early, triton
from mirage_hf.errors import Rejected
from mirage_hf.graph.coded import storage
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.indices import check_range, indices_of
from mirage_hf.graph.inputs import check_inputs
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.pipeline import trust
from mirage_hf.settings import settings
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.key import KERNEL_FORMAT
from mirage_hf.zoo.store import zoo_path

_log = logging.getLogger("mirage_hf")

#: Runs kernels on a list of inputs, and returns the list of outputs.
Run = Callable[[Sequence[Tensor]], list[Tensor]]


def exporting() -> bool:
    """Return whether torch.export is tracing.

    torch 2.11 (not 2.13) folds `torch.compiler.is_exporting()` to True in every graph.
    """
    return torch.compiler._is_exporting_flag


def launcher(program: triton.GeneratedProgram, device: torch.device | None = None) -> Run:
    """Return a function that runs a program's kernels on the device of the first input.

    Args:
        program: The program.
        device: A GPU that the kernels are compiled for from now on, in other processes. None: they
            are compiled when they run.

    Raises:
        CodegenError: The source cannot be loaded.
    """
    wait = None
    if device is not None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        wait = early.begin(program, 10 * major + minor)
    run: Run = compiler.load(program.source, program.digest).run
    return run if wait is None else _after(wait, run)


def _after(wait: Callable[[], None], run: Run) -> Run:
    def waiting(*args: Any, **kwargs: Any) -> list[Tensor]:
        wait()
        return run(*args, **kwargs)

    return waiting


class RegisteredProgram:
    """The program that a digest stands for in this process.

    Attributes:
        graph: The tensor program.
        run: Runs the program.
        device_type: The type of device that it runs on. None: that of its inputs.
        is_fresh: True if outputs never share memory with inputs or with each other.
    """

    def __init__(self, ugraph: UGraph, run: Run, device_type: str | None) -> None:
        self.graph, self.run, self.device_type = ugraph.program, run, device_type
        self._expected = [
            (stored.dims, stored.strides, stored.dtype)
            for stored in map(storage, ugraph.program.inputs)
        ]
        self._has_indices = bool(indices_of(ugraph.program))
        outputs = {t.index for t in ugraph.kernels.outputs}
        written_by_blocks = {t.index for op in ugraph.block_ops for t in op.outputs}
        all_differ = len(outputs) == len(ugraph.kernels.outputs)
        # block graphs write tensors of their own
        self.is_fresh = all_differ and outputs <= written_by_blocks

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Check that the program was made for these inputs.

        Raises:
            InputError: It was not.
        """
        device = inputs[0].device
        fits = (
            device.type == (self.device_type or device.type)
            and all(x.device == device for x in inputs)
            and [(x.shape, x.stride(), x.dtype) for x in inputs] == self._expected
        )
        if not fits:  # the inputs may fit all the same: strides of dims of size 1 are free
            check_inputs(self.graph, inputs, self.device_type)
        if self._has_indices and settings().check_indices:
            check_range(self.graph, inputs)


_known: dict[str, RegisteredProgram] = {}
_lock = threading.Lock()


def register(digest: str, ugraph: UGraph, run: Run, device_type: str | None) -> None:
    """Register the function that the op calls for a digest in this process.

    A later registration replaces an earlier one, because equal digests stand for equal programs.

    Args:
        digest: The name of the program in graphs.
        ugraph: The µGraph that `run` computes.
        run: Runs the program.
        device_type: The type of device that it runs on. None: any.
    """
    with _lock:
        _known[digest] = RegisteredProgram(ugraph, run, device_type)


def _find(digest: str) -> RegisteredProgram:
    if digest not in _known:
        _register_stored(digest)
    return _known[digest]


def _register_stored(digest: str) -> None:
    """Register a program of the user's cache or the packaged zoo.

    Raises:
        ZooError: There is none.
    """
    entry = _stored(digest)
    if not isinstance(entry, Entry) or entry.key.kernel_format != KERNEL_FORMAT:
        reason = "made by another version" if isinstance(entry, Entry) else entry.reason
        raise errors.ZooError(
            f"mirage_hf::run: no kernel for program {digest[:12]}… in this process ({reason}); "
            "run mirage_hf.optimize here as it was run where the graph was made, with the same "
            "zoo, or copy that zoo or cache here (MIRAGE_HF_CACHE says where it is). A µGraph that "
            "was called on its own must be compiled anew"
        )
    on_gpu = entry.key.target != "cpu"
    # Whoever wrote an entry without block graphs, its program is the one asked for.
    ugraph = entry.ugraph if entry.ugraph.is_fused else library_ugraph(entry.ugraph.program)
    if on_gpu and ugraph.is_fused:
        run = run_of_entry(entry)
    else:
        run = partial(run_kernel_graph, ugraph.kernels)
    register(digest, ugraph, run, "cuda" if on_gpu else "cpu")


def _stored(digest: str) -> Entry | Rejected:
    """Return the entry for a digest of the user's cache or the packaged zoo.

    If its µGraph is not accepted here, the entry is returned with its program in place of the
    µGraph, because a graph that names the entry cannot have another kernel.
    """
    reasons = []
    for store in zoo_path().stores:
        entry = store.find(digest)
        if isinstance(entry, Rejected):
            reasons.append(entry.reason)
            continue
        accepted = trust.accepted_here(entry, store)
        if isinstance(accepted, Entry):
            return accepted
        _log.warning("mirage_hf::run: a program runs in torch: %s", accepted.reason)
        return replace(entry, ugraph=library_ugraph(entry.ugraph.program), schedules=())
    return Rejected("; ".join(reasons))


def run_of_entry(entry: Entry) -> Run:
    """Return a function that runs the kernel generated here from an entry's µGraph.

    The stored text is not run. It may have been edited, or may be unsafe with the installed Triton.
    A graph that names the entry cannot have another kernel. So if no kernel can be generated, the
    program runs in torch, with a warning.
    """
    try:
        return launcher(entry.generate())
    except errors.CodegenError as e:
        _log.warning(
            "mirage_hf::run: program %s… runs in torch: its kernel was made for another Triton "
            "(%s); optimize and export the model again here",
            entry.key.digest[:12],
            e,
        )
        return partial(_run_library, entry)


def _run_library(entry: Entry, inputs: Sequence[Tensor]) -> list[Tensor]:
    return _unshared(inputs, run_kernel_graph(entry.ugraph.program, inputs))


def _run(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    known = _find(program)
    known.check(inputs)
    outputs = [y.contiguous() for y in known.run(inputs)]
    return outputs if known.is_fresh else _unshared(inputs, outputs)


def _unshared(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs, cloned if they share memory with inputs or with each other."""
    taken = {x.untyped_storage().data_ptr() for x in inputs}
    unshared = []
    for y in outputs:
        unshared.append(y.clone() if y.untyped_storage().data_ptr() in taken else y)
        taken.add(unshared[-1].untyped_storage().data_ptr())
    return unshared


def _fake(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    known = _find(program)
    known.check(inputs)
    return [inputs[0].new_empty(t.dims, dtype=t.dtype) for t in known.graph.outputs]


def _no_gradient(ctx: Any, *_: Any) -> None:
    raise errors.InputError(
        "mirage_hf::run: searched kernels have no gradient; run them under torch.no_grad(). A "
        "model that was optimized has gradients if it is compiled or exported with gradients "
        "enabled: its stock forward is then traced"
    )


# define and impl cost 5 µs a call, custom_op 14 µs. The error for gradients costs 4 µs more;
# without it torch would warn and go on.
torch.library.define(
    "mirage_hf::run",
    "(Tensor[] inputs, str program) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)
torch.library.impl("mirage_hf::run", "default", _run)
torch.library.register_fake("mirage_hf::run", _fake)
torch.library.register_autograd("mirage_hf::run", _no_gradient)

run: Any = torch.ops.mirage_hf.run.default
