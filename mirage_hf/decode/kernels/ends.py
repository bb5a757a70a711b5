"""The two ends of a decoding step that are written by hand: from token ids to the first layer's inputs, and from logits to the next token.

The first is one launch (`begin`), and so is the second where the greatest logit is chosen (`select`); where keys lie in rings, one more
turns these (`turn`). Other choices (decode/selection.py) are torch ops that end with `draw`, for samples, and `settle`, which moves the
state on. The sizes are written into the text of each kernel, as in generated ones, so that it is loaded, compiled and launched as those
are. On a CPU torch does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from textwrap import indent

import torch
from torch import Tensor

from mirage_hf import errors
from mirage_hf.codegen.schedule import next_power_of_two
from mirage_hf.codegen.triton import POINTERS, GeneratedProgram, Launch
from mirage_hf.decode.cache import MOST_EOS, CacheBlock, Control, Ring
from mirage_hf.decode.kernels.written import INFINITY, as_program, launch, loading, order
from mirage_hf.decode.program import NOTHING, Chooser, choose_greedily, draw, settle

MOST_ROWS = 128
"""Rows of a batch: the last block of `select` holds the state of all of them at once."""
MOST_VOCAB = 1 << 20
MANY_PARTS, MOST_PARTS = 512, 4096
"""Candidates that the last block of `select` likes to compare, and can. H200: of 600 to 1000 blocks launches took 1 to 2 µs longer."""
LEAST_CHUNK = 1024
"""Numbers a block takes: 16 bytes a thread of 16-bit ones. `select` takes twice that, which was 0.5 µs faster behind a head."""
LONG_CHUNK = 8192
"""Of `select`, where blocks are as long as they may be for many of them to pay."""

assert MOST_EOS & MOST_EOS - 1 == 0, "the kernel reads all stop tokens as one tile"


# -- from token ids to the first layer's inputs -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the layers of a step read besides weights and keys, at fixed addresses so that a captured graph finds it."""

    x: Tensor
    """(batch, hidden): embedding rows, scaled where the model scales them."""
    cos: Tensor
    """(tables, batch, width): the rotary tables' rows at the rows' positions; `sin` likewise."""
    sin: Tensor
    slot: Tensor
    """(batch,) int32: the slot that the new key goes to in caches that are no rings, the same for every row."""
    end: Tensor
    """(batch,) int32: the slot after it."""
    windows: tuple[int | Ring | None, ...]
    """The most keys that a kind of layer may see, the new one included, or the ring that these lie in; None for all."""
    lows: tuple[Tensor, ...]
    """For each window (batch,) int32: a row sees the slots from there to the new key's. 0 for rings."""
    slots: tuple[Tensor, ...]
    """For each window the new key's slot: `slot`, or of a ring a tensor of its own; `ends` likewise."""
    ends: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls,
        batch: int,
        hidden: int,
        width: int,
        windows: Sequence[int | Ring | None],
        dtype: torch.dtype,
        device: torch.device,
        table_dtype: torch.dtype | None = None,
        tables: int = 1,
    ) -> Inputs:
        """Zeros for these sizes; `width` is the number of columns of the rotary tables, `table_dtype` theirs where it is another."""
        with torch.inference_mode(
            False
        ):  # a buffer made under inference_mode would raise in the next call outside it
            x = torch.zeros(batch, hidden, dtype=dtype, device=device)
            cos, sin = (
                torch.zeros(tables, batch, width, dtype=table_dtype or dtype, device=device)
                for _ in range(2)
            )
            slot, end, *lows = (
                torch.zeros(batch, dtype=torch.int32, device=device) for _ in (None, None, *windows)
            )
            slots, ends = (
                tuple(torch.zeros_like(each) if isinstance(w, Ring) else each for w in windows)
                for each in (slot, end)
            )
        return cls(x, cos, sin, slot, end, tuple(windows), tuple(lows), slots, ends)

    def bounds(self) -> list[Tensor]:
        """What `begin` writes for each window."""
        return [
            t
            for w, lo, slot, end in zip(self.windows, self.lows, self.slots, self.ends, strict=True)
            for t in ((slot, end) if isinstance(w, Ring) else (lo,))
        ]


