"""Write running maxima as CUDA text: maxima that the body of a loop reads while they grow.

Online softmax has them. A running maximum has three arrays in shared memory. `top` is the maximum
so far. `scale` is e^(old − new) of the last step, which sums that follow the maximum are multiplied
by. The third has the maximum's name. In the loop it holds what the body subtracts, which is 0 as
long as the maximum is −inf.
"""

from __future__ import annotations

from dataclasses import replace

from mirage_hf.codegen.cuda_nests import Array, Nest
from mirage_hf.codegen.cuda_reductions import Lanes, ReductionWriter
from mirage_hf.graph.block import Accumulator, Stage


class RunningMaximumWriter(ReductionWriter):
    """Writes the running maxima of a kernel, and sums that follow them."""

    @staticmethod
    def running_maxima(stage: Stage) -> dict[str, Accumulator]:
        """Return the maxima that the body of a stage reads, by name."""
        read = {a for op in stage.body for a in op.args}
        return {acc.out: acc for acc in stage.accumulators if acc.out in read}

    def moving(self, stage: Stage) -> set[str]:
        """Return the values of a stage that depend on a running maximum."""
        found = set(self.running_maxima(stage))
        for op in stage.body:
            if not found.isdisjoint(op.args):
                found.add(op.out)
        return found

    def _array_of(self, maximum: str, what: str) -> Array:
        """Return the array `what` of a running maximum."""
        own = self.keep(maximum, "float", self.block.carried[maximum])
        array = replace(own, name=f"{own.name}_{what}")
        return self.arrays.setdefault(f"{maximum} {what}", array)

    def top(self, maximum: str) -> Array:
        """Return the array of the maximum so far. After the loop it is the maximum."""
        return self._array_of(maximum, "top")

    def start_maximum(self, maximum: str) -> None:
        """Start a running maximum before the loop. The first trip's barriers make it visible."""
        nest = Nest(self.block.carried[maximum], None, 1)
        with self.each(self.extent(nest.axes)):
            self.coordinates(nest, "e", clamp=False)
            self.put(f"{self.top(maximum).at()} = Max::zero();")

    def grow(self, acc: Accumulator, loop: str) -> None:
        """Take the maximum of the current tile into a running maximum."""
        with self.scope(""):
            nest, lanes = self.reduce_plan(acc.out, acc.arg, loop)
            self.declare(acc.out, acc.kind, nest, lanes)
            self.accumulate(acc.out, acc.arg, acc.kind, nest, lanes)
            self.combine([(acc.out, acc.kind, nest, lanes)])
        own, top, scale = self.staged[acc.out], self.top(acc.out), self._array_of(acc.out, "scale")
        elements = Nest(self.block.carried[acc.out], None, 1)
        self.put(f"// {acc.out} grows")
        with self.each(self.extent(elements.axes)):
            self.coordinates(elements, "e", clamp=False)
            self.put(
                f"const float old = {top.at()}, grown = Max::join(old, {own.at()});",
                f"{top.at()} = grown;",
                f"{scale.at()} = old == grown ? 1.0f : expf(old - grown);",
                f"{own.at()} = grown == -INFINITY ? 0.0f : grown;",
            )
        self.put("__syncthreads();")

    def rescale(self, acc: Accumulator, nest: Nest, lanes: Lanes) -> None:
        """Multiply what a thread has summed so far by the last growth of the sum's maximum."""
        scale = self._array_of(str(acc.shift), "scale")
        width = 1 if lanes.inner else nest.vector
        self.put(f"// {acc.out} follows {acc.shift}")
        with self.scope(""), self.repeat("r", lanes.rounds):
            self.put(f"const int e = {self.owned(nest, lanes)};")
            self.coordinates(nest, "e", clamp=True)
            with self.repeat("v", width):
                if width > 1:
                    self.put(f"const int i_{nest.fast} = j_{nest.fast} + v;")
                with self.every_row(nest):
                    slot = self.slot(nest, lanes)
                    self.put(f"{self.var(acc.out)}_acc[{slot}] *= {scale.at()};")
