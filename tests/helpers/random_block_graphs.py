"""Random block graphs, valid by construction.

They draw axes, roles, splits, strides, joined inputs, stages, accumulators and outputs.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import torch

from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.graph.algebra import TorchAlgebra
from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Role,
    Stage,
)
from mirage_hf.graph.execute_block import run_block_graph
from mirage_hf.graph.kernel import KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph

UNARY = ("exp", "silu", "tanh", "neg", "square", "sigmoid", "relu", "gelu")
BINARY = ("add", "sub", "mul", "max", "min")
SIZES = (1, 2, 3, 5, 8, 16, 20)


def random_graph(seed: int) -> KernelGraph:
    """Return a kernel graph with one random block graph as its only op."""
    return _Builder(random.Random(seed)).build()


def random_schedule(block: BlockGraph, seed: int) -> Schedule:
    """Return a random schedule.

    Its tiles may be smaller or larger than the axes. It uses tensor cores if they happen to fit.
    """
    r = random.Random(seed)
    mma = r.random() < 0.6
    tiles = {}
    for a in block.axes:
        whole = next_power_of_two(block.split_size(a.name))
        least = 16 if mma and r.random() < 0.8 else 1
        if block.axis_split_by(a.name):
            tiles[a.name] = 1
        elif a.role is Role.TILE:
            tiles[a.name] = max(whole, least)
        else:
            least = (
                1
                if a.role is Role.GRID and len(block.named(Role.GRID)) > 2 and r.random() < 0.6
                else least
            )
            tiles[a.name] = max(
                least, r.choice([t for t in (1, 2, 4, 8, 16, 32, 64) if t <= whole * 2])
            )
    while (
        math.prod(-(-block.split_size(a.name) // tiles[a.name]) for a in block.axes) > 48
    ):  # the interpreter runs block after block
        most = max(
            (a for a in block.axes if not block.axis_split_by(a.name)),
            key=lambda a: block.split_size(a.name) / tiles[a.name],
        )
        tiles[most.name] *= 2
    first, after_loop, stages = r.random() < 0.5, r.random() < 0.5, r.choice((1, 3))
    cooperating = 1
    if sum(s.loop is not None for s in block.stages) == 1:
        trips = next(-(-block.split_size(a.name) // tiles[a.name]) for a in block.named(Role.LOOP))
        cooperating = r.choice(
            [s for s in (1, 2, 4) if trips > 1 and (s - 1) * -(-trips // s) < trips] or [1]
        )
    return Schedule(
        tiles,
        mma,
        first,
        after_loop,
        num_stages=stages,
        cooperating_blocks=cooperating,
        prefetch_steps=r.choice((0, 1, 4)),
    )


class _Builder:
    def __init__(self, r: random.Random):
        self.r = r
        self.plain = plain = (
            r.random() < 0.5
        )  # few axes, and two inputs that can be multiplied over k
        self.grid = ["m", "n"] if plain else ["m", "n", "h"][: r.randint(1, 3)]
        self.loop = "k" if plain or r.random() < 0.8 else None
        self.tile = ["r", "s"][: r.randint(0, 1 if plain else 2)]
        order = [*self.grid, *self.tile, *([self.loop] if self.loop else [])]
        r.shuffle(order)
        self.size = {a: r.choice(SIZES) for a in order}
        if self.loop:
            self.size["k"] = r.choice((5, 16, 37, 64, 100))
        self.order = order
        self.split: str | None = None  # the axis that is split, with the splits numbered by p
        dealt = [a for a in (*self.tile, self.loop) if a and self.size[a] > 1]
        if dealt and r.random() < 0.4:
            self.split = self.loop if self.loop and r.random() < 0.7 else r.choice(dealt)
            size = self.size[self.split]
            self.size["p"] = r.choice(
                [s for s in range(1, min(size, 7) + 1) if (s - 1) * -(-size // s) < size]
            )
            self.grid.append("p")
            self.order.insert(r.randint(0, len(order)), "p")
        self.carried: dict[str, tuple[str, ...]] = {}
        self.count = 0

    def fresh(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def reduced(self, axes, over: str | None) -> tuple[str, ...]:
        return self.sorted((set(axes) - {over}) | ({"p"} if over == self.split else set()))

    def storable(self, axes) -> bool:
        """Return whether each block stores its own elements: its range of an axis, or its split."""
        return all(a in axes or (a == "p" and self.split in axes) for a in self.grid) and not (
            self.split is not None and {"p", self.split} <= set(axes)
        )

    def sorted(self, axes) -> tuple[str, ...]:
        return tuple(a for a in self.order if a in axes)

    def build(self) -> KernelGraph:
        r, g = self.r, KernelGraph()
        self.dtype = r.choice((torch.float16, torch.float32))
        tensors, inputs = [], []
        for n in range(r.randint(2, 4)):
            named = [a for a in self.order if a != "p"]
            axes = [a for a in named if r.random() < 0.6] or [named[0]]
            axes = [self.grid[n], "k"] if self.plain and n < 2 else axes
            inputs.append(self._input(g, tensors, f"in{n}", axes))
        stages, outputs = [], []
        visible = [i.name for i in inputs]
        for _ in range(r.randint(1, 3)):
            stages.append(
                self._stage(
                    visible, outputs, self.loop if self.loop and r.random() < 0.75 else None
                )
            )
        final = [v for v in visible if self.loop not in self.carried[v]]
        stages.append(self._finish(final, outputs))
        roles = (
            {a: Role.GRID for a in self.grid}
            | {a: Role.TILE for a in self.tile}
            | ({self.loop: Role.LOOP} if self.loop else {})
        )
        axes = tuple(
            Axis(a, self.size[a], roles[a], "p" if a == self.split else None) for a in self.order
        )
        block = BlockGraph(axes, tuple(inputs), tuple(stages), tuple(outputs))
        g.mark_output(*g.customized(tensors, block))
        return g

    def _tensor(self, g: KernelGraph, dims: list[int]):
        """Add a tensor with strides in any order of its dims, sometimes with gaps or broadcast."""
        order = list(range(len(dims)))
        if self.r.random() < 0.5:
            self.r.shuffle(order)
        strides, step = [0] * len(dims), 1
        for d in reversed(order):
            strides[d] = step
            step *= dims[d] + (self.r.randint(1, 3) if self.r.random() < 0.2 else 0)
        if self.r.random() < 0.1:
            strides[self.r.randrange(len(dims))] = 0
        return g.new_input(dims, self.dtype, strides, constant=self.r.random() < 0.5)

    def _input(self, g: KernelGraph, tensors: list, name: str, axes: list[str]) -> BlockInput:
        r = self.r
        dims: list[str | None] = list(axes)
        r.shuffle(dims)
        if r.random() < 0.3:
            dims.insert(r.randint(0, len(dims)), None)
        joined, sizes = None, ()
        splittable = [a for a in axes if self.size[a] > 1]
        if splittable and r.random() < 0.3:
            joined = r.choice(splittable)
            cut = r.randint(1, self.size[joined] - 1)
            sizes = (cut, self.size[joined] - cut)
        sources = []
        for part in sizes or (None,):
            sources.append(len(tensors))
            tensors.append(
                self._tensor(
                    g, [1 if a is None else part if a == joined else self.size[a] for a in dims]
                )
            )
        self.carried[name] = self.sorted(axes)
        return BlockInput(name, tuple(sources), tuple(dims), joined, sizes)

    def _stage(self, visible: list[str], outputs: list[BlockOutput], loop: str | None) -> Stage:
        r = self.r
        local = [v for v in visible if loop or self.loop not in self.carried[v]]
        body: list[BlockOp] = []
        if not local:
            return Stage(loop, ())
        for _ in range(r.randint(1, 4)):
            body.append(self._op(local))
            local.append(body[-1].out)
        accumulators = []
        if r.random() < 0.7:
            self._product(local, body, accumulators, loop)
        for v in [v for v in local if loop and loop in self.carried[v]]:
            if r.random() < 0.5:
                out = self.fresh("acc")
                kind = "max" if r.random() < 0.25 else "sum"
                self.carried[out] = self.reduced(self.carried[v], loop)
                accumulators.append(Accumulator(out, v, kind, self.carried[out]))
        for op in body:
            if loop and loop in op.axes and self.storable(op.axes) and r.random() < 0.4:
                outputs.append(self._output(op.out))
        visible += [op.out for op in body if loop not in op.axes]
        if loop and r.random() < 0.5:
            body += self._shifted(local, accumulators, loop)
        visible += [a.out for a in accumulators]
        return Stage(loop, tuple(body), tuple(accumulators))

    def _shifted(
        self, local: list[str], accumulators: list[Accumulator], loop: str
    ) -> list[BlockOp]:
        """Add a running maximum, and sums that follow it."""
        r, body = self.r, []
        walked = [v for v in local if loop in self.carried[v]]
        if not walked:
            return []

        def op(fn: str, *args: str) -> str:
            out = self.fresh("s")
            self.carried[out] = self.sorted({a for x in args for a in self.carried[x]})
            body.append(BlockOp(out, fn, args, self.carried[out]))
            return out

        def accumulate(arg: str, kind: str, shift: str | None) -> str:
            out = self.fresh("acc")
            self.carried[out] = self.reduced(self.carried[arg], loop)
            accumulators.insert(
                r.randint(0, len(accumulators)),
                Accumulator(out, arg, kind, self.carried[out], shift),
            )
            return out

        known = self.plain and r.random() < 0.6  # the products that tensor cores may compute
        x = "in0" if known else r.choice(walked)
        top = accumulate(x, "max", None)
        e = op("exp", op("sub", x, top) if r.random() < 0.6 else op("add", x, op("neg", top)))
        if r.random() < 0.7:
            accumulate(e, "sum", top)
        for w in ["in1"] if known else r.sample(walked, min(len(walked), r.randint(0, 2))):
            accumulate(op("mul", *((e, w) if r.random() < 0.5 else (w, e))), "sum", top)
        if not any(a.shift for a in accumulators):
            accumulate(e, "sum", top)
        return body

    def _product(
        self,
        local: list[str],
        body: list[BlockOp],
        accumulators: list[Accumulator],
        loop: str | None,
    ) -> None:
        """Add a sum of products that nothing else reads, so that tensor cores can compute it."""
        r = self.r
        pairs = [
            (a, b, over)
            for a in local
            for b in local
            if a != b
            for over in (*self.tile, loop)
            if over in self.carried[a]
            and over in self.carried[b]
            and set(self.carried[a]) != set(self.carried[b])
        ]
        if not pairs:
            return
        a, b, over = (
            ("in0", "in1", "k") if self.plain and loop and r.random() < 0.7 else r.choice(pairs)
        )
        product, out = self.fresh(), self.fresh("dot")
        self.carried[product] = self.sorted({*self.carried[a], *self.carried[b]})
        self.carried[out] = self.reduced(self.carried[product], over)
        body.append(BlockOp(product, "mul", (a, b), self.carried[product]))
        if over == loop:
            accumulators.append(Accumulator(out, product, "sum", self.carried[out]))
        else:
            body.append(BlockOp(out, "sum", (product,), self.carried[out], (), over))
            local.append(out)

    def _op(self, local: list[str]) -> BlockOp:
        r = self.r
        tiled = [v for v in local if set(self.carried[v]) & set(self.tile)]
        out = self.fresh()
        if tiled and r.random() < 0.3:
            arg = r.choice(tiled)
            over = r.choice([a for a in self.carried[arg] if a in self.tile])
            self.carried[out] = self.reduced(self.carried[arg], over)
            return BlockOp(
                out, r.choice(("sum", "sum", "max")), (arg,), self.carried[out], (), over
            )
        if r.random() < 0.3:
            arg = r.choice(local)
            fn = r.choice(UNARY)
            # ops that grow fast are only applied to small values
            fn = "tanh" if fn in ("exp", "square") and not arg.startswith("in") else fn
            self.carried[out] = self.carried[arg]
            return BlockOp(out, fn, (arg,), self.carried[out])
        a, b = r.choice(local), r.choice(local) if r.random() < 0.85 else round(r.uniform(-2, 2), 3)
        self.carried[out] = self.sorted(
            {x for v in (a, b) if isinstance(v, str) for x in self.carried[v]}
        )
        return BlockOp(out, r.choice(BINARY), (a, b), self.carried[out])

    def _finish(self, usable: list[str], outputs: list[BlockOutput]) -> Stage:
        """Add up values until one carries every grid axis, and store it."""
        body: list[BlockOp] = []
        if not usable:
            if not outputs:
                raise Unsuitable
            return Stage(None, ())
        value = self.r.choice(usable)
        for v in self.r.sample(usable, len(usable)):
            if not self.storable(self.carried[value]) and not set(self.carried[v]) <= set(
                self.carried[value]
            ):
                out = self.fresh()
                self.carried[out] = self.sorted({*self.carried[value], *self.carried[v]})
                body.append(BlockOp(out, "add", (value, v), self.carried[out]))
                value = out
        if not self.storable(self.carried[value]):
            raise Unsuitable
        if not body:
            out = self.fresh()
            self.carried[out] = self.carried[value]
            body.append(BlockOp(out, "mul", (value, 0.5), self.carried[out]))
            value = out
        outputs.append(self._output(value))
        return Stage(None, tuple(body))

    def _output(self, value: str) -> BlockOutput:
        dims: list[str | None] = list(self.carried[value])
        self.r.shuffle(dims)
        if not dims or self.r.random() < 0.2:
            dims.insert(self.r.randint(0, len(dims)), None)
        return BlockOutput(value, tuple(dims), str(self.dtype).removeprefix("torch."))


class Unsuitable(Exception):
    """The random choices led to a graph that stores nothing."""


def with_eight_columns(op: KernelOp, schedule: Schedule) -> Schedule:
    """Halve a tile of 16 in the schedule so that a tensor-core product has 8 columns.

    The schedule stays as it is if no product has 16 columns.
    """
    for name, tile in schedule.tiles.items() if plan_kernel(op, schedule).layout.dots else ():
        other = replace(schedule, tiles=dict(schedule.tiles) | {name: 8})
        if (
            tile == 16
            and op.block.role(name) is Role.GRID
            and any(
                plan_kernel(op, other).layout.columns(d) == 8
                for d in plan_kernel(op, other).layout.dots.values()
            )
        ):
            return other
    return schedule


def random_cases(count: int, seed: int = 0) -> list[tuple[int, KernelGraph, Schedule]]:
    """Yield `count` graphs with schedules, numbered so that each can be made again."""
    found = []
    while len(found) < count:
        seed += 1
        try:
            graph = random_graph(seed)
            schedule = random_schedule(graph.ops[0].block, seed)
            schedule = with_eight_columns(graph.ops[0], schedule) if seed % 2 else schedule
            planned = plan_kernel(graph.ops[0], schedule)
        except (
            Unsuitable,
            errors.CodegenError,
        ):  # it stores nothing, or its tiles are larger than Triton allows
            continue
        if (
            max(map(planned.tiling.numel, planned.tiling.block.carried.values())) > 1 << 15
        ):  # slow to interpret
            continue
        found.append((seed, graph, schedule))
    return found


def random_inputs(graph: KernelGraph, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for t in graph.inputs:
        length = 1 + sum((d - 1) * s for d, s in zip(t.dims, t.strides, strict=True))
        tensors.append(
            (torch.randn(length, generator=generator) * 0.5)
            .to(t.dtype)
            .as_strided(t.dims, t.strides)
        )
    return tensors


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    finite = exact.isfinite()
    return (
        float(((y.double() - exact).abs() / (1 + exact.abs()))[finite].max())
        if bool(finite.any())
        else 0.0
    )


def main(count: int, seed: int) -> None:
    """Run random cases through Triton's interpreter and print those that are wrong.

    The executor in float64 gives the expected results. TRITON_INTERPRET=1 must be set.
    """
    wrong, with_dots, with_eight, with_parts, with_shifts, with_splits = [], 0, 0, 0, 0, 0
    for number, graph, schedule in random_cases(count, seed):
        program = triton.generate(UGraph(graph, graph), [schedule])
        with_dots += "tl.dot" in program.source
        planned = plan_kernel(graph.ops[0], schedule)
        with_eight += any(planned.layout.columns(d) == 8 for d in planned.layout.dots.values())
        block, inputs = graph.ops[0].block, random_inputs(graph, number)
        with_parts += any(a.split_axis for a in block.axes)
        with_splits += schedule.cooperating_blocks > 1
        with_shifts += any(a.shift for stage in block.stages for a in stage.accumulators)
        try:
            ours = compiler.load(program.source, program.digest).run(inputs)
        except Exception as e:  # the test shows it with the number that makes the case again
            wrong.append([number, str(schedule), f"{type(e).__name__}: {e}"[-500:]])
            continue
        rounded = inputs[0].dtype if schedule.mma and inputs[0].dtype.itemsize == 2 else None
        for y, exact, plain in zip(
            ours,
            run_block_graph(block, inputs, TorchAlgebra(torch.float64), 2),
            run_block_graph(block, inputs, TorchAlgebra(torch.float32, rounded)),
            strict=True,
        ):
            allowed = 3 * relative_error(plain, exact) + (
                4e-3 if y.dtype is torch.float16 else 1e-4
            )
            if not relative_error(y, exact) <= allowed:
                wrong.append(
                    [
                        number,
                        str(schedule),
                        f"relative error {relative_error(y, exact):.3g}, {allowed:.3g} is allowed",
                    ]
                )
    print(
        json.dumps(
            {
                "ran": count,
                "with_dots": with_dots,
                "with_eight": with_eight,
                "with_parts": with_parts,
                "with_shifts": with_shifts,
                "with_splits": with_splits,
                "wrong": wrong,
            }
        )
    )
