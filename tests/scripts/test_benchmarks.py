"""The benchmark scripts, as far as a machine without a GPU can run them."""

import argparse
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import Rejected
from mirage_hf.gpus import H200
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.ugraph import library_ugraph
from mirage_hf.pipeline import outcome, resolver
from mirage_hf.search.lowering import lower
from mirage_hf.tune import measure
from mirage_hf.tune.ranking import rank_by_estimate
from mirage_hf.verify.case_inputs import make_inputs
from mirage_hf.verify.numeric_cases import Case
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.key import key_of
from mirage_hf.zoo.store import Store
from scripts import (
    bench_blocks,
    bench_chain,
    bench_choices,
    bench_generate,
    bench_sizes,
    benching,
    block_rows,
    build_zoo,
    coded_models,
    configs,
    rivals,
)
from tests.helpers import ugraphs

SMALL = {
    "int4_linear": {"k": 256, "n": 32},
    "norm_linear": dict(k=32, n=24),
    "norm_linear_6144": dict(k=32, n=40),
    "gated_mlp": dict(k=32, n=24),
    "lora": dict(k=32, n=24, r=4),
    "lora_256": dict(k=16, n=24, r=4),
    "gqa_decode": dict(keys=24, d=16),
    "gqa_paper": dict(q=5, keys=24, d=16),
    "qk_norm_attention": dict(keys=24, d=16),
    "mla_decode": dict(heads=2, keys=24, latent=16, nope=8, rope=4, value=8),
    "ntrans": dict(n=40),
    "gated_delta": dict(key_heads=16, key=8, value=16),
    "mamba2": dict(heads=4, head_dim=8, state=16),
}

TINY = configs.Sizes("llama", 32, 64, 2, 4, 2, 8, 48, 1e4, True, 1e-5, 64)


@pytest.mark.parametrize("row", block_rows.ROWS.values(), ids=lambda r: r.name)
def test_every_row_is_a_program_that_can_be_searched(row):
    program = row.program()
    assert not isinstance(lower(program), Rejected)
    assert 0 < row.floor_us(program) < row.target_us
    assert sum(r.whole for r in row.rivals) >= 1 and len({r.name for r in row.rivals}) == len(
        row.rivals
    )


def test_rows_that_read_weights_say_that_they_are_constant():
    counts = {"norm_linear": 1, "gated_mlp": 2, "lora": 3, "mla": 2}
    for row in block_rows.ROWS.values():
        weights = [t for t in row.program().inputs if t.strides and t.strides[-1] != 1]
        wanted = sum(count for name, count in counts.items() if row.block.startswith(name))
        assert all(t.constant for t in weights) and len(weights) == wanted


@pytest.mark.parametrize(
    "row",
    [r for r in block_rows.ROWS.values() if r.rows <= 2 or r.block == "lora_256"],
    ids=lambda r: r.name,
)
def test_rivals_compute_what_the_program_does(row):
    program = row.program(rows=min(row.rows, 2), **SMALL[row.block])
    drawn = make_inputs(program, Case("random"))
    inputs = [x.double() if x.is_floating_point() else x for x in drawn]
    exact = run_kernel_graph(program, inputs, torch.float64)
    for rival in row.rivals:
        if rival.needs:
            assert rival.absent == (f"{rival.needs} is not installed" if rival.absent else "")
            continue
        (entrant,) = bench_blocks.entrants_of(rival, compiled=False)
        got = entrant.run(entrant.prepare(inputs))
        if rival.whole:
            torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9)
        assert all(torch.isfinite(y).all() for y in got)


def test_long_rows_ask_for_their_part_of_the_bandwidth_and_are_checked_batch_by_batch(monkeypatch):
    assert len(block_rows.LONG) == 18 and not block_rows.LONG.keys() & block_rows.ROWS.keys()
    assert all(
        row.target_us >= row.floor_us(row.program()) / block_rows.LONG_SHARE
        for row in block_rows.LONG.values()
    )
    row = replace(
        block_rows.LONG["attention_d128_8k:8"],
        rows=3,
        sizes=(("kv_heads", 2), ("keys", 24), ("d", 16)),
    )
    inputs = make_inputs(row.program(), Case("random"))
    (at_once,) = bench_blocks.in_float64(row, inputs)
    monkeypatch.setattr(bench_blocks, "AT_ONCE_BYTES", 0)
    torch.testing.assert_close(bench_blocks.in_float64(row, inputs)[0], at_once)


