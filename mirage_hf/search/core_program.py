"""Convert a lowered program to the C++ core's form: nodes, axes and symbols by number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mirage_hf import _core, errors
from mirage_hf.gpus import Device
from mirage_hf.graph.block import Role
from mirage_hf.ops.dtypes import DTYPES
from mirage_hf.search.lowered_program import LoweredProgram, Term, small_rational
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.search_report import Counters
from mirage_hf.settings import settings

CORE_ROLES = {Role.GRID: _core.Role.grid, Role.LOOP: _core.Role.loop, Role.TILE: _core.Role.tile}
CORE_OPS = {
    "input": _core.Op.input,
    "constant": _core.Op.constant,
    "add": _core.Op.add,
    "sub": _core.Op.sub,
    "mul": _core.Op.mul,
    "div": _core.Op.div,
    "exp": _core.Op.exp,
    "opaque": _core.Op.opaque,
    "sum": _core.Op.sum,
    "max": _core.Op.max,
}

#: The number of candidates to ask the core for if a restriction on maps may reject most of them.
_CANDIDATES_WITH_MAPS = 256

_LIMITS = (
    "max_kernels",
    "max_cuts",
    "max_variants",
    "max_candidates",
    "max_block_ops",
    "clusters",
    "max_forms",
)

#: The key of a symbol: an opaque function with its attributes, or the value of a constant.
_Symbol = tuple[str, tuple[tuple[str, float], ...], float]


def too_large(lowered: LoweredProgram) -> str:
    """Return why the core cannot hold a program, or "" if it can."""
    for what, count, most in (
        ("axes", len(lowered.sizes), _core.max_axes),
        ("terms", len(lowered.terms), _core.max_nodes),
    ):
        if count > most:
            return f"{count} {what}; the search takes up to {most}"
    return ""


def symbols(lowered: LoweredProgram) -> list[Term]:
    """Return the terms that the core knows only by number, without repeats.

    These are opaque functions, and the constants that are no small rational.
    """
    return list(_numbered(lowered).values())


def _numbered(lowered: LoweredProgram) -> dict[_Symbol, Term]:
    return {
        _symbol(term): term
        for term in lowered.terms
        if term.op == "opaque" or (term.op == "constant" and small_rational(term.value) is None)
    }


def _symbol(term: Term) -> _Symbol:
    return (term.fn, term.attrs, term.value)


def core_program(lowered: LoweredProgram) -> _core.Program:
    """Return a lowered program as the core reads it, its axes in the order of `lowered.sizes`."""
    axes = list(lowered.sizes)
    numbers = {symbol: number for number, symbol in enumerate(_numbered(lowered))}
    program = _core.Program()
    program.axes = [_core.AxisInfo(a, lowered.sizes[a]) for a in axes]
    program.nodes = [_node(term, lowered, axes, numbers) for term in lowered.terms]
    program.outputs = [output.term for output in lowered.outputs]
    program.output_itemsizes = [DTYPES[output.dtype].itemsize for output in lowered.outputs]
    return program


def _node(
    term: Term, lowered: LoweredProgram, axes: Sequence[str], numbers: dict[_Symbol, int]
) -> _core.Node:
    node = _core.Node()
    node.op, node.args = CORE_OPS[term.op], list(term.args)
    if term.op == "input":
        read = lowered.inputs[term.source]
        node.symbol = term.source  # of an input, the symbol says which one
        node.index = [-1 if a is None else axes.index(a) for a in term.index]
        node.bytes = math.ceil(read.itemsize * read.num_elements)
    elif term.op == "constant":
        # The core calculates with small rationals. Any other constant is a symbol to it.
        fraction = small_rational(term.value)
        if fraction is None:
            node.symbol = numbers[_symbol(term)]
        else:
            node.num, node.den = fraction.numerator, fraction.denominator
    elif term.op == "opaque":
        node.symbol = numbers[_symbol(term)]
    elif term.op in ("sum", "max"):
        node.axis = axes.index(term.axis)
    return node


def core_limits(
    options: SearchOptions,
    roles: Iterable[tuple[str, Role]],
    axes: Sequence[str],
    width: int,
    seconds: float,
) -> _core.Limits:
    """Return the core's limits for one width.

    Args:
        options: The user's limits.
        roles: Axes by name, each with the role that it must have.
        axes: The program's axes, in the core's order.
        width: The number of monomials that a product may be multiplied out to.
        seconds: The wall time that is left.

    Raises:
        SearchError: If `roles` names an axis that the program does not have, or the role CLUSTER.
    """
    limits = _core.Limits()
    limits.seconds, limits.width = seconds, width
    for name in _LIMITS:
        setattr(limits, name, getattr(options, name))
    if options.maps is not None:
        limits.max_candidates = max(options.max_candidates, _CANDIDATES_WITH_MAPS)
    limits.threads = options.threads or settings().threads
    limits.forced = _axis_sets(roles, axes)
    limits.gpu = _gpu_rates(options.gpu)
    return limits


def _gpu_rates(device: Device) -> _core.GpuRates:
    """Return the rates of a GPU per µs. The core counts a multiply-add as one operation."""
    rates = _core.GpuRates()
    rates.dram_bytes = device.bandwidth / 1e6
    rates.cache_bytes = device.l2_bandwidth / 1e6
    rates.scalar_ops = device.scalar_rate / 1e6
    rates.matrix_ops = device.mma_rate / 2 / 1e6
    rates.sms = device.sms
    rates.sm_bytes = device.sm_bandwidth / 1e6
    rates.cached_bytes = device.reread_bytes
    rates.launch_us, rates.latency_us = device.launch_us, device.latency_us
    rates.pass_us = device.pass_us
    return rates


def _axis_sets(roles: Iterable[tuple[str, Role]], axes: Sequence[str]) -> list[int]:
    """Return a bit set of axes for each of the core's roles, or no sets if none is forced."""
    sets = [0] * len(CORE_ROLES)
    for name, role in roles:
        if name not in axes:
            raise errors.SearchError(
                f"axis {name!r} is not an axis of this program; it has {', '.join(axes)}"
            )
        if role not in CORE_ROLES:
            raise errors.SearchError(
                f"axis {name!r} cannot be forced to be a {role.value} axis; "
                "clusters number splits, which the search chooses"
            )
        sets[list(CORE_ROLES).index(role)] |= 1 << axes.index(name)
    return sets if any(sets) else []


def counters_of(statistics: _core.Statistics, width: int = 0) -> Counters:
    """Return the core's statistics as counters.

    `width` is the width that was searched to the end.
    """
    names = (name for name in Counters.__dataclass_fields__ if name != "width")
    return Counters(width=width, **{name: getattr(statistics, name) for name in names})
