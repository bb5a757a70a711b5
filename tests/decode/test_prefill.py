"""Prefills of short prompts that are replayed.

On a CPU a "graph" calls what was captured; the code is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationMixin, GPT2Config, GPT2LMHeadModel

from mirage_hf.api import optimize
from mirage_hf.decode import (
    cache_layers,
    call_plan,
    generate,
    install,
    masks,
    prefill,
    prefill_checks,
    session,
)
from mirage_hf.decode import prompts as bucketed
from mirage_hf.decode import rings as ring_slots
from mirage_hf.decode import runner as decode_runner
from mirage_hf.errors import CodegenError, MirageError
from mirage_hf.layers import prefill as layer_prefill
from mirage_hf.layers import window_attention
from mirage_hf.pipeline import resolver
from tests.helpers import tiny_models
from tests.helpers.generate_comparison import (
    FAMILIES,
    FULL,
    PAD,
    assert_same,
    both,
    left_padded,
    prompt,
    tiny,
)
from tests.helpers.generate_features import fake_captures

pytestmark = pytest.mark.models

FULL = {**FULL, "max_new_tokens": 6}
LENGTHS = (7, 9, 30, 7, 64, 63, 65, 70, 128, 3, 1)


@pytest.fixture(autouse=True)
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return fake_captures(monkeypatch)


def alike(model: Any, batch: int, length: int) -> None:
    assert_same(*both(model, lambda: {"inputs": prompt(batch, length, seed=length), **FULL}))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_changing_length(family: str, batch: int, called: list[str]) -> None:
    """Compare tokens, logits and remaining keys.

    An earlier and longer prompt may have left data in the block.
    """
    model = tiny(family)
    runner = install(model)
    for length in LENGTHS:
        alike(model, batch, length)
    windowed = any(window is not None for _, window in masks.MaskPlan.of(model.config).windows)
    # eight prompts have a bucket of 64, three one of 128; the first of each runs HF's forward
    assert runner.prefills == ({} if windowed else {"captured": 7 + 2}) and called.count(
        "prefill"
    ) == (0 if windowed else 2)


def test_a_prompt_that_is_not_plain_is_not_padded(called: list[str]) -> None:
    model = tiny("llama")
    runner = install(model)
    for _ in range(3):
        alike(model, 2, 9)
    seen = dict(runner.prefills)
    assert seen == {"captured": 2}
    assert_same(*both(model, lambda: {**left_padded(), **FULL}))
    assert_same(
        *both(
            model,
            lambda: {"inputs": prompt(2, 9), "position_ids": torch.arange(4, 13)[None], **FULL},
        )
    )
    alike(model, 2, 5)
    assert runner.prefills == {"captured": 3} and called.count("prefill") == 1
    block = runner.pool.lease(2, 1024, (None, None), torch.device("cpu"))
    large = runner.pool.lease(2, 4096, (None, None), torch.device("cpu"))
    every, some = (masks.MaskPlan((("", window),), False) for window in (None, 1000))
    for where, tokens in (
        (block, {960: 960, 961: 1024, 1025: None}),
        (large, {2047: 2048, 2048: 2048, 2049: 2304, 4096: 4096}),
    ):
        shapes = {n: bucketed.PromptShape.of(n, where, every) for n in tokens}
        assert {n: s and s.tokens for n, s in shapes.items()} == tokens and all(
            s is None or s.is_plain for s in shapes.values()
        )
    cut = [bucketed.PromptShape.of(n, block, some) for n in (960, 961)]
    assert [(s.windows, s.exceeds_windows_from, s.is_plain) for s in cut if s] == [
        ((None, None), 0, True),
        ((1000, 1000), 1001, False),
    ]


def test_a_changed_model_is_captured_anew(called: list[str]) -> None:
    model = tiny("llama")
    runner = install(model)
    for _ in range(3):
        alike(model, 1, 9)
    model.model.norm.weight = torch.nn.Parameter(2 * model.model.norm.weight.detach())
    for _ in range(3):
        alike(model, 1, 9)
    assert called.count("prefill") == 2
    model.double()  # other keys, other logits: the first prompt runs HF's forward again
    for _ in range(3):
        alike(model, 1, 9)
    assert called.count("prefill") == 3 and set(runner.prefills) == {"captured"}


@pytest.mark.parametrize("by_config", [False, True])
def test_prompts_that_see_what_comes_after_them_are_not_filled_up(
    by_config: bool, called: list[str]
) -> None:
    changes = (
        dict(layer_types=["full_attention"] * 3, use_bidirectional_attention=True)
        if by_config
        else {}
    )
    model = tiny_models.tiny("gemma3" if by_config else "llama", **changes)
    runner = install(model)
    for _ in range(3):
        alike(model, 2, 9)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    for length in (9, 9, 30, 9):
        alike(model, 2, length)
    ((why, count),) = [found for found in runner.prefills.items() if found[0] != "captured"]
    assert (
        why.startswith(
            "called: capture failed (MirageError: prefill: tokens see what comes after them"
        )
        and count == 1
    )
    assert called.count("prefill") == (not by_config)


def test_prompts_are_compared_over_tokens_that_there_are(called: list[str]) -> None:
    """The head has more rows than the table of tokens, as if padded to a round number."""
    model = tiny("llama")
    head = torch.nn.Linear(32, 999)
    with torch.no_grad():
        head.bias.fill_(-1e3)
        head.bias[:99] = 0
    model.lm_head = head
    runner = install(model)
    for _ in range(3):
        alike(model, 2, 9)
    assert runner.prefills == {"captured": 2}


def test_tokens_of_other_dtypes_are_not_rounded(called: list[str]) -> None:
    """By a captured prompt, which would take what no embedding takes."""
    model = tiny("llama")
    runner = install(model)
    for _ in range(3):
        alike(model, 1, 9)
    assert_same(*both(model, lambda: {"inputs": prompt(1, 9).int(), **FULL}))
    with pytest.raises(RuntimeError, match="FloatTensor"):
        model.generate(prompt(1, 9) + 0.7, **FULL)
    assert runner.prefills == {"captured": 3} and runner.counts == {
        "captured": 4,
        "stock: input_ids of torch.float32": 1,
    }


def test_prompts_are_not_filled_up_beyond_a_table_of_positions(called: list[str]) -> None:
    """On a GPU the look-up would end the process."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=100, initializer_range=0.15
        )
    ).eval()
    model.generation_config.pad_token_id = PAD
    runner = install(model)
    for length in (70, 71, 9, 10, 90):
        alike(model, 2, length)
    assert runner.prefills == {"captured": 1} and called.count("prefill") == 1


