"""Mutate µGraphs and count which wrong ones the proof and the numeric check let through.

    python -m scripts.mutation_test --count 10000 --programs rms_norm_linear --json FILE --seed 0

Mutants come from hand-written µGraphs and from what the search finds for reduced programs of
tests/helpers/programs.py. An independent float64 interpreter runs each mutant
(tests/helpers/reference_executor.py). It says whether the mutant differs, is equal, or is equal but
leaves the range of float32.

The exit status is 1 in three cases:

- A mutant that differs is proven.
- A mutant that leaves the range passes both numeric checks.
- An original is rejected.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import mirage_hf as mi
from mirage_hf.errors import Rejected
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.numeric import NumericChecks, judge_by_torch
from mirage_hf.verify.verdict import Accepted
from tests.helpers import multi_kernel_ugraphs, mutants, programs, ugraphs


@dataclass
class Tally:
    """Counts by kind of mutant and verdict, and the names of mutants worth a look."""

    seed: int = 0
    originals: int = 0
    originals_rejected: list[str] = field(default_factory=list)
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    accepted_wrongly: list[str] = field(default_factory=list)
    range_accepted: list[str] = field(default_factory=list)
    equal_accepted: list[str] = field(default_factory=list)
    equal_rejected: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    proof_seconds: float = 0.0

    def count(self, what: str) -> int:
        """Return how many mutants have this verdict."""
        return sum(row.get(what, 0) for row in self.kinds.values())

    @property
    def failed(self) -> bool:
        """Whether a wrong mutant passed or an original was rejected."""
        return bool(self.accepted_wrongly or self.range_accepted or self.originals_rejected)

    def original(self, name: str, ugraph: UGraph, seeds: int) -> None:
        """Prove an original with several seeds."""
        for seed in range(self.seed, self.seed + seeds):
            self.originals += 1
            verdict = prove(ugraph, seed=seed, trials=1, target=1.0)
            if isinstance(verdict, Rejected):
                self.originals_rejected.append(f"{name}, seed {seed}: {verdict.reason}")

    def mutant(
        self, name: str, m: mutants.Mutant, judge: mutants.Judge, checks: NumericChecks
    ) -> None:
        """Judge and prove one mutant."""
        what = judge(m.ugraph)
        start = time.perf_counter()
        verdict = prove(m.ugraph, seed=self.seed, trials=1, target=1.0)
        self.proof_seconds += time.perf_counter() - start
        proven, label = isinstance(verdict, Accepted), f"{name}: {m.kind}: {m.where}"
        row = self.kinds.setdefault(m.kind, {})
        row[what] = row.get(what, 0) + 1
        if what == "differs":
            self.accepted_wrongly += [label] if proven else []
        elif what == "range only":
            passed = proven and all(
                isinstance(judge_by_torch(m.ugraph, checks, cores), Accepted)
                for cores in (False, True)
            )
            self.range_accepted += [label] if passed else []
        elif what == "equal":
            (self.equal_accepted if proven else self.equal_rejected).append(label)
        else:
            self.unclear.append(label)

    def table(self) -> str:
        """Return the counts for the terminal."""
        columns = ("differs", "equal", "range only", "unclear")
        rows = [f"{'kind of mutant':36s}" + "".join(f"{c:>12s}" for c in columns)]
        for kind, row in sorted(self.kinds.items()):
            rows.append(f"{kind:36s}" + "".join(f"{row.get(c, 0):12d}" for c in columns))
        rows.append(f"{'all':36s}" + "".join(f"{self.count(c):12d}" for c in columns))
        rows.append(
            f"differing and proven: {len(self.accepted_wrongly)}; "
            f"out of range and passed by proof and numbers: {len(self.range_accepted)}; "
            f"equal and rejected: {len(self.equal_rejected)}; "
            f"originals: {self.originals}, rejected {len(self.originals_rejected)}; "
            f"{self.proof_seconds:.1f} s of proofs"
        )
        return "\n".join(rows)


def originals(names: list[str], per_program: int) -> Iterator[tuple[str, UGraph]]:
    """Yield named µGraphs: hand-written ones, and the first results of searches."""
    for name in names:
        if name in programs.PROGRAMS:
            found, _ = search(programs.build(mi, name), SearchOptions(time_limit=3, threads=1))
            yield from ((f"{name}[{n}]", f.ugraph) for n, f in enumerate(found[:per_program]))
        else:
            yield name, (ugraphs.ALL | multi_kernel_ugraphs.ALL)[name]()


def mutate(
    start: list[tuple[str, UGraph]], count: int, seed: int, seeds: int = 20, rounds: int = 6
) -> Tally:
    """Make mutants, and mutants of mutants, until `count` of them differ or `rounds` are over."""
    tally, rng = Tally(seed), random.Random(seed)
    for name, u in start:
        tally.original(name, u, seeds)
    judges = {name: mutants.Judge(u.program) for name, u in start}
    checks = {name: NumericChecks() for name, _ in start}
    current = [(name, name, u) for name, u in start]
    for _ in range(rounds):
        made = [(name, label, m) for name, label, u in current for m in mutants.mutants(u)]
        rng.shuffle(made)
        following = []
        for name, label, m in made:
            if tally.count("differs") >= count:
                return tally
            tally.mutant(label, m, judges[name], checks[name])
            if len(following) < count // 20 + 1:
                following.append((name, f"{label}+{m.kind} ({m.where})", m.ugraph))
        current = following
    return tally


def main() -> int:
    """Run the test. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000, help="differing mutants to make")
    parser.add_argument(
        "--programs",
        default=",".join([*programs.PROGRAMS, *ugraphs.ALL, *multi_kernel_ugraphs.ALL]),
    )
    parser.add_argument(
        "--per-program", type=int, default=3, help="search results to mutate per program"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = (*programs.PROGRAMS, *ugraphs.ALL, *multi_kernel_ugraphs.ALL)
    if unknown := [name for name in args.programs.split(",") if name not in known]:
        parser.error(f"unknown program {unknown[0]!r}; there are {', '.join(known)}")
    tally = mutate(
        list(originals(args.programs.split(","), args.per_program)), args.count, args.seed
    )
    print(tally.table())
    for title, labels in (
        ("DIFFERS AND WAS PROVEN", tally.accepted_wrongly),
        ("OUT OF RANGE AND PASSED", tally.range_accepted),
        ("ORIGINAL REJECTED", tally.originals_rejected),
        ("equal and rejected", tally.equal_rejected),
    ):
        print(*(f"{title}: {label}" for label in labels[:40]), sep="\n", end="\n" if labels else "")
    if args.json:
        counts = Counter(
            {what: tally.count(what) for what in ("differs", "equal", "range only", "unclear")}
        )
        args.json.write_text(
            json.dumps({"counts": dict(counts), **asdict(tally)}, indent=1) + "\n", encoding="utf-8"
        )
    return int(tally.failed)


if __name__ == "__main__":
    raise SystemExit(main())
