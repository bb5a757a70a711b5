"""Blocks whose torch ops on the CPU run on one thread."""

from __future__ import annotations

import pytest
import torch

from mirage_hf.cpu_threads import one_thread


def test_threads_are_as_before_after_the_block() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with pytest.raises(ValueError), one_thread():
            raise ValueError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
