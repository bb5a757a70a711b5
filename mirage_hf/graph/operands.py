"""Check the arguments that users give to the methods of graphs: lists, numbers and operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from mirage_hf import errors
from mirage_hf.graph.block import BlockGraph, BlockInput, Taken
from mirage_hf.graph.tensors import DTensor, Operand
from mirage_hf.ops import table


def several(x: Any, where: str, what: str) -> tuple[Any, ...]:
    """Return `x`, a tuple or list, as a tuple.

    Args:
        x: The argument.
        where: The method that it was given to, for the message.
        what: The argument's name, for the message.

    Raises:
        GraphError: If `x` is neither a tuple nor a list.
    """
    try:
        return tuple(x)
    except TypeError:
        raise errors.GraphError(f"{where}: {what} must be a tuple or list, it is {x}") from None


def number(x: Any, where: str) -> float:
    """Return `x`, a number given as an operand of `where`, as a float.

    Raises:
        GraphError: If `x` is not a number, is NaN, or does not fit in a float64.
    """
    if isinstance(x, bool) or not isinstance(x, Real):
        raise errors.GraphError(
            f"{where}: expected a tensor of this graph or a number, got {type(x).__name__}"
        )
    try:
        as_float = float(x)
    except OverflowError:
        raise errors.GraphError(f"{where}: the number does not fit in a float64") from None
    if math.isnan(as_float):
        raise errors.GraphError(f"{where}: the number is NaN")
    return as_float


def bound_operands(op: str, operands: Sequence[Operand]) -> tuple[DTensor, ...]:
    """Return the bounds lo and hi among the operands of an op of the table, if it has any."""
    if table.lookup(op).kind != "bounds" and op != "softmax":
        return ()
    return tuple(x for x in operands[1:3] if isinstance(x, DTensor))


def index_operands(op: str, operands: Sequence[Operand]) -> tuple[DTensor, ...]:
    """Return the index among the operands of an op of the table, if it has one."""
    return tuple(x for x in operands[1:2] if isinstance(x, DTensor)) if op == "take" else ()


def computed_dtype(entry: table.Op, operands: Sequence[Operand]) -> torch.dtype:
    """Return the one dtype that an op of the table computes in, or moves.

    Raises:
        DTypeError: If the operands have several dtypes, or one that the op cannot have.
    """
    tensors = [x for x in operands if isinstance(x, DTensor)]
    codes = [t for t in tensors if t.dtype in table.CODE_DTYPES]
    if codes and entry.name != "cast":
        raise errors.DTypeError(
            f"{entry.name}: {codes[0].name} holds codes ({table.dtype_name(codes[0].dtype)}), "
            "which only graph.cast reads; cast it first"
        )
    bounds = bound_operands(entry.name, operands)
    for t in bounds:
        if t.dtype != torch.int32:
            raise errors.DTypeError(
                f"{entry.name}: bound {t.name} is {table.dtype_name(t.dtype)}; bounds are int32"
            )
    indices = index_operands(entry.name, operands)
    for t in indices:
        check_index(t, entry.name)
    tensors = [t for n, t in enumerate(tensors) if not indices or n != 1]
    floats = {t.dtype for t in tensors if t.dtype in table.COMPUTE_DTYPES}
    if entry.kind == "effect":
        position = tensors[2]
        if position.dtype in table.COMPUTE_DTYPES:
            raise errors.DTypeError(
                f"{entry.name}: position {position.name} is {table.dtype_name(position.dtype)}; "
                "positions are int32"
            )
        dtypes = {t.dtype for t in tensors[:2]}
    elif entry.name == "cast" or (entry.kind == "layout" and entry.name != "rope"):
        dtypes = floats or {t.dtype for t in tensors}
    else:
        integers = [t for t in tensors if t.dtype not in floats and t not in bounds]
        if integers and not (floats and entry.kind == "elementwise"):
            t = integers[0]
            raise errors.DTypeError(
                f"{entry.name}: {t.name} is {table.dtype_name(t.dtype)}, and ops compute with "
                "floating-point numbers; convert it with graph.cast"
            )
        dtypes = floats
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(table.dtype_name, dtypes)))
        raise errors.DTypeError(
            f"{entry.name}: operands have dtypes {names}; bring them to one with graph.cast"
        )
    return dtypes.pop()


def check_index(t: DTensor, where: str) -> None:
    """Check the dtype of an index. `where` opens the message.

    Raises:
        DTypeError: If it is neither int32 nor int64.
    """
    if t.dtype not in (torch.int32, torch.int64):
        raise errors.DTypeError(
            f"{where}: index {t.name} is {table.dtype_name(t.dtype)}; an index is int32 or int64"
        )


def check_arity(entry: table.Op, count: int) -> None:
    """Check the number of operands of an op of the table.

    Raises:
        GraphError: If the op does not take so many.
    """
    low, high = entry.arity
    if low <= count <= high:
        return
    takes = str(low) if low == high else f"{low} to {high}"
    # the signature of an elementwise op names no dim
    dims = f" ({entry.signature})" if any(c.isalpha() for c in entry.signature) else ""
    by_name = ""
    if entry.attrs and count > high:
        by_name = f"; give {', '.join(entry.attrs)} by name, as {next(iter(entry.attrs))}=…"
    raise errors.GraphError(
        f"{entry.name}: takes {takes} operand{'s' * (high != 1)}{dims}, got {count}{by_name}"
    )


def result_dims(
    entry: table.Op, operands: Sequence[Operand], attrs: dict[str, Any]
) -> tuple[int, ...]:
    """Return the dims of the result of an op of the table.

    Raises:
        GraphError: If the operands do not fit.
    """
    shapes = [x.dims if isinstance(x, DTensor) else () for x in operands]
    if entry.name == "matmul":
        (a, b), names = shapes, [x.name for x in operands if isinstance(x, DTensor)]
        if len(a) > 1 and len(b) > 1 and a[-1] != b[-2]:  # the shape rule knows no names
            raise errors.inner_sizes_differ(names[0], a, names[1], b)
    return entry.infer(*shapes, **attrs)


def check_block_operands(block: BlockGraph, i: BlockInput, operands: Sequence[DTensor]) -> None:
    """Check the operands of a kernel that an input of its block graph reads.

    Raises:
        GraphError: If an operand does not exist, or its dims do not fit.
        DTypeError: If it holds bounds and is not int32.
    """
    for number_in_input, source in enumerate(i.sources):
        if not 0 <= source < len(operands):
            raise errors.GraphError(
                f"customized: block input {i.name} reads operand {source}, "
                f"there are {len(operands)}"
            )
        operand = operands[source]
        wanted = tuple(_source_size(block, i, d, number_in_input) for d in range(len(i.axes)))
        if wanted != operand.dims:
            raise errors.GraphError(
                f"customized: block input {i.name} wants {errors.shape(wanted)}, "
                f"operand {source} is {errors.shape(operand.dims)}"
            )
        if i.bounds is not None and operand.dtype != torch.int32:
            raise errors.DTypeError(
                f"customized: block input {i.name} holds bounds, which are int32; "
                f"operand {source} is {table.dtype_name(operand.dtype)}"
            )
    if i.taken is not None:
        _check_taken(block, i, i.taken, operands)


def _check_taken(
    block: BlockGraph, i: BlockInput, taken: Taken, operands: Sequence[DTensor]
) -> None:
    """Check the index of a block input."""
    if not 0 <= taken.index < len(operands):
        raise errors.GraphError(
            f"customized: block input {i.name} has operand {taken.index} as its index, "
            f"there are {len(operands)}"
        )
    index = operands[taken.index]
    wanted = tuple(1 if a is None else block.axis(a).size for a in taken.axes)
    if wanted != index.dims:
        raise errors.GraphError(
            f"customized: block input {i.name} wants an index {errors.shape(wanted)}, "
            f"operand {taken.index} is {errors.shape(index.dims)}"
        )
    check_index(index, f"customized: block input {i.name}")


def _source_size(block: BlockGraph, i: BlockInput, dim: int, source: int) -> int:
    """Return how many elements a source of a block input has along a dim."""
    axis = i.axes[dim]
    if axis is None:
        return i.taken.size if i.taken is not None and dim == i.taken.dim else 1
    return i.sizes[source] if axis == i.joined and i.sizes else block.extent(i, axis)
