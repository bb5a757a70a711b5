"""A second executor of µGraphs: whole arrays with named axes, without blocks or tiles.

It shares no code with graph/execute.py. A value may carry an axis and the number of its split. Such
a value is stored by element of the axis, because the element determines the split. A running
maximum is the final maximum, as in the definition of a shifted sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mirage_hf.graph.block import BlockGraph
from mirage_hf.graph.kernel import DTensor, KernelGraph

SCALAR = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x: -x,
    "pow": lambda x, y: x**y,
    "max": torch.maximum,
    "min": torch.minimum,
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "rsqrt": lambda x: 1 / torch.sqrt(x),
    "square": lambda x: x * x,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": lambda x: x.clamp(min=0),
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "clamp": lambda x, min=-math.inf, max=math.inf: x.clamp(min, max),
    "cast": lambda x, dtype=None: x,
    "lookup": lambda x, values: torch.tensor(values, dtype=x.dtype)[
        x.floor().clamp(0, len(values) - 1).long()
    ],
    "bits": lambda x, start, count: (
        torch.div(x.floor() % 256, 2 ** (start.floor() % 8), rounding_mode="floor") % 2**count
    ),
    "select": lambda m, x, y: torch.where(m == 0, y, x),
    "ratio": lambda x, y: torch.where(y == 0, torch.zeros_like(x / y), x / y),
}


@dataclass(frozen=True)
class Named:
    t: torch.Tensor
    axes: tuple[str, ...]

    def along(self, axes: tuple[str, ...]) -> torch.Tensor:
        """Return the array with a dim for each of `axes`, of size 1 for an axis that it lacks."""
        t = self.t.permute([self.axes.index(a) for a in axes if a in self.axes])
        return t[tuple(slice(None) if a in self.axes else None for a in axes)]


class _Block:
    def __init__(self, g: BlockGraph, dtype: torch.dtype):
        self.g, self.dtype = g, dtype
        self.size = {a.name: a.size for a in g.axes}
        self.parts = {a.name: a.split_axis for a in g.axes if a.split_axis}

    def length(self, axis: str) -> int:
        return math.ceil(self.size[axis] / self.size[self.parts[axis]])

    def apply(self, fn: str, args, attrs) -> Named:
        axes = {a for x in args if isinstance(x, Named) for a in x.axes}
        for axis, number in self.parts.items():
            if axis in axes and number in axes:  # by element: look the part up
                where = torch.arange(self.size[axis]) // self.length(axis)
                args = [self._by_element(x, axis, number, where) for x in args]
                axes -= {number}
        order = tuple(sorted(axes))
        values = [
            x.along(order) if isinstance(x, Named) else torch.tensor(float(x), dtype=self.dtype)
            for x in args
        ]
        return Named(SCALAR[fn](*values, **attrs), order)

    @staticmethod
    def _by_element(x, axis, number, where):
        if not isinstance(x, Named) or number not in x.axes:
            return x
        d = x.axes.index(number)
        return Named(x.t.index_select(d, where), (*x.axes[:d], axis, *x.axes[d + 1 :]))

    def reduce(self, kind: str, x: Named, axis: str) -> Named:
        d = x.axes.index(axis)
        if axis not in self.parts:
            t = x.t.sum(d) if kind == "sum" else x.t.amax(d)
            return Named(t, x.axes[:d] + x.axes[d + 1 :])
        n = self.length(axis)
        pieces = [
            x.t.narrow(d, lo, min(n, self.size[axis] - lo)) for lo in range(0, self.size[axis], n)
        ]
        t = torch.stack([p.sum(d) if kind == "sum" else p.amax(d) for p in pieces], d)
        return Named(t, (*x.axes[:d], self.parts[axis], *x.axes[d + 1 :]))

    @staticmethod
    def _rotated(t: torch.Tensor, d: int, how: str, width: int | None) -> torch.Tensor:
        """Rotate one element at a time."""
        n = t.shape[d] if width is None else width
        what, which = how.split()
        partner = {
            k: k if k >= n else k ^ 1 if which == "pairs" else (k + n // 2) % n
            for k in range(t.shape[d])
        }
        rows = t.unbind(d)
        if what == "swap":
            return torch.stack([rows[p] for p in partner.values()], d)
        return torch.stack([-rows[k] if k < p else rows[k] for k, p in partner.items()], d)

    def run(self, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        values: dict[str, Named] = {}
        for i in self.g.inputs:
            if i.bounds:
                named = tuple(a for a in i.axes if a)
                shape = [*(self.size[a] for a in named), 1]
                lo, hi = (operands[s].reshape(shape) for s in i.sources)
                at = torch.arange(self.size[i.bounds])
                values[i.name] = Named(((at >= lo) * (at < hi)).to(self.dtype), (*named, i.bounds))
                continue
            named = tuple(a for a in i.read_axes if a)
            arrays = [operands[s] for s in i.sources]
            if i.taken:
                index = operands[i.taken.index].long()
                arrays = [_taken(x, index, i.taken.dim) for x in arrays]
            sources = [
                x.reshape([n for n, a in zip(x.shape, i.read_axes, strict=True) if a])
                for x in arrays
            ]
            whole = torch.cat(sources, named.index(i.joined)) if len(sources) > 1 else sources[0]
            if i.rotation:
                whole = self._rotated(
                    whole, named.index(i.rotation.axis), i.rotation.how, i.rotation.width
                )
            if i.padding:
                d = named.index(i.padding.axis)
                more = [
                    self.size[i.padding.axis] - i.padding.size if n == d else s
                    for n, s in enumerate(whole.shape)
                ]
                whole = torch.cat([whole, torch.full(more, i.padding.value, dtype=self.dtype)], d)
            values[i.name] = Named(whole, named)
        for stage in self.g.stages:
            todo = {op.out: op for op in stage.body} | {a.out: a for a in stage.accumulators}
            left = list(todo.values())
            while left:  # a running maximum may be read before it is listed
                missing = {op.out for op in left}
                ready = next(
                    op
                    for op in left
                    if not missing & set(op.args if hasattr(op, "args") else (op.arg,))
                )
                left.remove(ready)
                if hasattr(ready, "kind"):
                    values[ready.out] = self.reduce(ready.kind, values[ready.arg], stage.loop)
                elif ready.over is not None:
                    values[ready.out] = self.reduce(ready.fn, values[ready.args[0]], ready.over)
                else:
                    args = [values[a] if isinstance(a, str) else a for a in ready.args]
                    values[ready.out] = self.apply(ready.fn, args, dict(ready.attrs))
        outs = []
        for o in self.g.outputs:
            named = tuple(a for a in o.axes if a)
            t = values[o.value].along(named).expand([self.size[a] for a in named])
            outs.append(t.reshape([1 if a is None else self.size[a] for a in o.axes]))
        return outs


def _norm(x, weight, bias, eps, centre):
    if centre:
        x = x - x.sum(-1, keepdim=True) / x.shape[-1]
    y = x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _taken(x, index, dim):
    """Take one element of the index after the other."""
    parts = [x.select(dim, int(n)) for n in index.reshape(-1)]
    return torch.stack(parts, dim).reshape(*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])


def _masked(x, lo, hi, dim):
    at = torch.arange(x.shape[dim]).reshape(
        [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    )
    return x.masked_fill((at < lo) | (at >= hi), 0.0)


def run(
    graph: KernelGraph,
    inputs: list[torch.Tensor],
    dtype: torch.dtype = torch.float64,
    run_block=None,
) -> list[torch.Tensor]:
    """Compute the outputs of a program or of a µGraph's kernels in `dtype`.

    Block graphs are run by `run_block` if it is given.
    """
    values = {t.index: x.to(dtype) for t, x in zip(graph.inputs, inputs, strict=True)}
    for op in graph.ops:
        args = [
            values[x.index] if isinstance(x, DTensor) else torch.tensor(float(x), dtype=dtype)
            for x in op.inputs
        ]
        a = dict(op.attrs)
        if op.block is not None:
            outs = run_block(op.block, args) if run_block else _Block(op.block, dtype).run(args)
        elif op.name in SCALAR:
            outs = [SCALAR[op.name](*args, **a)]
        elif op.name == "matmul":
            outs = [torch.einsum("...mk,...kn->...mn", *args)]
        elif op.name == "reduction":
            total = (
                args[0].amax(a["dim"], keepdim=True)
                if a["kind"] == "max"
                else args[0].sum(a["dim"], keepdim=True)
            )
            outs = [total / args[0].shape[a["dim"]] if a["kind"] == "mean" else total]
        elif op.name == "softmax":
            e = torch.exp(args[0] - args[0].amax(a["dim"], keepdim=True))
            if len(args) == 3:
                e = _masked(torch.exp(args[0]), *args[1:], a["dim"])
                outs = [e / e.sum(a["dim"], keepdim=True).clamp(min=1e-300)]
                values[op.outputs[0].index] = outs[0]
                continue
            outs = [e / e.sum(a["dim"], keepdim=True)]
        elif op.name == "within":
            outs = [_masked(*args, a["dim"])]
        elif op.name in ("rms_norm", "layer_norm"):
            outs = [_norm(args[0], *[*args[1:], None, None][:2], a["eps"], op.name == "layer_norm")]
        elif op.name == "take":
            outs = [_taken(args[0], args[1].long(), a["dim"])]
        elif op.name == "permute":
            outs = [args[0].permute(a["order"])]
        elif op.name == "reshape":
            outs = [args[0].reshape(a["dims"])]
        elif op.name == "concat":
            outs = [torch.cat(args, a["dim"])]
        elif op.name == "slice":
            outs = [args[0].narrow(a["dim"], a["start"], a["stop"] - a["start"])]
        elif op.name == "rope":
            x, cos, sin = args
            w = cos.shape[-1]
            first = torch.arange(0, w, 2) if a["interleaved"] else torch.arange(w // 2)
            second = first + (1 if a["interleaved"] else w // 2)
            y = x.clone()
            y[..., first] = x[..., first] * cos[..., first] - x[..., second] * sin[..., first]
            y[..., second] = x[..., second] * cos[..., second] + x[..., first] * sin[..., second]
            outs = [y]
        elif op.name == "cache_append":
            cache, rows, at = args
            y = cache.clone()
            for n in range(cache.shape[0]):
                first = int(at.reshape(-1)[n if at.numel() > 1 else 0])
                for r in range(rows.shape[-2]):
                    y[n][..., first + r, :] = rows[n][..., r, :]
            outs = [y]
        else:
            raise NotImplementedError(op.name)
        values |= {t.index: y for t, y in zip(op.outputs, outs, strict=True)}
    return [values[t.index] for t in graph.outputs]
