"""Mutated µGraphs: no mutant that differs is proven, and all originals are accepted.

No mutant that leaves the range passes the numeric check.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mirage_hf.graph.execute import run_kernel_graph
from scripts import mutation_test
from tests.helpers import multi_kernel_ugraphs, mutants, reference_executor, ugraphs


def test_no_mutant_gets_through_and_no_original_is_refused():
    """Run a tenth of `python -m scripts.mutation_test`, on hand-written µGraphs."""
    some = multi_kernel_ugraphs.ALL | {
        n: ugraphs.ALL[n] for n in ("rms_norm_linear", "attention", "lora", "qkv")
    }
    start = [(name, build()) for name, build in some.items()]
    tally = mutation_test.mutate(start, 300, seed=0)
    assert tally.originals == 20 * len(start) and not tally.originals_rejected
    assert tally.count("differs") >= 300 and not tally.accepted_wrongly, tally.table()
    assert not tally.range_accepted, tally.range_accepted
    assert tally.count("equal") > 10 and len(tally.equal_rejected) <= 3, tally.equal_rejected
    assert len(tally.unclear) <= 3, tally.unclear


def test_a_program_that_is_unknown_is_named_beside_those_that_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mutation_test", "--programs", "split_k,none"])
    with pytest.raises(SystemExit) as stopped:
        mutation_test.main()
    err = capsys.readouterr().err
    assert (
        stopped.value.code == 2 and "unknown program 'none'; there are " in err and "split_k" in err
    )


def test_every_kind_of_mutant_of_several_kernels_is_made_and_judged():
    kinds: dict[str, set[str]] = {}
    for name in (
        "split_attention",
        "norm_in_two",
        "library_between",
        "flash",
        "split_maximum",
        "split_k",
    ):
        u = multi_kernel_ugraphs.ALL[name]()
        judge = mutants.Judge(u.program, seeds=(0,))
        assert judge(u) == "equal"
        for m in mutants.mutants(u):
            if len(kinds.setdefault(m.kind, set())) < 3:
                kinds[m.kind].add(judge(m.ugraph))
    assert {
        "not rescaled",
        "maximum of another value",
        "a part counted twice",
        "doubled accumulator",
        "accumulator dropped",
        "wrong role",
        "permuted outputs of the µGraph",
        "dropped output of the µGraph",
        "doubled output of the µGraph",
        "changed constant",
        "swapped operands of a kernel",
        "another operand of a kernel",
        "another attribute of a library op",
    } <= kinds.keys(), kinds
    for kind in (
        "not rescaled",
        "doubled accumulator",
        "permuted outputs of the µGraph",
        "swapped operands of a kernel",
    ):
        assert "differs" in kinds[kind], (kind, kinds[kind])


def test_the_judge_shares_no_code_with_the_interpreter_and_agrees_with_it():
    assert (
        "execute"
        not in Path(reference_executor.__file__).read_text(encoding="utf-8").split('"""', 2)[2]
    )
    for name, build in (
        ugraphs.ALL | multi_kernel_ugraphs.ALL | {"every_op": ugraphs.every_op}
    ).items():
        u = build()
        inputs = mutants.float64_inputs(u.program)
        want = reference_executor.run(u.program, inputs)
        for got in (
            reference_executor.run(u.kernels, inputs),
            run_kernel_graph(u.kernels, inputs, torch.float64),
            run_kernel_graph(u.program, inputs, torch.float64),
        ):
            for a, b in zip(got, want, strict=True):
                loose = (
                    1e3 if name == "every_op" else 1
                )  # a cast in a block graph rounds to float32
                torch.testing.assert_close(
                    a, b, rtol=1e-9 * loose, atol=1e-11 * loose, msg=name, equal_nan=True
                )