def test_a_forward_that_cannot_be_captured_is_hfs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise TypeError("no tensors here")

    monkeypatch.setattr(prefill, "capture", refuse)
    model = tiny("llama")
    runner = install(model)
    for length in (9, 9, 30, 9):
        alike(model, 1, length)
    assert runner.prefills == {"called: capture failed (TypeError: no tensors here)": 1}


# -- prompts by kernels ---------------------------------------------------------------------------

EVERY: dict[str, Any] = dict(layer_types=["full_attention"] * 3)
PROMPTED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": EVERY,
    "llama, biases": dict(attention_bias=True, mlp_bias=True),
    "llama, gelu": dict(hidden_act="gelu"),
    "qwen3, eager": dict(**EVERY, attn_implementation="eager"),
    **{
        family: dict(num_hidden_layers=2)
        for family in ("granite", "gemma", "olmo2", "phi3", "smollm3", "glm4")
    },
    "gemma3": dict(layer_types=["full_attention"] * 2, num_hidden_layers=2),
}


ALIKE = ("granite", "gemma", "phi3", "smollm3", "glm4")
FEW = [
    pytest.param(name, marks=pytest.mark.thorough) if name in ALIKE else name for name in PROMPTED
]
"""Where one family's layers are as another's."""


def optimized(family: str, changes: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    model = tiny_models.tiny(family.partition(",")[0], **changes)
    return model, optimize(
        tiny_models.twin_of(model), **{"batch_sizes": (1, 3), "verify": False, **options}
    )


def agree(stock: Any, ours: Any, batch: int, length: int) -> None:
    given = {"inputs": prompt(batch, length, seed=length), **FULL}
    assert_same(stock.generate(**given), ours.generate(**given))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTED)
def test_prompts_by_kernels(name: str, called: list[str], resolved: list[Any]) -> None:
    stock, ours = optimized(name, PROMPTED[name])
    for batch, length in (
        (1, 7),
        (1, 9),
        (1, 64),
        (3, 5),
        (3, 65),
        (3, 6),
        (3, 66),
        (1, 1),
        (2, 4),
        (2, 5),
    ):
        agree(stock, ours, batch, length)
    runner = ours.generate.runner
    # two prompts and more of 64 tokens, of one row and of three, and of 128 of three; none by
    # kernels of two rows
    assert (
        runner.prefills == {"captured, by kernels": 3 + 1 + 1, "captured": 1}
        and called.count("prefill") == 4
    )


def agree_padded(stock: Any, ours: Any, *lengths: int, **more: Any) -> None:
    given = {**left_padded(lengths, seed=lengths[-1]), **FULL, **more}
    assert_same(stock.generate(**given), ours.generate(**given))


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_padded_prompts_by_kernels(name: str, called: list[str], resolved: list[Any]) -> None:
    """Captured apart from those without padding, and replayed for any other padding."""
    stock, ours = optimized(name, PROMPTED[name])
    agree(stock, ours, 3, 5)
    for lengths in ((4, 11, 7), (9, 1, 60), (64, 2, 3), (5, 5, 6)):
        agree_padded(stock, ours, *lengths)
    agree(stock, ours, 3, 6)
    agree_padded(stock, ours, 66, 65, 1)
    agree_padded(stock, ours, 64, 70, 128)
    assert (
        ours.generate.runner.prefills == {"captured, by kernels": 3 + 1 + 1}
        and called.count("prefill") == 3
    )


@pytest.mark.slow
def test_positions_behind_padding_that_count_otherwise_are_hfs(
    called: list[str], resolved: list[Any]
) -> None:
    stock, ours = optimized("llama", {})
    for _ in range(3):
        given = left_padded((4, 11, 7))
        agree_padded(
            stock,
            ours,
            4,
            11,
            7,
            position_ids=given["attention_mask"].cumsum(-1).sub(1).clamp_min(0) + 2,
        )
        agree_padded(stock, ours, 4, 11, 7, position_ids=torch.arange(11)[None].expand(3, -1))
    assert ours.generate.runner.prefills == {}


