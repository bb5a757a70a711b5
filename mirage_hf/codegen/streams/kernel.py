"""Write kernels that stream codes as CUDA C++.

One warp copies the codes and scales of a block's tiles through a ring in shared memory, from the
start of the kernel on. The others first compute the other factor. They store it as digits: signed
bytes d₀, d₁ and d₂ with d₀ + d₁/2⁸ + d₂/2¹⁶ times a power of two, which 256 columns share. Then
they multiply codes and digits as signed bytes on tensor cores, so these sums are exact. If codes
are floats, or if the other factor has several rows, codes and the other factor become halves
instead. At the end the warps add up their sums and store the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from mirage_hf.codegen.cuda_kernel import SHARED_MOST, CudaKernel
from mirage_hf.codegen.cuda_math import TYPES
from mirage_hf.codegen.cuda_nests import Nest, NestWriter, Operand
from mirage_hf.codegen.placement import PlacedOp
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.codegen.streams.layout import (
    DIGITS,
    SHARED_COLUMNS,
    StreamLayout,
    stream_layout,
)
from mirage_hf.codegen.streams.products import ROWS, Product
from mirage_hf.errors import CodegenError
from mirage_hf.graph.block import BlockInput
from mirage_hf.graph.printing import format_block_graph

#: Elements of the other factor that a thread computes at a time.
_VECTOR = 8

#: The most loads of 16 bytes of the other factor that a thread has under way, with up to 8 warps.
#: With more warps a thread has half of the registers.
_MOST_LOADS = 16

#: Numbers of barriers. At the first one all threads meet, once the other factor is in place.
#: At the second one the threads that compute meet, after their last products.
_FACTOR_READY, _SUMS_READY = 1, 2

#: The bits of 1.5 · 2²³. Counting from these, a sum of integers is the mantissa of a float.
_MAGIC = 0x4B400000

#: What is added to an element before its bits are taken: the magic number and 0x4040. The bits are
#: then shifted by one place, so 128 is added to each of the lower digits, and no digit is negative.
_DIGIT_OFFSET = "12599360.0f"


def write_stream_kernel(op: PlacedOp, schedule: Schedule, name: str) -> CudaKernel:
    """Return the kernel of a placed op in namespace `name`.

    Raises:
        CodegenError: The op has no kernel that streams codes, or the schedule does not fit.
    """
    layout = stream_layout(op, schedule)
    if layout.shared_bytes > SHARED_MOST:
        raise CodegenError(
            f"{name}: {schedule} needs {layout.shared_bytes} bytes of shared memory, a block has "
            f"{SHARED_MOST}; give fewer stages or smaller tiles"
        )
    return _StreamWriter(layout, op, name).kernel()


#: Names of the text, which values of the block graph may not have.
_NAMES = frozenset(
    """
    above at b b_0 batch below bits blocks chunk_bytes chunks codes columns digits exponent factor
    first g halves high_0 high_1 j lane largest left m low_0 low_1 lower lower_0 lower_1 magic mine
    own own_row own_tile piece pitch right row row_0 row_bytes scaled second size stages step stores
    sums t tiles to unit units up upper upper_0 upper_1 warp warps worth_0 worth_1 Words
    """.split()
)


class _StreamWriter(NestWriter):
    """Writes the text of one kernel, top to bottom."""

    def var(self, name: str) -> str:
        """Return a C++ name for a value."""
        name = super().var(name)
        return name + "_" if name in _NAMES or name.startswith("sum_") else name

    def __init__(self, layout: StreamLayout, op: PlacedOp, name: str):
        self.layout, self.found = layout, layout.products
        operands = [Operand(t.dtype, t.strides, constant=t.constant) for t in op.operands]
        outputs = [Operand(t.dtype, t.strides) for t in op.outputs]
        super().__init__(self.found.block, operands, outputs, {}, name, 32 * layout.warps)
        self.early = layout.schedule.trigger_early
        self.coded = {p.codes for p in self.found.products}
        self.scales = {p.scale for p in self.found.products if p.scale is not None}
        #: C++ names of inputs that a thread has loaded for the row that it will store.
        self.known_at_end: dict[str, str] = {}

    def kernel(self) -> CudaKernel:
        """Return the kernel."""
        self.start()
        self.compute_factor()
        self.multiply()
        self.finish()
        text = "\n".join([*self.head(), *self.lines, "}", "", f"}}  // namespace {self.name}"])
        threads = self.threads + 32
        layout = self.layout
        return CudaKernel(
            text, layout.blocks, layout.shared_bytes, is_clustered=False, threads=threads
        )

    # -- before the body --------------------------------------------------------------------------

    def head(self) -> list[str]:
        """Return everything before the kernel's body."""
        graph = [line.partition("  # ")[0] for line in format_block_graph(self.block).splitlines()]
        layout, found = self.layout, self.found
        # A batch needs more registers than the compiler would give, and there is one block at a time.
        bounds = "threads + 32, 1" if layout.batch > 1 else "threads + 32"
        sizes = {
            "warps": layout.warps,
            "threads": self.threads,
            "blocks": layout.blocks,
            "tiles": layout.tiles,
            "stages": layout.stages,
            **({"batch": layout.batch} if layout.batch > 1 else {}),
            "columns": found.num_columns,
            "chunks": layout.chunks,
            "row_bytes": found.row_bytes,
            "chunk_bytes": layout.chunk_bytes,
            "pitch": layout.pitch,
        }
        return [
            *(f"// {line}" for line in graph),
            f"namespace {self.name} {{",
            "",
            *(f"constexpr int {name} = {value};" for name, value in sizes.items()),
            "",
            "struct alignas(128) Shared {",
            *(f"  {line}" for line in self.shared()),
            "};",
            f"static_assert(sizeof(Shared) == {layout.shared_bytes});",
            "",
            f"__global__ void __launch_bounds__({bounds}) run({self.parameters()}) {{",
        ]

    def shared(self) -> list[str]:
        """Return the members of the struct of shared memory."""
        layout = self.layout
        slots = layout.scale_slots
        lines = [f"alignas(128) unsigned char codes[stages][{ROWS} * pitch];"]
        lines += [
            f"alignas(16) unsigned char scales_{n}[{slots}][{layout.scale_bytes(n)}];"
            for n, p in enumerate(self.found.products)
            if p.scale is not None
        ]
        tiles = layout.most_tiles
        lines += [
            f"alignas(16) unsigned char factor[{layout.other_bytes}];",
            f"alignas(16) float steps[{layout.num_steps}];",
            f"alignas(16) float partial[{tiles}][warps][{self.of_batch(ROWS)}];",
        ]
        if self.found.sums:
            lines.append(f"alignas(16) float sums[{self.of_batch(len(self.found.sums))}][warps];")
        return [*lines, "unsigned long long full[stages], empty[stages];"]

    def of_batch(self, count: int) -> str:
        """Return the text of this many for each row of the batch."""
        return f"{count} * batch" if self.layout.batch > 1 else f"{count}"

    def parameters(self) -> str:
        """Return the kernel's parameters: a pointer for each source and each output."""
        sources = []
        for i in self.block.inputs:
            for k, s in enumerate(i.sources):
                dtype = self.operands[s].dtype
                kind = "unsigned char" if i.name in self.coded else TYPES[dtype]
                constant = "__restrict__ " * self.operands[s].constant
                sources.append(f"const {kind}* {constant}{self.pointer(i, k)}")
        outputs = [
            f"{TYPES[t.dtype]}* {self.var(o.value)}_out{n}"
            for n, (o, t) in enumerate(zip(self.block.outputs, self.outputs, strict=True))
        ]
        return ", ".join([*sources, *outputs])

    # -- the warp that copies ---------------------------------------------------------------------

    def start(self) -> None:
        """Write what comes first, and the warp that copies."""
        self.put(
            "extern __shared__ __align__(128) unsigned char memory[];",
            "Shared& shared = *reinterpret_cast<Shared*>(memory);",
            "const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;",
            "// tiles of this block",
            "const int mine = (tiles - int(blockIdx.x) + blocks - 1) / blocks;",
        )
        if self.early:
            self.put("launch_next_kernel();")
        with self.scope("if (warp == warps)"):
            with self.scope("if (lane == 0)"):
                self.put("for (int s = 0; s < stages; ++s) start_barrier(&shared.full[s], 1);")
                self.put(
                    "for (int s = 0; s < stages; ++s) start_barrier(&shared.empty[s], threads);"
                )
                self.put("publish_barriers();")
            self.put("__syncwarp();", f"announce<{_FACTOR_READY}>(threads + 32);")
            self.copy_tiles()
            self.put("return;")

    def copy_tiles(self) -> None:
        """Write the loop of the warp that copies."""
        layout, each = self.layout, self.found.rows_of_each
        whole, last = layout.chunk_bytes, layout.last_chunk * self.found.bits // 8
        scales = sum(layout.scale_bytes(n) for n in range(len(self.found.products)))
        with self.scope("for (int i = 0, n = 0; i < mine; ++i)"):
            self.put(f"const long long row_0 = (int(blockIdx.x) + i * blocks) * {each};")
            with self.scope("for (int c = 0; c < chunks; ++c, ++n)"):
                self.put(
                    "const int s = n % stages;",
                    "if (n >= stages) wait_for_phase(&shared.empty[s], (n / stages - 1) & 1);",
                )
                size = "chunk_bytes"
                if last != whole:
                    self.put(f"const int size = c + 1 < chunks ? chunk_bytes : {last};")
                    size = "size"
                more = f" + (c == 0 ? {scales} : 0)" if scales else ""
                self.put(
                    f"if (lane == 0) expect_bytes(&shared.full[s], {ROWS} * {size}{more});",
                    "__syncwarp();",
                )
                with self.scope(f"if (lane < {ROWS})"):
                    self.put(f"const long long row = row_0 + lane % {each};")
                    text = self.row_of(self.found.products[-1])
                    if len(self.found.products) > 1:
                        text = f"lane < {each} ? {self.row_of(self.found.products[0])} : {text}"
                    self.put(
                        f"const unsigned char* from = {text};",
                        "copy_bytes(&shared.codes[s][lane * pitch], from + c * chunk_bytes, "
                        f"{size}, &shared.full[s]);",
                    )
                if scales:
                    with self.scope("if (c == 0)"):
                        self.copy_scales()

    def row_of(self, product: Product) -> str:
        """Return the address of a row of a product's codes."""
        i = self.inputs[product.codes]
        return self._of_source(
            i, self.found.pieces(product.codes), "row", lambda at: f" + {at} * row_bytes"
        )

    def _of_source(
        self, i: BlockInput, pieces: Sequence[int], row: str, address: Callable[[str], str]
    ) -> str:
        """Return an address in the source of an input that holds a row."""
        text, start = "", 0
        for k, count in enumerate(pieces):
            at = f"({row} - {start})" if start else row
            piece = f"{self.pointer(i, k)}{address(at)}"
            start += count
            text += piece if k == len(pieces) - 1 else f"{row} < {start} ? {piece} : "
        return f"({text})" if len(pieces) > 1 else text

    def copy_scales(self) -> None:
        """Write the copies of a tile's scales, each by another lane."""
        lane = ROWS
        for n, p in enumerate(self.found.products):
            if p.scale is None:
                continue
            i, size = self.inputs[p.scale], self.layout.scale_bytes(n)
            of_row = self.found.num_columns // self.found.group
            shared_by = 1
            if self.found.scale_rows(p) == 1:
                shared_by = self.block.axis(self.found.rows[-1]).size

            def address(at: str, shared_by: int = shared_by, of_row: int = of_row) -> str:
                index = f"{at} / {shared_by}" if shared_by > 1 else at
                return f" + {index} * {of_row}"

            text = self._of_source(i, self.found.pieces(p.codes), "row_0", address)
            self.put(
                f"if (lane == {lane}) copy_bytes(shared.scales_{n}[i % {self.layout.scale_slots}], "
                f"{text}, {size}, &shared.full[s]);"
            )
            lane += 1

    # -- the other factor -------------------------------------------------------------------------

    def compute_factor(self) -> None:
        """Write how the threads that compute bring the other factor into shared memory."""
        found, layout = self.found, self.layout
        columns = found.num_columns
        rounds = -(-columns // (_VECTOR * self.threads))
        is_partial = columns % (_VECTOR * self.threads) != 0
        names = found.read_columns
        shared = [v for v in names if self.is_constant(v) and not found.batch_stride(v)]
        own = [v for v in names if v not in shared]
        for v in shared:
            self.declare(v, rounds)
            with self.rounds("r", rounds):
                self.load(v, is_partial)
        self.put("wait_for_previous_kernel();")
        if not self.early:
            self.put("launch_next_kernel();")
        if layout.batch == 1:
            for v in own:
                self.declare(v, rounds)
                with self.rounds("r", rounds):
                    self.load(v, is_partial)
            self.load_for_end()
            self.factor_of_row(names, rounds, is_partial)
        else:
            self.load_for_end()
            at_once = self.rows_at_once(own, rounds)
            self.put("#pragma unroll")
            with self.scope(f"for (int b_0 = 0; b_0 < batch; b_0 += {at_once})"):
                for v in own:
                    self.declare(v, rounds, at_once)
                    with self.rounds("m", at_once), self.rounds("r", rounds):
                        self.load(v, is_partial, of_batch=True)
                with self.rounds("m", at_once):
                    self.put("const int b = b_0 + m;")
                    self.factor_of_row(names, rounds, is_partial, frozenset(own))
        self.put(f"meet<{_FACTOR_READY}>(threads + 32);")

    def rows_at_once(self, names: Sequence[str], rounds: int) -> int:
        """Return how many rows of the batch a thread loads before it computes."""
        loads = sum(rounds * self.width(v) for v in names)
        most = _MOST_LOADS if self.layout.warps <= 8 else _MOST_LOADS // 2
        divisors = [n for n in range(1, self.layout.batch + 1) if self.layout.batch % n == 0]
        return max((n for n in divisors if n * loads <= most), default=1)

    def factor_of_row(
        self, names: Sequence[str], rounds: int, is_partial: bool, own: frozenset[str] = frozenset()
    ) -> None:
        """Write how the warps compute a row of the other factor, and its sums.

        Args:
            names: The inputs that are read.
            rounds: How often a thread computes 8 columns.
            is_partial: Whether the last round has fewer columns.
            own: The inputs of which the row `j` is read, among those that were loaded.
        """
        is_ragged = self.found.num_columns % SHARED_COLUMNS != 0
        for n in range(len(self.found.sums)):
            self.put(f"float sum_{n} = 0.0f;")
        with self.rounds("r", rounds):
            self.put(f"const int at = (r * threads + tid) * {_VECTOR};")
            if is_partial:
                with self.scope(f"if (at - lane * {_VECTOR} < columns)"):
                    self.factor_of(names, is_ragged, own)
            else:
                self.factor_of(names, is_ragged, own)
        for n in range(len(self.found.sums)):
            row = f"{n} * batch + b" if self.layout.batch > 1 else str(n)
            self.put(
                f"sum_{n} = join_lanes<Sum, 32>(sum_{n});",
                f"if (lane == 0) shared.sums[{row}][warp] = sum_{n};",
            )

    def is_constant(self, value: str) -> bool:
        """Return whether an input does not change while kernels run."""
        return all(self.operands[s].constant for s in self.inputs[value].sources)

    def rounds(self, index: str, count: int) -> AbstractContextManager[None]:
        """Write an unrolled loop."""
        self.put("#pragma unroll")
        return self.scope(f"for (int {index} = 0; {index} < {count}; ++{index})")

    def width(self, value: str) -> int:
        """Return how many loads of 16 bytes give 8 elements of an input."""
        return 2 if self.operands[self.inputs[value].sources[0]].dtype.itemsize == 4 else 1

    def declare(self, value: str, rounds: int, rows: int = 0) -> None:
        """Declare the registers that hold a thread's elements of an input."""
        of_rows = f"[{rows}]" if rows else ""
        self.put(f"uint4 {self.var(value)}_held{of_rows}[{rounds}][{self.width(value)}];")

    def load(self, value: str, is_partial: bool, of_batch: bool = False) -> None:
        """Write the loads of 8 elements of an input, in a loop over `r`.

        If it has a row for each of the batch, the loop is inside one over `m`.
        """
        load = "load_constant" if self.is_constant(value) else "load_plain"
        pointer = self.pointer(self.inputs[value], 0)
        self.put(f"const int at = (r * threads + tid) * {_VECTOR};")
        if of_batch and (stride := self.found.batch_stride(value)):
            pointer += f" + (b_0 + m) * {stride}LL"
        for n in range(self.width(value)):
            held = f"{self.var(value)}_held{'[m]' if of_batch else ''}[r][{n}]"
            more = f" + {4 * n}" if n else ""
            text = f"{load}({pointer} + at{more})"
            if is_partial:
                text = f"at < columns ? {text} : uint4{{0, 0, 0, 0}}"
            self.put(f"{held} = {text};")

    def factor_of(self, names: Sequence[str], is_ragged: bool, own: frozenset[str]) -> None:
        """Write how a warp computes 256 columns of the other factor, and stores them."""
        for v in names:
            self.put(
                f"const auto& {self.var(v)}_v = reinterpret_cast<const {self.ctype(v)}"
                f"(&)[{_VECTOR}]>({self.var(v)}_held{'[m]' if v in own else ''}[r]);"
            )
        self.put(f"float factor[{_VECTOR}], largest = 0.0f;", "#pragma unroll")
        with self.scope(f"for (int j = 0; j < {_VECTOR}; ++j)"):
            nest = Nest((), None, 1)
            for v in names:
                self.put(f"const float {self.var(v)} = to_float({self.var(v)}_v[j]);")
                nest.known[v] = self.var(v)
            other = self.ref(nest, self.found.other)
            inside = "at < columns ? {} : 0.0f" if is_ragged else "{}"
            self.put(f"factor[j] = {inside.format(other)};")
            for n, (_, value) in enumerate(self.found.sums):
                self.put(f"sum_{n} += {inside.format(self.ref(nest, value))};")
            self.put("largest = maximum(largest, fabsf(factor[j]));")
        self.put(
            "// a power of two that makes the largest of 256 columns fill its digits",
            "const int exponent = int(largest_in_warp(__float_as_uint(largest)) >> 23);",
        )
        bits = 14 if self.layout.is_in_halves else 20
        least = 26  # so that what the digits count is no subnormal number
        self.put(
            f"const int scaled = exponent < {least} ? {least} : exponent;",
            f"const float up = __uint_as_float(unsigned({127 + bits + 127} - scaled) << 23);",
        )
        # As bytes, codes of 4 bits are in the upper half, which is times 16. Digits were shifted.
        down = bits if self.layout.is_in_halves else bits + 1 + 4 * (self.found.bits == 4)
        step = f"at / {SHARED_COLUMNS}"
        step += " * batch + b" if self.layout.batch > 1 else ""
        self.put(
            f"if (lane == 0) shared.steps[{step}] = "
            "__uint_as_float(exponent == 255 ? 0x7fc00000u : "
            f"unsigned(scaled - {down}) << 23);"
        )
        if is_ragged:
            with self.scope("if (at < columns)"):
                self.store_factor()
        else:
            self.store_factor()

    def store_factor(self) -> None:
        """Write how a thread stores its columns of the other factor."""
        if self.layout.is_in_halves:
            self.store_halves()
            return
        unit, columns = self.layout.unit, self.layout.lane_columns
        row = min(columns, 16)
        is_packed = self.found.bits == 4
        self.put("unsigned digits[3][2];", "#pragma unroll")
        with self.scope("for (int h = 0; h < 2; ++h)"):
            self.put("unsigned bits[4];", "#pragma unroll")
            which = "2 * j + h" if is_packed else "4 * h + j"
            self.put(
                f"for (int j = 0; j < 4; ++j) bits[j] = __float_as_uint(fmaf(factor[{which}], up, "
                f"{_DIGIT_OFFSET})) << 1;",
                "const unsigned low_0 = pick_bytes(bits[0], bits[1], 0x5140), "
                "low_1 = pick_bytes(bits[2], bits[3], 0x5140);",
                "const unsigned high_0 = pick_bytes(bits[0], bits[1], 0x0062), "
                "high_1 = pick_bytes(bits[2], bits[3], 0x0062);",
                "digits[0][h] = pick_bytes(high_0, high_1, 0x5410) ^ 0x80808080u;",
                "digits[1][h] = pick_bytes(low_0, low_1, 0x7632) ^ 0x80808080u;",
                "digits[2][h] = pick_bytes(low_0, low_1, 0x5410) ^ 0x80808080u;",
            )
        half = f" + at % {columns} / 16 * {4 * row * DIGITS}" if columns > 16 else ""
        self.put(
            f"unsigned char* to = shared.factor + at / {unit} * {DIGITS * unit}{half} + "
            f"at % {unit} / {columns} * {row} + at % {row};",
            "#pragma unroll",
            f"for (int d = 0; d < {DIGITS}; ++d) *reinterpret_cast<Words<2>*>(to + d * {4 * row})"
            " = Words<2>{digits[d][0], digits[d][1]};",
        )

    def store_halves(self) -> None:
        """Write how a thread stores 8 columns as halves, in the order in which codes become halves.

        For each piece of 8 columns of each lane, the rows of the batch follow each other.
        """
        unit, columns, batch = self.layout.unit, self.layout.lane_columns, self.layout.batch
        which = "j / 2 + j % 2 * 4" if self.found.bits == 4 else "j"
        piece = f" + at % {columns} / 8 * {64 * batch}" if columns > 8 else ""
        row = " + b * 64" if batch > 1 else ""
        self.put(
            "alignas(16) half halves[8];",
            "#pragma unroll",
            f"for (int j = 0; j < 8; ++j) halves[j] = from_float<half>(factor[{which}] * up);",
            f"unsigned char* to = shared.factor + at / {unit} * {2 * unit * batch}{piece}{row} + "
            f"at % {unit} / {columns} * 16;",
            "*reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(halves);",
        )

    # -- products ---------------------------------------------------------------------------------

    def multiply(self) -> None:
        """Write the loop over the block's tiles."""
        layout = self.layout
        self.put("const int g = lane / 4, t = lane % 4;")
        if layout.batch > 1:
            self.put(
                "// the row of the batch that a lane reads, and those of its two columns of sums",
                "const int own = g < batch ? g : 0, first = 2 * t < batch ? 2 * t : 0, "
                "second = 2 * t + 1 < batch ? 2 * t + 1 : 0;",
            )
        if not layout.is_in_halves:
            self.put(
                "// what the digits of the lane's two columns are worth",
                "const float worth_0 = t == 0 ? 65536.0f : t == 1 ? 1.0f : 0.0f, "
                "worth_1 = t == 0 ? 256.0f : 0.0f;",
            )
        with self.scope("for (int i = 0, n = 0; i < mine; ++i)"):
            totals = ", ".join(f"{name} = 0.0f" for name in self.totals())
            self.put(f"float {totals};  // of rows g and g + 8")
            with self.scope("for (int c = 0; c < chunks; ++c, ++n)"):
                self.put(
                    "const int s = n % stages;",
                    "wait_for_phase(&shared.full[s], (n / stages) & 1);",
                )
                units, last = layout.chunk // layout.unit, layout.last_chunk // layout.unit
                count = str(units)
                if last != units:
                    self.put(f"const int units = c + 1 < chunks ? {units} : {last};")
                    count = "units"
                self.put("#pragma unroll 4")
                with self.scope(f"for (int u = warp; u < {count}; u += warps)"):
                    self.multiply_unit(units)
                self.put("arrive(&shared.empty[s]);")
            if not layout.is_in_halves:
                self.put(
                    "upper += __shfl_xor_sync(0xffffffffu, upper, 1);",
                    "lower += __shfl_xor_sync(0xffffffffu, lower, 1);",
                )
            self.store_totals()

    def totals(self) -> list[str]:
        """Return the names of a lane's sums, for the upper and the lower half of the rows."""
        halves = ("upper", "lower")
        return [f"{h}_{n}" for h in halves for n in (0, 1)] if self.layout.batch > 1 else [*halves]

    def store_totals(self) -> None:
        """Write how a lane stores its sums of a tile."""
        if self.layout.batch == 1:
            with self.scope("if (t == 0)"):
                self.put(
                    "shared.partial[i][warp][g] = upper;",
                    "shared.partial[i][warp][g + 8] = lower;",
                )
            return
        for n in (0, 1):
            with self.scope(f"if (2 * t{f' + {n}' if n else ''} < batch)"):
                at = f"2 * t{f' + {n}' if n else ''}"
                self.put(
                    f"shared.partial[i][warp][g * batch + {at}] = upper_{n};",
                    f"shared.partial[i][warp][(g + 8) * batch + {at}] = lower_{n};",
                )

    def multiply_unit(self, units: int) -> None:
        """Write the products of a unit."""
        layout, found = self.layout, self.found
        words, columns = layout.lane_bytes // 4, layout.lane_columns
        first = f"c * {units} + u" if layout.chunks > 1 else "u"
        self.put(f"const int unit = {first};")
        self.put(
            "const unsigned char* codes = shared.codes[s] + g * pitch + "
            f"u * {4 * layout.lane_bytes} + t * {layout.lane_bytes};",
            f"const auto a = *reinterpret_cast<const Words<{words}>*>(codes);",
            f"const auto b = *reinterpret_cast<const Words<{words}>*>(codes + 8 * pitch);",
        )
        if layout.is_in_halves:
            self.half_products()
            upper, lower = ["sums[0]", "sums[1]"], ["sums[2]", "sums[3]"]
        else:
            row = min(columns, 16)
            self.put(
                f"const unsigned char* digits = shared.factor + unit * {DIGITS * layout.unit} + "
                f"(g < {DIGITS} ? g : 0) * {4 * row} + t * {row};",
                f"const auto x = *reinterpret_cast<const Words<{row // 4}>*>(digits);",
            )
            if columns > 16:
                self.put(
                    "const auto y = *reinterpret_cast<const Words<4>*>"
                    f"(digits + {4 * row * DIGITS});"
                )
            self.put(f"int sums[4] = {{{', '.join([hex(_MAGIC)] * 4)}}};")
            self.digit_products(words)
            self.put(
                "const float magic = 12582912.0f;",
                "const float above = (__int_as_float(sums[0]) - magic) * worth_0 + "
                "(__int_as_float(sums[1]) - magic) * worth_1;",
                "const float below = (__int_as_float(sums[2]) - magic) * worth_0 + "
                "(__int_as_float(sums[3]) - magic) * worth_1;",
            )
            upper, lower = ["above"], ["below"]
        steps = ["step"]
        at = f"unit * {layout.unit} / {SHARED_COLUMNS}"
        if layout.batch == 1:
            self.put(f"const float step = shared.steps[{at}];")
        else:
            steps = ["step_0", "step_1"]
            self.put(
                f"const float* steps = shared.steps + {at} * batch;",
                "const float step_0 = steps[first], step_1 = steps[second];",
            )
        per_half = len(steps)
        for half, results in enumerate((upper, lower)):
            number = half if len(found.products) > 1 else 0
            scale = self.scale_text(number, half)
            if scale and per_half > 1:
                self.put(f"const float scale_{half} = {scale};")
                scale = f"scale_{half}"
            totals = self.totals()[half * per_half : (half + 1) * per_half]
            for total, result, own_step in zip(totals, results, steps, strict=False):
                factor = f"({own_step} * {scale})" if scale else own_step
                self.put(f"{total} += {result} * {factor};")

    def half_products(self) -> None:
        """Write the products of a unit's codes and the other factor, as halves."""
        layout = self.layout
        own = "own * 64 + " if layout.batch > 1 else ""
        words = self.found.bits // 4
        convert = {4: "halves_of_4_bits", 8: "halves_of_8_bits"}[self.found.bits]
        flipped = ", 0u"
        if self.is_signed:
            flipped = ", 0x88888888u" if self.found.bits == 4 else ", 0x80808080u"
        if self.found.dtype.is_floating_point:
            convert, flipped = "halves_of_float8", ""
        self.put(
            f"const unsigned char* factor = shared.factor + unit * {2 * layout.unit * layout.batch}"
            f" + {own}t * 16;",
            "float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};",
            "#pragma unroll",
        )
        with self.scope(f"for (int piece = 0; piece < {layout.pieces}; ++piece)"):
            self.put(
                f"const auto x = *reinterpret_cast<const Words<4>*>(factor + piece * "
                f"{64 * layout.batch});"
            )
            for name, codes in (("left", "a"), ("right", "b")):
                each = [f"{codes}.w[{words} * piece{f' + {n}' if n else ''}]" for n in range(words)]
                self.put(f"const auto {name} = {convert}({', '.join(each)}{flipped});")
            for n in (0, 2):
                codes = [f"{name}.w[{n + k}]" for k in (0, 1) for name in ("left", "right")]
                self.put(f"multiply_halves(sums, {', '.join(codes)}, x.w[{n}], x.w[{n + 1}]);")

    @property
    def is_signed(self) -> bool:
        """Whether codes are signed integers."""
        return self.found.dtype in (torch.int4, torch.int8)

    def digit_products(self, words: int) -> None:
        """Write the products of a unit's codes and digits, as signed bytes."""
        if self.found.bits == 4:
            flipped = "0u" if self.is_signed else "0x80808080u"
            for j in range(words):
                x, at = ("x", 2 * j) if j < 2 else ("y", 2 * j - 4)
                codes = [
                    f"upper_codes({word}.w[{j}]{shift}, {flipped})"
                    for shift in (" << 4", "")
                    for word in "ab"
                ]
                self.put(
                    f"multiply_digits(sums, {', '.join(codes)}, {x}.w[{at}], {x}.w[{at + 1}]);"
                )
            return
        flip = "" if self.is_signed else " ^ 0x80808080u"
        for j in range(0, words, 2):
            codes = [f"{word}.w[{k}]{flip}" for k in (j, j + 1) for word in "ab"]
            self.put(f"multiply_digits(sums, {', '.join(codes)}, x.w[{j}], x.w[{j + 1}]);")

    def scale_text(self, number: int, half: int) -> str:
        """Return the scale of a unit's products in one half of the rows; empty if there is none."""
        product, found = self.found.products[number], self.found
        if product.scale is None:
            return ""
        ctype, groups = self.ctype(product.scale), found.num_columns // found.group
        row = "0"
        if found.scale_rows(product) > 1:
            row = "g" if len(found.products) > 1 or not half else "(g + 8)"
        group = f"unit * {self.layout.unit} / {found.group}"
        slot = f"shared.scales_{number}[i % {self.layout.scale_slots}]"
        at = f"{row} * {groups} + {group}" if row != "0" else group
        return f"to_float(reinterpret_cast<const {ctype}*>({slot})[{at}])"

    # -- outputs ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write how the warps add up their sums, and how the outputs are stored."""
        each = self.found.rows_of_each
        self.put(f"meet<{_SUMS_READY}>(threads);")
        nest = Nest((), None, 1)
        if self.layout.batch == 1:
            self.add_sums(nest)
        nest.known |= self.known_at_end
        if self.stores_once:
            with self.scope("if (stores)"):
                self.store_row(nest)
            return
        for name in self.read_at_end():
            self.put(self.address(self.inputs[name]))
        with self.scope(f"for (int e = tid; e < mine * {self.of_batch(each)}; e += threads)"):
            self.place("e")
            self.store_row(nest)

    def add_sums(self, nest: Nest) -> None:
        """Write how a thread adds up the warps' sums over columns, of row `b` of a batch."""
        for n, (out, _) in enumerate(self.found.sums):
            name = self.var(out)
            row = f"{n} * batch + b" if self.layout.batch > 1 else str(n)
            self.put(
                f"float {name} = 0.0f;",
                "#pragma unroll",
                f"for (int w = 0; w < warps; ++w) {name} += shared.sums[{row}][w];",
            )
            nest.known[out] = name

    @property
    def stores_once(self) -> bool:
        """Whether each thread stores one element of each output at most."""
        layout = self.layout
        return layout.most_tiles * self.found.rows_of_each * layout.batch <= self.threads

    def read_at_end(self) -> list[str]:
        """Return the inputs that are read when outputs are stored, such as a residual."""
        others = {*self.coded, *self.scales, *self.found.read_columns}
        return [i.name for i in self.block.inputs if i.name not in others]

    def load_for_end(self) -> None:
        """Write the loads of what a thread needs at the end, if it stores one row at most."""
        if not self.stores_once:
            return
        self.put(f"const bool stores = tid < mine * {self.of_batch(self.found.rows_of_each)};")
        self.place("tid")
        for name in self.read_at_end():
            self.put(
                self.address(self.inputs[name]),
                f"const float {self.var(name)} = stores ? to_float(*{self.element(name)}) : 0.0f;",
            )
            self.known_at_end[name] = self.var(name)

    def place(self, element: str) -> None:
        """Write the tile, the row and its coordinates of an element that a thread stores."""
        found, each = self.found, self.found.rows_of_each
        batch = self.layout.batch
        if batch > 1:
            self.put(f"const int b = {element} / {each} % batch;")
            if found.batch:
                self.put(f"const int at_{found.batch} = b;")
        self.put(
            f"const int own_tile = {element} / {f'({each} * batch)' if batch > 1 else each}, "
            f"own_row = {element} % {each};",
            f"const int row = (int(blockIdx.x) + own_tile * blocks) * {each} + own_row;",
        )
        inner = 1
        for a in reversed(found.rows):
            size = self.block.axis(a).size
            at = f"row / {inner}" if inner > 1 else "row"
            at += f" % {size}" if a != found.rows[0] else ""
            self.put(f"const int at_{a} = {at};")
            inner *= size

    def store_row(self, nest: Nest) -> None:
        """Write how a thread adds up the warps' sums for its row, and stores the outputs."""
        each = self.found.rows_of_each
        if self.layout.batch > 1:
            self.add_sums(nest)
        for n, p in enumerate(self.found.products):
            name, at = self.var(p.out), f"own_row + {n * each}" if n else "own_row"
            if self.layout.batch > 1:
                at = f"({at}) * batch + b" if n else f"{at} * batch + b"
            self.put(
                f"float {name} = 0.0f;",
                "#pragma unroll",
                f"for (int w = 0; w < warps; ++w) {name} += shared.partial[own_tile][w][{at}];",
            )
            nest.known[p.out] = name
        for n, (o, t) in enumerate(zip(self.block.outputs, self.outputs, strict=True)):
            at = " + ".join(
                f"at_{a}" + (f" * {s}" if s != 1 else "")
                for a, s in zip(o.axes, t.strides, strict=True)
                if a
            )
            value = self.ref(nest, o.value)
            self.put(f"{self.var(o.value)}_out{n}[{at}] = from_float<{TYPES[t.dtype]}>({value});")
