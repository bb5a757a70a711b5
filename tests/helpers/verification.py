"""Helpers of the tests of proofs and of the numeric check."""

from __future__ import annotations

from dataclasses import replace

from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify import (
    numeric,
)
from mirage_hf.verify.field import Element
from tests.helpers import mutants

SEARCH = SearchOptions(time_limit=2, threads=1)


def same(a: Element, b: Element) -> bool:
    """Return whether two elements of the field are equal."""
    return (
        bool((a.p == b.p).all())
        and (a.q is None) == (b.q is None)
        and (a.q is None or bool((a.q == b.q).all()))
    )


def rewired(ugraph: UGraph, outputs=None, **changes) -> UGraph:
    """Return the µGraph with other operands of some kernels, or with other outputs.

    `k0=[2, 1, 0]` reorders the operands of kernel 0.
    """
    ops = {int(key[1:]): order for key, order in changes.items()}
    made = {
        n: replace(
            ugraph.kernels.ops[n], inputs=tuple(ugraph.kernels.ops[n].inputs[k] for k in order)
        )
        for n, order in ops.items()
    }
    outs = None if outputs is None else [ugraph.kernels.outputs[k] for k in outputs]
    return UGraph(ugraph.program, mutants._with_ops(ugraph.kernels, made, outs))


def verdicts(ugraph):
    """Judge the numbers of a µGraph in scalar arithmetic and with tensor cores."""
    checks = numeric.NumericChecks()
    return tuple(numeric.judge_by_torch(ugraph, checks, mma) for mma in (False, True))
