"""optimize() on a GPU, with kernels that are resolved inside captured steps.

Every later change of the model must take effect.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mirage_hf.api import optimize, restore
from mirage_hf.errors import OptimizeError
from mirage_hf.swap.guard import BINDING_KEY
from tests.helpers.tiny_models import (
    FOUR,
    OTHERS,
    decode_logits,
    parted_at_a_tie,
    prompt,
    same,
    snapshot,
    tiny,
    twin_of,
)

pytestmark = pytest.mark.gpu
ASSETS = Path(__file__).parents[1] / "assets"
SIZES = dict(
    hidden_size=256,
    intermediate_size=640,
    num_attention_heads=8,
    num_key_value_heads=2,
    num_hidden_layers=2,
    initializer_range=0.05,
)
GREEDY = dict(do_sample=False, max_new_tokens=24)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIRAGE_HF_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def on_gpu(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return tiny(family, dtype=dtype, **SIZES).cuda()


def logits(model: Any, batch: int = 1) -> torch.Tensor:
    """Return the logits of a prefill and of four steps, through the model's forward."""
    outputs = []
    with torch.no_grad():
        out = model(prompt(batch, 6, seed=5).cuda(), use_cache=True)
        for step in range(4):
            outputs.append(out.logits[:, -1])
            out = model(
                prompt(batch, 1, seed=10 + step).cuda(),
                past_key_values=out.past_key_values,
                use_cache=True,
            )
    return torch.stack([*outputs, out.logits[:, -1]]).float()