def test_a_row_is_cut_from_the_size_that_it_is_tuned_at(on_cpu):
    sizes = {"kv_heads": 2, "d": 16}
    row = replace(
        block_rows.LONG["attention_d64_8k:1"],
        sizes=tuple({**sizes, "keys": 96}.items()),
        tuned_at=tuple({"keys": 40}.items()),
    )
    args = argparse.Namespace(search_seconds=20.0, ugraphs=1, schedules=2, replays=1)
    for _ in range(2):  # the tuned kernels are kept
        record: dict = {}
        assert len(bench_blocks.find_ours(row, args, record)) == 1
        assert (
            "(4, 96, 16)" not in record["ours"]["ugraph"]
            and "(2, 96, 16)" in record["ours"]["ugraph"]
        )


def test_a_rival_that_is_wrong_is_not_timed():
    exact = torch.randn(8, 8)
    assert benching.error_of([exact.half()], [exact]) < 1e-3
    for wrong in (exact.half() * 1.1, exact.half()[:4], torch.full((8, 8), torch.nan).half()):
        with pytest.raises(ValueError, match="wrong result"):
            benching.error_of([wrong], [exact])
    with pytest.raises(ValueError, match="2 results"):
        benching.error_of([exact.half()] * 2, [exact])


def test_a_float32_state_is_held_to_more_than_the_bfloat16_result_beside_it():
    exact = torch.randn(8, 8)
    result = exact.bfloat16()
    assert 1e-4 < benching.error_of([exact, result], [exact, exact]) < 0.01
    for wrong in ([exact * 1.001, result], [exact, result * 1.1]):
        with pytest.raises(ValueError, match="wrong result"):
            benching.error_of(wrong, [exact, exact])


@pytest.mark.parametrize("block", ["gated_delta", "mamba2"])
def test_a_step_of_a_recurrence_is_one_kernel_that_may_write_its_state_in_place(block):
    program = block_rows.ROWS[f"{block}:1"].program(**SMALL[block])
    state, new = program.inputs[0], program.outputs[0]
    assert (state.dims, state.dtype) == (new.dims, new.dtype) and state.dtype == torch.float32
    assert [t.dims for t in program.inputs].count(state.dims) == 1
    found = bench_blocks.search_and_verify(program, bench_blocks.SearchOptions(time_limit=60))
    first = bench_blocks.promising(found.candidates)[0].ugraph
    ranked = rank_by_estimate([first], H200, per_graph=12)
    best = next(c for c in ranked if not c.is_library)
    generated = triton.generate(best.ugraph, best.schedules)
    assert len(compiler.ahead_of_time(generated, 90)) == first.num_kernels == 1
    assert (0, 0) in generated.in_place


def test_large_results_of_all_calls_are_kept():
    kept = []
    call = bench_blocks.keeping(lambda inputs: [inputs[0] + 1], kept)
    results = [call([torch.zeros(2)]) for _ in range(3)]
    assert all(a is b for a, b in zip(results, kept, strict=True))
    large = [r.name for r in block_rows.ROWS.values() if bench_blocks.keeps_results(r.program())]
    assert large == [f"{block}:{n}" for block in ("gated_delta", "mamba2") for n in (1, 16, 64)]


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


def test_a_zoo_gets_no_result_whose_candidates_failed(monkeypatch, tmp_path):
    """If every candidate failed, the library path would stay in the zoo for good."""
    ugraph = ugraphs.rms_norm_linear()
    fused = Entry(
        key_of(ugraph.program, "sm_90"),
        "program",
        ugraph,
        "# text\n",
        (Schedule({"m": 1, "n": 16, "k": 64}),),
        (),
        0.0,
        {"candidates": 3},
    )
    failed = replace(
        fused,
        ugraph=library_ugraph(ugraph.program),
        schedules=(),
        search={"candidates": 3, "reason": "no code for sm_90"},
    )
    for made, kept in ((failed, 0), (replace(failed, search={"candidates": 0}), 1), (fused, 1)):
        zoo = Store(tmp_path / str(kept) / made.pattern / str(len(made.schedules)), writable=True)
        monkeypatch.setattr(build_zoo, "make_entries", lambda *_, made=made: [made])
        (said,) = build_zoo.build([], torch.device("cpu"), zoo, SimpleNamespace(tune="auto"))
        assert len(list(zoo.entries())) == kept
        assert (
            "not kept, every candidate failed here" in said and "no code for sm_90" in said
        ) == (kept == 0), said


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


