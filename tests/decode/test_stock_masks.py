"""transformers leaves out causal masks in our captures, as it does in calls."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaConfig, masking_utils

from mirage_hf.decode.stock_masks import masks_as_in_calls

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
    assert causal_mask() is not None
    with masks_as_in_calls():
        assert causal_mask() is None
    assert causal_mask() is not None


def test_masks_of_padding_are_not_read(capturing):
    padding = torch.ones(1, 8, dtype=torch.long)
    assert causal_mask(padding) is not None
    with masks_as_in_calls():
        assert causal_mask(padding) is not None


def test_other_threads_see_what_they_saw(capturing):
    with ThreadPoolExecutor(1) as other, masks_as_in_calls():
        assert other.submit(causal_mask).result() is not None


def test_stock_comes_back_after_an_error():
    stock = masking_utils.is_tracing
    with pytest.raises(KeyError), masks_as_in_calls():
        raise KeyError
    assert masking_utils.is_tracing is stock


@pytest.mark.gpu
def test_a_capture_has_no_mask():
    from mirage_hf.decode.graphs import capture

    seen = []
    with torch.device("cuda"):
        capture(lambda: seen.append(causal_mask()), torch.device("cuda"), None)
    assert seen and all(mask is None for mask in seen)
