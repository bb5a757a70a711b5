"""Kernels of prompts that give wrong results, fail or lack memory: HF's forward runs instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mirage_hf.decode import prefill, prefill_checks
from mirage_hf.decode import prompts as bucketed
from mirage_hf.errors import CodegenError, MirageError
from mirage_hf.layers import prefill as layer_prefill
from mirage_hf.pipeline import resolver
from tests.helpers import tiny_models
from tests.helpers.prompt_pairs import agree, agree_padded, optimized

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("captures")]


@pytest.mark.slow
def test_keys_of_padded_rows_that_go_to_wrong_slots_are_found(
    captures: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
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
def test_a_wrong_kernel_of_a_prompt_is_found(
    captures: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
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
    assert counted.pop("captured") == 3 and len(counted) == 2  # one for each bucket
    assert all(
        why.startswith(
            "not by kernels: capture failed (MirageError: prefill: logits, keys or values differ"
        )
        for why in counted
    )


@pytest.mark.slow
def test_a_kernel_of_a_prompt_that_writes_nothing_is_found(
    captures: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_comparison_of_prompts_leaves_what_the_model_wrote(device: str) -> None:
    block = SimpleNamespace(
        lowest=None,
        rings=(None,),
        written={0},
        states={},
        logits=torch.ones(1, 3, device=device),
        keys={0: torch.ones(1, 1, 8, 1024, device=device)},
        values={0: torch.ones(1, 1, 8, 1024, device=device)},
    )

    def on_gpu() -> int:
        return torch.cuda.memory_allocated() if device == "cuda" else 0

    before = on_gpu()

    def second() -> None:
        assert on_gpu() == before  # the results of the first are on the host
        block.keys[0].fill_(2.0)

    far, allowed = prefill_checks._difference(
        lambda: None,
        second,
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
        written={0},
        states={},
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
def test_kernels_that_a_capture_found_wrong_are_not_called(
    kernels_pay: None, captures: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the kernels of 128 rows are wrong. The model's own forward cannot be captured either."""
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
@pytest.mark.parametrize("what", ["wrong", "missing", "no memory"])
def test_prompts_that_kernels_do_not_give_are_hfs(
    what: str, no_captured_prompts: None, resolved: list[Any], monkeypatch: pytest.MonkeyPatch
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
    assert count == (3 if what == "no memory" else 1)  # memory may be free at another time
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
    error: type[Exception],
    no_captured_prompts: None,
    resolved: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt may fail after an earlier one agreed, for example when a product lacks memory."""
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