@pytest.mark.slow
def test_a_mask_of_one_row_for_several_is_stocks(called: list[str], resolved: list[Any]) -> None:
    """Which raises; kernels would read the first row's tokens for all."""
    stock, ours = optimized("llama", {})
    for lengths in ((4, 11, 7), (9, 1, 60), (64, 2, 3)):
        agree_padded(stock, ours, *lengths)
        for model in (stock, ours):
            with pytest.raises(IndexError):
                model.generate(
                    prompt(3, 11), attention_mask=torch.tensor([[0] * 4 + [1] * 7]), **FULL
                )


@pytest.mark.slow
def test_keys_of_padded_rows_that_go_to_wrong_slots_are_found(
    called: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = optimized("llama", {})
    take = bucketed.BucketedPrompts.take

    def one_off(self: Any, ids: torch.Tensor, padding: torch.Tensor | None) -> None:
        take(self, ids, padding)
        if padding is not None:
            self.sources.sub_(1).clamp_min_(0)

    monkeypatch.setattr(bucketed.BucketedPrompts, "take", one_off)
    for lengths in ((4, 11, 7), (9, 1, 60), (64, 2, 3)):
        agree_padded(stock, ours, *lengths)
    ((why, count),) = ours.generate.runner.prefills.items()
    assert (
        why.startswith(
            "not by kernels: capture failed (MirageError: prefill: logits, keys or values differ"
        )
        and count == 1
    )


@pytest.mark.slow
def test_padded_prompts_where_layers_have_rings(called: list[str], resolved: list[Any]) -> None:
    """Earlier texts wrapped around the ring and left NaN. Some prompts wrap around themselves."""
    kinds = ["full_attention", "sliding_attention"]
    stock, ours = optimized(
        "gemma3", dict(layer_types=kinds, num_hidden_layers=2, sliding_window=100), batch_sizes=(3,)
    )
    for lengths in ((9, 1, 60), (64, 3, 31), (3, 64, 5)):
        agree_padded(stock, ours, *lengths, max_new_tokens=200)
        agree(stock, ours, 3, 103)
        for block in ours.generate.runner.pool._idle:
            for ring, slab in block.ring_slabs:
                slab[:, :, :, : ring.window] = torch.nan
    assert ours.generate.runner.prefills == {"captured, by kernels": 4}
    assert any(
        ring is not None for block in ours.generate.runner.pool._idle for ring in block.rings
    )


@pytest.mark.slow
def test_padded_prompts_see_nothing_that_was_left(
    called: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rings and behind what else was written: 0 · NaN is NaN."""
    monkeypatch.setattr(ring_slots, "GRAIN", 64)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    stock, ours = optimized("gemma3", dict(layer_types=kinds, sliding_window=100), batch_sizes=(3,))
    for lengths in ((9, 1, 60), (4, 11, 60), (60, 3, 31)):
        agree_padded(stock, ours, *lengths, max_new_tokens=90)
        (block,) = ours.generate.runner.pool._idle
        written = {id(slab): ring.window for ring, slab in block.ring_slabs}
        for slab in block.slabs:
            slab[:, :, :, : written.get(id(slab), block.dirty)] = torch.nan
        assert written
    assert ours.generate.runner.prefills == {"captured, by kernels": 2}


WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        dict(
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            sliding_window=70,
        ),
    ),
    "qwen3": (
        "qwen3",
        dict(
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            sliding_window=66,
            use_sliding_window=True,
        ),
    ),
    "mistral": ("mistral", dict(sliding_window=64)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("captured", "rings"),
    [
        (True, True),
        (False, False),
        *(
            pytest.param(*both, marks=pytest.mark.thorough)
            for both in ((True, False), (False, True))
        ),
    ],
)
@pytest.mark.parametrize("name", WINDOWED)
def test_prompts_beyond_a_window(
    name: str,
    captured: bool,
    rings: bool,
    called: list[str],
    resolved: list[Any],
    calling: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts run in chunks of tokens, into rings and into full caches.

    They run with and without padding, over slots that hold NaN.
    """
    monkeypatch.setattr(ring_slots, "GRAIN", 64)
    monkeypatch.setattr(window_attention, "LEAST_RUN", 64)
    if not captured:
        monkeypatch.setattr(bucketed, "MAX_CAPTURED_TOKENS", 0)
    stock, ours = optimized(*WINDOWED[name], batch_sizes=(1, 3))
    runner = ours.generate.runner

    def given(ids: dict[str, Any]) -> dict[str, Any]:
        return {
            **ids,
            **FULL,
            "max_new_tokens": 9,
            "min_new_tokens": 9,
            **({} if rings else {"past_key_values": DynamicCache()}),
        }

    for length in (200, 201, 65, 66, 129, 199, 401):
        ids = {"inputs": prompt(1, length, seed=length)}
        assert_same(stock.generate(**given(ids)), ours.generate(**given(ids)))
        for block in runner.pool._idle:
            turning = {id(slab): ring.window for ring, slab in block.ring_slabs}
            assert bool(turning) == any(block.rings) and bool(turning) <= rings
            for slab in block.slabs:
                slab[:, :, :, : turning.get(id(slab), block.dirty)] = torch.nan
    assert any(any(block.rings) for block in runner.pool._idle) == rings
    for lengths in ((200, 3, 150), (193, 66, 1), (130, 129, 65), (196, 7, 102)):
        ids = left_padded(lengths, seed=lengths[1])
        assert_same(stock.generate(**given(ids)), ours.generate(**given(ids)))
    assert runner.prefills == (
        {"called, by kernels": 4, "captured, by kernels": 5}
        if captured
        else {"called, by kernels": 9}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama, biases", "gemma", "olmo2"])
def test_rows_of_large_batches_take_turns(
    name: str, called: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    half = layer_prefill.LayerPrefill._mlp

    def counted(self: Any, kernels: Any, x: torch.Tensor, packed: Any = None) -> torch.Tensor:
        seen.append(x.shape[0])
        return half(self, kernels, x, packed)

    monkeypatch.setattr(layer_prefill, "MOST_ROWS", 128)
    monkeypatch.setattr(layer_prefill.LayerPrefill, "_mlp", counted)
    stock, ours = optimized(name, PROMPTED[name])
    for length in (7, 66, 9, 67):
        agree(stock, ours, 3, length)
    assert (
        ours.generate.runner.prefills == {"captured, by kernels": 2}
        and {64, 128} <= set(seen)
        and max(seen) == 128
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_prompts_with_longrope_are_by_kernels_or_called(
    family: str, called: list[str], resolved: list[Any]
) -> None:
    """HF's forward reads the length on the host, and is not captured."""
    stock = tiny_models.longrope(family, 100)
    ours = optimize(tiny_models.twin_of(stock), batch_sizes=(1,), verify=False)
    for batch, length in (
        (1, 7),
        (1, 9),
        (1, 64),
        (1, 70),
        (1, 80),
        (2, 4),
        (2, 5),
        (2, 6),
        (1, 8),
    ):
        agree(stock, ours, batch, length)
    assert (
        ours.generate.runner.prefills == {"captured, by kernels": 3}
        and called.count("prefill") == 1
    )


@pytest.mark.slow
def test_prompts_with_a_softcap_are_hfs(called: list[str], resolved: list[Any]) -> None:
    full = dict(
        layer_types=["full_attention"],
        num_hidden_layers=1,
        attn_implementation="eager",
        attn_logit_softcapping=3.0,
    )
    stock, ours = optimized("gemma2", full)
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    assert ours.generate.runner.prefills == {
        "not by kernels: the library's attention has no softcap": 1,
        "captured": 2,
    }


@pytest.mark.slow
def test_a_wrong_kernel_of_a_prompt_is_found(
    called: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = optimized("llama", {})
    right = resolver.resolve
    monkeypatch.setattr(
        resolver,
        "resolve",
        lambda program, **how: (
            tiny_models.Resolved(program, scale=1.01)
            if how["pattern"] == "prompt_gate"
            else right(program, **how)
        ),
    )
    for length in (7, 8, 9, 70, 71):
        agree(stock, ours, 1, length)
    counted = ours.generate.runner.prefills
    assert counted.pop("captured") == 3 and len(counted) == 2  # for each bucket
    assert all(
        why.startswith(
            "not by kernels: capture failed (MirageError: prefill: logits, keys or values differ"
        )
        for why in counted
    )


@pytest.mark.slow
def test_a_kernel_of_a_prompt_that_writes_nothing_is_found(
    called: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = optimized("llama", {})
    right = layer_prefill.LayerPrefill.__call__

    def forgetful(self: Any, found: Any, x: torch.Tensor, at: Any) -> torch.Tensor:
        kept = at.values.clone()
        y = right(self, found, x, at)
        at.values.copy_(kept)
        return y

    monkeypatch.setattr(layer_prefill.LayerPrefill, "__call__", forgetful)
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    assert (
        ours.generate.runner.prefills["captured"] == 2
        and "captured, by kernels" not in ours.generate.runner.prefills
    )


def test_a_comparison_of_prompts_leaves_what_the_model_wrote() -> None:
    block = SimpleNamespace(
        lowest=None,
        rings=(None,),
        logits=torch.ones(1, 3),
        keys={0: torch.ones(1, 1, 8, 2)},
        values={0: torch.ones(1, 1, 8, 2)},
    )
    far, allowed = prefill_checks._difference(
        lambda: None,
        lambda: block.keys[0].fill_(2.0),
        block,  # type: ignore[arg-type]
        4,
    )
    assert not far <= allowed
    assert all(
        bool((x == 1).all()) for x in (block.logits, block.keys[0][:, :, :4], block.values[0])
    )


@pytest.mark.parametrize("far", [0.0, 0.02])  # 0.02: one of 28 layers in bfloat16
def test_one_layer_of_many_that_looks_ahead_is_seen(far: float) -> None:
    block: Any = SimpleNamespace(
        lowest=None,
        rings=(None,),
        logits=torch.ones(1, 3, dtype=torch.bfloat16),
        keys={0: torch.ones(1, 1, 8, 2)},
        values={},
    )
    ids = torch.arange(8)[None].clone()
    given: Any = SimpleNamespace(ids=torch.zeros_like(ids), last=torch.tensor([7]))

    def stock() -> None:
        block.logits.fill_(1.0)
        block.keys[0].fill_(1.0 + far * float(given.ids[0, -1] == given.ids[0, 0]))

    if far:
        with pytest.raises(MirageError, match="see what comes after them"):
            prefill_checks.check_causal(stock, block, given, ids)
    else:
        prefill_checks.check_causal(stock, block, given, ids)


@pytest.mark.slow
def test_numbers_that_change_after_a_capture(called: list[str], resolved: list[Any]) -> None:
    stock, ours = optimized("llama", {})
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    for model in (stock, ours):
        model.model.norm.variance_epsilon = 0.5
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    # graphs are for these numbers: with others the first prompt of its bucket is HF's forward again
    assert ours.generate.runner.prefills == {"captured, by kernels": 2, "captured": 2}


# -- prompts whose kernels are called -------------------------------------------------------------


@pytest.fixture
def calling(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(decode_runner, "kernels_pay", lambda device: True)


@pytest.fixture
def only_called(calling: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where prompts are long."""
    monkeypatch.setattr(bucketed, "MAX_CAPTURED_TOKENS", 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_prompts_whose_kernels_are_called(
    name: str, only_called: None, resolved: list[Any]
) -> None:
    """Of any length, in blocks that held a prompt or none, with what longer ones have left."""
    stock, ours = optimized(name, PROMPTED[name])
    for batch, length in (
        (1, 7),
        (1, 300),
        (1, 9),
        (3, 5),
        (3, 65),
        (3, 6),
        (1, 200),
        (2, 4),
        (1, 1),
        (1, 9),
    ):
        agree(stock, ours, batch, length)
    assert ours.generate.runner.prefills == {
        "called, by kernels": 5 + 2
    }  # not the first of a batch, and none of two rows
    assert {p.inputs[0].dims[0] for p in resolved} >= {64, 128, 256}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
def test_padded_prompts_whose_kernels_are_called(
    name: str, only_called: None, resolved: list[Any]
) -> None:
    """Their caches, too, are returned and go on."""
    stock, ours = optimized(name, PROMPTED[name], batch_sizes=(3,))
    agree(stock, ours, 3, 5)
    for lengths in ((4, 11, 7), (70, 1, 130), (200, 2, 3)):
        agree_padded(stock, ours, *lengths)
    given = {**left_padded((9, 30, 2)), **FULL}
    first = [model.generate(**given) for model in (stock, ours)]
    assert_same(*first)
    mask = torch.cat(
        [given["attention_mask"], torch.ones(3, FULL["max_new_tokens"] + 4, dtype=torch.long)], -1
    )
    more = [
        model.generate(
            torch.cat([seen.sequences, prompt(3, 4)], -1),
            past_key_values=seen.past_key_values,
            attention_mask=mask,
            **FULL,
        )
        for model, seen in zip((stock, ours), first, strict=True)
    ]
    assert_same(*more)
    assert ours.generate.runner.prefills == {"called, by kernels": 4}


@pytest.mark.slow
def test_a_prompt_that_hfs_forward_lacks_the_memory_for_is_by_kernels(
    only_called: None, resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one, too, which is HF's elsewhere."""
    stock, ours = optimized("llama", {}, batch_sizes=(3,))
    given = {"inputs": prompt(3, 240), **FULL}
    want = stock.generate(**given)

    def no_memory(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GenerationMixin, "_prefill", no_memory)
    assert_same(want, ours.generate(**given))
    assert ours.generate.runner.prefills == {"called, by kernels": 1}


@pytest.mark.slow
def test_caches_of_called_prompts_are_returned(only_called: None, resolved: list[Any]) -> None:
    """Of blocks in which the model's own forward never ran, those that a call grew out of too."""
    stock, ours = optimized("llama", {})
    for length in (7, 9, 300, 500):
        given = {"inputs": prompt(1, length, seed=length), **FULL}
        first = [model.generate(**given) for model in (stock, ours)]
        assert_same(*first)
        more = [
            model.generate(
                torch.cat([seen.sequences, prompt(1, 4)], -1),
                past_key_values=seen.past_key_values,
                **FULL,
            )
            for model, seen in zip((stock, ours), first, strict=True)
        ]
        assert_same(*more)
    assert ours.generate.runner.prefills == {"called, by kernels": 3}


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C in the second layer of a prompt's forward."""
    update = cache_layers.PrefillLayer.update

    def to_the_second(self: Any, *states: Any, **kwargs: Any) -> Any:
        if self.index == 1:
            raise KeyboardInterrupt
        return update(self, *states, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cache_layers.PrefillLayer, "update", to_the_second)
        yield


@pytest.mark.slow
def test_a_replayed_prompt_returns_all_layers_behind_a_forward_that_failed(
    called: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = optimized("llama", {})
    for length in (7, 8):
        agree(stock, ours, 1, length)
    with interrupted(monkeypatch), pytest.raises(KeyboardInterrupt):
        ours.generate(prompt(1, 70), **FULL)
    agree(stock, ours, 1, 9)
    assert called.count("prefill") == 1


@pytest.mark.slow
def test_a_prompt_is_called_in_a_block_with_some_of_its_memory(
    only_called: None, resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with a ring take theirs behind those without."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    stock, ours = optimized("gemma3", dict(layer_types=kinds, sliding_window=400), batch_sizes=(1,))
    for length in (7, 9):
        agree(stock, ours, 1, length)
    given = dict(max_new_tokens=500, do_sample=False)
    mask = torch.ones(1, 300, dtype=torch.long)
    mask[:, :3] = 0
    with interrupted(monkeypatch), pytest.raises(KeyboardInterrupt):
        ours.generate(prompt(1, 300), attention_mask=mask, **given)
    assert (
        stock.generate(prompt(1, 300), **given).tolist()
        == ours.generate(prompt(1, 300), **given).tolist()
    )
    assert ours.generate.runner.prefills == {"called, by kernels": 2}


@pytest.mark.slow
def test_prompts_are_called_until_they_are_captured(
    calling: None, called: list[str], resolved: list[Any]
) -> None:
    stock, ours = optimized("llama", {})
    seen = []
    for length in (7, 70, 8, 9, 71):
        agree(stock, ours, 1, length)
        seen.append(dict(ours.generate.runner.prefills))
    assert seen == [
        {},
        {"called, by kernels": 1},
        *({"called, by kernels": 1, "captured, by kernels": n} for n in (1, 2, 3)),
    ]
    for model in (stock, ours):
        model.model.norm.weight = torch.nn.Parameter(2 * model.model.norm.weight.detach())
    for length in (7, 300):  # weights that the kernels were not made for
        agree(stock, ours, 1, length)
    assert ours.generate.runner.prefills == seen[-1]


@pytest.mark.slow
def test_a_changed_model_has_no_room_that_it_does_not_use(
    only_called: None, resolved: list[Any]
) -> None:
    """In another dtype its layers would take memory of their own beside it."""
    stock, ours = optimized("llama", {}, batch_sizes=(1,))
    for length in (7, 9):
        agree(stock, ours, 1, length)
    for model in (stock, ours):
        model.double()
    for length in (7, 300, 300):
        agree(stock, ours, 1, length)
    for block in ours.generate.runner.pool._idle:
        assert [slab.dtype for slab in block.slabs] == [torch.float64] * 2


@pytest.mark.slow
def test_kernels_that_a_capture_found_wrong_are_not_called(
    calling: None, called: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here only those of 128 rows are, of a model whose own forward cannot be captured either."""
    stock, ours = optimized("llama", {}, batch_sizes=(1,))
    right = resolver.resolve
    monkeypatch.setattr(
        resolver,
        "resolve",
        lambda program, **how: (
            tiny_models.Resolved(program, scale=1.5)
            if how["pattern"] == "prompt_gate" and program.inputs[0].dims[0] == 128
            else right(program, **how)
        ),
    )
    monkeypatch.setattr(
        prefill,
        "check_causal",
        lambda *of: torch.zeros(1).fill_(torch.zeros((), device="meta").item()),
    )
    for length in (70, 200, 71, 72):
        agree(stock, ours, 1, length)
    assert ours.generate.runner.prefills["called, by kernels"] == 1


@pytest.mark.slow
def test_a_model_that_is_as_it_was_before_has_its_prompts_called(
    only_called: None, resolved: list[Any]
) -> None:
    """As one whose adapters are switched off and on again."""
    stock, ours = optimized("llama", {}, batch_sizes=(1,))
    weights = [model.model.norm.weight for model in (stock, ours)]
    own, other = [weight.data for weight in weights], torch.full((32,), 0.5)
    for length, changed in (
        (7, False),
        (8, False),
        (9, True),
        (10, False),
        (11, True),
        (12, True),
        (13, False),
    ):
        for weight, data in zip(weights, own, strict=True):
            weight.data = other if changed else data
        agree(stock, ours, 1, length)
    assert ours.generate.runner.prefills == {"called, by kernels": 3}


@pytest.mark.slow
def test_prompts_are_not_called_where_they_cannot_be(
    only_called: None, resolved: list[Any]
) -> None:
    """Of models with other attention, with padding, positions of one's own or a cache."""
    full = dict(
        layer_types=["full_attention"],
        num_hidden_layers=1,
        attn_implementation="eager",
        attn_logit_softcapping=3.0,
    )
    stock, ours = optimized("gemma2", full)
    for length in (7, 8):
        agree(stock, ours, 1, length)
    assert not ours.generate.runner.prefills
    stock, ours = optimized("llama", {}, batch_sizes=(1, 2))
    for given in (
        {"inputs": prompt(2, 9)},
        left_padded(),
        {"inputs": prompt(2, 9), "position_ids": torch.arange(4, 13)[None]},
    ):
        assert_same(stock.generate(**given, **FULL), ours.generate(**given, **FULL))
    assert not ours.generate.runner.prefills


@pytest.mark.slow
@pytest.mark.parametrize("what", ["wrong", "missing", "no memory"])
def test_prompts_that_kernels_do_not_give_are_hfs(
    what: str, only_called: None, resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = optimized("llama", {})
    right = resolver.resolve

    def resolve(program: Any, **how: Any) -> Any:
        if how["pattern"] != "prompt_gate":
            return right(program, **how)
        if what == "missing":
            raise CodegenError("prompt_gate: no kernel")
        if what == "no memory":
            raise torch.OutOfMemoryError("none left")
        return tiny_models.Resolved(program, scale=1.01)

    monkeypatch.setattr(resolver, "resolve", resolve)
    for length in (7, 8, 9, 70):
        agree(stock, ours, 1, length)
    ((why, count),) = ours.generate.runner.prefills.items()
    assert count == (3 if what == "no memory" else 1)  # another time there may be some
    assert why.startswith(
        {
            "wrong": "not by kernels: MirageError: prefill: logits, keys or values differ",
            "missing": "not by kernels: CodegenError: prompt_gate: no kernel",
            "no memory": "not by kernels: out of memory",
        }[what]
    )


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_hf_runs_a_called_prompt_that_fails(
    error: type[Exception], only_called: None, resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a prompt that agreed, as where a product has no room for its workspace."""
    stock, ours = optimized("llama", {}, batch_sizes=(1,))
    for length in (7, 8):
        agree(stock, ours, 1, length)
    right = layer_prefill.LayerPrefill.__call__

    def failing(self: Any, found: Any, x: torch.Tensor, at: Any) -> torch.Tensor:
        y = right(self, found, x, at)
        if self is ours.generate.runner.model_kernels.layers[1].prefill:
            raise error("no room")
        return y

    with monkeypatch.context() as patch:
        patch.setattr(layer_prefill.LayerPrefill, "__call__", failing)
        agree(stock, ours, 1, 70)
    agree(stock, ours, 1, 9)
    assert ours.generate.runner.prefills == (
        {"called, by kernels": 1, "not by kernels: RuntimeError: no room": 1}
        if error is RuntimeError
        else {"called, by kernels": 2, "not by kernels: out of memory": 1}
    )


# -- prompts that run while the host looks at the model -------------------------------------------

CHANGES: dict[str, tuple[bool, Any]] = {
    "nothing": (True, lambda model: None),
    "a config's number": (True, lambda model: setattr(model.config, "initializer_range", 0.5)),
    "a weight in place": (True, lambda model: model.model.norm.weight.data.mul_(1.5)),
    "a norm's number": (
        False,
        lambda model: setattr(
            model.model.layers[1].post_attention_layernorm, "variance_epsilon", 0.5
        ),
    ),
    "an own forward": (True, lambda model: setattr(model.model.norm, "forward", lambda x: 2 * x)),
    "a hook": (
        True,
        lambda model: model.model.layers[0].mlp.register_forward_hook(lambda m, args, y: 2 * y),
    ),
    "a weight replaced": (
        True,
        lambda model: setattr(
            model.model.norm, "weight", torch.nn.Parameter(3 * model.model.norm.weight.data)
        ),
    ),
    "a weight elsewhere": (
        False,
        lambda model: setattr(model.model.norm.weight, "data", 3 * model.model.norm.weight.data),
    ),
}
"""By name: whether what a captured prompt reads is still there, and the change."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "streams"),
    [
        (0, False),
        (2, True),
        *(pytest.param(*both, marks=pytest.mark.thorough) for both in ((0, True), (2, False))),
    ],
)
@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_is_taken_while_the_prompt_runs(
    change: str,
    streams: bool,
    depth: int,
    called: list[str],
    resolved: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock, ours = optimized("llama", {})
    ours.generate.runner.depth = depth
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    (early, alter), runner = CHANGES[change], ours.generate.runner
    for model in (stock, ours):
        alter(model)
    events, before = [], dict(runner.prefills)
    look, replay, enqueue = (
        session.take_fingerprint,
        prefill.PrefillGraph.run,
        session.Session.enqueue_step,
    )
    for module in (call_plan, session):
        monkeypatch.setattr(
            module, "take_fingerprint", lambda model: events.append("look") or look(model)
        )
    monkeypatch.setattr(
        session.Session, "enqueue_step", lambda self: events.append("step") or enqueue(self)
    )
    monkeypatch.setattr(
        prefill.PrefillGraph, "run", lambda self, *of: events.append("prompt") or replay(self, *of)
    )

    class Seen(list[Any]):
        def put(self, tokens: torch.Tensor) -> None:
            events.append("token" if self else "text")  # the text comes first, as stock's does
            self.extend(tokens.flatten().tolist())

        def end(self) -> None:
            events.append("end")

    given: dict[str, Any] = {"inputs": prompt(1, 10, seed=1), **FULL}
    seen = Seen()
    got = ours.generate(**given, **({"streamer": seen} if streams else {}))
    told = list(events)
    assert_same(stock.generate(**given), got)
    assert not streams or (seen == got.sequences[0].tolist() and told.count("end") == 1)
    same = change in ("nothing", "a weight in place")
    assert (
        told[: told.index("look")]
        == ["text"] * streams + (["prompt", *["step"] * depth] if early else [])
        and told.count("look") == 1
    )
    assert not streams or told.index("look") < told.index("token")
    if same:  # one prompt, and it counts
        assert (
            told.count("prompt") == 1
            and runner.prefills["captured, by kernels"] == before["captured, by kernels"] + 1
        )
    else:  # what ran too early counts for nothing, and the next call finds the model as it is
        assert runner.prefills["captured, by kernels"] == before["captured, by kernels"]
    agree(stock, ours, 1, 11)


def test_the_first_prompts_of_a_model_are_not_early(
    called: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds without kernels for steps, or if an obstacle is known beforehand."""
    stock, ours = optimized("llama", {})
    seen = []
    plan_call = generate.plan_call
    monkeypatch.setattr(
        generate,
        "plan_call",
        lambda *a, **k: seen.append(k["expected"] is not None) or plan_call(*a, **k),
    )
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    with torch.autocast("cpu"):
        ours.generate(prompt(1, 9), max_new_tokens=3)
    agree(stock, ours, 1, 9)
    install(plain := tiny("llama"))
    for _ in range(3):
        plain.generate(prompt(1, 9), max_new_tokens=3)
    assert seen == [False, True, True, False, True] + [False] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [c for c in CHANGES if c != "a hook"]
)  # with which calls are stock's
def test_an_early_prompt_that_is_dropped_draws_no_random_numbers(
    change: str, called: list[str], resolved: list[Any]
) -> None:
    """Calls that sample take one seed of the generator each, and choose the same tokens by it."""
    stock, ours = optimized("llama", {})
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    CHANGES[change][1](ours)
    seen = []
    for _ in range(3):
        torch.manual_seed(5)
        tokens = ours.generate(prompt(1, 10), do_sample=True, max_new_tokens=12)
        seen.append((tokens.tolist(), torch.get_rng_state().tolist()))
    assert seen[0] == seen[1] == seen[2]


OTHER: dict[str, Any] = {**FULL, "repetition_penalty": 1.3}
"""With a way to choose for which no step was captured yet."""


def ahead_of_the_look(depth: int = 2) -> tuple[Any, Any]:
    """Return a model and its optimized twin whose next prompt starts early.

    It starts before the host looks at the model, and so do as many steps as on a GPU.
    """
    stock, ours = optimized("llama", {})
    ours.generate.runner.depth = depth
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    return stock, ours


def test_no_module_runs_before_the_fingerprint_is_taken(
    called: list[str], resolved: list[Any]
) -> None:
    """A step that is captured asks the model's own RoPE for its tables.

    A hook there is called as often as by stock.
    """
    models, seen = ahead_of_the_look(), ([], [])
    for model, calls in zip(models, seen, strict=True):
        model.model.rotary_emb.register_forward_hook(
            lambda m, args, y, calls=calls: calls.append(1)
        )
    given = {"inputs": prompt(1, 10), **OTHER}
    assert_same(*(model.generate(**given) for model in models))
    assert seen[0] == seen[1]


def test_no_step_is_captured_for_a_model_that_is_not_there(
    called: list[str], resolved: list[Any]
) -> None:
    """It would be kept for when that model is there again, with what was read of the other."""
    stock, ours = ahead_of_the_look()
    rotary, given = ours.model.rotary_emb, {"inputs": prompt(1, 10), **OTHER}
    frequencies = rotary.inv_freq
    rotary.inv_freq = 3 * frequencies
    hook = ours.model.norm.register_forward_hook(
        lambda m, args, y: None
    )  # stock's, so that the block's graphs stay as they are
    ours.generate(**given)
    rotary.inv_freq = frequencies
    hook.remove()
    assert_same(stock.generate(**given), ours.generate(**given))


def test_an_early_failure_counts_only_for_the_present_model(
    called: list[str], resolved: list[Any]
) -> None:
    models = ahead_of_the_look()
    for model in models:
        weight = model.model.layers[0].self_attn.o_proj.weight
        weight.data = weight.data.t()  # where it was, and for kernels that read it otherwise
    given = {"inputs": prompt(1, 10), **OTHER}
    assert_same(*(model.generate(**given) for model in models))


@pytest.mark.parametrize("how", ["", "a hook", "a hook of the backbone"])
def test_tokens_that_the_kernels_have_no_row_for(
    how: str, called: list[str], resolved: list[Any]
) -> None:
    """A table with more rows replaced the captured one, or a hook changes the row of a token."""
    models = ahead_of_the_look()
    table = models[0].model.embed_tokens
    larger = torch.nn.Embedding.from_pretrained(
        torch.cat([table.weight.data, 2 * table.weight.data[:8]])
    )
    for model in models:
        if how == "a hook":
            model.model.embed_tokens.register_forward_pre_hook(
                lambda m, args: (args[0] % m.num_embeddings,)
            )
        elif how:
            model.model.register_forward_pre_hook(
                lambda m, args, kwargs: (
                    args,
                    {**kwargs, "input_ids": kwargs["input_ids"] % m.vocab_size},
                ),
                with_kwargs=True,
            )
        else:
            model.model.embed_tokens = larger
    given = {"inputs": prompt(1, 10), **FULL}
    given["inputs"][0, 3] = table.num_embeddings + 2
    assert_same(*(model.generate(**given) for model in models))


def test_a_call_that_stock_serves_starts_early_only_once(
    called: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = ahead_of_the_look()
    begun, replay = [], prefill.PrefillGraph.run
    monkeypatch.setattr(
        prefill.PrefillGraph, "run", lambda self, *of: begun.append(1) or replay(self, *of)
    )
    hook = ours.model.norm.register_forward_hook(lambda m, args, y: None)
    for _ in range(3):
        agree(stock, ours, 1, 10)
    assert len(begun) == 1
    hook.remove()
    for _ in range(3):
        agree(stock, ours, 1, 10)
    assert (
        len(begun) == 1 + 3
        and sum(n for what, n in ours.generate.runner.counts.items() if what.startswith("stock"))
        == 3
    )


def test_each_call_has_its_own_fingerprint() -> None:
    """Two threads call. One may expect the earlier model while the other knows the present one."""

    class Raced(decode_runner.DecodeRunner):
        _graph_key = property(lambda self: ("another thread's", None), lambda self, found: None)  # type: ignore[assignment]

    given: Any = SimpleNamespace(fingerprint=SimpleNamespace(graph_facts="expected"), masks=None)
    assert Raced().graph_key_of(given) == ("expected", None)


def test_no_prompt_is_captured_before_the_fingerprint_is_taken(
    called: list[str], resolved: list[Any]
) -> None:
    """A number that kernels were made for has changed, so their graph is gone.

    What takes its place runs the model's own forward.
    """
    stock, ours = models = ahead_of_the_look()
    seen: tuple[list[int], list[int]] = ([], [])
    numbers = [model.model.layers[1].post_attention_layernorm.__dict__ for model in models]
    hooks = [
        model.model.norm.register_forward_hook(lambda m, args, y, calls=calls: calls.append(1))
        for model, calls in zip(models, seen, strict=True)
    ]
    before = numbers[0]["variance_epsilon"]
    for number in numbers:
        number["variance_epsilon"] = 0.5
    agree(stock, ours, 1, 10)
    assert seen[0] == seen[1] and called.count("prefill") == 1
    for hook in hooks:
        hook.remove()
    for number in numbers:
        number["variance_epsilon"] = before
    agree(stock, ours, 1, 10)
