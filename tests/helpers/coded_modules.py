"""What tests of `mirage_hf.formats` share: decoding, programs of a coding, and wrong decodings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

import torch

from mirage_hf.formats import CodedWeight, coded_weight
from mirage_hf.formats.coding import Coding, write_joined
from mirage_hf.formats.stored import Bits, Field, Stored
from mirage_hf.graph.coded import is_packed
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.ops.dtypes import CODE_DTYPES
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify.accept import accept


def read(module: torch.nn.Module) -> CodedWeight:
    """Return the weight of a module that must be readable."""
    return read_as(module, torch.bfloat16)


def read_as(module: torch.nn.Module, dtype: torch.dtype) -> CodedWeight:
    """Return the weight of a module that must be readable, for activations of a dtype."""
    found = coded_weight(module, dtype)
    assert isinstance(found, CodedWeight), found
    return found


def decoded(coding: Coding, tensors) -> torch.Tensor:
    """Return the weight (rows, columns) that a program decodes."""
    g = new_kernel_graph()
    _, weight = coding.write(g)
    g.mark_output(weight)
    return run_kernel_graph(g, list(tensors))[0].T


def linear(coding: Coding, rows: int, norm: bool) -> KernelGraph:
    """Return x · Wᵀ, after RMSNorm if `norm`."""
    return joined([coding], rows, norm)


def joined(codings: Sequence[Coding], rows: int, norm: bool) -> KernelGraph:
    """Return x · Wᵀ, after RMSNorm if `norm`, for the rows of several weights."""
    g, coding = new_kernel_graph(), codings[0]
    x = g.new_input((rows, coding.columns), coding.dtype)
    if norm:
        x = g.rms_norm(x, g.new_input((1, coding.columns), coding.dtype, constant=True))
    g.mark_output(g.matmul(x, write_joined(codings, g)[1]))
    return g


def proven_as_one_kernel(program: KernelGraph) -> bool:
    """Return whether the search finds a kernel that computes all, and proves it."""
    found, _ = search(program, SearchOptions(threads=1))
    single = [r for r in found if r.ugraph.num_kernels == 1]
    return bool(single) and bool(accept(single, keep=1).candidates)


def lies_in_module(weight: CodedWeight, module: torch.nn.Module) -> bool:
    """Return whether the tensors of a weight are memory of the module."""
    from mirage_hf.formats import held_tensors

    own = {t.untyped_storage().data_ptr() for t in held_tensors(module)}
    return all(t.untyped_storage().data_ptr() in own for t in weight.tensors)


Mutant = tuple[str, Coding, list[torch.Tensor]]


def mutants(weight: CodedWeight) -> Iterator[Mutant]:
    """Yield wrong decodings of a weight: a name, the coding and the tensors that it reads.

    A changed tensor that has the same elements as before is left out.
    """
    coding, tensors = weight.coding, list(weight.tensors)
    held = dict(zip(coding.roles, tensors, strict=True))

    def other(name: str, changed: Coding) -> Mutant:
        return name, changed, [held[role] for role in changed.roles]

    if coding.divisors is not None:
        yield other("nothing divides scales", replace(coding, divisors=None))
    if coding.factors is not None:
        yield other("nothing multiplies scales", replace(coding, factors=None))
    if coding.minima is not None:
        yield other("no minima", replace(coding, minima=None, minimum_factors=None))
        factors = held["factors"]
        yield (
            "minima times another factor",
            coding,
            [*(held | {"minimum factors": factors}).values()],
        )
    for name in ("codes", "scales", "minima"):
        yield from (other(*made) for made in _other_bits(coding, name))
    if isinstance(coding.scales, Stored) and coding.scales.dtype in CODE_DTYPES:
        for name, dtype in (("uint8", torch.uint8), ("int8", torch.int8)):
            if dtype is coding.scales.dtype:
                continue
            changed = replace(coding, scales=replace(coding.scales, dtype=dtype))
            scales = held["scales"].view(dtype)
            yield f"scales as {name}", changed, [*(held | {"scales": scales}).values()]
    if coding.zeros is not None:
        yield other("no zero points", replace(coding, zeros=None))
    if coding.shifts is not None:
        yield other("nothing is added", replace(coding, shifts=None))
    if coding.table is not None:
        yield "no table", replace(coding, table=None), tensors
        for by in (1, -1):
            table = coding.table[by:] + coding.table[:by]
            yield f"table moved by {by}", replace(coding, table=table), tensors
        for n in range(len(coding.table) - 1):
            first, second = coding.table[n : n + 2]
            table = (*coding.table[:n], second, first, *coding.table[n + 2 :])
            if first != second:
                yield f"entries {n} and {n + 1} exchanged", replace(coding, table=table), tensors
    for by in (1, -1, 8):
        yield f"zero point plus {by}", replace(coding, zero=coding.zero + by), tensors
    if coding.zero:
        yield "no constant zero point", replace(coding, zero=0.0), tensors
    for n, role in enumerate(coding.roles):
        for name, tensor in _CHANGES.get(role, partial(_moved, role))(weight, n):
            if not torch.equal(_bytes(tensor), _bytes(tensors[n])):
                yield name, coding, [*tensors[:n], tensor, *tensors[n + 1 :]]


def _other_bits(coding: Coding, name: str) -> Iterator[tuple[str, Coding]]:
    """Yield codings that read other bits of a number."""
    number = getattr(coding, name)
    if not isinstance(number, Bits):
        return
    yield f"no high bits of {name}", replace(coding, **{name: number.low})
    fewer = replace(number.high, count=number.high.count - 1)
    if fewer.count:
        changed = replace(number, high=fewer)
        yield f"fewer high bits of {name}", replace(coding, **{name: changed})
    if isinstance(number.low, Field):
        changed = replace(number, low=replace(number.low, count=3))
        yield f"fewer low bits of {name}", replace(coding, **{name: changed})


def _other_codes(weight: CodedWeight, n: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield codes in another order or with other bits."""
    dtype, codes = weight.coding.stored[n].dtype, weight.tensors[n]
    yield from _moved("codes", weight, n)
    if is_packed(dtype):
        yield from _other_nibbles("codes", codes)
        return
    raw = codes.contiguous().view(torch.uint8)
    whole = raw.view(-1, 4)
    yield "bytes of a word reversed", whole.flip(1).view(raw.shape).view(codes.dtype)
    yield "bytes of a word exchanged", whole[:, [1, 0, 3, 2]].view(raw.shape).view(codes.dtype)
    yield "codes with another sign", (raw ^ 0x80).view(codes.dtype)
    yield "codes with another lowest bit", (raw ^ 1).view(codes.dtype)


