"""The switch for cuDNN's attention, which is one for the whole process."""

import pytest
import torch

from mirage_hf.cudnn_attention import is_allowed, without_cudnn
from mirage_hf.decode.model_fingerprint import take_fingerprint
from mirage_hf.swap import check

cuda = torch.backends.cuda


@pytest.fixture(autouse=True)
def switches():
    found = {
        set_to: enabled()
        for enabled, set_to in (
            (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
            (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
            (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
            (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        )
    }
    yield
    for set_to, value in found.items():
        set_to(value)


@pytest.mark.parametrize("allowed", [False, True])
def test_checks_run_without_cudnn_and_leave_its_switch_as_it_was(allowed):
    cuda.enable_cudnn_sdp(allowed)
    with pytest.raises(ValueError), check._checking("cpu"):
        assert not cuda.cudnn_sdp_enabled() and is_allowed() == allowed
        raise ValueError
    assert cuda.cudnn_sdp_enabled() == is_allowed() == allowed


def test_blocks_of_two_threads_may_overlap():
    cuda.enable_cudnn_sdp(True)
    first, second = without_cudnn(), without_cudnn()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not cuda.cudnn_sdp_enabled()
    second.__exit__(None, None, None)
    assert cuda.cudnn_sdp_enabled()


def test_cudnn_stays_if_nothing_else_is_allowed():
    cuda.enable_cudnn_sdp(True)
    for set_to in (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp):
        set_to(False)
    with without_cudnn():
        assert cuda.cudnn_sdp_enabled()
    assert cuda.cudnn_sdp_enabled()


def test_a_model_is_the_same_while_another_thread_checks():
    cuda.enable_cudnn_sdp(True)
    model = torch.nn.Linear(2, 2)
    before = take_fingerprint(model)
    with without_cudnn():
        assert take_fingerprint(model) == before
    cuda.enable_cudnn_sdp(False)
    assert take_fingerprint(model) != before
