"""Recordings of torch ops: names of tensors, sizes that vary, and what cannot be recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mirage_hf.trace.record import Held, Input, Recording, TraceError, Value, record
from mirage_hf.trace.sizes import (
    Size,
    at_size,
    fixed_shape,
    generalized,
    has_mixed_sizes,
    shape_at,
)
from tests.helpers.traced_functions import normal

#: A file of model code. Functions of tests may lie where code of models never does.
MODEL = """
def by_sign(x):
    y = 2 * x
    if y.sum() > 0:
        y.add_(1)

def as_list(x):
    x.tolist()

def by_number(x):
    return x[int(x[0])]

def chosen(x):
    return x.nonzero()

def without_fake(x, op):
    return op(x)

def doubled(x):
    return x + x
"""


def model_code(name: str) -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(compile(MODEL, "/models/toy/modeling_toy.py", "exec"), names)
    return names[name]


def recording_of(function: Callable[..., Any], **inputs: Tensor) -> Recording:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = {name: mode.from_tensor(x) for name, x in inputs.items()}
    return record(lambda: function(**fakes), fakes, mode)


def ops(recording: Recording) -> list[str]:
    return [node.name for node in recording.nodes]


# -- names ----------------------------------------------------------------------------------------


def test_a_view_in_another_dtype_has_a_name_of_its_own() -> None:
    recording = recording_of(lambda x: x.view(torch.int16).view(2, 4), x=torch.ones(8).half())
    views = [name for name in ops(recording) if "view" in name]
    assert views == ["aten.view.dtype", "aten.view"]


def test_tensors_are_inputs_held_or_values_of_nodes() -> None:
    weight = normal(4, 4)
    recording = recording_of(
        lambda x: (x @ weight).relu().split(2, dim=-1)[1].neg(), x=normal(3, 4)
    )
    product, relu, split, neg = recording.nodes
    assert ops(recording) == ["aten.mm", "aten.relu", "aten.split", "aten.neg"]
    given, held = product.operands
    assert given == Input("x") and isinstance(held, Held) and held.tensor is weight
    assert relu.operands == (Value(0),) and split.operands == (Value(1),)
    assert neg.operands == (Value(2, 1),) and len(split.outputs) == 2
    assert recording.held_tensors == [weight]
    assert recording.meta(held).shape == (4, 4) and recording.meta(Input("x")).shape == (3, 4)
    assert recording.meta(Value(2, 1)).shape == (3, 2)


def test_operands_in_lists_and_keywords_are_named_too() -> None:
    def function(x: Tensor, y: Tensor, out: Tensor) -> None:
        torch.ops.aten.cat.out([x, y], 1, out=out)

    recording = recording_of(function, x=normal(3, 2), y=normal(3, 4), out=normal(3, 6))
    (node,) = recording.nodes
    assert node.operands == (Input("x"), Input("y"), Input("out"))
    assert node.written == {recording.inputs["out"].storage}


def test_a_tensor_that_is_written_is_named_by_its_writer() -> None:
    def function(x: Tensor, memory: Tensor) -> None:
        memory.copy_(x)
        memory.add_(1)
        x.mul_(memory)

    recording = recording_of(function, x=normal(3), memory=normal(3))
    copy, add, mul = recording.nodes
    assert copy.operands == (Input("memory"), Input("x"))
    assert add.operands == (Value(0),) and mul.operands == (Input("x"), Value(1))
    stored, given = (recording.inputs[name].storage for name in ("memory", "x"))
    assert [n.written for n in recording.nodes] == [{stored}, {stored}, {given}]


def test_views_have_the_storage_of_what_they_view() -> None:
    recording = recording_of(lambda x: x[1:].view(-1) + 1, x=normal(3, 4))
    of_input = recording.inputs["x"].storage
    *views, total = recording.nodes
    assert [n.outputs[0].storage for n in views if n.outputs[0]] == [of_input] * len(views)
    assert total.outputs[0] is not None and total.outputs[0].storage != of_input


def test_nodes_name_the_line_of_the_model() -> None:
    recording = recording_of(model_code("doubled"), x=normal(3))
    assert [n.where for n in recording.nodes] == ["modeling_toy.py:20"]


def test_nothing_runs_and_no_gradients_are_kept() -> None:
    weight = torch.nn.Parameter(normal(4, 4))
    before = weight.detach().clone()
    recording = recording_of(lambda x: (x @ weight).sum(), x=normal(3, 4))
    assert torch.equal(weight, before) and ops(recording) == ["aten.mm", "aten.sum"]


# -- what cannot be recorded ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "line", "op"),
    [
        ("by_sign", 4, "_local_scalar_dense"),
        ("as_list", 8, "_local_scalar_dense"),
        ("by_number", 11, "_local_scalar_dense"),
        ("chosen", 14, "nonzero"),
    ],
)
def test_reads_on_the_host_are_named_with_op_and_line(name: str, line: int, op: str) -> None:
    with pytest.raises(TraceError) as raised:
        recording_of(model_code(name), x=torch.arange(4))
    start = f"modeling_toy.py:{line} reads values of the device on the host"
    assert str(raised.value).startswith(start) and op in str(raised.value)


def test_ops_without_a_fake_kernel_are_named() -> None:
    torch.library.define("mirage_hf_tests::no_fake", "(Tensor x) -> Tensor")
    torch.library.impl("mirage_hf_tests::no_fake", "CPU", lambda x: x.clone())
    op = torch.ops.mirage_hf_tests.no_fake
    want = "modeling_toy.py:17 runs an op without a fake kernel.*no_fake"
    with pytest.raises(TraceError, match=want):
        recording_of(lambda x: model_code("without_fake")(x, op), x=normal(4))


def test_tensors_of_earlier_calls_are_refused() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    x, state = mode.from_tensor(normal(3, 4)), mode.from_tensor(normal(3, 4))
    want = r"modeling_toy.py:20 reads a tensor of shape \(3, 4\) that an earlier call has made"
    with pytest.raises(TraceError, match=want):
        record(lambda: model_code("doubled")(state), {"x": x}, mode)


def test_other_errors_are_the_functions_own() -> None:
    def function(x: Tensor) -> None:
        raise ValueError(f"no {x.shape[0]} rows")

    with pytest.raises(ValueError, match="no 3 rows"):
        recording_of(function, x=normal(3, 4))


# -- sizes ----------------------------------------------------------------------------------------

SIZES = ((6,), (10,))


def at_both(function: Callable[[Tensor, int], Any]) -> Recording:
    first, second = (
        recording_of(lambda x, size=size: function(x, size), x=normal(2, size)) for (size,) in SIZES
    )
    return generalized(first, second, SIZES)


def test_integers_that_grow_become_sizes() -> None:
    recording = at_both(lambda x, size: torch.cat([x, x], -1)[:, 3:].reshape(4 * size - 6))
    assert recording.inputs["x"].shape == (2, Size((1,), 0))
    assert recording.inputs["x"].strides == (Size((1,), 0), 1)
    *_, last = recording.nodes
    (meta,) = last.outputs
    assert meta is not None and meta.shape == (Size((4,), -6),)
    assert fixed_shape(meta) is None and shape_at(meta, (100,)) == (394,)
    assert at_size(last.args, (100,))[1] == [394]
    cat = recording.nodes[0].outputs[0]
    assert cat is not None and shape_at(cat, (7,)) == (2, 14)


def test_numbers_that_stay_are_numbers() -> None:
    recording = at_both(lambda x, size: x[:, :4] * 3)
    (meta,) = recording.nodes[-1].outputs
    assert meta is not None and fixed_shape(meta) == (2, 4)


def test_arguments_at_a_size_keep_their_containers() -> None:
    given = {"a": [Size((2,), 1), 3, (Size((-1,), 9), Value(1))], "b": None}
    assert at_size(given, (4,)) == {"a": [9, 3, (5, Value(1))], "b": None}
    assert type(at_size(given, (4,))["a"][2]) is tuple


def test_equal_constants_made_at_each_size_are_one() -> None:
    recording = at_both(lambda x, size: x[:, :2] + torch.tensor([1.0, 2.0]))
    (held,) = recording.held_tensors
    assert held.tolist() == [1.0, 2.0]
    assert recording.meta(Held(held)).shape == (2,)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, size: [x.neg() for _ in range(size)], "6 ops with 6 cache slots, and 10 with"),
        (lambda x, size: x.neg() if size == 6 else x.exp(), "runs another op"),
        (lambda x, size: x * (size / 10), "gets 0.6 with a short cache, and 1.0 with a long one"),
        (lambda x, size: x.view(2, -1, *[1] * (size - 6)), "lists of other lengths"),
        (lambda x, size: x[:, : 4 if size == 6 else 7], "no multiple of the cache's size"),
        (lambda x, size: x[:, :1] + torch.tensor([float(size)]), "makes another constant"),
        (
            lambda x, size: x.sum([0], dtype=None if size == 6 else torch.float64),
            "other keyword arguments",
        ),
        (lambda x, size: x.split(2, dim=-1), "returns more tensors"),
        (
            lambda x, size: x.to([torch.float16, torch.float64][size // 10]),
            "gets torch.float16 with",
        ),
    ],
)
def test_recordings_that_differ_are_refused(
    function: Callable[[Tensor, int], Any], reason: str
) -> None:
    with pytest.raises(TraceError, match=reason):
        at_both(function)


class ProcessGroup:
    """An argument as that of a collective, which torch cannot compare."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise NotImplementedError


