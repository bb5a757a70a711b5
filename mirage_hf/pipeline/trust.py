"""Decide whether a stored entry may run on this machine.

There is one rule. The packaged zoo is part of the installed package, so its µGraphs are trusted.
Every other entry is data: the user's own cache, a folder, a Hub repo. For such an entry

- the text of the kernel is generated here, and it must equal the stored text,
- the µGraph is proven equal to the program, and its rounding is checked,
- on a GPU, the compiled kernels are checked.

`proof_record` remembers what passed, so a machine does this once for an entry. Entries that this
machine searched and tuned are remembered when they are stored.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from functools import cache
from importlib import metadata

import torch

from mirage_hf import errors
from mirage_hf.codegen import cuda_launching, cuda_text
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format
from mirage_hf.graph.block import BlockGraph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline import proof_record, versions
from mirage_hf.pipeline.outcome import OURS
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.search_and_verify import VerifiedCandidates
from mirage_hf.tune.tuner import check_compiled
from mirage_hf.verify.accept import Candidate, examine
from mirage_hf.verify.narrow import narrowed
from mirage_hf.verify.numeric import NumericChecks
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.search_record import SearchRecord
from mirage_hf.zoo.store import Store

#: The most ops of a stored µGraph, those of its block graphs included. Attention has 88.
_MOST_OPS = 4096

#: The most elements of all tensors, and of one value in a block graph, at the sizes of the numeric
#: check. The largest of the packaged zoo have 2^23 and 2^26.
_MOST_STORED, _MOST_HELD = 1 << 28, 1 << 31


def obstacle(entry: Entry, runs_generated: bool, must_be_timed: bool) -> str:
    """Return why an entry's kernel does not serve; empty if it does.

    Args:
        entry: The entry.
        runs_generated: True if its text would run, as on a GPU.
        must_be_timed: True if it counts only if it was measured.
    """
    if not entry.ugraph.is_fused:
        same_search = entry.search.get("version") == versions.search_version()
        return "" if same_search else "another version of the search found nothing"
    if must_be_timed and OURS not in {t.name for t in entry.timings}:
        return "it was never measured"
    if not runs_generated:
        return ""
    if any(s.cuda for s in entry.schedules) and (why := cuda_text.missing_tools()):
        return why
    return text_differs(entry)


def text_differs(entry: Entry) -> str:
    """Return why an entry's text must not run; empty if the same text is generated here.

    The texts differ if the entry was edited, if another version of this package made it, or if its
    kernel is not safe with the installed Triton.
    """
    try:
        source = entry.generate().source
    except errors.CodegenError as e:
        return f"no kernel can be generated from its µGraph here ({e})"
    except Exception as e:  # whatever hostile µGraphs and schedules lead to
        return f"no kernel can be generated from its µGraph here ({errors.described(e)})"
    if source != entry.kernel:
        return (
            "its kernel.py is not what is generated here from its µGraph; "
            "it was edited, or is of another version"
        )
    return ""


# -- proving ---------------------------------------------------------------------------------------

#: Verdicts of this process: the error bound of an entry's proof, or why it must not run.
_proven: dict[str, float | Rejected] = {}
_proven_lock = threading.Lock()


def accepted_here(
    entry: Entry, store: Store, device: torch.device | None = None
) -> Entry | Rejected:
    """Return an entry if its µGraph may run on this machine.

    Args:
        entry: The entry, whose text was compared already if it will run.
        store: Where it was found.
        device: The GPU that its compiled kernels are checked on. None: they are not.

    Returns:
        The entry with the error bound of the proof on this machine, or why it must not run.
    """
    if store.is_trusted or not entry.ugraph.is_fused:
        return entry  # an entry without block graphs runs the program itself
    if device is not None and device.type != "cuda":
        device = None
    digest = _digest(entry, device is not None)
    with _proven_lock:
        if digest not in _proven:
            bound = proof_record.bound_of(digest)
            _proven[digest] = _prove(entry, device) if bound is None else bound
        verdict = _proven[digest]
    if isinstance(verdict, Rejected):
        return Rejected(f"{store.root / entry.folder}: {verdict.reason}")
    proof_record.add(digest, verdict)
    return replace(entry, error_bound=verdict)


def remember(entry: Entry) -> None:
    """Remember an entry that this process searched, proved and, on a GPU, checked."""
    if entry.ugraph.is_fused:
        for is_compiled in {False, entry.key.target != "cpu" and torch.cuda.is_available()}:
            digest = _digest(entry, is_compiled)
            with _proven_lock:
                _proven[digest] = entry.error_bound
            proof_record.add(digest, entry.error_bound)


def _digest(entry: Entry, is_compiled: bool) -> str:
    """Return the digest of an entry, and of all that decides the verdict on it.

    Args:
        entry: The entry.
        is_compiled: True if its compiled kernels are checked, too.
    """
    return json_format.digest(
        [
            entry.key.digest,
            json_format.ugraph_to_dict(entry.ugraph),
            [s.to_dict() for s in entry.schedules],
            versions.search_version(),
            torch.__version__,
            _compilers(entry) if is_compiled else [],
        ]
    )


def _compilers(entry: Entry) -> list[str]:
    """Return what decides how an entry's kernels are compiled and run."""
    has_cuda = any(schedule.cuda for schedule in entry.schedules)
    return [*_gpu(), *([_nvrtc()] if has_cuda else [])]


