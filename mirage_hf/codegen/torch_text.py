"""Kernel-graph ops as torch expressions.

A generated file contains them as its library calls, and as the program that it checks itself
against.
"""

from __future__ import annotations

import inspect
import keyword
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from mirage_hf import errors
from mirage_hf.graph import coded
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.ops import table

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}

#: Ops whose torch form takes tensors only.
_TENSORS_ONLY = ("ratio", "select")

#: The torch functions of ops whose numbers are given as tensors, if torch refuses them as numbers.
_OF_TENSORS = {"max": "torch.maximum", "min": "torch.minimum", "pow": "torch.pow"}

#: Names that no tensor may have, because a generated file uses them for something else.
_TAKEN = (
    "torch",
    "triton",
    "tl",
    "F",
    "copy",
    "threading",
    "inputs",
    "out",
    "device",
    "launch",
    "counters",
    "lasting_zeros",
    "float",
)

#: The names of kernels, see `triton.generate`.
_KERNEL = re.compile(r"mirage_\d+")

#: Torch code of ops whose oracle is not one function of torch. In braces are the numbers of
#: operands, and the names of attributes.
_FORMS = {
    "matmul": "torch.matmul({0}, {1})",
    "reduction": "torch.{kind}({0}, dim={dim}, keepdim=True)",
    "softmax": "torch.softmax({0}, {dim})",
    "concat": "torch.cat([{all}], {dim})",
    "slice": "{0}.narrow({dim}, {start}, {length})",
    "reshape": "{0}.reshape({dims})",
    "permute": "{0}.permute({order})",
}


def expression(op: KernelOp, names: Sequence[str]) -> str:
    """Return the torch expression of one op.

    Args:
        op: The op.
        names: The names of its operands. Operands that are numbers are text already.

    Raises:
        CodegenError: If the op has no torch expression.
    """
    numbers = [not isinstance(x, DTensor) for x in op.inputs]
    takes_tensors = op.name in _TENSORS_ONLY or (op.name in _OF_TENSORS and not _fits(op))
    if any(numbers) and takes_tensors:
        return _of_tensors(op, names, numbers)
    if op.name in _INFIX:
        first = f"({names[0]})" if names[0].startswith("-") else names[0]  # -2.0 ** x: -(2.0 ** x)
        return f" {_INFIX[op.name]} ".join([first, *names[1:]])
    if op.name in ("max", "min") and any(numbers):
        (tensor,) = (n for n, is_number in zip(names, numbers, strict=True) if not is_number)
        (number,) = (n for n, is_number in zip(names, numbers, strict=True) if is_number)
        bound = "min" if op.name == "max" else "max"
        return f"torch.clamp({tensor}, {bound}={number})"
    form = _form(op)
    if form:
        return form.format(*names, all=", ".join(names), **_form_attributes(op))
    return _call(op, names)


def _of_tensors(op: KernelOp, names: Sequence[str], numbers: Sequence[bool]) -> str:
    """Return an op with its numbers as tensors.

    As in the interpreter, these are float64 without dims, which do not decide the result's dtype.
    """
    like = names[numbers.index(False)]
    operands = [
        f"torch.full((), {n}, dtype=torch.float64, device={like}.device)" if is_number else n
        for n, is_number in zip(names, numbers, strict=True)
    ]
    call = f"{_OF_TENSORS.get(op.name, op.name)}({', '.join(operands)})"
    both_numbers = op.name == "select" and list(numbers) == [False, True, True]
    return f"{call}.to({like}.dtype)" if both_numbers else call


def _form_attributes(op: KernelOp) -> dict[str, Any]:
    """Return the attributes of an op as its form names them."""
    attributes = dict(op.attrs)
    if "start" in attributes:
        attributes["length"] = attributes["stop"] - attributes["start"]
    if attributes.get("kind") == "max":
        attributes["kind"] = "amax"
    for name, value in attributes.items():
        if value in (math.inf, -math.inf):
            attributes[name] = f'float("{value}")'
    return attributes


def _call(op: KernelOp, names: Sequence[str]) -> str:
    """Return a call of the op's oracle: a function of torch, or one that the file carries."""
    entry = table.lookup(op.name)
    attributes = [f"{k}={v!r}" for k, v in op.attrs if v != entry.attrs.get(k)]
    function = _library_function(entry.oracle)
    if not function:
        if entry.oracle.__name__ == "<lambda>":
            raise errors.CodegenError(
                f"{op.name} has no torch expression; give its entry a named function as oracle, "
                "or torch_form"
            )
        function = entry.oracle.__name__.lstrip("_")
    return f"{function}({', '.join([*names, *attributes])})"


