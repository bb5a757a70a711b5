"""Words of several codes that a kernel loads whole."""

from __future__ import annotations

from collections.abc import Mapping

from mirage_hf import errors
from mirage_hf.codegen.plan.code_runs import WORD_BYTES
from mirage_hf.codegen.plan.layout import TensorLayout
from mirage_hf.codegen.plan.masks import Masks
from mirage_hf.graph.block import BlockInput
from mirage_hf.graph.coded import is_packed, word_dims


def holds_words(layout: TensorLayout, i: BlockInput) -> bool:
    """Return whether a kernel loads words of several codes: packed ones, or four bytes."""
    return is_packed(layout.tiling.dtype(i)) or i.name in layout.byte_words


def codes_of_word(layout: TensorLayout, i: BlockInput) -> dict[str, int]:
    """Return how many codes of a word lie along each axis, the longest stride first."""
    if i.name in layout.byte_words:
        return {layout.byte_words[i.name]: WORD_BYTES}
    operand = layout.tiling.operands[i.sources[0]]
    counts = word_dims(operand.dims, operand.strides)
    return {str(i.axes[d]): count for d, count in counts.items()}


def check_words(layout: TensorLayout, masks: Masks) -> None:
    """Check that tiles of codes consist of whole words.

    Raises:
        CodegenError: If they do not.
    """
    for i in layout.tiling.block.inputs:
        if not holds_words(layout, i):
            continue
        packed = codes_of_word(layout, i)
        if reason := _why_not_whole(layout, masks, i, packed):
            tiles = " and ".join(f"{n} or more along {a}" for a, n in packed.items())
            raise errors.CodegenError(
                f"block input {i.name} of packed codes {reason}; give tiles of {tiles} that divide "
                "their sizes"
            )


def _why_not_whole(
    layout: TensorLayout, masks: Masks, i: BlockInput, packed: Mapping[str, int]
) -> str:
    tiling, block = layout.tiling, layout.tiling.block
    if len(i.sources) > 1 and (not tiling.selects_source(i) or i.joined in packed):
        return "has a tile that lies in several tensors"
    if i.rotation is not None or i.padding is not None:
        return "is rotated or padded"
    if str(None) in packed:
        return "has words whose codes an index chooses"
    if any(a == layout.unrolled or tiling.tile(a) < n for a, n in packed.items()):
        return "has a tile of part of a word"
    if any(masks.needed(a) or block.split_size(a) % n for a, n in packed.items()):
        return "has a tile that reaches past the end of its codes"
    return ""
