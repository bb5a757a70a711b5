"""Kernel-graph ops as torch expressions: library calls of a generated file, and its reference program."""

from __future__ import annotations

import inspect
import keyword
import math
import re
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from mirage_hf import errors
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.ops import table

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}

_CHOOSING = ("ratio", "select")
"""Ops whose torch form wants tensors."""

_WHOLE = {"max": "torch.maximum", "min": "torch.minimum", "pow": "torch.pow"}
"""Ops that torch computes of tensors what it refuses of numbers."""

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

_KERNEL = re.compile(r"mirage_\d+")
"""What kernels are called, see `triton.generate`."""

_FORMS = {
    "matmul": "torch.matmul({0}, {1})",
    "reduction": "torch.{kind}({0}, dim={dim}, keepdim=True)",
    "softmax": "torch.softmax({0}, {dim})",
    "concat": "torch.cat([{all}], {dim})",
    "slice": "{0}.narrow({dim}, {start}, {length})",
    "reshape": "{0}.reshape({dims})",
    "permute": "{0}.permute({order})",
}
"""Ops whose oracle is not one function of torch; names in braces are operands by number and attributes."""


def expression(op: KernelOp, names: Sequence[str]) -> str:
    """The torch expression of one op on operands called `names` (numbers already as text). Errors: CodegenError."""
    row = table.lookup(op.name)
    attrs = dict(op.attrs)
    numbers = [not isinstance(x, DTensor) for x in op.inputs]
    if any(numbers) and (op.name in _CHOOSING or (op.name in _WHOLE and not _fits(op))):
        # as the interpreter has them: numbers of float64 without dims, which decide nothing about the result's dtype
        like = names[numbers.index(False)]
        names = [
            f"torch.full((), {n}, dtype=torch.float64, device={like}.device)" if a else n
            for n, a in zip(names, numbers, strict=True)
        ]
        function = _WHOLE.get(op.name, op.name)
        return f"{function}({', '.join(names)})" + (
            f".to({like}.dtype)" if op.name == "select" and numbers == [False, True, True] else ""
        )
    if op.name in _INFIX:
        first = (
            f"({names[0]})" if names[0].startswith("-") else names[0]
        )  # -2.0 ** x is -(2.0 ** x)
        return f" {_INFIX[op.name]} ".join([first, *names[1:]])
    if op.name in ("max", "min") and any(not isinstance(x, DTensor) for x in op.inputs):
        (_, tensor), (_, number) = sorted(
            zip(op.inputs, names, strict=True), key=lambda p: not isinstance(p[0], DTensor)
        )
        bound = "min" if op.name == "max" else "max"
        return f"torch.clamp({tensor}, {bound}={number})"
    if _form(op):
        if "start" in attrs:
            attrs["length"] = attrs["stop"] - attrs["start"]
        if attrs.get("kind") == "max":
            attrs["kind"] = "amax"
        attrs = {
            k: f'float("{v}")' if v in (float("inf"), float("-inf")) else v
            for k, v in attrs.items()
        }
        return _form(op).format(*names, all=", ".join(names), **attrs)
    extra = "".join(f", {k}={v!r}" for k, v in attrs.items() if v != row.attrs.get(k))
    if function := _library_function(row.oracle):
        return f"{function}({', '.join(names)}{extra})"
    if row.oracle.__name__ == "<lambda>":
        raise errors.CodegenError(
            f"{op.name} has no torch expression; give its row a named function as oracle, or torch_form"
        )
    return f"{row.oracle.__name__.lstrip('_')}({', '.join(names)}{extra})"


def _fits(op: KernelOp) -> bool:
    """Whether torch takes the op's numbers as such: not those that are finite, but infinite in the dtype of the result."""
    most = (
        torch.finfo(op.outputs[0].dtype).max if op.outputs[0].dtype.is_floating_point else math.inf
    )
    return all(isinstance(x, DTensor) or math.isinf(x) or abs(x) <= most for x in op.inputs)


def _form(op: KernelOp) -> str:
    """Return the op as torch code with operands and attributes in braces. Empty: call its oracle."""
    if op.name == "softmax" and len(op.inputs) > 1:  # with bounds it is a function of ours
        return ""
    return _FORMS.get(op.name) or table.lookup(op.name).torch_form


def _library_function(oracle: Callable[..., torch.Tensor]) -> str:
    """Return the name under which torch has the function `oracle`. Empty: it is a function of ours."""
    name = getattr(oracle, "__name__", "")
    for where, module in (("torch", torch), ("F", F)):
        if getattr(module, name, None) is oracle:
            return f"{where}.{name}"
    return ""


def functions(graph: KernelGraph) -> list[str]:
    """The source of the table's own oracle functions that `expression` calls for this graph."""
    found = {}
    for op in graph.ops:
        if op.name == CUSTOMIZED or op.name in _INFIX or _form(op):
            continue
        oracle = table.lookup(op.name).oracle
        if inspect.isfunction(oracle) and not _library_function(oracle):
            text = inspect.getsource(oracle).replace("errors.InputError", "ValueError")
            found[oracle.__name__] = text.replace(
                f"def {oracle.__name__}", f"def {oracle.__name__.lstrip('_')}"
            )
    return list(found.values())


def local(t: DTensor) -> str:
    """A tensor's name as a local variable that hides nothing a generated file needs."""
    name = t.name.rstrip("_")  # tl_ is not what tl becomes
    hides = (
        name in _TAKEN or name in table.OPS or keyword.iskeyword(name) or _KERNEL.fullmatch(name)
    )
    return t.name + "_" if hides else t.name


def operand_names(op: KernelOp) -> list[str]:
    return [
        local(x)
        if isinstance(x, DTensor)
        else f'float("{x}")'
        if x in (float("inf"), float("-inf"))
        else repr(x)
        for x in op.inputs
    ]


def program(graph: KernelGraph, name: str) -> str:
    """A function of a list of tensors that runs a tensor program op by op."""
    lines = [
        f"def {name}(inputs):",
        f"    {', '.join(map(local, graph.inputs))}{',' if len(graph.inputs) == 1 else ''} = inputs",
    ]
    lines += [
        f"    {local(op.outputs[0])} = {expression(op, operand_names(op))}" for op in graph.ops
    ]
    return "\n".join([*lines, f"    return [{', '.join(map(local, graph.outputs))}]"]) + "\n"