@cache
def _gpu() -> tuple[str, str]:
    return torch.cuda.get_device_name(), metadata.version("triton")


@cache
def _nvrtc() -> str:
    try:
        _driver, _nvrtc, version = cuda_launching.cuda_bindings()
    except RuntimeError:
        return "none"
    return f"nvrtc {version}"


def _prove(entry: Entry, device: torch.device | None) -> float | Rejected:
    """Return the error bound of a new proof, or why the entry must not run."""
    candidate = examined_ugraph(entry.ugraph, 0, NumericChecks())
    if isinstance(candidate, Rejected):
        return Rejected(f"its µGraph was not proven again ({candidate.reason})")
    for schedule in entry.schedules:
        verdict = candidate.tensor_cores if schedule.mma else candidate.scalar
        if isinstance(verdict, Rejected):
            return Rejected(f"its schedule rounds worse than torch ({verdict.reason})")
    if device is not None:
        early = entry.key.next_may_launch_early
        compiled = check_compiled(entry.ugraph, entry.schedules, device, early)
        if isinstance(compiled, Rejected):
            return Rejected(f"its kernels fail on this GPU ({compiled.reason})")
    return candidate.error_bound


def examined(record: SearchRecord, request: Request, where: str) -> VerifiedCandidates | Rejected:
    """Prove the µGraphs of a record again and check their numbers.

    A µGraph that is not proven is left out with a note.

    Args:
        record: What was loaded.
        request: What it is for.
        where: The file, for messages.

    Returns:
        The candidates with the report of their search, or why none is left.
    """
    candidates: list[Candidate] = []
    notes = list(record.report.notes)
    checks = NumericChecks()
    for number, ugraph in enumerate(record.for_program(request.program).ugraphs):
        candidate = examined_ugraph(ugraph, request.seed, checks)
        if isinstance(candidate, Candidate):
            candidates.append(candidate)
        else:
            notes.append(
                f"{where}: µGraph {number} was left out, it was not proven again "
                f"({candidate.reason})"
            )
    if record.ugraphs and not candidates:
        return Rejected("; ".join(notes))
    report = replace(
        record.report,
        found=len(candidates),
        error_bound=max((c.error_bound for c in candidates), default=None),
        notes=tuple(notes),
    )
    return VerifiedCandidates(tuple(candidates), report)


def examined_ugraph(ugraph: UGraph, seed: int, checks: NumericChecks) -> Candidate | Rejected:
    """Prove and check a µGraph that anyone may have written.

    Args:
        ugraph: The µGraph.
        seed: The seed of the proof's random inputs.
        checks: See `verify.accept.examine`.
    """
    try:
        return too_large(ugraph) or examine(ugraph, seed=seed, checks=checks)
    except errors.MirageError as e:
        return Rejected(str(e))
    except Exception as e:  # whatever hostile µGraphs lead to
        return Rejected(errors.described(e))


def too_large(ugraph: UGraph) -> Rejected | None:
    """Return why a µGraph is too large to be checked here, or None.

    Otherwise a small file could ask for any amount of memory and time.
    """
    blocks = [op.block for op in ugraph.block_ops if op.block]
    ops = len(ugraph.program.ops) + len(ugraph.kernels.ops)
    ops += sum(len(stage.body) + len(stage.accumulators) for b in blocks for stage in b.stages)
    if ops > _MOST_OPS:
        return Rejected(f"it has {ops:,} ops, more than the {_MOST_OPS:,} that are checked")
    small = narrowed(ugraph) or ugraph
    stored = max(map(_elements, (small.program, small.kernels)))
    if stored > _MOST_STORED:
        return Rejected(f"its tensors have {stored:,} elements, too many to be checked here")
    held = max((_held(op.block) for op in small.block_ops if op.block), default=0)
    if held > _MOST_HELD:
        return Rejected(f"a value in it has {held:,} elements, too many to be checked here")
    return None


def _elements(graph: KernelGraph) -> int:
    made = [t for op in graph.ops for t in op.outputs]
    return sum(math.prod(t.dims) for t in (*graph.inputs, *made))


def _held(block: BlockGraph) -> int:
    """Return the elements of the largest value in a block graph."""
    sizes = [math.prod(block.axis(a).size for a in axes) for axes in block.carried.values()]
    return max(sizes, default=0)
