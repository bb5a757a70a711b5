"""The package without Triton, as on systems for which it has no packages."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys

sys.modules["triton"] = None  # an import raises ImportError
import torch
from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.codegen.optional_triton import HAS_TRITON
from mirage_hf.decode.sampler import sampler_of

block = CacheBlock(2, 256, (), torch.device("cpu"))
block.set_logits(torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]]))
block.control.start(
    length=1, position=torch.tensor([[0]]), lowest=None, budget=5, eos=None, pad=None
)
sampler_of(block).argmax(block.control, block.logits)
print(HAS_TRITON, sampler_of(block).by_kernels, block.control.report[0].tolist())
"""


def test_decoding_needs_no_triton():
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert ran.stdout == "False False [1, 0]\n", ran.stderr
