"""Write reductions as CUDA text: threads share a sum or maximum, then combine their results.

Each thread owns some elements of the result and a share of the reduced axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from mirage_hf.codegen.cuda_nests import Array, Nest, NestWriter
from mirage_hf.graph.block import BlockOp, Role

#: The most vectors of 16 bytes that a thread holds for the next tile of a loop. Each takes 4
#: registers.
MOST_AHEAD = 36

#: The most results of a reduction of staged values whose lanes are neighbours.
_FEW = 16

#: The C++ type of each kind of reduction.
_OPS = {"sum": "Sum", "max": "Max"}


@dataclass(frozen=True)
class Lanes:
    """How threads share a reduction.

    Attributes:
        own: Number of threads that own different elements.
        across: Number of threads that share the reduced axis.
        rounds: Number of elements that one thread owns.
        units: Number of elements in all.
        inner: True if the threads that share the reduced axis are neighbours.
        step: Elements of the reduced axis that a thread takes at a time.
    """

    own: int
    across: int
    rounds: int
    units: int
    inner: bool
    step: int

    @property
    def element(self) -> str:
        """The first element that a thread owns."""
        if self.across == 1:
            return "tid"
        if self.own == 1:
            return "0"
        return f"tid / {self.across}" if self.inner else f"tid % {self.own}"

    @property
    def shuffled(self) -> int:
        """Lanes of one warp that join their results by shuffles."""
        return min(self.across, 32 if self.inner else max(1, 32 // self.own))

    @property
    def stride(self) -> int:
        """How far these lanes are apart."""
        return 1 if self.inner else self.own

    @property
    def lane(self) -> str:
        """A thread's lane along the reduced axis."""
        if self.across == 1:
            return "0"
        if self.own == 1:
            return "tid"
        return f"tid % {self.across}" if self.inner else f"tid / {self.own}"

    def slot(self, width: int) -> str:
        """Return which of a thread's registers holds the current element."""
        if self.rounds == 1:
            return "v" if width > 1 else "0"
        return f"r * {width} + v" if width > 1 else "r"


@dataclass(frozen=True)
class Ahead:
    """Loads of a reduction that a thread does long before it needs them.

    Attributes:
        loop: The axis of the loop that the reduction is in. The loads are for its next trip. None:
            the reduction runs once.
        arg: The value that is reduced.
        nest: The nest of the reduction.
        lanes: Its lanes.
        values: The inputs that are loaded, 16 bytes at a time.
        steps: Number of steps of a thread along the reduced axis in one tile.
    """

    loop: str | None
    arg: str
    nest: Nest
    lanes: Lanes
    values: tuple[str, ...]
    steps: int

    @property
    def vectors(self) -> int:
        """Number of vectors of each input that a thread holds."""
        return self.steps * self.lanes.rounds

    @property
    def held(self) -> int:
        """Number of vectors of all inputs that a thread holds."""
        return self.vectors * len(self.values)

    @property
    def slot(self) -> str:
        """Which of these vectors is the current one."""
        terms = [f"u * {self.lanes.rounds}" if self.lanes.rounds > 1 else "u"] * (self.steps > 1)
        return " + ".join([*terms, *(["r"] if self.lanes.rounds > 1 else [])]) or "0"


