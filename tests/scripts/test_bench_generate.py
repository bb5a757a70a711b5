"""`bench_generate`, as far as a machine without a GPU can run it."""

import argparse
import copy
import json
import sys
import weakref
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
)

from mirage_hf.errors import OptimizeWarning
from scripts import bench_generate, bench_measures, bench_peers, bench_prompts, benching, configs
from scripts.survey_configs import small_config


def test_a_matrix_of_generate_is_measured_and_resumed(tmp_path, monkeypatch, capsys):
    path, ran = tmp_path / "m.json", []

    def bench(model, batch, prompt, args):
        ran.append((batch, prompt))
        if ran == [(1, 8), (2, 8)]:
            raise RuntimeError("out of luck")
        one = {"median": 1.0 * batch, "min": 1.0, "max": 2.0, "runs": 3}
        ours = asdict(bench_measures.Measured(ms_per_token=one, first_token_ms=one, step_ms=one))
        return {
            "model": model,
            "batch": batch,
            "prompt": prompt,
            "new": args.new,
            "floor_ms": 0.5,
            "peers": {
                "ours": ours,
                "compile": asdict(bench_measures.Measured(step_ms=one)),
                "static": asdict(bench_measures.Measured(failed="no")),
            },
        }

    monkeypatch.setattr(bench_generate, "bench", bench)
    for more, measured in (([], 1), (["--resume"], 2)):
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "x",
                "--model",
                "smoke",
                "--batch",
                "1,2",
                "--prompt",
                "8",
                "--device",
                "cpu",
                "--json",
                str(path),
                *more,
            ],
        )
        bench_generate.main()
        assert len([r for r in json.loads(path.read_text())["rows"] if "peers" in r]) == measured
    assert ran == [(1, 8), (2, 8), (2, 8)] and "(step)" in capsys.readouterr().out


