"""Tell where a step had better decode its weights than multiply by their codes.

With many rows, a kernel may be bound by decoding: each block of rows decodes all codes anew. Then
it takes less time to decode a weight into memory once, and to multiply by torch. Linears do so in
prompts, and in steps if no kernel runs them.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import described
from mirage_hf.formats import Coding
from mirage_hf.gpus import device_named
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.trace.coded_linear import CodedLinear
from mirage_hf.trace.groups import Group
from mirage_hf.tune.measure import GLANCE, time_run

#: A kernel gives way if it takes more than so many times as long. What follows products in it runs
#: in kernels of its own then, or as torch ops.
SLOWER = 1.25

#: Why a program has no kernel then.
WHY = "its linears take less time if each decodes its weight first"

_log = logging.getLogger("mirage_hf")


class DecodedProducts:
    """Compares kernels of steps with their linears' own forwards, which decode their weights.

    Args:
        gpu: The GPU on which both are measured. None: nothing is compared.
    """

    def __init__(self, gpu: torch.device | None):
        self.gpu = gpu
        #: The µs of a forward, by coding and rows.
        self._known: dict[tuple[Coding, int], float] = {}

    def are_faster(self, group: Group, kernel: Resolved, rows: int) -> bool:
        """Return whether the linears of a group take less time by their own forwards.

        Args:
            group: The products, and what runs with them.
            kernel: The group's kernel.
            rows: The rows of a step.
        """
        linears = coded_linears_of(group)
        if not linears or self.gpu is None or kernel.time_us is None:
            return False
        codings = [linear.weight.coding for linear in linears]
        # a decoded weight is written and read
        moved = sum(2 * c.rows * c.columns * c.dtype.itemsize for c in codings)
        if kernel.time_us <= SLOWER * 1e6 * moved / self._bandwidth:
            return False
        us = sum(self._us(linear, rows) for linear in linears)
        _log.info(
            "a step of %d rows: %.1f µs by a kernel, %.1f by decoding", rows, kernel.time_us, us
        )
        return kernel.time_us > SLOWER * us

    @property
    def _bandwidth(self) -> float:
        properties = torch.cuda.get_device_properties(self.gpu)
        return device_named(properties.name, 10 * properties.major + properties.minor).bandwidth

    def _us(self, linear: CodedLinear, rows: int) -> float:
        """Return the µs of a linear's own forward. Infinity if it fails."""
        key = linear.weight.coding, rows
        module = linear.module()
        if key not in self._known and module is not None:
            try:
                self._known[key] = self._measured(module, linear, rows)
            except Exception as error:  # such as no memory: the kernel stays
                _log.info("%s: its own forward fails: %s", linear.path, described(error))
                self._known[key] = float("inf")
        return self._known.get(key, float("inf"))

    def _measured(self, module: nn.Module, linear: CodedLinear, rows: int) -> float:
        coding = linear.weight.coding
        x = torch.randn(rows, coding.columns, device=self.gpu).to(coding.dtype)

        def forward(given: list[Tensor]) -> Any:
            return module.forward(given[0])

        with torch.cuda.device(self.gpu), torch.no_grad():
            return time_run(forward, [[x]], GLANCE).us


def coded_linears_of(group: Group) -> list[CodedLinear]:
    """Return the linears of a group whose weights are codes. None if some weights are plain."""
    weights = [product.operands[1].weight for product in group.products]
    coded = [w.coded for w in weights if w is not None and w.coded is not None]
    return coded if len(coded) == len(weights) else []
