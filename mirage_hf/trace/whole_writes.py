"""Read a buffer that one op overwrites as the tensor that is written.

Some models make a tensor of zeros and write the result of each token into it. With one token the
write covers the tensor, and nothing needs the copy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mirage_hf.trace.record import Input, Meta, Node, Recording, Value, renamed
from mirage_hf.trace.sizes import fixed_shape

#: Ops that make a tensor and read none.
_FRESH = frozenset(
    f"aten.{name}"
    for name in ("empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros")
)

#: Views that keep the order of elements if they keep all of them.
_IN_ORDER = frozenset(
    f"aten.{name}"
    for name in ("alias", "detach", "select", "slice", "squeeze", "unsqueeze", "view")
)


def without_whole_writes(recording: Recording) -> Recording:
    """Return a recording in which such buffers are views of the tensors written into them.

    The nodes keep their numbers. What made a buffer is still there, but nothing reads it.
    """
    nodes = [*recording.nodes]
    writes = Counter(storage for node in nodes for storage in node.written)
    readers: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        for storage in {recording.meta(x).storage for x in node.operands}:
            readers.setdefault(storage, []).append(number)
    for number in range(len(nodes)):
        views = _overwritten(recording, nodes, number, writes, readers)
        if views is None:
            continue
        buffer, source = recording.meta(views[0]), nodes[number].args[1]
        storage = recording.meta(source).storage
        whole = replace(buffer, strides=_contiguous(buffer.shape), storage=storage)
        op, where = torch.ops.aten.view.default, nodes[number].where
        nodes[number] = Node(op, (source, [*buffer.shape]), {}, [whole], where)
        names = dict.fromkeys(views, Value(number))
        for later in readers[buffer.storage]:
            if later > number:
                nodes[later] = renamed(nodes[later], names)
    return replace(recording, nodes=nodes)


def _overwritten(
    recording: Recording,
    nodes: Sequence[Node],
    number: int,
    writes: Mapping[int, int],
    readers: Mapping[int, Sequence[int]],
) -> list[Value] | None:
    """Return the buffer that a node overwrites as a whole, and views that are equal to it.

    Return None if the node does something else, or if the buffer is read before or written again.
    Return None, too, if a view of one part was made before the write and is read after it.

    Args:
        recording: The recording.
        nodes: Its nodes, in which buffers were replaced so far.
        number: The number of the node.
        writes: How many nodes write into each storage.
        readers: The nodes that read a tensor of each storage.
    """
    node = nodes[number]
    if node.name != "aten.copy_" or len(node.args) != 2 or node.kwargs:
        return None
    target, source = node.args
    if not isinstance(target, Value) or not isinstance(source, (Value, Input)):
        return None
    written, given = recording.meta(target), recording.meta(source)
    if (written.dtype, written.device) != (given.dtype, given.device):
        return None
    # a view must have the buffer's order in memory
    if not _same_shape(written, given) or given.strides != _contiguous(given.shape):
        return None
    if writes[written.storage] > 1 or given.storage in writes:
        return None
    made = target.node
    while nodes[made].name in _IN_ORDER and isinstance(nodes[made].args[0], Value):
        made = nodes[made].args[0].node
    buffer = nodes[made].outputs[0]
    if nodes[made].name not in _FRESH or buffer is None or _count(buffer) != _count(written):
        return None
    equal = [Value(made)]
    for n in readers[written.storage]:
        other = nodes[n]
        read = [x for x in other.operands if recording.meta(x).storage == written.storage]
        if n < number:
            if other.name not in _IN_ORDER:
                return None
            if other.outputs[0] is not None and _same_shape(other.outputs[0], buffer):
                equal.append(Value(n))
        elif n > number and not all(
            x in equal or (isinstance(x, Value) and x.node > number) for x in read
        ):
            return None
    return equal


def _same_shape(a: Meta, b: Meta) -> bool:
    return fixed_shape(a) is not None and fixed_shape(a) == fixed_shape(b)


def _count(meta: Meta) -> int:
    shape = fixed_shape(meta)
    return -1 if shape is None else math.prod(shape)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))
