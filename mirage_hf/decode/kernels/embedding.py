"""The kernel that begins a decoding step.

It copies the embedding and rotary rows of the tokens, and computes the slots that they use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mirage_hf import errors
from mirage_hf.codegen.kernel_launch import KernelLaunch, launch
from mirage_hf.codegen.optional_triton import tl, triton
from mirage_hf.codegen.schedule import next_power_of_two
from mirage_hf.decode.control import Control
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.kernels.ring import any_alive
from mirage_hf.decode.kernels.sizes import check_tensor
from mirage_hf.decode.kernels.total_order import FLOATS
from mirage_hf.decode.rings import Ring

#: Columns of an embedding row that a block copies: 16 bytes a thread of 16-bit numbers.
MAX_BLOCK = 1024
#: Kinds of layers that the kernel writes bounds for: full and sliding attention.
MAX_KINDS = 2

Window = int | Ring | None


@triton.jit
def embedding_kernel(
    ids_ptr,
    position_ptr,
    length_ptr,
    lowest_ptr,
    ahead_ptr,
    embedding_ptr,
    cos_table_ptr,
    sin_table_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    end_ptr,
    alive_ptr,
    first_low_ptr,
    first_slot_ptr,
    first_end_ptr,
    second_low_ptr,
    second_slot_ptr,
    second_end_ptr,
    first_from_ptr,
    second_from_ptr,
    overlaps: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    VOCAB: tl.constexpr,
    HIDDEN: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    TABLES: tl.constexpr,
    POSITIONS: tl.constexpr,
    WIDTH: tl.constexpr,
    TABLES_TILE: tl.constexpr,
    KINDS: tl.constexpr,
    FIRST_WINDOW: tl.constexpr,
    FIRST_SPARE: tl.constexpr,
    SECOND_WINDOW: tl.constexpr,
    SECOND_SPARE: tl.constexpr,
):
    """Compute x = SCALE · embedding[id]; cos, sin = tables[:, position]; slot; end; bounds.

    slot = length; end = length + 1; the bounds of each kind of layer are `_store_bounds`'s.

    With AHEAD a sequence's own `ahead` is added to length and position. A row is one of TOKENS new
    tokens of a sequence, and its position is that of the first one plus its number.

    A row has BLOCKS blocks that copy its embedding row. One more block does the rest, so that its
    loads do not queue behind those of the embedding.

    References: `torch.nn.functional.embedding`; `embed` below does the same with torch.
    """
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // (BLOCKS + 1)
    part = tl.program_id(0) % (BLOCKS + 1)
    if part < BLOCKS:
        n = part * BLOCK + tl.arange(0, BLOCK)
        token = tl.minimum(tl.maximum(tl.load(ids_ptr + row), 0), VOCAB - 1)
        x = tl.load(embedding_ptr + token * HIDDEN + n, mask=n < HIDDEN)
        if SCALE != 1:
            x = (x.to(tl.float32) * SCALE).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * HIDDEN + n, x, mask=n < HIDDEN)
    else:
        sequence = row // TOKENS
        number = row % TOKENS
        position = tl.load(position_ptr + sequence) + number
        length = tl.load(length_ptr)
        lowest = tl.load(lowest_ptr + sequence)
        if AHEAD:
            ahead = tl.load(ahead_ptr + sequence)
            position += ahead
            length += ahead
        position = tl.minimum(tl.maximum(position, 0), POSITIONS - 1)
        w = tl.arange(0, TABLES_TILE)
        # column w of all tables is column w % WIDTH of table w // WIDTH
        if TABLES == 1:
            table = 0
            column = w
        else:
            table = w // WIDTH
            column = w % WIDTH
        source = table * (POSITIONS * WIDTH) + position * WIDTH + column
        cos = tl.load(cos_table_ptr + source, mask=w < TABLES * WIDTH)
        sin = tl.load(sin_table_ptr + source, mask=w < TABLES * WIDTH)
        # all tokens of a sequence store the same
        tl.store(slot_ptr + sequence, length.to(tl.int32))
        tl.store(end_ptr + sequence, length.to(tl.int32) + 1)
        if KINDS > 0:
            if TOKENS > 1:
                _store_first(first_from_ptr + row, length + number, FIRST_WINDOW)
            _store_bounds(
                first_low_ptr + sequence,
                first_slot_ptr + sequence,
                first_end_ptr + sequence,
                alive_ptr,
                length,
                lowest,
                ROWS,
                ROWS_TILE,
                FIRST_WINDOW,
                FIRST_SPARE,
            )
        if KINDS > 1:
            if TOKENS > 1:
                _store_first(second_from_ptr + row, length + number, SECOND_WINDOW)
            _store_bounds(
                second_low_ptr + sequence,
                second_slot_ptr + sequence,
                second_end_ptr + sequence,
                alive_ptr,
                length,
                lowest,
                ROWS,
                ROWS_TILE,
                SECOND_WINDOW,
                SECOND_SPARE,
            )
        target = table * (ROWS * WIDTH) + row * WIDTH + column
        tl.store(cos_ptr + target, cos, mask=w < TABLES * WIDTH)
        tl.store(sin_ptr + target, sin, mask=w < TABLES * WIDTH)


@triton.jit
def _store_first(first_ptr, slot, WINDOW: tl.constexpr):
    """Compute first = max(slot − WINDOW + 1, 0), or 0 without a window.

    References: `TokenBounds.first`.
    """
    first = slot * 0
    if WINDOW > 0:
        first = tl.maximum(slot - (WINDOW - 1), 0)
    tl.store(first_ptr, first.to(tl.int32))


@triton.jit
def _store_bounds(
    low_ptr,
    slot_ptr,
    end_ptr,
    alive_ptr,
    length,
    lowest,
    ROWS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPARE: tl.constexpr,
):
    """Compute low; or, in a ring, slot and end.

    In a ring: slot = min(length − lowest, SPARE), or SPARE if no row is alive; end = slot + 1.
    In a window of WINDOW keys: low = max(lowest, length − WINDOW + 1). Otherwise: low = lowest.

    A WINDOW or SPARE of 0 means that there is none. References: `Ring.slot`.
    """
    if SPARE > 0:
        alive = any_alive(alive_ptr, ROWS, ROWS_TILE)
        slot = tl.where(alive, tl.minimum(length - lowest, SPARE), SPARE)
        tl.store(slot_ptr, slot.to(tl.int32))
        tl.store(end_ptr, (slot + 1).to(tl.int32))
    elif WINDOW > 0:
        tl.store(low_ptr, tl.maximum(lowest, length - (WINDOW - 1)).to(tl.int32))
    else:
        tl.store(low_ptr, lowest.to(tl.int32))


@dataclass(frozen=True, eq=False)
class EmbeddingOutput:
    """The inputs of a step's layers besides weights and keys, at fixed addresses.

    Attributes:
        x: (batch · tokens, hidden): embedding rows, multiplied by the model's scale.
        cos: (tables, batch · tokens, width): rows of the rotary tables at the rows' positions.
        sin: (tables, batch · tokens, width).
        slot: (batch,) int32: the slot of the first new key in caches that are not rings.
        end: (batch,) int32: the slot after it.
        windows: For each kind of layer the number of keys that a query sees, its own included. If a
            ring holds the keys, the ring instead. None if a query sees all keys.
        lows: For each kind (batch,) int32: the first slot a row sees. Zeros for rings.
        slots: For each kind the new key's slot: `slot`, or a tensor of its own for rings.
        ends: For each kind the slot after the new key's: `end`, or a tensor of its own for rings.
        firsts: For each kind (batch, tokens) int32: the first cached slot that a token sees, if a
            sequence has several new tokens. Otherwise there are none.
    """

    x: Tensor
    cos: Tensor
    sin: Tensor
    slot: Tensor
    end: Tensor
    windows: tuple[Window, ...]
    lows: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]
    ends: tuple[Tensor, ...]
    firsts: tuple[Tensor, ...] = ()

    @property
    def tokens(self) -> int:
        """New tokens of a sequence."""
        return self.firsts[0].shape[1] if self.firsts else 1

    @classmethod
    def allocate(
        cls,
        batch: int,
        hidden: int,
        width: int,
        windows: Sequence[Window],
        dtype: torch.dtype,
        device: torch.device,
        table_dtype: torch.dtype | None = None,
        tables: int = 1,
        tokens: int = 1,
    ) -> EmbeddingOutput:
        """Return zeros of these sizes.

        `table_dtype` is the rotary tables' dtype if it is another.
        """
        rows = batch * tokens

        def rotary_rows() -> Tensor:
            return torch.zeros(tables, rows, width, dtype=table_dtype or dtype, device=device)

        def integers(*each: int) -> Tensor:
            return torch.zeros(batch, *each, dtype=torch.int32, device=device)

        # a buffer made under inference_mode would raise in the next call outside it
        with torch.inference_mode(False):
            slot, end = integers(), integers()
            in_ring = [isinstance(window, Ring) for window in windows]
            return cls(
                x=torch.zeros(rows, hidden, dtype=dtype, device=device),
                cos=rotary_rows(),
                sin=rotary_rows(),
                slot=slot,
                end=end,
                windows=tuple(windows),
                lows=tuple(integers() for _ in windows),
                slots=tuple(integers() if ring else slot for ring in in_ring),
                ends=tuple(integers() if ring else end for ring in in_ring),
                firsts=tuple(integers(tokens) for _ in windows) if tokens > 1 else (),
            )


@lru_cache(maxsize=256)
def embedding_launch(
    batch: int,
    vocab: int,
    hidden: int,
    tables: tuple[int, int, int],
    windows: tuple[Window, ...],
    scale: float = 1.0,
    tokens: int = 1,
    *,
    is_ahead: bool = False,
) -> KernelLaunch:
    """Return the launch for an embedding and rotary tables (tables, positions, width)."""
    count, positions, width = tables
    block = min(MAX_BLOCK, next_power_of_two(hidden))
    blocks = -(-hidden // block)
    of_kinds = [_window_and_spare(window) for window in windows]
    of_kinds += [(0, 0)] * (MAX_KINDS - len(of_kinds))
    constants = {
        "ROWS": batch * tokens,
        "TOKENS": tokens,
        "AHEAD": is_ahead,
        "ROWS_TILE": next_power_of_two(batch * tokens),
        "VOCAB": vocab,
        "HIDDEN": hidden,
        "SCALE": float(scale),
        "BLOCK": block,
        "BLOCKS": blocks,
        "TABLES": count,
        "POSITIONS": positions,
        "WIDTH": width,
        "TABLES_TILE": next_power_of_two(count * width),
        "KINDS": len(windows),
        "FIRST_WINDOW": of_kinds[0][0],
        "FIRST_SPARE": of_kinds[0][1],
        "SECOND_WINDOW": of_kinds[1][0],
        "SECOND_SPARE": of_kinds[1][1],
    }
    return KernelLaunch(embedding_kernel, batch * tokens * (blocks + 1), constants)


def _window_and_spare(window: Window) -> tuple[int, int]:
    if isinstance(window, Ring):
        return 0, window.spare
    return window or 0, 0


def embed(
    control: Control,
    embedding: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: EmbeddingOutput,
    scale: float = 1.0,
    *,
    by_kernel: bool,
    drafts: Drafts | None = None,
) -> None:
    """Fill `out` for the tokens in `control.ids` or in `drafts.tokens`, in one launch.

    An id or position outside its table takes the table's nearest row, because rows that have ended
    may be fed any pad token.

    Args:
        control: State of the call.
        embedding: (vocabulary, hidden), contiguous, in the dtype of `out.x`.
        cos: Rotary table (tables, positions, width), contiguous, in the dtype of `out.cos`.
        sin: Rotary table like `cos`.
        out: The tensors to fill.
        scale: Factor of the embedding rows, applied in float32.
        by_kernel: Launch the kernel, otherwise run torch.
        drafts: If there are some, the tokens to feed, and how far rows are ahead of `control`.

    Raises:
        InputError: A tensor does not fit, or there are more than MAX_KINDS windows, or rings for
            rows that are ahead.
    """
    _check_inputs(control, embedding, cos, sin, out, drafts)
    embedding = embedding.detach()
    if not by_kernel:
        _embed_by_torch(control, embedding, cos, sin, out, scale, drafts)
        return
    vocab, hidden = embedding.shape
    count, positions, width = cos.shape
    batch = control.ids.shape[0]
    what = embedding_launch(
        batch,
        vocab,
        hidden,
        (count, positions, width),
        out.windows,
        float(scale),
        out.tokens,
        is_ahead=drafts is not None,
    )
    # the kernel does not touch the tensors that stand for missing ones
    bounds = [t for kind in zip(out.lows, out.slots, out.ends, strict=True) for t in kind]
    bounds += [out.slot] * (3 * MAX_KINDS - len(bounds))
    firsts = [*out.firsts, *[out.slot] * (MAX_KINDS - len(out.firsts))]
    ids, ahead = (control.ids, control.length) if drafts is None else (drafts.tokens, drafts.ahead)
    state = [ids, control.position, control.length, control.lowest, ahead]
    outputs = [out.x, out.cos, out.sin, out.slot, out.end]
    alive = control.alive.view(torch.uint8)
    launch(what, [*state, embedding, cos, sin, *outputs, alive, *bounds, *firsts])


def _embed_by_torch(
    control: Control,
    embedding: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: EmbeddingOutput,
    scale: float,
    drafts: Drafts | None,
) -> None:
    ids, position = control.ids, control.position
    length = control.length.expand_as(out.slot)
    if drafts is not None:
        number = torch.arange(drafts.tokens.shape[1], device=cos.device)
        ids, position = drafts.tokens, position + drafts.ahead + number
        length = length + drafts.ahead[:, 0]
    position = position.flatten().clamp(0, cos.shape[1] - 1)
    rows = embedding[ids.flatten().clamp(0, len(embedding) - 1)]
    out.x.copy_(rows if scale == 1 else rows.float() * scale)
    out.cos.copy_(cos[:, position])
    out.sin.copy_(sin[:, position])
    out.slot.copy_(length)
    out.end.copy_(out.slot + 1)
    for window, first in zip(out.windows, out.firsts, strict=False):
        slots = length[:, None] + number
        first.copy_((slots - window + 1).clamp_min(0) if window else torch.zeros_like(slots))
    lowest = control.lowest[:, 0]
    for window, low, slot, end in zip(out.windows, out.lows, out.slots, out.ends, strict=True):
        if isinstance(window, Ring):
            slot.copy_(window.slot(control)[:, 0])
            end.copy_(slot + 1)
        elif window is None:
            low.copy_(lowest)
        else:
            low.copy_(torch.maximum(lowest, length - window + 1))


def _check_inputs(
    control: Control,
    embedding: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: EmbeddingOutput,
    drafts: Drafts | None,
) -> None:
    kinds, tokens = len(out.windows), out.tokens
    if embedding.dtype not in FLOATS or cos.dtype not in FLOATS:
        raise errors.InputError(
            f"decode: the embedding is {embedding.dtype} and the rotary tables are {cos.dtype}; "
            "both must be float16, bfloat16 or float32"
        )
    if kinds > MAX_KINDS or {kinds} != {len(out.lows), len(out.slots), len(out.ends)}:
        raise errors.InputError(
            f"decode: {len(out.lows)} lows, {len(out.slots)} slots and {len(out.ends)} ends for "
            f"{kinds} windows; give one of each for each window, and at most {MAX_KINDS} windows"
        )
    if cos.dim() != 3:
        raise errors.InputError(
            f"decode: rotary tables are {errors.shape(cos.shape)}; "
            "they must be (tables, positions, width)"
        )
    batch, device = control.ids.shape[0], control.ids.device
    (vocab, hidden), (count, positions, width) = embedding.shape, cos.shape
    check_tensor("control.ids", control.ids, (batch, 1), torch.long, device)
    check_tensor("embedding", embedding, (vocab, hidden), embedding.dtype, device)
    rows = batch * tokens
    if drafts is not None:
        if any(isinstance(window, Ring) for window in out.windows):
            raise errors.InputError("decode: rows that are ahead of others cannot share rings")
        check_tensor("drafts.tokens", drafts.tokens, (batch, tokens), torch.long, device)
    check_tensor("out.x", out.x, (rows, hidden), embedding.dtype, device)
    for name, table, each in (("cos", cos, out.cos), ("sin", sin, out.sin)):
        check_tensor(name, table, (count, positions, width), cos.dtype, device)
        check_tensor(f"out.{name}", each, (count, rows, width), cos.dtype, device)
    integers = {"slot": out.slot, "end": out.end}
    for name, of_kinds in (("lows", out.lows), ("slots", out.slots), ("ends", out.ends)):
        integers |= {f"{name}[{n}]": tensor for n, tensor in enumerate(of_kinds)}
    for name, tensor in integers.items():
        check_tensor(f"out.{name}", tensor, (batch,), torch.int32, device)