class ReductionWriter(NestWriter):
    """Writes the reductions of a kernel."""

    def __init__(self, *args: Any, **options: Any):
        """Start the text of a kernel. The arguments are those of `NestWriter`."""
        super().__init__(*args, **options)
        #: Loads that are done one loop trip ahead, by the reduction that needs them.
        self.ahead: dict[str, Ahead] = {}
        #: Reductions whose last loads have been used.
        self.written: set[str] = set()

    def reduce(self, op: BlockOp) -> None:
        """Write a sum or maximum over a tile axis."""
        arg = str(op.args[0])
        with self.scope(""):
            if op.out in self.ahead:
                nest, lanes = self.ahead[op.out].nest, self.ahead[op.out].lanes
            else:
                nest, lanes = self.reduce_plan(op.out, arg, str(op.over))
            self.declare(op.out, op.fn, nest, lanes)
            self.accumulate(op.out, arg, op.fn, nest, lanes)
            self.combine([(op.out, op.fn, nest, lanes)])

    def exchange(self, op: BlockOp) -> None:
        """Write a sum or maximum among the blocks of a cluster. Every block gets the result.

        Each block reads what the others hold in their shared memory, in the order of their ranks.
        So all of them get the same bits.
        """
        part, name = str(op.args[0]), _OPS[op.fn]
        source = self.staged[part]
        carried = ", ".join(self.block.carried[op.out])
        self.put(f"// {op.out} [{carried}]: {op.fn} of {part} among the blocks of the cluster")
        if part not in self.published:
            if self.lines[-2].strip() == "__syncthreads();":  # the cluster's barrier includes it
                del self.lines[-2]
            self.put("cluster.sync();  // all of them hold their parts")
            self.published |= set(self.staged)
        array = self.keep(op.out, "float", self.block.carried[op.out])
        nest = Nest(self.block.carried[op.out], None, 1)
        with self.each(self.extent(nest.axes)):
            self.coordinates(nest, "e", clamp=False)
            self.put(f"float joined = {name}::zero();", "#pragma unroll")
            with self.scope("for (int rank = 0; rank < cluster_blocks; ++rank)"):
                element = source.at("cluster.map_shared_rank(&shared, rank)->")
                value = element if source.ctype == "float" else f"to_float({element})"
                self.put(f"joined = {name}::join(joined, {value});")
            self.put(f"{array.at()} = joined;")
        self.put("__syncthreads();")
        self.staged[op.out] = array

    def reduce_plan(self, out: str, arg: str, over: str) -> tuple[Nest, Lanes]:
        """Return how threads share a reduction: `own` · `across` of the lanes is all threads."""
        threads = self.threads
        nest = self.plan(arg, self.block.carried[arg], over, vectors=True)
        # Lanes are neighbours if memory is contiguous along the reduced axis, or for few results.
        is_few = nest.fast is None and self.extent(nest.axes) <= _FEW
        inner = nest.fast == over or is_few
        units = max(1, self.extent(nest.axes) // (1 if inner else nest.vector))
        step = nest.vector if inner else 1
        lengths = (self.tile[over], self.size[over], self.block.split_size(over))
        if nest.fast is None and all(n % 4 == 0 for n in lengths):
            step = 4  # read 4 neighbours at once
        steps = max(1, self.tile[over] // step)
        if inner:
            across = min(max(32, threads // _pow2(units)), _pow2(steps), threads)
        elif nest.fast is None:
            # Each thread owns up to 8 elements, so one read serves several.
            across = min(threads // min(threads, max(32, _pow2(units) // 8)), _pow2(steps))
        else:
            across = threads // min(threads, _pow2(units))
        own = threads // across
        return nest, Lanes(own, across, -(-units // own), units, inner, step)

    def declare(self, out: str, kind: str, nest: Nest, lanes: Lanes) -> None:
        """Declare and clear a thread's accumulators."""
        slots = lanes.rounds * (1 if lanes.inner else nest.vector) * self.extent(nest.rows)
        self.put(f"float {self.var(out)}_acc[{slots}];")
        with self.repeat("r", slots):
            self.put(f"{self.var(out)}_acc[{'r' if slots > 1 else 0}] = {_OPS[kind]}::zero();")

    @contextmanager
    def every_row(self, nest: Nest) -> Iterator[None]:
        """Write an unrolled loop over the rows of a nest, if it has any."""
        with self.repeat("q", self.extent(nest.rows)):
            if nest.rows:
                self.coordinates(Nest(nest.rows, None, 1), "q", clamp=True)
            yield

    def slot(self, nest: Nest, lanes: Lanes) -> str:
        """Return which of a thread's registers holds the current element of a reduction."""
        slot = lanes.slot(1 if lanes.inner else nest.vector)
        if not nest.rows:
            return slot
        if slot == "0":
            return "q"
        slot = f"({slot})" if " " in slot else slot
        return f"{slot} * {self.extent(nest.rows)} + q"

    def owned(self, nest: Nest, lanes: Lanes) -> str:
        """Return the element that a thread owns in round r."""
        text = lanes.element + (f" + r * {lanes.own}" if lanes.rounds > 1 else "")
        return f"min({text}, {lanes.units - 1})" if lanes.rounds * lanes.own > lanes.units else text

    def accumulate(self, out: str, arg: str, kind: str, nest: Nest, lanes: Lanes) -> None:
        """Write the loop in which each lane reduces its part."""
        over, name = str(nest.over), self.var(out)
        ahead = self.ahead.get(out)
        nest.known, nest.vectors = {}, []
        end = f"{over}_count" if self.has_partial_tile(over) else str(self.tile[over])
        self.put(f"// {out} [{', '.join(self.block.carried[out])}]: {kind} of {arg} over {over}")
        with self._steps_along(over, lanes, end, ahead):
            if lanes.step == 1:
                self.global_coordinate_over(over)
            with self.repeat("r", lanes.rounds):
                self.put(f"const int e = {self.owned(nest, lanes)};")
                self.coordinates(nest, "e", clamp=True)
                if ahead is not None:
                    self._take_ahead(out, ahead)
                self.load_vectors(nest, arg, clamp=True, loaded=ahead.values if ahead else ())
                along = over if lanes.step > 1 else str(nest.fast)
                with self.repeat("v", max(lanes.step, nest.vector)):
                    if max(lanes.step, nest.vector) > 1:
                        self.put(f"const int i_{along} = j_{along} + v;")
                        self.global_coordinate(along, "i", along != over, 1)
                    with self.every_row(nest):
                        slot = self.slot(nest, lanes)
                        value = self.ref(nest, arg)
                        self.put(
                            f"{name}_acc[{slot}] = {_OPS[kind]}::join({name}_acc[{slot}], {value});"
                        )

    @contextmanager
    def _steps_along(
        self, over: str, lanes: Lanes, end: str, ahead: Ahead | None
    ) -> Iterator[None]:
        """Write a lane's loop along the reduced axis: unrolled if its inputs were loaded ahead."""
        walker = f"{'j' if lanes.step > 1 else 'i'}_{over}"
        if ahead is None:
            stride = lanes.across * lanes.step
            start = _first(lanes)
            with self.scope(
                f"for (int {walker} = {start}; {walker} < {end}; {walker} += {stride})"
            ):
                yield
            return
        with self.scope(""), self.repeat("u", ahead.steps):
            self.put(f"const int {walker} = {_first(lanes)}{_step_of(ahead)};")
            is_whole = self.tile[over] % (lanes.across * lanes.step) == 0
            guard = self.has_partial_tile(over) or not is_whole
            with self.scope(f"if ({walker} < {end})") if guard else nullcontext():
                yield

    # -- loads one trip ahead ---------------------------------------------------------------------

    def plan_ahead(self, out: str, arg: str, over: str, loop: str | None) -> bool:
        """Load the inputs of a reduction ahead, if threads have registers for that.

        Args:
            out: The result of the reduction.
            arg: The value that is reduced.
            over: The reduced axis.
            loop: The loop that contains the reduction, if any.

        Returns:
            Whether it is done.
        """
        nest, lanes = self.reduce_plan(out, arg, over)
        if nest.vector == 1 or nest.fast is None or (lanes.inner and lanes.step == 1):
            return False
        needed = {nest.fast} | ({loop} if loop is not None else set())
        values = tuple(v for v in self.direct(arg) if needed <= {*self.block.carried[v]})
        steps = -(-self.tile[over] // (lanes.across * lanes.step))
        ahead = Ahead(loop, arg, nest, lanes, values, steps)
        if not values or self.held + ahead.held > MOST_AHEAD:
            return False
        self.ahead[out] = ahead
        return True

    @property
    def held(self) -> int:
        """Vectors that a thread holds for reductions that have not been written yet."""
        return sum(a.held for out, a in self.ahead.items() if out not in self.written)

    def first_loads(self, out: str, constant: bool) -> None:
        """Declare and load what a reduction reads in the first trip of its loop.

        Args:
            out: The result of the reduction.
            constant: Whether to load constants or other inputs.
        """
        ahead = self.ahead[out]
        values = [v for v in ahead.values if self.is_constant(v) is constant]
        if not values:
            return
        for v in values:
            self.put(f"uint4 {self._ahead_of(out, v)}[{ahead.vectors}];")
        lanes, over, loop = ahead.lanes, str(ahead.nest.over), ahead.loop
        with self.scope(""), self.repeat("u", ahead.steps):
            if loop is not None and self.begins_elsewhere(loop):
                begin = f"{loop}_begin" if self.is_split(loop) else "0"
                self.put(f"const int {loop}_0 = {begin};")
            walker = f"{'j' if lanes.step > 1 else 'i'}_{over}"
            self.put(f"const int {walker} = {_first(lanes)}{_step_of(ahead)};")
            with self.repeat("r", lanes.rounds):
                self.put(f"const int e = {self.owned(ahead.nest, lanes)};")
                self.coordinates(ahead.nest, "e", clamp=True)
                self._load_ahead(out, ahead, values)

    def _take_ahead(self, out: str, ahead: Ahead) -> None:
        """Take the current vectors of a thread, and load those of the next trip in their place."""
        for v in ahead.values:
            self.put(f"alignas(16) {self.ctype(v)} {self.var(v)}_v[{ahead.nest.vector}];")
            held = f"{self._ahead_of(out, v)}[{ahead.slot}]"
            self.put(f"*reinterpret_cast<uint4*>({self.var(v)}_v) = {held};")
        loop = ahead.loop
        if loop is None or self.trips(loop) == 1:
            return
        with self.scope(f"if ({loop}_0 + {loop}_tile < {self.end(loop)})"):
            self.put(f"const int next = {loop}_0 + {loop}_tile;")
            with self.scope(""):
                self.put(f"const int {loop}_0 = next;")
                for a in ahead.nest.axes:
                    if not (a == ahead.nest.fast and ahead.nest.vector > 1):
                        self.global_coordinate(a, "i", True, 1)
                self._load_ahead(out, ahead, ahead.values)

    def _load_ahead(self, out: str, ahead: Ahead, values: Sequence[str]) -> None:
        """Load vectors at the current coordinates. What lies beyond the end is not used."""
        nest, lanes, over = ahead.nest, ahead.lanes, str(ahead.nest.over)
        if lanes.inner:
            self._clamped_coordinate(lanes, over, f"j_{over}", nest.vector)
        else:
            self._clamped_coordinate(lanes, over, f"i_{over}", 1)
            self.global_coordinate(str(nest.fast), "j", True, nest.vector)
        for v in values:
            kind = "constant" if self.is_constant(v) else "plain"
            held = f"{self._ahead_of(out, v)}[{ahead.slot}]"
            self.put(f"{held} = load_{kind}({self.element(v)});")

    def _clamped_coordinate(self, lanes: Lanes, axis: str, local: str, width: int) -> None:
        """Define a coordinate of the reduced axis, at most that of its last vector."""
        text = f"{axis}_0 + {local}" if self.begins_elsewhere(axis) else local
        is_whole = self.tile[axis] % (lanes.across * lanes.step) == 0
        if not is_whole or self.has_partial_tile(axis):
            text = f"min({text}, {axis}_size - {width})"
        self.put(f"const int at_{axis} = {text};")

    def _ahead_of(self, out: str, value: str) -> str:
        """Return the name of the vectors that are held for a reduction."""
        return f"{self.var(out)}_{self.var(value)}_ahead"

    def is_constant(self, value: str) -> bool:
        """Return whether nothing writes an input while kernels run."""
        return all(self.operands[k].constant for k in self.inputs[value].sources)

    def global_coordinate_over(self, over: str) -> None:
        """Define the coordinate of the reduced axis in the tensor."""
        is_walked = self.block.role(over) is Role.LOOP
        base = f"{over}_0 + " if is_walked or self.is_split(over) else ""
        self.put(f"const int at_{over} = {base}i_{over};")

    def combine(self, reductions: Sequence[tuple[str, str, Nest, Lanes]]) -> None:
        """Combine the lanes' partial results, and keep the results in shared memory.

        Args:
            reductions: The result, kind, nest and lanes of each reduction.
        """
        begin, grouped = 0, []
        for out, kind, nest, lanes in reductions:
            array = self.keep(out, "float", self.block.carried[out])
            groups = lanes.across // lanes.shuffled
            place = f"{begin} + " if begin else ""
            self._join_lanes(out, kind, nest, lanes, array, place)
            if groups > 1:
                grouped.append((kind, nest, groups, array, place))
                begin += groups * self.extent(nest.axes + nest.rows)
            self.staged[out] = array
        self.partial = max(self.partial, begin)
        if reductions:
            self.put("__syncthreads();")
        for kind, nest, groups, array, place in grouped:
            self._join_groups(kind, nest, groups, array, place)
        if grouped:
            self.put("__syncthreads();")

    def _join_lanes(
        self, out: str, kind: str, nest: Nest, lanes: Lanes, array: Array, place: str
    ) -> None:
        """Join the results of neighbouring lanes by shuffles, and store what each group holds.

        A single group stores the result. Several groups store partial results.
        """
        total, width = self.extent(nest.axes + nest.rows), 1 if lanes.inner else nest.vector
        shuffled = lanes.shuffled
        groups = lanes.across // shuffled
        guards = [f"e < {lanes.units}"] if lanes.rounds * lanes.own > lanes.units else []
        if shuffled > 1:
            first = f"{lanes.lane} == 0" if groups == 1 else f"{lanes.lane} % {shuffled} == 0"
            guards.append(first)
        linear, rows = f"(e * {width} + v)" if width > 1 else "e", self.extent(nest.rows)
        linear = f"({linear} * {rows} + q)" if rows > 1 else linear
        with self.scope(""), self.repeat("r", lanes.rounds):
            in_round = f" + r * {lanes.own}" if lanes.rounds > 1 else ""
            self.put(f"const int e = {lanes.element}{in_round};")
            with self.repeat("v", width), self.repeat("q", rows):
                part = f"{self.var(out)}_acc[{self.slot(nest, lanes)}]"
                how = f"{_OPS[kind]}, {shuffled}" + f", {lanes.stride}" * (lanes.stride > 1)
                joined = f"join_lanes<{how}>({part})" if shuffled > 1 else part
                self.put(f"const float joined = {joined};")
                with self.scope(f"if ({' && '.join(guards)})") if guards else nullcontext():
                    if groups > 1:
                        group = f"{lanes.lane} / {shuffled}" if shuffled > 1 else lanes.lane
                        self.put(f"shared.partial[{place}{group} * {total} + {linear}] = joined;")
                    else:
                        self.coordinates(Nest(nest.axes + nest.rows, None, 1), linear, clamp=False)
                        self.put(f"{array.at()} = joined;")

    def _join_groups(self, kind: str, nest: Nest, groups: int, array: Array, place: str) -> None:
        """Join the partial results of all groups of lanes."""
        axes = nest.axes + nest.rows
        total = self.extent(axes)
        with self.each(total):
            self.coordinates(Nest(axes, None, 1), "e", clamp=False)
            self.put(
                f"float joined = shared.partial[{place}e];",
                "#pragma unroll",
                f"for (int g = 1; g < {groups}; ++g) "
                f"joined = {_OPS[kind]}::join(joined, shared.partial[{place}g * {total} + e]);",
                f"{array.at()} = joined;",
            )


def _first(lanes: Lanes) -> str:
    """Return where a lane begins along the reduced axis."""
    return lanes.lane + (f" * {lanes.step}" if lanes.step > 1 else "")


def _step_of(ahead: Ahead) -> str:
    """Return how far the current step of a lane is from its first one, as a summand."""
    return f" + u * {ahead.lanes.across * ahead.lanes.step}" if ahead.steps > 1 else ""


def _pow2(n: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, n - 1).bit_length()
