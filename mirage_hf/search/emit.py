"""Turn plans into µGraphs: the core's kernels become block graphs with exponentials in range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mirage_hf import _core
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.block_writer import EmissionFormError
from mirage_hf.search.emit_kernel import EmissionError, KernelEmitter
from mirage_hf.search.emitted_plan import EmittedPlan
from mirage_hf.search.lowered_program import LoweredProgram, Term


@dataclass(frozen=True)
class EmittedUGraph:
    """The µGraph of a plan.

    Attributes:
        ugraph: The program and its kernels.
        in_range: True if every exponential that a division cancels is computed relative to its
            maximum, so that it does not overflow.
    """

    ugraph: UGraph
    in_range: bool


def ugraph_of(
    plan: _core.Candidate,
    lowered: LoweredProgram,
    functions: Sequence[Term],
    program: KernelGraph,
) -> EmittedUGraph | None:
    """Return the µGraph of a plan.

    The form that keeps exponentials in range is tried first. It exists if each exponential is
    cancelled inside a kernel or between two kernels.

    Args:
        plan: The core's plan.
        lowered: The program as it was given to the core.
        functions: The terms that the core knows only by number, from `core_program.symbols`.
        program: The program as a kernel graph.

    Returns:
        The µGraph. None if a kernel would have to store an input, a number, or a value that repeats
        along an axis.
    """
    for scaled in (True, False):
        emitted = EmittedPlan(plan, lowered, functions, program, scaled)
        try:
            for kernel in plan.kernels:
                KernelEmitter(emitted, kernel).emit()
        except EmissionFormError:
            continue
        except EmissionError:
            return None
        return EmittedUGraph(UGraph(program, emitted.finish()), scaled)
    return None