@pytest.mark.parametrize("name", ["norm_linear:1", "mla_decode:1", "gated_delta:1"])
def test_a_block_is_benchmarked_to_the_end(on_cpu, name):
    row = replace(block_rows.ROWS[name], sizes=tuple(SMALL[name.split(":")[0]].items()))
    args = argparse.Namespace(
        search_seconds=20.0, ugraphs=2, schedules=2, replays=1, cap=60.0, rounds=3, compile=False
    )
    record = {"name": name} | bench_blocks.bench(row, args)
    contenders = record["contenders"]
    assert (
        "failed" in contenders["ours"]
    )  # a Triton kernel needs a GPU; the others are timed all the same
    assert contenders["eager"]["us"] == 1.0 and contenders["eager"]["error"] < 0.01
    assert (
        record["best_rival"] == "eager"
        and not record["reached"]
        and record["tune"]["candidates"]
        and record["ours"]["ugraph"]
    )
    json.dumps(record)
    assert "ours: failed" not in bench_blocks.line(record) and "missed" in bench_blocks.line(record)


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


def test_a_size_is_benchmarked_to_the_end(on_cpu, monkeypatch):
    monkeypatch.setitem(bench_sizes.MLP_WIDTHS, 32, 64)
    for name in bench_sizes.BLOCKS:
        record = {"name": name} | bench_sizes.bench(
            name, 3, 32, argparse.Namespace(tune="never", rounds=3)
        )
        assert record["contenders"][outcome.LIBRARY]["us"] == 1.0 and name in bench_sizes.line(
            record
        )
        json.dumps(record)


def test_sizes_are_programs_and_their_summary_names_the_worst():
    for hidden in bench_sizes.MLP_WIDTHS:
        for name in bench_sizes.BLOCKS:
            assert not isinstance(lower(bench_sizes.block_of(name, hidden).program(3)), Rejected)
    results = {outcome.LIBRARY: {"us": 6.0}, outcome.OURS: {"us": 8.0}}
    assert (
        bench_sizes.ratio(results, outcome.OURS) == 0.75
        and bench_sizes.ratio(results, outcome.LIBRARY) == 1.0
    )
    assert bench_sizes.ratio({outcome.LIBRARY: {"us": 6.0}}, outcome.OURS) is None
    told = bench_sizes.summary(
        [
            {"name": "a", "ratio": 0.75, "runs": outcome.OURS},
            {"name": "b", "ratio": 1.0},
            {"name": "c", "failed": "x"},
        ]
    )
    assert (
        told["worst"] == {"name": "a", "ratio": 0.75}
        and told["slower"] == ["a"]
        and told["untold"] == ["c"]
    )


def made_up(name: str) -> dict:
    """Return a row with invented numbers."""
    row = block_rows.ROWS[name]
    contenders = {
        "ours": {"us": 10.0, "whole": True},
        "eager": {"us": 20.0, "whole": True},
        "eager compiled": {"failed": "TimeoutError: x"},
        "core": {"us": 8.0, "whole": False},
        "liger": {"absent": "liger_kernel is not installed"},
    }
    floor = row.floor_us(row.program())
    return {
        "name": name,
        "block": row.block,
        "rows": row.rows,
        "floor_us": floor,
        "target_us": row.target_us,
        "contenders": contenders,
        "ours": {"schedules": ["k:128 m:16"]},
    } | bench_blocks.judged(contenders, floor, row.target_us)


def test_a_row_is_judged_by_whole_rivals_only():
    row = made_up("norm_linear:1")
    assert row["best_rival"] == "eager" and row["over_best_rival"] == 2.0 and row["reached"]
    line = bench_blocks.line(row)
    slow = row | {"name": "lora:1", "reached": False, "over_best_rival": 0.5}
    assert bench_blocks.summary([row, slow, {"name": "lora:16", "failed": "x"}]).splitlines() == [
        "1 of 2 targets reached",
        "a rival is faster: lora:1 (0.50 × eager)",
        "failed: lora:16",
    ]
    assert (
        "(core) 8.00" in line
        and "liger: liger_kernel is not installed" in line
        and "TimeoutError" in line
        and "reached" in line
    )
    missing = made_up("norm_linear:1") | {"refused": "no kernel"}
    del missing["contenders"]["ours"], missing["share_of_floor"], missing["over_best_rival"]
    missing |= bench_blocks.judged(missing["contenders"], 1.0, 2.0)
    assert not missing["reached"] and "no kernel of ours: no kernel" in bench_blocks.line(missing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "script",
    [bench_blocks, bench_chain, bench_choices, bench_generate, bench_sizes],
    ids=lambda s: s.__name__,
)
def test_without_a_gpu_a_script_says_so(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script.__name__])
    with pytest.raises(SystemExit, match="no GPU here"):
        script.main()


