"""optimize() with kernels from a real search.

The kernels are searched once, then taken from the cache, and give right results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mirage_hf.api import optimize, restore
from mirage_hf.errors import OptimizeWarning
from mirage_hf.swap import check
from tests.helpers.thorough import count
from tests.helpers.tiny_models import FOUR, decode_logits, parted_at_a_tie, prompt, tiny, twin_of

pytestmark = pytest.mark.models

ASSETS = Path(__file__).parents[1] / "assets"
CLOSE = dict(atol=3e-5, rtol=1e-4)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIRAGE_HF_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


SLOW, THOROUGH = pytest.mark.slow, [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(f, marks=SLOW) for f in ("llama", "gemma2")),
        # qwen3 is in test_step.py too
        *(pytest.param(f, marks=THOROUGH) for f in ("mistral", "qwen2", "qwen3", "olmo2")),
    ],
)
def test_searched_kernels_decode_as_stock(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        check, "SAMPLES", count(40, 16)
    )  # for layers this small, the largest error of 8 calls is a matter of luck
    stock = tiny(family, num_hidden_layers=2)
    model = optimize(twin_of(stock), batch_sizes=(1, 2) if family in FOUR else (2,))
    rows = model.mirage.report.rows
    assert {r.status for r in rows if r.kernel} == {"swapped"}
    # the kernel of one head has no norm over all heads of a token
    assert {r.kernel for r in rows if r.pattern != "attention" or family != "olmo2"} == {"1 kernel"}
    assert all(0 <= r.error_bound < 1e-9 for r in model.mirage.report.swapped)
    for batch in (1, 2):
        torch.testing.assert_close(
            decode_logits(model, batch), decode_logits(stock, batch), **CLOSE
        )
    given = dict(do_sample=False, max_new_tokens=12)
    assert torch.equal(model.generate(prompt(2), **given), stock.generate(prompt(2), **given))
    assert model.mirage.report.decode["step: all by kernels"] == 1


@pytest.mark.slow
def test_layer_norms_of_wide_rows_in_float32_are_in_kernels() -> None:
    """The mean of 256 equal numbers is rounded. That of 32 is exact."""
    stock = tiny(
        "cohere", num_hidden_layers=1, hidden_size=256, initializer_range=0.05, use_qk_norm=True
    )
    model = optimize(twin_of(stock), batch_sizes=(1, 3))
    assert {(r.status, r.kernel) for r in model.mirage.report.rows if r.kernel} == {
        ("swapped", "1 kernel")
    }, str(model.mirage.report)
    given = dict(do_sample=False, max_new_tokens=12)
    assert torch.equal(model.generate(prompt(3), **given), stock.generate(prompt(3), **given))
    assert model.mirage.report.decode["step: all by kernels"] == 1


@pytest.mark.slow
def test_the_second_time_nothing_is_searched() -> None:
    sizes = dict(hidden_size=64, intermediate_size=112)
    first, second = (optimize(tiny("llama", **sizes)).mirage.report for _ in range(2))
    assert {r.source for r in first.swapped} == {"searched"} and {
        r.source for r in second.swapped
    } == {"cache"}
    assert [r.digest for r in first.swapped] == [r.digest for r in second.swapped]


def test_kernels_that_cannot_be_kept_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (blocker := tmp_path / "a_file").write_text("")
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(blocker / "cache"))
    with pytest.warns(
        OptimizeWarning,
        match=r"2 kernels were made and not kept, .* makes them anew \(.*set MIRAGE_HF_CACHE",
    ):
        model = optimize(tiny("llama", num_hidden_layers=1), ["linear_residual"])
    assert {r.status for r in model.mirage.report.rows} == {"swapped"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("patterns", "pattern", "count"), [(None, "lora_down", 6), (["lora"], "lora", 9)]
)
def test_adapters_run_in_the_kernels_of_their_layers_or_in_one_each(
    dtype: torch.dtype, patterns: Any, pattern: str, count: int
) -> None:
    peft = pytest.importorskip("peft")

    def make() -> nn.Module:
        model = tiny("llama", dtype=dtype)
        torch.manual_seed(1)
        options = dict(
            r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
        )
        return peft.get_peft_model(model, peft.LoraConfig(**options)).eval()

    stock, model = make(), optimize(make(), patterns=patterns)
    report = model.mirage.report
    rows = [r for r in report.rows if r.pattern == pattern]
    swapped = report.rows if patterns is None else rows
    assert len(rows) == count and all(
        r.status == "swapped" and r.kernel == "1 kernel" for r in swapped
    ), str(report)
    close = CLOSE if dtype == torch.float32 else dict(atol=0.15, rtol=0.05)
    torch.testing.assert_close(decode_logits(model), decode_logits(stock), **close)


@pytest.mark.slow
@pytest.mark.skipif(not (ASSETS / "tiny_llama").exists(), reason="the trained asset is not there")
@pytest.mark.thorough  # the demo compares tokens of this model before and after a search, too
@pytest.mark.parametrize("adapted", [False, True])
def test_the_trained_model_writes_the_same_256_tokens(adapted: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(
        ASSETS / "tiny_llama", dtype=torch.float32
    ).eval()
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.PeftModel.from_pretrained(model, ASSETS / "tiny_llama_lora").eval()
    ids = AutoTokenizer.from_pretrained(ASSETS / "tiny_llama")(
        "The ", return_tensors="pt"
    ).input_ids
    options = dict(do_sample=False, max_new_tokens=256, min_new_tokens=256)
    want = model.generate(input_ids=ids, **options)
    optimize(model)
    assert torch.equal(model.generate(input_ids=ids, **options), want)
    assert {r.status for r in model.mirage.report.rows if r.kernel} == {"swapped"}
    assert model.mirage.report.decode["step: all by kernels"] == 1
    assert torch.equal(restore(model).generate(input_ids=ids, **options), want)


@pytest.mark.slow
@pytest.mark.skipif(not (ASSETS / "tiny_llama").exists(), reason="the trained asset is not there")
@pytest.mark.parametrize(
    "text",
    [
        "The ",
        *(
            pytest.param(t, marks=pytest.mark.thorough)
            for t in ("Return a list of ", "If the file ")
        ),
    ],
)
def test_the_trained_model_parts_only_at_ties_in_bfloat16(text: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(
        ASSETS / "tiny_llama", dtype=torch.bfloat16
    ).eval()
    ids = AutoTokenizer.from_pretrained(ASSETS / "tiny_llama")(text, return_tensors="pt").input_ids
    tokens = count(256, 96)
    print(f"{text!r}: parted at {parted_at_a_tie(model, ids, optimize, tokens)}")


def test_prompts_of_another_batch_size_are_stocks() -> None:
    stock = tiny("qwen3")
    model = optimize(twin_of(stock))
    options = dict(do_sample=False, max_new_tokens=6)
    assert torch.equal(model.generate(prompt(3), **options), stock.generate(prompt(3), **options))
    assert model.mirage.report.fallbacks.keys() == {"prefill", "no kernel for 3 rows"}
