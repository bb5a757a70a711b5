"""The host side of a generated Triton file: `run(inputs, out)` and the check of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mirage_hf.codegen import torch_text
from mirage_hf.codegen.generated_program import Launch
from mirage_hf.codegen.placement import VIEWS, PlacedOp
from mirage_hf.codegen.torch_text import local
from mirage_hf.codegen.triton_kernel import KernelText
from mirage_hf.graph import effects
from mirage_hf.graph.bounds import bounds_of, extent
from mirage_hf.graph.coded import is_exponent, storage, stored_bytes
from mirage_hf.graph.indices import indices_of, num_choices
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops.dtypes import CODE_DTYPES

#: A tensor of at least this many bytes is deleted after its last use, such as a decoded weight.
_LARGE = 1 << 24


def run_text(
    ugraph: UGraph,
    ops: Sequence[PlacedOp],
    kernels: Sequence[KernelText],
    launches: Sequence[Launch],
) -> str:
    """Return the text of `run(inputs, out)`.

    Args:
        ugraph: The µGraph.
        ops: Its placed block graphs, in order.
        kernels: The kernel of each.
        launches: The launch of each.
    """
    return _RunWriter(ugraph).text(iter(zip(ops, kernels, launches, strict=True)))


class _RunWriter:
    """Writes `run`, op by op."""

    def __init__(self, ugraph: UGraph) -> None:
        self.graph = ugraph.kernels
        #: The first number of each output tensor.
        self.number = {t.index: n for n, t in reversed(list(enumerate(self.graph.outputs)))}
        stored = effects.stored(self.graph)
        #: The cache into which a kernel stores these rows.
        self.cache_of_rows = {n: effects.parts_of(op)[0] for n, op in stored.items()}
        #: The cache behind each result of an append that a kernel's store does.
        self.appended = {op.outputs[0].index: effects.parts_of(op)[0] for op in stored.values()}
        #: Tensors that kernels write.
        self.written: set[int] = set()
        self.read_by_kernels = _read_by_kernels(ugraph)

    def text(self, steps: Iterator[tuple[PlacedOp, KernelText, Launch]]) -> str:
        """Return the text of `run()`.

        Args:
            steps: Each kernel in order, with its text and its launch.
        """
        lines = self._begin()
        ended = _ended_after(self.graph)
        for number, op in enumerate(self.graph.ops):
            if op.name == CUSTOMIZED:
                placed, kernel, launch = next(steps)
                self.written |= {t.index for t in op.outputs}
                lines += self._launch(placed, kernel, launch)
            else:
                lines.append(self._library_call(op))
            if number in ended:
                lines.append(f"del {', '.join(map(local, ended[number]))}")
        body = "\n".join(f"    {line}" for line in [*lines, *self._end()])
        return f"def run(inputs, out=None):\n{body}"

    def _library_call(self, op: KernelOp) -> str:
        result = op.outputs[0]
        if result.index in self.appended:
            cache = local(self.appended[result.index])
            return f"{local(result)} = {cache}  # its new rows are stored"
        text = torch_text.expression(op, torch_text.operand_names(op))
        if op.name not in VIEWS and result.index in self.read_by_kernels:
            text = f"({text}).contiguous()"  # torch keeps the order of strides in some ops
        return f"{local(result)} = {text}"

    def _begin(self) -> list[str]:
        names = [local(t) for t in self.graph.inputs]
        lines = [f"{', '.join(names)}{',' if len(names) == 1 else ''} = inputs"]
        if any(op.name == CUSTOMIZED for op in self.graph.ops):
            lines += [
                f"device = {names[0]}.device",
                'if device.type == "cuda" and device.index != torch.cuda.current_device():',
                "    with torch.cuda.device(device):",
                "        return run(inputs, out)",
            ]
        return lines

    def _launch(self, op: PlacedOp, kernel: KernelText, launch: Launch) -> list[str]:
        """Return the lines that allocate or alias the outputs of a kernel and launch it."""
        tensors = [*(t for t in op.inputs if isinstance(t, DTensor)), *op.outputs]
        lines = []
        for t in op.outputs:
            if t.index in self.cache_of_rows:
                lines.append(f"{local(t)} = {local(self.cache_of_rows[t.index])}")
                continue
            dtype = "" if tensors[0].dtype == t.dtype else f", dtype={t.dtype}"
            new = f"{local(tensors[0])}.new_empty({t.dims}{dtype})"  # quicker than torch.empty
            if t.index in self.number:
                new = f"{new} if out is None else out[{self.number[t.index]}]"
            lines.append(f"{local(t)} = {new}")
        arguments = [local(tensors[at]) for _, at in kernel.arguments]
        if launch.scratch:
            arguments += [
                f"torch.empty({launch.scratch}, dtype=torch.float32, device=device)",
                f"counters({launch.counters}, device)",
            ]
        listed = ", ".join(arguments)
        if launch.cuda:
            options = (
                f"num_outputs={launch.num_outputs}, num_warps={launch.num_warps}, "
                f"shared={launch.shared}"
            )
            if launch.anywhere:
                options += f", anywhere={launch.anywhere}"
            head = f'launch_cuda("{kernel.name}", {kernel.name}, {launch.grid}, [{listed}]'
            return [*lines, f"{head}, {options})"]
        options = f"num_warps={launch.num_warps}, num_stages={launch.num_stages}"
        return [*lines, f"launch({kernel.name}, {launch.grid}, [{listed}], {options})"]

    def _end(self) -> list[str]:
        """Return the lines that return the outputs, or store them into `out`."""
        names = [local(t) for t in self.graph.outputs]
        into_out = [self._into_out(n, t) for n, t in enumerate(self.graph.outputs)]
        lines = []
        if into_out != names:
            lines += ["if out is not None:", f"    return [{', '.join(into_out)}]"]
        return [*lines, f"return [{', '.join(names)}]"]

    def _into_out(self, n: int, t: DTensor) -> str:
        """Return output `n`, copied into `out[n]` unless a kernel has written it there."""
        name = local(t)
        is_there = t.index in self.written and self.number[t.index] == n
        text = name if is_there else f"out[{n}].copy_({name})"
        return f"{name} if out[{n}] is {name} else {text}" if t.index in self.appended else text


def _ended_after(graph: KernelGraph) -> dict[int, list[DTensor]]:
    """Return the large tensors that ops make, by the number of the last op that reads them."""
    kept = {t.index for t in graph.outputs}
    made = {t.index: t for op in graph.ops for t in op.outputs if t.index not in kept}
    large = {index for index, t in made.items() if stored_bytes(t) >= _LARGE}
    last = {
        x.index: number
        for number, op in enumerate(graph.ops)
        for x in op.inputs
        if isinstance(x, DTensor) and x.index in large
    }
    ended: dict[int, list[DTensor]] = {}
    for index, number in last.items():
        ended.setdefault(number, []).append(made[index])
    return ended


def _read_by_kernels(ugraph: UGraph) -> set[int]:
    """Return the tensors that kernels read, themselves or through views."""
    read: set[int] = set()
    for op in reversed(ugraph.kernels.ops):
        if op.name == CUSTOMIZED or (op.name in VIEWS and op.outputs[0].index in read):
            read |= {x.index for x in op.inputs if isinstance(x, DTensor)}
    return read


def check_text(ugraph: UGraph) -> str:
    """Return the text of the check: random inputs, and a comparison with float64."""
    program = ugraph.program
    shapes = list(map(_shape, program.inputs))
    listed = ",\n              ".join(shapes)
    drawn = "".join(f"\n    {line}" for line in _drawn_integers(ugraph))
    return f'''def random_input(dims, strides, dtype, device):
    x = torch.empty(1 + sum((n - 1) * s for n, s in zip(dims, strides)), dtype=dtype, device=device)
    return (x.normal_() if dtype.is_floating_point else x.zero_()).as_strided(dims, strides)


def check(device):
    """Compare with the program in float64.

    The error may be 1.25 times that of the same ops in torch, plus one rounding.
    """
    shapes = [{listed}]
    torch.manual_seed(0)
    inputs = [random_input(*shape, device) for shape in shapes]{drawn}
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    for ours, eager, exact in zip(run(inputs), program(inputs), program(wide)):
        finite = exact.isfinite() & eager.isfinite()  # any other result is right
        if not finite.any():
            continue
        ours, eager, exact = (y[finite] for y in (ours, eager, exact))
        error, stock = ((y.double() - exact).abs().max().item() for y in (ours, eager))
        ulp = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0
        bound = 1.25 * stock + ulp * exact.abs().max().item()
        print(f"error {{error:.3g}}, torch {{stock:.3g}}, allowed {{bound:.3g}}")
        assert error <= bound, "the result is further from float64 than torch's"


if __name__ == "__main__":
    import os
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("no GPU here; TRITON_INTERPRET=1 runs the kernels on the CPU, slowly")
    check("cuda" if torch.cuda.is_available() else "cpu")'''


def _shape(t: DTensor) -> str:
    """Return the dims, strides and dtype in which a random input is made."""
    stored = storage(t)
    dtype = torch.float32 if _is_float_code(t) else stored.dtype
    return f"({stored.dims}, {stored.strides}, {dtype})"


def _is_float_code(t: DTensor) -> bool:
    return t.dtype in CODE_DTYPES and t.dtype.is_floating_point and not is_exponent(t.dtype)


def _drawn_integers(ugraph: UGraph) -> list[str]:
    """Return lines that draw codes, bounds, positions and indices. Some bounds are empty."""
    program, lines = ugraph.program, []
    for n, t in enumerate(program.inputs):
        if _is_float_code(t):
            lines.append(f"inputs[{n}] = inputs[{n}].to({t.dtype})")
        elif is_exponent(t.dtype):
            lines.append(f"inputs[{n}].random_(123, 130)")
        elif t.dtype in CODE_DTYPES:
            info = torch.iinfo(storage(t).dtype)
            lines.append(f"inputs[{n}].random_({info.min}, {info.max + 1})")
    for b in bounds_of(program):
        size = extent(program, b)
        lines.append(f"inputs[{b.lo}].random_(0, {size // 2 + 1})")
        lines.append(f"inputs[{b.hi}].random_(0, {size + 1})")
    for n, cache, rows in effects.positions_of(program):
        lines.append(f"inputs[{n}].random_(0, {cache.dims[-2] - rows.dims[-2] + 1})")
    for n, chosen in indices_of(program).items():
        lines.append(f"inputs[{n}].random_(0, {num_choices(chosen)})")
    return lines
