"""Kernels that stream the codes of chosen experts with one mistake each, on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mirage_hf.codegen.cuda_kernel import CudaKernel
from tests.helpers.cuda_on_cpu import CXX, ORDERS
from tests.helpers.stream_mutants import Mutant
from tests.helpers.streamed_experts import Experts
from tests.helpers.streamed_experts_mutants import KERNELS, MUTANTS, variants

pytestmark = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler, such as g++")

#: What is added to the index until the previous kernel ends.
LATER = 2**40

#: The previous kernel ends when the first thread waits for it. Until then all experts are missing,
#: and x has another sign.
PREVIOUS = f"""
inline void end_previous_kernel(const long long* index, int choices, const float* x, int columns) {{
  if (index[0] < {LATER // 2}) return;
  for (int n = 0; n < choices; ++n) const_cast<long long*>(index)[n] -= {LATER};
  for (int n = 0; n < columns; ++n) const_cast<float*>(x)[n] = -x[n];
}}
"""


def with_previous(text: str, e: Experts) -> str:
    """Return the text of a kernel that waits for the one in `PREVIOUS`."""
    end = f"end_previous_kernel(index_ptr, {len(e.index)}, x_ptr, columns);"
    return text.replace("wait_for_previous_kernel();", end)


def changed(text: str, m: Mutant) -> str:
    """Return the text of a kernel with a mistake. It occurs in every place that has `before`."""
    assert m.before in text, f"{m.kernel} has no {m.before!r}"
    return text.replace(m.before, m.after)


def texts(kernel: str) -> str:
    """Return the text of a kernel and of its mutants, each in its namespace."""
    e = KERNELS[kernel]
    parts = [PREVIOUS, with_previous(e.kernel().source, e)]
    for n, m in enumerate(MUTANTS):
        if m.kernel == kernel:
            text = changed(e.kernel(f"mutant_{n}").source, m)
            parts.append(with_previous(text, e))
    return "\n".join(parts)


@dataclass(frozen=True)
class Kernel:
    """A kernel with its mutants, compiled together.

    Attributes:
        kernel: The kernel.
        variants: Its inputs.
        text: The text of the kernel and of its mutants.
        folder: Where they are compiled.
    """

    kernel: CudaKernel
    variants: list[Experts]
    text: str
    folder: Path

    def is_right(self, name: str, orders: Iterable[int]) -> bool:
        """Return whether a mutant gives the right results for each input in each order."""
        return all(
            self.is_right_once(name, e, order)
            for order, e in itertools.product(orders, self.variants)
        )

    def is_right_once(self, name: str, e: Experts, order: int) -> bool:
        """Return whether a mutant gives the right results."""
        found = dict(zip((t.name for t in e.graph.inputs), e.inputs, strict=True))
        later = {"index": found["index"] + LATER, "x": -found["x"]}
        inputs = [*(found | later).values()]
        got = e.run(self.kernel, name, order, self.folder, self.text, inputs)
        return not isinstance(got, str) and e.error(got) <= 1


@pytest.mark.parametrize("name", KERNELS)
def test_each_mistake_is_noticed_in_some_order(name, tmp_path):
    kernel = Kernel(KERNELS[name].kernel(), variants(name), texts(name), tmp_path)
    assert kernel.is_right("kernel", range(8))
    orders = (*ORDERS, *range(4, 9))
    unnoticed = [
        m.what
        for n, m in enumerate(MUTANTS)
        if m.kernel == name and kernel.is_right(f"mutant_{n}", orders)
    ]
    assert not unnoticed