def test_rows_of_other_numbers_of_tokens_are_not_resumed(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    row = {"name": "smoke, batch 1, prompt 8", "new": 128, "layers": 2}
    path.write_text(json.dumps({"machine": benching.machine(), "rows": [row]}))
    for more in (["--new", "8"], ["--layers", "1"]):
        monkeypatch.setattr(
            sys,
            "argv",
            ["x", "--model", "smoke", "--device", "cpu", "--json", str(path), "--resume", *more],
        )
        with pytest.raises(SystemExit, match="of other --new or --layers: smoke, batch 1"):
            bench_generate.main()


def generate_options(**changes):
    """Return options of bench_generate for a CPU."""
    options = dict(
        device="cpu",
        layers=1,
        lora=0,
        images=0,
        weights="",
        times_only=False,
        new=3,
        peers=("eager", "static"),
        apart=False,
        cap=60,
        rounds=1,
        strict=True,
        side_by_side=False,
        long_calls=False,
        padded=False,
        draft="",
        draft_tokens=4,
        accept=None,
        adapt=False,
    )
    return argparse.Namespace(**(options | changes))


@pytest.mark.parametrize(
    "draft, accept, adapt",
    [
        ("lookup", None, False),
        ("smoke", None, False),
        ("smoke", 0.7, True),
        pytest.param("smoke", 0.7, False, marks=pytest.mark.thorough),
        pytest.param("lookup", 0.7, False, marks=pytest.mark.thorough),
        pytest.param("lookup", 0.7, True, marks=pytest.mark.thorough),
    ],
)
def test_drafts_are_timed_beside_stocks(draft, accept, adapt):
    peers = ("drafted", "assisted")
    drafting = {"draft": draft, "draft_tokens": 3, "accept": accept, "new": 40, "adapt": adapt}
    args = generate_options(**drafting, peers=peers, tune="never", times_only=True, cap=200)
    row = bench_generate.bench("smoke", 1, 4, args)
    assert all(row["peers"][peer]["ms_per_token"] for peer in peers), row["peers"]
    drafts = row["drafts"]
    if accept is None and draft == "smoke":  # the model drafts for itself
        assert drafts["drafts: taken"] >= 0.9 * (drafts["drafts: drafted"] - 3)
    if accept is not None:
        assert 0 < drafts["drafts: taken"] < drafts["drafts: drafted"]
        assert "tokens a step" in bench_generate.table(row)
    if not adapt:
        assert drafts["drafts: tokens of a step: 4"] > 0
        assert "drafts: tokens of a step: 1" not in drafts


def test_ours_fails_with_the_reason_if_nothing_was_replaced():
    model = small_config("reformer")
    model = AutoModelForCausalLM.from_config(model).eval()
    prompts = SimpleNamespace(ids=torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(OptimizeWarning, match=r"nothing in this ReformerModelWithLMHead .* \(.+\)"):
        bench_peers.ours(model, prompts, 2, "never")


def test_attention_by_name_that_torch_runs_is_no_peer():
    """Otherwise HF's static cache would be timed under our name.

    That happens on a CPU, and beyond the lengths of compiled graphs.
    """
    args = generate_options(peers=("attention",), strict=False)
    row = bench_generate.bench("smoke", 1, 4, args)
    assert (
        "no kernel of ours ran" in row["peers"]["attention"]["failed"]
        and "attention_report" not in row
    )


def test_attention_by_name_is_reported_row_by_row(monkeypatch):
    from mirage_hf.attention_interface import AttentionReport, KernelRow

    first = KernelRow("a", "cache", 1.0, 2.0, 256, 3, 4, True)
    before = AttentionReport((first,), {"many": 5}, {"x": "none"})
    now = AttentionReport(
        (first, replace(first, title="b", calls=7)),
        {"many": 6, "dropout": 1},
        {"x": "none", "y": "none"},
    )
    monkeypatch.setattr(bench_peers, "attention_report", lambda: now)
    told = bench_peers.attention_since(before)
    assert [(k.title, k.calls, k.calls_compiled) for k in told.kernels] == [("b", 7, 4)]
    assert told.by_torch == {"many": 1, "dropout": 1} and list(told.without) == ["y"]


@pytest.mark.parametrize(
    "options, says",
    [
        (["--batch", "0"], "argument --batch: '0': give numbers of 1 and more, as 1 or 1,8"),
        (["--prompt", "8,x"], "argument --prompt: '8,x'"),
        (["--images", "1"], "--images: smoke takes no images here"),
        (["--model", "gemma-3-4b", "--images", "1", "--padded"], "images are not padded"),
        (
            ["--model", "gemma-3-4b", "--images", "2", "--prompt", "2"],
            "2 images need 3 or more tokens of text",
        ),
    ],
    ids=str,
)
def test_bench_generate_says_what_is_wrong_with_its_options(
    options, says, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["bench_generate", "--model", "smoke", "--device", "cpu", *options]
    )
    with pytest.raises(SystemExit) as stopped:
        bench_generate.main()
    assert stopped.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("apart, long_calls", [(False, False), (True, False), (False, True)])
def test_peers_of_bench_generate_that_are_measured_apart_leave_nothing_behind(
    apart, long_calls, monkeypatch
):
    set_up, there, rounds, calls = bench_generate.set_up, [], [], []

    def watched(peer, model, *more):
        rounds.append([ref() is not None for ref in there])
        found = set_up(peer, model, *more)

        def counted(**options):
            calls.append((peer, *options))
            return found.call(**options)

        there.append(weakref.ref(found.call))
        return replace(found, call=counted)

    monkeypatch.setattr(bench_generate, "set_up", watched)
    args = generate_options(apart=apart, long_calls=long_calls)
    row = bench_generate.bench("smoke", 1, 4, args)
    assert (
        rounds == [[], [not apart]]
        and row.get("apart", False) == apart
        and row.get("long_calls", False) == long_calls
    )
    assert all(row["peers"][peer]["ms_per_token"]["runs"] == 1 for peer in args.peers)
    assert [call for call in calls if call[0] == "eager"] == [("eager",)] * (
        1 if long_calls else 2
    ) + [("eager", "streamer")]


def test_a_step_reads_no_more_of_a_sliding_layer_than_its_window():
    config = configs.config_of("gemma-3-1b", layers=6)
    assert (
        config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
        and config.num_attention_heads == 4
    )
    bases = [config.rope_parameters[kind]["rope_theta"] for kind in config.layer_types[-2:]]
    read = bench_generate.cache_bytes(
        SimpleNamespace(config=config, dtype=torch.bfloat16), [100, 2000]
    )
    assert bases == [1e4, 1e6] and read == 2 * (5 * (100 + 512) + 2100) * 256 * 2


def test_padded_prompts_of_bench_generate():
    args = generate_options(peers=("eager", "static", "compile"), strict=False, padded=True)
    row = bench_generate.bench("smoke", 3, 12, args)
    assert (
        row["model"] == "smoke, 1 layer, padded"
        and row["peers"]["compile"]["failed"]
        and not row["peers"]["static"]["failed"]
    )
    model = bench_peers.weights_of("smoke", torch.device("cpu"), 1)
    mask = bench_prompts.mask_of(bench_prompts.random_ids(model, 3, 12, seed=0, padded=True))
    assert mask.sum(-1).tolist() == [12, 10, 8] and bool((mask == mask.cummax(-1).values).all())
    assert (
        row["cache_bytes"]
        == 2
        * (12 + 10 + 8 + 3 * (3 // 2))
        * model.config.num_key_value_heads
        * model.config.head_dim
        * 2
    )
    # A float32 model stands for ours. Its distance from float32 is that of its steps after
    # padding from a whole forward.
    wide = copy.deepcopy(model).float()
    ids = bench_prompts.random_ids(wide, 3, 12, seed=0, padded=True)
    far = bench_measures.closeness(model, wide, ids, 4)
    assert far["steps_ours_max"] < 1e-4 and far["first_ours_max"] < 1e-4


@pytest.fixture(params=["gemma3", "qwen3_vl", "qwen3_5"])
def model_of_images(request, monkeypatch):
    """Return a small random model that takes images, and images 8 patches wide."""
    config = small_config(request.param)
    for each in (config, config.text_config):
        each.bos_token_id = each.eos_token_id = each.pad_token_id = None
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    monkeypatch.setattr(bench_prompts, "IMAGE_WIDTH", 8 * config.vision_config.patch_size)
    return model


@pytest.mark.parametrize("images, batch", [(1, 1), (2, 3)])
def test_prompts_have_images_between_parts_of_their_text(model_of_images, images, batch):
    model, args = model_of_images, generate_options(images=images)
    prompts = bench_prompts.prompts_of(model, batch, 6, args)
    token = model.config.image_token_id
    is_image = prompts.inputs["input_ids"] == token
    assert prompts.ids.shape == (batch, 6) and not bool((prompts.ids == token).any())
    assert torch.equal(prompts.inputs["input_ids"][~is_image].view(batch, 6), prompts.ids)
    # an image begins where a text token is before an image token
    begins = (is_image[:, 1:] & ~is_image[:, :-1]).sum(-1)
    assert begins.tolist() == [images] * batch
    assert prompts.lengths == [6 + int(is_image[0].sum())] * batch
    marks = prompts.inputs.get("mm_token_type_ids", prompts.inputs.get("token_type_ids"))
    assert torch.equal(marks, is_image.long())
    pixels = prompts.inputs["pixel_values"]
    assert len(pixels) == 1 or not torch.equal(pixels[0], pixels[-1])
    if "image_grid_thw" in prompts.inputs:
        assert prompts.inputs["image_grid_thw"].tolist() == [[1, 8, 8]] * (batch * images)
        assert len(pixels) == batch * images * 64
    else:
        assert len(pixels) == batch * images


def test_images_of_bench_generate(model_of_images, monkeypatch):
    model, args = model_of_images, generate_options(images=1)
    monkeypatch.setattr(bench_generate, "weights_of", lambda *_: model)
    row = bench_generate.bench("x", 2, 6, args)
    assert row["model"] == "x, 1 layer + 1 image" and row["images"] == 1 and row["image_tokens"] > 1
    assert all(peer["ms_per_token"]["runs"] == 1 for peer in row["peers"].values())
    prompts = bench_prompts.prompts_of(model, 2, 6, args)
    read = [n + args.new // 2 for n in prompts.lengths]
    assert row["cache_bytes"] == bench_generate.cache_bytes(model, read)
    call = bench_peers.set_up("eager", model, model, prompts, args).call
    model.mirage = SimpleNamespace(report="no kernels")
    told = bench_generate.beyond_times({"eager": call, "ours": call}, model, model, prompts, args)
    assert told == {"report": ["no kernels"], "same_tokens_as_eager": args.new}


@pytest.mark.parametrize("times_only", [False, True])
def test_times_only_compares_no_logits(times_only):
    model = bench_peers.weights_of("smoke", torch.device("cpu"), 1)
    args = generate_options(times_only=times_only)
    prompts = bench_prompts.prompts_of(model, 1, 6, args)
    call = bench_peers.set_up("eager", model, model, prompts, args).call
    fast = bench_peers.twin(model)
    fast.mirage = SimpleNamespace(report="no kernels")
    told = bench_generate.beyond_times({"eager": call, "ours": call}, model, fast, prompts, args)
    assert told["same_tokens_as_eager"] == args.new and ("logits" in told) == (not times_only)


def test_states_of_stock_and_float32_are_fed_from_step_to_step():
    """Mamba takes its cache by another name than other models. Without it, steps have no state."""
    model = AutoModelForCausalLM.from_config(small_config("mamba2")).eval().bfloat16()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    wide = copy.deepcopy(model).float()
    ids = bench_prompts.random_ids(model, 2, 6, seed=0)
    far = bench_measures.closeness(model, wide, ids, 6)
    assert far["steps_ours_max"] < 1e-4


def test_adapters_of_bench_generate_are_peft_s_and_leave_the_bare_model_as_it_is():
    pytest.importorskip("peft")
    sizes = dict(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    bare = LlamaForCausalLM(LlamaConfig(**sizes)).eval().bfloat16()
    model = configs.with_adapters(bench_peers.twin(bare), 4)
    adapted = [m for m in model.modules() if hasattr(m, "lora_A")]
    assert len(adapted) == 2 * 7 and not any(hasattr(m, "lora_A") for m in bare.modules())
    assert {p.dtype for m in adapted for p in m.lora_B.parameters()} == {torch.float32}
    assert (
        model.lm_head.weight is bare.lm_head.weight
        and adapted[0].base_layer.weight is bare.model.layers[0].self_attn.q_proj.weight
    )
    ids = torch.arange(5)[None]
    assert not torch.allclose(model(ids).logits, bare(ids).logits)
    named = partial(bench_generate.titled, "m")
    plain = {"lora": 0, "images": 0, "weights": "", "padded": False, "layers": None, "draft": ""}
    drafts = {"draft": "lookup", "draft_tokens": 3, "accept": 0.8}
    for options, name in (
        ({"lora": 4, "padded": True}, "m + LoRA 4, padded"),
        (drafts, "m + 3 drafts by lookup, 80% right"),
        ({"layers": 6}, "m, 6 layers"),
        ({"images": 1}, "m + 1 image"),
        ({"images": 2}, "m + 2 images"),
        ({"weights": "int4"}, "m, int4"),
    ):
        assert named(argparse.Namespace(**{**plain, **options})) == name
