"""Checks that readers of containers share. Each returns what is wrong, or None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from mirage_hf import errors
from mirage_hf.ops.dtypes import COMPUTE_DTYPES, dtype_name

#: The Python types of tensors that hold numbers in their own memory.
PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)

#: Parameters of a class of their own that hold numbers in their own memory, too.
_OWN_MEMORY = ("bitsandbytes.nn.modules.Params4bit",)


def qualified_name(x: Any) -> str:
    """Return the module and name of an object's class. It identifies a class without an import."""
    cls = type(x)
    return f"{cls.__module__}.{cls.__qualname__}"


#: The attribute of a class that `optimize()` gives a module: the class that the module had.
STOCK_CLASS = "_mirage_hf_stock_class"


def stock_class(module: nn.Module) -> type:
    """Return the class of a module as its library made it."""
    kind: type = getattr(type(module), STOCK_CLASS, type(module))
    return kind


def stock_forward(kind: type) -> Any:
    """Return the forward of a class, or of the class that `optimize()` replaced by it."""
    stock: Any = getattr(kind, STOCK_CLASS, kind)
    return stock.forward


def is_optimized(module: nn.Module) -> bool:
    """Return whether `optimize()` has given a module another class, which hides its forward."""
    return hasattr(type(module), STOCK_CLASS)


def memory_of(t: Tensor) -> Any:
    """Return a value that changes if a tensor is other memory than before.

    For a tensor that consists of others, such as torchao's, it depends on all of them. It also has
    the tensor's version, which counts writes, because readers look at its zero points.
    """
    if type(t) in PLAIN_TENSORS:
        return t.data_ptr()
    if qualified_name(t) in _OWN_MEMORY:
        return (id(t), t.data_ptr())
    flatten = getattr(t, "__tensor_flatten__", None)
    if flatten is None:
        return id(t)
    parts = [memory_of(getattr(t, name)) for name in flatten()[0]]
    return (id(t), t.dtype, None if t.is_inference() else t._version, *parts)


def plain_parts(t: Tensor) -> list[Tensor]:
    """Return the plain tensors inside a wrapper, such as torchao's. A plain tensor is alone."""
    flatten = getattr(t, "__tensor_flatten__", None)
    if flatten is None:
        return [t]
    return [part for name in flatten()[0] for part in plain_parts(getattr(t, name))]


def bytes_of(t: Tensor) -> int:
    """Return the bytes of a tensor, or of the tensors that it consists of."""
    return sum(part.nbytes for part in plain_parts(t))


def text_of(x: Any) -> str:
    """Return the text of a setting that may be an enum."""
    return str(getattr(x, "value", x))


def wrong_tensor(
    name: str, t: Any, dims: Sequence[int], dtypes: Sequence[torch.dtype]
) -> str | None:
    """Return why `t` is not a row-major tensor of these dims and one of these dtypes."""
    if t is None:
        return f"{name} is missing"
    if type(t) not in PLAIN_TENSORS:
        return f"{name} is a {type(t).__name__}, not a plain tensor"
    if tuple(t.shape) != tuple(dims):
        return f"{name} has shape {errors.shape(t.shape)}, expected {errors.shape(dims)}"
    if t.dtype not in dtypes:
        expected = " or ".join(map(dtype_name, dtypes))
        return f"{name} holds {dtype_name(t.dtype)}, expected {expected}"
    if t.layout is not torch.strided or not t.is_contiguous():
        return f"{name} is not stored row by row"
    return None


def wrong_bias(bias: Any, rows: int) -> str | None:
    """Return why a bias cannot be added to the outputs."""
    return None if bias is None else wrong_tensor("bias", bias, (rows,), COMPUTE_DTYPES)


def wrong_sizes(rows: Any, columns: Any) -> str | None:
    """Return why a weight cannot have these sizes."""
    sizes = {"outputs": rows, "inputs": columns}
    for name, n in sizes.items():
        if type(n) is not int or n <= 0:
            return f"the number of {name} is {n!r}"
    return None


def uneven(name: str, n: int, block: int) -> str | None:
    """Return a reason if blocks do not divide a size."""
    if type(block) is not int or block <= 0:
        return f"{name} come in blocks of {block!r}"
    return f"blocks of {block} do not divide {n} {name}" if n % block else None


def equal_zero_point(words: Tensor, bits: int) -> int | None:
    """Return the zero point that all codes in words are, None if they differ.

    It looks at the numbers.
    """
    if words.is_meta:
        return None
    codes = words.detach().view(-1).view(torch.uint8)
    first = int(codes[0])
    if bits == 4 and first >> 4 != first & 15:
        return None
    return first & ((1 << bits) - 1) if bool((codes == first).all()) else None


#: What was seen last of tensors that were looked at.
_seen: WeakIdKeyDictionary = WeakIdKeyDictionary()


def may_hold_numbers(t: Tensor) -> bool:
    """Return whether a tensor may hold other numbers than 0.

    It looks at the numbers each time: a library writes into the tensors of a weight without a trace
    in their versions. While a CUDA graph is captured, what was seen last counts.
    """
    if t.is_meta:
        return True
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        return _seen.get(t, True)  # type: ignore[no-any-return]
    with torch.no_grad(), _disable_current_modes():
        _seen[t] = bool(t.any())
    return _seen[t]  # type: ignore[no-any-return]


def other_device(*held: Tensor | None) -> str | None:
    """Return a reason if tensors of a container lie on several devices."""
    devices = {str(t.device) for t in held if t is not None}
    return f"its tensors lie on {' and '.join(sorted(devices))}" if len(devices) > 1 else None


def changed_module(module: nn.Module) -> str | None:
    """Return why a module may compute something else than its class does."""
    if module._modules:
        return f"it has submodules ({', '.join(module._modules)})"
    if type(module._parameters) is not dict:
        return f"its parameters lie in a {type(module._parameters).__name__} (offloaded?)"
    return None
