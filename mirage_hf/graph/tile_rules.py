"""Rules for ops on tiles: joined dims, the time of values, unfinished sums, outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mirage_hf import errors
from mirage_hf.graph.tiles import GRID_DIMS, Node, Span, STensor

#: An imap or omap: the dim per grid dim, by name or in order. None and −1 are replicas.
Map = Mapping[str, "int | None"] | Sequence["int | None"]


def grid_map(
    given: Map | None, grid_dim: tuple[int, ...], rank: int, where: str, what: str
) -> dict[str, int]:
    """Return an imap or omap as grid dim → tensor dim, without replicas.

    Args:
        given: The map.
        grid_dim: Blocks along each grid dim.
        rank: Dims of the tensor.
        where: The call, for messages.
        what: "imap" or "omap", for messages.

    Raises:
        GraphError: If it names a grid dim or a tensor dim that does not exist.
    """
    names = GRID_DIMS[: len(grid_dim)]
    if given is None:
        return {}
    if not isinstance(given, (Mapping, Sequence)) or isinstance(given, str):
        raise errors.GraphError(
            f"{where}: {what} {given!r} is neither a dict like {{'x': 0}} nor a tuple of dims"
        )
    pairs = given if isinstance(given, Mapping) else zip(GRID_DIMS, given, strict=False)
    dims = dict(pairs)
    unknown = any(g not in names and d not in (None, -1) for g, d in dims.items())
    if unknown or len(given) > len(GRID_DIMS):
        raise errors.GraphError(
            f"{where}: {what} {given!r} names a grid dim that is not there; "
            f"grid_dim {errors.shape(grid_dim)} has {', '.join(names)}"
        )
    for d in dims.values():
        # −1 is a replica, as in the paper's code, so dims count from the left only.
        is_int = isinstance(d, int) and not isinstance(d, bool)
        if d is not None and not (is_int and -1 <= d < rank):
            raise errors.GraphError(
                f"{where}: {what} names dim {d!r}; use 0 to {rank - 1}, or None for a replica"
            )
    return {g: d for g, d in dims.items() if d is not None and d != -1}


# -- dims ------------------------------------------------------------------------------------------


def join_spans(a: Span, b: Span, where: str, operands: Sequence[STensor]) -> Span:
    """Join the spans of two dims that meet in an op, and return the joined span.

    Raises:
        GraphError: If they are not cut alike.
    """
    a, b = a.root, b.root
    if a is b:
        return a
    if a.cut != b.cut:
        raise errors.GraphError(
            f"{where}: {' and '.join(map(str, operands))}: {a.first} (size {a.size}, {a.how}) "
            f"meets {b.first} (size {b.size}, {b.how}); "
            "what meets must be cut alike, by imap and by fmap"
        )
    b.joined, a.reduced = a, a.reduced or b.reduced
    return a


def join_cut(known: Span | None, a: Span, what: str) -> Span:
    """Join the spans of all dims that one grid dim cuts, or that the loop walks. Return it.

    Block i, or trip i, has piece i of each of them.

    Args:
        known: The joined span so far. None: `a` is the first.
        a: The span to join.
        what: The grid dim or the loop with its verb, for messages, like "grid dim x cuts".

    Raises:
        GraphError: If they differ in size or are not cut alike.
    """
    if known is None:
        return a
    known = known.root
    if known.cut != a.cut:
        way = "" if "loop" in what else ", or have a grid dim each"
        raise errors.GraphError(
            f"{what} {known.first} (size {known.size}, {known.how}) and "
            f"{a.first} (size {a.size}, {a.how}); these must be of one size and cut alike{way}"
        )
    a.joined = known
    return known


def check_distinct(t: STensor, where: str) -> STensor:
    """Return a tile, after checking that no two of its dims range over the same span.

    Raises:
        GraphError: If two dims do, so that blocks would hold only a diagonal.
    """
    roots = [a.root for a in t.axes if a is not None]
    repeated = next((a for n, a in enumerate(roots) if a in roots[:n]), None)
    if repeated is None:
        return t
    by, way = "the same input has", "load the tensor a second time with new_input"
    if repeated.grid:
        by, way = f"grid dim {repeated.grid} cuts", "cut or walk one of them"
    elif repeated.walked:
        by, way = "the loop walks", "cut or walk one of them"
    raise errors.GraphError(
        f"{where}: {by} two dims of the result {errors.shape(t.dims)}, "
        f"so blocks hold its diagonal only; {way}"
    )


# -- time ------------------------------------------------------------------------------------------


def time_of(
    tiles: Sequence[STensor], where: str, operands: Sequence[STensor]
) -> tuple[str, STensor | None]:
    """Return when a value made of `tiles` exists, and the running maximum that it depends on.

    Raises:
        GraphError: If it depends on a value of the loop and on one that exists only after the loop,
            or on two running maxima.
    """
    in_loop = [t for t in tiles if t.time == "loop"]
    after = [t for t in tiles if t.time == "after"]
    if not in_loop:
        return ("after" if after else "any"), None
    maxima: list[STensor] = []
    for t in after:
        running = running_maxima(t)
        if not running:
            here = next(t for t in operands if t.time == "loop")
            raise errors.GraphError(
                f"{where}: reads {here} after its loop, together with the accumulated {t}; "
                "use accumulated values only after the loop, or load the input a second time "
                "in a block graph that runs after this one"
            )
        maxima += running
    maxima += [t.running for t in in_loop if t.running is not None]
    by_node = {m.node: m for m in maxima}
    if len(by_node) > 1:
        names = " and ".join(f"%{m.name}" for m in by_node.values())
        raise errors.GraphError(
            f"{where}: depends on two running maxima, {names}; keep to one for each sum"
        )
    return "loop", next(iter(by_node.values()), None)


def running_maxima(t: STensor) -> list[STensor]:
    """Return the maxima that an accumulated value depends on, none if it depends on a sum too."""
    if t.is_maximum:
        return [t]
    if t.node.op == "accumulate":
        return []
    maxima: dict[Node, STensor] = {}
    for x in t.node.args:
        if isinstance(x, STensor) and x.time == "after":
            below = running_maxima(x)
            if not below:
                return []
            maxima |= {m.node: m for m in below}
    return list(maxima.values())


# -- unfinished sums -------------------------------------------------------------------------------


def pending_after(op: str, args: Sequence[STensor | float], where: str) -> str | None:
    """Return "sum" if the result of an op is again a sum of one trip, None if no operand is one.

    An op on sums of one trip must commute with the sum over all trips. Two ops do: scaling such a
    sum by a value that does not change in the loop, and adding two such sums.

    Raises:
        GraphError: If the op must wait until the sum is accumulated.
    """
    waiting = [x for x in args if isinstance(x, STensor) and x.pending]
    if not waiting:
        return None
    others = [x for x in args if not (isinstance(x, STensor) and x.pending)]
    fixed = all(not isinstance(x, STensor) or x.time != "loop" for x in others)
    divided = op == "div" and args[0] is waiting[0]
    scaled = len(waiting) == 1 and (op in ("neg", "cast", "mul") or divided)
    added = len(waiting) == 2 and op in ("add", "sub")
    if all(x.pending == "sum" for x in waiting) and fixed and (scaled or added):
        return "sum"
    raise unfinished(waiting[0], where)


def unfinished(t: STensor, where: str) -> errors.GraphError:
    """Return the error for a tile that is not yet reduced over all trips."""
    if t.unreduced:
        d = next(d for d, a in enumerate(t.axes) if a is not None and a.root.walked)
        return errors.GraphError(
            f"{where}: {t} was accumulated tile by tile and still has the walked dim {d}; "
            f"first reduce it: reduction(x, {d}, {t.unreduced!r})"
        )
    accumulate = "accum" if t.pending == "sum" else "accum_max"
    return errors.GraphError(
        f"{where}: {t} is the {t.pending} over one trip of the loop only; "
        f"accumulate it first ({accumulate}), or do not walk that dim"
    )


# -- outputs ---------------------------------------------------------------------------------------


def check_filled(tensor: STensor, where: str, g: str, d: int | None) -> None:
    """Check that grid dim `g` may fill dim `d` of the output, as omap says.

    Raises:
        GraphError: If it may not.
    """
    carried = {a.root.grid: n for n, a in enumerate(tensor.axes) if a is not None}
    split = any(p.root.grid == g for p in tensor.splits)
    if g in carried and split:
        raise errors.GraphError(
            f"{where} holds the dim that grid dim {g} cuts, and sums over it; "
            "store one or the other"
        )
    if g in carried and d != carried[g]:
        raise errors.GraphError(
            f"{where}: dim {carried[g]} is cut by grid dim {g}; "
            f"omap must say so ({g!r}: {carried[g]})"
        )
    if d is not None and g not in carried and not split:
        raise errors.GraphError(
            f"{where}: grid dim {g} cuts nothing that it is made of, "
            f"so it cannot fill dim {d}; cut an input by {g}, or leave it out of omap"
        )


def split_position(
    tensor: STensor,
    where: str,
    g: str,
    d: int | None,
    splits_at: Sequence[tuple[int, Span]],
) -> int:
    """Return the output dim that numbers the splits of grid dim `g`, −1 for a new one.

    Args:
        tensor: The tile that is stored.
        where: The call, for messages.
        g: The grid dim.
        d: The dim that omap gives it, None if it gives none.
        splits_at: The dims that number the splits of earlier grid dims.

    Raises:
        GraphError: If dim `d` cannot number splits.
    """
    if d is None:
        return -1
    if tensor.axes[d] is not None or any(d == position for position, _ in splits_at):
        raise errors.GraphError(
            f"{where}: one result per block of grid dim {g} has no room in dim {d} of size "
            f"{tensor.dims[d]}; name a dim of size 1, or leave {g} out of omap "
            "for a new first dim"
        )
    return d
