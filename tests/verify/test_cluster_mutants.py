"""Mutants of block graphs with clusters: the checks or the proof refuse all that are wrong."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from mirage_hf.errors import GraphError, Rejected
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.verify.field_proof import prove
from tests.helpers import cluster_mutants, cluster_ugraphs
from tests.helpers.mutants import Judge, fuse
from tests.helpers.thorough import count

#: Mutants of mutants that are tried for each µGraph.
PAIRS = count(2000, 50)

#: Small sizes, so that thousands of mutants are judged in seconds. Equal sizes of different axes
#: let more wrong graphs pass the checks.
SMALL = {
    "split_linear": lambda: cluster_ugraphs.split_linear(4, 12, 12, 4),
    "rms_norm_linear": lambda: cluster_ugraphs.rms_norm_linear(4, 12, 12, 4),
    "rms_norm": lambda: cluster_ugraphs.rms_norm(4, 12, 4),
    "softmax_rows": lambda: cluster_ugraphs.softmax_rows(4, 12, 4),
    "sum_over_heads": lambda: cluster_ugraphs.sum_over_heads(4, 4, 6, 4),
    "small_mlp": lambda: cluster_ugraphs.small_mlp(4, 8, 8, 4, 4),
    "attention": lambda: cluster_ugraphs.attention(2, 4, 12, 4, 4),
}


def _judged(ugraph: UGraph, judge: Judge, made) -> str:
    """Return who refuses a mutant, or what it is if nobody does."""
    block = cluster_mutants.attempt(made)
    if block is None:
        return "refused by the checks"
    try:
        mutant = fuse(ugraph.program, block)
    except GraphError:
        return "refused by the checks"
    verdict = judge(mutant)
    proof = prove(mutant, trials=1, target=1.0)
    if isinstance(proof, Rejected):
        return "equal, refused by the proof" if verdict == "equal" else "refused by the proof"
    return "equal, accepted" if verdict in ("equal", "range only") else f"{verdict}, ACCEPTED"


@pytest.mark.parametrize("name", SMALL)
def test_no_wrong_mutant_is_accepted(name, record_property):
    ugraph = SMALL[name]()
    judge = Judge(ugraph.program, seeds=(0,))
    start = cluster_mutants.draft_of(ugraph.block_ops[0].block)
    counts: dict[str, Counter[str]] = {}
    accepted_wrongly, further = [], []
    for kind, where, make in cluster_mutants.changes(start):
        result = _judged(ugraph, judge, make)
        counts.setdefault(kind, Counter())[result] += 1
        if "ACCEPTED" in result:
            accepted_wrongly.append((kind, where, result))
        if cluster_mutants.attempt(make) is not None:
            further.append((kind, where, make))
    rng = random.Random(0)
    for _ in range(PAIRS):
        kind, where, make = rng.choice(further)
        second, there, again = rng.choice(list(cluster_mutants.changes(make())))
        result = _judged(ugraph, judge, again)
        counts.setdefault("two changes", Counter())[result] += 1
        if "ACCEPTED" in result:
            accepted_wrongly.append((f"{kind} + {second}", f"{where} + {there}", result))
    total = sum(counts.values(), Counter())
    record_property("mutants", {kind: dict(found) for kind, found in counts.items()})
    print(f"\n{name}: {dict(total)}")
    for kind, found in sorted(counts.items()):
        print(f"  {kind:32s} {dict(found)}")
    assert not accepted_wrongly
    assert total["refused by the checks"] > 100 and total["refused by the proof"] > 10
    for kind in ("exchange dropped", "exchange twice", "exchange over another axis"):
        refused = counts[kind]["refused by the checks"] + counts[kind]["refused by the proof"]
        assert refused == sum(counts[kind].values()), (kind, counts[kind])