@pytest.mark.parametrize("family", [*FOUR, *OTHERS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_as_close_to_float32_as_stocks(family: str, dtype: torch.dtype) -> None:
    model = on_gpu(family, dtype)
    exact, stock = logits(twin_of(model).float()), logits(model)
    optimize(model, tune="never", batch_sizes=(1, 3))
    ours = logits(model)
    assert all(r.status == "swapped" for r in model.mirage.report.rows), str(model.mirage.report)
    assert (ours - exact).abs().max() <= 1.5 * (
        stock - exact
    ).abs().max() + 0.01 * exact.abs().max()
    assert logits(model, 3).isfinite().all()
    layer = model.model.layers[0].__dict__[BINDING_KEY]
    assert layer.calls == 8 and layer.fallbacks == {"prefill": 2}


@pytest.mark.parametrize("family", FOUR)
def test_captured_steps_give_the_tokens_of_called_ones(family: str) -> None:
    model = optimize(on_gpu(family), tune="never")
    ids = prompt().cuda()
    captured = model.generate(ids, **GREEDY)
    assert model.mirage.report.decode.get("captured") == 1, model.mirage.report.decode
    optimize(model, tune="never", decode="eager")
    assert torch.equal(captured, model.generate(ids, **GREEDY))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_samples_of_captured_steps_are_those_of_called_ones(family: str) -> None:
    """Step programs that sample, with and without processors, give the same tokens.

    It does not matter whether steps are captured or called, nor how far they run ahead.
    """
    model = on_gpu(
        family, torch.float32
    )  # the first prompt runs HF's forward, later ones kernels, which round differently
    ids = prompt().cuda()
    kinds = {
        "defaults": {},
        "all tokens": {"top_k": 0},
        "top p and penalty": {"top_p": 0.9, "repetition_penalty": 1.2, "temperature": 0.8},
    }
    seen: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    for decode, depth in (("graph", None), ("graph", 0), ("graph", 5), ("eager", None)):
        optimize(model, tune="never", decode=decode)
        model.mirage.runner.depth = depth
        for name, options in kinds.items():
            for again in range(2):
                torch.manual_seed(11)
                tokens = model.generate(ids, do_sample=True, max_new_tokens=40, **options).tolist()
                seen[name][f"{decode}, depth {depth}, call {again}"] = tokens
        found = model.mirage.report.decode
        assert found["selection: on the device"] == found["step: all by kernels"] == 6, found
        assert decode == "eager" or found["captured"] == 6, found
    for name, runs in seen.items():
        first = next(iter(runs.values()))
        assert all(tokens == first for tokens in runs.values()), f"{family}, {name}: {runs}"


trained = pytest.mark.skipif(
    not (ASSETS / "tiny_llama").exists(), reason="the trained asset is not there"
)


def trained_and_ids(dtype: torch.dtype, text: str) -> tuple[Any, torch.Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny_llama", dtype=dtype).cuda().eval()
    return model, AutoTokenizer.from_pretrained(ASSETS / "tiny_llama")(
        text, return_tensors="pt"
    ).input_ids.cuda()


def by_kernels(model: Any, tune: str) -> None:
    """Generate once in captured steps, and assert that kernels ran all of them.

    No measured times are used, which could choose the library's attention.
    """
    counts = model.mirage.report.decode
    assert counts.get("captured") == 1, str(model.mirage.report)
    assert tune != "never" or counts.get("step: all by kernels") == 1, str(model.mirage.report)
    print(f"tune={tune!r}: {counts}")


@trained
@pytest.mark.parametrize("tune", ["auto", "never"])
@pytest.mark.parametrize("text", ["The ", "Return a list of ", "If the file "])
def test_the_trained_model_writes_the_same_256_tokens(text: str, tune: str) -> None:
    model, ids = trained_and_ids(torch.float32, text)
    before, options = snapshot(model), dict(do_sample=False, max_new_tokens=256, min_new_tokens=256)
    want = model.generate(ids, **options)
    optimize(model, tune=tune)
    got = model.generate(ids, **options)
    assert torch.equal(got, want), (
        f"{text!r}: parted at token {int((got != want).nonzero()[0, 1]) - ids.shape[1]}"
    )
    by_kernels(model, tune)
    restore(model)
    assert same(before, snapshot(model)) and torch.equal(model.generate(ids, **options), want)


@trained
@pytest.mark.parametrize("tune", ["auto", "never"])
@pytest.mark.parametrize("text", ["The ", "Return a list of ", "If the file "])
def test_the_trained_model_parts_only_at_ties_in_bfloat16(text: str, tune: str) -> None:
    model, ids = trained_and_ids(torch.bfloat16, text)
    print(f"{text!r}: parted at {parted_at_a_tie(model, ids, lambda m: optimize(m, tune=tune))}")
    by_kernels(model, tune)


def test_changes_after_capture_are_seen() -> None:
    stock = on_gpu("llama", torch.float32)
    model = optimize(twin_of(stock), tune="never")
    ids = prompt().cuda()

    def alike() -> bool:
        return torch.equal(model.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))

    assert alike()
    for change in (
        lambda m: m.model.layers[0].mlp.gate_proj.weight.data.mul_(-1),
        lambda m: m.load_state_dict({k: v.flip(0) for k, v in m.state_dict().items()}, assign=True),
        lambda m: setattr(m.model.layers[1].mlp, "act_fn", torch.nn.ReLU()),
        lambda m: m.cpu().cuda(),
    ):
        for m in (stock, model):
            change(m)
        assert alike()


@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "up_proj"], "all-linear"])
def test_adapters_may_change_between_calls(targets: Any) -> None:
    peft = pytest.importorskip("peft")

    def make() -> Any:
        m = on_gpu("llama", torch.float32)
        for seed, name in enumerate(("default", "other")):
            torch.manual_seed(seed)
            c = peft.LoraConfig(r=8, target_modules=targets, init_lora_weights=False)
            m = peft.get_peft_model(m, c) if name == "default" else (m.add_adapter(name, c), m)[1]
        return m.cuda().eval()

    stock, model = make(), optimize(make(), tune="never")
    assert {r.status for r in model.mirage.report.rows if r.pattern == "lora_down"} == {"swapped"}
    ids = prompt().cuda()
    for change in (
        lambda m: None,
        lambda m: None,
        lambda m: m.set_adapter("other"),
        lambda m: m.set_adapter("default"),
        lambda m: m.merge_adapter(),
        lambda m: m.unmerge_adapter(),
        lambda m: m.base_model.disable_adapter_layers(),
    ):
        for m in (stock, model):
            change(m)
        assert torch.equal(
            model.generate(input_ids=ids, **GREEDY), stock.generate(input_ids=ids, **GREEDY)
        )
    assert (
        model.mirage.report.decode["step: all by kernels"] >= 2
        and model.mirage.runner.prefills["captured, by kernels"] >= 1
    )


def test_an_optimized_model_holds_no_memory_after_it_moved() -> None:
    model = on_gpu("llama")
    optimize(model, tune="never")
    logits(model)
    model.mirage.release()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    weights = sum(p.numel() * p.element_size() for p in set(model.parameters()))
    model.cpu()
    torch.cuda.synchronize()
    assert before - torch.cuda.memory_allocated() >= weights


def test_restore_is_exact_and_backends_need_their_device() -> None:
    model = on_gpu("qwen2")
    before, want = snapshot(model), logits(model)
    optimize(model, tune="never")
    logits(model)
    restore(model)
    assert same(before, snapshot(model)) and torch.equal(logits(model), want)
    with pytest.raises(OptimizeError, match="backend 'cpu' does not run on cuda"):
        optimize(model, backend="cpu")
    assert decode_logits(model.float().cpu()).isfinite().all()
