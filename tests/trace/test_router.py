"""Routers: several torch ops that choose experts are one op, and its kernel agrees with torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen.ahead import compile_kernel
from mirage_hf.decode.kernels.router import route_by_kernel
from mirage_hf.trace.routers.finder import MOST_ELEMENTS
from mirage_hf.trace.routers.op import ROUTE, route, router_of
from mirage_hf.trace.routers.text import router_text
from mirage_hf.trace.step_plan import StepPlan
from tests.helpers import triton_interpreter
from tests.helpers.decode_states import DTYPES, TYPES
from tests.helpers.routers import ROUTERS, Sizes
from tests.helpers.traced_functions import normal, outputs_of, plan_of, results_of

SCORES = normal(3, 24)
#: Scores, many of which are equal.
TIES = (2 * normal(3, 24, seed=1)).round()


def numbers_of(plan: StepPlan) -> list[int]:
    """Return the routers of a plan in which no top-k is left."""
    plan.schedule({})
    nodes = [u.node for u in plan.step_ops if u.node is not None]
    assert not any(node.name == "aten.topk" for node in nodes)
    return [node.args[1] for node in nodes if node.name == ROUTE]


def equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", [SCORES, TIES], ids=["random", "ties"])
def test_a_router_is_one_op(name: str, dtype: torch.dtype, scores: Tensor) -> None:
    sizes = Sizes()

    def function(scores: Tensor) -> tuple[Tensor, Tensor]:
        return ROUTERS[name](scores, sizes)

    scores = scores.to(dtype)
    plan = plan_of(function, {"scores": scores})
    (number,) = numbers_of(plan)
    assert sum(u.node is not None for u in plan.step_ops) == 3  # the router, and two results
    assert len(router_of(number).results) == 2
    outputs = outputs_of(function, {"scores": scores})
    assert equal(results_of(plan, {"scores": scores}, outputs), outputs)


def test_what_else_reads_scores_still_gets_them() -> None:
    def function(scores: Tensor) -> tuple[Tensor, ...]:
        chances = F.softmax(scores.float(), dim=-1)
        weights, index = torch.topk(chances, 2, dim=-1)
        return weights / (weights.sum(-1, keepdim=True) + 1e-3), index, chances.cumsum(-1), weights

    plan = plan_of(function, {"scores": SCORES})
    (number,) = numbers_of(plan)
    assert len(router_of(number).results) == 4
    outputs = outputs_of(function, {"scores": SCORES})
    assert equal(results_of(plan, {"scores": SCORES}, outputs), outputs)


def test_layers_share_a_router() -> None:
    def function(scores: Tensor, others: Tensor) -> tuple[Tensor, ...]:
        return *ROUTERS["qwen3"](scores, Sizes()), *ROUTERS["qwen3"](others, Sizes())

    inputs = {"scores": SCORES, "others": TIES}
    plan = plan_of(function, inputs)
    first, second = numbers_of(plan)
    assert first == second
    outputs = outputs_of(function, inputs)
    assert equal(results_of(plan, inputs, outputs), outputs)


def written_later(scores: Tensor) -> tuple[Tensor, ...]:
    """Write to what was chosen, of which a view was made before."""
    weights, index = torch.topk(scores, 3)
    view = weights.view(-1)
    weights.mul_(2.0)
    return view.cumsum(0), weights, index


def written_outside(scores: Tensor) -> tuple[Tensor, ...]:
    """Write to what was chosen, by an op that routers do not have."""
    weights, index = torch.topk(scores, 3)
    weights.cumsum_(-1)
    return weights * 2.0, index


def writes_its_input(scores: Tensor) -> tuple[Tensor, ...]:
    scores.mul_(2.0)
    weights, index = torch.topk(scores, 3)
    return weights * scores.sum(-1, keepdim=True), index


def least(scores: Tensor) -> tuple[Tensor, ...]:
    return torch.topk(scores, 3, largest=False)


def along_rows(scores: Tensor) -> tuple[Tensor, ...]:
    return torch.topk(scores, 2, dim=0)


def uneven_groups(scores: Tensor) -> tuple[Tensor, ...]:
    """Group the experts in two ways, which no tile can hold at once."""
    a = scores.view(-1, 3, 8).topk(2, dim=-1)[0].sum(-1)
    b = scores.view(-1, 4, 6).topk(2, dim=-1)[0].sum(-1)
    return a, b, torch.topk(scores, 2)[1]


def read_between(scores: Tensor) -> tuple[Tensor, ...]:
    """Read a part of the router to compute another one."""
    weights, index = torch.topk(scores, 3)
    total = weights.cumsum(-1)[:, -1:]
    return weights / total, index


@pytest.mark.parametrize(
    "function",
    [
        written_later,
        written_outside,
        writes_its_input,
        least,
        along_rows,
        uneven_groups,
        read_between,
    ],
)
def test_other_forms_compute_what_torch_does(function: Callable[..., Any]) -> None:
    """Whatever is made of them, the results are those of torch."""
    inputs = {"scores": SCORES}
    plan = plan_of(function, inputs)
    plan.schedule({})
    outputs = outputs_of(function, inputs)
    assert equal(results_of(plan, inputs, outputs), outputs)


class Stable(TorchDispatchMode):
    """Let top-k choose equal elements in order, as a stable sort does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op."""
        if func is not torch.ops.aten.topk.default:
            return func(*args, **(kwargs or {}))
        values, index = torch.sort(args[0], dim=-1, descending=True, stable=True)
        return values[..., : args[1]].contiguous(), index[..., : args[1]].contiguous()


def wrong_routes(name: str, count: int, device: str = "cpu") -> list[str]:
    """Return random cases in which the kernel of a router differs from torch.

    Choices must be equal, and weights of 16 bits, too. Weights of float32 may differ by rounding.
    """
    rng, wrong = random.Random(name), []
    for n in range(count):
        rows = rng.randint(1, 5)
        groups, places = rng.choice([(1, 6), (2, 3), (3, 8), (4, 4), (8, 16), (5, 7), (8, 32)])
        experts = groups * places
        kept = rng.randint(1, groups)
        bias = normal(experts, seed=n)
        scores = 3 * normal(rows, experts, seed=1000 + n)
        if rng.random() < 0.6:  # ties
            scores, bias = scores.round(), bias.round()
        if rng.random() < 0.2:
            scores, bias = scores.zero_(), bias.zero_()
        sizes = Sizes(experts, groups, kept, rng.randint(1, min(9, kept * places)), bias)
        scores = scores.to(DTYPES[n % 3])

        def function(scores: Tensor, sizes: Sizes = sizes) -> tuple[Tensor, Tensor]:
            return ROUTERS[name](scores, sizes)

        plan = plan_of(function, {"scores": scores}, rows)
        (number,) = numbers_of(plan)
        (node,) = [u.node for u in plan.step_ops if u.node is not None and u.node.name == ROUTE]
        given = [getattr(x, "tensor", scores) for x in node.args[0]]
        with Stable():
            wanted = route(given, number)
        found = route_by_kernel([x.to(device) for x in given], number)
        for ours, theirs in zip(found, wanted, strict=True):
            ours = ours.cpu()
            exact = ours.dtype == theirs.dtype and torch.equal(ours, theirs)
            near = theirs.dtype == torch.float32 and torch.allclose(ours, theirs, 2e-6, 1e-30)
            if not exact and not near:
                wrong.append(f"{n}: {rows} rows, {sizes.experts} {sizes.groups} {sizes.chosen}")
    return wrong


@pytest.mark.parametrize("name", ROUTERS)
def test_the_kernel_is_as_torch(name: str) -> None:
    pytest.importorskip("triton")
    code = (
        "from tests.trace import test_router as t; import json; "
        f"print(json.dumps(t.wrong_routes({name!r}, 6)))"
    )
    assert triton_interpreter.run(code) == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTERS)
def test_the_kernel_is_as_torch_on_a_gpu(name: str) -> None:
    assert wrong_routes(name, 60, "cuda") == []


def test_nan_is_the_greatest_score() -> None:
    pytest.importorskip("triton")
    assert triton_interpreter.run("from tests.trace import test_router as t; t.print_nan()") == [
        [2, 4, 0]
    ]


def print_nan() -> None:
    """Print what is chosen of scores with NaN and infinity, in the interpreter's process."""
    scores = torch.tensor([[1.0, -1.0, float("nan"), -0.0, float("inf"), 0.0]])
    plan = plan_of(lambda scores: torch.topk(scores, 3), {"scores": scores}, 1)
    (number,) = numbers_of(plan)
    print(route_by_kernel([scores], number)[1].tolist())


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("sm", [80, 90])
def test_the_kernel_compiles_and_waits(name: str, sm: int) -> None:
    pytest.importorskip("triton")
    # the groups are few and of odd sizes, so tiles of several choices differ in shape
    sizes = Sizes(35, 5, 4, 3, normal(35))
    scores = normal(2, 35, dtype=torch.bfloat16)
    plan = plan_of(lambda scores: ROUTERS[name](scores, sizes), {"scores": scores}, 2)
    (number,) = numbers_of(plan)
    router = router_of(number)
    text = router_text(router)
    forms = [*router.inputs, *(router.steps[x.step].outputs[x.output] for x in router.results)]
    names = [f"in{n}" for n in range(len(router.inputs))]
    names += [f"out{n}" for n in range(len(router.results))]
    signature = [(n, TYPES[form.dtype]) for n, form in zip(names, forms, strict=True)]
    function = getattr(compiler.load(text.source, text.digest), text.name)
    kernel = compile_kernel(function, signature, text.num_warps, 1, sm)
    ptx = kernel.asm["ptx"]
    waits, triggers = (
        ptx.count(f"griddepcontrol.{word}") for word in ("wait", "launch_dependents")
    )
    assert kernel.asm["cubin"] and waits == triggers == (1 if sm >= 90 else 0)
    if sm >= 90:
        wait = ptx.find("griddepcontrol.wait")
        touched = min(ptx.find(access) for access in ("st.global", "ld.global"))
        assert 0 <= wait < ptx.find("griddepcontrol.launch_dependents") < touched


def test_wide_rows_are_no_router() -> None:
    scores = normal(3, MOST_ELEMENTS + 1)
    plan = plan_of(lambda scores: torch.topk(scores, 2), {"scores": scores})
    plan.schedule({})
    assert not any(u.node is not None and u.node.name == ROUTE for u in plan.step_ops)
