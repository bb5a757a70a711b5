"""Hand-written block graphs in the terms of the Mirage paper (arXiv 2405.05751, section 2): tiles, imap, fmap, omap.

What is written is one block in one trip of the loop: tensors have the dims of their tiles, which are the full dims divided by
what cuts them. What comes out is a `BlockGraph` over named axes, where grid_dim and forloop_range are no more than roles:
dims that meet in an op are one axis, an axis that a grid dim cuts is a GRID axis, the one that is walked is the LOOP axis, the
rest is held whole. An axis that a grid dim cuts and a block sums all the same is dealt out in parts (split-K): the partial
results carry the number of their part, as a new dim of the output. Counts become tiles again in `BlockGraphBuilder.schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mirage_hf import errors
from mirage_hf.graph.block import Axis, BlockGraph, Role
from mirage_hf.graph.emission import Emission
from mirage_hf.graph.kernel import DTensor, number, several
from mirage_hf.graph.tiles import GRID_DIMS, Node, Output, Span, STensor
from mirage_hf.ops import table

Map = Mapping[str, "int | None"] | Sequence["int | None"]


@dataclass(repr=False)
class BlockGraphBuilder:
    """A block graph under construction; `mirage_hf.new_block_graph` makes one. Methods that add an op return its tile.

    Errors: GraphError for what no block graph expresses, with the way out.
    """

    grid_dim: tuple[int, ...]
    forloop_range: int = 1
    inputs: list[tuple[STensor, DTensor]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    _operands: list[DTensor] = field(default_factory=list)
    _cut: dict[str, Span] = field(default_factory=dict)
    _walked: Span | None = None
    _count: int = 0

    def __repr__(self) -> str:
        return (
            f"<BlockGraphBuilder: grid_dim {self.grid_dim}, forloop_range {self.forloop_range}, {len(self.inputs)} inputs, "
            f"{len(self.outputs)} outputs>"
        )

    # -- tensors in and out -----------------------------------------------------------------------------------------------

    def new_input(
        self, tensor: DTensor, imap: Map | None = None, fmap: int | None = None
    ) -> STensor:
        """Load a tile of `tensor`. imap: the dim that each grid dim cuts, as a dict by name or a tuple in the order x, y, z (None
        or -1, or left out: every block reads the same); fmap: the dim that the loop walks, or None."""
        if not isinstance(tensor, DTensor):
            raise errors.GraphError(
                f"new_input: expected a tensor of a kernel graph, got {type(tensor).__name__}; "
                "make one with graph.new_input"
            )
        rank, where = len(tensor.dims), f"new_input: {tensor.name} {errors.shape(tensor.dims)}"
        cut: dict[int, str] = {}
        for g, d in self._map(imap, rank, where, "imap").items():
            if d in cut:
                raise errors.GraphError(
                    f"{where}: grid dims {cut[d]} and {g} both cut dim {d}; let one of them cut it"
                )
            cut[d] = g
        walked = None if fmap in (None, -1) else table.axis(fmap, rank, f"{where}: fmap")  # type: ignore[arg-type]
        axes: list[Span | None] = []
        dims = []
        for d, size in enumerate(tensor.dims):
            pieces = self._size(cut.get(d)) * (self.forloop_range if walked == d else 1)
            if size % pieces:
                by = [f"grid dim {cut[d]} of {self._size(cut[d])}"] if d in cut else []
                what = " × ".join(by + ([f"{self.forloop_range} trips"] if walked == d else []))
                raise errors.GraphError(
                    f"{where}: dim {d} of size {size} is not divisible by {what}; choose numbers that divide it"
                )
            dims.append(size // pieces)
            grid = cut.get(d) if self._size(cut.get(d)) > 1 else None
            axes.append(
                Span(
                    size, grid, walked == d and self.forloop_range > 1, f"dim {d} of {tensor.name}"
                )
                if size > 1
                else None
            )
        for a in axes:
            if a is not None and a.grid is not None:
                self._cut[a.grid] = self._same_pieces(
                    self._cut.get(a.grid), a, f"grid dim {a.grid} cuts"
                )
            if a is not None and a.walked:
                self._walked = self._same_pieces(self._walked, a, "the loop walks")
        if all(t is not tensor and not _same(t, tensor) for t in self._operands):
            self._operands.append(tensor)
        source = next(k for k, t in enumerate(self._operands) if _same(t, tensor))
        time = "loop" if any(a is not None and a.walked for a in axes) else "any"
        node = Node("input", source=source)
        made = self._checked(
            STensor(self._name(tensor.name), node, tuple(axes), tuple(dims), time=time, owner=self),
            where,
        )
        self.inputs.append((made, tensor))
        return made

    def new_output(self, tensor: STensor, omap: Map | None = None, dtype: Any = None) -> None:
        """Store a tile. omap: the dim that each grid dim fills. A grid dim that is left out is a split: what it cuts was summed, and
        the partial results get a new first dim (or the dim of size 1 that omap names). dtype: the first input's unless given."""
        where = f"new_output: {self._own(tensor, 'new_output')}"
        if tensor.half or tensor.pending:
            raise self._unfinished(tensor, "new_output")
        if tensor.time == "loop":
            raise errors.GraphError(
                f"{where} changes from trip to trip; store what is accumulated over the loop (accum, accum_max)"
            )
        given = self._map(omap, len(tensor.axes), where, "omap")
        splits_at: list[tuple[int, Span]] = []
        carried = {
            a.root.grid: d for d, a in enumerate(tensor.axes) if a is not None and a.root.grid
        }
        splits = {p.root.grid: p.root for p in tensor.splits}
        for g, n in zip(GRID_DIMS, self.grid_dim, strict=False):
            d = given.get(g)
            if n == 1:
                continue
            if g in carried and g in splits:
                raise errors.GraphError(
                    f"{where} holds the dim that grid dim {g} cuts, and sums over it; store one or the other"
                )
            if g in carried and d != carried[g]:
                raise errors.GraphError(
                    f"{where}: dim {carried[g]} is cut by grid dim {g}; omap must say so ({g!r}: {carried[g]})"
                )
            if g in splits:
                if d is not None and (
                    tensor.axes[d] is not None or any(d == at for at, _ in splits_at)
                ):
                    raise errors.GraphError(
                        f"{where}: one result per block of grid dim {g} has no room in dim {d} of size "
                        f"{tensor.dims[d]}; name a dim of size 1, or leave {g} out of omap for a new first dim"
                    )
                splits_at.append((-1 if d is None else d, splits[g]))
            elif d is not None and g not in carried:
                raise errors.GraphError(
                    f"{where}: grid dim {g} cuts nothing that it is made of, so it cannot fill dim {d}; "
                    f"cut an input by {g}, or leave it out of omap"
                )
        name = None if dtype is None else table.dtype_name(table.as_dtype(dtype))
        self.outputs.append(Output(tensor, tensor.axes, tuple(splits_at), name))

    # -- ops ----------------------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Callable[..., STensor]:
        """The elementwise ops (add, mul, exp, silu …) are methods by their names in the table: see `table.add_methods`."""
        if name.startswith("_"):
            raise AttributeError(name)
        if table.lookup(name).kind != "elementwise":
            raise errors.UnknownOpError(
                f"a block graph has no {name}; apply it in the kernel graph, before or after the block"
            )
        return partial(self._elementwise, name)  # a row of later

    def cast(self, x: STensor, dtype: Any) -> STensor:
        """Convert; kernels compute in float32, so this rounds only what is stored."""
        return self._elementwise("cast", x, dtype=table.dtype_name(table.as_dtype(dtype)))

    def matmul(self, a: STensor, b: STensor) -> STensor:
        """(… m k) by (… k n): in one trip; accumulate it where the loop walks k."""
        for t in (a, b):
            self._own(t, "matmul")
            if len(t.axes) < 2:
                raise errors.GraphError(f"matmul: needs matrices, got {t}")
            if t.pending or t.half:
                raise self._unfinished(t, "matmul")
        if a.dims[-1] != b.dims[-2]:
            raise errors.inner_sizes_differ(f"%{a.name}", a.dims, f"%{b.name}", b.dims)
        # (… m k 1) · (… 1 k n), as the product over named axes that it is
        left = replace(a, axes=(*a.axes, None), dims=(*a.dims, 1))
        right = replace(
            b, axes=(*b.axes[:-2], None, *b.axes[-2:]), dims=(*b.dims[:-2], 1, *b.dims[-2:])
        )
        product = self._elementwise("mul", left, right, where="matmul", originals=(a, b))
        out = self.reduction(product, len(product.dims) - 2)
        return replace(
            out, axes=(*out.axes[:-2], out.axes[-1]), dims=(*out.dims[:-2], out.dims[-1])
        )

    def reduction(self, x: STensor, dim: int, kind: str = "sum") -> STensor:
        """Reduce `dim` of the tile to size 1 by "sum", "mean" or "max"."""
        self._own(x, "reduction")
        if kind not in ("sum", "mean", "max"):
            raise errors.GraphError(f"reduction: unknown kind {kind!r}; use sum, mean or max")
        d = table.axis(dim, len(x.axes), "reduction")
        over = None if x.axes[d] is None else x.axes[d].root  # type: ignore[union-attr]
        if over is None:
            return x
        axes, dims = (*x.axes[:d], None, *x.axes[d + 1 :]), (*x.dims[:d], 1, *x.dims[d + 1 :])
        if kind == "mean" and (over.walked or over.grid):
            raise errors.GraphError(
                f"reduction: a mean over {over.first}, which is {over.how}, would depend on how it is cut; "
                f"take the sum and divide by {over.size}"
            )
        if over.grid and over.grid in {p.root.grid for p in x.splits}:
            raise errors.GraphError(
                f"reduction: {x} already is a partial result over grid dim {over.grid}"
            )
        splits = (*x.splits, over) if over.grid else x.splits
        if over.walked and x.time != "after":
            if x.pending:
                raise self._unfinished(x, "reduction")
            over.reduced = True
            return replace(x, axes=axes, dims=dims, splits=splits, pending=kind)
        if x.half is not None:
            if not over.walked or kind != x.half:
                raise self._unfinished(x, "reduction")
            over.reduced = True
            return replace(
                x, name=self._name("acc"), axes=axes, dims=dims, splits=splits, half=None
            )
        if x.pending and x.pending != kind:
            raise self._unfinished(x, "reduction")
        over.reduced = True
        node = Node("max" if kind == "max" else "sum", (x,), over=over)
        out = replace(x, name=self._name("v"), node=node, axes=axes, dims=dims, splits=splits)
        return self._elementwise("mul", out, 1.0 / over.size) if kind == "mean" else out

    def permute(self, x: STensor, order: Sequence[int]) -> STensor:
        """Dims in another order; nothing moves."""
        rank = len(self._own(x, "permute").axes)
        order = tuple(table.axis(o, rank, "permute") for o in several(order, "permute", "order"))
        table.lookup("permute").infer(x.dims, order=order)
        return replace(
            x, axes=tuple(x.axes[o] for o in order), dims=tuple(x.dims[o] for o in order)
        )

    def accum(self, x: STensor, shift: STensor | None = None) -> STensor:
        """Sum over the trips of the loop. shift: the running maximum (of accum_max) that `x` is relative to (online softmax)."""
        if (
            shift is not None
            and self.forloop_range > 1
            and not self._own(shift, "accum").is_maximum
        ):
            raise errors.GraphError(
                f"accum: shift {shift} is not a running maximum; it comes from accum_max"
            )
        return self._accumulate("sum", x, shift)

    def accum_max(self, x: STensor) -> STensor:
        """The maximum over the trips of the loop; inside the loop it is the running maximum, this trip included."""
        return self._accumulate("max", x, None)

    def rms_norm(self, x: STensor, weight: STensor | None = None, eps: float = 1e-6) -> STensor:
        """x / sqrt(mean(x²) + eps) over the last dim, which a block must hold whole, times `weight`."""
        return table.lookup("rms_norm").expand(
            self, self._own(x, "rms_norm"), *(() if weight is None else (weight,)), eps=eps
        )  # type: ignore[misc, no-any-return]

    def layer_norm(
        self,
        x: STensor,
        weight: STensor | None = None,
        bias: STensor | None = None,
        eps: float = 1e-6,
    ) -> STensor:
        """(x − mean) / sqrt(var + eps) over the last dim, which a block must hold whole, times `weight`, plus `bias`."""
        given = (p for p in (weight, bias) if p is not None)
        return table.lookup("layer_norm").expand(self, self._own(x, "layer_norm"), *given, eps=eps)  # type: ignore[misc, no-any-return]

    def softmax(self, x: STensor, dim: int = -1) -> STensor:
        """Softmax over a dim that a block holds whole, kept in range by its maximum."""
        d = table.axis(dim, len(self._own(x, "softmax").axes), "softmax")
        over = x.axes[d]
        if over is not None and (over.root.walked or over.root.grid):
            raise errors.GraphError(
                f"softmax: {over.root.first} is {over.root.how}; spell it out with accum_max and accum(…, shift=…)"
            )
        e = self.exp(self.sub(x, self.reduction(x, d, "max")))
        return self.div(e, self.reduction(e, d))

    # -- helpers of ops -----------------------------------------------------------------------------------------------------

    def _elementwise(
        self,
        name: str,
        *operands: Any,
        where: str = "",
        originals: tuple[STensor, ...] = (),
        **attrs: Any,
    ) -> STensor:
        row, where = table.lookup(name), where or name
        if len(operands) != row.arity[0]:
            raise errors.GraphError(f"{name}: takes {row.arity[0]} operands, got {len(operands)}")
        table.check_attrs(name, attrs)
        args = [
            self._own(x, where) if isinstance(x, (STensor, DTensor)) else number(x, where)
            for x in operands
        ]
        tiles = [x for x in args if isinstance(x, STensor)]
        if not tiles:
            raise errors.GraphError(f"{name}: needs a tile of this block graph, got numbers alone")
        shown = originals or tuple(tiles)
        if half := next((t for t in tiles if t.half), None):
            raise self._unfinished(half, where)
        dims = row.infer(*(t.dims for t in tiles)) if name != "cast" else tiles[0].dims
        rank = len(dims)
        axes: list[Span | None] = [None] * rank
        for t in tiles:
            for k, a in enumerate(t.axes, rank - len(t.axes)):
                if a is not None:
                    axes[k] = a.root if axes[k] is None else self._meet(axes[k], a, where, shown)  # type: ignore[arg-type]
        time, running = self._when(tiles, where, shown)
        pending = self._linear(name, args, where)
        splits = tuple(dict.fromkeys(p.root for t in tiles for p in t.splits))
        node = Node(name, tuple(args), tuple(sorted((row.attrs | attrs).items())))
        out = STensor(
            self._name("v"),
            node,
            tuple(axes),
            tuple(dims),
            splits,
            time,
            pending,
            running=running,
            owner=self,
        )
        return self._checked(out, where)

    def _when(
        self, tiles: Sequence[STensor], where: str, shown: Sequence[STensor]
    ) -> tuple[str, STensor | None]:
        """When a value exists that is made of `tiles`, and the running maximum that it then depends on."""
        loop = [t for t in tiles if t.time == "loop"]
        after = [t for t in tiles if t.time == "after"]
        if not loop:
            return ("after" if after else "any"), None
        maxima = [m for t in after for m in self._maxima(t)]
        if late := next((t for t in after if not self._maxima(t)), None):
            here = next(t for t in shown if t.time == "loop")
            raise errors.GraphError(
                f"{where}: reads {here} after its loop, together with the accumulated {late}; use accumulated values "
                "only after the loop, or load the input a second time in a block graph that runs after this one"
            )
        running = {
            m.node: m for m in [*maxima, *(t.running for t in loop if t.running is not None)]
        }
        if len(running) > 1:
            names = " and ".join(f"%{m.name}" for m in running.values())
            raise errors.GraphError(
                f"{where}: depends on two running maxima, {names}; keep to one for each sum"
            )
        return "loop", next(iter(running.values()), None)

    def _maxima(self, t: STensor) -> list[STensor]:
        """The running maximum behind a value that depends on nothing else accumulated; empty where it depends on more."""
        if t.is_maximum:
            return [t]
        found: dict[Node, STensor] = {}
        for x in t.node.args if t.node.op != "accumulate" else ():
            if isinstance(x, STensor) and x.time == "after":
                below = self._maxima(x)
                if not below:
                    return []
                found |= {m.node: m for m in below}
        return list(found.values())

    def _linear(self, name: str, args: Sequence[STensor | float], where: str) -> str | None:
        """What is still pending after an op; only what may as well be done before the sum is done with a sum of one trip."""
        waiting = [x for x in args if isinstance(x, STensor) and x.pending]
        if not waiting:
            return None
        sums = all(x.pending == "sum" for x in waiting)
        scaled = len(waiting) == 1 and (
            name in ("neg", "cast") or (name == "mul") or (name == "div" and args[0] is waiting[0])
        )
        others = [x for x in args if not (isinstance(x, STensor) and x.pending)]
        fixed = all(not isinstance(x, STensor) or x.time != "loop" for x in others)
        if sums and fixed and (scaled or (name in ("add", "sub") and len(waiting) == 2)):
            return "sum"
        raise self._unfinished(waiting[0], where)

    def _accumulate(self, kind: str, x: STensor, shift: STensor | None) -> STensor:
        what = "accum" if kind == "sum" else "accum_max"
        self._own(x, what)
        if self.forloop_range == 1:
            return x
        if x.time != "loop":
            raise errors.GraphError(
                f"{what}: {x} is the same in every trip of the loop; "
                "use it as it is, or give an input that it is made of an fmap"
            )
        if x.pending and x.pending != kind:
            raise self._unfinished(x, what)
        if (x.running and x.running.node) is not (shift and shift.node):
            have = "none" if x.running is None else f"%{x.running.name}"
            raise errors.GraphError(
                f"{what}: {x} depends on the running maximum {have}, its shift must be that one "
                + ("(accum(x, shift=…))" if kind == "sum" else "(only sums have one)")
            )
        walked = [d for d, a in enumerate(x.axes) if a is not None and a.root.walked]
        if not walked and not x.pending:
            raise errors.GraphError(
                f"{what}: {x} depends on the loop by a running maximum alone; use it after the loop"
            )
        node = Node("accumulate", (replace(x, pending=None),), (("kind", kind),), shift=shift)
        made = STensor(
            self._name("acc"),
            node,
            x.axes,
            x.dims,
            x.splits,
            "after",
            half=kind if walked else None,
            owner=self,
        )
        return self._checked(made, what)

    def _meet(self, a: Span, b: Span, where: str, shown: Sequence[STensor]) -> Span:
        a, b = a.root, b.root
        if a is b:
            return a
        operands = " and ".join(map(str, shown))
        if (a.size, a.grid, a.walked) != (b.size, b.grid, b.walked):
            raise errors.GraphError(
                f"{where}: {operands}: {a.first} (size {a.size}, {a.how}) meets {b.first} (size {b.size}, {b.how}); "
                "what meets must be cut alike, by imap and by fmap"
            )
        b.joined, a.reduced = a, a.reduced or b.reduced
        return a

    def _same_pieces(self, known: Span | None, a: Span, what: str) -> Span:
        """Dims cut by the same grid dim, and dims that the loop walks, are one axis: block i and trip i have piece i of each."""
        if known is None:
            return a
        known = known.root
        if (known.size, known.grid, known.walked) != (a.size, a.grid, a.walked):
            raise errors.GraphError(
                f"{what} {known.first} (size {known.size}, {known.how}) and {a.first} (size {a.size}, {a.how}); "
                "these must be of one size and cut alike"
                + ("" if "loop" in what else ", or have a grid dim each")
            )
        a.joined = known
        return known

    def _checked(self, t: STensor, where: str) -> STensor:
        roots = [a.root for a in t.axes if a is not None]
        twice = next((a for n, a in enumerate(roots) if a in roots[:n]), None)
        if twice is not None:
            by = (
                f"grid dim {twice.grid} cuts"
                if twice.grid
                else "the loop walks"
                if twice.walked
                else "the same input has"
            )
            way = (
                "cut or walk one of them"
                if twice.grid or twice.walked
                else "load the tensor a second time with new_input"
            )
            raise errors.GraphError(
                f"{where}: {by} two dims of the result {errors.shape(t.dims)}, so blocks hold its diagonal only; {way}"
            )
        return t

    def _map(self, given: Map | None, rank: int, where: str, what: str) -> dict[str, int]:
        names = GRID_DIMS[: len(self.grid_dim)]
        if given is None:
            return {}
        if not isinstance(given, (Mapping, Sequence)) or isinstance(given, str):
            raise errors.GraphError(
                f"{where}: {what} {given!r} is neither a dict like {{'x': 0}} nor a tuple of dims"
            )
        pairs = (
            dict(given) if isinstance(given, Mapping) else dict(zip(GRID_DIMS, given, strict=False))
        )
        if len(given) > 3 or any(g not in names and d not in (None, -1) for g, d in pairs.items()):
            raise errors.GraphError(
                f"{where}: {what} {given!r} names a grid dim that is not there; grid_dim {errors.shape(self.grid_dim)} "
                f"has {', '.join(names)}"
            )
        # -1 is a replica, as in the paper's code, so dims count from the left only
        bad = next(
            (
                d
                for d in pairs.values()
                if isinstance(d, bool)
                or not isinstance(d, (int, type(None)))
                or (d is not None and not -1 <= d < rank)
            ),
            None,
        )
        if bad is not None:
            raise errors.GraphError(
                f"{where}: {what} names dim {bad!r}; use 0 to {rank - 1}, or None for a replica"
            )
        return {g: d for g, d in pairs.items() if d is not None and d != -1}

    def _size(self, grid: str | None) -> int:
        return 1 if grid is None else self.grid_dim[GRID_DIMS.index(grid)]

    def _own(self, t: Any, where: str) -> STensor:
        if not isinstance(t, STensor):
            raise errors.GraphError(
                f"{where}: expected a tile of this block graph, got {type(t).__name__}; make one with bg.new_input"
            )
        if t.owner is not self:
            raise errors.GraphError(
                f"{where}: {t} belongs to another block graph; load what it needs with new_input"
            )
        return t

    def _unfinished(self, t: STensor, where: str) -> errors.GraphError:
        if t.half:
            d = next(d for d, a in enumerate(t.axes) if a is not None and a.root.walked)
            return errors.GraphError(
                f"{where}: {t} was accumulated tile by tile and still has the walked dim {d}; "
                f"first reduce it: reduction(x, {d}, {t.half!r})"
            )
        return errors.GraphError(
            f"{where}: {t} is the {t.pending} over one trip of the loop only; accumulate it first "
            f"({'accum' if t.pending == 'sum' else 'accum_max'}), or do not walk that dim"
        )

    def _name(self, base: str) -> str:
        self._count += 1
        return f"{base}{self._count}" if base in ("v", "acc") else base

    # -- the whole ------------------------------------------------------------------------------------------------------------

    def build(self, operands: Sequence[DTensor] | None = None) -> BlockGraph:
        """The block graph. Sources are positions in `operands`: the tensors given to new_input, in any order, or others that take
        their places in the order of their first new_input; None is that order. Errors: GraphError."""
        for g, n in zip(GRID_DIMS, self.grid_dim, strict=False):
            if n > 1 and g not in self._cut:
                raise errors.GraphError(
                    f"block graph: grid dim {g} of {n} cuts no input, so its blocks would all do the same; "
                    "name it in an imap, or leave it out of grid_dim"
                )
        if self.forloop_range > 1 and self._walked is None:
            raise errors.GraphError(
                f"block graph: the loop of {self.forloop_range} trips walks no input; "
                "give one an fmap, or forloop_range=1"
            )
        if not self.outputs:
            raise errors.GraphError("block graph: there is no output; name one with new_output")
        return Emission(self, self._positions(operands)).block_graph()

    def _positions(self, operands: Sequence[DTensor] | None) -> list[int]:
        mine = self._operands
        if operands is None:
            return list(range(len(mine)))
        at = [next((k for k, t in enumerate(operands) if _same(t, m)), None) for m in mine]
        found = [k for k in at if k is not None]
        if len(found) == len(mine):
            return found
        if found or len(operands) != len(mine):
            names = ", ".join(t.name for t in mine)
            raise errors.GraphError(
                f"block graph: reads {names}; {len(operands)} operands are given that are not those; "
                "pass these tensors, or as many others in this order"
            )
        return list(range(len(mine)))

    def schedule(self) -> dict[str, int]:
        """Elements of each axis that a block holds at a time when grid_dim and forloop_range are kept: axis name → tile.

        Errors: GraphError where such a tile is no power of two; kernels have no others."""
        block = self.build()
        grid = {
            a.name: 1
            if block.axis_split_by(a.name)
            else a.size // self._size(self._grid_of(block, a))
            for a in block.named(Role.GRID)
        }
        loop = {
            a.name: block.split_size(a.name) // self.forloop_range for a in block.named(Role.LOOP)
        }
        for name, tile in (grid | loop).items():
            if tile & (tile - 1):
                raise errors.GraphError(
                    f"schedule: {tile} elements of axis {name} in a block are not a power of two; choose a grid_dim "
                    "and a forloop_range that leave one, or leave the tiles to the tuner"
                )
        held = {
            a.name: 1 << (block.split_size(a.name) - 1).bit_length() for a in block.named(Role.TILE)
        }
        return {a.name: (grid | loop | held)[a.name] for a in block.axes}

    def _grid_of(self, block: BlockGraph, axis: Axis) -> str | None:
        names = Emission(self, self._positions(None)).names()
        return next((d.grid for d, name in names.items() if name == axis.name), None)


table.add_methods(BlockGraphBuilder, "_elementwise")


def _same(a: DTensor, b: DTensor) -> bool:
    return a.graph_uid == b.graph_uid and a.index == b.index


def new_block_graph(
    grid_dim: int | Sequence[int] = (1,), forloop_range: int = 1
) -> BlockGraphBuilder:
    """An empty block graph: grid_dim, how many blocks along each of one to three grid dims x, y, z; forloop_range, trips of the
    loop. The number of threads is the schedule's. Errors: GraphError."""
    dims = tuple(grid_dim) if isinstance(grid_dim, Sequence) else (grid_dim,)
    if not 1 <= len(dims) <= 3 or any(
        isinstance(d, bool) or not isinstance(d, int) or d < 1 for d in dims
    ):
        raise errors.GraphError(
            f"new_block_graph: grid_dim {grid_dim!r} is not one to three positive integers"
        )
    if isinstance(forloop_range, bool) or not isinstance(forloop_range, int) or forloop_range < 1:
        raise errors.GraphError(
            f"new_block_graph: forloop_range {forloop_range!r} is not a positive integer"
        )
    return BlockGraphBuilder(dims, forloop_range)