def test_arguments_that_cannot_be_compared_are_refused() -> None:
    short, long = (recording_of(lambda x: x.neg(), x=normal(1, size)) for size in (6, 10))
    for recording in (short, long):
        recording.nodes[0].kwargs["group"] = ProcessGroup()
    with pytest.raises(TraceError, match="gets a ProcessGroup, which cannot be compared"):
        generalized(short, long, ((6,), (10,)))


def test_integers_may_depend_on_one_of_two_sizes() -> None:
    def at(slots: int, source: int) -> Recording:
        return recording_of(
            lambda x, y: x.sum() + torch.cat([y, y], -1).sum(),
            x=normal(1, slots),
            y=normal(1, source),
        )

    sizes = (6, 8), (10, 8), (6, 12)
    first, second, third = (at(*each) for each in sizes)
    recording = generalized(generalized(first, second, sizes[:2]), third, (sizes[0], sizes[2]))
    assert recording.inputs["x"].shape == (1, Size((1, 0), 0))
    assert recording.inputs["y"].shape == (1, Size((0, 1), 0))
    assert shape_at(recording.inputs["y"], (3, 50)) == (1, 50)


def at_four_sizes(function: Callable[[Tensor, Tensor], Any]) -> Recording:
    """Return a recording for all sizes, compared with one at two sizes that were not seen."""

    def at(slots: int, source: int) -> Recording:
        return recording_of(function, x=normal(1, slots), y=normal(1, source))

    sizes = (6, 8), (10, 8), (6, 12)
    first, second, third = (at(*each) for each in sizes)
    merged = generalized(generalized(first, second, sizes[:2]), third, (sizes[0], sizes[2]))
    return generalized(merged, at(10, 12), ((10, 12), (10, 12)))


