"""Which results of layout ops a kernel may read early, as it may read constants."""

from __future__ import annotations

import pytest
import torch

import mirage_hf as mi
from mirage_hf.codegen.placement import place_kernels


@pytest.mark.parametrize(("strides", "is_constant"), [((1, 4), False), ((8, 1), True)])
def test_a_reshape_that_copies_is_not_constant(strides, is_constant):
    """Its result is written shortly before the kernel runs."""
    g = mi.new_graph()
    w = g.new_input((4, 8), "float16", strides=strides, constant=True)
    flat = g.reshape(w, (32,))
    block = mi.new_block_graph(grid_dim=(1,), forloop_range=1)
    x = block.new_input(flat, imap={"x": None})
    block.new_output(block.exp(x), omap={"x": None})
    (y,) = g.customized([flat], block)
    g.mark_output(y)
    ugraph = g.superoptimize(backend="cpu")[0]
    (op,) = place_kernels(ugraph)
    assert op.operands[0].constant is is_constant
    data = torch.arange(32.0).as_strided((4, 8), strides).half() / 32
    torch.testing.assert_close(ugraph([data])[0], data.reshape(32).exp())
