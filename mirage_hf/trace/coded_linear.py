"""Linears whose weights are codes, each as one recorded node.

While a step is recorded, such a linear calls the op `mirage_hf::coded_linear` in place of the code
of its library. The op names the linear by a number. Run as it is, it runs the linear's own forward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import CodedWeight, coded_weight, decoding_hooks

#: The op's name as nodes have it.
CODED_LINEAR = "mirage_hf.coded_linear"

torch.library.define(
    "mirage_hf::coded_linear",
    "(Tensor x, Tensor[] codes, Tensor? bias, int number) -> Tensor",
)


@dataclass(frozen=True, eq=False)
class CodedLinear:
    """A linear that is recorded as one node.

    Attributes:
        path: Its name in the model.
        weight: Its weight.
        module: The module, whose forward runs if no kernel does.
    """

    path: str
    weight: CodedWeight
    module: weakref.ref[nn.Module]


#: The linears that recordings name. A recording keeps its own alive.
_linears: weakref.WeakValueDictionary[int, CodedLinear] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def linear_of(number: int) -> CodedLinear:
    """Return the linear that a node names."""
    return _linears[number]


def is_replaced(linear: CodedLinear) -> bool:
    """Return whether a linear is gone, or has other codes or another bias now."""
    module = linear.module()
    if module is None:
        return True
    known = linear.weight
    now = coded_weight(module, known.coding.dtype)
    return not isinstance(now, CodedWeight) or not _is_same(known, now)


def _run(x: Tensor, codes: list[Tensor], bias: Tensor | None, number: int) -> Tensor:
    module = _linears[number].module()
    assert module is not None, "the linear of a recorded step is gone"
    return module.forward(x)  # type: ignore[no-any-return]


torch.library.impl("mirage_hf::coded_linear", "CompositeExplicitAutograd", _run)


@torch.library.register_fake("mirage_hf::coded_linear")
def _fake(x: Tensor, codes: list[Tensor], bias: Tensor | None, number: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], _linears[number].weight.coding.rows))


def coded_linears(model: Any) -> tuple[dict[str, CodedWeight], dict[str, str]]:
    """Return the weights in codes of a model's linears, and why others cannot be read, by name."""
    found: dict[str, CodedWeight] = {}
    rejected: dict[str, str] = {}
    for path, module in model.named_modules():
        weight = coded_weight(module, model.dtype)
        if isinstance(weight, CodedWeight):
            found[path] = weight
        elif isinstance(weight, Rejected):
            rejected[path] = weight.reason
    return found, rejected


@contextmanager
def coded_linears_as_one_node(model: Any) -> Iterator[tuple[CodedLinear, ...]]:
    """Let linears whose weights are codes be one op each while a step is recorded.

    Nothing decodes the whole model meanwhile.

    Yields:
        The linears. Nodes of the step name them, so whoever runs the nodes must keep them.
    """
    linears: list[CodedLinear] = []
    replaced: list[tuple[dict[str, Any], Any]] = []
    hooks = [(m._forward_pre_hooks, vars(m)[name].id) for m, name in decoding_hooks(model)]
    taken = [(own, number, own.pop(number)) for own, number in hooks]
    try:
        for path, weight in coded_linears(model)[0].items():
            module, number = model.get_submodule(path), next(_numbers)
            linears.append(CodedLinear(path, weight, weakref.ref(module)))
            _linears[number] = linears[-1]
            own = module.__dict__
            replaced.append((own, own.get("forward")))
            own["forward"] = _OneNode(number)
        yield tuple(linears)
    finally:
        for own, number, hook in taken:
            own[number] = hook
        for own, before in replaced:
            if before is None:
                own.pop("forward", None)
            else:
                own["forward"] = before


class _OneNode:
    """A forward that calls the op."""

    def __init__(self, number: int):
        self.number = number

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = _linears[self.number].weight
        return torch.ops.mirage_hf.coded_linear(  # type: ignore[no-any-return]
            x, list(weight.tensors), weight.bias, self.number
        )


def _is_same(a: CodedWeight, b: CodedWeight) -> bool:
    return a.coding == b.coding and _addresses(a) == _addresses(b)


def _addresses(weight: CodedWeight) -> list[int | None]:
    return [None if t is None else t.data_ptr() for t in (*weight.tensors, weight.bias)]
