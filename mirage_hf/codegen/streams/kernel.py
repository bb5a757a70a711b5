"""Write kernels that stream codes as CUDA C++.

A thread of one warp copies the codes and scales of a block's tiles through a ring in shared memory,
from the start of the kernel on. If words of codes are column-major, or scales have gaps, all lanes
of that warp copy. If an index chooses codes, it waits for the previous kernel first. The other
warps first compute the other factor. They store it as digits: signed bytes d₀, d₁ and d₂ with
d₀ + d₁/2⁸ + d₂/2¹⁶ times a power of two, which 256 columns share. Then they multiply codes and
digits as signed bytes on tensor cores, so these sums are exact. Codes of a table are looked up
first. If codes are floats, or if the other factor has several rows, codes and the other factor
become halves instead. At the end the warps add up their sums and store the outputs. If blocks of a
cluster share the columns, they read each other's sums, and each stores a part of the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

from mirage_hf.codegen.cuda_kernel import SHARED_MOST, CudaKernel
from mirage_hf.codegen.cuda_math import TYPES
from mirage_hf.codegen.cuda_nests import Nest
from mirage_hf.codegen.placement import PlacedOp
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.codegen.streams.copying import CopyWriter
from mirage_hf.codegen.streams.helpers import (
    COPYING_LANES_HELPERS,
    LANES_HELPERS,
    NIBBLE_HELPERS,
    POWER_HELPERS,
    POWER_OF_PAIR_HELPERS,
    ROWS_IN_WORDS_HELPERS,
    TABLE_HELPERS,
)
from mirage_hf.codegen.streams.layout import StreamLayout, stream_layout
from mirage_hf.codegen.streams.writer import COMPUTED
from mirage_hf.errors import CodegenError
from mirage_hf.graph.coded import is_exponent, is_packed
from mirage_hf.graph.printing import format_block_graph

#: If the expert that an index chooses does not exist, values are 0.
_READ_IF_ANY = (
    "template <class T> __device__ __forceinline__ float read_if_any(const T* from) {",
    "  return from ? to_float(*from) : 0.0f;",
    "}",
    "",
)


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
    return _KernelWriter(layout, op, name).kernel()


class _KernelWriter(CopyWriter):
    """Writes the text of one kernel, top to bottom."""

    def __init__(self, layout: StreamLayout, op: PlacedOp, name: str):
        super().__init__(layout, op, name)
        #: C++ names of inputs that a thread has loaded for the row that it will store.
        self.known_at_end: dict[str, str] = {}

    def kernel(self) -> CudaKernel:
        """Return the kernel."""
        self.start()
        self.hold_inputs()
        self.load_for_end()
        if self.has_spans:
            self.put("int n = 0;")
        with self.each_span():
            self.compute_factor()
            self.load_chosen_for_end()
            self.multiply()
        self.finish()
        text = "\n".join([*self.head(), *self.lines, "}", "", f"}}  // namespace {self.name}"])
        threads = self.threads + 32
        layout = self.layout
        return CudaKernel(
            text,
            layout.blocks,
            layout.shared_bytes,
            is_clustered=layout.sharers > 1,
            threads=threads,
            helpers=self.more_helpers(),
            unaligned=frozenset(
                name
                for n, (_, name) in enumerate(self.found.grouped)
                if name is not None and layout.is_spaced(n)
            ),
        )

    def more_helpers(self) -> str:
        """Return the device functions that the kernel calls and most others do not."""
        has_powers = any(is_exponent(self.found.tensor(s).dtype) for s in self.scales)
        helpers = POWER_HELPERS if has_powers and not self.has_pairs else ""
        if has_powers and self.has_pairs:
            helpers += POWER_OF_PAIR_HELPERS
        if self.found.values:
            helpers += TABLE_HELPERS
        if self.lanes_copy:
            helpers += COPYING_LANES_HELPERS
        if self.found.has_rows_in_words or self.found.row_pair is not None:
            helpers += NIBBLE_HELPERS
        if self.found.has_rows_in_words:
            helpers += ROWS_IN_WORDS_HELPERS
        if self.found.is_in_lanes:
            helpers += LANES_HELPERS
        return helpers

    # -- before the body --------------------------------------------------------------------------

    def head(self) -> list[str]:
        """Return everything before the kernel's body."""
        graph = [line.partition("  # ")[0] for line in format_block_graph(self.block).splitlines()]
        layout, found = self.layout, self.found
        # these need more registers than the compiler gives to blocks that it takes for two
        has_more_sums = layout.groups_of_unit > 1 or layout.table is not None
        needs_more = layout.batch > 1 or has_more_sums or self.has_index
        needs_more |= found.has_rows_in_words
        bounds = "threads + 32, 1" if needs_more else "threads + 32"
        shares, by_team = layout.sharers > 1, layout.row_teams > 1
        clusters = "__cluster_dims__(sharers, 1, 1) " if shares else ""
        sizes = {
            "warps": layout.warps,
            **({"team_warps": layout.team_warps} if layout.teams > 1 else {}),
            "threads": self.threads,
            "blocks": layout.blocks,
            **({"sharers": layout.sharers, "walkers": layout.walkers} if shares else {}),
            **({"row_teams": layout.row_teams, "row_warps": layout.row_warps} if by_team else {}),
            "tiles": layout.tiles,
            "stages": layout.stages,
            **({"batch": layout.batch} if layout.batch > 1 else {}),
            "columns": layout.share,
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
            *(_READ_IF_ANY if self.has_index else ()),
            "struct alignas(128) Shared {",
            *(f"  {line}" for line in self.shared()),
            "};",
            f"static_assert(sizeof(Shared) == {layout.shared_bytes});",
            "",
            f"__global__ void {clusters}__launch_bounds__({bounds}) run({self.parameters()}) {{",
        ]

    def shared(self) -> list[str]:
        """Return the members of the struct of shared memory."""
        layout = self.layout
        rows = "chunk_bytes / 4" if self.found.is_column_major else str(layout.stored_rows)
        if self.found.has_rows_in_words:  # columns of all products
            rows = f"{2 * len(self.found.products)} * chunk_bytes"
        lines = [f"alignas(128) unsigned char codes[stages][{rows} * pitch];"]
        count = len(self.found.products)
        lines += [
            f"alignas(16) unsigned char {self.kind_of(n)}_{n % count}"
            f"[{layout.scale_slots(n)}][{layout.scale_slot_bytes(n)}];"
            for n, (_, name) in enumerate(self.found.grouped)
            if name is not None
        ]
        tiles = layout.most_tiles
        lines += [
            f"alignas(16) unsigned char factor[{layout.other_bytes}];",
            f"alignas(16) float steps[{layout.num_steps}];",
            f"alignas(16) float partial[{tiles}][{self.summing_warps}]"
            f"[{self.of_batch(layout.rows)}];",
        ]
        if self.found.sums:
            of_row = self.of_batch(len(self.found.sums))
            lines.append(f"alignas(16) float sums[{of_row}][{self.row_warps}];")
        if self.has_index:
            lines.append(f"alignas(16) int chosen[{self.found.num_choices}];  // -1: none")
        if layout.groups_of_unit > 1:
            lines.append("alignas(16) unsigned zeros[4];")
        if layout.table_words:
            lines.append(f"alignas(16) unsigned table[{len(layout.table_words)}];")
        if layout.num_unit_sums:
            lines.append(f"alignas(16) float unit_sums[{layout.num_unit_sums}];")
        return [*lines, "unsigned long long full[stages], empty[stages];"]

    def parameters(self) -> str:
        """Return the kernel's parameters: a pointer for each source and each output."""
        sources = []
        for i in self.block.inputs:
            for k, s in enumerate(i.sources):
                dtype = self.operands[s].dtype
                is_bytes = i.name in self.coded or is_packed(dtype) or is_exponent(dtype)
                kind = "unsigned char" if is_bytes else TYPES[dtype]
                constant = "__restrict__ " * self.operands[s].constant
                sources.append(f"const {kind}* {constant}{self.pointer(i, k)}")
        if self.found.taken is not None:
            kind = TYPES[self.operands[self.found.taken.index].dtype]
            sources.append(f"const {kind}* index_ptr")
        outputs = [
            f"{TYPES[t.dtype]}* {self.var(o.value)}_out{n}"
            for n, (o, t) in enumerate(zip(self.block.outputs, self.outputs, strict=True))
        ]
        return ", ".join([*sources, *outputs])

    # -- outputs ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write how the warps add up their sums, and how the outputs are stored."""
        shares = self.layout.sharers > 1
        self.put(f"meet<{COMPUTED}>(threads);")
        if shares:
            self.add_own_parts()
            self.put(
                "const cg::cluster_group cluster = cg::this_cluster();",
                "cluster.sync();  // the warps that compute, of all blocks that share columns",
            )
        nest = Nest((), None, 1)
        if self.layout.batch == 1:
            self.add_sums(nest)
        nest.known |= self.known_at_end
        if self.stores_once:
            with self.scope("if (stores)"):
                self.store_row(nest)
        else:
            for name in self.read_at_end():
                self.put(self.address(self.inputs[name]))
            with self.scope(f"for (int e = tid; e < mine * {self.stored_elements}; e += threads)"):
                self.place("e")
                self.store_row(nest)
        if shares:
            self.put("cluster.sync();  // no block ends while another one reads its memory")

    @property
    def row_warps(self) -> str:
        """The text of how many warps compute a row of what codes are multiplied with."""
        return "row_warps" if self.has_row_teams else "warps"

    @property
    def stored_elements(self) -> str:
        """How many elements of a tile a block stores."""
        layout = self.layout
        if layout.sharers > 1:
            return str(layout.tile_rows * layout.batch // layout.sharers)
        return self.of_batch(layout.tile_rows)

    def add_own_parts(self) -> None:
        """Write how the threads add up what the warps of their block have of each sum.

        The first warp's part becomes the sum of all. Other blocks read no other parts, because that
        takes longer.
        """
        layout = self.layout
        of_tile = layout.rows * layout.batch
        for array, index, count, most, warps in (
            (
                "partial",
                f"[e / {of_tile}][w][e % {of_tile}]",
                f"mine * {of_tile}",
                layout.summing_warps,
                self.summing_warps,
            ),
            (
                "sums",
                "[e][w]",
                self.of_batch(len(self.found.sums)),
                layout.row_warps if self.found.sums else 1,
                self.row_warps,
            ),
        ):
            if most == 1:
                continue
            with self.scope(f"for (int e = tid; e < {count}; e += threads)"):
                self.put(
                    "float own = 0.0f;",
                    "#pragma unroll",
                    f"for (int w = 0; w < {warps}; ++w) own += shared.{array}{index};",
                    f"shared.{array}{index.replace('[w]', '[0]')} = own;",
                )

    def add_parts(self, name: str, count: str, part: str) -> None:
        """Write how a thread adds up parts of a sum: those of warps, or of blocks of a cluster.

        Args:
            name: The name of the sum.
            count: How many warps have parts.
            part: The text of the part of warp `w` in the memory of a block, an element of an array.
        """
        self.put(f"float {name} = 0.0f;", "#pragma unroll")
        if self.layout.sharers == 1:
            self.put(f"for (int w = 0; w < {count}; ++w) {name} += {part};")
            return
        part = part.replace("[w]", "[0]")
        self.put(
            "for (int rank = 0; rank < sharers; ++rank) "
            f"{name} += *cluster.map_shared_rank(&{part}, rank);"
        )

    def add_sums(self, nest: Nest) -> None:
        """Write how a thread adds up the warps' sums over columns, of row `b` of a batch."""
        for n, (out, _) in enumerate(self.found.sums):
            name = self.var(out)
            row = f"{n} * batch + b" if self.layout.batch > 1 else str(n)
            self.add_parts(name, self.row_warps, f"shared.sums[{row}][w]")
            nest.known[out] = name

    @property
    def stores_once(self) -> bool:
        """Whether each thread stores one element of each output at most."""
        layout = self.layout
        stored = layout.most_tiles * layout.tile_rows * layout.batch // layout.sharers
        return stored <= self.threads

    def read_at_end(self) -> list[str]:
        """Return the inputs that are read when outputs are stored, such as a residual."""
        read = {name for o in self.block.outputs for name in self.read_for(o.value)}
        return [i.name for i in self.block.inputs if i.name in read]

    def read_for(self, value: str) -> Iterator[str]:
        """Yield the inputs that a value is computed from besides the sums over columns."""
        if value in self.inputs:
            yield value
        elif value in self.ops and value not in self.finished:
            for a in self.ops[value].args:
                if isinstance(a, str):
                    yield from self.read_for(a)

    @property
    def finished(self) -> set[str]:
        """The sums over columns."""
        return {p.out for p in self.found.products} | {out for out, _ in self.found.sums}

    def sums_of_inputs(self) -> list[str]:
        """Return sums over pieces that nothing but inputs enters, such as those of biases."""
        plain = {*self.inputs} - self.coded - self.scales - self.offsets
        return [
            op.out
            for op in self.ops.values()
            if op.over is not None
            and op.over == self.found.piece
            and {*self.found.inputs_of(op.out)} <= plain
        ]

    def load_for_end(self) -> None:
        """Write the loads of what a thread needs at the end, if it stores one row at most."""
        if not self.stores_once:
            return
        self.put(f"const bool stores = tid < mine * {self.stored_elements};")
        self.place("tid")
        for name in self.read_at_end():
            self.put(self.address(self.inputs[name]))
            if not self.is_chosen(name):
                self.load_one(name)

    def load_one(self, name: str) -> None:
        """Write the load of the element of an input that a thread needs at the end."""
        self.put(f"const float {self.var(name)} = stores ? {self.read(name)} : 0.0f;")
        self.known_at_end[name] = self.var(name)

    def is_chosen(self, name: str) -> bool:
        """Return whether an input is chosen by an index, or has elements for several pieces."""
        i, piece = self.inputs[name], self.found.piece
        return i.taken is not None or (piece is not None and piece in i.axes)

    def load_chosen_for_end(self) -> None:
        """Write the loads of what an index chooses, and sums of it over pieces.

        The warp that copies has stored the index in shared memory.
        """
        if not self.stores_once or not self.has_index:
            return
        for name in self.read_at_end():
            if self.is_chosen(name) and self.found.piece not in self.coordinates_of(
                self.inputs[name]
            ):
                self.load_one(name)
        for value in self.sums_of_inputs():
            name = f"{self.var(value)}_ahead"
            self.put(f"float {name} = 0.0f;")
            with self.scope("if (stores)"):
                nest = Nest((), None, 1, known=dict(self.known_at_end))
                self.put(f"{name} = {self.ref(nest, value)};")
            self.known_at_end[value] = name

    def place(self, element: str) -> None:
        """Write the tile, the row and its coordinates of an element that a thread stores."""
        found, each = self.found, self.layout.tile_rows
        batch = self.layout.batch
        of_tile = f"({each} * batch)" if batch > 1 else str(each)
        tile, row = f"{element} / {of_tile}", f"{element} % {each}"
        of_row = f"{element} / {each} % batch"
        if self.layout.sharers > 1:
            count = self.stored_elements
            self.put(f"const int of_tile = share * {count} + {element} % {count};")
            tile, row, of_row = f"{element} / {count}", f"of_tile % {each}", f"of_tile / {each}"
        if batch > 1:
            self.put(f"const int b = {of_row};")
        if found.batch is not None:
            self.put(f"const int at_{found.batch} = {'b' if batch > 1 else '0'};")
        self.put(
            f"const int own_tile = {tile}, own_row = {row};",
            f"const int row = ({self.walker} + own_tile * {self.walkers}) * {each} + own_row;",
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
        each = self.layout.tile_rows
        if self.layout.batch > 1:
            self.add_sums(nest)
        for n, p in enumerate(self.found.products):
            name, at = self.var(p.out), f"own_row + {n * each}" if n else "own_row"
            if self.layout.is_in_turns:
                at = f"own_row * 2 + (is_swapped ? {1 - n} : {n})"
            if self.layout.batch > 1:
                at = f"({at}) * batch + b" if n else f"{at} * batch + b"
            self.add_parts(name, self.summing_warps, f"shared.partial[own_tile][w][{at}]")
            nest.known[p.out] = name
        for n, (o, t) in enumerate(zip(self.block.outputs, self.outputs, strict=True)):
            at = " + ".join(
                f"at_{a}" + (f" * {s}" if s != 1 else "")
                for a, s in zip(o.axes, t.strides, strict=True)
                if a
            )
            value = self.ref(nest, o.value)
            self.put(f"{self.var(o.value)}_out{n}[{at}] = from_float<{TYPES[t.dtype]}>({value});")