def test_rivals_that_are_not_installed_say_so():
    assert (
        rivals.Rival("x", torch.neg, needs="no_such_package").absent
        == "no_such_package is not installed"
    )
    assert rivals.Rival("x", torch.neg).absent == ""


def test_attention_of_one_row_behind_norms_is_tried_with_keys_read_once():
    """Its estimates were once three times its time (66.7 µs measured on an H200).

    The tuner then tried no kernel that reads keys and values once, and took 80 µs.
    """
    program = bench_blocks.ROWS["qk_norm_attention:8"].program()
    found = bench_blocks.search_and_verify(program, bench_blocks.SearchOptions(time_limit=60))
    ranked = rank_by_estimate(
        [c.ugraph for c in bench_blocks.promising(found.candidates)[:4]], H200, per_graph=12
    )
    first = next(c for c in ranked if not c.is_library)
    assert {"k", "v"} <= {
        t.name for op in first.ugraph.block_ops[:1] for t in op.inputs
    } and 60 < first.estimate_us < 100


@pytest.mark.parametrize("rank", [0, 4])
def test_a_zoo_has_the_blocks_of_adapters_too(rank):
    pytest.importorskip("peft")
    layer, head = build_zoo.blocks_of("smoke", "bfloat16", torch.device("cpu"), rank)
    sizes = [dict(block.sizes) for block in layer]
    assert [block.pattern.name for block in head] == ["rms_norm_linear"] and "lora" not in dict(
        head[0].sizes
    )
    assert sum(block.pattern.name == "lora_down" for block in layer) == (4 if rank else 0)
    assert sum(s.get("lora") is not None for s in sizes) == (4 if rank else 0)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("falcon-h1-1.5b", 1_554_859_392),
        ("gemma-3-4b", 4_300_079_472),
        ("gpt2-xl", 1_557_611_200),
        ("lfm2-1.2b", 1_170_340_608),
        ("opt-1.3b", 1_315_758_080),
        ("qwen3-vl-2b", 2_127_532_032),
        ("whisper-large-v3", 1_543_490_560),
    ],
)
def test_models_have_as_many_weights_as_the_published_ones(name, published):
    model = configs.random_model(name, "meta")
    assert sum(p.numel() for p in model.parameters()) == published


def test_a_model_that_is_cut_down_keeps_layers_of_each_kind_and_little_of_its_vision():
    config = configs.config_of("qwen3.5-4b", layers=2)
    assert config.text_config.layer_types == ["linear_attention", "full_attention"]
    assert config.text_config.num_hidden_layers == config.vision_config.depth == 2
    assert configs.config_of("lfm2-1.2b", layers=2).layer_types == ["conv", "full_attention"]
    assert configs.config_of("lfm2-1.2b", layers=4).layer_types[2:] == ["full_attention", "conv"]
    assert configs.config_of("gemma-3-4b", layers=2).vision_config.num_hidden_layers == 2
    vision = configs.config_of("qwen3-vl-2b", layers=2).vision_config
    assert vision.depth == 2 and vision.deepstack_visual_indexes == [1]


def test_a_step_reads_no_weights_of_images():
    for name in ("gemma-3-4b", "qwen3-vl-2b", "qwen3.5-4b"):
        model = configs.random_model(name, "meta", layers=1)
        of_images = ("vision_tower", "visual", "multi_modal_projector")
        read = sum(
            p.nbytes
            for key, p in model.named_parameters()
            if not any(part in key for part in of_images)
        )
        assert configs.floor_bytes(model) == read


def test_a_step_reads_the_experts_that_are_chosen():
    model = configs.random_model("qwen3-30b-a3b", "meta", layers=1)
    names = dict(model.named_parameters())
    experts = sum(p.nbytes for name, p in names.items() if ".experts." in name)
    others = sum(p.nbytes for name, p in names.items() if ".experts." not in name)
    others -= model.get_input_embeddings().weight.nbytes
    assert configs.floor_bytes(model) == others + experts * 8 // 128
    # of 16 tokens, some choose the same experts
    assert others + experts * 0.6 < configs.floor_bytes(model, 16) < others + experts * 0.7


def test_the_weights_of_a_product_of_torch_are_counted():
    """They are the peer's own, so they are no memory beyond its weights."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    assert coded_models.product_bytes(model) == 0
    product = coded_models.Int4Product.__new__(coded_models.Int4Product)
    torch.nn.Module.__init__(product)
    product.register_buffer("codes", torch.zeros(16, dtype=torch.int32))
    product.register_buffer("scales", torch.zeros(4, dtype=torch.bfloat16))
    model.append(product)
    assert coded_models.product_bytes(model) == 64 + 8
