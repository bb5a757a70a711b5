"""Read the step of a short convolution as one op.

Models with states of convolutions keep the last inputs of each channel. A step joins them with the
new input, writes the last of these over the state, and convolves them. These are four or five torch
ops on small tensors. `with_short_convolutions` puts the op `mirage_hf::short_convolution` in their
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, library

from mirage_hf.trace.record import Held, Input, Node, Readers, Recording, Value, readers_of
from mirage_hf.trace.sizes import fixed_shape

#: The op's name as nodes have it.
SHORT_CONVOLUTION = "mirage_hf.short_convolution"

library.define(
    "mirage_hf::short_convolution",
    "(Tensor(a!) state, Tensor x, Tensor weight, Tensor? bias, bool silu) -> Tensor",
)


def short_convolution(
    state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    """Shift x into the state, and convolve the last inputs of each channel.

    Args:
        state: The last inputs (batch, channels, length). It is changed.
        x: The new inputs (batch, channels, 1).
        weight: The weights (channels, 1, width), with a width of at most length + 1.
        bias: The biases (channels,), or None.
        silu: Whether the result is silu of the convolution.
    """
    inputs = torch.cat([state, x], -1)
    state.copy_(inputs[..., 1:])
    y = F.conv1d(inputs[..., -weight.shape[-1] :], weight, bias, groups=weight.shape[0])
    return F.silu(y) if silu else y


library.impl("mirage_hf::short_convolution", "CompositeExplicitAutograd", short_convolution)


def with_short_convolutions(recording: Recording) -> Recording:
    """Return a recording in which each short convolution is one op.

    The nodes keep their numbers. Those that the op replaces give its result, or nothing reads them.
    """
    nodes = [*recording.nodes]
    readers = readers_of(nodes)
    for number, node in enumerate(nodes):
        if node.name == "aten.cat" and (found := _convolution(recording, readers, number)):
            _replace(nodes, recording, found)
    return replace(recording, nodes=nodes)


@dataclass(frozen=True)
class _Convolution:
    """The nodes of a step of a short convolution.

    Attributes:
        cat: Joins the state and the new input.
        write: Writes the state.
        product: Convolves.
        same: Nodes whose result is that of the op: a slice and silu, if there are any.
        silu: Whether the result is silu of the convolution.
    """

    cat: int
    write: int
    product: int
    same: tuple[int, ...]
    silu: bool


def _convolution(recording: Recording, readers: Readers, cat: int) -> _Convolution | None:
    """Return the convolution that begins with a node, or None."""
    nodes = recording.nodes
    parts, dim = nodes[cat].args[0], [*nodes[cat].args[1:], 0][0]
    if len(parts) != 2 or not isinstance(parts[0], Input) or isinstance(parts[1], Held):
        return None
    state, x = parts
    shape, new = (fixed_shape(recording.meta(t)) for t in parts)
    meta = nodes[cat].outputs[0]
    if shape is None or new is None or meta is None or len(shape) != 3 or dim not in (-1, 2):
        return None
    if [*new] != [*shape[:2], 1] or {recording.meta(x).dtype, recording.meta(state).dtype} != {
        meta.dtype
    }:
        return None
    users = readers.get(Value(cat), [])
    products = [n for n in users if nodes[n].name == "aten.convolution"]
    slices = [n for n in users if nodes[n].name == "aten.slice"]
    if len(products) != 1 or len(slices) != 1 or len(users) != 2:
        return None
    (product,), (part,) = products, slices
    written = readers.get(Value(part), [])
    is_state = _takes(nodes[part], shape[2] + 1, shape[2]) and len(written) == 1
    if not is_state or readers.get(state) != [cat, *written]:
        return None
    (write,) = written
    if nodes[write].name != "aten.copy_" or nodes[write].args != (state, Value(part)):
        return None
    if readers.get(Value(write)) or not _is_depthwise(recording, nodes[product], shape):
        return None
    found = _result(nodes, readers, cat, write, product)
    if found is None:
        return None
    # The op runs where the product ran, and its result takes the place of others.
    touched = [x, *nodes[product].operands[1:], *(Value(n) for n in (product, *found.same))]
    is_written = any(recording.meta(t).storage in recording.changing for t in touched)
    return None if is_written else found


def _is_depthwise(recording: Recording, node: Node, shape: Sequence[int]) -> bool:
    """Return whether a node convolves each channel of (batch, channels, length + 1) by itself."""
    x, weight, bias, *how = node.args
    channels, length = shape[1:]
    sizes = fixed_shape(recording.meta(weight))
    if sizes is None or len(sizes) != 3 or [*sizes[:2]] != [channels, 1] or sizes[2] > length + 1:
        return False
    dtypes = {recording.meta(t).dtype for t in (x, weight, bias) if t is not None}
    return len(dtypes) == 1 and how == [[1], [0], [1], False, [0], channels]


def _result(
    nodes: Sequence[Node],
    readers: Readers,
    cat: int,
    write: int,
    product: int,
) -> _Convolution | None:
    """Return a convolution with the slice and silu that follow it, None if more of it is read."""
    meta = nodes[product].outputs[0]
    assert meta is not None
    same: list[int] = []
    last = product
    users = readers.get(Value(product), [])
    if len(users) == 1 and _takes(nodes[users[0]], meta.shape[2], 1):
        same, last = users, users[0]
    elif meta.shape[2] > 1:
        return None
    users = readers.get(Value(last), [])
    silu = len(users) == 1 and nodes[users[0]].name == "aten.silu"
    return _Convolution(cat, write, product, (*same, *users) if silu else (*same,), silu)


def _takes(node: Node, size: int, count: int) -> bool:
    """Return whether a node takes the last `count` elements of dim 2, which has `size`."""
    if node.name != "aten.slice" or len(node.args) not in (3, 4):
        return False
    dim, start, *stop = node.args[1:]
    return dim in (2, -1) and start in (size - count, -count) and all(s >= size for s in stop)


def _replace(nodes: list[Node], recording: Recording, found: _Convolution) -> None:
    """Put the op in the place of the convolution."""
    state, x = nodes[found.cat].args[0]
    _, weight, bias, *_ = nodes[found.product].args
    metas = [recording.meta(Value(n)) for n in (*found.same, found.product)]
    shape = (*metas[0].shape[:2], 1)
    result = replace(metas[-1], shape=shape, strides=(shape[1], 1, 1))
    written = frozenset({recording.meta(state).storage})
    nodes[found.product] = Node(
        torch.ops.mirage_hf.short_convolution.default,
        (state, x, weight, bias, found.silu),
        {},
        [result],
        nodes[found.product].where,
        written,
    )
    view = torch.ops.aten.alias.default
    for n in found.same:
        nodes[n] = Node(view, (Value(found.product),), {}, [result], nodes[n].where)
    # nothing reads the result of the write
    nodes[found.write] = Node(view, (x,), {}, [recording.meta(x)], nodes[found.write].where)
