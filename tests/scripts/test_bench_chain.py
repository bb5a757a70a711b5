"""The benchmark of chains of kernels, as far as a machine without a GPU can run it."""

import argparse
import json

import pytest
import torch

from mirage_hf.pipeline import resolver
from scripts import bench_chain, benching, configs

TINY = configs.Sizes("llama", 32, 64, 2, 4, 2, 8, 48, 1e4, True, 1e-5, 64)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_chain_is_the_same_as_programs_and_as_torch(rows, separate):
    chain = bench_chain.Chain(TINY, rows, separate)
    model = chain.model(layers=2, device="cpu")
    assert model.weight_bytes == 2 * (2 * (32 * 64 + 32 * 32 + 3 * 32 * 64 + 64) + 32 + 48 * 32)
    layers = tuple(bench_chain.Layer(*(t.double() for t in w)) for w in model.layers)
    wide = bench_chain.Model(layers, model.norm.double(), model.head.double())
    h = torch.randn(rows, 32).double()
    exact = bench_chain.in_float64(chain.programs())
    torch.testing.assert_close(chain.logits(h, model, exact), chain.torch_logits(h, wide))
    calls = {
        name: resolver.resolve(p, device="cpu", tune="never").run
        for name, p in chain.programs().items()
    }
    got = chain.layer(h.to(bench_chain.DTYPE), model.layers[0], calls)
    assert (
        benching.error_of(
            [got], [chain.layer(h.to(bench_chain.DTYPE).double(), model.layers[0], exact)]
        )
        < 0.05
    )


def test_a_chain_is_benchmarked_to_the_end(on_cpu, monkeypatch, capsys):
    monkeypatch.setitem(bench_chain.MODELS, "tiny", TINY)
    args = argparse.Namespace(
        batch=2,
        qkv="joined",
        layers=None,
        tune="never",
        searched=False,
        compile=False,
        cap=60.0,
        steps=2,
        rounds=3,
    )
    record = bench_chain.bench("tiny", args)
    ours, eager = record["contenders"]["ours"], record["contenders"]["eager"]
    assert (
        ours["ms"] == 1e-3
        and eager["ms"] == 2e-3
        and ours["share_of_bandwidth"] == pytest.approx(2 * eager["share_of_bandwidth"])
    )
    assert max(c[e] for c in (ours, eager) for e in ("layer_error", "logits_error")) < 0.05
    assert "eager" in bench_chain.table(record) and "gate_up" in capsys.readouterr().out
    json.dumps(record)