def _fits(op: KernelOp) -> bool:
    """Return True if torch takes the op's numbers: none becomes infinite in the result's dtype."""
    dtype = op.outputs[0].dtype
    most = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
    return all(isinstance(x, DTensor) or math.isinf(x) or abs(x) <= most for x in op.inputs)


def _form(op: KernelOp) -> str:
    """Return the op as torch code, operands and attributes in braces. Empty: call its oracle."""
    if op.name == "softmax" and len(op.inputs) > 1:  # with bounds, an oracle of this package
        return ""
    return _FORMS.get(op.name) or table.lookup(op.name).torch_form


def _library_function(oracle: Callable[..., torch.Tensor]) -> str:
    """Return torch's name of the function `oracle`, "" if it is an oracle of this package."""
    name = getattr(oracle, "__name__", "")
    for where, module in (("torch", torch), ("F", torch.nn.functional)):
        if getattr(module, name, None) is oracle:
            return f"{where}.{name}"
    return ""


@cache
def _source(function: Callable[..., Any]) -> str:
    return inspect.getsource(function)


def functions(graph: KernelGraph) -> list[str]:
    """Return the source of this package's oracles that `expression` calls for a graph."""
    found = {}
    if any(coded.is_packed(x.dtype) for op in _library_ops(graph) for x in _tensors(op)):
        for function in (coded.uint4_codes, coded.int4_codes):
            found[function.__name__] = _source(function)
    for op in graph.ops:
        if op.name == CUSTOMIZED or op.name in _INFIX or _form(op):
            continue
        oracle = table.lookup(op.name).oracle
        if inspect.isfunction(oracle) and not _library_function(oracle):
            text = _source(oracle).replace("errors.InputError", "ValueError")
            found[oracle.__name__] = text.replace(
                f"def {oracle.__name__}", f"def {oracle.__name__.lstrip('_')}"
            )
    return list(found.values())


def _library_ops(graph: KernelGraph) -> list[KernelOp]:
    return [op for op in graph.ops if op.name != CUSTOMIZED]


def _tensors(op: KernelOp) -> list[DTensor]:
    return [x for x in op.inputs if isinstance(x, DTensor)]


def local(t: DTensor) -> str:
    """Return a tensor's name as a local variable that hides nothing a generated file needs."""
    name = t.name.rstrip("_")  # so that the tensor tl_ is not called what tl becomes
    hides = (
        name in _TAKEN or name in table.OPS or keyword.iskeyword(name) or _KERNEL.fullmatch(name)
    )
    return t.name + "_" if hides else t.name


def operand_names(op: KernelOp) -> list[str]:
    """Return the names of an op's operands. Numbers are given as text."""
    return [_elements(x) if isinstance(x, DTensor) else _number(x) for x in op.inputs]


def _elements(t: DTensor) -> str:
    """Return the expression of a tensor's elements."""
    if coded.is_exponent(t.dtype):
        return f"{local(t)}.view({t.dtype})"
    if not coded.is_packed(t.dtype):
        return local(t)
    decode = "uint4_codes" if t.dtype is torch.uint4 else "int4_codes"
    codes = f"{decode}({local(t)}, {coded.word_dims(t.dims, t.strides)})"
    turned = coded.high_first(t.dims, t.strides)
    return codes if turned is None else f"{codes}.flip({turned})"


def _number(x: float) -> str:
    return f'float("{x}")' if x in (math.inf, -math.inf) else repr(x)


def program(graph: KernelGraph, name: str) -> str:
    """Return a function of a list of tensors that runs a tensor program op by op."""
    inputs = ", ".join(map(local, graph.inputs))
    comma = "," if len(graph.inputs) == 1 else ""
    lines = [f"def {name}(inputs):", f"    {inputs}{comma} = inputs"]
    for op in graph.ops:
        lines.append(f"    {local(op.outputs[0])} = {expression(op, operand_names(op))}")
    return "\n".join([*lines, f"    return [{', '.join(map(local, graph.outputs))}]"]) + "\n"