def test_integers_may_depend_on_both_sizes() -> None:
    recording = at_four_sizes(lambda x, y: torch.cat([x, y, y], -1) * 2)
    (meta,) = recording.nodes[-1].outputs
    assert meta is not None and meta.shape == (1, Size((1, 2), 0))
    assert shape_at(meta, (3, 50)) == (1, 103)
    assert repr(meta.shape[1]) == "(cache slots + 2 · encoder slots)"
    assert has_mixed_sizes(recording)
    assert not has_mixed_sizes(at_four_sizes(lambda x, y: x.sum() + y.sum()))


def test_a_product_of_both_sizes_is_refused() -> None:
    with pytest.raises(TraceError, match="no linear function"):
        at_four_sizes(lambda x, y: (x.T @ y).reshape(-1))


def test_a_softmax_over_so_many_slots_hides_what_it_is_told_to() -> None:
    """Stock's cache has no slots that hold nothing, so some models make no mask in a step."""

    def function(scores: Tensor, length: Tensor) -> Tensor:
        return scores.softmax(-1) + scores[:, :3].softmax(-1).sum() + scores.softmax(0)

    with FakeTensorMode() as mode:
        given = {"scores": torch.zeros(3, 7), "length": torch.zeros(1)}
    hidden = {7: lambda: torch.arange(7)[None] > given["length"]}
    recording = record(lambda: function(**given), given, mode, hidden=hidden)
    names = [node.name for node in recording.nodes]
    assert names.count("aten.masked_fill") == 1 and names.count("aten._softmax") == 3
    (fill,) = (n for n in recording.nodes if n.name == "aten.masked_fill")
    assert fill.args[0] == Input("scores") and fill.args[2] == -math.inf