def begin_program(
    batch: int,
    vocab: int,
    hidden: int,
    tables: tuple[int, int, int],
    windows: Sequence[int | Ring | None],
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    scale: float = 1.0,
) -> GeneratedProgram:
    """The kernel that fills `Inputs`, for an embedding (vocab, hidden) and rotary tables (tables, positions, width)."""
    count, positions, width = tables
    chunk = min(LEAST_CHUNK, next_power_of_two(hidden))
    chunks = -(-hidden // chunk)
    bounds: dict[str, str] = {}
    for i, window in enumerate(windows):
        if isinstance(window, Ring):
            bounds[f"slot{i}_ptr"] = slot = (
                f"tl.where(live, tl.minimum(length - lowest, {window.spare}), {window.spare})"
            )
            bounds[f"end{i}_ptr"] = f"({slot} + 1)"
        else:
            bounds[f"lo{i}_ptr"] = (
                "lowest" if window is None else f"tl.maximum(lowest, length - {window - 1})"
            )
    turns = any(isinstance(window, Ring) for window in windows)
    stores = "".join(
        f"\n        tl.store({name} + row, {value}.to(tl.int32))" for name, value in bounds.items()
    )
    if turns:
        stores = (
            f"\n{indent(LIVE.format(batch=batch, rows=next_power_of_two(batch)), ' ' * 8)}{stores}"
        )
    x, table = POINTERS[dtype], POINTERS[table_dtype]
    row_of = f"tl.load(embedding_ptr + token * {hidden} + n, mask=n < {hidden})"
    scaled = (
        row_of
        if scale == 1
        else f"({row_of}.to(tl.float32) * {scale!r}).to(x_ptr.dtype.element_ty)"
    )
    wide = next_power_of_two(count * width)
    # of one table and of several: column w is that of table w // width
    from_table = (
        f"position * {width} + w"
        if count == 1
        else f"w // {width} * {positions * width} + position * {width} + w % {width}"
    )
    to_row = (
        f"row * {width} + w"
        if count == 1
        else f"w // {width} * {batch * width} + row * {width} + w % {width}"
    )
    signature = (
        ("ids_ptr", "*i64"),
        ("position_ptr", "*i64"),
        ("length_ptr", "*i64"),
        ("lowest_ptr", "*i64"),
        ("embedding_ptr", x),
        ("cos_table_ptr", table),
        ("sin_table_ptr", table),
        ("x_ptr", x),
        ("cos_ptr", table),
        ("sin_ptr", table),
        ("slot_ptr", "*i32"),
        ("end_ptr", "*i32"),
        *((name, "*i32") for name in bounds),
        *([("alive_ptr", "*u8")] * turns),
    )
    # the last block of a row does what is small, so that its loads do not queue behind those of the embedding
    kernel = f'''
@triton.jit
def begin({", ".join(name for name, _ in signature)}, overlaps: tl.constexpr):
    """Embedding rows ({x}), rotary rows ({table}) and the slots that may be seen; {chunks + 1} blocks for a row."""
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // {chunks + 1}
    part = tl.program_id(0) % {chunks + 1}
    if part < {chunks}:
        n = part * {chunk} + tl.arange(0, {chunk})
        token = tl.minimum(tl.maximum(tl.load(ids_ptr + row), 0), {vocab - 1})
        tl.store(x_ptr + row * {hidden} + n, {scaled}, mask=n < {hidden})
    else:
        position = tl.load(position_ptr + row)
        length = tl.load(length_ptr)
        lowest = tl.load(lowest_ptr + row)
        position = tl.minimum(tl.maximum(position, 0), {positions - 1})
        w = tl.arange(0, {wide})
        cos = tl.load(cos_table_ptr + {from_table}, mask=w < {count * width})
        sin = tl.load(sin_table_ptr + {from_table}, mask=w < {count * width})
        tl.store(slot_ptr + row, length.to(tl.int32))
        tl.store(end_ptr + row, length.to(tl.int32) + 1){stores}
        tl.store(cos_ptr + {to_row}, cos, mask=w < {count * width})
        tl.store(sin_ptr + {to_row}, sin, mask=w < {count * width})
'''
    return as_program(
        kernel, Launch("begin", signature, batch * (chunks + 1), num_warps=4, num_stages=1)
    )


LIVE = """
m = tl.arange(0, {rows})
live = tl.max(tl.load(alive_ptr + m, mask=m < {batch}, other=0).to(tl.int32), axis=0) != 0
""".strip()


def turn_program(
    batch: int, slabs: Sequence[tuple[Ring, tuple[int, ...], torch.dtype]]
) -> GeneratedProgram:
    """The kernel that does what `Ring.turn` does, for slabs (layers, batch, heads, slots, dim)."""
    signature = (
        ("length_ptr", "*i64"),
        ("lowest_ptr", "*i64"),
        ("alive_ptr", "*u8"),
        *((f"slab{i}_ptr", POINTERS[dtype]) for i, (_, _, dtype) in enumerate(slabs)),
    )
    blocks, parts = 0, []
    for i, (ring, (layers, _, heads, slots, dim), _) in enumerate(slabs):
        width = heads * dim
        chunk = min(LEAST_CHUNK, next_power_of_two(width))
        chunks = -(-width // chunk)
        parts.append(
            f"""
    if (part >= {blocks}) & (part < {blocks + layers * batch * chunks}):
        at = (part - {blocks}) // {chunks}
        n = (part - {blocks}) % {chunks} * {chunk} + tl.arange(0, {chunk})
        token = length - tl.load(lowest_ptr + at % {batch})
        if live & (token >= {ring.spare}):
            spare = slab{i}_ptr + at.to(tl.int64) * {width * slots} + (n // {dim} * {slots} + {ring.spare}) * {dim} + n % {dim}
            tl.store(spare + (token % {ring.spare} - {ring.spare}) * {dim}, tl.load(spare, mask=n < {width}), mask=n < {width})
""".strip("\n")
        )
        blocks += layers * batch * chunks
    kernel = f'''
@triton.jit
def turn({", ".join(name for name, _ in signature)}, overlaps: tl.constexpr):
    """The newest keys and values of {batch} rows, from the spare slots of rings to those of the oldest ones."""
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    length = tl.load(length_ptr)
{indent(LIVE.format(batch=batch, rows=next_power_of_two(batch)), " " * 4)}
{chr(10).join(parts)}
'''
    return as_program(kernel, Launch("turn", signature, blocks, num_warps=4, num_stages=1))


# -- from logits to the next token --------------------------------------------------------------------------------------


def _chunk(batch: int, vocab: int) -> int:
    """Logits of a row that a block compares: as few as the number of blocks allows."""
    chunk = 2 * LEAST_CHUNK
    while next_power_of_two(batch) * next_power_of_two(-(-vocab // chunk)) > (
        MANY_PARTS if chunk < LONG_CHUNK else MOST_PARTS
    ):
        chunk *= 2
    return chunk


STATE = (
    """
m = tl.arange(0, {rows})
alive = tl.load(alive_ptr + m, mask=m < {batch}, other=0) != 0
position = tl.load(position_ptr + m, mask=m < {batch}, other=0)
eos = tl.load(eos_ptr + tl.arange(0, %d))
length = tl.load(length_ptr)
budget = tl.load(budget_ptr)
""".strip()
    % MOST_EOS
)
"""What is read of a control before anything is written."""

MOVE_ON = """
live = tl.max(alive.to(tl.int32), axis=0)
left = budget - live
stops = tl.max((token[:, None] == eos[None, :]).to(tl.int32), axis=1)
goes_on = alive & (stops == 0) & (left > 0){more}
moves = live != 0  # a step that finds no row alive leaves the rest as it is
tl.store(length_ptr, length + live, mask=moves)
tl.store(budget_ptr, left, mask=moves)
tl.store(position_ptr + m, position + live, mask=(m < {batch}) & moves)
tl.store(ids_ptr + m, {fed}, mask=(m < {batch}) & moves)
tl.store(alive_ptr + m, goes_on.to(tl.uint8), mask=m < {batch})
tl.store(report_ptr + m, token, mask=m < {batch})
tl.store(report_ptr + {batch} + m, goes_on.to(tl.int64), mask=m < {batch})
""".strip()
"""What `program.settle` does with `token`, in one block."""


def select_program(batch: int, vocab: int, dtype: torch.dtype) -> GeneratedProgram:
    """The kernel that does what `choose_greedily` does; its blocks leave the counter at 0, as they want to find it."""
    chunk = _chunk(batch, vocab)
    chunks = -(-vocab // chunk)
    rows, parts = next_power_of_two(batch), next_power_of_two(chunks)
    signature = (
        ("logits_ptr", POINTERS[dtype]),
        ("ids_ptr", "*i64"),
        ("position_ptr", "*i64"),
        ("length_ptr", "*i64"),
        ("budget_ptr", "*i64"),
        ("alive_ptr", "*u8"),
        ("eos_ptr", "*i64"),
        ("pad_ptr", "*i64"),
        ("report_ptr", "*i64"),
        ("best_ptr", "*i64"),
        ("counter_ptr", "*i32"),
    )
    kernel = f'''
@triton.jit
def select({", ".join(name for name, _ in signature)}, overlaps: tl.constexpr):
    """The greatest of {vocab} logits ({POINTERS[dtype]}) of each of {batch} rows, then the state; {chunks} blocks for a row."""
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // {chunks}
    n = tl.program_id(0) % {chunks} * {chunk} + tl.arange(0, {chunk})
    x = tl.load(logits_ptr + row * {vocab} + n, mask=n < {vocab}, other=-float("inf"))

    # the state, in every block although one will use it: here its latency is hidden, and no block writes before all have read
{indent(STATE.format(batch=batch, rows=rows), " " * 4)}
    pad = tl.load(pad_ptr)

{indent(order(dtype), " " * 4)}
    # the greatest logit, and of equal ones the lowest index
    tl.store(best_ptr + tl.program_id(0), tl.max((order.to(tl.int64) << 32) + (0x7FFFFFFF - n), axis=0))
    tl.debug_barrier()  # stored before one thread says so
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == {batch * chunks - 1}:
        tl.store(counter_ptr, 0)  # for the next launch
        c = tl.arange(0, {parts})
        inside = (m < {batch})[:, None] & (c < {chunks})[None, :]
        each = tl.load(best_ptr + m[:, None] * {chunks} + c[None, :], mask=inside, other=-(1 << 63), cache_modifier=".cg")
        index = 0x7FFFFFFF - (tl.max(each, axis=1) & 0x7FFFFFFF)
        token = tl.where(alive, index, pad)
{indent(MOVE_ON.format(batch=batch, fed="token", more=""), " " * 8)}
'''
    return as_program(
        kernel, Launch("select", signature, batch * chunks, num_warps=8, num_stages=1)
    )


def draw_program(batch: int, vocab: int) -> GeneratedProgram:
    """The kernel that does what `program.draw` does with the softmax of float32 scores; its blocks leave the counters at 0.

    Sums are taken in float64 and in a fixed order, so the same scores and numbers give the same tokens.
    """
    chunks = -(-vocab // LEAST_CHUNK)
    parts = next_power_of_two(chunks)
    signature = (
        ("scores_ptr", "*fp32"),
        ("numbers_ptr", "*fp64"),
        ("greatest_ptr", "*fp32"),
        ("weight_ptr", "*fp64"),
        ("token_ptr", "*i64"),
        ("arrived_ptr", "*i32"),
    )
    kernel = f'''
@triton.jit
def draw({", ".join(name for name, _ in signature)}, overlaps: tl.constexpr):
    """For each of {batch} rows the token at which the sum of softmax of {vocab} scores exceeds its number; {chunks} blocks for a row."""
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // {chunks}
    at = tl.arange(0, {LEAST_CHUNK})
    n = tl.program_id(0) % {chunks} * {LEAST_CHUNK} + at
    x = tl.load(scores_ptr + row * {vocab} + n, mask=n < {vocab}, other=-float("inf"))
    number = tl.load(numbers_ptr + row)
    greatest = tl.max(x, axis=0)
    shift = tl.where(greatest == -float("inf"), 0.0, greatest)  # -inf minus itself would be NaN
    tl.store(greatest_ptr + tl.program_id(0), greatest)
    tl.store(weight_ptr + tl.program_id(0), tl.sum(tl.exp(x - shift).to(tl.float64), axis=0))
    tl.debug_barrier()  # stored before one thread says so
    arrived = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu")
    if arrived == {chunks - 1}:
        tl.store(arrived_ptr + row, 0)  # for the next launch
        c = tl.arange(0, {parts})
        tops = tl.load(greatest_ptr + row * {chunks} + c, mask=c < {chunks}, other=-float("inf"), cache_modifier=".cg")
        weights = tl.load(weight_ptr + row * {chunks} + c, mask=c < {chunks}, other=0.0, cache_modifier=".cg")
        top = tl.max(tops, axis=0)
        top = tl.where(top == -float("inf"), 0.0, top)
        shares = weights * tl.exp(tops - top).to(tl.float64)
        total = tl.sum(shares, axis=0)
        sums = tl.cumsum(shares, axis=0)
        part = tl.min(tl.where((sums > number * total) & (shares > 0), c, {parts}), axis=0)
        one = c == part
        before = tl.sum(tl.where(one, sums - shares, 0.0), axis=0)
        shift = tl.max(tl.where(one, tops, -float("inf")), axis=0)
        n = part * {LEAST_CHUNK} + at
        y = tl.load(scores_ptr + row * {vocab} + n, mask=n < {vocab}, other=-float("inf"))
        y = tl.where(n < {vocab}, tl.exp(y - shift), 0.0).to(tl.float64)
        rest = (number * total - before) / tl.exp(shift - top).to(tl.float64)
        first = tl.min(tl.where((tl.cumsum(y, axis=0) > rest) & (y > 0), n, {vocab}), axis=0)
        last = tl.max(tl.where(y > 0, n, -1), axis=0)  # where rounding puts the number beyond its part
        token = tl.where(first < {vocab}, first, last).to(tl.int64)
        tl.store(token_ptr + row, tl.where(total > 0, token, {NOTHING}))
'''
    return as_program(kernel, Launch("draw", signature, batch * chunks, num_warps=4, num_stages=1))


def settle_program(batch: int) -> GeneratedProgram:
    """The kernel that does what `program.settle` does, and feeds token 0 where none was drawn."""
    signature = (
        ("token_ptr", "*i64"),
        ("ended_ptr", "*u8"),
        ("ids_ptr", "*i64"),
        ("position_ptr", "*i64"),
        ("length_ptr", "*i64"),
        ("budget_ptr", "*i64"),
        ("alive_ptr", "*u8"),
        ("eos_ptr", "*i64"),
        ("report_ptr", "*i64"),
    )
    kernel = f'''
@triton.jit
def settle({", ".join(name for name, _ in signature)}, overlaps: tl.constexpr):
    """The state of {batch} rows after their tokens."""
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
{indent(STATE.format(batch=batch, rows=next_power_of_two(batch)), " " * 4)}
    token = tl.load(token_ptr + m, mask=m < {batch}, other=0)
    ended = tl.load(ended_ptr + m, mask=m < {batch}, other=0)
    tl.debug_barrier()  # all of the state is read before any of it is written
{indent(MOVE_ON.format(batch=batch, fed=f"tl.where(token == {NOTHING}, 0, token)", more=" & (ended == 0)"), " " * 4)}
'''
    return as_program(kernel, Launch("settle", signature, 1, num_warps=4, num_stages=1))


# -- both ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ends:
    """Both ends of the steps of one call, with scratch memory of its own: what uses one `Ends` must run one after the other.

    The first launch for given sizes compiles and must not be captured; `graphs.capture` warms up.
    """

    batch: int
    vocab: int
    """Columns of the logits."""
    by_kernels: bool
    best: Tensor
    """(batch · blocks of a row,) int64: what the blocks of `select` found, the logit in the upper half, the index in the lower."""
    counter: Tensor
    """(1,) int32: blocks of `select` that are done; 0 between launches."""
    greatest: Tensor
    """(batch · blocks of a row,) float32: what the blocks of `draw` found; `weight`, float64, likewise."""
    weight: Tensor
    arrived: Tensor
    """(batch,) int32: blocks of `draw` that are done with a row; 0 between launches."""
    token: Tensor
    """(batch,) int64: what `draw` chose."""
    none: Tensor
    """(batch,) bool: False."""

    @classmethod
    def allocate(
        cls, batch: int, vocab: int, device: torch.device, by_kernels: bool | None = None
    ) -> Ends:
        """Memory for (batch, vocab) logits.

        by_kernels: launch Triton kernels, else torch; by itself, kernels on CUDA. With True, Triton's interpreter takes CPU tensors.
        Errors: InputError for more than MOST_ROWS rows or MOST_VOCAB tokens, unless by_kernels is False.
        """
        fits = 0 < batch <= MOST_ROWS and 0 < vocab <= MOST_VOCAB
        if not fits and by_kernels is not False:
            raise errors.InputError(
                f"decode: logits {errors.shape((batch, vocab))}; the step's kernels take 1 to {MOST_ROWS} rows "
                f"and 1 to {MOST_VOCAB} tokens, use choose_greedily"
            )
        with torch.inference_mode(False):
            best = torch.zeros(
                batch * -(-vocab // _chunk(batch, vocab)) if fits else 0,
                dtype=torch.long,
                device=device,
            )
            counter, arrived = (
                torch.zeros(n, dtype=torch.int32, device=device) for n in (1, batch)
            )
            parts = batch * -(-vocab // LEAST_CHUNK)
            greatest, weight = (
                torch.zeros(parts, dtype=d, device=device) for d in (torch.float32, torch.float64)
            )
            token, none = (
                torch.zeros(batch, dtype=d, device=device) for d in (torch.long, torch.bool)
            )
        return cls(
            batch,
            vocab,
            device.type == "cuda" if by_kernels is None else by_kernels,
            best,
            counter,
            greatest,
            weight,
            arrived,
            token,
            none,
        )

    def begin(
        self,
        control: Control,
        embedding: Tensor,
        cos: Tensor,
        sin: Tensor,
        out: Inputs,
        scale: float = 1.0,
    ) -> None:
        """Fill `out` for the token in `control.ids`, in one launch.

        embedding: (vocabulary, hidden), whose rows are multiplied by `scale` in float32; cos, sin: rotary tables (tables, positions,
        width); contiguous, in `out`'s dtypes. An id or a position outside its table takes the table's nearest row: rows that have ended
        may be fed any pad token.
        Errors: InputError for tensors that do not fit.
        """
        if (
            embedding.dtype not in INFINITY
            or cos.dtype not in INFINITY
            or len(out.lows) != len(out.windows)
        ):
            raise errors.InputError(
                f"decode: an embedding of {embedding.dtype}, rotary tables of {cos.dtype}, {len(out.lows)} lows for "
                f"{len(out.windows)} windows; give float16, bfloat16 or float32, and one tensor for each window"
            )
        if cos.dim() != 3:
            raise errors.InputError(
                f"decode: rotary tables {errors.shape(cos.shape)}; give (tables, positions, width)"
            )
        (vocab, hidden), (count, positions, width), rows = embedding.shape, cos.shape, (self.batch,)
        self._check("control.ids", control.ids, (self.batch, 1), torch.long)
        self._check("embedding", embedding, (vocab, hidden), embedding.dtype)
        self._check("out.x", out.x, (self.batch, hidden), embedding.dtype)
        for name, table, row in (("cos", cos, out.cos), ("sin", sin, out.sin)):
            self._check(name, table, (count, positions, width), cos.dtype)
            self._check(f"out.{name}", row, (count, self.batch, width), cos.dtype)
        several = (("lows", out.lows), ("slots", out.slots), ("ends", out.ends))
        for name, each in (
            ("slot", out.slot),
            ("end", out.end),
            *((f"{name}[{n}]", t) for name, ts in several for n, t in enumerate(ts)),
        ):
            self._check(f"out.{name}", each, rows, torch.int32)
        embedding = embedding.detach()
        if self.by_kernels:
            of_state = [control.ids, control.position, control.length, control.lowest]
            alive = [control.alive.view(torch.uint8)] * any(
                isinstance(window, Ring) for window in out.windows
            )
            launch(
                _begin(
                    self.batch,
                    vocab,
                    hidden,
                    (count, positions, width),
                    out.windows,
                    embedding.dtype,
                    cos.dtype,
                    scale,
                ),
                [
                    *of_state,
                    embedding,
                    cos,
                    sin,
                    out.x,
                    out.cos,
                    out.sin,
                    out.slot,
                    out.end,
                    *out.bounds(),
                    *alive,
                ],
            )
            return
        position = control.position[:, 0].clamp(0, positions - 1)
        rows_of = embedding[control.ids[:, 0].clamp(0, vocab - 1)]
        out.x.copy_(rows_of if scale == 1 else rows_of.float() * scale)
        out.cos.copy_(cos[:, position])
        out.sin.copy_(sin[:, position])
        out.slot.copy_(control.length.expand(self.batch))
        out.end.copy_(out.slot + 1)
        for window, low, slot, end in zip(out.windows, out.lows, out.slots, out.ends, strict=True):
            lowest = control.lowest[:, 0]
            if isinstance(window, Ring):
                slot.copy_(window.slot(control)[:, 0])
                end.copy_(slot + 1)
            else:
                low.copy_(
                    lowest if window is None else torch.maximum(lowest, control.length - window + 1)
                )

    def turn(self, control: Control, slabs: Sequence[tuple[Ring, Tensor]]) -> None:
        """End a step of caches that lie in rings as `Ring.turn` does, in one launch for all; in none where there are none.

        slabs: (layers, batch, heads, slots, dim), contiguous. Errors: InputError for tensors that do not fit.
        """
        if not self.by_kernels:
            for ring, slab in slabs:
                ring.turn(slab, control)
        elif slabs:
            self._check("control.ids", control.ids, (self.batch, 1), torch.long)
            for n, (ring, slab) in enumerate(slabs):
                layers, _, heads, _, dim = slab.shape
                self._check(
                    f"slabs[{n}]", slab, (layers, self.batch, heads, ring.slots, dim), slab.dtype
                )
            launch(
                _turn(
                    self.batch, tuple((ring, tuple(slab.shape), slab.dtype) for ring, slab in slabs)
                ),
                [
                    control.length,
                    control.lowest,
                    control.alive.view(torch.uint8),
                    *(slab for _, slab in slabs),
                ],
            )

    def select(self, control: Control, logits: Tensor) -> None:
        """Choose the next token of every row and move the state on as `choose_greedily` does, in one launch.

        logits: (batch, vocab), contiguous; only read. Errors: InputError for logits or a state of other sizes.
        """
        if logits.dtype not in INFINITY:
            raise errors.InputError(
                f"decode: logits of {logits.dtype}; give float16, bfloat16 or float32"
            )
        self._check("control.ids", control.ids, (self.batch, 1), torch.long)
        self._check("logits", logits, (self.batch, self.vocab), logits.dtype)
        if self.by_kernels:
            c = control
            launch(
                _select(self.batch, self.vocab, logits.dtype),
                [
                    logits.detach(),
                    c.ids,
                    c.position,
                    c.length,
                    c.budget,
                    c.alive.view(torch.uint8),
                    c.eos,
                    c.pad,
                    c.report,
                    self.best,
                    self.counter,
                ],
            )
            return
        choose_greedily(control, logits)

    def draw(self, scores: Tensor, numbers: Tensor) -> Tensor:
        """Choose by (batch, 1) float64 numbers from the softmax of (batch, vocab) float32 scores as `program.draw` does, in one launch.

        Returns (batch,) tokens, which the next call writes over. Errors: InputError for tensors that do not fit.
        """
        self._check("scores", scores, (self.batch, self.vocab), torch.float32)
        self._check("numbers", numbers, (self.batch, 1), torch.float64)
        if self.by_kernels:
            launch(
                _draw(self.batch, self.vocab),
                [scores.detach(), numbers, self.greatest, self.weight, self.token, self.arrived],
            )
            return self.token
        return draw(scores.softmax(-1), numbers)

    def settle(self, control: Control, token: Tensor, ended: Tensor | None = None) -> None:
        """Take (batch,) tokens as chosen and move the state on as `program.settle` does, in one launch. NOTHING is reported, and 0 is fed.

        `ended` (batch,) bool: rows that end here. Errors: InputError for tensors that do not fit.
        """
        self._check("control.ids", control.ids, (self.batch, 1), torch.long)
        self._check("token", token, (self.batch,), torch.long)
        self._check("ended", self.none if ended is None else ended, (self.batch,), torch.bool)
        if self.by_kernels:
            c = control
            launch(
                _settle(self.batch),
                [
                    token,
                    (self.none if ended is None else ended).view(torch.uint8),
                    c.ids,
                    c.position,
                    c.length,
                    c.budget,
                    c.alive.view(torch.uint8),
                    c.eos,
                    c.report,
                ],
            )
            return
        settle(control, token, ended)
        control.ids.masked_fill_(control.ids == NOTHING, 0)

    def _check(self, name: str, t: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        # a kernel would read or write outside what does not fit
        if (
            tuple(t.shape) != shape
            or t.dtype != dtype
            or t.device != self.best.device
            or not t.is_contiguous()
        ):
            raise errors.InputError(
                f"decode: {name} is {t.dtype} {errors.shape(t.shape)}, strides {errors.shape(t.stride())}, on "
                f"{t.device}; it must be {dtype} {errors.shape(shape)} on {self.best.device}, contiguous"
            )


def ends_of(block: CacheBlock) -> Ends:
    """The ends of a block's steps, made when the first call has logits: kernels where there are some for them, else torch."""
    batch, vocab = block.logits.shape
    if block.ends is None or (block.ends.batch, block.ends.vocab) != (batch, vocab):
        fits = batch <= MOST_ROWS and vocab <= MOST_VOCAB and find_spec("triton") is not None
        block.ends = Ends.allocate(batch, vocab, block.device, by_kernels=None if fits else False)
    return block.ends  # type: ignore[no-any-return]


class Greedy(Chooser):
    """The greatest logit."""

    def __init__(self, ends: Ends):
        super().__init__(("greedy",))
        self.ends = ends

    def choose(self, control: Control, logits: Tensor) -> None:
        if logits.dtype in INFINITY:
            self.ends.select(control, logits)
        else:
            choose_greedily(control, logits)


# -- programs as modules ------------------------------------------------------------------------------------------------

_begin = loading(begin_program)
_turn = loading(turn_program)
_select = loading(select_program)
_draw = loading(draw_program)
_settle = loading(settle_program)