def _other_scales(weight: CodedWeight, n: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield scales of other rows or groups, and other scales."""
    scales = weight.tensors[n]
    yield from _moved("scales", weight, n)
    if weight.coding.stored[n].dtype in CODE_DTYPES:
        raw = scales.view(torch.uint8)
        yield "scales with another lowest bit", (raw ^ 1).view(scales.dtype)
        yield "scales of another exponent", (raw + 8).view(scales.dtype)
        yield "scales that are all the same code", torch.full_like(raw, 56).view(scales.dtype)
        return
    yield "scales squared", scales.square()
    yield "scales inverted", scales.reciprocal()
    yield "no scales", torch.ones_like(scales)


def _other_divisors(weight: CodedWeight, n: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield other divisors."""
    divisors = weight.tensors[n]
    yield "divisors inverted", divisors.reciprocal()
    yield "divisors doubled", divisors * 2


def _other_zeros(weight: CodedWeight, n: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield zero points of other rows or groups, and other zero points."""
    assert weight.coding.zeros is not None
    zeros = weight.tensors[n]
    yield from _moved("zero points", weight, n)
    if is_packed(weight.coding.zeros.dtype):
        yield from _other_nibbles("zero points", zeros)
    else:
        yield "zero points plus 1", zeros + 1
        yield "zero points counted twice", zeros * 2


def _other_shifts(weight: CodedWeight, n: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is added to another row."""
    yield "what is added to another row", weight.tensors[n].roll(1, 0)


def _other_order(weight: CodedWeight, n: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield columns in other groups."""
    order, groups = weight.tensors[n], weight.coding.scales.dims[-1]
    yield from _moved("order", weight, n)
    yield "columns in the next group", (order + 1) % groups
    own = torch.arange(order.numel(), dtype=order.dtype) * groups // order.numel()
    yield "columns in groups of their own order", own.view(order.shape)


#: Yields changed tensors, by the role of the input that reads them.
_CHANGES = {
    "codes": _other_codes,
    "scales": _other_scales,
    "divisors": _other_divisors,
    "zeros": _other_zeros,
    "shifts": _other_shifts,
    "order": _other_order,
}


def _moved(what: str, weight: CodedWeight, n: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor with its elements at other places."""
    t = weight.tensors[n]
    wide = [d for d, n in enumerate(t.shape) if n > 1]
    raw = _bytes(t)
    for d in wide:
        last = t.shape[d] - 1
        for by in (1, -1):
            yield f"{what} moved by {by} along {d}", raw.roll(by, d).view(t.dtype).squeeze(-1)
        late = torch.cat([raw.narrow(d, 1, last), raw.narrow(d, last, 1)], d)
        yield f"{what} off by one along {d}", late.view(t.dtype).squeeze(-1)
        first = raw.narrow(d, 0, 1).expand(raw.shape).contiguous()
        yield f"first {what} for all along {d}", first.view(t.dtype).squeeze(-1)
    for a, b in combinations(wide, 2):
        order = list(range(raw.dim()))
        order[a], order[b] = b, a
        turned = raw.permute(order).contiguous().view(raw.shape)
        yield f"{what} transposed along {a}, {b}", turned.view(t.dtype).squeeze(-1)


def _other_nibbles(what: str, words: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield int32 words that hold their eight codes in another order."""
    shifts = torch.arange(0, 32, 4)
    nibbles = (words.to(torch.int64).unsqueeze(-1) >> shifts) & 15
    orders = {
        "high nibble first": (1, 0, 3, 2, 5, 4, 7, 6),
        "last nibble first": (7, 6, 5, 4, 3, 2, 1, 0),
        "bytes reversed": (6, 7, 4, 5, 2, 3, 0, 1),
        "even nibbles first": (0, 2, 4, 6, 1, 3, 5, 7),
        "halves interleaved": (0, 4, 1, 5, 2, 6, 3, 7),
        "next nibble": (1, 2, 3, 4, 5, 6, 7, 0),
    }
    for name, order in orders.items():
        changed = (nibbles[..., list(order)] << shifts).sum(-1)
        signed = torch.where(changed >= 1 << 31, changed - (1 << 32), changed)
        strided = torch.empty_strided(words.shape, words.stride(), dtype=torch.int32)
        yield f"{what}: {name}", strided.copy_(signed)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, in a new last dim."""
    return t.contiguous().unsqueeze(-1).view(torch.uint8)


def caught(weight: CodedWeight, expected: torch.Tensor) -> dict[str, bool]:
    """Return for each mutant whether it decodes to something else."""
    return {
        name: not torch.equal(decoded(coding, tensors), expected)
        for name, coding, tensors in mutants(weight)
    }
