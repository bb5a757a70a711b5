"""Kernels that stream codes with one mistake each: the emulation on the CPU notices it."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from mirage_hf.codegen.cuda_kernel import CudaKernel
from mirage_hf.codegen.streams import layout
from mirage_hf.codegen.streams.layout import stream_layout
from tests.helpers.cuda_on_cpu import CXX, ORDERS
from tests.helpers.stream_mutants import KERNELS, MUTANTS, SPAN_CHUNKS, Mutant
from tests.helpers.thorough import count

pytestmark = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler, such as g++")


def kernel_of(name: str, namespace: str = "kernel") -> CudaKernel:
    """Return a kernel of `KERNELS`.

    Shared memory is limited if it has several spans. If it has teams, one chunk is requested first.
    """
    hand = KERNELS[name]
    with pytest.MonkeyPatch.context() as patch:
        if "teams" in name:
            patch.setattr(layout, "_FIRST_BYTES", 1)
            assert stream_layout(hand.op, hand.schedule).teams == 2
        if name in SPAN_CHUNKS:
            whole = stream_layout(hand.op, hand.schedule)
            limit = whole.bytes_with_spans_of(SPAN_CHUNKS[name])
            patch.setattr(layout, "SHARED_MOST", limit)
            divided = stream_layout(hand.op, hand.schedule)
            assert divided.spans == 3 and divided.last_span_chunks == 1
        return hand.kernel(namespace)


@cache
def inputs_of(name: str) -> list[torch.Tensor]:
    """Return random inputs. Rows of x and blocks of 256 columns differ in size by powers of two."""
    hand = KERNELS[name]
    x, *others = hand.inputs
    numbers = torch.arange(hand.batch)[:, None] + torch.arange(hand.columns) // 256
    return [x * torch.exp2(2 * numbers % 6).view(x.shape).to(x.dtype), *others]


def changed(text: str, m: Mutant) -> str:
    """Return the text of a kernel with a mistake. It occurs in every place that has `before`."""
    assert m.before in text, f"{m.kernel} has no {m.before!r}"
    return text.replace(m.before, m.after)


@cache
def texts(kernel: str) -> str:
    """Return the text of a kernel and of its mutants, each in its namespace."""
    parts = [kernel_of(kernel).source]
    for n, m in enumerate(MUTANTS):
        if m.kernel == kernel:
            parts.append(changed(kernel_of(kernel, f"mutant_{n}").source, m))
    return "\n".join(parts)


def outcome(kernel: str, name: str, order: int, folder) -> str:
    """Return what happens in an order: an error, "right" or "wrong"."""
    hand, inputs = KERNELS[kernel], inputs_of(kernel)
    got = hand.run(kernel_of(kernel), name, order, folder, texts(kernel), inputs)
    if isinstance(got, str):
        return got
    of_rows = zip(got, hand.exact(inputs), strict=True)
    return "right" if all(hand.error(*of_row) <= 1 for of_row in of_rows) else "wrong"


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_without_a_mistake_are_right_in_each_order(kernel, tmp_path):
    for order in range(count(8, 4)):
        assert outcome(kernel, "kernel", order, tmp_path) == "right"


@pytest.mark.parametrize(
    "n", range(len(MUTANTS)), ids=lambda n: f"{MUTANTS[n].kernel}: {MUTANTS[n].what}"
)
def test_a_mistake_is_noticed_in_some_order(n, tmp_path):
    kernel = MUTANTS[n].kernel
    orders = (*ORDERS, *range(4, 9))
    assert any(outcome(kernel, f"mutant_{n}", order, tmp_path) != "right" for order in orders)
