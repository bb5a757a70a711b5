"""Fixtures of the tests of scripts."""

from types import SimpleNamespace

import pytest

from mirage_hf.tune import measure
from mirage_hf.verify.case_inputs import make_inputs
from mirage_hf.verify.numeric_cases import Case
from scripts import bench_blocks, bench_chain, bench_sizes, benching


@pytest.fixture
def on_cpu(monkeypatch):
    """Run contenders once on the CPU. They take 1 µs, 2 µs, … a call, and no GPU is used."""

    def captured(run, sets):
        run(sets[0])
        return benching.Contender(SimpleNamespace(calls=1))

    def captured_chain(run, steps, reads):
        return benching.Contender(
            SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), calls=steps)
        ), run()

    def take_turns(contenders, rounds):
        for us, c in enumerate(contenders, 1):
            c.samples += [float(us)] * rounds

    monkeypatch.setattr(benching, "DEVICE", "cpu")
    monkeypatch.setattr(
        measure, "cold_inputs", lambda program, device: [make_inputs(program, Case("random"))]
    )
    monkeypatch.setattr(bench_chain, "captured_chain", captured_chain)
    for script in (bench_blocks, bench_chain, bench_sizes):
        monkeypatch.setattr(script, "take_turns", take_turns)
        monkeypatch.setattr(script, "captured", captured, raising=False)
