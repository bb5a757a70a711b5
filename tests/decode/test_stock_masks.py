"""transformers leaves out causal masks in our captures, as it does in calls."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, masking_utils

import mirage_hf as mi
from mirage_hf.decode import prefill_runs
from mirage_hf.decode.graphs import capture, is_capturing
from mirage_hf.decode.stock_masks import masks_as_in_calls
from tests.helpers.generate_features import fake_captures
from tests.swap.test_prompt_kernels import model_of

pytestmark = pytest.mark.models

CONFIG = LlamaConfig(hidden_size=64, num_attention_heads=4, attn_implementation="sdpa")


def causal_mask(padding: torch.Tensor | None = None) -> torch.Tensor | None:
    return masking_utils.create_causal_mask(
        config=CONFIG,
        inputs_embeds=torch.zeros(1, 8, 64),
        attention_mask=padding,
        past_key_values=None,
    )


@pytest.fixture
def capturing(monkeypatch):
    """Let transformers see a capture."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_masks_are_left_out_as_without_a_capture(capturing):
    is_made = causal_mask() is not None  # not by transformers 5.23
    with masks_as_in_calls():
        assert causal_mask() is None
    assert (causal_mask() is not None) == is_made


def test_masks_of_padding_are_not_read(capturing):
    padding = torch.ones(1, 8, dtype=torch.long)
    assert causal_mask(padding) is not None
    with masks_as_in_calls():
        assert causal_mask(padding) is not None


def test_other_threads_see_what_they_saw(capturing):
    is_made = causal_mask() is not None
    with ThreadPoolExecutor(1) as other, masks_as_in_calls():
        assert (other.submit(causal_mask).result() is not None) == is_made


def test_captured_prompts_have_no_mask(capturing, monkeypatch):
    fake_captures(monkeypatch)
    monkeypatch.setattr(prefill_runs, "is_capturing", lambda device: True)
    model, ids = model_of("traced"), torch.randint(0, 128, (1, 100))
    mi.optimize(model, backend="cpu", tune="never")
    run, masks = F.scaled_dot_product_attention, []

    def attention(q, k, v, attn_mask=None, **kwargs):
        masks.append(attn_mask)
        return run(q, k, v, attn_mask=attn_mask, **kwargs)

    model.generate(ids, max_new_tokens=1, do_sample=False)  # called
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    for _ in range(2):
        model.generate(ids, max_new_tokens=1, do_sample=False)
    assert model.generate.runner.prefills["captured"] == 2
    assert masks and all(mask is None for mask in masks)


def test_stock_comes_back_after_an_error():
    stock = masking_utils.is_tracing
    with pytest.raises(KeyError), masks_as_in_calls():
        raise KeyError
    assert masking_utils.is_tracing is stock


@pytest.mark.gpu
def test_a_capture_has_no_mask():
    seen = []

    def run() -> None:
        with masks_as_in_calls() if is_capturing(torch.device("cuda")) else nullcontext():
            seen.append(causal_mask())

    with torch.device("cuda"):
        capture(run, torch.device("cuda"), None)
    assert seen and all(mask is None for mask in seen)
